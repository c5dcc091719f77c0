"""ctypes calls of the kernel library, on host or device memory, with NumPy arrays going in and coming out."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

OK, INVALID_ARGUMENT, UNSUPPORTED, INVALID_MAP = range(4)
DTYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(ml_dtypes.bfloat16): 2}
ROWS_ON_DEVICE = -1
_CODES = {
    "semantics": ("code", "paper"),
    "batch_mode": ("per_image", "batch_min"),
    "order": ("published", "raster"),
    "mode": ("adaptive", "fixed"),
}


def build_kernels(source: Path, build: Path, *options: str) -> Path:
    """Configures and builds runtimes/kernels; returns the shared library. The compiler's words are the failure's."""
    for command in (["cmake", "-S", source, "-B", build, *options], ["cmake", "--build", build, "--parallel", "2"]):
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return build / "libalgm_kernels.so"


def _struct(name: str, longs: str, ints: str, doubles: str = "") -> type[ctypes.Structure]:
    fields = [(field, ctypes.c_int64) for field in longs.split()]
    fields += [(field, ctypes.c_double) for field in doubles.split()]
    fields += [(field, ctypes.c_int32) for field in ints.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


ClapParams = _struct(
    "ClapParams",
    "batch rows width grid_h grid_w window_h window_w prefix",
    "dtype semantics batch_mode order",
)
GbmParams = _struct("GbmParams", "batch rows width patches prefix", "dtype semantics batch_mode mode", "divisor")
UnmergeParams = _struct("UnmergeParams", "batch rows width patches prefix", "dtype")
LabelMapParams = _struct("LabelMapParams", "batch rows classes grid_h grid_w height width prefix", "dtype label_type")


def codes(**names: str) -> dict[str, int]:
    """The enum values of attribute names: codes(order="raster") -> {"order": 1}."""
    return {key: _CODES[key].index(name) for key, name in names.items()}


class KernelError(Exception):
    """A kernel returned a status other than 0, kept as `status`."""

    def __init__(self, status: int, text: str):
        super().__init__(f"status {status}: {text}")
        self.status = status


class HostMemory:
    """Buffers are byte arrays; outputs start poisoned and end in a guard that no kernel may touch."""

    prefix = "algm_cpu_"
    guard = 64

    def put(self, array: np.ndarray) -> Any:
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()

    def empty(self, size: int) -> Any:
        return np.full(size + self.guard, 0xFF, dtype=np.uint8)

    def pointer(self, buffer: Any) -> int:
        return int(buffer.ctypes.data)

    def fetch(self, buffer: Any) -> np.ndarray:
        return buffer


class DeviceMemory(HostMemory):
    """The same on the current CUDA device, through torch."""

    prefix = "algm_cuda_"

    def put(self, array: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(super().put(array)).cuda()

    def empty(self, size: int) -> Any:
        import torch

        return torch.full((size + self.guard,), 0xFF, dtype=torch.uint8, device="cuda")

    def pointer(self, buffer: Any) -> int:
        return int(buffer.data_ptr())

    def fetch(self, buffer: Any) -> np.ndarray:
        return buffer.cpu().numpy()


class Kernels:
    """The library's functions with memory taken care of; arrays are NumPy, attribute names as in the operators."""

    def __init__(self, library: Path, memory: HostMemory):
        self.memory = memory
        self._library = ctypes.CDLL(str(library))
        for name in ("clap_workspace", "gbm_workspace"):
            self.function(name).restype = ctypes.c_size_t
        self.function("gbm_candidates").restype = ctypes.c_int64
        self.function("status_text").restype = ctypes.c_char_p

    def function(self, name: str) -> Any:
        """The C function of this memory's kind: algm_cpu_NAME or algm_cuda_NAME."""
        return getattr(self._library, self.memory.prefix + name)

    def status_text(self, status: int) -> str:
        return self.function("status_text")(status).decode()

    def query(self, name: str, params: ctypes.Structure) -> int:
        return int(self.function(name)(ctypes.byref(params)))

    def call(self, name: str, params: ctypes.Structure, *arguments: Any) -> None:
        """Calls a kernel on the default stream; buffers become pointers, None stays null, integers int64."""
        converted = [
            ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_void_p(None if a is None else self.memory.pointer(a))
            for a in arguments
        ]
        status = self.function(name)(ctypes.byref(params), *converted, None)
        if status != OK:
            raise KernelError(status, self.status_text(status))

    def put(self, array: Any, dtype: Any = None) -> Any:
        return self.memory.put(np.asarray(array, dtype=dtype))

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self.memory.empty(int(np.prod(shape)) * np.dtype(dtype).itemsize)

    def fetch(self, buffer: Any, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """An output as an array, after a look at the guard behind it."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        content = self.memory.fetch(buffer)
        assert (content[-self.memory.guard :] == 0xFF).all(), "a kernel wrote past the end of its output"
        return content[:size].view(dtype).reshape(shape)

    # --- clap ---

    def clap_params(self, tokens: np.ndarray, **attributes: Any) -> ctypes.Structure:
        batch, rows, width = tokens.shape
        (grid_h, grid_w), (window_h, window_w) = attributes["grid"], attributes["window"]
        named = codes(semantics=attributes["semantics"], batch_mode=attributes["batch"], order=attributes["order"])
        return ClapParams(
            batch, rows, width, grid_h, grid_w, window_h, window_w, attributes["prefix"], DTYPES[tokens.dtype], **named
        )

    def clap_similarity(self, tokens: np.ndarray, **attributes: Any) -> np.ndarray:
        params = self.clap_params(tokens, **attributes)
        shape = (params.batch, (params.grid_h // params.window_h) * (params.grid_w // params.window_w))
        similarity = self.empty(shape, np.float32)
        self.call("clap_similarity", params, self.put(tokens), similarity)
        return self.fetch(similarity, shape, np.float32)

    def clap(
        self,
        tokens: np.ndarray,
        size: np.ndarray,
        threshold: float,
        *,
        given: np.ndarray | None = None,
        out_rows: int | None = None,
        **attributes: Any,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """tokens, size, map, length as the operator; `given` replaces the similarities, out_rows None means S'."""
        params = self.clap_params(tokens, **attributes)
        workspace = self.empty((self.query("clap_workspace", params),), np.uint8)
        source = [self.put(tokens)] if given is None else [self.put(given, np.float32)]
        outputs = self._decide(
            "clap_decide" if given is None else "clap_decide_given",
            params,
            [*source, self.put(threshold, np.float32)],
            params.grid_h * params.grid_w,
            workspace,
        )
        return self._apply("clap_apply", params, tokens, size, workspace, outputs, out_rows)

    # --- gbm ---

    def gbm_params(self, tokens: np.ndarray, patches: int, **attributes: Any) -> ctypes.Structure:
        batch, rows, width = tokens.shape
        named = codes(semantics=attributes["semantics"], batch_mode=attributes["batch"], mode=attributes["mode"])
        divisor = attributes.get("divisor", 1.0)
        prefix, dtype = attributes["prefix"], DTYPES[tokens.dtype]
        return GbmParams(batch, rows, width, patches, prefix, divisor=divisor, dtype=dtype, **named)

    def gbm_similarity(
        self, tokens: np.ndarray, length: np.ndarray, **attributes: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        params = self.gbm_params(tokens, 1, **attributes)
        shape = (params.batch, self.query("gbm_candidates", params))
        best, best_row = self.empty(shape, np.float32), self.empty(shape, np.int32)
        workspace = self.empty((self.query("gbm_workspace", params),), np.uint8)
        self.call("gbm_similarity", params, self.put(tokens), self.put(length), best, best_row, workspace)
        return self.fetch(best, shape, np.float32), self.fetch(best_row, shape, np.int32)

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
        **attributes: Any,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """tokens, size, map, length as the operator; `given` is (best, best_row)."""
        params = self.gbm_params(tokens, map.shape[1], **attributes)
        workspace = self.empty((self.query("gbm_workspace", params),), np.uint8)
        source = [self.put(tokens)] if given is None else [self.put(given[0]), self.put(given[1], np.int32)]
        outputs = self._decide(
            "gbm_decide" if given is None else "gbm_decide_given",
            params,
            [*source, self.put(map), self.put(length), self.put(threshold, np.float32)],
            map.shape[1],
            workspace,
        )
        return self._apply("gbm_apply", params, tokens, size, workspace, outputs, out_rows)

    def _decide(
        self, name: str, params: Any, inputs: list[Any], patches: int, workspace: Any
    ) -> tuple[np.ndarray, np.ndarray, int]:
        map_out, length_out = self.empty((params.batch, patches), np.int64), self.empty((params.batch,), np.int64)
        rows, rows_int32 = self.empty((), np.int64), self.empty((), np.int32)
        self.call(name, params, *inputs, map_out, length_out, rows, rows_int32, workspace)
        count = int(self.fetch(rows, (), np.int64))
        assert count == int(self.fetch(rows_int32, (), np.int32))
        map_array = self.fetch(map_out, (params.batch, patches), np.int64)
        return map_array, self.fetch(length_out, (params.batch,), np.int64), count

    def _apply(
        self,
        name: str,
        params: Any,
        tokens: np.ndarray,
        size: np.ndarray,
        workspace: Any,
        decided: tuple[np.ndarray, np.ndarray, int],
        out_rows: int | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        map_out, length_out, count = decided
        rows = count if out_rows in (None, ROWS_ON_DEVICE) else out_rows
        shape = (params.batch, rows, params.width)
        out_tokens, out_size = self.empty(shape, tokens.dtype), self.empty(shape[:2], np.float32)
        requested = count if out_rows is None else out_rows
        self.call(name, params, self.put(tokens), self.put(size), workspace, requested, out_tokens, out_size)
        self.fetch(workspace, (), np.uint8)  # the guard behind it
        merged = self.fetch(out_tokens, shape, tokens.dtype)
        return merged, self.fetch(out_size, shape[:2], np.float32), map_out, length_out

    # --- unmerge, label_map ---

    def unmerge(self, values: np.ndarray, map: np.ndarray, *, prefix: int) -> np.ndarray:
        batch, rows, width = values.shape
        params = UnmergeParams(batch, rows, width, map.shape[1], prefix, DTYPES[values.dtype])
        shape = (batch, map.shape[1], width)
        out = self.empty(shape, values.dtype)
        self.call("unmerge", params, self.put(values), self.put(map), out)
        return self.fetch(out, shape, values.dtype)

    def label_map(
        self, scores: np.ndarray, map: np.ndarray, *, prefix: int, grid: tuple[int, int], size: tuple[int, int]
    ) -> np.ndarray:
        batch, rows, classes = scores.shape
        dtype, code = (np.uint8, 0) if classes <= 255 else (np.int32, 1)
        params = LabelMapParams(batch, rows, classes, *grid, *size, prefix, DTYPES[scores.dtype], code)
        out = self.empty((batch, *size), dtype)
        self.call("label_map", params, self.put(scores), self.put(map), out)
        return self.fetch(out, (batch, *size), dtype)
