"""Merge decisions of a runtime against those of PyTorch: equal, excused by noise, or wrong.

Decisions sit on the edges of floating-point numbers: one unit in the last place can flip a window, and the flip changes
everything behind it. So a difference is excused exactly when the runtime's decision is one that the similarities allow
once each may be off by the noise of the precision. The noise is measured (`algm_deploy.parity.replay`), not chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from algm_deploy.ops.clap import window_members
from algm_deploy.ops.gbm import first_source
from algm_deploy.recipes import MergePlan, Size

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ClapFacts:
    """What CLAP decided on, one image: true similarities (W,), their noise, threshold."""

    similarity: Floats
    noise: float
    threshold: float


@dataclass(frozen=True)
class GbmFacts:
    """What GBM decided on, one image: true cosines (|A|, |B|) with -inf where forbidden, A rows that may merge, the
    similarity to reach, and the noise of cosines and of that limit."""

    scores: Floats
    sources: NDArray[np.bool_]
    limit: float
    noise: float
    limit_noise: float


def map_problem(maps: list[Ints], prefix: int) -> str | None:
    """Why the token maps (N,) of one image, in the order of the merges, cannot be the maps of any merge."""
    for index, token_map in enumerate(maps):
        rows = np.unique(token_map)
        if not np.array_equal(rows, np.arange(prefix, prefix + len(rows))):
            return f"token map {index} does not number its tokens {prefix}, {prefix + 1}, ... without a gap"
    for index, (before, after) in enumerate(pairwise(maps)):
        if len(np.unique(np.stack([before, after]), axis=1).T) != len(np.unique(before)):
            return f"token map {index + 1} splits tokens that token map {index} had merged"
    return None


def clap_problems(facts: ClapFacts, token_map: Ints, plan: MergePlan, grid: Size, prefix: int) -> list[str]:
    """What in CLAP's decision for one image the noise cannot explain; empty when it is excused."""
    members = window_members(grid, plan.window)
    rows = token_map[members]
    merged = (rows == rows[:, :1]).all(1)
    order = np.argsort(rows[merged, 0])
    windows = np.flatnonzero(merged)[order]
    if not np.array_equal(token_map, _clap_map(windows, grid, plan, prefix)):
        return ["CLAP: the token map is not one that merging whole windows gives"]
    best_first = facts.similarity[windows]
    rest = facts.similarity[~merged]
    problems = []
    if len(best_first) and best_first.min() < facts.threshold - facts.noise:
        problems.append(f"CLAP: merged a window {facts.threshold - best_first.min():.1e} below the threshold")
    reach = facts.threshold if plan.batch == "per_image" else best_first.min(initial=np.inf)
    if len(rest) and rest.max() > reach + facts.noise:
        problems.append(f"CLAP: left a window {rest.max() - reach:.1e} above the threshold unmerged")
    if plan.order == "published" and len(best_first) > 1 and (rise := np.diff(best_first).max()) > facts.noise:
        problems.append(f"CLAP: two windows are in the wrong order, {rise:.1e} apart")
    return problems


def _clap_map(windows: Ints, grid: Size, plan: MergePlan, prefix: int) -> Ints:
    token_map = np.full(grid[0] * grid[1], -1, dtype=np.int64)
    token_map[window_members(grid, plan.window)[windows]] = prefix + np.arange(len(windows))[:, None]
    left = np.flatnonzero(token_map < 0)
    token_map[left] = prefix + len(windows) + np.arange(len(left))
    return token_map


def gbm_problems(facts: GbmFacts, before: Ints, after: Ints, plan: MergePlan, prefix: int) -> list[str]:
    """What in GBM's decision for one image the noise cannot explain; empty when it is excused.

    `before` and `after` are the composed token maps (N,) around the merge.
    """
    row = np.full(before.max() + 1, -1, dtype=np.int64)
    row[before] = after
    first = first_source(plan.semantics, prefix)
    rows = np.arange(prefix, len(row))
    is_source = (rows - first) % 2 == 0
    targets, sources = rows[~is_source], rows[is_source]
    joins = np.isin(row[sources], row[targets])
    if not np.array_equal(row[np.concatenate([sources[~joins], targets])], np.arange(prefix, row.max() + 1)):
        return ["GBM: the token map is not one that joining tokens gives"]
    target_of = {int(row[t]): (t - first - 1) // 2 for t in targets}
    index = (sources - first) // 2
    best = facts.scores[index].max(1, initial=-np.inf)
    taken = np.array(
        [facts.scores[i, target_of[int(row[s])]] for i, s in zip(index[joins], sources[joins], strict=True)]
    )
    slack = facts.noise + facts.limit_noise
    problems = []
    if len(taken) and (gap := (best[joins] - taken).max()) > facts.noise:
        problems.append(f"GBM: a token joined one that is {gap:.1e} less similar than the best")
    if len(taken) and not best[joins].min() >= facts.limit - slack:
        problems.append(f"GBM: merged a token {facts.limit - best[joins].min():.1e} below the threshold")
    reach = facts.limit if plan.batch == "per_image" else best[joins].min(initial=np.inf)
    allowed_rest = best[~joins & facts.sources[index]]
    if len(allowed_rest) and allowed_rest.max() > reach + slack:
        problems.append(f"GBM: left a token {allowed_rest.max() - reach:.1e} above the threshold unmerged")
    return problems
