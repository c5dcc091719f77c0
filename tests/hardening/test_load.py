"""Many predictions, little memory, no permission, no package: survived and explained."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from algm_deploy.bundle import Bundle
from algm_deploy.errors import ExecutionError, RuntimeUnavailableError
from algm_deploy.runners.contract import Array, Runner, runner
from algm_deploy.runners.onnxruntime import ORT_ERRORS

CPU_RUNTIMES = ("torch", "onnxruntime-cpu")


@pytest.fixture(scope="module")
def bundle(small_bundle: Callable[..., Bundle]) -> Bundle:
    return small_bundle()


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    return path


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("runtime", CPU_RUNTIMES)
def test_a_thousand_predictions_need_no_more_memory(bundle: Bundle, runtime: str) -> None:
    """Token counts differ from picture to picture, which is what allocators and caches of plans grow by."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (50, 1, 3, 64, 64), dtype=np.uint8)
    for index, picture in enumerate(pictures):
        picture[..., : index + 8] = 100
    counts = set()
    with runner(bundle, runtime) as run:
        for step in range(1200):
            if step == 200:
                before = resident_bytes()
            counts.add(tuple(run.infer({"image": pictures[step % 50]})["token_counts"][0]))
        grown = resident_bytes() - before
    assert len(counts) > 5
    assert grown < 4 << 20, f"{grown / 1e6:.1f} MB more"


@pytest.mark.parametrize("runtime", CPU_RUNTIMES)
def test_the_same_bits_on_every_run_and_in_every_session(bundle: Bundle, runtime: str) -> None:
    picture = np.random.default_rng(1).integers(0, 256, (3, 3, 64, 64), dtype=np.uint8)
    results = []
    for _ in range(3):
        with runner(bundle, runtime) as run:
            results += [run.infer({"image": picture})["scores"].tobytes() for _ in range(5)]
    assert len(set(results)) == 1


# --- memory ----------------------------------------------------------------------------------------------------------


def too_much_for_torch() -> None:
    torch.empty(1 << 48)


def too_much_for_numpy() -> None:
    np.empty(1 << 48)


def too_much_for_onnxruntime() -> None:
    size = numpy_helper.from_array(np.array([1 << 44]), "size")
    graph = helper.make_graph(
        [helper.make_node("ConstantOfShape", ["size_in"], ["y"])],
        "large",
        [helper.make_tensor_value_info("size_in", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, {"size_in": numpy_helper.to_array(size)})


def failing(bundle: Bundle, action: Callable[[], None]) -> Runner:
    class Failing(Runner):
        runtime = "torch"
        failures = (MemoryError, RuntimeError, *ORT_ERRORS)

        def _open(self) -> None:
            pass

        def _close(self) -> None:
            pass

        def _infer(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
            action()
            return {}

    return Failing(bundle)


@pytest.mark.parametrize("action", [too_much_for_torch, too_much_for_numpy, too_much_for_onnxruntime])
def test_memory_that_is_not_there_is_one_sentence(bundle: Bundle, action: Callable[[], None]) -> None:
    picture = np.zeros((2, 3, 64, 64), np.uint8)
    with failing(bundle, action) as run, pytest.raises(RuntimeUnavailableError) as caught:
        run.infer({"image": picture})
    assert str(caught.value).startswith("expected enough memory for a batch of 2 on torch, got ")
    assert str(caught.value).endswith(": send smaller batches")
    assert "\n" not in str(caught.value)


def test_a_runtime_that_fails_is_one_sentence(bundle: Bundle) -> None:
    def broken() -> None:
        raise RuntimeError("kernel 7 failed\nat kernel.cc:12")

    with (
        failing(bundle, broken) as run,
        pytest.raises(ExecutionError, match="it failed with 'kernel 7 failed': export"),
    ):
        run.infer({"image": np.zeros((1, 3, 64, 64), np.uint8)})


# --- permissions and packages ----------------------------------------------------------------------------------------


@pytest.fixture
def read_only(bundle: Bundle, tmp_path: Path) -> Path:
    """The bundle where nobody may write."""
    import shutil

    folder = tmp_path / "archive"
    shutil.copytree(bundle.path, folder / "bundle")
    for path in (folder / "bundle", folder):
        path.chmod(0o555)
    return folder / "bundle"


def test_a_read_only_bundle_predicts_and_explains_what_it_cannot(
    in_new_process: Callable[..., list[tuple[int, str]]], read_only: Path, photo: Path, tmp_path: Path
) -> None:
    before = sorted(path.name for path in read_only.rglob("*"))
    outcomes = in_new_process(
        [
            ("predict", read_only, photo, "-o", tmp_path / "pictures", "--runtime", "torch"),
            ("predict", read_only, photo, "-o", read_only / "pictures", "--runtime", "torch"),
            ("build", read_only),
            ("verify", read_only, "--count", 1, "--runtime", "torch"),
        ],
        may_write_anywhere=False,
    )
    assert outcomes[0] == (0, "")
    assert len(list((tmp_path / "pictures").iterdir())) == 3
    for code, errors in outcomes[1:]:
        assert code == 2
        assert "expected" in errors
        assert "Permission denied" in errors
        assert errors.count("\n") == 1
    assert sorted(path.name for path in read_only.rglob("*")) == before


def test_missing_packages_are_named_and_stop_nothing_else(
    in_new_process: Callable[..., list[tuple[int, str]]], bundle: Bundle, photo: Path, tmp_path: Path
) -> None:
    def predict(runtime: str) -> tuple[object, ...]:
        return "predict", bundle.path, photo, "-o", tmp_path / "pictures", "--runtime", runtime

    runtimes = ("onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx")
    absent = ("onnxruntime", "tensorrt", "tensorrt_rtx")
    outcomes = in_new_process([predict("torch"), ("list",), *map(predict, runtimes)], absent)
    assert outcomes[:2] == [(0, ""), (0, "")]
    for runtime, (code, errors) in zip(runtimes, outcomes[2:], strict=True):
        assert code == 2
        assert errors.count("\n") == 1
        if runtime.startswith("onnxruntime"):
            assert f"runtime {runtime} needs the package onnxruntime: `pip install 'algm-deploy[{runtime}]'`" in errors
        else:  # looked for once an engine has been built
            assert f"holds no engine for {runtime}: build one" in errors


def test_a_reader_that_has_enough_is_no_error(root_dir: Path) -> None:
    """`algm-deploy list | head -1`"""
    writer = [sys.executable, "-c", "import sys; from algm_deploy.cli import main; sys.exit(main(['list']))"]
    with subprocess.Popen(writer, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root_dir) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
