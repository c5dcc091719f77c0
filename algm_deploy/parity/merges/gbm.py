"""What parity holds GBM to, and what other bipartite merges share with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from algm_deploy.merging import merges_in
from algm_deploy.models.vit import Tokens
from algm_deploy.ops import reference
from algm_deploy.ops.gbm import (
    first_source,
    gbm_decisions,
    gbm_rows,
    gbm_scores,
    gbm_similarity,
    gbm_threshold,
    undefined,
)
from algm_deploy.parity.decisions import Flags, Floats, Ints
from algm_deploy.parity.merges.common import (
    MergeParity,
    count_problems,
    largest_difference,
    least_of,
    lowest,
    noise_of,
    stacked,
    threshold_problems,
)
from algm_deploy.parity.replay import NOISE_FACTOR, Replayed
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan


@dataclass(frozen=True)
class GbmFacts:
    """What GBM decided on, one image: true cosines (|A|, |B|) with -inf where forbidden, A rows that may merge, the
    similarity to reach, the noise of cosines and of that limit, and how many rows have to merge at least, as for CLAP.
    """

    scores: Floats
    sources: Flags
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


def gbm_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network) -> list[GbmFacts]:
    """Cosines, limits, their noise and the least to merge, for images that decide together."""
    if plan.gbm == "budget":
        return counted_facts(replays, stage, plan, network, plan.semantics)
    truth, baseline = (stacked([r.truth[stage] for r in replays]), stacked([r.baseline[stage] for r in replays]))
    limits = [_limit(tokens, plan, stage, network.prefix) for tokens in (truth, baseline)]
    exact, sources = gbm_scores(truth.values, truth.length, network.prefix, plan.semantics)
    rounded, _ = gbm_scores(baseline.values, baseline.length, network.prefix, plan.semantics)
    facts = [
        GbmFacts(e.numpy(), allowed.numpy(), float(limit), noise_of(e, r), _limit_noise(limit, other))
        for e, r, allowed, limit, other in zip(exact, rounded, sources, *limits, strict=True)
    ]
    counts = least_of([fact.sure for fact in facts], plan)
    return [fact.with_least(count) for fact, count in zip(facts, counts, strict=True)]


def counted_facts(
    replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network, semantics: str
) -> list[GbmFacts]:
    """Facts of a bipartite merge by count: the similarity to reach is that of the last one that merges."""
    count = merges_in(plan, plan.layers[stage], network)
    facts = []
    for replay in replays:
        exact, rounded = (
            gbm_scores(_values(tokens[stage]), tokens[stage].length, network.prefix, semantics)
            for tokens in (replay.truth, replay.baseline)
        )
        scores, sources = exact[0][0], exact[1][0]
        best = scores.amax(1).where(sources, torch.tensor(-torch.inf))
        noise = noise_of(scores, rounded[0][0])
        facts.append(GbmFacts(scores.numpy(), sources.numpy(), lowest(best, count), noise, 0.0, count))
    return facts


def _values(tokens: Tokens) -> torch.Tensor:
    """What a bipartite merge compares: with ToMe keys, which no other plan hands over."""
    return tokens.values if tokens.keys is None else tokens.keys


def _limit(tokens: Tokens, plan: MergePlan, stage: int, prefix: int) -> torch.Tensor:
    """Similarities to reach (B)."""
    best, _ = gbm_similarity(tokens.values, tokens.length, prefix, plan.semantics)
    scale, divisor = torch.tensor(plan.gbm_threshold), float(plan.layers[stage])
    return gbm_threshold(best, scale, plan.gbm, divisor, plan.batch)[:, 0]


def _limit_noise(limit: torch.Tensor, other: torch.Tensor) -> float:
    """Infinite limits are exact, and one that is undefined allows no merge whatever its noise."""
    return NOISE_FACTOR * float(torch.nan_to_num(limit - other).abs())


def gbm_problems(facts: GbmFacts, before: Ints, after: Ints, plan: MergePlan, prefix: int) -> list[str]:
    """What in GBM's decision for one image the noise cannot explain; empty when it is excused.

    `before` and `after` are the composed token maps (N,) around the merge.
    """
    join = join_of(before, after, prefix, first_source(plan.semantics, prefix))
    if not join.ascending(prefix):
        return ["GBM: the token map is not one that joining tokens gives"]
    if not np.isfinite([facts.noise, facts.limit_noise]).all():
        return ["GBM: similarities are not finite"]
    merged, rest = join.best(facts)
    if plan.gbm == "budget":
        return count_problems("GBM", "token", merged, rest, facts.least, facts.noise) + join.problems("GBM", facts)
    slack = facts.noise + facts.limit_noise
    return threshold_problems("GBM", "token", merged, rest, facts, plan, slack) + join.problems("GBM", facts)


class Join(NamedTuple):
    """A bipartite merge of one image: output `row` (S,) of every input row, rows of A behind the prefix (`sources`) and
    of B (`targets`), which of the sources join a target, and the first row of A."""

    row: Ints
    sources: Ints
    targets: Ints
    joins: Flags
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

    @property
    def decisions(self) -> tuple[Ints, Ints]:
        """Every source joins some target or none, and has its place among those that stay."""
        return self.partners, self.stays

    def problems(self, merge: str, facts: GbmFacts) -> list[str]:
        """Sources that joined another target than their most similar one."""
        index = (self.sources[self.joins] - self.first) // 2
        taken = facts.scores[index, (self.partners[self.joins] - self.first - 1) // 2]
        gap = (facts.best[index] - taken).max(initial=0)
        return (
            [f"{merge}: a token joined one that is {gap:.1e} less similar than the best"] if gap > facts.noise else []
        )


def join_of(before: Ints, after: Ints, prefix: int, first: int) -> Join:
    """The merge between two composed token maps (N,); `first` is the first row of A."""
    row = np.full(before.max() + 1, -1, dtype=np.int64)
    row[before] = after
    rows = np.arange(prefix, len(row))
    is_source = (rows - first) % 2 == 0
    sources, targets = rows[is_source], rows[~is_source]
    return Join(row, sources, targets, np.isin(row[sources], row[targets]), first)


def _node(plan: MergePlan, layer: int, network: Network) -> dict[str, Any]:
    return {
        "operator": "gbm",
        "rule": plan.gbm,
        "divisor": float(layer),
        "prefix": network.prefix,
        "semantics": plan.semantics,
        "batch": plan.batch,
        "budget": merges_in(plan, layer, network),
    }


def _compared(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    prefix, semantics = network.prefix, plan.semantics
    scale = torch.tensor(plan.gbm_threshold)
    rule = plan.gbm, float(layer), semantics, plan.batch, merges_in(plan, layer, network)
    ours = torch.ops.algm.gbm(*tokens[:4], scale, prefix, *rule)[2].numpy()
    values, length = tokens.values.float().numpy(), tokens.length.numpy()
    nothing = undefined(plan.gbm)
    best, match = gbm_similarity(tokens.values, tokens.length, prefix, semantics, nothing)
    given, targets = of_sources(best, match, length, values.shape[1], prefix, semantics)
    exact, _ = reference.gbm_similarity(values, length, prefix, semantics, nothing)
    merged = reference.gbm_decisions(given, float(scale), *rule)
    row, _ = reference.gbm_rows(merged, targets, values.shape[1], length, prefix, semantics)
    expected = np.take_along_axis(row, tokens.map.numpy(), 1)
    return largest_difference(given, exact), np.array_equal(ours, expected)


def of_sources(
    best: torch.Tensor, match: torch.Tensor, length: NDArray[Any], rows: int, prefix: int, semantics: str
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Of each image's A rows: the best similarity, -inf where it has none, and the row that has it."""
    first = first_source(semantics, prefix)
    split = (reference.gbm_split(rows, int(valid), prefix, semantics)[0] for valid in length)
    sources = [(source - first) // 2 for source in split]
    given = [row.numpy()[source] for row, source in zip(best, sources, strict=True)]
    return given, [first + 1 + 2 * row.numpy()[source] for row, source in zip(match, sources, strict=True)]


def _decided(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> torch.Tensor:
    prefix = network.prefix
    best, match = gbm_similarity(tokens.values, tokens.length, prefix, plan.semantics)
    scale, budget = torch.tensor(plan.gbm_threshold), merges_in(plan, layer, network)
    merged = gbm_decisions(best, scale, plan.gbm, float(layer), plan.semantics, plan.batch, budget)
    row, _ = gbm_rows(merged, match, tokens.length, tokens.values.shape[1], prefix, plan.semantics)
    return row.gather(1, tokens.map)


GBM = MergeParity(
    _node,
    _compared,
    _decided,
    gbm_facts,
    lambda facts, before, after, plan, network: gbm_problems(facts, before, after, plan, network.prefix),
    lambda plan, layer, network, before, after: (
        join_of(before, after, network.prefix, first_source(plan.semantics, network.prefix)).decisions
    ),
)
