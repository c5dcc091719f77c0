"""One row for each network that can be deployed: a family and one of its decoders. Whoever needs a fact of it reads it.

A network is added by its class in a module of `models/` (`models/vit.py: VitNetwork` says what it has to give), a row
here, and a recipe in `export/recipes`. One that describes what its decoder reads (`models/readout.py: ReadNetwork`)
runs in fused kernels and CUDA graphs in PyTorch, others layer by layer. One of another package calls `register` before
its recipe is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from algm_deploy.errors import RecipeError, nearest, shown


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A family and one of its decoders.

    Args:
        family: its name in recipes.
        decoder: likewise.
        network: its class as `module:class`, imported when a network of its kind is made.
        published: its name in published tables; None where they do not have it.
        distilled: its name there on a ViT with extra tokens, where that is another one.
        cls: whether its ViT has a cls token in front of the patches.
        extra_tokens: most tokens that may follow cls: a distillation token, or registers.
        padded: pictures are padded with zeros to whole patches; those of others consist of whole patches.
        stages: how many encoder blocks the decoder reads; 0 where it reads the last alone.
        blocks: fewest transformer blocks of the decoder, `decoder_depth` of them; None where it has none.
        own_heads: whether attention of the width `decoder_dim` is cut into `heads`.
        adapter: beside the ViT stand features of convolutions, which patches exchange with between groups of blocks. A
            group ends with each of `stages`.
        masks: the decoder's layers attend where the masks of the layer before say, `decoder_depth` of them.
        queries: the decoder's blocks are the last of the ViT, which queries join and which merge no tokens.
        policy: checkpoints may hold CTS's policy network beside it.
        auxiliary: checkpoints may hold heads after blocks before the last, by which DToP prunes.
    """

    family: str
    decoder: str
    network: str
    published: str | None = None
    distilled: str | None = None
    cls: bool = True
    extra_tokens: int = 0
    padded: bool = False
    stages: int = 0
    blocks: int | None = None
    own_heads: bool = False
    adapter: bool = False
    masks: bool = False
    queries: bool = False
    policy: bool = False
    auxiliary: bool = False

    @property
    def name(self) -> str:
        """Family and decoder, as `setr/naive`."""
        return f"{self.family}/{self.decoder}"


def architectures() -> tuple[Architecture, ...]:
    """All rows."""
    return tuple(_ROWS.values())


def architecture(family: str, decoder: str) -> Architecture:
    """The row of a family's decoder.

    Raises:
        RecipeError: there is none.
    """
    families = tuple(dict.fromkeys(row.family for row in architectures()))
    if family not in families:
        raise RecipeError(
            f"expected {' or '.join(families)} as network.family, got {shown(family)}{nearest(family, families)}"
        )
    decoders = tuple(row.decoder for row in architectures() if row.family == family)
    if decoder not in decoders:
        raise RecipeError(
            f"expected {' or '.join(decoders)} as network.decoder of {family}, got {shown(decoder)}"
            f"{nearest(decoder, decoders)}"
        )
    return _ROWS[family, decoder]


def register(row: Architecture) -> None:
    """Adds a row; from now on recipes may name it.

    Raises:
        RecipeError: its family has this decoder already.
    """
    if (row.family, row.decoder) in _ROWS:
        raise RecipeError(f"expected a new family or decoder, got {row.name}, which is known: choose another name")
    _ROWS[row.family, row.decoder] = row


def unregister(row: Architecture) -> None:
    """Takes back what `register` added."""
    del _ROWS[row.family, row.decoder]


_ROWS: dict[tuple[str, str], Architecture] = {}
_segmenter = partial(
    Architecture,
    family="segmenter",
    network="algm_deploy.models.segmenter:Segmenter",
    extra_tokens=1,
    policy=True,
    auxiliary=True,
)
_setr = partial(Architecture, family="setr", network="algm_deploy.models.setr:Setr")
_dinov2 = partial(
    Architecture, family="dinov2", network="algm_deploy.models.linear:Dinov2", extra_tokens=16, padded=True
)
for _row in (
    _segmenter(decoder="mask_transformer", published="Segmenter", distilled="Segmenter on DeiT", blocks=0),
    _segmenter(decoder="linear", distilled="Segmenter on DeiT, linear decoder"),
    _setr(decoder="naive", published="SETR-Naive"),
    _setr(decoder="pup", published="SETR-PUP"),
    _setr(decoder="mla", published="SETR-MLA", cls=False, stages=4),
    _setr(decoder="naive_mmseg", published="SETR-Naive of mmsegmentation"),
    _setr(decoder="mla_mmseg", published="SETR-MLA of mmsegmentation", cls=False, stages=4),
    Architecture(
        family="segvit",
        decoder="atm",
        network="algm_deploy.models.segvit:Segvit",
        published="SegViT",
        cls=False,
        stages=3,
        blocks=1,
        own_heads=True,
    ),
    Architecture(
        family="segvit",
        decoder="prune",
        network="algm_deploy.models.segvit:SegvitPrune",
        published="SegViT of DToP",
        cls=False,
        blocks=1,
        own_heads=True,
        auxiliary=True,
    ),
    _dinov2(decoder="linear", published="DINOv2 with a linear head"),
    _dinov2(decoder="linear_ms", stages=4),
    Architecture(family="deit", decoder="linear", network="algm_deploy.models.linear:Deit", extra_tokens=1),
    Architecture(
        family="vit_adapter",
        decoder="upernet",
        network="algm_deploy.models.vit_adapter:VitAdapter",
        published="ViT-Adapter with UPerNet",
        cls=False,
        stages=4,
        adapter=True,
    ),
    Architecture(
        family="eva",
        decoder="mask2former",
        network="algm_deploy.models.eva:Eva",
        published="EVA + ViT-Adapter + Mask2Former",
        stages=4,
        blocks=1,
        adapter=True,
        masks=True,
    ),
    Architecture(
        family="eomt",
        decoder="queries",
        network="algm_deploy.models.eomt:Eomt",
        published="EoMT",
        extra_tokens=16,
        blocks=1,
        queries=True,
    ),
):
    register(_row)
