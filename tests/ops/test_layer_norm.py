"""Layer normalisation of rows by fp32 parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from op_cases import assert_same, implementations, run_reference

every, compared = implementations("layer_norm")


@compared
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 2.0**-10)])
def test_equals_the_reference(run: Any, dtype: str, tolerance: float) -> None:
    """Both round to 16 bits once."""
    rng = np.random.default_rng(0)
    given = [(3 * rng.standard_normal((2, 5, 7))).astype(dtype), *rng.standard_normal((2, 7)).astype(np.float32)]
    assert_same(run("layer_norm", given, epsilon=1e-5), run_reference("layer_norm", given, epsilon=1e-5), tolerance)


@every
def test_a_sum_beyond_16_bits(run: Any) -> None:
    """The row's sum is 240000, which fp16 has not; its mean is 60000, its deviation 32."""
    x = np.array([[[59968, 60032, 59968, 60032]]], np.float16)
    (normed,) = run("layer_norm", [x, np.full(4, 2, np.float32), np.ones(4, np.float32)], epsilon=0.0)
    np.testing.assert_array_equal(normed, [[[-1, 3, -1, 3]]])
