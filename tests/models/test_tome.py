"""ToMe, and ToMe around attention and MLP, equal the published codes on the same weights.

`tests/data/tome.npz` holds what facebookresearch/ToMe (commit af95e4b: tome/merge.py, tome/utils.py,
tome/patch/timm.py, on a ViT as timm 0.4.12 has it) gave for the two pictures of `published/images.npz`, divided by 255,
and weights made by name: tokens behind the last norm, their sizes, and for every patch its row, from the traced
source.

`tests/data/tome_blockwise.npz` holds likewise what Expedit-LargeScale-Vision-Transformer/Expedit-Segmenter (commit
63f4066: mmseg/ops/tome/tome/patch/mmseg.py on its mmseg/models/backbones/tome_vit.py) gave: tokens behind the last
norm, and for every merge the row of every patch, which is what its unmerge makes of row numbers. Attention and MLP
were those of mmcv-lite 2.1.0; for torch_scatter, sums by `scatter_add_` stood in. It protects row 0 even where there
is no cls token, which is not followed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from published_encoder import DATA, TOLERANCE, Encoder, published_encoder, published_images
from torch import Tensor

from algm_deploy.merging import insert_merging, merge_inputs, replay_merging, tome_merges
from algm_deploy.recipe.plan import MergePlan

SHARES = ("fifth", "third", "half")
CASES = ("constant", "schedule", "one_block", "halves", "distilled", "no_cls")


class Case:
    """One published result, and our network for it."""

    def __init__(self, name: str) -> None:
        with np.load(DATA / "tome.npz") as file:
            facts = json.loads(str(file["meta"]))["cases"][name]
            self.tokens, self.size, self.map = (
                torch.from_numpy(file[f"{name}_{part}"]) for part in ("tokens", "size", "map")
            )
        self.prefix = facts["prefix"]
        self.plan = MergePlan((), (), method="tome", tome_r=tuple(facts["r"]))
        self.model = published_encoder(self.prefix)

    @property
    def unmerged(self) -> Tensor:
        """Published tokens of [prefix | every patch]."""
        patches = self.tokens.gather(1, self.map[:, :, None].expand(-1, -1, 32))
        return torch.cat([self.tokens[:, : self.prefix], patches], 1)


class Blockwise:
    """Likewise around attention and MLP."""

    def __init__(self, name: str) -> None:
        with np.load(DATA / "tome_blockwise.npz") as file:
            self.share = json.loads(str(file["meta"]))["cases"][name]
            self.tokens = torch.from_numpy(file[f"{name}_tokens"])
            self.maps = torch.from_numpy(file[f"{name}_maps"]).long()
        self.plan = MergePlan((), (), method="tome_blockwise", tome_share=(self.share,) * 4)
        self.model = Case("constant").model


@pytest.fixture(scope="module")
def images() -> Tensor:
    return published_images()


@pytest.mark.parametrize("name", CASES)
def test_equals_the_published_code(name: str, images: Tensor, record_property: Callable[[str, object], None]) -> None:
    case = Case(name)
    (last,), stages = insert_merging(case.model, case.plan).encoder(images, merge_inputs(0.0, 0.0))
    assert torch.equal(stages[-1].map, case.map)
    assert torch.equal(stages[-1].size, case.size)
    torch.testing.assert_close(last.values, case.unmerged, rtol=0, atol=TOLERANCE)
    dense = case.model.encoder(images)[0][0].values
    assert (dense - case.unmerged).abs().max() > 1000 * TOLERANCE
    record_property("support", "tome timm/encoder torch equals")


@pytest.mark.parametrize("name", CASES)
def test_forced_maps_give_the_same_tokens(name: str, images: Tensor) -> None:
    case = Case(name)
    (last,), stages = insert_merging(case.model, case.plan).encoder(images, merge_inputs(0.0, 0.0))
    forced = merge_inputs(0.0, 0.0, tuple(stage.map for stage in stages))
    (replayed,), _ = replay_merging(case.model, case.plan).encoder(images, forced)
    torch.testing.assert_close(replayed.values, last.values, rtol=0, atol=TOLERANCE)


def test_attention_counts_patches(images: Tensor) -> None:
    """Without sizes in the attention the tokens are others."""
    case = Case("constant")
    merged: Any = insert_merging(case.model, case.plan)
    for block in merged.blocks[:1]:
        block.attn.proportional = lambda x, size, own=block.attn.proportional: own(x, torch.ones_like(size))
    first = merged.encoder(images, merge_inputs(0.0, 0.0))[0][0].values
    torch.testing.assert_close(first, case.unmerged, rtol=0, atol=TOLERANCE)  # block 1 has sizes of one
    second = merged.blocks[1].attn
    second.proportional = lambda x, size, own=second.proportional: own(x, torch.ones_like(size))
    other = merged.encoder(images, merge_inputs(0.0, 0.0))[0][0].values
    assert (other - case.unmerged).abs().max() > 1000 * TOLERANCE


def test_the_decoder_gets_every_patch(images: Tensor) -> None:
    case = Case("distilled")
    (last,), stages = insert_merging(case.model, case.plan).encoder(images, merge_inputs(0.0, 0.0))
    assert last.values.shape == (2, 2 + 36, 32)
    assert last.map.tolist() == [list(range(2, 38))] * 2
    assert last.length.tolist() == [38, 38]
    assert not last.padded
    assert [stage.length.tolist() for stage in stages] == [[31, 31], [24, 24], [17, 17], [10, 10]]


def test_another_plan_leaves_nothing_of_tome(images: Tensor) -> None:
    case = Case("constant")
    plan = MergePlan((1,), (3,), clap_threshold=0.5)
    again = insert_merging(insert_merging(case.model, case.plan), plan)
    inputs = merge_inputs(0.5, 1.0)
    fresh = insert_merging(case.model, plan).encoder(images, inputs)[0][0]
    assert torch.equal(again.encoder(images, inputs)[0][0].values, fresh.values)


@pytest.mark.parametrize(
    ("r", "patches", "merges"),
    [((4, 4), 10, {1: 4, 2: 3}), ((0, 9), 10, {2: 5}), ((1, 1, 1, 1), 2, {1: 1, 2: 0, 3: 0, 4: 0}), ((), 10, {})],
)
def test_at_most_half_of_the_tokens_merge(r: tuple[int, ...], patches: int, merges: dict[int, int]) -> None:
    assert tome_merges(MergePlan((), (), method="tome", tome_r=r), patches, 1) == merges


# --- around attention and MLP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHARES)
def test_blockwise_equals_the_published_code(
    name: str, images: Tensor, record_property: Callable[[str, object], None]
) -> None:
    case = Blockwise(name)
    (last,), stages = insert_merging(case.model, case.plan).encoder(images, merge_inputs(0.0, 0.0))
    assert torch.equal(torch.stack([stage.map for stage in stages]), case.maps)
    torch.testing.assert_close(last.values, case.tokens, rtol=0, atol=TOLERANCE)
    dense = case.model.encoder(images)[0][0].values
    assert (dense - case.tokens).abs().max() > 1000 * TOLERANCE
    record_property("support", "tome_blockwise mmseg/encoder torch equals")


def test_blockwise_gives_every_row_back(images: Tensor) -> None:
    case = Blockwise("fifth")
    (last,), stages = insert_merging(case.model, case.plan).encoder(images, merge_inputs(0.0, 0.0))
    assert last.map.tolist() == [list(range(1, 37))] * 2
    assert last.length.tolist() == [37, 37]
    assert {tuple(stage.length.tolist()) for stage in stages} == {(30, 30)}
    assert {stage.size.sum().item() for stage in stages} == {2 * 37}


def test_blockwise_by_forced_maps(images: Tensor) -> None:
    """The same tokens by their own maps, and others where attention and MLP have each other's."""
    case = Blockwise("third")
    replaying = replay_merging(case.model, case.plan)
    (last,), _ = replaying.encoder(images, merge_inputs(0.0, 0.0, tuple(case.maps)))
    torch.testing.assert_close(last.values, case.tokens, rtol=0, atol=TOLERANCE)
    swapped = case.maps.unflatten(0, (4, 2)).flip(1).flatten(0, 1)
    (other,), _ = replaying.encoder(images, merge_inputs(0.0, 0.0, tuple(swapped)))
    assert (other.values - case.tokens).abs().max() > 1000 * TOLERANCE


@pytest.mark.parametrize("prefix", [0, 2])
def test_blockwise_with_another_prefix(prefix: int, images: Tensor) -> None:
    """One block by hand, with maps of all rows."""
    model = Encoder(prefix).eval().requires_grad_(False)
    block: Any = insert_merging(model, MergePlan((), (), method="tome_blockwise", tome_share=(0.4,))).blocks[0]
    tokens = model.encoder.embed(images)
    x = tokens.values
    for norm, part in ((block.norm1, lambda rows: block.attn(rows, None)), (block.norm2, block.mlp)):
        rows = torch.arange(x.shape[1]).expand(len(x), -1).contiguous()
        entering, sizes, r = norm(x), torch.ones(x.shape[:2]), int(0.4 * x.shape[1])
        left, _, where = torch.ops.algm.tome(entering, sizes, rows, entering, r, prefix)
        x = x + part(left).gather(1, where[:, :, None].expand_as(x))
    torch.testing.assert_close(block(tokens, merge_inputs(0.0, 0.0)).values, x, rtol=0, atol=TOLERANCE)


def test_blockwise_in_some_blocks(images: Tensor) -> None:
    """A block with a share of 0 is the dense one; another plan leaves nothing of it."""
    case = Blockwise("half")
    plan = replace(case.plan, tome_share=(0, 0.5))
    merged = insert_merging(case.model, plan)
    _, stages = merged.encoder(images, merge_inputs(0.0, 0.0))
    assert [stage.length.tolist() for stage in stages] == [[19, 19]] * 2
    again = insert_merging(merged, replace(case.plan, tome_share=()))
    dense = case.model.encoder(images)[0][0].values
    assert torch.equal(again.encoder(images, merge_inputs(0.0, 0.0))[0][0].values, dense)


@pytest.mark.parametrize(
    ("share", "patches", "prefix", "merges"),
    [(0.2, 1600, 1, 320), (0.3, 1600, 1, 480), (0.5, 1600, 1, 800), (0.5, 36, 5, 18), (0.01, 36, 1, 0)],
)
def test_blockwise_shares_take_in_the_prefix(share: float, patches: int, prefix: int, merges: int) -> None:
    plan = MergePlan((), (), method="tome_blockwise", tome_share=(share,) * 2)
    assert tome_merges(plan, patches, prefix) == {1: merges, 2: merges}
