"""Inputs that the tests of operators and of native kernels share.

Equality has three meanings. Similarities agree within the rounding of their sums. Decisions are exact given equal
similarities. End to end, results are exact where every sum is exact: tokens of +-1 and widths that are powers of four
have integer products and norms that are powers of two.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from algm_deploy.ops import reference

Array = np.ndarray
KINDS = ("signs", "few", "constant", "pairs", "zeros")
# Attributes as the published program has them, for one class token before the patches.
CLAP: dict[str, Any] = {
    "prefix": 1,
    "semantics": "code",
    "batch": "per_image",
    "order": "published",
    "rule": "threshold",
    "budget": 0,
}
GBM: dict[str, Any] = {
    "prefix": 1,
    "rule": "adaptive",
    "divisor": 5.0,
    "semantics": "code",
    "batch": "per_image",
    "budget": 0,
}


def exact_tokens(rng: np.random.Generator, kind: str, shape: tuple[int, int, int], dtype: Any = np.float32) -> Array:
    """Tokens whose sums are exact: +-1, the same few rows again, all ones, pairs of equal rows, some rows of zeros."""
    tokens = rng.choice([-1.0, 1.0], size=shape)
    if kind == "few":
        tokens = tokens[:, rng.integers(min(3, shape[1]), size=shape[1])]
    elif kind == "constant":
        tokens[:] = 1
    elif kind == "pairs":
        tokens[:, 1::2] = tokens[:, : shape[1] - 1 : 2]
    elif kind == "zeros":
        tokens[:, rng.random(shape[1]) < 0.5] = 0
    return tokens.astype(dtype)


def similar_tokens(rng: np.random.Generator, images: int, rows: int, width: int = 8) -> Array:
    """Tokens that resemble each other to varying degrees, as those of a photo do."""
    kinds = rng.standard_normal((images, 4, width))[:, rng.integers(4, size=rows)]
    return (kinds + rng.uniform(0.1, 1) * rng.standard_normal((images, rows, width))).astype(np.float32)


def ones(tokens: Array) -> Array:
    """Sizes of tokens that stand for one patch each."""
    return np.ones(tokens.shape[:2], np.float32)


def places_error(value: Array, shares: Array, shapes: Any, rounding: float = 0.0) -> Array:
    """How far deformable attention (B,Q,H) may be from exact arithmetic on places in [-0.5, 1.5], in fp32.

    A coordinate c of a level with `side` cells errs by 2^-24 of c * side, and of that less a half once more: by
    3 * side units of 2^-24 and a half. The bilinear value changes by at most twice the largest value a cell, along two
    axes: 12 * side + 2. Shares of a corner are made by five operations, and as many parts are added as there are
    corners.

    Args:
        rounding: unit roundoff of values that results are rounded to, once each in what is compared.
    """
    side, corners = int(np.max(shapes)), 4 * shares.shape[3] * shares.shape[4]
    total = np.abs(np.nan_to_num(shares)).sum((3, 4), dtype=np.float64) * np.abs(value.astype(np.float64)).max()
    return np.asarray(total * (2.0**-24 * (12 * side + 7 + corners) + 2 * rounding))


def mask_inputs(
    rng: np.random.Generator, shape: tuple[int, int, int, int], classes: int, dtype: Any, reach: float
) -> tuple[Array, Array]:
    """Masks of a shape (B,Q,h,w) within `reach`, and probabilities (B,Q,K) of all but one class more."""
    masks = (reach * rng.uniform(-1, 1, shape)).astype(dtype)
    parts = np.exp(rng.uniform(1, 6) * rng.standard_normal((*shape[:2], classes + 1)))
    return masks, (parts / parts.sum(-1, keepdims=True))[..., :-1].astype(np.float32)


def assert_mask_labels(labels: Array, masks: Array, classes: Array, rounding: float = 2.0**-24) -> float:
    """Labels are those of the highest sums, or of ones that are as high but for rounding; returns how many must be the
    reference's.

    An interpolated mask errs by twelve units of 2^-24 of the largest around, and its sigmoid by as much of itself, for
    what lies far below zero. Sums of positive numbers err by as many units of themselves as they have members, and by
    a few for the sigmoid. What is below 1e-37 may be zero.

    Args:
        rounding: unit of factors, where they are rounded to less than fp32.
    """
    scores = reference.mask_scores(masks, classes, labels.shape[1:])
    queries, largest = masks.shape[1], float(np.abs(masks.astype(np.float64)).max())
    off = np.expm1(min(2.0**-24 * (12 * largest + queries + 8) + 2 * rounding, 700))
    chosen = np.take_along_axis(scores, labels[:, None].astype(np.int64), 1)[:, 0]
    below = np.sort(scores, axis=1)
    best, second = below[:, -1], below[:, -2] if scores.shape[1] > 1 else np.zeros_like(below[:, -1])
    floor = queries * 1e-37
    assert (best * (1 - off) - chosen * (1 + off) <= floor).all(), "a class that has less"
    clear = best * (1 - off) > second * (1 + off) + floor
    np.testing.assert_array_equal(labels[clear], scores.argmax(1)[clear])
    return float(clear.mean())
