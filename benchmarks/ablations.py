"""The paper's ablation tables (ALGM, CVPR 2024, section 4) for a network that was trained already.

    python benchmarks/ablations.py                                          demo network, 24 drawn pictures
    python benchmarks/ablations.py BUNDLE --data FOLDER --split val         a network and data set of yours

Each row changes one thing of the bundle's own plan and keeps its thresholds, so rows differ in tokens as well as in
mIoU. Nothing is trained anew: the paper trains a network for every row, these differences say what a change costs at
inference. Runs in PyTorch; with a bundle of yours it goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from algm_deploy.bundle.records import Evaluation
from algm_deploy.bundle.store import Bundle
from algm_deploy.demo.run import labelled_pictures
from algm_deploy.deployment import export
from algm_deploy.evaluation.datasets import open_dataset
from algm_deploy.package_data import DEMO_ASSETS
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.report.tables import markdown_table, shown
from algm_deploy.tuning.ablations import ALGM, Variant
from algm_deploy.tuning.positions import PlanEvaluator
from algm_deploy.tuning.trial import miou_of

Row = tuple[str, MergePlan, Variant]


def tables(plan: MergePlan, network: Network) -> Iterator[tuple[str, list[Row]]]:
    """Title and rows of every table; rows a network is too shallow or its grid too small for are left out."""
    yield (
        "components",
        [
            ("dense", DENSE, ALGM),
            ("CLAP", replace(plan, gbm_layers=()), ALGM),
            ("GBM", replace(plan, clap_layers=()), ALGM),
            ("ALGM", plan, ALGM),
        ],
    )
    yield (
        "GBM in block",
        [
            (" and ".join(map(str, layers)), replace(plan, gbm_layers=layers), ALGM)
            for layers in ((2,), (3,), (5,), (7,), (9,), (1, 5), (5, 7), (3, 5, 7))
            if layers[-1] <= network.depth and layers[0] not in plan.clap_layers
        ],
    )
    yield (
        "GBM alone in block",
        [
            (" and ".join(map(str, layers)), replace(plan, clap_layers=(), gbm_layers=layers), ALGM)
            for layers in ((1,), (3,), (5,), (1, 5), (5, 7))
            if layers[-1] <= network.depth
        ],
    )
    yield (
        "CLAP in block",
        [
            (str(layer), replace(plan, clap_layers=(layer,)), ALGM)
            for layer in (1, 2, 3)
            if layer < min(plan.gbm_layers, default=network.depth + 1)
        ],
    )
    yield (
        "CLAP window",
        [
            (f"{rows}x{columns}", replace(plan, window=(rows, columns)), ALGM)
            for rows, columns in ((2, 1), (1, 2), (2, 2), (2, 4), (4, 4), (8, 8))
            if rows <= network.grid[0] and columns <= network.grid[1]
        ],
    )
    yield (
        "CLAP compares",
        [
            ("tokens after attention", plan, ALGM),
            ("queries", plan, Variant(clap_feature="query")),
            ("keys", plan, Variant(clap_feature="key")),
            ("values", plan, Variant(clap_feature="value")),
        ],
    )
    yield (
        "GBM compares",
        [
            ("tokens after attention", plan, ALGM),
            ("queries", plan, Variant(gbm_feature="query")),
            ("keys", plan, Variant(gbm_feature="key")),
            ("values", plan, Variant(gbm_feature="value")),
        ],
    )
    yield (
        "a merged window becomes",
        [
            ("its mean", plan, ALGM),
            ("its first patch", plan, Variant(reduction="first")),
            ("a random patch", plan, Variant(reduction="random")),
            ("copies of its mean", plan, Variant(reduction="copies")),
        ],
    )
    yield "merging", [("before the MLP", plan, ALGM), ("after the MLP", plan, Variant(after_mlp=True))]


def cells(name: str, found: Evaluation, dense: float) -> tuple[str, ...]:
    """One row: mIoU, its difference to dense, arithmetic and tokens after the last merge."""
    miou = miou_of(found)
    tokens = found.tokens[-1].mean if found.tokens else None
    return name, shown(miou, 2), f"{miou - dense:+.2f}", shown(found.gmacs_per_window_mean, 2), shown(tokens, 0)


def main() -> None:
    """Prints the tables as Markdown."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("bundle", type=Path, nargs="?", help="default: the demo network")
    parser.add_argument("--data", type=Path, help="root folder of the data set; default: the pictures of the demo")
    parser.add_argument("--dataset", help="its name; default: the bundle's")
    parser.add_argument("--split")
    parser.add_argument("--limit", type=int, help="use that many images, spread evenly")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = (
            Bundle.open(options.bundle)
            if options.bundle
            else export(DEMO_ASSETS, Path(folder) / "demo", "demo", {}).bundle
        )
        dataset = labelled_pictures()
        if options.data:
            dataset = open_dataset(options.dataset or bundle.recipe.protocol.dataset, options.data, options.split)
        if options.limit:
            dataset = dataset.subset(options.limit)
        plan, network = bundle.recipe.merging, bundle.recipe.network
        evaluate_plan = PlanEvaluator(bundle)
        dense = miou_of(evaluate_plan(DENSE, dataset))
        print(
            f"{bundle.recipe.name}, {dataset.name} {dataset.split}, {len(dataset.samples)} images, PyTorch; {plan}\n",
            flush=True,
        )
        for title, rows in tables(plan, network):
            filled = [cells(name, evaluate_plan(p, dataset, variant), dense) for name, p, variant in rows]
            print(
                markdown_table((title, "mIoU %", "to dense", "GMACs per window", "tokens left"), filled) + "\n",
                flush=True,
            )


if __name__ == "__main__":
    main()
