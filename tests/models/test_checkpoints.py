"""Official checkpoint files: what they say, and what is refused without running anything."""

from __future__ import annotations

import io
import os
import pickle  # noqa: TID251 - to write the files that must be refused
import re
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from algm_deploy.errors import CheckpointError
from algm_deploy.models import checkpoints
from algm_deploy.recipe.schema import DENSE, MergePlan, Network, Protocol

TINY = Network("segmenter", embed_dim=32, depth=2, heads=2, classes=5, image_size=(64, 96), decoder_depth=1)
LINEAR = Network("segmenter", 32, 2, 2, 5, (64, 96), decoder="linear", decoder_depth=0)


def tensors(network: Network) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = checkpoints.expected_shapes(network)
    shapes |= {"encoder.head.weight": (1000, network.embed_dim), "encoder.head.bias": (1000,)}
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def variant(network: Network) -> dict[str, Any]:
    """The keys that the published training code writes."""
    decoder: dict[str, Any] = {"name": network.decoder, "drop_path_rate": 0.0, "dropout": 0.1}
    if network.decoder == "mask_transformer":
        decoder["n_layers"] = network.decoder_depth
    return {
        "world_batch_size": 8,
        "version": "normal",
        "dataset_kwargs": {
            "dataset": "ade20k",
            "normalization": "vit",
            "patch_type": "algm",
            "threshold": 0.9,
            "merging_window_size": (2, 2),
            "selected_layers": (1, 2),
        },
        "net_kwargs": {
            "image_size": network.image_size,
            "patch_size": network.patch_size,
            "d_model": network.embed_dim,
            "n_heads": network.heads,
            "n_layers": network.depth,
            "normalization": "vit",
            "distilled": False,
            "backbone": "vit_tiny_patch16_384",
            "n_cls": network.classes,
            "decoder": decoder,
        },
        "inference_kwargs": {"im_size": 64, "window_size": 64, "window_stride": 48},
    }


def official(model: dict[str, Any]) -> dict[str, Any]:
    """A file as the published training loop writes it: optimizer, scheduler and scaler states included."""
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer)
    return {
        "model": model,
        "optimizer": optimizer.state_dict(),
        "n_cls": 5,
        "lr_scheduler": scheduler.state_dict(),
        "epoch": 63,
        "loss_scaler": torch.amp.GradScaler("cpu").state_dict(),
    }


def write(folder: Path, content: object, facts: object) -> Path:
    torch.save(content, folder / "checkpoint.pth")
    (folder / "variant.yml").write_text(facts if isinstance(facts, str) else yaml.dump(facts))
    return folder / "checkpoint.pth"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write(tmp_path, official(tensors(TINY)), variant(TINY))


@pytest.mark.parametrize("network", [TINY, LINEAR], ids=lambda network: network.decoder)
def test_official_file(tmp_path: Path, network: Network) -> None:
    model = tensors(network)
    path = write(tmp_path, official(model), variant(network))
    assert "!!python/tuple" in path.with_name("variant.yml").read_text()
    checkpoint = checkpoints.read_checkpoint(tmp_path)
    assert checkpoint.path == path
    assert set(checkpoint.unread) == {"optimizer", "n_cls", "lr_scheduler", "epoch", "loss_scaler"}
    assert checkpoints.network_from_variant(checkpoint) == network
    weights = checkpoints.state_dict_for(network, checkpoint)
    assert weights.unused == ("encoder.head.bias", "encoder.head.weight")
    assert weights.resized_from is None
    assert set(weights.state_dict) == set(checkpoints.expected_shapes(network))
    assert all(torch.equal(value, model[key]) for key, value in weights.state_dict.items())


def test_recipe_from_variant(tiny: Path) -> None:
    recipe = checkpoints.recipe_from_variant(checkpoints.read_checkpoint(tiny))
    assert recipe.network == TINY
    assert recipe.merging == MergePlan(clap_layers=(1,), gbm_layers=(2,), window=(2, 2), clap_threshold=0.9)
    assert recipe.protocol == Protocol("ade20k", short_side=64, window=64, stride=48, max_ratio=4.0)
    assert recipe.name == tiny.parent.name


def test_a_checkpoint_trained_without_merging_is_dense(tmp_path: Path) -> None:
    facts = variant(TINY)
    facts["dataset_kwargs"] |= {"patch_type": "pure", "threshold": None, "selected_layers": None}
    checkpoint = checkpoints.read_checkpoint(write(tmp_path, official(tensors(TINY)), facts))
    assert checkpoints.plan_from_variant(checkpoint) == DENSE


def test_trained_checkpoints(shared_dir: Path) -> None:
    checkpoint = checkpoints.read_checkpoint(shared_dir / "models" / "segmenter_vit_s16_camvid_algm")
    recipe = checkpoints.recipe_from_variant(checkpoint)
    assert recipe.network == Network("segmenter", 384, 12, 6, 11, (512, 512))
    assert recipe.merging == MergePlan(clap_threshold=0.9319)
    assert recipe.protocol == Protocol("camvid", 512, 512, 480)
    weights = checkpoints.state_dict_for(recipe.network, checkpoint)
    assert len(weights.state_dict) == 183
    assert {value.dtype for value in weights.state_dict.values()} == {torch.float32}


@pytest.mark.parametrize(("decoder", "decoder_depth"), [("mask_transformer", 2), ("linear", 0)])
def test_golden_networks(vectors_dir: Path, decoder: Any, decoder_depth: int) -> None:
    network = Network("segmenter", 64, 4, 2, 11, (128, 128), decoder=decoder, decoder_depth=decoder_depth)
    checkpoint = checkpoints.read_checkpoint(vectors_dir / f"{decoder}_4x64.pth")
    weights = checkpoints.state_dict_for(network, checkpoint)
    assert (weights.unused, weights.resized_from) == ((), None)
    assert set(weights.state_dict) == set(checkpoint.state_dict)


def test_half_weights_become_fp32_copies(tmp_path: Path) -> None:
    model = {key: value.half() for key, value in tensors(TINY).items()}
    checkpoint = checkpoints.read_checkpoint(write(tmp_path, {"model": model}, variant(TINY)))
    weights = checkpoints.state_dict_for(TINY, checkpoint)
    assert {value.dtype for value in weights.state_dict.values()} == {torch.float32}
    tensors_again = checkpoint.state_dict["encoder.cls_token"]
    weights.state_dict["encoder.cls_token"].zero_()
    assert bool(tensors_again.any())


def test_a_state_dict_may_be_all_there_is(tmp_path: Path) -> None:
    torch.save(tensors(TINY), tmp_path / "pytorch_model.bin")
    checkpoint = checkpoints.read_checkpoint(tmp_path / "pytorch_model.bin")
    assert set(checkpoint.state_dict) == set(tensors(TINY))
    assert checkpoint.unread == ()


def test_variant_is_optional_until_it_is_needed(tmp_path: Path) -> None:
    torch.save({"model": tensors(TINY)}, tmp_path / "other.pth")
    checkpoint = checkpoints.read_checkpoint(tmp_path / "other.pth")
    assert checkpoints.state_dict_for(Network("segmenter", 32, 2, 2, 5, (64, 96), decoder_depth=1), checkpoint)
    with pytest.raises(CheckpointError, match=r"expected variant.yml beside .*name a recipe"):
        checkpoints.network_from_variant(checkpoint)


# Position embeddings


def test_position_embedding_is_resized_once_like_the_published_code(tiny: Path) -> None:
    checkpoint = checkpoints.read_checkpoint(tiny)
    larger = Network("segmenter", 32, 2, 2, 5, (96, 64), decoder_depth=1)
    weights = checkpoints.state_dict_for(larger, checkpoint)
    assert weights.resized_from == (4, 6)
    stored = checkpoint.state_dict["encoder.pos_embed"]
    got = weights.state_dict["encoder.pos_embed"]
    assert got.shape == (1, 25, 32)
    assert torch.equal(got[:, 0], stored[:, 0])
    by_hand = stored[0, 1:].reshape(4, 6, 32).permute(2, 0, 1)[None]
    by_hand = torch.nn.functional.interpolate(by_hand, (6, 4), mode="bilinear", align_corners=False)
    assert torch.equal(got[0, 1:].reshape(6, 4, 32), by_hand[0].permute(1, 2, 0))


def test_resizing_interpolates_rows_as_rows() -> None:
    rows = torch.arange(4.0).repeat_interleave(6).reshape(1, 24, 1)  # constant along each row of a 4 x 6 grid
    resized = checkpoints.resize_position_embedding(torch.cat([torch.tensor([[[9.0]]]), rows], 1), (4, 6), (8, 3))
    assert resized[0, 0].item() == 9
    grid = resized[0, 1:].reshape(8, 3)
    assert torch.equal(grid, grid[:, :1].expand(8, 3))
    assert grid[:, 0].tolist() == [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]


def test_a_square_grid_is_assumed_without_variant(tmp_path: Path) -> None:
    square = Network("segmenter", 32, 2, 2, 5, (64, 64), decoder_depth=1)
    torch.save({"model": tensors(square)}, tmp_path / "checkpoint.pth")
    assert checkpoints.state_dict_for(TINY, checkpoints.read_checkpoint(tmp_path)).resized_from == (4, 4)
    torch.save({"model": tensors(TINY)}, tmp_path / "checkpoint.pth")
    with pytest.raises(CheckpointError, match=r"square grid or that of variant\.yml, got 24"):
        checkpoints.state_dict_for(square, checkpoints.read_checkpoint(tmp_path))


# Files that are refused


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
        checkpoints.read_checkpoint(tiny)
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
        checkpoints.read_checkpoint(tmp_path)


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
        (safetensors.torch.save({"a": torch.zeros(3)}), "got safetensors: save what they hold as torch.save"),
        (b"\x89PNG\r\n\x1a\n", "got a file that begins with the bytes 89 50 4e 47: name another one"),
        (pickle.dumps({"a": 1}, protocol=2)[:-3], "got one that cannot be read .*: copy it again"),
    ],
)
def test_what_is_no_checkpoint_is_called_what_it_is(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "checkpoint.pth"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"expected a checkpoint written by torch.save, {message}") as caught:
        checkpoints.read_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert "operand" not in str(caught.value)


def test_an_archive_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("release/checkpoint.pth", b"x")
    with pytest.raises(CheckpointError, match=r"a zip archive of release/checkpoint\.pth: unpack it"):
        checkpoints.read_checkpoint(path)


@settings(max_examples=150, deadline=2000)
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
        checkpoints.state_dict_for(TINY, checkpoints.read_checkpoint(path))
    except CheckpointError:
        return
    raise AssertionError("one tensor passed for a whole network")


# Tensors that do not fit


def test_missing_and_unknown_keys(tmp_path: Path) -> None:
    model = tensors(TINY)
    del model["encoder.norm.bias"]
    model["encoder.blocks.0.ls1.gamma"] = torch.ones(32)
    model["x\ny"] = torch.ones(32)
    checkpoint = checkpoints.read_checkpoint(write(tmp_path, {"model": model}, variant(TINY)))
    with pytest.raises(
        CheckpointError, match=r"missing encoder\.norm\.bias, unknown encoder\.blocks\.0\.ls1\.gamma, 'x\\ny':"
    ):
        checkpoints.state_dict_for(TINY, checkpoint)


def test_many_wrong_keys_make_one_short_sentence(tiny: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"unknown decoder\.blocks\.0\.attn.proj.bias, .* and .* more: choose"
    ) as caught:
        checkpoints.state_dict_for(LINEAR, checkpoints.read_checkpoint(tiny))
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("encoder.blocks.1.mlp.fc1.weight", (64, 32)),
        ("encoder.pos_embed", (1, 25, 16)),
        ("encoder.pos_embed", (25, 32)),
        ("encoder.pos_embed", (1, 1, 32)),
        ("encoder.pos_embed", (1, 0, 32)),
    ],
)
def test_wrong_shape(tmp_path: Path, key: str, shape: tuple[int, ...]) -> None:
    model = tensors(TINY) | {key: torch.zeros(shape)}
    checkpoint = checkpoints.read_checkpoint(write(tmp_path, {"model": model}, variant(TINY)))
    with pytest.raises(CheckpointError, match=r"expected .*embedding|expected encoder.* got"):
        checkpoints.state_dict_for(TINY, checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_weights_that_are_not_finite_in_fp32(tmp_path: Path, value: float) -> None:
    model = tensors(TINY)
    model["decoder.proj_patch"] = model["decoder.proj_patch"].double().index_fill(0, torch.tensor([3]), value)
    checkpoint = checkpoints.read_checkpoint(write(tmp_path, {"model": model}, variant(TINY)))
    with pytest.raises(CheckpointError, match=r"got NaN or infinity in decoder\.proj_patch"):
        checkpoints.state_dict_for(TINY, checkpoint)


def test_a_distilled_deit_has_two_tokens_in_front(tmp_path: Path) -> None:
    facts = variant(TINY)
    facts["net_kwargs"]["distilled"] = True
    model = tensors(TINY) | {"encoder.dist_token": torch.rand(1, 1, 32), "encoder.pos_embed": torch.rand(1, 26, 32)}
    model["encoder.head_dist.weight"] = torch.zeros(5, 32)
    checkpoint = checkpoints.read_checkpoint(write(tmp_path, {"model": model}, facts))
    network = checkpoints.network_from_variant(checkpoint)
    assert network == replace(TINY, extra_tokens=1)
    found = checkpoints.state_dict_for(network, checkpoint)
    tokens = torch.cat([model["encoder.cls_token"], model["encoder.dist_token"]], 1)
    assert torch.equal(found.state_dict["encoder.cls_token"], tokens)
    assert torch.equal(found.state_dict["encoder.pos_embed"], model["encoder.pos_embed"])
    assert "encoder.head_dist.weight" in found.unused
    larger = checkpoints.state_dict_for(replace(network, image_size=(96, 64)), checkpoint)
    assert larger.state_dict["encoder.pos_embed"].shape == (1, 26, 32)
    assert torch.equal(larger.state_dict["encoder.pos_embed"][:, :2], model["encoder.pos_embed"][:, :2])
    with pytest.raises(CheckpointError, match=r"unknown encoder\.dist_token"):
        checkpoints.state_dict_for(TINY, checkpoint)


@pytest.mark.parametrize("distilled", [True, False])
def test_variant_and_tensors_agree_on_distillation(tmp_path: Path, distilled: bool) -> None:
    facts = variant(TINY)
    facts["net_kwargs"]["distilled"] = distilled
    extra = {} if distilled else {"encoder.dist_token": torch.zeros(1, 1, 32)}
    checkpoint = checkpoints.read_checkpoint(write(tmp_path, {"model": tensors(TINY) | extra}, facts))
    with pytest.raises(CheckpointError, match=f"distilled is {distilled} in variant.yml, tensors have {not distilled}"):
        checkpoints.network_from_variant(checkpoint)


# variant.yml


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("net_kwargs.d_model", 48, "d_model is 48 in variant.yml, tensors have 32"),
        ("net_kwargs.d_model", "32", "expected a positive whole number"),
        ("net_kwargs.d_model", None, "expected a positive whole number"),
        ("net_kwargs.n_layers", 10**9, "expected network.depth between 1 and 256, got 1000000000"),
        ("net_kwargs.n_layers", 12, "n_layers is 12 in variant.yml, tensors have 2"),
        ("net_kwargs.n_layers", -1, "expected a positive whole number"),
        ("net_kwargs.n_layers", 10**30, "expected a positive whole number"),
        ("net_kwargs.n_heads", 5, "expected network.heads to divide the width 32, got 5"),
        ("net_kwargs.n_heads", True, "expected a positive whole number"),
        ("net_kwargs.n_cls", 150, "n_cls is 150 in variant.yml, tensors have 5"),
        ("net_kwargs.patch_size", 8, "patch_size is 8 in variant.yml, tensors have 16"),
        ("net_kwargs.image_size", (64, 64, 3), "expected one or two positive whole numbers"),
        ("net_kwargs.image_size", (60, 96), "expected network.image_size in multiples of the patch size 16"),
        ("net_kwargs.image_size", "large", "expected one or two positive whole numbers"),
        ("net_kwargs.normalization", "bgr", "expected vit or deit"),
        ("net_kwargs.normalization", ["vit"], "expected vit or deit"),
        ("net_kwargs.decoder.name", "fcn", "expected mask_transformer or linear"),
        ("net_kwargs.decoder.n_layers", 2, "decoder.n_layers is 2 in variant.yml, tensors have 1"),
        ("net_kwargs.decoder", None, "expected mask_transformer or linear"),
        ("net_kwargs", [], "expected mask_transformer or linear"),
        ("dataset_kwargs.patch_type", "tome", "expected pure or algm"),
        ("dataset_kwargs.selected_layers", None, "expected the 1-based layers that merge"),
        ("dataset_kwargs.selected_layers", (1, "5"), "expected the 1-based layers that merge"),
        ("dataset_kwargs.selected_layers", (5, 1), "CLAP needs the full patch grid"),
        ("dataset_kwargs.selected_layers", (1, 3), "expected merging layers up to 2"),
        ("dataset_kwargs.merging_window_size", (8, 8), "expected a merging.window within the grid (4, 6)"),
        ("dataset_kwargs.threshold", None, "expected a finite number"),
        ("dataset_kwargs.threshold", float("nan"), "expected a finite number"),
        ("dataset_kwargs.merging_window_size", (1, 1), "a CLAP window covers at least two patches"),
        ("dataset_kwargs.dataset", None, "expected the name of a dataset"),
        ("inference_kwargs.window_stride", 0, "expected a positive whole number"),
        ("inference_kwargs.window_stride", 65, "expected protocol.stride between 1 and 64"),
        ("inference_kwargs", None, "expected a positive whole number"),
    ],
)
def test_every_wrong_fact_is_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    facts = variant(TINY)
    *sections, last = key.split(".")
    section = facts
    for name in sections:
        section = section[name]
    section[last] = value
    checkpoint = checkpoints.read_checkpoint(write(tmp_path, {"model": tensors(TINY)}, facts))
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        checkpoints.recipe_from_variant(checkpoint)
    assert str(tmp_path) in str(caught.value)


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
        checkpoints.read_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "owned").exists()
