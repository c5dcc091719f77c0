"""Pictures on a Ray cluster of two workers: the same results as in one process, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import fleet_work
import numpy as np
import pytest
from fleet_work import Broken, Deadly
from msgspec import structs
from PIL import Image

from algm_deploy import cli
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import evaluate
from algm_deploy.errors import BundleError, ExecutionError, RuntimeUnavailableError
from algm_deploy.fleet.cluster import Cluster, connected
from algm_deploy.fleet.opening import Opening, opening_of
from algm_deploy.fleet.predicting import FAILURES, Labeller, predict
from algm_deploy.pictures.shipped import scene
from algm_deploy.predictor import Predictor

RUNTIME = "onnxruntime-cpu"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'algm-deploy[ray]'")
    ray.cloudpickle.register_pickle_by_value(fleet_work)  # workers do not find the folder of the tests
    with connected("local", 2) as joined:
        yield joined


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of five labelled pictures and one whose photo is broken."""
    root = tmp_path_factory.mktemp("photos")
    for kind in ("images/a", "images/b", "annotations/a", "annotations/b"):
        (root / kind).mkdir(parents=True)
    for number in range(5):
        pixels, labels = scene(number)
        name = f"{'ab'[number % 2]}/{number}.png"
        Image.fromarray(pixels[:128, : 128 + 32 * number]).save(root / "images" / name)
        Image.fromarray(labels[:128, : 128 + 32 * number]).save(root / "annotations" / name)
    (root / "images/a/5.png").write_bytes(b"no picture")
    shutil.copy(root / "annotations/a/0.png", root / "annotations/a/5.png")
    (root / "classes.json").write_text(json.dumps({"names": [f"class {index}" for index in range(11)]}))
    return root


@pytest.mark.parametrize(
    ("machines", "workers", "on_gpus", "cpus"),
    [
        (((16, 1),), 1, True, 16),
        (((4, 1), (4, 1), (64, 0)), 2, True, 4),  # not 36, which no machine with a GPU has
        (((4, 0), (16, 0)), 4, False, 4),  # not 5, at which the small machine stands idle
        (((2, 1),), 4, True, 1),
        (((2, 0),), 2, False, 1),
    ],
)
def test_every_worker_finds_a_place(
    machines: tuple[tuple[int, int], ...], workers: int, on_gpus: bool, cpus: int
) -> None:
    assert Cluster(machines, None).cpus_each(workers, on_gpus) == cpus


def maps_below(folder: Path) -> dict[str, np.ndarray]:
    return {
        path.relative_to(folder).as_posix().removesuffix(".labels.png"): np.asarray(Image.open(path))
        for path in folder.rglob("*.labels.png")
    }


def rows_in(folder: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    return [row for path in folder.glob("*.parquet") for row in parquet.read_table(path).to_pylist()]


def test_an_evaluation_is_that_of_one_process_bit_for_bit(
    cluster: Cluster,
    tiny_bundle: Bundle,
    copied: Callable[..., Bundle],
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("algm_deploy.deployment.connected", lambda *_: nullcontext(cluster))
    request: dict[str, Any] = {"dataset": "folder", "slice_by": "folder", "tau": 0.87, "progress": False}
    alone, shared = copied(tiny_bundle, "alone"), copied(tiny_bundle, "shared")
    wanted = evaluate(alone, photos, RUNTIME, **request)
    found = evaluate(shared, photos, RUNTIME, ray="local", **request)
    assert found == wanted
    assert (found.images, list(found.failures)) == (5, ["a/5"])
    assert wanted.miou_percent is not None
    # What one run has done, the other takes over: all but what failed.
    again = evaluate(alone, photos, RUNTIME, ray="local", **request)
    assert structs.replace(again, device=wanted.device) == wanted
    (state,) = (alone.path / "reports").glob("evaluation-*.jsonl")
    assert len(state.read_text().splitlines()) == 6


def test_label_maps_are_those_of_predict_and_a_run_goes_on_where_it_stopped(
    cluster: Cluster, tiny_bundle: Bundle, photos: Path, tmp_path: Path
) -> None:
    folder = photos / "images"
    listed = tmp_path / "list.txt"
    listed.write_text("\n".join(os.path.relpath(path, tmp_path) for path in sorted(folder.rglob("*.png"))))
    run = partial(predict, cluster, tiny_bundle, runtime=RUNTIME, progress=False)
    first = run([folder / "a"], tmp_path / "labels")
    assert (first.done, first.kept, list(first.failures)) == (3, 0, ["5.png"])
    found = run([folder], tmp_path / "png")
    again = run([listed], tmp_path / "png")  # the same pictures by another way
    assert (found.done, found.kept, again.done, again.kept) == (5, 0, 0, 5)
    assert json.loads((tmp_path / "png" / FAILURES).read_text()).keys() == {"a/5.png"}
    maps = maps_below(tmp_path / "png")
    with Predictor(tiny_bundle, RUNTIME) as network:
        for name, labels in maps.items():
            assert np.array_equal(labels, network.predict(folder / f"{name}.png"))
    assert sorted(maps) == ["a/0", "a/2", "a/4", "b/1", "b/3"]
    with pytest.raises(BundleError, match="of other thresholds: name another"):
        run([folder], tmp_path / "png", tau=0.5)


def test_tables_in_and_out(cluster: Cluster, tiny_bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    files = sorted((photos / "images").rglob("*.png"))
    rows = [{"path": f"{path.stem}.png", "bytes": path.read_bytes()} for path in files]
    table = tmp_path / "photos.parquet"
    parquet.write_table(pyarrow.table({"image": rows}), table, row_group_size=4)
    run = partial(predict, cluster, tiny_bundle, [table], tmp_path / "labels", RUNTIME, progress=False)
    found, again = run(format="parquet"), run(format="parquet")
    assert (found.done, found.kept, list(found.failures)) == (5, 0, ["5.png"])
    assert (again.done, again.kept, list(again.failures)) == (0, 5, ["5.png"])
    with Predictor(tiny_bundle, RUNTIME) as network:
        for row in rows_in(tmp_path / "labels"):
            (path,) = [one for one in files if one.name == row["path"]]
            wanted = network.prediction(path)
            assert np.array_equal(Image.open(BytesIO(row["labels"])), wanted.labels)
            assert (row["height"], row["width"]) == wanted.labels.shape
            assert row["token_counts"] == wanted.token_counts.sum(0).tolist()
            assert row["patches"] == 64 * len(wanted.anchors)


def test_a_worker_that_dies_is_started_again_and_one_item_harms_no_other(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("algm_deploy.fleet.cluster._TRIES_AFTER_DEATHS", 1)
    items = [b"a", b"always", b"b", b"once"]
    found = {
        index: (result, device) for index, result, device in cluster.run(partial(Deadly, str(tmp_path)), items, False)
    }
    assert found == {0: (b"a", "here"), 1: (None, ""), 2: (b"b", "here"), 3: (b"once", "here")}
    assert (tmp_path / "died").exists()


def test_what_every_worker_refuses_ends_the_run(cluster: Cluster, tiny_bundle: Bundle, tmp_path: Path) -> None:
    opening = Opening(str(tiny_bundle.path), RUNTIME, None, {"model.onnx": "another"})
    with pytest.raises(BundleError, match="the same bundle on every machine"):
        list(cluster.run(partial(Labeller, opening, str(tmp_path), "png"), [b"{}"], False))
    with pytest.raises(ExecutionError, match="a worker failed: ZeroDivisionError: no"):
        list(cluster.run(partial(Broken, ZeroDivisionError("no")), [b"{}"], False))
    with pytest.raises(ExecutionError, match="Ray says 'JSONDecodeError: Expecting value"):
        cluster.call(json.loads, "no")
    with pytest.raises(RuntimeUnavailableError, match="cluster with GPUs for tensorrt"):
        opening_of(cluster, tiny_bundle, "tensorrt", None)
    assert opening_of(cluster, tiny_bundle, None, "cpu").runtime == RUNTIME


def test_the_command_says_what_was_made_and_what_failed(
    cluster: Cluster,
    tiny_bundle: Bundle,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("algm_deploy.fleet.cluster.connected", lambda *_: nullcontext(cluster))
    words = ["predict", str(tiny_bundle.path), str(photos / "images/a"), "-o", str(tmp_path), "--ray", "local"]
    assert cli.main([*words, "--workers", "2", "--runtime", RUNTIME]) == 2
    told = capsys.readouterr()
    assert told.out.split() == [str(tmp_path)]
    assert "3 label maps were made, 0 were there, 1 failed" in told.err
    assert "1 pictures have no label map" in told.err
    assert "5.png" in told.err
