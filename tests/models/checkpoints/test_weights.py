"""Tensors of official checkpoints as weights of a network: what is refused, and position embeddings at other grids."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from official_files import LINEAR, TINY, official, official_shapes, tensors, variant, write

from algm_deploy.errors import CheckpointError, ExportError
from algm_deploy.models.checkpoints.reading import read_checkpoint
from algm_deploy.models.checkpoints.variant import network_from_variant
from algm_deploy.models.checkpoints.weights import state_dict_for
from algm_deploy.models.loading import converted
from algm_deploy.models.segmenter import resized_positions
from algm_deploy.recipe.network import Network


@pytest.mark.parametrize("network", [TINY, LINEAR], ids=lambda network: network.decoder)
def test_official_file(tmp_path: Path, network: Network) -> None:
    model = tensors(network)
    path = write(tmp_path, official(model), variant(network))
    assert "!!python/tuple" in path.with_name("variant.yml").read_text()
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.path == path
    assert set(checkpoint.unread) == {"optimizer", "n_cls", "lr_scheduler", "epoch", "loss_scaler"}
    assert network_from_variant(checkpoint) == network
    weights = state_dict_for(network, checkpoint)
    assert weights.unused == ("encoder.head.bias", "encoder.head.weight")
    assert weights.resized_from is None
    assert set(weights.state_dict) == set(official_shapes(network))
    assert all(torch.equal(value, model[key]) for key, value in weights.state_dict.items())


@pytest.mark.parametrize(("decoder", "decoder_depth"), [("mask_transformer", 2), ("linear", 0)])
def test_golden_networks(vectors_dir: Path, decoder: Any, decoder_depth: int) -> None:
    network = Network("segmenter", 64, 4, 2, 11, (128, 128), decoder=decoder, decoder_depth=decoder_depth)
    checkpoint = read_checkpoint(vectors_dir / f"{decoder}_4x64.pth")
    weights = state_dict_for(network, checkpoint)
    assert (weights.unused, weights.resized_from) == ((), None)
    assert set(weights.state_dict) == set(checkpoint.state_dict)


def test_half_weights_become_fp32_copies(tmp_path: Path) -> None:
    model = {key: value.half() for key, value in tensors(TINY).items()}
    checkpoint = read_checkpoint(write(tmp_path, {"model": model}, variant(TINY)))
    weights = state_dict_for(TINY, checkpoint)
    assert {value.dtype for value in weights.state_dict.values()} == {torch.float32}
    tensors_again = checkpoint.state_dict["encoder.cls_token"]
    weights.state_dict["encoder.cls_token"].zero_()
    assert bool(tensors_again.any())


def test_weights_are_in_fp32_one_at_a_time(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a network with weights of 5 GB more would not fit into memory."""
    in_fp32: list[weakref.ref[torch.Tensor]] = []

    def watched(name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert not any(earlier() is not None for earlier in in_fp32), f"of those before {name} one is still there"
        in_fp32.append(weakref.ref(weight))
        return converted(name, weight, dtype)

    checkpoint = read_checkpoint(tiny)
    monkeypatch.setattr("algm_deploy.models.checkpoints.weights.converted", watched)
    found = state_dict_for(TINY, checkpoint, torch.float16).state_dict
    assert len(in_fp32) == len(found)
    assert all(torch.equal(weight, checkpoint.state_dict[name].half()) for name, weight in found.items())
    with pytest.raises(AssertionError, match="still there"):  # in fp32 they are what is asked for
        state_dict_for(TINY, checkpoint)


def test_weights_beyond_the_range_of_a_dtype(tmp_path: Path) -> None:
    model = tensors(TINY)
    model["decoder.proj_patch"][3] = -7e4
    checkpoint = read_checkpoint(write(tmp_path, {"model": model}, variant(TINY)))
    assert state_dict_for(TINY, checkpoint, torch.bfloat16)
    with pytest.raises(ExportError, match=r"up to 65504 for float16, decoder\.proj_patch holds 70000: export with"):
        state_dict_for(TINY, checkpoint, torch.float16)


# Position embeddings


def test_position_embedding_is_resized_once_like_the_published_code(tiny: Path) -> None:
    checkpoint = read_checkpoint(tiny)
    larger = Network("segmenter", 32, 2, 2, 5, (96, 64), decoder_depth=1)
    weights = state_dict_for(larger, checkpoint)
    assert weights.resized_from == (4, 6)
    stored = checkpoint.state_dict["encoder.pos_embed"]
    got = weights.state_dict["encoder.pos_embed"]
    assert got.shape == (1, 25, 32)
    assert torch.equal(got[:, 0], stored[:, 0])
    by_hand = stored[0, 1:].reshape(4, 6, 32).permute(2, 0, 1)[None]
    by_hand = torch.nn.functional.interpolate(by_hand, (6, 4), mode="bilinear", align_corners=False)
    assert torch.equal(got[0, 1:].reshape(6, 4, 32), by_hand[0].permute(1, 2, 0))


def test_resizing_interpolates_rows_as_rows() -> None:
    rows = torch.arange(4.0).repeat_interleave(6).reshape(1, 24, 1)  # constant along each row of a 4 x 6 grid
    grid = resized_positions(rows, (4, 6), (8, 3)).reshape(8, 3)
    assert torch.equal(grid, grid[:, :1].expand(8, 3))
    assert grid[:, 0].tolist() == [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]


def test_a_square_grid_is_assumed_without_variant(tmp_path: Path) -> None:
    square = Network("segmenter", 32, 2, 2, 5, (64, 64), decoder_depth=1)
    torch.save({"model": tensors(square)}, tmp_path / "checkpoint.pth")
    assert state_dict_for(TINY, read_checkpoint(tmp_path)).resized_from == (4, 4)
    torch.save({"model": tensors(TINY)}, tmp_path / "checkpoint.pth")
    with pytest.raises(CheckpointError, match=r"square grid or that of variant\.yml .* got 24 patches"):
        state_dict_for(square, read_checkpoint(tmp_path))


# Tensors that do not fit


def test_missing_and_unknown_keys(tmp_path: Path) -> None:
    model = tensors(TINY)
    del model["encoder.norm.bias"]
    model["encoder.blocks.0.ls1.gamma"] = torch.ones(32)
    model["x\ny"] = torch.ones(32)
    checkpoint = read_checkpoint(write(tmp_path, {"model": model}, variant(TINY)))
    with pytest.raises(
        CheckpointError, match=r"missing encoder\.norm\.bias, unknown encoder\.blocks\.0\.ls1\.gamma, 'x\\ny':"
    ):
        state_dict_for(TINY, checkpoint)


def test_many_wrong_keys_make_one_short_sentence(tiny: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"unknown decoder\.blocks\.0\.attn.proj.bias, .* and .* more: choose"
    ) as caught:
        state_dict_for(LINEAR, read_checkpoint(tiny))
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("encoder.blocks.1.mlp.fc1.weight", (64, 32)),
        ("encoder.pos_embed", (1, 25, 16)),
        ("encoder.pos_embed", (25, 32)),
        ("encoder.pos_embed", (1, 1, 32)),
        ("encoder.pos_embed", (1, 0, 32)),
    ],
)
def test_wrong_shape(tmp_path: Path, key: str, shape: tuple[int, ...]) -> None:
    model = tensors(TINY) | {key: torch.zeros(shape)}
    checkpoint = read_checkpoint(write(tmp_path, {"model": model}, variant(TINY)))
    with pytest.raises(CheckpointError, match=r"expected .*embedding|expected encoder.* got"):
        state_dict_for(TINY, checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_weights_that_are_not_finite_in_fp32(tmp_path: Path, value: float) -> None:
    model = tensors(TINY)
    model["decoder.proj_patch"] = model["decoder.proj_patch"].double().index_fill(0, torch.tensor([3]), value)
    checkpoint = read_checkpoint(write(tmp_path, {"model": model}, variant(TINY)))
    with pytest.raises(CheckpointError, match=r"got NaN or infinity in decoder\.proj_patch"):
        state_dict_for(TINY, checkpoint)


def test_a_distilled_deit_has_two_tokens_in_front(tmp_path: Path) -> None:
    facts = variant(TINY)
    facts["net_kwargs"]["distilled"] = True
    model = tensors(TINY) | {"encoder.dist_token": torch.rand(1, 1, 32), "encoder.pos_embed": torch.rand(1, 26, 32)}
    model["encoder.head_dist.weight"] = torch.zeros(5, 32)
    checkpoint = read_checkpoint(write(tmp_path, {"model": model}, facts))
    network = network_from_variant(checkpoint)
    assert network == replace(TINY, extra_tokens=1)
    found = state_dict_for(network, checkpoint)
    tokens = torch.cat([model["encoder.cls_token"], model["encoder.dist_token"]], 1)
    assert torch.equal(found.state_dict["encoder.cls_token"], tokens)
    assert torch.equal(found.state_dict["encoder.pos_embed"], model["encoder.pos_embed"])
    assert "encoder.head_dist.weight" in found.unused
    larger = state_dict_for(replace(network, image_size=(96, 64)), checkpoint)
    assert larger.state_dict["encoder.pos_embed"].shape == (1, 26, 32)
    assert torch.equal(larger.state_dict["encoder.pos_embed"][:, :2], model["encoder.pos_embed"][:, :2])
    with pytest.raises(CheckpointError, match=r"unknown encoder\.dist_token"):
        state_dict_for(TINY, checkpoint)
