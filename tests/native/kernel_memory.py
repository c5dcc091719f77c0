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

    def __init__(self, shifted: bool = False) -> None:
        """Shifted: arrays are aligned to their elements and no better."""
        self.shifted = shifted

    def put(self, array: np.ndarray) -> Any:
        flat = np.ascontiguousarray(array).reshape(-1)
        return self._placed(flat.view(np.uint8), flat.itemsize)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        content = np.full(bytes_of(shape, dtype) + self.guard, 0xFF, dtype=np.uint8)
        return self._placed(content, np.dtype(dtype).itemsize)

    def _placed(self, content: np.ndarray, itemsize: int) -> Any:
        before = itemsize if self.shifted and itemsize > 1 else 0
        return self._moved(np.concatenate([np.zeros(before, np.uint8), content]))[before:]

    def _moved(self, content: np.ndarray) -> Any:
        return content

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

    def _moved(self, content: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(content).cuda()

    def pointer(self, buffer: Any) -> int:
        return int(buffer.data_ptr())

    def _content(self, buffer: Any) -> np.ndarray:
        return buffer.cpu().numpy()


MEMORIES = {memory.device: memory for memory in (HostMemory, DeviceMemory)}


def bytes_of(shape: Sequence[int], dtype: Any) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize
