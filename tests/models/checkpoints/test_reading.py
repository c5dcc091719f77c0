"""Official checkpoint files, and what is refused without running anything."""

from __future__ import annotations

import io
import os
import pickle  # noqa: TID251 - to write the files that must be refused
import re
import time
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from official_files import TINY, official, tensors, write

from algm_deploy.errors import CheckpointError
from algm_deploy.models.checkpoints.reading import read_checkpoint
from algm_deploy.models.checkpoints.variant import settings_from_variant
from algm_deploy.models.checkpoints.weights import state_dict_for


def test_a_state_dict_may_be_all_there_is(tmp_path: Path) -> None:
    torch.save(tensors(TINY), tmp_path / "pytorch_model.bin")
    checkpoint = read_checkpoint(tmp_path / "pytorch_model.bin")
    assert set(checkpoint.state_dict) == set(tensors(TINY))
    assert checkpoint.unread == ()


@pytest.mark.parametrize("name", ["checkpoint.pth", "model.safetensors", "weights"])
def test_safetensors_are_read_whatever_they_are_called(tmp_path: Path, name: str) -> None:
    safetensors.torch.save_file(tensors(TINY), tmp_path / name)
    checkpoint = read_checkpoint(tmp_path / name if name == "weights" else tmp_path)
    assert checkpoint.path == tmp_path / name
    read = state_dict_for(TINY, checkpoint).state_dict
    assert torch.equal(read["encoder.cls_token"], tensors(TINY)["encoder.cls_token"])


def test_a_checkpoint_that_is_called_safetensors(tmp_path: Path) -> None:
    torch.save({"model": tensors(TINY)}, tmp_path / "model.safetensors")
    assert set(read_checkpoint(tmp_path).state_dict) == set(tensors(TINY))


def test_damaged_safetensors(tmp_path: Path) -> None:
    content = safetensors.torch.save(tensors(TINY))
    (tmp_path / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=r"expected whole safetensors, got damaged ones \(.*\): copy them again"):
        read_checkpoint(tmp_path)


# Names that wrappers write


def under(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + key: value for key, value in tensors(TINY).items()}


@pytest.mark.parametrize(
    ("content", "notes"),
    [
        (
            {"state_dict": under("module.")},
            ["every name begins with module., as a wrapper writes it, which was left out"],
        ),
        (under("model.module."), ["every name begins with model.module., as a wrapper writes it, which was left out"]),
        ({"model": under("_orig_mod.")}, ["_orig_mod. in names, as a wrapper writes it, was left out"]),
        (
            {key.replace("blocks.", "blocks._orig_mod.") if "0" in key else key: v for key, v in tensors(TINY).items()},
            ["_orig_mod. in names, as a wrapper writes it, was left out"],
        ),
        (
            {"model": {**under("module."), "n_averaged": torch.tensor(3)}},
            ["every name begins with module.", "by its names it holds weights averaged over the training (EMA or SWA)"],
        ),
        (under("model_ema."), ["every name begins with model_ema.", "by its names it holds weights averaged"]),
        (
            {**under("model."), **under("ema.module.")},
            ["every name begins with model.", "its moving average (EMA), ema.module.encoder.cls_token and"],
        ),
        ({"model": tensors(TINY), "model_ema": tensors(TINY)}, ["its moving average (EMA), model_ema, was left alone"]),
        ({"model": tensors(TINY), "schema": 3}, []),
    ],
    ids=[
        "parallel",
        "twice",
        "compiled",
        "compiled_inside",
        "averaged",
        "average",
        "average_beside",
        "entry_beside",
        "none",
    ],
)
def test_names_of_wrappers_are_left_out_and_told(tiny: Path, content: dict, notes: list[str]) -> None:
    torch.save(content, tiny)
    checkpoint = read_checkpoint(tiny)
    assert set(checkpoint.state_dict) == set(tensors(TINY))
    assert settings_from_variant(checkpoint)["network.depth"] == TINY.depth
    assert len(checkpoint.notes) == len(notes)
    for said, expected in zip(checkpoint.notes, notes, strict=True):
        assert said.startswith(f"checkpoint.pth: {expected}")


def test_names_that_would_become_one_stay(tmp_path: Path) -> None:
    torch.save({"a._orig_mod.b": torch.zeros(1), "a.b": torch.zeros(2)}, tmp_path / "checkpoint.pth")
    checkpoint = read_checkpoint(tmp_path)
    assert set(checkpoint.state_dict) == {"a._orig_mod.b", "a.b"}
    assert checkpoint.notes == ()


def test_names_of_no_known_wrapper(tiny: Path) -> None:
    torch.save(under("student."), tiny)
    with pytest.raises(
        CheckpointError, match=r"such as encoder\.patch_embed.*, got student\.encoder.*: pair the files"
    ):
        settings_from_variant(read_checkpoint(tiny))


@pytest.mark.parametrize(
    ("average", "place"),
    [
        ({"model_ema": tensors(TINY), "epoch": 3}, "['model_ema']"),
        ({"state_dict_ema": tensors(TINY)}, "['state_dict_ema']"),
        ({"ema": {"decay": 0.99, "shadow": tensors(TINY)}}, "['ema']['shadow']"),
    ],
)
def test_a_moving_average_alone_is_named_with_the_remedy(tiny: Path, average: dict, place: str) -> None:
    torch.save(average, tiny)
    remedy = re.escape(f"save it as torch.save({{'model': torch.load(path){place}}}, other)")
    with pytest.raises(CheckpointError, match=rf"got their moving average \(EMA\) alone: .*{remedy}"):
        read_checkpoint(tiny)


@pytest.mark.parametrize("entry", ["model", "state_dict"])
@pytest.mark.parametrize("as_zip", [True, False])
def test_the_remedy_names_the_entry_that_the_file_has(tiny: Path, entry: str, as_zip: bool) -> None:
    content = {"meta": np.float64(0.1), entry: tensors(TINY)}
    torch.save(content, tiny, _use_new_zipfile_serialization=as_zip)
    with pytest.raises(
        CheckpointError, match=rf"save its entry '{entry}' alone, as torch\.save\({{'{entry}': "
    ) as caught:
        read_checkpoint(tiny)
    assert "\n" not in str(caught.value)


# Files that are refused


def test_a_file_that_may_not_be_read(tiny: Path, unprivileged: Callable[[], AbstractContextManager[None]]) -> None:
    tiny.chmod(0)
    with unprivileged(), pytest.raises(CheckpointError, match="got Permission denied: change its permissions or copy"):
        read_checkpoint(tiny)


class WritesAFile:
    """A pickle that creates a file when it is loaded without care."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def zip_with(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as source:
        records = [(name, source.read(name)) for name in source.namelist()]
    with zipfile.ZipFile(path, "w", compression) as target:
        for name, data in records:
            target.writestr(name, change(name, data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def text(path: Path) -> None:
    path.write_text("<html>404</html>")


def hostile(path: Path) -> None:
    torch.save({"model": tensors(TINY), "loss_scaler": WritesAFile(path.with_name("owned"))}, path)


def hostile_without_zip(path: Path) -> None:
    path.write_bytes(pickle.dumps(WritesAFile(path.with_name("owned")), protocol=2))


def hostile_legacy(path: Path) -> None:
    content = {"model": {"a": WritesAFile(path.with_name("owned"))}}
    torch.save(content, path, _use_new_zipfile_serialization=False)


def object_in_the_scheduler(path: Path) -> None:
    torch.save(official(tensors(TINY)) | {"lr_scheduler": {"base_lr": np.float64(0.001)}}, path)


def a_list(path: Path) -> None:
    torch.save([1, 2], path)


def state_dict_beside_others(path: Path) -> None:
    torch.save(tensors(TINY) | {"epoch": 3}, path)


def value_is_no_tensor(path: Path) -> None:
    torch.save({"model": {"encoder.cls_token": 3}}, path)


def whole_numbers(path: Path) -> None:
    torch.save({"model": {"encoder.cls_token": torch.zeros(1, 1, 32, dtype=torch.int64)}}, path)


def sparse(path: Path) -> None:
    torch.save({"model": {"encoder.cls_token": torch.zeros(1, 1, 32).to_sparse()}}, path)


def expanded_claim(path: Path) -> None:
    torch.save({"model": {"encoder.cls_token": torch.zeros(1).expand(10**6, 10**6)}}, path)


def storage_claim(path: Path) -> None:
    """The pickle claims a storage far larger than the record that holds it."""
    torch.save({"model": {"encoder.cls_token": torch.zeros(1_000_003)}}, path)
    zip_with(path, lambda name, data: data[:64] if name.endswith("data/0") else data)


def compressed_claim(path: Path) -> None:
    torch.save({"model": {"encoder.cls_token": torch.zeros(4_000_000)}}, path)
    zip_with(path, lambda name, data: data, zipfile.ZIP_DEFLATED)


def legacy_claim(path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"model": {"a": torch.zeros(1000)}}, buffer, _use_new_zipfile_serialization=False)
    path.write_bytes(buffer.getvalue().replace((1000).to_bytes(2, "little"), (60000).to_bytes(2, "little")))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (empty, "expected a checkpoint written by torch.save"),
        (half, "expected a checkpoint written by torch.save"),
        (text, "expected a checkpoint written by torch.save"),
        (hostile, "found posix.mkdir, which could execute code"),
        (hostile_without_zip, "found posix.mkdir, which could execute code"),
        (hostile_legacy, "found posix.mkdir, which could execute code"),
        (object_in_the_scheduler, "found numpy.* save its entry 'model' alone"),
        (a_list, "expected a dict .* got list"),
        (state_dict_beside_others, "under 'model' or 'state_dict' .* got entries encoder.cls_token"),
        (value_is_no_tensor, "expected named tensors .* got int as encoder.cls_token"),
        (whole_numbers, "expected plain floating-point weights, got encoder.cls_token as torch.int64"),
        (sparse, "expected plain floating-point weights, got encoder.cls_token .* torch.sparse_coo"),
        (expanded_claim, "claims shape"),
        (storage_claim, "expected a checkpoint written by torch.save, got one that cannot be read"),
        (compressed_claim, "its records claim"),
        (legacy_claim, "expected a checkpoint written by torch.save"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_refused_files(tiny: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(tiny)
    started = time.perf_counter()
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(tiny)
    assert time.perf_counter() - started < 2
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert not tiny.with_name("owned").exists()


def test_the_hostile_file_would_have_run(tmp_path: Path) -> None:
    torch.save({"model": WritesAFile(tmp_path / "owned")}, tmp_path / "checkpoint.pth")
    torch.load(tmp_path / "checkpoint.pth", weights_only=False)
    assert (tmp_path / "owned").exists()


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a checkpoint at .*/checkpoint.pth, found no file"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "got an empty file: copy or download it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "got a Git LFS pointer .*git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "got a web page: download"),
        (b'{"weights": 1}', "got a text file that begins .*weights.* name the file of the weights"),
        (b"classes:\n- sky\n", "got a text file that begins 'classes"),  # to a pickle, c names something to import
        ("größe: 3\n".encode() * 9, "got a text file that begins 'größe: 3"),
        (("x" * 63 + "ö").encode(), "got a text file that begins 'xxx"),  # the reader sees half of the last character
        (b"\x1f\x8b\x08\x00", "got a gzip archive: unpack it"),
        (b"PK\x03\x04\x00\x00", "got a damaged file, or one whose end is missing: copy"),
        (b"\x89PNG\r\n\x1a\n", "got a file that begins with the bytes 89 50 4e 47: name another one"),
        (pickle.dumps({"a": 1}, protocol=2)[:-3], "got one that cannot be read .*: copy it again"),
    ],
)
def test_what_is_no_checkpoint_is_called_what_it_is(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "checkpoint.pth"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"expected a checkpoint written by torch.save, {message}") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert "operand" not in str(caught.value)


def test_an_archive_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("release/checkpoint.pth", b"x")
    with pytest.raises(CheckpointError, match=r"a zip archive of release/checkpoint\.pth: unpack it"):
        read_checkpoint(path)


@settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_changed_bytes_never_escape_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    buffer = io.BytesIO()
    torch.save({"model": {"encoder.cls_token": torch.ones(1, 1, 32)}, "epoch": 3}, buffer)
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("fuzz") / "checkpoint.pth"
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    try:
        state_dict_for(TINY, read_checkpoint(path))
    except CheckpointError:
        return
    raise AssertionError("one tensor passed for a whole network")


@pytest.mark.parametrize(
    "content",
    [
        "!!python/object/apply:os.mkdir [owned]",
        "a: !!python/name:os.system",
        "- 1\n- 2\n",
        "",
        "a: [1",
        "\x00",
        "a: 2001-99-99",
        "[" * 5000,
        "a: " + "9" * 5000,
        "x: " + "y" * 2_000_000,
    ],
    ids=["call", "name", "list", "empty", "cut", "binary", "date", "deep", "digits", "large"],
)
def test_wrong_variant_files(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, {"model": tensors(TINY)}, content)
    with pytest.raises(CheckpointError, match=r"variant\.yml: expected") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "owned").exists()
