"""Tests of real client programs against `atts serve` with the embedded pair, in its own process."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'atts-llm[serve]'")
pytest.importorskip("torch", reason="torch is not installed: pip install 'atts-llm[local]'")
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def serve_embedded() -> Generator[str]:
    """Serve the embedded pair in a process; yield its address, and end it with SIGTERM."""
    environment = {name: value for name, value in os.environ.items() if name[:5] != "ATTS_"}
    with tempfile.TemporaryDirectory() as state:
        words = ["serve", "--name", "atts/embedded", "--port", "0", "--state", state]
        server = subprocess.Popen(
            [sys.executable, "-m", "atts", *words],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        assert server.stdout is not None
        with server.stdout:
            line = server.stdout.readline()
            try:
                yield line.split()[-1]
            finally:
                server.send_signal(signal.SIGTERM)
                code = server.wait(60)
    assert code == 0, "the server must end with exit code 0"


@pytest.fixture(scope="module")
def address() -> Generator[str]:
    """Serve the embedded pair for the tests of this file."""
    with serve_embedded() as served:
        yield served


def test_the_program_on_the_page_works_with_openais_client(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program on the documentation page, with this server's port, prints an answer and its
    votes.
    """
    pytest.importorskip("openai", reason="needs the package openai")
    page = (ROOT / "docs/serving.md").read_text()
    program = next(re.finditer(r"```python\n(.*?)```", page, re.DOTALL)).group(1)
    exec(program.replace("http://127.0.0.1:8321/v1", address), {})
    answer, facts = capsys.readouterr().out.splitlines()
    assert answer
    assert re.match(r"\d+ \{", facts)


def test_openais_client_streams(address: str) -> None:
    """OpenAI's client receives reasoning, content and usage in this order, in its own types."""
    openai = pytest.importorskip("openai", reason="needs the package openai")
    client = openai.OpenAI(base_url=address, api_key="none")
    asked = {"model": "atts/embedded:fast", "seed": 1}
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    whole = client.chat.completions.create(messages=messages, **asked)
    content = ""
    usage = None
    stream = client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **asked
    )
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices:
            content += chunk.choices[0].delta.content or ""
    assert content == whole.choices[0].message.content
    assert usage is not None
    assert usage.total_tokens > 0
    assert {model.id for model in client.models.list()} >= {"atts/embedded", "atts/embedded:exact"}
    with pytest.raises(openai.BadRequestError, match="did you mean atts.samples"):
        client.chat.completions.create(
            messages=messages, extra_body={"atts": {"sampels": 1}}, **asked
        )


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_gets_a_reply(address: str) -> None:
    """curl gets a reply to a request that has only a body."""
    body = '{"model":"atts/embedded:fast","messages":[{"role":"user","content":"What is 3 + 4?"}]}'
    done = subprocess.run(
        ["curl", "-sS", f"{address}/chat/completions", "-d", body],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert '"finish_reason"' in done.stdout


def test_the_serve_extra_declares_the_server() -> None:
    """The extra `serve` lists the web server that runs the endpoint."""
    assert find_spec("uvicorn") is not None
