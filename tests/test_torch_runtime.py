"""What `benchmarks/torch_runtime.py` times as compiled is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

LIMIT = 8  # compilations of one function, as PyTorch has it


@pytest.fixture
def compiling(root_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    pytest.importorskip("onnxruntime")
    monkeypatch.syspath_prepend(root_dir / "benchmarks")
    before = set(sys.modules)
    yield import_module("torch_runtime").compiling
    for name in set(sys.modules) - before:
        if (root_dir / "benchmarks" / f"{name}.py").exists():
            del sys.modules[name]
    torch._dynamo.reset()


def compile_networks(first: int, count: int) -> None:
    """As many networks as are told, all by the same function, for pictures of other sizes."""

    def network(image: Tensor) -> Tensor:
        return image + 1

    compiled = torch.compile(network, dynamic=False, backend="eager")
    for side in range(first, first + count):
        compiled(torch.zeros(side))


def test_each_network_has_the_whole_limit(compiling: Callable[[], AbstractContextManager[None]]) -> None:
    for first in (2, 20):
        with compiling():
            compile_networks(first, LIMIT)


def test_modules_as_they_are_are_not_taken_for_compiled_ones(
    compiling: Callable[[], AbstractContextManager[None]],
) -> None:
    assert torch._dynamo.config.recompile_limit == LIMIT
    with compiling(), pytest.raises(FailOnRecompileLimitHit):
        compile_networks(2, LIMIT + 1)
    torch._dynamo.reset()
    compile_networks(2, LIMIT + 1)  # elsewhere it is as ever
