"""Drawn scenes as a data set, to measure the embedded network on others than those that ship.

    python benchmarks/demo/scenes.py FOLDER 120

Photos and labels lie in a folder for each time of day, beside a class file: `--dataset folder --slice folder`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from painter.scenes import scene, slice_name
from PIL import Image

from algm_deploy.package_data import DEMO_ASSETS

SEED = 8_100_000  # no scene that the network was trained or chosen on has such a seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("count", type=int)
    options = parser.parse_args()
    for seed in range(SEED, SEED + options.count):
        for kind, pixels in zip(("images", "labels"), scene(seed), strict=True):
            path = options.folder / kind / slice_name(seed) / f"{seed}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    shutil.copy(DEMO_ASSETS / "classes.json", options.folder)


if __name__ == "__main__":
    main()
