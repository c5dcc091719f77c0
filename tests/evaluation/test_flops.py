"""Multiply-adds against the published figures, and against fvcore on a plain network written here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.errors import PlanError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import recipe


def segmenter(dim: int, depth: int, classes: int, side: int, decoder_depth: int = 2) -> Network:
    return Network("segmenter", dim, depth, dim // 64, classes, (side, side), decoder_depth=decoder_depth)


# ALGM (CVPR 2024) and its appendix; the tables say GFLOPs and mean multiply-adds.
ADE20K = [
    (segmenter(192, 12, 150, 512), 12.8),
    (segmenter(384, 12, 150, 512), 38.6),
    (segmenter(768, 12, 150, 512), 130),
    (segmenter(1024, 24, 150, 640), 672),
]


@pytest.mark.parametrize(
    ("network", "published_gmacs"),
    [
        *ADE20K,
        (segmenter(384, 12, 19, 768), 116),
        (segmenter(1024, 24, 19, 768, decoder_depth=1), 1005),
        (segmenter(384, 12, 60, 480), 32.1),
        (segmenter(1024, 24, 60, 480), 343),
        (segmenter(1024, 24, 171, 512), 401),
    ],
)
def test_published_figures_of_dense_networks(network: Network, published_gmacs: float) -> None:
    counted = multiply_adds(network, DENSE)
    assert counted.gmacs == pytest.approx(published_gmacs, rel=0.01)
    assert counted.gflops == 2 * counted.gmacs
    assert counted.merging == 0


class PlainBlock(nn.Module):
    """Transformer block that keeps `tokens` of its rows between attention and MLP, comparing them first if `gbm`."""

    def __init__(self, dim: int, tokens: int | None = None, gbm: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.tokens, self.gbm = tokens, gbm

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2))
        if self.gbm:
            x = x + (x[:, ::2] @ x[:, 1::2].mT).amax() * 0
        return (kept := x[:, : self.tokens]) + self.mlp(self.norm2(kept))


class PlainSegmenter(nn.Module):
    def __init__(self, network: Network, blocks: list[PlainBlock]) -> None:
        super().__init__()
        dim, classes = network.embed_dim, network.classes
        self.network = network
        self.patches = nn.Linear(3 * network.patch_size**2, dim)  # a convolution cannot be traced without values
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(dim)
        self.into_decoder, self.head = nn.Linear(dim, dim), nn.Linear(dim, classes)
        self.decoder = nn.Sequential(*(PlainBlock(dim) for _ in range(network.decoder_depth)), nn.LayerNorm(dim))
        self.patch_weight, self.class_weight = (nn.Parameter(torch.zeros(dim, dim)) for _ in range(2))
        self.mask_norm = nn.LayerNorm(classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(F.pixel_unshuffle(image, self.network.patch_size).flatten(2).mT)
        x = self.norm(self.blocks(torch.cat([x[:, :1], x], 1)))[:, 1:]
        scores = self.head(x) if self.network.decoder == "linear" else self.masks(x)
        maps = scores.mean(1)[..., None, None].expand(-1, -1, *self.network.grid)
        return F.interpolate(maps, self.network.image_size, mode="bilinear")

    def masks(self, x: Tensor) -> Tensor:
        x = self.into_decoder(x)
        x = self.decoder(torch.cat([x, x.new_zeros(1, self.network.classes, x.shape[-1])], 1))
        patches, classes = x.split([x.shape[1] - self.network.classes, self.network.classes], 1)
        return self.mask_norm(patches @ self.patch_weight @ (classes @ self.class_weight).mT)


def traced_total(network: Network, blocks: list[PlainBlock]) -> int:
    """fvcore's count; it needs shapes only, so nothing is computed."""
    fvcore = pytest.importorskip("fvcore.nn", reason="needs fvcore: pip install 'algm-deploy[dev]'")
    with torch.no_grad():
        module = PlainSegmenter(network, blocks).to("meta")
        traced = fvcore.FlopCountAnalysis(module, torch.zeros(1, 3, *network.image_size, device="meta"))
        return int(traced.unsupported_ops_warnings(False).total())


@pytest.mark.parametrize("decoder", ["mask_transformer", "linear"])
@pytest.mark.parametrize("merged", [False, True])
def test_every_part_equals_fvcore(decoder: str, merged: bool) -> None:
    network = Network("segmenter", 128, 4, 2, 7, (80, 112), decoder=decoder, decoder_depth=2)
    plan = MergePlan(clap_layers=(1,), gbm_layers=(3,)) if merged else DENSE
    counts = (23, 14) if merged else ()
    blocks = [PlainBlock(128) for _ in range(4)]
    if merged:
        blocks[0], blocks[2] = PlainBlock(128, 1 + counts[0]), PlainBlock(128, 1 + counts[1], gbm=True)
    assert multiply_adds(network, plan, counts).total == traced_total(network, blocks)


@pytest.mark.parametrize(("network", "published_gmacs"), ADE20K)
def test_fvcore_itself_gives_the_published_figures(network: Network, published_gmacs: float) -> None:
    with torch.device("meta"):
        blocks = [PlainBlock(network.embed_dim) for _ in range(network.depth)]
        traced = traced_total(network, blocks)
    assert traced / 1e9 == pytest.approx(published_gmacs, rel=0.01)
    assert multiply_adds(network, DENSE).total == traced


def test_merging_saves_and_its_own_product_is_stated() -> None:
    network, plan = segmenter(384, 12, 11, 512), MergePlan()
    dense, kept, merged = (multiply_adds(network, plan, counts) for counts in ((1024, 1024), (694, 694), (694, 539)))
    assert dense.total > kept.total > merged.total
    assert merged.merging == kept.merging == 348 * 347 * 384  # 694 patches and cls, split into even and odd rows
    assert dense.total - dense.merging == multiply_adds(network, DENSE).total


@pytest.mark.parametrize("counts", [(), (694,), (539, 694), (2000, 539), (694, 0)])
def test_token_counts_that_cannot_be_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="token count"):
        multiply_adds(segmenter(384, 12, 11, 512), MergePlan(), counts)


# fvcore 0.1.5 on the published modules of tests/data/published, one picture of 96x96. It counts batch norms, which are
# folded here; resizes to the size a map already has; and for SegViT classes behind every stage and 16 for the einsum.
# SETR's one-level heads normalise behind the cls token, here it is normalised too.
SAME_SIZE = 4 * 7 * 96 * 96
TOY_STAGES = {"mla": (1, 2, 3, 4), "atm": (1, 2, 4)}


@pytest.mark.parametrize(
    ("decoder", "decoder_dim", "traced"),
    [
        ("naive", 256, 4000896 - 18432 - SAME_SIZE + 5 * 32),
        ("pup", 256, 1798697088 - 1566720 - SAME_SIZE + 5 * 32),
        ("mla", 16, 5474304 - 13824 - SAME_SIZE),
        ("atm", 16, 4398400 - SAME_SIZE - 3 * 4 * 7 * 36 - 2 * 7 * 16 * 8 - 16),
    ],
)
def test_setr_and_segvit_equal_fvcore(decoder: Any, decoder_dim: int, traced: int) -> None:
    network = Network(
        "segvit" if decoder == "atm" else "setr",
        *(32, 4, 2, 7, (96, 96)),
        decoder=decoder,
        decoder_dim=decoder_dim,
        stages=TOY_STAGES.get(decoder, ()),
    )
    assert multiply_adds(network, DENSE).total == traced


SMALL = (32, 4, 2, 7, (96, 96))


@pytest.mark.parametrize(
    ("network", "traced"),
    [
        (Network("dinov2", *SMALL, patch_size=17, decoder="linear"), 3494176 - 2304 - 4608),
        (
            Network("dinov2", *SMALL, decoder="linear_ms", stages=(1, 2, 3, 4), extra_tokens=4),
            3726976 - 9216 - 4 * 4608,
        ),
        (
            Network("eomt", 32, 5, 2, 7, (96, 96), decoder="queries", decoder_depth=2, queries=10, extra_tokens=4),
            6676436 + 140,
        ),
        (
            Network(
                "vit_adapter",
                *(32, 5, 2, 7, (96, 96)),
                decoder="upernet",
                decoder_dim=16,
                stages=(2, 3, 4, 5),
                adapter_heads=4,
                adapter_dim=16,
            ),
            221079440 - 1062304 - 1152,  # batch norms and the pooling to four sizes
        ),
    ],
    ids=["linear", "linear_ms", "queries", "adapter"],
)
def test_linear_heads_eomt_and_adapter_equal_fvcore(network: Network, traced: int) -> None:
    """fvcore 0.1.5 on the published modules, as above; it rounds what the two einsums of EoMT take, 829440."""
    assert multiply_adds(network, DENSE).total == traced


@pytest.mark.parametrize(
    "name",
    [
        "setr_naive_vit_l16_ade20k",
        "segvit_vit_l16_ade20k",
        "segvit_vit_l16_coco_stuff10k",
        "segvit_vit_l16_pascal_context_59",
    ],
)
def test_published_figures_of_other_families(name: str) -> None:
    known = recipe(name)
    assert multiply_adds(known.network, DENSE).gmacs == pytest.approx(known.published["gmacs_dense"], rel=0.002)


def test_levels_cost_the_tokens_of_their_own_depth() -> None:
    network = recipe("segvit_vit_l16_coco_stuff10k").network
    early, late = (MergePlan(clap_layers=(), gbm_layers=(layer,)) for layer in (8, 9))
    saved = [
        multiply_adds(network, DENSE).decoder - multiply_adds(network, plan, (524,)).decoder for plan in (early, late)
    ]
    assert saved[0] * 2 == saved[1] * 3  # all three levels against two
    mmseg = multiply_adds(recipe("setr_mla_mmseg_vit_l16_ade20k").network, DENSE)
    assert mmseg.decoder < multiply_adds(recipe("setr_mla_vit_l16_ade20k").network, DENSE).decoder
