"""A small network of each family, its weights and its pictures: what the tests of all rooms share.

Tests that take the same network take the same translation to ONNX (`translated` in conftest.py), which is the most
expensive thing a test does. A test that cares for a size of its own changes it with `replace`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import parity_windows
from algm_deploy.merging import insert_merging
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.loading import network_class, network_module, parameter_shapes
from algm_deploy.models.naming import Naming
from algm_deploy.recipe.network import Network, Size
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.reading import recipe
from algm_deploy.recipe.schema import Output, Recipe
from algm_deploy.runners.contract import Array, runner

# By family and decoder, a recipe of the package. Those of the first two rows differ from it, see `toy`.
RECIPES = {
    ("dinov2", "linear"): "dinov2_vit_s14_ade20k",
    ("dinov2", "linear_ms"): "dinov2_vit_s14_ade20k",
    ("deit", "linear"): "deit_vit_b16_ade20k",
    ("segmenter", "mask_transformer"): "segmenter_vit_s16_ade20k",
    ("segmenter", "linear"): "segmenter_deit_b16_linear_ade20k",
    ("setr", "naive"): "setr_naive_vit_l16_ade20k",
    ("setr", "pup"): "setr_pup_vit_l16_ade20k",
    ("setr", "mla"): "setr_mla_vit_l16_ade20k",
    ("setr", "naive_mmseg"): "setr_naive_mmseg_vit_l16_ade20k",
    ("setr", "mla_mmseg"): "setr_mla_mmseg_vit_l16_ade20k",
    ("segvit", "atm"): "segvit_vit_l16_ade20k",
    ("segvit", "prune"): "segvit_prune_vit_l16_ade20k",
    ("eomt", "queries"): "eomt_vit_l16_ade20k",
    ("vit_adapter", "upernet"): "vit_adapter_deit_s16_ade20k",
    ("eva", "mask2former"): "eva_vit_g16_ade20k",
}
FAMILIES = tuple(RECIPES)
PATCHES = 4, 6  # rows and columns of a toy's grid
# Methods that leave as many tokens in every picture, for the tiny checkpoint: 4 blocks, 8 x 8 patches.
CONSTANT_COUNTS = {
    "tome": MergePlan((), (), method="tome", tome_r=(8, 0, 4)),
    "tome_blockwise": MergePlan((), (), method="tome_blockwise", tome_share=(0.3, 0, 0.5)),
    "elvit": MergePlan(
        *((), ()),
        method="elvit",
        elvit_layer=2,
        elvit_grid=(4, 4),
        elvit_neighbours=3,
        elvit_window=3,
        elvit_temperature=0.3,
    ),
    "evit": MergePlan((), (), method="evit", evit_layers=(2, 3), evit_keep=0.6),
}
TAU = 0.8  # merges some windows of a toy's pictures
SURE = 0.21  # a confidence that heads of random weights have of some tokens of those


def shrunk(full: Recipe) -> Recipe:
    """A recipe of the same kind whose network is exported in a few seconds.

    Only the blocks in which something happens are left, in their order: the first two merges, blocks whose tokens a
    decoder reads, and the last one. Width, grid, classes and decoder are small.
    """
    network, plan = full.network, full.merging
    merges = plan.layers[:2]
    kept = sorted({*merges, *network.stages, network.encoder_depth})
    place = {layer: index for index, layer in enumerate(kept, 1)}
    decoder_depth = min(network.decoder_depth, 1)
    extra = decoder_depth if network.encoder_depth < network.depth else 0
    small = replace(
        network,
        embed_dim=64,  # a head of the mask decoder is that wide
        heads=2,
        depth=len(kept) + extra,
        classes=5,
        image_size=(PATCHES[0] * network.patch_size, PATCHES[1] * network.patch_size),
        stages=tuple(place[layer] for layer in network.stages),
        auxiliary=tuple(place[layer] for layer in network.auxiliary),
        decoder_depth=decoder_depth,
        decoder_dim=64 if network.architecture.masks else 16,
        extra_tokens=min(network.extra_tokens, 2),
        queries=min(network.queries, 6),
        adapter_heads=min(network.adapter_heads, 2),
        adapter_dim=min(network.adapter_dim, 32),
        decoder_heads=min(network.decoder_heads, 2),
        pixel_layers=min(network.pixel_layers, 1),
        mlp_dim=min(network.mlp_dim, 160),
        # The largest of all graphs: those that differ in the scale of pixels alone share a translation.
        normalization="deit" if network.architecture.adapter or network.auxiliary else network.normalization,
    )
    layers = {
        "clap_layers": tuple(place[layer] for layer in plan.clap_layers),
        "gbm_layers": tuple(place[layer] for layer in plan.gbm_layers if layer in merges),
        "dtop_layers": tuple(place[layer] for layer in plan.dtop_layers),
        "tome_r": tuple(4 if layer in merges else 0 for layer in kept) if plan.method == "tome" else (),
    }
    # Names, colours and published figures are those of the full network.
    return replace(full, network=small, merging=replace(plan, **layers), class_names=(), palette=(), published={})


def toy(family: str, decoder: str) -> tuple[Network, MergePlan]:
    """A small network of three to six blocks for 64x96 pixels, and its plan: CLAP in block 1, GBM in a later one.

    DINOv2's has registers, and pads its pictures or reads several blocks. The SegViT that DToP prunes is pruned.
    """
    small = shrunk(recipe(RECIPES[family, decoder]))
    network = small.network
    plan = replace(small.merging, clap_threshold=SURE if network.auxiliary else TAU)
    if (family, decoder) == ("dinov2", "linear"):
        network = replace(network, patch_size=17, image_size=(64, 96), extra_tokens=4)
    if (family, decoder) == ("dinov2", "linear_ms"):
        network = replace(
            network, decoder=decoder, depth=4, patch_size=16, image_size=(64, 96), extra_tokens=1, stages=(1, 2, 3, 4)
        )
    return network, plan


def cts_toy() -> tuple[Network, MergePlan]:
    """A toy with CTS's policy network, two of whose six superpatches share a token."""
    network, _ = toy("segmenter", "mask_transformer")
    return replace(network, policy=True), MergePlan((), (), method="cts", cts_shared=2)


def with_budgets(plan: MergePlan) -> MergePlan:
    """The plan of a toy with budgets in place of thresholds: two of its six windows, three tenths of the rest."""
    return replace(plan, clap="budget", clap_budget=2, gbm="budget", gbm_budget=0.3)


def _naming(network: Network) -> Naming:
    return next(n for n in network_class(network).namings(network) if network.decoder in n.decoders)


def _trained(network: Network) -> Size:
    """The grid of its checkpoint's position embedding: a square one where the authors' project resizes such."""
    naming = _naming(network)
    return (5, 5) if naming.resized is not None and naming.square else network.grid


def checkpoint_state(network: Network) -> dict[str, torch.Tensor]:
    """Random weights, always the same, by the names of the authors' project."""
    naming, (rows, columns) = _naming(network), _trained(network)
    shapes = naming.expected(parameter_shapes(network))
    shapes[naming.positions] = (1, naming.positioned + rows * columns, network.embed_dim)
    generator = torch.Generator().manual_seed(0)

    def drawn(key: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) > 1:
            return torch.randn(shape, generator=generator) / float(np.prod(shape[1:])) ** 0.5
        if key.endswith(("weight", "var", "gamma")):  # of norms
            return torch.rand(shape, generator=generator) + 0.5
        return 0.1 * torch.randn(shape, generator=generator)  # larger biases would make all tokens alike

    return {key: drawn(key, shape) for key, shape in shapes.items()}


def segmenter_checkpoint(folder: Path, network: Network, **facts: Any) -> Path:
    """A Segmenter's checkpoint with `variant.yml` beside it, as the authors' project writes them; `facts`: further ones
    of the network."""
    decoder = {"name": network.decoder, "n_layers": network.decoder_depth}
    kwargs = {"d_model": network.embed_dim, "n_layers": network.depth, "n_heads": network.heads}
    kwargs |= {"n_cls": network.classes, "image_size": [*network.image_size], "patch_size": network.patch_size}
    kwargs |= {"normalization": network.normalization, "decoder": decoder, **facts}
    side = network.image_size[0]
    inference = {"im_size": side, "window_size": side, "window_stride": side}
    said = {"net_kwargs": kwargs, "dataset_kwargs": {"dataset": "camvid"}, "inference_kwargs": inference}
    torch.save({"model": checkpoint_state(network)}, folder / "checkpoint.pth")
    (folder / "variant.yml").write_text(yaml.dump(said))
    return folder / "checkpoint.pth"


def deployed_toy(
    network: Network, plan: MergePlan, output: Output = "scores", dtype: torch.dtype = torch.float32
) -> Deployed:
    """What a bundle of the network deploys, made from `checkpoint_state`."""
    grids = None if _trained(network) == network.grid else (_trained(network), network.grid)
    weights = dict(_naming(network).translated(checkpoint_state(network), parameter_shapes(network), grids))
    model = network_module(network, weights, dtype)
    return Deployed(insert_merging(model, plan), network, output).eval()


def outputs_of(bundle: Bundle, images: int = 2) -> dict[str, Array]:
    """All outputs of ONNX Runtime for the pictures that `verify` takes."""
    with runner(bundle, "onnxruntime-cpu") as run:
        names = [tensor.name for tensor in bundle.signature.outputs]
        return dict(run.infer({"image": parity_windows(bundle.recipe, [], images)}, names))


def pictures(network: Network, images: int = 3) -> np.ndarray:
    """Noise (images, 3, H, W) uint8, in which ever larger parts are of one colour: the first image has none."""
    rng = np.random.default_rng(0)
    found = rng.integers(0, 256, (images, 3, *network.image_size), dtype=np.uint8)
    for image in range(images):
        found[image, :, : network.image_size[0] * image // images] = 90
    return found
