"""How much of the time that merging could save is saved: ONNX Runtime on the CPU, batch 1.

    python benchmarks/merge_efficiency_cpu.py BUNDLE --images PHOTOS -o benchmarks/records/merge_efficiency_cpu.json

merge_efficiency = (dense - merged) / (dense - truncated). The truncated network drops tokens at the same two places, to
the counts this very photo has after merging, and ends in the same tail. All three are timed in turn, photo by photo.

Wall times on a machine with other work jump; processor times of a single thread do so much less, hence `--threads 1`
and both clocks in the record.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from tqdm import tqdm
from trained import write

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import build, parity_windows
from algm_deploy.environment import environment
from algm_deploy.errors import GateError
from algm_deploy.models.loading import load_network
from algm_deploy.native_libraries import find_library
from algm_deploy.parity.chain import verify
from algm_deploy.pictures.sources import find_images
from algm_deploy.timing.variants import VARIANTS
from runtimes import variant_graph

RUNTIME = "onnxruntime-cpu"
CLOCKS = {"wall_ms": time.perf_counter, "processor_ms": time.process_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--images", type=Path, nargs="+", default=[], help="photos; default: synthetic scenes")
    parser.add_argument("--count", type=int, default=3, help="how many photos")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each network and photo")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()

    bundle = Bundle.open(options.bundle)
    build(bundle, RUNTIME)
    windows = parity_windows(bundle.recipe, find_images(options.images) if options.images else [], options.count)
    parity = verify(bundle, RUNTIME, windows)
    if not parity.passed:
        raise GateError("parity failed: nothing is timed")
    photos = [timed(bundle, window[None], options) for window in tqdm(windows, "photos")]
    record = {
        "schema_version": 1,
        "environment": asdict(environment()),
        "load_average": os.getloadavg(),
        "runtime": RUNTIME,
        "threads": options.threads,
        "batch": 1,
        "network": bundle.recipe.name,
        "precision": bundle.recipe.precision,
        "output": bundle.recipe.output,
        "custom_operators": find_library("ort_custom_op") is not None,
        "pictures": "photos" if options.images else "synthetic scenes",
        "parity_passed": parity.passed,
        "repeats": options.repeats,
        "photos": photos,
        **{clock: summary(photos, clock) for clock in CLOCKS},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write(record, options.output)
    for clock in CLOCKS:
        print(clock, record[clock])


def timed(bundle: Bundle, image: np.ndarray, options: argparse.Namespace) -> dict[str, object]:
    """Median times of the three networks on one photo."""
    model, recipe = load_network(bundle), bundle.recipe
    custom = find_library("ort_custom_op")
    with tempfile.TemporaryDirectory() as folder:
        counts: list[int] = []
        sessions = {}
        for variant in ("merged", "dense", "truncated"):
            path = Path(folder) / f"{variant}.onnx"
            ir.save(variant_graph(model, recipe, variant, counts, "cpu", custom is not None), path)
            sessions[variant] = session(path, options.threads, custom)
            if variant == "merged":
                counts = run(sessions[variant], image, bundle)[1][0].tolist()
        times: dict[str, dict[str, list[float]]] = {clock: {v: [] for v in VARIANTS} for clock in CLOCKS}
        for repeat in range(options.repeats + 2):
            for variant in VARIANTS:
                before = {clock: read() for clock, read in CLOCKS.items()}
                run(sessions[variant], image, bundle)
                for clock, read in CLOCKS.items():
                    if repeat >= 2:  # the first runs allocate
                        times[clock][variant].append(1e3 * (read() - before[clock]))
    return {
        "tokens": counts,
        **{clock: {v: statistics.median(times[clock][v]) for v in VARIANTS} for clock in CLOCKS},
    }


def session(path: Path, threads: int, custom: Path | None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    if custom is not None:
        options.register_custom_ops_library(str(custom))
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(network: ort.InferenceSession, image: np.ndarray, bundle: Bundle) -> list[np.ndarray]:
    defaults = bundle.signature.defaults
    names = {i.name for i in network.get_inputs()}
    feeds = {"image": image, **{n: np.array(v, np.float32) for n, v in defaults.items() if n in names}}
    options = ort.RunOptions()
    options.only_execute_path_to_fetches = True
    found: list[np.ndarray] = network.run([bundle.recipe.output, "token_counts"], feeds, options)
    return found


def summary(photos: list[dict[str, object]], clock: str) -> dict[str, float]:
    """Times averaged over the photos, and the efficiency: of the averages, and of the worst and best photo."""
    table = [photo[clock] for photo in photos]
    mean = {v: statistics.fmean(row[v] for row in table) for v in VARIANTS}  # type: ignore[index]
    each = [efficiency(row) for row in table]  # type: ignore[arg-type]
    return {
        **mean,
        "speedup": mean["dense"] / mean["merged"],
        "merge_efficiency": efficiency(mean),
        "merge_efficiency_min": min(each),
        "merge_efficiency_max": max(each),
    }


def efficiency(times: dict[str, float]) -> float:
    return (times["dense"] - times["merged"]) / (times["dense"] - times["truncated"])


if __name__ == "__main__":
    main()
