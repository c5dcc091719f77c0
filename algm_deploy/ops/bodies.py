"""The bodies of the operators in standard ONNX (opset 18), written as plain Python calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

OPSET = 18
END = np.iinfo(np.int64).max  # the end of an axis, for `Body.rows`
Value = ir.Value
# Writes a body: (body, attributes, *inputs) -> outputs. An optional input that is missing is None, or left out.
BodyBuilder = Callable[..., list[Value]]
BODIES: dict[str, BodyBuilder] = {}
_TURNED = {"Greater": "Less", "GreaterOrEqual": "LessOrEqual"}


def body_of(name: str) -> Callable[[BodyBuilder], BodyBuilder]:
    """The decorated function writes the body of the operator `name`."""

    def keep(build: BodyBuilder) -> BodyBuilder:
        BODIES[name] = build
        return build

    return keep


class Body:
    """Records nodes. `body("Add", a, b)` adds one node; Python numbers and arrays become constants.

    Token values have one of three types, so a body casts with `fp32` and back with `like`, both free for fp32.
    What is asked to be greater is written as less, the other way round: OpenVINO 2026.4 says of a NaN that it is
    greater than any number, and any number greater than it, but never that it is less.
    `dtypes`: the types that the results shall have. `processor`: the body is for OpenVINO, where less work is less
    time, and not for all: rows are added to others one after the other instead of by a product with zeros, which
    runtimes that scatter in no order may not do, matches are found along columns, rows of pixels are sums of two.
    """

    def __init__(self, dtypes: Sequence[ir.DataType] = (), processor: bool = False) -> None:
        self.dtypes = dtypes
        self.processor = processor
        self._tape = Tape()

    @property
    def nodes(self) -> Sequence[ir.Node]:
        """All nodes so far, in topological order."""
        return self._tape.nodes

    def __call__(self, op_type: str, *inputs: Any, **attributes: Any) -> Value:
        """A node with one output."""
        if op_type in _TURNED:
            op_type, inputs = _TURNED[op_type], inputs[::-1]
        return self._tape.op(op_type, [self.value(x) for x in inputs], attributes)

    def several(self, count: int, op_type: str, *inputs: Any, **attributes: Any) -> Sequence[Value]:
        """A node with several outputs."""
        return self._tape.op_multi_out(op_type, [self.value(x) for x in inputs], attributes, num_outputs=count)

    def value(self, x: Any) -> Value | None:
        """`x` itself when it is a value, else a constant: int64 for integers, fp32 for floats, arrays as they are."""
        if x is None or isinstance(x, ir.Value):
            return x
        array = np.asarray(x)
        if not isinstance(x, np.ndarray):
            array = array.astype(np.int64 if array.dtype.kind in "iu" or array.size == 0 else np.float32)
        constant = self._tape.op("Constant", [], {"value": ir.tensor(array)})
        constant.shape = ir.Shape(array.shape)
        return constant

    def number(self, x: float) -> Value:
        """A scalar fp32 constant."""
        return self._tape.op("Constant", [], {"value": ir.tensor(np.float32(x))})

    def fp32(self, x: Value) -> Value:
        """x as fp32."""
        return self("Cast", x, to=ir.DataType.FLOAT)

    def int64(self, x: Value) -> Value:
        """x as int64."""
        return self("Cast", x, to=ir.DataType.INT64)

    def like(self, x: Value, example: Value) -> Value:
        """x in the type of `example`."""
        return self("CastLike", x, example)

    def size_of(self, x: Value, axis: int) -> Value:
        """The extent of one axis as int64 (1,)."""
        return self("Shape", x, start=axis, end=axis + 1)

    def extent(self, x: Value, axis: int) -> Value | int:
        """The extent of one axis: a number where the input's shape says it, else as `size_of`."""
        known = x.shape[axis] if x.shape is not None else None
        return known if isinstance(known, int) else self.size_of(x, axis)

    def indices(self, count: Value | int) -> Value:
        """0, 1, ... count - 1 as int64 (count,)."""
        if isinstance(count, int):
            return self.value(np.arange(count))  # type: ignore[return-value]
        return self("Range", 0, self("Squeeze", count, [0]), 1)

    def filled(self, x: Value, number: int) -> Value:
        """The number once for each image of x: (B, 1) int64."""
        return self("Expand", number, self("Concat", self.size_of(x, 0), [1], axis=0))

    def rows(self, x: Value, start: Value | int, end: Value | int, step: int = 1) -> Value:
        """x[:, start:end:step]."""
        bounds = [value if isinstance(value, ir.Value) else [value] for value in (start, end)]
        return self("Slice", x, *bounds, [1], [step])

    def take_rows(self, x: Value, index: Value) -> Value:
        """x (B, S, C) at index (B, R): (B, R, C), every image by its own indices."""
        return self("GatherND", x, self("Unsqueeze", index, [2]), batch_dims=1)

    def running_count(self, flags: Value) -> Value:
        """Inclusive count (B, R) of the true values so far, int64."""
        return self("CumSum", self.int64(flags), 1)

    def count(self, flags: Value) -> Value:
        """True values of each image: (B, 1) int64."""
        return self("ReduceSum", self.int64(flags), [1], keepdims=1)

    def member_sums(self, share: Value, x: Value) -> Value:
        """MatMul of share (B, R, S), not negative, and x (B, S, D), fp32. A value that is not finite reaches only the
        rows it has a share in, where zero times infinity would make NaN of all others."""
        finite = self("Less", self("Abs", x), np.inf)
        beyond = [self("Not", self("Or", finite, self(sign, x, 0.0))) for sign in ("Less", "Greater")]  # a NaN is both
        parts = self("Concat", self("Where", finite, x, 0.0), *map(self.fp32, beyond), axis=2)
        sums, *there = self.several(3, "Split", self("MatMul", share, parts), axis=2, num_outputs=3)
        up, down = (
            self("Where", self("Greater", t, 0.0), i, 0.0) for t, i in zip(there, (np.inf, -np.inf), strict=True)
        )
        return self("Add", sums, self("Add", up, down))

    def added_rows(self, x: Value, index: Value, rows: Value) -> Value:
        """x (B, T, ...) with `rows` (B, R, ...) added to its rows at `index` (B, R), one after the other."""
        image = self("Expand", self("Unsqueeze", self.indices(self.size_of(x, 0)), [1]), self("Shape", index))
        place = self("Concat", self("Unsqueeze", image, [2]), self("Unsqueeze", index, [2]), axis=2)
        return self("ScatterND", x, place, rows, reduction="add")

    def inverse(self, permutation: Value, count: int | None = None) -> Value:
        """Inverse (B, R) of a permutation a row; `count` is R where it is known."""
        shape = self("Shape", permutation)
        numbers = self("Expand", self.indices(count or self.size_of(permutation, 1)), shape)
        return self("ScatterElements", self("Expand", 0, shape), permutation, numbers, axis=1)

    def best(self, values: Value, count: int) -> Value:
        """Place (B, R) of the `count` largest of R values in descending order, the lower index first; -1 for others.
        Values are finite, or NaN, which counts as -inf."""
        none = self("Expand", -1, self("Shape", values))
        if count == 0:
            return none
        sortable = self("Where", self("Less", values, np.inf), values, -np.inf)
        _, largest = self.several(2, "TopK", sortable, [count], axis=1)
        places = self("Expand", np.arange(count), self("Shape", largest))
        return self("ScatterElements", none, largest, places, axis=1)

    def rank(self, values: Value, count: int | None = None) -> Value:
        """Place (B, R) of each value in descending order; the lower index first on ties, as TopK promises. `count` is R
        where it is known."""
        _, best_first = self.several(2, "TopK", values, [count] if count else self.size_of(values, 1), axis=1)
        return self.inverse(best_first, count)

    def select(
        self, position: Value, kept: Value, length: Value, *candidates: Value, known: tuple[int, int] | None = None
    ) -> list[Value]:
        """Puts candidates where they belong: padded to the longest image, zero behind `length`.

        Args:
            position: (B, R) int64, output row of every kept candidate.
            kept: (B, R) bool.
            length: (B, 1) int64, kept candidates of every image.
            candidates: values (B, R, C) or (B, R).
            known: the length of all images, and R, where they are known.
        """
        dropped = self("Sub", self("Add", length, self.running_count(self("Not", kept))), 1)
        places = self("Where", kept, position, dropped)
        if known is not None:
            rows, count = known
            source = self.rows(self.inverse(places, count), 0, rows)
            return [self.take_rows(candidates[0], source), self("GatherElements", candidates[1], source, axis=1)]
        rows_out = self("Reshape", self("ReduceMax", length), [1])
        source = self.rows(self.inverse(places), 0, rows_out)
        valid = self("Less", self.indices(rows_out), length)
        return [self._placed(x, source, valid, wide) for x, wide in zip(candidates, (True, False), strict=True)]

    def _placed(self, x: Value, source: Value, valid: Value, wide: bool) -> Value:
        if wide:
            picked, valid = self.take_rows(x, source), self("Unsqueeze", valid, [2])
        else:
            picked = self("GatherElements", x, source, axis=1)
        return self("Where", valid, picked, self.like(self.number(0.0), x))


def unit_rows(body: Body, x: Value, eps: float) -> Value:
    """Rows of x scaled to length one, in fp32."""
    x = body.fp32(x)
    return body("Div", x, body("Max", body("ReduceL2", x, [-1], keepdims=1), eps))
