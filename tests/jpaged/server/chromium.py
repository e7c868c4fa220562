"""A headless Chromium, driven through its debugging pipe: JSON messages that end in a zero byte."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a browser of its own."""

    def __init__(self, program: str, url: str, width: int = 1400, height: int = 1000, *, dark: bool = False) -> None:
        to_browser, self.writer = os.pipe()
        self.reader, from_browser = os.pipe()
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        options = f"--headless=new --no-sandbox --disable-gpu --hide-scrollbars --window-size={width},{height}"
        options += f" --remote-debugging-pipe --user-data-dir={self.folder.name}"
        # The browser expects its ends of the pipes at 3 and 4.
        script = f'exec "$0" {options} about:blank 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, program], pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self.numbers = itertools.count(1)
        self.rest = b""
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=url)

    def call(self, method: str, **params: Any) -> dict:
        number = next(self.numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                piece = os.read(self.reader, 1 << 16)
                assert piece, "the browser has ended"
                self.rest += piece
            answer, self.rest = self.rest.split(b"\0", 1)
            found = json.loads(answer)
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 30.0) -> Any:
        until = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        """Where a mouse would click: the middle of the first element that is found."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, file: str | Path) -> None:
        Path(file).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        os.close(self.writer)
        os.close(self.reader)
        self.folder.cleanup()
