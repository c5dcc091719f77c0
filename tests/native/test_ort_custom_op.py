"""The custom operators in ONNX Runtime on the CPU: equal to the NumPy definitions, in every version that is installed.

`ALGM_ORT_PYTHON` names interpreters of other environments (separated by colons) whose ONNX Runtime is tested as well;
they need onnxruntime and numpy, nothing of this project.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from kernel_arrays import Kernels
from kernel_cases import check_places, label_inputs, pick_from, places_case, random_tokens
from kernel_memory import HostMemory
from onnx import helper, numpy_helper
from operator_inputs import CLAP, GBM, assert_mask_labels, exact_tokens, mask_inputs, ones

from algm_deploy.ops import reference
from algm_deploy.ops.schema import WORDS

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


WINDOWS: dict[str, Any] = {"grid": [5, 6], "window": [2, 2], **CLAP}
FIXED = GBM | {"rule": "fixed"}


@pytest.fixture(params=PYTHONS, ids=lambda path: "here" if path == sys.executable else path.replace("/", "_"))
def run(request: pytest.FixtureRequest, ort_library: Path, tmp_path: Path) -> Any:
    def run(op: str, inputs: Sequence[np.ndarray], outputs: int, **attributes: Any) -> list[np.ndarray]:
        write(tmp_path, op, {f"in_{i}": x for i, x in enumerate(inputs)}, outputs, attributes)
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
    of_merges = [token, 1, 7, 7, 7, onnx.TensorProto.UINT8]
    labels = [onnx.TensorProto.UINT8]
    known = {"label_map": labels, "mask_labels": labels, "bias_skip_norm": [token, token]}
    output_kinds = known.get(op, of_merges[:outputs])
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info(n, kinds[n], [None] * x.ndim) for n, x in inputs.items()],
        [helper.make_tensor_value_info(n, k, None) for n, k in zip(names, output_kinds, strict=True)],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("algm", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "model.onnx")


def clap_inputs(tokens: np.ndarray, threshold: float) -> list[np.ndarray]:
    return [tokens, ones(tokens), np.asarray(threshold, np.float32)]


def gbm_inputs(tokens: np.ndarray, length: Sequence[int], threshold: float) -> list[np.ndarray]:
    tokens, size = tokens.copy(), ones(tokens)
    for image, rows in enumerate(length):
        tokens[image, rows:], size[image, rows:] = 0, 0
    map = np.stack([1 + np.arange(tokens.shape[1] - 1) % (rows - 1) for rows in length])
    return [tokens, size, map, np.array(length), np.asarray(threshold, np.float32)]


def assert_equal(found: Sequence[np.ndarray], expected: Any) -> None:
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def merges(dtype: Any) -> list[tuple[str, list[np.ndarray], dict[str, Any]]]:
    """A CLAP and a GBM of tokens with exact sums, images of different lengths."""
    tokens = exact_tokens(np.random.default_rng(8), "few", (3, 1 + 5 * 6, 16), dtype)
    return [("clap", clap_inputs(tokens, 0.3), WINDOWS), ("gbm", gbm_inputs(tokens, (31, 21, 24), 0.6), FIXED)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_merges(run: Any, dtype: Any) -> None:
    for op, inputs, attributes in merges(dtype):
        found = run(op, inputs, 4, **attributes)
        assert found[0].shape[1] < inputs[0].shape[1], "nothing merged"
        assert_equal(found, getattr(reference, op)(*inputs, **attributes))


@pytest.mark.parametrize("batch", WORDS["batch"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_padded_merges(run: Any, dtype: Any, batch: str) -> None:
    """The merge itself, zeros up to the rows that went in, and how many rows are none."""
    for op, inputs, attributes in merges(dtype):
        tokens, plan = inputs[0], attributes | {"batch": batch} | ({"order": "raster"} if op == "clap" else {})
        expected = getattr(reference, op)(*inputs, **plan)
        values, size, map, length, rows, _ = run(f"padded_{op}", inputs, 6, **plan)
        assert (values.shape, size.shape) == (tokens.shape, tokens.shape[:2])
        assert rows.shape == ()
        assert int(rows) == expected[0].shape[1] < tokens.shape[1]
        assert_equal((values[:, : int(rows)], size[:, : int(rows)], map, length), expected)
        assert not values[:, int(rows) :].any()
        assert not size[:, int(rows) :].any()


@pytest.mark.parametrize(("step", "ragged"), [(1, {"ragged": "none"}), (5, {"ragged": "none"}), (1000, {})])
def test_bucketed_merges(run: Any, step: int, ragged: dict[str, str]) -> None:
    """Each image lies in the longest one's rows rounded up to the step, no more than went in; so it does in graphs of
    before there were ragged rows."""
    for op, inputs, attributes in merges(np.float16):
        tokens = inputs[0]
        expected = getattr(reference, op)(*inputs, **attributes)
        values, size, map, length, rows, _ = run(f"bucketed_{op}", inputs, 6, **attributes, step=step, **ragged)
        assert (values.shape, size.shape) == (tokens.shape, tokens.shape[:2]), "room for all that went in"
        assert int(rows) == expected[0].shape[1] < tokens.shape[1]
        taken = min(-(-int(rows) // step) * step, tokens.shape[1])
        values, size = (x.reshape(-1)[: x.size // x.shape[1] * taken].reshape(3, taken, -1) for x in (values, size))
        assert_equal((values[:, : int(rows)], size[:, : int(rows), 0], map, length), expected)
        assert not values[:, int(rows) :].any()
        assert not size[:, int(rows) :].any()


def test_ragged_images(run: Any) -> None:
    """From CLAP to GBM and taken apart: images lie one behind the other, and give what they give apart."""
    (clap, clap_given, windows), (gbm, *_) = merges(np.float16)
    tokens, size, map, length = reference.clap(*clap_given, **windows)
    *_, expected_map, expected_length = expected = reference.gbm(tokens, size, map, length, np.float32(0.6), **FIXED)
    assert len(set(expected_length.tolist())) > 1, "images must differ in their row counts"
    values, sizes, *between, counted, _ = run(f"bucketed_{clap}", clap_given, 6, **windows, step=4, ragged="out")
    assert_equal(between, (map, length))
    assert int(counted) == length.sum()
    rows = 4 * math.ceil(math.ceil(int(counted) / 3) / 4)
    ragged = [x.reshape(-1)[: x.size // x.shape[1] * rows].reshape(3, rows, *x.shape[2:]) for x in (values, sizes)]
    given = [*ragged, map, length, np.array(0.6, np.float32)]
    values, sizes, *after, counted, _ = run(f"bucketed_{gbm}", given, 6, **FIXED, step=1, ragged="both")
    assert_equal(after, (expected_map, expected_length))
    rows = math.ceil(int(counted) / 3)
    values = values.reshape(-1)[: 3 * rows * 16].reshape(3, rows, 16)
    (found,) = run("apart", [values, expected_length], 1, first=0, count=expected[0].shape[1])
    assert_equal([found], expected[:1])
    front = np.arange(32, dtype=np.float32).reshape(2, 16)
    (reframed,) = run("reframe", [values, expected_length, front], 1, skip=1)
    (found,) = run("apart", [reframed, expected_length + 1], 1, first=2, count=expected[0].shape[1] - 1)
    assert_equal([found], [expected[0][:, 1:]])
    (found,) = run("apart", [reframed, expected_length + 1], 1, first=0, count=2)
    assert_equal([found], [np.broadcast_to(front, (3, 2, 16)).astype(np.float16)])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_attention_of_ragged_images(run: Any, dtype: Any) -> None:
    product = np.random.default_rng(7).standard_normal((2, 7, 24)).astype(dtype)
    bias, plan = np.random.default_rng(8).standard_normal(24).astype(np.float32), {"heads": 2, "scale": 0.5}
    (apart,) = run("packed_attention", [product, bias, np.array([7, 4])], 1, **plan)
    ragged = np.concatenate([product[0], product[1, :4], np.full((1, 24), np.nan, dtype)]).reshape(2, 6, 24)
    (found,) = run("ragged_attention", [ragged, bias, np.array([7, 4])], 1, **plan)
    assert_equal([found.reshape(-1, 8)], [np.concatenate([apart[0], apart[1, :4], np.zeros((1, 8), dtype)])])
    with pytest.raises(RuntimeError, match="input size 2 not in range"):
        run("ragged_attention", [ragged, bias], 1, **plan)


def test_a_step_is_a_number_of_rows(run: Any) -> None:
    op, inputs, attributes = merges(np.float32)[0]
    with pytest.raises(RuntimeError, match="attribute step should lie in 1 to"):
        run(f"bucketed_{op}", inputs, 6, **attributes, step=0, ragged="none")


def test_gbm_adaptive(run: Any) -> None:
    tokens = random_tokens(np.random.default_rng(3), (2, 40, 32), np.float32)
    plan = GBM | {"divisor": 2.0}
    inputs = gbm_inputs(tokens, (40, 40), 1.0)
    found, expected = run("gbm", inputs, 4, **plan), reference.gbm(*inputs, **plan)
    assert_equal(found[1:], expected[1:])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_attention(run: Any, dtype: Any) -> None:
    """A length more than there are rows, and none at all; and without lengths."""
    rng = np.random.default_rng(7)
    product, length = rng.standard_normal((3, 7, 24)).astype(dtype), np.array([5, 9, -2])
    bias, plan = rng.standard_normal(24).astype(np.float32), {"heads": 2, "scale": 0.5}
    # Kernel and reference each round to 16 bits once.
    tolerance = {"rtol": 0 if dtype == np.float32 else 2.0**-10, "atol": 1e-5}
    for given in ([product, bias, length], [product, bias]):
        (found,) = run("packed_attention", given, 1, **plan)
        told = given[2] if len(given) > 2 else None
        np.testing.assert_allclose(found, reference.packed_attention(product, bias, told, **plan), **tolerance)


def test_attention_refuses_lengths_of_other_images(run: Any) -> None:
    product, bias = np.zeros((3, 7, 24), np.float32), np.zeros(24, np.float32)
    with pytest.raises(RuntimeError, match="images of length should be 3, got 2"):
        run("packed_attention", [product, bias, np.array([5, 7])], 1, heads=2, scale=0.5)
    with pytest.raises(RuntimeError, match="keys and values of 5 heads, got 24"):
        run("packed_attention", [product, bias], 1, heads=5, scale=0.5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gelu(run: Any, dtype: Any) -> None:
    rng = np.random.default_rng(9)
    product, bias = rng.standard_normal((2, 3, 8)).astype(dtype), rng.standard_normal(8).astype(np.float32)
    (found,) = run("gelu", [product, bias], 1)
    tolerance = 1e-6 if dtype == np.float32 else 2.0**-10  # kernel and reference each round to 16 bits once
    np.testing.assert_allclose(found, reference.gelu(product, bias), rtol=tolerance, atol=1e-6)
    with pytest.raises(RuntimeError, match="values of bias should be 8, got 7"):
        run("gelu", [product, bias[:7]], 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_bias_skip_norm(run: Any, dtype: Any) -> None:
    rng = np.random.default_rng(9)
    product, residual = (rng.standard_normal((2, 3, 8)).astype(dtype) for _ in range(2))
    bias, weight, shift = (rng.standard_normal(8).astype(np.float32) for _ in range(3))
    inputs = [product, bias, residual, weight, shift]
    found = run("bias_skip_norm", inputs, 2, epsilon=1e-5)
    tolerance = 2e-6 if dtype == np.float32 else 2.0**-10  # kernel and reference each round to 16 bits
    for one, expected in zip(found, reference.bias_skip_norm(*inputs, epsilon=1e-5), strict=True):
        np.testing.assert_allclose(one, expected, rtol=tolerance, atol=2e-6)
    np.testing.assert_array_equal(run("bias_skip", inputs[:3], 1)[0], found[1])
    for place, said in ((1, "values of bias should be 8, got 7"), (4, "values of shift should be 8, got 7")):
        with pytest.raises(RuntimeError, match=said):
            run("bias_skip_norm", [x[:7] if i == place else x for i, x in enumerate(inputs)], 2, epsilon=1e-5)
    for name, rest, attributes in (("bias_skip_norm", [weight, shift], {"epsilon": 1e-5}), ("bias_skip", [], {})):
        with pytest.raises(RuntimeError, match=r"a dimension of residual \(product\) should be 3, got 2"):
            run(name, [product, bias, residual[:, :2], *rest], 1 + len(attributes), **attributes)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_layer_norm(run: Any, dtype: Any) -> None:
    rng = np.random.default_rng(9)
    x, weight, shift = rng.standard_normal((2, 3, 8)).astype(dtype), *rng.standard_normal((2, 8)).astype(np.float32)
    (found,) = run("layer_norm", [x, weight, shift], 1, epsilon=1e-5)
    tolerance = 2e-6 if dtype == np.float32 else 2.0**-10  # kernel and reference each round to 16 bits once
    expected = reference.layer_norm(x, weight, shift, epsilon=1e-5)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=2e-6)
    for given, said in (((weight[:7], shift), "values of weight"), ((weight, shift[:7]), "values of shift")):
        with pytest.raises(RuntimeError, match=f"{said} should be 8, got 7"):
            run("layer_norm", [x, *given], 1, epsilon=1e-5)


@pytest.mark.parametrize("behind", ["MatMul", "Concat"])
def test_bias_skip_norm_of_rows_of_unknown_number(ort_library: Path, behind: str) -> None:
    """Behind `gelu`, of which ONNX Runtime knows no shape, and behind an axis that has no name."""
    rng, rows = np.random.default_rng(9), [1, None, 8]
    product, bias, matrix = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 3, 8), 8, (8, 8)))
    values = {"bias": bias, "matrix": matrix}
    norm = helper.make_node(
        "bias_skip_norm", ["first", "bias", "x", "bias", "bias"], ["a", "b"], domain="algm", epsilon=1e-5
    )
    before = [
        helper.make_node("gelu", ["x", "bias"], ["g"], domain="algm"),
        helper.make_node("MatMul", ["g", "matrix"], ["first"]),
    ]
    if behind == "Concat":
        before = [helper.make_node("Identity", ["x"], ["first"])]
    last = (
        helper.make_node("MatMul", ["a", "matrix"], ["out"])
        if behind == "MatMul"
        else helper.make_node("Concat", ["a", "b"], ["out"], axis=1)
    )
    graph = helper.make_graph(
        [*before, norm, last],
        "g",
        [helper.make_tensor_value_info("x", 1, rows)],
        [helper.make_tensor_value_info("out", 1, None)],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("algm", 1)]
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(ort_library))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {"x": product})
    assert out.shape == ((1, 3, 8) if behind == "MatMul" else (1, 6, 8))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_patches(run: Any, dtype: Any) -> None:
    image = np.random.default_rng(2).integers(0, 256, (2, 3, 8, 12)).astype(dtype)
    plan = {"side": 4, "centre": 128.0, "scale": 1 / 128}
    assert_equal(run("patches", [image], 1, **plan), [reference.patches(image, **plan)])
    with pytest.raises(RuntimeError, match="multiples of 5, got 8 and 12"):
        run("patches", [image], 1, **plan | {"side": 5})
    with pytest.raises(RuntimeError, match="channels of image should be 3, got 1"):
        run("patches", [image[:, :1]], 1, **plan)


def test_unmerge(run: Any) -> None:
    rng = np.random.default_rng(4)
    inputs = [rng.standard_normal((2, 7, 5)).astype(np.float32), rng.integers(1, 8, (2, 12))]
    assert_equal(run("unmerge", inputs, 1, prefix=1), [reference.unmerge(*inputs, prefix=1)])


def test_label_map(run: Any) -> None:
    rng = np.random.default_rng(5)
    inputs = [rng.standard_normal((2, 9, 6)).astype(np.float32), rng.integers(0, 9, (2, 12))]
    plan = {"prefix": 0, "grid": [3, 4], "size": [48, 64]}
    assert_equal(run("label_map", inputs, 1, **plan), [reference.label_map(*inputs, **plan)])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_mask_labels(run: Any, dtype: Any) -> None:
    """More rows of cells than the part of a thread, in several pictures."""
    masks, classes = mask_inputs(np.random.default_rng(6), (3, 20, 6, 5), 30, dtype, 5.0)
    (labels,) = run("mask_labels", [masks, classes], 1, size=[75, 61])
    assert labels.dtype == np.uint8
    assert labels.shape == (3, 75, 61)
    assert_mask_labels(labels, masks, classes)


@pytest.mark.parametrize("grid", [(6, 5), (3, 4), (40, 3), (1, 1)])
def test_threads_share_lines_and_change_no_label(
    ort_library: Path, cpu_library: Path, tmp_path: Path, grid: tuple[int, int]
) -> None:
    """The labels of a session of any number of threads are, bit by bit, those of one call of the kernel."""
    rng, size, serial = np.random.default_rng(7), (75, 61), Kernels(cpu_library, HostMemory())
    masks = mask_inputs(rng, (3, 20, *grid), 30, np.float32, 5.0)
    scores, patch_map = label_inputs(rng, grid, 150, 1, np.float32, False)
    places = {"prefix": 1, "grid": grid}
    for op, inputs, attributes in (("mask_labels", masks, {}), ("label_map", (1e-6 * scores + 1, patch_map), places)):
        expected = getattr(serial, op)(*inputs, size=size, **attributes)
        feeds = {f"in_{i}": x for i, x in enumerate(inputs)}
        write(tmp_path, op, feeds, 1, {"size": size, **attributes})
        for threads in (1, 2, 3, 8):
            options = ort.SessionOptions()
            options.intra_op_num_threads = threads
            options.register_custom_ops_library(str(ort_library))
            session = ort.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
            np.testing.assert_array_equal(session.run(None, feeds)[0], expected, err_msg=f"{op}, {threads} threads")


def test_masks_of_no_picture_are_no_labels(run: Any) -> None:
    (labels,) = run(
        "mask_labels", [np.zeros((0, 3, 4, 4), np.float32), np.zeros((0, 3, 5), np.float32)], 1, size=[8, 9]
    )
    assert (labels.shape, labels.dtype) == ((0, 8, 9), np.uint8)


def test_masks_that_contradict_are_refused(run: Any) -> None:
    masks, classes = np.zeros((2, 3, 4, 4), np.float32), np.zeros((2, 3, 5), np.float32)
    for given, said in (
        ([masks, classes[:1]], "images of classes should be 2, got 1"),
        ([masks[:, :2], classes], "queries of classes should be 2, got 3"),
        ([masks, np.zeros((2, 3, 256), np.float32)], "8-bit labels hold 255 classes, got 256"),
        ([masks[0], classes], "input 0 should have 4 axes, got 3"),
        ([masks[:, :, :0], classes], "labelling pixels by masks: A size"),
    ):
        with pytest.raises(RuntimeError, match=said):
            run("mask_labels", given, 1, size=[8, 8])
    with pytest.raises(RuntimeError, match="attribute size should lie in 1 to"):
        run("mask_labels", [masks, classes], 1, size=[0, 8])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_deformable_attention(run: Any, dtype: Any) -> None:
    class Session:
        @staticmethod
        def deformable_attention(*inputs: np.ndarray, shapes: list[int]) -> np.ndarray:
            (found,) = run("deformable_attention", inputs, 1, shapes=shapes)
            assert isinstance(found, np.ndarray)
            return found

    for seed, queries in enumerate((7, 64, 150)):  # the session's threads share what is more than 64
        rng = np.random.default_rng(seed)
        check_places(Session, places_case(pick_from(rng), rng, dtype, True, [queries]), exact=True)


def test_levels_that_contradict_are_refused(run: Any) -> None:
    value, locations, shares = (
        np.zeros(shape, np.float32) for shape in ((1, 6, 1, 2), (1, 3, 1, 1, 4, 2), (1, 3, 1, 1, 4))
    )
    for shapes, said in (
        ([2, 4], r"cells of value \(shapes\) should be 8, got 6"),
        ([2, 3, 1], "rows and columns of each level, got 3 numbers"),
        ([1] * 18, "shapes should lie in 0 to 16, got 18"),
    ):
        with pytest.raises(RuntimeError, match=said):
            run("deformable_attention", [value, locations, shares], 1, shapes=shapes)


@pytest.mark.parametrize(
    ("rows", "plan", "said"),
    [
        (5, {"batch": "together"}, "attribute batch has the unknown value together"),
        (6, {}, r"rows of tokens \(prefix \+ grid\) should be 5, got 6"),
    ],
    ids=["unknown setting", "contradicting shapes"],
)
def test_refusals_have_a_reason(run: Any, rows: int, plan: dict[str, Any], said: str) -> None:
    tokens = random_tokens(np.random.default_rng(6), (1, rows, 8), np.float32)
    with pytest.raises(RuntimeError, match=said):
        run("clap", clap_inputs(tokens, 0.5), 4, **WINDOWS | {"grid": [2, 2]} | plan)


def test_other_types_are_refused(run: Any) -> None:
    map = np.zeros((1, 2), np.int64)
    with pytest.raises(RuntimeError, match=r"float16 or bfloat16"):
        run("unmerge", [np.zeros((1, 2, 3), np.int32), map], 1, prefix=0)
