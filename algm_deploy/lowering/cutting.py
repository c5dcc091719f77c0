"""Cuts a graph at its merges, for runtimes that must know a network's sizes before it starts.

The photo decides how many tokens a merge leaves. Cut at every merge, a network becomes a chain of parts whose sizes are
all known when they start: the rows that come in, a number that the caller has read by then. A part takes graph inputs
and what earlier parts made, by their names, and holds the weights of its own nodes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Cut:
    """Where a graph is cut: behind every node that `ends` names, or, where they stand `between`, around them.

    `handed` are the values that the caller reads at such a node, beside those that a later part takes.
    """

    ends: Callable[[ir.Node], bool]
    handed: Callable[[ir.Node], Sequence[ir.Value]]
    between: bool

    def parts(self, graph: ir.Graph) -> list[ir.Graph]:
        """The parts of a graph, in order, as graphs of their own; `graph` is not changed."""
        part_of = self._part_of(graph)
        last = max(part_of.values())
        wanted: list[dict[str, ir.Value]] = [{} for _ in range(last + 1)]

        def want(values: Iterable[ir.Value]) -> None:
            for value in values:
                if not self._stands_between(value):
                    wanted[self._made_in(value, part_of)][str(value.name)] = value

        want(graph.outputs)
        want(value for node in graph if self.ends(node) for value in self.handed(node))
        parts: list[ir.Graph] = []
        for index in range(last, -1, -1):  # backwards: a part says what the earlier ones have to hand over
            outputs = list(wanted[index].values())
            inputs = list(dict.fromkeys(self._taken(outputs, index, part_of)))
            want(value for value in inputs if value.producer() is not None)
            parts.insert(0, ir.convenience.extract(graph, inputs, outputs))
        return parts

    def _part_of(self, graph: ir.Graph) -> dict[ir.Node, int]:
        """The part of every node: after all cuts that it depends on, and before all others."""
        found: dict[ir.Node, int] = {}
        for node in graph:
            found[node] = max(
                (self._made_in(v, found) + self._ends(v) for v in node.inputs if v is not None), default=0
            )
        return found

    def _ends(self, value: ir.Value) -> bool:
        producer = value.producer()
        return producer is not None and self.ends(producer)

    def _stands_between(self, value: ir.Value) -> bool:
        return self.between and self._ends(value)

    @staticmethod
    def _made_in(value: ir.Value, part_of: dict[ir.Node, int]) -> int:
        producer = value.producer()
        return part_of[producer] if producer is not None else 0

    def _taken(self, outputs: list[ir.Value], index: int, part_of: dict[ir.Node, int]) -> Iterator[ir.Value]:
        """Values that a part takes from outside: graph inputs, and what earlier parts or nodes between parts made.

        Constants and sizes are computed anew instead: a size that another part hands over would be in device memory.
        """
        seen: set[ir.Value] = set()
        left = list(outputs)
        while left:
            value = left.pop()
            producer = value.producer()
            if value in seen or value.is_initializer():
                continue
            seen.add(value)
            made_before = producer is not None and part_of[producer] < index and not _is_size(value)
            if producer is None or made_before or self._stands_between(value):
                yield value
            else:
                left += [v for v in producer.inputs if v is not None]


def _is_size(value: ir.Value) -> bool:
    """Whether a value is made of shapes and constants alone."""
    producer = value.producer()
    if producer is None:
        return value.is_initializer()
    return producer.op_type == "Shape" or all(_is_size(v) for v in producer.inputs if v is not None)
