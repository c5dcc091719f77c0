"""What every runtime offers: a context manager that turns named arrays into named arrays.

    with runner(bundle, "onnxruntime-cpu") as run:
        outputs = run.infer({"image": image})

Checks are done here, once; a runtime fills in `_open`, `_infer` and `_close`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import (
    AlgmDeployError,
    BuildError,
    BundleError,
    ExecutionError,
    RuntimeUnavailableError,
    out_of_memory,
)

Array = NDArray[Any]

RUNTIMES = {
    "torch": "algm_deploy.runners.torch.runner:TorchRunner",
    "onnxruntime-cpu": "algm_deploy.runners.onnxruntime.runner:OnnxRuntimeCpuRunner",
    "onnxruntime-cuda": "algm_deploy.runners.onnxruntime.runner:OnnxRuntimeCudaRunner",
    "tensorrt": "algm_deploy.runners.tensorrt.runner:TensorRTRunner",
    "tensorrt-rtx": "algm_deploy.runners.tensorrt.runner:TensorRTRtxRunner",
}


class Runner(ABC):
    """One runtime on one bundle. Open it with `with`; a closed runner can be opened again.

    `infer` may be called from several threads. The arrays it returns belong to the caller.
    """

    runtime: ClassVar[str]
    failures: ClassVar[tuple[type[Exception], ...]] = (MemoryError, RuntimeError)  # while a network runs

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.signature = bundle.signature
        self._opened = False

    @classmethod  # noqa: B027 - most need no more than their package
    def require_builder(cls) -> None:
        """RuntimeUnavailableError or BuildError where it is clear before any work that this machine lacks something."""

    @classmethod
    def build(cls, bundle: Bundle, **options: Any) -> list[str]:
        """Makes the runtime's executable and adds it to the bundle; nothing for runtimes that need no other file.

        Returns:
            What was done, one line each, for people.

        Raises:
            BuildError: options that the runtime does not have.
        """
        cls._refuse(options)
        return []

    @classmethod
    def _refuse(cls, options: Mapping[str, Any]) -> None:
        if options:
            raise BuildError(f"{cls.runtime} has no build options, got {', '.join(options)}: leave them out")

    def __enter__(self) -> Self:
        self._open()
        self._opened = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened = False
        self._close()

    @property
    def execution(self) -> dict[str, str]:
        """How the open runner has really executed so far, in words by name, for records and people.

        Such as {"rows": "packed", "cuda_graphs": "12"}; empty where there is nothing to tell.
        """
        return {}

    def infer(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Runs the network once.

        Args:
            feeds: `image` (b, 3, H, W) in the signature's dtype, 1 <= b <= the bundle's maximum batch, and optionally
                thresholds as fp32 scalars; missing thresholds take the bundle's defaults.
            outputs: names to return; by default labels or scores, and token counts.

        Raises:
            BundleError: an unknown name, or a dtype or shape that differs from the signature.
            RuntimeUnavailableError: there is not enough memory for the batch.
            ExecutionError: the runtime failed while it ran the network.
        """
        if not self._opened:
            raise RuntimeUnavailableError(f"the {self.runtime} runner is closed: use it inside a `with` block")
        wanted = tuple(outputs) if outputs is not None else tuple(t.name for t in self.signature.outputs[:2])
        self._check_outputs(wanted)
        complete = self._checked(feeds)
        try:
            return self._infer(complete, wanted)
        except self.failures as error:
            raise self._failure(error, len(complete["image"])) from error

    def check_image(self, image: Array) -> None:
        """Refuses an image input that `infer` would refuse.

        Raises:
            BundleError: a dtype, shape or batch that differs from the signature.
        """
        expected = self.signature.image
        if image.dtype != expected.dtype or image.ndim != 4 or image.shape[1:] != expected.shape[1:]:
            raise BundleError(
                f"expected image {expected.dtype} (batch, {', '.join(map(str, expected.shape[1:]))}), got "
                f"{image.dtype} {image.shape}: resize or cut the photo first, or export for another --image-size"
            )
        if not 1 <= len(image) <= self.signature.max_batch:
            raise BundleError(
                f"got a batch of {len(image)}, this bundle takes 1 to {self.signature.max_batch}: send smaller batches "
                "or export with a larger --max-batch"
            )

    def _failure(self, error: Exception, images: int) -> AlgmDeployError:
        said = next(iter(str(error).splitlines()), type(error).__name__)[:300]
        if out_of_memory(error):
            return RuntimeUnavailableError(
                f"expected enough memory for a batch of {images} on {self.runtime}, got {said!r}: send smaller batches"
            )
        return ExecutionError(
            f"expected {self.runtime} to run the network, it failed with {said!r}: export and build the bundle again"
        )

    @abstractmethod
    def _open(self) -> None:
        """Loads the executable."""

    @abstractmethod
    def _infer(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """Runs on complete, checked feeds."""

    @abstractmethod
    def _close(self) -> None:
        """Frees what `_open` took."""

    def _check_outputs(self, wanted: Sequence[str]) -> None:
        known = [t.name for t in self.signature.outputs]
        if not wanted:
            raise BundleError(f"no output was asked for: choose from {', '.join(known)}")
        if unknown := sorted(set(wanted) - set(known)):
            raise BundleError(f"this bundle has no output {unknown[0]!r}: choose from {', '.join(known)}")

    def _checked(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        known = [t.name for t in self.signature.inputs]
        if unknown := sorted(set(feeds) - set(known)):
            raise BundleError(f"this bundle has no input {unknown[0]!r}: choose from {', '.join(known)}")
        if "image" not in feeds:
            raise BundleError("the input 'image' is missing")
        image = np.asarray(feeds["image"])
        self.check_image(image)
        thresholds = {n: self._threshold(n, feeds.get(n, d)) for n, d in self.signature.defaults.items()}
        return {"image": np.require(image, requirements=["C", "W"]), **thresholds}  # PyTorch warns of read-only memory

    def _threshold(self, name: str, value: Any) -> Array:
        number = np.asarray(value, dtype=np.float32)
        if number.shape != () or np.isnan(number):
            raise BundleError(f"{name} is one number, or infinity to merge nothing; got {number.tolist()!r:.50}")
        return number


def runner_type(runtime: str) -> type[Runner]:
    """The class behind a runtime's name.

    Raises:
        RuntimeUnavailableError: an unknown name, or the runtime's package is not installed.
    """
    if runtime not in RUNTIMES:
        raise RuntimeUnavailableError(f"unknown runtime {runtime!r}: choose from {', '.join(RUNTIMES)}")
    module, name = RUNTIMES[runtime].split(":")
    try:
        found: type[Runner] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise RuntimeUnavailableError(
            f"runtime {runtime} needs the package {error.name}: `pip install 'algm-deploy[{runtime}]'`"
        ) from error
    return found


def runner(bundle: Bundle, runtime: str) -> Runner:
    """A closed runner for a bundle."""
    return runner_type(runtime)(bundle)
