"""Runtimes and precisions on one CPU in turns, dense and merged, on photos, batch 1.

    python benchmarks/cpu_runtimes.py CHECKPOINT --images PHOTOS --calibrate OTHERS -o cpu_runtimes.json
    python benchmarks/cpu_runtimes.py CHECKPOINT --runs openvino:fp32 openvino:bf16 --images PHOTOS -o x.json

With `--budget 0.43,0.225` there is a third network, which merges that share of every picture's windows and tokens; the
published record has it, and five photos (`--count 5`).

A run is RUNTIME:PRECISION. Each precision is exported once, each runtime built and verified on two of the photos; one
that fails the parity chain is not timed. Then every photo goes through all networks, one after the other,
`--repeats` times. The record holds medians by the wall's and by the processor's clock, averaged over the photos, and
what each runner says of its arithmetic and threads: where the processor has no bf16, OpenVINO computes a bundle in bf16
in fp32. Bundles that `--work` kept are taken up again, on another machine too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from trained import write

from algm_deploy.bundle.manifest import MANIFEST
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli.arguments import budget
from algm_deploy.deployment import build, export, parity_windows, verify
from algm_deploy.environment import environment, processor_flags
from algm_deploy.pictures.sources import find_images
from algm_deploy.runners.contract import Runner, runner
from algm_deploy.timing.variants import variant_bundle, variant_runner

RUNS = ("onnxruntime-cpu:fp32", "onnxruntime-cpu:int8", "openvino:fp32", "openvino:bf16", "openvino:int8")
CLOCKS = {"wall_ms": time.perf_counter, "processor_ms": time.process_time}
WARM_UP = 2
PAUSE_S = 0.1  # until idle threads of the network before sleep: ONNX Runtime's wait in a loop for more work first
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "amx_fp16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--recipe", help="name or file; default: variant.yml beside the checkpoint")
    parser.add_argument("--tau", type=float, help="CLAP's threshold; default: the recipe's")
    parser.add_argument("--budget", type=budget, help="a third network beside dense and merged, such as 0.43,0.225")
    parser.add_argument("--output-kind", choices=("labels", "scores"), default="labels")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), metavar="RUNTIME:PRECISION")
    parser.add_argument("--images", type=Path, nargs="+", default=[], help="photos; default: synthetic scenes")
    parser.add_argument("--calibrate", type=Path, nargs="+", default=[], help="photos that int8 measures ranges on")
    parser.add_argument("--count", type=int, default=3, help="how many photos")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each network and photo")
    parser.add_argument("--work", type=Path, help="folder that keeps the bundles")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        work = options.work or Path(scratch)
        bundles = {run: bundle_of(run.partition(":")[2], options, work) for run in options.runs}
        networks: dict[tuple[str, str], Runner] = {}
        proven: dict[str, Any] = {}
        for run, bundle in bundles.items():
            runtime, _, precision = run.partition(":")
            proven[run] = proof(bundle, runtime, options)
            if proven[run]["passed"]:
                dense = variant_bundle(bundle, "dense", ())
                networks[run, "dense"] = stack.enter_context(variant_runner(dense, runtime, bundle))
                networks[run, "merged"] = stack.enter_context(runner(bundle, runtime))
            if options.budget:
                constant = bundle_of(precision, options, work, options.budget)
                proven[f"{run} budget"] = proof(constant, runtime, options)
                if proven[f"{run} budget"]["passed"]:
                    networks[run, "budget"] = stack.enter_context(runner(constant, runtime))
        first = next(iter(bundles.values()))
        windows = parity_windows(first.recipe, find_images(options.images) if options.images else [], options.count)
        photos = [timed(networks, window[None], options.repeats) for window in tqdm(windows, "photos")]
        record = {
            "schema_version": 1,
            "environment": asdict(environment()),
            "processor_features": [name for name in FEATURES if name in processor_flags()],
            "load_average": os.getloadavg(),
            "checkpoint": options.checkpoint.name,
            "network": first.recipe.name,
            "output": first.recipe.output,
            "batch": 1,
            "thresholds": first.signature.defaults,
            "budget": options.budget,
            "pictures": "photos" if options.images else "synthetic scenes",
            "repeats": options.repeats,
            "parity": proven,
            "runs": {
                f"{run} {variant}": {
                    "execution": network.execution,
                    "custom_operators": network.custom_operators,
                    "tokens": [photo[run, variant]["tokens"] for photo in photos],
                    **{clock: statistics.fmean(photo[run, variant][clock] for photo in photos) for clock in CLOCKS},
                }
                for (run, variant), network in networks.items()
            },
        }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write(record, options.output)
    for name, facts in record["runs"].items():
        print(
            f"{name:32} {facts['wall_ms']:8.1f} ms  {facts['processor_ms']:8.1f} ms of processor  {facts['execution']}"
        )


def proof(bundle: Bundle, runtime: str, options: argparse.Namespace) -> dict[str, Any]:
    """Builds a bundle for a runtime; what each link of the parity chain measured."""
    build(bundle, runtime)
    report = verify(bundle, runtime, images=options.images, count=2)
    return {link.name: link.measured for link in report.links} | {"passed": report.passed}


def bundle_of(
    precision: str, options: argparse.Namespace, folder: Path, shares: tuple[float, float] | None = None
) -> Bundle:
    """The bundle of a precision, which merges by thresholds or by a budget, exported where it is not there."""
    target = folder / (precision if shares is None else f"{precision}-budget-{shares[0]}-{shares[1]}")
    if (target / MANIFEST).is_file():
        return Bundle.open(target)
    settings = {"precision": precision, "output": options.output_kind}
    photos = options.calibrate if precision == "int8" else ()
    tau = options.tau if shares is None else None
    return export(options.checkpoint, target, options.recipe, settings, tau=tau, budget=shares, calibrate=photos).bundle


def timed(networks: dict[tuple[str, str], Runner], image: np.ndarray, repeats: int) -> dict[tuple[str, str], Any]:
    """Tokens after each merge, and median times, of every network on one photo; the networks take turns."""
    times: dict[tuple[str, str], dict[str, list[float]]] = {key: {clock: [] for clock in CLOCKS} for key in networks}
    found: dict[tuple[str, str], Any] = {}
    for repeat in range(repeats + WARM_UP):
        for key, network in networks.items():
            time.sleep(PAUSE_S)
            before = {clock: read() for clock, read in CLOCKS.items()}
            outputs = network.infer({"image": image})
            after = {clock: read() for clock, read in CLOCKS.items()}
            found[key] = outputs["token_counts"][0].tolist()
            if repeat >= WARM_UP:  # the first runs allocate
                for clock in CLOCKS:
                    times[key][clock].append(1e3 * (after[clock] - before[clock]))
    return {
        key: {"tokens": found[key], **{clock: statistics.median(values) for clock, values in clocks.items()}}
        for key, clocks in times.items()
    }


if __name__ == "__main__":
    main()
