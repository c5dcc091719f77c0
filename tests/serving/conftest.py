"""A server in a thread of the tests' process, and a client that knows nothing of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from algm_deploy.bundle.store import Bundle
from algm_deploy.predictor import Predictor
from algm_deploy.serving.app import Limits
from algm_deploy.serving.server import Settings, server

sys.path.insert(0, str(Path(__file__).parent))  # the helper module beside the tests

from http_client import Client


@contextmanager
def running(bundle: Bundle, limits: Limits | None = None, **options: Any) -> Iterator[Client]:
    settings = Settings(port=0, name="net", limits=limits or Limits(), **options)
    addresses: list[str] = []
    listening = threading.Event()

    def note(address: str) -> None:
        addresses.append(address)
        listening.set()

    with (
        Predictor(bundle, "onnxruntime-cpu") as predictor,
        server(predictor, settings, note) as started,
    ):
        thread = threading.Thread(target=started.run)
        thread.start()
        try:
            assert listening.wait(60)
            yield Client(int(addresses[0].rpartition(":")[2]), predictor)
        finally:
            started.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def serving() -> Callable[..., Any]:
    return running


@pytest.fixture(scope="module")
def client(tiny_bundle: Bundle) -> Iterator[Client]:
    # Pictures wait long enough for others that a test can fill a batch.
    with running(tiny_bundle, Limits(body_bytes=2 << 20, pixels=400_000, pictures=12, body_s=0.5), wait_s=0.02) as one:
        yield one


@pytest.fixture(scope="session")
def photos(root_dir: Path) -> list[np.ndarray]:
    """Pictures (H, W, 3) uint8 of three sizes, one to three windows each."""
    file = next((root_dir / "algm_deploy/demo/assets/images").rglob("*.png"))
    scene = np.asarray(Image.open(file).convert("RGB"))
    return [np.ascontiguousarray(scene[:128, :128]), np.ascontiguousarray(scene[:100, :240]), scene[::2, ::2].copy()]
