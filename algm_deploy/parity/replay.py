"""PyTorch runs of a bundle's network with a runtime's own merge decisions forced: the truth it is compared with.

Every run is one image at a time, whatever batch the runtime had, so a runtime that mixes up images is found out. The
truth is fp64; the baseline is PyTorch in the runtime's precision. A runtime may err twice as much as the baseline.
Where a runtime computes with the levels of a calibrated bundle both are quantised, and in int8 the baseline jitters
(`jitter.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from algm_deploy.bundle.store import Bundle
from algm_deploy.merging import merge_inputs, merges_in, replay_merging
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.fp8 import use_fp8
from algm_deploy.models.loading import DTYPES, load_network
from algm_deploy.models.merges import REPLAYS, ReplayChoice, elvit_distances
from algm_deploy.models.quantized import computes_levels
from algm_deploy.models.scores import GridScores, Scores, upsample_scores
from algm_deploy.models.vit import Tokens, VitNetwork
from algm_deploy.ops._rows import wide
from algm_deploy.ops.clap import clap_decisions, clap_rows, window_similarity
from algm_deploy.ops.cts import cts_rows, cts_shared
from algm_deploy.ops.elvit import nearest, squared_distances
from algm_deploy.ops.evit import evit_record, evit_sources
from algm_deploy.ops.g2tm import g2tm_rows, neighbour_similarity
from algm_deploy.ops.gbm import gbm_decisions, gbm_rows, gbm_scores, gbm_similarity, gbm_threshold
from algm_deploy.ops.mpm import mpm_pairs, mpm_rows, mpm_similarity
from algm_deploy.ops.tome import SEMANTICS, tome_rows, tome_similarity
from algm_deploy.parity.decisions import (
    Cells,
    ClapFacts,
    CtsFacts,
    ElvitFacts,
    EvitFacts,
    G2tmFacts,
    GbmFacts,
    Ints,
    MaskFacts,
    MpmFacts,
)
from algm_deploy.parity.jitter import jittered
from algm_deploy.recipe.schema import MergePlan, Network, Precision

# Two implementations may each err twice as much as the baseline errs.
NOISE_FACTOR = 4
NOISE_FLOOR = 2.0**-22  # two units in the last place of a cosine near one

Doubles = NDArray[np.float64]


class Error(NamedTuple):
    """Root mean square and largest magnitude, of errors or of what errs."""

    rms: float
    largest: float


@dataclass(frozen=True, eq=False)
class Replayed:
    """One image under forced decisions.

    `truth` and `baseline` are the tokens that entered each merge. `true_masks` and `baseline_masks` are the masks
    (Q, S), before their activation, by which queries choose the cells they attend to, of each layer that has them do
    so. `error` is that of the baseline's scores, and `scale` the size of the true ones. Scores are kept as the network
    gives them and made full-size on demand: for 150 classes of 512x512 pixels that is 0.3 GB.
    """

    truth: tuple[Tokens, ...]
    baseline: tuple[Tokens, ...]
    error: Error
    scale: Error
    full_size: Callable[[], Doubles]
    true_masks: tuple[torch.Tensor, ...] = ()
    baseline_masks: tuple[torch.Tensor, ...] = ()

    def scores(self) -> Doubles:
        """True scores (K, H, W)."""
        return self.full_size()


class Replays:
    """Replays of the images of one verification; the same image with the same decisions is run once.

    `precision`: of the baseline.
    """

    def __init__(self, bundle: Bundle, images: NDArray[Any], precision: Precision) -> None:
        self._images = images
        levels = computes_levels(bundle, precision)
        change = use_fp8 if precision == "fp8" and not levels else jittered
        self._truth = _ReplayNetwork(bundle, torch.float64, levels)
        self._baseline = _ReplayNetwork(bundle, DTYPES[precision], levels, change)
        self._known: dict[tuple[int, bytes], Replayed] = {}

    def __call__(self, index: int, maps: Sequence[Ints], masks: Sequence[Cells] = ()) -> Replayed:
        """The image of that index, merged by the token maps (N,) of its merges.

        Where queries choose the cells that they attend to, they take those of `masks` (Q, S), layer by layer.
        """
        told = [array.tobytes() for array in maps] + [array.tobytes() for array in masks]
        key = index, hashlib.sha256(b"".join(told)).digest()
        if key not in self._known:
            self._known[key] = self._run(self._images[index], maps, masks)
        return self._known[key]

    def _run(self, image: NDArray[Any], maps: Sequence[Ints], masks: Sequence[Cells]) -> Replayed:
        truth, tokens, deciding = self._truth(image, maps, masks)
        baseline, tokens_baseline, deciding_baseline = self._baseline(image, maps, masks)
        network = self._truth.network
        scores = full_size(truth, network)
        error = error_of(full_size(baseline, network) - scores)
        return Replayed(
            tokens,
            tokens_baseline,
            error,
            error_of(scores),
            partial(full_size, truth, network),
            deciding,
            deciding_baseline,
        )


class _ReplayNetwork:
    """The network of a bundle in one dtype, merging as it is told; `levels` tells whether its products are quantised.
    `change` gets it once, to alter it in place."""

    def __init__(
        self,
        bundle: Bundle,
        dtype: torch.dtype,
        levels: bool,
        change: Callable[[VitNetwork], object] = lambda model: model,
    ) -> None:
        self.network = bundle.recipe.network
        replaying = replay_merging(load_network(bundle, dtype, levels), bundle.recipe.merging)
        self._model = Deployed(replaying, self.network, "scores").eval().model
        change(self._model)
        self._entering: list[Tokens] = []
        self._deciding: list[torch.Tensor] = []
        for module in self._model.modules():
            if isinstance(module, REPLAYS):
                module.register_forward_pre_hook(lambda _, args: self._entering.append(args[0]))
            elif isinstance(module, ReplayChoice):
                module.register_forward_pre_hook(lambda _, args: self._deciding.append(args[0][0]))

    @torch.inference_mode()
    def __call__(
        self, image: NDArray[Any], maps: Sequence[Ints], masks: Sequence[Cells]
    ) -> tuple[Scores, tuple[Tokens, ...], tuple[torch.Tensor, ...]]:
        """Scores of one image (3, H, W), the tokens that entered each merge, and the masks that were decided on."""
        self._entering.clear()
        self._deciding.clear()
        forced, chosen = (tuple(torch.from_numpy(array)[None] for array in arrays) for arrays in (maps, masks))
        result = self._model(torch.from_numpy(image)[None], merge_inputs(0.0, 0.0, forced, masks=chosen))
        result = result._replace(stages=[], chosen=()) if isinstance(result, GridScores) else result._replace(stages=[])
        return result, tuple(self._entering), tuple(self._deciding)


@torch.inference_mode()
def full_size(scores: Scores, network: Network) -> Doubles:
    """Scores (K, H, W) of one image as the deployed network gives them."""
    full: Doubles = wide(upsample_scores(scores, network.grid, network.image_size))[0].double().numpy()
    return full


def error_of(x: Doubles) -> Error:
    """Of fp64 numbers; NaN where one is. Without arrays in between, each as large as the scores."""
    return Error(rms(x), float(max(x.max(), -x.min())))


def rms(x: Doubles) -> float:
    """Root mean square; NaN where a value is."""
    return float(np.sqrt(np.vdot(x, x) / x.size))


# --- what the merges decided on ---------------------------------------------------------------------------------------


def clap_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network) -> list[ClapFacts]:
    """Similarities, their noise and the least to merge, for images that decide together."""
    seen = [[_similarity(t[stage], plan, network) for t in (replay.truth, replay.baseline)] for replay in replays]
    noises = [_noise(exact, rounded) for exact, rounded in seen]
    if plan.clap == "budget":
        count = merges_in(plan, plan.layers[stage], network)
        return [
            ClapFacts(exact.numpy(), _lowest(exact, count), noise, count)
            for (exact, _), noise in zip(seen, noises, strict=True)
        ]
    threshold = float(np.float32(plan.clap_threshold))
    sure = [int((exact > threshold + noise).sum()) for (exact, _), noise in zip(seen, noises, strict=True)]
    return [
        ClapFacts(exact.numpy(), threshold, noise, count)
        for (exact, _), noise, count in zip(seen, noises, _shared(sure, plan), strict=True)
    ]


def gbm_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network) -> list[GbmFacts]:
    """Cosines, limits, their noise and the least to merge, for images that decide together."""
    if plan.gbm == "budget":
        return _counted_facts(replays, stage, plan, network, plan.semantics)
    truth, baseline = (_stacked([r.truth[stage] for r in replays]), _stacked([r.baseline[stage] for r in replays]))
    limits = [_limit(tokens, plan, stage, network.prefix) for tokens in (truth, baseline)]
    exact, sources = gbm_scores(truth.values, truth.length, network.prefix, plan.semantics)
    rounded, _ = gbm_scores(baseline.values, baseline.length, network.prefix, plan.semantics)
    facts = [
        GbmFacts(e.numpy(), allowed.numpy(), float(limit), _noise(e, r), _limit_noise(limit, other))
        for e, r, allowed, limit, other in zip(exact, rounded, sources, *limits, strict=True)
    ]
    counts = _shared([fact.sure for fact in facts], plan)
    return [fact.with_least(count) for fact, count in zip(facts, counts, strict=True)]


def tome_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network) -> list[GbmFacts]:
    """As for GBM by a budget."""
    return _counted_facts(replays, stage, plan, network, SEMANTICS)


def elvit_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network) -> list[ElvitFacts]:
    """Distances and their noise."""
    facts = []
    for replay in replays:
        exact, rounded = (
            elvit_distances(tokens[stage].values, plan, network.grid, network.prefix)[0][0]
            for tokens in (replay.truth, replay.baseline)
        )
        facts.append(ElvitFacts(exact.numpy(), plan.elvit_neighbours, _noise(exact, rounded)))
    return facts


def evit_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network) -> list[EvitFacts]:
    """Attention, distances and the noise of both."""
    keep = plan.evit_counts(network.grid[0] * network.grid[1])[plan.layers[stage]][1]
    facts = []
    for replay in replays:
        tokens = [t[stage] for t in (replay.truth, replay.baseline)]
        shares = [_keys(t)[0, network.prefix :, 0] for t in tokens]
        attention = [share * len(share) for share in shares]
        rows = [wide(t.values[:, network.prefix :]) for t in tokens]
        distances = [squared_distances(x, x)[0] for x in rows]
        facts.append(
            EvitFacts(attention[0].numpy(), distances[0].numpy(), _noise(*attention), _noise(*distances), keep)
        )
    return facts


def g2tm_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network) -> list[G2tmFacts]:
    """Similarities of patches that touch, and their noise."""
    facts = []
    for replay in replays:
        exact, rounded = (
            neighbour_similarity(t[stage].values, network.grid, network.prefix)[0]
            for t in (replay.truth, replay.baseline)
        )
        facts.append(G2tmFacts(exact.numpy(), float(np.float32(plan.clap_threshold)), _noise(exact, rounded)))
    return facts


def mpm_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network) -> list[MpmFacts]:
    """Similarities of all tokens, and their noise."""
    facts = []
    for replay in replays:
        exact, rounded = (
            mpm_similarity(t[stage].values, t[stage].length, network.prefix)[0] for t in (replay.truth, replay.baseline)
        )
        facts.append(MpmFacts(exact.numpy(), _noise(exact, rounded)))
    return facts


def cts_facts(replays: Sequence[Replayed], stage: int, plan: MergePlan) -> list[CtsFacts]:
    """Scores of the policy network, their noise, and how many superpatches share a token."""
    facts = []
    for replay in replays:
        exact, rounded = (_keys(t[stage])[0, :, 0].double() for t in (replay.truth, replay.baseline))
        noise = float(np.maximum(_noise(exact, rounded), NOISE_FLOOR * float(exact.abs().max())))
        facts.append(CtsFacts(exact.numpy(), noise, plan.cts_shared))
    return facts


def mask_facts(replayed: Replayed) -> list[MaskFacts]:
    """What the queries of each layer that chooses cells decided on, and its noise."""
    facts = []
    for exact, rounded in zip(replayed.true_masks, replayed.baseline_masks, strict=True):
        noise = NOISE_FACTOR * float((exact - rounded).abs().max())
        floor = NOISE_FLOOR * float(exact.abs().max())
        facts.append(MaskFacts(exact.numpy(), (rounded >= 0).numpy(), float(np.maximum(noise, floor))))
    return facts


def _counted_facts(
    replays: Sequence[Replayed], stage: int, plan: MergePlan, network: Network, semantics: str
) -> list[GbmFacts]:
    """Facts of a bipartite merge by count: the similarity to reach is that of the last one that merges."""
    count = merges_in(plan, plan.layers[stage], network)
    facts = []
    for replay in replays:
        exact, rounded = (
            gbm_scores(_compared(tokens[stage]), tokens[stage].length, network.prefix, semantics)
            for tokens in (replay.truth, replay.baseline)
        )
        scores, sources = exact[0][0], exact[1][0]
        best = scores.amax(1).where(sources, torch.tensor(-torch.inf))
        noise = _noise(scores, rounded[0][0])
        facts.append(GbmFacts(scores.numpy(), sources.numpy(), _lowest(best, count), noise, 0.0, count))
    return facts


def _lowest(similarity: torch.Tensor, count: int) -> float:
    """The lowest of the `count` largest similarities; infinity where nothing merges."""
    return float(similarity.sort(descending=True).values[count - 1]) if count else np.inf


def torch_maps(entering: Sequence[Tokens], stage: int, plan: MergePlan, network: Network) -> list[Ints]:
    """The maps (N,) PyTorch decides on for images that decide together, given the tokens that enter the merge."""
    tokens = _stacked(entering)
    prefix, grid, window = network.prefix, list(network.grid), list(plan.window)
    layer = plan.layers[stage]
    merge = plan.merge_in(layer)
    if merge == "tome":
        best, match = tome_similarity(_keys(tokens), prefix)
        r = merges_in(plan, layer, network)
        return list(tome_rows(best, match, r, tokens.values.shape[1], prefix).gather(1, tokens.map).numpy())
    if merge == "elvit":
        distance, _ = elvit_distances(tokens.values, plan, network.grid, prefix)
        return list((prefix + nearest(distance, plan.elvit_neighbours)[..., -1]).numpy())
    if merge == "evit":
        keep = plan.evit_counts(tokens.map.shape[1])[layer][1]
        source = evit_sources(wide(tokens.values[:, prefix:]), _keys(tokens)[:, prefix:, 0], keep)
        return list(evit_record(source, tokens.map.shape[1], prefix).numpy())
    if merge == "cts":
        shared = cts_shared(_keys(tokens)[..., 0], plan.cts_shared)
        return list(cts_rows(shared, network.grid, prefix, plan.cts_shared)[1].numpy())
    if merge == "g2tm":
        linked = neighbour_similarity(tokens.values, grid, prefix) > torch.tensor(plan.clap_threshold)
        return list(g2tm_rows(linked, grid, prefix)[0][:, prefix:].numpy())
    if merge == "mpm":
        pairs = mpm_pairs(mpm_similarity(tokens.values, tokens.length, prefix), tokens.length, prefix)
        return list(mpm_rows(pairs, tokens.length, prefix)[0].gather(1, tokens.map).numpy())
    if merge == "clap":
        similarity = window_similarity(tokens.values, grid, window, prefix)
        threshold, budget = torch.tensor(plan.clap_threshold), merges_in(plan, layer, network)
        place = clap_decisions(similarity, threshold, plan.semantics, plan.batch, plan.order, plan.clap, budget)
        return list(clap_rows(place, grid, window, prefix)[0][:, prefix:].numpy())
    best, match = gbm_similarity(tokens.values, tokens.length, prefix, plan.semantics)
    scale, budget = torch.tensor(plan.gbm_threshold), merges_in(plan, layer, network)
    merged = gbm_decisions(best, scale, plan.gbm, float(layer), plan.semantics, plan.batch, budget)
    row, _ = gbm_rows(merged, match, tokens.length, tokens.values.shape[1], prefix, plan.semantics)
    return list(row.gather(1, tokens.map).numpy())


def _compared(tokens: Tokens) -> torch.Tensor:
    """What a bipartite merge compares: with ToMe keys, which no other plan hands over."""
    return tokens.values if tokens.keys is None else tokens.keys


def _keys(tokens: Tokens) -> torch.Tensor:
    assert tokens.keys is not None
    return tokens.keys


def _similarity(tokens: Tokens, plan: MergePlan, network: Network) -> torch.Tensor:
    return window_similarity(tokens.values, list(network.grid), list(plan.window), network.prefix)[0]


def _limit(tokens: Tokens, plan: MergePlan, stage: int, prefix: int) -> torch.Tensor:
    """Similarities to reach (B)."""
    best, _ = gbm_similarity(tokens.values, tokens.length, prefix, plan.semantics)
    scale, divisor = torch.tensor(plan.gbm_threshold), float(plan.layers[stage])
    return gbm_threshold(best, scale, plan.gbm, divisor, plan.batch)[:, 0]


def _shared(counts: list[int], plan: MergePlan) -> list[int]:
    return [min(counts)] * len(counts) if plan.batch == "batch_min" else counts


def _noise(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """NaN where a similarity is; forbidden pairs, which are -inf, have none."""
    difference = (exact - rounded)[exact != -torch.inf].abs()
    measured = NOISE_FACTOR * float(difference.max()) if difference.numel() else 0.0
    return float(np.maximum(measured, NOISE_FLOOR))


def _limit_noise(limit: torch.Tensor, other: torch.Tensor) -> float:
    """Infinite limits are exact, and one that is undefined allows no merge whatever its noise."""
    return NOISE_FACTOR * float(torch.nan_to_num(limit - other).abs())


def _stacked(tokens: Sequence[Tokens]) -> Tokens:
    """Images that decide together as one batch; coupled images have equal lengths."""
    values, size, token_map, length = (torch.cat(parts) for parts in zip(*(t[:4] for t in tokens), strict=True))
    keys = None if tokens[0].keys is None else torch.cat([_keys(t) for t in tokens])
    return Tokens(values, size, token_map, length, tokens[0].padded, keys)
