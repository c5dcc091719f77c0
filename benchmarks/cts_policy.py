"""Trains CTS's policy network for a Segmenter that is there already, and joins the two.

    python benchmarks/cts_policy.py train DATA POLICY --init EFFICIENTNET --record RECORD     a GPU, a minute
    python benchmarks/cts_policy.py join CHECKPOINT POLICY FOLDER --shared 103

DATA is CamVid in its official layout, which does not ship with the project: it is for non-commercial use. `train`
learns on its training split, as published (tue-mps/cts-segmenter, policynet/): a superpatch of 32x32 pixels is to share
a token where all its pixels have one label. It starts from EFFICIENTNET, weights of EfficientNet-Lite0 on ImageNet by
the names of the package efficientnet-lite-pytorch, or from scratch. The record tells, of held-out pictures, how many of
the chosen superpatches show one class. `join` writes a checkpoint and variant.yml in the format of
tue-mps/cts-segmenter; the Segmenter is as it was, so it never saw a token of a superpatch in training.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from PIL import Image
from torch import Tensor, nn
from trained import write

from algm_deploy.environment import device_name
from algm_deploy.models.checkpoints.reading import read_variant
from algm_deploy.models.deployed import NORMALIZATIONS
from algm_deploy.models.policy import STRIDE, PolicyNet, convs
from algm_deploy.models.segmenter import POLICY

SIDE = 512  # of a window; the short side of a photo is resized to it
ZOOM = 1.4  # up to which training photos are enlarged beyond that
SHARED = (32, 51, 77, 103, 128, 154, 192)  # of 256 superpatches
TABLE = {"stem": ("_conv_stem", "_bn0"), "expand": ("_expand_conv", "_bn0")}
TABLE |= {"depthwise": ("_depthwise_conv", "_bn1"), "project": ("_project_conv", "_bn2")}


def main() -> None:
    options = parser().parse_args()
    options.run(options)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = top.add_subparsers(required=True)
    one = steps.add_parser("train")
    one.add_argument("data", type=Path)
    one.add_argument("policy", type=Path)
    one.add_argument("--init", type=Path)
    one.add_argument("--record", type=Path, required=True)
    one.add_argument("--seconds", type=float, default=60)
    one.add_argument("--batch", type=int, default=32)
    one.add_argument("--rate", type=float, default=5e-4)
    one.set_defaults(run=train)
    two = steps.add_parser("join")
    two.add_argument("checkpoint", type=Path)
    two.add_argument("policy", type=Path)
    two.add_argument("folder", type=Path)
    two.add_argument("--shared", type=int, required=True)
    two.set_defaults(run=join)
    return top


# --- train ------------------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = trainable(options.init).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    photos, labels = (part.to(device) for part in split(options.data, "train"))
    weights = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": weights[0], "weight_decay": 1e-3}, {"params": weights[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate)
    start, steps, done = time.perf_counter(), 0, 0.0
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1, (steps + 1) / 50) * (0.5 + 0.5 * np.cos(np.pi * done))
        windows, target = crops(photos, labels, options.batch)
        with torch.autocast(device, torch.bfloat16):
            score = model(windows)
        loss = F.binary_cross_entropy_with_logits(score.float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps % 100 == 0:
            print(f"{steps} steps, loss {loss.item():.3f}", flush=True)
        done = (time.perf_counter() - start) / options.seconds
    model.eval()
    record: dict[str, Any] = {"device": device_name(device == "cuda"), "steps": steps}
    record |= {"seconds": round(time.perf_counter() - start, 1), "batch": options.batch}
    record |= {name: held_out(model, *(part.to(device) for part in split(options.data, name))) for name in HELD_OUT}
    write(record, options.record)
    torch.save({name: value.cpu() for name, value in published(model).items()}, options.policy)
    print(json.dumps(record))


HELD_OUT = ("val", "test")


def split(data: Path, name: str) -> tuple[Tensor, Tensor]:
    """Photos (P, 3, h, w) and labels (P, 1, h, w) of a split, uint8."""
    photos = [np.asarray(Image.open(path)) for path in sorted((data / "images" / name).iterdir())]
    labels = [np.asarray(Image.open(path)) for path in sorted((data / "annotations" / name).iterdir())]
    return torch.from_numpy(np.stack(photos)).permute(0, 3, 1, 2), torch.from_numpy(np.stack(labels))[:, None]


def crops(photos: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Random windows, mirrored and of another brightness, normalised; which superpatches (B, M) show one class."""
    height, width = photos.shape[2:]
    device = photos.device
    index = torch.randint(len(photos), (count,), device=device)
    zoom = 1 + (ZOOM - 1) * torch.rand(count, device=device)
    theta = torch.zeros(count, 2, 3, device=device)
    for axis, side in enumerate((width, height)):
        part = min(height, width) / (zoom * side)
        theta[:, axis, axis] = part
        theta[:, axis, 2] = (1 - part) * (2 * torch.rand(count, device=device) - 1)
    theta[:, 0, 0] *= torch.randint(0, 2, (count,), device=device) * 2 - 1
    grid = F.affine_grid(theta, [count, 3, SIDE, SIDE], align_corners=False)
    pixels = F.grid_sample(photos[index].float(), grid, "bilinear", "border", align_corners=False)
    found = F.grid_sample(labels[index].float(), grid, "nearest", "border", align_corners=False)
    light = 0.6 + 0.8 * torch.rand(count, 3, 1, 1, device=device).lerp(torch.rand(count, 1, 1, 1, device=device), 0.8)
    return normalised((pixels * light).clamp(0, 255)), one_class(found)


def one_class(labels: Tensor) -> Tensor:
    """Which superpatches (B, M) of labels (B, 1, H, W) have one, void among them, as fp32."""
    highest, lowest = (F.max_pool2d(sign * labels.float(), STRIDE) for sign in (1, -1))
    return (highest == -lowest).flatten(1).float()


def normalised(pixels: Tensor) -> Tensor:
    mean, deviation = (torch.tensor(v, device=pixels.device)[:, None, None] for v in NORMALIZATIONS["vit"])
    return ((pixels / 255 - mean) / deviation).contiguous(memory_format=torch.channels_last)


@torch.inference_mode()
def held_out(model: nn.Module, photos: Tensor, labels: Tensor) -> dict[str, Any]:
    """Of the windows that a photo is seen in: how many superpatches show one class, and how many of those chosen."""
    score, truth = (torch.cat(parts) for parts in zip(*seen(model, photos, labels), strict=True))
    best_first = truth.gather(1, score.argsort(dim=1, descending=True))
    chosen = {str(count): round(float(best_first[:, :count].mean()), 4) for count in SHARED}
    at_most = {str(count): round(float((truth.sum(1) / count).clamp(max=1).mean()), 4) for count in SHARED}
    right = round(float(((score > 0) == (truth > 0)).float().mean()), 4)
    return {"photos": len(photos), "one_class": round(float(truth.mean()), 4), "accuracy": right} | {
        "one_class_among_chosen": chosen,
        "one_class_among_chosen_at_most": at_most,
    }


def seen(model: nn.Module, photos: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores and truth of the first and the last window of each photo."""
    height, width = photos.shape[2:]
    size = SIDE, round(SIDE * width / height)
    for first in range(0, len(photos), 16):
        part = slice(first, first + 16)
        pixels = F.interpolate(photos[part].float(), size, mode="bilinear", align_corners=False)
        found = F.interpolate(labels[part].float(), size, mode="nearest-exact")
        for left in (0, size[1] - SIDE):
            window = slice(left, left + SIDE)
            yield model(normalised(pixels[..., window].round())), one_class(found[..., window])


def trainable(init: Path | None) -> nn.Module:
    """The policy network with batch norms behind its convolutions, which deployment folds into them."""
    model = PolicyNet()
    found = torch.load(init, map_location="cpu", weights_only=True) if init else {}
    for ours, _ in convs(POLICY, "").items():
        name = ours.partition(".")[2]
        conv = model.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        facts = conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding
        plain = nn.Conv2d(*facts, groups=conv.groups, bias=False)  # type: ignore[arg-type]
        norm = nn.BatchNorm2d(conv.out_channels)
        if found:
            *place, part = name.split(".")
            start = f"_blocks.{place[1]}." if place else ""
            for module, theirs in zip((plain, norm), TABLE[part], strict=True):
                start_of = f"{start}{theirs}."
                module.load_state_dict(
                    {k.removeprefix(start_of): v for k, v in found.items() if k.startswith(start_of)}
                )
        model.set_submodule(name, nn.Sequential(plain, norm))
    return model


def published(model: nn.Module) -> dict[str, Tensor]:
    """Weights by the names of tue-mps/cts-segmenter."""
    state = model.state_dict()
    named = {f"{POLICY}.{name}": value for name, value in state.items() if name.startswith("head.")}
    for ours, theirs in convs(POLICY, f"{POLICY}.backbone").items():
        name = ours.partition(".")[2]
        for place, layer in enumerate(theirs):
            start = f"{name}.{place}."
            named |= {f"{layer}.{k.removeprefix(start)}": v for k, v in state.items() if k.startswith(start)}
    return named


# --- join -------------------------------------------------------------------------------------------------------------


def join(options: argparse.Namespace) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    state = torch.load(options.checkpoint / "checkpoint.pth", map_location="cpu", weights_only=True)["model"]
    policy = torch.load(options.policy, map_location="cpu", weights_only=True)
    torch.save({"model": state | policy}, options.folder / "checkpoint.pth")
    facts = dict(read_variant(options.checkpoint / "variant.yml"))
    kwargs = facts["net_kwargs"]
    patches = int(np.prod([side // kwargs["patch_size"] for side in kwargs["image_size"]]))
    schedule = [patches - 4 * options.shared, options.shared]
    facts["net_kwargs"] |= {"policy_method": "policy_net", "policy_schedule": schedule}
    facts["dataset_kwargs"] = {"dataset": facts["dataset_kwargs"]["dataset"]}
    (options.folder / "variant.yml").write_text(yaml.safe_dump(facts))


if __name__ == "__main__":
    main()
