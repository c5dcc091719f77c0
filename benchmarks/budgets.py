"""Budgets beside thresholds: accuracy of trained checkpoints by slice, without merging, by threshold, and by budget.

    python benchmarks/budgets.py CAMVID CHECKPOINT ... [--every 6] [--runtime onnxruntime-cpu] -o budgets.json

CAMVID is the data set in its official layout, CHECKPOINT a folder in the authors' format; neither ships with the
project, CamVid is for non-commercial use. `--every 6` takes every sixth photo of the split. By default the budgets are
110 of 256 windows and 156 tokens, what tau 0.9319 merges on average, so that both rules cost the same.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from algm_deploy.bundle.files import write_atomically
from algm_deploy.bundle.records import Evaluation, Figures
from algm_deploy.deployment import build, evaluate, export
from algm_deploy.environment import environment
from algm_deploy.evaluation.datasets import Dataset, open_dataset
from algm_deploy.report.tables import text_table

RECIPE = "segmenter_vit_s16_camvid"
SETTINGS: dict[str, dict[str, Any]] = {
    "thresholds": {},
    "budgets": {"merging.clap": "budget", "merging.gbm": "budget"},
}


def main() -> None:
    """Measures every checkpoint and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="CAMVID")
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--split", default="test")
    parser.add_argument("--every", type=int, default=1, help="every so many photos, from the first")
    parser.add_argument("--runtime", default="onnxruntime-cpu")
    parser.add_argument("--budget", type=int, nargs=2, default=(110, 156), metavar=("WINDOWS", "TOKENS"))
    parser.add_argument("-o", "--output", type=Path, default=Path("budgets.json"))
    options = parser.parse_args()
    whole = open_dataset("camvid", options.data, options.split)
    photos = replace(whole, samples=whole.samples[:: options.every])
    record: dict[str, Any] = {
        "schema_version": 1,
        "environment": asdict(environment()),
        "recipe": RECIPE,
        "precision": "fp32",
        "runtime": options.runtime,
        "dataset": f"camvid {options.split}",
        "photos": len(photos.samples),
        "photos_of": len(whole.samples),
        "budget": {"clap_windows": options.budget[0], "gbm_tokens": options.budget[1]},
        "checkpoints": {},
    }
    for checkpoint in options.checkpoints:
        found = measured(checkpoint, photos, options.runtime, options.budget)
        record["checkpoints"][checkpoint.resolve().name] = found
        with write_atomically(options.output) as path:
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record))


def measured(checkpoint: Path, photos: Dataset, runtime: str, budget: tuple[int, int]) -> dict[str, Any]:
    """Figures by rule."""
    counts = dict(zip(("merging.clap_budget", "merging.gbm_budget"), budget, strict=True))
    found = {}
    for rule, settings in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            chosen = settings | (counts if settings else {})
            bundle = export(checkpoint, Path(folder) / "bundle", RECIPE, chosen).bundle
            build(bundle, runtime)
            if rule == "thresholds":
                found["dense"] = figures(evaluate(bundle, photos, runtime, dense=True))
            found[rule] = figures(evaluate(bundle, photos, runtime))
    return found


def figures(result: Evaluation) -> dict[str, Any]:
    """What the table shows, and the same by slice."""
    kept = _kept(result) | {"gmacs_per_window_mean": result.gmacs_per_window_mean}
    return kept | {"slices": {name: _kept(part) for name, part in result.slices.items()}}


def _kept(part: Figures) -> dict[str, Any]:
    tokens = {one.merge: {"mean": one.mean, "min": one.min, "max": one.max} for one in part.tokens}
    return {"images": part.images, "windows": part.windows, "miou_percent": part.miou_percent, "tokens": tokens}


def table(record: dict[str, Any]) -> str:
    """For terminals."""
    rules = [(name, rule, one) for name, found in record["checkpoints"].items() for rule, one in found.items()]
    slices = sorted(rules[0][2]["slices"])
    header = ("checkpoint", "rule", "mIoU %", *slices, "tokens after each merge", "GMACs")
    return text_table(header, [_row(name, rule, one, slices) for name, rule, one in rules])


def _row(name: str, rule: str, one: dict[str, Any], slices: list[str]) -> tuple[str, ...]:
    counts = (f"{t['mean']:.0f} ({t['min']}-{t['max']})" for t in one["tokens"].values())
    parts = (f"{one['slices'][part]['miou_percent']:.2f}" for part in slices)
    return name, rule, f"{one['miou_percent']:.2f}", *parts, ", ".join(counts), f"{one['gmacs_per_window_mean']:.1f}"


if __name__ == "__main__":
    main()
