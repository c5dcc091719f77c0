"""SegViT (Zhang et al., NeurIPS 2022): plain ViT encoder whose class queries attend to tokens; attention is the mask.

The arithmetic is that of zbwxp/SegVit (decode_heads/atm_head.py) on mmsegmentation's encoder. Queries attend to merged
tokens; each attention map is unmerged along its tokens, by the token map of the depth it reads (ALGM, CVPR 2024,
section 3.4: after the decoder). The maps are then summed, which equals unmerging first.

`SegvitPrune` is the SegViT that DToP (ICCV 2023) trains, of zbwxp/Dynamic-Token-Pruning (decode_heads/prune_head.py):
its decoder reads the last block alone, and the same head stands after earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models.auxiliary import Auxiliary
from algm_deploy.models.multiply_adds import NORM, attention, mlp
from algm_deploy.models.naming import Naming, dropped, mmseg_encoder
from algm_deploy.models.readout import PLAIN, Level, ReadNetwork, Readout, Steps
from algm_deploy.models.scores import GridScores, MaskScores, on_canvas, on_grid, probabilities, to_grid
from algm_deploy.models.vit import Attention, Tokens
from algm_deploy.ops.mask_labels import covered
from algm_deploy.recipe.network import Network

ENCODER_EPS = 1e-6


class CrossAttention(nn.Module):
    """Queries (B, K, D) attend to rows (B, S, D); returns the mixed rows and what went into the softmax."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(
        self, queries: Tensor, rows: Tensor, valid: Tensor | None, compared: bool, steps: Steps
    ) -> tuple[Tensor, Tensor | None]:
        """`valid` (B, S) is false for rows of padding. The second result is the mean over heads (B, K, S), fp32, which
        is there if it is to be `compared`."""
        projected = self.q(queries), self.k(rows), self.v(rows)
        mixed, similarity = steps.crossed(*projected, self.heads, self.scale, valid, compared)
        out: Tensor = self.proj(mixed)
        return out, similarity


class DecoderLayer(nn.Module):
    """Post-norm transformer decoder layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn, self.cross = Attention(dim, heads), CrossAttention(dim, heads)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))

    def forward(
        self, queries: Tensor, rows: Tensor, valid: Tensor | None, compared: bool, steps: Steps
    ) -> tuple[Tensor, Tensor | None]:
        queries = self.norm1(queries + self.attn(queries, None))
        mixed, similarity = self.cross(queries, rows, valid, compared, steps)
        queries = self.norm2(queries + mixed)
        return self.norm3(queries + self.fc2(F.relu(self.fc1(queries)))), similarity


class Stage(nn.Module):
    """Decoder layers over the tokens of one depth; the attention of the last layer is the mask."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        dim = network.decoder_dim
        self.proj, self.norm = nn.Linear(network.embed_dim, dim), nn.LayerNorm(dim)
        self.layers = nn.ModuleList(DecoderLayer(dim, network.mask_heads) for _ in range(network.decoder_depth))

    def rows(self, x: Tensor) -> Tensor:
        """Rows (..., D) of the encoder as the layers read them."""
        rows: Tensor = self.norm(self.proj(x))
        return rows

    def forward(self, queries: Tensor, tokens: Tokens, steps: Steps) -> tuple[Tensor, Tensor]:
        """Queries (B, K, D), and the attention map (B, S, K), one row a token; tokens have been given to `rows`."""
        rows, valid = tokens.values, None
        if tokens.padded:
            valid = tokens.size > 0
            rows = torch.where(valid[:, :, None], rows, 0)  # zero times a NaN of padding would be NaN
        for layer in self.layers:
            queries, similarity = layer(queries, rows, valid, layer is self.layers[-1], steps)
        return queries, similarity.mT


class AtmDecoder(nn.Module):
    """Attention to mask: the deepest tokens first, masks summed over the stages, classes from the last queries."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.grid = network.grid
        self.queries = nn.Parameter(torch.zeros(network.classes, network.decoder_dim))
        self.stages = nn.ModuleList(Stage(network) for _ in network.stages)
        self.classes = nn.Linear(network.decoder_dim, network.classes + 1)

    def levels(self) -> tuple[Level, ...]:
        """As the encoder has them, so the last stage comes first."""
        return tuple(Level(rows=stage.rows) for stage in reversed([*self.stages]))

    def forward(self, levels: Sequence[Tokens], steps: Steps) -> tuple[Tensor, Tensor]:
        """Masks (B, K, h, w) and classes (B, K, K + 1) of the queries."""
        queries = self.queries.expand(levels[0].values.shape[0], -1, -1)
        masks = []
        for stage, tokens in zip(self.stages, reversed(levels), strict=True):
            queries, attention = stage(queries, tokens, steps)
            masks.append(to_grid(attention, tokens.map, 0, self.grid))
        return torch.stack(masks).sum(0), self.classes(queries)


class Segvit(ReadNetwork):
    """Image (B, 3, H, W), normalised, to class scores (B, K, H, W) in [0, K]."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, ENCODER_EPS, norm=False)
        self.decoder = AtmDecoder(network)

    def readout(self) -> Readout:
        return Readout(self.decoder.levels(), self._scores)

    def _scores(self, levels: Sequence[Tokens], front: Tensor | None, steps: Steps) -> MaskScores:
        masks, classes = self.decoder(levels, steps)
        return MaskScores(masks, classes, self.encoder.prefix, [])

    @staticmethod
    def decoder_multiply_adds(network: Network, levels: Sequence[int]) -> int:
        """Class queries attend to the tokens of each level; then one product of masks and classes at full size."""
        dim, classes = network.decoder_dim, network.classes
        total = classes * dim * (classes + 1) + classes * classes * network.image_size[0] * network.image_size[1]
        return total + sum(_stage_multiply_adds(network, tokens) for tokens in levels)

    @staticmethod
    def namings(network: Network) -> tuple[Naming, ...]:
        names = mmseg_encoder(network)
        names |= {"decoder.queries": "decode_head.q.weight", "decoder.classes.": "decode_head.class_embed."}
        for i in range(len(network.stages)):
            names |= _stage_names(f"decoder.stages.{i}.", "decode_head.", f"_{i + 1}", network.decoder_depth)
        unused = ("decode_head.loss_decode.", *dropped(network))
        return (Naming("zbwxp/SegVit", "decode_head.decoder_1.", ("atm",), names, unused=unused, refusal=_shrunk),)


def _shrunk(found: Mapping[str, Tensor]) -> str | None:
    """Its head has the class queries in a part of its own, after one that brings the full grid back."""
    if not any(key.startswith("decode_head.atm.") for key in found):
        return None
    return (
        "expected the full SegViT, got a shrunk one, which samples a grid of tokens inside its encoder, where merged "
        "tokens have none: use a checkpoint of the full network"
    )


def _stage_multiply_adds(network: Network, tokens: int) -> int:
    """Of a stage that reads so many tokens."""
    dim, classes = network.decoder_dim, network.classes
    cross = 2 * (classes + tokens) * dim * dim + 2 * classes * tokens * dim + NORM * classes * dim
    layers = network.decoder_depth * (attention(classes, dim) + cross + mlp(classes, dim))
    return tokens * network.embed_dim * dim + NORM * tokens * dim + layers


def _stage_names(ours: str, theirs: str, number: str, depth: int) -> dict[str, str]:
    """Beginnings of the names in a stage of so many layers, ours -> theirs, which end in a number or in none."""
    inside = {"attn.qkv.": "self_attn.in_proj_", "attn.proj.": "self_attn.out_proj.", "cross.": "multihead_attn."}
    inside |= {"fc1.": "linear1.", "fc2.": "linear2.", "norm": "norm"}
    names = {f"{ours}proj.": f"{theirs}input_proj{number}.", f"{ours}norm.": f"{theirs}proj_norm{number}."}
    for j in range(depth):
        layer = f"{ours}layers.{j}.", f"{theirs}decoder{number}.layers.{j}."
        names |= {layer[0] + a: layer[1] + b for a, b in inside.items()}
    return names


class PruneHead(Auxiliary):
    """A stage with queries of its own, each of which says of itself alone whether its class is there."""

    def __init__(self, network: Network) -> None:
        super().__init__(network.prefix)
        self.queries = nn.Parameter(torch.zeros(network.classes, network.decoder_dim))
        self.stage = Stage(network)
        self.classes = nn.Linear(network.decoder_dim, 2)

    def read(self, tokens: Tokens, steps: Steps) -> tuple[Tensor, Tensor]:
        """Masks (B, S, K) before their activation, and probabilities (B, K) of the classes; tokens have been given to
        `stage.rows`."""
        queries, masks = self.stage(self.queries.expand(tokens.values.shape[0], -1, -1), tokens, steps)
        return masks, probabilities(self.classes(queries))[..., 0]

    def judge(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        masks, present = self.read(tokens._replace(values=self.stage.rows(tokens.values)), PLAIN)
        return masks, covered(masks) * present[:, None]


class SegvitPrune(ReadNetwork):
    """Image (B, 3, H, W), normalised, to class scores (B, K, H, W) in [0, 1]."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, ENCODER_EPS, norm=False)
        self.decoder = PruneHead(network)
        for layer in network.auxiliary:
            self.encoder.blocks[layer - 1].auxiliary = PruneHead(network)

    def readout(self) -> Readout:
        return Readout((Level(rows=self.decoder.stage.rows),), self._scores)

    def _scores(self, levels: Sequence[Tokens], front: Tensor | None, steps: Steps) -> GridScores:
        """The canvas holds masks of heads before; the last one says which classes are there."""
        (tokens,) = levels
        masks, present = self.decoder.read(tokens, steps)
        masks = on_canvas(masks, tokens.map, self.encoder.prefix, tokens.canvas)
        return GridScores(on_grid(covered(masks) * present[:, None], self.network.grid), self.encoder.prefix, [])

    @staticmethod
    def decoder_multiply_adds(network: Network, levels: Sequence[int]) -> int:
        """All heads are alike."""
        (tokens,) = levels
        return SegvitPrune.auxiliary_multiply_adds(network, tokens)

    @staticmethod
    def auxiliary_multiply_adds(network: Network, tokens: int) -> int:
        return _stage_multiply_adds(network, tokens) + 2 * network.classes * network.decoder_dim

    @staticmethod
    def namings(network: Network) -> tuple[Naming, ...]:
        heads = {"decoder.": "decode_head."}
        heads |= {
            f"encoder.blocks.{layer - 1}.auxiliary.": f"auxiliary_head.{i}."
            for i, layer in enumerate(network.auxiliary)
        }
        names = mmseg_encoder(network)
        for ours, theirs in heads.items():
            names |= {f"{ours}queries": f"{theirs}q.weight", f"{ours}classes.": f"{theirs}class_embed."}
            names |= _stage_names(f"{ours}stage.", theirs, "", network.decoder_depth)
        mark = "decode_head.decoder.layers."
        return (Naming("zbwxp/Dynamic-Token-Pruning", mark, ("prune",), names, unused=dropped(network)),)
