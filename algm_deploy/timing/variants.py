"""The networks that merging is timed against: dense, and truncated, which drops tokens instead of merging them.

Dense is another graph, without merges: a threshold that nothing reaches would still pay for looking. Truncated has the
cost a merge of zero cost would leave; its labels mean nothing. Both are bundles inside the bundle, which every runtime
runs like any other.

One runtime has two dense networks. Where merging gives every picture a token count of its own, ONNX Runtime may not
attend by cuDNN, which makes a plan for every count; a network without merging has one count. It is timed both ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from algm_deploy.bundle.files import ONNX, WEIGHTS
from algm_deploy.bundle.manifest import MANIFEST
from algm_deploy.bundle.records import DENSE_VARIANTS, VariantName, VariantOrigin
from algm_deploy.bundle.signature import Signature, signature_of
from algm_deploy.bundle.store import Bundle, BundleWriter
from algm_deploy.errors import BundleError
from algm_deploy.lowering.writing import as_written, write_network
from algm_deploy.merging import deployed
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.loading import load_network
from algm_deploy.models.quantized import in_graphs
from algm_deploy.models.vit import VitNetwork
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.schema import Recipe
from algm_deploy.runners.contract import Runner, runner, runner_type
from algm_deploy.runners.registry import row_of

VARIANTS: tuple[VariantName, ...] = ("dense", "merged", "truncated")
# Operators of native libraries that all variants have, but for the one that is there for another attention. `bias_skip`
# is where no norm follows a sum, as in front of a merge, so a variant may be without.
_OF_ALL = frozenset({"label_map", "mask_labels", "packed_attention", "gelu", "bias_skip_norm", "layer_norm", "patches"})


def variant_network(
    model: VitNetwork, recipe: Recipe, variant: VariantName, tokens: Sequence[int]
) -> tuple[Deployed, Recipe]:
    """The deployed network of a variant, and the recipe that names its inputs and outputs.

    Args:
        model: network with empty merge slots.
        recipe: with the merge plan; the other variants get its batch semantics.
        variant: which; both dense ones are the same network.
        tokens: patch tokens behind each merge of the plan, for `truncated`.
    """
    named = _named(recipe, variant)
    return deployed(model, named, dict(_rows(recipe, variant, tokens))), named


def _named(recipe: Recipe, variant: VariantName) -> Recipe:
    """The recipe without merges, but for `merged`."""
    none = replace(DENSE, batch=recipe.merging.batch, method=recipe.merging.method)
    return recipe if variant == "merged" else replace(recipe, merging=none)


def _rows(recipe: Recipe, variant: VariantName, tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Pairs of layer and rows that a truncated network keeps behind it, prefix counted; none for the others."""
    pairs = zip(recipe.merging.layers, tokens, strict=True) if variant == "truncated" else ()
    return tuple((layer, recipe.network.prefix + count) for layer, count in pairs)


def variant_bundle(bundle: Bundle, variant: VariantName, tokens: Sequence[int]) -> Bundle:
    """The folder of a variant in `variants` of a bundle, written where it is missing or of another make.

    Args:
        bundle: with merging; returned as it is for `merged`.
        variant: which network.
        tokens: patch tokens that `truncated` keeps behind each merge of the plan.
    """
    if variant == "merged":
        return bundle
    target = bundle.path / "variants" / variant
    made_from = {name: bundle.files[name].sha256 for name in (WEIGHTS, ONNX)}
    origin = VariantOrigin(name=variant, made_from=made_from, rows_by_layer=_rows(bundle.recipe, variant, tokens))
    named = _named(bundle.recipe, variant)
    if (target / MANIFEST).is_file():
        found = Bundle.open(target)
        if found.manifest.variant == origin and found.recipe == named:
            return found
    model = load_network(bundle, quantize=in_graphs(bundle.recipe.precision))
    network, _ = variant_network(as_written(model), bundle.recipe, variant, tokens)
    with BundleWriter(target, named) as writer:
        write_network(writer, model, network, {WEIGHTS: made_from[WEIGHTS]})
        if variant == "truncated":
            writer.describe(signature=_with_counts(signature_of(named), len(tokens)))
        writer.describe(
            variant=origin,
            preprocessing_sha256=bundle.manifest.preprocessing_sha256,
            quantization=bundle.manifest.quantization,
        )
    return Bundle.open(target)


def _with_counts(signature: Signature, merges: int) -> Signature:
    """A truncated network names no merges, and still counts the tokens after each."""
    main, counts, *maps = signature.outputs
    return replace(signature, outputs=(main, replace(counts, shape=(-1, merges)), *maps))


def planned(bundle: Bundle, plan: MergePlan) -> Bundle:
    """The bundle as if it had been exported with another merge plan and a label map as output; nothing is written.

    For PyTorch, which reads weights and recipe: the graphs of other runtimes stay those of the bundle's own plan.
    """
    recipe = replace(bundle.recipe, merging=plan, output="labels")
    return Bundle(bundle.path, structs.replace(bundle.manifest, recipe=recipe, signature=signature_of(recipe)))


def executables(bundle: Bundle, runtime: str) -> dict[str, str]:
    """SHA-256 of each file that a runtime's results depend on, by name: what it executes, and what every export has."""
    names = (WEIGHTS, ONNX, *row_of(runtime).executed(bundle.files))
    return {name: bundle.files[name].sha256 for name in names if name in bundle.files}


def executed_bytes(bundle: Bundle, runtime: str) -> int:
    """Size on disk of what a runtime executes: its file, parts beside it, and the weights that these name."""
    executed = row_of(runtime).executed(bundle.files)
    names = {name for file in executed for name in (file, *bundle.files[file].uses)}
    return sum(bundle.files[name].size_bytes for name in names)


def may_attend_by_cudnn(bundle: Bundle, runtime: str) -> bool:
    """Whether a runtime can leave the attention of a bundle's dense network to cuDNN, which has it in 16 bits alone."""
    row = row_of(runtime)
    return row.cudnn_attention and row.precision_of(bundle.recipe.precision) == "fp16"


def faster_dense(ms: Mapping[str, float]) -> VariantName | None:
    """The dense network that gains are told against: the faster, or they would say too much of merging.

    Args:
        ms: milliseconds of the same work by variant, taken in one run; others than dense ones may be among them.

    Returns:
        Its variant; this project's own of two that are as fast, None where no dense network was timed.
    """
    return min((name for name in DENSE_VARIANTS if name in ms), key=lambda name: ms[name], default=None)


def variant_runner(bundle: Bundle, runtime: str, like: Bundle) -> Runner:
    """A closed runner of a variant, whose executable is built as that of the bundle `like` was.

    Raises:
        BundleError: the two have different operators, as the native library came or went in between.
    """
    wanted = runner(like, runtime)
    shared = _OF_ALL - ({"packed_attention"} if bundle.cudnn_attends else set())
    if _made(found := runner(bundle, runtime), shared) != _made(wanted, shared):
        runner_type(runtime).build(bundle)
    if _made(found, shared) != _made(wanted, shared):
        raise BundleError(
            f"expected {bundle.path} to be built with the operators of {like.path}, got others: run "
            f"`{wanted.build_command}` and verify again"
        )
    return found


def _made(run: Runner, shared: frozenset[str]) -> tuple[bool, frozenset[str]]:
    """Whether a runner executes what was built for it, and what a native library computes of what they share."""
    return run.row().executes_own(run.bundle.files), frozenset(run.custom_operators) & shared
