"""The plugin library in the real plugin registries of TensorRT 10.16, TensorRT 11.4 and TensorRT-RTX.

Plugins are created, serialised, cloned and asked as a builder would, without one. A harness hands each plugin the
descriptors that TensorRT would and enqueues it: a build over the CPU kernels in host memory, and with the mark `gpu`
the library itself. That is no TensorRT execution.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from algm_deploy import native_libraries as native
from algm_deploy.bundle.graphs import PLUGIN_VERSION
from algm_deploy.runners.tensorrt.library import plugin_sources

# What holds the registry: package, file.
RUNTIMES = {
    "10.16": ("tensorrt_lean_libs", "libnvinfer_lean.so.10"),
    "11.4": ("tensorrt_lean_libs", "libnvinfer_lean.so.11"),
    "rtx": ("tensorrt_rtx_libs", "libtensorrt_rtx.so.1"),
}
HERE = Path(__file__).parent
SOURCES = r"-DALGM_PLUGIN_SOURCES=\"0123456789ab\""


@pytest.fixture(scope="module")
def plugins() -> Path:
    path = native.find_library("trt_plugin")
    if path is None:
        pytest.skip(f"needs the plugin library: {native.REBUILD} trt_plugin")
    return path


def compiled(target: Path, *arguments: Path | str) -> Path:
    """A shared library of C++ sources that include TensorRT's headers."""
    headers, nvcc = native.find_header(native.TENSORRT_HEADER), native.find_nvcc()
    if headers is None or nvcc is None:
        pytest.skip("needs nvcc and TensorRT's headers (TENSORRT_ROOT)")
    command = [nvcc, "-std=c++17", "-shared", "-isystem", headers, *arguments, "-o", target, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("harness") / "harness.so", "-Xcompiler=-fPIC", HERE / "trt_harness.cpp")


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> Path:
    package, file = RUNTIMES[request.param]
    spec = find_spec(package)
    places = [Path(place) / file for place in (spec.submodule_search_locations or [] if spec else [])]
    for place in places:
        if place.is_file():
            return place
    pytest.skip(f"needs {file}: pip install -r requirements-tensorrt-ci.txt")


@pytest.fixture(scope="module")
def host_plugins(root_dir: Path, declared: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugins over the CPU kernels: the same sources, every call of a CUDA kernel renamed to its CPU version."""
    sources = root_dir / "runtimes"
    renamed = [f"-Dalgm_cuda_{name}=algm_cpu_{name}" for name in declared]
    files = [*(sources / "trt_plugin").glob("*.cpp"), *(sources / "kernels" / "cpu").glob("*.cpp")]
    options = ["-O2", "-Xcompiler=-fPIC,-ffp-contract=off", SOURCES, "-I", sources / "kernels"]
    return compiled(tmp_path_factory.mktemp("host_plugins") / "plugins.so", *renamed, *options, *files)


def run(check: str, *arguments: Path | str, **environment: str) -> str:
    """Runs one check in a process of its own; returns what the plugins said."""
    command = [sys.executable, HERE / "plugin_checks.py", check, *arguments]
    helpers = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    variables = os.environ | {"PYTHONPATH": helpers} | environment
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "check", ["created", "wrong_namespace", "serialized", "cloned", "types", "shapes", "sizes", "workspace"]
)
def test_plugins(check: str, harness: Path, runtime: Path, plugins: Path) -> None:
    run(check, harness, runtime, plugins)


@pytest.mark.parametrize(
    ("check", "reasons"),
    [
        (
            "wrong_types",
            ["clap: input tokens has unsupported type int8", "gbm: input map has unsupported type float16"],
        ),
        (
            "no_workspace",
            [
                "clap: input tokens should have known dimensions, TensorRT told -1 for axis 2",
                "gbm: inputs of these dimensions should need scratch memory, the kernels refuse them",
            ],
        ),
        (
            "unknown_rows",
            [
                f"{name}: input {first} should have known dimensions, TensorRT told -1 for axis 1"
                for name, first in (
                    ("clap", "tokens"),
                    ("gbm", "tokens"),
                    ("unmerge", "values"),
                    ("label_map", "scores"),
                    ("deformable_attention", "value"),
                )
            ],
        ),
        ("wrong_shapes", ["input tokens should have rank 3, got 2", "(prefix + grid) should be 25, got 30"]),
        (
            "wrong_attributes",
            [
                "attribute grid is missing",
                "divisor should be positive",
                "window should lie in 1 to",
                "shapes should lie in 1 to 16777216, got 0",
                "shapes should lie in 0 to 16, got 18",
            ],
        ),
    ],
)
def test_refusals_have_a_reason(check: str, reasons: list[str], harness: Path, runtime: Path, plugins: Path) -> None:
    said = run(check, harness, runtime, plugins)
    for reason in reasons:
        assert reason in said


def test_the_library_exports_what_tensorrt_looks_up_and_needs_no_cuda(plugins: Path) -> None:
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", plugins], capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[-1] for line in exported.splitlines()} == {
        "getCreators",
        "setLoggerFinder",
        "algm_plugin_sources",
    }
    needed = subprocess.run(["readelf", "-d", plugins], capture_output=True, text=True, check=True).stdout
    assert "libcuda" not in needed
    assert "nvinfer" not in needed


def test_the_library_tells_the_sources_that_it_was_made_of(plugins: Path, host_plugins: Path) -> None:
    assert plugin_sources(plugins) == f"{PLUGIN_VERSION}-{native.source_hash()}"
    assert plugin_sources(host_plugins) == f"{PLUGIN_VERSION}-0123456789ab"


def test_plugins_over_the_cpu_kernels_equal_the_definition(harness: Path, runtime: Path, host_plugins: Path) -> None:
    checks = "enqueued_clap,enqueued_gbm,enqueued_tail,enqueued_places,bound_rows"
    run(checks, harness, runtime, host_plugins, "host", ALGM_GPU_CASES="40")


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["enqueued_clap", "enqueued_gbm", "enqueued_tail", "enqueued_places", "bound_rows"])
def test_enqueue_equals_the_definition(check: str, harness: Path, runtime: Path, plugins: Path) -> None:
    run(check, harness, runtime, plugins)
