"""The networks that merging is timed against: dense, and truncated, which drops tokens instead of merging them.

Dense is another graph, without merges: a threshold that nothing reaches would still pay for looking. Truncated has the
cost a merge of zero cost would leave; its labels mean nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from algm_deploy.bundle.records import VariantName
from algm_deploy.bundle.signature import signature_of
from algm_deploy.lowering.export import base_onnx
from algm_deploy.lowering.onnxruntime import Provider, rewrite, single_image
from algm_deploy.lowering.portable import add_function_bodies
from algm_deploy.merging import insert_merging, truncate
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.vit import VitNetwork
from algm_deploy.recipe.schema import DENSE, Recipe

VARIANTS: tuple[VariantName, ...] = ("dense", "merged", "truncated")


def variant_network(
    model: VitNetwork, recipe: Recipe, variant: VariantName, tokens: Sequence[int]
) -> tuple[Deployed, Recipe]:
    """The deployed network of a variant, and the recipe that names its inputs and outputs.

    Args:
        model: network with empty merge slots.
        recipe: with the merge plan; the other variants get its batch semantics.
        variant: dense, merged or truncated.
        tokens: patch tokens behind each merge of the plan, for `truncated`.
    """
    plan = recipe.merging
    if variant == "merged":
        network = insert_merging(model, plan)
    elif variant == "dense":
        network = model
    else:
        prefix = model.encoder.prefix
        network = truncate(
            model, {layer: prefix + n for layer, n in zip(plan.layers, tokens, strict=True)}, plan.method
        )
    return Deployed(network, recipe.network, recipe.output).eval(), variant_recipe(recipe, variant)


def variant_recipe(recipe: Recipe, variant: VariantName) -> Recipe:
    """The recipe that names a variant's inputs and outputs: without merges, but for `merged`."""
    if variant == "merged":
        return recipe
    plan = recipe.merging
    return dataclasses.replace(recipe, merging=dataclasses.replace(DENSE, batch=plan.batch, method=plan.method))


def variant_graph(
    model: VitNetwork, recipe: Recipe, variant: VariantName, tokens: Sequence[int], provider: Provider, custom: bool
) -> ir.Model:
    """A variant's graph for a provider of ONNX Runtime, weights inside; the first arguments as for `variant_network`.

    `custom`: merges, unmerge and label map are custom operators. Outputs: labels or scores, token counts, and for
    `merged` token maps.
    """
    network, named = variant_network(model, recipe, variant, tokens)
    graph = base_onnx(network, named.merging, signature_of(named).image.dtype)
    add_function_bodies(graph)
    rewrite(graph, provider, custom, single_image(recipe, provider))
    return graph
