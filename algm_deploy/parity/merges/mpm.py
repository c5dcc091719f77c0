"""What parity holds MPM to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from algm_deploy.models.vit import Tokens
from algm_deploy.ops import reference
from algm_deploy.ops.mpm import mpm_pairs, mpm_rows, mpm_similarity
from algm_deploy.parity.decisions import Floats, Ints
from algm_deploy.parity.merges.common import MergeParity, largest_difference, measured
from algm_deploy.parity.replay import Replayed
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan


@dataclass(frozen=True, eq=False)
class MpmFacts:
    """What MPM decides on for one image: similarities (R, R) of the tokens that reach it, -inf with themselves, and the
    noise of the similarities."""

    similarity: Floats
    noise: float


def mpm_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network) -> list[MpmFacts]:
    """Similarities of all tokens, and their noise."""
    seen = measured(replays, stage, lambda t: mpm_similarity(t.values, t.length, network.prefix))
    return [MpmFacts(exact.numpy(), noise) for exact, noise in seen]


def mpm_problems(facts: MpmFacts, before: Ints, after: Ints, prefix: int) -> list[str]:
    """What in MPM's pairs of one image the noise cannot explain; empty when it is excused.

    `before` and `after` are the composed token maps (N,) around the merge.
    """
    partner = _partners(before, after, prefix)
    index, best = np.arange(len(partner)), facts.similarity.max(1, initial=-np.inf)
    rows = reference.mpm_rows(partner[None], np.array([prefix + len(partner)]), prefix)[0]
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


def _node(plan: MergePlan, layer: int, network: Network) -> dict[str, Any]:
    return {"operator": "mpm", "prefix": network.prefix}


def _compared(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    prefix, length = network.prefix, tokens.length.numpy()
    ours = torch.ops.algm.mpm(*tokens[:4], prefix)[2].numpy()
    given = mpm_similarity(tokens.values, tokens.length, prefix).numpy()
    exact = reference.mpm_similarity(tokens.values.float().numpy(), length, prefix)
    row = reference.mpm_rows(reference.mpm_pairs(given, length, prefix), length, prefix)
    error = largest_difference([*given], [*exact])
    return error, np.array_equal(ours, np.take_along_axis(row, tokens.map.numpy(), 1))


def _decided(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> torch.Tensor:
    pairs = mpm_pairs(mpm_similarity(tokens.values, tokens.length, network.prefix), tokens.length, network.prefix)
    return mpm_rows(pairs, tokens.length, network.prefix)[0].gather(1, tokens.map)


MPM = MergeParity(
    _node,
    _compared,
    _decided,
    mpm_facts,
    lambda facts, before, after, plan, network: mpm_problems(facts, before, after, network.prefix),
    lambda plan, layer, network, before, after: (_partners(before, after, network.prefix), ()),
)
