"""A data set becomes a record; a run that stops goes on where it stopped, and bad files are named."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from msgspec import to_builtins
from numpy.typing import NDArray
from PIL import Image

from algm_deploy.bundle.records import Evaluation, MergeTokens, tokens_by_merge
from algm_deploy.bundle.signature import merge_names
from algm_deploy.errors import BundleError, DatasetError, GateError
from algm_deploy.evaluation.datasets import Dataset, Sample, open_dataset
from algm_deploy.evaluation.evaluate import evaluate
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.pictures.preprocessing import Pixels, preprocessing_fingerprint
from algm_deploy.recipe.conversion import converted
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.schema import Protocol, Recipe
from algm_deploy.wording import merge_titles

NETWORK = Network("segmenter", 128, 6, 2, 3, (32, 32))
PLAN = MergePlan(clap_layers=(1,), gbm_layers=(5,))
RECIPE = Recipe("tiny", NETWORK, PLAN, Protocol("folder", short_side=32, window=32, stride=24))


class Reader:
    """Reads the class off the red channel, except that photos of `weak_green` come out as class 0; counts its calls."""

    def __init__(self, weak_green: int | None = None, break_at: int | None = None, merges: int = 2) -> None:
        self.calls, self.weak_green, self.break_at, self.merges = 0, weak_green, break_at, merges

    def __call__(self, windows: Pixels) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        if self.calls == self.break_at:
            raise KeyboardInterrupt
        self.calls += 1
        classes = windows[:, 0] // 100
        if self.weak_green is not None:
            classes = np.where(windows[:, 1] == self.weak_green, 0, classes)
        scores = (classes[:, None] == np.arange(3)[:, None, None]).astype(np.float32)
        counts = np.array([[4, 3, 2]] * len(windows), np.int64)[:, : self.merges]
        return scores, counts - (windows[:, 1].max((1, 2)) > 0)[:, None]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Six photos of 32 x 56 pixels in two slices; `night` photos are green. Each has two windows and a void column."""
    root = tmp_path / "photos"
    random = np.random.default_rng(0)
    for index in range(6):
        slice_name = "night" if index > 3 else "day"
        labels = np.repeat(random.integers(0, 3, (1, 7)), 8, 1).repeat(32, 0).astype(np.uint8)
        pixels = np.stack([labels * 100, np.full_like(labels, 50 * (index > 3)), labels], -1)
        labels[:, -1] = 255
        for kind, content in (("images", pixels), ("annotations", labels)):
            path = root / kind / slice_name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(content).save(path)
    (root / "classes.json").write_text('{"names": ["a", "b", "c"]}')
    return open_dataset("folder", root, slice_by="folder")


def run(
    dataset: Dataset, reader: Reader, artifact: str = "tiny fp32", recipe: Recipe = RECIPE, window_batch: int = 1
) -> Evaluation:
    return evaluate(
        dataset,
        reader,
        recipe,
        artifact=artifact,
        state_folder=dataset.root.parent / "reports",
        runtime="torch",
        window_batch=window_batch,
        progress=False,
    )


def state_file(dataset: Dataset) -> Path:
    (path,) = (dataset.root.parent / "reports").iterdir()
    return path


def test_a_network_that_reads_the_label_scores_a_hundred(dataset: Dataset) -> None:
    record = run(dataset, Reader())
    assert (record.images, record.windows, record.failures, record.unlabelled) == (6, 12, {}, ())
    assert record.miou_percent == record.pixel_accuracy_percent == 100
    assert record.labelled_pixels == 6 * 32 * 55
    assert record.majority_guess_miou_percent is not None
    assert record.majority_guess_miou_percent < 50
    assert record.iou_percent_by_class == {"a": 100, "b": 100, "c": 100}


def test_a_record_names_what_was_evaluated(dataset: Dataset) -> None:
    thresholds = {"clap_threshold": inf, "gbm_threshold": 0.5}
    record = evaluate(
        *(dataset, Reader(), RECIPE),
        artifact="tiny fp32",
        state_folder=dataset.root.parent / "reports",
        runtime="tensorrt",
        device="NVIDIA H200",
        thresholds=thresholds,
        progress=False,
    )
    assert (record.runtime, record.device) == ("tensorrt", "NVIDIA H200")
    assert record.thresholds == {"clap_threshold": "inf", "gbm_threshold": 0.5}
    assert (record.dataset, record.split, record.protocol) == ("folder", "all", RECIPE.protocol)
    assert record.preprocessing_sha256 == preprocessing_fingerprint(RECIPE.protocol)
    assert record.fingerprint_sha256[:16] in state_file(dataset).name


def test_losses_show_in_their_slice(dataset: Dataset) -> None:
    record = run(dataset, Reader(weak_green=50))
    day, night = record.slices["day"], record.slices["night"]
    assert (day.images, day.miou_percent) == (4, 100)
    assert (night.images, night.iou_percent_by_class["b"]) == (2, 0)
    assert night.miou_percent < record.miou_percent < 100  # type: ignore[operator]
    assert (tokens_by_merge(day.tokens)["clap_1"], tokens_by_merge(night.tokens)["clap_1"]) == (4, 3)
    gbm = record.tokens[1]
    assert gbm == MergeTokens(merge="gbm_5", mean=pytest.approx((8 * 3 + 4 * 2) / 12), min=2, max=3)


def test_arithmetic_is_the_mean_over_windows_with_their_own_tokens(dataset: Dataset) -> None:
    record = run(dataset, Reader())
    day, night = (multiply_adds(NETWORK, PLAN, counts).gmacs for counts in ((4, 3), (3, 2)))
    assert record.gmacs_per_window_mean == pytest.approx((8 * day + 4 * night) / 12)
    assert record.gmacs_per_window_dense == multiply_adds(NETWORK, DENSE).gmacs


def test_a_record_is_json_and_its_histograms_hold_every_window(dataset: Dataset) -> None:
    record = run(dataset, Reader())
    table = json.loads(json.dumps(to_builtins(record), allow_nan=False))
    assert converted(Evaluation, table, "evaluation") == record
    histograms = record.token_histograms
    assert {name: sum(counts) for name, counts in histograms.windows_by_merge.items()} == {"clap_1": 12, "gbm_5": 12}
    assert histograms.token_edges[-1] == histograms.patches == 4


def test_a_dense_network_has_no_token_figures(dataset: Dataset) -> None:
    record = run(dataset, Reader(merges=0), recipe=replace(RECIPE, merging=DENSE))
    assert record.tokens == ()
    assert record.token_histograms.windows_by_merge == {}
    assert record.gmacs_per_window_mean == pytest.approx(record.gmacs_per_window_dense)


def test_several_merges_of_a_kind_are_told_apart(dataset: Dataset) -> None:
    plan = MergePlan(clap_layers=(1,), gbm_layers=(3, 5))
    record = run(dataset, Reader(merges=3), recipe=replace(RECIPE, merging=plan))
    assert [one.merge for one in record.tokens] == ["clap_1", "gbm_3", "gbm_5"]
    assert record.tokens[2].max == 2


def test_tables_show_the_first_and_the_last_merge_of_a_kind_and_records_all() -> None:
    tome = merge_names(MergePlan(clap_layers=(), gbm_layers=(), method="tome", tome_r=(4,) * 12))
    assert merge_titles(tome) == {"tome_1": "ToMe 1", "tome_12": "ToMe 12"}
    gbm = ["clap_1", "gbm_3", "gbm_5", "gbm_9"]
    assert merge_titles(gbm) == {"clap_1": "CLAP", "gbm_3": "GBM 3", "gbm_9": "GBM 9"}
    assert merge_titles(["clap_1", "gbm_5"]) == {"clap_1": "CLAP", "gbm_5": "GBM"}
    assert list(merge_titles(["gbm_3", "clap_5", "gbm_7"])) == ["gbm_3", "clap_5", "gbm_7"]
    assert merge_titles(["tome_4"]) == {"tome_4": "ToMe"}


# -------------------------------------------------------------------------------------------------------- resuming


def test_an_interrupted_run_goes_on_where_it_stopped(dataset: Dataset) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(dataset, Reader(break_at=5))  # in the middle of the third photo
    rest = Reader()
    resumed = run(dataset, rest)
    assert rest.calls == 2 * 4
    state_file(dataset).unlink()
    whole = run(dataset, Reader())
    assert resumed == whole


def test_a_subset_counts_towards_the_whole(dataset: Dataset) -> None:
    assert run(dataset.subset(2), Reader()).images == 2
    rest = Reader()
    assert run(dataset, rest).images == 6
    assert rest.calls == 2 * 4


def test_a_torn_last_line_is_written_again(dataset: Dataset) -> None:
    expected = run(dataset, Reader())
    content = state_file(dataset).read_bytes()
    for cut in (1, 30, len(content.splitlines()[-1])):
        state_file(dataset).write_bytes(content[:-cut])
        again = Reader()
        assert run(dataset, again) == expected
        assert again.calls == 2
        unneeded = Reader()
        assert run(dataset, unneeded) == expected
        assert unneeded.calls == 0
    state_file(dataset).write_bytes(content[:10])  # died while writing the header
    assert run(dataset, Reader()) == expected


def test_a_spoilt_line_is_an_error_not_a_lost_image(dataset: Dataset) -> None:
    run(dataset, Reader())
    lines = state_file(dataset).read_bytes().splitlines(keepends=True)
    state_file(dataset).write_bytes(b"".join([*lines[:2], b'{"name": 3}\n', *lines[3:]]))
    with pytest.raises(BundleError, match=r"line 3: .*delete"):
        run(dataset, Reader())
    result = json.loads(lines[2])
    for change, message in {
        '{"cells": [9], "pixels": [1]}': "its cells are of other classes",
        '{"cells": [-1], "pixels": [1]}': "Expected `int` >= 0",
        '{"cells": [1, 2]}': "expected as many pixels as cells",
        '{"pixels": [1.5]}': "Expected `int`, got `float`",
        '{"tokens": null}': "Expected `array`, got `null`",
        '{"mood": "good"}': "unknown field `mood`",
        '{"name": NaN}': "Expected `str`, got `float`",
    }.items():
        spoilt = json.dumps(result | json.loads(change)).encode() + b"\n"
        state_file(dataset).write_bytes(b"".join([*lines[:2], spoilt, *lines[3:]]))
        with pytest.raises(BundleError, match=f"line 3: expected a saved result, delete the file .*{message}"):
            run(dataset, Reader())
    state_file(dataset).write_bytes(b"".join([b'{"artifact": "other"}\n', *lines[1:]]))
    with pytest.raises(BundleError, match=r"line 1: .*another evaluation"):
        run(dataset, Reader())


def test_results_of_different_artifacts_and_protocols_never_mix(dataset: Dataset) -> None:
    run(dataset, Reader())
    other = replace(RECIPE, protocol=replace(RECIPE.protocol, stride=30))
    for artifact, recipe, window_batch in (("tiny fp16", RECIPE, 1), ("tiny fp32", other, 1), ("tiny fp32", RECIPE, 2)):
        again = Reader()
        assert run(dataset, again, artifact, recipe, window_batch).window_batch == window_batch
        assert again.calls == 2 * 6 / window_batch
    assert len(list((dataset.root.parent / "reports").iterdir())) == 4


def test_an_image_that_changed_is_evaluated_again(dataset: Dataset) -> None:
    run(dataset, Reader())
    path = dataset.samples[1].label_path
    Image.fromarray(np.zeros((32, 56), np.uint8)).save(path)
    again = Reader()
    assert run(dataset, again).miou_percent < 100
    assert again.calls == 2


def test_a_label_repaired_in_place_is_noticed(dataset: Dataset, tmp_path: Path) -> None:
    """As many bytes and the old times: only the content tells."""
    path = dataset.samples[1].label_path
    Image.fromarray(np.asarray(Image.open(path))).save(path, compress_level=0)
    run(dataset, Reader())
    before, content = path.stat(), path.read_bytes()
    Image.fromarray(np.full((32, 56), 2, np.uint8)).save(path, compress_level=0)
    assert path.read_bytes() != content
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    again = Reader()
    assert run(dataset, again).miou_percent < 100
    assert again.calls == 2


def test_labels_of_another_meaning_never_mix(dataset: Dataset) -> None:
    run(dataset, Reader())
    lookup = dataset.lookup.copy()
    lookup[0] = 255
    again = Reader()
    record = run(replace(dataset, lookup=lookup), again)
    assert again.calls == 12
    assert record.labelled_pixels < 6 * 32 * 55


def test_an_image_that_broke_since_is_not_in_the_figures(dataset: Dataset) -> None:
    run(dataset, Reader())
    dataset.samples[1].image_path.write_bytes(b"broken")
    record = run(dataset, Reader())
    assert (record.images, list(record.failures)) == (5, [dataset.samples[1].name])


def test_a_state_folder_that_cannot_be_written_is_explained(dataset: Dataset) -> None:
    (dataset.root.parent / "reports").write_text("a file")
    with pytest.raises(BundleError, match="cannot keep its state"):
        run(dataset, Reader())


# ------------------------------------------------------------------------------------------------------- bad input


def test_a_bad_file_is_named_and_the_run_goes_on(dataset: Dataset) -> None:
    broken, vanished, foreign = dataset.samples[0], dataset.samples[2], dataset.samples[4]
    good = broken.image_path.read_bytes()
    broken.image_path.write_bytes(good[:40])
    vanished.label_path.unlink()
    Image.fromarray(np.zeros((56, 32), np.uint8)).save(foreign.label_path)
    record = run(dataset, Reader())
    assert record.images == 3
    assert list(record.failures) == [broken.name, vanished.name, foreign.name]
    assert str(broken.image_path) in record.failures[broken.name]
    assert record.failures[vanished.name].endswith("expected a photo or its labels, got No such file or directory")
    assert "(32, 56), got (56, 32)" in record.failures[foreign.name]
    broken.image_path.write_bytes(good)
    again = Reader()
    assert run(dataset, again).images == 4
    assert again.calls == 2


def test_a_run_without_a_usable_image_gives_the_reasons(dataset: Dataset) -> None:
    for sample in dataset.samples[:4]:
        sample.image_path.unlink()
    for sample in dataset.samples[4:]:
        void(sample)
    with pytest.raises(DatasetError) as caught:
        run(dataset, Reader())
    assert str(caught.value) == (
        "a folder of pictures: expected images with labels, none of 6 can be evaluated ("
        + "; ".join(f"{s.image_path}: expected a photo or its labels, got {MISSING}" for s in dataset.samples[:3])
        + "; 3 more): mend these files and run it again"
    )
    with pytest.raises(
        DatasetError, match=r"none of 2 .* \(night/4: no pixel has a label; night/5: no pixel has a label\)"
    ):
        run(replace(dataset, samples=dataset.samples[4:]), Reader())


def test_pictures_whose_names_are_no_text(dataset: Dataset) -> None:
    """A file system holds bytes; a state file is UTF-8."""
    strange = os.fsdecode(b"day/\xff")
    for kind in ("images", "annotations"):
        (dataset.root / kind / "day" / "0.png").rename(dataset.root / kind / f"{strange}.png")
    renamed = open_dataset("folder", dataset.root, slice_by="folder")
    assert run(renamed, Reader()).images == 6
    again = Reader()
    assert run(renamed, again).failures == {}
    assert again.calls == 0
    (dataset.root / "images" / f"{strange}.png").write_bytes(b"broken")
    assert list(run(renamed, Reader()).failures) == [strange]


MISSING = "No such file or directory"


def void(sample: Sample) -> None:
    Image.fromarray(np.full((32, 56), 255, np.uint8)).save(sample.label_path)


def test_an_image_without_a_label_counts_in_tokens_and_not_in_quality(dataset: Dataset) -> None:
    """Data sets have some: they are named, and no reason to fail."""
    sample, whole = dataset.samples[4], run(dataset, Reader(weak_green=50))
    void(sample)
    without = run(
        replace(dataset, samples=tuple(one for one in dataset.samples if one != sample)), Reader(weak_green=50)
    )
    for reader in (Reader(weak_green=50), Reader(weak_green=50)):  # measured, and read from the state file
        record = run(dataset, reader)
        assert (record.unlabelled, record.failures) == ((sample.name,), {})
        assert (record.miou_percent, record.labelled_pixels) == (without.miou_percent, without.labelled_pixels)
        assert (record.images, record.windows, record.tokens) == (whole.images, whole.windows, whole.tokens)
    assert reader.calls == 0


def test_a_slice_without_a_label_has_no_figures_of_quality(dataset: Dataset) -> None:
    for sample in dataset.samples[4:]:
        void(sample)
    record = run(dataset, Reader())
    night = record.slices["night"]
    assert (night.images, night.miou_percent, night.pixel_accuracy_percent, night.labelled_pixels) == (2, None, None, 0)
    assert night.majority_guess_miou_percent is None
    assert set(night.iou_percent_by_class.values()) == {None}
    assert tokens_by_merge(night.tokens) == {"clap_1": 3, "gbm_5": 2}
    assert record.miou_percent == 100
    json.dumps(to_builtins(record), allow_nan=False)


def test_a_data_set_of_other_classes_is_refused(dataset: Dataset) -> None:
    with pytest.raises(DatasetError, match="3 classes and the network 11"):
        run(dataset, Reader(), recipe=replace(RECIPE, network=replace(NETWORK, classes=11)))


def test_token_counts_of_another_plan_are_refused(dataset: Dataset) -> None:
    with pytest.raises(BundleError, match=r"each merging layer \(1, 5\), got \(1,\)"):
        run(dataset, Reader(merges=1))


def test_a_network_with_more_classes_than_labels_is_refused(dataset: Dataset) -> None:
    def four_classes(windows: Pixels) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        scores = np.zeros((len(windows), 4, 32, 32), np.float32)
        scores[:, 3] = 1
        return scores, np.zeros((len(windows), 2), np.int64)

    with pytest.raises(GateError, match="prediction values"):
        run(dataset, four_classes)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------- what figures would hide


@pytest.mark.parametrize(("values", "said"), [((0, 255), "got a alone"), ((0, 1), "got a and b alone")])
def test_masks_of_a_foreground_are_told(
    dataset: Dataset, caplog: pytest.LogCaptureFixture, values: tuple[int, int], said: str
) -> None:
    run(dataset, Reader())
    assert caplog.messages == []
    for sample in dataset.samples:
        mask = np.array(values, np.uint8).repeat(28)[None].repeat(32, 0)
        Image.fromarray(mask).save(sample.label_path)
    run(dataset, Reader())
    assert f"a folder of pictures: expected labels of 3 classes, {said}: if they are masks" in caplog.text


def test_a_photo_that_exif_turns_away_from_its_labels_is_named(dataset: Dataset) -> None:
    """It would be counted against labels that lie upside down."""
    sample, exif = dataset.samples[2], Image.Exif()
    exif[0x0112] = 3
    Image.open(sample.image_path).save(sample.image_path, exif=exif)
    record = run(dataset, Reader())
    assert (record.images, list(record.failures)) == (5, [sample.name])
    assert "EXIF orientation 3" in record.failures[sample.name]
