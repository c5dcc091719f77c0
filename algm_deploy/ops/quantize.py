"""Quantisation to int8, as QuantizeLinear and DequantizeLinear of ONNX define it.

    quantized(x, scale f32, zero_point i8) -> x'
        scale * (clip(round(x / scale) + zero_point) - zero_point)
    dequantized(levels (K,N) i8, steps (N) f32) -> (K,N) f32
        levels * steps, a step for each column

Levels run from -128 to 127, halves are rounded to the even one. Exported, both are those standard nodes and no
operators of the domain `algm`, hence a namespace of their own: every consumer knows them, and computes the product
behind them in integers where it can. Here they simulate that: the products are of the floating numbers that the levels
stand for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LOWEST, HIGHEST = -128, 127


@torch.library.custom_op("algm_standard::quantized", mutates_args=())
def quantized(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """x of any floating dtype and shape, each value the nearest that a level stands for."""
    levels = (torch.round(x / scale) + zero_point).clamp(LOWEST, HIGHEST)
    return (levels - zero_point) * scale


@quantized.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("algm_standard::dequantized", mutates_args=())
def dequantized(levels: Tensor, steps: Tensor) -> Tensor:
    """The numbers (K, N) that levels stand for; each column has a step of its own, and zero is level 0."""
    return levels * steps


@dequantized.register_fake
def _(levels: Tensor, steps: Tensor) -> Tensor:
    return levels.new_empty(levels.shape, dtype=steps.dtype)


def reference(x: np.ndarray, scale: float, zero_point: int) -> np.ndarray:
    """NumPy definition of `quantized`."""
    step = np.asarray(scale, x.dtype)
    levels = np.clip(np.rint(x / step) + zero_point, LOWEST, HIGHEST)
    return np.asarray((levels - zero_point) * step, x.dtype)
