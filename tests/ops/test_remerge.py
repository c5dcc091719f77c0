"""Merging again: every implementation against the reference, and against the merge it repeats."""

from __future__ import annotations

from typing import Any

import numpy as np
import op_cases as cases
import pytest
import torch
from operator_inputs import GBM, similar_tokens

every, compared = cases.implementations("remerge")


def inputs(dtype: type = np.float32, prefix: int = 1) -> list[np.ndarray]:
    """Two images, the second shorter by two rows."""
    rng = np.random.default_rng(0)
    maps = np.array([[0, 1, 2, 3, 4, 0, 0, 4, 2], [2, 1, 0, 2, 2, 1, 0, 0, 1]]) + prefix
    size = np.stack([np.bincount(row, minlength=prefix + 5) for row in maps]).astype(np.float32)
    size[:, :prefix] = 1
    return [rng.standard_normal((2, prefix + 9, 4)).astype(dtype), maps, size]


@compared
@pytest.mark.parametrize("prefix", [0, 2])
def test_equals_the_reference(run: Any, prefix: int) -> None:
    given = inputs(prefix=prefix)
    found = run("remerge", given, prefix=prefix)
    cases.assert_same(found, cases.run_reference("remerge", given, prefix=prefix), 1e-6)
    np.testing.assert_array_equal(found[0][:, :prefix], given[0][:, :prefix])
    assert not found[0][1, prefix + 3 :].any()


@every
def test_it_repeats_a_merge(run: Any) -> None:
    """GBM's own means, where every token was one patch."""
    tokens = similar_tokens(np.random.default_rng(1), 2, 13, 4)
    merge = cases.run_reference("gbm", [*cases.sequence(tokens, 1), np.float32(0.2)], **GBM | {"rule": "fixed"})
    assert merge[0].shape[1] < 13
    (found,) = run("remerge", [tokens, merge[2], merge[1]], prefix=1)
    np.testing.assert_allclose(found, merge[0], rtol=0, atol=1e-6)


@every
def test_a_value_that_is_not_finite_reaches_its_row_alone(run: Any) -> None:
    given = inputs()
    given[0][0, 3], given[0][1, 4] = np.inf, np.nan
    (found,) = run("remerge", given, prefix=1)
    assert np.isposinf(found[0, 3]).all()
    assert np.isnan(found[1, 3]).all()
    assert np.isfinite(found).sum() == found.size - 8


@compared
def test_16_bit_values_are_summed_in_fp32(run: Any) -> None:
    given = inputs(np.float16)
    (found,) = run("remerge", given, prefix=1)
    assert found.dtype == np.float16
    cases.assert_same([found], cases.run_reference("remerge", given, prefix=1), 2**-10)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.algm.remerge.default, (*map(torch.from_numpy, inputs()), 1))
