"""Portable ONNX: every `algm` operator gets a function body in standard ops, so any runtime of opset 18 can run it.

For runtimes that know no functions the bodies are written into the graph (`inline`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx_ir.passes.common import InlinePass

from algm_deploy.bundle.graphs import DOMAIN
from algm_deploy.errors import BundleError
from algm_deploy.ops.bodies import BODIES, OPSET, Body
from algm_deploy.ops.schema import SCHEMAS

# ToMe, ELViT, EViT and CTS leave as many tokens in every picture, merging again is a product.
_WITHOUT_PLUGIN = frozenset(
    {
        "cls_attention",
        "cts",
        "elvit",
        "elvit_restore",
        "evit",
        "proportional_attention",
        "remerge",
        "tome",
    }
)
# Their bodies count rows, which have to be numbers for TensorRT.
_OF_KNOWN_ROWS = frozenset({"tome"})


def has_budget(node: ir.Node) -> bool:
    """Whether a node merges by the rule `budget`: a number that is known, so that all its shapes are."""
    rule = node.attributes.get("rule")
    return rule is not None and rule.as_string() == "budget"


def needs_no_plugin(node: ir.Node) -> bool:
    """Whether TensorRT takes a node's body as it is: the data decides none of its shapes."""
    return has_budget(node) or node.op_type in _WITHOUT_PLUGIN


def add_function_bodies(
    model: ir.Model, wanted: Callable[[ir.Node], bool] = lambda _: True, processor: bool = False
) -> int:
    """Gives every wanted node of domain `algm` a function body, in place; returns how many nodes got one.

    A body is written for the node's attributes. Nodes that differ in them call functions of different names
    (`attention`, `attention_2`, ...). `processor`: see `Body`.
    """
    names: dict[Hashable, str] = {}
    used: dict[str, int] = {}
    nodes = [node for node in model.graph if node.domain == DOMAIN and wanted(node)]
    for node in nodes:
        variant = _variant(node)
        if variant not in names:
            used[node.op_type] = count = used.get(node.op_type, 0) + 1
            names[variant] = node.op_type if count == 1 else f"{node.op_type}_{count}"
            function = function_of(node, names[variant], processor)
            model.functions[function.identifier()] = function
        node.op_type = names[variant]
    return len(nodes)


def inline(model: ir.Model) -> None:
    """Writes the bodies of all functions where they are called, in place: no function and no node of domain `algm` is
    left. What the network computes stays the same."""
    InlinePass()(model)
    model.graph.opset_imports.pop(DOMAIN, None)


def load_portable(path: Path) -> ir.Model:
    """The portable graph of a bundle, its weights left in their file.

    Raises:
        BundleError: the file cannot be read, or was not written by this package.
    """
    try:
        model = ir.load(path)
    except (DecodeError, ir.serde.SerdeError) as error:
        raise BundleError(f"{path}: expected an ONNX file, it cannot be decoded: export the bundle again") from error
    found = model.graph.opset_imports.get("")
    if found != OPSET or not model.graph.outputs:
        raise BundleError(f"{path}: expected a network in ONNX opset {OPSET}, got {found}: export the bundle again")
    return model


def fix_batch(model: ir.Model) -> None:
    """Lets a graph take one image at a time, in place."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None and len(value.shape):
            value.shape = ir.Shape([1, *list(value.shape)[1:]])
    for node in model.graph:
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape([1 if str(d) == "batch" else d for d in value.shape])


def operator_of(function: str) -> str:
    """The operator behind the name of a function: `attention_2` is `attention`."""
    return re.sub(r"_\d+$", "", function)


def function_of(node: ir.Node, name: str, processor: bool = False) -> ir.Function:
    """A function of the given name that computes what `node`, an operator of domain `algm`, stands for."""
    schema = SCHEMAS[node.op_type]
    present = [value is not None for value in node.inputs]
    shapes = _shapes(node)
    # A body may take more than the operator does, for a runtime that hands it more.
    names = [parameter.name for parameter in schema.inputs] + [f"more_{i}" for i in range(len(shapes))]
    inputs = [ir.Value(name=name, shape=shape) for name, shape in zip(names, shapes, strict=False)]
    arguments = [value if there else None for value, there in zip(inputs, present, strict=True)]
    dtypes = [output.dtype or ir.DataType.UNDEFINED for output in node.outputs]
    body = Body(dtypes, processor)
    outputs = BODIES[node.op_type](body, _attributes(node), *arguments)
    for value in (*inputs, *(made for one in body.nodes for made in one.outputs)):
        value.shape = None  # has served its purpose
    taken = {value.name for value in inputs}
    for value, parameter in zip(outputs, schema.outputs, strict=True):
        value.name = f"{parameter.name}_out" if parameter.name in taken else parameter.name
    graph = ir.Graph(inputs, outputs, nodes=body.nodes, opset_imports={"": OPSET}, name=name)
    # Declared so that a call keeps its attributes, for people to read; the body has them built in.
    declared = [ir.Attr(key, attribute.type, None) for key, attribute in node.attributes.items()]
    return ir.Function(DOMAIN, name, "", graph=graph, attributes=declared)


def _attributes(node: ir.Node) -> dict[str, Any]:
    return {key: attribute.value for key, attribute in node.attributes.items()}


def _variant(node: ir.Node) -> Hashable:
    """What makes two nodes need different bodies."""
    attributes = tuple(sorted((k, str(v.value)) for k, v in node.attributes.items()))
    rows = tuple(shape[1] for shape in _shapes(node)[:1] if shape is not None)
    return node.op_type, attributes, rows, tuple(v is None for v in node.inputs), tuple(o.dtype for o in node.outputs)


def _shapes(node: ir.Node) -> list[ir.Shape | None]:
    """Shapes of a node's inputs that its body may rely on: those of a budget, whose rows are the same in every run."""
    known = has_budget(node) or node.op_type in _OF_KNOWN_ROWS
    return [value.shape if known and value is not None else None for value in node.inputs]
