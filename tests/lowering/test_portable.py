"""Function bodies: one function a variant, none left bare, and the calls keep their attributes for people to read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from algm_deploy.lowering.portable import add_function_bodies
from algm_deploy.ops.schema import SCHEMAS


def test_equal_nodes_share_a_function(exported: Callable[[str], Any]) -> None:
    """Three kinds of attention: in the encoder without and with lengths, and in the decoder with another head width."""
    model = exported("published").portable
    names = [function.name for function in model.functions.values()]
    assert sorted(names) == ["attention", "attention_2", "attention_3", "clap", "gbm", "unmerge"]
    calls = [node.op_type for node in model.graph if node.domain == "algm" and node.op_type.startswith("attention")]
    assert calls == ["attention", *["attention_2"] * 3, *["attention_3"] * 2]


def test_nodes_that_differ_in_attributes_get_functions_of_their_own(exported: Callable[[str], Any]) -> None:
    model = exported("several_gbm").portable
    gbm = [function for function in model.functions.values() if function.name.startswith("gbm")]
    assert [function.name for function in gbm] == ["gbm", "gbm_2"]
    assert [node.attributes["divisor"].as_float() for node in model.graph if node.op_type.startswith("gbm")] == [2, 4]


def test_every_call_has_its_function(exported: Callable[[str], Any], configuration: str) -> None:
    model = exported(configuration).portable
    called = {node.op_identifier() for node in model.graph if node.domain == "algm"}
    assert called == set(model.functions)
    for node in model.graph:
        if node.domain == "algm":
            function = model.functions[node.op_identifier()]
            assert set(function.attributes) == set(node.attributes)
            assert len(function.outputs) == len(node.outputs)


def test_bodies_know_the_names_of_the_schema(exported: Callable[[str], Any]) -> None:
    for function in exported("published").portable.functions.values():
        schema = SCHEMAS[re.sub(r"_\d+$", "", function.name)]
        assert [value.name for value in function.inputs] == [p.name for p in schema.inputs[: len(function.inputs)]]


def test_a_graph_without_operators_is_left_alone() -> None:
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    node = ir.node("Relu", [value])
    model = ir.Model(ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": 18}), ir_version=10)
    assert add_function_bodies(model) == 0
    assert not model.functions
