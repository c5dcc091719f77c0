"""What works on this machine, and for each thing that does not, the one change that mends it.

`examine` collects facts: each runtime is imported in a process of its own, so that a broken one cannot take this one
down and nothing heavy is loaded here. `diagnose` judges the facts; `text` and `json_text` show the judgement.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from algm_deploy.environment import Device, environment
from algm_deploy.native_libraries import LIBRARIES, REBUILD, find_library, missing_for

Step = Literal["build", "execute"]

# A CUDA release runs from this driver on (NVIDIA's CUDA release notes, table "minor version compatibility").
DRIVERS = {"11": 450, "12": 525, "13": 580}
TORCH_OLDEST = (2, 11)
# TensorRT-RTX refuses other GPUs, data-centre generations among them.
RTX_CAPABILITIES = ("7.5", "8.6", "8.9", "12.0", "12.1")
# The ONNX parser knows `Attention` from here on; two older releases compute plain ViTs wrongly.
TENSORRT_OLDEST = (10, 14)
TENSORRT_WRONG = {(10, 3): 4723, (10, 4): 4742}
_PROBE_SECONDS = 120


# --------------------------------------------------------------------------------------------------------------- facts


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
    """A native library: where it was built, and what building it here lacks."""

    path: str | None
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """What was found. `modules` by import name, `libraries` by the name `build-native` takes.

    `nvidia_card`: the bus shows an NVIDIA graphics device. `visible_devices`: the variable CUDA_VISIBLE_DEVICES, if
    set. `requirements`: those of the package that are missing or too old.
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


def examine() -> Machine:
    """Collects the facts about this machine; takes seconds, most of them for importing PyTorch."""
    facts = environment()
    gpus, driver = visible_gpus()
    with ThreadPoolExecutor() as pool:
        modules = dict(zip(PROBES, pool.map(examined_module, PROBES), strict=True))
    libraries = {name: Library(_text(find_library(name)), tuple(missing_for(name))) for name in LIBRARIES}
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
    )


def visible_gpus() -> tuple[tuple[Device, ...], str | None]:
    """GPUs and driver version as `nvidia-smi` lists them; nothing where it is absent or finds none.

    It ignores CUDA_VISIBLE_DEVICES; whether a runtime may use the GPUs is for PyTorch to say.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (), None
    query = [tool, "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=False, timeout=_PROBE_SECONDS)  # noqa: S603
    except subprocess.TimeoutExpired:  # a driver that hangs shows no GPU
        return (), None
    rows = [line.split(", ") for line in listed.stdout.splitlines() if line.count(", ") == 3]
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
    return oldest is None or (*_numbers(found), 0, 0) >= _numbers(oldest[1])


# -------------------------------------------------------------------------------------------------------------- probes


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


def _tensorrt() -> dict[str, Any]:
    import tensorrt

    return {"version": tensorrt.__version__}


def _tensorrt_rtx() -> dict[str, Any]:
    import tensorrt_rtx

    return {"version": tensorrt_rtx.__version__}


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": _torch,
    "onnxruntime": _onnxruntime,
    "tensorrt": _tensorrt,
    "tensorrt_rtx": _tensorrt_rtx,
}


def examined_module(name: str) -> Module:
    """What the module `name` of `PROBES` tells, imported in a process of its own."""
    packages = {package: version(package) for package in packages_distributions().get(name, [])}
    if not packages:
        if find_spec(name) is None:
            return Module()
        packages = {name: "of unknown origin"}
    command = [sys.executable, "-P", "-c", f"from algm_deploy.doctor import tell; tell({name!r})"]
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
    """Writes what the module `name` tells as one line of JSON; runs in the process that may crash."""
    sys.stdout.write(json.dumps(PROBES[name]()) + "\n")


# ----------------------------------------------------------------------------------------------------------- judgement


class Problem(NamedTuple):
    """What is wrong, and the one thing to install or change."""

    found: str
    cure: str


@dataclass(frozen=True)
class Finding:
    """One line of the judgement.

    `topic` is a runtime, or something about the machine; `step` is what the runtime would do, None where the finding is
    about no runtime. `cure` says what to change, empty where nothing has to be.
    """

    topic: str
    step: Step | None
    ok: bool
    found: str
    cure: str = ""


Check = Callable[[Machine], Problem | None]


def diagnose(machine: Machine | None = None) -> list[Finding]:
    """Judges this machine, or the facts of another: facts first, then what is wrong, then each runtime's two steps."""
    machine = machine or examine()
    findings = [Finding(topic, None, True, found) for topic, found in _facts(machine)]
    findings += [Finding(topic, None, False, *problem) for topic, problem in _general_problems(machine)]
    for runtime, steps in CHECKS.items():
        for step, checks in steps.items():
            problem = next((problem for check in checks if (problem := check(machine))), None)
            found, cure = problem or Problem(_success(runtime, step, machine), "")
            findings.append(Finding(runtime, step, problem is None, found, cure))
    return findings


def _facts(machine: Machine) -> Iterable[tuple[str, str]]:
    yield "python", f"{machine.python} on {machine.platform}"
    yield "cpu", f"{machine.cpu}, {machine.cpu_count} cores"
    yield "driver", machine.driver or "no NVIDIA driver"
    for index, gpu in enumerate(machine.gpus):
        memory = f"{gpu.memory_bytes / 2**30:.0f} GiB"
        yield f"gpu {index}", f"{gpu.name}, compute capability {gpu.compute_capability}, {memory}"
    for name, module in machine.modules.items():
        listed = ", ".join(f"{package} {number}" for package, number in sorted(module.packages.items()))
        yield f"module {name}", listed or "not installed"
    for name, library in machine.libraries.items():
        needs = f", needs {', '.join(lack.split(' (')[0] for lack in library.lacks)}" if library.lacks else ""
        yield f"library {name}", library.path or f"not built{needs}"


def _general_problems(machine: Machine) -> Iterable[tuple[str, Problem]]:
    if machine.requirements:
        listed = " ".join(f"'{requirement}'" for requirement in machine.requirements)
        yield (
            "requirements",
            Problem(f"missing or too old: {', '.join(machine.requirements)}", f"pip install -U {listed}"),
        )
    if problem := _two_onnxruntimes(machine):
        yield "onnxruntime", problem
    torch = machine.modules["torch"]
    if machine.gpus and torch.facts and not torch.facts["cuda"]:
        yield (
            "torch",
            Problem(
                f"torch {torch.facts['version']} is a CPU build, so the runtime torch leaves the GPU idle",
                "install a CUDA build of torch (https://pytorch.org/get-started)",
            ),
        )
    if machine.gpus and torch.facts.get("cuda") and (problem := _plugins("kernels")(machine)):
        yield "torch", Problem(f"{problem.found}: merging runs in PyTorch's operators, slower", problem.cure)
    if machine.modules["onnxruntime"].packages and (problem := _plugins("ort_custom_op")(machine)):
        # On a CPU the library serves label maps alone: merging is as fast without it.
        steps = "merging and label maps run" if machine.gpus else "label maps run"
        yield "onnxruntime", Problem(f"{problem.found}: {steps} in standard operators, slower", problem.cure)


def _two_onnxruntimes(machine: Machine) -> Problem | None:
    """Several packages that install the same module: the files of the one installed last are what runs."""
    module = machine.modules["onnxruntime"]
    if len(module.packages) < 2:
        return None
    names = sorted(module.packages)
    runs = f"{module.facts['package']} is in place" if module.facts else "the module is broken"
    extra = "onnxruntime-cuda" if machine.gpus else "onnxruntime-cpu"
    return Problem(
        f"{' and '.join(names)} overwrite each other: {runs}",
        f"pip uninstall -y {' '.join(names)} && pip install {_extra(extra)}",
    )


def _imports(module: str, runtime: str) -> Check:
    def check(machine: Machine) -> Problem | None:
        found = machine.modules[module]
        source = "torch" if runtime == "torch" else _extra(runtime)
        if not found.packages:
            return Problem(f"the module {module} is not installed", f"pip install {source}")
        if found.error is None:
            return None
        names = " ".join(sorted(found.packages))
        mixed = f"pip uninstall -y {names} && pip install {source}"
        cure = mixed if len(found.packages) > 1 else f"pip install --force-reinstall {names}"
        return Problem(f"importing {module} fails: {found.error}", cure)

    return check


def _recent_torch(machine: Machine) -> Problem | None:
    found = machine.modules["torch"].facts["version"]
    oldest = ".".join(map(str, TORCH_OLDEST))
    if _numbers(found)[:2] >= TORCH_OLDEST:
        return None
    return Problem(f"torch {found} is older than {oldest}", f"pip install -U 'torch>={oldest}'")


def _gpu(machine: Machine) -> Problem | None:
    if machine.driver is None:
        if machine.nvidia_card:
            return Problem("an NVIDIA GPU is present, its driver is not loaded", "install NVIDIA's driver 580 or newer")
        return Problem("no NVIDIA GPU and no driver", "use a machine with an NVIDIA GPU")
    if not machine.gpus:
        return Problem(
            "the driver is loaded and shows no GPU", "give the GPU to this container (docker run --gpus all)"
        )
    return None


def _driver_for(module: str) -> Check:
    def check(machine: Machine) -> Problem | None:
        cuda = machine.modules[module].cuda
        oldest = DRIVERS.get(cuda or "")
        if machine.driver is None or oldest is None or _numbers(machine.driver)[0] >= oldest:
            return None
        return Problem(
            f"{module} is built for CUDA {cuda}, which driver {machine.driver} cannot run",
            f"update NVIDIA's driver to {oldest} or newer",
        )

    return check


def _torch_has_kernels(machine: Machine) -> Problem | None:
    facts, first = machine.modules["torch"].facts, machine.gpus[0]
    oldest = min((int(name.split("_")[1].rstrip("af")) for name in facts["architectures"]), default=0)
    if round(float(first.compute_capability) * 10) >= oldest:
        return None
    return Problem(
        f"torch {facts['version']} has no kernels for {first.name} (compute capability {first.compute_capability})",
        "install a build of torch for an older CUDA release (https://pytorch.org/get-started/previous-versions)",
    )


def _torch_sees_gpu(machine: Machine) -> Problem | None:
    """PyTorch keeps the device memory of every GPU runtime."""
    torch = machine.modules["torch"]
    if torch.facts["devices"]:
        return None
    if not torch.facts["cuda"]:
        return Problem(
            f"torch {torch.facts['version']} is a CPU build and cannot hold device memory",
            "install a CUDA build of torch (https://pytorch.org/get-started)",
        )
    if machine.visible_devices is not None:
        return Problem(f"CUDA_VISIBLE_DEVICES={machine.visible_devices!r} hides the GPU", "unset CUDA_VISIBLE_DEVICES")
    return Problem("torch finds no GPU that nvidia-smi lists", "restart the machine or reload NVIDIA's driver")


def _cuda_provider(machine: Machine) -> Problem | None:
    facts, packages = machine.modules["onnxruntime"].facts, sorted(machine.modules["onnxruntime"].packages)
    if "CUDAExecutionProvider" in facts["providers"]:
        return None
    return Problem(
        f"the package {facts['package']} {facts['version']} has no CUDA provider",
        f"pip uninstall -y {' '.join(packages)} && pip install {_extra('onnxruntime-cuda')}",
    )


def _cuda_session(machine: Machine) -> Problem | None:
    facts = machine.modules["onnxruntime"].facts
    if facts["cuda_session"]:
        return None
    cuda = f" {machine.modules['onnxruntime'].cuda}" if machine.modules["onnxruntime"].cuda else ""
    return Problem(
        f"onnxruntime {facts['version']} cannot load the CUDA{cuda} or cuDNN libraries of its CUDA provider",
        "pip install 'onnxruntime-gpu[cuda,cudnn]'",
    )


def _recent_tensorrt(machine: Machine) -> Problem | None:
    found = machine.modules["tensorrt"].facts["version"]
    oldest = ".".join(map(str, TENSORRT_OLDEST))
    short = _numbers(found)[:2]
    cure = f"pip install -U 'tensorrt>={oldest}'"
    if short in TENSORRT_WRONG:
        issue = f"https://github.com/NVIDIA/TensorRT/issues/{TENSORRT_WRONG[short]}"
        return Problem(f"TensorRT {found} computes plain ViTs wrongly ({issue})", cure)
    return None if short >= TENSORRT_OLDEST else Problem(f"TensorRT {found} is older than {oldest}", cure)


def _plugins(*names: str) -> Check:
    def check(machine: Machine) -> Problem | None:
        for name in names:
            library = machine.libraries[name]
            if library.path is None and library.lacks:
                lack, _, ways = library.lacks[0].partition(" (")
                return Problem(f"the library {name} is not built, which needs {lack}", ways.removesuffix(")"))
            if library.path is None:
                return Problem(f"the library {name} is not built", f"{REBUILD} {name}")
        return None

    return check


def _rtx_capability(machine: Machine) -> Problem | None:
    first = machine.gpus[0]
    if first.compute_capability in RTX_CAPABILITIES:
        return None
    return Problem(
        f"TensorRT-RTX refuses {first.name} (compute capability {first.compute_capability}; it takes "
        f"{', '.join(RTX_CAPABILITIES)})",
        f"use the runtime tensorrt on this GPU: pip install {_extra('tensorrt')}",
    )


_TORCH: tuple[Check, ...] = (_imports("torch", "torch"), _recent_torch)
_TORCH_GPU: tuple[Check, ...] = (*_TORCH, _driver_for("torch"), _torch_sees_gpu, _torch_has_kernels)
_ORT_CPU: tuple[Check, ...] = (_imports("onnxruntime", "onnxruntime-cpu"), *_TORCH)
_ORT_CUDA: tuple[Check, ...] = (_imports("onnxruntime", "onnxruntime-cuda"), *_TORCH)
_TRT: tuple[Check, ...] = (
    *(_gpu, _imports("tensorrt", "tensorrt"), _recent_tensorrt, _driver_for("tensorrt")),
    *(*_TORCH_GPU, _plugins("trt_plugin")),
)
_RTX: tuple[Check, ...] = (_imports("tensorrt_rtx", "tensorrt-rtx"), *_TORCH, _plugins("trt_plugin", "rtx_alias"))

CHECKS: dict[str, dict[Step, tuple[Check, ...]]] = {
    "torch": {"build": _TORCH, "execute": _TORCH},
    "onnxruntime-cpu": {"build": _ORT_CPU, "execute": _ORT_CPU},
    "onnxruntime-cuda": {
        "build": _ORT_CUDA,
        "execute": (_gpu, *_ORT_CUDA, _cuda_provider, _driver_for("onnxruntime"), *_TORCH_GPU, _cuda_session),
    },
    "tensorrt": {"build": _TRT, "execute": _TRT},
    "tensorrt-rtx": {
        "build": _RTX,
        "execute": (_gpu, _rtx_capability, *_RTX, _driver_for("tensorrt_rtx"), *_TORCH_GPU),
    },
}
"""What each runtime's steps need, in the order of mending: hardware first, then packages. The first problem counts."""

_MODULES = {
    "torch": "torch",
    "onnxruntime-cpu": "onnxruntime",
    "onnxruntime-cuda": "onnxruntime",
    "tensorrt": "tensorrt",
    "tensorrt-rtx": "tensorrt_rtx",
}


def _success(runtime: str, step: Step, machine: Machine) -> str:
    number = machine.modules[_MODULES[runtime]].facts["version"]
    if runtime == "torch":
        where = (machine.modules["torch"].facts["devices"] or ["the CPU"])[0]
        return f"{number} on {where}" if step == "execute" else f"{number}; nothing to build"
    return str(number)


def _extra(runtime: str) -> str:
    return f"'algm-deploy[{runtime}]'"


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


# ------------------------------------------------------------------------------------------------------------- display


def text(findings: Sequence[Finding]) -> str:
    """The findings for a terminal: facts, a table of runtimes, and what to change."""
    facts = [(one.topic, one.found) for one in findings if one.step is None and one.ok]
    steps = {(one.topic, one.step): one for one in findings if one.step}
    rows = [("runtime", "build", "execute", "")]
    for runtime in dict.fromkeys(topic for topic, _ in steps):
        build, execute = steps[runtime, "build"], steps[runtime, "execute"]
        first = next((one for one in (build, execute) if not one.ok), execute)
        rows.append((runtime, _yes(build), _yes(execute), first.found))
    lines = [*_columns(facts), "", *_columns(rows)]
    if cures := _cures(findings):
        lines += ["", "To change:", *(f"  {line}" for line in cures)]
    return "\n".join(lines)


def json_text(findings: Sequence[Finding]) -> str:
    """The findings as a JSON array of objects, in order."""
    return json.dumps([asdict(finding) for finding in findings], indent=1)


def _cures(findings: Sequence[Finding]) -> list[str]:
    """Two lines a cure: what is wrong with whom, and what to do; the same cure stands once."""
    wrong: dict[tuple[str, str], list[str]] = {}
    for one in findings:
        if not one.ok:
            topics = wrong.setdefault((one.found, one.cure), [])
            topics += [one.topic] * (one.topic not in topics)
    return [
        line for (found, cure), topics in wrong.items() for line in (f"{', '.join(topics)}: {found}", f"    {cure}")
    ]


def _yes(finding: Finding) -> str:
    return "yes" if finding.ok else "no"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
