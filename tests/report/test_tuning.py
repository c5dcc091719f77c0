"""What tuning found, as a page of its own and as a section of the report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from algm_deploy.bundle.manifest import manifest_of
from algm_deploy.bundle.records import (
    AttentionTuning,
    BlockSimilarity,
    Candidate,
    ClassSimilarity,
    HeldOut,
    MergeTokens,
    PairSimilarity,
    Point,
    RuleTuning,
    ThresholdTuning,
    TokenHistograms,
    TunedOn,
)
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, ImageError
from algm_deploy.pictures.shipped import scene
from algm_deploy.report.gallery import Photo, draw_gallery, draw_thresholds, threshold_sheet
from algm_deploy.report.html import render
from algm_deploy.report.page import report_page
from algm_deploy.report.tuning import tuning_page, tuning_text, worst_slice, write_tuning

OLD = Path(__file__).resolve().parents[1] / "data" / "manifests" / "schema1_tuned.json"
CLAP = (MergeTokens(merge="clap_1", mean=40.0),)
VALUES = (0.5, 0.9, 1.01)
DENSE = Point(miou_percent=71.5, miou_percent_by_slice={"day": 72.0, "dusk": 71.0}, gmacs_per_window_mean=9.0)
POINTS = {
    value: {
        "miou_percent": 66 + 6 * value,
        "miou_percent_by_slice": {"day": 72.0, "dusk": 60 + 12 * value},
        "gmacs_per_window_mean": 10 * value,
        "tokens": CLAP,
    }
    for value in VALUES
}
CANDIDATES = tuple(Candidate(value=value, **figures) for value, figures in POINTS.items())
THRESHOLD = ThresholdTuning(
    title="CLAP threshold, aim: <best>",
    pictured=("clap_threshold", VALUES),
    knob="clap_threshold",
    recipe_value=0.8,
    aim="best",
    limit=None,
    reached=True,
    marked=CANDIDATES[1],
    token_histograms=TokenHistograms(token_edges=(0, 32, 64), windows_by_merge={"clap_1": (3, 4)}),
    tuned_on=TunedOn(
        dataset="camvid",
        split="val",
        images=7,
        images_by_slice={"day": 3, "dusk": 4},
        dense=DENSE,
        candidates=CANDIDATES,
    ),
    held_out=HeldOut(
        dataset="camvid",
        split="test",
        images=5,
        images_by_slice={"day": 3, "dusk": 2},
        dense=DENSE,
        recipe=Point(**POINTS[0.5]),
        marked=Point(**POINTS[0.9]),
        candidates=CANDIDATES,
    ),
)


def pairs(mean: float) -> PairSimilarity:
    return PairSimilarity(pairs=10, mean=mean, std=0.25)


RULE = RuleTuning(
    title="Threshold by the rule",
    dataset=None,
    split=None,
    images=2,
    clap_threshold=0.75,
    blocks=tuple(
        BlockSimilarity(
            block=block,
            every=pairs(0.5),
            by_class=(
                ClassSimilarity(side=2, same=pairs(0.9), other=None),
                ClassSimilarity(side=None, same=pairs(0.625), other=pairs(0.25)),
            ),
        )
        for block in (1, 2)
    ),
)
ATTENTION = AttentionTuning(
    title="Attention by class",
    dataset="camvid",
    split="test",
    images=1,
    windows=2,
    last_merge=1,
    thresholds={"clap_threshold": 0.9},
    class_names=("sky", "pole", "void"),
    patches_percent=(90, 10, 0),
    tokens_percent=(70, 30, 0),
    attention_dense_percent_by_block=((100, 0, 0), (80, 20, 0)),
    attention_merged_percent_by_block=((100, 0, 0), (75, 25, 0)),
    classes_attended_dense_by_block=(1.0, 1.65),
    classes_attended_merged_by_block=(1.0, 1.75),
)


@pytest.fixture
def photos(tmp_path: Path) -> list[Photo]:
    """A photo of one window, and one that takes two."""
    found = []
    for name, width in (("square", 128), ("wide", 200)):
        Image.fromarray(scene(3)[0][:128, :width]).save(tmp_path / f"{name}.png")
        found.append(Photo(name, tmp_path / f"{name}.png"))
    return found


@pytest.fixture
def tuned(tiny_bundle: Bundle, tmp_path: Path) -> Bundle:
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    for record in (RULE, ATTENTION, THRESHOLD):
        bundle.record(record)
    return Bundle.open(bundle.path)


def test_what_is_stored_reads_back_to_the_same_page(tuned: Bundle, tmp_path: Path) -> None:
    assert tuned.manifest.tunings == (RULE, ATTENTION, THRESHOLD)
    alone = write_tuning(THRESHOLD, "<tiny>", tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h1>&lt;tiny&gt;: CLAP threshold, aim: &lt;best&gt;</h1>" in alone
    assert "<h3>" not in alone
    assert alone.count('<svg class="plot"') == 4
    assert alone.count("<table>") == 3
    assert "What merges" not in alone
    assert "mIoU 71.40 %" in tuning_text(THRESHOLD)
    page = report_page(tuned)
    assert "<h3>CLAP threshold, aim: &lt;best&gt;</h3>" in page
    assert alone[alone.index("<main>") + 6 : alone.index("</main>")].strip() in page


def test_a_search_in_sentences() -> None:
    page = tuning_page(THRESHOLD)
    assert page.lines == (
        "clap_threshold 0.9 to reach the best mIoU: mIoU 71.40 %, 9.00 GMACs per window",
        "tuned on camvid val, 7 images: dense 71.50 %",
        "held out camvid test, 5 images: dense 71.50 %, chosen 71.40 % (-0.10 points, -0.10 where it was tuned); "
        "the weakest slice: dusk (-0.20 points)",
    )
    assert page.tables[-1].header == ("slice", "images", "dense", "recipe (0.8)", "chosen (0.9)")
    assert page.tables[-1].rows[2] == ("dusk", "2", "71.00", "66.00 (-5.00)", "70.80 (-0.20)")
    assert [plot.caption for plot in page.plots] == [
        "accuracy against arithmetic",
        "accuracy by clap_threshold",
        "what merging costs by slice, held out: camvid test, 5 images",
        "tokens of the windows it was tuned on, at the point that is marked",
    ]


def test_the_rule_in_sentences() -> None:
    page = tuning_page(RULE)
    assert page.lines == [
        "clap_threshold 0.7500 = mean + standard deviation of the cosine similarity of 20 pairs of patches after the "
        "attention of blocks 1 to 2, network without merging in fp32, photos without labels, 2 images"
    ]
    assert page.tables[0].rows[1] == ("2", "10", "0.5000", "0.2500", "0.7500")
    assert page.tables[1].header == ("block", "2x2", "global")
    assert page.tables[1].rows[0] == ("1", "0.900 / -", "0.625 / 0.250")
    assert [[one.name for one in plot.series] for plot in page.plots] == [
        ["mean", "mean + standard deviation"],
        ["same class"],  # no pair of two classes in a window of 2x2, no series
        ["2x2, same class", "global, same class", "global, other class"],
    ]


def test_attention_in_sentences() -> None:
    page = tuning_page(ATTENTION)
    assert page.lines[0] == (
        "after the last merge attention is spread over 1.65 classes without merging and 1.75 with it (the exponential "
        "of its entropy, mean of 2 windows and of block 2); CLAP threshold 0.9"
    )
    assert [row[0] for row in page.tables[0].rows] == ["sky", "pole"]  # none of the third class
    assert page.tables[0].rows[1] == ("pole", "10.00", "30.00", "20.00", "25.00", "+25%")


def test_the_worst_slice_is_named() -> None:
    merged = replace(DENSE, miou_percent=70.0, miou_percent_by_slice={"day": 71.0, "dusk": 67.0})
    assert worst_slice(DENSE, merged) == ("dusk", -4)
    unlabelled = {"day": None, "dusk": None}
    assert worst_slice(DENSE, replace(merged, miou_percent_by_slice=unlabelled)) == ("all", -1.5)


def test_what_an_earlier_release_wrote_is_shown() -> None:
    old = json.loads(OLD.read_text())
    for record in manifest_of(old, OLD).tunings:
        before, page = old["tuning"][record.title]["page"], tuning_page(record)
        assert [list(table.header) for table in page.tables] == [header for _, header, _ in before["tables"]]
        assert [[list(row) for row in table.rows] for table in page.tables] == [rows for _, _, rows in before["tables"]]
        assert len(page.plots) == len(before["plots"]) + len(before["counts"])
        if record.title != "Attention by class":
            assert list(page.lines) == before["lines"]
        html = render("tuning.jinja", pages=[page], examples=())
        assert html.count('<svg class="plot"') == len(page.plots)


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.pop(name)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (
            2,
            without("kind"),
            "or precision or budget or positions or attention or page as tunings.2.kind, got None",
        ),
        (2, lambda record: record.update(kind=["rule"]), r"as tunings.2.kind, got \['rule'\]"),
        (2, without("tuned_on"), "expected a table as tunings.2.tuned_on, found none"),
        (2, lambda record: record.update(aim="fast"), "expected reference or best or gmacs or throughput as tunings.2"),
        (2, lambda record: record["marked"].update(value="0.9"), "expected a finite number as tunings.2.marked.value"),
        (2, lambda record: record.update(blocks=1), "expected no entry in tunings.2 .* got 'blocks'"),
        (
            2,
            lambda record: record["token_histograms"].update(windows_by_merge={}),
            "expected a histogram for each merge",
        ),
        (1, lambda record: record.update(last_merge=2), "expected a block after the last merge, got 2 of 2"),
        (1, lambda record: record["patches_percent"].pop(), "expected shares for each block and each class"),
        (0, lambda record: record.update(blocks=[]), "expected at least one block"),
    ],
)
def test_an_edited_record_is_one_sentence(
    tuned: Bundle, index: int, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    file = tuned.path / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest["tunings"][index])
    file.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=f"{message}.*: it was edited, remove that entry"):
        Bundle.open(tuned.path)


def test_thresholds_side_by_side(tiny_bundle: Bundle, photos: list[Photo]) -> None:
    rows = draw_thresholds(tiny_bundle, "torch", photos, *THRESHOLD.pictured, progress=False)
    assert [row.name for row in rows] == ["square", "wide"]
    for row, photo in zip(rows, photos, strict=True):
        first, *merged = row.panels
        assert first.title == photo.name
        assert [panel.title for panel in merged] == [f"clap_threshold {tau}" for tau in ("0.5", "0.9", "1.01")]
        after_clap = [int(panel.subtitle.split()[5].rstrip(",")) for panel in merged]
        assert after_clap == sorted(after_clap)
        assert after_clap[-1] == 64
        assert not np.array_equal(merged[0].picture, merged[2].picture)
    picture = threshold_sheet(rows[1:], "demo: what merges")
    assert picture.width > 4 * rows[1].panels[1].picture.shape[1]


def test_a_gbm_threshold_is_pictured_as_well(tiny_bundle: Bundle, photos: list[Photo]) -> None:
    (row,) = draw_thresholds(tiny_bundle, "torch", photos[:1], "gbm_threshold", (-8, 8), progress=False)
    left = [int(panel.subtitle.split()[-2]) for panel in row.panels[1:]]
    assert left[0] < left[1]


def test_a_photo_that_is_missing_is_named(tiny_bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"absent\.png"):
        draw_thresholds(tiny_bundle, "torch", [Photo("absent", tmp_path / "absent.png")], "clap_threshold", (0.5,))


def test_the_report_shows_a_section_only_where_there_is_tuning(
    tiny_bundle: Bundle, tuned: Bundle, photos: list[Photo]
) -> None:
    assert 'id="tuning"' not in report_page(tiny_bundle)
    gallery = draw_gallery(tuned, "torch", photos[:1], progress=False)
    (row,) = gallery.at_thresholds
    assert len(row.panels) == 4
    html = report_page(tuned, gallery=gallery)
    section = html[html.index('<section id="tuning">') : html.index('<section id="gallery">')]
    assert section.count("<img") == 4
    assert "clap_threshold 1.01" in section
    assert '<a href="#tuning">Tuning</a>' in html
    assert not draw_gallery(tiny_bundle, "torch", photos[:1], progress=False).at_thresholds


@pytest.mark.slow
@pytest.mark.parametrize("width", [1100, 500])
def test_a_browser_draws_both_pages_without_complaint(
    browse: Callable[[str, int, int], tuple[np.ndarray, str]],
    tuned: Bundle,
    photos: list[Photo],
    tmp_path: Path,
    width: int,
) -> None:
    gallery = draw_gallery(tuned, "torch", photos[:1], progress=False)
    alone = write_tuning(THRESHOLD, "tiny", tmp_path / "finding.html", gallery.at_thresholds)
    for page in (alone.read_text(encoding="utf-8"), report_page(tuned, gallery=gallery)):
        pixels, complaints = browse(page, width, 3000)
        assert "Refused to" not in complaints
        assert "CONSOLE" not in complaints
        ink = (pixels < 128).all(-1)
        assert ink.mean() > 0.005
        assert not ink[:, -8:].any()  # nothing runs over the right margin
