"""Segmentation quality from confusion matrices.

They follow the published metric (mmseg): histograms over the whole set, intersection over union per class, mean over
the classes that occur in label or prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algm_deploy.errors import GateError

Confusion = NDArray[np.int64]
"""(K, K) pixel counts: row = label, column = prediction."""


@dataclass(frozen=True)
class Quality:
    """Figures in percent; NaN stands for a class, or a set, without a pixel.

    `majority_guess_miou_percent` is what always answering the commonest class would score: a network at or below it
    works at chance level, which is how swapped colour channels or a wrong normalisation show.
    """

    miou_percent: float
    pixel_accuracy_percent: float
    iou_percent: tuple[float, ...]
    majority_guess_miou_percent: float
    labelled_pixels: int


def confusion_matrix(
    labels: NDArray[np.integer[Any]], prediction: NDArray[np.integer[Any]], classes: int, ignore: int | None = None
) -> Confusion:
    """Counts pixels (K, K) by label and prediction, both (H, W) of class indices; label `ignore` is left out.

    Raises:
        GateError: shapes differ, or a value that is neither a class nor `ignore`.
    """
    if labels.shape != prediction.shape:
        raise GateError(f"the label map is {labels.shape} and the prediction {prediction.shape}, they must be equal")
    counted = np.ones(labels.shape, bool) if ignore is None else labels != ignore
    truth, guess = labels[counted], prediction[counted]
    for name, values in (("label", truth), ("prediction", guess)):
        if values.size and (values.min() < 0 or values.max() >= classes):
            raise GateError(f"{name} values must lie in 0..{classes - 1}, got {values.min()}..{values.max()}")
    cells = classes * truth.astype(np.int64) + guess
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def quality(confusion: Confusion) -> Quality:
    """Figures of a confusion matrix, which may be the sum over a data set or a slice of it."""
    hits, labelled, predicted = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    pixels = int(labelled.sum())
    iou = _percent(hits, labelled + predicted - hits)
    # Guessing class c everywhere scores labelled[c] / pixels there and 0 in every other class that occurs.
    guess = _percent(labelled.max(), pixels * np.count_nonzero(labelled))
    return Quality(
        miou_percent=_mean(iou),
        pixel_accuracy_percent=float(_percent(hits.sum(), pixels)),
        iou_percent=tuple(iou.tolist()),
        majority_guess_miou_percent=float(guess),
        labelled_pixels=pixels,
    )


def _percent(part: Any, whole: Any) -> NDArray[np.float64]:
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    share: NDArray[np.float64] = np.divide(100 * part, whole, out=np.full(part.shape, np.nan), where=whole > 0)
    return share


def _mean(values: NDArray[np.float64]) -> float:
    present = values[~np.isnan(values)]
    return float(present.mean()) if present.size else float("nan")
