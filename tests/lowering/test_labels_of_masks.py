"""Masks of queries become labels in the library where they are its tail and nowhere else; networks are in
test_onnxruntime.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx_ir.tape import Tape
from operator_inputs import assert_mask_labels, mask_inputs

from algm_deploy.lowering.onnxruntime import SMALLEST_CELL, Provider, rewrite

PROVIDERS: tuple[Provider, ...] = ("cpu", "cuda")
Nodes = dict[str, ir.Node]
FLOAT = ir.DataType.FLOAT


def tail(factor: int = 4, before: bool = False) -> tuple[ir.Graph, Nodes]:
    """Labels of masks of 6 queries and 3 x 4 cells by 5 classes, and the nodes that make them, by type; the Exp of what
    falls on both sides is Falling. `before`: numbers come before what they are compared with or added to."""
    tape, batch, size = Tape(), ["batch"], [3 * factor, 4 * factor]
    masks = ir.Value(name="masks", shape=ir.Shape([*batch, 6, 3, 4]), type=ir.TensorType(FLOAT))
    classes = ir.Value(name="classes", shape=ir.Shape([*batch, 6, 5]), type=ir.TensorType(FLOAT))
    zero, one = (tape.initializer(ir.tensor(np.float32(value)), f"number_{value}") for value in (0, 1))
    sides = tape.initializer(ir.tensor(np.array(size, np.int64)), "sides")
    sizes = tape.op("Concat", [tape.op("Shape", [masks], {"start": 0, "end": 2}), sides], {"axis": 0})
    full = tape.op(
        "Resize",
        [masks, None, None, sizes],
        {"mode": "linear", "coordinate_transformation_mode": "half_pixel"},
    )
    full.shape, full.type = ir.Shape([*batch, 6, *size]), ir.TensorType(FLOAT)

    def beside(op_type: str, value: ir.Value, number: ir.Value) -> ir.Value:
        return tape.op(op_type, [number, value] if before else [value, number])

    above = tape.op("Exp", [beside("Min", full, zero)])
    falling = tape.op("Exp", [tape.op("Neg", [tape.op("Abs", [full])])])
    share = tape.op("Div", [above, beside("Add", falling, one)])
    scores = tape.op("Einsum", [classes, share], {"equation": "bqk,bqhw->bkhw"})
    best = tape.op("ArgMax", [scores], {"axis": 1, "keepdims": 0, "select_last_index": 0})
    labels = tape.op("Cast", [best], {"to": ir.DataType.UINT8})
    labels.name, labels.shape, labels.type = "labels", ir.Shape([*batch, *size]), ir.TensorType(ir.DataType.UINT8)
    graph = ir.Graph(
        [masks, classes],
        [labels],
        nodes=tape.nodes,
        initializers=tape.initializers,
        opset_imports={"": 18},
        name="tail",
    )
    nodes = {node.op_type: node for node in graph} | {"Falling": falling.producer(), "Exp": above.producer()}
    return graph, nodes  # type: ignore[return-value]


def fired(graph: ir.Graph, provider: Provider = "cuda") -> int:
    return rewrite(ir.Model(graph, ir_version=10), provider, True, False)["mask_labels"]


@pytest.mark.parametrize("before", [False, True])
def test_it_computes_what_the_nodes_do(ort_library: Path, tmp_path: Path, before: bool) -> None:
    """On whichever side of a node its number is."""
    masks, classes = mask_inputs(np.random.default_rng(0), (2, 6, 3, 4), 5, np.float32, 5.0)
    for name in ("portable", "own"):
        graph, _ = tail(before=before)
        if name == "own":
            assert fired(graph) == 1
            assert [node.op_type for node in graph] == ["mask_labels"]
        ir.save(ir.Model(graph, ir_version=10), tmp_path / "tail.onnx")
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(ort_library))
        session = ort.InferenceSession(tmp_path / "tail.onnx", options, providers=["CPUExecutionProvider"])
        (labels,) = session.run(["labels"], {"masks": masks, "classes": classes})
        assert assert_mask_labels(labels, masks, classes) > 0.9


def test_small_cells_are_left_to_a_processor() -> None:
    """On noise of 256 x 256 pixels the library took 81 ms against 82 at cells of 4, 305 against 130 at cells of 2."""
    for provider in PROVIDERS:
        for factor in (1, 2, 4):
            assert fired(tail(factor)[0], provider) == (factor >= SMALLEST_CELL[provider])


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_sides_that_are_not_known_stay(axis: int) -> None:
    """Of masks, or of the picture."""
    for place in ("inputs", "outputs"):
        graph, nodes = tail()
        value = getattr(nodes["Resize"], place)[0]
        value.shape = ir.Shape([*value.shape[:axis], None, *value.shape[axis + 1 :]])
        assert fired(graph) == 0, place


@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_enlarged_along_another_axis_stays(axis: int) -> None:
    """Between images or between queries too."""
    graph, nodes = tail()
    shape = nodes["Resize"].outputs[0].shape
    assert shape is not None
    shape[axis] = 12
    assert fired(graph) == 0


@pytest.mark.parametrize("op_type", ["Resize", "Min", "Exp", "Falling", "Add", "Div", "Einsum"])
def test_what_something_else_needs_too_stays(op_type: str) -> None:
    for is_output in (False, True):
        graph, nodes = tail()
        value = nodes[op_type].outputs[0]
        if not is_output:
            second = ir.node("ReduceMax", [value], {"keepdims": 0})
            second.outputs[0].name = "highest"
            graph.append(second)
            value = second.outputs[0]
        graph.outputs.append(value)
        assert fired(graph) == 0


def test_classes_in_16_bits_stay() -> None:
    """The library takes probabilities in fp32."""
    for kind in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        graph, _ = tail()
        graph.inputs[1].type = ir.TensorType(kind)
        assert fired(graph) == 0


@pytest.mark.parametrize("count", [1, 3])
def test_the_least_of_one_or_three_is_no_part_of_a_sigmoid(count: int) -> None:
    graph, nodes = tail()
    least = nodes["Min"]
    least.resize_inputs(count)
    if count == 3:
        least.replace_input_with(2, nodes["Resize"].outputs[0])
    assert fired(graph) == 0


@pytest.mark.parametrize(("name", "value"), [("number_0", 1), ("number_1", 2), ("number_1", [1, 1, 1])])
def test_other_numbers_make_no_sigmoid(name: str, value: float | Sequence[float]) -> None:
    graph, _ = tail()
    graph.initializers[name].const_value = ir.tensor(np.array(value, np.float32), name=name)
    assert fired(graph) == 0


@pytest.mark.parametrize(
    ("op_type", "name", "value"),
    [("Einsum", "equation", "bqk,bqhw->bkwh"), ("Resize", "mode", "nearest"), ("ArgMax", "keepdims", 1)],
)
def test_other_nodes_stay(op_type: str, name: str, value: Any) -> None:
    graph, nodes = tail()
    nodes[op_type].attributes[name] = ir.convenience.convert_attribute(name, value)
    assert fired(graph) == 0
