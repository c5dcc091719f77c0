"""Patterns of the portable graph that several lowerings look for, and how new nodes take the place of old ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from algm_deploy.bundle.graphs import DOMAIN
from algm_deploy.lowering.portable import operator_of
from algm_deploy.ops.patches import CHANNELS

CONTRIB = "com.microsoft"  # the domain of ONNX Runtime's own operators


class Linear(NamedTuple):
    """x @ weight + bias; `product` is the value before the bias."""

    x: ir.Value
    weight: ir.Value
    bias: ir.Value
    product: ir.Value


def linear_of(value: ir.Value | None) -> Linear | None:
    """The linear layer that computes `value`, if one does."""
    add = value.producer() if value is not None else None
    if add is None or add.op_type != "Add":
        return None
    for product, bias in (pair(add), pair(add)[::-1]):
        matmul = product.producer()
        if matmul is None or matmul.op_type != "MatMul" or not is_constant(bias):
            continue
        x, weight = pair(matmul)
        if is_constant(weight) or is_quantized(weight):
            return Linear(x, weight, bias, product)
    return None


def pair(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The inputs of a node that has two."""
    first, second = node.inputs
    assert first is not None and second is not None
    return first, second


def is_constant(value: ir.Value | None) -> bool:
    """Whether a value is an initializer."""
    return value is not None and value.is_initializer()


def is_quantized(weight: ir.Value) -> bool:
    """Whether a weight is what integers in the graph stand for."""
    node = weight.producer()
    return node is not None and node.op_type == "DequantizeLinear" and is_constant(node.inputs[0])


def number(value: ir.Value | None) -> float | None:
    """A scalar constant's number."""
    tensor = value.const_value if value is not None else None
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


def other(node: ir.Node, value: ir.Value) -> ir.Value:
    """The other input of a commutative node."""
    first, second = pair(node)
    return second if first is value else first


def only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """The node that uses `value`, if it is the only one and of this type."""
    users = list(value.uses())
    return users[0].node if len(users) == 1 and users[0].node.op_type == op_type else None


def nodes_of(graph: ir.Graph, op_type: str, domain: str = "") -> Iterator[ir.Node]:
    """Nodes of one operator, collected first so that the graph may change meanwhile."""
    for node in list(graph):
        found = operator_of(node.op_type) if node.domain == DOMAIN else node.op_type
        if (node.domain, found) == (domain, op_type):
            yield node


def stand_in(old: ir.Value, new: ir.Value) -> None:
    """Lets `new` take the name, type and users of `old`."""
    new.name, new.shape, new.type = old.name, old.shape, old.type
    old.name = f"{old.name}_replaced"
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def replace(graph: ir.Graph, old: ir.Node, new: ir.Node) -> None:
    """Puts a node in the place of another; its first output stands in for the other's."""
    graph.insert_before(old, new)
    stand_in(old.outputs[0], new.outputs[0])
    graph.remove(old, safe=True)


class Chain:
    """Inserts nodes before another, each with a name of its own under `name`."""

    def __init__(self, graph: ir.Graph, before: ir.Node, name: str | None) -> None:
        self._graph, self._before, self._name = graph, before, name
        self._count = 0

    def __call__(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """The first output of a new node."""
        node = ir.node(op_type, inputs, attributes, domain=domain, name=f"{self._name}/{op_type}_{self._count}")
        node.outputs[0].name = f"{self._name}/value_{self._count}"
        self._count += 1
        self._graph.insert_before(self._before, node)
        return node.outputs[0]

    def constant(self, array: np.ndarray) -> ir.Value:
        """A new initializer."""
        name = f"{self._name}/constant_{self._count}"
        self._count += 1
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self._graph.initializers[name] = value
        return value

    def shape(self, sizes: list[int]) -> ir.Value:
        """A shape for Reshape; 0 keeps an axis."""
        return self.constant(np.array(sizes, np.int64))


def fp32(graph: ir.Graph, before: ir.Node, *parameters: ir.Value | None) -> list[ir.Value]:
    """Parameters as the library takes them; the session turns them once."""
    add = Chain(graph, before, str(before.name))
    return [add("Cast", value, to=ir.DataType.FLOAT) for value in parameters if value is not None]


def fits_rows(values: ir.Value) -> bool:
    """Whether what the library computes of rows is for these: (B, S, D) in 16 bits."""
    return values.shape is not None and len(values.shape) == 3 and values.dtype == ir.DataType.FLOAT16


def patch_embedding(graph: ir.Graph, own: bool, counts: Counter[str]) -> None:
    """Conv with stride = kernel, Reshape, Transpose: cuDNN's convolution took a sixth of the time of Segmenter-S, and
    OpenVINO turns the image's axes for its own. `own`: the library's operator where it is faster.

    The weight is turned when the session is made, so it stays in the shared data file as it is.
    """
    for conv in nodes_of(graph, "Conv"):
        flat = only_user(conv.outputs[0], "Reshape")
        tokens = only_user(flat.outputs[0], "Transpose") if flat else None
        image, weight = conv.inputs[:2]
        if tokens is None or image is None or weight is None or weight.shape is None or image.shape is None:
            continue
        dim, channels, *kernel = weight.shape.numpy()
        pads = np.array(conv.attributes["pads"].as_ints() if "pads" in conv.attributes else [0] * 4)
        sides = [side for side in list(image.shape)[2:] if isinstance(side, int)] + pads[:2] + pads[2:]
        grid = [int(side) // k for side, k in zip(sides, kernel, strict=True)]
        if list(conv.attributes["strides"].as_ints()) != kernel or tokens.attributes["perm"].as_ints() != (0, 2, 1):
            continue
        add = Chain(graph, tokens, conv.name)
        if pads.any():
            image = add("Pad", image, add.constant(np.insert(pads, (0, 0, 2, 2), 0)))
        if own and _fits_patches(weight):
            image, centre, scale = _centred(image)
            patches = add("patches", image, domain=DOMAIN, side=int(kernel[0]), centre=centre, scale=scale)
        else:
            patches = add("Reshape", image, add.shape([0, channels, grid[0], kernel[0], grid[1], kernel[1]]))
            patches = add("Transpose", patches, perm=[0, 2, 4, 1, 3, 5])
            patches = add("Reshape", patches, add.shape([0, grid[0] * grid[1], channels * kernel[0] * kernel[1]]))
        matrix = add("Transpose", add("Reshape", weight, add.shape([dim, -1])), perm=[1, 0])
        matrix.type = weight.type
        values = add("MatMul", patches, matrix)
        if len(conv.inputs) > 2 and conv.inputs[2] is not None:
            values = add("Add", values, conv.inputs[2])
        stand_in(tokens.outputs[0], values)
        counts["patch_embedding"] += 1


def _fits_patches(weight: ir.Value) -> bool:
    """Whether the library's operator is for it: three channels of square patches, in fp16."""
    assert weight.shape is not None
    _, channels, height, width = weight.shape
    return channels == CHANNELS and height == width and weight.dtype == ir.DataType.FLOAT16


def _centred(image: ir.Value) -> tuple[ir.Value, float, float]:
    """What (pixel - centre) * scale is computed from, centre and scale; the image itself where it is something else."""
    product = image.producer()
    difference = pair(product)[0].producer() if product is not None and product.op_type == "Mul" else None
    if product is None or difference is None or difference.op_type != "Sub":
        return image, 0.0, 1.0
    scale, centre = number(pair(product)[1]), number(pair(difference)[1])
    if scale is None or centre is None:
        return image, 0.0, 1.0
    return pair(difference)[0], centre, scale
