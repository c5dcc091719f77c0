"""Ways to merge side by side on a trained checkpoint as it is: accuracy by slice over arithmetic and over time.

    python benchmarks/methods.py DATA CHECKPOINT --device cuda --every 1 -o RECORD

DATA is CamVid in its official layout, CHECKPOINT a folder in the authors' format; neither ships with the project,
CamVid is for non-commercial use. No method is trained: the network that was trained without merging, or with ALGM,
merges as each says, at several points. PyTorch executes all of them. Milliseconds are those of a picture, each point in
turns with the network without merging, on the GPU or, where there is none, on the CPU; `--no-times` leaves them out.
The demo's network takes drawn scenes, with `--dataset folder --slice folder --split all --recipe demo`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from budgets import Evaluator, exported, timed_on, write
from msgspec import to_builtins

from algm_deploy.bundle.records import Evaluation
from algm_deploy.environment import device_name, environment
from algm_deploy.evaluation.datasets import open_dataset
from algm_deploy.recipe.schema import DENSE, MergePlan, Network
from algm_deploy.report.tables import markdown_table
from algm_deploy.timing.protocols import Pace, paces
from algm_deploy.tuning.trial import miou_of

THRESHOLDS = (0.85, 0.95, 1.01)
BUDGETS = ((0.7, 0.2), (0.43, 0.225), (0.2, 0.1))  # windows, tokens
SHARES = (0.2, 0.3, 0.5)  # of tokens that ToMe merges in all, or around each part
PLACES = (1 / 3, 1 / 2, 2 / 3)  # of the depth, after which ELViT clusters
SIDES = (0.7, 0.5)  # of its grid, as parts of the patch grid's


def main() -> None:
    options = parser().parse_args()
    torch.backends.cudnn.allow_tf32 = False
    opened = open_dataset(options.dataset, options.data, options.split, options.slice)
    dataset = replace(opened, samples=opened.samples[:: options.every])
    with exported(options.checkpoint, options, options.precision) as bundle:
        evaluate, network = Evaluator(bundle, options.device, options.batch, {}), bundle.recipe.network
        points = plans(bundle.recipe.merging, network)
        rows = {name: figures(evaluate(plan, dataset)) for name, plan in points.items()}
        if options.times:
            paths = [one.image_path for one in dataset.samples]
            windows, request = timed_on(bundle, paths, options)
            merging = {name: plan for name, plan in points.items() if plan.layers}
            speeds = paces(bundle, tuple(merging.values()), windows, request, progress=False)
            for name, speed in zip(merging, speeds, strict=True):
                rows[name] |= pace(speed)
    gpu = options.device == "cuda"
    record = {
        "schema_version": 1,
        "environment": asdict(environment(devices=gpu)),
        "device": device_name(gpu),
        "checkpoint": options.checkpoint.resolve().name,
        "recipe": options.recipe,
        "precision": options.precision,
        "batch": options.batch,
        "photos": f"{len(dataset.samples)} of {dataset.title}",
        "points": rows,
    }
    write(record, options.output)
    print(table(rows))


def parser() -> argparse.ArgumentParser:
    one = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one.add_argument("data", type=Path, metavar="DATA")
    one.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    one.add_argument("--recipe", default="segmenter_vit_s16_camvid")
    one.add_argument("--dataset", default="camvid")
    one.add_argument("--split", default="test")
    one.add_argument("--slice", help="as the flag of `algm-deploy tune`")
    one.add_argument("--every", type=int, default=1, help="one photo of so many")
    one.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    one.add_argument("--precision", choices=("fp32", "fp16"), default="fp32")
    one.add_argument("--batch", type=int, default=1, help="windows at a time")
    one.add_argument("--no-times", dest="times", action="store_false")
    one.add_argument("--count", type=int, default=16, help="photos that are timed")
    one.add_argument("--rounds", type=int, default=4)
    one.add_argument("-o", "--output", type=Path, default=Path("methods.json"))
    return one


def plans(plan: MergePlan, network: Network) -> dict[str, MergePlan]:
    """Every point by its name; `plan` is the checkpoint's own, of whose places ALGM's points are."""
    depth, (rows, columns) = network.encoder_depth, network.grid
    found = {"dense": DENSE}
    found |= {f"algm threshold {tau:g}": replace(plan, clap_threshold=tau) for tau in THRESHOLDS}
    rules: dict[str, Any] = {"clap": "budget", "gbm": "budget"}
    found |= {
        f"algm budget {windows:g} {tokens:g}": replace(plan, **rules, clap_budget=windows, gbm_budget=tokens)
        for windows, tokens in BUDGETS
    }
    for share in SHARES:
        each = round(share * rows * columns / depth)
        found[f"tome {each} in each block"] = replace(DENSE, method="tome", tome_r=(each,) * depth)
        found[f"tome_blockwise {share:g}"] = replace(DENSE, method="tome_blockwise", tome_share=(share,) * depth)
    for place in PLACES:
        for side in SIDES:
            grid, layer = (round(side * rows), round(side * columns)), round(place * depth)
            elvit = replace(DENSE, method="elvit", elvit_layer=layer, elvit_grid=grid)
            for semantics in ("code", "paper"):
                name = f"elvit {semantics} {grid[0]}x{grid[1]} after {layer}"
                found[name] = replace(elvit, semantics=semantics)
    return found


def figures(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "miou_percent": miou_of(evaluation),
        "miou_percent_by_slice": {name: part.miou_percent for name, part in evaluation.slices.items()},
        "gmacs_per_window": evaluation.gmacs_per_window_mean,
        "tokens": to_builtins(evaluation.tokens),
    }


def pace(speed: Pace) -> dict[str, Any]:
    """Milliseconds of a picture, and of the network without merging in the same turns."""
    own = 1e3 / speed.throughput_img_per_s
    return {"ms": own, "dense_ms": own * speed.speedup, "stable": speed.stable}


def table(points: Mapping[str, Mapping[str, Any]]) -> str:
    """The points in Markdown."""
    slices = sorted(points["dense"]["miou_percent_by_slice"])
    rows = [
        (
            name,
            *(_shown(x) for x in (row["miou_percent"], *(row["miou_percent_by_slice"][s] for s in slices))),
            _shown(row["gmacs_per_window"]),
            _shown(row.get("ms")),
            _shown(row.get("dense_ms")),
        )
        for name, row in points.items()
    ]
    return markdown_table(("point", "mIoU %", *slices, "GMACs", "ms", "dense beside it, ms"), rows)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
