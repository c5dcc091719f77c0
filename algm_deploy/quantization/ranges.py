"""From what enters a product to its scale, and in int8 its zero point."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from algm_deploy.bundle.records import QuantizedAttention, QuantizedProduct
from algm_deploy.models.quantized import e4m3_scale
from algm_deploy.ops.quantize import HIGHEST, LOWEST
from algm_deploy.quantization.observing import Observed

# Of values that lie nearly all on one side of zero, as GELU's, a range around zero would waste half of the levels.
ONE_SIDED = 4


def e4m3_product_of(name: str, observed: Observed) -> QuantizedProduct:
    """A power of two that brings all that was observed into the range of e4m3, and as much again at the most."""
    return QuantizedProduct(name=name, scale=float(e4m3_scale(observed.largest.float().max())), zero_point=0)


def attention_of(name: str, largest: Tensor) -> QuantizedAttention:
    """Levels of int8 around zero for magnitudes (3) of scaled queries, keys and values."""
    query, key, value = (float(np.float32(one / HIGHEST or 1.0)) for one in largest.tolist())
    return QuantizedAttention(name=name, query=query, key=key, value=value)


def product_of(name: str, observed: Observed) -> QuantizedProduct:
    """Levels of int8 for all that was observed: around zero, or from lowest to highest where one side is far larger."""
    low, high = min(float(observed.low.min()), 0.0), max(float(observed.high.max()), 0.0)
    if max(-low, high) > ONE_SIDED * min(-low, high):
        scale = (high - low) / (HIGHEST - LOWEST)
        zero_point = LOWEST - round(low / scale)
    else:
        scale, zero_point = max(-low, high) / HIGHEST, 0
    return QuantizedProduct(name=name, scale=float(np.float32(scale or 1.0)), zero_point=zero_point)
