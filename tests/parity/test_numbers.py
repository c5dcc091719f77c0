"""Links 4 to 6 on made-up outputs: what a runtime errs, held to what PyTorch errs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from algm_deploy.bundle.records import Link
from algm_deploy.parity.comparison import Counts, Decisions, Labels, Numbers
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


# --- gates that PyTorch's own error widens beyond everything ---------------------------------------------------------


def test_labels_need_no_less_than_nothing() -> None:
    """PyTorch in 16 bits agrees with fp32 on a third of the pixels: minus 33 % would be required."""
    labels = Labels(replace(recipe("demo"), precision="fp16"))
    counts = np.zeros((1, 2), np.int64)
    ours, free, exact = (
        {"labels": np.array([[found]], np.uint8), "token_counts": counts} for found in ([1, 1, 0], [2, 2, 0], [0, 0, 0])
    )
    labels.compare(ours, free, exact, None)
    found = labels.link(1)
    assert found.gate == "0 % (PyTorch in fp16: 33.333 %)"
    assert found.facts["label_agreement_required"] == 0
    assert found.passed


def test_no_more_decisions_can_differ_than_there_are() -> None:
    """PyTorch decides eight of ten otherwise than fp64: 160 % would be allowed, and moves make more than ten."""
    decisions = Decisions(recipe("demo"))
    decisions._images.append((Counts(unequal=False, decisions=10, others=12, own=8),))
    decisions._masks.append(())
    decisions._compared = 1
    found = decisions.link(1, 0)
    assert found.gate == "0 unexcused, 100 % of decisions"
    assert "100 % of decisions not as in fp64" in found.measured
    assert (found.facts["decisions_otherwise_than_fp64_allowed"], found.passed) == (16, True)
