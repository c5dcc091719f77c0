"""Frames of a video in, frames to a video out; what is damaged, cut or no video at all is told."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from algm_deploy.errors import ImageError
from algm_deploy.pictures import video
from algm_deploy.pictures.video import Video, video_writer


def frames_of(count: int, height: int = 120, width: int = 160) -> list[np.ndarray]:
    """A square that moves over a grey that brightens."""
    frames = []
    for index in range(count):
        frame = np.full((height, width, 3), 4 * index, np.uint8)
        frame[20:60, 4 * index : 4 * index + 30] = (200, 60, 10)
        frames.append(frame)
    return frames


def written(path: Path, frames: Iterable[np.ndarray], rate: float = 12.5) -> Path:
    with video_writer(path, rate) as write:
        for frame in frames:
            write(frame)
    return path


def test_frames_survive_a_lossless_file(tmp_path: Path) -> None:
    frames = frames_of(10)
    with Video(written(tmp_path / "a.mkv", frames)) as found:
        assert (found.rate, found.length) == (12.5, 10)
        assert np.array_equal(list(found), frames)  # in RGB, as they went in


@pytest.mark.parametrize("suffix", [".mp4", ".MP4", ".m4v", ".mov", ".avi", ".webm"])
def test_frames_are_close_in_files_that_compress(tmp_path: Path, suffix: str) -> None:
    frames = frames_of(10)
    path = written(tmp_path / f"a{suffix}", frames)
    with Video(path) as found:
        assert (found.rate, found.length) == (12.5, 10)
        for frame, original in zip(found, frames, strict=True):
            assert frame is not None
            assert np.abs(frame.astype(int) - original).mean() < 6
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_odd_sides_grow_by_a_pixel(tmp_path: Path) -> None:
    (frame,) = frames_of(1, 121, 161)
    with Video(written(tmp_path / "a.mkv", [frame])) as found:
        (grown,) = found
    assert np.array_equal(grown, np.pad(frame, ((0, 1), (0, 1), (0, 0)), "edge"))


def test_what_cannot_be_written(tmp_path: Path) -> None:
    small, large = frames_of(1)[0], frames_of(1, 200, 200)[0]
    for name, frames, rate, message in (
        ("a.gif", [small], 25, r"expected one of \.mp4, .* as the suffix"),
        ("a.mp4", [], 25, "expected frames for a video, got none"),
        ("a.mp4", [small, large], 25, r"the first one's size \(120, 160\), got \(200, 200\)"),
        ("a.mp4", [small], 0, "FFmpeg cannot write frames of 120x160 at 0 a second"),
        ("nowhere/a.mp4", [small], 25, "expected a folder that exists"),
    ):
        with pytest.raises(ImageError, match=message):
            written(tmp_path / name, frames, rate)
    assert list(tmp_path.iterdir()) == []


def test_a_video_that_is_not_finished_does_not_appear(tmp_path: Path) -> None:
    old = written(tmp_path / "a.mkv", frames_of(3))

    def stopping() -> Iterator[np.ndarray]:
        yield frames_of(1)[0]
        raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        written(tmp_path / "a.mkv", stopping())
    with Video(old) as found:
        assert found.length == 3
    assert [p.name for p in tmp_path.iterdir()] == ["a.mkv"]


def test_frames_that_did_not_reach_the_disk_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = cv2.VideoWriter

    class Forgetful:
        """Loses the dark frame, as OpenCV does on a full disk: without a word."""

        fourcc = original.fourcc

        def __init__(self) -> None:
            self.file = original()
            self.open, self.isOpened, self.release = self.file.open, self.file.isOpened, self.file.release

        def write(self, frame: np.ndarray) -> None:
            if frame[0, 0, 0] > 0:
                self.file.write(frame)

    monkeypatch.setattr(video.cv2, "VideoWriter", Forgetful)
    with pytest.raises(ImageError, match="expected 5 frames in it, FFmpeg wrote 4"):
        written(tmp_path / "a.mkv", frames_of(5))
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_frame_does_not_end_the_video(tmp_path: Path) -> None:
    frames = frames_of(20)
    path = written(tmp_path / "a.avi", frames)  # a JPEG for each frame
    content = bytearray(path.read_bytes())
    start = [at for at in range(len(content)) if content[at : at + 3] == b"\xff\xd8\xff"][10]
    content[start : start + 400] = bytes(400)
    path.write_bytes(content)
    with Video(path) as found:
        read = list(found)
    assert [index for index, frame in enumerate(read) if frame is None] == [10]
    assert len(read) == 20
    for frame, original in zip(read, frames, strict=True):
        assert frame is None or np.abs(frame.astype(int) - original).mean() < 6


def test_a_video_that_was_cut_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "a.webm", frames_of(20))
    with caplog.at_level(logging.WARNING), Video(path) as found:
        assert len(list(found)) == 20
    assert caplog.text == ""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with caplog.at_level(logging.WARNING), Video(path) as found:
        assert 0 < len(list(found)) < 20
    assert "a.webm: expected 20 frames as its header says, found" in caplog.text


def test_what_is_no_video(tmp_path: Path) -> None:
    cut = written(tmp_path / "cut.mp4", frames_of(5))
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])  # an MP4's table of contents is at its end
    for name, content in (("text.mp4", b"hello"), ("empty.mp4", b"")):
        (tmp_path / name).write_bytes(content)
    for name in ("cut.mp4", "text.mp4", "empty.mp4"):
        with pytest.raises(ImageError, match=f"{name}: expected a video such as MP4"):
            Video(tmp_path / name)
    for name in ("nowhere.mp4", "."):
        with pytest.raises(ImageError, match="no such file"):
            Video(tmp_path / name)


@pytest.mark.parametrize(
    "content",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nhttp://127.0.0.1:{port}/a.ts\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile http://127.0.0.1:{port}/a.mp4\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video {port} RTP/AVP 96\n"
        "a=rtpmap:96 H264/90000\n",
    ],
    ids=["playlist", "list", "stream"],
)
def test_addresses_in_a_file_are_not_followed(tmp_path: Path, content: str) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        path = tmp_path / "a.mp4"
        path.write_text(content.format(port=server.getsockname()[1]))
        with pytest.raises(ImageError, match="expected a video"):
            Video(path)
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_name_like_an_address_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "a.mkv", frames_of(2)).rename("concat:b.mkv")
    with Video(Path("concat:b.mkv")) as found:
        assert len(list(found)) == 2
