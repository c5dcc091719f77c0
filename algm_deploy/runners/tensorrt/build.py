"""Bundle -> engines for TensorRT or TensorRT-RTX: the graph for them, what PyTorch computes for it, and their records.

The builder runs in a process of its own (`apart.py`); what it does there is `engine.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from algm_deploy.bundle.records import Engine, EngineStretches
from algm_deploy.bundle.store import Bundle
from algm_deploy.environment import cuda_capability
from algm_deploy.errors import BuildError
from algm_deploy.lowering.tensorrt import TENSORRT_ONNX, write_tensorrt_onnx
from algm_deploy.lowering.tensorrt_stretches import write_stretches
from algm_deploy.native_libraries import require_library
from algm_deploy.recipe.schema import Precision
from algm_deploy.runners.registry import row_of
from algm_deploy.runners.tensorrt.apart import engine_apart
from algm_deploy.runners.tensorrt.digest import Digest, keep_digest, make_digest, usual_rows
from algm_deploy.runners.tensorrt.engine import EngineOptions, check_options, check_targets, require_builder
from algm_deploy.runners.tensorrt.library import load_bindings


def build_engine(
    bundle: Bundle,
    runtime: str,
    options: EngineOptions | None = None,
    precision: Precision | None = None,
    progress: bool = True,
) -> Engine:
    """Writes `model.tensorrt.onnx` from the bundle's weights and builds its engine; both become part of the bundle.

    With it goes what PyTorch computes for two small pictures, for whoever opens the engine first on a machine.

    Args:
        bundle: bundle to build for and to add to, the record as well.
        runtime: `tensorrt` or `tensorrt-rtx`.
        options: default batches 1 to the recipe's largest, tuned for the largest.
        precision: default the recipe's; an fp32 bundle can be built in fp16 and bf16 as well.
        progress: show a progress bar.

    Raises:
        RuntimeUnavailableError: the bindings are not installed, or TensorRT finds no GPU.
        BuildError, ExportError: as `engine_from_onnx` and `tensorrt_from_base`.
    """
    return _single(_prepared(bundle, runtime, options, precision), progress)


def build_with_stretches(
    bundle: Bundle,
    runtime: str,
    options: EngineOptions | None = None,
    precision: Precision | None = None,
    progress: bool = True,
) -> tuple[Engine | None, EngineStretches]:
    """As `build_engine`, and one engine for each part between merges as well, for where the single one fails.

    Returns:
        The single engine, None where the builder refused it, which the other record tells; and the engines of the
        parts.

    Raises:
        BuildError: the token counts are known beforehand, so that nothing can fail and there is nothing to cut at; or
            the builder refused a part.
    """
    plan = bundle.recipe.merging
    if plan.static:
        raise BuildError(
            "expected merges whose token counts depend on the picture, which --in-parts cuts the network at, those of "
            "this network are known beforehand and need no cut: leave --in-parts out"
        )
    job = _prepared(bundle, runtime, options, precision)
    refused = None
    try:
        single = _single(job, progress)
    except BuildError as error:
        single, refused = None, str(error)
    keep_digest(bundle, runtime, job.digest)
    record = structs.replace(_stretches(job, progress), single_refused=refused)
    bundle.record(record)
    return single, record


@dataclass(frozen=True)
class _Job:
    """All that the builder is asked for, and the graph for it; `usual` rows after each merge, measured on `source`."""

    bundle: Bundle
    runtime: str
    options: EngineOptions
    precision: Precision
    digest: Digest
    usual: dict[str, int]
    source: str
    model: Path
    rewrites: Counter[str]


def _prepared(bundle: Bundle, runtime: str, options: EngineOptions | None, precision: Precision | None) -> _Job:
    largest = bundle.recipe.max_batch
    options = options or EngineOptions(batches=(1, largest, largest))
    row, stored = row_of(runtime), bundle.recipe.precision
    precision = precision or row.precision_of(stored)
    row.check_precision(precision, bundle.calibrated and stored == precision)
    check_options(options, runtime)
    check_targets(options, runtime, precision, cuda_capability())
    require_tools(runtime)  # what is missing should show before the export, which takes longer
    digest = make_digest(bundle, options.batches)
    usual, source = usual_rows(bundle, digest, options.batches[1])
    model, rewrites = write_tensorrt_onnx(bundle, precision, [*usual.values()])
    return _Job(bundle, runtime, options, precision, digest, usual, source, model, rewrites)


def _single(job: _Job, progress: bool) -> Engine:
    bundle = job.bundle
    engine, built = engine_apart(job.model, job.runtime, job.precision, job.options, {}, progress)
    keep_digest(bundle, job.runtime, job.digest)
    with bundle.add(row_of(job.runtime).own, made_from={TENSORRT_ONNX: built.onnx_hash}) as path:
        path.write_bytes(engine)
    record = structs.replace(built, rewrites=dict(job.rewrites), usual_rows=job.usual, usual_rows_of=job.source)
    bundle.record(record)
    kept = bundle.found(EngineStretches, job.runtime)
    if kept is not None and kept.single_refused:
        bundle.record(structs.replace(kept, single_refused=None))
    return record


def _stretches(job: _Job, progress: bool) -> EngineStretches:
    """The engines of the parts between merges, whose rows run from a single patch to all of them."""
    bundle, network = job.bundle, job.bundle.recipe.network
    models, merges = write_stretches(bundle)
    least, most = network.prefix + 1, network.prefix + network.grid[0] * network.grid[1]
    rows = {f"tokens_{merge}": (least, min(usual, most), most) for merge, usual in job.usual.items()}
    names, engines = str(row_of(job.runtime).segments), []
    for index, (model, axes) in enumerate(models.items()):
        engine, built = engine_apart(model, job.runtime, job.precision, job.options, rows, progress)
        with bundle.add(names.replace("*", str(index)), made_from={model.name: built.onnx_hash}) as path:
            path.write_bytes(engine)
        usual = {merge: count for merge, count in job.usual.items() if f"tokens_{merge}" in axes}
        engines.append(structs.replace(built, usual_rows=usual, usual_rows_of=job.source))
    return EngineStretches(runtime=job.runtime, engines=tuple(engines), merges=merges)


def require_tools(runtime: str) -> None:
    """RuntimeUnavailableError or BuildError where bindings, GPU or native libraries for a build are missing."""
    load_bindings(runtime)
    require_builder(runtime, cuda_capability())
    for library in row_of(runtime).libraries:
        require_library(library)
