"""A real browser for tests of pages: headless Chromium, driven through its debugging pipe without another package."""

import base64
import contextlib
import importlib.util
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


class Browser:
    """One tab. `errors` are messages of the console and exceptions, `requests` all addresses that were loaded."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._left, self._number = send, receive, b"", 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol; returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == message["id"]:
                assert "error" not in found, found["error"]
                return found["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            assert select.select([self._receive], [], [], 60)[0], "the browser does not answer"
            part = os.read(self._receive, 1 << 20)
            assert part, "the browser is gone"
            self._left += part
        text, _, self._left = self._left.partition(b"\0")
        event = json.loads(text)
        what = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(what["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.errors.append(what["entry"]["text"])
        elif event.get("method") == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning"):
            self.errors.append(str(what["args"]))
        return event

    def open(self, page: Path | str, *, width: int = 1200, dark: bool = False) -> None:
        """Load a file, or an address of this machine, at a width in pixels and a colour scheme."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        end = time.monotonic() + 60
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            assert time.monotonic() < end
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write the page, or only its first screen, as a PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def violations(self) -> list[str]:
        """What axe-core finds wrong with the accessibility of the page; it is part of the package axe-core-python."""
        place = importlib.util.find_spec("axe_core_python")
        if place is None or place.origin is None:
            pytest.skip("axe-core is missing: pip install axe-core-python")
        self.run(Path(place.origin).with_name("axe.min.js").read_text(encoding="utf-8") + "; 0")
        found = self.run("axe.run()")
        return [
            f"{one['id']} ({one['impact']}): {one['help']}: {[node['html'][:120] for node in one['nodes'][:3]]}"
            for one in found["violations"]
        ]


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with its profile in a folder, without a network; it ends with the block."""
    assert CHROMIUM is not None
    ours, theirs = os.pipe(), os.pipe()
    # The pipe is file descriptors 3 and 4 of the browser.
    command = f'exec "$0" "$@" 3<&{ours[0]} 4>&{theirs[1]}'
    flags = [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}",
        ),
    ]
    process = subprocess.Popen(
        ["bash", "-c", command, CHROMIUM, *flags],
        pass_fds=(ours[0], theirs[1]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(ours[0])
    os.close(theirs[1])
    try:
        yield Browser(ours[1], theirs[0])
    finally:
        os.close(ours[1])
        os.close(theirs[0])
        process.kill()
        process.wait()
