"""Deformable attention: every implementation against the reference, and that against PyTorch's own sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import op_cases as cases
import pytest
import torch
import torch.nn.functional as F
from operator_inputs import places_error

from algm_deploy.errors import ExecutionError

every, compared = cases.implementations("deformable_attention")
SHAPES = [4, 6, 2, 3, 1, 2]
CELLS = 32
IMAGES, QUERIES, HEADS, POINTS, WIDTH = 2, 5, 3, 2, 4


def inputs(shapes: list[int] = SHAPES, dtype: type = np.float32) -> list[np.ndarray]:
    """Places up to half a grid outside, shares that sum to one."""
    rng, levels = np.random.default_rng(0), len(shapes) // 2
    cells = int(np.prod(np.reshape(shapes, (-1, 2)), axis=1).sum())
    shares = rng.random((IMAGES, QUERIES, HEADS, levels, POINTS)).astype(np.float32)
    return [
        rng.standard_normal((IMAGES, cells, HEADS, WIDTH)).astype(dtype),
        rng.uniform(-0.5, 1.5, (*shares.shape, 2)).astype(np.float32),
        shares / shares.sum((3, 4), keepdims=True),
    ]


def place(across: float, down: float, value: np.ndarray, share: float = 1.0) -> list[np.ndarray]:
    """One query of one head that looks at one place of a value (rows, columns)."""
    location = np.array([across, down], np.float32).reshape(1, 1, 1, 1, 1, 2)
    return [value.astype(np.float32).reshape(1, -1, 1, 1), location, np.full((1, 1, 1, 1, 1), share, np.float32)]


def assert_near(
    found: np.ndarray, expected: np.ndarray, given: list[np.ndarray], shapes: list[int], rounding: float = 0.0
) -> None:
    """Within what the rounding of places, shares and sums explains."""
    error = np.abs(found.astype(np.float64) - expected.astype(np.float64)).reshape(IMAGES, QUERIES, HEADS, WIDTH)
    assert (error <= places_error(given[0], given[2], shapes, rounding)[..., None]).all(), error.max()


@compared
@pytest.mark.parametrize("shapes", [SHAPES, [4, 6], [1, 1, 3, 2]])
def test_equals_the_reference(run: Any, shapes: list[int]) -> None:
    given = inputs(shapes)
    (expected,) = cases.run_reference("deformable_attention", given, shapes=shapes)
    assert np.abs(expected).max() > 0.5
    (found,) = run("deformable_attention", given, shapes=shapes)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert_near(found, expected, given, shapes)


def test_the_reference_is_bilinear_sampling_with_zeros_around() -> None:
    # In fp64, where its way from [0, 1] to [-1, 1] and back leaves nothing that could be seen here.
    value, locations, shares = (torch.from_numpy(x).double() for x in inputs())
    expected = torch.zeros(IMAGES, HEADS, QUERIES, WIDTH, dtype=torch.float64)
    first = 0
    for level, (rows, columns) in enumerate(np.reshape(SHAPES, (-1, 2)).tolist()):
        grid = value[:, first : first + rows * columns].permute(0, 2, 3, 1).reshape(-1, WIDTH, rows, columns)
        first += rows * columns
        where = 2 * locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
        seen = F.grid_sample(grid, where, align_corners=False).unflatten(0, (IMAGES, HEADS))
        expected += (seen * shares[:, :, :, level].transpose(1, 2)[:, :, None]).sum(-1).mT
    (found,) = cases.run_reference("deformable_attention", inputs(), shapes=SHAPES)
    # The reference's last step: a rounding to fp32.
    np.testing.assert_allclose(found, expected.transpose(1, 2).flatten(2), rtol=2**-24, atol=2**-50)


@every
@pytest.mark.parametrize(
    ("across", "down", "expected"),
    [
        (0.25, 0.25, 1),  # the centre of the first cell
        (0.5, 0.5, 2.5),
        (0.0, 0.25, 0.5),  # the outer edge: half of it is outside
        (-0.25, 0.25, 0),  # a whole cell outside
        (1.25, 0.75, 0),
        (0.25, 1e30, 0),
        (-np.inf, np.inf, 0),
        (np.nan, 0.25, np.nan),
        (0.25, np.nan, np.nan),
    ],
)
def test_a_place_inside_at_the_edge_and_outside(run: Any, across: float, down: float, expected: float) -> None:
    given = place(across, down, np.array([[1, 2], [3, 4]]))
    np.testing.assert_array_equal(run("deformable_attention", given, shapes=[2, 2])[0], [[[expected]]])


@every
def test_a_value_that_is_not_finite_reaches_those_who_look_at_it(run: Any) -> None:
    value = np.array([[np.nan, 2, np.inf, 4]])
    # A place in the centre of a cell looks at the next one too, with a share of zero: so 3/8 is not 2.
    for across, expected in ((1 / 8, np.nan), (3 / 8, np.nan), (5 / 8, np.inf), (7 / 8, 4), (-1, 0), (2, 0)):
        found = run("deformable_attention", place(across, 0.5, value), shapes=[1, 4])[0]
        np.testing.assert_array_equal(found, [[[expected]]])


@every
def test_a_share_that_is_nan_reaches_its_query_and_head_alone(run: Any) -> None:
    given = inputs()
    given[2][1, 3, 2, 0, 1] = np.nan
    (found,) = run("deformable_attention", given, shapes=SHAPES)
    undefined = np.isnan(found).reshape(IMAGES, QUERIES, HEADS, WIDTH)
    assert undefined[1, 3, 2].all()
    assert undefined.sum() == WIDTH


@compared
def test_16_bit_values_are_summed_in_fp32(run: Any) -> None:
    given = inputs(dtype=np.float16)
    (found,) = run("deformable_attention", given, shapes=SHAPES)
    (exact,) = cases.run_reference("deformable_attention", [given[0].astype(np.float32), *given[1:]], shapes=SHAPES)
    assert found.dtype == np.float16
    assert_near(found, exact, given, SHAPES, rounding=2**-11)


@pytest.mark.parametrize(
    ("shapes", "change", "message"),
    [
        ([4, 6, 2], {}, "expected rows and columns of every level as shapes"),
        ([], {}, "expected rows and columns"),
        ([4, 0, 2, 3], {}, "expected rows and columns"),
        ([4, 6, 2, 3, 1, 3], {}, r"expected a value of \(images, 33, heads, width\)"),
        ([4, 8], {}, r"expected shares of \(images, queries, heads, 1, points\)"),
        (SHAPES, {2: (2, 5, 3, 3, 1)}, r"expected locations of \(2, 5, 3, 3, 1, 2\)"),
        (SHAPES, {2: (2, 5, 2, 3, 2)}, "expected shares of"),
        (SHAPES, {1: (2, 5, 3, 3, 2)}, "expected locations of"),
    ],
)
def test_shapes_that_contradict_are_refused(shapes: list[int], change: dict[int, Any], message: str) -> None:
    given = [torch.from_numpy(x) for x in inputs()]
    for index, shape in change.items():
        given[index] = torch.zeros(shape)
    for device in ("cpu", "meta"):
        with pytest.raises(ExecutionError, match=message):
            torch.ops.algm.deformable_attention(*(x.to(device) for x in given), shapes)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.algm.deformable_attention.default, (*map(torch.from_numpy, inputs()), SHAPES))
