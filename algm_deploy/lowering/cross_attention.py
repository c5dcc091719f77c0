"""Attention of queries to rows of tokens, as SegViT's decoder has it, by ONNX Runtime's own operator.

| the portable graph | here |
|---|---|
| softmax(queries x keys x scale) x values, head by head | `com.microsoft.MultiHeadAttention` |
| rows without a size masked | key lengths, which the function `lengths_of_keys` makes of the merge's |
| the mean of the scores over the heads | one product of queries and keys over all heads |

Node by node the scores of every head go to memory and back from each step to the next, most of them in fp32. The
operator keeps them, and reads no row behind a length: so rows need not be masked, and may lie one behind the other.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from algm_deploy.bundle.graphs import DOMAIN
from algm_deploy.lowering.patterns import CONTRIB, Chain, linear_of, nodes_of, number, only_user, pair, stand_in
from algm_deploy.lowering.portable import operator_of
from algm_deploy.ops.bodies import OPSET, Body
from algm_deploy.ops.schema import SCHEMAS

LENGTHS_OF_KEYS = "lengths_of_keys"
_Lengths = dict[tuple[object, ...], ir.Value]  # by the merge's, and by the rows of queries and keys


class _Crossed(NamedTuple):
    """Attention of queries (B, K, D) to keys and values (B, S, D), valid rows of which have a `size` (B, S).

    scores: (B, H, K, S), what goes into the softmax before rows are masked. mixed: (B, K, D).
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    heads: int
    scale: float
    size: ir.Value | None
    scores: ir.Value
    mixed: ir.Value


def fuse_cross_attention(model: ir.Model, counts: Counter[str]) -> None:
    """Rewrites such attention of a model for CUDA, where ONNX Runtime's memory-efficient kernel takes it."""
    lengths: _Lengths = {}
    for softmax in nodes_of(model.graph, "Softmax"):
        found = _crossed(softmax)
        length = _length(found.size) if found is not None else None
        if found is None or not _fits(found) or (found.size is not None and length is None):
            continue
        _fuse(model, found, length, lengths)
        counts["cross_attention"] += 1


def _fits(found: _Crossed) -> bool:
    """Whether the memory-efficient kernel takes it however few rows there are. The plain one, which takes the rest,
    reads where images start as something else."""
    width = found.query.shape[2] if found.query.shape is not None else None
    return found.query.dtype == ir.DataType.FLOAT16 and isinstance(width, int) and width % (8 * found.heads) == 0


# --- what is looked for ----------------------------------------------------------------------------------------------


def _crossed(softmax: ir.Node) -> _Crossed | None:
    """The attention that a softmax belongs to, if it is one."""
    scores, mask = _unmasked(softmax.inputs[0])
    scaled = _made_by(_narrow(scores), "Mul")
    factor = number(pair(scaled)[1]) if scaled is not None else None
    product = _made_by(pair(scaled)[0], "MatMul") if scaled is not None else None
    mix = only_user(_narrowed(softmax.outputs[0]), "MatMul")
    turned = only_user(mix.outputs[0], "Transpose") if mix is not None else None
    mixed = only_user(turned.outputs[0], "Reshape") if turned is not None else None
    if scores is None or factor is None or product is None or mix is None or turned is None or mixed is None:
        return None
    over_keys = softmax.attributes.get_int("axis", -1) in (-1, 3)
    if not over_keys or turned.attributes["perm"].as_ints() != (0, 2, 1, 3):
        return None
    heads = [_by_head(value, perm) for value, perm in zip(pair(product), ((0, 2, 1, 3), (0, 2, 3, 1)), strict=True)]
    heads.append(_by_head(pair(mix)[1], (0, 2, 1, 3)))
    size = _size_of(mask, (1, 2))
    if None in heads or (mask is not None and size is None):
        return None
    (query, count), *others = (one for one in heads if one is not None)
    (key, _), (value, _) = others
    widths = {rows.shape[2] for rows in (query, key, value, mixed.outputs[0]) if rows.shape is not None}
    if len(widths) > 1 or any(heads != count for _, heads in others):
        return None
    return _Crossed(query, key, value, count, factor, size, scores, mixed.outputs[0])


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    producer = value.producer() if value is not None else None
    return producer if producer is not None and producer.op_type == op_type else None


def _unmasked(scores: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    """What the softmax is given where a mask is true, and the mask, if there is one."""
    where = _made_by(scores, "Where")
    if where is None or number(where.inputs[2]) != -np.inf:
        return scores, None
    return where.inputs[1], where.inputs[0]


def _narrow(value: ir.Value | None) -> ir.Value | None:
    """The value itself, or what was cast to it."""
    cast = _made_by(value, "Cast")
    return value if cast is None else cast.inputs[0]


def _narrowed(value: ir.Value) -> ir.Value:
    """The value itself, or what it is cast to."""
    cast = only_user(value, "Cast")
    return value if cast is None else cast.outputs[0]


def _by_head(value: ir.Value, perm: tuple[int, ...]) -> tuple[ir.Value, int] | None:
    """The rows (B, S, D) whose heads, in an order of axes (B, S, H, D / H), are a value; and the number of heads."""
    turned = _made_by(value, "Transpose")
    parted = _made_by(turned.inputs[0], "Reshape") if turned is not None else None
    if turned is None or parted is None or turned.attributes["perm"].as_ints() != perm:
        return None
    rows, shape = parted.inputs[0], parted.outputs[0].shape
    if rows is None or rows.shape is None or shape is None or (len(rows.shape), len(shape)) != (3, 4):
        return None
    heads, side = shape[2:]
    whole = isinstance(heads, int) and isinstance(side, int) and heads * side == rows.shape[2]
    return (rows, heads) if whole and isinstance(heads, int) else None


def _size_of(mask: ir.Value | None, axes: tuple[int, ...]) -> ir.Value | None:
    """The sizes (B, S) of rows for which a mask is true where they are above zero, with these axes put in."""
    wide = _made_by(mask, "Unsqueeze")
    above = _made_by(wide.inputs[0], "Greater") if wide is not None else None
    if wide is None or above is None or number(above.inputs[1]) != 0:
        return None
    told = wide.inputs[1].const_value if wide.inputs[1] is not None else None
    return above.inputs[0] if told is not None and tuple(told.numpy().tolist()) == axes else None


def _length(size: ir.Value | None) -> ir.Value | None:
    """The lengths (B) that come with the sizes: a merge that leaves both has its rows of a size in front."""
    merge = size.producer() if size is not None else None
    schema = SCHEMAS.get(operator_of(merge.op_type)) if merge is not None and merge.domain == DOMAIN else None
    if merge is None or schema is None or [output.name for output in schema.outputs][1::2] != ["size", "length"]:
        return None
    return merge.outputs[3] if size is merge.outputs[1] else None


# --- what is put in its place ----------------------------------------------------------------------------------------


def _fuse(model: ir.Model, found: _Crossed, length: ir.Value | None, lengths: _Lengths) -> None:
    before = found.mixed.producer()
    assert before is not None
    add = Chain(model.graph, before, str(before.name))
    query, key, value = found.query, found.key, found.value
    told: list[ir.Value | None] = []
    if length is not None:
        assert query.shape is not None and key.shape is not None
        rows_of = length, query.shape[1], key.shape[1]
        if rows_of not in lengths:  # layers that read the same rows share them
            lengths[rows_of] = add(LENGTHS_OF_KEYS, query, key, length, domain=DOMAIN)
            function = _lengths_of_keys()
            model.functions[function.identifier()] = function
        told = [None, lengths[rows_of]]
        for rows in (key, value):
            _leave_unmasked(rows, found.size)
    attributes = {"num_heads": found.heads, "scale": found.scale}
    mixed = add("MultiHeadAttention", query, key, value, *told, domain=CONTRIB, **attributes)
    for mean in [use.node for use in found.scores.uses() if _is_mean_over_heads(use.node)]:
        _mean_by_product(model.graph, mean, found)
    stand_in(found.mixed, mixed)


def _leave_unmasked(rows: ir.Value, size: ir.Value | None) -> None:
    """Lets a linear layer read rows without a size as they are."""
    linear = linear_of(rows)
    masked = _made_by(linear.x, "Where") if linear is not None else None
    if linear is None or masked is None or _size_of(masked.inputs[0], (2,)) is not size:
        return
    product = linear.product.producer()
    assert product is not None
    product.replace_input_with(list(product.inputs).index(linear.x), masked.inputs[1])


def _is_mean_over_heads(node: ir.Node) -> bool:
    axes = node.inputs[1].const_value if len(node.inputs) == 2 and node.inputs[1] is not None else None
    over_heads = node.op_type == "ReduceMean" and axes is not None and axes.numpy().tolist() == [1]
    if not over_heads or node.attributes.get_int("keepdims", 1) != 0:
        return False
    turned = only_user(node.outputs[0], "Transpose")
    return turned is not None and turned.attributes["perm"].as_ints() == (0, 2, 1)


def _mean_by_product(graph: ir.Graph, mean: ir.Node, found: _Crossed) -> None:
    """The mean (B, S, K), one row a key. It is scaled in fp32, where nothing is too small; before that, the sum over
    all heads must fit into 16 bits, as one head's had to."""
    turned = only_user(mean.outputs[0], "Transpose")
    assert turned is not None
    add = Chain(graph, turned, str(turned.name))
    product = add("MatMul", found.key, add("Transpose", found.query, perm=[0, 2, 1]))
    wide = add("Cast", product, to=ir.DataType.FLOAT)
    for value, example in ((product, found.key), (wide, turned.outputs[0])):
        value.shape, value.type = turned.outputs[0].shape, example.type
    share = add.constant(np.array(found.scale / found.heads, np.float32))
    stand_in(turned.outputs[0], add("Mul", wide, share))


def _lengths_of_keys() -> ir.Function:
    """Queries (B, K, D), keys (B, S, D), length (B) -> (3 B + 2) int32, as ONNX Runtime's operators are told lengths on
    CUDA: the lengths, then the row at which each image starts, of queries and of keys, the end included.

    A function, so that whoever moves keys elsewhere finds one node that asks where they lie.
    """
    inputs = [ir.Value(name=name) for name in ("queries", "keys", "length")]
    *rows, length = inputs
    body = Body()
    images = body("Squeeze", body.size_of(length, 0), [0])
    starts = []
    for value in rows:
        # Range takes its numbers from the host and leaves its result on the device: nothing is copied in between.
        each = body("Squeeze", body.size_of(value, 1), [0])
        starts.append(body("Range", 0, body("Add", body("Mul", images, each), 1), each))
    told = body("Cast", body("Concat", length, *starts, axis=0), to=ir.DataType.INT32)
    told.name = "told"
    for made in (value for node in body.nodes for value in node.outputs):
        made.shape = None  # known of constants alone, and without their types
    graph = ir.Graph(inputs, [told], nodes=body.nodes, opset_imports={"": OPSET}, name=LENGTHS_OF_KEYS)
    return ir.Function(DOMAIN, LENGTHS_OF_KEYS, "", graph=graph, attributes=[])
