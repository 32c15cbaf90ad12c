"""The commands that prepare a run: config, pairs, doctor and probe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from atts.cli import options
from atts.cli.options import ConfigFile, Json, ObjectJson, Pairs
from atts.cli.terminal import json_line, print_json, say
from atts.errors import CheckFailed, counted
from atts.files import jsonable
from atts.interrupts import run_async

if TYPE_CHECKING:
    from atts.api import GpuPlacement, LocalPlacement, Pair


config_app = typer.Typer(no_args_is_help=True)


@config_app.callback()
def config() -> None:
    """Show every setting with its origin.

    Example: atts config show
    """


@config_app.command("show")
def show(
    key: str = typer.Argument(
        "", help="Show only the keys whose names contain this string.", show_default="all"
    ),
    config: ConfigFile = None,
    pairs: Pairs = None,
    as_json: Json = False,
) -> None:
    """Show the value of every key and its origin: default, file, environment variable or method.

    If a key is set in several places, the first of these counts: options on the command line,
    ATTS_* environment variables, atts.toml, defaults.

    Example: ATTS_RATE=0.3 atts config show rate
    """
    from atts.api import config_keys, configure
    from atts.errors import OptionError

    settings = configure({}, pairs or (), file=config).settings
    shown = {name: known for name, known in config_keys().items() if key in name}
    if not shown:
        raise OptionError("config", f"no key contains {key!r}; `atts config show` lists all keys")
    for name, known in shown.items():
        value = jsonable(settings[name].value)
        origin = settings[name].origin
        if as_json:
            facts = {"key": name, "value": value, "origin": origin, "default": known.default}
            print_json({**facts, "variable": known.variable, "help": known.help})
        else:
            say(f"{name:<28}{_word(value):<34}{origin}")


def _word(value: Any) -> str:
    """Return a value as it is written in a settings file, shortened to the width of a column."""
    words = "none" if value is None else json.dumps(value, ensure_ascii=False)
    return words if len(words) <= 32 else words[:31] + "…"


def pairs(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of a pair of models to show in detail.",
            show_default="all",
        ),
    ] = "",
    card: Annotated[
        str | None,
        typer.Option(
            help="GPU model that the pair must fit on: rtx4090, rtx5090, l40s, a100, h100, h200 "
            "or b200.",
            metavar="CARD",
        ),
    ] = None,
    server_version: Annotated[
        str,
        typer.Option(
            help="Version of vLLM, such as 0.29; the printed commands omit flags that this "
            "version lacks.",
            show_default="the newest known version",
            metavar="VERSION",
        ),
    ] = "",
    local: Annotated[
        bool,
        typer.Option(
            "--local",
            help="For models that run in this process, show the GPUs that they fit on, the "
            "memory for their weights and caches, and how many rollouts fit at the same "
            "time.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per pair.")
    ] = False,
) -> None:
    """List the pairs of models that `--pair` accepts, with their models, lengths, prompts and GPUs.

    With a name and --card, print the two commands that serve the pair on the smallest number of
    these cards. With --local, show how the models fit on one or two cards without a server; a run
    uses the same rules.

    Example: atts pairs; atts pairs r1-1.5b/r1-70b --card h100 --server-version 0.29
    """
    from atts.api import CARDS, USUAL_CARDS, find_pair, known_pairs

    chosen = [find_pair(name)] if name else list(known_pairs().values())
    if local:
        kinds = [card] if card else list(CARDS)
        say("\n".join(_local_objects(chosen, kinds) if as_json else _local_table(chosen, kinds)))
        return
    placed = {
        pair.name: {kind: _placed(pair, kind) for kind in ([card] if card else USUAL_CARDS)}
        for pair in chosen
    }
    if as_json:
        lines = [json_line(_facts(pair, placed[pair.name], server_version)) for pair in chosen]
        say("\n".join(lines))
    elif name:
        say("\n".join(_details(chosen[0], placed[name], card, server_version)))
    else:
        say("\n".join(_table(chosen, placed)))


def _local(pair: Pair, card: str) -> LocalPlacement | None:
    from atts.api import local_placement

    return local_placement(pair, card, int(str(pair.settings.get("max_tokens", 0))))


def _local_objects(chosen: list[Pair], kinds: list[str]) -> Iterator[str]:
    for pair in chosen:
        for kind in kinds:
            placement = _local(pair, kind)
            facts = (
                None if placement is None else {**asdict(placement), "rollouts": placement.rollouts}
            )
            yield json_line({"name": pair.name, "card": kind, "placement": facts})


def _local_table(chosen: list[Pair], kinds: list[str]) -> Iterator[str]:
    """Yield one line per pair and card, with the memory of each model if the pair fits."""
    head = f"{'draft GB':>12}{'target GB':>13}{'rollouts':>10}"
    yield f"{'pair':<26}{'card':<9}{'fits on':<10}{head}"
    for pair in chosen:
        if not pair.size("target").layers:
            yield f"{pair.name:<26}no GPU is needed"
            continue
        for kind in kinds:
            placement = _local(pair, kind)
            if placement is None:
                yield f"{pair.name:<26}{kind:<9}a server"
                continue
            parts = [
                f"{share.weights / 1e9:.1f} + {share.cache / 1e9:.1f}"
                for share in placement.shares.values()
            ]
            cards = counted(placement.count, "GPU")
            rest = f"{parts[0]:>12}{parts[1]:>13}{placement.rollouts:>10}"
            yield f"{pair.name:<26}{kind:<9}{cards:<10}{rest}"
    yield (
        "draft GB and target GB: weights + cache in bfloat16. rollouts: how many of a run's 64 "
        "rollouts fit at the same time at full length. These sizes are computed, not measured "
        "on a GPU."
    )


def _placed(pair: Pair, card: str) -> GpuPlacement | None:
    from atts.api import gpu_placement

    return gpu_placement(pair, card, int(str(pair.settings.get("max_tokens", 0))))


def _facts(pair: Pair, placed: dict[str, GpuPlacement | None], version: str) -> dict[str, Any]:
    sizes = {role: asdict(pair.size(role)) for role in ("draft", "target")}
    cards = {
        card: None if placement is None else _placement(pair, placement, version)
        for card, placement in placed.items()
    }
    published = {benchmark: asdict(row) for benchmark, row in pair.published.items()}
    facts = {"name": pair.name, "draft": pair.draft, "target": pair.target, "note": pair.note}
    return {
        **facts,
        "settings": dict(pair.settings),
        "sizes": sizes,
        "cards": cards,
        "published": published,
    }


def _placement(pair: Pair, placement: GpuPlacement, version: str) -> dict[str, Any]:
    return {**asdict(placement), "commands": list(placement.commands(pair, version))}


def _table(chosen: list[Pair], placed: dict[str, dict[str, GpuPlacement | None]]) -> Iterator[str]:
    yield f"{'pair':<26}{'GB':>12}{'tokens':>8}{'chunk':>7}  {'system':<8}" + "".join(
        f"{card:<10}" for card in next(iter(placed.values()))
    )
    for pair in chosen:
        sizes = f"{pair.size('draft').weights:g} + {pair.size('target').weights:g}"
        settings = pair.settings
        tokens = settings.get("max_tokens", "512")
        chunk = settings.get("chunking.draft_tokens", "64")
        system = "none" if settings.get("system") == "" else "yes"
        cards = "".join(f"{_count(placement):<10}" for placement in placed[pair.name].values())
        yield f"{pair.name:<26}{sizes:>12}{tokens:>8}{chunk:>7}  {system:<8}{cards}".rstrip()
    yield (
        "GB: size of the weights. Columns named after a card: smallest number of these cards "
        "that fit both models (* with the target in fp8). Sizes are computed, not measured."
    )


def _without(pair: Pair, card: str) -> str:
    return (
        f"the pair does not fit on eight {card} GPUs"
        if pair.size("target").layers
        else "no GPU is needed"
    )


def _count(placement: GpuPlacement | None) -> str:
    return (
        "-" if placement is None else f"x {placement.count}{'*' if placement.is_quantized else ''}"
    )


def _details(
    pair: Pair, placed: dict[str, GpuPlacement | None], card: str | None, version: str
) -> Iterator[str]:
    yield f"{pair.name}: {pair.note}"
    for role in ("draft", "target"):
        size = pair.size(role)
        yield (
            f"  {role:<9} {pair.model(role)}: {size.weights:g} GB, {size.context:,} tokens "
            "of context"
        )
    for key, value in pair.settings.items():
        yield f"  {key:<24} {json_line(value)}"
    for benchmark, row in pair.published.items():
        speeds = f"{row.marginal:g}x (paper-marginal), {row.conditional:g}x (paper-conditional)"
        yield (
            f"  published results on {benchmark}: {100 * row.accuracy:.1f} % of problems solved "
            f"by at least one of 16 rollouts; speed-up over the target alone: {speeds}"
        )
    for kind, placement in placed.items():
        yield f"  memory    {placement or _without(pair, kind)}"
        if card and placement:
            yield from placement.commands(pair, version)
    if version:
        from atts.servers import lacking, read_version

        for line in lacking(read_version(version)):
            yield f"  lacking   {line}"


@options.with_keys(
    "pair backend method rate samples turns max_tokens draft target card out config pairs as_json"
)
def doctor(
    context: typer.Context,
    card: Annotated[
        str | None,
        typer.Option(
            help="GPU model that the pair must fit on: rtx4090, rtx5090, l40s, a100, h100, h200 "
            "or b200.",
            show_default="the GPUs of this machine",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write the settings to; `atts eval --config FILE` reads it.",
            metavar="FILE",
        ),
    ] = None,
    config: options.ConfigFile = None,
    pairs: options.Pairs = None,
    as_json: options.ObjectJson = False,
) -> None:
    """Check both engines (tokenizers, templates, lengths), memory and disk before a run.

    Each check prints a line: ok, warn or fail, with advice. As a test, the draft writes one short
    chunk and the target scores the chunk. If a check fails, the exit code is 5.

    Example: atts doctor --pair r1-1.5b/r1-70b --card h100 --out pair.toml
    """
    from atts.api import diagnose, write_settings

    configuration = options.configured(context, config, pairs, without="out")

    async def main() -> None:
        diagnosis = await diagnose(configuration, card)
        if out is not None:
            write_settings(out, configuration, diagnosis)
        if as_json:
            print_json({**diagnosis.as_json(), "out": None if out is None else str(out)})
        else:
            say("\n".join(map(str, diagnosis.checks)))
        if diagnosis.failed:
            raise CheckFailed(f"{diagnosis.failed} of {len(diagnosis.checks)} checks failed")

    run_async(main)


def probe(
    url: Annotated[
        str,
        typer.Argument(
            help="Server to probe: a URL such as http://127.0.0.1:8000, or an engine address "
            "such as vllm:URL/MODEL."
        ),
    ],
    model: Annotated[
        str, typer.Option(help="Name of the model to probe, if the server has several models.")
    ] = "",
    tokenizer: Annotated[
        str,
        typer.Option(
            help="Folder of the tokenizer, or its id on the Hugging Face hub. By default, the "
            "tokenizer that the server names."
        ),
    ] = "",
    dialect: Annotated[
        str,
        typer.Option(
            help="API of the server, such as vllm or sglang; auto detects it. An unknown name "
            "prints the list of names.",
            metavar="DIALECT",
        ),
    ] = "auto",
    need: Annotated[
        Literal["nothing", "sample", "score", "rate"],
        typer.Option(
            help="Ability that the server must have; if it is missing, the exit code is 5: "
            "sample (write text), score (return log-probabilities of a given text), rate "
            "(list the most likely next tokens, which ratings need), nothing (no check)."
        ),
    ] = "nothing",
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File that contains the API key; by default, the environment variable "
            "ATTS_API_KEY is used."
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            help="Seconds to wait while the server reports that it is loading its model.", min=0.0
        ),
    ] = 60.0,
    proxy: Annotated[
        Literal["never", "environment"] | None,
        typer.Option(
            help="Whether to use proxies: never (connect directly), environment (as set in "
            "HTTP_PROXY and similar variables).",
            show_default="never",
        ),
    ] = None,
    as_json: ObjectJson = False,
) -> None:
    """Print what a server can do for a run: engine, tokenizer, scores, log-probabilities,
    cancelling.

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
            raise CheckFailed(f"{url} lacks the ability that --need requires: {need}")

    run_async(main)


def tune(
    url: Annotated[
        str,
        typer.Argument(help="Engine address of the server, such as vllm:http://127.0.0.1:8000."),
    ],
    load: Annotated[
        str,
        typer.Option(
            help="Time the server with these numbers of simultaneous requests, such as 1,4,16."
        ),
    ] = "1,4,16,64",
    tokens: Annotated[
        int, typer.Option(help="Number of tokens that each timed request generates.")
    ] = 64,
    most: Annotated[
        int, typer.Option(help="Consider proposals of at most this many tokens per step.")
    ] = 8,
    method: Annotated[
        str,
        typer.Option(
            help="Speculation method for the printed --speculative-config, such as ngram, "
            "draft_model or eagle3."
        ),
    ] = "ngram",
    as_json: ObjectJson = False,
) -> None:
    """Time a server at several loads, and print the best --speculative-config, or advise against
    one.

    The server counts how many proposed tokens are accepted at each position of a proposal. From
    these counts and the times of steps, atts predicts the tokens per second for each length of
    proposals. The prediction for the current length is printed next to the measured speed. A server
    without speculation is only timed.

    Example: atts tune vllm:http://127.0.0.1:8000 --load 1,8,32
    """
    from atts.api import tune as tuned
    from atts.errors import OptionError
    from atts.servers import RemoteEngine, read_server

    try:
        loads = [int(part) for part in load.split(",")]
    except ValueError:
        raise OptionError(
            "--load", f"{load!r} is not a list of whole numbers separated by commas, such as 1,4,16"
        ) from None
    server = read_server(url)
    engine = RemoteEngine(
        server.url,
        dialect=server.dialect,
        model=server.model,
        name=url,
        tokenizer=server.tokenizer or None,
        options=server.options,
    )

    async def main() -> None:
        async with engine:
            advice = await tuned(engine, loads, tokens=tokens, most=most, method=method)
        say(json_line(advice.as_json()) if as_json else advice)

    run_async(main)
