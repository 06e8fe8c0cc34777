"""A headless Chromium for tests, spoken to over its debugging pipe: a page at a width and color
scheme, scripts in it, pictures of it.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
"""None where no Chromium is installed."""

_START = """
import fcntl, os, sys
aside = [fcntl.fcntl(int(pipe), fcntl.F_DUPFD, 10) for pipe in sys.argv[1:3]]
for descriptor, pipe in zip((3, 4), aside):
    os.dup2(pipe, descriptor)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""A browser reads from descriptor 3 and writes to 4, which a child of pytest may not have free."""


class BrowserError(Exception):
    pass


class Browser:
    """One tab. `requested` lists every address that a page asked for, and `said` what it wrote on
    the console, violations included.
    """

    def __init__(self) -> None:
        assert CHROMIUM
        self.requested: list[str] = []
        self.said: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--no-first-run",
        ]
        pipes = [str(to_browser), str(from_browser)]
        command = [
            sys.executable,
            "-c",
            _START,
            *pipes,
            CHROMIUM,
            *flags,
            "--remote-debugging-pipe",
            f"--user-data-dir={self._profile.name}",
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, ""
        self._events: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable")

    def open(self, address: str, width: int, *, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait for it."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self._call("Page.navigate", url=address)
        while "Page.loadEventFired" not in self._events:
            self._receive()

    def evaluate(self, script: str) -> Any:
        result = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise BrowserError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait_for(self, script: str, seconds: float = 30.0) -> None:
        """Until `script` is true; a page that reloads meanwhile has no answer yet."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            try:
                if self.evaluate(script):
                    return
            except BrowserError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"{script} did not become true in {seconds:g} seconds")

    def press(self, key: str) -> None:
        """A key by its name, such as Tab or ArrowRight."""
        code = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "Enter": 13}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def write(self, text: str) -> None:
        for letter in text:
            self._call("Input.dispatchKeyEvent", type="char", text=letter)

    def accessible(self) -> list[dict[str, str]]:
        """Role, name and description of everything that a screen reader is told of."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        parts = ("role", "name", "description")
        return [
            {part: node.get(part, {}).get("value", "") for part in parts}
            for node in nodes
            if not node["ignored"]
        ]

    def picture(self, path: Path) -> None:
        """Of the whole page."""
        data = self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 16)
            assert data, "the browser ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method, params = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.said.append(json.dumps(params))
        return message
