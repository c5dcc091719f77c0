"""How people are told of counts, data sets and merges: the same words in tables, pages, figures and messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_HALF = re.compile(r"(.+)-(first|second)-half")


def counted(count: int, things: str) -> str:
    """`2 photos`, but `1 photo`."""
    return f"{count} {things.removesuffix('s') if count == 1 else things}"


def dataset_name(record: Mapping[str, Any]) -> str:
    """Data set and split of an evaluation, for people; a folder without splits is called what it is."""
    half = _HALF.fullmatch(record["split"])
    if half:
        return f"{half[2]} half of {dataset_name({**record, 'split': half[1]})}"
    name = f"{record['dataset']} {record['split']}"
    return "a folder of pictures" if name == "folder all" else name


def shown_merges(names: Sequence[str]) -> list[str]:
    """Of the merges of a kind the first and the last, so that ToMe's, one a block, leave a table readable."""
    kinds = [name.partition("_")[0] for name in names]
    return [
        name
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
        if kind not in kinds[:i] or kind not in kinds[i + 1 :]
    ]


def merge_title(name: str) -> str:
    """How people call a merge: CLAP, GBM, or GBM 11 among several."""
    kind, _, layer = name.partition("_")
    return f"{'ToMe' if kind == 'tome' else kind.upper()} {layer}".strip()
