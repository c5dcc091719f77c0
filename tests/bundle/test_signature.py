"""Signatures: what a recipe's network takes and gives, and back from JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from algm_deploy.bundle.signature import Signature, merge_names, output_names, signature_of, threshold_defaults
from algm_deploy.errors import RecipeError
from algm_deploy.recipe.conversion import converted
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.schema import Protocol, Recipe

RECIPE = Recipe(
    "tiny",
    Network("segmenter", 64, 4, 2, 11, (96, 128)),
    MergePlan((1,), (3,), clap_threshold=0.9, gbm_threshold=1.5),
    Protocol("camvid", 96, 96, 64),
    max_batch=4,
)


def test_of_a_recipe() -> None:
    signature = signature_of(RECIPE)
    assert [(t.name, t.dtype, t.shape) for t in signature.inputs] == [
        ("image", "uint8", (-1, 3, 96, 128)),
        ("clap_threshold", "float32", ()),
        ("gbm_threshold", "float32", ()),
    ]
    assert [(t.name, t.dtype, t.shape) for t in signature.outputs] == [
        ("scores", "float32", (-1, 11, 96, 128)),
        ("token_counts", "int64", (-1, 2)),
        ("token_map_clap_1", "int64", (-1, 48)),
        ("token_map_gbm_3", "int64", (-1, 48)),
    ]
    assert signature.defaults == {"clap_threshold": 0.9, "gbm_threshold": 1.5}
    assert signature.merges == ("clap_1", "gbm_3")
    assert signature.max_batch == 4
    assert signature.image == signature.inputs[0]


def test_survives_json() -> None:
    signature = signature_of(RECIPE)
    assert converted(Signature, json.loads(json.dumps(asdict(signature))), "signature") == signature


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": []}, "expected an image, labels or scores, and token counts as signature"),
        ({"outputs": [{"name": "scores", "dtype": "float32", "shape": []}]}, "expected an image, labels or scores"),
        ({"defaults": {"clap_threshold": "high"}}, "expected a finite number as signature.defaults.clap_threshold"),
        ({"merges": "clap_1"}, "expected a list of a text as signature.merges, got 'clap_1'"),
        ({"max_batch": None}, "expected a whole number as signature.max_batch, got None"),
        (
            {"inputs": [{"name": "image", "dtype": "float16", "shape": []}]},
            "expected uint8 or float32 or int32 or int64 as signature.inputs.0.dtype, got 'float16'",
        ),
        (
            {"inputs": [{"name": "image", "dtype": "uint8"}]},
            "a list of a whole number as .*0.shape, found none",
        ),
        ({"layout": "NHWC"}, "expected no entry in signature that this release does not know, got 'layout'"),
    ],
)
def test_what_is_no_signature_is_refused(change: dict[str, Any], message: str) -> None:
    table = json.loads(json.dumps(asdict(signature_of(RECIPE)))) | change
    with pytest.raises(RecipeError, match=message):
        converted(Signature, table, "signature")


@pytest.mark.parametrize(("classes", "dtype"), [(255, "uint8"), (256, "int32")])
def test_labels_are_as_wide_as_the_classes_need(classes: int, dtype: str) -> None:
    recipe = replace(RECIPE, output="labels", network=replace(RECIPE.network, classes=classes))
    assert signature_of(recipe).outputs[0].dtype == dtype
    assert signature_of(recipe).outputs[0].shape == (-1, 96, 128)


def test_interpolated_photos_have_fractions() -> None:
    """Where photos are enlarged to the window, pixels are interpolated and no longer whole numbers."""
    enlarged = replace(RECIPE, protocol=Protocol("camvid", 64, 96, 64))
    assert signature_of(enlarged).image.dtype == "float32"


@pytest.mark.parametrize(
    ("plan", "thresholds", "merges"),
    [
        (DENSE, [], ()),
        (MergePlan((2,), ()), ["clap_threshold"], ("clap_2",)),
        (MergePlan((), (4, 3)), ["gbm_threshold"], ("gbm_3", "gbm_4")),
        (MergePlan((1,), (3, 2)), ["clap_threshold", "gbm_threshold"], ("clap_1", "gbm_2", "gbm_3")),
    ],
)
def test_names_follow_the_plan(plan: MergePlan, thresholds: list[str], merges: tuple[str, ...]) -> None:
    assert list(threshold_defaults(plan)) == thresholds
    assert merge_names(plan) == merges
    expected = ("labels", "token_counts", *(f"token_map_{merge}" for merge in merges))
    assert output_names(plan, "labels") == expected
    signature = signature_of(replace(RECIPE, merging=plan, output="labels"))
    assert tuple(t.name for t in signature.outputs) == expected
    assert [t.name for t in signature.inputs[1:]] == thresholds
