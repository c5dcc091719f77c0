"""Calibrates a network for int8 or fp8: measures ranges on photos, and keeps out of it what costs too many labels.

For int8 channels are balanced; the steps of e4m3 grow with the values, so it gains nothing by that. Ranges are those of
the deployed network: with merging on, so that merged tokens are among what was seen.

Which products are not quantised is decided as in partial quantisation (Wu et al., 2020, arXiv:2004.09602, section 6):
every product is quantised alone, and ranked by the labels it changes; the most sensitive ones are kept as they are, one
after the other, until the whole network keeps the label agreement that the recipe wants. Both networks decide freely,
so a product counts with what it changes in the merges. Attention's own products, which not every runtime computes in
int8, are searched after all others, and beside these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from tqdm import tqdm

from algm_deploy.bundle.records import Quantization, QuantizedAttention, QuantizedProduct
from algm_deploy.errors import ExportError
from algm_deploy.merging import deployed
from algm_deploy.models.quantized import WEIGHT_LEVELS, products_of, quantized
from algm_deploy.models.vit import VitNetwork, share_parameters
from algm_deploy.quantization.balancing import ALPHA, balance
from algm_deploy.quantization.observing import observe, observe_attention, scaled, thresholds_of
from algm_deploy.quantization.ranges import attention_of, e4m3_product_of, product_of
from algm_deploy.recipe.schema import Recipe

_INT8_RANGES = "lowest to highest, zero in the middle unless one side is over four times the other"
_E4M3_RANGES = "powers of two that bring the largest magnitude into the range of e4m3"
SEARCHED_WINDOWS = 4  # of those that ranges are measured on; each product runs on each of them
Labels = NDArray[np.generic]
Product = TypeVar("Product", QuantizedProduct, QuantizedAttention)


def calibrate(
    model: VitNetwork, recipe: Recipe, windows: NDArray[np.generic], progress: bool = True
) -> tuple[VitNetwork, Quantization]:
    """A network that equals `model` bit for bit, in int8 with balanced channels, and how to quantise it.

    Args:
        model: fp32, merge slots empty. Not changed.
        recipe: in int8 or fp8, with the merge plan, and the label agreement to keep.
        windows: (n, 3, H, W) pixels of photos like those that the bundle will see, n >= 1.
        progress: show a bar.

    Raises:
        ExportError: the network gives NaN or infinity on a window, or has no product to quantise.
    """
    if not dict(products_of(model)):
        raise ExportError(f"expected a network with blocks to quantise, {recipe.name} has none: export it in fp32")
    observed = observe(model, recipe, windows)
    broken = [name for name, one in observed.items() if not one.largest.isfinite().all()]
    if broken:
        raise ExportError(f"expected finite values to calibrate on, {broken[0]} is given others: look at the weights")
    if recipe.precision == "fp8":
        products = [e4m3_product_of(name, one) for name, one in observed.items()]
        return model, _searched(model, recipe, windows, products, (), _E4M3_RANGES, progress)
    balanced = _own_copy(model)
    inputs = scaled(observed, balance(balanced, observed))
    _check_equal(model, balanced, recipe, windows[:1])
    products = [product_of(name, inputs[name]) for name in observed]
    attention = [attention_of(name, one) for name, one in observe_attention(balanced, recipe, windows).items()]
    found = _searched(balanced, recipe, windows, products, attention, _INT8_RANGES, progress)
    return balanced, structs.replace(found, balance_alpha=ALPHA, weight_levels=WEIGHT_LEVELS)


def _searched(
    model: VitNetwork,
    recipe: Recipe,
    windows: NDArray[np.generic],
    products: Sequence[QuantizedProduct],
    attention: Sequence[QuantizedAttention],
    ranges: str,
    progress: bool,
) -> Quantization:
    """How to quantise the network: those of `products`, and of `attention` beside them, that keep the label agreement
    that the recipe wants."""
    chosen = windows[np.unique(np.linspace(0, len(windows) - 1, SEARCHED_WINDOWS).round().astype(int))]
    search = _Search(model, recipe, chosen)
    low, agreement = search.run(products, lambda some: search.agreement(some, ()), progress)
    inside, with_attention = search.run(attention, lambda some: search.agreement(low, some), progress)
    return Quantization(
        products=tuple(low),
        attention=tuple(inside),
        high=tuple(product.name for product in products if product not in low),
        windows=len(windows),
        windows_sha256=hashlib.sha256(windows.tobytes()).hexdigest(),
        ranges=ranges,
        label_agreement=agreement,
        label_agreement_wanted=search.wanted,
        label_agreement_attention=with_attention if inside else None,
    )


def _own_copy(model: VitNetwork) -> VitNetwork:
    """A copy that may be changed in place."""
    copy = share_parameters(model)
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        setattr(copy.get_submodule(owner), leaf, torch.nn.Parameter(parameter.detach().clone(), requires_grad=False))
    return copy


@torch.inference_mode()
def _check_equal(model: VitNetwork, balanced: VitNetwork, recipe: Recipe, window: NDArray[np.generic]) -> None:
    before, after = (_outputs(one, recipe, window) for one in (model, balanced))
    if not torch.equal(before, after):
        raise ExportError(
            f"expected the balanced network to equal the original bit for bit, they differ by "
            f"{(before.double() - after.double()).abs().max().item():.1g}: export it in fp32"
        )


def _outputs(model: VitNetwork, recipe: Recipe, window: NDArray[np.generic]) -> torch.Tensor:
    tail: torch.Tensor = deployed(model, recipe)(torch.from_numpy(window), thresholds_of(recipe))[0]
    return tail


class _Search:
    """Which products are not quantised, so that as many labels as are `wanted` stay as they are, a share."""

    def __init__(self, model: VitNetwork, recipe: Recipe, windows: NDArray[np.generic]) -> None:
        self._model, self._recipe, self._windows = model, recipe, windows
        gates = recipe.gates
        self.wanted = gates.fp8_label_agreement if recipe.precision == "fp8" else gates.int8_label_agreement
        self._exact = self._labels(model)

    def run(
        self, products: Sequence[Product], agreement: Callable[[Sequence[Product]], float], progress: bool
    ) -> tuple[list[Product], float]:
        """The products that are quantised, and the label agreement that they leave."""
        found = agreement(products)
        if found >= self.wanted or not products:
            return list(products), found
        bar = tqdm(products, desc="sensitivity", unit="product", disable=None if progress else True)
        alone = {product.name: agreement([product]) for product in bar}
        ranked = sorted(products, key=lambda product: alone[product.name])
        kept = 0
        while found < self.wanted and kept < len(ranked):
            kept += 1
            found = agreement(ranked[kept:])
        high = {product.name for product in ranked[:kept]}
        return [product for product in products if product.name not in high], found

    def agreement(self, products: Sequence[QuantizedProduct], attention: Sequence[QuantizedAttention]) -> float:
        """Share of the pixels whose label these products in low precision leave as it is."""
        low = quantized(self._model, products, self._recipe.precision, attention)
        return float((self._labels(low) == self._exact).mean())

    @torch.inference_mode()
    def _labels(self, model: VitNetwork) -> Labels:
        network = deployed(model, self._recipe)
        inputs = thresholds_of(self._recipe)
        tails = [network(torch.from_numpy(window[None]), inputs)[0] for window in self._windows]
        labels = [tail.argmax(1) if self._recipe.output == "scores" else tail for tail in tails]
        return torch.cat(labels).numpy()
