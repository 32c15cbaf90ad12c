"""The state of a run, rebuilt from its journal: summaries of finished problems and all steps of
open problems.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from msgspec import structs

from atts.core import (
    CallSpan,
    Combination,
    CombinePlan,
    Decision,
    Finish,
    Outcome,
    Problem,
    ProblemSpan,
    Rollout,
    Turn,
    Usage,
)
from atts.engine import Speculated, together
from atts.errors import JournalCorrupt, counted
from atts.journal.events import (
    CallFailed,
    Combining,
    Decided,
    Entry,
    Event,
    Graded,
    Observed,
    OutcomeReached,
    OutcomeStatus,
    ProblemStarted,
    RolloutFinished,
    RolloutStarted,
    Sampled,
    Scored,
    SessionClosed,
    SessionOpened,
    TurnFinished,
    VerdictStatus,
    Warned,
)
from atts.journal.manifest import Manifest

SampleVerdict = VerdictStatus | Literal["spared", "lost"]
"""The verdict on a rollout. "spared" means that the rollout was stopped before it could answer, and
"lost" means that it failed. These two verdicts do not count as wrong.
"""


def is_censored(answer: object, finish: object) -> bool:
    """Return True if a rollout was stopped before it could answer.

    A rollout is stopped when the vote is settled, the run ends, or an engine is lost. Its answer is
    unknown. Accuracies of single rollouts leave out stopped rollouts, because counting them as
    wrong would make a method that stops early look worse.

    >>> is_censored(None, "settled"), is_censored(None, "tokens"), is_censored("7", "settled")
    (True, False, False)
    """
    return answer is None and finish in ("settled", "cancelled", "failed")


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """The summary of one rollout of a finished problem."""

    sample: int
    finish: Finish
    answer: str | None = None
    # verdict on the rollout's answer; None if the answer was not graded
    verdict: SampleVerdict | None = None
    rule: str = ""
    error: str = ""  # the reason why the rollout failed; "" if it did not fail
    # True if the model did not mark an answer as final, and the answer was extracted from the
    # finished text
    is_fallback_answer: bool = False

    @classmethod
    def of(cls, rollout: Rollout) -> FinishedSample:
        """Summarise a rollout that is not graded yet."""
        finish = rollout.finish or "cancelled"
        verdict: SampleVerdict | None = None
        if is_censored(rollout.answer, finish):
            verdict = "lost" if finish == "failed" else "spared"
        return cls(
            rollout.sample,
            finish,
            rollout.answer,
            verdict,
            error=rollout.error if finish == "failed" else "",
            is_fallback_answer=rollout.is_fallback_answer,
        )

    @property
    def is_censored(self) -> bool:
        """Return True if the rollout was stopped before it could answer."""
        return is_censored(self.answer, self.finish)

    @property
    def is_cut(self) -> bool:
        """Return True if the limit on tokens or on turns ended the rollout before it could
        answer.
        """
        return self.answer is None and self.finish in ("tokens", "turns")

    def graded(self, graded: Graded) -> FinishedSample:
        """Return the rollout with the verdict of a `Graded` event. A rollout that was stopped keeps
        its own verdict.
        """
        if self.is_censored:
            return self
        return replace(self, verdict=graded.status, rule=graded.rule)


@dataclass(frozen=True, slots=True)
class FinishedProblem:
    """The summary of one problem: its status, answer, verdict and cost. The complete rollouts are
    in `Outcome`.
    """

    problem: str
    status: OutcomeStatus
    answer: str | None
    # Verdict on the problem's answer. None if the answer was not graded, or if the problem has no
    # answer because its rollouts were stopped.
    verdict: VerdictStatus | None
    rule: str
    samples: tuple[FinishedSample, ...]
    votes: Mapping[str, float]
    usage: Usage
    why: str = ""
    # number of this problem's chunks on which the gate decided, including chunks of cancelled
    # rollouts
    judged: int = 0
    escalated: int = 0  # number of these chunks that were escalated
    # a warning if the problem is very unlike the questions from which the gate's stored scores come
    doubt: str = ""
    # how the target chose or wrote the answer after the vote; None if the vote alone decided
    combination: Combination | None = None
    # seconds from the start to the end of the problem in each session that worked on it, summed;
    # None if they are unknown, because the end is not recorded or such a session was killed
    seconds: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """Return one line without the rollouts: the answer and its verdict."""
        answer = self.status if self.answer is None else f"answer {self.answer}"
        verdict = "" if self.verdict is None else f" ({self.verdict})"
        rollouts = counted(len(self.samples), "rollout")
        return f"{self.problem}: {answer}{verdict}, {rollouts}"

    @classmethod
    def of(
        cls, outcome: Outcome, graded: Iterable[Graded] = (), *, judged: int = 0, escalated: int = 0
    ) -> FinishedProblem:
        """Summarise an outcome together with the verdicts on its answers."""
        samples = tuple(map(FinishedSample.of, outcome.rollouts))
        finished = cls(
            outcome.problem.id,
            outcome.status,
            outcome.answer,
            None,
            "",
            samples=samples,
            votes=outcome.votes,
            usage=outcome.usage,
            why=outcome.why,
            doubt=outcome.doubt,
            combination=outcome.combination,
            judged=judged,
            escalated=escalated,
        )
        return finished.graded(graded)

    def graded(self, verdicts: Iterable[Graded]) -> FinishedProblem:
        """Return the problem with these verdicts. If an answer has several verdicts, the last one
        counts.
        """
        by_sample = {verdict.sample: verdict for verdict in verdicts}
        samples = tuple(
            one.graded(by_sample[one.sample]) if one.sample in by_sample else one
            for one in self.samples
        )
        of_answer = by_sample.get(None)
        if of_answer is None or self.is_censored:
            return replace(self, samples=samples)
        return replace(self, samples=samples, verdict=of_answer.status, rule=of_answer.rule)

    @property
    def is_correct(self) -> bool:
        """Return True if the answer was graded as correct."""
        return self.verdict == "correct"

    @property
    def is_right(self) -> bool | None:
        """Return None if the grader could not decide; otherwise return whether the answer was
        graded as correct.
        """
        return None if self.verdict == "unscored" else self.is_correct

    @property
    def is_complete(self) -> bool:
        """Return True if neither the problem nor one of its rollouts failed."""
        return self.status != "failed" and not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """Return the error messages of the rollouts that failed."""
        return tuple(one.error for one in self.samples if one.finish == "failed")

    @property
    def is_censored(self) -> bool:
        """Return True if the problem has no answer, but a rollout that was stopped might have given
        one.
        """
        return self.answer is None and (
            self.status == "failed" or any(one.is_censored for one in self.samples)
        )

    @property
    def complete_samples(self) -> tuple[FinishedSample, ...]:
        """Return the rollouts that were not stopped early; accuracies of single rollouts use only
        these.
        """
        return tuple(one for one in self.samples if not one.is_censored)

    @property
    def agreement(self) -> float:
        """Return the fraction of the votes that the most frequent answer got; 0 if there are no
        votes.
        """
        total = math.fsum(self.votes.values())
        return max(self.votes.values()) / total if total else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the summary as plain data for JSON, without `seconds` and `combination` if they
        are None.
        """
        data = asdict(self)
        for name in ("seconds", "combination"):
            if data[name] is None:
                del data[name]
        return data


LARGE_SHARE = 0.05
"""If more than this fraction (0 to 1) of the rollouts was cut, the results of a run are not
reliable.
"""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Counts of the rollouts that were cut before they could answer: at the token limit, and at the
    turn limit.
    """

    rollouts: int
    at_tokens: int
    at_turns: int
    max_tokens: int
    turns: int
    is_derived: bool  # True if atts computed the turn limit from the token limit
    context: int  # context length in tokens: the shorter one of draft and target; 0 if unknown

    @property
    def cut(self) -> int:
        """Return the number of rollouts that were cut."""
        return self.at_tokens + self.at_turns

    @property
    def is_large(self) -> bool:
        """Return True if more than 5 % of the rollouts were cut."""
        return self.cut > LARGE_SHARE * self.rollouts

    @property
    def warning(self) -> str:
        """Return a warning if more than 5 % of the rollouts were cut, otherwise ""."""
        return str(self) if self.is_large else ""

    def as_json(self) -> dict[str, int]:
        """Return the counts and limits as plain data for JSON."""
        names = ("cut", "rollouts", "at_tokens", "at_turns", "max_tokens", "turns")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        """Return a sentence that says how many rollouts each limit cut, and what to change."""
        share = self.cut / self.rollouts if self.rollouts else 0.0
        counts = f"{self.cut:,} of {counted(self.rollouts, 'rollout')} ({100 * share:.1f} %)"
        limits = list[str]()
        advice = list[str]()
        if self.at_tokens and 0 < self.context <= self.max_tokens:
            limits.append(f"{self.at_tokens:,} at the context length of {self.context:,} tokens")
            advice.append("serve models with a longer context")
        elif self.at_tokens:
            limits.append(f"{self.at_tokens:,} at --max-tokens {self.max_tokens:,}")
            advice.append("raise --max-tokens")
        if self.at_turns:
            limits.append(f"{self.at_turns:,} at the limit of {counted(self.turns, 'turn')}")
            if not self.is_derived:
                advice.append("leave --turns out, or raise it")
            elif "raise --max-tokens" not in advice:
                advice.append("raise --max-tokens, from which atts computes the limit on turns")
        sentence = f"{counts} reached a limit before an answer"
        if limits:
            sentence += f": {', '.join(limits)}; {', '.join(advice)}"
        return sentence


def truncation(problems: Iterable[FinishedProblem], manifest: Manifest) -> Truncation:
    """Count the rollouts of these problems that were cut. The limits are read from the manifest."""
    samples = [sample for problem in problems for sample in problem.complete_samples]
    ends = Counter(sample.finish for sample in samples if sample.is_cut)
    setting = manifest.configuration.get("policy")
    policy: Mapping[str, Any] = {}
    if setting is not None and isinstance(setting.value, Mapping):
        policy = setting.value
    lengths = list[int]()
    for engine in manifest.engines.values():
        length = engine.get("context_length")
        if isinstance(length, int):
            lengths.append(length)
    turns = manifest.settings.get("turns")
    return Truncation(
        len(samples),
        ends["tokens"],
        ends["turns"],
        max_tokens=policy.get("max_tokens") or 0,
        turns=policy.get("turns") or 0,
        is_derived=turns is not None and turns.origin == "max_tokens",
        context=min(lengths, default=0),
    )


Call = Sampled | Scored | CallFailed

FACTS: tuple[type[Event], ...] = (
    SessionOpened, SessionClosed, ProblemStarted, RolloutStarted, TurnFinished, RolloutFinished, OutcomeReached, Graded,
)  # fmt: skip
"""The kinds of events that determine the outcomes of problems and the verdicts on answers."""


@dataclass(slots=True)
class OpenProblem:
    """A problem that was started, with its rollouts and all of its recorded steps.

    A resumed run does not repeat recorded steps. It finds the results of engine calls by the
    request's key, and gate calls by (sample, turn). A failed call counts as a recorded step only if
    its rollout continued after the failure. Otherwise it is dropped, so that a resumed run repeats
    the call.
    """

    problem: Problem
    rollouts: dict[int, Rollout] = field(default_factory=dict[int, Rollout])
    calls: dict[str, deque[Call]] = field(default_factory=dict[str, deque[Call]])
    gate: dict[tuple[int, int], deque[Decided | Observed]] = field(
        default_factory=dict[tuple[int, int], deque[Decided | Observed]]
    )
    turns: dict[int, deque[Turn]] = field(default_factory=dict[int, deque[Turn]])
    graded: list[Graded] = field(default_factory=list[Graded])
    # the decision after the vote: keep the answer of the vote, or ask the target; None before the
    # vote
    combine_plan: CombinePlan | None = None
    judged: int = 0  # number of the problem's chunks on which the gate decided
    escalated: int = 0  # number of these chunks that were escalated
    # Failed calls after which their rollout has recorded nothing yet. The key is the call's rollout
    # hint, which names the rollout.
    _failures: dict[str, list[CallFailed]] = field(default_factory=dict[str, list[CallFailed]])
    _hints: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all recorded calls."""
        calls = (call for same in self.calls.values() for call in same)
        return sum(len(call.completion.ids) for call in calls if isinstance(call, Sampled))

    def outcome(self, reached: OutcomeReached) -> Outcome:
        """Return the problem's outcome, with the rollouts in the order given by the event."""
        rollouts = tuple(self.rollouts[sample] for sample in reached.samples)
        return Outcome(
            self.problem,
            rollouts,
            reached.answer,
            votes=reached.votes,
            status=reached.status,
            why=reached.why,
            usage=reached.usage,
            doubt=reached.doubt,
            combination=reached.combination,
        )

    def apply(self, event: Event) -> None:
        """Update the problem with one of its events."""
        match event:
            case RolloutStarted(_, sample, prompt):
                self.rollouts[sample] = Rollout(self.problem.id, sample, prompt)
            case TurnFinished(_, sample, turn):
                self._settle(self._hints.get(sample, ""))
                self.turns.setdefault(sample, deque()).append(turn)
                rollout = self.rollouts[sample]
                self.rollouts[sample] = replace(rollout, turns=(*rollout.turns[: turn.index], turn))
            case RolloutFinished():
                rollout = self.rollouts[event.sample]
                self.rollouts[event.sample] = replace(
                    rollout,
                    turns=rollout.turns[: event.turns],
                    finish=event.finish,
                    answer=event.answer,
                    usage=event.usage,
                    error=event.error,
                    is_fallback_answer=event.is_fallback_answer,
                )
            case CallFailed():
                self._failures.setdefault(event.rollout, []).append(event)
            case Sampled() | Scored():
                self._settle(event.rollout)
                self.calls.setdefault(event.key, deque()).append(event)
                if isinstance(event, Sampled):
                    self._hints[event.sample] = event.rollout
            case Decided() | Observed():
                decision = event.decision
                self._settle(self._hints.get(decision.sample, ""))
                self.gate.setdefault((decision.sample, decision.turn), deque()).append(event)
                for _, is_escalated in judged(event):
                    self.judged += 1
                    self.escalated += is_escalated
            case Graded():
                self.graded.append(event)
            case Combining():
                self.combine_plan = event.plan
            case _:
                pass

    def forget_failures(self) -> None:
        """Drop the failed calls after which their rollout did not continue, so that a new session
        repeats them.
        """
        self._failures.clear()

    def _settle(self, hint: str) -> None:
        """Move a rollout's failed calls to its recorded calls, because the rollout has continued
        after these failures. `hint` is the `rollout` value of the calls.
        """
        for failure in self._failures.pop(hint, ()):
            self.calls.setdefault(failure.key, deque()).append(failure)


def judged(event: object) -> Iterator[tuple[Decision, bool]]:
    """Yield a decision and whether it escalated, if the event completes a decision. Most events
    yield nothing.

    If the gate judges single chunks, an `Observed` event completes the decision, and says whether
    the chunk was really escalated. If the gate judges whole rounds, the `Decided` event completes
    the decision.
    """
    if isinstance(event, Observed):
        yield event.decision, event.escalated
    elif isinstance(event, Decided) and event.asked == "round":
        yield event.decision, event.decision.escalate


@dataclass(slots=True)
class RunClock:
    """A clock of a run's work. It leaves out the time between sessions: each session begins at the
    time at which the previous one ended. A session without work takes no time.
    """

    seconds: float = 0.0
    before: float = 0.0  # seconds of work in all earlier sessions
    # The time at which the session was opened, in seconds on the clock of the recorded call spans.
    # None before the session's first span.
    _graph_zero: float | None = None

    def advance(self, entry: Entry) -> None:
        """Move the clock to the time of an entry. The entries must be passed in order."""
        if isinstance(entry.event, SessionOpened):
            self.before = self.seconds
            self._graph_zero = None
        elif not isinstance(entry.event, SessionClosed):
            self.seconds = self.before + entry.at

    def aligned(self, node: CallSpan, at: float) -> CallSpan:
        """Return a node of the current session with its times converted to this clock.

        `at` is the time at which the node's entry was recorded, which is the time at which the node
        ended.
        """
        if self._graph_zero is None:
            self._graph_zero = node.ended - at
        shift = self.before - self._graph_zero
        return structs.replace(
            node,
            ready=node.ready + shift,
            queued=node.queued + shift,
            started=node.started + shift,
            ended=node.ended + shift,
        )


@dataclass(slots=True)
class RunState:
    """The state of a run after all entries that were passed to `apply`, in order.

    `finished` has the summary of every problem with an outcome, in the order of finishing. The
    rollouts of complete problems are dropped, unless `keeps` is "everything". A problem that
    failed, or that has a failed rollout, is still open, so that the next session can complete it.
    """

    keeps: Literal["open problems", "everything"] = "open problems"
    open: dict[str, OpenProblem] = field(default_factory=dict[str, OpenProblem])
    finished: dict[str, FinishedProblem] = field(default_factory=dict[str, FinishedProblem])
    # codes of all warnings that were recorded so far
    said: set[str] = field(default_factory=set[str])
    sessions: int = 0
    # number of earlier sessions that were killed, so that they have no closing event
    killed: int = 0
    # closing event of the latest session; None if the session was killed or is still running
    ended: SessionClosed | None = None
    # numbers of tokens that speculative decoding proposed and the target accepted, over all
    # sessions; None if no session reported them
    speculated: Speculated | None = None
    last_node: int = -1
    clock: RunClock = field(default_factory=RunClock)
    # seconds of all recorded sessions for each problem that is not complete; NaN if they are
    # unknown
    _worked: dict[str, float] = field(default_factory=dict[str, float])
    # problems with calls in the current session, but without a recorded end in it
    _in_progress: set[str] = field(default_factory=set[str])

    def apply(self, entry: Entry) -> Outcome | None:
        """Apply an entry to the state. If the entry finishes a problem, return the problem's
        outcome, otherwise None.

        :raises JournalCorrupt: the entry contradicts earlier entries.
        """
        try:
            return self._apply(entry)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            line = f"line {entry.number + 1} ({type(entry.event).__name__})"
            what = f"{line} cannot follow the lines before it ({error!r})"
            raise JournalCorrupt(
                "the journal",
                what,
                "To save the lines before the damage, use `atts journal salvage`",
            ) from error

    def _apply(self, entry: Entry) -> Outcome | None:
        event = entry.event
        self.clock.advance(entry)
        match event:
            case SessionOpened():
                self.killed += self.sessions > 0 and self.ended is None
                self.sessions = event.session
                self.ended = None
                for problem in self.open.values():
                    problem.forget_failures()
                # A session that ends normally records the end of every problem. The previous one
                # was killed, and its journal does not say how long it worked on these problems.
                self._worked.update(dict.fromkeys(self._in_progress, math.nan))
                self._in_progress.clear()
            case SessionClosed():
                self.ended = event
                self.speculated = together(self.speculated, event.speculated)
            case Warned(code):
                self.said.add(code)
            case ProblemStarted(problem):
                self.open.setdefault(problem.id, OpenProblem(problem))
            case CallSpan():
                self.last_node = max(self.last_node, event.node)
                self._in_progress.add(event.problem)
            case OutcomeReached(problem):
                return self._finish(event)
            case Graded(problem) if problem in self.finished and problem not in self.open:
                self.finished[problem] = self.finished[problem].graded([event])
            case ProblemSpan():
                self._add_time(event)
            # All other events that matter belong to open problems. An event that arrives after its
            # problem has ended does not change the state.
            case Decided() | Observed() if inside := self.open.get(event.decision.question):
                inside.apply(event)
            case _ if inside := self.open.get(getattr(event, "problem", "")):
                inside.apply(event)
            case _:
                pass
        return None

    @property
    def seconds(self) -> float:
        """Return the seconds of work, summed over all sessions."""
        return self.clock.seconds

    @property
    def done(self) -> int:
        """Return how many problems are complete."""
        return sum(map(self.is_over, self.finished))

    @property
    def graded(self) -> dict[str, FinishedProblem]:
        """Return the finished problems whose answer has a verdict."""
        return {name: one for name, one in self.finished.items() if one.verdict is not None}

    @property
    def usage(self) -> Usage:
        """Return the usage summed over all finished problems."""
        return sum((one.usage for one in self.finished.values()), Usage())

    def is_over(self, problem: str) -> bool:
        """Return True if the problem has finished without a failure, so that no session has to
        continue it.
        """
        return problem in self.finished and self.finished[problem].is_complete

    def _add_time(self, span: ProblemSpan) -> None:
        """Add the time that a session worked on a problem to the time of earlier sessions."""
        name = span.problem
        self._in_progress.discard(name)
        finished = self.finished.get(name)
        if finished is not None and finished.is_complete and finished.seconds is not None:
            return  # a later session only repeated the recorded calls of a complete problem
        worked = self._worked.pop(name, 0.0) + span.ended - span.started
        if not self.is_over(name):
            self._worked[name] = worked
        if finished is not None:
            seconds = None if math.isnan(worked) else worked
            self.finished[name] = replace(finished, seconds=seconds)

    def _finish(self, reached: OutcomeReached) -> Outcome:
        name = reached.problem
        closed = self.open[name]
        outcome = closed.outcome(reached)
        if self.keeps == "open problems" and outcome.is_complete:
            del self.open[name]
        self.finished[name] = FinishedProblem.of(
            outcome, closed.graded, judged=closed.judged, escalated=closed.escalated
        )
        return outcome


def read_outcomes(entries: Iterable[Entry]) -> Iterator[Outcome]:
    """Yield the outcome of every finished problem once, in the order of finishing. Incomplete
    problems come last.

    Outcomes contain the complete rollouts. Only incomplete and open problems are kept in memory.
    """
    state = RunState()
    # outcomes of problems with failed rollouts, until a later session completes the problem
    incomplete: dict[str, Outcome] = {}
    for entry in entries:
        outcome = state.apply(entry)
        if outcome is None:
            continue
        name = outcome.problem.id
        del state.finished[name]
        incomplete.pop(name, None)
        if outcome.is_complete:
            yield outcome
        else:
            incomplete[name] = outcome
    yield from incomplete.values()
