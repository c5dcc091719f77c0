"""The part of Triton's model configuration that repositories use: messages by name, and of each field its type.

A field is a scalar type of protobuf, the name of a message, or the values of an enumeration; `*` marks repeated ones.
Where tritonclient is installed, a test reads the files by Triton's own schema as well.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

_TYPE = ("TYPE_UINT8", "TYPE_INT32", "TYPE_INT64", "TYPE_FP32", "TYPE_BOOL", "TYPE_STRING")
_MESSAGES: dict[str, dict[str, Any]] = {
    "ModelConfig": {
        "name": "string",
        "backend": "string",
        "max_batch_size": "int32",
        "input": "*ModelInput",
        "output": "*ModelOutput",
        "instance_group": "*ModelInstanceGroup",
        "dynamic_batching": "ModelDynamicBatching",
        "model_warmup": "*ModelWarmup",
        "parameters": "*Parameter",
        "model_operations": "ModelOperations",
        "optimization": "ModelOptimization",
    },
    "ModelInput": {
        "name": "string",
        "data_type": _TYPE,
        "dims": "*int64",
        "optional": "bool",
        "allow_ragged_batch": "bool",
    },
    "ModelOutput": {"name": "string", "data_type": _TYPE, "dims": "*int64"},
    "ModelInstanceGroup": {"kind": ("KIND_CPU", "KIND_GPU"), "count": "int32"},
    "ModelDynamicBatching": {
        "preferred_batch_size": "*int32",
        "max_queue_delay_microseconds": "uint64",
        "default_queue_policy": "ModelQueuePolicy",
    },
    "ModelQueuePolicy": {"max_queue_size": "uint32"},
    "ModelWarmup": {"name": "string", "batch_size": "uint32", "inputs": "*WarmupInput"},
    "WarmupInput": {"key": "string", "value": "WarmupTensor"},
    "WarmupTensor": {"data_type": _TYPE, "dims": "*int64", "zero_data": "bool"},
    "Parameter": {"key": "string", "value": "ParameterValue"},
    "ParameterValue": {"string_value": "string"},
    "ModelOperations": {"op_library_filename": "*string"},
    "ModelOptimization": {"execution_accelerators": "Accelerators"},
    "Accelerators": {"gpu_execution_accelerator": "*Accelerator"},
    "Accelerator": {"name": "string", "parameters": "*Option"},
    "Option": {"key": "string", "value": "string"},
}


def _config_class() -> Any:
    field_proto = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="triton.proto", package="triton_schema", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields.items(), 1):
            repeated = isinstance(kind, str) and kind.startswith("*")
            label = field_proto.LABEL_REPEATED if repeated else field_proto.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, label=label)
            if isinstance(kind, tuple):
                made.type, made.type_name = field_proto.TYPE_ENUM, f".triton_schema.{name}.{field.title()}"
                values = message.enum_type.add(name=field.title()).value
                for value, word in enumerate(kind):
                    values.add(name=word, number=value)
            elif (plain := kind.removeprefix("*")) in _MESSAGES:
                made.type, made.type_name = field_proto.TYPE_MESSAGE, f".triton_schema.{plain}"
            else:
                made.type = getattr(field_proto, f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("triton_schema.ModelConfig"))


def parsed(text: str) -> Any:
    """A configuration; protobuf raises for syntax, an unknown field or a value of another kind."""
    return text_format.Parse(text, _config_class()())
