"""Linear layers in int8 or in e4m3: weights by channel, inputs by one scale that was measured beforehand. And attention
whose products are in int8.

They simulate what a runtime computes from levels: (levels of x) @ (levels of the weight) is exact there, here it is
rounded as any product of floating numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

import algm_deploy.ops.quantize  # noqa: F401  registers the operators
from algm_deploy.bundle.records import QuantizedAttention, QuantizedProduct
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError
from algm_deploy.models.fp8 import E4M3, LARGEST, saturated
from algm_deploy.models.vit import Attention, Block, Model, share_parameters
from algm_deploy.ops._rows import wide
from algm_deploy.ops.attention import Steps, attention_in_levels
from algm_deploy.recipe.schema import Precision

# 7 bits. Processors without VNNI add two products of a byte and a signed byte in 16 bits, where two of 255 * 127 do not
# fit and are clipped without a word; 2 * 255 * 63 do. So every processor gives the same numbers.
WEIGHT_LEVELS = 63
_SMALLEST_STEP = 2.0**-14  # of e4m3: the smallest normal number of fp16, which steps are written in


class QuantizedLinear(nn.Module):
    """A linear layer whose input and weight are what levels stand for.

    `weight` (N, K) and `bias` (N) are those of the layer it replaces, so weights are saved and loaded as ever. `levels`
    (K, N) and `steps` (N) fp32 stand for the weight, and are the same whatever the layer's dtype; `scale` fp32 and
    `zero_point` are those of what enters.
    """

    why_slow: ClassVar[str]
    """Why rows are not packed for it, as the end of a sentence."""
    levels: Tensor
    steps: Tensor
    scale: Tensor
    zero_point: Tensor

    def __init__(self, layer: nn.Linear, scale: float, zero_point: int) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        levels, steps = self._weight_levels(layer.weight.detach().float())
        self.register_buffer("levels", levels.T.contiguous(), persistent=False)
        self.register_buffer("steps", steps, persistent=False)
        self.register_buffer("scale", torch.tensor(scale), persistent=False)
        self.register_buffer("zero_point", torch.tensor(zero_point).to(levels.dtype), persistent=False)

    @staticmethod
    def _weight_levels(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Levels (N, K) and steps (N) of a weight (N, K) fp32."""
        raise NotImplementedError


class Int8Linear(QuantizedLinear):
    """In int8: a weight's step is its channel's largest magnitude / 63."""

    why_slow = "its products are in int8"

    @staticmethod
    def _weight_levels(weight: Tensor) -> tuple[Tensor, Tensor]:
        steps = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny * 2**24) / WEIGHT_LEVELS
        return torch.round(weight / steps[:, None]).to(torch.int8), steps

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.ops.algm_standard.dequantized(self.levels, self.steps).to(x.dtype)
        out: Tensor = torch.ops.algm_standard.quantized(x, self.scale, self.zero_point) @ weight + self.bias
        return out


class Int8Attention(Attention):
    """Attention whose products are in int8. `shake` is given what is about to be rounded, and its step."""

    query: Tensor
    key: Tensor
    value: Tensor

    def __init__(self, layer: Attention, steps: QuantizedAttention) -> None:
        nn.Module.__init__(self)
        self.heads, self.scale, self.qkv, self.proj = layer.heads, layer.scale, layer.qkv, layer.proj
        self.shake: Callable[[Tensor, Tensor], Tensor] = lambda x, _: x
        for name in Steps._fields:
            self.register_buffer(name, torch.tensor(getattr(steps, name), dtype=torch.float32), persistent=False)

    def mixed(self, qkv: Tensor, length: Tensor | None) -> Tensor:
        """As `Attention.mixed`."""
        steps = Steps(self.query, self.key, self.value)
        return attention_in_levels(qkv, length, self.heads, self.scale, steps, self.shake)


class E4m3Linear(QuantizedLinear):
    """In e4m3: scale and steps are powers of two, so that only the rounding to four digits loses anything; what is
    beyond the range saturates. Sums are in fp32, or in fp64 for rows in it."""

    why_slow = "the scales of its fp8 were measured on photos, which is for TensorRT: for PyTorch leave --calibrate out"

    @staticmethod
    def _weight_levels(weight: Tensor) -> tuple[Tensor, Tensor]:
        steps = e4m3_scale(weight.abs().amax(1))
        return saturated(weight / steps[:, None]).values, steps

    def forward(self, x: Tensor) -> Tensor:
        rows = wide(x)
        levels = (rows / self.scale).clamp(-LARGEST, LARGEST).to(E4M3).to(rows.dtype)
        product = (levels * self.scale) @ (self.levels.to(rows.dtype) * self.steps)
        return (product + self.bias).to(x.dtype)


def e4m3_scale(largest: Tensor) -> Tensor:
    """Powers of two that bring magnitudes fp32, one each, into the range of e4m3, the largest into its upper half."""
    return torch.exp2((largest / LARGEST).clamp(min=_SMALLEST_STEP).log2().ceil())


_LINEAR: dict[Precision, type[QuantizedLinear]] = {"int8": Int8Linear, "fp8": E4m3Linear}
CALIBRATED = tuple(_LINEAR)
"""Precisions whose products are in levels, for which ranges are measured on photos."""


def in_graphs(precision: Precision) -> bool:
    """Whether the graphs that are exported of a bundle in this precision hold its levels.

    e4m3 is no type of their opset: they hold the weights as stored, for whoever lowers them to quantise.
    """
    return precision == "int8"


def computes_levels(bundle: Bundle, precision: Precision) -> bool:
    """Whether what executes a bundle in `precision`, its own or another one, computes with the bundle's levels."""
    stored = bundle.recipe.precision
    return bundle.calibrated and (in_graphs(stored) or precision == stored)


def products_of(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The matrix products that may be quantised, by name in the order of the modules: linear layers of blocks, but for
    those of auxiliary heads, which decide."""
    for name, block in model.named_modules():
        if isinstance(block, Block):
            yield from (
                (f"{name}.{own}", layer)
                for own, layer in block.named_modules()
                if type(layer) is nn.Linear and not own.startswith("auxiliary.")
            )


def attention_of(model: nn.Module) -> Iterator[tuple[str, Attention]]:
    """Attention of blocks whose products may be in int8, by name: none that also tells what it attends to."""
    for name, block in model.named_modules():
        if isinstance(block, Block) and type(block.attn) is Attention and not (block.proportional or block.weighs):
            yield f"{name}.attn", block.attn


def quantized(
    model: Model,
    products: Iterable[QuantizedProduct],
    precision: Precision,
    attention: Iterable[QuantizedAttention] = (),
) -> Model:
    """A copy of `model` with these products in int8 or fp8, and with products of attention in int8; parameters are
    shared, `model` is unchanged.

    Raises:
        BundleError: a product that the network does not have, or a precision that has no levels.
    """
    if precision not in CALIBRATED:
        raise BundleError(
            f"expected quantised products in a bundle in {' or '.join(CALIBRATED)} alone, this one is in {precision}: "
            "export the bundle again"
        )
    copy = share_parameters(model)
    known = dict(products_of(copy))
    for product in products:
        if product.name not in known:
            raise BundleError(
                f"expected quantised products of this network, such as {min(known, default='none')}, got "
                f"{product.name!r:.100}: export the bundle again"
            )
        parent, _, leaf = product.name.rpartition(".")
        made = _LINEAR[precision](known[product.name], product.scale, product.zero_point)
        setattr(copy.get_submodule(parent), leaf, made)
    layers = dict(attention_of(copy))
    for one in attention:
        if one.name not in layers:
            raise BundleError(f"expected attention of this network, got {one.name!r:.100}: export the bundle again")
        parent, _, leaf = one.name.rpartition(".")
        setattr(copy.get_submodule(parent), leaf, Int8Attention(layers[one.name], one))
    return copy


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Products of the network that are in levels, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear))
