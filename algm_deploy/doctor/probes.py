"""What is here: drivers, GPUs, packages and libraries, told by a machine that may be broken.

Each runtime is imported in a process of its own, so that a broken one cannot take this one down and nothing heavy is
loaded here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from algm_deploy.environment import Device, environment, nvidia_smi
from algm_deploy.native_libraries import LIBRARIES, compiles_at_first_use, find_library, missing_for, wheel_refused
from algm_deploy.runners.registry import RUNTIMES

MODULES = tuple(dict.fromkeys(row.module for row in RUNTIMES.values()))
_PROBE_SECONDS = 120


@dataclass(frozen=True)
class Module:
    """An importable module: the packages that bring it, with versions, and what it told when it was imported.

    `error` is why the import failed; without packages nothing was imported.
    """

    packages: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def cuda(self) -> str | None:
        """Major version of the CUDA release it was built for, as far as it tells."""
        named = next((match[1] for name in self.packages if (match := re.search(r"[-_]cu(\d\d)(?!\d)", name))), None)
        return str(self.facts["cuda"]).split(".")[0] if self.facts.get("cuda") else named


@dataclass(frozen=True)
class Library:
    """A native library: where it is, of the wheel or compiled here, and what compiling it here lacks."""

    path: str | None
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """What was found. `modules` by import name, `libraries` by the name `build-native` takes.

    `nvidia_card`: the bus shows an NVIDIA graphics device. `visible_devices`: the variable CUDA_VISIBLE_DEVICES, if
    set. `requirements`: those of the package that are missing or too old. `wheel_refused`: why the installed wheel of
    native libraries is left alone. `compiles`: the first use on a GPU may compile what is missing.
    """

    python: str
    platform: str
    cpu: str
    cpu_count: int
    driver: str | None
    gpus: tuple[Device, ...]
    nvidia_card: bool
    visible_devices: str | None
    modules: dict[str, Module]
    libraries: dict[str, Library]
    requirements: tuple[str, ...] = ()
    wheel_refused: str | None = None
    compiles: bool = True


def examine() -> Machine:
    """Collects the facts about this machine; takes seconds, most of them for importing PyTorch."""
    facts = environment()
    gpus, driver = visible_gpus()
    with ThreadPoolExecutor() as pool:
        modules = dict(zip(MODULES, pool.map(examined_module, MODULES), strict=True))
    libraries = {name: Library(_built(name), tuple(missing_for(name))) for name in LIBRARIES}
    return Machine(
        python=facts.python,
        platform=facts.platform,
        cpu=facts.cpu,
        cpu_count=facts.cpu_count,
        driver=facts.driver or driver,
        gpus=gpus,
        nvidia_card=has_nvidia_card(),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        modules=modules,
        libraries=libraries,
        requirements=unmet_requirements(),
        wheel_refused=wheel_refused(),
        compiles=compiles_at_first_use(),
    )


def visible_gpus() -> tuple[tuple[Device, ...], str | None]:
    """GPUs and driver version as `nvidia-smi` lists them; nothing where it is absent or finds none.

    It ignores CUDA_VISIBLE_DEVICES; whether a runtime may use the GPUs is for PyTorch to say.
    """
    rows = nvidia_smi("name,compute_cap,memory.total,driver_version", seconds=_PROBE_SECONDS)
    gpus = tuple(
        Device(name, capability, int(memory) << 20) for name, capability, memory, _ in rows if memory.isdigit()
    )
    return gpus, rows[0][3] if rows else None


def has_nvidia_card(bus: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether the PCI bus shows an NVIDIA graphics device, driver or not."""
    for device in bus.glob("*/vendor"):
        kind = device.with_name("class")
        if device.read_text().strip() == "0x10de" and kind.is_file() and kind.read_text().startswith("0x03"):
            return True
    return False


def unmet_requirements() -> tuple[str, ...]:
    """Requirements of the installed package that are missing or too old; run from its sources, it has none to check."""
    try:
        wanted = [line for line in requires("algm-deploy") or [] if "extra ==" not in line]
    except PackageNotFoundError:
        return ()
    return tuple(line for line in wanted if not _met(line))


def _met(requirement: str) -> bool:
    name = re.match(r"[\w.-]+", requirement)
    oldest = re.search(r">=\s*([\d.]+)", requirement)
    try:
        found = version(name[0]) if name else ""
    except PackageNotFoundError:
        return False
    return oldest is None or (*numbers(found), 0, 0) >= numbers(oldest[1])


def numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _built(library: str) -> str | None:
    path = find_library(library)
    return None if path is None else str(path)


# ------------------------------------------------------------------------------------------------ in another process


def _torch() -> dict[str, Any]:
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "architectures": torch.cuda.get_arch_list(),
    }


def _onnxruntime() -> dict[str, Any]:
    import onnxruntime
    from onnxruntime.capi import build_and_package_info

    providers = onnxruntime.get_available_providers()
    return {
        "version": onnxruntime.__version__,
        "package": build_and_package_info.package_name,
        "cuda": getattr(build_and_package_info, "cuda_version", None),
        "providers": providers,
        "cuda_session": "CUDAExecutionProvider" in providers and _cuda_session_opens(),
    }


def _cuda_session_opens() -> bool:
    """Whether a session on the CUDA provider gets it: the libraries it loads late may be missing."""
    import onnxruntime
    import torch
    from onnx import TensorProto, helper

    if not torch.cuda.is_available():
        return False
    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    node = helper.make_node("Identity", ["x"], ["y"])
    graph = helper.make_graph([node], "probe", [value], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CUDAExecutionProvider"])
    return bool(session.get_providers()[0] == "CUDAExecutionProvider")


def _openvino() -> dict[str, Any]:
    from algm_deploy.runners.openvino.library import openvino

    precisions = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return {"version": openvino.__version__.partition("-")[0], "bf16": "BF16" in precisions}


_TOLD: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": _torch,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}


def examined_module(name: str) -> Module:
    """What a module tells, imported in a process of its own."""
    packages = {package: version(package) for package in packages_distributions().get(name, [])}
    if not packages:
        if find_spec(name) is None:
            return Module()
        packages = {name: "of unknown origin"}
    command = [sys.executable, "-P", "-c", f"from algm_deploy.doctor.probes import tell; tell({name!r})"]
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter on this module
            command, capture_output=True, text=True, check=False, timeout=_PROBE_SECONDS, env=surroundings
        )
    except subprocess.TimeoutExpired:
        return Module(packages, error=f"no answer within {_PROBE_SECONDS} s")
    if done.returncode == 0:
        return Module(packages, json.loads(done.stdout.splitlines()[-1]))
    if done.returncode < 0:
        return Module(packages, error=f"the process ended with {signal.Signals(-done.returncode).name}")
    return Module(packages, error=(done.stderr.strip().splitlines() or ["no message"])[-1])


def tell(name: str) -> None:
    """Writes what a module tells as one line of JSON; runs in the process that may crash."""
    facts = _TOLD[name]() if name in _TOLD else {"version": import_module(name).__version__}
    sys.stdout.write(json.dumps(facts) + "\n")
