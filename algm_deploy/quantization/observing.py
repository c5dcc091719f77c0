"""What enters each matrix product of a network while it runs on photos."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from algm_deploy.merging import deployed, merge_inputs
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.quantized import attention_of, products_of
from algm_deploy.models.vit import Attention, MergeInputs, VitNetwork
from algm_deploy.recipe.schema import Recipe

ROWS = 64  # of each window, evenly spread: enough to look for a range, and little to keep


@dataclass
class Observed:
    """Inputs of one product: lowest and highest of each channel (K), over every row, and some of the rows (n, K)."""

    low: Tensor
    high: Tensor
    rows: Tensor

    @property
    def largest(self) -> Tensor:
        """Largest magnitude of each channel (K)."""
        return torch.maximum(-self.low, self.high)

    def divided(self, factors: Tensor) -> Observed:
        """The same where channels were divided by positive factors (K)."""
        return Observed(self.low / factors, self.high / factors, self.rows / factors)


def thresholds_of(recipe: Recipe) -> MergeInputs:
    """The recipe's thresholds as the network takes them."""
    return merge_inputs(recipe.merging.clap_threshold, recipe.merging.gbm_threshold)


@torch.inference_mode()
def observe(model: VitNetwork, recipe: Recipe, windows: NDArray[np.generic]) -> dict[str, Observed]:
    """By product, what enters it while the recipe's network, merging included, runs on windows (n, 3, H, W)."""
    network = deployed(model, recipe)
    found: dict[str, list[Observed]] = {}
    with _watched(network, found):
        for window in windows:
            network(torch.from_numpy(window[None]), thresholds_of(recipe))
    return {name: _joined(parts) for name, parts in found.items()}


@torch.inference_mode()
def observe_attention(model: VitNetwork, recipe: Recipe, windows: NDArray[np.generic]) -> dict[str, Tensor]:
    """By attention, the largest magnitudes (3) of its scaled queries, its keys and its values, as `observe`."""
    network, found = deployed(model, recipe), dict[str, Tensor]()

    def watch(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, Attention)
        largest = torch.stack([part.abs().amax() for part in layer.qkv(inputs[0]).chunk(3, dim=-1)])
        largest[0] *= layer.scale
        found[name] = torch.maximum(largest, found.get(name, largest))

    hooks = [layer.register_forward_pre_hook(partial(watch, name)) for name, layer in attention_of(network.model)]
    try:
        for window in windows:
            network(torch.from_numpy(window[None]), thresholds_of(recipe))
    finally:
        for hook in hooks:
            hook.remove()
    return found


@contextmanager
def _watched(network: Deployed, found: dict[str, list[Observed]]) -> Iterator[None]:
    hooks = [layer.register_forward_pre_hook(_watcher(found, name)) for name, layer in products_of(network.model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _watcher(found: dict[str, list[Observed]], name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def watch(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2)
        some = rows[:: max(1, len(rows) // ROWS)].clone()
        found.setdefault(name, []).append(Observed(rows.amin(0), rows.amax(0), some))

    return watch


def _joined(parts: list[Observed]) -> Observed:
    low, high = (torch.stack([getattr(part, side) for part in parts]) for side in ("low", "high"))
    return Observed(low.amin(0), high.amax(0), torch.cat([part.rows for part in parts]))


def scaled(observed: Mapping[str, Observed], factors: Mapping[str, Tensor]) -> dict[str, Observed]:
    """What enters the products of a network whose channels were balanced by `factors`."""
    return {name: one.divided(factors[name]) if name in factors else one for name, one in observed.items()}
