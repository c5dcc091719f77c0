"""Plain Vision Transformer with empty merge slots in every block.

Parameter names are those of the official Segmenter checkpoints (rstrudel/segmenter, segm/model/vit.py). A block
computes attention, then hands its tokens to a slot, then runs its MLP: that is where ALGM merges. Two more slots stand
around attention and around the MLP, for merges that end with them, and one before and one after the block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algm_deploy.models.naming import Naming
from algm_deploy.recipe.network import Network, patch_margins
from algm_deploy.recipe.plan import Part


class Merged(NamedTuple):
    """What is told of a merge: size, map and length of the `Tokens` it left, or in place of the map what it decided."""

    size: Tensor
    map: Tensor
    length: Tensor


class Tokens(NamedTuple):
    """The sequence between two blocks.

    values (B, S, D); size (B, S) fp32, patches a row stands for; map (B, N) int64, row of every patch; length (B)
    int64, valid rows. Before CTS's merge superpatches follow as more rows, which size and length leave out. `padded`:
    images differ in length, so attention has to be told. `keys` (B, S, K): what a merge compares where it is not the
    values, such as the keys of the block's attention, their mean over heads, or (B, S, 1) what cls attends to, or
    (B, M, 1) what the policy network says of superpatches, or (B, S less the prefix, classes) fp32 how sure an
    auxiliary head is. `within`: the merges inside the last block that ended there, of which nothing is seen in the
    other fields. `weights` (B, N, S less the prefix) fp32: what the rows count in each patch, where no single one
    stands for it. `decided` (B, N) int64: what the last merge decided, where the map does not tell. `canvas`
    (B, N, classes), at least fp32: what the last auxiliary head that saw a patch said of it; the map is -1 where its
    token has left since.
    """

    values: Tensor
    size: Tensor
    map: Tensor
    length: Tensor
    padded: bool
    keys: Tensor | None = None
    within: tuple[Merged, ...] = ()
    weights: Tensor | None = None
    decided: Tensor | None = None
    canvas: Tensor | None = None

    @property
    def merged(self) -> Merged:
        """What is told of the merge that left these."""
        return Merged(self.size, self.map if self.decided is None else self.decided, self.length)

    @property
    def key_length(self) -> Tensor | None:
        """What attention needs to know: nothing as long as every row is valid."""
        return self.length if self.padded else None


class MergeInputs(NamedTuple):
    """What the merge slots are given beside tokens: scalar fp32 thresholds, and token maps (B, N) to replay, if any.

    `masks` (B, Q, cells) uint8: what to replay where queries choose the cells they attend to, layer by layer.
    """

    clap: Tensor
    gbm: Tensor
    maps: tuple[Tensor, ...] = ()
    masks: tuple[Tensor, ...] = ()


class KeepTokens(nn.Module):
    """The empty merge slot."""

    def forward(self, tokens: Tokens, inputs: MergeInputs | None) -> Tokens:
        return tokens


def padded(image: Tensor, patch_size: int) -> Tensor:
    """A picture (B, 3, H, W) with zeros around it so that its sides are whole patches."""
    rows, columns = patch_margins((image.shape[2], image.shape[3]), patch_size)
    return F.pad(image, (*columns, *rows)) if any(rows + columns) else image


class PatchEmbedding(nn.Module):
    """Normalised pixels (B, 3, H, W) to patch tokens (B, N, D), patches in raster order."""

    def __init__(self, patch_size: int, dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(3, dim, patch_size, patch_size)

    def forward(self, image: Tensor) -> Tensor:
        patches: Tensor = self.proj(padded(image, self.patch_size))
        return patches.flatten(2).transpose(1, 2)


class ImageConv(nn.Conv2d):
    """A convolution on normalised pixels (B, 3, H, W) around which it sees zeros."""


class Attention(nn.Module):
    """Multi-head self-attention with packed query, key and value weights."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, length: Tensor | None) -> Tensor:
        out: Tensor = self.proj(self.mixed(self.qkv(x), length))
        return out

    def mixed(self, qkv: Tensor, length: Tensor | None) -> Tensor:
        """The rows' values (B, S, D), mixed as queries and keys of the same (B, S, 3D) say."""
        out: Tensor = torch.ops.algm.attention(qkv, length, self.heads, self.scale)
        return out

    def with_cls(self, x: Tensor, length: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same, and the weight (B, S, 1) that cls gives every row, the mean over heads."""
        qkv = self.qkv(x)
        mixed = self.proj(torch.ops.algm.attention(qkv, length, self.heads, self.scale))
        return mixed, torch.ops.algm.cls_attention(qkv, self.heads, self.scale)[..., None]

    def proportional(self, x: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Attention in which a key weighs as much as the patches it stands for, and the mean key of every row."""
        qkv = self.qkv(x)
        keys = qkv.chunk(3, dim=2)[1].unflatten(2, (self.heads, -1)).mean(2)
        return self.proj(torch.ops.algm.proportional_attention(qkv, size, self.heads, self.scale)), keys


class Mlp(nn.Module):
    """Two linear layers with the exact GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, length: Tensor | None = None) -> Tensor:
        """Rows (B, S, D) one by one, so that nothing depends on how many are valid."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


# The slot of a block for a merge that ends with a part of it, or with none, or that comes at its end or its start.
SLOTS: dict[Part, str] = {
    "": "merge",
    "attention": "attention_merge",
    "mlp": "mlp_merge",
    "end": "end_merge",
    "start": "start_merge",
}


class Block(nn.Module):
    """Pre-norm transformer block with merge slots.

    What `merge` leaves between attention and MLP goes on. `attention_merge` and `mlp_merge` are given the normalised
    rows that enter attention or the MLP, which runs on what they leave; every row gets its result back, and the
    residual is that of all rows. `start_merge` is given what enters the block, `end_merge` what it makes.
    `proportional`: attention counts the patches of a row (ToMe). `weighs`: `merge` is handed what cls attends to
    (EViT). `judged`: `end_merge` is handed what `auxiliary`, a head that some networks have here, says of the rows
    (DToP).
    """

    def __init__(self, dim: int, heads: int, eps: float = 1e-5, hidden: int = 0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps)
        self.attn = Attention(dim, heads)
        self.merge: nn.Module = KeepTokens()
        self.attention_merge: nn.Module = KeepTokens()
        self.mlp_merge: nn.Module = KeepTokens()
        self.end_merge: nn.Module = KeepTokens()
        self.start_merge: nn.Module = KeepTokens()
        self.proportional = False
        self.weighs = False
        self.auxiliary: nn.Module = nn.Identity()
        self.judged = False
        self.norm2 = nn.LayerNorm(dim, eps)
        self.mlp = Mlp(dim, hidden or 4 * dim)

    def forward(self, tokens: Tokens, inputs: MergeInputs | None = None) -> Tokens:
        tokens = self.start_merge(tokens, inputs)
        x, keys = self.norm1(tokens.values), None
        first: tuple[Merged, ...] = ()
        if self.proportional:
            mixed, keys = self.attn.proportional(x, tokens.size)
        elif self.weighs:
            mixed, keys = self.attn.with_cls(x, tokens.key_length)
        else:
            mixed, first = _run_merged(self.attn, self.attention_merge, tokens._replace(values=x), inputs)
        tokens = self.merge(tokens._replace(values=tokens.values + mixed, keys=keys), inputs)
        x = self.norm2(tokens.values)
        changed, second = _run_merged(self.mlp, self.mlp_merge, tokens._replace(values=x), inputs)
        tokens = tokens._replace(values=tokens.values + changed, within=(*first, *second))
        if self.judged:
            tokens = self.auxiliary(tokens)
        merged: Tokens = self.end_merge(tokens, inputs)
        return merged


def _run_merged(
    part: Callable[[Tensor, Tensor | None], Tensor], slot: nn.Module, tokens: Tokens, inputs: MergeInputs | None
) -> tuple[Tensor, tuple[Merged, ...]]:
    """A part of a block on the rows that a slot leaves of `tokens`, given back to all of them (B, S, D); the merge."""
    if isinstance(slot, KeepTokens):
        return part(tokens.values, tokens.key_length), ()
    merged = slot(tokens._replace(keys=tokens.values), inputs)
    prefix = torch.arange(tokens.values.shape[1] - tokens.map.shape[1], device=tokens.map.device)
    rows = torch.cat([prefix.expand(tokens.map.shape[0], -1), merged.map], 1)
    return torch.ops.algm.unmerge(part(merged.values, merged.key_length), rows, 0), (merged.merged,)


def merges_of(block: nn.Module, tokens: Tokens) -> tuple[Merged, ...]:
    """What every merge inside a block left, in order, given the tokens after it."""
    lasting = block.start_merge, block.merge, block.end_merge
    return tokens.within if all(isinstance(slot, KeepTokens) for slot in lasting) else (*tokens.within, tokens.merged)


class VisionTransformer(nn.Module):
    """Encoder of patches after `prefix` tokens that are none: cls, a distillation token or registers.

    It has the blocks that may merge. `eps` is that of every LayerNorm; `norm`: outputs are normalised here, not by the
    decoder. `outputs` are the 1-based blocks whose tokens `forward` returns. `shares`: superpatches go along into the
    first block, for CTS to choose of.
    """

    def __init__(self, network: Network, eps: float = 1e-5, norm: bool = True) -> None:
        super().__init__()
        dim, depth = network.embed_dim, network.encoder_depth
        self.grid, self.prefix, self.outputs = network.grid, network.prefix, network.stages or (depth,)
        if self.prefix:
            self.cls_token = nn.Parameter(torch.zeros(1, self.prefix, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, self.prefix + self.grid[0] * self.grid[1], dim))
        self.patch_embed: nn.Module = PatchEmbedding(network.patch_size, dim)
        self.blocks = nn.ModuleList(Block(dim, network.heads, eps, network.mlp_width) for _ in range(depth))
        self.norm: nn.Module = nn.LayerNorm(dim, eps) if norm else nn.Identity()
        self.outlet: nn.Module = KeepTokens()  # a slot between encoder and decoder
        # One between groups of blocks: every patch, and the tokens the last group left, to those that enter the next.
        self.regroup: nn.Module = KeepTokens()
        self.shares = False
        self.policy: nn.Module = nn.Identity()  # where a network has CTS's, that

    def embed(self, image: Tensor) -> Tokens:
        """Image (B, 3, H, W) to the sequence [prefix | patches] that enters the first block."""
        patches = self.patch_embed(image)
        images, count, _ = patches.shape
        values = torch.cat([self.cls_token.expand(images, -1, -1), patches], 1) if self.prefix else patches
        values = values + self.pos_embed
        rows = torch.arange(self.prefix, self.prefix + count, device=values.device)
        return Tokens(
            values,
            size=torch.ones(images, self.prefix + count, device=values.device),
            map=rows.expand(images, -1),
            length=torch.full((images,), self.prefix + count, device=values.device),
            padded=False,
        )

    def with_superpatches(self, image: Tensor, tokens: Tokens) -> Tokens:
        """The embedded tokens of an image with its superpatches as further rows, and what the policy network says of
        those.

        As published (tue-mps/cts-segmenter, segm/model/vit.py): pixels and position embeddings at half the size.
        """
        half = F.avg_pool2d(image.to(torch.promote_types(tokens.values.dtype, torch.float32)), 2)
        positions = self.pos_embed[:, self.prefix :].mT.reshape(1, -1, *self.grid)
        superpatches = self.patch_embed(half) + F.avg_pool2d(positions, 2).flatten(2).mT
        values = torch.cat([tokens.values, superpatches], 1)
        return tokens._replace(values=values, keys=self.policy(image)[..., None])

    def run(self, image: Tensor, inputs: MergeInputs | None = None) -> Iterator[Tokens]:
        """Image (B, 3, H, W), normalised, to the tokens after each block, one after the other."""
        tokens = self.embed(image)
        if self.shares:
            tokens = self.with_superpatches(image, tokens)
        for block in self.blocks:
            tokens = block(tokens, inputs)
            yield tokens

    def forward(self, image: Tensor, inputs: MergeInputs | None = None) -> tuple[list[Tokens], list[Merged]]:
        """The tokens after each block of `outputs`, and what every merge left, in order.

        Blocks merge, so outputs differ in length: each has the map of its own depth.
        """
        outputs: list[Tokens] = []
        stages: list[Merged] = []
        for layer, (block, tokens) in enumerate(zip(self.blocks, self.run(image, inputs), strict=True), 1):
            stages += merges_of(block, tokens)
            if layer in self.outputs:
                outputs.append(self.outlet(tokens._replace(values=self.norm(tokens.values)), inputs))
        return outputs, stages


class VitNetwork(nn.Module):
    """A network: an encoder whose blocks have merge slots, and whatever makes class scores of its tokens.

    `forward` takes images (B, 3, H, W), normalised, and what the merge slots are given; it returns `Scores`. The static
    methods tell what a checkpoint holds and what the decoder costs; `recipe/families.py` names the class.
    """

    encoder: VisionTransformer

    def __init__(self, network: Network, eps: float = 1e-5, norm: bool = True) -> None:
        super().__init__()
        self.network = network
        self.encoder = VisionTransformer(network, eps, norm)

    @staticmethod
    def namings(network: Network) -> tuple[Naming, ...]:
        """The projects whose checkpoints of the network's family are read."""
        raise NotImplementedError

    @staticmethod
    def decoder_multiply_adds(network: Network, levels: Sequence[int]) -> int:
        """Multiply-adds of all but the blocks and the patch embedding; `levels`: patch tokens of each level read."""
        raise NotImplementedError

    @staticmethod
    def auxiliary_multiply_adds(network: Network, tokens: int) -> int:
        """Multiply-adds of an auxiliary head that sees so many patch tokens, where the network may have one."""
        raise NotImplementedError

    @property
    def blocks(self) -> nn.ModuleList:
        """The encoder blocks, whose slots merging fills."""
        return self.encoder.blocks


Model = TypeVar("Model", bound=VitNetwork)


def share_parameters(model: Model) -> Model:
    """A structural copy of `model` whose parameters and buffers are the same tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(t): t for t in tensors})
