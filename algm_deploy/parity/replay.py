"""PyTorch runs of a bundle's network with a runtime's own merge decisions forced: the truth it is compared with.

Every run is one image at a time, whatever batch the runtime had, so a runtime that mixes up images is found out. The
truth is fp64; the baseline is PyTorch in the bundle's precision. A runtime may err twice as much as the baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from algm_deploy.bundle import Bundle
from algm_deploy.lowering.bundling import load_network
from algm_deploy.merging import Replay, merge_inputs, replay_merging
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.vit import Tokens
from algm_deploy.ops.clap import clap_decisions, clap_rows, window_similarity
from algm_deploy.ops.gbm import gbm_decisions, gbm_rows, gbm_scores, gbm_similarity, gbm_threshold
from algm_deploy.parity.decisions import ClapFacts, GbmFacts, Ints
from algm_deploy.recipes import MergePlan

# Two implementations may each err twice as much as the baseline errs.
NOISE_FACTOR = 4
NOISE_FLOOR = 2.0**-22  # two units in the last place of a cosine near one


@dataclass(frozen=True)
class Replayed:
    """One image: scores (K, H, W) and the tokens that entered each merge."""

    scores: NDArray[np.float64]
    entering: tuple[Tokens, ...]


class ReplayNetwork:
    """The network of a bundle in one dtype, merging as it is told."""

    def __init__(self, bundle: Bundle, dtype: torch.dtype) -> None:
        recipe = bundle.recipe
        model = replay_merging(load_network(bundle, dtype), recipe.merging)
        self.prefix = model.encoder.prefix
        self._network = Deployed(model, recipe.network, "scores").eval()
        self._entering: list[Tokens] = []
        for module in self._network.modules():
            if isinstance(module, Replay):
                module.register_forward_pre_hook(lambda _, args: self._entering.append(args[0]))

    @torch.inference_mode()
    def __call__(self, image: NDArray[np.generic], maps: list[Ints]) -> Replayed:
        """Runs one image (3, H, W) with the token maps (N,) of its merges."""
        self._entering.clear()
        forced = tuple(torch.from_numpy(m)[None] for m in maps)
        scores, _, _ = self._network(torch.from_numpy(image)[None], merge_inputs(0.0, 0.0, forced))
        return Replayed(scores[0].double().numpy(), tuple(self._entering))


def clap_facts(
    truth: Tokens, baseline: Tokens, plan: MergePlan, threshold: float, network: tuple[list[int], int]
) -> ClapFacts:
    """Similarities and their noise, one image. `network` is its grid and prefix."""
    exact, rounded = (
        window_similarity(tokens.values, network[0], list(plan.window), network[1])[0] for tokens in (truth, baseline)
    )
    return ClapFacts(exact.numpy(), _noise(exact, rounded), float(np.float32(threshold)))


def gbm_facts(
    truth: list[Tokens], baseline: list[Tokens], plan: MergePlan, layer: int, threshold: float, prefix: int
) -> list[GbmFacts]:
    """Cosines, limits and their noise for images that decide together (one, unless the plan couples a batch)."""
    stacked = [_stacked(tokens) for tokens in (truth, baseline)]
    limits, scores, sources = [], [], None
    for tokens in stacked:
        best, _ = gbm_similarity(tokens.values, tokens.length, prefix, plan.semantics)
        limits.append(gbm_threshold(best, torch.tensor(threshold), plan.gbm_mode, float(layer), plan.batch)[:, 0])
        cosines, sources = gbm_scores(tokens.values, tokens.length, prefix, plan.semantics)
        scores.append(cosines)
    assert sources is not None
    return [
        GbmFacts(
            exact.numpy(),
            allowed.numpy(),
            float(limit),
            _noise(exact, rounded),
            NOISE_FACTOR * float(torch.nan_to_num(limit - other).abs()),
        )
        for exact, rounded, allowed, limit, other in zip(scores[0], scores[1], sources, *limits, strict=True)
    ]


def torch_maps(
    entering: list[Tokens], plan: MergePlan, layer: int, thresholds: tuple[float, float], grid: list[int], prefix: int
) -> list[Ints]:
    """The maps (N,) PyTorch decides on for images that decide together, given the tokens that enter the merge."""
    tokens = _stacked(entering)
    if layer in plan.clap_layers:
        similarity = window_similarity(tokens.values, grid, list(plan.window), prefix)
        place = clap_decisions(similarity, torch.tensor(thresholds[0]), plan.semantics, plan.batch, plan.order)
        return list(clap_rows(place, grid, list(plan.window), prefix)[0][:, prefix:].numpy())
    best, match = gbm_similarity(tokens.values, tokens.length, prefix, plan.semantics)
    limit = gbm_threshold(best, torch.tensor(thresholds[1]), plan.gbm_mode, float(layer), plan.batch)
    merged = gbm_decisions(best, limit, plan.semantics, plan.batch)
    row, _ = gbm_rows(merged, match, tokens.length, tokens.values.shape[1], prefix, plan.semantics)
    return list(row.gather(1, tokens.map).numpy())


def _noise(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    finite = torch.isfinite(exact)
    difference = (exact - rounded)[finite].abs()
    return max(NOISE_FACTOR * float(difference.max()) if difference.numel() else 0.0, NOISE_FLOOR)


def _stacked(tokens: list[Tokens]) -> Tokens:
    """Images that decide together as one batch; coupled images have equal lengths."""
    first = tokens[0]
    values, size, token_map, length = (torch.cat(parts) for parts in zip(*(t[:4] for t in tokens), strict=True))
    return Tokens(values, size, token_map, length, first.padded)
