"""Mask labels: interpolation, sigmoid, weighted sums over queries and argmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import PROPERTY, implementations, seeds
from operator_inputs import assert_mask_labels, mask_inputs

from algm_deploy.ops import reference

every, compared = implementations("mask_labels")


@every
@PROPERTY
@given(
    seed=seeds,
    images=st.integers(1, 2),
    grid=st.sampled_from([(1, 1), (2, 3), (4, 4), (1, 6)]),
    size=st.sampled_from([(16, 24), (7, 5), (2, 3), (3, 2)]),
    queries=st.sampled_from([1, 3, 17]),
)
def test_labels_are_those_of_the_highest_sums(
    run: Any, seed: int, images: int, grid: tuple[int, int], size: tuple[int, int], queries: int
) -> None:
    """Up to the rounding of fp32, at sizes that are no multiple of the grid's and smaller than it too."""
    masks, classes = mask_inputs(np.random.default_rng(seed), (images, queries, *grid), 5, np.float32, 4.0)
    (labels,) = run("mask_labels", [masks, classes], size=list(size))
    assert labels.dtype == np.uint8
    assert labels.shape == (images, *size)
    assert assert_mask_labels(labels, masks, classes) > 0.9


@compared
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("reach", [30.0, 1e4])
def test_where_no_query_has_a_mask_tiny_values_decide(run: Any, reach: float, dtype: Any) -> None:
    """Sums of a pixel that is far from all masks are tiny, those inside are one, and both have their best class."""
    rng = np.random.default_rng(3)
    masks, classes = mask_inputs(rng, (2, 9, 4, 6), 7, dtype, reach)
    masks[0] = -np.abs(masks[0])
    (labels,) = run("mask_labels", [masks, classes], size=[32, 48])
    assert assert_mask_labels(labels, masks, classes) > 0.3
    if reach == 30:
        assert len(np.unique(labels[0])) > 1


def test_a_pixel_may_differ_only_where_sums_are_as_good() -> None:
    """One label of 20000 is enough, and a sum that is less by more than rounding."""
    masks, classes = np.zeros((1, 3, 2, 2), np.float32), np.full((1, 3, 3), 0.25, np.float32)
    classes[..., 2] = 0.25 * (1 - 2.0**-19)
    labels = reference.mask_labels(masks, classes, size=(100, 200))
    assert assert_mask_labels(labels, masks, classes) == 1
    labels[0, 7, 5] = 1
    assert assert_mask_labels(labels, masks, classes) == 1 - 1 / 20000, "a tie"
    labels[0, 7, 5] = 2
    with pytest.raises(AssertionError, match="a class that has less"):
        assert_mask_labels(labels, masks, classes)
    assert_mask_labels(labels, masks, classes, rounding=2.0**-19)
    with pytest.raises(AssertionError, match="a class that has less"):
        assert_mask_labels(labels, masks, classes, rounding=2.0**-19, most=2.0**-21)


@every
@pytest.mark.parametrize(("classes", "dtype"), [(1, "uint8"), (255, "uint8"), (256, "int32"), (300, "int32")])
def test_labels_are_as_wide_as_the_classes_need(run: Any, classes: int, dtype: str) -> None:
    share = np.zeros((1, 1, classes), np.float32)
    share[0, 0, -1] = 1
    (labels,) = run("mask_labels", [np.zeros((1, 1, 2, 2), np.float32), share], size=[4, 4])
    assert labels.dtype == dtype
    assert (labels == classes - 1).all()


@every
def test_ties_go_to_the_lower_class(run: Any) -> None:
    masks = np.float32([[[[2, -2]], [[-2, 2]]]])
    share = np.float32([[[0.25, 0.5, 0.5, 0.25], [0.5, 0.25, 0.25, 0.5]]])
    (labels,) = run("mask_labels", [masks, share], size=[1, 2])
    assert labels.tolist() == [[[1, 0]]]
    (labels,) = run("mask_labels", [np.full((1, 2, 1, 1), -2e4, np.float32), share], size=[2, 2])
    assert not labels.any(), "sums that are all zero"


@every
def test_masks_are_interpolated_not_their_sigmoids(run: Any) -> None:
    """Between cells of 8 and -1000 the mask is at -118 an eighth of the way, where its sigmoid is next to nothing."""
    masks = np.float16([[[[8, -1000]], [[-8, -8]]]])
    share = np.float32([[[1, 0], [0, 1]]])
    (labels,) = run("mask_labels", [masks, share], size=[1, 8])
    assert labels[0, 0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
