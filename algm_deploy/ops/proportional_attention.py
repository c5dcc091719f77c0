"""Self-attention in which a key weighs as much as the patches it stands for (ToMe, ICLR 2023, section 3).

    proportional_attention(qkv (B,S,3D), size (B,S)) -> (B,S,D)

Attributes and layout as for `attention`. The logarithm of `size` (fp32, at least 1) is added to the scores of the keys
before the softmax. Merging as many rows in every image leaves no padding, so there are no lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algm_deploy.ops._onnx import Body, Value
from algm_deploy.ops._rows import wide
from algm_deploy.ops.attention import masked_attention, onnx_attention


def _attend(qkv: Tensor, size: Tensor, heads: int, scale: float) -> Tensor:
    """16-bit rows are attended to in fp32: rounded to 16 bits, the logarithms alone would err by 0.4 %."""
    packed = wide(qkv)
    bias = size.to(packed.dtype).log()[:, None, None, :]
    return masked_attention(packed, bias, heads, scale).to(qkv.dtype)


@torch.library.custom_op("algm::proportional_attention", mutates_args=())
def proportional_attention(qkv: Tensor, size: Tensor, heads: int, scale: float) -> Tensor:
    """Attention (B, S, D) from packed queries, keys and values (B, S, 3D); see the module's docstring."""
    return _attend(qkv, size, heads, scale)


@proportional_attention.register_fake
def _(qkv: Tensor, size: Tensor, heads: int, scale: float) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, size, ctx.heads, ctx.scale = inputs
    ctx.save_for_backward(qkv, size)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    qkv, size = ctx.saved_tensors
    with torch.enable_grad():
        leaf = qkv.detach().requires_grad_()
        out = _attend(leaf, size, ctx.heads, ctx.scale)
    return torch.autograd.grad(out, leaf, grad)[0], None, None, None


proportional_attention.register_autograd(_backward, setup_context=_save_for_backward)


def onnx_body(
    body: Body, attributes: Mapping[str, Any], inputs: Sequence[Value | None], dtypes: Sequence[Any]
) -> list[Value]:
    """Attention in standard ops; softmax and logarithms are fp32 for every token type."""
    qkv, size = inputs
    assert qkv is not None and size is not None
    bias = body("Unsqueeze", body("Log", size), [1, 2])
    return [onnx_attention(body, qkv, attributes, lambda scores, value: (body("Add", scores, bias), value))]


def reference(qkv: np.ndarray, size: np.ndarray, *, heads: int, scale: float) -> np.ndarray:
    """NumPy definition in fp64: each key is there `size` times."""
    images, rows, width = qkv.shape
    out = np.empty((images, rows, width // 3))
    for b in range(images):
        query, key, value = qkv[b].astype(np.float64).reshape(rows, 3, heads, -1).transpose(1, 2, 0, 3)
        scores = query @ key.transpose(0, 2, 1) * scale
        weights = size[b] * np.exp(scores - scores.max(-1, keepdims=True))
        mixed = weights / weights.sum(-1, keepdims=True) @ value
        out[b] = mixed.transpose(1, 0, 2).reshape(rows, -1)
    return out.astype(qkv.dtype)
