"""CTS: every implementation against the reference, and what the reference promises by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import op_cases as cases
import pytest
import torch

every, compared = cases.implementations("cts")
PLAIN: dict[str, Any] = {"grid": [4, 6], "prefix": 1, "shared": 2}


def inputs(rows: int = 4, columns: int = 6, prefix: int = 1, seed: int = 0) -> list[np.ndarray]:
    """Tokens and scores."""
    rng = np.random.default_rng(seed)
    count = rows * columns
    tokens = rng.standard_normal((2, prefix + count + count // 4, 3)).astype(np.float32)
    return [tokens, rng.standard_normal((2, count // 4)).astype(np.float32)]


@compared
@pytest.mark.parametrize("change", [{}, {"shared": 1}, {"shared": 6}, {"prefix": 3}, {"prefix": 0}], ids=str)
def test_equals_the_reference(run: Any, change: dict[str, Any]) -> None:
    attributes = PLAIN | change
    given = inputs(prefix=attributes["prefix"])
    cases.assert_same(run("cts", given, **attributes), cases.run_reference("cts", given, **attributes), 0)


@every
def test_by_hand(run: Any) -> None:
    """Of two superpatches side by side the second shares: its patches are 2, 3, 6 and 7."""
    tokens = np.array([9, 0, 1, 2, 3, 4, 5, 6, 7, 100, 101], np.float32)[None, :, None]
    rows, size, map = run("cts", [tokens, np.array([[0.5, 0.75]], np.float32)], grid=[2, 4], prefix=1, shared=1)
    np.testing.assert_array_equal(rows[0, :, 0], [9, 0, 1, 4, 5, 101])
    np.testing.assert_array_equal(size, [[1, 1, 1, 1, 1, 4]])
    np.testing.assert_array_equal(map, [[1, 2, 5, 5, 3, 4, 5, 5]])


@every
def test_ties_go_to_the_lower_superpatch(run: Any) -> None:
    tokens, score = inputs()
    *_, map = run("cts", [tokens, np.zeros_like(score)], **PLAIN)
    np.testing.assert_array_equal(map[0].reshape(4, 6)[:2], [[17, 17, 18, 18, 1, 2], [17, 17, 18, 18, 3, 4]])


@every
def test_nan_is_the_lowest_score(run: Any) -> None:
    tokens, score = inputs()
    score[:, 3] = np.nan
    *_, map = run("cts", [tokens, score], **PLAIN | {"shared": 5})
    members = map.reshape(2, 4, 6)[:, 2:, :2].reshape(2, 4)
    assert [len(set(rows)) for rows in members.tolist()] == [4, 4]


@compared
def test_16_bit_tokens_are_copied(run: Any) -> None:
    tokens, score = inputs()
    given = [tokens.astype(np.float16), score]
    cases.assert_same(run("cts", given, **PLAIN), cases.run_reference("cts", given, **PLAIN), 0)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.algm.cts.default, (*map(torch.from_numpy, inputs()), *PLAIN.values()))
