"""Compare methods on the same work: published ones, single choices of the policy, and the accuracy frontier."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import anyio
import torch

from atts.api import evaluate
from atts.calibration import MODES
from atts.calibration.score_replay import rate_metrics
from atts.core import Outcome, Problem
from atts.errors import UsageError
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.graph import Limit
from atts.pipelines import Chunking, CoinGate, ScoreRule
from atts.pipelines.policy import Takeover
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
from scripts.studies.harness import Chart, Options, Row, Table, interval, pair_name, points, say

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
    """Return the methods, each as its authors would run it.

    The published rule needs turn-0 scores before a run.
    """
    # the target continues after the chunk; a chunk with an answer is judged as well
    theirs: dict[str, Any] = {"takeover": "continue", "answers": "verify", "repeats": 15}
    made = [
        arm("atts (ours), as it comes", "atts"),
        arm(
            "the paper's policy, our gate by question and turn",
            "atts",
            rate_scope="question-turn",
            score=ScoreRule("mean"),
            **theirs,
        ),
        arm(
            "published: static scores, question by question",
            "paper-marginal",
            schedule="one by one",
            stored=tuple(stored),
        ),
        arm("published rule on our scheduler", "paper-marginal", stored=tuple(stored)),
        arm("sorted rounds (top-b)", "top-b"),
        arm("SpecReason", "spec-reason"),
        arm("Speculative Thinking", "speculative-thinking"),
        arm("target-only"),
        arm("draft-only"),
    ]
    every = [one.but(early_stop="none") for one in made]
    return [replace(one, setup=replace(one.setup, limits={})) for one in every]


def study_against(options: Options) -> list[Table]:
    """Compare methods on scripted engines in virtual time, then on the embedded pair."""
    torch.set_num_threads(1)
    virtual = _table("scripted engines, virtual time", "seconds", _scripted(options))
    embedded = _table("embedded pair, live", "processor", anyio.run(_embedded, options))
    return [virtual, embedded]


def _turn_zero(samples: int) -> Arm:
    """Return the arm whose turn-0 scores the published rule uses, on problems of their own."""
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
    """Run an arm on scripted engines with the given latencies, by the loop's clock."""
    async with (
        ScriptedEngine("draft", latency=drafts) as draft,
        ScriptedEngine("target", latency=targets) as target,
    ):
        plan = replace(case.setup, seed=seed).plan(draft, target, problems[0].kind)
        outcomes, seconds = await run_block(problems, plan, case.schedule, anyio.current_time)
    return Sum.of(case.name, outcomes, seconds), outcomes


async def _embedded(options: Options) -> dict[str, Sum]:
    grid = Grid(options.pick(12, 40, 500), (options.seed,), 500, options.pick(4, 20, 50))
    # the processor time of a thread counts as this process's
    async with Pair(worker="thread") as pair:
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
        [_method_row(name, clock, one, alone) for name, one in found.items()],
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


def _method_row(name: str, clock: Literal["seconds", "processor"], one: Sum, alone: Sum) -> Row:
    made = [
        (issue, solved.problem, turn, over)
        for solved in one.solved
        for issue, turn, over in solved.decisions
    ]
    _, questions, turns, taken = zip(*sorted(made), strict=True) if made else [()] * 4
    metrics = rate_metrics(questions, turns, [1.0] * len(made), taken, RATE)
    errors = (metrics["turn_rms"], metrics["question_rms"], metrics["worst_rolling_500"])
    target = f"{100 * one.total('target') / alone.total('target'):.1f} %"
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


SAMPLES = 8
# share of arithmetic or time that an option must save to replace a default it does not beat in
# votes
_WORTH = 0.05
# problems below which no default is changed: intervals of fewer are not to be trusted to a point
_ENOUGH = 100
_LOSS = -0.01  # votes it may lose at most, at the lower end of the interval


def study_ablations(options: Options) -> list[Table]:
    """Compare every choice, all arms in turn block by block.

    A folder remembers what is done.
    """
    chosen = choices(options.seed)
    grid = Grid(options.pick(20, _ENOUGH, 1000), (options.seed,), 2000, options.pick(10, 25, 50))
    ledger = Ledger(options.file(f"ablations-{options.effort}-{pair_name()}.jsonl"))
    anyio.run(_run, [arm("atts"), *(one for arms in chosen.values() for one in arms)], grid, ledger)
    default = ledger.of("atts", SAMPLES)
    found = [
        (choice, one.name, ledger.of(one.name, SAMPLES))
        for choice, arms in chosen.items()
        for one in arms
    ]
    count = len(default.solved)
    verdicts = list[Row]()
    for choice in chosen:
        words = {name: _verdict(one, default) for of, name, one in found if of == choice}
        wins = [f"{name}: {word}" for name, word in words.items() if word]
        change = "change" if count >= _ENOUGH else "ask again with more problems"
        verdicts.append((choice, "; ".join(wins) or "none", change if wins else "keep"))
    changed = [str(row[0]) for row in verdicts if row[2] != "keep"]
    return [
        Table.of(
            "Ablations of the default policy",
            "choice | option | vote right | minus default, points | target tokens | arithmetic | "
            "time | "
            "realised rate | rate error by question",
            [_ablation_row(*each, default) for each in [("default", "atts", default), *found]],
            f"{count} problems x {SAMPLES} samples, rate {RATE:g}; arithmetic and time are those "
            f"of the option over "
            "the default's; 95 % intervals, paired by problem.",
        ),
        Table.of(
            "Which defaults would change",
            "choice | options that win | verdict",
            verdicts,
            "An option wins where its votes are better (interval above 0) at no more arithmetic, "
            "or where it loses "
            f"less than {-100 * _LOSS:g} point (low end) and saves {100 * _WORTH:.0f} % of arithmetic or "
            f"time; else the "
            "default stays.",
            f"No default is changed on fewer than {_ENOUGH} problems; here are {count}. Several "
            f"options per choice "
            "are looked at: one narrow win among them is weaker evidence than its interval.",
            headline=f"of {len(chosen)} choices, those that another option beats: "
            f"{', '.join(changed) or 'none'}",
        ),
    ]


async def _run(arms: Sequence[Arm], grid: Grid, ledger: Ledger) -> None:
    async with Pair() as pair:
        await run_grid(arms, grid, ledger, pair, "ablations")


def choices(seed: int = 0) -> dict[str, list[Arm]]:
    """Return the alternatives for the policy, the gate and the vote."""
    atts = arm("atts")
    scores = {
        "per byte": ScoreRule("byte"),
        "mean": ScoreRule("mean"),
        "speculative": ScoreRule("speculative"),
    }

    return {
        "score": [atts.but(f"score: {name}", score=rule) for name, rule in scores.items()],
        "mode": [
            arm(f"mode: {mode}", "atts", rate_scope=mode) for mode in MODES if mode != "split"
        ],
        "chunk": [
            atts.but(f"chunk: {n} tokens", chunking=Chunking(n, n, ())) for n in (8, 16, 32, 64)
        ],
        "takeover": [
            atts.but(f"takeover: {takeover}", takeover=takeover) for takeover in get_args(Takeover)
        ],
        "gate": [
            arm("gate: coin", "atts", gate=CoinGate(RATE, seed)),
            arm("gate: sorted rounds", "top-b"),
            arm("gate: words", "speculative-thinking"),
            arm("gate: rating", "spec-reason"),
        ],
        "vote": [atts.but("vote: confidence", vote="confidence")],
        "early stop": [
            atts.but("stop: none", early_stop="none"),
            atts.but("stop: likely .95", early_stop="likely"),
            atts.but("stop: likely .8", early_stop="likely", confidence=0.8),
        ],
        "optimistic": [atts.but("optimistic: on", optimistic=True)],
    }


def _ablation_row(choice: str, name: str, one: Sum, default: Sum) -> Row:
    minus = "-" if one is default else points(one.minus(default, right))
    costs = (one.each("target"), one.gflops / default.gflops, _time(one, default))
    return (
        choice,
        name,
        interval(one.estimate(right)),
        minus,
        *costs,
        one.rate,
        one.rate_error(RATE),
    )


def _time(one: Sum, default: Sum) -> float:
    """Return seconds relative to the default's: the median over blocks that ran in turn."""
    ratio = one.speed_up(default)
    assert ratio is not None, "all arms run every block"
    return 1 / ratio.median


def _verdict(one: Sum, default: Sum) -> str:
    """Return the measures in which the option wins, if it does, by a mechanical rule."""
    votes = one.minus(default, right)
    cost = one.gflops / default.gflops
    seconds = _time(one, default)
    if votes.low > 0 and cost <= 1.0:
        return f"better votes {points(votes)}"
    if votes.low > _LOSS and cost <= 1 - _WORTH:
        return f"arithmetic {100 * cost:.0f} % at {points(votes)}"
    if votes.low > _LOSS and seconds <= 1 - _WORTH:
        return f"time {100 * seconds:.0f} % at {points(votes)}"
    return ""


def study_frontier(options: Options) -> list[Table]:
    """Run each method, rate and number of samples, journalled.

    Finished runs are not repeated.
    """
    rates = options.pick((0.2,), (0.05, 0.1, 0.2, 0.4), (0.05, 0.1, 0.2, 0.4))
    samples = options.pick((2, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16))
    arms = [
        arm(f"{method}-{m}", method, samples=m)
        for method in ("draft-only", "target-only")
        for m in samples
    ]
    arms += [
        arm(f"atts-{rate:g}-{m}", "atts", samples=m, rate=rate) for rate in rates for m in samples
    ]
    count = options.pick(8, 40, 500)
    found = dict[str, Sum]()
    with tempfile.TemporaryDirectory() as folder:
        place = options.file(f"frontier-{options.effort}") or Path(folder)
        for one in arms:
            found[one.name] = anyio.run(
                partial(frontier_run, one, count, place / "runs" / one.name, seed=options.seed)
            )
    return [frontier_table(found)]


async def frontier_run(one: Arm, problems: int, directory: Path, seed: int) -> Sum:
    """Return the sum of an arm on some problems, from now or from an earlier session.

    :raises UsageError: the run ended without all of its problems.
    """
    say(f"frontier: {one.name}")
    result = await evaluate(
        "arithmetic", replace(one.setup, seed=seed), limit=problems, directory=directory
    )
    if result.status != "finished":
        raise UsageError(
            f"the run {one.name} ended {result.status}; the same command goes on from there"
        )
    return Sum.of(one.name, tuple(result.outcomes()))


def frontier_table(found: Mapping[str, Sum]) -> Table:
    """Return the table of all runs, the cheapest first.

    Their names end in the number of samples.
    """
    rows: list[Row] = []
    for name, one in sorted(found.items(), key=lambda item: item[1].gflops):
        vote = one.estimate(right)
        accuracy = (round(vote.value, 4), interval(vote).partition(" ")[2])
        costs = (
            round(one.each("target"), 1),
            one.gflops,
            "yes" if _is_unbeaten(one, found) else "",
        )
        rows.append((name, name.rpartition("-")[0], *accuracy, *costs))
    return Table.of(
        f"The frontier: votes against arithmetic, {len(next(iter(found.values())).solved)} "
        f"problems, live",
        "run | method | vote right | 95 % | target tokens | GFLOPs | on the frontier",
        rows,
        chart=Chart("GFLOPs", "vote right", "method", "log"),
    )


def _is_unbeaten(one: Sum, found: Mapping[str, Sum]) -> bool:
    """Return whether no other run is at least as correct and as cheap, and better in one of them."""
    mine, *others = ((each.estimate(right).value, -each.gflops) for each in (one, *found.values()))
    return not any(
        other != mine and other[0] >= mine[0] and other[1] >= mine[1] for other in others
    )
