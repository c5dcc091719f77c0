"""Writing to a disk: files appear whole or not at all, one process at a time, and errors are one sentence."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from algm_deploy.errors import AlgmDeployError, BundleError, remedy

# What every export writes: the network itself, the portable graph, the same for readers that know no functions, and the
# weights of both graphs.
WEIGHTS, ONNX, ONNX_DATA = "weights.safetensors", "model.onnx", "model.onnx.data"
ONNX_INLINED = "model.inlined.onnx"
# Hidden names in a bundle's folder, where even a mount point or a folder in one that is read-only can hold them.
LOCK, PARTIAL = ".lock", ".partial"
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yields a path beside `path`; after the block it takes the place of `path`, after an exception it is gone."""
    temporary = beside(path, path.suffix)
    with ended_in_order(), storage_errors(path):
        try:
            mode = _mode_of_new(temporary)
            yield temporary
            sync(temporary)
            temporary.chmod(mode)
            temporary.replace(path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def beside(path: Path, suffix: str) -> Path:
    """A hidden name of its own in the same folder, so that a rename stays on one file system."""
    return path.with_name(f".{path.stem}.{secrets.token_hex(4)}{suffix}")


def require_utf8(path: Path, refusal: type[AlgmDeployError]) -> None:
    """`refusal` for a path that is no UTF-8: ONNX Runtime, PyTorch and safetensors do not open it, OpenCV crashes.

    Photos may be called anything.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise refusal(
            f"expected a path in UTF-8, which libraries take, got {os.fsencode(path)!r:.200}: rename it"
        ) from error


# --------------------------------------------------------------------------------------------------- several processes


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, an empty hidden file in it; other processes wait for it to change what is there."""
    with storage_errors(folder, folder), _own_lock(folder / LOCK):
        yield


@contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """A hidden folder inside `folder` for what is not finished, gone after the block.

    It is locked while its owner lives. Those that a killed process left, a lock that nobody holds, are removed first.
    """
    place = folder / f".{secrets.token_hex(4)}{PARTIAL}"
    with ended_in_order():
        try:
            with locked(folder):
                _remove_abandoned(folder)
                place.mkdir()
                owner = _own_lock(place / LOCK)
            with owner:
                yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def as_new(path: Path, made: Path) -> None:
    """Gives a file the permissions of one that this process just `made`: libraries choose some of their own."""
    path.chmod(made.stat().st_mode & 0o777)


def _own_lock(path: Path, wait: bool = True) -> IO[Any]:
    """The lock file, opened and held; BlockingIOError where another holds it and nobody is to wait."""
    while True:
        file = path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        except FileNotFoundError:  # removed meanwhile, with the folder or alone
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def _remove_abandoned(folder: Path) -> None:
    for place in folder.glob(f".*{PARTIAL}"):
        with suppress(OSError), _own_lock(place / LOCK, wait=False):  # BlockingIOError: its owner lives
            shutil.rmtree(place, ignore_errors=True)


def _mode_of_new(path: Path) -> int:
    """Permissions of new files there, by the umask and the folder's rules."""
    path.touch()
    mode = path.stat().st_mode & 0o777
    path.unlink()
    return mode


# ------------------------------------------------------------------------------------------------------------- endings


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP, which would end the process at once, raise SystemExit: what is around tidies up first.

    A program that has its own way with a signal keeps it, and so do threads and forked processes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process, came = os.getpid(), list[int]()
    taken = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not came:  # a second one does not stop the tidying
            came.append(number)
            raise SystemExit(128 + number)  # as a shell counts a process that ended by a signal

    for one in taken:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)
    if came:  # a library in the block took the exception for one of its own
        raise SystemExit(128 + came[0])


# -------------------------------------------------------------------------------------------------------------- errors


@contextmanager
def storage_errors(path: Path, folder: Path | None = None) -> Iterator[None]:
    """Turns a full disk, or what keeps `path` or others in `folder`, by default its own, from being written, into one
    sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in _WRITE_ERRORS and not _concerns(error, path, folder or path.parent):
            raise
        raise BundleError(
            f"expected to write {path}, got {error.strerror}: {remedy(error, 'choose another place')}"
        ) from error


@contextmanager
def reading_errors(path: Path, otherwise: str = "copy it again") -> Iterator[None]:
    """Turns what keeps a file of a bundle from being read into one sentence, `otherwise` as its remedy."""
    try:
        yield
    except OSError as error:
        came = error.strerror or str(error)
        raise BundleError(f"expected to read {path}, got {came}: {remedy(error, otherwise)}") from error


def _concerns(error: OSError, path: Path, folder: Path) -> bool:
    if not isinstance(error.filename, str | bytes | os.PathLike):
        return False
    named = Path(os.fsdecode(error.filename))
    return named in (path, *path.parents) or folder in named.parents


def sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
