"""The page in a browser, where one is here: a photo goes in, classes and tokens come out, and nothing leaves."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chromium import find_chromium
from PIL import Image

CHROMIUM = find_chromium()


class Browser:
    """Talks to Chromium in its DevTools protocol, over a pipe."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._number, self._rest = read, write, 0, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **getattr(self, "_session", {})}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._message()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return dict(found["result"])

    def value(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str) -> None:
        end = time.monotonic() + 60
        while not self.value(expression):
            assert time.monotonic() < end, self.value("document.body.innerText")
            time.sleep(0.05)

    def choose(self, photo: Path) -> None:
        document = self.call("DOM.getDocument")["root"]["nodeId"]
        field = self.call("DOM.querySelector", nodeId=document, selector="#photo")["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(photo)], nodeId=field)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            self._rest += os.read(self._read, 1 << 20)
        text, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(text))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Chromium reads commands from descriptor 3 and writes to 4."""
    assert CHROMIUM
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    flags = "--headless=new --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe --disable-dev-shm-usage"
    command = f'exec "$0" {flags} --user-data-dir="$1" 3<&{theirs_in} 4>&{theirs_out}'
    with subprocess.Popen(
        ["bash", "-c", command, CHROMIUM, str(folder / "profile")],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_in, ours_out)
        finally:
            process.kill()
            os.close(ours_in)
            os.close(ours_out)


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_a_photo_becomes_classes_and_tokens_in_a_browser(
    client: Any, root_dir: Path, tmp_path: Path, serving: Callable[..., Any]
) -> None:
    photo = next((root_dir / "algm_deploy/demo/assets/images").rglob("*.png"))
    with browser(tmp_path) as page:
        page.call("Page.navigate", url=f"http://127.0.0.1:{client.port}/")
        page.until("document.readyState === 'complete' && document.getElementById('network')?.textContent !== ''")
        page.choose(photo)
        page.until("document.getElementById('status').textContent.startsWith('Done')")
        wanted = client.predictor.prediction(photo)
        last = f"Done: {wanted.token_counts[:, -1].sum()} tokens of {64 * len(wanted.anchors)} patches left."
        assert page.value("document.getElementById('status').textContent").startswith(last)
        assert page.value("document.getElementById('merges').rows.length") == 3
        assert page.value("document.getElementById('labels').width") == Image.open(photo).width
        page.until("document.getElementById('tokens').naturalWidth > 0 && document.getElementById('shown').complete")

        page.value("document.getElementById('dense').click()")
        page.until("document.getElementById('merges').rows[2].cells[2].textContent === '100 %'")

        elsewhere = "performance.getEntriesByType('resource').filter(e => !e.name.startsWith(location.origin)"
        assert page.value(f"{elsewhere} && !e.name.startsWith('blob:') && !e.name.startsWith('data:')).length") == 0
        unnamed = "[...document.querySelectorAll('input')].filter(e => !e.labels.length).length"
        assert page.value(unnamed) == 0  # a screen reader has a name for every field

        (tmp_path / "broken.png").write_bytes(photo.read_bytes()[:500])
        page.choose(tmp_path / "broken.png")
        page.until("document.getElementById('status').classList.contains('error')")
        assert "truncated" in page.value("document.getElementById('status').textContent")
        if folder := os.environ.get("ALGM_SCREENSHOTS"):
            page.choose(photo)
            page.until("document.getElementById('status').textContent.startsWith('Done')")
            page.call("Emulation.setDeviceMetricsOverride", width=1200, height=1300, deviceScaleFactor=1, mobile=False)
            picture = page.call("Page.captureScreenshot", format="png")["data"]
            (Path(folder) / "page.png").write_bytes(base64.b64decode(picture))
