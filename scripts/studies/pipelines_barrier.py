"""What waiting costs: the same work without a barrier, question by question, and in synchronous rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import anyio

from atts.api import Setup
from atts.core import Outcome, Problem
from atts.engine import Engine
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.graph import Limit
from atts.run import Plan, Session, evaluate
from atts.testing import Latency, ScriptedEngine, run_virtual, toy_problems
from scripts.studies.harness import Cell, Options, Table, say
from scripts.studies.pipelines_arms import Pair

Schedule = Literal["work-conserving", "question by question"]


@dataclass(frozen=True, slots=True)
class Case:
    """A method under a schedule; `rollouts` is how many are in flight when the schedule allows it."""

    name: str
    method: str
    schedule: Schedule
    rollouts: int = 64


CASES = (
    Case("atts", "atts", "work-conserving"),
    Case("atts, question by question (as published)", "atts", "question by question"),
    Case("synchronous top-B, question by question", "top-b", "question by question"),
    Case("synchronous top-B, other problems fill the barrier", "top-b", "work-conserving"),
)

DRAFT = Latency(per_sample=0.02, sampled_token=0.012, prefilled_token=2e-5, jitter=0.4)
TARGET = Latency(
    per_sample=0.05, sampled_token=0.045, per_score=0.05, scored_token=3e-4, prefilled_token=1e-4, jitter=0.4
)
SLOTS = ((16, 4), (64, 16))
"""Draft and target requests at once: as the published suites' clients ask, and as one server each takes with ease."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a case came to."""

    seconds: float
    rate: float
    right: float
    target_tokens: int


def virtual(options: Options) -> Table:
    """Scripted engines with durations like those of a 1.5B and a 32B model, in virtual time."""
    count = options.pick(4, 16, 60)
    rows: list[tuple[Cell, ...]] = []
    for samples in options.pick((16,), (16,), (16, 32)):
        for slots in SLOTS:
            found: dict[str, Spent] = {}
            for case in CASES:
                say(f"barrier, virtual time: {case.name}, {samples} samples, {slots} requests at once")
                found[case.name] = run_virtual(partial(_scripted, case, samples, count, slots, options.seed))
            label = f"{slots[0]} + {slots[1]}"
            rows += [(label, *_row(samples, name, one, found["atts"])) for name, one in found.items()]
    return Table(
        f"No barrier, virtual time: {count} toy problems, rate 0.25",
        ("requests at once", "samples", "how", "seconds", "atts is faster by", "escalated", "right", "target tokens"),
        tuple(rows),
        (
            "Equal budget: the nominal rate is the same, the realised one is given. No early stop. Durations are "
            "log-normal around the engines' means (deviation of the logarithm 0.4), seeded by the request. With as "
            "few slots as one question fills by itself, only its tail is lost; with more, the rest of them idles.",
        ),
    )


async def _scripted(case: Case, samples: int, count: int, slots: tuple[int, int], seed: int) -> Spent:
    base = Setup()
    policy = replace(base.policy, samples=samples, turns=12, early_stop="none", first_wave=0)
    limits = {"draft": Limit(slots=slots[0]), "target": Limit(slots=slots[1])}
    setup = replace(base, method=case.method, rate=0.25, seed=seed, policy=policy, limits=limits, rollouts=128)
    async with ScriptedEngine("draft", latency=DRAFT) as draft, ScriptedEngine("target", latency=TARGET) as target:
        plan = setup.plan(draft, target, "text")
        return await _spend(case, toy_problems(count, 6), plan, anyio.current_time)


async def live(options: Options, pair: Pair, samples: int = 16) -> Table:
    """The embedded pair in wall time, cases in turn."""
    count, rounds = options.pick(4, 10, 40), options.pick(1, 3, 5)
    found = arithmetic("test", count * rounds, seed=options.seed + 7)
    totals: dict[str, list[Spent]] = {case.name: [] for case in CASES}
    for number in range(rounds):
        say(f"barrier, live: block {number + 1} of {rounds}")
        block = found[number * count : (number + 1) * count]
        for case in CASES[number % len(CASES) :] + CASES[: number % len(CASES)]:
            plan = _live_plan(case, samples, options.seed + number, pair.draft, pair.targets[1])
            totals[case.name].append(await _spend(case, block, plan, time.perf_counter))
    sums = {name: _sum(spent) for name, spent in totals.items()}
    rows = [_row(samples, name, one, sums["atts"]) for name, one in sums.items()]
    return Table(
        f"No barrier, live: {count * rounds} problems of graded arithmetic, {samples} samples, rate 0.25",
        ("samples", "how", "seconds", "atts is faster by", "escalated", "right", "target tokens"),
        tuple(rows),
        (
            "Wall time, cases in turn on the same two engines. Two cores are busy with few requests already, so little "
            "is lost at a barrier here: what a barrier costs shows where engines have room for more.",
        ),
    )


def _live_plan(case: Case, samples: int, seed: int, draft: Engine, target: Engine) -> Plan:
    base = Setup()
    policy = replace(base.policy, samples=samples, early_stop="none", first_wave=0)
    own = seed * 1009 + 7 * len(case.name)  # texts of its own: none is found in a cache
    return replace(base, method=case.method, rate=0.25, seed=own, policy=policy, rollouts=64).plan(draft, target)


async def _spend(case: Case, problems: Sequence[Problem], plan: Plan, clock: Callable[[], float]) -> Spent:
    session = Session(engines="are open", signals="ignore")
    began = clock()
    outcomes: list[Outcome] = []
    groups = [[problem] for problem in problems] if case.schedule == "question by question" else [list(problems)]
    for group in groups:
        outcomes += (await evaluate(group, plan, session)).kept
    seconds = clock() - began
    decisions = [t.decision for o in outcomes for line in o.rollouts for t in line.turns if t.decision]
    return Spent(
        seconds,
        sum(decision.escalate for decision in decisions) / max(1, len(decisions)),
        sum(outcome.answer == outcome.problem.answer for outcome in outcomes) / len(outcomes),
        sum(outcome.usage.target_tokens for outcome in outcomes),
    )


def _sum(spent: Sequence[Spent]) -> Spent:
    n = len(spent)
    return Spent(
        sum(one.seconds for one in spent),
        sum(one.rate for one in spent) / n,
        sum(one.right for one in spent) / n,
        sum(one.target_tokens for one in spent),
    )


def _row(samples: int, name: str, one: Spent, atts: Spent) -> tuple[Cell, ...]:
    return (
        samples, name, round(one.seconds, 2), f"{one.seconds / atts.seconds:.2f}x", round(one.rate, 3),
        round(one.right, 3), one.target_tokens,
    )  # fmt: skip
