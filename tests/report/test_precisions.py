"""The table of precisions: what runs decide, and what records tell of the same form, pictures and conditions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from algm_deploy.bundle.records import Speed
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import compare_precisions, evaluate
from algm_deploy.errors import BundleError, RuntimeUnavailableError
from algm_deploy.evaluation.datasets import Dataset, open_dataset
from algm_deploy.parity.pairwise import Standing
from algm_deploy.pictures.shipped import scene
from algm_deploy.report.precisions import precision_notes, precision_rows, precision_table, precision_words

TORCH = "torch"


@pytest.fixture
def bundles(tiny_bundle: Bundle, tiny_export: Callable[..., Bundle], copied: Callable[..., Bundle]) -> list[Bundle]:
    return [copied(tiny_bundle), copied(tiny_export({"precision": "bf16"}), "low")]


def speed(throughput: float, variant: str, **facts: object) -> Speed:
    taken = {"runtime": TORCH, "protocol": "mixed", "batch": 2, "stable": True, "device": "a CPU"}
    return Speed(**{**taken, "variant": variant, "throughput_img_per_s": throughput, **facts})


@pytest.fixture
def recorded(bundles: list[Bundle], labelled: Dataset) -> list[Bundle]:
    """Bundles with records: of the second, mIoU without merging is of other pictures."""
    for bundle, factor in zip(bundles, (1, 2), strict=True):
        for dense in (True, False):
            found = evaluate(bundle, labelled, TORCH, dense=dense, progress=False)
            other = dense and factor == 2
            bundle.record(structs.replace(found, miou_percent=50 + factor, images=found.images + other))
            bundle.record(speed(10 * factor * (1 if dense else 2), "dense" if dense else "merged"))
        bundle.record(speed(1e6, "truncated"))
        bundle.record(speed(1e6, "merged", protocol="duplicate", stable=False))
    return [Bundle.open(bundle.path) for bundle in bundles]


def test_rows_tell_what_runs_decide_and_what_records_hold(recorded: list[Bundle]) -> None:
    standings = compare_precisions(recorded, TORCH, count=2)
    first, low, merged, low_merged = rows = precision_rows(standings)
    assert [(row.precision, row.merging) for row in rows] == [
        ("fp32", "dense"), ("bf16", "dense"), ("fp32", "merged"), ("bf16", "merged"),
    ]  # fmt: skip
    assert [row.labels_equal_percent for row in (first, merged)] == [100, 100]
    assert 50 < low.labels_equal_percent < 100
    assert set(merged.grouped_otherwise_percent.values()) == {0}
    assert low.grouped_otherwise_percent == {}
    assert low_merged.grouped_otherwise_percent.keys() == {"clap_1", "gbm_3"}
    assert [row.ms_a_picture for row in rows] == [100, 50, 50, 25]
    assert [row.times_as_fast for row in rows] == [1, 2, 2, 4]
    assert [row.miou_points for row in rows] == [0, None, 0, 1], "other pictures say nothing of a difference"
    assert low.bytes_on_disk < 0.6 * first.bytes_on_disk
    table = precision_table(rows)
    assert table.header[5:7] == ("grouped otherwise by CLAP, %", "grouped otherwise by GBM, %")
    assert table.rows[0][3:5] == ("51.00 (+0.00)", "100.000")
    assert table.rows[1][3] == "52.00"
    assert table.rows[3][-3:-1] == ("25.00", "4.00")


@pytest.mark.parametrize(
    ("img_per_s", "facts", "times", "said"),
    [
        (8.0, {}, [1, 2, 2, 4], "dense: 100.00 ms a picture"),
        (25.0, {}, [0.4, 0.8, 0.8, 1.6], "dense, cuDNN attention: 40.00 ms a picture"),
        (25.0, {"batch": 1}, [1, 2, 2, 4], "dense: 100.00 ms a picture"),
        (25.0, {"stable": False}, [1, 2, 2, 4], "dense: 100.00 ms a picture"),
    ],
    ids=["slower", "faster", "of other batches", "not steady"],
)
def test_times_are_against_the_faster_dense_network(
    recorded: list[Bundle], img_per_s: float, facts: dict[str, object], times: list[float], said: str
) -> None:
    """What merging gains over this project's own attention may be a loss against cuDNN's."""
    recorded[0].record(speed(img_per_s, "dense_cudnn", **facts))
    rows = precision_rows(compare_precisions(list(map(Bundle.open, (one.path for one in recorded))), TORCH, count=1))
    assert [row.times_as_fast for row in rows] == pytest.approx(times)
    assert [row.ms_a_picture for row in rows] == [100, 50, 50, 25], "each row's own, as its labels are"
    assert precision_notes(rows)[1] == f"times as fast are against the first bundle's {said}"


def test_what_no_record_tells_is_left_open(bundles: list[Bundle]) -> None:
    rows = precision_rows(compare_precisions(bundles, TORCH, count=1))
    assert len(precision_notes(rows)) == 1
    table = precision_table(rows)
    assert [(row[3], *row[-3:-1]) for row in table.rows] == [("-", "-", "-")] * 4


def test_what_a_runtime_computes_instead_is_said(bundles: list[Bundle]) -> None:
    rows = precision_rows(compare_precisions(bundles, "onnxruntime-cpu", count=1))
    assert [row.precision for row in rows] == ["fp32", "bf16, in fp32"] * 2


def test_levels_computed_in_floating_point_are_called_simulated(
    tiny_bundle: Bundle, int8_bundle: Bundle, measured_fp8_bundle: Bundle
) -> None:
    def words(bundle: Bundle, runtime: str) -> str:
        return precision_words(Standing(bundle, runtime, True, ()))

    assert [words(one, TORCH) for one in (int8_bundle, measured_fp8_bundle)] == ["int8, simulated", "fp8, simulated"]
    assert words(tiny_bundle, TORCH) == "fp32"
    assert words(int8_bundle, "onnxruntime-cpu") == "int8"
    assert [words(measured_fp8_bundle, name) for name in ("tensorrt", "openvino")] == ["fp8", "fp8, in fp16"]


def test_bundles_that_cannot_stand_side_by_side(tiny_bundle: Bundle, wide_bundle: Bundle, int8_bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="expected two bundles that take the same windows"):
        compare_precisions([tiny_bundle, wide_bundle], TORCH)
    with pytest.raises(RuntimeUnavailableError, match="has no products in int8"):
        compare_precisions([int8_bundle, tiny_bundle], "onnxruntime-cuda")


@pytest.fixture
def labelled(tmp_path: Path) -> Dataset:
    """Two drawn scenes, each pixel labelled by its brightness."""
    from PIL import Image

    for index in range(2):
        pixels = scene(index)[0][:128, :128]
        for kind, content in (("images", pixels), ("labels", pixels[..., 0] // 24)):
            path = tmp_path / "data" / kind / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(content).save(path)
    names = ", ".join(f'"{index}"' for index in range(11))
    (tmp_path / "data" / "classes.json").write_text(f'{{"names": [{names}]}}')
    return open_dataset("folder", tmp_path / "data")
