"""How people are told of counts, data sets and merges: the same words in tables, pages, figures and messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

_VARIANTS = {"dense_cudnn": "dense, cuDNN attention"}
_PARTS = {"attention": "attention", "mlp": "MLP"}
_HALF = re.compile(r"(.+)-(first|second)-half")


def counted(count: int, things: str) -> str:
    """`2 photos`, but `1 photo`."""
    return f"{count} {things.removesuffix('s') if count == 1 else things}"


def either(names: Sequence[str]) -> str:
    """`a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def first_few(items: Sequence[str], count: int = 3, separator: str = "; ") -> str:
    """The first of many, and how many more there are."""
    more = [f"{len(items) - count} more"] if len(items) > count else []
    return separator.join([*items[:count], *more])


def dataset_title(dataset: str, split: str) -> str:
    """A data set and its split, for people; a folder without splits is called what it is."""
    half = _HALF.fullmatch(split)
    if half:
        return f"{half[2]} half of {dataset_title(dataset, half[1])}"
    name = f"{dataset} {split}"
    return "a folder of pictures" if name == "folder all" else name


def variant_title(name: str) -> str:
    """How people call a network that is timed."""
    return _VARIANTS.get(name, name)


def without_merging(name: str) -> str:
    """The dense network that a gain is told against, in a sentence, which says its name where it is not the usual."""
    return "without merging" if name == "dense" else f"without merging ({variant_title(name)})"


def merge_titles(names: Sequence[str]) -> dict[str, str]:
    """Of the merges of a network those that tables show, and how people call them: CLAP, or GBM 11 among several.

    Of a kind that are the first and the last, so that ToMe's, one a block, leave a table readable. `names` are those of
    the signature, such as `clap_1`.
    """
    kinds = [name.partition("_")[0] for name in names]
    return {
        name: _merge_title(name, alone=kinds.count(kind) == 1)
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
        if kind not in kinds[:i] or kind not in kinds[i + 1 :]
    }


def _merge_title(name: str, alone: bool) -> str:
    kind, *layer = name.split("_")  # early releases wrote kinds alone
    part = layer[1:]
    title = {"tome": "ToMe", "elvit": "ELViT", "evit": "EViT", "dtop": "DToP"}.get(kind, kind.upper())
    return " ".join([title, *([] if alone else layer[:1]), *map(_PARTS.__getitem__, part)])
