"""Scores on a grid become labels in the library: once in every network that ends so, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from toys import pictures

from algm_deploy.bundle.signature import threshold_defaults
from algm_deploy.lowering.onnxruntime import CUSTOM_OPERATORS, SMALLEST_CELL, Provider, rewrite
from algm_deploy.ops.bodies import Body

PROVIDERS: tuple[Provider, ...] = ("cpu", "cuda")
# Cells of how many pixels a side they end in; ViT-Adapter's graph and EVA's are by far the largest, and end like MLA's.
FAMILIES = {
    ("dinov2", "linear_ms"): 16,
    ("setr", "naive"): 16,
    ("setr", "pup"): 2,
    ("setr", "mla"): 4,
    ("setr", "naive_mmseg"): 4,
    ("setr", "mla_mmseg"): 4,
    ("segvit", "prune"): 16,
    ("vit_adapter", "upernet"): 4,
    ("eva", "mask2former"): 4,
}
# For every score by which a class wins or loses (`kInterpolationMargin` in interpolation.hpp): what rounding moves two
# interpolated scores by, in units of the largest. Once by the library, and once by ONNX Runtime, whose scores judge.
MARGIN = 2 * 2e-6
LARGE = (("vit_adapter", "upernet"), ("eva", "mask2former"))
Graph = tuple[ir.Graph, ir.Node, ir.Node, ir.Node]


@pytest.mark.parametrize(
    ("family", "decoder"),
    [pytest.param(*case, marks=pytest.mark.slow) if case in LARGE else case for case in FAMILIES],
)
def test_a_network_that_ends_on_a_grid_has_one(
    exported_toy: Any, ort_library: Path, tmp_path: Path, family: str, decoder: str
) -> None:
    """And its labels are those of the scores of the same graph that ends in them, but where two are as high."""
    exported = exported_toy(family, decoder)
    feeds = {"image": pictures(exported.deployed.network), **threshold_defaults(exported.plan)}
    for provider in PROVIDERS:
        graph, with_scores = exported.portable.clone(), exported.portable.clone()
        assert rewrite(with_scores, provider, True, False)["label_map"] == 0, "its output are scores"
        (scores,) = _run(with_scores, tmp_path / f"{provider}_scores.onnx", ort_library, feeds, "scores")
        _let_labels_be_its_output(graph)
        assert rewrite(graph.clone(), provider, False, False)["label_map"] == 0, "there is no library"
        fires = FAMILIES[family, decoder] >= SMALLEST_CELL[provider]
        assert rewrite(graph, provider, True, False)["label_map"] == fires
        assert ("ArgMax" in [node.op_type for node in graph.graph]) == (not fires)
        (labels,) = _run(graph, tmp_path / f"{provider}.onnx", ort_library, feeds)
        assert labels.dtype == np.uint8 and len(np.unique(labels)) > 1
        found = np.take_along_axis(scores, labels[:, None].astype(np.int64), 1)[:, 0]
        np.testing.assert_allclose(found, scores.max(1), rtol=0, atol=MARGIN * abs(scores).max())


def _let_labels_be_its_output(model: ir.Model) -> None:
    """As a network that is deployed for labels ends; `Deployed` is what its scores become labels in."""
    output = model.graph.outputs[0]
    best = ir.node("ArgMax", [output], {"axis": 1, "keepdims": 0, "select_last_index": 0})
    labels = ir.node("Cast", best.outputs, {"to": ir.DataType.UINT8}, name="labels")
    assert output.shape is not None
    sides = list(output.shape)
    value = labels.outputs[0]
    value.name, value.shape, value.type = "labels", ir.Shape([sides[0], *sides[2:]]), ir.TensorType(ir.DataType.UINT8)
    model.graph.extend([best, labels])
    model.graph.outputs[:] = [value]


def _run(
    model: ir.Model, path: Path, library: Path, feeds: dict[str, Any], output: str = "labels"
) -> Sequence[np.ndarray]:
    ir.save(model, path)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    dtypes = {"tensor(uint8)": "u1", "tensor(float)": "f4", "tensor(float16)": "f2"}
    taken = {i.name: np.asarray(feeds[i.name], dtypes[i.type]) for i in session.get_inputs()}
    found: Sequence[np.ndarray] = session.run([output], taken)
    return found


def tail(classes: int = 5, factor: int = 4, half: bool = False) -> Graph:
    """Scores of a grid of 3 x 4 cells, as a network hands them on, and the three nodes that make labels of them."""
    shape = ["batch", classes, 3, 4]
    kind = ir.DataType.FLOAT16 if half else ir.DataType.FLOAT
    scores = ir.Value(name="scores", shape=ir.Shape(shape), type=ir.TensorType(kind))
    body, size = Body(), [3 * factor, 4 * factor]
    maps = body.fp32(scores) if half else scores
    maps.shape, maps.type = scores.shape, ir.TensorType(ir.DataType.FLOAT)
    sizes = body("Concat", body("Shape", maps, start=0, end=2), np.array(size), axis=0)
    full = body(
        "Resize", maps, None, None, sizes, mode="linear", coordinate_transformation_mode="half_pixel", antialias=0
    )
    full.shape, full.type = ir.Shape([*shape[:2], *size]), ir.TensorType(ir.DataType.FLOAT)
    best = body("ArgMax", full, axis=1, keepdims=0, select_last_index=0)
    to = ir.DataType.UINT8 if classes <= 255 else ir.DataType.INT32
    labels = body("Cast", best, to=to)
    labels.name, labels.shape, labels.type = "labels", ir.Shape(["batch", *size]), ir.TensorType(to)
    graph = ir.Graph([scores], [labels], nodes=body.nodes, opset_imports={"": 18}, name="tail")
    return graph, full.producer(), best.producer(), labels.producer()  # type: ignore[return-value]


def fired(graph: ir.Graph, provider: Provider = "cuda") -> int:
    return rewrite(ir.Model(graph, ir_version=10), provider, True, False)["label_map"]


@pytest.mark.parametrize("half", [False, True])
def test_it_computes_what_the_three_nodes_do(ort_library: Path, tmp_path: Path, half: bool) -> None:
    """The lowest of equal classes wins; 16 bits are widened by the library, so they are half as much to turn."""
    values = np.random.default_rng(0).integers(-2, 3, (3, 5, 3, 4)).astype("f2" if half else "f4")
    graphs = [tail(half=half)[0] for _ in range(2)]
    assert fired(graphs[1]) == 1
    assert [node.op_type for node in graphs[1] if node.op_type in ("Cast", "Resize", "ArgMax")] == []
    expected, found = (
        _run(ir.Model(graph, ir_version=10), tmp_path / f"{i}.onnx", ort_library, {"scores": values})[0]
        for i, graph in enumerate(graphs)
    )
    assert len(np.unique(expected)) == 5
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"coordinate_transformation_mode": "align_corners"},
        {"coordinate_transformation_mode": "asymmetric"},
        {"mode": "nearest"},
        {"mode": "cubic"},
        {"antialias": 1},
        {"exclude_outside": 1},
        {"keep_aspect_ratio_policy": "not_larger"},
        {"axes": [2, 3]},
    ],
)
def test_other_interpolations_stay(change: dict[str, Any]) -> None:
    graph, resize, _, _ = tail()
    resize.attributes.update({name: ir.convenience.convert_attribute(name, value) for name, value in change.items()})
    assert fired(graph) == 0


@pytest.mark.parametrize("change", [{"axis": 2}, {"keepdims": 1}, {"select_last_index": 1}])
def test_other_choices_stay(change: dict[str, int]) -> None:
    graph, _, best, _ = tail()
    best.attributes.update({name: ir.AttrInt64(name, value) for name, value in change.items()})
    assert fired(graph) == 0


def test_a_size_that_is_a_scale_stays() -> None:
    """By a scale, pixels lie where it says, not where the size would have them."""
    graph, resize, _, _ = tail()
    scales = ir.Value(name="scales", const_value=ir.tensor(np.array([1, 1, 4, 4], np.float32), name="scales"))
    graph.initializers["scales"] = scales
    resize.replace_input_with(2, scales)
    assert fired(graph) == 0


def test_interpolation_in_16_bits_stays() -> None:
    graph, resize, _, _ = tail()
    resize.inputs[0].type = ir.TensorType(ir.DataType.FLOAT16)  # type: ignore[union-attr]
    assert fired(graph) == 0


def test_more_classes_than_8_bits_tell_apart_stay() -> None:
    assert fired(tail(classes=255)[0]) == 1
    assert fired(tail(classes=256)[0]) == 0


def test_small_cells_are_left_to_a_processor() -> None:
    for provider in PROVIDERS:
        for factor in (1, 2, 4):
            assert fired(tail(factor=factor)[0], provider) == (factor >= SMALLEST_CELL[provider])


def test_smaller_pictures_than_the_grid_stay() -> None:
    graph, resize, _, labels = tail(factor=1)
    resize.outputs[0].shape, labels.outputs[0].shape = ir.Shape(["batch", 5, 2, 3]), ir.Shape(["batch", 2, 3])
    assert fired(graph) == 0


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_sides_that_are_not_known_stay(axis: int) -> None:
    """Of the grid, or of the picture."""
    for place in ("inputs", "outputs"):
        graph, resize, _, _ = tail()
        value = getattr(resize, place)[0]
        value.shape = ir.Shape([*value.shape[:axis], None, *value.shape[axis + 1 :]])
        assert fired(graph) == 0, place
    graph, resize, _, _ = tail()
    resize.inputs[0].shape = None  # type: ignore[union-attr]
    assert fired(graph) == 0


@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_enlarged_along_another_axis_stays(axis: int) -> None:
    """Between images or between classes too."""
    graph, resize, _, _ = tail()
    assert resize.outputs[0].shape is not None
    resize.outputs[0].shape[axis] = 10
    assert fired(graph) == 0


def test_more_or_fewer_axes_than_a_picture_has_stay() -> None:
    """As many numbers behind the batch make no maps of what has another axis."""
    for place in ("inputs", "outputs"):
        graph, resize, _, _ = tail()
        value = getattr(resize, place)[0]
        value.shape = ir.Shape([*value.shape[:1], "more", *value.shape[1:]])
        assert fired(graph) == 0, place


def test_scores_that_something_else_needs_too_stay() -> None:
    graph, resize, _, _ = tail()
    second = ir.node("ReduceMax", [resize.outputs[0]], {"keepdims": 0})
    second.outputs[0].name = "highest"
    graph.append(second)
    graph.outputs.append(second.outputs[0])
    assert fired(graph) == 0
    graph, resize, _, _ = tail()
    graph.outputs.append(resize.outputs[0])
    assert fired(graph) == 0


def test_both_providers_have_the_operator() -> None:
    assert all("label_map" in CUSTOM_OPERATORS[provider] for provider in PROVIDERS)
