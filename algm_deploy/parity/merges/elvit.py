"""What parity holds ELViT to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from algm_deploy.models.merges import Elvit, elvit_distances
from algm_deploy.models.vit import Tokens
from algm_deploy.ops import reference
from algm_deploy.ops.elvit import nearest
from algm_deploy.parity.decisions import Floats, Ints
from algm_deploy.parity.merges.common import MergeParity, measured
from algm_deploy.parity.replay import Replayed
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan


@dataclass(frozen=True, eq=False)
class ElvitFacts:
    """What ELViT decides on for one image: squared distances (N, M) of patches and centroids, how many centroids each
    patch is restored from, and the noise of the distances."""

    distance: Floats
    neighbours: int
    noise: float


def elvit_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network) -> list[ElvitFacts]:
    """Distances and their noise."""

    def distances(tokens: Tokens) -> torch.Tensor:
        return elvit_distances(tokens.values, plan, network.grid, network.prefix)[0]

    return [
        ElvitFacts(exact.numpy(), plan.elvit_neighbours, noise) for exact, noise in measured(replays, stage, distances)
    ]


def elvit_problems(facts: ElvitFacts, token_map: Ints, prefix: int) -> list[str]:
    """What in ELViT's choice for one image the noise cannot explain; empty when it is excused."""
    if not np.isfinite(facts.noise):
        return ["ELViT: distances are not finite"]
    last = np.sort(facts.distance, axis=1)[:, facts.neighbours - 1]
    taken = np.take_along_axis(facts.distance, (token_map - prefix)[:, None], 1)[:, 0]
    gap = np.abs(taken - last).max(initial=0)
    return [f"ELViT: a patch's farthest centroid is {gap:.1e} away from the right one"] if gap > facts.noise else []


def _node(plan: MergePlan, layer: int, network: Network) -> dict[str, Any]:
    return {
        "operator": "elvit",
        "grid": list(network.grid),
        "centroids": list(plan.elvit_grid),
        "prefix": network.prefix,
        "iterations": plan.elvit_iterations,
        "window": plan.elvit_window,
        "temperature": plan.elvit_temperature,
        "neighbours": plan.elvit_neighbours,
        "semantics": plan.semantics,
    }


def _compared(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    """Centroids and distances, relative to the longest patch and its square."""
    prefix, count = network.prefix, plan.elvit_neighbours
    values = tokens.values.float()
    rules = plan.elvit_iterations, plan.elvit_window, plan.elvit_temperature
    distance, found = (part.numpy() for part in elvit_distances(values, plan, network.grid, prefix))
    patches = values[:, prefix:].numpy()
    ours = torch.ops.algm.elvit(values, *Elvit(plan, network.grid, prefix).attributes)[1].numpy()
    exact = reference.squared_distances(patches, found)
    again = reference.elvit_centroids(patches, network.grid, plan.elvit_grid, *rules)
    length = float(np.linalg.norm(patches, axis=2).max())
    errors = np.abs(distance - exact).max() / length**2, np.abs(found - again).max() / length
    return max(map(float, errors)), np.array_equal(ours, prefix + reference.nearest(distance, count)[..., -1])


def _decided(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> torch.Tensor:
    distance, _ = elvit_distances(tokens.values, plan, network.grid, network.prefix)
    return network.prefix + nearest(distance, plan.elvit_neighbours)[..., -1]


def _maps_problem(maps: Sequence[Ints], counts: NDArray[Any], plan: MergePlan, network: Network) -> str | None:
    """The maps name for each patch one of the tokens that stand for it in part."""
    for index, token_map in enumerate(maps):
        row = token_map - network.prefix
        if (row < 0).any() or (row >= counts[:, index, None]).any():
            return f"token map {index} names tokens that the token counts do not have"
    return None


ELVIT = MergeParity(
    _node,
    _compared,
    _decided,
    elvit_facts,
    lambda facts, _, after, plan, network: elvit_problems(facts, after, network.prefix),
    lambda plan, layer, network, before, after: (after, ()),  # which centroid is the last that counts
    _maps_problem,
    lambda network: {"operator": "elvit_restore", "prefix": network.prefix},
)
