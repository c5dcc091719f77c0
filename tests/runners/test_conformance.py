"""What every runtime promises, checked on every runtime that can be opened here."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, RuntimeUnavailableError
from algm_deploy.native_libraries import find_library
from algm_deploy.runners.contract import Runner, runner, runner_type
from algm_deploy.runners.registry import RUNTIMES, row_of

MAPS = ["token_map_clap_1", "token_map_gbm_3"]


@pytest.fixture(scope="module", params=RUNTIMES)
def built(request: pytest.FixtureRequest, tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A runtime's name and a bundle with its executable; skipped, with the reason, where it cannot be opened."""
    runtime = request.param
    if missing := [name for name in row_of(runtime).libraries if find_library(name) is None]:
        pytest.skip(f"{runtime}: a library is not built here: algm-deploy build-native {' '.join(missing)}")
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path_factory.mktemp(runtime) / "bundle"))
    try:
        runner_type(runtime).build(bundle)
        with runner(Bundle.open(bundle.path), runtime):
            pass
    except RuntimeUnavailableError as error:
        pytest.skip(f"{runtime}: {error}")
    return runtime, Bundle.open(bundle.path)


@pytest.fixture
def run(built: Any) -> Iterator[Runner]:
    runtime, bundle = built
    with runner(bundle, runtime) as opened:
        yield opened


@pytest.fixture
def images(blob_images: Callable[[int], np.ndarray]) -> np.ndarray:
    return blob_images(3)


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name])


def test_default_outputs(run: Runner, images: np.ndarray) -> None:
    outputs = run.infer({"image": images})
    assert [(name, value.dtype, value.shape) for name, value in outputs.items()] == [
        ("scores", np.float32, (3, 11, 128, 128)),
        ("token_counts", np.int64, (3, 2)),
    ]
    assert np.isfinite(outputs["scores"]).all()


def test_outputs_are_chosen_by_name(run: Runner, images: np.ndarray) -> None:
    outputs = run.infer({"image": images}, [MAPS[1], "token_counts", MAPS[0]])
    assert list(outputs) == [MAPS[1], "token_counts", MAPS[0]]
    for index, name in enumerate(MAPS):
        assert (outputs[name].dtype, outputs[name].shape) == (np.int64, (3, 64))
        # Row 0 is cls: the highest row is the number of patch tokens.
        np.testing.assert_array_equal(outputs[name].max(1), outputs["token_counts"][:, index])


def test_batches_up_to_the_largest(run: Runner, blob_images: Any) -> None:
    largest = run.signature.max_batch
    for batch in (1, 2, largest):
        assert run.infer({"image": blob_images(batch)})["token_counts"].shape == (batch, 2)


def test_every_image_decides_alone(run: Runner, images: np.ndarray) -> None:
    together = run.infer({"image": images}, ["scores", "token_counts"])
    assert len(set(together["token_counts"][:, 0])) > 1
    for index in range(3):
        alone = run.infer({"image": images[index : index + 1]}, ["scores", "token_counts"])
        np.testing.assert_array_equal(alone["token_counts"][0], together["token_counts"][index])
        np.testing.assert_allclose(alone["scores"][0], together["scores"][index], rtol=0, atol=2e-5)


def test_agrees_with_torch(run: Runner, images: np.ndarray) -> None:
    names = ["scores", "token_counts", *MAPS]
    found = run.infer({"image": images, "clap_threshold": 0.7}, names)
    with runner(run.bundle, "torch") as torch_run:
        expected = torch_run.infer({"image": images, "clap_threshold": 0.7}, names)
    np.testing.assert_allclose(found.pop("scores"), expected.pop("scores"), rtol=0, atol=2e-5)
    assert_equal(found, expected)


# ------------------------------------------------------------------------------------------------------ device memory


def on_device(run: Runner, images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).to(run.device)


def to_arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}


def test_tensors_give_what_arrays_give(run: Runner, images: np.ndarray) -> None:
    names = ["token_counts", "scores", MAPS[1]]
    for thresholds in ({}, {"clap_threshold": 0.7, "gbm_threshold": 0.5}):
        found = run.infer_device({"image": on_device(run, images), **thresholds}, names)
        assert {tensor.device for tensor in found.values()} == {run.device}
        expected = run.infer({"image": images, **{n: np.float32(v) for n, v in thresholds.items()}}, names)
        assert_equal(to_arrays(found), expected)
        scalars = {name: torch.tensor(value, device=run.device) for name, value in thresholds.items()}
        assert_equal(to_arrays(run.infer_device({"image": on_device(run, images), **scalars}, names)), expected)
    assert list(run.infer_device({"image": on_device(run, images)})) == ["scores", "token_counts"]


def test_tensors_in_any_layout(run: Runner, images: np.ndarray) -> None:
    expected = run.infer({"image": images})
    turned = on_device(run, images).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert not turned.is_contiguous()
    assert_equal(to_arrays(run.infer_device({"image": turned})), expected)


def test_anything_with_dlpack(run: Runner, images: np.ndarray) -> None:
    class Elsewhere:
        """Another library's array."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__

    foreign: Any = Elsewhere(on_device(run, images))
    assert_equal(to_arrays(run.infer_device({"image": foreign})), run.infer({"image": images}))


def test_resulting_tensors_belong_to_the_caller(run: Runner, images: np.ndarray) -> None:
    names = ["scores", "token_counts", *MAPS]
    first = run.infer_device({"image": on_device(run, images)}, names)
    kept = to_arrays({name: tensor.clone() for name, tensor in first.items()})
    run.infer_device({"image": on_device(run, images[::-1].copy())}, names)
    assert_equal(to_arrays(first), kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.to("meta"), "expected an image in the memory of .*, got one in that of meta"),
        (lambda x: x.float(), "expected image uint8 .* got float32"),
        (lambda x: x[0], r"got uint8 \(3, 128, 128\)"),
        (lambda x: x[:, :, :64], r"got uint8 \(3, 3, 64, 128\)"),
        (lambda x: x[:0], "a batch of 0, this bundle takes 1 to 8"),
        (lambda x: x.repeat(3, 1, 1, 1), "a batch of 9, this bundle takes 1 to 8"),
    ],
    ids=["elsewhere", "float", "rank_3", "height", "batch_0", "batch_9"],
)
def test_tensors_that_do_not_fit(run: Runner, images: np.ndarray, change: Any, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        run.infer_device({"image": change(on_device(run, images))})


def test_bad_calls_with_tensors(run: Runner, images: np.ndarray) -> None:
    image = on_device(run, images)
    with pytest.raises(BundleError, match="no input 'tau': choose from image, clap_threshold, gbm_threshold"):
        run.infer_device({"image": image, "tau": 0.5})
    with pytest.raises(BundleError, match="'image' is missing"):
        run.infer_device({"clap_threshold": 1.0})
    with pytest.raises(BundleError, match="clap_threshold is one number"):
        run.infer_device({"image": image, "clap_threshold": torch.zeros(1)})
    with pytest.raises(BundleError, match="no output 'labels'"):
        run.infer_device({"image": image}, ["labels"])


# ---------------------------------------------------------------------------------------------------- what a run tells


def test_a_runner_tells_what_it_is(run: Runner) -> None:
    row = row_of(run.runtime)
    assert run.row() is row
    assert run.executable == row.own, "it was built"
    assert run.bundle.file(run.executable).is_file()
    known = {"clap", "gbm", "unmerge", "label_map", "mask_labels", "deformable_attention"}
    known |= {"packed_attention", "gelu", "bias_skip", "bias_skip_norm", "layer_norm", "patches"}
    assert set(run.custom_operators) <= known
    assert run.provider is None or run.provider.endswith("ExecutionProvider")
    assert run.device.type in row.devices
    assert (run.device.index is None) == (run.device.type == "cpu")
    assert run.device_name == row.device_here()
    assert all(type(word) is str for pair in run.execution.items() for word in pair)


def test_placement_counts_nodes_where_there_are_providers(run: Runner, images: np.ndarray) -> None:
    placed = run.placement({"image": images})
    assert (placed is None) == (run.provider is None)
    if placed is not None:
        assert placed.nodes[str(run.provider)] > 50
        assert placed.copies >= 0


# ----------------------------------------------------------------------------------------------------------- warm-up


def test_a_warm_up_changes_no_result(run: Runner, images: np.ndarray) -> None:
    with runner(run.bundle, run.runtime) as cold:
        expected = [cold.infer({"image": images}), cold.infer({"image": images[:1], "clap_threshold": 0.7})]
    assert run.warm_up(3) and run.warm_up()
    found = [run.infer({"image": images}), run.infer({"image": images[:1], "clap_threshold": 0.7})]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.pop("scores"), theirs.pop("scores"), rtol=0, atol=2e-5)
        assert_equal(ours, theirs)


def test_after_a_warm_up_nothing_is_captured_for_single_pictures(run: Runner, images: np.ndarray) -> None:
    assert run.warm_up()
    captures = run.captures
    assert (captures > 0) == ("cuda_graphs" in run.execution)
    for image in images:
        for clap in (np.inf, 0.9, 0.5, -2):
            for gbm in (np.inf, 1.0, -1e6):
                for _ in range(2):  # what is new is captured when it comes again
                    run.infer({"image": image[None], "clap_threshold": clap, "gbm_threshold": gbm})
    assert run.captures == captures


def test_a_warm_up_is_for_batches_that_the_bundle_takes(built: Any) -> None:
    runtime, bundle = built
    closed = runner(bundle, runtime)
    with pytest.raises(RuntimeUnavailableError, match="is closed"):
        closed.warm_up()
    with closed as opened:
        for images in (0, 9):
            with pytest.raises(BundleError, match=f"a batch of {images}, this bundle takes 1 to 8"):
                opened.warm_up(images)


# -------------------------------------------------------------------------------------------------------- thresholds


def test_missing_thresholds_take_the_defaults(run: Runner, images: np.ndarray) -> None:
    defaults = run.signature.defaults
    assert defaults == {"clap_threshold": 0.9, "gbm_threshold": 1.0}
    assert_equal(run.infer({"image": images}), run.infer({"image": images, **defaults}))


def test_thresholds_change_the_counts(run: Runner, images: np.ndarray) -> None:
    def counts(**thresholds: float) -> list[list[int]]:
        found: list[list[int]] = run.infer({"image": images, **thresholds}, ["token_counts"])["token_counts"].tolist()
        return found

    assert counts(clap_threshold=1.5, gbm_threshold=1000.0) == [[64, 64]] * 3
    assert counts(clap_threshold=-1, gbm_threshold=-1000) == [[16, 8]] * 3
    assert counts() not in (counts(clap_threshold=1.5), counts(gbm_threshold=1000))


@pytest.mark.parametrize("value", [0.7, np.float32(0.7), np.array(0.7, np.float64), np.array(0.7, np.float32)])
def test_thresholds_are_any_kind_of_number(run: Runner, images: np.ndarray, value: Any) -> None:
    expected = run.infer({"image": images, "clap_threshold": 0.7})
    assert_equal(run.infer({"image": images, "clap_threshold": value}), expected)


@pytest.mark.parametrize("name", ["clap_threshold", "gbm_threshold"])
@pytest.mark.parametrize("value", [np.nan, np.zeros(1, np.float32), np.zeros((2, 2)), [0.5, 0.6]])
def test_thresholds_are_one_number(run: Runner, images: np.ndarray, name: str, value: Any) -> None:
    with pytest.raises(BundleError, match=f"{name} is one number"):
        run.infer({"image": images, name: value})


def test_an_infinite_threshold_merges_nothing(run: Runner, images: np.ndarray) -> None:
    found = run.infer({"image": images, "clap_threshold": np.inf, "gbm_threshold": np.inf}, ["token_counts"])
    assert found["token_counts"].tolist() == [[64, 64]] * 3


# --------------------------------------------------------------------------------------------------------- bad calls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.astype(np.float32), "expected image uint8 .* got float32"),
        (lambda x: x.astype(np.int64), "got int64"),
        (lambda x: x[0], "got uint8 .3, 128, 128."),
        (lambda x: x[..., None], "128, 1"),
        (lambda x: x[:, :1], "3, 1, 128, 128"),
        (lambda x: x[:, :, :64], "3, 3, 64, 128"),
        (lambda x: x.transpose(0, 2, 3, 1), "3, 128, 128, 3"),
        (lambda x: x[:0], "a batch of 0, this bundle takes 1 to 8"),
        (lambda x: np.concatenate([x, x, x]), "a batch of 9, this bundle takes 1 to 8"),
    ],
    ids=["float", "int64", "rank_3", "rank_5", "grey", "height", "channels_last", "batch_0", "batch_9"],
)
def test_images_that_do_not_fit(run: Runner, images: np.ndarray, change: Any, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        run.infer({"image": change(images)})


def test_unknown_and_missing_inputs(run: Runner, images: np.ndarray) -> None:
    with pytest.raises(BundleError, match="no input 'images': choose from image, clap_threshold, gbm_threshold"):
        run.infer({"images": images})
    with pytest.raises(BundleError, match="'image' is missing"):
        run.infer({"clap_threshold": np.float32(1)})


@pytest.mark.parametrize(
    ("outputs", "message"), [(["labels"], "no output 'labels'"), (["scores", "x"], "no output 'x'"), ([], "no output")]
)
def test_unknown_outputs(run: Runner, images: np.ndarray, outputs: list[str], message: str) -> None:
    with pytest.raises(BundleError, match=f"{message}.*choose from scores, token_counts, token_map_clap_1"):
        run.infer({"image": images}, outputs)


def test_an_error_leaves_the_runner_usable(run: Runner, images: np.ndarray) -> None:
    before = run.infer({"image": images})
    with pytest.raises(BundleError):
        run.infer({"image": images[:0]})
    assert_equal(run.infer({"image": images}), before)


# ---------------------------------------------------------------------------------------------------- life of a runner


def test_a_closed_runner_refuses_and_opens_again(built: Any, images: np.ndarray) -> None:
    runtime, bundle = built
    closed = runner(bundle, runtime)
    with pytest.raises(RuntimeUnavailableError, match=f"the {runtime} runner is closed"):
        closed.infer({"image": images})
    with pytest.raises(RuntimeUnavailableError, match=f"the {runtime} runner is closed"):
        closed.infer_device({"image": on_device(closed, images)})
    with closed as run:
        first = run.infer({"image": images})
    with pytest.raises(RuntimeUnavailableError, match="closed"):
        closed.infer({"image": images})
    with closed as run:
        assert_equal(run.infer({"image": images}), first)


def test_an_exception_closes_the_runner(built: Any, images: np.ndarray) -> None:
    runtime, bundle = built
    opened = runner(bundle, runtime)
    with pytest.raises(KeyError), opened:
        raise KeyError
    with pytest.raises(RuntimeUnavailableError, match="closed"):
        opened.infer({"image": images})


def test_the_device_can_be_named(built: Any, images: np.ndarray) -> None:
    runtime, bundle = built
    for device in row_of(runtime).devices:
        if device == "cpu" or torch.cuda.is_available():
            with runner(bundle, runtime, device) as run:
                assert run.device.type == device
                assert run.infer({"image": images})["token_counts"].shape == (3, 2)
    for device in {"cpu", "cuda", "gpu", "cuda:x", "mps"} - set(row_of(runtime).devices):
        with pytest.raises(RuntimeUnavailableError, match=f"{runtime} executes on .*, got '{device}'"):
            runner(bundle, runtime, device)


def test_two_runners_at_once(built: Any, images: np.ndarray) -> None:
    runtime, bundle = built
    with runner(bundle, runtime) as one, runner(bundle, runtime) as other:
        assert_equal(one.infer({"image": images}), other.infer({"image": images}))


# ------------------------------------------------------------------------------------------------------ whose arrays


def test_calls_repeat(run: Runner, images: np.ndarray) -> None:
    names = ["scores", "token_counts", *MAPS]
    first = run.infer({"image": images}, names)
    for _ in range(3):
        assert_equal(run.infer({"image": images}, names), first)


def test_results_belong_to_the_caller(run: Runner, images: np.ndarray) -> None:
    """Writing into them, or calling again, changes nothing for the other side."""
    names = ["scores", "token_counts", *MAPS]
    first = run.infer({"image": images}, names)
    kept = {name: value.copy() for name, value in first.items()}
    run.infer({"image": images[::-1]}, names)
    assert_equal(first, kept)
    for value in first.values():
        assert value.flags.writeable
        value[...] = 7
    assert_equal(run.infer({"image": images}, names), kept)


@pytest.mark.filterwarnings("error")
def test_images_are_read_and_not_kept(run: Runner, images: np.ndarray) -> None:
    """Views, read-only arrays and arrays that change afterwards."""
    expected = run.infer({"image": images})
    view = np.ascontiguousarray(images.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    assert_equal(run.infer({"image": view}), expected)
    images.flags.writeable = False
    assert_equal(run.infer({"image": images}), expected)
    changing = images.copy()
    outputs = run.infer({"image": changing})
    changing[...] = 0
    assert_equal(outputs, expected)


def test_threads_get_their_own_results(run: Runner, blob_images: Any) -> None:
    """Eight threads, different images, batches and thresholds."""
    images = blob_images(8)
    feeds = [{"image": images[i : i + 1 + i % 2], "clap_threshold": np.float32(0.5 + 0.05 * i)} for i in range(7)] * 3
    names = ["scores", "token_counts", *MAPS]
    expected = [run.infer(feed, names) for feed in feeds]
    with ThreadPoolExecutor(8) as pool:
        for found, wanted in zip(pool.map(lambda feed: run.infer(feed, names), feeds), expected, strict=True):
            assert_equal(found, wanted)
