"""EVA (Fang et al., CVPR 2023) for semantic segmentation: ViT-g with ViT-Adapter and Mask2Former.

The arithmetic is that of baaivision/EVA (EVA-01/seg, mmseg_custom/models/backbones/beit_adapter.py) as it is evaluated.
Keys have no bias. cls has no position, and the adapter knows nothing of it: it passes through all groups of blocks and
is read by nobody behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from algm_deploy.models.mask2former import Mask2Former, head_made, head_names
from algm_deploy.models.naming import Made, Naming
from algm_deploy.models.scores import GridScores
from algm_deploy.models.vit import MergeInputs, VitNetwork
from algm_deploy.models.vit_adapter import (
    ADAPTER_UNUSED,
    AdapterEncoder,
    adapter_made,
    adapter_multiply_adds,
    adapter_names,
    prior_convs,
)
from algm_deploy.recipe.network import Network


class Eva(VitNetwork):
    """Image (B, 3, H, W), normalised, to class scores at a quarter of its size that sum up the masks of all queries."""

    encoder: AdapterEncoder

    def __init__(self, network: Network) -> None:
        nn.Module.__init__(self)
        self.network = network
        self.encoder = AdapterEncoder(network)
        self.decoder = Mask2Former(network)

    def forward(self, image: Tensor, inputs: MergeInputs | None = None) -> GridScores:
        maps, stages = self.encoder.maps(image, inputs)
        scores, masks = self.decoder(maps, inputs)
        return GridScores(scores, self.encoder.prefix, stages, masks)

    @staticmethod
    def decoder_multiply_adds(network: Network, levels: Sequence[int]) -> int:
        """All beside the blocks, the adapter included: none of it depends on what merged."""
        return adapter_multiply_adds(network) + Mask2Former.multiply_adds(network)

    @staticmethod
    def namings(network: Network) -> tuple[Naming, ...]:
        """baaivision/EVA: `eva_sem_seg_mask2former_*` without relative positions."""
        return (
            Naming(
                project="baaivision/EVA",
                mark="decode_head.pixel_decoder.",
                decoders=("mask2former",),
                names=adapter_names(network) | head_names(network),
                convs=prior_convs(),
                changed={"encoder.pos_embed": partial(_without_prefix, network.prefix)},
                made=adapter_made(network) | head_made(network) | _biases(network),
                unused=ADAPTER_UNUSED,
                refusal=_refusal,
            ),
        )


def _without_prefix(prefix: int, positions: Tensor) -> Tensor:
    """Position embeddings (1, P + N, D) of which those of the patches alone are added."""
    return torch.cat([torch.zeros_like(positions[:, :prefix]), positions[:, prefix:]], 1)


def _biases(network: Network) -> dict[str, Made]:
    """Biases of query, key and value of every block: keys have none."""
    dim, made = network.embed_dim, {}
    for i in range(network.depth):
        query, value = (f"backbone.blocks.{i}.attn.{part}_bias" for part in "qv")
        needs = {query: (dim,), value: (dim,)}
        made[f"encoder.blocks.{i}.attn.qkv.bias"] = Made(needs, partial(_around_zero, query, value))
    return made


def _around_zero(query: str, value: str, found: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([found[query].float(), torch.zeros_like(found[query]).float(), found[value].float()])


def _refusal(found: Mapping[str, Tensor]) -> str | None:
    """Variants of the public project that no network here computes."""
    if any("relative_position" in key or "rel_pos_bias" in key for key in found):
        return (
            "expected EVA without relative position bias, got one, which adds a number for each pair of places to "
            "attention, and merged tokens have no place: use an eva_sem_seg_mask2former_* without relpos in its name"
        )
    return None
