"""Graphs for TensorRT run by ONNX's own interpreter, with the plugins in NumPy; and the parts of one in a chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from algm_deploy.bundle.graphs import PLUGINS
from algm_deploy.lowering.tensorrt_stretches import stretches
from algm_deploy.ops import reference
from algm_deploy.ops.label_map import reference as label_map_reference
from algm_deploy.ops.schema import WORDS


def named(attribute: str, number: int) -> str:
    return WORDS[attribute][number]


class Clap(OpRun):
    """The plugin `clap` in NumPy, for ONNX's interpreter; its fifth output is the row count."""

    op_domain = "algm"

    def _run(self, tokens: Any, size: Any, threshold: Any, **given: Any) -> Any:
        words = {key: named(key, given[key]) for key in ("semantics", "batch", "order")}
        grid, window = tuple(given["grid"]), tuple(given["window"])
        out = reference.clap(tokens, size, threshold, grid=grid, window=window, prefix=given["prefix"], **words)
        return (*out, np.int64(out[0].shape[1]))


class Gbm(OpRun):
    """The plugin `gbm` in NumPy."""

    op_domain = "algm"

    def _run(self, tokens: Any, size: Any, map: Any, length: Any, threshold: Any, **given: Any) -> Any:
        words = {key: named(key, given[key]) for key in ("semantics", "batch", "rule")}
        numbers = {"prefix": given["prefix"], "divisor": given["divisor"]}
        out = reference.gbm(tokens, size, map, length, threshold, **numbers, **words)
        return (*out, np.int64(out[0].shape[1]))


class LabelMap(OpRun):
    """The plugin `label_map` in NumPy: int32 labels."""

    op_domain = "algm"

    def _run(self, scores: Any, map: Any, **given: Any) -> Any:
        grid, size = tuple(given["grid"]), tuple(given["size"])
        return (label_map_reference(scores, map, prefix=given["prefix"], grid=grid, size=size).astype(np.int32),)


class Unmerge(OpRun):
    """The plugin `unmerge` in NumPy."""

    op_domain = "algm"

    def _run(self, values: Any, map: Any, **given: Any) -> Any:
        return (reference.unmerge(values, map, prefix=given["prefix"]),)


class DeformableAttention(OpRun):
    """The plugin `deformable_attention` in NumPy."""

    op_domain = "algm"

    def _run(self, value: Any, locations: Any, shares: Any, **given: Any) -> Any:
        return (reference.deformable_attention(value, locations, shares, shapes=given["shapes"]),)


STAND_INS: list[type[OpRun]] = [Clap, Gbm, Unmerge, LabelMap, DeformableAttention]
for stand_in, name in zip(STAND_INS, PLUGINS, strict=True):
    stand_in.__name__ = name


def evaluate(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    """Outputs by ONNX's own interpreter, which does not know the attribute that is for TensorRT's parser alone."""
    known = onnx.ModelProto()
    known.CopyFrom(model)
    for node in known.graph.node:
        kept = [attribute for attribute in node.attribute if attribute.name != "TRT_decomposable"]
        del node.attribute[:]
        node.attribute.extend(kept)
    found: list[Any] = ReferenceEvaluator(known, new_ops=STAND_INS).run(None, dict(feeds))
    return found


def chained(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    """`evaluate` of the graph's parts, one after the other, with PyTorch's operators as the merges between them."""
    parts, merges = stretches(ir.from_proto(model))
    made = dict(feeds)
    for part, merge in zip(map(ir.to_proto, parts), [*merges, None], strict=True):
        names = [value.name for value in part.graph.output]
        taken = {value.name: made[value.name] for value in part.graph.input}
        made |= zip(names, evaluate(part, taken), strict=True)
        if merge is not None:
            inputs = [torch.from_numpy(np.asarray(made[name])) for name in merge.inputs]
            merged = getattr(torch.ops.algm, merge.kind)(*inputs, *merge.attributes)
            made |= zip(merge.outputs, (tensor.numpy() for tensor in merged), strict=True)
    return [made[value.name] for value in model.graph.output]
