"""The commands `atts serve`, which starts a server, and `atts view`, which shows a live page."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import typer

from atts.cli import options
from atts.cli.terminal import json_line, say, tell
from atts.errors import MissingExtra, OptionError, UsageError
from atts.interrupts import run_async

if TYPE_CHECKING:
    from atts.api import Setup

KEY_VARIABLE = "ATTS_SERVE_KEY"
_PAGE_SECONDS = 10  # seconds to wait for a server to send its page
_LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


@options.with_keys(
    "host port name model api_key_file share state max_cost max_total_tokens "
    "request_cost request_tokens request_seconds requests queue response_days "
    "housekeeping pair backend draft target scores seed concurrency config pairs "
    "print_policies"
)
def serve(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 means any free port.")] = 8321,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model that clients request.",
            show_default="atts/pair, or atts/model with --model",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Single model to serve instead of a draft and a target; its rollouts vote. "
            "Same formats as --draft.",
            show_default="none: a pair",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File with the keys that clients must send; each line has the form KEY or USER "
                f"KEY. A single key can also be set in the environment variable {KEY_VARIABLE}."
            ),
            show_default="no key",
        ),
    ] = None,
    share: Annotated[
        list[str] | None,
        typer.Option(
            help="Share of a user when the server is overloaded: with alice=2, alice gets twice "
            "the capacity of a user with share 1; repeatable.",
            metavar="USER=SHARE",
            show_default="1 for each user",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the ledger, the calibrators and the background responses, so that "
            "they survive a restart.",
            show_default="none: in memory",
        ),
    ] = None,
    max_cost: Annotated[
        float | None,
        typer.Option(help="Cap on the total dollars of all requests.", show_default="no cap"),
    ] = None,
    max_total_tokens: Annotated[
        int | None,
        typer.Option(help="Cap on the total tokens of all requests.", show_default="no cap"),
    ] = None,
    request_cost: Annotated[
        float | None,
        typer.Option(help="Cap on the dollars of a single request.", show_default="no cap"),
    ] = None,
    request_tokens: Annotated[
        int | None,
        typer.Option(
            help="Cap on the tokens of a single request, summed over all its calls.",
            show_default="no cap",
        ),
    ] = None,
    request_seconds: Annotated[
        float | None,
        typer.Option(help="Cap on the seconds of a single request.", show_default="no cap"),
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Largest number of requests that are processed at the same time.")
    ] = 64,
    queue: Annotated[
        int,
        typer.Option(
            help="Largest number of waiting requests; further requests get HTTP status 429."
        ),
    ] = 256,
    response_days: Annotated[
        float,
        typer.Option(help="Number of days after which a finished background response is deleted."),
    ] = 30.0,
    housekeeping: Annotated[
        Literal["draft", "policy"],
        typer.Option(
            help=(
                "How to answer Open WebUI's automatic requests for titles, tags and follow-up "
                "questions: draft (one rollout of the draft), policy (the policy named in the "
                "request)."
            )
        ),
    ] = "draft",
    config: options.ConfigFile = None,
    pairs: options.Pairs = None,
    print_policies: Annotated[
        bool,
        typer.Option(
            "--print-policies", help="Print the named policies, without starting a server."
        ),
    ] = False,
) -> None:
    """Serve a draft and a target as one OpenAI-compatible model, with hard caps on cost, tokens and
    time.

    Clients request the model NAME, or NAME:fast, NAME:balanced, NAME:careful or NAME:exact for a
    named policy. Clients that request the model `draft` or `target` get this model alone. A request
    sets its caps in its `atts` object; the options --request-* limit these caps. --max-cost and
    --max-total-tokens limit all requests together.

    Example: atts serve

    Example: atts serve --model vllm:http://localhost:8000 --name atts/qwen3

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
    setup = configuration.setup()
    if model is not None:
        setup = _one_model(context, setup, model)
    name = name or ("atts/pair" if model is None else "atts/model")
    served = ServeOptions(
        name=name,
        state=state,
        keys=_keys(api_key_file),
        shares=_shares(share or []),
        request_caps=Caps(
            max_cost=request_cost, max_total_tokens=request_tokens, max_seconds=request_seconds
        ),
        server_caps=job.caps,
        prices=job.price_list,
        requests=requests,
        queue=queue,
        housekeeping=housekeeping,
        response_seconds=response_days * 86_400,
    )
    if not served.keys and host not in _LOCAL_HOSTS:
        tell(
            f"atts: {host} is reachable from other machines, but no API key is set; see "
            "--api-key-file"
        )
    service = Service(setup, served)

    async def main() -> None:
        await run_server(
            service, host, port, lambda address: say(f"atts serves {name} on {address}")
        )

    run_async(main)


def policy_lines() -> list[str]:
    """Return the named policies as a table."""
    from atts.serving import POLICIES, VOTES

    lines = [f"{'policy':<10} {'method':<10} {'samples':>7} {'rate':>5}  {'stop':<8} effort"]
    for row in (*POLICIES.values(), *VOTES.values()):
        efforts = ", ".join(row.efforts) or "-"
        is_vote = row.name in VOTES and row is VOTES[row.name]
        method = "one model" if is_vote else row.method
        rate = "-" if is_vote else f"{row.rate:g}"
        lines.append(
            f"{row.name:<10} {method:<10} {row.samples:>7} {rate:>5}  {row.early_stop:<8} {efforts}"
        )
    return lines


def _one_model(context: typer.Context, setup: Setup, model: str) -> Setup:
    """Return the setup in which a single model is both draft and target.

    :raises OptionError: if a pair, a draft or a target is also named.
    """
    for option in ("pair", "draft", "target"):
        if context.params.get(option) is not None:
            raise OptionError(
                "--model",
                f"{model} is served as a single model, without a pair; leave --{option} out",
            )
    return replace(setup, draft=model, target=model, method="draft-only")


def _keys(file: Path | None) -> dict[str, str]:
    """Return the user of each API key in the file, or of the key in the environment; "" if a key
    has no user.

    :raises OptionError: the file cannot be read, or one of its lines is not a key.
    """
    if file is None:
        key = os.environ.get(KEY_VARIABLE)
        return {key: ""} if key else {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("--api-key-file", f"{file} cannot be read: {error}") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        if len(words) > 2 or not words[-1].isascii():
            raise OptionError(
                "--api-key-file",
                f"line {number} of {file} does not have the form KEY or USER KEY, or its key "
                "contains a non-ASCII character",
            )
        keys[words[-1]] = words[0] if len(words) == 2 else ""
    if not keys:
        raise OptionError("--api-key-file", f"{file} is empty; write one key per line")
    return keys


def _shares(given: Sequence[str]) -> dict[str, float]:
    """Return the weight of each user that --share names.

    :raises OptionError: a value does not have the form USER=SHARE.
    """
    shares: dict[str, float] = {}
    for text in given:
        user, mark, share = text.rpartition("=")
        try:
            shares[user] = float(share)
        except ValueError:
            mark = ""
        if not mark or not user:
            raise OptionError("--share", f"{text!r} is not USER=SHARE, such as alice=2")
    return shares


def view(
    source: Annotated[
        str,
        typer.Argument(help="Run directory, or the address of a server that `atts serve` started."),
    ],
    port: Annotated[int, typer.Option(help="Port of the page; 0 means any free port.")] = 8322,
    as_json: options.ObjectJson = False,
) -> None:
    """Show a live page of a run directory or of a server.

    The page shows calls in flight, the leading rollout's text, budgets, the realised rate, the load
    of the engines, and alarms. A server already has such a page, so the command only prints the
    page's address. With --json, it prints the page's data once.

    Example: atts view runs/first

    Example: atts view http://127.0.0.1:8321
    """
    if "://" in source:
        page = _page_of(source)
        say(_status_of(page) if as_json else page)
        return
    from atts.serving import RunStatus, view_server

    reading = RunStatus(Path(source))
    if as_json:
        say(json_line(reading.status()))
        return
    lock = threading.Lock()

    def status() -> dict[str, object]:
        # All requests share `reading`, which remembers how far it has read the journal. So only one
        # thread at a time may use it.
        with lock:
            return reading.status()

    try:
        server = view_server(port, status)
    except OSError as error:
        raise UsageError(f"--port {port}: cannot listen on this port ({error.strerror})") from error
    with server:
        say(f"atts shows {source} on http://127.0.0.1:{server.server_port}/atts/view", flush=True)
        # Ctrl-C is the usual way to stop this command, so it is not an error.
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _page_of(address: str) -> str:
    """Return the address of the live page of a server.

    :raises UsageError: no atts server answers there.
    """
    parts = urlsplit(address)
    page = f"{parts.scheme}://{parts.netloc}/atts/view"
    problem = ""
    if parts.scheme not in ("http", "https"):
        raise UsageError(
            f"{address} is not the address of a server; such an address begins with http://"
        )
    try:
        with build_opener(ProxyHandler({})).open(page, timeout=_PAGE_SECONDS) as answer:
            if b"atts view" not in answer.read(2_000):
                problem = "the server at this address is not `atts serve`"
    except OSError as error:
        problem = str(error)
    if problem:
        raise UsageError(f"{page}: {problem}")
    return page


def _status_of(page: str) -> str:
    """Return the data of a server's live page, as one line of JSON.

    :raises UsageError: the server refuses the key, or does not answer with JSON.
    """
    request = Request(page.removesuffix("view") + "status")
    key = os.environ.get(KEY_VARIABLE)
    if key:
        # A redirect may lead to another host, which must not get the key.
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=_PAGE_SECONDS) as answer:
            return json_line(json.load(answer))
    except HTTPError as error:
        problem = f"status {error.code}"
        if error.code in (401, 403):
            problem = f"the server needs an API key; set {KEY_VARIABLE} to a valid key"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise UsageError(f"{request.full_url}: {problem}")
