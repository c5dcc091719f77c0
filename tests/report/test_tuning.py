"""What tuning found, as a page of its own and as a section of the report."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, ImageError
from algm_deploy.pictures.shipped import scene
from algm_deploy.report.gallery import Photo, draw_gallery, draw_thresholds, threshold_sheet
from algm_deploy.report.page import report_page
from algm_deploy.report.tuning import finding_text, page_html, tuning_section, write_finding
from algm_deploy.tuning.findings import Counts, Finding, Page, Plot, Table

FINDING = Finding(
    "CLAP threshold, aim: <best>",
    Page(
        ["clap_threshold 0.9 to reach the best mIoU: mIoU 71.25 %"],
        [Table("val, 7 images", ("clap_threshold", "mIoU %"), [("0.5", "66.50"), ("0.9", "71.25")])],
        [
            Plot(
                "accuracy by clap_threshold",
                "clap_threshold",
                "mIoU %",
                {"tuned on val": [(0.5, 66.5, ""), (0.9, 71.25, "")], "chosen": [(0.9, 71.25, "0.9")]},
            ),
            Plot("by slice", "clap_threshold", "mIoU, points to dense", {"dusk": [(0.5, -6.25, ""), (0.9, -1.5, "")]}),
        ],
        [Counts("tokens", [0, 32, 64], {"clap": [3, 4]}, {"clap": 40.0})],
    ),
    {"knob": "clap_threshold"},
    thresholds=("clap_threshold", (0.5, 0.9, 1.01)),
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
    bundle.record("tuning", FINDING.title, FINDING.stored())
    return Bundle.open(bundle.path)


def test_what_is_stored_reads_back_to_the_same_page(tuned: Bundle) -> None:
    stored = Page.from_record(tuned.section("tuning")[FINDING.title])
    assert list(page_html(stored)) == list(page_html(FINDING.page))
    text = "".join(tuning_section(tuned))
    assert "aim: &lt;best&gt;" in text
    assert text.count('<svg class="plot"') == 3
    assert "What merges" not in text
    assert "mIoU 71.25 %" in finding_text(FINDING)


@pytest.mark.parametrize("broken", [{}, {"page": {"lines": "one"}, "pictured": None}, {"page": None}])
def test_an_edited_record_is_one_sentence(tuned: Bundle, broken: dict[str, object]) -> None:
    tuned.record("tuning", FINDING.title, broken)
    with pytest.raises(BundleError, match="it was edited, remove that entry"):
        list(tuning_section(Bundle.open(tuned.path)))


def test_thresholds_side_by_side(tiny_bundle: Bundle, photos: list[Photo]) -> None:
    rows = draw_thresholds(tiny_bundle, "torch", photos, *FINDING.thresholds, progress=False)
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
    alone = write_finding(FINDING, "tiny", tmp_path / "finding.html", gallery.at_thresholds)
    for page in (alone.read_text(encoding="utf-8"), report_page(tuned, gallery=gallery)):
        pixels, complaints = browse(page, width, 3000)
        assert "Refused to" not in complaints
        assert "CONSOLE" not in complaints
        ink = (pixels < 128).all(-1)
        assert ink.mean() > 0.005
        assert not ink[:, -8:].any()  # nothing runs over the right margin
