"""Every method from the same command on the embedded pair: accuracy, tokens and time, compared problem by problem."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import anyio

from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.methods import PRESETS
from scripts.studies.harness import Effort, Options, Table, emit, say
from scripts.studies.machine import look, pair_mark
from scripts.studies.pipelines_arms import Grid, Ledger, Pair, run_block, run_grid
from scripts.studies.pipelines_axes import samples_axis, tokens_axis, turns_axis
from scripts.studies.pipelines_barrier import live, virtual
from scripts.studies.pipelines_certified import certified_study
from scripts.studies.pipelines_ordinal import ordinal_study
from scripts.studies.pipelines_policies import RATE, arm
from scripts.studies.pipelines_tables import control, methods, verdict
from scripts.studies.pipelines_time import time_study

CLAIMED = {"target-only": RATE, "atts": 0.19}
"""The default policy, its rate such that what the target writes stays below a fifth: at 0.2 it is about that."""
Part = Callable[[Options], Awaitable[list[Table]]]


def study(options: Options) -> list[Table]:
    """All parts, one after the other; with --full and an output folder each goes on where an earlier try was killed."""
    return [table for name in PARTS for table in part(name, options)]


def part(name: str, options: Options) -> list[Table]:
    """One part's tables."""
    say(f"pipelines: {name}")
    return anyio.run(PARTS[name], options)


def _ledger(options: Options, name: str) -> Ledger:
    """What was measured with this pair: another one's is another file."""
    file = f"pipelines-{name}-{options.effort}-{pair_mark().replace(', ', '-').replace(' ', '-')}.jsonl"
    return Ledger(None if options.out is None else options.out / file)


async def claim(options: Options, only: Sequence[int] = ()) -> list[Table]:
    """The policy against the target alone, on enough problems to say so; `only` some seeds shares it out.

    Every rollout runs to its end: an early stop changes no vote, and without it pass@1 is that of all rollouts.
    """
    seeds = tuple(only) or options.pick((0,), (0,), (0, 1, 2))
    ledger = _ledger(options, "claim")
    async with Pair() as pair:
        for m in options.pick((8,), (8,), (8, 16)):
            for seed in seeds:  # a seed is a whole answer, the next ones make it narrower
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
        found = methods(title, ledger, list(CLAIMED), m)
        tables += [replace(found, notes=(*found.notes, words)), verdict(ledger, "atts", m)]
    return tables


async def rates(options: Options) -> list[Table]:
    """How the rate is kept, live, by gates that promise it for the run, for each question, and for like scores only."""
    grid = Grid(options.pick(20, 100, 1000), (0,), 1000, options.pick(20, 50, 50))
    ledger = _ledger(options, "rates")
    nominal = options.pick((0.2,), (0.2,), (0.1, 0.2, 0.4))
    arms = [
        arm(f"{mode} at {rate:g}", "atts", mode=mode, rate=rate, takeover="replace", early_stop="none")
        for rate in nominal
        for mode in ("aci", "question-turn", "marginal")
    ]
    async with Pair() as pair:
        await run_grid(arms, grid, ledger, pair, "rates")
    return [control(ledger, one.name, 8, one.setup.rate) for one in arms]


async def everybody(options: Options) -> list[Table]:
    """Every baseline, as good as its authors would make it."""
    grid = Grid(options.pick(8, 60, 500), options.pick((0,), (0,), (0, 1, 2)), 500, options.pick(8, 20, 50))
    ledger = _ledger(options, "methods")
    async with Pair() as pair:
        stored = await _turn_zero(pair)
        arms = [arm(row.name, stored=stored if row.name == "published" else ()) for row in PRESETS]
        await run_grid(arms, grid, ledger, pair, "methods")
    return [methods(f"Methods at rate {RATE:g}", ledger, [one.name for one in arms], 8)]


async def axes(options: Options) -> list[Table]:
    """Both axes of scaling."""
    async with Pair() as pair:
        ledger = _ledger(options, "axes")
        return [
            await samples_axis(options, pair, ledger),
            await turns_axis(options, pair, ledger),
            await tokens_axis(options, pair, ledger),
        ]


async def clock(options: Options) -> list[Table]:
    """Latency and throughput beside the target alone."""
    return await time_study(options)


async def barrier(options: Options) -> list[Table]:
    """Live here; `barrier_virtual` has a clock of its own."""
    async with Pair() as pair:
        return [await live(options, pair)]


async def barrier_virtual(options: Options) -> list[Table]:
    """In a thread: virtual time needs a loop of its own."""
    return [await anyio.to_thread.run_sync(virtual, options)]


async def ordinal(options: Options) -> list[Table]:
    """The gate of ordered levels."""
    async with Pair() as pair:
        return await ordinal_study(options, pair)


async def certified(options: Options) -> list[Table]:
    """A certificate, earned and kept."""
    async with Pair() as pair:
        return [await certified_study(options, pair)]


PARTS: dict[str, Part] = {
    "claim": claim,
    "rates": rates,
    "methods": everybody,
    "axes": axes,
    "time": clock,
    "barrier": barrier,
    "barrier-virtual": barrier_virtual,
    "ordinal": ordinal,
    "certified": certified,
}


async def _turn_zero(pair: Pair) -> tuple[float, ...]:
    """Turn-0 scores of the draft on calibration problems: what the published rule wants before a run."""
    plan = pair.plan(arm("paper", samples=4, turns=1, early_stop="none"), 10_000)
    outcomes, _ = await run_block(arithmetic("calibration", 40), plan)
    turns = [turn for outcome in outcomes for line in outcome.rollouts for turn in line.turns]
    return tuple(turn.score for turn in turns if turn.score is not None)


def main() -> None:
    """Only the parts that were asked for."""
    parser = _parser()
    asked = parser.parse_args()
    unknown = [name for name in asked.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown parts {unknown}; there are {', '.join(PARTS)}")
    effort: Effort = asked.effort
    options = Options(effort, asked.seed, asked.out)
    if asked.ledger is not None:
        return emit("pipelines-claim", claimed(Ledger(asked.ledger)), options, look())
    for name in asked.parts or PARTS:
        shared_out = name == "claim" and asked.seeds
        tables = anyio.run(claim, options, asked.seeds) if shared_out else part(name, options)
        emit(f"pipelines-{name}", tables, options, look())
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pipelines", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("--effort", choices=("quick", "default", "full"), default="default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="+", default=(), help="only these of the claim: one process each")
    parser.add_argument("--out", type=Path, help="also write tables and charts here, and go on from what is here")
    parser.add_argument("--ledger", type=Path, help="run nothing: the tables of the claim from what this file holds")
    return parser


if __name__ == "__main__":
    main()
