"""The rows, what they say of files and options, and which runtime is taken where none is named."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from algm_deploy.environment import PACKAGES, Device, device_name
from algm_deploy.errors import BuildError, RuntimeUnavailableError
from algm_deploy.native_libraries import LIBRARIES
from algm_deploy.runners import registry
from algm_deploy.runners.registry import RUNTIMES, default_runtime, row_of

EXPORTED = ("weights.safetensors", "model.onnx", "model.inlined.onnx", "model.onnx.data")
ADA, HOPPER = Device("NVIDIA L4", "8.9", 24 << 30), Device("NVIDIA H200", "9.0", 141 << 30)
TRT, RTX = "engines/tensorrt.engine", "engines/tensorrt-rtx.engine"
Here = Callable[..., None]


def test_rows_are_read_without_any_package() -> None:
    """By commands that must come at once, and by `doctor` where packages are missing."""
    code = "import sys, algm_deploy.runners.registry; print(*{'torch', 'numpy', 'onnx', 'msgspec'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_rows_name_what_pyproject_installs(root_dir: Path) -> None:
    project = tomllib.loads((root_dir / "pyproject.toml").read_text())["project"]
    for row in RUNTIMES.values():
        listed = project["optional-dependencies"][row.name] if row.extra else project["dependencies"]
        assert row.required in listed
        assert row.package in PACKAGES, "records tell its version"
    assert {row.name for row in RUNTIMES.values() if row.extra} <= set(project["optional-dependencies"])
    assert row_of("tensorrt").install == "'algm-deploy[tensorrt]'"
    assert row_of("torch").install == "torch"


def test_an_unknown_runtime_is_told_the_known_ones() -> None:
    with pytest.raises(RuntimeUnavailableError, match="unknown runtime 'tensorflow': choose from torch, onnxruntime-c"):
        row_of("tensorflow")


@pytest.mark.parametrize("row", RUNTIMES.values(), ids=RUNTIMES)
def test_rows_fit_the_rest_of_the_package(row: registry.Runtime) -> None:
    assert set(row.libraries) <= set(LIBRARIES)
    assert row.builds == (row.own not in EXPORTED)
    assert row.needs_gpu == (row.devices == ("cuda",))
    assert not row.build_options or row.builds


# --- files -----------------------------------------------------------------------------------------------------------


def test_the_own_file_comes_first() -> None:
    row = row_of("onnxruntime-cpu")
    assert row.executable(EXPORTED) == "model.onnx"
    assert row.executable((*EXPORTED, row.own)) == row.own == "model.onnxruntime-cpu.onnx"
    assert row_of("tensorrt").executable((*EXPORTED, RTX)) is None
    assert row_of("torch").executable(EXPORTED) == "weights.safetensors"
    assert row_of("openvino").executable(EXPORTED) == "model.inlined.onnx", "it knows no functions"


def test_parts_are_executed_beside_the_own_file_only() -> None:
    row = row_of("onnxruntime-cuda")
    parts = [str(row.segments).replace("*", str(index)) for index in range(3)]
    assert row.executed((*EXPORTED, *parts, row.own)) == (row.own, *parts)
    assert row.executed((*EXPORTED, *parts)) == ("model.onnx",)
    assert row_of("onnxruntime-cpu").executed((*EXPORTED, *parts)) == ("model.onnx",)
    assert row_of("tensorrt").executed(EXPORTED) == ()
    assert row.executes_own((*EXPORTED, row.own))
    assert not row.executes_own(EXPORTED)


def test_parts_are_executed_in_place_of_the_own_file() -> None:
    row = row_of("tensorrt-rtx")
    parts = [str(row.segments).replace("*", str(index)) for index in range(3)]
    assert row.executable((*EXPORTED, *parts)) == parts[0]
    assert row.executed((*EXPORTED, *parts)) == tuple(parts)
    assert row.executed((*EXPORTED, *parts, row.own)) == (row.own, *parts)
    assert row.executes_own((*EXPORTED, *parts))
    assert not row.executes_own(EXPORTED)


def test_int8_is_refused_where_its_products_would_be_floating_point() -> None:
    for name, row in RUNTIMES.items():
        if name != "onnxruntime-cuda":
            row.check_precision("int8", True)
    row_of("onnxruntime-cuda").check_precision("fp16", False)
    with pytest.raises(
        RuntimeUnavailableError, match=r"^expected a bundle in floating point for onnxruntime-cuda, .* with torch, onnx"
    ):
        row_of("onnxruntime-cuda").check_precision("int8", True)


def test_fp8_without_ranges_is_refused_where_scales_are_not_found_at_run_time() -> None:
    for name, row in RUNTIMES.items():
        row.check_precision("fp8", True)
        if name not in ("tensorrt", "tensorrt-rtx"):
            row.check_precision("fp8", False)
    with pytest.raises(RuntimeUnavailableError, match=r"measured ranges for tensorrt, .* --precision fp8 --calibrate"):
        row_of("tensorrt").check_precision("fp8", False)


def test_what_bf16_is_computed_in() -> None:
    fp32 = [name for name, row in RUNTIMES.items() if row.precision_of("bf16") == "fp32"]
    assert fp32 == ["onnxruntime-cpu", "onnxruntime-cuda"]


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_of_other_runtimes_are_refused_with_their_names() -> None:
    row_of("tensorrt").check_options(["precision", "timing_cache"])
    with pytest.raises(
        BuildError, match=r"^torch has no build option level: leave it out, or build for tensorrt or tensorrt-rtx$"
    ):
        row_of("torch").check_options(["level"])
    with pytest.raises(BuildError, match=r"tensorrt-rtx has no build option timing_cache: .* build for tensorrt$"):
        row_of("tensorrt-rtx").check_options(["precision", "timing_cache"])
    with pytest.raises(BuildError, match=r"tensorrt has no build option speed: leave it out$"):
        row_of("tensorrt").check_options(["speed"])


# --- what is here ----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    """A machine with these packages and GPUs; native libraries are built but for `missing`."""

    def make(packages: Iterable[str], *gpus: Device, missing: tuple[str, ...] = ()) -> None:
        modules = {row.module for row in RUNTIMES.values() if row.package in packages}
        monkeypatch.setattr(registry, "find_spec", lambda name: name if name in modules else None)
        monkeypatch.setattr(registry, "installed_version", lambda name: "1" if name in packages else None)
        monkeypatch.setattr(registry, "cuda_devices", lambda: gpus)
        monkeypatch.setattr(registry, "find_library", lambda name: None if name in missing else Path(name))

    return make


ALL = ("torch", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx")


def test_the_default_without_a_gpu(here: Here) -> None:
    here(("torch", "onnxruntime"))
    assert default_runtime() == "onnxruntime-cpu"
    here(("torch",))
    assert default_runtime() == "torch"
    here(ALL)
    assert default_runtime((*EXPORTED, TRT, RTX)) == "onnxruntime-cpu"


def test_the_default_with_a_gpu(here: Here) -> None:
    here(ALL, ADA)
    assert default_runtime() == "torch", "no export writes engines"
    assert default_runtime((*EXPORTED, TRT, RTX)) == "tensorrt"
    assert default_runtime((*EXPORTED, RTX)) == "tensorrt-rtx"
    here(("torch", "onnxruntime", "tensorrt-rtx"), ADA)
    assert default_runtime((*EXPORTED, TRT)) == "torch"


def test_the_default_on_a_device(here: Here) -> None:
    here(ALL, ADA)
    for device, name in (("cpu", "onnxruntime-cpu"), ("cuda", "tensorrt"), ("cuda:1", "tensorrt")):
        assert default_runtime((*EXPORTED, TRT), device) == name
    assert default_runtime((RTX,), "cuda") == "tensorrt-rtx"
    with pytest.raises(RuntimeUnavailableError, match=r"no runtime that executes on cpu is installed here"):
        default_runtime((RTX,), "cpu")
    with pytest.raises(RuntimeUnavailableError, match=r"no runtime that executes on tpu:0 is installed here"):
        default_runtime(device="tpu:0")


def test_the_default_is_one_that_can_execute(here: Here) -> None:
    here(ALL, HOPPER)
    assert default_runtime((*EXPORTED, RTX)) == "torch", "TensorRT-RTX refuses this GPU"
    here(ALL, ADA, missing=("rtx_alias",))
    assert default_runtime((*EXPORTED, RTX)) == "torch", "the engine's plugins cannot be loaded"
    here(("onnxruntime-gpu",), ADA)
    assert default_runtime() == "onnxruntime-cpu", "PyTorch, which keeps device memory, sees no GPU as it is missing"
    here(("onnxruntime",))
    assert default_runtime() == "onnxruntime-cpu"
    here(())
    with pytest.raises(RuntimeUnavailableError, match="no runtime is installed here: `algm-deploy doctor`"):
        default_runtime()


def test_one_module_of_two_packages(here: Here) -> None:
    here(("torch", "onnxruntime"), ADA)
    assert not row_of("onnxruntime-cuda").installed()
    assert row_of("onnxruntime-cpu").installed()
    here(("torch", "onnxruntime-gpu"))
    assert row_of("onnxruntime-cpu").installed(), "the package for CUDA has both providers"


def test_this_machine() -> None:
    import torch

    assert default_runtime() in ("torch", "onnxruntime-cpu")
    assert row_of("onnxruntime-cpu").device_here() == device_name(cuda=False)
    gpu = torch.cuda.is_available()
    expected = torch.cuda.get_device_name() if gpu else device_name(cuda=False)
    assert row_of("tensorrt").device_here() == row_of("torch").device_here() == expected
