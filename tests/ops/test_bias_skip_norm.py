"""The sum of a linear layer and a residual, normalised and as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from op_cases import assert_same, implementations, run_reference

every, compared = implementations("bias_skip_norm")


def inputs(dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    product, residual = (3 * rng.standard_normal((2, 2, 5, 7))).astype(dtype)
    bias, weight, shift = rng.standard_normal((3, 7)).astype(np.float32)
    return [product, bias, residual, weight, shift]


@compared
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 2.0**-10)])
def test_equals_the_reference(run: Any, dtype: str, tolerance: float) -> None:
    """Both round to 16 bits once."""
    given = inputs(dtype)
    found = run("bias_skip_norm", given, epsilon=1e-5)
    assert_same(found, run_reference("bias_skip_norm", given, epsilon=1e-5), tolerance)


@every
def test_the_sum_is_rounded_before_it_is_normalised(run: Any) -> None:
    """2048 + (1 + 1/2) is 2049.5, which fp16 rounds to 2050; added one by one in fp16 it would be 2048."""
    ones = np.ones((1, 1, 4), np.float16)
    scale = np.ones(4, np.float32)
    normed, total = run("bias_skip_norm", [ones, scale / 2, 2048 * ones, scale, scale], epsilon=1e-5)
    np.testing.assert_array_equal(total, 2050 * ones)
    np.testing.assert_array_equal(normed, ones)  # equal values: the shift alone is left
