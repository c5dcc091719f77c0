"""Recipes: the published ones parse, and whatever is wrong in one is named."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from algm_deploy.errors import PlanError, RecipeError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.recipe import reading as recipes
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan, fresh_merges
from algm_deploy.recipe.schema import Protocol, Recipe, dataset_ratio

SMALL = Recipe(
    "small",
    Network("segmenter", 32, 6, 2, 3, (64, 96)),
    MergePlan(clap_threshold=0.9, gbm_layers=(3, 5)),
    Protocol("camvid", 64, 64, 48),
    class_names=("sky", "road", "tree"),
    palette=((1, 2, 3), (4, 5, 6), (7, 8, 9)),
    published={"miou_percent": 77.5},
)


def toml_of(recipe: Recipe, changes: dict[str, str] | None = None) -> str:
    """The recipe as TOML, with the source text of some settings replaced."""
    lines: dict[str, list[str]] = {"": ["schema = 1"]}
    for key, value in recipes.flatten(recipe).items():
        section, _, name = key.rpartition(".")
        inline = "{" + ", ".join(f"{k} = {v}" for k, v in value.items()) + "}" if isinstance(value, dict) else None
        text = (changes or {}).get(key, inline or json.dumps(value))
        lines.setdefault(section, []).append(f"{name} = {text}")
    return "\n".join("\n".join([f"[{section}]" * bool(section), *body]) for section, body in lines.items())


def write(folder: Path, text: str) -> str:
    path = folder / "small.toml"
    path.write_text(text)
    return str(path)


PUBLISHED = tuple(name for name in recipes.recipe_names() if name.startswith("segmenter_vit_"))
PRUNED = {
    "segvit_prune_vit_b16_ade20k": (768, 12, 6, (6, 8), 0.9, 341, 2048 / 512),
    "segvit_prune_vit_l16_ade20k": (1024, 24, 8, (8, 16), 0.95, 320, 2560 / 640),
    "segvit_prune_vit_l16_coco_stuff10k": (1024, 24, 16, (8, 16), 0.95, 341, 2048 / 512),
    "segvit_prune_vit_l16_pascal_context_59": (1024, 24, 16, (8, 16), 0.95, 320, 2048 / 520),
}
OTHERS = tuple(name for name in recipes.recipe_names() if name.startswith(("setr_", "segvit_")) and name not in PRUNED)
PRETRAINED = {
    "dinov2_vit_s14_ade20k": ("linear", 384, 12, 1, 47.0),
    "dinov2_vit_b14_ade20k": ("linear", 768, 12, 1, 152.0),
    "dinov2_vit_l14_ade20k": ("linear", 1024, 24, 1, 507.5),
    "deit_vit_b16_ade20k": ("linear", 768, 12, 2, 107.5),
    "segmenter_deit_b16_ade20k": ("mask_transformer", 768, 12, 2, 129.7),
    "segmenter_deit_b16_linear_ade20k": ("linear", 768, 12, 2, 107.5),
    "eomt_vit_l16_ade20k": ("queries", 1024, 24, 5, 398.5),
    "eomt_vit_l16_cityscapes": ("queries", 1024, 24, 5, 2177.7),
}
ADAPTERS = {
    "vit_adapter_deit_t16_ade20k": (192, 12, 3, 6, 192),
    "vit_adapter_deit_s16_ade20k": (384, 12, 6, 6, 384),
    "vit_adapter_deit_b16_ade20k": (768, 12, 12, 12, 384),
    "vit_adapter_vit_t16_ade20k": (192, 12, 3, 6, 192),
    "vit_adapter_vit_b16_ade20k": (768, 12, 12, 12, 384),
    "vit_adapter_vit_l16_ade20k": (1024, 24, 16, 16, 512),
    "eva_vit_g16_ade20k": (1408, 40, 16, 16, 704),
}


def test_names() -> None:
    names = recipes.recipe_names()
    for size in ("t16", "s16", "b16", "l16"):
        assert f"segmenter_vit_{size}_ade20k" in names
    assert len(PUBLISHED) == 12
    assert len(OTHERS) == 20
    assert set(names) == {*PUBLISHED, *OTHERS, *PRETRAINED, *ADAPTERS, *PRUNED, "demo"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_recipe_is_consistent(name: str) -> None:
    recipe = recipes.recipe(name)
    size, _, dataset = name.removeprefix("segmenter_vit_").partition("_")
    width, depth = {"t16": (192, 12), "s16": (384, 12), "b16": (768, 12), "l16": (1024, 24)}[size]
    classes = {"ade20k": 150, "coco_stuff10k": 171, "cityscapes": 19, "pascal_context": 60, "camvid": 11}[dataset]
    assert (recipe.name, recipe.protocol.dataset) == (name, dataset)
    assert (recipe.network.embed_dim, recipe.network.depth, recipe.network.heads) == (width, depth, width // 64)
    assert recipe.network.classes == classes
    assert recipe.network.image_size == (recipe.protocol.window, recipe.protocol.window)
    assert recipe.merging.layers == (1, 7 if size == "l16" else 5)


@pytest.mark.parametrize("name", OTHERS)
def test_every_recipe_of_other_families_is_consistent(name: str) -> None:
    recipe = recipes.recipe(name)
    network, protocol = recipe.network, recipe.protocol
    kind, _, rest = name.partition("_vit_")
    size, _, dataset = rest.partition("_")
    family, *head = kind.split("_")
    decoder = "_".join(head) if network.decoder.endswith("_mmseg") else "_".join(head).removesuffix("_mmseg")
    assert (network.family, network.decoder) == (family, decoder or "atm")
    assert (network.embed_dim, network.depth) == {"b16": (768, 12), "l16": (1024, 24)}[size]
    assert network.heads == network.embed_dim // 64
    assert network.image_size == (protocol.window, protocol.window)
    assert protocol.dataset == dataset
    classes = {"ade20k": 150, "coco_stuff10k": 171, "cityscapes": 19, "pascal_context": 60, "pascal_context_59": 59}
    assert network.classes == classes[dataset]
    assert network.normalization == ("vit" if family == "segvit" else "deit")
    # ALGM (CVPR 2024), appendix
    assert recipe.merging.layers == (1, {"setr": 5 if size == "b16" else 13, "segvit": 12}[family])
    assert network.stages == {"mla": (6, 12, 18, 24), "atm": (8, 16, 24)}.get(
        network.decoder.removesuffix("_mmseg"), ()
    )


# Data set, short side, window, stride, long limit over short side: Segmenter's data/config and ALGM's eval/miou.py;
# configs of fudan-zvg/SETR, zbwxp/SegVit, tue-mps/eomt, and of DINOv2's heads. Windows of ADE20K's networks follow the
# checkpoint's crop.
PROTOCOLS = {
    "segmenter": {
        "ade20k": (512, None, None, 4),
        "cityscapes": (1024, 768, 512, 2),
        "pascal_context": (520, 480, 448, 8),
        "coco_stuff10k": (512, 512, 341, 8),
    },
    "setr": {
        "ade20k": (512, 512, 341, 4),
        "cityscapes": (1025, 768, 512, 2049 / 1025),
        "pascal_context": (520, 480, 320, 8),
    },
    "segvit": {
        "ade20k": (640, 640, 608, 2048 / 640),
        "pascal_context": (520, 480, 320, 8),
        "pascal_context_59": (520, 480, 320, 8),
        "coco_stuff10k": (512, 512, 341, 8),
    },
    "dinov2": {"ade20k": (512, 512, 341, 4)},
    "deit": {"ade20k": (512, 512, 341, 4)},
    "vit_adapter": {"ade20k": (512, 512, 341, 4)},
    "eva": {"ade20k": (896, 896, 512, 4)},
    "eomt": {"ade20k": (512, 512, 512, 100), "cityscapes": (1024, 1024, 1024, 2)},
}


@pytest.mark.parametrize("name", sorted({*PUBLISHED, *OTHERS, *PRETRAINED, *ADAPTERS} - {"segmenter_vit_s16_camvid"}))
def test_protocols_are_the_published_ones(name: str) -> None:
    recipe = recipes.recipe(name)
    protocol = recipe.protocol
    short_side, window, stride, ratio = PROTOCOLS[recipe.network.family][protocol.dataset]
    window = window or recipe.network.image_size[0]
    multiple = 32 if name in ADAPTERS else 1
    expected = Protocol(protocol.dataset, short_side, window, stride or window - 32, ratio, multiple=multiple)
    assert protocol == expected


def test_the_long_limit_of_a_checkpoint_without_a_recipe() -> None:
    for dataset, ratio in {"ade20k": 4, "cityscapes": 2, "pascal_context": 8, "pascal_context_59": 8}.items():
        assert dataset_ratio(dataset) == ratio
    for name in PUBLISHED:
        protocol = recipes.recipe(name).protocol
        assert protocol.max_ratio == dataset_ratio(protocol.dataset), name


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_recipe_of_adapters_is_consistent(name: str) -> None:
    recipe = recipes.recipe(name)
    network, plan = recipe.network, recipe.merging
    shape = network.embed_dim, network.depth, network.heads, network.adapter_heads, network.adapter_dim
    assert shape == ADAPTERS[name]
    assert (network.stages[0], network.stages[3]) == (network.depth // 4, network.depth)
    assert plan.layers == tuple(start for start, _ in network.groups)  # as the paper merges in EVA
    assert fresh_merges(plan, network) == (True, True, True, True)


@pytest.mark.parametrize("name", PRUNED)
def test_every_recipe_of_dtop_is_consistent(name: str) -> None:
    """By config/prune of zbwxp/Dynamic-Token-Pruning."""
    recipe, (width, depth, heads, blocks, tau, stride, ratio) = recipes.recipe(name), PRUNED[name]
    network, plan, protocol = recipe.network, recipe.merging, recipe.protocol
    assert (network.decoder, network.embed_dim, network.depth) == ("prune", width, depth)
    assert (network.decoder_dim, network.mask_heads) == (width // 2, heads)
    assert network.auxiliary == plan.layers == blocks
    assert (plan.clap_threshold, plan.dtop_keep) == (tau, 5)
    assert network.image_size == (protocol.window, protocol.window)
    assert (protocol.stride, round(protocol.max_ratio, 3)) == (stride, round(ratio, 3))
    assert name.endswith(protocol.dataset)
    assert network.classes == {"ade20k": 150, "coco_stuff10k": 171, "pascal_context_59": 59}[protocol.dataset]
    assert multiply_adds(network, DENSE).gmacs == pytest.approx(recipe.published["gmacs_dense"], rel=0.01)


@pytest.mark.parametrize("name", PRETRAINED)
def test_every_recipe_of_pretrained_vits_is_consistent(name: str) -> None:
    recipe, (decoder, width, depth, prefix, gmacs) = recipes.recipe(name), PRETRAINED[name]
    network, protocol = recipe.network, recipe.protocol
    assert (network.decoder, network.embed_dim, network.depth, network.prefix) == (decoder, width, depth, prefix)
    assert (network.heads, network.normalization) == (width // 64, "deit")
    assert network.image_size == (protocol.window, protocol.window)
    assert network.classes == {"ade20k": 150, "cityscapes": 19}[protocol.dataset]
    assert name.endswith(protocol.dataset)
    assert recipe.merging.layers == (1, 7 if width == 1024 else 5)
    assert recipe.merging.clap_threshold == (0.98 if network.family == "eomt" else 1.0)  # no other is published
    assert multiply_adds(network, DENSE).gmacs == pytest.approx(gmacs, rel=0.001)


@pytest.mark.parametrize(
    ("name", "threshold", "gmacs"),
    [
        ("segmenter_vit_t16_ade20k", 0.9, 8.4),
        ("segmenter_vit_s16_ade20k", 0.88, 26.3),
        ("segmenter_vit_b16_ade20k", 0.94, 91),
        ("segmenter_vit_l16_ade20k", 0.95, 438),
        ("segmenter_vit_s16_cityscapes", 0.955, 76),
        ("segmenter_vit_s16_pascal_context", 0.88, 24.6),
    ],
)
def test_published_figures(name: str, threshold: float, gmacs: float) -> None:
    recipe = recipes.recipe(name)
    assert recipe.merging.clap_threshold == threshold
    assert recipe.published["gmacs"] == gmacs


def test_an_unpublished_threshold_is_left_to_variant_and_flags() -> None:
    said = recipes.recipe_settings("segmenter_vit_l16_cityscapes")
    assert "merging.clap_threshold" not in said
    assert recipes.resolve([("recipe", said)])[0].merging.clap_threshold == 1.0


def test_toml_and_tables_round_trip(tmp_path: Path) -> None:
    assert recipes.recipe(write(tmp_path, toml_of(SMALL))) == SMALL
    assert recipes.from_table(json.loads(json.dumps(recipes.to_table(SMALL))), "manifest") == SMALL


def test_folders_and_files_may_have_an_at_sign(tmp_path: Path) -> None:
    folder = tmp_path / "me@home"
    folder.mkdir()
    file = folder / "a@b.toml"
    file.write_text(toml_of(SMALL) + "\n[rows.sharp]\nmerging.clap_threshold = 0.95\n")
    assert recipes.recipe(str(file)) == SMALL
    row = recipes.recipe(f"{file}@sharp")
    assert (row.name, row.merging.clap_threshold) == ("a@b@sharp", 0.95)
    with pytest.raises(RecipeError, match=r"expected one of its rows \(sharp\), got 'blunt'"):
        recipes.recipe(f"{file}@blunt")


def test_order_of_authority() -> None:
    variant = recipes.flatten(replace(SMALL, name="folder", merging=MergePlan(clap_threshold=0.8, gbm_layers=(3,))))
    recipe = {"name": "small", "merging.clap_threshold": 0.9, "merging.gbm_layers": (3,)}
    flags = {"merging.clap_threshold": recipes.checked("merging.clap_threshold", 0.95)}
    result, conflicts = recipes.resolve([("variant.yml", variant), ("recipe small", recipe), ("--tau", flags)])
    assert (result.name, result.merging.clap_threshold, result.merging.gbm_layers) == ("small", 0.95, (3,))
    assert conflicts == (
        "merging.clap_threshold: recipe small says 0.9, variant.yml says 0.8; recipe small wins",
        "merging.clap_threshold: --tau says 0.95, recipe small says 0.9; --tau wins",
    )


# One wrong value for each setting, and what the message says is expected.
WRONG = {
    "name": ("3", "a text"),
    "class_names": ('["sky", "road"]', "class_names for 3 classes, got 2"),
    "palette": ("[[1, 2], [3, 4], [5, 6]]", "3 whole numbers"),
    "output": ('"mask"', "labels or scores"),
    "precision": ('"int4"', "fp32 or fp16 or bf16 or int8 or fp8"),
    "max_batch": ("0", "recipe.max_batch between 1 and 1024"),
    "published": ('{miou_percent = "high"}', "a finite number as published.miou_percent"),
    "network.family": ('"fcn"', "segmenter"),
    "network.embed_dim": ("32.5", "a whole number"),
    "network.depth": ("1000000000", "network.depth between 1 and 256"),
    "network.heads": ("5", "network.heads to divide the width 32"),
    "network.classes": ("0", "network.classes between 1 and 65535"),
    "network.image_size": ("[64, 100]", "multiples of the patch size 16"),
    "network.patch_size": ("-16", "network.patch_size between 1 and 256"),
    "network.decoder": ('"deeplab_dec"', "mask_transformer or linear"),
    "network.decoder_depth": ("true", "a whole number"),
    "network.normalization": ('"imagenet"', "vit or deit"),
    "network.stages": ("[2, 7]", "network.stages between 1 and 6"),
    "network.decoder_dim": ("0", "network.decoder_dim between 1 and 8192"),
    "network.extra_tokens": ("2", "network.extra_tokens between 0 and 1"),
    "network.queries": ("-1", "network.queries between 0 and 1024"),
    "network.adapter_heads": ("2", "network.adapter_heads between 0 and 0"),
    "network.adapter_dim": ("16", "network.adapter_dim between 0 and 0"),
    "network.decoder_heads": ("2", "network.decoder_heads between 0 and 0"),
    "network.pixel_layers": ("1", "network.pixel_layers between 0 and 0"),
    "network.auxiliary": ("[3, 2]", "as network.auxiliary, whose heads stand before the last block, got (3, 2)"),
    "network.policy": ("1", "expected true or false as network.policy, got 1"),
    "network.mlp_dim": ("-1", "network.mlp_dim between 0 and 65536"),
    "merging.clap_layers": ("[1, 2]", "CLAP works on the full patch grid and fits one layer only"),
    "merging.gbm_layers": ("[3, 7]", "merging layers up to 6"),
    "merging.window": ("[8, 8]", "a merging.window within the grid (4, 6)"),
    "merging.clap_threshold": ("nan", "a finite number"),
    "merging.gbm_threshold": ("1e9", "merging.gbm_threshold between -1000 and 1000"),
    "merging.clap": ('"adaptive"', "threshold or budget"),
    "merging.gbm": ('"auto"', "adaptive or fixed or budget"),
    "merging.clap_budget": ("0.4", "merging.clap_budget is read by the rule budget"),
    "merging.gbm_budget": ("9", "merging.gbm_budget is read by the rule budget"),
    "merging.semantics": ('"both"', "code or paper"),
    "merging.batch": ("1", "per_image or batch_min"),
    "merging.order": ('""', "published or raster"),
    "merging.method": ('"dtopp"', "algm or tome or tome_blockwise or elvit or evit or g2tm or mpm or cts or dtop"),
    "merging.tome_r": ("[3]", "merging.tome_r is read by method tome, got (3,) for algm"),
    "merging.tome_share": ("[0.2]", "merging.tome_share is read by method tome_blockwise, got (0.2,) for algm"),
    "merging.elvit_layer": ("3", "merging.elvit_layer is read by method elvit, got 3 for algm"),
    "merging.elvit_grid": ("[2, 2]", "merging.elvit_grid is read by method elvit, got (2, 2) for algm"),
    "merging.elvit_neighbours": ("0", "merging.elvit_neighbours is read by method elvit, got 0 for algm"),
    "merging.elvit_iterations": ("9", "merging.elvit_iterations is read by method elvit, got 9 for algm"),
    "merging.elvit_window": ("3", "merging.elvit_window is read by method elvit, got 3 for algm"),
    "merging.elvit_temperature": ("0.5", "merging.elvit_temperature is read by method elvit, got 0.5 for algm"),
    "merging.evit_layers": ("[4, 7]", "merging.evit_layers is read by method evit, got (4, 7) for algm"),
    "merging.evit_keep": ("0.9", "merging.evit_keep is read by method evit, got 0.9 for algm"),
    "merging.cts_shared": ("9", "merging.cts_shared is read by method cts, got 9 for algm"),
    "merging.g2tm_layer": ("2", "merging.g2tm_layer is read by method g2tm, got 2 for algm"),
    "merging.dtop_layers": ("[2, 5]", "merging.dtop_layers is read by method dtop, got (2, 5) for algm"),
    "merging.dtop_keep": ("3", "merging.dtop_keep is read by method dtop, got 3 for algm"),
    "merging.mpm_layers": ("[2, 5]", "merging.mpm_layers is read by method mpm, got (2, 5) for algm"),
    "merging.between_groups": ('"merge"', "unmerge or remerge"),
    "protocol.dataset": ("[]", "a text"),
    "protocol.short_side": ("[64]", "a whole number"),
    "protocol.window": ("0", "protocol.window between 1 and 16384"),
    "protocol.stride": ("65", "protocol.stride between 1 and 64"),
    "protocol.max_ratio": ("inf", "a finite number"),
    "protocol.resize": ('"twice"', "double or single"),
    "protocol.multiple": ("0", "protocol.multiple between 1 and 1024"),
    "gates.label_agreement": ("99.9", "gates.label_agreement between 0 and 1"),
    "gates.excused_decisions": ("-0.1", "gates.excused_decisions between 0 and 1"),
    "gates.miou_drop_points": ('"0.1"', "a finite number"),
    "gates.int8_label_agreement": ("2", "gates.int8_label_agreement between 0 and 1"),
    "gates.fp8_label_agreement": ("2", "gates.fp8_label_agreement between 0 and 1"),
}


def test_every_setting_has_a_wrong_value() -> None:
    assert set(WRONG) == set(recipes.flatten(SMALL))


@pytest.mark.parametrize("key", WRONG)
def test_every_wrong_setting_is_named(tmp_path: Path, key: str) -> None:
    text, expected = WRONG[key]
    path = write(tmp_path, toml_of(SMALL, {key: text}))
    with pytest.raises(RecipeError) as caught:
        recipes.recipe(path)
    message = str(caught.value)
    assert message.startswith(path)
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize("key", recipes.flatten(SMALL))
@pytest.mark.parametrize("value", ["1979-05-27", "{a = {b = []}}", "[[[]]]", "false"])
def test_other_types_are_refused(tmp_path: Path, key: str, value: str) -> None:
    value = "0" if (key, value) == ("network.policy", "false") else value  # which is of its type
    with pytest.raises(RecipeError, match=f"expected .* as {key.split('.')[0]}"):
        recipes.recipe(write(tmp_path, toml_of(SMALL, {key: value})))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected `schema = 1` of this release, got None"),
        ("schema = 2", r"expected `schema = 1` of this release, got 2"),
        ("schema = [", "expected a recipe in TOML"),
        ("schema = " + "[" * 5000, "expected a recipe in TOML"),
        ("schema = 1\nmaxbatch = 4", "got 'maxbatch': did you mean max_batch?"),
        (
            "schema = 1\n[merging]\nclap_treshold = 0.9",
            "got 'merging.clap_treshold': did you mean merging.clap_threshold?",
        ),
        ("schema = 1\nclap_threshold = 0.9", "got 'clap_threshold': did you mean merging.clap_threshold?"),
        ("schema = 1\n[mergin.x]", "expected a setting such as merging.clap_threshold, got 'mergin'"),
        ("schema = 1\nnetwork = 3", "expected a table as network, got 3"),
        ("schema = 1\n[network]\ndepth = 12", "expected network.family, network.embed_dim, .* found none: add"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipes.recipe(write(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.toml").mkdir()
    for name in ("binary.toml", "absent.toml", "folder.toml"):
        with pytest.raises(RecipeError, match="expected a recipe in TOML"):
            recipes.recipe(str(tmp_path / name))


def test_an_unknown_name_is_answered_with_the_nearest_one_and_the_command_that_lists_all() -> None:
    with pytest.raises(RecipeError, match=r"ade20k': did you mean segmenter_vit_s16_ade20k\? `algm-deploy list` names"):
        recipes.recipe("segmenter_s16_ade20k")
    with pytest.raises(RecipeError, match=r"got 'zzz': `algm-deploy list` names them$"):
        recipes.recipe("zzz")


@settings(max_examples=100, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from([*recipes.to_table(SMALL), "x", ""]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["depth", "window", "a.b"]), inner),
            max_leaves=8,
        ),
    )
)
def test_changed_tables_never_escape_as_another_error(changes: dict[str, Any]) -> None:
    try:
        result = recipes.from_table(recipes.to_table(SMALL) | changes, "manifest")
    except RecipeError:
        return
    assert math.isfinite(result.merging.clap_threshold)


def test_plans_that_contradict_themselves() -> None:
    for wrong in ({"gbm_layers": (1,)}, {"clap_layers": (7,)}, {"gbm_layers": (0,)}, {"window": (1, 1)}):
        with pytest.raises(PlanError):
            replace(MergePlan(), **wrong)


@pytest.mark.parametrize(
    ("merging", "expected"),
    [
        ({"clap": "budget"}, "merging.clap_budget as a share above 0 and up to 1.0, or a count from 1, got 0"),
        ({"clap": "budget", "clap_budget": 1.5}, "merging.clap_budget as a share"),
        ({"clap": "budget", "clap_budget": -3}, "merging.clap_budget as a share"),
        ({"gbm": "budget", "gbm_budget": 0.2}, "a budget for CLAP too"),
    ],
)
def test_budgets_that_do_not_fit_are_refused(merging: dict[str, Any], expected: str) -> None:
    with pytest.raises(PlanError, match=re.escape(expected)):
        MergePlan(**merging)


def test_budgets_stay_shares_or_counts(tmp_path: Path) -> None:
    """A whole number is a count, any other a share, 1.0 included, through TOML and through a manifest's JSON."""
    settings = {"merging.clap": '"budget"', "merging.clap_budget": "1.0", "merging.gbm": '"budget"'}
    found = recipes.recipe(write(tmp_path, toml_of(SMALL, settings | {"merging.gbm_budget": "1"})))
    again = recipes.from_table(json.loads(json.dumps(recipes.to_table(found))), "the manifest")
    for plan in (found.merging, again.merging):
        assert [(type(n), n) for n in (plan.clap_budget, plan.gbm_budget)] == [(float, 1.0), (int, 1)]
