"""Trains DToP's auxiliary heads for a Segmenter that is there already, and joins the two.

    python benchmarks/dtop_heads.py DATA CHECKPOINT FOLDER --blocks 6 8 --record RECORD     a CPU, some minutes
    python benchmarks/dtop_heads.py DATA CHECKPOINT FOLDER --device cuda --record RECORD     a GPU, half a minute

DATA is CamVid in its official layout, which does not ship with the project: it is for non-commercial use. CHECKPOINT is
a folder in the authors' format, FOLDER what is written: the same with heads, a norm and one linear layer each, after
the blocks. The Segmenter is frozen, so the heads learn from what its blocks make of the training split, seen once: two
windows a photo, as evaluation sees it. Nobody has published such heads for a Segmenter; those of
zbwxp/Dynamic-Token-Pruning are trained with their network. The record tells, of every fourth held-out picture, how many
tokens each head is sure of, and how many of those it is right about.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from cts_policy import HELD_OUT, SIDE, normalised, split
from torch import Tensor, nn

from algm_deploy.environment import device_name
from algm_deploy.models.auxiliary import LinearHead
from algm_deploy.models.checkpoints.reading import read_checkpoint, read_variant
from algm_deploy.models.checkpoints.variant import network_from_variant
from algm_deploy.models.checkpoints.weights import state_dict_for
from algm_deploy.models.loading import network_module
from algm_deploy.models.segmenter import AUXILIARY
from algm_deploy.models.vit import VitNetwork

SURE = (0.9, 0.95, 0.98, 0.99, 0.995)  # confidences above which the record counts tokens
EVERY = 4  # of so many held-out photos the record tells of one
VOID = 255
SCALE = 4  # pixels of a label that the heads learn from, after bilinear enlargement as in evaluation


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("data", type=Path)
    top.add_argument("checkpoint", type=Path)
    top.add_argument("folder", type=Path)
    top.add_argument("--blocks", type=int, nargs="+", default=[6, 8], help="those of the published ViT-B by default")
    top.add_argument("--record", type=Path, required=True)
    top.add_argument("--epochs", type=int, default=12)
    top.add_argument("--batch", type=int, default=8, help="windows at a time")
    top.add_argument("--rate", type=float, default=1e-3)
    top.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = top.parse_args()
    torch.manual_seed(0)
    start = time.perf_counter()
    checkpoint = read_checkpoint(options.checkpoint)
    network = network_from_variant(checkpoint)
    model = network_module(network, state_dict_for(network, checkpoint).state_dict, torch.float32)
    model = model.to(options.device)
    heads = [LinearHead(network.prefix, network.embed_dim, network.classes).to(options.device) for _ in options.blocks]
    seen = cached(model, options.blocks, options.data, "train")
    steps = trained(heads, seen, network.grid, options)
    record: dict[str, Any] = {"device": device_name(options.device == "cuda"), "blocks": options.blocks}
    record |= {"windows": len(seen[1]), "steps": steps}
    record |= {"epochs": options.epochs, "batch": options.batch, "rate": options.rate}
    record["seconds"] = round(time.perf_counter() - start)
    for name in HELD_OUT:
        record[name] = held_out(heads, cached(model, options.blocks, options.data, name), network.grid)
    joined(options, heads)
    options.record.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


@torch.no_grad()
def cached(model: VitNetwork, blocks: list[int], data: Path, name: str) -> tuple[Tensor, Tensor]:
    """Of a split's windows what leaves each block (W, blocks, N, D) in fp16, and their labels (W, h, w)."""
    device = next(model.parameters()).device
    photos, labels = (part.to(device) for part in split(data, name))
    every = EVERY if name in HELD_OUT else 1
    rows, found = [], []
    for window, label in windows(photos[::every], labels[::every]):
        leaving = enumerate(islice(model.encoder.run(window), max(blocks)), 1)
        kept = [tokens.values[:, model.encoder.prefix :].half() for block, tokens in leaving if block in blocks]
        rows.append(torch.stack(kept, 1))
        found.append(label)
    return torch.cat(rows), torch.cat(found)


def windows(photos: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The first and the last window of each photo, normalised, and their labels (1, h, w), a `SCALE`th as large."""
    size = SIDE, round(SIDE * photos.shape[3] / photos.shape[2])
    for photo, label in zip(photos, labels, strict=True):
        pixels = F.interpolate(photo[None].float(), size, mode="bilinear", align_corners=False).round()
        found = F.interpolate(label[None].float(), [side // SCALE for side in size], mode="nearest-exact")[:, 0]
        for left in (0, size[1] - SIDE):
            part = slice(left // SCALE, (left + SIDE) // SCALE)
            yield normalised(pixels[..., left : left + SIDE]), found[..., part].to(torch.uint8)


def trained(
    heads: list[LinearHead], seen: tuple[Tensor, Tensor], grid: tuple[int, int], options: argparse.Namespace
) -> int:
    """Trains the heads on cached rows, by cross-entropy of enlarged scores; how many steps it took."""
    rows, labels = seen
    optimizer = torch.optim.AdamW(nn.ModuleList(heads).parameters(), lr=options.rate, weight_decay=1e-2)
    steps = options.epochs * (len(rows) // options.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, total_steps=steps)
    for step in range(steps):
        if step % (len(rows) // options.batch) == 0:
            order = torch.randperm(len(rows), device=rows.device)
        index, order = order[: options.batch], order[options.batch :]
        target = labels[index].long()
        found = [
            F.cross_entropy(enlarged(head, rows[index, i].float(), grid, target), target, ignore_index=VOID)
            for i, head in enumerate(heads)
        ]
        optimizer.zero_grad()
        torch.stack(found).sum().backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step} of {steps}, losses {[round(loss.item(), 3) for loss in found]}", flush=True)
    return steps


def enlarged(head: LinearHead, rows: Tensor, grid: tuple[int, int], labels: Tensor) -> Tensor:
    """Scores (B, K, h, w) at the size of the labels."""
    maps = head.scores(rows).mT.unflatten(2, grid)  # type: ignore[no-untyped-call]
    return F.interpolate(maps, labels.shape[1:], mode="bilinear", align_corners=False)


@torch.inference_mode()
def held_out(heads: list[LinearHead], seen: tuple[Tensor, Tensor], grid: tuple[int, int]) -> dict[str, Any]:
    """Of each head: pixels it is right about, and above each confidence the share of tokens, and of their pixels."""
    rows, labels = seen
    found: dict[str, Any] = {"windows": len(rows)}
    for i, head in enumerate(heads):
        right: list[float] = []
        sure: dict[float, list[tuple[int, int]]] = {tau: [] for tau in SURE}
        shares: dict[float, list[float]] = {tau: [] for tau in SURE}
        for row, label in zip(rows[:, i].float(), labels, strict=True):
            best, kind = head.scores(row[None]).softmax(2)[0].max(1)
            side = label.shape[0] // grid[0]
            of_token = label.unflatten(0, (grid[0], side)).unflatten(2, (grid[1], side)).movedim(2, 1).flatten(2)
            of_token = of_token.flatten(0, 1).long()  # (N, pixels)
            known = of_token != VOID
            hit = (of_token == kind[:, None]) & known
            right.append(float(hit.sum() / known.sum()))
            for tau in SURE:
                chosen = best > tau
                shares[tau].append(float(chosen.float().mean()))
                sure[tau].append((int(hit[chosen].sum()), int(known[chosen].sum())))
        pixels = {tau: np.array(counts).sum(0) for tau, counts in sure.items()}
        found[f"head {i + 1}"] = {
            "right": round(float(np.mean(right)), 4),
            "sure": {str(tau): round(float(np.mean(part)), 4) for tau, part in shares.items()},
            "right_of_sure": {str(tau): round(float(hit / max(1, of)), 4) for tau, (hit, of) in pixels.items()},
        }
    return found


def joined(options: argparse.Namespace, heads: list[LinearHead]) -> None:
    """Writes the checkpoint with heads."""
    options.folder.mkdir(parents=True, exist_ok=True)
    state = torch.load(options.checkpoint / "checkpoint.pth", map_location="cpu", weights_only=True)["model"]
    state |= {f"{AUXILIARY}.{name}": value.detach().cpu() for name, value in nn.ModuleList(heads).state_dict().items()}
    torch.save({"model": state}, options.folder / "checkpoint.pth")
    facts = dict(read_variant(options.checkpoint / "variant.yml"))
    facts["net_kwargs"] |= {"auxiliary_layers": options.blocks}
    (options.folder / "variant.yml").write_text(yaml.safe_dump(facts))


if __name__ == "__main__":
    main()
