"""What `variant.yml`, which the published Segmenter code writes beside a checkpoint, says of network and protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeVar

from msgspec import Struct
from torch import Tensor

from algm_deploy.errors import CheckpointError, PlanError, RecipeError
from algm_deploy.models.checkpoints.reading import VARIANT_FILE, Checkpoint, names_of, shape_of
from algm_deploy.models.segmenter import AUXILIARY, DISTILLED, POLICY
from algm_deploy.ops.cts import MEMBERS
from algm_deploy.recipe.conversion import converted
from algm_deploy.recipe.network import Network, Normalization, Size
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import Settings, flatten
from algm_deploy.recipe.schema import Protocol, dataset_ratio

Section = TypeVar("Section", bound=Struct)
_PATCHES = "encoder.patch_embed.proj.weight"


class _Decoder(Struct):
    name: Literal["mask_transformer", "linear"]
    n_layers: int = 0


class _NetKwargs(Struct):
    d_model: int
    n_layers: int
    n_heads: int
    n_cls: int
    image_size: int | Size
    patch_size: int
    normalization: Normalization
    decoder: _Decoder
    distilled: bool | None = None
    policy_method: Literal["policy_net", "no_sharing"] | None = None
    policy_schedule: Size | None = None
    auxiliary_layers: tuple[int, ...] = ()  # which no project writes: see `AUXILIARY`

    @property
    def shares(self) -> bool:
        """Whether the network is CTS's and shares tokens."""
        return self.policy_method == "policy_net"


class _DatasetKwargs(Struct):
    dataset: str
    patch_type: Literal["pure", "algm"] | None = None
    selected_layers: tuple[int, ...] | None = None
    merging_window_size: int | Size | None = None
    threshold: float | None = None


class _InferenceKwargs(Struct):
    im_size: int
    window_size: int
    window_stride: int


def network_from_variant(checkpoint: Checkpoint) -> Network:
    """The network that `variant.yml` describes, cross-checked with the shapes of the tensors.

    Raises:
        CheckpointError: there is no such file, a fact is missing or of another type, or contradicts the tensors.
    """
    with _errors_of(checkpoint):
        said = _section(checkpoint, _NetKwargs, "net_kwargs")
        network = Network(
            family="segmenter",
            embed_dim=said.d_model,
            depth=said.n_layers,
            heads=said.n_heads,
            classes=said.n_cls,
            image_size=_pair(said.image_size),
            patch_size=said.patch_size,
            decoder=said.decoder.name,
            decoder_depth=said.decoder.n_layers if said.decoder.name == "mask_transformer" else 0,
            normalization=said.normalization,
            extra_tokens=int(bool(said.distilled)),
            policy=said.shares,
            auxiliary=said.auxiliary_layers,
        )
    _cross_check(checkpoint, network)
    return network


def plan_from_variant(checkpoint: Checkpoint) -> MergePlan:
    """The merging that the checkpoint was trained with: CTS, or CLAP in its first selected layer and GBM in the later
    ones.

    `patch_type: pure` or absent means neither of these. Decisions are per image, the default; the published code shares
    counts over a batch. Errors like those of `network_from_variant`.
    """
    with _errors_of(checkpoint):
        shared = _shared_superpatches(_section(checkpoint, _NetKwargs, "net_kwargs"))
        if shared:
            return MergePlan((), (), method="cts", cts_shared=shared)
        said = _section(checkpoint, _DatasetKwargs, "dataset_kwargs")
        if said.patch_type in (None, "pure"):
            return DENSE
        layers = said.selected_layers or ()
        if not layers or said.threshold is None or said.merging_window_size is None:
            raise RecipeError(
                "expected selected_layers, merging_window_size and threshold in dataset_kwargs, which merge, got "
                f"{said.selected_layers}, {said.merging_window_size} and {said.threshold}"
            )
        return MergePlan(layers[:1], layers[1:], _pair(said.merging_window_size), said.threshold)


def _shared_superpatches(said: _NetKwargs) -> int:
    """How many superpatches share a token, which `policy_schedule` tells after the patches that have one each."""
    if not said.shares:
        return 0
    height, width = _pair(said.image_size)
    patches = height // said.patch_size * (width // said.patch_size)
    alone, shared = said.policy_schedule or (patches, 0)
    if alone + MEMBERS * shared != patches:
        raise RecipeError(
            f"expected net_kwargs.policy_schedule that makes up {patches} patches, one a token and {MEMBERS} a token, "
            f"got {said.policy_schedule}"
        )
    return shared


def protocol_from_variant(checkpoint: Checkpoint) -> Protocol:
    """The evaluation protocol of `inference_kwargs`; errors like those of `network_from_variant`."""
    with _errors_of(checkpoint):
        dataset = _section(checkpoint, _DatasetKwargs, "dataset_kwargs").dataset
        said = _section(checkpoint, _InferenceKwargs, "inference_kwargs")
        return Protocol(dataset, said.im_size, said.window_size, said.window_stride, dataset_ratio(dataset))


def training_size(checkpoint: Checkpoint) -> Size | None:
    """Height and width of the pictures in training; None where no `variant.yml` says it."""
    if checkpoint.variant is None or "net_kwargs" not in checkpoint.variant:
        return None
    with _errors_of(checkpoint):
        return _pair(_section(checkpoint, _NetKwargs, "net_kwargs").image_size)


def settings_from_variant(checkpoint: Checkpoint) -> Settings:
    """What `variant.yml` says, for `resolve`; the name is that of the checkpoint's folder."""
    plan = flatten(plan_from_variant(checkpoint), "merging.")
    said = ["clap_layers", "gbm_layers"] + (["window", "clap_threshold"] if plan["merging.clap_layers"] else [])
    said += ["method", "cts_shared"] if plan["merging.cts_shared"] else []
    return {
        "name": checkpoint.path.resolve().parent.name,
        **flatten(network_from_variant(checkpoint), "network."),
        **{f"merging.{name}": plan[f"merging.{name}"] for name in said},
        **flatten(protocol_from_variant(checkpoint), "protocol."),
    }


def _section(checkpoint: Checkpoint, kind: type[Section], name: str) -> Section:
    """The facts of one section that are read here; there are others beside them."""
    if checkpoint.variant is None:
        raise CheckpointError(
            f"expected {VARIANT_FILE} beside {checkpoint.path}, found none: put it there or name a recipe"
        )
    found: Section = converted(kind, checkpoint.variant.get(name), name)
    return found


@contextmanager
def _errors_of(checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except (RecipeError, PlanError) as error:
        raise CheckpointError(f"{checkpoint.path.with_name(VARIANT_FILE)}: {error}") from error


def _pair(size: int | Size) -> Size:
    """(height, width) from a pair or from one number for both."""
    return (size, size) if isinstance(size, int) else size


def _cross_check(checkpoint: Checkpoint, network: Network) -> None:
    """Compares every fact that shapes can tell, before any table is built from a claim."""
    found = checkpoint.state_dict
    proj = shape_of(found, _PATCHES)
    if not proj:
        raise CheckpointError(
            f"{checkpoint.path}: expected the parameters of a Segmenter, such as {_PATCHES}, which {VARIANT_FILE} is "
            f"about, got {names_of(found)}: pair the files, or save the tensors under the names of the published code"
        )
    classes = shape_of(found, "decoder.head.weight")[:1] + shape_of(found, "decoder.cls_emb")[1:2]
    checks = {
        "net_kwargs.d_model": (network.embed_dim, *proj[:1]),
        "net_kwargs.patch_size": (network.patch_size, *proj[-1:]),
        "net_kwargs.n_layers": (network.depth, _blocks(found, "encoder.blocks.")),
        "net_kwargs.decoder.n_layers": (network.decoder_depth, _blocks(found, "decoder.blocks.")),
        "net_kwargs.n_cls": (network.classes, *classes),
        "net_kwargs.distilled": (bool(network.extra_tokens), DISTILLED in found),
        "net_kwargs.policy_method": (network.policy, any(key.startswith(f"{POLICY}.") for key in found)),
        "net_kwargs.auxiliary_layers": (len(network.auxiliary), _blocks(found, f"{AUXILIARY}.")),
    }
    for key, (claimed, *measured) in checks.items():
        if any(claimed != came for came in measured):
            raise CheckpointError(
                f"{checkpoint.path}: {key} is {claimed} in {VARIANT_FILE}, tensors have {measured[0]}: pair the files"
            )


def _blocks(state_dict: Mapping[str, Tensor], prefix: str) -> int:
    return len({key.removeprefix(prefix).split(".")[0] for key in state_dict if key.startswith(prefix)})
