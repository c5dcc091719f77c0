"""Pixels as rows, one a patch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from op_cases import assert_same, implementations, run_reference

every, compared = implementations("patches")


@compared
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 1e-3)])
@pytest.mark.parametrize("side", [1, 2, 7])
def test_equals_the_reference(run: Any, side: int, dtype: str, tolerance: float) -> None:
    image = (100 * np.random.default_rng(0).standard_normal((2, 3, 3 * side, 2 * side))).astype(dtype)
    plan = {"side": side, "centre": 12.5, "scale": 0.01}
    assert_same(run("patches", [image], **plan), run_reference("patches", [image], **plan), tolerance)


@every
def test_a_product_with_the_weights_is_the_convolution(run: Any) -> None:
    rng = np.random.default_rng(1)
    image = rng.integers(0, 256, (2, 3, 8, 12)).astype(np.float32)
    weight = rng.integers(-3, 4, (5, 3, 4, 4)).astype(np.float32)
    (rows,) = run("patches", [image], side=4, centre=128.0, scale=1 / 128)
    centred = (torch.from_numpy(image) - 128) / 128
    expected = F.conv2d(centred, torch.from_numpy(weight), stride=4).flatten(2).mT
    np.testing.assert_array_equal(rows @ weight.reshape(5, -1).T, expected.numpy())


@every
def test_bytes_are_exact_in_16_bits(run: Any) -> None:
    image = np.arange(192, dtype=np.float16).reshape(1, 3, 8, 8) + 64
    (rows,) = run("patches", [image], side=8, centre=128.0, scale=1 / 128)
    np.testing.assert_array_equal(rows[0, 0], (np.arange(192) - 64) / 128)
