"""A recorded run replayed under another policy, without a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal

from atts.analysis.turns import usage_of, was_cut_short
from atts.calibration import DEFAULTS, HOLD, Calibrator, Mode, StoredScores, Tuning
from atts.core import Chunk, Decision, Outcome, Problem, Prompt, Rollout, Turn, TurnKey, Usage
from atts.errors import CalibrationInputError, JournalError, OptionError
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
    Decided,
    FinishedProblem,
    Graded,
    RecordedRun,
    RunState,
    is_censored,
    recorded_features,
)
from atts.pipelines import (
    CappedGate,
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
    """Make a calibrator with the run's stored scores, cap, seed and step.

    :raises CalibrationInputError: the mode needs stored scores, and the run names none.
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
    """A recorded rollout as the other policy would have it, as far as the record reaches."""

    problem: str
    sample: int
    answer: str | None  # as recorded; it votes only if it is known
    is_censored: bool  # the record ends before an answer could come
    # the first turn after which the record is another story; None: never
    off_policy_from: int | None
    draft_tokens: int
    target_tokens: int
    scored_tokens: int

    @property
    def is_known(self) -> bool:
        """Return whether the record says how this rollout ends under the other policy."""
        return self.off_policy_from is None and not self.is_censored


@dataclass(frozen=True, slots=True)
class ReplayedProblem:
    """One problem under the other policy; only rollouts whose end is known vote."""

    problem: str
    tally: Tally
    rollouts: tuple[ReplayedRollout, ...]

    @property
    def unknown(self) -> int:
        """Return how many rollouts end in a way that the record does not say."""
        return sum(not rollout.is_known for rollout in self.rollouts)

    @property
    def answer(self) -> str | None:
        """Return the result of the vote, None where unknown rollouts could change it."""
        is_settled = not self.unknown or cannot_change(self.tally, self.unknown)
        return self.tally.winner if is_settled else None


@dataclass(frozen=True, slots=True)
class Replayed:
    """Every decision taken again in the recorded order, and what the votes come to."""

    decisions: tuple[Decision, ...]
    problems: tuple[ReplayedProblem, ...]

    @property
    def rate(self) -> float:
        """Return the fraction of chunks that escalated; nan without decisions."""
        return (
            sum(d.escalate for d in self.decisions) / len(self.decisions)
            if self.decisions
            else math.nan
        )

    @property
    def off_policy(self) -> float:
        """Return the share of rollouts that left their recorded path; nan without any."""
        rollouts = [rollout for problem in self.problems for rollout in problem.rollouts]
        return (
            sum(r.off_policy_from is not None for r in rollouts) / len(rollouts)
            if rollouts
            else math.nan
        )


def replay_policy(
    outcomes: Iterable[Outcome],
    gate: Gate | RoundGate | None,
    policy: Policy,
    group: Grouper,
    *,
    decided: Mapping[TurnKey, Decided] = MappingProxyType({}),
) -> Replayed:
    """Decide again on every recorded score, cut to the policy's samples and turns, and vote again.

    Of fewer samples than were recorded the first are taken, by their numbers: those that ended
    first would lean towards the quick. A rollout that was cut, or that left the recorded path, has
    an unknown answer and does not vote.

    `decided` holds the recorded decisions with their features, in the order in which they were
    taken; what it lacks follows turn by turn. The gate must be fresh: it learns from this replay;
    without one, every decision stays what it was.
    """
    kept = [(outcome, _cut(outcome, policy)) for outcome in outcomes]
    turns = {
        (rollout.problem, rollout.sample, turn.index): (rollout, turn)
        for _, rollouts in kept
        for rollout in rollouts
        for turn in rollout.turns
        if turn.score is not None and turn.decision is not None
    }
    if gate is None:
        decisions = {
            key: turn.decision for key, (_, turn) in turns.items() if turn.decision is not None
        }
    else:
        named = [key for key in decided if key in turns]
        rest = sorted(set(turns) - set(named), key=lambda key: (key[2], key[0], key[1]))
        decisions = _decide(
            gate, [_chunk(*turns[key], decided.get(key), policy) for key in (*named, *rest)]
        )
    problems = tuple(
        _problem(outcome, rollouts, decisions, policy, group) for outcome, rollouts in kept
    )
    return Replayed(tuple(decisions.values()), problems)


@dataclass(frozen=True, slots=True)
class _JudgedChunk:
    """A recorded chunk as a gate is asked about it."""

    key: TurnKey
    features: Features
    score: float


def _decide(gate: Gate | RoundGate, chunks: Sequence[_JudgedChunk]) -> dict[TurnKey, Decision]:
    if isinstance(gate, RoundGate):
        return _by_round(gate, chunks)
    decisions: dict[TurnKey, Decision] = {}
    for chunk in chunks:
        decision = gate.preview(chunk.features)
        if decision.action == "verify":
            try:
                decision = gate.decide(chunk.features, chunk.score)
            except CalibrationInputError as error:
                problem, sample, turn = chunk.key
                decision = Decision(
                    "escalate",
                    math.nan,
                    problem,
                    turn,
                    sample,
                    why=f"forced: {error}",
                    origin="forced",
                )
        gate.observe(decision, decision.escalate)
        decisions[chunk.key] = decision
    return decisions


def _by_round(gate: RoundGate, chunks: Sequence[_JudgedChunk]) -> dict[TurnKey, Decision]:
    rounds: dict[tuple[str, int], list[_JudgedChunk]] = {}
    for chunk in chunks:
        problem, _, turn = chunk.key
        rounds.setdefault((problem, turn), []).append(chunk)
    decisions: dict[TurnKey, Decision] = {}
    for members in rounds.values():
        made = gate.decide_round([(chunk.features, chunk.score) for chunk in members])
        decisions.update(zip((chunk.key for chunk in members), made, strict=True))
    return decisions


def _cut(outcome: Outcome, policy: Policy) -> list[Rollout]:
    """Return the first rollouts, as many as the policy has samples."""
    return sorted(outcome.rollouts, key=lambda rollout: rollout.sample)[: policy.samples]


def _is_cut_short(rollout: Rollout, policy: Policy) -> bool:
    """Return True if the record ends before an answer or the policy's last turn."""
    whole = sum(not was_cut_short(turn) for turn in rollout.turns)
    return is_censored(rollout.answer, rollout.finish) and (
        policy.turns is None or whole < policy.turns
    )


def _problem(
    outcome: Outcome,
    rollouts: Sequence[Rollout],
    decisions: Mapping[TurnKey, Decision],
    policy: Policy,
    group: Grouper,
) -> ReplayedProblem:
    replayed = tuple(_rollout(rollout, decisions, policy) for rollout in rollouts)
    ballots = [
        ballot(policy.vote, replace(rollout, answer=new.answer))
        for rollout, new in zip(rollouts, replayed, strict=True)
        if new.is_known
    ]
    return ReplayedProblem(
        outcome.problem.id, tally([vote for vote in ballots if vote], group), replayed
    )


def _rollout(
    rollout: Rollout, decisions: Mapping[TurnKey, Decision], policy: Policy
) -> ReplayedRollout:
    turns = rollout.turns[: policy.turns]
    is_whole = len(turns) == len(rollout.turns)
    spent = rollout.usage if is_whole else usage_of(turns)  # which has what entered no turn as well
    return ReplayedRollout(
        rollout.problem,
        rollout.sample,
        rollout.answer if is_whole else None,
        is_censored=_is_cut_short(rollout, policy),
        off_policy_from=next(
            (turn.index for turn in turns if _strays(rollout, turn, decisions)), None
        ),
        draft_tokens=spent.draft_tokens,
        target_tokens=spent.target_tokens,
        scored_tokens=spent.scored_tokens,
    )


def _strays(rollout: Rollout, turn: Turn, decisions: Mapping[TurnKey, Decision]) -> bool:
    new = decisions.get((rollout.problem, rollout.sample, turn.index))
    return new is not None and turn.decision is not None and new.escalate != turn.decision.escalate


def _chunk(rollout: Rollout, turn: Turn, decided: Decided | None, policy: Policy) -> _JudgedChunk:
    assert turn.score is not None, "only scored turns are asked about"
    chunk = turn.drafted or turn.chunks[0]
    told = decided.features if decided is not None else {}
    features = replace(
        recorded_features(rollout.problem, turn.index, rollout.sample, told),
        issue=turn.decision.issue if turn.decision else None,
        tokens=int(told.get("tokens", chunk.tokens)),
        draft_logprob=told.get("draft_logprob", mean_logprob(chunk)),
        draft_evidence=told.get("draft_evidence", evidence(policy.score, chunk)),
        text=chunk.text,
    )
    return _JudgedChunk((rollout.problem, rollout.sample, turn.index), features, turn.score)


@dataclass(frozen=True, slots=True)
class ReplayedDecision:
    """A decision taken again, and the one that was carried out."""

    decision: Decision
    recorded: Decision
    # an earlier decision of its rollout already came out otherwise: its chunk is another story's
    off_policy: bool


TokenCount = Literal["counted", "at least", "unknown"]


@dataclass(frozen=True, slots=True)
class ReplaySide:
    """One of the two: as recorded, or as replayed.

    Where rollouts left the recorded path, `rate` is a plain count over the recorded chunks without
    an interval, and tokens are unknown. They are "at least" so many where a rollout that the
    replayed vote needs was cut. An accuracy that the record does not determine has no value: its
    `low` and `high` are those of the bounds, so they hold the accuracy of a live run 95 % of the
    time.
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
    """Decisions of another policy on a recorded run, and what the record says about it.

    `off_policy` is the share of rollouts in which a decision came out otherwise: what they would
    have written from there on is unknown. `undecided` problems have too many rollouts of unknown
    end for their vote to be known. `censored` problems are in no accuracy: their rollouts were
    stopped before any could answer.
    """

    recorded: ReplaySide
    replayed: ReplaySide
    nominal: float | None
    changed: int
    off_policy: float
    undecided: int
    censored: int
    decisions: tuple[ReplayedDecision, ...]
    answers: Mapping[str, tuple[str | None, str | None]]  # by problem: recorded, replayed


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """Changes to the recorded policy; None means unchanged. `budget` is in escalations per problem."""

    samples: int | None = None
    turns: int | None = None
    vote: VoteKind | None = None
    budget: int | None = None


def replay_run(
    run: RecordedRun, change: PolicyChange, gate: Callable[[int], Gate | RoundGate] | None
) -> Replay:
    """Decide again on every recorded score and vote again.

    `gate` makes a fresh gate for so many rollouts of a problem; None keeps every recorded decision.
    Answers that were not graded then are graded now.

    :raises OptionError: more samples or turns than were recorded, a negative budget, or no score to
        decide on again.
    :raises JournalError: no problem is finished, or the journal cannot be read.
    """
    policy = _policy(run, change)
    # whole rollouts that vote by number are decided on from what was recorded with each decision
    needs_tokens = change.turns is not None or policy.vote != "majority"
    recorded = _read(run, needs_tokens=needs_tokens)
    if gate is not None or change.budget is not None:
        _check_scored(recorded.outcomes)
    chosen = None if gate is None else gate(policy.samples)
    if change.budget is not None:
        chosen = _capped(chosen or _RecordedGate(recorded.outcomes), change.budget)
    classes = partial(group, kind=recorded.outcomes[0].problem.kind)
    again = replay_policy(recorded.outcomes, chosen, policy, classes, decided=recorded.decided)
    is_same_vote = change.samples is None and change.turns is None and change.vote is None
    return _compare(recorded, again, is_same_vote=is_same_vote)


def _check_scored(outcomes: Iterable[Outcome]) -> None:
    """Refuse to decide again where no chunk has a score.

    :raises OptionError: no decision of the run was made on a score.
    """
    turns = (turn for one in outcomes for rollout in one.rollouts for turn in rollout.turns)
    if not any(turn.score is not None and turn.decision is not None for turn in turns):
        raise OptionError(
            "replay",
            "no chunk of the run has a score, so nothing can be decided again. Replay a run that "
            "scored its chunks; --samples, --turns and --vote need no scores",
        )


class _RecordedGate:
    """A gate that repeats the recorded decisions, except those that a budget overrules."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._decisions = {
            (rollout.problem, rollout.sample, turn.index): turn.decision
            for outcome in outcomes
            for rollout in outcome.rollouts
            for turn in rollout.turns
            if turn.decision is not None
        }

    def preview(self, features: Features) -> Decision:
        """Return the recorded decision, whether or not it needed a score."""
        return self._decisions[features.question, features.sample, features.turn]

    def decide(self, features: Features, score: float) -> Decision:
        """Return the recorded decision."""
        return self.preview(features)

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Learn nothing."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    outcomes: Sequence[Outcome]
    decided: Mapping[TurnKey, Decided]
    verdicts: Mapping[tuple[str, str], str]  # of answers that were graded then

    @property
    def known(self) -> dict[str, str | None]:
        """Return the recorded answer of every problem that had the time to come to one."""
        briefs = map(FinishedProblem.of, self.outcomes)
        return {brief.problem: brief.answer for brief in briefs if not brief.is_censored}

    def accuracy(self, answers: Mapping[str, str | None]) -> Estimate:
        """Return the accuracy of these answers, as they were graded then or are graded now."""
        asked = [outcome.problem for outcome in self.outcomes if outcome.problem.answer is not None]
        return accuracy_estimate(self.right(it, answers[it.id]) for it in asked if it.id in answers)

    def right(self, problem: Problem, answer: str | None) -> bool | None:
        """Return whether the answer is correct; None if the grader cannot decide."""
        if answer is None:
            return False
        status = self.verdicts.get((problem.id, answer)) or judge(problem, answer).status
        return None if status == "unscored" else status in ("correct", "equal")


def _read(run: RecordedRun, *, needs_tokens: bool) -> _Recorded:
    state = RunState()
    outcomes = dict[str, Outcome]()
    verdicts = dict[tuple[str, str], str]()
    decided = dict[TurnKey, Decided]()
    for entry in run.entries((*FACTS, Decided)):
        outcome = state.apply(entry)
        if outcome is not None and outcome.rollouts:
            outcomes[outcome.problem.id] = (
                outcome if needs_tokens else _without_tokens(outcome, decided)
            )
        match entry.event:
            case Graded(answer=str(answer)) as graded:
                verdicts[graded.problem, answer] = graded.status
            case Decided(decision) as event if decision.action != "verify":
                decided[decision.turn_key] = event
            case _:
                pass
    if not outcomes:
        raise JournalError(
            run.directory,
            "no problem is finished, so there is nothing to replay",
            "Let the run go on",
        )
    return _Recorded(
        [_with_cut_turns(one, decided) for one in outcomes.values()], decided, verdicts
    )


def _without_tokens(outcome: Outcome, decided: Mapping[TurnKey, Decided]) -> Outcome:
    """Return the outcome without the ids and log-probabilities that no decision asks for again.

    They are most of what a rollout takes in memory. What a gate receives of a chunk stands with its
    recorded decision; turns whose decision tells too little stay as they are.
    """
    rollouts: list[Rollout] = []
    for rollout in outcome.rollouts:
        turns: list[Turn] = []
        for turn in rollout.turns:
            event = decided.get((rollout.problem, rollout.sample, turn.index))
            is_told = event is not None and (
                not any(chunk.logprobs for chunk in (*turn.chunks, *turn.discarded))
                or {"draft_logprob", "draft_evidence"} <= event.features.keys()
            )
            if is_told or turn.score is None:
                turn = replace(
                    turn,
                    chunks=tuple(map(_without_ids, turn.chunks)),
                    discarded=tuple(map(_without_ids, turn.discarded)),
                )
            turns.append(turn)
        rollouts.append(replace(rollout, prompt=Prompt((), ()), turns=tuple(turns)))
    return replace(outcome, rollouts=tuple(rollouts))


def _without_ids(chunk: Chunk) -> Chunk:
    return Chunk(chunk.author, chunk.text, (), (), chunk.ended)


def _with_cut_turns(outcome: Outcome, decided: Mapping[TurnKey, Decided]) -> Outcome:
    """Return the outcome with the decisions of turns that a settled vote cut short."""
    rollouts: list[Rollout] = []
    for rollout in outcome.rollouts:
        cut = decided.get((rollout.problem, rollout.sample, len(rollout.turns)))
        if cut is not None and cut.decision.score is not None:
            nothing = Chunk("draft", "", (), (), "length")
            turn = Turn(len(rollout.turns), (), (nothing,), cut.decision.score, cut.decision)
            rollout = replace(rollout, turns=(*rollout.turns, turn))
        rollouts.append(rollout)
    return replace(outcome, rollouts=tuple(rollouts))


def _policy(run: RecordedRun, change: PolicyChange) -> Policy:
    """Return the recorded policy, cut; what was never drawn cannot be replayed."""
    recorded = run.policy
    samples = recorded.get("samples", 1)
    turns = recorded.get("turns", 1)
    for name, most, wanted in (
        ("samples", samples, change.samples),
        ("turns", turns, change.turns),
    ):
        if wanted is not None and wanted > most:
            raise OptionError(
                name, f"{wanted} is more than the {most} that were recorded; no replay can add any"
            )
    return Policy(
        samples=samples if change.samples is None else change.samples,
        turns=turns if change.turns is None else change.turns,
        vote=recorded.get("vote", "majority") if change.vote is None else change.vote,
    )


def _capped(gate: Gate | RoundGate, budget: int) -> Gate:
    if budget < 0:
        raise OptionError("budget", f"{budget} takeovers per problem are less than none")
    if isinstance(gate, RoundGate):
        raise OptionError(
            "budget",
            "a gate that ranks whole rounds has its budget in its rate; leave one of them out",
        )
    spent = Counter[str]()

    def take(features: Features) -> bool:
        if spent[features.question] >= budget:
            return False
        spent[features.question] += 1
        return True

    return CappedGate(gate, take)


def _compare(recorded: _Recorded, again: Replayed, *, is_same_vote: bool) -> Replay:
    pairs = tuple(_pairs(recorded, again))
    before = {outcome.problem.id: outcome.answer for outcome in recorded.outcomes}
    after = {problem.problem: problem.answer for problem in again.problems}
    known = recorded.known
    rates = [decision.rate for decision in again.decisions if math.isfinite(decision.rate)]
    usages = [rollout.usage for outcome in recorded.outcomes for rollout in outcome.rollouts]
    replayed = [rollout for problem in again.problems for rollout in problem.rollouts]
    old = _side([pair.recorded for pair in pairs], recorded.accuracy(known), usages)
    judged = [problem for problem in again.problems if problem.problem in known]
    if is_same_vote and not again.off_policy > 0:
        after = before  # also votes that ended before they were certain
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
    return Replay(
        old,
        new,
        nominal=rates[-1] if rates else None,
        changed=sum(pair.decision.escalate != pair.recorded.escalate for pair in pairs),
        off_policy=again.off_policy,
        undecided=undecided,
        censored=len(before) - len(known),
        decisions=pairs,
        answers={name: (before[name], after[name]) for name in before},
    )


def _without_estimates(side: ReplaySide) -> ReplaySide:
    """Return a side of which the record tells only what was decided on the recorded chunks."""
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
    """Return the accuracy where every vote is known, else an estimate that has bounds only."""
    if not undecided:
        return recorded.accuracy({problem.problem: problem.answer for problem in problems})
    asked = {
        outcome.problem.id: outcome.problem
        for outcome in recorded.outcomes
        if outcome.problem.answer is not None
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
    note = f"the record does not decide {undecided:,} votes"
    return replace(low, value=math.nan, high=high.high, method="bounds", note=note)


def _bounds(
    recorded: _Recorded, problem: Problem, replayed: ReplayedProblem
) -> tuple[float, float]:
    """Bound the vote: every unknown rollout wrong in the same way, and every one correct."""
    right = 0.0
    wrong = 0.0
    for answer, weight in zip(replayed.tally.answers, replayed.tally.weights, strict=True):
        if recorded.right(problem, answer):
            right = max(right, weight)
        else:
            wrong = max(wrong, weight)
    return _won(right, wrong + replayed.unknown), _won(right + replayed.unknown, wrong)


def _won(right: float, wrong: float) -> float:
    """Return the share of a vote that the correct answer wins; a tie is shared."""
    return 0.5 if right == wrong and right > 0 else float(right > wrong)


def _pairs(recorded: _Recorded, again: Replayed) -> Iterator[ReplayedDecision]:
    strayed = {
        (r.problem, r.sample): r.off_policy_from
        for problem in again.problems
        for r in problem.rollouts
    }
    carried_out = {
        (rollout.problem, rollout.sample, turn.index): turn.decision
        for outcome in recorded.outcomes
        for rollout in outcome.rollouts
        for turn in rollout.turns
        if turn.decision is not None
    }
    for decision in again.decisions:
        since = strayed.get((decision.question, decision.sample))
        yield ReplayedDecision(
            decision, carried_out[decision.turn_key], since is not None and decision.turn > since
        )


def _side(
    decisions: Sequence[Decision], accuracy: Estimate, spent: Sequence[Usage | ReplayedRollout]
) -> ReplaySide:
    asked = Counter(decision.question for decision in decisions)
    escalated = Counter(decision.question for decision in decisions if decision.escalate)
    return ReplaySide(
        rate=share_estimate((escalated[question], count) for question, count in asked.items()),
        accuracy=accuracy,
        decisions=len(decisions),
        tokens="counted",
        draft_tokens=sum(one.draft_tokens for one in spent),
        target_tokens=sum(one.target_tokens for one in spent),
        scored_tokens=sum(one.scored_tokens for one in spent),
    )
