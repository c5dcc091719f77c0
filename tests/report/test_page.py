"""The report page: complete, self-contained, and without a number that no record holds."""

from __future__ import annotations

import base64
import copy
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from algm_deploy import __version__
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli import main
from algm_deploy.demo.scenes import scene
from algm_deploy.environment import environment
from algm_deploy.errors import BundleError
from algm_deploy.recipe.reading import recipe, to_table
from algm_deploy.recipe.schema import MergePlan, Recipe
from algm_deploy.report.figures import Panel
from algm_deploy.report.gallery import Example, Gallery, Photo, data_url, draw_gallery
from algm_deploy.report.page import report_page, write_report
from algm_deploy.report.published import read_published
from algm_deploy.report.tables import quality_table

SECTIONS = [
    "summary", "parity", "accuracy", "cost", "speed", "tokens", "trade-off", "gallery", "published", "environment",
]  # fmt: skip
VOID = {"meta", "img", "br"}
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Page(HTMLParser):
    """What a test asks of a page: ids, texts by element, attributes that load something, unclosed tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href"):
                self.links.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] != "style":
            self.texts.append((self.open[-1], data))

    @property
    def text(self) -> str:
        return " ".join(data for _, data in self.texts)


def quality(images: int, miou: float, merged: tuple[float, float] | None) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "images": images,
        "windows": 2 * images,
        "labelled_pixels": 1013 * images,
        "miou_percent": miou,
        "pixel_accuracy_percent": miou + 20.111,
        "majority_guess_miou_percent": 3.3,
        "iou_percent_by_class": {"sky": miou + 5.21, "road <wet>": miou - 5.17, "pole": None},
    }
    for name, mean in zip(("clap", "gbm"), merged or (), strict=False):
        figures |= {f"tokens_after_{name}_mean": mean, f"tokens_after_{name}_min": 11, f"tokens_after_{name}_max": 62}
    return figures


def evaluation(miou: float, tokens: tuple[float, float], gmacs: float, **thresholds: float | str) -> dict[str, Any]:
    """A small evaluation record with two slices."""
    return {
        "schema_version": 1,
        "dataset": "camvid",
        "split": "test",
        "protocol": {"dataset": "camvid", "short_side": 512, "window": 512, "stride": 480, "max_ratio": 4.0},
        "complete": True,
        "images_failed": 0,
        "failures": {},
        **quality(7, miou, tokens),
        "gmacs_per_window_mean": gmacs,
        "gflops_per_window_mean": 2 * gmacs,
        "gmacs_per_window_dense": 37.44,
        "token_histograms": {
            "token_edges": [0.0, 256.0, 512.0, 768.0, 1024.0],
            "windows_by_merge": {"clap": [0, 2, 9, 3], "gbm": [1, 8, 4, 1]},
        },
        "slices": {"day": quality(4, miou + 1.31, tokens), "dusk": quality(3, miou - 2.47, tokens)},
        "thresholds": thresholds,
    }


def parity(passed: bool = True) -> dict[str, Any]:
    links = [
        {"number": 1, "name": "network", "passed": True, "measured": "error 1.5e-06", "gate": "3.2e-06", "facts": {}},
        {"number": 5, "name": "decisions", "passed": passed, "measured": "8 of 9 equal", "gate": "0.25", "facts": {}},
    ]
    return {
        "schema_version": 1,
        "passed": passed,
        "runtime": "onnxruntime-cpu",
        "images": 6,
        "batches": [1, 2],
        "links": links,
        "pictures": "photos",
        "device": "AMD EPYC",
    }


def bundle_of(facts: dict[str, Any], name: str = "merged", kind: Recipe | None = None) -> Bundle:
    """A bundle that exists as a manifest only."""
    manifest = {
        "schema": 1,
        "environment": json.loads(json.dumps(asdict(environment()))),
        "recipe": json.loads(json.dumps(to_table(kind or recipe("segmenter_vit_s16_camvid")))),
        "files": {
            "weights.safetensors": entry("ab" * 32, 103939352, {"checkpoint.pth": "cd" * 32}),
            "model.onnx": entry("ef" * 32, 130948, {"weights.safetensors": "ab" * 32}),
        },
        **facts,
    }
    return Bundle(Path(name), manifest)


def entry(sha256: str, size_bytes: int, made_from: dict[str, str]) -> dict[str, Any]:
    return {"sha256": sha256, "size_bytes": size_bytes, "made_from": made_from, "uses": []}


def latency(p50: float, throughput: float, variant: str, thresholds: dict[str, Any]) -> dict[str, Any]:
    return {
        "protocol": "latency",
        "variant": variant,
        "batch": 1,
        "device": "AMD EPYC",
        "stable": True,
        "latency_ms_p50": p50,
        "latency_ms_p90": p50 + 4.25,
        "throughput_img_per_s": throughput,
        "thresholds": thresholds,
    }


ON = {"clap_threshold": 0.9319, "gbm_threshold": 1.0}
OFF = {"clap_threshold": "inf", "gbm_threshold": "inf"}
MERGED, TORCH = "onnxruntime-cpu camvid test clap_threshold 0.9319", "torch camvid test clap_threshold 0.9319"
LESS, DENSE = "onnxruntime-cpu camvid test clap_threshold 0.98", "onnxruntime-cpu camvid test dense"
FULL: dict[str, Any] = {
    "parity": {"onnxruntime-cpu": parity()},
    "evaluation": {
        MERGED: evaluation(66.63, (694.2, 539.1), 20.17, **ON),
        TORCH: evaluation(66.66, (694.2, 539.1), 20.17, **ON),
        LESS: evaluation(69.69, (855.4, 654.3), 26.9, **{**ON, "clap_threshold": 0.98}),
        DENSE: evaluation(70.87, (1024.0, 1024.0), 37.44, **OFF),
    },
    "speed": {
        "onnxruntime-cpu latency": latency(217.25, 4.6, "merged", ON),
        "onnxruntime-cpu latency dense": latency(402.75, 2.49, "dense", {}),
        "onnxruntime-cpu latency truncated": latency(212.5, 4.71, "truncated", {}),
    },
}


def section(html: str, name: str) -> str:
    """Text of one section."""
    start = html.index(f'<section id="{name}">')
    return Page(html[start : html.index("</section>", start) + len("</section>")]).text


@pytest.fixture(scope="module")
def full() -> str:
    return report_page(bundle_of(FULL), published=read_published())


def test_all_sections_in_order_and_every_tag_closed(full: str) -> None:
    page = Page(full)
    assert page.ids == SECTIONS
    assert page.open == []
    assert {f"#{name}" for name in SECTIONS} <= set(page.links)


def test_nothing_is_loaded_and_nothing_runs(full: str) -> None:
    page = Page(full)
    assert not {"script", "link", "iframe", "object", "base", "form"} & set(page.tags)
    assert all(link.startswith(("#", "data:image/")) for link in page.links)
    assert "url(" not in full
    assert "@import" not in full
    assert not re.search(r"https?://", full)
    assert "default-src 'none'" in full


def numbers_in(value: Any) -> Iterator[float]:
    """Every number of a record, those inside its texts and keys included."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from numbers_in(key)
            yield from numbers_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from numbers_in(part)
    elif isinstance(value, str):
        yield from (float(found) for found in NUMBER.findall(value))
    elif isinstance(value, int | float):
        yield float(value)


def differences(facts: dict[str, Any]) -> Iterator[float]:
    """Differences in points between the evaluations of a bundle: whole, by slice, by class."""
    records = list(facts["evaluation"].values())
    parts = [[r, *r["slices"].values()] for r in records]
    for one in parts:
        for other in parts:
            for a, b in zip(one, other, strict=True):
                values = zip((a["miou_percent"], *a["iou_percent_by_class"].values()),
                             (b["miou_percent"], *b["iou_percent_by_class"].values()), strict=True)  # fmt: skip
                yield from (x - y for x, y in values if x is not None and y is not None)


def test_every_number_comes_from_a_record(full: str) -> None:
    bundle = bundle_of(FULL)
    grid = bundle.recipe.network.grid
    sizes = [entry.size_bytes / 1e6 for entry in bundle.files.values()]
    known = [
        *numbers_in(bundle.manifest), *differences(FULL), *sizes, *grid, grid[0] * grid[1], *numbers_in(__version__)
    ]  # fmt: skip
    for kind, text in Page(full).texts:
        if kind == "text" or "Not run, and why" in text or "SHA-256" in text or "…" in text:
            continue  # ticks of plots have a test of their own; hashes are cut
        for found in NUMBER.findall(re.sub(r"Linux\S+|10⁹|SHA-256", "", text)):
            digits = len(found.split("e")[0].partition(".")[2])
            value = float(found)
            assert any(x == value or round(abs(x), digits) == abs(value) for x in known), (kind, text)


@pytest.mark.parametrize(
    ("path", "value", "printed"),
    [
        (("evaluation", DENSE, "miou_percent"), 88.123, "88.12"),
        (("evaluation", DENSE, "slices", "dusk", "miou_percent"), 41.239, "41.24"),
        (("evaluation", TORCH, "gmacs_per_window_mean"), 23.456, "23.46"),
        (("speed", "onnxruntime-cpu latency", "latency_ms_p50"), 313.377, "313.38"),
        (("parity", "onnxruntime-cpu", "images"), 4711, "4711 photos"),
        (("parity", "onnxruntime-cpu", "images"), 1, "1 photo, in batches"),
    ],
)
def test_a_changed_record_changes_the_page(full: str, path: tuple[str, ...], value: float, printed: str) -> None:
    facts = copy.deepcopy(FULL)
    place: Any = facts
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    changed = Page(report_page(bundle_of(facts))).text
    assert printed in changed
    assert printed not in Page(full).text


def test_names_in_records_are_text_not_markup(full: str) -> None:
    assert "road &lt;wet&gt;" in full
    assert "<wet>" not in full


def test_a_bare_bundle_says_what_was_not_run_and_why() -> None:
    html = report_page(bundle_of({}))
    for name in ("parity", "accuracy", "cost", "speed", "tokens", "trade-off", "gallery"):
        assert "not run" in section(html, name), name
    assert "algm-deploy verify merged --runtime onnxruntime-cpu" in section(html, "parity")
    assert "algm-deploy evaluate merged" in section(html, "accuracy")
    assert "--images" in section(html, "gallery")
    assert "67" not in section(html, "accuracy")


def test_a_recorded_reason_is_shown() -> None:
    html = report_page(
        bundle_of({"not_run": {"parity tensorrt-rtx": "built; no RTX <GPU> here", "speed torch": "later"}})
    )
    assert "tensorrt-rtx: built; no RTX &lt;GPU&gt; here" in html
    assert "torch: later" in section(html, "speed")


def test_a_failed_chain_is_said_first() -> None:
    html = report_page(bundle_of({"parity": {"torch": parity(), "onnxruntime-cpu": parity(passed=False)}}))
    summary = section(html, "summary")
    assert summary.index("FAILED") < summary.index("network")
    assert "onnxruntime-cpu: FAILED" in section(html, "parity")
    assert "torch: passed" in section(html, "parity")


def test_costs_are_against_the_dense_network_by_slice_and_class(full: str) -> None:
    text = section(full, "cost")
    assert "66.63 (-4.24)" in text  # whole: 66.63 - 70.87
    assert "64.16 (-4.24)" in text  # dusk: 64.16 - 68.40
    assert "61.46 (-4.24)" in text  # one class: 61.46 - 65.70
    assert text.index("70.87") < text.index("69.69 (-1.18)") < text.index("66.63 (-4.24)")


def test_runtimes_are_held_against_the_gate(full: str) -> None:
    assert "differ by 0.030 points, within the 0.1" in section(full, "accuracy")
    facts = copy.deepcopy(FULL)
    facts["evaluation"][TORCH]["miou_percent"] = 66.0
    assert "differ by 0.630 points, beyond the 0.1" in section(report_page(bundle_of(facts)), "accuracy")


def test_the_headline_says_what_merging_costs(full: str) -> None:
    assert "camvid test, 7 images, onnxruntime-cpu; 70.87 % without merging" in section(full, "summary")
    alone = {"evaluation": {MERGED: FULL["evaluation"][MERGED]}}
    assert "without merging" not in section(report_page(bundle_of(alone)), "summary").partition("decoder")[0]


def test_groups_are_told_apart_by_their_bundle(full: str) -> None:
    other = json.loads(json.dumps(FULL))
    facts = bundle_of(other, "other").manifest
    facts["files"]["weights.safetensors"]["sha256"] = "99" * 32
    page = report_page(bundle_of(FULL), [Bundle(Path("other"), facts)])
    for name in ("merged", "other"):
        assert f"{name}: camvid test, 7 images, onnxruntime-cpu, fp32" in section(page, "cost")
        assert f"{name}: camvid test, 7 images, onnxruntime-cpu, fp32" in section(page, "trade-off")


def test_latency_stands_against_tokens_and_conditions_beside_it() -> None:
    facts = json.loads(json.dumps(FULL))
    for record in facts["speed"].values():
        record |= {
            "pictures_timed": 2,
            "rounds": 13,
            "clock": "host",
            "pictures": "photos",
            "representative": True,
            "drift_percent": 0.4,
            "execution": {"cuda_graph": "no"},
            "nodes_by_provider": {"CPUExecutionProvider": 190},
        }
    before = section(report_page(bundle_of(facts)), "speed")
    by_picture = {"latency_ms_p50": [201.5, 233.0], "tokens_after_clap": [600, 788], "tokens_after_gbm": [470, 608]}
    facts["speed"]["onnxruntime-cpu latency"]["by_picture"] = by_picture
    html = report_page(bundle_of(facts))
    text = section(html, "speed")
    assert "latency against tokens" in text
    assert "p50 ms against tokens after the last merge" in html
    assert "How it was timed: merged, onnxruntime-cpu, latency, batch 1" in text
    assert "2 photos, 13 rounds, clock: host" in text
    assert "merged ran cuda graph no, 190 nodes on CPUExecutionProvider" in text
    assert "merged ran" in before
    assert "latency against tokens" not in before  # no run that tells pictures apart
    facts["speed"]["onnxruntime-cpu latency"]["stable"] = False
    drawn = section(report_page(bundle_of(with_drift(facts))), "speed")
    assert "merged, onnxruntime-cpu" not in drawn.replace("How it was timed: merged, onnxruntime-cpu", "")


def with_drift(facts: dict[str, Any]) -> dict[str, Any]:
    for record in facts["speed"].values():
        record["drift_percent"] = 7.5
    return facts


def test_accuracy_and_speed_stand_in_one_row_with_both_outputs(full: str) -> None:
    joined = section(full, "speed").partition("accuracy from")[2]
    assert joined.count("onnxruntime-cpu, scores") == 4  # merged and dense, each with accuracy and speed
    assert "217.25" in joined
    assert "402.75" in joined
    assert "212.50" not in joined  # truncated: its labels mean nothing
    facts = copy.deepcopy(FULL)
    del facts["evaluation"][DENSE]
    facts["speed"]["onnxruntime-cpu latency"]["thresholds"] = {"clap_threshold": 0.5, "gbm_threshold": 1.0}
    assert "accuracy from" not in section(report_page(bundle_of(facts)), "speed")


def test_an_unstable_run_shows_no_number() -> None:
    facts = copy.deepcopy(FULL)
    facts["speed"]["onnxruntime-cpu latency"]["stable"] = False
    text = section(report_page(bundle_of(facts)), "speed")
    assert "not stable" in text
    assert "217.25" not in text


def test_published_points_stand_in_the_plot_of_their_data_set_only() -> None:
    kind = recipe("segmenter_vit_s16_ade20k")
    assert "published" not in section(report_page(bundle_of(FULL, kind=kind), published=read_published()), "trade-off")
    facts = copy.deepcopy(FULL)
    for record in facts["evaluation"].values():
        record["dataset"] = "ade20k"
    text = section(report_page(bundle_of(facts, kind=kind), published=read_published()), "trade-off")
    assert "published" in text
    assert "ALGM" in text


def test_a_second_bundle_of_the_same_weights_gives_the_dense_row() -> None:
    alone = {"evaluation": {"onnxruntime-cpu a": FULL["evaluation"][MERGED]}}
    dense = {"evaluation": {"onnxruntime-cpu a": FULL["evaluation"][DENSE]}}
    assert "not run" in section(report_page(bundle_of(alone)), "cost")
    html = report_page(bundle_of(alone), [bundle_of(dense, "plain")])
    assert "plain" in section(html, "cost")
    assert "66.63 (-4.24)" in section(html, "cost")
    assert "70.87" not in section(html, "accuracy")


def test_tome_takes_two_columns_however_many_blocks_merge() -> None:
    plan = MergePlan(clap_layers=(), gbm_layers=(), method="tome", tome_r=(7,) * 6)
    record = evaluation(71.0, (0.0, 0.0), 30.0)
    for part in (record, *record["slices"].values()):
        del part["tokens_after_clap_mean"], part["tokens_after_gbm_mean"]
        part |= {f"tokens_after_tome_{block}_mean": 1024.0 - 7 * block for block in range(1, 7)}
    record["token_histograms"]["windows_by_merge"] = {f"tome_{block}": [0, 0, 0, 14] for block in range(1, 7)}
    table = quality_table(record)
    assert table.header[4:] == ("tokens after ToMe 1", "tokens after ToMe 6")
    assert table.rows[0][4:] == ("1017", "982")
    kind = replace(recipe("segmenter_vit_s16_camvid"), merging=plan)
    html = report_page(bundle_of({"evaluation": {"torch camvid test": record}}, kind=kind))
    assert "1024 → 1017 → 982" in html
    assert ("after ToMe 6" in html, "ToMe 5" in html) == (True, False)


def test_figures_without_a_pixel_or_a_count_are_left_open() -> None:
    facts = copy.deepcopy(FULL)
    for record in facts["evaluation"].values():
        record["miou_percent"] = record["gmacs_per_window_mean"] = None
    html = report_page(bundle_of(facts))
    assert "not run" in section(html, "trade-off")
    assert "None" not in html


def test_engines_say_what_they_were_built_for() -> None:
    facts = {"version": "10.16.1", "precision": "fp16", "batches": [1, 4, 8], "compute_capabilities": ["8.9", "12.0"]}
    plugins = [
        {"name": "a", "plugin": "algm_clap"},
        {"name": "b", "plugin": "algm_gbm"},
        {"name": "c", "plugin": "algm_gbm"},
    ]
    record = {"facts": facts, "parsed_network": {"plugins": plugins}, "build_seconds": 61.4}
    reason = {"parity tensorrt-rtx": "no RTX GPU here"}
    html = report_page(bundle_of({"engines": {"tensorrt-rtx": record}, "not_run": reason}))
    text = section(html, "environment")
    for part in ("10.16.1", "fp16", "1, 4, 8", "8.9, 12.0", "algm_clap, algm_gbm", "61"):
        assert part in text
    assert "parity on tensorrt-rtx: no RTX GPU here" in section(html, "summary")


def test_failed_images_are_named() -> None:
    facts = copy.deepcopy(FULL)
    facts["evaluation"][TORCH]["failures"] = {"broken": "cut short"}
    assert "broken: cut short" in section(report_page(bundle_of(facts)), "accuracy")


def test_published_rows_stand_beside_the_measured_one() -> None:
    html = report_page(bundle_of({}, kind=recipe("segmenter_vit_s16_ade20k")), published=read_published())
    text = section(html, "published")
    assert "46.4" in text
    assert "tue-mps/algm-segmenter" in text
    assert "CTS, 30 % of the tokens shared" in text
    assert "not run" in text
    other = report_page(bundle_of(FULL, kind=recipe("segmenter_vit_s16_ade20k")), published=read_published())
    assert "66.63" not in section(other, "published")  # measured on another data set


# --------------------------------------------------------------------------------------------------- files, pictures


def panel(picture: np.ndarray, foot: np.ndarray | None = None) -> Panel:
    return Panel("Title", "what it shows", picture.astype(np.uint8), None if foot is None else foot.astype(np.uint8))


def decoded(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def test_pictures_become_small_data_urls() -> None:
    labels = np.zeros((40, 60, 3))
    labels[:20] = (200, 10, 10)
    image = decoded(data_url(panel(labels)))
    assert (image.format, image.size) == ("PNG", (60, 40))
    assert np.array_equal(np.asarray(image.convert("RGB")), labels)
    noise = np.random.default_rng(0).integers(0, 256, (800, 1440, 3))
    image = decoded(data_url(panel(noise, noise[:40])))
    assert (image.format, image.size) == ("JPEG", (720, 420))


def test_a_gallery_shows_every_step(tiny_bundle: Bundle, tmp_path: Path) -> None:
    photo, labels = scene(4)
    Image.fromarray(photo[:128, :128]).save(tmp_path / "scene.png")
    truth = (labels[:128, :128] % 7).astype(np.uint8)
    truth[:4] = 255
    shown = draw_gallery(tiny_bundle, "torch", [Photo("scene", tmp_path / "scene.png", truth)], progress=False)
    (example,) = shown.examples
    titles = " | ".join(part.title for part in example.panels)
    assert len(example.panels) == 8, titles
    assert ["without" in part.title for part in example.panels].count(True) == 1
    text = section(report_page(tiny_bundle, gallery=shown), "gallery")
    assert all(part.title in text for part in example.panels)
    assert "not run" not in text
    errors = example.panels[-1].picture
    assert (errors[:4] == 255).all()
    wrong = (errors == (213, 94, 0)).all(-1).mean() * 128 * 128 / (truth != 255).sum()
    assert f"{100 * wrong:.1f} % of the labelled pixels wrong" in text


def test_the_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    assert write_report([bundle_of(FULL)], target) == target
    assert target.read_text(encoding="utf-8").endswith("</html>\n")
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(BundleError, match="expected a folder for the report"):
        write_report([bundle_of(FULL)], tmp_path / "absent" / "report.html")


def test_variants_inside_a_bundle_stand_beside_it(tiny_bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "with_variant"
    shutil.copytree(tiny_bundle.path, folder)
    shutil.copytree(tiny_bundle.path, folder / "variants" / "dense")
    write_report([Bundle.open(folder)], tmp_path / "report.html")
    assert "files of dense" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_command_writes_a_page_with_pictures(
    tiny_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(scene(5)[0][:128, :128]).save(tmp_path / "scene.png")
    target = tmp_path / "page.html"
    arguments = ["--images", str(tmp_path / "scene.png"), "--runtime", "torch", "-o", str(target)]
    assert main(["report", str(tiny_bundle.path), *arguments]) == 0
    assert str(target) in capsys.readouterr().out
    html = target.read_text(encoding="utf-8")
    assert html.count('<img src="data:image/') == 6  # photo, similarity, CLAP, GBM, prediction without and with merging
    assert "scene.png" in section(html, "gallery")
    assert main(["report", str(tmp_path / "absent")]) == 2


# ------------------------------------------------------------------------------------------------------------ browser


@pytest.fixture(scope="module")
def screenshot(browse: Callable[[str, int, int], tuple[np.ndarray, str]]) -> Callable[..., tuple[np.ndarray, str]]:
    """Draws the page in a window of a width and height; returns its pixels and the browser's complaints."""
    picture = np.zeros((90, 120, 3), np.uint8)
    picture[..., 0] = np.arange(120)
    gallery = Gallery("torch", (Example("scene", (panel(picture),)),), (("sky", (70, 130, 180)),))
    page = report_page(bundle_of(FULL), gallery=gallery, published=read_published())
    return partial(browse, page)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1100, 500])
def test_a_browser_draws_the_page_without_complaint(
    screenshot: Callable[[int, int], tuple[np.ndarray, str]], width: int
) -> None:
    pixels, complaints = screenshot(width, 3000)
    assert pixels.shape == (3000, width, 3)
    assert "Refused to" not in complaints
    assert "CONSOLE" not in complaints
    ink = (pixels < 128).all(-1)
    assert ink.mean() > 0.005  # there is text
    assert not ink[:, -8:].any()  # nothing runs over the right margin
    assert (np.abs(pixels.astype(int) - (0, 114, 178)).sum(-1) < 30).any()  # bars and plots have their colour
