"""Runs engines of TensorRT and TensorRT-RTX on a GPU.

Device memory, streams and pinned host memory come from torch, so that a caller's CUDA tensors are used where they lie.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from algm_deploy.bundle.records import Engine
from algm_deploy.bundle.store import Bundle
from algm_deploy.environment import environment
from algm_deploy.errors import BundleError, NotExecutedError, RuntimeUnavailableError
from algm_deploy.runners.contract import CPU, Runner
from algm_deploy.runners.registry import row_of
from algm_deploy.runners.tensorrt.build import EngineOptions, build_engine, require_tools
from algm_deploy.runners.tensorrt.digest import first_difference, kept_digest, marker, output_names
from algm_deploy.runners.tensorrt.library import Log, listening, load_bindings, load_plugins, plugin_sources
from algm_deploy.runners.turns import DEVICE

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
        """A stream of its own for an execution context."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

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

    def hand_over(self, stream: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """The current stream waits for `stream`; memory used on both is reused by the allocator only behind both."""
        current = torch.cuda.current_stream()
        current.wait_stream(stream)
        for tensor in inputs:
            tensor.record_stream(stream)
        for tensor in outputs:
            tensor.record_stream(current)


@dataclass(frozen=True)
class _Lane:
    """One execution context with the stream it works on; serves one call at a time."""

    context: Any
    stream: Any


@dataclass
class _Session:
    """What an open runner holds. Contexts use the engine, the engine uses the runtime. `scalars`: thresholds met."""

    log: Log
    runtime: Any
    engine: Any
    outputs: dict[str, torch.dtype]
    limits: tuple[tuple[int, ...], tuple[int, ...]]
    lanes: queue.Queue[_Lane]
    scalars: dict[float, Tensor] = field(default_factory=dict)


class TensorRTRunner(Runner):
    """The engine of a bundle in TensorRT, with `contexts` execution contexts for as many threads.

    Opening raises NotExecutedError where no device here can run the engine, and BundleError, with the command that
    rebuilds it, where the engine is stale or foreign, or computes something else than PyTorch. That is compared when an
    engine is opened for the first time on a machine (`digest.py`).
    """

    runtime = "tensorrt"

    def __init__(
        self, bundle: Bundle, device: str | None = None, *, contexts: int = 1, cuda: Cuda | None = None
    ) -> None:
        super().__init__(bundle, device)
        self._contexts = contexts
        self._cuda = cuda or Cuda()
        self._session: _Session | None = None
        self._stack = ExitStack()

    @classmethod
    def require_builder(cls) -> None:
        """Bindings, plugin library and, but for RTX, a GPU."""
        require_tools(cls.runtime)

    @classmethod
    def build(cls, bundle: Bundle, **options: Any) -> list[str]:
        """Builds the engine; `options` are `precision` and the fields of `EngineOptions`."""
        cls.row().check_options(options)
        precision, largest = options.pop("precision", None), bundle.recipe.max_batch
        chosen = EngineOptions(**{"batches": (1, largest, largest), **options})
        built = build_engine(bundle, cls.runtime, chosen, precision)
        plugins = ", ".join(plugin.plugin for plugin in built.parsed_network.plugins)
        lines = [
            f"{built.engine_bytes / 1e6:9.1f} MB  {bundle.path / cls.row().own}",
            f"{built.runtime} {built.version}, {built.precision}, batches {built.batches[0]} to {built.batches[2]}, "
            f"compute capability {', '.join(built.compute_capabilities)}, built in {built.build_seconds:.1f} s",
            f"plugins in the network: {plugins}",
        ]
        if in_parts := built.attention_in_parts:
            lines.append(
                f"{in_parts} attention layers were not fused, so they are slower and hold a value for every pair of "
                f"tokens{': fuse them with --engine-precision fp16' if built.precision == 'fp32' else ''}"
            )
        if cache := built.timing_cache:
            kept = cache.sha256_before == cache.sha256_after
            found = "it measured nothing anew" if kept else "it measured kernels anew, so another build may differ"
            lines.append(f"timing cache {str(cache.sha256_after)[:12]}: {found}")
        if built.engine_layers_reason:
            lines.append(f"engine layers not inspected: {built.engine_layers_reason}")
        return lines

    def _open(self) -> None:
        facts = self._engine()
        trt = load_bindings(self.runtime)
        capability = self._cuda.open(self.device)
        self.device = self._cuda.device
        sources = plugin_sources(load_plugins(trt, self.runtime)) if facts.plugin_sources else None
        _check_device(self.runtime, f"{capability[0]}.{capability[1]}")
        if reason := why_stale(facts, self.runtime, trt.__version__, sources, capability):
            raise self._unusable(reason)
        with DEVICE.shared(), self._cuda.current(), ExitStack() as stack:
            logger, log = stack.enter_context(listening(trt))
            stack.callback(setattr, self, "_session", None)
            self._session = self._load(trt, facts, logger, log)
            self._compare_once(trt.__version__, str(sources))
            self._stack = stack.pop_all()

    def _compare_once(self, version: str, plugins: str) -> None:
        """Refuses an engine that computes something else than PyTorch, where this machine has not compared it yet."""
        engine = self.bundle.files[self.executable].sha256
        done = marker(engine, self.runtime, version, plugins, self.device_name, str(environment().driver))
        if done.exists():
            return
        if found := self._difference():
            raise self._unusable(
                f"expected what PyTorch computed when the engine was built, this machine differs first in {found}"
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

    def _load(self, trt: Any, facts: Engine, logger: Any, log: Log) -> _Session:
        runtime = trt.Runtime(logger)
        if facts.version_compatible:
            runtime.engine_host_code_allowed = True  # such an engine carries a lean runtime of its own release
        with self._to_rebuild():
            content = self.bundle.file(self.executable).read_bytes()
        engine = runtime.deserialize_cuda_engine(content)
        if engine is None:
            raise self._unusable(f"TensorRT cannot load it ({'; '.join(log.errors[:2]) or 'it gives no reason'})")
        lanes: queue.Queue[_Lane] = queue.Queue()
        for _ in range(self._contexts):
            context = engine.create_execution_context()
            if context is None:
                raise RuntimeUnavailableError(
                    f"expected enough device memory for an execution context, TensorRT says "
                    f"{'; '.join(log.errors[:2]) or 'nothing'}: free memory, or build with a smaller --max-batch"
                )
            lanes.put(_Lane(context, self._cuda.new_stream()))
        return _Session(log, runtime, engine, _outputs(trt, engine), _limits(engine), lanes)

    def _close(self) -> None:
        with DEVICE.shared(), self._cuda.current():
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
        with DEVICE.shared(), self._cuda.current():
            image = image if image.device == self.device else self._cuda.upload(image)
            inputs = {"image": image, **{name: self._scalar(session, v) for name, v in thresholds.items()}}
            with _lane(session) as lane:
                with self._cuda.on(lane.stream):
                    results = self._enqueue(session, lane, inputs)
                self._cuda.hand_over(lane.stream, list(inputs.values()), list(results.values()))
            wanted = {name: results[name] for name in outputs}
            return self._cuda.download(wanted) if to == CPU else wanted

    def _scalar(self, session: _Session, value: float) -> Tensor:
        """A threshold in device memory, for any stream: the copy is done when this returns."""
        if value not in session.scalars:
            session.scalars[value] = torch.tensor(value, device=self.device)
        return session.scalars[value]

    def _enqueue(self, session: _Session, lane: _Lane, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        context = lane.context
        for name, tensor in inputs.items():
            context.set_input_shape(name, tuple(tensor.shape))
            context.set_tensor_address(name, tensor.data_ptr())
        results = {}
        for name, dtype in session.outputs.items():
            shape = tuple(context.get_tensor_shape(name))
            if min(shape, default=0) < 0:
                raise self._unusable(f"expected the shape of {name} to follow from the image's, TensorRT tells {shape}")
            results[name] = self._cuda.empty(shape, dtype)
            context.set_tensor_address(name, results[name].data_ptr())
        before = len(session.log.errors)
        if not context.execute_async_v3(lane.stream.cuda_stream):
            said = "; ".join(session.log.errors[before:]) or "it gives no reason"
            raise RuntimeUnavailableError(f"TensorRT failed to execute the engine ({said}): send smaller batches")
        return results

    def _engine(self) -> Engine:
        found = self.bundle.found(Engine, self.runtime)
        if found is None:
            raise BundleError(
                f"{self.bundle.path} holds no engine for {self.runtime}: build one with `{self.build_command}`"
            )
        return found

    @contextmanager
    def _to_rebuild(self) -> Iterator[None]:
        """Says of a file that is missing or was changed which command makes it."""
        try:
            yield
        except BundleError as error:
            raise BundleError(f"{error}, with `{self.build_command}`") from error

    def _unusable(self, reason: str) -> BundleError:
        return BundleError(f"{self.bundle.path / self.executable}: {reason}: rebuild it with `{self.build_command}`")


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


def _outputs(trt: Any, engine: Any) -> dict[str, torch.dtype]:
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    written = [name for name in names if engine.get_tensor_mode(name) != trt.TensorIOMode.INPUT]
    return {name: _DTYPES[engine.get_tensor_dtype(name).name] for name in written}


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
