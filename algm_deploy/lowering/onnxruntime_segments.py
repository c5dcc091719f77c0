"""A graph for ONNX Runtime on CUDA, cut after its merges.

A CUDA graph holds kernels of fixed sizes, so the network comes in segments (`cutting`). The merge that ends a segment
becomes its padded form: as many rows come out as went in, those behind the image's length zero. The next segment takes
as many of them as the caller likes, no fewer than the merge counted; attention, GBM and the tail read lengths and maps,
never the rest.
"""

from __future__ import annotations

from typing import get_args

import onnx_ir as ir

from algm_deploy.bundle.graphs import DOMAIN
from algm_deploy.errors import ExportError
from algm_deploy.lowering.cutting import Cut
from algm_deploy.lowering.portable import has_budget, operator_of
from algm_deploy.recipe.plan import Merge

ROWS = "rows_of_"  # what the output that counts a merge's rows is called, before the name of their axis


def segments(model: ir.Model) -> list[ir.Model]:
    """The segments of a CUDA graph whose merges, if any, are custom operators that let images decide alone, or merge by
    budgets, whose sizes are known: those end no segment.

    Every segment but the last has one more output, `rows_of_` and the name of the token axis behind its merge: an int64
    scalar, the rows of the longest image. Axes that are called so are the ones the caller may cut.

    Raises:
        ExportError: a merge that is no custom operator (ToMe never is), or one that lets images decide together.
    """
    graph = model.clone().graph
    bodies = {name for _, name, _ in model.functions}
    for node in [n for n in graph if n.domain == DOMAIN and operator_of(n.op_type) in get_args(Merge)]:
        if node.op_type in bodies or node.attributes["batch"].as_string() != "per_image":
            raise ExportError(
                f"node {node.name}: expected a merge of the custom operator library whose images decide alone: build "
                "the library, and export with batch per_image"
            )
        _pad(node)
    parts = Cut(_ends_a_segment, _counted_rows, between=False).parts(graph)
    for part in parts:
        _state_padding(part)
    return [ir.Model(part, ir_version=model.ir_version, functions=_functions(model, part)) for part in parts]


def _ends_a_segment(node: ir.Node) -> bool:
    return node.op_type in ("padded_clap", "padded_gbm") and not has_budget(node)


def _counted_rows(node: ir.Node) -> list[ir.Value]:
    return [node.outputs[4]]


def _pad(node: ir.Node) -> None:
    """Turns a merge into its padded form and names the row count."""
    assert node.outputs[0].shape is not None
    axis = str(node.outputs[0].shape[1])
    padded_merge(node)
    rows, plan = node.outputs[4:]
    rows.name, plan.name = f"{ROWS}{axis}", f"{node.name}/plan"


def padded_merge(node: ir.Node) -> None:
    """Turns a merge into the operator that knows its sizes beforehand, with two more outputs: row count and plan."""
    node.op_type = f"padded_{node.op_type}"
    node.resize_outputs(6)
    rows, plan = node.outputs[4:]
    rows.shape, rows.type = ir.Shape([]), ir.TensorType(ir.DataType.INT64)
    plan.type = ir.TensorType(ir.DataType.UINT8)


def _state_padding(part: ir.Graph) -> None:
    """Gives the tokens and sizes behind a padded merge the rows that went in; the next segment names them anew."""
    for node in part:
        tokens = node.inputs[0] if _ends_a_segment(node) else None
        if tokens is not None and tokens.shape is not None:
            for value in node.outputs[:2]:
                assert value.shape is not None
                value.shape = ir.Shape([*list(value.shape)[:1], tokens.shape[1], *list(value.shape)[2:]])


def _functions(model: ir.Model, graph: ir.Graph) -> list[ir.Function]:
    called = {(node.domain, node.op_type) for node in graph}
    return [f.clone() for key, f in model.functions.items() if key[:2] in called]
