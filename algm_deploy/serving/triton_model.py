"""A bundle inside Triton's Python backend, in the process that Triton starts for each instance of the model."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton

from algm_deploy.environment import usable_cores
from algm_deploy.errors import AlgmDeployError, BundleError, ImageError, RequestError
from algm_deploy.pictures.sliding import Pending
from algm_deploy.predictor import Predictor, given_thresholds
from algm_deploy.serving.answers import Answers, token_rows
from algm_deploy.serving.protocol import ENCODED, IMAGE, TOKENS_PNG, Asked, Value, merging_of

_LOG = logging.getLogger("algm_deploy")
_THREADS = min(8, usable_cores())
_THRESHOLDS = ("tau", "gbm", "dense")


@dataclass
class _Work:
    """One request on its way. `error` is what its client alone is told; then the rest is empty."""

    asked: Asked = field(default_factory=lambda: Asked([], {}))
    thresholds: list[dict[str, float]] = field(default_factory=list)  # one for each picture
    pictures: list[Pending] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    error: AlgmDeployError | None = None


class TritonPythonModel:
    """What Triton calls. The names of its methods, their arguments and their order are Triton's."""

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the bundle that lies beside `model.py`, on the device of this instance, and warms it up.

        The parameters of `config.pbtxt` are `runtime`, `max_pixels`, and `tau`, `gbm`, `dense` where they are not the
        bundle's.
        """
        parameters = json.loads(args["model_config"]).get("parameters", {})
        settings = {name: one["string_value"] for name, one in parameters.items()}
        bundle = Path(args["model_repository"]) / args["model_version"] / "bundle"
        gpu = args["model_instance_kind"] == "GPU"
        try:
            self._predictor = Predictor(
                bundle,
                settings["runtime"],
                device=f"cuda:{args['model_instance_device_id']}" if gpu else "cpu",
                tau=_number(settings, "tau"),
                gbm=_number(settings, "gbm"),
                dense=settings.get("dense") == "true",
            )
            # In the thread that also executes, and before Triton calls the model ready.
            if self._predictor.on_gpu:
                triton.Logger.log_info(f"{args['model_name']}: {self._predictor.warm_up()}")
        except AlgmDeployError as error:
            raise triton.TritonModelException(str(error)) from error
        self._answers = Answers(self._predictor, int(settings["max_pixels"]))
        self._defaults = {name: float(value) for name, value in self._predictor.thresholds.items()}
        self._threads = ThreadPoolExecutor(_THREADS, "pictures")
        self._metrics = _Metrics(args["model_name"], self._answers.merges)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """A response for each request, in their order; one that cannot be answered harms no other."""
        work = [_guarded(partial(self._read, request)) for request in requests]
        work = list(self._threads.map(self._prepare, work))
        self._run(one for one in work if one.error is None)
        return [self._response(one) for one in self._threads.map(self._evaluate, work)]

    def finalize(self) -> None:
        """Frees the runtime."""
        self._threads.shutdown()
        self._predictor.close()

    def _read(self, request: Any) -> _Work:
        given = {name: _input(request, name) for name in (IMAGE, ENCODED, *_THRESHOLDS)}
        if (given[IMAGE] is None) == (given[ENCODED] is None):
            raise RequestError(f"expected one of the inputs {IMAGE} and {ENCODED}, got both or none")
        pictures = list(given[IMAGE]) if given[ENCODED] is None else [bytes(one) for one in given[ENCODED].ravel()]
        if not pictures or any(isinstance(one, np.ndarray) and not one.size for one in pictures):
            raise RequestError("expected at least one picture of at least one pixel")
        rows = {name: given[name].ravel().tolist() for name in _THRESHOLDS if given[name] is not None}
        thresholds = []
        for number in range(len(pictures)):
            merging = merging_of({name: values[number] for name, values in rows.items()})
            thresholds.append({**self._defaults, **given_thresholds(self._predictor.bundle, **_all_of(merging))})
        return _Work(Asked(pictures, dict.fromkeys(request.requested_output_names(), True)), thresholds)

    def _prepare(self, work: _Work) -> _Work:
        def prepared() -> _Work:
            work.pictures = self._answers.prepared(work.asked)
            return work

        return work if work.error else _guarded(prepared)

    def _run(self, work: Iterable[_Work]) -> None:
        """Runs pictures of all requests; those of the same thresholds share batches."""
        groups: dict[Any, list[tuple[_Work, Pending]]] = defaultdict(list)
        for one in work:
            maps = TOKENS_PNG in one.asked.outputs
            for picture, thresholds in zip(one.pictures, one.thresholds, strict=True):
                groups[tuple(sorted(thresholds.items())), maps].append((one, picture))
        for (thresholds, maps), members in groups.items():
            errors = self._predictor.run_apart([picture for _, picture in members], dict(thresholds), token_maps=maps)
            for (owner, _), error in zip(members, errors, strict=True):
                owner.error = owner.error or error

    def _evaluate(self, work: _Work) -> _Work:
        def evaluated() -> _Work:
            work.values = self._answers.values(work.asked, work.pictures)
            return work

        return work if work.error else _guarded(evaluated)

    def _response(self, work: _Work) -> Any:
        if work.error:
            fault = isinstance(work.error, ImageError | BundleError | RequestError) and not _is_ours(work.error)
            code = triton.TritonError.INVALID_ARG if fault else triton.TritonError.INTERNAL
            return triton.InferenceResponse(error=triton.TritonError(str(work.error), code))
        for patches, counts in token_rows(work.values):
            self._metrics.count(patches, counts)
        tensors = [triton.Tensor(name, _tensor(work.values[name])) for name in work.asked.outputs]
        return triton.InferenceResponse(tensors)


class _Metrics:
    """Counters that Triton shows beside its own, which tell of requests, batches and queues."""

    def __init__(self, model: str, merges: Sequence[str]) -> None:
        kind = triton.MetricFamily.COUNTER
        # Triton forgets a family of which Python holds nothing.
        self._families = (
            triton.MetricFamily("algm_patches_total", "Patches of the pictures, before merging", kind),
            triton.MetricFamily("algm_tokens_total", "Tokens left after each merge", kind),
        )
        patches, tokens = self._families
        self._patches = patches.Metric(labels={"model": model})
        self._tokens = [tokens.Metric(labels={"model": model, "merge": merge}) for merge in merges]

    def count(self, patches: int, counts: Sequence[int]) -> None:
        self._patches.increment(patches)
        for metric, count in zip(self._tokens, counts, strict=True):
            metric.increment(count)


def _guarded(work: Callable[[], _Work]) -> _Work:
    """What `work` makes, or the error that its client is told."""
    try:
        return work()
    except AlgmDeployError as error:
        return _Work(error=error)
    except Exception:  # noqa: BLE001 - one request ends, the model goes on, and the log has it whole
        _LOG.exception("a request could not be answered")
        return _Work(error=RequestError("the model failed; the server's log tells more", 500))


def _is_ours(error: AlgmDeployError) -> bool:
    """Whether a request met a fault of the server's."""
    return isinstance(error, RequestError) and error.status >= 500


def _input(request: Any, name: str) -> Any:
    """An input as an array, None where the request has none."""
    tensor = triton.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def _all_of(merging: dict[str, Any]) -> dict[str, Any]:
    return {"tau": None, "gbm": None, **merging}


def _number(settings: dict[str, str], name: str) -> float | None:
    return float(settings[name]) if name in settings else None


def _tensor(value: Value) -> Any:
    """As Triton takes it, where an output has a row for each picture."""
    if isinstance(value, list):
        return np.array(value, np.object_)[:, None]
    return value[:, None] if value.ndim == 1 else np.ascontiguousarray(value)
