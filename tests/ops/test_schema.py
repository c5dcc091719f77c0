"""One table of operators: PyTorch, ONNX bodies, NumPy references and tests follow it; bodies are portable."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from op_cases import operator_model
from operator_inputs import CLAP, GBM

from algm_deploy.bundle.graphs import DOMAIN
from algm_deploy.ops import reference
from algm_deploy.ops.bodies import BODIES
from algm_deploy.ops.schema import SCHEMAS, WORDS

OTHERS = {
    "tome": {"r": 3, "prefix": 1},
    "attention": {"heads": 2, "scale": 0.5},
    "proportional_attention": {"heads": 2, "scale": 0.5},
    "gelu": {},
    "packed_attention": {"heads": 2, "scale": 0.5},
    "bias_skip": {},
    "bias_skip_norm": {"epsilon": 1e-5},
    "layer_norm": {"epsilon": 1e-5},
    "patches": {"side": 2, "centre": 0.5, "scale": 2.0},
    "unmerge": {"prefix": 1},
    "elvit": {
        "grid": [4, 4],
        "centroids": [2, 2],
        "prefix": 1,
        "iterations": 2,
        "window": 3,
        "temperature": 0.5,
        "neighbours": 2,
        "semantics": "code",
    },
    "elvit_restore": {"prefix": 1},
    "cls_attention": {"heads": 2, "scale": 0.5},
    "evit": {"patches": 16, "rows": 16, "keep": 9, "prefix": 1},
    "g2tm": {"grid": [4, 4], "prefix": 1},
    "mpm": {"prefix": 1},
    "cts": {"grid": [4, 4], "prefix": 1, "shared": 2},
    "dtop": {"prefix": 1, "keep": 2},
    "deformable_attention": {"shapes": [4, 4, 2, 2]},
    "remerge": {"prefix": 1},
    "mask_labels": {"size": [8, 8]},
    "label_map": {"prefix": 1, "grid": [4, 4], "size": [8, 8]},
}


def combinations(attributes: dict[str, Any], *rules: str) -> list[dict[str, Any]]:
    """The attributes with every word in place of theirs."""
    words = WORDS | {"rule": rules}
    names = [name for name in attributes if name in words]
    return [attributes | dict(zip(names, chosen, strict=True)) for chosen in product(*(words[n] for n in names))]


MERGES = [
    *(("clap", a) for a in combinations({"grid": [4, 4], "window": [2, 2], **CLAP}, "threshold", "budget")),
    *(("gbm", a) for a in combinations(GBM, "adaptive", "fixed", "budget")),
]
VARIANTS = [*MERGES, *OTHERS.items()]
INPUT_RANKS = {
    "tokens": 3,
    "keys": 3,
    "qkv": 3,
    "product": 3,
    "x": 3,
    "image": 4,
    "bias": 1,
    "residual": 3,
    "weight": 1,
    "shift": 1,
    "values": 3,
    "score": 2,
    "confidence": 3,
    "scores": 3,
    "masks": 4,
    "classes": 3,
    "weights": 3,
    "value": 4,
    "locations": 6,
    "shares": 5,
    "size": 2,
    "map": 2,
    "length": 1,
    "threshold": 0,
    "attention": 2,
}


SHORT = {"tensor(float)": "fp32", "tensor(int64)": "int64"}


def body_nodes(op: str, attributes: dict[str, Any], dtype: str) -> list[ir.Node]:
    types = {"T": np.dtype(dtype), "tensor(float)": np.dtype("float32"), "tensor(int64)": np.dtype("int64")}
    kinds: list[Any] = [(types[p.type_str], INPUT_RANKS[p.name]) for p in SCHEMAS[op].inputs]
    if op == "gbm" and attributes["rule"] == "budget":
        kinds[0] = kinds[0][0], (2, 17, 16)
    (function,) = operator_model(op, attributes, kinds).functions.values()
    return list(function)


@pytest.mark.parametrize("op", SCHEMAS)
def test_pytorch_has_the_same_schema(op: str) -> None:
    schema, torch_schema = SCHEMAS[op], getattr(torch.ops.algm, op).default._schema
    inputs = [p.name for p in schema.inputs]
    arguments = {a.name: str(a.type) for a in torch_schema.arguments}
    assert list(arguments)[: len(inputs)] == inputs
    assert set(arguments) == {*inputs, *schema.attributes}  # ONNX sorts attributes by name
    optional = {p.name for p in schema.inputs if p.option == p.option.Optional}
    kinds = {"INT": "int", "INTS": "List[int]", "FLOAT": "float", "STRING": "str"}
    for name, kind in arguments.items():
        if name in inputs:
            assert kind == ("Optional[Tensor]" if name in optional else "Tensor")
        else:
            assert kind == kinds[schema.attributes[name].type.name]
            assert schema.attributes[name].required
    assert [str(r.type) for r in torch_schema.returns] == ["Tensor"] * len(schema.outputs)


@pytest.mark.parametrize("op", SCHEMAS)
def test_every_operator_is_complete(op: str) -> None:
    assert SCHEMAS[op].domain == DOMAIN
    assert op in BODIES
    assert callable(getattr(reference, op))
    assert (Path(__file__).parent / f"test_{op}.py").is_file()


@pytest.mark.parametrize("op", SCHEMAS)
def test_the_page_of_operators_has_it(op: str, root_dir: Path) -> None:
    schema = SCHEMAS[op]
    inputs, outputs = (
        ", ".join(
            f"{p.name}{'?' * (p.option == p.option.Optional)} {SHORT.get(p.type_str, p.type_str)}" for p in parameters
        )
        for parameters in (schema.inputs, schema.outputs)
    )
    row = f"| `{op}` | {inputs} | {', '.join(sorted(schema.attributes))} | {outputs} |"
    assert row in (root_dir / "docs" / "operators.md").read_text().splitlines()


def test_no_operator_is_missing_in_the_table() -> None:
    registered = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "algm::" in name
    }
    assert registered == set(SCHEMAS) == set(BODIES)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("op", "attributes"), VARIANTS, ids=lambda value: value if isinstance(value, str) else "")
def test_bodies_are_portable(op: str, attributes: dict[str, Any], dtype: str) -> None:
    """Standard operators only, at most one TopK, nothing scattered by addition, no branches or loops.

    The least of several is the same in any order; TensorRT, which takes no reduction, is not given G2TM's body.
    """
    nodes = body_nodes(op, attributes, dtype)
    kinds = [node.op_type for node in nodes]
    assert {node.domain for node in nodes} == {""}
    assert kinds.count("TopK") <= 1
    assert not {"Loop", "If", "Scan", "NonZero", "ScatterND"} & set(kinds)
    for node in nodes:
        if node.op_type == "ScatterElements":
            reduction = node.attributes.get("reduction")
            assert reduction is None or (op, reduction.as_string()) == ("g2tm", "min")


@pytest.mark.parametrize(
    ("op", "attributes"),
    [*MERGES, *((op, OTHERS[op]) for op in ("tome", "elvit", "evit"))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_similarities_are_fp32_for_16_bit_tokens(op: str, attributes: dict[str, Any]) -> None:
    """Between tokens and their products stands a Cast to fp32, and statistics are fp64."""
    nodes = body_nodes(op, attributes, "float16")
    products = [node for node in nodes if node.op_type == "MatMul"]
    assert products
    for node in products:
        assert ir.DataType.FLOAT in [kind for value in node.inputs for kind in casts_behind(value)]
    doubles = [node for node in nodes if node.op_type == "Cast" and node.attributes["to"].value == ir.DataType.DOUBLE]
    assert bool(doubles) == (attributes.get("rule") == "adaptive")


def casts_behind(value: ir.Value | None) -> set[int]:
    """The nearest casts that a value comes from."""
    node = value.producer() if value is not None else None
    if node is None:
        return set()
    if node.op_type in ("Cast", "CastLike"):
        return {node.attributes["to"].value} if node.op_type == "Cast" else {0}
    return {kind for other in node.inputs for kind in casts_behind(other)}
