"""A graph for TensorRT, cut around its merges: no part holds a tensor whose size the builder cannot know.

In one engine a merge tells TensorRT its row count by a size tensor. A stretch between two merges takes its rows as an
ordinary dynamic axis instead; the merges are left to the caller, who runs them between the stretches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

import algm_deploy.ops  # noqa: F401  registers torch.ops.algm
from algm_deploy.bundle.graphs import DOMAIN, MERGES
from algm_deploy.bundle.records import EngineMerge
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import ExportError
from algm_deploy.lowering.cutting import Cut
from algm_deploy.lowering.tensorrt import TENSORRT_ONNX
from algm_deploy.ops.schema import SCHEMAS, WORDS

STRETCH_ONNX = "model.tensorrt.stretch-*.onnx"


def write_stretches(bundle: Bundle) -> tuple[dict[Path, set[str]], tuple[EngineMerge, ...]]:
    """Cuts the bundle's `model.tensorrt.onnx` and adds its stretches to the bundle, `*` of `STRETCH_ONNX` their number.

    Returns:
        Paths of the stretches with the names of the axes that their inputs leave open, and the merges between them, in
        order.

    Raises:
        ExportError: see `stretches`.
    """
    parts, merges = stretches(ir.load(bundle.file(TENSORRT_ONNX)))
    entry, paths = bundle.files[TENSORRT_ONNX], {}
    for index, part in enumerate(parts):
        name = STRETCH_ONNX.replace("*", str(index))
        uses = entry.uses if any(isinstance(weight, ir.ExternalTensor) for weight in _weights(part)) else ()
        with bundle.add(name, made_from={TENSORRT_ONNX: entry.sha256}, uses=uses) as path:
            ir.save(part, path)
        shapes = [value.shape or () for value in part.graph.inputs]
        paths[bundle.path / name] = {str(d) for shape in shapes for d in shape if not isinstance(d, int)}
    return paths, merges


def stretches(model: ir.Model) -> tuple[list[ir.Model], tuple[EngineMerge, ...]]:
    """The stretches of a graph that `lowering.tensorrt` wrote, and the merges between them, in order.

    Inputs and outputs of a stretch are called as in `model`, and so are the merges' tensors. Token axes are called
    `tokens_` and the name of the merge that they come from. Merges by a budget are no plugins and stay where they are.

    Raises:
        ExportError: nothing to cut at, or a tensor between two stretches whose type or shape is not known.
    """
    nodes = [node for node in model.graph if _is_merge(node)]
    if not nodes:
        raise ExportError("expected a graph with merges to cut at, found none: build one engine")
    cut = Cut(_is_merge, lambda node: [v for v in node.inputs if v is not None and v.producer() is not None], True)
    parts = cut.parts(model.graph)
    for value in (value for part in parts for value in (*part.inputs, *part.outputs)):
        if value.type is None or value.shape is None:
            raise ExportError(f"expected type and shape of {value.name}, where the graph is cut: export again")
    return [ir.Model(part, ir_version=model.ir_version) for part in parts], tuple(map(_merge, nodes))


def _is_merge(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type in MERGES


def _merge(node: ir.Node) -> EngineMerge:
    kind: Any = node.op_type
    inputs = [str(value.name) for value in node.inputs if value is not None]
    outputs = [str(value.name) for value in node.outputs[: len(SCHEMAS[kind].outputs)]]
    arguments = getattr(torch.ops.algm, kind).default._schema.arguments[len(SCHEMAS[kind].inputs) :]
    attributes = tuple(_attribute(node.attributes[argument.name]) for argument in arguments)
    return EngineMerge(kind=kind, inputs=tuple(inputs), outputs=tuple(outputs), attributes=attributes)


def _attribute(attribute: ir.Attr) -> int | float | str | tuple[int, ...]:
    """The value that the operator takes; plugins have numbers in place of words."""
    value: Any = attribute.value
    if attribute.name in WORDS:
        return WORDS[attribute.name][int(value)]
    found: int | float | str | tuple[int, ...] = tuple(value) if isinstance(value, Sequence) else value
    return found


def _weights(model: ir.Model) -> Iterator[Any]:
    return (value.const_value for value in model.graph.initializers.values())
