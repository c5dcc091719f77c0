"""What a network is: the shape of a plain-ViT segmenter, which checks itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from algm_deploy.errors import RecipeError
from algm_deploy.recipe.families import Architecture, architecture
from algm_deploy.recipe.ranges import check_ranges

Size = tuple[int, int]
Normalization = Literal["vit", "deit"]
NORM_GROUPS = 32  # of the group norms in Mask2Former's pixel decoder


@dataclass(frozen=True)
class Network:
    """Shape of a plain-ViT segmenter. Sizes are (height, width) in pixels; `embed_dim` is the width of a token.

    `stages` are the 1-based encoder blocks whose tokens the decoder reads, where it reads several. `decoder_dim` is the
    width of a SETR or SegViT decoder. `naive_mmseg` and `mla_mmseg` are mmsegmentation's, which differ from SETR's own.
    `extra_tokens` follow cls: DINOv2's registers or DeiT's distillation token. `queries` join the last `decoder_depth`
    of EoMT's `depth` blocks. `adapter_heads` and `adapter_dim` are the heads of ViT-Adapter's deformable attention and
    the width of its values, which differs from `embed_dim` in some; `stages` are the last blocks of its groups, and
    `decoder_dim` is the width of UPerNet or Mask2Former. Mask2Former has `pixel_layers` of deformable attention among
    its features, then `decoder_depth` layers in which `queries` look at them, all with `decoder_heads`. `mlp_dim` is
    the width inside the MLPs of the encoder's blocks; 0 stands for four times `embed_dim`. `policy`: CTS's policy
    network stands beside the encoder. `auxiliary` are the 1-based blocks after which a head of its own stands, by which
    DToP prunes. SegViT's decoder has `decoder_heads`, or as many as the encoder where they are 0.
    """

    family: str
    embed_dim: int
    depth: int
    heads: int
    classes: int
    image_size: Size
    patch_size: int = 16
    decoder: str = "mask_transformer"
    decoder_depth: int = 2
    normalization: Normalization = "vit"
    stages: tuple[int, ...] = ()
    decoder_dim: int = 256
    extra_tokens: int = 0
    queries: int = 0
    adapter_heads: int = 0
    adapter_dim: int = 0
    decoder_heads: int = 0
    pixel_layers: int = 0
    mlp_dim: int = 0
    policy: bool = False
    auxiliary: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        row = self.architecture
        check_ranges("network", self, embed_dim=(1, 8192), depth=(1, 256), heads=(1, 256), classes=(1, 65535))
        check_ranges("network", self, patch_size=(1, 256), image_size=(self.patch_size, 16384))
        check_ranges("network", self, stages=(1, self.depth), decoder_dim=(1, 8192))
        check_ranges("network", self, queries=(int(row.queries or row.masks), 1024))
        check_ranges("network", self, extra_tokens=(0, row.extra_tokens), mlp_dim=(0, 65536))
        check_ranges("network", self, decoder_depth=(row.blocks or 0, self.depth - 1 if row.queries else 256))
        if self.embed_dim % self.heads:
            raise RecipeError(f"expected network.heads to divide the width {self.embed_dim}, got {self.heads}")
        if row.own_heads and self.decoder_dim % self.mask_heads:
            raise RecipeError(
                f"expected network.{'decoder_' * bool(self.decoder_heads)}heads to divide network.decoder_dim "
                f"{self.decoder_dim} for decoder {self.decoder}, got {self.mask_heads}"
            )
        if not row.padded and any(side % self.patch_size for side in self.image_size):
            raise RecipeError(
                f"expected network.image_size in multiples of the patch size {self.patch_size}, got {self.image_size}"
            )
        if len(self.stages) != row.stages or sorted(set(self.stages)) != list(self.stages):
            raise RecipeError(
                f"expected {row.stages} ascending blocks as network.stages for decoder {self.decoder}, "
                f"got {self.stages}"
            )
        self._check_adapter()
        self._check_masks()
        self._check_policy()
        self._check_auxiliary()

    def _check_adapter(self) -> None:
        there = self.architecture.adapter
        for name in ("adapter_heads", "adapter_dim"):
            check_ranges("network", self, **{name: (int(there), 8192 * there)})
        if not there:
            return
        if self.adapter_dim % self.adapter_heads:
            raise RecipeError(
                f"expected network.adapter_heads to divide network.adapter_dim {self.adapter_dim}, "
                f"got {self.adapter_heads}"
            )
        self._check_32("the adapter has features at an eighth to a 32nd of the picture's size")
        if self.stages[-1] != self.depth:
            raise RecipeError(
                f"expected the last of network.stages to be the last block, {self.depth}, as the adapter's groups of "
                f"blocks end with them, got {self.stages}"
            )

    def _check_masks(self) -> None:
        there, own = self.architecture.masks, self.architecture.own_heads
        check_ranges("network", self, decoder_heads=(int(there), 256 * (there or own)))
        check_ranges("network", self, pixel_layers=(int(there), 64 * there))
        if there and (self.decoder_dim % self.decoder_heads or self.decoder_dim % NORM_GROUPS):
            raise RecipeError(
                f"expected network.decoder_dim as a multiple of network.decoder_heads {self.decoder_heads} and of the "
                f"{NORM_GROUPS} groups of its norms, got {self.decoder_dim}"
            )

    def _check_policy(self) -> None:
        if self.policy and not self.architecture.policy:
            raise RecipeError(
                "expected network.policy, CTS's policy network, for a family whose checkpoints may hold one, got "
                f"{self.family}: leave it out"
            )
        if self.policy:
            self._check_32("the policy network has one answer for 32x32 pixels")

    def _check_32(self, reason: str) -> None:
        if self.patch_size != 16 or any(side % 32 for side in self.image_size):
            raise RecipeError(
                f"expected network.patch_size 16 and network.image_size in multiples of 32, as {reason}, got "
                f"{self.patch_size} and {self.image_size}"
            )

    def _check_auxiliary(self) -> None:
        blocks = self.auxiliary
        if blocks and not self.architecture.auxiliary:
            raise RecipeError(
                "expected network.auxiliary, the blocks with a head by which DToP prunes, for a family whose "
                f"checkpoints may hold some, got {self.family} with decoder {self.decoder}: leave it out"
            )
        if sorted(set(blocks)) != list(blocks) or any(not 1 <= block < self.depth for block in blocks):
            raise RecipeError(
                f"expected ascending blocks from 1 to {self.depth - 1} as network.auxiliary, whose heads stand before "
                f"the last block, got {blocks}"
            )

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """First and last of the encoder blocks between which nothing but the ViT takes part: 1-based, in order."""
        ends = self.stages if self.architecture.adapter else (self.encoder_depth,)
        return tuple(zip((1, *(end + 1 for end in ends[:-1])), ends, strict=True))

    @property
    def architecture(self) -> Architecture:
        """The row of the network's family and decoder."""
        return architecture(self.family, self.decoder)

    @property
    def prefix(self) -> int:
        """Leading rows of the sequence that are no patches: cls, which some networks drop, and `extra_tokens`."""
        return 1 + self.extra_tokens if self.architecture.cls else 0

    @property
    def mask_heads(self) -> int:
        """Heads of a decoder whose attention is the mask."""
        return self.decoder_heads or self.heads

    @property
    def encoder_depth(self) -> int:
        """Blocks that may merge tokens: all, but for those that queries join."""
        return self.depth - self.decoder_depth if self.architecture.queries else self.depth

    @property
    def mlp_width(self) -> int:
        """Width inside the MLPs of the encoder's blocks."""
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def mask_grids(self) -> tuple[Size, ...]:
        """Of every layer of the decoder whose queries attend where masks say, the grid of cells that it looks at."""
        coarse_first = feature_grids(self.grid)[::-1]
        return tuple(coarse_first[layer % 3] for layer in range(self.decoder_depth * self.architecture.masks))

    @property
    def grid(self) -> Size:
        """Patch grid (rows, columns)."""
        height, width = self.image_size
        return -(-height // self.patch_size), -(-width // self.patch_size)


def feature_grids(grid: Size) -> tuple[Size, Size, Size]:
    """The grids of the features beside a patch grid: twice its sides, the same, and half of them."""
    rows, columns = grid
    return (2 * rows, 2 * columns), grid, (rows // 2, columns // 2)


def patch_margins(size: Size, patch_size: int) -> tuple[Size, Size]:
    """What is added to a picture (above, below), (left, right) so that its sides are whole patches: half on each side.

    As DINOv2's evaluation does (facebookresearch/dinov2, CenterPadding); an odd one goes below or to the right.
    """
    rows, columns = (-side % patch_size for side in size)
    return (rows // 2, rows - rows // 2), (columns // 2, columns - columns // 2)
