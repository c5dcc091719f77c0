"""Finding and building native libraries: the wheel, the cache, what is missing, and what a failure says.

Compilers and GPUs here are stand-ins.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from algm_deploy import __version__
from algm_deploy import native_libraries as native
from algm_deploy.errors import BuildError

NVCC = '#!/bin/sh\nprintf "compute_80\\ncompute_86\\ncompute_90\\ncompute_90a\\n"\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree in place of runtimes/, a cache of its own, and no wheel."""
    root = tmp_path / "runtimes"
    (root / "kernels").mkdir(parents=True)
    (root / "CMakeLists.txt").write_text("project(x)")
    (root / "kernels" / "clap.cu").write_text("// clap")
    monkeypatch.setattr(native, "content", lambda _: root)
    monkeypatch.setattr(native, "WHEEL_PACKAGE", "algm_deploy_native_of_tests")
    for remembering in (native._compiled_once, native.say_once, native.machine_architectures):
        remembering.cache_clear()
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
    with pytest.raises(BuildError, match="the library trt_plugin is not built"):
        native.require_library("trt_plugin")


# --- the wheel -------------------------------------------------------------------------------------------------------


@pytest.fixture
def wheel(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of an installed wheel that was made from the sources, with the kernels."""
    folder = tmp_path / "site" / native.WHEEL_PACKAGE
    folder.mkdir(parents=True)
    for name in ("__init__.py", "libalgm_kernels.so"):
        (folder / name).touch()
    (folder / native.MADE_FROM).write_text(f"{native.made_from()}\n")
    monkeypatch.syspath_prepend(folder.parent)
    return folder


def in_the_cache(name: str) -> Path:
    path = native.cache_folder() / native.LIBRARIES[name].file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_the_wheel_is_found_before_the_cache(wheel: Path) -> None:
    in_the_cache("kernels")
    assert native.find_library("kernels") == wheel / "libalgm_kernels.so"
    assert native.find_library("ort_custom_op") is None
    built = in_the_cache("ort_custom_op")
    assert native.find_library("ort_custom_op") == built, "what the wheel lacks may still come from the cache"


@pytest.mark.parametrize("told", ["0.0.9-{hash}", f"{__version__}-0123456789ab", None])
def test_a_wheel_of_another_version_or_other_sources_is_refused(wheel: Path, told: str | None) -> None:
    if told is None:
        (wheel / native.MADE_FROM).unlink()
    else:
        (wheel / native.MADE_FROM).write_text(told.format(hash=native.source_hash()))
    assert native.find_library("kernels") is None
    with pytest.raises(BuildError) as error:
        native.require_library("kernels")
    said = str(error.value)
    assert f"to be made from {native.made_from()}, it is made from {told or 'nothing'}".split("{")[0] in said
    assert said.endswith(": pip install 'algm-deploy[native]'")
    built = in_the_cache("kernels")
    assert native.find_library("kernels") == built


def test_cmake_gives_the_wheel_the_hash_that_the_package_computes(root_dir: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake (pip install cmake)")
    tree = shutil.copytree(root_dir / "runtimes", tmp_path / "runtimes")
    (tree / "kernels-of-mine.cpp").write_text("// sorts before kernels/")
    script = tmp_path / "hash.cmake"
    script.write_text(f"include({tree}/sources.cmake)\nalgm_source_hash(sources)\nmessage(${{sources}})\n")
    told = subprocess.run(["cmake", "-P", script], capture_output=True, text=True, check=True).stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "content", lambda _: tree)
        assert told.strip() == native.source_hash()
    assert told.strip() != native.source_hash()


def test_the_wheel_s_project_says_what_the_package_says(root_dir: Path) -> None:
    project = tomllib.loads((root_dir / "runtimes" / "pyproject.toml").read_text())
    defines = project["tool"]["scikit-build"]["cmake"]["define"]
    real = [f"{number}-real" for number in native.ARCHITECTURES]
    assert defines["CMAKE_CUDA_ARCHITECTURES"].split(";") == [*real, f"{native.ARCHITECTURES[-1]}-virtual"]
    targets = {library.target for library in native.LIBRARIES.values()}
    assert set(project["tool"]["scikit-build"]["build"]["targets"]) == targets
    extras = tomllib.loads((root_dir / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["native"] == [f"{project['project']['name']}=={__version__}"]
    assert project["project"]["name"].replace("-", "_") == native.WHEEL_PACKAGE


# --- the first use on a GPU ------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_box(
    sources: Path, tools: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """A machine with an L4 and compilers, and what puts another GPU into it."""
    monkeypatch.delenv(native.COMPILE, raising=False)
    tools("nvcc", NVCC)
    working_cmake(tools, tmp_path, "kernels")

    def insert(*capabilities: str) -> None:
        tools("nvidia-smi", "#!/bin/sh\n" + "".join(f"echo {capability}\n" for capability in capabilities))
        native.machine_architectures.cache_clear()

    insert("8.9", "8.9")
    return insert


def test_the_first_use_compiles_once_for_the_gpus_of_this_machine(
    gpu_box: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert native.find_library("kernels") is None, "looking compiles nothing"
    path = native.usable_library("kernels")
    native._compiled_once.cache_clear()  # as in the next process
    found = [find("kernels") for find in (native.find_library, native.usable_library, native.require_library)]
    assert found == [path] * 3
    configure, _ = (tmp_path / "calls").read_text().splitlines()
    assert "-DCMAKE_CUDA_ARCHITECTURES=89-real;89-virtual" in configure
    (line,) = caplog.messages
    assert line.startswith("compiling native libraries for compute capability 8.9, once, which takes half a minute")
    gpu_box("7.5", "12.0")
    assert native.find_library("kernels") is None, "a home may be shared by machines with other GPUs"
    assert native.usable_library("kernels") != path
    assert "75-real;120-real;120-virtual" in (tmp_path / "calls").read_text().splitlines()[2]


def test_nothing_is_compiled_where_that_is_turned_off_or_there_is_no_gpu(
    gpu_box: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(native.COMPILE, "0")
        assert native.usable_library("kernels") is None
    gpu_box()
    assert native.usable_library("kernels") is None
    assert not (tmp_path / "calls").exists()
    gpu_box("8.9")
    assert native.usable_library("kernels")


def test_a_failure_is_said_once_and_stops_nothing(
    gpu_box: Callable[..., None], tools: Callable[[str, str], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools("cmake", f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho "clap.cu(7): error: expected a ;"\nexit 3\n')
    assert native.usable_library("kernels") is None
    assert native.usable_library("kernels") is None
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    _, said = caplog.messages
    assert said.startswith("expected to compile the library kernels, it failed: `cmake")
    assert "expected a ;" in said


def test_a_runtime_that_does_without_says_so_once(
    gpu_box: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(native.COMPILE, "0")
    for _ in range(2):
        assert native.missing_here("kernels", "torch", "then go on")
    (line,) = caplog.messages
    assert re.fullmatch("torch: the library kernels is not built: .*; faster with: .* kernels, then go on", line)
    monkeypatch.delenv(native.COMPILE)
    assert native.missing_here("kernels", "torch", gpu=False), "nothing is compiled for a CPU"
    assert not native.missing_here("kernels", "torch")


@pytest.mark.parametrize("gpu", [True, False])
def test_what_is_slower_says_so_with_the_cure(
    sources: Path, tools: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr(native, "missing_for", lambda _: ["the header onnxruntime_c_api.h (unpack (x); then set Y)"])
    line = native.slower_without("ort_custom_op", gpu)
    assert re.fullmatch(
        r"the library ort_custom_op is not built, which needs the header onnxruntime_c_api.h: .* Runtime's own "
        r"operators, slower; faster with: pip install 'algm-deploy\[native\]', or unpack \(x\); then set Y",
        line,
    )
    assert ("merging" in line) == gpu
    monkeypatch.setattr(native, "missing_for", lambda _: [])
    assert native.slower_without("ort_custom_op", gpu).endswith(": algm-deploy build-native ort_custom_op")


# --- building --------------------------------------------------------------------------------------------------------


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


def test_ptx_alone_is_compiled_for_every_architecture_asked(
    sources: Path, tools: Callable[[str, str], None], tmp_path: Path
) -> None:
    tools("nvcc", NVCC)
    working_cmake(tools, tmp_path, "kernels")
    native.build(["kernels"], [80, 75], progress=False, ptx_only=True)
    assert "-DCMAKE_CUDA_ARCHITECTURES=75-virtual;80-virtual" in (tmp_path / "calls").read_text().split()


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
