"""The operators on a CUDA device by the project's own kernels, called through their C interface.

`use_kernels` makes `torch.ops.algm.clap`, `gbm` and `label_map` call the kernel library for tensors on a CUDA device,
in the whole process. Without it, or without a built library, they run their bodies in PyTorch's operators.

A merge is two calls: `decide` finds who merges and leaves a plan in a workspace, `apply` moves the rows by it. Nothing
here waits for the device but the operators themselves, which must know how many rows their result has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from algm_deploy.errors import ExecutionError
from algm_deploy.native_libraries import find_library
from algm_deploy.ops.clap import clap
from algm_deploy.ops.gbm import gbm
from algm_deploy.ops.label_map import label_dtype, label_map

LIBRARY = "kernels"

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# Places are the enum values of runtimes/kernels/algm_kernels.h.
_SEMANTICS, _BATCH, _ORDER, _MODE = (
    ("code", "paper"),
    ("per_image", "batch_min"),
    ("published", "raster"),
    ("adaptive", "fixed"),
)


def _struct(name: str, longs: str, ints: str, doubles: str = "") -> type[ctypes.Structure]:
    fields: list[tuple[str, Any]] = [(field, ctypes.c_int64) for field in longs.split()]
    fields += [(field, ctypes.c_double) for field in doubles.split()]
    fields += [(field, ctypes.c_int32) for field in ints.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


# The parameter structs of runtimes/kernels/algm_kernels.h, field by field.
_ClapParams = _struct(
    "ClapParams", "batch rows width grid_h grid_w window_h window_w prefix", "dtype semantics batch_mode order"
)
_GbmParams = _struct("GbmParams", "batch rows width patches prefix", "dtype semantics batch_mode mode", "divisor")
_LabelMapParams = _struct("LabelMapParams", "batch rows classes grid_h grid_w height width prefix", "dtype label_type")


class Merge(NamedTuple):
    """One merge of sequences of a given shape: which kernels, and their parameters."""

    kind: str  # clap or gbm
    params: ctypes.Structure


class Decision(NamedTuple):
    """Where `decide` writes: map (B, N), length (B) and rows () int64; the plan in workspace, uint8."""

    map: Tensor
    length: Tensor
    rows: Tensor
    workspace: Tensor


def clap_merge(
    tokens: Tensor, grid: Sequence[int], window: Sequence[int], prefix: int, semantics: str, batch: str, order: str
) -> Merge:
    """CLAP on tokens (B, S, D); attributes as of the operator."""
    modes = _SEMANTICS.index(semantics), _BATCH.index(batch), _ORDER.index(order)
    return Merge("clap", _ClapParams(*tokens.shape, *grid, *window, prefix, _DTYPES[tokens.dtype], *modes))


def gbm_merge(
    tokens: Tensor, patches: int, prefix: int, mode: str, divisor: float, semantics: str, batch: str
) -> Merge:
    """GBM on tokens (B, S, D) whose maps hold `patches` entries; attributes as of the operator."""
    modes = _SEMANTICS.index(semantics), _BATCH.index(batch), _MODE.index(mode)
    return Merge("gbm", _GbmParams(*tokens.shape, patches, prefix, divisor, _DTYPES[tokens.dtype], *modes))


class Kernels:
    """The library's CUDA functions on contiguous tensors of one device, queued on its current stream."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name in ("clap_workspace", "gbm_workspace"):
            self._function(name).restype = ctypes.c_size_t
        self._function("status_text").restype = ctypes.c_char_p

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"algm_cuda_{name}")

    def _call(self, name: str, params: ctypes.Structure, *arguments: Tensor | int | None) -> None:
        """Tensors go in as pointers, None as the null pointer, numbers as int64. On the device of the tensors."""
        converted: list[Any] = []
        devices = {argument.device for argument in arguments if isinstance(argument, Tensor)}
        if len(devices) != 1:
            raise ExecutionError(f"expected all tensors of {name} on one device, got {', '.join(map(str, devices))}")
        for argument in arguments:
            if isinstance(argument, Tensor):
                assert argument.is_cuda and argument.is_contiguous()
                converted.append(ctypes.c_void_p(argument.data_ptr()))
            else:
                converted.append(ctypes.c_void_p() if argument is None else ctypes.c_int64(argument))
        with torch.cuda.device(devices.pop()):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            status = self._function(name)(ctypes.byref(params), *converted, stream)
        if status:
            said = self._function("status_text")(status).decode()
            raise ExecutionError(
                f"expected the kernel {name} to run, it says {said!r}: is its GPU one it was built for?"
            )

    def _workspace_bytes(self, merge: Merge) -> int:
        return int(self._function(f"{merge.kind}_workspace")(ctypes.byref(merge.params)))

    def decision(self, merge: Merge, tokens: Tensor, patches: int) -> Decision:
        """Uninitialised tensors beside `tokens` for a decision on them, or on fewer rows."""
        map = torch.empty(len(tokens), patches, dtype=torch.int64, device=tokens.device)
        length, rows = (torch.empty(n, dtype=torch.int64, device=tokens.device) for n in (len(tokens), 1))
        workspace = torch.empty(self._workspace_bytes(merge), dtype=torch.uint8, device=tokens.device)
        return Decision(map, length, rows, workspace)

    def decide_clap(self, merge: Merge, tokens: Tensor, threshold: Tensor, out: Decision) -> None:
        """`threshold` is a scalar fp32."""
        self._call("clap_decide", merge.params, tokens, threshold, out.map, out.length, out.rows, None, out.workspace)

    def decide_gbm(
        self, merge: Merge, tokens: Tensor, map: Tensor, length: Tensor, threshold: Tensor, out: Decision
    ) -> None:
        """`out` overlaps none of the inputs; `threshold` is a scalar fp32."""
        inputs = tokens, map, length, threshold
        self._call("gbm_decide", merge.params, *inputs, out.map, out.length, out.rows, None, out.workspace)

    def apply(self, merge: Merge, decision: Decision, tokens: Tensor, size: Tensor, out: tuple[Tensor, Tensor]) -> None:
        """Moves tokens (B, S, D) and size (B, S) to `out`, which has room for as many rows or more; the rest gets 0."""
        merged, merged_size = out
        name, rows = f"{merge.kind}_apply", merged.shape[1]
        self._call(name, merge.params, tokens, size, decision.workspace, rows, merged, merged_size)

    def merged(self, merge: Merge, decision: Decision, tokens: Tensor, size: Tensor) -> tuple[Tensor, ...]:
        """An operator's results; waits for the device to learn their number of rows."""
        rows = int(decision.rows)
        out = tokens.new_empty(tokens.shape[0], rows, tokens.shape[2]), size.new_empty(tokens.shape[0], rows)
        self.apply(merge, decision, tokens, size, out)
        return *out, decision.map, decision.length

    def label_map(self, scores: Tensor, map: Tensor, prefix: int, grid: Sequence[int], size: Sequence[int]) -> Tensor:
        """As the operator."""
        dtype = label_dtype(scores.shape[2])
        labels = scores.new_empty(len(scores), *size, dtype=dtype)
        kind = int(dtype == torch.int32)
        params = _LabelMapParams(*scores.shape, *grid, *size, prefix, _DTYPES[scores.dtype], kind)
        self._call("label_map", params, scores, map, labels)
        return labels


@cache
def use_kernels() -> Kernels | None:
    """Loads the kernel library and makes the operators use it on CUDA devices; None where it is not built."""
    path = find_library(LIBRARY)
    if path is None or not torch.cuda.is_available():
        return None
    kernels = Kernels(path)

    @clap.register_kernel("cuda")
    def _(
        tokens: Tensor,
        size: Tensor,
        threshold: Tensor,
        grid: list[int],
        window: list[int],
        prefix: int,
        semantics: str,
        batch: str,
        order: str,
    ) -> tuple[Tensor, ...]:
        tokens, size = tokens.contiguous(), size.contiguous()
        merge = clap_merge(tokens, grid, window, prefix, semantics, batch, order)
        decision = kernels.decision(merge, tokens, grid[0] * grid[1])
        kernels.decide_clap(merge, tokens, threshold.contiguous(), decision)
        return kernels.merged(merge, decision, tokens, size)

    @gbm.register_kernel("cuda")
    def _(
        tokens: Tensor,
        size: Tensor,
        map: Tensor,
        length: Tensor,
        threshold: Tensor,
        prefix: int,
        mode: str,
        divisor: float,
        semantics: str,
        batch: str,
    ) -> tuple[Tensor, ...]:
        tokens, size, map, length = (x.contiguous() for x in (tokens, size, map, length))
        merge = gbm_merge(tokens, map.shape[1], prefix, mode, divisor, semantics, batch)
        decision = kernels.decision(merge, tokens, map.shape[1])
        kernels.decide_gbm(merge, tokens, map, length, threshold.contiguous(), decision)
        return kernels.merged(merge, decision, tokens, size)

    @label_map.register_kernel("cuda")
    def _(scores: Tensor, map: Tensor, prefix: int, grid: list[int], size: list[int]) -> Tensor:
        return kernels.label_map(scores.contiguous(), map.contiguous(), prefix, grid, size)

    return kernels
