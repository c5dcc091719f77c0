"""EViT: every implementation against the reference, and what the reference promises by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import op_cases as cases
import pytest
import torch

every, compared = cases.implementations("evit")
PLAIN: dict[str, Any] = {"patches": 12, "rows": 9, "keep": 5, "prefix": 1}
TOLERANCE = 1e-6


def inputs(rows: int = 9, patches: int = 12, prefix: int = 1, seed: int = 0) -> list[np.ndarray]:
    """Tokens, a map of patches to some of the rows, and attention."""
    rng = np.random.default_rng(seed)
    tokens = rng.standard_normal((2, prefix + rows, 6)).astype(np.float32)
    map = prefix + rng.integers(0, rows, (2, patches))
    return [tokens, map, rng.random((2, prefix + rows)).astype(np.float32) / rows]


@compared
@pytest.mark.parametrize("change", [{}, {"rows": 12}, {"keep": 1}, {"keep": 8}, {"prefix": 3}, {"prefix": 0}], ids=str)
def test_equals_the_reference(run: Any, change: dict[str, Any]) -> None:
    attributes = PLAIN | change
    given = inputs(attributes["rows"], prefix=attributes["prefix"])
    cases.assert_same(run("evit", given, **attributes), cases.run_reference("evit", given, **attributes), TOLERANCE)


@every
def test_by_hand(run: Any) -> None:
    """Rows 1 and 3 stay; row 0 is nearer to 1, row 2 to 3; the last row is the weighted sum of the others."""
    tokens = np.array([[[9.0], [0.0], [1.0], [10.0], [12.0]]], np.float32)
    attention = np.array([[0.9, 0.125, 0.5, 0.25, 0.375]], np.float32)
    attributes = {"patches": 5, "rows": 4, "keep": 2, "prefix": 1}
    rows, map, source = run("evit", [tokens, np.array([[1, 2, 3, 4, 3]]), attention], **attributes)
    np.testing.assert_array_equal(rows[0, :, 0], [9, 1, 12, 0.125 * 0 + 0.25 * 10])
    np.testing.assert_array_equal(map, [[1, 1, 2, 2, 2]])
    np.testing.assert_array_equal(source, [[2, 2, 4, 4, 5]])


@every
def test_ties_go_to_the_lower_row(run: Any) -> None:
    tokens, map, attention = inputs()
    _, _, source = run("evit", [np.zeros_like(tokens), map, np.full_like(attention, 0.1)], **PLAIN)
    np.testing.assert_array_equal(source[0], [1, 2, 3, 4, 5, 1, 1, 1, 1, 10, 11, 12])


@every
def test_nan_is_the_least_attention(run: Any) -> None:
    tokens, map, attention = inputs()
    attention[:, 3] = np.nan
    _, _, source = run("evit", [tokens, map, attention], **PLAIN)
    assert (source[:, 2] != 3).all()


@compared
def test_16_bit_tokens_are_compared_in_fp32(run: Any) -> None:
    tokens, map, attention = inputs()
    tokens = tokens.astype(np.float16)
    rows, _, source = run("evit", [tokens, map, attention], **PLAIN)
    expected = cases.run_reference("evit", [tokens.astype(np.float32), map, attention], **PLAIN)
    assert rows.dtype == np.float16
    np.testing.assert_allclose(rows, expected[0], rtol=2**-10, atol=1e-6)
    np.testing.assert_array_equal(source, expected[2])


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.algm.evit.default, (*map(torch.from_numpy, inputs()), *PLAIN.values()))
