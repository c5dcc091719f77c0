"""ELViT's two layers around the blocks that run on fewer tokens (Expediting Large-Scale Vision Transformer for Dense
Prediction without Fine-tuning, NeurIPS 2022; Expedit-Segmenter, mmseg/ops/cluster.py and mmseg/ops/reconstruction.py).

    elvit(tokens (B,P+N,D)) -> tokens (B,P+M,D), map (B,N), weights (B,N,M) fp32
    elvit_restore(values (B,P+M,C), weights (B,N,M)) -> (B,P+N,C)

Attributes of `elvit`: `grid` of the N patches, `centroids` of the M tokens, no side larger than the grid's; `prefix` P,
rows that are handed on; `iterations`, `window` (odd), `temperature`, `neighbours` from 1 to M, `semantics`. Of
`elvit_restore`: `prefix`.

Centroids start as the means of M cells of the grid. In each iteration every patch is shared out among the centroids of
the window around its own cell, by a softmax of -temperature x squared distance, and a centroid becomes the mean of its
shares. Afterwards a patch is made of the `neighbours` nearest centroids in proportion to exp(-temperature x squared
distance). Their weights are scaled to a Euclidean norm of 1, as the published program does, or to a sum of 1
(`semantics` code or paper). They are computed relative to the nearest one, so that none vanishes where all distances
are large; the program makes zeros there. `map` is P plus the farthest centroid that still counts: together with the
distances it tells which ones do. Ties go to the lower centroid, and NaN is the largest distance. All is fp32 inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algm_deploy.ops._rows import product, table, wide
from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.schema import operator

FAR = 1e16
"""Added to the squared distance to a centroid outside the window."""
_NONE = 1e-16
"""The least sum of shares a centroid is divided by."""


# --- the grid --------------------------------------------------------------------------------------------------------


def pooling(cells: int, side: int) -> np.ndarray:
    """Means (cells, side) fp64 of `cells` stretches of `side` places, which overlap where they do not divide it."""
    mean = np.zeros((cells, side))
    for cell in range(cells):
        first, end = cell * side // cells, -(-(cell + 1) * side // cells)
        mean[cell, first:end] = 1 / (end - first)
    return mean


def outside(cells: int, side: int, window: int) -> np.ndarray:
    """Whether (cells, side) a place's own cell is more than half a window away; the published code finds it in fp32."""
    own = np.minimum(np.floor(np.arange(side, dtype=np.float32) * np.float32(cells / side)), cells - 1)
    distant: np.ndarray = np.abs(own - np.arange(cells)[:, None]) > window // 2
    return distant


# --- torch -----------------------------------------------------------------------------------------------------------


def _of_sides(
    make: Callable[..., np.ndarray],
    grid: Sequence[int],
    centroids: Sequence[int],
    others: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """A table of rows and one of columns where they are used."""
    return [table(make, (*side, *others), device, dtype) for side in zip(centroids, grid, strict=True)]


def elvit_centroids(
    patches: Tensor, grid: Sequence[int], centroids: Sequence[int], iterations: int, window: int, temperature: float
) -> Tensor:
    """Centroids (B, M, D) of patches (B, N, D), at least fp32."""
    down, across = _of_sides(pooling, grid, centroids, (), patches.device, patches.dtype)
    columns = product(down, patches.reshape(len(patches), grid[0], -1)).reshape(len(patches), centroids[0], grid[1], -1)
    found = product(across, columns).flatten(1, 2)
    rows, sides = _of_sides(outside, grid, centroids, (window,), patches.device)
    penalty = FAR * (rows[:, None, :, None] | sides[None, :, None, :]).flatten(2).flatten(0, 1).to(patches.dtype)
    for _ in range(iterations):
        # The square of the patch is the same for all its centroids.
        distance = (found * found).sum(2, keepdim=True) - 2 * product(found, patches.mT)
        share = (-temperature * (distance + penalty)).softmax(1)
        found = product(share, patches) / share.sum(2, keepdim=True).clamp(min=_NONE)
    return found


def squared_distances(patches: Tensor, centroids: Tensor) -> Tensor:
    """Squared distances (B, N, M) of patches (B, N, D) and centroids (B, M, D), at least fp32."""
    squares = (patches * patches).sum(2)[:, :, None] + (centroids * centroids).sum(2)[:, None, :]
    return squares - 2 * product(patches, centroids.mT)


def nearest(distance: Tensor, neighbours: int) -> Tensor:
    """The nearest centroids (B, N, neighbours) in ascending distance; the lower one first on ties."""
    return distance.sort(dim=2, stable=True).indices[..., :neighbours]


def restoring_weights(distance: Tensor, chosen: Tensor, temperature: float, semantics: str) -> Tensor:
    """The share (B, N, M) of every centroid in a patch, of which those `chosen` (B, N, k) count."""
    taken = distance.gather(2, chosen)
    weight = (-temperature * (taken - taken.amin(2, keepdim=True))).exp()
    total = weight.norm(dim=2, keepdim=True) if semantics == "code" else weight.sum(2, keepdim=True)
    return torch.zeros_like(distance).scatter(2, chosen, weight / total)


@operator("tokens:T", "tokens:T map:i64 weights:f32")
def elvit(
    tokens: Tensor,
    grid: list[int],
    centroids: list[int],
    prefix: int,
    iterations: int,
    window: int,
    temperature: float,
    neighbours: int,
    semantics: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Token clustering: patches become the centroids of a coarser grid; and what they will be restored from."""
    patches = wide(tokens)[:, prefix:]
    found = elvit_centroids(patches, grid, centroids, iterations, window, temperature)
    distance = squared_distances(patches, found)
    chosen = nearest(distance, neighbours)
    weights = restoring_weights(distance, chosen, temperature, semantics)
    return (
        torch.cat([tokens[:, :prefix], found.to(tokens.dtype)], 1),
        prefix + chosen[..., -1],
        weights,
    )


@elvit.register_fake
def _(tokens: Tensor, grid: list[int], centroids: list[int], prefix: int, *_: Any) -> tuple[Tensor, ...]:
    images, width = tokens.shape[0], tokens.shape[2]
    patches, count = grid[0] * grid[1], centroids[0] * centroids[1]
    return (
        tokens.new_empty(images, prefix + count, width),
        tokens.new_empty(images, patches, dtype=torch.int64),
        wide(tokens).new_empty(images, patches, count),
    )


@operator("values:T weights:f32", "values:T")
def elvit_restore(values: Tensor, weights: Tensor, prefix: int) -> Tensor:
    """Token reconstruction: every patch becomes the weighted sum of the rows that it was near to."""
    rows = wide(values)[:, prefix:]
    return torch.cat([values[:, :prefix], product(weights.to(rows.dtype), rows).to(values.dtype)], 1)


@elvit_restore.register_fake
def _(values: Tensor, weights: Tensor, prefix: int) -> Tensor:
    return values.new_empty(values.shape[0], prefix + weights.shape[1], values.shape[2])


# --- ONNX bodies -----------------------------------------------------------------------------------------------------


@body_of("elvit")
def onnx_body(body: Body, attributes: Mapping[str, Any], tokens: Value) -> list[Value]:
    """ELViT's clustering in standard ops; fp32 between the casts."""
    grid, centroids, prefix = attributes["grid"], attributes["centroids"], attributes["prefix"]
    temperature, count = attributes["temperature"], int(np.prod(attributes["centroids"]))
    (height, width), (down, across) = grid, centroids
    patches = body.fp32(body.rows(tokens, prefix, prefix + height * width))
    columns = body("MatMul", pooling(down, height).astype(np.float32), body("Reshape", patches, [0, height, -1]))
    found = body("MatMul", pooling(across, width).astype(np.float32), body("Reshape", columns, [0, down, width, -1]))
    found = body("Reshape", found, [0, count, -1])
    far = [outside(*sides, attributes["window"]) for sides in zip(centroids, grid, strict=True)]
    apart = body("Or", far[0][:, None, :, None], far[1][None, :, None, :])
    penalty = body("Mul", body.fp32(body("Reshape", apart, [count, height * width])), FAR)
    turned = body("Transpose", patches, perm=[0, 2, 1])
    for _ in range(attributes["iterations"]):
        distance = body("Sub", _squares(body, found), body("Mul", body("MatMul", found, turned), 2.0))
        share = body("Softmax", body("Mul", body("Add", distance, penalty), -temperature), axis=1)
        total = body("Max", body("ReduceSum", share, [2], keepdims=1), _NONE)
        found = body("Div", body("MatMul", share, patches), total)
    products = body("MatMul", patches, body("Transpose", found, perm=[0, 2, 1]))
    squares = body("Add", _squares(body, patches), body("Transpose", _squares(body, found), perm=[0, 2, 1]))
    distance = body("Sub", squares, body("Mul", products, 2.0))
    sortable = body("Where", body("Less", distance, np.inf), distance, np.inf)  # a NaN is the largest
    taken, chosen = body.several(2, "TopK", sortable, [attributes["neighbours"]], axis=2, largest=0)
    weight = body("Exp", body("Mul", body("Sub", taken, body("ReduceMin", taken, [2], keepdims=1)), -temperature))
    norm = "ReduceL2" if attributes["semantics"] == "code" else "ReduceSum"
    weight = body("Div", weight, body(norm, weight, [2], keepdims=1))
    none = body("Expand", 0.0, body("Shape", distance))
    farthest = body("Slice", chosen, [attributes["neighbours"] - 1], [attributes["neighbours"]], [2])
    return [
        body("Concat", body.rows(tokens, 0, prefix), body.like(found, tokens), axis=1),
        body("Add", body("Squeeze", farthest, [2]), prefix),
        body("ScatterElements", none, chosen, weight, axis=2),
    ]


def _squares(body: Body, x: Value) -> Value:
    return body("ReduceSumSquare", x, [2], keepdims=1)


@body_of("elvit_restore")
def onnx_restore_body(body: Body, attributes: Mapping[str, Any], values: Value, weights: Value) -> list[Value]:
    """One matrix product."""
    prefix = attributes["prefix"]
    rows = body.fp32(body("Slice", values, [prefix], [np.iinfo(np.int64).max], [1]))
    return [body("Concat", body.rows(values, 0, prefix), body.like(body("MatMul", weights, rows), values), axis=1)]


# --- NumPy references ------------------------------------------------------------------------------------------------


def reference_centroids(
    patches: np.ndarray, grid: Sequence[int], centroids: Sequence[int], iterations: int, window: int, temperature: float
) -> np.ndarray:
    """Centroids (B, M, D) fp64 of patches (B, N, D): loops over cells."""
    x = patches.astype(np.float64).reshape(len(patches), *grid, -1)
    (height, width), (down, across) = grid, centroids
    cells = [(i, j) for i in range(down) for j in range(across)]
    found = np.stack(
        [
            x[
                :,
                i * height // down : -(-(i + 1) * height // down),
                j * width // across : -(-(j + 1) * width // across),
            ].mean((1, 2))
            for i, j in cells
        ],
        1,
    )
    near = np.empty((down * across, height * width), bool)
    for index, (i, j) in enumerate(cells):
        rows, columns = ~outside(down, height, window)[i], ~outside(across, width, window)[j]
        near[index] = (rows[:, None] & columns).ravel()
    flat = x.reshape(len(x), height * width, -1)
    for _ in range(iterations):
        exponent = np.where(near, -temperature * reference_distances(flat, found).transpose(0, 2, 1), -np.inf)
        share = np.exp(exponent - exponent.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        found = share @ flat / np.maximum(share.sum(2, keepdims=True), _NONE)
    return found


def reference_distances(patches: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Squared distances (B, N, M) fp64, difference by difference."""
    between = patches.astype(np.float64)[:, :, None] - centroids.astype(np.float64)[:, None]
    squared: np.ndarray = np.square(between).sum(-1)
    return squared


def reference_nearest(distance: np.ndarray, neighbours: int) -> np.ndarray:
    """As `nearest`."""
    return np.argsort(distance, axis=2, kind="stable")[..., :neighbours]


def reference(
    tokens: np.ndarray,
    *,
    grid: Sequence[int],
    centroids: Sequence[int],
    prefix: int,
    iterations: int,
    window: int,
    temperature: float,
    neighbours: int,
    semantics: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ELViT's clustering in plain NumPy; arguments and results as the torch operator."""
    patches = tokens[:, prefix:]
    found = reference_centroids(patches, grid, centroids, iterations, window, temperature)
    distance = reference_distances(patches, found)
    chosen = reference_nearest(distance, neighbours)
    taken = np.take_along_axis(distance, chosen, 2)
    weight = np.exp(-temperature * (taken - taken.min(2, keepdims=True)))
    total = np.sqrt(np.square(weight).sum(2, keepdims=True)) if semantics == "code" else weight.sum(2, keepdims=True)
    weights = np.zeros(distance.shape)
    np.put_along_axis(weights, chosen, weight / total, 2)
    rows = np.concatenate([tokens[:, :prefix], found.astype(tokens.dtype)], 1)
    return rows, prefix + chosen[..., -1], weights.astype(np.float32)


def reference_restore(values: np.ndarray, weights: np.ndarray, *, prefix: int) -> np.ndarray:
    """ELViT's reconstruction in plain NumPy, sums in fp64."""
    rows = weights.astype(np.float64) @ values[:, prefix:].astype(np.float64)
    return np.concatenate([values[:, :prefix], rows.astype(values.dtype)], 1)
