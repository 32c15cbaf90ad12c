"""The command `atts solve`: one problem, with the reasoning shown as it is written."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atts.cli import options
from atts.cli.terminal import print_json, sanitized, tell
from atts.errors import OptionError, UsageError
from atts.interrupts import run_async

if TYPE_CHECKING:
    from rich.console import Console

    from atts.core import Decision, Outcome
    from atts.run import Notice, RunResult

_STYLES = {
    "draft": "dim",
    "accepted": "green",
    "escalated": "red",
    "target": "bold cyan",
    "answer": "bold",
}
_KINDS = ("math", "choice", "text")


@options.with_keys(f"problem kind follow {options.SETUP} seed config pairs as_json")
def solve(
    context: typer.Context,
    problem: Annotated[
        str, typer.Argument(help="Text of the problem, a file that contains it, or - for stdin.")
    ],
    kind: Annotated[str, typer.Option(help="Kind of the answer: math, choice or text.")] = "math",
    follow: Annotated[str, typer.Option(help="Rollout to show: a number, or all.")] = "0",
    config: options.ConfigFile = None,
    pairs: options.Pairs = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the events of every rollout, one JSON object per line."),
    ] = False,
) -> None:
    """Solve one problem and show the reasoning as it is written.

    Each chunk is labelled with its author: the draft, whose chunks are accepted or escalated, or
    the target, which replaces escalated chunks. On a terminal the labels have colours.

    Example: atts solve "What is (17 + 25) * 3?"

    Example: atts solve - --samples 4 --json < problem.txt
    """
    from atts.api import evaluate
    from atts.core import Problem

    if kind not in _KINDS:
        raise OptionError("kind", f"{kind!r} is not a kind of answer", _KINDS, kind)
    asked = Problem("problem", text_of(problem), kind=kind)  # type: ignore[arg-type]  # checked above
    setup = options.configured(context, config, pairs).setup().informed()
    for text in setup.warnings:
        tell(f"atts: {text}")
    printer: StoryPrinter | EventPrinter
    if as_json:
        printer = EventPrinter()
    else:
        printer = StoryPrinter(follow, setup.policy.samples)

    async def main() -> RunResult:
        async with evaluate([asked], setup) as run:
            async for event in run:
                printer.show(event)
            return await run.result()

    result = run_async(main)
    outcomes = list(result.outcomes())
    if outcomes:
        printer.end(outcomes[0])
    if result.truncation.warning:
        tell(f"atts: {result.truncation.warning}")
    if result.status in ("incomplete", "failed"):
        tell(f"atts: {result.why}")
    raise typer.Exit(result.exit_code)


def text_of(problem: str) -> str:
    """Return the text of a problem given as text, as a file or as - for stdin.

    :raises UsageError: stdin has no text, or bytes that are not text.
    """
    named = Path(problem)
    try:
        is_file = len(problem) < 1024 and named.is_file()
    except OSError:  # the file system does not accept the name
        is_file = False
    text = problem
    try:
        if problem == "-":
            text = sys.stdin.read()
        elif is_file:
            text = named.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{problem}: this is not text in UTF-8 ({error.reason} at byte {error.start})"
        ) from error
    if not text.strip():
        raise UsageError(
            "the problem is empty; give its text, a file that contains it, or - for stdin"
        )
    return text.strip()


class StoryPrinter:
    """A view of the reasoning of one rollout, or of all, in which each chunk has a label."""

    def __init__(self, follow: str, samples: int) -> None:
        """Check that the rollout to follow exists.

        :raises OptionError: no such rollout.
        """
        from rich.console import Console

        if follow != "all" and not (follow.isdecimal() and int(follow) < samples):
            raise OptionError(
                "follow", f"{follow!r} is not a rollout; give a number below {samples}, or all"
            )
        self._follow = None if follow == "all" else int(follow)
        self._console: Console = Console(highlight=False, soft_wrap=True)

    def show(self, event: Notice) -> None:
        """Show an event of a rollout that is followed."""
        from atts.journal import Decided
        from atts.run import ChunkWritten

        if isinstance(event, ChunkWritten) and self._follows(event.sample):
            self._say(event.chunk.author, event.sample, event.chunk.text)
        elif (
            isinstance(event, Decided)
            and event.decision.action != "verify"
            and self._follows(event.decision.sample)
        ):
            decision = event.decision
            self._say(
                "escalated" if decision.escalate else "accepted",
                decision.sample,
                _because(decision),
            )

    def end(self, outcome: Outcome) -> None:
        """Show the answer, the votes and the cost."""
        usage = outcome.usage
        ends = Counter(rollout.finish for rollout in outcome.rollouts)
        votes = ", ".join(f"{answer} ({weight:g})" for answer, weight in outcome.votes.items())
        num_settled = ends["settled"]
        self._console.print()
        self._say("answer", None, outcome.answer if outcome.answer is not None else "none")
        self._fact("votes", votes or "none" + (f"; {outcome.why}" if outcome.why else ""))
        if outcome.doubt:
            self._fact("doubt", outcome.doubt)
        settled = ""
        if num_settled:
            settled = f", {num_settled} of them cancelled once the vote was settled"
        self._fact("rollouts", f"{len(outcome.rollouts)}{settled}")
        scored = f"{usage.scored_tokens:,} scored"
        self._fact(
            "tokens",
            f"{usage.draft_tokens:,} by the draft, {usage.target_tokens:,} by the target, {scored}",
        )

    def _follows(self, sample: int) -> bool:
        return self._follow is None or sample == self._follow

    def _say(self, label: str, sample: int | None, text: str) -> None:
        from rich.text import Text

        number = f"{sample} " if sample is not None and self._follow is None else ""
        lines = [""]  # a chunk of white space is shown as a single space
        if text.strip():
            lines = sanitized(text).rstrip("\n").split("\n")
        for line in lines:
            self._console.print(
                Text.assemble((f"{number}{label:<10}│ ", "dim"), (line, _STYLES[label]))
            )

    def _fact(self, label: str, text: str) -> None:
        self._console.print(f"{label:<10}  {sanitized(text)}", markup=False)


def _short(score: float) -> str:
    """Return a short text of a score; a product over many tokens is written as a power of e."""
    if score < 1000 or math.isinf(score):
        return f"{score:.3f}"
    return f"e^{math.log(score):.1f}"


def _because(decision: Decision) -> str:
    parts = list[str]()
    if decision.score is not None:
        parts.append(f"score {_short(decision.score)}")
    if decision.why:
        parts.append(decision.why)
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class EventPrinter:
    """A view of every event as JSON, for programs."""

    def show(self, event: Notice) -> None:
        """Print one object per chunk, decision and rollout."""
        line = _line(event)
        if line is not None:
            print_json(line)

    def end(self, outcome: Outcome) -> None:
        """Print the outcome."""
        from dataclasses import asdict

        facts = {name: getattr(outcome, name) for name in ("answer", "status", "why", "doubt")}
        print_json(
            {
                "type": "outcome",
                **facts,
                "votes": dict(outcome.votes),
                "usage": asdict(outcome.usage),
            }
        )


def _line(event: Notice) -> dict[str, Any] | None:
    from atts.journal import Decided, RolloutFinished, TurnFinished
    from atts.run import ChunkWritten

    if isinstance(event, ChunkWritten):
        chunk = event.chunk
        position = {"sample": event.sample, "turn": event.turn}
        return {
            "type": chunk.author,
            **position,
            "text": chunk.text,
            "ended": chunk.ended,
            "tokens": chunk.tokens,
        }
    if isinstance(event, Decided) and event.decision.action != "verify":
        decision = event.decision
        facts = {
            name: getattr(decision, name)
            for name in ("sample", "turn", "score", "p", "rate", "why")
        }
        return {"type": "escalated" if decision.escalate else "accepted", **facts}
    if isinstance(event, TurnFinished):
        turn = event.turn
        text = "".join(chunk.text for chunk in turn.chunks)
        return {
            "type": "turn",
            "sample": event.sample,
            "turn": turn.index,
            "text": text,
            "note": turn.remark,
        }
    if isinstance(event, RolloutFinished):
        return {
            "type": "rollout",
            "sample": event.sample,
            "finish": event.finish,
            "answer": event.answer,
            "is_fallback_answer": event.is_fallback_answer,
        }
    return None
