"""Every method from the same command on the embedded pair: accuracy, tokens and time, compared problem by problem."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import anyio
import numpy as np

from atts.api import Setup, build_engine
from atts.core import Outcome, Problem, Usage
from atts.engine import Engine
from atts.evaluators import Estimate, compare_runs, mean_estimate
from atts.evaluators.arithmetic import problems as arithmetic
from atts.pipelines import PRESETS, Policy
from atts.run import Session, evaluate
from scripts.studies.harness import Options, Table, say

Block = tuple[Problem, ...]


@dataclass
class Tally:
    """One method's problems so far: votes right, shares of rollouts right, decisions, tokens, seconds."""

    right: list[float] = field(default_factory=list[float])
    shares: list[float] = field(default_factory=list[float])
    rates: list[float] = field(default_factory=list[float])
    turns: dict[int, list[bool]] = field(default_factory=dict[int, list[bool]])
    usage: Usage = Usage()
    seconds: list[float] = field(default_factory=list[float])

    def take(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Add a block of problems."""
        self.seconds.append(seconds)
        for outcome in outcomes:
            self.right.append(float(outcome.answer == outcome.problem.answer))
            ended = [r for r in outcome.rollouts if r.finish not in ("settled", "cancelled")]
            self.shares.append(sum(r.answer == outcome.problem.answer for r in ended) / max(1, len(ended)))
            asked = [t.decision for r in outcome.rollouts for t in r.turns if t.decision]
            self.usage += outcome.usage
            if asked:
                self.rates.append(sum(d.escalate for d in asked) / len(asked))
            for decision in asked:
                self.turns.setdefault(decision.turn, []).append(decision.escalate)


def study(options: Options) -> list[Table]:
    """All methods, interleaved block by block, with the same problems, seeds, votes and early stop."""
    count = options.pick(20, 120, 2000)
    samples: tuple[int, ...] = options.pick((4,), (8,), (8, 16))
    seeds = range(options.seed, options.seed + options.pick(1, 1, 3))
    tables: list[Table] = []
    for m in samples:
        tallies = anyio.run(_measure, count, m, tuple(seeds), 0.2)
        tables += [_methods(tallies, count, m, len(seeds)), _control(tallies["atts"], 0.2)]
    return tables


async def _measure(count: int, samples: int, seeds: tuple[int, ...], rate: float) -> dict[str, Tally]:
    tallies: dict[str, Tally] = {row.name: Tally() for row in PRESETS}
    found = arithmetic("test", count)
    blocks = [tuple(found[i : i + 40]) for i in range(0, len(found), 40)]
    async with build_engine("embedded", "draft") as draft, build_engine("embedded", "target") as target:
        stored = await _stored(draft, target)
        for seed in seeds:
            setups = {name: _setup(name, samples, seed, rate, stored) for name in tallies}
            plans = {name: setup.plan(draft, target) for name, setup in setups.items()}
            for number, block in enumerate(blocks):
                say(f"pipelines: m={samples} seed={seed} block {number + 1} of {len(blocks)}")
                order = list(plans)[number % len(plans) :] + list(plans)[: number % len(plans)]
                for name in order:  # a gate goes on learning from block to block, as in one long run
                    began = time.perf_counter()
                    result = await evaluate(block, plans[name], Session(engines="are open", signals="ignore"))
                    tallies[name].take(result.kept, time.perf_counter() - began)
    return tallies


async def _stored(draft: Engine, target: Engine) -> tuple[float, ...]:
    """Turn-0 scores of the draft on calibration problems: what the published rule wants before a run."""
    setup = _setup("atts", 4, 10_000, 0.2, ())
    plan = setup.plan(draft, target)
    short = replace(plan, policy=replace(plan.policy, turns=1, early_stop="none"))
    result = await evaluate(arithmetic("calibration", 40), short, Session(engines="are open", signals="ignore"))
    turns = [turn for outcome in result.kept for line in outcome.rollouts for turn in line.turns]
    return tuple(turn.score for turn in turns if turn.score is not None)


def _setup(name: str, samples: int, seed: int, rate: float, stored: Sequence[float]) -> Setup:
    base = Setup()
    policy: Policy = replace(base.policy, samples=samples)
    return replace(base, method=name, seed=seed, rate=rate, stored=stored if name == "published" else (), policy=policy)


def _methods(tallies: Mapping[str, Tally], count: int, samples: int, seeds: int) -> Table:
    alone = tallies["target-only"]
    rows: list[tuple[str | int | float | None, ...]] = []
    for name, tally in tallies.items():
        difference = compare_runs(_by_problem(alone.right, count), _by_problem(tally.right, count)).difference
        ratios = [a / b for a, b in zip(alone.seconds, tally.seconds, strict=True)]
        rows.append(
            (
                name,
                _interval(mean_estimate(_by_problem(tally.right, count), len(tally.right))),
                f"{100 * difference.value:+.1f} [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]",
                _interval(mean_estimate(_by_problem(tally.shares, count), len(tally.shares) * samples)),
                tally.usage.draft_tokens,
                tally.usage.scored_tokens,
                tally.usage.target_tokens,
                f"{tally.usage.target_tokens / max(1, alone.usage.target_tokens):.1%}",
                f"{sum(tally.seconds):.1f}",
                f"{np.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]",
            )
        )
    return Table(
        f"Methods on graded arithmetic: {count} problems x {samples} samples x {seeds} seeds, rate 0.2",
        (
            "method", "vote", "minus target-only, points", "pass@1", "draft tokens", "scored", "target tokens",
            "of target-only", "seconds", "speed-up",
        ),
        tuple(rows),
        (
            "95 % intervals over problems; differences are paired by problem and seed.",
            "pass@1 is over rollouts that ran to their end; a vote that can no longer change cancels the rest.",
            "Speed-up: target-only's seconds over the method's, per block of up to 40 problems at once, interleaved; "
            "median and range. All methods share two engines and all cores.",
        ),
    )  # fmt: skip


def _control(tally: Tally, nominal: float) -> Table:
    rows = [
        (str(turn), len(made), sum(made) / len(made)) for turn, made in sorted(tally.turns.items()) if len(made) >= 50
    ]
    everything = [one for made in tally.turns.values() for one in made]
    rows.append(("all", len(everything), sum(everything) / max(1, len(everything))))
    spread = float(np.sqrt(np.mean((np.array(tally.rates) - nominal) ** 2))) if tally.rates else float("nan")
    return Table(
        f"Rate control in the live pipeline, nominal {nominal:g}",
        ("turn", "decisions", "realised rate"),
        tuple(rows),
        (f"Root mean square of (rate - nominal) over {len(tally.rates)} questions: {spread:.3f}.",),
    )


def _by_problem(values: Sequence[float], count: int) -> list[float]:
    """The mean over seeds of each problem."""
    return [float(mean) for mean in np.array(values).reshape(-1, count).mean(axis=0)]


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
