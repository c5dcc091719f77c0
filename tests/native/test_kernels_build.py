"""What the build of the kernels promises: every function of the header, and a plain word where CUDA is missing."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kernel_library import HostMemory, Kernels, build_kernels


def declared(root_dir: Path) -> list[str]:
    """The names that the header declares for the host and for the device."""
    header = (root_dir / "runtimes" / "kernels" / "algm_kernels.h").read_text(encoding="utf-8")
    return re.findall(r"^ALGM_BOTH\([^,]+, (\w+),", header, flags=re.MULTILINE)


def configure(root_dir: Path, build: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs CMake with a CUDA compiler that does not exist."""
    command = ["cmake", "-S", str(root_dir / "runtimes" / "kernels"), "-B", str(build), *options]
    environment = ["env", "CUDACXX=/nowhere/nvcc"]
    return subprocess.run([*environment, *command], capture_output=True, text=True, check=False)


def test_every_declared_function_is_there(root_dir: Path, cpu_library: Path) -> None:
    names = declared(root_dir)
    assert {"clap_decide", "gbm_apply", "label_map", "status_text"} <= set(names)
    library = ctypes.CDLL(str(cpu_library))
    assert not [name for name in names if not hasattr(library, f"algm_cpu_{name}")]


def test_cuda_on_without_a_compiler_is_an_error_that_says_what_to_do(
    root_dir: Path, cpu_library: Path, tmp_path: Path
) -> None:
    done = configure(root_dir, tmp_path, "-DALGM_CUDA=ON")
    assert done.returncode != 0
    assert "put nvcc on PATH or set CUDACXX" in " ".join(done.stderr.split())


def test_cuda_auto_without_a_compiler_says_that_it_is_left_out(
    root_dir: Path, cpu_library: Path, tmp_path: Path
) -> None:
    done = configure(root_dir, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "building the CPU kernels only" in done.stdout


@pytest.mark.slow
def test_hopper_gets_code_for_sm_90a_and_later_gpus_plain_ptx(root_dir: Path, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("configuring the CUDA kernels needs nvcc, which is not on PATH")
    options = ["-DALGM_CUDA=ON", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DCMAKE_CUDA_ARCHITECTURES=80-real;90"]
    command = ["cmake", "-S", str(root_dir / "runtimes" / "kernels"), "-B", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    commands = (tmp_path / "compile_commands.json").read_text(encoding="utf-8")
    assert set(re.findall(r"code=\[(\w+)\]", commands)) == {"sm_80", "sm_90a", "compute_90"}


@pytest.mark.slow
def test_cuda_kernels_compile_without_a_gpu(root_dir: Path, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("compiling the CUDA kernels needs nvcc, which is not on PATH")
    library = build_kernels(root_dir / "runtimes" / "kernels", tmp_path, "-DALGM_CUDA=ON")
    loaded = ctypes.CDLL(str(library))
    assert not [name for name in declared(root_dir) if not hasattr(loaded, f"algm_cuda_{name}")]
    assert Kernels(library, HostMemory()).status_text(0) == "The call succeeded."
    if shutil.which("cuobjdump"):
        parts = subprocess.run(["cuobjdump", "-lelf", "-lptx", library], capture_output=True, text=True, check=True)
        assert "sm_80.cubin" in parts.stdout
        assert ".ptx" in parts.stdout
