"""A graph for ONNX Runtime on CUDA, cut behind its merges.

A CUDA graph holds kernels of fixed sizes, and the photo decides how many tokens a merge leaves. Cut behind every merge,
a network becomes a chain of segments whose sizes are all known when they start: the rows that come in, a number the
caller has read by then. The merge that ends a segment becomes its padded form: as many rows come out as went in, those
behind the image's length zero. The next segment takes as many of them as the caller likes, no fewer than the merge
counted; attention, GBM and the tail read lengths and maps, never the rest.

A segment is a model of its own. It takes the image, thresholds and outputs of earlier segments by their names, and
holds the weights of its own blocks alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import onnx_ir as ir

from algm_deploy.errors import ExportError
from algm_deploy.lowering.portable import has_budget, operator_of
from algm_deploy.ops.schema import DOMAIN
from algm_deploy.recipe.schema import Merge

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
    segment_of = _segment_of(graph)
    last = max(segment_of.values())
    wanted: list[dict[str, ir.Value]] = [{} for _ in range(last + 1)]
    for value in graph.outputs:
        wanted[_made_in(value, segment_of)][str(value.name)] = value
    for node in graph:
        for value in node.outputs:
            if value.name and value.name.startswith(ROWS):
                wanted[segment_of[node]][value.name] = value
    parts: list[ir.Model] = []
    for index in range(last, -1, -1):  # backwards: a segment says what the earlier ones have to hand over
        outputs = list(wanted[index].values())
        inputs = list(dict.fromkeys(_taken(outputs, index, segment_of)))
        for value in inputs:
            if value.producer() is not None:
                wanted[_made_in(value, segment_of)][str(value.name)] = value
        part = ir.convenience.extract(graph, inputs, outputs)
        _state_padding(part)
        parts.insert(0, ir.Model(part, ir_version=model.ir_version, functions=_functions(model, part)))
    return parts


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
        tokens = node.inputs[0] if _ends_a_segment(node.outputs[0]) else None
        if tokens is not None and tokens.shape is not None:
            for value in node.outputs[:2]:
                assert value.shape is not None
                value.shape = ir.Shape([*list(value.shape)[:1], tokens.shape[1], *list(value.shape)[2:]])


def _segment_of(graph: ir.Graph) -> dict[ir.Node, int]:
    """The segment of every node: behind all merges that it depends on, and before all others."""
    found: dict[ir.Node, int] = {}
    for node in graph:
        before = [_made_in(value, found) + _ends_a_segment(value) for value in node.inputs if value is not None]
        found[node] = max(before, default=0)
    return found


def _made_in(value: ir.Value, segment_of: dict[ir.Node, int]) -> int:
    producer = value.producer()
    return segment_of[producer] if producer is not None else 0


def _ends_a_segment(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type in ("padded_clap", "padded_gbm") and not has_budget(producer)


def _taken(outputs: list[ir.Value], index: int, segment_of: dict[ir.Node, int]) -> Iterator[ir.Value]:
    """Values that a segment takes from outside: graph inputs, and what earlier segments made.

    Constants and sizes are computed anew instead: a size that another segment hands over would be in device memory.
    """
    seen: set[ir.Value] = set()
    left = list(outputs)
    while left:
        value = left.pop()
        producer = value.producer()
        if value in seen or value.is_initializer():
            continue
        seen.add(value)
        if producer is None or (segment_of[producer] < index and not _is_size(value)):
            yield value
        else:
            left += [v for v in producer.inputs if v is not None]


def _is_size(value: ir.Value) -> bool:
    """Whether a value is made of shapes and constants alone."""
    producer = value.producer()
    if producer is None:
        return value.is_initializer()
    return producer.op_type == "Shape" or all(_is_size(v) for v in producer.inputs if v is not None)


def _functions(model: ir.Model, graph: ir.Graph) -> list[ir.Function]:
    called = {(node.domain, node.op_type) for node in graph}
    return [f.clone() for key, f in model.functions.items() if key[:2] in called]
