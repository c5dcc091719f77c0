"""What CLAP and GBM share: moving the rows of a token sequence to the rows of a shorter one.

A merge is described by `row` (B, S) int64: for every input row the output row it joins, -1 for rows that vanish
(padding). Everything else - values, sizes, composed maps, gradients - follows from it.

Means follow IEEE arithmetic in every implementation: with an infinite member the mean is infinite, with two of opposite
sign or a NaN it is NaN, and no other row is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algm_deploy.ops.schema import Operator

NORM_EPS = 1e-8


def wide(x: Tensor) -> Tensor:
    """16-bit values as fp32, others as they are: what sums and norms are computed in."""
    return x.float() if x.element_size() < 4 else x


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product in the dtype of its operands: autocast would round fp32 to 16 bits."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def table(
    make: Callable[..., np.ndarray],
    facts: tuple[Hashable, ...],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The array `make(*facts)` on a device, of its own dtype if none is given. A GPU keeps it: never write to it."""
    if device.type == "cpu" or type(torch.empty(0)) is not Tensor:  # tracers make tensors that stand for real ones
        return torch.from_numpy(make(*facts)).to(device, dtype)
    return _copied_once(make, facts, device, dtype)


@lru_cache(256)
def _copied_once(
    make: Callable[..., np.ndarray], facts: tuple[Hashable, ...], device: torch.device, dtype: torch.dtype | None
) -> Tensor:
    """A CUDA graph cannot capture a copy from the host."""
    with torch.inference_mode(False):
        return torch.from_numpy(make(*facts)).to(device, dtype)


def existing_rows(length: Tensor, rows: int, prefix: int) -> Tensor:
    """How many of `rows` rows exist where a length (B) may be any int64; prefix rows always do."""
    return length.clamp(prefix, rows)


def member_sums(share: Tensor, x: Tensor, row: Tensor) -> Tensor:
    """The product share (B, R, S) @ x (B, S, D), shares not negative, a column's in row `row` (B, S) if in any.

    A value that is not finite reaches only that row, where zero times infinity would make NaN of all others. Nothing is
    read back to see whether there is one.
    """
    finite = x.isfinite()
    sums = product(share, torch.where(finite, x, 0))
    counts = (share.sum(1) > 0)[..., None]
    target = row.clamp(0, len(share[0]) - 1)[..., None].expand_as(x)
    for sign in (1, -1):
        infinite = counts & ~finite & ~(sign * x < 0)  # a NaN is both
        there = torch.zeros_like(sums).scatter_reduce(1, target, infinite.to(sums.dtype), "amax")
        sums = sums + torch.where(there > 0, sign * torch.inf, 0.0)
    return sums


def merge_rows(tokens: Tensor, weight: Tensor, row: Tensor, rows_out: int) -> Tensor:
    """Weighted mean of the input rows that share an output row.

    Args:
        tokens: (B, S, D), any floating dtype.
        weight: (B, S) fp32.
        row: (B, S) int64, -1 for rows that vanish.
        rows_out: S'.

    Returns:
        (B, S', D) in the dtype of `tokens`; rows without a member are zero. The sums are one matrix product with a
        0/1 matrix in fp32, so their order is fixed on every device (a scatter with atomics would not be).
    """
    member = torch.arange(rows_out, device=row.device)[:, None] == row[:, None, :]
    share = member * weight[:, None, :].to(wide(tokens).dtype)
    total = share.sum(-1, keepdim=True)
    mean = member_sums(share, wide(tokens), row) / torch.where(total > 0, total, 1)
    return mean.to(tokens.dtype)


def sum_rows(size: Tensor, row: Tensor, rows_out: int) -> Tensor:
    """Sizes (B, S) fp32 summed by output row: (B, S') fp32, exact because sizes are small integers."""
    kept = torch.where(row < 0, rows_out, row)
    return size.new_zeros(size.shape[0], rows_out + 1).scatter_add_(1, kept, size)[:, :rows_out]


def row_of(map_in: Tensor, map_out: Tensor, rows_in: int, prefix: int) -> Tensor:
    """Recovers `row` (B, S) from the composed patch maps (B, N) before and after a merge."""
    row = map_in.new_full((map_in.shape[0], rows_in), -1)
    row[:, :prefix] = torch.arange(prefix, device=row.device)
    return row.scatter_(1, map_in, map_out)


def merge_rows_backward(grad: Tensor, weight: Tensor, row: Tensor) -> Tensor:
    """Gradient of `merge_rows` with respect to `tokens`; weights and rows are constants of the decision."""
    total = sum_rows(weight, row, grad.shape[1])
    kept = row.clamp(min=0)
    share = torch.where(row < 0, 0, weight / total.gather(1, kept).clamp(min=NORM_EPS))
    picked = grad.gather(1, kept[:, :, None].expand(-1, -1, grad.shape[2]))
    return (picked * share[:, :, None]).to(grad.dtype)


def register_gradient(operator: Operator, followed: Callable[[Any, Any], tuple[Tensor, Tensor]]) -> None:
    """Gives a merge its gradient with respect to the tokens, its first input.

    `followed` maps inputs and outputs to what the gradient follows: weights (B, S) and `row` (B, S).
    """

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*followed(inputs, output))

    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        return merge_rows_backward(grad, *ctx.saved_tensors), *[None] * (len(ctx.needs_input_grad) - 1)

    operator.register_autograd(backward, setup_context=save)


def known_rows(
    tokens: Tensor, size: Tensor, patches: int, rows_out: int | torch.SymInt
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes of a merge's tokens, size, map and length, for fake kernels."""
    images = tokens.shape[0]
    return (
        tokens.new_empty(images, rows_out, tokens.shape[2]),
        size.new_empty(images, rows_out),
        tokens.new_empty(images, patches, dtype=torch.int64),
        tokens.new_empty(images, dtype=torch.int64),
    )


def unknown_rows(tokens: Tensor, size: Tensor, patches: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `known_rows`, where the data decides how many rows there are."""
    return known_rows(tokens, size, patches, torch.library.get_ctx().new_dynamic_size(min=1))


def best_ranks(values: Tensor) -> Tensor:
    """Place (B, R) of each value of an image in descending order; the lower index first on ties, NaN as -inf."""
    return (
        torch.where(values.isnan(), -torch.inf, values).sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)
    )


def merge_rows_reference(
    tokens: np.ndarray, size: np.ndarray, row: np.ndarray, rows_out: int, weighted: bool
) -> tuple[np.ndarray, np.ndarray]:
    """NumPy definition of a merge: loops, fp64 sums, one rounding. Returns tokens (B, S', D) and size (B, S')."""
    batch, _, width = tokens.shape
    sums = np.zeros((batch, rows_out, width))
    weights, sizes = np.zeros((batch, rows_out)), np.zeros((batch, rows_out))
    with np.errstate(invalid="ignore", over="ignore"):  # infinities of opposite sign; means beyond the 16-bit types
        for b, i in np.ndindex(*row.shape):
            if (out := row[b, i]) >= 0:
                weight = float(size[b, i]) if weighted else 1.0
                sums[b, out] += weight * tokens[b, i].astype(np.float64)
                weights[b, out] += weight
                sizes[b, out] += size[b, i]
        mean = sums / np.where(weights > 0, weights, 1)[..., None]
        return mean.astype(tokens.dtype), sizes.astype(np.float32)
