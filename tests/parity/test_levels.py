"""Link 3 of int8 and fp8: no number of a quantised product may be another, in any graph that is executed or built."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from parity_cases import edit_manifest, rewrite

from algm_deploy.bundle.files import ONNX, WEIGHTS
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError
from algm_deploy.lowering.onnxruntime import write_onnxruntime_onnx
from algm_deploy.lowering.openvino import write_openvino_onnx
from algm_deploy.lowering.tensorrt import TENSORRT_ONNX
from algm_deploy.lowering.tensorrt_stretches import STRETCH_ONNX
from algm_deploy.lowering.tensorrt_zero_points import SHIFT, centre_levels
from algm_deploy.parity.levels import level_problems
from algm_deploy.parity.links import graph_link
from algm_deploy.runners.registry import row_of

OWN = row_of("onnxruntime-cpu").own
OPENVINO = row_of("openvino").own
PART = STRETCH_ONNX.replace("*", "0")
ENGINES = {
    "engines/tensorrt.engine": TENSORRT_ONNX,
    "engines/tensorrt.stretch-0.engine": PART,
}
PRODUCT = "encoder.blocks.3.mlp.fc2"


@pytest.fixture(scope="module")
def built(int8_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    bundle = Bundle.open(shutil.copytree(int8_bundle.path, tmp_path_factory.mktemp("levels") / "bundle"))
    write_onnxruntime_onnx(bundle, "cpu", False, OWN)
    return bundle


@pytest.fixture(scope="module")
def centred(built: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with a product that has a zero point, and with files of TensorRT: the graph is the portable one without
    zero points, and nothing reads the others."""
    bundle = Bundle.open(shutil.copytree(built.path, tmp_path_factory.mktemp("centred") / "bundle"))
    model = onnx.load(bundle.path / ONNX, load_external_data=False)
    zero = changed(model, bundle.path, node_of(model, Q).input[2], lambda x: x + 5)
    for node in (node_of(model, Q), node_of(model, READ)):
        node.input[2] = zero
    rewrite(bundle, ONNX, model.SerializeToString())
    edit_manifest(bundle, with_zero_point)
    bundle = Bundle.open(bundle.path)
    whole = onnx.load(bundle.path / ONNX)
    assert centre_levels(whole.graph) >= 1
    sources = {TENSORRT_ONNX: WEIGHTS, PART: TENSORRT_ONNX, **ENGINES}
    for name, source in sources.items():
        with bundle.add(name, {source: bundle.files[source].sha256}) as path:
            path.write_bytes(whole.SerializeToString() if name == TENSORRT_ONNX else b"not read")
    return bundle


def with_zero_point(manifest: dict[str, Any]) -> None:
    (product,) = (one for one in manifest["quantization"]["products"] if one["name"] == PRODUCT)
    product["zero_point"] += 5


def node_of(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def changed(model: onnx.ModelProto, folder: Path, name: str, change: Callable[[np.ndarray], Any]) -> str:
    """Adds a constant that is another one changed; returns its name."""
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    array = onnx.numpy_helper.to_array(tensor, str(folder))
    new = np.asarray(change(array.copy())).astype(array.dtype)
    assert not np.array_equal(new, array)
    model.graph.initializer.append(onnx.numpy_helper.from_array(new, f"{name}.changed"))
    return f"{name}.changed"


def change_graph_of_engine(bundle: Bundle, name: str, place: int, change: Callable[[np.ndarray], Any]) -> None:
    """Changes a constant that a node of TensorRT's graph reads at `place`, or at the other side of a sum."""
    model = onnx.load(bundle.path / TENSORRT_ONNX, load_external_data=False)
    node = node_of(model, name)
    constants = {tensor.name for tensor in model.graph.initializer}
    place = place if node.input[place] in constants else 1 - place
    node.input[place] = changed(model, bundle.path, node.input[place], change)
    rewrite(bundle, TENSORRT_ONNX, model.SerializeToString())


def first(change: Callable[[Any], Any]) -> Callable[[np.ndarray], np.ndarray]:
    """Changes one number of many."""

    def apply(array: np.ndarray) -> np.ndarray:
        array.flat[0] = change(array.flat[0])
        return array

    return apply


Q, WEIGHT, READ = (f"{PRODUCT}/{kind}" for kind in ("QuantizeLinear", "DequantizeLinear", "DequantizeLinear_2"))
WRONG = {
    "a scale": (Q, 1, lambda x: x * 1.001, f"{PRODUCT}: expected scale 0."),
    "a clipped outlier": (Q, 1, lambda x: x / 8, f"{PRODUCT}: expected scale 0."),
    "a zero point": (Q, 2, lambda x: x + 1, f"{PRODUCT}: expected zero point "),
    "a scale to read by": (READ, 1, lambda x: x * 1.001, f"{PRODUCT}: expected scale to read none, found 0."),
    "a step": (WEIGHT, 1, first(lambda x: x * 2), f"{PRODUCT}: expected steps of the weight (0,) 0."),
    "a level": (WEIGHT, 0, first(lambda x: x - 1), f"{PRODUCT}: expected levels of the weight (0, 0) "),
    "a norm": ("encoder.blocks.1.norm1/LayerNormalization", 1, first(lambda x: x * 2), "norm1: expected weight (0,) "),
    "a bias": ("encoder.blocks.1.norm2/LayerNormalization", 2, first(lambda x: x + 1), "norm2: expected bias (0,) "),
}


@pytest.mark.parametrize("file", [ONNX, OWN])
def test_graphs_hold_what_they_have_to(built: Bundle, file: str) -> None:
    assert graph_link(built, file).passed


@pytest.mark.parametrize("engine", ENGINES)
def test_the_graph_of_an_engine_holds_what_it_has_to(centred: Bundle, engine: str) -> None:
    assert graph_link(centred, engine).facts["problems"] == []


@pytest.mark.parametrize("file", [ONNX, OWN])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_number(built: Bundle, copied: Callable[..., Bundle], file: str, case: str) -> None:
    name, place, change, message = WRONG[case]
    bundle = copied(built)
    model = onnx.load(bundle.path / file, load_external_data=False)
    node = node_of(model, name)
    node.input[place] = changed(model, bundle.path, node.input[place], change)
    rewrite(bundle, file, model.SerializeToString())
    link = graph_link(Bundle.open(bundle.path), file)
    assert not link.passed
    assert any(problem.startswith(f"{file}: ") and message in problem for problem in link.facts["problems"])


@pytest.fixture(scope="module")
def inside(int8_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """With a graph for OpenVINO whose attention is in int8."""
    bundle = Bundle.open(shutil.copytree(int8_bundle.path, tmp_path_factory.mktemp("inside") / "bundle"))
    write_openvino_onnx(bundle, OPENVINO, attention_int8=True)
    return bundle


ATTENTION = "encoder.blocks.1.attn"
LARGEST = "encoder.blocks.0.attn"  # before anything merges


def test_attention_in_int8_holds_what_it_has_to(inside: Bundle) -> None:
    assert graph_link(inside, OPENVINO, "int8", attention=True).facts["problems"] == []
    assert not graph_link(inside, OPENVINO, "int8", attention=False).passed, "it is told that attention is not"
    assert not graph_link(inside, ONNX, "int8", attention=True).passed, "it has none"


@pytest.fixture(scope="module")
def apart(int8_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same with one head at a time in its larger attention."""
    bundle = Bundle.open(shutil.copytree(int8_bundle.path, tmp_path_factory.mktemp("apart") / "bundle"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("algm_deploy.lowering.openvino._LARGE", 0)
        assert write_openvino_onnx(bundle, OPENVINO, attention_int8=True, cores=1)["heads_apart"] == 1
    return bundle


def test_attention_of_a_head_at_a_time(apart: Bundle) -> None:
    assert graph_link(apart, OPENVINO, "int8", attention=True).facts["problems"] == []


@pytest.mark.parametrize(("op_type", "kind"), [("QuantizeLinear", "packed"), ("DequantizeLinear", "key")])
def test_a_wrong_step_of_attention(inside: Bundle, copied: Callable[..., Bundle], op_type: str, kind: str) -> None:
    bundle = copied(inside)
    model = onnx.load(bundle.path / OPENVINO, load_external_data=False)
    node = next(one for one in model.graph.node if one.op_type == op_type and one.input[1] == f"{ATTENTION}.{kind}")
    node.input[1] = changed(model, bundle.path, node.input[1], first(lambda x: x * 1.001))
    rewrite(bundle, OPENVINO, model.SerializeToString())
    link = graph_link(Bundle.open(bundle.path), OPENVINO, "int8", attention=True)
    assert not link.passed
    assert any(ATTENTION in problem and kind in problem for problem in link.facts["problems"])


@pytest.mark.parametrize(("place", "kind"), [(1, "scale"), (2, "zero point")])
def test_a_product_whose_levels_are_laid_out(
    inside: Bundle, copied: Callable[..., Bundle], place: int, kind: str
) -> None:
    """What attention mixed is rounded before it becomes rows."""
    bundle = copied(inside)
    model = onnx.load(bundle.path / OPENVINO, load_external_data=False)
    node = node_of(model, f"{ATTENTION}.proj/QuantizeLinear")
    node.input[place] = changed(model, bundle.path, node.input[place], lambda x: x + 1)
    problems = problems_of(bundle, model)
    assert any(f"{ATTENTION}.proj: expected {kind}" in problem for problem in problems), problems


def reader(model: onnx.ModelProto, kind: str, name: str = ATTENTION, group: int = 0) -> onnx.NodeProto:
    """What makes numbers of the levels of queries, keys or values of a group of heads."""
    step = f"{name}.{kind}"
    found = [one for one in model.graph.node if one.op_type == "DequantizeLinear" and one.input[1] == step]
    return found[group]


def swapped(one: onnx.NodeProto, other: onnx.NodeProto) -> None:
    one.input[0], other.input[0] = other.input[0], one.input[0]


def same(one: onnx.NodeProto, other: onnx.NodeProto) -> None:
    one.input[0] = other.input[0]


def problems_of(bundle: Bundle, model: onnx.ModelProto) -> list[str]:
    rewrite(bundle, OPENVINO, model.SerializeToString())
    return graph_link(Bundle.open(bundle.path), OPENVINO, "int8", attention=True).facts["problems"]


@pytest.mark.parametrize("change", [swapped, same])
@pytest.mark.parametrize(("one", "other"), [("query", "key"), ("key", "query"), ("key", "value"), ("value", "key")])
def test_parts_of_attention_in_another_order(
    inside: Bundle, copied: Callable[..., Bundle], change: Callable[..., None], one: str, other: str
) -> None:
    bundle = copied(inside)
    model = onnx.load(bundle.path / OPENVINO, load_external_data=False)
    change(reader(model, one), reader(model, other))
    problems = problems_of(bundle, model)
    assert any(f"{ATTENTION}: expected " in problem and " to read none" in problem for problem in problems), problems
    assert any("readers of part" in problem for problem in problems) == (change is same)


@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("change", [swapped, same])
def test_heads_that_meet_others(
    apart: Bundle, copied: Callable[..., Bundle], change: Callable[..., None], kind: str
) -> None:
    """Keys or values of a group of heads in another's place."""
    bundle = copied(apart)
    model = onnx.load(bundle.path / OPENVINO, load_external_data=False)
    change(*(reader(model, kind, LARGEST, group) for group in range(2)))
    problems = problems_of(bundle, model)
    assert any("expected two sides of one group of heads" in problem for problem in problems), problems


def test_a_group_of_heads_told_twice(apart: Bundle, copied: Callable[..., Bundle]) -> None:
    bundle = copied(apart)
    model = onnx.load(bundle.path / OPENVINO, load_external_data=False)
    made = {node.output[0]: node for node in model.graph.node}
    (joined,) = (
        one
        for one in model.graph.node
        if one.op_type == "Concat" and all(made.get(x) is not None and made[x].op_type == "Div" for x in one.input)
    )
    joined.input[1] = joined.input[0]
    problems = problems_of(bundle, model)
    assert any("expected all groups of heads in order, found [0, 0]" in problem for problem in problems), problems


def test_levels_without_a_sign(inside: Bundle, copied: Callable[..., Bundle]) -> None:
    """By a zero point of another type all that is negative becomes zero."""
    bundle = copied(inside)
    model = onnx.load(bundle.path / OPENVINO, load_external_data=False)
    node = next(one for one in model.graph.node if one.input[1:2] == [f"{ATTENTION}.packed"])
    (zero,) = (tensor for tensor in model.graph.initializer if tensor.name == node.input[2])
    zero.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(zero).astype(np.uint8), zero.name))
    problems = problems_of(bundle, model)
    assert any("attention: expected zero points" in problem for problem in problems), problems


def test_attention_as_earlier_versions_built_it(inside: Bundle, copied: Callable[..., Bundle]) -> None:
    bundle = copied(inside)
    model = onnx.load(bundle.path / OPENVINO, load_external_data=False)
    for node in model.graph.node:
        node.name = node.name.replace("/packed", "/levels")
    assert any("build it again" in problem for problem in problems_of(bundle, model))


@pytest.mark.parametrize(
    ("place", "message"), [(1, "attention: expected step of shares"), (2, "attention: expected zero points")]
)
@pytest.mark.parametrize("op_type", ["QuantizeLinear", "DequantizeLinear"])
def test_wrong_levels_of_shares(
    inside: Bundle, copied: Callable[..., Bundle], op_type: str, place: int, message: str
) -> None:
    """Of one attention, what the row's exponentials are rounded to."""
    bundle = copied(inside)
    model = onnx.load(bundle.path / OPENVINO, load_external_data=False)
    constants = {node.output[0]: node for node in model.graph.node if node.op_type == "Constant"}
    node = next(one for one in model.graph.node if one.op_type == op_type and one.input[1] in constants)
    value = onnx.numpy_helper.to_array(constants[node.input[place]].attribute[0].t)
    tensor = onnx.numpy_helper.from_array((value + value.dtype.type(1)).astype(value.dtype), "another")
    model.graph.initializer.append(tensor)
    node.input[place] = "another"
    rewrite(bundle, OPENVINO, model.SerializeToString())
    link = graph_link(Bundle.open(bundle.path), OPENVINO, "int8", attention=True)
    assert any(message in problem for problem in link.facts["problems"]), link.facts["problems"]


@pytest.mark.parametrize("number", [0.5, 255.0])
def test_shares_that_are_cast(inside: Bundle, copied: Callable[..., Bundle], number: float) -> None:
    """Where rows are known, to levels: by their number and a half."""
    bundle = copied(inside)
    model = onnx.load(bundle.path / OPENVINO, load_external_data=False)
    made = {node.output[0]: node for node in model.graph.node}
    read = [made.get(node.input[0]) for node in model.graph.node if node.op_type == "DequantizeLinear"]
    (cast,) = (node for node in read if node is not None and node.op_type == "Cast")
    half = made[cast.input[0]]
    node = half if number == 0.5 else made[half.input[0]]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(number + 1), "another"))
    node.input[1] = "another"
    problems = problems_of(bundle, model)
    assert any("expected shares in 255 levels and a half" in problem for problem in problems), problems


@pytest.mark.parametrize("op_type", ["Add", "MultiHeadAttention", "BiasGelu"])
def test_the_bias_of_a_product(built: Bundle, copied: Callable[..., Bundle], op_type: str) -> None:
    bundle = copied(built)
    model = onnx.load(bundle.path / OWN, load_external_data=False)
    node = next(n for n in model.graph.node if n.op_type == op_type and any(i.endswith(".bias") for i in n.input))
    place = [name.endswith(".bias") for name in node.input].index(True)
    node.input[place] = changed(model, bundle.path, node.input[place], first(lambda x: x + 1))
    rewrite(bundle, OWN, model.SerializeToString())
    assert any("expected bias (0,)" in problem for problem in level_problems(Bundle.open(bundle.path), [OWN], "int8"))


@pytest.mark.parametrize(
    ("node", "place", "change", "message"),
    [
        (Q, 1, lambda x: x * 1.001, f"{PRODUCT}: expected scale 0."),
        (Q, 2, lambda x: x + 1, f"{PRODUCT}: expected zero point 0, found 1"),
        (f"{Q}{SHIFT}", 1, lambda x: x * 1.001, f"{PRODUCT}: expected shift "),
        (f"{PRODUCT}/Add", 0, lambda x: x + 1, f"{PRODUCT}: expected bias (0,) "),
        (WEIGHT, 0, first(lambda x: x - 1), f"{PRODUCT}: expected levels of the weight (0, 0) "),
    ],
    ids=["scale", "zero point", "shift", "bias", "level"],
)
def test_an_engine_is_of_a_graph_with_a_wrong_number(
    centred: Bundle,
    copied: Callable[..., Bundle],
    node: str,
    place: int,
    change: Callable[[np.ndarray], Any],
    message: str,
) -> None:
    bundle = copied(centred)
    change_graph_of_engine(bundle, node, place, change)
    problems = graph_link(Bundle.open(bundle.path), "engines/tensorrt.engine").facts["problems"]
    assert any(problem.startswith(f"{TENSORRT_ONNX}: {message}") for problem in problems), problems


def test_a_product_that_is_not_quantised(built: Bundle, copied: Callable[..., Bundle]) -> None:
    bundle = copied(built)
    model = onnx.load(bundle.path / ONNX, load_external_data=False)
    x = node_of(model, Q).input[0]
    node_of(model, f"{PRODUCT}/MatMul").input[0] = x
    rewrite(bundle, ONNX, model.SerializeToString())
    assert f"{ONNX}: {PRODUCT}: expected scale" in "\n".join(level_problems(Bundle.open(bundle.path), [ONNX], "int8"))


def test_a_graph_in_int8_that_is_not_asked_for(built: Bundle, copied: Callable[..., Bundle]) -> None:
    bundle = copied(built)
    edit_manifest(bundle, lambda manifest: manifest.pop("quantization"))
    found = "\n".join(level_problems(Bundle.open(bundle.path), [ONNX], "int8"))
    assert f"{PRODUCT}: expected steps of the weight none, found float32 of shape (64,)" in found
    assert "expected 0 nodes QuantizeLinear, found 24" in found


def test_weights_that_are_not_there(built: Bundle, copied: Callable[..., Bundle]) -> None:
    bundle = copied(built)
    model = onnx.load(bundle.path / ONNX, load_external_data=False)
    node_of(model, WEIGHT).input[0] = "nothing"
    rewrite(bundle, ONNX, model.SerializeToString())
    with pytest.raises(BundleError, match="nothing is no constant"):
        level_problems(Bundle.open(bundle.path), [ONNX], "int8")


# --- fp8 --------------------------------------------------------------------------------------------------------------

WRONG_FP8 = {
    "scale": (Q, 1, lambda x: x * 2, "expected scale 0."),
    "a scale to read by": (f"{PRODUCT}/DequantizeLinear", 1, lambda x: x * 2, "expected scale to read none, found 0."),
    "level": (f"{PRODUCT}/weight", 0, first(lambda x: x * 2 + 1), "expected levels of the weight (0, 0) "),
    "step": (f"{PRODUCT}/weight", 1, first(lambda x: x * 2), "expected steps of the weight (0,) "),
    "bias": (f"{PRODUCT}/Add", 0, first(lambda x: x + 1), "expected bias (0,) "),
}


def test_the_graph_of_fp8_holds_what_it_has_to(measured_fp8_bundle: Bundle) -> None:
    assert level_problems(measured_fp8_bundle, [ONNX, TENSORRT_ONNX], "fp8") == []
    as_stored = level_problems(measured_fp8_bundle, [ONNX], "fp16")
    assert as_stored == []
    levels_in_fp16 = "\n".join(level_problems(measured_fp8_bundle, [TENSORRT_ONNX], "fp16"))
    assert f"{PRODUCT}: expected levels of the weight none" in levels_in_fp16


@pytest.mark.parametrize("case", WRONG_FP8)
def test_a_wrong_number_of_fp8(measured_fp8_bundle: Bundle, copied: Callable[..., Bundle], case: str) -> None:
    name, place, change, message = WRONG_FP8[case]
    bundle = copied(measured_fp8_bundle)
    change_graph_of_engine(bundle, name, place, change)
    problems = graph_link(Bundle.open(bundle.path), TENSORRT_ONNX).facts["problems"]
    assert any(problem.startswith(f"{TENSORRT_ONNX}: {PRODUCT}: {message}") for problem in problems), problems


def test_a_product_that_stays_in_fp16(measured_fp8_bundle: Bundle, copied: Callable[..., Bundle]) -> None:
    bundle = copied(measured_fp8_bundle)
    edit_manifest(bundle, lambda manifest: manifest["quantization"]["products"].pop())
    found = "\n".join(level_problems(Bundle.open(bundle.path), [TENSORRT_ONNX], "fp8"))
    assert "expected 23 nodes QuantizeLinear, found 24" in found
