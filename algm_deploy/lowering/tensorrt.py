"""Base ONNX graph -> ONNX graph for TensorRT and TensorRT-RTX.

| base graph (opset 18, domain `algm`) | here |
|---|---|
| clap, gbm | plugin node with one more output, the 0-D INT32 size tensor that tells TensorRT the token count, and one
more attribute, the count to tune for |
| the same by a budget, ToMe and its attention, ELViT, EViT and what cls attends to, CTS, merging again | standard
operators |
| unmerge, deformable_attention | plugin node |
| label_map | plugin node with int32 labels, then a Cast to uint8: TensorRT takes no 8-bit plugin output |
| attention | `Attention` of opset 23, its mask made from the lengths |
| precision | explicit types (`tensorrt_precision`), in fp8 quantised products (`tensorrt_fp8`) |

The graph is written for strongly typed networks. TensorRT finds a plugin by the node's op type and its attribute
`plugin_namespace`, not by the ONNX domain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
from onnx import NodeProto, TensorProto, helper, numpy_helper

from algm_deploy.bundle.files import ONNX, ONNX_DATA, WEIGHTS
from algm_deploy.bundle.graphs import (
    DOMAIN,
    FLOAT32_PRODUCTS,
    PLAIN_ATTENTIONS,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    PLUGINS,
    VERSION,
)
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import ExportError
from algm_deploy.lowering.export import base_onnx
from algm_deploy.lowering.portable import add_function_bodies, has_budget, needs_no_plugin, operator_of
from algm_deploy.lowering.tensorrt_fp8 import quantise_products
from algm_deploy.lowering.tensorrt_precision import ONNX_TYPE, retype
from algm_deploy.lowering.tensorrt_zero_points import centre_levels
from algm_deploy.merging import deployed_network
from algm_deploy.models.loading import load_network
from algm_deploy.models.quantized import QuantizedLinear, in_graphs, quantized_layers
from algm_deploy.ops.schema import WORDS
from algm_deploy.recipe.plan import Merge
from algm_deploy.recipe.schema import Precision

TENSORRT_ONNX = "model.tensorrt.onnx"
OPSET = 23
TRANSLATED = (*PLUGINS, "attention")
# The largest K of a TopK in every TensorRT release so far. A merge in standard operators sorts its windows with one.
TOPK_LIMIT = 3840
# Same name at opset 18 and 23, another meaning.
_CHANGED_SINCE_18 = frozenset({"DFT", "GroupNormalization"})


def write_tensorrt_onnx(
    bundle: Bundle, precision: Precision, usual_rows: Sequence[int] = ()
) -> tuple[Path, Counter[str]]:
    """Exports the bundle's network anew and adds `model.tensorrt.onnx` to the bundle.

    Weights that equal those of the portable model are not written again: both files refer to the same data file.
    Precision and `usual_rows` as for `tensorrt_from_base`.

    Returns:
        Path of the file, and the counts of `tensorrt_from_base`.

    Raises:
        ExportError: see `tensorrt_from_base`.
    """
    network = deployed_network(bundle, quantize=in_graphs(bundle.recipe.precision))
    base = base_onnx(network, bundle.recipe.merging, bundle.signature.image.dtype)
    layers = dict(quantized_layers(load_network(bundle))) if precision == "fp8" else {}
    model, counts = tensorrt_from_base(base, precision, usual_rows, layers)
    uses = _share_weights(model, bundle)
    with bundle.add(TENSORRT_ONNX, made_from={WEIGHTS: bundle.files[WEIGHTS].sha256}, uses=uses) as path:
        onnx.save(model, path)
    return bundle.path / TENSORRT_ONNX, counts


def _share_weights(model: onnx.ModelProto, bundle: Bundle) -> tuple[str, ...]:
    """Replaces weights by references into the portable model's data file; names the files that the model now needs."""
    portable = onnx.load(bundle.file(ONNX), load_external_data=False).graph
    stored = {t.name: t for t in portable.initializer if t.data_location == TensorProto.EXTERNAL}
    shared = 0
    with bundle.file(ONNX_DATA).open("rb") as data:
        for tensor in model.graph.initializer:
            other = stored.get(tensor.name)
            if other is None or tensor.data_type != other.data_type:
                continue
            place = {entry.key: entry.value for entry in other.external_data}
            data.seek(int(place["offset"]))
            if data.read(int(place["length"])) == tensor.raw_data:
                tensor.CopyFrom(other)
                shared += 1
    return (ONNX_DATA,) if shared else ()


def tensorrt_from_base(
    base: ir.Model,
    precision: Precision,
    usual_rows: Sequence[int] = (),
    layers: Mapping[str, QuantizedLinear] = MappingProxyType({}),
) -> tuple[onnx.ModelProto, Counter[str]]:
    """Rewrites the base graph for TensorRT.

    Args:
        base: base graph at opset 18 with nodes of domain `algm`. Not changed.
        precision: type of tokens and weights. Graph inputs and outputs keep their types.
        usual_rows: rows that each merge usually leaves, in the order they run, prefix and padding counted; the builder
            tunes for as many. Without them it tunes for half of all rows.
        layers: in fp8, the products to compute in it, by name; those of int8 the base graph holds itself.

    Returns:
        The new model, and how often each rewrite fired: `clap`, `gbm`, `unmerge`, `label_map`, `deformable_attention`,
        `attention`, the precision's `cast` and `weight`, in int8 `zero_point`, and in fp8 `product`.

    Raises:
        ExportError: the graph holds an operator that cannot be translated, or another number of merges, or it lacks a
            product of `layers`.
    """
    model = ir.to_proto(_with_bodies(base))
    _check_operators(model)
    merges = [n.name for n in model.graph.node if n.domain == DOMAIN and operator_of(n.op_type) in get_args(Merge)]
    if usual_rows and len(usual_rows) != len(merges):
        raise ExportError(f"expected usual rows for {len(merges)} merges, got {len(usual_rows)}: export again")
    _keys_by_product(model.graph)
    labels = _label_types(model.graph)
    centred = centre_levels(model.graph)
    new, counts = retype(model, precision)
    if centred:
        counts["zero_point"] = centred
    if precision == "fp8":
        counts["product"] = quantise_products(new.graph, layers)
    usual = dict(zip(merges, usual_rows or [0] * len(merges), strict=True))
    rewriter = _Rewriter(labels, ONNX_TYPE[precision], usual, counts)
    bodies = {function.name for function in new.functions}
    nodes = [
        written for node in new.graph.node for written in ([node] if node.op_type in bodies else rewriter.rewrite(node))
    ]
    del new.graph.node[:], new.opset_import[:]
    new.graph.node.extend(nodes)
    new.graph.initializer.extend(rewriter.constants.values())
    new.opset_import.extend([helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)])
    new.ir_version = max(new.ir_version, 10)
    called = Counter(operator_of(node.op_type) for node in new.graph.node)
    told = {FLOAT32_PRODUCTS: _float32_products(new), PLAIN_ATTENTIONS: called["proportional_attention"]}
    helper.set_model_props(new, {name: str(count) for name, count in told.items()})
    return _inlined(new), counts


def _with_bodies(base: ir.Model) -> ir.Model:
    """A copy in which operators that need no plugin call functions, for any TensorRT to take as they are.

    Raises:
        ExportError: a budget beyond what TopK sorts out.
    """
    model = base.clone()
    for node in filter(has_budget, model.graph):
        if (budget := node.attributes["budget"].as_int()) > TOPK_LIMIT:
            raise ExportError(
                f"node {node.name}: TensorRT sorts out at most {TOPK_LIMIT} values with TopK, this budget asks for "
                f"{budget}: choose a smaller one, or a threshold"
            )
    add_function_bodies(model, needs_no_plugin)
    return model


def _float32_products(model: onnx.ModelProto) -> int:
    """Products in the functions that are called, but for those of ToMe's attention, which have the type of its rows."""
    products = {
        function.name: sum(node.op_type == "MatMul" for node in function.node)
        for function in model.functions
        if operator_of(function.name) != "proportional_attention"
    }
    return sum(products.get(node.op_type, 0) for node in model.graph.node)


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without functions, which mean the same at opset 18 and at today's."""
    if not model.functions:
        return model
    for function in model.functions:
        del function.opset_import[:]
        function.opset_import.extend(model.opset_import)
    return onnx.inliner.inline_local_functions(model)


def _check_operators(model: onnx.ModelProto) -> None:
    bodies = {function.name for function in model.functions}
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type not in bodies and operator_of(node.op_type) not in TRANSLATED:
            raise ExportError(
                f"node {node.name} is {DOMAIN}.{node.op_type}, TensorRT has plugins for {', '.join(PLUGINS)} only: run "
                "this bundle with onnxruntime-cpu or torch"
            )
        if node.domain not in ("", DOMAIN):
            raise ExportError(
                f"node {node.name} is {node.domain}.{node.op_type}: expected operators of ONNX and {DOMAIN} only"
            )
        if node.op_type in _CHANGED_SINCE_18:
            raise ExportError(f"node {node.name}: {node.op_type} changed its meaning between opset 18 and {OPSET}")
    for node in model.graph.node:
        if node.op_type == "TopK":
            _check_topk(node, model.graph)


def _check_topk(node: NodeProto, graph: onnx.GraphProto) -> None:
    """A K that is no constant can be as large as its axis, which the builder does not know either."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    k = int(numpy_helper.to_array(constants[node.input[1]]).item()) if node.input[1] in constants else None
    if k is None or k > TOPK_LIMIT:
        raise ExportError(
            f"node {node.name}: TensorRT sorts out at most {TOPK_LIMIT} values with TopK, this one asks for "
            f"{k or 'a number known only at run time'}: merge with the operators of domain {DOMAIN}, which are plugins"
        )


def _keys_by_product(graph: onnx.GraphProto) -> None:
    """Writes the mean over heads of the keys that ToMe compares as a product of all projected rows, in place.

    TensorRT-RTX 1.7 compiles no engine in which a merge compares a slice of them.
    """
    makers = {name: node for node in graph.node for name in node.output}
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in graph.value_info}
    tables: dict[str, TensorProto] = {}
    for node in graph.node:
        mean = makers.get(node.input[3]) if node.domain == DOMAIN and operator_of(node.op_type) == "tome" else None
        if mean is None or mean.op_type != "ReduceMean":
            continue
        by_head = makers[mean.input[0]]
        parts = makers[by_head.input[0]]
        *_, heads, side = shapes[by_head.output[0]]
        of_keys = np.tile(np.eye(side, dtype=np.float32) / heads, (heads, 1))
        table = np.zeros((3, *of_keys.shape), np.float32)
        table[list(parts.output).index(by_head.input[0])] = of_keys
        name = f"mean_key_{heads}x{side}"
        tables[name] = numpy_helper.from_array(table.reshape(-1, side), name)
        mean.CopyFrom(helper.make_node("MatMul", [parts.input[0], name], [mean.output[0]], name=mean.name))
    for unread in ("Reshape", "Split") if tables else ():
        read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
        kept = [node for node in graph.node if node.op_type != unread or not read.isdisjoint(node.output)]
        del graph.node[:]
        graph.node.extend(kept)
    graph.initializer.extend(tables.values())


def _label_types(graph: onnx.GraphProto) -> dict[str, int]:
    """Element type of every `label_map` output."""
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.output)}
    return {node.output[0]: types[node.output[0]] for node in graph.node if node.op_type == "label_map"}


class _Rewriter:
    """Translates node by node; remembers masks and constants, which nodes share."""

    def __init__(
        self, label_types: dict[str, int], token_type: int, usual_rows: dict[str, int], counts: Counter[str]
    ) -> None:
        self.constants: dict[str, TensorProto] = {}
        self._label_types = label_types
        self._token_type = token_type
        self._usual_rows = usual_rows
        self._counts = counts
        self._masks: dict[str, str] = {}

    def rewrite(self, node: NodeProto) -> list[NodeProto]:
        """The nodes that stand for `node`."""
        if node.domain != DOMAIN:
            return [node]
        self._counts[node.op_type] += 1
        rules: dict[str, Callable[[NodeProto], list[NodeProto]]] = {
            "attention": self._attention,
            "label_map": self._label_map,
            "unmerge": lambda n: [plugin_node(n)],
            "deformable_attention": lambda n: [plugin_node(n)],
            "clap": self._merge,
            "gbm": self._merge,
        }
        return rules[node.op_type](node)

    def _merge(self, node: NodeProto) -> list[NodeProto]:
        return [merge_node(node, self._usual_rows[node.name])]

    def _label_map(self, node: NodeProto) -> list[NodeProto]:
        name = node.output[0]
        if self._label_types[name] == TensorProto.INT32:
            return [plugin_node(node)]
        wide = f"{name}_int32"
        cast = helper.make_node("Cast", [wide], [name], name=f"{node.name}_cast", to=self._label_types[name])
        return [plugin_node(node, outputs=[wide]), cast]

    def _attention(self, node: NodeProto) -> list[NodeProto]:
        """Packed `qkv` split in three; the scale moves to the queries, because TensorRT's parser would otherwise
        multiply queries and keys by its square root, two roundings instead of an exact power of two.
        """
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        out, heads = node.output[0], attributes["heads"]
        query, key, value, scaled = (f"{out}_{part}" for part in ("query", "key", "value", "query_scaled"))
        scale = self._constant(f"attention_scale_{attributes['scale']}", self._token_type, attributes["scale"])
        parts = [query, key, value]
        nodes = [
            helper.make_node("Split", [node.input[0]], parts, name=f"{node.name}_split", axis=2, num_outputs=3),
            helper.make_node("Mul", [query, scale], [scaled], name=f"{node.name}_scale"),
        ]
        inputs = [scaled, key, value]
        if len(node.input) > 1 and node.input[1]:
            mask_nodes, mask = self._mask(node.input[0], node.input[1])
            nodes += mask_nodes
            inputs.append(mask)
        # TRT_decomposable is read by TensorRT's parser alone: where no fused kernel fits (fp32, odd head widths), the
        # builder may compute the attention in parts instead of refusing it.
        attend = helper.make_node(
            "Attention",
            inputs,
            [out],
            name=node.name,
            q_num_heads=heads,
            kv_num_heads=heads,
            scale=1.0,
            TRT_decomposable=1,
        )
        return [*nodes, attend]

    def _mask(self, qkv: str, length: str) -> tuple[list[NodeProto], str]:
        """Mask (B, 1, S, S), true where the key lies before its image's length; one for all layers with this length.

        TensorRT broadcasts a mask over images and heads, not over queries, so the query axis is written out.
        """
        if length in self._masks:
            return [], self._masks[length]
        name = self._masks[length] = f"{length}_mask"
        rows, count, index, queries = (f"{length}_{part}" for part in ("rows", "row_count", "row_index", "query_index"))
        column, valid, every = (f"{length}_{part}" for part in ("column", "valid_keys", "every_query"))
        zero, one = self._constant("index_0", TensorProto.INT64, 0), self._constant("index_1", TensorProto.INT64, 1)
        last, behind = (self._constant(f"axes_{a}", TensorProto.INT64, a) for a in ([1], [1, 2, 3]))
        return [
            helper.make_node("Shape", [qkv], [rows], start=1, end=2),
            helper.make_node("Squeeze", [rows], [count]),
            helper.make_node("Range", [zero, count, one], [index]),
            helper.make_node("Unsqueeze", [length, behind], [column]),
            helper.make_node("Less", [index, column], [valid]),
            helper.make_node("Unsqueeze", [index, last], [queries]),
            helper.make_node("GreaterOrEqual", [queries, zero], [every]),
            helper.make_node("And", [valid, every], [name]),
        ], name

    def _constant(self, name: str, data_type: int, value: float | list[int]) -> str:
        """Name of an initializer that holds `value`, one for all nodes that ask for it."""
        array = np.asarray(value, dtype=helper.tensor_dtype_to_np_dtype(data_type))
        self.constants[name] = numpy_helper.from_array(array, name)
        return name


def merge_node(node: NodeProto, usual_rows: int = 0) -> NodeProto:
    """A merge as a plugin node: with its row count as one more output, tuned for `usual_rows`, 0 for half of all."""
    new = plugin_node(node, outputs=[*node.output, f"{node.output[0]}_rows"])
    new.attribute.append(helper.make_attribute("usual_rows", usual_rows))
    return new


def plugin_node(node: NodeProto, outputs: list[str] | None = None) -> NodeProto:
    """`node` as a plugin node: same op type and inputs, words as numbers, `plugin_namespace` added."""
    new = helper.make_node(node.op_type, list(node.input), outputs or list(node.output), name=node.name, domain=DOMAIN)
    numbers = {a.name: _number(node, a) for a in node.attribute}
    strings = {"plugin_namespace": PLUGIN_NAMESPACE, "plugin_version": PLUGIN_VERSION}
    new.attribute.extend(helper.make_attribute(name, value) for name, value in (numbers | strings).items())
    return new


def _number(node: NodeProto, attribute: onnx.AttributeProto) -> int | float | list[int]:
    value = helper.get_attribute_value(attribute)
    if not isinstance(value, bytes):
        return value  # type: ignore[no-any-return]
    known = WORDS.get(attribute.name, ())
    if value.decode() not in known:
        raise ExportError(
            f"node {node.name}: expected {attribute.name} out of {', '.join(known)}, got {value.decode()}"
        )
    return known.index(value.decode())
