"""Manifests are read strictly: whatever no step wrote is refused in one sentence that names the place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from algm_deploy.bundle.manifest import checked_name, manifest_of, read_manifest, write_manifest
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError

Table = dict[str, Any]
Steps = tuple[str | int, ...]
FILE = Path("bundle/manifest.json")
NAMED = {"files", "made_from", "packages", "execution", "stages", "reading", "thresholds", "defaults", "slices"}
NAMED |= {"failures", "iou_percent_by_class", "windows_by_merge", "tokens_by_merge", "rewrites", "nodes_by_provider"}
FREE = {"facts", "page", "figures", "engine_layers"}  # hold any JSON


def places(value: Any, steps: Steps = ()) -> Iterator[Steps]:
    """All places of a manifest but one for each kind: of a list its last item, of alike tables the last one."""
    yield steps
    if isinstance(value, list) and value:
        yield from places(value[-1], (*steps, len(value) - 1))
    elif isinstance(value, dict):
        tables = [name for name, part in value.items() if isinstance(part, dict)]
        alike = len(tables) > 1 and len({frozenset(value[name]) for name in tables}) == 1
        for name in value:
            if not alike or name == tables[-1]:
                yield from places(value[name], (*steps, name))


def at(value: Any, steps: Steps) -> Any:
    for step in steps:
        value = value[step]
    return value


def changed(table: Table, steps: Steps, value: object) -> Table:
    found = deepcopy(table)
    at(found, steps[:-1])[steps[-1]] = value
    return found


def refused(table: Table) -> str:
    with pytest.raises(BundleError, match=r"^bundle/manifest\.json: ") as caught:
        manifest_of(table, FILE)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def named(steps: Steps) -> str:
    """How an error calls a place; settings of a recipe are called as people write them."""
    return ".".join(map(str, steps[1:] if steps[0] == "recipe" and len(steps) > 1 else steps))


def test_nan_is_refused_at_its_place(table: Table) -> None:
    numbers = [steps for steps in places(table) if isinstance(at(table, steps), int | float | None) and steps]
    assert len(numbers) > 150
    values = cycle((float("nan"), float("inf"), -float("inf")))
    for steps in numbers:
        if steps[0] == "schema" or steps[:2] == ("recipe", "schema"):
            continue
        value = next(values)
        said = refused(changed(table, steps, value))
        assert f"expected a finite number as {'.'.join(map(str, steps))}, got {value}:" in said


def test_another_type_is_refused_at_its_place(table: Table) -> None:
    checked = [steps for steps in places(table) if steps and not FREE & set(steps)]
    assert len(checked) > 250
    for steps in checked:
        said = refused(changed(table, steps, [[None]]))
        assert f" as {named(steps)}" in said or "schema" in steps


def test_an_entry_that_no_release_writes_is_refused_at_its_place(table: Table) -> None:
    """But for tables whose entries people name, such as classes and files."""
    tables = [steps for steps in places(table) if isinstance(at(table, steps), dict) and not FREE & set(steps)]
    records = [steps for steps in tables if not {*steps[-1:]} & NAMED | {"recipe", "layers"} & set(steps)]
    assert len(records) > 30
    for steps in records:
        found = deepcopy(table)
        at(found, steps)["mood"] = ["good"]
        where = named(steps) if steps else "the table"
        assert f"expected no entry in {where} that this release does not know, got 'mood'" in refused(found)


def test_an_entry_of_a_recipe_that_no_release_writes_is_refused(table: Table) -> None:
    table["recipe"]["network"]["mood"] = "good"
    assert "expected a setting such as merging.clap_threshold, got 'network.mood'" in refused(table)


def test_a_missing_entry_is_named(table: Table) -> None:
    for section, needed in {
        "parity": {"runtime", "images", "batches", "links"},
        "evaluations": {
            *("runtime", "dataset", "split", "protocol", "images", "miou_percent", "pixel_accuracy_percent"),
            "token_histograms",
        },
        "speeds": {"runtime", "variant", "protocol", "batch", "stable"},
        "engines": {
            *("runtime", "version", "precision", "batches", "compute_capabilities", "version_compatible"),
            *("hardware_compatible", "onnx_hash", "plugin_sources", "engine_bytes", "parsed_network", "build_seconds"),
        },
        "optimized_graphs": {"runtime", "rewrites"},
        "rebuilds": {"runtime", "builds", "distinct_files", "pictures"},
        "not_run": {"step", "runtime", "reason"},
    }.items():
        for name in table[section][0]:
            found = deepcopy(table)
            del found[section][0][name]
            if name in needed:
                assert refused(found).endswith(
                    "found none: it was edited, remove that entry and run the step that writes it, or export again"
                )
                assert f" as {section}.0.{name}, found none" in refused(found)
            else:
                manifest_of(found, FILE)
        assert needed <= set(table[section][0]) | {"plugin_sources"}
    for name in ("environment", "recipe", "files"):
        found = deepcopy(table)
        del found[name]
        assert f"expected a table as {name}" in refused(found)


@pytest.mark.parametrize(
    ("steps", "value", "message"),
    [
        (("evaluations", 0, "token_histograms", "token_edges"), [0, 2, 1, 4, 5], "expected rising edges and a count"),
        (("evaluations", 0, "token_histograms", "token_edges"), [0], "expected rising edges and a count between two"),
        (("evaluations", 0, "token_histograms", "windows_by_merge", "clap_1"), [1, 2], "expected rising edges and"),
        (("evaluations", 0, "token_histograms", "windows_by_merge", "clap_1"), [1, 2, 3, -1], "expected rising edges"),
        (
            ("speeds", 1, "by_picture", "tokens_by_merge", "clap_1"),
            [3],
            "expected as many token counts as latencies",
        ),
        (
            ("speeds", 1, "by_picture", "latency_ms_p50"),
            [],
            "expected as many token counts as latencies as spe",
        ),
        (("evaluations", 0, "protocol", "stride"), 0, "expected protocol.stride between 1 and 128, got 0"),
        (("evaluations", 0, "thresholds", "clap_threshold"), "nan", "number or inf or -inf as .*threshold, got 'nan'"),
        (("evaluations", 0, "images"), True, "expected a whole number as evaluations.0.images, got True"),
        (("evaluations", 0, "images"), 3.0, "expected a whole number as evaluations.0.images, got 3.0"),
        (("evaluations", 0, "images"), 1 << 64, "expected a whole number as evaluations.0.images, got 18446744"),
        (("evaluations", 0, "miou_percent"), 1e301, "expected a finite number as evaluations.0.miou_percent"),
        (("parity", 0, "links", 2, "passed"), 1, "expected true or false as parity.0.links.2.passed, got 1"),
        (
            ("speeds", 0, "variant"),
            "sparse",
            "expected dense or dense_cudnn or merged or truncated as speeds.0.variant, got 'sparse'",
        ),
        (("engines", 0, "batches"), [1, 8], r"expected 3 whole numbers as engines.0.batches, got \[1, 8\]"),
        (("engines", 0, "builder_layers", 1), ["a"], "a list of a text and a text as engines.0.builder_layers.1"),
        (("signature", "outputs"), [], "expected an image, labels or scores, and token counts as signature"),
        (
            ("files", "/etc/passwd"),
            {"sha256": "", "size_bytes": 1},
            "expected relative paths inside the bundle as files",
        ),
        (("schema",), True, "expected bundle schema 2, got True"),
        (("schema",), 2.0, "expected bundle schema 2, got 2.0"),
        (("schema",), 3, "expected bundle schema 2, got 3"),
        (("evaluations` - at `$.x",), 3, "expected no entry in the table that this release does not know, got 'eval"),
        (("evaluations", 0, "\udcff"), 3, r"expected no entry in evaluations.0 that .*, got '\\udcff'"),
    ],
)
def test_what_contradicts_itself_is_refused(table: Table, steps: Steps, value: object, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        manifest_of(changed(table, steps, value), FILE)


def test_nested_without_end(table: Table) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "got one of a thousand levels" in refused(changed(table, ("parity", 0, "links", 0, "facts", "deep"), deep))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "expected a bundle with manifest.json, found none: name the folder that `deploy` wrote"),
        ("{", "manifest.json: expected JSON, got JSONDecodeError"),
        ('{"schema": 2, "files": NaN}', "manifest.json: expected a table as recipe"),
        ("[]", "manifest.json: expected bundle schema 2, got None"),
        ('{"schema": ' + "9" * 5000 + "}", "expected JSON, got ValueError Exceeds the limit"),
        ("[" * 100_000, "expected JSON, got RecursionError"),
    ],
)
def test_files_that_are_no_manifest(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BundleError, match=message):
        read_manifest(tmp_path)


def test_what_is_written_is_what_is_read(tmp_path: Path, table: Table, full_manifest: str) -> None:
    manifest = manifest_of(table, FILE)
    assert write_manifest(tmp_path, manifest) == manifest == read_manifest(tmp_path)
    assert (tmp_path / "manifest.json").read_text() == full_manifest


def test_pictures_may_have_names_that_are_no_text(tmp_path: Path, full_manifest: str) -> None:
    """A file system holds bytes: what is no UTF-8 comes as halves of characters, which JSON escapes and UTF-8 lacks."""
    (tmp_path / "manifest.json").write_text(full_manifest)
    bundle = Bundle(tmp_path, read_manifest(tmp_path))
    name = b"night/\xff.png".decode("utf-8", "surrogateescape")
    record = replace(bundle.manifest.evaluations[0], failures={name: f"photos/{name}: it cannot be decoded"})
    bundle.record(record)
    assert read_manifest(tmp_path).evaluations[-1] == record
    assert json.loads((tmp_path / "manifest.json").read_text(encoding="ascii"))["evaluations"][-1]["failures"]


@pytest.mark.parametrize("name", ["../x", "/x", "//x", "a/../../x", "", ".", "manifest.json", "a\\b"])
def test_names_outside_are_refused(name: str) -> None:
    with pytest.raises(BundleError, match="expected a relative path inside the bundle"):
        checked_name(name)


@pytest.mark.parametrize("name", ["x", "engines/x.engine", "a/manifest.json", "..x"])
def test_names_inside(name: str) -> None:
    assert checked_name(name) == name
