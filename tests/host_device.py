"""Host memory in place of a GPU, for runners that take their device from `Cuda`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from native_build import built

from algm_deploy.ops.native_kernels import Kernels
from algm_deploy.runners.tensorrt.runner import Cuda


class HostDevice(Cuda):
    """Host memory in place of a GPU of compute capability 8.9."""

    device = torch.device("cpu")

    capability = 8, 9

    def open(self, device: torch.device) -> tuple[int, int]:
        return self.capability

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __init__(self) -> None:
        self.streams: list[Any] = []  # that were taken and not given back
        self.made = 0

    def new_stream(self) -> Any:
        self.made += 1
        self.streams.append(SimpleNamespace(cuda_stream=self.made))
        return self.streams[-1]

    def end_stream(self, stream: Any) -> None:
        self.streams.remove(stream)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        yield

    def upload(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def download(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(tensors)

    def kernels(self) -> Kernels:
        return Kernels(built("kernels"), "cpu")

    def hand_over(self, stream: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        pass
