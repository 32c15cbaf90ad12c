"""`atts probe`: what a server can do, before a run depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import typer

from atts.cli.interrupts import run_async
from atts.cli.output import json_line
from atts.errors import CheckFailed

Dialect = Literal["auto", "vllm", "sglang", "llamacpp", "ollama", "chat"]
_SPOKEN: dict[str, Dialect] = {
    "vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "ollama": "ollama",
    "openai": "chat", "chat": "chat", "server": "auto",
}  # fmt: skip


def server_of(words: str) -> tuple[str, Dialect, str]:
    """URL, dialect and model of a server, given by its URL alone or as an engine of a run.

    >>> server_of("vllm:http://a:8000/Qwen/Qwen3-32B")
    ('http://a:8000', 'vllm', 'Qwen/Qwen3-32B')
    >>> server_of("http://a:8000")
    ('http://a:8000', 'auto', '')
    """
    scheme, _, rest = words.partition(":")
    spoken = _SPOKEN.get(scheme)
    if spoken is None:
        return words, "auto", ""
    parts = urlsplit(rest.partition("?")[0])
    if spoken == "chat" or not parts.netloc:  # a chat API's path is its own; what is no URL is refused as it stands
        return rest, spoken, ""
    return f"{parts.scheme}://{parts.netloc}", spoken, parts.path.strip("/")


def probe(
    url: Annotated[str, typer.Argument(help="Such as http://127.0.0.1:8000, or as a run names it: vllm:URL/MODEL.")],
    model: Annotated[str, typer.Option(help="Of several that are served.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Folder or hub id; by default what the server names.")] = "",
    dialect: Annotated[
        Dialect,
        typer.Option(help="What the server speaks: auto, vllm, sglang, llamacpp, ollama or chat.", metavar="DIALECT"),
    ] = "auto",
    need: Annotated[
        Literal["nothing", "sample", "score", "rate"], typer.Option(help="Fail (5) unless it can.")
    ] = "nothing",
    key_file: Annotated[Path | None, typer.Option(help="With the API key; else ATTS_API_KEY.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for a server that is loading.", min=0.0)] = 60.0,
    proxy: Annotated[Literal["never", "environment"], typer.Option(help="Whether HTTP_PROXY counts.")] = "never",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say what a server can do for a run: its engine, tokenizer, stops, scores, log-prob convention, cancelling.

    Example: atts probe http://127.0.0.1:8000 --need score
    """
    from atts.remote import ApiKey, RemoteOptions, probe

    options = RemoteOptions(wait_seconds=wait, proxy=proxy, key=ApiKey(file=key_file))
    address, spoken, named = server_of(url)

    async def main() -> None:
        report = await probe(
            address,
            dialect=spoken if dialect == "auto" else dialect,
            model=model or named,
            tokenizer=tokenizer or None,
            options=options,
        )
        print(json_line(report.as_json()) if as_json else report)
        if need != "nothing" and need not in report.can:
            raise CheckFailed(f"{url} cannot {need}")

    run_async(main)
