"""What parity holds ToMe to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from algm_deploy.merging import merges_in
from algm_deploy.models.vit import Tokens
from algm_deploy.ops import reference
from algm_deploy.ops.gbm import WORST
from algm_deploy.ops.tome import SEMANTICS, tome_rows, tome_similarity
from algm_deploy.parity.decisions import Ints
from algm_deploy.parity.merges.common import MergeParity, count_problems, keys_of, largest_difference
from algm_deploy.parity.merges.gbm import GbmFacts, counted_facts, join_of, of_sources
from algm_deploy.parity.replay import Replayed
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan


def tome_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network) -> list[GbmFacts]:
    """As for GBM by a budget."""
    return counted_facts(replays, stage, plan, network, SEMANTICS)


def tome_problems(facts: GbmFacts, before: Ints, after: Ints, prefix: int) -> list[str]:
    """What in ToMe's decision for one image the noise cannot explain; empty when it is excused. As for GBM."""
    join = join_of(before, after, prefix, 0)
    stays, targets = join.row[join.sources[~join.joins]], join.row[join.targets]
    numbered = np.array_equal(np.concatenate([np.sort(stays), targets]), np.arange(prefix, join.row.max() + 1))
    if not numbered or (prefix and not join.ascending(prefix)):
        return ["ToMe: the token map is not one that joining tokens gives"]
    if not np.isfinite(facts.noise):
        return ["ToMe: similarities are not finite"]
    merged, rest = join.best(facts)
    problems = join.problems("ToMe", facts) + count_problems("ToMe", "token", merged, rest, facts.least, facts.noise)
    if not prefix:  # published: by descending similarity
        in_order = rest[np.argsort(stays)]
        if (rise := (in_order - np.minimum.accumulate(in_order)).max(initial=0)) > facts.noise:
            problems.append(f"ToMe: two tokens that stay are in the wrong order, {rise:.1e} apart")
    return problems


def _node(plan: MergePlan, layer: int, network: Network) -> dict[str, Any]:
    return {"operator": "tome", "r": merges_in(plan, layer, network), "prefix": network.prefix}


def _compared(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    assert tokens.keys is not None
    prefix, rows, r = network.prefix, tokens.values.shape[1], merges_in(plan, layer, network)
    ours = torch.ops.algm.tome(*tokens[:3], tokens.keys, r, prefix)[2].numpy()
    best, match = tome_similarity(tokens.keys, prefix)
    length = tokens.length.numpy()
    given, targets = of_sources(best, match, length, rows, prefix, SEMANTICS)
    exact, _ = reference.gbm_similarity(tokens.keys.float().numpy(), length, prefix, SEMANTICS, WORST)
    merged = reference.most_similar(given, r)
    row, _ = reference.gbm_rows(merged, targets, rows, length, prefix, SEMANTICS)
    row = reference.tome_order(given, merged, row, prefix)
    return largest_difference(given, exact), np.array_equal(ours, np.take_along_axis(row, tokens.map.numpy(), 1))


def _decided(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> torch.Tensor:
    best, match = tome_similarity(keys_of(tokens), network.prefix)
    r = merges_in(plan, layer, network)
    return tome_rows(best, match, r, tokens.values.shape[1], network.prefix).gather(1, tokens.map)


TOME = MergeParity(
    _node,
    _compared,
    _decided,
    tome_facts,
    lambda facts, before, after, plan, network: tome_problems(facts, before, after, network.prefix),
    lambda plan, layer, network, before, after: join_of(before, after, network.prefix, 0).decisions,
)
