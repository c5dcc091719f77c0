"""Runners on another device than the calling thread's current one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import export
from algm_deploy.errors import BundleError, RuntimeUnavailableError
from algm_deploy.native_libraries import find_library
from algm_deploy.ops.native_kernels import use_kernels
from algm_deploy.runners.contract import Runner, runner, runner_type
from algm_deploy.runners.onnxruntime.runner import LIBRARY, OnnxRuntimeCudaRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
NAMES = ["labels", "token_counts", "token_map_clap_1", "token_map_gbm_3"]
BATCHES = 1, 3, 8  # ONNX Runtime replays graphs for the first two


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def exported(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    settings = {"output": "labels", "precision": request.param}
    return export(tiny_checkpoint, tmp_path_factory.mktemp("devices") / "bundle", None, settings).bundle


@pytest.fixture(scope="module", params=["torch", "onnxruntime-cuda"])
def built(request: pytest.FixtureRequest, exported: Bundle) -> tuple[Bundle, str]:
    try:
        runner_type(request.param).require_builder()
    except RuntimeUnavailableError as error:
        pytest.skip(str(error))
    if request.param == "onnxruntime-cuda" and find_library(LIBRARY) is None:
        pytest.skip(f"no graphs without the custom operators: algm-deploy build-native {LIBRARY}")
    runner_type(request.param).build(exported)
    return Bundle.open(exported.path), request.param


@pytest.fixture
def second(built: tuple[Bundle, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """Opened on the second device by a thread that then goes back to the first."""
    monkeypatch.setattr(OnnxRuntimeCudaRunner, "graph_images", 4)
    with ExitStack() as stack:
        with torch.cuda.device(1):
            run = stack.enter_context(runner(*built))
        yield run
    assert torch.cuda.current_device() == 0, "closing it changed the caller's current device"


def test_kernels_run_where_their_tensors_are() -> None:
    if use_kernels() is None:
        pytest.skip("the kernel library is not built here: algm-deploy build-native kernels")
    scores = torch.randn(1, 16, 5, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(1, 17)[None]
    first, second = (
        torch.ops.algm.label_map(scores.to(device), rows.to(device), 1, (4, 4), (64, 64))
        for device in ("cuda:0", "cuda:1")
    )
    assert second.device == torch.device("cuda:1")
    assert torch.equal(first.cpu(), second.cpu())


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name in NAMES:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_results_are_those_of_the_first_device(built: tuple[Bundle, str], second: Runner, blob_images: Any) -> None:
    batches = [blob_images(count) for count in BATCHES]
    with runner(*built) as first:
        expected = [first.infer({"image": batch}, NAMES) for batch in batches]

    def call(batch: np.ndarray) -> dict[str, np.ndarray]:
        found = second.infer({"image": batch}, NAMES)
        assert torch.cuda.current_device() == 0, "the caller's current device is another than before"
        return found

    for _ in range(3):  # as it comes, captured, replayed
        for batch, wanted in zip(batches, expected, strict=True):
            assert_equal(call(batch), wanted)
    with ThreadPoolExecutor(2) as pool:
        for found, wanted in zip(pool.map(call, batches * 2), expected * 2, strict=True):
            assert_equal(found, wanted)


def test_tensors_stay_on_the_second_device(second: Runner, blob_images: Any) -> None:
    image = torch.from_numpy(blob_images(3)).to("cuda:1")
    expected = second.infer({"image": image.cpu().numpy()}, NAMES)
    before = torch.cuda.memory_allocated(0)
    found = second.infer_device({"image": image}, NAMES)
    assert {tensor.device for tensor in found.values()} == {torch.device("cuda:1")}
    assert torch.cuda.memory_allocated(0) == before
    assert_equal({name: tensor.cpu().numpy() for name, tensor in found.items()}, expected)
    with pytest.raises(BundleError, match="expected an image in the memory of cuda:1, got one in that of cuda:0"):
        second.infer_device({"image": image.to("cuda:0")}, NAMES)


def test_a_device_by_its_name(built: tuple[Bundle, str], blob_images: Any) -> None:
    """Without making it the current one."""
    images = blob_images(3)
    with runner(*built, "cuda:1") as named, runner(*built) as first:
        assert (str(named.device), str(first.device)) == ("cuda:1", "cuda:0")
        assert_equal(named.infer({"image": images}, NAMES), first.infer({"image": images}, NAMES))
    assert torch.cuda.current_device() == 0
    beyond = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(RuntimeUnavailableError, match=f"expected {beyond} for {built[1]}, PyTorch finds"):
        runner(*built, beyond).__enter__()
