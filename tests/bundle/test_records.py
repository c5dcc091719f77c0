"""What records tell of themselves: identities, whether a chain holds, thresholds and tokens as JSON has them."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import inf
from typing import Any, get_args

import msgspec
import pytest

from algm_deploy.bundle.records import (
    ByPicture,
    Evaluation,
    Link,
    Manifest,
    Measurement,
    MergeTokens,
    Parity,
    Speed,
    Stored,
    TokenHistograms,
    storable,
    tokens_by_merge,
)
from algm_deploy.environment import Device, Environment, GpuState
from algm_deploy.errors import RecipeError
from algm_deploy.recipe.conversion import converted
from algm_deploy.recipe.schema import Protocol

PROTOCOL = Protocol("camvid", 64, 64, 48)
HISTOGRAMS = TokenHistograms(token_edges=(0, 8, 16), windows_by_merge={"clap_1": (0, 3)})


def evaluation(**fields: Any) -> Evaluation:
    given = {
        **{"runtime": "torch", "dataset": "camvid", "split": "test", "protocol": PROTOCOL, "images": 3},
        **{"miou_percent": 70.0, "pixel_accuracy_percent": 90.0, "token_histograms": HISTOGRAMS},
    }
    return Evaluation(**(given | fields))


def speed(**fields: Any) -> Speed:
    given = {"runtime": "torch", "variant": "merged", "protocol": "mixed", "batch": 2, "stable": True}
    return Speed(**(given | fields))


def link(passed: bool) -> Link:
    return Link(number=1, name="network", passed=passed, measured="", gate="")


def test_every_stored_kind_has_a_section_of_the_manifest_for_it() -> None:
    hints = {field.name: field.type for field in msgspec.structs.fields(Manifest)}
    for kind in get_args(Stored):
        held, rest = get_args(hints[kind.section])
        assert rest is ...
        assert kind in (get_args(held) or (held,))
        assert kind.__struct_config__.frozen and kind.__struct_config__.forbid_unknown_fields


def test_records_do_not_change() -> None:
    with pytest.raises(AttributeError):
        speed().stable = False  # type: ignore[misc]
    with pytest.raises(AttributeError):
        evaluation().mood = "good"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("links", "passed"),
    [((), False), ((link(True),), True), ((link(True), link(False)), False)],
)
def test_a_chain_without_links_has_not_passed(links: tuple[Link, ...], passed: bool) -> None:
    assert Parity(runtime="torch", images=1, batches=(1,), links=links).passed is passed


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (speed(), speed(stable=False, rounds=9), True),
        (speed(thresholds={"a": 1.0, "b": 2.0}), speed(thresholds={"b": 2.0, "a": 1.0}), True),
        (speed(), speed(runtime="tensorrt"), False),
        (speed(), speed(variant="dense"), False),
        (speed(), speed(protocol="duplicate"), False),
        (speed(), speed(batch=4), False),
        (speed(), speed(thresholds={"clap_threshold": "inf"}), False),
        (evaluation(), evaluation(miou_percent=None), True),
        (evaluation(images=2, failures={"3": "broken"}), evaluation(images=3), True),  # mended, and run again
        (evaluation(), evaluation(images=2), False),
        (evaluation(), evaluation(split="val"), False),
        (evaluation(), evaluation(dataset="ade20k"), False),
        (evaluation(), evaluation(runtime="tensorrt"), False),
        (evaluation(), evaluation(thresholds={"clap_threshold": 0.9}), False),
    ],
)
def test_what_a_later_record_must_share_to_take_its_place(one: Measurement, other: Measurement, same: bool) -> None:
    assert (one.identity == other.identity) is same


def test_infinite_thresholds_are_texts() -> None:
    found = storable({"clap_threshold": inf, "gbm_threshold": -inf, "other": 0.5})
    assert found == {"clap_threshold": "inf", "gbm_threshold": "-inf", "other": 0.5}
    assert [float(value) for value in found.values()] == [inf, -inf, 0.5]
    record = evaluation(thresholds=found)
    assert converted(Evaluation, json.loads(msgspec.json.encode(record)), "evaluation") == record


def test_tokens_by_merge_keep_their_order() -> None:
    tokens = [MergeTokens(merge="gbm_5", mean=3.5), MergeTokens(merge="clap_1", mean=7, min=1, max=9)]
    assert list(tokens_by_merge(tokens).items()) == [("gbm_5", 3.5), ("clap_1", 7)]


def test_a_histogram_ends_at_the_patches_of_a_window() -> None:
    assert HISTOGRAMS.patches == 16


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (TokenHistograms, {"token_edges": (0.0,), "windows_by_merge": {}}),
        (TokenHistograms, {"token_edges": (0.0, 2.0, 2.0), "windows_by_merge": {}}),
        (TokenHistograms, {"token_edges": (0.0, 2.0), "windows_by_merge": {"clap_1": ()}}),
        (TokenHistograms, {"token_edges": (0.0, 2.0), "windows_by_merge": {"clap_1": (-1,)}}),
        (ByPicture, {"latency_ms_p50": (1.0, 2.0), "tokens_by_merge": {"clap_1": (3,)}}),
    ],
)
def test_counts_that_do_not_match_are_refused_when_they_are_made(kind: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^expected "):
        kind(**fields)


def test_conditions_of_a_gpu_survive_json() -> None:
    gpu = GpuState("580.65", 1980.0, 1980.0, 2619.0, None, 690.25, 700.0, 41.0)
    device = Device("NVIDIA H200", "9.0", 150_000_000_000)
    here = Environment("3.11.7", "Linux", "AMD EPYC", 2, {"torch": "2.13.0"}, "580.65", (device,))
    record = speed(gpu=gpu, environment=here, nodes_by_provider={"CUDA": 3}, custom_operators=("clap", "gbm"))
    table = json.loads(msgspec.json.encode(record))
    assert converted(Speed, table, "speed") == record
    assert table["gpu"] == asdict(gpu)
    table["gpu"]["power_w"] = "much"
    with pytest.raises(RecipeError, match=r"expected a finite number or null as speed\.gpu\.power_w, got 'much'"):
        converted(Speed, table, "speed")
