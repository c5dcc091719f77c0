"""The schema of the operators as ONNX sees them: domain `algm`, version 1.

Names, inputs, attributes and outputs are those of the PyTorch operators; a test compares the two. The ONNX exporter,
the function bodies and the native libraries follow this table.
"""

from __future__ import annotations

from onnx.defs import OpSchema

DOMAIN = "algm"
VERSION = 1

_TOKEN_TYPES = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_LABEL_TYPES = ["tensor(uint8)", "tensor(int32)"]
_INT, _INTS, _FLOAT, _STRING = (
    OpSchema.AttrType.INT,
    OpSchema.AttrType.INTS,
    OpSchema.AttrType.FLOAT,
    OpSchema.AttrType.STRING,
)


def _parameter(text: str) -> OpSchema.FormalParameter:
    """`name:type`, with a question mark behind the name of an optional input."""
    name, kind = text.split(":")
    option = OpSchema.FormalParameterOption.Optional if name.endswith("?") else OpSchema.FormalParameterOption.Single
    types = {"i64": "tensor(int64)", "f32": "tensor(float)"}
    return OpSchema.FormalParameter(name.rstrip("?"), types.get(kind, kind), param_option=option)


def _schema(name: str, inputs: str, outputs: str, attributes: dict[str, OpSchema.AttrType], doc: str) -> OpSchema:
    used = {parameter.split(":")[1] for parameter in f"{inputs} {outputs}".split()}
    constraints = [("T", _TOKEN_TYPES, "token values"), ("L", _LABEL_TYPES, "labels")]
    return OpSchema(
        name,
        DOMAIN,
        VERSION,
        doc=doc,
        inputs=[_parameter(text) for text in inputs.split()],
        outputs=[_parameter(text) for text in outputs.split()],
        type_constraints=[c for c in constraints if c[0] in used],
        attributes=[OpSchema.Attribute(key, kind, required=True) for key, kind in attributes.items()],
    )


SCHEMAS: dict[str, OpSchema] = {
    schema.name: schema
    for schema in (
        _schema(
            "clap",
            "tokens:T size:f32 threshold:f32",
            "tokens:T size:f32 map:i64 length:i64",
            {"grid": _INTS, "window": _INTS, "prefix": _INT, "semantics": _STRING, "batch": _STRING, "order": _STRING},
            "Conditional local average pooling: windows of similar patches become one token each.",
        ),
        _schema(
            "gbm",
            "tokens:T size:f32 map:i64 length:i64 threshold:f32",
            "tokens:T size:f32 map:i64 length:i64",
            {"prefix": _INT, "mode": _STRING, "divisor": _FLOAT, "semantics": _STRING, "batch": _STRING},
            "Global bipartite merging: tokens join the most similar token of the other half.",
        ),
        _schema(
            "attention",
            "qkv:T length?:i64",
            "values:T",
            {"heads": _INT, "scale": _FLOAT},
            "Self-attention from packed queries, keys and values; keys behind `length` are not attended to.",
        ),
        _schema(
            "proportional_attention",
            "qkv:T size:f32",
            "values:T",
            {"heads": _INT, "scale": _FLOAT},
            "Self-attention in which a key weighs as much as the patches it stands for.",
        ),
        _schema(
            "tome",
            "tokens:T size:f32 map:i64 keys:T",
            "tokens:T size:f32 map:i64",
            {"r": _INT, "prefix": _INT},
            "Token merging: the r pairs of most similar keys join.",
        ),
        _schema(
            "unmerge", "values:T map:i64", "values:T", {"prefix": _INT}, "Every patch gets the row that stands for it."
        ),
        _schema(
            "label_map",
            "scores:T map:i64",
            "labels:L",
            {"prefix": _INT, "grid": _INTS, "size": _INTS},
            "Scores of merged tokens to one label a pixel: gather, bilinear interpolation, argmax.",
        ),
    )
}
