"""One predictor for every runtime: pictures in, label maps of their sizes out, in batches."""

from __future__ import annotations

import logging
import multiprocessing
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from msgspec import structs
from PIL import Image

import algm_deploy
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, ImageError, RuntimeUnavailableError
from algm_deploy.models.checkpoints.weights import checkpoint_shapes
from algm_deploy.pictures.shipped import scene
from algm_deploy.pictures.sliding import Prediction
from algm_deploy.pictures.sources import Failure
from algm_deploy.pictures.video import video_writer
from algm_deploy.predictor import Predictor, network_anchors, network_canvas, takes_whole_frames
from algm_deploy.recipe.reading import recipe

RUNTIMES = ["torch", "onnxruntime-cpu"]


@pytest.fixture(scope="module")
def photo() -> np.ndarray:
    """A drawn street scene (200, 320, 3)."""
    return np.asarray(cv2.resize(scene(7)[0], (320, 200), interpolation=cv2.INTER_AREA))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_label_map_has_the_size_of_the_photo(tiny_bundle: Bundle, photo: np.ndarray, runtime: str) -> None:
    with Predictor(tiny_bundle, runtime) as predictor:
        prediction = predictor.prediction(photo)
    assert prediction.labels.shape == (200, 320)
    assert prediction.labels.dtype == np.uint8
    assert prediction.labels.max() < 11
    # Short side 128, long side 205: windows of 128 at 0 and at the right edge.
    assert prediction.anchors == [(0, 0), (0, 77)]
    assert prediction.token_counts.shape == (2, 2)


def test_runtimes_agree(tiny_bundle: Bundle, photo: np.ndarray) -> None:
    labels = []
    for runtime in RUNTIMES:
        with Predictor(tiny_bundle, runtime) as predictor:
            labels.append(predictor.predict(photo))
    assert (labels[0] == labels[1]).mean() > 0.999


def test_public_entry_takes_a_path(tiny_bundle: Bundle, photo: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    Image.fromarray(photo).save(path)
    with algm_deploy.load(tiny_bundle.path) as network:
        assert np.array_equal(network.predict(str(path)), network.predict(photo))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_tau_changes_the_tokens_of_one_executable(tiny_bundle: Bundle, photo: np.ndarray, runtime: str) -> None:
    counts = {}
    for tau in (-1.0, 0.5, None, 1.5):
        with Predictor(tiny_bundle, runtime, tau=tau) as predictor:
            counts[tau] = predictor.prediction(photo).token_counts
    assert (counts[-1.0][:, 0] == 16).all()
    assert (counts[1.5][:, 0] == 64).all()
    assert (counts[-1.0][:, 0] <= counts[0.5][:, 0]).all()
    assert (counts[0.5][:, 0] < counts[None][:, 0]).all()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_dense_network_on_the_same_executable(tiny_bundle: Bundle, photo: np.ndarray, runtime: str) -> None:
    with Predictor(tiny_bundle, runtime, dense=True) as predictor:
        assert (predictor.prediction(photo).token_counts == 64).all()
        assert predictor.thresholds_in_force == {"clap_threshold": np.inf, "gbm_threshold": np.inf}


@pytest.mark.parametrize("tau", [np.nan])
def test_threshold_that_is_no_number(tiny_bundle: Bundle, photo: np.ndarray, tau: float) -> None:
    with (
        Predictor(tiny_bundle, "torch", tau=tau) as predictor,
        pytest.raises(BundleError, match="clap_threshold is one"),
    ):
        predictor.predict(photo)


def test_threshold_the_plan_does_not_read(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    signature = replace(tiny_bundle.signature, defaults={"clap_threshold": 0.9})
    monkeypatch.setattr(tiny_bundle, "manifest", structs.replace(tiny_bundle.manifest, signature=signature))
    with pytest.raises(BundleError, match="reads no gbm_threshold"):
        Predictor(tiny_bundle, "torch", gbm=1.0)


def test_unknown_runtime(tiny_bundle: Bundle) -> None:
    with pytest.raises(RuntimeUnavailableError, match="unknown runtime 'abacus': choose from torch"):
        Predictor(tiny_bundle, "abacus")


def test_bundle_of_other_preprocessing_rules(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = structs.replace(tiny_bundle.manifest, preprocessing_sha256="0" * 64)
    monkeypatch.setattr(tiny_bundle, "manifest", changed)
    with pytest.raises(BundleError, match="made with other preprocessing rules"):
        Predictor(tiny_bundle)


@pytest.mark.parametrize(
    "photo", [np.zeros((8, 8)), np.zeros((8, 8, 3)), np.zeros((8, 8, 4), np.uint8), np.zeros((8, 8), np.uint8), None]
)
def test_photo_of_another_kind(tiny_bundle: Bundle, photo: object) -> None:
    with Predictor(tiny_bundle) as predictor, pytest.raises(ImageError, match=r"RGB array uint8 \(H, W, 3\)"):
        predictor.predict(photo)  # type: ignore[arg-type]


# --- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_labels_for_a_photo_of_one_window(labels_bundle: Bundle, runtime: str) -> None:
    square = scene(3)[0][:256, :256]
    with Predictor(labels_bundle, runtime) as predictor:
        prediction = predictor.prediction(square)
        direct = predictor.infer(np.asarray(cv2.resize(square, (128, 128)))[None].transpose(0, 3, 1, 2))
    assert prediction.labels.shape == (256, 256)
    assert np.array_equal(prediction.labels[::2, ::2], direct["labels"][0])


def test_labels_for_a_larger_photo(labels_bundle: Bundle, photo: np.ndarray) -> None:
    with Predictor(labels_bundle) as predictor:
        with pytest.raises(ImageError, match=r"one window of 128x128 pixels, this photo becomes 128x205: crop it"):
            predictor.predict(photo)
        with pytest.raises(BundleError, match="export it with --scores"):
            predictor.scores_of(np.zeros((1, 3, 128, 128), np.uint8))


# --- whole frames ----------------------------------------------------------------------------------------------------


def test_square_windows_slide(tiny_bundle: Bundle, photo: np.ndarray) -> None:
    assert not takes_whole_frames(tiny_bundle.recipe)
    canvas = network_canvas(photo, tiny_bundle.recipe)
    assert canvas.shape == (128, 205, 3)
    assert network_anchors(canvas, tiny_bundle.recipe) == [(0, 0), (0, 77)]


def test_network_of_another_size_takes_the_photo_at_once(wide_bundle: Bundle, photo: np.ndarray) -> None:
    assert takes_whole_frames(wide_bundle.recipe)
    canvas = network_canvas(photo, wide_bundle.recipe)
    assert np.array_equal(canvas, cv2.resize(photo, (160, 96), interpolation=cv2.INTER_LINEAR))
    assert network_anchors(canvas, wide_bundle.recipe) == [(0, 0)]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("size", [(200, 320), (320, 200), (96, 160)])
def test_whole_frame(wide_bundle: Bundle, photo: np.ndarray, runtime: str, size: tuple[int, int]) -> None:
    resized = np.asarray(cv2.resize(photo, size[::-1]))
    with Predictor(wide_bundle, runtime) as predictor:
        prediction = predictor.prediction(resized)
        scores = predictor.infer(network_canvas(resized, wide_bundle.recipe).transpose(2, 0, 1)[None])["scores"][0]
    assert prediction.labels.shape == size
    assert prediction.anchors == [(0, 0)]
    assert prediction.token_counts.shape == (1, 2)
    planes = np.stack([cv2.resize(plane, size[::-1], interpolation=cv2.INTER_LINEAR) for plane in scores])
    assert np.array_equal(prediction.labels, planes.argmax(0))


# --- several pictures ------------------------------------------------------------------------------------------------


def drawn(count: int, size: tuple[int, int] = (128, 128)) -> list[np.ndarray]:
    return [np.asarray(cv2.resize(scene(index)[0], size[::-1], interpolation=cv2.INTER_AREA)) for index in range(count)]


def watched(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Windows of each call of the network from now on."""
    infer, sizes = predictor._runner.infer, []

    def counting(feeds: Any, outputs: Any = None) -> Any:
        sizes.append(len(feeds["image"]))
        return infer(feeds, outputs)

    monkeypatch.setattr(predictor._runner, "infer", counting)
    return sizes


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_windows_of_several_pictures_share_batches(
    tiny_bundle: Bundle, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1, 2, 2 and 1 windows, and two more pictures of one.
    pictures = [*drawn(1), *drawn(2, (128, 200)), *drawn(3, (90, 90))]
    with Predictor(tiny_bundle, runtime) as predictor:
        alone = [predictor.prediction(picture) for picture in pictures]
        sizes = watched(predictor, monkeypatch)
        together = list(predictor.predictions(iter(pictures), batch=3))
        assert sizes == [3, 3, 2]
        sizes.clear()
        assert len(list(predictor.predict(pictures))) == 6
        assert sizes == [8]  # as many as the bundle takes
        sizes.clear()
        predictor.predict(pictures[1], batch=1)
        assert sizes == [1, 1]
    for one, other in zip(alone, together, strict=True):
        assert one.anchors == other.anchors
        assert np.array_equal(one.token_counts, other.token_counts)
        assert (one.labels == other.labels).mean() > 0.999


@pytest.mark.parametrize("bundle", ["tiny_bundle", "labels_bundle", "wide_bundle"])
def test_every_kind_of_source_in_every_kind_of_bundle(
    bundle: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    frames = drawn(3)
    for index, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / f"{index}.png")
    with video_writer(tmp_path / "clip.mkv", 25) as write:
        for frame in frames:
            write(frame)
    files = sorted(tmp_path.glob("*.png"))
    with algm_deploy.load(request.getfixturevalue(bundle).path, "onnxruntime-cpu") as network:
        expected = [network.predict(frame) for frame in frames]
        for one in (files[0], str(files[0]), Image.fromarray(frames[0])):
            assert np.array_equal(network.predict(one), expected[0])
        for source in (frames, tuple(frames), np.stack(frames), iter(frames), files, tmp_path / "clip.mkv"):
            found = list(network.predict(source))
            assert all((one == other).mean() > 0.999 for one, other in zip(found, expected, strict=True))
        everything = list(network.predictions(str(tmp_path)))
    assert [(one.path, one.frame) for one in everything] == [
        *((path, None) for path in files),
        *((tmp_path / "clip.mkv", frame) for frame in range(3)),
    ]
    assert len({one.labels.tobytes() for one in everything}) == 3


def test_coupled_windows_go_one_by_one(tiny_bundle: Bundle, photo: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_bundle.recipe
    coupled = replace(recipe, merging=replace(recipe.merging, batch="batch_min"))
    monkeypatch.setattr(tiny_bundle, "manifest", structs.replace(tiny_bundle.manifest, recipe=coupled))
    with Predictor(tiny_bundle, "torch") as predictor:
        sizes = watched(predictor, monkeypatch)
        assert len(list(predictor.predict([photo, photo]))) == 2
        with pytest.raises(BundleError, match="expected a batch of 1, got 2: under this bundle's batch semantics"):
            predictor.predict([photo], batch=2)
    assert sizes == [1, 1, 1, 1]
    with pytest.raises(BundleError, match="expected a batch of 1, got 4"):
        Predictor(tiny_bundle, "torch", batch=4)


@pytest.mark.parametrize("batch", [0, 9, -1])
def test_batches_that_a_bundle_does_not_take(tiny_bundle: Bundle, photo: np.ndarray, batch: int) -> None:
    with pytest.raises(BundleError, match=f"expected a batch of 1 to 8, which this bundle takes, got {batch}"):
        Predictor(tiny_bundle, "torch", batch=batch)
    with Predictor(tiny_bundle, "torch", batch=2) as predictor:
        for source in (photo, [photo]):
            with pytest.raises(BundleError, match=f"expected a batch of 1 to 8, which this bundle takes, got {batch}"):
                predictor.predict(source, batch=batch)


def test_memory_stays_flat_over_endless_frames(tiny_bundle: Bundle) -> None:
    def endless() -> Iterator[np.ndarray]:
        while True:
            frame = np.full((140, 140, 3), len(seen) % 256, np.uint8)
            seen.append(weakref.ref(frame))
            yield frame

    seen: list[weakref.ref[np.ndarray]] = []
    with Predictor(tiny_bundle, "torch", batch=2) as predictor:
        results = predictor.predict(endless())
        assert seen == []
        for taken in range(1, 40):
            next(results)
            assert len(seen) <= taken + 2
            assert sum(frame() is not None for frame in seen) <= 3


# --- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("bundle", ["tiny_bundle", "wide_bundle"])
def test_scores_and_token_maps_on_request(
    bundle: str, photo: np.ndarray, runtime: str, request: pytest.FixtureRequest
) -> None:
    with Predictor(request.getfixturevalue(bundle), runtime) as predictor:
        plain = predictor.prediction(photo)
        full = predictor.prediction(photo, scores=True, token_maps=True)
        (same,) = predictor.predictions([photo], scores=True, token_maps=True)
    assert plain.scores is None
    assert plain.token_maps == {}
    assert full.scores is not None
    assert (full.scores.shape, full.scores.dtype) == ((11, 200, 320), np.float32)
    assert np.array_equal(full.scores.argmax(0), full.labels)
    assert np.array_equal(full.labels, plain.labels)
    assert list(full.token_maps) == ["clap_1", "gbm_3"]
    for maps, counts in zip(full.token_maps.values(), full.token_counts.T, strict=True):
        assert maps.shape[0] == len(full.anchors)
        assert [len(np.unique(one)) for one in maps] == counts.tolist()
    assert np.array_equal(same.token_maps["gbm_3"], full.token_maps["gbm_3"])


def test_scores_of_a_bundle_with_labels(labels_bundle: Bundle) -> None:
    with Predictor(labels_bundle, "torch") as predictor:
        square = drawn(1)[0]
        assert list(predictor.prediction(square, token_maps=True).token_maps) == ["clap_1", "gbm_3"]
        with pytest.raises(BundleError, match="this bundle gives labels"):
            predictor.prediction(square, scores=True)
        with pytest.raises(BundleError, match="this bundle gives labels"):
            predictor.predictions([square], scores=True)


def test_one_prediction_of_several_pictures(tiny_bundle: Bundle, photo: np.ndarray) -> None:
    with (
        Predictor(tiny_bundle, "torch") as predictor,
        pytest.raises(ImageError, match=r"several \(list\): use `predic"),
    ):
        predictor.prediction([photo])  # type: ignore[arg-type]


# --- what fails ------------------------------------------------------------------------------------------------------


def test_a_picture_that_cannot_be_read_does_not_stop_the_others(tiny_bundle: Bundle, tmp_path: Path) -> None:
    for index, frame in enumerate(drawn(3)):
        Image.fromarray(frame).save(tmp_path / f"{index}.png")
    broken = tmp_path / "1.png"
    broken.write_bytes(b"no picture")
    with Predictor(tiny_bundle, "torch") as predictor:
        first, failure, last = predictor.predictions(tmp_path, errors="yield")
        assert isinstance(first, Prediction)
        assert isinstance(last, Prediction)
        assert isinstance(failure, Failure)
        assert failure.path == broken
        assert str(failure.error).startswith(f"{broken}: expected a picture such as JPEG")
        labels = list(predictor.predict(tmp_path, errors="yield"))
        assert [type(one) for one in labels] == [np.ndarray, Failure, np.ndarray]
        results = predictor.predict(tmp_path)
        assert np.array_equal(next(results), first.labels)
        with pytest.raises(ImageError, match=r"1\.png: expected a picture"):
            next(results)
        with pytest.raises(ImageError, match=r"1\.png: expected a picture"):
            predictor.predict(broken, errors="yield")  # one picture has no others
        with pytest.raises(BundleError, match="expected errors to be 'raise' or 'yield', got 'skip'"):
            predictor.predict(tmp_path, errors="skip")  # type: ignore[arg-type]


def test_a_picture_that_does_not_fit_fails_in_its_place(labels_bundle: Bundle, tmp_path: Path) -> None:
    for name, size in (("a", (128, 128)), ("b", (128, 200)), ("c", (60, 600))):
        Image.fromarray(drawn(1, size)[0]).save(tmp_path / f"{name}.png")
    with Predictor(labels_bundle, "torch") as predictor:
        fits, wide, wider = predictor.predictions(tmp_path, errors="yield")
    assert isinstance(fits, Prediction)
    assert isinstance(wide, Failure)
    assert isinstance(wider, Failure)
    assert str(wide.error).startswith(f"{tmp_path / 'b.png'}: a bundle with labels takes one window of 128x128")
    assert str(wider.error).startswith(f"{tmp_path / 'c.png'}: a picture may be 8 times as long as wide")


def test_tensors_are_refused_in_one_sentence(tiny_bundle: Bundle) -> None:
    with Predictor(tiny_bundle, "torch") as predictor:
        for tensor in (torch.zeros(128, 128, 3, dtype=torch.uint8), torch.zeros(2, 3, 128, 128)):
            with pytest.raises(ImageError, match="got a Tensor: give it as a NumPy array with the channels last"):
                predictor.predict(tensor)


def test_a_closed_predictor(tiny_bundle: Bundle, photo: np.ndarray) -> None:
    predictor = Predictor(tiny_bundle, "torch")
    predictor.close()
    with pytest.raises(RuntimeUnavailableError, match="closed"):
        predictor.predict(photo)


# --- thresholds and runtimes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"tau": 0.9}, {"gbm": 1.0}, {"tau": 0.9, "gbm": 1.0}])
def test_dense_and_a_threshold_contradict_each_other(tiny_bundle: Bundle, given: dict[str, float]) -> None:
    with pytest.raises(BundleError, match="expected dense, which merges nothing, or a threshold"):
        Predictor(tiny_bundle, "torch", dense=True, **given)


def test_the_default_runtime_is_told(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("algm_deploy.predictor.default_runtime", lambda files, _: asked.append(files) or "torch")
    with caplog.at_level(logging.INFO, "algm_deploy"), Predictor(str(tiny_bundle.path)) as predictor:
        assert predictor.runtime == "torch"
        assert repr(predictor) == f"Predictor('{tiny_bundle.path}', runtime='torch')"
    assert "model.onnx" in asked[0]
    assert f"{tiny_bundle.path} runs on torch" in caplog.text
    with Predictor(tiny_bundle, "onnxruntime-cpu") as predictor:
        assert predictor.runtime == "onnxruntime-cpu"
    assert len(asked) == 1


# --- other processes -------------------------------------------------------------------------------------------------


def test_a_predictor_is_not_sent_to_another_process(tiny_bundle: Bundle) -> None:
    refused = pytest.raises(RuntimeUnavailableError, match="send the bundle's path and load it there")
    with Predictor(tiny_bundle, "torch") as predictor, refused:
        ForkingPickler.dumps(predictor)


def _in_child(predictor: Predictor, photo: np.ndarray, runtime: str, answers: Any) -> None:
    """What the parent's predictor says in a child, and what one that the child loads finds."""
    try:
        predictor.predict(photo)
    except RuntimeUnavailableError as error:
        answers.put(str(error))
    predictor.close()
    with algm_deploy.load(predictor.bundle.path, runtime) as own:
        answers.put(own.predict(photo))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_forked_process_is_told_to_load_for_itself(tiny_bundle: Bundle, photo: np.ndarray, runtime: str) -> None:
    context = multiprocessing.get_context("fork")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # whose absence in the child is what makes it wait
    try:
        with Predictor(tiny_bundle, runtime) as predictor:
            expected = predictor.predict(photo)
            answers = context.Queue()
            child = context.Process(target=_in_child, args=(predictor, photo, runtime, answers))
            child.start()
            try:
                assert "load it in the child process" in answers.get(timeout=60)
                assert np.array_equal(answers.get(timeout=60), expected)
                child.join(timeout=60)
                assert child.exitcode == 0
            finally:
                child.kill()
            assert np.array_equal(predictor.predict(photo), expected)
    finally:
        torch.set_num_threads(threads)


# --- throughput ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def larger_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A network with random weights whose windows take many times as long as the tiny one's."""
    folder = tmp_path_factory.mktemp("larger")
    file = folder / "larger.toml"
    file.write_text(
        "schema = 1\n[network]\nfamily = 'segmenter'\nembed_dim = 192\ndepth = 6\nheads = 3\nclasses = 11\n"
        "image_size = [128, 128]\npatch_size = 8\n[merging]\nclap_threshold = 0.9\ngbm_layers = [3]\n"
        "[protocol]\ndataset = 'camvid'\nshort_side = 128\nwindow = 128\nstride = 96\n"
    )
    generator = torch.Generator().manual_seed(0)
    shapes = checkpoint_shapes(recipe(str(file)).network)
    state = {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    torch.save({"model": state}, folder / "checkpoint.pth")
    return algm_deploy.export(folder / "checkpoint.pth", folder / "bundle", file).bundle


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_api_is_as_fast_as_its_runner(larger_bundle: Bundle, runtime: str) -> None:
    """Throughput at batch 8 on a CPU: at least 0.9 of what the runner alone reaches on batches that lie ready.

    The network is large enough to take most of the time, as real ones do: reading, resizing and the label map of a
    picture cost the same for every network. The clock is the processor time of this process, which other processes do
    not change as they change the time on the wall; both sides take turns, and the median of the rounds counts.
    """
    frames = np.stack(drawn(16))
    windows = np.ascontiguousarray(frames.transpose(0, 3, 1, 2))
    with Predictor(larger_bundle, runtime, batch=8) as predictor:

        def alone() -> None:
            for start in (0, 8):
                predictor._runner.infer({"image": windows[start : start + 8]})

        def whole() -> None:
            assert len(list(predictor.predict(frames))) == 16

        alone(), whole()
        shares = [_seconds(alone) / _seconds(whole) for _ in range(7)]
    assert np.median(shares) >= 0.9, shares


def _seconds(call: Callable[[], None]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


@pytest.mark.parametrize(
    ("value", "said"),
    [(np.nan, "got values from nan to nan"), (np.inf, "from 0 to inf"), (-2.5, "from -2.5 to 0"), (300, "0 to 300")],
)
def test_windows_that_are_no_pixels(tiny_bundle: Bundle, value: float, said: str) -> None:
    """NaN would become some class, and normalised pixels a picture that is all but black."""
    windows = np.zeros((1, 3, 128, 128), np.float32)
    with Predictor(tiny_bundle, "torch") as predictor:
        predictor.scores_of(windows - 0.4)  # as rounding may leave them
        windows[0, 1, 5, 7] = value
        for use in (predictor.scores_of, predictor.infer):
            with pytest.raises(
                ImageError, match=rf"expected RGB pixels in 0\.\.255, .*{said}: .* normalisation is part"
            ):
                use(windows)


def test_a_bundle_without_a_name() -> None:
    with pytest.raises(BundleError, match="expected the name of a file or a folder, got an empty one"):
        algm_deploy.load("")
