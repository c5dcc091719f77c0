"""Sheets, legends and colours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from algm_deploy.evaluation.datasets import SPECS
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.schema import Protocol, Recipe
from algm_deploy.report.colors import classes_of, distinct_colors, value_colors
from algm_deploy.report.sheets import Panel, columns_for, fitted, legend, printable, scale, sheet, text_width, wrapped

NETWORK = Network("segmenter", embed_dim=64, depth=2, heads=1, classes=3, image_size=(32, 32))


def recipe_of(dataset: str, classes: int) -> Recipe:
    plan = MergePlan(gbm_layers=(2,))
    return Recipe("some", replace(NETWORK, classes=classes), plan, Protocol(dataset, 32, 32, 32))


@pytest.mark.parametrize(
    ("panels", "size", "columns"), [(4, (3, 4), 2), (4, (1, 4), 1), (4, (9, 4), 4), (6, (1, 1), 3), (1, (1, 1), 1)]
)
def test_columns(panels: int, size: tuple[int, int], columns: int) -> None:
    assert columns_for(panels, size) == columns


def test_panels_stand_whole_on_the_sheet() -> None:
    colors = [(200, 10, 10), (10, 200, 10), (10, 10, 200)]
    panels = [
        Panel(f"panel {i}", "words " * 20, np.full((50, 300, 3), color, np.uint8)) for i, color in enumerate(colors)
    ]
    page = np.asarray(sheet("heading", panels, "caption " * 30, columns=2))
    for color in colors:
        rows, columns = np.nonzero((page == color).all(2))
        assert (np.ptp(rows) + 1, np.ptp(columns) + 1, len(rows)) == (50, 300, 50 * 300)
    assert (page[-10:] == 255).all()


def test_a_legend_wraps_instead_of_leaving_the_page() -> None:
    entries = [((200, 0, index), f"class number {index}") for index in range(12)]
    page = legend(entries, 500)
    assert page.shape[1] == 500
    assert len(page) > len(legend(entries[:1], 500))
    assert all((page == color).all(2).any() for color, _ in entries)
    assert (page[:, -10:] == 255).all()
    assert legend([((0, 0, 0), "a name much too long " * 9)], 200).shape[1] == 200


def test_texts_fit_their_width() -> None:
    assert fitted("short", 20, 500) == "short"
    cut = fitted("a long line " * 20, 20, 200)
    assert cut.endswith("...")
    assert text_width(cut, 20) <= 200
    lines = wrapped("a longer line of words " * 20, 20, 300)
    assert len(lines) > 3
    assert max(text_width(line, 20) for line in lines) <= 330
    assert printable("straße ≥ 1") == "stra?e ? 1"


@pytest.mark.parametrize("threshold", [-2.0, 0.9, 1.5, np.inf])
def test_the_scale_takes_any_threshold(threshold: float) -> None:
    page = scale(0.6, threshold, 400)
    assert page.shape[1:] == (400, 3)
    marked = (page[6] < 100).all(1)
    assert marked.any() == (0.6 <= threshold < 1)


def test_values_go_from_dark_to_light() -> None:
    colors = value_colors(np.array([-5, 0, 0.5, 1, 9], np.float32), 0, 1).astype(int).sum(-1)
    assert colors[0] == colors[1] < colors[2] < colors[3] == colors[4]


def test_classes_are_the_recipes_then_the_data_sets_then_numbered() -> None:
    own = replace(recipe_of("camvid", 3), class_names=("a", "b", "c"), palette=((1, 1, 1), (2, 2, 2), (3, 3, 3)))
    assert classes_of(own).names == ("a", "b", "c")
    assert classes_of(own).palette[2] == (3, 3, 3)
    assert classes_of(recipe_of("camvid", 11)) == replace(SPECS["camvid"].classes, ignore_label=255)
    for unknown in (recipe_of("camvid", 3), recipe_of("folder", 3)):
        assert classes_of(unknown).names == ("class 0", "class 1", "class 2")
        assert classes_of(unknown).palette == distinct_colors(3)


def test_generated_colours_differ() -> None:
    colors = np.array(distinct_colors(150))
    distance = np.abs(colors[:, None] - colors[None]).sum(-1) + 1000 * np.eye(150, dtype=int)
    assert distance.min() >= 20
    assert distinct_colors(10) == distinct_colors(150)[:10]
