"""A graph for ONNX Runtime on CUDA, cut after its merges.

A CUDA graph holds kernels of fixed sizes, so the network comes in segments (`cutting`). The merge that ends a segment
becomes its bucketed form: memory for as many rows as went in, at the front of which the images lie, one behind the
other where the network allows it (`ragged`), else each in as many rows as the longest has. The mean of their rows is
rounded up to a multiple of `FINE_STEP`, those of the longest to one of `STEP`, and the next segment takes a tensor of
that size from there, or a larger one where images lie one behind the other; attention, GBM and the tail read lengths
and maps, never the rows behind.
"""

from __future__ import annotations

from typing import Literal, get_args

import onnx_ir as ir

from algm_deploy.bundle.graphs import DOMAIN
from algm_deploy.errors import ExportError
from algm_deploy.lowering.cutting import Cut
from algm_deploy.lowering.portable import operator_of
from algm_deploy.lowering.ragged import make_ragged
from algm_deploy.recipe.plan import Merge

STEP, FINE_STEP = 32, 8  # rows of the longest image, and of all images on average
# What the output that counts a merge's rows is called, before the name of their axis: those of the longest image, and
# those of all images together.
LONGEST, TOGETHER = f"counted_by_{STEP}_", f"summed_by_{FINE_STEP}_"
CONVOLUTIONS = "convolutions"  # the note in a segment of how many there are
_CONVOLUTIONS = ("Conv", "ConvTranspose")


def segments(model: ir.Model) -> list[ir.Model]:
    """The segments of a CUDA graph whose merges, if any, are custom operators that let images decide alone, or merge by
    budgets, whose sizes are known: those end no segment.

    Each has a note `CONVOLUTIONS`. Every segment but the last has one more output, an int64 scalar: `LONGEST` and the
    name of the token axis behind its merge, the rows of the longest image, or `TOGETHER` and that name, the rows of all
    images. The axis is the first, rounded up to `STEP`, or the mean of an image, rounded up to `FINE_STEP`, but no more
    than the rows that went into the merge.

    Raises:
        ExportError: a merge that is no custom operator, as those of ALGM alone can be, or one that lets images decide
            together.
    """
    graph = model.clone().graph
    bodies = {name for _, name, _ in model.functions}
    for node in [n for n in graph if n.domain == DOMAIN and operator_of(n.op_type) in get_args(Merge)]:
        if node.op_type in bodies or node.attributes["batch"].as_string() != "per_image":
            raise ExportError(
                f"node {node.name}: expected a merge of the custom operator library whose images decide alone: build "
                "the library, and export with batch per_image"
            )
        _bucket(node)
    ragged = make_ragged(graph)
    for node in filter(_ends_a_segment, graph):
        _count_rows(node, node in ragged)
    parts = Cut(_ends_a_segment, _counted_rows, between=False).parts(graph)
    for part in parts:
        _state_padding(part)
    return [
        ir.Model(part, ir_version=model.ir_version, functions=_functions(model, part), metadata_props=_notes(part))
        for part in parts
    ]


def _ends_a_segment(node: ir.Node) -> bool:
    return node.op_type in ("bucketed_clap", "bucketed_gbm")


def _counted_rows(node: ir.Node) -> list[ir.Value]:
    return [node.outputs[4]]


def _bucket(node: ir.Node) -> None:
    """Turns a merge into its bucketed form."""
    sized_merge(node, "bucketed")
    node.attributes["ragged"] = ir.AttrString("ragged", "none")


def _count_rows(node: ir.Node, ragged: bool) -> None:
    """Says how the rows of a bucketed merge are rounded, and names their count."""
    node.attributes["step"] = ir.AttrInt64("step", FINE_STEP if ragged else STEP)
    assert node.outputs[0].shape is not None
    axis = str(node.outputs[0].shape[1])
    rows, plan = node.outputs[4:]
    rows.name, plan.name = f"{TOGETHER if ragged else LONGEST}{axis}", f"{node.name}/plan"


def sized_merge(node: ir.Node, form: Literal["padded", "bucketed"]) -> None:
    """Turns a merge into an operator that knows its sizes beforehand, with two more outputs: row count and plan."""
    node.op_type = f"{form}_{node.op_type}"
    node.resize_outputs(6)
    rows, plan = node.outputs[4:]
    rows.shape, rows.type = ir.Shape([]), ir.TensorType(ir.DataType.INT64)
    plan.type = ir.TensorType(ir.DataType.UINT8)


def _state_padding(part: ir.Graph) -> None:
    """Gives the tokens and sizes behind a bucketed merge the rows that went in; the next segment names them anew."""
    for node in part:
        tokens = node.inputs[0] if _ends_a_segment(node) else None
        if tokens is not None and tokens.shape is not None:
            for value in node.outputs[:2]:
                assert value.shape is not None
                value.shape = ir.Shape([*list(value.shape)[:1], tokens.shape[1], *list(value.shape)[2:]])


def _notes(part: ir.Graph) -> dict[str, str]:
    return {CONVOLUTIONS: str(sum(node.op_type in _CONVOLUTIONS for node in part))}


def _functions(model: ir.Model, graph: ir.Graph) -> list[ir.Function]:
    called = {(node.domain, node.op_type) for node in graph}
    return [f.clone() for key, f in model.functions.items() if key[:2] in called]
