"""Another gate, rate, number of samples, turns or vote on recorded rollouts, without a model, and honest about it.

A replayed decision that differs from the one that was carried out leaves the recorded path: what the rollout would have
written from there on nobody knows. Such rollouts are kept, and counted as off-policy wherever they matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from atts.core import Chunk, Decision, Outcome, Rollout, Turn
from atts.errors import CalibrationInputError
from atts.pipelines.gates import Features, Gate, RoundGate
from atts.pipelines.policy import Policy
from atts.pipelines.scores import evidence
from atts.pipelines.votes import Grouper, Tally, ballot, tally

Place = tuple[str, int, int]
"""Problem, sample, turn."""


@dataclass(frozen=True, slots=True)
class ReplayedRollout:
    """A recorded rollout as the other policy would have it, as far as the record reaches."""

    problem: str
    sample: int
    answer: str | None
    off_policy_from: int | None  # the first turn after which the record is another story; None: never
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


@dataclass(frozen=True, slots=True)
class Replayed:
    """Every decision taken again in the recorded order, and what the votes come to."""

    decisions: tuple[Decision, ...]
    problems: tuple[ReplayedProblem, ...]

    @property
    def rate(self) -> float:
        """The fraction escalated; nan without decisions."""
        return sum(d.escalate for d in self.decisions) / len(self.decisions) if self.decisions else math.nan

    @property
    def off_policy(self) -> float:
        """The share of rollouts whose record does not tell what the policy would have led to; nan without rollouts."""
        rollouts = [line for problem in self.problems for line in problem.rollouts]
        return sum(r.off_policy_from is not None for r in rollouts) / len(rollouts) if rollouts else math.nan


def replay_policy(
    outcomes: Iterable[Outcome],
    gate: Gate | RoundGate | None,
    policy: Policy,
    group: Grouper,
    *,
    order: Sequence[Place] = (),
    told: Mapping[Place, Mapping[str, float]] | None = None,
) -> Replayed:
    """Decide anew on every recorded score, cut to the policy's samples and turns, and vote again.

    `order` is the order in which decisions were taken; what it does not name follows turn by turn. `told` holds the
    features that were recorded with them. The gate must be fresh: it learns from this replay; without one, every
    decision stays what it was.
    """
    kept = [(outcome, _cut(outcome, policy)) for outcome in outcomes]
    turns = {
        (rollout.problem, rollout.sample, turn.index): (rollout, turn)
        for _, rollouts in kept
        for rollout in rollouts
        for turn in rollout.turns
        if turn.score is not None and turn.decision is not None
    }
    named = [place for place in order if place in turns]
    rest = sorted(set(turns) - set(named), key=lambda place: (place[2], place[0], place[1]))
    if gate is None:
        decisions = {place: _recorded(turn) for place, (_, turn) in turns.items()}
    else:
        known = {place: _features(turns[place], (told or {}).get(place, {}), policy) for place in (*named, *rest)}
        decisions = _decide(gate, [(place, known[place], _score(turns[place][1])) for place in (*named, *rest)])
    problems = tuple(_problem(outcome, rollouts, decisions, policy, group) for outcome, rollouts in kept)
    return Replayed(tuple(decisions.values()), problems)


def _decide(gate: Gate | RoundGate, asked: Sequence[tuple[Place, Features, float]]) -> dict[Place, Decision]:
    if isinstance(gate, RoundGate):
        return _by_round(gate, asked)
    decisions: dict[Place, Decision] = {}
    for place, features, score in asked:
        decision = gate.preview(features)
        if decision.action == "verify":
            try:
                decision = gate.decide(features, score)
            except CalibrationInputError as error:
                why = f"forced: {error}"
                decision = Decision("escalate", math.nan, place[0], place[2], place[1], why=why, origin="forced")
        gate.observe(decision, decision.escalate)
        decisions[place] = decision
    return decisions


def _by_round(gate: RoundGate, asked: Sequence[tuple[Place, Features, float]]) -> dict[Place, Decision]:
    rounds: dict[tuple[str, int], list[tuple[Place, Features, float]]] = {}
    for member in asked:
        rounds.setdefault((member[0][0], member[0][2]), []).append(member)
    decisions: dict[Place, Decision] = {}
    for members in rounds.values():
        made = gate.decide_round([(features, score) for _, features, score in members])
        decisions.update(zip((place for place, _, _ in members), made, strict=True))
    return decisions


def _cut(outcome: Outcome, policy: Policy) -> list[Rollout]:
    return [rollout for rollout in outcome.rollouts if rollout.sample < policy.samples]


def _problem(
    outcome: Outcome, rollouts: Sequence[Rollout], decisions: Mapping[Place, Decision], policy: Policy, group: Grouper
) -> ReplayedProblem:
    lines = [_rollout(rollout, decisions, policy) for rollout in rollouts]
    cast = [ballot(policy.vote, replace(r, answer=line.answer)) for line, r in zip(lines, rollouts, strict=True)]
    return ReplayedProblem(outcome.problem.id, tally([vote for vote in cast if vote], group), tuple(lines))


def _rollout(rollout: Rollout, decisions: Mapping[Place, Decision], policy: Policy) -> ReplayedRollout:
    turns = rollout.turns[: policy.turns]
    strayed = next((turn.index for turn in turns if _strays(rollout, turn, decisions)), None)
    chunks = [chunk for turn in turns for chunk in (*turn.chunks, *turn.discarded)]
    scored = sum(len(_judged(turn).target_ids) for turn in turns if turn.score is not None)
    return ReplayedRollout(
        rollout.problem,
        rollout.sample,
        rollout.answer if len(turns) == len(rollout.turns) else None,
        strayed,
        sum(chunk.tokens for chunk in chunks if chunk.author == "draft") - sum(_counted_twice(turn) for turn in turns),
        sum(chunk.tokens for chunk in chunks if chunk.author == "target"),
        scored,
    )


def _strays(rollout: Rollout, turn: Turn, decisions: Mapping[Place, Decision]) -> bool:
    new = decisions.get((rollout.problem, rollout.sample, turn.index))
    return new is not None and turn.decision is not None and new.escalate != turn.decision.escalate


def _counted_twice(turn: Turn) -> int:
    """Tokens of a repaired chunk that stay: they stand in the turn by themselves and in the discarded chunk."""
    return sum(
        kept.tokens
        for kept in turn.chunks
        for whole in turn.discarded
        if not kept.logprobs and whole.logprobs and whole.author == kept.author
        if kept.target_ids == whole.target_ids[: len(kept.target_ids)]
    )


def _judged(turn: Turn) -> Chunk:
    """The draft's chunk that was scored: kept, or discarded first."""
    drafted = [chunk for chunk in (*turn.discarded, *turn.chunks) if chunk.author == "draft"]
    return drafted[0] if drafted else turn.chunks[0]


def _recorded(turn: Turn) -> Decision:
    assert turn.decision is not None, "only judged turns are asked about"
    return turn.decision


def _score(turn: Turn) -> float:
    assert turn.score is not None, "only scored turns are asked about"
    return turn.score


def _features(recorded: tuple[Rollout, Turn], told: Mapping[str, float], policy: Policy) -> Features:
    rollout, turn = recorded
    chunk = _judged(turn)
    issue = turn.decision.issue if turn.decision else None
    return Features(
        rollout.problem,
        turn.index,
        rollout.sample,
        issue,
        int(told.get("attempt", 0)),
        chunk.tokens,
        told.get("draft_logprob", evidence(policy.score, chunk)),
        bool(told.get("has_answer", 0.0)),
        int(told.get("answered", 0)),
        told.get("agreement", 0.0),
        bool(told.get("agrees", 0.0)),
        chunk.text,
    )
