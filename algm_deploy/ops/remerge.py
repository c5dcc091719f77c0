"""Remerge: rows that had merged merge again, as a token map says (precedent: JoakimHaurum/ATC, which clusters so).

    remerge(tokens (B,P+N,D), map (B,N) int64, size (B,S) fp32) -> (B,S,D)

Attribute `prefix` P: rows that are handed on. Every other row that comes out is the mean of the patches that `map`
gives it, and zero where there are none. Of `size` only the extent counts, which is the number of rows. Any floating
dtype; sums in fp32. A value that is not finite reaches the row that it has a part in and no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algm_deploy.ops._rows import merge_rows, merge_rows_reference
from algm_deploy.ops.bodies import END, Body, Value, body_of
from algm_deploy.ops.schema import operator


@operator("tokens:T map:i64 size:f32", "tokens:T")
def remerge(tokens: Tensor, map: Tensor, size: Tensor, prefix: int) -> Tensor:
    """Every row becomes the mean of the patches that it stands for."""
    patches = tokens[:, prefix:]
    weight = torch.ones(map.shape, device=map.device)
    return torch.cat([tokens[:, :prefix], merge_rows(patches, weight, map - prefix, size.shape[1] - prefix)], 1)


@remerge.register_fake
def _(tokens: Tensor, map: Tensor, size: Tensor, prefix: int) -> Tensor:
    return tokens.new_empty(tokens.shape[0], size.shape[1], tokens.shape[2])


@body_of("remerge")
def onnx_body(body: Body, attributes: Mapping[str, Any], tokens: Value, map: Value, size: Value) -> list[Value]:
    """A product with a 0/1 matrix."""
    prefix = attributes["prefix"]
    rows = body("Unsqueeze", body("Range", prefix, body("Squeeze", body.size_of(size, 1), [0]), 1), [1])
    share = body.fp32(body("Equal", rows, body("Unsqueeze", map, [1])))
    sums = body.member_sums(share, body.fp32(body.rows(tokens, prefix, END)))
    count = body("Max", body("ReduceSum", share, [2], keepdims=1), 1.0)
    return [body("Concat", body.rows(tokens, 0, prefix), body.like(body("Div", sums, count), tokens), axis=1)]


def reference(tokens: np.ndarray, map: np.ndarray, size: np.ndarray, *, prefix: int) -> np.ndarray:
    """Remerge in plain NumPy, sums in fp64."""
    one = np.ones(map.shape, np.float32)
    merged, _ = merge_rows_reference(tokens[:, prefix:], one, map - prefix, size.shape[1] - prefix, weighted=False)
    return np.concatenate([tokens[:, :prefix], merged], 1)
