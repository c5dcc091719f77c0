"""A process of `test_load.py`: pictures of all lengths in one order, then in another, and what the second one takes.

Called with a bundle and a runtime. Prints how many token counts there were, and the bytes more and kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from process_memory import grown_and_kept, resident

from algm_deploy.bundle.store import Bundle
from algm_deploy.runners.contract import runner


def main(path: str, runtime: str) -> None:
    bundle = Bundle.open(Path(path))
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (1, *bundle.signature.image.shape[1:]), dtype=np.uint8)
    lengths, counts = np.arange(0, 352, 11), set()
    with runner(bundle, runtime) as run:

        def all_lengths() -> None:
            for row in rng.permutation(lengths):
                picture = image.copy()
                picture[..., : row + 32, :] = 100
                counts.add(tuple(run.infer({"image": picture})["token_counts"][0]))

        all_lengths()
        before = resident()
        all_lengths()
        grown, kept = grown_and_kept(before)
    sys.stdout.write(f"{len(counts)} {grown} {kept}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
