"""ONNX for TensorRT -> engine, with TensorRT or TensorRT-RTX, and the proof of what was handed to the builder.

TensorRT-RTX builds on machines without a GPU: kernels are made from the engine on the user's GPU at first use. Full
TensorRT times kernels while it builds and needs the GPU that will run the engine.

Nothing here needs PyTorch, whose import takes longer than many a build: whoever asks for an engine tells the GPU.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tqdm import tqdm

from algm_deploy.bundle.files import sha256_of, write_atomically
from algm_deploy.bundle.graphs import DOMAIN, FLOAT32_PRODUCTS, PLAIN_ATTENTIONS
from algm_deploy.bundle.records import Engine, ParsedNetwork, ParsedTensor, Plugin, TimingCache
from algm_deploy.errors import BuildError, RuntimeUnavailableError
from algm_deploy.native_libraries import REBUILD
from algm_deploy.recipe.schema import Precision
from algm_deploy.runners.registry import FP8_SINCE, row_of
from algm_deploy.runners.tensorrt.apart import Rows
from algm_deploy.runners.tensorrt.library import (
    Log,
    listening,
    load_bindings,
    load_plugins,
    nearest_plugin,
    plugin_sources,
)

RTX_TARGETS = ("8.6", "8.9", "12.0")
_DTYPES: dict[Precision, str] = {"fp32": "FLOAT", "int8": "FLOAT", "fp16": "HALF", "bf16": "BF16", "fp8": "HALF"}
LEVELS: dict[Precision, str] = {"int8": "INT8", "fp8": "FP8"}
"""What quantisers write, by precision of an engine whose products they are for."""
# Layers that do the arithmetic; in a strongly typed network their type is the precision.
_ARITHMETIC = ("CONVOLUTION", "MATRIX_MULTIPLY", "EINSUM", "ATTENTION_INPUT")
# As many of a kind may be fp32 all the same: a network exported in 16 bits sums its class scores over queries in fp32.
_FLOAT32_AT_MOST = {"EINSUM": 1}
_NOWHERE_TO_LOAD = "torch finds no CUDA device here that could load the engine"


@dataclass(frozen=True)
class EngineOptions:
    """What a person decides about an engine.

    `batches` are the smallest, the most frequent and the largest batch of the optimisation profile. `level` is the
    builder's optimisation level 0 to 5, `workspace_mib` the scratch memory it may plan with; None leaves TensorRT's
    default. The rows of the registry say which runtime has which; TensorRT-RTX times no kernels while it builds, its
    engines run with the release that built them, and name their GPUs: `compute_capabilities` such as "8.9", where none
    means those of `RTX_TARGETS` that have units for the precision.
    """

    batches: tuple[int, int, int] = (1, 8, 8)
    level: int | None = None
    workspace_mib: int | None = None
    timing_cache: Path | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    compute_capabilities: tuple[str, ...] = ()


def engine_from_onnx(
    model: Path,
    runtime: str,
    precision: Precision,
    gpu: str | None,
    options: EngineOptions | None = None,
    rows: Rows | None = None,
    progress: bool = True,
    step: Callable[[str], object] = lambda _: None,
) -> tuple[bytes, Engine]:
    """Builds an engine from a model written by `lowering.tensorrt`; the serialized engine and the evidence about it.

    Args:
        model: ONNX file; weights may lie in a file beside it.
        runtime: `tensorrt` or `tensorrt-rtx`.
        precision: type that the model's arithmetic must have; another one found is an error, nothing is converted.
        gpu: compute capability of the GPU of this machine, None where it has none.
        options: see `EngineOptions`.
        rows: lengths of the axes that depend on the picture, by their names in the model.
        progress: show a progress bar.
        step: told in words what is done from here on, such as "parsed the model".

    Raises:
        RuntimeUnavailableError: the bindings are not installed, or TensorRT finds no GPU.
        BuildError: the plugin library, the model, the options or the builder failed; the message names the node.
    """
    options = options or EngineOptions()
    check_options(options, runtime)
    check_targets(options, runtime, precision, gpu)
    trt = load_bindings(runtime)
    require_builder(runtime, gpu)
    expected = _plugin_nodes(model)
    with listening(trt) as (logger, log):
        step("loaded the plugins")
        plugins = load_plugins(trt, runtime) if expected else None
        step(f"parsed {model.name}")
        builder = trt.Builder(logger)
        network, parser = _parse(trt, builder, logger, model, log)
        parsed = describe_network(trt, network)
        _check_plugins(parsed, expected)
        told = _told(model)
        _check_precision(parsed, precision, told[FLOAT32_PRODUCTS])
        if precision in LEVELS:
            _check_quantizers(parsed, model, precision)
        targets = _targets(options, runtime, precision, gpu)
        config = _configure(trt, builder, options, runtime, targets)
        _add_profile(builder, config, network, options, rows or {}, log)
        step("built the engine")
        started = time.perf_counter()
        engine = _build(trt, builder, network, config, log, progress)
        seconds = time.perf_counter() - started
        del parser  # owns weights that the network refers to until here
        step("inspected the engine")
        timing_cache = _save_timing_cache(config, options)
        layers, reason = _inspect(trt, logger, engine, log) if gpu else (None, _NOWHERE_TO_LOAD)
    lines = tuple(line.replace(f"{model.parent}/", "") for line in log.lines)
    return engine, Engine(
        runtime=runtime,
        version=trt.__version__,
        precision=precision,
        batches=options.batches,
        compute_capabilities=targets,
        version_compatible=options.version_compatible,
        hardware_compatible=options.hardware_compatible,
        onnx_hash=sha256_of(model),
        plugin_sources=plugin_sources(plugins) if plugins else None,
        engine_bytes=len(engine),
        parsed_network=parsed,
        engine_layers=layers,
        engine_layers_reason=reason,
        builder_layers=tuple(log.engine_layers),
        attention_in_parts=_attention_in_parts(parsed, log.engine_layers, told[PLAIN_ATTENTIONS]),
        log=lines,
        build_seconds=seconds,
        timing_cache=timing_cache,
    )


def require_builder(runtime: str, gpu: str | None) -> None:
    """RuntimeUnavailableError where this machine, with that GPU or without, cannot build for the runtime."""
    if row_of(runtime).builds_on_gpu and gpu is None:
        raise RuntimeUnavailableError(
            "TensorRT measures kernels while it builds and needs the GPU that will run the engine, torch finds no CUDA "
            "device here: run this command on that machine, or build for tensorrt-rtx"
        )


def check_options(options: EngineOptions, runtime: str) -> None:
    """BuildError with the reason where an option contradicts itself or the runtime."""
    low, usual, high = options.batches
    if not 1 <= low <= usual <= high:
        raise BuildError(
            f"expected batches with 1 <= smallest <= usual <= largest, got {low}, {usual}, {high}: change the profile"
        )
    if options.level is not None and not 0 <= options.level <= 5:
        raise BuildError(f"expected an optimisation level from 0 to 5, got {options.level}")
    if options.workspace_mib is not None and options.workspace_mib < 1:
        raise BuildError(f"expected a workspace of at least 1 MiB, got {options.workspace_mib}")
    given = (f.name for f in fields(options) if f.name != "batches" and getattr(options, f.name) != f.default)
    row_of(runtime).check_options(given)


def check_targets(options: EngineOptions, runtime: str, precision: Precision, gpu: str | None) -> None:
    """BuildError where a GPU that the engine is for, or the one that builds it, has no units for the precision."""
    for target in _targets(options, runtime, precision, gpu):
        if not _computes(target, precision):
            raise BuildError(
                f"expected GPUs of compute capability {'.'.join(map(str, FP8_SINCE))} or newer for an engine in fp8, "
                f"got {target}, which has no fp8 units: leave it out, or build with --engine-precision fp16"
            )


# --- parsing ---------------------------------------------------------------------------------------------------------


def _plugin_nodes(model: Path) -> Counter[str]:
    """How many nodes of each plugin the model holds."""
    if not model.is_file():
        raise BuildError(f"expected an ONNX model at {model}, found none: export first")
    try:
        graph = onnx.load(model, load_external_data=False).graph
    except DecodeError as error:
        raise BuildError(f"{model} cannot be read as ONNX ({error}): export again") from error
    if not graph.output:
        raise BuildError(f"{model} holds an ONNX graph without outputs: export again")
    return Counter(node.op_type for node in graph.node if node.domain == DOMAIN)


def _parse(trt: Any, builder: Any, logger: Any, model: Path, log: Log) -> tuple[Any, Any]:
    """Network and parser; the parser must outlive the build."""
    flag = trt.NetworkDefinitionCreationFlag
    network = builder.create_network(1 << int(flag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model)):
        raise BuildError(_parser_message(trt, parser, model, log))
    return network, parser


def _parser_message(trt: Any, parser: Any, model: Path, log: Log) -> str:
    """One sentence about the first error: which node, what TensorRT says, what to do."""
    if parser.num_errors == 0:
        return f"TensorRT cannot parse {model}: {'; '.join(log.errors[:3]) or 'no reason given'}; export again"
    error = parser.get_error(0)
    node, operator = error.node_name() or f"number {error.node()}", error.node_operator() or "unknown"
    plugin_said = [line for line in log.errors if line.startswith(f"{operator}: ")]
    said = "; ".join(plugin_said or [_one_line(error.desc())])
    if "Plugin not found" in error.desc():
        advice = (
            f"the nearest registered plugins are: {nearest_plugin(trt, operator)}; "
            f"export again, or rebuild the library with `{REBUILD} trt_plugin`"
        )
    else:
        advice = "export again for this runtime, or report the node with the file if it persists"
    return f"TensorRT stopped at node {node} ({operator}): {said}; {advice}"


def _one_line(text: str) -> str:
    """TensorRT's reason without the lines in which it repeats the node and reports the missing GPU."""
    lines = [line.strip() for line in text.splitlines()]
    return "; ".join(line for line in lines if line and "catchCudaError" not in line and "Invalid Node" not in line)


# --- what the builder gets -------------------------------------------------------------------------------------------


def describe_network(trt: Any, network: Any) -> ParsedNetwork:
    """Inputs, outputs, plugins and a count of layers by type and output dtype."""
    layers: dict[str, Counter[str]] = defaultdict(Counter)
    plugins = []
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        dtypes = [layer.get_output(j).dtype.name for j in range(layer.num_outputs)]
        layers[layer.type.name][dtypes[0] if dtypes else "none"] += 1
        if layer.type == trt.LayerType.PLUGIN_V3:
            plugins.append(Plugin(name=layer.name, plugin=_plugin_name(trt, layer), dtypes=tuple(dtypes)))
    return ParsedNetwork(
        inputs=tuple(_tensor(network.get_input(i)) for i in range(network.num_inputs)),
        outputs=tuple(_tensor(network.get_output(i)) for i in range(network.num_outputs)),
        plugins=tuple(plugins),
        layers={kind: dict(sorted(counts.items())) for kind, counts in sorted(layers.items())},
    )


def _tensor(tensor: Any) -> ParsedTensor:
    return ParsedTensor(name=tensor.name, dtype=tensor.dtype.name, shape=tuple(tensor.shape))


def _plugin_name(trt: Any, layer: Any) -> str:
    # The bindings hand out plain ILayer objects; this is their documented way down to a kind of layer.
    layer.__class__ = trt.IPluginV3Layer
    core = layer.plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
    return str(core.plugin_name)


def _check_plugins(parsed: ParsedNetwork, expected: Counter[str]) -> None:
    found = Counter(plugin.plugin for plugin in parsed.plugins)
    if found != expected:
        raise BuildError(
            f"expected the plugins {dict(expected)} in TensorRT's network, found {dict(found)}: TensorRT took function "
            "bodies instead; export again"
        )


def _told(model: Path) -> Counter[str]:
    """The counts in a model's metadata; zero for those it lacks."""
    entries = onnx.load(model, load_external_data=False).metadata_props
    return Counter({e.key: int(e.value) for e in entries if e.key in (FLOAT32_PRODUCTS, PLAIN_ATTENTIONS)})


def _check_precision(parsed: ParsedNetwork, precision: Precision, products: int = 0) -> None:
    """Every layer that does arithmetic has the precision that was asked for, but for so many products in fp32."""
    allowed = _FLOAT32_AT_MOST | {"MATRIX_MULTIPLY": products}
    for kind in _ARITHMETIC:
        for dtype, count in parsed.layers.get(kind, {}).items():
            most = allowed.get(kind, 0) if dtype == "FLOAT" else 0
            if dtype != _DTYPES[precision] and count > most:
                raise BuildError(
                    f"expected {precision} arithmetic, {count} {kind.lower()} layers are {dtype}: export with "
                    f"precision {precision}"
                )


def _check_quantizers(parsed: ParsedNetwork, model: Path, precision: Precision) -> None:
    """TensorRT read every quantiser of the graph as such: the products after them have no type of their own there."""
    nodes = onnx.load(model, load_external_data=False).graph.node
    asked = sum(node.op_type == "QuantizeLinear" for node in nodes)
    read = parsed.layers.get("QUANTIZE", {}).get(LEVELS[precision], 0)
    if read != asked:
        raise BuildError(
            f"expected TensorRT to quantise what enters the products of the graph to {precision}, {asked} times, it "
            f"does {read} times: export with --precision {precision}, or take another release"
        )


# --- configuring and building ----------------------------------------------------------------------------------------


def _targets(options: EngineOptions, runtime: str, precision: Precision, gpu: str | None) -> tuple[str, ...]:
    """Compute capabilities to build for: of GPUs elsewhere, or of the one that builds, none without it."""
    if row_of(runtime).builds_on_gpu:
        return (gpu,) if gpu else ()
    return options.compute_capabilities or tuple(one for one in RTX_TARGETS if _computes(one, precision))


def _computes(capability: str, precision: Precision) -> bool:
    """Whether a GPU has units for the precision."""
    return precision != "fp8" or tuple(map(int, capability.split("."))) >= FP8_SINCE


def _configure(trt: Any, builder: Any, options: EngineOptions, runtime: str, targets: Sequence[str]) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options.level is not None:
        config.builder_optimization_level = options.level
    if options.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if options.hardware_compatible:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if options.timing_cache is not None:
        known = options.timing_cache.read_bytes() if options.timing_cache.is_file() else b""
        if not config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False):
            raise BuildError(f"the timing cache {options.timing_cache} is of another TensorRT or GPU: delete it")
    if not row_of(runtime).builds_on_gpu:
        _set_targets(trt, config, targets)
    return config


def _set_targets(trt: Any, config: Any, targets: Sequence[str]) -> None:
    known = {name: value for name, value in trt.ComputeCapability.__members__.items() if name.startswith("SM")}
    config.num_compute_capabilities = len(targets)
    for i, target in enumerate(targets):
        name = f"SM{target.replace('.', '')}"
        if name not in known:
            offered = ", ".join(f"{n[2:-1]}.{n[-1]}" for n in known)
            raise BuildError(f"TensorRT-RTX {trt.__version__} builds for compute capability {offered}, not {target}")
        config.set_compute_capability(known[name], i)


def _add_profile(builder: Any, config: Any, network: Any, options: EngineOptions, rows: Rows, log: Log) -> None:
    """One profile: the batch axis of every input runs from the smallest to the largest batch, other axes as `rows`."""
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        shape = list(tensor.shape)
        sides = [rows.get(_axis(tensor, axis), (side,) * 3) for axis, side in enumerate(shape)]
        if (-1,) * 3 in sides[1:]:
            raise BuildError(
                f"expected a fixed shape behind the batch axis, input {tensor.name} has {shape}: export again"
            )
        if shape and shape[0] == -1:
            profile.set_shape(tensor.name, *zip(options.batches, *sides[1:], strict=True))
        elif shape and (shape[0], shape[0], shape[0]) != options.batches:
            raise BuildError(
                f"input {tensor.name} has a fixed batch of {shape[0]}, the profile asks for {options.batches}"
            )
    if config.add_optimization_profile(profile) < 0:
        raise BuildError(f"TensorRT refused the batches {options.batches}: {'; '.join(log.errors[-3:])}")


def _axis(tensor: Any, axis: int) -> str:
    """Name of an axis whose length is not fixed, empty for others."""
    return str(tensor.get_dimension_name(axis)) if tensor.shape[axis] == -1 else ""


def _build(trt: Any, builder: Any, network: Any, config: Any, log: Log, progress: bool) -> bytes:
    before = len(log.errors)
    with _progress(trt, config, progress) as interrupted:
        engine = builder.build_serialized_network(network, config)
    if interrupted.is_set():
        raise KeyboardInterrupt
    if engine is None:
        raise BuildError(
            f"TensorRT could not build the engine: {'; '.join(log.errors[before:]) or 'it gave no reason'}; try "
            "another --level, or --in-parts, which also builds the network in parts"
        )
    return bytes(engine)


@contextmanager
def _progress(trt: Any, config: Any, show: bool) -> Iterator[threading.Event]:
    """Shows the builder's phases; Ctrl-C stops the build at its next step, reported by the event.

    An exception inside a callback would cross TensorRT's C++ and end the process, so the signal only sets the event.
    """
    interrupted = threading.Event()
    with tqdm(desc="build", unit="step", disable=None if show else True, leave=False) as bar:

        class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.IProgressMonitor.__init__(self)

            def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
                bar.total = (bar.total or 0) + steps
                bar.set_description(phase, refresh=False)

            def step_complete(self, phase: str, step: int) -> bool:
                bar.update()
                return not interrupted.is_set()

            def phase_finish(self, phase: str) -> None:
                bar.refresh()

        config.progress_monitor = Monitor()
        if threading.current_thread() is not threading.main_thread():
            yield interrupted
            return
        previous = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
        try:
            yield interrupted
        finally:
            signal.signal(signal.SIGINT, previous)


def _attention_in_parts(parsed: ParsedNetwork, layers: Sequence[tuple[str, str]], plain: int = 0) -> int | None:
    """Attention layers that did not become one kernel, which the builder names mha; None where it told no layers.

    `plain` of them are written in standard operators.
    """
    if not layers:
        return None
    asked = plain + sum(parsed.layers.get("ATTENTION_INPUT", {}).values())
    return asked - sum("mha" in name for name, _ in layers)


def _save_timing_cache(config: Any, options: EngineOptions) -> TimingCache | None:
    """Writes the cache back; returns its hash before and after the build, None where there was no cache."""
    if options.timing_cache is None:
        return None
    before = sha256_of(options.timing_cache) if options.timing_cache.is_file() else None
    with write_atomically(options.timing_cache) as path:
        path.write_bytes(bytes(config.get_timing_cache().serialize()))
    return TimingCache(sha256_before=before, sha256_after=sha256_of(options.timing_cache))


def _inspect(trt: Any, logger: Any, engine: bytes, log: Log) -> tuple[list[Any] | None, str | None]:
    """The finished engine's layers by TensorRT's inspector, or the reason why this machine cannot load the engine."""
    before = len(log.errors)
    runtime = trt.Runtime(logger)
    loaded = runtime.deserialize_cuda_engine(engine) if runtime else None
    if loaded is None:
        return None, f"this machine cannot load the engine: {'; '.join(log.errors[before : before + 1]) or 'no reason'}"
    text = loaded.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    return json.loads(text)["Layers"], None
