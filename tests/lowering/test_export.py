"""Export: the translated graph runs like the network it came from, and says what it is in readable names."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from toys import FAMILIES, pictures

from algm_deploy.bundle.signature import merge_names, output_names, threshold_defaults
from algm_deploy.errors import ExportError
from algm_deploy.lowering.export import base_onnx
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.segmenter import Segmenter
from algm_deploy.models.vit import Tokens
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE

Exports = Callable[[str], Any]


def test_runs_like_the_network(exported: Exports, configuration: str, blob_images: Any) -> None:
    """Every batch, images of different lengths included; scores to the tolerance of the golden networks."""
    export = exported(configuration)
    images = blob_images(5)
    for batch in (1, 2, 3, 5):
        found, expected = export.run_onnx(images[:batch]), export.run_torch(images[:batch])
        assert list(found) == list(expected)
        for name, value in found.items():
            reference = expected[name].numpy()
            assert (value.dtype, value.shape) == (reference.dtype, reference.shape)
            if name == "scores":
                # 16-bit rounding in another order: a few units in the last place of scores around 2.
                tolerance = 2e-2 if export.configuration.half else 2e-5
                np.testing.assert_allclose(value, reference, rtol=0, atol=tolerance)
            elif name == "labels":
                assert (value != reference).mean() < 1e-3  # ties within rounding
            else:
                np.testing.assert_array_equal(value, reference)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "decoder"), [case for case in FAMILIES if case[1] != "mask_transformer"])
def test_other_families_run_like_the_network(exported_toy: Callable[..., Any], family: str, decoder: str) -> None:
    """Decoders that unmerge by themselves, at several depths; no cls, or more tokens than that; random weights."""
    export = exported_toy(family, decoder)
    network = export.deployed.network
    images = pictures(network)
    for batch in (1, 3):
        found, expected = export.run_onnx(images[:batch]), export.run_torch(images[:batch])
        scores, reference = found.pop("scores"), expected.pop("scores").numpy()
        np.testing.assert_allclose(scores, reference, rtol=0, atol=2e-6 * max(10, abs(reference).max()))
        for name, value in found.items():
            np.testing.assert_array_equal(value, expected[name])
    assert found["token_counts"].max() == network.grid[0] * network.grid[1] > found["token_counts"].min()


def test_images_of_a_batch_differ_in_length(exported: Exports, blob_images: Any) -> None:
    """Otherwise the comparison above would say nothing about padding."""
    counts = exported("published").run_onnx(blob_images(5))["token_counts"]
    assert all(len(set(column)) > 1 for column in counts.T.tolist())
    assert (counts[:, 1] < counts[:, 0]).all()
    assert (counts[:, 0] < 64).any()


def test_inputs_outputs_and_axes(exported: Exports, configuration: str) -> None:
    export = exported(configuration)
    graph, plan = export.base.graph, export.plan
    assert [value.name for value in graph.inputs] == ["image", *threshold_defaults(plan)]
    assert [value.name for value in graph.outputs] == list(output_names(plan, export.configuration.output))
    assert str(graph.inputs[0].shape) == "[batch,3,128,128]"
    assert all(value.shape.rank() == 0 and value.dtype == ir.DataType.FLOAT for value in graph.inputs[1:])
    assert all(str(value.shape).startswith("[batch,") for value in graph.outputs)
    axes = {str(axis) for node in graph for value in node.outputs for axis in value.shape if not isinstance(axis, int)}
    known = "|".join(["batch", *(f"tokens_{merge}" for merge in merge_names(plan))])
    assert all(re.fullmatch(rf"(?:{known})(?: [+-] \d+)?", axis) for axis in axes)
    assert "batch" in axes


def test_thresholds_steer_one_file(exported: Exports, blob_images: Any) -> None:
    """N' grows with tau; at 1.5 CLAP merges nothing, and GBM nothing at a thousand deviations."""
    export, images = exported("published"), blob_images(2)
    counts = [export.run_onnx(images, clap_threshold=tau)["token_counts"][:, 0] for tau in (-1, 0.7, 0.99, 1.5)]
    assert counts[0].tolist() == [16, 16]
    assert counts[3].tolist() == [64, 64]
    totals = [sum(count.tolist()) for count in counts]
    assert totals == sorted(set(totals))
    nothing = export.run_onnx(images, clap_threshold=1.5, gbm_threshold=1000)
    assert nothing["token_counts"].tolist() == [[64, 64], [64, 64]]
    everything = export.run_onnx(images, clap_threshold=-1, gbm_threshold=-1000)
    assert everything["token_counts"].tolist() == [[16, 8], [16, 8]]


def test_nodes_and_weights_have_readable_names(exported: Exports, configuration: str) -> None:
    graph = exported(configuration).base.graph
    names = [node.name for node in graph]
    assert len(set(names)) == len(names)
    plain = re.compile(r"(?:(?:encoder|decoder|model)[\w.]*/)?[A-Za-z0-9]+(?:_map)?(?:_\d+)?")
    assert [name for name in names if not plain.fullmatch(name)] == []
    assert "encoder.blocks.0.attn.qkv/MatMul" in names
    assert "encoder.blocks.0.attn/attention" in names
    outputs = {value.name for value in graph.outputs}
    for node in graph:
        found = {str(value.name).removeprefix(str(node.name)) for value in node.outputs} - outputs
        assert all(re.fullmatch(r"|:[a-z]+", name) for name in found), (node.name, found)
    weights = list(graph.initializers)
    assert [name for name in weights if name.startswith("val_")] == []
    assert "encoder.pos_embed" in weights
    assert {value.name for value in graph.initializers.values()} == set(weights)


def test_merges_are_named_by_their_block(exported: Exports) -> None:
    nodes = [node for node in exported("several_gbm").base.graph if node.op_type in ("clap", "gbm")]
    assert [(node.name, str(node.outputs[0].shape[1])) for node in nodes] == [
        ("encoder.blocks.0.merge/clap", "tokens_clap_1"),
        ("encoder.blocks.1.merge/gbm", "tokens_gbm_2"),
        ("encoder.blocks.3.merge/gbm", "tokens_gbm_4"),
    ]
    assert [node.attributes["divisor"].as_float() for node in nodes[1:]] == [2, 4]


def test_no_trace_of_the_machine(exported: Exports, configuration: str) -> None:
    """The exporter notes stack traces with the paths of source files."""
    content = exported(configuration).content
    for trace in (b".py", b"site-packages", b"/home", b"/tmp", b"/root", b"Traceback", b"stack_trace", b'File "'):
        assert trace not in content


def test_valid_onnx(exported: Exports, configuration: str) -> None:
    export = exported(configuration)
    onnx.checker.check_model(export.content)
    model = onnx.load_from_string(export.content)
    assert model.ir_version == 10
    assert {opset.domain: opset.version for opset in model.opset_import} == {"": 18, "algm": 1}
    assert export.bodies == sum(node.domain == "algm" for node in export.base.graph)
    assert len(model.functions) <= export.bodies


def test_half_precision_keeps_decisions_in_fp32(exported: Exports) -> None:
    export = exported("half")
    graph = export.base.graph
    weights = [value for value in graph.initializers.values() if value.shape.rank() == 2]
    assert len(weights) > 20
    assert {value.dtype for value in weights} == {ir.DataType.FLOAT16}
    merges = [node for node in graph if node.op_type in ("clap", "gbm")]
    for node in merges:
        assert [value.dtype for value in node.outputs[:2]] == [ir.DataType.FLOAT16, ir.DataType.FLOAT]
        assert node.inputs[0].dtype == ir.DataType.FLOAT16
        assert node.inputs[-1].dtype == ir.DataType.FLOAT  # the threshold
    assert graph.outputs[0].dtype == ir.DataType.FLOAT
    for function in export.portable.functions.values():
        if function.name in ("clap", "gbm"):
            kinds = [node.attributes["to"].as_int() for node in function if node.op_type == "Cast"]
            assert ir.DataType.FLOAT in kinds
            assert ir.DataType.FLOAT16 not in kinds


# ------------------------------------------------------------------------------------------- what cannot be exported


class Slot(nn.Module):
    """A slot that changes values by a function."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, tokens: Tokens, inputs: Any) -> Tokens:
        return tokens._replace(values=self.change(tokens.values))


def mean_of_rows(x: Tensor) -> Tensor:
    """Token merging as published elsewhere: exported without an error, and then wrong by more than one."""
    return torch.zeros_like(x).scatter_reduce(1, torch.zeros_like(x, dtype=torch.int64), x, "mean", include_self=False)


def sum_of_rows(x: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter_add(1, torch.zeros_like(x, dtype=torch.int64), x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x * 2 if x.sum() > 0 else x, "data-dependent"),
        (lambda x: x.view(2, -1, 16), "batch"),
        (lambda x: x + torch.linalg.svdvals(x)[:, :1, None], "_linalg_svd"),
        (mean_of_rows, "merges rows with aten.scatter_reduce.two"),
        (sum_of_rows, "merges rows with ScatterElements.add"),
    ],
    ids=["branch", "fixed_batch", "unknown_operation", "scatter_mean", "scatter_add"],
)
def test_networks_that_cannot_be_exported(change: Callable[[Tensor], Tensor], message: str) -> None:
    network = Network("segmenter", 16, 1, 2, 3, (32, 32), decoder="linear")
    model = Segmenter(network).eval().requires_grad_(False)
    model.blocks[0].merge = Slot(change)
    with pytest.raises(ExportError, match=message) as caught:
        base_onnx(Deployed(model, network, "scores").eval(), DENSE)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert gc.isenabled(), "an export that fails leaves the process as it was"
