"""ToMe, token merging by a constant number of rows (ICLR 2023, section 3; facebookresearch/ToMe, tome/merge.py).

The sequence is split into its even rows A and odd rows B; every A row looks for its most similar B row, and the `r`
most similar pairs merge. What is compared are keys of the block's attention.

    tome(tokens (B,S,D), size (B,S), map (B,N), keys (B,S,K)) -> tokens (B,S-r,D), size (B,S-r), map (B,N)

Attributes: `r`, at most half of the rows behind the prefix; `prefix` P. Dtypes as for GBM. All images have S rows, and
merge as many, so there is no padding and S - r is known beforehand. Prefix rows never merge and are never joined.
Output rows are [prefix | A rows that stay | all B rows, ascending]; A rows that stay are ascending, or, without prefix,
in the order of descending similarity, as published. Merged values are means weighted by size; `map` is composed. Ties
go to the lower row, and NaN comes last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algm_deploy.ops._rows import best_ranks, merge_rows, merge_rows_reference, register_gradient, row_of, sum_rows
from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.gbm import (
    WORST,
    gbm_rows,
    gbm_similarity,
    onnx_joined,
    onnx_similarity,
    reference_most_similar,
    reference_rows,
    reference_similarity,
)
from algm_deploy.ops.schema import operator

SEMANTICS = "code"  # GBM's split of the published program, which took it from ToMe


def most_merges(rows: int, prefix: int) -> int:
    """The largest `r` for a sequence of `rows` rows."""
    return (rows - prefix) // 2


# --- torch -----------------------------------------------------------------------------------------------------------


def tome_similarity(keys: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Best cosine (B, |A|) fp32 of every A row, -inf for prefix rows, and the index in B that has it."""
    return gbm_similarity(keys, _full_length(keys), prefix, SEMANTICS, WORST)


def tome_rows(best: Tensor, match: Tensor, r: int, rows_in: int, prefix: int) -> Tensor:
    """Output row (B, S) of every input row."""
    rank = best_ranks(best)
    length = torch.full((len(best),), rows_in, device=best.device)
    row, _ = gbm_rows(rank < r, match, length, rows_in, prefix, SEMANTICS)
    if prefix == 0:
        row[:, ::2] = torch.where(rank < r, row[:, ::2], rank - r)
    return row


def by_similarity(best: Tensor, r: int, tokens: Tensor, size: Tensor, map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Without prefix: tokens (B, S, D), size (B, S) and map (B, N) behind a merge in the published order.

    Args:
        best: (B, |A|) fp32, the similarity by which A rows merged, with -inf for NaN.
        r: how many did.
        tokens, size, map: with A rows that stay ascending.
    """
    ranked = best.sort(dim=1, descending=True, stable=True).indices
    joined = torch.zeros_like(ranked).scatter_(1, ranked[:, :r], 1)
    ascending = torch.arange(ranked.shape[1], device=ranked.device) - joined.cumsum(1)
    places = torch.arange(tokens.shape[1], device=ranked.device).expand(len(tokens), -1)
    order = torch.cat([ascending.gather(1, ranked[:, r:]), places[:, ranked.shape[1] - r :]], 1)
    row = torch.empty_like(order).scatter_(1, order, places)
    return tokens.gather(1, order[..., None].expand_as(tokens)), size.gather(1, order), row.gather(1, map)


def _full_length(x: Tensor) -> Tensor:
    return torch.full((x.shape[0],), x.shape[1], device=x.device)


@operator("tokens:T size:f32 map:i64 keys:T", "tokens:T size:f32 map:i64")
def tome(tokens: Tensor, size: Tensor, map: Tensor, keys: Tensor, r: int, prefix: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token merging: the r pairs of most similar keys join."""
    rows_in = tokens.shape[1]
    best, match = tome_similarity(keys, prefix)
    row = tome_rows(best, match, r, rows_in, prefix)
    sizes = sum_rows(size, row, rows_in - r).contiguous()
    return merge_rows(tokens, size, row, rows_in - r), sizes, row.gather(1, map)


@tome.register_fake
def _(tokens: Tensor, size: Tensor, map: Tensor, keys: Tensor, r: int, prefix: int) -> tuple[Tensor, ...]:
    images, rows, width = tokens.shape
    return tokens.new_empty(images, rows - r, width), size.new_empty(images, rows - r), torch.empty_like(map)


def _followed(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    _, size, map_in, _, _, prefix = inputs
    return size, row_of(map_in, output[2], size.shape[1], prefix)


register_gradient(tome, _followed)


# --- ONNX body ------------------------------------------------------------------------------------------------------


@body_of("tome")
def onnx_body(
    body: Body, attributes: Mapping[str, Any], tokens: Value, size: Value, map: Value, keys: Value
) -> list[Value]:
    """ToMe in standard ops: GBM's body with the r best instead of those that reach a threshold."""
    prefix, r, count = attributes["prefix"], attributes["r"], body.extent(tokens, 1)
    known = count if isinstance(count, int) else None
    every: Value = (
        body("GreaterOrEqual", size, 0.0) if known is None else body.value(np.ones((1, known), bool))  # type: ignore[assignment]
    )
    allowed = body("And", every, body("GreaterOrEqual", body.indices(count), prefix))
    best, match = onnx_similarity(body, keys, allowed, 0, WORST)
    rank = body.rank(best, None if known is None else (known + 1) // 2)
    place = None if prefix else body("Sub", rank, r)
    inputs, attributes = (tokens, size, map), {"prefix": prefix, "semantics": SEMANTICS}
    merged = body("Less", rank, r)
    return onnx_joined(body, inputs, every, merged, match, attributes, place, None if known is None else r)[:3]


# --- NumPy reference -------------------------------------------------------------------------------------------------


def reference_order(
    best: Sequence[np.ndarray], merged: Sequence[np.ndarray], row: np.ndarray, prefix: int
) -> np.ndarray:
    """Output rows (B, S) in the published order: without prefix, A rows that stay by descending similarity."""
    if prefix:
        return row
    row = row.copy()
    for image, (values, joins) in enumerate(zip(best, merged, strict=True)):
        stays = np.flatnonzero(~joins)
        order = sorted(range(len(stays)), key=lambda i: (-values[stays[i]], i))
        row[image, 2 * stays[order]] = np.arange(len(stays))
    return row


def reference(
    tokens: np.ndarray, size: np.ndarray, map: np.ndarray, keys: np.ndarray, *, r: int, prefix: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ToMe in plain NumPy; arguments and results as the torch operator."""
    rows = tokens.shape[1]
    length = np.full(len(tokens), rows)
    best, match = reference_similarity(keys, length, prefix, SEMANTICS, WORST)
    merged = reference_most_similar(best, r)
    row, _ = reference_rows(merged, match, rows, length, prefix, SEMANTICS)
    row = reference_order(best, merged, row, prefix)
    merged_tokens, merged_size = merge_rows_reference(tokens, size, row, rows - r, weighted=True)
    return merged_tokens, merged_size, np.take_along_axis(row, map, 1)
