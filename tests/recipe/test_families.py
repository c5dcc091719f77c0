"""The rows of networks: each is complete, what they refuse, and that one can be added."""

from __future__ import annotations

from dataclasses import replace

import pytest

from algm_deploy.errors import RecipeError
from algm_deploy.models.loading import network_class
from algm_deploy.models.vit import VitNetwork
from algm_deploy.recipe.families import Architecture, architecture, architectures, register, unregister
from algm_deploy.recipe.network import Network

NETWORK = Network("segmenter", 32, 4, 2, 3, (64, 64))
ROW = Architecture(family="segmenter", decoder="pyramid", network="pyramid:Pyramid", stages=2)


def of(row: Architecture) -> Network:
    """A network of a row."""
    return Network(
        row.family,
        *(32, 4, 2, 3, (64, 64)),
        decoder=row.decoder,
        decoder_depth=1,
        stages=tuple(range(1, row.stages + 1)),
        queries=int(row.queries or row.masks),
        adapter_heads=2 * row.adapter,
        adapter_dim=16 * row.adapter,
        decoder_heads=2 * row.masks,
        pixel_layers=int(row.masks),
    )


@pytest.mark.parametrize("row", architectures(), ids=lambda row: row.name)
def test_a_row_names_a_class_that_says_all_there_is_to_know(row: Architecture) -> None:
    kind, network = network_class(of(row)), of(row)
    assert issubclass(kind, VitNetwork)
    projects = [naming for naming in kind.namings(network) if row.decoder in naming.decoders]
    assert projects
    patches = network.grid[0] * network.grid[1]
    assert kind.decoder_multiply_adds(network, [patches] * max(1, row.stages)) > 0


def test_what_a_project_computes_has_a_row() -> None:
    for row in architectures():
        known = {other.decoder for other in architectures() if other.family == row.family}
        for naming in network_class(of(row)).namings(of(row)):
            assert set(naming.decoders) <= known


@pytest.mark.parametrize(
    ("family", "decoder", "message"),
    [
        ("segmentr", "linear", "expected segmenter or setr or .* as network.family, got 'segmentr': did you mean segm"),
        ("fcn\nhead", "linear", r"expected segmenter or .* or eomt as network.family, got 'fcn\\nhead'$"),
        ("setr", "pupp", "expected naive or pup or .* as network.decoder of setr, got 'pupp': did you mean pup\\?"),
        ("setr", "linear", "as network.decoder of setr, got 'linear'$"),
    ],
)
def test_unknown_names_are_answered_with_the_known_ones_and_the_nearest(
    family: str, decoder: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        architecture(family, decoder)
    with pytest.raises(RecipeError, match=message):
        replace(NETWORK, family=family, decoder=decoder)


def test_a_row_may_be_added_once_and_taken_back() -> None:
    before = architectures()
    register(ROW)
    try:
        assert architectures() == (*before, ROW)
        assert replace(NETWORK, decoder="pyramid", stages=(2, 4)).architecture == ROW
        with pytest.raises(RecipeError, match="expected a new family or decoder, got segmenter/pyramid, which is kn"):
            register(replace(ROW, stages=3))
    finally:
        unregister(ROW)
    assert architectures() == before
    with pytest.raises(RecipeError, match="got 'pyramid'"):
        replace(NETWORK, decoder="pyramid", stages=(2, 4))
