"""Python side of trt_harness.cpp: a plugin from a real TensorRT registry, with arrays for tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from kernel_memory import DeviceMemory, HostMemory

NAMESPACE = "algm_deploy"
BUILD, RUNTIME = 0, 1  # TensorRTPhase
FLOAT32_FIELD, INT32_FIELD = 1, 5  # PluginFieldType
LINEAR = 0  # TensorFormat
TYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "bool": 4, "uint8": 5, "bfloat16": 7, "int64": 8}
NAMES = {number: name for name, number in TYPES.items()}
SIZE_TENSOR = -1000

# Name -> attributes as the plugins take them, inputs (type T stands for the tokens' type) and outputs.
PLUGINS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "clap": (
        {
            "grid": (4, 6),
            "window": (2, 2),
            "prefix": 1,
            "semantics": 0,
            "batch": 0,
            "order": 0,
            "rule": 0,
            "budget": 0,
            "usual_rows": 9,
        },
        ["T", "float32", "float32"],
        ["T", "float32", "int64", "int64", "int32"],
    ),
    "gbm": (
        {"prefix": 1, "rule": 1, "divisor": 2.5, "semantics": 0, "batch": 0, "budget": 0, "usual_rows": 9},
        ["T", "float32", "int64", "int64", "float32"],
        ["T", "float32", "int64", "int64", "int32"],
    ),
    "unmerge": ({"prefix": 1}, ["T", "int64"], ["T"]),
    "label_map": ({"prefix": 1, "grid": (4, 6), "size": (64, 96)}, ["T", "int64"], ["int32"]),
    "deformable_attention": ({"shapes": (4, 6, 2, 3)}, ["T", "float32", "float32"], ["T"]),
}
SHAPES = {
    "clap": ([(2, 25, 8), (2, 25), ()], [(2, SIZE_TENSOR - 4, 8), (2, SIZE_TENSOR - 4), (2, 24), (2,), ()]),
    "gbm": (
        [(2, 20, 8), (2, 20), (2, 24), (2,), ()],
        [(2, SIZE_TENSOR - 4, 8), (2, SIZE_TENSOR - 4), (2, 24), (2,), ()],
    ),
    "unmerge": ([(2, 19, 5), (2, 24)], [(2, 24, 5)]),
    "label_map": ([(2, 19, 5), (2, 24)], [(2, 64, 96)]),
    "deformable_attention": ([(2, 30, 3, 8), (2, 7, 3, 2, 4, 2), (2, 7, 3, 2, 4)], [(2, 7, 24)]),
}


class Tensor(ctypes.Structure):
    """A tensor's description and place."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 8),
        ("data", ctypes.c_void_p),
    )


class Field(ctypes.Structure):
    """A plugin field."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
        ("data", ctypes.c_void_p),
    )


def tensor(shape: Sequence[int], kind: str, data: int | None = None) -> Tensor:
    return Tensor(TYPES[kind], len(shape), (ctypes.c_int64 * 8)(*shape), data)


def array_of(structure: type[Any], values: Sequence[Any]) -> Any:
    return (structure * len(values))(*values)


class Harness:
    """One runtime library with our plugin library loaded into its registry."""

    def __init__(self, harness: Path, runtime: Path, plugins: Path) -> None:
        self.library = ctypes.CDLL(str(harness))
        for name in ("create", "clone", "attach"):
            getattr(self.library, f"harness_{name}").restype = ctypes.c_void_p
        self.library.harness_workspace.restype = ctypes.c_int64
        assert self.call("open", str(runtime).encode()) == 1, f"{runtime} has no registry"
        assert self.call("load", str(plugins).encode()) == 1, "the registry refused the plugin library"

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self.library, f"harness_{name}")(*arguments)

    def create(
        self, name: str, attributes: Mapping[str, Any], phase: int = BUILD, namespace: str = NAMESPACE
    ) -> Plugin | None:
        values = {key: np.atleast_1d(np.asarray(value)) for key, value in attributes.items()}
        values = {k: v.astype(np.float32 if v.dtype.kind == "f" else np.int32) for k, v in values.items()}
        fields = [
            Field(key.encode(), FLOAT32_FIELD if v.dtype.kind == "f" else INT32_FIELD, len(v), v.ctypes.data)
            for key, v in values.items()
        ]
        made = self.call("create", name.encode(), namespace.encode(), array_of(Field, fields), len(fields), phase)
        return Plugin(self, name, made) if made else None


class Plugin:
    """A plugin object; `destroy` ends it."""

    def __init__(self, harness: Harness, name: str, address: int) -> None:
        self.harness, self.name, self.address = harness, name, ctypes.c_void_p(address)

    def call(self, name: str, *arguments: Any) -> Any:
        return self.harness.call(name, self.address, *arguments)

    def clone(self) -> Plugin:
        return Plugin(self.harness, self.name, self.call("clone"))

    def attach(self) -> Plugin:
        return Plugin(self.harness, self.name, self.call("attach"))

    def destroy(self) -> None:
        self.call("destroy")

    def fields(self) -> dict[str, tuple[int, ...] | tuple[float, ...]]:
        """Serialized fields by name."""
        found = (Field * 16)()
        count = self.call("fields", found, 16)
        return {f.name.decode(): self._values(f) for f in found[:count]}

    def field_addresses(self) -> list[int]:
        found = (Field * 16)()
        return [f.data for f in found[: self.call("fields", found, 16)]]

    @staticmethod
    def _values(field: Field) -> tuple[Any, ...]:
        kind = {FLOAT32_FIELD: ctypes.c_float, INT32_FIELD: ctypes.c_int32}[field.type]
        return tuple((kind * field.length).from_address(field.data))

    def output_types(self, inputs: Sequence[str]) -> list[str] | None:
        """Types of the outputs, None where the plugin refuses the inputs."""
        outputs = (ctypes.c_int32 * len(PLUGINS[self.name][2]))()
        codes = array_of(ctypes.c_int32, [TYPES[kind] for kind in inputs])
        refused = self.call("types", codes, len(inputs), outputs, len(outputs))
        return None if refused else [NAMES[code] for code in outputs]

    def accepts(self, types: Sequence[str], layout: int = LINEAR) -> list[bool]:
        """What the plugin says to each input and output when all have these types and this layout."""
        inputs = len(PLUGINS[self.name][1])
        codes = array_of(ctypes.c_int32, [TYPES[kind] for kind in types])
        return [bool(self.call("accepts", i, codes, inputs, len(types) - inputs, layout)) for i in range(len(types))]

    def output_shapes(self, inputs: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], tuple[int, int]] | None:
        """Shapes of the outputs, and optimum and upper bound of the size tensor; None where the plugin refuses."""
        outputs = (Tensor * len(PLUGINS[self.name][2]))()
        size = (ctypes.c_int64 * 2)()
        described = array_of(Tensor, [tensor(shape, "float32") for shape in inputs])
        if self.call("shapes", described, len(inputs), outputs, len(outputs), size):
            return None
        return [tuple(t.dims[: t.rank]) for t in outputs], (size[0], size[1])

    def workspace(self, inputs: Sequence[Tensor]) -> int:
        """Bytes of scratch memory for inputs up to these, -1 where the plugin refuses them."""
        return int(self.call("workspace", array_of(Tensor, inputs), len(inputs), len(PLUGINS[self.name][2])))

    def enqueue(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], workspace: int, stream: int) -> int:
        """Runs the plugin on device memory; 0 for success."""
        return int(
            self.call(
                "enqueue",
                array_of(Tensor, inputs),
                len(inputs),
                array_of(Tensor, outputs),
                len(outputs),
                ctypes.c_void_p(workspace),
                ctypes.c_void_p(stream),
            )
        )


class PluginKernels:
    """The operators through the plugins' enqueue, with the interface of `Kernels`.

    Works on the current CUDA device, or in host memory with a library of the plugins over the CPU kernels. Outputs are
    as large as TensorRT allocates them, for the upper bound of the row count; what lies behind the rows that the plugin
    counted must stay untouched.
    """

    def __init__(self, harness: Harness, memory: HostMemory) -> None:
        self.harness, self.memory = harness, memory

    def clap(self, *inputs: Any, out_rows: int | None = None, **attributes: Any) -> tuple[np.ndarray, ...]:
        """tokens, size, map, length as the operator. The row count always comes from the device."""
        return self._merge("clap", inputs, int(np.prod(attributes["grid"])), attributes)

    def gbm(self, *inputs: Any, out_rows: int | None = None, **attributes: Any) -> tuple[np.ndarray, ...]:
        """As `clap`."""
        return self._merge("gbm", inputs, inputs[2].shape[1], attributes)

    def unmerge(self, values: np.ndarray, map: np.ndarray, *, prefix: int) -> np.ndarray:
        """values (B, N, C)."""
        kind = (values.shape[0], map.shape[1], values.shape[2]), values.dtype
        (out,) = self._run("unmerge", [values, map], [kind], {"prefix": prefix})
        return self.memory.fetch(out, *kind)

    def label_map(self, scores: np.ndarray, map: np.ndarray, **attributes: Any) -> np.ndarray:
        """labels (B, H, W), cast to uint8 where the graph does."""
        kind = (scores.shape[0], *attributes["size"]), np.int32
        (out,) = self._run("label_map", [scores, map], [kind], attributes)
        return self.memory.fetch(out, *kind).astype(np.uint8 if scores.shape[2] <= 255 else np.int32)

    def deformable_attention(
        self, value: np.ndarray, locations: np.ndarray, shares: np.ndarray, **attributes: Any
    ) -> Any:
        """out (B, Q, H * D)."""
        kind = (*shares.shape[:2], value.shape[2] * value.shape[3]), value.dtype
        (out,) = self._run("deformable_attention", [value, locations, shares], [kind], attributes)
        return self.memory.fetch(out, *kind)

    def _merge(
        self, name: str, inputs: Sequence[Any], patches: int, attributes: dict[str, Any]
    ) -> tuple[np.ndarray, ...]:
        *tensors, threshold = inputs
        tokens = tensors[0]
        images, upper, width = tokens.shape
        tail = [((images, patches), np.int64), ((images,), np.int64), ((), np.int32)]

        def outputs(rows: int) -> list[Any]:
            return [((images, rows, width), tokens.dtype), ((images, rows), np.float32), *tail]

        buffers = self._run(
            name, [*tensors, np.float32(threshold)], outputs(upper), numbers(attributes) | {"usual_rows": 0}
        )
        rows = int(self.memory.fetch(buffers[4], *tail[2]))
        kinds = outputs(rows)[:4]
        return tuple(self.memory.fetch(buffer, *kind) for buffer, kind in zip(buffers, kinds, strict=False))

    def _run(
        self, name: str, inputs: list[Any], outputs: list[tuple[tuple[int, ...], Any]], attributes: dict[str, Any]
    ) -> list[Any]:
        memory, plugin = self.memory, self.harness.create(name, attributes)
        assert plugin, name
        arrays = [np.asarray(value) for value in inputs]
        held = [memory.put(array) for array in arrays]
        given = [tensor(a.shape, a.dtype.name, memory.pointer(b)) for a, b in zip(arrays, held, strict=True)]
        made = [memory.empty(*kind) for kind in outputs]
        wanted = [
            tensor(shape, np.dtype(kind).name, memory.pointer(b))
            for (shape, kind), b in zip(outputs, made, strict=True)
        ]
        scratch = memory.empty((plugin.workspace(given),), np.uint8)
        with stream_of(memory) as stream:
            assert plugin.enqueue(given, wanted, memory.pointer(scratch), stream) == 0, name
        plugin.destroy()
        return made


@contextmanager
def stream_of(memory: HostMemory) -> Iterator[int]:
    """A stream that is not the default one, behind the inputs' copies and done at the end; 0 for host memory."""
    if not isinstance(memory, DeviceMemory):
        yield 0
        return
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    yield stream.cuda_stream
    stream.synchronize()


def numbers(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes with words as numbers."""
    from algm_deploy.ops.schema import WORDS  # loads torch, which the checks without kernels do not need

    return {name: WORDS[name].index(value) if name in WORDS else value for name, value in attributes.items()}
