"""Unmerge: every patch gets a copy of the row that stands for it (ALGM, CVPR 2024, section 3.4).

    unmerge(values (B,S,C), map (B,N) int64) -> (B,N,C)

Attribute `prefix`: how many leading rows `map` counts that `values` no longer has. Any dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.schema import operator


def _index(map: Tensor, prefix: int, channels: int) -> Tensor:
    return (map - prefix)[:, :, None].expand(-1, -1, channels)


@operator("values:T map:i64", "values:T")
def unmerge(values: Tensor, map: Tensor, prefix: int) -> Tensor:
    """Every patch gets the row that stands for it."""
    return values.gather(1, _index(map, prefix, values.shape[2]))


@unmerge.register_fake
def _(values: Tensor, map: Tensor, prefix: int) -> Tensor:
    return values.new_empty(map.shape[0], map.shape[1], values.shape[2])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rows, ctx.prefix = inputs[0].shape[1], inputs[2]
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (map,) = ctx.saved_tensors
    summed = grad.new_zeros(grad.shape[0], ctx.rows, grad.shape[2])
    return summed.scatter_add_(1, _index(map, ctx.prefix, grad.shape[2]), grad), None, None


unmerge.register_autograd(_backward, setup_context=_save_for_backward)


@body_of("unmerge")
def onnx_body(body: Body, attributes: Mapping[str, Any], values: Value, map: Value) -> list[Value]:
    """One gather."""
    return [body.take_rows(values, body("Sub", map, attributes["prefix"]))]


def reference(values: np.ndarray, map: np.ndarray, *, prefix: int = 0) -> np.ndarray:
    """NumPy definition."""
    return np.take_along_axis(values, map[:, :, None] - prefix, axis=1)
