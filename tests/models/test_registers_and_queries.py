"""DINOv2, DeiT and EoMT: their checkpoints, what is refused, and pictures that are padded to whole patches.

That they equal the published modules is in test_published_networks.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from named_weights import weights
from torch import Tensor

from algm_deploy.errors import CheckpointError, PlanError, RecipeError
from algm_deploy.merging import insert_merging, merge_inputs
from algm_deploy.models.checkpoints.reading import Checkpoint, read_checkpoint
from algm_deploy.models.checkpoints.weights import state_dict_for
from algm_deploy.models.deployed import NORMALIZATIONS, Deployed, PixelEmbedding
from algm_deploy.models.loading import network_class, network_module, parameter_shapes
from algm_deploy.models.scores import upsample_scores
from algm_deploy.models.vit import PatchEmbedding, VitNetwork, padded
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.schema import Protocol, Recipe

DINOV2 = Network("dinov2", 16, 2, 2, 5, (56, 56), patch_size=14, decoder="linear", normalization="deit")
REGISTERS = replace(DINOV2, extra_tokens=4)
FOUR_LEVELS = replace(REGISTERS, depth=4, decoder="linear_ms", stages=(1, 2, 3, 4))
DEIT = Network("deit", 16, 2, 2, 5, (64, 64), decoder="linear", normalization="deit", extra_tokens=1)
EOMT = Network(
    *("eomt", 16, 3, 2, 5, (64, 64)),
    decoder="queries",
    decoder_depth=1,
    normalization="deit",
    extra_tokens=4,
    queries=6,
)
EVERY = (DINOV2, REGISTERS, FOUR_LEVELS, DEIT, replace(DEIT, extra_tokens=0), EOMT)
BACKBONE = "network.encoder.backbone."


def official(network: Network) -> dict[str, Tensor]:
    """A checkpoint as its project names it, with what plays no part at inference."""
    (naming,) = network_class(network).namings(network)
    found = weights(naming.expected(parameter_shapes(network)))
    counter: dict[str, tuple[int, ...]] = {"decode_head.bn.num_batches_tracked": ()}
    extra: dict[str, tuple[int, ...]] = {
        "dinov2": {"mask_token": (1, 16)} | counter,
        "deit": {"head.weight": (10, 16), "head_dist.bias": (10,)} | counter,
        "eomt": {"network.encoder.pixel_mean": (3,), "network.attn_mask_probs": (1,), "criterion.empty_weight": (6,)},
    }[network.family]
    return found | weights(extra)


def refused(network: Network, state: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        state_dict_for(network, Checkpoint(Path("published.pth"), state, None, ()))


def model_of(network: Network) -> VitNetwork:
    checkpoint = Checkpoint(Path("published.pth"), official(network), None, ())
    return network_module(network, state_dict_for(network, checkpoint).state_dict, torch.float32)


# Checkpoints


@pytest.mark.parametrize("network", EVERY, ids=lambda n: f"{n.family}-{n.decoder}-{n.prefix}")
def test_every_parameter_has_a_source(network: Network) -> None:
    state = official(network)
    found = state_dict_for(network, Checkpoint(Path("published.pth"), state, None, ()))
    shapes = parameter_shapes(network)
    assert {name: tuple(value.shape) for name, value in found.state_dict.items()} == shapes
    assert {value.dtype for value in found.state_dict.values()} == {torch.float32}
    assert found.resized_from is None
    (naming,) = network_class(network).namings(network)
    assert set(found.unused) == set(state) - set(naming.expected(shapes))
    assert len(found.unused) == {"dinov2": 2, "deit": 3, "eomt": 3}[network.family]


@pytest.mark.parametrize("network", EVERY, ids=lambda n: f"{n.family}-{n.decoder}-{n.prefix}")
def test_another_checkpoint_is_refused_by_its_keys(network: Network) -> None:
    """Every key: its absence, and an unknown one beside it; every other shape."""
    state = official(network)
    (naming,) = network_class(network).namings(network)
    for key in naming.expected(parameter_shapes(network)):
        if (key.startswith("decode_head.") and key != "decode_head.bn.weight") or re.search(r"blocks\.[1-9]", key):
            continue  # one of the head and one block stand for all
        refused(network, {k: v for k, v in state.items() if k != key}, rf"missing {key},|expected {network.family} as")
        refused(network, state | {f"{key}.extra": torch.zeros(2)}, rf"missing none, unknown {key}.extra")
        shape = tuple(state[key].shape)
        refused(network, state | {key: torch.zeros(*shape, 2)}, rf"{key} of shape|position embeddings|queries")
        refused(network, state | {key: torch.full(shape, torch.nan)}, "expected finite weights")
        refused(network, state | {key: torch.tensor(1.0)}, rf"{key} of shape|position embeddings")


def test_registers_lie_between_cls_and_patches_and_have_no_position() -> None:
    state, found = official(REGISTERS), model_of(REGISTERS).state_dict()
    tokens, positions = found["encoder.cls_token"], found["encoder.pos_embed"]
    assert torch.equal(tokens, torch.cat([state["cls_token"], state["register_tokens"]], 1))
    assert torch.equal(positions[:, :1], state["pos_embed"][:, :1])
    assert not positions[:, 1:5].any()
    assert torch.equal(positions[:, 5:], state["pos_embed"][:, 1:])


def test_the_distillation_token_has_a_position_eomts_tokens_have_none() -> None:
    state, found = official(DEIT), model_of(DEIT).state_dict()
    assert torch.equal(found["encoder.cls_token"], torch.cat([state["cls_token"], state["dist_token"]], 1))
    assert torch.equal(found["encoder.pos_embed"], state["pos_embed"])
    state, found = official(EOMT), model_of(EOMT).state_dict()
    assert not found["encoder.pos_embed"][:, :5].any()
    assert torch.equal(found["encoder.pos_embed"][:, 5:], state[f"{BACKBONE}pos_embed"])


def test_layer_scale_is_folded_into_the_layer_in_front_of_it() -> None:
    state, found = official(DINOV2), model_of(DINOV2).state_dict()
    for layer, scale in (("attn.proj", "ls1"), ("mlp.fc2", "ls2")):
        gamma = state[f"blocks.1.{scale}.gamma"]
        weight, bias = (state[f"blocks.1.{layer}.{kind}"] for kind in ("weight", "bias"))
        torch.testing.assert_close(
            found[f"encoder.blocks.1.{layer}.weight"], weight * gamma[:, None], rtol=1e-6, atol=0
        )
        torch.testing.assert_close(found[f"encoder.blocks.1.{layer}.bias"], bias * gamma, rtol=1e-6, atol=0)


def test_backbone_and_head_come_from_one_folder(tmp_path: Path) -> None:
    state = official(REGISTERS)
    head = {key: value for key, value in state.items() if key.startswith("decode_head.")}
    backbone = {key: value for key, value in state.items() if key not in head}
    torch.save(backbone, tmp_path / "dinov2_reg4_pretrain.pth")
    refused(REGISTERS, read_checkpoint(tmp_path).state_dict, "got the backbone alone: put the head's file")
    torch.save({"state_dict": head, "meta": {"CLASSES": ["wall"]}, "optimizer": {}}, tmp_path / "head.pth")
    (tmp_path / "README.md").write_text("not a checkpoint")
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.path == tmp_path
    assert [file.name for file in checkpoint.files] == ["dinov2_reg4_pretrain.pth", "head.pth"]
    assert checkpoint.unread == ("meta", "optimizer")
    assert set(state_dict_for(REGISTERS, checkpoint).state_dict) == set(parameter_shapes(REGISTERS))
    torch.save(backbone, tmp_path / "another.pth")
    with pytest.raises(CheckpointError, match=r"parts of one network, blocks\.0.* came again in dinov2_reg4_pretrain"):
        read_checkpoint(tmp_path)


def test_a_part_that_executes_code_is_refused(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return Path.touch, (str(tmp_path / "owned"),)

    torch.save(official(DINOV2), tmp_path / "backbone.pth")
    torch.save({"state_dict": {"decode_head.bn.weight": Hostile()}}, tmp_path / "head.pth")
    with pytest.raises(CheckpointError, match=r"head\.pth: expected tensors and plain values"):
        read_checkpoint(tmp_path)
    assert not (tmp_path / "owned").exists()


# What is refused with the reason


def test_the_giant_model_is_refused() -> None:
    giant = {key.replace("mlp.fc1", "mlp.w12"): value for key, value in official(DINOV2).items()}
    refused(DINOV2, giant, "expected DINOv2 S, B or L, got SwiGLU layers")
    giant = official(EOMT) | {f"{BACKBONE}blocks.0.mlp.fc2.weight": torch.zeros(16, 32)}  # half of what fc1 gives
    refused(EOMT, giant, "expected EoMT S, B or L, got the SwiGLU layers")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("network.q.weight", torch.zeros(200, 16), "expected 6 queries, got 200: published panoptic and instance"),
        ("network.attn_mask_probs", torch.tensor([0.5]), r"masks that training has annealed away, got .* \[0.5\]"),
        (f"{BACKBONE}rope_embeddings.inv_freq", torch.zeros(4), "expected EoMT on DINOv2, got it on DINOv3"),
    ],
)
def test_other_eomt_checkpoints_are_refused(key: str, value: Tensor, message: str) -> None:
    refused(EOMT, official(EOMT) | {key: value}, message)


def test_a_recipe_of_another_family_is_refused() -> None:
    refused(DINOV2, official(DEIT), "expected dinov2 as facebookresearch/dinov2 names its parameters")
    refused(replace(DEIT, patch_size=16), official(DINOV2), r"unknown blocks\.0\.ls1\.gamma")
    refused(REGISTERS, official(DINOV2), "missing register_tokens")
    refused(DINOV2, official(REGISTERS), "unknown register_tokens")
    refused(DEIT, official(replace(DEIT, extra_tokens=0)), "missing dist_token")
    refused(DINOV2, official(FOUR_LEVELS), r"unknown blocks\.2")
    refused(
        replace(FOUR_LEVELS, decoder="linear", stages=()),
        official(FOUR_LEVELS),
        r"decode_head\.bn\.\w+ of shape \(16,\), got \(64,\)",
    )


@pytest.mark.parametrize(
    ("network", "change", "message"),
    [
        (EOMT, {"queries": 0}, "expected network.queries between 1 and 1024, got 0"),
        (EOMT, {"decoder_depth": 0}, "expected network.decoder_depth between 1 and 2"),
        (EOMT, {"decoder_depth": 3}, "expected network.decoder_depth between 1 and 2"),
        (EOMT, {"decoder": "linear"}, "expected queries as network.decoder of eomt"),
        (EOMT, {"image_size": (72, 64)}, "multiples of the patch size"),
        (DEIT, {"extra_tokens": 2}, "expected network.extra_tokens between 0 and 1"),
        (DEIT, {"decoder": "linear_ms"}, "expected linear as network.decoder of deit"),
        (FOUR_LEVELS, {"stages": (1, 2, 3)}, "expected 4 ascending blocks"),
        (Network("setr", 16, 4, 2, 5, (64, 64), decoder="pup"), {"extra_tokens": 1}, "between 0 and 0, got 1"),
    ],
)
def test_impossible_networks_are_refused(network: Network, change: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        replace(network, **change)


def test_blocks_with_queries_do_not_merge() -> None:
    plan = MergePlan((1,), (3,))
    with pytest.raises(RecipeError, match=r"expected merging layers up to 2, got \(1, 3\)"):
        Recipe("toy", EOMT, plan, Protocol("camvid", 64, 64, 64))
    with pytest.raises(PlanError, match="merges in layer 3, the network has 2"):
        insert_merging(model_of(EOMT), plan)


# Position embeddings


def test_another_grid_is_interpolated_once_as_published() -> None:
    """Without registers by factors with a tenth of a patch more; with them by the size, smoothed; DeiT by the size."""
    for network, how in (
        (DINOV2, lambda x: F.interpolate(x, scale_factor=((6 + 0.1) / 4, (3 + 0.1) / 4), mode="bicubic")),
        (REGISTERS, lambda x: F.interpolate(x, size=(6, 3), mode="bicubic", antialias=True)),
        (DEIT, lambda x: F.interpolate(x, size=(6, 3), mode="bicubic", align_corners=False)),
    ):
        state = official(network)
        other = replace(network, image_size=(6 * network.patch_size, 3 * network.patch_size))
        found = state_dict_for(other, Checkpoint(Path("published.pth"), state, None, ()))
        assert found.resized_from == (4, 4)
        square = state["pos_embed"][:, -16:].reshape(1, 4, 4, 16).permute(0, 3, 1, 2)
        expected = how(square).permute(0, 2, 3, 1).reshape(1, 18, 16)
        torch.testing.assert_close(
            found.state_dict["encoder.pos_embed"][:, other.prefix :], expected, rtol=0, atol=1e-6
        )


def test_a_grid_that_is_no_square_or_another_size_is_refused() -> None:
    state = official(DINOV2)
    refused(DINOV2, state | {"pos_embed": torch.zeros(1, 16, 16)}, "of a square grid in pos_embed, got 15 patches")
    refused(EOMT, official(EOMT) | {f"{BACKBONE}pos_embed": torch.zeros(1, 25, 16)}, "of 16 tokens, got 25")


# Pictures that are padded


@pytest.mark.parametrize("size", [(64, 64), (61, 70), (14, 15), (1, 13)])
def test_pictures_are_padded_to_whole_patches(size: tuple[int, int]) -> None:
    image = torch.rand(2, 3, *size) + 1
    found = padded(image, 14)
    rows, columns = (-side % 14 for side in size)
    assert found.shape[-2:] == (size[0] + rows, size[1] + columns)
    top, left = rows // 2, columns // 2
    assert torch.equal(found[:, :, top : top + size[0], left : left + size[1]], image)
    assert found.sum() == pytest.approx(image.sum().item(), rel=1e-5)


@pytest.mark.parametrize("size", [(64, 61), (56, 50), (56, 56)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_padding_is_zero_behind_the_normalisation(size: tuple[int, int], dtype: torch.dtype) -> None:
    """As the published evaluation pads: the mean colour, not black or grey pixels."""
    torch.manual_seed(0)
    embedding = PatchEmbedding(14, 32).requires_grad_(False).to(dtype)
    image = torch.randint(0, 256, (2, 3, *size)).byte()
    mean, deviation = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in NORMALIZATIONS["deit"])
    normalised = (image.double() / 255 - mean) / deviation
    found = PixelEmbedding(embedding, "deit", size)(image)
    rounded = embedding(normalised.to(dtype)).double()
    expected = embedding.double()(normalised)
    assert (found.double() - expected).abs().max() <= max(2 * (rounded - expected).abs().max().item(), 1e-5)


def test_a_padded_picture_scores_at_its_own_size() -> None:
    network = replace(DINOV2, image_size=(60, 50))
    assert network.grid == (5, 4)
    found = state_dict_for(network, Checkpoint(Path("published.pth"), official(DINOV2), None, ()))
    model = network_module(network, found.state_dict, torch.float32)
    deployed = Deployed(insert_merging(model, MergePlan((1,), (2,))), network, "scores")
    scores, counts, _ = deployed(torch.randint(0, 256, (2, 3, 60, 50)).byte(), merge_inputs(0.5, 1.0))
    assert scores.shape == (2, 5, 60, 50)
    assert counts.max() <= 20


# Tokens in front of the patches


@pytest.mark.parametrize("network", [REGISTERS, FOUR_LEVELS, DEIT, EOMT], ids=lambda n: f"{n.family}-{n.decoder}")
@torch.inference_mode()
def test_leading_tokens_never_merge(network: Network) -> None:
    """With all thresholds open, every patch that can merge does; the tokens in front keep their rows."""
    model = model_of(network)
    dense = model.encoder.embed(torch.zeros(2, 3, *network.image_size)).values
    merged = insert_merging(model, MergePlan((1,), (2,), gbm="fixed"))
    grey = torch.full((2, 3, *network.image_size), 0.25)
    _, stages = merged.encoder(grey, merge_inputs(-1.0, -1.0))
    assert dense.shape[1] == network.prefix + 16
    assert [stage.length.tolist() for stage in stages] == [[network.prefix + 4] * 2, [network.prefix + 2] * 2]
    assert all(stage.map.min() == network.prefix for stage in stages)
    assert all(torch.equal(stage.size[:, : network.prefix], torch.ones(2, network.prefix)) for stage in stages)
    assert stages[-1].size[:, network.prefix :].sum().item() == 2 * 16


@torch.inference_mode()
def test_padding_reaches_no_query() -> None:
    image = torch.rand(2, 3, 64, 64)
    image[0, :, :, :32] = 0.5
    merged: Any = insert_merging(model_of(EOMT), MergePlan((1,), (2,)))
    inputs = merge_inputs(0.95, 1.0)
    together = merged(image, inputs)
    assert len({*together.stages[0].length.tolist()}) == 2
    for i in range(2):
        alone = merged(image[i : i + 1], inputs)
        found, expected = (upsample_scores(scores, EOMT.grid, EOMT.image_size) for scores in (together, alone))
        torch.testing.assert_close(found[i : i + 1], expected, rtol=0, atol=2e-6)
