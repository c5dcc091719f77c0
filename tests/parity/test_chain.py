"""The chain passes on what is right, and each kind of damage breaks the links that are about it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from msgspec import to_builtins
from parity_cases import Outputs, broken, edit_constant, edit_graph, edit_manifest, edit_weight, measured, rewrite

from algm_deploy.bundle.records import Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import export, parity_windows
from algm_deploy.errors import BundleError, RuntimeUnavailableError
from algm_deploy.models.deployed import PIXEL_SCALE, PixelEmbedding
from algm_deploy.ops.clap import window_members, window_of_patch
from algm_deploy.parity import chain, comparison, replay
from algm_deploy.parity.chain import Trial, trials_of, verify
from algm_deploy.parity.comparison import unexplained_labels
from algm_deploy.parity.merges import common, torch_maps
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.runners.contract import Array, runner_type
from algm_deploy.runners.torch.runner import TorchRunner

Tamper = Callable[[Callable[[Outputs, Array], Outputs]], str]
ORT = "onnxruntime-cpu"


def verified(bundle: Bundle, runtime: str, windows: Array) -> Parity:
    return verify(bundle, runtime, windows, progress=False)


# --- what is right passes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["torch", ORT])
def test_sound_bundle_passes(
    tiny_bundle: Bundle, windows: Array, record_property: Callable[[str, object], None], runtime: str
) -> None:
    report = verified(tiny_bundle, runtime, windows)
    assert report.passed, report.links
    assert [link.number for link in report.links] == [1, 2, 3, 4, 5, 6]
    assert report.batches == (1, 2, 3, 8)
    decisions = report.links[4].facts
    assert decisions["images"] == 3 + 2 + 3 + 8
    assert report.links[3].facts["images_compared"] == decisions["images"] + 2  # nothing and everything merging
    record_property("support", f"algm segmenter/mask_transformer {runtime} verified")
    json.dumps(to_builtins(report), allow_nan=False)


VARIANTS: dict[str, dict[str, Any]] = {
    "fp16, coupled": {"precision": "fp16", "merging.batch": "batch_min", "max_batch": 3},
    "paper, raster, labels": {
        "merging.semantics": "paper",
        "merging.gbm": "fixed",
        "merging.gbm_threshold": 0.95,
        "merging.order": "raster",
        "output": "labels",
        "max_batch": 2,
    },
    "CLAP alone, fp16, labels": {"merging.gbm_layers": (), "output": "labels", "precision": "fp16", "max_batch": 2},
    "GBM alone, twice": {"merging.clap_layers": (), "merging.gbm_layers": (1, 3), "merging.batch": "batch_min"},
    "dense": {"merging.clap_layers": (), "merging.gbm_layers": (), "max_batch": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_bundle_passes(name: str, tiny_checkpoint: Path, tmp_path: Path, windows: Array) -> None:
    bundle = export(tiny_checkpoint, tmp_path / "bundle", None, VARIANTS[name]).bundle
    for runtime in ("torch", ORT):
        report = verified(bundle, runtime, windows)
        assert report.passed, (runtime, report.links)
        assert ("decisions" in {link.name for link in report.links}) == (name != "dense")


@pytest.mark.parametrize("runtime", ["torch", ORT])
def test_int8_passes(int8_bundle: Bundle, windows: Array, runtime: str) -> None:
    report = verified(int8_bundle, runtime, windows)
    assert report.passed, report.links
    assert "as in fp32" in measured(report, "labels")
    assert 0.5 < report.links[5].facts["label_agreement_fp32_mean"] < 1


def test_trials_cover_batches_and_both_extremes() -> None:
    trials = trials_of(3, 8, MergePlan())
    assert [len(t.images) for t in trials] == [1, 1, 1, 2, 3, 8, 1, 1]
    assert trials[5].images == (0, 1, 2, 0, 1, 2, 0, 1)
    assert [t.thresholds.get("clap_threshold") for t in trials[-2:]] == [np.inf, -2.0]
    assert [len(t.images) for t in trials_of(1, 8, DENSE)] == [1]
    assert [len(t.images) for t in trials_of(2, 1, DENSE)] == [1, 1]
    assert Trial((0,), {"gbm_threshold": 3.0}).plan(MergePlan(clap_threshold=0.5)).gbm_threshold == 3.0


# --- a graph that is wrong -------------------------------------------------------------------------------------------


def test_weight_behind_the_merges(own_bundle: Bundle, windows: Array) -> None:
    edit_weight(own_bundle, "encoder.blocks.3.mlp.fc2.constant", _first_times(3))
    report = verified(own_bundle, ORT, windows)
    assert broken(report) == {"numbers"}
    assert "PyTorch's" in measured(report, "numbers")


def test_weight_in_front_of_the_merges(own_bundle: Bundle, windows: Array) -> None:
    edit_weight(own_bundle, "encoder.blocks.0.attn.proj.constant", lambda w: 2 * w + 0.5)
    report = verified(own_bundle, ORT, windows)
    assert {"numbers", "decisions"} <= broken(report) <= {"numbers", "decisions", "labels"}
    assert "CLAP: " in measured(report, "decisions")


def test_a_step_of_a_weight_in_int8(int8_bundle: Bundle, copied: Callable[..., Bundle], windows: Array) -> None:
    def edit(model: onnx.ModelProto) -> None:
        name = "encoder.blocks.3.mlp.fc2.steps"
        tensor = next(t for t in model.graph.initializer if t.name == name)
        steps = onnx.numpy_helper.to_array(tensor).copy()
        steps[0] *= 2
        tensor.CopyFrom(onnx.numpy_helper.from_array(steps, name))

    bundle = copied(int8_bundle)
    edit_graph(bundle, edit)
    report = verified(bundle, ORT, windows[:1])
    assert {"graph"} <= broken(report) <= {"graph", "numbers", "labels"}
    assert "fc2: expected steps of the weight (0,)" in measured(report, "graph")


def test_a_graph_that_is_not_quantised(int8_bundle: Bundle, copied: Callable[..., Bundle], windows: Array) -> None:
    bundle = copied(int8_bundle)
    edit_manifest(bundle, lambda manifest: manifest["quantization"]["products"].pop())
    report = verified(Bundle.open(bundle.path), ORT, windows[:1])
    assert "graph" in broken(report)
    assert "none, found" in measured(report, "graph")


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_normalisation(own_bundle: Bundle, windows: Array, part: str) -> None:
    edit_weight(own_bundle, f"encoder.patch_embed.{part}", lambda w: w * 1.02)
    report = verified(own_bundle, ORT, windows)
    assert {"numbers"} <= broken(report) <= {"numbers", "decisions", "labels"}


def test_normalisation_folded_wrongly(tiny_bundle: Bundle, windows: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_mean(self: PixelEmbedding, image: torch.Tensor) -> torch.Tensor:
        pixels = image.to(self.weight.dtype) / PIXEL_SCALE
        tokens = torch.nn.functional.conv2d(pixels, self.weight, None, self.stride)
        return tokens.flatten(2).transpose(1, 2)

    monkeypatch.setattr(PixelEmbedding, "forward", without_mean)
    # The runtime and the truth are wrong alike: the original network alone can tell.
    assert broken(verified(tiny_bundle, "torch", windows)) == {"network"}


def test_members_of_windows(own_bundle: Bundle, windows: Array) -> None:
    members = window_members((8, 8), (2, 2)).reshape(-1) + 1
    wrong = members.copy()
    wrong[[0, 9]] = wrong[[9, 0]]
    edit_constant(own_bundle, "clap", members, wrong)
    assert {"numbers", "decisions"} <= broken(verified(own_bundle, ORT, windows))


def test_map_of_clap(own_bundle: Bundle, windows: Array) -> None:
    owner = window_of_patch((8, 8), (2, 2))
    wrong = owner.copy()
    wrong[[0, 63]] = wrong[[63, 0]]
    edit_constant(own_bundle, "clap", owner, wrong)
    report = verified(own_bundle, ORT, windows)
    assert {"numbers", "decisions"} <= broken(report)
    assert "not one that merging whole windows gives" in measured(report, "decisions")


def test_index_of_unmerge(own_bundle: Bundle, windows: Array) -> None:
    edit_constant(own_bundle, "unmerge", np.array(1), np.array(2))
    report = verified(own_bundle, ORT, windows)
    assert broken(report) == {"numbers", "labels"}


def test_graph_that_fails_at_run_time(own_bundle: Bundle, windows: Array) -> None:
    edit_constant(own_bundle, "unmerge", np.array(1), np.array(0))  # one row behind the last
    report = verified(own_bundle, ORT, windows[:1])
    assert broken(report) == {"operators", "numbers", "decisions", "labels"}
    assert "the runtime failed" in measured(report, "numbers")
    assert measured(report, "labels") == "0 of 1 images could be compared"


def test_divisor_in_the_body(own_bundle: Bundle, windows: Array) -> None:
    edit_constant(own_bundle, "gbm", np.array(3.0), np.array(9.0))
    report = verified(own_bundle, ORT, windows)
    assert {"decisions"} <= broken(report) <= {"decisions", "labels"}
    assert "GBM: merged a token" in measured(report, "decisions")


@pytest.mark.parametrize(
    ("function", "attribute", "value"),
    [("gbm", "divisor", 5.0), ("gbm", "prefix", 0), ("clap", "order", "raster"), ("attention", "heads", 4)],
)
def test_attribute(own_bundle: Bundle, windows: Array, function: str, attribute: str, value: Any) -> None:
    def change(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if n.op_type == function)
        kept = [a for a in node.attribute if a.name != attribute]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute(attribute, value)])

    edit_graph(own_bundle, change)
    report = verified(own_bundle, ORT, windows[:1])
    assert broken(report) == {"graph"}
    assert f"'{attribute}': {value!r}" in measured(report, "graph")


def test_comparison_of_the_threshold(own_bundle: Bundle, windows: Array) -> None:
    def change(model: onnx.ModelProto) -> None:
        body = next(f for f in model.functions if f.name == "clap")
        node = next(n for n in body.node if n.op_type == "LessOrEqual" and "threshold" in n.input)
        node.op_type = "GreaterOrEqual"

    edit_graph(own_bundle, change)
    assert "decisions" in broken(verified(own_bundle, ORT, windows[:1]))


def test_threshold_built_in(own_bundle: Bundle, windows: Array) -> None:
    """Right for the bundle's own threshold, so only the extremes can tell."""
    tau = own_bundle.recipe.merging.clap_threshold

    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(tau, np.float32), "fixed_tau"))
        node = next(n for n in model.graph.node if n.op_type == "clap")
        node.input[2] = "fixed_tau"

    edit_graph(own_bundle, change)
    report = verified(own_bundle, ORT, windows)
    assert broken(report) == {"decisions"}
    assert report.links[4].facts["share_otherwise_than_fp64"] == 0


def test_the_reference_shares_no_kernel_with_what_is_proven(
    own_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert TorchRunner(own_bundle).device.type == "cuda"
    assert TorchRunner(own_bundle, "fp32").device.type == "cpu"
    assert verified(own_bundle, ORT, parity_windows(own_bundle.recipe, [], 1)).reference == "cpu"
    pictures = parity_windows(own_bundle.recipe, [], 1)
    with pytest.raises(RuntimeUnavailableError, match="shares no kernel"):
        verify(own_bundle, "torch", pictures, reference="cuda")
    monkeypatch.setattr("algm_deploy.parity.chain.in_use", lambda: True)
    with pytest.raises(RuntimeUnavailableError, match="shares no kernel"):
        verify(own_bundle, ORT, pictures, reference="cuda")


def test_a_reference_on_a_gpu_needs_one(own_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeUnavailableError, match="expected a GPU"):
        verify(own_bundle, ORT, parity_windows(own_bundle.recipe, [], 1), reference="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("broken_weight", [False, True])
def test_the_reference_may_be_a_gpu(own_bundle: Bundle, broken_weight: bool) -> None:
    """In a process of its own, where no network has run with the project's kernels."""
    if broken_weight:
        edit_weight(own_bundle, "encoder.blocks.3.mlp.fc2.constant", _first_times(3))
    done = on_a_gpu(own_bundle, "--runtime", ORT, "--json")
    found = json.loads(done.stdout)
    assert found["reference"] == "cuda"
    failed = {link["name"] for link in found["links"] if not link["passed"]}
    assert (done.returncode == 0, bool(failed)) == (not broken_weight, broken_weight), failed or done.stderr


@pytest.mark.gpu
def test_the_torch_runtime_is_held_to_no_gpu(own_bundle: Bundle) -> None:
    done = on_a_gpu(own_bundle, "--runtime", "torch")
    assert done.returncode == RuntimeUnavailableError.exit_code
    assert "shares no kernel" in done.stderr


def on_a_gpu(bundle: Bundle, *words: str) -> subprocess.CompletedProcess[str]:
    """`verify` with a reference on a GPU."""
    command = [sys.executable, "-m", "algm_deploy", "verify", str(bundle.path), "--reference", "cuda", *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.gpu
def test_the_reference_is_computed_where_it_is_said_to_be(own_bundle: Bundle) -> None:
    truth = replay.Replays(own_bundle, parity_windows(own_bundle.recipe, [], 1), "fp32", "cuda")._truth
    assert {parameter.device.type for parameter in truth._model.parameters()} == {"cuda"}
    with TorchRunner(own_bundle, "fp32", "cuda") as run:
        assert (run.device.type, run._packed, run._whole) == ("cuda", None, None)


def test_what_is_proven_keeps_its_tf32(own_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reference on the CPU; with one on a GPU that has none."""
    seen = []
    kind: Any = runner_type(ORT)
    infer = kind.infer

    def watched(self: Any, *feeds: Any) -> Any:
        seen.append(torch.backends.cudnn.allow_tf32)
        return infer(self, *feeds)

    monkeypatch.setattr(kind, "infer", watched)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    verify(own_bundle, ORT, parity_windows(own_bundle.recipe, [], 1))
    assert seen and all(seen)
    with chain._without_tf32("cuda"):
        assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("name", "value"), [("clap_threshold", 0.5), ("gbm_threshold", 0.0)])
def test_threshold_default_of_the_manifest(own_bundle: Bundle, windows: Array, name: str, value: float) -> None:
    edit_manifest(own_bundle, lambda manifest: manifest["signature"]["defaults"].update({name: value}))
    report = verified(Bundle.open(own_bundle.path), ORT, windows)
    assert broken(report) == {"graph", "decisions"}
    assert f"'{name}': {value}" in measured(report, "graph")
    assert "below the threshold" in measured(report, "decisions")


def test_axes_of_an_output(own_bundle: Bundle, windows: Array) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "images"

    edit_graph(own_bundle, change)
    assert broken(verified(own_bundle, ORT, windows[:1])) == {"graph"}


def test_plan_of_another_recipe(own_bundle: Bundle, windows: Array) -> None:
    """The manifest asks for raster order, the graph was exported with the published one."""
    edit_manifest(own_bundle, lambda manifest: manifest["recipe"]["merging"].update(order="raster"))
    report = verified(Bundle.open(own_bundle.path), ORT, windows)
    assert {"graph", "decisions"} <= broken(report)
    assert "CLAP: merged windows are not in raster order" in measured(report, "decisions")


def test_file_that_is_no_graph(own_bundle: Bundle, windows: Array) -> None:

    rewrite(own_bundle, "model.onnx", b"\xff" * 64)
    with pytest.raises(BundleError, match="expected an ONNX file"):
        verified(own_bundle, "torch", windows[:1])


# --- a runtime that is wrong -----------------------------------------------------------------------------------------


def _swapped(outputs: Outputs, _: Array) -> Outputs:
    return {name: value[::-1].copy() if len(value) == 2 else value for name, value in outputs.items()}


def _first_twice(outputs: Outputs, _: Array) -> Outputs:
    return {name: np.repeat(value[:1], len(value), axis=0) for name, value in outputs.items()}


def _leaking(outputs: Outputs, _: Array) -> Outputs:
    """A batch of eight in which one image sees a little of its neighbour."""
    if len(outputs["scores"]) == 8:
        outputs["scores"][7] += 1e-4 * outputs["scores"][6]
    return outputs


def _changed(name: str, change: Callable[[Array], Array]) -> Callable[[Outputs, Array], Outputs]:
    return lambda outputs, _: {n: change(v.copy()) if n == name else v for n, v in outputs.items()}


def _first_times(factor: float) -> Callable[[Array], Array]:
    def change(values: Array) -> Array:
        values.flat[0] *= factor
        return values

    return change


def _with(place: tuple[Any, ...], value: float) -> Callable[[Array], Array]:
    def change(values: Array) -> Array:
        values[place] = value
        return values

    return change


DAMAGE: dict[str, tuple[Callable[[Outputs, Array], Outputs], set[str], str]] = {
    "two images swapped": (_swapped, {"numbers", "decisions"}, "error"),
    "one image twice": (_first_twice, {"numbers", "decisions"}, "error"),
    "one image leaks": (_leaking, {"numbers"}, "error"),
    "NaN": (_changed("scores", _with((0, 0, 5, 5), np.nan)), {"numbers"}, "image 0: the scores hold NaN or infinity"),
    "one pixel": (_changed("scores", lambda s: _with((0, 0, 9, 9), s[0, 0, 9, 9] + 1e-3)(s)), {"numbers"}, "PyTorch's"),
    "no image": (
        lambda outputs, _: {n: v[:0] for n, v in outputs.items()},
        {"operators", "numbers", "decisions", "labels"},
        "expected scores float32 (1, 11, 128, 128), got float32 (0, 11, 128, 128)",
    ),
    "no output": (
        lambda outputs, _: {n: v for n, v in outputs.items() if n != "token_map_gbm_3"},
        {"operators", "numbers", "decisions", "labels"},
        "expected token_map_gbm_3 int64 (1, 64), got nothing",
    ),
    "another dtype": (
        _changed("token_counts", lambda c: c.astype(np.int32)),
        {"operators", "numbers", "decisions", "labels"},
        "expected token_counts int64 (1, 2), got int32 (1, 2)",
    ),
    "map with a gap": (
        _changed("token_map_clap_1", lambda m: m + (m > 3)),
        {"operators", "numbers", "decisions", "labels"},
        "token map 0 does not number its tokens",
    ),
    "map that splits": (
        _changed("token_map_gbm_3", lambda m: np.tile(np.arange(1, 65), (len(m), 1))),
        {"operators", "numbers", "decisions", "labels"},
        "token map 1 splits tokens that token map 0 had merged",
    ),
    "counts": (
        _changed("token_counts", lambda c: c - 1),
        {"operators", "numbers", "decisions", "labels"},
        "the token counts contradict the token maps",
    ),
    "labels flipped in the call without maps": (
        lambda outputs, _: outputs if "token_map_clap_1" in outputs else {n: -v for n, v in outputs.items()},
        {"labels"},
        "error",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_wrong_runtime(name: str, tiny_bundle: Bundle, windows: Array, tampered: Tamper) -> None:
    change, links, message = DAMAGE[name]
    report = verified(tiny_bundle, tampered(change), windows)
    assert broken(report) == links, report.links
    assert message in measured(report, "numbers")
    json.dumps(to_builtins(report), allow_nan=False)


def test_comparisons_that_did_not_happen_are_counted(tiny_bundle: Bundle, windows: Array, tampered: Tamper) -> None:
    def half(outputs: Outputs, _: Array) -> Outputs:
        return {n: v[:-1] for n, v in outputs.items()} if len(outputs["scores"]) > 1 else outputs

    report = verified(tiny_bundle, tampered(half), windows)
    assert broken(report) == {"numbers", "decisions"}
    assert measured(report, "decisions") == "5 of 18 images could be compared"


def _token_maps(outputs: Outputs) -> list[Array]:
    return [outputs[n] for n in ("token_map_clap_1", "token_map_gbm_3") if n in outputs]


def test_tokens_in_another_order(tiny_bundle: Bundle, windows: Array, tampered: Tamper) -> None:
    def reordered(outputs: Outputs, _: Array) -> Outputs:
        for token_map in _token_maps(outputs):
            first, second = token_map == 1, token_map == 2
            token_map[first], token_map[second] = 2, 1
        return outputs

    report = verified(tiny_bundle, tampered(reordered), windows)
    assert broken(report) == {"decisions"}
    assert "CLAP: two windows are in the wrong order" in measured(report, "decisions")


def test_nan_in_the_precision_of_the_bundle_is_no_excuse(
    tiny_bundle: Bundle, windows: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyTorch itself overflows in 16 bits nothing can be compared, so nothing passes."""
    call = replay._ReplayNetwork.__call__

    def overflowing(self: Any, *inputs: Any) -> Any:
        scores, entering, deciding = call(self, *inputs)
        if scores.scores.dtype == torch.float32:
            scores = scores._replace(scores=scores.scores * torch.nan)
            entering = tuple(t._replace(values=t.values * torch.nan) for t in entering)
        return scores, entering, deciding

    monkeypatch.setattr(replay._ReplayNetwork, "__call__", overflowing)
    report = verified(tiny_bundle, "torch", windows[:1])
    assert {"numbers", "decisions"} <= broken(report)
    assert "PyTorch's own scores are not finite" in measured(report, "numbers")


# --- differences that noise explains ---------------------------------------------------------------------------------


def _shifted(
    bundle: Bundle, windows: Array, monkeypatch: pytest.MonkeyPatch, gate: float, noise: float, shift: float = 0.05
) -> Parity:
    """Verifies a runtime whose CLAP threshold is off by `shift`, under a noise that does or does not cover that."""
    edit_manifest(bundle, lambda manifest: manifest["recipe"]["gates"].update(excused_decisions=gate))

    class Shifted(TorchRunner):
        def infer(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
            return super().infer(_less(self, feeds, shift), outputs)

    monkeypatch.setattr(chain, "runner", lambda bundle, name: (Shifted if name == "shifted" else TorchRunner)(bundle))
    monkeypatch.setattr(common, "NOISE_FLOOR", noise)
    return verified(Bundle.open(bundle.path), "shifted", windows)


@pytest.mark.parametrize(("gate", "noise", "passes"), [(1.0, 0.06, True), (0.0, 0.06, False), (1.0, 0.0, False)])
def test_excused_differences_are_counted_and_gated(
    own_bundle: Bundle, windows: Array, monkeypatch: pytest.MonkeyPatch, gate: float, noise: float, passes: bool
) -> None:
    report = _shifted(own_bundle, windows, monkeypatch, gate, noise)
    assert broken(report) == (set() if passes else {"decisions"})
    facts = report.links[4].facts
    assert facts["images_equal"] < facts["images"]
    assert 0 < facts["share_otherwise_than_fp64"] < 1
    assert facts["token_count_difference_max"] > 0
    assert bool(facts["unexcused"]) == (noise == 0.0)


def test_labels_behind_excused_decisions_are_those_of_pytorch_deciding_alike(
    own_bundle: Bundle, windows: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = _shifted(own_bundle, windows, monkeypatch, 1.0, 0.06).links[5]
    assert labels.facts["images_decided_otherwise"] > 0
    assert labels.facts["label_agreement_free_mean"] < labels.facts["label_agreement_required"]
    assert labels.facts["label_agreement_mean"] == labels.facts["label_agreement_min"] == 1
    assert labels.passed
    # Deciding otherwise than it told excuses nothing.
    monkeypatch.setattr(TorchRunner, "infer", _deciding_otherwise_without_maps(TorchRunner.infer))
    assert "labels" in broken(_shifted(own_bundle, windows, monkeypatch, 1.0, 0.06))


def _less(run: TorchRunner, feeds: Mapping[str, Array], shift: float) -> dict[str, Array]:
    """Feeds with a lower CLAP threshold than the one they hold, or than the bundle's."""
    tau = feeds.get("clap_threshold", run.signature.defaults["clap_threshold"])
    return {**feeds, "clap_threshold": np.asarray(tau - shift, np.float32)}


def _deciding_otherwise_without_maps(infer: Any) -> Any:
    def changed(run: TorchRunner, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        if type(run) is not TorchRunner and outputs is None:
            feeds = _less(run, feeds, 0.3)
        found: dict[str, Array] = infer(run, feeds, outputs)
        return found

    return changed


def test_precision_that_changes_decisions_allows_a_runtime_as_many(
    own_bundle: Bundle, windows: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in 16 bits: where PyTorch itself decides otherwise than in fp64, a runtime may do so twice as often."""

    def otherwise_in_fp64(entering: Sequence[Any], stage: int, plan: MergePlan, network: Any) -> list[Array]:
        if entering[0].values.dtype == torch.float64:
            plan = replace(plan, clap_threshold=plan.clap_threshold + 0.08)
        return torch_maps(entering, stage, plan, network)

    monkeypatch.setattr(comparison, "torch_maps", otherwise_in_fp64)
    report = _shifted(own_bundle, windows, monkeypatch, 0.0, 0.06)
    facts = report.links[4].facts
    assert report.passed
    own = facts["share_pytorch_decides_otherwise_than_fp64"]
    assert 0 < own < facts["share_otherwise_than_fp64"] <= 2 * own + 0.01


def test_one_image_is_enough_to_tell_a_tie_from_a_runtime_that_leans_on_noise(
    own_bundle: Bundle, windows: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A threshold off by 0.03 flips one window of a single image, off by 0.3 several, all within the noise given."""
    tie = _shifted(own_bundle, windows[:1], monkeypatch, 0.01, 0.04, 0.03).links[4]
    leaning = _shifted(own_bundle, windows[:1], monkeypatch, 0.01, 0.31, 0.3).links[4]
    assert (tie.facts["decisions_otherwise_than_fp64"], tie.passed) == (1, True)
    assert leaning.facts["decisions_otherwise_than_fp64"] > 1
    assert leaning.facts["decisions_otherwise_than_fp64_allowed"] == tie.facts["images"] == 1
    assert not leaning.passed
    assert leaning.facts["unexcused"] == []


def test_labels_that_noise_explains() -> None:
    scores = np.array([[[1.0, 0.3]], [[0.9, 0.9]]])  # two classes, one row of two pixels
    best = np.array([[0, 1]], np.uint8)
    assert unexplained_labels(best, scores, 0.0) == 0
    assert unexplained_labels(np.array([[1, 1]], np.uint8), scores, 0.11) == 0
    assert unexplained_labels(np.array([[1, 1]], np.uint8), scores, 0.09) == 1
    assert unexplained_labels(np.array([[1, 0]], np.uint8), scores, 0.11) == 1
    assert unexplained_labels(np.array([[2, 1]], np.uint8), scores, 1.0) == 1
    assert unexplained_labels(np.array([[-1, 2]], np.int32), scores, 1.0) == 2


def test_labels_of_a_wrong_runtime(labels_bundle: Bundle, windows: Array, tampered: Tamper) -> None:
    wrong = tampered(_changed("labels", lambda labels: _with((0, 3, 4), (labels[0, 3, 4] + 1) % 11)(labels)))
    report = verified(labels_bundle, wrong, windows)
    assert broken(report) == {"numbers"}
    # One image of every call: three alone, three batches, and both extremes.
    assert measured(report, "numbers") == "8 labels beyond noise"


# --- what cannot be verified -----------------------------------------------------------------------------------------


def test_images_have_to_be_there_and_to_differ(tiny_bundle: Bundle, windows: Array) -> None:
    with pytest.raises(BundleError, match="at least one image"):
        verified(tiny_bundle, "torch", windows[:0])
    with pytest.raises(BundleError, match="two equal ones"):
        verified(tiny_bundle, "torch", windows[[0, 1, 0]])


def test_images_have_to_fit_the_bundle(tiny_bundle: Bundle, windows: Array) -> None:
    with pytest.raises(BundleError, match="expected image uint8"):
        verified(tiny_bundle, "torch", windows[..., :64])


def test_replays_hold_no_full_size_scores(tiny_bundle: Bundle, windows: Array) -> None:
    replays = replay.Replays(tiny_bundle, windows, "fp32")
    maps = [np.arange(1, 65), np.arange(1, 65)]
    replayed = replays(0, maps)
    assert replays(0, [m.copy() for m in maps]) is replayed
    kept = replayed.full_size.args[0]
    assert sum(part.numel() for part in (kept.scores, kept.map)) <= 64 * 12
    assert replayed.scores().shape == (11, 128, 128)


def test_a_runtime_is_warmed_up_for_every_size_of_batch(labels_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proven is what a server runs."""
    warmed: list[int] = []

    def warm_up(self: TorchRunner, images: int = 1, seconds: float = 0.0) -> bool:
        warmed.append(images)
        return True

    monkeypatch.setattr(TorchRunner, "warm_up", warm_up)
    report = verify(labels_bundle, "torch", parity_windows(labels_bundle.recipe, [], 2), progress=False)
    assert sorted(warmed) == list(report.batches)
