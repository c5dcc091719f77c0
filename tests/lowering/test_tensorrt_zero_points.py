"""Centred levels: the same product, whatever the zero point was."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from algm_deploy.errors import ExportError
from algm_deploy.lowering.tensorrt_zero_points import centre_levels
from algm_deploy.ops.quantize import reference

SCALE = 0.0625  # a power of two, so that shifting rounds nothing


def product(zero_point: int, bias: bool = True) -> ModelProto:
    rng = np.random.default_rng(0)
    values = {
        "scale": np.float32(SCALE),
        "zero": np.int8(zero_point),
        "levels": rng.integers(-63, 64, (16, 8)).astype(np.int8),
        "steps": rng.uniform(0.01, 0.02, 8).astype(np.float32),
        "bias": rng.normal(size=8).astype(np.float32),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="p/QuantizeLinear"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["levels", "steps"], ["w"], axis=1),
        helper.make_node("MatMul", ["d", "w"], ["m"]),
        helper.make_node("Add", ["bias", "m"], ["y"]) if bias else helper.make_node("Identity", ["m"], ["y"]),
    ]
    shapes = {"x": 16, "y": 8}
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, k]) for n, k in shapes.items())
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()]
    graph = helper.make_graph(nodes, "product", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def run(model: ModelProto, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (y,) = ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})
    return y


@pytest.mark.parametrize("zero_point", [-120, 7])
def test_the_product_stays(zero_point: int) -> None:
    model = product(zero_point)
    low, high = (SCALE * (level - zero_point) for level in (-140, 140))  # beyond what levels reach
    x = np.random.default_rng(1).uniform(low, high, (32, 16)).astype(np.float32)
    before = run(model, x)
    assert centre_levels(model.graph) == 1
    assert not any(t.data_type == TensorProto.INT8 and numpy_helper.to_array(t).any() and t.name == "zero" and
                   any(t.name in n.input for n in model.graph.node) for t in model.graph.initializer)  # fmt: skip
    np.testing.assert_allclose(run(model, x), before, rtol=1e-4, atol=1e-4)
    assert np.abs(reference(x, SCALE, zero_point) - x).max() > SCALE  # some were clipped, at the same ends


def test_nothing_to_do() -> None:
    model = product(0)
    before = model.SerializeToString()
    assert centre_levels(model.graph) == 0
    assert model.SerializeToString() == before


def test_a_product_without_bias_is_refused() -> None:
    with pytest.raises(ExportError, match="expected one Add behind it, found Identity"):
        centre_levels(product(5, bias=False).graph)
