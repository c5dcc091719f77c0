"""Native libraries for the CPU, as the product builds and keeps them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from algm_deploy.native_libraries import LIBRARIES, build, cache_folder, missing_for


@cache
def built_for_cpu(name: str) -> Path:
    """A library without its CUDA part, from the cache of these very sources; skips the test where it lacks a tool.

    It lies beside what `find_library` finds, so that no test changes what the product runs with.
    """
    folder = cache_folder() / "cpu"
    path = folder / LIBRARIES[name].file_name
    if not path.is_file():
        if lacks := missing_for(name, cuda=False):
            pytest.skip(f"needs {'; and '.join(lacks)}")
        together = [other for other in ("kernels", "ort_custom_op") if not missing_for(other, cuda=False)]
        build(together, architectures=(), progress=False, folder=folder)
    return path
