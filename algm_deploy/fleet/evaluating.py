"""Images of a data set measured on a Ray cluster. Pixels are counted, so sums are those of one process, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from algm_deploy.evaluation.datasets import Dataset, Sample
from algm_deploy.evaluation.evaluate import Found, ImageResult, Measurer
from algm_deploy.fleet.cluster import GIVEN_UP, Cluster
from algm_deploy.fleet.opening import Opening


class _Task(Struct, frozen=True):
    name: str
    image: str
    label: str
    slice: str
    known_sha256: str | None


class Fleet:
    """Measures images on workers of a cluster, as `evaluate_by` wants it. Their devices stand in `devices` afterwards.

    Args:
        cluster: of `connected`.
        opening: how workers open the bundle.
        dataset: opened; every machine has to see its files at the same paths.
    """

    def __init__(self, cluster: Cluster, opening: Opening, dataset: Dataset) -> None:
        self._cluster = cluster
        self._opening = opening
        self._dataset = replace(dataset, root=dataset.root.absolute(), samples=())
        self.devices: set[str] = set()

    def __call__(self, tasks: Sequence[tuple[Sample, str | None]]) -> Iterator[tuple[Sample, Found]]:
        """See `algm_deploy.evaluation.evaluate.Measure`."""
        items = [
            msgspec.json.encode(
                _Task(one.name, str(one.image_path.absolute()), str(one.label_path.absolute()), one.slice, known)
            )
            for one, known in tasks
        ]
        make = partial(_Work, self._opening, self._dataset)
        for index, result, device in self._cluster.run(make, items, self._opening.on_gpus):
            self.devices |= {device} if device else set()
            yield tasks[index][0], _decoded(result)


def _decoded(result: bytes | None) -> Found:
    if result is None:
        return GIVEN_UP
    return msgspec.json.decode(result, type=ImageResult | str | None)


class _Work:
    """In a worker: images one by one, as one process takes them."""

    def __init__(self, opening: Opening, dataset: Dataset) -> None:
        predictor = opening.opened()
        self._measure = Measurer(dataset, predictor.scores_of, predictor.bundle.recipe, predictor.batch)
        self.device_name = predictor.device_name

    def __call__(self, items: Sequence[bytes]) -> list[bytes]:
        tasks = [msgspec.json.decode(item, type=_Task) for item in items]
        found = (
            self._measure(Sample(one.name, Path(one.image), Path(one.label), one.slice), one.known_sha256)
            for one in tasks
        )
        return [msgspec.json.encode(one) for one in found]
