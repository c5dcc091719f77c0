"""Trained checkpoints on real photos against what the published code gave; data that does not ship with the project."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from algm_deploy.deployment import export


@pytest.fixture(scope="module")
def benchmark(root_dir: Path) -> ModuleType:
    """benchmarks/real_checkpoints.py, which makes the table of the README."""
    spec = importlib.util.spec_from_file_location("real_checkpoints", root_dir / "benchmarks" / "real_checkpoints.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.usefixtures("untranslated")
@pytest.mark.parametrize("checkpoint", ["segmenter_vit_s16_camvid", "segmenter_vit_s16_camvid_algm"])
def test_published_outputs_are_reproduced(benchmark: ModuleType, shared_dir: Path, checkpoint: str) -> None:
    (found,) = benchmark.measure(shared_dir, checkpoint, ("torch",))
    assert found.clap_counts_equal == found.windows == 20
    assert found.gbm_count_difference_max <= 1
    # Rounding, another on every kind of processor, may order windows either way; the order decides what GBM may merge.
    assert found.maps_equal >= 16
    assert found.maps_unexplained == 0
    assert found.label_agreement_mean > 0.999


@pytest.mark.slow
def test_onnxruntime_reproduces_them_too(benchmark: ModuleType, shared_dir: Path) -> None:
    (found,) = benchmark.measure(shared_dir, "segmenter_vit_s16_camvid_algm", ("onnxruntime-cpu",))
    assert found.clap_counts_equal == found.windows
    assert found.gbm_count_difference_max <= 2
    assert found.maps_equal >= 16
    assert found.maps_unexplained == 0
    assert found.label_agreement_mean > 0.999


@pytest.mark.slow
@pytest.mark.usefixtures("untranslated")
def test_another_order_of_tokens_is_not_explained_by_rounding(
    benchmark: ModuleType, shared_dir: Path, tmp_path: Path
) -> None:
    """GBM splits tokens by their place, so it merges others; in this window no two similarities are near each other."""
    folder = shared_dir / "models" / "segmenter_vit_s16_camvid"
    bundle = export(folder, tmp_path / "bundle", benchmark.RECIPE, {"merging.order": "raster"}).bundle
    golden = benchmark.Golden(*(each[1:2] for each in vars(benchmark.Golden.read(folder / "golden.npz")).values()))
    windows = benchmark.windows_of(golden, shared_dir / "data" / "camvid" / "images" / "test", bundle.recipe)
    found = benchmark.agreement("in raster order", bundle, "torch", golden, windows)
    assert found.clap_counts_equal == found.windows == 1
    assert found.maps_unexplained == 1
