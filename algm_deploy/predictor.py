"""One object for every runtime: pictures in, label maps out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, Self, get_args, overload

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import AlgmDeployError, BundleError, ExecutionError, ImageError
from algm_deploy.pictures.preprocessing import (
    Pixels,
    canvas_of,
    check_pixels,
    preprocessing_fingerprint,
    window_anchors,
)
from algm_deploy.pictures.sliding import MAP_PREFIX, Labels, Pending, Prediction, predict_all, run_all
from algm_deploy.pictures.sources import AnyPath, Failure, Picture, Source, Sources, is_single, named, pictures_of
from algm_deploy.recipe.network import Size
from algm_deploy.recipe.schema import Recipe
from algm_deploy.runners.contract import host_array, runner
from algm_deploy.runners.registry import default_runtime

AnyBundle = Bundle | AnyPath
Errors = Literal["raise", "yield"]

_LOG = logging.getLogger("algm_deploy")

FAILURES_OF_A_BROKEN_RUNTIME = 3
"""So many runs in a row that failed although their picture was alone: the runtime is broken, not a picture."""

WARM_UP_S = 20
"""Seconds after which a server that starts captures no further CUDA graph."""


class WarmUp(NamedTuple):
    """What warming up took: seconds, and CUDA graphs that were captured; whether there was time for all."""

    seconds: float
    graphs: int
    complete: bool

    def __str__(self) -> str:
        graphs = f", with {self.graphs} CUDA graphs" if self.graphs else ""
        missing = "" if self.complete else "; there was no time for the others, which are captured when they are needed"
        return f"warm after {self.seconds:.1f} s{graphs}{missing}"


class Predictor:
    """A bundle opened on one runtime; use it in a `with` block, or call `close`.

        with Predictor("bundle") as network:
            labels = network.predict("photo.jpg")
            for labels in network.predict("folder", batch=8): ...

    Windows of the protocol slide over a picture and their scores are averaged. A network of another size than the
    protocol's window takes the picture at once (`network_canvas`). It may be used from several threads, and in no
    process but the one that opened it.

    Args:
        bundle: folder of the bundle, or the opened bundle.
        runtime: `torch`, `onnxruntime-cpu`, ...; by default the best that can execute the bundle here, which
            `Predictor.runtime` and the log tell.
        device: what executes it, such as `cpu` or `cuda:1`; by default the runtime's choice.
        tau: CLAP's similarity threshold instead of the bundle's; higher merges less, infinity nothing.
        gbm: GBM's multiplier or threshold instead of the bundle's.
        dense: runs the network without merging, on the same executable: infinite thresholds merge nothing.
        batch: windows that go through the network at once, of one picture or of several; by default as many as the
            bundle takes. Under batch semantics `batch_min` it is 1: windows of a batch would change each other.

    Raises:
        BundleError: the bundle is incomplete, or does not fit a threshold or the batch.
        RuntimeUnavailableError: the runtime or the device is not there, or cannot run here.
    """

    def __init__(
        self,
        bundle: AnyBundle,
        runtime: str | None = None,
        *,
        device: str | None = None,
        tau: float | None = None,
        gbm: float | None = None,
        dense: bool = False,
        batch: int | None = None,
    ) -> None:
        self.bundle, self.runtime = chosen(bundle, runtime, device)
        self.bundle.warn_of_failed_parity([self.runtime])
        _check_preprocessing(self.bundle)
        self.signature = self.bundle.signature
        given = given_thresholds(self.bundle, tau, gbm, dense)
        self.thresholds = {name: np.asarray(value, np.float32) for name, value in given.items()}
        self.batch = usual_batch(self.bundle)
        self.batch = self._checked_batch(batch)
        self._runner = runner(self.bundle, self.runtime, device)
        self._runner.__enter__()
        _LOG.info("%s runs on %s, %s", self.bundle.path, self.runtime, self.device_name)

    @property
    def device_name(self) -> str:
        """Name of the device that executes, for records and people."""
        return self._runner.device_name

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU executes."""
        return self._runner.device.type == "cuda"

    @property
    def executable(self) -> str:
        """Name of the bundle's file that runs."""
        return self._runner.executable

    @property
    def captures(self) -> int:
        """CUDA graphs that were captured so far."""
        return self._runner.captures

    @property
    def thresholds_in_force(self) -> dict[str, float]:
        """Every threshold the network reads, by input name: the bundle's, or the one given instead."""
        return thresholds_in_force(self.bundle, self.thresholds)

    def __repr__(self) -> str:
        return f"Predictor({str(self.bundle.path)!r}, runtime={self.runtime!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        self._runner.__reduce__()

    def close(self) -> None:
        """Frees the runtime. In a forked process nothing happens: it belongs to the process that opened it."""
        self._runner.__exit__(None, None, None)

    @overload
    def predict(self, source: Image.Image, *, batch: int | None = None) -> Labels: ...

    @overload
    def predict(
        self, source: AnyPath | NDArray[np.uint8], *, batch: int | None = None, errors: Errors = ...
    ) -> Any: ...

    @overload
    def predict(
        self, source: Iterable[Source], *, batch: int | None = None, errors: Literal["raise"] = ...
    ) -> Iterator[Labels]: ...

    @overload
    def predict(
        self, source: Iterable[Source], *, batch: int | None = None, errors: Literal["yield"]
    ) -> Iterator[Labels | Failure]: ...

    def predict(self, source: Sources, *, batch: int | None = None, errors: Errors = "raise") -> Any:
        """Label maps (H, W), uint8 up to 255 classes, else int32.

        Args:
            source: one picture (a file, a PIL image, or an RGB array uint8 (H, W, 3)), which gives one label map; or
                several (a folder, a video, a list, an array (N, H, W, 3), an iterator of frames), which give an
                iterator of label maps in the same order. Pictures are read when a batch needs them.
            batch: windows at once, instead of the predictor's.
            errors: what a picture that cannot be predicted does among several: `raise`, or `yield` a `Failure` in its
                place and go on.

        Raises:
            ImageError: a picture cannot be read, or needs several windows of a bundle that gives labels only.
            DatasetError: a folder has no picture.
            BundleError: a batch that the bundle does not take.
        """
        if is_single(source):
            return self.prediction(source, batch=batch).labels
        found = self.predictions(source, batch=batch, errors=errors)
        return (one if isinstance(one, Failure) else one.labels for one in found)

    def prediction(
        self, source: Source, *, batch: int | None = None, scores: bool = False, token_maps: bool = False
    ) -> Prediction:
        """Label map of one picture, token counts of every window after each merge, and what else is asked for.

        Raises:
            ImageError: as `predict`; or several pictures were given.
            BundleError: scores of a bundle that gives labels.
        """
        if not is_single(source):
            raise ImageError(f"expected one picture, got several ({type(source).__name__}): use `predictions`")
        (result,) = self.predictions(source, batch=batch, scores=scores, token_maps=token_maps)
        return result

    @overload
    def predictions(
        self,
        source: Sources,
        *,
        batch: int | None = None,
        scores: bool = False,
        token_maps: bool = False,
        errors: Literal["raise"] = ...,
    ) -> Iterator[Prediction]: ...

    @overload
    def predictions(
        self,
        source: Sources,
        *,
        batch: int | None = None,
        scores: bool = False,
        token_maps: bool = False,
        errors: Errors,
    ) -> Iterator[Prediction | Failure]: ...

    def predictions(
        self,
        source: Sources,
        *,
        batch: int | None = None,
        scores: bool = False,
        token_maps: bool = False,
        errors: Errors = "raise",
    ) -> Iterator[Any]:
        """The same as `prediction`, one after the other, for one or several pictures; see `predict`."""
        if errors not in get_args(Errors):
            raise BundleError(f"expected errors to be 'raise' or 'yield', got {errors!r:.50}")
        network = partial(self.infer, outputs=self._outputs(scores, token_maps))
        pending = (self._pending(picture, scores) for picture in pictures_of(source))
        results = predict_all(pending, network, self._checked_batch(batch))
        return results if errors == "yield" else map(_raised, results)

    def scores_of(self, windows: Pixels) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores (b, K, s, s) and token counts (b, M) of windows (b, 3, s, s), RGB 0..255, uint8 or float32."""
        self._require_scores()
        outputs = self.infer(windows, ("scores", "token_counts"))
        return outputs["scores"], outputs["token_counts"]

    def prepared(self, photo: NDArray[np.uint8]) -> Pending:
        """A picture, RGB (H, W, 3), resized and on its way: `run_prepared` runs its windows.

        Raises:
            ImageError: the picture does not fit the protocol, or needs several windows of a bundle that gives labels.
        """
        pending = self._pending(Picture(photo), scores=False)
        if isinstance(pending, Failure):
            raise pending.error
        return pending

    def run_prepared(
        self,
        pictures: Iterable[Pending],
        thresholds: Mapping[str, float] | None = None,
        *,
        token_maps: bool = False,
    ) -> None:
        """Runs pictures until they are done: their `prediction` can then be taken, in any thread.

        Args:
            pictures: of `prepared`; their windows share batches. Where running fails they are unfinished, and
                `Pending.restart` makes them as new.
            thresholds: by input name, as `given_thresholds` makes them; by default this predictor's.
            token_maps: whether predictions hold token maps.

        Raises:
            BundleError, RuntimeUnavailableError, ExecutionError: as `Runner.infer`.
            GateError: the network returned scores that are not finite.
        """
        network = partial(self.infer, outputs=self._outputs(False, token_maps), thresholds=thresholds)
        for _ in run_all(pictures, network, self.batch):
            pass

    def run_apart(
        self, pictures: Sequence[Pending], thresholds: Mapping[str, float] | None = None, *, token_maps: bool = False
    ) -> list[AlgmDeployError | None]:
        """The same as `run_prepared`, and for each picture the error where it could not be predicted.

        Where a batch fails each of its pictures runs again alone, so that only the one at fault fails.
        """
        try:
            self.run_prepared(pictures, thresholds, token_maps=token_maps)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to one picture, and the others go on
            if len(pictures) == 1:
                return [_told(error)]
            for picture in pictures:
                picture.restart()
            alone = (self.run_apart([one], thresholds, token_maps=token_maps) for one in pictures)
            return [found for errors in alone for found in errors]
        return [None] * len(pictures)

    def infer(
        self,
        windows: NDArray[Any],
        outputs: tuple[str, ...] | None = None,
        thresholds: Mapping[str, float] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """The network's outputs for windows, with this predictor's thresholds or those given, by input name.

        Raises:
            BundleError: no array, or one that does not fit; see `Runner.infer`.
            ImageError: pixels that are no numbers from 0 to 255.
            RuntimeUnavailableError: in a process that was forked after the predictor had been opened.
        """
        given = self.thresholds if thresholds is None else {n: np.asarray(v, np.float32) for n, v in thresholds.items()}
        return self._runner.infer({"image": self._fitting(windows), **given}, outputs)

    def warm_up(self, seconds: float = WARM_UP_S) -> WarmUp:
        """Runs a batch of blank windows of every size that traffic is cut into, and captures CUDA graphs for photos.

        Graphs of some runtimes belong to threads (`Runner.warm_up`): call it in the thread that will run pictures or,
        if that did not open this predictor, in any other that did not.

        Args:
            seconds: after which graphs of other token counts are no longer captured; those of the blank windows are.

        Raises:
            RuntimeUnavailableError, ExecutionError: the network does not run.
        """
        begin, before, complete = time.monotonic(), self._runner.captures, True
        image, sizes = self.signature.image, sizes_to_warm(self.batch, self.on_gpu)
        for images in sizes:  # all of them first: later, what comes once is not captured
            self.infer(np.zeros((images, *image.shape[1:]), image.dtype))
        for images in sizes:
            complete &= self._runner.warm_up(images, begin + seconds - time.monotonic())
        return WarmUp(time.monotonic() - begin, self._runner.captures - before, complete)

    def _pending(self, picture: Picture | Failure, scores: bool) -> Pending | Failure:
        """A picture with its windows, or why it does not fit the bundle."""
        if isinstance(picture, Failure):
            return picture
        size = picture.pixels.shape[:2]
        window = self.signature.image.shape[2], self.signature.image.shape[3]
        try:
            canvas = network_canvas(picture.pixels, self.bundle.recipe)
            if self.bundle.recipe.output == "labels":
                _check_one_window(canvas, window)
        except ImageError as error:
            where = f"{picture.path}: " if picture.frame is None else f"{picture.path}, frame {picture.frame}: "
            named = error if picture.path is None else ImageError(f"{where}{error}")
            return Failure(named, picture.path, picture.frame)
        anchors = network_anchors(canvas, self.bundle.recipe)
        return Pending(size, canvas, anchors, window, scores, (picture.path, picture.frame))

    def _outputs(self, scores: bool, token_maps: bool) -> tuple[str, ...]:
        if scores:
            self._require_scores()
        maps = [f"{MAP_PREFIX}{merge}" for merge in self.signature.merges] if token_maps else []
        return (self.bundle.recipe.output, "token_counts", *maps)

    def _require_scores(self) -> None:
        if self.bundle.recipe.output != "scores":
            raise BundleError("this bundle gives labels: for averaged windows and mIoU export it with --scores")

    def _checked_batch(self, batch: int | None) -> int:
        if batch is None:
            return self.batch
        if batch > 1 and self.bundle.recipe.merging.batch == "batch_min":
            raise BundleError(
                f"expected a batch of 1, got {batch}: under this bundle's batch semantics batch_min the windows of a "
                "batch change each other's results"
            )
        if not 1 <= batch <= self.signature.max_batch:
            raise BundleError(
                f"expected a batch of 1 to {self.signature.max_batch}, which this bundle takes, got {batch}: choose "
                "another or export with a larger --max-batch"
            )
        return batch

    def _fitting(self, windows: NDArray[Any]) -> NDArray[Any]:
        """Pixels in the network's dtype; a photo longer than the protocol allows is interpolated, then rounded."""
        wanted, windows = self.signature.image.dtype, host_array(windows)
        check_pixels(windows)
        if wanted == "uint8" and windows.dtype != np.uint8:
            windows = np.clip(np.rint(windows), 0, 255)
        fitting: NDArray[Any] = windows.astype(wanted, copy=False)
        return fitting


load = Predictor


def chosen(bundle: AnyBundle, runtime: str | None, device: str | None = None) -> tuple[Bundle, str]:
    """The opened bundle, and the runtime that was named or is the best that can execute it here, on that device."""
    found = opened(bundle)
    return found, runtime or default_runtime(found.files, device)


def opened(bundle: AnyBundle) -> Bundle:
    """The bundle, opened where it is a folder."""
    return bundle if isinstance(bundle, Bundle) else Bundle.open(named(bundle, BundleError))


def usual_batch(bundle: Bundle) -> int:
    """Windows that go through the network at once unless somebody says otherwise: as many as the bundle takes.

    Under `batch_min` it is one: coupled windows would change each other's result.
    """
    return 1 if bundle.recipe.merging.batch == "batch_min" else bundle.signature.max_batch


def batch_sizes(most: int) -> tuple[int, ...]:
    """Sizes of the batches that traffic is cut into: powers of two below `most`, and `most`.

    Requests make batches of any size, and on a GPU each size is prepared for itself: memory, CUDA graphs, the choice of
    kernels. A few sizes are prepared after a moment; all of them would push each other out for ever.
    """
    return (*(1 << step for step in range((most - 1).bit_length())), most)


def sizes_to_warm(most: int, on_gpu: bool) -> tuple[int, ...]:
    """Batches to run before the first request: on a CPU no size is prepared for itself, and large ones take seconds."""
    return batch_sizes(most) if on_gpu else tuple(sorted({1, most}))


def thresholds_in_force(bundle: Bundle, given: Mapping[str, Any]) -> dict[str, float]:
    """Every threshold a network reads, by input name: the bundle's, or a given one as fp32, which it gets."""
    return {**bundle.signature.defaults, **{name: float(np.float32(value)) for name, value in given.items()}}


def given_thresholds(bundle: Bundle, tau: float | None, gbm: float | None, dense: bool = False) -> dict[str, float]:
    """Thresholds to use instead of a bundle's, by input name; `tau`, `gbm` and `dense` as `Predictor` has them.

    Raises:
        BundleError: the bundle's plan does not read one of them, merges without any, or they contradict each other.
    """
    defaults = bundle.signature.defaults
    given = {name: float(value) for name, value in ((CLAP_THRESHOLD, tau), (GBM_THRESHOLD, gbm)) if value is not None}
    plan = bundle.recipe.merging
    if plan.budgeted and set(given) - set(defaults):
        raise BundleError(
            "this bundle merges a fixed budget of windows and tokens, whatever a threshold: leave tau and gbm out, or "
            "export without --budget"
        )
    if unread := sorted(set(given) - set(defaults)):
        raise BundleError(f"this bundle's merge plan reads no {unread[0]}: leave it out or export with merging")
    if not dense:
        return given
    if given:
        raise BundleError("expected dense, which merges nothing, or a threshold (tau, gbm), got both: leave one out")
    if plan.unstoppable:
        raise BundleError(
            f"expected merges that wait for a similarity, {plan.unstoppable}: export with --dense for the dense network"
        )
    return dict.fromkeys(defaults, np.inf)


def takes_whole_frames(recipe: Recipe) -> bool:
    """Whether a network sees a photo at once: its input is not the protocol's square window, so nothing can slide."""
    return recipe.network.image_size != (recipe.protocol.window, recipe.protocol.window)


def network_canvas(photo: NDArray[np.uint8], recipe: Recipe) -> Pixels:
    """The canvas (h, w, 3) that windows of the network's size are cut from: the protocol's (`canvas_of`).

    For a network that takes whole frames the photo (H, W, 3) becomes one window: bilinear (OpenCV) to the network's
    size, whatever its aspect; scores are interpolated back the same way.
    """
    if not takes_whole_frames(recipe):
        return canvas_of(photo, recipe.protocol)
    height, width = recipe.network.image_size
    return np.asarray(cv2.resize(photo, (width, height), interpolation=cv2.INTER_LINEAR), dtype=np.uint8)


def network_anchors(canvas: Pixels, recipe: Recipe) -> list[tuple[int, int]]:
    """(top, left) of every window on the canvas, row by row."""
    return [(0, 0)] if takes_whole_frames(recipe) else window_anchors(canvas.shape[:2], recipe.protocol)


def _told(error: Exception) -> AlgmDeployError:
    """What is told of a failed picture; the log has the error whole."""
    told = error if isinstance(error, AlgmDeployError) else ExecutionError(f"the network failed: {error!s:.200}")
    _LOG.error("a picture could not be predicted: %s", error, exc_info=told is not error)
    return told


def _raised(result: Prediction | Failure) -> Prediction:
    if isinstance(result, Failure):
        raise result.error
    return result


def _check_one_window(canvas: Pixels, window: Size) -> None:
    """Label maps of windows that overlap cannot be averaged."""
    if canvas.shape[:2] != window:
        raise ImageError(
            f"a bundle with labels takes one window of {window[0]}x{window[1]} pixels, this photo becomes "
            f"{canvas.shape[0]}x{canvas.shape[1]}: crop it, or export the bundle with --scores"
        )


def _check_preprocessing(bundle: Bundle) -> None:
    """Refuses a bundle whose pixels were prepared by other rules: nothing else would tell, only accuracy would fall."""
    ours = preprocessing_fingerprint(bundle.recipe.protocol)
    if (theirs := bundle.manifest.preprocessing_sha256) != ours:
        raise BundleError(
            f"{bundle.path}: made with other preprocessing rules ({theirs!s:.12} instead of {ours:.12}): export it "
            "again with this release"
        )
