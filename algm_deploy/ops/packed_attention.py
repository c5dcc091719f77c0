"""Attention that reads queries, keys and values where the product of a linear layer left them.

    packed_attention(product (B,S,3D), bias (3D) fp32, length (B) int64 or none) -> (B,S,D)

`attention` (attributes `heads`, `scale`) of `product` + `bias`, where `product` is what the layer computes before it
adds its bias. So no pass over the rows adds it, and none takes them apart. The product is fp32, fp16 or bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from algm_deploy.ops.attention import attention
from algm_deploy.ops.attention import onnx_body as attention_body
from algm_deploy.ops.attention import reference as attention_reference
from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.schema import operator


@operator("product:T bias:f32 length?:i64", "values:T")
def packed_attention(product: Tensor, bias: Tensor, length: Tensor | None, heads: int, scale: float) -> Tensor:
    """Self-attention within every image, from the product of a linear layer and its bias."""
    out: Tensor = attention((product + bias).to(product.dtype), length, heads, scale)
    return out


@packed_attention.register_fake
def _(product: Tensor, *_: Any) -> Tensor:
    return product.new_empty(product.shape[0], product.shape[1], product.shape[2] // 3)


@body_of("packed_attention")
def onnx_body(
    body: Body, attributes: Mapping[str, Any], product: Value, bias: Value, length: Value | None = None
) -> list[Value]:
    """The sum, and the body of `attention`."""
    return attention_body(body, attributes, body.like(body("Add", body.fp32(product), bias), product), length)


def reference(
    product: np.ndarray, bias: np.ndarray, length: np.ndarray | None, *, heads: int, scale: float
) -> np.ndarray:
    """NumPy definition in fp64; rows at and behind `length` are zero."""
    qkv = product.astype(np.float64) + bias
    return attention_reference(qkv, length, heads=heads, scale=scale).astype(product.dtype)
