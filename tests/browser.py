"""A real browser for tests: Chromium without a window, driven by its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

PATIENCE = 60.0
"""Seconds in which the browser does what it is told, on a busy machine."""


class Page:
    """One tab.

    Attributes:
        messages: what its console said, errors of its scripts and refused requests among them.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self.messages: list[str] = []
        self._reading, self._writing = reading, writing
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol; return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def look(self, *, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """Be a screen of this size, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, condition: str, seconds: float = PATIENCE) -> Any:
        """Wait until a JavaScript expression is true; return its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(condition)):
            assert time.monotonic() < deadline, (condition, self.messages)
            time.sleep(0.05)
        return value

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG file."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _read(self) -> Any:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reading], [], [], PATIENCE)
            assert ready, "the browser says nothing"
            part = os.read(self._reading, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        said = json.loads(message)
        if said.get("method") == "Runtime.exceptionThrown":
            self.messages.append(str(said["params"]["exceptionDetails"]))
        elif said.get("method") == "Log.entryAdded":
            self.messages.append(said["params"]["entry"]["text"])
        return said


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Run Chromium with its profile in `folder`."""
    assert CHROMIUM is not None
    there_reads, we_write = os.pipe()
    we_read, there_writes = os.pipe()
    # The protocol's pipes are the descriptors 3 and 4.
    script = f'exec 3<&{there_reads} 4>&{there_writes}; exec "$@"'
    command = ["bash", "-c", script, "bash", CHROMIUM, "--headless=new", "--remote-debugging-pipe", "--no-sandbox"]
    command += ["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        command, pass_fds=(there_reads, there_writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(there_reads)
    os.close(there_writes)
    try:
        page = Page(we_read, we_write)
        yield page
    finally:
        os.close(we_write)  # which ends it
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(we_read)
