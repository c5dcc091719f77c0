"""What every runtime offers: a context manager that turns named arrays into named arrays, or tensors into tensors.

    with runner(bundle, "onnxruntime-cpu") as run:
        outputs = run.infer({"image": image})

Checks are done here, once; a runtime fills in `_open`, `_infer` and `_close`.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from shlex import quote
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, NoReturn, Self
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from algm_deploy.bundle import signature
from algm_deploy.bundle.store import Bundle
from algm_deploy.environment import device_name
from algm_deploy.errors import (
    BundleError,
    ExecutionError,
    RuntimeUnavailableError,
    out_of_memory,
)
from algm_deploy.native_libraries import say_once
from algm_deploy.recipe.schema import Precision
from algm_deploy.runners.registry import RUNTIMES, Runtime, row_of
from algm_deploy.wording import either

Array = NDArray[Any]
CPU = torch.device("cpu")
_MOST_SAID = 300  # characters of what a library says, in an error


class Placement(NamedTuple):
    """Where the nodes of a run were executed: nodes by provider, and copies between host and device among them."""

    nodes: dict[str, int]
    copies: int


class Runner(ABC):
    """One runtime on one bundle. Open it with `with`; a closed runner can be opened again.

    `infer` and `infer_device` may be called from several threads, in the process that opened the runner: the threads of
    a runtime do not outlive a fork. What they return belongs to the caller.

    Args:
        bundle: to run.
        device: "cpu", "cuda" or "cuda:1", as far as the runtime executes there. By default, and for "cuda", the CUDA
            device that is current when the runner is opened; without one the CPU, if the runtime executes there.

    Raises:
        RuntimeUnavailableError: a device that the runtime does not execute on, or that is not here; or a bundle of a
            precision that it does not execute.
    """

    runtime: ClassVar[str]
    failures: ClassVar[tuple[type[Exception], ...]] = (MemoryError, RuntimeError)  # while a network runs
    provider: ClassVar[str | None] = None
    """Name of the execution provider, of runtimes that have several."""
    refused: str | None = None
    """Why something else runs than what would run first, once the runner is open; None where nothing was refused."""

    def __init__(self, bundle: Bundle, device: str | None = None) -> None:
        self.row().check_precision(bundle.recipe.precision, bundle.calibrated)
        self.bundle = bundle
        self.signature = bundle.signature
        self._asked = _device_asked(self.row(), device)
        self.device = self._asked
        """Where it executes; with its index once the runner is open."""
        self._opened = False
        self._process = os.getpid()

    @classmethod
    def row(cls) -> Runtime:
        """The runtime's row of the registry."""
        return row_of(cls.runtime)

    @classmethod  # noqa: B027 - most need no more than their package
    def require_builder(cls) -> None:
        """RuntimeUnavailableError or BuildError where it is clear before any work that this machine lacks something."""

    @classmethod
    def build(cls, bundle: Bundle, **options: Any) -> list[str]:
        """Makes the runtime's executable and adds it to the bundle; nothing for runtimes that need no other file.

        Args:
            bundle: to build for and to add to.
            options: those that the runtime's row names, such as `level=3`.

        Returns:
            What was done, one line each, for people.

        Raises:
            BuildError: options that the runtime does not have.
        """
        cls.row().check_options(options)
        return []

    def __enter__(self) -> Self:
        if self._opened:
            self._check_process()
        self._process = os.getpid()
        self.device = _device_here(self._asked, self.row())
        _AFTER_FORK.opened(self)
        self._open()
        self._opened = True
        wanted = self.bundle.recipe.precision
        if (executed := self.row().precision_of(wanted)) != wanted:
            others = either([row.name for row in RUNTIMES.values() if row.executes(wanted, self.bundle.calibrated)])
            say_once(
                f"{self.runtime}: runs the weights of this {wanted} bundle in {executed}; for {wanted} take "
                f"--runtime {others} on a device that has it"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Frees the runtime. In a forked process nothing happens: it belongs to the process that opened it."""
        if os.getpid() != self._process:
            return
        self._opened = False
        self._close()
        _AFTER_FORK.closed(self)

    def __reduce__(self) -> NoReturn:
        raise RuntimeUnavailableError(
            "expected a bundle to send to another process or to copy, got an opened network, which holds its runtime: "
            "send the bundle's path and load it there"
        )

    # --- what runs ----------------------------------------------------------------------------------------------------

    @property
    def executable(self) -> str:
        """Name of the bundle's file that runs.

        Raises:
            BundleError: there is none yet.
        """
        found = self.row().executable(self.bundle.files)
        if found is None:
            cure = f"build it with `{self.build_command}`" if self.row().builds else "export it again"
            raise BundleError(f"{self.bundle.path} holds nothing that {self.runtime} executes: {cure}")
        return found

    @property
    def precision(self) -> Precision:
        """In what it executes the bundle."""
        return self.row().precision_of(self.bundle.recipe.precision)

    @property
    def attention_in_levels(self) -> bool:
        """Whether it computes attention's products in int8, where the bundle has steps for them."""
        return False

    @property
    def build_command(self) -> str:
        """The command that builds it anew."""
        return f"algm-deploy build {quote(str(self.bundle.path))} --runtime {self.runtime}"

    @property
    def custom_operators(self) -> tuple[str, ...]:
        """The project's own operators in that file that a native library serves, by name."""
        return ()

    @property
    def execution(self) -> dict[str, str]:
        """How the open runner has really executed so far, in words by name, for records and people.

        Such as {"rows": "packed", "cuda_graphs": "12"}; empty where there is nothing to tell.
        """
        return {}

    @property
    def device_name(self) -> str:
        """Name of the device that the open runner executes on, for records."""
        return device_name(self.device.type == "cuda", self.device.index)

    @property
    def captures(self) -> int:
        """CUDA graphs that were captured since the runner was opened; 0 where there are none."""
        return 0

    def placement(self, feeds: Mapping[str, Array]) -> Placement | None:
        """Runs once more to see which provider executes each node; None where there is but one."""
        return None

    # --- running it ---------------------------------------------------------------------------------------------------

    def infer(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Runs the network once.

        Args:
            feeds: `image` (b, 3, H, W) in the signature's dtype, 1 <= b <= the bundle's maximum batch, an array or what
                NumPy makes one of, such as a tensor of the host; optionally thresholds as numbers, missing ones take
                the bundle's defaults.
            outputs: names to return; by default labels or scores, and token counts.

        Raises:
            BundleError: an unknown name, or a dtype or shape that differs from the signature.
            RuntimeUnavailableError: there is not enough memory for the batch, the runner is closed, or it was opened
                before the process forked.
            ExecutionError: the runtime failed while it ran the network.
        """
        wanted, thresholds = self._checked(feeds, outputs)
        image = host_array(feeds["image"])
        self.check_image(image)
        image = np.require(image, requirements=["C", "W"])  # PyTorch warns of read-only memory
        results = self._guarded(torch.from_numpy(image), thresholds, wanted, CPU)
        return {name: tensor.numpy() for name, tensor in results.items()}

    def infer_device(
        self, feeds: Mapping[str, Tensor | float], outputs: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """`infer` in the memory of `device`, ordered after and before other work of the caller's current stream.

        The host may return before the work is done.

        Args:
            feeds: `image` on the runner's device, a tensor or anything with DLPack, of any layout, in the signature's
                dtype (any floating one where that is float32); thresholds as numbers.
            outputs: as for `infer`.

        Raises:
            BundleError: as for `infer`, and for an image that is somewhere else.
        """
        wanted, thresholds = self._checked(feeds, outputs)
        given = feeds["image"]
        image = given if isinstance(given, Tensor) else _from_dlpack(given)
        if image.device != self.device:
            raise BundleError(
                f"expected an image in the memory of {self.device}, got one in that of {image.device}: move it there, "
                "or use infer for arrays of the host"
            )
        if image.is_floating_point() and self.signature.image.dtype == "float32":
            image = image.float()
        self.check_image(image)
        return self._guarded(image.contiguous(), thresholds, wanted, self.device)

    def warm_up(self, images: int = 1, seconds: float = math.inf) -> bool:
        """Prepares beforehand what a first run of some token counts would otherwise wait for: CUDA graphs.

        Nothing is done where a runtime has none. Results stay what they are; runs of other threads wait meanwhile. The
        first run of a batch size takes longer for other reasons too (memory, kernels that are compiled), so let one run
        as well.

        Args:
            images: of the batches that will come; every size is prepared for itself.
            seconds: after which no further graph is captured.

        Returns:
            Whether everything was done in that time.

        Raises:
            BundleError, RuntimeUnavailableError, ExecutionError: as for `infer`.
        """
        deadline = time.monotonic() + seconds
        self._check_open()
        self._check_batch(images)
        with self._failures_told(images):
            return self._warm_up(images, deadline)

    def check_image(self, image: Array | Tensor) -> None:
        """Refuses an image input that `infer` would refuse.

        Raises:
            BundleError: a dtype, shape or batch that differs from the signature.
        """
        expected, dtype, shape = self.signature.image, str(image.dtype).removeprefix("torch."), tuple(image.shape)
        if dtype != expected.dtype or len(shape) != 4 or shape[1:] != expected.shape[1:]:
            raise BundleError(
                f"expected image {expected.dtype} (batch, {', '.join(map(str, expected.shape[1:]))}), got "
                f"{dtype} {shape}: resize or cut the photo first, or export for another --image-size"
            )
        self._check_batch(shape[0])

    def _check_batch(self, images: int) -> None:
        if not 1 <= images <= self.signature.max_batch:
            raise BundleError(
                f"got a batch of {images}, this bundle takes 1 to {self.signature.max_batch}: send smaller batches "
                "or export with a larger --max-batch"
            )

    def _guarded(
        self, image: Tensor, thresholds: dict[str, float], outputs: Sequence[str], to: torch.device
    ) -> dict[str, Tensor]:
        with self._failures_told(len(image)):
            return self._infer(image, thresholds, outputs, to)

    @contextmanager
    def _failures_told(self, images: int) -> Iterator[None]:
        """Around a run of so many images: the runtime's failures as errors of this package."""
        try:
            yield
        except self.failures as error:
            said = next(iter(str(error).splitlines()), type(error).__name__)
            said = said if len(said) <= _MOST_SAID else f"{said[:_MOST_SAID]}..."
            if out_of_memory(error):
                remedy = "send smaller batches" if images > 1 else "end other programs that use it"
                raise RuntimeUnavailableError(
                    f"expected enough memory for a batch of {images} on {self.runtime}, got {said!r}: {remedy}"
                ) from error
            raise ExecutionError(
                f"expected {self.runtime} to run the network, it failed with {said!r}: export and build the bundle "
                "again"
            ) from error

    # --- what a runtime fills in --------------------------------------------------------------------------------------

    @abstractmethod
    def _open(self) -> None:
        """Loads the executable."""

    @abstractmethod
    def _infer(
        self, image: Tensor, thresholds: dict[str, float], outputs: Sequence[str], to: torch.device
    ) -> dict[str, Tensor]:
        """Runs on checked inputs.

        Args:
            image: contiguous, on the host or on `device`.
            thresholds: all that the network reads, rounded to fp32.
            outputs: names to return.
            to: where the results are wanted: on the host, or on `device`.
        """

    def _warm_up(self, images: int, deadline: float) -> bool:
        """As `warm_up`; `deadline` by `time.monotonic()`."""
        return True

    @abstractmethod
    def _close(self) -> None:
        """Frees what `_open` took."""

    # --- checks -------------------------------------------------------------------------------------------------------

    def _checked(
        self, feeds: Mapping[str, Any], outputs: Sequence[str] | None
    ) -> tuple[tuple[str, ...], dict[str, float]]:
        """The outputs that are wanted, and all thresholds."""
        self._check_open()
        if not isinstance(feeds, Mapping):
            raise BundleError(f"expected inputs by name, such as {{'image': image}}, got {type(feeds).__name__}")
        if isinstance(outputs, str) or not isinstance(outputs, Iterable | None):
            raise BundleError(f"expected a list of outputs, such as ['token_counts'], got {outputs!r:.50}")
        wanted = tuple(outputs) if outputs is not None else tuple(t.name for t in self.signature.outputs[:2])
        if not wanted:
            known = ", ".join(t.name for t in self.signature.outputs)
            raise BundleError(f"no output was asked for: choose from {known}")
        _check_names("output", wanted, self.signature.outputs)
        _check_names("input", feeds, self.signature.inputs)
        if "image" not in feeds:
            raise BundleError("the input 'image' is missing")
        return wanted, {n: _threshold(n, feeds.get(n, d)) for n, d in self.signature.defaults.items()}

    def _check_open(self) -> None:
        if not self._opened:
            raise RuntimeUnavailableError(f"the {self.runtime} runner is closed: use it inside a `with` block")
        self._check_process()

    def _check_process(self) -> None:
        """Before anything native is touched: it would wait for threads that are not there."""
        if os.getpid() != self._process:
            raise RuntimeUnavailableError(
                f"expected a network that this process opened on {self.runtime}, got one that was opened before the "
                "process forked, which would hang: load it in the child process, on a GPU one that `spawn` started"
            )


class _AfterFork:
    """What a forked process must know of the runners that its parent opened: their threads did not come along."""

    def __init__(self) -> None:
        self._open: WeakSet[Runner] = WeakSet()
        self._any = False
        os.register_at_fork(after_in_child=self._in_child)

    def opened(self, run: Runner) -> None:
        self._any = True
        self._open.add(run)

    def closed(self, run: Runner) -> None:
        self._open.discard(run)

    def _in_child(self) -> None:
        if self._any:
            torch.set_num_threads(1)  # a child that loads for itself would wait for PyTorch's threads for ever
        for run in self._open:
            # Nothing may free it, the end of the process included: ONNX Runtime joins its threads then.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(run))


_AFTER_FORK = _AfterFork()


def host_array(value: Any) -> Array:
    """The array of numbers that NumPy makes of a value: a tensor of the host is taken where it lies.

    Raises:
        BundleError: it makes none, as of a tensor of a GPU, of a text or of rows of different lengths.
    """
    try:
        made = np.asarray(value.detach() if isinstance(value, Tensor) else value)
        if made.dtype.kind not in "biuf":
            raise TypeError(f"an array of {made.dtype}")
        return made
    except (TypeError, ValueError, RuntimeError) as error:
        place = f" in the memory of {value.device}" if isinstance(value, Tensor) else ""
        raise BundleError(
            f"expected an image as an array of the host, got {type(value).__name__}{place} ({error!s:.100}): convert "
            "it first, or give tensors of a GPU to infer_device"
        ) from error


def _from_dlpack(value: Any) -> Tensor:
    try:
        return from_dlpack(value)
    except (AttributeError, TypeError, ValueError, RuntimeError, BufferError) as error:
        raise BundleError(
            f"expected an image as a tensor or anything with DLPack, got {type(value).__name__} ({error!s:.100}): "
            "convert it first, or use infer for arrays of the host"
        ) from error


def _check_names(kind: str, given: Iterable[str], tensors: Iterable[signature.Tensor]) -> None:
    known = [tensor.name for tensor in tensors]
    if unknown := sorted(set(given) - set(known)):
        raise BundleError(f"this bundle has no {kind} {unknown[0]!r}: choose from {', '.join(known)}")


def _threshold(name: str, value: Any) -> float:
    try:
        number = np.asarray(value.detach().cpu().float() if isinstance(value, Tensor) else value, dtype=np.float32)
    except (TypeError, ValueError):
        number = np.asarray(np.nan)
    if number.shape != () or np.isnan(number):
        raise BundleError(f"{name} is one number, or infinity to merge nothing; got {value!r:.50}")
    return float(number)


def _device_asked(row: Runtime, device: str | None) -> torch.device:
    """The device as it was asked for, its index left open where it was."""
    if device is None:
        return torch.device("cuda" if row.needs_gpu or ("cuda" in row.devices and torch.cuda.is_available()) else "cpu")
    try:
        asked = torch.device(device)
    except RuntimeError:
        asked = torch.device("meta")
    if asked.type not in row.devices:
        known = " or ".join(f"{kind}, {kind}:1" if kind == "cuda" else kind for kind in row.devices)
        raise RuntimeUnavailableError(f"{row.name} executes on {known}, got {device!r}: leave the device out")
    return CPU if asked.type == "cpu" else asked


def _device_here(asked: torch.device, row: Runtime) -> torch.device:
    """The device with its index. One that needs a GPU and finds none says so itself."""
    count = torch.cuda.device_count() if asked.type == "cuda" else 0
    if asked.type == "cpu" or (not count and row.needs_gpu):
        return asked
    index = torch.cuda.current_device() if count and asked.index is None else asked.index or 0
    if index >= count:
        raise RuntimeUnavailableError(
            f"expected {asked} for {row.name}, PyTorch finds {count or 'no'} CUDA devices here: leave the device out"
        )
    return torch.device("cuda", index)


def runner_type(runtime: str) -> type[Runner]:
    """The class behind a runtime's name.

    Raises:
        RuntimeUnavailableError: an unknown name, or the runtime's package is not installed.
    """
    row = row_of(runtime)
    try:
        found: type[Runner] = resolve_name(row.runner)
    except ModuleNotFoundError as error:
        raise RuntimeUnavailableError(
            f"runtime {runtime} needs the package {error.name}: `pip install {row.install}`"
        ) from error
    return found


def runner(bundle: Bundle, runtime: str, device: str | None = None, **options: Any) -> Runner:
    """A closed runner for a bundle; `device` as for `Runner`, `options` those that the runtime's own runner takes."""
    return runner_type(runtime)(bundle, device=device, **options)
