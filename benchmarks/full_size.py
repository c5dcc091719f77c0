"""Networks at full size on one machine: export, parity chain and engine, with time and peak memory of each.

    python benchmarks/full_size.py segvit_vit_l16_ade20k eomt_vit_l16_ade20k=0.6 -o benchmarks/records/full_size.json
    python benchmarks/full_size.py --runtime onnxruntime-cuda --precision fp16 deit_vit_b16_ade20k -o record.json
    python benchmarks/full_size.py --runtime onnxruntime-cuda --precision fp32 fp16 bf16 --jobs 4 -o record.json

The tests run every family at toy size; this runs a recipe as it is, on random weights under its authors' names; without
a recipe one of each family. Random weights make patches less alike than training does, so a recipe may be given another
threshold of CLAP. Every step is the command that a user types, in a process of its own, and `--jobs` rows are at work
at a time: what an export does needs little more than one core. Seconds of such rows are those of a machine that is
shared. Rows side by side share the memory too, a GPU's included: one that fails for want of it, or that a signal ends,
is made again at the end, when no other is at work. Its record is of that, beside the steps of the first time.
What a command prints comes in one piece when it ends. Of the two CPU steps, the parity chain takes one synthetic scene
and the engine is built and not executed; `--runtime` holds another runtime to the chain instead, such as one on a GPU,
and `--reference cuda` lets PyTorch compute there what the runtime is held to. `--scenes`: one tells little of labels in
16 bits, where a few decisions fall otherwise by noise and each moves labels.
A step that fails ends its recipe and stands in the record; rows of other recipes stay, each with its environment.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from trained import write

from algm_deploy.bundle.records import Engine, Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.environment import environment, usable_cores
from algm_deploy.errors import RecipeError, out_of_memory
from algm_deploy.models.checkpoints.weights import checkpoint_shapes
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.reading import recipe, recipe_names
from algm_deploy.runners.registry import row_of

MAIN = "import sys; from algm_deploy.cli import main; sys.exit(main())"
CPU, ENGINE = "onnxruntime-cpu", "tensorrt-rtx"
DENSE = ["merging.clap_layers=[]", "merging.gbm_layers=[]"]
PRECISIONS = "fp32", "fp16", "bf16"
RANDOM_ALIKE = "0.6"  # CLAP's threshold at which random weights merge in every family
DEMO = "demo"  # its network is small
SEED = 0
BUNDLE = "bundle"
KIB_PER_GIB = 2**20
_GROUPS: set[int] = set()  # process groups of commands that run, which Ctrl-C does not reach
OUR_OWN = re.compile("expected enough (device )?memory")  # how this package says that it ran out; libraries differ


def main() -> None:
    options = arguments()
    rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"] if options.output.exists() else {}
    asked = [(argument, precision) for precision in options.precision for argument in options.recipes]
    with tqdm(total=len(asked), unit="network") as bar:
        for key, found in made(asked, options):
            rows[key] = found
            write({"schema_version": 2, "rows": rows}, options.output)
            later = "; once more at the end, alone" if deserves_another(found) else ""
            tqdm.write(f"{key}: {outcome(found)}{later}\n")
            bar.update("beside_others" not in found)


def made(asked: Sequence[tuple[str, str]], options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows by key as they are done: so many at a time, then those again, one by one, that may have lacked memory."""
    again: list[tuple[tuple[str, str], dict[str, Any]]] = []
    # A thread waits for the processes of its row.
    with limited_threads(options.jobs), ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(keyed_row, *one, options): one for one in asked}
        try:
            for done in as_completed(running):
                key, found = done.result()
                found["rows_at_a_time"] = options.jobs
                if deserves_another(found):
                    again.append((running[done], found))
                yield key, found
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for group in list(_GROUPS):
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            raise
    for one, first in again:
        key, found = keyed_row(*one, options)
        beside = {name: first[name] for name in ("rows_at_a_time", "steps")}
        yield key, found | {"rows_at_a_time": 1, "beside_others": beside}


def deserves_another(found: dict[str, Any]) -> bool:
    """Whether a row may have lacked the memory that its neighbours had: a step says so, or a signal ended it, of which
    it could say nothing."""
    failed = [taken for taken in found["steps"].values() if taken["exit_code"]]
    lacked = any(one["exit_code"] < 0 or lacks_memory(one.get("error", "")) for one in failed)
    return lacked and found["rows_at_a_time"] > 1


def lacks_memory(error: str) -> bool:
    return bool(OUR_OWN.search(error)) or out_of_memory(RuntimeError(error))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; without recipes one of each family, whose random weights merge at `RANDOM_ALIKE`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE[=CLAP_THRESHOLD]", help="default: one of each family")
    parser.add_argument(
        "--families", action="store_true", help="one recipe of each family, beside those that are named"
    )
    parser.add_argument("--clap-threshold", help="of ALGM, for recipes that are given none here; with families 0.6")
    parser.add_argument("--precision", nargs="+", default=["fp32"], metavar="PRECISION", help=", ".join(PRECISIONS))
    parser.add_argument("--runtime", help=f"of the parity chain; default: {CPU}, then an engine of {ENGINE}")
    parser.add_argument("--reference", choices=("cpu", "cuda"), default="cpu", help="what PyTorch computes on")
    parser.add_argument("--scenes", type=int, default=1, help="of the parity chain")
    parser.add_argument("--dense", action="store_true", help="the network without merging")
    parser.add_argument("--export-only", action="store_true", help="no parity chain and no engine")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time, which share the cores")
    parser.add_argument("-o", "--output", type=Path, default=Path("full_size.json"))
    options = parser.parse_args(words)
    # The option takes as many words as follow it, recipes among them.
    options.recipes += [word for word in options.precision if word not in PRECISIONS]
    options.precision = [word for word in options.precision if word in PRECISIONS]
    if not options.precision or options.jobs < 1:
        parser.error(f"expected precisions of {', '.join(PRECISIONS)}, and at least one job")
    if options.families or not options.recipes:
        options.recipes += families()
        options.clap_threshold = options.clap_threshold or RANDOM_ALIKE
    try:
        for argument in options.recipes:
            recipe(name_of(argument))
    except RecipeError as error:
        parser.error(str(error))
    return options


def families() -> list[str]:
    """A recipe of each family, as the support table counts them: the first by name, the demo's apart."""
    first: dict[str, str] = {}
    for name in recipe_names():
        if name != DEMO:
            first.setdefault(recipe(name).network.architecture.name, name)
    return list(first.values())


def name_of(argument: str) -> str:
    return argument.partition("=")[0]


@contextmanager
def limited_threads(jobs: int) -> Iterator[None]:
    """Rows that run at a time share the cores: each of their processes would start threads for all of them."""
    name = "OMP_NUM_THREADS"
    ours = jobs > 1 and name not in os.environ
    if ours:
        os.environ[name] = str(max(1, usable_cores() // jobs))
    try:
        yield
    finally:
        if ours:
            del os.environ[name]


def keyed_row(argument: str, precision: str, options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """A row of the record and its key, made in a folder of its own."""
    name, _, threshold = argument.partition("=")
    told = (name, precision, options.runtime, "dense" if options.dense else None)
    settings = DENSE if options.dense else clap_settings(name, threshold or options.clap_threshold)
    with tempfile.TemporaryDirectory() as folder:
        proofs = () if options.export_only else proving(options, Path(folder))
        key = " ".join(filter(None, told))
        return key, row(key, name, settings, precision, options.runtime, Path(folder), proofs)


def clap_settings(name: str, threshold: str | None) -> list[str]:
    """The threshold, where the recipe merges by one of CLAP."""
    return [f"merging.clap_threshold={threshold}"] if threshold and recipe(name).merging.method == "algm" else []


def outcome(found: dict[str, Any]) -> str:
    """What became of a row, in words."""
    failed = [name + ended(taken["exit_code"]) for name, taken in found["steps"].items() if taken["exit_code"]]
    links = [name for name, link in found.get("links", {}).items() if not link["passed"]]
    said = f"FAILED: {', '.join(failed + links)}" if failed or links else "passed"
    return f"{said}, {sum(taken['seconds'] for taken in found['steps'].values()):.0f} s"


def ended(code: int) -> str:
    """What there is to say of an exit code, in brackets; of a signal, as the command could not."""
    return f" (ended by {signal.Signals(-code).name})" if code < 0 else ""


def proving(options: argparse.Namespace, folder: Path) -> tuple[list[str], ...]:
    """The commands after the export."""
    bundle, runtime = str(folder / BUNDLE), options.runtime
    told = ["--count", str(options.scenes), "--reference", options.reference]
    verify = ["verify", bundle, "--runtime", runtime or CPU, *told]
    build = ["build", bundle, "--runtime", runtime or ENGINE]
    return (verify, build) if runtime is None else (build, verify) if row_of(runtime).builds else (verify,)


def row(
    key: str,
    name: str,
    settings: list[str],
    precision: str,
    runtime: str | None,
    folder: Path,
    proofs: Sequence[list[str]],
) -> dict[str, Any]:
    """Record of one recipe: what each command took, and what the bundle's manifest then says; `key` is its heading. The
    making of random weights is a step, `checkpoint`, only where memory does not suffice for it."""
    steps: dict[str, dict[str, Any]] = {}
    commands: list[list[str]] = []
    parameters, start = None, time.perf_counter()
    try:
        checkpoint, parameters = checkpoint_apart(recipe(name).network, folder / "checkpoint")
    except (RuntimeError, MemoryError) as error:  # a pool that broke is one of the former
        steps["checkpoint"] = lacking(error) | {"seconds": round(time.perf_counter() - start, 1)}
    else:
        export = ["export", str(checkpoint), "--recipe", name, "--precision", precision, "-o", str(folder / BUNDLE)]
        commands = [export + [part for setting in settings for part in ("--set", setting)], *proofs]
    for command in commands:
        taken, printed = step(command)
        printed = readable(printed, folder)
        steps[command[0]] = taken | reason(taken["exit_code"], printed)
        tqdm.write(f"{key}: {command[0]}\n{printed}\n")
        if steps[command[0]]["exit_code"]:
            break
    result: dict[str, Any] = {
        "environment": asdict(environment(devices=True)),
        "parameters": parameters,
        "settings": settings or "recipe's",
        "steps": steps,
    }
    if (folder / BUNDLE).exists():
        written = Bundle.open(folder / BUNDLE)
        chain = written.found(Parity, runtime or CPU)
        result["reference"] = chain.reference if chain else None
        result["scenes"] = chain.images if chain else None
        result["verify_seconds"] = chain.seconds if chain else None
        result["links"] = {
            link.name: {"passed": link.passed, "measured": link.measured, "gate": link.gate}
            for link in (chain.links if chain else ())
        }
        result["bundle_bytes"] = sum(file.size_bytes for file in written.files.values())
        if built := written.found(Engine, runtime or ENGINE):
            told = ("version", "precision", "engine_bytes", "compute_capabilities")
            result["engine"] = {key: getattr(built, key) for key in told}
    return result


def checkpoint_apart(network: Network, target: Path) -> tuple[Path, int]:
    """`random_checkpoint` in a process of its own: Linux counts the peak of the process that starts another as that of
    the other."""
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        return apart.submit(random_checkpoint, network, target).result()


def lacking(error: Exception) -> dict[str, Any]:
    """How a process ended that memory did not suffice for; raises what has another reason."""
    if isinstance(error, BrokenProcessPool):  # a signal ended it, as the system does then; which one is not told
        return {"exit_code": -signal.SIGKILL}
    if not out_of_memory(error):
        raise error
    return {"exit_code": 1, "error": f"{type(error).__name__}: {error}"}


def random_checkpoint(network: Network, target: Path) -> tuple[Path, int]:
    """Random weights under the names of the network's authors, and how many there are."""
    shapes = checkpoint_shapes(network)
    generator = torch.Generator().manual_seed(SEED)
    state = {key: random_weight(key, shape, generator) for key, shape in shapes.items()}
    target.mkdir()
    parts: dict[str, dict[str, Any]] = {"latest.pth": {"state_dict": state}}
    if "blocks.0.norm1.weight" in state:  # a backbone's own file
        head = {key: state.pop(key) for key in list(state) if key.startswith("decode_head.")}
        parts = {"backbone.pth": state, "head.pth": {"state_dict": head}}
    for file, content in parts.items():
        torch.save(content, target / file)
    path = target if len(parts) > 1 else target / next(iter(parts))
    return path, sum(math.prod(shape) for shape in shapes.values())


def random_weight(key: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A weight of a size that keeps activations of order one through the network."""
    noise = torch.randn(shape, generator=generator)
    if key.endswith(("pos_embed", "token")):
        return noise / 10
    if key.endswith(("running_var", "gamma")):
        return 0.5 + noise.abs()
    if len(shape) > 1:
        return noise / math.sqrt(math.prod(shape[1:]))
    return noise / 10 + float(key.endswith("weight"))


def readable(output: str, folder: Path) -> str:
    """What a command printed, without the folder that goes with the row and what could be done next in it."""
    lines = output.replace(f"{folder}{os.sep}", "").rstrip().splitlines()
    return "\n".join(f"  {line}" for line in lines if not line.startswith("next: "))


def reason(code: int, printed: str) -> dict[str, str]:
    """The line that says why a command failed: the product's own, or the last of a traceback. A gate that is missed has
    none, nor has what a signal ended."""
    lines = [line.strip() for line in printed.splitlines()] if code > 0 else []
    own = [line for line in lines if line.startswith("algm-deploy ")]
    traced = lines[-1:] if any(line.startswith("Traceback ") for line in lines) else []
    return {"error": (own or traced)[-1]} if own or traced else {}


def step(command: list[str]) -> tuple[dict[str, Any], str]:
    """Runs one command of the product; what it took, and what it printed.

    It ends with the command, and ends what that started: a builder of engines may outlive a command that was killed,
    and hold what it prints to.
    """
    start = time.perf_counter()
    words = [sys.executable, "-u", "-c", MAIN, *command]  # unbuffered: results and errors come in their order
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(words, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True)  # noqa: S603  a list, no shell
        _GROUPS.add(process.pid)
        try:
            # Until it is waited for below, its id is that of its group and of no other.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            _GROUPS.discard(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)  # so that nobody waits for it again
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    taken = {
        "exit_code": process.returncode,
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_memory_gib": round(usage.ru_maxrss / KIB_PER_GIB, 2),
    }
    return taken, output


if __name__ == "__main__":
    main()
