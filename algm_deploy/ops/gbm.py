"""GBM, global bipartite merging (ALGM, CVPR 2024, section 3.3).

The sequence is split into alternating rows A and B; every A row looks for its most similar B row and joins it when
similar enough.

    gbm(tokens (B,S,D), size (B,S), map (B,N), length (B), threshold ()?)
        -> tokens (B,S'',D), size (B,S''), map (B,N), length (B)

Attributes: `prefix` P, `rule`, `divisor`, `semantics`, `batch`, `budget`. Dtypes and means as for CLAP. Rows at and
behind `length`, any int64, do not exist, those of the prefix apart. Output rows are [prefix | A rows that stay,
ascending | all B rows, ascending | zero padding of size 0]; `map` is composed: for every patch its row in the new
sequence.

rule       `adaptive`: a row joins at similarity >= mean + threshold * std / divisor, mean and unbiased standard
           deviation over the best similarities of the image's A rows; the published code sets threshold 1 and divisor
           to the 1-based layer. `fixed`: threshold itself is the similarity to reach. `budget`: the `budget` most
           similar A rows of every image join, or all where there are no more. Then there is no threshold, every row has
           to exist, S'' is known beforehand, all images have as many rows, and `batch` changes nothing.
semantics  `code`: A are the even rows of the sequence, prefix counted, `>=`, size-weighted mean. `paper`: A and B
           alternate behind the prefix, `>`, plain mean. Prefix rows never merge and are never joined.
batch      `per_image`: each image decides alone. `batch_min`: mean and deviation are averaged over the batch, and all
           images merge as many rows as the image with the fewest, each its most similar ones.
Statistics are fp64, the threshold is rounded to fp32 once. With fewer than two A rows the deviation is undefined and
nothing merges. Ties go to the lower row, and a similarity that is NaN never wins: a row that has no other stays by a
threshold, and by a budget comes last, to join the first B row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from algm_deploy.errors import ExportError
from algm_deploy.ops._rows import (
    NORM_EPS,
    best_ranks,
    existing_rows,
    known_rows,
    merge_rows,
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

WORST = float(np.finfo(np.float32).min)
"""Less than any cosine, more than none."""


def first_source(semantics: str, prefix: int) -> int:
    """The first row of A: row 0 in the published code, the first patch token in the paper."""
    return prefix if semantics == "paper" else 0


def most_joins(rows: int, prefix: int, semantics: str) -> int:
    """A rows that may merge, of a sequence of `rows` rows; none where there is no B row to join."""
    first = first_source(semantics, prefix)
    sources, targets = (len(range(prefix + (prefix - start) % 2, rows, 2)) for start in (first, first + 1))
    return sources if targets else 0


def undefined(rule: str) -> float:
    """What stands for a cosine that is NaN: no row may be left over where so many have to merge."""
    return WORST if rule == "budget" else -np.inf


def row_weights(size: Tensor, semantics: str) -> Tensor:
    """How much each row (B, S) counts in a mean: its size in the published code, all the same in the paper."""
    return torch.ones_like(size) if semantics == "paper" else size


# --- torch -----------------------------------------------------------------------------------------------------------


def gbm_scores(
    tokens: Tensor, length: Tensor, prefix: int, semantics: str, undefined: float = -np.inf
) -> tuple[Tensor, Tensor]:
    """Cosines (B, |A|, |B|) fp32 of A and B rows, -inf for B that may not be joined; which A may merge.

    `undefined` stands for a cosine that is NaN: -inf, so that it is none, or `WORST`.
    """
    first = first_source(semantics, prefix)
    x = wide(tokens)
    norm = x.norm(dim=-1, keepdim=True).clamp(min=NORM_EPS)
    if x is tokens:
        x, norm = x / norm, torch.ones_like(norm)
    rows = torch.arange(tokens.shape[1], device=tokens.device)
    allowed = (rows >= prefix) & (rows < length[:, None])
    # 16-bit values are multiplied as they are, as tensor cores would, and scaled afterwards.
    scores = product(x[:, first::2], x[:, first + 1 :: 2].mT) / norm[:, first::2] / norm[:, first + 1 :: 2].mT
    scores = torch.where(scores < torch.inf, scores.float(), undefined)  # which NaN is not
    return torch.where(allowed[:, None, first + 1 :: 2], scores, -torch.inf), allowed[:, first::2]


def gbm_similarity(
    tokens: Tensor, length: Tensor, prefix: int, semantics: str, undefined: float = -np.inf
) -> tuple[Tensor, Tensor]:
    """Best similarity (B, |A|) fp32 of every A row over the allowed B rows, and the index in B that has it.

    A rows that may not merge, and all A rows of an image without an allowed B row, have similarity -inf.
    """
    scores, sources = gbm_scores(tokens, length, prefix, semantics, undefined)
    if scores.shape[2] == 0:
        return scores.new_full(scores.shape[:2], -torch.inf), length.new_zeros(scores.shape[:2])
    best, match = scores.max(dim=2)
    return torch.where(sources, best, -torch.inf), match


def gbm_threshold(best: Tensor, threshold: Tensor, rule: str, divisor: float, batch: str) -> Tensor:
    """The similarity to reach (B, 1) fp32; NaN where the deviation of fewer than two rows is undefined."""
    if rule == "fixed":
        return threshold.float().expand(len(best), 1)
    counted = best > -torch.inf
    count = counted.sum(1, keepdim=True)
    value = torch.where(counted, best, 0).double()
    mean = value.sum(1, keepdim=True) / count
    # 0 / 0 for a single row; without any row the mean is already undefined.
    deviation = ((torch.where(counted, value - mean, 0) ** 2).sum(1, keepdim=True) / (count - 1)).sqrt()
    if batch == "batch_min":
        mean, deviation = mean.mean(0, keepdim=True), deviation.mean(0, keepdim=True)
    return (mean + threshold.double() * deviation / divisor).float().expand(len(best), 1)


def gbm_decisions(
    best: Tensor, threshold: Tensor | None, rule: str, divisor: float, semantics: str, batch: str, budget: int = 0
) -> Tensor:
    """Which A rows merge: (B, |A|) bool."""
    if rule == "budget":
        return best_ranks(best) < budget
    assert threshold is not None
    limit = gbm_threshold(best, threshold, rule, divisor, batch)
    reached = best > limit if semantics == "paper" else best >= limit
    merged = reached & (best > -torch.inf)
    if batch == "batch_min":
        merged = best_ranks(torch.where(merged, best, -torch.inf)) < merged.sum(1).amin()
    return merged


def gbm_rows(
    merged: Tensor, match: Tensor, length: Tensor, rows_in: int, prefix: int, semantics: str
) -> tuple[Tensor, Tensor]:
    """Output row (B, S) of every input row, -1 behind `length`, and valid rows (B) of every image."""
    first = first_source(semantics, prefix)
    rows = torch.arange(rows_in, device=match.device).expand(len(match), -1)
    valid = rows < length[:, None]
    joins = torch.zeros_like(valid)
    joins[:, first::2] = merged
    is_source = (rows >= prefix) & ((rows - first) % 2 == 0) & valid
    stays, is_target = is_source & ~joins, (rows >= prefix) & ~is_source & valid
    stay_count = stays.sum(1, keepdim=True)
    row = torch.where(stays, prefix + stays.cumsum(1) - 1, prefix + stay_count + is_target.cumsum(1) - 1)
    row = torch.where(valid, torch.where(rows < prefix, rows, row), -1)
    target = (first + 1 + 2 * match).clamp(max=rows_in - 1)
    row[:, first::2] = torch.where(merged, row.gather(1, target), row[:, first::2])
    return row, length - merged.sum(1)


@operator("tokens:T size:f32 map:i64 length:i64 threshold?:f32", "tokens:T size:f32 map:i64 length:i64")
def gbm(
    tokens: Tensor,
    size: Tensor,
    map: Tensor,
    length: Tensor,
    threshold: Tensor | None,
    prefix: int,
    rule: str,
    divisor: float,
    semantics: str,
    batch: str,
    budget: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Global bipartite merging: tokens join the most similar token of the other half."""
    length = existing_rows(length, tokens.shape[1], prefix)
    best, match = gbm_similarity(tokens, length, prefix, semantics, undefined(rule))
    most = most_joins(tokens.shape[1], prefix, semantics)
    merged = gbm_decisions(best, threshold, rule, divisor, semantics, batch, min(budget, most))
    row, length_out = gbm_rows(merged, match, length, tokens.shape[1], prefix, semantics)
    rows_out = tokens.shape[1] - min(budget, most) if rule == "budget" else int(length_out.max())
    weight = row_weights(size, semantics)
    return merge_rows(tokens, weight, row, rows_out), sum_rows(size, row, rows_out), row.gather(1, map), length_out


@gbm.register_fake
def _(
    tokens: Tensor, size: Tensor, map: Tensor, length: Tensor, threshold: Tensor | None, prefix: int, *rest: Any
) -> tuple[Tensor, ...]:
    rule, _, semantics, _, budget = rest
    if rule == "budget":
        rows = tokens.shape[1]
        return known_rows(tokens, size, map.shape[1], rows - min(budget, most_joins(rows, prefix, semantics)))
    return unknown_rows(tokens, size, map.shape[1])


def _followed(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    _, size, map_in, _, _, prefix, _, _, semantics, _, _ = inputs
    return row_weights(size, semantics), row_of(map_in, output[2], size.shape[1], prefix)


register_gradient(gbm, _followed)


# --- ONNX body ------------------------------------------------------------------------------------------------------


def onnx_similarity(
    body: Body, tokens: Value, allowed: Value, first: int, undefined: float = -np.inf
) -> tuple[Value, Value]:
    """Best similarity (B, |A|) of every A row, -inf where it may not merge, and its match in B."""
    unit = unit_rows(body, tokens, NORM_EPS)
    source, target = (body.rows(unit, start, END, 2) for start in (first, first + 1))
    # Along its columns a processor finds the largest of many rows at a time.
    over, (left, right) = (1, (target, source)) if body.processor else (2, (source, target))
    scores = body("MatMul", left, body("Transpose", right, perm=[0, 2, 1]))
    allowed_target = body("Unsqueeze", body.rows(allowed, first + 1, END, 2), [3 - over])
    scores = body("Where", body("Less", scores, np.inf), scores, undefined)  # which NaN is not
    # One more, so that the maximum of an empty B exists.
    pads = [0, 0, 0, 0, 2 - over, over - 1]
    scores = body("Pad", body("Where", allowed_target, scores, -np.inf), pads, -np.inf)
    best = body("ReduceMax", scores, [over], keepdims=0)
    allowed_source = body.rows(allowed, first, END, 2)
    return body("Where", allowed_source, best, -np.inf), body("ArgMax", scores, axis=over, keepdims=0)


def _onnx_threshold(body: Body, best: Value, threshold: Value, attributes: Mapping[str, Any]) -> Value:
    """The similarity to reach, (B, 1) or a scalar, fp32; statistics in fp64."""
    if attributes["rule"] == "fixed":
        return threshold
    counted = body("Greater", best, -np.inf)
    count = body("Cast", body.count(counted), to=ir.DataType.DOUBLE)
    value = body("Cast", body("Where", counted, best, 0.0), to=ir.DataType.DOUBLE)
    mean = body("Div", body("ReduceSum", value, [1], keepdims=1), count)
    centred = body("Where", counted, body("Sub", value, mean), np.asarray(0.0))
    square = body("ReduceSum", body("Mul", centred, centred), [1], keepdims=1)
    deviation = body("Sqrt", body("Div", square, body("Sub", count, np.asarray(1.0))))
    if attributes["batch"] == "batch_min":
        mean, deviation = (body("ReduceMean", x, [0], keepdims=1) for x in (mean, deviation))
    scale = body("Div", body("Cast", threshold, to=ir.DataType.DOUBLE), np.asarray(float(attributes["divisor"])))
    return body.fp32(body("Add", mean, body("Mul", scale, deviation)))


def _onnx_decisions(
    body: Body, best: Value, threshold: Value | None, attributes: Mapping[str, Any], most: int = 0
) -> Value:
    """Which A rows merge: (B, |A|) bool; by the rule `budget` the `most` best."""
    if attributes["rule"] == "budget":
        return body("GreaterOrEqual", body.best(best, most), 0)
    assert threshold is not None
    limit = _onnx_threshold(body, best, threshold, attributes)
    reached = body("Greater" if attributes["semantics"] == "paper" else "GreaterOrEqual", best, limit)
    merged = body("And", reached, body("Greater", best, -np.inf))
    if attributes["batch"] == "batch_min":
        rank = body.rank(body("Where", merged, best, -np.inf))
        merged = body("Less", rank, body("ReduceMin", body.count(merged), keepdims=1))
    return merged


def _onnx_rows(
    body: Body, merged: Value, match: Value, valid: Value, prefix: int, first: int, place: Value | None = None
) -> tuple[Value, Value]:
    """Output row (B, S) of every input row (meaningless where invalid), and the flags of rows that join another."""
    count = body.extent(valid, 1)
    sources = len(range(first, count, 2)) if isinstance(count, int) else body.size_of(merged, 1)
    rows = body.indices(count)
    offset = body("Sub", rows, first)
    # Row of A an input row would be; rows that are none pick any and are masked.
    in_source = body("Div", body("Max", offset, 0), 2)
    in_source = body("Min", in_source, body("Sub", sources, 1))
    patch = body("GreaterOrEqual", rows, prefix)
    is_source = body("And", patch, body("Equal", body("Mod", offset, 2), 0))
    joins = body("And", body("Gather", merged, in_source, axis=1), is_source)
    stays = body("And", body("And", valid, is_source), body("Not", joins))
    targets = body("And", body("And", valid, patch), body("Not", is_source))
    if place is None:
        stay_row = body("Add", body.running_count(stays), prefix - 1)
    else:
        stay_row = body("Gather", place, in_source, axis=1)
    target_row = body("Add", body("Add", body.count(stays), body.running_count(targets)), prefix - 1)
    row = body("Where", patch, body("Where", is_source, stay_row, target_row), rows)
    target = body("Add", body("Mul", body("Gather", match, in_source, axis=1), 2), first + 1)
    target = body("Min", target, body("Sub", count, 1))
    return body("Where", joins, body("GatherElements", row, target, axis=1), row), joins


class _Half(NamedTuple):
    """Rows (B, R, D) fp32 of A or B, and their sizes (B, R)."""

    values: Value
    sizes: Value


def _wide(body: Body, x: Value) -> Value:
    return body("Unsqueeze", x, [2])


def _onnx_means(
    body: Body, tokens: Value, size: Value, merged: Value, match: Value, attributes: Mapping[str, Any]
) -> tuple[Value, Value]:
    """Values (B, S, D) and sizes (B, S) of the candidates [rows before A | A | B joined by its A rows]."""
    first = first_source(attributes["semantics"], attributes["prefix"])
    source, target = (body.fp32(body.rows(tokens, start, END, 2)) for start in (first, first + 1))
    source_size, target_size = (body.rows(size, start, END, 2) for start in (first, first + 1))
    count = body.extent(tokens, 1)
    targets = len(range(first + 1, count, 2)) if isinstance(count, int) else None
    joined = _onnx_joined_by_scattering if body.processor else _onnx_joined_by_product
    halves = _Half(source, source_size), _Half(target, target_size)
    own = joined(body, *halves, merged, match, attributes["semantics"], targets)
    values, sizes = [body.like(source, tokens), body.like(own.values, tokens)], [source_size, own.sizes]
    if first:
        values, sizes = [body.rows(tokens, 0, first), *values], [body.rows(size, 0, first), *sizes]
    return body("Concat", *values, axis=1), body("Concat", *sizes, axis=1)


def _onnx_joined_by_product(
    body: Body, source: _Half, target: _Half, merged: Value, match: Value, semantics: str, targets: int | None
) -> _Half:
    """B joined by its A rows, in one product with a 0/1 matrix; `targets` is |B| where it is known."""
    columns = body.indices(targets if targets is not None else body.size_of(target.values, 1))
    joined = body("Equal", body("Unsqueeze", columns, [1]), body("Unsqueeze", match, [1]))
    joined = body.fp32(body("And", joined, body("Unsqueeze", merged, [1])))
    new_size = body("Add", _wide(body, target.sizes), body("MatMul", joined, _wide(body, source.sizes)))
    if semantics == "paper":
        share, own = joined, target.values
        total = body("Add", body("ReduceSum", joined, [2], keepdims=1), 1.0)
    else:
        share = body("Mul", joined, body("Unsqueeze", source.sizes, [1]))
        own, total = body("Mul", target.values, _wide(body, target.sizes)), body("Max", new_size, 1.0)
    mean = body("Div", body("Add", own, body.member_sums(share, source.values)), total)
    return _Half(mean, body("Squeeze", new_size, [2]))


def _onnx_joined_by_scattering(
    body: Body, source: _Half, target: _Half, merged: Value, match: Value, semantics: str, targets: int | None
) -> _Half:
    """The same with every A row that merges added to its row of B, which is no work for rows that do not."""

    def added(own: Value, joining: Value, rank: int) -> Value:
        if targets:
            return body.added_rows(own, match, joining)
        padded = body("Pad", own, [0] * (rank + 1) + [1] + [0] * (rank - 2), 0.0)  # a row to add to, if B has none
        return body.rows(body.added_rows(padded, match, joining), 0, -1)

    new_size = added(target.sizes, body("Where", merged, source.sizes, 0.0), 2)
    if semantics == "paper":
        values, own = source.values, target.values
        ones = body("Expand", 1.0, body("Shape", target.sizes))
        total = added(ones, body.fp32(merged), 2)
    else:
        values, own = (body("Mul", half.values, _wide(body, half.sizes)) for half in (source, target))
        total = body("Max", new_size, 1.0)
    sums = added(own, body("Where", _wide(body, merged), values, 0.0), 3)
    return _Half(body("Div", sums, _wide(body, total)), new_size)


@body_of("gbm")
def onnx_body(
    body: Body,
    attributes: Mapping[str, Any],
    tokens: Value,
    size: Value,
    map: Value,
    length: Value,
    threshold: Value | None = None,
) -> list[Value]:
    """GBM in standard ops. By the rule `budget` the number of rows has to be known: a shape of `tokens`."""
    prefix, semantics = attributes["prefix"], attributes["semantics"]
    count = body.extent(tokens, 1)
    rows, merges = body.indices(count), None
    if attributes["rule"] == "budget":
        if not isinstance(count, int):
            raise ExportError("expected a known number of rows for a budget of GBM: give CLAP one too")
        merges = min(attributes["budget"], most_joins(count, prefix, semantics))
        valid: Value = body.value(np.ones((1, count), bool))  # type: ignore[assignment]
    else:
        valid = body("Less", rows, body("Unsqueeze", body("Max", length, prefix), [1]))
    allowed = body("And", valid, body("GreaterOrEqual", rows, prefix))
    first = first_source(semantics, prefix)
    best, match = onnx_similarity(body, tokens, allowed, first, undefined(attributes["rule"]))
    merged = _onnx_decisions(body, best, threshold, attributes, merges or 0)
    return onnx_joined(body, (tokens, size, map), valid, merged, match, attributes, merges=merges)


def onnx_joined(
    body: Body,
    inputs: tuple[Value, Value, Value],
    valid: Value,
    merged: Value,
    match: Value,
    attributes: Mapping[str, Any],
    place: Value | None = None,
    merges: int | None = None,
) -> list[Value]:
    """Tokens, size, map and length behind a bipartite merge. The joins are one product with a 0/1 matrix, so nothing is
    scattered by addition, but where the runtime does that in a fixed order.

    Args:
        inputs: tokens, size and map.
        valid: (B, S) bool, rows that exist.
        merged, match: (B, |A|), which A rows merge, and into which of B.
        attributes: `prefix` and `semantics`.
        place: (B, |A|) int64, order of the A rows that stay where it is not that of the sequence; for no prefix.
        merges: how many A rows merge in every image, where that and the number of rows are known.
    """
    tokens, size, map = inputs
    prefix, first = attributes["prefix"], first_source(attributes["semantics"], attributes["prefix"])
    count = body.extent(tokens, 1)
    row, joins = _onnx_rows(body, merged, match, valid, prefix, first, place)
    values, sizes = _onnx_means(body, tokens, size, merged, match, attributes)

    def reordered(x: Value) -> Value:
        """From the order of the sequence to that of the candidates."""
        halves = [body.rows(x, start, END, 2) for start in (first, first + 1)]
        return body("Concat", *([body.rows(x, 0, first)] if first else []), *halves, axis=1)

    kept = body("And", valid, body("Not", joins))
    known = (count - merges, count) if isinstance(count, int) and merges is not None else None
    length_out = body.count(kept) if known is None else body.filled(tokens, known[0])
    out = body.select(reordered(row), reordered(kept), length_out, values, sizes, known=known)
    return [*out, body("GatherElements", row, map, axis=1), body("Squeeze", length_out, [1])]


# --- NumPy reference -------------------------------------------------------------------------------------------------


def reference_split(rows: int, length: int, prefix: int, semantics: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows that may merge (A) and rows that may be joined (B) in a sequence of `length` valid rows."""
    first = first_source(semantics, prefix)
    valid = np.arange(prefix, min(rows, length))
    return valid[(valid - first) % 2 == 0], valid[(valid - first) % 2 == 1]


def reference_similarity(
    tokens: np.ndarray, length: np.ndarray, prefix: int, semantics: str, undefined: float = -np.inf
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For every image: best similarity of its A rows (fp64 sums rounded to fp32), and the row of B that has it."""
    best, match = [], []
    for b, x in enumerate(tokens.astype(np.float64)):
        sources, targets = reference_split(len(x), int(length[b]), prefix, semantics)
        with np.errstate(invalid="ignore"):
            x = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), NORM_EPS)
            scores = (x[sources] @ x[targets].T).astype(np.float32)
        scores = np.where(np.isnan(scores), np.float32(undefined), scores)
        if len(targets) == 0:
            best.append(np.full(len(sources), -np.inf, dtype=np.float32))
            match.append(np.zeros(len(sources), dtype=np.int64))
        else:
            best.append(scores.max(1, initial=-np.inf))
            match.append(targets[scores.argmax(1)])
    return best, match


def reference_decisions(
    best: list[np.ndarray],
    threshold: float | None,
    rule: str,
    divisor: float,
    semantics: str,
    batch: str,
    budget: int = 0,
) -> list[np.ndarray]:
    """For every image: which of its A rows merge (bool)."""
    if rule == "budget":
        return reference_most_similar(best, budget)

    def statistics(values: np.ndarray) -> tuple[float, float]:
        values = values[np.isfinite(values)].astype(np.float64)
        return (float(values.mean()), float(values.std(ddof=1))) if len(values) > 1 else (np.nan, np.nan)

    if rule == "fixed":
        limits = [np.float32(threshold)] * len(best)
    else:
        stats = np.array([statistics(values) for values in best])
        if batch == "batch_min":
            stats[:] = stats.mean(0)
        limits = [
            np.float32(mean + float(np.float32(threshold)) * deviation / divisor) for mean, deviation in stats.tolist()
        ]
    merged = [
        np.isfinite(values) & (values > limit if semantics == "paper" else values >= limit)
        for values, limit in zip(best, limits, strict=True)
    ]
    if batch == "batch_min":
        count = min(int(m.sum()) for m in merged)
        for values, m in zip(best, merged, strict=True):
            ranked = sorted(np.flatnonzero(m), key=lambda i: (-values[i], i))
            m[ranked[count:]] = False
    return merged


def reference_most_similar(best: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """For every image: which of its A rows (bool) are the `count` most similar that have a B row to join."""
    merged = []
    for values in best:
        flags = np.zeros(len(values), bool)
        flags[sorted(np.flatnonzero(values > -np.inf), key=lambda i: (-values[i], i))[:count]] = True
        merged.append(flags)
    return merged


def reference_rows(
    merged: list[np.ndarray], match: list[np.ndarray], rows: int, length: np.ndarray, prefix: int, semantics: str
) -> tuple[np.ndarray, np.ndarray]:
    """Output row (B, S) of every input row, -1 behind `length`, and valid rows (B)."""
    row = np.full((len(merged), rows), -1, dtype=np.int64)
    row[:, :prefix] = np.arange(prefix)
    length_out = np.empty(len(merged), dtype=np.int64)
    for b, joins in enumerate(merged):
        sources, targets = reference_split(rows, int(length[b]), prefix, semantics)
        order = np.concatenate([sources[~joins], targets])
        row[b, order] = prefix + np.arange(len(order))
        row[b, sources[joins]] = row[b, match[b][joins]]
        length_out[b] = prefix + len(order)
    return row, length_out


def reference(
    tokens: np.ndarray,
    size: np.ndarray,
    map: np.ndarray,
    length: np.ndarray,
    threshold: float | None,
    *,
    prefix: int = 1,
    rule: str = "adaptive",
    divisor: float = 5.0,
    semantics: str = "code",
    batch: str = "per_image",
    budget: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """GBM in plain NumPy; arguments and results as the torch operator."""
    best, match = reference_similarity(tokens, length, prefix, semantics, undefined(rule))
    merged = reference_decisions(best, threshold, rule, divisor, semantics, batch, budget)
    row, length_out = reference_rows(merged, match, tokens.shape[1], length, prefix, semantics)
    merged_tokens, merged_size = merge_rows_reference(
        tokens, size, row, int(length_out.max()), weighted=semantics != "paper"
    )
    return merged_tokens, merged_size, np.take_along_axis(row, map, 1), length_out
