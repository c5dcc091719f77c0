"""Where bundles lie and who may read them: mount points, read-only parents, the umask, what ended processes leave."""

from __future__ import annotations

import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from algm_deploy.bundle.files import workspace, write_atomically
from algm_deploy.bundle.records import NotRun
from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle, BundleWriter
from algm_deploy.errors import BundleError
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE
from algm_deploy.recipe.schema import Protocol, Recipe

RECIPE = Recipe("small", Network("segmenter", 32, 2, 2, 3, (64, 64)), DENSE, Protocol("camvid", 64, 64, 48))
Unprivileged = Callable[[], AbstractContextManager[None]]
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18


def write(path: Path, content: bytes = b"graph") -> Bundle:
    with BundleWriter(path, RECIPE) as writer:
        writer.path("model.onnx").write_bytes(content)
        writer.list_file("model.onnx")
        writer.describe(signature=signature_of(RECIPE))
    return Bundle.open(path)


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def use(path: Path) -> None:
    """All that is done to a bundle: written, replaced, recorded in, added to."""
    write(path, b"old")
    bundle = write(path, b"new")
    bundle.require_writable()
    bundle.note_not_run(["parity"], "torch", "no time")
    with bundle.add("engines/gpu.engine") as engine:
        engine.write_bytes(b"engine")
    bundle = Bundle.open(path)
    bundle.verify()
    assert bundle.file("model.onnx").read_bytes() == b"new"
    assert bundle.manifest.not_run == (NotRun(step="parity", runtime="torch", reason="no time"),)


# ------------------------------------------------------------------------------------------------------- mount points


def child(act: Callable[[], object]) -> int:
    """Runs `act` in a forked process: 0, or 1 with a traceback, or what it ends with itself."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            act()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:  # noqa: BLE001 - whatever it is, pytest must not go on in here
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def mounted(path: Path) -> None:
    """Mounts an empty file system for this process alone; exits with 77 where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    private = libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    if private or libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, None):
        os._exit(77)


def test_a_bundle_may_be_a_mount_point(tmp_path: Path) -> None:
    target = tmp_path / "volume"
    target.mkdir()

    def act() -> None:
        mounted(target)
        assert target.is_mount()
        (target / "lost+found").mkdir()  # as some file systems begin
        use(target)
        assert contents(target) == ["engines", "lost+found", "manifest.json", "model.onnx"]

    code = child(act)
    if code == 77:
        pytest.skip("needs the right to mount a file system")
    assert code == 0
    assert contents(tmp_path) == ["volume"]  # nothing lies beside


def test_a_bundle_may_lie_in_a_folder_that_is_read_only(tmp_path: Path, unprivileged: Unprivileged) -> None:
    (tmp_path / "place" / "bundle").mkdir(parents=True)
    (tmp_path / "place").chmod(0o555)
    with unprivileged():
        use(tmp_path / "place" / "bundle")
        with pytest.raises(BundleError, match="got Permission denied: change its permissions or choose another place"):
            write(tmp_path / "place" / "other")
    assert contents(tmp_path / "place") == ["bundle"]


def test_a_place_that_takes_no_bundle_is_told_before_the_work(tmp_path: Path, unprivileged: Unprivileged) -> None:
    target = tmp_path / "bundle"
    target.mkdir(mode=0o555)
    worked = []
    with (
        unprivileged(),
        pytest.raises(BundleError, match=r"expected to write .*/bundle, got Permission denied"),
        BundleWriter(target, RECIPE),
    ):
        worked.append("hours")
    assert worked == []


# -------------------------------------------------------------------------------------------------------- permissions


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def of_its_own_mode(path: Path) -> None:
    """Writes as the libraries do that make a temporary file and rename it."""
    path.write_bytes(b"content")
    path.chmod(0o600)


@pytest.mark.parametrize(("mask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o077, 0o600)])
def test_modes_follow_the_umask_whatever_a_library_does(tmp_path: Path, mask: int, mode: int) -> None:
    with umask(mask):
        with BundleWriter(tmp_path / "bundle", RECIPE) as writer:
            of_its_own_mode(writer.path("weights.safetensors"))
            writer.list_file("weights.safetensors")
        with Bundle.open(tmp_path / "bundle").add("model.onnx") as path:
            of_its_own_mode(path)
        with write_atomically(tmp_path / "report.html") as path:
            of_its_own_mode(path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    names = {".lock", "manifest.json", "weights.safetensors", "model.onnx", "report.html"}
    assert modes == dict.fromkeys(names, mode)


def test_what_may_not_be_read_is_told_by_who_needs_it(tmp_path: Path, unprivileged: Unprivileged) -> None:
    with write(tmp_path / "bundle").add("engines/gpu.engine") as path:
        path.write_bytes(b"engine")
    for private in ("engines", "manifest.json"):
        (tmp_path / "bundle" / private).chmod(0)
        with (
            unprivileged(),
            pytest.raises(BundleError, match=f"expected to read .*/{private}.*, got Permission denied: cha"),
        ):
            Bundle.open(tmp_path / "bundle").file("engines/gpu.engine")
        if private == "engines":
            with unprivileged():
                assert Bundle.open(tmp_path / "bundle").file("model.onnx").read_bytes() == b"graph"
    (tmp_path / "bundle" / "engines").chmod(0o755)


# ------------------------------------------------------------------------------------------------------------- endings


def ended_while_writing(
    path: Path, number: signal.Signals, act: Callable[[Path], AbstractContextManager[object]]
) -> int:
    """Exit code of a process that gets a signal in the middle of its writing."""

    def wait() -> None:
        with act(path):
            os.kill(os.getpid(), number)
            time.sleep(10)

    return child(wait)


@contextmanager
def exporting(path: Path) -> Iterator[None]:
    with BundleWriter(path, RECIPE) as writer:
        writer.path("model.onnx").write_bytes(b"gigabytes")
        yield


@contextmanager
def building(path: Path) -> Iterator[None]:
    with Bundle.open(path).add("engines/gpu.engine") as engine:
        engine.write_bytes(b"gigabytes")
        yield


@contextmanager
def reporting(path: Path) -> Iterator[None]:
    with write_atomically(path / "report.html") as page:
        page.write_text("page")
        yield


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("act", [exporting, building, reporting])
def test_a_process_that_is_ended_leaves_nothing(
    tmp_path: Path, number: signal.Signals, act: Callable[[Path], AbstractContextManager[object]]
) -> None:
    write(tmp_path / "bundle")
    assert ended_while_writing(tmp_path / "bundle", number, act) == 128 + number
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {".lock", "manifest.json", "model.onnx"}
    assert Bundle.open(tmp_path / "bundle").file("model.onnx").read_bytes() == b"graph"
    assert ended_while_writing(tmp_path / "a" / "new", number, exporting) == 128 + number
    assert contents(tmp_path) == ["bundle"]


def test_what_a_killed_process_left_goes_with_the_next(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    assert ended_while_writing(target, signal.SIGKILL, exporting) == -signal.SIGKILL
    (left,) = target.glob(".*.partial")
    with pytest.raises(BundleError, match=r"expected a bundle with manifest\.json, found none"):
        Bundle.open(target)
    with workspace(target) as live:
        assert not left.exists()
        write(target)
        assert live.exists()  # its owner lives
        with Bundle.open(target).add("engines/gpu.engine") as engine:
            engine.write_bytes(b"engine")
        assert live.exists()
    assert contents(target) == ["engines", "manifest.json", "model.onnx"]


def test_a_programs_own_way_with_a_signal_stays(tmp_path: Path) -> None:
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with BundleWriter(tmp_path / "bundle", RECIPE) as writer:
            os.kill(os.getpid(), signal.SIGTERM)
            writer.path("model.onnx").write_bytes(b"graph")
            writer.list_file("model.onnx")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]
    assert contents(tmp_path / "bundle") == ["manifest.json", "model.onnx"]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
