"""Linear layers in int8: weights by channel and symmetric, inputs by one scale that was measured beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

import algm_deploy.ops.quantize  # noqa: F401  registers the operators
from algm_deploy.bundle.records import QuantizedProduct
from algm_deploy.errors import BundleError
from algm_deploy.models.vit import Block, Model, VitNetwork, share_parameters

# 7 bits. Processors without VNNI add two products of a byte and a signed byte in 16 bits, where two of 255 * 127 do not
# fit and are clipped without a word; 2 * 255 * 63 do. So every processor gives the same numbers.
WEIGHT_LEVELS = 63


class QuantizedLinear(nn.Module):
    """A linear layer whose input and weight are what int8 numbers stand for.

    It simulates what a runtime computes in integers: (levels of x) @ (levels of the weight) is exact there, here it is
    rounded as any product of floating numbers. `weight` (N, K) and `bias` (N) are those of the layer it replaces, so
    weights are saved and loaded as ever; a weight's step is its channel's largest magnitude / 63, in fp32 whatever the
    layer's dtype.
    """

    levels: Tensor
    steps: Tensor
    scale: Tensor
    zero_point: Tensor

    def __init__(self, layer: nn.Linear, scale: float, zero_point: int) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.given = scale, zero_point
        weight = layer.weight.detach().float()
        steps = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny * 2**24) / WEIGHT_LEVELS
        levels = torch.round(weight / steps[:, None]).to(torch.int8)
        self.register_buffer("levels", levels.T.contiguous(), persistent=False)
        self.register_buffer("steps", steps, persistent=False)
        self.register_buffer("scale", torch.tensor(scale), persistent=False)
        self.register_buffer("zero_point", torch.tensor(zero_point, dtype=torch.int8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.ops.algm_standard.dequantized(self.levels, self.steps).to(x.dtype)
        out: Tensor = torch.ops.algm_standard.quantized(x, self.scale, self.zero_point) @ weight + self.bias
        return out


def products_of(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The matrix products that may be quantised, by name in the order of the modules: linear layers of blocks."""
    for name, block in model.named_modules():
        if isinstance(block, Block):
            yield from ((f"{name}.{own}", layer) for own, layer in block.named_modules() if type(layer) is nn.Linear)


def quantized(model: Model, products: Iterable[QuantizedProduct]) -> Model:
    """A copy of `model` with these products in int8; parameters are shared, `model` is unchanged.

    Raises:
        BundleError: a product that the network does not have.
    """
    copy = share_parameters(model)
    known = dict(products_of(copy))
    for product in products:
        if product.name not in known:
            raise BundleError(
                f"expected quantised products of this network, such as {min(known, default='none')}, got "
                f"{product.name!r:.100}: export the bundle again"
            )
        parent, _, leaf = product.name.rpartition(".")
        setattr(
            copy.get_submodule(parent), leaf, QuantizedLinear(known[product.name], product.scale, product.zero_point)
        )
    return copy


def is_quantized(model: VitNetwork) -> bool:
    """Whether a product of the network is in int8."""
    return any(isinstance(module, QuantizedLinear) for module in model.modules())
