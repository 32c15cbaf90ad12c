"""`atts probe`: servers named as runs name them, and a model that scores can rate too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.cli.app import run as command
from atts.engine import EngineSpec
from atts.local import LocalEngine, LocalOptions
from atts.models import path
from atts.servers.probing import ServerProbe
from atts.testing import ToyTokenizer, run_virtual
from atts.testing.servers import DialectServer

Serve = Callable[..., DialectServer]


def embedded() -> LocalEngine:
    """Make an engine of the embedded draft, whose tokenizer can be opened here."""
    return LocalEngine(
        path("draft"), name="draft", options=LocalOptions(worker="thread", kv_tokens=4096)
    )


@pytest.mark.parametrize("need", ["sample", "score", "rate"])
def test_what_scores_can_rate(serve: Serve, need: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A vLLM server satisfies every need, as its row in docs/servers.md says."""
    server = serve("vllm", embedded, model="owner/draft")
    assert (
        command(
            [
                "probe",
                f"vllm:{server.url}/owner/draft?tokenizer={path('draft')}",
                "--need",
                need,
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["can"] == ["rate", "sample", "score"]


@pytest.mark.parametrize("scheme", ["chat", "openai"])
def test_a_chat_api_is_probed_as_a_run_names_it(
    serve: Serve,
    scheme: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """URL, version, model and the setting that holds the key, in the words of `--target`."""
    monkeypatch.setenv("SOME_KEY", "secret")
    server = serve("chat", model="toy-model", key="secret")
    words = f"{scheme}:{server.url}/v1/toy-model?key=SOME_KEY"
    assert command(["probe", words, "--need", "sample", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "toy-model"
    assert command(["probe", words.replace("toy-model", "other")]) == 3
    assert "toy-model" in capsys.readouterr().err


class Quick:
    """Requests to a server that answers in a moment, and is never seen to run anything."""

    spec = EngineSpec("quick", "toy", "toy", 1024, (1,), 8)
    tokenizer = ToyTokenizer()
    client = None
    dialect = property(lambda self: self)

    async def running(self, client: object) -> int:
        """Report that nothing runs."""
        return 0

    async def sample_raw(self, request: object) -> None:
        """Sleep for a moment."""
        await anyio.sleep(0.05)


def test_a_request_that_is_over_is_not_waited_for() -> None:
    """An engine on a server that is quick opens as quickly: there is nothing left to be cancelled."""
    requests: Any = Quick()

    async def look() -> tuple[str, float]:
        found = await ServerProbe(requests)._see_abort()  # pyright: ignore[reportPrivateUsage]
        return found.seen, anyio.current_time()

    seen, seconds = run_virtual(look)
    assert "over before it could be cancelled" in seen
    assert seconds < 0.1
