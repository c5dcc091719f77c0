"""A CUDA graph in segments, chained on the CPU, gives exactly what the whole graph gives."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import export
from algm_deploy.errors import ExportError
from algm_deploy.lowering import onnxruntime, onnxruntime_segments
from algm_deploy.lowering.onnxruntime import rewrite, write_onnxruntime_onnx
from algm_deploy.lowering.onnxruntime_segments import LONGEST, TOGETHER, segments

THRESHOLDS = {"clap_threshold": np.array(0.8, np.float32), "gbm_threshold": np.array(0.5, np.float32)}
# Plans beside the tiny network's own, CLAP in block 1 and GBM in block 3.
PLANS: dict[str, dict[str, Any]] = {
    "three_gbm": {"merging.clap_layers": [], "merging.gbm_layers": [2, 3, 4]},
    "dense": {"merging.clap_layers": [], "merging.gbm_layers": []},
    "budgets": {
        "merging.clap": "budget",
        "merging.clap_budget": 5,
        "merging.gbm": "budget",
        "merging.gbm_budget": 0.3,
        "merging.batch": "batch_min",
        "output": "labels",
    },
}
SEGMENTS = "part-*.onnx"
CUTS = {"scores": 2, "labels": 2, "three_gbm": 3, "dense": 0, "budgets": 0}


@pytest.fixture(scope="module", params=CUTS)
def exported(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A plan's name and the folder of its bundle, which belongs to the tests here."""
    folder = tmp_path_factory.mktemp("segments") / request.param
    if request.param in PLANS:
        return request.param, export(tiny_checkpoint, folder, None, PLANS[request.param]).bundle
    ready: Bundle = request.getfixturevalue({"scores": "tiny_bundle", "labels": "labels_bundle"}[request.param])
    return request.param, Bundle.open(shutil.copytree(ready.path, folder))


@pytest.fixture
def session(ort_library: Path) -> Callable[[ir.Model, Path], ort.InferenceSession]:
    def open_session(model: ir.Model, path: Path) -> ort.InferenceSession:
        ir.save(model, path)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.register_custom_ops_library(str(ort_library))
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    return open_session


def rewritten(bundle: Bundle) -> ir.Model:
    model = ir.load(bundle.file("model.onnx"))
    rewrite(model, "cuda", True, False)
    return model


def chained(
    parts: Sequence[ort.InferenceSession], feeds: dict[str, np.ndarray], step: int, poison: float = 0.0
) -> dict[str, np.ndarray]:
    """Runs the segments; each takes a tensor of the next multiple of `step` rows an image from where its merge wrote,
    and finds `poison` in those nobody counted."""
    values = dict(feeds)
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        names = [o.name for o in part.get_outputs()]
        values |= dict(zip(names, part.run(names, {i.name: values[i.name] for i in part.get_inputs()}), strict=True))
        if following is None:
            return values
        (counted,) = (name for name in names if name.startswith((LONGEST, TOGETHER)))
        ragged, axis = counted.startswith(TOGETHER), counted.removeprefix(LONGEST).removeprefix(TOGETHER)
        for taken in following.get_inputs():
            if axis in taken.shape:
                made, rows = values[taken.name], int(values[counted])
                images, most, *width = made.shape
                each = -(-rows // images) if ragged else rows
                laid_out = images, min(-(-each // step) * step, most), *width
                made = made.reshape(-1)[: math.prod(laid_out)].reshape(laid_out).copy()
                behind = made.reshape(-1, *width)[rows:] if ragged else made[:, rows:]
                assert not behind.any(), "padding is zero"
                behind[:] = poison
                values[taken.name] = made
    raise AssertionError("no segment")


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("step", "poison"), [(1, 0.0), (8, 0.0), (8, 1e4), (1000, 1e4)])
def test_a_chain_equals_the_whole(
    exported: Any,
    session: Any,
    blob_images: Any,
    step: int,
    poison: float,
    ragged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ragged where attention is the library's, as in fp16 with heads of 64."""
    name, bundle = exported
    monkeypatch.setattr(onnxruntime, "_fits_packed_attention", lambda *_: ragged)
    model = rewritten(bundle)
    whole = session(model, bundle.path / "whole.onnx")
    monkeypatch.setattr(onnxruntime_segments, "FINE_STEP" if ragged else "STEP", step)
    parts = [session(part, bundle.path / f"{i}.onnx") for i, part in enumerate(segments(model))]
    assert len(parts) == 1 + CUTS[name]
    counts = [o.name for part in parts for o in part.get_outputs() if o.name.startswith((LONGEST, TOGETHER))]
    assert [count.startswith(TOGETHER) for count in counts] == [ragged] * CUTS[name]
    image = blob_images(3)[2:] if step == 1 else blob_images(3)
    feeds = {"image": image, **THRESHOLDS}
    names = [o.name for o in whole.get_outputs()]
    expected = dict(zip(names, whole.run(names, {i.name: feeds[i.name] for i in whole.get_inputs()}), strict=True))
    # Standard operators weigh rows behind an image with zero; the library's do not read them.
    found = chained(parts, feeds, step, np.nan if poison and ragged else poison)
    for output, value in expected.items():
        if output == "scores":
            np.testing.assert_allclose(found[output], value, rtol=0, atol=2e-5)
        else:
            np.testing.assert_array_equal(found[output], value, err_msg=output)
    if CUTS[name]:
        assert expected["token_counts"].max() < 64, "nothing merged"


def test_a_segment_holds_the_weights_of_its_own_blocks(tiny_bundle: Bundle) -> None:
    model = rewritten(tiny_bundle)

    def weights(part: ir.Model) -> set[str]:
        return {name for name, value in part.graph.initializers.items() if value.const_value.nbytes > 1024}

    parts = [weights(part) for part in segments(model)]
    blocks = [{name.split(".")[2] for name in part if name.startswith("encoder.blocks.")} for part in parts]
    # CLAP stands behind the attention of block 1, GBM behind that of block 3.
    assert blocks == [{"0"}, {"0", "1", "2"}, {"2", "3"}]
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(weights(model))


def test_what_a_segment_takes_and_gives(tiny_bundle: Bundle) -> None:
    first, second, third = segments(rewritten(tiny_bundle))
    assert {v.name for v in first.graph.inputs} == {"image", "clap_threshold"}
    assert {v.name for v in second.graph.inputs} >= {"gbm_threshold", "token_map_clap_1"}
    assert [v.name for part in (first, second, third) for v in part.graph.outputs if v.name.startswith(LONGEST)] == [
        "counted_by_32_tokens_clap_1",
        "counted_by_32_tokens_gbm_3",
    ]
    # No size crosses: it would come from the device, where the next segment cannot read it without waiting.
    crossing = {v.name for v in (*second.graph.inputs, *third.graph.inputs)} - {"image", "gbm_threshold"}
    values = {v.name: v for node in (*first.graph, *second.graph) for v in node.outputs}
    assert all(values[name].producer().op_type not in ("Shape", "Concat", "Gather") for name in crossing)
    shapes = {v.name: list(map(str, v.shape)) for v in first.graph.outputs}
    assert ["batch", "65", "64"] in shapes.values(), "room for as many rows as went in"


def number_written(bundle: Bundle, custom_operators: bool = True) -> int:
    """Segments that came with the graph for CUDA."""
    segments = write_onnxruntime_onnx(bundle, "cuda", custom_operators, "whole.onnx", SEGMENTS).segments
    assert [name for name in bundle.files if name.startswith("part-")] == [f"part-{i}.onnx" for i in range(segments)]
    assert bundle.file("whole.onnx").is_file()
    return segments


def test_the_bundle_gets_its_segments(tiny_bundle: Bundle, tmp_path: Path) -> None:
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    assert number_written(bundle, custom_operators=False) == 0
    assert number_written(bundle) == 3
    assert all(bundle.file(SEGMENTS.replace("*", str(index))).stat().st_size < 200_000 for index in range(3))


def test_images_that_decide_together_are_not_cut(tiny_checkpoint: Path, tmp_path: Path) -> None:
    bundle = export(tiny_checkpoint, tmp_path / "coupled", None, {"merging.batch": "batch_min"}).bundle
    assert number_written(bundle) == 0
    with pytest.raises(ExportError, match="whose images decide alone"):
        segments(rewritten(bundle))


def test_function_bodies_are_not_cut(tiny_bundle: Bundle) -> None:
    model = ir.load(tiny_bundle.file("model.onnx"))
    rewrite(model, "cuda", False, False)
    with pytest.raises(ExportError, match="custom operator library"):
        segments(model)


def test_tome_is_not_cut(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Its body reads a size from the device, which a CUDA graph cannot hold."""
    tome = {"merging.method": "tome", "merging.tome_r": [8, 0, 4], "merging.clap_layers": [], "merging.gbm_layers": []}
    bundle = export(tiny_checkpoint, tmp_path / "tome", None, tome).bundle
    assert number_written(bundle) == 0
    with pytest.raises(ExportError, match="custom operator library"):
        segments(rewritten(bundle))


def test_budgets_are_one_segment_of_known_sizes(
    tiny_export: Callable[..., Bundle], session: Any, tmp_path: Path
) -> None:
    """And what the library's operators make of it equals the portable graph."""
    bundle = Bundle.open(shutil.copytree(tiny_export(PLANS["budgets"]).path, tmp_path / "b"))
    assert number_written(bundle) == 1
    (part,) = segments(rewritten(bundle))
    merges = [node for node in part.graph if node.op_type.startswith("padded_")]
    assert [node.op_type for node in merges] == ["padded_clap", "padded_gbm"]
    assert [v.name for v in part.graph.inputs] == ["image"]
    assert not {v.name for v in part.graph.outputs if v.name.startswith((LONGEST, TOGETHER))}
    axes = {d for node in part.graph for v in node.outputs if v.shape for d in v.shape if not isinstance(d, int)}
    assert {str(axis) for axis in axes} <= {"batch", "None"}
    image = np.random.default_rng(0).integers(0, 256, (3, 3, 128, 128), dtype=np.uint8)
    whole = ort.InferenceSession(bundle.file("model.onnx"), providers=["CPUExecutionProvider"])
    names = [o.name for o in whole.get_outputs()]
    found = session(part, bundle.path / "part.onnx").run(names, {"image": image})
    for name, one, other in zip(names, found, whole.run(names, {"image": image}), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)
