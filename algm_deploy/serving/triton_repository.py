"""Model repositories for Triton: a bundle behind its Python, ONNX Runtime or TensorRT backend.

Source: triton-inference-server/server, docs/user_guide/model_repository.md and model_configuration.md.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from algm_deploy.bundle.files import storage_errors, workspace
from algm_deploy.bundle.manifest import MANIFEST
from algm_deploy.bundle.signature import Signature, Tensor
from algm_deploy.bundle.store import Bundle
from algm_deploy.environment import cuda_devices
from algm_deploy.errors import BundleError, RuntimeUnavailableError
from algm_deploy.native_libraries import require_library
from algm_deploy.predictor import batch_sizes, given_thresholds, sizes_to_warm
from algm_deploy.runners.registry import RUNTIMES, TRITON_BACKENDS, Runtime, default_runtime, row_of
from algm_deploy.serving.answers import output_names
from algm_deploy.serving.protocol import (
    ENCODED,
    IMAGE,
    LABELS,
    LABELS_PNG,
    PATCHES,
    TOKEN_COUNTS,
    TOKENS_PNG,
    check_name,
)

if TYPE_CHECKING:
    import onnx

PYTHON = TRITON_BACKENDS[0]

_MODEL = '''"""What Triton's Python backend runs: algm-deploy has to be installed in its Python."""

from algm_deploy.serving.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
_TYPES = {"uint8": "UINT8", "int32": "INT32", "int64": "INT64", "float32": "FP32", "bool": "BOOL", "bytes": "STRING"}


@dataclass(frozen=True)
class Settings:
    """How Triton serves a bundle.

    Args:
        name: of the model in addresses.
        backend: one of `TRITON_BACKENDS`.
        runtime: that executes; by default the best of this backend for the bundle.
        device: `cpu`, or `cuda` for all GPUs of the server's machine; by default the runtime's usual one here.
        instances: of the network, on each GPU or on the CPU.
        wait_s: how long a request waits for others to share its batch.
        queue: how many requests wait; further ones are refused.
        most_pixels: of a picture; the Python backend alone reads pictures.
        tau, gbm, dense: instead of the bundle's thresholds, as `Predictor` has them.
        seen_at: absolute folder under which the server finds the repository; by default where it is written.
    """

    name: str
    backend: str = PYTHON
    runtime: str | None = None
    device: str | None = None
    instances: int = 1
    wait_s: float = 0.002
    queue: int = 64
    most_pixels: int = 50_000_000
    tau: float | None = None
    gbm: float | None = None
    dense: bool = False
    seen_at: Path | None = None


def write_repository(bundle: Bundle, repository: Path, settings: Settings) -> Path:
    """Adds a bundle to a repository, which is made where there is none; returns the model's folder.

    The folder is whole or not there at all, and holds all it needs: nothing of the bundle is read later.

    Raises:
        BundleError: the name does not fit or is taken, the bundle is incomplete, or it does not fit a threshold.
        RuntimeUnavailableError: the runtime is none of the backend's.
        BuildError: a native library is missing.
    """
    check_name(settings.name)
    row = _row(bundle, settings)
    thresholds = given_thresholds(bundle, settings.tau, settings.gbm, settings.dense)
    target = repository / settings.name
    with storage_errors(target, repository):
        repository.mkdir(parents=True, exist_ok=True)
        if target.exists():
            raise BundleError(f"expected no model of this name yet, got {target}: remove it, or choose another --name")
        with workspace(repository) as work:
            model = work / settings.name
            (model / "1").mkdir(parents=True)
            config = _WRITERS[settings.backend](bundle, model, thresholds, settings, row)
            (model / "config.pbtxt").write_text("\n".join(_text(config)) + "\n", encoding="utf-8")
            model.rename(target)
    return target


def _row(bundle: Bundle, settings: Settings) -> Runtime:
    """The runtime that executes."""
    rows = [row for row in RUNTIMES.values() if settings.backend in (PYTHON, row.triton)]
    if settings.runtime is None and settings.backend == PYTHON:
        return row_of(default_runtime(bundle.files, settings.device))
    if settings.runtime is None:  # the one that was built, else the first
        return min(rows, key=lambda row: row.own not in bundle.files)
    if (row := row_of(settings.runtime)) in rows:
        return row
    raise RuntimeUnavailableError(
        f"expected {' or '.join(one.name for one in rows)} for Triton's backend {settings.backend}, got {row.name}: "
        f"choose another --runtime, or --backend {PYTHON}, which serves every runtime"
    )


def _on_gpu(settings: Settings, row: Runtime) -> bool:
    if settings.device is None:
        return row.needs_gpu or ("cuda" in row.devices and bool(cuda_devices()))
    if settings.device not in row.devices:
        raise RuntimeUnavailableError(
            f"{row.name} executes on {' or '.join(row.devices)}, got {settings.device!r}: leave the device out"
        )
    return settings.device == "cuda"


# ----------------------------------------------------------------------------------------------------- one a backend


def _python(
    bundle: Bundle, model: Path, thresholds: Mapping[str, float], settings: Settings, row: Runtime
) -> dict[str, Any]:
    """The bundle itself behind our runner: pictures in, label maps out, thresholds with each picture."""
    _copy_bundle(bundle, model / "1" / "bundle")
    (model / "1" / "model.py").write_text(_MODEL, encoding="utf-8")
    recipe, signature = bundle.recipe, bundle.signature
    inputs = [
        {**_tensor(IMAGE, "uint8", -1, -1, 3), "optional": True, "allow_ragged_batch": True},
        {**_tensor(ENCODED, "bytes", 1), "optional": True},
    ]
    inputs += [
        {**_tensor(name, dtype, 1), "optional": True}
        for name, dtype in (("tau", "float32"), ("gbm", "float32"), ("dense", "bool"))
    ]
    outputs = [
        _tensor(LABELS, "uint8" if recipe.network.classes <= 255 else "int32", -1, -1),
        _tensor(LABELS_PNG, "bytes", 1),
        _tensor(TOKENS_PNG, "bytes", 1),
        _tensor(TOKEN_COUNTS, "int64", len(signature.merges)),
        _tensor(PATCHES, "int64", 1),
    ]
    had = output_names(bundle)
    sizes = sizes_to_warm(signature.max_batch, _on_gpu(settings, row))
    parameters = {"runtime": row.name, "max_pixels": settings.most_pixels}
    parameters |= {name: value for name in ("tau", "gbm") if (value := getattr(settings, name)) is not None}
    parameters |= {"dense": "true"} if settings.dense else {}
    return {
        **_head(settings, row, signature.max_batch),
        "input": inputs,
        "output": [one for one in outputs if one["name"] in had],
        **_batching(settings, signature.max_batch),
        **_warm_up(IMAGE, "uint8", (*recipe.network.image_size, 3), sizes),
        "parameters": [{"key": key, "value": {"string_value": str(value)}} for key, value in parameters.items()],
    }


def _onnxruntime(
    bundle: Bundle, model: Path, thresholds: Mapping[str, float], settings: Settings, row: Runtime
) -> dict[str, Any]:
    """The graph that the runtime executes, with constant thresholds: windows in, labels or scores out."""
    from algm_deploy.lowering.fixed import needs_operators

    name = row.executable(bundle.files)
    if name is None:
        raise BundleError(f"{bundle.path} holds nothing that {row.name} executes: export it again")
    graph = _copy_graph(bundle, name, model / "1", thresholds)
    config = _of_network(bundle, settings, row, min(_images_of(graph, bundle.signature), _most_images(bundle)))
    if needs_operators(graph):
        library = shutil.copy2(require_library("ort_custom_op"), model / "1")
        config["model_operations"] = {"op_library_filename": _seen(settings, model, Path(library))}
    if _on_gpu(settings, row):
        config["optimization"] = {"execution_accelerators": {"gpu_execution_accelerator": _cuda_options()}}
    return config


def _tensorrt(
    bundle: Bundle, model: Path, thresholds: Mapping[str, float], settings: Settings, row: Runtime
) -> dict[str, Any]:
    """The network that engines are built from, with constant thresholds, and the commands that build the plan.

    An engine belongs to a release of TensorRT and to a kind of GPU, which are the server's: it is built there.
    """
    from algm_deploy.lowering.tensorrt import TENSORRT_ONNX, write_tensorrt_onnx

    place = model / "network"
    place.mkdir()
    source = bundle
    if TENSORRT_ONNX not in bundle.files:
        source = _copy_bundle(bundle, model / "made-from")
        write_tensorrt_onnx(source, bundle.recipe.precision)
    _copy_graph(source, TENSORRT_ONNX, place, thresholds)
    if source is not bundle:
        shutil.rmtree(source.path)
    library = Path(shutil.copy2(require_library("trt_plugin"), place)).name
    most, shape = _most_images(bundle), "x".join(map(str, bundle.signature.image.shape[1:]))
    shapes = " ".join(f"--{kind}Shapes=image:{n}x{shape}" for kind, n in (("min", 1), ("opt", most), ("max", most)))
    script = model / "build-plan.sh"
    script.write_text(_BUILD_PLAN.format(library=quote(library), shapes=shapes), encoding="utf-8")
    script.chmod(0o755)
    return _of_network(bundle, settings, row, most)


_WRITERS = {PYTHON: _python, "onnxruntime": _onnxruntime, "tensorrt": _tensorrt}

_BUILD_PLAN = """\
#!/bin/sh
# Builds 1/model.plan with the TensorRT and for the GPU of this machine: run it where the server runs, in its container.
# The plugins go into the plan. Then start `tritonserver --backend-config=tensorrt,version-compatible=true`; without
# that, TensorRT takes no plan with code in it.
set -eu
cd "$(dirname "$0")"
typed=
if trtexec --help 2>&1 | grep -q stronglyTyped; then typed=--stronglyTyped; fi # TensorRT 11 knows no other networks
trtexec --onnx=network/model.onnx $typed --dynamicPlugins=network/{library} --setPluginsToSerialize=network/{library} \
    {shapes} --saveEngine=1/model.plan
"""


# --------------------------------------------------------------------------------------------------------------- files


def _copy_bundle(bundle: Bundle, target: Path) -> Bundle:
    """A copy of a bundle's own files, without its variants and reports, checked."""
    for name in (MANIFEST, *bundle.files):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(bundle.path / name, target / name)
    copy = Bundle.open(target)
    copy.verify()
    return copy


def _copy_graph(bundle: Bundle, name: str, folder: Path, thresholds: Mapping[str, float]) -> onnx.ModelProto:
    """Writes `model.onnx`: a graph of the bundle at one operating point; its weights lie beside it."""
    from algm_deploy.lowering.fixed import write_fixed

    path = bundle.file(name)
    for companion in bundle.files[name].uses:
        shutil.copy2(bundle.path / companion, folder / companion)
    return write_fixed(path, folder / "model.onnx", {**bundle.signature.defaults, **thresholds})


def _seen(settings: Settings, model: Path, file: Path) -> str:
    """The path of a model's file on the server's machine, absolute: backends resolve no other."""
    root = settings.seen_at or model.parent.parent.resolve()
    return str(root / settings.name / file.relative_to(model))


# -------------------------------------------------------------------------------------------------------------- config


def _of_network(bundle: Bundle, settings: Settings, row: Runtime, images: int) -> dict[str, Any]:
    """The configuration of a network that takes windows; `images` is 0 where its graph is for one at a time."""
    signature = bundle.signature
    axis = (1,) if not images else ()  # Triton adds the axis of a batch where there are batches

    def whole(tensor: Tensor) -> dict[str, Any]:
        return _tensor(tensor.name, tensor.dtype, *axis, *tensor.shape[1:])

    sizes = sizes_to_warm(images, _on_gpu(settings, row)) if images else (0,)
    outputs = [one for one in signature.outputs[:2] if 0 not in one.shape]  # no counts where nothing merges
    return {
        **_head(settings, row, images),
        "input": [whole(signature.image)],
        "output": [whole(one) for one in outputs],
        **(_batching(settings, images) if images else {}),
        **_warm_up(signature.image.name, signature.image.dtype, (*axis, *signature.image.shape[1:]), sizes),
    }


def _most_images(bundle: Bundle) -> int:
    """How many windows of different requests a network takes at once: one where they would change each other."""
    return 1 if bundle.recipe.merging.batch == "batch_min" else bundle.signature.max_batch


def _head(settings: Settings, row: Runtime, batch: int) -> dict[str, Any]:
    kind = _Word("KIND_GPU" if _on_gpu(settings, row) else "KIND_CPU")
    return {
        "name": settings.name,
        "backend": settings.backend,
        "max_batch_size": batch,
        "instance_group": [{"kind": kind, "count": settings.instances}],
    }


def _batching(settings: Settings, batch: int) -> dict[str, Any]:
    return {
        "dynamic_batching": {
            "preferred_batch_size": [size for size in batch_sizes(batch) if size > 1 or batch == 1],
            "max_queue_delay_microseconds": round(settings.wait_s * 1e6),
            "default_queue_policy": {"max_queue_size": settings.queue},
        }
    }


def _warm_up(name: str, dtype: str, shape: tuple[int, ...], sizes: Sequence[int]) -> dict[str, Any]:
    """Blank pictures before the first request, as a runtime's first run is slow; 0: one, of a model without batches."""
    blank = {"data_type": _Word(f"TYPE_{_TYPES[dtype]}"), "dims": list(shape), "zero_data": True}
    inputs = {"key": name, "value": blank}
    return {"model_warmup": [{"name": f"{n or 1} at once", "batch_size": n, "inputs": inputs} for n in sizes]}


def _cuda_options() -> dict[str, Any]:
    """The options of ONNX Runtime's CUDA provider under which a bundle is verified."""
    from algm_deploy.runners.onnxruntime.sessions import CUDA_OPTIONS

    return {"name": "cuda", "parameters": [{"key": key, "value": value} for key, value in CUDA_OPTIONS.items()]}


def _images_of(graph: onnx.ModelProto, signature: Signature) -> int:
    """The largest batch of a graph, 0 where it is for single images."""
    (image,) = (one for one in graph.graph.input if one.name == signature.image.name)
    return 0 if image.type.tensor_type.shape.dim[0].dim_value == 1 else signature.max_batch


def _tensor(name: str, dtype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "data_type": _Word(f"TYPE_{_TYPES[dtype]}"), "dims": list(shape)}


class _Word(str):
    """A name of an enumeration, which is written without quotes."""

    __slots__ = ()


def _text(message: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Lines of a message in protobuf's text format; a list is a repeated field."""
    for name, value in message.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping):
                yield f"{indent}{name} {{"
                yield from _text(one, indent + "  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{name}: {_scalar(one)}"


def _scalar(value: object) -> str:
    if isinstance(value, _Word):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
