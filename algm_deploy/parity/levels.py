"""Link 3 of a calibrated bundle: every number of its quantised products is, in the graphs that run, what it has to be.

Rounding tips values from one level to the next, so link 4 has to let much pass. Hence scales, zero points, levels and
steps, and the norms and biases that balancing changed, are compared here with those that the manifest and the bundle's
weights give, bit by bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, numpy_helper

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError
from algm_deploy.lowering.tensorrt import TENSORRT_ONNX
from algm_deploy.lowering.tensorrt_fp8 import numbers_of
from algm_deploy.lowering.tensorrt_zero_points import SHIFT
from algm_deploy.models.loading import load_network
from algm_deploy.models.quantized import E4m3Linear, Int8Attention, QuantizedLinear, computes_levels, in_graphs
from algm_deploy.models.vit import Block, VitNetwork
from algm_deploy.ops.attention import PACKED, SHARE_LEVELS, Steps
from algm_deploy.recipe.schema import Precision

Numbers = dict[str, np.ndarray]
"""By module and kind, such as `encoder.blocks.0.attn.qkv.steps`: scale, zero_point, levels (K, N), steps and bias (N)
of a quantised product, weight and bias of a norm of blocks."""
NORMS = ("norm1", "norm2")
_SHARE_STEP, _SHARE_ZERO = "attention.step of shares", "attention.zero points of shares"
_ZERO = "attention.zero points"
# Where nodes that take a product's bias take it; an Add has it on either side.
_BIAS = {"BiasGelu": 1, "MultiHeadAttention": 3, "SkipLayerNormalization": 4}
_NORM = {"LayerNormalization": 1, "SkipLayerNormalization": 2}  # where they take their weight
_MOVES, _READS = ("Reshape", "Transpose"), ("DequantizeLinear",)  # known here once more, as this checks the lowering
# In attention, the input from which a node's output comes: a score from the query, a sum of values from the shares.
_FROM = {"Where": 1} | dict.fromkeys(
    ("Add", "Cast", "DequantizeLinear", "Div", "Exp", "MatMul", "Mul", "QuantizeLinear", "Sub", "Transpose"), 0
)
_WORDS = {"zero_point": "zero point", "levels": "levels of the weight", "steps": "steps of the weight"}


def level_problems(
    bundle: Bundle, files: Iterable[str], precision: Precision, attention: Collection[str] = ()
) -> list[str]:
    """Where graphs of a bundle quantise other products than the manifest says, or otherwise; empty where none does.

    `precision`: in what the runtime that `files` are for executes the bundle. `attention`: those of `files` in which
    attention's products are of levels.

    Raises:
        BundleError: a graph or its weights cannot be read.
    """
    wanted = expected_numbers(load_network(bundle)) if computes_levels(bundle, precision) else {}
    exported = wanted if in_graphs(bundle.recipe.precision) else {}
    of = {TENSORRT_ONNX: centred(wanted)}
    of |= {file: expected_numbers(load_network(bundle, attention=True)) for file in attention}
    return [f"{file}: {one}" for file in files for one in _problems(bundle.file(file), of.get(file, exported))]


def expected_numbers(model: VitNetwork) -> Numbers:
    """What a graph of a quantised network has to hold."""
    found: Numbers = {}
    for name, module in model.named_modules():
        if isinstance(module, E4m3Linear):
            numbers = numbers_of(module) | {"bias": module.bias.numpy()}
            found |= {f"{name}.{kind}": array for kind, array in numbers.items()}
        elif isinstance(module, QuantizedLinear):
            kinds = ("scale", "zero_point", "levels", "steps", "bias")
            found |= {f"{name}.{kind}": getattr(module, kind).numpy() for kind in kinds}
        elif isinstance(module, Int8Attention):
            steps = Steps(*(getattr(module, step).numpy() for step in Steps._fields))
            found |= {f"{name}.{kind}": step for kind, step in steps._asdict().items()}
            # Not by the function that the graph has them from. A level of the query is one of it scaled.
            each = steps.query / np.float32(module.scale), steps.key, steps.value
            columns = module.qkv.out_features // len(each)
            found[f"{name}.{PACKED}"] = np.concatenate([np.full(columns, step, np.float32) for step in each])
        elif isinstance(module, Block):
            for norm in NORMS:
                found |= {f"{name}.{norm}.{k}": v.numpy() for k, v in getattr(module, norm).named_parameters()}
    if any(isinstance(module, Int8Attention) for module in model.modules()):
        found |= {_SHARE_STEP: np.array([1 / SHARE_LEVELS], np.float32)}
        found |= {_ZERO: np.zeros(1, np.int8), _SHARE_ZERO: np.zeros(1, np.uint8)}
    return found


def centred(wanted: Numbers) -> Numbers:
    """The same in a graph for TensorRT, which takes no zero points: what is quantised is shifted by `shift` first, and
    the bias makes good what the product then has too much (`lowering/tensorrt_zero_points.py`)."""
    found = dict(wanted)
    for name, zero_point in wanted.items():
        product, _, kind = name.rpartition(".")
        if kind != "zero_point":
            continue
        found[name] = np.zeros_like(zero_point)
        if zero_point:
            levels, steps, bias = (wanted[f"{product}.{kind}"] for kind in ("levels", "steps", "bias"))
            shift = wanted[f"{product}.scale"] * zero_point.astype(np.float32)
            sums = levels.astype(np.int64).sum(0).astype(np.float64) * steps
            found |= {f"{product}.shift": shift, f"{product}.bias": (bias - shift * sums).astype(bias.dtype)}
    return found


def _problems(path: Path, wanted: Numbers) -> Iterator[str]:
    try:
        graph = _Graph(path)
        found = graph.products() | graph.attention() | graph.norms(wanted)
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise BundleError(f"{path}: expected a graph with its weights: {str(error).splitlines()[0]:.200}") from error
    packed = [name for name in wanted if name.endswith(f".{PACKED}")]
    if packed and not found.keys() & set(packed):
        yield "expected attention whose queries, keys and values are rounded in one step, found none: build it again"
    for name in sorted(wanted.keys() | found.keys()):
        yield from _difference(name, wanted.get(name), found.get(name))
    yield from graph.crossings()
    yield from graph.roundings()
    products = sum(name.endswith(".levels") for name in wanted)
    # Queries, keys and values are written as one; a group of heads reads its own, and writes and reads its shares.
    groups, casts = graph.groups(), len(list(graph.casts()))
    expected = {
        "QuantizeLinear": products + len(packed) + groups - casts,
        "DequantizeLinear": 2 * products + 4 * groups,
    }
    for op_type, count in expected.items():
        if (there := sum(node.op_type == op_type for node in graph.nodes)) != count:
            yield f"expected {count} nodes {op_type}, found {there}: if an earlier version built it, build again"


class _Graph:
    """A graph whose initializers may lie in a file beside it."""

    def __init__(self, path: Path) -> None:
        graph = onnx.load(path, load_external_data=False).graph
        self.nodes, self._folder = graph.node, str(path.parent)
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._makers = {name: node for node in graph.node for name in node.output}
        self._users: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._users.setdefault(name, []).append(node)

    def products(self) -> Numbers:
        """Numbers of every product of levels, as its nodes read them; the name is that of the product's node."""
        found: Numbers = {}
        for node, inputs in self._linear():
            product = node.name.rpartition("/")[0]
            found |= {f"{product}.{kind}": array for kind, array in self._product(node, inputs)}
        return found

    def _linear(self) -> Iterator[tuple[NodeProto, list[NodeProto | None]]]:
        """Products of levels with a weight, and what makes their two sides."""
        for node in self.nodes:
            inputs = [self._makers.get(name) for name in node.input] if node.op_type == "MatMul" else []
            kinds = [maker.op_type if maker is not None else "" for maker in inputs]
            if "DequantizeLinear" in kinds and not self._is_attention(inputs):
                yield node, inputs

    def _is_attention(self, inputs: list[NodeProto | None]) -> bool:
        """Whether both sides of a product are made in the graph; of weights the levels are constants."""
        return all(maker is not None and maker.input[0] in self._makers for maker in inputs)

    def attention(self) -> Numbers:
        """The steps of attention's levels, by the names that they have; the step of its shares, which stands in the
        graph once for each, and the zero points of all of these."""
        found: Numbers = {}
        zeros, shares = [], [reader for cast in self.casts() for reader in self._dequantizers(cast)]
        linear = {
            self._laid_out(maker.input[0]) for _, inputs in self._linear() for maker in inputs if maker is not None
        }
        for node in (node for node in self.nodes if node.op_type == "QuantizeLinear" and node.output[0] not in linear):
            name, _, kind = node.name.rpartition("/")
            if kind == PACKED:
                found |= {f"{name}.{one}": array for one, array in self._parts(name, node)}
                zeros += [self._constant(one.input[2]) for one in (node, *self._readers(node))]
            else:
                shares += [node, *self._dequantizers(node)]
        steps, share_zeros = ([self._constant(node.input[place]) for node in shares] for place in (1, 2))
        kinds = {_SHARE_STEP: steps, _ZERO: zeros, _SHARE_ZERO: share_zeros}
        return found | {k: np.unique(np.concatenate([x.ravel() for x in all_])) for k, all_ in kinds.items() if all_}

    def casts(self) -> list[NodeProto]:
        """What makes shares levels where that is no QuantizeLinear."""
        return [node for node in self.nodes if node.op_type == "Cast" and self._dequantizers(node)]

    def roundings(self) -> Iterator[str]:
        """Where such a cast gets something else than shares in levels and a half."""
        for cast in self.casts():
            found: list[float] = []
            value = cast.input[0]
            for op_type in ("Add", "Mul"):
                maker = self._makers.get(value)
                if maker is not None and maker.op_type == op_type:
                    found.append(float(self._constant(maker.input[1])))
                    value = maker.input[0]
            if found != [0.5, SHARE_LEVELS]:
                yield f"{cast.name}: expected shares in {SHARE_LEVELS} levels and a half, found {found}"

    def _dequantizers(self, node: NodeProto) -> list[NodeProto]:
        return [user for user in self._users.get(node.output[0], []) if user.op_type in _READS]

    def groups(self) -> int:
        """Groups of heads in all attentions, which read their queries, keys and values apart."""
        return sum(len(self._split(node)) // len(Steps._fields) for node in self._packed())

    def crossings(self) -> Iterator[str]:
        """Where a group of heads meets another's keys or values, or is told in another's place."""
        group_of: dict[str, tuple[str, int]] = {}
        for node in self._packed():
            parts = self._split(node)
            groups = max(1, len(parts) // len(Steps._fields))
            group_of |= {part: (node.name.rpartition("/")[0], place % groups) for place, part in enumerate(parts)}
        for node in (node for node in self.nodes if node.op_type in ("MatMul", "Concat")):
            met = [group for name in node.input if (group := self._group(name, group_of)) is not None]
            if len(met) < len(node.input):
                continue
            places = [place for _, place in met]
            if node.op_type == "MatMul" and met[0] != met[1]:
                yield f"{node.name}: expected two sides of one group of heads, found {met[0]} and {met[1]}"
            if node.op_type == "Concat" and places != [*range(len(met))]:
                yield f"{node.name}: expected all groups of heads in order, found {places}"

    def _group(self, value: str, group_of: dict[str, tuple[str, int]]) -> tuple[str, int] | None:
        """Of which attention and group of heads a value is, if of any."""
        while value not in group_of:
            maker = self._makers.get(value)
            if maker is None or maker.op_type not in _FROM:
                return None
            value = maker.input[_FROM[maker.op_type]]
        return group_of[value]

    def _packed(self) -> Iterator[NodeProto]:
        return (n for n in self.nodes if n.op_type == "QuantizeLinear" and n.name.endswith(f"/{PACKED}"))

    def _split(self, node: NodeProto) -> list[str]:
        """The parts of packed levels: queries, keys and values of each group of heads, all queries first."""
        value = node.output[0]
        while True:
            users = self._users.get(value, [])
            if len(users) != 1 or users[0].op_type not in (*_MOVES, "Split"):
                return []
            if users[0].op_type == "Split":
                return [*users[0].output]
            value = users[0].output[0]

    def _readers(self, packed: NodeProto) -> Iterator[NodeProto]:
        """What makes numbers of packed levels."""
        for part in self._split(packed):
            yield from (user for user in self._users.get(part, []) if user.op_type in _READS)

    def _parts(self, name: str, packed: NodeProto) -> Iterator[tuple[str, np.ndarray]]:
        """The steps that an attention's packed rows are rounded by, and those by which its queries, keys and values are
        read, each part once."""
        yield PACKED, self._numbers(packed.input[1])
        parts = self._split(packed)
        for place, part in enumerate(parts):
            kind = Steps._fields[place * len(Steps._fields) // len(parts)]
            readers = self._users.get(part, [])
            if [reader.op_type for reader in readers] != [*_READS]:
                yield f"readers of part {place}", np.array(len(readers))
            for reader in (reader for reader in readers if reader.op_type in _READS):
                own = reader.input[1] == f"{name}.{kind}"
                yield kind if own else f"{kind} to read", self._constant(reader.input[1])

    def _constant(self, name: str) -> np.ndarray:
        """What a node `Constant` or an initializer holds."""
        maker = self._makers.get(name)
        if maker is None or maker.op_type != "Constant":
            return self._numbers(name)
        return numpy_helper.to_array(maker.attribute[0].t)

    def _product(self, node: NodeProto, inputs: list[NodeProto | None]) -> Iterator[tuple[str, np.ndarray]]:
        values, weight = inputs
        for kind, name in zip(("levels", "steps"), weight.input if weight else (), strict=False):
            yield kind, self._numbers(name)
        quantizer = self._makers.get(self._laid_out(values.input[0])) if values else None
        if values and quantizer and quantizer.op_type == "QuantizeLinear":
            for kind, wrote, reads in zip(("scale", "zero_point"), quantizer.input[1:], values.input[1:], strict=True):
                yield kind, self._numbers(wrote)
                if wrote != reads:
                    yield f"{kind} to read", self._numbers(reads)
            shifted = self._makers.get(quantizer.input[0])
            if shifted and shifted.name == f"{quantizer.name}{SHIFT}":
                yield "shift", self._numbers(shifted.input[1])
        if (bias := self._bias(node.output[0])) is not None:
            yield "bias", self._numbers(bias)

    def _laid_out(self, value: str) -> str:
        """What was laid out in another way to become a value: levels may be rounded before that."""
        while (maker := self._makers.get(value)) is not None and maker.op_type in _MOVES:
            value = maker.input[0]
        return value

    def _bias(self, value: str) -> str | None:
        for user in self._users.get(value, []):
            if user.op_type == "Split":
                return self._bias(user.output[0])
            names = [user.input[_BIAS[user.op_type]]] if user.op_type in _BIAS else user.input
            return next((name for name in names if name in self._tensors), None)
        return None

    def norms(self, wanted: Numbers) -> Numbers:
        """Weight and bias of the norms that are asked for."""
        found: Numbers = {}
        for node in self.nodes:
            name, first = node.name.rpartition("/")[0], _NORM.get(node.op_type)
            if first is not None and f"{name}.weight" in wanted:
                found[f"{name}.weight"], found[f"{name}.bias"] = map(self._numbers, node.input[first : first + 2])
        return found

    def _numbers(self, name: str) -> np.ndarray:
        if name not in self._tensors:
            raise ValueError(f"{name} is no constant")
        return numpy_helper.to_array(self._tensors[name], self._folder)


def _difference(name: str, wanted: np.ndarray | None, found: np.ndarray | None) -> Iterator[str]:
    product, _, kind = name.rpartition(".")
    told = f"{product}: expected {_WORDS.get(kind, kind)}"
    if wanted is None or found is None or (wanted.shape, wanted.dtype) != (found.shape, found.dtype):
        yield f"{told} {_short(wanted)}, found {_short(found)}"
    elif not np.array_equal(wanted, found):
        places = np.argwhere(wanted != found)
        place = tuple(int(index) for index in places[0])
        where = f" {place}" if place else ""
        more = f" ({len(places)} of {wanted.size} differ)" if place else ""
        yield f"{told}{where} {wanted[place]}, found {found[place]}{more}"


def _short(numbers: np.ndarray | None) -> str:
    if numbers is None:
        return "none"
    return str(numbers) if numbers.ndim == 0 else f"{numbers.dtype} of shape {numbers.shape}"
