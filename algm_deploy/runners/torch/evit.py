"""EViT on a CUDA device in few kernels, in Triton; elsewhere by the operators, whose rules (`ops/evit.py`) these keep.

Tokens in 16 bits are multiplied as they are, which loses nothing, as fp32 holds every digit of a product of two; sums
are in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algm_deploy.runners.torch.fused import fits_fused

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = None

_KEYS = 64  # rows that cls attends to, of a program
_TILE = 64  # rows that left, of a program, and rows that stay it compares them with
_SUMMED, _COLUMNS = 32, 64  # rows that left at a time, and columns of their sum, of a program
_PATCHES = 256  # of a program


def cls_attention(qkv: Tensor, heads: int, scale: float) -> Tensor:
    """As the operator: the weight (B, S) fp32 that the first row gives every row, the mean over heads.

    Args:
        qkv: (B, S, 3D), laid out as for the operator.
        heads, scale: as of the operator.
    """
    if not fits_fused(qkv):
        weights: Tensor = torch.ops.algm.cls_attention(qkv, heads, scale)
        return weights
    images, rows, width = qkv.shape
    side = width // (3 * heads)
    scores = torch.empty(images, heads, rows, device=qkv.device)
    _cls_scores_kernel[(triton.cdiv(rows, _KEYS), images * heads)](
        qkv.contiguous(), scores, rows, heads, scale, side, triton.next_power_of_2(side), _KEYS
    )
    return scores.softmax(-1).mean(1)


def evit(
    tokens: Tensor, map: Tensor, attention: Tensor, patches: int, rows: int, keep: int, prefix: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As the operator: tokens (B, P + K + 1, D), map (B, N) and source (B, N), both int64.

    Args:
        tokens: (B, P + R, D), fp32, fp16 or bf16.
        map: (B, N) int64.
        attention: (B, P + R) fp32.
        patches, rows, keep, prefix: N, R, K below R, and P.
    """
    if not fits_fused(tokens):
        merged: tuple[Tensor, Tensor, Tensor] = torch.ops.algm.evit(tokens, map, attention, patches, rows, keep, prefix)
        return merged
    tokens, map, attention = tokens.contiguous(), map.contiguous(), attention.contiguous()
    images, _, width = tokens.shape
    counts = rows, keep, prefix
    order, place = (map.new_empty(images, rows, dtype=torch.int32) for _ in range(2))
    nearest = map.new_empty(images, rows - keep)
    block = triton.next_power_of_2(rows)
    _choose_kernel[(images,)](attention, order, place, nearest, *counts, block, num_warps=min(max(block // 128, 1), 16))
    tiles = triton.cdiv(rows - keep, _TILE), triton.cdiv(keep, _TILE), images
    _nearest_kernel[tiles](tokens, order, nearest, *counts, width, _TILE, 128 // tokens.element_size())
    values = tokens.new_empty(images, prefix + keep + 1, width)
    programs = prefix + keep + triton.cdiv(width, _COLUMNS), images
    sizes = width, triton.next_power_of_2(width), _SUMMED, _COLUMNS
    _rows_kernel[programs](tokens, order, attention, values, *counts, *sizes, num_warps=2)
    map_out, source = torch.empty_like(map), torch.empty_like(map)
    _maps_kernel[(triton.cdiv(patches, _PATCHES), images)](
        map, order, place, nearest, map_out, source, patches, *counts, _PATCHES
    )
    return values, map_out, source


if triton is not None:
    # Triton evaluates annotations and knows no others than its own.
    @triton.jit
    def _cls_scores_kernel(  # type: ignore[no-untyped-def]
        qkv, scores, rows, heads, scale, side: tl.constexpr, block: tl.constexpr, tile: tl.constexpr
    ):
        """One program: what cls scores `tile` rows in one head of one image."""
        image, head = tl.program_id(1) // heads, tl.program_id(1) % heads
        width = heads * side
        row, column = tl.program_id(0) * tile + tl.arange(0, tile), tl.arange(0, block)
        base = qkv + image.to(tl.int64) * rows * 3 * width + head * side
        inside = (row < rows)[:, None] & (column < side)[None, :]
        query = tl.load(base + column, mask=column < side, other=0.0).to(tl.float32) * scale
        key = tl.load(base + width + row[:, None] * 3 * width + column[None, :], mask=inside, other=0.0)
        score = tl.sum(key.to(tl.float32) * query[None, :], 1)
        tl.store(scores + tl.program_id(1).to(tl.int64) * rows + row, score, mask=row < rows)

    @triton.jit
    def _ordered(x):  # type: ignore[no-untyped-def]
        """Whole numbers of 32 bits, as int64, in the order of fp32 ones that are not NaN; both zeros are one."""
        bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)

    @triton.jit
    def _choose_kernel(  # type: ignore[no-untyped-def]
        attention, order, place, nearest, rows, keep, prefix, block: tl.constexpr
    ):
        """One program: one image. `order` gets the rows that stay, then the others, both ascending; `place` where each
        stands there; `nearest` what is more than any distance.

        The least attention of a row that stays is found bit by bit. Of rows that have just it the lower ones stay.
        """
        image = tl.program_id(0).to(tl.int64)
        row = tl.arange(0, block)
        inside = row < rows
        weight = tl.load(attention + image * (prefix + rows) + prefix + row, mask=inside, other=0.0)
        weight = tl.where(weight == weight, weight, float("-inf"))  # a NaN is the least
        value = tl.where(inside, _ordered(weight), -2147483649)
        least, bit = tl.full([], -2147483648, tl.int64), tl.full([], 2147483648, tl.int64)
        for _ in range(32):
            many = tl.sum((value >= least + bit).to(tl.int32), 0) >= keep
            least = tl.where(many, least + bit, least)
            bit = bit >> 1
        above, equal = value > least, value == least
        room = keep - tl.sum(above.to(tl.int32), 0)
        stays = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
        count = tl.cumsum(stays.to(tl.int32), 0)  # of the rows that stay up to this one
        to = tl.where(stays, count - 1, keep + row - count)
        tl.store(place + image * rows + row, to, mask=inside)
        tl.store(order + image * rows + to, row, mask=inside)
        tl.store(nearest + image * (rows - keep) + row, 0x7FFFFFFFFFFFFFFF, mask=row < rows - keep)

    @triton.jit
    def _nearest_kernel(  # type: ignore[no-untyped-def]
        tokens, order, nearest, rows, keep, prefix,
        width: tl.constexpr, tile: tl.constexpr, tile_width: tl.constexpr,
    ):  # fmt: skip
        """One program: some rows that left, compared with some that stay. `nearest` is made of the least squared
        distance, 32 bits in the order of fp32, and in 32 bits behind it which of those that stay has it, the lowest."""
        image = tl.program_id(2).to(tl.int64)
        tokens += (image * (prefix + rows) + prefix) * width
        order += image * rows
        left, kept = tl.program_id(0) * tile + tl.arange(0, tile), tl.program_id(1) * tile + tl.arange(0, tile)
        leaves, stays = left < rows - keep, kept < keep
        a_row = tl.load(order + keep + left, mask=leaves, other=0)[:, None] * width
        b_row = tl.load(order + kept, mask=stays, other=0)[:, None] * width
        products = tl.zeros([tile, tile], tl.float32)
        a_squares, b_squares = tl.zeros([tile], tl.float32), tl.zeros([tile], tl.float32)
        for first in range(0, width, tile_width):
            column = first + tl.arange(0, tile_width)[None, :]
            a = tl.load(tokens + a_row + column, mask=column < width, other=0.0)
            b = tl.load(tokens + b_row + column, mask=column < width, other=0.0)
            products = tl.dot(a, tl.trans(b), products, input_precision="ieee")
            a_squares += tl.sum(a.to(tl.float32) * a.to(tl.float32), 1)
            b_squares += tl.sum(b.to(tl.float32) * b.to(tl.float32), 1)
        distance = a_squares[:, None] + b_squares[None, :] - 2.0 * products
        distance = tl.where(distance < float("inf"), distance, float("inf"))  # a NaN is the largest
        near = (_ordered(distance) << 32) | kept.to(tl.int64)[None, :]
        near = tl.where(stays[None, :], near, 0x7FFFFFFFFFFFFFFF)
        tl.atomic_min(nearest + image * (rows - keep) + left, tl.min(near, 1), mask=leaves)

    @triton.jit
    def _rows_kernel(  # type: ignore[no-untyped-def]
        tokens, order, attention, out, rows, keep, prefix,
        width: tl.constexpr, block: tl.constexpr, tile: tl.constexpr, columns: tl.constexpr,
    ):  # fmt: skip
        """One program: one row of one image that stays, or behind all those some columns of the sum of the others."""
        number, stay, image = tl.program_id(0), prefix + keep, tl.program_id(1).to(tl.int64)
        tokens += image * (prefix + rows) * width
        attention += image * (prefix + rows)
        order += image * rows
        out += image * (stay + 1) * width
        if number < stay:
            patch = tl.load(order + number - prefix, mask=number >= prefix, other=0)
            source = tl.where(number < prefix, number, prefix + patch)
            whole = tl.arange(0, block)
            copied = tl.load(tokens + source * width + whole, mask=whole < width)
            tl.store(out + number * width + whole, copied, mask=whole < width)
        else:
            column = (number - stay) * columns + tl.arange(0, columns)
            total = tl.zeros([columns], tl.float32)
            for first in range(keep, rows, tile):
                place = first + tl.arange(0, tile)
                left = place < rows
                row = prefix + tl.load(order + place, mask=left, other=0)
                weight = tl.load(attention + row, mask=left, other=0.0)
                inside = left[:, None] & (column < width)[None, :]
                value = tl.load(tokens + row[:, None] * width + column[None, :], mask=inside, other=0.0)
                total += tl.sum(weight[:, None] * value.to(tl.float32), 0)
            tl.store(out + stay * width + column, total.to(out.dtype.element_ty), mask=column < width)

    @triton.jit
    def _kept_of(row, place, nearest, keep, inside):  # type: ignore[no-untyped-def]
        """Which of the rows that stay, counted ascending, each row is restored from; one that stays from itself."""
        at = tl.load(place + row, mask=inside, other=0)
        near = tl.load(nearest + at - keep, mask=inside & (at >= keep), other=0) & 0xFFFFFFFF
        return tl.where(at < keep, at, near.to(tl.int32))

    @triton.jit
    def _maps_kernel(  # type: ignore[no-untyped-def]
        map, order, place, nearest, map_out, source, patches, rows, keep, prefix, tile: tl.constexpr
    ):
        """One program: some patches of one image."""
        image = tl.program_id(1).to(tl.int64)
        order, place, nearest = order + image * rows, place + image * rows, nearest + image * (rows - keep)
        patch = tl.program_id(0) * tile + tl.arange(0, tile)
        inside = patch < patches
        at = image * patches + patch
        row = tl.load(map + at, mask=inside, other=0)
        kept = _kept_of(row - prefix, place, nearest, keep, inside & (row >= prefix))
        tl.store(map_out + at, tl.where(row < prefix, row, prefix + kept), mask=inside)
        there = patch < rows
        kept = _kept_of(patch, place, nearest, keep, there)
        origin = tl.load(order + kept, mask=there, other=0)
        tl.store(source + at, prefix + tl.where(there, origin, patch), mask=inside)
