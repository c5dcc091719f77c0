"""Decisions of a runtime against those of PyTorch: equal, excused by noise, or wrong.

Merges decide, and so do masks by which queries choose the cells they attend to.

Decisions sit on the edges of floating-point numbers: one unit in the last place can flip a window, and the flip changes
everything behind it. So a difference is excused exactly when the runtime's decision is one that the similarities allow
once each may be off by the noise of the precision. The noise is measured (`algm_deploy.parity.replay`), not chosen.
Noise that is NaN excuses nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from algm_deploy.ops.clap import window_members
from algm_deploy.ops.cts import reference_sources
from algm_deploy.ops.g2tm import neighbours, reference_rows
from algm_deploy.ops.gbm import first_source
from algm_deploy.ops.mpm import reference_rows as mpm_rows
from algm_deploy.recipe.schema import MergePlan, Network, Size

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Cells = NDArray[np.uint8]


@dataclass(frozen=True)
class ClapFacts:
    """What CLAP decided on, one image: true similarities (W,), the similarity to reach, the noise of both, and how many
    windows have to merge at least: those above the limit beyond noise, in the image that has the fewest where images
    decide together. By a budget `least` is that, and the similarity to reach is the lowest within it.
    """

    similarity: Floats
    limit: float
    noise: float
    least: int = 0


@dataclass(frozen=True)
class GbmFacts:
    """What GBM decided on, one image: true cosines (|A|, |B|) with -inf where forbidden, A rows that may merge, the
    similarity to reach, the noise of cosines and of that limit, and how many rows have to merge at least, as for CLAP.
    """

    scores: Floats
    sources: NDArray[np.bool_]
    limit: float
    noise: float
    limit_noise: float
    least: int = 0

    @property
    def best(self) -> Floats:
        """Best cosine (|A|,) of every A row."""
        best: Floats = self.scores.max(1, initial=-np.inf)
        return best

    @property
    def sure(self) -> int:
        """A rows above the limit beyond noise."""
        return int((self.best[self.sources] > self.limit + self.noise + self.limit_noise).sum())

    def with_least(self, least: int) -> GbmFacts:
        """The same facts with another least number of merges."""
        return replace(self, least=least)


@dataclass(frozen=True, eq=False)
class ElvitFacts:
    """What ELViT decides on for one image: squared distances (N, M) of patches and centroids, how many centroids each
    patch is restored from, and the noise of the distances."""

    distance: Floats
    neighbours: int
    noise: float


@dataclass(frozen=True, eq=False)
class EvitFacts:
    """What EViT decides on for one image: attention (R,) of cls as a multiple of an equal share, squared distances
    (R, R) of rows, the noise of both, and how many rows stay."""

    attention: Floats
    distance: Floats
    attention_noise: float
    distance_noise: float
    keep: int


@dataclass(frozen=True, eq=False)
class G2tmFacts:
    """What G2TM decides on for one image: similarities (E,) of patches that touch, the one to be above, and the noise
    of the similarities."""

    similarity: Floats
    limit: float
    noise: float


@dataclass(frozen=True, eq=False)
class MpmFacts:
    """What MPM decides on for one image: similarities (R, R) of the tokens that reach it, -inf with themselves, and the
    noise of the similarities."""

    similarity: Floats
    noise: float


@dataclass(frozen=True, eq=False)
class CtsFacts:
    """What CTS decides on for one image: scores (M,) of superpatches, their noise, and how many share a token."""

    score: Floats
    noise: float
    least: int


@dataclass(frozen=True, eq=False)
class MaskFacts:
    """What the queries of one layer decided on, one image: true masks (Q, S) before their activation, positive for the
    cells to attend to; what PyTorch's own masks (Q, S) chose in the precision at hand; and the noise of masks."""

    masks: NDArray[np.float64]
    own: NDArray[np.bool_]
    noise: float


def map_problem(maps: list[Ints], prefix: int, fresh: Sequence[bool] = ()) -> str | None:
    """Why the token maps (N,) of one image, in the order of the merges, cannot be the maps of any merge.

    Each map tells of all merges up to its own: what merged stays merged, but for those that are `fresh`.
    """
    for index, token_map in enumerate(maps):
        rows = np.unique(token_map)
        if not np.array_equal(rows, np.arange(prefix, prefix + len(rows))):
            return f"token map {index} does not number its tokens {prefix}, {prefix + 1}, ... without a gap"
    for index, (before, after) in enumerate(pairwise(maps)):
        if not any(fresh[index + 1 : index + 2]) and len(np.unique(np.stack([before, after]), axis=1).T) != len(
            np.unique(before)
        ):
            return f"token map {index + 1} splits tokens that token map {index} had merged"
    return None


def differing(before: Ints, ours: Ints, other: Ints, stage: int, plan: MergePlan, network: Network) -> tuple[int, int]:
    """How many decisions of one merge differ between two token maps (N,) behind it, and how many there are.

    `before` is the map in front of the merge. CLAP decides for each window whether it merges, GBM and ToMe for each
    token that may which other it joins, if any, ELViT for each patch which centroid is the last that counts, EViT for
    each row whether it stays or which other it is restored from, G2TM for patches that touch whether they share a
    token, MPM for each token which other it joins, if any, CTS for each superpatch whether its patches share one.
    Merged windows, and tokens that stay, in another order count once for each that would have to be moved.
    """
    layer, prefix = plan.layers[stage], network.prefix
    merge = plan.merge_in(layer)
    if merge == "clap":
        a, b = (_merged_windows(token_map, plan, network.grid) for token_map in (ours, other))
        count, total = len(np.setxor1d(a, b)), len(window_members(network.grid, plan.window))
        count += _out_of_order(a, b)
    elif merge in ("gbm", "tome"):
        first = 0 if merge == "tome" else first_source(plan.semantics, prefix)
        one, two = (_join(before, token_map, prefix, first) for token_map in (ours, other))
        count, total = int((one.partners != two.partners).sum()), len(one.sources)
        count += _out_of_order(one.stays, two.stays)
    else:
        made, wanted = (_decided(before, token_map, stage, plan, network) for token_map in (ours, other))
        count, total = int((made != wanted).sum()), len(made)
    return (count if np.array_equal(ours, other) else max(count, 1)), total


def _decided(before: Ints, token_map: Ints, stage: int, plan: MergePlan, network: Network) -> NDArray[np.generic]:
    """What a merge without an order of its own decided, one by one."""
    layer = plan.layers[stage]
    merge = plan.merge_in(layer)
    if merge == "evit":
        return token_map[: plan.evit_counts(len(token_map))[layer][0]]
    if merge == "g2tm":
        return _shared(token_map, network.grid)
    if merge == "mpm":
        return _partners(before, token_map, network.prefix)
    if merge == "cts":
        return _superpatches(token_map, network.grid)
    return token_map


def _out_of_order(ours: Ints, other: Ints) -> int:
    """How many of the common items would have to be moved for the other order."""
    place = {int(item): index for index, item in enumerate(other)}
    places = [place[int(item)] for item in ours if int(item) in place]
    ends: list[int] = []  # the smallest end of an ascending run of each length
    for index in places:
        at = bisect_left(ends, index)
        ends[at : at + 1] = [index]
    return len(places) - len(ends)


def clap_problems(facts: ClapFacts, token_map: Ints, plan: MergePlan, grid: Size, prefix: int) -> list[str]:
    """What in CLAP's decision for one image the noise cannot explain; empty when it is excused."""
    windows = _merged_windows(token_map, plan, grid)
    merged = np.zeros(len(facts.similarity), bool)
    merged[windows] = True
    if not np.array_equal(token_map, _clap_map(windows, grid, plan, prefix)):
        return ["CLAP: the token map is not one that merging whole windows gives"]
    if plan.order == "raster" and (np.diff(windows) < 0).any():
        return ["CLAP: merged windows are not in raster order"]
    if not np.isfinite([facts.noise, *facts.similarity]).all():
        return ["CLAP: similarities are not finite"]
    in_order = facts.similarity[windows]
    rest = facts.similarity[~merged]
    if plan.clap == "budget":
        problems = _count_problems("CLAP", "window", in_order, rest, facts)
    else:
        problems = _threshold_problems("CLAP", "window", in_order, rest, facts, plan, facts.noise)
    # Against the lowest one so far: many small steps may not add up to a large one.
    rise = (in_order - np.minimum.accumulate(in_order)).max(initial=0)
    if plan.order == "published" and rise > facts.noise:
        problems.append(f"CLAP: two windows are in the wrong order, {rise:.1e} apart")
    return problems


def gbm_problems(facts: GbmFacts, before: Ints, after: Ints, plan: MergePlan, prefix: int) -> list[str]:
    """What in GBM's decision for one image the noise cannot explain; empty when it is excused.

    `before` and `after` are the composed token maps (N,) around the merge.
    """
    join = _join(before, after, prefix, first_source(plan.semantics, prefix))
    if not join.ascending(prefix):
        return ["GBM: the token map is not one that joining tokens gives"]
    if not np.isfinite([facts.noise, facts.limit_noise]).all():
        return ["GBM: similarities are not finite"]
    merged, rest = join.best(facts)
    if plan.gbm == "budget":
        return _count_problems("GBM", "token", merged, rest, facts) + join.problems("GBM", facts)
    slack = facts.noise + facts.limit_noise
    return _threshold_problems("GBM", "token", merged, rest, facts, plan, slack) + join.problems("GBM", facts)


def tome_problems(facts: GbmFacts, before: Ints, after: Ints, prefix: int) -> list[str]:
    """What in ToMe's decision for one image the noise cannot explain; empty when it is excused. As for GBM."""
    join = _join(before, after, prefix, 0)
    stays, targets = join.row[join.sources[~join.joins]], join.row[join.targets]
    numbered = np.array_equal(np.concatenate([np.sort(stays), targets]), np.arange(prefix, join.row.max() + 1))
    if not numbered or (prefix and not join.ascending(prefix)):
        return ["ToMe: the token map is not one that joining tokens gives"]
    if not np.isfinite(facts.noise):
        return ["ToMe: similarities are not finite"]
    merged, rest = join.best(facts)
    problems = join.problems("ToMe", facts) + _count_problems("ToMe", "token", merged, rest, facts)
    if not prefix:  # published: by descending similarity
        in_order = rest[np.argsort(stays)]
        if (rise := (in_order - np.minimum.accumulate(in_order)).max(initial=0)) > facts.noise:
            problems.append(f"ToMe: two tokens that stay are in the wrong order, {rise:.1e} apart")
    return problems


def elvit_problems(facts: ElvitFacts, token_map: Ints, prefix: int) -> list[str]:
    """What in ELViT's choice for one image the noise cannot explain; empty when it is excused."""
    if not np.isfinite(facts.noise):
        return ["ELViT: distances are not finite"]
    last = np.sort(facts.distance, axis=1)[:, facts.neighbours - 1]
    taken = np.take_along_axis(facts.distance, (token_map - prefix)[:, None], 1)[:, 0]
    gap = np.abs(taken - last).max(initial=0)
    return [f"ELViT: a patch's farthest centroid is {gap:.1e} away from the right one"] if gap > facts.noise else []


def evit_problems(facts: EvitFacts, record: Ints, prefix: int) -> list[str]:
    """What in EViT's choice for one image the noise cannot explain; empty when it is excused."""
    source = record[: len(facts.attention)] - prefix
    kept = source == np.arange(len(source))
    if not np.isfinite([facts.attention_noise, facts.distance_noise]).all():
        return ["EViT: attention or distances are not finite"]
    problems = []
    gap = facts.attention[~kept].max(initial=-np.inf) - facts.attention[kept].min(initial=np.inf)
    if gap > facts.attention_noise:
        problems.append(f"EViT: left out a token with {gap:.1e} more attention than one that stays")
    taken = np.take_along_axis(facts.distance, source[:, None], 1)[:, 0]
    farther = (taken - facts.distance[:, kept].min(1, initial=np.inf))[~kept].max(initial=0)
    if farther > facts.distance_noise:
        problems.append(f"EViT: a token is restored from one that is {farther:.1e} farther than the nearest")
    return problems


def record_problem(records: list[Ints], counts: Ints, plan: MergePlan, prefix: int) -> str | None:
    """Why what was told (N,) of EViT's merges of one image, in their order, cannot be, given the token counts."""
    facts = plan.evit_counts(len(records[0])) if records else {}
    for record, count, (layer, (rows, keep)) in zip(records, counts, facts.items(), strict=True):
        source, index = record - prefix, np.arange(len(record))
        if (source[:rows] < 0).any() or (source[:rows] >= rows).any() or (source[rows:] != index[rows:]).any():
            return f"token_map_evit_{layer} names tokens that do not reach block {layer}"
        kept = source[:rows] == index[:rows]
        if not kept[source[:rows]].all():
            return f"token_map_evit_{layer} restores tokens from some that did not stay"
        if kept.sum() != keep or count != keep + 1:
            return f"EViT in block {layer} kept {kept.sum()} tokens and counted {count}, instead of {keep} and one more"
    return None


def g2tm_problems(facts: G2tmFacts, token_map: Ints, grid: Size, prefix: int) -> list[str]:
    """What in G2TM's groups for one image the noise cannot explain; empty when it is excused."""
    shared = _shared(token_map, grid)
    rows = reference_rows((shared & (facts.similarity > facts.limit - facts.noise))[None], grid, prefix)[0, prefix:]
    if not np.isfinite(facts.noise):
        return ["G2TM: similarities are not finite"]
    problems = []
    if not np.array_equal(token_map, rows):
        problems.append("G2TM: the token map is not one that joining similar neighbours gives")
    if (above := (facts.similarity[~shared] - facts.limit).max(initial=0)) > facts.noise:
        problems.append(f"G2TM: left neighbours apart that are {above:.1e} above the threshold")
    return problems


def mpm_problems(facts: MpmFacts, before: Ints, after: Ints, prefix: int) -> list[str]:
    """What in MPM's pairs of one image the noise cannot explain; empty when it is excused.

    `before` and `after` are the composed token maps (N,) around the merge.
    """
    partner = _partners(before, after, prefix)
    index, best = np.arange(len(partner)), facts.similarity.max(1, initial=-np.inf)
    rows = mpm_rows(partner[None], np.array([prefix + len(partner)]), prefix)[0]
    if not np.array_equal(partner[partner], index) or not np.array_equal(after, rows[before]):
        return ["MPM: the token map is not one that joining pairs gives"]
    if not np.isfinite(facts.noise):
        return ["MPM: similarities are not finite"]
    paired, nearest = partner != index, facts.similarity.argmax(1)
    problems = []
    gap = (best - facts.similarity[index, partner])[paired].max(initial=0)
    if gap > facts.noise:
        problems.append(f"MPM: a token joined one that is {gap:.1e} less similar than the best")
    rivals = (facts.similarity >= best[:, None] - facts.noise).sum(1) > 1
    mutual = (nearest[nearest] == index) & (best > -np.inf)
    left = mutual & ~rivals & ~rivals[nearest] & (partner != nearest)
    if left.any():
        problems.append(f"MPM: left {left.sum()} tokens apart from the most similar one, which has no other either")
    return problems


def _partners(before: Ints, after: Ints, prefix: int) -> Ints:
    """Of every token (R,) that reaches a merge of pairs, numbered without prefix, the one that shares its row; itself
    where none does."""
    row = np.full(before.max() + 1, -1)
    row[before] = after
    row = row[prefix:]
    order = np.argsort(row, kind="stable")
    partner = np.arange(len(row))
    same = np.flatnonzero(row[order][1:] == row[order][:-1])
    partner[order[same]], partner[order[same + 1]] = order[same + 1], order[same]
    return partner


def cts_problems(facts: CtsFacts, token_map: Ints, grid: Size, prefix: int) -> list[str]:
    """What in CTS's choice for one image the noise cannot explain; empty when it is excused."""
    shared = _superpatches(token_map, grid)
    if not np.array_equal(token_map, reference_sources(shared[None], grid, prefix)[1][0]):
        return ["CTS: the token map is not one that sharing whole superpatches gives"]
    if not np.isfinite([facts.noise, *facts.score]).all():
        return ["CTS: scores are not finite"]
    return _count_problems("CTS", "superpatch", facts.score[shared], facts.score[~shared], facts)


def _superpatches(token_map: Ints, grid: Size) -> NDArray[np.bool_]:
    """Which superpatches (M,) have one token for all their patches."""
    return _of_one_token(token_map[window_members(grid, (2, 2))])


def _shared(token_map: Ints, grid: Size) -> NDArray[np.bool_]:
    """Which patches that touch (E,) share a token."""
    pairs = token_map[neighbours(grid)]
    shared: NDArray[np.bool_] = pairs[:, 0] == pairs[:, 1]
    return shared


def mask_problems(facts: MaskFacts, chosen: Cells, layer: int) -> list[str]:
    """What in the choice of cells (Q, S) for one image, in a 1-based layer, the noise cannot explain."""
    if not np.isfinite(facts.noise):
        return [f"mask {layer}: masks are not finite"]
    gap = np.abs(facts.masks[(chosen > 0) != (facts.masks >= 0)]).max(initial=0)
    return [f"mask {layer}: a cell is {gap:.1e} on the other side of zero"] if gap > facts.noise else []


class _Join(NamedTuple):
    """A bipartite merge of one image: output `row` (S,) of every input row, rows of A behind the prefix (`sources`) and
    of B (`targets`), which of the sources join a target, and the first row of A."""

    row: Ints
    sources: Ints
    targets: Ints
    joins: NDArray[np.bool_]
    first: int

    def ascending(self, prefix: int) -> bool:
        """Whether the rows that are left are numbered [A | B], each ascending."""
        left = self.row[np.concatenate([self.sources[~self.joins], self.targets])]
        return np.array_equal(left, np.arange(prefix, self.row.max() + 1))

    def best(self, facts: GbmFacts) -> tuple[Floats, Floats]:
        """True best similarities of the sources that merged, and of those that did not though they could."""
        index = (self.sources - self.first) // 2
        best = facts.best[index]
        return best[self.joins], best[~self.joins & facts.sources[index]]

    @property
    def stays(self) -> Ints:
        """The sources that join nothing, in the order of their new rows."""
        sources = self.sources[~self.joins]
        return sources[np.argsort(self.row[sources])]

    @property
    def partners(self) -> Ints:
        """The target (|sources|,) every source joins, -1 for none."""
        target_of = np.full(self.row.max() + 1, -1, dtype=np.int64)
        target_of[self.row[self.targets]] = self.targets
        return np.where(self.joins, target_of[self.row[self.sources]], -1)

    def problems(self, merge: str, facts: GbmFacts) -> list[str]:
        """Sources that joined another target than their most similar one."""
        index = (self.sources[self.joins] - self.first) // 2
        taken = facts.scores[index, (self.partners[self.joins] - self.first - 1) // 2]
        gap = (facts.best[index] - taken).max(initial=0)
        return (
            [f"{merge}: a token joined one that is {gap:.1e} less similar than the best"] if gap > facts.noise else []
        )


def _join(before: Ints, after: Ints, prefix: int, first: int) -> _Join:
    row = np.full(before.max() + 1, -1, dtype=np.int64)
    row[before] = after
    rows = np.arange(prefix, len(row))
    is_source = (rows - first) % 2 == 0
    sources, targets = rows[is_source], rows[~is_source]
    return _Join(row, sources, targets, np.isin(row[sources], row[targets]), first)


def _count_problems(
    merge: str, what: str, merged: Floats, rest: Floats, facts: ClapFacts | CtsFacts | GbmFacts
) -> list[str]:
    """Another count than the plan's, and similarities that stayed though they are higher than one that merged."""
    problems = []
    if len(merged) != facts.least:
        problems.append(f"{merge}: merged {len(merged)} {what}s instead of {facts.least}")
    if (higher := rest.max(initial=-np.inf) - merged.min(initial=np.inf)) > facts.noise:
        problems.append(f"{merge}: left a {what} {higher:.1e} above one that merged")
    return problems


def _threshold_problems(
    merge: str, what: str, merged: Floats, rest: Floats, facts: ClapFacts | GbmFacts, plan: MergePlan, slack: float
) -> list[str]:
    """Similarities that merged or stayed on the wrong side of the threshold, by more than `slack`."""
    limit, lowest, highest = facts.limit, merged.min(initial=np.inf), rest.max(initial=-np.inf)
    problems = []
    # An undefined threshold lets nothing merge, hence the `not`.
    if len(merged) and not lowest >= limit - slack:
        problems.append(f"{merge}: merged a {what} {limit - lowest:.1e} below the threshold")
    if plan.batch == "per_image":
        if highest > limit + slack:
            problems.append(f"{merge}: left a {what} {highest - limit:.1e} above the threshold unmerged")
        return problems
    if len(merged) < facts.least:
        problems.append(f"{merge}: merged {len(merged)} of the at least {facts.least} {what}s all images can merge")
    if highest > lowest + facts.noise:
        problems.append(f"{merge}: left a {what} {highest - lowest:.1e} above one that merged")
    return problems


def _merged_windows(token_map: Ints, plan: MergePlan, grid: Size) -> Ints:
    """The windows whose patches share a token, in the order of the tokens."""
    rows = token_map[window_members(grid, plan.window)]
    merged = _of_one_token(rows)
    return np.flatnonzero(merged)[np.argsort(rows[merged, 0])]


def _of_one_token(rows: Ints) -> NDArray[np.bool_]:
    """Which windows have one row for all their patches, given those of each (M, patches)."""
    one: NDArray[np.bool_] = (rows == rows[:, :1]).all(1)
    return one


def _clap_map(windows: Ints, grid: Size, plan: MergePlan, prefix: int) -> Ints:
    token_map = np.full(grid[0] * grid[1], -1, dtype=np.int64)
    token_map[window_members(grid, plan.window)[windows]] = prefix + np.arange(len(windows))[:, None]
    left = np.flatnonzero(token_map < 0)
    token_map[left] = prefix + len(windows) + np.arange(len(left))
    return token_map
