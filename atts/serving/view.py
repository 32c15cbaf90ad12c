"""The page of `atts view`, and a local server that shows a run directory on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from atts.errors import ATTSError

HOST = "127.0.0.1"


@cache
def page() -> bytes:
    """Return the page, which requests `/atts/status` every second."""
    return (files("atts.serving") / "view.html").read_bytes()


class _Handler(BaseHTTPRequestHandler):
    """A handler that serves only the page and the status."""

    def __init__(self, status: Callable[[], dict[str, Any]], *rest: Any) -> None:
        self._status = status
        super().__init__(*rest)

    def do_GET(self) -> None:
        """Answer a request of a browser on this machine."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in (HOST, "localhost"):
            # a foreign host name that resolves to this machine could read the run through the
            # browser
            self._send(403, "text/plain", b"ask 127.0.0.1\n")
        elif self.path in ("/", "/atts/view"):
            self._send(200, "text/html; charset=utf-8", page())
        elif self.path == "/atts/status":
            self._send_status()
        else:
            self._send(404, "text/plain", b"no such page\n")

    def _send_status(self) -> None:
        code = 200
        try:
            status = self._status()
        except (ATTSError, OSError) as error:
            code = 500
            status = {"error": {"message": str(error)}}
        self._send(code, "application/json", json.dumps(status).encode())

    def _send(self, code: int, kind: str, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing, because the page sends a request every second."""


def view_server(port: int, status: Callable[[], dict[str, Any]]) -> ThreadingHTTPServer:
    """Return a server that shows a status on this machine; the caller runs and closes it.

    :raises OSError: if it cannot listen on the port.
    """
    return ThreadingHTTPServer((HOST, port), partial(_Handler, status))
