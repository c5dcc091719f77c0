"""Calls CPU kernels of a library as it is asked to, a line of JSON each. Runs under a sanitizer, which ends it at the
first fault; so it loads NumPy and nothing else. Memory is as long as what it holds, to the byte."""

from __future__ import annotations

import ctypes
import json
import sys
from base64 import b64decode, b64encode

import numpy as np

library = ctypes.CDLL(sys.argv[1])
for line in sys.stdin:
    name, params, arguments = json.loads(line)
    memory, values = [], []
    for argument in arguments:
        if isinstance(argument, list):
            content, before = b64decode(argument[0]), argument[1]
            buffer = np.empty(before + len(content), np.uint8)[before:]
            buffer[:] = np.frombuffer(content, np.uint8)
            memory.append(buffer)
            values.append(ctypes.c_void_p(buffer.ctypes.data))
        else:
            values.append(ctypes.c_void_p() if argument is None else ctypes.c_int64(argument))
    struct = ctypes.create_string_buffer(b64decode(params), len(b64decode(params)))
    status = getattr(library, f"algm_cpu_{name}")(struct, *values, None)
    sys.stdout.write(json.dumps([status, [b64encode(buffer.tobytes()).decode() for buffer in memory]]) + "\n")
    sys.stdout.flush()
