"""MPM: every implementation against the reference, and what the reference promises by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import op_cases as cases
import pytest
import torch

every, compared = cases.implementations("mpm")


def angles(*degrees: float) -> np.ndarray:
    """Tokens (1, 1 + R, 2) of these directions behind a prefix row."""
    radians = np.radians([0.0, *degrees])
    return np.stack([np.cos(radians), np.sin(radians)], 1)[None].astype(np.float32)


@compared
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_equals_the_reference(run: Any, prefix: int, padded: bool) -> None:
    rng = np.random.default_rng(prefix)
    tokens = rng.standard_normal((3, 17 + prefix, 6)).astype(np.float32)
    inputs = cases.sequence(tokens, prefix, rng, padded)
    expected = cases.run_reference("mpm", inputs, prefix=prefix)
    assert (expected[3] < inputs[3]).any()
    cases.assert_partition(expected[1], expected[2], expected[3], prefix)
    cases.assert_same(run("mpm", inputs, prefix=prefix), expected, 1e-6)


@every
def test_by_hand(run: Any) -> None:
    """Row 3 looks for row 2, which has row 1; row 4 is alone. A pair stands where its first was, as a plain mean."""
    tokens, size = angles(170, 0, 5, 15, 90), np.array([[1, 1, 3, 1, 1, 1]], np.float32)
    inputs = [tokens, size, np.array([[1, 2, 2, 2, 3, 4, 5]]), np.array([6])]
    rows, sizes, map, length = run("mpm", inputs, prefix=1)
    np.testing.assert_array_equal(map, [[1, 2, 2, 2, 2, 3, 4]])
    np.testing.assert_array_equal(sizes, [[1, 1, 4, 1, 1]])
    np.testing.assert_array_equal(length, [5])
    np.testing.assert_allclose(rows[0, 2], (tokens[0, 2] + tokens[0, 3]) / 2, atol=1e-7)


@every
def test_ties_go_to_the_lower_row_and_a_nan_stays_alone(run: Any) -> None:
    """Of equal rows the first two find each other, the third finds the first."""
    tokens = np.ones((1, 5, 4), np.float32)
    tokens[0, 4, 2] = np.nan
    rows, _, map, length = run("mpm", cases.sequence(tokens, 1), prefix=1)
    np.testing.assert_array_equal(map, [[1, 1, 2, 3]])
    np.testing.assert_array_equal(length, [4])
    assert np.isnan(rows[0]).any(1).tolist() == [False, False, False, True]


@every
def test_a_single_token_has_no_other(run: Any) -> None:
    tokens = np.ones((1, 2, 4), np.float32)
    *_, length = run("mpm", cases.sequence(tokens, 1), prefix=1)
    np.testing.assert_array_equal(length, [2])


def test_opcheck() -> None:
    tokens = np.random.default_rng(0).standard_normal((2, 9, 6)).astype(np.float32)
    inputs = [torch.from_numpy(x) for x in cases.sequence(tokens, 1)]
    torch.library.opcheck(torch.ops.algm.mpm.default, (*inputs, 1))
