"""Runs one evaluation and says what came of it."""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from atts.cli.options import (
    ConfigFile,
    Draft,
    Limit,
    MaxTokens,
    Method,
    Mode,
    Pairs,
    Rate,
    Rollouts,
    Samples,
    Scores,
    Seed,
    Target,
    Turns,
    configured,
)
from atts.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

    from atts.api import Configuration, Forecast
    from atts.api.forecasting import Tokens
    from atts.evaluators import Estimate
    from atts.run import RunResult, Summary

Form = Literal["words", "lines"]
"""For people, or JSON Lines."""


def evaluate(
    context: typer.Context,
    dataset: Annotated[
        str | None,
        typer.Argument(
            help="A benchmark, a file or hub:owner/name; a slice may follow.", show_default="arithmetic[:40]"
        ),
    ] = None,
    method: Method = None,
    rate: Rate = None,
    samples: Samples = None,
    turns: Turns = None,
    max_tokens: MaxTokens = None,
    mode: Mode = None,
    scores: Scores = None,
    draft: Draft = None,
    target: Target = None,
    limit: Limit = None,
    seed: Seed = None,
    rollouts: Rollouts = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Run directory; the same command goes on there.", show_default="one below runs/", metavar="DIRECTORY"
        ),
    ] = None,
    report: Annotated[
        str | None, typer.Option(help="Written at the end: html, markdown, json or none.", show_default="html")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(help="Part 2/3: every third problem from the second on; `atts merge` joins.", metavar="I/N"),
    ] = None,
    config: ConfigFile = None,
    pairs: Pairs = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run and its tokens; run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object per problem, then a summary.")] = False,
) -> None:
    """Evaluate a method on a dataset: the main job.

    Everything is kept in a run directory; the same command goes on where it was, whatever ended it. With no flags: the
    embedded models on generated arithmetic.

    Example: atts eval

    Example: atts eval math500 --draft hf:Qwen/Qwen3-1.7B --target vllm:http://localhost:8000/Qwen/Qwen3-32B --dry-run
    """
    configuration = configured(context.params, config, pairs)
    form: Form = "lines" if as_json else "words"
    raise typer.Exit(foresee(configuration, form) if dry_run else evaluate_and_tell(configuration, shard, form))


def foresee(configuration: Configuration, form: Form) -> int:
    """Say what would run; the exit code."""
    from atts.api import forecast

    would = forecast(configuration)
    print(json.dumps(would.as_json()) if form == "lines" else "\n".join(foretell(would, configuration)))
    return 0


def evaluate_and_tell(configuration: Configuration, shard: str | None, form: Form) -> int:
    """Run it, write its report, say what came of it; the exit code."""
    show = as_lines if form == "lines" else as_table
    try:
        result = run(configuration, shard)
        print("\n".join(show(result, configuration, write_page(result, configuration))))
    except KeyboardInterrupt:  # one that came before the run listened, or after it had ended
        return _not_over("interrupted: everything done is kept", 130)
    if result.status != "finished":
        return _not_over(f"{result.status}: {result.why}", result.exit_code)
    if failed := [line.why for line in result.problems if line.status == "failed"]:
        text = f"{len(failed)} of {len(result.problems)} problems failed, as in {failed[0]}"
        return _not_over(text, EngineError.exit_code if len(failed) == len(result.problems) else 0)
    return 0


def _not_over(why: str, code: int) -> int:
    with _uncut():
        print(f"atts: {why}; the same command goes on from here", file=sys.stderr)
    return code


@contextmanager
def _uncut() -> Generator[None]:
    """It ends here anyway: one more Ctrl-C may not cut its last words."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(configuration: Configuration, shard: str | None = None) -> RunResult:
    """The evaluation or a part of it, to its end or until somebody ends it."""
    import anyio

    from atts.api import evaluate as evaluation
    from atts.cli.progress import shown
    from atts.journal import JOURNAL
    from atts.run import Progress, Session, Shard

    part = None if shard is None else Shard.parse(shard)
    directory = configuration.directory
    if part is not None and configuration.job.out is None:  # parts of one evaluation, side by side
        directory = directory.with_name(f"{directory.name}-{part.number}-of-{part.of}")
    job, setup, progress = configuration.job, configuration.setup(), Progress()
    if (directory / JOURNAL).exists():
        print(f"atts: going on where {directory} was; what is done there is not run again", file=sys.stderr)
    session = Session(listeners=(progress,))

    async def main() -> RunResult:
        async with shown(progress):
            return await evaluation(
                job.dataset, setup, limit=job.limit, directory=directory, session=session, shard=part
            )

    return anyio.run(main)


def write_page(result: RunResult, configuration: Configuration) -> Path | None:
    """The report, unless nobody wants one."""
    kind = configuration.job.report
    if kind == "none":
        return None
    from atts.api import report

    return report(result, format=kind)


def foretell(would: Forecast, configuration: Configuration) -> list[str]:
    """The forecast in lines for people."""
    output = "new"
    if would.done:
        output = f"{would.done} of {would.problems} problems are done there"
    lines = [
        f"{would.dataset}: {would.problems} problems x {configuration['samples']} rollouts, method "
        f"{configuration['method']}, rate {configuration['rate']:g}",
        f"  draft     {configuration['draft']}",
        f"  target    {configuration['target']}",
        f"  output    {would.directory} ({output})",
    ]
    if would.expected is not None:
        lines.append(f"  about     {_tokens(would.expected)}")
    lines += [f"            {would.basis}", f"  at most   {_tokens(would.at_most)}"]
    lines.append("Nothing was run.")
    return lines


def _tokens(sums: Tokens) -> str:
    return f"{sums.draft:,.0f} tokens by the draft, {sums.scored:,.0f} scored, {sums.target:,.0f} by the target"


def as_lines(result: RunResult, configuration: Configuration, page: Path | None) -> list[str]:
    """One JSON object per problem, then the summary: what `atts compare` reads."""
    from atts.analysis import strict
    from atts.run import summarise

    summary = {
        "type": "summary",
        "status": result.status,
        "method": configuration["method"],
        "nominal_rate": configuration["rate"],
        "directory": str(result.directory),
        "report": None if page is None else str(page),
        **summarise(result).as_json(),
    }
    problems = ({"type": "problem", **line.as_json()} for line in result.problems)
    return [json.dumps(strict(line)) for line in (*problems, summary)]


def as_table(result: RunResult, configuration: Configuration, page: Path | None) -> list[str]:
    """The summary in lines for people, then where to read on."""
    from atts.run import summarise

    head = f"{configuration['method']} on {configuration['dataset']}: "
    lines = describe(head, configuration["rate"], summarise(result))
    return [*lines, f"{'run':<20}{result.directory}", *([f"{'report':<20}{page}"] if page is not None else [])]


def describe(head: str, rate: float, summary: Summary) -> list[str]:
    """The summary in lines for people."""
    usage = summary.usage
    rows = [
        ("answers right", f"{_rate(summary.answers)}   the vote of each problem's rollouts"),
        ("rollouts right", f"{_rate(summary.samples_right)}   each by itself"),
        ("chunks handed over", f"{_rate(summary.rate)}   asked for: {rate:g}"),
        ("tokens written", f"{usage.draft_tokens:,} by the draft, {usage.target_tokens:,} by the target"),
        ("", f"{summary.target_share:.1%} of them by the target; {usage.wasted_tokens:,} were thrown away"),
        ("tokens scored", f"{usage.scored_tokens:,} by the target"),
        ("failed", f"{summary.failed} problems" if summary.failed else ""),
        ("without an answer", f"{summary.unanswered} problems" if summary.unanswered else ""),
    ]
    return [
        f"{head}{summary.problems} problems, {summary.samples} rollouts, {summary.seconds:.1f} s",
        "",
        *(f"{name:<20}{words}" for name, words in rows if words),
        "Brackets are 95 % intervals over problems.",
        "",
    ]


def _rate(found: Estimate) -> str:
    if math.isnan(found.value):
        return "nothing to count    "
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"
