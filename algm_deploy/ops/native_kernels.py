"""The operators on a CUDA device by the project's own kernels, called through their C interface.

`use_kernels` makes `torch.ops.algm.clap`, `gbm`, `tome`, `label_map` and `deformable_attention` call the kernel library
for tensors on a CUDA device, in the whole process. Without it, or without a built library, they run their bodies in
PyTorch's operators.

A merge is two calls: `decide` finds who merges and leaves a plan in a workspace, `apply` moves the rows by it. Nothing
here waits for the device but the operators themselves, which must know how many rows their result has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from algm_deploy.errors import ExecutionError
from algm_deploy.native_libraries import missing_here, require_library
from algm_deploy.ops.clap import clap, rows_left
from algm_deploy.ops.deformable_attention import check_shapes, deformable_attention
from algm_deploy.ops.gbm import gbm, most_joins
from algm_deploy.ops.kernel_library import (
    KernelLibrary,
    clap_params,
    deformable_attention_params,
    gbm_params,
    label_map_params,
)
from algm_deploy.ops.label_map import label_dtype, label_map
from algm_deploy.ops.tome import SEMANTICS, by_similarity, tome

LIBRARY = "kernels"


class Merge(NamedTuple):
    """One merge of sequences of a given shape: which kernels, and their parameters."""

    kind: str  # clap or gbm
    params: ctypes.Structure
    rows: int | None  # in the result, where the rule says it


class Decision(NamedTuple):
    """Where `decide` writes: map (B, N), length (B) and rows () int64; the plan in workspace, uint8."""

    map: Tensor
    length: Tensor
    rows: Tensor
    workspace: Tensor


def clap_merge(tokens: Tensor, *attributes: Any) -> Merge:
    """CLAP on tokens (B, S, D); attributes in the operator's order."""
    grid, window, prefix, *_, rule, budget = attributes
    rows = rows_left(grid, window, prefix, budget) if rule == "budget" else None
    return Merge("clap", clap_params(tokens.shape, _name(tokens.dtype), *attributes), rows)


def gbm_merge(tokens: Tensor, patches: int, *attributes: Any) -> Merge:
    """GBM on tokens (B, S, D) whose maps hold `patches` entries; attributes in the operator's order."""
    prefix, rule, _, semantics, _, budget = attributes
    before = tokens.shape[1]
    rows = before - min(budget, most_joins(before, prefix, semantics)) if rule == "budget" else None
    return Merge("gbm", gbm_params(tokens.shape, _name(tokens.dtype), patches, *attributes), rows)


def tome_merge(rows: Tensor, patches: int, r: int, prefix: int) -> Merge:
    """ToMe on rows (B, S, D) whose maps hold `patches` entries: GBM by a budget.

    The plan of a merge names rows and knows of no width, so that what keys decide moves tokens.
    """
    return gbm_merge(rows, patches, prefix, "budget", 1.0, SEMANTICS, "per_image", r)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Kernels:
    """The library's functions on contiguous tensors of one device, on CUDA queued on its current stream."""

    def __init__(self, path: Path, device: str = "cuda") -> None:
        self.library = KernelLibrary(path, device)
        self.query = self.library.query

    def call(self, name: str, params: ctypes.Structure, *arguments: Tensor | int | None) -> None:
        """Tensors go in as addresses, None as the null pointer, numbers as int64. On the device of the tensors."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            raise ExecutionError(f"expected all tensors of {name} on one device, got {', '.join(map(str, devices))}")
        device = devices.pop()
        assert device.type == self.library.device and all(tensor.is_contiguous() for tensor in tensors)
        converted = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
        on_cuda = device.type == "cuda"
        with torch.cuda.device(device) if on_cuda else nullcontext():
            stream = torch.cuda.current_stream().cuda_stream if on_cuda else 0
            status = self.library.call(name, params, *converted, stream=stream)
        if status:
            said = self.library.status_text(status)
            raise ExecutionError(
                f"expected the kernel {name} to run, it says {said!r}: is its GPU one it was built for?"
            )

    def decision(self, merge: Merge, tokens: Tensor, patches: int) -> Decision:
        """Uninitialised tensors beside `tokens` for a decision on them, or on fewer rows."""
        map = torch.empty(len(tokens), patches, dtype=torch.int64, device=tokens.device)
        length, rows = (torch.empty(n, dtype=torch.int64, device=tokens.device) for n in (len(tokens), 1))
        size = self.query(f"{merge.kind}_workspace", merge.params)
        workspace = torch.empty(size, dtype=torch.uint8, device=tokens.device)
        return Decision(map, length, rows, workspace)

    def decide_clap(self, merge: Merge, tokens: Tensor, threshold: Tensor | None, out: Decision) -> None:
        """`threshold` is a scalar fp32, None by the rule `budget`."""
        self.call("clap_decide", merge.params, tokens, threshold, out.map, out.length, out.rows, None, out.workspace)

    def decide_gbm(
        self, merge: Merge, tokens: Tensor, map: Tensor, length: Tensor, threshold: Tensor | None, out: Decision
    ) -> None:
        """`out` overlaps none of the inputs; `threshold` as for CLAP."""
        inputs = tokens, map, length, threshold
        self.call("gbm_decide", merge.params, *inputs, out.map, out.length, out.rows, None, out.workspace)

    def apply(self, merge: Merge, decision: Decision, tokens: Tensor, size: Tensor, out: tuple[Tensor, Tensor]) -> None:
        """Moves tokens (B, S, D) and size (B, S) to `out`, which has room for as many rows or more; the rest gets 0."""
        merged, merged_size = out
        lengths = () if merge.kind == "clap" else (None,)  # which only ragged tokens need
        inputs = tokens, size, *lengths, decision.workspace
        self.call(f"{merge.kind}_apply", merge.params, *inputs, merged.shape[1], merged, merged_size)

    def _merged(self, merge: Merge, decision: Decision, tokens: Tensor, size: Tensor) -> tuple[Tensor, ...]:
        """An operator's results; waits for the device where it must learn their number of rows."""
        rows = int(decision.rows) if merge.rows is None else merge.rows
        out = tokens.new_empty(tokens.shape[0], rows, tokens.shape[2]), size.new_empty(tokens.shape[0], rows)
        self.apply(merge, decision, tokens, size, out)
        return *out, decision.map, decision.length

    def clap(self, tokens: Tensor, size: Tensor, threshold: Tensor | None, *attributes: Any) -> tuple[Tensor, ...]:
        """As the operator."""
        tokens, size, grid = tokens.contiguous(), size.contiguous(), attributes[0]
        merge = clap_merge(tokens, *attributes)
        decision = self.decision(merge, tokens, grid[0] * grid[1])
        self.decide_clap(merge, tokens, _contiguous(threshold), decision)
        return self._merged(merge, decision, tokens, size)

    def gbm(
        self, tokens: Tensor, size: Tensor, map: Tensor, length: Tensor, threshold: Tensor | None, *attributes: Any
    ) -> tuple[Tensor, ...]:
        """As the operator."""
        tokens, size, map, length = (x.contiguous() for x in (tokens, size, map, length))
        merge = gbm_merge(tokens, map.shape[1], *attributes)
        decision = self.decision(merge, tokens, map.shape[1])
        self.decide_gbm(merge, tokens, map, length, _contiguous(threshold), decision)
        return self._merged(merge, decision, tokens, size)

    def tome(
        self, tokens: Tensor, size: Tensor, map: Tensor, keys: Tensor, r: int, prefix: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As the operator."""
        tokens, size, map, keys = (x.contiguous() for x in (tokens, size, map, keys))
        length = torch.full((len(tokens),), tokens.shape[1], device=tokens.device)
        merge = tome_merge(keys, map.shape[1], r, prefix)
        decision = self.decision(merge, keys, map.shape[1])
        values, sizes = self.merge_by_keys(tokens, size, map, length, keys, r, prefix, decision)
        if prefix:
            return values, sizes, decision.map
        return by_similarity(self._best(merge, keys, length, decision), r, values, sizes, decision.map)

    def merge_by_keys(
        self,
        tokens: Tensor,
        size: Tensor,
        map: Tensor,
        length: Tensor,
        keys: Tensor,
        r: int,
        prefix: int,
        out: Decision,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and sizes that ToMe leaves, A rows that stay ascending; their map and length go to `out`.

        `out` overlaps none of the inputs; `length` (B) int64 says that all rows exist, the rest is as of the operator.

        Raises:
            ExecutionError: there is not one key for each token, so that the plan is none for them.
        """
        if keys.shape[:2] != tokens.shape[:2]:
            raise ExecutionError(
                f"expected keys of a shape {(*tokens.shape[:2], 'width')} for tokens {(*tokens.shape,)}, got "
                f"{(*keys.shape,)}"
            )
        compared, moved = (tome_merge(rows, map.shape[1], r, prefix) for rows in (keys, tokens))
        self.decide_gbm(compared, keys, map, length, None, out)
        values, sizes, *_ = self._merged(moved, out, tokens, size)
        return values, sizes

    def _best(self, merge: Merge, tokens: Tensor, length: Tensor, decision: Decision) -> Tensor:
        """Best similarity (B, |A|) fp32 of every A row, -inf where it has none; writes over the decision's plan."""
        shape = len(tokens), self.query("gbm_candidates", merge.params)
        best, match = tokens.new_empty(shape, dtype=torch.float32), tokens.new_empty(shape, dtype=torch.int32)
        self.call("gbm_similarity", merge.params, tokens, length, best, match, decision.workspace)
        return best

    def label_map(self, scores: Tensor, map: Tensor, prefix: int, grid: Sequence[int], size: Sequence[int]) -> Tensor:
        """As the operator."""
        dtype = label_dtype(scores.shape[2])
        labels = scores.new_empty(len(scores), *size, dtype=dtype)
        params = label_map_params(scores.shape, _name(scores.dtype), prefix, grid, size, dtype == torch.int32)
        self.call("label_map", params, scores.contiguous(), map.contiguous(), labels)
        return labels

    def deformable_attention(self, value: Tensor, locations: Tensor, shares: Tensor, shapes: Sequence[int]) -> Tensor:
        """As the operator."""
        check_shapes(value.shape, locations.shape, shares.shape, shapes)
        out = value.new_empty(*shares.shape[:2], value.shape[2] * value.shape[3])
        params = deformable_attention_params(value.shape, _name(value.dtype), shares.shape, shapes)
        self.call("deformable_attention", params, *(x.contiguous() for x in (value, locations, shares)), out)
        return out


def _contiguous(threshold: Tensor | None) -> Tensor | None:
    return None if threshold is None else threshold.contiguous()


def in_use() -> bool:
    """Whether the operators call the library's kernels in this process."""
    return use_kernels.cache_info().currsize > 0 and use_kernels() is not None


@cache
def use_kernels() -> Kernels | None:
    """Loads the kernel library and makes the operators use it on CUDA devices; None without it, which one line says."""
    if not torch.cuda.is_available():
        return None
    if missing_here(LIBRARY, "torch"):
        return None
    kernels = Kernels(require_library(LIBRARY))
    for operator, kernel in (
        (clap, kernels.clap),
        (gbm, kernels.gbm),
        (tome, kernels.tome),
        (label_map, kernels.label_map),
        (deformable_attention, kernels.deformable_attention),
    ):
        operator.register_kernel("cuda", kernel)
    return kernels
