"""What `benchmarks/kernels/time_kernels.py` records; kernels, times and the GPU here are stand-ins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

DEVICE = {"name": "a GPU"}


@pytest.fixture
def bench(script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark with paths for kernels and random numbers for times, twice as long by the code of 7.5."""
    module = script("kernels/time_kernels.py")

    def timed(bench: Any, batch: int, **facts: Any) -> list[dict[str, Any]]:
        slower = 2 if bench.kernels.name == "ptx_75" else 1
        total_us = slower * batch * bench.repeats * float(torch.rand(()))
        return [module.row(bench.limits, "clap", batch, {"total_us": total_us, "apply_us": 1.0}, 1.0, dtype="float16")]

    def build(names: list[str], architectures: list[int], *, folder: Path, ptx_only: bool) -> dict[str, Path]:
        assert ptx_only
        assert folder == tmp_path / f"ptx_{architectures[0]}"
        return dict.fromkeys(names, folder)

    monkeypatch.setattr(module, "Kernels", lambda path: path)
    monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(module, "ceilings", lambda: {"launch_us": 2.0})
    monkeypatch.setattr(module, "device_facts", lambda: DEVICE)
    monkeypatch.setattr(module, "cases", lambda batches: [(timed, (batch,)) for batch in batches])
    return module


def record_of(bench: Any, folder: Path, *words: str) -> dict[str, Any]:
    file = folder / "record.json"
    bench.main(["--library", str(folder / "native"), "--output", str(file), *words])
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


def test_earlier_code_stands_beside_the_librarys_own(bench: Any, tmp_path: Path) -> None:
    record = record_of(bench, tmp_path, "--ptx", "80", "75", "--batches", "1", "4", "--repeats", "300")
    assert (record["schema"], record["device"]) == (1, DEVICE)
    assert [row["batch"] for row in record["rows"]] == [1, 4]
    assert list(record["ptx"]) == ["80", "75"]
    assert [row["total_us"] for row in record["ptx"]["80"]] == [row["total_us"] for row in record["rows"]]
    assert {row["x_native"] for row in record["ptx"]["80"]} == {1.0}
    assert [row["x_native"] for row in record["ptx"]["75"]] == [2.0, 2.0]
    assert set(record["ptx"]["75"][0]) == {"kernel", "batch", "dtype", "total_us", "x_native"}


def test_without_it_the_record_is_that_of_one_library(bench: Any, tmp_path: Path, root_dir: Path) -> None:
    record = record_of(bench, tmp_path)
    kept = json.loads((root_dir / "benchmarks" / "records" / "kernels_h200.json").read_text(encoding="utf-8"))
    assert set(record) == set(kept)
    assert [row["batch"] for row in record["rows"]] == [1, 8, 32]


def test_what_is_compiled_is_compiled_once(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "ptx_80" / "libalgm_kernels.so"
    library.parent.mkdir()
    library.touch()
    monkeypatch.delattr(bench, "build")
    assert bench.compiled_as_ptx(80) == library


def test_cases_of_other_lengths_are_not_put_side_by_side(bench: Any) -> None:
    with pytest.raises(ValueError, match="shorter"):
        bench.beside([{"kernel": "clap", "total_us": 1.0}], [])


def test_the_record_in_the_repository_has_these_cases(script: Callable[[str], Any], root_dir: Path) -> None:
    module = script("kernels/time_kernels.py")
    kept = json.loads((root_dir / "benchmarks" / "records" / "kernels_h200.json").read_text(encoding="utf-8"))
    merges = [arguments for timed, arguments in module.cases(module.BATCHES) if timed is module.merge_rows]
    asked = [(kind.__name__.lower(), model, batch, module.name_of(dtype)) for kind, model, batch, dtype in merges]
    assert asked == [
        (row["kernel"], row["model"], row["batch"], row["dtype"]) for row in kept["rows"] if "model" in row
    ]
