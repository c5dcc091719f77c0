"""Convolutions on a CUDA device whose maps lie as rows do, the channels of a cell side by side.

Behind a convolution PyTorch adds its bias, takes what is positive and enlarges it, each in a pass over memory of its
own; here they are one kernel in Triton, which reads what the convolution has written and writes what the next one
reads.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models.readout import PLAIN
from algm_deploy.runners.torch.fused import fits_fused

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = None

_NUMBERS = 2048  # of a program: 16 of each thread


def rectified(convs: Iterable[nn.Module], maps: Iterable[Tensor], factor: int, align_corners: bool) -> list[Tensor]:
    """As `readout.Steps` has it."""
    return [_rectified(conv, x, factor, align_corners) for conv, x in zip(convs, maps, strict=True)]


def _rectified(conv: nn.Module, maps: Tensor, factor: int, align_corners: bool) -> Tensor:
    if type(conv) is not nn.Conv2d or conv.padding_mode != "zeros" or conv.bias is None or not fits_fused(maps):
        return PLAIN.rectified([conv], [maps], factor, align_corners)[0]
    sums = F.conv2d(maps, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    return _launch(sums.contiguous(memory_format=torch.channels_last), conv.bias, factor, align_corners)


def _launch(sums: Tensor, bias: Tensor, factor: int, align_corners: bool) -> Tensor:
    """sums (B, C, h, w), the channels of a cell side by side, to (B, C, factor h, factor w); in place for factor 1."""
    images, channels, *cells = sums.shape
    size = [factor * side for side in cells]
    out = sums
    if factor > 1:
        out = sums.new_empty(images, *size, channels).permute(0, 3, 1, 2)
    less = int(align_corners)
    ratios = [(side - less) / (extent - less) if extent > 1 else 0.0 for side, extent in zip(cells, size, strict=True)]
    block = triton.next_power_of_2(channels)
    pixels = max(1, _NUMBERS // block)
    _rectified_kernel[(triton.cdiv(size[1], pixels), size[0], images)](
        sums, bias, out, *cells, *size, *ratios, channels, block, pixels, align_corners, factor > 1, num_warps=4
    )
    return out


if triton is not None:
    # Triton evaluates annotations and knows no others than its own.
    @triton.jit
    def corners(pixel, ratio, cells, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
        """The two cells a pixel lies between, and how far from the first.

        Corners aligned, or half-pixel centres, edges repeated.
        """
        if aligned:
            centre = pixel.to(tl.float32) * ratio
        else:
            centre = tl.maximum((pixel.to(tl.float32) + 0.5) * ratio - 0.5, 0.0)
        low = tl.minimum(centre.to(tl.int32), cells - 1)
        return low, tl.minimum(low + 1, cells - 1), centre - low.to(tl.float32)

    @triton.jit
    def _positive(sums, at, there, shift):  # type: ignore[no-untyped-def]
        """NaN stays NaN."""
        value = tl.load(sums + at, there, 0.0).to(tl.float32) + shift
        return tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def _rectified_kernel(  # type: ignore[no-untyped-def]
        sums, bias, out, down, across, height, width, ratio_down, ratio_across,
        channels: tl.constexpr, block: tl.constexpr, pixels: tl.constexpr, aligned: tl.constexpr, grows: tl.constexpr,
    ):  # fmt: skip
        """One program: all channels of `pixels` neighbours in one line of one image."""
        line, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
        column = tl.program_id(0) * pixels + tl.arange(0, pixels)
        channel = tl.arange(0, block)[None, :]
        there = (column < width)[:, None] & (channel < channels)
        shift = tl.load(bias + channel, channel < channels, 0.0).to(tl.float32)
        sums += image * (down * across * channels)
        if grows:
            left, right, along = corners(column, ratio_across, across, aligned)
            upper, lower, beside = corners(line, ratio_down, down, aligned)
            left, right = left[:, None] * channels + channel, right[:, None] * channels + channel
            upper, lower, along = upper * across * channels, lower * across * channels, along[:, None]
            first = _positive(sums, upper + left, there, shift)
            above = first + (_positive(sums, upper + right, there, shift) - first) * along
            second = _positive(sums, lower + left, there, shift)
            below = second + (_positive(sums, lower + right, there, shift) - second) * along
            value = above + (below - above) * beside
        else:
            value = _positive(sums, (line * across + column)[:, None] * channels + channel, there, shift)
        to = image * (height * width * channels) + (line * width + column)[:, None] * channels + channel
        tl.store(out + to, value.to(out.dtype.element_ty), there)
