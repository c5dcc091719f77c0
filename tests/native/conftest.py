"""Builds the kernel library once a session and makes the helper modules beside the tests importable."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kernel_library import build_kernels

# A library that was built before, for machines without compilers and for parallel test runs.
PREBUILT = "ALGM_KERNELS_LIBRARY"


@pytest.fixture(scope="session")
def cpu_library(root_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared library with the CPU kernels."""
    if PREBUILT in os.environ:
        return Path(os.environ[PREBUILT])
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"building the CPU kernels needs {tool}, which is not on PATH")
    return build_kernels(root_dir / "runtimes" / "kernels", tmp_path_factory.mktemp("kernels"), "-DALGM_CUDA=OFF")


@pytest.fixture(scope="session")
def cuda_library(root_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared library with the CUDA kernels, for the GPU of this machine."""
    if PREBUILT in os.environ:
        return Path(os.environ[PREBUILT])
    for tool in ("cmake", "g++", "nvcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"building the CUDA kernels needs {tool}, which is not on PATH")
    options = ["-DALGM_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"]
    return build_kernels(root_dir / "runtimes" / "kernels", tmp_path_factory.mktemp("kernels_cuda"), *options)
