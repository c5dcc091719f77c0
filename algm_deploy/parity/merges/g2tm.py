"""What parity holds G2TM to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from algm_deploy.models.vit import Tokens
from algm_deploy.ops import reference
from algm_deploy.ops.g2tm import g2tm_rows, neighbour_similarity, neighbours
from algm_deploy.parity.decisions import Flags, Floats, Ints
from algm_deploy.parity.merges.common import MergeParity, measured
from algm_deploy.parity.replay import Replayed
from algm_deploy.recipe.network import Network, Size
from algm_deploy.recipe.plan import MergePlan


@dataclass(frozen=True, eq=False)
class G2tmFacts:
    """What G2TM decides on for one image: similarities (E,) of patches that touch, the one to be above, and the noise
    of the similarities."""

    similarity: Floats
    limit: float
    noise: float


def g2tm_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network) -> list[G2tmFacts]:
    """Similarities of patches that touch, and their noise."""
    threshold = float(np.float32(plan.clap_threshold))
    seen = measured(replays, stage, lambda t: neighbour_similarity(t.values, network.grid, network.prefix))
    return [G2tmFacts(exact.numpy(), threshold, noise) for exact, noise in seen]


def g2tm_problems(facts: G2tmFacts, token_map: Ints, grid: Size, prefix: int) -> list[str]:
    """What in G2TM's groups for one image the noise cannot explain; empty when it is excused."""
    shared = _shared(token_map, grid)
    linked = shared & (facts.similarity > facts.limit - facts.noise)
    rows = reference.g2tm_rows(linked[None], grid, prefix)[0, prefix:]
    if not np.isfinite(facts.noise):
        return ["G2TM: similarities are not finite"]
    problems = []
    if not np.array_equal(token_map, rows):
        problems.append("G2TM: the token map is not one that joining similar neighbours gives")
    if (above := (facts.similarity[~shared] - facts.limit).max(initial=0)) > facts.noise:
        problems.append(f"G2TM: left neighbours apart that are {above:.1e} above the threshold")
    return problems


def _shared(token_map: Ints, grid: Size) -> Flags:
    """Which patches that touch (E,) share a token."""
    pairs = token_map[neighbours(grid)]
    shared: Flags = pairs[:, 0] == pairs[:, 1]
    return shared


def _node(plan: MergePlan, layer: int, network: Network) -> dict[str, Any]:
    return {"operator": "g2tm", "grid": list(network.grid), "prefix": network.prefix}


def _compared(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    grid, prefix, tau = list(network.grid), network.prefix, torch.tensor(plan.clap_threshold)
    ours = torch.ops.algm.g2tm(tokens.values, tokens.size, tau, grid, prefix)[2].numpy()
    similarity = neighbour_similarity(tokens.values, grid, prefix).numpy()
    exact = reference.neighbour_similarity(tokens.values.float().numpy(), grid, prefix)
    expected = reference.g2tm_rows(similarity > tau.numpy(), grid, prefix)[:, prefix:]
    return float(np.abs(similarity - exact).max()), np.array_equal(ours, expected)


def _decided(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> torch.Tensor:
    grid, prefix = list(network.grid), network.prefix
    linked = neighbour_similarity(tokens.values, grid, prefix) > torch.tensor(plan.clap_threshold)
    return g2tm_rows(linked, grid, prefix)[0][:, prefix:]


G2TM = MergeParity(
    _node,
    _compared,
    _decided,
    g2tm_facts,
    lambda facts, _, after, plan, network: g2tm_problems(facts, after, network.grid, network.prefix),
    lambda plan, layer, network, before, after: (_shared(after, network.grid), ()),
)
