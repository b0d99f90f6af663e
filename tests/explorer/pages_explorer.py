"""Pages of the explorer as tests read them: their data, and a browser that shows them."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest


def data_of(page: Path) -> dict[str, Any]:
    """Read the data that a page holds."""
    html = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return json.loads(found[1])


def array(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)


def edges_in(packed: dict[str, str]) -> list[tuple[int, int]]:
    """List packed edges as pairs (target, source), by a plain loop."""
    counts, edges, at = array(packed["counts"], "<u2"), [], 0
    sources = array(packed.get("sources", ""), "<u2").tolist()
    runs = array(packed.get("runs", ""), "<u2").reshape(-1, 2).tolist()
    for i, count in enumerate(counts.tolist()):
        for item in range(at, at + count):
            if sources:
                edges.append((i, sources[item]))
            else:
                first, length = runs[item]
                edges += [(i, j) for j in range(first, first + length)]
        at += count
    return edges


# Nothing is fetched, and nothing of another user of this machine is touched.
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)


class Browser:
    """Chromium by chromedriver, whose protocol (WebDriver) is JSON over HTTP."""

    def __init__(self, address: str, profile: Path) -> None:
        self.address = f"{address}/session"
        chromium = {
            "binary": shutil.which("chromium"),
            "args": [*OPTIONS.split(), f"--user-data-dir={profile}"],
        }
        wanted = {"goog:chromeOptions": chromium, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self.send("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self.address += f"/{session['sessionId']}"

    def send(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.address + path, data, {"Content-Type": "application/json"})
        request.method = method
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path, width: int = 1280) -> None:
        """Show a page; a narrow one as on a phone, with a dense screen and touch."""
        phone = width < 600
        size = {"width": width, "height": 844, "deviceScaleFactor": 1 + phone, "mobile": phone}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        self.send("POST", "/url", {"url": page.as_uri()})
        self.settle()

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.send("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def run(self, script: str) -> Any:
        """Return what a script of the page returns."""
        return self.send("POST", "/execute/sync", {"script": script, "args": []})

    def settle(self) -> None:
        """Wait until what is due is drawn."""
        script = "const done = arguments[0];"
        script += "requestAnimationFrame(() => requestAnimationFrame(() => done()));"
        self.send("POST", "/execute/async", {"script": script, "args": []})

    def text(self, name: str) -> str:
        return self.run(f"return document.getElementById('{name}').textContent")

    def set(self, name: str, value: object) -> None:
        """Move a slider or choose an option, with the events that a user causes."""
        self.run(
            f"const it = document.getElementById('{name}'); it.value = '{value}';"
            "for (const kind of ['input', 'change']) it.dispatchEvent(new Event(kind));"
        )
        self.settle()

    def press(self, *keys: str) -> None:
        """Press keys in what has the focus."""
        actions = [{"type": kind, "value": k} for k in keys for kind in ("keyDown", "keyUp")]
        self.send("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": actions}]})
        self.settle()

    def point(self, name: str, x: float, y: float, *, click: bool = False) -> None:
        """Move the mouse to a place of an element, in shares of its size, and click there."""
        script = f"const it = document.getElementById('{name}');"
        script += "it.scrollIntoView({block: 'center'}); const r = it.getBoundingClientRect();"
        script += "return [r.x, r.y, r.width, r.height]"
        left, top, width, height = self.run(script)
        place = {"x": round(left + x * width), "y": round(top + y * height)}
        actions: list[dict[str, Any]] = [{"type": "pointerMove", "duration": 0, **place}]
        if click:
            actions += [{"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp")]
        mouse = {"type": "pointer", "id": "m", "parameters": {"pointerType": "mouse"}}
        self.send("POST", "/actions", {"actions": [{**mouse, "actions": actions}]})
        self.settle()

    def complaints(self) -> list[Any]:
        """Return what the page wrote to the console since the last call."""
        return self.send("POST", "/se/log", {"type": "browser"})


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start a browser; a test that asks for one is skipped where there is none."""
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip("no Chromium with chromedriver on this machine")
    command = ["chromedriver", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        try:
            line = next(line for line in driver.stdout if "started successfully" in line)
            port = re.search(r"port (\d+)", line)[1]
            browser = Browser(f"http://127.0.0.1:{port}", profile)
            try:
                yield browser
            finally:
                browser.send("DELETE", "")
        finally:
            driver.terminate()
