"""Variants differ from ALGM in what their names say, and in nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import PlanError
from algm_deploy.merging import deployed, merge_inputs
from algm_deploy.models.loading import load_network
from algm_deploy.models.merges import Gbm
from algm_deploy.models.vit import Block, Tokens
from algm_deploy.ops.clap import window_members, window_similarity
from algm_deploy.ops.gbm import gbm_similarity
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.tuning.ablations import (
    ALGM,
    ClapVariant,
    GbmVariant,
    MergeAfterMlp,
    Variant,
    apply_variant,
    check_variant,
    variant_of,
)

PLAN = MergePlan(clap_layers=(1,), gbm_layers=(), clap_threshold=0.9)
MEMBERS = torch.as_tensor(window_members([8, 8], [2, 2]))


@pytest.fixture
def image(blob_images: Callable[[int], np.ndarray]) -> Tensor:
    return torch.from_numpy(blob_images(2))


def encoder_of(bundle: Bundle, variant: Variant, plan: MergePlan = PLAN):  # type: ignore[no-untyped-def]
    model = deployed(load_network(bundle), replace(bundle.recipe, merging=plan)).model
    apply_variant(model, plan, variant)
    return model.encoder


def stage(bundle: Bundle, image: Tensor, variant: Variant, plan: MergePlan = PLAN) -> Tokens:
    """The tokens after the first merging block."""
    _, stages = encoder_of(bundle, variant, plan)(image, merge_inputs(plan.clap_threshold, plan.gbm_threshold))
    return cast(Tokens, stages[0])


def test_algm_is_left_alone(tiny_bundle: Bundle, image: Tensor) -> None:
    encoder = encoder_of(tiny_bundle, ALGM)
    assert not isinstance(encoder.blocks[0].merge, ClapVariant)
    assert isinstance(encoder.blocks[0], Block)


def merged_and_before(bundle: Bundle, image: Tensor, variant: Variant) -> tuple[Tokens, Tensor]:
    """What the slot returns, and the tokens it was given."""
    encoder = encoder_of(bundle, variant)
    before = encoder.embed(image)
    block = encoder.blocks[0]
    values = before.values + block.attn(block.norm1(before.values), None)
    return block.merge(before._replace(values=values), merge_inputs(0.9, 1.0)), values


@pytest.mark.parametrize("reduction", ["first", "random", "copies"])
def test_reductions_keep_the_decisions(tiny_bundle: Bundle, image: Tensor, reduction: str) -> None:
    published, before = merged_and_before(tiny_bundle, image, ALGM)
    other, _ = merged_and_before(tiny_bundle, image, Variant(reduction=reduction))
    groups = published.map[:, MEMBERS]  # (B, W, k)
    joined = (groups == groups[..., :1]).all(-1)
    assert 0 < joined.sum() < joined.numel()
    if reduction == "copies":
        assert other.values.shape == before.shape
        means = published.values.gather(1, published.map[..., None].expand_as(before[:, 1:]))
        assert torch.equal(other.values[:, 1:], means)
        return
    assert torch.equal(other.map, published.map)
    assert torch.equal(other.size, published.size)
    for image_index, window in joined.nonzero().tolist():
        token = other.values[image_index, other.map[image_index, MEMBERS[window, 0]]]
        same = (before[image_index, 1 + MEMBERS[window]] == token).all(-1)
        assert same[0] if reduction == "first" else same.any()


def test_a_drawn_patch_depends_on_the_seed_alone(tiny_bundle: Bundle, image: Tensor) -> None:
    first, again, other = (
        merged_and_before(tiny_bundle, image, Variant(reduction="random", seed=seed))[0].values for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("feature", "part"), [("query", 0), ("key", 1), ("value", 2)])
def test_features_decide(tiny_bundle: Bundle, image: Tensor, feature: str, part: int) -> None:
    encoder = encoder_of(tiny_bundle, Variant(clap_feature=feature))
    before = encoder.embed(image).values
    block = encoder.blocks[0]
    width = before.shape[2]
    chosen = block.attn.qkv(block.norm1(before))[..., part * width : (part + 1) * width]
    expected = (window_similarity(chosen, [8, 8], [2, 2], 1) >= 0.9).sum(1)
    _, (found,) = encoder(image, merge_inputs(0.9, 1.0))
    assert torch.equal(found.length, 65 - 3 * expected)
    assert expected.unique().numel() > 1 or 0 < expected[0] < 16


def test_merging_after_the_mlp(tiny_bundle: Bundle, image: Tensor) -> None:
    plan = replace(PLAN, gbm_layers=(3,))
    encoder = encoder_of(tiny_bundle, Variant(after_mlp=True), plan)
    assert [isinstance(block, MergeAfterMlp) for block in encoder.blocks] == [True, False, True, False]
    _, stages = encoder(image, merge_inputs(0.9, 1.0))
    plain = encoder_of(tiny_bundle, ALGM, replace(PLAN, clap_layers=()))
    after = plain.blocks[0](plain.embed(image))
    similarity = window_similarity(after.values, [8, 8], [2, 2], 1)
    assert torch.equal(stages[0].length, 65 - 3 * (similarity >= 0.9).sum(1))
    assert len(stages) == 2


@pytest.mark.parametrize(("feature", "part"), [("query", 0), ("key", 1), ("value", 2)])
def test_features_decide_in_gbm(tiny_bundle: Bundle, image: Tensor, feature: str, part: int) -> None:
    plan = MergePlan(clap_layers=(), gbm_layers=(1,), gbm="fixed", gbm_threshold=0.97)
    encoder = encoder_of(tiny_bundle, Variant(gbm_feature=feature), plan)
    before = encoder.embed(image)
    block = encoder.blocks[0]
    width = before.values.shape[2]
    compared = block.attn.qkv(block.norm1(before.values))[..., part * width : (part + 1) * width]
    best, _ = gbm_similarity(compared, before.length, 1, "code")
    _, (found,) = encoder(image, merge_inputs(1.0, 0.97))
    assert torch.equal(found.length, 65 - (best >= 0.97).sum(1))
    assert 65 - found.length.max() > 0
    assert found.length.min() > 33


def test_gbm_of_the_tokens_themselves_is_gbm(tiny_bundle: Bundle, image: Tensor) -> None:
    plan = MergePlan(clap_threshold=0.9, gbm_layers=(2, 3))
    encoder, varied = encoder_of(tiny_bundle, ALGM, plan), encoder_of(tiny_bundle, ALGM, plan)
    for layer in plan.gbm_layers:
        block = varied.blocks[layer - 1]
        block.merge = GbmVariant(plan, layer, 1, ALGM, block)
    (published, stages), (same, others) = (one(image, merge_inputs(0.9, 1.0)) for one in (encoder, varied))
    for one, other in zip(stages, others, strict=True):
        assert torch.equal(one.map, other.map)
        assert torch.equal(one.size, other.size)
    for tokens, varied_tokens in zip(published, same, strict=True):
        torch.testing.assert_close(tokens.values, varied_tokens.values, rtol=0, atol=0)


def test_variants_combine(tiny_bundle: Bundle, image: Tensor) -> None:
    plan = replace(PLAN, gbm_layers=(3,))
    variant = variant_of(["clap_feature=value", "gbm_feature=key", "reduction=random", "after_mlp=true", "seed=3"])
    assert variant == Variant("value", "key", "random", after_mlp=True, seed=3)
    encoder = encoder_of(tiny_bundle, variant, plan)
    _, stages = encoder(image, merge_inputs(0.9, 1.0))
    assert [type(encoder.blocks[layer - 1]) for layer in plan.layers] == [MergeAfterMlp] * 2
    assert (stages[1].length <= stages[0].length).all()
    assert torch.equal(stages[1].size.sum(1), torch.full((2,), 65.0))


@pytest.mark.parametrize("setting", ["clap_feature=colour", "reduction", "after_mlp=1", "seed=-1", "window=2"])
def test_unknown_variants_are_named(setting: str) -> None:
    with pytest.raises(PlanError, match=r"expected a variant of merging among clap_feature=residual, .*got '"):
        variant_of([setting])


@pytest.mark.parametrize(
    ("setting", "plan", "missing"),
    [
        ("clap_feature=key", {"clap_layers": (), "gbm_layers": (2,)}, "CLAP"),
        ("reduction=first", {"clap_layers": (), "gbm_layers": (2,)}, "CLAP"),
        ("gbm_feature=key", {"gbm_layers": ()}, "GBM"),
    ],
)
def test_a_variant_needs_what_it_varies(setting: str, plan: dict[str, tuple[int, ...]], missing: str) -> None:
    with pytest.raises(PlanError, match=f"expected a plan with {missing}"):
        check_variant(replace(PLAN, **plan), variant_of([setting]))


def test_tome_has_no_variants() -> None:
    tome = MergePlan(clap_layers=(), gbm_layers=(), method="tome", tome_r=(4, 4))
    with pytest.raises(PlanError, match="got method tome"):
        check_variant(tome, variant_of(["after_mlp=true"]))
    check_variant(tome, ALGM)


def test_a_plan_without_the_varied_merge_is_left_alone(tiny_bundle: Bundle) -> None:
    plan = replace(PLAN, clap_layers=(), gbm_layers=(2,))
    encoder = encoder_of(tiny_bundle, Variant(clap_feature="key"), plan)
    assert type(encoder.blocks[1].merge) is Gbm
