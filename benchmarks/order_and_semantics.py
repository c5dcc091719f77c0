"""Token order and semantics on trained checkpoints: agreement of two runtimes, and mIoU, under each combination.

    python benchmarks/order_and_semantics.py DATA --work FOLDER [--record benchmarks/records/order_and_semantics.json]

DATA as for real_checkpoints.py. Each checkpoint is exported once for each combination. On both windows of 20 photos
PyTorch and ONNX Runtime decide for themselves and are compared; ONNX Runtime then evaluates all 233 test photos. FOLDER
keeps the bundles and the state of the evaluations, so that an interrupted run goes on.

What must be equal whatever the order: N', as CLAP counts windows before it orders them; with it, everything where there
is no GBM, as attention does not see order. Whatever the semantics: N', unless a similarity equals tau to the last bit.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from real_checkpoints import MODELS, RECIPE
from tqdm import tqdm

from algm_deploy.bundle.manifest import MANIFEST
from algm_deploy.bundle.records import tokens_by_merge
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import evaluate, export, spread
from algm_deploy.environment import environment
from algm_deploy.evaluation.datasets import open_dataset
from algm_deploy.report.tables import markdown_table
from algm_deploy.runners.contract import runner
from algm_deploy.tuning.similarity import windows_of

TAU = 0.9319
PHOTOS = 20

# The paper takes tau as the threshold of both merges.
SEMANTICS: dict[str, dict[str, Any]] = {
    "code": {},
    "paper": {"merging.semantics": "paper", "merging.gbm": "fixed", "merging.gbm_threshold": TAU},
}
ORDERS = ("published", "raster")


@dataclass(frozen=True)
class Row:
    """One checkpoint under one combination. Labels are compared pixel by pixel in windows of 512 pixels."""

    checkpoint: str
    semantics: str
    order: str
    windows_compared: int
    clap_counts_equal: int
    gbm_counts_equal: int
    gbm_count_difference_max: int
    maps_equal: int
    label_agreement_mean: float
    label_agreement_min: float
    images: int
    miou_percent: float
    miou_percent_by_slice: dict[str, float]
    tokens_after_clap_mean: float
    tokens_after_gbm_mean: float
    gmacs_per_window_mean: float


def exported(data: Path, work: Path, checkpoint: str, semantics: str, order: str) -> Bundle:
    """The bundle of a combination, whose portable graph ONNX Runtime runs; made where it is missing."""
    target = work / f"{checkpoint} {semantics} {order}"
    if not (target / MANIFEST).is_file():
        settings = {**SEMANTICS[semantics], "merging.order": order}
        export(data / "models" / checkpoint, target, RECIPE, settings)
    return Bundle.open(target)


def compared(bundle: Bundle, photos: list[Path]) -> dict[str, Any]:
    """PyTorch and ONNX Runtime on every window of some photos, alone, each with its own decisions."""
    outputs = ("scores", "token_counts", "token_map_gbm_5")
    clap, gbm, maps, labels = [], [], [], []
    with runner(bundle, "torch") as first, runner(bundle, "onnxruntime-cpu") as second:
        for photo in tqdm(photos, "compare", unit="photo", disable=None):
            for window, _ in windows_of(photo, bundle.recipe):
                ours, theirs = (run.infer({"image": window[None]}, outputs) for run in (first, second))
                differences = np.abs(ours["token_counts"][0] - theirs["token_counts"][0])
                clap.append(differences[0])
                gbm.append(differences[1])
                maps.append(np.array_equal(ours["token_map_gbm_5"], theirs["token_map_gbm_5"]))
                labels.append(float((ours["scores"].argmax(1) == theirs["scores"].argmax(1)).mean()))
    return {
        "windows_compared": len(labels),
        "clap_counts_equal": clap.count(0),
        "gbm_counts_equal": gbm.count(0),
        "gbm_count_difference_max": int(max(gbm)),
        "maps_equal": sum(maps),
        "label_agreement_mean": float(np.mean(labels)),
        "label_agreement_min": min(labels),
    }


def measure(data: Path, work: Path, checkpoint: str, semantics: str, order: str) -> Row:
    """One row."""
    bundle = exported(data, work, checkpoint, semantics, order)
    dataset = open_dataset("camvid", data / "data" / "camvid")
    record = evaluate(bundle, dataset, "onnxruntime-cpu")
    clap, gbm = tokens_by_merge(record.tokens).values()
    return Row(
        checkpoint,
        semantics,
        order,
        **compared(bundle, spread([sample.image_path for sample in dataset.samples], PHOTOS)),
        images=record.images,
        miou_percent=record.miou_percent,
        miou_percent_by_slice={name: part.miou_percent for name, part in record.slices.items()},
        tokens_after_clap_mean=clap,
        tokens_after_gbm_mean=gbm,
        gmacs_per_window_mean=record.gmacs_per_window_mean,
    )


def table(rows: list[Row]) -> str:
    """As Markdown."""
    header = (
        "checkpoint", "semantics", "order", "N' equal", "N'' equal", "maps equal", "labels equal, mean, worst",
        "mIoU %", "N', N''", "GMACs a window",
    )  # fmt: skip
    return markdown_table(header, [_cells(row) for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.checkpoint,
        row.semantics,
        row.order,
        f"{row.clap_counts_equal} of {row.windows_compared}",
        f"{row.gbm_counts_equal}, max difference {row.gbm_count_difference_max}",
        str(row.maps_equal),
        f"{100 * row.label_agreement_mean:.3f} %, {100 * row.label_agreement_min:.2f} %",
        f"{row.miou_percent:.2f}",
        f"{row.tokens_after_clap_mean:.0f}, {row.tokens_after_gbm_mean:.0f}",
        f"{row.gmacs_per_window_mean:.1f}",
    )


def main() -> None:
    """Measures all combinations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--work", type=Path, required=True, help="folder for bundles and state")
    parser.add_argument("--record", type=Path, help="JSON file to write")
    options = parser.parse_args()
    combinations = [(name, kind, order) for name in MODELS for kind in SEMANTICS for order in ORDERS]
    rows = [measure(options.data, options.work, *combination) for combination in combinations]
    print(table(rows))
    if options.record:
        content = {
            "schema_version": 1,
            "environment": asdict(environment()),
            "precision": "fp32",
            "runtimes": ["torch", "onnxruntime-cpu"],
            "recipe": RECIPE,
            "clap_threshold": TAU,
            "rows": [asdict(row) for row in rows],
        }
        options.record.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
