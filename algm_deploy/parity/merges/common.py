"""What parity asks of a merge, and what several merges need to answer it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from algm_deploy.models.vit import Tokens
from algm_deploy.parity.decisions import Flags, Floats, Ints, map_problem
from algm_deploy.parity.replay import NOISE_FACTOR, NOISE_FLOOR, Replayed
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan, fresh_merges

Facts = TypeVar("Facts")
UNMERGE: dict[str, Any] = {"operator": "unmerge", "prefix": 0}


def patch_maps_problem(maps: Sequence[Ints], counts: NDArray[Any], plan: MergePlan, network: Network) -> str | None:
    """Why the token maps (B, N) of the merges that a plan makes, in their order, cannot be maps of these token counts
    (B, merges), where one token stands for each patch."""
    prefix, fresh, images = network.prefix, fresh_merges(plan, network), len(counts)
    for image in range(images):
        if problem := map_problem([m[image] for m in maps], prefix, fresh):
            return f"image {image} of {images}: {problem}"
    if any((counts[:, i] != m.max(1) + 1 - prefix).any() for i, m in enumerate(maps)):
        return "the token counts contradict the token maps"
    return None


def _decided_once(plan: MergePlan, layer: int, network: Network, tokens: Tokens, choice: Ints, grounds: Ints) -> Ints:
    return choice


class MergeParity(NamedTuple, Generic[Facts]):
    """What the parity chain asks about a merge: a row of `MERGES`, whose module defines its `Facts`.

    node: its node in the exported graph, for a layer of the plan.
    compared: on tokens that enter it, the largest difference of PyTorch's similarities to their NumPy definition, and
        whether the token maps are equal on PyTorch's similarities.
    decided: the maps (B, N) PyTorch decides on for images that decide together.
    facts: what it decided on in the merge of that index, one an image, for images that decide together.
    problems: what in a decision for one image the noise cannot explain; empty when it is excused. Given are the
        composed token maps (N,) around the merge.
    decisions: those (T,) that the composed token maps (N,) before and after it tell of, and what of them stands in
        order, in that order.
    maps_problem: why token maps cannot be.
    outlet: the node that restores every patch for the decoder, where the method does.
    on_grounds: for a merge whose second decision is made on its first. Given the tokens of one image and the decisions
        (N,) of two, those of the first one with the second decision made anew on the other's first, so that a
        difference in the first counts once. For other merges those of the first one as they are.
    """

    node: Callable[[MergePlan, int, Network], dict[str, Any]]
    compared: Callable[[MergePlan, int, Network, Tokens], tuple[float, bool]]
    decided: Callable[[MergePlan, int, Network, Tokens], torch.Tensor]
    facts: Callable[[Sequence[Replayed], int, MergePlan, Network], list[Facts]]
    problems: Callable[[Facts, Ints, Ints, MergePlan, Network], list[str]]
    decisions: Callable[[MergePlan, int, Network, Ints, Ints], tuple[NDArray[Any], Sequence[int] | Ints]]
    maps_problem: Callable[[Sequence[Ints], NDArray[Any], MergePlan, Network], str | None] = patch_maps_problem
    outlet: Callable[[Network], dict[str, Any]] = lambda network: UNMERGE
    on_grounds: Callable[[MergePlan, int, Network, Tokens, Ints, Ints], Ints] = _decided_once


# --- of tokens --------------------------------------------------------------------------------------------------------


def keys_of(tokens: Tokens) -> torch.Tensor:
    """What their merge compares instead of the tokens."""
    assert tokens.keys is not None
    return tokens.keys


def stacked(tokens: Sequence[Tokens]) -> Tokens:
    """Images that decide together as one batch; coupled images have equal lengths."""
    values, size, token_map, length = (torch.cat(parts) for parts in zip(*(t[:4] for t in tokens), strict=True))
    keys = None if tokens[0].keys is None else torch.cat([keys_of(t) for t in tokens])
    return Tokens(values, size, token_map, length, tokens[0].padded, keys)


# --- of similarities --------------------------------------------------------------------------------------------------


def measured(
    replays: Sequence[Replayed], stage: int, of: Callable[[Tokens], torch.Tensor]
) -> list[tuple[torch.Tensor, float]]:
    """Of each image what the merge of that index decides on, which is what `of` makes (1, ...) of the tokens that enter
    it, and its noise."""
    seen = ([of(tokens[stage])[0] for tokens in (replay.truth, replay.baseline)] for replay in replays)
    return [(exact, noise_of(exact, rounded)) for exact, rounded in seen]


def noise_of(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """NaN where a similarity is; forbidden pairs, which are -inf, have none."""
    difference = (exact - rounded)[exact != -torch.inf].abs()
    noise = NOISE_FACTOR * float(difference.max()) if difference.numel() else 0.0
    return float(np.maximum(noise, NOISE_FLOOR))


def lowest(similarity: torch.Tensor, count: int) -> float:
    """The lowest of the `count` largest similarities; infinity where nothing merges."""
    return float(similarity.sort(descending=True).values[count - 1]) if count else np.inf


def least_of(counts: list[int], plan: MergePlan) -> list[int]:
    """How many have to merge in each image, given how many can: where images decide together, the fewest of them."""
    return [min(counts)] * len(counts) if plan.batch == "batch_min" else counts


def largest_difference(given: list[NDArray[Any]], exact: list[NDArray[Any]]) -> float:
    """Of similarities; equal infinities do not differ."""
    pairs = zip(given, exact, strict=True)
    return max(float(np.abs(np.subtract(g, e, out=np.zeros_like(g), where=g != e)).max(initial=0)) for g, e in pairs)


# --- of decisions -----------------------------------------------------------------------------------------------------


def of_one_token(rows: Ints) -> Flags:
    """Which windows have one row for all their patches, given those of each (M, patches)."""
    one: Flags = (rows == rows[:, :1]).all(1)
    return one


def out_of_order(ours: Sequence[int] | Ints, other: Sequence[int] | Ints) -> int:
    """How many of the common items would have to be moved for the other order."""
    place = {int(item): index for index, item in enumerate(other)}
    places = [place[int(item)] for item in ours if int(item) in place]
    ends: list[int] = []  # the smallest end of an ascending run of each length
    for index in places:
        at = bisect_left(ends, index)
        ends[at : at + 1] = [index]
    return len(places) - len(ends)


def count_problems(merge: str, what: str, merged: Floats, rest: Floats, least: int, noise: float) -> list[str]:
    """Another count than the plan's, and similarities that stayed though they are higher than one that merged."""
    problems = []
    if len(merged) != least:
        problems.append(f"{merge}: merged {len(merged)} {what}s instead of {least}")
    if (higher := rest.max(initial=-np.inf) - merged.min(initial=np.inf)) > noise:
        problems.append(f"{merge}: left a {what} {higher:.1e} above one that merged")
    return problems


class _Limited(Protocol):
    """Facts of one image: the similarity to reach, its noise, and how many have to merge at least."""

    @property
    def limit(self) -> float: ...
    @property
    def noise(self) -> float: ...
    @property
    def least(self) -> int: ...


def threshold_problems(
    merge: str, what: str, merged: Floats, rest: Floats, facts: _Limited, plan: MergePlan, slack: float
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
