"""Building native libraries: the cache key, what is missing, and what a failure says. Compilers here are stand-ins."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from algm_deploy import native_libraries as native
from algm_deploy.errors import BuildError

NVCC = '#!/bin/sh\nprintf "compute_80\\ncompute_86\\ncompute_90\\ncompute_90a\\n"\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree in place of runtimes/, and a cache of its own."""
    root = tmp_path / "runtimes"
    (root / "kernels").mkdir(parents=True)
    (root / "CMakeLists.txt").write_text("project(x)")
    (root / "kernels" / "clap.cu").write_text("// clap")
    monkeypatch.setattr(native, "content", lambda _: root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts scripts on an otherwise empty search path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for variable in ("CUDACXX", "CUDA_HOME", "TENSORRT_ROOT", "ONNXRUNTIME_ROOT"):
        monkeypatch.delenv(variable, raising=False)

    def add(name: str, script: str) -> None:
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)

    return add


def working_cmake(tools: Callable[[str, str], None], folder: Path, library: str) -> None:
    """A cmake that notes its calls in `folder` and "builds" one library; and a ninja."""
    written = f'if [ "$1" = --build ]; then touch "$2/libalgm_{library}.so"; fi'
    tools("cmake", f'#!/bin/sh\necho "$@" >> {folder}/calls\n{written}\n')
    tools("ninja", "#!/bin/sh\n")


def test_the_cache_follows_every_source_file(sources: Path) -> None:
    first = native.cache_folder()
    (sources / "kernels" / "clap.cu").write_text("// other")
    second = native.cache_folder()
    (sources / "kernels" / "gbm.cu").write_text("// gbm")
    third = native.cache_folder()
    (sources / "README.md").write_text("words are no source")
    assert len({first, second, third}) == 3
    assert native.cache_folder() == third


def test_a_library_of_other_sources_is_not_found(sources: Path) -> None:
    folder = native.cache_folder()
    folder.mkdir(parents=True)
    (folder / "libalgm_trt_plugin.so").touch()
    assert native.find_library("trt_plugin") == folder / "libalgm_trt_plugin.so"
    (sources / "kernels" / "clap.cu").write_text("// newer")
    assert native.find_library("trt_plugin") is None
    with pytest.raises(BuildError, match="run `algm-deploy build-native trt_plugin` first"):
        native.require_library("trt_plugin")


def test_missing_parts_are_named_with_a_way_to_get_them(
    sources: Path, tools: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(native, "find_nvcc", lambda: None)
    monkeypatch.setattr(native, "find_header", lambda _: None)
    with pytest.raises(BuildError) as error:
        native.build(["trt_plugin", "ort_custom_op"])
    for part in ("nvcc", "cmake", "ninja", "NvInferRuntime.h", "TENSORRT_ROOT", "developer.nvidia.com/tensorrt"):
        assert part in str(error.value)
    assert "onnxruntime_c_api.h" in str(error.value)
    assert str(error.value).count("CUDA's compiler") == 1


def test_by_default_everything_is_built() -> None:
    assert {*native.BUILT, "rtx_alias"} == set(native.LIBRARIES)  # the alias comes with the plugins


def test_unknown_libraries(sources: Path) -> None:
    with pytest.raises(BuildError, match="kernels, trt_plugin, ort_custom_op, rtx_alias, got plugin"):
        native.build(["plugin"])


def test_headers_are_found_by_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "TensorRT" / "include"
    folder.mkdir(parents=True)
    (folder / "NvInferRuntime.h").touch()
    for root in (tmp_path / "TensorRT", folder):
        monkeypatch.setenv("TENSORRT_ROOT", str(root))
        assert native.find_header(native.TENSORRT_HEADER) == folder
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path))
    assert native.find_header(native.TENSORRT_HEADER) is None


def test_architectures_are_those_that_nvcc_knows(tools: Callable[[str, str], None]) -> None:
    tools("nvcc", NVCC)
    nvcc = native.find_nvcc()
    assert nvcc
    assert native.supported_architectures(nvcc) == (80, 86, 90)
    tools("nvcc", '#!/bin/sh\necho "compute_52"\n')
    with pytest.raises(BuildError, match=r"lists \[52\]"):
        native.supported_architectures(nvcc)


def test_a_build_keeps_the_library_and_compiles_what_was_asked(
    sources: Path, tools: Callable[[str, str], None], tmp_path: Path
) -> None:
    tools("nvcc", NVCC)
    working_cmake(tools, tmp_path, "kernels")
    built = native.build(["kernels"], progress=False)
    assert built == {"kernels": native.cache_folder() / "libalgm_kernels.so"}
    configure, compile_ = (tmp_path / "calls").read_text().splitlines()
    assert "-DCMAKE_CUDA_ARCHITECTURES=80-real;86-real;90-real;90-virtual" in configure
    assert compile_.endswith("--target algm_kernels")
    assert not list(native.cache_folder().glob("build-*"))


def test_the_onnxruntime_operators_are_built_without_a_cuda_compiler(
    sources: Path, tools: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working_cmake(tools, tmp_path, "ort_custom_op")
    (tmp_path / "onnxruntime_c_api.h").touch()
    monkeypatch.setenv("ONNXRUNTIME_ROOT", str(tmp_path))
    monkeypatch.setattr(native, "find_nvcc", lambda: None)
    assert native.build(["ort_custom_op"], progress=False)["ort_custom_op"].is_file()
    assert "-DALGM_CUDA=OFF" in (tmp_path / "calls").read_text()
    with pytest.raises(BuildError, match="CUDA's compiler") as error:
        native.build(["trt_plugin"], progress=False)
    assert "lacks nothing" not in str(error.value)
    with pytest.raises(BuildError, match=r"; `algm-deploy build-native ort_custom_op` lacks nothing here$"):
        native.build(progress=False)


def test_a_build_without_architectures_leaves_cuda_out_and_goes_where_it_is_told(
    sources: Path, tools: Callable[[str, str], None], tmp_path: Path
) -> None:
    tools("nvcc", NVCC)
    working_cmake(tools, tmp_path, "kernels")
    built = native.build(["kernels"], [], progress=False, folder=tmp_path / "elsewhere")
    assert built == {"kernels": tmp_path / "elsewhere" / "libalgm_kernels.so"}
    assert built["kernels"].is_file()
    configure = (tmp_path / "calls").read_text().splitlines()[0]
    assert "-DALGM_CUDA=OFF" in configure
    assert "CMAKE_CUDA" not in configure
    assert native.find_library("kernels") is None, "a library for the CPU must not pass for the whole one"


def test_a_failed_build_shows_the_compiler_s_last_words(sources: Path, tools: Callable[[str, str], None]) -> None:
    tools("nvcc", NVCC)
    tools("ninja", "#!/bin/sh\n")
    tools("cmake", '#!/bin/sh\necho "clap.cu(7): error: expected a ;"\nexit 3\n')
    with pytest.raises(BuildError, match=r"failed with code 3[\s\S]*expected a ;"):
        native.build(["kernels"], progress=False)
    assert native.find_library("kernels") is None


def test_a_missing_library_is_said_once_with_the_cure(sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    native._say_missing.cache_clear()
    for _ in range(3):
        assert native.missing_here("kernels", "torch")
    (line,) = (record.message for record in caplog.records)
    assert line.startswith("merging with torch takes several times longer")
    assert line.endswith("run `algm-deploy build-native kernels`")
    assert native.missing_here("ort_custom_op", "onnxruntime-cuda", "then build again")
    assert caplog.records[-1].message.endswith("run `algm-deploy build-native ort_custom_op`, then build again")
    native.cache_folder().mkdir(parents=True)
    (native.cache_folder() / native.LIBRARIES["kernels"].file_name).touch()
    assert not native.missing_here("kernels", "torch")
