"""Portable ONNX -> ONNX for OpenVINO, which knows no functions: every body stands in the graph.

| portable graph | here |
|---|---|
| the convolution of the patches | a product with the patches as rows: OpenVINO turned the image's axes first |
| `algm` operators | their bodies for a processor (`ops/bodies.py`), inlined |
| images that decide alone | one image at a time, whose rows are all valid: attention without lengths and masks |
| precision bf16: linear layers with a bias, and with AMX attention | bf16, by explicit casts; everything else is fp32 |
| precision int8, with VNNI: attention | its products in int8 by the manifest's steps (`ops/attention.py`) |
| attention in int8, where scores are many and heads a multiple of the cores | a head for each core at a time |
| attention in int8, where the number of rows is known | shares become levels by a cast, which clips nothing |
| what attention mixed, laid out in rows and then rounded to levels | rounded first: a quarter of the bytes to move |

OpenVINO can be told to compute in bf16, and then does so everywhere, similarities and statistics included. So the graph
says itself what is bf16, and OpenVINO is told to keep to its types. Where the processor has no bf16 OpenVINO computes
all of it in fp32.

Attention in bf16 is one kernel where the processor has AMX, and its scores are fp32 in there. Without AMX, OpenVINO
2026.4 computes its steps one by one and rounds the scores to bf16 between them: on an EPYC with AVX512_BF16 that made
2.5 times PyTorch's error, and took as long as attention in fp32, with which the error is 1.1 times PyTorch's.

Attention in int8 takes a sixth off a Segmenter-S in int8 in OpenVINO 2026.4 on an EPYC with AVX512_VNNI. Processors
without VNNI add products of bytes in 16 bits, where sums of these levels may not fit. Scores of a thousand tokens are
25 MB that three kernels read and write one after the other, so each core gets one head at a time: on two cores that
took a quarter off such an attention, and nothing off one of 539 tokens.

OpenVINO writes QuantizeLinear as steps that clip, scale, round and cast. Shares need no clipping: a cast took a fifth
off the kernel of their exponentials. Where shapes vary, exponentials and QuantizeLinear are kernels of their own, and
with a cast the whole network took 22 % longer.

Weights are not written anew: casts stand behind them, which OpenVINO folds when it loads. There, and in casts where
shapes vary, OpenVINO 2026.4 does not round a value to bf16 but cuts it off, if the last bit that stays is 0. Weights
lose nothing by it, as those of a bundle in bf16 are such values already; the 1.1 above has what the rest loses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from algm_deploy.bundle.files import ONNX, ONNX_DATA
from algm_deploy.bundle.graphs import DOMAIN
from algm_deploy.bundle.records import QuantizedAttention
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError
from algm_deploy.lowering.patterns import linear_of, patch_embedding
from algm_deploy.lowering.portable import add_function_bodies, fix_batch, inline, load_portable, operator_of
from algm_deploy.ops.attention import CAST, PACKED, TOGETHER, Steps, packed_steps

BF16, FP32 = ir.DataType.BFLOAT16, ir.DataType.FLOAT
MOVES = ("Reshape", "Transpose")
_LARGE = 8 << 20  # bytes of scores; below, more and smaller kernels gained nothing


def write_openvino_onnx(
    bundle: Bundle, file: str, attention_bf16: bool = False, attention_int8: bool = False, cores: int | None = None
) -> Counter[str]:
    """Adds OpenVINO's graph to the bundle as `file`; returns how often each rewrite fired: see `rewrite`.

    Raises:
        BundleError: the portable graph cannot be read, or was not written by this package.
    """
    recipe = bundle.recipe
    model = load_portable(bundle.file(ONNX))
    quantization = bundle.manifest.quantization
    steps = quantization.attention if quantization is not None and attention_int8 else ()
    counts = rewrite(
        model, recipe.merging.batch == "per_image", recipe.precision == "bf16", attention_bf16, steps, cores
    )
    with bundle.add(file, {ONNX: bundle.files[ONNX].sha256}, uses=(ONNX_DATA,)) as path:
        ir.save(model, path)
    return counts


def rewrite(
    model: ir.Model,
    single: bool,
    bf16: bool,
    attention_bf16: bool = False,
    attention_int8: Iterable[QuantizedAttention] = (),
    cores: int | None = None,
) -> Counter[str]:
    """Rewrites a portable model in place.

    Args:
        model: fp32, or fp16 where not `bf16`; every `algm` operator has a function body.
        single: fix the batch to one image, whose rows are all valid.
        bf16: compute linear layers with a bias in bf16.
        attention_bf16: attention too.
        attention_int8: compute these attentions' products in int8.
        cores: on so many it will run; None where that is not known.

    Returns:
        How often each rewrite fired: `bf16_linear`, `bf16_attention`, `int8_attention` (layers that compute in it),
        `cast_shares` (attentions whose shares are cast to levels), `heads_apart` (attentions whose heads are computed a
        few at a time), `inlined` (calls of functions), `levels_moved` (roundings that come before rows are laid out),
        `patch_embedding`, `unmasked` (attentions that are told no lengths).

    Raises:
        BundleError: the graph lacks an attention of `attention_int8`.
    """
    counts: Counter[str] = Counter()
    for node in _operators(model.graph):
        node.op_type = operator_of(node.op_type)
    model.functions.clear()
    if single:
        fix_batch(model)
        for node in _operators(model.graph):
            if node.op_type == "attention" and len(node.inputs) > 1:
                node.resize_inputs(1)
                counts["unmasked"] += 1
    if bf16:
        counts += _compute_in_bf16(model.graph, attention_bf16)
    counts += _compute_in_int8(model.graph, attention_int8, cores)
    patch_embedding(model.graph, False, counts)  # not before: its product stays in fp32
    RemoveUnusedNodesPass()(model)
    counts["inlined"] = add_function_bodies(model, processor=True)
    inline(model)
    _round_before_moves(model.graph, counts)
    return counts


def _operators(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if node.domain == DOMAIN]


def _compute_in_bf16(graph: ir.Graph, attention: bool) -> Counter[str]:
    """Gives the nodes that may compute in bf16 inputs and outputs of that type; returns the numbers of layers."""
    casts = _Casts(graph)
    layers = {"bf16_linear": list(_linear_layers(graph))}
    if attention:
        layers["bf16_attention"] = [(node,) for node in _operators(graph) if node.op_type == "attention"]
    for node in (node for found in layers.values() for nodes in found for node in nodes):
        for place, value in enumerate(node.inputs):
            if value is not None and value.dtype == FP32:
                node.replace_input_with(place, casts.narrow(value))
        casts.widen(node.outputs[0])
    return Counter({name: len(found) for name, found in layers.items()})


def _compute_in_int8(graph: ir.Graph, steps: Iterable[QuantizedAttention], cores: int | None) -> Counter[str]:
    """Hands attentions levels, and the steps of these as constants of their names; returns how many.

    The levels are written in front of all else that attention does: OpenVINO rounds to them in the kernel of the
    product that they come from, whatever the number of steps in a row.
    """
    nodes = {str(node.name).rpartition("/")[0]: node for node in _operators(graph) if node.op_type == "attention"}
    counts: Counter[str] = Counter()
    for one in steps:
        if one.name not in nodes:
            raise BundleError(f"expected the attention {one.name} in the graph, there is none: export the bundle again")
        node, first = nodes[one.name], 2  # behind rows and lengths
        node.replace_input_with(0, _levels_of_rows(graph, node, one))
        node.resize_inputs(first + len(Steps._fields))
        for place, kind in enumerate(Steps._fields, first):
            step = np.float32(getattr(one, kind))
            node.replace_input_with(place, _constant(graph, f"{one.name}.{kind}", step))
        counts["int8_attention"] += 1
        if _rows_of(node) is not None:
            node.attributes[CAST] = ir.AttrInt64(CAST, 1)
            counts["cast_shares"] += 1
        if cores and _outgrows(node, cores):
            node.attributes[TOGETHER] = ir.AttrInt64(TOGETHER, cores)
            counts["heads_apart"] += 1
    return counts


def _outgrows(node: ir.Node, cores: int) -> bool:
    """Whether an attention's scores are better computed for one head a core at a time, as all do not fit a cache."""
    count, heads = _rows_of(node), node.attributes["heads"].as_int()
    return count is not None and heads > cores and heads % cores == 0 and 4 * heads * count**2 > _LARGE


def _rows_of(node: ir.Node) -> int | None:
    """The number of an attention's rows, where it is known."""
    rows = node.inputs[0]
    count = rows.shape[1] if rows is not None and rows.shape is not None else None
    return count if isinstance(count, int) else None


def _levels_of_rows(graph: ir.Graph, node: ir.Node, one: QuantizedAttention) -> ir.Value:
    """The packed queries, keys and values of an attention as levels."""
    rows = node.inputs[0]
    assert rows is not None
    assert rows.shape is not None
    width = rows.shape[-1]
    assert isinstance(width, int)
    steps = packed_steps(Steps(one.query, one.key, one.value), node.attributes["scale"].as_float(), width)
    packed = _constant(graph, f"{one.name}.{PACKED}", steps)
    zero = _constant(graph, f"{one.name}.{PACKED}_zero", np.zeros(width, np.int8))
    name = f"{one.name}/{PACKED}"
    levels = ir.node("QuantizeLinear", [rows, packed, zero], {"axis": len(rows.shape) - 1}, name=name)
    levels.outputs[0].name, levels.outputs[0].dtype, levels.outputs[0].shape = name, ir.DataType.INT8, rows.shape
    graph.insert_before(node, levels)
    return levels.outputs[0]


def _round_before_moves(graph: ir.Graph, counts: Counter[str]) -> None:
    """Rounds numbers to levels of one step before they are laid out in another way, and not behind that."""
    for node in [node for node in graph if node.op_type == "QuantizeLinear"]:
        laid_out, step, levels = node.inputs[0], node.inputs[1], node.outputs[0]
        moves = list(_moves_to(laid_out))
        if laid_out is None or not moves or step is None or step.shape is None or len(step.shape):
            continue
        first = moves[-1]
        numbers = first.inputs[0]
        assert numbers is not None
        levels.replace_all_uses_with(laid_out)
        node.replace_input_with(0, numbers)
        first.replace_input_with(0, levels)
        graph.remove(node)
        graph.insert_before(first, node)
        for move in moves:
            move.outputs[0].type = levels.type
        levels.shape = numbers.shape
        counts["levels_moved"] += 1


def _moves_to(value: ir.Value | None) -> Iterator[ir.Node]:
    """The nodes that lay out what nobody else reads, from the last to the first."""
    while value is not None and len(list(value.uses())) == 1:
        node = value.producer()
        if node is None or node.op_type not in MOVES:
            return
        yield node
        value = node.inputs[0]


def _constant(graph: ir.Graph, name: str, numbers: np.ndarray | np.generic) -> ir.Value:
    tensor = ir.tensor(np.asarray(numbers), name=name)
    value = ir.Value(name=name, const_value=tensor)
    value.dtype, value.shape = tensor.dtype, ir.Shape(np.shape(numbers))
    graph.register_initializer(value)
    return value


def _linear_layers(graph: ir.Graph) -> Iterator[tuple[ir.Node, ...]]:
    """The two nodes of each linear layer. Interpolations have no bias, similarities no weights."""
    for node in graph:
        if (linear := linear_of(node.outputs[0])) is not None:
            product = linear.product.producer()
            if product is not None and len(list(linear.product.uses())) == 1:
                yield (product, node)


class _Casts:
    """Casts between fp32 and bf16, at most one a value and direction."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._narrow: dict[ir.Value, ir.Value] = {}

    def narrow(self, value: ir.Value) -> ir.Value:
        """An fp32 value in bf16."""
        producer = value.producer()
        if producer is not None and producer.op_type == "Cast":
            source = producer.inputs[0]
            if source is not None and source.dtype == BF16:
                return source
        if value not in self._narrow:
            cast = self._cast(value, BF16)
            if producer is None:  # a weight
                self._graph.insert_before(self._graph[0], cast)
            else:
                self._graph.insert_after(producer, cast)
            self._narrow[value] = cast.outputs[0]
        return self._narrow[value]

    def widen(self, value: ir.Value) -> None:
        """Turns the type of a node's output to bf16; whoever reads it gets it in fp32."""
        producer = value.producer()
        assert producer is not None
        cast = self._cast(value, FP32)
        value.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
        cast.replace_input_with(0, value)
        value.dtype = BF16
        self._graph.insert_after(producer, cast)

    @staticmethod
    def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
        name = f"{value.name}/{dtype.name.lower()}"
        cast = ir.node("Cast", [value], {"to": dtype}, name=name)
        cast.outputs[0].name, cast.outputs[0].dtype, cast.outputs[0].shape = name, dtype, value.shape
        return cast
