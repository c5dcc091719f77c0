"""Bundles: complete or absent, and every change after writing is noticed."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from algm_deploy.bundle.files import sha256_of, write_atomically
from algm_deploy.bundle.store import Bundle, BundleWriter
from algm_deploy.errors import BundleError
from algm_deploy.recipe.schema import DENSE, Network, Protocol, Recipe

PARITY = {"passed": True, "images": 1, "batches": [1], "links": []}
RECIPE = Recipe("small", Network("segmenter", 32, 2, 2, 3, (64, 64)), DENSE, Protocol("camvid", 64, 64, 48))


def write(path: Path, weights: bytes = b"weights") -> Bundle:
    with BundleWriter(path, RECIPE) as writer:
        writer.path("weights.safetensors").write_bytes(weights)
        entry = writer.record("weights.safetensors", made_from={"checkpoint.pth": "ab" * 32})
        writer.path("model.onnx").write_bytes(b"graph of " + weights)
        writer.record("model.onnx", {"weights.safetensors": entry.sha256}, uses=("weights.safetensors",))
        writer.facts["inputs"] = {"clap_threshold": {"default": 0.88}}
    return Bundle.open(path)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle")
    assert bundle.recipe == RECIPE
    assert bundle.fact("inputs") == {"clap_threshold": {"default": 0.88}}
    assert bundle.file("model.onnx").read_bytes() == b"graph of weights"
    assert bundle.files["weights.safetensors"].made_from == {"checkpoint.pth": "ab" * 32}
    assert bundle.files["weights.safetensors"].sha256 == sha256_of(bundle.path / "weights.safetensors")
    assert bundle.manifest["environment"]["packages"]["torch"]
    bundle.verify()
    assert leftovers(tmp_path) == ["bundle"]
    assert (tmp_path / "bundle").stat().st_mode & 0o777 == 0o777 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_facts_are_added_later(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle")
    bundle.update({"parity": {"torch": PARITY}, "inputs": None})
    bundle.record("parity", "onnxruntime-cpu", {**PARITY, "passed": False})
    again = Bundle.open(bundle.path)
    assert again.fact("parity") == again.section("parity")
    assert {runtime: record["passed"] for runtime, record in again.section("parity").items()} == {
        "torch": True,
        "onnxruntime-cpu": False,
    }
    assert again.section("speed") == {}
    with pytest.raises(BundleError, match="expected 'inputs' in its manifest: run the step that writes it"):
        again.fact("inputs")


def test_a_record_takes_the_reason_why_there_was_none_with_it(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle")
    bundle.not_run(["parity torch", "speed torch", "parity tensorrt"], "no GPU here")
    bundle.record("parity", "torch", PARITY)
    assert Bundle.open(bundle.path).fact("not_run") == dict.fromkeys(("speed torch", "parity tensorrt"), "no GPU here")
    bundle.record("parity", "tensorrt", PARITY)
    bundle.record("speed", "torch latency merged batch 1", {"variant": "merged"})
    assert "not_run" not in Bundle.open(bundle.path).manifest


@pytest.mark.parametrize("name", ["schema", "environment", "recipe", "files", "replacing"])
def test_facts_do_not_shadow_the_bundle_itself(tmp_path: Path, name: str) -> None:
    bundle = write(tmp_path / "bundle")
    with pytest.raises(BundleError, match=f"names of their own, got {name}"):
        bundle.update({name: 1})


def test_facts_that_are_no_json_leave_the_manifest(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle")
    for value in (float("nan"), {1, 2}):
        with pytest.raises(BundleError, match="expected finite JSON values"):
            bundle.update({"shares": value})
    with pytest.raises(BundleError, match="expected a table of tables as parity"):
        bundle.update({"parity": {"passed": True}})
    assert not {"shares", "parity"} & set(Bundle.open(bundle.path).manifest)


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
    edit(path, lambda manifest: manifest.update(schema=2))


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
        (manifest_newer, "expected bundle schema 1, got 2"),
        (manifest_is_a_list, "expected bundle schema 1, got None"),
        (recipe_edited, "expected a whole number as network.depth, got '12'"),
        (recipe_removed, "expected the facts of a bundle, got KeyError 'recipe'"),
        (files_malformed, "expected the facts of a bundle, got TypeError"),
        (file_outside, "expected a relative path inside the bundle, got '../secret'"),
        (companion_outside, "expected a relative path inside the bundle, got '/etc/passwd'"),
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
    assert "replacing" not in bundle.manifest
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
    assert "replacing" not in bundle.manifest


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
    assert sorted(path.name for path in bundle.path.iterdir()) == ["manifest.json", "model.onnx", "weights.safetensors"]


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "", "manifest.json", "a\\b"])
def test_names_outside_are_refused(tmp_path: Path, name: str) -> None:
    bundle = write(tmp_path / "bundle")
    with pytest.raises(BundleError, match="expected a relative path inside the bundle"), bundle.add(name):
        pass


# Interruptions: a child process is killed at every system call that changes names or content


CHILD = """
    import os, signal, sys
    from pathlib import Path
    sys.path[:0] = [str(Path(sys.argv[1]))]
    steps = int(sys.argv[3])
    def hook(event, args):
        global steps
        if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree") or (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            steps -= 1
            if steps < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    import test_bundle_child_content as content
    sys.addaudithook(hook)
    content.act(Path(sys.argv[2]))
"""


def kill_everywhere(tmp_path: Path, act: str, check: Callable[[Path], None]) -> int:
    """Runs `act` in children that die at their first, second, ... change, until one survives; returns the deaths."""
    (tmp_path / "test_bundle_child_content.py").write_text(textwrap.dedent(act))
    (tmp_path / "child.py").write_text(textwrap.dedent(CHILD))
    for deaths in range(100):
        folder = tmp_path / f"step{deaths}"
        folder.mkdir()
        write(folder / "bundle", b"old")
        command = [sys.executable, str(tmp_path / "child.py"), str(tmp_path), str(folder / "bundle"), str(deaths)]
        done = subprocess.run(command, capture_output=True, text=True)
        check(folder / "bundle")
        if done.returncode != -signal.SIGKILL:
            assert done.returncode == 0, done.stderr
            return deaths
    raise AssertionError("the child never finished")


def test_a_killed_writer_leaves_the_old_or_the_new_bundle(tmp_path: Path) -> None:
    seen = set()

    def check(path: Path) -> None:
        bundle = Bundle.open(path)
        bundle.verify()
        seen.add(bundle.file("weights.safetensors").read_bytes())

    act = f"""
        from algm_deploy.bundle.store import BundleWriter, Bundle
        def act(path):
            with BundleWriter(path, Bundle.open(path).recipe) as writer:
                for name in {["weights.safetensors", "model.onnx"]}:
                    writer.path(name).write_bytes(b"new")
                    writer.record(name)
    """
    assert kill_everywhere(tmp_path, act, check) > 5
    assert seen == {b"old", b"new"}


def test_a_killed_addition_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    seen = set()

    def check(path: Path) -> None:
        bundle = Bundle.open(path)
        bundle.verify()
        seen.add(bundle.file("model.onnx").read_bytes())
        with bundle.add("model.onnx") as target:
            target.write_bytes(b"later")
        assert Bundle.open(path).file("model.onnx").read_bytes() == b"later"

    act = """
        from algm_deploy.bundle.store import Bundle
        def act(path):
            with Bundle.open(path).add("model.onnx") as target:
                target.write_bytes(b"newer graph")
    """
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
    assert leftovers(tmp_path) == ["bundle"]


def test_a_replacement_stopped_between_its_renames_is_undone(tmp_path: Path) -> None:
    write(tmp_path / "bundle", b"old").path.rename(tmp_path / ".bundle.old")
    assert Bundle.open(tmp_path / "bundle").file("weights.safetensors").read_bytes() == b"old"


def test_a_link_to_a_bundle_is_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    write(tmp_path / "disk" / "bundle", b"old")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk" / "bundle")
    for content in (b"new", b"newer"):
        write(link, content)
        assert link.is_symlink()
        assert Bundle.open(tmp_path / "disk" / "bundle").file("weights.safetensors").read_bytes() == content
    Bundle.open(link).update({"via": "link"})
    assert Bundle.open(tmp_path / "disk" / "bundle").fact("via") == "link"
    assert sorted(path.name for path in tmp_path.rglob("*.lock")) == [".bundle.lock"]  # one lock by every name
    assert leftovers(tmp_path) == ["disk", "link"]


def test_a_new_bundle_replaces_the_old_one(tmp_path: Path) -> None:
    write(tmp_path / "bundle", b"old")
    assert write(tmp_path / "bundle", b"new").file("weights.safetensors").read_bytes() == b"new"
    assert leftovers(tmp_path) == ["bundle"]


def count(path: str, process: int) -> None:
    for step in range(10):
        Bundle.open(path).update({f"process{process}_{step}": step})


def test_two_processes_update_one_bundle(tmp_path: Path) -> None:
    path = write(tmp_path / "bundle").path
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=count, args=(str(path), process)) for process in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert sum(name.startswith("process") for name in Bundle.open(path).manifest) == 20


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
    assert leftovers(tmp_path) == ["bundle"]


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    def fill(path: Path) -> None:
        with BundleWriter(path, RECIPE):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(BundleError, match="No space left on device: free space or choose another place"):
        fill(tmp_path / "bundle")
    assert leftovers(tmp_path) == []


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


def test_a_forgotten_record_is_an_error(tmp_path: Path) -> None:
    def forget() -> None:
        with BundleWriter(tmp_path / "bundle", RECIPE) as writer:
            writer.path("model.onnx").write_bytes(b"graph")

    with pytest.raises(BundleError, match=r"every file of the bundle recorded, \['model.onnx'\] differ"):
        forget()
    with (
        BundleWriter(tmp_path / "bundle", RECIPE) as writer,
        pytest.raises(BundleError, match="expected x written before"),
    ):
        writer.record("x")


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
    assert leftovers(tmp_path) == ["report.json"]
