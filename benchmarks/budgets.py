"""Budgets beside thresholds on trained checkpoints, all photos: accuracy by slice over arithmetic and over time.

    python benchmarks/budgets.py measure CAMVID CHECKPOINT ... --device cuda -o RECORD
    python benchmarks/budgets.py time RECORD CAMVID CHECKPOINT ...
    python benchmarks/budgets.py draw RECORD ... --picture docs/images/budgets.svg

CAMVID is the data set in its official layout, CHECKPOINT a folder in the authors' format; neither ships with the
project, CamVid is for non-commercial use. `measure` is `algm-deploy tune budget --curve`, with photos that are decoded
once and stay in the device's memory: for each threshold the budgets that cost as much on average on the photos to
choose on, and both rules on these and on the photos held out. `time` adds milliseconds of every point, both rules in
turns with the network without merging, on the GPU or, where there is none, on the CPU; the record keeps those of every
device. `draw` prints tables in Markdown. The demo's network takes drawn scenes of `benchmarks/demo/scenes.py`, with
`--dataset folder --slice folder --splits all --recipe demo`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import convert, to_builtins
from torch import Tensor
from trained import write

from algm_deploy.bundle.records import BudgetTuning, Candidate, Evaluation, Point, TunedOn
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import export, parity_windows, verify
from algm_deploy.environment import device_name, environment
from algm_deploy.errors import GateError
from algm_deploy.evaluation.datasets import IGNORE, Dataset, Sample, open_dataset
from algm_deploy.evaluation.evaluate import ImageResult, evaluation_of, image_result
from algm_deploy.merging import deployed, merge_inputs
from algm_deploy.models.loading import load_network
from algm_deploy.pictures.preprocessing import canvas_of, window_anchors
from algm_deploy.recipe.network import Size
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.report.plots import Scatter, Series
from algm_deploy.report.tables import markdown_table
from algm_deploy.report.tuning import write_sheet
from algm_deploy.timing.protocols import Request, paces
from algm_deploy.timing.timers import Effort
from algm_deploy.tuning.budgets import budgets_like, tune_budget
from algm_deploy.tuning.photos import check_apart, halves
from algm_deploy.tuning.search import Goal
from algm_deploy.tuning.trial import Trial, miou_of

WARM_UP = 6  # rounds
VALUES = (0.853, 0.9, 0.9319, 0.95, 0.98, 0.995, 1.01)


def main() -> None:
    options = parser().parse_args()
    options.run(options)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = top.add_subparsers(required=True)
    one = steps.add_parser("measure")
    _add_sources(one)
    one.add_argument("--splits", nargs="+", default=["val", "test"], help="to choose on and held out; one: its halves")
    one.add_argument("--slice", help="as the flag of `algm-deploy tune`")
    one.add_argument("--limit", type=int, help="photos of each split, spread evenly")
    one.add_argument("--values", nargs="+", type=float, default=VALUES, help="thresholds")
    one.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    one.add_argument("--drop", type=float, default=0.5, help="points that the chosen budget may lose to no merging")
    one.add_argument("--precision", choices=("fp32", "fp16"), default="fp32")
    one.add_argument("-o", "--output", type=Path, default=Path("budgets.json"))
    one.set_defaults(run=measure)
    one = steps.add_parser("time")
    one.add_argument("record", type=Path)
    _add_sources(one)
    one.add_argument("--count", type=int, default=32, help="photos that are timed")
    one.add_argument("--rounds", type=int, default=6)
    one.set_defaults(run=add_times)
    one = steps.add_parser("draw")
    one.add_argument("records", type=Path, nargs="+")
    one.add_argument("--picture", type=Path)
    one.set_defaults(run=draw)
    return top


def _add_sources(step: argparse.ArgumentParser) -> None:
    step.add_argument("data", type=Path, metavar="DATA")
    step.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT")
    step.add_argument("--recipe", default="segmenter_vit_s16_camvid")
    step.add_argument("--dataset", default="camvid")
    step.add_argument("--batch", type=int, default=32, help="windows at a time")


# ------------------------------------------------------------------------------------------------------------ accuracy


def measure(options: argparse.Namespace) -> None:
    """Writes the record of all checkpoints, anew after each."""
    torch.backends.cudnn.allow_tf32 = False
    opened = [open_dataset(options.dataset, options.data, split, options.slice) for split in options.splits]
    parts = [one.subset(options.limit) if options.limit else one for one in opened]
    tuning, held_out = parts if len(parts) > 1 else halves(parts[0])
    check_apart(tuning, held_out)
    record: dict[str, Any] = {
        "schema_version": 2,
        "environment": asdict(environment(devices=options.device == "cuda")),
        "recipe": options.recipe,
        "precision": options.precision,
        "device": device_name(options.device == "cuda"),
        "drop_points": options.drop,
        "checkpoints": {},
        "times": {},
    }
    photos: dict[str, list[Photo]] = {}
    for checkpoint in options.checkpoints:
        with exported(checkpoint, options, options.precision) as bundle:
            evaluate = cache(Evaluator(bundle, options.device, options.batch, photos))
            plan = bundle.recipe.merging
            goal = Goal("reference", miou_of(evaluate(DENSE, tuning)) - options.drop)
            trial = Trial(evaluate, plan, goal, tuning, held_out)
            found = tune_budget(trial, bundle.recipe.network.grid, sorted(options.values), whole=True)
        record["checkpoints"][checkpoint.resolve().name] = to_builtins(found)
        write(record, options.output)


@contextmanager
def exported(checkpoint: Path, options: argparse.Namespace, precision: str) -> Iterator[Bundle]:
    """A bundle of a checkpoint that gives scores, for as long as it is needed."""
    settings = {"output": "scores", "precision": precision, "max_batch": options.batch}
    with tempfile.TemporaryDirectory() as folder:
        yield export(checkpoint, Path(folder) / "bundle", options.recipe, settings).bundle


@dataclass(frozen=True)
class Photo:
    """A photo in a device's memory: its windows (n, 3, h, w), where they lie on the canvas, its labels (H, W) uint8."""

    name: str
    windows: Tensor
    anchors: list[tuple[int, int]]
    canvas: Size
    labels: Tensor


class Evaluator:
    """What `tune` evaluates plans with, in PyTorch, without a file read twice or a score that leaves the device.

    Every window decides for itself, whatever shares its batch; `photos` keeps data sets from one bundle to the next.
    """

    def __init__(self, bundle: Bundle, device: str, batch: int, photos: dict[str, list[Photo]]) -> None:
        self.recipe, self.device, self.batch, self.photos = bundle.recipe, device, batch, photos
        self.network = load_network(bundle).to(device)

    def __call__(self, plan: MergePlan, dataset: Dataset) -> Evaluation:
        if dataset.title not in self.photos:
            with ThreadPoolExecutor() as pool:
                self.photos[dataset.title] = list(pool.map(partial(self._read, dataset), dataset.samples))
        recipe = replace(self.recipe, merging=plan)
        model = deployed(self.network, recipe)
        inputs = merge_inputs(plan.clap_threshold, plan.gbm_threshold, device=self.device)
        results = [
            result
            for group in grouped(self.photos[dataset.title], self.batch)
            for result in self._results(partial(model, inputs=inputs), group)
        ]
        found = evaluation_of(results, dataset, recipe, runtime="torch", window_batch=self.batch)
        print(dataset.title, plan.clap, plan.clap_threshold, f"{miou_of(found):.2f}", flush=True)
        return found

    def _read(self, dataset: Dataset, sample: Sample) -> Photo:
        photo, labels = dataset.read(sample)
        canvas = canvas_of(photo, self.recipe.protocol)
        side, size = self.recipe.protocol.window, (canvas.shape[0], canvas.shape[1])
        anchors = window_anchors(size, self.recipe.protocol)
        windows = np.stack([canvas[y : y + side, x : x + side].transpose(2, 0, 1) for y, x in anchors])
        tensors = (torch.from_numpy(one).to(self.device) for one in (windows, labels))
        stacked, labelled = tensors
        return Photo(sample.name, stacked, anchors, size, labelled)

    @torch.inference_mode()
    def _results(self, network: Any, group: Sequence[Photo]) -> Iterator[ImageResult]:
        scores, counts, _ = network(torch.cat([one.windows for one in group]))
        sizes = [len(one.anchors) for one in group]
        for photo, part, tokens in zip(group, scores.split(sizes), counts.split(sizes), strict=True):
            confusion = confusion_of(photo, averaged(photo, part)).cpu().numpy()
            yield image_result(photo.name, "", confusion, tokens.cpu().numpy())


def grouped(photos: Sequence[Photo], windows: int) -> Iterator[list[Photo]]:
    """Photos in their order, as many at a time as have so many windows, and one at least."""
    group: list[Photo] = []
    for photo in photos:
        if group and sum(len(one.anchors) for one in (*group, photo)) > windows:
            yield group
            group = []
        group.append(photo)
    yield group


def averaged(photo: Photo, scores: Tensor) -> Tensor:
    """Scores (K, H, W) of a photo: those of its windows (n, K, h, w), averaged where they overlap, at its size."""
    classes, height, width = scores.shape[1:]
    sums, cover = scores.new_zeros(classes, *photo.canvas), scores.new_zeros(photo.canvas)
    for (top, left), part in zip(photo.anchors, scores, strict=True):
        sums[:, top : top + height, left : left + width] += part
        cover[top : top + height, left : left + width] += 1
    return F.interpolate((sums / cover)[None], tuple(photo.labels.shape), mode="bilinear")[0]


def confusion_of(photo: Photo, scores: Tensor) -> Tensor:
    """Pixels (K, K) by label and prediction."""
    classes, counted = len(scores), photo.labels != IGNORE
    cells = classes * photo.labels[counted].long() + scores.argmax(0)[counted]
    return torch.bincount(cells, minlength=classes**2).reshape(classes, classes)


# ---------------------------------------------------------------------------------------------------------------- time


def timed_on(bundle: Bundle, paths: Sequence[Path], options: argparse.Namespace) -> tuple[np.ndarray, Request]:
    """Windows of photos to time a bundle on and how, after the parity chain passed on two of them."""
    report = verify(bundle, "torch", images=paths, count=2, progress=False)
    if not report.passed:
        raise GateError(f"parity failed: {[one.measured for one in report.links if not one.passed]}")
    windows = parity_windows(bundle.recipe, paths, options.count)
    effort = Effort(warmup=WARM_UP, rounds=options.rounds, most_rounds=2 * options.rounds)
    return windows, Request("mixed", len(windows), options.batch, effort)


def add_times(options: argparse.Namespace) -> None:
    """Milliseconds of every point of a record on a device, on photos of the split that is held out."""
    record = json.loads(options.record.read_text(encoding="utf-8"))
    for checkpoint in options.checkpoints:
        found = tuning_of(record, checkpoint.resolve().name)
        paths = [one.image_path for one in open_dataset(options.dataset, options.data, found.held_out.split).samples]
        with exported(checkpoint, options, record["precision"]) as bundle:
            windows, request = timed_on(bundle, paths, options)
            rows = [timed_row(bundle, one, windows, request) for one in found.thresholds]
        key = f"{device_name(torch.cuda.is_available())}, batch {options.batch}"
        times = record["times"].setdefault(key, {"environment": asdict(environment(devices=torch.cuda.is_available()))})
        times[checkpoint.resolve().name] = rows
        write(record, options.record)
        print(key, checkpoint.resolve().name, rows, flush=True)


def timed_row(bundle: Bundle, threshold: Candidate, windows: Any, request: Request) -> dict[str, Any]:
    """Milliseconds a picture without merging, by a threshold, and by the budgets beside it, in turns."""
    plan = bundle.recipe.merging
    by_threshold = replace(plan, clap_threshold=threshold.value)
    by_budget = budgets_like(plan, threshold.tokens, bundle.recipe.network.grid)
    one, other = paces(bundle, (by_threshold, by_budget), windows, request, progress=False)
    dense = 1e3 * one.speedup / one.throughput_img_per_s
    ms = {"dense": dense, "threshold": dense / one.speedup, "budget": dense / other.speedup}
    return {"value": threshold.value, "ms": ms, "stable": one.stable}


def tuning_of(record: dict[str, Any], name: str) -> BudgetTuning:
    return convert(record["checkpoints"][name], BudgetTuning)


# ------------------------------------------------------------------------------------------------------------- picture


def draw(options: argparse.Namespace) -> None:
    """The tables of records, and one picture of the first: a row a checkpoint, a column for each cost."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in options.records]
    for record in records:
        for name in record["checkpoints"]:
            print(f"{name}, {record['precision']}\n\n{table(tuning_of(record, name))}\n")
    if options.picture:
        rows = [plots(name, tuning_of(records[0], name), records[0]["times"]) for name in records[0]["checkpoints"]]
        write_sheet([plot for row in rows for plot in row], len(rows[0]), options.picture)


def table(found: BudgetTuning) -> str:
    """mIoU of both rules by slice on the photos held out, which the budgets were not taken from."""
    held, slices = found.held_out, sorted(found.held_out.images_by_slice)
    header = ("threshold", "", "rule", "chosen on: mIoU %", "held out: mIoU %", *slices, "tokens", "GMACs")
    rows = [("", "", "dense", *_cells(found.tuned_on.dense, held.dense, slices))]
    pairs = zip(found.thresholds, found.thresholds_held_out, found.tuned_on.candidates, held.candidates, strict=True)
    for threshold, threshold_held, budget, budget_held in pairs:
        rows.append((f"{threshold.value:g}", "", "threshold", *_cells(threshold, threshold_held, slices)))
        mark = "chosen" if found.reached and budget.value == found.marked.value else ""
        rows.append((f"{budget.value:g}", mark, "budget", *_cells(budget, budget_held, slices)))
    return markdown_table(header, rows)


def _cells(here: Point, there: Point, slices: Sequence[str]) -> tuple[str, ...]:
    parts = (there.miou_percent_by_slice[name] for name in slices)
    ranges = (f" ({one.min} to {one.max})" if one.min != one.max else "" for one in there.tokens)
    tokens = ", ".join(f"{one.mean:.0f}{span}" for one, span in zip(there.tokens, ranges, strict=True))
    mious = (here.miou_percent, there.miou_percent, *parts)
    shown = ("-" if x is None else f"{x:.2f}" for x in (*mious, there.gmacs_per_window_mean))
    *cells, gmacs = shown
    return *cells, tokens, gmacs


def plots(name: str, found: BudgetTuning, times: dict[str, Any]) -> list[Scatter]:
    """Accuracy on the photos held out, over multiply-adds and over milliseconds on each device."""
    held = found.held_out
    gmacs = {
        "dense": [held.dense.gmacs_per_window_mean or 0.0],
        "budget": [one.gmacs_per_window_mean or 0.0 for one in held.candidates],
        "threshold": [one.gmacs_per_window_mean or 0.0 for one in found.thresholds_held_out],
    }
    costs = {"multiply-adds of a window in 10^9": gmacs}
    for device, by_checkpoint in times.items():
        if rows := by_checkpoint.get(name):
            ms = {rule: [row["ms"][rule] for row in rows] for rule in ("budget", "threshold")}
            costs[f"ms a picture, {device}"] = ms | {"dense": [float(np.median([row["ms"]["dense"] for row in rows]))]}
    return [_scatter(name, label, held, found.thresholds_held_out, cost) for label, cost in costs.items()]


def _scatter(
    name: str, label: str, held: TunedOn, thresholds: Sequence[Candidate], cost: dict[str, list[float]]
) -> Scatter:
    miou = {"budget": held.candidates, "threshold": thresholds, "dense": (held.dense,)}
    series = [
        Series(rule, [(x, one.miou_percent, "") for x, one in zip(cost[rule], points, strict=True)])
        for rule, points in miou.items()
    ]
    return Scatter(name, label, "mIoU %, held out", series)


if __name__ == "__main__":
    main()
