"""Files as the published Segmenter code writes them, at toy size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import yaml

from algm_deploy.recipe.network import Network

TINY = Network("segmenter", embed_dim=32, depth=2, heads=2, classes=5, image_size=(64, 96), decoder_depth=1)
LINEAR = Network("segmenter", 32, 2, 2, 5, (64, 96), decoder="linear", decoder_depth=0)


def tensors(network: Network) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = official_shapes(network) | {"encoder.head.weight": (1000, network.embed_dim), "encoder.head.bias": (1000,)}
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def variant(network: Network) -> dict[str, Any]:
    """The keys that the published training code writes."""
    decoder: dict[str, Any] = {"name": network.decoder, "drop_path_rate": 0.0, "dropout": 0.1}
    if network.decoder == "mask_transformer":
        decoder["n_layers"] = network.decoder_depth
    return {
        "world_batch_size": 8,
        "version": "normal",
        "dataset_kwargs": {
            "dataset": "ade20k",
            "normalization": "vit",
            "patch_type": "algm",
            "threshold": 0.9,
            "merging_window_size": (2, 2),
            "selected_layers": (1, 2),
        },
        "net_kwargs": {
            "image_size": network.image_size,
            "patch_size": network.patch_size,
            "d_model": network.embed_dim,
            "n_heads": network.heads,
            "n_layers": network.depth,
            "normalization": "vit",
            "distilled": False,
            "backbone": "vit_tiny_patch16_384",
            "n_cls": network.classes,
            "decoder": decoder,
        },
        "inference_kwargs": {"im_size": 64, "window_size": 64, "window_stride": 48},
    }


def official(model: dict[str, Any]) -> dict[str, Any]:
    """A file as the published training loop writes it: optimizer, scheduler and scaler states included."""
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer)
    return {
        "model": model,
        "optimizer": optimizer.state_dict(),
        "n_cls": 5,
        "lr_scheduler": scheduler.state_dict(),
        "epoch": 63,
        "loss_scaler": torch.amp.GradScaler("cpu").state_dict(),
    }


def write(folder: Path, content: object, facts: object) -> Path:
    torch.save(content, folder / "checkpoint.pth")
    (folder / "variant.yml").write_text(facts if isinstance(facts, str) else yaml.dump(facts))
    return folder / "checkpoint.pth"


def official_shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape as the published code makes them (rstrudel/segmenter, segm/model)."""
    dim, patch, classes = network.embed_dim, network.patch_size, network.classes
    shapes = {
        "encoder.cls_token": (1, 1, dim),
        **({"encoder.dist_token": (1, 1, dim)} if network.extra_tokens else {}),
        "encoder.pos_embed": (1, network.prefix + math.prod(network.grid), dim),
        "encoder.patch_embed.proj.weight": (dim, 3, patch, patch),
        "encoder.patch_embed.proj.bias": (dim,),
        **_block_shapes("encoder.blocks", network.depth, dim),
        **_pair("encoder.norm", dim),
    }
    if network.decoder == "linear":
        return {**shapes, **_pair("decoder.head", classes, dim)}
    return {
        **shapes,
        "decoder.cls_emb": (1, classes, dim),
        "decoder.proj_patch": (dim, dim),
        "decoder.proj_classes": (dim, dim),
        **_pair("decoder.proj_dec", dim, dim),
        **_block_shapes("decoder.blocks", network.decoder_depth, dim),
        **_pair("decoder.decoder_norm", dim),
        **_pair("decoder.mask_norm", classes),
    }


def _pair(name: str, *weight: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": weight, f"{name}.bias": weight[:1]}


def _block_shapes(name: str, depth: int, dim: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(depth):
        shapes |= _pair(f"{name}.{i}.norm1", dim) | _pair(f"{name}.{i}.norm2", dim)
        shapes |= _pair(f"{name}.{i}.attn.qkv", 3 * dim, dim) | _pair(f"{name}.{i}.attn.proj", dim, dim)
        shapes |= _pair(f"{name}.{i}.mlp.fc1", 4 * dim, dim) | _pair(f"{name}.{i}.mlp.fc2", dim, 4 * dim)
    return shapes
