"""Memory that kernels read and write, of the host or of a CUDA device. Loads neither PyTorch nor this project."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


class HostMemory:
    """Buffers are byte arrays; outputs start poisoned and end in a guard that no kernel may touch."""

    device = "cpu"
    guard = 64

    def put(self, array: np.ndarray) -> Any:
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return np.full(bytes_of(shape, dtype) + self.guard, 0xFF, dtype=np.uint8)

    def pointer(self, buffer: Any) -> int:
        return int(buffer.ctypes.data)

    def fetch(self, buffer: Any, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """An output as an array, which may fill the buffer's start only; nothing lies behind it."""
        size = bytes_of(shape, dtype)
        content = self._content(buffer)
        assert (content[size:] == 0xFF).all(), "a kernel wrote past the end of its output"
        return content[:size].view(dtype).reshape(shape)

    def _content(self, buffer: Any) -> np.ndarray:
        return buffer


class DeviceMemory(HostMemory):
    """The same on the current CUDA device, through torch."""

    device = "cuda"

    def put(self, array: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(super().put(array)).cuda()

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self.put(super().empty(shape, dtype))

    def pointer(self, buffer: Any) -> int:
        return int(buffer.data_ptr())

    def _content(self, buffer: Any) -> np.ndarray:
        return buffer.cpu().numpy()


MEMORIES = {memory.device: memory for memory in (HostMemory, DeviceMemory)}


def bytes_of(shape: Sequence[int], dtype: Any) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize
