"""Bundles: complete or absent, and every change after writing is noticed."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from algm_deploy.bundle.files import sha256_of, write_atomically
from algm_deploy.bundle.records import Link, NotRun, Parity, Speed
from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle, BundleWriter
from algm_deploy.errors import BundleError
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE
from algm_deploy.recipe.schema import Protocol, Recipe

RECIPE = Recipe("small", Network("segmenter", 32, 2, 2, 3, (64, 64)), DENSE, Protocol("camvid", 64, 64, 48))


def parity(runtime: str = "torch", passed: bool = True) -> Parity:
    link = Link(number=1, name="network", passed=passed, measured="equal", gate="equal")
    return Parity(runtime=runtime, images=1, batches=(1,), links=(link,))


def write(path: Path, weights: bytes = b"weights") -> Bundle:
    with BundleWriter(path, RECIPE) as writer:
        writer.path("weights.safetensors").write_bytes(weights)
        entry = writer.list_file("weights.safetensors", made_from={"checkpoint.pth": "ab" * 32})
        writer.path("model.onnx").write_bytes(b"graph of " + weights)
        writer.list_file("model.onnx", {"weights.safetensors": entry.sha256}, uses=("weights.safetensors",))
        writer.describe(signature=signature_of(RECIPE))
    return Bundle.open(path)


def contents(folder: Path) -> list[str]:
    """Names of what is in a folder but for the lock, which is empty and stays."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle")
    assert bundle.recipe == RECIPE
    assert bundle.signature == signature_of(RECIPE)
    assert bundle.file("model.onnx").read_bytes() == b"graph of weights"
    assert bundle.files["weights.safetensors"].made_from == {"checkpoint.pth": "ab" * 32}
    assert bundle.files["weights.safetensors"].sha256 == sha256_of(bundle.path / "weights.safetensors")
    assert bundle.manifest.environment.packages["torch"]
    bundle.verify()
    assert contents(tmp_path) == ["bundle"]
    assert (tmp_path / "bundle").stat().st_mode & 0o777 == 0o777 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_records_are_added_later(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle")
    for record in (parity(), parity("onnxruntime-cpu", passed=False)):
        bundle.record(record)
        assert Bundle.open(bundle.path).found(Parity, record.runtime) == record
    assert Bundle.open(bundle.path).manifest == bundle.manifest
    assert [record.passed for record in bundle.manifest.parity] == [True, False]
    assert bundle.manifest.speeds == ()
    assert bundle.found(Parity, "tensorrt") is bundle.found(Speed, "torch") is None


def speed(batch: int, stable: bool = True) -> Speed:
    return Speed(runtime="torch", variant="merged", protocol="mixed", batch=batch, stable=stable)


def test_a_record_takes_the_place_of_one_of_its_identity(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle")
    for record in (speed(2), speed(4), speed(2, stable=False)):
        bundle.record(record)
    assert Bundle.open(bundle.path).manifest.speeds == (speed(4), speed(2, stable=False))
    assert bundle.found(Speed, "torch") == speed(2, stable=False)  # the last one that was made


def test_a_record_takes_the_reason_why_there_was_none_with_it(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle")
    bundle.note_not_run(["parity", "speed"], "torch", "no GPU")
    bundle.note_not_run(["parity"], "tensorrt", "no GPU here")
    bundle.note_not_run(["parity", "speed"], "torch", "no GPU here")
    bundle.record(parity())
    assert Bundle.open(bundle.path).manifest.not_run == (
        NotRun(step="parity", runtime="tensorrt", reason="no GPU here"),
        NotRun(step="speed", runtime="torch", reason="no GPU here"),
    )
    bundle.record(parity("tensorrt"))
    bundle.record(speed(1))
    assert Bundle.open(bundle.path).manifest.not_run == ()


@pytest.mark.parametrize("facts", [{"environment": None}, {"recipe": RECIPE}, {"files": {}}, {"inputs": 1}], ids=str)
def test_a_writer_describes_fields_of_the_manifest_that_it_does_not_keep_itself(tmp_path: Path, facts: dict) -> None:
    write(tmp_path / "bundle", b"old")
    with pytest.raises(TypeError), BundleWriter(tmp_path / "bundle", RECIPE) as writer:
        writer.describe(**facts)
    assert Bundle.open(tmp_path / "bundle").file("weights.safetensors").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"share": float("nan")}, "expected a finite number as parity.0.links.0.facts.share, got nan: nothing was"),
        ({"share": {"worst": float("inf")}}, "as parity.0.links.0.facts.share.worst, got inf: nothing was written"),
        ({"problems": Path("a")}, "PosixPath.* is unsupported: nothing was written"),
        ({"images": 1 << 70}, "expected a whole number as parity.0.links.0.facts.images, got 11805"),
    ],
)
def test_records_that_are_no_json_leave_the_manifest(tmp_path: Path, facts: dict, message: str) -> None:
    bundle = write(tmp_path / "bundle")
    before = (bundle.path / "manifest.json").read_bytes()
    link = Link(number=1, name="network", passed=True, measured="", gate="", facts=facts)
    with pytest.raises(BundleError, match=message):
        bundle.record(Parity(runtime="torch", images=1, batches=(1,), links=(link,)))
    assert (bundle.path / "manifest.json").read_bytes() == before
    assert bundle.manifest.parity == ()


def test_a_record_of_wrong_types_is_refused_before_it_is_written(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle")
    with pytest.raises(BundleError, match=r"a whole number as parity\.0\.images, got 'four': nothing was written"):
        bundle.record(Parity(runtime="torch", images="four", batches=(1,), links=()))  # type: ignore[arg-type]
    assert Bundle.open(bundle.path).manifest.parity == ()


def test_a_bundle_without_a_signature_says_so(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "bundle", RECIPE) as writer:
        writer.path("model.onnx").write_bytes(b"graph")
        writer.list_file("model.onnx")
    with pytest.raises(BundleError, match="expected the signature of a network in its manifest: export it again"):
        _ = Bundle.open(tmp_path / "bundle").signature


# Changes after writing


def cut(path: Path) -> None:
    (path / "model.onnx").write_bytes(b"graph")


def removed(path: Path) -> None:
    (path / "weights.safetensors").unlink()


def edited(path: Path) -> None:
    (path / "model.onnx").write_bytes(b"graph of weightz")


def companion_edited(path: Path) -> None:
    (path / "weights.safetensors").write_bytes(b"weightz")


def swapped(path: Path) -> None:
    write(path.with_name("other"), b"WEIGHTS")
    shutil.copy(path.with_name("other") / "model.onnx", path / "model.onnx")


def made_of_another(path: Path) -> None:
    edit(path, lambda manifest: manifest["files"]["model.onnx"]["made_from"].update({"weights.safetensors": "0" * 64}))


def edit(path: Path, change: Callable[[dict], object]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def manifest_removed(path: Path) -> None:
    (path / "manifest.json").unlink()


def manifest_cut(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[: len(text) // 2])


def manifest_deep(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)


def manifest_newer(path: Path) -> None:
    edit(path, lambda manifest: manifest.update(schema=3))


def manifest_is_a_list(path: Path) -> None:
    (path / "manifest.json").write_text("[]")


def recipe_edited(path: Path) -> None:
    edit(path, lambda manifest: manifest["recipe"]["network"].update(depth="12"))


def recipe_removed(path: Path) -> None:
    edit(path, lambda manifest: manifest.pop("recipe"))


def files_malformed(path: Path) -> None:
    edit(path, lambda manifest: manifest["files"].update({"model.onnx": 3}))


def file_outside(path: Path) -> None:
    edit(path, lambda manifest: manifest["files"].update({"../secret": manifest["files"]["model.onnx"]}))


def companion_outside(path: Path) -> None:
    edit(path, lambda manifest: manifest["files"]["model.onnx"].update(uses=["/etc/passwd"]))


def companion_unlisted(path: Path) -> None:
    edit(path, lambda manifest: manifest["files"]["model.onnx"].update(uses=["weights.bin"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, "expected 16 bytes, got 5: it was cut or changed"),
        (removed, "expected weights.safetensors, found none in folder or manifest"),
        (edited, "model.onnx: expected the content that the manifest lists, got another"),
        (companion_edited, "weights.safetensors: expected the content that the manifest lists, got another"),
        (swapped, "model.onnx: expected the content that the manifest lists, got another"),
        (made_of_another, "expected model.onnx made from its weights.safetensors, which changed since: build it again"),
        (manifest_removed, "expected a bundle with manifest.json, found none"),
        (manifest_cut, "expected JSON, got"),
        (manifest_deep, "expected JSON, got RecursionError"),
        (manifest_newer, "expected bundle schema 2, got 3"),
        (manifest_is_a_list, "expected bundle schema 2, got None"),
        (recipe_edited, "recipe: expected a whole number as network.depth, got '12': it was edited"),
        (recipe_removed, "expected a table as recipe, got None: it was edited"),
        (files_malformed, "expected a table as files.model.onnx, got 3: it was edited"),
        (file_outside, "expected relative paths inside the bundle as files, got '../secret'"),
        (companion_outside, "expected relative paths inside the bundle as files, got '/etc/passwd'"),
        (companion_unlisted, "expected weights.bin, found none in folder or manifest"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_changed_bundles_are_refused(tmp_path: Path, change: Callable[[Path], None], message: str) -> None:
    path = write(tmp_path / "bundle").path
    change(path)
    with pytest.raises(BundleError, match=message) as caught:
        Bundle.open(path).file("model.onnx")
    assert "\n" not in str(caught.value)


def test_absent_bundles_and_files(tmp_path: Path) -> None:
    with pytest.raises(
        BundleError, match=r"expected a bundle at .*, found nothing: make one with `algm-deploy deploy`"
    ):
        Bundle.open(tmp_path / "bundle")
    with pytest.raises(BundleError, match=r"got 'x': build it first, there are model.onnx, weights.safetensors"):
        write(tmp_path / "bundle").file("x")


def test_hashes_are_checked_once_and_by_verify_again(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle")
    bundle.file("model.onnx")
    edited(bundle.path)
    bundle.file("model.onnx")
    with pytest.raises(BundleError, match="got another"):
        bundle.verify()


# Files added later


def test_a_file_is_added_and_replaced(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle")
    source = {"model.onnx": bundle.files["model.onnx"].sha256}
    for content in (b"engine", b"better engine"):
        with bundle.add("engines/gpu.engine", made_from=source) as path:
            path.write_bytes(content)
        assert bundle.file("engines/gpu.engine").read_bytes() == content
        assert Bundle.open(bundle.path).file("engines/gpu.engine").read_bytes() == content
    assert bundle.manifest.replacing == {}
    assert [path.name for path in (bundle.path / "engines").iterdir()] == ["gpu.engine"]


def test_two_additions_of_one_name_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins between the announcement and the rename of the first."""
    write(tmp_path / "bundle")
    threads: list[Thread] = []
    rename = Path.replace

    def add(content: bytes) -> None:
        with Bundle.open(tmp_path / "bundle").add("gpu.engine") as path:
            path.write_bytes(content)

    def replace(path: Path, target: Path) -> None:
        if target.name == "gpu.engine" and not threads:
            threads.append(Thread(target=add, args=(b"second",)))
            threads[0].start()
            threads[0].join(0.3)
        rename(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    add(b"first")
    threads[0].join(10)
    bundle = Bundle.open(tmp_path / "bundle")
    bundle.verify()
    assert bundle.file("gpu.engine").read_bytes() == b"second"
    assert bundle.manifest.replacing == {}


def test_a_failed_addition_leaves_the_old_file(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle")
    before = (bundle.path / "manifest.json").read_bytes()

    def fail() -> None:
        with bundle.add("model.onnx") as path:
            path.write_bytes(b"half")
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fail()
    assert (bundle.path / "manifest.json").read_bytes() == before
    assert bundle.file("model.onnx").read_bytes() == b"graph of weights"
    assert contents(bundle.path) == ["manifest.json", "model.onnx", "weights.safetensors"]


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "", "manifest.json", "a\\b"])
def test_names_outside_are_refused(tmp_path: Path, name: str) -> None:
    bundle = write(tmp_path / "bundle")
    with pytest.raises(BundleError, match="expected a relative path inside the bundle"), bundle.add(name):
        pass


# Interruptions: a child process is killed at every system call that changes names or content


def die_after(steps: int) -> None:
    """Kills this process at its change number `steps` of names or content."""
    left = [steps]

    def hook(event: str, args: tuple) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_everywhere(tmp_path: Path, act: Callable[[Path], None], check: Callable[[Path], None]) -> int:
    """Runs `act` in children that die at their first, second, ... change, until one survives; returns the deaths."""
    for deaths in range(100):
        folder = tmp_path / f"step{deaths}"
        folder.mkdir()
        write(folder / "bundle", b"old")
        child = os.fork()
        if child == 0:
            try:
                die_after(deaths)
                act(folder / "bundle")
            except BaseException:  # noqa: BLE001 - whatever it is, pytest must not go on in here
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        check(folder / "bundle")
        if code != -signal.SIGKILL:
            assert code == 0
            return deaths
    raise AssertionError("the child never finished")


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process takes nothing with it that it had written, so that no test has to wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.mark.usefixtures("quick_disk")
def test_a_killed_writer_leaves_the_old_or_the_new_bundle(tmp_path: Path) -> None:
    seen = set()

    def check(path: Path) -> None:
        bundle = Bundle.open(path)
        bundle.verify()
        seen.add(bundle.file("weights.safetensors").read_bytes())
        if seen == {b"old", b"new"}:  # nothing of either stays, whoever comes next
            bundle = write(path, b"later")
            assert contents(path) == ["manifest.json", "model.onnx", "weights.safetensors"]

    def act(path: Path) -> None:
        with BundleWriter(path, RECIPE) as writer:
            for name in ("weights.safetensors", "model.onnx", "engines/gpu.engine"):
                writer.path(name).write_bytes(b"new")
                writer.list_file(name)

    assert kill_everywhere(tmp_path, act, check) > 20
    assert seen == {b"old", b"new"}


@pytest.mark.usefixtures("quick_disk")
def test_a_killed_addition_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    seen = set()

    def check(path: Path) -> None:
        bundle = Bundle.open(path)
        bundle.verify()
        seen.add(bundle.file("model.onnx").read_bytes())
        with bundle.add("model.onnx") as target:
            target.write_bytes(b"later")
        assert Bundle.open(path).file("model.onnx").read_bytes() == b"later"

        assert [*path.glob(".*.partial")] == []

    def act(path: Path) -> None:
        with Bundle.open(path).add("model.onnx") as target:
            target.write_bytes(b"newer graph")

    assert kill_everywhere(tmp_path, act, check) > 5
    assert seen == {b"graph of old", b"newer graph"}


def test_an_exception_leaves_the_old_bundle(tmp_path: Path) -> None:
    write(tmp_path / "bundle", b"old")

    def fail() -> None:
        with BundleWriter(tmp_path / "bundle", RECIPE) as writer:
            writer.path("model.onnx").write_bytes(b"half")
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fail()
    assert Bundle.open(tmp_path / "bundle").file("weights.safetensors").read_bytes() == b"old"
    assert contents(tmp_path) == ["bundle"]


def test_a_link_to_a_bundle_is_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    write(tmp_path / "disk" / "bundle", b"old")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk" / "bundle")
    for content in (b"new", b"newer"):
        write(link, content)
        assert link.is_symlink()
        assert Bundle.open(tmp_path / "disk" / "bundle").file("weights.safetensors").read_bytes() == content
    Bundle.open(link).record(parity())
    assert Bundle.open(tmp_path / "disk" / "bundle").found(Parity, "torch") == parity()
    assert [*tmp_path.rglob("*.lock")] == [tmp_path / "disk" / "bundle" / ".lock"]  # one lock by every name
    assert contents(tmp_path) == ["disk", "link"]


def test_a_new_bundle_replaces_the_old_one(tmp_path: Path) -> None:
    write(tmp_path / "bundle", b"old")
    assert write(tmp_path / "bundle", b"new").file("weights.safetensors").read_bytes() == b"new"
    assert contents(tmp_path) == ["bundle"]


def count(path: str, process: int) -> None:
    for step in range(10):
        Bundle.open(path).record(parity(f"{process} {step}"))


def test_two_processes_update_one_bundle(tmp_path: Path) -> None:
    path = write(tmp_path / "bundle").path
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=count, args=(str(path), process)) for process in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    runtimes = {f"{process} {step}" for process in range(2) for step in range(10)}
    assert {record.runtime for record in Bundle.open(path).manifest.parity} == runtimes


# Places that cannot be written


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_other_things_are_never_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "bundle"
    if kind == "file":
        target.write_text("notes")
    else:
        target.mkdir()
        (target / "notes.txt").write_text("notes")
    with pytest.raises(BundleError, match="expected a bundle or a free name"):
        write(target)
    assert (target if kind == "file" else target / "notes.txt").read_text() == "notes"
    assert contents(tmp_path) == ["bundle"]


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    def fill(path: Path) -> None:
        with BundleWriter(path, RECIPE):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(BundleError, match="No space left on device: free space or choose another place"):
        fill(tmp_path / "bundle")
    assert contents(tmp_path) == []


def test_errors_of_other_places_stay_themselves(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), BundleWriter(tmp_path / "a" / "bundle", RECIPE):
        (tmp_path / "checkpoint.pth").read_bytes()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match=r"expected to write .*/file/bundle, got Not a directory"):
        write(tmp_path / "file" / "bundle")
    with (
        pytest.raises(BundleError, match=r"expected to write .*, got No such file"),
        write_atomically(tmp_path / "a" / "b") as path,
    ):
        path.write_text("")


def test_a_file_that_is_not_listed_is_an_error(tmp_path: Path) -> None:
    def forget() -> None:
        with BundleWriter(tmp_path / "bundle", RECIPE) as writer:
            writer.path("model.onnx").write_bytes(b"graph")

    with pytest.raises(BundleError, match=r"every file of the bundle listed, \['model.onnx'\] differ"):
        forget()
    with (
        BundleWriter(tmp_path / "bundle", RECIPE) as writer,
        pytest.raises(BundleError, match="expected x written before"),
    ):
        writer.list_file("x")


def test_write_atomically(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")

    def fail() -> None:
        with write_atomically(target) as path:
            path.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert target.read_text() == "old"
    with write_atomically(target) as path:
        assert path.suffix == ".json"
        path.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert contents(tmp_path) == ["report.json"]
