"""The command `atts view`: a page on a server or a run, while it works or afterwards."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import typer

from atts.cli import options
from atts.cli.terminal import json_line, say
from atts.errors import UsageError

_SECONDS = 10


def view(
    source: Annotated[
        str, typer.Argument(help="Run directory, or the address of an `atts serve`.")
    ],
    port: Annotated[int, typer.Option(help="Port of the page; 0: any free one.")] = 8322,
    as_json: options.ObjectJson = False,
) -> None:
    """Show a run directory, or a server, as a page that follows it.

    The page shows what is in flight, the leading rollout's text, budgets, the realised rate, how
    busy the engines are, and alarms. A server has the page itself: its address is printed.

    Example: atts view runs/first

    Example: atts view http://127.0.0.1:8321
    """
    if "://" in source:
        say(_page_of(source))
        return
    from atts.serving import RunStatus, view_server

    reading = RunStatus(Path(source))
    if as_json:
        say(json_line(reading.status()))
        return
    lock = threading.Lock()

    def status() -> dict[str, object]:
        with lock:  # a reading keeps what it has read
            return reading.status()

    try:
        server = view_server(port, status)
    except OSError as error:
        raise UsageError(f"--port {port}: cannot listen there ({error.strerror})") from error
    with server:
        say(f"atts shows {source} on http://127.0.0.1:{server.server_port}/atts/view", flush=True)
        with suppress(KeyboardInterrupt):  # the way to end it
            server.serve_forever()


def _page_of(address: str) -> str:
    """Return the address of a server's page.

    :raises UsageError: no atts server answers there.
    """
    parts = urlsplit(address)
    page = f"{parts.scheme}://{parts.netloc}/atts/view"
    problem = ""
    if parts.scheme not in ("http", "https"):
        raise UsageError(f"{address} is not an address of a server: it begins with http://")
    try:
        with build_opener(ProxyHandler({})).open(page, timeout=_SECONDS) as answer:
            if b"atts view" not in answer.read(2_000):
                problem = "what answers there is not `atts serve`"
    except OSError as error:
        problem = str(error)
    if problem:
        raise UsageError(f"{page}: {problem}")
    return page
