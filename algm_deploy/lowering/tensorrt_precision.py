"""Gives an fp32 graph a lower precision by explicit types, as strongly typed TensorRT wants it.

TensorRT 11 and RTX know no precision flags: every tensor has the type that the graph says. Tokens and weights become
fp16 or bf16; what decides or accumulates stays fp32: sizes, thresholds, norms and reductions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.defs import OpSchema

from algm_deploy.errors import ExportError
from algm_deploy.lowering.portable import operator_of
from algm_deploy.ops.schema import SCHEMAS
from algm_deploy.recipe.schema import Precision

ONNX_TYPE: dict[Precision, int] = {
    "fp32": TensorProto.FLOAT,
    "int8": TensorProto.FLOAT,  # of everything around the products that the graph quantises itself
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "fp8": TensorProto.FLOAT16,  # around the products that `tensorrt_fp8` quantises
}
# Sums of squares leave the range of fp16 at a few hundred channels, and a softmax loses its tail in bf16. Expand and
# ConstantOfShape build the initial token sizes, which are never 16-bit.
_FLOAT32_OPS = frozenset(
    {"ReduceL1", "ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare", "Pow", "Sqrt", "Reciprocal", "Softmax"}
    | {"LogSoftmax", "Expand", "ConstantOfShape", "Range"}
)
# These stay fp32 behind a value that is fp32: the smallest norm that a division accepts (1e-12) is zero in fp16.
_FOLLOW_FLOAT32 = frozenset({"Clip", "Div", "Max"})
# What an operator reads in fp32 is no better than the arithmetic before it: a place of deformable attention, off by a
# rounding of bf16, is another one. Nodes of these kinds before such an input compute in fp32 too.
_EXACT_INPUTS = {"deformable_attention": (1,)}
_EXACT_OPS = frozenset({"Add", "Sub", "Mul", "Div", "Reshape"})


@dataclass
class _Retyped:
    """The graph being written: per fp32 tensor of the base graph, its versions by type."""

    low: int
    is_float: set[str]
    initializers: dict[str, TensorProto]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, TensorProto] = field(default_factory=dict)
    versions: dict[str, dict[int, str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    exact: set[str] = field(default_factory=set)

    def read(self, name: str, wanted: int) -> str:
        """Name of the version of `name` with type `wanted`; casts where there is none yet."""
        if name not in self.is_float:
            if name in self.initializers:
                self.weights[name] = self.initializers[name]
            return name
        versions = self.versions.setdefault(name, {})
        if wanted not in versions:
            if name in self.initializers:
                versions[wanted] = self._weight(name, wanted)
            else:
                source = next(iter(versions.values()))
                versions[wanted] = self._name(name, wanted)
                self.nodes.append(helper.make_node("Cast", [source], [versions[wanted]], to=wanted))
                self.counts["cast"] += 1
        return versions[wanted]

    def write(self, name: str, given: int) -> str:
        """Name under which a node writes `name` with type `given`."""
        if name not in self.is_float:
            return name
        self.versions[name] = {given: self._name(name, given)}
        return self.versions[name][given]

    def _weight(self, name: str, wanted: int) -> str:
        new = self._name(name, wanted)
        self.weights[new] = _retype_tensor(self.initializers[name], wanted, new)
        self.counts["weight"] += wanted != TensorProto.FLOAT
        return new

    @staticmethod
    def _name(name: str, data_type: int) -> str:
        """The fp32 version keeps the name, so that graph inputs and outputs keep theirs."""
        return name if data_type == TensorProto.FLOAT else f"{name}_{TensorProto.DataType.Name(data_type).lower()}"


def retype(model: onnx.ModelProto, precision: Precision) -> tuple[onnx.ModelProto, Counter[str]]:
    """The graph with tokens and weights in `precision`, fp32 graph inputs and outputs unchanged.

    Args:
        model: fp32 graph, weights loaded, with type information for every tensor (the exporter writes it).
        precision: a model that has this precision already is returned as it is.

    Returns:
        New model, and counts of casts inserted (`cast`) and weights converted (`weight`).

    Raises:
        ExportError: the graph holds tensors of another 16-bit type, or a tensor's type is unknown.
    """
    graph, low = model.graph, ONNX_TYPE[precision]
    types = _types(graph)
    present = {kind for kind in types.values() if kind in (TensorProto.FLOAT16, TensorProto.BFLOAT16)}
    if present - {low}:
        found = ", ".join(TensorProto.DataType.Name(kind).lower() for kind in sorted(present))
        raise ExportError(f"expected an fp32 graph to write in {precision}, it holds {found} tensors: export in fp32")
    if present or low == TensorProto.FLOAT:
        return model, Counter()
    is_float = {name for name, kind in types.items() if kind == TensorProto.FLOAT}
    out = _Retyped(low, is_float, {t.name: t for t in graph.initializer})
    out.exact = _exact_tensors(graph)
    for value in graph.input:
        if value.name in out.is_float:
            out.versions[value.name] = {TensorProto.FLOAT: value.name}
    for node in graph.node:
        _retype_node(node, out)
    for value in graph.output:
        out.read(value.name, TensorProto.FLOAT)
    return _rebuilt(model, out), out.counts


def _types(graph: onnx.GraphProto) -> dict[str, int]:
    """Element type of every tensor."""
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
    types |= {t.name: t.data_type for t in graph.initializer}
    unknown = [name for node in graph.node for name in node.output if name and not types.get(name)]
    if unknown:
        raise ExportError(f"expected the exporter's type for every tensor, {unknown[0]} has none: export again")
    return types


def _retype_node(node: onnx.NodeProto, out: _Retyped) -> None:
    new = onnx.NodeProto()
    new.CopyFrom(node)
    compute = _compute_type(node, out)
    schema = SCHEMAS.get(operator_of(node.op_type))
    kept_in, kept_out = (_float32(schema.inputs), _float32(schema.outputs)) if schema else ((), ())
    for i, name in enumerate(node.input):
        if name:
            new.input[i] = out.read(name, TensorProto.FLOAT if i in kept_in else compute)
    for i, name in enumerate(node.output):
        if name:
            new.output[i] = out.write(name, TensorProto.FLOAT if i in kept_out else compute)
    _retype_attributes(new, node, compute, out)
    out.nodes.append(new)


def _float32(parameters: Sequence[OpSchema.FormalParameter]) -> tuple[int, ...]:
    """Places of an operator's inputs or outputs that are fp32 whatever the tokens are."""
    return tuple(i for i, parameter in enumerate(parameters) if parameter.type_str == "tensor(float)")


def _compute_type(node: onnx.NodeProto, out: _Retyped) -> int:
    values = [out.versions.get(name, {}) for name in node.input if name not in out.initializers]
    follows = node.op_type in _FOLLOW_FLOAT32 and any(set(versions) == {TensorProto.FLOAT} for versions in values)
    exact = node.output[0] in out.exact
    return TensorProto.FLOAT if node.op_type in _FLOAT32_OPS or follows or exact else out.low


def _exact_tensors(graph: onnx.GraphProto) -> set[str]:
    """Outputs of the nodes of `_EXACT_OPS` that lead to an input of `_EXACT_INPUTS`."""
    exact: set[str] = set()
    wanted: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type in _EXACT_OPS and node.output[0] in wanted:
            exact.add(node.output[0])
            wanted.update(node.input)
        wanted.update(node.input[i] for i in _EXACT_INPUTS.get(operator_of(node.op_type), ()))
    return exact


def _retype_attributes(new: onnx.NodeProto, node: onnx.NodeProto, compute: int, out: _Retyped) -> None:
    if node.output[0] not in out.is_float:
        return
    for attribute in new.attribute:
        if node.op_type == "Cast" and attribute.name == "to":
            attribute.i = compute
        elif node.op_type == "Constant" and attribute.name == "value_float":
            attribute.CopyFrom(helper.make_attribute("value", _scalar(attribute.f, compute)))
        elif attribute.name == "value" and attribute.t.data_type == TensorProto.FLOAT:
            attribute.t.CopyFrom(_retype_tensor(attribute.t, compute, attribute.t.name))


def _scalar(value: float, data_type: int) -> TensorProto:
    return helper.make_tensor("", data_type, (), [value])


def _retype_tensor(tensor: TensorProto, wanted: int, name: str) -> TensorProto:
    """The tensor in another floating type, rounded to nearest even."""
    values = numpy_helper.to_array(tensor)
    with np.errstate(over="ignore"):
        rounded = values.astype(helper.tensor_dtype_to_np_dtype(wanted))
    if np.isinf(rounded).any() and np.isfinite(values).all():
        raise ExportError(
            f"expected weights within the range of {TensorProto.DataType.Name(wanted).lower()}, {name} holds "
            f"{np.abs(values).max():g}: build in fp32 or bf16"
        )
    return numpy_helper.from_array(rounded, name)


def _rebuilt(model: onnx.ModelProto, out: _Retyped) -> onnx.ModelProto:
    new = onnx.ModelProto()
    new.CopyFrom(model)
    graph = new.graph
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(out.nodes)
    graph.initializer.extend(out.weights.values())
    graph.value_info.extend(_described(model.graph, out))
    return new


def _described(graph: onnx.GraphProto, out: _Retyped) -> Iterator[onnx.ValueInfoProto]:
    """Types and shapes of all tensors between inputs and outputs, by the names and types that they have now."""
    for value in graph.value_info:
        versions = out.versions.get(value.name, {value.type.tensor_type.elem_type: value.name})
        for data_type, name in versions.items():
            described = onnx.ValueInfoProto()
            described.CopyFrom(value)
            described.name, described.type.tensor_type.elem_type = name, data_type
            yield described
