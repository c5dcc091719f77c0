"""ONNX for TensorRT: each rewrite, and the whole graph evaluated by a NumPy interpreter of ONNX against PyTorch."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tensorrt_in_numpy import chained, evaluate
from toys import TAU, deployed_toy, pictures, toy, with_budgets

from algm_deploy.bundle.graphs import FLOAT32_PRODUCTS, PLAIN_ATTENTIONS
from algm_deploy.errors import ExportError
from algm_deploy.lowering.tensorrt import tensorrt_from_base
from algm_deploy.merging import merge_inputs
from algm_deploy.models.deployed import Deployed
from algm_deploy.ops.attention import reference as attention_reference
from algm_deploy.proof import _INSPECT
from algm_deploy.recipe.schema import Precision

FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64
GRID, PREFIX, WIDTH = (4, 6), 1, 8
ROWS = PREFIX + GRID[0] * GRID[1]
CLAP = {"grid": GRID, "window": (2, 2), "prefix": PREFIX, "semantics": "paper", "batch": "per_image", "order": "raster"}
GBM = {"prefix": PREFIX, "rule": "fixed", "divisor": 2.5, "semantics": "code", "batch": "batch_min"}


def base(nodes: list[onnx.NodeProto], values: dict[str, tuple[int, list[Any]]], outputs: list[str]) -> ir.Model:
    """A base graph: `values` gives type and shape of every tensor; what no node writes is an input."""
    infos = {name: helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in values.items()}
    written = {name for node in nodes for name in node.output}
    weights = [numpy_helper.from_array(np.float32([1e-12]), "epsilon")]
    graph = helper.make_graph(
        nodes,
        "base",
        [info for name, info in infos.items() if name not in written],
        [infos[name] for name in outputs],
        weights,
        value_info=[infos[name] for name in infos if name in written and name not in outputs],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("algm", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def node(op: str, inputs: str, outputs: str, domain: str = "algm", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), name=f"{op}_node", domain=domain, **attributes)


VALUES = {
    "tokens": (FLOAT, ["batch", ROWS, WIDTH]),
    "size": (FLOAT, ["batch", ROWS]),
    "tau": (FLOAT, []),
    "merged": (FLOAT, ["batch", "rows", WIDTH]),
    "sizes": (FLOAT, ["batch", "rows"]),
    "map": (INT64, ["batch", ROWS - PREFIX]),
    "length": (INT64, ["batch"]),
}
MERGE = node("clap", "tokens size tau", "merged sizes map length", **CLAP)


def merging(*more: onnx.NodeProto, outputs: str = "merged map", **values: tuple[int, list[Any]]) -> ir.Model:
    return base([MERGE, *more], VALUES | values, outputs.split())


def attributes(found: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in found.attribute}


def only(model: onnx.ModelProto, op: str) -> onnx.NodeProto:
    (found,) = [n for n in model.graph.node if n.op_type == op]
    return found


def elem_type(model: onnx.ModelProto, name: str) -> int:
    """Type of a tensor, from the node that casts or the constant that holds it."""
    for tensor in model.graph.initializer:
        if tensor.name == name:
            return tensor.data_type
    (producer,) = [n for n in model.graph.node if name in n.output]
    assert producer.op_type == "Cast"
    return int(attributes(producer)["to"])


def test_a_merge_becomes_a_plugin_node_with_a_row_count() -> None:
    model, counts = tensorrt_from_base(merging(), "fp32", [9])
    clap = only(model, "clap")
    assert counts == Counter(clap=1)
    assert list(clap.output) == ["merged", "sizes", "map", "length", "merged_rows"]
    expected = CLAP | {"semantics": 1, "batch": 0, "order": 1, "grid": list(GRID), "window": [2, 2]}
    assert attributes(clap) == expected | {
        "plugin_namespace": b"algm_deploy", "plugin_version": b"2", "usual_rows": 9
    }  # fmt: skip
    assert attributes(only(tensorrt_from_base(merging(), "fp32")[0], "clap"))["usual_rows"] == 0  # nobody measured
    with pytest.raises(ExportError, match="expected usual rows for 1 merges, got 2"):
        tensorrt_from_base(merging(), "fp32", [9, 8])


def test_gbm_attributes() -> None:
    gbm = node("gbm", "merged sizes map length tau", "t2 s2 m2 l2", **GBM)
    more = {"t2": VALUES["merged"], "s2": VALUES["sizes"], "m2": VALUES["map"], "l2": VALUES["length"]}
    model, counts = tensorrt_from_base(merging(gbm, outputs="t2 m2", **more), "fp32")
    found = attributes(only(model, "gbm"))
    assert counts == Counter(clap=1, gbm=1)
    assert (found["rule"], found["batch"], found["divisor"]) == (2, 1, 2.5)
    assert only(model, "gbm").output[4] == "t2_rows"


@pytest.mark.parametrize(("kind", "cast"), [(TensorProto.UINT8, True), (TensorProto.INT32, False)])
def test_labels_leave_the_plugin_as_int32(kind: int, cast: bool) -> None:
    tail = node("label_map", "merged map", "labels", prefix=0, grid=GRID, size=(16, 24))
    model, _ = tensorrt_from_base(merging(tail, outputs="labels", labels=(kind, ["batch", 16, 24])), "fp32")
    assert [n.op_type for n in model.graph.node] == ["clap", "label_map", *(["Cast"] if cast else [])]
    assert model.graph.node[-1].output[0] == "labels"
    if cast:
        assert attributes(model.graph.node[-1])["to"] == kind


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (node("prune", "tokens", "x"), "prune_node is algm.prune"),
        (node("Gelu", "tokens", "x", domain="com.microsoft"), "Gelu_node is com.microsoft.Gelu"),
        (node("GroupNormalization", "tokens", "x", domain=""), "changed its meaning"),
        (node("unmerge", "tokens map", "x", semantics="other"), "expected semantics out of code, paper, got other"),
    ],
)
def test_untranslatable_nodes_are_named(bad: onnx.NodeProto, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        tensorrt_from_base(merging(bad, outputs="x", x=VALUES["tokens"]), "fp32")


# --- attention -------------------------------------------------------------------------------------------------------


def attention_model(masked: bool) -> ir.Model:
    values = {"qkv": (FLOAT, ["batch", "rows", 24]), "out": (FLOAT, ["batch", "rows", 8]), "length": (INT64, ["batch"])}
    if not masked:
        del values["length"]
    attend = node("attention", "qkv length" if masked else "qkv", "out", heads=2, scale=0.5)
    return base([attend], values, ["out"])


@pytest.mark.parametrize("masked", [True, False])
def test_attention_equals_its_definition(masked: bool) -> None:
    model, counts = tensorrt_from_base(attention_model(masked), "fp32")
    rng = np.random.default_rng(0)
    qkv, length = rng.standard_normal((3, 7, 24), dtype=np.float32), np.array([7, 1, 4])
    feeds = {"qkv": qkv, "length": length} if masked else {"qkv": qkv}
    (out,) = evaluate(model, feeds)
    expected = attention_reference(qkv, length if masked else None, heads=2, scale=0.5)
    for b in range(3):
        valid = int(length[b]) if masked else 7
        np.testing.assert_allclose(out[b, :valid], expected[b, :valid], rtol=2e-6, atol=2e-6)
    assert counts == Counter(attention=1)


def test_layers_with_the_same_lengths_share_one_mask() -> None:
    model = merging(
        node("attention", "merged length", "a", heads=1, scale=1.0),
        node("attention", "a length", "b", heads=1, scale=1.0),
        outputs="b",
        merged=(FLOAT, ["batch", "rows", 24]),
        a=(FLOAT, ["batch", "rows", 24]),
        b=(FLOAT, ["batch", "rows", 8]),
    )
    lowered, counts = tensorrt_from_base(model, "fp32")
    assert counts["attention"] == 2
    assert [n.op_type for n in lowered.graph.node].count("Range") == 1
    assert {n.input[3] for n in lowered.graph.node if n.op_type == "Attention"} == {"length_mask"}


def test_the_builder_may_split_an_attention_without_a_fused_kernel() -> None:
    model, _ = tensorrt_from_base(attention_model(masked=False), "fp32")
    assert attributes(only(model, "Attention"))["TRT_decomposable"] == 1


# --- precision -------------------------------------------------------------------------------------------------------


def normalised() -> ir.Model:
    """Unit-length merged tokens, with the smallest norm that the published code divides by."""
    return merging(
        node("ReduceL2", "merged", "norm", domain="", keepdims=1),
        node("Max", "norm epsilon", "safe", domain=""),
        node("Div", "merged safe", "unit", domain=""),
        node("MatMul", "unit weight", "scores", domain=""),
        outputs="scores map",
        norm=(FLOAT, ["batch", "rows", 1]),
        safe=(FLOAT, ["batch", "rows", 1]),
        unit=VALUES["merged"],
        weight=(FLOAT, [WIDTH, 3]),
        scores=(FLOAT, ["batch", "rows", 3]),
    )


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_decisions_and_norms_stay_fp32(precision: Precision) -> None:
    model, counts = tensorrt_from_base(normalised(), precision)
    low = {"fp16": HALF, "bf16": TensorProto.BFLOAT16}[precision]
    clap = only(model, "clap")
    assert elem_type(model, clap.input[0]) == low
    assert list(clap.input[1:3]) == ["size", "tau"]  # graph inputs, fp32
    assert clap.output[0] != "merged"
    assert clap.output[1] == "sizes"
    for op in ("ReduceL2", "Max", "Div"):
        assert only(model, op).output[0] in ("norm", "safe", "unit"), op
    assert elem_type(model, only(model, "MatMul").input[0]) == low
    assert elem_type(model, "scores") == FLOAT
    assert counts["weight"] == 0  # the only initializer is used in fp32
    assert [o.type.tensor_type.elem_type for o in model.graph.output] == [FLOAT, INT64]


def test_places_of_deformable_attention_stay_fp32() -> None:
    """A place of a large grid, rounded to 16 bits, is another one; the product that gives the offsets is 16-bit."""
    places = FLOAT, ["batch", 3, 1, 1, 2, 2]
    graph = base(
        [
            node("MatMul", "query weight", "offsets", domain=""),
            node("Mul", "offsets cell", "scaled", domain=""),
            node("Add", "scaled own", "locations", domain=""),
            node("deformable_attention", "value locations shares", "values", shapes=[2, 3]),
        ],
        {
            **{"query": (FLOAT, ["batch", 3, 1, 1, 2, 4]), "weight": (FLOAT, [4, 2]), "offsets": places},
            **{"cell": (FLOAT, [1, 2]), "own": (FLOAT, [3, 1, 1, 1, 2]), "scaled": places, "locations": places},
            **{"value": (FLOAT, ["batch", 6, 1, 4]), "shares": (FLOAT, ["batch", 3, 1, 1, 2])},
            "values": (FLOAT, ["batch", 3, 4]),
        },
        ["values"],
    )
    model, _ = tensorrt_from_base(graph, "bf16")
    (added,) = [n for n in model.graph.node if n.name == "Add_node"]
    assert elem_type(model, only(model, "MatMul").input[0]) == TensorProto.BFLOAT16
    assert elem_type(model, "offsets") == FLOAT
    assert list(added.input) == ["scaled", "own"]
    assert list(added.output) == ["locations"]
    looking = only(model, "deformable_attention")
    assert elem_type(model, looking.input[0]) == TensorProto.BFLOAT16
    assert list(looking.input[1:]) == ["locations", "shares"]
    assert looking.output[0] != "values"
    assert elem_type(model, "values") == FLOAT  # a cast of what the plugin gives


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_merging_again_in_16_bits_says_that_it_multiplies_in_fp32(precision: Precision) -> None:
    again = node("remerge", "patches map sizes", "again", prefix=PREFIX)
    more = {"patches": VALUES["tokens"], "again": VALUES["merged"]}
    model, _ = tensorrt_from_base(merging(again, outputs="again map", **more), precision)
    assert [n.op_type for n in model.graph.node].count("MatMul") == 1
    told = {entry.key: entry.value for entry in model.metadata_props}
    assert told == {FLOAT32_PRODUCTS: "1", PLAIN_ATTENTIONS: "0"}


def test_fp32_is_left_alone() -> None:
    model, counts = tensorrt_from_base(normalised(), "fp32")
    assert "Cast" not in [n.op_type for n in model.graph.node]
    assert counts == Counter(clap=1)


def half_base() -> ir.Model:
    half = {name: (HALF if name in ("tokens", "merged") else kind, shape) for name, (kind, shape) in VALUES.items()}
    return base([MERGE], half, ["merged", "map"])


def test_a_graph_in_the_wanted_precision_is_left_alone() -> None:
    model, counts = tensorrt_from_base(half_base(), "fp16")
    assert counts == Counter(clap=1)
    assert only(model, "clap").output[0] == "merged"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_graph_in_another_precision_is_refused(precision: Precision) -> None:
    with pytest.raises(ExportError, match="holds float16 tensors"):
        tensorrt_from_base(half_base(), precision)


def test_a_tensor_without_type_is_refused() -> None:
    model = merging(
        node("Relu", "merged", "x", domain=""), node("Relu", "x", "y", domain=""), outputs="y", y=VALUES["merged"]
    )
    with pytest.raises(ExportError, match="x has none"):
        tensorrt_from_base(model, "fp16")


# --- the whole graph -------------------------------------------------------------------------------------------------


NETWORK, PLAN = toy("segmenter", "mask_transformer")
Translate = Callable[..., ir.Model]


@pytest.fixture(scope="module")
def tiny() -> Deployed:
    return deployed_toy(NETWORK, PLAN, "labels")


@pytest.fixture(scope="module")
def exported(tiny: Deployed, translated: Translate) -> ir.Model:
    return translated(tiny, PLAN)


def feeds(image: Any) -> dict[str, Any]:
    return {"image": image, "clap_threshold": np.float32(TAU), "gbm_threshold": np.float32(1.0)}


def test_the_exported_network_computes_the_same(tiny: Deployed, exported: ir.Model) -> None:
    model, counts = tensorrt_from_base(exported, "fp32")
    assert counts == Counter(attention=4, clap=1, gbm=1, label_map=1)
    image = pictures(NETWORK, 2)
    labels, counts_out, *maps = evaluate(model, feeds(image))
    with torch.inference_mode():
        expected, expected_counts, expected_maps = tiny(torch.from_numpy(image), merge_inputs(TAU, 1.0))
    assert labels.dtype == np.uint8
    np.testing.assert_array_equal(counts_out, expected_counts.numpy())
    assert len(np.unique(expected)) > 2
    assert len(np.unique(counts_out)) > 1  # images of different lengths: the mask is at work
    for found, wanted in zip(maps, expected_maps, strict=True):
        np.testing.assert_array_equal(found, wanted.numpy())
    assert (labels == expected.numpy()).mean() > 0.999


@pytest.mark.parametrize(("precision", "limit"), [("fp16", 0.01), ("bf16", 0.08)])  # bf16 is 8 times coarser
def test_the_exported_network_in_lower_precision(exported: ir.Model, precision: Precision, limit: float) -> None:
    wide, _ = tensorrt_from_base(exported, "fp32")
    model, counts = tensorrt_from_base(exported, precision)
    assert counts["weight"] > 30
    low = {"fp16": HALF, "bf16": TensorProto.BFLOAT16}[precision]
    weights = {t.name: t.data_type for t in model.graph.initializer if t.data_type in (FLOAT, low)}
    products = [n for n in model.graph.node if n.op_type in ("MatMul", "Conv")]
    assert products
    for product in products:
        assert weights.get(product.input[1], low) == low, product.name
    assert [o.type.tensor_type.elem_type for o in model.graph.output][:2] == [TensorProto.UINT8, INT64]
    image = pictures(NETWORK, 4)  # a share of pixels, which one picture with many ties does not decide
    labels, counts_out, *_ = evaluate(model, feeds(image))
    expected, expected_counts, *_ = evaluate(wide, feeds(image))
    assert len(np.unique(expected)) > 2
    np.testing.assert_array_equal(counts_out, expected_counts)
    assert (labels != expected).mean() < limit


def test_budgets_compute_the_same(translated: Translate) -> None:
    """In standard operators, and a mask for nobody: every image is as long."""
    plan = with_budgets(PLAN)
    budgets = deployed_toy(NETWORK, plan, "labels")
    base = translated(budgets, plan)
    graph, _ = tensorrt_from_base(base, "fp32")
    image = pictures(NETWORK, 2)
    labels, counts, *maps = evaluate(graph, {"image": image})
    with torch.inference_mode():
        expected, expected_counts, expected_maps = budgets(torch.from_numpy(image), merge_inputs(0.0, 0.0))
    np.testing.assert_array_equal(counts, expected_counts.numpy())
    assert len(np.unique(counts, axis=0)) == 1
    for found, wanted in zip(maps, expected_maps, strict=True):
        np.testing.assert_array_equal(found, wanted.numpy())
    assert (labels == expected.numpy()).mean() > 0.999
    half, _ = tensorrt_from_base(base, "fp16")
    assert (evaluate(half, {"image": image})[0] != labels).mean() < 0.01
    attentions = [node for node in graph.graph.node if node.op_type == "Attention"]
    assert {len(node.input) for node in attentions} == {3}


def test_polygraphy_reads_the_graph(exported: ir.Model, tmp_path: Path) -> None:
    model, _ = tensorrt_from_base(exported, "fp16")
    onnx.save(model, tmp_path / "model.tensorrt.onnx")
    polygraphy = [sys.executable, "-c", _INSPECT]
    command = [*polygraphy, "inspect", "model", tmp_path / "model.tensorrt.onnx", "--show", "layers"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in (
        "ONNX Opset: 23 | Other Opsets: {'algm': 1}",
        "[Op: clap]",
        "[Op: gbm]",
        "[Op: label_map]",
        "token_counts [dtype=int64",
    ):
        assert line in done.stdout


@pytest.mark.parametrize(
    ("family", "decoder"),
    [
        ("setr", "naive"),
        ("setr", "pup"),
        ("setr", "mla"),
        ("segvit", "atm"),
        ("dinov2", "linear"),
        ("dinov2", "linear_ms"),
        ("deit", "linear"),
        ("eomt", "queries"),
    ],
)
def test_other_families_compute_the_same(translated: Translate, family: str, decoder: str) -> None:
    """Decoders that unmerge tokens of several depths, in fp32; in fp16 the graph keeps its merges and outputs."""
    network, plan = toy(family, decoder)
    deployed = deployed_toy(network, plan)
    base = translated(deployed, plan)
    graph, counts = tensorrt_from_base(base, "fp32")
    assert (counts["clap"], counts["gbm"], counts["unmerge"]) == (1, 1, len(network.stages) or 1)
    image = pictures(network, 2)
    scores, counts_out, *_ = evaluate(graph, feeds(image))
    with torch.inference_mode():
        expected, expected_counts, _ = deployed(torch.from_numpy(image), merge_inputs(TAU, 1.0))
    np.testing.assert_array_equal(counts_out, expected_counts.numpy())
    assert len(np.unique(counts_out)) > 1
    np.testing.assert_allclose(scores, expected.numpy(), rtol=0, atol=1e-4)
    in_parts, counts_in_parts, *_ = chained(graph, feeds(image))
    np.testing.assert_array_equal(counts_in_parts, counts_out)
    np.testing.assert_allclose(in_parts, scores, rtol=0, atol=1e-5)
    half, _ = tensorrt_from_base(base, "fp16")
    assert [output.type for output in half.graph.output] == [output.type for output in graph.graph.output]
