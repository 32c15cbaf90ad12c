"""Command-line options that several commands share, and the configuration that they make."""

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

RunDirectory = Annotated[Path, typer.Argument(help="Run directory, as given to `atts eval --out`.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
ObjectJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="TOML file of settings.", show_default="atts.toml if there is one"
    ),
]
Pairs = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Set any configuration key, such as sampling.temperature=0.6; repeatable.",
        metavar="KEY=VALUE",
    ),
]
SETUP = (
    "method rate samples turns max_tokens thinking_tokens temperature top_p early_stop combine "
    "rate_scope scores pair backend draft target"
)
"""The keys of a setup that have an option."""

_KEYS: Mapping[str, str] = {"temperature": "sampling.temperature", "top_p": "sampling.top_p"}
"""Keys whose option is named like the last part of the key."""


def _key(
    help: str, default: str | bool = True, *names: str, kind: Any = str, metavar: str | None = None
) -> Parameter:
    """Return the option of a configuration key; its value is None if not given, and help shows the
    default.
    """
    option = typer.Option(None, *names, help=help, show_default=default, metavar=metavar)
    return Parameter("key", Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


_DATASET = typer.Argument(
    None,
    help="Benchmark, file or hub:owner/name; a slice may follow: math500[:50].",
    show_default="arithmetic[:40]",
)
OPTIONS: Mapping[str, Parameter] = {
    "method": _key("Method: atts, or a baseline such as draft-only, target-only, top-b.", "atts"),
    "rate": _key("Share of chunks to escalate to the target.", "0.2", kind=float),
    "samples": _key("Rollouts per problem.", "8", "--samples", "--epochs", kind=int),
    "turns": _key(
        "Most turns per rollout; a turn is a draft, a score and a decision.",
        "as --max-tokens needs",
        kind=int,
    ),
    "max_tokens": _key("Most tokens per rollout.", "by the models", kind=int),
    "thinking_tokens": _key(
        "Most tokens of a rollout before it must stop thinking and answer.",
        "no limit",
        kind=int,
    ),
    "temperature": _key("Temperature of both models.", "0.7", kind=float),
    "top_p": _key(
        "Sample only from the most likely tokens with this total probability.", "1", kind=float
    ),
    "combine": _key(
        "Way to answer a problem with a split vote: vote, select, synthesize, or auto.",
        "vote",
    ),
    "early_stop": _key(
        "When to cancel the remaining rollouts: none (never), certain (the vote cannot "
        "change), likely.",
        "certain",
    ),
    "rate_scope": _key(
        "Scope of the rate: aci (the whole run), question (each question), ...", "aci"
    ),
    "scores": _key("Calibration scores to start from: a file, or a run directory.", metavar="FILE"),
    "pair": _key("Name of a pair of draft and target; see `atts pairs`.", "none"),
    "backend": _key(
        "Place of the models of --pair: vllm or sglang (servers on this machine), or local (in "
        "this process).",
        "vllm",
    ),
    "draft": _key(
        "Draft model: embedded, scripted, hf:MODEL, vllm:URL, sglang:URL, ...", "embedded"
    ),
    "target": _key("Target model, in the same formats as --draft.", "embedded"),
    "dataset": Parameter(
        "dataset", Parameter.KEYWORD_ONLY, default=_DATASET, annotation=str | None
    ),
    "limit": _key("Number of problems to run, starting with the first.", "all", kind=int),
    "file": _key("Read the benchmark from this file instead of the hub."),
    "column": _key(
        "Column of a file for a field, such as text=Question; repeatable.", kind=list[str]
    ),
    "grader": _key(
        "Function that grades answers: package.module:function, called with an answer and its problem.",
        "by the kind of answer",
        metavar="FUNCTION",
    ),
    "references": _key(
        "optional: also run problems without a reference answer.",
        "required",
        "--answers",
        "--references",
    ),
    "seed": _key("Random seed.", "0", kind=int),
    "concurrency": _key("Rollouts in flight at once, over all problems.", "64", kind=int),
    "out": _key(
        "Run directory; the same command continues the run in it.",
        "one below runs/",
        metavar="DIRECTORY",
    ),
    "report": _key("Report written at the end: html, markdown, json or none.", "html"),
    "log": _key(
        "Tracker for the run's numbers: wandb, mlflow, tensorboard, trackio, otel; repeatable.",
        "none",
        kind=list[str],
        metavar="NAME[:PROJECT]",
    ),
    "abstain": _key(
        "Abstain from unsure problems, so that at most this share of answers is wrong; needs "
        "--labelled.",
        metavar="RISK@PROBABILITY",
    ),
    "labelled": _key("Graded run of the same settings that certifies --abstain.", metavar="RUN"),
    "max_cost": _key(
        "Dollars after which the run stops, by the prices in --set prices=FILE.", kind=float
    ),
    "max_total_tokens": _key(
        "Tokens after which the run stops: prompts and completions of all calls.",
        True,
        kind=int,
    ),
    "max_seconds": _key(
        "Seconds after which the run stops, over all sessions together.", kind=float
    ),
    "compare_to": _key("Earlier run to compare with, for --stop-when.", metavar="RUN"),
    "on_unscored": _key(
        "Action if the target stops giving usable scores: stop the run, or escalate chunks "
        "without a score.",
        "stop",
    ),
    "give_up_after": _key(
        "Seconds to wait for a lost server; then the run ends, and the same command resumes it.",
        "3600",
        kind=float,
        metavar="SECONDS",
    ),
    "stop_when": _key(
        "Stop early when the run is shown to differ from --compare-to (decided); with decided=2, "
        "also when the difference is shown to be at most 2 points.",
        metavar="decided[=POINTS]",
    ),
}


def with_keys(order: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options for configuration keys, which `configured` reads.

    `order` is the order of the help. It has the names of keys and of the command's parameters; a
    parameter replaces the key of the same name.
    """

    # Typer reads the options from a function's signature. This builds a signature from the options
    # of the keys and the parameters of the command.
    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        inner = signature(function, eval_str=True)
        context, *rest = inner.parameters.values()
        known = {**OPTIONS, **{one.name: one for one in rest}}
        placed = [
            known[name].replace(name=name, kind=Parameter.KEYWORD_ONLY) for name in order.split()
        ]

        @wraps(function)
        def command(**given: Any) -> None:
            function(**{name: value for name, value in given.items() if name in inner.parameters})

        command.__dict__["__signature__"] = inner.replace(parameters=[context, *placed])
        return command

    return decorated


def flags_of(context: typer.Context, without: str = "") -> dict[str, object]:
    """Return the configuration keys that a command line sets by the parameters of the same name."""
    from atts.api import config_keys

    flags: dict[str, object] = {}
    for name, value in context.params.items():
        key = _KEYS.get(name, name)
        if key in config_keys() and name != without:
            flags[key] = value
    return flags


def configured(
    context: typer.Context, config: Path | None, pairs: Sequence[str] | None, without: str = ""
) -> Configuration:
    """Return the configuration of a command line.

    :raises OptionError: as in `atts.api.configure`.
    """
    from atts.api import configure

    return configure(flags_of(context, without), pairs or (), file=config)


def named_values(pairs: Sequence[str], option: str, form: str) -> dict[str, str]:
    """Return the values of a repeatable option such as `--column FIELD=COLUMN`, by name.

    :raises OptionError: a value is not of that form.
    """
    values = dict[str, str]()
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not (mark and name):
            raise OptionError(option, f"{pair!r} is not {form}")
        values[name] = value
    return values
