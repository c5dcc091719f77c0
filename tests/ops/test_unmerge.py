"""Unmerge: one gather."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from op_cases import PROPERTY, assert_same, implementations, prefixes, seeds

every, _ = implementations("unmerge")


@every
@PROPERTY
@given(
    seed=seeds,
    images=st.integers(1, 3),
    patches=st.integers(1, 9),
    prefix=prefixes,
    dtype=st.sampled_from(["float32", "float16"]),
)
def test_every_patch_gets_its_row(run: Any, seed: int, images: int, patches: int, prefix: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, patches + 1))
    values = rng.standard_normal((images, rows, 3)).astype(dtype)
    patch_row = rng.integers(0, rows, (images, patches))
    expected = np.stack([image[index] for image, index in zip(values, patch_row, strict=True)])
    assert_same(run("unmerge", [values, patch_row + prefix], prefix=prefix), [expected], 0)
