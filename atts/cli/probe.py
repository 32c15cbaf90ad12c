"""`atts probe`: what a server can do, before a run depends on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from atts.cli.interrupts import run_async
from atts.cli.options import ObjectJson
from atts.cli.output import json_line
from atts.cli.terminal import say
from atts.errors import CheckFailed

Dialect = Literal["auto", "vllm", "sglang", "llamacpp", "ollama", "chat"]


def probe(
    url: Annotated[
        str,
        typer.Argument(help="Such as http://127.0.0.1:8000, or as a run names it: vllm:URL/MODEL."),
    ],
    model: Annotated[str, typer.Option(help="Of several that are served.")] = "",
    tokenizer: Annotated[
        str, typer.Option(help="Folder or hub id; by default what the server names.")
    ] = "",
    dialect: Annotated[
        Dialect,
        typer.Option(
            help="What the server speaks: auto, vllm, sglang, llamacpp, ollama or chat.",
            metavar="DIALECT",
        ),
    ] = "auto",
    need: Annotated[
        Literal["nothing", "sample", "score", "rate"], typer.Option(help="Fail (5) unless it can.")
    ] = "nothing",
    key_file: Annotated[
        Path | None, typer.Option(help="With the API key; else ATTS_API_KEY.")
    ] = None,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for a server that is loading.", min=0.0)
    ] = 60.0,
    proxy: Annotated[
        Literal["never", "environment"] | None,
        typer.Option(help="Whether HTTP_PROXY counts.", show_default="never"),
    ] = None,
    as_json: ObjectJson = False,
) -> None:
    """Say what a server can do for a run: its engine, tokenizer, stops, scores, log-prob
    convention, cancelling.

    Example: atts probe http://127.0.0.1:8000 --need score
    """
    from atts.servers import ApiKey, probe, read_server

    server = read_server(url)
    options = replace(server.options, wait_seconds=wait, proxy=proxy or server.options.proxy)
    if key_file is not None:
        options = replace(options, key=ApiKey(file=key_file))

    async def main() -> None:
        report = await probe(
            server.url,
            dialect=server.dialect if dialect == "auto" else dialect,
            model=model or server.model,
            tokenizer=tokenizer or server.tokenizer,
            options=options,
        )
        say(json_line(report.as_json()) if as_json else report)
        if need != "nothing" and need not in report.can:
            raise CheckFailed(f"{url} cannot {need}")

    run_async(main)
