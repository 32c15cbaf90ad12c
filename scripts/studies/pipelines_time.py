"""What time the policy takes beside the target alone, one problem at a time and all at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from atts.concurrency import collect
from atts.core import Outcome, Rollout, ScoreRequest
from atts.engine import Engine
from atts.local.compiling import native_library
from atts.local.model_config import read_model_config
from atts.models import path
from scripts.studies.arms import Grid, Ledger, Pair, Schedule, Sum, arm, right, run_grid
from scripts.studies.harness import Options, Row, Table, interval

SAMPLES = 8
ROUNDS = 5
Rates = Mapping[Literal["draft", "scored", "target"], float]
"""Seconds a token."""


async def timed(options: Options) -> list[Table]:
    """The target alone with either number of threads, the policy plain, drafting on, and skipping
    scores.
    """
    count = options.pick(4, 20, 100)
    seed = options.seed
    return [
        await _timed("latency: one problem at a time", "one by one", count, seed),
        await _timed(
            "throughput: all problems at once, 64 rollouts in flight", "together", count, seed
        ),
    ]


async def _timed(how: str, schedule: Schedule, count: int, seed: int) -> Table:
    make = partial(arm, samples=SAMPLES, schedule=schedule)
    arms = [
        make("target-only"),
        make("target-only, 2 threads", "target-only", threads=2),
        make("target-only, proposed to", "target-only", variant="proposed to"),
        make("exact"),
        make("atts"),
        make("atts, proposed to", "atts", variant="proposed to"),
        make("atts, drafting on", "atts", optimistic=True),
        *([make("atts, scores in bfloat16", "atts", variant="rounding")] if _can_round() else []),
        make("ordinal"),
        make("draft-only", early_stop="none"),
    ]
    name, _, words = how.partition(": ")
    ledger = Ledger()
    scoring = Rescoring()
    async with Pair((1, 2), {one.variant for one in arms if one.variant != "plain"}) as pair:
        rescore = partial(scoring.rescore, schedule=schedule, target=pair.targets[1])
        await run_grid(
            arms, Grid(count * ROUNDS, (seed,), count * ROUNDS, count), ledger, pair, name, rescore
        )
    found = {one.name: ledger.of(one.name) for one in arms}
    base = min(
        (found[name] for name in ("target-only", "target-only, 2 threads")),
        key=lambda one: one.seconds,
    )
    rates: Rates = {
        "draft": found["draft-only"].seconds / max(1, found["draft-only"].total("draft")),
        "scored": scoring.seconds / max(1, scoring.tokens),
        "target": base.seconds / max(1, base.total("target")),
    }
    d, s, t = rates.values()
    return Table.of(
        f"Time, {how}, {count * ROUNDS} problems x {SAMPLES} samples, the same vote and early stop "
        f"everywhere",
        "method | right | seconds | speed-up | processor time | d | s | g | bound d + s + g | "
        "measured part | "
        "deviation | draft tokens | scored | target tokens | of these drawn while scoring",
        [_time_row(name, one, base, (found["target-only"], rates)) for name, one in found.items()],
        "Blocks interleaved in one run. Base: the faster target-only without proposals. Processor "
        "time: that of this "
        f"process and its engines, against target-only with one thread. {t * 1e6:.0f} us per "
        f"target token, "
        f"{s * 1e6:.0f} us per scored token ({s / t:.2f} of it), {d * 1e6:.0f} us per draft token "
        f"({d / t:.2f}), "
        "measured in this run on the work alone.",
        headline=f"**{found['atts'].speed_up(base)}** times its speed, {words.split(',')[0]}",
    )


def _can_round() -> bool:
    """Whether this processor has products of pairs of bfloat16 numbers."""
    library = native_library("target", read_model_config(path("target"), "target"))[0]
    return bool(library.atts_has_pairs())


def _time_row(name: str, one: Sum, base: Sum, plain: tuple[Sum, Rates]) -> Row:
    alone, rates = plain
    decoded = {
        kind: one.total(kind) - (one.total("drawn") if kind == "target" else 0) for kind in rates
    }
    parts = [decoded[kind] * rate / base.seconds for kind, rate in rates.items()]
    measured = one.seconds / base.seconds
    bound = sum(parts)
    spread = one.speed_up(base)
    used = alone.speed_up(one, "processor")
    assert spread, "they ran side by side"
    assert used, "so did these"
    return (
        name,
        interval(one.estimate(right)),
        round(one.seconds, 2),
        spread.fixed(),
        used.fixed(),
        *(round(part, 3) for part in (*parts, bound, measured)),
        f"{measured / bound - 1:+.0%}" if bound else "-",
        *(one.total(kind) for kind in rates),
        one.total("drawn"),
    )


class Rescoring:
    """What scoring alone costs: every chunk of the draft's texts, which the target has not seen,
    chunk after chunk.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self._now = now

    async def rescore(
        self, name: str, outcomes: Sequence[Outcome], *, schedule: Schedule, target: Engine
    ) -> None:
        """Score the rollouts of the draft alone as the policy would, and nothing else."""
        if name != "draft-only":
            return
        began = self._now()
        for group in [[one] for one in outcomes] if schedule == "one by one" else [list(outcomes)]:
            lines = [line for outcome in group for line in outcome.rollouts]
            for wave in range(0, len(lines), 64):
                await collect(
                    [partial(self._score, line, target) for line in lines[wave : wave + 64]]
                )
        self.seconds += self._now() - began

    async def _score(self, line: Rollout, target: Engine) -> None:
        prefix = line.prompt.target_ids
        for chunk in (chunk for turn in line.turns for chunk in turn.chunks if chunk.target_ids):
            await target.score(
                ScoreRequest(prefix, chunk.target_ids, f"{line.problem}/{line.sample}")
            )
            prefix += chunk.target_ids
            self.tokens += len(chunk.target_ids)
