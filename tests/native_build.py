"""Native libraries for tests, as the product builds and keeps them."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from algm_deploy.native_libraries import LIBRARIES, build, cache_folder, find_library, missing_for


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder, made where it is missing, in which one process at a time compiles."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def built(name: str, *architectures: int, shared_bytes: int | None = None, ptx_only: bool = False) -> Path:
    """A library for some GPU architectures, or for the CPU: the installed one, else one for the CPU alone.

    With `shared_bytes` its kernels take a multiprocessor to have so much shared memory; with `ptx_only` it holds
    nothing that a GPU runs untranslated.

    The first process that asks for what is absent compiles it, into the cache beside what `find_library` finds, so that
    no test changes what the product runs with. Skips the test where a tool is missing.
    """
    cuda = bool(architectures)
    if not cuda and (found := find_library(name)):
        return found
    if lacks := missing_for(name, cuda):
        pytest.skip(f"needs {'; and '.join(lacks)}")
    small = f"_{shared_bytes}" if shared_bytes else ""
    code = "ptx_" if ptx_only else "sm_"
    folder = cache_folder() / (code + "_".join(map(str, architectures)) + small if cuda else "cpu")
    path = folder / LIBRARIES[name].file_name
    with locked(folder):
        if not path.is_file():
            # Both libraries of the CPU share what takes long to compile.
            others = [] if cuda else [n for n in ("kernels", "ort_custom_op") if not missing_for(n, cuda)]
            with pytest.MonkeyPatch.context() as patch:
                if shared_bytes:
                    patch.setenv("CUDAFLAGS", f"-DALGM_SHARED_BYTES={shared_bytes}")
                build([name, *others], architectures, progress=False, folder=folder, ptx_only=ptx_only)
    return path
