"""Multi-head self-attention over a batch whose images have different numbers of valid rows.

    attention(qkv (B,S,3D), length (B) int64 or none) -> (B,S,D)

Attributes: `heads` H, `scale`. A row of `qkv` is laid out [query | key | value], each [head][D / H]. Keys at and behind
`length`, any int64, are never attended to, whatever they hold; the result of queries there is unspecified. fp32, fp16
or bf16.

An opaque operator on purpose: a visible mask would let the exporter specialise on the token count.

**Products in int8.** `attention_in_levels` is attention whose two products are of levels: scaled queries, keys and
values by a step each, and exp(score - largest of the row), from 0 to 1, in 255 steps. What comes out is divided by the
row's sum of these, so a row that attends to many keys alike loses nothing, where probabilities of less than 1 / 510
would all be zero. It is no operator of its own: for a runtime that gains by it the body is given levels in the place of
`qkv`, and their steps as three more inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import algm_deploy.ops.quantize  # noqa: F401  registers the operators of levels
from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.schema import Operator, operator

# cuDNN plans anew for every sequence length, which adaptive merging changes with every picture.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_SWITCH = threading.Lock()  # PyTorch's choice of backends is one for the whole process


@contextmanager
def _without_cudnn(device: torch.device) -> Iterator[None]:
    """PyTorch's attention does not take cuDNN's kernels."""
    if device.type != "cuda":
        yield
        return
    with _SWITCH, sdpa_kernel(_BACKENDS):
        yield


def masked_attention(qkv: Tensor, mask: Tensor | None, heads: int, scale: float) -> Tensor:
    """Attention (B, S, D) from packed queries, keys and values (B, S, 3D), in their dtype.

    `mask`, broadcast to (B, H, S, S): bool, true for keys that count, or of the dtype of qkv, added to the scores.
    """
    images, rows, width = qkv.shape
    query, key, value = qkv.view(images, rows, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    with _without_cudnn(qkv.device):
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).reshape(images, rows, width // 3)


def attention_operator(inputs: str) -> Callable[[Callable[..., Tensor]], Operator]:
    """`operator` for attention from packed rows and one more tensor; its gradient runs the function once more."""

    def register(attend: Callable[..., Tensor]) -> Operator:
        def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            qkv, other, ctx.heads, ctx.scale = inputs
            ctx.save_for_backward(qkv, other)

        def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
            qkv, other = ctx.saved_tensors
            with torch.enable_grad():
                leaf = qkv.detach().requires_grad_()
                out = attend(leaf, other, ctx.heads, ctx.scale)
            return torch.autograd.grad(out, leaf, grad)[0], None, None, None

        registered = operator(inputs, "values:T")(attend)
        registered.register_fake(lambda qkv, *_: qkv.new_empty(qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3))
        registered.register_autograd(backward, setup_context=save)
        return registered

    return register


@attention_operator("qkv:T length?:i64")
def attention(qkv: Tensor, length: Tensor | None, heads: int, scale: float) -> Tensor:
    """Self-attention from packed queries, keys and values; keys behind `length` are not attended to."""
    images, rows, _ = qkv.shape
    mask = None
    if length is not None and images > 1:  # a single image is never padded
        valid = torch.arange(rows, device=qkv.device) < length[:, None]
        mask = valid[:, None, None, :]
        qkv = torch.where(valid[:, :, None], qkv, 0)  # zero times a NaN behind the mask would be NaN
    return masked_attention(qkv, mask, heads, scale)


class Steps(NamedTuple):
    """Of the levels of scaled queries, keys and values, fp32 scalars: numbers, tensors or values of a graph."""

    query: Any
    key: Any
    value: Any


SHARE_LEVELS = 255
"""The levels of exp(score - largest)."""


TOGETHER = "together"
"""An attribute that a runtime may give attention in levels: how many heads are computed at a time."""

CAST = "cast"
"""An attribute that a runtime may give attention in levels, 1: shares become levels by a cast. That cuts off, so a half
is added first, and the half of a level becomes a whole one. No share is above 1, so there is nothing to clip; what is
no number becomes any level."""

PACKED = "packed"
"""What a graph calls the steps of packed queries, keys and values."""


def packed_steps(steps: Steps, scale: float, width: int) -> np.ndarray:
    """The step of each of the `width` numbers of a row, fp32: a scaled query is of the level that the query itself is
    of in steps that are larger by the scale."""
    query, key, value = (np.float32(step) for step in steps)
    return np.repeat(np.array([query / np.float32(scale), key, value], np.float32), width // 3)


def attention_in_levels(
    qkv: Tensor,
    length: Tensor | None,
    heads: int,
    scale: float,
    steps: Steps,
    shake: Callable[[Tensor, Tensor], Tensor] = lambda x, _: x,
) -> Tensor:
    """Attention whose products are of levels, (B, S, D) in the dtype of qkv; fp32 or fp64.

    `shake` is given what is about to be rounded, and its step.
    """
    images, rows, width = qkv.shape
    if length is not None and images > 1:
        valid = torch.arange(rows, device=qkv.device) < length[:, None]
        qkv = torch.where(valid[:, :, None], qkv, 0)
    parts = qkv.view(images, rows, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    zero = torch.zeros((), dtype=torch.int8, device=qkv.device)
    query, key, value = (
        torch.ops.algm_standard.quantized(shake(part, step), step, zero)
        for part, step in zip((parts[0] * scale, parts[1], parts[2]), steps, strict=True)
    )
    scores = query @ key.mT
    if length is not None and images > 1:
        scores = torch.where(valid[:, None, None], scores, -torch.inf)
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    step = torch.tensor(1 / SHARE_LEVELS, dtype=torch.float32, device=qkv.device)
    shares = (shake(shares, step) / step).round().clamp(0, SHARE_LEVELS) * step
    mixed: Tensor = shares @ value / shares.sum(-1, keepdim=True)
    return mixed.transpose(1, 2).reshape(images, rows, width // 3)


def onnx_attention(
    body: Body, qkv: Value, attributes: Mapping[str, Any], adjust: Callable[[Value, Value], tuple[Value, Value]]
) -> Value:
    """Attention in standard ops; the softmax is fp32 for every token type. `adjust` changes scores (B, H, S, S) fp32
    and values (B, H, S, D / H) before it."""
    heads = body("Transpose", body("Reshape", qkv, [0, 0, 3, attributes["heads"], -1]), perm=[2, 0, 3, 1, 4])
    query, key, value = (body("Squeeze", part, [0]) for part in body.several(3, "Split", heads, axis=0, num_outputs=3))
    scaled = body("Mul", query, body.like(body.number(attributes["scale"]), qkv))
    scores = body.fp32(body("MatMul", scaled, body("Transpose", key, perm=[0, 1, 3, 2])))
    scores, value = adjust(scores, value)
    return _in_rows(body, body("MatMul", body.like(body("Softmax", scores, axis=-1), qkv), value))


def _onnx_in_levels(
    body: Body, levels: Value, attributes: Mapping[str, Any], adjust: Callable[[Value], Value], steps: Steps
) -> Value:
    """`attention_in_levels` of packed levels, the scale in those of queries; `adjust` changes scores. Levels are
    parted, and not the numbers, as they are a quarter of the bytes to move. `together`: so many heads at a time."""
    heads, cast = attributes["heads"], bool(attributes.get(CAST))
    groups = heads // attributes.get(TOGETHER, heads)
    rows = body("Transpose", body("Reshape", levels, [0, 0, 3 * heads, -1]), perm=[0, 2, 1, 3])
    parts = body.several(3 * groups, "Split", rows, axis=1, num_outputs=3 * groups)
    mixed = [
        _onnx_mixed_in_levels(body, Steps(*parts[group::groups]), steps, adjust, cast)  # all queries come first
        for group in range(groups)
    ]
    return _in_rows(body, body("Concat", *mixed, axis=1) if groups > 1 else mixed[0])


def _onnx_mixed_in_levels(
    body: Body, levels: Steps, steps: Steps, adjust: Callable[[Value], Value], cast: bool
) -> Value:
    """What the queries of some heads get, of levels of queries, keys and values (B, H, S, D / H)."""
    query, key, value = (
        body("DequantizeLinear", part, step, _zero(body, np.int8)) for part, step in zip(levels, steps, strict=True)
    )
    scores = adjust(body("MatMul", query, body("Transpose", key, perm=[0, 1, 3, 2])))
    shares = body("Exp", body("Sub", scores, body("ReduceMax", scores, [-1], keepdims=1)))
    how = body.number(1 / SHARE_LEVELS), _zero(body, np.uint8)
    if cast:
        whole = body("Add", body("Mul", shares, float(SHARE_LEVELS)), 0.5)
        rounded = body("Cast", whole, to=ir.DataType.UINT8)
    else:
        rounded = body("QuantizeLinear", shares, *how)
    shares = body("DequantizeLinear", rounded, *how)
    return body("Div", body("MatMul", shares, value), body("ReduceSum", shares, [-1], keepdims=1))


def _in_rows(body: Body, mixed: Value) -> Value:
    """(B, H, S, D / H) as (B, S, D)."""
    return body("Reshape", body("Transpose", mixed, perm=[0, 2, 1, 3]), [0, 0, -1])


def _zero(body: Body, levels: type) -> Value:
    return body.value(np.zeros((), levels))  # type: ignore[return-value]


@body_of("attention")
def onnx_body(
    body: Body, attributes: Mapping[str, Any], qkv: Value, length: Value | None = None, *steps: Value
) -> list[Value]:
    """Attention in standard ops, keys behind the length masked; given three steps, of levels."""

    def masked(scores: Value) -> tuple[Value, Value | None]:
        """Scores, and which rows are valid, unless all are."""
        if length is None:
            return scores, None
        valid = body("Less", body.indices(body.size_of(qkv, 1)), body("Unsqueeze", length, [1]))
        return body("Where", body("Unsqueeze", valid, [1, 2]), scores, -np.inf), valid

    def adjusted(scores: Value, value: Value) -> tuple[Value, Value]:
        scores, valid = masked(scores)
        if valid is None:
            return scores, value
        return scores, body("Where", body("Unsqueeze", valid, [1, 3]), value, body.like(body.number(0.0), qkv))

    if steps:  # levels are finite: what is behind the length adds zero as it is
        return [_onnx_in_levels(body, qkv, attributes, lambda scores: masked(scores)[0], Steps(*steps))]
    return [onnx_attention(body, qkv, attributes, adjusted)]


def attention_reference(qkv: np.ndarray, weight: np.ndarray | float, heads: int, scale: float) -> np.ndarray:
    """One image's rows (S, D) in fp64 from qkv (S, 3D); each key is there `weight` (S) times."""
    rows = len(qkv)
    query, key, value = qkv.astype(np.float64).reshape(rows, 3, heads, -1).transpose(1, 2, 0, 3)
    scores = query @ key.transpose(0, 2, 1) * scale
    weights = weight * np.exp(scores - scores.max(-1, keepdims=True))
    mixed: np.ndarray = weights / weights.sum(-1, keepdims=True) @ value
    return mixed.transpose(1, 0, 2).reshape(rows, -1)


def reference(qkv: np.ndarray, length: np.ndarray | None, *, heads: int, scale: float) -> np.ndarray:
    """NumPy definition in fp64; rows at and behind `length` are zero."""
    images, rows, width = qkv.shape
    out = np.zeros((images, rows, width // 3), qkv.dtype)
    for b in range(images):
        valid = rows if length is None else min(max(int(length[b]), 0), rows)
        if valid:
            out[b, :valid] = attention_reference(qkv[b, :valid], 1.0, heads, scale)
    return out
