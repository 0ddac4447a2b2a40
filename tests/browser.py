"""Headless Chromium by its own protocol: open a page, ask it something, take its picture.

`python -m tests.browser URL FILE.png [--dark] [--width N] [--key KEY]` takes the picture of a running service's page.
The browser is the one on PATH, else what `make chromium` unpacked.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from argparse import ArgumentParser
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

UNPACKED = Path(__file__).parents[1] / "build" / "chromium" / "usr" / "lib"
PATIENCE_S = 60.0  # a start on a machine that does something else
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
OPTIONS += ("--no-first-run", "--disable-extensions", "--disable-background-networking", "--remote-debugging-port=0")


def find_browser() -> tuple[str, dict[str, str]] | None:
    """(program, what its environment needs), or None when there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found, {}
    program = UNPACKED / "chromium" / "chromium"
    folders = [*UNPACKED.glob("*-linux-gnu"), *UNPACKED.glob("*-linux-gnu/pulseaudio")]
    return (str(program), {"LD_LIBRARY_PATH": ":".join(map(str, folders))}) if program.is_file() else None


class Page:
    """One tab. Raises AssertionError for what never comes to pass."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._number, self._session = connection, 0, ""
        self.complaints: list[str] = []  # exceptions, and refusals of the page's policy
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.ask(expression):
            assert time.monotonic() < deadline, f"never {expression}; complaints: {self.complaints}"
            time.sleep(0.05)

    def look(self, *, width: int = 1280, dark: bool = False) -> None:
        """Width in pixels, and whether the reader likes it dark."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)

    def picture(self) -> bytes:
        """The whole page as PNG."""
        return b64decode(self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        self._connection.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            news = json.loads(self._connection.recv(timeout=PATIENCE_S))
            if news.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(news["params"]["exceptionDetails"]))
            elif news.get("method") == "Log.entryAdded" and news["params"]["entry"]["source"] != "network":
                self.complaints.append(news["params"]["entry"]["text"])
            if news.get("id") == self._number:
                assert "error" not in news, f"{method}: {news['error']}"
                result: dict[str, Any] = news["result"]
                return result


@contextmanager
def browser() -> Iterator[Page]:
    """A browser of its own with an empty profile."""
    found = find_browser()
    assert found is not None, "there is no Chromium: `make chromium`"
    program, environment = found
    with tempfile.TemporaryDirectory(prefix="redraft-browser-", ignore_cleanup_errors=True) as profile:
        command = [program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        own = {"HOME": profile, "PATH": "/usr/bin:/bin", **environment}
        process = subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with connect(_address(process, Path(profile)), max_size=None) as connection:
                yield Page(connection)
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _address(process: subprocess.Popen[bytes], profile: Path) -> str:
    file, deadline = profile / "DevToolsActivePort", time.monotonic() + PATIENCE_S
    while not (file.exists() and len(lines := file.read_text().split()) == 2):
        assert process.poll() is None, f"Chromium ended with {process.returncode}"
        assert time.monotonic() < deadline, "Chromium did not start"
        time.sleep(0.05)
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("file", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--key", default="", help="an API key with the scope metrics")
    arguments = parser.parse_args()
    with browser() as page:
        page.look(width=arguments.width, dark=arguments.dark)
        page.open(arguments.url)
        if arguments.key:
            page.ask(f"sessionStorage.setItem('redraft-key', {json.dumps(arguments.key)})")
            page.open(arguments.url)
        page.until("document.querySelector('#tiles b') !== null")
        arguments.file.write_bytes(page.picture())


if __name__ == "__main__":
    main()
