"""Calls one kernel of a library on the GPU, and fails where the kernel does.

It has a process of its own, as CUDA's driver reads once, from the environment, whether it may translate PTX.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from kernel_arrays import KernelError, Kernels
from kernel_memory import DeviceMemory

kernels = Kernels(Path(sys.argv[1]), DeviceMemory())
try:
    kernels.gelu(np.ones((1, 1, 8), np.float16), np.zeros(8, np.float32))
except KernelError as error:
    sys.exit(str(error))
