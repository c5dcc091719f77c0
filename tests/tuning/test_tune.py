"""`algm-deploy tune` from flags to a recipe, a page and an exit code."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from algm_deploy.bundle.store import Bundle
from algm_deploy.cli import main
from algm_deploy.recipe.reading import read_recipe


@pytest.fixture
def bundle(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_bundle.path, tmp_path / "bundle")


@pytest.fixture
def photos(blob_images: Callable[[int], np.ndarray], tmp_path: Path) -> Path:
    """Four photos whose labels are what the pixels say, which the tiny network knows nothing about."""
    root = tmp_path / "photos"
    for index, pixels in enumerate(blob_images(4)):
        for kind, content in (("images", pixels.transpose(1, 2, 0)), ("labels", pixels[0] // 24)):
            path = root / kind / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(content).save(path)
    names = ", ".join(f'"{index}"' for index in range(11))
    (root / "classes.json").write_text(f'{{"names": [{names}]}}')
    return root


def tune(bundle: Path, output: Path, *flags: str, data: Path | None = None) -> int:
    given = [] if data is None else ["--data", str(data), "--dataset", "folder", "--runtime", "torch"]
    return main(["tune", str(bundle), "-o", str(output), *flags, *given])


def test_the_rule_writes_a_recipe_and_a_page(
    bundle: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rule.toml"
    assert tune(bundle, output, "--rule", "--layers", "all", data=photos) == 0
    text = capsys.readouterr().out
    tau = read_recipe(output).merging.clap_threshold
    assert f"clap_threshold {tau:.4f}" in text
    assert output.read_text().startswith("# By algm-deploy tune")
    page = output.with_suffix(".html").read_text()
    assert page.count('<svg class="plot"') == 3
    assert "same class" in page
    recorded = Bundle.open(bundle).manifest["tuning"]["Threshold by the rule"]
    assert recorded["clap_threshold"] == pytest.approx(tau, abs=5e-5)


def test_the_rule_needs_no_labels(
    bundle: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(bundle, tmp_path / "a.toml", "--rule") == 2
    assert "expected --data with the root folder of a labelled data set, or --images with photos, got none" in (
        capsys.readouterr().err
    )
    with_labels, without = tmp_path / "a.toml", tmp_path / "b.toml"
    assert tune(bundle, with_labels, "--rule", data=photos) == 0
    assert tune(bundle, without, "--rule", "--images", str(photos / "images")) == 0
    assert read_recipe(with_labels).merging == read_recipe(without).merging


def test_an_aim_is_met_and_the_recipe_says_so(
    bundle: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "star.toml"
    flags = ("--objective", "gmacs", "--target", "0.016", "--range", "0.5", "1", "0.1")
    assert tune(bundle, output, *flags, data=photos) == 0
    text = capsys.readouterr().out
    tau = read_recipe(output).merging.clap_threshold
    assert f"clap_threshold {tau:g} to merge least at no more than 0.016 GMACs" in text
    assert "tuned on first half of a folder of pictures, 2 images" in text
    assert "second half of a folder of pictures, held out" in text
    assert "tokens of a window" in output.with_suffix(".html").read_text()
    keys = Bundle.open(bundle).manifest["evaluation"]
    assert any("all-first-half" in key for key in keys)
    assert not any(re.search(r"folder all ", key) for key in keys)


def test_throughput_is_an_aim_of_verified_bundles(
    bundle: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "fast.toml"
    flags = ("--objective", "throughput", "--target", "0.001", "--range", "0.9", "1", "0.1")
    assert tune(bundle, output, *flags, data=photos) == 2
    assert "verify" in capsys.readouterr().err
    manifest = Bundle.open(bundle)
    manifest.update({"parity": {"torch": {"passed": True, "images": 1, "batches": [1], "links": []}}})
    assert tune(bundle, output, *flags, data=photos) == 0
    assert "img/s" in capsys.readouterr().out
    assert read_recipe(output).merging.clap_threshold == 1
    assert "accuracy against throughput" in output.with_suffix(".html").read_text()
    assert "times as fast" in output.with_suffix(".html").read_text()
    speeds = Bundle.open(bundle).manifest["speed"]
    assert [sum(f"torch mixed {variant}" in key for key in speeds) for variant in ("dense", "merged")] == [2, 2]


def test_a_curve_measures_every_candidate_on_both_parts(
    bundle: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "curve.toml"
    flags = ("--objective", "reference", "--drop", "100", "--curve", "--slice", "[0-9]", "--limit", "4")
    assert tune(bundle, output, *flags, "--values", "1.01", "0.8", "0.95", "0.8", data=photos) == 2
    assert "got 4 in 4 slices: take more photos" in capsys.readouterr().err  # a photo a slice has no halves
    assert tune(bundle, output, *flags[:5], "--values", "1.01", "0.8", "0.95", "0.8", data=photos) == 0
    told = capsys.readouterr()
    record = Bundle.open(bundle).manifest["tuning"]["CLAP threshold, aim: reference"]
    for part in ("points", "held_out_points"):
        assert [point["value"] for point in record[part]] == [0.8, 0.95, 1.01]
        tokens = [point["tokens_after_clap_mean"] for point in record[part]]
        assert tokens == sorted(tokens)
        assert tokens[-1] == 64
    assert [told.err.count(f"clap_threshold {value}: mIoU") for value in ("0.8", "0.95", "1.01")] == [2, 2, 2]
    assert "held out, every measured candidate" in told.out
    with Image.open(output.with_suffix(".png")) as picture:
        assert picture.width > 4 * 500  # a photo and three thresholds side by side
    page = output.with_suffix(".html").read_text()
    assert page.count("<img") == 2 * 4
    assert "img-src data:" in page


def test_photos_that_are_tuned_on_are_not_held_out(
    bundle: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "split"
    for kind in ("images", "labels"):
        for index in range(4):
            place = root / kind / ("val" if index < 2 else "test") / f"{index}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(photos / kind / f"{index}.png", place)
    shutil.copy(photos / "classes.json", root)
    flags = ("--objective", "reference", "--drop", "100", "--values", "0.8", "1", "--split", "val")
    output = tmp_path / "star.toml"
    for parts in (("--held-out", "val"), ("--limit", "1", "--held-out", "val", "--held-out-limit", "2")):
        assert tune(bundle, output, *flags, *parts, data=root) == 2
        assert "in both, first 0: name another split as --held-out" in capsys.readouterr().err
    assert tune(bundle, output, *flags, "--held-out", "test", data=root) == 0
    record = Bundle.open(bundle).manifest["tuning"]["CLAP threshold, aim: reference"]
    assert (record["tuned_on"]["split"], record["held_out"]["dense"]["split"]) == ("val", "test")
    shutil.copy(root / "images" / "val" / "1.png", root / "images" / "test" / "3.png")  # a copy by another name
    assert tune(bundle, output, *flags, "--held-out", "test", data=root) == 2
    assert "got 1 in both, first 3: name another split" in capsys.readouterr().err


def test_a_bundle_as_reference_is_reported_held_out_too(
    bundle: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(bundle, tmp_path / "other")
    flags = ("--objective", "reference", "--reference", str(other), "--drop", "100", "--values", "0.8", "1")
    assert tune(bundle, tmp_path / "star.toml", *flags, data=photos) == 0
    assert "reference (dense other)" in capsys.readouterr().out


def test_variants_are_tuned_in_pytorch_and_nowhere_else(
    bundle: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "variant.toml"
    flags = ("--objective", "reference", "--drop", "100", "--values", "0.8", "1", "--variant", "clap_feature=value")
    assert tune(bundle, output, *flags, "--runtime", "onnxruntime-cpu", "--data", str(photos)) == 2
    assert "expected --runtime torch" in capsys.readouterr().err
    assert tune(bundle, output, *flags, data=photos) == 0
    assert not output.exists()  # no recipe can say what was measured
    assert "CLAP threshold, aim: reference, clap_feature=value" in Bundle.open(bundle).manifest["tuning"]
    assert tune(bundle, output, "--rule", "--variant", "after_mlp=true", data=photos) == 2


def test_attention(bundle: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "attention.toml"
    assert tune(bundle, output, "--attention", "--tau", "0.9", data=photos) == 0
    assert "attention % merged" in capsys.readouterr().out
    assert not output.exists()
    assert output.with_suffix(".html").read_text().count('<svg class="plot"') == 1
    assert Bundle.open(bundle).manifest["tuning"]["Attention by class"]["windows"] == 4


def test_without_an_answer_the_exit_code_is_1_and_no_recipe_appears(
    bundle: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "none.toml"
    flags = ("--objective", "reference", "--reference", "99", "--range", "0.8", "1", "0.1")
    assert tune(bundle, output, *flags, data=photos) == 1
    text = capsys.readouterr().out
    assert "no clap_threshold qualifies to merge most while mIoU stays at or above 99.00 %; nearest:" in text
    assert not output.exists()
    assert output.with_suffix(".html").exists()


@pytest.mark.parametrize("reference", ["dense", "clap", "BUNDLE"])
def test_references(reference: str, bundle: Path, photos: Path, tmp_path: Path) -> None:
    given = str(bundle) if reference == "BUNDLE" else reference
    flags = ("--objective", "reference", "--reference", given, "--drop", "100", "--range", "0.8", "1", "0.2")
    output = tmp_path / "star.toml"
    assert tune(bundle, output, *flags, data=photos) == 0
    assert read_recipe(output).merging.clap_threshold == 0.8  # a drop of 100 points allows everything


@pytest.mark.parametrize("output", ["tuned.html", "nowhere/tuned.toml"])
def test_the_output_is_checked_before_the_work(
    output: str, bundle: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(bundle, tmp_path / output, "--rule", data=photos) == 2
    assert "expected a .toml file" in capsys.readouterr().err
    assert "tuning" not in Bundle.open(bundle).manifest


def test_positions(bundle: Path, photos: Path, tmp_path: Path) -> None:
    output = tmp_path / "layers.toml"
    assert tune(bundle, output, "--positions", "--drop", "100", "--tau", "0.95", data=photos) == 0
    merging = read_recipe(output).merging
    assert merging.gbm_layers == (2,)
    assert merging.clap_threshold == 0.95


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--objective", "best"), "expected --data"),
        (("--objective", "gmacs"), "expected --target"),
        (("--objective", "reference", "--reference", "perfect"), "got 'perfect'"),
        (("--objective", "best", "--range", "1", "0", "0.1"), "expected a range"),
        (("--objective", "best", "--values", "0.9", "inf"), "expected finite --values"),
        (("--objective", "best", "--runtime", "torch", "--variant", "colour=red"), "expected a variant of merging"),
    ],
)
def test_bad_input(
    flags: tuple[str, ...],
    message: str,
    bundle: Path,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = None if "--data" in message else photos
    assert tune(bundle, tmp_path / "none.toml", *flags, data=data) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("none*"))
