"""Official checkpoint files in, named tensors out; nothing executes on load, and hostile files are refused.

The published Segmenter code (rstrudel/segmenter, tue-mps/algm-segmenter) writes `checkpoint.pth`, a dict whose entry
`model` is the state dict, and `variant.yml` beside it. Merging adds no parameters, so both projects share one format.
mmsegmentation and its descendants (SETR, SegViT) write any name, the state dict as entry `state_dict` and no facts of
the network that could be read without executing something: a recipe has to give them. Others write the state dict
alone (EoMT), or backbone and head into files of their own (DINOv2), which are read from one folder. A file is what its
content says, whatever it is called: torch.save's, or safetensors, which hold a state dict alone.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from algm_deploy.bundle.files import require_utf8
from algm_deploy.errors import CheckpointError, remedy, shown

CHECKPOINT_FILE = "checkpoint.pth"
VARIANT_FILE = "variant.yml"
_SAFETENSORS_TABLE = 100_000_000  # the library's own limit, in bytes
_VARIANT_BYTES = 1 << 16
_VARIANT_NODES = 10_000
_VARIANT_DEPTH = 32  # published files have four
_ENTRIES = ("model", "state_dict")
_SUFFIXES = (".pth", ".pt", ".bin", ".safetensors")
# What DataParallel, Lightning, moving averages and others put before all names, and compilers and sharders anywhere.
_WRAPPERS = ("module.", "model.", "net.", "segmentor.", "ema.", "ema_model.", "model_ema.", "module_ema.")
_WRAPPERS_INSIDE = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# What calls weights a moving average of the training's: an entry of the file, names of tensors.
_AVERAGE, _AVERAGES = re.compile(r"(?:^|_)ema(?:$|_)"), re.compile(r"(?:ema|ema_model|model_ema|module_ema)[._]")
_AVERAGED = "n_averaged"  # the counter that torch.optim.swa_utils.AveragedModel writes beside them
# The entries of state dicts that are no floating-point tensors; nothing reads them at inference.
_COUNTERS = (".num_batches_tracked", _AVERAGED)
_PICKLE_BYTES = 1 << 24  # it comes before the weights
_PICKLE = 0x80  # first byte of a checkpoint from before torch.save wrote zip archives
# What a file that is no checkpoint begins with, what it is, and what to do.
_MISTAKEN = (
    (b"version https://git-lfs", "a Git LFS pointer in its place", "fetch the file itself with `git lfs pull`"),
    (b"<", "a web page", "download the file that the page is about"),
    (b"\x1f\x8b", "a gzip archive", "unpack it and name the checkpoint in it"),
    (b"PK", "a damaged file, or one whose end is missing", "copy or download it again"),
)


@dataclass(frozen=True)
class Checkpoint:
    """An official file as it lies on disk: raw tensors by official name, and the facts of `variant.yml` (or None).

    `unread` names the entries of the file that were left alone, such as the optimizer's. The tensors may be mapped from
    the file: `state_dict_for` returns copies. `files` are those it was read from, `path` their folder if several.
    `notes` tell what was taken for granted, one printable line each.
    """

    path: Path
    state_dict: dict[str, Tensor]
    variant: Mapping[str, Any] | None
    unread: tuple[str, ...]
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    def release(self) -> None:
        """Lets go of the tensors: a mapped file that was read counts as memory while one of them lives."""
        self.state_dict.clear()


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Reads `checkpoint.pth` (or the folder that holds it) and, where present, the `variant.yml` beside it.

    A folder without `checkpoint.pth` stands for one network in several files, such as a backbone and its head.
    Raises CheckpointError for whatever is not such a file; code inside a file is never run.
    """
    path = Path(path)
    require_utf8(path, CheckpointError)
    files = _files(path)
    if len(files) == 1:
        (path,) = files
    state_dict: dict[str, Tensor] = {}
    unread: list[str] = []
    notes: list[str] = []
    for file in files:
        found, others = _state_dict(file)
        found, told = _unwrapped(found)
        notes += [f"{file.name}: {line}" for line in (*told, *_average_beside(others))]
        twice = set(state_dict) & set(found)
        if twice:
            raise CheckpointError(
                f"{path}: expected the parts of one network, {names_of(sorted(twice))} came again in {file.name}: name "
                "one file, or keep the others out of the folder"
            )
        state_dict |= found
        unread += others
    variant = path.with_name(VARIANT_FILE)
    facts = read_variant(variant) if len(files) == 1 and variant.is_file() else None
    return Checkpoint(path, state_dict, facts, tuple(unread), files, tuple(notes))


def _files(path: Path) -> tuple[Path, ...]:
    """The file, or those of a folder: `checkpoint.pth` alone if there, else all that can be checkpoints."""
    file = path / CHECKPOINT_FILE if path.is_dir() else path
    if file.is_file():
        return (file,)
    parts = [part for part in path.iterdir() if part.suffix in _SUFFIXES] if path.is_dir() else []
    if not parts:
        raise CheckpointError(f"expected a checkpoint at {file}, found no file: name the checkpoint or its folder")
    return tuple(sorted(parts))


def _state_dict(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The state dict of one file, and the names of its other entries."""
    content = _load(path)
    entry = next((e for e in _ENTRIES if isinstance(content, dict) and isinstance(content.get(e), dict)), None)
    is_bare = isinstance(content, dict) and bool(content) and all(isinstance(v, Tensor) for v in content.values())
    if not isinstance(content, dict) or (entry is None and not is_bare):
        if isinstance(content, dict) and (place := _average(content)):
            raise CheckpointError(
                f"{path}: expected the weights under {' or '.join(map(repr, _ENTRIES))}, got their moving average "
                f"(EMA) alone: where you want that, save it as torch.save({{'model': torch.load(path){place}}}, other)"
            )
        came = f"entries {names_of(content)}" if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(
            f"{path}: expected a dict of tensors, alone or under {' or '.join(map(repr, _ENTRIES))} as published code "
            f"writes it, got {came}"
        )
    state_dict, others = (content, {}) if entry is None else (content.pop(entry), content)
    for key, value in state_dict.items():
        _check_tensor(path, key, value)
    return dict(state_dict), list(map(str, others))


def _unwrapped(found: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors by the names that the network gave them, and lines that name what wrappers had put there."""
    averages = [key for key in found if _AVERAGES.match(key)]
    beside = averages if len(averages) < len(found) else []
    counted = _AVERAGED in found
    named = {key: value for key, value in found.items() if key not in (*beside, _AVERAGED)}
    inside = {_WRAPPERS_INSIDE.sub("", key): value for key, value in named.items()}
    parts = sorted({part for key in named for part in _WRAPPERS_INSIDE.findall(key)})
    if len(inside) < len(named):
        inside, parts = named, []  # two names would become one
    prefix = ""
    while more := next((w for w in _WRAPPERS if inside and all(k.startswith(prefix + w) for k in inside)), ""):
        prefix += more
    lines = [f"every name begins with {prefix}, as a wrapper writes it, which was left out"] if prefix else []
    lines += [f"{part} in names, as a wrapper writes it, was left out" for part in parts]
    if counted or _AVERAGES.match(prefix):
        lines.append("by its names it holds weights averaged over the training (EMA or SWA)")
    if beside:
        lines.append(f"its moving average (EMA), {names_of(beside, 1)}, was left alone")
    return {key.removeprefix(prefix): value for key, value in inside.items()}, lines


def _average(content: Mapping[Any, Any]) -> str:
    """Where a file has tensors that its names call a moving average, as `['ema']['shadow']`; empty where nowhere."""
    for key, value in content.items():
        if isinstance(key, str) and isinstance(value, dict) and _AVERAGE.search(key):
            parts = {f"[{_name(key)!r}][{_name(k)!r}]": part for k, part in value.items() if isinstance(part, dict)}
            for place, part in ({f"[{_name(key)!r}]": value} | parts).items():
                if part and all(isinstance(one, Tensor) for one in part.values()):
                    return place
    return ""


def _average_beside(others: Iterable[str]) -> list[str]:
    """A line for people who may have wanted the other weights of a file."""
    found = [name for name in others if _AVERAGE.search(name)]
    return [f"its moving average (EMA), {names_of(found)}, was left alone"] if found else []


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
        if _is_safetensors(path):
            return load_file(path)
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            _check_zip(path)
        if path.name.endswith(".safetensors"):  # torch.load goes by the name of a path
            with path.open("rb") as stream:
                return torch.load(stream, map_location="cpu", weights_only=True)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except CheckpointError:
        raise
    except Exception as error:  # a hostile or cut file can fail anywhere inside the reader
        raise CheckpointError(_load_failure(path, is_zip, error)) from error


def _is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors do: eight bytes of a length, and a table in JSON."""
    with path.open("rb") as stream:
        start = stream.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= _SAFETENSORS_TABLE


def _check_zip(path: Path) -> None:
    """torch.save writes `data.pkl`, and stores its records uncompressed: together they are smaller than the file."""
    records = zipfile.ZipFile(path).infolist()
    if not any(record.filename.endswith("/data.pkl") for record in records):
        raise CheckpointError(
            f"{path}: expected a checkpoint written by torch.save, got a zip archive of "
            f"{names_of(record.filename for record in records)}: unpack it and name the checkpoint in it"
        )
    claimed = sum(record.file_size for record in records)
    if claimed > path.stat().st_size:
        raise CheckpointError(
            f"{path}: its records claim {claimed} bytes in a file of {path.stat().st_size}: not written by torch.save"
        )


def _load_failure(path: Path, is_zip: bool, error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"expected to read {path}, got {error.strerror}: {remedy(error, 'copy it again')}"
    if isinstance(error, SafetensorError):
        return f"{path}: expected whole safetensors, got damaged ones ({_one_line(str(error))}): copy them again"
    came = "" if is_zip or isinstance(error, OSError) else _mistaken(path)
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused and not came:
        entry = _entry_named(path)
        return (
            f"{path}: expected tensors and plain values, found {refused[1][:80]}, which could execute code: where you "
            f"trust the file, save its entry {entry!r} alone, as torch.save({{{entry!r}: torch.load(path, "
            f"weights_only=False)[{entry!r}]}}, other)"
        )
    reason = _one_line(str(error).rpartition("WeightsUnpickler error:")[2]) or type(error).__name__
    came = came or f"one that cannot be read ({reason}): copy it again"
    return f"{path}: expected a checkpoint written by torch.save, got {came}"


def _entry_named(path: Path) -> str:
    """The entry of the state dict in a file that cannot be read, by the texts of its pickle, which is not run."""
    with path.open("rb") as stream:
        content = stream.read(_PICKLE_BYTES)
    # A text is its length, in four bytes or in one, and itself.
    coded = {entry: (len(entry).to_bytes(4, "little"), b"\x8c" + bytes([len(entry)])) for entry in _ENTRIES}
    found = [e for e, lengths in coded.items() if any(length + e.encode() in content for length in lengths)]
    return found[0] if found else _ENTRIES[0]


def _mistaken(path: Path) -> str:
    """What a file that could not be read is instead, and what to do; empty where it begins like a checkpoint."""
    with path.open("rb") as stream:
        start = stream.read(64)
    if not start:
        return "an empty file: copy or download it again"
    for beginning, kind, cure in _MISTAKEN:
        if start.lstrip().startswith(beginning):
            return f"{kind}: {cure}"
    text = start.decode("utf-8", errors="ignore")  # the last character may be cut
    if len(text.encode()) > len(start) - 4 and all(char.isprintable() or char.isspace() for char in text):
        return f"a text file that begins {shown(text.strip()[:40])}: name the file of the weights"
    return "" if start[0] == _PICKLE else f"a file that begins with the bytes {start[:4].hex(' ')}: name another one"


def _check_tensor(path: Path, key: object, value: object) -> None:
    if not isinstance(key, str) or not isinstance(value, Tensor):
        raise CheckpointError(
            f"{path}: expected named tensors in the state dict, got {type(value).__name__} as {_name(key)}"
        )
    is_weight = value.is_floating_point() or key.endswith(_COUNTERS)
    if value.layout != torch.strided or value.device.type != "cpu" or not is_weight:
        raise CheckpointError(
            f"{path}: expected plain floating-point weights, got {_name(key)} as {value.dtype}, {value.layout}"
        )
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise CheckpointError(
            f"{path}: {_name(key)} claims shape {tuple(value.shape)} but the file holds less data: copy it again"
        )


def shape_of(state_dict: Mapping[str, Tensor], key: str) -> tuple[int, ...]:
    """Shape of a tensor, () where there is none."""
    return tuple(state_dict[key].shape) if key in state_dict else ()


def names_of(names: Iterable[object], limit: int = 5) -> str:
    """The first of some keys of a file, fit for one line of a message."""
    listed = [_name(name) for name in names]
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return (", ".join(listed[:limit]) or "none") + more


def _name(key: object) -> str:
    """A key of the file, fit for one line of a message."""
    text = str(key)[:80]
    return text if text.isprintable() else ascii(text)


def _one_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:200]
