"""One description of an operator: the Python function gives name, inputs and attributes, `operator` the types.

`operator` registers the function with PyTorch as `algm::NAME` and keeps the schema that ONNX sees in `SCHEMAS`. The
ONNX exporter, the bodies and the native libraries follow it; a test compares the two registrations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args

import torch
from onnx.defs import OpSchema
from torch._library.custom_ops import CustomOpDef

from algm_deploy.bundle.graphs import DOMAIN, VERSION
from algm_deploy.recipe.plan import Batching, Semantics, TokenOrder

Operator = CustomOpDef  # torch.library has the name, its type stubs do not
SCHEMAS: dict[str, OpSchema] = {}
WORDS: dict[str, tuple[str, ...]] = {
    "semantics": get_args(Semantics),
    "batch": get_args(Batching),
    "order": get_args(TokenOrder),
    "rule": ("threshold", "adaptive", "fixed", "budget"),
}
"""The words of each attribute that is a word. Their places are the enum values of runtimes/kernels/algm_kernels.h."""

_TYPES = {
    "T": (["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "token values"),
    "L": (["tensor(uint8)", "tensor(int32)"], "labels"),
}
_FIXED_TYPES = {"i64": "tensor(int64)", "f32": "tensor(float)"}
_ATTRIBUTES = {
    int: OpSchema.AttrType.INT,
    list[int]: OpSchema.AttrType.INTS,
    float: OpSchema.AttrType.FLOAT,
    str: OpSchema.AttrType.STRING,
}


def operator(inputs: str, outputs: str) -> Callable[[Callable[..., Any]], Operator]:
    """Makes a function an operator: its tensors are the inputs, its other parameters the attributes.

    Args:
        inputs: `name:type` of each, with a question mark after the name of an optional one. Types are i64, f32, T for
            token values and L for labels.
        outputs: likewise.
    """

    def register(function: Callable[..., Any]) -> Operator:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        used = {parameter.split(":")[1] for parameter in f"{inputs} {outputs}".split()}
        SCHEMAS[function.__name__] = OpSchema(
            function.__name__,
            DOMAIN,
            VERSION,
            doc=inspect.getdoc(function) or "",
            inputs=[_parameter(text) for text in inputs.split()],
            outputs=[_parameter(text) for text in outputs.split()],
            type_constraints=[(name, *_TYPES[name]) for name in _TYPES if name in used],
            attributes=[
                OpSchema.Attribute(p.name, _ATTRIBUTES[p.annotation], required=True)
                for p in parameters
                if p.annotation in _ATTRIBUTES
            ],
        )
        return torch.library.custom_op(f"{DOMAIN}::{function.__name__}", function, mutates_args=())

    return register


def _parameter(text: str) -> OpSchema.FormalParameter:
    name, kind = text.split(":")
    option = OpSchema.FormalParameterOption.Optional if name.endswith("?") else OpSchema.FormalParameterOption.Single
    return OpSchema.FormalParameter(name.rstrip("?"), _FIXED_TYPES.get(kind, kind), param_option=option)
