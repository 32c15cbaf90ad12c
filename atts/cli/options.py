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

RunDirectory = Annotated[Path, typer.Argument(help="The run: the directory given to `atts eval --out`.")]
DatasetName = Annotated[
    str | None,
    typer.Argument(help="A benchmark, a file or hub:owner/name; a slice may follow.", show_default="arithmetic[:40]"),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
Seed = Annotated[int | None, typer.Option(help="Of everything random.", show_default="0")]
Rollouts = Annotated[int | None, typer.Option(help="In flight at once, over all problems.", show_default="64")]
Limit = Annotated[int | None, typer.Option(help="Only the first problems.", show_default="all")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A TOML file of settings.", show_default="atts.toml if there is one")
]
Pairs = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any other key, such as sampling.temperature=0.6; repeatable.", metavar="KEY=VALUE"),
]

_SETUP: Mapping[str, Any] = {
    "method": Annotated[
        str | None, typer.Option(help="atts, or a baseline: draft-only, target-only, top-b, ...", show_default="atts")
    ],
    "rate": Annotated[float | None, typer.Option(help="Share of chunks the target takes over.", show_default="0.2")],
    "samples": Annotated[int | None, typer.Option(help="Rollouts per problem.", show_default="8")],
    "turns": Annotated[
        int | None, typer.Option(help="Rounds per rollout, at most.", show_default="as --max-tokens needs")
    ],
    "max_tokens": Annotated[
        int | None, typer.Option(help="Tokens per rollout, at most.", show_default="by the models")
    ],
    "mode": Annotated[
        str | None,
        typer.Option(help="What the rate is held for: aci (the run), turn, question, ...", show_default="aci"),
    ],
    "scores": Annotated[
        str | None, typer.Option(help="Calibration scores to start from: a file, or a run's directory.", metavar="FILE")
    ],
    "pair": Annotated[
        str | None,
        typer.Option(help="Models that work together, by name: `atts pairs` lists them.", show_default="none"),
    ],
    "at": Annotated[
        str | None,
        typer.Option(help="Where a pair's models are: vllm, sglang (servers here) or local.", show_default="vllm"),
    ],
    "draft": Annotated[
        str | None,
        typer.Option(help="embedded, scripted, hf:MODEL, vllm:URL, sglang:URL, server:URL.", show_default="embedded"),
    ],
    "target": Annotated[str | None, typer.Option(help="The same words.", show_default="embedded")],
}


def with_setup(names: str = "", *, before: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put the options of a setup, or those named, in front of option `before`; they are read from the context."""
    chosen = {name: _SETUP[name] for name in names.split() or _SETUP}

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        whole = signature(function, eval_str=True)
        own, at = list(whole.parameters.values()), list(whole.parameters).index(before)
        ours = [Parameter(name, own[at].kind, default=None, annotation=option) for name, option in chosen.items()]

        @wraps(function)
        def command(**given: Any) -> None:
            function(**{name: value for name, value in given.items() if name not in chosen})

        command.__dict__["__signature__"] = whole.replace(parameters=[*own[:at], *ours, *own[at:]])
        return command

    return decorated


def configured(given: Mapping[str, Any], config: Path | None, pairs: Sequence[str] | None) -> Configuration:
    """The configuration of a command line: `given` are its parameters, of which those that are keys count.

    :raises OptionError: see `atts.api.configure`.
    """
    from atts.api import config_keys, configure

    flags = {
        name: str(value) if isinstance(value, Path) else value for name, value in given.items() if name in config_keys()
    }
    return configure(flags, pairs or (), file=config)


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
