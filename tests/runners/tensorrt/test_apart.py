"""The builder's own process: what it finds comes back, its refusals too, and a crash is an error that keeps the log."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from algm_deploy.errors import BuildError, RuntimeUnavailableError
from algm_deploy.runners.tensorrt import apart, builder
from algm_deploy.runners.tensorrt.engine import EngineOptions

CRASHES = """
import os, signal, sys
from pathlib import Path
with Path(sys.argv[1], "build.log").open("a") as log:
    print("step: loaded TensorRT", file=log)
    print("error: out of registers", file=log)
    print("step: built the engine", file=log)
{end}
"""


def crashing(folder: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Puts a builder in place that writes its log and ends."""
    (folder / "crashing_builder.py").write_text(CRASHES.format(end=end))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(apart, "MODULE", "crashing_builder")


def ask(model: Path, **options: object) -> object:
    return apart.engine_apart(model, "tensorrt-rtx", "fp32", EngineOptions(**options), {}, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV while it built the engine"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL, as the system does when memory runs out, while it built"),
        ("sys.exit(7)", "ended with exit code 7 while it built the engine"),
    ],
)
def test_a_crash_is_an_error_that_keeps_the_log(
    end: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashing(tmp_path, monkeypatch, end)
    with pytest.raises(BuildError, match=told) as raised:
        ask(tmp_path / "model.tensorrt.onnx")
    kept = tmp_path / "reports" / "build-tensorrt-rtx.log"
    assert str(kept) in str(raised.value)
    assert "error: out of registers" in kept.read_text()


def test_an_interrupt_of_the_builder_is_one_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = "signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGINT)"
    crashing(tmp_path, monkeypatch, end)
    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path / "model.tensorrt.onnx")


def test_an_interrupt_of_the_command_ends_the_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = f"os.kill({os.getpid()}, signal.SIGALRM); import time; time.sleep(60)"
    crashing(tmp_path, monkeypatch, f"Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n{parent}")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            ask(tmp_path / "model.tensorrt.onnx")
    finally:
        signal.signal(signal.SIGALRM, previous)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_refusal_comes_back_as_it_was_raised(tmp_path: Path) -> None:
    """Through the real builder, which finds no model, or no bindings for it."""
    told = r"expected an ONNX model at|needs the Python module"
    with pytest.raises((BuildError, RuntimeUnavailableError), match=told):
        ask(tmp_path / "none.onnx", timing_cache=None)
    assert not (tmp_path / "reports").exists()


def test_options_arrive_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with a stand-in for TensorRT."""
    told: list[object] = []

    def stopped(*arguments: object) -> None:
        told.extend(arguments)
        raise BuildError("stopped here")

    rows = {"tokens_clap_1": (2, 9, 25)}
    options = EngineOptions((1, 2, 4), 3, 64, tmp_path / "cache", True, True, ("8.9",))
    monkeypatch.setattr(apart, "_ended", builder.build)
    monkeypatch.setattr(builder, "engine_from_onnx", stopped)
    monkeypatch.setattr(builder, "load_bindings", lambda runtime: runtime)
    monkeypatch.setattr(builder, "listening", lambda trt, log: (tmp_path / "open").open("w"))
    monkeypatch.setattr(apart, "cuda_capability", lambda: "9.0")
    with pytest.raises(BuildError, match=r"^stopped here$"):
        apart.engine_apart(tmp_path / "m.onnx", "tensorrt", "fp16", options, rows, True)
    assert told[:7] == [tmp_path / "m.onnx", "tensorrt", "fp16", "9.0", options, rows, True]


def test_every_class_of_error_can_come_back() -> None:
    for error in (BuildError("a"), RuntimeUnavailableError("b")):
        written = f'["{type(error).__name__}", "{error}"]'.encode()
        found = apart._refusal(written)
        assert (type(found), str(found)) == (type(error), str(error))
