"""Long service: memory and file descriptors stay where they are, over predictions and over opening and closing.

Short by default; `--long` makes ten thousand predictions and two hundred openings of each runtime.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from process_memory import resident

import algm_deploy
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import RuntimeUnavailableError
from algm_deploy.predictor import Predictor
from algm_deploy.runners.registry import row_of

RUNTIMES = (
    "torch",
    "onnxruntime-cpu",
    pytest.param("torch on cuda", marks=pytest.mark.gpu),
    pytest.param("onnxruntime-cuda", marks=pytest.mark.gpu),
    pytest.param("tensorrt", marks=pytest.mark.gpu),
    pytest.param("tensorrt-rtx", marks=pytest.mark.gpu),
)
MOST_BYTES = 4 << 20  # what an allocator may keep at its own time; a leak of 1 KiB a call is 10 MB in the long form


class Used(NamedTuple):
    """What the process holds: bytes of memory, open files, threads, bytes of the GPU's memory."""

    memory: int
    files: int
    threads: int
    gpu: int


def entries(name: str) -> int:
    return len(list(Path("/proc/self", name).iterdir()))


def used() -> Used:
    memory = resident()
    gpu = 0
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()  # of all libraries in the process, PyTorch's own count is not enough
        gpu = total - free
    return Used(memory, entries("fd"), entries("task"), gpu)


@pytest.fixture
def settled(record_property: Callable[[str, object], None]) -> Callable[[Used, int], None]:
    """Compares what is used with what was used so many steps before, and keeps the figures in the report of the run."""

    def check(before: Used, steps: int) -> None:
        after = used()
        grown = Used(*(new - old for new, old in zip(after, before, strict=True)))
        record_property("grown", {**grown._asdict(), "steps": steps})
        assert grown.memory < MOST_BYTES, grown
        assert grown.files <= 0, grown
        assert grown.threads <= 0, grown
        assert grown.gpu <= MOST_BYTES, grown

    return check


@pytest.fixture(scope="module")
def photos() -> list[np.ndarray]:
    """Photos of many token counts and several sizes."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(24):
        photo = rng.integers(0, 256, (128 + 8 * (index % 3), 128 + 16 * (index % 4), 3), dtype=np.uint8)
        photo[:, : 4 * index + 8] = 100
        made.append(photo)
    return made


@pytest.fixture(scope="module")
def opened(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Predictor]:
    """The tiny network on a runtime; one that is built for it where the portable graph does not run."""

    @cache
    def built(name: str) -> Bundle:
        if row_of(name).own is None or not row_of(name).needs_gpu:
            return tiny_bundle
        copy = shutil.copytree(tiny_bundle.path, tmp_path_factory.mktemp("soak") / "bundle")
        algm_deploy.build(copy, name)
        return Bundle.open(copy)

    def load(runtime: str) -> Predictor:
        name, _, device = runtime.partition(" on ")
        on_gpu = device == "cuda" or row_of(name).needs_gpu
        if on_gpu and int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
            pytest.skip("needs the GPU alone, whose memory is measured: run with -n 0")
        try:
            return algm_deploy.load(built(name), name, device=device or ("cpu" if name == "torch" else None))
        except RuntimeUnavailableError as error:
            pytest.skip(str(error))

    return load


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_predictions(
    opened: Callable[[str], Predictor],
    photos: list[np.ndarray],
    runtime: str,
    long_form: bool,
    settled: Callable[[Used, int], None],
) -> None:
    warm, steps = (1000, 10_000) if long_form else (100, 200)
    with opened(runtime) as network:
        for step in range(warm + steps):
            if step == warm:
                before = used()
            labels = network.predict(photos[step % len(photos)])
            assert labels.shape == photos[step % len(photos)].shape[:2]
        settled(before, steps)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_openings(
    opened: Callable[[str], Predictor],
    photos: list[np.ndarray],
    runtime: str,
    long_form: bool,
    settled: Callable[[Used, int], None],
) -> None:
    warm, steps = (20, 200) if long_form else (8, 10)  # allocators settle first
    for step in range(warm + steps):
        if step == warm:
            before = used()
        with opened(runtime) as network:
            network.predict(photos[step % len(photos)])
    settled(before, steps)


def test_a_leaked_file_is_seen(settled: Callable[[Used, int], None]) -> None:
    before = used()
    file = Path("/dev/null").open()  # noqa: SIM115 - it leaks
    with pytest.raises(AssertionError, match="files=1"):
        settled(before, 1)
    file.close()


def test_leaked_memory_is_seen(settled: Callable[[Used, int], None]) -> None:
    before = used()
    kept = np.ones(16 * MOST_BYTES, np.uint8)
    with pytest.raises(AssertionError, match=r"memory=[1-9]\d{7}\b"):  # the message names all figures: this is the one
        settled(before, 1)
    del kept
