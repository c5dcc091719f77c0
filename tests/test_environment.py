"""Facts about the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest

from algm_deploy import environment as module


def test_versions_are_those_installed() -> None:
    facts = module.environment()
    assert facts.python == platform.python_version()
    assert facts.packages["torch"] == version("torch")
    assert set(facts.packages) <= set(module.PACKAGES)
    assert facts.cpu
    assert facts.cpu_count > 0
    assert facts.devices == ()
    assert asdict(facts)["packages"] == facts.packages


def test_cores_are_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 3)
    assert module.environment().cpu_count == 3
    assert module.device_name(cuda=False).endswith("3 cores")


def test_an_absent_package_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("torch", "no-such-package"))
    assert list(module.environment().packages) == ["torch"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], Path]:
    """A machine of 8 cores whose files hold those texts, for a process that is bound to 6 cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))

    def written(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return written


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 6),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "1000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, 6),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "900000 100000\n"}, 6),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/cpu.max": "300000 100000\n", f"{V2}/a/b/cpu.max": "max 100000"}, 3),
        ({"proc/self/cgroup": "0::/not/seen/here\n", f"{V2}/cpu.max": "400000 100000\n"}, 4),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n2:cpu,cpuacct:/x\n0::/\n",
                f"{V1}/x/cpu.cfs_quota_us": "250000\n",
                f"{V1}/x/cpu.cfs_period_us": "100000\n",
                f"{V1}/cpu.cfs_quota_us": "-1\n",
                f"{V1}/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_cores_that_a_process_may_use(
    machine: Callable[[dict[str, str]], Path], files: dict[str, str], cores: int
) -> None:
    assert module.usable_cores(machine(files)) == cores


def test_threads_are_those_of_the_variable_else_of_the_usable_cores(
    machine: Callable[[dict[str, str]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine({})
    assert module.thread_limit() == 6
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert module.thread_limit() is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert module.thread_limit() == 3


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("something else", None),
    ],
)
def test_driver_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, driver: str | None) -> None:
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(module, "_DRIVER", tmp_path / "version")
    assert module.environment().driver == driver
    monkeypatch.setattr(module, "_DRIVER", tmp_path / "none")
    assert module.environment().driver is None


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_state_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'echo "$1" > "$0.asked"; echo "580.65.06, 1755, 1980, 2619, 2619, 412.37, 700.00, [N/A]"'
    fake_nvidia_smi(tmp_path, monkeypatch, script)
    state = module.gpu_state("GPU-12")
    assert state == module.GpuState("580.65.06", 1755, 1980, 2619, 2619, 412.37, 700, None)
    assert (tmp_path / "nvidia-smi.asked").read_text() == "--id=GPU-12\n"
    assert len(module._QUERY.split(",")) == len(asdict(state))


@pytest.mark.parametrize("script", ["exit 6", "echo 'No devices were found'"])
def test_a_gpu_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    fake_nvidia_smi(tmp_path, monkeypatch, script)
    assert module.gpu_state("GPU-12") is None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert module.gpu_state("GPU-12") is None


def test_devices_are_those_of_torch() -> None:
    import torch

    assert len(module.environment(devices=True).devices) == torch.cuda.device_count()


@pytest.mark.gpu
def test_a_device_has_name_capability_and_memory() -> None:
    device = module.cuda_devices()[0]
    assert device.name.startswith("NVIDIA")
    assert float(device.compute_capability) >= 7
    assert device.memory_bytes > 1 << 30
