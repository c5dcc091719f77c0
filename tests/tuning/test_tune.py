"""`algm-deploy tune` from flags to a recipe, a page and an exit code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from algm_deploy.bundle.records import Link, Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli import main
from algm_deploy.recipe.reading import recipe


def tune(search: str, bundle: Bundle, output: Path, *flags: str, data: Path | None = None) -> int:
    given = [] if data is None else ["--data", str(data), "--dataset", "folder"]
    return main(["tune", search, str(bundle.path), "-o", str(output), *flags, *given])


def found(bundle: Bundle, title: str) -> Any:
    """The record of this title, as it lies on the disk."""
    return next(one for one in Bundle.open(bundle.path).manifest.tunings if one.title == title)


TORCH = ("--runtime", "torch")
ALL = (*TORCH, "--drop", "100")  # a drop of 100 points allows everything


def test_the_rule_writes_a_recipe_and_a_page(
    bundle: Bundle, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rule.toml"
    assert tune("rule", bundle, output, "--layers", "all", data=photos) == 0
    text = capsys.readouterr().out
    tau = recipe(str(output)).merging.clap_threshold
    assert f"clap_threshold {tau:.4f}" in text
    assert output.read_text().startswith("# By algm-deploy tune")
    page = output.with_suffix(".html").read_text()
    assert page.count('<svg class="plot"') == 3
    assert "same class" in page
    assert found(bundle, "Threshold by the rule").clap_threshold == pytest.approx(tau, abs=5e-5)


def test_the_rule_needs_no_labels(
    bundle: Bundle, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ((), ("--data", str(photos), "--images", str(photos / "images"))):
        assert tune("rule", bundle, tmp_path / "a.toml", *flags) == 2
        assert "expected either --images with photos or --data with a data set" in capsys.readouterr().err
    with_labels, without = tmp_path / "a.toml", tmp_path / "b.toml"
    assert tune("rule", bundle, with_labels, data=photos) == 0
    assert tune("rule", bundle, without, "--images", str(photos / "images")) == 0
    assert recipe(str(with_labels)).merging == recipe(str(without)).merging
    assert "photos without labels, 4 images" in capsys.readouterr().out


def test_an_aim_is_met_and_the_recipe_says_so(
    bundle: Bundle, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "star.toml"
    flags = (*TORCH, "--aim", "gmacs", "--target", "0.016", "--range", "0.5", "1", "0.1")
    assert tune("threshold", bundle, output, *flags, data=photos) == 0
    text = capsys.readouterr().out
    tau = recipe(str(output)).merging.clap_threshold
    assert f"clap_threshold {tau:g} to merge least at no more than 0.016 GMACs" in text
    assert "tuned on first half of a folder of pictures, 2 images" in text
    assert "second half of a folder of pictures, held out" in text
    assert "tokens of a window" in output.with_suffix(".html").read_text()
    evaluations = Bundle.open(bundle.path).manifest.evaluations
    assert {one.split for one in evaluations} == {"all-first-half", "all-second-half"}


def test_throughput_is_an_aim_of_verified_bundles(
    bundle: Bundle, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "fast.toml"
    flags = (*TORCH, "--aim", "throughput", "--target", "0.001", "--range", "0.9", "1", "0.1")
    assert tune("threshold", bundle, output, *flags, data=photos) == 2
    assert "verify" in capsys.readouterr().err
    link = Link(number=1, name="network", passed=True, measured="", gate="")
    bundle.record(Parity(runtime="torch", images=1, batches=(1,), links=(link,)))
    assert tune("threshold", bundle, output, *flags, data=photos) == 0
    assert "img/s" in capsys.readouterr().out
    assert recipe(str(output)).merging.clap_threshold == 1
    assert "accuracy against throughput" in output.with_suffix(".html").read_text()
    assert "times as fast" in output.with_suffix(".html").read_text()
    speeds = [(one.runtime, one.protocol, one.variant) for one in Bundle.open(bundle.path).manifest.speeds]
    assert [speeds.count(("torch", "mixed", variant)) for variant in ("dense", "merged")] == [2, 2]


def test_a_curve_measures_every_candidate_on_both_parts(
    bundle: Bundle, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "curve.toml"
    flags = (*ALL, "--curve", "--limit", "4", "--values", "1.01,0.8,0.95,0.8")
    assert tune("threshold", bundle, output, *flags, "--slice", "[0-9]", data=photos) == 2
    assert "got 4 in 4 slices: take more photos" in capsys.readouterr().err  # a photo a slice has no halves
    assert tune("threshold", bundle, output, *flags, data=photos) == 0
    told = capsys.readouterr()
    record = found(bundle, "CLAP threshold, aim: reference")
    for part in (record.tuned_on, record.held_out):
        assert [one.value for one in part.candidates] == [0.8, 0.95, 1.01]
        tokens = [one.tokens[0].mean for one in part.candidates]
        assert tokens == sorted(tokens)
        assert tokens[-1] == 64
    assert [told.err.count(f"tau {value}: mIoU") for value in ("0.8", "0.95", "1.01")] == [2, 2, 2]
    assert "held out, every measured candidate" in told.out
    with Image.open(output.with_suffix(".png")) as picture:
        assert picture.width > 4 * 500  # a photo and three thresholds side by side
    page = output.with_suffix(".html").read_text()
    assert page.count("<img") == 2 * 4
    assert "img-src data:" in page


def test_photos_that_are_tuned_on_are_not_held_out(
    bundle: Bundle, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "split"
    for kind in ("images", "labels"):
        for index in range(4):
            place = root / kind / ("val" if index < 2 else "test") / f"{index}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(photos / kind / f"{index}.png", place)
    shutil.copy(photos / "classes.json", root)
    flags = (*ALL, "--values", "0.8,1", "--split", "val")
    output = tmp_path / "star.toml"
    for parts in (("--held-out", "val"), ("--limit", "1", "--held-out", "val", "--held-out-limit", "2")):
        assert tune("threshold", bundle, output, *flags, *parts, data=root) == 2
        assert "in both, first 0: name another split as --held-out" in capsys.readouterr().err
    assert tune("threshold", bundle, output, *flags, "--held-out", "test", data=root) == 0
    record = found(bundle, "CLAP threshold, aim: reference")
    assert (record.tuned_on.split, record.held_out.split) == ("val", "test")
    shutil.copy(root / "images" / "val" / "1.png", root / "images" / "test" / "3.png")  # a copy by another name
    assert tune("threshold", bundle, output, *flags, "--held-out", "test", data=root) == 2
    assert "got 1 in both, first 3: name another split" in capsys.readouterr().err


def test_a_bundle_as_reference_is_reported_held_out_too(
    bundle: Bundle, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(bundle.path, tmp_path / "other")
    flags = (*ALL, "--reference", str(other), "--values", "0.8,1")
    assert tune("threshold", bundle, tmp_path / "star.toml", *flags, data=photos) == 0
    assert "reference (dense other)" in capsys.readouterr().out


def test_variants_are_tuned_in_pytorch_and_nowhere_else(
    bundle: Bundle, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "variant.toml"
    flags = ("--drop", "100", "--values", "0.8,1", "--variant", "clap_feature=value")
    for wrong in (("--runtime", "onnxruntime-cpu"), (*TORCH, "--time")):
        assert tune("threshold", bundle, output, *flags, *wrong, data=photos) == 2
        assert "expected --runtime torch and no times" in capsys.readouterr().err
    assert tune("threshold", bundle, output, *flags, *TORCH, data=photos) == 0
    assert not output.exists()  # no recipe can say what was measured
    record = found(bundle, "CLAP threshold, aim: reference, clap_feature=value")
    assert (record.variant, record.pictured) == (("clap_feature=value",), None)
    assert not output.with_suffix(".png").exists()
    with pytest.raises(SystemExit, match="2"):
        tune("rule", bundle, output, "--variant", "after_mlp=true", data=photos)


def test_attention(bundle: Bundle, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "attention.html"
    assert tune("attention", bundle, output, "--tau", "0.95", "--gbm", "2", data=photos) == 0
    assert "attention % merged" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.toml"))
    assert output.read_text().count('<svg class="plot"') == 1
    record = found(bundle, "Attention by class")
    assert record.windows == 4
    assert record.thresholds == {"clap_threshold": 0.95, "gbm_threshold": 2}


def test_without_an_answer_the_exit_code_is_1_and_no_recipe_appears(
    bundle: Bundle, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "none.toml"
    flags = (*TORCH, "--reference", "99", "--range", "0.8", "1", "0.1")
    assert tune("threshold", bundle, output, *flags, data=photos) == 1
    text = capsys.readouterr().out
    assert "no clap_threshold qualifies to merge most while mIoU stays at or above 99.00 %; nearest:" in text
    assert not output.exists()
    assert output.with_suffix(".html").exists()


@pytest.mark.parametrize("reference", ["dense", "clap", "BUNDLE"])
def test_references(reference: str, bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    given = str(bundle.path) if reference == "BUNDLE" else reference
    output = tmp_path / "star.toml"
    flags = (*ALL, "--reference", given, "--range", "0.8", "1", "0.2")
    assert tune("threshold", bundle, output, *flags, data=photos) == 0
    assert recipe(str(output)).merging.clap_threshold == 0.8


@pytest.mark.parametrize(
    ("search", "output"),
    [("rule", "tuned.html"), ("rule", "nowhere/tuned.toml"), ("attention", "attention.toml")],
)
def test_the_output_is_checked_before_the_work(
    search: str, output: str, bundle: Bundle, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(search, bundle, tmp_path / output, data=photos) == 2
    suffix = "html" if search == "attention" else "toml"
    assert f"expected a .{suffix} file in a folder that exists as --output" in capsys.readouterr().err
    assert not Bundle.open(bundle.path).manifest.tunings


def test_positions(bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    output = tmp_path / "layers.toml"
    assert tune("positions", bundle, output, "--drop", "100", "--tau", "0.95", data=photos) == 0
    merging = recipe(str(output)).merging
    assert merging.gbm_layers == (2,)
    assert merging.clap_threshold == 0.95
    assert found(bundle, "GBM in block 2").recipe_layers == (3,)


def test_positions_need_scores(
    labels_bundle: Bundle, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("positions", labels_bundle, tmp_path / "layers.toml", data=photos) == 2
    assert "export it with --scores" in capsys.readouterr().err


def test_the_other_threshold_stays_as_it_is_given(bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    output = tmp_path / "gbm.toml"
    flags = (*ALL, "--knob", "gbm", "--tau", "0.95", "--values=-4,2")
    assert tune("threshold", bundle, output, *flags, data=photos) == 0
    merging = recipe(str(output)).merging
    assert (merging.clap_threshold, merging.gbm_threshold) == (0.95, -4)
    record = found(bundle, "GBM threshold, aim: reference")
    assert (record.knob, record.recipe_value) == ("gbm_threshold", 1)
    merged = [one for one in Bundle.open(bundle.path).manifest.evaluations if one.thresholds["gbm_threshold"] != "inf"]
    assert [one.thresholds["clap_threshold"] for one in merged] == pytest.approx([0.95] * len(merged))
    assert {one.thresholds["gbm_threshold"] for one in merged} == {-4, 1, 2}


@pytest.mark.parametrize("search", ["rule", "threshold", "precision", "budget", "positions", "attention"])
def test_a_search_takes_the_flags_it_reads(search: str, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = {
        "rule": ["--runtime", "--held-out", "--tau", "--variant", "--slice", "--count"],
        "threshold": ["--images", "--layers", "--count"],
        "precision": ["--images", "--layers", "--count", "--variant", "--aim", "--target", "--time"],
        "budget": ["--runtime", "--images", "--layers", "--count", "--knob", "--gbm"],
        "positions": ["--runtime", "--aim", "--target", "--images", "--knob", "--curve", "--gbm"],
        "attention": ["--runtime", "--held-out", "--reference", "--images", "--variant", "--slice", "--count"],
    }
    bundles = ["bundle", "other"] if search == "precision" else ["bundle"]
    for flag in (*foreign[search], "--lim"):  # flags are not guessed from their beginnings either
        with pytest.raises(SystemExit, match="2"):
            main(["tune", search, *bundles, "--data", "photos", f"{flag}=1"])
        assert f"unrecognized arguments: {flag}=1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["tune", search, "--help"])
    assert not [flag for flag in foreign[search] if f"{flag} " in capsys.readouterr().out]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--aim", "gmacs"), "expected --target with --aim gmacs"),
        (("--aim", "best", "--drop", "1"), "expected no --drop with --aim best"),
        (("--aim", "best", "--reference", "dense"), "expected no --reference with --aim best"),
        (("--target", "3"), "expected no --target with --aim reference"),
        (("--reference", "perfect"), "got 'perfect'"),
        (("--aim", "best", "--range", "1", "0", "0.1"), "expected a range"),
        (("--aim", "best", "--tau", "0.9"), "expected no --tau for a bundle whose plan is searched for its clap"),
        ((*TORCH, "--aim", "best", "--variant", "colour=red"), "expected a variant of merging"),
    ],
)
def test_bad_input(
    flags: tuple[str, ...],
    message: str,
    bundle: Bundle,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tune("threshold", bundle, tmp_path / "none.toml", *flags, data=photos) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("none*"))


def test_values_are_finite(bundle: Bundle, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tune("threshold", bundle, tmp_path / "none.toml", "--values", "0.9,inf", data=photos)
    assert "expected a finite number, got 'inf'" in capsys.readouterr().err


def test_a_search_and_data_are_asked_for(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    for words, missing in (([], "SEARCH"), (["threshold", str(bundle.path)], "--data")):
        with pytest.raises(SystemExit, match="2"):
            main(["tune", *words])
        assert f"the following arguments are required: {missing}" in capsys.readouterr().err
