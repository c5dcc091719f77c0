"""Writes products of a graph in e4m3, each between the pairs of nodes that TensorRT computes in fp8.

QuantizeLinear and DequantizeLinear know e4m3 from opset 19 on, so the exported graph, of opset 18, does not hold them.
Scales and steps are powers of two, which fp16 holds as they are: nothing is rounded but the values themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor

from algm_deploy.errors import ExportError
from algm_deploy.models.quantized import QuantizedLinear

_E4M3 = helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN)


def quantise_products(graph: GraphProto, layers: Mapping[str, QuantizedLinear]) -> int:
    """Quantises both factors of these products of a graph in fp16, in place; returns how many there are.

    Raises:
        ExportError: a product that the graph does not have, or whose weight is another one.
    """
    wanted = {f"{name}/MatMul": (name, layer) for name, layer in layers.items()}
    shapes = {tensor.name: (tensor.data_type, *tensor.dims) for tensor in graph.initializer}
    nodes: list[NodeProto] = []
    for node in graph.node:
        if node.name in wanted:
            name, layer = wanted.pop(node.name)
            expected = TensorProto.FLOAT16, *layer.levels.shape
            if shapes.get(node.input[1]) != expected:
                raise ExportError(
                    f"node {node.name}: expected a weight in fp16 of shape {expected[1:]} to write in fp8, "
                    f"{node.input[1]} is another: export again"
                )
            nodes += _quantised(graph, node, name, layer)
        nodes.append(node)
    if wanted:
        raise ExportError(f"expected the node {min(wanted)} to write in fp8, the graph has none: export again")
    del graph.node[:]
    graph.node.extend(nodes)
    _drop_unread(graph)
    return len(layers)


def _quantised(graph: GraphProto, node: NodeProto, name: str, layer: QuantizedLinear) -> Iterator[NodeProto]:
    """The nodes before a product, which reads what they write."""
    numbers = numbers_of(layer)
    constants = {kind: f"{name}.{kind}" for kind in numbers}
    graph.initializer.extend(numpy_helper.from_array(array, constants[kind]) for kind, array in numbers.items())
    scale, levels = [constants["scale"], constants["zero_point"]], [constants["levels"], constants["steps"]]
    quantize, dequantize, weight = (f"{name}/{kind}" for kind in ("QuantizeLinear", "DequantizeLinear", "weight"))
    yield helper.make_node("QuantizeLinear", [node.input[0], *scale], [quantize], name=quantize)
    yield helper.make_node("DequantizeLinear", [quantize, *scale], [dequantize], name=dequantize)
    yield helper.make_node("DequantizeLinear", levels, [weight], name=weight, axis=1)
    node.input[:] = [dequantize, weight]


def numbers_of(layer: QuantizedLinear) -> dict[str, np.ndarray]:
    """Scale and steps (N) fp16, zero point and levels (K, N) e4m3, as the graph holds them."""
    return {
        "scale": _half(layer.scale),
        "zero_point": _e4m3(layer.zero_point),
        "levels": _e4m3(layer.levels),
        "steps": _half(layer.steps),
    }


def _half(numbers: Tensor) -> np.ndarray:
    return np.asarray(numbers.half().numpy())


def _e4m3(levels: Tensor) -> np.ndarray:
    return np.asarray(levels.view(torch.uint8).numpy().view(_E4M3))


def _drop_unread(graph: GraphProto) -> None:
    """Takes out constants that no node reads any more."""
    read = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)
