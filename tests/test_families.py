"""Every network family through the pipeline at toy size: checkpoint, export, portable ONNX, the parity chain."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import FAMILIES, PATCHES, checkpoint_state, toy

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import build, export, parity_windows
from algm_deploy.errors import CheckpointError
from algm_deploy.lowering import onnxruntime as lowering
from algm_deploy.parity.chain import verify
from algm_deploy.recipe.families import architectures
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan, fresh_merges
from algm_deploy.recipe.reading import flatten
from algm_deploy.recipe.schema import Precision, Protocol, Recipe
from algm_deploy.runners.contract import runner
from algm_deploy.runners.onnxruntime import runner as onnxruntime
from algm_deploy.runners.registry import row_of

# The mask transformer's chain is walked in tests/parity, that of DToP's SegViT apart.
CASES = tuple(case for case in FAMILIES if case not in (("segmenter", "mask_transformer"), ("segvit", "prune")))
# Their translations take as long as three others each: tests/models/test_vit_adapter.py has the methods in PyTorch.
SLOW = (("vit_adapter", "upernet"), ("eva", "mask2former"))
IMAGES = 3
Support = Callable[[str, object], None]  # what a passed test proves, for docs/support.md: see benchmarks/support.py


def toy_recipe(family: str, decoder: str) -> Recipe:
    """The family's toy, for windows of the network's size."""
    network, plan = toy(family, decoder)
    side = min(network.image_size)
    return Recipe("toy", network, plan, Protocol("camvid", side, side, side), max_batch=IMAGES)


def checkpoint_of(network: Network, path: Path) -> Path:
    """A checkpoint of random weights as the authors' project writes it: one file, or backbone and head in a folder."""
    state = checkpoint_state(network)
    if "blocks.0.norm1.weight" not in state:  # a backbone's own file
        torch.save({"meta": {"CLASSES": ["a"]}, "state_dict": state}, path)
        return path
    folder = path.with_suffix("")
    folder.mkdir()
    head = {key: state.pop(key) for key in list(state) if key.startswith("decode_head.")}
    torch.save(state, folder / "backbone.pth")
    torch.save({"meta": {"CLASSES": ["a"]}, "state_dict": head}, folder / "head.pth")
    return folder


def toml_of(recipe: Recipe) -> str:
    sections: dict[str, list[str]] = {}
    for key, value in flatten(recipe).items():
        section, _, name = key.rpartition(".")
        if not isinstance(value, Mapping):
            sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
    head = sections.pop("")
    return "\n".join(["schema = 1", *head, *(line for s, rows in sections.items() for line in (f"[{s}]", *rows))])


@pytest.fixture(scope="module")
def bundle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """A new bundle of a toy network, from a checkpoint and a recipe on disk."""

    def make(
        family: str, decoder: str, output: str, plan: MergePlan | None = None, precision: Precision = "fp32"
    ) -> Bundle:
        folder, recipe = tmp_path_factory.mktemp(decoder), toy_recipe(family, decoder)
        recipe = replace(recipe, merging=plan or recipe.merging)
        (folder / "toy.toml").write_text(toml_of(recipe))
        checkpoint = checkpoint_of(recipe.network, folder / "latest.pth")
        return export(
            checkpoint, folder / "bundle", str(folder / "toy.toml"), {"output": output, "precision": precision}
        ).bundle

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "decoder", "output"),
    [
        *((*case, "scores") for case in CASES),
        ("setr", "naive", "labels"),
        ("segvit", "atm", "labels"),
        ("dinov2", "linear", "labels"),
        ("eomt", "queries", "labels"),
    ],
)
def test_the_parity_chain_holds(
    bundle_of: Callable[..., Bundle], record_property: Support, family: str, decoder: str, output: str
) -> None:
    bundle = bundle_of(family, decoder, output)
    images = parity_windows(bundle.recipe, [], IMAGES)
    report = verify(bundle, "onnxruntime-cpu", images, progress=False)
    assert report.batches == (1, 2, 3)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    counts = _token_counts(bundle, images)
    patches = PATCHES[0] * PATCHES[1]
    before = [
        patches if fresh else counts[:, i - 1]
        for i, fresh in enumerate(fresh_merges(bundle.recipe.merging, bundle.recipe.network))
    ]
    assert all((counts[:, i] < before[i]).all() for i in range(1, len(before)))
    assert (counts[:, 0] < patches).any()
    record_property("support", f"algm {family}/{decoder} onnxruntime-cpu verified")


@pytest.mark.gpu
@pytest.mark.parametrize("images", [1, IMAGES])
def test_queries_that_read_rows_of_two_merges_are_in_one_graph(
    bundle_of: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch, images: int
) -> None:
    """SegViT's, of pictures that keep different numbers of rows: launched, joined, and in fp32 on the CPU."""
    monkeypatch.setattr(lowering, "_fits_packed_attention", lambda *_: True)  # whose heads are narrow
    wide, half = (bundle_of("segvit", "atm", "scores", precision=precision) for precision in ("fp32", "fp16"))
    feed = {"image": parity_windows(half.recipe, [], IMAGES)[-images:]}
    with runner(wide, "onnxruntime-cpu") as run:
        expected = run.infer(feed)
    build(half, "onnxruntime-cuda")
    with runner(half, "onnxruntime-cuda") as run:
        launched = run.infer(feed)
        assert run.warm_up(images)
        assert f"batches of {images}" in run.execution
        joined = run.infer(feed)
    assert len(set(expected["token_counts"][:, -1])) == images
    for name, value in joined.items():
        np.testing.assert_array_equal(value, launched[name], err_msg=name)
    np.testing.assert_allclose(joined["scores"], expected["scores"], rtol=0, atol=2e-2)


@pytest.mark.parametrize(("family", "decoder", "precision"), [("setr", "mla", "fp32"), ("dinov2", "linear_ms", "fp16")])
def test_labels_of_a_grid_are_left_to_the_library(
    bundle_of: Callable[..., Bundle],
    ort_library: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    decoder: str,
    precision: Precision,
) -> None:
    """A whole bundle, built with it, has the labels of its portable graph, but where two scores are as high."""
    bundle = bundle_of(family, decoder, "labels", precision=precision)
    images = parity_windows(bundle.recipe, [], IMAGES)
    with runner(bundle, "onnxruntime-cpu") as run:
        portable = run.infer({"image": images})
        assert run.custom_operators == ()
    for name in ("find_library", "require_library"):
        monkeypatch.setattr(onnxruntime, name, lambda _: ort_library)
    build(bundle, "onnxruntime-cpu")
    with runner(bundle, "onnxruntime-cpu") as run:
        own = run.infer({"image": images})
        assert run.custom_operators == ("label_map",)
    np.testing.assert_array_equal(own["token_counts"], portable["token_counts"])
    assert len(np.unique(portable["labels"])) > 1
    assert (own["labels"] == portable["labels"]).mean() > 0.999


@pytest.mark.skipif(not row_of("openvino").installed(), reason="needs OpenVINO: algm-deploy[openvino]")
@pytest.mark.parametrize(("family", "decoder"), CASES)
def test_the_parity_chain_holds_on_openvino(
    bundle_of: Callable[..., Bundle], record_property: Support, family: str, decoder: str
) -> None:
    """One picture, and both extremes: what may differ from family to family are the operators of its decoder."""
    bundle = bundle_of(family, decoder, "scores")
    report = verify(bundle, "openvino", parity_windows(bundle.recipe, [], 1), progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    record_property("support", f"algm {family}/{decoder} openvino verified")


@pytest.mark.parametrize(("family", "decoder"), [("segvit", "atm"), ("eomt", "queries")])
def test_few_numbers_that_make_all_scores_are_held_to_what_pytorch_usually_errs(
    bundle_of: Callable[..., Bundle], family: str, decoder: str
) -> None:
    """In fp16 the probabilities of six queries decide how far all scores are off: on one image PyTorch may be lucky."""
    bundle = bundle_of(family, decoder, "scores", precision="fp16")
    report = verify(bundle, "onnxruntime-cpu", parity_windows(bundle.recipe, [], IMAGES), progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []


@pytest.mark.parametrize(("family", "decoder"), [case for case in CASES if case not in SLOW])
def test_tome_holds_in_every_family(
    bundle_of: Callable[..., Bundle], record_property: Support, family: str, decoder: str
) -> None:
    """The baseline merges a constant number of tokens and hands every patch to the decoder."""
    bundle = bundle_of(family, decoder, "scores", MergePlan((), (), method="tome", tome_r=(3, 2)))
    images = parity_windows(bundle.recipe, [], IMAGES)
    report = verify(bundle, "onnxruntime-cpu", images, progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    assert _token_counts(bundle, images).tolist() == [[21, 19]] * IMAGES
    record_property("support", f"tome {family}/{decoder} onnxruntime-cpu verified")


def test_blockwise_tome_holds_without_cls(bundle_of: Callable[..., Bundle], record_property: Support) -> None:
    """Every level that a decoder reads has all patches, whatever merged inside the blocks before it."""
    plan = MergePlan((), (), method="tome_blockwise", tome_share=(0.3, 0.5))
    bundle = bundle_of("setr", "mla", "scores", plan)
    images = parity_windows(bundle.recipe, [], IMAGES)
    report = verify(bundle, "onnxruntime-cpu", images, progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    assert _token_counts(bundle, images).tolist() == [[17, 17, 12, 12]] * IMAGES
    record_property("support", "tome_blockwise setr/mla onnxruntime-cpu verified")


def test_the_chain_holds_where_auxiliary_heads_attend(
    bundle_of: Callable[..., Bundle], record_property: Support
) -> None:
    """DToP: how sure a head is comes of what its queries attend to."""
    bundle = bundle_of("segvit", "prune", "scores")
    images = parity_windows(bundle.recipe, [], IMAGES)
    for runtime, count in {"onnxruntime-cpu": IMAGES, "openvino": 1}.items():
        if row_of(runtime).installed():
            report = verify(bundle, runtime, images[:count], progress=False)
            assert [(link.name, link.measured) for link in report.links if not link.passed] == []
            record_property("support", f"dtop segvit/prune {runtime} verified")
    assert len(set(_token_counts(bundle, images)[:, 1])) > 1


def _token_counts(bundle: Bundle, images: np.ndarray) -> np.ndarray:
    with runner(bundle, "onnxruntime-cpu") as run:
        return run.infer({"image": images})["token_counts"]


def test_a_checkpoint_without_facts_needs_a_recipe(tmp_path: Path) -> None:
    path = checkpoint_of(toy("setr", "naive")[0], tmp_path / "latest.pth")
    with pytest.raises(
        CheckpointError, match=r"expected variant.yml beside .*latest.pth, found none: .* name a recipe"
    ):
        export(path, tmp_path / "bundle", None, {})
    assert not (tmp_path / "bundle").exists()


def test_every_network_has_a_toy() -> None:
    assert set(FAMILIES) == {(row.family, row.decoder) for row in architectures()}
