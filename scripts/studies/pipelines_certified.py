"""A policy certified on labelled problems, then deployed on others: does the bound on lost answers hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from atts.calibration import Certificate, StoredScores
from atts.core import Outcome, Problem
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.methods import LabelledRun, certified_gate, certify_runs, frozen_gate
from atts.pipelines import Gate
from scripts.studies.harness import Cell, Options, Table, say
from scripts.studies.pipelines_arms import Pair, run_block
from scripts.studies.pipelines_policies import arm

EPSILON, DELTA = 0.05, 0.1
"""Two runs of the target alone differ in a few answers, too: no bound below that can be certified by any number."""


def _right(outcome: Outcome) -> bool:
    return outcome.answer == outcome.problem.answer


async def certified_study(options: Options, pair: Pair, samples: int = 8) -> Table:
    """Stored scores, labelled runs from the highest rate down, a certificate, the certified gate on test problems."""
    warm, labelled, fresh = options.pick((10, 40, 20), (40, 200, 200), (100, 1000, 1000))
    found = arithmetic("calibration", warm + labelled)
    stored = await _scores(found[:warm], pair, options.seed)
    problems, unseen = found[warm:], arithmetic("test", fresh)
    target = await _run("target-only", None, problems, pair, samples, options.seed)
    runs: list[LabelledRun] = []
    rows: list[tuple[Cell, ...]] = []
    for rate in options.pick((0.3, 0.2), (0.4, 0.3, 0.2, 0.1), (0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)):
        say(f"certificate: rate {rate:g}")
        outcomes = await _run("atts", frozen_gate(rate, stored), problems, pair, samples, options.seed)
        runs.append(LabelledRun("split", rate, outcomes))
        certificate = certify_runs(target, runs, _right, EPSILON, DELTA)
        rows.append(_row("calibration", certificate, outcomes))
        if not certificate.tested[-1].certified:
            break  # a fixed sequence ends at its first failure: lower rates could not be certified
    certificate = certify_runs(target, runs, _right, EPSILON, DELTA)
    notes = [f"{certificate.guarantee}.", f"Void with: {certificate.voided_by}."]
    if certificate.chosen is not None:
        gate = certified_gate(certificate, stored)
        rows += await _deploy(gate, certificate.chosen.rate, unseen, pair, samples, options.seed)
    return Table(
        f"Certified policy: at most {EPSILON:.0%} of answers lost, confidence {1 - DELTA:.0%}",
        ("problems", "rate", "escalated", "lost answers", "p", "certified", "target tokens per problem"),
        tuple(rows),
        tuple(notes),
    )


async def _deploy(
    gate: Gate, rate: float, problems: Sequence[Problem], pair: Pair, samples: int, seed: int
) -> list[tuple[Cell, ...]]:
    alone = await _run("target-only", None, problems, pair, samples, seed + 1)
    outcomes = await _run("atts", gate, problems, pair, samples, seed + 1)
    right = {outcome.problem.id: _right(outcome) for outcome in alone}
    lost = sum(right[one.problem.id] and not _right(one) for one in outcomes) / len(outcomes)
    words = "certified policy" in _whys(outcomes)
    return [
        (
            f"{len(problems)} unseen",
            rate,
            _escalated(outcomes),
            lost,
            None,
            "says so" if words else "-",
            _cost(outcomes),
        )
    ]


def _row(where: str, certificate: Certificate, outcomes: Sequence[Outcome]) -> tuple[Cell, ...]:
    last = certificate.tested[-1]
    words = "yes" if last.certified else "no"
    return f"{len(outcomes)} {where}", last.rate, _escalated(outcomes), last.loss, last.p, words, _cost(outcomes)


def _cost(outcomes: Sequence[Outcome]) -> float:
    return round(sum(outcome.usage.target_tokens for outcome in outcomes) / len(outcomes), 1)


def _escalated(outcomes: Sequence[Outcome]) -> float:
    made = [t.decision.escalate for o in outcomes for line in o.rollouts for t in line.turns if t.decision]
    return round(sum(made) / max(1, len(made)), 3)


def _whys(outcomes: Sequence[Outcome]) -> str:
    decisions = (t.decision for o in outcomes for line in o.rollouts for t in line.turns)
    return " ".join(decision.why for decision in decisions if decision)


async def _run(
    method: str, gate: Gate | None, problems: Sequence[Problem], pair: Pair, samples: int, seed: int
) -> tuple[Outcome, ...]:
    plan = pair.plan(arm(method, samples=samples), seed)
    return (await run_block(problems, replace(plan, gate=gate) if gate is not None else plan))[0]


async def _scores(problems: Sequence[Problem], pair: Pair, seed: int) -> StoredScores:
    """Scores of every chunk of the draft on problems of their own."""
    plan = pair.plan(arm("atts", samples=4, rate=0.0, early_stop="none"), seed + 77)
    outcomes, _ = await run_block(problems, plan)
    turns = [(o.problem.id, t) for o in outcomes for line in o.rollouts for t in line.turns if t.score is not None]
    return StoredScores(
        tuple(turn.score or 1.0 for _, turn in turns),
        tuple(name for name, _ in turns),
        tuple(turn.index for _, turn in turns),
    )
