"""The end of a block's branch and the norm before the next: `bias_skip` and `layer_norm` in one.

    bias_skip_norm(product (B,S,D), bias (D) fp32, residual (B,S,D), weight (D) fp32, shift (D) fp32)
        -> normed (B,S,D), total (B,S,D)

`total` = `residual` + (`product` + `bias`), rounded once; `normed` is the norm of what was rounded (attribute
`epsilon`). ONNX Runtime's `SkipLayerNormalization` adds in 16 bits, each time rounded, and so leaves an error that all
rows share in every block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from algm_deploy.ops.bias_skip import bias_skip
from algm_deploy.ops.bias_skip import onnx_body as sum_body
from algm_deploy.ops.bias_skip import reference as sum_reference
from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.layer_norm import layer_norm
from algm_deploy.ops.layer_norm import onnx_body as norm_body
from algm_deploy.ops.layer_norm import reference as norm_reference
from algm_deploy.ops.schema import operator


@operator("product:T bias:f32 residual:T weight:f32 shift:f32", "normed:T total:T")
def bias_skip_norm(
    product: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The sum of a linear layer and the residual, normalised and as it is."""
    total = bias_skip(product, bias, residual)
    return layer_norm(total, weight, shift, epsilon), total


@bias_skip_norm.register_fake
def _(product: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return product.new_empty(product.shape), product.new_empty(product.shape)


@body_of("bias_skip_norm")
def onnx_body(
    body: Body,
    attributes: Mapping[str, Any],
    product: Value,
    bias: Value,
    residual: Value,
    weight: Value,
    shift: Value,
) -> list[Value]:
    """The sum in fp32, rounded, and the norm of that."""
    (total,) = sum_body(body, {}, product, bias, residual)
    return [*norm_body(body, attributes, total, weight, shift), total]


def reference(
    product: np.ndarray,
    bias: np.ndarray,
    residual: np.ndarray,
    weight: np.ndarray,
    shift: np.ndarray,
    *,
    epsilon: float,
) -> tuple[np.ndarray, np.ndarray]:
    """NumPy definition in fp64."""
    total = sum_reference(product, bias, residual)
    return norm_reference(total, weight, shift, epsilon=epsilon), total
