"""Calls CPU kernels of a library as it is asked to over its standard input. Runs under a sanitizer, which ends it at the
first fault; so it loads NumPy and nothing else. Memory is as long as what it holds, to the byte."""

from __future__ import annotations

import ctypes
import pickle
import sys

import numpy as np

library = ctypes.CDLL(sys.argv[1])
while True:
    try:
        name, params, arguments = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    memory, values = [], []
    for argument in arguments:
        if isinstance(argument, tuple):
            content, before = argument
            buffer = np.empty(before + len(content), np.uint8)[before:]
            buffer[:] = np.frombuffer(content, np.uint8)
            memory.append(buffer)
            values.append(ctypes.c_void_p(buffer.ctypes.data))
        else:
            values.append(ctypes.c_void_p() if argument is None else ctypes.c_int64(argument))
    status = getattr(library, f"algm_cpu_{name}")(ctypes.create_string_buffer(params, len(params)), *values, None)
    pickle.dump((status, [buffer.tobytes() for buffer in memory]), sys.stdout.buffer)
    sys.stdout.buffer.flush()
