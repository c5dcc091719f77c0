"""Label map: from class scores of merged tokens straight to one label a pixel.

    label_map(scores (B,S,K), map (B,N) int64) -> labels (B,H,W)

Attributes: `prefix` (leading rows that `map` counts and `scores` no longer has), `grid` (rows, columns) of the N
patches, `size` (H, W). Scores are gathered to the grid, interpolated bilinearly (half-pixel centres, corners not
aligned) in fp32 and the class of the highest score is taken, the lower class on ties. Labels are uint8 for at most 255
classes, else int32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.schema import operator

STRIP_ELEMENTS = 1 << 23  # full-size scores held at a time: 32 MB in fp32


def interpolation_matrix(size_in: int, size_out: int) -> np.ndarray:
    """Weights (size_out, size_in) fp32 of linear interpolation with half-pixel centres; edges are repeated."""
    scale = np.float32(size_in / size_out)
    centre = np.maximum((np.arange(size_out, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), 0)
    low = np.minimum(centre.astype(np.int64), size_in - 1)
    high = np.minimum(low + 1, size_in - 1)
    fraction = (centre - low).astype(np.float32)
    weights = np.zeros((size_out, size_in), dtype=np.float32)
    np.add.at(weights, (np.arange(size_out), low), 1 - fraction)
    np.add.at(weights, (np.arange(size_out), high), fraction)
    return weights


def label_dtype(classes: int) -> torch.dtype:
    """uint8 where the class index fits, else int32."""
    return torch.uint8 if classes <= 255 else torch.int32


def _strips(rows: int, elements_per_row: int) -> Iterator[slice]:
    step = max(1, STRIP_ELEMENTS // elements_per_row)
    return (slice(start, start + step) for start in range(0, rows, step))


@operator("scores:T map:i64", "labels:L")
def label_map(scores: Tensor, map: Tensor, prefix: int, grid: list[int], size: list[int]) -> Tensor:
    """Scores of merged tokens to one label a pixel: gather, bilinear interpolation, argmax.

    Works in strips of rows and never holds the full-size scores.
    """
    images, _, classes = scores.shape
    index = (map - prefix)[:, :, None].expand(-1, -1, classes)
    patches = scores.gather(1, index).float().mT.reshape(images, classes, *grid)
    columns = patches @ torch.from_numpy(interpolation_matrix(grid[1], size[1])).to(scores.device).T
    rows = torch.from_numpy(interpolation_matrix(grid[0], size[0])).to(scores.device)
    labels = torch.empty(images, *size, dtype=label_dtype(classes), device=scores.device)
    for strip in _strips(size[0], images * classes * size[1]):
        labels[:, strip] = (rows[strip] @ columns).max(dim=1).indices
    return labels


@label_map.register_fake
def _(scores: Tensor, map: Tensor, prefix: int, grid: list[int], size: list[int]) -> Tensor:
    return scores.new_empty(scores.shape[0], *size, dtype=label_dtype(scores.shape[2]))


@body_of("label_map")
def onnx_body(body: Body, attributes: Mapping[str, Any], scores: Value, map: Value) -> list[Value]:
    """Gather, interpolation along both axes, ArgMax. Holds full-size scores of the batch: B x K x H x W x 4 bytes."""
    grid, size = attributes["grid"], attributes["size"]
    patches = body.fp32(body.take_rows(scores, body("Sub", map, attributes["prefix"])))
    patches = body("Reshape", body("Transpose", patches, perm=[0, 2, 1]), [0, 0, *grid])
    columns = body("MatMul", patches, interpolation_matrix(grid[1], size[1]).T.copy())
    if body.processor and _is_doubling(grid[0], size[0]):
        return [_onnx_labels_between(body, columns, grid[0], size[0])]
    full = body("MatMul", interpolation_matrix(grid[0], size[0]), columns)
    return [body("Cast", body("ArgMax", full, axis=1, keepdims=0), to=body.dtypes[0])]


def _is_doubling(size_in: int, size_out: int) -> bool:
    """Whether an axis grows by a power of two, at least 2: then weights repeat, and are exact."""
    factor = size_out // size_in
    return size_out % size_in == 0 and factor > 1 and factor & (factor - 1) == 0


def _onnx_labels_between(body: Body, columns: Value, rows: int, height: int) -> Value:
    """Labels of columns (B, K, rows, W): a row of pixels has two rows of patches, which is less work than a product
    whose other weights are zero. Between two rows lie as many pixels as a patch is high, half of a patch above the
    first row, and below the last one."""
    step, gaps = height // rows, np.arange(rows + 1)
    above, below = (
        body("Unsqueeze", body("Gather", columns, index, axis=2), [3])
        for index in (np.maximum(gaps - 1, 0), np.minimum(gaps, rows - 1))
    )
    weight = interpolation_matrix(2, 2 * step)[step // 2 : step // 2 + step, :, None]
    full = body("Add", body("Mul", above, weight[:, 0]), body("Mul", below, weight[:, 1]))
    labels = body("Cast", body("ArgMax", full, axis=1, keepdims=0), to=body.dtypes[0])
    return body.rows(body("Reshape", labels, [0, (rows + 1) * step, -1]), step // 2, step // 2 + height)


def reference(
    scores: np.ndarray, map: np.ndarray, *, prefix: int, grid: tuple[int, int], size: tuple[int, int]
) -> np.ndarray:
    """NumPy definition."""
    images, _, classes = scores.shape
    patches = np.take_along_axis(scores, map[:, :, None] - prefix, axis=1).astype(np.float32)
    patches = patches.transpose(0, 2, 1).reshape(images, classes, *grid)
    full = interpolation_matrix(grid[0], size[0]) @ patches @ interpolation_matrix(grid[1], size[1]).T
    labels: np.ndarray = full.argmax(1)
    return labels.astype(np.uint8 if classes <= 255 else np.int32)
