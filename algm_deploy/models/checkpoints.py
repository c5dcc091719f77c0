"""Official checkpoints in, state dict out; nothing executes on load.

The published Segmenter code (rstrudel/segmenter, tue-mps/algm-segmenter) writes `checkpoint.pth`, a dict whose entry
`model` is the state dict, and `variant.yml` beside it. Merging adds no parameters, so both projects share one format.
mmsegmentation and its descendants (SETR, SegViT) write any name, the state dict as entry `state_dict` and no facts of
the network that could be read without executing something: a recipe has to give them. Others write the state dict
alone (EoMT), or backbone and head into files of their own (DINOv2), which are read from one folder.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor

from algm_deploy.errors import CheckpointError, PlanError, RecipeError, shown
from algm_deploy.models.families import NAMINGS, parameter_shapes
from algm_deploy.models.naming import Naming
from algm_deploy.recipe.reading import flatten, resolve
from algm_deploy.recipe.schema import (
    DENSE,
    Decoder,
    MergePlan,
    Network,
    Normalization,
    Protocol,
    Recipe,
    Settings,
    Size,
    dataset_ratio,
)

CHECKPOINT_FILE = "checkpoint.pth"
VARIANT_FILE = "variant.yml"
_VARIANT_BYTES = 1 << 16
_VARIANT_NODES = 10_000
_VARIANT_DEPTH = 32  # published files have four
_ENTRIES = ("model", "state_dict")
_SUFFIXES = (".pth", ".pt", ".bin")
# The one entry of a published state dict that is no floating-point tensor; nothing reads it at inference.
_COUNTER = ".num_batches_tracked"
_PICKLE = 0x80  # first byte of a checkpoint from before torch.save wrote zip archives
# What a file that is no checkpoint begins with, what it is, and what to do.
_MISTAKEN = (
    (b"version https://git-lfs", "a Git LFS pointer in its place", "fetch the file itself with `git lfs pull`"),
    (b"<", "a web page", "download the file that the page is about"),
    (b"\x1f\x8b", "a gzip archive", "unpack it and name the checkpoint in it"),
    (b"PK", "a damaged file, or one whose end is missing", "copy or download it again"),
)
# The encoder's ImageNet classifiers: present in every official file, never part of the segmenter.
_UNUSED_PREFIXES = ("encoder.head.", "encoder.head_dist.")


@dataclass(frozen=True)
class Checkpoint:
    """An official file as it lies on disk: raw tensors by official name, and the facts of `variant.yml` (or None).

    `unread` names the entries of the file that were left alone, such as the optimizer's. The tensors may be mapped from
    the file: `state_dict_for` returns copies. `files` are those it was read from, `path` their folder if several.
    """

    path: Path
    state_dict: dict[str, Tensor]
    variant: Mapping[str, Any] | None
    unread: tuple[str, ...]
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Weights:
    """fp32 tensors that fit a network exactly; `unused` checkpoint keys; the grid the position embedding came from."""

    state_dict: dict[str, Tensor]
    unused: tuple[str, ...]
    resized_from: Size | None


# ---------------------------------------------------------------------------------------------------------- reading


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Reads `checkpoint.pth` (or the folder that holds it) and, where present, the `variant.yml` beside it.

    A folder without `checkpoint.pth` stands for one network in several files, such as a backbone and its head.
    Raises CheckpointError for whatever is not such a file; code inside a file is never run.
    """
    path = Path(path)
    files = _files(path)
    if len(files) == 1:
        (path,) = files
    state_dict: dict[str, Tensor] = {}
    unread: list[str] = []
    for file in files:
        found, others = _state_dict(file)
        twice = set(state_dict) & set(found)
        if twice:
            raise CheckpointError(
                f"{path}: expected the parts of one network, {_names(sorted(twice))} came again in {file.name}: name "
                "one file, or keep the others out of the folder"
            )
        state_dict |= found
        unread += others
    variant = path.with_name(VARIANT_FILE)
    facts = read_variant(variant) if len(files) == 1 and variant.is_file() else None
    return Checkpoint(path, state_dict, facts, tuple(unread), files)


def _files(path: Path) -> tuple[Path, ...]:
    """The file, or those of a folder: `checkpoint.pth` alone if there, else all that can be checkpoints."""
    file = path / CHECKPOINT_FILE if path.is_dir() else path
    if file.is_file():
        return (file,)
    parts = [part for part in path.iterdir() if part.suffix in _SUFFIXES] if path.is_dir() else []
    if not parts:
        raise CheckpointError(f"expected a checkpoint at {file}, found no file: name {CHECKPOINT_FILE} or its folder")
    return tuple(sorted(parts))


def _state_dict(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The state dict of one file, and the names of its other entries."""
    content = _load(path)
    entry = next((e for e in _ENTRIES if isinstance(content, dict) and isinstance(content.get(e), dict)), None)
    is_bare = isinstance(content, dict) and bool(content) and all(isinstance(v, Tensor) for v in content.values())
    if not isinstance(content, dict) or (entry is None and not is_bare):
        came = f"entries {_names(content)}" if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(
            f"{path}: expected a dict of tensors, alone or under {' or '.join(map(repr, _ENTRIES))} as published code "
            f"writes it, got {came}"
        )
    state_dict, others = (content, {}) if entry is None else (content.pop(entry), content)
    for key, value in state_dict.items():
        _check_tensor(path, key, value)
    return dict(state_dict), list(map(str, others))


def read_variant(path: Path) -> dict[str, Any]:
    """Facts of a `variant.yml`. Of the language tags only python/tuple, which the published code writes, is known."""
    if path.stat().st_size > _VARIANT_BYTES:
        raise CheckpointError(f"{path}: expected a few kilobytes of training facts, got {path.stat().st_size} bytes")
    try:
        facts = _variant_facts(_VariantLoader(path.read_bytes()))
    except Exception as error:
        raise CheckpointError(
            f"{path}: expected the YAML that the published code writes: {_one_line(str(error))}"
        ) from error
    if not isinstance(facts, dict):
        raise CheckpointError(f"{path}: expected a mapping of training facts, got {type(facts).__name__}")
    return facts


class _VariantLoader(yaml.SafeLoader):
    """Refuses what is nested deeply before reading on: the scanner takes a step for every open bracket at each one."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > _VARIANT_DEPTH:
            raise ValueError(f"nested more than {_VARIANT_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _variant_facts(loader: _VariantLoader) -> object:
    node = loader.get_single_node()
    if node is None:
        return None
    _expanded(node, {})
    return loader.construct_document(node)


def _expanded(node: yaml.Node, known: dict[int, int]) -> int:
    """Nodes below `node` with every alias written out: a kilobyte of aliases of aliases can stand for billions."""
    if id(node) not in known:
        known[id(node)] = _VARIANT_NODES  # an alias of what contains it has no end
        children = node.value if isinstance(node.value, list) else []
        parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        known[id(node)] = 1 + sum(_expanded(part, known) for part in parts)
    if known[id(node)] > _VARIANT_NODES:
        raise ValueError(f"more than {_VARIANT_NODES} values, aliases counted each time")
    return known[id(node)]


_VariantLoader.add_constructor(
    "tag:yaml.org,2002:python/tuple",
    lambda loader, node: tuple(loader.construct_sequence(cast(yaml.SequenceNode, node), deep=True)),
)


def _load(path: Path) -> object:
    is_zip = False
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            _check_zip(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except CheckpointError:
        raise
    except Exception as error:  # a hostile or cut file can fail anywhere inside the reader
        raise CheckpointError(_load_failure(path, is_zip, error)) from error


def _check_zip(path: Path) -> None:
    """torch.save writes `data.pkl`, and stores its records uncompressed: together they are smaller than the file."""
    records = zipfile.ZipFile(path).infolist()
    if not any(record.filename.endswith("/data.pkl") for record in records):
        raise CheckpointError(
            f"{path}: expected a checkpoint written by torch.save, got a zip archive of "
            f"{_names(record.filename for record in records)}: unpack it and name the checkpoint in it"
        )
    claimed = sum(record.file_size for record in records)
    if claimed > path.stat().st_size:
        raise CheckpointError(
            f"{path}: its records claim {claimed} bytes in a file of {path.stat().st_size}: not written by torch.save"
        )


def _load_failure(path: Path, is_zip: bool, error: Exception) -> str:
    came = "" if is_zip or isinstance(error, OSError) else _mistaken(path)
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused and not came:
        return (
            f"{path}: expected tensors and plain values, found {refused[1][:80]}, which could execute code: where you "
            "trust the file, save its entry 'model' alone, as torch.save({'model': state_dict}, path)"
        )
    reason = _one_line(str(error).rpartition("WeightsUnpickler error:")[2]) or type(error).__name__
    came = came or f"one that cannot be read ({reason}): copy it again"
    return f"{path}: expected a checkpoint written by torch.save, got {came}"


def _mistaken(path: Path) -> str:
    """What a file that could not be read is instead, and what to do; empty where it begins like a checkpoint."""
    with path.open("rb") as stream:
        start = stream.read(64)
    if not start:
        return "an empty file: copy or download it again"
    for beginning, kind, cure in _MISTAKEN:
        if start.lstrip().startswith(beginning):
            return f"{kind}: {cure}"
    if start[8:10] == b'{"':
        return "safetensors: save what they hold as torch.save({'model': safetensors.torch.load_file(path)}, other)"
    text = start.decode("utf-8", errors="ignore")  # the last character may be cut
    if len(text.encode()) > len(start) - 4 and all(char.isprintable() or char.isspace() for char in text):
        return f"a text file that begins {shown(text.strip()[:40])}: name the file of the weights"
    return "" if start[0] == _PICKLE else f"a file that begins with the bytes {start[:4].hex(' ')}: name another one"


def _check_tensor(path: Path, key: object, value: object) -> None:
    if not isinstance(key, str) or not isinstance(value, Tensor):
        raise CheckpointError(
            f"{path}: expected named tensors in the state dict, got {type(value).__name__} as {_name(key)}"
        )
    is_weight = value.is_floating_point() or key.endswith(_COUNTER)
    if value.layout != torch.strided or value.device.type != "cpu" or not is_weight:
        raise CheckpointError(
            f"{path}: expected plain floating-point weights, got {_name(key)} as {value.dtype}, {value.layout}"
        )
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise CheckpointError(
            f"{path}: {_name(key)} claims shape {tuple(value.shape)} but the file holds less data: copy it again"
        )


# ------------------------------------------------------------------------------------------------- facts and shapes


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
            decoder=cast(Decoder, decoder),
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


def settings_from_variant(checkpoint: Checkpoint) -> Settings:
    """What `variant.yml` says, for `recipes.resolve`; the name is that of the checkpoint's folder."""
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


_DISTILLED = "encoder.dist_token"


def _cross_check(checkpoint: Checkpoint, network: Network) -> None:
    """Compares every fact that shapes can tell, before any table is built from a claim."""
    found = checkpoint.state_dict
    proj = _shape(found, "encoder.patch_embed.proj.weight")
    classes = _shape(found, "decoder.head.weight")[:1] + _shape(found, "decoder.cls_emb")[1:2]
    checks = {
        "net_kwargs.d_model": (network.embed_dim, *proj[:1]),
        "net_kwargs.patch_size": (network.patch_size, *proj[-1:]),
        "net_kwargs.n_layers": (network.depth, _blocks(found, "encoder.blocks.")),
        "net_kwargs.decoder.n_layers": (network.decoder_depth, _blocks(found, "decoder.blocks.")),
        "net_kwargs.n_cls": (network.classes, *classes),
        "net_kwargs.distilled": (bool(network.extra_tokens), _DISTILLED in found),
    }
    for key, (claimed, *measured) in checks.items():
        if any(claimed != came for came in measured):
            raise CheckpointError(
                f"{checkpoint.path}: {key} is {claimed} in {VARIANT_FILE}, tensors have {measured[0]}: pair the files"
            )


def _shape(state_dict: Mapping[str, Tensor], key: str) -> tuple[int, ...]:
    return tuple(state_dict[key].shape) if key in state_dict else ()


def _blocks(state_dict: Mapping[str, Tensor], prefix: str) -> int:
    return len({key.removeprefix(prefix).split(".")[0] for key in state_dict if key.startswith(prefix)})


def expected_shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """Official parameter name -> shape, the position embedding at the network's own grid."""
    dim, patch, classes = network.embed_dim, network.patch_size, network.classes
    shapes = {
        "encoder.cls_token": (1, 1, dim),
        **({_DISTILLED: (1, 1, dim)} if network.extra_tokens else {}),
        "encoder.pos_embed": (1, network.prefix + math.prod(network.grid), dim),
        "encoder.patch_embed.proj.weight": (dim, 3, patch, patch),
        "encoder.patch_embed.proj.bias": (dim,),
        **_block_shapes("encoder.blocks", network.depth, dim),
        **_pair("encoder.norm", dim),
    }
    if network.decoder == "linear":
        return {**shapes, **_pair("decoder.head", classes, dim)}
    return {
        **shapes,
        "decoder.cls_emb": (1, classes, dim),
        "decoder.proj_patch": (dim, dim),
        "decoder.proj_classes": (dim, dim),
        **_pair("decoder.proj_dec", dim, dim),
        **_block_shapes("decoder.blocks", network.decoder_depth, dim),
        **_pair("decoder.decoder_norm", dim),
        **_pair("decoder.mask_norm", classes),
    }


def _pair(name: str, *weight: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": weight, f"{name}.bias": weight[:1]}


def _block_shapes(name: str, depth: int, dim: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(depth):
        shapes |= _pair(f"{name}.{i}.norm1", dim) | _pair(f"{name}.{i}.norm2", dim)
        shapes |= _pair(f"{name}.{i}.attn.qkv", 3 * dim, dim) | _pair(f"{name}.{i}.attn.proj", dim, dim)
        shapes |= _pair(f"{name}.{i}.mlp.fc1", 4 * dim, dim) | _pair(f"{name}.{i}.mlp.fc2", dim, 4 * dim)
    return shapes


# ---------------------------------------------------------------------------------------------------------- weights


def state_dict_for(network: Network, checkpoint: Checkpoint) -> Weights:
    """The checkpoint's weights for a network: every key and shape checked, fp32, the position embedding at its grid.

    Raises CheckpointError when a key is missing, unknown or of another shape, or a weight is not finite.
    """
    if network.family in NAMINGS:
        return _translated(network, checkpoint)
    expected = expected_shapes(network)
    found = checkpoint.state_dict
    unused = tuple(sorted(key for key in found if key.startswith(_UNUSED_PREFIXES)))
    _check_keys(checkpoint, expected, set(found) - set(unused))
    _check_shapes(checkpoint, expected, "encoder.pos_embed")
    state_dict = {key: found[key].to(torch.float32, copy=True) for key in expected}
    _check_finite(checkpoint, state_dict)
    old = _stored_grid(checkpoint, network)
    if old != network.grid:
        embedding = state_dict["encoder.pos_embed"]
        state_dict["encoder.pos_embed"] = resize_position_embedding(embedding, old, network.grid, network.prefix)
    if network.extra_tokens:
        tokens = [state_dict["encoder.cls_token"], state_dict.pop(_DISTILLED)]
        state_dict["encoder.cls_token"] = torch.cat(tokens, 1)
    return Weights(state_dict, unused, None if old == network.grid else old)


def _translated(network: Network, checkpoint: Checkpoint) -> Weights:
    """Weights under another project's names; most such networks take pictures of no other size than in training."""
    naming = _naming(network, checkpoint)
    shapes, found = parameter_shapes(network), checkpoint.state_dict
    reason = naming.refusal(found)
    if reason:
        raise CheckpointError(f"{checkpoint.path}: {reason}")
    expected = naming.expected(shapes)
    unused = tuple(sorted(key for key in set(found) - set(expected) if naming.is_unused(key)))
    _check_keys(checkpoint, expected, set(found) - set(unused))
    rows, came = expected[naming.positions][1], _shape(found, naming.positions)[1:2]
    old = _square_grid(checkpoint, naming) if naming.resized else network.grid
    if came != (rows,) and not naming.resized:
        raise CheckpointError(
            f"{checkpoint.path}: expected position embeddings of {rows} tokens, got {came}: this network takes no "
            "other size than it was trained for, so set network.image_size to that"
        )
    _check_shapes(checkpoint, expected, naming.positions if naming.resized else "")
    resized = old != network.grid
    state_dict = naming.translated(found, shapes, network.grid if resized else None)
    _check_finite(checkpoint, state_dict)
    return Weights(state_dict, unused, old if resized else None)


def _square_grid(checkpoint: Checkpoint, naming: Naming) -> Size:
    """The grid of a position embedding that its project resizes, which it does from a square."""
    (rows,) = _shape(checkpoint.state_dict, naming.positions)[1:2] or (0,)
    side = math.isqrt(max(rows - naming.positioned, 0))
    if side * side != rows - naming.positioned or not side:
        raise CheckpointError(
            f"{checkpoint.path}: expected position embeddings of a square grid behind {naming.positioned} of other "
            f"tokens in {naming.positions}, got {rows} rows: choose the recipe that fits the checkpoint"
        )
    return side, side


def _naming(network: Network, checkpoint: Checkpoint) -> Naming:
    namings = NAMINGS[network.family](network)
    naming = next((n for n in namings if any(key.startswith(n.mark) for key in checkpoint.state_dict)), None)
    if naming is None:
        raise CheckpointError(
            f"{checkpoint.path}: expected {network.family} as {' or '.join(n.project for n in namings)} names its "
            f"parameters, got {_names(checkpoint.state_dict)}: choose the recipe that fits the checkpoint"
        )
    if network.decoder not in naming.decoders:
        raise CheckpointError(
            f"{checkpoint.path}: expected network.decoder {' or '.join(naming.decoders)}, which {naming.project} "
            f"computes, got {network.decoder}: choose the recipe that fits the checkpoint"
        )
    return naming


def _check_finite(checkpoint: Checkpoint, state_dict: Mapping[str, Tensor]) -> None:
    bad = [key for key, value in state_dict.items() if not bool(torch.isfinite(value).all())]
    if bad:
        raise CheckpointError(
            f"{checkpoint.path}: expected finite weights, got NaN or infinity in {_names(bad)}: train or copy it again"
        )


def _check_keys(checkpoint: Checkpoint, expected: Iterable[str], found: set[str]) -> None:
    missing, unknown = sorted(set(expected) - found), sorted(found - set(expected))
    if missing or unknown:
        raise CheckpointError(
            f"{checkpoint.path}: expected the parameters of this network, missing {_names(missing)}, unknown "
            f"{_names(unknown)}: choose the recipe that fits the checkpoint"
        )


def _check_shapes(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], positions: str = "") -> None:
    """`positions` names a position embedding that may have any number of rows."""
    for key, shape in expected.items():
        came = _shape(checkpoint.state_dict, key)
        resizable = key == positions and len(came) == 3 and (came[0], came[2]) == (shape[0], shape[2])
        if came != shape and not resizable:
            raise CheckpointError(
                f"{checkpoint.path}: expected {key} of shape {shape}, got {came}: choose the recipe that fits"
            )


def _stored_grid(checkpoint: Checkpoint, network: Network) -> Size:
    """Grid of the stored position embedding: the training size of `variant.yml`, else the network's, else a square."""
    patches = _shape(checkpoint.state_dict, "encoder.pos_embed")[1] - network.prefix
    side = math.isqrt(max(patches, 0))
    candidates = [network.grid, (side, side)]
    if checkpoint.variant is not None and _Facts(checkpoint).get("net_kwargs.image_size") is not None:
        height, width = _Facts(checkpoint).size("net_kwargs.image_size")
        candidates.insert(0, (height // network.patch_size, width // network.patch_size))
    for grid in candidates:
        if patches > 0 and math.prod(grid) == patches:
            return grid
    raise CheckpointError(
        f"{checkpoint.path}: expected a position embedding for a square grid or that of {VARIANT_FILE}, got "
        f"{patches} patches: correct net_kwargs.image_size"
    )


def resize_position_embedding(embedding: Tensor, old: Size, new: Size, count: int = 1) -> Tensor:
    """(1, count + old rows * columns, D) -> (1, count + new ..., D): `count` leading rows kept, the grid part resized.

    Bilinear with align_corners=False, as the published code does at run time (segm/model/utils.py).
    """
    prefix, patches = embedding[:, :count], embedding[:, count:]
    grid = patches.transpose(1, 2).reshape(1, -1, *old)
    resized = torch.nn.functional.interpolate(grid, size=new, mode="bilinear", align_corners=False)
    return torch.cat([prefix, resized.flatten(2).transpose(1, 2)], dim=1)


def _names(names: Iterable[object], limit: int = 5) -> str:
    listed = [_name(name) for name in names]
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return (", ".join(listed[:limit]) or "none") + more


def _name(key: object) -> str:
    """A key of the file, fit for one line of a message."""
    text = str(key)[:80]
    return text if text.isprintable() else ascii(text)


def _one_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:200]
