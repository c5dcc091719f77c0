"""EViT, tokens kept by what cls attends to (Not All Patches are What You Need, ICLR 2022, section 3.2).

As it is used for segmentation (Expedit-LargeScale-Vision-Transformer/Expedit-Segmenter,
mmseg/models/backbones/evit.py): the rows with the most attention stay, the others become one more row, their sum
weighted by attention. For the decoder a row that left is given the result of the kept one that was nearest to it.

    evit(tokens (B,P+R,D), map (B,N), attention (B,P+R) fp32) -> tokens (B,P+K+1,D), map (B,N), source (B,N)

Attributes: `patches` N, `rows` R, `keep` K below R, `prefix` P, rows that are handed on. Output rows are [prefix | kept
rows, ascending | the sum]; `map` is composed, so it names for every patch the row it is restored from. `source` tells
what was decided: for each of the R input rows, prefix counted, the kept row it is restored from, for a kept one itself;
behind them it goes on with row numbers. Distances are Euclidean. Ties go to the lower row; NaN is the least attention
and the largest distance. All is fp32 inside. The published program orders kept rows by attention, which nothing that
follows can tell, and makes zeros where the exponential of all distances vanishes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algm_deploy.ops._rows import best_ranks, product, wide
from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.elvit import squared_distances
from algm_deploy.ops.schema import operator

# --- torch -----------------------------------------------------------------------------------------------------------


def evit_distances(patches: Tensor, attention: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Which of rows (B, R, D) stay by attention (B, R), ascending, then which do not (B, R); and the squared distances
    (B, R - K, K) of these and those."""
    order = _kept_first(best_ranks(attention) < keep)
    return order, squared_distances(_rows(patches, order[:, keep:]), _rows(patches, order[:, :keep]))


def evit_sources(patches: Tensor, attention: Tensor, keep: int) -> Tensor:
    """The row (B, R), from 0, that each of R rows is restored from, given rows (B, R, D) and attention (B, R)."""
    order, distance = evit_distances(patches, attention, keep)
    kept = order[:, :keep]
    near = torch.where(distance.isnan(), torch.inf, distance).argmin(2)
    return torch.cat([kept, kept.gather(1, near)], 1).gather(1, order.argsort(1))


def evit_rows(
    tokens: Tensor, map: Tensor, attention: Tensor, source: Tensor, keep: int, prefix: int
) -> tuple[Tensor, Tensor]:
    """Tokens and map after the merge that `source` (B, R), from 0, describes."""
    stays = source == torch.arange(source.shape[1], device=source.device)
    order, patches = _kept_first(stays), tokens[:, prefix:]
    dropped = order[:, keep:]
    fused = product(attention[:, prefix:].gather(1, dropped)[:, None], wide(_rows(patches, dropped)))
    row = (prefix - 1 + stays.cumsum(1)).gather(1, source)
    head = torch.arange(prefix, device=row.device).expand(len(row), -1)
    values = torch.cat([tokens[:, :prefix], _rows(patches, order[:, :keep]), fused.to(tokens.dtype)], 1)
    return values, torch.cat([head, row], 1).gather(1, map)


def evit_record(source: Tensor, patches: int, prefix: int) -> Tensor:
    """Sources (B, R), from 0, as the operator tells them (B, N)."""
    rest = torch.arange(source.shape[1], patches, device=source.device).expand(len(source), -1)
    return prefix + torch.cat([source, rest], 1)


def _kept_first(kept: Tensor) -> Tensor:
    """Indices (B, R): of kept rows ascending, then of the others."""
    return (~kept).sort(dim=1, stable=True).indices


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))


@operator("tokens:T map:i64 attention:f32", "tokens:T map:i64 source:i64")
def evit(
    tokens: Tensor, map: Tensor, attention: Tensor, patches: int, rows: int, keep: int, prefix: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Token reorganization: rows with the most attention of cls stay, one more row holds the others."""
    source = evit_sources(wide(tokens[:, prefix:]), attention[:, prefix:], keep)
    values, map_out = evit_rows(tokens, map, attention, source, keep, prefix)
    return values, map_out, evit_record(source, patches, prefix)


@evit.register_fake
def _(
    tokens: Tensor, map: Tensor, attention: Tensor, patches: int, rows: int, keep: int, prefix: int
) -> tuple[Tensor, ...]:
    values = tokens.new_empty(tokens.shape[0], prefix + keep + 1, tokens.shape[2])
    return values, torch.empty_like(map), torch.empty_like(map)


# --- ONNX body -------------------------------------------------------------------------------------------------------


@body_of("evit")
def onnx_body(body: Body, attributes: Mapping[str, Any], tokens: Value, map: Value, attention: Value) -> list[Value]:
    """EViT in standard ops; fp32 between the casts."""
    patches, rows, keep, prefix = (attributes[name] for name in ("patches", "rows", "keep", "prefix"))
    weight = body.rows(attention, prefix, prefix + rows)
    kept = body("GreaterOrEqual", body.best(weight, keep), 0)
    behind = body("Add", body.running_count(body("Not", kept)), keep)
    place = body("Sub", body("Where", kept, body.running_count(kept), behind), 1)
    order = body.inverse(place, rows)
    sorted_rows = body.take_rows(body.rows(tokens, prefix, prefix + rows), order)
    stays, leaves = (body.fp32(body.rows(sorted_rows, *part)) for part in ((0, keep), (keep, rows)))
    products = body("MatMul", leaves, body("Transpose", stays, perm=[0, 2, 1]))
    squares = body("Add", _squares(body, leaves), body("Transpose", _squares(body, stays), perm=[0, 2, 1]))
    distance = body("Sub", squares, body("Mul", products, 2.0))
    finite = body("Where", body("Less", distance, np.inf), distance, np.inf)  # a NaN is the largest
    near = body("ArgMin", finite, axis=2, keepdims=0)
    kept_rows, left_rows = body.rows(order, 0, keep), body.rows(order, keep, rows)
    fused = body("MatMul", body("Unsqueeze", body("GatherElements", weight, left_rows, axis=1), [1]), leaves)

    def each(count: int, start: int) -> Value:
        """start, start + 1, ... for every image."""
        shape = body("Concat", body.size_of(tokens, 0), [count], axis=0)
        return body("Expand", np.arange(start, start + count), shape)

    def told(of_kept: Value) -> Value:
        """What kept rows have, for all rows by the one they are restored from; prefix counted."""
        all_rows = body("Concat", of_kept, body("GatherElements", of_kept, near, axis=1), axis=1)
        return body("Add", body("GatherElements", all_rows, place, axis=1), prefix)

    row = body("Concat", *([each(prefix, 0)] if prefix else []), told(each(keep, 0)), axis=1)
    rest = [each(patches - rows, prefix + rows)] if patches > rows else []
    values = [body.rows(tokens, 0, prefix), body.rows(sorted_rows, 0, keep), body.like(fused, tokens)]
    return [
        body("Concat", *values, axis=1),
        body("GatherElements", row, map, axis=1),
        body("Concat", told(kept_rows), *rest, axis=1),
    ]


def _squares(body: Body, x: Value) -> Value:
    return body("ReduceSumSquare", x, [2], keepdims=1)


# --- NumPy reference -------------------------------------------------------------------------------------------------


def reference_sources(patches: np.ndarray, attention: np.ndarray, keep: int) -> np.ndarray:
    """As `evit_sources`, in fp64: loops over rows."""
    x = patches.astype(np.float64)
    source = np.empty(attention.shape, np.int64)
    for image, weights in enumerate(attention):
        best_first = sorted(range(len(weights)), key=lambda i: (np.nan_to_num(-weights[i], nan=np.inf), i))
        kept = np.sort(best_first[:keep])
        for row, value in enumerate(x[image]):
            distance = np.square(x[image, kept] - value).sum(1)
            source[image, row] = row if row in kept else kept[np.argmin(np.nan_to_num(distance, nan=np.inf))]
    return source


def reference(
    tokens: np.ndarray, map: np.ndarray, attention: np.ndarray, *, patches: int, rows: int, keep: int, prefix: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """EViT in plain NumPy; arguments and results as the torch operator."""
    source = reference_sources(tokens[:, prefix:], attention[:, prefix:], keep)
    out = np.zeros((len(tokens), prefix + keep + 1, tokens.shape[2]))
    map_out = np.empty_like(map)
    for image, origin in enumerate(source):
        kept = np.unique(origin)
        leaves = np.setdiff1d(np.arange(rows), kept)
        out[image, : prefix + keep] = tokens[image, np.concatenate([np.arange(prefix), prefix + kept])]
        out[image, -1] = attention[image, prefix + leaves].astype(np.float64) @ tokens[image, prefix + leaves]
        row = np.concatenate([np.arange(prefix), prefix + np.searchsorted(kept, origin)])
        map_out[image] = row[map[image]]
    rest = np.tile(np.arange(rows, patches), (len(tokens), 1))
    return out.astype(tokens.dtype), map_out, prefix + np.concatenate([source, rest], 1)
