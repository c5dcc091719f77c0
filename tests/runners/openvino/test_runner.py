"""The OpenVINO runner: which graph runs, in which precision, and what the project keeps quiet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from operator_inputs import GBM

from algm_deploy.bundle.records import OptimizedGraph
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BuildError, BundleError
from algm_deploy.ops import reference
from algm_deploy.ops.bodies import BODIES, OPSET, Body
from algm_deploy.parity.chain import verify
from algm_deploy.runners.contract import runner, runner_type
from algm_deploy.runners.registry import row_of
from algm_deploy.timing.variants import variant_bundle

OPENVINO = "openvino"
OWN = "model.openvino.onnx"
if not row_of(OPENVINO).installed():  # importing it to see would be no quiet import
    pytest.skip("needs OpenVINO: algm-deploy[openvino]", allow_module_level=True)
Copied = Callable[..., Bundle]


@pytest.fixture
def images(blob_images: Callable[[int], np.ndarray]) -> np.ndarray:
    return blob_images(3)


@pytest.fixture
def module() -> Any:
    """The runner's own, whose view of the processor tests change."""
    return sys.modules[runner_type(OPENVINO).__module__]


def outputs_of(bundle: Bundle, images: np.ndarray) -> dict[str, np.ndarray]:
    with runner(bundle, OPENVINO) as run:
        return run.infer({"image": images}, [tensor.name for tensor in run.signature.outputs])


def built(bundle: Bundle) -> Bundle:
    runner_type(OPENVINO).build(bundle)
    return Bundle.open(bundle.path)


def test_an_export_runs_at_once_and_agrees_with_the_built_graph(
    tiny_bundle: Bundle, copied: Copied, images: np.ndarray
) -> None:
    with runner(tiny_bundle, OPENVINO) as run:
        assert run.executable == "model.inlined.onnx"
    bundle = built(copied(tiny_bundle))
    with runner(bundle, OPENVINO) as run:
        assert run.executable == OWN
        assert run.execution.keys() == {"arithmetic", "threads"}
        assert run.execution["arithmetic"] == "fp32"
    assert bundle.found(OptimizedGraph, OPENVINO).rewrites["inlined"] == 9
    portable, own = outputs_of(tiny_bundle, images), outputs_of(bundle, images)
    for name, value in portable.items():
        np.testing.assert_allclose(own[name], value, rtol=0, atol=2e-5)


def test_no_precision_is_left_to_openvino(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """By itself it takes bf16 on processors that have it, and similarities with it."""
    monkeypatch.setattr(module, "has_bf16", lambda: True)
    with runner(tiny_bundle, OPENVINO) as run:
        assert run._compiled.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def bf16_bundle(tiny_export: Callable[..., Bundle], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    import shutil

    target = tmp_path_factory.mktemp("bf16") / "bundle"
    return built(Bundle.open(shutil.copytree(tiny_export({"precision": "bf16"}).path, target)))


@pytest.mark.parametrize("there", [True, False])
def test_bf16_says_what_is_computed(
    bf16_bundle: Bundle,
    images: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    there: bool,
    module: Any,
) -> None:
    module.say_once.cache_clear()
    monkeypatch.setattr(module, "has_bf16", lambda: there)
    for _ in range(2):
        with runner(bf16_bundle, OPENVINO) as run:
            hint = run._compiled.get_property("INFERENCE_PRECISION_HINT").to_string()  # type: ignore[attr-defined]
            assert hint == ("dynamic" if there else "f32"), "the types of the graph hold, or fp32"
            assert run.execution["arithmetic"] == run.precision == ("bf16" if there else "fp32")
            assert run.infer({"image": images})["scores"].dtype == np.float32
    said = [record.message for record in caplog.records]
    assert len(said) == (0 if there else 1)
    assert there or "in fp32 and not in bf16: this processor has none of its instructions" in said[0]


@pytest.mark.parametrize(("made_for", "here"), [(True, True), (True, False), (False, True), (False, False)])
def test_attention_in_bf16_is_for_amx(
    tiny_export: Callable[..., Bundle],
    copied: Copied,
    monkeypatch: pytest.MonkeyPatch,
    made_for: bool,
    here: bool,
    module: Any,
) -> None:
    monkeypatch.setattr(module, "has_bf16", lambda: True)
    monkeypatch.setattr(module, "has_amx", lambda: made_for)
    bundle = built(copied(tiny_export({"precision": "bf16"})))
    rewrites = bundle.found(OptimizedGraph, OPENVINO).rewrites  # type: ignore[union-attr]
    assert ("bf16_attention" in rewrites, "bf16_linear" in rewrites) == (made_for, True)
    monkeypatch.setattr(module, "has_amx", lambda: here)
    if made_for and not here:
        with pytest.raises(BundleError, match=r"attention in bf16.*algm-deploy build"), runner(bundle, OPENVINO):
            pass
    else:
        with runner(bundle, OPENVINO) as run:
            assert run.precision == "bf16"


@pytest.mark.parametrize(("made_for", "here"), [(True, True), (True, False), (False, True), (False, False)])
def test_attention_in_int8_is_for_vnni(
    int8_bundle: Bundle, copied: Copied, monkeypatch: pytest.MonkeyPatch, made_for: bool, here: bool, module: Any
) -> None:
    monkeypatch.setattr(module, "has_vnni", lambda: made_for)
    bundle = built(copied(int8_bundle))
    assert ("int8_attention" in bundle.found(OptimizedGraph, OPENVINO).rewrites) == made_for  # type: ignore[union-attr]
    monkeypatch.setattr(module, "has_vnni", lambda: here)
    if made_for and not here:
        with pytest.raises(BundleError, match=r"attention in int8.*VNNI.*algm-deploy build"), runner(bundle, OPENVINO):
            pass
    else:
        with runner(bundle, OPENVINO) as run:
            assert run.attention_in_levels == made_for
            assert ("attention" in run.execution["arithmetic"]) == made_for


@pytest.mark.parametrize(("inside", "apart"), [(True, False), (True, True), (False, False)])
def test_the_chain_holds_with_attention_in_int8(
    int8_bundle: Bundle,
    copied: Copied,
    monkeypatch: pytest.MonkeyPatch,
    images: np.ndarray,
    inside: bool,
    apart: bool,
    module: Any,
) -> None:
    """`apart`: of a head at a time where the token count is known."""
    if inside and not module.has_vnni():
        pytest.skip("needs a processor with VNNI")
    monkeypatch.setattr(module, "has_vnni", lambda: inside)
    if apart:
        monkeypatch.setattr("algm_deploy.lowering.openvino._LARGE", 0)
        monkeypatch.setattr(module, "thread_limit", lambda: 1)
    bundle = built(copied(int8_bundle))
    graph = bundle.found(OptimizedGraph, OPENVINO)
    assert graph is not None
    assert ("heads_apart" in graph.rewrites) == apart
    report = verify(bundle, OPENVINO, images)
    assert report.passed, [link.measured for link in report.links if not link.passed]


def test_graphs_of_before_had_attention_in_bf16_on_every_processor(
    tiny_export: Callable[..., Bundle], copied: Copied, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    monkeypatch.setattr(module, "has_bf16", lambda: True)
    monkeypatch.setattr(module, "has_amx", lambda: False)
    bundle = built(copied(tiny_export({"precision": "bf16"})))
    bundle.record(OptimizedGraph(runtime=OPENVINO, rewrites={"bf16": 50}))
    with pytest.raises(BundleError, match="attention in bf16"), runner(Bundle.open(bundle.path), OPENVINO):
        pass


def test_bf16_without_its_graph_says_how_to_get_it(
    tiny_export: Callable[..., Bundle], caplog: pytest.LogCaptureFixture
) -> None:
    with runner(tiny_export({"precision": "bf16"}), OPENVINO) as run:
        assert run.execution["arithmetic"] == run.precision == "fp32"
    assert any("build" in record.message and "--runtime openvino" in record.message for record in caplog.records)


def test_the_parity_chain_holds(
    tiny_bundle: Bundle, copied: Copied, images: np.ndarray, record_property: Callable[[str, object], None]
) -> None:
    report = verify(built(copied(tiny_bundle)), OPENVINO, images, progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    record_property("support", "algm segmenter/mask_transformer openvino verified")


@pytest.mark.parametrize("runtime", [OPENVINO, "onnxruntime-cpu"])
def test_a_bundle_in_bf16_is_proven(bf16_bundle: Bundle, images: np.ndarray, runtime: str) -> None:
    report = verify(bf16_bundle, runtime, images[:2], progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    with runner(bf16_bundle, runtime) as run:
        computed = run.precision
    numbers, labels = report.links[3], report.links[5]
    assert (numbers.facts["pytorch_error_mean"] < 1e-5) == (computed == "fp32"), "held to what is computed"
    assert ("PyTorch in bf16" in labels.gate) == (computed == "bf16")


def test_labels_with_merges_and_without(labels_bundle: Bundle, copied: Copied, images: np.ndarray) -> None:
    bundle = copied(labels_bundle)
    for one, merges in ((bundle, 2), (variant_bundle(bundle, "dense", ()), 0)):
        found = outputs_of(one, images)
        with runner(one, "torch") as run:
            expected = run.infer({"image": images})
        assert (found["labels"].dtype, found["token_counts"].shape) == (np.uint8, (3, merges))
        np.testing.assert_array_equal(found["token_counts"], expected["token_counts"])
        assert (found["labels"] == expected["labels"]).mean() > 0.999


def compiled_body(build: Callable[..., Sequence[ir.Value]], feeds: dict[str, np.ndarray]) -> Any:
    """What `build` writes for a processor, compiled for inputs of these shapes."""
    from algm_deploy.runners.openvino.library import openvino

    values = [ir.val(name, ir.DataType.from_numpy(one.dtype), one.shape) for name, one in feeds.items()]
    body = Body(processor=True)
    outputs = build(body, *values)
    for number, value in enumerate(outputs):
        value.name = f"output_{number}"
    model = ir.Model(ir.Graph(values, outputs, nodes=body.nodes, opset_imports={"": OPSET}, name="one"), ir_version=10)
    core = openvino.Core()
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "2", "ENABLE_CPU_PINNING": "NO"}
    return core.compile_model(core.read_model(ir.to_proto(model).SerializeToString()), "CPU", options)


def test_rows_are_added_one_after_the_other() -> None:
    """The graph for it relies on that: sums whose order changed would differ, and lost rows more so."""
    rng = np.random.default_rng(0)
    x, index = rng.standard_normal((2, 3, 384)), rng.integers(0, 3, (2, 4096))
    rows = rng.standard_normal((2, 4096, 384)) * 10.0 ** rng.integers(-3, 4, (2, 4096, 1))
    feeds = {"x": x.astype(np.float32), "index": index, "rows": rows.astype(np.float32)}
    compiled = compiled_body(lambda body, *values: [body.added_rows(*values)], feeds)
    expected = feeds["x"].copy()
    for image in range(2):
        np.add.at(expected[image], index[image], feeds["rows"][image])
    for _ in range(3):
        np.testing.assert_array_equal(compiled(feeds)[0], expected)


@pytest.mark.parametrize(("above", "expected"), [("Greater", np.greater), ("GreaterOrEqual", np.greater_equal)])
def test_no_number_is_greater_than_none(above: str, expected: Callable[..., np.ndarray]) -> None:
    numbers = np.array([np.nan, -np.inf, 0, 1, np.inf], np.float32)
    x, y = (part.reshape(1, -1) for part in np.meshgrid(numbers, numbers))
    found = compiled_body(lambda body, *values: [body(above, *values)], {"x": x, "y": y})({"x": x, "y": y})[0]
    np.testing.assert_array_equal(found, expected(x, y))


@pytest.mark.parametrize("threshold", [1.0, np.nan])
@pytest.mark.parametrize("rows", [2, 3, 4, 5, 9])
def test_nothing_merges_by_a_deviation_that_is_undefined(rows: int, threshold: float) -> None:
    """Of fewer than two rows: the class token and up to four patches have one."""
    tokens = np.random.default_rng(rows).standard_normal((1, rows, 64)).astype(np.float32)
    feeds = {
        "tokens": tokens,
        "size": np.ones((1, rows), np.float32),
        "map": np.arange(1, rows)[None],
        "length": np.array([rows]),
        "threshold": np.array(threshold, np.float32),
    }
    compiled = compiled_body(lambda body, *values: BODIES["gbm"](body, GBM, *values), feeds)
    expected = reference.gbm(*feeds.values(), **GBM)
    assert (expected[3] == rows).all() or (rows > 4 and threshold == 1)
    for value, wanted in zip(compiled(feeds).values(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-5)


def test_threads_share_a_runner(tiny_bundle: Bundle, copied: Copied, images: np.ndarray) -> None:
    with runner(built(copied(tiny_bundle)), OPENVINO) as run:
        alone = [run.infer({"image": image[None]}) for image in images]
        with ThreadPoolExecutor(3) as pool:
            together = list(pool.map(lambda image: run.infer({"image": image[None]}), [*images] * 4))
        for index, found in enumerate(together):
            for name, value in alone[index % 3].items():
                np.testing.assert_array_equal(found[name], value)


def test_broken_files_and_unknown_options_are_refused(tiny_bundle: Bundle, copied: Copied) -> None:
    with pytest.raises(BuildError, match="openvino has no build option precision"):
        runner_type(OPENVINO).build(tiny_bundle, precision="bf16")
    bundle = copied(tiny_bundle)
    with bundle.add(OWN) as path:
        path.write_bytes(b"no graph")
    with (
        pytest.raises(BundleError, match=r"expected a graph that OpenVINO .* can load, it says"),
        runner(Bundle.open(bundle.path), OPENVINO),
    ):
        pass


def test_nothing_is_told_to_others() -> None:
    runner_type(OPENVINO)
    assert not [name for name in sys.modules if name.partition(".")[0] == "openvino_telemetry"]
