"""All that a machine can show of a bundle, and what it says where it can show little.

The steps have tests of their own: here most of them are stand-ins.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from algm_deploy import proof as proof_module
from algm_deploy.bundle.records import Engine, EngineMerge, EngineStretches, Link, Parity, ParsedNetwork
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli import main
from algm_deploy.deployment import compare
from algm_deploy.errors import BuildError, BundleError, NotExecutedError

NO_GPU = "the engine is built and not executed: torch finds no CUDA device here"
LEFT_OUT = [proof_module.OPEN, "verify", "evaluate", "time", proof_module.PARTS]
Prove = Callable[..., tuple[int, dict[str, str], str]]


@pytest.fixture
def bundle(tiny_bundle: Bundle, copied: Callable[..., Bundle]) -> Bundle:
    return copied(tiny_bundle)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "proof"


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that does nothing, a chain that holds, one speed; files that hold nothing, Polygraphy shows nothing."""
    monkeypatch.setattr(proof_module, "build", both_forms)
    monkeypatch.setattr(proof_module, "verify", lambda *_, **__: parity(True))
    speed = SimpleNamespace(variant="merged", batch_ms_mean_of_medians=1.5, stable=True)
    monkeypatch.setattr(proof_module, "bench", lambda *_, **__: [speed])
    monkeypatch.setattr(proof_module, "compare", keep)
    monkeypatch.setattr(proof_module, "diagnose", list)
    shown = SimpleNamespace(returncode=0, stdout="==== ONNX Model ====", stderr="")
    monkeypatch.setattr(proof_module, "subprocess", SimpleNamespace(run=lambda *_, **__: shown))


def engine(layer: str) -> Engine:
    return Engine(
        runtime="tensorrt-rtx",
        version="1.7.1",
        precision="fp16",
        batches=(1, 2, 2),
        compute_capabilities=("8.9",),
        version_compatible=False,
        hardware_compatible=False,
        onnx_hash="0" * 64,
        plugin_sources=None,
        engine_bytes=1,
        parsed_network=ParsedNetwork(plugins=()),
        builder_layers=((layer, "kernel"),),
        build_seconds=1.0,
    )


def both_forms(bundle: Bundle, runtime: str, in_parts: bool = False) -> list[str]:
    """Stands in for a builder."""
    if runtime == "tensorrt-rtx":
        bundle.record(engine("whole"))
    if in_parts:
        merge = EngineMerge(kind="clap", inputs=("a",), outputs=("b",), attributes=())
        parts = (engine("part 1"), engine("part 2"))
        bundle.record(EngineStretches(runtime=runtime, engines=parts, merges=(merge,)))
    return ["built"]


def keep(bundle: Bundle, *, runtimes: tuple[str, str], count: int, output: Path) -> None:
    """Stands in for what `compare` leaves in its folder."""
    output.mkdir(parents=True)
    for name in ("inputs", "first", "second"):
        (output / f"{name}.json").write_text("[]")


def parity(passed: bool) -> Parity:
    link = Link(number=6, name="engine", passed=passed, measured="2 of 9", gate="9 of 9")
    return Parity(runtime="onnxruntime-cpu", images=1, batches=(1,), links=(link,))


@pytest.fixture
def prove(bundle: Bundle, folder: Path, capsys: pytest.CaptureFixture[str]) -> Prove:
    """Runs the command; returns its exit code, the steps' results by name, and what it printed."""

    def call(runtime: str) -> tuple[int, dict[str, str], str]:
        code = main(["prove", str(bundle.path), "--runtime", runtime, "-o", str(folder), "-q"])
        told = json.loads((folder / "proof.json").read_text())
        assert {"machine", "native_sources", "plugin_sources", "files_sha256"} <= told.keys()
        assert told["files_sha256"]["model.onnx"] == bundle.files["model.onnx"].sha256
        for name in ("doctor.txt", "manifest.json", "report.html", "polygraphy/commands.sh", "polygraphy/inputs.json"):
            assert (folder / name).is_file(), name
        return code, {step["name"]: step["result"] for step in told["steps"]}, "".join(capsys.readouterr())

    return call


@contextmanager
def no_device(*_: Any, **__: Any) -> Iterator[None]:
    raise NotExecutedError(NO_GPU)
    yield


def test_without_a_gpu_it_says_what_was_not_done(
    prove: Prove, bundle: Bundle, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof_module, "runner", no_device)
    code, results, said = prove("tensorrt-rtx")
    assert code == NotExecutedError.exit_code
    assert [name for name, result in results.items() if result == "not done"] == LEFT_OUT
    assert results["build"] == results["report"] == "done"
    assert f"BUILT, NOT EXECUTED: {bundle.path}\nreason: {NO_GPU}\nnot done: {', '.join(LEFT_OUT)}\n" in said
    assert {one.step for one in Bundle.open(bundle.path).manifest.not_run} == {"parity", "evaluation", "speed"}
    assert not (folder / "polygraphy" / "second.json").exists(), "nothing ran but PyTorch"


def test_a_builder_that_crashes_leaves_its_log(
    prove: Prove, bundle: Bundle, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any, **__: Any) -> list[str]:
        (bundle.path / "reports").mkdir(exist_ok=True)
        (bundle.path / "reports" / "build-tensorrt-rtx.log").write_text("step: built the engine\n")
        raise BuildError("its builder ended by SIGSEGV")

    monkeypatch.setattr(proof_module, "build", crash)
    code, results, said = prove("tensorrt-rtx")
    assert (code, results["build"]) == (BuildError.exit_code, "failed")
    assert {results[name] for name in LEFT_OUT} == {"not done"}
    assert "build failed" in said
    assert (folder / "builder.log").read_text() == "step: built the engine\n"


@contextmanager
def on_a_device(bundle: Bundle, runtime: str, parts: bool = False) -> Iterator[SimpleNamespace]:
    if parts:
        raise BundleError("the parts differ first in the labels")
    yield SimpleNamespace(device_name="a card", execution={"engines": "2"}, refused="the single engine is foreign")


def test_both_forms_are_built_and_opened(prove: Prove, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_module, "runner", on_a_device)
    code, results, said = prove("tensorrt-rtx")
    assert "on a card, engines: 2; refused: the single engine is foreign" in said
    assert "the parts differ first in the labels" in said
    assert (code, results[proof_module.PARTS]) == (BundleError.exit_code, "failed")
    assert results["verify"] == results["time"] == "done", "the other form holds"
    layers = [f"layer: {name} (kernel)" for name in ("whole", "part 1", "part 2")]
    assert (folder / "builder.log").read_text().splitlines() == layers


def test_parts_that_are_refused_leave_the_single_engine(
    prove: Prove, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(bundle: Bundle, runtime: str, in_parts: bool = False) -> list[str]:
        if in_parts:
            raise BuildError("part 2 was refused")
        return both_forms(bundle, runtime)

    monkeypatch.setattr(proof_module, "build", build)
    monkeypatch.setattr(proof_module, "runner", no_device)
    _, results, said = prove("tensorrt-rtx")
    assert results["build"] == "done"
    assert "built; no engines of the parts between merges: part 2 was refused" in said
    assert (folder / "builder.log").read_text() == "layer: whole (kernel)\n"


def test_where_it_executes(prove: Prove, folder: Path) -> None:
    code, results, said = prove("onnxruntime-cpu")
    assert code == 0
    assert results == {
        **dict.fromkeys(("build", proof_module.OPEN, "verify", "time", "files for Polygraphy", "report"), "done"),
        "evaluate": "not done",
    }
    assert "the labelled pictures that ship have other classes" in said
    assert "merged 1.50 ms" in said
    assert (folder / "polygraphy" / "second.json").is_file()


def test_a_chain_that_fails_is_a_failed_gate(prove: Prove, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_module, "verify", lambda *_, **__: parity(False))
    code, results, said = prove("onnxruntime-cpu")
    assert (code, results["verify"], results["time"]) == (1, "failed", "not done")
    assert "6 engine FAILED: 2 of 9" in said


def test_a_step_is_on_record_before_it_begins(prove: Prove, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def looks(*_: Any) -> list[str]:
        assert json.loads((folder / "proof.json").read_text())["steps"] == [
            {"name": "build", "result": "started", "found": ""}
        ]
        return []

    monkeypatch.setattr(proof_module, "build", looks)
    assert prove("onnxruntime-cpu")[0] == 0


def test_polygraphy_takes_the_files(prove: Prove, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_module, "subprocess", subprocess)
    monkeypatch.setattr(proof_module, "compare", compare)
    prove("onnxruntime-cpu")
    assert "clap_threshold [dtype=float32, shape=()]" in (folder / "polygraphy" / "model.onnx.txt").read_text()
    files, polygraphy = folder / "polygraphy", shlex.join([sys.executable, "-c", proof_module._INSPECT])
    lines = (files / "commands.sh").read_text().replace("polygraphy run", f"{polygraphy} run")
    done = subprocess.run(["sh", "-ec", lines], cwd=files, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
