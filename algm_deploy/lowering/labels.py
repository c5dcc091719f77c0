"""From scores to 8-bit labels in one operator of the library: nothing is as large as the picture but the labels.

| the graph's end | here |
|---|---|
| scores on a grid, enlarged to the picture, the class of the highest | `label_map`, every cell a token of its own |
| masks of queries, enlarged, their sigmoids weighted with classes, the class of the highest | `mask_labels` |
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from algm_deploy.bundle.graphs import DOMAIN
from algm_deploy.lowering.patterns import Chain, nodes_of, number, only_user, pair, stand_in

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def labels_by_library(graph: ir.Graph, smallest_cell: int) -> None:
    """Rewrites the end of a graph whose labels have 8 bits.

    `smallest_cell`: fewest pixels along a side of a grid's cell for which labels are the library's.
    """
    for best in nodes_of(graph, "ArgMax"):
        labels = only_user(best.outputs[0], "Cast")
        if labels is None or labels.outputs[0].dtype != ir.DataType.UINT8 or not _is_of_classes(best):
            continue
        add = Chain(graph, labels, str(labels.name))
        new = _of_grid(add, best.inputs[0], smallest_cell) or _of_masks(add, best.inputs[0])
        if new is not None:
            stand_in(labels.outputs[0], new)


def _is_of_classes(best: ir.Node) -> bool:
    """Whether ArgMax tells the class of each pixel, the lowest of equals."""
    told = {"axis": 0, "keepdims": 1, "select_last_index": 0} | {k: a.value for k, a in best.attributes.items()}
    return told == {"axis": 1, "keepdims": 0, "select_last_index": 0}


# --- scores on a grid -------------------------------------------------------------------------------------------------


def _of_grid(add: Chain, scores: ir.Value | None, smallest_cell: int) -> ir.Value | None:
    """The labels of scores (B, K, H, W), if they come from a grid (B, K, h, w)."""
    maps = _enlarged(scores)
    before, after = _sides(maps), _sides(scores)
    if maps is None or len(before) != 3 or before[0] != after[0]:
        return None
    if any(side < smallest_cell * cells for cells, side in zip(before[1:], after[1:], strict=True)):
        return None
    rows, map = _cells(add, maps, before)
    return add("label_map", rows, map, domain=DOMAIN, prefix=0, grid=before[1:], size=after[1:])


def _cells(add: Chain, maps: ir.Value, sides: list[int]) -> tuple[ir.Value, ir.Value]:
    """Maps (B, K, h, w) as rows (B, h w, K), and the token map that names each."""
    images, count = add("Shape", maps, start=0, end=1), math.prod(sides[1:])
    rows = add("Transpose", add("Reshape", maps, add.shape([0, sides[0], count])), perm=[0, 2, 1])
    cells = add.constant(np.arange(count, dtype=np.int64)[None])
    return rows, add("Expand", cells, add("Concat", images, add.shape([count]), axis=0))


# --- masks of queries -------------------------------------------------------------------------------------------------


def _of_masks(add: Chain, scores: ir.Value | None) -> ir.Value | None:
    """The labels of scores (B, K, H, W), if masks (B, Q, h, w) and classes (B, Q, K) of queries make them."""
    weighted = _produced(scores, "Einsum")
    if weighted is None or weighted.attributes["equation"].as_string() != "bqk,bqhw->bkhw":
        return None
    classes, share = pair(weighted)
    enlarged = _sigmoid_of(share)
    masks, size = _enlarged(enlarged), _sides(enlarged)[1:]
    if masks is None or classes.dtype != ir.DataType.FLOAT:
        return None
    return add("mask_labels", masks, classes, domain=DOMAIN, size=size)


def _sigmoid_of(share: ir.Value) -> ir.Value | None:
    """What a value is the sigmoid of, in full: exp(min(x, 0)) / (exp(-|x|) + 1)."""
    quotient = _produced(share, "Div")
    if quotient is None:
        return None
    above, below = pair(quotient)
    x, least = _behind(above, "Exp", "Min")
    same, plus = _behind(below, "Add", "Exp", "Neg", "Abs")
    if x is None or x is not same or number(pair(least[-1])[1]) != 0 or number(pair(plus[0])[1]) != 1:
        return None
    return x if len(list(x.uses())) == 2 and not x.is_graph_output() else None


def _produced(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that computes a value, if it is of this type and nobody else wants the value."""
    node = value.producer() if value is not None else None
    if value is None or node is None or node.op_type != op_type or value.is_graph_output():
        return None
    return node if len(list(value.uses())) == 1 else None


def _behind(value: ir.Value | None, *op_types: str) -> tuple[ir.Value | None, list[ir.Node]]:
    """The first input of a chain of nodes of these types, the last first, and the nodes; None where it is another."""
    nodes: list[ir.Node] = []
    for op_type in op_types:
        node = _produced(value, op_type)
        if node is None:
            return None, []
        nodes.append(node)
        value = node.inputs[0]
    return value, nodes


# --- enlarging --------------------------------------------------------------------------------------------------------


def _enlarged(value: ir.Value | None) -> ir.Value | None:
    """The maps (B, C, h, w) from which a value of known sides is interpolated as the library does: in fp32, between
    centres of cells, to a size that is given; in 16 bits if they come from there."""
    resize = value.producer() if value is not None else None
    if value is None or resize is None or resize.op_type != "Resize" or value.is_graph_output():
        return None
    maps, _, scales, sizes = [*resize.inputs, None, None, None][:4]
    told = {"coordinate_transformation_mode": "half_pixel", "keep_aspect_ratio_policy": "stretch"}
    told |= {name: attribute.value for name, attribute in resize.attributes.items()}
    bilinear = (
        told.get("mode") == "linear"
        and told["coordinate_transformation_mode"] == "half_pixel"
        and told["keep_aspect_ratio_policy"] == "stretch"
        and not any(told.get(name) for name in ("antialias", "exclude_outside", "axes"))
    )
    if maps is None or maps.dtype != ir.DataType.FLOAT or scales is not None or sizes is None or not bilinear:
        return None
    return _narrow(maps) if len(_sides(value)) == 3 else None


def _narrow(maps: ir.Value) -> ir.Value:
    """A value before it was made fp32, if it had 16 bits."""
    widened = maps.producer()
    source = widened.inputs[0] if widened is not None and widened.op_type == "Cast" else None
    return source if source is not None and source.dtype in _NARROW else maps


def _sides(value: ir.Value | None) -> list[int]:
    """The sides behind the batch, those that are numbers."""
    sides = [] if value is None or value.shape is None else list(value.shape)[1:]
    return [side for side in sides if isinstance(side, int)]
