"""A deployed network to ONNX: one `torch.export`, one translation, bare nodes of domain `algm`.

The result is the base every runtime's graph is made from. Opset 18 is what the exporter writes without converting. An
exported program can be translated only once, so everything else starts from the ONNX.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import onnx_ir as ir
import torch
from onnxscript import opset18, values
from torch import Tensor, nn

from algm_deploy.bundle.graphs import DOMAIN, VERSION
from algm_deploy.bundle.signature import (
    CLAP_THRESHOLD,
    GBM_THRESHOLD,
    mask_names,
    merge_names,
    output_names,
    threshold_defaults,
)
from algm_deploy.errors import ExportError
from algm_deploy.garbage import no_collection
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.vit import MergeInputs
from algm_deploy.ops.bodies import OPSET
from algm_deploy.ops.schema import SCHEMAS
from algm_deploy.recipe.plan import Merge, MergePlan

IR_VERSION = 10  # what ONNX Runtime 1.20 reads, the oldest supported


class _Entry(nn.Module):
    """Flat inputs and outputs around a deployed network."""

    def __init__(self, deployed: Deployed, plan: MergePlan) -> None:
        super().__init__()
        self.deployed, self.names = deployed, tuple(threshold_defaults(plan))

    def forward(self, image: Tensor, thresholds: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = dict(zip(self.names, thresholds, strict=True))
        unused = torch.zeros(())  # a threshold no merge of the plan reads
        inputs = MergeInputs(given.get(CLAP_THRESHOLD, unused), given.get(GBM_THRESHOLD, unused))
        tail, counts, decisions = self.deployed(image, inputs)
        return tail, counts, *decisions


def base_onnx(deployed: Deployed, plan: MergePlan, image_dtype: str = "uint8") -> ir.Model:
    """Exports a deployed network whose slots `plan` filled.

    Inputs: `image` (batch, 3, H, W) of `image_dtype`, the plan's thresholds as fp32 scalars. Outputs: `output_names`,
    then `mask_names`.
    The batch axis is symbolic; token axes are named `tokens_clap_1`, `tokens_gbm_5`, ... A network in bf16 is written
    in fp32 with the weights it has: few runtimes know the operators of opset 18 in bf16, and those that compute in bf16
    are told so by the graphs that are made for them.

    Raises:
        ExportError: the exporter fixed the batch, did not know an operation, or would have written a scatter that
            reduces.
    """
    names = tuple(threshold_defaults(plan))
    if any(parameter.dtype == torch.bfloat16 for parameter in deployed.parameters()):
        deployed = copy.deepcopy(deployed).float()
    image = torch.zeros(2, 3, *deployed.network.image_size, dtype=getattr(torch, image_dtype))
    example = image, tuple(torch.ones(()) for _ in names)
    dynamic: Any = ({0: torch.export.Dim("batch")}, tuple({} for _ in names))
    with torch.no_grad(), _quiet(), _brisk():
        try:
            entry = _Entry(deployed, plan).eval()
            program = torch.export.export(entry, example, dynamic_shapes=dynamic, strict=False)
            _refuse_reductions(str(node.target) for node in program.graph.nodes)
            translated = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                input_names=["image", *names],
                output_names=[*output_names(plan, deployed.output), *mask_names(deployed.network)],
                custom_translation_table=_translations(),
                verbose=False,
            )
        except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
            raise ExportError(f"this network cannot be written as ONNX: {_reason(error)}") from error
    assert translated is not None
    model = translated.model
    _refuse_reductions(f"{node.op_type}.{_reduction(node)}" for node in model.graph)
    _name_axes(model, plan)
    _name_nodes(model)
    _strip(model)
    _check(model)
    return model


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    bare = {getattr(torch.ops.algm, name).default: _bare_node(name) for name in SCHEMAS}
    standard = torch.ops.algm_standard
    return bare | {standard.quantized.default: _quantized, standard.dequantized.default: _dequantized}


def _quantized(x: Any, scale: Any, zero_point: Any) -> Any:
    """The standard pair of nodes, which runtimes look for in front of a product."""
    return opset18.DequantizeLinear(opset18.QuantizeLinear(x, scale, zero_point), scale, zero_point)


def _dequantized(levels: Any, steps: Any) -> Any:
    return opset18.DequantizeLinear(levels, steps, axis=1)


def _bare_node(name: str) -> Callable[..., Any]:
    """Writes an `algm` call as one node: leading arguments are its inputs, the others its attributes."""
    op = values.Op(values.Opset(DOMAIN, VERSION), name, SCHEMAS[name])
    arguments = [argument.name for argument in getattr(torch.ops.algm, name).default._schema.arguments]
    inputs = len(SCHEMAS[name].inputs)

    def translate(*args: Any) -> Any:
        return op(*args[:inputs], **dict(zip(arguments[inputs:], args[inputs:], strict=True)))

    return translate


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences what the exporter says about packages it misses and about its own deprecations, nothing of ours."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _brisk() -> Iterator[None]:
    """Leaves out two things that PyTorch and Python do meanwhile, each a tenth of the time; the graph is the same.

    Most objects of a trace stay until it ends, so looking through them for garbage finds little. And where axes are
    symbols, remembering the shapes that an operation gives costs more than to find them again.
    """
    from torch._dynamo import config  # takes over a second, and commands that export nothing need it not

    with no_collection(), config.patch(fake_tensor_cache_enabled=False):
        yield


def _refuse_reductions(operations: Iterable[str]) -> None:
    """Refuses scatters that reduce: the exporter drops the mean without a word, and runtimes ignore or reorder sums."""
    for name in operations:
        if re.search(r"scatter_reduce|index_reduce|Scatter\w+\.(add|mul|min|max)", name):
            raise ExportError(
                f"this network merges rows with {name}, which ONNX runtimes do not compute as PyTorch does: "
                "write the merge as a matrix product with a 0/1 matrix"
            )


def _reduction(node: ir.Node) -> str:
    attribute = node.attributes.get("reduction")
    return attribute.as_string() if attribute is not None and node.op_type.startswith("Scatter") else "none"


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause; the outer ones tell how to debug the exporter."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), type(error).__name__)


def _name_axes(model: ir.Model, plan: MergePlan) -> None:
    """Replaces the exporter's symbols (s40, u0) by what the axes are."""
    names = {str(model.graph.inputs[0].shape[0]): "batch"}  # type: ignore[index]
    merges = (node for node in model.graph if node.op_type in get_args(Merge))
    for node, merge in zip(merges, merge_names(plan), strict=True):
        # ToMe leaves a constant count, which needs no name and is in none of the axes below.
        names[str(node.outputs[0].shape[1])] = f"tokens_{merge}"  # type: ignore[index]
    for value in _all_values(model):
        if value.shape is not None:
            value.shape = ir.Shape([d if isinstance(d, int) else _renamed(str(d), names) for d in value.shape])


def _renamed(dimension: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\b[su]\d+\b", lambda match: names.get(match.group(), match.group()), dimension)


def _all_values(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    for node in model.graph:
        yield from node.outputs


def _name_nodes(model: ir.Model) -> None:
    """Nodes and constants are named by the module they come from: `encoder.blocks.0.attn.qkv/MatMul`.

    A node's output has its name; of several each the schema's behind a colon: `encoder.blocks.0.merge/clap:size`.
    """
    taken: dict[str, int] = {}
    fixed = set(model.graph.outputs)
    for node in model.graph:
        scopes = re.findall(r"'([^']*)'", node.metadata_props.get("pkg.torch.onnx.name_scopes", ""))
        module = _module_name(scopes[-2] if len(scopes) > 1 else "")
        node.name = _unique(f"{module}/{node.op_type}" if module else node.op_type, taken)
        for index, value in enumerate(node.outputs):
            if value not in fixed:
                value.name = node.name if len(node.outputs) == 1 else f"{node.name}:{_role(node, index)}"
    for name, value in list(model.graph.initializers.items()):
        consumer = next(iter(value.uses()), None)
        if (name.startswith("val_") or not _module_name(name)) and consumer is not None:
            new = _unique(f"{str(consumer.node.name).split('/')[0]}.constant", taken)
        else:
            new = _module_name(name)
        if new != name:
            value.name = new


def _role(node: ir.Node, index: int) -> str:
    return SCHEMAS[node.op_type].outputs[index].name if node.domain == DOMAIN else str(index)


def _module_name(scope: str) -> str:
    if scope.startswith("_"):  # not a module but a hook of the exporter
        return ""
    return re.sub(r"^deployed\.(model\.)?|^deployed$", "", scope)


def _unique(name: str, taken: dict[str, int]) -> str:
    taken[name] = taken.get(name, 0) + 1
    return name if taken[name] == 1 else f"{name}_{taken[name]}"


def _strip(model: ir.Model) -> None:
    """Removes stack traces and other notes of the exporter: they hold paths of the machine that exported."""
    model.ir_version = IR_VERSION
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for value in [*_all_values(model), *model.graph.initializers.values()]:
        value.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None


def _check(model: ir.Model) -> None:
    for value in (model.graph.inputs[0], *model.graph.outputs):
        if value.shape is None or str(value.shape[0]) != "batch":
            raise ExportError(f"the exporter fixed the batch of {value.name!r} to {value.shape}; expected a free axis")
