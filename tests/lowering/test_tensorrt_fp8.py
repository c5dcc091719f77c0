"""Products written in e4m3: the graph computes what the layer in PyTorch does, and other graphs are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from algm_deploy.errors import ExportError
from algm_deploy.lowering.tensorrt_fp8 import quantise_products
from algm_deploy.models.quantized import E4m3Linear

SCALE = 2.0**-5


@pytest.fixture
def layer() -> E4m3Linear:
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 8).requires_grad_(False).half()
    linear.weight[3] *= 2.0**-12  # a channel whose step is the smallest
    return E4m3Linear(linear, SCALE, 0)


def product(layer: E4m3Linear, data_type: int = TensorProto.FLOAT16) -> ModelProto:
    """The layer as graphs hold it before products are quantised, node and weight named as the exporter does."""
    dtype = helper.tensor_dtype_to_np_dtype(data_type)
    weights = {"p.weight": layer.weight.T.numpy().astype(dtype), "p.bias": layer.bias.numpy().astype(dtype)}
    nodes = [
        helper.make_node("MatMul", ["x", "p.weight"], ["m"], name="p/MatMul"),
        helper.make_node("Add", ["m", "p.bias"], ["y"], name="p/Add"),
    ]
    x, y = (helper.make_tensor_value_info(n, data_type, [None, k]) for n, k in {"x": 16, "y": 8}.items())
    constants = [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "product", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def test_the_graph_computes_what_the_layer_does(layer: E4m3Linear) -> None:
    model = product(layer)
    assert quantise_products(model.graph, {"p": layer}) == 1
    assert "p.weight" not in {tensor.name for tensor in model.graph.initializer}
    x = torch.linspace(-20, 20, 16 * 32).reshape(32, 16).half()  # 448 * SCALE is 14: the ends saturate
    (found,) = ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    expected = layer(x).numpy()
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())
    plain = (x @ layer.weight.T + layer.bias).numpy()
    assert np.abs(plain - expected).max() > 1  # the ends did


def test_a_product_that_the_graph_does_not_have(layer: E4m3Linear) -> None:
    with pytest.raises(ExportError, match="expected the node q/MatMul to write in fp8, the graph has none"):
        quantise_products(product(layer).graph, {"p": layer, "q": layer})


@pytest.mark.parametrize("other", ["type", "shape"])
def test_another_weight_is_refused(layer: E4m3Linear, other: str) -> None:
    model = product(layer, TensorProto.FLOAT if other == "type" else TensorProto.FLOAT16)
    wider = E4m3Linear(torch.nn.Linear(16, 9).requires_grad_(False), SCALE, 0)
    with pytest.raises(ExportError, match=r"node p/MatMul: expected a weight in fp16 of shape \(16, [89]\) to write"):
        quantise_products(model.graph, {"p": layer if other == "type" else wider})
