"""MPM, pairs of mutually most similar tokens (Mutual Pair Merging, arXiv 2604.05718; no code was published).

Every patch token looks for the other one with the highest cosine similarity; two that find each other become one.

    mpm(tokens (B,S,D), size (B,S), map (B,N), length (B)) -> tokens (B,S',D), size (B,S'), map (B,N), length (B)

Attribute: `prefix` P. Dtypes, padding and `length` as for GBM. Every image merges alone. Output rows are [prefix |
tokens in their order, a pair at the place of its first]; a pair becomes the plain mean of its two tokens, however many
patches they stand for; `map` is composed. Ties go to the lower row, and a similarity that is NaN never wins.

The paper leaves the tie rule and pictures of different lengths open; both are as for GBM here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algm_deploy.ops._rows import (
    NORM_EPS,
    merge_rows_reference,
    product,
    register_gradient,
    row_of,
    sum_rows,
    unknown_rows,
    wide,
)
from algm_deploy.ops.bodies import END, Body, Value, body_of, unit_rows
from algm_deploy.ops.schema import operator

# --- torch -----------------------------------------------------------------------------------------------------------


def mpm_similarity(tokens: Tensor, length: Tensor, prefix: int) -> Tensor:
    """Cosines (B, R, R), at least fp32, of the R rows behind the prefix; -inf with itself and with none that exists."""
    x = wide(tokens)[:, prefix:]
    unit = x / x.norm(dim=-1, keepdim=True).clamp(min=NORM_EPS)
    scores = product(unit, unit.mT)
    index = torch.arange(x.shape[1], device=x.device)
    allowed = (index < (length - prefix)[:, None])[:, None] & (index != index[:, None])
    return torch.where(allowed & (scores < torch.inf), scores, -torch.inf)  # which NaN is not


def mpm_pairs(scores: Tensor, length: Tensor, prefix: int) -> Tensor:
    """Of every row (B, R) the one that it merges with: itself where there is none."""
    best, match = scores.max(2)
    index = torch.arange(scores.shape[1], device=scores.device)
    paired = (match.gather(1, match) == index) & (best > -torch.inf) & (index < (length - prefix)[:, None])
    return torch.where(paired, match, index)


def mpm_rows(partner: Tensor, length: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Output row (B, S) of every input row, -1 behind `length`, and valid rows (B) of every image."""
    index = torch.arange(partner.shape[1], device=partner.device)
    valid = index < (length - prefix)[:, None]
    stays = valid & (partner >= index)
    row = torch.where(valid, (prefix - 1 + stays.cumsum(1)).gather(1, partner.minimum(index)), -1)
    head = torch.arange(prefix, device=row.device).expand(len(row), -1)
    return torch.cat([head, row], 1), prefix + stays.sum(1)


@operator("tokens:T size:f32 map:i64 length:i64", "tokens:T size:f32 map:i64 length:i64")
def mpm(
    tokens: Tensor, size: Tensor, map: Tensor, length: Tensor, prefix: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mutual pair merging: two tokens that are most similar to each other become one."""
    partner = mpm_pairs(mpm_similarity(tokens, length, prefix), length, prefix)
    row, length_out = mpm_rows(partner, length, prefix)
    rows_out = int(length_out.max())
    x, index = wide(tokens), torch.arange(tokens.shape[1], device=tokens.device)
    other = torch.cat([index[:prefix].expand(len(row), -1), prefix + partner], 1)
    # What a row becomes is where its first member was; rows that are no first member land behind all others.
    first = torch.where((other >= index) & (row >= 0), row, rows_out)
    source = row.new_zeros(len(row), rows_out + 1).scatter(1, first, index.expand_as(row))[:, :rows_out]
    pair = (source[..., None].expand(-1, -1, x.shape[2]), other.gather(1, source)[..., None].expand(-1, -1, x.shape[2]))
    mean = (x.gather(1, pair[0]) + x.gather(1, pair[1])) / 2
    there = torch.arange(rows_out, device=row.device) < length_out[:, None]
    values = torch.where(there[..., None], mean, 0).to(tokens.dtype)
    return values, sum_rows(size, row, rows_out), row.gather(1, map), length_out


@mpm.register_fake
def _(tokens: Tensor, size: Tensor, map: Tensor, length: Tensor, prefix: int) -> tuple[Tensor, ...]:
    return unknown_rows(tokens, size, map.shape[1])


def _followed(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    _, size, map_in, _, prefix = inputs
    return torch.ones_like(size), row_of(map_in, output[2], size.shape[1], prefix)


register_gradient(mpm, _followed)


# --- ONNX body -------------------------------------------------------------------------------------------------------


@body_of("mpm")
def onnx_body(
    body: Body, attributes: Mapping[str, Any], tokens: Value, size: Value, map: Value, length: Value
) -> list[Value]:
    """MPM in standard ops."""
    prefix = attributes["prefix"]
    x = body.fp32(body.rows(tokens, prefix, END))
    index = body.indices(body.size_of(x, 1))
    valid = body("Less", index, body("Unsqueeze", body("Sub", length, prefix), [1]))
    unit = unit_rows(body, x, NORM_EPS)
    scores = body("MatMul", unit, body("Transpose", unit, perm=[0, 2, 1]))
    apart = body("Not", body("Equal", index, body("Unsqueeze", index, [1])))
    allowed = body("And", body("Unsqueeze", valid, [1]), apart)
    scores = body("Where", body("And", allowed, body("Less", scores, np.inf)), scores, -np.inf)
    match = body("ArgMax", scores, axis=2, keepdims=0)
    found = body("Greater", body("ReduceMax", scores, [2], keepdims=0), -np.inf)
    mutual = body("Equal", body("GatherElements", match, match, axis=1), index)
    paired = body("And", body("And", mutual, found), valid)
    partner = body("Where", paired, match, index)
    stays = body("And", valid, body("GreaterOrEqual", partner, index))
    place = body("Sub", body.running_count(stays), 1)
    row = body("GatherElements", place, body("Min", partner, index), axis=1)

    weight, count = body.rows(size, prefix, END), body.count(stays)
    mean = body("Div", body("Add", x, body.take_rows(x, partner)), 2.0)
    joined = body("Where", paired, body("GatherElements", weight, partner, axis=1), 0.0)
    values, sizes = body.select(place, stays, count, mean, body("Add", weight, joined))
    return [
        body("Concat", body.rows(tokens, 0, prefix), body.like(values, tokens), axis=1),
        body("Concat", body.rows(size, 0, prefix), sizes, axis=1),
        body("Add", body("GatherElements", row, body("Sub", map, prefix), axis=1), prefix),
        body("Add", body("Squeeze", count, [1]), prefix),
    ]


# --- NumPy reference -------------------------------------------------------------------------------------------------


def reference_similarity(tokens: np.ndarray, length: np.ndarray, prefix: int) -> np.ndarray:
    """As `mpm_similarity`, in fp64 and rounded once to fp32."""
    x = tokens[:, prefix:].astype(np.float64)
    with np.errstate(invalid="ignore"):
        x = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), NORM_EPS)
        scores: np.ndarray = np.nan_to_num(x @ x.transpose(0, 2, 1), nan=-np.inf, posinf=-np.inf).astype(np.float32)
    for image, valid in zip(scores, length - prefix, strict=True):
        image[:, max(valid, 0) :] = -np.inf
        np.fill_diagonal(image, -np.inf)
    return scores


def reference_pairs(scores: np.ndarray, length: np.ndarray, prefix: int) -> np.ndarray:
    """As `mpm_pairs`: looks at one row after the other."""
    partner = np.tile(np.arange(scores.shape[1]), (len(scores), 1))
    for image, valid, found in zip(scores, length - prefix, partner, strict=True):
        for i in range(max(valid, 0)):
            j = int(image[i].argmax())
            if image[i, j] > -np.inf and image[j].argmax() == i:
                found[i] = j
    return partner


def reference_rows(partner: np.ndarray, length: np.ndarray, prefix: int) -> np.ndarray:
    """Output row (B, S) of every input row, -1 behind `length`."""
    row = np.full((len(partner), prefix + partner.shape[1]), -1)
    row[:, :prefix] = np.arange(prefix)
    for out, other, valid in zip(row, partner, length - prefix, strict=True):
        following = prefix
        for i in range(max(valid, 0)):
            if other[i] < i:
                out[prefix + i] = out[prefix + other[i]]
            else:
                out[prefix + i], following = following, following + 1
    return row


def reference(
    tokens: np.ndarray, size: np.ndarray, map: np.ndarray, length: np.ndarray, *, prefix: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """MPM in plain NumPy; arguments and results as the torch operator."""
    partner = reference_pairs(reference_similarity(tokens, length, prefix), length, prefix)
    row = reference_rows(partner, length, prefix)
    length_out = np.maximum(row.max(1) + 1, prefix)
    values, sizes = merge_rows_reference(tokens, size, row, int(length_out.max()), weighted=False)
    return values, sizes, np.take_along_axis(row, map, 1), length_out
