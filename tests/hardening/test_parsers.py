"""Recipes, variant files and manifests with random changes: one kind of error, and soon."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from algm_deploy.bundle.manifest import MANIFEST, manifest_of
from algm_deploy.bundle.records import Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli.arguments import setting
from algm_deploy.deployment import bench, evaluate, verify
from algm_deploy.errors import AlgmDeployError, BundleError, CheckpointError, GateError, RecipeError
from algm_deploy.evaluation.datasets import Dataset, open_dataset
from algm_deploy.models.checkpoints.reading import Checkpoint, read_variant
from algm_deploy.models.checkpoints.variant import settings_from_variant
from algm_deploy.package_data import content
from algm_deploy.recipe.reading import recipe, recipe_settings
from algm_deploy.report.page import report_page
from algm_deploy.timing.protocols import Request, check_verified
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
        recipe(str(path))


@FUZZ
@given(st.sampled_from(sorted(recipe_settings("demo"))), st.text(max_size=20) | SCRAPS | VALUES.map(str))
def test_settings_of_the_command_line(key: str, text: str) -> None:
    with soon(RecipeError):
        setting(f"{key}={text}")


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


OLD = json.loads((Path(__file__).parents[1] / "data" / "manifests" / "schema1.json").read_text())


@pytest.fixture(scope="module")
def described(tiny_bundle: Bundle) -> dict[int, dict[str, Any]]:
    """Manifests by schema that list no files, so that nothing but the manifest is read."""
    manifest: dict[str, Any] = json.loads((tiny_bundle.path / MANIFEST).read_text())
    return {1: {**OLD, "files": {}}, 2: {**manifest, "files": {}}}


def places(table: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys to every value of a table of tables and lists."""
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@pytest.mark.parametrize("schema", [1, 2])
@FUZZ
@given(data=st.data())
def test_manifests(tmp_path: Path, described: dict[int, dict[str, Any]], schema: int, data: st.DataObject) -> None:
    manifest = json.loads(json.dumps(described[schema]))
    for path in data.draw(st.lists(st.sampled_from(list(places(manifest))), min_size=1, max_size=2)):
        _put(manifest, path, data.draw(VALUES))
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with soon(BundleError):
        bundle = Bundle.open(tmp_path)
        assert bundle.signature.merges or not bundle.recipe.merging.layers


def test_a_manifest_that_lost_its_merges(tmp_path: Path, described: dict[int, dict[str, Any]]) -> None:
    manifest = json.loads(json.dumps(described[2]))
    manifest["signature"]["merges"] = []
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"signature\.merges: expected those of the recipe"):
        Bundle.open(tmp_path)


@pytest.mark.parametrize("schema", [1, 2])
def test_sound_manifests_are_read(tmp_path: Path, described: dict[int, dict[str, Any]], schema: int) -> None:
    """Otherwise the changed ones would prove nothing."""
    (tmp_path / MANIFEST).write_text(json.dumps(described[schema]))
    assert Bundle.open(tmp_path).signature.merges == ("clap_1", "gbm_3")


@pytest.fixture(scope="module")
def recorded(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Manifests by schema with a record of every kind, as the steps write them."""
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path_factory.mktemp("recorded") / "bundle"))
    pictures = labelled_noise(bundle.path.parent / "pictures", bundle.recipe.class_names)
    verify(bundle, "torch", count=1, progress=False)
    for merge in (True, False):
        evaluate(bundle, pictures, "torch", dense=not merge, progress=False)
    request = Request("latency", count=1, effort=Effort(0, 2, 2), variants=("dense", "merged"))
    bench(bundle, "torch", protocol=request, progress=False)
    for record in manifest_of(OLD, Path(MANIFEST)).engines:
        bundle.record(record)
    bundle.note_not_run(["parity"], "tensorrt-rtx", "no GPU here")
    return {1: OLD, 2: json.loads((bundle.path / MANIFEST).read_text())}


def labelled_noise(root: Path, class_names: Sequence[str]) -> Dataset:
    random = np.random.default_rng(0)
    for index in range(2):
        for kind, shape, values in (("images", (128, 128, 3), 256), ("annotations", (128, 128), len(class_names))):
            path = root / kind / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, values, shape, dtype=np.uint8)).save(path)
    (root / "classes.json").write_text(json.dumps({"names": class_names}))
    return open_dataset("folder", root)


def opened(folder: Path, manifest: dict[str, Any]) -> Bundle:
    return Bundle(folder, manifest_of(json.loads(json.dumps(manifest)), folder / MANIFEST))


@pytest.mark.parametrize("schema", [1, 2])
@settings(FUZZ, max_examples=100)
@given(data=st.data())
def test_edited_records(tmp_path: Path, recorded: dict[int, dict[str, Any]], schema: int, data: st.DataObject) -> None:
    """The report reads all of them, the clock asks for the parity record."""
    manifest = json.loads(json.dumps(recorded[schema]))
    kept = {name: part for name, part in manifest.items() if name not in ("schema", "recipe", "files")}
    for path in data.draw(st.lists(st.sampled_from(list(places(kept))), min_size=1, max_size=2)):
        _put(manifest, path, data.draw(VALUES | st.just(GONE)))
    for read in (lambda bundle: report_page(bundle), lambda bundle: check_verified(bundle, "torch")):
        with soon(BundleError, GateError):
            read(opened(tmp_path, manifest))


@pytest.mark.parametrize("schema", [1, 2])
def test_sound_records_are_read(tmp_path: Path, recorded: dict[int, dict[str, Any]], schema: int) -> None:
    bundle = opened(tmp_path, recorded[schema])
    page = report_page(bundle)
    assert "FAILED" not in page
    assert page.count("times as fast") + page.count("speed-up") >= 1
    check_verified(bundle, "torch")


def _put(table: Any, path: tuple[Any, ...], value: object) -> None:
    for key in path[:-1]:
        try:
            table = table[key]
        except (KeyError, IndexError, TypeError):
            return  # replaced or removed a moment ago
    if value is GONE and isinstance(table, dict):
        table.pop(path[-1], None)
    elif isinstance(table, dict):
        table[path[-1]] = value
    elif isinstance(table, list) and isinstance(path[-1], int):
        table[path[-1] : path[-1] + 1] = [] if value is GONE else [value]


@pytest.mark.parametrize("schema", [1, 2])
@FUZZ
@given(data=st.data())
def test_manifests_that_are_hardly_json(tmp_path: Path, schema: int, data: st.DataObject) -> None:
    text = f'{{"schema": {schema}, "recipe": {{"name": "x"}}, "files": {{"a": {{"sha256": "0", "size_bytes": 1}}}}}}'
    (tmp_path / MANIFEST).write_text(data.draw(spoilt(text)))
    with soon(BundleError):
        Bundle.open(tmp_path)


def test_two_steps_at_once_keep_both_records(tmp_path: Path, tiny_bundle: Bundle) -> None:
    """Both opened the bundle before either wrote."""
    folder = shutil.copytree(tiny_bundle.path, tmp_path / "bundle")
    one, other = Bundle.open(folder), Bundle.open(folder)
    records = [Parity(runtime=runtime, images=1, batches=(1,), links=()) for runtime in ("torch", "onnxruntime-cpu")]
    one.record(records[0])
    other.record(records[1])
    assert Bundle.open(folder).manifest.parity == tuple(records)
