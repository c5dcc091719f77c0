"""Which differences of merge decisions noise excuses, and which it does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from algm_deploy.parity.decisions import map_problem
from algm_deploy.parity.merges import differing
from algm_deploy.parity.merges.clap import ClapFacts, clap_problems
from algm_deploy.parity.merges.gbm import GbmFacts, gbm_problems
from algm_deploy.parity.merges.tome import tome_problems
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan

GRID, PREFIX = (4, 4), 1  # four windows of 2x2
NOISE = 1e-3
PLAN = MergePlan(clap_threshold=0.9)
COUPLED = replace(PLAN, batch="batch_min")


def clap_map(*windows: int) -> np.ndarray:
    """The map of merging those windows of a 4x4 grid, in that order."""
    members = {0: (0, 1, 4, 5), 1: (2, 3, 6, 7), 2: (8, 9, 12, 13), 3: (10, 11, 14, 15)}
    token_map = np.full(16, -1)
    for place, window in enumerate(windows):
        token_map[list(members[window])] = PREFIX + place
    rest = np.flatnonzero(token_map < 0)
    token_map[rest] = PREFIX + len(windows) + np.arange(len(rest))
    return token_map


def clap(
    similarity: list[float], windows: tuple[int, ...], plan: MergePlan = PLAN, noise: float = NOISE, least: int = 0
) -> list[str]:
    facts = ClapFacts(np.array(similarity, np.float32), 0.9, noise, least)
    return clap_problems(facts, clap_map(*windows), plan, GRID, PREFIX)


@pytest.mark.parametrize(
    ("similarity", "windows", "problem"),
    [
        ([0.95, 0.5, 0.99, 0.5], (2, 0), None),
        ([0.95, 0.5, 0.99, 0.8995], (2, 0, 3), None),  # merged just below the threshold
        ([0.95, 0.5, 0.99, 0.8985], (2, 0, 3), "merged a window 1.5e-03 below the threshold"),
        ([0.95, 0.5, 0.99, 0.9005], (2, 0), None),  # left just above
        ([0.95, 0.5, 0.99, 0.9015], (2, 0), "left a window 1.5e-03 above the threshold unmerged"),
        ([0.9505, 0.5, 0.95, 0.5], (2, 0), None),  # nearly tied, either order
        ([0.95, 0.5, 0.95, 0.5], (2, 0), None),  # tied, the later window first
        ([0.9515, 0.5, 0.95, 0.5], (2, 0), "two windows are in the wrong order, 1.5e-03 apart"),
        ([0.95, 0.9505, 0.951, 0.9515], (0, 1, 2, 3), "wrong order, 1.5e-03 apart"),  # small steps add up
        ([0.5, 0.5, 0.5, 0.5], (), None),
        ([0.5, 0.95, 0.5, 0.5], (), "left a window"),
        ([0.95, 0.95, 0.95, 0.95], (0, 1, 2, 3), None),
    ],
)
def test_clap_of_one_image(similarity: list[float], windows: tuple[int, ...], problem: str | None) -> None:
    found = clap(similarity, windows)
    assert (not found) if problem is None else (len(found) == 1 and problem in found[0])


def test_clap_below_the_threshold_says_so_for_both_kinds_of_mistake() -> None:
    assert len(clap([0.95, 0.5, 0.5, 0.5], (1,))) == 2


def test_clap_in_raster_order() -> None:
    raster = replace(PLAN, order="raster")
    similarity = [0.95, 0.5, 0.99, 0.5]
    assert not clap(similarity, (0, 2), raster)
    assert "not in raster order" in clap(similarity, (2, 0), raster)[0]


@pytest.mark.parametrize(
    ("similarity", "windows", "least", "problem"),
    [
        ([0.95, 0.99, 0.98, 0.5], (1, 2), 2, None),  # the two best of three
        ([0.95, 0.99, 0.98, 0.5], (1, 0), 2, "left a window 3.0e-02 above one that merged"),
        ([0.95, 0.99, 0.9505, 0.5], (1, 0), 2, None),  # rivals for the last rank, nearly tied
        ([0.95, 0.99, 0.98, 0.5], (1,), 2, "merged 1 of the at least 2 windows all images can merge"),
        ([0.95, 0.99, 0.98, 0.5], (), 2, "merged 0 of the at least 2"),
        ([0.95, 0.99, 0.98, 0.5], (1, 2, 0, 3), 2, "below the threshold"),
    ],
)
def test_clap_of_coupled_images(
    similarity: list[float], windows: tuple[int, ...], least: int, problem: str | None
) -> None:
    found = clap(similarity, windows, COUPLED, least=least)
    assert (not found) if problem is None else any(problem in text for text in found)


def test_clap_refuses_half_a_window() -> None:
    token_map = clap_map(0)
    token_map[[5, 6]] = token_map[[6, 5]]
    facts = ClapFacts(np.array([0.95, 0.5, 0.5, 0.5], np.float32), 0.9, NOISE)
    assert "not one that merging whole windows gives" in clap_problems(facts, token_map, PLAN, GRID, PREFIX)[0]


@pytest.mark.parametrize("noise", [np.nan, np.inf])
def test_noise_that_is_no_number_excuses_nothing(noise: float) -> None:
    assert clap([0.95, 0.5, 0.5, 0.5], (1,), noise=noise) == ["CLAP: similarities are not finite"]
    assert gbm({2: 1}, noise=noise) == ["GBM: similarities are not finite"]


# Rows [cls 1 2 3 4 5 6]: A are rows 2, 4, 6 (row 0 never merges), B are rows 1, 3, 5.
SCORES = {2: (0.95, 0.5, 0.5), 4: (0.5, 0.97, 0.9695), 6: (0.5, 0.5, 0.6)}


def gbm_map(joins: dict[int, int]) -> np.ndarray:
    """The map of six patches after joins of rows of A to rows of B."""
    kept = [row for row in (2, 4, 6) if row not in joins] + [1, 3, 5]
    new = {row: PREFIX + place for place, row in enumerate(kept)}
    return np.array([new[joins.get(row, row)] for row in range(1, 7)])


def gbm(
    joins: dict[int, int],
    limit: float = 0.9,
    noise: float = NOISE,
    limit_noise: float = 0.0,
    plan: MergePlan = PLAN,
    least: int = 0,
) -> list[str]:
    scores = np.array([(-np.inf,) * 3, *SCORES.values()], np.float32)
    facts = GbmFacts(scores, np.array([False, True, True, True]), limit, noise, limit_noise, least)
    return gbm_problems(facts, np.arange(1, 7), gbm_map(joins), plan, PREFIX)


@pytest.mark.parametrize(
    ("joins", "limit", "problem"),
    [
        ({2: 1, 4: 3}, 0.9, None),
        ({2: 1, 4: 5}, 0.9, None),  # two targets nearly tied
        ({2: 3, 4: 3}, 0.9, "joined one that is 4.5e-01 less similar than the best"),
        ({4: 3}, 0.9505, None),
        ({2: 1, 4: 3}, 0.9505, None),  # merged just below
        ({2: 1, 4: 3}, 0.9515, "merged a token 1.5e-03 below the threshold"),
        ({4: 3}, 0.9495, None),  # left just above
        ({4: 3}, 0.9485, "left a token 1.5e-03 above the threshold unmerged"),
        ({}, 1.5, None),
        ({}, np.nan, None),  # an undefined threshold merges nothing
        ({2: 1}, np.nan, "below the threshold"),
        ({2: 1}, np.inf, "below the threshold"),
        ({2: 1, 4: 3, 6: 5}, -100.0, None),
    ],
)
def test_gbm_of_one_image(joins: dict[int, int], limit: float, problem: str | None) -> None:
    found = gbm(joins, limit)
    assert (not found) if problem is None else (len(found) == 1 and problem in found[0])


def test_gbm_limit_has_noise_of_its_own() -> None:
    assert gbm({2: 1, 4: 3}, 0.953)
    assert not gbm({2: 1, 4: 3}, 0.953, limit_noise=0.003)


@pytest.mark.parametrize(
    ("joins", "least", "problem"),
    [
        ({4: 3}, 1, None),
        ({2: 1}, 1, "left a token 2.0e-02 above one that merged"),
        ({4: 3}, 2, "merged 1 of the at least 2 tokens"),
        ({}, 1, "merged 0 of the at least 1 tokens"),
    ],
)
def test_gbm_of_coupled_images(joins: dict[int, int], least: int, problem: str | None) -> None:
    found = gbm(joins, plan=COUPLED, least=least)
    assert (not found) if problem is None else (len(found) == 1 and problem in found[0])


def test_gbm_counts_what_surely_merges() -> None:
    scores = np.array([(-np.inf,) * 3, *SCORES.values()], np.float32)
    sources = np.array([False, True, True, True])
    assert GbmFacts(scores, sources, 0.9, NOISE, 0.0).sure == 2
    assert GbmFacts(scores, sources, 0.9495, NOISE, 0.0).sure == 1


def test_gbm_refuses_another_numbering() -> None:
    facts = GbmFacts(np.zeros((4, 3), np.float32), np.ones(4, bool), 0.9, NOISE, 0.0)
    token_map = gbm_map({2: 1})[::-1].copy()
    assert "not one that joining tokens gives" in gbm_problems(facts, np.arange(1, 7), token_map, PLAN, PREFIX)[0]


def test_gbm_of_the_paper_splits_behind_the_prefix() -> None:
    paper = replace(PLAN, semantics="paper")
    # A are rows 1, 3, 5 now; row 1 joins row 2.
    scores = np.array([[0.95, 0.5, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]], np.float32)
    facts = GbmFacts(scores, np.ones(3, bool), 0.9, NOISE, 0.0)
    joined = np.array([3, 3, 1, 4, 2, 5])
    assert gbm_problems(facts, np.arange(1, 7), joined, paper, PREFIX) == []
    assert gbm_problems(facts, np.arange(1, 7), joined, PLAN, PREFIX) != []


def tome(joins: dict[int, int], r: int, noise: float = NOISE) -> list[str]:
    scores = np.array([(-np.inf,) * 3, *SCORES.values()], np.float32)
    facts = GbmFacts(scores, np.array([False, True, True, True]), 0.0, noise, 0.0, r)
    return tome_problems(facts, np.arange(1, 7), gbm_map(joins), PREFIX)


@pytest.mark.parametrize(
    ("joins", "r", "problem"),
    [
        ({4: 3}, 1, None),
        ({4: 5}, 1, None),  # two targets nearly tied
        ({4: 1}, 1, "joined one that is 4.7e-01 less similar than the best"),
        ({2: 1}, 1, "left a token 2.0e-02 above one that merged"),
        ({2: 1, 4: 3}, 2, None),
        ({2: 1, 4: 3}, 1, "merged 2 tokens instead of 1"),
        ({4: 3}, 2, "merged 1 tokens instead of 2"),
        ({2: 1, 4: 3, 6: 5}, 3, None),
    ],
)
def test_tome_of_one_image(joins: dict[int, int], r: int, problem: str | None) -> None:
    found = tome(joins, r)
    assert (not found) if problem is None else (len(found) == 1 and problem in found[0])


def test_tome_without_prefix_orders_rows_by_similarity() -> None:
    """Rows 0, 2, 4 are A; row 2 joins row 3, and row 4 is more similar to its best than row 0."""
    scores = np.array([(0.5, 0.1, 0.1), (0.1, 0.9, 0.1), (0.1, 0.1, 0.7)], np.float32)
    before = np.arange(6)

    def problems(after: list[int], noise: float = NOISE) -> list[str]:
        facts = GbmFacts(scores, np.ones(3, bool), 0.0, noise, 0.0, 1)
        return tome_problems(facts, before, np.array(after), 0)

    assert problems([1, 2, 3, 3, 0, 4]) == []
    assert "wrong order, 2.0e-01 apart" in problems([0, 2, 3, 3, 1, 4])[0]
    assert problems([0, 2, 3, 3, 1, 4], noise=0.3) == []
    assert "not one that joining tokens gives" in problems([2, 1, 3, 3, 0, 4])[0]
    assert problems([1, 2, 3, 3, 0, 4], noise=np.nan) == ["ToMe: similarities are not finite"]


NETWORK = Network("segmenter", 64, 4, 1, 3, (64, 64))


def clap_difference(ours: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, int]:
    return differing(np.arange(1, 17), clap_map(*ours), clap_map(*other), 0, PLAN, NETWORK)


def test_decisions_of_clap_are_windows() -> None:
    assert clap_difference((2, 0), (2, 0)) == (0, 4)
    assert clap_difference((2, 0), (2, 0, 3)) == (1, 4)
    assert clap_difference((2, 0), (2, 3)) == (2, 4)
    assert clap_difference((0, 2), (2, 0)) == (1, 4)
    assert clap_difference((3, 0, 1, 2), (0, 1, 2, 3)) == (1, 4)  # one moved to the front
    assert clap_difference((3, 2, 1, 0), (0, 1, 2, 3)) == (3, 4)


@pytest.mark.parametrize("plan", [replace(PLAN, gbm_layers=(3,)), MergePlan((), (), method="tome", tome_r=(2,))])
def test_decisions_of_bipartite_merges_are_tokens(plan: MergePlan) -> None:
    stage = len(plan.layers) - 1

    def difference(ours: dict[int, int], other: dict[int, int]) -> tuple[int, int]:
        return differing(np.arange(1, 7), gbm_map(ours), gbm_map(other), stage, plan, NETWORK)

    assert difference({2: 1, 4: 3}, {2: 1, 4: 3}) == (0, 3)
    assert difference({2: 1, 4: 3}, {2: 1}) == (1, 3)
    assert difference({2: 1, 4: 3}, {2: 1, 4: 5}) == (1, 3)
    assert difference({2: 1, 4: 3}, {2: 3, 6: 3}) == (3, 3)


def test_maps_are_partitions_that_only_grow_coarser() -> None:
    first = clap_map(0)
    assert map_problem([], PREFIX) is None
    assert map_problem([first, np.minimum(first, 3)], PREFIX) is None
    assert "token map 0 does not number" in (map_problem([first + 1], PREFIX) or "")
    assert "token map 0 does not number" in (map_problem([np.where(first == 2, 3, first)], PREFIX) or "")
    split = first.copy()
    split[0] = split.max() + 1
    assert "token map 1 splits" in (map_problem([first, split], PREFIX) or "")
