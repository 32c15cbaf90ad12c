"""A server on slow scripted engines, in a process that tests may kill."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from atts.serving import ServeOptions, Service, run_server
from atts.testing import Latency
from tests.serving.conftest import MODEL, toy_setup


async def main(state: Path, seconds: float, requests: int) -> None:
    """Serve until SIGTERM; print the server's address before the first request."""
    setup = toy_setup(Latency(per_sample=seconds, per_score=seconds))
    service = Service(setup, ServeOptions(name=MODEL, state=state, requests=requests))
    await run_server(service, "127.0.0.1", 0, _say)


def _say(address: str) -> None:
    """Print the server's address for the test that waits for it."""
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
