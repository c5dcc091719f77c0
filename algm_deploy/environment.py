"""What runs here: versions and devices, as facts for manifests and records."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath

PACKAGES = (
    "algm-deploy",
    "torch",
    "numpy",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
    "tensorrt",
    "tensorrt-rtx",
    "opencv-python-headless",
    "pillow",
    "safetensors",
)
_DRIVER = Path("/proc/driver/nvidia/version")
_CPU = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Device:
    """One CUDA device as torch sees it."""

    name: str
    compute_capability: str
    memory_bytes: int


@dataclass(frozen=True)
class Environment:
    """`cpu_count`: cores that this process may use; `packages` holds installed versions only; `driver` is the NVIDIA
    driver's version, None without one."""

    python: str
    platform: str
    cpu: str
    cpu_count: int
    packages: dict[str, str]
    driver: str | None
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class GpuState:
    """What nvidia-smi tells of a GPU at one moment, each figure None where it does not: MHz, watts, degrees Celsius."""

    driver: str | None
    sm_clock_mhz: float | None
    sm_clock_max_mhz: float | None
    memory_clock_mhz: float | None
    memory_clock_max_mhz: float | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: float | None


# The fields above as nvidia-smi calls them.
_QUERY = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw,power.limit,temperature.gpu"


def environment(devices: bool = False) -> Environment:
    """Facts about this machine, read without importing a runtime; `devices` lists CUDA devices and imports torch."""
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_first(_CPU, r"model name\s*: (.+)") or platform.machine(),
        cpu_count=usable_cores(),
        packages={name: found for name in PACKAGES if (found := installed_version(name))},
        driver=_first(_DRIVER, r"Module.*?\s(\d+(?:\.\d+)+)"),
        devices=cuda_devices() if devices else (),
    )


def thread_limit() -> int | None:
    """Threads that a runtime on the CPU may use: those of OMP_NUM_THREADS, else as many as `usable_cores`, where these
    are fewer than the machine's; None where nothing sets a limit.

    PyTorch obeys that variable by itself. Schedulers set it for processes that share a machine. ONNX Runtime, left to
    itself, takes all cores of the machine, also those that the process is kept from.
    """
    text = os.environ.get("OMP_NUM_THREADS", "")
    if text.isdecimal() and int(text):
        return int(text)
    usable = usable_cores()
    return usable if usable < (os.cpu_count() or 1) else None


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: those it is bound to, as by `taskset` or a container's `--cpuset-cpus`, and no
    more than the quotas of its control groups, such as a container's `--cpus`, last for. At least 1."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *map(math.ceil, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Cores that each control group around this process may use, of those that set a limit: version 2, and 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        for group in (PurePosixPath(place), *PurePosixPath(place).parents):
            folder = mounted / group.relative_to("/")
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            facts = " ".join(_text(folder / file) for file in files).split()
            if len(facts) == 2 and all(fact.isdecimal() and int(fact) for fact in facts):  # "max" and -1 are no limits
                yield int(facts[0]) / int(facts[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def processor_flags() -> frozenset[str]:
    """Instruction sets of the processor, by Linux's names, such as avx2 and amx_bf16; empty on other systems."""
    return frozenset((_first(_CPU, r"flags\s*: (.+)") or "").split())


def user_cache() -> Path:
    """Folder of what can be made again for this user: `$XDG_CACHE_HOME/algm-deploy`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "algm-deploy"


def installed_version(package: str) -> str | None:
    """Version of an installed distribution, None where it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cuda_devices() -> tuple[Device, ...]:
    """CUDA devices that torch can use; empty without one or with a CPU build of torch."""
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Device(one.name, f"{one.major}.{one.minor}", one.total_memory) for one in found)


def cuda_capability() -> str | None:
    """Compute capability of torch's current CUDA device, such as "9.0"; None where torch can use none."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def device_name(cuda: bool, index: int | None = None) -> str:
    """The CUDA device of this index, by default torch's current one; without `cuda`, or without any, the processor."""
    found = cuda_devices() if cuda else ()
    if not found:
        here = environment()
        return f"{here.cpu}, {here.cpu_count} cores"
    import torch

    return found[torch.cuda.current_device() if index is None else index].name


def gpu_state(uuid: str) -> GpuState | None:
    """State of the GPU with this UUID now; None where nvidia-smi is missing or does not know it."""
    rows = nvidia_smi(_QUERY, f"--id={uuid}")
    return GpuState(rows[0][0], *map(_figure, rows[0][1:])) if rows else None


def nvidia_smi(query: str, *options: str, seconds: float = 10) -> list[list[str]]:
    """What nvidia-smi tells of the fields of a query, a row a GPU; nothing where it is missing, finds none or hangs."""
    command = ["nvidia-smi", *options, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[value.strip() for value in line.split(",")] for line in told.splitlines()]
    return [row for row in rows if len(row) == len(query.split(","))]


def _figure(told: str) -> float | None:
    """A number; nvidia-smi writes `[N/A]` and the like where a card does not tell."""
    return float(told) if re.fullmatch(r"-?\d+(\.\d+)?", told) else None


def _first(path: Path, pattern: str) -> str | None:
    match = re.search(pattern, path.read_text(encoding="utf-8")) if path.is_file() else None
    return match[1].strip() if match else None
