"""Every published row that this project could run has a recipe with its figures, or says why it has none."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import NamedTuple

import pytest

from algm_deploy.errors import RecipeError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.merging import tome_merges
from algm_deploy.package_data import content
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.reading import recipe, recipe_names, recipe_rows, recipe_settings
from algm_deploy.recipe.schema import Recipe
from algm_deploy.report.published import (
    FILE,
    NO_REDUCTION,
    Published,
    backbone,
    network_name,
    published_beside,
    read_published,
)


class Positions(NamedTuple):
    """In which blocks, from 1, a published network merges: a block for CLAP and blocks for GBM."""

    network: str
    backbone: str
    clap: int
    gbm: tuple[int, ...]
    without_recipe: str | None


ROWS = read_published()
POSITIONS = [
    Positions(row["network"], name, row["clap"], tuple(gbm), row.get("without_recipe"))
    for group in tomllib.loads((content("benchmarks") / FILE).read_text(encoding="utf-8"))["positions"]
    for row in group["rows"]
    for name in row["backbones"]
    for gbm in row["gbm"]
]
RECIPES = tuple(recipe(name) for name in recipe_names())
VARIANTS = tuple(recipe(f"{name}@{row}") for name in recipe_names() for row in recipe_rows(name))
METHODS = {"ALGM": "algm", "ToMe": "tome_blockwise", "CTS": "cts", "DToP": "dtop"}
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
    assert not any(row.without_recipe for row in ROWS if not row.implemented)


def test_a_recipe_with_other_figures_covers_nothing() -> None:
    row = next(row for row in ROWS if row.method == "ToMe")
    (candidate,) = (candidate for candidate in VARIANTS if covers(candidate, row))
    assert not covers(replace(candidate, published={**candidate.published, "gmacs": 1.0}), row)
    assert not covers(recipe(candidate.name.partition("@")[0]), row)


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_merge_positions_are_those_of_the_recipes(positions: Positions) -> None:
    merging = [
        (facts.merging.clap_layers, facts.merging.gbm_layers)
        for facts in RECIPES
        if (network_name(facts.network), backbone(facts.network)) == (positions.network, positions.backbone)
    ]
    published = {
        ((row.clap,), row.gbm)
        for row in POSITIONS
        if (row.network, row.backbone) == (positions.network, positions.backbone)
    }
    if positions.without_recipe:
        assert merging == []
    else:  # of several rows the recipe is one
        assert merging
        assert set(merging) <= published


def gmacs_as_the_source_counts(network: Network, merges: int) -> float:
    """Multiply-adds of `merges` fewer rows in every attention and MLP, by the source's counter.

    It counts attention in the encoder alone (with a scaling, and a softmax of two), norms as two, GELU as two, biases
    of the patch embedding, and nothing of what merges compare.
    """
    patches, dim = network.grid[0] * network.grid[1], network.embed_dim
    left, joined = patches + 1 - merges, patches + network.classes
    attending = 4 * left * dim**2 + left * dim + 2 * left**2 * (dim + network.heads)
    encoder = attending + 8 * left * dim**2 + 8 * left * dim + 4 * (patches + 1) * dim
    decoder = 12 * joined * dim**2 + 12 * joined * dim
    embedding = patches * dim * (3 * network.patch_size**2 + 1) + 2 * (patches + 1) * dim
    tail = patches * dim**2 + 2 * joined * dim + 2 * patches * network.classes
    return (network.depth * encoder + network.decoder_depth * decoder + embedding + tail) / 1e9


@pytest.mark.parametrize("facts", VARIANTS, ids=[facts.name for facts in VARIANTS])
def test_multiply_adds_are_the_published_ones(facts: Recipe) -> None:
    """To the last printed digit as the source counts, merged and dense; within 1 % of ours without what it omits, as
    a norm is two there and five here."""
    network, plan = facts.network, facts.merging
    patches = network.grid[0] * network.grid[1]
    merges = tome_merges(plan, patches, network.prefix)[1]
    # The counter prints two digits; the tables of all but ADE20K round those to one.
    rounding = 0.005 if network.image_size == (640, 640) else 0.055
    assert gmacs_as_the_source_counts(network, merges) == pytest.approx(facts.published["gmacs"], rel=0, abs=rounding)
    assert gmacs_as_the_source_counts(network, 0) == pytest.approx(facts.published["gmacs_dense"], rel=0, abs=rounding)
    ours = multiply_adds(network, plan, [patches - merges] * len(plan.layers))
    omitted = ours.merging + network.decoder_depth * 2 * (patches + network.classes) ** 2 * network.embed_dim
    assert (ours.total - omitted) / 1e9 == pytest.approx(facts.published["gmacs"], rel=0.01)


def test_a_row_lies_over_the_recipe() -> None:
    base, row = recipe("segmenter_vit_l16_ade20k"), recipe("segmenter_vit_l16_ade20k@tome_20")
    assert row.name == "segmenter_vit_l16_ade20k@tome_20"
    assert row.network == base.network
    assert row.merging.tome_share == (0.2,) * base.network.depth
    assert row.published["gmacs"] == 516.23
    assert row.published["gmacs_dense"] == 658.98  # of the row's source


@pytest.mark.parametrize("name", ["segmenter_vit_l16_ade20k@tome_25", "segmenter_vit_s16_ade20k@tome_20"])
def test_unknown_rows_are_named(name: str) -> None:
    with pytest.raises(RecipeError, match=r"expected one of its rows \((tome_20, .*|none)\), got 'tome_2"):
        recipe_settings(name)
