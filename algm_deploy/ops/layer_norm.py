"""Layer normalisation whose scale and shift are fp32.

    layer_norm(x (B,S,D), weight (D) fp32, shift (D) fp32) -> normed (B,S,D)

`normed` is `x` normalised over its last axis, times `weight` plus `shift` (attribute `epsilon`, below the root).
Computed in fp32 and rounded once. `x` is fp32, fp16 or bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.schema import operator


@operator("x:T weight:f32 shift:f32", "normed:T")
def layer_norm(x: Tensor, weight: Tensor, shift: Tensor, epsilon: float) -> Tensor:
    """Every row of x with mean zero and deviation one, times weight plus shift."""
    return F.layer_norm(x.float(), weight.shape, weight, shift, epsilon).to(x.dtype)


@layer_norm.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@body_of("layer_norm")
def onnx_body(body: Body, attributes: Mapping[str, Any], x: Value, weight: Value, shift: Value) -> list[Value]:
    """By ONNX's own layer normalisation."""
    wide, epsilon = body.fp32(x), attributes["epsilon"]
    return [body.like(body("LayerNormalization", wide, weight, shift, axis=-1, epsilon=epsilon, stash_type=1), x)]


def reference(x: np.ndarray, weight: np.ndarray, shift: np.ndarray, *, epsilon: float) -> np.ndarray:
    """NumPy definition in fp64."""
    centred = x - x.mean(-1, keepdims=True, dtype=np.float64)
    normed: np.ndarray = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * weight + shift
    return normed.astype(x.dtype)
