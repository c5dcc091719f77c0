"""What precisions cost a trained network: mIoU, dense and merged, and labels equal to the first bundle's.

    python benchmarks/precision_accuracy.py DATASET FP32 FP16 FP8 -o precision_accuracy.json

The bundles are exports of one checkpoint that differ in `--precision`; the first is the one that others are held to.
Every photo of the data set is evaluated by the protocol, through one runtime, with the bundle's thresholds and with
none. Labels are compared photo by photo at its own size, dense with dense and merged with merged, each network deciding
for itself.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from trained import write

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import evaluate
from algm_deploy.environment import environment
from algm_deploy.pictures.sources import find_images
from algm_deploy.predictor import Predictor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--runtime", default="torch")
    parser.add_argument("--photos", default="images/test", help="folder of the data set's photos")
    parser.add_argument("-o", "--output", type=Path, default=Path("precision_accuracy.json"))
    options = parser.parse_args()
    record: dict[str, Any] = {
        "schema_version": 1,
        "environment": asdict(environment(devices=True)),
        "runtime": options.runtime,
        "rows": [],
    }
    for dense in (True, False):
        first: list[NDArray[Any]] = []
        for path in options.bundles:
            row, labels = judged(Bundle.open(path), options, dense)
            first = first or labels
            shares = [100 * float((a == b).mean()) for a, b in zip(first, labels, strict=True)]
            row |= {"labels_equal_percent_mean": float(np.mean(shares)), "labels_equal_percent_min": min(shares)}
            record["rows"].append(row)
            print(json.dumps(row), flush=True)
    write(record, options.output)


def judged(bundle: Bundle, options: argparse.Namespace, dense: bool) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Figures of one network, and its label maps, one a photo."""
    found = evaluate(bundle, options.dataset, options.runtime, dense=dense, progress=False)
    with Predictor(bundle, options.runtime, dense=dense) as predictor:
        labels = list(predictor.predict(find_images(options.dataset / options.photos)))
    row = {
        "precision": bundle.recipe.precision,
        "merging": "dense" if dense else "merged",
        "photos": found.images,
        "miou_percent": found.miou_percent,
        "device": found.device,
        "tokens": {one.merge: one.mean for one in found.tokens},
    }
    return row, labels


if __name__ == "__main__":
    main()
