"""What precisions cost trained networks on CPUs: mIoU as a whole and by slice, dense and merged, on all photos.

    python benchmarks/precision_cpu.py export DATASET CHECKPOINT CHECKPOINT --recipe segmenter_vit_s16_camvid --work W
    python benchmarks/precision_cpu.py measure DATASET --work W --seconds 560
    python benchmarks/precision_cpu.py combine DATASET --work W -o precision_camvid.json

`export` makes a bundle of each checkpoint and precision, with scores as output, and calibrates int8 on the photos of
`--calibrate`. With `--budget` they merge by it, and are not measured without merging; thresholds take another `--work`.
`measure` takes each photo through all runtimes and precisions of a network, without merging and with it, by the data
set's protocol; one process a core, one thread a network. Every finished photo is a line of `W/NETWORK/photos.jsonl`: a
run that stops, by itself after `--seconds`, goes on where it stopped. Labels and groups of patches are held to those of
the judge (`JUDGE`), dense to dense and merged to merged, each network deciding for itself. `benchmarks/cpu_runtimes.py`
times the same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from msgspec import convert, to_builtins
from numpy.typing import NDArray
from tqdm import tqdm
from trained import write

from algm_deploy.bundle.manifest import MANIFEST
from algm_deploy.bundle.records import storable
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli.arguments import budget
from algm_deploy.deployment import build, export
from algm_deploy.environment import environment
from algm_deploy.evaluation.datasets import IGNORE, Dataset, Sample, open_dataset
from algm_deploy.evaluation.evaluate import ImageResult, evaluation_of, image_result
from algm_deploy.evaluation.metrics import confusion_matrix
from algm_deploy.parity.pairwise import grouped_otherwise
from algm_deploy.pictures.sliding import MAP_PREFIX, Pending, Prediction, run_all
from algm_deploy.predictor import network_anchors, network_canvas
from algm_deploy.runners.contract import Runner, runner
from algm_deploy.timing.variants import executables, executed_bytes

RUNTIMES, PRECISIONS = ("onnxruntime-cpu", "openvino"), ("fp32", "bf16", "int8")
JUDGE = f"{RUNTIMES[0]}:{PRECISIONS[0]}"  # the run that the others are held to
VARIANTS = ("dense", "merged")
BATCH = 8
LINES = "photos.jsonl"
KEPT = ("images", "windows", "miou_percent", "pixel_accuracy_percent", "iou_percent_by_class", "tokens")
KEPT_OF_SLICES = ("images", "miou_percent", "tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("export", "measure", "combine"))
    parser.add_argument("dataset", type=Path)
    parser.add_argument("checkpoints", nargs="*", type=Path, help="of export: their folders")
    parser.add_argument("--work", type=Path, required=True, help="folder of bundles and results")
    parser.add_argument("--recipe", help="name or file; default: variant.yml beside each checkpoint")
    parser.add_argument("--calibrate", default="images/val", help="folder of the data set that int8 measures ranges on")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="of export")
    parser.add_argument(
        "--budget", type=budget, help="of export: merge by it, such as 0.43,0.225, and not by thresholds"
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        metavar="RUNTIME:PRECISION",
        help="of measure, beside the judge; default: all. A photo that is done is not taken again for others",
    )
    parser.add_argument("--limit", type=int, help="so many photos, spread evenly")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--seconds", type=float, help="begin no photo after so long")
    parser.add_argument("-o", "--output", type=Path, default=Path("precision_camvid.json"))
    options = parser.parse_args()
    {"export": export_all, "measure": measure, "combine": combine}[options.step](options)


# -------------------------------------------------------------------------------------------------------------- export


def export_all(options: argparse.Namespace) -> None:
    """A bundle for each checkpoint and precision that is not there yet, several at once.

    Raises:
        SystemExit: the folder holds bundles that merge by another rule.
    """
    for folder in networks_in(options.work) if options.work.is_dir() else ():
        if budget_of(Bundle.open(folder / PRECISIONS[0])) != options.budget:
            raise SystemExit(f"{folder}: its bundles merge by another rule than was asked for: take another --work")
    asked = [
        (checkpoint, precision, options)
        for checkpoint in options.checkpoints
        for precision in options.precisions
        if not (options.work / checkpoint.name / precision / MANIFEST).is_file()
    ]
    with processes(min(options.workers, max(len(asked), 1)), limit_threads, -(-options.workers // 6)) as pool:
        for line in pool.map(exported, asked):
            print(line, flush=True)


def exported(asked: tuple[Path, str, argparse.Namespace]) -> str:
    """Exports one bundle and builds it for every runtime; says how long it took."""
    checkpoint, precision, options = asked
    started, target = time.perf_counter(), options.work / checkpoint.name / precision
    target.parent.mkdir(parents=True, exist_ok=True)
    photos = options.dataset / options.calibrate if precision == "int8" else ()
    settings = {"precision": precision, "output": "scores", "max_batch": BATCH}
    found = export(checkpoint, target, options.recipe, settings, budget=options.budget, calibrate=photos)
    for runtime in RUNTIMES:
        build(found.bundle, runtime)
    return f"{target}: {time.perf_counter() - started:.0f} s; {'; '.join(found.notes)}"


# ------------------------------------------------------------------------------------------------------------- measure


def measure(options: argparse.Namespace) -> None:
    """Takes photos through all networks until they are done or the time is over."""
    folders = networks_in(options.work)
    with ExitStack() as stack:
        waiting: dict[Future[dict[str, Any]], Path] = {}
        for folder in folders:
            done = {line["name"] for line in lines_of(folder / LINES)}
            share = max(options.workers // len(folders), 1)
            pool = stack.enter_context(processes(share, open_all, folder, options.runs))
            for sample in samples_of(options):
                if sample.name not in done:
                    waiting[pool.submit(measured, sample, options.dataset)] = folder / LINES
        for future in in_time(waiting, options.seconds):
            with waiting[future].open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(future.result(), separators=(",", ":")) + "\n")
    for folder in folders:
        print(folder.name, len(lines_of(folder / LINES)), "photos done", flush=True)


def in_time(waiting: Collection[Future[Any]], seconds: float | None) -> Iterator[Future[Any]]:
    """What is done, as it is; when the time is over, what was begun."""
    left = set(waiting)
    try:
        for future in tqdm(as_completed(waiting, seconds), "photos and networks", len(waiting), mininterval=10):
            left.remove(future)
            yield future
    except TimeoutError:
        print(f"{seconds:g} s are over: what has begun is finished", flush=True)
        yield from as_completed([one for one in left if not one.cancel()])


def processes(count: int, prepare: Any, *given: Any) -> ProcessPoolExecutor:
    """Fresh processes that each begin with `prepare`: threads of PyTorch do not outlive a fork."""
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), prepare, given)


def limit_threads(count: int) -> None:
    torch.set_num_threads(count)
    cv2.setNumThreads(count)


_OPENED: dict[str, Runner] = {}


def open_all(folder: Path, runs: list[str] | None) -> None:
    """Opens the judge and these runs of a network, or all, on one thread each, for as long as this process lives."""
    limit_threads(1)
    for run in dict.fromkeys((JUDGE, *(runs or runs_of(folder)))):
        runtime, _, precision = run.partition(":")
        _OPENED[run] = runner(Bundle.open(folder / precision), runtime, threads=1).__enter__()


def measured(sample: Sample, root: Path) -> dict[str, Any]:
    """One photo through all networks of this process."""
    dataset = dataset_at(root)
    photo, labels = dataset.read(sample)
    digest = sha256(sample.image_path.read_bytes() + sample.label_path.read_bytes()).hexdigest()
    runs: dict[str, Any] = {}
    for variant in variants_of(_OPENED[JUDGE].bundle):
        first: Prediction | None = None
        for run, network in _OPENED.items():
            found = predicted(photo, network, variant)
            first = first or found
            counts = confusion_matrix(labels, found.labels, len(dataset.class_names), IGNORE)
            runs[f"{run} {variant}"] = {
                "made_from": made_from(network, variant),
                "execution": network.execution,
                "result": to_builtins(image_result(sample.name, digest, counts, found.token_counts)),
                "labels_equal": int((found.labels == first.labels).sum()),
                "pixels": found.labels.size,
                "grouped_otherwise": regrouped(first, found),
            }
    return {"name": sample.name, "runs": runs}


def predicted(photo: NDArray[np.uint8], network: Runner, variant: str) -> Prediction:
    """A photo by the protocol of a network, with its token maps."""
    recipe, signature = network.bundle.recipe, network.signature
    canvas = network_canvas(photo, recipe)
    pending = Pending(photo.shape[:2], canvas, network_anchors(canvas, recipe), recipe.network.image_size)
    thresholds: dict[str, Any] = {**thresholds_of(network.bundle, variant)}
    outputs = (recipe.output, "token_counts", *(f"{MAP_PREFIX}{merge}" for merge in signature.merges))

    def compute(windows: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        fitting = windows.astype(signature.image.dtype)
        return network.infer({"image": fitting, **thresholds}, outputs)

    for _ in run_all([pending], compute, BATCH):
        pass
    return pending.prediction()


def variants_of(bundle: Bundle) -> tuple[str, ...]:
    """A network that merges by a budget always merges."""
    return VARIANTS if bundle.signature.defaults else VARIANTS[1:]


def thresholds_of(bundle: Bundle, variant: str) -> dict[str, float]:
    """Its own, or those that nothing reaches."""
    defaults = bundle.signature.defaults
    return dict.fromkeys(defaults, np.inf) if variant == "dense" else defaults


def regrouped(first: Prediction, found: Prediction) -> dict[str, int]:
    """Patches that share their token with others than in the first run, by merge, over all windows."""
    return {
        merge: sum(map(grouped_otherwise, first.token_maps[merge], maps)) for merge, maps in found.token_maps.items()
    }


def made_from(network: Runner, variant: str) -> str:
    """Digest of the files and thresholds that a result depends on: results of different networks never mix."""
    facts = executables(network.bundle, network.runtime), storable(thresholds_of(network.bundle, variant))
    return sha256(repr(facts).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------------------- combine


def combine(options: argparse.Namespace) -> None:
    """Figures of all photos that are done, one row a network, run and variant."""
    wanted = {sample.name for sample in samples_of(options)}
    networks = {folder.name: rows_of(folder, options.dataset, wanted) for folder in networks_in(options.work)}
    record = {
        "schema_version": 1,
        "environment": asdict(environment()),
        "judge": JUDGE,
        "photos_wanted": len(wanted),
        "networks": {name: list(rows) for name, rows in networks.items()},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write(record, options.output)
    for name, rows in record["networks"].items():  # type: ignore[attr-defined]
        print(name)
        for row in rows:
            slices = ", ".join(f"{part} {one['miou_percent']:.2f}" for part, one in row["slices"].items())
            changed = ", ".join(f"{share:.2f}" for share in row["patches_grouped_otherwise_percent"].values())
            print(
                f"  {row['run']:22} {row['variant']:7} {row['images']:4} photos, mIoU {row['miou_percent']:.2f} "
                f"({slices}), labels equal {row['labels_equal_percent']:.3f} %, grouped otherwise {changed} %, "
                f"{row['bytes'] / 1e6:.1f} MB, {row['execution']}"
            )


def rows_of(folder: Path, root: Path, wanted: set[str]) -> Iterator[dict[str, Any]]:
    """The rows of one network.

    Raises:
        SystemExit: results come from networks that differ, as after another export.
    """
    lines = [line for line in lines_of(folder / LINES) if line["name"] in wanted]
    for run in runs_of(folder):
        runtime, _, precision = run.partition(":")
        bundle = Bundle.open(folder / precision)
        for variant in variants_of(bundle):
            found = [line["runs"][key] for line in lines if (key := f"{run} {variant}") in line["runs"]]
            if not found:
                continue
            if len({one["made_from"] for one in found}) > 1:
                raise SystemExit(f"{folder / LINES}: results of different bundles of {run}: delete it, measure again")
            thresholds = storable(thresholds_of(bundle, variant))
            evaluation = to_builtins(
                evaluation_of(
                    [convert(one["result"], ImageResult) for one in found],
                    dataset_at(root),
                    bundle.recipe,
                    runtime=runtime,
                    thresholds=thresholds,
                    fingerprint_sha256=found[0]["made_from"],
                    window_batch=BATCH,
                )
            )
            patches = bundle.recipe.network.grid[0] * bundle.recipe.network.grid[1] * evaluation["windows"]
            yield {
                "run": run,
                "variant": variant,
                "execution": found[0]["execution"],
                "bytes": executed_bytes(bundle, runtime),
                "quantization": None if bundle.manifest.quantization is None else summary(bundle),
                "thresholds": thresholds,
                "budget": budget_of(bundle),
                **{name: evaluation[name] for name in KEPT},
                "slices": {
                    name: {key: one[key] for key in KEPT_OF_SLICES} for name, one in evaluation["slices"].items()
                },
                "labels_equal_percent": 100
                * sum(one["labels_equal"] for one in found)
                / sum(o["pixels"] for o in found),
                "labels_equal_percent_min": min(100 * one["labels_equal"] / one["pixels"] for one in found),
                "patches_grouped_otherwise_percent": {
                    merge: 100 * sum(one["grouped_otherwise"][merge] for one in found) / patches
                    for merge in found[0]["grouped_otherwise"]
                },
            }


def budget_of(bundle: Bundle) -> tuple[float, float] | None:
    """What a bundle merges of every picture, None where it merges by thresholds."""
    merging = bundle.recipe.merging
    return None if bundle.signature.defaults else (merging.clap_budget, merging.gbm_budget)


def summary(bundle: Bundle) -> dict[str, Any]:
    """How a bundle was quantised, without its tables."""
    facts = to_builtins(bundle.manifest.quantization)
    return {key: value if isinstance(value, str | float | int) else len(value) for key, value in facts.items()}


# --------------------------------------------------------------------------------------------------------------- parts


def networks_in(work: Path) -> list[Path]:
    """Folders of networks whose first bundle is there, which judges the others."""
    return [folder for folder in sorted(work.iterdir()) if (folder / PRECISIONS[0] / MANIFEST).is_file()]


def runs_of(folder: Path) -> tuple[str, ...]:
    """Every runtime on every bundle of a network."""
    made = [precision for precision in PRECISIONS if (folder / precision / MANIFEST).is_file()]
    return tuple(f"{runtime}:{precision}" for runtime in RUNTIMES for precision in made)


def dataset_at(root: Path) -> Dataset:
    return open_dataset("camvid", root)


def samples_of(options: argparse.Namespace) -> tuple[Sample, ...]:
    dataset = dataset_at(options.dataset)
    return (dataset.subset(options.limit) if options.limit else dataset).samples


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Finished photos, each once, even where two runs overlapped; a torn last line is of one that was not."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
    return list({line["name"]: line for line in map(json.loads, whole.splitlines())}.values())


if __name__ == "__main__":
    main()
