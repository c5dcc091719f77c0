"""Portable ONNX -> ONNX for one provider of ONNX Runtime.

| portable graph | here |
|---|---|
| `algm.attention` behind a linear layer | `com.microsoft.Attention`, that layer included; key lengths, no mask |
| the same after a product in int8, CPU | `com.microsoft.MultiHeadAttention`; the product stays as it is |
| attention in fp16, heads of 64, CUDA | custom operator `packed_attention` where the library is there |
| residual + bias, LayerNormalization | CUDA: `com.microsoft.SkipLayerNormalization`; in fp16 custom operators where the
library is there: see `norms` |
| attention of queries to tokens, in fp16 | CUDA: `com.microsoft.MultiHeadAttention`: see `cross_attention` |
| bias + GELU | `com.microsoft.BiasGelu`; in fp16 on CUDA custom operator `gelu` where the library is there |
| GELU of maps | in fp16 on CUDA custom operator `gelu` where the library is there |
| patch embedding | CUDA: one matrix product instead of a strided convolution, in fp16 of custom operator `patches` |
| rows scaled to length one | CUDA: `SimplifiedLayerNormalization` |
| label_map, deformable_attention, on CUDA clap, gbm, unmerge | custom operators where the library is there, else their
function bodies |
| labels of scores on a grid, or of masks | custom operators where the library is there: see `labels` |

`com.microsoft.Attention` takes queries, keys and values from one packed weight in the very layout the network has;
where another layout is needed, the session turns the weight. So no weight is written anew: every graph refers to the
data file of the portable one.

On the CPU images that decide alone are executed one after the other (see `single_image`), hence no lengths at all: a
padded batch of four took a quarter longer than its images one by one. SkipLayerNormalization is left out there: ONNX
Runtime's CPU version takes longer than the operators it replaces (194 against 179 ms on Segmenter-S).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from algm_deploy.bundle.files import ONNX, ONNX_DATA
from algm_deploy.bundle.graphs import DOMAIN, VERSION
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import ExportError
from algm_deploy.lowering.cross_attention import fuse_cross_attention
from algm_deploy.lowering.labels import labels_by_library
from algm_deploy.lowering.norms import sums_and_norms
from algm_deploy.lowering.onnxruntime_segments import segments, sized_merge
from algm_deploy.lowering.patterns import (
    CONTRIB,
    Chain,
    Linear,
    fits_rows,
    fp32,
    is_quantized,
    linear_of,
    nodes_of,
    number,
    only_user,
    other,
    pair,
    patch_embedding,
    replace,
    stand_in,
)
from algm_deploy.lowering.portable import fix_batch, has_budget, load_portable
from algm_deploy.ops.schema import SCHEMAS
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.schema import Recipe

Provider = Literal["cpu", "cuda"]
# What the library is used for. On the CPU the bodies of the others are as fast (Segmenter-S: 182 against 184 ms); a
# label map of 150 classes takes 136 ms by its body and 28 ms by the library, an extractor of ViT-Adapter-B 111 and 43,
# labels of SegViT's masks 440 and 22. For a grid of 128 x 128 cells Resize and ArgMax take 261 ms on one core, the
# library 24; for 32 x 32 cells 176 and 2.
CUSTOM_OPERATORS: dict[Provider, frozenset[str]] = {
    "cpu": frozenset({"label_map", "mask_labels", "deformable_attention"}),
    "cuda": frozenset(
        {"clap", "gbm", "unmerge", "label_map", "mask_labels", "deformable_attention"}
        | {"packed_attention", "gelu", "bias_skip", "bias_skip_norm", "layer_norm", "patches"},
    ),
}
# Fewest pixels along a side of a cell for which labels are the library's: at two a processor compares nearly as often
# as ArgMax does.
SMALLEST_CELL: dict[Provider, int] = {"cpu": 4, "cuda": 1}
# What cuBLAS, cuDNN and ONNX Runtime's attention multiply.
_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "Attention", "MultiHeadAttention"})
HEAD = 64  # the width of heads that `packed_attention` multiplies on tensor cores


def single_image(recipe: Recipe, provider: Provider) -> bool:
    """Whether the provider's graph takes one image at a time: on the CPU, where images do not decide together."""
    return provider == "cpu" and recipe.merging.batch == "per_image"


def comes_in_segments(plan: MergePlan, provider: Provider) -> bool:
    """Whether a plan's graph can be cut for CUDA graphs: every merge is one of the library's operators, which waits for
    no host, and lets images decide alone or by budgets.

    Merges of other methods are bodies, which ask the host for sizes. What comes with those that count tokens is in
    bodies too, also where nothing merges, so none of their networks is cut.
    """
    merges = {plan.merge_in(layer) for layer in plan.layers}
    alone = plan.batch == "per_image" or plan.static
    return merges <= CUSTOM_OPERATORS[provider] and alone and not plan.row.counts_in


class Written(NamedTuple):
    """Of a provider's graph: as in `OptimizedGraph`."""

    rewrites: dict[str, int]
    segments: int
    multiplies_fp32: bool


def write_onnxruntime_onnx(
    bundle: Bundle,
    provider: Provider,
    custom_operators: bool,
    file: str,
    segment_files: str | None = None,
    own_attention: bool = True,
) -> Written:
    """Adds the provider's graph to the bundle.

    With custom operators, the graph of a plan that `comes_in_segments` is added once more in those, for CUDA graphs:
    with budgets the whole as a single one.

    Args:
        bundle: to read the portable graph from, and to add to.
        provider, custom_operators: as for `rewrite`.
        file: name of the graph.
        segment_files: names of its segments, `*` standing for their number; without it none are written.
        own_attention: as for `rewrite`.

    Raises:
        BundleError: the portable graph cannot be read, or was not written by this package.
    """
    model = load_portable(bundle.file(ONNX))
    counts = rewrite(model, provider, custom_operators, single_image(bundle.recipe, provider), own_attention)
    in_fp32 = multiplies_fp32(model)
    files = {file: model}
    if segment_files and custom_operators and comes_in_segments(bundle.recipe.merging, provider):
        files |= {segment_files.replace("*", str(index)): part for index, part in enumerate(segments(model))}
    made_from = {ONNX: bundle.files[ONNX].sha256}
    for name, written in files.items():
        with bundle.add(name, made_from, uses=(ONNX_DATA,)) as path:
            ir.save(written, path)
    return Written(dict(counts), len(files) - 1, in_fp32)


def multiplies_fp32(model: ir.Model) -> bool:
    """Whether products of fp32 numbers may be in a graph, its bodies included: without any, there is nothing that TF32
    would round. A product of numbers whose type is not told may be one.
    """
    parts: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    nodes = (node for part in parts for node in ir.traversal.RecursiveGraphIterator(part))
    return any(node.op_type in _PRODUCTS and not _is_in_16_bits(node) for node in nodes)


def _is_in_16_bits(node: ir.Node) -> bool:
    values = (value for value in (*node.inputs, *node.outputs) if value is not None)
    return any(value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) for value in values)


def rewrite(
    model: ir.Model, provider: Provider, custom_operators: bool, single: bool, own_attention: bool = True
) -> Counter[str]:
    """Rewrites a portable model in place.

    Args:
        model: portable model, every `algm` operator with a function body.
        provider: decides how attention is told the key lengths: (B) on the CPU, 3 B + 2 numbers on CUDA.
        custom_operators: leave the provider's `CUSTOM_OPERATORS` to the library.
        single: fix the batch to one image, whose rows are all valid.
        own_attention: `packed_attention` is one of them where it fits; otherwise ONNX Runtime attends.

    Returns:
        How often each rewrite fired: `attention`, `multi_head_attention`, `cross_attention`, `skip_layer_norm`,
        `bias_gelu`, `patch_embedding`, `unit_rows`, and the custom operators by name: those of `CUSTOM_OPERATORS`, no
        other rewrite is called as one of them.

    Raises:
        ExportError: an attention whose queries, keys and values do not come from one linear layer.
    """
    counts: Counter[str] = Counter()
    if single:
        fix_batch(model)
    _attention(model.graph, provider, custom_operators and own_attention, single, counts)
    _bias_gelu(model.graph, provider == "cuda" and custom_operators, counts)
    if provider == "cuda":
        fuse_cross_attention(model, counts)
        sums_and_norms(model.graph, custom_operators, counts)
        patch_embedding(model.graph, custom_operators, counts)
        _unit_rows(model.graph, counts)
    if custom_operators:
        labels_by_library(model.graph, SMALLEST_CELL[provider])
    custom = _custom_operators(model.graph, CUSTOM_OPERATORS[provider], counts) if custom_operators else frozenset()
    RemoveUnusedNodesPass()(model)
    _keep_functions(model, {node.op_type for node in model.graph if node.domain == DOMAIN} - custom)
    if custom_operators:
        _rename_budgets(model)
    model.graph.opset_imports[DOMAIN] = VERSION
    model.graph.opset_imports[CONTRIB] = 1
    return counts


# --- rewrites --------------------------------------------------------------------------------------------------------


def _attention(graph: ir.Graph, provider: Provider, own: bool, single: bool, counts: Counter[str]) -> None:
    lengths: dict[ir.Value, ir.Value] = {}
    for node in nodes_of(graph, "attention", DOMAIN):
        linear = linear_of(node.inputs[0])
        if linear is None:
            raise ExportError(f"node {node.name}: expected queries, keys and values from one linear layer")
        length = node.inputs[1] if len(node.inputs) > 1 and not single else None
        if is_quantized(linear.weight):
            if provider == "cpu" and length is None:
                stand_in(node.outputs[0], _multi_head_attention(graph, node, linear))
                graph.remove(node, safe=True)
                counts["multi_head_attention"] += 1
            continue
        heads, scale = node.attributes["heads"].as_int(), node.attributes["scale"].as_float()
        if provider == "cuda" and own and _fits_packed_attention(node, linear):
            inputs = [linear.product, *fp32(graph, node, linear.bias), *([] if length is None else [length])]
            name, domain = "packed_attention", DOMAIN
            attributes: dict[str, float] = {"heads": heads, "scale": scale}
        else:
            name, domain = "Attention", CONTRIB
            attributes = {"num_heads": heads, "scale": scale}
            inputs = [linear.x, linear.weight, linear.bias]
            if length is not None:
                if length not in lengths:
                    lengths[length] = _key_lengths(graph, node, provider, length, linear.x)
                inputs.append(lengths[length])
            counts["attention"] += 1
        replace(graph, node, ir.node(name, inputs, attributes, domain=domain, name=node.name))


def _multi_head_attention(graph: ir.Graph, node: ir.Node, linear: Linear) -> ir.Value:
    """Attention after a product in int8, which `com.microsoft.Attention` would have to compute itself, in fp32."""
    add = Chain(graph, node, str(node.name))
    parts = ir.node("Split", [linear.product], {"axis": 2, "num_outputs": 3}, num_outputs=3, name=f"{node.name}/Split")
    for value, part in zip(parts.outputs, ("queries", "keys", "values"), strict=True):
        value.name = f"{node.name}/{part}"
    graph.insert_before(node, parts)
    attributes = {"num_heads": node.attributes["heads"].as_int(), "scale": node.attributes["scale"].as_float()}
    return add("MultiHeadAttention", *parts.outputs, linear.bias, domain=CONTRIB, **attributes)


def _fits_packed_attention(node: ir.Node, linear: Linear) -> bool:
    """Whether the library's attention has tensor cores for it; for others ONNX Runtime's own is faster."""
    width = linear.bias.shape[0] if linear.bias.shape is not None else None
    return linear.x.dtype == ir.DataType.FLOAT16 and width == 3 * HEAD * node.attributes["heads"].as_int()


def _key_lengths(graph: ir.Graph, node: ir.Node, provider: Provider, length: ir.Value, x: ir.Value) -> ir.Value:
    """Lengths as `com.microsoft.Attention` takes them, int32: (B) on the CPU; on CUDA followed by the row at which each
    image starts, for queries and once more for keys, the end included.
    """

    add = Chain(graph, node, f"{length.name}/keys")
    keys = add("Cast", length, to=ir.DataType.INT32)
    if provider == "cpu":
        return keys
    # Range takes its numbers from the host and leaves its result on the device: nothing is copied in between.
    zero, one = (add.constant(np.array(n, np.int64)) for n in (0, 1))
    images, rows = (add("Squeeze", add("Shape", v, start=i, end=i + 1)) for i, v in enumerate((length, x)))
    starts = add("Range", zero, add("Add", add("Mul", images, rows), one), rows)
    starts = add("Cast", starts, to=ir.DataType.INT32)
    return add("Concat", keys, starts, starts, axis=0)


def _bias_gelu(graph: ir.Graph, own: bool, counts: Counter[str]) -> None:
    """x * (0.5 * (erf(x / sqrt 2) + 1)) with x = product + bias. `own`: the library's operator where it is faster."""
    for erf in nodes_of(graph, "Erf"):
        assert erf.inputs[0] is not None
        scaled = erf.inputs[0].producer()
        plus = only_user(erf.outputs[0], "Add")
        half = only_user(plus.outputs[0], "Mul") if plus else None
        out = only_user(half.outputs[0], "Mul") if half else None
        if scaled is None or scaled.op_type != "Div" or plus is None or half is None or out is None:
            continue
        x, root = pair(scaled)
        numbers = [number(v) for v in (root, other(plus, erf.outputs[0]), other(half, plus.outputs[0]))]
        if None in numbers or other(out, half.outputs[0]) is not x:
            continue
        if not np.allclose(np.array(numbers, float), (math.sqrt(2), 1, 0.5), rtol=1e-3):
            continue
        linear = linear_of(x)
        if linear is None:
            cells = _cells_of_maps(x)
            if own and cells and x.dtype == ir.DataType.FLOAT16:
                stand_in(out.outputs[0], _gelu_of_maps(Chain(graph, out, str(out.name)), x, cells))
        else:
            is_own = own and fits_rows(linear.product)
            name, domain = ("gelu", DOMAIN) if is_own else ("BiasGelu", CONTRIB)
            bias = fp32(graph, out, linear.bias) if is_own else [linear.bias]
            new = ir.node(name, [linear.product, *bias], domain=domain, name=out.name)
            graph.insert_before(out, new)
            stand_in(out.outputs[0], new.outputs[0])
            if not is_own:
                counts["bias_gelu"] += 1


def _gelu_of_maps(add: Chain, x: ir.Value, cells: int) -> ir.Value:
    """GELU of 16-bit maps, as they come from convolutions. Node by node, an error function that is rounded to 16 bits
    before it is added to one leaves little of what GELU makes of numbers below zero."""
    none = add.constant(np.zeros(cells, np.float32))
    rows = add("gelu", add("Reshape", x, add.shape([1, -1, cells])), none, domain=DOMAIN)
    return add("Reshape", rows, add("Shape", x))


def _cells_of_maps(x: ir.Value) -> int:
    """Rows times columns of maps (B, C, h, w) whose sides are known; 0 of anything else."""
    sides = [side for side in list(x.shape or [])[2:] if isinstance(side, int)]
    return math.prod(sides) if x.shape is not None and len(x.shape) == 4 and len(sides) == 2 else 0


def _unit_rows(graph: ir.Graph, counts: Counter[str]) -> None:
    """x / max(|x|, tiny) in fp32: a root-mean-square norm times 1 / sqrt(width), in one kernel instead of six."""
    for norm in nodes_of(graph, "ReduceL2"):
        x = norm.inputs[0]
        clip = only_user(norm.outputs[0], "Clip")
        wide = only_user(clip.outputs[0], "Expand") if clip else None
        out = only_user(wide.outputs[0], "Div") if wide else None
        width = x.shape[-1] if x is not None and x.shape is not None else None
        if x is None or out is None or not isinstance(width, int):
            continue
        narrow = only_user(out.outputs[0], "Cast")
        widened = x.producer()
        if narrow is not None and widened is not None and widened.op_type == "Cast" and widened.inputs[0] is not None:
            x, out = widened.inputs[0], narrow
        if x.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16) or x.dtype != out.outputs[0].dtype:
            continue
        add = Chain(graph, out, norm.name)
        scale = add.constant(np.full(width, width**-0.5, x.dtype.numpy()))
        # Zero rows stay zero; others are longer than this by far.
        unit = add("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=1e-24 / width, stash_type=1)
        stand_in(out.outputs[0], unit)
        counts["unit_rows"] += 1


def _custom_operators(graph: ir.Graph, operators: frozenset[str], counts: Counter[str]) -> frozenset[str]:
    """Gives the nodes the operator's own name, which the library registers, instead of their function's.

    Returns the operators; a function of the same name would hide them.
    """
    for operator in sorted(operators):
        for node in nodes_of(graph, operator, DOMAIN):
            # The library writes 8-bit labels only, for up to 255 classes.
            if operator != "label_map" or node.outputs[0].dtype == ir.DataType.UINT8:
                node.op_type = operator
                counts[operator] += 1
            if has_budget(node):
                _size_beforehand(graph, node)
    return operators & set(counts)


def _size_beforehand(graph: ir.Graph, node: ir.Node) -> None:
    """Lets a merge by a budget be the library's operator whose sizes are known beforehand; it does not read the
    threshold that it takes."""
    threshold = Chain(graph, node, str(node.name)).constant(np.array(0, np.float32))
    place = [parameter.name for parameter in SCHEMAS[node.op_type].inputs].index("threshold")
    node.resize_inputs(place + 1)
    node.replace_input_with(place, threshold)
    sized_merge(node, "padded")
    rows, plan = node.outputs[4:]
    rows.name, plan.name = f"{node.name}/rows", f"{node.name}/plan"


def _rename_budgets(model: ir.Model) -> None:
    """Gives functions of merges by a budget names that the library does not register: by those, ONNX Runtime would
    expect the threshold that they do not have."""
    for node in model.graph:
        if has_budget(node) and node.op_type in SCHEMAS:
            function = model.functions.pop((DOMAIN, node.op_type, ""))
            node.op_type = function.name = f"{node.op_type}_0"
            model.functions[function.identifier()] = function


def _keep_functions(model: ir.Model, names: set[str]) -> None:
    for identifier in [key for key in model.functions if key[1] not in names]:
        del model.functions[identifier]
