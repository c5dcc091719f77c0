"""The embedded example: synthetic street scenes, a small network trained on them, and labelled pictures."""

from pathlib import Path

ASSETS = Path(__file__).resolve().parent / "assets"
"""`checkpoint.pth` with `variant.yml`, and a labelled set: `classes.json`, `images/SLICE/` and `labels/SLICE/`."""
