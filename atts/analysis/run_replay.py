"""The replay of a recorded run under another policy, without a model."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Literal, overload

from atts.analysis.steps import GateStep, StepLog, Steps
from atts.calibration import (
    DEFAULTS,
    HOLD,
    Calibrator,
    Mode,
    StoredScores,
    Tuning,
    short_replay_note,
)
from atts.core import Chunk, Decision, Outcome, Problem, Rollout, Turn, TurnKey, Usage
from atts.errors import CalibrationInputError, JournalError, OptionError, counted
from atts.evaluators import (
    Estimate,
    accuracy_estimate,
    group,
    judge,
    mean_estimate,
    share_estimate,
)
from atts.journal import (
    FACTS,
    FEATURES,
    Decided,
    FinishedProblem,
    Graded,
    RecordedRun,
    RunState,
    is_censored,
    recorded_features,
)
from atts.pipelines import (
    Ballot,
    CappedGate,
    ConformalGate,
    Features,
    Gate,
    Grouper,
    Policy,
    RoundGate,
    Tally,
    VoteKind,
    ballot,
    cannot_change,
    evidence,
    mean_logprob,
    tally,
)


def fresh_calibrator(run: RecordedRun, rate: float, mode: Mode) -> Calibrator:
    """Make a new calibrator with the stored scores, cap, seed and step size of a run.

    :raises CalibrationInputError: if the mode needs stored scores, but the run does not name any.
    """
    step = run.setting("aci_step")
    rollouts = run.manifest.settings.get("concurrency")
    scores = [
        float(score) for score in run.setting("stored") or () if isinstance(score, int | float)
    ]
    return Calibrator(
        rate,
        mode,
        seed=run.manifest.seed,
        stored=StoredScores.of(scores, lengths=run.setting("stored_lengths") or ()),
        hold=max(HOLD, rollouts.value) if rollouts and isinstance(rollouts.value, int) else HOLD,
        tuning=Tuning(aci_step=step) if isinstance(step, float) else DEFAULTS,
        by_length=bool(run.setting("by_length")),
        cap=run.setting("cap"),
    )


@dataclass(frozen=True, slots=True)
class ReplayedRollout:
    """A recorded rollout as it would be under the other policy, as far as the record shows."""

    problem: str
    sample: int
    answer: str | None  # the recorded answer, which votes only if `is_known` is True
    # True if the rollout was stopped before it could answer, and would continue under the other
    # policy
    is_censored: bool
    # the first turn whose decision differs from the record, so that the text after it is unknown;
    # None if there is no such turn
    off_policy_from: int | None
    draft_tokens: int
    target_tokens: int
    scored_tokens: int

    @property
    def is_known(self) -> bool:
        """Return whether the record shows the end of this rollout under the other policy."""
        return self.off_policy_from is None and not self.is_censored


@dataclass(frozen=True, slots=True)
class ReplayedProblem:
    """A problem under the other policy; only rollouts with a known end have a vote."""

    problem: str
    tally: Tally
    rollouts: tuple[ReplayedRollout, ...]

    @property
    def unknown(self) -> int:
        """Return the number of rollouts whose end is not in the record."""
        return sum(not rollout.is_known for rollout in self.rollouts)

    @property
    def answer(self) -> str | None:
        """Return the answer of the vote; None if rollouts with an unknown end could change the
        answer.
        """
        is_settled = not self.unknown or cannot_change(self.tally, self.unknown)
        return self.tally.winner if is_settled else None


class Decisions(Sequence[Decision]):
    """A sequence of decisions in the order in which they were taken.

    The decisions are stored in arrays, and a decision object is built only when it is accessed.
    """

    def __init__(self, steps: Steps, rows: Sequence[int]) -> None:
        """Create a view of the steps in a log; `rows` has for each step the index of its chunk in
        the record.
        """
        self._steps = steps
        self.rows = rows

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> Decision: ...
    @overload
    def __getitem__(self, index: slice) -> Decisions: ...
    def __getitem__(self, index: int | slice) -> Decision | Decisions:
        if isinstance(index, slice):
            return Decisions(self._steps[index], self.rows[index])
        return self._steps[index].decision

    def by_question(self) -> dict[str, tuple[int, int]]:
        """Return for each question the number of escalated decisions and the number of all
        decisions.
        """
        return self._steps.by_question()


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay: its decisions in the recorded order, and its votes."""

    decisions: Decisions
    problems: tuple[ReplayedProblem, ...]

    @property
    def rate(self) -> float:
        """Return the share of decisions that escalate; NaN if there are no decisions."""
        if not self.decisions:
            return math.nan
        escalated = sum(count for count, _ in self.decisions.by_question().values())
        return escalated / len(self.decisions)

    @property
    def off_policy(self) -> float:
        """Return the share of rollouts in which a decision differs from the record; NaN if there
        are no rollouts.
        """
        rollouts = sum(len(problem.rollouts) for problem in self.problems)
        strayed = sum(
            rollout.off_policy_from is not None
            for problem in self.problems
            for rollout in problem.rollouts
        )
        return strayed / rollouts if rollouts else math.nan


@dataclass(frozen=True, slots=True)
class _JudgedChunk:
    """A recorded chunk with the features from which a gate decides."""

    row: int  # index of the chunk among all judged chunks of the record
    features: Features
    score: float


@dataclass(frozen=True, slots=True)
class _RecordedProblem:
    """The data of a finished problem that a replay needs in addition to the judged chunks."""

    problem: Problem
    answer: str | None
    is_censored: bool
    usage: Usage  # usage of all recorded rollouts of the problem
    # the recorded rollouts that the other policy would also make
    rollouts: tuple[ReplayedRollout, ...]
    weights: tuple[float, ...]  # the weight of each rollout's vote, in the order of `rollouts`
    rows: range  # indices of the problem's judged chunks in `_Record.turns`


class _Record:
    """The data of a recorded run that a replay needs.

    Judged chunks are stored in arrays and take about 170 bytes each, so that a large run fits into
    memory. Texts are stored only for gates that read them.
    """

    def __init__(self, policy: Policy, *, keeps_texts: bool) -> None:
        self.policy = policy
        self.problems: dict[str, _RecordedProblem] = {}
        self.turns = StepLog()  # one step per judged chunk: the recorded decision on the chunk
        # for each judged chunk: the position of its decision in the order in which the run made
        # decisions; -1 if not known
        self._places = array("q")
        # for each judged chunk: 1 if its turn is within the policy's limit on turns, 0 if it is not
        self._is_within = array("b")
        self._scores = array("d")
        self._features = array("d")
        self._texts: list[str] | None = [] if keeps_texts else None
        # Decisions on unfinished problems, keyed by problem and by (sample, turn). Each decision
        # has its position in the order in which the run made decisions.
        self._decided: dict[str, dict[tuple[int, int], tuple[int, Decided]]] = {}
        self._count = 0

    def take(self, event: Decided) -> None:
        """Add a decision with its features; decisions must come in the order in which they were
        taken.
        """
        decision = event.decision
        known = self._decided.setdefault(decision.question, {})
        key = (decision.sample, decision.turn)
        place = known[key][0] if key in known else self._count
        known[key] = (place, event)
        self._count += 1

    def finish(self, outcome: Outcome) -> None:
        """Add a problem's outcome, which replaces an earlier outcome of the same problem.

        If the policy has fewer samples than were recorded, the samples with the lowest indices are
        used. Using the rollouts that ended first would favour fast rollouts.
        """
        name = outcome.problem.id
        known = self._decided.get(name, {})
        begin = len(self.turns)
        rollouts: list[ReplayedRollout] = []
        weights: list[float] = []
        in_order = sorted(outcome.rollouts, key=lambda rollout: rollout.sample)
        for rollout in in_order[: self.policy.samples]:
            rollout = _with_cut_turn(rollout, known)
            rollouts.append(_as_recorded(rollout, self.policy))
            vote = ballot(self.policy.vote, rollout)
            weights.append(vote.weight if vote is not None else 0.0)
            limit = _turn_limit(rollout, self.policy)
            for position, turn in enumerate(rollout.turns):
                if turn.score is not None and turn.decision is not None:
                    place, event = known.get((rollout.sample, turn.index), (-1, None))
                    self._append(rollout, turn, event)
                    self._places.append(place)
                    self._is_within.append(position < limit)
        if self.policy.escalates == "problem" and self.policy.escalated_vote == "target":
            is_later = [one.sample in self.policy.waves[1] for one in rollouts]
            answered = [one.answer is not None for one in rollouts]
            if any(later and answers for later, answers in zip(is_later, answered, strict=True)):
                # Only rollouts of the second wave vote on this problem, because at least one of
                # them has an answer.
                weights = [w * later for w, later in zip(weights, is_later, strict=True)]
        self.problems[name] = _RecordedProblem(
            outcome.problem,
            outcome.answer,
            FinishedProblem.of(outcome).is_censored,
            sum((rollout.usage for rollout in outcome.rollouts), Usage()),
            rollouts=tuple(rollouts),
            weights=tuple(weights),
            rows=range(begin, len(self.turns)),
        )
        if outcome.is_complete:
            self._decided.pop(name, None)

    def _append(self, rollout: Rollout, turn: Turn, event: Decided | None) -> None:
        assert turn.decision is not None
        assert turn.score is not None
        told = event.features if event is not None else {}
        chunk = turn.drafted or turn.chunks[0]
        numbers = {
            "tokens": chunk.tokens,
            "draft_logprob": mean_logprob(chunk),
            "draft_evidence": evidence(self.policy.score, chunk),
            **told,
        }
        self.turns.append(
            GateStep("decided", turn.decision, turn.decision.escalate, told.get("left"))
        )
        self._scores.append(turn.score)
        self._features.extend(float(numbers.get(name, 0.0)) for name in FEATURES)
        if self._texts is not None:
            self._texts.append(chunk.text)

    def chunks(self) -> Iterator[_JudgedChunk]:
        """Yield the judged chunks in the order of their decisions.

        Chunks whose position in this order is unknown come last, sorted by turn.
        """
        rows = [row for one in self.problems.values() for row in one.rows]
        named = sorted(
            (row for row in rows if self._places[row] >= 0), key=self._places.__getitem__
        )
        rest = [row for row in rows if self._places[row] < 0]
        for row in (*named, *sorted(rest, key=self._by_turn)):
            yield self._chunk(row)

    def decisions_on(self, question: str) -> dict[tuple[int, int], Decision]:
        """Return the recorded decisions on the chunks of a problem, keyed by sample and turn."""
        decisions = [self.turns.read(row).decision for row in self.problems[question].rows]
        return {(decision.sample, decision.turn): decision for decision in decisions}

    def strays(self, row: int, *, escalated: bool) -> bool:
        """Return True if `escalated` differs from the recorded action on this chunk.

        Chunks after the policy's last turn never count as different.
        """
        return bool(self._is_within[row]) and escalated != self.turns.read(row).escalated

    def _by_turn(self, row: int) -> tuple[int, str, int]:
        question, sample, turn = self.turns.read(row).decision.turn_key
        return turn, question, sample

    def _chunk(self, row: int) -> _JudgedChunk:
        step = self.turns.read(row)
        decision = step.decision
        width = len(FEATURES)
        values = self._features[width * row : width * (row + 1)]
        numbers = dict(zip(FEATURES, values, strict=True))
        features = replace(
            recorded_features(decision.question, decision.turn, decision.sample, numbers),
            issue=decision.issue,
            left=step.left,
            text=self._texts[row] if self._texts is not None else "",
        )
        return _JudgedChunk(row, features, self._scores[row])


def replay_policy(
    outcomes: Iterable[Outcome],
    gate: Gate | RoundGate | None,
    policy: Policy,
    group: Grouper,
    *,
    decided: Mapping[TurnKey, Decided] = MappingProxyType({}),
) -> Replayed:
    """Repeat all decisions of a run on its recorded scores under another policy, and vote again.

    Samples and turns beyond the policy's limits are left out. The answer of a rollout is unknown if
    the rollout was cut, or if a decision differs from the record. Such a rollout has no vote.

    `decided` has the recorded decisions with their features, in the order in which they were taken.
    Chunks without such a decision come last, in the order of their turns. The gate must be new,
    because it learns from this replay. Without a gate, every recorded decision is kept.
    """
    record = _Record(policy, keeps_texts=True)
    for event in decided.values():
        record.take(event)
    for outcome in outcomes:
        record.finish(outcome)
    return _replay(record, gate, group)


def _replay(record: _Record, gate: Gate | RoundGate | None, group: Grouper) -> Replayed:
    # keyed by problem and sample: the first turn whose decision differs from the record
    strayed: dict[tuple[str, int], int] = {}
    if gate is None:
        rows = [row for one in record.problems.values() for row in one.rows]
        decisions = Decisions(Steps(record.turns, rows), rows)
    else:
        log = StepLog(keeps_reasons=True)
        taken = array("q")
        for row, decision in _decide(gate, record.chunks()):
            log.append(GateStep("decided", decision, decision.escalate))
            taken.append(row)
            if record.strays(row, escalated=decision.escalate):
                rollout = (decision.question, decision.sample)
                strayed[rollout] = min(decision.turn, strayed.get(rollout, decision.turn))
        decisions = Decisions(log.between(0, len(log)), taken)
    problems = tuple(_problem(one, strayed, group) for one in record.problems.values())
    return Replayed(decisions, problems)


def _decide(
    gate: Gate | RoundGate, chunks: Iterable[_JudgedChunk]
) -> Iterator[tuple[int, Decision]]:
    """Yield for each chunk its index and the gate's decision."""
    if isinstance(gate, RoundGate):
        yield from _by_round(gate, chunks)
        return
    for chunk in chunks:
        decision = gate.preview(chunk.features)
        if decision.action == "verify":
            try:
                decision = gate.decide(chunk.features, chunk.score)
            except CalibrationInputError as error:
                decision = chunk.features.decision(
                    "escalate", why=f"forced: {error}", origin="forced"
                )
        gate.observe(decision, decision.escalate)
        yield chunk.row, decision


def _by_round(gate: RoundGate, chunks: Iterable[_JudgedChunk]) -> Iterator[tuple[int, Decision]]:
    rounds: dict[tuple[str, int], list[_JudgedChunk]] = {}
    for chunk in chunks:
        rounds.setdefault((chunk.features.question, chunk.features.turn), []).append(chunk)
    for members in rounds.values():
        made = gate.decide_round([(chunk.features, chunk.score) for chunk in members])
        yield from zip((chunk.row for chunk in members), made, strict=True)


def _with_cut_turn(
    rollout: Rollout, decided: Mapping[tuple[int, int], tuple[int, Decided]]
) -> Rollout:
    """Return the rollout. If it was cancelled during a turn because the vote was settled, add this
    unfinished turn with its decision.
    """
    _, event = decided.get((rollout.sample, len(rollout.turns)), (0, None))
    if event is None or event.decision.score is None:
        return rollout
    nothing = Chunk("draft", "", (), (), "length")
    turn = Turn(len(rollout.turns), (), (nothing,), event.decision.score, event.decision)
    return replace(rollout, turns=(*rollout.turns, turn))


def _as_recorded(rollout: Rollout, policy: Policy) -> ReplayedRollout:
    """Return a recorded rollout, cut after the policy's last turn. Its decisions are not yet
    compared with the record, so `off_policy_from` is None.
    """
    turns = rollout.turns
    if policy.turns is not None:
        turns = turns[: rollout.turn_limit(policy.turns)]
    is_whole = len(turns) == len(rollout.turns)
    # A rollout's own usage also includes tokens outside of its turns, so use it if no turn is left
    # out.
    spent = rollout.usage if is_whole else _usage_of(turns)
    return ReplayedRollout(
        rollout.problem,
        rollout.sample,
        rollout.answer if is_whole else None,
        is_censored=_is_cut_short(rollout, policy),
        off_policy_from=None,
        draft_tokens=spent.draft_tokens,
        target_tokens=spent.target_tokens,
        scored_tokens=spent.scored_tokens,
    )


def _usage_of(turns: Iterable[Turn]) -> Usage:
    """Return the number of tokens that these turns of a rollout used."""
    total = Usage()
    for turn in turns:
        total += Usage(
            draft_tokens=turn.tokens_written("draft"),
            target_tokens=turn.tokens_written("target"),
            scored_tokens=turn.scored_tokens,
        )
    return total


def _is_cut_short(rollout: Rollout, policy: Policy) -> bool:
    """Return True if the record ends before the rollout answers or reaches the policy's last turn."""
    whole = sum(not turn.was_cut_short for turn in rollout.turns)
    return is_censored(rollout.answer, rollout.finish) and whole < _turn_limit(rollout, policy)


def _turn_limit(rollout: Rollout, policy: Policy) -> float:
    return math.inf if policy.turns is None else rollout.turn_limit(policy.turns)


def _problem(
    recorded: _RecordedProblem, strayed: Mapping[tuple[str, int], int], group: Grouper
) -> ReplayedProblem:
    rollouts: list[ReplayedRollout] = []
    ballots: list[Ballot] = []
    for rollout, weight in zip(recorded.rollouts, recorded.weights, strict=True):
        since = strayed.get((rollout.problem, rollout.sample))
        if since is not None:
            rollout = replace(rollout, off_policy_from=since)
        rollouts.append(rollout)
        if rollout.is_known and rollout.answer is not None and weight > 0:
            ballots.append(Ballot(rollout.answer, weight))
    return ReplayedProblem(recorded.problem.id, tally(ballots, group), tuple(rollouts))


@dataclass(frozen=True, slots=True)
class ReplayedDecision:
    """A decision of the replay, with the recorded decision on the same chunk (without its reason)."""

    decision: Decision
    recorded: Decision
    # True if an earlier decision of the rollout differs from the record, so this chunk would not
    # have been written
    off_policy: bool


class ReplayedDecisions(Sequence[ReplayedDecision]):
    """All decisions of a replay, each with the recorded decision, in the order in which they were
    taken.
    """

    def __init__(
        self, decisions: Decisions, recorded: Decisions, problems: Iterable[ReplayedProblem]
    ) -> None:
        """Join the decisions of a replay with the recorded decisions.

        Both sequences must be about the same chunks in the same order.
        """
        self._decisions = decisions
        self._recorded = recorded
        self._strayed = {
            (rollout.problem, rollout.sample): rollout.off_policy_from
            for problem in problems
            for rollout in problem.rollouts
            if rollout.off_policy_from is not None
        }

    def __len__(self) -> int:
        return len(self._decisions)

    @overload
    def __getitem__(self, index: int) -> ReplayedDecision: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ReplayedDecision, ...]: ...
    def __getitem__(self, index: int | slice) -> ReplayedDecision | tuple[ReplayedDecision, ...]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        decision = self._decisions[index]
        since = self._strayed.get((decision.question, decision.sample))
        return ReplayedDecision(
            decision, self._recorded[index], since is not None and decision.turn > since
        )


TokenCount = Literal["counted", "at least", "unknown"]


@dataclass(frozen=True, slots=True)
class ReplaySide:
    """The results of the recorded run, or of the replayed run.

    If a decision changed in any rollout, the token counts are unknown, and `rate` is a share of the
    recorded chunks without an interval. The token counts are lower bounds if the replayed vote
    needs a rollout whose record ends too early.

    If the record does not determine the accuracy, the accuracy is NaN. Then `low` and `high` are
    bounds that contain the accuracy of a live run with 95 % probability.
    """

    rate: Estimate
    accuracy: Estimate
    decisions: int
    tokens: TokenCount
    draft_tokens: int | None
    target_tokens: int | None
    scored_tokens: int | None


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of replaying a run under another policy, together with the recorded result.

    `off_policy` is the share of rollouts in which a decision changed. The text of these rollouts
    after that decision is unknown. The vote of `undecided` problems is unknown, because too many
    rollouts have an unknown end. Accuracies omit `censored` problems, because all their rollouts
    were stopped before they could answer.
    """

    recorded: ReplaySide
    replayed: ReplaySide
    nominal: float | None
    changed: int
    off_policy: float
    undecided: int
    censored: int
    decisions: Sequence[ReplayedDecision]
    # keyed by problem: the recorded answer, and the answer under the other policy
    answers: Mapping[str, tuple[str | None, str | None]]
    stored: int = 0  # number of stored scores of the run
    mode: Mode | None = None  # the calibrator's mode; None if another gate decided

    @property
    def note(self) -> str:
        """Return a note if the realised rate is off and the replay has few scores, otherwise ""."""
        if self.nominal is None:
            return ""
        side = self.replayed
        scores = self.stored + side.decisions
        return short_replay_note(side.rate.value, self.nominal, side.decisions, scores, self.mode)

    def __str__(self) -> str:
        """Return one line without the decisions: rates and accuracies of both sides."""
        before = self.recorded
        after = self.replayed
        return (
            f"recorded → replayed: rate {before.rate.value:.3f} → {after.rate.value:.3f}, "
            f"accuracy {before.accuracy.brief('unknown')} → {after.accuracy.brief('unknown')}, "
            f"{counted(self.changed, 'changed decision')}"
        )


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """Changes to the recorded policy; None means unchanged. `budget` is the largest number of
    escalations per problem.
    """

    samples: int | None = None
    turns: int | None = None
    vote: VoteKind | None = None
    budget: int | None = None


def replay_run(
    run: RecordedRun, change: PolicyChange, gate: Callable[[int], Gate | RoundGate] | None
) -> Replay:
    """Repeat all decisions of a run on its recorded scores with another gate or policy, and vote
    again.

    `gate` is called with the number of rollouts per problem, and returns a new gate. None keeps
    every recorded decision. Answers that the run did not grade are graded by the replay.

    :raises OptionError: more samples or turns than were recorded, a negative budget, or no score to
        decide on again.
    :raises JournalError: no problem is finished, or the journal cannot be read.
    """
    policy = _policy(run, change)
    chosen = None if gate is None else gate(policy.samples)
    recorded = _read(run, _Record(policy, keeps_texts=_reads_texts(chosen)))
    if gate is not None or change.budget is not None:
        _check_scored(recorded.record)
    if change.budget is not None:
        chosen = _capped(chosen or _RecordedGate(recorded.record), change.budget)
    problems = list(recorded.record.problems.values())
    classes = partial(group, kind=problems[0].problem.kind)
    again = _replay(recorded.record, chosen, classes)
    is_same_vote = change.samples is None and change.turns is None and change.vote is None
    found = _compare(recorded, again, is_same_vote=is_same_vote)
    calibrator = chosen.calibrator if isinstance(chosen, ConformalGate) else None
    mode = calibrator.mode if isinstance(calibrator, Calibrator) else None
    return replace(found, stored=len(run.setting("stored") or ()), mode=mode)


def _check_scored(record: _Record) -> None:
    """Check that the run has scores, which a gate needs to decide again.

    :raises OptionError: if no decision of the run was based on a score.
    """
    if not record.turns:
        raise OptionError(
            "replay",
            "no chunk of the run has a score, so a gate cannot decide on its chunks again. "
            "Replay a run with scored chunks; only --samples, --turns and --vote work without "
            "scores",
        )


def _reads_texts(gate: object) -> bool:
    """Return whether the gate may read the texts of chunks. A gate of atts states whether it does;
    any other gate is assumed to read them.
    """
    if gate is None:
        return False
    if not type(gate).__module__.startswith("atts.pipelines."):
        return True
    return getattr(gate, "needs_text", False) or _reads_texts(getattr(gate, "inner", None))


class _RecordedGate:
    """A gate that repeats the recorded decisions, unless a budget does not allow them."""

    def __init__(self, record: _Record) -> None:
        # The run decided on many problems in alternation, so the decisions of many problems are
        # cached.
        self._of = lru_cache(1024)(record.decisions_on)

    def preview(self, features: Features) -> Decision:
        """Return the recorded decision. This gate needs no score, even if the run needed one to
        decide.
        """
        return self._of(features.question)[features.sample, features.turn]

    def decide(self, features: Features, score: float) -> Decision:
        """Return the recorded decision."""
        return self.preview(features)

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Ignore the outcome, because a recorded decision does not depend on outcomes."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    record: _Record
    # the recorded verdicts, keyed by problem and answer
    verdicts: Mapping[tuple[str, str], str]

    @property
    def known(self) -> dict[str, str | None]:
        """Return the recorded answers, keyed by problem. Problems that were stopped before any
        rollout could answer are left out.
        """
        problems = self.record.problems
        return {name: one.answer for name, one in problems.items() if not one.is_censored}

    def accuracy(self, answers: Mapping[str, str | None]) -> Estimate:
        """Return the accuracy of these answers; answers without a recorded verdict are graded
        now.
        """
        problems = [one.problem for one in self.record.problems.values()]
        asked = [one for one in problems if one.answer is not None]
        return accuracy_estimate(self.right(it, answers[it.id]) for it in asked if it.id in answers)

    def right(self, problem: Problem, answer: str | None) -> bool | None:
        """Return True if the answer is correct, False if it is wrong, and None if the grader cannot
        decide.
        """
        if answer is None:
            return False
        status = self.verdicts.get((problem.id, answer)) or judge(problem, answer).status
        return None if status == "unscored" else status in ("correct", "equal")


def _read(run: RecordedRun, record: _Record) -> _Recorded:
    """Read the journal of a run once; only the texts of unfinished problems are in memory at any
    time.
    """
    state = RunState()
    verdicts = dict[tuple[str, str], str]()
    for entry in run.entries((*FACTS, Decided)):
        outcome = state.apply(entry)
        if outcome is not None:
            del state.finished[outcome.problem.id]
            if outcome.rollouts:
                record.finish(outcome)
        match entry.event:
            case Graded(answer=str(answer)) as graded:
                verdicts[graded.problem, answer] = graded.status
            case Decided(decision) as event if decision.action != "verify":
                record.take(event)
            case _:
                pass
    if not record.problems:
        raise JournalError(
            run.directory,
            "no problem is finished, so there is nothing to replay",
            "Continue the run first",
        )
    return _Recorded(record, verdicts)


def _policy(run: RecordedRun, change: PolicyChange) -> Policy:
    """Return the recorded policy with other limits on samples and turns, which must not exceed the
    recorded limits.
    """
    recorded = run.policy
    samples = recorded.get("samples", 1)
    turns = recorded.get("turns", 1)
    for name, most, wanted in (
        ("samples", samples, change.samples),
        ("turns", turns, change.turns),
    ):
        if wanted is not None and wanted > most:
            raise OptionError(
                name,
                f"{wanted} is too many: the run recorded only {most} {name}, and a replay "
                "cannot add any",
            )
    return Policy(
        samples=samples if change.samples is None else change.samples,
        turns=turns if change.turns is None else change.turns,
        vote=recorded.get("vote", "majority") if change.vote is None else change.vote,
    )


def _capped(gate: Gate | RoundGate, budget: int) -> Gate:
    if budget < 0:
        raise OptionError(
            "budget",
            f"{budget} is not a valid number of escalations per problem; give 0 or more",
        )
    if isinstance(gate, RoundGate):
        raise OptionError(
            "budget",
            "this gate ranks the chunks of each round, and the rate alone sets how many of "
            "them escalate; leave budget out",
        )
    spent = Counter[str]()

    def take(features: Features) -> bool:
        if spent[features.question] >= budget:
            return False
        spent[features.question] += 1
        return True

    return CappedGate(gate, take)


def _compare(recorded: _Recorded, again: Replayed, *, is_same_vote: bool) -> Replay:
    problems = recorded.record.problems
    rows = again.decisions.rows
    as_recorded = Decisions(Steps(recorded.record.turns, rows), rows)
    before = {name: one.answer for name, one in problems.items()}
    after = {problem.problem: problem.answer for problem in again.problems}
    known = recorded.known
    spent = sum((one.usage for one in problems.values()), Usage())
    replayed = [rollout for problem in again.problems for rollout in problem.rollouts]
    old = _side(as_recorded, recorded.accuracy(known), [spent])
    judged = [problem for problem in again.problems if problem.problem in known]
    if is_same_vote and not again.off_policy > 0:
        # All rollouts and the voting rule are the same as in the record, so the answers are the
        # same too. This includes votes that ended before their result was certain.
        after = before
        undecided = 0
        new = _side(again.decisions, old.accuracy, replayed)
    else:
        undecided = sum(
            problem.unknown > 0 and not cannot_change(problem.tally, problem.unknown)
            for problem in judged
        )
        new = _side(again.decisions, _accuracy(recorded, judged, undecided), replayed)
        if again.off_policy > 0:
            new = _without_estimates(new)
        elif any(rollout.is_censored for rollout in replayed):
            new = replace(new, tokens="at least")
    rates = (decision.rate for decision in reversed(again.decisions))
    return Replay(
        old,
        new,
        nominal=next((rate for rate in rates if math.isfinite(rate)), None),
        changed=sum(
            one.escalate != other.escalate
            for one, other in zip(again.decisions, as_recorded, strict=True)
        ),
        off_policy=again.off_policy,
        undecided=undecided,
        censored=len(before) - len(known),
        decisions=ReplayedDecisions(again.decisions, as_recorded, again.problems),
        answers={name: (before[name], after[name]) for name in before},
    )


def _without_estimates(side: ReplaySide) -> ReplaySide:
    """Remove the estimates that are not valid if a decision changed: the interval of the rate, and
    all token counts.
    """
    rate = replace(side.rate, low=math.nan, high=math.nan, method="count of recorded chunks")
    return replace(
        side,
        rate=rate,
        tokens="unknown",
        draft_tokens=None,
        target_tokens=None,
        scored_tokens=None,
    )


def _accuracy(recorded: _Recorded, problems: Sequence[ReplayedProblem], undecided: int) -> Estimate:
    """Return the accuracy if every vote is known; otherwise return bounds on the accuracy."""
    if not undecided:
        return recorded.accuracy({problem.problem: problem.answer for problem in problems})
    asked = {
        name: one.problem
        for name, one in recorded.record.problems.items()
        if one.problem.answer is not None
    }
    bounds = [
        _bounds(recorded, asked[problem.problem], problem)
        for problem in problems
        if problem.problem in asked
    ]
    if not bounds:
        return recorded.accuracy({})
    low = mean_estimate([worst for worst, _ in bounds], len(bounds))
    high = mean_estimate([best for _, best in bounds], len(bounds))
    note = f"for {undecided:,} of the votes, the recorded rollouts do not determine the winner"
    return replace(low, value=math.nan, high=high.high, method="bounds", note=note)


def _bounds(
    recorded: _Recorded, problem: Problem, replayed: ReplayedProblem
) -> tuple[float, float]:
    """Return a lower and an upper bound of the vote's accuracy.

    The lower bound assumes that all unknown rollouts have the same wrong answer. The upper bound
    assumes that all of them are correct.
    """
    right = 0.0
    wrong = 0.0
    for answer, weight in zip(replayed.tally.answers, replayed.tally.weights, strict=True):
        if recorded.right(problem, answer):
            right = max(right, weight)
        else:
            wrong = max(wrong, weight)
    return _won(right, wrong + replayed.unknown), _won(right + replayed.unknown, wrong)


def _won(right: float, wrong: float) -> float:
    """Return 1 if the correct answer wins the vote, 0 if it loses, and 0.5 in a tie."""
    return 0.5 if right == wrong and right > 0 else float(right > wrong)


def _side(
    decisions: Decisions, accuracy: Estimate, spent: Sequence[Usage | ReplayedRollout]
) -> ReplaySide:
    return ReplaySide(
        rate=share_estimate(decisions.by_question().values()),
        accuracy=accuracy,
        decisions=len(decisions),
        tokens="counted",
        draft_tokens=sum(one.draft_tokens for one in spent),
        target_tokens=sum(one.target_tokens for one in spent),
        scored_tokens=sum(one.scored_tokens for one in spent),
    )
