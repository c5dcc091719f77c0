"""G2TM: every implementation against the reference, and what the reference promises by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import op_cases as cases
import pytest
import torch

from algm_deploy.ops.g2tm import groups, neighbours, reference_groups

every, compared = cases.implementations("g2tm")
PLAIN: dict[str, Any] = {"grid": [4, 5], "prefix": 1}


def of_grid(picture: list[str]) -> np.ndarray:
    """Tokens (1, 1 + N, D): equal letters are equal unit vectors, others are orthogonal."""
    letters = [ord(letter) - ord("a") for letter in "".join(picture)]
    return np.concatenate([np.zeros((1, 8)), np.eye(8)[letters]])[None].astype(np.float32)


def run_on(run: Any, tokens: np.ndarray, threshold: float, **attributes: Any) -> list[np.ndarray]:
    found: list[np.ndarray] = run(
        "g2tm", [tokens, np.ones(tokens.shape[:2], np.float32), np.float32(threshold)], **attributes
    )
    return found


@compared
@pytest.mark.parametrize("threshold", [0.0, 0.3, -2.0, np.inf])
@pytest.mark.parametrize(("grid", "prefix"), [([4, 5], 1), ([1, 20], 0), ([20, 1], 3)], ids=["wide", "line", "column"])
def test_equals_the_reference(run: Any, grid: list[int], prefix: int, threshold: float) -> None:
    tokens = np.random.default_rng(0).standard_normal((2, 20 + prefix, 6)).astype(np.float32)
    attributes = {"grid": grid, "prefix": prefix}
    expected = run_on(cases.run_reference, tokens, threshold, **attributes)
    cases.assert_same(run_on(run, tokens, threshold, **attributes), expected, 1e-6)


@every
def test_by_hand(run: Any) -> None:
    """Corners do not touch, and a group winds around another."""
    tokens = of_grid(["aaab", "bbab", "babb", "baaa"])
    rows, size, map, length = run_on(run, tokens, 0.9, grid=[4, 4], prefix=1)
    np.testing.assert_array_equal(map[0].reshape(4, 4), [[1, 1, 1, 2], [3, 3, 1, 2], [3, 4, 2, 2], [3, 4, 4, 4]])
    np.testing.assert_array_equal(size, [[1, 4, 4, 4, 4]])
    np.testing.assert_array_equal(rows[0, 1:], np.eye(8)[[0, 1, 1, 0]])
    np.testing.assert_array_equal(length, [5])


@every
def test_equal_to_the_threshold_is_no_link(run: Any) -> None:
    tokens = of_grid(["aa", "aa"])
    *_, length = run_on(run, tokens, 1.0, grid=[2, 2], prefix=1)
    np.testing.assert_array_equal(length, [5])


@every
def test_a_value_that_is_not_finite_stays_in_its_token(run: Any) -> None:
    tokens = of_grid(["aab", "abb"])
    tokens[0, 1, 0] = np.nan
    rows, *_ = run_on(run, tokens, 0.5, grid=[2, 3], prefix=1)
    assert np.isnan(rows[0]).any(1).tolist() == [False, True, False, False, False]


@every
def test_images_merge_alone(run: Any) -> None:
    tokens = np.concatenate([of_grid(["aabb", "aabb"]), of_grid(["abcd", "bcda"])])
    rows, size, _, length = run_on(run, tokens, 0.5, grid=[2, 4], prefix=1)
    np.testing.assert_array_equal(length, [3, 9])
    assert not rows[0, 3:].any()
    assert not size[0, 3:].any()


def spiral(side: int) -> np.ndarray:
    """Which neighbours are linked on a grid of one path that winds to the middle."""
    on, at, step = np.zeros((side, side), bool), [0, 0], (0, 1)
    on[0, 0] = True
    for _ in range(side * side):
        ahead = [at[0] + step[0], at[1] + step[1]]
        beyond = [at[0] + 2 * step[0], at[1] + 2 * step[1]]
        inside = all(0 <= a < side for a in ahead)
        if not inside or (all(0 <= b < side for b in beyond) and on[tuple(beyond)]):
            step = (step[1], -step[0])
            continue
        at = ahead
        on[tuple(at)] = True
    pairs = neighbours([side, side])
    return np.asarray(on.ravel()[pairs].all(1))


def test_the_steps_reach_the_end_of_every_path() -> None:
    """One winding path, mazes of many densities, and nothing or everything linked."""
    rng = np.random.default_rng(0)
    mazes = [rng.random(2 * 15 * 16) < share for share in np.linspace(0.3, 0.7, 12)]
    linked = np.stack([spiral(16), *mazes, np.zeros(480, bool), np.ones(480, bool)])
    found = groups(torch.from_numpy(linked), [16, 16]).numpy()
    np.testing.assert_array_equal(found, reference_groups(linked, [16, 16]))
    assert np.bincount(found[0]).max() > 90


def test_opcheck() -> None:
    tokens = torch.randn(2, 21, 6)
    torch.library.opcheck(torch.ops.algm.g2tm.default, (tokens, torch.ones(2, 21), torch.tensor(0.2), [4, 5], 1))
