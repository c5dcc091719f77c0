"""CLAP, conditional local average pooling (ALGM, CVPR 2024, section 3.2).

A window of neighbouring patches becomes one token when the mean cosine similarity of its members reaches a threshold.

    clap(tokens (B,S,D), size (B,S), threshold ()?)
        -> tokens (B,S',D), size (B,S'), map (B,N), length (B)

Attributes: `grid` and `window` (rows, columns), `prefix` P (leading rows that are no patches), `semantics`, `batch`,
`order`, `rule`, `budget`. S = P + N with N the patches of the grid. Tokens are fp32, fp16 or bf16; size and threshold
fp32; map and length int64. Output rows are [prefix | merged windows | unmerged patches by raster index | zero padding
of size 0]; `map` holds for every patch its output row, prefix counted; `length` counts the valid rows of each image,
prefix included.

A token's value is the mean of its members, weighted by size. With an infinite member it is infinite, with two of
opposite sign or a NaN it is NaN, and no other token is touched.

Windows start at the top left; patches right of and below the last whole window stay unmerged.

semantics  `code`: merge at similarity >= threshold, as the published program. `paper`: strictly above.
batch      `per_image`: each image merges all its qualifying windows. `batch_min`: all images merge as many windows as
           the image with the fewest, each its most similar ones.
order      `published`: merged windows by descending similarity. `raster`: by position.
rule       `threshold`, as the paper has it. `budget`: the `budget` most similar windows of every image merge, or all
           where there are no more. Then there is no threshold, S' is known beforehand and the same for all images, and
           `semantics` and `batch` change nothing.
Ties are ordered by the lower window index. A similarity that is NaN reaches no threshold, and comes last by a budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algm_deploy.ops._rows import (
    NORM_EPS,
    best_ranks,
    known_rows,
    merge_rows,
    merge_rows_reference,
    register_gradient,
    sum_rows,
    table,
    unknown_rows,
    wide,
)
from algm_deploy.ops.bodies import END, Body, Value, body_of, unit_rows
from algm_deploy.ops.schema import operator


def window_members(grid: tuple[int, int] | list[int], window: tuple[int, int] | list[int]) -> np.ndarray:
    """Raster indices (W, k) of the patches of every window, windows and members in raster order."""
    rows, columns = grid[0] // window[0], grid[1] // window[1]
    index = np.arange(grid[0] * grid[1]).reshape(grid[0], grid[1])
    whole = index[: rows * window[0], : columns * window[1]].reshape(rows, window[0], columns, window[1])
    return whole.transpose(0, 2, 1, 3).reshape(rows * columns, window[0] * window[1])


def rows_left(grid: tuple[int, int] | list[int], window: tuple[int, int] | list[int], prefix: int, budget: int) -> int:
    """S' by the rule `budget`."""
    windows = (grid[0] // window[0]) * (grid[1] // window[1])
    return prefix + grid[0] * grid[1] - min(budget, windows) * (window[0] * window[1] - 1)


def window_of_patch(grid: tuple[int, int] | list[int], window: tuple[int, int] | list[int]) -> np.ndarray:
    """Window index (N,) of every patch, -1 for patches outside all windows."""
    owner = np.full(grid[0] * grid[1], -1, dtype=np.int64)
    members = window_members(grid, window)
    owner[members] = np.arange(len(members))[:, None]
    return owner


# --- torch -----------------------------------------------------------------------------------------------------------


def window_similarity(tokens: Tensor, grid: list[int], window: list[int], prefix: int) -> Tensor:
    """Mean cosine similarity (B, W) fp32 over the unordered pairs of each window's members.

    The products are summed one by one: the shortcut through the norm of the sum cancels digits and flips decisions.
    """
    members = table(window_members, (tuple(grid), tuple(window)), tokens.device)
    x = wide(tokens[:, prefix:])[:, members]
    cosine = F.cosine_similarity(x[..., :, None, :], x[..., None, :, :], dim=-1, eps=NORM_EPS)
    k = members.shape[1]
    off_diagonal = 1 - torch.eye(k, device=tokens.device)
    return ((cosine * off_diagonal).sum((-1, -2)) / (k * (k - 1))).float()


def clap_decisions(
    similarity: Tensor,
    threshold: Tensor | None,
    semantics: str,
    batch: str,
    order: str,
    rule: str = "threshold",
    budget: int = 0,
) -> Tensor:
    """Place (B, W) int64 of every merged window among the merged ones, -1 for windows that stay."""
    if rule == "budget":
        rank = best_ranks(similarity)
        merged = rank < budget
    else:
        assert threshold is not None
        qualifies = similarity > threshold if semantics == "paper" else similarity >= threshold
        rank = best_ranks(torch.where(qualifies, similarity, -torch.inf))
        count = qualifies.sum(1, keepdim=True)
        merged = rank < (count.amin() if batch == "batch_min" else count)
    place = rank if order == "published" else merged.cumsum(1) - 1
    return torch.where(merged, place, -1)


def clap_rows(place: Tensor, grid: list[int], window: list[int], prefix: int) -> tuple[Tensor, Tensor]:
    """Output row (B, P + N) of every input row, and valid rows (B) of every image."""
    owner = table(window_of_patch, (tuple(grid), tuple(window)), place.device)
    places = F.pad(place, (0, 1), value=-1)[:, owner]  # owner -1 picks the padding: border patches never merge
    merged = places >= 0
    count = (place >= 0).sum(1, keepdim=True)
    patch = torch.where(merged, places, count + (~merged).cumsum(1) - 1) + prefix
    head = torch.arange(prefix, device=place.device).expand(len(place), -1)
    return torch.cat([head, patch], 1), prefix + count[:, 0] + (~merged).sum(1)


@operator("tokens:T size:f32 threshold?:f32", "tokens:T size:f32 map:i64 length:i64")
def clap(
    tokens: Tensor,
    size: Tensor,
    threshold: Tensor | None,
    grid: list[int],
    window: list[int],
    prefix: int,
    semantics: str,
    batch: str,
    order: str,
    rule: str,
    budget: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Conditional local average pooling: windows of similar patches become one token each."""
    similarity = window_similarity(tokens, grid, window, prefix)
    place = clap_decisions(similarity, threshold, semantics, batch, order, rule, budget)
    row, length = clap_rows(place, grid, window, prefix)
    rows_out = rows_left(grid, window, prefix, budget) if rule == "budget" else int(length.max())
    return merge_rows(tokens, size, row, rows_out), sum_rows(size, row, rows_out), row[:, prefix:].clone(), length


@clap.register_fake
def _(
    tokens: Tensor, size: Tensor, threshold: Tensor | None, grid: list[int], window: list[int], prefix: int, *rest: Any
) -> tuple[Tensor, ...]:
    *_, rule, budget = rest
    if rule == "budget":
        return known_rows(tokens, size, grid[0] * grid[1], rows_left(grid, window, prefix, budget))
    return unknown_rows(tokens, size, grid[0] * grid[1])


def _followed(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    size, map, prefix = inputs[1], output[2], inputs[5]
    head = torch.arange(prefix, device=map.device).expand(len(map), -1)
    return size, torch.cat([head, map], 1)


register_gradient(clap, _followed)


# --- ONNX body ------------------------------------------------------------------------------------------------------


def _onnx_similarity(body: Body, tokens: Value, members: np.ndarray, prefix: int) -> tuple[Value, Value]:
    """Members (B, W, k, D) fp32 of every window, and the window similarities (B, W)."""
    windows, k = members.shape
    x = body("Gather", tokens, members.reshape(-1) + prefix, axis=1)
    x = body("Reshape", body.fp32(x), [0, windows, k, -1])
    unit = unit_rows(body, x, NORM_EPS)
    gram = body("MatMul", unit, body("Transpose", unit, perm=[0, 1, 3, 2]))
    off_diagonal = (1 - np.eye(k)).astype(np.float32)
    total = body("ReduceSum", body("Mul", gram, off_diagonal), [2, 3], keepdims=0)
    return x, body("Div", total, float(k * (k - 1)))


def _onnx_places(
    body: Body, similarity: Value, threshold: Value | None, attributes: Mapping[str, Any], most: int
) -> Value:
    """Place (B, W) of every merged window, -1 for windows that stay; by the rule `budget` the `most` best merge."""
    raster = attributes["order"] == "raster"
    if attributes["rule"] == "budget":
        place = body.best(similarity, most)
        if raster:
            merged = body("GreaterOrEqual", place, 0)
            place = body("Where", merged, body("Sub", body.running_count(merged), 1), -1)
        return place
    comparison = "Greater" if attributes["semantics"] == "paper" else "GreaterOrEqual"
    merged = body(comparison, similarity, threshold)
    if attributes["batch"] == "batch_min" or attributes["order"] == "published":
        rank = body.rank(body("Where", merged, similarity, -np.inf))
        count = body.count(merged)
        if attributes["batch"] == "batch_min":
            count = body("ReduceMin", count, keepdims=1)
        merged = body("Less", rank, count)
    return body("Where", merged, body("Sub", body.running_count(merged), 1) if raster else rank, -1)


@body_of("clap")
def onnx_body(
    body: Body, attributes: Mapping[str, Any], tokens: Value, size: Value, threshold: Value | None = None
) -> list[Value]:
    """CLAP in standard ops. Candidates [prefix | window means | patches] are placed by one inverted permutation."""
    grid, window, prefix = attributes["grid"], attributes["window"], attributes["prefix"]
    members, owner = window_members(grid, window), window_of_patch(grid, window)
    x, similarity = _onnx_similarity(body, tokens, members, prefix)
    most = min(attributes["budget"], len(members))
    place = _onnx_places(body, similarity, threshold, attributes, most)

    # Border patches look up the appended column of -1 and so never merge.
    padded = body("Pad", place, [0, 0, 0, 1], -1)
    patch_place = body("Gather", padded, np.where(owner < 0, len(members), owner), axis=1)
    window_merged, patch_merged = (body("GreaterOrEqual", p, 0) for p in (place, patch_place))
    stays, known = body("Not", patch_merged), None
    if attributes["rule"] == "budget":
        count, known = most, (rows_left(grid, window, prefix, most), prefix + len(members) + len(owner))
        length = body.filled(tokens, known[0])
    else:
        count = body.count(window_merged)
        length = body("Add", body("Add", count, body.count(stays)), prefix)
    single = body("Sub", body("Add", count, body.running_count(stays)), 1)
    patch_row = body("Add", body("Where", patch_merged, patch_place, single), prefix)

    member_size = body("Gather", size, members.reshape(-1) + prefix, axis=1)
    member_size = body("Reshape", member_size, [0, *members.shape, 1])
    window_size = body("ReduceSum", member_size, [2], keepdims=0)
    mean = body("Div", body("ReduceSum", body("Mul", x, member_size), [2], keepdims=0), window_size)

    head = body("Expand", np.arange(prefix), body("Concat", body.size_of(tokens, 0), [prefix], axis=0))
    position = body("Concat", head, body("Add", place, prefix), patch_row, axis=1)
    kept = body("Concat", body("GreaterOrEqual", head, 0), window_merged, stays, axis=1)
    values = [body.rows(tokens, 0, prefix), body.like(mean, tokens), body.rows(tokens, prefix, END)]
    sizes = [body.rows(size, 0, prefix), body("Squeeze", window_size, [2]), body.rows(size, prefix, END)]
    candidates = body("Concat", *values, axis=1), body("Concat", *sizes, axis=1)
    merged = body.select(position, kept, length, *candidates, known=known)
    return [*merged, body("Identity", patch_row), body("Squeeze", length, [1])]


# --- NumPy reference -------------------------------------------------------------------------------------------------


def reference_similarity(tokens: np.ndarray, grid: tuple[int, int], window: tuple[int, int], prefix: int) -> np.ndarray:
    """Window similarities (B, W) in fp64, rounded once to fp32."""
    x = tokens[:, prefix:].astype(np.float64)
    with np.errstate(invalid="ignore"):
        x = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), NORM_EPS)
        x = x[:, window_members(grid, window)]
        k = x.shape[2]
        gram = np.einsum("bwid,bwjd->bwij", x, x)
    gram[..., np.arange(k), np.arange(k)] = 0
    mean: np.ndarray = gram.sum((-1, -2)) / (k * (k - 1))
    return mean.astype(np.float32)


def reference_decisions(
    similarity: np.ndarray,
    threshold: float | None,
    semantics: str,
    batch: str,
    order: str,
    rule: str = "threshold",
    budget: int = 0,
) -> list[list[int]]:
    """Merged windows of every image, in the order in which they become tokens."""
    if rule == "budget":
        qualifies = np.ones(similarity.shape, bool)
        counts = np.full(len(similarity), budget)
    else:
        tau = np.float32(threshold)
        qualifies = similarity > tau if semantics == "paper" else similarity >= tau
        counts = qualifies.sum(1)
        if batch == "batch_min":
            counts[:] = counts.min()
    sortable = np.where(np.isnan(similarity), -np.inf, similarity)
    merged = [
        sorted(np.flatnonzero(row), key=lambda w: (-values[w], w))[:count]
        for row, values, count in zip(qualifies, sortable, counts, strict=True)
    ]
    return [[int(w) for w in (m if order == "published" else sorted(m))] for m in merged]


def reference_rows(
    merged: list[list[int]], grid: tuple[int, int], window: tuple[int, int], prefix: int
) -> tuple[np.ndarray, np.ndarray]:
    """Output row (B, P + N) of every input row, and valid rows (B)."""
    members = window_members(grid, window)
    row = np.full((len(merged), prefix + grid[0] * grid[1]), -1, dtype=np.int64)
    row[:, :prefix] = np.arange(prefix)
    length = np.empty(len(merged), dtype=np.int64)
    for b, windows in enumerate(merged):
        for place, w in enumerate(windows):
            row[b, prefix + members[w]] = prefix + place
        left = np.flatnonzero(row[b] < 0)
        row[b, left] = prefix + len(windows) + np.arange(len(left))
        length[b] = prefix + len(windows) + len(left)
    return row, length


def reference(
    tokens: np.ndarray,
    size: np.ndarray,
    threshold: float | None,
    *,
    grid: tuple[int, int],
    window: tuple[int, int],
    prefix: int = 1,
    semantics: str = "code",
    batch: str = "per_image",
    order: str = "published",
    rule: str = "threshold",
    budget: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """CLAP in plain NumPy; arguments and results as the torch operator."""
    similarity = reference_similarity(tokens, grid, window, prefix)
    merged = reference_decisions(similarity, threshold, semantics, batch, order, rule, budget)
    row, length = reference_rows(merged, grid, window, prefix)
    merged_tokens, merged_size = merge_rows_reference(tokens, size, row, int(length.max()), weighted=True)
    return merged_tokens, merged_size, row[:, prefix:], length
