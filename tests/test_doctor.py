"""The doctor: facts of made-up machines against what it says, and the probes on packages that misbehave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

import algm_deploy
from algm_deploy import doctor
from algm_deploy.doctor import Finding, Library, Machine, Module, Step, diagnose
from algm_deploy.environment import Device

ADA = Device("NVIDIA L4", "8.9", 24 << 30)
HOPPER = Device("NVIDIA H100", "9.0", 80 << 30)

TORCH = Module(
    {"torch": "2.13.0"},
    {"version": "2.13.0+cu130", "cuda": "13.0", "devices": ["NVIDIA L4"], "architectures": ["sm_75", "sm_90a"]},
)
TORCH_CPU = Module({"torch": "2.13.0"}, {"version": "2.13.0+cpu", "cuda": None, "devices": [], "architectures": []})
ORT_GPU = Module(
    {"onnxruntime-gpu": "1.31.1"},
    {
        "version": "1.31.1",
        "package": "onnxruntime-gpu",
        "cuda": "13.0",
        "providers": ["CUDAExecutionProvider", "CPUExecutionProvider"],
        "cuda_session": True,
    },
)
ORT_CPU = Module(
    {"onnxruntime": "1.32.0"},
    {
        "version": "1.32.0",
        "package": "onnxruntime",
        "cuda": None,
        "providers": ["CPUExecutionProvider"],
        "cuda_session": False,
    },
)
BOTH = replace(ORT_CPU, packages={"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"})
TENSORRT = Module({"tensorrt_cu13": "11.1.0"}, {"version": "11.1.0"})
RTX = Module({"tensorrt_rtx_cu13": "1.7.1"}, {"version": "1.7.1"})
NO_HEADER = Library(None, ("the header NvInferRuntime.h (unpack the archive (TensorRT); then set TENSORRT_ROOT)",))

GPU_BOX = Machine(
    python="3.11.7",
    platform="Linux",
    cpu="some CPU",
    cpu_count=8,
    driver="580.65.06",
    gpus=(ADA,),
    nvidia_card=True,
    visible_devices=None,
    modules={"torch": TORCH, "onnxruntime": ORT_GPU, "tensorrt": TENSORRT, "tensorrt_rtx": RTX},
    libraries={name: Library(f"/cache/{name}.so") for name in ("kernels", "trt_plugin", "ort_custom_op", "rtx_alias")},
)
CPU_BOX = replace(
    GPU_BOX,
    driver=None,
    gpus=(),
    nvidia_card=False,
    modules={"torch": TORCH_CPU, "onnxruntime": ORT_CPU, "tensorrt": Module(), "tensorrt_rtx": RTX},
)
ALL = ("torch", "onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx")


def with_module(name: str, module: Module, machine: Machine = GPU_BOX) -> Machine:
    return replace(machine, modules={**machine.modules, name: module})


def with_library(name: str, library: Library, machine: Machine = GPU_BOX) -> Machine:
    return replace(machine, libraries={**machine.libraries, name: library})


def told(module: Module, **facts: Any) -> Module:
    return replace(module, facts={**module.facts, **facts})


def can(machine: Machine, step: Step) -> set[str]:
    return {one.topic for one in diagnose(machine) if one.step == step and one.ok}


def finding(machine: Machine, topic: str, step: Step | None) -> Finding:
    return next(one for one in diagnose(machine) if (one.topic, one.step, one.ok) == (topic, step, False))


def test_a_complete_machine_has_nothing_to_change() -> None:
    findings = diagnose(GPU_BOX)
    assert all(one.ok and not one.cure for one in findings)
    assert can(GPU_BOX, "build") == can(GPU_BOX, "execute") == set(ALL)
    assert "To change" not in doctor.text(findings)


def test_a_machine_without_gpu_builds_more_than_it_executes() -> None:
    assert can(CPU_BOX, "build") == {"torch", "onnxruntime-cpu", "onnxruntime-cuda", "tensorrt-rtx"}
    assert can(CPU_BOX, "execute") == {"torch", "onnxruntime-cpu"}


GPU_RUNTIMES = {"onnxruntime-cuda", "tensorrt", "tensorrt-rtx"}
CASES: dict[str, tuple[Machine, set[str], str, str]] = {
    # name: machine, runtimes that cannot execute, what is found, what to do
    "no torch": (with_module("torch", Module()), set(ALL), "torch is not installed", "pip install torch"),
    "old torch": (with_module("torch", told(TORCH, version="2.9.1")), set(ALL), "older than 2.11", "'torch>=2.11'"),
    "torch crashes": (
        with_module("torch", Module({"torch": "2.13.0"}, error="the process ended with SIGSEGV")),
        set(ALL),
        "SIGSEGV",
        "pip install --force-reinstall torch",
    ),
    "torch without CUDA": (with_module("torch", TORCH_CPU), GPU_RUNTIMES, "CPU build", "https://pytorch.org"),
    "GPU too old for torch": (
        replace(with_module("tensorrt_rtx", Module()), gpus=(Device("NVIDIA V100", "7.0", 16 << 30),)),
        GPU_RUNTIMES - {"tensorrt-rtx"},
        "no kernels for NVIDIA V100",
        "older CUDA release",
    ),
    "no onnxruntime": (
        with_module("onnxruntime", Module()),
        {"onnxruntime-cpu", "onnxruntime-cuda"},
        "onnxruntime is not installed",
        "pip install 'algm-deploy[onnxruntime-c",
    ),
    "half an onnxruntime": (
        with_module("onnxruntime", Module({"onnxruntime-gpu": "1.31.1"}, error="No module named 'onnxruntime.capi'")),
        {"onnxruntime-cpu", "onnxruntime-cuda"},
        "No module named",
        "pip install --force-reinstall onnxruntime-gpu",
    ),
    "no CUDA provider": (
        with_module("onnxruntime", ORT_CPU),
        {"onnxruntime-cuda"},
        "onnxruntime 1.32.0 has no CUDA provider",
        "pip uninstall -y onnxruntime && pip install 'algm-deploy[onnxruntime-cuda]'",
    ),
    "CUDA libraries missing": (
        with_module("onnxruntime", told(ORT_GPU, cuda_session=False)),
        {"onnxruntime-cuda"},
        "cannot load the CUDA 13",
        "onnxruntime-gpu[cuda,cudnn]",
    ),
    "old driver": (
        replace(GPU_BOX, driver="550.54.15"),
        GPU_RUNTIMES,
        "built for CUDA 13, which driver 550.54.15 cannot run",
        "driver to 580 or newer",
    ),
    "card without driver": (
        replace(GPU_BOX, driver=None, gpus=()),
        GPU_RUNTIMES,
        "its driver is not loaded",
        "install NVIDIA's driver",
    ),
    "container without GPU": (replace(GPU_BOX, gpus=()), GPU_RUNTIMES, "shows no GPU", "--gpus all"),
    "GPU hidden": (
        replace(with_module("torch", told(TORCH, devices=[])), visible_devices=""),
        GPU_RUNTIMES,
        "CUDA_VISIBLE_DEVICES='' hides",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "GPU lost": (with_module("torch", told(TORCH, devices=[])), GPU_RUNTIMES, "torch finds no GPU", "restart"),
    "no tensorrt": (
        with_module("tensorrt", Module()),
        {"tensorrt"},
        "tensorrt is not installed",
        "pip install 'algm-deploy[tensorrt]'",
    ),
    "tensorrt 10.3": (
        with_module("tensorrt", told(TENSORRT, version="10.3.0")),
        {"tensorrt"},
        "10.3.0 computes plain ViTs wrongly (https://github.com/NVIDIA/TensorRT/issues/4723)",
        "pip install -U 'tensorrt>=10.14'",
    ),
    "tensorrt 10.4": (
        with_module("tensorrt", told(TENSORRT, version="10.4.0.26")), {"tensorrt"}, "issues/4742", "tensorrt>=10.14"
    ),
    "tensorrt 10.13": (
        with_module("tensorrt", told(TENSORRT, version="10.13.3")), {"tensorrt"}, "older than 10.14", "tensorrt>=10.14"
    ),
    "RTX on Hopper": (
        replace(GPU_BOX, gpus=(HOPPER,)), {"tensorrt-rtx"}, "refuses NVIDIA H100", "pip install 'algm-deploy[tensorrt]'"
    ),
    "no RTX": (
        with_module("tensorrt_rtx", Module()),
        {"tensorrt-rtx"},
        "tensorrt_rtx is not installed",
        "pip install 'algm-deploy[tensorrt-rtx]'",
    ),
    "plugins not built": (
        with_library("trt_plugin", Library(None)),
        {"tensorrt", "tensorrt-rtx"},
        "trt_plugin is not built",
        "algm-deploy build-native trt_plugin",
    ),
    "plugins cannot be built": (
        with_library("trt_plugin", NO_HEADER),
        {"tensorrt", "tensorrt-rtx"},
        "which needs the header NvInferRuntime.h",
        "unpack the archive (TensorRT); then set TENSORRT_ROOT",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_thing_missing(name: str) -> None:
    machine, stopped, found, cure = CASES[name]
    assert set(ALL) - can(machine, "execute") >= stopped
    for runtime in stopped:
        problem = finding(machine, runtime, "execute")
        assert found in problem.found
        assert cure in problem.cure
        assert "(" not in problem.cure or problem.cure.count("(") == problem.cure.count(")")
        assert f"{problem.found}\n    {problem.cure}" in doctor.text(diagnose(machine)).replace("\n      ", "\n    ")


@pytest.mark.parametrize("name", [name for name in CASES if not {"torch", "old driver"} & set(name.split())])
def test_what_is_missing_stops_nothing_else(name: str) -> None:
    machine, stopped, _, _ = CASES[name]
    spare = {"tensorrt-rtx"} if name == "GPU too old for torch" else set()
    assert set(ALL) - can(machine, "execute") == stopped | spare


def test_cuda_12_builds_run_on_older_drivers() -> None:
    torch = told(TORCH, version="2.11.0+cu128", cuda="12.8")
    tensorrt = Module({"tensorrt-cu12": "10.16.1"}, {"version": "10.16.1"})
    machine = with_module("tensorrt", tensorrt, with_module("torch", torch, replace(GPU_BOX, driver="550.54.15")))
    assert can(machine, "execute") == {"torch", "onnxruntime-cpu", "tensorrt"}
    assert tensorrt.cuda == "12"
    assert Module({"tensorrt_cu13_bindings": "11"}).cuda == "13"
    assert Module({"tensorrt": "11"}).cuda is None


@pytest.mark.parametrize(
    ("machine", "in_place", "extra"), [(GPU_BOX, "onnxruntime", "cuda"), (CPU_BOX, "onnxruntime-gpu", "cpu")]
)
def test_two_onnxruntimes(machine: Machine, in_place: str, extra: str) -> None:
    problem = finding(with_module("onnxruntime", told(BOTH, package=in_place), machine), "onnxruntime", None)
    assert problem.found.endswith(f"overwrite each other: {in_place} is in place")
    assert problem.cure == (
        f"pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'algm-deploy[onnxruntime-{extra}]'"
    )


def test_a_missing_operator_library_is_a_hint_only() -> None:
    machine = with_library("ort_custom_op", Library(None), CPU_BOX)
    assert finding(machine, "onnxruntime", None).found.endswith(": label maps run in standard operators, slower")
    on_gpu = finding(with_library("ort_custom_op", Library(None)), "onnxruntime", None)
    assert on_gpu.found.endswith(": merging and label maps run in standard operators, slower")
    assert finding(machine, "onnxruntime", None).cure == "algm-deploy build-native ort_custom_op"
    assert "onnxruntime-cpu" in can(machine, "execute")


def test_missing_kernels_are_a_hint_where_pytorch_has_a_gpu() -> None:
    missing = with_library("kernels", Library(None))
    assert "merging runs in PyTorch's operators, slower" in finding(missing, "torch", None).found
    assert finding(missing, "torch", None).cure == "algm-deploy build-native kernels"
    assert can(missing, "execute") == set(ALL)
    for machine in (CPU_BOX, with_module("torch", TORCH_CPU)):
        told_of = {one.cure for one in diagnose(with_library("kernels", Library(None), machine))}
        assert "algm-deploy build-native kernels" not in told_of


def test_an_idle_gpu_is_told() -> None:
    machine = with_module("torch", TORCH_CPU)
    assert "leaves the GPU idle" in finding(machine, "torch", None).found
    assert "torch" in can(machine, "execute")


def test_unmet_requirements_are_told() -> None:
    problem = finding(replace(CPU_BOX, requirements=("tqdm>=4.66",)), "requirements", None)
    assert problem.cure == "pip install -U 'tqdm>=4.66'"


def test_the_same_cure_stands_once() -> None:
    shown = doctor.text(diagnose(CPU_BOX))
    assert shown.count("use a machine with an NVIDIA GPU") == 1
    assert "onnxruntime-cuda, tensorrt, tensorrt-rtx: no NVIDIA GPU and no driver" in shown
    assert [line.split()[1:3] for line in shown.splitlines() if line.startswith("tensorrt-rtx")] == [["yes", "no"]]


def test_json_holds_every_finding() -> None:
    findings = diagnose(CPU_BOX)
    assert [Finding(**entry) for entry in json.loads(doctor.json_text(findings))] == findings


def test_every_runtime_is_judged() -> None:
    from algm_deploy.runners.contract import RUNTIMES

    assert set(RUNTIMES) <= set(doctor.CHECKS)


def test_limits_are_those_the_runners_enforce() -> None:
    from algm_deploy.runners.tensorrt import build as tensorrt_build
    from algm_deploy.runners.tensorrt import library as tensorrt_library

    assert doctor.TENSORRT_OLDEST == tensorrt_library._OLDEST
    assert set(tensorrt_build.RTX_TARGETS) <= set(doctor.RTX_CAPABILITIES)


# -------------------------------------------------------------------------------------------------------------- probes


def fake_package(folder: Path, name: str, source: str) -> None:
    """An installed package as pip leaves it: a module and its metadata."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    info = folder / f"{name}_cu13-10.3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}_cu13\nVersion: 10.3.0\n")
    (info / "top_level.txt").write_text(f"{name}\n")


@pytest.mark.parametrize(
    ("source", "facts", "error"),
    [
        ("__version__ = '10.3.0'", {"version": "10.3.0"}, None),
        ("import os; os.abort()", {}, "the process ended with SIGABRT"),
        ("raise ImportError('libnvinfer.so.10: no such file')", {}, "ImportError: libnvinfer.so.10: no such file"),
        ("print('hello'); __version__ = '1'", {"version": "1"}, None),
    ],
)
def test_a_runtime_is_imported_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, facts: dict[str, str], error: str | None
) -> None:
    fake_package(tmp_path, "tensorrt", source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor.examined_module("tensorrt") == Module({"tensorrt_cu13": "10.3.0"}, facts, error)
    assert "tensorrt" not in sys.modules


def test_a_module_without_metadata_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt.py").write_text("__version__ = '11.0.0'")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor.examined_module("tensorrt").facts == {"version": "11.0.0"}


def test_an_import_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, "tensorrt", "import time; time.sleep(60)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "_PROBE_SECONDS", 0.5)
    assert doctor.examined_module("tensorrt").error == "no answer within 0.5 s"


def test_the_onnxruntime_here_tells_its_package_and_providers() -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs ONNX Runtime: algm-deploy[onnxruntime-cpu]")
    module = doctor.examined_module("onnxruntime")
    assert module.facts["version"] == onnxruntime.__version__
    assert module.facts["package"] in module.packages
    assert module.facts["providers"] == onnxruntime.get_available_providers()


def smi(folder: Path, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{lines}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_gpus_as_nvidia_smi_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = "NVIDIA GeForce RTX 4090, 8.9, 24564, 580.65.06"
    smi(tmp_path, f"echo '{row}'\necho '{row}'", monkeypatch)
    gpus, driver = doctor.visible_gpus()
    assert gpus == (Device("NVIDIA GeForce RTX 4090", "8.9", 24564 << 20),) * 2
    assert driver == "580.65.06"


@pytest.mark.parametrize("lines", ["echo 'No devices were found'", "echo 'failed to initialize NVML' >&2; exit 9"])
def test_no_gpus_in_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    smi(tmp_path, lines, monkeypatch)
    assert doctor.visible_gpus() == ((), None)


def test_a_machine_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.visible_gpus() == ((), None)


@pytest.mark.parametrize(
    ("vendor", "kind", "card"),
    [("0x10de", "0x030000", True), ("0x10de", "0x040300", False), ("0x1002", "0x030000", False)],
)
def test_cards_on_the_bus(tmp_path: Path, vendor: str, kind: str, card: bool) -> None:
    device = tmp_path / "0000:01:00.0"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    assert doctor.has_nvidia_card(tmp_path) == card
    assert not doctor.has_nvidia_card(tmp_path / "none")


def test_requirements_are_compared_as_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"numpy": "2", "tqdm": "4.9", "torch": "2.11.0+cpu"}

    def found(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    wanted = ["numpy>=2.0", "tqdm>=4.66", "torch>=2.11", "absent>=1", "ruff>=1; extra == 'dev'"]
    monkeypatch.setattr(doctor, "requires", lambda _: wanted)
    monkeypatch.setattr(doctor, "version", found)
    assert doctor.unmet_requirements() == ("tqdm>=4.66", "absent>=1")


def test_packages_missing_for_real(tmp_path: Path) -> None:
    """A process whose site-packages lack every runtime still gets a diagnosis, and imports nothing heavy for it."""
    hidden = ("torch", "onnxruntime", "tensorrt")
    places = [Path(entry) for entry in sys.path if entry.endswith("site-packages")]
    for entry in (entry for place in places for entry in place.iterdir()):
        if not entry.name.startswith(hidden) and not (tmp_path / entry.name).exists():
            (tmp_path / entry.name).symlink_to(entry)
    code = (
        "import sys; from algm_deploy import doctor; print(doctor.json_text(doctor.diagnose()));"
        "assert not {'torch', 'onnx', 'onnxruntime', 'cv2'} & set(sys.modules)"
    )
    package = Path(algm_deploy.__file__).parents[1]  # site-packages itself where the wheel is installed
    searched = [str(tmp_path), *([str(package)] if package not in places else [])]
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(searched)}
    command = [sys.executable, "-S", "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings)
    assert done.returncode == 0, done.stderr
    findings = [Finding(**entry) for entry in json.loads(done.stdout)]
    steps = {(one.topic, one.step): one for one in findings if one.step}
    assert not any(one.ok for one in steps.values())
    assert steps["torch", "execute"].cure == "pip install torch"
    assert steps["onnxruntime-cpu", "build"].cure == "pip install 'algm-deploy[onnxruntime-cpu]'"
    assert steps["tensorrt-rtx", "build"].cure == "pip install 'algm-deploy[tensorrt-rtx]'"


# A process in which one required package is missing, and no runtime is there, which saves the time of importing them.
WITHOUT = """
import importlib.metadata as metadata, importlib.util, sys
package, module, wanted = sys.argv[1], sys.argv[2], sys.argv[3].split(";")
known = metadata.version
def version(name):
    if name == package:
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.version, metadata.requires, metadata.packages_distributions = version, lambda _: wanted, dict
importlib.util.find_spec = lambda name: None
sys.modules[module] = None
from algm_deploy.cli import main
print(main(["doctor"]), main(["export", "nowhere", "-o", "b"]))
"""
MODULES = {"opencv-python-headless": "cv2", "pillow": "PIL", "pyyaml": "yaml"}


@pytest.mark.parametrize("package", ["numpy", "onnx", "opencv-python-headless", "pillow", "pyyaml", "tqdm"])
def test_a_required_package_is_missing(root_dir: Path, package: str) -> None:
    """`doctor` runs without it and names it; another command says that `doctor` does."""
    wanted = tomllib.loads((root_dir / "pyproject.toml").read_text())["project"]["dependencies"]
    module = MODULES.get(package, package)
    command = [sys.executable, "-c", WITHOUT, package, module, ";".join(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (missing,) = [line for line in done.stdout.splitlines() if "requirements: missing or too old" in line]
    assert package in missing
    assert done.stdout.splitlines()[-1] == "0 2"
    assert f"algm-deploy export: expected the module {module}, found none: `algm-deploy doctor` says" in done.stderr


def test_this_machine() -> None:
    import torch

    findings = diagnose()
    here = {one.topic: one.found for one in findings if one.step is None and one.ok}
    assert here["module torch"] == f"torch {version('torch')}"
    steps = {(one.topic, one.step): one for one in findings if one.step}
    assert steps["torch", "execute"].ok
    assert torch.__version__ in steps["torch", "execute"].found
    assert all(one.cure for one in findings if not one.ok)
