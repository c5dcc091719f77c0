"""Self-attention in which a key weighs as much as the patches it stands for (ToMe, ICLR 2023, section 3).

    proportional_attention(qkv (B,S,3D), size (B,S)) -> (B,S,D)

Attributes and layout as for `attention`. The logarithm of `size` (fp32, at least 1) is added to the scores of the keys
before the softmax. Merging as many rows in every image leaves no padding, so there are no lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from algm_deploy.ops._rows import wide
from algm_deploy.ops.attention import attention_operator, attention_reference, masked_attention, onnx_attention
from algm_deploy.ops.bodies import Body, Value, body_of


@attention_operator("qkv:T size:f32")
def proportional_attention(qkv: Tensor, size: Tensor, heads: int, scale: float) -> Tensor:
    """Self-attention in which a key weighs as much as the patches it stands for.

    16-bit rows are attended to in fp32: rounded to 16 bits, the logarithms alone would err by 0.4 %.
    """
    packed = wide(qkv)
    bias = size.to(packed.dtype).log()[:, None, None, :]
    return masked_attention(packed, bias, heads, scale).to(qkv.dtype)


@body_of("proportional_attention")
def onnx_body(body: Body, attributes: Mapping[str, Any], qkv: Value, size: Value) -> list[Value]:
    """Attention in standard ops; softmax and logarithms are fp32 for every token type."""
    bias = body("Unsqueeze", body("Log", size), [1, 2])
    return [onnx_attention(body, qkv, attributes, lambda scores, value: (body("Add", scores, bias), value))]


def reference(qkv: np.ndarray, size: np.ndarray, *, heads: int, scale: float) -> np.ndarray:
    """NumPy definition in fp64: each key is there `size` times."""
    images = zip(qkv, size, strict=True)
    return np.stack([attention_reference(rows, weight, heads, scale) for rows, weight in images]).astype(qkv.dtype)
