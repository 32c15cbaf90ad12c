"""How long the policy takes beside the target alone, one problem at a time and all at once, against a bound."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from atts.core import Outcome, Problem, Rollout, ScoreRequest, Usage
from atts.engine import Engine
from atts.run import Plan
from atts.tasks import collect
from scripts.studies.harness import Cell, Options, Spread, Table, say
from scripts.studies.pipelines_arms import Arm, Grid, Pair, run_block
from scripts.studies.pipelines_policies import arm, with_policy

Setting = Literal["latency", "throughput"]


@dataclass(slots=True)
class Timed:
    """One arm's blocks: seconds, tokens, answers."""

    seconds: list[float] = field(default_factory=list[float])
    usage: list[Usage] = field(default_factory=list[Usage])
    right: int = 0
    problems: int = 0

    def take(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        """One more block."""
        self.seconds.append(seconds)
        self.usage.append(sum((outcome.usage for outcome in outcomes), Usage()))
        self.right += sum(outcome.answer == outcome.problem.answer for outcome in outcomes)
        self.problems += len(outcomes)

    def total(self, kind: str) -> int:
        """Tokens of that kind over all blocks."""
        return sum(getattr(usage, kind) for usage in self.usage)


def arms(samples: int) -> list[Arm]:
    """The target alone with either number of threads, the policy plain, drafting on, and skipping scores."""
    plain = arm("atts", samples=samples)
    return [
        arm("target-only", samples=samples),
        arm("target-only, 2 threads", "target-only", samples=samples, threads=2),
        plain,
        with_policy(plain, "atts, drafting on", optimistic=True),
        arm("ordinal", samples=samples),
        arm("draft-only", samples=samples, early_stop="none"),
    ]


async def time_study(options: Options, samples: int = 8) -> list[Table]:
    """Both settings."""
    count = options.pick(4, 20, 100)
    return [await _setting(kind, count, samples, options.seed) for kind in ("latency", "throughput")]


async def _setting(setting: Setting, count: int, samples: int, seed: int) -> Table:
    rounds = 5
    found = [problem for shard in Grid(count * rounds).shards() for problem in shard]
    blocks = [tuple(found[i : i + count]) for i in range(0, len(found), count)]
    chosen = arms(samples)
    timed = {one.name: Timed() for one in chosen}
    scoring = Timed()
    async with Pair((1, 2)) as pair:
        plans = {one.name: pair.plan(one, seed) for one in chosen}
        for number, block in enumerate(blocks):
            say(f"time: {setting}, block {number + 1} of {len(blocks)}")
            order = [*plans][number % len(plans) :] + [*plans][: number % len(plans)]
            for name in order:
                outcomes, seconds = await _run(setting, block, plans[name])
                timed[name].take(outcomes, seconds)
                if name == "draft-only":  # texts the target has not seen: what scoring alone costs
                    scoring.take(*await rescore(setting, outcomes, pair.targets[1]))
    return _table(setting, samples, timed, scoring)


async def _run(setting: Setting, block: Sequence[Problem], plan: Plan) -> tuple[tuple[Outcome, ...], float]:
    if setting == "throughput":
        return await run_block(block, plan)
    outcomes: list[Outcome] = []
    total = 0.0
    for problem in block:
        found, seconds = await run_block([problem], plan)
        outcomes += found
        total += seconds
    return tuple(outcomes), total


async def rescore(setting: Setting, outcomes: Sequence[Outcome], target: Engine) -> tuple[Sequence[Outcome], float]:
    """Score every chunk of these rollouts as the policy would, chunk after chunk, and nothing else."""
    began = time.perf_counter()
    groups = [[outcome] for outcome in outcomes] if setting == "latency" else [list(outcomes)]
    for group in groups:
        lines = [line for outcome in group for line in outcome.rollouts]
        for wave in range(0, len(lines), 64):
            await collect([partial(_score_line, line, target) for line in lines[wave : wave + 64]])
    seconds = time.perf_counter() - began
    tokens = [sum(len(chunk.target_ids) for turn in line.turns for chunk in turn.chunks) for line in _lines(outcomes)]
    usage = Usage(scored_tokens=sum(tokens))
    return [replace(outcomes[0], usage=usage)], seconds


def _lines(outcomes: Sequence[Outcome]) -> list[Rollout]:
    return [line for outcome in outcomes for line in outcome.rollouts]


async def _score_line(line: Rollout, target: Engine) -> None:
    prefix = line.prompt.target_ids
    for turn in line.turns:
        for chunk in turn.chunks:
            if chunk.target_ids:
                await target.score(ScoreRequest(prefix, chunk.target_ids, f"{line.problem}/{line.sample}"))
                prefix += chunk.target_ids


def _table(setting: Setting, samples: int, timed: dict[str, Timed], scoring: Timed) -> Table:
    base = min((timed[name] for name in timed if name.startswith("target-only")), key=lambda one: sum(one.seconds))
    whole, drafting = sum(base.seconds), timed["draft-only"]
    rate_d = sum(drafting.seconds) / max(1, drafting.total("draft_tokens"))
    rate_s = sum(scoring.seconds) / max(1, scoring.total("scored_tokens"))
    rate_t = whole / max(1, base.total("target_tokens"))
    rows = [_row(name, one, base, (rate_d, rate_s, rate_t)) for name, one in timed.items()]
    how = "one problem at a time" if setting == "latency" else "all problems at once, 64 rollouts in flight"
    return Table(
        f"Time, {setting}: {how}, {samples} samples, the same vote and early stop everywhere",
        (
            "method", "right", "seconds", "speed-up", "d", "s", "g", "bound d + s + g", "measured part", "deviation",
            "draft tokens", "scored", "target tokens",
        ),
        tuple(rows),
        (
            f"Blocks interleaved in one run. Base: the faster target-only. {rate_t * 1e6:.0f} us per target token, "
            f"{rate_s * 1e6:.0f} us per scored token ({rate_s / rate_t:.2f} of it), {rate_d * 1e6:.0f} us per draft "
            f"token ({rate_d / rate_t:.2f}), measured in this run on the work alone.",
            "The bound adds up drafting, scoring and the target's writing as if nothing overlapped and nothing else "
            "cost anything: a deviation below 0 is overlap of the two engines, above it overhead and smaller batches.",
        ),
    )  # fmt: skip


def _row(name: str, one: Timed, base: Timed, rates: tuple[float, float, float]) -> tuple[Cell, ...]:
    whole = sum(base.seconds)
    kinds = ("draft_tokens", "scored_tokens", "target_tokens")
    parts = [one.total(kind) * rate / whole for kind, rate in zip(kinds, rates, strict=True)]
    measured, bound = sum(one.seconds) / whole, sum(parts)
    spread = Spread.of([a / b for a, b in zip(base.seconds, one.seconds, strict=True)])
    return (
        name,
        f"{one.right / one.problems:.3f}",
        round(sum(one.seconds), 2),
        f"{1 / measured:.2f} [{spread.low:.2f}, {spread.high:.2f}]",
        *(round(part, 3) for part in parts),
        round(bound, 3),
        round(measured, 3),
        f"{measured / bound - 1:+.0%}" if bound else "-",
        *(one.total(kind) for kind in kinds),
    )
