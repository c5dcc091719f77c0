"""Facts of made-up machines against what the doctor says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from algm_deploy.doctor.probes import MODULES, Library, Machine, Module
from algm_deploy.doctor.rules import Finding, Step, diagnose
from algm_deploy.doctor.text import for_people, for_programs
from algm_deploy.environment import Device
from algm_deploy.runners.registry import RUNTIMES, row_of
from algm_deploy.runners.tensorrt.engine import RTX_TARGETS

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
OPENVINO = Module({"openvino": "2026.4.1"}, {"version": "2026.4.1", "bf16": True})
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
    modules={
        "torch": TORCH,
        "onnxruntime": ORT_GPU,
        "openvino": OPENVINO,
        "tensorrt": TENSORRT,
        "tensorrt_rtx": RTX,
    },
    libraries={name: Library(f"/cache/{name}.so") for name in ("kernels", "trt_plugin", "ort_custom_op", "rtx_alias")},
)
CPU_BOX = replace(
    GPU_BOX,
    driver=None,
    gpus=(),
    nvidia_card=False,
    modules={
        "torch": TORCH_CPU,
        "onnxruntime": ORT_CPU,
        "openvino": Module(),
        "tensorrt": Module(),
        "tensorrt_rtx": RTX,
    },
)
ALL = tuple(RUNTIMES)


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
    assert "To change" not in for_people(findings)


def test_a_machine_without_gpu_builds_more_than_it_executes() -> None:
    assert can(CPU_BOX, "build") == {"torch", "onnxruntime-cpu", "onnxruntime-cuda", "tensorrt-rtx"}
    assert can(CPU_BOX, "execute") == {"torch", "onnxruntime-cpu"}


def test_a_processor_without_bf16_is_told() -> None:
    machine = with_module("openvino", told(OPENVINO, bf16=False))
    said = {(one.topic, one.step): one.found for one in diagnose(machine) if one.ok}
    assert said["openvino", "execute"] == "2026.4.1; this CPU has no bf16, bundles in bf16 are computed in fp32"
    assert said["openvino", "build"] == "2026.4.1"


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
    "old onnxruntime": (
        with_module("onnxruntime", told(ORT_GPU, version="1.22.0")),
        {"onnxruntime-cpu", "onnxruntime-cuda"},
        "1.22.0 is older than 1.23",
        "pip install -U 'onnxruntime-gpu>=1.23'",
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
    "old RTX": (
        with_module("tensorrt_rtx", told(RTX, version="1.2.0")),
        {"tensorrt-rtx"},
        "tensorrt-rtx 1.2.0 is older than 1.7",
        "pip install -U 'tensorrt-rtx>=1.7'",
    ),
    "plugins not built": (
        replace(with_library("trt_plugin", Library(None)), compiles=False),
        {"tensorrt", "tensorrt-rtx"},
        "trt_plugin is not built",
        "algm-deploy build-native trt_plugin",
    ),
    "plugins cannot be built": (
        with_library("trt_plugin", NO_HEADER),
        {"tensorrt", "tensorrt-rtx"},
        "which needs the header NvInferRuntime.h",
        "pip install 'algm-deploy[native]', or unpack the archive (TensorRT); then set TENSORRT_ROOT",
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
        assert f"{problem.found}\n    {problem.cure}" in for_people(diagnose(machine)).replace("\n      ", "\n    ")


@pytest.mark.parametrize("name", [name for name in CASES if not {"torch", "old driver"} & set(name.split())])
def test_what_is_missing_stops_nothing_else(name: str) -> None:
    machine, stopped, _, _ = CASES[name]
    spare = {"tensorrt-rtx"} if name == "GPU too old for torch" else set()
    assert set(ALL) - can(machine, "execute") == stopped | spare


def test_cuda_12_builds_run_on_older_drivers() -> None:
    torch = told(TORCH, version="2.11.0+cu128", cuda="12.8")
    tensorrt = Module({"tensorrt-cu12": "10.16.1"}, {"version": "10.16.1"})
    machine = with_module("tensorrt", tensorrt, with_module("torch", torch, replace(GPU_BOX, driver="550.54.15")))
    assert can(machine, "execute") == {"torch", "onnxruntime-cpu", "openvino", "tensorrt"}
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
    assert finding(machine, "onnxruntime", None).found.endswith(
        ": labels and deformable attention run in ONNX Runtime's own operators, slower"
    )
    on_gpu = finding(replace(with_library("ort_custom_op", Library(None)), compiles=False), "onnxruntime", None)
    assert on_gpu.found.endswith(
        ": merging, labels and deformable attention, and in fp16 attention, GELU and norms too, run in ONNX Runtime's "
        "own operators, slower"
    )
    assert finding(machine, "onnxruntime", None).cure == "algm-deploy build-native ort_custom_op"
    assert "onnxruntime-cpu" in can(machine, "execute")


def test_missing_kernels_are_a_hint_where_pytorch_has_a_gpu() -> None:
    missing = replace(with_library("kernels", Library(None)), compiles=False)
    assert (
        "merging, label maps and deformable attention run in PyTorch's operators, slower"
        in finding(missing, "torch", None).found
    )
    assert finding(missing, "torch", None).cure == "algm-deploy build-native kernels"
    assert can(missing, "execute") == set(ALL)
    for machine in (CPU_BOX, with_module("torch", TORCH_CPU)):
        told_of = {one.cure for one in diagnose(with_library("kernels", Library(None), machine))}
        assert "algm-deploy build-native kernels" not in told_of


def fact(machine: Machine, topic: str) -> str:
    return next(one.found for one in diagnose(machine) if (one.topic, one.ok) == (topic, True))


def test_a_library_is_here_or_compiled_when_first_used_or_lacks_something() -> None:
    here, later = GPU_BOX, with_library("kernels", Library(None))
    lacking = with_library("kernels", Library(None, ("CUDA's compiler nvcc (set CUDA_HOME)",)))
    assert fact(here, "library kernels") == "/cache/kernels.so"
    assert fact(later, "library kernels") == "not built, compiled when it is first used"
    assert fact(lacking, "library kernels") == "not built, needs CUDA's compiler nvcc"
    assert [one for one in diagnose(later) if not one.ok] == []
    assert can(with_library("trt_plugin", Library(None)), "execute") == set(ALL)
    assert finding(lacking, "torch", None).cure == "pip install 'algm-deploy[native]', or set CUDA_HOME"
    without_gpu = with_library("ort_custom_op", Library(None), CPU_BOX)
    assert fact(without_gpu, "library ort_custom_op") == "not built", "only a GPU has anything compiled"


def test_a_wheel_of_other_sources_is_told() -> None:
    machine = replace(GPU_BOX, wheel_refused="expected the wheel of today")
    assert finding(machine, "native libraries", None).cure == "pip install 'algm-deploy[native]'"
    assert [one.topic for one in diagnose(machine) if not one.ok] == ["native libraries"]


def test_an_idle_gpu_is_told() -> None:
    machine = with_module("torch", TORCH_CPU)
    assert "leaves the GPU idle" in finding(machine, "torch", None).found
    assert "torch" in can(machine, "execute")


def test_unmet_requirements_are_told() -> None:
    problem = finding(replace(CPU_BOX, requirements=("tqdm>=4.66",)), "requirements", None)
    assert problem.cure == "pip install -U 'tqdm>=4.66'"


def test_the_same_cure_stands_once() -> None:
    shown = for_people(diagnose(CPU_BOX))
    assert shown.count("use a machine with an NVIDIA GPU") == 1
    assert "onnxruntime-cuda, tensorrt, tensorrt-rtx: no NVIDIA GPU and no driver" in shown
    assert [line.split()[1:3] for line in shown.splitlines() if line.startswith("tensorrt-rtx")] == [["yes", "no"]]


def test_json_holds_every_finding() -> None:
    findings = diagnose(CPU_BOX)
    assert [Finding(**entry) for entry in json.loads(for_programs(findings))] == findings


def test_every_runtime_is_judged() -> None:
    assert [one.topic for one in diagnose(GPU_BOX) if one.step == "execute"] == list(RUNTIMES)
    assert set(MODULES) == set(GPU_BOX.modules) == {row.module for row in RUNTIMES.values()}


def test_limits_are_those_the_runners_enforce() -> None:
    assert set(RTX_TARGETS) <= set(row_of("tensorrt-rtx").capabilities)
