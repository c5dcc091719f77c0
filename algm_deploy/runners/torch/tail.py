"""From class scores on a grid, or from masks, to labels on a CUDA device, without scores at the size of the picture."""

from __future__ import annotations

import torch
from torch import Tensor

from algm_deploy.models.scores import GridScores, MaskScores, Scores, labels_of, probabilities
from algm_deploy.ops.label_map import label_dtype
from algm_deploy.recipe.schema import Size
from algm_deploy.runners.torch.fused import fits_fused

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = None

_PIXELS, _QUERIES = 64, 32  # of a program, and of one step of its sums


def labels(scores: Scores, grid: Size, size: Size) -> Tensor:
    """The class of the highest score of every pixel, as `labels_of` gives them but for rounding."""
    if isinstance(scores, GridScores) and scores.scores.is_cuda:
        return _labels_of_grid(scores.scores, size)
    if isinstance(scores, MaskScores) and fits_fused(scores.masks):
        return _labels_of_masks(scores.masks, scores.classes, size)
    return labels_of(scores, grid, size)


def _labels_of_grid(scores: Tensor, size: Size) -> Tensor:
    """Of scores (B, K, h, w), each cell of which is a token of its own."""
    images, _, *grid = scores.shape
    rows = scores.permute(0, 2, 3, 1).flatten(1, 2)
    cells = torch.arange(rows.shape[1], device=scores.device).expand(images, -1)
    found: Tensor = torch.ops.algm.label_map(rows, cells, 0, grid, list(size))
    return found


def _labels_of_masks(masks: Tensor, classes: Tensor, size: Size) -> Tensor:
    """Of masks (B, Q, h, w) and classes (B, Q, K + 1): enlarged, weighted and compared where they are."""
    shares = probabilities(classes).contiguous()
    images, queries, count = shares.shape
    out = masks.new_empty(images, *size, dtype=label_dtype(count))
    # Matrix units take powers of two: what lies beyond the largest one in the count has a product of its own.
    most = max(16, 1 << count.bit_length() - 1)
    rest = max(16, triton.next_power_of_2(count - most)) if count > most else 0
    blocks = triton.cdiv(size[1], _PIXELS), size[0], images
    _mask_labels_kernel[blocks](
        masks, shares, out, *masks.shape[2:], *size, *masks.stride(),
        masks.shape[2] / size[0], masks.shape[3] / size[1],
        queries, count, most, rest, _PIXELS, _QUERIES, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


if triton is not None:
    # Triton evaluates annotations and knows no others than its own.
    @triton.jit
    def _corners(pixel, ratio, cells):  # type: ignore[no-untyped-def]
        """The two cells a pixel lies between, and how far from the first; half-pixel centres, edges repeated."""
        centre = tl.maximum((pixel.to(tl.float32) + 0.5) * ratio - 0.5, 0.0)
        low = tl.minimum(centre.to(tl.int32), cells - 1)
        return low, tl.minimum(low + 1, cells - 1), centre - low.to(tl.float32)

    @triton.jit
    def _mask_labels_kernel(  # type: ignore[no-untyped-def]
        masks, shares, out, down, across, height, width, mask_image, mask_query, mask_row, mask_cell,
        ratio_down, ratio_across,
        queries: tl.constexpr, classes: tl.constexpr, most: tl.constexpr, rest: tl.constexpr,
        pixels: tl.constexpr, step: tl.constexpr,
    ):  # fmt: skip
        """One program: the labels of `pixels` neighbours in one line of one image."""
        line, image = tl.program_id(1), tl.program_id(2)
        column = tl.program_id(0) * pixels + tl.arange(0, pixels)
        left, right, along = _corners(column, ratio_across, across)
        upper, lower, beside = _corners(line, ratio_down, down)
        base = masks + image.to(tl.int64) * mask_image
        shares += image.to(tl.int64) * queries * classes
        first = tl.arange(0, most)
        total = tl.zeros([most, pixels], tl.float32)
        if rest > 0:
            more = most + tl.arange(0, rest)
            beyond = tl.zeros([rest, pixels], tl.float32)
        for start in range(0, queries, step):
            query = start + tl.arange(0, step)
            there = query < queries
            at = base + query[:, None].to(tl.int64) * mask_query
            top, bottom = at + upper * mask_row, at + lower * mask_row
            a = tl.load(top + left[None, :] * mask_cell, mask=there[:, None], other=0.0).to(tl.float32)
            b = tl.load(top + right[None, :] * mask_cell, mask=there[:, None], other=0.0).to(tl.float32)
            c = tl.load(bottom + left[None, :] * mask_cell, mask=there[:, None], other=0.0).to(tl.float32)
            d = tl.load(bottom + right[None, :] * mask_cell, mask=there[:, None], other=0.0).to(tl.float32)
            above, below = a + (b - a) * along[None, :], c + (d - c) * along[None, :]
            value = above + (below - above) * beside
            fading = tl.exp(-tl.abs(value))
            covered = tl.where(value < 0, fading, 1.0) / (1.0 + fading)
            row = shares + query[None, :] * classes
            share = tl.load(row + first[:, None], mask=there[None, :] & (first < classes)[:, None], other=0.0)
            total = tl.dot(share, covered, total, input_precision="tf32x3")
            if rest > 0:
                share = tl.load(row + more[:, None], mask=there[None, :] & (more < classes)[:, None], other=0.0)
                beyond = tl.dot(share, covered, beyond, input_precision="tf32x3")
        total = tl.where((first < classes)[:, None], total, -1.0)
        best, label = tl.max(total, 0, return_indices=True, return_indices_tie_break_left=True)
        if rest > 0:
            beyond = tl.where((more < classes)[:, None], beyond, -1.0)
            other, index = tl.max(beyond, 0, return_indices=True, return_indices_tie_break_left=True)
            label = tl.where(other > best, most + index, label)
        to = (image.to(tl.int64) * height + line) * width + column
        tl.store(out + to, label.to(out.dtype.element_ty), mask=column < width)
