"""Sums with a residual and layer normalisations, in one operator each.

| graph for CUDA | here | in fp16, with the library |
|---|---|---|
| LayerNormalization(residual + (product + bias)) | `com.microsoft.SkipLayerNormalization` | `bias_skip_norm` |
| residual + (product + bias) that no norm follows, as in front of a merge | as it is | `bias_skip` |
| LayerNormalization of something else | as it is | `layer_norm` |
"""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from algm_deploy.bundle.graphs import DOMAIN
from algm_deploy.lowering.patterns import (
    CONTRIB,
    Linear,
    fits_rows,
    fp32,
    is_constant,
    linear_of,
    nodes_of,
    pair,
    replace,
    stand_in,
)


def sums_and_norms(graph: ir.Graph, own: bool, counts: Counter[str]) -> None:
    """Rewrites all of them. `own`: the library's operators in 16 bits."""
    for norm in nodes_of(graph, "LayerNormalization"):
        total = norm.inputs[0]
        add = total.producer() if total is not None and _is_usual(norm) else None
        found = _residual_sum(add)
        if total is None or add is None or found is None:
            continue
        linear, residual = found
        if own and _fits(linear, residual):
            new = _own_norm(graph, add, norm, linear, residual)
        else:
            new = _contrib_norm(norm, linear, residual)
            counts["skip_layer_norm"] += 1
        graph.insert_before(add, new)
        stand_in(norm.outputs[0], new.outputs[0])
        stand_in(total, new.outputs[-1])
        graph.remove([norm, add], safe=True)
    if own:
        _sums(graph)
        _norms(graph)


def _sums(graph: ir.Graph) -> None:
    """The sums that no norm follows."""
    for node in nodes_of(graph, "Add"):
        found = _residual_sum(node)
        if found is not None and _fits(*found):
            linear, residual = found
            inputs = [linear.product, *fp32(graph, node, linear.bias), residual]
            replace(graph, node, ir.node("bias_skip", inputs, domain=DOMAIN, name=node.name))


def _norms(graph: ir.Graph) -> None:
    """The norms of 16-bit rows that follow no such sum: ONNX Runtime's takes nearly three times as long as the
    library's with a sum."""
    for norm in nodes_of(graph, "LayerNormalization"):
        x = norm.inputs[0]
        if x is not None and _is_usual(norm) and fits_rows(x):
            inputs = [x, *fp32(graph, norm, *norm.inputs[1:])]
            replace(graph, norm, ir.node("layer_norm", inputs, _epsilon(norm), domain=DOMAIN, name=norm.name))


def _residual_sum(add: ir.Node | None) -> tuple[Linear, ir.Value] | None:
    """Linear layer and residual of a node that adds them, if nobody else reads the layer's result."""
    if add is None or add.op_type != "Add":
        return None
    for branch, residual in (pair(add), pair(add)[::-1]):
        linear = linear_of(branch)
        if linear is not None and len(list(branch.uses())) == 1 and not is_constant(residual):
            return linear, residual
    return None


def _fits(linear: Linear, residual: ir.Value) -> bool:
    """Whether a sum is for the library: of 16-bit rows (B, S, D), to a residual of that very shape, with a bias (D)."""
    rows, bias = linear.product.shape, linear.bias.shape
    if rows is None or bias is None or not fits_rows(linear.product):
        return False
    return residual.shape == rows and list(bias) == list(rows)[2:]


def _is_usual(norm: ir.Node) -> bool:
    """Whether LayerNormalization takes each row of (B, S, D) for itself, and has a shift."""
    return len(norm.inputs) == 3 and norm.attributes.get_int("axis", -1) in (-1, 2)


def _own_norm(graph: ir.Graph, before: ir.Node, norm: ir.Node, linear: Linear, residual: ir.Value) -> ir.Node:
    """The library's: the norm is its first output, the sum its last."""
    bias, weight, shift = fp32(graph, before, linear.bias, *norm.inputs[1:])
    inputs = [linear.product, bias, residual, weight, shift]
    return ir.node("bias_skip_norm", inputs, _epsilon(norm), domain=DOMAIN, num_outputs=2, name=norm.name)


def _contrib_norm(norm: ir.Node, linear: Linear, residual: ir.Value) -> ir.Node:
    """ONNX Runtime's, with the same first and last output."""
    inputs = [residual, linear.product, *norm.inputs[1:], linear.bias]
    new = ir.node("SkipLayerNormalization", inputs, _epsilon(norm), domain=CONTRIB, num_outputs=4, name=norm.name)
    for index in (1, 2):
        new.outputs[index].name = ""
    return new


def _epsilon(norm: ir.Node) -> dict[str, float]:
    return {"epsilon": norm.attributes.get_float("epsilon", 1e-5)}
