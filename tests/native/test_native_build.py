"""Native libraries by real compilers: what drives them, and the wheel where it is installed."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from native_build import built

from algm_deploy import native_libraries as native
from algm_deploy.ops.kernel_library import KernelLibrary


def test_the_installed_wheel_is_whole_and_what_runs() -> None:
    folder = native.wheel_folder()
    if folder is None:
        assert "ALGM_PINNED" not in os.environ, "CI installs the wheel"
        pytest.skip("needs the wheel of native libraries: pip install ./runtimes")
    assert native.wheel_refused() is None
    assert {native.find_library(name) for name in native.LIBRARIES} == set(folder.glob("*.so"))
    assert len(list(folder.glob("*.so"))) == len(native.LIBRARIES)
    # Every test of the CPU kernels and operators takes its library here.
    assert built("kernels").parent == built("ort_custom_op").parent == folder
    assert KernelLibrary(built("kernels"), "cpu").status_text(0) == "The call succeeded."


def test_build_native_drives_the_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := native.missing_for("kernels", cuda=False):
        pytest.skip(f"needs {'; and '.join(missing)}")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(small CXX)\n"
        "set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})\nadd_library(algm_kernels SHARED seven.cpp)\n"
    )
    (tmp_path / "seven.cpp").write_text('extern "C" int seven() { return 7; }\n')
    monkeypatch.setattr(native, "content", lambda _: tmp_path)
    made = native.build(["kernels"], [], progress=False, folder=tmp_path / "libraries")
    assert ctypes.CDLL(str(made["kernels"])).seven() == 7
    assert {path.name for path in (tmp_path / "libraries").iterdir()} == {"libalgm_kernels.so", "build.log"}


def test_the_onnxruntime_operators_compile_for_the_cpu_alone(root_dir: Path) -> None:
    headers, compiler = native.find_header(native.ONNXRUNTIME_HEADER), shutil.which("g++")
    if headers is None or compiler is None:
        pytest.skip("needs g++ and the header onnxruntime_c_api.h")
    sources = root_dir / "runtimes" / "ort_custom_op"
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{root_dir / 'runtimes' / 'kernels'}", "-isystem", headers]
    files = [sources / name for name in ("call.cpp", "library.cpp")]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
