"""The kernel library, and the helper modules beside the tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from native_build import built

from algm_deploy.native_libraries import find_library

sys.path.insert(0, str(Path(__file__).parent))

from kernel_arrays import Kernels
from kernel_code import EARLIER_CARDS, library_for
from kernel_memory import MEMORIES, DeviceMemory


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
    return built("kernels")


@pytest.fixture(scope="session")
def cuda_library() -> Path:
    """The shared library with the CUDA kernels: the one that is built, else one for this GPU, or for sm_80."""
    import torch

    if found := find_library("kernels"):
        return found
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)
    return built("kernels", 10 * major + minor)


@pytest.fixture(
    scope="session", params=["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", *EARLIER_CARDS))]
)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels of a device, and on a GPU those with the code of earlier cards too."""
    if request.param in EARLIER_CARDS:
        return Kernels(library_for(request.param), DeviceMemory())
    return Kernels(request.getfixturevalue(f"{request.param}_library"), MEMORIES[request.param]())
