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
"""The keys of `Setup` that have a command-line option, such as --method."""

_KEYS: Mapping[str, str] = {"temperature": "sampling.temperature", "top_p": "sampling.top_p"}
"""Options whose key is inside a table: --temperature sets sampling.temperature."""


def _key(
    help: str, default: str | bool = True, *names: str, kind: Any = str, metavar: str | None = None
) -> Parameter:
    """Return the command-line option that sets a configuration key. Its value is None if the user
    does not give it; `default` is only shown in the help.
    """
    option = typer.Option(None, *names, help=help, show_default=default, metavar=metavar)
    return Parameter("key", Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


_DATASET = typer.Argument(
    None,
    help="Dataset: the name of a benchmark, a file, or hub:OWNER/NAME; [:50] after it selects the "
    "first 50 problems.",
    show_default="arithmetic[:40]",
)
OPTIONS: Mapping[str, Parameter] = {
    "method": _key(
        "Method: atts (escalate the chunks with the worst scores), draft-only, target-only, "
        "exact (like target-only, with tokens proposed by the draft), coin (escalate at "
        "random), or another method: cascade, trial, top-b, spec-reason, speculative-thinking, "
        "deep-conf, paper-marginal, paper-conditional.",
        "atts",
    ),
    "rate": _key("Share of chunks to escalate to the target.", "0.2", kind=float),
    "samples": _key("Rollouts per problem.", "8", "--samples", "--epochs", kind=int),
    "turns": _key(
        "Largest number of turns per rollout. In each turn, the draft writes a chunk, the "
        "target scores it, and a gate accepts or escalates it.",
        "enough for --max-tokens",
        kind=int,
    ),
    "max_tokens": _key("Largest number of tokens per rollout.", "depends on the models", kind=int),
    "thinking_tokens": _key(
        "Largest number of tokens that a rollout spends on thinking; then it must write its "
        "answer.",
        "no limit",
        kind=int,
    ),
    "temperature": _key("Temperature of both models.", "0.7", kind=float),
    "top_p": _key(
        "Sample only from the smallest set of most likely tokens whose probabilities add up to "
        "this value.",
        "1",
        kind=float,
    ),
    "combine": _key(
        "How to answer a problem if its rollouts disagree: vote (take the most frequent "
        "answer), select (the target chooses one of the answers), synthesize (the target "
        "writes a new solution), auto (vote until selection proves better, then select).",
        "vote",
    ),
    "early_stop": _key(
        "When to cancel the remaining rollouts: none (never), certain (the vote cannot "
        "change), likely (the vote is unlikely to change).",
        "certain",
    ),
    "rate_scope": _key(
        "Where the escalation rate is controlled: within each question (question), within each "
        "turn of a question (question-turn), or over the whole run (aci, marginal, split). aci "
        "adapts its threshold, marginal compares each score with all earlier scores, and split "
        "compares each score only with the stored scores.",
        "aci",
    ),
    "scores": _key("Calibration scores to start from: a file or a run directory.", metavar="FILE"),
    "pair": _key(
        "Name of a pair of draft and target models; `atts pairs` lists the names.", "none"
    ),
    "backend": _key(
        "Where the models of --pair run: vllm or sglang (servers on this machine), or local "
        "(in this process).",
        "vllm",
    ),
    "draft": _key(
        "Draft model: embedded (comes with atts), scripted (a toy model "
        "without weights), hf:MODEL (loaded in this process), or a server such as vllm:URL or "
        "sglang:URL.",
        "embedded",
    ),
    "target": _key("Target model, in the same formats as --draft.", "embedded"),
    "dataset": Parameter(
        "dataset", Parameter.KEYWORD_ONLY, default=_DATASET, annotation=str | None
    ),
    "limit": _key("Number of problems to run, starting with the first.", "all", kind=int),
    "file": _key(
        "Read the benchmark from this file instead of downloading it from the Hugging Face hub."
    ),
    "column": _key(
        "Column of the dataset's file that contains a field: text=Question reads each "
        "problem's text from the column Question; repeatable.",
        kind=list[str],
    ),
    "grader": _key(
        "Function that grades answers, as package.module:function; atts calls it with an "
        "answer and its problem.",
        "depends on the kind of answer",
        metavar="FUNCTION",
    ),
    "references": _key(
        "Whether problems need a reference answer: required (a problem without one is an "
        "error), optional (problems without one also run).",
        "required",
        "--answers",
        "--references",
    ),
    "seed": _key("Random seed.", "0", kind=int),
    "concurrency": _key(
        "Largest number of rollouts that run at the same time, over all problems.", "64", kind=int
    ),
    "out": _key(
        "Directory of the run; if the run was interrupted, the same command continues it.",
        "a new directory below runs/",
        metavar="DIRECTORY",
    ),
    "report": _key(
        "Format of the report that is written when the run ends: html, markdown, json, or none "
        "(no report).",
        "html",
    ),
    "log": _key(
        "Experiment tracker that also receives the run's metrics: wandb, mlflow, tensorboard, "
        "trackio or otel (OpenTelemetry); repeatable.",
        "none",
        kind=list[str],
        metavar="NAME[:PROJECT]",
    ),
    "abstain": _key(
        "Leave a problem unanswered if its rollouts agree too little. With 0.1@0.9, at most 10 "
        "% of the given answers are wrong, with probability 0.9. Needs --labelled.",
        metavar="RISK@PROBABILITY",
    ),
    "labelled": _key(
        "Directory of a graded run with the same settings; --abstain takes its threshold from it.",
        metavar="RUN",
    ),
    "max_cost": _key(
        "Stop the run after spending this many dollars, at the prices given by --set prices=FILE.",
        kind=float,
    ),
    "max_total_tokens": _key(
        "Stop the run after this many tokens, counting the prompts, scored texts and "
        "completions of all calls.",
        True,
        kind=int,
    ),
    "max_seconds": _key(
        "Stop the run after this many seconds. In a resumed run, the time of earlier sessions "
        "also counts.",
        kind=float,
    ),
    "compare_to": _key(
        "Directory of an earlier run on the same problems; --stop-when compares "
        "the accuracy of this run with that of the earlier run.",
        metavar="RUN",
    ),
    "on_unscored": _key(
        "What to do if many chunks in a row have no usable score: stop (end the run and keep "
        "its work), escalate (the target rewrites such chunks).",
        "stop",
    ),
    "give_up_after": _key(
        "Seconds to wait for a lost server before the run ends; the same command then resumes "
        "the run.",
        "3600",
        kind=float,
        metavar="SECONDS",
    ),
    "stop_when": _key(
        "When to stop the run early: decided (once its accuracy is shown to be higher or lower "
        "than that of the --compare-to run), decided=2 (also once the two accuracies are shown "
        "to differ by at most 2 points).",
        metavar="decided[=POINTS]",
    ),
}


def with_keys(order: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds to a command the options for configuration keys. `configured`
    later reads the values of these options.

    `order` lists the options in the order of the help. Each name is a configuration key or a
    parameter of the command; if it is both, the parameter defines the option.
    """

    # Typer reads the options of a command from the signature of its function. So this code makes a
    # signature that also contains the options of the configuration keys.
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


def key_of(option: str) -> str:
    """Return the configuration key that an option would set if a command had it.

    >>> key_of("--max-tokens"), key_of("--top-p")
    ('max_tokens', 'sampling.top_p')
    """
    name = option.lstrip("-").replace("-", "_")
    return _KEYS.get(name, name)


def flags_of(context: typer.Context, without: str = "") -> dict[str, object]:
    """Return the configuration keys and values that were set by options on the command line."""
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

    :raises OptionError: a key or a value is not valid; see `atts.api.configure`.
    """
    from atts.api import configure

    return configure(flags_of(context, without), pairs or (), file=config)


def named_values(pairs: Sequence[str], option: str, form: str) -> dict[str, str]:
    """Return the values of a repeatable option such as `--column FIELD=COLUMN`, keyed by name.

    :raises OptionError: a value does not have the form NAME=VALUE.
    """
    values = dict[str, str]()
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not (mark and name):
            raise OptionError(option, f"{pair!r} is not {form}")
        values[name] = value
    return values
