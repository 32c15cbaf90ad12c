"""From a recorded run to the points of its frontier: replays under other samples, votes, turns, rates and gates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from atts.analysis import Replayed, replay_policy
from atts.api import answers_for
from atts.calibration import Calibrator, Mode
from atts.core import Decision, Outcome, TurnKey
from atts.errors import DatasetError
from atts.evaluators import Estimate, equivalent, mean_estimate
from atts.journal import Decided, RecordedRun, open_run
from atts.pipelines import ConformalGate, Gate, Policy, RandomGate, RoundGate, ScoreRule, TopGate
from atts.pipelines.votes import VoteKind
from atts.spans import CallSpan


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of one token of each model."""

    draft: float
    target: float


@dataclass(frozen=True, slots=True)
class Grid:
    """Which policies are replayed."""

    rates: tuple[float, ...]
    samples: tuple[int, ...]
    turns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One policy: how right its votes are and what they cost, per problem."""

    run: str
    policy: str
    kind: str
    right: Estimate
    target_tokens: float
    gflops: float | None
    seconds: float
    off_policy: float


@dataclass(frozen=True, slots=True)
class Record:
    """A run as its directory tells it."""

    directory: Path
    outcomes: tuple[Outcome, ...]
    decided: Mapping[TurnKey, Decided]
    policy: Policy
    mode: Mode
    seed: int
    models: Mapping[str, str]
    seconds: float
    call_seconds: Mapping[str, float]  # by stage, summed over calls

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return self.directory.name


def read_record(directory: Path) -> Record:
    """All that replay needs, read once.

    :raises DatasetError: no problem of the run has a reference answer.
    :raises JournalError: the directory does not hold a readable run.
    """
    run = open_run(directory)
    outcomes = [one for one in run.outcomes() if one.problem.answer is not None]
    if not outcomes:
        raise DatasetError(str(directory), "no finished problem has a reference answer")
    calls, seconds = _calls(run)
    mode = run.setting("mode")
    return Record(
        directory,
        tuple(outcomes),
        {event.decision.turn_key: event for event in run.decisions()},
        _policy(run.policy),
        cast(Mode, mode) if mode in get_args(Mode) else "question-turn",
        run.manifest.seed,
        {role: str(spec.get("model", "")) for role, spec in run.manifest.engines.items()},
        seconds,
        calls,
    )


def _calls(run: RecordedRun) -> tuple[dict[str, float], float]:
    """Seconds in calls by stage, and the run's own: what several sessions took is added up."""
    calls: dict[str, float] = {}
    spans: dict[int, tuple[float, float]] = {}
    for entry in run.entries((CallSpan,)):
        node = entry.event
        if isinstance(node, CallSpan) and node.source == "live":
            calls[node.stage] = calls.get(node.stage, 0.0) + node.ended - node.started
            first, last = spans.get(entry.session, (node.started, node.ended))
            spans[entry.session] = min(first, node.started), max(last, node.ended)
    return calls, sum(last - first for first, last in spans.values())


def _policy(stored: Mapping[str, Any]) -> Policy:
    """What of the run's policy a replay heeds."""
    score = ScoreRule(**stored["score"])
    return Policy(samples=stored["samples"], turns=stored["turns"], vote=stored["vote"], score=score)


def points(record: Record, grid: Grid, flops: Flops | None) -> list[Point]:
    """Every replay the record allows: itself first."""
    bill = _Bill(record, flops)
    return [bill.point(*case) for case in _cases(record, grid)]


Case = tuple[str, str, Policy, Gate | RoundGate | None]


def _cases(record: Record, grid: Grid) -> Iterator[Case]:
    policy = record.policy
    yield "as it was", "run", policy, None
    for m in (m for m in grid.samples if m <= policy.samples):
        for vote in get_args(VoteKind):
            yield f"vote of {m}", f"{vote} vote", replace(policy, samples=m, vote=vote), None
    for turns in (turns for turns in grid.turns if turns < policy.turns):
        yield f"{turns} turns", "turns", replace(policy, turns=turns), None
    if _is_scored(record):  # without scores no gate has anything to decide on
        for rate in grid.rates:
            for name, gate in _gates(record, rate):
                yield f"rate {rate:g}", name, policy, gate


def _is_scored(record: Record) -> bool:
    turns = (turn for outcome in record.outcomes for line in outcome.rollouts for turn in line.turns)
    return any(turn.score is not None for turn in turns)


def _gates(record: Record, rate: float) -> Iterable[tuple[str, Gate | RoundGate]]:
    mode: Mode = "question-turn" if record.mode == "split" else record.mode
    yield f"conformal ({mode})", ConformalGate(Calibrator(rate, mode, seed=record.seed))
    yield "top-B", TopGate.of(rate)
    yield "random", RandomGate(rate, record.seed)


class _Bill:
    """Turns replays into points: who is right, and what it costs at this run's prices."""

    def __init__(self, record: Record, flops: Flops | None) -> None:
        self._record = record
        self._flops = flops
        self._group = answers_for(record.outcomes[0].problem.kind).group
        self._right: dict[tuple[str, str], bool] = {}
        self._taken = _takeover_tokens(record.outcomes)
        whole = replay_policy(record.outcomes, None, record.policy, self._group)
        self._whole = self._seconds(self._tokens(whole))

    def point(self, policy_name: str, kind: str, policy: Policy, gate: Gate | RoundGate | None) -> Point:
        """One policy replayed and billed."""
        record = self._record
        found = replay_policy(record.outcomes, gate, policy, self._group, decided=record.decided)
        references = {outcome.problem.id: outcome for outcome in record.outcomes}
        answers = [(references[one.problem], one.answer) for one in found.problems]
        if kind == "run":  # as it was: its vote may have ended early, in another order than that of the samples
            answers = [(outcome, outcome.answer) for outcome in record.outcomes]
        right = [float(answer is not None and self._is_right(outcome, answer)) for outcome, answer in answers]
        draft, scored, target = self._tokens(found)
        count = len(right)
        arithmetic = None
        if self._flops is not None:
            arithmetic = (draft * self._flops.draft + (scored + target) * self._flops.target) / count / 1e9
        share = self._seconds((draft, scored, target)) / self._whole if self._whole else 0.0
        return Point(
            record.name, policy_name, kind, mean_estimate(right, count), target / count, arithmetic,
            record.seconds * share / count, found.off_policy,
        )  # fmt: skip

    def _is_right(self, outcome: Outcome, answer: str) -> bool:
        key = outcome.problem.id, answer
        if key not in self._right:
            reference = outcome.problem.answer
            assert reference is not None, "kept for having one"
            self._right[key] = equivalent(reference, answer, outcome.problem.kind).status == "equal"
        return self._right[key]

    def _tokens(self, found: Replayed) -> tuple[float, float, float]:
        """Draft, scored and target tokens; an escalation the record lacks costs the mean of those it has."""
        lines = [line for problem in found.problems for line in problem.rollouts]
        extra = _escalations(found.decisions) - self._recorded(found)
        target = sum(line.target_tokens for line in lines) + extra * self._taken
        return sum(line.draft_tokens for line in lines), sum(line.scored_tokens for line in lines), max(0.0, target)

    def _recorded(self, found: Replayed) -> int:
        """How many of the chunks that were decided on anew had been escalated."""
        again = {(one.question, one.sample, one.turn) for one in found.decisions}
        return sum(
            turn.decision.escalate
            for outcome in self._record.outcomes
            for line in outcome.rollouts
            for turn in line.turns
            if turn.decision is not None and (line.problem, line.sample, turn.index) in again
        )

    def _seconds(self, tokens: tuple[float, float, float]) -> float:
        """Call seconds of that many tokens at this run's prices."""
        usages = [outcome.usage for outcome in self._record.outcomes]
        made = [sum(getattr(u, name) for u in usages) for name in ("draft_tokens", "scored_tokens", "target_tokens")]
        stages = ("draft", "score", "target")
        prices = [self._record.call_seconds.get(s, 0.0) / n if n else 0.0 for s, n in zip(stages, made, strict=True)]
        return sum(price * count for price, count in zip(prices, tokens, strict=True))


def _escalations(decisions: Sequence[Decision]) -> int:
    return sum(decision.escalate for decision in decisions)


def _takeover_tokens(outcomes: Sequence[Outcome]) -> float:
    """Mean target tokens of an escalated turn."""
    taken = [
        sum(len(chunk.logprobs) for chunk in turn.chunks if chunk.author == "target")
        for outcome in outcomes
        for line in outcome.rollouts
        for turn in line.turns
        if turn.decision is not None and turn.decision.escalate
    ]
    return sum(taken) / len(taken) if taken else 0.0
