"""A builder in a process of its own: when it crashes, the command goes on to say so, and the builder's log stays.

The two sides talk by the files of a temporary folder. `builder.py` is the other side.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from algm_deploy import errors
from algm_deploy.bundle.records import Engine
from algm_deploy.environment import cuda_capability
from algm_deploy.errors import AlgmDeployError, BuildError
from algm_deploy.recipe.schema import Precision

MODULE = "algm_deploy.runners.tensorrt.builder"
REQUEST, LOG, ENGINE, RECORD, REFUSAL = "request.json", "build.log", "engine", "record.json", "refusal.json"
REFUSED, STEP = 3, "step: "

Rows = Mapping[str, tuple[int, int, int]]
"""Smallest, usual and largest length of the axes of these names."""


def engine_apart(
    model: Path, runtime: str, precision: Precision, options: Any, rows: Rows, progress: bool
) -> tuple[bytes, Engine]:
    """`engine_from_onnx` in another process, which is ended when this one is interrupted.

    Raises:
        BuildError: the builder crashed; the message names the step, and its log is kept among the bundle's reports.
        AlgmDeployError: whatever `engine_from_onnx` raises.
    """
    with TemporaryDirectory(prefix="algm-deploy-build-") as name:
        folder = Path(name)
        request = {"model": model, "runtime": runtime, "precision": precision, "options": options, "rows": rows}
        request |= {"gpu": cuda_capability(), "progress": progress}
        (folder / REQUEST).write_bytes(msgspec.json.encode(request, enc_hook=os.fspath))
        code = _ended(folder)
        if code == 0:
            record = msgspec.json.decode((folder / RECORD).read_bytes(), type=Engine)
            return (folder / ENGINE).read_bytes(), record
        if code == -signal.SIGINT:
            raise KeyboardInterrupt
        if code == REFUSED:
            raise _refusal((folder / REFUSAL).read_bytes())
        raise BuildError(_crash(code, folder / LOG, model.parent / "reports" / f"build-{runtime}.log", runtime))


def _ended(folder: Path) -> int:
    """Exit code of the builder; what it prints goes to its log, its progress to the terminal."""
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", MODULE, str(folder)]
    with (
        (folder / LOG).open("ab") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, env=surroundings) as builder,  # noqa: S603
    ):
        try:
            return builder.wait()
        except BaseException:
            builder.kill()
            builder.wait()  # `with` does not, after Ctrl-C
            raise


def _refusal(written: bytes) -> AlgmDeployError:
    """The error that the builder raised, of the same class."""
    kind, message = msgspec.json.decode(written, type=tuple[str, str])
    found: type[AlgmDeployError] = getattr(errors, kind)
    return found(message)


def _crash(code: int, log: Path, kept: Path, runtime: str) -> str:
    """What happened at which step, and where the log is from now on."""
    lines = log.read_text(errors="replace").splitlines()
    step = next((line.removeprefix(STEP) for line in reversed(lines) if line.startswith(STEP)), "started")
    kept.parent.mkdir(exist_ok=True)
    shutil.copyfile(log, kept)
    ended = f"ended with exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
    killed = ", as the system does when memory runs out," if code == -signal.SIGKILL else ""
    return (
        f"expected {runtime} to build the engine, its builder {ended}{killed} while it {step}: its log is "
        f"{kept}; try another --level, another release of TensorRT, or --in-parts, which also builds the network in "
        "parts"
    )
