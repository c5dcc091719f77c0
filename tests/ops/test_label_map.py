"""Label map: gather, bilinear interpolation and argmax, in strips."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from op_cases import PROPERTY, implementations, prefixes, run_torch, seeds
from operator_inputs import Array

MODULE = sys.modules["algm_deploy.ops.label_map"]
CLOSE = 1e-5  # scores closer than this may change places with the order of additions
every, _ = implementations("label_map")


def case(rng: np.random.Generator, images: int, grid: tuple[int, int], classes: int, prefix: int) -> list[Array]:
    patches = grid[0] * grid[1]
    rows = int(rng.integers(1, patches + 1))
    scores = rng.standard_normal((images, rows, classes)).astype(np.float32)
    return [scores, rng.integers(0, rows, (images, patches)) + prefix]


def full_scores(inputs: list[Array], prefix: int, grid: tuple[int, int], size: tuple[int, int]) -> Array:
    """Scores (B, K, H, W) as PyTorch interpolates them."""
    scores, index = (torch.from_numpy(x) for x in inputs)
    patches = scores.float().gather(1, (index - prefix)[:, :, None].expand(-1, -1, scores.shape[2]))
    maps = patches.mT.unflatten(2, grid)
    return F.interpolate(maps, size=size, mode="bilinear", align_corners=False).numpy()


def assert_labels_of(labels: Array, scores: Array) -> None:
    """The labels of the highest scores, or of one that is as high but for rounding."""
    chosen = np.take_along_axis(scores, labels[:, None].astype(np.int64), 1)[:, 0]
    assert (scores.max(1) - chosen < CLOSE).all()
    clear = np.partition(scores, -2, axis=1)[:, -1] - np.partition(scores, -2, axis=1)[:, -2] > CLOSE
    np.testing.assert_array_equal(labels[clear], scores.argmax(1)[clear])
    assert clear.mean() > 0.9


@every
@PROPERTY
@given(
    seed=seeds,
    images=st.integers(1, 3),
    grid=st.sampled_from([(1, 1), (2, 3), (4, 4), (1, 6)]),
    factor=st.sampled_from([(4, 4), (16, 8), (1, 1), (3, 5)]),
    prefix=prefixes,
)
def test_equals_interpolate_and_argmax(
    run: Any, seed: int, images: int, grid: tuple[int, int], factor: tuple[int, int], prefix: int
) -> None:
    size = (grid[0] * factor[0], grid[1] * factor[1])
    inputs = case(np.random.default_rng(seed), images, grid, 5, prefix)
    (labels,) = run("label_map", inputs, prefix=prefix, grid=list(grid), size=list(size))
    assert labels.dtype == np.uint8
    assert labels.shape == (images, *size)
    assert_labels_of(labels, full_scores(inputs, prefix, grid, size))


@every
@pytest.mark.parametrize(("classes", "dtype"), [(1, "uint8"), (255, "uint8"), (256, "int32"), (300, "int32")])
def test_labels_are_as_wide_as_the_classes_need(run: Any, classes: int, dtype: str) -> None:
    scores = np.zeros((1, 1, classes), np.float32)
    scores[0, 0, -1] = 1
    inputs = [scores, np.zeros((1, 4), np.int64)]
    (labels,) = run("label_map", inputs, prefix=0, grid=[2, 2], size=[4, 4])
    assert labels.dtype == dtype
    assert (labels == classes - 1).all()


@every
def test_ties_go_to_the_lower_class(run: Any) -> None:
    scores = np.float32([[[0, 1, 1, 0.5], [2, 0, 2, 2]]])
    (labels,) = run("label_map", [scores, np.array([[0, 1]])], prefix=0, grid=[1, 2], size=[1, 2])
    assert labels.tolist() == [[[1, 0]]]


@every
def test_scores_are_interpolated_in_fp32_not_labels(run: Any) -> None:
    """Half-pixel centres: between two patches the crossing is in the middle, the outer pixels repeat the edge."""
    scores = np.float16([[[1, 0], [0, 3]]])
    (labels,) = run("label_map", [scores, np.array([[0, 1]])], prefix=0, grid=[1, 2], size=[1, 8])
    # Class 0 wins where 1 - f > 3 f, that is f < 1/4; pixel centres have f = 0, 0, 1/8, 3/8, ...
    assert labels[0, 0].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("elements", [1, 100, 1000, 1 << 23])
def test_strips_change_nothing(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    inputs = case(np.random.default_rng(0), 2, (5, 3), 7, 1)
    attributes = {"prefix": 1, "grid": [5, 3], "size": [40, 24]}
    whole = run_torch("label_map", inputs, **attributes)[0]
    monkeypatch.setattr(MODULE, "STRIP_ELEMENTS", elements)
    np.testing.assert_array_equal(run_torch("label_map", inputs, **attributes)[0], whole)


def test_the_full_scores_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    original = torch.Tensor.max

    def watched(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal largest
        largest = max(largest, self.numel())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "max", watched)
    monkeypatch.setattr(MODULE, "STRIP_ELEMENTS", 1000)
    inputs = case(np.random.default_rng(0), 2, (4, 4), 7, 0)
    run_torch("label_map", inputs, prefix=0, grid=[4, 4], size=[64, 64])
    assert 0 < largest <= 1000
