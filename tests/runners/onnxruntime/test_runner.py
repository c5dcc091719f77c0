"""The ONNX Runtime runners: which graph runs, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import export
from algm_deploy.errors import BuildError, BundleError, RuntimeUnavailableError
from algm_deploy.pictures.shipped import scene
from algm_deploy.runners.contract import runner, runner_type
from algm_deploy.runners.onnxruntime import runner as module
from algm_deploy.runners.onnxruntime import sessions
from algm_deploy.timing.variants import variant_bundle

CPU = "onnxruntime-cpu"


@pytest.fixture
def bundle(tiny_bundle: Bundle, tmp_path: Path) -> Bundle:
    shutil.copytree(tiny_bundle.path, tmp_path / "bundle")
    return Bundle.open(tmp_path / "bundle")


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.stack([scene(seed)[0][:128, :128].transpose(2, 0, 1) for seed in range(3)])


def test_the_built_graph_runs_and_agrees(bundle: Bundle, images: np.ndarray) -> None:
    with runner(bundle, CPU) as run:
        assert run.executable == "model.onnx"
        names = [t.name for t in run.signature.outputs]
        portable = run.infer({"image": images}, names)
    lines = runner_type(CPU).build(bundle)
    assert "6 attention" in lines[0]
    with runner(bundle, CPU) as run:
        assert run.executable == "model.onnxruntime-cpu.onnx"
        built = run.infer({"image": images}, names)
    for name in names:
        np.testing.assert_allclose(built[name], portable[name], atol=2e-4)


def test_one_image_of_a_batch_equals_itself_alone(bundle: Bundle, images: np.ndarray) -> None:
    runner_type(CPU).build(bundle)
    with runner(bundle, CPU) as run:
        batch = run.infer({"image": images})
        alone = run.infer({"image": images[1:2]})
    assert len(set(batch["token_counts"][:, 1])) > 1, "images of one length would prove nothing"
    for name, value in alone.items():
        np.testing.assert_array_equal(batch[name][1:2], value)


@pytest.fixture(scope="module")
def int8_budget_bundle(tiny_checkpoint: Path, scenes_to_calibrate: Path, made_once: Callable[..., Path]) -> Bundle:
    """Like `int8_bundle`, with a budget in place of thresholds: all shapes are fixed."""
    settings = {"precision": "int8", "gates.int8_label_agreement": 0.0}
    calibrate = [scenes_to_calibrate]
    return Bundle.open(
        made_once(
            "tiny-int8-budget",
            lambda to: export(tiny_checkpoint, to, None, settings, budget=(0.4, 0.2), calibrate=calibrate),
        )
    )


@pytest.mark.parametrize("merging", ["thresholds", "budget", "dense"])
def test_every_product_of_int8_is_computed_in_int8(
    int8_bundle: Bundle, int8_budget_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merging: str
) -> None:
    made = int8_budget_bundle if merging == "budget" else int8_bundle
    bundle = Bundle.open(shutil.copytree(made.path, tmp_path / "bundle"))
    if merging == "dense":
        bundle = variant_bundle(bundle, "dense", ())
    runner_type(CPU).build(bundle)
    optimized = tmp_path / "optimized.onnx"
    asked = module.OnnxRuntimeCpuRunner._session_options

    def kept(self: module.OnnxRuntimeCpuRunner) -> ort.SessionOptions:
        options = asked(self)
        options.optimized_model_filepath = str(optimized)
        return options

    monkeypatch.setattr(module.OnnxRuntimeCpuRunner, "_session_options", kept)
    with runner(bundle, CPU):
        nodes = Counter(node.op_type for node in onnx.load(optimized, load_external_data=False).graph.node)
    assert made.manifest.quantization is not None
    assert nodes["MatMulIntegerToFloat"] == len(made.manifest.quantization.products)
    assert nodes["DequantizeLinear"] == 0


def test_placement_counts_every_node(bundle: Bundle, images: np.ndarray) -> None:
    runner_type(CPU).build(bundle)
    with runner(bundle, CPU) as run:
        placement = run.placement({"image": images})
    assert set(placement.nodes) == {"CPUExecutionProvider"}
    assert placement.nodes["CPUExecutionProvider"] > 50
    assert placement.copies == 0


def test_copies_between_host_and_device_are_counted(
    images: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the profile of a run on a GPU, which a session stands in for here."""
    cuda, ran = "CUDAExecutionProvider", ("MatMul", "MemcpyFromHost", "MemcpyToHost", "Gelu")
    nodes = [{"cat": "Node", "args": {"provider": cuda, "op_name": name}} for name in ran]
    others = [{"cat": "Node", "args": {"provider": "CPUExecutionProvider", "op_name": "Shape"}}, {"cat": "Session"}]
    (tmp_path / "profile.json").write_text(json.dumps([*nodes, *others]))
    session = SimpleNamespace(
        get_inputs=lambda: [SimpleNamespace(shape=["batch", 3, 128, 128])],
        run=lambda *_: None,
        end_profiling=lambda: tmp_path / "profile.json",
    )
    monkeypatch.setattr(sessions, "checked_session", lambda *_: session)
    waited: list[object] = []
    monkeypatch.setattr(sessions.torch.cuda, "synchronize", waited.append)
    found = sessions.placement(tmp_path, ort.SessionOptions(), cuda, {}, {"image": images})
    assert found == ({cuda: 4, "CPUExecutionProvider": 1}, 2)
    assert waited, "the session ended before its work"


def test_a_graph_older_than_the_portable_one_is_refused(bundle: Bundle) -> None:
    runner_type(CPU).build(bundle)
    portable = bundle.file("model.onnx").read_bytes()
    with bundle.add("model.onnx", uses=("model.onnx.data",)) as path:
        path.write_bytes(portable + b"\x42\x00")  # one more, empty, field
    with pytest.raises(BundleError, match="build it again"):
        runner(Bundle.open(bundle.path), CPU).__enter__()


@pytest.fixture(scope="module")
def exported_labels(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an output that the library has an operator for on the CPU."""
    folder = tmp_path_factory.mktemp("labels") / "bundle"
    return export(tiny_checkpoint, folder, None, {"output": "labels"}).bundle.path


@pytest.fixture
def labelling(exported_labels: Path, tmp_path: Path) -> Bundle:
    shutil.copytree(exported_labels, tmp_path / "labels")
    return Bundle.open(tmp_path / "labels")


@pytest.mark.usefixtures("no_native_libraries")
def test_custom_operators_without_their_library_are_refused(labelling: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = labelling
    with monkeypatch.context() as patch:
        patch.setattr(module, "find_library", lambda _: Path("library.so"))
        assert len(runner_type(CPU).build(bundle)) == 1
    with pytest.raises(BuildError, match=r"build-native ort_custom_op|pip install 'algm-deploy\[native\]'"):
        runner(bundle, CPU).__enter__()


def test_without_the_library_the_report_says_so(labelling: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_library", lambda _: None)
    assert "own operators, slower" in runner_type(CPU).build(labelling)[1]
    assert runner(labelling, CPU).custom_operators == ()


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="a provider that is there is used")
def test_every_session_on_cuda_looks_for_the_libraries_of_pytorch(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    monkeypatch.setattr(ort, "preload_dlls", lambda: loads.append("loaded"), raising=False)
    path, options = bundle.file("model.onnx"), ort.SessionOptions()
    sessions.checked_session(path, options, "CPUExecutionProvider", {})
    assert loads == []
    with pytest.raises(RuntimeUnavailableError, match="asked ONNX Runtime for CUDAExecutionProvider"):
        sessions.checked_session(path, options, "CUDAExecutionProvider", {})
    assert loads == ["loaded"]


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this is the CUDA package")
def test_the_cpu_package_never_stands_in_for_cuda(bundle: Bundle) -> None:
    assert "attention" in runner_type("onnxruntime-cuda").build(bundle)[0], "building needs no device"
    with pytest.raises(RuntimeUnavailableError, match="onnxruntime-gpu"):
        runner(bundle, "onnxruntime-cuda")


@pytest.mark.gpu
@pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu")
def test_cuda_tensors_go_in_and_come_out(bundle: Bundle, images: np.ndarray) -> None:
    import torch

    runner_type("onnxruntime-cuda").build(bundle)
    with runner(bundle, CPU) as run:
        names = [t.name for t in run.signature.outputs]
        expected = run.infer({"image": images}, names)
    with runner(bundle, "onnxruntime-cuda") as run:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            turned = torch.from_numpy(images.transpose(0, 2, 3, 1).copy()).cuda().permute(0, 3, 1, 2)
            found = run.infer_device({"image": turned}, names)
        stream.synchronize()
        assert all(value.is_cuda for value in found.values())
        for name in names:
            np.testing.assert_allclose(found[name].cpu().numpy(), expected[name], atol=2e-3)
        assert run.placement({"image": images}).nodes["CUDAExecutionProvider"] > 50
        with pytest.raises(BundleError, match="memory of cuda"):
            run.infer_device({"image": torch.from_numpy(images)})
