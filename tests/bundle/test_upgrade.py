"""Manifests that the release before wrote, with one record of each kind: every field is what the old file says.

They were written by the commands of that release on the tiny network and shortened by hand: `schema1` has CLAP and GBM,
`schema1_two_gbm` two layers of GBM, `schema1_tome` ToMe in two blocks, `schema1_truncated` is the variant of a bundle,
`schema1_tuned` was tuned in every way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from algm_deploy.bundle.manifest import manifest_of, read_manifest, write_manifest
from algm_deploy.bundle.records import (
    AttentionTuning,
    Engine,
    Evaluation,
    Figures,
    Manifest,
    OptimizedGraph,
    Parity,
    Rebuilds,
    Speed,
    TuningPage,
    VariantOrigin,
)
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError
from algm_deploy.recipe.reading import to_table

Table = dict[str, Any]
DATA = Path(__file__).resolve().parents[1] / "data" / "manifests"
# Merges as figures called them then, and as the signature calls them.
MERGES = {
    "schema1": {"clap": "clap_1", "gbm": "gbm_3"},
    "schema1_two_gbm": {"clap": "clap_1", "gbm_2": "gbm_2", "gbm_3": "gbm_3"},
    "schema1_tome": {"tome_1": "tome_1", "tome_3": "tome_3"},
    "schema1_truncated": {},
    "schema1_tuned": {},
}
DEFAULTS = {"clap_threshold": 0.9, "gbm_threshold": 1.0}


def old(name: str) -> Table:
    found: Table = json.loads((DATA / f"{name}.json").read_text())
    return found


def new(name: str) -> Manifest:
    return manifest_of(old(name), DATA / f"{name}.json")


def fields(record: Any) -> Table:
    """All fields of a record as JSON has them, absent ones too."""
    found: Table = json.loads(msgspec.json.encode({n: getattr(record, n) for n in record.__struct_fields__}))
    return found


def absent(kind: type[msgspec.Struct]) -> Table:
    """What a record of this kind holds where a step told nothing."""
    found = {}
    for field in msgspec.structs.fields(kind):
        if not field.required:
            default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            found[field.name] = list(default) if isinstance(default, tuple) else default
    return found


def tokens(record: Table, merges: Mapping[str, str]) -> Table:
    """Takes the old figures of tokens out of a record, and gives them as they are now."""
    listed = []
    for name, merge in merges.items():
        figures = {what: record.pop(f"tokens_after_{name}_{what}", None) for what in ("mean", "min", "max")}
        if figures["mean"] is not None:
            listed.append({"merge": merge, **{what: value for what, value in figures.items() if value is not None}})
    return {"tokens": listed}


def figures(record: Table, merges: Mapping[str, str]) -> Table:
    return {**absent(Figures), **tokens(record, merges), **record}


def test_there_is_a_record_of_each_kind() -> None:
    manifest, before = new("schema1"), old("schema1")
    assert [record.runtime for record in manifest.parity] == list(before["parity"]) == ["torch", "onnxruntime-cpu"]
    assert len(manifest.evaluations) == len(before["evaluation"]) == 3
    assert len(manifest.speeds) == len(before["speed"]) == 8
    assert [record.runtime for record in manifest.engines] == list(before["engines"]) == ["tensorrt-rtx"]
    assert [record.runtime for record in manifest.optimized_graphs] == ["onnxruntime-cpu", "onnxruntime-cuda"]
    assert [record.runtime for record in manifest.rebuilds] == ["onnxruntime-cpu", "tensorrt-rtx"]
    assert [(one.step, one.runtime) for one in manifest.not_run] == [
        ("parity", "tensorrt-rtx"),
        ("evaluation", "tensorrt-rtx"),
        ("speed", "tensorrt-rtx"),
    ]
    assert len(manifest.tunings) == len(before["tuning"]) == 1


@pytest.mark.parametrize("name", MERGES)
def test_what_the_bundle_keeps_itself_is_the_same(name: str) -> None:
    manifest, before = new(name), old(name)
    merging = before["recipe"]["merging"]
    before["recipe"]["merging"] = {
        **merging,
        **{"gbm": merging.pop("gbm_mode"), "clap": "threshold", "clap_budget": 0, "gbm_budget": 0, "tome_share": []},
        **{"elvit_layer": 0, "elvit_grid": [0, 0], "elvit_neighbours": 20, "elvit_iterations": 5, "elvit_window": 5},
        **{"elvit_temperature": 0.02, "evit_layers": [], "evit_keep": 0.7, "g2tm_layer": 0, "mpm_layers": []},
        "between_groups": "unmerge",
        "cts_shared": 0,
        "dtop_layers": [],
        "dtop_keep": 5,
    }
    absent_then = ("adapter_heads", "adapter_dim", "decoder_heads", "pixel_layers", "mlp_dim")
    before["recipe"]["network"] |= dict.fromkeys(absent_then, 0)
    before["recipe"]["network"] |= {"policy": False, "auxiliary": []}
    before["recipe"]["protocol"]["multiple"] = 1
    del before["recipe"]["merging"]["gbm_mode"]
    before["recipe"]["gates"] |= {"int8_label_agreement": 0.99, "fp8_label_agreement": 0.99}
    assert json.loads(json.dumps(to_table(manifest.recipe))) == before["recipe"]
    assert json.loads(msgspec.json.encode(manifest.environment)) == before["environment"]
    assert json.loads(msgspec.json.encode(manifest.signature)) == before["signature"]
    assert {file: fields(entry) for file, entry in manifest.files.items()} == before["files"]
    assert manifest.preprocessing_sha256 == before["preprocessing_sha256"]
    assert list(manifest.unused_checkpoint_keys) == before.get("unused_checkpoint_keys", [])
    assert manifest.position_embedding_resized_from is None
    assert manifest.replacing == {}


@pytest.mark.parametrize("name", MERGES)
def test_parity(name: str) -> None:
    for record, (key, before) in zip(new(name).parity, old(name).get("parity", {}).items(), strict=True):
        assert record.passed == before.pop("passed")
        assert before.pop("schema_version") == 1
        assert fields(record) == {**absent(Parity), "runtime": key, **before}
        assert [link.number for link in record.links] == [link["number"] for link in before["links"]]


@pytest.mark.parametrize("name", MERGES)
def test_evaluations(name: str) -> None:
    merges = MERGES[name]
    for record, (key, before) in zip(new(name).evaluations, old(name).get("evaluation", {}).items(), strict=True):
        assert before.pop("schema_version") == 1
        assert before.pop("complete") == (not record.failures)
        assert before.pop("images_failed") == len(record.failures)
        assert before.pop("gflops_per_window_mean") == 2 * record.gmacs_per_window_mean
        windows = before["token_histograms"]["windows_by_merge"]
        before["token_histograms"]["windows_by_merge"] = {merges[merge]: count for merge, count in windows.items()}
        slices = {part: figures(found, merges) for part, found in before.pop("slices").items()}
        expected = {"runtime": key.split()[0], **figures(before, merges), "slices": slices}
        assert {part: fields(found) for part, found in record.slices.items()} == slices
        assert fields(record) == {**absent(Evaluation), **expected}
        assert len(record.tokens) == len(merges)
        assert record.thresholds == before["thresholds"]


@pytest.mark.parametrize("name", MERGES)
def test_speeds(name: str) -> None:
    merges = MERGES[name]
    for record, (key, before) in zip(new(name).speeds, old(name).get("speed", {}).items(), strict=True):
        assert before.pop("schema_version") == 1
        if counts := before.pop("by_picture", None):
            by_merge = {merge: counts.pop(f"tokens_after_{then}") for then, merge in merges.items()}
            before["by_picture"] = {**counts, "tokens_by_merge": by_merge}
        # Records of dense and truncated networks said nothing of the merged network they were timed with: keys did.
        thresholds = DEFAULTS if name != "schema1_tome" else {}
        if "clap_threshold 0.95" in key:
            thresholds = {**thresholds, "clap_threshold": 0.95}
        assert before.pop("thresholds") == (thresholds if before["variant"] == "merged" else {})
        # Stages did not add up to the latency; what a photo takes before it was among them.
        stages = before.pop("stages", {})
        before["reading"] = {part: ms for part, ms in stages.items() if part.startswith(("decode", "preprocess"))}
        expected = {**absent(Speed), "thresholds": thresholds, **tokens(before, merges), **before}
        assert fields(record) == expected
        assert " ".join((record.runtime, record.protocol, record.variant, f"batch {record.batch}")) in key
        assert len(record.tokens) == len(merges)


def test_runs_at_two_thresholds_stay_apart() -> None:
    manifest = new("schema1")
    assert len({record.identity for record in manifest.speeds}) == len(manifest.speeds)
    assert len({record.identity for record in manifest.evaluations}) == len(manifest.evaluations)


def test_executables() -> None:
    manifest, before = new("schema1"), old("schema1")
    engine = before["engines"]["tensorrt-rtx"]
    facts = engine.pop("facts")
    facts["plugin_sources"] = facts.pop("plugin_hash")
    assert fields(manifest.engines[0]) == {**absent(Engine), **facts, **engine}
    for rebuilds, (runtime, then) in zip(manifest.rebuilds, before["rebuilds"].items(), strict=True):
        assert fields(rebuilds) == {**absent(Rebuilds), "runtime": runtime, **then}
    cpu, cuda = manifest.optimized_graphs
    told = {"runtime": "onnxruntime-cpu", "rewrites": before["onnxruntime"]["cpu"]}
    assert fields(cpu) == {**absent(OptimizedGraph), **told}
    segments = before["onnxruntime"]["cuda"].pop("stretches")
    assert (cuda.segments, cuda.rewrites) == (segments, before["onnxruntime"]["cuda"])
    assert segments == 3


def test_what_did_not_run() -> None:
    found = {f"{one.step} {one.runtime}": one.reason for one in new("schema1").not_run}
    assert found == old("schema1")["not_run"]


def test_attention_has_its_figures() -> None:
    (record,) = (one for one in new("schema1_tuned").tunings if isinstance(one, AttentionTuning))
    before = old("schema1_tuned")["tuning"][record.title]
    plan, unread = before.pop("plan"), ("page", "pictured")
    after = fields(record)
    assert after.pop("last_merge") == max(*plan["clap_layers"], *plan["gbm_layers"])
    assert after.pop("thresholds") == {name: plan[name] for name in ("clap_threshold", "gbm_threshold")}
    assert after == {name: part for name, part in before.items() if name not in unread} | {
        "title": "Attention by class",
        "pictured": None,
    }


def test_other_tuning_is_kept_as_it_was_written() -> None:
    """Its figures lack data sets, slices and histograms, which stand in the page alone."""
    before = old("schema1_tuned")["tuning"]
    pages = [one for one in new("schema1_tuned").tunings if isinstance(one, TuningPage)]
    assert [one.title for one in pages] == [title for title in before if title != "Attention by class"]
    for page in pages:
        table = before[page.title]
        parts, pictured = table.pop("page"), table.pop("pictured")
        table.pop("schema_version", None)
        after = fields(page)
        assert after["pictured"] == (pictured and [pictured["name"], pictured["values"]])
        assert after["figures"] == table
        for name in ("lines", "tables", "plots"):
            assert after[name] == parts[name]
        assert [(c[0], c[1], *map(list, map(dict.values, c[2:]))) for c in after["counts"]] == [
            (c[0], c[1], *map(list, map(dict.values, c[2:]))) for c in parts["counts"]
        ]
        assert all(set(c[2]) == set(c[3]) <= {"CLAP", "GBM", "GBM 2", "GBM 3"} for c in after["counts"])
    assert sum(len(page.counts) for page in pages) == 3


def test_variant() -> None:
    before = old("schema1_truncated")["variant"]
    assert fields(new("schema1_truncated").variant) == before
    assert new("schema1").variant is None
    assert set(before) == {field.name for field in msgspec.structs.fields(VariantOrigin)}


@pytest.mark.parametrize("name", MERGES)
def test_written_back_it_is_of_this_schema_and_reads_equal(tmp_path: Path, name: str) -> None:
    manifest = new(name)
    assert write_manifest(tmp_path, manifest) == manifest
    assert json.loads((tmp_path / "manifest.json").read_text())["schema"] == 2
    assert read_manifest(tmp_path) == manifest


def test_the_next_record_brings_a_manifest_up_to_date(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(old("schema1")))
    bundle = Bundle(tmp_path, read_manifest(tmp_path))
    bundle.record(msgspec.structs.replace(bundle.manifest.parity[0], runtime="tensorrt-rtx"))
    again = read_manifest(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text())["schema"] == 2
    assert [record.runtime for record in again.parity] == ["torch", "onnxruntime-cpu", "tensorrt-rtx"]
    assert [one.step for one in again.not_run] == ["evaluation", "speed"]
    assert again.speeds == new("schema1").speeds


FIRST = "torch folder all 4 images clap_threshold 0.9 gbm_threshold 1.0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(notes=1), "expected no entry in the table that this release does not know, got 'notes'"),
        (lambda m: m.update(evaluation=[]), r"expected a table as evaluation, got \[\]"),
        (lambda m: m["parity"].update(torch=3), "expected a table as parity.torch, got 3"),
        (lambda m: m["parity"]["torch"].pop("links"), "expected a list of a table as parity.0.links, found none"),
        (
            lambda m: m["evaluation"][FIRST].pop("slices"),
            f"of schema 1 as evaluation.{FIRST}, got KeyError 'slices'",
        ),
        (lambda m: m["evaluation"][FIRST].update(mood=1), "expected no entry in evaluations.0 .*, got 'mood'"),
        (
            lambda m: m["evaluation"][FIRST].update(tokens_after_tome_mean=1),
            f"a record of schema 1 as evaluation.{FIRST}, got KeyError 'tome'",
        ),
        (
            lambda m: m["evaluation"][FIRST].update(tokens_after_clap_mean=float("nan")),
            f"expected a finite number as evaluation.{FIRST}.tokens_after_clap_mean, got nan",
        ),
        (lambda m: m["speed"].update(torch={}), "expected a record of schema 1 as speed.torch, got ValueError"),
        (lambda m: m["onnxruntime"].update(rocm={}), "expected a record of schema 1 as onnxruntime.rocm, got KeyError"),
        (lambda m: m["engines"]["tensorrt-rtx"].update(facts=3), "a record of schema 1 as engines.tensorrt-rtx, got T"),
        (lambda m: m["not_run"].update({"report torch": "x"}), "parity or evaluation or speed as not_run.3.step"),
        (lambda m: m["not_run"].update({"parity torch": 3}), "expected a text as not_run.parity torch, got 3"),
        (lambda m: m["signature"].update(merges="clap"), "expected a list of a text as signature.merges, got 'clap'"),
        (lambda m: m.update(signature=[]), r"expected a table as signature, got \[\]"),
    ],
)
def test_an_old_manifest_that_was_edited_is_refused_at_its_place(
    change: Callable[[Table], object], message: str
) -> None:
    table = old("schema1")
    change(table)
    with pytest.raises(BundleError, match=f"^bundle/manifest.json: .*{message}.*: it was edited") as caught:
        manifest_of(table, Path("bundle/manifest.json"))
    assert "\n" not in str(caught.value)
