"""Tests of the page of `atts view` for a server or a run directory, in a real browser if one is
installed.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx2
import pytest

from atts.api import Setup, evaluate, evaluate_sync
from atts.concurrency import task_group
from atts.errors import JournalError
from atts.journal import Drifted, Entry, Warned
from atts.ledger import Caps, Price
from atts.pipelines import Policy
from atts.run import RunOptions
from atts.serving.replies import BusyShare
from atts.serving.status import RunReading, RunStatus, view_server
from atts.testing import Latency, toy_problems
from tests.analysis.conftest import Browser, Page
from tests.serving.conftest import MODEL, QUESTION, serving, toy_setup

PRICES = {"draft": Price(0.1, 0.4), "target": Price(1.0, 4.0)}
PICTURES = os.environ.get("ATTS_VIEW_PICTURES")
"""Folder for pictures of the page that a person can look at; none by default."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Start Chromium, or skip the test if it is not installed."""
    program = os.environ.get("ATTS_CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed: install it or set ATTS_CHROMIUM")
    with Browser(program, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a run of the scripted pair on ten problems, with a cap."""
    directory = tmp_path_factory.mktemp("runs") / "first"
    setup = Setup(draft="scripted", target="scripted")

    async def main() -> None:
        options = RunOptions(caps=Caps(max_calls=9_000), prices=PRICES)
        await evaluate(toy_problems(10), setup, directory=directory, options=options)

    anyio.run(main)
    return directory


@contextmanager
def shown(status: Callable[[], dict[str, Any]]) -> Generator[str]:
    """Serve a page that shows this status, until the end of the block."""
    with view_server(0, status) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


OVERFLOWING = """[...document.querySelectorAll("body *")].filter(one => {
  const place = one.getBoundingClientRect();
  if (!place.width || (innerWidth > 760 && one.closest(".scroll"))) return false;
  return place.left < -0.5 || place.right > innerWidth + 0.5 || one.scrollWidth > one.clientWidth + 1
    && getComputedStyle(one).display !== "inline";
}).map(one => one.tagName + " " + one.textContent.slice(0, 60))"""
"""JavaScript that lists elements which are cut off or wider than the window; a wide table may be
scrolled.
"""


def looked_at(page: Page, address: str, name: str) -> None:
    """Open the page at desktop and telephone width, in light and dark colours, and check that
    nothing is cut off or blocked.
    """
    for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
        page.look(width, 900, scheme)
        page.open(f"{address}/atts/view")
        page.wait("!document.querySelector('main').hidden")
        assert page.run(OVERFLOWING) == []
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), width
        if PICTURES:
            page.picture(Path(PICTURES) / f"{name}-{width}-{scheme}.png", whole="yes")
    assert page.problems == []


def test_a_run_directory_has_the_numbers_of_its_run(run_directory: Path) -> None:
    """The page shows the problems, verdicts, realised rate and spending of the run's journal."""
    status = RunStatus(run_directory).status()
    assert status["state"] == "not running"
    assert status["counts"]["finished"] == status["counts"]["problems"] == 10
    assert len(status["items"]) == 10
    assert status["counts"]["correct"] == sum(
        one["verdict"] == "correct" for one in status["items"]
    )
    assert status["leader"] is None
    (rate,) = status["rates"]
    assert rate["nominal"] == pytest.approx(0.2)
    assert rate["low"] <= rate["realised"] <= rate["high"]
    budgets = {one["name"]: one for one in status["budgets"]}
    assert budgets["calls"]["spent"] > 0
    assert budgets["cost"]["spent"] > 0
    json.dumps(status, allow_nan=False)


def test_a_run_without_caps_shows_the_tokens_of_its_summary(tmp_path: Path) -> None:
    """The tokens on the page of a finished run are those of the run's summary, and include tokens
    that the target drew while it scored.
    """
    result = evaluate_sync(
        "arithmetic", Setup(policy=Policy(samples=2)), limit=2, directory=tmp_path / "run"
    )
    budgets = {one["name"]: one["spent"] for one in RunStatus(tmp_path / "run").status()["budgets"]}
    assert result.usage.drawn_tokens > 0
    assert budgets == {
        "target tokens": result.usage.target_tokens,
        "draft tokens": result.usage.draft_tokens,
    }


def test_a_run_that_stopped_halfway_shows_its_leading_rollout(
    run_directory: Path, tmp_path: Path
) -> None:
    """For a run that stopped halfway, the page lists open problems first and shows the text of one
    of them.
    """
    half = tmp_path / "half"
    shutil.copytree(run_directory, half)
    journal = half / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) // 2]))
    reading = RunStatus(half)
    status = reading.status()
    assert status["items"][0]["status"] == "open"
    assert status["leader"]["name"].startswith(status["items"][0]["name"])
    assert status["leader"]["text"]
    # the page reads the journal again once the file has grown
    journal.write_bytes(b"".join(lines))
    assert reading.status()["counts"]["finished"] == 10


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    """The error about a folder without a run names the folder."""
    with pytest.raises(JournalError, match="there is no run here"):
        RunStatus(tmp_path)


def test_the_page_of_a_run_is_for_this_machine(run_directory: Path) -> None:
    """A request with a foreign host name gets an error, because a foreign web page may have sent
    it.
    """
    with shown(RunStatus(run_directory).status) as address, httpx2.Client() as client:
        assert client.get(f"{address}/atts/status").json()["kind"] == "run"
        assert b"atts view" in client.get(address).content
        refused = client.get(f"{address}/atts/status", headers={"Host": "evil.example"})
        assert refused.status_code == 403
        assert client.get(f"{address}/%2e%2e/etc/passwd").status_code == 404


def test_a_run_that_cannot_be_read_is_an_error_on_the_page(
    run_directory: Path, tmp_path: Path
) -> None:
    """If the middle of a journal is damaged, the page shows the error and continues to request
    updates.
    """
    damaged = tmp_path / "damaged"
    shutil.copytree(run_directory, damaged)
    reading = RunStatus(damaged)
    journal = damaged / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b"answered", b"answerex", 1))
    with shown(reading.status) as address, httpx2.Client() as client:
        answer = client.get(f"{address}/atts/status")
        assert answer.status_code == 500
        assert "is damaged" in answer.json()["error"]["message"]


def test_a_server_shows_what_is_in_flight() -> None:
    """The page of a server shows requests, the leading rollout's text, budgets with reservations,
    the rate and engine use.
    """

    async def main() -> None:
        setup = toy_setup(Latency(per_sample=0.05, per_score=0.02))
        caps = Caps(max_calls=10_000, max_cost=5.0)
        async with serving(setup, prices=PRICES, server_caps=caps) as client:
            url = str(client.http.base_url).removesuffix("v1/") + "atts/status"
            await client.chat(seed=1)
            seen: list[dict[str, Any]] = []

            async def watch() -> None:
                while not seen or not seen[-1]["leader"]:
                    await anyio.sleep(0.01)
                    seen.append((await client.http.get(url)).json())

            async with task_group() as group:
                group.start_soon(watch)
                await client.chat()
            live = seen[-1]
            assert live["counts"]["in flight"] == 1
            assert live["items"][0]["status"] == "running"
            leader = live["leader"]
            assert leader["name"].startswith(live["items"][0]["name"])
            assert leader["text"]
            assert any(one["reserved"] for one in live["budgets"])
            assert sum(one["in_flight"] for one in live["engines"]) > 0
            after = (await client.http.get(url)).json()
            assert after["leader"] is None
            assert [one["status"] for one in after["items"]] == ["answered", "answered"]
            (rate,) = after["rates"]
            assert rate["problems"] == 2
            budgets = {one["name"]: one for one in after["budgets"]}
            assert budgets["calls"] == {
                "name": "calls",
                "spent": client.service.account.spent.calls,
                "reserved": 0,
                "cap": 10_000,
            }
            assert all(0 < one["busy"] <= 1 for one in after["engines"])
            assert QUESTION not in json.dumps(after)

    anyio.run(main)


def test_busy_shares_forget_what_is_old() -> None:
    """The share of time in which an engine is busy covers only the last minute, so the memory for
    it is bounded.
    """
    busy = BusyShare()
    for second in range(10_000):
        busy.add("draft", second, second + 0.25)
        busy.add("target", second, second + 0.5)
    shares = busy.shares(10_000.0)
    assert shares == pytest.approx({"draft": 0.25, "target": 0.5}, abs=0.01)
    assert busy.num_intervals <= 2 * 62


def test_the_page_of_a_run_in_a_browser(browser: Browser, run_directory: Path) -> None:
    """In a browser, the page shows the run's numbers at the width of a desktop and of a
    telephone.
    """
    page = browser.page()
    with shown(RunStatus(run_directory).status) as address:
        looked_at(page, address, "run")
        text = page.run("document.body.innerText")
        assert "not running" in text
        assert "Problems" in text
        assert page.run("document.querySelectorAll('tbody tr').length") == 10
        assert page.run("document.title").startswith(str(run_directory))


def test_the_page_of_a_server_in_a_browser(browser: Browser) -> None:
    """In a browser, the page asks for the server's key, follows a request, and shows model output
    as plain text.
    """

    async def main() -> None:
        setup = toy_setup(Latency(per_sample=0.3, per_score=0.1))
        caps = Caps(max_calls=5000, max_cost=0.5)
        async with serving(setup, key="secret", prices=PRICES, server_caps=caps) as client:
            address = str(client.http.base_url).removesuffix("/v1/")
            page = browser.page()

            seen = anyio.Event()

            async def ask() -> None:
                while not seen.is_set():  # slow enough for a slow browser to show the run
                    assert (await client.chat(model=f"{MODEL}:careful")).status_code == 200

            def unlock() -> None:
                page.look(1280, 900, "light")
                page.open(f"{address}/atts/view")
                page.wait("!document.getElementById('key').hidden")
                assert page.run("document.querySelector('main').hidden")
                page.run("document.getElementById('secret').value = 'secret'")
                page.run("document.querySelector('#key button').click()")
                page.wait("!document.querySelector('main').hidden")
                page.wait("document.getElementById('text').textContent.includes('So')")
                # the console reports status 401 once, before the key is entered
                page.problems.clear()

            async with task_group() as group:
                for _ in range(3):
                    group.start_soon(ask)
                await anyio.to_thread.run_sync(unlock)
                await anyio.to_thread.run_sync(looked_at, page, address, "server")
                seen.set()
            await anyio.to_thread.run_sync(
                page.wait, "document.body.innerText.includes('answered')"
            )

    anyio.run(main)


def test_markup_in_model_output_is_shown_as_text(browser: Browser) -> None:
    """Markup in model output is shown as plain text everywhere on the page."""
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    status = {
        "kind": "run",
        "name": evil,
        "state": evil,
        "seconds": 1.0,
        "counts": {evil: 1},
        "items": [{"name": evil, "status": evil, "votes": {evil: 1}, "answer": evil}],
        "leader": {"name": evil, "text": evil, "turns": 1},
        "budgets": [{"name": evil, "spent": 1, "reserved": 0, "cap": 2}],
        "rates": [{"name": evil, "nominal": 0.2, "realised": None, "low": None, "high": None}],
        "engines": [{"role": "draft", "model": evil, "busy": 0.5, "in_flight": 0}],
        "alarms": [evil],
    }
    page = browser.page()
    with shown(lambda: status) as address:
        looked_at(page, address, "text")
        assert page.run("document.querySelectorAll('img, main script').length") == 0
        assert page.run("document.getElementById('text').textContent") == evil


def test_alarms_of_a_run_are_shown() -> None:
    """The page shows a drift alarm and a warning with the text of the journal."""
    reading = RunReading()
    reading.take(Entry(0, 1, 0.0, 0.0, Drifted("jumper", 0.001, 90, text="drift!")))
    reading.take(Entry(1, 1, 0.0, 0.0, Warned("a", "b")))
    assert reading.alarms == ["drift!", "b"]
