"""The sum of a linear layer and a residual."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from op_cases import assert_same, implementations, run_reference

every, compared = implementations("bias_skip")


@compared
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 2.0**-10)])
def test_equals_the_reference(run: Any, dtype: str, tolerance: float) -> None:
    """Both round to 16 bits once."""
    rng = np.random.default_rng(0)
    product, residual = (3 * rng.standard_normal((2, 2, 5, 7))).astype(dtype)
    given = [product, rng.standard_normal(7).astype(np.float32), residual]
    assert_same(run("bias_skip", given), run_reference("bias_skip", given), tolerance)


@every
def test_a_small_bias_is_not_lost_between_two_large_values(run: Any) -> None:
    """2048 + (1 + 1/2) is 2049.5, which fp16 rounds to 2050; added one by one in fp16 it would be 2048."""
    ones = np.ones((1, 1, 4), np.float16)
    (total,) = run("bias_skip", [ones, np.full(4, 0.5, np.float32), 2048 * ones])
    np.testing.assert_array_equal(total, 2050 * ones)
