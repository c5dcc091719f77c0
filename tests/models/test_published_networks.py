"""Every family equals the published modules, with and without merging; see tests/data/published/README.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from named_weights import weights
from torch import Tensor

from algm_deploy.errors import CheckpointError, RecipeError
from algm_deploy.merging import insert_merging, merge_inputs
from algm_deploy.models.checkpoints.reading import Checkpoint, read_checkpoint
from algm_deploy.models.checkpoints.weights import state_dict_for
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.loading import network_class, network_module, parameter_shapes
from algm_deploy.models.readout import read
from algm_deploy.models.scores import upsample_scores
from algm_deploy.models.vit import VitNetwork
from algm_deploy.recipe.families import architectures
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan

FOLDER = Path(__file__).parents[1] / "data" / "published"
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz") if path.stem != "images")
# Two fp32 implementations of a few hundred sums each; the scores reach 3.
TOLERANCE = 2e-5
# By what comes between groups of blocks two files differ with merging alone.
NETWORKS = [name for name in NAMES if name != "vit_adapter_remerge"]
MMSEG = [name for name in NAMES if name.startswith(("setr_", "segvit"))]


class Golden(NamedTuple):
    meta: dict[str, Any]
    keys: dict[str, tuple[int, ...]]
    network: Network
    dense: Tensor
    merged: Tensor
    token_map: Tensor

    @property
    def plan(self) -> MergePlan:
        layers = (tuple(self.meta[f"{kind}_layers"]) for kind in ("clap", "gbm"))
        between = self.meta.get("between_groups", "unmerge")
        return MergePlan(*layers, clap_threshold=self.meta["tau"], batch="batch_min", between_groups=between)

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(Path("published.pth"), weights(self.keys), None, ())

    def model(self) -> VitNetwork:
        return network_module(self.network, state_dict_for(self.network, self.checkpoint()).state_dict, torch.float32)


def golden(name: str) -> Golden:
    with np.load(FOLDER / f"{name}.npz") as file:
        meta, keys = json.loads(str(file["meta"])), json.loads(str(file["keys"]))
        arrays = [torch.from_numpy(file[key]) for key in ("dense", "merged", "token_map")]
    facts = {key: tuple(value) if isinstance(value, list) else value for key, value in meta["network"].items()}
    return Golden(meta, {key: tuple(shape) for key, shape in keys.items()}, Network(**facts), *arrays)


@pytest.fixture(scope="module")
def images() -> Tensor:
    with np.load(FOLDER / "images.npz") as file:
        return torch.from_numpy(file["images"])


def places(state: Mapping[str, Tensor]) -> set[int]:
    """Where in memory tensors begin whose weights those of a checkpoint are."""
    return {value.untyped_storage().data_ptr() for value in state.values()}


def sampled(scores: Tensor) -> Tensor:
    return scores[:, :, ::4, ::4]


def test_every_family_has_published_values() -> None:
    assert NAMES == [
        "deit_distilled",
        "dinov2_linear",
        "dinov2_registers_ms",
        "eomt",
        "eva",
        "segmenter_distilled",
        "segvit",
        "setr_fudan_mla",
        "setr_fudan_naive",
        "setr_fudan_pup",
        "setr_mmseg_mla",
        "setr_mmseg_naive",
        "setr_mmseg_pup",
        "vit_adapter",
        "vit_adapter_remerge",
    ]
    assert {golden(name).network.family for name in NAMES} == {row.family for row in architectures()}


@pytest.mark.parametrize("name", NETWORKS)
@torch.inference_mode()
def test_scores_without_merging(name: str, images: Tensor) -> None:
    case = golden(name)
    scores, counts, decisions = Deployed(case.model(), case.network, "scores")(images, merge_inputs(0.0, 0.0))
    assert scores.shape == (2, case.network.classes, *case.network.image_size)
    torch.testing.assert_close(sampled(scores), case.dense, rtol=0, atol=TOLERANCE)
    assert counts.shape == (2, 0)
    assert len(decisions) == len(case.network.mask_grids)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_scores_with_merging(name: str, images: Tensor, record_property: Callable[[str, object], None]) -> None:
    case = golden(name)
    model = Deployed(insert_merging(case.model(), case.plan), case.network, "scores")
    scores, counts, maps = model(images, merge_inputs(case.plan.clap_threshold, 1.0))
    assert torch.equal(maps[len(case.plan.layers) - 1] - case.network.prefix, case.token_map)
    assert counts[:, -1].tolist() == (case.token_map.amax(1) + 1).tolist()
    assert counts[0, -1] < 25  # of 36 patches
    torch.testing.assert_close(sampled(scores), case.merged, rtol=0, atol=TOLERANCE)
    assert (case.merged - case.dense).abs().max() > 1000 * TOLERANCE
    record_property("support", f"algm {case.network.family}/{case.network.decoder} torch equals")


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_images_that_decide_alone_are_unpadded_alone(name: str, images: Tensor) -> None:
    """Per-image decisions in a batch: padding reaches no score."""
    case = golden(name)
    plan = replace(case.plan, batch="per_image")
    model = Deployed(insert_merging(case.model(), plan), case.network, "scores")
    inputs = merge_inputs(plan.clap_threshold, 1.0)
    together, counts, _ = model(images, inputs)
    assert counts[0, 0] != counts[1, 0]
    for i in range(2):
        torch.testing.assert_close(together[i : i + 1], model(images[i : i + 1], inputs)[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in NAMES if "mla" in name or name in ("segvit", "dinov2_registers_ms")])
@torch.inference_mode()
def test_each_stage_has_the_map_of_its_own_depth(name: str, images: Tensor) -> None:
    case = golden(name)
    plan = MergePlan((2,), (3,), clap_threshold=case.meta["tau"])
    model = insert_merging(case.model(), plan)
    levels, merges = model.encoder(images.float() / 255, merge_inputs(plan.clap_threshold, 1.0))
    assert len(levels) == len(case.network.stages)
    every_patch = torch.arange(36).expand(2, -1) + case.network.prefix
    for layer, level in zip(case.network.stages, levels, strict=True):
        behind = [m for m, merge in zip(merges, plan.layers, strict=True) if merge <= layer]
        assert torch.equal(level.map, behind[-1].map if behind else every_patch)


@pytest.mark.parametrize("name", NETWORKS)
def test_epsilon_of_every_layer_norm(name: str) -> None:
    """Too small a difference for the scores to tell."""
    case = golden(name)
    found = {
        part.split(".")[0]: module.eps
        for part, module in case.model().named_modules()
        if isinstance(module, torch.nn.LayerNorm)
    }
    published = case.meta["layer_norm_eps"]
    assert found["encoder"] == published["backbone"]
    # mmsegmentation has MLA's norms in a neck, SETR in its backbone; a linear head has none.
    if "decoder" in found:
        assert found["decoder"] == published.get("decode_head", published.get("neck", published["backbone"]))


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("setr_")])
@torch.inference_mode()
def test_a_convolutional_head_sees_every_patch(name: str, images: Tensor) -> None:
    """The head on merged tokens equals the head on a full sequence in which patches repeat their token."""
    case = golden(name)
    model: Any = insert_merging(case.model(), case.plan)
    levels, _ = model.encoder(images.float() / 255, merge_inputs(case.plan.clap_threshold, 1.0))
    every_patch = torch.arange(36).expand(2, -1)
    full = [
        level._replace(values=level.values.gather(1, level.map[:, :, None].expand(-1, -1, 32)), map=every_patch)
        for level in levels
    ]
    merged, every = (read(model.readout(), given, []) for given in (levels, full))
    torch.testing.assert_close(merged, every, rtol=0, atol=TOLERANCE)


# Checkpoints


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "segmenter_distilled"])
def test_unused_keys_are_named(name: str, tmp_path: Path) -> None:
    case = golden(name)
    extra = {"auxiliary_head.0.conv_seg.weight": torch.zeros(7, 16, 1, 1)} if "setr" in name else {}
    state = weights(case.keys) | extra
    torch.save({"meta": {"epoch": 3}, "state_dict": state, "optimizer": {}}, tmp_path / "latest.pth")
    checkpoint = read_checkpoint(tmp_path / "latest.pth")
    assert checkpoint.unread == ("meta", "optimizer")
    found = state_dict_for(case.network, checkpoint)
    assert set(found.state_dict) == set(parameter_shapes(case.network))
    assert {value.dtype for value in found.state_dict.values()} == {torch.float32}
    assert places(found.state_dict).isdisjoint(places(checkpoint.state_dict)), "the file stays in memory"
    naming = next(n for n in network_class(case.network).namings(case.network) if n.mark in " ".join(case.keys))
    assert set(found.unused) == set(state) - set(naming.expected(parameter_shapes(case.network)))
    assert ("backbone.cls_token" in found.unused) == ("backbone.cls_token" in state and case.network.prefix == 0)


@pytest.mark.parametrize("name", MMSEG)
def test_damaged_checkpoints_are_refused(name: str) -> None:
    case = golden(name)
    norm = next((key for key in case.keys if key.endswith("running_var")), "decode_head.q.weight")
    for change, message in (
        ({"backbone.pos_embed": None}, "missing backbone.pos_embed"),
        ({"backbone.extra": torch.zeros(3)}, "unknown backbone.extra"),
        ({norm: torch.full(case.keys[norm], -9.0).sqrt()}, "expected finite weights"),
        ({norm: torch.zeros(3)}, f"expected {norm} of shape"),
        ({"backbone.pos_embed": torch.zeros(1, 26, 32)}, "of 37 tokens, got 26"),
        ({"backbone.pos_embed": torch.zeros(1, 37, 16)}, "expected backbone.pos_embed of shape"),
    ):
        state = {key: value for key, value in (weights(case.keys) | change).items() if value is not None}
        with pytest.raises(CheckpointError, match=message):
            state_dict_for(case.network, Checkpoint(Path("published.pth"), state, None, ()))


@pytest.mark.parametrize(
    ("name", "decoder", "message"),
    [
        (
            "setr_fudan_naive",
            "naive_mmseg",
            "expected network.decoder naive or pup or mla, which fudan-zvg/SETR computes",
        ),
        ("setr_mmseg_naive", "naive", "which mmsegmentation computes, got naive: choose the recipe"),
        ("setr_fudan_pup", "naive", "unknown decode_head.conv_2"),
        ("setr_fudan_mla", "mla_mmseg", "expected network.decoder naive or pup or mla"),
        ("setr_mmseg_mla", "mla", "expected network.decoder naive_mmseg or pup or mla_mmseg"),
        ("segvit", "naive_mmseg", "unknown decode_head.class_embed"),
        ("setr_fudan_naive", "atm", "expected segvit as zbwxp/SegVit names its parameters, got backbone.cls_token"),
    ],
)
def test_the_wrong_recipe_is_refused(name: str, decoder: Any, message: str) -> None:
    case = golden(name)
    stages = {"mla": (1, 2, 3, 4), "mla_mmseg": (1, 2, 3, 4), "atm": (1, 2, 4)}.get(decoder, ())
    family: Any = "segvit" if decoder == "atm" else "setr"
    network = replace(case.network, family=family, decoder=decoder, stages=stages)
    with pytest.raises(CheckpointError, match=message):
        state_dict_for(network, case.checkpoint())


def test_a_shrunk_segvit_is_refused() -> None:
    """Its keys are those of decode_heads/tpn_atm_head.py."""
    case = golden("segvit")
    inside = ("q.weight", "class_embed", "input_proj", "proj_norm")
    state = {
        key.replace("decode_head.", "decode_head.atm.")
        if key.removeprefix("decode_head.").startswith(inside)
        else key: value
        for key, value in weights(case.keys).items()
    }
    with pytest.raises(
        CheckpointError, match=r"published.pth: expected the full SegViT, got a shrunk one, which samples"
    ):
        state_dict_for(case.network, Checkpoint(Path("published.pth"), state, None, ()))


def test_an_eva_with_relative_positions_is_refused() -> None:
    case = golden("eva")
    table = {"backbone.blocks.0.attn.relative_position_bias_table": torch.zeros(126, 2)}
    checkpoint = Checkpoint(Path("eva_relpos.pth"), weights(case.keys) | table, None, ())
    with pytest.raises(CheckpointError, match=r"eva_relpos.pth: expected EVA without relative position bias, got one"):
        state_dict_for(case.network, checkpoint)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "eva",
            {"decoder_dim": 48},
            "expected network.decoder_dim as a multiple of network.decoder_heads 4 and of the 32",
        ),
        ("eva", {"decoder_heads": 3}, "as a multiple of network.decoder_heads 3"),
        ("eva", {"decoder_heads": 0}, "expected network.decoder_heads between 1 and 256, got 0"),
        ("eva", {"pixel_layers": 0}, "expected network.pixel_layers between 1 and 64, got 0"),
        ("eva", {"queries": 0}, "expected network.queries between 1 and 1024, got 0"),
        ("eva", {"image_size": (80, 96)}, "network.image_size in multiples of 32"),
        ("segvit", {"pixel_layers": 1}, "expected network.pixel_layers between 0 and 0, got 1"),
        ("segvit", {"mlp_dim": -1}, "expected network.mlp_dim between 0 and 65536, got -1"),
    ],
)
def test_impossible_masked_networks_are_refused(name: str, change: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        replace(golden(name).network, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": "linear"}, "as network.decoder of segvit, got 'linear'"),
        ({"stages": (1, 2)}, "expected 3 ascending blocks as network.stages for decoder atm"),
        ({"stages": (2, 1, 4)}, "expected 3 ascending blocks"),
        ({"stages": (1, 2, 5)}, "expected network.stages between 1 and 4"),
        ({"decoder_depth": 0}, "expected network.decoder_depth between 1 and 256, got 0"),
        ({"decoder_dim": 15}, "network.heads to divide network.decoder_dim"),
        ({"family": "setr", "decoder": "pup"}, "expected 0 ascending blocks as network.stages for decoder pup"),
    ],
)
def test_impossible_networks_are_refused(change: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        replace(golden("segvit").network, **change)


@pytest.mark.parametrize("classes", [150, 171, 60, 59])
def test_segvit_scores_every_class_but_that_of_no_object(classes: int) -> None:
    network = replace(golden("segvit").network, classes=classes)
    shapes = parameter_shapes(network)
    assert shapes["decoder.queries"] == (classes, 16)
    assert shapes["decoder.classes.weight"] == (classes + 1, 16)
    (naming,) = network_class(network).namings(network)
    model = network_module(network, dict(naming.translated(weights(naming.expected(shapes)), shapes)), torch.float32)
    scores = upsample_scores(model(torch.zeros(1, 3, 96, 96)), network.grid, network.image_size)
    assert scores.shape == (1, classes, 96, 96)
    assert scores.min() >= 0
