"""ToMe: the reference against the published merge, and every implementation against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import op_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operator_inputs import Array, exact_tokens, similar_tokens

from algm_deploy.errors import ExecutionError
from algm_deploy.ops.gbm import WORST, reference_similarity
from algm_deploy.ops.tome import SEMANTICS, most_merges, tome_rows, tome_similarity

every, compared = cases.implementations("tome")


def inputs_of(tokens: Array, keys: Array, prefix: int, rng: np.random.Generator) -> list[Array]:
    """Sizes as merges before this one leave them."""
    _, size, patch_row, _ = cases.sequence(tokens, prefix)
    size[:, prefix:] = rng.integers(1, 5, size[:, prefix:].shape)
    return [tokens, size, patch_row, keys]


@compared
@cases.PROPERTY
@given(seed=cases.seeds, kind=cases.kinds, rows=st.integers(1, 12), prefix=cases.prefixes, share=st.floats(0, 1))
def test_equals_the_reference_where_sums_are_exact(
    run: Any, seed: int, kind: str, rows: int, prefix: int, share: float
) -> None:
    """Equal keys, so ties everywhere, and none or all of the possible merges among the cases."""
    rng = np.random.default_rng(seed)
    tokens, keys = (exact_tokens(rng, kind, (2, prefix + rows, width)) for width in (16, 4))
    attributes = {"r": round(share * most_merges(prefix + rows, prefix)), "prefix": prefix}
    inputs = inputs_of(tokens, keys, prefix, rng)
    cases.assert_same(run("tome", inputs, **attributes), cases.run_reference("tome", inputs, **attributes), 1e-6)


@every
@cases.PROPERTY
@given(seed=cases.seeds, rows=st.integers(2, 12), prefix=cases.prefixes)
def test_every_image_loses_r_rows(run: Any, seed: int, rows: int, prefix: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, keys = (similar_tokens(rng, 2, prefix + rows, width) for width in (8, 4))
    r = most_merges(prefix + rows, prefix)
    inputs = [tokens, *cases.sequence(tokens, prefix)[1:3], keys]
    values, size, patch_row = run("tome", inputs, r=r, prefix=prefix)
    assert values.shape == (2, prefix + rows - r, 8)
    cases.assert_partition(size, patch_row, np.full(2, prefix + rows - r), prefix)


@every
def test_keys_decide_and_sizes_weigh(run: Any) -> None:
    """Row 2 has the key of row 3, whatever its token is; their mean counts row 3 three times."""
    tokens = np.array([[[9.0], [1], [5], [1], [7], [2]]], np.float32)
    keys = np.array([[[1.0, 0], [1, 0], [0, 1], [0, 1], [1, 1], [-1, 0]]], np.float32)
    size = np.array([[1.0, 1, 1, 3, 1, 1]], np.float32)
    values, sizes, patch_row = run("tome", [tokens, size, np.array([[1, 2, 3, 4, 5]]), keys], r=1, prefix=1)
    assert values[0, :, 0].tolist() == [9, 7, 1, 2, 2]  # [cls | row 4 | rows 1, 3 and 5]
    assert sizes[0].tolist() == [1, 1, 1, 4, 1]
    assert patch_row[0].tolist() == [2, 3, 3, 1, 4]


@every
def test_ties_go_to_the_lower_row(run: Any) -> None:
    tokens = np.ones((1, 7, 4), np.float32)
    inputs = [tokens, *cases.sequence(tokens, 1)[1:3], tokens]
    assert run("tome", inputs, r=2, prefix=1)[2][0].tolist() == [2, 2, 3, 2, 4, 1]


@every
def test_without_prefix_rows_that_stay_are_ordered_by_similarity(run: Any) -> None:
    """As published, where only a class token asks for the order of the sequence."""
    tokens = np.arange(6, dtype=np.float32)[None, :, None]
    angle = np.array([0.0, 0.3, 2.0, 2.1, 4.0, 4.2])  # A rows 0, 2, 4 at 0.3, 0.1 and 0.2 from their best
    keys = np.stack([np.cos(angle), np.sin(angle)], -1)[None].astype(np.float32)
    values, _, patch_row = run("tome", [tokens, *cases.sequence(tokens, 0)[1:3], keys], r=1, prefix=0)
    assert values[0, :, 0].tolist() == [4, 0, 1, 2.5, 5]
    assert patch_row[0].tolist() == [1, 2, 3, 3, 0, 4]


@compared
def test_similarity_in_16_bits_keeps_fp32_sums(run: Any) -> None:
    """Cosines that are 1 in fp16: which pair is the best shows only in fp32."""
    keys = np.zeros((1, 4, 64), np.float16)
    keys[0, :, :32] = 1
    keys[0, 0, 32:] = 0.02
    tokens = np.zeros((1, 4, 8), np.float16)
    inputs = [tokens, *cases.sequence(tokens, 0)[1:3], keys]
    assert run("tome", inputs, r=1, prefix=0)[2][0].tolist() == [0, 1, 1, 2]


@compared
@pytest.mark.parametrize("r", [3, 8])
def test_as_many_merge_whatever_keys_hold(run: Any, r: int) -> None:
    tokens = exact_tokens(np.random.default_rng(0), "few", (2, 17, 16))
    keys = tokens.copy()
    keys[0, 4, 3], keys[0, 7, 5], keys[1, 6, 1] = np.inf, -np.inf, np.nan
    inputs = [tokens, *cases.sequence(tokens, 1)[1:3], keys]
    expected = cases.run_reference("tome", inputs, r=r, prefix=1)
    assert (expected[2][1, 5] == expected[2][1, 0]) == (r == 8)
    cases.assert_same(run("tome", inputs, r=r, prefix=1), expected, 0)


@compared
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_blocks_merge_one_after_the_other(run: Any, prefix: int) -> None:
    """In fp16, at the widths of heads and tokens that a network has; most keys have others that are as similar."""
    rng = np.random.default_rng(prefix)
    tokens = exact_tokens(rng, "few", (2, prefix + 256, 384), np.float16)
    inputs = [tokens, *cases.sequence(tokens, prefix)[1:3]]
    for r in (43, 43, 0, 17):
        keys = exact_tokens(rng, "signs", (2, inputs[0].shape[1], 64), np.float16)
        expected = cases.run_reference("tome", [*inputs, keys], r=r, prefix=prefix)
        cases.assert_same(run("tome", [*inputs, keys], r=r, prefix=prefix), expected, np.finfo(np.float16).eps)
        inputs = expected
    assert inputs[1].max() > 3


@compared
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_most_similar_merge_within_rounding(run: Any, dtype: Any) -> None:
    """Of any keys: a pair that merges may be a hair less similar than one that does not."""
    rng, r, hair = np.random.default_rng(0), 40, 1e-5
    keys = similar_tokens(rng, 2, 257, 64).astype(dtype)
    patch_row = run("tome", [keys, *cases.sequence(keys, 1)[1:3], keys], r=r, prefix=1)[2]
    best, _ = reference_similarity(keys, np.full(2, 257), 1, SEMANTICS, WORST)
    unit = keys.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=2, keepdims=True)
    for image, row in enumerate(patch_row[:, 1::2]):  # of A; B follows those of it that stay
        target = row - (1 + 128 - r)
        joins = target >= 0
        assert joins.sum() == r
        assert best[image][joins].min() >= best[image][~joins].max() - hair
        pairs = unit[image, 2::2][joins] * unit[image, 1::2][target[joins]]
        assert (pairs.sum(1) >= best[image][joins] - hair).all()


def test_kernels_refuse_keys_of_other_rows() -> None:
    """Their plan would name rows that the tokens do not have."""
    tokens, keys = (np.ones((1, rows, 4), np.float32) for rows in (9, 11))
    inputs = [tokens, *cases.sequence(tokens, 1)[1:3], keys]
    with pytest.raises(ExecutionError, match=r"expected keys of a shape \(1, 9, 'width'\) .* got \(1, 11, 4\)"):
        cases.run_kernels("tome", inputs, r=2, prefix=1)


def test_decisions_follow_from_similarities() -> None:
    rng = np.random.default_rng(0)
    keys = torch.from_numpy(similar_tokens(rng, 3, 41))
    best, match = tome_similarity(keys, 1)
    row = tome_rows(best, match, 8, 41, 1)
    for image in range(3):
        order = sorted(range(1, 21), key=lambda i: (-float(best[image, i]), i))
        joined = [2 * i for i in order[:8]]
        targets = [int(row[image, 1 + 2 * match[image, i]]) for i in order[:8]]
        assert row[image, joined].tolist() == targets
