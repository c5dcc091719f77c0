"""What parity holds EViT to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from algm_deploy.models.vit import Tokens
from algm_deploy.ops import reference
from algm_deploy.ops._rows import wide
from algm_deploy.ops.elvit import squared_distances
from algm_deploy.ops.evit import evit_distances, evit_record, evit_sources
from algm_deploy.parity.decisions import Floats, Ints
from algm_deploy.parity.merges.common import MergeParity, keys_of, measured
from algm_deploy.parity.replay import Replayed
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan


@dataclass(frozen=True, eq=False)
class EvitFacts:
    """What EViT decides on for one image: attention (R,) of cls as a multiple of an equal share, squared distances
    (R, R) of rows, the noise of both, and how many rows stay."""

    attention: Floats
    distance: Floats
    attention_noise: float
    distance_noise: float
    keep: int


def evit_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network) -> list[EvitFacts]:
    """Attention, distances and the noise of both."""
    keep = plan.evit_counts(network.grid[0] * network.grid[1])[plan.layers[stage]][1]

    def attention(tokens: Tokens) -> torch.Tensor:
        shares = keys_of(tokens)[:, network.prefix :, 0]
        return shares * shares.shape[1]

    def distances(tokens: Tokens) -> torch.Tensor:
        rows = wide(tokens.values[:, network.prefix :])
        return squared_distances(rows, rows)

    seen = zip(*(measured(replays, stage, of) for of in (attention, distances)), strict=True)
    return [EvitFacts(a.numpy(), b.numpy(), noise_a, noise_b, keep) for (a, noise_a), (b, noise_b) in seen]


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


def _record_problem(records: list[Ints], counts: Ints, plan: MergePlan, prefix: int) -> str | None:
    """Why what was told (N,) of EViT's merges of one image, in their order, cannot be, given the token counts."""
    facts = plan.evit_counts(len(records[0]))
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


def _node(plan: MergePlan, layer: int, network: Network) -> dict[str, Any]:
    patches = network.grid[0] * network.grid[1]
    rows, keep = plan.evit_counts(patches)[layer]
    return {"operator": "evit", "patches": patches, "rows": rows, "keep": keep, "prefix": network.prefix}


def _compared(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    """Distances, relative to the square of the longest row; attention is compared where a runtime is."""
    assert tokens.keys is not None
    prefix, values, attention = network.prefix, tokens.values.float(), tokens.keys[..., 0].float()
    patches = tokens.map.shape[1]
    rows, keep = plan.evit_counts(patches)[layer]
    record = torch.ops.algm.evit(values, tokens.map, attention, patches, rows, keep, prefix)[2].numpy()
    x, weights = values[:, prefix:], attention[:, prefix:]
    order, distance = (part.numpy() for part in evit_distances(x, weights, keep))
    kept, left = order[:, :keep], order[:, keep:]
    stays = reference.evit_sources(x.numpy(), weights.numpy(), keep) == np.arange(rows)
    expected = np.tile(np.arange(rows), (len(stays), 1))
    near = np.take_along_axis(kept, reference.nearest(distance, 1)[..., 0], 1)
    np.put_along_axis(expected, left, near, 1)
    taken = (np.take_along_axis(x.numpy(), index[:, :, None], 1) for index in (left, kept))
    error = np.abs(distance - reference.squared_distances(*taken)).max() / np.square(x.numpy()).sum(2).max()
    equal = np.array_equal(np.sort(kept, 1), np.stack([np.flatnonzero(one) for one in stays]))
    return float(error), equal and np.array_equal(record[:, :rows] - prefix, expected)


def _decided(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> torch.Tensor:
    prefix, patches = network.prefix, tokens.map.shape[1]
    keep = plan.evit_counts(patches)[layer][1]
    source = evit_sources(wide(tokens.values[:, prefix:]), keys_of(tokens)[:, prefix:, 0], keep)
    return evit_record(source, patches, prefix)


def _on_grounds(plan: MergePlan, layer: int, network: Network, tokens: Tokens, choice: Ints, grounds: Ints) -> Ints:
    """`choice` with every token that leaves in both restored from the nearest of those that stay in `grounds`.

    EViT decides which tokens stay, and on top of that from which of them the others are restored. Where one token stays
    instead of another, all that are near to either are restored from another, though nothing was decided on them.
    """
    prefix, rows = network.prefix, plan.evit_counts(len(choice))[layer][0]
    index = np.arange(prefix, prefix + rows)
    stays, staying = choice[:rows] == index, grounds[:rows] == index
    x = wide(tokens.values[:, prefix:])
    distance = squared_distances(x, x[:, torch.from_numpy(staying)])[0]
    near = torch.where(distance.isnan(), torch.inf, distance).argmin(1).numpy()
    told = choice.copy()
    told[:rows] = np.where(stays | staying, choice[:rows], index[staying][near])
    return told


def _maps_problem(maps: Sequence[Ints], counts: NDArray[Any], plan: MergePlan, network: Network) -> str | None:
    told = (_record_problem([m[i] for m in maps], counts[i], plan, network.prefix) for i in range(len(counts)))
    return next(filter(None, told), None)


EVIT = MergeParity(
    _node,
    _compared,
    _decided,
    evit_facts,
    lambda facts, _, after, plan, network: evit_problems(facts, after, network.prefix),
    lambda plan, layer, network, before, after: (after[: plan.evit_counts(len(after))[layer][0]], ()),
    _maps_problem,
    on_grounds=_on_grounds,
)
