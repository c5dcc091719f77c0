"""Writing to a disk: files appear whole or not at all, one process at a time, and errors are one sentence."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from algm_deploy.errors import AlgmDeployError, BundleError

# What every export writes: the network itself, the portable graph, and the graph's own weights.
WEIGHTS, ONNX, ONNX_DATA = "weights.safetensors", "model.onnx", "model.onnx.data"
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)


@contextmanager
def write_atomically(path: Path, before_rename: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """Yields a path beside `path`; after the block it takes the place of `path`, after an exception it is gone."""
    temporary = beside(path, path.suffix)
    try:
        with storage_errors(path):
            yield temporary
            sync(temporary)
            if before_rename:
                before_rename(temporary)
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


@contextmanager
def locked(bundle: Path) -> Iterator[None]:
    """Holds the lock of a bundle, an empty hidden file beside it; other processes wait for it to rename or update."""
    bundle = bundle.resolve()  # whatever name a process knows it by
    with storage_errors(bundle), bundle.with_name(f".{bundle.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns a full disk, or a folder around `path` without write permission, into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in _WRITE_ERRORS and not str(error.filename).startswith(str(path.parent)):
            raise
        raise BundleError(
            f"expected to write {path}, got {error.strerror}: free space or choose another place"
        ) from error


def sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
