"""Inputs that the tests of operators and of native kernels share.

Equality has three meanings. Similarities agree within the rounding of their sums. Decisions are exact given equal
similarities. End to end, results are exact where every sum is exact: tokens of +-1 and widths that are powers of four
have integer products and norms that are powers of two.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from algm_deploy.ops import reference
from algm_deploy.ops.label_map import interpolation_matrix

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


def assert_mask_labels(
    labels: Array,
    masks: Array,
    classes: Array,
    rounding: float = 2.0**-24,
    *,
    expected: Array | None = None,
    most: float = 1.0,
) -> float:
    """Labels are the expected ones but where sums of several classes are the highest within rounding; returns the share
    of pixels that have the expected one. No share is allowed for: every other pixel is looked at.

    Args:
        rounding: unit of factors, where they are rounded to less than fp32.
        expected: by default those of the sums in fp64.
        most: of a sum, that it errs by where that is less than the bound, which adds up the worst of all members.
    """
    size = labels.shape[1:]
    expected = reference.mask_labels(masks, classes, size=size) if expected is None else expected
    for image in range(len(labels)):
        places = np.argwhere(labels[image] != expected[image])
        for some in np.array_split(places, 1 + len(places) // 4096):
            sums, error = _mask_sums(masks[image], classes[image], size, some, rounding)
            error = np.minimum(error, most * sums)
            for found in (labels[image], expected[image]):
                chosen = found[tuple(some.T)].astype(np.int64)[:, None]
                highest = np.take_along_axis(sums + error, chosen, 1) + masks.shape[1] * 1e-37
                assert (highest >= (sums - error).max(1, keepdims=True)).all(), "a class that has less"
    return float((labels == expected).mean())


def _mask_sums(
    masks: Array, classes: Array, size: tuple[int, ...], places: Array, rounding: float
) -> tuple[Array, Array]:
    """Sums (N,K) of masks (Q,h,w) and classes (Q,K) at pixels (N,2) in fp64, and how far a kernel may be from them.

    An interpolated mask errs by twelve units of 2^-24 of the largest of the cells around: ten of three interpolations
    that subtract, multiply and add (runtimes/kernels/interpolation.hpp), and two of the weights. The logarithm of a
    sigmoid s rises by 1 - s where its mask rises by one, and that changes by no more than the exponential of the rise.
    A sigmoid itself errs by eight units, and a sum of positive products by as many as it has members; where factors are
    rounded, there are two.
    """
    (rows, down), (columns, across) = (_ends(masks.shape[1 + axis], size[axis], places[:, axis]) for axis in (0, 1))
    weights = down[:, :, None] * across[:, None, :]
    corners = masks.astype(np.float64)[:, rows[:, :, None], columns[:, None, :]]
    mask = (corners * weights).sum((2, 3)).T
    moved = 12 * 2.0**-24 * (np.abs(corners) * (weights > 0)).max((2, 3)).T
    share = np.exp(-np.logaddexp(0, -mask))
    shift = moved * np.minimum(1, np.exp(moved - np.logaddexp(0, mask)))
    off = np.expm1(shift + 2.0**-24 * (len(masks) + 8) + 2 * rounding)
    factors = classes.astype(np.float64)
    return share @ factors, (share * off) @ factors


def _ends(cells: int, pixels: int, chosen: Array) -> tuple[Array, Array]:
    """The one or two cells (N,2) of an axis between which pixels (N) lie, and their weights."""
    weights = interpolation_matrix(cells, pixels).astype(np.float64)[chosen]
    ends = np.argsort(-weights, axis=1, kind="stable")[:, :2]
    return ends, np.take_along_axis(weights, ends, 1)
