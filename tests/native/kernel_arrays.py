"""The kernel library with NumPy arrays going in and coming out, on host or device memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kernel_memory import HostMemory

from algm_deploy.ops.kernel_library import (
    RAGGED_OUT,
    KernelLibrary,
    apart_params,
    attention_params,
    bias_skip_norm_params,
    clap_params,
    deformable_attention_params,
    gbm_params,
    gelu_params,
    label_map_params,
    mask_labels_params,
    patches_params,
    reframe_params,
    unmerge_params,
)

INVALID_ARGUMENT, UNSUPPORTED, INVALID_MAP, OUT_OF_MEMORY = 1, 2, 3, 4
Outputs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class KernelError(Exception):
    """A kernel returned a status other than 0, kept as `status`."""

    def __init__(self, status: int, text: str):
        super().__init__(f"status {status}: {text}")
        self.status = status


class Kernels:
    """The library's functions with memory taken care of; arguments as of the operators."""

    def __init__(self, path: Path, memory: HostMemory):
        self.memory, self.library = memory, KernelLibrary(path, memory.device)

    def call(self, name: str, params: ctypes.Structure, *arguments: Any) -> None:
        """Calls a kernel on the default stream; buffers become pointers, None stays null, integers int64."""
        converted = [
            a if a is None or isinstance(a, int) else ctypes.c_void_p(self.memory.pointer(a)) for a in arguments
        ]
        if status := self.library.call(name, params, *converted):
            raise KernelError(status, self.library.status_text(status))

    def put(self, array: Any, dtype: Any = None) -> Any:
        return self.memory.put(np.asarray(array, dtype=dtype))

    def workspace(self, kind: str, params: ctypes.Structure) -> Any:
        return self.memory.empty((self.library.query(f"{kind}_workspace", params),), np.uint8)

    # --- clap ---

    def clap_similarity(self, tokens: np.ndarray, **attributes: Any) -> np.ndarray:
        params = clap_params(tokens.shape, tokens.dtype.name, **attributes)
        shape = (len(tokens), (params.grid_h // params.window_h) * (params.grid_w // params.window_w))
        similarity = self.memory.empty(shape, np.float32)
        self.call("clap_similarity", params, self.put(tokens), similarity)
        return self.memory.fetch(similarity, shape, np.float32)

    def clap(
        self,
        tokens: np.ndarray,
        size: np.ndarray,
        threshold: float,
        *,
        given: np.ndarray | None = None,
        out_rows: int | None = None,
        ragged: int = 0,
        **attributes: Any,
    ) -> Outputs:
        """tokens, size, map, length as the operator; `given` replaces the similarities, out_rows None means S'."""
        params = clap_params(tokens.shape, tokens.dtype.name, **attributes)
        params.ragged = ragged
        source = None if given is None else [self.put(given, np.float32)]
        patches = params.grid_h * params.grid_w
        return self._merge("clap", params, tokens, size, source, [self.put(threshold, np.float32)], patches, out_rows)

    # --- gbm ---

    def gbm_similarity(
        self, tokens: np.ndarray, length: np.ndarray, **attributes: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        params = gbm_params(tokens.shape, tokens.dtype.name, 1, **attributes)
        shape = (len(tokens), self.library.query("gbm_candidates", params))
        best, best_row = self.memory.empty(shape, np.float32), self.memory.empty(shape, np.int32)
        workspace = self.workspace("gbm", params)
        self.call("gbm_similarity", params, self.put(tokens), self.put(length), best, best_row, workspace)
        return self.memory.fetch(best, shape, np.float32), self.memory.fetch(best_row, shape, np.int32)

    def gbm(
        self,
        tokens: np.ndarray,
        size: np.ndarray,
        map: np.ndarray,
        length: np.ndarray,
        threshold: float,
        *,
        given: tuple[np.ndarray, np.ndarray] | None = None,
        out_rows: int | None = None,
        ragged: int = 0,
        **attributes: Any,
    ) -> Outputs:
        """As `clap`; `given` is (best, best_row)."""
        params = gbm_params(tokens.shape, tokens.dtype.name, map.shape[1], **attributes)
        params.ragged = ragged
        source = None if given is None else [self.put(given[0]), self.put(given[1], np.int32)]
        inputs = [self.put(map), self.put(length), self.put(threshold, np.float32)]
        return self._merge("gbm", params, tokens, size, source, inputs, map.shape[1], out_rows)

    def _merge(
        self,
        kind: str,
        params: ctypes.Structure,
        tokens: np.ndarray,
        size: np.ndarray,
        given: list[Any] | None,
        inputs: list[Any],
        patches: int,
        out_rows: int | None,
    ) -> Outputs:
        memory, (images, _, width) = self.memory, tokens.shape
        kinds = [((images, patches), np.int64), ((images,), np.int64), ((), np.int64), ((), np.int32)]
        decided, workspace = [memory.empty(*kind) for kind in kinds], self.workspace(kind, params)
        name, source = (f"{kind}_decide", [self.put(tokens)]) if given is None else (f"{kind}_decide_given", given)
        self.call(name, params, *source, *inputs, *decided, workspace)
        map, length, count, count_int32 = (memory.fetch(b, *kind) for b, kind in zip(decided, kinds, strict=True))
        assert count == count_int32
        counted = -(-int(count) // images) if params.ragged & RAGGED_OUT else int(count)
        rows = counted if out_rows is None else out_rows
        if rows < 0:
            rows = min(-(counted // out_rows) * -out_rows, tokens.shape[1])
        kinds = [((images, rows, width), tokens.dtype), ((images, rows), np.float32)]
        merged = [memory.empty(*kind) for kind in kinds]
        requested = counted if out_rows is None else out_rows
        lengths = [] if kind == "clap" else inputs[1:2]
        self.call(f"{kind}_apply", params, self.put(tokens), self.put(size), *lengths, workspace, requested, *merged)
        self.memory.fetch(workspace, (self.library.query(f"{kind}_workspace", params),), np.uint8)  # its guard
        values, sizes = (memory.fetch(buffer, *kind) for buffer, kind in zip(merged, kinds, strict=True))
        return values, sizes, map, length

    # --- deformable attention ---

    def deformable_attention(
        self, value: np.ndarray, locations: np.ndarray, shares: np.ndarray, *, shapes: Sequence[int]
    ) -> np.ndarray:
        params = deformable_attention_params(value.shape, value.dtype.name, shares.shape, shapes)
        kind = (*shares.shape[:2], value.shape[2] * value.shape[3]), value.dtype
        out = self.memory.empty(*kind)
        self.call("deformable_attention", params, *map(self.put, (value, locations, shares)), out)
        return self.memory.fetch(out, *kind)

    # --- attention, rows of ragged images, patches, gelu ---

    def packed_attention(
        self,
        product: np.ndarray,
        bias: np.ndarray | None,
        length: np.ndarray | None,
        *,
        heads: int,
        scale: float,
        ragged: bool = False,
    ) -> np.ndarray:
        images, rows, width = product.shape
        params = attention_params(product.shape, product.dtype.name, heads, scale, ragged)
        kind = (images, rows, width // 3), product.dtype
        out = self.memory.empty(*kind)
        others = [None if x is None else self.put(x, d) for x, d in ((bias, np.float32), (length, np.int64))]
        self.call("attention", params, self.put(product), *others, out)
        return self.memory.fetch(out, *kind)

    def reframe(self, values: np.ndarray, length: np.ndarray, front: np.ndarray, *, skip: int) -> np.ndarray:
        images, rows, width = values.shape
        params = reframe_params(values.shape, values.dtype.name, skip, len(front))
        kind = (images, rows - skip + len(front), width), values.dtype
        out = self.memory.empty(*kind)
        self.call("reframe", params, *map(self.put, (values, length, front)), out)
        return self.memory.fetch(out, *kind)

    def apart(self, values: np.ndarray, length: np.ndarray, *, first: int, count: int) -> np.ndarray:
        params = apart_params(values.shape, values.dtype.name, first, count)
        kind = (values.shape[0], count, values.shape[2]), values.dtype
        out = self.memory.empty(*kind)
        self.call("apart", params, self.put(values), self.put(length), out)
        return self.memory.fetch(out, *kind)

    def patches(self, image: np.ndarray, *, side: int, centre: float, scale: float) -> np.ndarray:
        images, channels, height, width = image.shape
        params = patches_params(image.shape, image.dtype.name, side, centre, scale)
        kind = (images, height // side * (width // side), channels * side * side), image.dtype
        out = self.memory.empty(*kind)
        self.call("patches", params, self.put(image), out)
        return self.memory.fetch(out, *kind)

    def gelu(self, product: np.ndarray, bias: np.ndarray) -> np.ndarray:
        params, kind = gelu_params(product.shape, product.dtype.name), (product.shape, product.dtype)
        out = self.memory.empty(*kind)
        self.call("gelu", params, self.put(product), self.put(bias), out)
        return self.memory.fetch(out, *kind)

    def bias_skip_norm(
        self,
        product: np.ndarray,
        bias: np.ndarray,
        residual: np.ndarray,
        weight: np.ndarray,
        shift: np.ndarray,
        *,
        epsilon: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        params = bias_skip_norm_params(product.shape, product.dtype.name, epsilon)
        kind = product.shape, product.dtype
        outputs = self.memory.empty(*kind), self.memory.empty(*kind)
        inputs = [self.put(value) for value in (product, bias, residual, weight, shift)]
        self.call("bias_skip_norm", params, *inputs, *outputs)
        normed, total = (self.memory.fetch(out, *kind) for out in outputs)
        return normed, total

    def bias_skip(self, product: np.ndarray, bias: np.ndarray, residual: np.ndarray) -> np.ndarray:
        params, kind = bias_skip_norm_params(product.shape, product.dtype.name, 0.0), (product.shape, product.dtype)
        out = self.memory.empty(*kind)
        inputs = [self.put(value) for value in (product, bias, residual)]
        self.call("bias_skip_norm", params, *inputs, None, None, None, out)
        return self.memory.fetch(out, *kind)

    def layer_norm(self, x: np.ndarray, weight: np.ndarray, shift: np.ndarray, *, epsilon: float) -> np.ndarray:
        params = bias_skip_norm_params(x.shape, x.dtype.name, epsilon)
        out = self.memory.empty(x.shape, x.dtype)
        parameters = [self.put(value) for value in (weight, shift)]
        self.call("bias_skip_norm", params, self.put(x), None, None, *parameters, out, None)
        return self.memory.fetch(out, x.shape, x.dtype)

    # --- unmerge, label_map ---

    def unmerge(self, values: np.ndarray, map: np.ndarray, *, prefix: int) -> np.ndarray:
        params = unmerge_params(values.shape, values.dtype.name, map.shape[1], prefix)
        kind = (values.shape[0], map.shape[1], values.shape[2]), values.dtype
        return self._tail("unmerge", params, values, map, *kind)

    def label_map(
        self,
        scores: np.ndarray,
        map: np.ndarray,
        *,
        prefix: int,
        grid: tuple[int, int],
        size: tuple[int, int],
        lines: tuple[int, int] | None = None,
    ) -> np.ndarray:
        """`lines`: only those of every picture, from one up to another."""
        wide = scores.shape[2] > 255
        params = label_map_params(scores.shape, scores.dtype.name, prefix, grid, size, wide)
        return self._labels("label_map", params, scores, map, lines)

    def mask_labels(
        self, masks: np.ndarray, classes: np.ndarray, *, size: tuple[int, int], lines: tuple[int, int] | None = None
    ) -> np.ndarray:
        """`lines`: only those of every picture, from one up to another."""
        wide = classes.shape[2] > 255
        params = mask_labels_params(masks.shape, masks.dtype.name, classes.shape[2], size, wide)
        return self._labels("mask_labels", params, masks, classes, lines)

    def _labels(
        self, name: str, params: Any, values: np.ndarray, beside: np.ndarray, lines: tuple[int, int] | None
    ) -> np.ndarray:
        first, end = lines or (0, params.height)
        params.first, params.lines = first, end - first
        shape = len(values), params.lines, params.width
        return self._tail(name, params, values, beside, shape, np.int32 if params.label_type else np.uint8)

    def _tail(self, name: str, params: Any, values: np.ndarray, map: np.ndarray, shape: Any, dtype: Any) -> np.ndarray:
        out = self.memory.empty(shape, dtype)
        self.call(name, params, self.put(values), self.put(map), out)
        return self.memory.fetch(out, shape, dtype)
