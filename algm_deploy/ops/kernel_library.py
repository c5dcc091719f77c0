"""The kernel library in Python: what runtimes/kernels/algm_kernels.h declares, called with addresses and numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from algm_deploy.errors import ExecutionError
from algm_deploy.ops.schema import WORDS

DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
ROWS_ON_DEVICE = -1
"""For `out_rows`: exactly the rows that the decision counted."""
RAGGED_IN, RAGGED_OUT = 1, 2
"""Of a merge: its tokens, its results, or both by the sum, are images one behind the other."""
MAX_LEVELS = 8
"""Most levels that deformable attention looks at."""


def _struct(name: str, longs: str, ints: str, doubles: str = "", floats: str = "") -> type[ctypes.Structure]:
    fields: list[tuple[str, Any]] = [(field, ctypes.c_int64) for field in longs.split()]
    fields += [(field, ctypes.c_double) for field in doubles.split()]
    fields += [(field, ctypes.c_float) for field in floats.split()]
    fields += [(field, ctypes.c_int32) for field in ints.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


# Field by field as in the header.
ClapParams = _struct(
    "ClapParams",
    "batch rows width grid_h grid_w window_h window_w prefix budget",
    "dtype semantics batch_mode order rule ragged",
)
GbmParams = _struct(
    "GbmParams", "batch rows width patches prefix budget", "dtype semantics batch_mode rule ragged", "divisor"
)
AttentionParams = _struct("AttentionParams", "images rows heads side", "dtype ragged", floats="scale")
GeluParams = _struct("GeluParams", "rows width", "dtype")
BiasSkipNormParams = _struct("BiasSkipNormParams", "rows width", "dtype", floats="epsilon")
ReframeParams = _struct("ReframeParams", "images rows width skip put", "dtype")
ApartParams = _struct("ApartParams", "images rows width first count", "dtype")
PatchesParams = _struct("PatchesParams", "images height width side", "dtype", floats="centre scale")
UnmergeParams = _struct("UnmergeParams", "batch rows width patches prefix", "dtype")
LabelMapParams = _struct(
    "LabelMapParams", "batch rows classes grid_h grid_w height width first lines prefix", "dtype label_type"
)
MaskLabelsParams = _struct(
    "MaskLabelsParams", "batch queries classes grid_h grid_w height width first lines", "dtype label_type"
)


class DeformableAttentionParams(ctypes.Structure):
    """`sides` has room for more levels than there are."""

    _fields_ = (
        *((field, ctypes.c_int64) for field in ["batch", "cells", "heads", "width", "queries", "levels", "points"]),
        ("sides", ctypes.c_int32 * (2 * MAX_LEVELS)),
        ("dtype", ctypes.c_int32),
    )


class Switch(ctypes.Structure):
    """The graphs (cudaGraph_t) that may come behind a merge, by the rows they have room for."""

    _fields_ = (
        ("length", ctypes.c_void_p),
        ("choices", ctypes.c_int64),
        ("rows", ctypes.POINTER(ctypes.c_int64)),
        ("graphs", ctypes.POINTER(ctypes.c_void_p)),
    )

    @classmethod
    def of(cls, length: int, graphs: Mapping[int, int]) -> Switch:
        """By the rows at the address `length`, of graphs by the rows they have room for."""
        count, rows = len(graphs), sorted(graphs)
        chosen = [graphs[one] for one in rows]
        return cls(length, count, (ctypes.c_int64 * count)(*rows), (ctypes.c_void_p * count)(*chosen))


def clap_params(
    shape: Sequence[int],
    dtype: str,
    grid: Sequence[int],
    window: Sequence[int],
    prefix: int,
    semantics: str,
    batch: str,
    order: str,
    rule: str,
    budget: int,
) -> ctypes.Structure:
    """Of CLAP on tokens of a shape (B, S, D) and a type; attributes as of the operator."""
    places = _places(semantics=semantics, batch=batch, order=order, rule=rule)
    return ClapParams(*shape, *grid, *window, prefix, budget, DTYPES[dtype], *places)


def gbm_params(
    shape: Sequence[int],
    dtype: str,
    patches: int,
    prefix: int,
    rule: str,
    divisor: float,
    semantics: str,
    batch: str,
    budget: int,
) -> ctypes.Structure:
    """Of GBM on tokens of a shape (B, S, D) and a type, whose maps hold `patches` entries."""
    places = _places(semantics=semantics, batch=batch, rule=rule)
    return GbmParams(*shape, patches, prefix, budget, divisor, DTYPES[dtype], *places)


def attention_params(
    shape: Sequence[int], dtype: str, heads: int, scale: float, ragged: bool = False
) -> ctypes.Structure:
    """Of attention on a product of a shape (B, S, 3D) and a type."""
    images, rows, width = shape
    return AttentionParams(images, rows, heads, width // (3 * heads), scale, DTYPES[dtype], int(ragged))


def reframe_params(shape: Sequence[int], dtype: str, skip: int, put: int) -> ctypes.Structure:
    """Of exchanging `skip` leading rows of ragged values of a shape (B, S, C) and a type for `put` others."""
    return ReframeParams(*shape, skip, put, DTYPES[dtype])


def apart_params(shape: Sequence[int], dtype: str, first: int, count: int) -> ctypes.Structure:
    """Of taking rows of ragged values of a shape (B, S, C) and a type apart."""
    return ApartParams(*shape, first, count, DTYPES[dtype])


def gelu_params(shape: Sequence[int], dtype: str) -> ctypes.Structure:
    """Of GELU of a product of a shape (B, S, C) and a type."""
    images, rows, width = shape
    return GeluParams(images * rows, width, DTYPES[dtype])


def bias_skip_norm_params(shape: Sequence[int], dtype: str, epsilon: float) -> ctypes.Structure:
    """Of normalising the sum of a product and a residual of a shape (B, S, D) and a type."""
    images, rows, width = shape
    return BiasSkipNormParams(images * rows, width, epsilon, DTYPES[dtype])


def patches_params(shape: Sequence[int], dtype: str, side: int, centre: float, scale: float) -> ctypes.Structure:
    """Of patches of images of a shape (B, 3, H, W) and a type."""
    images, _, height, width = shape
    return PatchesParams(images, height, width, side, centre, scale, DTYPES[dtype])


def unmerge_params(shape: Sequence[int], dtype: str, patches: int, prefix: int) -> ctypes.Structure:
    """Of unmerging values of a shape (B, S, C) and a type."""
    return UnmergeParams(*shape, patches, prefix, DTYPES[dtype])


def label_map_params(
    shape: Sequence[int], dtype: str, prefix: int, grid: Sequence[int], size: Sequence[int], wide: bool
) -> ctypes.Structure:
    """Of labelling all lines by scores of a shape (B, S, K) and a type; labels are int32 if `wide`, else uint8."""
    return LabelMapParams(*shape, *grid, *size, 0, size[0], prefix, DTYPES[dtype], int(wide))


def mask_labels_params(
    shape: Sequence[int], dtype: str, classes: int, size: Sequence[int], wide: bool
) -> ctypes.Structure:
    """Of labelling all lines by masks of a shape (B, Q, h, w) and a type; labels are int32 if `wide`, else uint8."""
    images, queries, *grid = shape
    return MaskLabelsParams(images, queries, classes, *grid, *size, 0, size[0], DTYPES[dtype], int(wide))


def deformable_attention_params(
    shape: Sequence[int], dtype: str, looks: Sequence[int], shapes: Sequence[int]
) -> ctypes.Structure:
    """Of deformable attention on a value of a shape (B, M, H, D) and a type, with shares of a shape (B, Q, H, L, P).

    Raises:
        ExecutionError: more levels than the library takes.
    """
    if len(shapes) > 2 * MAX_LEVELS:
        raise ExecutionError(f"expected at most {MAX_LEVELS} levels of deformable attention, got {len(shapes) // 2}")
    _, queries, _, levels, points = looks
    sides = DeformableAttentionParams().sides
    sides[: len(shapes)] = shapes
    return DeformableAttentionParams(*shape, queries, levels, points, sides, DTYPES[dtype])


def _places(**words: str) -> list[int]:
    return [WORDS[name].index(word) for name, word in words.items()]


class KernelLibrary:
    """The functions of a library for one kind of memory: `device` cpu or cuda."""

    def __init__(self, path: Path, device: str) -> None:
        self.device = device
        self._library = ctypes.CDLL(str(path))
        for name in ("clap_workspace", "gbm_workspace"):
            self._function(name).restype = ctypes.c_size_t
        self._function("gbm_candidates").restype = ctypes.c_int64
        self._function("status_text").restype = ctypes.c_char_p

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"algm_{self.device}_{name}")

    def status_text(self, status: int) -> str:
        """What a status that is not 0 means."""
        text: bytes = self._function("status_text")(status)
        return text.decode()

    def query(self, name: str, params: ctypes.Structure) -> int:
        """A number that follows from the parameters, such as the bytes of a workspace."""
        return int(self._function(name)(ctypes.byref(params)))

    def call(
        self, name: str, params: ctypes.Structure, *arguments: ctypes.c_void_p | int | None, stream: int = 0
    ) -> int:
        """Status of a kernel, 0 for success. None goes in as the null pointer, numbers as int64."""
        converted = [ctypes.c_int64(a) if isinstance(a, int) else a or ctypes.c_void_p() for a in arguments]
        return int(self._function(name)(ctypes.byref(params), *converted, ctypes.c_void_p(stream)))

    def join(self, first: int, switches: Sequence[Switch]) -> tuple[int, int]:
        """Status, and the graph that `first` and what the switches choose are joined into, on the current device."""
        joined, count = ctypes.c_void_p(), len(switches)
        given = ctypes.c_void_p(first), (Switch * count)(*switches), ctypes.c_int64(count)
        status = self._function("join")(*given, ctypes.byref(joined))
        return int(status), joined.value or 0

    def launch_joined(self, joined: int, stream: int) -> int:
        """Status of the launch of a joined graph."""
        return int(self._function("launch_joined")(ctypes.c_void_p(joined), ctypes.c_void_p(stream)))

    def free_joined(self, joined: int) -> None:
        """Gives a joined graph back, behind all its launches."""
        self._function("free_joined")(ctypes.c_void_p(joined))
