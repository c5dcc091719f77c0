"""Multi-scale deformable attention (Zhu et al., ICLR 2021, section 4.1; czczup/ViT-Adapter, detection/ops).

Every query looks at a few places of each level, given for every head, and sums up what it finds there by its shares.

    deformable_attention(value (B,N,H,D), locations (B,Q,H,L,P,2) fp32, shares (B,Q,H,L,P) fp32) -> (B,Q,H*D)

Attribute `shapes`: rows and columns of each of the L levels, one after the other; the N rows of `value` are the cells
of all levels, each in raster order. A location is (across, down) in [0, 1] from the outer edge of the first cell to
that of the last; between cell centres it is bilinear. Outside the grid all is zero, as far away as a location may be. A
location or share that is NaN makes its query's head NaN; a value that is not finite reaches those that look at its cell
and nobody else. Values in fp32, fp16 or bf16; sums in fp32.

In ONNX there is `GridSample` for the middle of this. It is left alone: ONNX Runtime has it on CUDA in fp32 only, and
TensorRT 10.13 to 11.1 computes it wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algm_deploy.errors import ExecutionError
from algm_deploy.ops._rows import table, wide
from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.schema import operator

_CORNERS = tuple(product((0, 1), (0, 1)))


def level_sides(shapes: Sequence[int]) -> np.ndarray:
    """Rows, columns and first cell (L, 3) int64 of every level."""
    sides = np.asarray(shapes, np.int64).reshape(-1, 2)
    cells = sides.prod(1)
    return np.concatenate([sides, (np.cumsum(cells) - cells)[:, None]], 1)


# --- torch -----------------------------------------------------------------------------------------------------------


@operator("value:T locations:f32 shares:f32", "values:T")
def deformable_attention(value: Tensor, locations: Tensor, shares: Tensor, shapes: list[int]) -> Tensor:
    """Deformable attention: every query sums up what it finds at its own places of a few grids."""
    check_shapes(value.shape, locations.shape, shares.shape, shapes)
    images, queries, heads, levels, points = shares.shape
    rows, columns, first = table(level_sides, (tuple(shapes),), value.device)[:, None].unbind(2)
    cells, width = value.shape[1], value.shape[3]
    padded = torch.cat([value, value.new_zeros(images, 1, heads, width)], 1).transpose(1, 2)
    (left, across), (top, down) = (
        _cell(place, side)
        for place, side in zip(wide(locations).permute(0, 2, 1, 3, 4, 5).unbind(5), (columns, rows), strict=True)
    )
    weight = shares.to(across.dtype).transpose(1, 2)
    total = value.new_zeros(images, heads, queries, width, dtype=across.dtype)
    for below, right in _CORNERS:
        row, column = top + below, left + right
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        index = torch.where(inside, first + row.long() * columns + column.long(), cells).flatten(2)
        found = padded.gather(2, index[..., None].expand(-1, -1, -1, width)).to(total.dtype)
        part = weight * (down if below else 1 - down) * (across if right else 1 - across)
        seen = found.reshape(images, heads, queries, levels * points, width)
        total = total + (seen * part.flatten(3)[..., None]).sum(3)
    return total.transpose(1, 2).flatten(2).to(value.dtype)


def _cell(place: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
    """The cell before a place (B, H, Q, L, P) along one axis, and how far the place is beyond that cell's centre."""
    at = place * side - 0.5
    at = torch.where(at > side + 1, side + 1, torch.where(at < -2, -2, at))  # a NaN stays one
    cell = at.floor()
    return cell, at - cell


def check_shapes(value: Sequence[Any], locations: Sequence[Any], shares: Sequence[Any], shapes: Sequence[int]) -> None:
    """Refuses shapes of an operator's inputs that contradict each other.

    Raises:
        ExecutionError: they do.
    """
    levels, odd = divmod(len(shapes), 2)
    if odd or not levels or min(shapes) < 1:
        raise ExecutionError(f"expected rows and columns of every level as shapes, got {list(shapes)}")
    cells = int(level_sides(shapes)[:, :2].prod(1).sum())
    if len(value) != 4 or value[1] != cells:
        raise ExecutionError(f"expected a value of (images, {cells}, heads, width) for {shapes}, got {tuple(value)}")
    if len(shares) != 5 or shares[3] != levels or shares[0] != value[0] or shares[2] != value[2]:
        raise ExecutionError(
            f"expected shares of (images, queries, heads, {levels}, points) for a value of {tuple(value)}, "
            f"got {tuple(shares)}"
        )
    if tuple(locations) != (*shares, 2):
        raise ExecutionError(f"expected locations of {(*shares, 2)}, two for every share, got {tuple(locations)}")


@deformable_attention.register_fake
def _(value: Tensor, locations: Tensor, shares: Tensor, shapes: list[int]) -> Tensor:
    check_shapes(value.shape, locations.shape, shares.shape, shapes)
    return value.new_empty(value.shape[0], shares.shape[1], value.shape[2] * value.shape[3])


# --- ONNX body -------------------------------------------------------------------------------------------------------


@body_of("deformable_attention")
def onnx_body(body: Body, attributes: Mapping[str, Any], value: Value, locations: Value, shares: Value) -> list[Value]:
    """Four gathers, one for each corner of the cell that a place lies in; what lies outside is a row of zeros."""
    rows, columns, first = (side[:, None] for side in level_sides(attributes["shapes"]).T)
    none = body("Expand", body.like(body.number(0.0), value), body("Shape", body.rows(value, 0, 1)))
    cells = body("Transpose", body("Concat", value, none, axis=1), perm=[0, 2, 1, 3])
    places = body.several(2, "Split", body("Transpose", locations, perm=[0, 2, 1, 3, 4, 5]), axis=5, num_outputs=2)
    weight = body("Transpose", shares, perm=[0, 2, 1, 3, 4])
    (left, across), (top, down) = (
        _onnx_cell(body, body("Squeeze", place, [5]), side) for place, side in zip(places, (columns, rows), strict=True)
    )
    looked = body("Concat", body("Shape", weight), [-1], axis=0)
    parts = []
    for below, right in _CORNERS:
        row, column = body("Add", top, float(below)), body("Add", left, float(right))
        inside = body("And", _within(body, row, rows), _within(body, column, columns))
        cell = body("Add", body("Mul", body.int64(row), columns), body("Add", body.int64(column), first))
        index = body("Reshape", body("Where", inside, cell, int((rows * columns).sum())), [0, 0, -1, 1])
        seen = body("Reshape", body.fp32(body("GatherND", cells, index, batch_dims=2)), looked)
        near = (beyond if corner else body("Sub", 1.0, beyond) for beyond, corner in ((down, below), (across, right)))
        part = body("Unsqueeze", body("Mul", weight, body("Mul", *near)), [5])
        parts.append(body("ReduceSum", body("Mul", seen, part), [3, 4], keepdims=0))
    total = body("Add", body("Add", *parts[:2]), body("Add", *parts[2:]))
    rows_out = body("Reshape", body("Transpose", total, perm=[0, 2, 1, 3]), [0, 0, -1])
    return [body.like(rows_out, value)]


def _onnx_cell(body: Body, place: Value, side: np.ndarray) -> tuple[Value, Value]:
    """As `_cell`."""
    cells = side.astype(np.float32)
    at = body("Sub", body("Mul", place, cells), 0.5)
    at = body("Where", body("Less", at, -2.0), -2.0, at)
    at = body("Where", body("Greater", at, cells + 1), cells + 1, at)
    cell = body("Floor", at)
    return cell, body("Sub", at, cell)


def _within(body: Body, index: Value, side: np.ndarray) -> Value:
    return body("And", body("GreaterOrEqual", index, 0.0), body("Less", index, side.astype(np.float32)))


# --- NumPy reference -------------------------------------------------------------------------------------------------


def reference(value: np.ndarray, locations: np.ndarray, shares: np.ndarray, *, shapes: Sequence[int]) -> np.ndarray:
    """Deformable attention in plain NumPy, place by place; sums in fp64."""
    images, queries, heads, levels, points = shares.shape
    total = np.zeros((images, queries, heads, value.shape[3]))
    for b, q, h, level, p in np.ndindex(images, queries, heads, levels, points):
        rows, columns, first = level_sides(shapes)[level]
        grid = value[b, first : first + rows * columns, h].astype(np.float64).reshape(rows, columns, -1)
        place = locations[b, q, h, level, p].astype(np.float64)
        with np.errstate(invalid="ignore"):  # an infinite value and a share of zero
            total[b, q, h] += float(shares[b, q, h, level, p]) * _reference_sample(grid, *place)
    return total.reshape(images, queries, -1).astype(value.dtype)


def _reference_sample(grid: np.ndarray, across: float, down: float) -> np.ndarray:
    """The bilinear value (D) of a grid (rows, columns, D) at a place, zero outside."""
    y, x = down * grid.shape[0] - 0.5, across * grid.shape[1] - 0.5
    if np.isnan(y) or np.isnan(x):
        return np.full(grid.shape[2], np.nan)
    if not (-1 <= y < grid.shape[0] and -1 <= x < grid.shape[1]):
        return np.zeros(grid.shape[2])
    top, left = math.floor(y), math.floor(x)
    found = np.zeros(grid.shape[2])
    for below, right in _CORNERS:
        row, column = top + below, left + right
        if 0 <= row < grid.shape[0] and 0 <= column < grid.shape[1]:
            found += abs(1 - below - (y - top)) * abs(1 - right - (x - left)) * grid[row, column]
    return found
