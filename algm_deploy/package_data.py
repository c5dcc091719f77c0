"""Finds the data that travels with the package: recipes, native sources, and the demo's network and pictures."""

from __future__ import annotations

from pathlib import Path

from algm_deploy.errors import AlgmDeployError

_PACKAGE = Path(__file__).resolve().parent

DEMO_ASSETS = _PACKAGE / "demo" / "assets"
"""`checkpoint.pth` with `variant.yml` and `MODEL_CARD.md`, and the labelled drawn scenes that ship: `classes.json`,
`images/SLICE/NAME.png` and `labels/SLICE/NAME.png`, the slices being hours of the day."""


def content(name: str) -> Path:
    """Folder `name` (such as `export/recipes`) of an installed wheel, or of the source checkout around the package."""
    places = [root / name for root in (_PACKAGE / "_content", _PACKAGE.parent)]
    for place in places:
        if place.is_dir():
            return place
    raise AlgmDeployError(
        f"expected the folder {name} in the installed package, found none at {places[0]}: reinstall algm-deploy"
    )
