"""What variant.yml says, and whatever is wrong in it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from official_files import TINY, official, tensors, variant, write
from toys import checkpoint_state

from algm_deploy.errors import CheckpointError, RecipeError
from algm_deploy.models.checkpoints.reading import VARIANT_FILE, Checkpoint, read_checkpoint
from algm_deploy.models.checkpoints.variant import network_from_variant, plan_from_variant, settings_from_variant
from algm_deploy.models.checkpoints.weights import state_dict_for
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import resolve
from algm_deploy.recipe.schema import Protocol, Recipe


def recipe_of(checkpoint: Checkpoint) -> Recipe:
    """As an export without a recipe decides it."""
    return resolve([(VARIANT_FILE, settings_from_variant(checkpoint))])[0]


def test_variant_makes_a_recipe(tiny: Path) -> None:
    recipe = recipe_of(read_checkpoint(tiny))
    assert recipe.network == TINY
    assert recipe.merging == MergePlan(clap_layers=(1,), gbm_layers=(2,), window=(2, 2), clap_threshold=0.9)
    assert recipe.protocol == Protocol("ade20k", short_side=64, window=64, stride=48, max_ratio=4.0)
    assert recipe.name == tiny.parent.name


def test_a_checkpoint_trained_without_merging_is_dense(tmp_path: Path) -> None:
    facts = variant(TINY)
    facts["dataset_kwargs"] |= {"patch_type": "pure", "threshold": None, "selected_layers": None}
    checkpoint = read_checkpoint(write(tmp_path, official(tensors(TINY)), facts))
    assert plan_from_variant(checkpoint) == DENSE


def shared(schedule: object = (20, 1)) -> dict[str, Any]:
    """As tue-mps/cts-segmenter writes it: no word of patches that merge."""
    facts = variant(TINY)
    for key in ("patch_type", "threshold", "merging_window_size", "selected_layers"):
        del facts["dataset_kwargs"][key]
    facts["net_kwargs"] |= {"policy_method": "policy_net", "policy_schedule": schedule, "policynet_ckpt": "model.pth"}
    return facts


def test_a_checkpoint_of_cts_shares_as_many_tokens(tmp_path: Path) -> None:
    network = replace(TINY, policy=True)
    checkpoint = read_checkpoint(write(tmp_path, official(checkpoint_state(network)), shared()))
    recipe = recipe_of(checkpoint)
    assert recipe.network == network
    assert recipe.merging == replace(DENSE, method="cts", cts_shared=1)
    weights = state_dict_for(network, checkpoint).state_dict
    assert weights["encoder.policy.blocks.1.depthwise.weight"].shape == (96, 1, 3, 3)
    without = variant(TINY)
    without["net_kwargs"]["policy_method"] = "no_sharing"
    with pytest.raises(CheckpointError, match=r"policy_method is False"):
        network_from_variant(read_checkpoint(write(tmp_path, {"model": checkpoint_state(network)}, without)))


def test_a_schedule_that_does_not_make_up_the_grid_is_refused(tmp_path: Path) -> None:
    network = replace(TINY, policy=True)
    checkpoint = read_checkpoint(write(tmp_path, {"model": checkpoint_state(network)}, shared((20, 2))))
    with pytest.raises(CheckpointError, match=r"policy_schedule that makes up 24 patches.*got \(20, 2\)"):
        plan_from_variant(checkpoint)


def test_trained_checkpoints(shared_dir: Path) -> None:
    checkpoint = read_checkpoint(shared_dir / "models" / "segmenter_vit_s16_camvid_algm")
    recipe = recipe_of(checkpoint)
    assert recipe.network == Network("segmenter", 384, 12, 6, 11, (512, 512))
    assert recipe.merging == MergePlan(clap_threshold=0.9319)
    assert recipe.protocol == Protocol("camvid", 512, 512, 480)
    weights = state_dict_for(recipe.network, checkpoint)
    assert len(weights.state_dict) == 183
    assert {value.dtype for value in weights.state_dict.values()} == {torch.float32}


def test_variant_is_optional_until_it_is_needed(tmp_path: Path) -> None:
    torch.save({"model": tensors(TINY)}, tmp_path / "other.pth")
    checkpoint = read_checkpoint(tmp_path / "other.pth")
    assert state_dict_for(Network("segmenter", 32, 2, 2, 5, (64, 96), decoder_depth=1), checkpoint)
    with pytest.raises(CheckpointError, match=r"expected variant.yml beside .*name a recipe"):
        network_from_variant(checkpoint)


@pytest.mark.parametrize("distilled", [True, False])
def test_variant_and_tensors_agree_on_distillation(tmp_path: Path, distilled: bool) -> None:
    facts = variant(TINY)
    facts["net_kwargs"]["distilled"] = distilled
    extra = {} if distilled else {"encoder.dist_token": torch.zeros(1, 1, 32)}
    checkpoint = read_checkpoint(write(tmp_path, {"model": tensors(TINY) | extra}, facts))
    with pytest.raises(CheckpointError, match=f"distilled is {distilled} in variant.yml, tensors have {not distilled}"):
        network_from_variant(checkpoint)


# variant.yml


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("net_kwargs.d_model", 48, "d_model is 48 in variant.yml, tensors have 32"),
        ("net_kwargs.d_model", "32", "expected a whole number as net_kwargs.d_model, got '32'"),
        ("net_kwargs.d_model", None, "expected a whole number as net_kwargs.d_model, got None"),
        ("net_kwargs.n_layers", 10**9, "expected network.depth between 1 and 256, got 1000000000"),
        ("net_kwargs.n_layers", 12, "n_layers is 12 in variant.yml, tensors have 2"),
        ("net_kwargs.n_layers", -1, "expected network.depth between 1 and 256, got -1"),
        ("net_kwargs.n_layers", 10**30, "expected a whole number as net_kwargs.n_layers, got 1000"),
        ("net_kwargs.n_heads", 5, "expected network.heads to divide the width 32, got 5"),
        ("net_kwargs.n_heads", True, "expected a whole number as net_kwargs.n_heads, got True"),
        ("net_kwargs.n_cls", 150, "n_cls is 150 in variant.yml, tensors have 5"),
        ("net_kwargs.patch_size", 8, "patch_size is 8 in variant.yml, tensors have 16"),
        ("net_kwargs.image_size", (64, 64, 3), "expected a whole number or 2 whole numbers"),
        ("net_kwargs.image_size", (60, 96), "expected network.image_size in multiples of the patch size 16"),
        ("net_kwargs.image_size", "large", "expected a whole number or 2 whole numbers"),
        ("net_kwargs.normalization", "bgr", "expected vit or deit"),
        ("net_kwargs.normalization", ["vit"], "expected vit or deit"),
        ("net_kwargs.decoder.name", "fcn", "expected mask_transformer or linear"),
        ("net_kwargs.decoder.n_layers", 2, "decoder.n_layers is 2 in variant.yml, tensors have 1"),
        ("net_kwargs.decoder", None, "expected a table as net_kwargs.decoder, got None"),
        ("net_kwargs", [], "expected a table as net_kwargs, got []"),
        ("dataset_kwargs.patch_type", "tome", "expected pure or algm"),
        ("dataset_kwargs.selected_layers", None, "expected selected_layers, merging_window_size and threshold in d"),
        ("dataset_kwargs.selected_layers", (1, "5"), "expected a whole number as dataset_kwargs.selected_layers.1"),
        ("dataset_kwargs.selected_layers", (5, 1), "CLAP needs the full patch grid"),
        ("dataset_kwargs.selected_layers", (), "expected selected_layers, merging_window_size and threshold in d"),
        (
            "dataset_kwargs.merging_window_size",
            None,
            "expected selected_layers, merging_window_size and threshold in d",
        ),
        ("dataset_kwargs.threshold", None, "expected selected_layers, merging_window_size and threshold in d"),
        ("dataset_kwargs.threshold", float("nan"), "expected a finite number"),
        ("dataset_kwargs.merging_window_size", (1, 1), "a CLAP window covers at least two patches"),
        ("dataset_kwargs.dataset", None, "expected a text as dataset_kwargs.dataset, got None"),
        ("inference_kwargs.window_stride", 0, "expected protocol.stride between 1 and 64, got 0"),
        ("inference_kwargs.window_stride", 65, "expected protocol.stride between 1 and 64"),
        ("inference_kwargs", None, "expected a table as inference_kwargs, got None"),
    ],
)
def test_every_wrong_fact_is_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        settings_from_variant(changed(tmp_path, key, value))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("selected_layers", (1, 3), "variant.yml: expected merging layers up to 2"),
        ("merging_window_size", (8, 8), "variant.yml: expected a merging.window within the grid (4, 6)"),
    ],
)
def test_merging_that_does_not_fit_the_network_is_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    checkpoint = changed(tmp_path, f"dataset_kwargs.{key}", value)
    with pytest.raises(RecipeError, match=re.escape(message)):
        recipe_of(checkpoint)


def changed(folder: Path, key: str, value: object) -> Checkpoint:
    """A checkpoint with another value of one fact in its `variant.yml`."""
    facts = variant(TINY)
    *sections, last = key.split(".")
    section = facts
    for name in sections:
        section = section[name]
    section[last] = value
    return read_checkpoint(write(folder, {"model": tensors(TINY)}, facts))
