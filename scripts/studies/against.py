"""The published implementation and what else a user would pick, on the same work: time, rates,
promises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import anyio
import torch

from atts.calibration.metrics import rate_metrics
from atts.core import Outcome, Problem
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.graph import Limit
from atts.testing import Latency, ScriptedEngine, run_virtual, toy_problems
from scripts.studies.arms import (
    RATE,
    Arm,
    Grid,
    Ledger,
    Pair,
    Sum,
    arm,
    right,
    run_block,
    run_grid,
    scores_of,
)
from scripts.studies.harness import Options, Row, Table, interval, say

DRAFT = Latency(per_sample=0.02, sampled_token=0.012, prefilled_token=2e-5, jitter=0.4)
TARGET = Latency(
    per_sample=0.05,
    sampled_token=0.045,
    per_score=0.05,
    scored_token=3e-4,
    prefilled_token=1e-4,
    jitter=0.4,
)
"""Durations like those of a 1.5B and a 32B model."""
SLOTS = {"draft": Limit(slots=16), "target": Limit(slots=4)}


def cases(stored: Sequence[float]) -> list[Arm]:
    """The methods, each as its authors would run it; the published rule needs turn-0 scores before
    a run.
    """
    # the target goes on after the chunk; a chunk with an answer is judged as well
    theirs: dict[str, Any] = {"takeover": "continue", "answers": "verify", "repeats": 15}
    published: dict[str, Any] = {**theirs, "stored": tuple(stored)}
    made = [
        arm("atts (ours), as it comes", "atts"),
        arm(
            "the paper's policy, our gate by question and turn",
            "paper",
            mode="question-turn",
            **theirs,
        ),
        arm(
            "published: static scores, question by question",
            "published",
            schedule="one by one",
            **published,
        ),
        arm("published rule on our scheduler", "published", **published),
        arm("sorted rounds (top-b)", "top-b"),
        arm("SpecReason", "spec-reason"),
        arm("Speculative Thinking", "speculative-thinking"),
        arm("target-only"),
        arm("draft-only"),
    ]
    every = [one.but(early_stop="none") for one in made]
    return [replace(one, setup=replace(one.setup, limits={})) for one in every]


def study(options: Options) -> list[Table]:
    """Scripted engines in virtual time, then the embedded pair."""
    torch.set_num_threads(1)
    virtual = _table("scripted engines, virtual time", "seconds", _scripted(options))
    embedded = _table("embedded pair, live", "processor", anyio.run(_embedded, options))
    return [virtual, embedded]


def _turn_zero(samples: int) -> Arm:
    """What the turn-0 scores of the published rule are taken from, on problems of their own."""
    return arm("atts", samples=samples, turns=1, early_stop="none")


def _scripted(options: Options) -> dict[str, Sum]:
    problems = toy_problems(options.pick(16, 40, 200), seed=options.seed)
    found = dict[str, Sum]()
    at_once = Latency()
    before = toy_problems(20, seed=options.seed + 1)
    _, outcomes = run_virtual(scripted, _turn_zero(4), before, options.seed, at_once, at_once)
    for case in cases(scores_of(outcomes)):
        say(f"against: scripted, {case.name}")
        limited = replace(case, setup=replace(case.setup, limits=SLOTS))
        found[case.name], _ = run_virtual(scripted, limited, problems, options.seed)
    return found


async def scripted(
    case: Arm,
    problems: Sequence[Problem],
    seed: int,
    drafts: Latency = DRAFT,
    targets: Latency = TARGET,
) -> tuple[Sum, tuple[Outcome, ...]]:
    """An arm on scripted engines whose calls take so long, by the loop's clock."""
    async with (
        ScriptedEngine("draft", latency=drafts) as draft,
        ScriptedEngine("target", latency=targets) as target,
    ):
        plan = replace(case.setup, seed=seed).plan(draft, target, problems[0].kind)
        outcomes, seconds = await run_block(problems, plan, case.schedule, anyio.current_time)
    return Sum.of(case.name, outcomes, seconds), outcomes


async def _embedded(options: Options) -> dict[str, Sum]:
    grid = Grid(options.pick(12, 40, 500), (options.seed,), 500, options.pick(4, 20, 50))
    async with Pair(worker="thread") as pair:  # whose processor time is this process's
        first = pair.plan(_turn_zero(4), 9_999)
        outcomes, _ = await run_block(arithmetic("calibration", options.pick(8, 30, 60)), first)
        arms = cases(scores_of(outcomes))
        ledger = Ledger()
        await run_grid(arms, grid, ledger, pair, "against: embedded")
    return {one.name: ledger.of(one.name) for one in arms}


def _table(where: str, clock: Literal["seconds", "processor"], found: Mapping[str, Sum]) -> Table:
    alone = found["target-only"]
    by = {"seconds": "in virtual time", "processor": "in processor time"}[clock]
    names = ("published: static", "the paper's policy", "atts (ours)")
    live = [one for name in names for title, one in found.items() if title.startswith(name)]
    rates = [f"{one.rate or 0:.2g} (error by question {one.rate_error(RATE):.2g})" for one in live]
    return Table.of(
        f"Methods side by side: {where}, {len(alone.solved)} problems x 8 samples, nominal rate "
        f"{RATE:g}",
        f"method | vote right | speed-up, {by} | target tokens, of target-only | draft and scored "
        f"tokens | "
        "realised rate | turn RMS | question RMS | worst 500 in a row",
        [_row(name, clock, one, alone) for name, one in found.items()],
        "Live: both engines share two cores, so processor time is what a run costs here; wall time "
        "would tell how busy "
        "the machine was."
        if clock == "processor"
        else "A toy model with honest log-probabilities; 16 draft and 4 target requests at once, a "
        "draft token 12 ms, "
        "a target token 45 ms, about as in the published runs.",
        headline=f"asked for {RATE:g}, the published rule takes over {rates[0]}, ours under the "
        f"same policy {rates[1]}"
        f". Our default spends where it helps and promises less: {rates[2]}",
    )


def _row(name: str, clock: Literal["seconds", "processor"], one: Sum, alone: Sum) -> Row:
    made = [
        (issue, solved.problem, turn, over)
        for solved in one.solved
        for issue, turn, over in solved.decisions
    ]
    _, questions, turns, taken = zip(*sorted(made), strict=True) if made else [()] * 4
    metrics = rate_metrics(questions, turns, [1.0] * len(made), taken, RATE)
    errors = (metrics["turn_rms"], metrics["question_rms"], metrics["worst_rolling_500"])
    target = f"{one.total('target') / alone.total('target'):.1%}"
    tokens = f"{one.total('draft')}, {one.total('scored')}"
    return (
        name,
        interval(one.estimate(right)),
        str(one.speed_up(alone, clock)),
        target,
        tokens,
        one.rate,
        *errors,
    )
