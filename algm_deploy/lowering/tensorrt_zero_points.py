"""Quantisers with a zero point, for TensorRT, which takes none: what they quantise is shifted beforehand.

With c = scale * zero_point, the levels of x around the zero point are those of x + c around zero. The product of x + c
is c times the sum of the weight's column too large, which the bias makes good.
"""

from __future__ import annotations

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from algm_deploy.errors import ExportError

SHIFT = ".shift"
"""What follows the name of a quantiser in that of the node which shifts what enters it, and in its constant's."""


def centre_levels(graph: GraphProto) -> int:
    """Gives every quantiser of a graph the zero point 0, in place; returns how many had another.

    Raises:
        ExportError: a quantised value that does not go into one product with a quantised weight and a bias.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    users: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    makers = {name: node for node in graph.node for name in node.output}
    nodes: list[NodeProto] = []
    shifted = 0
    for node in graph.node:
        if node.op_type == "QuantizeLinear" and numpy_helper.to_array(constants[node.input[2]]).any():
            nodes.append(_centred(graph, node, constants, users, makers))
            shifted += 1
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    return shifted


def _centred(
    graph: GraphProto,
    quantize: NodeProto,
    constants: dict[str, TensorProto],
    users: dict[str, list[NodeProto]],
    makers: dict[str, NodeProto],
) -> NodeProto:
    """The node that shifts the input of a quantiser; all that follows is changed accordingly."""
    x, scale, zero_point = quantize.input
    shift = numpy_helper.to_array(constants[scale]) * numpy_helper.to_array(constants[zero_point]).astype(np.float32)
    dequantize = _only(users, quantize.output[0], "DequantizeLinear", quantize)
    product = _only(users, dequantize.output[0], "MatMul", quantize)
    add = _only(users, product.output[0], "Add", quantize)
    levels, steps = (numpy_helper.to_array(constants[name]) for name in makers[product.input[1]].input[:2])
    place = 1 - list(add.input).index(product.output[0])
    bias = numpy_helper.to_array(constants[add.input[place]])
    sums = levels.astype(np.int64).sum(0).astype(np.float64) * steps
    name = quantize.name

    def constant(suffix: str, array: np.ndarray) -> str:
        graph.initializer.append(numpy_helper.from_array(array, name + suffix))
        return name + suffix

    add.input[place] = constant(".bias", (bias - shift * sums).astype(bias.dtype))
    zero = constant(".zero", np.array(0, np.int8))
    quantize.input[2] = dequantize.input[2] = zero
    quantize.input[0] = f"{name}.shifted"
    graph.value_info.append(helper.make_tensor_value_info(quantize.input[0], TensorProto.FLOAT, None))
    return helper.make_node("Add", [x, constant(SHIFT, shift)], [quantize.input[0]], name=name + SHIFT)


def _only(users: dict[str, list[NodeProto]], value: str, op_type: str, quantize: NodeProto) -> NodeProto:
    found = users.get(value, [])
    if [node.op_type for node in found] != [op_type]:
        raise ExportError(
            f"node {quantize.name}: expected one {op_type} behind it, found "
            f"{', '.join(node.op_type for node in found) or 'none'}: export again"
        )
    return found[0]
