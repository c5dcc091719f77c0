"""What runs here: versions and devices, as facts for manifests and records."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "algm-deploy",
    "torch",
    "numpy",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
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
    """`packages` holds installed versions only; `driver` is the NVIDIA driver's version, None without one."""

    python: str
    platform: str
    cpu: str
    cpu_count: int
    packages: dict[str, str]
    driver: str | None
    devices: tuple[Device, ...]


def environment(devices: bool = False) -> Environment:
    """Facts about this machine, read without importing a runtime; `devices` lists CUDA devices and imports torch."""
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_first(_CPU, r"model name\s*: (.+)") or platform.machine(),
        cpu_count=os.cpu_count() or 1,
        packages={name: found for name in PACKAGES if (found := installed_version(name))},
        driver=_first(_DRIVER, r"Module.*?\s(\d+(?:\.\d+)+)"),
        devices=cuda_devices() if devices else (),
    )


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


def _first(path: Path, pattern: str) -> str | None:
    match = re.search(pattern, path.read_text(encoding="utf-8")) if path.is_file() else None
    return match[1].strip() if match else None
