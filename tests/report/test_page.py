"""The report page: complete, self-contained, and without a number that no record holds."""

from __future__ import annotations

import base64
import io
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs, to_builtins
from PIL import Image

from algm_deploy.bundle.manifest import write_manifest
from algm_deploy.bundle.records import (
    ByPicture,
    Engine,
    EngineMerge,
    EngineStretches,
    Evaluation,
    Figures,
    FileEntry,
    Link,
    Manifest,
    MergeTokens,
    NotRun,
    Parity,
    ParsedNetwork,
    Plugin,
    Speed,
    TokenHistograms,
)
from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli import main
from algm_deploy.environment import environment
from algm_deploy.errors import BundleError
from algm_deploy.pictures.shipped import scene
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.reading import recipe
from algm_deploy.recipe.schema import Protocol, Recipe
from algm_deploy.report.gallery import Example, Gallery, Photo, draw_gallery
from algm_deploy.report.page import report_page, write_report
from algm_deploy.report.published import read_published
from algm_deploy.report.sheets import Panel

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


def figures(images: int, miou: float, tokens: tuple[MergeTokens, ...]) -> dict[str, Any]:
    return {
        "images": images,
        "windows": 2 * images,
        "labelled_pixels": 1013 * images,
        "miou_percent": miou,
        "pixel_accuracy_percent": miou + 20.111,
        "majority_guess_miou_percent": 3.3,
        "iou_percent_by_class": {"sky": miou + 5.21, "road <wet>": miou - 5.17, "pole": None},
        "tokens": tokens,
    }


def tokens(**means: float) -> tuple[MergeTokens, ...]:
    return tuple(MergeTokens(merge=merge, mean=mean, min=11, max=62) for merge, mean in means.items())


def evaluation(runtime: str, miou: float, merged: tuple[MergeTokens, ...], gmacs: float, **more: Any) -> Evaluation:
    """A small evaluation with two slices; `more` are thresholds or other fields."""
    thresholds = {name: more.pop(name) for name in [*more] if name.endswith("threshold")}
    counts = ((0, 2, 9, 3), (1, 8, 4, 1), *[(0, 0, 0, 14)] * 9)
    known = {
        **figures(7, miou, merged),
        "dataset": "camvid",
        "split": "test",
        "protocol": Protocol("camvid", 512, 512, 480, 4.0),
        "gmacs_per_window_mean": gmacs,
        "gmacs_per_window_dense": 37.44,
        "token_histograms": TokenHistograms(
            token_edges=(0.0, 256.0, 512.0, 768.0, 1024.0),
            windows_by_merge={one.merge: count for one, count in zip(merged, counts, strict=False)},
        ),
        "slices": {
            "day": Figures(**figures(4, miou + 1.31, merged)),
            "dusk": Figures(**figures(3, miou - 2.47, merged)),
        },
        "thresholds": thresholds,
    }
    return Evaluation(runtime=runtime, **(known | more))


def parity(runtime: str = "onnxruntime-cpu", passed: bool = True) -> Parity:
    links = (
        Link(number=1, name="network", passed=True, measured="error 1.5e-06", gate="3.2e-06"),
        Link(number=5, name="decisions", passed=passed, measured="8 of 9 equal", gate="0.25"),
    )
    return Parity(runtime=runtime, images=6, batches=(1, 2), links=links, pictures="photos", device="AMD EPYC")


def latency(p50: float, throughput: float, variant: Any, thresholds: dict[str, Any], **more: Any) -> Speed:
    return Speed(
        runtime="onnxruntime-cpu",
        protocol="latency",
        variant=variant,
        batch=1,
        device="AMD EPYC",
        stable=True,
        latency_ms_p50=p50,
        latency_ms_p90=p50 + 4.25,
        throughput_img_per_s=throughput,
        thresholds=thresholds,
        **more,
    )


def entry(sha256: str, size_bytes: int, made_from: dict[str, str]) -> FileEntry:
    return FileEntry(sha256=sha256, size_bytes=size_bytes, made_from=made_from)


FILES = {
    "weights.safetensors": entry("ab" * 32, 103939352, {"checkpoint.pth": "cd" * 32}),
    "model.onnx": entry("ef" * 32, 130948, {"weights.safetensors": "ab" * 32}),
}
ON = {"clap_threshold": 0.9319, "gbm_threshold": 1.0}
OFF: dict[str, Any] = {"clap_threshold": "inf", "gbm_threshold": "inf"}
CPU, LEFT = "onnxruntime-cpu", tokens(clap_1=694.2, gbm_5=539.1)
MERGED, TORCH = evaluation(CPU, 66.63, LEFT, 20.17, **ON), evaluation("torch", 66.66, LEFT, 20.17, **ON)
LESS = evaluation(CPU, 69.69, tokens(clap_1=855.4, gbm_5=654.3), 26.9, clap_threshold=0.98, gbm_threshold=1.0)
DENSE = evaluation(CPU, 70.87, tokens(clap_1=1024.0, gbm_5=1024.0), 37.44, **OFF)
FAST = latency(217.25, 4.6, "merged", ON)
SPEEDS = (FAST, latency(402.75, 2.49, "dense", {}), latency(212.5, 4.71, "truncated", {}))
FULL: dict[str, Any] = {
    "parity": (parity(),),
    "evaluations": (MERGED, TORCH, LESS, DENSE),
    "speeds": SPEEDS,
}


def bundle_of(name: str = "merged", kind: Recipe | None = None, **sections: Any) -> Bundle:
    """A bundle that exists as a manifest only."""
    known = {"environment": environment(), "recipe": kind or recipe("segmenter_vit_s16_camvid"), "files": FILES}
    return Bundle(Path(name), Manifest(**(known | sections)))


def full_with(**sections: Any) -> Bundle:
    """The full bundle with some sections replaced."""
    return bundle_of(**(FULL | sections))


def changed(records: Sequence[Any], index: int = 0, **changes: Any) -> tuple[Any, ...]:
    """The records, one of them changed."""
    return (*records[:index], structs.replace(records[index], **changes), *records[index + 1 :])


def section_of(html: str, name: str) -> Page:
    start = html.index(f'<section id="{name}">')
    return Page(html[start : html.index("</section>", start) + len("</section>")])


def section(html: str, name: str) -> str:
    """Text of one section."""
    return section_of(html, name).text


@pytest.fixture(scope="module")
def full() -> str:
    return report_page(bundle_of(**FULL), published=read_published())


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


def differences(records: Sequence[Evaluation]) -> Iterator[float]:
    """Differences in points between evaluations: whole, by slice, by class."""
    parts = [[one, *one.slices.values()] for one in records]
    for one in parts:
        for other in parts:
            for a, b in zip(one, other, strict=True):
                values = zip((a.miou_percent, *a.iou_percent_by_class.values()),
                             (b.miou_percent, *b.iou_percent_by_class.values()), strict=True)  # fmt: skip
                yield from (x - y for x, y in values if x is not None and y is not None)


def numbers_behind(name: str, bundle: Bundle) -> set[float]:
    """The numbers that a section may show: those of its records, of what is derived from them, and of its wording."""
    manifest, network, plan = bundle.manifest, bundle.recipe.network, bundle.recipe.merging
    plans = [one.thresholds for one in manifest.evaluations]
    left_out = ("token_histograms", "protocol", "device", "tokens")
    quality = [
        {key: value for key, value in to_builtins(one).items() if key not in left_out} for one in manifest.evaluations
    ]
    means = [round(merge.mean) for one in manifest.evaluations for merge in one.tokens]
    shape = (network.embed_dim, network.depth, network.heads, network.classes, network.image_size, network.patch_size)
    decoder = (network.decoder_depth, network.grid, network.grid[0] * network.grid[1])
    merging = (plan.layers, plan.window, plan.clap_threshold, plan.gbm_threshold)
    protocol = (bundle.recipe.protocol.short_side, bundle.recipe.protocol.window, bundle.recipe.protocol.stride)
    sizes = [one.size_bytes / 1e6 for one in bundle.files.values()]
    spread = [a.miou_percent - b.miou_percent for a in manifest.evaluations for b in manifest.evaluations]
    return set(numbers_in({
        "summary": (shape, decoder, merging, protocol, bundle.recipe.max_batch, quality, means, 12, 32),
        "parity": [to_builtins(one) for one in manifest.parity],
        "accuracy": (quality, means, spread, bundle.recipe.gates.miou_drop_points, 32),
        "cost": (quality, means, list(differences(manifest.evaluations)), 32),
        "speed": ([to_builtins(one) for one in manifest.speeds], quality, 32, 50, 90),
        "tokens": (quality, 32),
        "trade-off": (quality, plans, 32),
        "gallery": (),
        "published": (shape, quality, 32),
        "environment": (to_builtins(manifest.environment), sizes),
    }[name]))  # fmt: skip


def holds(printed: str, known: set[float]) -> bool:
    """Whether a number as it is printed is one of those: a whole one as it is, another rounded to its digits."""
    digits = len(printed.split("e")[0].partition(".")[2])
    return any(x == float(printed) or (digits > 0 and round(x, digits) == float(printed)) for x in known)


@pytest.mark.parametrize("name", SECTIONS)
def test_every_number_comes_from_a_record(full: str, name: str) -> None:
    known = numbers_behind(name, full_with())
    for kind, text in section_of(full, name).texts:
        if kind == "text" or "Not run, and why" in text or "…" in text:
            continue  # ticks of plots have a test of their own; hashes are cut
        for printed in NUMBER.findall(re.sub(r"Linux\S+|10⁹|SHA-256|ViT-S/16", "", text)):
            assert holds(printed, known), (kind, text)


@pytest.mark.parametrize("name", SECTIONS[:-1])
def test_most_other_numbers_would_be_noticed(name: str) -> None:
    known = numbers_behind(name, full_with())
    assert sum(holds(str(number), known) for number in range(100)) <= 20
    assert sum(holds(f"{number / 10}", known) for number in range(1000)) <= 80


@pytest.mark.parametrize(
    ("sections", "printed"),
    [
        ({"evaluations": changed(FULL["evaluations"], 3, miou_percent=88.123)}, "88.12"),
        (
            {
                "evaluations": changed(
                    FULL["evaluations"],
                    3,
                    slices=DENSE.slices | {"dusk": structs.replace(DENSE.slices["dusk"], miou_percent=41.239)},
                )
            },
            "41.24",
        ),
        ({"evaluations": changed(FULL["evaluations"], 1, gmacs_per_window_mean=23.456)}, "23.46"),
        ({"speeds": changed(SPEEDS, latency_ms_p50=313.377)}, "313.38"),
        ({"parity": changed((parity(),), images=4711)}, "4711 photos"),
        ({"parity": changed((parity(),), images=1)}, "1 photo, in batches"),
    ],
    ids=["mIoU", "slice", "GMACs", "latency", "photos", "one photo"],
)
def test_a_changed_record_changes_the_page(full: str, sections: dict[str, Any], printed: str) -> None:
    assert printed in Page(report_page(full_with(**sections))).text
    assert printed not in Page(full).text


def test_names_in_records_are_text_not_markup(full: str) -> None:
    assert "road &lt;wet&gt;" in full
    assert "<wet>" not in full


def test_a_bare_bundle_says_what_was_not_run_and_why() -> None:
    html = report_page(bundle_of())
    for name in ("parity", "accuracy", "cost", "speed", "tokens", "trade-off", "gallery"):
        assert "not run" in section(html, name), name
    assert "algm-deploy verify merged --runtime onnxruntime-cpu" in section(html, "parity")
    assert "algm-deploy evaluate merged" in section(html, "accuracy")
    assert "--images" in section(html, "gallery")
    assert "67" not in section(html, "accuracy")


def not_run(step: Any, runtime: str, reason: str) -> NotRun:
    return NotRun(step=step, runtime=runtime, reason=reason)


def test_a_recorded_reason_is_shown() -> None:
    reasons = (not_run("parity", "tensorrt-rtx", "built; no RTX <GPU> here"), not_run("speed", "torch", "type `later`"))
    html = report_page(bundle_of(not_run=reasons))
    assert "tensorrt-rtx: built; no RTX &lt;GPU&gt; here" in html
    assert "torch: type <code>later</code>" in html
    assert "torch: type" in section(html, "speed")


def test_runtimes_that_only_the_manifest_knows_are_shown() -> None:
    html = report_page(bundle_of(not_run=(not_run("parity", "of-another-release", "gone"),)))
    assert "parity on of-another-release: gone" in section(html, "summary")


def test_a_failed_chain_is_said_first() -> None:
    html = report_page(bundle_of(parity=(parity("torch"), parity(passed=False))))
    summary = section(html, "summary")
    assert summary.index("FAILED") < summary.index("network")
    assert "onnxruntime-cpu: FAILED" in section(html, "parity")
    assert "torch: passed" in section(html, "parity")


def alarm(html: str) -> str:
    """Text of the banner over the first section, empty where there is none."""
    before = html[html.index("<main>") : html.index('<section id="summary">')] + "</main>"
    assert ('role="alert"' in before) == ('class="alarm"' in before)
    return " ".join(Page(before).text.split())


def test_a_failed_chain_stands_over_the_whole_page() -> None:
    link = Link(number=6, name="labels", passed=False, measured="12.0 % of <pixels> equal", gate="-56 %")
    failed = structs.replace(parity(passed=False), links=(*parity(passed=False).links, link))
    told = alarm(report_page(bundle_of(parity=(parity("torch"), failed))))
    assert told == (
        "Parity FAILED. Do not use what failed, and trust no figure of it. onnxruntime-cpu of merged: link 5, "
        "decisions: 8 of 9 equal, would pass at 0.25; link 6, labels: 12.0 % of <pixels> equal, would pass at 0 %"
    )
    assert "-56" not in report_page(bundle_of(parity=(failed,)))
    empty = structs.replace(parity(), links=())
    assert alarm(report_page(bundle_of(parity=(empty,)))).endswith("onnxruntime-cpu of merged: nothing was compared")
    beside = alarm(report_page(bundle_of(**FULL), [bundle_of("other", parity=(failed,))]))
    assert "onnxruntime-cpu of other: link 5" in beside


def test_nothing_is_raised_where_nothing_failed(full: str) -> None:
    assert alarm(full) == ""
    assert alarm(report_page(bundle_of())) == ""


def test_costs_are_against_the_dense_network_by_slice_and_class(full: str) -> None:
    text = section(full, "cost")
    assert "66.63 (-4.24)" in text  # whole: 66.63 - 70.87
    assert "64.16 (-4.24)" in text  # dusk: 64.16 - 68.40
    assert "61.46 (-4.24)" in text  # one class: 61.46 - 65.70
    assert text.index("70.87") < text.index("69.69 (-1.18)") < text.index("66.63 (-4.24)")


def test_runtimes_are_held_against_the_gate(full: str) -> None:
    assert "differ by 0.030 points, within the 0.1" in section(full, "accuracy")
    further = changed(FULL["evaluations"], 1, miou_percent=66.0)
    assert "differ by 0.630 points, beyond the 0.1" in section(report_page(full_with(evaluations=further)), "accuracy")


def test_the_headline_says_what_merging_costs(full: str) -> None:
    assert "camvid test, 7 images, onnxruntime-cpu; 70.87 % without merging" in section(full, "summary")
    alone = section(report_page(bundle_of(evaluations=(MERGED,))), "summary")
    assert "without merging" not in alone.partition("decoder")[0]


def test_groups_are_told_apart_by_their_bundle(full: str) -> None:
    files = FILES | {"weights.safetensors": entry("99" * 32, 103939352, {})}
    page = report_page(bundle_of(**FULL), [bundle_of("other", files=files, **FULL)])
    for name in ("merged", "other"):
        assert f"{name}: camvid test, 7 images, onnxruntime-cpu, fp32" in section(page, "cost")
        assert f"{name}: camvid test, 7 images, onnxruntime-cpu, fp32" in section(page, "trade-off")


def test_latency_stands_against_tokens_and_conditions_beside_it() -> None:
    conditions = {
        "pictures_timed": 2,
        "rounds": 13,
        "clock": "host",
        "pictures": "photos",
        "representative": True,
        "drift_percent": 7.5,
        "execution": {"cuda_graph": "no"},
        "nodes_by_provider": {"CPUExecutionProvider": 190},
    }
    timed = tuple(structs.replace(one, **conditions) for one in SPEEDS)
    before = section(report_page(full_with(speeds=timed)), "speed")
    by_picture = ByPicture(latency_ms_p50=(201.5, 233.0), tokens_by_merge={"clap_1": (600, 788), "gbm_5": (470, 608)})
    html = report_page(full_with(speeds=changed(timed, by_picture=by_picture)))
    text = section(html, "speed")
    assert "latency against tokens" in text
    assert "p50 ms against tokens after the last merge" in html
    assert "How it was timed: merged, onnxruntime-cpu, latency, batch 1" in text
    assert "2 photos, 13 rounds, clock: host" in text
    assert "merged ran cuda graph no, 190 nodes on CPUExecutionProvider" in text
    assert "merged ran" in before
    assert "latency against tokens" not in before  # no run that tells pictures apart
    shaky = changed(timed, by_picture=by_picture, stable=False)
    drawn = section(report_page(full_with(speeds=shaky)), "speed")
    assert "merged, onnxruntime-cpu" not in drawn.replace("How it was timed: merged, onnxruntime-cpu", "")


def test_accuracy_and_speed_stand_in_one_row_with_both_outputs(full: str) -> None:
    joined = section(full, "speed").partition("accuracy from")[2]
    assert joined.count("onnxruntime-cpu, scores") == 4  # merged and dense, each with accuracy and speed
    assert "217.25" in joined
    assert "402.75" in joined
    assert "212.50" not in joined  # truncated: its labels mean nothing
    other = changed(SPEEDS, thresholds={"clap_threshold": 0.5, "gbm_threshold": 1.0})
    page = report_page(full_with(evaluations=(MERGED, TORCH, LESS), speeds=other))
    assert "accuracy from" not in section(page, "speed")


def test_an_unstable_run_shows_no_number() -> None:
    text = section(report_page(full_with(speeds=changed(SPEEDS, stable=False))), "speed")
    assert "not stable" in text
    assert "217.25" not in text


def test_published_points_stand_in_the_plot_of_their_data_set_only() -> None:
    kind = recipe("segmenter_vit_s16_ade20k")
    page = report_page(full_with(kind=kind), published=read_published())
    assert "published" not in section(page, "trade-off")
    moved = tuple(structs.replace(one, dataset="ade20k") for one in FULL["evaluations"])
    text = section(report_page(full_with(kind=kind, evaluations=moved), published=read_published()), "trade-off")
    assert "published" in text
    assert "ALGM" in text


def test_a_second_bundle_of_the_same_weights_gives_the_dense_row() -> None:
    alone, dense = bundle_of(evaluations=(MERGED,)), bundle_of("plain", evaluations=(DENSE,))
    assert "not run" in section(report_page(alone), "cost")
    html = report_page(alone, [dense])
    assert "plain" in section(html, "cost")
    assert "66.63 (-4.24)" in section(html, "cost")
    assert "70.87" not in section(html, "accuracy")


def test_tome_takes_two_columns_however_many_blocks_merge() -> None:
    plan = MergePlan(clap_layers=(), gbm_layers=(), method="tome", tome_r=(7,) * 6)
    record = evaluation("torch", 71.0, tokens(**{f"tome_{i}": 1024.0 - 7 * i for i in range(1, 7)}), 30.0)
    kind = replace(recipe("segmenter_vit_s16_camvid"), merging=plan)
    html = report_page(bundle_of(kind=kind, evaluations=(record,)))
    assert "1024 → 1017 → 982" in html
    assert "tokens after ToMe 1" in section(html, "accuracy")
    assert ("after ToMe 6" in html, "ToMe 5" in html, "TOME" in html) == (True, False, False)


def test_figures_without_a_pixel_or_a_count_are_left_open() -> None:
    unknown = {"miou_percent": None, "gmacs_per_window_mean": None}
    html = report_page(full_with(evaluations=tuple(structs.replace(one, **unknown) for one in FULL["evaluations"])))
    assert "not run" in section(html, "trade-off")
    assert "None" not in html


def test_engines_say_what_they_were_built_for() -> None:
    plugins = [Plugin(name=name, plugin=plugin) for name, plugin in zip("abc", ("clap", "gbm", "gbm"), strict=True)]
    engine = Engine(
        runtime="tensorrt-rtx",
        version="10.16.1",
        precision="fp16",
        batches=(1, 4, 8),
        compute_capabilities=("8.9", "12.0"),
        version_compatible=False,
        hardware_compatible=False,
        onnx_hash="ab",
        plugin_sources=None,
        engine_bytes=1,
        parsed_network=ParsedNetwork(plugins=tuple(plugins), layers={"ATTENTION_INPUT": {"FLOAT": 4}}),
        build_seconds=61.4,
        usual_rows={"clap_1": 612, "gbm_5": 301},
        usual_rows_of="100 pictures of camvid",
        attention_in_parts=4,
    )
    half = structs.replace(engine, usual_rows={}, attention_in_parts=0)
    merge = EngineMerge(kind="clap", inputs=(), outputs=(), attributes=())
    parts = EngineStretches(runtime="tensorrt-rtx", engines=(half, engine), merges=(merge,))
    excuse = not_run("parity", "tensorrt-rtx", "no RTX GPU here")
    html = report_page(bundle_of(engines=(engine,), engine_stretches=(parts,), not_run=(excuse,)))
    text = section(html, "environment")
    for part in ("10.16.1", "fp16", "1, 4, 8", "8.9, 12.0", "clap, gbm", "61", "whole", "part 1 of 2", "part 2 of 2"):
        assert part in text
    assert "612 after CLAP, 301 after GBM (measured on 100 pictures of camvid)" in text
    assert "several kernels in 4 of 4 layers: slower, and a value for every pair of tokens" in text
    assert "one kernel in each of 4 layers" in text
    assert "every picture has as many" in text
    assert "parity on tensorrt-rtx: no RTX GPU here" in section(html, "summary")


def test_failed_images_are_named() -> None:
    records = changed(FULL["evaluations"], 1, failures={"broken": "cut short"})
    assert "broken: cut short" in section(report_page(full_with(evaluations=records)), "accuracy")


def test_published_rows_stand_beside_the_measured_one() -> None:
    html = report_page(bundle_of(kind=recipe("segmenter_vit_s16_ade20k")), published=read_published())
    text = section(html, "published")
    assert "46.4" in text
    assert "tue-mps/algm-segmenter" in text
    assert "CTS, 30 % of the tokens shared" in text
    assert "not run" in text
    other = report_page(full_with(kind=recipe("segmenter_vit_s16_ade20k")), published=read_published())
    assert "66.63" not in section(other, "published")  # measured on another data set


# --------------------------------------------------------------------------------------------------- files, pictures


def panel(picture: np.ndarray, foot: np.ndarray | None = None) -> Panel:
    return Panel("Title", "what it shows", picture.astype(np.uint8), None if foot is None else foot.astype(np.uint8))


def decoded(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def test_pictures_become_small_data_urls() -> None:
    labels = np.zeros((40, 60, 3))
    labels[:20] = (200, 10, 10)
    image = decoded(panel(labels).data_url())
    assert (image.format, image.size) == ("PNG", (60, 40))
    assert np.array_equal(np.asarray(image.convert("RGB")), labels)
    noise = np.random.default_rng(0).integers(0, 256, (800, 1440, 3))
    image = decoded(panel(noise, noise[:40]).data_url())
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


def test_a_gallery_of_tome_has_no_dense_prediction(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """No threshold makes its network dense, so there is nothing to hold the prediction against."""
    plan = MergePlan(clap_layers=(), gbm_layers=(), method="tome", tome_r=(8, 0, 4))
    kind = replace(tiny_bundle.recipe, merging=plan)
    folder = Path(shutil.copytree(tiny_bundle.path, tmp_path / "tome"))
    write_manifest(folder, structs.replace(tiny_bundle.manifest, recipe=kind, signature=signature_of(kind)))
    Image.fromarray(scene(4)[0][:128, :128]).save(tmp_path / "scene.png")
    shown = draw_gallery(Bundle.open(folder), "torch", [Photo("scene", tmp_path / "scene.png")], progress=False)
    panels = shown.examples[0].panels
    titles = ["Photo", "After ToMe, layer 1", "After ToMe, layer 3", "Prediction"]
    assert [one.title for one in panels] == titles
    assert [one.subtitle.split(" tokens")[0] for one in panels[1:3]] == ["56 of 64", "52 of 64"]


def test_the_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    assert write_report([bundle_of(**FULL)], target) == target
    assert target.read_text(encoding="utf-8").endswith("</html>\n")
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(BundleError, match="expected a folder for the report"):
        write_report([bundle_of(**FULL)], tmp_path / "absent" / "report.html")


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
    page = report_page(bundle_of(**FULL), gallery=gallery, published=read_published())
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
