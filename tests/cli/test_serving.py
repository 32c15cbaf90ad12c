"""Tests of options of `atts serve` and `atts view` that are checked before anything is served."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.conftest import Atts


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--model", "scripted", "--draft", "scripted"), "leave --draft out"),
        (("--model", "scripted", "--pair", "r1-1.5b/r1-70b"), "leave --pair out"),
        (("--share", "ann"), "'ann' is not USER=SHARE"),
        (("--share", "=2"), "'=2' is not USER=SHARE"),
        (("--share", "ann=much"), "is not USER=SHARE"),
        (("--share", "ann=0"), "is out of range; give a share above 0"),
    ],
)
def test_impossible_serving_options_are_refused(
    atts: Atts, words: tuple[str, ...], problem: str
) -> None:
    """An impossible option of `atts serve` is refused by name, and no server starts."""
    pytest.importorskip(
        "starlette", reason="starlette is not installed: pip install 'atts-llm[serve]'"
    )
    done = atts("serve", *words)
    assert done.code == 2
    assert problem in done.err


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("nowhere", "there is no run here"),
        ("ftp://127.0.0.1", "such an address begins with http://"),
        ("http://127.0.0.1:1", "http://127.0.0.1:1/atts/view: "),
    ],
)
def test_a_source_that_cannot_be_viewed_is_named(atts: Atts, source: str, problem: str) -> None:
    """If a folder contains no run, or no server answers at an address, the error of `atts view`
    names the folder or the address.
    """
    done = atts("view", source)
    assert done.code != 0
    assert problem in done.err


def test_view_json_prints_the_status_of_the_page(
    atts: Atts, scripted: tuple[str, ...], tmp_path: Path
) -> None:
    """`atts view --json` prints the status of the page once, as JSON for programs."""
    assert atts("eval", "arithmetic[:2]", *scripted, "--out", "run", "--samples", "2").code == 0
    status = json.loads(atts("view", "run", "--json").out)
    assert status["counts"]["finished"] == 2
    assert status["kind"] == "run"


class LockedPage(BaseHTTPRequestHandler):
    """A server whose page is open, but whose status needs the key "good"."""

    def do_GET(self) -> None:
        """Answer a request for the page or for its status."""
        is_page = self.path == "/atts/view"
        is_allowed = is_page or self.headers.get("Authorization") == "Bearer good"
        self.send_response(200 if is_allowed else 401)
        self.end_headers()
        self.wfile.write(b"<title>atts view</title>" if is_page else b'{"kind": "server"}')

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def test_view_json_prints_the_status_of_a_server(
    atts: Atts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`atts view URL --json` prints the server's status once; if the server needs a key, the error
    names the variable of the key.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), LockedPage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert atts("view", url).out == f"{url}/atts/view\n"
        refused = atts("view", url, "--json")
        assert (refused.code, refused.out) == (2, "")
        assert "set ATTS_SERVE_KEY" in refused.err
        monkeypatch.setenv("ATTS_SERVE_KEY", "good")
        assert json.loads(atts("view", url, "--json").out) == {"kind": "server"}
        server.shutdown()
