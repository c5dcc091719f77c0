"""Confusion counts and the figures from them, against counts made another way."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from algm_deploy.errors import GateError
from algm_deploy.evaluation.metrics import confusion_matrix, quality


def random_maps(seed: int, classes: int, ignore: int = 255) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, (13, 17)).astype(np.uint8)
    labels[random.random(labels.shape) < 0.1] = ignore
    return labels, random.integers(0, classes, labels.shape).astype(np.uint8)


@given(st.integers(0, 1000), st.integers(2, 254))
def test_counts_equal_an_independent_count(seed: int, classes: int) -> None:
    labels, prediction = random_maps(seed, classes)
    expected = np.zeros((classes, classes), int)
    for truth, guess in zip(labels.ravel().tolist(), prediction.ravel().tolist(), strict=True):
        if truth != 255:
            expected[truth, guess] += 1
    assert (confusion_matrix(labels, prediction, classes, 255) == expected).all()


@given(st.integers(0, 1000), st.integers(2, 6))
def test_figures_equal_sets_of_pixels(seed: int, classes: int) -> None:
    labels, prediction = random_maps(seed, classes)
    found = quality(confusion_matrix(labels, prediction, classes, 255))
    counted = labels != 255
    iou = []
    for index in range(classes):
        truth, guess = (labels == index) & counted, (prediction == index) & counted
        iou.append(100 * (truth & guess).sum() / (truth | guess).sum() if (truth | guess).any() else math.nan)
    assert found.iou_percent == pytest.approx(iou, nan_ok=True)
    assert found.miou_percent == pytest.approx(np.nanmean(iou))
    assert found.pixel_accuracy_percent == pytest.approx(100 * (labels == prediction)[counted].mean())


def test_a_class_that_is_neither_labelled_nor_predicted_is_left_out() -> None:
    labels, prediction = np.array([[0, 0, 1, 1]]), np.array([[0, 0, 1, 2]])
    found = quality(confusion_matrix(labels, prediction, 4))
    assert found.iou_percent[:3] == (100, 50, 0)
    assert math.isnan(found.iou_percent[3])
    assert found.miou_percent == 50
    assert found.labelled_pixels == 4


def test_chance_level_is_what_the_commonest_class_scores_everywhere() -> None:
    labels = np.array([[0, 1, 1, 1, 3, 255]])
    everywhere = quality(confusion_matrix(labels, np.ones_like(labels), 5, 255))
    assert everywhere.majority_guess_miou_percent == pytest.approx(everywhere.miou_percent) == pytest.approx(20)


def test_nothing_labelled_is_not_a_figure() -> None:
    ignored = np.full((2, 2), 255, np.uint8)
    found = quality(confusion_matrix(ignored, np.zeros_like(ignored), 3, 255))
    assert math.isnan(found.miou_percent)
    assert math.isnan(found.pixel_accuracy_percent)
    assert math.isnan(found.majority_guess_miou_percent)


def test_maps_that_cannot_be_compared_are_refused() -> None:
    zeros = np.zeros((2, 3), np.uint8)
    with pytest.raises(GateError, match="equal"):
        confusion_matrix(zeros, zeros.T, 2)
    with pytest.raises(GateError, match=r"prediction values must lie in 0\.\.1"):
        confusion_matrix(zeros, zeros + 2, 2)
    with pytest.raises(GateError, match=r"label values must lie in 0\.\.1"):
        confusion_matrix(zeros + 255, zeros, 2, ignore=254)


def test_metrics_load_no_tensor_library() -> None:
    code = "import sys, algm_deploy.evaluation.metrics; print({'torch', 'onnxruntime'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "set()"
