"""EoMT (Kerssies et al., CVPR 2025): a plain ViT whose last blocks also take queries; queries and patches make masks.

The arithmetic is that of tue-mps/eomt (models/eomt.py, models/scale_block.py, the semantic scores of
training/lightning_module.py) as it is evaluated, without masked attention. Tokens are merged in the blocks before the
queries' and pass those merged. They are unmerged before the mask features, which convolutions enlarge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models.multiply_adds import NORM, attention, mlp
from algm_deploy.models.naming import Naming, joined_tokens, layer_scales
from algm_deploy.models.readout import Joining, Level, ReadNetwork, Readout, Steps
from algm_deploy.models.scores import MaskScores, on_grid
from algm_deploy.models.vit import Block, Tokens
from algm_deploy.recipe.network import Network

EPS = 1e-6
_BACKBONE = "network.encoder.backbone."
_QUERIES = "network.q.weight"
_MASK_SHARE = "network.attn_mask_probs"


class Enlarge(nn.Module):
    """Feature maps (B, D, h, w) at twice the size."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(dim, dim, 2, 2)
        self.smooth = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        self.norm = nn.LayerNorm(dim, EPS)

    def forward(self, maps: Tensor) -> Tensor:
        maps = self.smooth(F.gelu(self.up(maps)))
        normalised: Tensor = self.norm(maps.permute(0, 2, 3, 1))  # every pixel over its channels
        return normalised.permute(0, 3, 1, 2)


class QueryDecoder(nn.Module):
    """The blocks that queries pass together with the tokens, and the heads that make classes and masks of them."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        dim = network.embed_dim
        self.queries = nn.Parameter(torch.zeros(network.queries, dim))
        self.blocks = nn.ModuleList(Block(dim, network.heads, EPS) for _ in range(network.decoder_depth))
        self.norm = nn.LayerNorm(dim, EPS)
        self.classes = nn.Linear(dim, network.classes + 1)
        self.mask = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.enlarge = nn.Sequential(*(Enlarge(dim) for _ in range(_enlargements(network))))

    def forward(self, queries: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Masks (B, Q, h, w) and classes (B, Q, K + 1) of queries (B, Q, D) and maps (B, D, rows, columns)."""
        masks = torch.einsum("bqc,bchw->bqhw", self._mask_features(queries), self.enlarge(patches))
        return masks, self.classes(queries)

    def _mask_features(self, queries: Tensor) -> Tensor:
        first, second, last = self.mask
        features: Tensor = last(F.gelu(second(F.gelu(first(queries)))))
        return features


def _enlargements(network: Network) -> int:
    """How often the patch grid is doubled: masks come at a quarter of the picture's size."""
    return max(1, int(math.log2(network.patch_size)) - 2)


class Eomt(ReadNetwork):
    """Image (B, 3, H, W), normalised, to class scores (B, K, H, W) that sum up the masks of all queries."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, EPS, norm=False)
        self.decoder = QueryDecoder(network)

    def readout(self) -> Readout:
        joining = Joining(self.decoder.queries, self.decoder.blocks, self.decoder.norm)
        return Readout((Level(),), self._scores, joining, unmerged=True)

    def _scores(self, levels: Sequence[Tokens], queries: Tensor | None, steps: Steps) -> MaskScores:
        (tokens,) = levels
        patches = on_grid(tokens.values, self.network.grid)
        masks, classes = self.decoder(queries, patches)
        return MaskScores(masks, classes, self.encoder.prefix, [])

    @staticmethod
    def decoder_multiply_adds(network: Network, levels: Sequence[int]) -> int:
        """The last blocks with queries beside the tokens, the heads, masks at up to a quarter of the size."""
        (tokens,) = levels
        dim, queries = network.embed_dim, network.queries
        rows = queries + tokens + network.prefix
        total = network.decoder_depth * (attention(rows, dim) + mlp(rows, dim)) + NORM * rows * dim
        total += queries * dim * (network.classes + 1) + 3 * queries * dim * dim
        cells = network.grid[0] * network.grid[1]
        for _ in range(_enlargements(network)):
            cells *= 4
            total += cells * dim * (dim + 9 + NORM)
        height, width = network.image_size
        return total + queries * dim * cells + queries * network.classes * height * width

    @staticmethod
    def namings(network: Network) -> tuple[Naming, ...]:
        """tue-mps/eomt on the backbones of timm, which give no position to the tokens before the patches."""
        blocks = {f"encoder.blocks.{i}": f"{_BACKBONE}blocks.{i}" for i in range(network.encoder_depth)}
        for i in range(network.decoder_depth):
            blocks[f"decoder.blocks.{i}"] = f"{_BACKBONE}blocks.{network.encoder_depth + i}"
        names = {f"{ours}.": f"{theirs}." for ours, theirs in blocks.items()}
        names |= {"encoder.": _BACKBONE, "decoder.norm.": f"{_BACKBONE}norm.", "decoder.queries": _QUERIES}
        names |= {"decoder.classes.": "network.class_head."}
        names |= {f"decoder.mask.{i}.": f"network.mask_head.{2 * i}." for i in range(3)}
        inside = {"up.": "conv1.", "smooth.": "conv2.", "norm.": "norm."}
        for i in range(_enlargements(network)):
            names |= {f"decoder.enlarge.{i}.{ours}": f"network.upscale.{i}.{theirs}" for ours, theirs in inside.items()}
        tokens = joined_tokens(
            network.embed_dim, {f"{_BACKBONE}cls_token": 1, f"{_BACKBONE}reg_token": network.extra_tokens}
        )
        return (
            Naming(
                project="tue-mps/eomt",
                mark=_BACKBONE,
                decoders=("queries",),
                names=names,
                made=tokens | layer_scales(network, blocks),
                unused=("network.encoder.pixel_", _MASK_SHARE, "criterion."),
                positioned=0,
                refusal=partial(_refusal, network),
            ),
        )


def _refusal(network: Network, found: Mapping[str, Tensor]) -> str | None:
    """Reasons that lie in the values or need words beyond a shape."""
    if any(key.startswith((f"{_BACKBONE}rope_embeddings.", f"{_BACKBONE}patch_embed.cls_token")) for key in found):
        return (
            "expected EoMT on DINOv2, got it on DINOv3, whose rotary positions merged tokens do not have: use a DINOv2 "
            "one"
        )
    hidden = _extent(found, f"{_BACKBONE}blocks.0.mlp.fc2.weight", 1)
    if hidden and _extent(found, f"{_BACKBONE}blocks.0.mlp.fc1.weight", 0) == 2 * hidden:
        return "expected EoMT S, B or L, got the SwiGLU layers of the giant model, which no network here computes"
    queries = _extent(found, _QUERIES, 0)
    if queries and queries != network.queries:
        return (
            f"expected {network.queries} queries, got {queries}: published panoptic and instance "
            "checkpoints have 200 and answer another question; use a semantic one, or its own number as "
            "network.queries"
        )
    if _MASK_SHARE in found and bool(found[_MASK_SHARE].any()):
        return (
            f"expected attention masks that training has annealed away, got {_MASK_SHARE} "
            f"{found[_MASK_SHARE].tolist()}: use the checkpoint of the end of the training"
        )
    return None


def _extent(found: Mapping[str, Tensor], key: str, axis: int) -> int:
    """One side of a matrix; 0 where there is none."""
    return found[key].shape[axis] if key in found and found[key].ndim == 2 else 0
