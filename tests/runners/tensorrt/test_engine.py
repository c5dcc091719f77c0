"""Engines built by TensorRT-RTX on this machine, GPU or not, and the error for each way a build goes wrong.

Nothing is executed here. What full TensorRT is asked for is checked with a stand-in for its bindings.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from toys import CONSTANT_COUNTS, cts_toy, deployed_toy, toy, with_budgets
from tqdm import tqdm

from algm_deploy import native_libraries as native
from algm_deploy.bundle.files import sha256_of
from algm_deploy.bundle.records import Engine, ParsedNetwork, ParsedTensor, TimingCache
from algm_deploy.bundle.signature import merge_names
from algm_deploy.bundle.store import Bundle
from algm_deploy.environment import cuda_capability
from algm_deploy.errors import BuildError, RuntimeUnavailableError
from algm_deploy.lowering.portable import add_function_bodies
from algm_deploy.lowering.tensorrt import TENSORRT_ONNX, merge_node, tensorrt_from_base, write_tensorrt_onnx
from algm_deploy.recipe.reading import flatten
from algm_deploy.recipe.schema import Output, Precision
from algm_deploy.runners.registry import row_of
from algm_deploy.runners.tensorrt import engine as tensorrt_engine
from algm_deploy.runners.tensorrt import library as tensorrt_library
from algm_deploy.runners.tensorrt import polygraphy
from algm_deploy.runners.tensorrt.engine import EngineOptions, engine_from_onnx

NETWORK, PLAN = toy("segmenter", "mask_transformer")
ATTENTIONS = 4  # of three blocks and the decoder's one
BATCHES = (1, 2, 4)
Translate = Callable[..., ir.Model]
Support = Callable[[str, object], None]  # what a passed test proves, for docs/support.md: see benchmarks/support.py


OTHERS = [
    ("dinov2", "linear"),
    ("deit", "linear"),
    ("eomt", "queries"),
    ("segmenter", "linear"),
    ("setr", "naive"),
    ("setr", "naive_mmseg"),
    ("setr", "pup"),
    ("setr", "mla"),
    ("setr", "mla_mmseg"),
    ("segvit", "atm"),
]


@pytest.mark.parametrize(("family", "decoder"), OTHERS)
def test_engines_of_other_families(
    rtx: None, translated: Translate, tmp_path: Path, record_property: Support, family: str, decoder: str
) -> None:
    """Several tokens in front of the patches, padded pictures, queries, convolutions, and levels unmerged apart."""
    network, plan = toy(family, decoder)
    base = translated(deployed_toy(network, plan), plan)
    precisions: tuple[Precision, ...] = ("fp32", "fp16")
    for precision in precisions:
        onnx.save(tensorrt_from_base(base, precision)[0], tmp_path / f"{precision}.onnx")
        _, built = build(tmp_path / f"{precision}.onnx", precision)
        parsed, tokens = built.parsed_network, TYPES[precision]
        patches = network.grid[0] * network.grid[1]
        maps = [tensor(f"token_map_{m}", "INT64", -1, patches) for m in merge_names(plan)]
        scores = tensor("scores", "FLOAT", -1, 5, *network.image_size)
        assert parsed.outputs == (scores, tensor("token_counts", "INT64", -1, 2), *maps)
        levels = len(network.stages) or 1
        assert [p.plugin for p in parsed.plugins] == ["clap", "gbm", *["unmerge"] * levels]
        in_decoder = levels * network.decoder_depth if network.decoder == "atm" else 0
        assert parsed.layers["ATTENTION_INPUT"] == {tokens: network.depth + in_decoder}
    record_property("support", f"algm {network.family}/{network.decoder} tensorrt-rtx builds")


@pytest.mark.parametrize("plugin", [True, False], ids=["plugin", "standard operators"])
def test_engines_of_other_families_with_an_adapter(
    rtx: None, translated: Translate, tmp_path: Path, record_property: Support, plugin: bool
) -> None:
    """Deformable attention as a plugin, and as its body in standard operators: four gathers, and no sampling layer."""
    network, plan = toy("vit_adapter", "upernet")
    base = translated(deployed_toy(network, plan), plan).clone()
    looks = sum(node.op_type == "deformable_attention" for node in base.graph)
    if not plugin:
        add_function_bodies(base, lambda node: node.op_type == "deformable_attention")
    precision: Precision = "fp16" if plugin else "fp32"
    onnx.save(tensorrt_from_base(base, precision)[0], tmp_path / "model.onnx")
    engine, built = build(tmp_path / "model.onnx", precision, compute_capabilities=("8.9",))
    parsed = built.parsed_network
    found = Counter(p.plugin for p in parsed.plugins)
    assert engine
    assert found == Counter(clap=1, gbm=1, unmerge=2) + Counter(deformable_attention=looks if plugin else 0)
    assert all(p.dtypes == ("HALF",) for p in parsed.plugins if p.plugin == "deformable_attention")
    assert looks == 10
    assert "GRID_SAMPLE" not in parsed.layers
    assert plugin or sum(parsed.layers["GATHER"].values()) >= 4 * looks
    assert set(parsed.layers["CONVOLUTION"]) == {TYPES[precision]}
    record_property("support", f"algm {network.family}/{network.decoder} tensorrt-rtx builds")


def test_the_portable_graph_of_budgets_needs_no_plugin(bindings: None, translated: Translate, tmp_path: Path) -> None:
    """Nothing of it depends on the picture, so TensorRT builds it from standard operators and tells its layers."""
    plan = with_budgets(PLAN)
    portable = translated(deployed_toy(NETWORK, plan, "labels"), plan)
    add_function_bodies(portable)
    onnx.save(onnx.inliner.inline_local_functions(ir.to_proto(portable)), tmp_path / "model.onnx")
    engine, built = build(tmp_path / "model.onnx")
    parsed = built.parsed_network
    assert engine and built.plugin_sources is None
    assert parsed.inputs == (tensor("image", "UINT8", -1, 3, *NETWORK.image_size),)
    maps = [tensor(f"token_map_{m}", "INT64", -1, 24) for m in ("clap_1", "gbm_2")]
    assert parsed.outputs[1:] == (tensor("token_counts", "INT64", -1, 2), *maps)
    assert parsed.plugins == ()
    assert set(parsed.layers["TOPK"]) == {"FLOAT"}
    assert not {"PLUGIN_V3", "NON_ZERO", "CONDITION", "LOOP"} & set(parsed.layers)
    names = [name for name, _ in built.builder_layers]
    assert any("Topk" in name for name in names)  # what sorts the windows is a layer of the engine


@pytest.mark.slow
@pytest.mark.parametrize("method", CONSTANT_COUNTS)
def test_methods_of_constant_counts_are_built(
    rtx: None,
    tiny_export: Callable[..., Bundle],
    copied: Callable[..., Bundle],
    record_property: Support,
    method: str,
) -> None:
    """They leave as many tokens in every picture, so no plugin decides a shape; what they compare stays fp32."""
    bundle = tiny_export(flatten(CONSTANT_COUNTS[method], "merging."))
    found = {}
    precisions: tuple[Precision, ...] = ("fp32", "fp16")
    for precision in precisions:
        model, _ = write_tensorrt_onnx(copied(bundle, precision), precision)
        engine, built = build(model, precision)
        parsed = built.parsed_network
        assert engine
        assert {plugin.plugin for plugin in parsed.plugins} == {"unmerge"}
        assert set(parsed.layers["TOPK"]) == {"FLOAT"}
        assert not {"NON_ZERO", "CONDITION", "LOOP"} & set(parsed.layers)
        found[precision] = parsed.layers["MATRIX_MULTIPLY"]
    assert 0 < found["fp16"]["FLOAT"] < found["fp16"]["HALF"]
    assert found["fp16"]["FLOAT"] + found["fp16"]["HALF"] == found["fp32"]["FLOAT"]
    record_property("support", f"{method} segmenter/mask_transformer tensorrt-rtx builds")


def test_budgets_are_built_in_16_bits(rtx: None, translated: Translate, tmp_path: Path) -> None:
    plan = with_budgets(PLAN)
    base = translated(deployed_toy(NETWORK, plan, "labels"), plan)
    onnx.save(tensorrt_from_base(base, "fp16")[0], tmp_path / "model.onnx")
    parsed = build(tmp_path / "model.onnx", "fp16")[1].parsed_network
    assert {plugin.plugin for plugin in parsed.plugins} == {"label_map"}
    assert 0 < parsed.layers["MATRIX_MULTIPLY"]["FLOAT"] < parsed.layers["MATRIX_MULTIPLY"]["HALF"]


def test_merging_again_is_built_in_16_bits(rtx: None, tmp_path: Path) -> None:
    shapes = {"patches": ["batch", 25, 8], "map": ["batch", 24], "size": ["batch", 17], "again": ["batch", 17, 8]}
    kinds = {"map": TensorProto.INT64}
    values = {
        n: helper.make_tensor_value_info(n, kinds.get(n, TensorProto.FLOAT), shape) for n, shape in shapes.items()
    }
    *inputs, output = values
    node = helper.make_node("remerge", inputs, [output], domain="algm", prefix=1)
    graph = helper.make_graph([node], "again", [values[n] for n in inputs], [values[output]])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("algm", 1)]
    base = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    onnx.save(tensorrt_from_base(base, "fp16")[0], tmp_path / "model.onnx")
    assert build(tmp_path / "model.onnx", "fp16")[1].parsed_network.layers["MATRIX_MULTIPLY"] == {"FLOAT": 1}


def test_more_products_in_fp32_than_the_graph_has_are_refused() -> None:
    parsed = ParsedNetwork(plugins=(), layers={"MATRIX_MULTIPLY": {"HALF": 9, "FLOAT": 3}})
    tensorrt_engine._check_precision(parsed, "fp16", 3)
    with pytest.raises(BuildError, match="expected fp16 arithmetic, 3 matrix_multiply layers are FLOAT"):
        tensorrt_engine._check_precision(parsed, "fp16", 2)


@pytest.mark.parametrize(("family", "decoder"), [("eomt", "queries"), ("segvit", "atm")])
def test_engines_of_masks_exported_in_16_bits(
    rtx: None, translated: Translate, tmp_path: Path, family: str, decoder: str
) -> None:
    """Their scores are summed over queries in fp32, which is no arithmetic that went astray."""
    network, plan = toy(family, decoder)
    base = translated(deployed_toy(network, plan, dtype=torch.float16), plan)
    onnx.save(tensorrt_from_base(base, "fp16")[0], tmp_path / "model.onnx")
    layers = build(tmp_path / "model.onnx", "fp16")[1].parsed_network.layers
    assert layers["EINSUM"]["FLOAT"] == 1
    assert set(layers["MATRIX_MULTIPLY"]) == {"HALF"}


def test_cts_is_built_from_standard_operators(
    rtx: None, translated: Translate, tmp_path: Path, record_property: Support
) -> None:
    """It shares as many tokens in every picture, and its policy network is convolutions; both precisions."""
    network, plan = cts_toy()
    base = translated(deployed_toy(network, plan, "labels"), plan)
    precisions: tuple[Precision, ...] = ("fp32", "fp16")
    for precision in precisions:
        onnx.save(tensorrt_from_base(base, precision)[0], tmp_path / "model.onnx")
        engine, built = build(tmp_path / "model.onnx", precision)
        parsed = built.parsed_network
        assert engine
        assert {plugin.plugin for plugin in parsed.plugins} == {"label_map"}
        assert set(parsed.layers["TOPK"]) == {"FLOAT"}
        assert set(parsed.layers["CONVOLUTION"]) == {"FLOAT" if precision == "fp32" else "HALF"}
        assert not {"NON_ZERO", "CONDITION", "LOOP"} & set(parsed.layers)
    record_property("support", f"cts segmenter/{network.decoder} tensorrt-rtx builds")


@pytest.mark.parametrize(
    "layers",
    [{"EINSUM": {"FLOAT": 2}}, {"EINSUM": {"BF16": 1}}, {"MATRIX_MULTIPLY": {"HALF": 9, "FLOAT": 1}}],
    ids=["two sums in fp32", "another 16-bit type", "a product in fp32"],
)
def test_arithmetic_that_went_astray_is_refused(layers: dict[str, dict[str, int]]) -> None:
    with pytest.raises(BuildError, match="expected fp16 arithmetic"):
        tensorrt_engine._check_precision(ParsedNetwork(plugins=(), layers=layers), "fp16")


@pytest.fixture(scope="module")
def bases(translated: Translate) -> dict[Output, ir.Model]:
    outputs: tuple[Output, ...] = ("labels", "scores")
    return {output: translated(deployed_toy(NETWORK, PLAN, output), PLAN) for output in outputs}


@pytest.fixture(scope="module")
def models(
    bases: dict[Output, ir.Model], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[Output, Precision], Path]:
    folder = tmp_path_factory.mktemp("models")
    paths: dict[tuple[Output, Precision], Path] = {}
    for output, precision in (("labels", "fp32"), ("labels", "fp16"), ("scores", "fp16"), ("scores", "bf16")):
        paths[output, precision] = folder / f"{output}.{precision}.onnx"
        onnx.save(tensorrt_from_base(bases[output], precision)[0], paths[output, precision])
    return paths


def tensor(name: str, dtype: str, *shape: int) -> ParsedTensor:
    return ParsedTensor(name=name, dtype=dtype, shape=shape)


def build(model: Path, precision: Precision = "fp32", **options: Any) -> tuple[bytes, Engine]:
    chosen = EngineOptions(batches=BATCHES, **options)
    return engine_from_onnx(model, "tensorrt-rtx", precision, cuda_capability(), chosen, progress=False)


TYPES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16"}


@pytest.mark.parametrize(
    ("output", "precision"), [("labels", "fp32"), ("labels", "fp16"), ("scores", "fp16"), ("scores", "bf16")]
)
def test_an_engine_with_our_plugins(
    rtx: None, models: Any, record_property: Support, output: Output, precision: Precision
) -> None:
    engine, built = build(models[output, precision], precision)
    record_property("support", f"algm segmenter/{NETWORK.decoder} tensorrt-rtx builds")
    tokens = TYPES[precision]
    assert len(engine) == built.engine_bytes > 1 << 20
    assert built.compute_capabilities == ("8.6", "8.9", "12.0")
    network = built.parsed_network
    tail = {"labels": ("label_map", ("INT32",)), "scores": ("unmerge", (tokens,))}[output]
    assert [(p.plugin, p.dtypes) for p in network.plugins] == [
        ("clap", (tokens, "FLOAT", "INT64", "INT64", "INT32")),
        ("gbm", (tokens, "FLOAT", "INT64", "INT64", "INT32")),
        tail,
    ]
    assert network.layers["ATTENTION_INPUT"] == {tokens: ATTENTIONS}
    assert set(network.layers["MATRIX_MULTIPLY"]) == set(network.layers["CONVOLUTION"]) == {tokens}
    assert network.layers["REDUCE"] == {"FLOAT": 2}  # the norms of the decoder
    assert network.inputs[0] == tensor("image", "UINT8", -1, 3, 64, 96)
    main = {"labels": tensor("labels", "UINT8", -1, 64, 96), "scores": tensor("scores", "FLOAT", -1, 5, 64, 96)}
    maps = [tensor(f"token_map_{m}", "INT64", -1, 24) for m in ("clap_1", "gbm_2")]
    assert network.outputs == (main[output], tensor("token_counts", "INT64", -1, 2), *maps)
    kinds = [kind for _, kind in built.builder_layers]
    assert kinds.count("PluginV3") + kinds.count("custom_layer") == 3
    assert built.attention_in_parts == (
        ATTENTIONS if precision == "fp32" else 0
    )  # TensorRT-RTX has no fused fp32 attention


@pytest.mark.parametrize("capability", ["8.6", "8.9", "12.0"])
def test_an_engine_for_one_gpu(rtx: None, models: Any, capability: str) -> None:
    engine, built = build(models["labels", "fp16"], "fp16", compute_capabilities=(capability,))
    assert built.compute_capabilities == (capability,)
    assert built.attention_in_parts == 0, "attention with a mask is no longer one kernel"
    assert engine


def test_the_record_is_json_without_paths_of_this_machine(rtx: None, models: Any) -> None:
    model = models["labels", "fp16"]
    _, record = build(model, "fp16")
    written = msgspec.json.encode(record)
    assert str(model.parent).encode() not in written
    assert msgspec.json.decode(written, type=Engine) == record
    assert record.batches == BATCHES
    assert any("Successfully created plugin: clap" in line for line in record.log)
    assert (record.engine_layers is None) == bool(record.engine_layers_reason)
    if not torch.cuda.is_available():
        assert record.engine_layers_reason == "torch finds no CUDA device here that could load the engine"


def test_without_the_alias_the_parser_ends_the_process(rtx: None, models: Any) -> None:
    """The defect that runtimes/trt_plugin/CMakeLists.txt cures; when this fails, the cure can go."""
    program = (
        "import sys; from pathlib import Path; from algm_deploy import native_libraries as native\n"
        "from algm_deploy.runners.tensorrt import library\n"
        "from algm_deploy.runners.tensorrt.engine import engine_from_onnx\n"
        "native.cache_folder = lambda: Path(sys.argv[3])\n"
        "if sys.argv[2] == 'without': library._make_rtx_name_loadable = lambda: None\n"
        "engine_from_onnx(Path(sys.argv[1]), 'tensorrt-rtx', 'fp16', None, progress=False); print('built')\n"
    )
    ends = {}
    for alias in ("with", "without"):
        command = [sys.executable, "-c", program, models["labels", "fp16"], alias, native.cache_folder()]
        ends[alias] = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ends["with"].stdout == "built\n", ends["with"].stderr
    assert ends["without"].returncode == -signal.SIGABRT


def test_polygraphy_parses_the_network_with_our_plugins(rtx: None, models: Any) -> None:
    command = [sys.executable, "-m", polygraphy.__name__, "tensorrt-rtx", "inspect", "model", models["labels", "fp16"]]
    flags = ["--display-as", "trt", "--strongly-typed"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "==== TensorRT Network ====" in done.stdout
    assert "token_map_gbm_2 [dtype=int64, shape=(-1, 24)]" in done.stdout


def test_polygraphy_for_no_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    assert polygraphy.main(["tensort", "inspect"]) == 2
    assert "tensorrt-rtx" in capsys.readouterr().err


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("bindings", "no_native_libraries")
def test_plugin_library_missing(models: Any) -> None:
    with pytest.raises(BuildError, match=r"libalgm_trt_plugin\.so, but .* is not built"):
        build(models["labels", "fp32"])


def test_bindings_missing(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(RuntimeUnavailableError, match=r"pip install 'algm-deploy\[tensorrt-rtx\]'"):
        build(models["labels", "fp32"])


def changed(model: Path, tmp_path: Path, change: Any) -> Path:
    proto = onnx.load(model)
    change(proto)
    onnx.save(proto, tmp_path / "changed.onnx")
    return tmp_path / "changed.onnx"


def node_of(model: onnx.ModelProto, op: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == op)


def test_wrong_namespace(rtx: None, models: Any, tmp_path: Path) -> None:
    def elsewhere(model: onnx.ModelProto) -> None:
        for attribute in node_of(model, "clap").attribute:
            if attribute.name == "plugin_namespace":
                attribute.s = b"elsewhere"

    with pytest.raises(BuildError, match=r"node encoder.blocks.0.merge/clap \(clap\).*Plugin not found") as error:
        build(changed(models["labels", "fp32"], tmp_path, elsewhere))
    assert "clap version 2 namespace algm_deploy" in str(error.value)


def test_unsupported_type(rtx: None, tmp_path: Path) -> None:
    clap = helper.make_node(
        "clap", ["tokens", "size", "tau"], list("tzml"), name="merge", domain="algm",
        grid=[2, 2], window=[2, 2], prefix=0, semantics="code", batch="per_image", order="raster",
        rule="threshold", budget=0,
    )  # fmt: skip
    inputs = {
        "tokens": (TensorProto.INT32, ["b", 4, 8]),
        "size": (TensorProto.FLOAT, ["b", 4]),
        "tau": (TensorProto.FLOAT, []),
    }
    graph = helper.make_graph(
        [merge_node(clap)],
        "g",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info("m", TensorProto.INT64, ["b", 4])],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("algm", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "model.onnx")
    with pytest.raises(BuildError, match=r"node merge \(clap\).*input tokens has unsupported type int32"):
        build(tmp_path / "model.onnx")


@pytest.mark.parametrize("content", [b"", b"no protobuf", b"\x08\x0a\x3a\xff"])
def test_a_file_that_is_no_model(rtx: None, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(BuildError, match=r"model\.onnx (cannot be read|holds an ONNX graph without)"):
        build(tmp_path / "model.onnx")


def test_no_file(rtx: None, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"expected an ONNX model at .*model\.onnx, found none"):
        build(tmp_path / "model.onnx")


def test_a_broken_node_is_named(rtx: None, models: Any, tmp_path: Path) -> None:
    def narrower(model: onnx.ModelProto) -> None:
        product = node_of(model, "MatMul")
        weight = next(t for t in model.graph.initializer if t.name == product.input[1])
        weight.CopyFrom(numpy_helper.from_array(np.zeros((63, 192), np.float32), weight.name))

    with pytest.raises(BuildError, match=r"node encoder\.blocks\.0\.attn\.qkv/MatMul \(MatMul\).*must match"):
        build(changed(models["labels", "fp32"], tmp_path, narrower))


def test_another_precision_than_asked(rtx: None, models: Any) -> None:
    with pytest.raises(BuildError, match="expected fp16 arithmetic, 1 convolution layers are FLOAT"):
        build(models["labels", "fp32"], "fp16")


def test_an_engine_in_fp8_has_its_quantisers(rtx: None, measured_fp8_bundle: Bundle, copied: Any) -> None:
    bundle = copied(measured_fp8_bundle)
    options = EngineOptions(batches=(1, 2, 2), compute_capabilities=("8.9",))
    _, built = engine_from_onnx(bundle.file(TENSORRT_ONNX), "tensorrt-rtx", "fp8", None, options, progress=False)
    assert bundle.manifest.quantization is not None
    assert built.parsed_network.layers["QUANTIZE"] == {"FP8": len(bundle.manifest.quantization.products)}
    assert set(built.parsed_network.layers["MATRIX_MULTIPLY"]) == {"HALF"}
    assert built.attention_in_parts is not None and built.attention_in_parts < ATTENTIONS + 1


def test_a_target_that_tensorrt_rtx_does_not_know(rtx: None, models: Any) -> None:
    with pytest.raises(BuildError, match=r"builds for compute capability .*8\.9.*, not 9\.0"):
        build(models["labels", "fp32"], compute_capabilities=("9.0",))


def test_a_fixed_batch_outside_the_profile(rtx: None, models: Any, tmp_path: Path) -> None:
    def fixed(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3

    with pytest.raises(BuildError, match=r"fixed batch of 3, the profile asks for \(1, 2, 4\)"):
        build(changed(models["labels", "fp32"], tmp_path, fixed))


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handling of Ctrl-C, which a shell switches off for what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_a_build_at_its_next_step(
    rtx: None, models: Any, monkeypatch: pytest.MonkeyPatch, ctrl_c: None
) -> None:
    monkeypatch.setattr(tqdm, "update", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        build(models["labels", "fp32"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [(0, 1, 2), (2, 1, 4), (1, 4, 2)])
def test_bad_profiles(batches: tuple[int, int, int]) -> None:
    with pytest.raises(BuildError, match="1 <= smallest <= usual <= largest"):
        tensorrt_engine.check_options(EngineOptions(batches=batches), "tensorrt")


@pytest.mark.parametrize(
    ("options", "runtime", "message"),
    [
        (
            {"timing_cache": Path("cache")},
            "tensorrt-rtx",
            "no build option timing_cache: .* build for tensorrt$",
        ),
        ({"version_compatible": True}, "tensorrt-rtx", "no build option version_compatible: leave it out"),
        ({"hardware_compatible": True}, "tensorrt-rtx", "no build option hardware_compatible: leave it out"),
        ({"compute_capabilities": ("8.9",)}, "tensorrt", "compute_capabilities: .*, or build for tensorrt-rtx$"),
        ({"level": 6}, "tensorrt", "from 0 to 5, got 6"),
        ({"workspace_mib": 0}, "tensorrt", "at least 1 MiB, got 0"),
    ],
)
def test_refused_options_say_why(options: dict[str, Any], runtime: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        tensorrt_engine.check_options(EngineOptions(**options), runtime)


@pytest.mark.parametrize("runtime", ["tensorrt", "tensorrt-rtx"])
def test_an_old_tensorrt_is_refused(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(runtime)
    monkeypatch.setitem(sys.modules, row.module, SimpleNamespace(__version__="1.4.0"))
    with pytest.raises(RuntimeUnavailableError, match=rf"expected {row.required}, found 1\.4\.0: pip install -U"):
        tensorrt_library.load_bindings(runtime)


def test_full_tensorrt_needs_a_gpu_to_build(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="11.4.0"))
    with pytest.raises(RuntimeUnavailableError, match=r"needs the GPU that will run .*build for tensorrt-rtx"):
        engine_from_onnx(models["labels", "fp32"], "tensorrt", "fp32", None, progress=False)


class StandInConfig(SimpleNamespace):
    """Stands in for IBuilderConfig: remembers what it is told."""

    def __init__(self, takes_cache: bool = True) -> None:
        super().__init__(flags=[], pools={}, takes_cache=takes_cache)

    def set_flag(self, flag: str) -> None:
        self.flags.append(flag)

    def set_memory_pool_limit(self, pool: str, size: int) -> None:
        self.pools[pool] = size

    def create_timing_cache(self, content: bytes) -> bytes:
        return content

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        self.cache, self.ignore_mismatch = cache, ignore_mismatch
        return self.takes_cache

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: b"measured")


STAND_IN_TRT = SimpleNamespace(
    ProfilingVerbosity=SimpleNamespace(DETAILED="detailed"),
    MemoryPoolType=SimpleNamespace(WORKSPACE="workspace"),
    BuilderFlag=SimpleNamespace(VERSION_COMPATIBLE="version compatible"),
    HardwareCompatibilityLevel=SimpleNamespace(AMPERE_PLUS="ampere plus"),
)


def test_full_tensorrt_gets_every_option(tmp_path: Path) -> None:
    (tmp_path / "timing").write_bytes(b"known")
    options = EngineOptions(BATCHES, 4, 256, tmp_path / "timing", version_compatible=True, hardware_compatible=True)
    config = StandInConfig()
    builder = SimpleNamespace(create_builder_config=lambda: config)
    assert tensorrt_engine._configure(STAND_IN_TRT, builder, options, "tensorrt", ()) is config
    assert config.flags == ["version compatible"]
    assert config.pools == {"workspace": 256 << 20}
    assert (config.builder_optimization_level, config.hardware_compatibility_level) == (4, "ampere plus")
    assert (config.cache, config.ignore_mismatch) == (b"known", False)
    first = tensorrt_engine._save_timing_cache(config, options)
    assert (tmp_path / "timing").read_bytes() == b"measured"
    assert first is not None
    assert first.sha256_before != first.sha256_after


def test_a_timing_cache_that_changed_is_told(tmp_path: Path) -> None:
    """A build that measures kernels anew may choose others: two engines of one command then differ."""
    options = EngineOptions(BATCHES, timing_cache=tmp_path / "timing")
    first = tensorrt_engine._save_timing_cache(StandInConfig(), options)
    second = tensorrt_engine._save_timing_cache(StandInConfig(), options)
    now = sha256_of(tmp_path / "timing")
    assert first == TimingCache(sha256_before=None, sha256_after=now)
    assert second == TimingCache(sha256_before=now, sha256_after=now)
    assert tensorrt_engine._save_timing_cache(StandInConfig(), EngineOptions(BATCHES)) is None


def test_a_foreign_timing_cache_is_refused(tmp_path: Path) -> None:
    builder = SimpleNamespace(create_builder_config=lambda: StandInConfig(takes_cache=False))
    options = EngineOptions(BATCHES, timing_cache=tmp_path / "timing")
    with pytest.raises(BuildError, match="of another TensorRT or GPU: delete it"):
        tensorrt_engine._configure(STAND_IN_TRT, builder, options, "tensorrt", ())


def test_a_plugin_that_became_a_function_body_is_noticed() -> None:
    with pytest.raises(BuildError, match="took function bodies instead"):
        tensorrt_engine._check_plugins(ParsedNetwork(plugins=()), tensorrt_engine.Counter(clap=1))
