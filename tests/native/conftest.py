"""The kernel library, and the helper modules beside the tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from native_build import built_for_cpu

from algm_deploy.native_libraries import LIBRARIES, build, cache_folder, find_library, missing_for

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def header(root_dir: Path) -> str:
    """The C interface of the kernels."""
    return (root_dir / "runtimes" / "kernels" / "algm_kernels.h").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def declared(header: str) -> list[str]:
    """The functions that the header declares for the host and for the device."""
    return re.findall(r"^ALGM_BOTH\([^,]+, (\w+),", header, flags=re.MULTILINE)


@pytest.fixture(scope="session")
def cpu_library() -> Path:
    """The shared library with the CPU kernels."""
    return built_for_cpu("kernels")


@pytest.fixture(scope="session")
def cuda_library() -> Path:
    """The shared library with the CUDA kernels: the one that is built, else one for this GPU, or for sm_80."""
    import torch

    if found := find_library("kernels"):
        return found
    if lacks := missing_for("kernels"):
        pytest.skip(f"needs {'; and '.join(lacks)}")
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)
    folder = cache_folder() / f"sm_{major}{minor}"
    path = folder / LIBRARIES["kernels"].file_name
    return (
        path if path.is_file() else build(["kernels"], [10 * major + minor], progress=False, folder=folder)["kernels"]
    )
