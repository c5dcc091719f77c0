"""GELU of a product and its bias."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from op_cases import assert_same, implementations, run_reference

every, compared = implementations("gelu")


@compared
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 2e-3)])
def test_equals_the_reference(run: Any, dtype: str, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    product = (3 * rng.standard_normal((2, 5, 7))).astype(dtype)
    bias = rng.standard_normal(7).astype(np.float32)
    assert_same(run("gelu", [product, bias]), run_reference("gelu", [product, bias]), tolerance)


@every
def test_known_values(run: Any) -> None:
    """Far from zero it is x or 0; at one it is the normal distribution's share below one."""
    product = np.array([0, 1, -1, 30, -30], np.float32).reshape(1, 5, 1)
    (found,) = run("gelu", [product, np.zeros(1, np.float32)])
    np.testing.assert_allclose(found.ravel(), [0, 0.8413447, -0.1586553, 30, 0], rtol=2e-6, atol=1e-7)
    (shifted,) = run("gelu", [product - 1, np.ones(1, np.float32)])
    np.testing.assert_array_equal(shifted, found)
