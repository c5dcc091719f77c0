"""The steps a script may call: export, the pictures for parity, verification and evaluation of a bundle."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from PIL import Image

from algm_deploy.bundle.records import Evaluation, Parity, Rebuilds, tokens_by_merge
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import bench, build, compare, evaluate, export, parity_windows, repeat_build, verify
from algm_deploy.environment import device_name
from algm_deploy.errors import BundleError, CheckpointError, DatasetError, ImageError, NotExecutedError, RecipeError
from algm_deploy.evaluation.datasets import SPECS, open_dataset
from algm_deploy.parity.exchange import save_inputs
from algm_deploy.pictures.shipped import scene, scene_paths
from algm_deploy.pictures.sources import find_images
from algm_deploy.timing.protocols import Request, usual_request
from algm_deploy.timing.timers import Effort

CLASSES = [f"c{index}" for index in range(11)]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with three photos, one of them deeper, and a text."""
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    for index, name in enumerate(("b.png", "a.jpg", "deep/c.png")):
        Image.fromarray(scene(index)[0]).save(folder / name)
    (folder / "readme.txt").write_text("no picture")
    return folder


# --- export ----------------------------------------------------------------------------------------------------------


def test_bundle_names_the_classes_of_its_data_set(tiny_bundle: Bundle) -> None:
    assert tiny_bundle.recipe.class_names == SPECS["camvid"].classes.names
    assert tiny_bundle.recipe.palette == SPECS["camvid"].classes.palette


def _stopped(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Lets `export` decide everything and write nothing; returns what it would have written."""
    written: list[object] = []

    def write(*arguments: object) -> object:
        written.append(arguments[1])
        return SimpleNamespace(manifest=SimpleNamespace(quantization=None))

    monkeypatch.setattr("algm_deploy.deployment.write_bundle", write)
    return written


def test_class_names_of_the_recipe_win(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = _stopped(monkeypatch)
    export(tiny_checkpoint, tmp_path / "bundle", None, {"class_names": tuple(CLASSES)})
    assert written[0].class_names == tuple(CLASSES)  # type: ignore[attr-defined]
    assert written[0].palette == SPECS["camvid"].classes.palette  # type: ignore[attr-defined]


def test_data_set_of_another_class_count_gives_no_names(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = _stopped(monkeypatch)
    export(tiny_checkpoint, tmp_path / "bundle", None, {"protocol.dataset": "ade20k"})
    assert written[0].class_names == ()  # type: ignore[attr-defined]


def test_conflicts_are_told(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = _stopped(monkeypatch)
    result = export(tiny_checkpoint, tmp_path / "bundle", None, {"merging.clap_threshold": 0.5})
    expected = "merging.clap_threshold: the call says 0.5, variant.yml says 0.9; the call wins"
    assert result.conflicts == (expected,)
    assert result.notes == ()
    told = export(tiny_checkpoint, tmp_path / "bundle", tau=0.5, gbm=2, source="command line").conflicts
    assert told == (expected.replace("the call", "command line"),)
    assert written[1].merging.clap_threshold == 0.5  # type: ignore[attr-defined]
    assert written[1].merging.gbm_threshold == 2  # type: ignore[attr-defined]


def test_missing_threshold_is_told(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stopped(monkeypatch)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(tiny_checkpoint / "checkpoint.pth", alone)
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        "schema = 1\n[network]\nfamily = 'segmenter'\nembed_dim = 64\ndepth = 4\nheads = 2\nclasses = 11\n"
        "image_size = [128, 128]\n[merging]\ngbm_layers = [3]\n"
        "[protocol]\ndataset = 'camvid'\nshort_side = 128\nwindow = 128\nstride = 96\n"
    )
    notes = export(alone, tmp_path / "bundle", str(recipe), {}).notes
    assert len(notes) == 1
    assert "no source gives CLAP's threshold for tiny, so it is 1 and CLAP merges practically nothing" in notes[0]
    assert export(alone, tmp_path / "bundle", str(recipe), {"merging.clap_threshold": 0.9}).notes == ()
    assert export(alone, tmp_path / "bundle", str(recipe), {"merging.clap_layers": ()}).notes == ()


def test_failed_export_leaves_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing|shape"):
        export(tiny_checkpoint, tmp_path / "bundle", None, {"network.depth": 5})
    with pytest.raises(RecipeError):
        export(tiny_checkpoint, tmp_path / "bundle", None, {"network.image_size": (100, 128)})
    assert [p for p in tmp_path.iterdir() if not p.name.startswith(".")] == []
    assert list(tmp_path.glob(".*partial*")) == []


def test_folder_of_somebody_else_is_left_alone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(BundleError, match="expected a bundle or a free name"):
        export(tiny_checkpoint, tmp_path / "thesis", None, {})
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


# --- builds ----------------------------------------------------------------------------------------------------------


def test_builds_of_onnxruntime_are_equal(tiny_bundle: Bundle, tmp_path: Path) -> None:
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    record = repeat_build(bundle, "onnxruntime-cpu", 2)
    assert (record.builds, record.distinct_files) == (2, 1)
    assert record.labels_equal_percent_min == 100
    assert len(record.network_ms_by_build or ()) == 2
    assert Bundle.open(bundle.path).found(Rebuilds, "onnxruntime-cpu") == record


def test_builds_that_differ_are_told(tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder that chooses other kernels each time; one column more of its labels is another each time."""
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    builds: list[int] = []

    def build(bundle: Bundle, runtime: str) -> list[str]:
        builds.append(1)
        graph = onnx.load(bundle.path / "model.onnx", load_external_data=False)
        graph.doc_string = str(len(builds))
        with bundle.add("model.onnxruntime-cpu.onnx", uses=("model.onnx.data",)) as path:
            path.write_bytes(graph.SerializeToString())
        return []

    def labels(run: object, window: np.ndarray) -> np.ndarray:
        found = np.zeros((1, 10, 10), np.uint8)
        found[..., : len(builds) - 1] = 1
        return found

    monkeypatch.setattr("algm_deploy.deployment.build", build)
    monkeypatch.setattr("algm_deploy.deployment._labels", labels)
    record = repeat_build(bundle, "onnxruntime-cpu", 3)
    assert record.distinct_files == 3
    assert record.labels_equal_percent_min == 80


def test_builds_that_nothing_here_executes(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise NotExecutedError("no such device here")

    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    monkeypatch.setattr("algm_deploy.deployment.runner", refused)
    record = repeat_build(bundle, "onnxruntime-cpu", 2)
    assert record.labels_equal_percent_min is None
    assert record.network_ms_by_build is None


# --- pictures for parity ---------------------------------------------------------------------------------------------


def test_windows_of_photos(tiny_bundle: Bundle, photos: Path) -> None:
    found = find_images([photos])
    windows = parity_windows(tiny_bundle.recipe, found, 2)
    assert (windows.shape, windows.dtype) == ((2, 3, 128, 128), np.uint8)
    # The first and the last photo; windows are taken from different places.
    assert np.array_equal(windows[:1], parity_windows(tiny_bundle.recipe, found[:1], 1))
    assert len(parity_windows(tiny_bundle.recipe, found, 9)) == 3


def test_every_photo_that_cannot_be_read_is_named(tiny_bundle: Bundle, tmp_path: Path) -> None:
    paths = [tmp_path / f"{index}.png" for index in range(3)]
    Image.fromarray(scene(0)[0]).save(paths[1])
    for index in (0, 2):
        paths[index].write_bytes(b"no picture")
    with pytest.raises(ImageError, match=r"0\.png: expected a picture.*; .*2\.png: expected a picture"):
        parity_windows(tiny_bundle.recipe, paths, 3)


def test_windows_without_photos_are_the_scenes_that_ship(tiny_bundle: Bundle) -> None:
    windows = parity_windows(tiny_bundle.recipe, [], 3)
    assert windows.shape == (3, 3, 128, 128)
    assert np.array_equal(windows, parity_windows(tiny_bundle.recipe, scene_paths()[:3], 3))
    assert len({window.tobytes() for window in windows}) == 3


@pytest.mark.parametrize("shipped", ["tiny", "wide"])
def test_a_large_batch_of_different_windows_needs_no_photos(shipped: str, request: pytest.FixtureRequest) -> None:
    """As many as `verify` may be asked for, which refuses equal ones."""
    windows = parity_windows(request.getfixturevalue(f"{shipped}_bundle").recipe, [], 256)
    assert len({window.tobytes() for window in windows}) == len(windows) == 256


def test_windows_of_whole_frames(wide_bundle: Bundle, photos: Path) -> None:
    windows = parity_windows(wide_bundle.recipe, find_images([photos]), 3)
    assert (windows.shape, windows.dtype) == ((3, 3, 96, 160), np.uint8)


def test_windows_where_the_protocol_enlarges(tiny_bundle: Bundle) -> None:
    recipe = replace(tiny_bundle.recipe, protocol=replace(tiny_bundle.recipe.protocol, short_side=100))
    windows = parity_windows(recipe, [], 2)
    assert (windows.shape, windows.dtype) == ((2, 3, 128, 128), np.float32)


# --- a bundle's records ----------------------------------------------------------------------------------------------


def test_a_bundle_that_takes_no_record_is_told_before_the_work(
    tiny_bundle: Bundle, tmp_path: Path, photos: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))

    def read_only(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    before = sorted(bundle.path.iterdir())
    bundle.require_writable()
    assert sorted(bundle.path.iterdir()) == before
    monkeypatch.setattr(Path, "touch", read_only)
    monkeypatch.setattr("algm_deploy.deployment.verify_chain", pytest.fail)
    monkeypatch.setattr("algm_deploy.deployment.Predictor", pytest.fail)
    with pytest.raises(BundleError, match="Permission denied"):
        verify(bundle, "torch", images=[photos], count=1)
    with pytest.raises(BundleError, match="Permission denied"):
        evaluate(bundle, open_dataset("folder", labelled), "torch")
    monkeypatch.setattr("algm_deploy.deployment.build", pytest.fail)
    with pytest.raises(BundleError, match="Permission denied"):
        repeat_build(bundle, "torch", 2)
    monkeypatch.setattr("algm_deploy.deployment.check_verified", lambda *_: None)
    monkeypatch.setattr("algm_deploy.deployment.benchmark", pytest.fail)
    with pytest.raises(BundleError, match="Permission denied"):
        bench(bundle, "torch", images=[photos], protocol=usual_request(bundle.recipe, "latency"))


def test_verification_is_kept(tiny_bundle: Bundle, tmp_path: Path, photos: Path) -> None:
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    report = verify(bundle, "onnxruntime-cpu", images=find_images([photos]), count=2, progress=False)
    assert report.passed
    kept = Bundle.open(bundle.path).found(Parity, "onnxruntime-cpu")
    assert kept == report
    assert (kept.pictures, kept.images, kept.device) == ("photos", 2, device_name(cuda=False))
    verify(bundle, "torch", count=1, progress=False)
    assert {one.runtime for one in Bundle.open(bundle.path).manifest.parity} == {"onnxruntime-cpu", "torch"}


def test_whole_frames_pass_the_chain(wide_bundle: Bundle, tmp_path: Path, photos: Path) -> None:
    bundle = Bundle.open(shutil.copytree(wide_bundle.path, tmp_path / "bundle"))
    report = verify(bundle, "onnxruntime-cpu", images=find_images([photos]), count=2, progress=False)
    assert report.passed, report.links


def test_whole_frames_have_no_protocol_for_miou(wide_bundle: Bundle, labelled: Path) -> None:
    with pytest.raises(BundleError, match="got one for 96x160: export it with --image-size 128x128"):
        evaluate(wide_bundle, open_dataset("folder", labelled), "torch", progress=False)


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """Two labelled scenes in the layout of `folder`."""
    import json

    for kind in ("images", "annotations"):
        (tmp_path / "data" / kind).mkdir(parents=True)
    for index in range(2):
        photo, labels = scene(index)
        Image.fromarray(photo).save(tmp_path / "data" / "images" / f"{index}.png")
        Image.fromarray(labels).save(tmp_path / "data" / "annotations" / f"{index}.png")
    (tmp_path / "data" / "classes.json").write_text(json.dumps({"names": CLASSES}))
    return tmp_path / "data"


def test_evaluation_is_kept_by_threshold(tiny_bundle: Bundle, tmp_path: Path, labelled: Path) -> None:
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    dataset = open_dataset("folder", labelled)
    own = evaluate(bundle, dataset, "torch", progress=False)
    dense = evaluate(bundle, dataset, "torch", dense=True, progress=False)
    assert own.images == dense.images == 2
    assert tokens_by_merge(own.tokens)["clap_1"] < tokens_by_merge(dense.tokens)["clap_1"] == 64
    assert own.device == device_name(cuda=False)
    kept = Bundle.open(bundle.path)
    assert len(kept.manifest.evaluations) == 2
    assert kept.found(Evaluation, "torch") == dense


def test_a_graph_built_anew_starts_its_own_evaluation(tiny_bundle: Bundle, tmp_path: Path, labelled: Path) -> None:
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    dataset = open_dataset("folder", labelled)
    first = evaluate(bundle, dataset, "onnxruntime-cpu", progress=False)
    assert evaluate(bundle, dataset, "onnxruntime-cpu", progress=False).fingerprint_sha256 == first.fingerprint_sha256
    build(bundle, "onnxruntime-cpu")
    assert evaluate(bundle, dataset, "onnxruntime-cpu", progress=False).fingerprint_sha256 != first.fingerprint_sha256


# --- what a step takes -----------------------------------------------------------------------------------------------


def test_steps_take_paths_and_texts(tiny_bundle: Bundle, copied: Callable[..., Bundle], photos: Path) -> None:
    folder = str(copied(tiny_bundle).path)
    report = verify(folder, "onnxruntime-cpu", images=str(photos), count=2, progress=False)
    assert (report.passed, report.pictures, report.images) == (True, "photos", 2)


def test_the_best_runtime_is_the_default_of_every_step(
    tiny_bundle: Bundle, copied: Callable[..., Bundle], labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr("algm_deploy.predictor.default_runtime", lambda _, device: asked.append(device) or "torch")
    bundle = copied(tiny_bundle)
    assert build(bundle.path) == []
    assert verify(bundle.path, count=1, progress=False).runtime == "torch"
    assert evaluate(bundle.path, labelled, dataset="folder", device="cpu", progress=False).runtime == "torch"
    bundle = Bundle.open(bundle.path)
    effort = Effort(warmup=0, rounds=2, most_rounds=2)
    request = Request("latency", count=1, effort=effort, variants=("merged",))
    assert [one.runtime for one in bench(bundle, protocol=request, progress=False)] == ["torch"]
    assert asked == [None, None, "cpu", None]


def test_evaluation_opens_the_data_set_that_is_named(
    tiny_bundle: Bundle, copied: Callable[..., Bundle], labelled: Path
) -> None:
    bundle = copied(tiny_bundle)
    found = evaluate(
        bundle, str(labelled), "torch", dataset="folder", slice_by="(.)", limit=1, tau=0.5, gbm=2.0, progress=False
    )
    assert (found.dataset, found.images, list(found.slices)) == ("folder", 1, ["0"])
    assert found.thresholds == {"clap_threshold": np.float32(0.5), "gbm_threshold": 2.0}
    with pytest.raises(DatasetError, match="camvid"):
        evaluate(bundle, labelled, "torch", progress=False)
    for given in ({"dataset": "folder"}, {"split": "test"}, {"slice_by": "folder"}):
        with pytest.raises(DatasetError, match="got an opened data set: leave them out"):
            evaluate(bundle, open_dataset("folder", labelled), "torch", **given)
    with pytest.raises(BundleError, match="expected dense, which merges nothing, or a threshold"):
        evaluate(bundle, labelled, "torch", dataset="folder", tau=0.5, dense=True)


def test_thresholds_and_numbers_of_a_benchmark(
    tiny_bundle: Bundle, copied: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []
    monkeypatch.setattr("algm_deploy.deployment.check_verified", lambda *_: None)
    monkeypatch.setattr(
        "algm_deploy.deployment.benchmark", lambda _, __, windows, request, ___: asked.append(request) or {}
    )
    bundle = copied(tiny_bundle)
    assert bench(bundle, "torch", protocol="mixed", count=3, batch=2, tau=0.5, gbm=2.0) == []
    assert (asked[0].protocol, asked[0].count, asked[0].batch) == ("mixed", 3, 2)
    assert asked[0].thresholds == {"clap_threshold": 0.5, "gbm_threshold": 2.0}
    bench(bundle, "torch")
    assert asked[1] == usual_request(bundle.recipe, "latency")
    with pytest.raises(BundleError, match="expected a request alone"):
        bench(bundle, "torch", protocol=asked[1], tau=0.5)


def test_no_argument_is_dropped(
    tiny_bundle: Bundle, tiny_checkpoint: Path, photos: Path, tmp_path: Path, labelled: Path
) -> None:
    """What contradicts another argument, or would be read by nobody, is refused."""
    with pytest.raises(RecipeError, match=r"expected merging\.clap_threshold once"):
        export(tiny_checkpoint, tmp_path / "b", settings={"merging.clap_threshold": 0.9}, tau=0.8)
    with pytest.raises(BundleError, match="expected pictures or a file of inputs, got both"):
        compare(tiny_bundle, runtimes=["torch"], images=photos, inputs=tmp_path / "inputs.json")
    with pytest.raises(DatasetError, match="expected a folder for dataset, split or slice_by"):
        evaluate(tiny_bundle, open_dataset("folder", labelled), "torch", dataset="")


def test_an_empty_name_is_not_the_current_folder(tiny_bundle: Bundle, tiny_checkpoint: Path, labelled: Path) -> None:
    for kind, step in (
        (CheckpointError, lambda: export("", "b")),
        (BundleError, lambda: export(tiny_checkpoint, "")),
        (BundleError, lambda: verify("")),
        (BundleError, lambda: compare(tiny_bundle, inputs="")),
        (DatasetError, lambda: verify(tiny_bundle, "torch", images="")),
        (DatasetError, lambda: verify(tiny_bundle, "torch", images=[""])),
        (DatasetError, lambda: evaluate(tiny_bundle, "", "torch", dataset="folder")),
        (DatasetError, lambda: evaluate(tiny_bundle, labelled, "torch", dataset="")),
        (DatasetError, lambda: evaluate(tiny_bundle, labelled, "torch", dataset="folder", slice_by="")),
    ):
        with pytest.raises(kind, match=r"got (an empty|the data set '')"):
            step()


def test_inputs_that_are_no_pixels_are_not_compared(tiny_bundle: Bundle, tmp_path: Path) -> None:
    window = np.full((1, 3, 128, 128), np.nan, np.float32)
    save_inputs([{"image": window}], tmp_path / "inputs.json")
    with pytest.raises(ImageError, match=r"expected RGB pixels in 0\.\.255, got values from nan"):
        compare(tiny_bundle, runtimes=["torch"], inputs=tmp_path / "inputs.json")
