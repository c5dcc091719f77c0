"""What `variant.yml`, which the published Segmenter code writes beside a checkpoint, says of network and protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from algm_deploy.errors import CheckpointError, PlanError, RecipeError, shown
from algm_deploy.models.checkpoints.reading import VARIANT_FILE, Checkpoint, shape_of
from algm_deploy.models.segmenter import DISTILLED
from algm_deploy.recipe.reading import flatten, resolve
from algm_deploy.recipe.schema import (
    DENSE,
    MergePlan,
    Network,
    Normalization,
    Protocol,
    Recipe,
    Settings,
    Size,
    dataset_ratio,
)


def network_from_variant(checkpoint: Checkpoint) -> Network:
    """The network that `variant.yml` describes, cross-checked with the shapes of the tensors."""
    facts = _Facts(checkpoint)
    decoder = facts.one_of("net_kwargs.decoder.name", values=("mask_transformer", "linear"))
    try:
        network = Network(
            family="segmenter",
            embed_dim=facts.whole("net_kwargs.d_model"),
            depth=facts.whole("net_kwargs.n_layers"),
            heads=facts.whole("net_kwargs.n_heads"),
            classes=facts.whole("net_kwargs.n_cls"),
            image_size=facts.size("net_kwargs.image_size"),
            patch_size=facts.whole("net_kwargs.patch_size"),
            decoder=decoder,
            decoder_depth=facts.whole("net_kwargs.decoder.n_layers") if decoder == "mask_transformer" else 0,
            normalization=cast(Normalization, facts.one_of("net_kwargs.normalization", values=("vit", "deit"))),
            extra_tokens=int(bool(facts.get("net_kwargs.distilled", False))),
        )
    except RecipeError as error:
        raise CheckpointError(f"{facts.path}: {error}") from error
    _cross_check(checkpoint, network)
    return network


def plan_from_variant(checkpoint: Checkpoint) -> MergePlan:
    """The merging that the checkpoint was trained with: CLAP in its first selected layer, GBM in the later ones.

    `patch_type: pure` or absent means none. Decisions are per image, the default; the published code shares counts over
    a batch.
    """
    facts = _Facts(checkpoint)
    if facts.get("dataset_kwargs.patch_type", "pure") == "pure":
        return DENSE
    facts.one_of("dataset_kwargs.patch_type", values=("pure", "algm"))
    layers = facts.get("dataset_kwargs.selected_layers")
    if not isinstance(layers, list | tuple) or not layers or not all(map(_is_whole, layers)):
        raise facts.error("dataset_kwargs.selected_layers", "the 1-based layers that merge", layers)
    try:
        return MergePlan(
            clap_layers=(layers[0],),
            gbm_layers=tuple(layers[1:]),
            window=facts.size("dataset_kwargs.merging_window_size"),
            clap_threshold=facts.number("dataset_kwargs.threshold"),
        )
    except PlanError as error:
        raise CheckpointError(f"{facts.path}: {error}") from error


def protocol_from_variant(checkpoint: Checkpoint) -> Protocol:
    """The evaluation protocol of `inference_kwargs`."""
    facts = _Facts(checkpoint)
    dataset = facts.get("dataset_kwargs.dataset")
    if not isinstance(dataset, str):
        raise facts.error("dataset_kwargs.dataset", "the name of a dataset", dataset)
    try:
        return Protocol(
            dataset=dataset,
            short_side=facts.whole("inference_kwargs.im_size"),
            window=facts.whole("inference_kwargs.window_size"),
            stride=facts.whole("inference_kwargs.window_stride"),
            max_ratio=dataset_ratio(dataset),
        )
    except RecipeError as error:
        raise CheckpointError(f"{facts.path}: {error}") from error


def training_size(checkpoint: Checkpoint) -> Size | None:
    """Height and width of the pictures in training; None where no `variant.yml` says it."""
    key = "net_kwargs.image_size"
    if checkpoint.variant is None or (facts := _Facts(checkpoint)).get(key) is None:
        return None
    return facts.size(key)


def settings_from_variant(checkpoint: Checkpoint) -> Settings:
    """What `variant.yml` says, for `resolve`; the name is that of the checkpoint's folder."""
    plan = flatten(plan_from_variant(checkpoint), "merging.")
    said = ["clap_layers", "gbm_layers"] + (["window", "clap_threshold"] if plan["merging.clap_layers"] else [])
    return {
        "name": checkpoint.path.resolve().parent.name,
        **flatten(network_from_variant(checkpoint), "network."),
        **{f"merging.{name}": plan[f"merging.{name}"] for name in said},
        **flatten(protocol_from_variant(checkpoint), "protocol."),
    }


def recipe_from_variant(checkpoint: Checkpoint) -> Recipe:
    """The recipe that `variant.yml` alone makes."""
    settings = settings_from_variant(checkpoint)
    try:
        return resolve([(VARIANT_FILE, settings)])[0]
    except RecipeError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


class _Facts:
    """Typed access to `variant.yml`; every failure names the file, the key, what was expected and what came."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path.with_name(VARIANT_FILE)
        if checkpoint.variant is None:
            raise CheckpointError(
                f"expected {VARIANT_FILE} beside {checkpoint.path}, found none: put it there or name a recipe"
            )
        self.facts = checkpoint.variant

    def error(self, key: str, expected: str, came: object) -> CheckpointError:
        return CheckpointError(f"{self.path}: expected {expected} as {key}, got {shown(came)}")

    def get(self, key: str, default: object = None) -> Any:
        """The value under a dotted key; the default where the key or its section is absent or null."""
        value: Any = self.facts
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def whole(self, key: str) -> int:
        value = self.get(key)
        if not _is_whole(value):
            raise self.error(key, "a positive whole number", value)
        return int(value)

    def number(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, "a finite number", value)
        return float(value)

    def size(self, key: str) -> Size:
        """(height, width) from a pair or from one number for both."""
        value = self.get(key)
        pair = (value, value) if _is_whole(value) else value
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(map(_is_whole, pair)):
            raise self.error(key, "one or two positive whole numbers", value)
        return int(pair[0]), int(pair[1])

    def one_of(self, key: str, values: tuple[str, ...]) -> str:
        value = self.get(key)
        if value not in values:
            raise self.error(key, " or ".join(values), value)
        return str(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31


def _cross_check(checkpoint: Checkpoint, network: Network) -> None:
    """Compares every fact that shapes can tell, before any table is built from a claim."""
    found = checkpoint.state_dict
    proj = shape_of(found, "encoder.patch_embed.proj.weight")
    classes = shape_of(found, "decoder.head.weight")[:1] + shape_of(found, "decoder.cls_emb")[1:2]
    checks = {
        "net_kwargs.d_model": (network.embed_dim, *proj[:1]),
        "net_kwargs.patch_size": (network.patch_size, *proj[-1:]),
        "net_kwargs.n_layers": (network.depth, _blocks(found, "encoder.blocks.")),
        "net_kwargs.decoder.n_layers": (network.decoder_depth, _blocks(found, "decoder.blocks.")),
        "net_kwargs.n_cls": (network.classes, *classes),
        "net_kwargs.distilled": (bool(network.extra_tokens), DISTILLED in found),
    }
    for key, (claimed, *measured) in checks.items():
        if any(claimed != came for came in measured):
            raise CheckpointError(
                f"{checkpoint.path}: {key} is {claimed} in {VARIANT_FILE}, tensors have {measured[0]}: pair the files"
            )


def _blocks(state_dict: Mapping[str, Tensor], prefix: str) -> int:
    return len({key.removeprefix(prefix).split(".")[0] for key in state_dict if key.startswith(prefix)})
