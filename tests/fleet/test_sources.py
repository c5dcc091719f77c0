"""Pictures by name, from folders, lists and tables; what does not fit is refused before anything runs."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from algm_deploy import cli
from algm_deploy.errors import DatasetError, ImageError, RuntimeUnavailableError
from algm_deploy.fleet import sources
from algm_deploy.fleet.cluster import connected
from algm_deploy.fleet.sources import Item, find_items, label_name, read_item


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a/1.png", "b/1.png", "b/2.jpg"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 6, 3), 7, np.uint8)).save(path)
    return tmp_path / "photos"


def names(*sources: Path) -> list[str]:
    return [item.name for item in find_items(sources)]


def test_names_begin_at_the_folder_that_holds_all_pictures(folder: Path, tmp_path: Path) -> None:
    assert names(folder) == ["a/1.png", "b/1.png", "b/2.jpg"]
    assert names(folder / "b") == ["1.png", "2.jpg"]
    assert names(folder / "a", folder / "b") == ["a/1.png", "b/1.png", "b/2.jpg"]
    listed = tmp_path / "list.txt"
    listed.write_text("photos/b/2.jpg\n\n  photos/a/1.png\n")
    assert names(listed) == ["b/2.jpg", "a/1.png"]
    (item,) = find_items([folder / "b/2.jpg"])
    assert (item.name, label_name(item)) == ("2.jpg", "2")
    assert read_item(item).shape == (4, 6, 3)


def test_two_pictures_of_one_name_and_nothing_at_all_are_refused(folder: Path, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(folder / "b/2.png")
    with pytest.raises(DatasetError, match="b/2 would be written twice"):
        find_items([folder])
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DatasetError, match="found none"):
        find_items([tmp_path / "empty.txt"])
    with pytest.raises(DatasetError, match="a list of pictures"):
        find_items([tmp_path / "absent.txt"])
    with pytest.raises(DatasetError, match="nothing of this name"):
        find_items([tmp_path / "absent"])


def test_tables_hold_paths_or_pictures(folder: Path, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'algm-deploy[ray]'")
    from pyarrow import parquet

    def written(name: str, **columns: list[object]) -> Path:
        parquet.write_table(arrow.table(columns), tmp_path / name, row_group_size=2)
        return tmp_path / name

    assert names(written("paths.parquet", path=["photos/a/1.png", "photos/b/2.jpg"])) == ["a/1.png", "b/2.jpg"]
    content = (folder / "a/1.png").read_bytes()
    rows = find_items([written("inside.parquet", path=["x/1.png", "x/2.png", "3.png"], bytes=[content, b"", content])])
    assert [item.row for item in rows] == [0, 1, 2]
    assert read_item(rows[2]).shape == read_item(rows[0]).shape == (4, 6, 3)
    with pytest.raises(ImageError, match=r"x/2\.png"):
        read_item(rows[1])
    with pytest.raises(ImageError, match="it has changed"):
        read_item(Item("9.png", rows[0].file, 9))
    with pytest.raises(DatasetError, match="the column path"):
        find_items([written("other.parquet", image=["1.png"])])
    with pytest.raises(DatasetError, match="below a folder"):
        find_items([written("out.parquet", path=["../1.png"], bytes=[content])])
    with pytest.raises(DatasetError, match="a text in every row"):
        find_items([written("none.parquet", path=["1.png", None])])
    (tmp_path / "no.parquet").write_bytes(b"no")
    with pytest.raises(DatasetError, match="expected a Parquet file"):
        find_items([tmp_path / "no.parquet"])


def test_threads_read_a_group_of_rows_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'algm-deploy[ray]'")
    from pyarrow import parquet

    content = BytesIO()
    Image.new("RGB", (6, 4)).save(content, "PNG")
    rows = {"path": [f"{row}.png" for row in range(8)], "bytes": [content.getvalue()] * 8}
    parquet.write_table(arrow.table(rows), tmp_path / "all.parquet", row_group_size=4)
    read, firsts = sources._read_group, []

    def slow(path: str, row: int) -> tuple[int, list[object]]:
        first, group = read(path, row)
        firsts.append(first)
        time.sleep(0.02)
        return first, group

    monkeypatch.setattr(sources, "_read_group", slow)
    items = find_items([tmp_path / "all.parquet"])
    with ThreadPoolExecutor(4) as threads:
        assert {pixels.shape for pixels in threads.map(read_item, items)} == {(4, 6, 3)}
    assert sorted(firsts) == [0, 4]


def test_a_cluster_needs_ray_and_its_flags_a_cluster(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["predict", "absent", str(folder), "--format", "parquet"]) == 2
    assert "expected --ray ADDRESS with --format" in capsys.readouterr().err
    assert cli.main(["evaluate", "absent", "--data", str(folder), "--workers", "2"]) == 2
    assert "expected --ray ADDRESS with --workers" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RuntimeUnavailableError, match=r"pip install 'algm-deploy\[ray\]'"), connected("local"):
        pass
