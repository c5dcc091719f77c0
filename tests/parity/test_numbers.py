"""Link 4 on made-up scores: what a runtime errs, held to what PyTorch errs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from algm_deploy.parity.comparison import Numbers
from algm_deploy.parity.links import Link
from algm_deploy.parity.replay import Error, Replayed, error_of
from algm_deploy.recipe.reading import recipe
from algm_deploy.recipe.schema import Output

TRUTH = np.linspace(-1.0, 1.0, 24).reshape(2, 3, 4)
SIGNS = 1.0 - 2.0 * (np.indices(TRUTH.shape).sum(0) % 2)  # the classes of a pixel err in opposite directions


def link(own: list[float], runtime: list[float], output: Output = "scores", scale: float = 1.0) -> Link:
    """The link of images on which PyTorch and a runtime err by so much, everywhere alike."""
    numbers = Numbers(replace(recipe("demo"), output=output))
    for index, (pytorch, error) in enumerate(zip(own, runtime, strict=True)):
        truth = scale * TRUTH
        scores = truth + scale * error * SIGNS
        result = scores.argmax(0).astype(np.uint8) if output == "labels" else scores
        own_error = Error(scale * pytorch, scale * pytorch)
        numbers.compare(f"image {index}", result, Replayed((), (), own_error, error_of(truth), lambda t=truth: t))
    return numbers.link(len(own))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_twice_the_error_passes_and_more_does_not(scale: float) -> None:
    assert link([1e-3], [1.99e-3], scale=scale).passed
    wrong = link([1e-3], [2.01e-3], scale=scale)
    assert not wrong.passed
    assert wrong.measured.startswith("error 2.01 x PyTorch's")


def test_luck_of_pytorch_on_one_image_fails_nobody() -> None:
    assert not link([1e-4], [1e-3]).passed
    assert link([1e-4, 1e-3, 1e-3], [1e-3, 1e-3, 1e-3]).passed


def test_an_image_that_is_hard_for_pytorch_too_passes() -> None:
    assert link([5e-3, 1e-3, 1e-3], [9e-3, 1e-3, 1e-3]).passed


def test_one_wrong_image_of_many_fails() -> None:
    assert not link([1e-3] * 8, [1e-3] * 7 + [2.5e-3]).passed
    assert not link([0.0] * 8, [0.0] * 7 + [1e-5]).passed


@pytest.mark.parametrize("output", ["scores", "labels"])
def test_scores_that_are_all_zero_prove_nothing(output: Output) -> None:
    found = link([0.0], [0.0], output, scale=0.0)
    assert not found.passed
    assert "all zero" in found.measured


def test_labels_are_held_to_the_same_noise() -> None:
    """Scores of the two classes differ by a constant, which an error of more than half of it turns around."""
    gap = float(TRUTH[1, 0, 0] - TRUTH[0, 0, 0])
    turned = 0.6 * gap
    assert link([gap], [turned], "labels").passed
    assert link([1e-6, gap], [turned, 0.0], "labels").passed
    assert not link([1e-6, 1e-6], [turned, 0.0], "labels").passed


def test_images_that_were_not_compared() -> None:
    numbers = Numbers(recipe("demo"))
    found = numbers.link(1)
    assert not found.passed
    assert found.measured == "0 of 1 images could be compared"
