"""Runs engines of TensorRT and TensorRT-RTX on a GPU.

Device memory, streams and pinned host memory come from torch, so that a caller's CUDA tensors are used where they lie.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from algm_deploy.bundle.records import Engine, EngineMerge, EngineStretches
from algm_deploy.bundle.store import Bundle
from algm_deploy.environment import environment
from algm_deploy.errors import AlgmDeployError, BundleError, NotExecutedError, RuntimeUnavailableError
from algm_deploy.native_libraries import require_library, say_once
from algm_deploy.ops.native_kernels import LIBRARY, Kernels
from algm_deploy.recipe.schema import Precision
from algm_deploy.runners.contract import CPU, Runner
from algm_deploy.runners.graphs import give_back, take_stream
from algm_deploy.runners.registry import row_of
from algm_deploy.runners.tensorrt.build import build_engine, build_with_stretches, require_tools
from algm_deploy.runners.tensorrt.digest import first_difference, kept_digest, marker, output_names
from algm_deploy.runners.tensorrt.engine import LEVELS, EngineOptions
from algm_deploy.runners.tensorrt.library import Log, listening, load_bindings, load_plugins, plugin_sources
from algm_deploy.runners.turns import between_captures

_DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}


class Cuda:
    """Memory and streams of a CUDA device, through torch."""

    device = torch.device("cuda", 0)

    def open(self, device: torch.device) -> tuple[int, int]:
        """Compute capability of the device, which is used from here on; NotExecutedError where none can be used."""
        if not torch.cuda.is_available():
            raise NotExecutedError("the engine is built and not executed: torch finds no CUDA device here")
        self.device = device
        return torch.cuda.get_device_capability(device)

    def current(self) -> AbstractContextManager[Any]:
        """Inside the block the device is the calling thread's current one, as everything below expects."""
        return torch.cuda.device(self.device)

    def new_stream(self) -> Any:
        """A stream of its own for an execution context, until `end_stream`."""
        return take_stream(torch.device("cuda", torch.cuda.current_device()))

    def end_stream(self, stream: Any) -> None:
        """Lets others have it, which wait for what it still runs."""
        give_back(stream)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Work inside the block is queued on `stream`, behind what the caller's stream holds."""
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def upload(self, value: Tensor) -> Tensor:
        """A copy in device memory, by way of pinned memory; queued."""
        return value.pin_memory().to(self.device, non_blocking=True)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Device memory for a result."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def download(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of results in host memory, when the current stream is done."""
        host = {
            n: torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
            for n, t in tensors.items()
        }
        torch.cuda.current_stream().synchronize()
        return host

    def kernels(self) -> Kernels:
        """What merges tokens in device memory, on the current stream."""
        return Kernels(require_library(LIBRARY))

    def hand_over(self, stream: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """The current stream waits for `stream`; memory used on both is reused by the allocator only behind both."""
        current = torch.cuda.current_stream()
        current.wait_stream(stream)
        for tensor in inputs:
            tensor.record_stream(stream)
        for tensor in outputs:
            tensor.record_stream(current)


@dataclass(frozen=True)
class _Form:
    """How a bundle holds the network: engines by their files, in order, and a merge between every two of them."""

    engines: Mapping[str, Engine]
    merges: tuple[EngineMerge, ...] = ()

    @property
    def file(self) -> str:
        """The first engine's."""
        return next(iter(self.engines))


@dataclass(frozen=True)
class _Part:
    """A loaded engine, and names of its inputs and outputs."""

    engine: Any
    inputs: tuple[str, ...]
    outputs: Mapping[str, torch.dtype]


@dataclass(frozen=True)
class _Lane:
    """One execution context for each part, and the stream they work on; serves one call at a time."""

    contexts: tuple[Any, ...]
    stream: Any


@dataclass
class _Session:
    """What an open runner holds. Contexts use engines, engines use the runtime. `scalars`: thresholds met."""

    log: Log
    runtime: Any
    form: _Form
    parts: tuple[_Part, ...]
    limits: tuple[tuple[int, ...], tuple[int, ...]]
    lanes: queue.Queue[_Lane]
    kernels: Kernels | None
    scalars: dict[float, Tensor] = field(default_factory=dict)


class TensorRTRunner(Runner):
    """The engine of a bundle in TensorRT, with `contexts` execution contexts for as many threads.

    Opening raises NotExecutedError where no device here can run the engine, and BundleError, with the command that
    rebuilds it, where the engine is stale or foreign, or computes something else than PyTorch. That is compared when an
    engine is opened for the first time on a machine (`digest.py`). Where the bundle holds engines for the parts between
    merges as well, those run in place of one that is refused or fails, which one line says; with `parts` they run in
    any case.
    """

    runtime = "tensorrt"

    def __init__(
        self,
        bundle: Bundle,
        device: str | None = None,
        *,
        contexts: int = 1,
        parts: bool = False,
        cuda: Cuda | None = None,
    ) -> None:
        super().__init__(bundle, device)
        self._contexts = contexts
        self._parts_alone = parts
        self._cuda = cuda or Cuda()
        self._session: _Session | None = None
        self._stack = ExitStack()

    @classmethod
    def require_builder(cls) -> None:
        """Bindings, plugin library and, but for RTX, a GPU."""
        require_tools(cls.runtime)

    @classmethod
    def build(cls, bundle: Bundle, **options: Any) -> list[str]:
        """Builds the engine; `options` are `precision`, `in_parts` and the fields of `EngineOptions`."""
        cls.row().check_options(options)
        precision, largest = options.pop("precision", None), bundle.recipe.max_batch
        in_parts = options.pop("in_parts", False)
        chosen = EngineOptions(**{"batches": (1, largest, largest), **options})
        if not in_parts:
            built = build_engine(bundle, cls.runtime, chosen, precision)
            return _told(bundle, {cls.row().own: built})
        single, parts = build_with_stretches(bundle, cls.runtime, chosen, precision)
        names = dict(zip(_stretch_files(cls.runtime, parts), parts.engines, strict=True))
        between = ", ".join(merge.kind for merge in parts.merges)
        lines = _told(bundle, {cls.row().own: single} if single else {})
        if single is None:
            lines.append(f"one engine for the whole network was refused: {parts.single_refused}")
        when = "" if single is None else "where the single one fails its first comparison on a machine, "
        return [*lines, *_told(bundle, names), f"{when}{len(names)} engines run with {between} between them"]

    def _forms(self) -> list[_Form]:
        """How the bundle holds the network, best first."""
        single = self.bundle.found(Engine, self.runtime)
        parts = self.bundle.found(EngineStretches, self.runtime)
        forms = []
        if single is not None and not (self._parts_alone or (parts and parts.single_refused)):
            forms.append(_Form({self.row().own: single}))
        if parts is not None:
            files = _stretch_files(self.runtime, parts)
            forms.append(_Form(dict(zip(files, parts.engines, strict=True)), parts.merges))
        if not forms:
            wanted = "engine of the parts between merges" if self._parts_alone else "engine"
            raise BundleError(
                f"{self.bundle.path} holds no {wanted} for {self.runtime}: build one with `{self.build_command}`"
            )
        return forms

    @property
    def build_command(self) -> str:
        """The command that builds anew what the bundle holds."""
        both = self._parts_alone or self.bundle.found(EngineStretches, self.runtime) is not None
        return f"{super().build_command}{' --in-parts' if both else ''}"

    @property
    def executable(self) -> str:
        """Name of the bundle's file that runs, the first of several engines."""
        return self._session.form.file if self._session else self._forms()[0].file

    @property
    def precision(self) -> Precision:
        """The engine's, which may be another than its bundle's."""
        form = self._session.form if self._session else self._forms()[0]
        return next(iter(form.engines.values())).precision

    @property
    def execution(self) -> dict[str, str]:
        """How many engines run one after the other, where it is not a single one."""
        parts = len(self._session.parts) if self._session else 1
        return {"engines": f"{parts}, with a merge between every two"} if parts > 1 else {}

    def _open(self) -> None:
        forms = self._forms()
        trt = load_bindings(self.runtime)
        capability = self._cuda.open(self.device)
        self.device = self._cuda.device
        _check_device(self.runtime, f"{capability[0]}.{capability[1]}")
        with between_captures(), self._cuda.current(), ExitStack() as stack:  # it may wait for the whole device
            self.refused = None
            logger, log = stack.enter_context(listening(trt))
            stack.callback(setattr, self, "_session", None)
            for place, form in enumerate(forms, 1):
                try:
                    self._take(form, trt, capability, logger, log)
                    break
                except AlgmDeployError as error:  # of any kind: where size tensors fail, so may the run itself
                    self._session = None
                    if place == len(forms):
                        raise
                    self.refused = str(error)
                    say_once(f"{error}; meanwhile the engines of its parts run, with the merges between them")
            self._stack = stack.pop_all()

    def _take(self, form: _Form, trt: Any, capability: tuple[int, int], logger: Any, log: Log) -> None:
        """Loads a form, or BundleError where it does not fit what is here."""
        needs_plugins = any(facts.plugin_sources for facts in form.engines.values())
        sources = plugin_sources(load_plugins(trt, self.runtime)) if needs_plugins else None
        for file, facts in form.engines.items():
            if reason := why_stale(facts, self.runtime, trt.__version__, sources, capability):
                raise self._unusable(file, reason)
        self._session = self._load(trt, form, logger, log)
        self._compare_once(form, trt.__version__, str(sources))

    def _compare_once(self, form: _Form, version: str, plugins: str) -> None:
        """Refuses engines that compute something else than PyTorch, where this machine has not compared them yet."""
        engines = [self.bundle.files[file].sha256 for file in form.engines]
        done = marker(*engines, self.runtime, version, plugins, self.device_name, str(environment().driver))
        if done.exists():
            return
        if found := self._difference():
            raise self._unusable(
                form.file,
                f"expected what PyTorch computed when the engine was built, this machine differs first in {found}",
            )
        with suppress(OSError):  # where nothing can be kept, the next open compares again
            done.parent.mkdir(parents=True, exist_ok=True)
            done.touch()

    def _difference(self) -> str | None:
        with self._to_rebuild():
            digest = kept_digest(self.bundle, self.runtime)
        names = output_names(self.bundle)
        thresholds = dict(self.signature.defaults)
        results = self._guarded(torch.from_numpy(digest.image), thresholds, names, CPU)
        return first_difference(digest, {n: t.numpy() for n, t in results.items()}, self.signature.merges)

    def _load(self, trt: Any, form: _Form, logger: Any, log: Log) -> _Session:
        runtime = trt.Runtime(logger)
        if any(facts.version_compatible for facts in form.engines.values()):
            runtime.engine_host_code_allowed = True  # such an engine carries a lean runtime of its own release
        kernels = self._cuda.kernels() if form.merges else None
        parts = tuple(self._part(trt, runtime, file, log) for file in form.engines)
        lanes: queue.Queue[_Lane] = queue.Queue()
        for _ in range(self._contexts):
            contexts = tuple(part.engine.create_execution_context() for part in parts)
            if None in contexts:
                raise RuntimeUnavailableError(
                    f"expected enough device memory for an execution context, TensorRT says "
                    f"{'; '.join(log.errors[:2]) or 'nothing'}: free memory, or build with a smaller --max-batch"
                )
            lanes.put(self._lane_of(contexts))
        return _Session(log, runtime, form, parts, _limits(parts[0].engine), lanes, kernels)

    def _lane_of(self, contexts: tuple[Any, ...]) -> _Lane:
        """A lane that gives its stream back when nobody holds it any more: after the runner was closed and the last
        call has ended, or as soon as a form that could not be opened is forgotten."""
        lane = _Lane(contexts, self._cuda.new_stream())
        weakref.finalize(lane, self._cuda.end_stream, lane.stream)
        return lane

    def _part(self, trt: Any, runtime: Any, file: str, log: Log) -> _Part:
        before = len(log.errors)
        with self._to_rebuild():
            content = self.bundle.file(file).read_bytes()
        engine = runtime.deserialize_cuda_engine(content)
        if engine is None:
            said = "; ".join(log.errors[before : before + 2]) or "it gives no reason"
            raise self._unusable(file, f"TensorRT cannot load it ({said})")
        return _Part(engine, *_tensors(trt, engine))

    def _close(self) -> None:
        with between_captures(), self._cuda.current():
            self._stack.close()

    def _infer(
        self, image: Tensor, thresholds: dict[str, float], outputs: Sequence[str], to: torch.device
    ) -> dict[str, Tensor]:
        assert self._session is not None
        session = self._session
        low, high = session.limits
        if not low[0] <= len(image) <= high[0]:
            raise BundleError(
                f"expected image of shape {low} to {high}, got {tuple(image.shape)}: send another batch or rebuild the "
                "engine with a wider profile"
            )
        with self._cuda.current():
            image = image if image.device == self.device else self._cuda.upload(image)
            inputs = {"image": image, **{name: self._scalar(session, v) for name, v in thresholds.items()}}
            with _lane(session) as lane:
                with self._cuda.on(lane.stream):
                    results = self._chained(session, lane, inputs)
                self._cuda.hand_over(lane.stream, list(inputs.values()), list(results.values()))
            wanted = {name: results[name] for name in outputs}
            return self._cuda.download(wanted) if to == CPU else wanted

    def _scalar(self, session: _Session, value: float) -> Tensor:
        """A threshold in device memory, for any stream: the copy is done when this returns."""
        if value not in session.scalars:
            session.scalars[value] = torch.tensor(value, device=self.device)
        return session.scalars[value]

    def _chained(self, session: _Session, lane: _Lane, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All that the engines and the merges between them make, by name; queued, but for the row count of each merge,
        which the host waits for.
        """
        made = dict(inputs)
        steps = zip(session.parts, lane.contexts, [*session.form.merges, None], strict=True)
        for place, (part, context, merge) in enumerate(steps):
            made |= self._enqueue(session, place, context, {n: made[n] for n in part.inputs}, lane.stream)
            if merge is not None:
                run = getattr(session.kernels, merge.kind)
                merged = run(*(made[name] for name in merge.inputs), *merge.attributes)
                made |= zip(merge.outputs, merged, strict=True)
        return {name: tensor for name, tensor in made.items() if name not in inputs}

    def _enqueue(
        self, session: _Session, place: int, context: Any, inputs: Mapping[str, Tensor], stream: Any
    ) -> dict[str, Tensor]:
        for name, tensor in inputs.items():
            context.set_input_shape(name, tuple(tensor.shape))
            context.set_tensor_address(name, tensor.data_ptr())
        results = {}
        for name, dtype in session.parts[place].outputs.items():
            shape = tuple(context.get_tensor_shape(name))
            if min(shape, default=0) < 0:
                raise self._unusable(
                    [*session.form.engines][place],
                    f"expected the shape of {name} to follow from the inputs', TensorRT tells {shape}",
                )
            results[name] = self._cuda.empty(shape, dtype)
            context.set_tensor_address(name, results[name].data_ptr())
        before = len(session.log.errors)
        if not context.execute_async_v3(stream.cuda_stream):
            said = "; ".join(session.log.errors[before:]) or "it gives no reason"
            raise RuntimeUnavailableError(f"TensorRT failed to execute the engine ({said}): send smaller batches")
        return results

    @contextmanager
    def _to_rebuild(self) -> Iterator[None]:
        """Says of a file that is missing or was changed which command makes it."""
        try:
            yield
        except BundleError as error:
            raise BundleError(f"{error}, with `{self.build_command}`") from error

    def _unusable(self, file: str, reason: str) -> BundleError:
        return BundleError(f"{self.bundle.path / file}: {reason}: rebuild it with `{self.build_command}`")


class TensorRTRtxRunner(TensorRTRunner):
    """The engine of a bundle in TensorRT-RTX."""

    runtime = "tensorrt-rtx"


def why_stale(
    facts: Engine, runtime: str, version: str, plugins: str | None, capability: tuple[int, int]
) -> str | None:
    """Why an engine made of `facts` does not fit what is here, None where it fits.

    Args:
        facts: what the engine was made of and for.
        runtime, version: the runtime in use and the version of its bindings.
        plugins: what the plugin library in use was made of.
        capability: compute capability of the device.
    """
    here = f"{capability[0]}.{capability[1]}"
    if facts.runtime != runtime:
        return f"the engine was built for {facts.runtime}, not for {runtime}"
    if facts.version != version and not facts.version_compatible:
        return f"the engine was built with {runtime} {facts.version}, this is {version}"
    if facts.plugin_sources is not None and facts.plugin_sources != plugins:
        return f"the engine was built with plugins made of {facts.plugin_sources}, those here are made of {plugins}"
    if facts.hardware_compatible:
        return (
            None
            if capability >= (8, 0)
            else f"the engine runs on compute capability 8.0 and newer, this GPU has {here}"
        )
    if here not in facts.compute_capabilities:
        return (
            f"the engine was built for compute capability {', '.join(facts.compute_capabilities)}, this GPU has {here}"
        )
    return None


def _check_device(runtime: str, here: str) -> None:
    """NotExecutedError for data-centre GPUs (H100, B200), which TensorRT-RTX refuses whatever it is built for."""
    taken = row_of(runtime).capabilities
    if taken and here not in taken:
        raise NotExecutedError(
            f"the engine is built and not executed: TensorRT-RTX runs on GeForce and RTX GPUs (compute capability "
            f"{', '.join(taken)}), this one has compute capability {here}; use --runtime tensorrt here"
        )


def _stretch_files(runtime: str, parts: EngineStretches) -> list[str]:
    names = str(row_of(runtime).segments)
    return [names.replace("*", str(index)) for index in range(len(parts.engines))]


def _told(bundle: Bundle, engines: Mapping[str, Engine]) -> list[str]:
    """What people are told of built engines, of one network each or of the parts of one."""
    if not engines:
        return []
    built, every = next(iter(engines.values())), [*engines.values()]
    plugins = ", ".join(plugin.plugin for one in every for plugin in one.parsed_network.plugins) or "none"
    lines = [f"{one.engine_bytes / 1e6:9.1f} MB  {bundle.path / file}" for file, one in engines.items()]
    lines += [
        f"{built.runtime} {built.version}, {built.precision}, batches {built.batches[0]} to {built.batches[2]}, "
        f"compute capability {', '.join(built.compute_capabilities)}, built in "
        f"{sum(one.build_seconds for one in every):.1f} s",
        f"plugins in the network: {plugins}",
    ]
    if built.precision in LEVELS:
        quantised = sum(sum(one.parsed_network.layers.get("QUANTIZE", {}).values()) for one in every)
        lines.append(f"{quantised} products in {built.precision}, which their inputs are quantised to")
    if in_parts := sum(one.attention_in_parts or 0 for one in every):
        lines.append(
            f"{in_parts} attention layers were not fused, so they are slower and hold a value for every pair of "
            f"tokens{': fuse them with --engine-precision fp16' if built.precision == 'fp32' else ''}"
        )
    if cache := every[-1].timing_cache:
        kept = all(one.timing_cache and one.timing_cache.kept for one in every)
        found = "it measured nothing anew" if kept else "it measured kernels anew, so another build may differ"
        lines.append(f"timing cache {str(cache.sha256_after)[:12]}: {found}")
    if built.engine_layers_reason:
        lines.append(f"engine layers not inspected: {built.engine_layers_reason}")
    return lines


def _tensors(trt: Any, engine: Any) -> tuple[tuple[str, ...], dict[str, torch.dtype]]:
    """Names of an engine's inputs, and its outputs by name."""
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    taken = tuple(name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT)
    return taken, {name: _DTYPES[engine.get_tensor_dtype(name).name] for name in names if name not in taken}


def _limits(engine: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Smallest and largest shape of the image that the engine was built for."""
    fixed = tuple(engine.get_tensor_shape("image"))
    low, _, high = engine.get_tensor_profile_shape("image", 0) if -1 in fixed else (fixed, fixed, fixed)
    return tuple(low), tuple(high)


@contextmanager
def _lane(session: _Session) -> Iterator[_Lane]:
    """A free execution context; waits for one."""
    lane = session.lanes.get()
    try:
        yield lane
    finally:
        session.lanes.put(lane)
