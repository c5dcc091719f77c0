"""Mask labels: from masks and classes of queries straight to one label a pixel.

    mask_labels(masks (B,Q,h,w), classes (B,Q,K) fp32) -> labels (B,H,W)

Attribute: `size` (H, W). `classes` are probabilities, those of no object left out. Every mask is interpolated
bilinearly (half-pixel centres, corners not aligned), its sigmoid weighted with its query's probabilities, and the class
of the highest sum over the queries is taken, the lower class on ties. All of it in fp32, whatever type masks have.
Labels are uint8 for at most 255 classes, else int32.

Where no query has a mask, tiny sigmoids decide: what computes them keeps their relative precision, down to 1e-37.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algm_deploy.ops.bodies import Body, Value, body_of
from algm_deploy.ops.label_map import interpolation_matrix, label_dtype
from algm_deploy.ops.schema import operator


def covered(masks: Tensor) -> Tensor:
    """The sigmoid of masks, at least fp32."""
    # In full: ONNX Runtime's own on a CPU is 17 % off at -15 and zero below -18, and where no query has a mask such
    # values decide. No exponent is positive: in an fp16 engine exp(12) is infinite.
    return masks.clamp(max=0).exp() / ((-masks.abs()).exp() + 1)


@operator("masks:T classes:f32", "labels:L")
def mask_labels(masks: Tensor, classes: Tensor, size: list[int]) -> Tensor:
    """Masks and class probabilities of queries to one label a pixel: interpolation, sigmoid, sums over queries, argmax.

    Holds every mask at the size of the picture.
    """
    full = F.interpolate(masks.float(), size=size, mode="bilinear", align_corners=False)
    scores = torch.einsum("bqk,bqhw->bkhw", classes, covered(full))
    # Of equals argmax takes any, this one the first.
    return scores.max(dim=1).indices.to(label_dtype(classes.shape[2]))


@mask_labels.register_fake
def _(masks: Tensor, classes: Tensor, size: list[int]) -> Tensor:
    return masks.new_empty(masks.shape[0], *size, dtype=label_dtype(classes.shape[2]))


@body_of("mask_labels")
def onnx_body(body: Body, attributes: Mapping[str, Any], masks: Value, classes: Value) -> list[Value]:
    """What networks of masks have as their tail: holds every mask at the size of the picture, and every score."""
    wide = body.fp32(masks)
    size = body("Concat", body("Shape", wide, start=0, end=2), np.array(attributes["size"], np.int64), axis=0)
    full = body("Resize", wide, None, None, size, mode="linear", coordinate_transformation_mode="half_pixel")
    low = body("Exp", body("Min", full, body.number(0.0)))
    share = body("Div", low, body("Add", body("Exp", body("Neg", body("Abs", full))), body.number(1.0)))
    scores = body("Einsum", classes, share, equation="bqk,bqhw->bkhw")
    return [body("Cast", body("ArgMax", scores, axis=1, keepdims=0), to=body.dtypes[0])]


def reference_scores(masks: np.ndarray, classes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Sums (B,K,H,W) in fp64; weights of the interpolation are fp32, as they define it."""
    rows, columns = (
        interpolation_matrix(cells, pixels).astype(np.float64)
        for cells, pixels in zip(masks.shape[2:], size, strict=True)
    )
    full = rows @ masks.astype(np.float64) @ columns.T
    share = np.exp(np.minimum(full, 0)) / (1 + np.exp(-np.abs(full)))
    scores: np.ndarray = np.einsum("bqk,bqhw->bkhw", classes.astype(np.float64), share, optimize=True)
    return scores


def reference(masks: np.ndarray, classes: np.ndarray, *, size: tuple[int, int]) -> np.ndarray:
    """NumPy definition in fp64."""
    labels: np.ndarray = reference_scores(masks, classes, size).argmax(1)
    return labels.astype(np.uint8 if classes.shape[2] <= 255 else np.int32)
