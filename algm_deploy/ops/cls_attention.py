"""What cls attends to: how EViT tells which patches matter (ICLR 2022, section 3.2).

    cls_attention(qkv (B,S,3D)) -> (B,S) fp32

Attributes and layout as for `attention`. Of row 0, cls, the weight it gives every row: the softmax over all rows, the
mean over heads. All is fp32. `attention` gives every row its result beside it, by whatever kernel is fastest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from algm_deploy.ops._rows import product, wide
from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.schema import operator


@operator("qkv:T", "weights:f32")
def cls_attention(qkv: Tensor, heads: int, scale: float) -> Tensor:
    """The weight that the first row gives every row, the mean over heads."""
    images, rows, width = qkv.shape
    query, key, _ = wide(qkv).view(images, rows, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    scores = product(query[:, :, :1] * scale, key.mT)
    return scores.softmax(-1).mean(1)[:, 0]


@cls_attention.register_fake
def _(qkv: Tensor, heads: int, scale: float) -> Tensor:
    return wide(qkv).new_empty(qkv.shape[:2])


@body_of("cls_attention")
def onnx_body(body: Body, attributes: Mapping[str, Any], qkv: Value) -> list[Value]:
    """One query a head in standard ops."""
    heads = body("Transpose", body("Reshape", qkv, [0, 0, 3, attributes["heads"], -1]), perm=[2, 0, 3, 1, 4])
    query, key = (body.fp32(body("Squeeze", body("Slice", heads, [i], [i + 1], [0]), [0])) for i in (0, 1))
    query = body("Mul", body("Slice", query, [0], [1], [2]), attributes["scale"])
    scores = body("MatMul", query, body("Transpose", key, perm=[0, 1, 3, 2]))
    mean = body("ReduceMean", body("Softmax", scores, axis=-1), [1], keepdims=0)
    return [body("Squeeze", mean, [1])]


def reference(qkv: np.ndarray, *, heads: int, scale: float) -> np.ndarray:
    """NumPy definition in fp64."""
    images, rows, _ = qkv.shape
    query, key, _ = qkv.astype(np.float64).reshape(images, rows, 3, heads, -1).transpose(2, 0, 3, 1, 4)
    scores = np.einsum("bhd,bhsd->bhs", query[:, :, 0], key) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mean: np.ndarray = (weights / weights.sum(-1, keepdims=True)).mean(1)
    return mean.astype(np.float32)
