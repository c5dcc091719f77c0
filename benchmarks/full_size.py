"""Networks at full size on one machine: export, parity chain and engine, with time and peak memory of each.

    python benchmarks/full_size.py segvit_vit_l16_ade20k eomt_vit_l16_ade20k=0.6 -o benchmarks/records/full_size.json
    python benchmarks/full_size.py --runtime onnxruntime-cuda --precision fp16 deit_vit_b16_ade20k -o record.json
    python benchmarks/full_size.py --runtime onnxruntime-cuda --precision fp32 fp16 bf16 --jobs 4 -o record.json

The tests run every family at toy size; this runs a recipe as it is, on random weights under its authors' names; without
a recipe one of each family. Random weights make patches less alike than training does, so a recipe may be given another
threshold of CLAP. Every step is the command that a user types, in a process of its own, and `--jobs` rows are at work
at a time: what an export does needs little more than one core. Seconds of such rows are those of a machine that is
shared. Of the two CPU steps, the parity chain takes one synthetic scene
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
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
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
from algm_deploy.errors import RecipeError
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


def main() -> None:
    options = arguments()
    rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"] if options.output.exists() else {}
    asked = [(argument, precision) for precision in options.precision for argument in options.recipes]
    limit_threads(options.jobs)
    with ThreadPoolExecutor(options.jobs) as pool:  # a thread waits for the processes of its row
        running = [pool.submit(keyed_row, *one, options) for one in asked]
        for done in tqdm(as_completed(running), total=len(running), unit="network"):
            key, rows[key] = done.result()
            tqdm.write(f"{key}: {outcome(rows[key])}")
            write({"schema_version": 2, "rows": rows}, options.output)


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


def limit_threads(jobs: int) -> None:
    """Rows that run at a time share the cores: each of their processes would start threads for all of them."""
    if jobs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // jobs)))


def keyed_row(argument: str, precision: str, options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """A row of the record and its key, made in a folder of its own."""
    name, _, threshold = argument.partition("=")
    told = (name, precision, options.runtime, "dense" if options.dense else None)
    settings = DENSE if options.dense else clap_settings(name, threshold or options.clap_threshold)
    with tempfile.TemporaryDirectory() as folder:
        proofs = () if options.export_only else proving(options, Path(folder))
        return " ".join(filter(None, told)), row(name, settings, precision, options.runtime, Path(folder), proofs)


def clap_settings(name: str, threshold: str | None) -> list[str]:
    """The threshold, where the recipe merges by one of CLAP."""
    return [f"merging.clap_threshold={threshold}"] if threshold and recipe(name).merging.method == "algm" else []


def outcome(found: dict[str, Any]) -> str:
    """What became of a row, in words."""
    failed = [name for name, taken in found["steps"].items() if taken["exit_code"]]
    links = [name for name, link in found.get("links", {}).items() if not link["passed"]]
    said = f"FAILED: {', '.join(failed + links)}" if failed or links else "passed"
    return f"{said}, {sum(taken['seconds'] for taken in found['steps'].values()):.0f} s"


def proving(options: argparse.Namespace, folder: Path) -> tuple[list[str], ...]:
    """The commands after the export."""
    bundle, runtime = str(folder / BUNDLE), options.runtime
    told = ["--count", str(options.scenes), "--reference", options.reference]
    verify = ["verify", bundle, "--runtime", runtime or CPU, *told]
    build = ["build", bundle, "--runtime", runtime or ENGINE]
    return (verify, build) if runtime is None else (build, verify) if row_of(runtime).builds else (verify,)


def row(
    name: str, settings: list[str], precision: str, runtime: str | None, folder: Path, proofs: Sequence[list[str]]
) -> dict[str, Any]:
    """Record of one recipe: what each command took, and what the bundle's manifest then says."""
    checkpoint, parameters = checkpoint_apart(recipe(name).network, folder / "checkpoint")
    export = ["export", str(checkpoint), "--recipe", name, "--precision", precision, "-o", str(folder / BUNDLE)]
    steps = {}
    for command in (export + [part for setting in settings for part in ("--set", setting)], *proofs):
        steps[command[0]] = step(command)
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


def step(command: list[str]) -> dict[str, Any]:
    """Runs one command of the product; its output is shown."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", MAIN, *command])  # noqa: S603  a list, no shell
    _, status, usage = os.wait4(process.pid, 0)
    return {
        "exit_code": os.waitstatus_to_exitcode(status),
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_memory_gib": round(usage.ru_maxrss / KIB_PER_GIB, 2),
    }


if __name__ == "__main__":
    main()
