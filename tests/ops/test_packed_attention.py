"""Attention within images, from the product of a linear layer and its bias."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import PROPERTY, assert_same, implementations, run_reference, seeds
from operator_inputs import Array

PLAIN: dict[str, Any] = {"heads": 2, "scale": 0.35}
every, compared = implementations("packed_attention")


def inputs(rng: np.random.Generator, length: Array | None, images: int, rows: int, width: int = 8) -> list[Any]:
    product = rng.standard_normal((images, rows, 3 * width)).astype(np.float32)
    return [product, rng.standard_normal(3 * width).astype(np.float32), length]


def existing(values: Array, length: Array | None) -> list[Array]:
    lengths = [values.shape[1]] * len(values) if length is None else length
    return [image[:rows] for image, rows in zip(values, lengths, strict=True)]


@compared
@PROPERTY
@given(seed=seeds, images=st.integers(1, 4), rows=st.integers(1, 7), padded=st.booleans())
def test_equals_the_reference(run: Any, seed: int, images: int, rows: int, padded: bool) -> None:
    rng = np.random.default_rng(seed)
    length = rng.integers(1, rows + 1, images) if padded else None
    if length is not None:
        length[rng.integers(images)] = rows
    given = inputs(rng, length, images, rows)
    (expected,) = run_reference("packed_attention", given, **PLAIN)
    (found,) = run("packed_attention", given, **PLAIN)
    assert found.shape == (images, rows, 8)
    assert_same(existing(found, length), existing(expected, length), 2e-6)


@every
def test_a_bias_of_keys_changes_nothing(run: Any) -> None:
    product, bias, _ = inputs(np.random.default_rng(1), None, 2, 5)
    (before,) = run("packed_attention", [product, bias, None], **PLAIN)
    bias[8:16] += 3
    assert_same(run("packed_attention", [product, bias, None], **PLAIN), [before], 5e-6)


@compared
@pytest.mark.parametrize("content", [np.nan, np.inf])
def test_rows_behind_a_length_are_never_read(run: Any, content: float) -> None:
    product, bias, length = inputs(np.random.default_rng(2), np.array([6, 4, 1]), 3, 6)
    clean = existing(run("packed_attention", [product, bias, length], **PLAIN)[0], length)
    for image, rows in enumerate(length):
        product[image, rows:] = content
    assert_same(existing(run("packed_attention", [product, bias, length], **PLAIN)[0], length), clean, 0)
