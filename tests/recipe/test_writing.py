"""A written recipe reads back as the same recipe, and its comments stay comments."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algm_deploy.recipe.reading import recipe, recipe_names
from algm_deploy.recipe.writing import recipe_toml


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_survives(name: str, tmp_path: Path) -> None:
    original = recipe(name)
    file = tmp_path / f"{name}.toml"
    file.write_text(recipe_toml(original, ("evidence",)), encoding="utf-8")
    assert recipe(str(file)) == original


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(st.lists(TEXTS, min_size=10, max_size=10), st.floats(-2, 2), st.dictionaries(TEXTS, st.floats(-1e9, 1e9)))
def test_any_text_and_number_survives(names: list[str], tau: float, published: dict[str, float]) -> None:
    demo = recipe("demo")
    odd = replace(
        demo,
        class_names=tuple(names),
        merging=replace(demo.merging, clap_threshold=tau, gbm_layers=()),
        published=published,
    )
    table = tomllib.loads(recipe_toml(odd))
    assert tuple(table["class_names"]) == odd.class_names
    assert table["merging"]["clap_threshold"] == tau
    assert table["merging"]["gbm_layers"] == []
    assert table.get("published", {}) == published


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]) | st.just("\n"), max_size=20)))
def test_comments_change_nothing(comments: list[str]) -> None:
    demo = recipe("demo")
    assert tomllib.loads(recipe_toml(demo, comments)) == tomllib.loads(recipe_toml(demo))
