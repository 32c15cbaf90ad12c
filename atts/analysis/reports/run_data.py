"""The data that a report needs from a run's journal; the journal is read only once."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atts.analysis.steps import GateStep, StepLog, Steps
from atts.core import Decision, Outcome, Problem, Rollout, Turn
from atts.files import jsonable
from atts.journal import (
    FACTS,
    CallFailed,
    CallSpan,
    Decided,
    Drifted,
    Entry,
    Event,
    FinishedProblem,
    FinishedSample,
    Observed,
    ProblemSpan,
    ProblemStarted,
    RecordedRun,
    RunState,
    SessionOpened,
    Warned,
    open_run,
)

# possible limits on the characters of a chunk; a page uses the largest limit at which it is small
# enough
_LIMITS = (4000, 1500, 600, 240, 80, 0)
# The bytes of a file are divided by the number of problems, or by this number if there are fewer
# problems. So no page is very large.
_FEWEST = 40
MOST = 5000
"""The largest number of problems that a page lists. A browser sorts and filters this many rows
without a delay.
"""


class Pages:
    """One page per problem, stored as JSON that is compressed (raw deflate) and encoded in base64.

    The encoding prevents a browser from interpreting a model's output as markup.
    """

    def __init__(self, budget: int, problems: int) -> None:
        """Divide `budget` bytes among the pages of this number of problems."""
        self._each = budget // max(min(problems, MOST), _FEWEST)
        self._packed: dict[str, str] = {}
        # Number of stored pages. True: of problems that a reader looks for first, because they are
        # not correct or have a flag. False: of all other problems.
        self._counts = {True: 0, False: 0}
        self.shortened = 0  # number of pages whose texts were shortened to fit
        # the smallest limit on the characters of a chunk that any page needed so far
        self.limit = _LIMITS[0]

    def add(
        self, outcome: Outcome, flags: Mapping[int, tuple[str, ...]], brief: FinishedProblem
    ) -> None:
        """Store the page of a problem, with its texts shortened until the page fits into its share
        of the budget.

        The page is not stored if there is no budget, or if enough pages of problems of this kind
        are stored.
        """
        is_wanted = looked_for(brief.verdict, flags.values())
        if not self._each or self._counts[is_wanted] >= MOST:
            return
        self._counts[is_wanted] += 1
        turns = (turn for rollout in outcome.rollouts for turn in rollout.turns)
        longest = max(
            (len(chunk.text) for turn in turns for chunk in (*turn.chunks, *turn.discarded)),
            default=0,
        )
        packed = ""
        limit = longest
        for limit in (longest, *(limit for limit in _LIMITS if limit < longest)):
            packed = pack(_story(outcome, flags, brief, limit))
            if len(packed) <= self._each:
                break
        if limit < longest:
            self.shortened += 1
            self.limit = min(self.limit, limit)
        self._packed[outcome.problem.id] = packed

    def shown(self, problems: Sequence[tuple[str, bool]]) -> Collection[str]:
        """Return the names of the problems to list. `problems` has pairs of a problem's name and
        whether readers look for this problem first.

        If there are more than `MOST` problems, only problems with a page are listed. The first of
        them are those that readers look for first.
        """
        names = [name for name, _ in problems]
        if len(problems) <= MOST:
            return names
        wanted = [name for name, is_wanted in problems if is_wanted and name in self._packed]
        others = [name for name, is_wanted in problems if not is_wanted and name in self._packed]
        return [*wanted, *others][:MOST]

    def __getitem__(self, problem: str) -> str:
        """Return the packed page of a problem; "" if the problem has no page."""
        return self._packed.get(problem, "")


def looked_for(verdict: str | None, flags: Iterable[tuple[str, ...]]) -> bool:
    """Return True if readers look for this problem first, because it is not correct or one of its
    rollouts has a flag.
    """
    return verdict != "correct" or any(flags)


def pack(story: Mapping[str, Any]) -> str:
    """Convert data to JSON, compress it (raw deflate) and encode it in base64; a browser can undo
    this.
    """
    try:
        text = _plain(story)
    # The data contain NaN or an infinity, which JSON does not allow. These numbers are rare, and
    # searching all data for them first would be slow.
    except ValueError:
        text = _plain(jsonable(story))
    squeezer = zlib.compressobj(6, zlib.DEFLATED, -15)
    body = squeezer.compress(text.encode("utf-8", "replace")) + squeezer.flush()
    return base64.b64encode(body).decode("ascii")


def _plain(story: Mapping[str, Any]) -> str:
    return json.dumps(story, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _story(
    outcome: Outcome, flags: Mapping[int, tuple[str, ...]], brief: FinishedProblem, limit: int
) -> dict[str, Any]:
    problem = outcome.problem
    return {
        "id": problem.id,
        "text": shorten(problem.text, max(limit, 600)),
        "reference": problem.answer,
        "answer": outcome.answer,
        "status": outcome.status,
        "why": outcome.why,
        "verdict": brief.verdict,
        "rule": brief.rule,
        "votes": [[shorten(answer, 200), weight] for answer, weight in outcome.votes.items()],
        "rollouts": [_rollout_row(rollout, flags.get(rollout.sample, ()), one, limit)
                     for rollout, one in zip(outcome.rollouts, brief.samples, strict=True)],
    }  # fmt: skip


def _rollout_row(
    rollout: Rollout, flags: tuple[str, ...], brief: FinishedSample, limit: int
) -> dict[str, Any]:
    begin = max((turn.index for turn in rollout.turns if turn.restarts), default=0)
    return {
        "n": rollout.sample,
        "finish": rollout.finish or "cancelled",
        "answer": rollout.answer,
        "verdict": brief.verdict,
        "rule": brief.rule,
        "error": rollout.error,
        "flags": flags,
        "draft": rollout.usage.draft_tokens,
        "target": rollout.usage.target_tokens,
        "turns": [_turn(turn, limit, is_kept=turn.index >= begin) for turn in rollout.turns],
    }


def _turn(turn: Turn, limit: int, *, is_kept: bool) -> dict[str, Any]:
    """Return a turn as data for the page; `is_kept` is False for a turn that was discarded when the
    rollout started again.
    """
    decision = turn.decision
    return {
        "i": turn.index,
        "score": turn.score,
        "p": decision.p if decision else None,
        "action": decision.action if decision else None,
        "why": decision.why if decision else "",
        "note": turn.remark,
        "chunks": list(_chunks(turn, limit, "kept" if is_kept else "discarded")),
    }


def _chunks(turn: Turn, limit: int, fate_of_text: str) -> Iterator[list[Any]]:
    """Yield a list for each chunk, discarded chunks first: author, fate (kept, escalated or
    discarded), text, token count and reason for its end.
    """
    escalated = turn.decision is not None and turn.decision.escalate
    for fate, chunks in (("discarded", turn.discarded), (fate_of_text, turn.chunks)):
        for chunk in chunks:
            what = (
                fate
                if fate == "discarded" or not (escalated and chunk.author == "draft")
                else "escalated"
            )
            yield [chunk.author, what, shorten(chunk.text, limit), chunk.tokens, chunk.ended]


def shorten(text: str, limit: int) -> str:
    """Return a text; if the text has more than `limit` characters, leave out its middle.

    >>> shorten("one two three four", 12)
    'one tw … [6 characters] … e four'
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    tail = text[-half:] if half else ""
    return f"{text[:half]} … [{len(text) - 2 * half} characters] … {tail}"


AUDIT = 4000
"""The number of a gate's steps that a report repeats to check the recorded decisions. Later steps
are not checked.
"""
TIMED = 100_000
"""The largest number of calls whose times a report analyses; more calls would need too much memory.
"""
_KINDS: tuple[type[Event], ...] = (
    *FACTS, Decided, Observed, CallSpan, ProblemSpan, CallFailed, Warned, Drifted,
)  # fmt: skip
# If a rollout has no answer, the reference answer is searched for in this number of characters at
# its end.
_TAIL = 300


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """The data of one rollout, without its texts."""

    brief: FinishedSample
    decisions: int
    escalated: int
    tokens: int  # number of tokens that draft and target wrote together
    target_tokens: int  # number of these tokens that the target wrote
    flags: tuple[str, ...]
    # For each turn: the number of tokens that the draft (or the target) added. Arrays of numbers
    # need less memory than lists.
    drafted_by_turn: array[int]
    target_by_turn: array[int]

    @property
    def turns(self) -> int:
        """Return the number of turns."""
        return len(self.drafted_by_turn)


@dataclass(frozen=True, slots=True)
class ProblemFacts:
    """The data of one finished problem, without its texts."""

    problem: Problem
    brief: FinishedProblem
    rollouts: tuple[RolloutFacts, ...]

    def graded(self, brief: FinishedProblem) -> ProblemFacts:
        """Return this problem with the verdicts in `brief`, which may include verdicts that later
        sessions added.
        """
        rollouts = tuple(
            replace(rollout, brief=sample)
            for rollout, sample in zip(self.rollouts, brief.samples, strict=True)
        )
        return replace(self, brief=brief, rollouts=rollouts)


@dataclass(slots=True)
class RunData:
    """The contents of a run directory; `problems` has the finished problems in the order in which
    they started.
    """

    run: RecordedRun
    pages: Pages
    problems: dict[str, ProblemFacts] = field(default_factory=dict[str, ProblemFacts])
    steps: StepLog = field(default_factory=StepLog)
    # the first `TIMED` calls, with their times
    nodes: list[CallSpan] = field(default_factory=list[CallSpan])
    calls: int = 0
    warned: list[Warned] = field(default_factory=list[Warned])
    drifted: list[Drifted] = field(default_factory=list[Drifted])
    failed_calls: Counter[str] = field(default_factory=Counter[str])
    # index of the first gate step of each run that was merged into this run
    parts: list[int] = field(default_factory=lambda: [0])
    state: RunState = field(default_factory=RunState)

    @property
    def done(self) -> Steps:
        """Return the gate's steps with the actions that were carried out, or with the decided
        actions if no outcome was observed.
        """
        return self.steps.of_kind("observed") or self.steps.of_kind("decided")

    def take(self, entry: Entry) -> None:
        """Add the data of the next entry of the journal."""
        outcome = self.state.apply(entry)
        match entry.event:
            case SessionOpened(session=session) if session in self.run.part_starts:
                self.parts.append(len(self.steps))
            case Decided(decision, features) if decision.action != "verify":
                self.steps.append(
                    GateStep("decided", decision, decision.escalate, features.get("left"))
                )
            case Observed(decision, escalated):
                self.steps.append(GateStep("observed", decision, escalated))
            case CallSpan(source="live", status="done" | "failed") as node:
                self.calls += 1
                if self.calls <= TIMED:
                    self.nodes.append(self.state.clock.aligned(node, entry.at))
            case CallFailed(error=error):
                self.failed_calls[error] += 1
            case Warned() as warned:
                self.warned.append(warned)
            case Drifted() as drifted:
                self.drifted.append(drifted)
            case _:
                pass
        if outcome is not None:
            self._finish(outcome)

    def _finish(self, outcome: Outcome) -> None:
        brief = self.state.finished[outcome.problem.id]
        rollouts = tuple(
            _rollout(rollout, sample, outcome.problem)
            for rollout, sample in zip(outcome.rollouts, brief.samples, strict=True)
        )
        self.problems[outcome.problem.id] = ProblemFacts(outcome.problem, brief, rollouts)
        self.pages.add(
            outcome, {rollout.brief.sample: rollout.flags for rollout in rollouts}, brief
        )


def read_run_data(directory: Path, page_bytes: int) -> RunData:
    """Read the journal of a finished or unfinished run; the pages of all problems get at most
    `page_bytes` bytes.

    :raises JournalError: there is no journal, or it cannot be read.
    """
    run = open_run(directory)
    count = run.manifest.problems
    if count is None:  # the problems came from an iterator
        count = sum(isinstance(one.event, ProblemStarted) for one in run.entries({ProblemStarted}))
    data = RunData(run, Pages(page_bytes, count))
    kinds = set(_KINDS)
    started = list[str]()
    for entry in run.entries(kinds):
        data.take(entry)
        if isinstance(entry.event, ProblemStarted):
            started.append(entry.event.problem.id)
        elif isinstance(entry.event, Observed) and len(data.steps) >= AUDIT:
            kinds.discard(Decided)
    finished = data.state.finished
    data.problems = {
        name: data.problems[name].graded(finished[name]) for name in started if name in finished
    }
    return data


def _rollout(rollout: Rollout, brief: FinishedSample, problem: Problem) -> RolloutFacts:
    decisions = [turn.decision for turn in rollout.turns if turn.decision is not None]
    return RolloutFacts(
        brief,
        len(decisions),
        sum(decision.escalate for decision in decisions),
        tokens=rollout.usage.draft_tokens + rollout.usage.target_tokens,
        target_tokens=rollout.usage.target_tokens,
        flags=tuple(_flags(rollout, problem, decisions)),
        drafted_by_turn=array("I", (turn.tokens_written("draft") for turn in rollout.turns)),
        target_by_turn=array("I", (turn.tokens_written("target") for turn in rollout.turns)),
    )


def _flags(rollout: Rollout, problem: Problem, decisions: Sequence[Decision]) -> Iterable[str]:
    """Return the flags of a rollout, which are reasons to distrust its answer."""
    if rollout.finish == "failed":
        yield "failed"
    if rollout.is_fallback_answer:
        yield "fallback answer"
    if any(decision.origin == "forced" for decision in decisions):
        yield "forced"
    if any(decision.score is not None and math.isinf(decision.score) for decision in decisions):
        yield "infinite score"
    if rollout.answer is None and rollout.finish not in ("settled", "cancelled", "failed"):
        tail = rollout.text[-_TAIL:]
        yield "cut" if rollout.finish in ("turns", "tokens") else "no answer"
        if problem.answer and re.search(rf"(?<![\w.]){re.escape(problem.answer)}(?!\w)", tail):
            yield "reference in text"
