"""What a photo costs the processor around the network, step by step: the host's side of many pictures.

    python benchmarks/host_steps.py PHOTOS -o host_steps.json

Time of one thread on the processor, in milliseconds a photo, mean over the photos; so other work on the machine hardly
shows. Scores are random, of the sizes that a photo's have by a protocol with a short side of 512 pixels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image
from trained import new_record, write

from algm_deploy.pictures.preprocessing import read_photo
from algm_deploy.pictures.sliding import best_labels
from algm_deploy.pictures.sources import find_images

SHORT_SIDE = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--classes", type=int, nargs="+", default=[11, 150])
    parser.add_argument("-o", "--output", type=Path, default=Path("host_steps.json"))
    options = parser.parse_args()
    cv2.setNumThreads(1)
    paths = find_images(options.photos)[: options.count]
    rows = [steps(path, options.classes) for path in paths]
    mean = {name: round(float(np.mean([row[name] for row in rows])), 2) for name in rows[0]}
    record = new_record("none", photos=len(paths))
    record["runs"] = {"mean_by_photo": mean}
    write(record, options.output)
    print(mean)


def steps(path: Path, classes: list[int]) -> dict[str, float]:
    """Milliseconds of every step for one photo, and the sizes of what it reads and writes."""
    found: dict[str, float] = {"file_bytes": path.stat().st_size}
    photo, found["read_ms"] = timed(lambda: read_photo(path))
    height, width = photo.shape[:2]
    scale = SHORT_SIDE / min(height, width)
    size = round(width * scale), round(height * scale)
    canvas, found["resize_ms"] = timed(lambda: cv2.resize(photo, size))
    labels = photo
    for count in classes:
        scores = np.random.default_rng(0).normal(size=(count, *canvas.shape[:2])).astype(np.float32)
        scores = np.stack([cv2.GaussianBlur(plane, (0, 0), 16) for plane in scores])  # regions, as labels have
        labels, found[f"labels_of_{count}_ms"] = timed(lambda scores=scores: best_labels(scores, (height, width)))
        content, found[f"png_of_{count}_ms"] = timed(lambda labels=labels: png_of(labels))
        found[f"png_of_{count}_bytes"] = len(content)
    return {"photo_pixels": height * width, **found}


def png_of(labels: Any) -> bytes:
    stream = BytesIO()
    Image.fromarray(labels).save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def timed(step: Callable[[], Any]) -> tuple[Any, float]:
    """What a step gives, and its milliseconds on the processor: the least of three."""
    times = []
    for _ in range(3):
        begun = time.thread_time()
        result = step()
        times.append(1000 * (time.thread_time() - begun))
    return result, min(times)


if __name__ == "__main__":
    main()
