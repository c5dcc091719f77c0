"""The drawn scenes that ship: the same pictures everywhere, and more of them than there are files."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from algm_deploy.evaluation.datasets import Dataset, open_dataset
from algm_deploy.package_data import DEMO_ASSETS
from algm_deploy.pictures.preprocessing import read_photo
from algm_deploy.pictures.shipped import scene, scene_paths

HOURS = ["day", "dusk", "night"]
MOST = 1024  # pictures that `bench --count` takes; `verify` takes 256


@pytest.fixture(scope="module")
def labelled() -> Dataset:
    return open_dataset("folder", DEMO_ASSETS, slice_by="folder")


def test_paths_are_those_of_the_labelled_pictures(labelled: Dataset) -> None:
    paths = scene_paths()
    assert len(paths) == 24
    assert sorted(paths) == sorted(sample.image_path for sample in labelled.samples)


def test_every_hour_of_the_day_comes_early() -> None:
    hours = [path.parent.name for path in scene_paths()]
    assert sorted(set(hours[:3])) == HOURS
    for count in range(3, 25):
        for hour in HOURS:
            share = hours.count(hour) / len(hours)
            assert abs(hours[:count].count(hour) - share * count) <= 1, (hour, count)


def test_the_first_are_the_files_with_their_labels(labelled: Dataset) -> None:
    samples = {sample.image_path: sample for sample in labelled.samples}
    for number, path in enumerate(scene_paths()):
        picture, labels = scene(number)
        assert (picture.shape, picture.dtype, labels.dtype) == ((256, 256, 3), np.uint8, np.uint8)
        assert np.array_equal(picture, read_photo(path))
        assert np.array_equal(labels, labelled.labels_of(samples[path]))


def test_further_ones_are_mirrored_and_cropped_with_their_labels() -> None:
    picture, labels = scene(5)
    mirrored, cropped, both = (scene(5 + 24 * turn) for turn in (1, 2, 3))
    assert np.array_equal(mirrored[0], picture[:, ::-1])
    assert np.array_equal(mirrored[1], labels[:, ::-1])
    top, left = 3, 1  # place 100 of 33 x 33
    assert np.array_equal(cropped[0], picture[top : top + 224, left : left + 224])
    assert np.array_equal(cropped[1], labels[top : top + 224, left : left + 224])
    assert np.array_equal(both[0], cropped[0][:, ::-1])
    assert np.array_equal(both[1], cropped[1][:, ::-1])
    for one in (*mirrored, *both):
        assert one.flags["C_CONTIGUOUS"]


def test_all_that_a_command_may_ask_for_differ() -> None:
    assert len({scene(number)[0].tobytes() for number in range(MOST)}) == MOST


def test_a_number_is_one_picture_in_every_process() -> None:
    code = "import sys; from algm_deploy.pictures.shipped import scene; sys.stdout.buffer.write(scene(61)[0].tobytes())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert other == scene(61)[0].tobytes()
