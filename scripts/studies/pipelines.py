"""Every method from the same command on the embedded pair: accuracy, tokens and time, compared problem by problem."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import anyio

from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.methods import PRESETS
from scripts.studies.arms import RATE, Grid, Ledger, Pair, arm, right, run_block, run_grid, scores_of
from scripts.studies.harness import Options, Table, points, say
from scripts.studies.machine import pair_name
from scripts.studies.pipelines_exact import same_transcripts
from scripts.studies.pipelines_gates import certified_table, ordinal_tables
from scripts.studies.pipelines_tables import control, curve, methods, verdict
from scripts.studies.pipelines_time import timed

CLAIMED = {"target-only": RATE, "atts": 0.19}
"""The default policy, its rate such that what the target writes stays below a fifth: at 0.2 it is about that."""
ON_AXES = ("draft-only", "target-only", "atts")


def study(options: Options) -> list[Table]:
    """All parts, one after the other; with --full and an output folder each goes on where an earlier try was killed."""
    return [table for name in PARTS for table in part(name, options)]


def part(name: str, options: Options) -> list[Table]:
    """One part's tables."""
    say(f"pipelines: {name}")
    return anyio.run(PARTS[name], options)


def _ledger(options: Options, name: str) -> Ledger:
    """What was measured with this pair: another one's is another file."""
    return Ledger(options.file(f"pipelines-{name}-{options.effort}-{pair_name()}.jsonl"))


async def claim(options: Options) -> list[Table]:
    """The policy against the target alone, on enough problems to say so.

    Every rollout runs to its end: an early stop changes no vote, and without it pass@1 is that of all rollouts.
    """
    ledger = _ledger(options, "claim")
    async with Pair() as pair:
        for m in options.pick((8,), (8,), (8, 16)):
            for seed in options.pick((0,), (0,), (0, 1, 2)):  # a seed is a whole answer, the next ones make it narrower
                grid = Grid(options.pick(20, 160, 2000), (seed,), 250, options.pick(20, 40, 50))
                arms = [arm(name, samples=m, rate=rate, early_stop="none") for name, rate in CLAIMED.items()]
                await run_grid(arms, grid, ledger, pair, "claim")
    return claimed(ledger)


def claimed(ledger: Ledger) -> list[Table]:
    """The tables of all that has been run, however far that is."""
    tables: list[Table] = []
    for m in sorted({samples for _, samples, _, _ in ledger.pieces}):
        title = "The claim" if not tables else f"The claim at {m} samples"
        words = f"atts: the default policy at rate {CLAIMED['atts']:g}. Every rollout of both ran to its end."
        found = methods(title, ledger, list(CLAIMED), m, words)
        tables += [replace(found, headline=_headline(ledger, m)), verdict(ledger, "atts", m)]
    return tables


def _headline(ledger: Ledger, m: int) -> str:
    ours, alone = ledger.of("atts", m), ledger.of("target-only", m)
    seeds = len({piece.seed for piece in alone.pieces})
    return (
        f"votes **{points(ours.minus(alone, right))}** points beside the target alone, which writes "
        f"{ours.each('target') / alone.each('target'):.1%} of the tokens it would write "
        f"({len(alone.by_problem(right))} problems x {m} samples x {seeds} seeds)"
    )


async def rates(options: Options) -> list[Table]:
    """How the rate is kept, live, by gates that promise it for the run, for each question, and for like scores only."""
    grid = Grid(options.pick(20, 100, 1000), (0,), 1000, options.pick(20, 50, 50))
    ledger = _ledger(options, "rates")
    arms = [
        arm(f"{mode} at {rate:g}", "atts", mode=mode, rate=rate, takeover="replace", early_stop="none")
        for rate in options.pick((0.2,), (0.2,), (0.1, 0.2, 0.4))
        for mode in ("aci", "question-turn", "marginal")
    ]
    async with Pair() as pair:
        await run_grid(arms, grid, ledger, pair, "rates")
    return [control(ledger, one.name, 8, one.setup.rate) for one in arms]


async def every_method(options: Options) -> list[Table]:
    """Every baseline, as good as its authors would make it."""
    grid = Grid(options.pick(8, 60, 500), options.pick((0,), (0,), (0, 1, 2)), 500, options.pick(8, 20, 50))
    ledger = _ledger(options, "methods")
    async with Pair() as pair:
        # turn-0 scores of the draft on calibration problems: what the published rule wants before a run
        first = pair.plan(arm("paper", samples=4, turns=1, early_stop="none"), 10_000)
        outcomes, _ = await run_block(arithmetic("calibration", 40), first)
        stored = scores_of(outcomes)
        arms = [arm(row.name, stored=stored if row.name == "published" else ()) for row in PRESETS]
        await run_grid(arms, grid, ledger, pair, "methods")
    return [methods(f"Methods at rate {RATE:g}", ledger, [one.name for one in arms], 8)]


async def axes(options: Options) -> list[Table]:
    """Both axes of scaling: samples per problem, then turns and tokens per rollout."""
    ledger, count, sequential = _ledger(options, "axes"), options.pick(8, 40, 400), 4
    sizes = [1 << power for power in range(options.pick(8, 64, 64).bit_length())]
    turns = options.pick((2, 4, 8), (2, 4, 6, 8, 12), (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15))
    tokens = options.pick((50, 200), (50, 100, 150, 200, 300), (25, 50, 75, 100, 125, 150, 200, 250, 300, 400))
    limits = {"turns": turns, "max_tokens": tokens}
    async with Pair() as pair:
        grid = Grid(count, block=options.pick(8, 20, 50))
        for m in sizes:
            await run_grid([arm(name, samples=m) for name in ON_AXES], grid, ledger, pair, "samples axis")
        grid = Grid(count, block=options.pick(8, 40, 50))
        for option, steps in limits.items():
            for step in steps:
                arms = [
                    arm(name, samples=sequential).but(f"{name}, {option} {step}", **{option: step}) for name in ON_AXES
                ]
                await run_grid(arms, grid, ledger, pair, f"{option} axis")
    found = {(name, m): ledger.of(name, m) for name in ON_AXES for m in sizes}
    tables = [
        curve(
            "Samples per problem",
            found,
            "Live runs, votes stopped as soon as they cannot change; per problem; 95 % intervals over problems.",
            "With ties given to whichever comes first, the vote of 2 is no better than 1: monotone is the vote of odd "
            "numbers where the right answer is the most probable one, and on problems where a wrong answer is, more "
            "samples make it worse.",
        )
    ]
    for (option, steps), title in zip(limits.items(), ("Turns per rollout", "Tokens per rollout"), strict=True):
        found = {(n, step): ledger.of(f"{n}, {option} {step}", sequential) for n in ON_AXES for step in steps}
        note = (
            f"{sequential} samples; a rollout that is cut has no answer and does not vote, so accuracy cannot fall as "
            "the limit grows except by chance. The target's own steps are as long as the draft's, so both need as many "
            "turns."
        )
        tables.append(curve(title, found, note))
    return tables


PARTS: dict[str, Callable[[Options], Awaitable[list[Table]]]] = {
    "claim": claim,
    "rates": rates,
    "methods": every_method,
    "axes": axes,
    "time": timed,
    "exact": same_transcripts,
    "ordinal": ordinal_tables,
    "certified": certified_table,
}
