"""Trains the network of the embedded demo on synthetic scenes: dense, and with ALGM in the loop.

Four trainings of one architecture, compared on the same unseen scenes in the same run:
    a  dense
    b  from scratch with ALGM in the loop, batch-minimum counts as published
    c  fine-tuned from a with ALGM, batch-minimum counts as published
    d  fine-tuned from a with ALGM, every image deciding alone, as deployed
tau is the published rule applied to a: mean + deviation of the cosine similarity of all pairs of patches after the
attention of block 1, over training scenes.

    python benchmarks/demo/train.py --out DIR          one CUDA device, 16 CPU cores, about 9 minutes
    python benchmarks/demo/train.py --out DIR --toy    the whole script in half a minute on a CPU, numbers void
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import mmap
import multiprocessing
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import torch.nn.functional as F
from painter.canvas import SIZE
from painter.scenes import CLASSES, SLICES, scene, slice_name
from torch import Tensor, nn

from algm_deploy.merging import insert_merging, merge_inputs
from algm_deploy.models.scores import upsample_scores
from algm_deploy.models.segmenter import Segmenter
from algm_deploy.models.vit import MergeInputs, Tokens
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan

NETWORK = Network(
    family="segmenter",
    embed_dim=192,
    depth=7,
    heads=3,
    classes=len(CLASSES),
    image_size=(SIZE, SIZE),
    patch_size=8,
    decoder="mask_transformer",
    decoder_depth=1,
    normalization="vit",
)
PLAN = MergePlan(clap_layers=(1,), gbm_layers=(5,), window=(2, 2))

# Seeds of training scenes count up from 0; the others never meet them.
SELECTION_SEED = 5_000_000  # decides which of the merged trainings ships
REPORT_SEED = 6_000_000  # every published figure

Scenes = tuple[Tensor, Tensor]  # pictures (N, 256, 256, 3) uint8, labels (N, 256, 256) uint8


@dataclass(frozen=True)
class Training:
    """One training run. `seconds` boxes it by the clock; `steps`, when given, makes it repeatable instead."""

    name: str
    start: str | None
    batch_semantics: str | None
    seconds: float
    rate: float
    steps: int | None = None


# --- scenes ---------------------------------------------------------------------------------------------------------


def render(seeds: range, workers: int) -> Scenes:
    """Scenes of consecutive seeds, drawn by several processes into shared memory."""
    pixels = SIZE * SIZE
    memory = mmap.mmap(-1, len(seeds) * pixels * 4)
    pictures = np.frombuffer(memory, np.uint8, len(seeds) * pixels * 3).reshape(-1, SIZE, SIZE, 3)
    labels = np.frombuffer(memory, np.uint8, len(seeds) * pixels, len(seeds) * pixels * 3).reshape(-1, SIZE, SIZE)

    def draw(part: int) -> None:
        for index in range(part, len(seeds), workers):
            pictures[index], labels[index] = scene(seeds[index])

    fork = multiprocessing.get_context("fork")  # the children write into the parent's pages
    processes = [fork.Process(target=draw, args=(part,)) for part in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a process that drew scenes failed, see above")
    return torch.from_numpy(pictures), torch.from_numpy(labels)


def normalised(pictures: Tensor) -> Tensor:
    """(B, H, W, 3) uint8 to (B, 3, H, W) fp32 with mean and deviation 0.5."""
    return pictures.permute(0, 3, 1, 2).float() / 127.5 - 1


def augmented(pictures: Tensor, labels: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random flip, zoom into a part of the picture, brightness, contrast and saturation; per picture."""
    count, device = len(pictures), pictures.device

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(count, device=device, generator=chance) * (high - low) + low

    zoom, flip = uniform(0.6, 1).clamp(max=1), torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    theta = torch.zeros(count, 2, 3, device=device)
    theta[:, 0, 0], theta[:, 1, 1] = zoom * flip, zoom
    theta[:, 0, 2], theta[:, 1, 2] = uniform(-1, 1) * (1 - zoom), uniform(-1, 1) * (1 - zoom)
    where = F.affine_grid(theta, [count, 3, SIZE, SIZE], align_corners=False)
    x = F.grid_sample(normalised(pictures), where, mode="bilinear", padding_mode="reflection", align_corners=False)
    y = F.grid_sample(labels[:, None].float(), where, mode="nearest", padding_mode="reflection", align_corners=False)
    grey = x.mean(1, keepdim=True)
    x = grey + (x - grey) * uniform(0.7, 1.3)[:, None, None, None]
    x = (x + 1) * uniform(0.8, 1.25)[:, None, None, None] - 1
    middle = x.mean((1, 2, 3), keepdim=True)
    return (middle + (x - middle) * uniform(0.8, 1.25)[:, None, None, None]).clamp(-1, 1), y[:, 0].long()


# --- network --------------------------------------------------------------------------------------------------------


class FullPrecision(nn.Module):
    """A merge slot outside autocast: similarities and merged means are fp32 in training too."""

    def __init__(self, slot: nn.Module) -> None:
        super().__init__()
        self.slot = slot

    def forward(self, tokens: Tokens, inputs: MergeInputs) -> Tokens:
        with torch.autocast(tokens.values.device.type, enabled=False):
            return self.slot(tokens._replace(values=tokens.values.float()), inputs)


def new_network(seed: int) -> Segmenter:
    """A network with the usual ViT initialisation."""
    torch.manual_seed(seed)
    model = Segmenter(NETWORK)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
    for table in (model.encoder.pos_embed, model.encoder.cls_token, model.decoder.cls_emb):
        nn.init.trunc_normal_(table, std=0.02)
    for matrix in (model.decoder.proj_patch, model.decoder.proj_classes):
        nn.init.normal_(matrix, std=NETWORK.embed_dim**-0.5)
    return model


def merging(model: Segmenter, tau: float, batch: str) -> Segmenter:
    """`model` with ALGM at `tau` in its slots; parameters are shared."""
    merged = insert_merging(model, replace(PLAN, clap_threshold=tau, batch=batch))
    for layer in PLAN.layers:
        merged.blocks[layer - 1].merge = FullPrecision(merged.blocks[layer - 1].merge)
    return merged


@torch.no_grad()
def rule(model: Segmenter, pictures: Tensor) -> dict[str, Any]:
    """tau from the cosine similarities of all pairs of patches of an image after the attention of block 1.

    It is mean + deviation; where that reaches 1, so that nothing could merge, the percentile it stands for in a normal
    distribution, 84.13, takes its place, and `tau_from` says so.
    """
    total, squares, pairs, histogram = 0.0, 0.0, 0, torch.zeros(4000, dtype=torch.float64)
    block = model.blocks[0]
    for part in pictures.split(16):
        values = model.encoder.embed(normalised(part)).values
        x = (values + block.attn(block.norm1(values), None))[:, model.encoder.prefix :]
        unit = F.normalize(x, dim=-1)
        cosine = unit @ unit.mT
        histogram += torch.histc(cosine, 4000, -1, 1).double().cpu()
        cosine = cosine.double()
        count = cosine.shape[-1]
        total += float(cosine.sum()) - len(part) * count
        squares += float(cosine.square().sum()) - len(part) * count
        pairs += len(part) * count * (count - 1)
    mean = total / pairs
    deviation = math.sqrt(squares / pairs - mean**2)
    share = (histogram.cumsum(0) / histogram.sum()).numpy()
    percentile = float(np.searchsorted(share, 0.8413)) / 2000 - 1
    normal = mean + deviation < 1
    return {
        "mean": round(mean, 5),
        "deviation": round(deviation, 5),
        "percentile_84": round(percentile, 4),
        "tau_from": "mean + deviation" if normal else "percentile 84.13",
        "tau": round(mean + deviation if normal else percentile, 4),
    }


# --- training -------------------------------------------------------------------------------------------------------


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices alone; biases, norms and embedding tables go without."""
    tables = ("cls_token", "pos_embed", "cls_emb")
    named = list(model.named_parameters())
    plain = [p for name, p in named if p.ndim < 2 or name.endswith(tables)]
    decayed = [p for name, p in named if not (p.ndim < 2 or name.endswith(tables))]
    return [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]


def train(
    model: Segmenter, inputs: MergeInputs, scenes: Scenes, run: Training, batch: int, seed: int
) -> dict[str, Any]:
    """Trains `model` in place with a cosine schedule over steps or over the time box; answers the run's record."""
    pictures, labels = scenes
    device = pictures.device
    chance = torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=run.rate, fused=device.type == "cuda")
    begin, step, progress, curve = time.perf_counter(), 0, 0.0, []
    window: list[Tensor] = []
    model.train()
    while progress < 1:
        rate = run.rate * min(1, (step + 1) / 300) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        pick = torch.randint(len(pictures), (batch,), device=device, generator=chance)
        x, y = augmented(pictures[pick], labels[pick], chance)
        with torch.autocast(device.type, torch.bfloat16):
            result = model(x, inputs)
        loss = F.cross_entropy(upsample_scores(result, NETWORK.grid, NETWORK.image_size).float(), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens = [stage.length.float().mean() - 1 for stage in result.stages]
        window.append(torch.stack([loss.detach(), *tokens]))
        step += 1
        elapsed = time.perf_counter() - begin
        progress = step / run.steps if run.steps else elapsed / run.seconds
        if len(window) == 100 or progress >= 1:
            loss_and_tokens = [round(v, 4) for v in torch.stack(window).mean(0).tolist()]
            curve.append([step, round(elapsed, 1), *loss_and_tokens])
            window = []
            if len(curve) % 5 == 1:
                print(f"  {run.name} step {step} {elapsed:.0f}s loss and tokens {loss_and_tokens}", flush=True)
    return {
        **asdict(run),
        "steps": step,
        "batch": batch,
        "pictures_seen": step * batch,
        "wall_s": round(time.perf_counter() - begin, 1),
        "curve_columns": ["step", "wall_s", "loss", *[f"mean_tokens_after_{name}" for name in ("clap", "gbm")]],
        "curve": curve,
    }


# --- evaluation -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: Segmenter, inputs: MergeInputs, scenes: Scenes, seeds: range, batch: int) -> dict[str, Any]:
    """mIoU and token counts in fp32, whole and by slice; decisions per image."""
    model.eval()
    confusion = torch.zeros(len(seeds), len(CLASSES), len(CLASSES), dtype=torch.int64)
    counts = []
    for start in range(0, len(seeds), batch):
        pictures, labels = (part[start : start + batch] for part in scenes)
        result = model(normalised(pictures), inputs)
        guess = upsample_scores(result, NETWORK.grid, NETWORK.image_size).argmax(1)
        for image, (truth, answer) in enumerate(zip(labels.long(), guess, strict=True)):
            pairs = torch.bincount((truth * len(CLASSES) + answer).flatten(), minlength=len(CLASSES) ** 2)
            confusion[start + image] = pairs.view(len(CLASSES), -1).cpu()
        counts.append(
            torch.stack([stage.length - result.prefix for stage in result.stages], 1) if result.stages else None
        )
    tokens = torch.cat(counts).cpu().numpy() if counts[0] is not None else None
    hours = np.array([slice_name(seed) for seed in seeds])
    sets = {"all": np.ones(len(seeds), bool), **{name: hours == name for name in SLICES}}
    return {
        name: _figures(confusion.numpy()[chosen], tokens if tokens is None else tokens[chosen])
        for name, chosen in sets.items()
    }


def _figures(confusion: np.ndarray, tokens: np.ndarray | None) -> dict[str, Any]:
    total = confusion.sum(0)
    hits = total.diagonal()
    with np.errstate(invalid="ignore"):
        iou = 100 * hits / (total.sum(0) + total.sum(1) - hits)
    figures: dict[str, Any] = {
        "images": len(confusion),
        "miou_percent": round(float(np.nanmean(iou)), 2),
        "pixel_accuracy_percent": round(float(100 * hits.sum() / max(1, total.sum())), 2),
        "iou_percent": {name: round(float(v), 2) for name, v in zip(CLASSES, iou, strict=True)},
    }
    if tokens is not None and len(tokens):
        figures["tokens"] = {name: _spread(tokens[:, i]) for i, name in enumerate(("after_clap", "after_gbm"))}
    return figures


def _spread(values: np.ndarray) -> dict[str, Any]:
    quantiles = np.percentile(values, (0, 5, 25, 50, 75, 95, 100)).round(1)
    histogram, _ = np.histogram(values, bins=16, range=(0, 1024))
    return {
        "mean": round(float(values.mean()), 1),
        "quantiles_0_5_25_50_75_95_100": quantiles.tolist(),
        "histogram_16_bins_of_64": histogram.tolist(),
    }


# --- files ----------------------------------------------------------------------------------------------------------


def half(model: Segmenter) -> dict[str, Tensor]:
    """The state dict in fp16, as it ships."""
    return {name: value.detach().half().cpu().clone() for name, value in model.state_dict().items()}


def write_checkpoint(path: Path, weights: dict[str, Tensor]) -> None:
    """A checkpoint in the official format; `package.py` writes the variant file of the one that ships."""
    content = {"model": weights, "optimizer": None, "n_cls": NETWORK.classes, "lr_scheduler": None, "epoch": 0}
    torch.save(content, path)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and devices that the figures depend on."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
    }


# --- the whole ------------------------------------------------------------------------------------------------------


def scenes_of(arguments: argparse.Namespace) -> dict[str, tuple[range, Scenes]]:
    """Training, selection and report scenes, by name."""
    wanted = {
        "train": range(arguments.scenes),
        "selection": range(SELECTION_SEED, SELECTION_SEED + arguments.selection),
        "report": range(REPORT_SEED, REPORT_SEED + arguments.report),
    }
    return {name: (seeds, render(seeds, arguments.workers)) for name, seeds in wanted.items()}


def main() -> None:
    arguments = parse(sys.argv[1:])
    arguments.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    scenes = scenes_of(arguments)  # before CUDA starts: its processes are forks
    drawn_s = time.perf_counter() - begin
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.cpu else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    record: dict[str, Any] = {
        "environment": environment(device),
        "network": {**asdict(NETWORK), "parameters": sum(p.numel() for p in new_network(0).parameters())},
        "plan": asdict(PLAN),
        "seed": arguments.seed,
        "scenes": {
            name: {
                "first_seed": seeds.start,
                "count": len(seeds),
                "labels_sha256_of_first": hashlib.sha256(y[0].numpy().tobytes()).hexdigest(),
            }
            for name, (seeds, (_, y)) in scenes.items()
        },
        "drawing_s": round(drawn_s, 1),
        "trainings": {},
        "evaluations": {},
    }
    print(json.dumps({key: record[key] for key in ("environment", "scenes", "drawing_s")}), flush=True)
    data = {name: (seeds, (x.to(device), y.to(device))) for name, (seeds, (x, y)) in scenes.items()}

    def save() -> None:
        (arguments.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")

    networks: dict[str, Segmenter] = {}
    for run in trainings(arguments):
        networks[run.name] = one_training(run, networks, data, record, arguments, device)
        save()
        if run.name == "a":
            record["tau_rule"] = {"a": rule(networks["a"], data["train"][1][0][: arguments.selection])}
            print("tau", record["tau_rule"], flush=True)
            save()
        tau = record["tau_rule"]["a"]["tau"]
        if run.name != "a":
            record["tau_rule"][run.name] = rule(networks[run.name], data["train"][1][0][: arguments.selection])
        write_checkpoint(arguments.out / f"{run.name}.pth", half(networks[run.name]))
        record["evaluations"][run.name] = evaluations(networks[run.name], tau, data, device, arguments)
        save()
    record["ships"] = best(record)
    record["wall_s"] = round(time.perf_counter() - begin, 1)
    save()
    print(summary(record))


def one_training(
    run: Training,
    networks: dict[str, Segmenter],
    data: dict[str, tuple[range, Scenes]],
    record: dict[str, Any],
    arguments: argparse.Namespace,
    device: torch.device,
) -> Segmenter:
    """Trains one network, rounds its weights to fp16 as they ship, and records the run."""
    print(f"training {run.name} at {time.strftime('%H:%M:%S')}", flush=True)
    model = new_network(arguments.seed)
    if run.start:
        model.load_state_dict(networks[run.start].state_dict())
    model.to(device)
    tau = record["tau_rule"]["a"]["tau"] if run.batch_semantics else 1.0
    trained = merging(model, tau, run.batch_semantics) if run.batch_semantics else insert_merging(model, DENSE)
    seed = arguments.seed + ord(run.name)
    record["trainings"][run.name] = train(
        trained, merge_inputs(tau, 1.0, device=device), data["train"][1], run, arguments.batch, seed
    )
    model.load_state_dict({name: value.to(device).float() for name, value in half(model).items()})
    return model.eval()


def evaluations(
    model: Segmenter,
    tau: float,
    data: dict[str, tuple[range, Scenes]],
    device: torch.device,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Dense and merged figures on the selection and the report scenes."""
    inputs = merge_inputs(tau, 1.0, device=device)
    modes = {"dense": insert_merging(model, DENSE), "merged": merging(model, tau, "per_image")}
    return {
        part: {
            mode: evaluate(network, inputs, data[part][1], data[part][0], arguments.eval_batch)
            for mode, network in modes.items()
        }
        for part in ("selection", "report")
    }


def trainings(arguments: argparse.Namespace) -> list[Training]:
    """The four trainings, boxed by time or, with --steps, by steps."""
    seconds = arguments.seconds
    steps = arguments.steps or [None] * 4
    return [
        Training("a", None, None, seconds[0], arguments.rate, steps[0]),
        Training("b", None, "batch_min", seconds[1], arguments.rate, steps[1]),
        Training("c", "a", "batch_min", seconds[2], arguments.rate * 0.3, steps[2]),
        Training("d", "a", "per_image", seconds[3], arguments.rate * 0.3, steps[3]),
    ]


def best(record: dict[str, Any]) -> str:
    """The network trained with ALGM that does best with merging on the selection scenes."""
    merged = [name for name, run in record["trainings"].items() if run["batch_semantics"]]
    return max(merged, key=lambda name: record["evaluations"][name]["selection"]["merged"]["all"]["miou_percent"])


def summary(record: dict[str, Any]) -> str:
    """One line a network and mode."""
    lines = [f"tau {record['tau_rule']}", f"ships {record['ships']}, {record['wall_s']} s in all"]
    for name, parts in record["evaluations"].items():
        for mode, figures in parts["report"].items():
            tokens = figures["all"].get("tokens", {})
            mious = " ".join(f"{part} {figures[part]['miou_percent']:.2f}" for part in figures)
            lines.append(f"{name} {mode:6s} {mious} " + " ".join(f"{k} {v['mean']}" for k, v in tokens.items()))
    return "\n".join(lines)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and record.json")
    parser.add_argument("--scenes", type=int, default=30000, help="training scenes")
    parser.add_argument("--selection", type=int, default=500, help="scenes that decide what ships")
    parser.add_argument("--report", type=int, default=1000, help="scenes of the published figures")
    parser.add_argument("--seconds", type=float, nargs=4, default=(165, 155, 55, 55), help="time box of a, b, c, d")
    parser.add_argument(
        "--steps", type=int, nargs=4, help="steps of a, b, c, d: repeats a run whatever the device's speed"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--eval-batch", type=int, default=50)
    parser.add_argument(
        "--rate", type=float, default=8e-4, help="learning rate from scratch; fine-tuning takes 0.3 of it"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU")
    parser.add_argument("--toy", action="store_true", help="tiny sizes: shows that the script runs")
    arguments = parser.parse_args(words)
    if arguments.toy:
        arguments.scenes, arguments.selection, arguments.report = 2, 1, 1
        arguments.batch, arguments.eval_batch, arguments.steps = 1, 1, [1, 1, 1, 1]
    return arguments


if __name__ == "__main__":
    main()
