"""Published figures: sources, units that agree with counts of our own, and the rows that belong to a recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from algm_deploy.errors import RecipeError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.recipe.plan import DENSE
from algm_deploy.recipe.reading import recipe, recipe_names
from algm_deploy.report.published import NO_REDUCTION, Published, backbone, published_beside, read_published
from algm_deploy.report.tables import markdown_table, published_table

ROWS = read_published()
PUBLISHED_RECIPES = [name for name in recipe_names() if recipe(name).published]


def rows_of(name: str, method: str) -> list[Published]:
    return [row for row in published_beside(recipe(name), ROWS) if row.method == method]


def test_every_row_has_a_figure_and_a_source() -> None:
    for row in ROWS:
        assert row.source
        assert any(value is not None for value in (row.miou_percent, row.gmacs, row.throughput_img_per_s)), row
        assert row.throughput_img_per_s is None or row.throughput_conditions


def test_only_what_this_project_runs_counts_as_implemented() -> None:
    assert {row.method for row in ROWS if row.implemented} == {NO_REDUCTION, "ALGM", "ToMe", "CTS", "DToP"}
    assert {row.method for row in ROWS if not row.implemented} == {"ELViT", "EViT", "ACT"}


@pytest.mark.parametrize("name", PUBLISHED_RECIPES)
def test_recipes_and_published_rows_agree(name: str) -> None:
    for key, value in recipe(name).published.items():
        figure = key.removesuffix("_dense")
        method = "DToP" if recipe(name).merging.method == "dtop" else "ALGM"
        found = [getattr(row, figure) for row in rows_of(name, NO_REDUCTION if key != figure else method)]
        assert value in found, (key, found)


@pytest.mark.parametrize("name", [name for name in PUBLISHED_RECIPES if "gmacs_dense" in recipe(name).published])
def test_dense_figures_are_multiply_adds(name: str) -> None:
    counted = multiply_adds(recipe(name).network, DENSE).gmacs
    published = [row.gmacs for row in rows_of(name, NO_REDUCTION) if row.gmacs is not None]
    assert published
    assert all(abs(gmacs / counted - 1) < 0.03 for gmacs in published), (counted, published)


def test_what_is_published_of_eva_is_less_than_its_blocks() -> None:
    """So its figures are no multiply-adds of the whole network, and no recipe states the one without merging."""
    facts = recipe("eva_vit_g16_ade20k")
    counted = multiply_adds(facts.network, DENSE)
    (dense,) = {row.gmacs for row in rows_of(facts.name, NO_REDUCTION) if row.gmacs is not None}
    merged = [row.gmacs for row in rows_of(facts.name, "ALGM")]
    assert dense < counted.encoder / 1e9 < counted.gmacs
    assert (round(counted.encoder / 1e9), round(counted.decoder / 1e9), round(counted.gmacs)) == (4276, 2456, 6737)
    assert merged == [dense - 208, dense - 208 - 150, dense - 208 - 150 - 184, dense - 542]
    assert "gmacs_dense" not in facts.published


def test_rows_beside_a_recipe_have_its_network_size_and_data_set() -> None:
    small = recipe("segmenter_vit_s16_ade20k")
    beside = published_beside(small, ROWS)
    assert {row.backbone for row in beside} == {"ViT-S/16"}
    assert {row.dataset for row in beside} == {"ade20k"}
    assert {row.method for row in beside} == {NO_REDUCTION, "ALGM", "CTS"}
    larger = replace(small, network=replace(small.network, image_size=(640, 640)))
    assert published_beside(larger, ROWS) == ()
    assert published_beside(recipe("segmenter_vit_s16_camvid"), ROWS) == ()


def test_networks_are_known_by_their_decoder() -> None:
    large = recipe("segmenter_vit_l16_ade20k")
    network = replace(large.network, decoder="linear", image_size=(640, 640))
    assert published_beside(replace(large, network=network), ROWS) == ()
    setr = [row for row in ROWS if row.network == "SETR-Naive" and row.dataset == "ade20k"]
    assert sorted(row.miou_percent or 0 for row in setr) == [48.06, 48.1]  # its own repository, and the ALGM paper


def test_backbones_are_named_by_width_and_depth() -> None:
    assert backbone(recipe("segmenter_vit_l16_ade20k").network) == "ViT-L/16"
    assert backbone(recipe("demo").network) is None


def test_unknown_figures_stay_unknown_in_a_table() -> None:
    row = Published("Segmenter", "ViT-L/16", "ade20k", "CTS", False, "a paper", setting="30 %", miou_percent=51.6)
    table = markdown_table(*published_table([row]))
    assert "| CTS, 30 % | no | 51.6 | - | - | - |" in table


HEAD = 'schema = 1\n[methods]\nnone = { implemented = true }\n[sources]\na = "A"\n'
TABLE = '[[tables]]\nsource = "a"\nnetwork = "N"\ndataset = "d"\nrows = [{row}]\n'


@pytest.mark.parametrize(
    "text",
    [
        HEAD.replace("schema = 1", "schema = 2"),
        HEAD + TABLE.replace("{row}", '{ backbone = "b", method = "unheard" }'),
        HEAD + TABLE.replace("{row}", '{ backbone = "b", method = "none", miou = 1 }'),
        HEAD + TABLE.replace("{row}", '{ backbone = "b", method = "none", miou_percent = "high" }'),
        HEAD + TABLE.replace('"a"', '"b"').replace("{row}", '{ backbone = "b", method = "none" }'),
        "no toml",
    ],
    ids=["schema", "method", "column", "figure", "source", "syntax"],
)
def test_a_wrong_file_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "published.toml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=r"published\.toml"):
        read_published(file)


def test_the_smallest_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "published.toml"
    file.write_text(HEAD + TABLE.replace("{row}", '{ backbone = "b", method = "none", gmacs = 1.5 }'))
    assert read_published(file) == (Published("N", "b", "d", "none", True, "A", gmacs=1.5),)
