"""Compare every method with the target alone on the embedded pair: accuracy, tokens, time and
transcripts.

The second part is `scripts/demo`, which runs every method in about a minute. The last part is the
study `speed`. It finds the fastest method on real clocks for each cost of the target and each
number of rollouts.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import accumulate, groupby, product, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

import anyio
import torch

from atts.accel import accelerated, options_of
from atts.api import Setup, calibrate, compare, evaluate, report
from atts.concurrency import collect
from atts.core import Outcome, Problem, Rollout, ScoreRequest, Turn
from atts.engine import Engine
from atts.evaluators import share_estimate
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.local import LocalEngine
from atts.local.cpu.compiling import native_library
from atts.local.logit_sampling import batch_sampling, inverse_cdf, probabilities
from atts.local.model_config import read_model_config
from atts.methods import (
    PRESETS,
    LabelledRun,
    certified_gate,
    certify_net_runs,
    certify_runs,
    frozen_gate,
)
from atts.models import path
from atts.models import path as model_path
from atts.pipelines import Gate, ScoreRule
from atts.run import Summary
from atts.sampling import Seed, uniforms
from scripts.studies.arms import (
    RATE,
    Arm,
    Grid,
    Ledger,
    Pair,
    Schedule,
    Solved,
    Sum,
    arm,
    right,
    run_block,
    run_grid,
    scores_of,
    share,
)
from scripts.studies.harness import (
    Cell,
    Chart,
    Options,
    Parts,
    Row,
    Spread,
    Table,
    figure,
    interval,
    pair_name,
    points,
    say,
    tree_seconds,
)
from scripts.studies.local import noisy, padded_folder

EXACT_SAMPLES = 8
BLOCK = 20
NEAR = 1e-4
"""If a random number is nearer than this to the border between two tokens' intervals, rounding
errors may change which token is sampled.
"""


@dataclass(frozen=True, slots=True)
class Flip:
    """The first position at which two rollouts with the same seed differ."""

    problem: str
    sample: int
    place: int
    # distance of the random number from the border between the intervals of both tokens; inf if the
    # intervals have no common border
    margin: float


async def same_transcripts(options: Options) -> list[Table]:
    """Compare the methods `exact` and `target-only` with the same seed on the same problems.

    Each method has its own engines, so the two share no cache.
    """
    count = options.pick(4, 100, 500)
    parts = Parts(
        options.file(f"pipelines-exact-{options.effort}-{options.seed}-{pair_name()}.jsonl")
    )
    arms = [
        arm(method, samples=EXACT_SAMPLES, early_stop="none", first_wave=0)
        for method in ("exact", "target-only")
    ]
    problems = arithmetic("test", count)
    async with Pair() as one, Pair() as other:
        for start in range(0, count, BLOCK):
            if str(start) not in parts:
                say(f"pipelines-exact: problems from {start} of {count}")
                block = problems[start : start + BLOCK]
                exact = await _run(arms[0], block, one, options.seed)
                alone = await _run(arms[1], block, other, options.seed)
                parts.keep(str(start), _compared(exact, alone, options.seed))
    return [_table(list(parts.values()))]


async def _run(method: Arm, problems: Sequence[Problem], pair: Pair, seed: int) -> list[Outcome]:
    plan = replace(method.setup, seed=seed).plan(pair.draft, pair.targets[1])
    return list((await run_block(problems, plan))[0])


def _compared(exact: Sequence[Outcome], alone: Sequence[Outcome], seed: int) -> dict[str, Any]:
    """Compare one block's outcomes under both methods.

    Return the counts of rollouts, equal votes and tokens, and every rollout that differs.
    """
    pairs = [
        pair
        for a, b in zip(exact, alone, strict=True)
        for pair in zip(a.rollouts, b.rollouts, strict=True)
    ]
    kinds = ("drawn_tokens", "target_tokens", "draft_tokens", "wasted_tokens")
    return {
        "problems": len(exact),
        "rollouts": len(pairs),
        "same_votes": sum(a.answer == b.answer for a, b in zip(exact, alone, strict=True)),
        **{name: sum(getattr(one.usage, name) for one in exact) for name in kinds},
        "flips": [
            asdict(_flip(mine, theirs, seed))
            for mine, theirs in pairs
            if _written(mine) != _written(theirs)
        ],
    }


def _written(line: Rollout) -> tuple[object, ...]:
    """Return what two equal rollouts have in common: the tokens, how the rollout finished, and the
    answer.
    """
    return line.ids("target"), line.finish, line.answer


def _flip(mine: Rollout, theirs: Rollout, seed: int) -> Flip:
    left = mine.ids("target")
    right = theirs.ids("target")
    place = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )
    margin = _margin(theirs, place, {*left[place : place + 1], *right[place : place + 1]}, seed)
    return Flip(mine.problem, mine.sample, place - len(mine.prompt.target_ids), margin)


def _margin(line: Rollout, place: int, tokens: set[int], seed: int) -> float:
    """Return how far a position's random number is from the border between the intervals of the
    given tokens.

    Return inf if the tokens' intervals have no common border.
    """
    ends = [
        *accumulate((_length(turn) for turn in line.turns), initial=len(line.prompt.target_ids))
    ]
    # a position after the tokens of all turns is that of the end token, which is sampled in the
    # last turn
    at = min(bisect_right(ends, place), len(line.turns)) - 1
    draw = Seed(seed, line.problem, line.sample, line.turns[at].index, "target")
    uniform = float(uniforms(draw, place - ends[at] + 1)[-1])
    with torch.inference_mode():
        logits = _reference()(torch.tensor([line.ids("target")[:place]])).logits[:, -1]
    law = probabilities(
        logits, batch_sampling([Setup().run_policy.sampling_of("target")], logits.shape[-1])
    )
    margin = float((law.cumsum(-1)[0] - uniform).abs().min())
    moved = [uniform, max(0.0, uniform - 1.01 * margin), min(1.0, uniform + 1.01 * margin)]
    drawn = inverse_cdf(law.expand(3, -1), torch.tensor(moved, dtype=torch.float64))
    return margin if tokens <= set(drawn.tolist()) else math.inf


def _length(turn: Turn) -> int:
    return sum(len(chunk.target_ids) for chunk in turn.chunks)


@cache
def _reference() -> Any:
    """Load the target in transformers. It is loaded only if two rollouts differ, and only once."""
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(model_path("target"), dtype=torch.float32).eval()


def _table(blocks: Sequence[dict[str, Any]]) -> Table:
    total = {name: sum(block[name] for block in blocks) for name in blocks[0] if name != "flips"}
    flips = [Flip(**flip) for block in blocks for flip in block["flips"]]
    by_problem = Counter(flip.problem for flip in flips)
    counts = [*by_problem.values(), *[0] * (total["problems"] - len(by_problem))]
    differing = share_estimate((count, EXACT_SAMPLES) for count in counts)
    near = sum(flip.margin <= NEAR for flip in flips)
    rows: list[Row] = [
        ("problems x samples", f"{total['problems']} x {EXACT_SAMPLES}"),
        (
            "rollouts identical to those of the target alone",
            f"{total['rollouts'] - len(flips)} of {total['rollouts']}",
        ),
        ("rollouts that differ", interval(differing)),
        (
            f"rollouts that first differ at a draw within {NEAR:g} of the border of both tokens",
            f"{near} of {len(flips)}",
        ),
        ("votes identical", f"{total['same_votes']} of {total['problems']}"),
        ("target tokens", f"{total['target_tokens']:,}"),
        ("target tokens drawn while scoring", f"{total['drawn_tokens']:,}"),
        ("draft tokens", f"{total['draft_tokens']:,}"),
        ("draft tokens discarded", f"{total['wasted_tokens']:,}"),
    ]
    rows += [
        (f"flip: {one.problem}/{one.sample} at token {one.place}", f"{one.margin:.2g}")
        for one in flips[:20]
    ]
    return Table.of(
        "Method exact compared with target-only: the same seed, separate engines",
        "quantity | value",
        rows,
        "The probabilities of all tokens divide the interval from 0 to 1, and a random number "
        "selects a token. Method `exact` computes many tokens at once, but "
        "target-only computes one token at a time, so their log-probabilities differ by about "
        "1e-5. A random number very near a border may therefore select different tokens. For each "
        "rollout that differs, the study computes with `transformers` how near the border was; "
        "inf means that the two tokens have no common border.",
        headline=f"method exact wrote {total['rollouts'] - len(flips):,} of {total['rollouts']:,} "
        f"rollouts token for "
        f"token as the target alone; the others first differ at a draw on a border ({near} of "
        f"{len(flips)})",
    )


TIMED_SAMPLES = 8
TIMED_ROUNDS = 5
Rates = Mapping[Literal["draft", "scored", "target"], float]
"""Seconds per token: written by the draft, scored by the target, and written by the target."""


async def timed(options: Options) -> list[Table]:
    """Measure times of the target alone with one and two threads, and of variants of the policy."""
    count = options.pick(4, 20, 100)
    seed = options.seed
    return [
        await _timed("latency: one problem at a time", "one by one", count, seed),
        await _timed(
            "throughput: all problems at once, 64 rollouts in flight", "together", count, seed
        ),
    ]


async def _timed(how: str, schedule: Schedule, count: int, seed: int) -> Table:
    make = partial(arm, samples=TIMED_SAMPLES, schedule=schedule)
    arms = [
        make("target-only"),
        make("target-only, 2 threads", "target-only", threads=2),
        make("target-only, with speculation", "target-only", variant="proposed to"),
        make("exact"),
        make("atts"),
        make("atts, with speculation", "atts", variant="proposed to"),
        make("atts, optimistic", "atts", optimistic=True),
        *([make("atts, scores in bfloat16", "atts", variant="rounding")] if _can_round() else []),
        make("draft-only", early_stop="none"),
    ]
    name, _, words = how.partition(": ")
    ledger = Ledger()
    scoring = Rescoring()
    async with Pair((1, 2), {one.variant for one in arms if one.variant != "plain"}) as pair:
        rescore = partial(scoring.rescore, schedule=schedule, target=pair.targets[1])
        await run_grid(
            arms,
            Grid(count * TIMED_ROUNDS, (seed,), count * TIMED_ROUNDS, count),
            ledger,
            pair,
            name,
            rescore,
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
    # seconds per token that the draft writes, that the target scores, and that the target writes
    drafted, scored, written = rates.values()
    return Table.of(
        f"Time, {how}, {count * TIMED_ROUNDS} problems x {TIMED_SAMPLES} samples, with the "
        "same vote and early stop for all methods",
        "method | accuracy | seconds | speed-up | processor time | d | s | g | bound d "
        "+ s + g | measured | deviation | draft tokens | scored | target tokens | drawn "
        "while scoring",
        [_time_row(name, one, base, (found["target-only"], rates)) for name, one in found.items()],
        "All methods were measured in turn. *Speed-up* is the time of target-only divided by the "
        "method's time; it uses the faster of the two rows of target-only without speculation. "
        "*Processor time* is relative to target-only on one thread. If a model runs alone, the "
        f"target writes a token in {written * 1e6:.0f} us and scores a token in "
        f"{scored * 1e6:.0f} us ({scored / written:.2f} times as long). The draft writes a token "
        f"in {drafted * 1e6:.0f} us ({drafted / written:.2f} times as long).",
        headline=f"**{found['atts'].speed_up(base)}** times as fast, {words.split(',')[0]}",
    )


def _can_round() -> bool:
    """Return whether this processor can multiply pairs of bfloat16 numbers."""
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
    assert spread, "both arms ran the same blocks"
    assert used, "all arms ran the same blocks"
    return (
        name,
        interval(one.estimate(right)),
        round(one.seconds, 2),
        spread.fixed(),
        used.fixed(),
        *(round(part, 3) for part in (*parts, bound, measured)),
        f"{100 * (measured / bound - 1):+.0f} %" if bound else "-",
        *(one.total(kind) for kind in rates),
        one.total("drawn"),
    )


class Rescoring:
    """The seconds and tokens of scoring alone, on texts that the target has not processed before."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self._now = now

    async def rescore(
        self, name: str, outcomes: Sequence[Outcome], *, schedule: Schedule, target: Engine
    ) -> None:
        """Score the rollouts of draft-only runs chunk by chunk, as method `atts` would."""
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


CLAIMED = {"target-only": RATE, "atts": 0.19}
"""Nominal rates of the compared methods. At a rate below 0.2 the target writes less than a fifth of
the tokens that it writes alone.
"""
ON_AXES = ("draft-only", "target-only", "atts")
SEQUENTIAL = 4
"""Samples per problem in the tables that limit turns and tokens."""
EPSILON = 0.05
NET = 0.02
DELTA = 0.1
"""Confidence parameter of the certificates: 0.1 gives 90 % confidence.

Two runs of the target alone also differ in a few answers, so bounds below EPSILON and NET cannot be
certified.
"""


async def study(options: Options) -> list[Table]:
    """Run all pipelines-... studies, one after the other, and return their tables.

    With --full and an output folder, each study resumes where an earlier run was killed.
    """
    tables = list[Table]()
    for part in (claim, rates, every_method, axes, timed, same_transcripts, certified):
        say(f"pipelines: {part.__name__}")
        tables += await part(options)
    return tables


def _ledger(options: Options, name: str) -> Ledger:
    """Return the ledger of the current embedded pair; each pair has its own file."""
    return Ledger(options.file(f"pipelines-{name}-{options.effort}-{pair_name()}.jsonl"))


async def claim(options: Options) -> list[Table]:
    """Compare the default policy with the target alone, on enough problems for a narrow interval.

    Every rollout runs to its end, so pass@1 covers all rollouts. An early stop would change no
    vote.
    """
    ledger = _ledger(options, "claim")
    # One seed already decides the claim; more seeds narrow the interval.
    seeds = options.pick((0,), (0,), (0, 1, 2))
    grid = Grid(options.pick(20, 160, 2000), seeds, 250, options.pick(20, 40, 50))
    async with Pair() as pair:
        for samples in options.pick((8,), (8,), (8, 16)):
            arms = [
                arm(name, samples=samples, rate=rate, early_stop="none")
                for name, rate in CLAIMED.items()
            ]
            await run_grid(arms, grid, ledger, pair, "claim")
    return claimed(ledger)


def claimed(ledger: Ledger) -> list[Table]:
    """Return a table and a verdict for each number of samples in the ledger."""
    tables: list[Table] = []
    for samples in sorted({samples for _, samples, _, _ in ledger.pieces}):
        title = "The claim" if not tables else f"The claim at {samples} samples"
        words = (
            f"The row *atts* has the default settings, but rate {CLAIMED['atts']:g}. No method "
            "cancelled samples."
        )
        compared = methods(title, ledger, list(CLAIMED), samples, words)
        tables.append(replace(compared, headline=_headline(ledger, samples)))
        tables.append(verdict(ledger, "atts", samples))
    return tables


def _headline(ledger: Ledger, m: int) -> str:
    ours = ledger.of("atts", m)
    alone = ledger.of("target-only", m)
    seeds = len({piece.seed for piece in alone.pieces})
    return (
        f"votes are **{points(ours.minus(alone, right))}** points more accurate than target-only; the "
        f"target writes "
        f"{100 * ours.each('target') / alone.each('target'):.1f} % as many tokens as target-only "
        f"({len(alone.by_problem(right))} problems x {m} samples x {seeds} seeds)"
    )


async def rates(options: Options) -> list[Table]:
    """Measure the realised rates of three gates, which control the rate per run, per question, or
    per question and turn.
    """
    grid = Grid(options.pick(20, 100, 1000), (0,), 1000, options.pick(20, 50, 50))
    ledger = _ledger(options, "rates")
    arms = [
        arm(
            f"{mode} at {rate:g}",
            "atts",
            rate_scope=mode,
            rate=rate,
            takeover="replace",
            early_stop="none",
        )
        for rate in options.pick((0.2,), (0.2,), (0.1, 0.2, 0.4))
        for mode in ("aci", "question-turn", "marginal")
    ]
    async with Pair() as pair:
        await run_grid(arms, grid, ledger, pair, "rates")
    return [control(ledger, one.name, 8, one.setup.rate) for one in arms]


async def every_method(options: Options) -> list[Table]:
    """Compare every baseline with the target alone, with the settings of the baseline's authors."""
    grid = Grid(
        options.pick(8, 60, 500), options.pick((0,), (0,), (0, 1, 2)), 500, options.pick(8, 20, 50)
    )
    ledger = _ledger(options, "methods")
    async with Pair() as pair:
        # The published rule needs first-chunk scores of calibration problems before a run. The
        # paper's variant for each question needs scores of the test questions, which this study
        # does not have.
        mean = ScoreRule("mean")
        first = pair.plan(arm("atts", samples=4, turns=1, early_stop="none", score=mean), 10_000)
        outcomes, _ = await run_block(arithmetic("calibration", 40), first)
        stored = scores_of(outcomes)
        arms = [
            arm(row.name, stored=stored if row.departures else ())
            for row in PRESETS
            if row.name != "paper-conditional"
        ]
        await run_grid(arms, grid, ledger, pair, "methods")
    return [methods(f"Methods at rate {RATE:g}", ledger, [one.name for one in arms], 8)]


_SAMPLES_NOTES = (
    "atts cancels the remaining samples of a problem as soon as its vote cannot change. Numbers "
    "are per problem, with 95 % intervals over problems.",
    "If answers have equally many votes, the answer that came first wins. So a vote of 2 samples "
    "is no better than 1 sample. More samples help on problems whose most probable answer is "
    "correct, and harm on other problems.",
)
_LIMIT_NOTE = (
    f"Each problem has {SEQUENTIAL} samples. A rollout that reaches the limit before its answer "
    "does not vote. A higher limit lets more rollouts vote, so it can lower accuracy only by "
    "chance. Draft-only and "
    "target-only need equally many turns, because their chunks are equally long."
)


async def axes(options: Options) -> list[Table]:
    """Measure accuracy against samples per problem, and against turns and tokens per rollout."""
    ledger = _ledger(options, "axes")
    count = options.pick(8, 40, 400)
    tables = list[Table]()
    turns = options.pick((2, 4, 8), (2, 4, 6, 8, 12), (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15))
    tokens = options.pick(
        (50, 200), (50, 100, 150, 200, 300), (25, 50, 75, 100, 125, 150, 200, 250, 300, 400)
    )
    limits: list[tuple[str, str, Sequence[int], tuple[str, ...]]] = [
        (
            "Samples per problem",
            "samples",
            [1 << n for n in range(options.pick(4, 7, 7))],
            _SAMPLES_NOTES,
        ),
        ("Turns per rollout", "turns", turns, (_LIMIT_NOTE,)),
        ("Tokens per rollout", "max_tokens", tokens, (_LIMIT_NOTE,)),
    ]
    async with Pair() as pair:
        for title, limit, steps, notes in limits:
            grid = Grid(count, block=options.pick(8, 20 if limit == "samples" else 40, 50))
            arms = {(name, step): _limited(name, limit, step) for name in ON_AXES for step in steps}
            for step in steps:
                await run_grid(
                    [arms[name, step] for name in ON_AXES], grid, ledger, pair, f"{limit} axis"
                )
            found = {
                place: ledger.of(one.name, one.setup.policy.samples) for place, one in arms.items()
            }
            tables.append(curve(title, found, *notes))
    return tables


def _limited(name: str, limit: str, step: int) -> Arm:
    if limit == "samples":
        return arm(name, samples=step)
    return arm(f"{name}, {limit} {step}", name, samples=SEQUENTIAL, **{limit: step})


async def certified(options: Options) -> list[Table]:
    """Certify rates on labelled runs, the highest first, and test the certified gate on new
    problems.
    """
    warm, labelled, fresh = options.pick((10, 40, 20), (40, 200, 200), (100, 1000, 1000))
    found = arithmetic("calibration", warm + labelled)
    unseen = arithmetic("test", fresh)
    problems = found[warm:]
    seed = options.seed
    stored = await calibrate(found[:warm], replace(arm("atts", samples=4).setup, seed=seed))
    runs = list[LabelledRun]()
    rows = list[Row]()
    async with Pair() as pair:

        async def run(
            on: Sequence[Problem], seed: int, gate: Gate | None = None
        ) -> tuple[Outcome, ...]:
            method = arm("target-only") if gate is None else arm("atts", gate=gate)
            return (await run_block(on, pair.plan(method, seed)))[0]

        target = await run(problems, seed)
        for rate in options.pick(
            (0.3, 0.2), (0.4, 0.3, 0.2, 0.1), (0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)
        ):
            say(f"certificate: rate {rate:g}")
            runs.append(
                LabelledRun("split", rate, await run(problems, seed, frozen_gate(rate, stored)))
            )
            last = certify_runs(target, runs, _is_right, EPSILON, DELTA).tested[-1]
            word = "yes" if last.certified else "no"
            rows.append(_certified("calibration", runs[-1].outcomes, rate, last.loss, last.p, word))
            if not last.certified:
                # Fixed-sequence testing stops at its first failure, so no later rate can be
                # certified.
                break
        certificate = certify_runs(target, runs, _is_right, EPSILON, DELTA)
        if certificate.chosen is not None:
            alone = await run(unseen, seed + 1)
            outcomes = await run(unseen, seed + 1, certified_gate(certificate, stored))
            lost = [
                _is_right(one) and not _is_right(other)
                for one, other in zip(alone, outcomes, strict=True)
            ]
            rows.append(
                _certified(
                    "unseen", outcomes, certificate.chosen.rate, sum(lost) / fresh, None, "deployed"
                )
            )
    return [
        Table.of(
            f"Certified policy: at most {100 * EPSILON:.0f} % of answers lost, confidence "
            f"{100 * (1 - DELTA):.0f} %",
            "problems | rate | escalated | lost answers | p | certified | target tokens per "
            "problem",
            rows,
            f"The certificate: {certificate.guarantee}.",
            f"Voided by: {certificate.voided_by}.",
            "The certificate of the net difference: "
            f"{certify_net_runs(target, runs, _is_right, NET, DELTA).guarantee}.",
        )
    ]


def _is_right(outcome: Outcome) -> bool:
    return outcome.answer == outcome.problem.answer


def _certified(name: str, outcomes: Sequence[Outcome], rate: float, *tested: Cell) -> Row:
    found = Sum.of(name, outcomes)
    return (
        f"{len(outcomes)} {name}",
        rate,
        round(found.rate or 0.0, 3),
        *tested,
        round(found.each("target"), 1),
    )


def methods(
    title: str,
    ledger: Ledger,
    names: Sequence[str],
    samples: int,
    *words: str,
    base: str = "target-only",
) -> Table:
    """Tabulate accuracy, tokens, arithmetic and time of every arm, compared with the base."""
    alone = ledger.of(base, samples)
    found = {name: ledger.of(name, samples) for name in names}
    problems = {one.problem for one in alone.solved}
    seeds = {piece.seed for piece in alone.pieces}
    return Table.of(
        f"{title}: {len(problems)} problems x {samples} samples x {len(seeds)} seeds",
        f"method | accuracy | accuracy minus {base}'s, points | pass@1 | pass@1 minus {base}'s, "
        f"points | draft tokens | scored | target tokens | share of {base}'s | GFLOPs | seconds "
        "| speed-up | escalated",
        [_method(name, one, alone) for name, one in found.items() if one.pieces],
        f"*Speed-up* is the time of {base} divided by the method's time. Both ran blocks of "
        "problems in turn; the numbers are the median and range over these blocks. The speed-up "
        "is missing if both did not run in turn.",
        *words,
    )


def _method(name: str, one: Sum, alone: Sum) -> Row:
    accuracies: list[str] = []
    for value in (right, share):
        minus = "-" if one.pieces == alone.pieces else points(one.minus(alone, value))
        accuracies += [interval(one.estimate(value)), minus]
    tokens = (
        round(one.each("draft"), 1),
        round(one.each("scored"), 1),
        round(one.each("target"), 1),
    )
    part = f"{100 * one.each('target') / max(1e-9, alone.each('target')):.1f} %"
    seconds = f"{one.seconds:.1f}" if all(piece.seconds for piece in one.pieces) else None
    ratio = one.speed_up(alone)
    rate = None if one.rate is None else f"{one.rate:.3f}"
    return (
        name,
        *accuracies,
        *tokens,
        part,
        round(one.gflops, 3),
        seconds,
        ratio.fixed() if ratio else None,
        rate,
    )


def scores_asked(
    title: str, ledger: Ledger, names: Sequence[str], samples: int, base: str
) -> Table:
    """Tabulate how many drafted tokens the target scored with each gate, compared with scoring
    every chunk.
    """
    alone = ledger.of(base, samples)
    rows: list[Row] = []
    for name in names:
        one = ledger.of(name, samples)
        tokens = (
            round(one.each("draft"), 1),
            round(one.each("judged"), 1),
            round(one.each("scored"), 1),
        )
        change = f"{100 * (one.each('scored') / max(1e-9, alone.each('judged')) - 1):+.0f} %"
        rows.append(
            (name, *tokens, change, "-" if name == base else points(one.minus(alone, right)))
        )
    return Table.of(
        f"{title}: {len(alone.by_problem(right))} problems x {samples} samples",
        "gate | drafted tokens | in chunks decided by a score | scored by the target | change | "
        f"accuracy minus {base}'s, points",
        rows,
        "*Change* compares the tokens that the target scored with scoring every chunk that "
        f"{base} decides on by a score. Equal chunks after equal prefixes are scored once. The "
        "target reads an escalated chunk again if it draws tokens meanwhile. If all chunks "
        "differ, as chunks of hundreds of tokens do, only decisions without a score save "
        "scored tokens.",
    )


def control(ledger: Ledger, arm: str, samples: int, nominal: float) -> Table:
    """Tabulate the realised rates of an arm's live runs by turn, level and question."""
    found = ledger.of(arm, samples)
    groups: dict[str, defaultdict[int, list[bool]]] = {
        kind: defaultdict(list) for kind in ("turn", "level", "all")
    }
    for one in found.solved:
        for _, turn, over in one.decisions:
            for kind, number in (("turn", turn), ("level", one.level), ("all", 0)):
                groups[kind][number].append(over)
    rows: list[Row] = []
    for kind, numbers in groups.items():
        for number, taken in sorted(numbers.items()):
            if len(taken) >= 50:
                rate = fmean(taken)
                name = kind if kind == "all" else f"{kind} {number}"
                # adding 0.0 changes -0.0 to 0.0
                rows.append((name, len(taken), round(rate, 4), round(rate - nominal, 4) + 0.0))
    asked = [len(one.decisions) for one in found.solved if one.decisions]
    coins = math.sqrt(fmean(nominal * (1 - nominal) / n for n in asked)) if asked else math.nan
    return Table.of(
        f"Rate control of {arm} in a live run with {samples} samples per problem",
        "group | decisions | realised rate | minus nominal rate",
        rows,
        f"For the {len(asked)} single questions, the root mean square of realised minus nominal "
        f"rate is {found.rate_error(nominal):.3f}. If a random coin escalated each chunk, it "
        f"would be {coins:.3f}.",
    )


def verdict(ledger: Ledger, arm: str, samples: int) -> Table:
    """Tabulate the three parts of the claim: the requirement, the measured value, and the verdict."""
    alone = ledger.of("target-only", samples)
    found = ledger.of(arm, samples)
    vote = found.minus(alone, right)
    single = found.minus(alone, share)
    part = found.each("target") / alone.each("target")
    rows: list[tuple[str, str, bool]] = [
        (
            "accuracy not below target-only's: lower end above -1 point",
            points(vote),
            vote.low > -0.01,
        ),
        ("target tokens at most 20 % of target-only's", f"{100 * part:.1f} %", part <= 0.2),
        ("pass@1 at least target-only's", points(single), single.value >= 0),
    ]
    return Table.of(
        f"The claim for {arm}, {samples} samples",
        "requirement | measured | met",
        [(what, measured, "yes" if is_met else "no") for what, measured, is_met in rows],
    )


def curve(title: str, found: Mapping[tuple[str, int], Sum], *notes: str) -> Table:
    """Tabulate how accuracy, tokens and time of each method change as a limit grows."""
    rows: list[Row] = []
    for (method, limit), one in found.items():
        vote = one.estimate(right)
        tokens = (one.each("target"), one.each("draft") + one.each("target"))
        accuracy = (
            round(vote.value, 4),
            interval(vote).partition(" ")[2],
            interval(one.estimate(share)),
        )
        costs = (
            *(round(each, 1) for each in tokens),
            round(one.gflops, 3),
            round(one.seconds / len(one.solved), 4),
        )
        rows.append((method, limit, *accuracy, *costs))
    problems = len(next(iter(found.values())).solved)
    return Table.of(
        f"{title}: {problems} problems, live",
        "method | limit | accuracy | 95 % | pass@1 | target tokens | all tokens | "
        "GFLOPs | seconds per problem",
        rows,
        *notes,
        chart=Chart("limit", "accuracy", "method", x_scaling="log"),
    )


ARMS: dict[str, tuple[dict[str, Any], str]] = {
    "draft-only": ({"method": "draft-only"}, "the draft alone"),
    "target-only": ({"method": "target-only", "speculate": "off"}, "the target alone"),
    "speculated": (
        {"method": "target-only"},
        "the target's text, decoded speculatively with the draft as drafter",
    ),
    "exact": (
        {"method": "exact"},
        "the target's text, drafted in chunks and drawn by the target while it scores",
    ),
    "coin": (
        {"method": "coin"},
        "as atts, but the target rewrites randomly chosen chunks",
    ),
    "atts": (
        {"method": "atts"},
        "the draft writes; the target scores every chunk and rewrites the worst",
    ),
}


def main() -> None:
    """Run all methods on the embedded pair, print one table and the path of a report."""
    parser = argparse.ArgumentParser(prog="demo", description=main.__doc__)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument(
        "--rate",
        type=float,
        default=Setup().rate,
        help="share of chunks that escalate to the target",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="folder for the runs; default: a new folder in runs/"
    )
    asked = parser.parse_args()
    base = Setup(rate=asked.rate, seed=asked.seed)
    base = replace(base, policy=replace(base.policy, samples=asked.samples))
    folder = asked.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    summaries: dict[str, Summary] = {}
    for name, (words, what) in ARMS.items():
        say(f"demo: {name}: {what}, {asked.problems} problems x {asked.samples} rollouts")
        run = partial(
            evaluate,
            "arithmetic",
            replace(base, **words),
            limit=asked.problems,
            directory=folder / name,
        )
        summaries[name] = anyio.run(run).summary
    others = [folder / name for name in ("coin", "target-only", "draft-only")]
    page = report(folder / "atts", compare_to=others)
    gain = compare(folder / "coin", folder / "atts")
    lines = table(summaries, asked.rate)
    gained = f"Gain of atts over the coin: vote {gain.vote.difference.signed()}"
    if gain.single is not None:
        gained += f", single rollouts {gain.single.difference.signed()}"
    lines.append(f"{gained}.")
    print("\n".join([*lines, "", f"report  {page}"]))


def table(summaries: dict[str, Summary], rate: float) -> list[str]:
    """Return the lines of the table of all methods.

    The target's tokens have two columns, because their times differ. Each decoded token takes a
    step of the target, but drawn tokens come with the scores of a chunk.
    """
    alone = summaries["target-only"]
    head = ("method", "accuracy", "draft tokens", "target: decoded", "drawn", "scored", "speed-up")
    rows: list[tuple[str, ...]] = [head]
    for name, summary in summaries.items():
        usage = summary.usage
        rows.append(
            (
                name,
                interval(summary.answers),
                f"{usage.draft_tokens:,}",
                f"{usage.target_tokens - usage.drawn_tokens:,}",
                f"{usage.drawn_tokens:,}",
                f"{usage.scored_tokens:,}",
                f"{alone.seconds / summary.seconds:.2f}x",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = list[str]()
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    return [
        *lines,
        "",
        f"Escalated chunks: {summaries['atts'].rate.counted()}; nominal rate {rate:g}.",
        f"{alone.answers.n_problems} problems of generated arithmetic. Accuracy: majority vote of "
        "a problem's rollouts.",
        "Brackets are 95 % intervals over problems. The target decodes a token per step; it draws "
        "tokens while it scores",
        "a chunk. Speed-up: compared with target-only in this run, in wall time; it varies with "
        "the machine's load.",
    ]


AGREEMENT = 0.75
"""Approximate share of tokens on which drafts and targets in practice agree; the embedded pair
agrees on 0.98.
"""
_AGREEMENT_WITHIN = 0.02
_TRIES = 8


async def weakened(folder: Path, noise: float | None = None) -> float:
    """Write a copy of the draft with noise in its weights, and return the noise.

    Without `noise`, search for the noise that gives AGREEMENT.
    """
    if noise is not None:
        noisy(folder, noise)
        return noise
    low = 0.0
    high = 1.0
    for _ in range(_TRIES):
        noise = (low + high) / 2
        noisy(folder, noise)
        found = await agreement(folder)
        say(f"speed: noise of {noise:.3f} gives agreement on {found:.3f} of tokens")
        if abs(found - AGREEMENT) < _AGREEMENT_WITHIN:
            break
        low, high = (noise, high) if found > AGREEMENT else (low, noise)
    assert noise is not None, "the loop ran at least once"
    return noise


async def agreement(folder: Path, count: int = 6) -> float:
    """Return the share of the target's tokens that the draft also samples with the same random
    numbers.
    """
    settings = options_of(worker="thread", threads=1, drafter=str(folder), speculate="draft", k=1)
    async with accelerated(model_path("target"), name="target", **settings._asdict()) as target:
        one = arm("target-only", samples=1)
        await run_block(arithmetic("calibration", count), one.setup.plan(target, target))
        counted = target.loop_stats().speculation
    assert counted is not None, "the engine speculates"
    return counted.accepted / max(1, counted.proposed)


ALONE = "target-only"
METHODS = ("target-only, speculating", "exact", "atts", "draft-only")
_RIVALS = ("target-only", "target-only, all cores", "target-only, speculating", "exact")
"""Methods with the accuracy of the target; the draft alone is less accurate."""
_SHORT = {"target-only, speculating": "speculating", "target-only, all cores": "target-only"}
_ALIKE_WITHIN = 0.05
"""Two methods are reported as equally fast if their median times differ by less than this share."""
SIZES = ("4M", "20M", "200M")
SAMPLES = (1, 2, 4, 8, 16)
NOT_YET = "not yet measured"
_CLOCKS: dict[Clock, str] = {
    "wall": "Times are wall times, and each method may use all cores.",
    "processor": "**Times are processor times** of all processes with one thread each, because "
    "the machine was busy with other work. So the times do not show the gain from "
    "draft and target that run at the same time, or from targets on two cores.",
}

How = Literal["latency", "throughput"]
Clock = Literal["wall", "processor"]
"""Clock of the measurement: wall time with all cores, or processor time with one thread if the
machine is busy.
"""


@dataclass(frozen=True, slots=True)
class MapCell:
    """A cell of the map: a target, a number of rollouts, and whether latency or throughput is
    measured.
    """

    target: str
    samples: int
    how: How

    def __str__(self) -> str:
        return f"cell {self.target} {self.samples} {self.how}"


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of one arm on one block of problems."""

    seconds: float
    right: int
    problems: int
    draft: int
    scored: int
    target: int

    @classmethod
    def of(cls, solved: Sequence[Solved], seconds: float) -> Figures:
        """Add up the results of all problems of a block."""
        sums = {
            kind: sum(getattr(one, kind) for one in solved)
            for kind in ("draft", "scored", "target")
        }
        return cls(seconds, sum(one.right > 0 for one in solved), len(solved), **sums)


@dataclass(frozen=True, slots=True)
class Measured:
    """All arms of a cell in one repeat, by method and draft, on the same problems."""

    cell: MapCell
    figures: Mapping[str, Figures]
    # seconds and tokens of scoring each draft's chunks while nothing else runs
    scoring: Mapping[str, tuple[float, int]]
    load: float
    clock: Clock

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Measured:
        """Rebuild a measurement from the JSON record that stores it."""
        figures = {name: Figures(**own) for name, own in fields["figures"].items()}
        scoring = {name: (float(own[0]), int(own[1])) for name, own in fields["scoring"].items()}
        return cls(MapCell(**fields["cell"]), figures, scoring, fields["load"], fields["clock"])

    def of(self, method: str, draft: str) -> Figures | None:
        """Return the results of a method with a draft. Methods that need no draft have one entry
        for all drafts.
        """
        return self.figures.get(f"{method}|{draft}") or self.figures.get(f"{method}|")

    def best(self, draft: str, *methods: str) -> float:
        """Return the duration in seconds of the fastest of these methods; at least one must be
        measured.
        """
        figures = [self.of(method, draft) for method in methods]
        return min(one.seconds for one in figures if one is not None)

    def bound(self, method: str, draft: str) -> float:
        """Return the seconds that the arm's tokens would take at the speed of each model alone."""
        drafting, alone, own = (
            self.figures[name] for name in (f"draft-only|{draft}", f"{ALONE}|", f"{method}|{draft}")
        )
        seconds, tokens = self.scoring[draft]
        base = self.best(draft, *_RIVALS[:2])
        per_drafted = drafting.seconds / max(1, drafting.draft)
        per_scored = seconds / max(1, tokens)
        per_written = base / max(1, alone.target)
        return own.draft * per_drafted + own.scored * per_scored + own.target * per_written


class Group(NamedTuple):
    """All repeats of a cell with one draft."""

    cell: MapCell
    draft: str
    repeats: Sequence[Measured]

    @property
    def lead(self) -> tuple[str, str]:
        """Return the first two columns of the group's rows: the names of the setting and of the
        target.
        """
        return _panel(self.cell.how, self.draft), _target(self.cell.target)

    def over(self, method: str, *rivals: str) -> list[float]:
        """Return the method's time divided by the time of its fastest rival, for each repeat that
        has the method.
        """
        ratios = list[float]()
        for repeat in self.repeats:
            figures = repeat.of(method, self.draft)
            if figures is not None:
                ratios.append(figures.seconds / repeat.best(self.draft, *rivals))
        return ratios

    def gain(self) -> Spread:
        """Return the spread, over repeats, of the time of the fastest alternative divided by the
        time of atts.
        """
        return Spread.of([1 / share for share in self.over("atts", *_RIVALS)])

    def medians(self) -> dict[str, float]:
        """Return each method's time divided by that of the target alone: the median over repeats."""
        shares = {method: self.over(method, *_RIVALS[:2]) for method in (*_RIVALS, "atts")}
        return {method: statistics.median(found) for method, found in shares.items() if found}

    def best_rival(self) -> str:
        """Return the fastest method with the target's accuracy."""
        medians = {method: value for method, value in self.medians().items() if method in _RIVALS}
        best = min(medians, key=medians.__getitem__)
        return _SHORT.get(best, best)


def tables(found: Sequence[Measured], agreement: Mapping[str, float]) -> list[Table]:
    """Return all tables, in wall time if any cell was measured in wall time."""
    clock: Clock = "wall" if any(one.clock == "wall" for one in found) else "processor"
    found = [one for one in found if one.clock == clock]
    groups = list(_groups(found, list(agreement)))
    drafts = "; ".join(
        f"with *draft {name}*, draft and target agree on {share:.2f} of the tokens"
        for name, share in agreement.items()
    )
    loads = [one.load for one in found]
    load = (
        f"When the measurements began, the load of the machine was {min(loads):.1f} to "
        f"{max(loads):.1f}. {_CLOCKS[clock]}"
    )
    return [_map(groups, drafts, load), _advice(groups), _bounds(groups), _arms(groups)]


def _groups(found: Sequence[Measured], drafts: Sequence[str]) -> Iterator[Group]:
    """Group cells in the order of the map: setting, draft, the target's cost, rollouts."""
    for how, draft, target, samples in product(get_args(How), drafts, SIZES, SAMPLES):
        cell = MapCell(target, samples, how)
        if repeats := [one for one in found if one.cell == cell]:
            yield Group(cell, draft, repeats)


def _panel(how: How, draft: str) -> str:
    setting = "one problem at a time" if how == "latency" else "many problems at once"
    return f"{setting}, draft {draft}"


def _target(size: str) -> str:
    return f"{size} target" + ("" if size == "4M" else ", padded")


def _map(groups: Sequence[Group], drafts: str, load: str) -> Table:
    rows = list[Row]()
    by_cell = {(*one.lead, one.cell.samples): one for one in groups}
    for panel in dict.fromkeys(one.lead[0] for one in groups):
        for place in product([panel], map(_target, SIZES), SAMPLES):
            cells: Row = (None, NOT_YET, "-")
            if own := by_cell.get(place):
                cells = (own.gain().median, own.best_rival(), str(own.gain()))
            rows.append((*place, *cells))
        rows += [(panel, _target(size), "GPU", None, NOT_YET, "-") for size in SIZES]
    return Table.of(
        "Gain: time of the best alternative divided by the time of atts",
        "setting | target | rollouts | atts is faster by | best alternative | median and range",
        rows,
        "A number above 1 means that atts is faster. The alternatives are as accurate as the "
        "target: target-only with and without speculation, and `exact`. All methods solved the "
        f"same problems in turn, with the same rule for stopping early. Agreement: {drafts}. "
        + load,
        chart=Chart(
            "rollouts", "target", "setting", value="atts is faster by", note="best alternative"
        ),
    )


def _advice(groups: Sequence[Group]) -> Table:
    rows = [
        (*lead, sentence([(one.cell.samples, one.medians()) for one in own]))
        for lead, own in groupby(groups, lambda group: group.lead)
    ]
    return Table.of("Fastest methods", "setting | target | fastest method", rows)


def sentence(cells: Sequence[tuple[int, Mapping[str, float]]]) -> str:
    """Describe the fastest method for each number of rollouts, and say if atts is never among them.

    >>> sentence([(1, {"exact": 0.5, "atts": 0.9}), (2, {"exact": 0.6, "atts": 0.8}), (4, {"exact": 1.0, "atts": 0.4})])
    'exact up to 2 rollouts (2.0 to 1.7 times as fast as the target alone), atts at 4 (2.5 times)'
    """
    chosen = list[tuple[str, int, float]]()
    parts = list[str]()
    for samples, medians in cells:
        least = min(medians.values())
        names = [
            _SHORT.get(name, name)
            for name, value in medians.items()
            if value <= least * (1 + _ALIKE_WITHIN)
        ]
        chosen.append((" or ".join(dict.fromkeys(names)), samples, 1 / least))
    for name, same in groupby(chosen, lambda one: one[0]):
        choices = list(same)
        first = choices[0][1]
        last = choices[-1][1]
        if first == last:
            where = f"at {first}"
        elif parts:
            where = f"at {first} to {last}"
        else:
            where = f"up to {last}"
        gains = sorted({f"{gain:.1f}" for _, _, gain in choices}, reverse=True)
        # print one number if the largest and the smallest gain are the same after rounding
        words = f"{' to '.join(dict.fromkeys((gains[0], gains[-1])))} times"
        unit = "rollout" if first == last == 1 else "rollouts"
        parts.append(
            f"{name} {where} ({words})"
            if parts
            else f"{name} {where} {unit} ({words} as fast as the target alone)"
        )
    never = "" if any("atts" in name for name, _, _ in chosen) else "; atts nowhere"
    return ", ".join(parts) + never


def _bounds(groups: Sequence[Group]) -> Table:
    rows: list[Row] = []
    for group in groups:
        for method in ("atts",):
            found = [
                (one.of(method, group.draft), one.bound(method, group.draft))
                for one in group.repeats
            ]
            shares = Spread.of([own.seconds / bound for own, bound in found if own and bound > 0])
            rows.append((*group.lead, group.cell.samples, method, str(shares)))
    return Table.of(
        "Time over the bound d + s + g",
        "setting | target | rollouts | method | time over the bound, median and range",
        rows,
        "The bound is the sum of three times: for the tokens that the draft writes (d), for "
        "those that the target scores (s), and for those that the target writes (g). The speeds "
        "are those of each model alone. A ratio below 1 means that draft and target work at the "
        "same time.",
    )


def _arms(groups: Sequence[Group]) -> Table:
    rows: list[Row] = []
    for group in groups:
        for method in (*_RIVALS[:2], *METHODS):
            repeats = [one.of(method, group.draft) for one in group.repeats]
            own = [figures for figures in repeats if figures is not None]
            if own:
                times = Spread.of(group.over(method, ALONE))
                right = f"{sum(one.right for one in own)} of {sum(one.problems for one in own)}"
                tokens = [
                    figure(sum(getattr(one, kind) for one in own))
                    for kind in ("draft", "scored", "target")
                ]
                rows.append((*group.lead, group.cell.samples, method, str(times), right, *tokens))
    return Table.of(
        "All methods: time divided by that of the target alone",
        "setting | target | rollouts | method | time, median and range | correct | "
        "draft tokens | scored | target tokens",
        rows,
    )


TARGETS = {"4M": "", "20M": "20M", "200M": "200M"}
"""Padding of the target for each cost of a token, by number of parameters; "" is the embedded
target itself.
"""
DRAFTS = ("as it is", "weakened")
_ALL_CORES = "target-only, all cores"


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model, and the scores that the target gave its chunks on other problems."""

    folder: Path
    engine: Engine
    scores: Sequence[float]


@dataclass(frozen=True, slots=True)
class Bench:
    """The open engines for the cells of one target, and the clock of the measurements."""

    clock: Clock
    drafts: Mapping[str, Draft]
    # keys: ALONE, `_ALL_CORES`, or the name of the draft that proposes tokens
    targets: Mapping[str, Engine]

    def run(self, method: str, draft: str) -> tuple[str, Engine, Engine]:
        """Return the method's name in atts, its draft, and its target."""
        target = self.targets[ALONE]
        own = self.drafts[draft or DRAFTS[0]].engine
        if method == "target-only, speculating":
            return "target-only", own, self.targets[draft]
        return ("target-only", own, self.targets[method]) if not draft else (method, own, target)


def study_speed(options: Options) -> list[Table]:
    """Measure all cells of the map, except cells that earlier sessions measured."""
    with tempfile.TemporaryDirectory() as place:
        return anyio.run(_study, options, Path(place))


async def _study(options: Options, place: Path) -> list[Table]:
    kept = Parts(options.file(f"speed-{options.effort}-{options.seed}-{pair_name()}.jsonl"))
    clock: Clock = "wall" if os.getloadavg()[0] < (os.cpu_count() or 1) else "processor"
    async with _drafts(options, place, kept) as drafts:
        for repeat in range(options.pick(1, 3, 5)):
            for target in list(TARGETS)[: options.pick(2, 3, 3)]:
                if todo := [
                    cell
                    for cell in cells(target, options)
                    if f"{cell} {clock} {repeat}" not in kept
                ]:
                    async with _targets(target, drafts, clock) as targets:
                        for cell in todo:
                            say(
                                f"speed: {cell}, {clock}, repeat {repeat + 1}, load "
                                f"{os.getloadavg()[0]:.1f}"
                            )
                            found = await _measure(
                                cell, repeat, Bench(clock, drafts, targets), options
                            )
                            kept.keep(f"{cell} {clock} {repeat}", asdict(found))
    measured = [Measured.read(value) for name, value in kept.items() if name.startswith("cell ")]
    return tables(measured, kept["agreement"])


def cells(target: str, options: Options) -> Iterator[MapCell]:
    """Return all cells of one target."""
    for samples in options.pick((1, 4), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
        yield MapCell(target, samples, "latency")
        yield MapCell(target, samples, "throughput")


@asynccontextmanager
async def _drafts(
    options: Options, place: Path, kept: Parts
) -> AsyncGenerator[Mapping[str, Draft]]:
    """Open both drafts, with the target's scores of their chunks."""
    folders = dict(zip(DRAFTS, (model_path("draft"), place / "weakened"), strict=True))
    noise = await weakened(folders["weakened"], kept.get("noise"))
    if "noise" not in kept:
        kept.keep("noise", noise)
        kept.keep("agreement", {name: await agreement(folder) for name, folder in folders.items()})
    async with AsyncExitStack() as stack:
        drafts = dict[str, Draft]()
        target = await stack.enter_async_context(_engine(model_path("target"), threads=1))
        for name, folder in folders.items():
            engine = await stack.enter_async_context(_engine(folder, threads=1))
            if f"scores {name}" not in kept:
                found = arithmetic("calibration", options.pick(4, 24, 48))
                outcomes, _ = await run_block(found, setup("atts", 2).plan(engine, target))
                kept.keep(f"scores {name}", [round(score, 4) for score in scores_of(outcomes)])
            drafts[name] = Draft(folder, engine, kept[f"scores {name}"])
        yield drafts


@asynccontextmanager
async def _targets(
    name: str, drafts: Mapping[str, Draft], clock: Clock
) -> AsyncGenerator[Mapping[str, Engine]]:
    """Open one target without speculation, one for each draft that proposes tokens, and one on all
    cores if the others use one thread.

    With processor time as the clock, each engine has one thread, because the waiting of a second
    thread would count as work.
    """
    cores = (os.cpu_count() or 1) if clock == "wall" else 1
    pad = TARGETS[name]
    own: dict[str, Any] = {"threads": cores if pad else 1}
    changes = {
        ALONE: own,
        **{each: {**own, "drafter": str(draft.folder)} for each, draft in drafts.items()},
    }
    if own["threads"] < cores:
        changes[_ALL_CORES] = {"threads": cores}
    async with AsyncExitStack() as stack:
        target = Path(model_path("target"))
        if pad:
            target = padded_folder(target, pad)
        yield {
            each: await stack.enter_async_context(_engine(target, **how))
            for each, how in changes.items()
        }


def _engine(folder: Path, **changes: Any) -> LocalEngine:
    return accelerated(folder, name=folder.name, **options_of(device="cpu", **changes)._asdict())


def setup(method: str, samples: int, **changes: Any) -> Setup:
    """Return the default settings of a method, with the lengths of the embedded pair."""
    return Setup(method=method, policy=replace(Setup().run_policy, samples=samples), **changes)


async def _measure(cell: MapCell, repeat: int, bench: Bench, options: Options) -> Measured:
    """Run every arm once on the same problems; the order of arms rotates from repeat to repeat."""
    problems = _problems(cell, repeat, options)
    load = os.getloadavg()[0]
    schedule: Schedule = "one by one" if cell.how == "latency" else "together"
    arms = [(method, "") for method in (_ALL_CORES, ALONE) if method in bench.targets]
    arms += [(method, draft) for method in METHODS for draft in bench.drafts]
    turn = repeat % len(arms)
    now = time.perf_counter if bench.clock == "wall" else tree_seconds
    figures = dict[str, Figures]()
    scoring = dict[str, tuple[float, int]]()
    for number, (method, draft) in enumerate(arms[turn:] + arms[:turn]):
        own, drafting, target = bench.run(method, draft)
        # each arm has its own texts, so no cache holds texts of another arm
        seed = 1009 * repeat + number + options.seed * 31
        stored = bench.drafts[draft].scores if draft else ()
        plan = setup(own, cell.samples, seed=seed, stored=stored).plan(drafting, target)
        outcomes, seconds = await run_block(problems, plan, schedule, now)
        figures[f"{method}|{draft}"] = Figures.of(
            [Solved.of(outcome) for outcome in outcomes], seconds
        )
        if method == "draft-only":
            rescoring = Rescoring(now)
            await rescoring.rescore(method, outcomes, schedule=schedule, target=target)
            scoring[draft] = rescoring.seconds, rescoring.tokens
    return Measured(cell, figures, scoring, load, bench.clock)


def _problems(cell: MapCell, repeat: int, options: Options) -> Sequence[Problem]:
    """Return the problems of a cell.

    Latency needs a few problems. Throughput needs enough problems to fill the rollouts in flight,
    and at least two.
    """
    count = options.pick(1, 1, 4)
    if cell.how == "throughput":
        count = max(2, options.pick(8, 16, 64) // cell.samples)
    return arithmetic("test", count * (repeat + 1))[count * repeat :]


if __name__ == "__main__":
    main()
