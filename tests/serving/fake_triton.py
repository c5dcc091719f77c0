"""What Triton's Python backend hands to a model, as far as ours uses it: the real module exists inside the server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np


class TritonModelException(Exception):  # noqa: N818 - Triton's name
    pass


@dataclass
class TritonError:
    INVALID_ARG: ClassVar[int] = 3
    INTERNAL: ClassVar[int] = 1
    text: str
    code: int

    def message(self) -> str:
        return self.text


@dataclass
class Tensor:
    label: str
    array: np.ndarray

    def name(self) -> str:
        return self.label

    def as_numpy(self) -> np.ndarray:
        return self.array


@dataclass
class InferenceResponse:
    tensors: Sequence[Tensor] = ()
    error: TritonError | None = None


@dataclass
class Request:
    inputs: dict[str, np.ndarray]
    outputs: Sequence[str]

    def requested_output_names(self) -> list[str]:
        return list(self.outputs)


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    return Tensor(name, request.inputs[name]) if name in request.inputs else None


@dataclass
class Metric:
    labels: dict[str, str]
    value: float = 0

    def increment(self, by: float) -> None:
        self.value += by


@dataclass
class MetricFamily:
    COUNTER: ClassVar[str] = "counter"
    name: str
    description: str
    kind: str
    metrics: list[Metric] = field(default_factory=list)

    def Metric(self, labels: dict[str, str]) -> Metric:  # noqa: N802 - Triton's name
        self.metrics.append(Metric(labels))
        return self.metrics[-1]


class Logger:
    lines: ClassVar[list[str]] = []

    @staticmethod
    def log_info(line: str) -> None:
        Logger.lines.append(line)


def answers(responses: Sequence[InferenceResponse]) -> list[dict[str, np.ndarray] | str]:
    """The outputs of each response by name, or its error."""
    return [
        one.error.message() if one.error else {tensor.name(): tensor.as_numpy() for tensor in one.tensors}
        for one in responses
    ]


def arguments(model: Any, config: dict[str, Any]) -> dict[str, str]:
    """What Triton calls `initialize` with: the configuration as JSON, and where the model lies."""
    return {
        "model_config": json.dumps(config),
        "model_name": "net",
        "model_repository": str(model),
        "model_version": "1",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }
