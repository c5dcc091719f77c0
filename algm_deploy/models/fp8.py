"""The products of transformer blocks in fp8 (e4m3): which ones, with what scales, and what they compute.

e4m3 has four binary digits and a range of 2^15 between its smallest normal and its largest value, so a scale has to
bring the largest value into range and need not be tight. A weight has one scale an output channel, from its largest
magnitude. Rows that enter a product have one each, from theirs, but for those that attention makes: they are averages
of value rows, and LayerNorm bounds those channel by channel before any picture is seen (`value_bounds`). So values are
made to fit the range of e4m3 by the product that gives them, and the weight behind attention takes that back.

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
PROJECTED_SINCE = 1024
"""Widths from which attention's projection gains by fp8. On an H200 it takes 20 us less of 57 at 32 x 511 rows of 1024,
9 of 36 at width 768 and 1 of 15 at 384; writing e4m3 costs attention 7 to 11 us."""
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

    weight (N, K) e4m3; scale (1, N) fp32, what each output channel is multiplied with; bias (N). `within`: rows lie
    within the range of e4m3, so they get no scales of their own.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, layer: nn.Linear, gain: Tensor | None = None, within: bool = False) -> None:
        """`layer`: with the weights to quantise. `gain` (N) fp32: what it makes is multiplied with this."""
        super().__init__()
        self.within = within
        values, scale = quantised(layer.weight)
        bias: Tensor = layer.bias
        if gain is not None:
            scale, bias = scale * gain[:, None], (bias * gain).to(bias.dtype)
        self.register_buffer("weight", values)
        self.register_buffer("scale", scale.mT.contiguous())
        self.register_buffer("bias", bias)

    def quantise(self, x: Tensor) -> Quantised:
        """Rows (..., K) as they enter the product."""
        return saturated(x) if self.within else quantised(x)

    def forward(self, x: Tensor) -> Tensor:
        """Rows (..., K) to (..., N) in the dtype of x."""
        values, scale = self.quantise(x)
        product = F.linear(values.float(), self.weight.float()) * scale * self.scale
        return (product + self.bias).to(x.dtype)


def value_bounds(norm: nn.LayerNorm, qkv: nn.Linear) -> Tensor:
    """Magnitudes (D) that no channel of any value row exceeds, fp32.

    A row that LayerNorm has centred and scaled is at most sqrt(D) long, before its gain and shift; a product with it is
    at most that times the length of the weight.
    """
    width = qkv.in_features
    weight, bias = (t.float()[-width:] for t in (qkv.weight, qkv.bias))
    gain, shift = norm.weight.float(), norm.bias.float()
    lengths: Tensor = torch.linalg.vector_norm(weight * gain, dim=1)
    return lengths * math.sqrt(width) + (weight @ shift + bias).abs()


@torch.no_grad()
def use_fp8(network: nn.Module) -> None:
    """Replaces the products of all blocks of a network, in place; blocks of widths no matrix unit takes stay."""
    for block in [module for module in network.modules() if isinstance(module, Block)]:
        attn, mlp = block.attn, block.mlp
        width = attn.qkv.in_features
        if width % _MULTIPLE:
            continue
        gain = _fit_values(block) if width >= PROJECTED_SINCE else None
        if gain is not None:
            attn.proj = Fp8Linear(attn.proj, within=True)  # type: ignore[assignment]
        attn.qkv = Fp8Linear(attn.qkv, gain)  # type: ignore[assignment]
        mlp.fc1, mlp.fc2 = Fp8Linear(mlp.fc1), Fp8Linear(mlp.fc2)  # type: ignore[assignment]


def _fit_values(block: Block) -> Tensor:
    """Gains (3D) of queries, keys and values that bring values into the range of e4m3; the projection takes them back.

    Channels that hardly differ from zero are not blown up: of that range they need no more than the others.
    """
    bounds = value_bounds(block.norm1, block.attn.qkv)
    fit = LARGEST / bounds.clamp(min=float(bounds.max()) * 2.0**-10 + SMALLEST_ROW)
    block.attn.proj.weight = nn.Parameter(block.attn.proj.weight / fit, requires_grad=False)
    return torch.cat([torch.ones_like(fit).repeat(2), fit])
