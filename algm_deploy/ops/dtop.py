"""DToP, tokens that leave early (Dynamic Token Pruning, ICCV 2023, section 3; zbwxp/Dynamic-Token-Pruning,
mmseg_custom/decode_heads/prune_head.py).

A token whose class an auxiliary head is sure of leaves, but for the surest ones of each class, which stay so that
others see them. What the head said of those that leave is kept elsewhere (`models/auxiliary.py`).

    dtop(tokens (B,S,D), map (B,N), length (B), confidence (B,S-P,K) fp32, threshold ())
        -> tokens (B,S',D), size (B,S') fp32, map (B,N), length (B)

Attributes: `prefix` P, rows that are handed on, `keep`, at least 1. A token is of the class with its highest
confidence, and sure where that is above the threshold; the `keep` surest of each class stay, and all that are not sure.
Output rows are [prefix | tokens that stay], in their order, padded as for GBM; a token stands for one patch. `map` is
composed: -1 for patches whose token has left, now or before. Ties go to the lower class and to the lower row; a
confidence that is NaN or infinite is none. Every image decides alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algm_deploy.ops._rows import unknown_rows
from algm_deploy.ops.bodies import END, Body, Value, body_of
from algm_deploy.ops.schema import operator

GONE = -1  # the row of a patch whose token has left

# --- torch -----------------------------------------------------------------------------------------------------------


def dtop_stays(confidence: Tensor, threshold: Tensor, length: Tensor, prefix: int, keep: int) -> Tensor:
    """Which rows (B, R) behind the prefix stay, given their confidence (B, R, K)."""
    best, label = torch.where(confidence < torch.inf, confidence, -torch.inf).max(2)
    valid = torch.arange(best.shape[1], device=best.device) < (length - prefix)[:, None]
    sure = valid & (best > threshold)
    # In order of class, the surest first: a token leaves where the one `keep` places before it is of its class too.
    surest = torch.where(sure, best, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    others = confidence.shape[2]
    kind = torch.where(sure, label, others).gather(1, surest).sort(dim=1, stable=True)
    before = F.pad(kind.values, (keep, 0), value=-1)[:, : kind.values.shape[1]]
    leaves = (kind.values == before) & (kind.values < others)
    order = surest.gather(1, kind.indices)
    return valid & ~leaves.gather(1, order.argsort(dim=1))


def dtop_rows(
    tokens: Tensor, map: Tensor, stays: Tensor, prefix: int, rows_out: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, size, map and length where it is known which rows (B, R) stay.

    `rows_out`: S', where the host is not to wait for the most that stay in an image.
    """
    kept = F.pad(stays, (prefix, 0), value=True)
    length = kept.sum(1)
    rows_out = int(length.max()) if rows_out is None else rows_out
    row = torch.where(kept, kept.cumsum(1) - 1, GONE)
    source = (~kept).sort(dim=1, stable=True).indices[:, :rows_out]
    there = torch.arange(rows_out, device=row.device) < length[:, None]
    picked = tokens.gather(1, source[:, :, None].expand(-1, -1, tokens.shape[2]))
    composed = torch.where(map < 0, GONE, row.gather(1, map.clamp(min=0)))
    return torch.where(there[..., None], picked, 0), there.float(), composed, length


@operator("tokens:T map:i64 length:i64 confidence:f32 threshold:f32", "tokens:T size:f32 map:i64 length:i64")
def dtop(
    tokens: Tensor, map: Tensor, length: Tensor, confidence: Tensor, threshold: Tensor, prefix: int, keep: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dynamic token pruning: tokens of a sure class leave, but for the surest of each class."""
    return dtop_rows(tokens, map, dtop_stays(confidence, threshold, length, prefix, keep), prefix)


@dtop.register_fake
def _(
    tokens: Tensor, map: Tensor, length: Tensor, confidence: Tensor, threshold: Tensor, prefix: int, keep: int
) -> tuple[Tensor, ...]:
    return unknown_rows(tokens, confidence, map.shape[1])


# --- ONNX body -------------------------------------------------------------------------------------------------------


@body_of("dtop")
def onnx_body(
    body: Body,
    attributes: Mapping[str, Any],
    tokens: Value,
    map: Value,
    length: Value,
    confidence: Value,
    threshold: Value,
) -> list[Value]:
    """DToP in standard ops."""
    prefix, keep = attributes["prefix"], attributes["keep"]
    clean = body("Where", body("Less", confidence, np.inf), confidence, -np.inf)
    best, label = body("ReduceMax", clean, [2], keepdims=0), body("ArgMax", clean, axis=2, keepdims=0)
    count, others = body.size_of(best, 1), body.size_of(confidence, 2)
    valid = body("Less", body.indices(count), body("Unsqueeze", body("Sub", length, prefix), [1]))
    sure = body("And", valid, body("Greater", best, threshold))
    _, surest = body.several(2, "TopK", body("Where", sure, best, -np.inf), count, axis=1)
    # The surest first, a token leaves where `keep` of its class were before it.
    kind = body("GatherElements", body("Where", sure, label, others), surest, axis=1)
    member = body("Equal", body("Unsqueeze", kind, [2]), body.indices(others))
    beyond = body("And", member, body("Greater", body.running_count(member), keep))
    leaves = body("Greater", body("ReduceSum", body.int64(beyond), [2], keepdims=0), 0)
    stays = body("And", valid, body("Not", body("GatherElements", leaves, body.inverse(surest), axis=1)))

    place, left = body("Sub", body.running_count(stays), 1), body.count(stays)
    values, size = body.select(place, stays, left, body.rows(tokens, prefix, END), body.fp32(stays))
    row = body("Where", stays, body("Add", place, prefix), GONE)
    composed = body("GatherElements", row, body("Max", body("Sub", map, prefix), 0), axis=1)
    head = body("Expand", body.number(1.0), body("Concat", body.size_of(map, 0), [prefix], axis=0))
    return [
        body("Concat", body.rows(tokens, 0, prefix), values, axis=1),
        body("Concat", head, size, axis=1),
        body("Where", body("Less", map, 0), GONE, composed),
        body("Add", body("Squeeze", left, [1]), prefix),
    ]


# --- NumPy reference -------------------------------------------------------------------------------------------------


def reference_stays(
    confidence: np.ndarray, threshold: float | np.ndarray, length: np.ndarray, prefix: int, keep: int
) -> np.ndarray:
    """As `dtop_stays`: looks for the surest of one class after the other."""
    clean = np.where(confidence < np.inf, confidence, -np.inf)
    best, label = clean.max(2), clean.argmax(2)
    stays = np.arange(best.shape[1]) < (length - prefix)[:, None]
    for image, sure, kinds in zip(stays, best, label, strict=True):
        for kind in np.unique(kinds):
            members = [i for i in np.flatnonzero(image) if kinds[i] == kind and sure[i] > np.float32(threshold)]
            image[sorted(members, key=lambda i: (-sure[i], i))[keep:]] = False
    return stays


def reference_rows(map: np.ndarray, stays: np.ndarray, prefix: int) -> np.ndarray:
    """The composed map (B, N), image by image."""
    composed = np.full_like(map, GONE)
    for found, given, kept in zip(composed, map, stays, strict=True):
        rows = [*range(prefix), *(prefix + np.flatnonzero(kept))]
        for patch, row in enumerate(given):
            if row in rows:
                found[patch] = rows.index(row)
    return composed


def reference(
    tokens: np.ndarray,
    map: np.ndarray,
    length: np.ndarray,
    confidence: np.ndarray,
    threshold: float | np.ndarray,
    *,
    prefix: int,
    keep: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """DToP in plain NumPy; arguments and results as the torch operator."""
    stays = reference_stays(confidence, threshold, length, prefix, keep)
    length_out = prefix + stays.sum(1)
    values = np.zeros((len(tokens), length_out.max(), tokens.shape[2]), tokens.dtype)
    size = np.zeros(values.shape[:2], np.float32)
    for out, ones, rows, kept in zip(values, size, tokens, stays, strict=True):
        left = np.concatenate([rows[:prefix], rows[prefix:][kept]])
        out[: len(left)], ones[: len(left)] = left, 1
    return values, size, reference_rows(map, stays, prefix), length_out
