"""A data set becomes a record; a run that stops goes on where it stopped, and bad files are named."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from algm_deploy.errors import BundleError, DatasetError, GateError
from algm_deploy.evaluation.datasets import Dataset, open_dataset
from algm_deploy.evaluation.evaluate import Evaluation, evaluate, measure_agreement, merge_names
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.pictures.preprocessing import Pixels
from algm_deploy.recipe.schema import DENSE, MergePlan, Network, Protocol, Recipe
from algm_deploy.wording import merge_title, shown_merges

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
    state = dataset.root.parent / "reports"
    return evaluate(
        dataset, reader, recipe, artifact=artifact, state_folder=state, window_batch=window_batch, progress=False
    )


def state_file(dataset: Dataset) -> Path:
    (path,) = (dataset.root.parent / "reports").iterdir()
    return path


def test_a_network_that_reads_the_label_scores_a_hundred(dataset: Dataset) -> None:
    record = run(dataset, Reader()).record()
    assert (record["images"], record["windows"], record["complete"]) == (6, 12, True)
    assert record["miou_percent"] == record["pixel_accuracy_percent"] == 100
    assert record["labelled_pixels"] == 6 * 32 * 55
    assert record["majority_guess_miou_percent"] < 50
    assert record["iou_percent_by_class"] == {"a": 100, "b": 100, "c": 100}


def test_losses_show_in_their_slice(dataset: Dataset) -> None:
    record = run(dataset, Reader(weak_green=50)).record()
    day, night = record["slices"]["day"], record["slices"]["night"]
    assert (day["images"], day["miou_percent"]) == (4, 100)
    assert (night["images"], night["iou_percent_by_class"]["b"]) == (2, 0)
    assert night["miou_percent"] < record["miou_percent"] < 100
    assert (day["tokens_after_clap_mean"], night["tokens_after_clap_mean"]) == (4, 3)
    assert record["tokens_after_gbm_mean"] == pytest.approx((8 * 3 + 4 * 2) / 12)
    assert (record["tokens_after_gbm_min"], record["tokens_after_gbm_max"]) == (2, 3)


def test_arithmetic_is_the_mean_over_windows_with_their_own_tokens(dataset: Dataset) -> None:
    record = run(dataset, Reader()).record()
    day, night = (multiply_adds(NETWORK, PLAN, counts).gmacs for counts in ((4, 3), (3, 2)))
    assert record["gmacs_per_window_mean"] == pytest.approx((8 * day + 4 * night) / 12)
    assert record["gflops_per_window_mean"] == 2 * record["gmacs_per_window_mean"]
    assert record["gmacs_per_window_dense"] == multiply_adds(NETWORK, DENSE).gmacs


def test_a_record_is_json_and_its_histograms_hold_every_window(dataset: Dataset) -> None:
    record = run(dataset, Reader()).record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    histograms = record["token_histograms"]
    assert {name: sum(counts) for name, counts in histograms["windows_by_merge"].items()} == {"clap": 12, "gbm": 12}
    assert histograms["token_edges"][-1] == 4


def test_a_dense_network_has_no_token_figures(dataset: Dataset) -> None:
    record = run(dataset, Reader(merges=0), recipe=replace(RECIPE, merging=DENSE)).record()
    assert not [name for name in record if name.startswith("tokens_after")]
    assert record["gmacs_per_window_mean"] == pytest.approx(record["gmacs_per_window_dense"])


def test_several_merges_of_a_kind_are_told_apart(dataset: Dataset) -> None:
    plan = MergePlan(clap_layers=(1,), gbm_layers=(3, 5))
    assert merge_names(plan) == ("clap", "gbm_3", "gbm_5")
    record = run(dataset, Reader(merges=3), recipe=replace(RECIPE, merging=plan)).record()
    assert record["tokens_after_gbm_5_max"] == 2


def test_tables_show_the_first_and_the_last_merge_of_a_kind_and_records_all() -> None:
    tome = merge_names(MergePlan(clap_layers=(), gbm_layers=(), method="tome", tome_r=(4,) * 12))
    assert shown_merges(tome) == ["tome_1", "tome_12"]
    assert shown_merges(["clap", "gbm_3", "gbm_5", "gbm_9"]) == ["clap", "gbm_3", "gbm_9"]
    assert shown_merges(["clap", "gbm"]) == ["clap", "gbm"]
    assert [merge_title(name) for name in ("clap", "gbm_9", "tome_12")] == ["CLAP", "GBM 9", "ToMe 12"]


# -------------------------------------------------------------------------------------------------------- resuming


def test_an_interrupted_run_goes_on_where_it_stopped(dataset: Dataset) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(dataset, Reader(break_at=5))  # in the middle of the third photo
    rest = Reader()
    resumed = run(dataset, rest)
    assert rest.calls == 2 * 4
    whole = evaluate(
        dataset, Reader(), RECIPE, artifact="tiny fp32", state_folder=dataset.root.parent / "fresh", progress=False
    )
    assert resumed.record() == whole.record()


def test_a_subset_counts_towards_the_whole(dataset: Dataset) -> None:
    assert run(dataset.subset(2), Reader()).record()["images"] == 2
    rest = Reader()
    assert run(dataset, rest).record()["images"] == 6
    assert rest.calls == 2 * 4


def test_a_torn_last_line_is_written_again(dataset: Dataset) -> None:
    expected = run(dataset, Reader()).record()
    content = state_file(dataset).read_bytes()
    for cut in (1, 30, len(content.splitlines()[-1])):
        state_file(dataset).write_bytes(content[:-cut])
        again = Reader()
        assert run(dataset, again).record() == expected
        assert again.calls == 2
        unneeded = Reader()
        assert run(dataset, unneeded).record() == expected
        assert unneeded.calls == 0
    state_file(dataset).write_bytes(content[:10])  # died while writing the header
    assert run(dataset, Reader()).record() == expected


def test_a_spoilt_line_is_an_error_not_a_lost_image(dataset: Dataset) -> None:
    run(dataset, Reader())
    lines = state_file(dataset).read_bytes().splitlines(keepends=True)
    state_file(dataset).write_bytes(b"".join([*lines[:2], b'{"name": 3}\n', *lines[3:]]))
    with pytest.raises(BundleError, match=r"line 3: .*delete"):
        run(dataset, Reader())
    state_file(dataset).write_bytes(b"".join([b'{"artifact": "other"}\n', *lines[1:]]))
    with pytest.raises(BundleError, match=r"line 1: .*another evaluation"):
        run(dataset, Reader())


def test_results_of_different_artifacts_and_protocols_never_mix(dataset: Dataset) -> None:
    run(dataset, Reader())
    other = replace(RECIPE, protocol=replace(RECIPE.protocol, stride=30))
    for artifact, recipe, window_batch in (("tiny fp16", RECIPE, 1), ("tiny fp32", other, 1), ("tiny fp32", RECIPE, 2)):
        again = Reader()
        assert run(dataset, again, artifact, recipe, window_batch).record()["window_batch"] == window_batch
        assert again.calls == 2 * 6 / window_batch
    assert len(list((dataset.root.parent / "reports").iterdir())) == 4


def test_an_image_that_changed_is_evaluated_again(dataset: Dataset) -> None:
    run(dataset, Reader())
    path = dataset.samples[1].label_path
    Image.fromarray(np.zeros((32, 56), np.uint8)).save(path)
    again = Reader()
    assert run(dataset, again).record()["miou_percent"] < 100
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
    assert run(dataset, again).record()["miou_percent"] < 100
    assert again.calls == 2


def test_labels_of_another_meaning_never_mix(dataset: Dataset) -> None:
    run(dataset, Reader())
    lookup = dataset.lookup.copy()
    lookup[0] = 255
    again = Reader()
    record = run(replace(dataset, lookup=lookup), again).record()
    assert again.calls == 12
    assert record["labelled_pixels"] < 6 * 32 * 55


def test_an_image_that_broke_since_is_not_in_the_figures(dataset: Dataset) -> None:
    run(dataset, Reader())
    dataset.samples[1].image_path.write_bytes(b"broken")
    record = run(dataset, Reader()).record()
    assert (record["images"], record["images_failed"]) == (5, 1)


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
    evaluation = run(dataset, Reader())
    record = evaluation.record()
    assert not evaluation.complete
    assert (record["images"], record["images_failed"], record["complete"]) == (3, 3, False)
    assert str(broken.image_path) in record["failures"][broken.name]
    assert record["failures"][vanished.name].endswith("expected a photo or its labels, got No such file or directory")
    assert "(32, 56), got (56, 32)" in record["failures"][foreign.name]
    broken.image_path.write_bytes(good)
    again = Reader()
    assert run(dataset, again).record()["images"] == 4
    assert again.calls == 2


def test_a_run_without_a_usable_image_still_has_a_record(dataset: Dataset) -> None:
    for sample in dataset.samples:
        sample.image_path.unlink()
    record = run(dataset, Reader()).record()
    assert (record["images"], record["images_failed"], record["miou_percent"]) == (0, 6, None)
    json.dumps(record, allow_nan=False)


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


# ------------------------------------------------------------------------------------------------------- agreement


def test_agreement_of_two_networks_by_slice(dataset: Dataset) -> None:
    found = measure_agreement(dataset, Reader(), Reader(weak_green=50), RECIPE.protocol, progress=False)
    assert (found["day"].label_agreement, found["day"].miou_percent) == (1, 100)
    assert found["night"].label_agreement < found["all"].label_agreement < 1
    same = measure_agreement(dataset, Reader(), Reader(), RECIPE.protocol, progress=False)
    assert {figures.label_agreement for figures in same.values()} == {1}
