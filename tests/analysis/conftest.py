"""Fixtures of report tests: a headless browser driven over a pipe, and runs to report on."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from types import TracebackType
from typing import Any, Protocol, Self

import anyio
import pytest

from atts.api import Setup
from atts.api import evaluate as run_evaluation
from atts.testing import toy_problems

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
_AS_3_AND_4 = "import os,sys; os.dup2(int(sys.argv[1]),3); os.dup2(int(sys.argv[2]),4); os.execvp(sys.argv[3],sys.argv[3:])"


class BrowserError(Exception):
    """The error raised if the browser refuses a command or takes too long."""


@dataclass
class Page:
    """One browser tab: its console messages, and methods that control the tab."""

    browser: Browser
    session: str
    # errors, warnings and exceptions in the tab's console
    problems: list[str] = field(default_factory=list[str])
    requests: list[str] = field(default_factory=list[str])

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol to this tab."""
        return self.browser.call(method, self.session, **values)

    def open(self, url: str) -> float:
        """Load a page completely and return the load time in milliseconds, as measured by the page."""
        self.requests.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && performance.timing.loadEventEnd > 0")
        return float(
            self.run("performance.timing.loadEventEnd - performance.timing.navigationStart")
        )

    def run(self, code: str) -> Any:
        """Evaluate a JavaScript expression; if the result is a promise, wait for its value."""
        found = self.call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise BrowserError(f"{code}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Wait until the expression is true."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            if time.monotonic() > end:
                raise BrowserError(f"never true: {condition}")
            time.sleep(0.05)

    def press(self, key: str, code: int) -> None:
        """Press one key."""
        text = "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text
            )

    def look(self, width: int, height: int, scheme: str) -> None:
        """Set the window's size and the preferred colour scheme, "light" or "dark"."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def picture(self, path: Path, *, whole: str = "no") -> None:
        """Save a screenshot of the window, or of the whole page."""
        done = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole == "yes"
        )
        path.write_bytes(base64.b64decode(done["data"]))


class Browser:
    """A headless Chromium with a temporary profile, without a port or network."""

    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = [sys.executable, "-c", _AS_3_AND_4, str(to_read), str(to_write), program, *_FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._number = 0
        self._rest = b""
        self._pages = dict[str, Page]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(20)
        finally:
            os.close(self._write)
            os.close(self._read)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def page(self) -> Page:
        """Open a tab and record its console messages and exceptions from the beginning."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        return page

    def call(self, method: str, session: str = "", **values: Any) -> dict[str, Any]:
        """Send a command and return the browser's answer; pass events that arrive meanwhile to
        their tabs.
        """
        self._number += 1
        message = {
            "id": self._number,
            "method": method,
            "params": values,
            **({"sessionId": session} if session else {}),
        }
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                if "error" in found:
                    raise BrowserError(f"{method}: {found['error']}")
                return dict(found["result"])
            self._heard(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select([self._read], [], [], 90)[0]:
                raise BrowserError("no answer for 90 s")
            more = os.read(self._read, 1 << 20)
            if not more:
                raise BrowserError("the browser is gone")
            self._rest += more
        whole, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(whole))

    def _heard(self, event: dict[str, Any]) -> None:
        page = self._pages.get(event.get("sessionId", ""))
        method = event.get("method")
        told = event.get("params", {})
        if page is None:
            return
        if method == "Network.requestWillBeSent":
            page.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            page.problems.append(str(told["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in (
            "error",
            "warning",
            "assert",
        ):
            page.problems.append(str(told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            page.problems.append(told["entry"]["text"])


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Start Chromium; skip the test if it is not installed."""
    program = (
        os.environ.get("ATTS_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    )
    if program is None:
        pytest.skip(
            "Chromium is not installed, so no report is opened: install it or set ATTS_CHROMIUM"
        )
    with Browser(program, tmp_path_factory.mktemp("profile")) as running:
        yield running


class Evaluate(Protocol):
    """A function that runs the scripted pair and writes the run to a directory."""

    def __call__(self, directory: Path, problems: int = 12, **options: Any) -> Path: ...


def _evaluate(directory: Path, problems: int = 12, **options: Any) -> Path:
    options = {"rate_scope": "question-turn", "rate": 0.3, **options}
    setup = Setup(draft="scripted", target="scripted", **options)

    async def main() -> None:
        await run_evaluation(toy_problems(problems), setup, directory=directory)

    anyio.run(main)
    return directory


@pytest.fixture(scope="session")
def evaluate_into() -> Evaluate:
    """Return a function that runs the scripted pair and writes the run to a directory."""
    return _evaluate


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a finished run of the scripted pair."""
    return _evaluate(tmp_path_factory.mktemp("runs") / "own")


@pytest.fixture(scope="session")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run of the same problems by the target alone."""
    return _evaluate(tmp_path_factory.mktemp("runs") / "target alone", method="target-only")


Opener = Callable[[Path], Page]
