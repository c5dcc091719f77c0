"""DToP before the parity chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from algm_deploy.models.vit import Tokens
from algm_deploy.ops import reference
from algm_deploy.ops.dtop import dtop_rows, dtop_stays
from algm_deploy.parity.decisions import Flags, Floats, Ints
from algm_deploy.parity.merges.common import MergeParity, keys_of, measured
from algm_deploy.parity.replay import Replayed
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan


@dataclass(frozen=True, eq=False)
class DtopFacts:
    """What DToP decides on for one image: confidence (R, K) of the tokens that reach it, the one to be above, the noise
    of confidences, and how many of each class stay though they are sure."""

    confidence: Floats
    limit: float
    noise: float
    keep: int


def dtop_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan) -> list[DtopFacts]:
    """Confidences and their noise."""
    limit = float(np.float32(plan.clap_threshold))
    seen = measured(replays, stage, lambda tokens: keys_of(tokens).double())
    return [DtopFacts(exact.numpy(), limit, noise, plan.dtop_keep) for exact, noise in seen]


def dtop_problems(facts: DtopFacts, before: Ints, after: Ints, prefix: int) -> list[str]:
    """What in DToP's choice for one image the noise cannot explain; empty when it is excused.

    `before` and `after` are the composed token maps (N,) around it.
    """
    stays = _staying(before, after, prefix)
    if not np.array_equal(after, reference.dtop_rows(before[None], stays[None], prefix)[0]):
        return ["DToP: the token map is not one that tokens leave when some go"]
    if not np.isfinite([facts.noise, *facts.confidence.ravel()]).all():
        return ["DToP: confidences are not finite"]
    best, noise, problems = facts.confidence.max(1), facts.noise, []
    if (below := (facts.limit - best[~stays]).max(initial=-np.inf)) > noise:
        problems.append(f"DToP: a token left that is {below:.1e} below the threshold")
    # The classes that a token may be of, and those that stay though they are sure of one class beyond noise.
    may = facts.confidence >= best[:, None] - noise
    sure = stays & (may.sum(1) == 1) & (best > facts.limit + noise)
    if (most := may[sure].sum(0).max(initial=0)) > facts.keep:
        problems.append(f"DToP: {most} tokens stay that are sure of one class, instead of {facts.keep}")
    surer = (best[stays] >= best[~stays, None] - noise).astype(np.int64) @ may[stays].astype(np.int64)
    if alone := int((~((surer >= facts.keep) & may[~stays]).any(1)).sum()):
        problems.append(f"DToP: {alone} tokens left of whose class fewer than {facts.keep} surer ones stay")
    return problems


def _staying(before: Ints, after: Ints, prefix: int) -> Flags:
    """Which of the rows (R,) that reach it stay."""
    there = before >= 0
    stays = np.zeros(before.max() + 1, bool)
    stays[before[there]] = after[there] >= 0
    return stays[prefix:]


def _node(plan: MergePlan, layer: int, network: Network) -> dict[str, Any]:
    return {"operator": "dtop", "prefix": network.prefix, "keep": plan.dtop_keep}


def _compared(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> tuple[float, bool]:
    """Tokens, which are copies; confidences are compared where a runtime is."""
    values, confidence, tau = tokens.values.float(), keys_of(tokens).float(), torch.tensor(plan.clap_threshold)
    given, keep = (values, tokens.map, tokens.length, confidence, tau), plan.dtop_keep
    ours = [part.numpy() for part in torch.ops.algm.dtop(*given, network.prefix, keep)]
    exact = reference.dtop(*(part.numpy() for part in given), prefix=network.prefix, keep=keep)
    return float(np.abs(ours[0] - exact[0]).max()), all(map(np.array_equal, ours[1:], exact[1:]))


def _decided(plan: MergePlan, layer: int, network: Network, tokens: Tokens) -> torch.Tensor:
    facts = torch.tensor(plan.clap_threshold), tokens.length, network.prefix, plan.dtop_keep
    return dtop_rows(tokens.values, tokens.map, dtop_stays(keys_of(tokens), *facts), network.prefix)[2]


def _maps_problem(maps: Sequence[Ints], counts: NDArray[Any], plan: MergePlan, network: Network) -> str | None:
    """Tokens are numbered in the order of their patches, and none comes back."""
    for index, token_map in enumerate(maps):
        for patches, count in zip(token_map, counts[:, index], strict=True):
            if not np.array_equal(patches[patches >= 0], network.prefix + np.arange(count)):
                return f"token map {index} does not number the {count} tokens that are counted in the order of patches"
    if any(((before < 0) & (after >= 0)).any() for before, after in pairwise(maps)):
        return "a token is in a token map that has left before"
    return None


DTOP = MergeParity(
    _node,
    _compared,
    _decided,
    lambda replays, stage, plan, _: dtop_facts(replays, stage, plan),
    lambda facts, before, after, plan, network: dtop_problems(facts, before, after, network.prefix),
    lambda plan, layer, network, before, after: (_staying(before, after, network.prefix), ()),
    _maps_problem,
)
