"""GELU of what a linear layer computes, its bias included.

    gelu(product (B,S,C), bias (C) fp32) -> (B,S,C)

x * (1 + erf(x / sqrt 2)) / 2 of x = `product` + `bias`, where `product` is what the layer computes before it adds its
bias. Computed in fp32 and rounded once. The product is fp32, fp16 or bf16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.schema import operator


@operator("product:T bias:f32", "values:T")
def gelu(product: Tensor, bias: Tensor) -> Tensor:
    """GELU, exact up to rounding, of a product and its bias."""
    return F.gelu(product.float() + bias).to(product.dtype)


@gelu.register_fake
def _(product: Tensor, bias: Tensor) -> Tensor:
    return product.new_empty(product.shape)


@body_of("gelu")
def onnx_body(body: Body, attributes: Mapping[str, Any], product: Value, bias: Value) -> list[Value]:
    """By ONNX's own error function."""
    x = body("Add", body.fp32(product), bias)
    normal = body("Add", body("Erf", body("Mul", x, body.number(math.sqrt(0.5)))), body.number(1.0))
    return [body.like(body("Mul", body("Mul", x, body.number(0.5)), normal), product)]


def reference(product: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """NumPy definition in fp64."""
    x = product.astype(np.float64) + bias
    normal = np.array([math.erfc(-value * math.sqrt(0.5)) for value in x.flat]).reshape(x.shape)
    out: np.ndarray = x * normal / 2
    return out.astype(product.dtype)
