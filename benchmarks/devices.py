"""Several GPUs in one process: pictures a second of one GPU alone, and of all of them at once, a thread each.

    python benchmarks/devices.py segmenter_vit_s16_ade20k=0.6 -o benchmarks/records/devices_h200.json

Random weights, fp16, labels out, 32 different pictures at a time in the memory of their GPU. A runner is opened on
every GPU, and each round takes its turns: every GPU alone, then all of them at once. Batch sizes change within a turn
where `--sizes` has several, so that graphs are captured on one GPU while the others run. What a GPU returns for the
same pictures is compared with the first one's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from full_size import random_checkpoint
from torch import Tensor
from trained import new_record, write

from algm_deploy.deployment import build, export
from algm_deploy.errors import GateError
from algm_deploy.recipe.reading import recipe
from algm_deploy.runners.contract import Runner, runner
from runtimes import pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="RECIPE[=CLAP_THRESHOLD]")
    parser.add_argument("--runtime", default="torch")
    parser.add_argument("--devices", nargs="+", help="default: every CUDA device")
    parser.add_argument("--precision", default="fp16", choices=("fp32", "fp16"))
    parser.add_argument("--sizes", nargs="+", type=int, default=[32], help="batch sizes, in turns")
    parser.add_argument("--batches", type=int, default=100, help="batches of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, default=Path("devices.json"))
    options = parser.parse_args()
    devices = options.devices or [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    name, _, threshold = options.recipe.partition("=")
    settings: dict[str, Any] = {"output": "labels", "precision": options.precision, "max_batch": max(options.sizes)}
    if threshold:
        settings["merging.clap_threshold"] = float(threshold)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        checkpoint, _ = random_checkpoint(recipe(name).network, Path(folder) / "checkpoint")
        bundle = export(checkpoint, Path(folder) / "bundle", name, settings).bundle
        build(bundle, options.runtime)
        runners = [stack.enter_context(runner(bundle, options.runtime, device)) for device in devices]
        size = bundle.recipe.network.image_size
        batches = [[pictures(count, size).to(run.device) for count in options.sizes] for run in runners]
        compare(runners, batches)
        record = new_record(name, runtime=options.runtime, precision=options.precision, sizes=options.sizes)
        record["runs"] = measured(runners, batches, options)
    write(record, options.output)
    print(record["runs"])


def compare(runners: Sequence[Runner], batches: Sequence[Sequence[Tensor]]) -> None:
    """Also the first calls, in which graphs are captured.

    Raises:
        GateError: another device returned other labels than the first.
    """
    expected = [runners[0].infer_device({"image": images})["labels"].cpu() for images in batches[0]]
    for run, mine in zip(runners, batches, strict=True):
        for _ in range(3):
            found = [run.infer_device({"image": images})["labels"].cpu() for images in mine]
        if not all(map(torch.equal, found, expected)):
            raise GateError(f"expected of {run.device} the labels of {runners[0].device}, got others")


def measured(
    runners: Sequence[Runner], batches: Sequence[Sequence[Tensor]], options: argparse.Namespace
) -> dict[str, Any]:
    """Pictures a second, medians over the rounds, by device alone and of all at once."""
    found: dict[str, list[float]] = {}
    with ThreadPoolExecutor(len(runners)) as pool:

        def together(chosen: Sequence[int]) -> float:
            start = time.perf_counter()
            list(pool.map(lambda index: work(runners[index], batches[index], options.batches), chosen))
            return (
                len(chosen) * options.batches * sum(options.sizes) / len(options.sizes) / (time.perf_counter() - start)
            )

        for _ in range(options.rounds):
            for index, run in enumerate(runners):
                found.setdefault(str(run.device), []).append(together([index]))
            found.setdefault("all at once", []).append(together(range(len(runners))))
    rates = {name: statistics.median(values) for name, values in found.items()}
    alone = sum(rate for name, rate in rates.items() if name != "all at once")
    return {"images_per_s": rates, "all_at_once_over_the_sum": rates["all at once"] / alone}


def work(run: Runner, batches: Sequence[Tensor], count: int) -> None:
    """So many batches, their sizes in turns, until the device has done them."""
    for index in range(count):
        run.infer_device({"image": batches[index % len(batches)]}, ["labels"])
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)


if __name__ == "__main__":
    main()
