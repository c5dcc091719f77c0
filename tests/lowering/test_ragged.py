"""Which merges may leave their images one behind the other, in every family and where a node asks for more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from graph_stand_ins import joined_on_the_host, opened
from toys import FAMILIES, pictures

from algm_deploy.lowering import cross_attention, norms, onnxruntime, onnxruntime_segments
from algm_deploy.lowering.onnxruntime import rewrite
from algm_deploy.lowering.onnxruntime_segments import TOGETHER, segments
from algm_deploy.lowering.ragged import make_ragged
from algm_deploy.recipe.schema import Output
from algm_deploy.runners.onnxruntime import graphs as graphs_module
from algm_deploy.runners.onnxruntime.graphs import SegmentedSession

THRESHOLDS = {"clap_threshold": 0.8, "gbm_threshold": 0.5}
# Where the library has attention for a network, and two networks for which it has none; `prune` has no segments.
CASES = [
    *((*case, True, "scores") for case in FAMILIES if case[1] != "prune"),
    *((*case, False, "scores") for case in (("segvit", "atm"), ("eomt", "queries"))),
    *((*case, True, "labels") for case in (("segvit", "atm"), ("eomt", "queries"))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "decoder", "library", "output"), CASES)
def test_every_family_computes_the_same(
    monkeypatch: pytest.MonkeyPatch,
    exported_toy: Any,
    ort_library: Path,
    tmp_path: Path,
    family: str,
    decoder: str,
    library: bool,
    output: Output,
) -> None:
    """Joined as well, but where a segment reads rows of an earlier merge: SegViT's last one, if its decoder's attention
    stays node by node. Its masks, which are boolean, cross as well then."""
    monkeypatch.setattr(onnxruntime, "_fits_packed_attention", lambda *_: library)
    for module in (onnxruntime, norms) if library else ():
        monkeypatch.setattr(module, "fits_rows", lambda values: len(values.shape) == 3)
    monkeypatch.setattr(cross_attention, "_fits", lambda _: library)
    for module in (onnxruntime_segments, graphs_module):
        monkeypatch.setattr(module, "STEP", 16)  # several sizes of a toy, larger than ragged rows are rounded to
    exported = exported_toy(family, decoder, output)
    image, graph = pictures(exported.deployed.network), exported.portable.clone()
    rewrite(graph, "cuda", custom_operators=True, single=False)
    parts = segments(graph)
    counts = [output.name for part in parts for output in part.graph.outputs if output.name.startswith(TOGETHER)]
    assert len(counts) == (2 if library else 0)
    assert len(parts) == 3
    kinds = {node.op_type for part in parts for node in part.graph}
    assert ({"bias_skip", "bias_skip_norm", "layer_norm"} <= kinds) == library
    tails = [sum(node.op_type == "mask_labels" for node in part.graph) for part in parts]
    assert tails == [0, 0, int(output == "labels")]
    paths = [tmp_path / name for name in ("whole", *map(str, range(len(parts))))]
    for model, path in zip((graph, *parts), paths, strict=True):
        ir.save(model, path)
    whole, *sessions = (opened(path, ort_library) for path in paths)
    names = [output.name for output in whole.get_outputs()]
    scalars = {name: np.array(value, np.float32) for name, value in THRESHOLDS.items()}
    expected = dict(zip(names, whole.run(names, {"image": image, **scalars}), strict=True))
    chained = SegmentedSession(lambda index, _: sessions[index], len(sessions), torch.device("cpu"), len(image))
    found = chained.run(torch.from_numpy(image), THRESHOLDS, names)
    joined_on_the_host(monkeypatch, chained)
    assert chained.warm_up(len(image))
    assert chained.joined == ([] if family == "segvit" and not library else [len(image)])
    for name, value in chained.run(torch.from_numpy(image), THRESHOLDS, names).items():
        np.testing.assert_array_equal(value, found[name], err_msg=name)
    chained.close()
    assert len(set(expected["token_counts"][:, -1])) > 1, "images must differ in their row counts"
    for name, value in expected.items():
        if name == "scores":
            # fp32 sums of rows that lie elsewhere come in another order.
            np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-6 * max(10, abs(value).max()))
        else:
            np.testing.assert_array_equal(found[name], value, err_msg=name)


# --- small graphs ----------------------------------------------------------------------------------------------------

Make = Callable[["Behind"], ir.Value]


class Behind:
    """A graph of one merge, (B, S, 8) tokens of 4 x 4 patches and a class token, and what is put behind it."""

    def __init__(self, make: Make) -> None:
        self.nodes: list[ir.Node] = []
        self.constants: list[ir.Value] = []
        inputs = [
            ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
            for name, shape, kind in (
                ("tokens", ["batch", 17, 8], ir.DataType.FLOAT),
                ("size", ["batch", 17], ir.DataType.FLOAT),
                ("threshold", [], ir.DataType.FLOAT),
            )
        ]
        attributes: dict[str, Any] = {"prefix": 1, "ragged": "none"}
        self.merge = ir.node("bucketed_clap", inputs, attributes, domain="algm", num_outputs=6)
        shapes = [["batch", "t", 8], ["batch", "t"], ["batch", 16], ["batch"], [], None]
        for value, shape in zip(self.merge.outputs, shapes, strict=True):
            value.shape = None if shape is None else ir.Shape(shape)
        self.nodes.append(self.merge)
        self.tokens, self.size, self.map, self.length = self.merge.outputs[:4]
        out = make(self)
        self.graph = ir.Graph(inputs, [out], nodes=self.nodes, initializers=self.constants, opset_imports={"": 18})
        for index, node in enumerate(self.nodes):
            node.name = f"node_{index}"

    def __call__(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, domain=domain)
        assert inputs[0] is not None
        node.outputs[0].shape = inputs[0].shape
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, array: Any, dtype: Any = np.float32) -> ir.Value:
        tensor = ir.tensor(np.asarray(array, dtype))
        name = f"constant_{len(self.constants)}"
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.constants.append(value)
        return value

    def numbers(self, *numbers: int) -> ir.Value:
        return self.constant(numbers, np.int64)

    def rows(self, x: ir.Value, first: int, end: int, axis: int = 1, step: int = 1) -> ir.Value:
        return self("Slice", x, *(self.numbers(n) for n in (first, end, axis, step)))

    def attention(self, x: ir.Value, length: ir.Value | None) -> ir.Value:
        lengths = [] if length is None else [length]
        return self("packed_attention", x, self.constant(np.zeros(24)), *lengths, domain="algm", heads=1, scale=1.0)

    def in_front(self, x: ir.Value, rows: int = 2, front: ir.Value | None = None) -> ir.Value:
        front = self.constant(np.zeros((rows, 8))) if front is None else front
        copies = self("Expand", front, self.numbers(3, 2, 8))
        copies.shape = ir.Shape(["batch", 2, 8])
        joined = self("Concat", copies, x, axis=1)
        joined.shape = x.shape
        return joined

    def made(self, sides: list[int | str] | None) -> ir.Value:
        """What a node makes of a constant, whose sides are stated so."""
        made = self("Mul", self.constant(np.zeros((1, 17, 8))), self.constant(1))
        made.shape = None if sides is None else ir.Shape(sides)
        return made

    def first(self, x: ir.Value) -> ir.Value:
        """Of the first axis, as two rows."""
        taken = self("Gather", x, self.constant(0, np.int64), axis=0)
        taken.shape = ir.Shape([2, 8])
        return taken

    def gbm(self, x: ir.Value, size: ir.Value, behind: Callable[[Behind, ir.Value], ir.Value]) -> ir.Value:
        inputs = [x, size, self.map, self.length, self.constant(np.array(1.0))]
        node = ir.node("bucketed_gbm", inputs, {"prefix": 1, "ragged": "none"}, domain="algm", num_outputs=6)
        node.outputs[0].shape, node.outputs[2].shape = ir.Shape(["batch", "u", 8]), ir.Shape(["batch", 16])
        self.nodes.append(node)
        return behind(self, node.outputs[0])

    def lengths_of_keys(self, x: ir.Value, length: ir.Value) -> ir.Value:
        return self("lengths_of_keys", self.constant(np.zeros((3, 2, 8))), x, length, domain="algm")

    def queries(self, keys: ir.Value, values: ir.Value, *told: ir.Value | None) -> ir.Value:
        asking = self.constant(np.zeros((3, 2, 8)))
        return self("MultiHeadAttention", asking, keys, values, *told, domain="com.microsoft", num_heads=1, scale=1.0)

    def branch(self, x: ir.Value) -> ir.Value:
        """A choice whose branches read what is no input of it."""
        inner = ir.node("Shape", [x])
        body = ir.Graph([], inner.outputs, nodes=[inner], opset_imports={"": 18})
        return self("If", self.constant(True, np.bool_), then_branch=body, else_branch=body)

    def tail(self, x: ir.Value) -> ir.Value:
        return self("unmerge", x, self.map, domain="algm", prefix=0)


END = 2**31 - 1
FULL = np.zeros((8, 8))
GOOD: dict[str, Make] = {
    "by row": lambda b: b.tail(b("MatMul", b("Add", b.tokens, b.constant(np.zeros((1, 1, 8)))), b.constant(FULL))),
    "attention": lambda b: b.tail(b.attention(b.tokens, b.length)),
    "a dropped row": lambda b: b.tail(b("Relu", b.rows(b.tokens, 1, END))),
    "other leading rows": lambda b: b.tail(
        b.attention(b.in_front(b.rows(b.tokens, 1, END)), b("Add", b.length, b.constant(1, np.int64)))
    ),
    "leading rows alone": lambda b: b.rows(b.tokens, 0, 1),
    "leading rows before attention": lambda b: b(
        "Add",
        b.rows(front := b.in_front(b.rows(b.tokens, 1, END)), 0, 2),
        b.rows(b.attention(front, b("Add", b.length, b.constant(1, np.int64))), 0, 2),
    ),
    "queries": lambda b: b.queries(b.tokens, b("Relu", b.tokens), None, b.lengths_of_keys(b.tokens, b.length)),
    "queries behind a dropped row": lambda b: b.queries(
        x := b.rows(b.tokens, 1, END),
        x,
        None,
        b.lengths_of_keys(x, b("Sub", b.length, b.constant(1, np.int64))),
    ),
    "the same rows twice": lambda b: b("MatMul", b.tokens, b.tail(b.tokens)),
    "a constant that a node makes": lambda b: b.tail(b("Add", b.tokens, b.made([1, 1, 8]))),
    # As the exporter leaves class tokens where they are too many for it to compute with.
    "rows in front that a node takes of a constant": lambda b: b.tail(
        b.in_front(b.tokens, front=b.first(b.constant(np.zeros((1, 2, 8)))))
    ),
}
BAD: dict[str, Make] = {
    "constants that differ by row": lambda b: b.tail(b("Add", b.tokens, b.constant(np.zeros((1, 17, 8))))),
    "made constants that differ by row": lambda b: b.tail(b("Add", b.tokens, b.made([1, 17, 8]))),
    "made constants of unknown sides": lambda b: b.tail(b("Add", b.tokens, b.made(None))),
    "made constants of a side without a number": lambda b: b.tail(b("Add", b.tokens, b.made([1, "q", 8]))),
    "rows changed for columns": lambda b: b("Transpose", b.tokens, perm=[0, 2, 1]),
    "the number of rows": lambda b: b("Shape", b.tokens),
    "attention to all rows": lambda b: b.tail(b.attention(b.tokens, None)),
    "attention to fewer rows": lambda b: b.tail(
        b.attention(b.tokens, b("Sub", b.length, b.constant(1, np.int64))),
    ),
    "attention with lengths from elsewhere": lambda b: b.tail(b.attention(b.tokens, b("Neg", b.length))),
    "attention behind a dropped row": lambda b: b.tail(
        b.attention(b.rows(b.tokens, 1, END), b("Sub", b.length, b.constant(1, np.int64)))
    ),
    "queries to all rows": lambda b: b.queries(b.tokens, b.tokens),
    "queries that are told lengths in another way": lambda b: b.queries(b.tokens, b.tokens, None, b.length),
    "queries to fewer rows": lambda b: b.queries(
        b.tokens,
        b.tokens,
        None,
        b.lengths_of_keys(b.tokens, b("Sub", b.length, b.constant(1, np.int64))),
    ),
    "queries to other rows than lengths are of": lambda b: b.queries(
        x := b.rows(b.tokens, 1, END), x, None, b.lengths_of_keys(b.tokens, b.length)
    ),
    "keys whose values are of others": lambda b: b.queries(
        b.tokens, b.constant(np.zeros((3, 17, 8))), None, b.lengths_of_keys(b.tokens, b.length)
    ),
    "rows that are queries": lambda b: b.tail(
        b("MultiHeadAttention", b.tokens, b.tokens, b.tokens, domain="com.microsoft", num_heads=1, scale=1.0)
    ),
    "a norm over rows": lambda b: b.tail(b("LayerNormalization", b.tokens, b.constant(np.zeros(8)), axis=1)),
    "every second row": lambda b: b.rows(b.tokens, 0, END, step=2),
    "the last row": lambda b: b.rows(b.tokens, -1, END),
    "columns": lambda b: b.tail(b.rows(b.tokens, 0, 4, axis=2)),
    "rows put behind": lambda b: b("Concat", b.tokens, b("Expand", b.constant(FULL), b.numbers(3, 8, 8)), axis=1),
    "rows in front that a node takes of tokens": lambda b: b.tail(b.in_front(b.tokens, front=b.first(b.tokens))),
    "rows of other tokens": lambda b: b.tail(b("Add", b.rows(b.tokens, 1, END), b.tokens)),
    "a product of tokens": lambda b: b("MatMul", b.tokens, b("Relu", b.tokens)),
    "an output": lambda b: b("Relu", b.tokens),
    "rows that some images do not have": lambda b: b.rows(b.tokens, 0, 5),
    "one row that is copied twice": lambda b: b.tail(b.in_front(b.tokens, rows=1)),
    "a fourth axis": lambda b: b.tail(b("Add", b.tokens, b.constant(np.zeros((1, 1, 1, 8))))),
    "sizes": lambda b: b("LayerNormalization", b.size, b.constant(np.zeros(8)), axis=-1),
    "a merge that leaves images apart": lambda b: b.gbm(
        b.tokens, b.size, lambda b, x: b("Transpose", x, perm=[0, 2, 1])
    ),
    "a branch that may read anything": lambda b: (
        b.tail(b.tokens),
        b.branch(b.tokens),
    )[1],
}


def test_what_is_made_of_a_ragged_region() -> None:
    def made(name: str) -> dict[str, dict[str, Any]]:
        graph = Behind(GOOD[name]).graph
        assert len(make_ragged(graph)) == 1
        return {n.op_type: {k: a.value for k, a in n.attributes.items()} for n in graph}

    assert made("by row")["apart"] == {"first": 0, "count": 17}
    found = made("attention")
    assert found["bucketed_clap"]["ragged"] == "out"
    assert "packed_attention" not in found
    assert "ragged_attention" in found
    found = made("a dropped row")
    assert "Slice" not in found
    assert found["apart"] == {"first": 1, "count": 16}
    found = made("other leading rows")
    assert not {"Slice", "Concat"} & set(found)
    assert found["reframe"] == {"skip": 1}
    assert found["apart"] == {"first": 0, "count": 18}
    assert made("leading rows alone")["apart"] == {"first": 0, "count": 1}
    assert made("leading rows before attention")["apart"] == {"first": 0, "count": 2}
    assert made("queries")["apart"] == {"first": 0, "count": 17}
    assert made("queries behind a dropped row")["apart"] == {"first": 1, "count": 16}
    twice = Behind(GOOD["the same rows twice"]).graph
    make_ragged(twice)
    assert [node.op_type for node in twice].count("apart") == 1


def test_a_merge_by_other_sizes_is_ragged_alone() -> None:
    behind = Behind(lambda b: b.gbm(b.tokens, b("Neg", b.size), lambda b, x: b.rows(x, 0, 1)))
    assert [node.op_type for node in make_ragged(behind.graph)] == ["bucketed_gbm"]
    assert behind.merge.attributes["ragged"].as_string() == "none"


def test_two_merges_are_ragged_from_the_last_on() -> None:
    graph = Behind(lambda b: b.gbm(b("Relu", b.tokens), b.size, lambda b, x: b.rows(x, 0, 1))).graph
    assert len(make_ragged(graph)) == 2
    assert [n.attributes["ragged"].as_string() for n in graph if "ragged" in n.attributes] == ["out", "both"]


@pytest.mark.parametrize("name", GOOD)
def test_what_a_node_takes_stands_before_it(name: str) -> None:
    graph = Behind(GOOD[name]).graph
    make_ragged(graph)
    made = {*graph.inputs, *graph.initializers.values()}
    for node in graph:
        assert {value for value in node.inputs if value is not None} <= made, node.op_type
        made |= {*node.outputs}


@pytest.mark.parametrize("name", BAD)
def test_where_more_is_asked_a_merge_stays_as_it_is(name: str) -> None:
    graph = Behind(BAD[name]).graph
    before = [(node.op_type, dict(node.attributes)) for node in graph]
    assert make_ragged(graph) == set()
    assert [(node.op_type, dict(node.attributes)) for node in graph] == before
