"""What parity holds CTS to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from algm_deploy.models.vit import Tokens
from algm_deploy.ops import reference
from algm_deploy.ops.clap import window_members
from algm_deploy.ops.cts import cts_rows, cts_shared, reference_sources
from algm_deploy.parity.decisions import Flags, Floats, Ints
from algm_deploy.parity.merges.common import MergeParity, count_problems, keys_of, measured, of_one_token
from algm_deploy.parity.replay import NOISE_FLOOR, Replayed
from algm_deploy.recipe.network import Network, Size
from algm_deploy.recipe.plan import MergePlan


@dataclass(frozen=True, eq=False)
class CtsFacts:
    """What CTS decides on for one image: scores (M,) of superpatches, their noise, and how many share a token."""

    score: Floats
    noise: float
    least: int


def cts_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan) -> list[CtsFacts]:
    """Scores of the policy network, their noise, and how many superpatches share a token."""
    seen = measured(replays, stage, lambda tokens: keys_of(tokens)[..., 0].double())
    floors = [NOISE_FLOOR * float(exact.abs().max()) for exact, _ in seen]
    noises = [float(np.maximum(noise, floor)) for (_, noise), floor in zip(seen, floors, strict=True)]
    return [CtsFacts(exact.numpy(), noise, plan.cts_shared) for (exact, _), noise in zip(seen, noises, strict=True)]


def cts_problems(facts: CtsFacts, token_map: Ints, grid: Size, prefix: int) -> list[str]:
    """What in CTS's choice for one image the noise cannot explain; empty when it is excused."""
    shared = _superpatches(token_map, grid)
    if not np.array_equal(token_map, reference_sources(shared[None], grid, prefix)[1][0]):
        return ["CTS: the token map is not one that sharing whole superpatches gives"]
    if not np.isfinite([facts.noise, *facts.score]).all():
        return ["CTS: scores are not finite"]
    return count_problems("CTS", "superpatch", facts.score[shared], facts.score[~shared], facts.least, facts.noise)


def _superpatches(token_map: Ints, grid: Size) -> Flags:
    """Which superpatches (M,) have one token for all their patches."""
    return of_one_token(token_map[window_members(grid, (2, 2))])


def _node(plan: MergePlan, layer: int, network: Network) -> dict[str, Any]:
    return {"operator": "cts", "grid": list(network.grid), "prefix": network.prefix, "shared": plan.cts_shared}


def _compared(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    """Tokens, which are copies; scores are compared where a runtime is."""
    assert tokens.keys is not None
    values, score = tokens.values.float(), tokens.keys[..., 0].float()
    grid, prefix, shared = network.grid, network.prefix, plan.cts_shared
    ours = [part.numpy() for part in torch.ops.algm.cts(values, score, list(grid), prefix, shared)]
    exact = reference.cts(values.numpy(), score.numpy(), grid=grid, prefix=prefix, shared=shared)
    return float(np.abs(ours[0] - exact[0]).max()), all(map(np.array_equal, ours[1:], exact[1:]))


def _decided(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> torch.Tensor:
    shared = cts_shared(keys_of(tokens)[..., 0], plan.cts_shared)
    return cts_rows(shared, network.grid, network.prefix, plan.cts_shared)[1]


CTS = MergeParity(
    _node,
    _compared,
    _decided,
    lambda replays, stage, plan, _: cts_facts(replays, stage, plan),
    lambda facts, _, after, plan, network: cts_problems(facts, after, network.grid, network.prefix),
    lambda plan, layer, network, before, after: (_superpatches(after, network.grid), ()),
)
