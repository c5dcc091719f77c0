import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from painter.scenes import CLASSES, PALETTE, SLICES, scene, slice_name
from PIL import Image

from algm_deploy.evaluation.datasets import Dataset, open_dataset
from algm_deploy.merging import insert_merging, merge_inputs
from algm_deploy.models.checkpoints.reading import Checkpoint, read_checkpoint
from algm_deploy.models.checkpoints.variant import settings_from_variant
from algm_deploy.models.checkpoints.weights import state_dict_for
from algm_deploy.models.scores import upsample_scores
from algm_deploy.models.segmenter import Segmenter
from algm_deploy.package_data import DEMO_ASSETS
from algm_deploy.recipe.plan import DENSE
from algm_deploy.recipe.reading import recipe, recipe_settings, resolve

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return read_checkpoint(DEMO_ASSETS)


@pytest.fixture(scope="module")
def validation() -> Dataset:
    return open_dataset("folder", DEMO_ASSETS, slice_by="folder")


@pytest.fixture(scope="module")
def network(checkpoint: Checkpoint) -> Segmenter:
    facts = recipe("demo").network
    model = Segmenter(facts)
    model.load_state_dict(state_dict_for(facts, checkpoint).state_dict)
    return model.eval()


def photo(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def predictions(model: Segmenter, validation: Dataset, plan_threshold: float, merged: bool) -> tuple[np.ndarray, list]:
    demo = recipe("demo")
    ready = insert_merging(model, demo.merging if merged else DENSE)
    labels, counts = [], []
    with torch.no_grad():
        for sample in validation.samples:
            image = torch.from_numpy(photo(sample.image_path).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
            result = ready(image, merge_inputs(plan_threshold, 1.0))
            scores = upsample_scores(result, demo.network.grid, demo.network.image_size)
            labels.append(scores.argmax(1)[0].numpy())
            counts.append([int(stage.length[0]) - 1 for stage in result.stages])
    return np.stack(labels), counts


def miou(truth: np.ndarray, guess: np.ndarray) -> float:
    pairs = np.bincount(truth.ravel().astype(int) * len(CLASSES) + guess.ravel(), minlength=len(CLASSES) ** 2)
    confusion = pairs.reshape(len(CLASSES), -1)
    hits = confusion.diagonal()
    return float(np.mean(100 * hits / (confusion.sum(0) + confusion.sum(1) - hits)))


def test_sizes() -> None:
    assert (DEMO_ASSETS / "checkpoint.pth").stat().st_size <= 8 * MEGABYTE
    assert sum(path.stat().st_size for path in DEMO_ASSETS.rglob("*.png")) <= 3.5 * MEGABYTE


def test_checkpoint_is_16_bit_and_the_recipe_agrees_with_it(checkpoint: Checkpoint) -> None:
    assert {value.dtype for value in checkpoint.state_dict.values()} == {torch.float16}
    assert all(bool(value.isfinite().all()) for value in checkpoint.state_dict.values())
    said = [("variant.yml", settings_from_variant(checkpoint)), ("demo", recipe_settings("demo"))]
    merged, conflicts = resolve(said)
    assert conflicts == ()
    assert merged == recipe("demo")


def test_class_names_are_those_of_the_scenes(validation: Dataset) -> None:
    demo = recipe("demo")
    assert demo.class_names == validation.class_names == CLASSES
    assert demo.palette == validation.palette == PALETTE


def test_pictures_are_the_scenes_of_their_seeds(validation: Dataset) -> None:
    assert len(validation.samples) == 24
    assert {sample.slice for sample in validation.samples} == set(SLICES)
    for sample in validation.samples:
        seed = int(sample.image_path.stem)
        image, label = scene(seed)
        assert sample.slice == slice_name(seed)
        assert np.array_equal(validation.labels_of(sample), label), sample.name
        assert np.abs(photo(sample.image_path).astype(int) - image).mean() < 0.1, sample.name


def test_network_knows_the_scenes_and_merging_costs_little(network: Segmenter, validation: Dataset) -> None:
    """A few pictures lie within some points of the figures for 1000; chance is below 6 %."""
    validation = validation.subset(8)
    truth = np.stack([validation.labels_of(sample) for sample in validation.samples])
    dense, _ = predictions(network, validation, 2.0, merged=False)
    merged, counts = predictions(network, validation, recipe("demo").merging.clap_threshold, merged=True)
    assert miou(truth, dense) > 68
    assert miou(truth, dense) - 3 < miou(truth, merged) < miou(truth, dense) + 1
    after_clap, after_gbm = np.array(counts).T
    assert (after_gbm < after_clap).all()
    assert after_clap.max() - after_clap.min() > 200
    assert 250 < after_gbm.mean() < 500


@pytest.fixture(scope="module")
def package(root_dir: Path) -> ModuleType:
    path = root_dir / "benchmarks" / "demo" / "package.py"
    spec = importlib.util.spec_from_file_location("demo_package", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_rendered_from_the_record(package: ModuleType) -> None:
    record = json.loads(package.RECORD.read_text())
    assert package.rendered(record) in package.README.read_text()
    assert package.model_card(record) == package.CARD.read_text()
    assert sorted(package.validation_seeds()) == sorted(int(path.stem) for path in DEMO_ASSETS.glob("images/*/*.png"))
