"""One way to call every implementation of an operator, and the inputs they are compared on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from native_build import built
from operator_inputs import KINDS, Array, ones

import algm_deploy.ops  # noqa: F401  registers torch.ops.algm
from algm_deploy.bundle.graphs import DOMAIN, VERSION
from algm_deploy.lowering.portable import add_function_bodies
from algm_deploy.ops import reference
from algm_deploy.ops.bodies import OPSET, Body
from algm_deploy.ops.native_kernels import Kernels
from algm_deploy.ops.schema import SCHEMAS, WORDS

Arrays = Sequence[Array]

_parts: dict[Hashable, ort.InferenceSession] = {}
ONNX_TYPES = {
    np.dtype(kind.numpy()): kind
    for kind in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT64, ir.DataType.BOOL)
}
# Sessions are made on the way, so a first example is slow whatever it tests.
PROPERTY = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def run_reference(op: str, inputs: Arrays, **attributes: Any) -> list[Array]:
    found = getattr(reference, op)(*inputs, **attributes)
    return list(found) if isinstance(found, tuple) else [found]


def run_torch(op: str, inputs: Arrays, **attributes: Any) -> list[Array]:
    found = getattr(torch.ops.algm, op)(*_tensors(inputs), **attributes)
    return [x.numpy() for x in (found if isinstance(found, tuple) else (found,))]


def _tensors(inputs: Arrays) -> list[torch.Tensor | None]:
    return [None if x is None else torch.from_numpy(np.array(x)) for x in inputs]


def run_onnx(op: str, inputs: Arrays, processor: bool = False, **attributes: Any) -> list[Array]:
    """The operator's body in ONNX Runtime; axes are free, so one session serves every shape."""
    key = tuple((k, tuple(v) if isinstance(v, list | tuple) else v) for k, v in attributes.items())
    kinds = tuple(None if x is None else (np.asarray(x).dtype, np.ndim(x)) for x in inputs)
    if op == "gbm" and attributes["rule"] == "budget":  # which is for one number of rows
        kinds = tuple(None if x is None else (np.asarray(x).dtype, np.shape(x)) for x in inputs)
    counted = {"label_map": 0, "mask_labels": 1}  # the input whose third axis are classes
    labels = op in counted and np.shape(inputs[counted[op]])[2] > 255
    session = _session(op, key, kinds, labels, processor)
    names = [parameter.name for parameter in SCHEMAS[op].inputs]
    feeds = {name: np.asarray(x) for name, x in zip(names, inputs, strict=False) if x is not None}
    return list(session.run(None, feeds))


def run_for_processor(op: str, inputs: Arrays, **attributes: Any) -> list[Array]:
    """The body for a runtime on a processor."""
    return run_onnx(op, inputs, processor=True, **attributes)


def run_kernels(op: str, inputs: Arrays, **attributes: Any) -> list[Array]:
    """By the kernel library on the CPU, as the torch runtime calls it on a CUDA device."""
    order = [a.name for a in getattr(torch.ops.algm, op).default._schema.arguments if a.name in attributes]
    found = getattr(_kernels(), op)(*_tensors(inputs), *(attributes[name] for name in order))
    return [x.numpy() for x in (found if isinstance(found, tuple) else (found,))]


@cache
def _kernels() -> Kernels:
    return Kernels(built("kernels"), "cpu")


IMPLEMENTATIONS: dict[str, Callable[..., list[Array]]] = {"torch": run_torch, "onnx": run_onnx}
NATIVE = ("clap", "gbm", "tome", "label_map", "deformable_attention")
FOR_PROCESSOR = ("gbm", "label_map", "tome")


def implementations(op: str) -> tuple[pytest.MarkDecorator, pytest.MarkDecorator]:
    """Marks of tests that take `run`: every way to call the operator, and every way but the reference."""
    runs = IMPLEMENTATIONS | ({"kernels": run_kernels} if op in NATIVE else {})
    runs |= {"processor": run_for_processor} if op in FOR_PROCESSOR else {}
    every = {"reference": run_reference, **runs}
    return tuple(pytest.mark.parametrize("run", some.values(), ids=some) for some in (every, runs))


def operator_model(
    op: str, attributes: Mapping[str, Any], kinds: Sequence[Any], wide_labels: bool = False, processor: bool = False
) -> ir.Model:
    """A model of one operator with its body. `kinds`: dtype and rank or shape of every input, None for one left out."""
    names = [parameter.name for parameter in SCHEMAS[op].inputs]
    inputs = [
        None if kind is None else typed(name, ONNX_TYPES[kind[0]], kind[1])
        for name, kind in zip(names, kinds, strict=False)
    ]
    types = {"tensor(int64)": ir.DataType.INT64, "tensor(float)": ir.DataType.FLOAT, "T": inputs[0].dtype}
    types["L"] = ir.DataType.INT32 if wide_labels else ir.DataType.UINT8
    present = [value for value in inputs if value is not None]
    node = ir.node(op, present, attributes, domain=DOMAIN, num_outputs=len(SCHEMAS[op].outputs))
    for value, parameter in zip(node.outputs, SCHEMAS[op].outputs, strict=True):
        value.name, value.dtype = f"{parameter.name}_out", types[parameter.type_str]
    graph = ir.Graph(present, node.outputs, nodes=[node], opset_imports={"": OPSET, DOMAIN: VERSION}, name=op)
    model = ir.Model(graph, ir_version=10)
    add_function_bodies(model, processor=processor)
    return model


def typed(name: str, dtype: ir.DataType, rank: int | tuple[int, ...]) -> ir.Value:
    shape = rank if isinstance(rank, tuple) else [f"{name}_{axis}" for axis in range(rank)]
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


@cache
def _session(
    op: str, attributes: tuple[Any, ...], kinds: tuple[Any, ...], wide_labels: bool, processor: bool
) -> ort.InferenceSession:
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in attributes}
    return open_session(operator_model(op, plain, kinds, wide_labels, processor))


def open_session(model: ir.Model) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_steps(
    key: Hashable, build: Callable[..., Sequence[ir.Value]], *inputs: Array, processor: bool = False
) -> list[Array]:
    """Runs a part of a body: `build(body, *values)` returns its results. `key` says which part, for reuse."""
    if (key := (key, processor)) not in _parts:
        values = [typed(f"x{i}", ONNX_TYPES[np.asarray(x).dtype], np.ndim(x)) for i, x in enumerate(inputs)]
        body = Body(processor=processor)
        results = build(body, *values)
        for index, value in enumerate(results):
            value.name = f"out{index}"
        graph = ir.Graph(values, results, nodes=body.nodes, opset_imports={"": OPSET}, name="steps")
        _parts[key] = open_session(ir.Model(graph, ir_version=10))
    return list(_parts[key].run(None, {f"x{i}": np.asarray(x) for i, x in enumerate(inputs)}))


def assert_same(found: Arrays, expected: Arrays, tolerance: float) -> None:
    """Integers exactly, floats within an absolute tolerance; dtypes and shapes always."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.dtype.kind in "iub":
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=0, atol=tolerance)


# ------------------------------------------------------------------------------------------------------------ inputs


seeds = st.integers(0, 2**32 - 1)
kinds = st.sampled_from(KINDS)
prefixes = st.sampled_from([0, 1, 2, 5])
semantics, batches, orders = (st.sampled_from(WORDS[name]) for name in ("semantics", "batch", "order"))
limits = st.sampled_from(["adaptive", "fixed"])
# Square, not square, one row, windows that do not divide, a single window, a single patch beside no window.
GRIDS = ((4, 4), (3, 5), (1, 7), (6, 4), (2, 2))


@st.composite
def clap_attributes(draw: st.DrawFn) -> dict[str, Any]:
    grid = draw(st.sampled_from(GRIDS))
    windows = [w for w in ((2, 2), (1, 2), (3, 2)) if w[0] <= grid[0] and w[1] <= grid[1]]
    return {
        "grid": list(grid),
        "window": list(draw(st.sampled_from(windows))),
        "prefix": draw(prefixes),
        "semantics": draw(semantics),
        "batch": draw(batches),
        "order": draw(orders),
        "rule": draw(st.sampled_from(["threshold", "budget"])),
        "budget": draw(st.integers(0, 9)),
    }


@st.composite
def gbm_attributes(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "prefix": draw(prefixes),
        "rule": draw(limits),
        "divisor": draw(st.sampled_from([1.0, 5.0])),
        "semantics": draw(semantics),
        "batch": draw(batches),
        "budget": 0,
    }


def clap_rows_in(attributes: Mapping[str, Any]) -> int:
    grid = attributes["grid"]
    return int(attributes["prefix"] + grid[0] * grid[1])


def sequence(tokens: Array, prefix: int, rng: np.random.Generator | None = None, padded: bool = False) -> list[Array]:
    """Inputs of GBM without threshold: every patch its own row, or, `padded`, images of different lengths.

    Rows behind an image's length hold values, as they do behind an MLP; patches of shorter images share rows.
    """
    images, rows, _ = tokens.shape
    size, length = ones(tokens), np.full(images, rows, np.int64)
    patch_row = np.tile(np.arange(prefix, rows), (images, 1))
    if padded and rng is not None:
        for image in range(1, images):
            length[image] = rng.integers(prefix + 1, rows + 1)
            patch_row[image] = np.sort(np.minimum(patch_row[image], length[image] - 1))
            size[image] = np.bincount(patch_row[image], minlength=rows)
            size[image, :prefix] = 1
    return [tokens, size, patch_row, length]


def assert_partition(size: Array, patch_row: Array, length: Array, prefix: int) -> None:
    """Every output row stands for a patch, sizes count them, and padding is empty."""
    images, rows = size.shape
    assert length.max() == rows
    for image in range(images):
        counts = np.bincount(patch_row[image], minlength=rows)
        assert (counts[prefix : length[image]] > 0).all()
        assert not counts[length[image] :].any()
        assert not counts[:prefix].any()
        np.testing.assert_array_equal(size[image, prefix:], counts[prefix:])
        assert (size[image, :prefix] == 1).all()
