"""The process that builds an engine for `apart.py`: `python -m algm_deploy.runners.tensorrt.builder FOLDER`.

It imports no PyTorch, which would take longer than a build of a small network.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

import msgspec

from algm_deploy.errors import AlgmDeployError
from algm_deploy.recipe.schema import Precision
from algm_deploy.runners.tensorrt.apart import ENGINE, LOG, RECORD, REFUSAL, REFUSED, REQUEST, STEP
from algm_deploy.runners.tensorrt.engine import EngineOptions, engine_from_onnx
from algm_deploy.runners.tensorrt.library import Log, listening, load_bindings


class Request(msgspec.Struct):
    """Arguments of `engine_from_onnx`."""

    model: str
    runtime: str
    precision: Precision
    gpu: str | None
    options: EngineOptions
    rows: dict[str, tuple[int, int, int]]
    progress: bool


class _Kept(Log):
    """Writes each line at once, so that it is there after a crash."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file

    def add(self, severity: str, message: str) -> None:
        if severity != "VERBOSE":
            print(f"{severity.lower()}: {message}", file=self._file, flush=True)

    def step(self, text: str) -> None:
        """What the builder does from here on."""
        print(f"{STEP}{text}", file=self._file, flush=True)


def build(folder: Path) -> int:
    """Builds what the folder's request asks for, writes the result beside it, and returns the exit code."""
    request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=Request, dec_hook=_path)
    model, runtime = Path(request.model), request.runtime
    with (folder / LOG).open("a", encoding="utf-8", errors="backslashreplace") as file:
        faulthandler.enable(file)
        log = _Kept(file)
        log.step("loaded TensorRT")
        try:
            with listening(load_bindings(runtime), log):
                engine, record = engine_from_onnx(
                    model,
                    runtime,
                    request.precision,
                    request.gpu,
                    request.options,
                    request.rows,
                    request.progress,
                    log.step,
                )
        except AlgmDeployError as error:
            (folder / REFUSAL).write_bytes(msgspec.json.encode((type(error).__name__, str(error))))
            return REFUSED
        finally:
            faulthandler.disable()
    (folder / ENGINE).write_bytes(engine)
    (folder / RECORD).write_bytes(msgspec.json.encode(record))
    return 0


def _path(kind: type, value: Any) -> Any:
    return kind(value)


if __name__ == "__main__":
    try:
        sys.exit(build(Path(sys.argv[1])))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
