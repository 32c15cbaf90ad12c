"""The command `atts serve`: the pair behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from atts.cli import options
from atts.cli.terminal import say, tell
from atts.errors import MissingExtra, OptionError
from atts.interrupts import run_async

KEY_VARIABLE = "ATTS_SERVE_KEY"
_LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


@options.with_keys(
    "host port name api_key_file state max_cost max_total_tokens request_cost request_tokens "
    "request_seconds requests queue pair backend draft target scores seed concurrency config pairs "
    "print_policies"
)
def serve(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8321,
    name: Annotated[str, typer.Option(help="Model name that clients ask.")] = "atts/pair",
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the key that clients must send; or set {KEY_VARIABLE}.",
            show_default="no key",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the ledger, so that a restart remembers what was spent.",
            show_default="none: in memory",
        ),
    ] = None,
    max_cost: Annotated[
        float | None,
        typer.Option(help="Dollars of all requests together.", show_default="no cap"),
    ] = None,
    max_total_tokens: Annotated[
        int | None, typer.Option(help="Tokens of all requests together.", show_default="no cap")
    ] = None,
    request_cost: Annotated[
        float | None, typer.Option(help="Most dollars of one request.", show_default="no cap")
    ] = None,
    request_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of one request, over all calls.", show_default="no cap"),
    ] = None,
    request_seconds: Annotated[
        float | None, typer.Option(help="Most seconds of one request.", show_default="no cap")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests worked on at once.")] = 64,
    queue: Annotated[int, typer.Option(help="Requests that may wait; more get status 429.")] = 256,
    config: options.ConfigFile = None,
    pairs: options.Pairs = None,
    print_policies: Annotated[
        bool, typer.Option("--print-policies", help="Print the named policies; serve nothing.")
    ] = False,
) -> None:
    """Serve a draft and target as one OpenAI-compatible model, with hard caps.

    Clients ask the model NAME, or NAME:fast, NAME:balanced, NAME:careful or NAME:exact. Caps of a
    request are in its `atts` object; --request-* are the most that a request may ask, and
    --max-cost and --max-total-tokens are for all requests together.

    Example: atts serve

    Example: atts serve --pair r1-1.5b/r1-70b --request-tokens 200000 --state runs/serve
    """
    if print_policies:
        say("\n".join(policy_lines()))
        return
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise MissingExtra("atts serve", package, "serve")
    from atts.ledger import Caps
    from atts.serving import ServeOptions, Service, run_server

    configuration = options.configured(context, config, pairs)
    job = configuration.job
    served = ServeOptions(
        name=name,
        state=state,
        api_key=_key(api_key_file),
        request_caps=Caps(
            max_cost=request_cost, max_total_tokens=request_tokens, max_seconds=request_seconds
        ),
        server_caps=job.caps,
        prices=job.price_list,
        requests=requests,
        queue=queue,
    )
    if served.api_key is None and host not in _LOCAL_HOSTS:
        tell(f"atts: {host} is open to others and no key is set; see --api-key-file")
    service = Service(configuration.setup(), served)

    async def main() -> None:
        await run_server(
            service, host, port, lambda address: say(f"atts serves {name} on {address}")
        )

    run_async(main)


def policy_lines() -> list[str]:
    """Return the named policies as a table."""
    from atts.serving import POLICIES

    lines = [f"{'policy':<10} {'method':<7} {'samples':>7} {'rate':>5}  {'stop':<8} effort"]
    for row in POLICIES.values():
        efforts = ", ".join(row.efforts) or "-"
        lines.append(
            f"{row.name:<10} {row.method:<7} {row.samples:>7} {row.rate:>5g}  "
            f"{row.early_stop:<8} {efforts}"
        )
    return lines


def _key(file: Path | None) -> str | None:
    """Return the key of the file, or that of the environment.

    :raises OptionError: the file cannot be read, or holds no key.
    """
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("--api-key-file", f"{file} cannot be read: {error}") from error
    if not key or not key.isascii():
        raise OptionError("--api-key-file", f"{file} holds no key of plain characters")
    return key
