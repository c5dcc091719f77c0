"""Every published row that this project could run has a recipe with its figures, or says why it has none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from algm_deploy.errors import RecipeError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.recipe.reading import recipe, recipe_names, recipe_rows, recipe_settings
from algm_deploy.recipe.schema import Recipe
from algm_deploy.report.published import (
    NO_REDUCTION,
    Positions,
    Published,
    backbone,
    network_name,
    published_beside,
    read_positions,
    read_published,
)

ROWS = read_published()
RECIPES = tuple(recipe(name) for name in recipe_names())
VARIANTS = tuple(recipe(f"{name}@{row}") for name in recipe_names() for row in recipe_rows(name))
METHODS = {"ALGM": "algm", "ToMe": "tome"}
FIGURES = ("miou_percent", "gmacs", "throughput_img_per_s")


def covers(candidate: Recipe, row: Published) -> bool:
    """Whether a recipe is for the row's network, and merges with its method and, among several, its figures."""
    if not published_beside(candidate, [row]):
        return False
    if row.method == NO_REDUCTION:
        return True
    if candidate.merging.method != METHODS[row.method]:
        return False
    stated = {key: getattr(row, key) for key in FIGURES if getattr(row, key) is not None}
    return stated.items() <= candidate.published.items()


@pytest.mark.parametrize("row", [row for row in ROWS if row.implemented], ids=str)
def test_a_row_has_a_recipe_or_says_why_not(row: Published) -> None:
    found = [candidate.name for candidate in (*RECIPES, *VARIANTS) if covers(candidate, row)]
    assert bool(found) != bool(row.without_recipe), found or f"add a recipe or `without_recipe` for {row}"


def test_rows_of_other_methods_need_none() -> None:
    assert {row.method for row in ROWS if row.implemented} == {NO_REDUCTION, *METHODS}
    assert not any(row.without_recipe for row in ROWS if not row.implemented and "DToP" not in row.network)


def test_a_recipe_with_other_figures_covers_nothing() -> None:
    row = next(row for row in ROWS if row.method == "ToMe")
    (candidate,) = (candidate for candidate in VARIANTS if covers(candidate, row))
    assert not covers(replace(candidate, published={**candidate.published, "gmacs": 1.0}), row)
    assert not covers(recipe(candidate.name.partition("@")[0]), row)


@pytest.mark.parametrize("positions", read_positions(), ids=str)
def test_merge_positions_are_those_of_the_recipes(positions: Positions) -> None:
    merging = [
        (facts.merging.clap_layers, facts.merging.gbm_layers)
        for facts in RECIPES
        if (network_name(facts.network), backbone(facts.network)) == (positions.network, positions.backbone)
    ]
    if positions.without_recipe:
        assert merging == []
    else:
        assert set(merging) == {((positions.clap,), positions.gbm)}


@pytest.mark.parametrize("facts", VARIANTS, ids=[facts.name for facts in VARIANTS])
def test_multiply_adds_of_tome_are_near_the_published_ones(facts: Recipe) -> None:
    """Theirs merge in front of the first block's attention, ToMe's code and ours behind it."""
    patches = facts.network.grid[0] * facts.network.grid[1]
    ours = multiply_adds(facts.network, facts.merging, [patches - facts.merging.tome_r[0]]).gmacs
    dense = next(r.gmacs for r in published_beside(facts, ROWS) if r.method == NO_REDUCTION and "Expedit" in r.source)
    assert dense is not None
    assert 0 < ours - facts.published["gmacs"] < 0.04 * dense


def test_a_row_lies_over_the_recipe() -> None:
    base, row = recipe("segmenter_vit_l16_ade20k"), recipe("segmenter_vit_l16_ade20k@tome_20")
    assert row.name == "segmenter_vit_l16_ade20k@tome_20"
    assert row.network == base.network
    assert row.merging.layers == (1,)
    assert row.published["gmacs"] == 516.23
    assert row.published["miou_percent_dense"] == base.published["miou_percent_dense"]


@pytest.mark.parametrize("name", ["segmenter_vit_l16_ade20k@tome_25", "segmenter_vit_s16_ade20k@tome_20"])
def test_unknown_rows_are_named(name: str) -> None:
    with pytest.raises(RecipeError, match=r"expected one of its rows \((tome_20, .*|none)\), got 'tome_2"):
        recipe_settings(name)
