"""Networks in segments: on the CPU, where nothing is captured, what runs and how long; on CUDA, the graphs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from graph_stand_ins import JoinedOnTheHost, NoGraphs, joined_on_the_host, opened
from toys import segmenter_checkpoint, toy

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import export
from algm_deploy.errors import BuildError, BundleError, ExecutionError, RuntimeUnavailableError
from algm_deploy.lowering import onnxruntime
from algm_deploy.lowering.onnxruntime import rewrite
from algm_deploy.lowering.onnxruntime_segments import CONVOLUTIONS, TOGETHER, segments
from algm_deploy.native_libraries import find_library
from algm_deploy.runners.contract import runner, runner_type
from algm_deploy.runners.graphs import Graphs
from algm_deploy.runners.onnxruntime import graphs as graphs_module
from algm_deploy.runners.onnxruntime import runner as runner_module
from algm_deploy.runners.onnxruntime.graphs import SegmentedSession
from algm_deploy.runners.onnxruntime.runner import LIBRARY, OnnxRuntimeCudaRunner
from algm_deploy.runners.onnxruntime.sessions import CudaSession

CUDA = "onnxruntime-cuda"
NAMES = ["labels", "token_counts", "token_map_clap_1", "token_map_gbm_3"]
THRESHOLDS = {"clap_threshold": 0.9, "gbm_threshold": 1.0}
MOST_IMAGES = 6


@pytest.fixture(scope="module")
def folder(labels_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return written(labels_bundle, tmp_path_factory.mktemp("graphs") / "bundle")


def written(bundle: Bundle, target: Path) -> tuple[Path, int]:
    """A folder with the whole graph and its segments, and how many there are."""
    path = shutil.copytree(bundle.path, target)
    model = ir.load(path / "model.onnx")
    rewrite(model, "cuda", True, False)
    ir.save(model, path / "whole.onnx")
    parts = segments(model)
    for index, part in enumerate(parts):
        ir.save(part, path / f"{index}.onnx")
    return path, len(parts)


@pytest.fixture
def open_file(folder: tuple[Path, int], ort_library: Path) -> Callable[[str], ort.InferenceSession]:
    return lambda name: opened(folder[0] / f"{name}.onnx", ort_library)


@pytest.fixture
def session(folder: tuple[Path, int], open_file: Any) -> Iterator[SegmentedSession]:
    session = SegmentedSession(lambda index, _: open_file(str(index)), folder[1], torch.device("cpu"), MOST_IMAGES)
    yield session
    session.close()


@pytest.fixture
def met(session: SegmentedSession, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Images, segment and rows of all that was run."""
    keys: list[tuple[int, ...]] = []
    launch = session._launch

    def noted(segment: Any, axes: Any) -> None:
        keys.append(segment.key(axes))
        launch(segment, axes)

    monkeypatch.setattr(session, "_launch", noted)
    return keys


@pytest.fixture
def whole(open_file: Any) -> Callable[..., dict[str, np.ndarray]]:
    session = open_file("whole")

    def run(image: np.ndarray, **thresholds: float) -> dict[str, np.ndarray]:
        scalars = {name: np.array(value, np.float32) for name, value in (THRESHOLDS | thresholds).items()}
        return dict(zip(NAMES, session.run(NAMES, {"image": image, **scalars}), strict=True))

    return run


def run(session: SegmentedSession, image: np.ndarray, **thresholds: float) -> dict[str, np.ndarray]:
    found = session.run(torch.from_numpy(image), THRESHOLDS | thresholds, NAMES)
    return {name: value.numpy() for name, value in found.items()}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize("images", [1, 2, 3])
def test_equals_the_whole_graph(session: SegmentedSession, whole: Any, blob_images: Any, images: int) -> None:
    """Whatever the sizes before: buffers hold what earlier, longer runs left there."""
    for clap in (2.0, 0.9, -2.0, 0.5):
        image = blob_images(images)
        assert_equal(run(session, image, clap_threshold=clap), whole(image, clap_threshold=clap))


def test_batches_up_to_a_power_of_two_share_memory(session: SegmentedSession, whole: Any, blob_images: Any) -> None:
    """Serving every batch takes at most four times the memory of the largest, not that of all sizes together."""
    for images in (3, 4, 3, 1, 2, 5):
        image = blob_images(images)
        assert_equal(run(session, image), whole(image))
    assert sorted(session._buffers) == [1, 2, 4, 6], "6 is the largest batch"


def test_batches_beyond_the_limit_run_whole(
    labels_bundle: Bundle, session: SegmentedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "check_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(OnnxRuntimeCudaRunner, "graph_images", MOST_IMAGES)
    cuda = OnnxRuntimeCudaRunner(labels_bundle)
    with pytest.raises(RuntimeUnavailableError, match="is closed"):
        cuda._session_for(1)
    cuda._opened = True
    cuda._segmented, cuda._whole = session, cast("CudaSession", "the whole graph")
    chosen = [cuda._session_for(images) for images in (7, 6, 1, 7)]
    assert [one is session for one in chosen] == [False, True, True, False]


@pytest.fixture
def convolving(folder: tuple[Path, int], open_file: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[SegmentedSession]:
    """Its last segment says that it holds a convolution."""

    def opened(index: int, _: dict[str, str]) -> ort.InferenceSession:
        found = open_file(str(index))
        if index == folder[1] - 1:
            note = SimpleNamespace(custom_metadata_map={CONVOLUTIONS: "1"})
            monkeypatch.setattr(found, "get_modelmeta", lambda: note)
        return found

    session = SegmentedSession(opened, folder[1], torch.device("cpu"), MOST_IMAGES)
    yield session
    session.close()


def test_a_network_that_convolves_has_graphs_for_batches_of_one_size(
    labels_bundle: Bundle, convolving: SegmentedSession, whole: Any, blob_images: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of another size would start kernels of a plan that is gone."""
    monkeypatch.setattr(runner_module, "check_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    cuda = OnnxRuntimeCudaRunner(labels_bundle)
    cuda._opened, cuda._segmented, cuda._whole = True, convolving, cast("CudaSession", object())
    where = [cuda._session_for(images) is convolving for images in (MOST_IMAGES + 1, 2, 3, 2)]
    assert where == [False, True, False, True]
    cuda._whole = None
    assert_equal(run(convolving, blob_images(2)), whole(blob_images(2)))
    with pytest.raises(ValueError, match="expected 2 images, got 3"):
        run(convolving, blob_images(3))


def test_other_networks_have_them_for_all(session: SegmentedSession, blob_images: Any) -> None:
    for images in (1, 3, 2):
        run(session, blob_images(images))
    assert session.only is None


def test_segments_tell_of_their_convolutions(folder: tuple[Path, int]) -> None:
    notes = [ir.load(folder[0] / f"{index}.onnx").metadata_props for index in range(folder[1])]
    assert notes == [{CONVOLUTIONS: "0"}] * folder[1], "the patch embedding is a product"


def test_sizes_are_the_next_multiple_of_a_step(
    session: SegmentedSession, met: list[tuple[int, ...]], blob_images: Any
) -> None:
    image = blob_images(1)
    found = run(session, image, clap_threshold=-2.0, gbm_threshold=1e6)  # 16 tokens and cls
    assert found["token_counts"].tolist() == [[16, 16]]
    assert met == [(1, 0), (1, 1, 32), (1, 2, 32)]
    met.clear()
    run(session, image, clap_threshold=2.0, gbm_threshold=1e6)  # all 64 and cls: two steps and one row
    assert met == [(1, 0), (1, 1, 65), (1, 2, 65)]
    met.clear()
    between = run(session, image, clap_threshold=2.0, gbm_threshold=-1e6)
    assert between["token_counts"].tolist() == [[64, 32]]
    assert met == [(1, 0), (1, 1, 65), (1, 2, 64)]


@pytest.fixture
def ragged(
    labels_bundle: Bundle, ort_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SegmentedSession, ort.InferenceSession]]:
    """Segments whose images lie one behind the other, and the whole graph."""
    monkeypatch.setattr(onnxruntime, "_fits_packed_attention", lambda *_: True)
    path, count = written(labels_bundle, tmp_path / "bundle")
    whole, *parts = (opened(path / f"{name}.onnx", ort_library) for name in ("whole", *range(count)))
    session = SegmentedSession(lambda index, _: parts[index], count, torch.device("cpu"), 9)
    yield session, whole
    session.close()


@pytest.mark.parametrize(("images", "step"), [(1, 32), (7, 32), (8, 8), (9, 8)])
def test_many_images_one_behind_the_other_have_finer_steps(
    ragged: tuple[SegmentedSession, ort.InferenceSession],
    blob_images: Any,
    monkeypatch: pytest.MonkeyPatch,
    images: int,
    step: int,
) -> None:
    """The host and, once the sizes are joined, the device choose the smallest with room. What lies behind the rows is
    never read."""
    session, whole = ragged
    image, keys, launch = blob_images(images), [], session._launch
    monkeypatch.setattr(
        session, "_launch", lambda segment, axes: [keys.append(segment.key(axes)), launch(segment, axes)]
    )
    joined_on_the_host(monkeypatch, session)
    for joined in (False, True):
        for clap, gbm in ((0.9, 1.0), (2.0, 1e6), (-2.0, -1e6), (0.5, 1.0)):
            scalars = {"clap_threshold": np.array(clap, np.float32), "gbm_threshold": np.array(gbm, np.float32)}
            expected = dict(zip(NAMES, whole.run(NAMES, {"image": image, **scalars}), strict=True))
            keys.clear()
            assert_equal(run(session, image, clap_threshold=clap, gbm_threshold=gbm), expected)
            means = -(-(expected["token_counts"] + 1).sum(0) // images)
            sizes = ((images, i, min(-(-mean // step) * step, 65)) for i, mean in enumerate(means, 1))
            assert keys == [(images, 0), *sizes]
            for buffer in session._buffers[session._fitting({"batch": images})].values():
                if buffer.is_floating_point() and buffer.numel() > 1:
                    with torch.inference_mode():
                        buffer.fill_(torch.nan)
        assert joined or session.warm_up(images)
    assert session.joined == [images]


@pytest.mark.parametrize(("side", "step"), [(32, 8), (40, 16), (44, 16), (48, 24), (64, 32)])
def test_sizes_can_be_joined_and_kept(session: SegmentedSession, side: int, step: int) -> None:
    """Of batches as servers warm them, with two merges, the second of which can halve what the first has quartered."""
    merge = session._segments[0]
    merge.rows = TOGETHER + merge.axis
    most, kept = side * side + 1, 0
    for images in (1, 2, 4, 8, 16, 32):
        found = merge.step(images, most)
        assert found == (step if images >= 8 else 32)
        sizes = [len(merge.sizes(images, fewest, most)) for fewest in (most // 4, most // 8)]
        assert max(sizes) <= 256
        kept += 1 + sum(sizes)
    assert (kept <= graphs_module.MOST_GRAPHS) == (side < 64), "of 64 x 64 patches not all are kept"


def test_warming_up_meets_every_size(session: SegmentedSession, met: list[tuple[int, ...]], blob_images: Any) -> None:
    session.warm_up()
    warmed = set(met)
    assert sorted(warmed) == [(1, 0), *((1, segment, rows) for segment in (1, 2) for rows in (32, 64, 65))]
    for clap in (2.0, 0.9, 0.5, -2.0):
        for gbm in (1e6, 1.0, -1e6):
            run(session, blob_images(1), clap_threshold=clap, gbm_threshold=gbm)
    assert set(met) == warmed


def test_warming_up_ends_in_time(
    session: SegmentedSession, met: list[tuple[int, ...]], whole: Any, blob_images: Any
) -> None:
    assert not session.warm_up(1, deadline=0.0)
    assert met == []
    assert_equal(run(session, blob_images(1)), whole(blob_images(1)))
    assert session.warm_up(1)


@pytest.mark.parametrize("images", [1, 3])
def test_results_stay_what_they_are_after_a_warm_up(
    session: SegmentedSession, whole: Any, blob_images: Any, images: int
) -> None:
    assert session.warm_up(images)
    for clap in (0.9, -2.0, 2.0):
        assert_equal(
            run(session, blob_images(images), clap_threshold=clap), whole(blob_images(images), clap_threshold=clap)
        )


@pytest.fixture
def graphs(session: SegmentedSession, monkeypatch: pytest.MonkeyPatch) -> NoGraphs:
    """The session's, as on a CUDA device."""
    return joined_on_the_host(monkeypatch, session)


@pytest.mark.parametrize("images", [1, 3])
def test_segments_are_joined(
    session: SegmentedSession, graphs: NoGraphs, whole: Any, blob_images: Any, images: int
) -> None:
    """Batches of several too: one axis tells the size of a segment, that of the mean or of the longest image."""
    assert session.warm_up(images)
    assert session.joined == [images]
    met = len(graphs.keys)
    for clap in (2.0, 0.9, 0.5, -2.0):
        for gbm in (1e6, 1.0, -1e6):
            image, thresholds = blob_images(images), {"clap_threshold": clap, "gbm_threshold": gbm}
            assert_equal(run(session, image, **thresholds), whole(image, **thresholds))
    assert len(graphs.keys) == met, "a segment was run by itself"
    assert cast("JoinedOnTheHost", session._joined[images]).replays == 12
    assert session.warm_up(images)
    assert len(graphs.keys) == met, "once is enough"
    assert_equal(run(session, blob_images(2)), whole(blob_images(2)))
    assert graphs.patient, "what is new after a warm-up is not captured at once"


def test_what_is_not_all_captured_is_not_joined(
    session: SegmentedSession,
    graphs: NoGraphs,
    whole: Any,
    blob_images: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No graph of one size, no room for all, no library, or a driver that joins nothing."""

    def refuse(*_: Any) -> None:
        raise ExecutionError("expected CUDA 12.8")

    with monkeypatch.context() as patch:
        patch.setattr(graphs, "found", lambda key: (None, None))
        assert session.warm_up(1)
        patch.setattr(session, "graphs", NoGraphs(limit=2))
        assert session.warm_up(1)
        patch.setattr(session, "graphs", graphs)
        patch.setattr(graphs_module, "usable_library", lambda _: None)
        assert session.warm_up(1)
    assert session.joined == []
    (said,) = caplog.messages
    assert said.startswith("onnxruntime-cuda: the host waits behind every merge, but not with: ")
    monkeypatch.setattr(graphs_module, "Joined", refuse)
    assert session.warm_up(1)
    assert session.joined == []
    assert "batches of 1 wait for the host behind every merge: expected CUDA 12.8" in caplog.text
    assert_equal(run(session, blob_images(1)), whole(blob_images(1)))


@pytest.mark.parametrize("images", [1, 3])
def test_rows_that_nobody_counted_are_not_read(
    session: SegmentedSession, whole: Any, blob_images: Any, monkeypatch: pytest.MonkeyPatch, images: int
) -> None:
    """Those behind the longest image's, up to the step, and what lies behind the last image."""
    image = blob_images(images)
    counted = session._rows_for
    poisoned = 0

    def poison(segment: Any, axes: Any) -> int:
        nonlocal poisoned
        rows = counted(segment, axes)
        made = session._buffers[session._fitting(axes)]
        for name, shape in session._shapes.items():
            if name in segment.outputs and segment.axis in map(str, shape):
                valid = int(made[segment.rows])
                laid_out = made[name][: images * rows * (64 if len(shape) == 3 else 1)].view(images, rows, -1)
                assert not laid_out[:, valid:].any()
                laid_out[:, valid:] = 1e4
                made[name][laid_out.numel() :] = 1e4
                poisoned += 1
        return rows

    monkeypatch.setattr(session, "_rows_for", poison)
    assert_equal(run(session, image), whole(image))
    assert poisoned == 3, "tokens behind two merges, sizes behind the first, as the tail needs none"


def test_segments_of_an_earlier_version_are_refused(folder: tuple[Path, int], open_file: Any) -> None:
    """Their merges may give images other places, which would be read without a word."""

    class Earlier:
        def __init__(self, session: ort.InferenceSession) -> None:
            self.get_inputs, self.get_modelmeta = session.get_inputs, session.get_modelmeta
            self._outputs = session.get_outputs()

        def get_outputs(self) -> list[Any]:
            return [
                SimpleNamespace(name=o.name.replace("counted_by_32_", "counted_by_64_"), shape=o.shape, type=o.type)
                for o in self._outputs
            ]

    def opened(index: int, _: dict[str, str]) -> Any:
        return Earlier(open_file(str(index)))

    with pytest.raises(BundleError, match="build the bundle again"):
        SegmentedSession(opened, folder[1], torch.device("cpu"), MOST_IMAGES)


def test_results_and_images_are_copies(session: SegmentedSession, whole: Any, blob_images: Any) -> None:
    images = blob_images(2)
    first = run(session, images[:1])
    kept = {name: value.copy() for name, value in first.items()}
    turned = np.ascontiguousarray(images[1:].transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    assert_equal(run(session, turned), whole(images[1:]))
    assert_equal(first, kept)


def test_a_closed_session_runs_nothing(session: SegmentedSession, blob_images: Any) -> None:
    """Its memory would hold the last picture's results."""
    run(session, blob_images(1))
    session.close()
    with pytest.raises(RuntimeUnavailableError, match="was closed by another thread"):
        run(session, blob_images(1))
    with pytest.raises(RuntimeUnavailableError, match="was closed by another thread"):
        session.warm_up(1)


def test_what_was_opened_is_closed_where_the_rest_cannot_be(open_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(SegmentedSession, "close", lambda self: closed.append(len(self._segments)))

    def opened(index: int, _: dict[str, str]) -> ort.InferenceSession:
        if index == 2:
            raise BundleError("no third")
        return open_file(str(index))

    with pytest.raises(BundleError, match="no third"):
        SegmentedSession(opened, 3, torch.device("cpu"), MOST_IMAGES)
    assert closed == [2]


def test_a_library_without_cuda_lends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "require_library", lambda _: Path(ort.capi.onnxruntime_pybind11_state.__file__))
    with pytest.raises(BuildError, match="expected the library ort_custom_op with operators of the CUDA provider"):
        graphs_module._Workspace(cast("torch.cuda.Stream", SimpleNamespace(cuda_stream=1, device="cpu")))


def test_runs_in_inference_mode(session: SegmentedSession, whole: Any, blob_images: Any) -> None:
    image = blob_images(1)
    with torch.inference_mode():
        assert_equal(run(session, image), whole(image))
    assert_equal(run(session, image), whole(image))


def test_threads_take_turns(session: SegmentedSession, whole: Any, blob_images: Any) -> None:
    images = blob_images(4)
    work = [(images[i % 4 : i % 4 + 1], 0.5 + 0.1 * (i % 5)) for i in range(24)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda job: run(session, job[0], clap_threshold=job[1]), work))
    for got, (image, clap) in zip(found, work, strict=True):
        assert_equal(got, whole(image, clap_threshold=clap))


def test_an_error_reaches_the_caller_and_the_next_run_is_right(
    session: SegmentedSession, whole: Any, blob_images: Any
) -> None:
    image = blob_images(1)
    with pytest.raises(RuntimeError, match="size of tensor"):
        session.run(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), THRESHOLDS, NAMES)
    assert_equal(run(session, image), whole(image))


def test_older_versions_capture_nothing(labels_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They free host memory that the graph still reads."""
    bundle = Bundle.open(shutil.copytree(labels_bundle.path, tmp_path / "bundle"))
    monkeypatch.setattr(runner_module, "usable_library", lambda _: Path("library.so"))
    monkeypatch.setattr(runner_module, "check_cuda", lambda: None)
    OnnxRuntimeCudaRunner.build(bundle)
    monkeypatch.setattr(runner_module.ort, "__version__", "1.31.0")
    assert OnnxRuntimeCudaRunner(bundle).segments == 3
    monkeypatch.setattr(runner_module.ort, "__version__", "1.30.2")
    assert OnnxRuntimeCudaRunner(bundle).segments == 0
    monkeypatch.setattr(runner_module, "usable_library", lambda _: None)
    OnnxRuntimeCudaRunner.build(bundle)
    monkeypatch.setattr(runner_module.ort, "__version__", "1.31.0")
    assert OnnxRuntimeCudaRunner(bundle).segments == 0, "merging in standard operators copies to the host"


@pytest.mark.parametrize(
    ("width", "precision", "images"),
    [(192, "fp16", 32), (384, "fp16", 32), (384, "bf16", 5), (384, "fp32", 5), (1280, "fp16", 25)],
)
def test_how_many_images_go_through_graphs(
    labels_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, width: int, precision: str, images: int
) -> None:
    monkeypatch.setattr(runner_module, "check_cuda", lambda: None)
    monkeypatch.setattr(runner_module.ort, "__version__", "1.31.0")
    cuda = OnnxRuntimeCudaRunner(labels_bundle)
    assert cuda.graph_images == 0, "nothing is cut into segments"
    monkeypatch.setattr(OnnxRuntimeCudaRunner, "segments", 3)
    recipe = labels_bundle.recipe
    recipe = replace(recipe, network=replace(recipe.network, embed_dim=width), precision=precision)

    def graph_images(most: int) -> int:
        cuda = OnnxRuntimeCudaRunner(labels_bundle)
        cuda.bundle = cast("Bundle", SimpleNamespace(recipe=replace(recipe, max_batch=most)))
        return cuda.graph_images

    assert graph_images(100) == images
    assert graph_images(2) == 2, "no larger batch comes"
    budgets = {"clap": "budget", "clap_budget": 0.4, "gbm": "budget", "gbm_budget": 0.2}
    recipe = replace(recipe, merging=replace(recipe.merging, **budgets))
    assert graph_images(100) == 100, "nothing is padded"
    recipe = replace(recipe, output="scores")
    assert graph_images(100) == images, "they would lie in memory twice"


def test_a_runner_tells_of_its_graphs(
    labels_bundle: Bundle, session: SegmentedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of speed hold it: the nodes they count beside it are those of the whole graph."""
    monkeypatch.setattr(runner_module, "check_cuda", lambda: None)
    cuda = OnnxRuntimeCudaRunner(labels_bundle)
    assert (cuda.execution, cuda.captures) == ({}, 0)
    cuda._segmented = session
    monkeypatch.setattr(session, "graphs", cast("Graphs", Kept(range(7))))
    assert (cuda.execution, cuda.captures) == ({"cuda_graphs": "7"}, 9)
    monkeypatch.setattr(session, "only", 3)
    assert cuda.execution["launched"] == "batches of other sizes than 3, as plans of convolutions are for one"
    monkeypatch.setattr(session, "only", None)
    monkeypatch.setattr(session, "_joined", {8: None, 1: None})
    assert cuda.execution == {"cuda_graphs": "7", "batches of 1, 8": "one graph, no wait for a count"}
    cuda._whole = cast("CudaSession", object())
    assert "launched" not in cuda.execution, "larger batches alone are"
    cuda._segmented = None
    assert (cuda.execution, cuda.captures) == ({"launched": "operator by operator"}, 0)
    cuda._whole = None


class Kept(list[int]):
    """Graphs, of which some were dropped again."""

    captures = 9


# --- CUDA ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(labels_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle in segments; skipped, with the reason, where they cannot run."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    if find_library(LIBRARY) is None:
        pytest.skip(f"needs the custom operators: algm-deploy build-native {LIBRARY}")
    bundle = Bundle.open(shutil.copytree(labels_bundle.path, tmp_path_factory.mktemp("cuda") / "bundle"))
    runner_type(CUDA).build(bundle)
    return Bundle.open(bundle.path)


@pytest.mark.gpu
def test_graphs_equal_launches(built: Bundle, blob_images: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    images = blob_images(4)
    batches = [images[i : i + 1] for i in range(4)] + [images[1:4]]
    feeds = [{"image": batch, "clap_threshold": np.float32(c)} for batch in batches for c in (2, 0.9, 0.5, -2)]
    with monkeypatch.context() as patch:
        patch.setattr(runner_module, "GRAPH_CHANNELS_FP32", 0)
        with runner(built, CUDA) as plain:
            expected = [plain.infer(feed, NAMES) for feed in feeds]
            assert plain.captures == 0
    with runner(built, CUDA) as graphs:
        captures = []
        for _ in range(2):
            for feed, value in zip(feeds, expected, strict=True):
                found = graphs.infer(feed, NAMES)
                assert (found.pop("labels") != value["labels"]).mean() <= 1e-3, "rounding of other matrix shapes"
                assert_equal(found, {name: value[name] for name in NAMES[1:]})
            captures.append(graphs.captures)
    assert 6 < captures[0] == captures[1] <= 14


@pytest.mark.gpu
@pytest.mark.parametrize("images", [1, 3])
def test_after_a_warm_up_a_batch_is_one_launch(built: Bundle, blob_images: Any, images: int) -> None:
    """Equal bit for bit to the segments one by one, in any thread."""
    batches = [blob_images(4)[i : i + images] for i in (0, 1)]
    feeds = [{"image": batch, "clap_threshold": np.float32(c)} for batch in batches for c in (2, 0.9, 0.5, -2)]
    with runner(built, CUDA) as one_by_one:
        expected = [one_by_one.infer(feed, NAMES) for feed in feeds]
        assert len(one_by_one.execution) == 1, "nothing is joined"
    with runner(built, CUDA) as graphs, ThreadPoolExecutor(1) as other:
        graphs.infer(feeds[0])
        assert other.submit(graphs.warm_up, images).result()
        captured = graphs.captures
        assert graphs.execution[f"batches of {images}"] == "one graph, no wait for a count"
        for feed, value in zip(feeds, expected, strict=True):
            assert_equal(graphs.infer(feed, NAMES), value)
            assert_equal(other.submit(graphs.infer, feed, NAMES).result(), value)
        assert graphs.captures == captured == 7
        image = torch.from_numpy(batches[0]).cuda()
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            graphs.infer_device({"image": image})
            torch.cuda.synchronize()
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("cudaGraphLaunch") == 1
    assert calls.get("cudaLaunchKernel", 0) + calls.get("cudaMemcpyAsync", 0) < 8


@pytest.mark.gpu
def test_graphs_keep_the_callers_order(built: Bundle, blob_images: Any) -> None:
    """Work queued before and after on the caller's stream, images that are not contiguous, results that are kept."""
    images = blob_images(4)
    with runner(built, CUDA) as graphs:
        expected = [graphs.infer({"image": images[i : i + 1]}, NAMES) for i in range(4)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = []
            for image in images:
                busy = torch.zeros(1 << 24, device="cuda")
                for _ in range(20):
                    busy += 1
                turned = torch.from_numpy(image.transpose(1, 2, 0).copy()).cuda().permute(2, 0, 1)[None]
                late = torch.zeros_like(turned).copy_(turned + busy[:1].byte() - 20)
                result = graphs.infer_device({"image": late}, NAMES)
                found.append({name: value + 0 for name, value in result.items()})
                late.zero_()
        stream.synchronize()
    for got, want in zip(found, expected, strict=True):
        assert_equal({name: value.cpu().numpy() for name, value in got.items()}, want)


@pytest.mark.gpu
def test_16_bits(
    tiny_checkpoint: Path, tmp_path: Path, built: Bundle, blob_images: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention and GELU are the library's there: a batch of three, launched, against its images from graphs."""
    monkeypatch.setattr(OnnxRuntimeCudaRunner, "graph_images", 1)
    bundle = export(tiny_checkpoint, tmp_path / "half", None, {"precision": "fp16"}).bundle
    assert "2 packed_attention" in runner_type(CUDA).build(bundle)[0]
    names = ["scores", *NAMES[1:]]
    images = blob_images(3)
    with runner(Bundle.open(bundle.path), CUDA) as run:
        together = run.infer({"image": images}, names)
        assert len(set(together["token_counts"][:, 0])) > 1, "nothing was padded"
        for index in range(3):
            alone = run.infer({"image": images[index : index + 1]}, names)
            np.testing.assert_allclose(alone.pop("scores")[0], together["scores"][index], rtol=0, atol=2e-2)
            for name, value in alone.items():
                np.testing.assert_array_equal(value[0], together[name][index], err_msg=name)
        assert 3 <= run.captures <= 9


@pytest.mark.gpu
def test_graphs_of_large_products_can_be_joined(tmp_path: Path, built: Bundle) -> None:
    """cuBLAS splits those of a Segmenter-S at eight pictures, for which it needs memory."""
    network = toy("segmenter", "mask_transformer")[0]
    network = replace(network, embed_dim=384, heads=6, image_size=(512, 512), mlp_dim=0)
    merges = {"merging.clap_layers": [1], "merging.gbm_layers": [2]}
    settings = merges | {"precision": "fp16", "output": "labels", "max_batch": 8}
    bundle = export(segmenter_checkpoint(tmp_path, network), tmp_path / "bundle", None, settings).bundle
    runner_type(CUDA).build(bundle)
    generator = np.random.default_rng(0)
    image = generator.integers(0, 256, (8, 3, 512, 512), dtype=np.uint8)
    image[:, :, :, 256:] = 128
    feeds = [{"image": image, "clap_threshold": np.float32(c)} for c in (2, 0.9, -2)]
    with runner(Bundle.open(bundle.path), CUDA) as run:
        expected = [run.infer(feed) for feed in feeds]
        assert run.warm_up(8)
        assert "batches of 8" in run.execution
        for feed, value in zip(feeds, expected, strict=True):
            assert_equal(run.infer(feed), value)
