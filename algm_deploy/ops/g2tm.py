"""G2TM, groups of similar neighbours (Single-Module Graph-Guided Token Merging, VISAPP 2026; vbercy/g2tm-segmenter,
g2tm/g2tm/graph_merge.py).

Patches that touch, one beside or above the other, are linked where their cosine similarity is above a threshold; every
group that links connect becomes one token.

    g2tm(tokens (B,P+N,D), size (B,P+N), threshold ()) -> tokens (B,S',D), size (B,S'), map (B,N), length (B)

Attributes: `grid` (rows, columns) of the N patches, `prefix` P, rows that are handed on. Dtypes, padding and `length`
as for CLAP. Every image merges alone. Output rows are [prefix | groups by their first patch in raster order]; a token
is the mean of its members, weighted by size, which follows IEEE arithmetic as CLAP's. A similarity that is NaN links
nothing.

Groups are found in a number of steps that the grid decides, without a loop that waits for the data: each tree of linked
patches joins the one next to it with the lowest root, of two that would join each other the lower stays, and so every
step leaves at most half as many trees of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algm_deploy.ops._rows import (
    NORM_EPS,
    merge_rows,
    merge_rows_reference,
    register_gradient,
    sum_rows,
    unknown_rows,
    wide,
)
from algm_deploy.ops.bodies import Body, Value, body_of, unit_rows
from algm_deploy.ops.schema import operator


def neighbours(grid: Sequence[int]) -> np.ndarray:
    """Raster indices (E, 2) of patches that touch: each and the one on its right, then each and the one below."""
    index = np.arange(grid[0] * grid[1]).reshape(grid[0], grid[1])
    right = np.stack([index[:, :-1].ravel(), index[:, 1:].ravel()], 1)
    return np.concatenate([right, np.stack([index[:-1].ravel(), index[1:].ravel()], 1)])


def _halved(patches: int) -> Iterator[int]:
    """The most trees that a group can still have in each step, and how often a path through them is to be doubled."""
    while patches > 1:
        yield (patches - 1).bit_length()
        patches //= 2


# --- torch -----------------------------------------------------------------------------------------------------------


def neighbour_similarity(tokens: Tensor, grid: Sequence[int], prefix: int) -> Tensor:
    """Cosine similarity (B, E), at least fp32, of the patches that touch, in the order of `neighbours`."""
    x = wide(tokens[:, prefix:]).reshape(len(tokens), grid[0], grid[1], -1)
    right = F.cosine_similarity(x[:, :, 1:], x[:, :, :-1], dim=-1, eps=NORM_EPS)
    below = F.cosine_similarity(x[:, 1:], x[:, :-1], dim=-1, eps=NORM_EPS)
    return torch.cat([right.flatten(1), below.flatten(1)], 1)


def groups(linked: Tensor, grid: Sequence[int]) -> Tensor:
    """The first patch (B, N) of every patch's group, given which neighbours are linked (B, E)."""
    height, width = grid
    right = linked[:, : height * (width - 1)].reshape(len(linked), height, width - 1)
    below = linked[:, height * (width - 1) :].reshape(len(linked), height - 1, width)
    sides = F.pad(right, (0, 1)), F.pad(right, (1, 0)), F.pad(below, (0, 0, 0, 1)), F.pad(below, (0, 0, 1, 0))
    linked_to = torch.stack([side.flatten(1) for side in sides], 1)
    count = height * width
    index = torch.arange(count, device=linked.device)
    beside = torch.stack([(index + step).clamp(0, count - 1) for step in (1, -1, width, -width)])
    root = index.expand(len(linked), -1)
    none = torch.full_like(root, count)
    for doublings in _halved(count):
        other = root[:, beside]
        reached = torch.where(linked_to & (other != root[:, None]), other, count).amin(1)
        lowest = none.scatter_reduce(1, root, reached, "amin")
        root = torch.where(lowest < count, lowest, root)
        root = torch.where((root.gather(1, root) == index) & (index < root), index, root)
        for _ in range(doublings):
            root = root.gather(1, root)
    return none.scatter_reduce(1, root, index.expand_as(root), "amin").gather(1, root)


def g2tm_rows(linked: Tensor, grid: Sequence[int], prefix: int) -> tuple[Tensor, Tensor]:
    """Output row (B, P + N) of every input row, and valid rows (B) of every image."""
    first = groups(linked, grid)
    leads = first == torch.arange(first.shape[1], device=first.device)
    row = (prefix - 1 + leads.cumsum(1)).gather(1, first)
    head = torch.arange(prefix, device=row.device).expand(len(row), -1)
    return torch.cat([head, row], 1), prefix + leads.sum(1)


@operator("tokens:T size:f32 threshold:f32", "tokens:T size:f32 map:i64 length:i64")
def g2tm(
    tokens: Tensor, size: Tensor, threshold: Tensor, grid: list[int], prefix: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Graph-guided merging: groups of patches that links of similar neighbours connect become one token each."""
    linked = neighbour_similarity(tokens, grid, prefix) > threshold
    row, length = g2tm_rows(linked, grid, prefix)
    rows_out = int(length.max())
    return merge_rows(tokens, size, row, rows_out), sum_rows(size, row, rows_out), row[:, prefix:].clone(), length


@g2tm.register_fake
def _(tokens: Tensor, size: Tensor, threshold: Tensor, grid: list[int], prefix: int) -> tuple[Tensor, ...]:
    return unknown_rows(tokens, size, grid[0] * grid[1])


def _followed(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    size, prefix = inputs[1], inputs[4]
    head = torch.arange(prefix, device=size.device).expand(len(size), -1)
    return size, torch.cat([head, output[2]], 1)


register_gradient(g2tm, _followed)


# --- ONNX body -------------------------------------------------------------------------------------------------------


@body_of("g2tm")
def onnx_body(body: Body, attributes: Mapping[str, Any], tokens: Value, size: Value, threshold: Value) -> list[Value]:
    """G2TM in standard ops. Where several values reach one place the lowest stays, in any order."""
    grid, prefix = attributes["grid"], attributes["prefix"]
    count = grid[0] * grid[1]
    patches = body.fp32(body.rows(tokens, prefix, prefix + count))
    unit, pairs = unit_rows(body, patches, NORM_EPS), neighbours(grid)
    ends = (body("Gather", unit, pairs[:, end], axis=1) for end in (0, 1))
    similarity = body("ReduceSum", body("Mul", *ends), [2], keepdims=0)
    first = _onnx_groups(body, body("Greater", similarity, threshold), grid)
    leads = body("Equal", first, np.arange(count)[None])
    row = body("GatherElements", body("Sub", body.running_count(leads), 1), first, axis=1)

    length = body.count(leads)
    columns = body("Unsqueeze", body.indices(body("Reshape", body("ReduceMax", length), [1])), [1])
    member = body.fp32(body("Equal", columns, body("Unsqueeze", row, [1])))
    weight = body.rows(size, prefix, prefix + count)
    share = body("Mul", member, body("Unsqueeze", weight, [1]))
    total = body("ReduceSum", share, [2], keepdims=1)
    mean = body("Div", body.member_sums(share, patches), body("Where", body("Greater", total, 0.0), total, 1.0))
    return [
        body("Concat", body.rows(tokens, 0, prefix), body.like(mean, tokens), axis=1),
        body("Concat", body.rows(size, 0, prefix), body("Squeeze", total, [2]), axis=1),
        body("Add", row, prefix),
        body("Add", body("Squeeze", length, [1]), prefix),
    ]


def _onnx_groups(body: Body, linked: Value, grid: Sequence[int]) -> Value:
    """As `groups`."""
    count, pairs = grid[0] * grid[1], neighbours(grid)
    beside, link = (np.full((4, count), fill) for fill in (0, len(pairs)))
    number = np.arange(len(pairs))
    right = (pairs[:, 1] - pairs[:, 0] == 1) & (number < grid[0] * (grid[1] - 1))
    for side, (chosen, own) in enumerate([(right, 0), (right, 1), (~right, 0), (~right, 1)]):
        here = pairs[chosen, own]
        beside[side, here], link[side, here] = pairs[chosen, 1 - own], number[chosen]
    padded = body("Pad", body.int64(linked), [0, 0, 0, 1], 0)
    linked_to = body("Greater", body("Gather", padded, link, axis=1), 0)
    index = np.arange(count)[None]
    every = body("Concat", body.size_of(linked, 0), [count], axis=0)
    root, none = body("Expand", index, every), body("Expand", count, every)

    def least(values: Value) -> Value:
        return body("ScatterElements", none, root, values, axis=1, reduction="min")

    for doublings in _halved(count):
        other = body("Gather", root, beside, axis=1)
        differs = body("Not", body("Equal", other, body("Unsqueeze", root, [1])))
        reached = body("Where", body("And", linked_to, differs), other, count)
        lowest = least(body("ReduceMin", reached, [1], keepdims=0))
        root = body("Where", body("Less", lowest, count), lowest, root)
        mutual = body("Equal", body("GatherElements", root, root, axis=1), index)
        root = body("Where", body("And", mutual, body("Greater", root, index)), index, root)
        for _ in range(doublings):
            root = body("GatherElements", root, root, axis=1)
    return body("GatherElements", least(body("Expand", index, every)), root, axis=1)


# --- NumPy reference -------------------------------------------------------------------------------------------------


def reference_similarity(tokens: np.ndarray, grid: Sequence[int], prefix: int) -> np.ndarray:
    """Similarities (B, E) in fp64, rounded once to fp32."""
    x = tokens[:, prefix:].astype(np.float64)
    with np.errstate(invalid="ignore"):
        x = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), NORM_EPS)
        pairs = x[:, neighbours(grid)]
        cosine: np.ndarray = (pairs[:, :, 0] * pairs[:, :, 1]).sum(-1)
    return cosine.astype(np.float32)


def reference_groups(linked: np.ndarray, grid: Sequence[int]) -> np.ndarray:
    """The first patch (B, N) of every patch's group: neighbours hand the lower number on until nothing changes."""
    pairs = neighbours(grid)
    first = np.tile(np.arange(grid[0] * grid[1]), (len(linked), 1))
    for group, links in zip(first, linked, strict=True):
        changed = True
        while changed:
            before = group.copy()
            for a, b in pairs[links]:
                group[a] = group[b] = min(group[a], group[b])
            changed = not np.array_equal(before, group)
    return first


def reference_rows(linked: np.ndarray, grid: Sequence[int], prefix: int) -> np.ndarray:
    """Output row (B, P + N) of every input row."""
    firsts = reference_groups(linked, grid)
    rows = [np.searchsorted(np.unique(first), first) + prefix for first in firsts]
    return np.stack([np.concatenate([np.arange(prefix), row]) for row in rows])


def reference(
    tokens: np.ndarray, size: np.ndarray, threshold: float | np.ndarray, *, grid: Sequence[int], prefix: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """G2TM in plain NumPy; arguments and results as the torch operator."""
    linked = reference_similarity(tokens, grid, prefix) > np.float32(threshold)
    row = reference_rows(linked, grid, prefix)
    length = row.max(1) + 1
    values, sizes = merge_rows_reference(tokens, size, row, int(length.max()), weighted=True)
    return values, sizes, row[:, prefix:], length
