"""The probes, on packages that misbehave and on machines that lack something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import algm_deploy
from algm_deploy.doctor import probes
from algm_deploy.doctor.probes import (
    Module,
    examined_module,
    has_nvidia_card,
    unmet_requirements,
    visible_gpus,
)
from algm_deploy.doctor.rules import Finding, diagnose
from algm_deploy.environment import Device


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
    assert examined_module("tensorrt") == Module({"tensorrt_cu13": "10.3.0"}, facts, error)
    assert "tensorrt" not in sys.modules


def test_a_module_without_metadata_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt.py").write_text("__version__ = '11.0.0'")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert examined_module("tensorrt").facts == {"version": "11.0.0"}


def test_an_import_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, "tensorrt", "import time; time.sleep(60)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(probes, "_PROBE_SECONDS", 0.5)
    assert examined_module("tensorrt").error == "no answer within 0.5 s"


def test_the_onnxruntime_here_tells_its_package_and_providers() -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs ONNX Runtime: algm-deploy[onnxruntime-cpu]")
    module = examined_module("onnxruntime")
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
    gpus, driver = visible_gpus()
    assert gpus == (Device("NVIDIA GeForce RTX 4090", "8.9", 24564 << 20),) * 2
    assert driver == "580.65.06"


@pytest.mark.parametrize("lines", ["echo 'No devices were found'", "echo 'failed to initialize NVML' >&2; exit 9"])
def test_no_gpus_in_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    smi(tmp_path, lines, monkeypatch)
    assert visible_gpus() == ((), None)


def test_a_machine_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == ((), None)


@pytest.mark.parametrize(
    ("vendor", "kind", "card"),
    [("0x10de", "0x030000", True), ("0x10de", "0x040300", False), ("0x1002", "0x030000", False)],
)
def test_cards_on_the_bus(tmp_path: Path, vendor: str, kind: str, card: bool) -> None:
    device = tmp_path / "0000:01:00.0"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    assert has_nvidia_card(tmp_path) == card
    assert not has_nvidia_card(tmp_path / "none")


def test_requirements_are_compared_as_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"numpy": "2", "tqdm": "4.9", "torch": "2.11.0+cpu"}

    def found(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    wanted = ["numpy>=2.0", "tqdm>=4.66", "torch>=2.11", "absent>=1", "ruff>=1; extra == 'dev'"]
    monkeypatch.setattr(probes, "requires", lambda _: wanted)
    monkeypatch.setattr(probes, "version", found)
    assert unmet_requirements() == ("tqdm>=4.66", "absent>=1")


def test_packages_missing_for_real(tmp_path: Path) -> None:
    """A process whose site-packages lack every runtime still gets a diagnosis, and imports nothing heavy for it."""
    hidden = ("torch", "onnxruntime", "tensorrt")
    places = [Path(entry) for entry in sys.path if entry.endswith("site-packages")]
    for entry in (entry for place in places for entry in place.iterdir()):
        if not entry.name.startswith(hidden) and not (tmp_path / entry.name).exists():
            (tmp_path / entry.name).symlink_to(entry)
    code = (
        "import sys; from algm_deploy.doctor.rules import diagnose; from algm_deploy.doctor.text import for_programs;"
        "print(for_programs(diagnose()));"
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
