"""Fixtures of toy engines behind real HTTP servers, and of engines that call these servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from atts.engine import Engine
from atts.servers import RemoteEngine, RemoteOptions
from atts.testing import Latency, ScriptedEngine, ToyTokenizer
from atts.testing.servers import DialectServer

# Clients check the server's identity again only after a lost connection or a changed model name,
# not after some time. Tests count requests, and on a busy machine seconds may pass between two
# requests.
QUICK = RemoteOptions(
    timeout_seconds=60.0,
    delay_seconds=0.01,
    connect_seconds=20.0,
    wait_seconds=20.0,
    idle_seconds=1e9,
    recheck_seconds=1e9,
    recheck_requests=10**9,
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's keys and proxies."""
    for name in (
        "ATTS_API_KEY",
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def toy() -> Callable[[], Engine]:
    """Return a factory of toy engines with some latency and a queue."""

    def make() -> Engine:
        return ScriptedEngine(
            context_length=1024, latency=Latency(sampled_token=0.0005), concurrency=64
        )

    return make


@pytest.fixture
def serve(toy: Callable[[], Engine]) -> Iterator[Callable[..., DialectServer]]:
    """Return a function that starts servers around toy engines; the end of the test stops them."""
    with ExitStack() as stack:

        def start(
            dialect: Any = "vllm", make: Callable[[], Engine] = toy, **settings: Any
        ) -> DialectServer:
            return stack.enter_context(DialectServer(make, dialect, **settings))

        yield start


@pytest.fixture
def client() -> Callable[..., RemoteEngine]:
    """Return a factory of engines that use a server and are not yet open."""

    def make(url: str, **settings: Any) -> RemoteEngine:
        settings.setdefault("tokenizer", ToyTokenizer())
        settings.setdefault("options", QUICK)
        settings.setdefault("name", "remote")
        return RemoteEngine(url, **settings)

    return make
