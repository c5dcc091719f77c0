"""ELViT's reconstruction: every implementation against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import op_cases as cases
import pytest
import torch

every, compared = cases.implementations("elvit_restore")


def inputs(dtype: type = np.float32, prefix: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, prefix + 5, 4)).astype(dtype), rng.random((2, 9, 5)).astype(np.float32)]


@compared
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_equals_the_reference(run: Any, prefix: int) -> None:
    given = inputs(prefix=prefix)
    cases.assert_same(
        run("elvit_restore", given, prefix=prefix), cases.run_reference("elvit_restore", given, prefix=prefix), 1e-6
    )


@every
def test_a_patch_is_the_sum_of_its_rows(run: Any) -> None:
    values = np.array([[[9.0], [1], [10], [100]]], np.float32)
    weights = np.array([[[0, 1, 0], [0.5, 0, 0.5], [1, 1, 1]]], np.float32)
    (found,) = run("elvit_restore", [values, weights], prefix=1)
    assert found[0, :, 0].tolist() == [9, 10, 50.5, 111]


@compared
def test_16_bit_values_are_summed_in_fp32(run: Any) -> None:
    given = inputs(np.float16)
    (found,) = run("elvit_restore", given, prefix=1)
    (exact,) = cases.run_reference("elvit_restore", [given[0].astype(np.float32), given[1]], prefix=1)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, exact, rtol=2**-10, atol=1e-6)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.algm.elvit_restore.default, (*map(torch.from_numpy, inputs()), 1))
