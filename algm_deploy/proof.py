"""All that one machine can show of a bundle, in one folder: proof where it holds, material for a report where it fails.

What is known so far is written after every step, so that it is there when a runtime ends the process.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, Literal

import msgspec

from algm_deploy.bundle.files import ONNX, write_atomically
from algm_deploy.bundle.manifest import MANIFEST
from algm_deploy.bundle.records import Engine, EngineStretches
from algm_deploy.bundle.store import Bundle
from algm_deploy.demo.run import labelled_pictures
from algm_deploy.deployment import bench, build, compare, evaluate, note_not_run, verify
from algm_deploy.doctor.rules import diagnose
from algm_deploy.doctor.text import for_people
from algm_deploy.environment import environment
from algm_deploy.errors import AlgmDeployError, BuildError, BundleError, GateError, NotExecutedError
from algm_deploy.lowering.tensorrt import TENSORRT_ONNX
from algm_deploy.native_libraries import made_from
from algm_deploy.predictor import takes_whole_frames
from algm_deploy.report.page import write_report
from algm_deploy.runners.contract import runner
from algm_deploy.runners.registry import row_of
from algm_deploy.runners.tensorrt.digest import digest_file
from algm_deploy.wording import counted, variant_title

PROOF, LOG, POLYGRAPHY = "proof.json", "builder.log", "polygraphy"
OPEN = "open, which compares an engine's first run with PyTorch's results"
PARTS = "open the engines of the parts between merges, compared likewise"
Result = Literal["started", "done", "failed", "not done"]
_INSPECT = "from polygraphy.tools import main; raise SystemExit(main())"


@dataclass
class Part:
    """One step and how it ended; `found` is what it found, or the reason."""

    name: str
    result: Result
    found: str = ""


@dataclass
class Proof:
    """The steps so far, the first error, and why nothing was executed, where that is so."""

    parts: list[Part] = field(default_factory=list)
    error: AlgmDeployError | None = None
    not_executed: str | None = None

    @property
    def left_out(self) -> list[str]:
        """Names of the steps that were not done."""
        return [part.name for part in self.parts if part.result == "not done"]


def prove(
    bundle: Bundle, runtime: str, folder: Path, say: Callable[[Part], None] = lambda _: None, progress: bool = True
) -> Proof:
    """Builds a bundle for a runtime, opens, verifies, evaluates, times and reports it, and writes `folder`.

    Where the runtime can also be built in parts (`build --in-parts`), both forms are built and opened; the other steps
    take the one that a user gets. A step that fails leaves out those that need it and is told, not raised. Where
    nothing here can execute what was built, the manifest says so.

    Args:
        bundle: takes the records of the steps.
        runtime: what executes it.
        folder: made where it is missing; files of the same names are replaced.
        say: told each step when it has ended.
        progress: show bars.

    Raises:
        BundleError: the folder cannot be written.
    """
    bundle.require_writable()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(f"expected a folder for the proof, got {folder} ({error.strerror}): name another") from error
    (folder / "doctor.txt").write_text(for_people(diagnose()) + "\n", encoding="utf-8")
    proof = Proof()

    def step(name: str, run: Callable[[], str], excuse: str = "") -> bool:
        """Whether it was done. It is on record before it begins, in case the process ends with it."""
        part = Part(name, "not done" if excuse else "started", excuse)
        proof.parts.append(part)
        _write(proof, bundle, runtime, folder)
        if not excuse:
            _finish(proof, part, run)
            _write(proof, bundle, runtime, folder)
        say(part)
        return part.result == "done"

    missing, executed = "", False
    for name, run in (
        ("build", lambda: _build(bundle, runtime, folder)),
        (OPEN, lambda: _open(bundle, runtime)),
        ("verify", lambda: _verify(bundle, runtime, progress)),
    ):
        done = step(name, run, missing)
        executed = executed or (done and name == OPEN)
        missing = missing or ("" if done else proof.not_executed or f"{name} failed")
    step("evaluate", lambda: _evaluate(bundle, runtime, progress), missing or _no_labels_for(bundle))
    step("time", lambda: _time(bundle, runtime, progress), missing)
    if _in_parts(bundle, runtime):  # last, so that it cannot take the others with it
        step(PARTS, lambda: _open(bundle, runtime, parts=True), "" if executed else missing)
    if proof.not_executed:
        note_not_run(bundle, runtime, proof.not_executed)
    step("files for Polygraphy", lambda: _exchange(bundle, runtime, folder, executed))
    step("report", lambda: str(write_report([bundle], folder / "report.html")))
    return proof


def _finish(proof: Proof, part: Part, run: Callable[[], str]) -> None:
    """Runs a step that was started."""
    try:
        part.found, part.result = run(), "done"
    except NotExecutedError as error:
        part.found, part.result = str(error), "not done"
        proof.not_executed = str(error)
    except AlgmDeployError as error:
        part.found, part.result = str(error), "failed"
        proof.error = proof.error or error


# --- steps -----------------------------------------------------------------------------------------------------------


def _build(bundle: Bundle, runtime: str, folder: Path) -> str:
    kept = bundle.path / "reports" / f"build-{runtime}.log"  # of a builder that crashed
    kept.unlink(missing_ok=True)
    (folder / LOG).unlink(missing_ok=True)
    try:
        lines, engines = _built(bundle, runtime)
    finally:
        if kept.is_file():
            shutil.copyfile(kept, folder / LOG)
    if engines:
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.writelines(f"{line}\n" for engine in engines for line in _log_of(engine))
    return "; ".join(line.strip() for line in lines)


def _built(bundle: Bundle, runtime: str) -> tuple[list[str], list[Engine]]:
    """What was built, in lines for people and in records: both forms, or the single engine where parts are refused."""
    if not _in_parts(bundle, runtime):
        return build(bundle, runtime), _single(bundle, runtime)
    try:
        lines = build(bundle, runtime, in_parts=True)
    except BuildError as error:
        lines = build(bundle, runtime)
        return [*lines, f"no engines of the parts between merges: {error}"], _single(bundle, runtime)
    parts = bundle.found(EngineStretches, runtime)
    assert parts is not None
    return lines, [*([] if parts.single_refused else _single(bundle, runtime)), *parts.engines]


def _in_parts(bundle: Bundle, runtime: str) -> bool:
    """Whether the bundle's network can be built in parts, too: not where token counts are known beforehand."""
    return "in_parts" in row_of(runtime).build_options and not bundle.recipe.merging.static


def _single(bundle: Bundle, runtime: str) -> list[Engine]:
    engine = bundle.found(Engine, runtime)
    return [engine] if engine else []


def _log_of(engine: Engine) -> list[str]:
    return [*engine.log, *(f"layer: {name} ({kind})" for name, kind in engine.builder_layers)]


def _open(bundle: Bundle, runtime: str, **options: Any) -> str:
    with runner(bundle, runtime, **options) as run:
        how = [f"on {run.device_name}", *(f"{name}: {value}" for name, value in run.execution.items())]
        return ", ".join(how) + (f"; refused: {run.refused}" if run.refused else "")


def _verify(bundle: Bundle, runtime: str, progress: bool) -> str:
    record = verify(bundle, runtime, progress=progress)
    told = "; ".join(
        f"{link.number} {link.name} {'ok' if link.passed else 'FAILED'}: {link.measured}" for link in record.links
    )
    if not record.passed:
        raise GateError(f"the parity chain failed: {told}")
    return told


def _no_labels_for(bundle: Bundle) -> str:
    """Why the labelled pictures that ship say nothing of the bundle's network; empty where they do."""
    if bundle.recipe.class_names == labelled_pictures().class_names and not takes_whole_frames(bundle.recipe):
        return ""
    command = f"algm-deploy evaluate {quote(str(bundle.path))} --data DATASET"
    return f"the labelled pictures that ship have other classes or another size: `{command}`"


def _evaluate(bundle: Bundle, runtime: str, progress: bool) -> str:
    record = evaluate(bundle, labelled_pictures(), runtime, progress=progress)
    return f"mIoU {record.miou_percent:.2f} % of {counted(record.images, 'drawn scenes')}"


def _time(bundle: Bundle, runtime: str, progress: bool) -> str:
    records = bench(bundle, runtime, progress=progress)
    return "; ".join(
        f"{variant_title(one.variant)} {f'{one.batch_ms_mean_of_medians:.2f} ms' if one.stable else 'not stable'}"
        for one in records
    )


# --- Polygraphy ------------------------------------------------------------------------------------------------------


def _exchange(bundle: Bundle, runtime: str, folder: Path, executed: bool) -> str:
    """Inputs, and outputs of PyTorch and of the runtime where it executes; what Polygraphy sees; commands to paste."""
    target = folder / POLYGRAPHY
    compare(bundle, runtimes=("torch", runtime if executed else "torch"), count=2, output=target)
    if not executed:
        (target / "second.json").unlink()
    graphs = [name for name in (ONNX, TENSORRT_ONNX) if name in bundle.files]
    for name in graphs:
        command = [sys.executable, "-c", _INSPECT, "inspect", "model", str(bundle.file(name)), "--show", "layers"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own interpreter
        if done.returncode:
            raise BundleError(f"expected Polygraphy to show {name}, it ended with {done.stderr.strip()[-300:]}")
        (target / f"{name}.txt").write_text(done.stdout.replace(str(bundle.path), bundle.path.name), encoding="utf-8")
    (target / "commands.sh").write_text(_commands(bundle, runtime), encoding="utf-8")
    return f"{target}: what Polygraphy tells of {' and '.join(graphs)}, inputs, outputs, commands.sh"


def _commands(bundle: Bundle, runtime: str) -> str:
    """Commands of Polygraphy on the bundle's files, to run in this folder."""
    lines = [
        "# Run in this folder. The tolerances leave room for rounding; near a threshold a merge may still differ.",
        f"BUNDLE={quote(str(bundle.path.resolve()))}",
        f'polygraphy run "$BUNDLE/{ONNX}" --onnxrt --load-inputs inputs.json --load-outputs first.json \\',
        "  --check-error-stat median --atol 1e-2 --rtol 1e-2",
    ]
    if TENSORRT_ONNX in bundle.files:
        command = f"python -m algm_deploy.runners.tensorrt.polygraphy {runtime}"
        lines += [
            f'{command} inspect model "$BUNDLE/{TENSORRT_ONNX}" --display-as trt --strongly-typed',
            "# What follows needs the GPU.",
            f'{command} inspect model "$BUNDLE/{row_of(runtime).own}" --model-type engine --show layers',
            f'{command} run "$BUNDLE/{row_of(runtime).own}" --trt --model-type engine \\',
            "  --load-inputs inputs.json --load-outputs first.json --check-error-stat median --atol 5e-2 --rtol 5e-2",
        ]
    return "\n".join([*lines, ""])


# --- what is written after every step --------------------------------------------------------------------------------


def _write(proof: Proof, bundle: Bundle, runtime: str, folder: Path) -> None:
    engine = bundle.found(Engine, runtime)
    facts = {
        "runtime": runtime,
        "steps": proof.parts,
        "not_done": proof.left_out,
        "not_executed": proof.not_executed,
        "machine": environment(devices=True),
        "native_sources": made_from(),
        "plugin_sources": engine.plugin_sources if engine else None,
        "files_sha256": {name: entry.sha256 for name, entry in sorted(bundle.files.items())},
    }
    with write_atomically(folder / PROOF) as path:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1))
    shutil.copyfile(bundle.path / MANIFEST, folder / MANIFEST)
    if (digest := digest_file(runtime)) in bundle.files:
        shutil.copyfile(bundle.path / digest, folder / Path(digest).name)
