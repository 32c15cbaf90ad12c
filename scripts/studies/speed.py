"""Where it pays on real clocks: every method by the target's cost and the number of rollouts, in
one interleaved run.

Targets are the embedded one, alone and padded to the cost of larger models: the words are the same
throughout. The draft is the embedded one as it is, and weakened until it agrees with the target as
seldom as drafts of real pairs do.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import anyio

from atts.api import Setup
from atts.core import Problem
from atts.engine import Engine
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.local import LocalEngine, LocalOptions
from atts.models import path as model_path
from scripts.studies.arms import Schedule, Solved, run_block, scores_of
from scripts.studies.harness import Options, Parts, Table, pair_name, say, tree_seconds
from scripts.studies.padded import padded_folder
from scripts.studies.pipelines import Rescoring
from scripts.studies.speed_draft import agreement, weakened
from scripts.studies.speed_map import ALONE, METHODS, Cell, Clock, Figures, Measured, tables

TARGETS = {"4M": "", "20M": "20M", "200M": "200M"}
"""By what a token costs, and the padding; the embedded target itself has none."""
DRAFTS = ("as it is", "weakened")
_ALL_CORES = "target-only, all cores"


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model, and scores that the target gave its chunks on other problems."""

    folder: Path
    engine: Engine
    scores: Sequence[float]


@dataclass(frozen=True, slots=True)
class Bench:
    """What is open while the cells of one target are measured, and by which clock."""

    clock: Clock
    drafts: Mapping[str, Draft]
    targets: Mapping[str, Engine]  # by number of threads, and by the draft that speculates

    def run(self, method: str, draft: str) -> tuple[str, Engine, Engine]:
        """The method's name elsewhere, and the engines that it works with."""
        target = self.targets[ALONE]
        own = self.drafts[draft or DRAFTS[0]].engine
        if method == "target-only, speculating":
            return "target-only", own, self.targets[draft]
        return ("target-only", own, self.targets[method]) if not draft else (method, own, target)


def study(options: Options) -> list[Table]:
    """The map, made cell by cell; what earlier sessions measured is not measured again."""
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


def cells(target: str, options: Options) -> Iterator[Cell]:
    """All cells of one target."""
    for samples in options.pick((1, 4), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
        yield Cell(target, samples, "latency")
        yield Cell(target, samples, "throughput")


@asynccontextmanager
async def _drafts(
    options: Options, place: Path, kept: Parts
) -> AsyncGenerator[Mapping[str, Draft]]:
    """Both drafts, open, with scores to begin with."""
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
    """The target plain, speculating with either draft, and with all cores where one thread is the
    default.

    Where processor time is measured, one thread each: a second one would count its waiting.
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
    return LocalEngine(
        folder, name=folder.name, options=replace(LocalOptions(device="cpu"), **changes)
    )


def setup(method: str, samples: int, **changes: Any) -> Setup:
    """The method at its defaults, with the lengths that the embedded pair has."""
    return Setup(method=method, policy=replace(Setup().run_policy, samples=samples), **changes)


async def _measure(cell: Cell, repeat: int, bench: Bench, options: Options) -> Measured:
    """Every arm once on the same problems, in an order that turns from repeat to repeat."""
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
        seed = 1009 * repeat + number + options.seed * 31  # no arm finds another's texts in a cache
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


def _problems(cell: Cell, repeat: int, options: Options) -> Sequence[Problem]:
    """One or a few for latency; for throughput as many as keep so many rollouts in flight, at least
    two.
    """
    count = options.pick(1, 1, 4)
    if cell.how == "throughput":
        count = max(2, options.pick(8, 16, 64) // cell.samples)
    return arithmetic("test", count * (repeat + 1))[count * repeat :]
