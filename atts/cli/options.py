"""Command-line options that several commands share, and the configuration they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atts.errors import OptionError

if TYPE_CHECKING:
    from atts.api import Configuration

RunDirectory = Annotated[
    Path, typer.Argument(help="The run: the directory given to `atts eval --out`.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
ObjectJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="A TOML file of settings.", show_default="atts.toml if there is one"
    ),
]
Pairs = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any other key, such as sampling.temperature=0.6; repeatable.",
        metavar="KEY=VALUE",
    ),
]
SETUP = "method rate samples turns max_tokens mode scores pair at draft target"
"""The keys of a setup that have an option of their own."""


def _key(
    help: str, default: str | bool = True, *names: str, kind: Any = str, metavar: str | None = None
) -> Parameter:
    """The option of a configuration key: not given, it is None, and help says what then is the
    default.
    """
    option = typer.Option(None, *names, help=help, show_default=default, metavar=metavar)
    return Parameter("key", Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


_DATASET = typer.Argument(
    None,
    help="A benchmark, a file or hub:owner/name; a slice may follow.",
    show_default="arithmetic[:40]",
)
OPTIONS: Mapping[str, Parameter] = {
    "method": _key("atts, or a baseline: draft-only, target-only, top-b, ...", "atts"),
    "rate": _key("Share of chunks the target takes over.", "0.2", kind=float),
    "samples": _key("Rollouts per problem.", "8", kind=int),
    "turns": _key("Rounds per rollout, at most.", "as --max-tokens needs", kind=int),
    "max_tokens": _key("Tokens per rollout, at most.", "by the models", kind=int),
    "mode": _key("What the rate is held for: aci (the run), turn, question, ...", "aci"),
    "scores": _key(
        "Calibration scores to start from: a file, or a run's directory.", metavar="FILE"
    ),
    "pair": _key("Models that work together, by name: `atts pairs` lists them.", "none"),
    "at": _key("Where a pair's models are: vllm, sglang (servers here) or local.", "vllm"),
    "draft": _key("embedded, scripted, hf:MODEL, vllm:URL, sglang:URL, server:URL.", "embedded"),
    "target": _key("The same words.", "embedded"),
    "dataset": Parameter(
        "dataset", Parameter.KEYWORD_ONLY, default=_DATASET, annotation=str | None
    ),
    "limit": _key("Only the first problems.", "all", kind=int),
    "file": _key("Read the benchmark from this file, not from the hub."),
    "column": _key("FIELD=COLUMN of a file, such as text=Question; repeatable.", kind=list[str]),
    "references": _key(
        "optional: problems without a reference will do.", "required", "--answers", "--references"
    ),
    "seed": _key("Of everything random.", "0", kind=int),
    "rollouts": _key("In flight at once, over all problems.", "64", kind=int),
    "out": _key(
        "Run directory; the same command goes on there.", "one below runs/", metavar="DIRECTORY"
    ),
    "report": _key("Written at the end: html, markdown, json or none.", "html"),
    "abstain": _key(
        "Answer only where wrong at most RISK of the time, by --labelled.",
        metavar="RISK@PROBABILITY",
    ),
    "labelled": _key("A graded run of the same settings, for --abstain.", metavar="RUN"),
    "against": _key("An earlier run to be told apart from, with --stop-when.", metavar="RUN"),
    "stop_when": _key(
        "decided: once the difference in accuracy is; decided=2: also once it is within 2 points.",
        metavar="decided[=POINTS]",
    ),
}


def with_keys(order: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options for keys of the configuration, which it reads with `configured` from
    its context.

    `order` is that of the help: names of keys, and of the command's own parameters, which win over
    a key's.
    """

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        own = signature(function, eval_str=True)
        context, *rest = own.parameters.values()
        known = {**OPTIONS, **{one.name: one for one in rest}}
        placed = [
            known[name].replace(name=name, kind=Parameter.KEYWORD_ONLY) for name in order.split()
        ]

        @wraps(function)
        def command(**given: Any) -> None:
            function(**{name: value for name, value in given.items() if name in own.parameters})

        command.__dict__["__signature__"] = own.replace(parameters=[context, *placed])
        return command

    return decorated


def flags_of(context: typer.Context, without: str = "") -> dict[str, object]:
    """What a command line says of keys of the configuration, by its parameters that are named like
    one.
    """
    from atts.api import config_keys

    return {
        name: value
        for name, value in context.params.items()
        if name in config_keys() and name != without
    }


def configured(
    context: typer.Context, config: Path | None, pairs: Sequence[str] | None, without: str = ""
) -> Configuration:
    """The configuration of a command line.

    :raises OptionError: see `atts.api.configure`.
    """
    from atts.api import configure

    return configure(flags_of(context, without), pairs or (), file=config)


def named_values(pairs: Sequence[str], option: str, form: str) -> dict[str, str]:
    """The values of a repeatable option such as `--column FIELD=COLUMN`, by name.

    :raises OptionError: one is not of that form.
    """
    found = dict[str, str]()
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not (mark and name):
            raise OptionError(option, f"{pair!r} is not {form}")
        found[name] = value
    return found
