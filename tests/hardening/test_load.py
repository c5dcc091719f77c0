"""Many predictions, many threads, little memory: the same bits, no growth, one sentence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state
from process_memory import grown_and_kept, resident

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import ExecutionError, RuntimeUnavailableError
from algm_deploy.recipe.network import Network
from algm_deploy.runners.contract import Runner, runner
from algm_deploy.runners.onnxruntime.runner import ORT_ERRORS

CPU_RUNTIMES = ("torch", "onnxruntime-cpu")
LENGTHS = Path(__file__).parents[1] / "lengths_child.py"


@pytest.fixture(scope="module")
def bundle(small_bundle: Callable[..., Bundle]) -> Bundle:
    return small_bundle()


@pytest.mark.parametrize("runtime", CPU_RUNTIMES)
def test_many_predictions_need_no_more_memory(bundle: Bundle, runtime: str, long_form: bool) -> None:
    """Token counts differ from picture to picture, which is what allocators and caches of plans grow by.

    The long form makes ten thousand predictions. The most that was seen to grow is 0.25 MB, to be kept 0.08 MB.
    """
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (50, 1, 3, 64, 64), dtype=np.uint8)
    for index, picture in enumerate(pictures):
        picture[..., : index + 8] = 100
    counts = set()
    with runner(bundle, runtime) as run:
        for step in range(10_100 if long_form else 600):
            if step == 100:
                before = resident()
            counts.add(tuple(run.infer({"image": pictures[step % 50]})["token_counts"][0]))
        grown, kept = grown_and_kept(before)
    assert len(counts) > 5
    assert grown < 2 << 20, f"{grown / 1e6:.1f} MB more"
    assert kept < 4 << 20, f"{kept / 1e6:.1f} MB kept"


@pytest.mark.parametrize("runtime", CPU_RUNTIMES)
def test_layers_of_every_length_need_no_more_memory(small_bundle: Callable[..., Bundle], runtime: str) -> None:
    """Blocks as large as real networks free them, of another size for each token count.

    All lengths in one order: then a runtime has what it needs for any. In another order they take nothing more. And
    what they freed is given back: a heap that keeps it holds 40 MB, whereas scores of a picture are 3. In a process of
    its own: what other tests have left in the heap decides whether blocks find room there.
    """
    network = Network("segmenter", 256, 2, 4, 5, (384, 384), decoder="linear")
    wide = small_bundle((384, 384), network=network)
    command = [sys.executable, str(LENGTHS), str(wide.path), runtime]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    counts, grown, kept = map(int, done.stdout.split())
    assert counts > 20
    assert grown < 4 << 20, f"{grown / 1e6:.1f} MB more"
    assert kept < 12 << 20, f"{kept / 1e6:.1f} MB kept"


@pytest.mark.parametrize("runtime", CPU_RUNTIMES)
def test_the_same_bits_on_every_run_and_in_every_session(bundle: Bundle, runtime: str) -> None:
    picture = np.random.default_rng(1).integers(0, 256, (3, 3, 64, 64), dtype=np.uint8)
    results = []
    for _ in range(3):
        with runner(bundle, runtime) as run:
            results += [run.infer({"image": picture})["scores"].tobytes() for _ in range(5)]
    assert len(set(results)) == 1


@pytest.mark.parametrize("runtime", CPU_RUNTIMES)
def test_asking_for_token_maps_changes_no_label(bundle: Bundle, runtime: str) -> None:
    """More outputs may change what a runtime fuses, and so its results; here they change no bit."""
    pictures = np.random.default_rng(2).integers(0, 256, (2, 3, 64, 64), dtype=np.uint8)
    pictures[1, :, :, :40] = 90
    with runner(bundle, runtime) as run:
        plain = run.infer({"image": pictures})
        full = run.infer({"image": pictures}, [tensor.name for tensor in run.signature.outputs])
    assert len(full) > len(plain)
    for name, value in plain.items():
        np.testing.assert_array_equal(full[name], value, err_msg=name)


# --- memory ----------------------------------------------------------------------------------------------------------


def too_much_for_torch() -> None:
    torch.empty(1 << 48)


def too_much_for_a_gpu() -> None:
    """As PyTorch says it, on a machine that has none."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.1 GiB")


def too_much_for_onnxruntime_on_a_gpu() -> None:
    raise ort_state.RuntimeException("Failed to allocate memory for requested buffer of size 2147483648")


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

        def _infer(self, *_: object) -> dict[str, Any]:
            action()
            return {}

    return Failing(bundle)


@pytest.mark.parametrize(
    "action",
    [
        too_much_for_torch,
        too_much_for_a_gpu,
        too_much_for_numpy,
        too_much_for_onnxruntime,
        too_much_for_onnxruntime_on_a_gpu,
    ],
)
@pytest.mark.parametrize(("images", "remedy"), [(2, "send smaller batches"), (1, "end other programs that use it")])
def test_memory_that_is_not_there_is_one_sentence(
    bundle: Bundle, action: Callable[[], None], images: int, remedy: str
) -> None:
    picture = np.zeros((images, 3, 64, 64), np.uint8)
    with failing(bundle, action) as run, pytest.raises(RuntimeUnavailableError) as caught:
        run.infer({"image": picture})
    assert str(caught.value).startswith(f"expected enough memory for a batch of {images} on torch, got ")
    assert str(caught.value).endswith(f": {remedy}")
    assert "\n" not in str(caught.value)


def test_what_a_library_says_is_cut_visibly(bundle: Bundle) -> None:
    def long_winded() -> None:
        raise RuntimeError(f"CUDA out of memory{400 * '!'}")

    with failing(bundle, long_winded) as run, pytest.raises(RuntimeUnavailableError, match=r"!\.\.\.': send smaller"):
        run.infer({"image": np.zeros((2, 3, 64, 64), np.uint8)})


def test_a_runtime_that_fails_is_one_sentence(bundle: Bundle) -> None:
    def broken() -> None:
        raise RuntimeError("kernel 7 failed\nat kernel.cc:12")

    with (
        failing(bundle, broken) as run,
        pytest.raises(ExecutionError, match="it failed with 'kernel 7 failed': export"),
    ):
        run.infer({"image": np.zeros((1, 3, 64, 64), np.uint8)})
