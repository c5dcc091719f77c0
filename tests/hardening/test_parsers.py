"""Recipes, variant files and manifests with random changes: one kind of error, and soon."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from algm_deploy.bundle.manifest import MANIFEST
from algm_deploy.bundle.records import SECTIONS
from algm_deploy.bundle.signature import Signature
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli.settings import parsed
from algm_deploy.demo.run import SHORT, generated_scenes
from algm_deploy.deployment import bench_bundle, evaluate_bundle, verify_bundle
from algm_deploy.errors import AlgmDeployError, BundleError, CheckpointError, GateError, RecipeError
from algm_deploy.models.checkpoints.reading import Checkpoint, read_variant
from algm_deploy.models.checkpoints.variant import settings_from_variant
from algm_deploy.package_data import content
from algm_deploy.recipe.reading import checked, read_recipe, recipe_settings
from algm_deploy.report.page import report_page
from algm_deploy.timing.protocols import check_verified
from algm_deploy.timing.timers import Effort

SECONDS = 2.0  # for one file; the largest that is read takes a tenth on a quiet machine
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCRAPS = st.sampled_from(
    [
        *(
            "&a ",
            "*a",
            "<<: *a\n",
            "!!python/tuple ",
            "!!python/object:os.system ",
            "? ",
            ": ",
            "- ",
            "[",
            "]",
            "{",
            "}",
        ),
        *(
            "|\n",
            "0x" + "f" * 5000,
            "1" * 5000,
            "1:" * 2000 + "1",
            ".nan",
            "-.inf",
            "2001-01-01",
            "\t",
            "\x00",
            "\ufeff",
        ),
        *("é", '"', "'''", "[[", "a.b.c = 1\n", "= ", "#", "\n", " ", "null", "true", "1e999", "[" * 3000),
    ]
)
GONE = object()
WORDS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400)
VALUES = st.recursive(WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))


@contextmanager
def soon(*kinds: type[AlgmDeployError]) -> Iterator[None]:
    """Nothing but these errors leaves the block, as one sentence of bounded length, within `SECONDS`."""
    started, message = time.process_time(), ""
    try:
        yield
    except kinds as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 2000
    assert time.process_time() - started < SECONDS


@st.composite
def spoilt(draw: st.DrawFn, text: str) -> str:
    """The text with scraps of its language put in and pieces left out."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 0, 1, 7, 60])))
        text = text[:start] + draw(SCRAPS) * draw(st.sampled_from([1, 1, 1, 40])) + text[end:]
    return text


def published() -> str:
    return (content("export/recipes") / "segmenter_vit_s16_camvid.toml").read_text()


@FUZZ
@given(spoilt(published()))
def test_recipes(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with soon(RecipeError):
        read_recipe(path)


@FUZZ
@given(st.sampled_from(sorted(recipe_settings("demo"))), st.text(max_size=20) | SCRAPS | VALUES.map(str))
def test_settings_of_the_command_line(key: str, text: str) -> None:
    with soon(RecipeError):
        checked(key, parsed(text))


@pytest.fixture(scope="module")
def variant(tiny_checkpoint: Path) -> str:
    return (tiny_checkpoint / "variant.yml").read_text()


@FUZZ
@given(data=st.data())
def test_variant_files(tmp_path: Path, variant: str, data: st.DataObject) -> None:
    path = tmp_path / "variant.yml"
    path.write_text(data.draw(spoilt(variant)))
    with soon(CheckpointError):
        settings_from_variant(Checkpoint(tmp_path / "checkpoint.pth", {}, read_variant(path), ()))


@pytest.mark.parametrize(
    "line",
    ["a: [" + "1, " * 21_000 + "]", "a: " + "1:" * 32_000 + "1", "a: " + "[" * 400 + "]" * 400, "a: " + "&x " * 20_000],
    ids=["long_list", "base_sixty", "deep", "anchors"],
)
def test_the_largest_variant_files_are_read_soon(tmp_path: Path, line: str) -> None:
    path = tmp_path / "variant.yml"
    path.write_text(line)
    with soon(CheckpointError):
        read_variant(path)


@pytest.mark.parametrize("opening", ["[", "- ", "? ", "{a: "])
def test_deep_variant_files_are_refused_before_they_are_read(tmp_path: Path, opening: str) -> None:
    """Also where a program allows deep recursion; brackets within brackets cost the scanner their square."""
    path = tmp_path / "variant.yml"
    path.write_text("a: " * (opening == "[") + opening * 10_000)
    allowed = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        with soon(CheckpointError), pytest.raises(CheckpointError, match="nested more than 32 deep"):
            read_variant(path)
    finally:
        sys.setrecursionlimit(allowed)


@pytest.fixture(scope="module")
def described(tiny_bundle: Bundle) -> dict[str, Any]:
    """A manifest that lists no files, so that nothing but the manifest is read."""
    manifest: dict[str, Any] = json.loads((tiny_bundle.path / MANIFEST).read_text())
    return {**manifest, "files": {}}


def places(table: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys to every value of a table of tables and lists."""
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@FUZZ
@given(data=st.data())
def test_manifests(tmp_path: Path, described: dict[str, Any], data: st.DataObject) -> None:
    manifest = json.loads(json.dumps(described))
    for path in data.draw(st.lists(st.sampled_from(list(places(described))), min_size=1, max_size=2)):
        _put(manifest, path, data.draw(VALUES))
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with soon(BundleError):
        bundle = Bundle.open(tmp_path)
        Signature.from_table(bundle.fact("signature"))


@pytest.fixture(scope="module")
def recorded(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A manifest with a record of every kind, as the steps write them."""
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path_factory.mktemp("recorded") / "bundle"))
    scenes = generated_scenes(bundle.path.parent / "scenes", 2)
    scenes = replace(scenes, class_names=bundle.recipe.class_names)
    verify_bundle(bundle, "torch", [], 1, progress=False)
    for merge in (True, False):
        evaluate_bundle(bundle, "torch", scenes, merge=merge, progress=False)
    bench_bundle(bundle, "torch", [], replace(SHORT, count=1, effort=Effort(0, 2, 2)), progress=False)
    facts = {"version": "1.7", "precision": "fp32", "batches": [1, 2, 2], "compute_capabilities": ["8.9"]}
    engine = {"facts": facts, "parsed_network": {"plugins": [{"plugin": "clap"}]}, "build_seconds": 1.5}
    bundle.record("engines", "tensorrt-rtx", engine)
    bundle.not_run(["parity tensorrt-rtx"], "no GPU here")
    manifest: dict[str, Any] = json.loads((bundle.path / MANIFEST).read_text())
    return manifest


@settings(FUZZ, max_examples=150)
@given(data=st.data())
def test_edited_records(tmp_path: Path, recorded: dict[str, Any], data: st.DataObject) -> None:
    """The report reads all of them, the clock asks for the parity record."""
    manifest = json.loads(json.dumps(recorded))
    kept = {name: manifest[name] for name in (*SECTIONS, "environment", "not_run", "signature") if name in manifest}
    for path in data.draw(st.lists(st.sampled_from(list(places(kept))), min_size=1, max_size=2)):
        _put(manifest, path, data.draw(VALUES | st.just(GONE)))
    for read in (lambda bundle: report_page(bundle), lambda bundle: check_verified(bundle, "torch")):
        with soon(BundleError, GateError):
            read(Bundle(tmp_path, json.loads(json.dumps(manifest))))


def test_sound_records_are_read(tmp_path: Path, recorded: dict[str, Any]) -> None:
    page = report_page(Bundle(tmp_path, recorded))
    assert "FAILED" not in page
    assert page.count("times as fast") + page.count("speed-up") >= 1
    check_verified(Bundle(tmp_path, recorded), "torch")


def _put(table: Any, path: tuple[Any, ...], value: object) -> None:
    for key in path[:-1]:
        try:
            table = table[key]
        except (KeyError, IndexError, TypeError):
            return  # replaced or removed a moment ago
    if isinstance(table, dict) and value is GONE:
        table.pop(path[-1], None)
    elif isinstance(table, dict):
        table[path[-1]] = value


@FUZZ
@given(spoilt('{"schema": 1, "recipe": {"name": "x"}, "files": {"a": {"sha256": "0", "size_bytes": 1}}}'))
def test_manifests_that_are_hardly_json(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with soon(BundleError):
        Bundle.open(tmp_path)


def test_two_steps_at_once_keep_both_records(tmp_path: Path, tiny_bundle: Bundle) -> None:
    """Both opened the bundle before either wrote."""
    folder = shutil.copytree(tiny_bundle.path, tmp_path / "bundle")
    one, other = Bundle.open(folder), Bundle.open(folder)
    one.record("tuning", "first", {"tau": 0.5})
    other.record("tuning", "second", {"tau": 0.6})
    assert Bundle.open(folder).manifest["tuning"] == {"first": {"tau": 0.5}, "second": {"tau": 0.6}}
