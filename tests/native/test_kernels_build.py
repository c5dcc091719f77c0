"""What the build of the kernels promises: every function of the header, and a plain word where CUDA is missing."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
from kernel_arrays import INVALID_ARGUMENT, UNSUPPORTED
from kernel_code import code_in

from algm_deploy.native_libraries import find_nvcc
from algm_deploy.ops.kernel_library import KernelLibrary, Switch


def configure(root_dir: Path, build: Path, *options: str, compiler: str = "/nowhere/nvcc") -> tuple[int, str]:
    """Runs CMake, by default with a CUDA compiler that does not exist; returns its code and what it said."""
    command = ["env", f"CUDACXX={compiler}", "cmake", "-S", str(root_dir / "runtimes" / "kernels"), "-B", str(build)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_every_declared_function_is_there(declared: list[str], cpu_library: Path) -> None:
    assert {"clap_decide", "deformable_attention", "gbm_apply", "label_map", "status_text"} <= set(declared)
    library = ctypes.CDLL(str(cpu_library))
    assert not [name for name in declared if not hasattr(library, f"algm_cpu_{name}")]


def test_cuda_on_without_a_compiler_is_an_error_that_says_what_to_do(
    root_dir: Path, cpu_library: Path, tmp_path: Path
) -> None:
    code, said = configure(root_dir, tmp_path, "-DALGM_CUDA=ON")
    assert code != 0
    assert "put nvcc on PATH or set CUDACXX" in said


def test_cuda_auto_without_a_compiler_says_that_it_is_left_out(
    root_dir: Path, cpu_library: Path, tmp_path: Path
) -> None:
    code, said = configure(root_dir, tmp_path)
    assert code == 0, said
    assert "building the CPU kernels only" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ([], {"sm_80", "compute_80"}),
        (["-DCMAKE_CUDA_ARCHITECTURES=80-real;90"], {"sm_80", "sm_90a", "compute_90"}),
    ],
    ids=["default", "hopper"],
)
def test_hopper_gets_code_for_sm_90a_and_later_gpus_plain_ptx(
    root_dir: Path, tmp_path: Path, options: list[str], codes: set[str]
) -> None:
    compiler = find_nvcc()
    if compiler is None:
        pytest.skip("configuring the CUDA kernels needs nvcc: put it on PATH or set CUDACXX")
    options = ["-DALGM_CUDA=ON", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *options]
    status, said = configure(root_dir, tmp_path, *options, compiler=str(compiler))
    assert status == 0, said
    commands = (tmp_path / "compile_commands.json").read_text(encoding="utf-8")
    assert {code for group in re.findall(r"code=\[([\w,]+)\]", commands) for code in group.split(",")} == codes


@pytest.mark.slow
def test_what_cannot_be_joined_is_refused(cuda_library: Path) -> None:
    """Before any call of CUDA: nothing first, nothing behind it, no choice, and more choices than there is room for."""
    library, some = KernelLibrary(cuda_library, "cuda"), {32 * i: i for i in range(1, 258)}

    def status(first: int, *switches: Switch) -> int:
        return library.join(first, switches)[0]

    assert status(0, Switch.of(1, {32: 1})) == INVALID_ARGUMENT
    assert status(1) == INVALID_ARGUMENT
    assert status(1, Switch.of(0, {32: 1})) == INVALID_ARGUMENT
    assert status(1, Switch.of(1, {})) == INVALID_ARGUMENT
    assert status(1, Switch.of(1, some)) == UNSUPPORTED
    assert library.launch_joined(0, 0) == INVALID_ARGUMENT


def test_choices_come_by_their_rows() -> None:
    switch = Switch.of(1, {64: 7, 32: 5, 65: 6})
    assert (switch.rows[:3], switch.graphs[:3]) == ([32, 64, 65], [5, 7, 6])


def test_cuda_kernels_compile_without_a_gpu(declared: list[str], cuda_library: Path) -> None:
    loaded = ctypes.CDLL(str(cuda_library))
    assert not [name for name in declared if not hasattr(loaded, f"algm_cuda_{name}")]
    assert KernelLibrary(cuda_library, "cuda").status_text(0) == "The call succeeded."


def test_a_library_holds_code_for_a_gpu_and_ptx(cuda_library: Path) -> None:
    assert {Path(code).suffix for code in code_in(cuda_library)} == {".cubin", ".ptx"}
