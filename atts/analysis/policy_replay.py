"""Policy replay: another gate, rate, number of samples or turns, or vote, decided again on recorded
rollouts.

A replayed decision that differs from the one that was carried out leaves the recorded path: what
the rollout would have written from there on is unknown. Such rollouts are kept, and counted as
off-policy wherever they matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from atts.analysis.turns import usage_of, was_cut_short
from atts.core import Decision, Outcome, Rollout, Turn, TurnKey
from atts.errors import CalibrationInputError
from atts.journal import Decided, is_censored, recorded_features
from atts.pipelines import (
    Features,
    Gate,
    Grouper,
    Policy,
    RoundGate,
    Tally,
    ballot,
    evidence,
    tally,
)


@dataclass(frozen=True, slots=True)
class ReplayedRollout:
    """A recorded rollout as the other policy would have it, as far as the record reaches."""

    problem: str
    sample: int
    answer: str | None
    is_censored: bool  # the record ends before an answer could come
    # the first turn after which the record is another story; None: never
    off_policy_from: int | None
    draft_tokens: int
    target_tokens: int
    scored_tokens: int


@dataclass(frozen=True, slots=True)
class ReplayedProblem:
    """One problem under the other policy."""

    problem: str
    tally: Tally
    rollouts: tuple[ReplayedRollout, ...]

    @property
    def answer(self) -> str | None:
        """What the vote comes to."""
        return self.tally.winner

    @property
    def is_censored(self) -> bool:
        """Whether there is no answer, and a rollout that could have brought one was stopped."""
        return self.answer is None and any(rollout.is_censored for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Every decision taken again in the recorded order, and what the votes come to."""

    decisions: tuple[Decision, ...]
    problems: tuple[ReplayedProblem, ...]

    @property
    def rate(self) -> float:
        """The fraction escalated; nan without decisions."""
        return (
            sum(d.escalate for d in self.decisions) / len(self.decisions)
            if self.decisions
            else math.nan
        )

    @property
    def off_policy(self) -> float:
        """The share of rollouts whose record does not tell what the policy would have led to; nan
        without rollouts.
        """
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
    """Decide anew on every recorded score, cut to the policy's samples and turns, and vote again.

    Of fewer samples than were recorded, those are taken whose end is known: what a settled vote or
    the end of the run cut is nobody's answer, neither right nor wrong.

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
    """So many rollouts, the first of those whose end is known, then of the others; in their own
    order.
    """
    known_first = sorted(
        outcome.rollouts, key=lambda rollout: (_is_cut_short(rollout, policy), rollout.sample)
    )
    return sorted(known_first[: policy.samples], key=lambda rollout: rollout.sample)


def _is_cut_short(rollout: Rollout, policy: Policy) -> bool:
    """Whether the record ends before an answer or the policy's last turn."""
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
        tokens=chunk.tokens,
        draft_logprob=told.get("draft_logprob", evidence(policy.score, chunk)),
        text=chunk.text,
    )
    return _JudgedChunk((rollout.problem, rollout.sample, turn.index), features, turn.score)
