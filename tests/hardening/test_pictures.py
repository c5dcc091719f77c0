"""Pictures, grids and sequence lengths at the edges, on every runtime of the CPU: the whole parity chain holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from algm_deploy.bundle.records import Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import RecipeError
from algm_deploy.parity.chain import verify
from algm_deploy.predictor import Predictor
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.runners.contract import Runner, runner, runner_type

# ONNX Runtime runs the portable graph until `build` has added its own.
RUNTIMES = ("torch", "onnxruntime-cpu", "onnxruntime-cpu built")
Draw = Callable[[int, int], dict[str, np.ndarray]]


def on(bundle: Bundle, runtime: str, folder: Path) -> tuple[Bundle, str]:
    """A bundle that is ready for a runtime of `RUNTIMES`, and the runtime's own name."""
    name, _, built = runtime.partition(" ")
    if built:
        bundle = Bundle.open(shutil.copytree(bundle.path, folder / "bundle"))
        runner_type(name).build(bundle)
        bundle = Bundle.open(bundle.path)
    return bundle, name


def failures(report: Parity) -> list[str]:
    return [f"{link.name}: {link.measured}" for link in report.links if not link.passed]


def without_positions(weights: dict[str, torch.Tensor]) -> None:
    """Patches of one colour become equal tokens: every similarity ties."""
    weights["encoder.pos_embed"].zero_()


@pytest.fixture(scope="module")
def tied_bundle(small_bundle: Callable[..., Bundle]) -> Bundle:
    return small_bundle(change=without_positions)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_degenerate_pictures_pass_the_chain(
    tiny_bundle: Bundle, degenerate: Draw, tmp_path: Path, runtime: str
) -> None:
    bundle, name = on(tiny_bundle, runtime, tmp_path)
    pictures = np.stack(list(degenerate(128, 128).values()))
    assert failures(verify(bundle, name, pictures, progress=False)) == []


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_pictures_of_equal_tokens_pass_the_chain(
    tied_bundle: Bundle, degenerate: Draw, tmp_path: Path, runtime: str
) -> None:
    bundle, name = on(tied_bundle, runtime, tmp_path)
    drawn = degenerate(64, 64)
    pictures = np.stack([drawn["constant"], drawn["half"], drawn["bright_pixel"]])
    assert failures(verify(bundle, name, pictures, progress=False)) == []


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_window_at_the_threshold(tied_bundle: Bundle, degenerate: Draw, tmp_path: Path, runtime: str) -> None:
    """Rounding decides whether equal tokens reach a similarity of one, and it decides for all windows alike."""
    bundle, name = on(tied_bundle, runtime, tmp_path)
    constant = degenerate(64, 64)["constant"][None]
    with runner(bundle, name) as run:
        for tau, allowed in ((1.0, {4, 16}), (np.nextafter(np.float32(1), np.float32(2)), {4, 16}), (0.999, {4})):
            outputs = run.infer({"image": constant, "clap_threshold": np.float32(tau), "gbm_threshold": np.inf})
            counts = outputs["token_counts"]
            assert set(counts[0]) <= allowed, tau
            assert np.isfinite(outputs["scores"]).all()


# --- grids and sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "window"),
    [((16, 128), (1, 2)), ((128, 16), (2, 1)), ((112, 176), (2, 2)), ((16, 32), (1, 2))],
    ids=["1x8", "8x1", "7x11", "1x2"],
)
def test_narrow_and_prime_grids(
    small_bundle: Callable[..., Bundle], degenerate: Draw, size: tuple[int, int], window: tuple[int, int]
) -> None:
    """The smallest grid has one window: GBM is left with one patch, whose deviation is not defined."""
    plan = MergePlan(clap_layers=(1,), gbm_layers=(2,), window=window, clap_threshold=0.5)
    bundle = small_bundle(size, plan=plan, max_batch=2)
    drawn = degenerate(*size)
    pictures = np.stack([drawn["noise"], drawn["half"]])
    assert failures(verify(bundle, "onnxruntime-cpu", pictures, progress=False)) == []


def test_a_window_that_no_grid_holds_is_refused(small_bundle: Callable[..., Bundle]) -> None:
    with pytest.raises(RecipeError, match=r"merging.window within the grid \(1, 8\), got \(2, 2\)"):
        small_bundle((16, 128))


@pytest.mark.parametrize("size", [(97, 131), (127, 127), (1, 1), (7, 50)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_photos_of_prime_and_tiny_sizes(tiny_bundle: Bundle, size: tuple[int, int]) -> None:
    photo = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    with Predictor(tiny_bundle, "onnxruntime-cpu") as predictor:
        labels = predictor.predict(photo)
    assert labels.shape == size
    assert labels.max() < tiny_bundle.recipe.network.classes


# --- long sequences --------------------------------------------------------------------------------------------------

NARROW = Network("segmenter", 16, 2, 1, 3, (1024, 1024), decoder="linear")


def test_long_sequences(small_bundle: Callable[..., Bundle], degenerate: Draw, tmp_path: Path) -> None:
    """Indices above 2048 are no 16-bit floats, and sorts above 3840 values are no TensorRT's; here both run."""
    size = 1024, 2048  # 8192 tokens, of which GBM sorts half
    bundle, _ = on(small_bundle(size, network=NARROW, max_batch=1, output="labels"), "onnxruntime-cpu built", tmp_path)
    picture = degenerate(*size)["noise"]
    picture[:, :, : size[1] // 2] = 90
    names = ["labels", "token_counts", "token_map_gbm_2"]
    with runner(bundle, "onnxruntime-cpu") as run, runner(bundle, "torch") as torch_run:
        found, expected = (_run(one, picture[None], names) for one in (run, torch_run))
    patches = size[0] * size[1] // 256
    assert patches // 4 <= found["token_counts"][0, 0] < patches
    assert found["token_map_gbm_2"].max() == found["token_counts"][0, 1]
    # Rounding may decide a few of thousands of windows otherwise.
    np.testing.assert_allclose(found["token_counts"], expected["token_counts"], rtol=0.01)
    assert (found["labels"] == expected["labels"]).mean() > 0.99


def _run(run: Runner, image: np.ndarray, names: list[str]) -> dict[str, np.ndarray]:
    return run.infer({"image": image}, names)
