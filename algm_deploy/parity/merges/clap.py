"""What parity holds CLAP to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from algm_deploy.merging import merges_in
from algm_deploy.models.vit import Tokens
from algm_deploy.ops import reference
from algm_deploy.ops.clap import clap_decisions, clap_rows, window_members, window_similarity
from algm_deploy.parity.decisions import Flags, Floats, Ints
from algm_deploy.parity.merges.common import (
    MergeParity,
    count_problems,
    least_of,
    lowest,
    measured,
    of_one_token,
    threshold_problems,
)
from algm_deploy.parity.replay import Replayed
from algm_deploy.recipe.network import Network, Size
from algm_deploy.recipe.plan import MergePlan


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


def clap_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network) -> list[ClapFacts]:
    """Similarities, their noise and the least to merge, for images that decide together."""
    places = list(network.grid), list(plan.window), network.prefix
    seen = measured(replays, stage, lambda tokens: window_similarity(tokens.values, *places))
    if plan.clap == "budget":
        count = merges_in(plan, plan.layers[stage], network)
        return [ClapFacts(exact.numpy(), lowest(exact, count), noise, count) for exact, noise in seen]
    threshold = float(np.float32(plan.clap_threshold))
    sure = least_of([int((exact > threshold + noise).sum()) for exact, noise in seen], plan)
    return [ClapFacts(exact.numpy(), threshold, noise, least) for (exact, noise), least in zip(seen, sure, strict=True)]


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
        problems = count_problems("CLAP", "window", in_order, rest, facts.least, facts.noise)
    else:
        problems = threshold_problems("CLAP", "window", in_order, rest, facts, plan, facts.noise)
    # Against the lowest one so far: many small steps may not add up to a large one.
    rise = (in_order - np.minimum.accumulate(in_order)).max(initial=0)
    if plan.order == "published" and rise > facts.noise:
        problems.append(f"CLAP: two windows are in the wrong order, {rise:.1e} apart")
    return problems


def _node(plan: MergePlan, layer: int, network: Network) -> dict[str, Any]:
    return {
        "operator": "clap",
        "rule": plan.clap,
        "grid": list(network.grid),
        "window": list(plan.window),
        "order": plan.order,
        "prefix": network.prefix,
        "semantics": plan.semantics,
        "batch": plan.batch,
        "budget": merges_in(plan, layer, network),
    }


def _compared(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    grid, window, prefix = network.grid, plan.window, network.prefix
    tau = torch.tensor(plan.clap_threshold)
    rule = plan.semantics, plan.batch, plan.order, plan.clap, merges_in(plan, layer, network)
    attributes = (list(grid), list(window), prefix, *rule)
    ours = torch.ops.algm.clap(tokens.values, tokens.size, tau, *attributes)[2].numpy()
    similarity = window_similarity(tokens.values, list(grid), list(window), prefix).numpy()
    exact = reference.window_similarity(tokens.values.float().numpy(), grid, window, prefix)
    merged = reference.clap_decisions(similarity, float(tau), *rule)
    expected = reference.clap_rows(merged, grid, window, prefix)[0][:, prefix:]
    return float(np.abs(similarity - exact).max()), np.array_equal(ours, expected)


def _decided(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> torch.Tensor:
    grid, window, prefix = list(network.grid), list(plan.window), network.prefix
    similarity = window_similarity(tokens.values, grid, window, prefix)
    threshold, budget = torch.tensor(plan.clap_threshold), merges_in(plan, layer, network)
    place = clap_decisions(similarity, threshold, plan.semantics, plan.batch, plan.order, plan.clap, budget)
    return clap_rows(place, grid, window, prefix)[0][:, prefix:]


def _decisions(plan: MergePlan, layer: int, network: Network, before: Ints, after: Ints) -> tuple[Flags, Ints]:
    """Every window merges or not, and has its place among those that do."""
    windows = _merged_windows(after, plan, network.grid)
    return np.isin(np.arange(len(window_members(network.grid, plan.window))), windows), windows


def _merged_windows(token_map: Ints, plan: MergePlan, grid: Size) -> Ints:
    """The windows whose patches share a token, in the order of the tokens."""
    rows = token_map[window_members(grid, plan.window)]
    merged = of_one_token(rows)
    return np.flatnonzero(merged)[np.argsort(rows[merged, 0])]


def _clap_map(windows: Ints, grid: Size, plan: MergePlan, prefix: int) -> Ints:
    token_map = np.full(grid[0] * grid[1], -1, dtype=np.int64)
    token_map[window_members(grid, plan.window)[windows]] = prefix + np.arange(len(windows))[:, None]
    left = np.flatnonzero(token_map < 0)
    token_map[left] = prefix + len(windows) + np.arange(len(left))
    return token_map


CLAP = MergeParity(
    _node,
    _compared,
    _decided,
    clap_facts,
    lambda facts, _, after, plan, network: clap_problems(facts, after, plan, network.grid, network.prefix),
    _decisions,
)
