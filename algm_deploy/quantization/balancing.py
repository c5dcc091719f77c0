"""Balances channels between what enters a product and its weight, after SmoothQuant (Xiao et al., ICML 2023).

A few channels of a ViT's tokens are tens of times larger than the others and would leave these a handful of levels.
Channel k of the input is divided by s_k = max|x_k|^a / max|w_k|^(1 - a), and the weight's multiplied by it. The former
is folded into what made the channel: the LayerNorm before queries, keys, values and the first layer of the MLP; the
values, which attention only averages, before the layer after attention. The layer after GELU has nothing to fold into.

s_k is rounded to a power of two. Then every product and every sum keeps its significand, so the balanced network equals
the original bit for bit, not only up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from algm_deploy.models.vit import Block, VitNetwork
from algm_deploy.quantization.observing import Observed

# On a Segmenter-S of CamVid that merges, 0.5 left 99.0 % of the labels as they are in fp32, 0.75 99.4 %, none 98.8 %.
ALPHA = 0.75
_SMALLEST = 1e-5


@torch.no_grad()
def balance(model: VitNetwork, observed: Mapping[str, Observed]) -> dict[str, Tensor]:
    """Balances the blocks of a network in place; returns the factors (K) by product."""
    factors = {}
    for name, block in model.named_modules():
        if not isinstance(block, Block):
            continue
        attention, width = block.attn, block.attn.proj.in_features
        pairs: list[tuple[str, nn.Linear, list[Tensor]]] = [
            ("attn.qkv", attention.qkv, [block.norm1.weight, block.norm1.bias]),
            ("mlp.fc1", block.mlp.fc1, [block.norm2.weight, block.norm2.bias]),
            ("attn.proj", attention.proj, [attention.qkv.weight[2 * width :], attention.qkv.bias[2 * width :]]),
        ]
        for own, layer, sources in pairs:
            factor = _factors(observed[f"{name}.{own}"].largest, layer.weight)
            layer.weight *= factor
            for source in sources:
                source /= factor if source.ndim == 1 else factor[:, None]
            factors[f"{name}.{own}"] = factor
    return factors


def _factors(largest: Tensor, weight: Tensor) -> Tensor:
    """Powers of two (K), their geometric mean about one."""
    inputs, weights = largest.clamp(min=_SMALLEST), weight.abs().amax(0).clamp(min=_SMALLEST)
    exponents = ALPHA * inputs.log2() - (1 - ALPHA) * weights.log2()
    return torch.exp2((exponents - exponents.mean()).round())
