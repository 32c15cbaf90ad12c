"""The command `atts solve`, which solves a problem and shows the reasoning while it is written."""

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
    kind: Annotated[
        str,
        typer.Option(
            help="Kind of the answer: math (a number or formula), choice (the letter of a choice), "
            "text (words)."
        ),
    ] = "math",
    follow: Annotated[
        str,
        typer.Option(
            help="Rollout whose reasoning to show: its number (the first rollout is 0), or all."
        ),
    ] = "0",
    config: options.ConfigFile = None,
    pairs: options.Pairs = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the events of all rollouts, one JSON object per line."),
    ] = False,
) -> None:
    """Solve one problem, and show the reasoning while it is written.

    Each chunk has a label: draft for a chunk that the draft wrote, accepted or escalated for the
    decision on the chunk, and target for a chunk that the target wrote. On a terminal the labels
    have colours.

    Example: atts solve "What is (17 + 25) * 3?"

    Example: atts solve - --samples 4 --json < problem.txt
    """
    from atts.api import evaluate
    from atts.core import Problem

    if kind not in _KINDS:
        raise OptionError("--kind", f"{kind!r} is not a kind of answer", _KINDS, kind)
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
    """Return the problem's text from the command-line argument, which is the text, a file, or - for
    stdin.

    :raises UsageError: stdin is empty, or contains bytes that are not UTF-8 text.
    """
    named = Path(problem)
    try:
        is_file = len(problem) < 1024 and named.is_file()
    # A problem's text may contain characters that the file system does not allow in a name.
    except OSError:
        is_file = False
    text = problem
    try:
        if problem == "-":
            text = sys.stdin.read()
        elif is_file:
            text = named.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{problem} is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error
    if not text.strip():
        raise UsageError(
            "the problem is empty; give its text, a file that contains it, or - for stdin"
        )
    return text.strip()


class StoryPrinter:
    """A printer of the reasoning of one rollout or of all rollouts; each chunk gets a label."""

    def __init__(self, follow: str, samples: int) -> None:
        """Check that the rollout to show exists.

        :raises OptionError: there is no rollout with this number.
        """
        from rich.console import Console

        if follow != "all" and not (follow.isdecimal() and int(follow) < samples):
            raise OptionError(
                "--follow",
                f"there is no rollout {follow!r}; give all, or a whole number from 0 up to but "
                f"not including {samples}",
            )
        self._follow = None if follow == "all" else int(follow)
        self._console: Console = Console(highlight=False, soft_wrap=True)

    def show(self, event: Notice) -> None:
        """Print an event if it belongs to a rollout that is shown."""
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
        """Print the answer, the votes and the cost."""
        usage = outcome.usage
        ends = Counter(rollout.finish for rollout in outcome.rollouts)
        votes = ", ".join(f"{answer} ({weight:g})" for answer, weight in outcome.votes.items())
        num_settled = ends["settled"]
        self._console.print()
        self._say("answer", None, outcome.answer if outcome.answer is not None else "none")
        self._fact("votes", (votes or "none") + (f"; {outcome.why}" if outcome.why else ""))
        shown = [rollout for rollout in outcome.rollouts if rollout.sample == self._follow]
        if len(outcome.rollouts) > 1 and shown:
            [rollout] = shown
            ended = "no answer" if rollout.answer is None else f"answer {rollout.answer}"
            self._fact(
                "shown",
                f"rollout {rollout.sample} ({ended}); --follow all shows all "
                f"{len(outcome.rollouts)} rollouts",
            )
        if outcome.doubt:
            self._fact("doubt", outcome.doubt)
        settled = ""
        if num_settled:
            settled = f", {num_settled} of them cancelled because the vote was settled"
        self._fact("rollouts", f"{len(outcome.rollouts)}{settled}")
        scored = f"{usage.scored_tokens:,} scored"
        if len(outcome.rollouts) > 1:
            scored += ", in all rollouts together"
        self._fact(
            "tokens",
            f"{usage.draft_tokens:,} by the draft, {usage.target_tokens:,} by the target, {scored}",
        )

    def _follows(self, sample: int) -> bool:
        return self._follow is None or sample == self._follow

    def _say(self, label: str, sample: int | None, text: str) -> None:
        from rich.text import Text

        number = f"{sample} " if sample is not None and self._follow is None else ""
        lines = [""]  # If a chunk is only white space, show one empty line.
        if text.strip():
            lines = sanitized(text).rstrip("\n").split("\n")
        for line in lines:
            self._console.print(
                Text.assemble((f"{number}{label:<10}│ ", "dim"), (line, _STYLES[label]))
            )

    def _fact(self, label: str, text: str) -> None:
        self._console.print(f"{label:<10}  {sanitized(text)}", markup=False)


def _short(score: float) -> str:
    """Return a score as a short string; a very large score is written as a power of e."""
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
    """A printer of all events as JSON lines for programs."""

    def show(self, event: Notice) -> None:
        """Print a JSON object if the event is a chunk, a decision or the end of a rollout."""
        line = _line(event)
        if line is not None:
            print_json(line)

    def end(self, outcome: Outcome) -> None:
        """Print the outcome of the problem as a JSON object."""
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
