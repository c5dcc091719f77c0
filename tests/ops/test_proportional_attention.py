"""Attention in which a key weighs as much as the patches it stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_cases import PROPERTY, assert_same, implementations, run_reference, seeds
from operator_inputs import Array

PLAIN: dict[str, Any] = {"heads": 2, "scale": 0.35}
OP = "proportional_attention"
every, compared = implementations(OP)


def packed(seed: int, images: int, rows: int, width: int = 8) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((images, rows, 3 * width)).astype(np.float32), rng.integers(1, 9, (images, rows)).astype(
        np.float32
    )


@compared
@PROPERTY
@given(seed=seeds, images=st.integers(1, 3), rows=st.integers(1, 9), heads=st.sampled_from([1, 2, 4]))
def test_equals_the_reference(run: Any, seed: int, images: int, rows: int, heads: int) -> None:
    inputs = packed(seed, images, rows)
    expected = run_reference(OP, inputs, heads=heads, scale=0.35)
    assert_same(run(OP, inputs, heads=heads, scale=0.35), expected, 2e-6)


@every
def test_a_row_of_size_three_equals_three_rows(run: Any) -> None:
    qkv, _ = packed(0, 1, 4)
    size = np.array([[1, 3, 1, 2]], np.float32)
    apart = np.repeat(qkv, [1, 3, 1, 2], axis=1)
    (merged,) = run(OP, [qkv, size], **PLAIN)
    (full,) = run(OP, [apart, np.ones((1, 7), np.float32)], **PLAIN)
    assert_same([merged], [full[:, [0, 1, 4, 5]]], 2e-6)


@every
def test_sizes_of_one_change_nothing(run: Any) -> None:
    qkv, size = packed(0, 2, 6)
    plain = run("attention", [qkv, None], **PLAIN)
    assert_same(run(OP, [qkv, np.ones_like(size)], **PLAIN), plain, 1e-6)
    assert abs(run(OP, [qkv, size], **PLAIN)[0] - plain[0]).max() > 0.1


@compared
def test_16_bit_tokens_have_sizes_in_fp32(run: Any) -> None:
    """At most twice the error of rounding inputs and result."""
    qkv, size = packed(0, 2, 9, 16)
    qkv = qkv.astype(np.float16)
    (expected,) = run_reference(OP, [qkv.astype(np.float32), size], **PLAIN)
    (found,) = run(OP, [qkv, size], **PLAIN)
    assert found.dtype == np.float16
    baseline = abs(expected.astype(np.float16) - expected).max()
    assert abs(found.astype(np.float32) - expected).max() <= 2 * baseline + 2**-10


def test_bf16_in_torch() -> None:
    qkv, size = (torch.from_numpy(x) for x in packed(0, 2, 9, 16))
    low = torch.ops.algm.proportional_attention(qkv.bfloat16(), size, 2, 0.35)
    assert low.dtype == torch.bfloat16
    high = torch.ops.algm.proportional_attention(qkv.bfloat16().float(), size, 2, 0.35)
    torch.testing.assert_close(low.float(), high, rtol=2**-8, atol=2**-8)
