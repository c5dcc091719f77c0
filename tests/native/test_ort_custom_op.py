"""The custom operators in ONNX Runtime on the CPU: equal to the NumPy definitions, in every version that is installed.

`ALGM_ORT_PYTHON` names interpreters of other environments (separated by colons) whose ONNX Runtime is tested as well;
they need onnxruntime and numpy, nothing of this project. `ALGM_ORT_LIBRARY` names a library that was built before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from kernel_cases import exact_tokens, random_tokens
from onnx import helper

from algm_deploy.ops import reference

RUN = """
import sys
import numpy as np, onnxruntime as ort
folder, library = sys.argv[1:]
options = ort.SessionOptions()
options.log_severity_level = 3
options.register_custom_ops_library(library)
session = ort.InferenceSession(f"{folder}/model.onnx", options, providers=["CPUExecutionProvider"])
feeds = dict(np.load(f"{folder}/inputs.npz"))
try:
    np.savez(f"{folder}/outputs.npz", *session.run(None, feeds))
except Exception as error:
    sys.exit(str(error))
"""
PYTHONS = [sys.executable, *filter(None, os.environ.get("ALGM_ORT_PYTHON", "").split(":"))]
PLAN = {"semantics": "code", "batch": "per_image"}


@pytest.fixture(params=PYTHONS, ids=lambda path: "here" if path == sys.executable else path.replace("/", "_"))
def run(request: pytest.FixtureRequest, ort_library: Path, tmp_path: Path) -> Any:
    def run(op: str, inputs: Mapping[str, np.ndarray], outputs: int, **attributes: Any) -> list[np.ndarray]:
        write(tmp_path, op, inputs, outputs, attributes)
        done = subprocess.run(
            [request.param, "-c", RUN, str(tmp_path), str(ort_library)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        with np.load(tmp_path / "outputs.npz") as found:
            return [found[name] for name in found.files]

    return run


def write(folder: Path, op: str, inputs: Mapping[str, np.ndarray], outputs: int, attributes: Mapping[str, Any]) -> None:
    np.savez(folder / "inputs.npz", **inputs)
    names = [f"out_{i}" for i in range(outputs)]
    node = helper.make_node(op, list(inputs), names, domain="algm", **attributes)
    kinds = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in inputs.items()}
    token = next(iter(kinds.values()))
    output_kinds = {"label_map": [onnx.TensorProto.UINT8], "sequence_starts": [onnx.TensorProto.INT32]}.get(
        op, [token, 1, 7, 7, 7, onnx.TensorProto.UINT8][:outputs]
    )
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info(n, kinds[n], [None] * x.ndim) for n, x in inputs.items()],
        [helper.make_tensor_value_info(n, k, None) for n, k in zip(names, output_kinds, strict=True)],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("algm", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "model.onnx")


def merge_inputs(tokens: np.ndarray, threshold: float) -> dict[str, np.ndarray]:
    size = np.ones(tokens.shape[:2], np.float32)
    return {"tokens": tokens, "size": size, "threshold": np.float32(threshold)}


def gbm_inputs(tokens: np.ndarray, length: Sequence[int], threshold: float) -> dict[str, np.ndarray]:
    tokens = tokens.copy()
    size = np.ones(tokens.shape[:2], np.float32)
    for image, rows in enumerate(length):
        tokens[image, rows:], size[image, rows:] = 0, 0
    map = np.stack([1 + np.arange(tokens.shape[1] - 1) % (rows - 1) for rows in length])
    return {
        "tokens": tokens,
        "size": size,
        "map": map,
        "length": np.array(length),
        "threshold": np.float32(threshold),
    }


def assert_equal(found: Sequence[np.ndarray], expected: Any) -> None:
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_clap(run: Any, dtype: Any) -> None:
    tokens = exact_tokens(np.random.default_rng(1), "few", (3, 1 + 5 * 6, 16), dtype)
    plan = {"grid": [5, 6], "window": [2, 2], "prefix": 1, "order": "published", **PLAN}
    inputs = merge_inputs(tokens, 0.3)
    found = run("clap", inputs, 4, **plan)
    assert found[0].shape[1] < tokens.shape[1], "nothing merged"
    assert_equal(found, reference.clap(*inputs.values(), **plan))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gbm(run: Any, dtype: Any) -> None:
    tokens = exact_tokens(np.random.default_rng(2), "few", (2, 30, 16), dtype)
    plan = {"prefix": 1, "mode": "fixed", "divisor": 5.0, **PLAN}
    inputs = gbm_inputs(tokens, (30, 21), 0.6)
    found = run("gbm", inputs, 4, **plan)
    assert found[0].shape[1] < tokens.shape[1], "nothing merged"
    assert_equal(found, reference.gbm(*inputs.values(), **plan))


@pytest.mark.parametrize("batch", ["per_image", "batch_min"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_padded_merges(run: Any, dtype: Any, batch: str) -> None:
    """The merge itself, zeros up to the rows that went in, and how many rows are none."""
    plan = PLAN | {"batch": batch}
    tokens = exact_tokens(np.random.default_rng(8), "few", (3, 1 + 5 * 6, 16), dtype)
    clap = {"grid": [5, 6], "window": [2, 2], "prefix": 1, "order": "raster", **plan}
    gbm = {"prefix": 1, "mode": "fixed", "divisor": 5.0, **plan}
    cases = (
        ("clap", merge_inputs(tokens, 0.3), clap, reference.clap),
        ("gbm", gbm_inputs(tokens, (31, 21, 24), 0.6), gbm, reference.gbm),
    )
    for op, inputs, attributes, definition in cases:
        expected = definition(*inputs.values(), **attributes)
        values, size, map, length, rows, _ = run(f"padded_{op}", inputs, 6, **attributes)
        assert (values.shape, size.shape) == (tokens.shape, tokens.shape[:2])
        assert rows.shape == ()
        assert int(rows) == expected[0].shape[1] < tokens.shape[1]
        assert_equal((values[:, : int(rows)], size[:, : int(rows)], map, length), expected)
        assert not values[:, int(rows) :].any()
        assert not size[:, int(rows) :].any()


def test_gbm_adaptive(run: Any) -> None:
    tokens = random_tokens(np.random.default_rng(3), (2, 40, 32), np.float32)
    plan = {"prefix": 1, "mode": "adaptive", "divisor": 2.0, **PLAN}
    inputs = gbm_inputs(tokens, (40, 40), 1.0)
    found, expected = run("gbm", inputs, 4, **plan), reference.gbm(*inputs.values(), **plan)
    assert_equal(found[1:], expected[1:])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)


def test_sequence_starts(run: Any) -> None:
    tokens = np.zeros((3, 7, 2), np.float16)
    (found,) = run("sequence_starts", {"length": np.array([5, 7, 0]), "tokens": tokens}, 1)
    assert found.tolist() == [0, 5, 7, 14, 14, 14, 21]
    assert found.dtype == np.int32


def test_unmerge(run: Any) -> None:
    rng = np.random.default_rng(4)
    values, map = rng.standard_normal((2, 7, 5)).astype(np.float32), rng.integers(1, 8, (2, 12))
    assert_equal(
        run("unmerge", {"values": values, "map": map}, 1, prefix=1), [reference.unmerge(values, map, prefix=1)]
    )


def test_label_map(run: Any) -> None:
    rng = np.random.default_rng(5)
    scores, map = rng.standard_normal((2, 9, 6)).astype(np.float32), rng.integers(0, 9, (2, 12))
    plan = {"prefix": 0, "grid": [3, 4], "size": [48, 64]}
    assert_equal(
        run("label_map", {"scores": scores, "map": map}, 1, **plan), [reference.label_map(scores, map, **plan)]
    )


def test_an_unknown_setting_is_named(run: Any) -> None:
    tokens = random_tokens(np.random.default_rng(6), (1, 5, 8), np.float32)
    plan = {"grid": [2, 2], "window": [2, 2], "prefix": 1, "semantics": "code", "batch": "together", "order": "raster"}
    with pytest.raises(RuntimeError, match=r"attribute batch has the unknown value together"):
        run("clap", merge_inputs(tokens, 0.5), 4, **plan)


def test_contradicting_shapes_are_refused(run: Any) -> None:
    tokens = random_tokens(np.random.default_rng(7), (1, 6, 8), np.float32)
    plan = {"grid": [2, 2], "window": [2, 2], "prefix": 1, "order": "raster", **PLAN}
    with pytest.raises(RuntimeError, match="deciding which windows merge"):
        run("clap", merge_inputs(tokens, 0.5), 4, **plan)


def test_other_types_are_refused(run: Any) -> None:
    map = np.zeros((1, 2), np.int64)
    with pytest.raises(RuntimeError, match=r"float16 or bfloat16"):
        run("unmerge", {"values": np.zeros((1, 2, 3), np.int32), "map": map}, 1, prefix=0)
