"""Ragged rows: the images of a batch one behind the other, so that a batch of different pictures has no padding.

Behind a merge, most of a network works row by row and does not ask which row belongs to which image. There the merge
may lay its images out without anything between them: B images in B x S rows, S being their mean and not their longest.

| what asks for an image's rows | here |
|---|---|
| attention | `ragged_attention`, which is told the lengths anyway |
| the next merge | reads ragged rows |
| a slice that drops leading rows | nothing yet: they stay until it matters who is first |
| rows put in front of every image | `reframe`, without the rows dropped before |
| leading rows | `apart`, of those alone |
| a product with a matrix of each image, unmerge, label_map | `apart`, of as many rows as an image can have |
| attention of queries to rows, which is told lengths | the same, of keys and values: rows behind cost it nothing |

Where anything else asks, the merge stays as it is. `runtimes/README.md` describes the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from algm_deploy.bundle.graphs import DOMAIN
from algm_deploy.lowering.cross_attention import LENGTHS_OF_KEYS
from algm_deploy.lowering.patterns import Chain, is_constant, pair, stand_in

# What computes every row from the same row of its inputs and from constants.
_NORMS = {"LayerNormalization", "SimplifiedLayerNormalization"}
_BY_ROW = _NORMS | {"SkipLayerNormalization", "bias_skip", "bias_skip_norm", "layer_norm", "BiasGelu", "gelu"}
_BY_ROW |= {"Add", "Sub", "Mul", "Div", "Cast", "Erf", "Tanh", "Sigmoid", "Relu", "Gelu"}
# What takes images apart, and where it reads their rows: behind it there is little left to compute.
_TAILS = {"MatMul": [0], "unmerge": [0], "label_map": [0], LENGTHS_OF_KEYS: [1], "MultiHeadAttention": [1, 2]}
_END = 2**31 - 1  # an axis ends before it


class _Rows(NamedTuple):
    """How many rows an image has: `more` than the merge left it, the first `dropped` of which the graph has dropped.

    `sure`: of those that are not dropped, leading ones that every image has, however many merge.
    """

    more: int
    dropped: int
    sure: int


class _Constants:
    """What a graph has of constants: initializers, and what nodes make of such alone. The exporter computes that only
    where it is small, which 150 class tokens are not."""

    def __init__(self, graph: ir.Graph) -> None:
        self._made: set[ir.Value] = set()
        for node in graph:
            if all(value is None or self._has(value) for value in node.inputs):
                self._made |= set(node.outputs)

    def _has(self, value: ir.Value) -> bool:
        return value in self._made or is_constant(value)

    def sides(self, value: ir.Value) -> list[int] | None:
        """Of a constant, if need be in another type; None of what is none, or of unknown sides."""
        producer = value.producer()
        source = producer.inputs[0] if producer is not None and producer.op_type == "Cast" else value
        if source is None or not self._has(source) or source.shape is None or not source.shape.is_static():
            return None
        return [int(side) for side in source.shape.numpy()]

    def is_same_for_all_rows(self, value: ir.Value) -> bool:
        """Whether a value is a constant that broadcasts along the rows."""
        sides = self.sides(value)
        return sides is not None and len(sides) <= 3 and all(side == 1 for side in sides[:-1])

    def same_for_all_images(self, value: ir.Value | None) -> tuple[ir.Value, list[int]] | None:
        """The constant of which every image gets a copy, and its sides, if a value is such copies."""
        expand = value.producer() if value is not None else None
        front = expand.inputs[0] if expand is not None and expand.op_type == "Expand" else None
        sides = self.sides(front) if front is not None else None
        if value is None or value.shape is None or front is None or sides is None:
            return None
        copies = len(sides) >= 2 and all(side == 1 for side in sides[:-2]) and list(value.shape)[-2:] == sides[-2:]
        return (front, sides) if copies else None


@dataclass
class _Region:
    """What lies behind one merge, up to where images are taken apart, and what has to change for it to be ragged.

    `ragged`: later merges that leave ragged rows.
    """

    merge: ir.Node
    ragged: frozenset[ir.Node]
    constants: _Constants
    rows: dict[ir.Value, _Rows] = field(default_factory=dict)
    changes: list[Callable[[], None]] = field(default_factory=list)
    apart: dict[tuple[ir.Value, int, int], ir.Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens, self.size, self.map, self.length = self.merge.outputs[:4]
        self.rows = {tokens: _Rows(0, 0, self.merge.attributes["prefix"].as_int())}
        self._axis = tokens.shape[1] if tokens.shape is not None else tokens.name

    def takes(self, node: ir.Node) -> bool:
        """Whether a node can do with ragged rows, if it has any of this region."""
        if node.op_type == "bucketed_gbm" and node.inputs[0] in self.rows:
            return self._merges(node)
        if self.size in node.inputs:
            return False
        own = [value for value in node.inputs if value is not None and value in self.rows]
        if not own:
            return True
        rows = self.rows[own[0]]
        if any(self.rows[value] != rows for value in own[1:]):
            return False
        if self._is_by_row(node):
            self.rows |= dict.fromkeys(node.outputs, rows)
            return True
        special = {"packed_attention": self._attends, "Slice": self._slices, "Concat": self._puts_in_front}
        if node.op_type in special:
            return special[node.op_type](node, rows)
        return node.op_type in _TAILS and self._is_told_apart(node, own, rows)

    def _is_by_row(self, node: ir.Node) -> bool:
        if node.op_type == "MatMul":
            x, weight = pair(node)
            return x in self.rows and len(self.constants.sides(weight) or []) == 2
        if node.op_type in _NORMS and node.attributes.get_int("axis", -1) not in (-1, 2):
            return False
        return node.op_type in _BY_ROW and all(
            v is None or v in self.rows or self.constants.is_same_for_all_rows(v) for v in node.inputs
        )

    def _attends(self, node: ir.Node, rows: _Rows) -> bool:
        length = node.inputs[2] if len(node.inputs) > 2 else None
        if length is None or rows.dropped or _added(length, self.length) != rows.more:
            return False
        self.rows[node.outputs[0]] = rows
        self.changes.append(lambda: setattr(node, "op_type", "ragged_attention"))
        return True

    def _slices(self, node: ir.Node, rows: _Rows) -> bool:
        first, end = _cut(node)
        if first is None or end is None or first < 0:
            return False
        if end >= _END:
            self.rows[node.outputs[0]] = _Rows(rows.more, rows.dropped + first, max(rows.sure - first, 0))
            self.changes.append(lambda: _remove(node))
            return True
        if not first < end <= rows.sure:
            return False
        self.changes.append(lambda: self._put_apart(node, rows, first, end - first, node.outputs[0]))
        return True

    def _puts_in_front(self, node: ir.Node, rows: _Rows) -> bool:
        if len(node.inputs) != 2 or node.inputs[1] not in self.rows or node.attributes["axis"].as_int() not in (1, -2):
            return False
        found = self.constants.same_for_all_images(node.inputs[0])
        if found is None:
            return False
        front, sides = found
        count, width = sides[-2:]
        self.rows[node.outputs[0]] = _Rows(rows.more - rows.dropped + count, 0, rows.sure + count)
        self.changes.append(lambda: self._reframe(node, front, width, rows))
        return True

    def _merges(self, node: ir.Node) -> bool:
        """One that leaves images apart would not know how many rows the longest has."""
        tokens, size, _, length = node.inputs[:4]
        assert tokens is not None
        its_own = size is self.size and length is self.length and not self.rows[tokens].more + self.rows[tokens].dropped
        if not its_own or node not in self.ragged:
            return False
        self.changes.append(lambda: _set_ragged(node, "in"))
        return True

    def _is_told_apart(self, node: ir.Node, own: list[ir.Value], rows: _Rows) -> bool:
        places = _TAILS[node.op_type]
        if own != [node.inputs[place] for place in places] or not self._is_told_lengths(node, rows):
            return False
        patches = self.map.shape[1] if self.map.shape is not None else None
        if not isinstance(patches, int):
            return False
        most = patches + self.merge.attributes["prefix"].as_int() + rows.more - rows.dropped
        for place in places:
            self.changes.append(partial(self._put_apart, node, rows, 0, most, place=place))
        return True

    def _is_told_lengths(self, node: ir.Node, rows: _Rows) -> bool:
        """Whether attention to rows, if a node is such, is told how many an image has."""
        if node.op_type == LENGTHS_OF_KEYS:
            length = node.inputs[2]
            return length is not None and _added(length, self.length) == rows.more - rows.dropped
        if node.op_type == "MultiHeadAttention":
            told = node.inputs[4].producer() if len(node.inputs) > 4 and node.inputs[4] is not None else None
            keys = told.inputs[1] if told is not None and told.op_type == LENGTHS_OF_KEYS else None
            return keys is not None and self.rows.get(keys) == rows
        return True

    # --- changes -----------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Makes the region ragged."""
        _set_ragged(self.merge, "out")
        for value, rows in self.rows.items():
            if (rows.more or rows.dropped) and value.shape is not None:
                axis = f"{self._axis} - {rows.dropped} + {rows.more}"
                value.shape = ir.Shape([value.shape[0], axis, *list(value.shape)[2:]])
        for change in self.changes:
            change()

    def _length(self, chain: Chain, more: int) -> ir.Value:
        return chain("Add", self.length, chain.constant(np.array(more, np.int64))) if more else self.length

    def _put_apart(
        self, node: ir.Node, rows: _Rows, first: int, count: int, old: ir.Value | None = None, place: int = 0
    ) -> None:
        """Takes rows `first`, `first` + 1, ... of those that are not dropped; for `old`, or for what `node` takes, as
        its input of a `place`."""
        value = node.inputs[place]
        assert value is not None and value.shape is not None and node.graph is not None
        first += rows.dropped
        if (value, first, count) not in self.apart:
            chain = Chain(node.graph, node, f"{node.name}/apart_{place}")
            length = self._length(chain, rows.more)
            apart = chain("apart", value, length, domain=DOMAIN, first=first, count=count)
            apart.shape, apart.type = ir.Shape([value.shape[0], count, value.shape[2]]), value.type
            self.apart[value, first, count] = apart
        apart = self.apart[value, first, count]
        if old is not None:
            stand_in(old, apart)
            node.graph.remove(node, safe=True)
            return
        node.replace_input_with(place, apart)
        _forget_rows(node)

    def _reframe(self, node: ir.Node, front: ir.Value, width: int, rows: _Rows) -> None:
        assert node.graph is not None
        chain = Chain(node.graph, node, f"{node.name}/reframe")
        _, value = pair(node)
        flat = chain("Reshape", front, chain.shape([-1, width]))
        wide = chain("Cast", flat, to=ir.DataType.FLOAT)
        length = self._length(chain, rows.more)
        framed = chain("reframe", value, length, wide, domain=DOMAIN, skip=rows.dropped)
        stand_in(node.outputs[0], framed)
        node.graph.remove(node, safe=True)


def make_ragged(graph: ir.Graph) -> frozenset[ir.Node]:
    """Lets merges of a graph in their bucketed form lay images out one behind the other; returns those that do so."""
    found: frozenset[ir.Node] = frozenset()
    if any(a.type == ir.AttributeType.GRAPH for node in graph for a in node.attributes.values()):
        return found  # what stands in there may read anything
    constants = _Constants(graph)
    for merge in reversed([node for node in graph if node.op_type.startswith("bucketed_")]):
        region = _Region(merge, found, constants)
        if all(region.takes(node) for node in graph) and not region.rows.keys() & set(graph.outputs):
            region.apply()
            found |= {merge}
    return found


def _set_ragged(merge: ir.Node, side: str) -> None:
    """Adds to what is ragged of a merge: what it takes, or what it leaves."""
    before = merge.attributes["ragged"].as_string()
    merge.attributes["ragged"] = ir.AttrString("ragged", side if before == "none" else "both")


def _cut(node: ir.Node) -> tuple[int | None, int | None]:
    """First row and end of a slice of the second of three axes, in steps of one; None where that is not known."""
    numbers = [None if v is None or v.const_value is None else v.const_value.numpy().tolist() for v in node.inputs[1:]]
    first, end, axis, step = [*numbers, [1]][:4] if len(numbers) >= 3 else [None] * 4
    if first is None or end is None or axis not in ([1], [-2]) or step != [1]:
        return None, None
    return first[0], min(end[0], _END)


def _added(length: ir.Value, base: ir.Value) -> int | None:
    """What sums of constants have added to a length; None if it comes from elsewhere."""
    total = 0
    while length is not base:
        node = length.producer()
        if node is None or node.op_type not in ("Add", "Sub"):
            return None
        before, constant = pair(node)
        if constant.const_value is None or constant.const_value.size != 1:
            return None
        total += (1 if node.op_type == "Add" else -1) * int(constant.const_value.numpy().item())
        length = before
    return total


def _remove(node: ir.Node) -> None:
    """Lets the users of a node with one output take its first input."""
    value = node.inputs[0]
    assert value is not None and node.graph is not None
    node.outputs[0].replace_all_uses_with(value)
    node.graph.remove(node, safe=True)


def _forget_rows(node: ir.Node) -> None:
    """Forgets what was stated of the rows of everything behind a node; ONNX Runtime finds it again."""
    left = [node]
    while left:
        for value in left.pop().outputs:
            if value.shape is not None and any(not isinstance(side, int) for side in list(value.shape)[1:]):
                value.shape = None
                left += [use.node for use in value.uses()]
