"""DToP: every implementation against the reference, and what the reference promises by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import op_cases as cases
import pytest
import torch

every, compared = cases.implementations("dtop")
PLAIN: dict[str, Any] = {"prefix": 1, "keep": 2}


def inputs(rows: int = 12, classes: int = 3, prefix: int = 1, tau: float = 0.5, seed: int = 0) -> list[np.ndarray]:
    """Tokens, of the second image three less, some of whose patches have lost theirs; few values, so that some tie."""
    rng = np.random.default_rng(seed)
    tokens = rng.standard_normal((2, prefix + rows, 3)).astype(np.float32)
    length = np.array([prefix + rows, prefix + rows - 3])
    tokens[1, length[1] :] = np.nan
    maps = np.stack([rng.permutation(np.r_[np.arange(prefix, valid), [-1] * (16 - valid)]) for valid in length])
    confidence = (rng.integers(0, 10, (2, rows, classes)) / 10).astype(np.float32)
    return [tokens, maps, length, confidence, np.array(tau, np.float32)]


@compared
@pytest.mark.parametrize(
    ("attributes", "tau"),
    [({}, 0.5), ({"keep": 1}, 0.3), ({"keep": 20}, 0.1), ({"prefix": 0}, 0.5), ({"prefix": 3}, 0.7), ({}, -1), ({}, 2)],
    ids=str,
)
def test_equals_the_reference(run: Any, attributes: dict[str, Any], tau: float) -> None:
    attributes = PLAIN | attributes
    given = inputs(prefix=attributes["prefix"], tau=tau)
    cases.assert_same(run("dtop", given, **attributes), cases.run_reference("dtop", given, **attributes), 0)


@every
def test_by_hand(run: Any) -> None:
    """Of the first class three are sure, the middle one least; of the second one alone; two are not."""
    tokens = np.array([9, 0, 1, 2, 3, 4, 5], np.float32)[None, :, None]
    confidence = np.array([[0.9, 0], [0.5, 0.4], [0.7, 0], [0.2, 0.8], [0.1, 0.6], [0.8, 0]], np.float32)[None]
    given = [tokens, np.array([[6, 5, 4, 3, 2, 1, -1]]), np.array([7]), confidence, np.array(0.6, np.float32)]
    rows, size, map, length = run("dtop", given, **PLAIN)
    np.testing.assert_array_equal(rows[0, :, 0], [9, 0, 1, 3, 4, 5])
    np.testing.assert_array_equal(size, np.ones((1, 6)))
    np.testing.assert_array_equal(map, [[5, 4, 3, -1, 2, 1, -1]])
    np.testing.assert_array_equal(length, [6])


@every
def test_ties_go_to_the_lower_class_and_row(run: Any) -> None:
    given = inputs()
    given[3] = np.full_like(given[3], 0.9)
    tokens, _, _, length = run("dtop", given, **PLAIN)
    np.testing.assert_array_equal(tokens, given[0][:, :3])
    np.testing.assert_array_equal(length, [3, 3])


@every
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_confidence_keeps_its_token(run: Any, value: float) -> None:
    given = inputs()
    given[3][:] = value
    *_, map, length = run("dtop", given, **PLAIN)
    np.testing.assert_array_equal(map, given[1])
    np.testing.assert_array_equal(length, given[2])


@compared
def test_16_bit_tokens_are_copied(run: Any) -> None:
    tokens, *others = inputs()
    given = [tokens.astype(np.float16), *others]
    cases.assert_same(run("dtop", given, **PLAIN), cases.run_reference("dtop", given, **PLAIN), 0)


def test_opcheck() -> None:
    given = [torch.from_numpy(np.array(x)) for x in inputs()]
    given[0] = given[0].nan_to_num()  # which opcheck would not find equal to itself
    torch.library.opcheck(torch.ops.algm.dtop.default, (*given, *PLAIN.values()))
