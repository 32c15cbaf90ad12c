"""The gate of ordered levels, live: are its levels calibrated, do its sets cover, what does it save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from atts.api import Setup
from atts.calibration import LEVELS, Calibrator, OrdinalGate, OrdinalLearner, feature_row
from atts.core import Decision, Outcome
from atts.evaluators import compare_runs, mean_estimate
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.methods import SkippingGate
from atts.pipelines import ConformalGate, Features, level_of
from scripts.studies.harness import Cell, Options, Table, say
from scripts.studies.pipelines_arms import Grid, Pair, Solved, run_block
from scripts.studies.pipelines_policies import RATE, arm
from scripts.studies.pipelines_tables import interval, points

Stage = Literal["before", "after"]
Source = Literal["score", "gold", "vote"]
Place = tuple[str, int, int]
Lesson = tuple[Features, float | None, str]


@dataclass(frozen=True, slots=True)
class Noted:
    """What the gate said of a chunk before or after its score."""

    place: Place
    stage: Stage
    probabilities: tuple[float, ...]
    levels: tuple[str, ...]


class CollectingGate(ConformalGate):
    """The conformal gate, writing down what is known of each chunk: rows for a learner once the labels are there."""

    def __init__(self, calibrator: Calibrator) -> None:
        super().__init__(calibrator)
        self.known: dict[Place, tuple[Features, float | None]] = {}

    def decide(self, features: Features, score: float) -> Decision:
        """As the gate."""
        decision = super().decide(features, score)
        self.known[features.question, features.sample, features.turn] = features, decision.p
        return decision


class NotingGate(OrdinalGate):
    """The gate itself, writing down what its model said; with labels from references it learns nothing live."""

    def __init__(self, calibrator: Calibrator, learner: OrdinalLearner) -> None:
        super().__init__(calibrator, learner)
        self.noted: list[Noted] = []

    def learn(self, features: Features, p: float | None, level: str) -> None:  # type: ignore[override]
        """Votes teach only a gate that has nobody else to learn from."""
        if self.learner.source == "vote":
            super().learn(features, p, level)

    def preview(self, features: Features) -> Decision:  # type: ignore[override]
        """As the gate."""
        decision = super().preview(features)
        model = self.learner.before.model
        if model is not None:
            said = model.probabilities(feature_row(features)[1:])
            self._note(features, "before", said, decision.levels)
        return decision

    def decide(self, features: Features, score: float) -> Decision:  # type: ignore[override]
        """As the gate."""
        decision = super().decide(features, score)
        model = self.learner.after.model
        if model is not None:
            self._note(features, "after", model.probabilities(feature_row(features, decision.p)), decision.levels)
        return decision

    def _note(self, features: Features, stage: Stage, said: Sequence[float], levels: Sequence[str]) -> None:
        place = (features.question, features.sample, features.turn)
        self.noted.append(Noted(place, stage, tuple(said), tuple(levels)))


class NotingSkipper(SkippingGate):
    """The gate taught by scores, writing down what it would have said of chunks that it then learnt from."""

    def __init__(self, calibrator: Calibrator, alpha: float) -> None:
        super().__init__(calibrator, alpha)
        self.noted: list[Noted] = []
        self.labels: dict[Place, str] = {}

    def observe(self, decision: Decision, escalated: bool) -> None:
        """As the gate."""
        row = self._asked.get((decision.question, decision.sample, decision.turn, decision.issue))
        model = self.learner.before.model
        if row is not None and model is not None and decision.p is not None:
            place = (decision.question, decision.sample, decision.turn)
            self.noted.append(Noted(place, "before", tuple(model.probabilities(row[1:])), self.learner.levels(row)))
            self.labels[place] = self._level(decision)
        super().observe(decision, escalated)


@dataclass(frozen=True, slots=True)
class Taught:
    """A gate of ordered levels, who teaches it, and how often its sets may miss."""

    source: Source
    alpha: float

    @property
    def name(self) -> str:
        """Its row's."""
        return f"ordinal, labels by {self.source}, alpha {self.alpha:g}"


async def ordinal_study(options: Options, pair: Pair, samples: int = 8) -> list[Table]:
    """The gates of ordered levels beside the conformal one at the same rate, block by block in turn."""
    grid = Grid(options.pick(20, 150, 600), block=options.pick(20, 50, 50))
    found = [problem for shard in grid.shards() for problem in shard]
    lessons = await _lessons(options.pick(20, 100, 400), pair, samples, options.seed)
    score_alphas = options.pick((0.05,), (0.05, 0.1), (0.02, 0.05, 0.1))
    chosen = [*(Taught("score", alpha) for alpha in score_alphas), Taught("gold", 0.1), Taught("vote", 0.1)]
    gates = {one: _gate(one, lessons, options.seed) for one in chosen}
    plain = ConformalGate(Calibrator(RATE, Setup().mode, seed=options.seed))
    same = pair.plan(arm("ordinal", samples=samples), options.seed + 1)  # the same random numbers under every gate
    plans = [replace(same, gate=gate) for gate in (plain, *gates.values())]
    outcomes: list[list[Outcome]] = [[] for _ in plans]
    for start in range(0, len(found), grid.block):
        say(f"ordinal: problems from {start}")
        for kept, plan in zip(outcomes, plans, strict=True):
            kept += (await run_block(found[start : start + grid.block], plan))[0]
    base, *others = [[Solved.of(outcome) for outcome in kept] for kept in outcomes]
    rows = [_row("conformal", base, base)]
    rows += [_row(one.name, solved, base) for one, solved in zip(chosen, others, strict=True)]
    tables = [_said(one, gates[one], kept) for one, kept in zip(chosen, outcomes[1:], strict=True) if _is_told(one)]
    return [_saving(rows, len(found), samples, len(lessons)), *tables]


def _is_told(one: Taught) -> bool:
    return one.alpha == (0.05 if one.source == "score" else 0.1)


def _gate(one: Taught, lessons: Sequence[Lesson], seed: int) -> NotingGate | NotingSkipper:
    calibrator = Calibrator(RATE, Setup().mode, seed=seed)
    if one.source == "score":
        return NotingSkipper(calibrator, one.alpha)
    learner = OrdinalLearner(one.alpha, one.source)
    if one.source == "gold":
        for features, p, level in lessons:
            learner.learn(feature_row(features, p), level, features.question)
    return NotingGate(calibrator, learner)


def _said(one: Taught, gate: NotingGate | NotingSkipper, outcomes: Sequence[Outcome]) -> Table:
    labels = gate.labels if isinstance(gate, NotingSkipper) else _labels(outcomes)
    return _levels(gate.noted, labels, one)


async def _lessons(count: int, pair: Pair, samples: int, seed: int) -> list[Lesson]:
    """Labelled chunks of a calibration run under the conformal gate."""
    gate = CollectingGate(Calibrator(RATE, Setup().mode, seed=seed))
    plan = replace(pair.plan(arm("atts", samples=samples, early_stop="none"), seed + 2), gate=gate)
    outcomes, _ = await run_block(arithmetic("calibration", count), plan)
    labels = _labels(outcomes)
    return [(*gate.known[place], level) for place, level in labels.items() if place in gate.known]


def _row(name: str, solved: Sequence[Solved], base: Sequence[Solved]) -> tuple[Cell, ...]:
    n, asked = len(solved), sum(one.decisions for one in solved)
    scored, before = sum(one.scored for one in solved), sum(one.scored for one in base)
    change = compare_runs([one.right for one in base], [one.right for one in solved]).difference
    return (
        name,
        interval(mean_estimate([one.right for one in solved], n)),
        points(change),
        interval(mean_estimate([one.share for one in solved], n)),
        round(scored / n, 1),
        f"{scored / before - 1:+.0%}",
        round(sum(one.target for one in solved) / n, 1),
        round(sum(one.escalated for one in solved) / max(1, asked), 3),
    )


def _saving(rows: Sequence[tuple[Cell, ...]], problems: int, samples: int, lessons: int) -> Table:
    return Table(
        f"The ordinal gate beside the conformal one: {problems} problems, {samples} samples, rate {RATE:g}",
        (
            "gate", "vote right", "minus conformal, points", "pass@1", "scored tokens", "change", "target tokens",
            "escalated",
        ),
        tuple(rows),
        (
            "Labels by score: learnt in this run from the scores themselves, of every chunk at first, then of a seeded "
            "15 % (method `ordinal`). "
            f"Labels by gold: learnt from {lessons} chunks of other problems with reference answers, then frozen. "
            "Labels by vote: learnt in this very run from settled votes; where the draft is mostly wrong, wrong "
            "rollouts agree, teach the gate to keep them, and so it goes on. Tokens per problem; 95 % intervals over "
            "problems.",
        ),
    )  # fmt: skip


def _labels(outcomes: Sequence[Outcome]) -> dict[Place, str]:
    """The level that would have been due for each chunk, by the reference answers: nobody told the gate."""
    found: dict[Place, str] = {}
    for outcome in outcomes:
        for line in outcome.rollouts:
            if line.finish in ("answer", "end", "turns", "tokens"):
                is_right = line.answer == outcome.problem.answer
                for turn in line.turns:
                    if turn.decision is not None:
                        found[line.problem, line.sample, turn.index] = level_of(is_right, turn.decision.escalate)
    return found


_AGAINST: dict[Source, str] = {
    "score": "Held against the level that the score then gave, whatever the evidence said, before each "
    "taught; the sets promise to hold it with probability 1 - alpha.",
    "gold": "Labels were of calibration problems; held against the reference answers of these.",
    "vote": "The sets promise to hold a level by vote; here they are held against the reference answers.",
}


def _levels(noted: Sequence[Noted], labels: dict[Place, str], one: Taught) -> Table:
    rows: list[tuple[Cell, ...]] = []
    stages: tuple[Stage, ...] = ("before", "after")
    for stage in stages:
        known = [one for one in noted if one.stage == stage and one.place in labels]
        if known:
            rows += [_level(stage, place, known, labels) for place in range(len(LEVELS))]
            rows.append(_sets(stage, known, labels))
    return Table(
        f"Levels of the ordinal gate, labels by {one.source}, alpha {one.alpha:g}",
        ("stage", "level", "chunks", "mean said", "true share", "calibration error", "coverage of sets", "mean size"),
        tuple(rows),
        (f"{_AGAINST[one.source]} Calibration error: mean distance of said and true over ten bins.",),
    )


def _level(stage: Stage, place: int, noted: Sequence[Noted], labels: dict[Place, str]) -> tuple[Cell, ...]:
    pairs = [(one.probabilities[place], labels[one.place] == LEVELS[place]) for one in noted]
    said, true = sum(p for p, _ in pairs) / len(pairs), sum(is_it for _, is_it in pairs) / len(pairs)
    return stage, LEVELS[place], len(pairs), round(said, 3), round(true, 3), round(_error(pairs), 3), None, None


def _error(pairs: Sequence[tuple[float, bool]], bins: int = 10) -> float:
    """Expected calibration error, equal-count bins."""
    ordered = sorted(pairs)
    total = 0.0
    for number in range(bins):
        held = ordered[len(ordered) * number // bins : len(ordered) * (number + 1) // bins]
        total += abs(sum(p for p, _ in held) - sum(is_it for _, is_it in held))
    return total / max(1, len(ordered))


def _sets(stage: Stage, noted: Sequence[Noted], labels: dict[Place, str]) -> tuple[Cell, ...]:
    covered = sum(labels[one.place] in one.levels for one in noted) / len(noted)
    size = sum(len(one.levels) for one in noted) / len(noted)
    return stage, "sets", len(noted), None, None, None, round(covered, 3), round(size, 2)
