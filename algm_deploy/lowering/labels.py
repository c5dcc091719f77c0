"""From scores to 8-bit labels in one operator of the library: nothing is as large as the picture but the labels.

| the graph's end | here |
|---|---|
| scores on a grid, enlarged to the picture, the class of the highest | `label_map`, every cell a token of its own |
| masks of queries, enlarged, their sigmoids weighted with classes, the class of the highest | `mask_labels` |
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from algm_deploy.bundle.graphs import DOMAIN
from algm_deploy.lowering.patterns import Chain, nodes_of, number, only_user, other, pair, stand_in

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def labels_by_library(graph: ir.Graph, smallest_cell: int) -> None:
    """Rewrites the end of a graph whose labels have 8 bits.

    `smallest_cell`: fewest pixels along a side of a cell, of a grid or of a mask, for which labels are the library's.
    """
    for best in nodes_of(graph, "ArgMax"):
        labels = only_user(best.outputs[0], "Cast")
        if labels is None or labels.outputs[0].dtype != ir.DataType.UINT8 or not _is_of_classes(best):
            continue
        add = Chain(graph, labels, str(labels.name))
        new = _of_grid(add, best.inputs[0], smallest_cell) or _of_masks(add, best.inputs[0], smallest_cell)
        if new is not None:
            stand_in(labels.outputs[0], new)


def _is_of_classes(best: ir.Node) -> bool:
    """Whether ArgMax tells the class of each pixel, the lowest of equals."""
    told = {"axis": 0, "keepdims": 1, "select_last_index": 0} | {k: a.value for k, a in best.attributes.items()}
    return told == {"axis": 1, "keepdims": 0, "select_last_index": 0}


# --- scores on a grid -------------------------------------------------------------------------------------------------


def _of_grid(add: Chain, scores: ir.Value | None, smallest_cell: int) -> ir.Value | None:
    """The labels of scores (B, K, H, W), if they come from a grid (B, K, h, w)."""
    enlarged = _enlarged(scores, smallest_cell) if _produced(scores, "Resize") is not None else None
    if enlarged is None:
        return None
    rows, map = _cells(add, enlarged)
    return add("label_map", rows, map, domain=DOMAIN, prefix=0, grid=enlarged.grid, size=enlarged.size)


def _cells(add: Chain, enlarged: Enlarged) -> tuple[ir.Value, ir.Value]:
    """Maps (B, K, h, w) as rows (B, h w, K), and the token map that names each."""
    maps, count = enlarged.maps, math.prod(enlarged.grid)
    images = add("Shape", maps, start=0, end=1)
    rows = add("Transpose", add("Reshape", maps, add.shape([0, enlarged.channels, count])), perm=[0, 2, 1])
    cells = add.constant(np.arange(count, dtype=np.int64)[None])
    return rows, add("Expand", cells, add("Concat", images, add.shape([count]), axis=0))


# --- masks of queries -------------------------------------------------------------------------------------------------


def _of_masks(add: Chain, scores: ir.Value | None, smallest_cell: int) -> ir.Value | None:
    """The labels of scores (B, K, H, W), if masks (B, Q, h, w) and classes (B, Q, K) of queries make them."""
    weighted = _produced(scores, "Einsum")
    if weighted is None or weighted.attributes["equation"].as_string() != "bqk,bqhw->bkhw":
        return None
    classes, share = pair(weighted)
    masks = _enlarged(_sigmoid_of(share), smallest_cell)
    if masks is None or classes.dtype != ir.DataType.FLOAT:
        return None
    return add("mask_labels", masks.maps, classes, domain=DOMAIN, size=masks.size)


def _sigmoid_of(share: ir.Value) -> ir.Value | None:
    """What a value is the sigmoid of, in full: exp(min(x, 0)) / (exp(-|x|) + 1)."""
    quotient = _produced(share, "Div")
    if quotient is None:
        return None
    above, below = pair(quotient)
    x = _beside(0, _produced(_behind(above, "Exp"), "Min"))
    same = _behind(_beside(1, _produced(below, "Add")), "Exp", "Neg", "Abs")
    if x is None or x is not same:
        return None
    return x if len(list(x.uses())) == 2 and not x.is_graph_output() else None


def _beside(constant: float, node: ir.Node | None) -> ir.Value | None:
    """What a commutative node of two inputs takes beside a number, on either side of it."""
    if node is None or len(node.inputs) != 2:
        return None
    return next((other(node, value) for value in pair(node) if number(value) == constant), None)


def _produced(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that computes a value, if it is of this type and nobody else wants the value."""
    node = value.producer() if value is not None else None
    if value is None or node is None or node.op_type != op_type or value.is_graph_output():
        return None
    return node if len(list(value.uses())) == 1 else None


def _behind(value: ir.Value | None, *op_types: str) -> ir.Value | None:
    """The first input of a chain of nodes of these types, the last first; None where it is another."""
    for op_type in op_types:
        node = _produced(value, op_type)
        if node is None:
            return None
        value = node.inputs[0]
    return value


# --- enlarging --------------------------------------------------------------------------------------------------------


class Enlarged(NamedTuple):
    """What a value (B, C, H, W) is interpolated from."""

    maps: ir.Value  # (B, C, h, w)
    channels: int  # C
    grid: list[int]  # h, w
    size: list[int]  # H, W


def _enlarged(value: ir.Value | None, smallest_cell: int) -> Enlarged | None:
    """The maps from which a value is interpolated as the library does: in fp32, between centres of cells that have so
    many pixels along a side or more, to a size that is given; in 16 bits if they come from there. All sides behind the
    batch are known, and only the last two are others than before."""
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
    before, after = _sides(maps), _sides(value)
    known = all(isinstance(side, int) for side in before[1:] + after[1:])
    if len(before) != 4 or len(after) != 4 or before[:2] != after[:2] or not known:
        return None
    if any(pixels < smallest_cell * cells for cells, pixels in zip(before[2:], after[2:], strict=True)):
        return None
    return Enlarged(_narrow(maps), before[1], before[2:], after[2:])


def _narrow(maps: ir.Value) -> ir.Value:
    """A value before it was made fp32, if it had 16 bits."""
    widened = maps.producer()
    source = widened.inputs[0] if widened is not None and widened.op_type == "Cast" else None
    return source if source is not None and source.dtype in _NARROW else maps


def _sides(value: ir.Value) -> list[Any]:
    """All sides, those that are not known as they are."""
    return [] if value.shape is None else list(value.shape)
