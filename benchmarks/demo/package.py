"""Turns the output of `train.py` into what ships: checkpoint, variant file, validation pictures, model card, tables.

    python benchmarks/demo/package.py DIR     DIR is the --out of train.py

Every figure in the model card and in README.md is rendered from record.json; a test compares them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from painter.scenes import CLASSES, PALETTE, SLICES, scene, slice_name
from PIL import Image

from algm_deploy.package_data import DEMO_ASSETS

HERE = Path(__file__).resolve().parent
RECORD, README = HERE / "record.json", HERE / "README.md"
CARD = DEMO_ASSETS / "MODEL_CARD.md"
START, END = "<!-- rendered from record.json -->", "<!-- end -->"

VALIDATION_SEED = 7_000_000  # no training, selection or report scene has such a seed
VALIDATION = {"day": 14, "dusk": 5, "night": 5}
MEANING = {
    "a": "dense",
    "b": "from scratch with ALGM, batch-minimum counts",
    "c": "a, fine-tuned with ALGM, batch-minimum counts",
    "d": "a, fine-tuned with ALGM, every image deciding alone",
}


# --- tables ---------------------------------------------------------------------------------------------------------


def results_table(record: dict[str, Any]) -> str:
    """mIoU of every network, dense and merged, whole and by slice, with mean token counts."""
    lines = [
        "| network | trained | evaluated | mIoU % | day | dusk | night | mean N' | mean N'' |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, parts in record["evaluations"].items():
        for mode, figures in parts["report"].items():
            mious = " | ".join(f"{figures[part]['miou_percent']:.2f}" for part in ("all", *SLICES))
            tokens = figures["all"].get("tokens")
            counts = [f"{tokens[key]['mean']:.0f}" for key in ("after_clap", "after_gbm")] if tokens else ["1024"] * 2
            lines.append(f"| {name} | {MEANING[name]} | {mode} | {mious} | {' | '.join(counts)} |")
    return "\n".join(lines)


def classes_table(record: dict[str, Any]) -> str:
    """IoU by class of the dense training and of the network that ships."""
    ships = record["ships"]
    columns = [("a", "dense"), ("a", "merged"), (ships, "dense"), (ships, "merged")]
    lines = ["| class | " + " | ".join(f"{n} {mode}" for n, mode in columns) + " |", "|---|" + "---|" * len(columns)]
    for label in CLASSES:
        values = [record["evaluations"][n]["report"][mode]["all"]["iou_percent"][label] for n, mode in columns]
        lines.append(f"| {label} | " + " | ".join(f"{v:.1f}" for v in values) + " |")
    return "\n".join(lines)


def tokens_table(record: dict[str, Any]) -> str:
    """Distribution of token counts of the network that ships, by slice."""
    lines = ["| tokens of 1024 | slice | mean | min | 5 % | 25 % | 50 % | 75 % | 95 % | max |", "|---|" + "---|" * 9]
    merged = record["evaluations"][record["ships"]]["report"]["merged"]
    for key, title in (("after_clap", "after CLAP (N')"), ("after_gbm", "after GBM (N'')")):
        for part in ("all", *SLICES):
            spread = merged[part]["tokens"][key]
            shares = " | ".join(f"{v:.0f}" for v in spread["quantiles_0_5_25_50_75_95_100"])
            lines.append(f"| {title} | {part} | {spread['mean']:.0f} | {shares} |")
    return "\n".join(lines)


def trainings_table(record: dict[str, Any]) -> str:
    """Steps, pictures and time of every training."""
    lines = [
        "| network | steps | batch | pictures seen | learning rate | seconds | last loss | tokens while training |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, run in record["trainings"].items():
        tokens = ", ".join(f"{v:.0f}" for v in run["curve"][-1][3:]) or "1024"
        row = (name, run["steps"], run["batch"], run["pictures_seen"], run["rate"], f"{run['wall_s']:.0f}")
        lines.append("| " + " | ".join(map(str, row)) + f" | {run['curve'][-1][2]:.3f} | {tokens} |")
    return "\n".join(lines)


def conditions(record: dict[str, Any]) -> str:
    """Where and on what the figures were measured."""
    at, scenes = record["environment"], record["scenes"]
    tau = record["tau_rule"]
    others = ", ".join(f"{name} {facts['tau']}" for name, facts in tau.items() if name != "a")
    return (
        f"{at['device']}, torch {at['torch']}, Pillow {at['pillow']}, NumPy {at['numpy']}; "
        f"{scenes['train']['count']} training scenes, {scenes['selection']['count']} that decided what ships, "
        f"{scenes['report']['count']} others for every figure here. fp32, weights rounded to fp16 as they ship, one "
        f"decision per image. tau = {tau['a']['tau']} (mean {tau['a']['mean']} + deviation {tau['a']['deviation']}, "
        f"measured on a; the same rule measured on the others would give {others})."
    )


def rendered(record: dict[str, Any]) -> str:
    """The block of figures in README.md."""
    parts = (
        conditions(record),
        results_table(record),
        f"Ships: **{record['ships']}**, the best with merging on the selection scenes.",
        tokens_table(record),
        trainings_table(record),
        classes_table(record),
    )
    return "\n\n".join((START, *parts, END))


def model_card(record: dict[str, Any]) -> str:
    """MODEL_CARD.md of the shipped network."""
    ships, net = record["ships"], record["network"]
    run = record["trainings"][ships]
    seen = run["pictures_seen"] + (record["trainings"][run["start"]]["pictures_seen"] if run["start"] else 0)
    merged = record["evaluations"][ships]["report"]["merged"]["all"]
    dense = record["evaluations"][ships]["report"]["dense"]["all"]
    after_clap, after_gbm = (merged["tokens"][key]["mean"] for key in ("after_clap", "after_gbm"))
    return f"""# Model card: the demo's network

**Synthetic.** It was trained on drawn street scenes and knows nothing about photographs. It exists to show this
package on an example that anybody may copy; it is no basis for any decision about the real world.

- **Network**: Segmenter, plain ViT with {net["depth"]} blocks of width {net["embed_dim"]} and {net["heads"]} heads,
  patches of {net["patch_size"]} pixels, {net["image_size"][0]}x{net["image_size"][1]} pixels, mask transformer with
  {net["decoder_depth"]} block; {net["parameters"] / 1e6:.2f} M parameters, stored in 16 bits, in the official
  Segmenter format (`checkpoint.pth`, `variant.yml`). Merging: CLAP in block 1 (2x2 windows), GBM in block 5.
- **Data**: street scenes that `benchmarks/demo/painter` draws from a seed: synthetic pictures with exact labels in ten
  classes ({", ".join(CLASSES)}); three in five by day, one in five at dusk, one in five at night. Training seeds
  0 to {record["scenes"]["train"]["count"] - 1}. The {sum(VALIDATION.values())} pictures in `images/` and `labels/`
  have seeds from {VALIDATION_SEED}, which no training saw; their seed is in the file's name.
- **Training**: `benchmarks/demo/train.py`, network {ships}: {MEANING[ships]}. {seen} pictures seen in all, cross
  entropy, AdamW, cosine schedule, bf16; flips, zoom, brightness, contrast and saturation.
- **Result** on {merged["images"]} unseen scenes: mIoU {dense["miou_percent"]:.2f} % without merging,
  **{merged["miou_percent"]:.2f} %** with merging at tau {record["tau_rule"]["a"]["tau"]}; of 1024 tokens
  {after_clap:.0f} are left after CLAP and {after_gbm:.0f} after GBM on average. The dense training it started from
  reaches {record["evaluations"]["a"]["report"]["dense"]["all"]["miou_percent"]:.2f} % without merging.

{conditions(record)}

## Accuracy, whole and by slice

{results_table(record)}

## Tokens

{tokens_table(record)}

## Classes, IoU in %

{classes_table(record)}

## Limits

- Synthetic pictures only: on photographs its output means nothing.
- Trained for minutes, not to convergence. Thin things (poles, distant people) are smaller than a patch and score low.
- Merging does not cost the same everywhere: read it by slice. The mean over all scenes hides the night.
- The trainings were boxed by time, so b has seen fewer pictures than a, and c and d more; c and d against a is
  therefore not a comparison at equal training.
"""


# --- files ----------------------------------------------------------------------------------------------------------


def variant(record: dict[str, Any]) -> dict[str, Any]:
    """Facts beside the checkpoint, under the names the published training code gives them."""
    net, plan, run = record["network"], record["plan"], record["trainings"][record["ships"]]
    side, batch = net["image_size"][0], run["batch"]
    return {
        "algorithm_kwargs": {"batch_size": batch, "eval_freq": 1, "num_epochs": 1, "start_epoch": 0},
        "amp": True,
        "dataset_kwargs": {
            "batch_size": batch,
            "crop_size": side,
            "dataset": "synthetic_street",
            "image_size": side,
            "merging_window_size": tuple(plan["window"]),
            "normalization": net["normalization"],
            "num_workers": 0,
            "patch_type": "algm",
            "selected_layers": (*plan["clap_layers"], *plan["gbm_layers"]),
            "split": "train",
            "threshold": record["tau_rule"]["a"]["tau"],
        },
        "inference_kwargs": {"im_size": side, "window_size": side, "window_stride": side},
        "net_kwargs": {
            "backbone": f"vit_{net['embed_dim']}_{net['depth']}_patch{net['patch_size']}_{side}",
            "d_model": net["embed_dim"],
            "decoder": {
                "drop_path_rate": 0.0,
                "dropout": 0.0,
                "n_cls": net["classes"],
                "n_layers": net["decoder_depth"],
                "name": net["decoder"],
            },
            "distilled": False,
            "drop_path_rate": 0.0,
            "dropout": 0.0,
            "image_size": tuple(net["image_size"]),
            "n_cls": net["classes"],
            "n_heads": net["heads"],
            "n_layers": net["depth"],
            "normalization": net["normalization"],
            "patch_size": net["patch_size"],
        },
        "optimizer_kwargs": {
            "clip_grad": 1.0,
            "iter_max": run["steps"],
            "iter_warmup": 300,
            "lr": run["rate"],
            "opt": "adamw",
            "sched": "cosine",
            "weight_decay": 0.05,
        },
        "resume": False,
        "version": "normal",
        "world_batch_size": batch,
    }


def validation_seeds() -> list[int]:
    """The first seeds that give every slice its number of pictures."""
    wanted, seeds, seed = dict(VALIDATION), [], VALIDATION_SEED
    while any(wanted.values()):
        if wanted[slice_name(seed)]:
            wanted[slice_name(seed)] -= 1
            seeds.append(seed)
        seed += 1
    return seeds


def write_pictures() -> None:
    """`images/SLICE/SEED.png` and `labels/SLICE/SEED.png`, the label map in the palette's colours."""
    for seed in validation_seeds():
        image, label = scene(seed)
        indexed = Image.fromarray(label, "P")
        indexed.putpalette(np.array(PALETTE, np.uint8).tobytes())
        for kind, picture in (("images", Image.fromarray(image)), ("labels", indexed)):
            path = DEMO_ASSETS / kind / slice_name(seed) / f"{seed}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path, optimize=True)


def compact(record: dict[str, Any]) -> str:
    """JSON with one line for every list of numbers."""
    text = json.dumps(record, indent=1)
    return re.sub(r"\[[\s\d.,eE+-]*\]", lambda found: re.sub(r"\s+", " ", found.group()), text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the --out of train.py")
    folder = parser.parse_args().folder
    record = json.loads((folder / "record.json").read_text())
    DEMO_ASSETS.mkdir(exist_ok=True)
    shutil.copyfile(folder / f"{record['ships']}.pth", DEMO_ASSETS / "checkpoint.pth")
    (DEMO_ASSETS / "variant.yml").write_text(yaml.dump(variant(record)))
    (DEMO_ASSETS / "classes.json").write_text(json.dumps({"names": CLASSES, "palette": PALETTE}) + "\n")
    write_pictures()
    RECORD.write_text(compact(record))
    CARD.write_text(model_card(record))
    before, _, rest = README.read_text().partition(START)
    README.write_text(before + rendered(record) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
