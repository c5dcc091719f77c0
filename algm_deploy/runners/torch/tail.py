"""From class scores on a grid, or from masks, to labels on a CUDA device, without scores at the size of the picture."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from algm_deploy.models.scores import GridScores, MaskScores, Scores, labels_of, probabilities
from algm_deploy.ops.label_map import label_dtype
from algm_deploy.recipe.network import Size
from algm_deploy.runners.torch.fused import fits_fused

try:
    import triton
    import triton.language as tl

    from algm_deploy.runners.torch.maps import corners
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
    """Of masks (B, Q, h, w) and classes (B, Q, K + 1): enlarged, weighted and compared where they are.

    Products are those of numbers cut into two of bf16 each, which keeps the range of fp32 and 16 binary digits: tiny
    values decide where no query has a mask.
    """
    images, _, *cells = masks.shape
    shares = probabilities(classes)
    count = shares.shape[2]
    # Matrix units take powers of two: what lies beyond the largest one in the count has a product of its own.
    most = max(16, 1 << count.bit_length() - 1)
    rest = max(16, triton.next_power_of_2(count - most)) if count > most else 0
    steps = triton.cdiv(masks.shape[1], _QUERIES)
    shares = F.pad(shares, (0, most + rest - count, 0, steps * _QUERIES - masks.shape[1]))
    high = shares.bfloat16()
    low = (shares - high).bfloat16()
    out = masks.new_empty(images, *size, dtype=label_dtype(count))
    blocks = triton.cdiv(size[1], _PIXELS), size[0], images
    # One stage: with two, masks in fp32 take ten times as long under Triton 3.6, and those in 16 bits gain nothing.
    _mask_labels_kernel[blocks](
        masks, high, low, out, *cells, *size, *masks.stride(), cells[0] / size[0], cells[1] / size[1],
        masks.shape[1], count, steps, most, rest, max(16, rest), _PIXELS, _QUERIES, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


if triton is not None:
    # Triton evaluates annotations and knows no others than its own.
    @triton.jit
    def _products(high, low, covered, fine, total):  # type: ignore[no-untyped-def]
        """Sums of products of covered + fine (pixels, queries) and the loaded high + low (queries, classes)."""
        share = tl.load(high)
        total = tl.dot(covered, share, total)
        total = tl.dot(fine, share, total)
        return tl.dot(covered, tl.load(low), total)

    @triton.jit
    def _mask_labels_kernel(  # type: ignore[no-untyped-def]
        masks, high, low, out, down, across, height, width, mask_image, mask_query, mask_row, mask_cell,
        ratio_down, ratio_across,
        queries: tl.constexpr, classes: tl.constexpr, steps: tl.constexpr, most: tl.constexpr, rest: tl.constexpr,
        room: tl.constexpr, pixels: tl.constexpr, step: tl.constexpr,
    ):  # fmt: skip
        """One program: the labels of `pixels` neighbours in one line of one image."""
        line, image = tl.program_id(1), tl.program_id(2)
        column = tl.program_id(0) * pixels + tl.arange(0, pixels)
        left, right, along = corners(column, ratio_across, across, False)
        upper, lower, beside = corners(line, ratio_down, down, False)
        masks += image.to(tl.int64) * mask_image
        padded: tl.constexpr = most + rest
        shares = image.to(tl.int64) * (steps * step * padded)
        first, more = tl.arange(0, most)[None, :], most + tl.arange(0, room)[None, :]
        total = tl.zeros([pixels, most], tl.float32)
        beyond = tl.zeros([pixels, room], tl.float32)
        from_left, from_right = (left * mask_cell)[:, None], (right * mask_cell)[:, None]
        for number in range(steps):
            query = number * step + tl.arange(0, step)
            there = (query < queries)[None, :]
            at = masks + query[None, :] * mask_query
            top, bottom = at + upper * mask_row, at + lower * mask_row
            a = tl.load(top + from_left, mask=there, other=0.0).to(tl.float32)
            b = tl.load(top + from_right, mask=there, other=0.0).to(tl.float32)
            c = tl.load(bottom + from_left, mask=there, other=0.0).to(tl.float32)
            d = tl.load(bottom + from_right, mask=there, other=0.0).to(tl.float32)
            above, below = a + (b - a) * along[:, None], c + (d - c) * along[:, None]
            share = 1.0 / (1.0 + tl.exp(-(above + (below - above) * beside)))
            covered = share.to(tl.bfloat16)
            fine = (share - covered.to(tl.float32)).to(tl.bfloat16)
            row = shares + query[:, None] * padded
            total = _products(high + row + first, low + row + first, covered, fine, total)
            if rest > 0:
                beyond = _products(high + row + more, low + row + more, covered, fine, beyond)
        total = tl.where(first < classes, total, -1.0)
        best, label = tl.max(total, 1, return_indices=True, return_indices_tie_break_left=True)
        if rest > 0:
            beyond = tl.where(more < classes, beyond, -1.0)
            other, index = tl.max(beyond, 1, return_indices=True, return_indices_tie_break_left=True)
            label = tl.where(other > best, most + index, label)
        to = (image.to(tl.int64) * height + line) * width + column
        tl.store(out + to, label.to(out.dtype.element_ty), mask=column < width)
