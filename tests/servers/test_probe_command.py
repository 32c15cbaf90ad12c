"""Tests of `atts probe`: it accepts the same addresses as a run, and says for which roles a server
can be used.
"""

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
    """Make an engine of the embedded draft, whose tokenizer is on this machine."""
    return LocalEngine(
        path("draft"), name="draft", options=LocalOptions(worker="thread", kv_tokens=4096)
    )


@pytest.mark.parametrize("need", ["sample", "score", "rate"])
def test_a_vllm_server_satisfies_every_need(
    serve: Serve, need: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that speaks vLLM's dialect satisfies each `--need`, and the probe lists the
    abilities that the table in docs/servers.md gives for vLLM.
    """
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
    assert json.loads(capsys.readouterr().out)["can"] == ["entropy", "rate", "sample", "score"]


@pytest.mark.parametrize("scheme", ["chat", "openai"])
def test_a_chat_api_is_probed_as_a_run_names_it(
    serve: Serve,
    scheme: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The probe accepts a chat API in the form that `--target` accepts: URL, version, model and the
    key's variable.
    """
    monkeypatch.setenv("SOME_KEY", "secret")
    server = serve("chat", model="toy-model", key="secret")
    words = f"{scheme}:{server.url}/v1/toy-model?key=SOME_KEY"
    assert command(["probe", words, "--need", "sample", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "toy-model"
    assert command(["probe", words.replace("toy-model", "other")]) == 3
    assert "toy-model" in capsys.readouterr().err


class Quick:
    """A server that answers within a moment, and never reports a running request."""

    spec = EngineSpec("quick", "toy", "toy", 1024, (1,), 8)
    tokenizer = ToyTokenizer()
    client = None
    dialect = property(lambda self: self)

    async def running(self, client: object) -> int:
        """Report that nothing runs."""
        return 0

    async def sample_raw(self, request: object) -> None:
        """Return a sample after a short sleep."""
        await anyio.sleep(0.05)


def test_opening_an_engine_on_a_quick_server_does_not_wait() -> None:
    """Opening an engine on a quick server does not wait for the probe's cancellation, because the
    probe's request has already ended.
    """
    requests: Any = Quick()

    async def look() -> tuple[str, float]:
        found = await ServerProbe(requests)._see_abort()  # pyright: ignore[reportPrivateUsage]
        return found.seen, anyio.current_time()

    seen, seconds = run_virtual(look)
    assert "ended before it could be cancelled" in seen
    assert seconds < 0.1
