"""The sum of a linear layer's product, its bias and a residual.

    bias_skip(product (B,S,D), bias (D) fp32, residual (B,S,D)) -> total (B,S,D)

`total` = `residual` + (`product` + `bias`), where `product` is what a linear layer computes before it adds its bias,
computed in fp32 and rounded once. Product and residual are fp32, fp16 or bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.schema import operator


@operator("product:T bias:f32 residual:T", "total:T")
def bias_skip(product: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """The sum of a linear layer and the residual."""
    return (residual.float() + (product.float() + bias)).to(product.dtype)


@bias_skip.register_fake
def _(product: Tensor, *_: Any) -> Tensor:
    return product.new_empty(product.shape)


@body_of("bias_skip")
def onnx_body(body: Body, attributes: Mapping[str, Any], product: Value, bias: Value, residual: Value) -> list[Value]:
    """Two sums in fp32."""
    return [body.like(body("Add", body.fp32(residual), body("Add", body.fp32(product), bias)), product)]


def reference(product: np.ndarray, bias: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """NumPy definition in fp64."""
    total: np.ndarray = residual.astype(np.float64) + (product.astype(np.float64) + bias)
    return total.astype(product.dtype)
