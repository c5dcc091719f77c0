"""CTS, superpatches that share a token (Content-aware Token Sharing, CVPR 2023, section 3.2).

A superpatch is 2x2 patches. Those that a policy network finds likeliest to show one class are given to the ViT as one
token, made of their pixels at half the size. As published (tue-mps/cts-segmenter, segm/model/efficient.py).

    cts(tokens (B,P+N+M,D), score (B,M) fp32) -> tokens (B,R,D), size (B,R) fp32, map (B,N)

Attributes: `grid` (rows, columns) of the N patches, both even, `prefix` P, rows that are handed on, `shared` K. Input
rows are [prefix | patches | superpatches], each in raster order, with M a quarter of N; the K superpatches of the
highest score take the place of their patches. Output rows are [prefix | patches | superpatches], R = P + N - 3K; a
superpatch stands for four. Ties go to the lower superpatch; NaN is the lowest score. The published program ranks by the
probability, which rounding makes equal for scores far apart, in whatever order its sort leaves those.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algm_deploy.ops._rows import best_ranks, table
from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.schema import operator
from algm_deploy.recipe.network import Size

MEMBERS = 4  # patches of a superpatch


@cache
def superpatch_of(rows: int, columns: int) -> np.ndarray:
    """Of every patch of a grid (N,) the superpatch that it is part of."""
    return (np.arange(rows)[:, None] // 2 * (columns // 2) + np.arange(columns) // 2).ravel()


# --- torch -----------------------------------------------------------------------------------------------------------


def cts_shared(score: Tensor, count: int) -> Tensor:
    """Which superpatches (B, M) share a token, given their scores."""
    return best_ranks(score) < count


def cts_rows(shared: Tensor, grid: Size, prefix: int, count: int) -> tuple[Tensor, Tensor]:
    """The input row (B, R) of every output row, and the map (B, N), where `count` superpatches are `shared` (B, M)."""
    of_patch = table(superpatch_of, tuple(grid), shared.device)
    apart = ~shared[:, of_patch]
    stays = torch.cat([shared.new_ones(len(shared), prefix), apart, shared], 1)
    patches = apart.shape[1]
    place = stays.cumsum(1) - 1
    row = torch.where(apart, place[:, prefix : prefix + patches], place[:, prefix + patches :][:, of_patch])
    source = (~stays).sort(dim=1, stable=True).indices[:, : prefix + patches - (MEMBERS - 1) * count]
    return source, row


def cts_values(tokens: Tensor, source: Tensor, patches: int, prefix: int) -> tuple[Tensor, Tensor]:
    """Tokens (B, R, D) and their sizes (B, R) fp32 by the input row of each."""
    values = tokens.gather(1, source[:, :, None].expand(-1, -1, tokens.shape[2]))
    return values, torch.where(source < prefix + patches, 1.0, float(MEMBERS))


@operator("tokens:T score:f32", "tokens:T size:f32 map:i64")
def cts(tokens: Tensor, score: Tensor, grid: list[int], prefix: int, shared: int) -> tuple[Tensor, Tensor, Tensor]:
    """Content-aware token sharing: the best superpatches take the place of their patches."""
    rows, columns = grid
    source, map = cts_rows(cts_shared(score, shared), (rows, columns), prefix, shared)
    return *cts_values(tokens, source, rows * columns, prefix), map


@cts.register_fake
def _(tokens: Tensor, score: Tensor, grid: list[int], prefix: int, shared: int) -> tuple[Tensor, ...]:
    images, patches = tokens.shape[0], grid[0] * grid[1]
    rows = prefix + patches - (MEMBERS - 1) * shared
    return (
        tokens.new_empty(images, rows, tokens.shape[2]),
        tokens.new_empty(images, rows, dtype=torch.float32),
        tokens.new_empty(images, patches, dtype=torch.int64),
    )


# --- ONNX body -------------------------------------------------------------------------------------------------------


@body_of("cts")
def onnx_body(body: Body, attributes: Mapping[str, Any], tokens: Value, score: Value) -> list[Value]:
    """CTS in standard ops."""
    (rows, columns), prefix, count = attributes["grid"], attributes["prefix"], attributes["shared"]
    patches, superpatches, of_patch = rows * columns, rows * columns // MEMBERS, superpatch_of(rows, columns)
    left = prefix + patches - (MEMBERS - 1) * count
    shared = body("GreaterOrEqual", body.best(score, count), 0)
    apart = body("Not", body("Gather", shared, of_patch, axis=1))
    head = []
    if prefix:
        shape = body("Concat", body.size_of(score, 0), [prefix], axis=0)
        head = [body("Expand", np.ones(1, bool), shape)]
    stays = body("Concat", *head, apart, shared, axis=1)
    place = body("Sub", body.running_count(stays), 1)
    gone = body("Add", body.running_count(body("Not", stays)), left - 1)
    count_in = prefix + patches + superpatches
    source = body.rows(body.inverse(body("Where", stays, place, gone), count_in), 0, left)
    of_shared = body("Gather", body.rows(place, prefix + patches, count_in), of_patch, axis=1)
    map = body("Where", apart, body.rows(place, prefix, prefix + patches), of_shared)
    size = body("Where", body("Less", source, prefix + patches), 1.0, float(MEMBERS))
    return [body.take_rows(tokens, source), size, map]


# --- NumPy reference -------------------------------------------------------------------------------------------------


def reference_shared(score: np.ndarray, count: int) -> np.ndarray:
    """As `cts_shared`: loops."""
    shared = np.zeros(score.shape, bool)
    for chosen, scores in zip(shared, score, strict=True):
        best_first = sorted(range(len(scores)), key=lambda i: (np.nan_to_num(-scores[i], nan=np.inf), i))
        chosen[best_first[:count]] = True
    return shared


def reference_sources(shared: np.ndarray, grid: Size, prefix: int) -> tuple[list[np.ndarray], np.ndarray]:
    """As `cts_rows`, image by image: loops."""
    of_patch = superpatch_of(*grid)
    patches = len(of_patch)
    sources, maps = [], np.empty((len(shared), patches), np.int64)
    for chosen, row in zip(shared, maps, strict=True):
        alone = [patch for patch in range(patches) if not chosen[of_patch[patch]]]
        together = np.flatnonzero(chosen)
        row[alone] = prefix + np.arange(len(alone))
        for place, superpatch in enumerate(together):
            row[of_patch == superpatch] = prefix + len(alone) + place
        parts = np.arange(prefix), prefix + np.asarray(alone, np.int64), prefix + patches + together
        sources.append(np.concatenate(parts))
    return sources, maps


def reference(
    tokens: np.ndarray, score: np.ndarray, *, grid: Size, prefix: int, shared: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CTS in plain NumPy; arguments and results as the torch operator."""
    sources, maps = reference_sources(reference_shared(score, shared), grid, prefix)
    source = np.stack(sources)
    size = np.where(source < prefix + grid[0] * grid[1], 1, MEMBERS).astype(np.float32)
    return np.take_along_axis(tokens, source[..., None], 1), size, maps
