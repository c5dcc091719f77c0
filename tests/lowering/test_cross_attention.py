"""Attention of SegViT's queries as one operator: the same results, whatever merges, and where it is left as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from graph_stand_ins import joined_on_the_host
from graph_stand_ins import opened as opened_on_the_cpu
from toys import SURE, TAU, pictures

from algm_deploy.lowering import cross_attention, onnxruntime, onnxruntime_segments
from algm_deploy.lowering.cross_attention import LENGTHS_OF_KEYS
from algm_deploy.lowering.onnxruntime import rewrite
from algm_deploy.lowering.onnxruntime_segments import segments
from algm_deploy.runners.onnxruntime import graphs as graphs_module
from algm_deploy.runners.onnxruntime.graphs import SegmentedSession

# What merges of both kinds: some, nothing, everything, and each alone.
THRESHOLDS = [(0.8, 0.5), (2.0, 1e6), (-2.0, -1e6), (-2.0, 1e6), (2.0, -1e6)]
MOST_IMAGES = 8

Open = Callable[[ir.Model, str], ort.InferenceSession]


@pytest.fixture
def any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in fp16, in which a processor computes with errors of its own."""
    monkeypatch.setattr(cross_attention, "_fits", lambda _: True)
    monkeypatch.setattr(onnxruntime, "_fits_packed_attention", lambda *_: True)


@pytest.fixture
def opened(ort_library: Path, tmp_path: Path) -> Open:
    def open_session(model: ir.Model, name: str) -> ort.InferenceSession:
        ir.save(model, tmp_path / name)
        return opened_on_the_cpu(tmp_path / name, ort_library)

    return open_session


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def fused(model: ir.Model, library: bool = False) -> tuple[ir.Model, int]:
    """A copy of a portable model for CUDA, and how many attentions are one operator there."""
    model = model.clone()
    return model, rewrite(model, "cuda", custom_operators=library, single=False)["cross_attention"]


def run(session: ort.InferenceSession, image: np.ndarray, **thresholds: float) -> dict[str, np.ndarray]:
    wanted = {value.name for value in session.get_inputs()}
    scalars = {name: np.array(value, np.float32) for name, value in thresholds.items() if name in wanted}
    names = [value.name for value in session.get_outputs()]
    types = {"tensor(uint8)": np.uint8, "tensor(float)": np.float32, "tensor(float16)": np.float16}
    (taken,) = (types[value.type] for value in session.get_inputs() if value.name == "image")
    return dict(zip(names, session.run(names, {"image": image.astype(taken), **scalars}), strict=True))


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Scores up to fp32 sums in another order."""
    for name, value in expected.items():
        if name == "scores":
            np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-6 * max(10, abs(value).max()))
        else:
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_what_stands_there_in_fp16(exported_toy: Any) -> None:
    """One operator a layer, lengths once for each of the two merges, and neither masks nor scores by head."""
    portable = exported_toy("segvit", "atm", "labels", True).portable
    assert operators(portable).count("Softmax") == 4
    for library in (False, True):
        model, count = fused(portable, library)
        made = operators(model)
        assert count == made.count("MultiHeadAttention") == 3
        assert made.count(LENGTHS_OF_KEYS) == 2
        assert LENGTHS_OF_KEYS in {name for _, name, _ in model.functions}
        assert made.count("Softmax") == 1, "that of the classes"
        assert not {"Where", "Greater", "ReduceMean"} & set(made)


def test_where_it_is_left_as_it_is(exported_toy: Any) -> None:
    """In fp32, on the CPU, and with heads that the kernel does not take."""
    half = exported_toy("segvit", "atm", "labels", True).portable
    assert fused(exported_toy("segvit", "atm").portable)[1] == 0
    assert rewrite(half.clone(), "cpu", custom_operators=False, single=False)["cross_attention"] == 0
    narrow = half.clone()
    for value in [node.outputs[0] for node in narrow.graph if node.op_type == "Reshape"]:
        if value.shape is not None and list(value.shape)[2:] == [2, 8]:
            value.shape = ir.Shape([*list(value.shape)[:2], 4, 4])
    assert fused(narrow)[1] == 0


CHANGES: dict[str, tuple[str, Callable[[ir.Model, ir.Node], None]]] = {
    "rows of more than one": ("Greater", lambda model, node: node.replace_input_with(1, number(model, 1.0))),
    "other rows": ("Greater", lambda model, node: setattr(node, "op_type", "Less")),
    "sizes from elsewhere": ("Greater", lambda model, node: node.replace_input_with(0, number(model, 1.0))),
    "a mask that lets something through": ("Where", lambda model, node: replace_infinite(model, node)),
    "heads in another order": ("Transpose", lambda model, node: turn_otherwise(node, (0, 2, 3, 1), (0, 2, 1, 3))),
    "mixed rows in another order": ("Transpose", lambda model, node: turn_otherwise(node, (0, 2, 1, 3), (0, 2, 3, 1))),
    "shares of queries": ("Softmax", lambda model, node: node.attributes.update({"axis": ir.AttrInt64("axis", 2)})),
}


def number(model: ir.Model, value: float) -> ir.Value:
    name = f"number_{value}"
    tensor = ir.tensor(np.array(value, np.float32), name=name)
    made = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    return model.graph.initializers.setdefault(name, made)


def replace_infinite(model: ir.Model, node: ir.Node) -> None:
    told = node.inputs[2].const_value if node.inputs[2] is not None else None
    if told is not None and told.numpy() == -np.inf:
        node.replace_input_with(2, number(model, -1e4))


def turn_otherwise(node: ir.Node, found: tuple[int, ...], changed: tuple[int, ...]) -> None:
    behind = {use.node.op_type for use in node.outputs[0].uses()}
    if node.attributes["perm"].as_ints() == found and ("Reshape" in behind) == (found == (0, 2, 1, 3)):
        node.attributes["perm"] = ir.AttrInt64s("perm", changed)


@pytest.mark.parametrize("name", CHANGES)
def test_what_looks_alike_is_left_as_it_is(exported_toy: Any, name: str) -> None:
    model = exported_toy("segvit", "atm", "labels", True).portable.clone()
    op_type, change = CHANGES[name]
    for node in [node for node in model.graph if node.op_type == op_type]:
        change(model, node)
    assert fused(model)[1] == 0


@pytest.mark.usefixtures("any_type")
@pytest.mark.parametrize("decoder", ["atm", "prune"])
def test_equals_the_portable_graph(exported_toy: Any, opened: Open, decoder: str) -> None:
    """And PyTorch, with the thresholds of the plan."""
    exported = exported_toy("segvit", decoder)
    model, count = fused(exported.portable)
    assert count == 3
    session = opened(model, "fused")
    lengths = set()
    for images in (1, 2, 8):
        image = pictures(exported.deployed.network, images)
        for clap, gbm in THRESHOLDS if decoder == "atm" else [(SURE, 0.0), (2.0, 0.0), (-1.0, 0.0)]:
            thresholds = {"clap_threshold": clap, "gbm_threshold": gbm}
            told = {name: value for name, value in thresholds.items() if name in session_inputs(session)}
            expected = exported.run_onnx(image, **told)
            assert_close(run(session, image, **thresholds), expected)
            lengths |= {tuple(counts) for counts in expected["token_counts"].tolist()}
    assert len(lengths) > 3
    image = pictures(exported.deployed.network, 3)
    defaults = {"clap_threshold": TAU if decoder == "atm" else SURE, "gbm_threshold": exported.plan.gbm_threshold}
    assert_close(run(session, image, **defaults), {k: v.numpy() for k, v in exported.run_torch(image).items()})


def session_inputs(session: ort.InferenceSession) -> set[str]:
    return {value.name for value in session.get_inputs()}


def test_in_fp16_it_errs_at_most_twice_as_much(exported_toy: Any, opened: Open) -> None:
    """As node by node, against fp32 on equal tokens: nothing merges."""
    exact, half = exported_toy("segvit", "atm"), exported_toy("segvit", "atm", "scores", True)
    image = pictures(exact.deployed.network, 3)
    thresholds = {"clap_threshold": 2.0, "gbm_threshold": 1e6}
    truth = exact.run_onnx(image, **thresholds)["scores"]
    model, count = fused(half.portable)
    assert count == 3
    found, before = run(opened(model, "half"), image, **thresholds)["scores"], half.run_onnx(image, **thresholds)
    error, allowed = (abs(one.astype(np.float64) - truth).max() for one in (found, before["scores"]))
    assert 0 < error <= 2 * allowed


# --- segments --------------------------------------------------------------------------------------------------------


@pytest.fixture
def chained(
    exported_toy: Any, opened: Open, any_type: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SegmentedSession, ort.InferenceSession, Any]]:
    """SegViT in segments, the whole of it, and its network."""
    for module in (onnxruntime_segments, graphs_module):
        monkeypatch.setattr(module, "STEP", 8)  # three sizes of a toy
    exported = exported_toy("segvit", "atm")
    model, _ = fused(exported.portable, library=True)
    parts = [opened(part, f"part {index}") for index, part in enumerate(segments(model))]
    session = SegmentedSession(lambda index, _: parts[index], len(parts), torch.device("cpu"), MOST_IMAGES)
    yield session, opened(model, "whole"), exported.deployed.network
    session.close()


def test_no_segment_asks_for_rows_of_two_merges(chained: Any) -> None:
    """Keys and values of the first merge's rows cross in the room that an image can need."""
    session, _, network = chained
    assert [segment.token_axes for segment in session._segments] == [[], ["tokens_clap_1"], ["tokens_gbm_3"]]
    crossing = [shape for name, shape in session._segments[2].inputs.items() if "apart" in name]
    room = network.grid[0] * network.grid[1]
    assert crossing == [["batch", room, network.decoder_dim]] * 2


@pytest.mark.parametrize("joined", [False, True])
def test_segments_equal_the_whole(chained: Any, joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each batch, whatever merges, and whatever an earlier batch left in memory."""
    session, whole, network = chained
    graphs = joined_on_the_host(monkeypatch, session) if joined else None
    for images in range(MOST_IMAGES, 0, -1):
        if graphs is not None:
            assert session.warm_up(images)
            met = len(graphs.keys)
        image = pictures(network, images)
        for clap, gbm in THRESHOLDS:
            thresholds = {"clap_threshold": clap, "gbm_threshold": gbm}
            expected = run(whole, image, **thresholds)
            found = session.run(torch.from_numpy(image), thresholds, list(expected))
            assert_close({name: value.numpy() for name, value in found.items()}, expected)
        if graphs is not None:
            assert len(graphs.keys) == met, "a segment was run by itself"
    assert session.joined == (list(range(1, MOST_IMAGES + 1)) if joined else [])
