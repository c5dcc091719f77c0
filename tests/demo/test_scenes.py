import hashlib
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from painter.canvas import LABEL_OF, MATERIALS, Camera
from painter.scenes import CLASSES, PALETTE, SLICES, scene, slice_name


@pytest.fixture(scope="module")
def fifty() -> list[tuple[np.ndarray, np.ndarray]]:
    return [scene(seed) for seed in range(50)]


def test_shapes_and_types(fifty: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for image, label in fifty:
        assert image.shape == (256, 256, 3)
        assert label.shape == (256, 256)
        assert image.dtype == label.dtype == np.uint8
        assert label.max() < len(CLASSES)


def test_every_class_occurs(fifty: list[tuple[np.ndarray, np.ndarray]]) -> None:
    pixels = sum(np.bincount(label.ravel(), minlength=len(CLASSES)) for _, label in fifty)
    assert len(PALETTE) == len(CLASSES) == len(set(PALETTE))
    assert (pixels > 0.002 * pixels.sum()).all(), dict(zip(CLASSES, pixels.tolist(), strict=True))


def test_a_seed_is_one_picture_in_every_process(root_dir: Path) -> None:
    code = "import sys; from painter.scenes import scene; [sys.stdout.buffer.write(p) for p in scene(11)]"
    folder = root_dir / "benchmarks" / "demo"
    other = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, check=True).stdout
    image, label = scene(11)
    assert other == image.tobytes() + label.tobytes()


def test_seed_3_is_the_scene_the_network_was_trained_on() -> None:
    image, label = scene(3)
    assert (
        hashlib.sha256(label.tobytes()).hexdigest()
        == "b285efc12a407067dfbf9b8c4e1ba1e26f63a15b0435b83f88347dfa2f93c4d2"
    )
    assert image.mean((0, 1)) == pytest.approx([139.22, 151.23, 146.89], abs=0.5)


def test_seeds_differ(fifty: list[tuple[np.ndarray, np.ndarray]]) -> None:
    assert len({image.tobytes() for image, _ in fifty}) == len({label.tobytes() for _, label in fifty}) == 50


def test_slices_hold_their_share_and_look_it(fifty: list[tuple[np.ndarray, np.ndarray]]) -> None:
    hours = [slice_name(seed) for seed in range(2000)]
    shares = [hours.count(name) / len(hours) for name in SLICES]
    assert shares == pytest.approx([0.6, 0.2, 0.2], abs=0.04)
    brightness = {name: np.mean([fifty[s][0].mean() for s in range(50) if hours[s] == name]) for name in SLICES}
    assert brightness["day"] > brightness["dusk"] > brightness["night"]


def test_scenes_range_from_plain_to_detailed(fifty: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Share of 16-pixel windows (2 x 2 patches of the demo network) that hold a single class."""
    windows = [label.reshape(16, 16, 16, 16).transpose(0, 2, 1, 3).reshape(256, 256) for _, label in fifty]
    plain = [(w == w[:, :1]).all(1).mean() for w in windows]
    assert min(plain) < 0.5
    assert max(plain) > 0.75


def test_drawing_is_fast_enough_to_feed_a_gpu() -> None:
    scene(0)  # fills the caches of noise
    times = []
    for seed in range(20):
        start = time.process_time()
        scene(seed)
        times.append(time.process_time() - start)
    assert np.median(times) < 0.08  # seconds of a processor; about 0.012 on an idle core


def test_material_table_is_in_order() -> None:
    assert [m.index for m in MATERIALS] == list(range(len(MATERIALS)))
    assert set(LABEL_OF.tolist()) == set(range(len(CLASSES)))


def test_ground_coordinates_invert_the_projection() -> None:
    camera = Camera(x=1.0, height=1.7, focal=450.0, horizon=230.0, centre=250.0, bend=0.002)
    top, x, z = camera.ground()
    for row, column in ((40, 100), (250, 400)):
        u, v = camera.project(float(x[row, column]), 0.0, float(z[row, 0]))
        assert (u, v) == pytest.approx((column + 0.5, top + row + 0.5), abs=0.01)
