"""The products of transformer blocks in fp8 (e4m3): which ones, with what scales, and what they compute.

e4m3 has four binary digits and a range of 2^15 between its smallest normal and its largest value, so a scale has to
bring the largest value into range and need not be tight. A weight has one scale an output channel, from its largest
magnitude. Rows that LayerNorm makes have one each, from theirs. What a product makes of such rows LayerNorm bounds
channel by channel before any picture is seen (`bounds`), and with it averages of value rows, which attention makes, and
what GELU leaves of the MLP's first product. Those need no scales of their own: each channel is multiplied with a power
of two that makes it fit the range of e4m3, and the weight of the next product takes that back (`fit`). So whatever
computes a part of a row can write it in e4m3 without having seen the rest.

The projection behind attention is one of them in wide networks alone (`PROJECTED_SINCE`). Everything else keeps its
precision: norms, softmax, GELU, residuals, patch embedding, the decoder's products outside
its blocks, and whatever merges look at.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models.vit import Block

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3."""
SMALLEST_ROW = 1e-12
"""Rows of zeros get the scale of this magnitude."""
PROJECTED_SINCE = 768
"""Widths from which attention's projection gains by fp8: at 384 it takes as long as in fp16."""
_MULTIPLE = 16  # matrix units take widths that this divides


class Quantised(NamedTuple):
    """Rows (T, K) in e4m3, and what to multiply each with, (T, 1) fp32."""

    values: Tensor
    scale: Tensor


def quantised(x: Tensor) -> Quantised:
    """Rows (..., K) of any floating dtype, each with a scale from its largest magnitude."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_ROW) / LARGEST
    return Quantised((wide / scale).to(E4M3), scale)


def saturated(x: Tensor) -> Quantised:
    """Rows (..., K) of any floating dtype as they are, with scales of one; beyond the range they saturate."""
    values = x.float().clamp(-LARGEST, LARGEST).to(E4M3)
    return Quantised(values, torch.ones_like(values[..., :1], dtype=torch.float32))


class Fp8Linear(nn.Module):
    """A linear layer whose product is in e4m3. `forward` computes it from the same numbers in fp32, on any device.

    weight (N, K) e4m3; scale (1, N) fp32, what each output channel is multiplied with; bias (N). `fit` (K) fp32: what
    the channels of rows are multiplied with instead of a scale a row.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor
    fit: Tensor | None

    def __init__(self, layer: nn.Linear, gain: Tensor | None = None, fit: Tensor | None = None) -> None:
        """`layer`: with the weights to quantise. `gain` (N) fp32: what it makes is multiplied with this."""
        super().__init__()
        weight: Tensor = layer.weight
        values, scale = quantised(weight if fit is None else weight / fit)
        bias: Tensor = layer.bias
        if gain is not None:
            scale, bias = scale * gain[:, None], (bias * gain).to(bias.dtype)
        self.register_buffer("weight", values)
        self.register_buffer("scale", scale.mT.contiguous())
        self.register_buffer("bias", bias)
        self.register_buffer("fit", fit)

    def quantise(self, x: Tensor) -> Quantised:
        """Rows (..., K) as they enter the product."""
        return quantised(x) if self.fit is None else saturated(x.float() * self.fit)

    def forward(self, x: Tensor) -> Tensor:
        """Rows (..., K) to (..., N) in the dtype of x."""
        values, scale = self.quantise(x)
        product = F.linear(values.float(), self.weight.float()) * scale * self.scale
        return (product + self.bias).to(x.dtype)


def bounds(norm: nn.LayerNorm, layer: nn.Linear) -> Tensor:
    """Magnitudes (N) that no channel of any row exceeds that the layer makes of what the norm makes, fp32.

    A row that LayerNorm has centred and scaled is at most sqrt(D) long, before its gain and shift; a product with it is
    at most that times the length of the weight.
    """
    weight, gain, shift = layer.weight.float(), norm.weight.float(), norm.bias.float()
    lengths: Tensor = torch.linalg.vector_norm(weight * gain, dim=1)
    return lengths * math.sqrt(layer.in_features) + (weight @ shift + layer.bias.float()).abs()


def fitting(bounds: Tensor) -> Tensor:
    """Powers of two that bring channels within these magnitudes into the range of e4m3, fp32.

    Channels that hardly differ from zero are not blown up: of that range they need no more than the others.
    """
    fit = LARGEST / bounds.clamp(min=float(bounds.max()) * 2.0**-10 + SMALLEST_ROW)
    return torch.exp2(fit.log2().floor())


@torch.no_grad()
def use_fp8(network: nn.Module) -> None:
    """Replaces the products of all blocks of a network, in place; blocks of widths no matrix unit takes stay."""
    for block in [module for module in network.modules() if isinstance(module, Block)]:
        attn, mlp = block.attn, block.mlp
        width = attn.qkv.in_features
        if width % _MULTIPLE:
            continue
        gain = None
        if width >= PROJECTED_SINCE:
            values = fitting(bounds(block.norm1, attn.qkv)[-width:])
            gain = torch.cat([torch.ones_like(values).repeat(2), values])  # attention hands on what values bring
            attn.proj.weight = nn.Parameter(attn.proj.weight / values, requires_grad=False)
            attn.proj = Fp8Linear(attn.proj, fit=torch.ones_like(values))  # type: ignore[assignment]
        attn.qkv = Fp8Linear(attn.qkv, gain)  # type: ignore[assignment]
        hidden = fitting(bounds(block.norm2, mlp.fc1))  # GELU makes no magnitude larger
        mlp.fc1, mlp.fc2 = Fp8Linear(mlp.fc1), Fp8Linear(mlp.fc2, fit=hidden)  # type: ignore[assignment]
