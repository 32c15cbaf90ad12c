"""Compare every method with the target alone on the embedded pair: accuracy, tokens, time and transcripts."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import accumulate, takewhile
from statistics import fmean
from typing import Any, Literal

import torch

from atts.api import Setup, calibrate
from atts.concurrency import collect
from atts.core import Outcome, Problem, Rollout, ScoreRequest, Turn
from atts.engine import Engine
from atts.evaluators import share_estimate
from atts.evaluators.datasets.arithmetic import problems as arithmetic
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
from atts.sampling import Seed, uniforms
from scripts.studies.arms import (
    RATE,
    Arm,
    Grid,
    Ledger,
    Pair,
    Schedule,
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
    Table,
    interval,
    pair_name,
    points,
    say,
)

EXACT_SAMPLES = 8
BLOCK = 20
NEAR = 1e-4
"""A draw at most this far from the border between two tokens may fall on either side by rounding.
"""


@dataclass(frozen=True, slots=True)
class Flip:
    """The first position at which two rollouts differ, with the distance of its draw from the
    border between the two tokens.
    """

    problem: str
    sample: int
    place: int
    # distance of the uniform number from the border; inf if the two tokens share no border
    margin: float


async def same_transcripts(options: Options) -> list[Table]:
    """Compare both methods with the same seed on the same problems.

    Each has its own engines, so that no cache is shared.
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
    """Compare one block and return its counts."""
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
    """Return the tokens of a rollout and how it ended."""
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
    """Return the distance of a position's uniform number from the border between two tokens."""
    ends = [
        *accumulate((_length(turn) for turn in line.turns), initial=len(line.prompt.target_ids))
    ]
    # the end token is also a draw of the last turn
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
    """Load the target in transformers when the first difference needs it."""
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
            "rollouts identical to the target's alone",
            f"{total['rollouts'] - len(flips)} of {total['rollouts']}",
        ),
        ("rollouts that differ", interval(differing)),
        (
            f"of these, first at a draw within {NEAR:g} of the border of both tokens",
            f"{near} of {len(flips)}",
        ),
        ("votes identical", f"{total['same_votes']} of {total['problems']}"),
        ("tokens of the target", f"{total['target_tokens']:,}"),
        ("of these drawn while it scored", f"{total['drawn_tokens']:,}"),
        ("tokens of the draft", f"{total['draft_tokens']:,}"),
        ("of these thrown away", f"{total['wasted_tokens']:,}"),
    ]
    rows += [
        (f"flip: {one.problem}/{one.sample} at token {one.place}", f"{one.margin:.2g}")
        for one in flips[:20]
    ]
    return Table.of(
        "Method exact compared with target-only: the same seed, engines of its own for each",
        "what | number",
        rows,
        "A draw takes the token whose interval contains a uniform number. Scoring reads a chunk at "
        "once, decoding reads token by token: their log-probabilities differ by about 1e-5, so a "
        "number this near a border may fall on either side. `transformers` computes the distribution "
        "at each difference; inf: the two tokens share no border.",
        headline=f"method exact wrote {total['rollouts'] - len(flips):,} of {total['rollouts']:,} "
        f"rollouts token for "
        f"token as the target alone; the others part at a draw on a border ({near} of "
        f"{len(flips)})",
    )


TIMED_SAMPLES = 8
TIMED_ROUNDS = 5
Rates = Mapping[Literal["draft", "scored", "target"], float]
"""Seconds per token."""


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
        make("target-only, proposed to", "target-only", variant="proposed to"),
        make("exact"),
        make("atts"),
        make("atts, proposed to", "atts", variant="proposed to"),
        make("atts, drafting on", "atts", optimistic=True),
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
    # seconds per token that is drafted, scored, or written by the target
    drafted, scored, written = rates.values()
    return Table.of(
        f"Time, {how}, {count * TIMED_ROUNDS} problems x {TIMED_SAMPLES} samples, the same vote and early stop "
        f"everywhere",
        "method | right | seconds | speed-up | processor time | d | s | g | bound d + s + g | "
        "measured part | "
        "deviation | draft tokens | scored | target tokens | of these drawn while scoring",
        [_time_row(name, one, base, (found["target-only"], rates)) for name, one in found.items()],
        "Blocks interleaved in one run. Base: the faster target-only without proposals. Processor "
        "time: that of this "
        f"process and its engines, against target-only with one thread. {written * 1e6:.0f} us per "
        f"target token, "
        f"{scored * 1e6:.0f} us per scored token ({scored / written:.2f} of it), "
        f"{drafted * 1e6:.0f} us per draft token ({drafted / written:.2f}), "
        "measured in this run on the work alone.",
        headline=f"**{found['atts'].speed_up(base)}** times its speed, {words.split(',')[0]}",
    )


def _can_round() -> bool:
    """Return whether this processor has products of pairs of bfloat16 numbers."""
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
        f"{100 * (measured / bound - 1):+.0f} %" if bound else "-",
        *(one.total(kind) for kind in rates),
        one.total("drawn"),
    )


class Rescoring:
    """Seconds and tokens of scoring alone, for texts that the target has not seen before."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self._now = now

    async def rescore(
        self, name: str, outcomes: Sequence[Outcome], *, schedule: Schedule, target: Engine
    ) -> None:
        """Score the rollouts of draft-only runs chunk by chunk, as the policy would."""
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
"""Rates of the compared policies. Below a rate of 0.2 the target writes less than a fifth of its
own tokens.
"""
ON_AXES = ("draft-only", "target-only", "atts")
SEQUENTIAL = 4
"""Samples per problem in the tables that limit turns and tokens."""
EPSILON = 0.05
NET = 0.02
DELTA = 0.1
"""Two runs of the target alone also differ in a few answers, and no smaller bound can be certified.
"""


async def study(options: Options) -> list[Table]:
    """Return the tables of all parts, one part after the other.

    With --full and an output folder each part continues where an earlier run was killed.
    """
    tables = list[Table]()
    for part in (claim, rates, every_method, axes, timed, same_transcripts, certified):
        say(f"pipelines: {part.__name__}")
        tables += await part(options)
    return tables


def _ledger(options: Options, name: str) -> Ledger:
    """Return the ledger of the current embedded pair; each pair has a separate file."""
    return Ledger(options.file(f"pipelines-{name}-{options.effort}-{pair_name()}.jsonl"))


async def claim(options: Options) -> list[Table]:
    """Compare the policy with the target alone, on enough problems for a claim.

    Every rollout runs to its end: an early stop changes no vote, and without it pass@1 is that of
    all rollouts.
    """
    ledger = _ledger(options, "claim")
    # one seed already answers the question; more seeds narrow its interval
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
    """Return the tables of all pieces in the ledger."""
    tables: list[Table] = []
    for samples in sorted({samples for _, samples, _, _ in ledger.pieces}):
        title = "The claim" if not tables else f"The claim at {samples} samples"
        words = f"atts: the default policy at rate {CLAIMED['atts']:g}. Every rollout of both ran to its end."
        compared = methods(title, ledger, list(CLAIMED), samples, words)
        tables.append(replace(compared, headline=_headline(ledger, samples)))
        tables.append(verdict(ledger, "atts", samples))
    return tables


def _headline(ledger: Ledger, m: int) -> str:
    ours = ledger.of("atts", m)
    alone = ledger.of("target-only", m)
    seeds = len({piece.seed for piece in alone.pieces})
    return (
        f"votes **{points(ours.minus(alone, right))}** points compared with the target alone, which "
        f"writes "
        f"{100 * ours.each('target') / alone.each('target'):.1f} % of the tokens it would write "
        f"({len(alone.by_problem(right))} problems x {m} samples x {seeds} seeds)"
    )


async def rates(options: Options) -> list[Table]:
    """Measure the realised rate of three gates that control it per run, per question, or per
    question and turn.
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
    """Compare every baseline, with the settings that its authors use."""
    grid = Grid(
        options.pick(8, 60, 500), options.pick((0,), (0,), (0, 1, 2)), 500, options.pick(8, 20, 50)
    )
    ledger = _ledger(options, "methods")
    async with Pair() as pair:
        # The published rule needs first-chunk scores of calibration problems before a run. Its
        # variant by question needs scores of the test questions, which this study does not have.
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
    "Live runs, votes stopped as soon as they cannot change; per problem; 95 % intervals over "
    "problems.",
    "A tie goes to the answer that came first, so the vote of 2 samples is no better than 1. With odd"
    " numbers of samples, the vote improves on problems whose most probable answer is correct, and "
    "gets worse on the others.",
)
_LIMIT_NOTE = (
    f"{SEQUENTIAL} samples. A rollout that is cut has no vote, so a higher limit lowers accuracy only "
    "by chance. Chunks of target and draft are equally long, so both need equally many turns."
)


async def axes(options: Options) -> list[Table]:
    """Measure votes against samples per problem, and against turns and tokens per rollout."""
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
    """Certify rates on labelled runs, highest first, and test the certified gate on new problems."""
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
                # fixed-sequence testing stops at its first failure, so no later rate could be
                # certified
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
            f"Certified policy: at most {100 * EPSILON:.0f} % of answers lost, confidence {100 * (1 - DELTA):.0f} %",
            "problems | rate | escalated | lost answers | p | certified | target tokens per "
            "problem",
            rows,
            f"{certificate.guarantee}.",
            f"Void with: {certificate.voided_by}.",
            f"Of the net difference: {certify_net_runs(target, runs, _is_right, NET, DELTA).guarantee}.",
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
    """Tabulate accuracy, tokens, arithmetic and time of every arm relative to the base."""
    alone = ledger.of(base, samples)
    found = {name: ledger.of(name, samples) for name in names}
    problems = {one.problem for one in alone.solved}
    seeds = {piece.seed for piece in alone.pieces}
    return Table.of(
        f"{title}: {len(problems)} problems x {samples} samples x {len(seeds)} seeds",
        f"method | vote right | minus {base}, points | pass@1 | pass@1 minus, points | draft "
        f"tokens | scored | "
        f"target tokens | of {base} | GFLOPs | seconds | speed-up | escalated",
        [_method(name, one, alone) for name, one in found.items() if one.pieces],
        f"Speed-up: {base}'s seconds over the method's, block by block, interleaved in one run; "
        f"median and range; "
        "none where they ran at different times.",
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
    """Tabulate how many drafted tokens the target read for scores, compared with scoring every
    chunk.
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
        f"gate | drafted tokens | of chunks decided on by a score | asked of the target | change | "
        f"vote minus {base}, points",
        rows,
        f"Change: tokens that the target scored, compared with scoring every chunk that {base} decides"
        " on by a score. Equal chunks after equal prefixes are scored once; an escalated chunk is "
        "read again if the target draws tokens meanwhile. If no two rollouts write the same, as with "
        "chunks of hundreds of tokens, only decisions without a score save anything.",
    )


def control(ledger: Ledger, arm: str, samples: int, nominal: float) -> Table:
    """Tabulate the realised rates of a live arm by turn, level and question."""
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
                rows.append((name, len(taken), round(rate, 4), round(rate - nominal, 4)))
    asked = [len(one.decisions) for one in found.solved if one.decisions]
    coins = math.sqrt(fmean(nominal * (1 - nominal) / n for n in asked)) if asked else math.nan
    return Table.of(
        f"Rate control of {arm} in the live pipeline, nominal {nominal:g}, {samples} samples",
        "group | decisions | realised rate | minus nominal",
        rows,
        f"By question ({len(asked)} of them): root mean square of rate - nominal "
        f"{found.rate_error(nominal):.3f}; "
        f"independent coins at the nominal rate would give {coins:.3f}.",
    )


def verdict(ledger: Ledger, arm: str, samples: int) -> Table:
    """Tabulate the three parts of the claim, with whether each is met and by how much."""
    alone = ledger.of("target-only", samples)
    found = ledger.of(arm, samples)
    vote = found.minus(alone, right)
    single = found.minus(alone, share)
    part = found.each("target") / alone.each("target")
    rows: list[tuple[str, str, bool]] = [
        ("vote not below target-only: lower end above -1 point", points(vote), vote.low > -0.01),
        ("target tokens at most 20 % of target-only's", f"{100 * part:.1f} %", part <= 0.2),
        ("pass@1 at least target-only's", points(single), single.value >= 0),
    ]
    return Table.of(
        f"The claim for {arm}, {samples} samples",
        "what | measured | met",
        [(what, measured, "yes" if is_met else "no") for what, measured, is_met in rows],
    )


def curve(title: str, found: Mapping[tuple[str, int], Sum], *notes: str) -> Table:
    """Tabulate accuracy, tokens and time of methods as a limit grows."""
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
        "method | at most | vote right | 95 % | pass@1 | target tokens | all tokens | GFLOPs | "
        "seconds per problem",
        rows,
        *notes,
        chart=Chart("at most", "vote right", "method", x_scaling="log"),
    )
