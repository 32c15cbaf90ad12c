"""The verb that runs another policy over a recorded run, without a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atts.api.calibrating import setup_of
from atts.api.recorded import directory_of
from atts.api.setup import CalibrationMode, answers_for, grade
from atts.core import Chunk, Decision, Outcome, Rollout, Turn
from atts.errors import JournalError, OptionError
from atts.evaluators import Estimate, mean_estimate, share_estimate
from atts.journal import (
    FACTS,
    JOURNAL,
    MANIFEST,
    Decided,
    Graded,
    Manifest,
    RunState,
    load_manifest,
    read_decisions,
    read_entries,
)
from atts.pipelines import CappedGate, Features, Gate, Policy, RoundGate
from atts.pipelines.votes import VoteKind
from atts.run import RunResult

if TYPE_CHECKING:
    from atts.analysis import Replayed

Place = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class ReplayedDecision:
    """A decision taken again, beside the one that was carried out."""

    decision: Decision
    recorded: Decision
    off_policy: bool  # an earlier decision of its rollout already came out otherwise: its chunk is another story's


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: as recorded, or as replayed. Tokens are those of the recorded rollouts that were kept."""

    rate: Estimate
    accuracy: Estimate
    decisions: int
    draft_tokens: int
    target_tokens: int
    scored_tokens: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What another policy would have decided on a recorded run, and how far that can be believed.

    `off_policy` is the share of rollouts in which a decision came out otherwise: what they would have written from
    there on nobody knows, so their recorded answers vote. `on_policy_accuracy` is of problems without any such.
    """

    recorded: Side
    replayed: Side
    nominal: float | None
    changed: int
    off_policy: float
    on_policy_accuracy: Estimate
    decisions: tuple[ReplayedDecision, ...]
    answers: Mapping[str, tuple[str | None, str | None]]  # by problem: recorded, replayed


def replay(
    run: str | Path | RunResult,
    *,
    method: str | None = None,
    rate: float | None = None,
    mode: CalibrationMode | None = None,
    samples: int | None = None,
    turns: int | None = None,
    vote: VoteKind | None = None,
    budget: int | None = None,
    gate: Gate | RoundGate | None = None,
    seed: int | None = None,
) -> Replay:
    """Decide anew on every recorded score and vote again; what is not said stays as it was recorded.

    `budget` is the most takeovers by the target per problem, in the order in which decisions were taken; `gate` must be
    fresh, for it learns from this replay.

    :raises OptionError: an unknown method, mode or vote, more samples or turns than were recorded, a negative budget.
    :raises JournalError: there is no run, or it cannot be read.

    >>> import tempfile
    >>> from atts.api import Setup, evaluate_sync
    >>> from atts.testing import toy_problems
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     setup = Setup(draft="scripted", target="scripted", rate=0.3)
    ...     result = evaluate_sync(toy_problems(2), setup, directory=folder)
    ...     same, none = replay(result), replay(result, method="draft-only")
    >>> same.changed, none.replayed.rate.value, none.changed == none.recorded.decisions
    (0, 0.0, False)
    """
    from atts.analysis import replay_policy

    record = _Record.of(directory_of(run))
    policy = record.policy(samples, turns, vote)
    words = {"method": method, "rate": rate, "mode": mode, "seed": seed}
    said = {name: value for name, value in words.items() if value is not None}
    chosen = gate if gate is not None else record.gate(said, policy.samples)
    if budget is not None:
        chosen = _capped(chosen, budget)
    again = replay_policy(record.outcomes, chosen, policy, record.group, order=tuple(record.decided), told=record.told)
    return _compare(record, policy, again)


@dataclass(frozen=True, slots=True)
class _Record:
    """A run directory, as far as a replay needs it."""

    manifest: Manifest
    outcomes: Sequence[Outcome]
    decided: Mapping[Place, Decision]
    told: Mapping[Place, Mapping[str, float]]
    verdicts: Mapping[tuple[str, str], str]  # of answers that were graded then

    @classmethod
    def of(cls, directory: Path) -> _Record:
        manifest = load_manifest(directory / MANIFEST)
        path = directory / JOURNAL
        if manifest is None or not path.exists():
            raise JournalError(directory, "there is no run here", "Give the directory of `atts eval --out DIRECTORY`")
        state, outcomes, verdicts = RunState(), dict[str, Outcome](), dict[tuple[str, str], str]()
        for entry in read_entries(path, kinds=FACTS):
            if isinstance(entry.event, Graded) and entry.event.answer is not None:
                verdicts[entry.event.problem, entry.event.answer] = entry.event.status
            outcome = state.apply(entry)
            if outcome is not None and outcome.rollouts:
                outcomes[outcome.problem.id] = outcome
        if not outcomes:
            raise JournalError(directory, "no problem is finished, so there is nothing to replay", "Let the run go on")
        taken = list(read_decisions(read_entries(path, kinds=(Decided,))))
        decided = {place: event.decision for place, event in taken}
        return cls(
            manifest,
            tuple(_with_cut_turns(outcome, decided) for outcome in outcomes.values()),
            decided,
            {place: event.features for place, event in taken},
            verdicts,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration's values."""
        return {name: held.value for name, held in self.manifest.configuration.items()}

    def group(self, answers: Sequence[str]) -> Sequence[int]:
        """Classes of equal answers, by the rules of the first problem's kind."""
        return answers_for(self.outcomes[0].problem.kind).group(answers)

    def policy(self, samples: int | None, turns: int | None, vote: VoteKind | None) -> Policy:
        """The recorded policy, cut; what was never drawn cannot be replayed."""
        recorded = self.settings.get("policy") or {}
        base = Policy(
            samples=recorded.get("samples", 1), turns=recorded.get("turns", 1), vote=recorded.get("vote", "majority")
        )
        for name, wanted in (("samples", samples), ("turns", turns)):
            most = getattr(base, name)
            if wanted is not None and wanted > most:
                raise OptionError(name, f"{wanted} is more than the {most} that were recorded; no replay can add any")
        said = {"samples": samples, "turns": turns, "vote": vote}
        return replace(base, **{name: value for name, value in said.items() if value is not None})  # type: ignore[arg-type]

    def gate(self, changes: Mapping[str, Any], samples: int) -> Gate | RoundGate:
        """The recorded gate, fresh, with these changes, for so many rollouts of a problem."""
        setup = setup_of(self.manifest)
        return replace(setup, policy=replace(setup.policy, samples=samples), **changes).decider()[0]

    def right(self, problem: str, answer: str | None) -> float | None:
        """1 or 0 as the grader said then or says now; None without a reference or a word from it."""
        asked = next(outcome.problem for outcome in self.outcomes if outcome.problem.id == problem)
        if asked.answer is None:
            return None
        if answer is None:
            return 0.0
        status = self.verdicts.get((problem, answer))
        if status is None:
            words = {"equal": "correct", "different": "wrong", "unscored": "unscored"}
            status = words[grade(answer, asked).status]
        return None if status == "unscored" else float(status == "correct")


def _with_cut_turns(outcome: Outcome, decided: Mapping[Place, Decision]) -> Outcome:
    """The outcome with the decisions of turns that a settled vote cut short: the gate learned from them as well."""
    lines: list[Rollout] = []
    for line in outcome.rollouts:
        cut = decided.get((line.problem, line.sample, len(line.turns)))
        if cut is not None and cut.score is not None:
            nothing = Chunk("draft", "", (), (), "length")
            turn = Turn(len(line.turns), (), (nothing,), cut.score, cut, "cut short")
            line = replace(line, turns=(*line.turns, turn))
        lines.append(line)
    return replace(outcome, rollouts=tuple(lines))


def _capped(gate: Gate | RoundGate, budget: int) -> Gate:
    if budget < 0:
        raise OptionError("budget", f"{budget} takeovers per problem are less than none")
    if isinstance(gate, RoundGate):
        raise OptionError("budget", "a gate that ranks whole rounds has its budget in its rate; leave one of them out")
    spent = Counter[str]()

    def take(features: Features) -> bool:
        if spent[features.question] >= budget:
            return False
        spent[features.question] += 1
        return True

    return CappedGate(gate, take)


def _compare(record: _Record, policy: Policy, again: Replayed) -> Replay:
    strayed = {
        (line.problem, line.sample): line.off_policy_from for problem in again.problems for line in problem.rollouts
    }
    pairs = tuple(_pairs(record, again, strayed))
    answers = {
        problem.problem: (outcome.answer, problem.answer)
        for outcome, problem in zip(record.outcomes, again.problems, strict=True)
    }
    faithful = {p.problem for p in again.problems if all(r.off_policy_from is None for r in p.rollouts)}
    rates = [decision.rate for decision in again.decisions if math.isfinite(decision.rate)]
    lines = [line for problem in again.problems for line in problem.rollouts]
    tokens = tuple(
        sum(getattr(line, name) for line in lines) for name in ("draft_tokens", "target_tokens", "scored_tokens")
    )
    usages = [rollout.usage for outcome in record.outcomes for rollout in outcome.rollouts]
    spent = tuple(sum(getattr(u, name) for u in usages) for name in ("draft_tokens", "target_tokens", "scored_tokens"))
    return Replay(
        _side(record, [pair.recorded for pair in pairs], {name: old for name, (old, _) in answers.items()}, spent),
        _side(record, again.decisions, {name: new for name, (_, new) in answers.items()}, tokens),
        rates[-1] if rates else None,
        sum(pair.decision.escalate != pair.recorded.escalate for pair in pairs),
        again.off_policy,
        _accuracy(record, {name: new for name, (_, new) in answers.items() if name in faithful}),
        pairs,
        answers,
    )


def _pairs(
    record: _Record, again: Replayed, strayed: Mapping[tuple[str, int], int | None]
) -> Iterator[ReplayedDecision]:
    recorded = {
        (rollout.problem, rollout.sample, turn.index): turn.decision
        for outcome in record.outcomes
        for rollout in outcome.rollouts
        for turn in rollout.turns
        if turn.decision is not None
    }
    for decision in again.decisions:
        since = strayed.get((decision.question, decision.sample))
        old = recorded[decision.question, decision.sample, decision.turn]
        yield ReplayedDecision(decision, old, since is not None and decision.turn > since)


def _side(
    record: _Record, decisions: Sequence[Decision], answers: Mapping[str, str | None], tokens: tuple[int, ...]
) -> Side:
    asked = Counter(decision.question for decision in decisions)
    handed = Counter(decision.question for decision in decisions if decision.escalate)
    rate = share_estimate((handed[question], count) for question, count in asked.items())
    return Side(rate, _accuracy(record, answers), len(decisions), *tokens)


def _accuracy(record: _Record, answers: Mapping[str, str | None]) -> Estimate:
    found = [record.right(problem, answer) for problem, answer in answers.items()]
    graded = [value for value in found if value is not None]
    return mean_estimate(graded, len(graded))
