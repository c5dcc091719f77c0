"""Two row-wise steps of a transformer as one kernel each, in Triton, which PyTorch's CUDA packages for Linux bring.

Where Triton is not there, or tensors are not on a CUDA device, they run in PyTorch's operators: the same results within
rounding, one more pass over memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.ops._rows import wide

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = None

UNIT_EPS = 1e-12  # norms are clamped here, as torch.nn.functional.normalize does


def residual_norm(x: Tensor, delta: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The sum of x and delta, rows (T, D) of any floating dtype, and that sum normalised; delta None adds nothing."""
    if not _fusible(x):
        total = x if delta is None else x + delta
        return total, norm(total)
    total, normed = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    width, adds = x.shape[1], delta is not None
    block = triton.next_power_of_2(width)
    tensors = x, delta if adds else x, norm.weight, norm.bias, total, normed
    _residual_norm_kernel[(len(x),)](*tensors, norm.eps, width, block, adds, num_warps=_warps(block))
    return total, normed


def unit(x: Tensor) -> Tensor:
    """Rows (..., D) scaled to length one; the norm is taken in fp32, where 16-bit squares cannot overflow."""
    if not _fusible(x):
        return F.normalize(wide(x), dim=-1).to(x.dtype)
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    _unit_kernel[(x.numel() // width,)](x, out, UNIT_EPS, width, block, num_warps=_warps(block))
    return out


def _fusible(x: Tensor) -> bool:
    """One program holds a whole row."""
    return triton is not None and x.is_cuda and x.is_contiguous() and x.numel() > 0 and x.shape[-1] <= 8192


def _warps(block: int) -> int:
    """So many that every thread loads 16 bytes of 16-bit values."""
    return min(max(block // 256, 1), 8)


if triton is not None:

    @triton.jit
    def _residual_norm_kernel(
        x: Any,
        delta: Any,
        weight: Any,
        bias: Any,
        total: Any,
        normed: Any,
        eps: Any,
        width: tl.constexpr,
        block: tl.constexpr,
        adds: tl.constexpr,
    ) -> None:
        column = tl.arange(0, block)
        inside = column < width
        at = tl.program_id(0).to(tl.int64) * width + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if adds:
            value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
            rounded = value.to(total.dtype.element_ty)
            tl.store(total + at, rounded, mask=inside)
            value = rounded.to(tl.float32)  # what is normalised is what was stored
        mean = tl.sum(value, 0) / width
        centred = tl.where(inside, value - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + at, (centred * scale * gain + shift).to(normed.dtype.element_ty), mask=inside)

    @triton.jit
    def _unit_kernel(x: Any, out: Any, eps: Any, width: tl.constexpr, block: tl.constexpr) -> None:
        column = tl.arange(0, block)
        inside = column < width
        at = tl.program_id(0).to(tl.int64) * width + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        length = tl.maximum(tl.sqrt(tl.sum(value * value, 0)), eps)
        tl.store(out + at, (value / length).to(out.dtype.element_ty), mask=inside)
