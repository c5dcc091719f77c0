"""Sliding-window inference: a photo in, a label map of the photo's own size out, over any network.

Memory is bounded. For K classes, a canvas of h x w pixels (at most `MAX_ASPECT` windows or `max_ratio` short sides
long), a photo of H x W pixels and b windows of side s at a time, beside what the network itself holds:
4 K h w bytes of score sums, 4 b K s^2 of fresh scores, 12 h w of canvas, and about 10 H W for the label map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algm_deploy.errors import GateError
from algm_deploy.pictures.preprocessing import Pixels, canvas_of, resize_bilinear, window_anchors
from algm_deploy.recipe.schema import Protocol

ScoresOf = Callable[[Pixels], tuple[NDArray[np.float32], NDArray[np.int64]]]
"""Windows (b, 3, s, s), RGB 0..255, uint8 or float32 (see `canvas_of`) -> scores (b, K, s, s) float32 and token counts
(b, M) int64: the patches' tokens left after each of the M merges, prefix tokens such as cls not counted."""

Labels = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Prediction:
    """What a photo became.

    `labels` (H, W), uint8 up to 255 classes and int32 above; `token_counts` (windows, M) int64, one row for every
    (top, left) of `anchors` on the resized canvas.
    """

    labels: Labels
    token_counts: NDArray[np.int64]
    anchors: list[tuple[int, int]]


def predict_labels(photo: NDArray[np.uint8], scores_of: ScoresOf, protocol: Protocol, window_batch: int) -> Prediction:
    """Predicts the labels of a photo (H, W, 3) RGB uint8.

    `window_batch` windows of the photo go through the network at once, the last batch may be smaller. Under a merge
    plan with batch semantics `per_image` every window decides alone; under `batch_min` the windows of a batch share
    counts and thresholds, which is how the published evaluation couples up to four windows.

    Raises:
        ImageError: the photo does not fit the protocol.
        GateError: the network returned something that is not a finite score per class and pixel.
    """
    canvas = canvas_of(photo, protocol)
    anchors = window_anchors(canvas.shape[:2], protocol)
    sums, counts = _accumulate(canvas, anchors, scores_of, protocol.window, window_batch)
    return Prediction(best_labels(sums, photo.shape[:2]), counts, anchors)


def best_labels(scores: NDArray[np.float32], size: tuple[int, int]) -> Labels:
    """Resizes scores (K, h, w) to `size` (height, width) class by class and keeps the best; ties to the lower index."""
    best = resize_bilinear(scores[0], size)
    labels: Labels = np.zeros(size, np.uint8 if len(scores) <= 255 else np.int32)
    for index in range(1, len(scores)):
        rival = resize_bilinear(scores[index], size)
        labels[rival > best] = index
        np.maximum(best, rival, out=best)
    return labels


def _accumulate(
    canvas: Pixels, anchors: list[tuple[int, int]], scores_of: ScoresOf, window: int, window_batch: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Mean scores (K, h, w) over the windows that cover a pixel, and the token counts of all windows."""
    cover = np.zeros(canvas.shape[:2], np.float32)
    sums = np.zeros((0, *cover.shape), np.float32)
    counts = []
    for start in range(0, len(anchors), window_batch):
        group = anchors[start : start + window_batch]
        scores, tokens = _checked(*scores_of(_cut(canvas, group, window)), len(group), window)
        if not len(sums):
            sums = np.zeros((scores.shape[1], *cover.shape), np.float32)
        for (top, left), one in zip(group, scores, strict=True):
            place = slice(top, top + window), slice(left, left + window)
            sums[:, *place] += one
            cover[place] += 1
        counts.append(tokens)
    sums /= cover
    return sums, np.concatenate(counts)


def _cut(canvas: Pixels, anchors: list[tuple[int, int]], window: int) -> Pixels:
    crops = [canvas[top : top + window, left : left + window] for top, left in anchors]
    return np.ascontiguousarray(np.stack(crops).transpose(0, 3, 1, 2))


def _checked(
    scores: NDArray[np.float32], tokens: NDArray[np.int64], windows: int, side: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    if scores.ndim != 4 or scores.shape[0] != windows or scores.shape[2:] != (side, side) or len(tokens) != windows:
        raise GateError(
            f"expected scores ({windows}, classes, {side}, {side}) and {windows} rows of token counts, "
            f"got {scores.shape} and {tokens.shape}: the protocol's window must be the network's image size"
        )
    check_finite(scores)
    return scores, tokens


def check_finite(scores: NDArray[np.float32]) -> None:
    """GateError where scores are NaN or infinite: they would become labels without a word."""
    if not np.isfinite(scores).all():
        raise GateError(
            "expected scores of every class, the network returned some that are not finite: its values leave the range "
            "of fp16, or the bundle is broken; verify it, or export with --precision fp32"
        )
