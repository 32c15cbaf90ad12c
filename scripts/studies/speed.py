"""Map where each method pays on real clocks, by the cost of the target and the number of rollouts."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import anyio
import torch
from safetensors.torch import load_file, save_file

from atts.accel import accelerated, options_of
from atts.api import Setup
from atts.core import Problem
from atts.engine import Engine
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.local import LocalEngine
from atts.models import path as model_path
from scripts.studies.arms import Schedule, Solved, arm, run_block, scores_of
from scripts.studies.harness import (
    Chart,
    Options,
    Parts,
    Row,
    Spread,
    Table,
    figure,
    pair_name,
    say,
    tree_seconds,
)
from scripts.studies.local import padded_folder
from scripts.studies.pipelines import Rescoring

AGREEMENT = 0.75
"""Tokens on which drafts and targets that people use agree, about; the embedded pair agrees on
0.98.
"""
_AGREEMENT_WITHIN = 0.02
_TRIES = 8


async def weakened(folder: Path, noise: float | None = None) -> float:
    """Write the draft with this much noise, or with as much as is needed; the noise."""
    if noise is not None:
        noisy(folder, noise)
        return noise
    low = 0.0
    high = 1.0
    for _ in range(_TRIES):
        noise = (low + high) / 2
        noisy(folder, noise)
        found = await agreement(folder)
        say(f"speed: noise of {noise:.3f} leaves agreement on {found:.3f} of tokens")
        if abs(found - AGREEMENT) < _AGREEMENT_WITHIN:
            break
        low, high = (noise, high) if found > AGREEMENT else (low, noise)
    assert noise is not None, "something was tried"
    return noise


def noisy(folder: Path, noise: float) -> Path:
    """Copy the draft's folder with noise in units of each matrix's own deviation, always the same."""
    shutil.copytree(model_path("draft"), folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    for name, weight in sorted(weights.items()):
        scale = noise * weight.float().std() if weight.ndim == 2 else 0.0
        weights[name] = (
            weight.float() + scale * torch.randn(weight.shape, generator=generator)
        ).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


async def agreement(folder: Path, count: int = 6) -> float:
    """Return the share of the target's tokens that this draft would have drawn with the same random
    numbers.
    """
    settings = options_of(worker="thread", threads=1, drafter=str(folder), speculate="draft", k=1)
    async with accelerated(model_path("target"), name="target", **settings._asdict()) as target:
        one = arm("target-only", samples=1)
        await run_block(arithmetic("calibration", count), one.setup.plan(target, target))
        counted = target.loop_stats().speculation
    assert counted is not None, "it speculates"
    return counted.accepted / max(1, counted.proposed)


ALONE = "target-only"
METHODS = ("target-only, speculating", "exact", "atts", "draft-only")
_RIVALS = ("target-only", "target-only, all cores", "target-only, speculating", "exact")
"""What has the target's own accuracy; the draft alone has not."""
_SHORT = {"target-only, speculating": "speculating", "target-only, all cores": "target-only"}
_ALIKE_WITHIN = 0.05
"""Methods whose median times are nearer to each other than this are called alike."""
SIZES = ("4M", "20M", "200M")
SAMPLES = (1, 2, 4, 8, 16)
NOT_YET = "not yet measured"
_CLOCKS: dict[Clock, str] = {
    "wall": "Times are wall times, all cores for everybody.",
    "processor": "**Times are processor time** of all processes with one thread each, for the "
    "machine was busy with "
    "other work: what one core would take. Engines that overlap on two cores are not seen, nor "
    "targets that use both.",
}

How = Literal["latency", "throughput"]
Clock = Literal["wall", "processor"]
"""What is measured: time as it passes, all cores at work; or processor time with one thread, on a
busy machine.
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """A place of the map."""

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
        """Add up the problems."""
        sums = {
            kind: sum(getattr(one, kind) for one in solved)
            for kind in ("draft", "scored", "target")
        }
        return cls(seconds, sum(one.right > 0 for one in solved), len(solved), **sums)


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell in one repeat: every arm, by method and draft, on the same problems."""

    cell: Cell
    figures: Mapping[str, Figures]
    # seconds and tokens of scoring each draft's chunks, nothing else running
    scoring: Mapping[str, tuple[float, int]]
    load: float
    clock: Clock

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Measured:
        """Read plain JSON."""
        figures = {name: Figures(**own) for name, own in fields["figures"].items()}
        scoring = {name: (float(own[0]), int(own[1])) for name, own in fields["scoring"].items()}
        return cls(Cell(**fields["cell"]), figures, scoring, fields["load"], fields["clock"])

    def of(self, method: str, draft: str) -> Figures | None:
        """Return the figures of an arm; those without a draft are the same for every draft."""
        return self.figures.get(f"{method}|{draft}") or self.figures.get(f"{method}|")

    def best(self, draft: str, *methods: str) -> float:
        """Return the seconds of the fastest of these arms; at least one must be measured."""
        figures = [self.of(method, draft) for method in methods]
        return min(one.seconds for one in figures if one is not None)

    def bound(self, method: str, draft: str) -> float:
        """Return the seconds of the arm's tokens at the rate that each model has alone."""
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
    """A cell with one draft, in all repeats."""

    cell: Cell
    draft: str
    repeats: Sequence[Measured]

    @property
    def lead(self) -> tuple[str, str]:
        """Return setting and target, in words."""
        return _panel(self.cell.how, self.draft), _target(self.cell.target)

    def over(self, method: str, *rivals: str) -> list[float]:
        """Return the method's time relative to the fastest of these, in every repeat that has it."""
        ratios = list[float]()
        for repeat in self.repeats:
            figures = repeat.of(method, self.draft)
            if figures is not None:
                ratios.append(figures.seconds / repeat.best(self.draft, *rivals))
        return ratios

    def gain(self) -> Spread:
        """Return the time of the best alternative over that of atts, repeat by repeat."""
        return Spread.of([1 / share for share in self.over("atts", *_RIVALS)])

    def medians(self) -> dict[str, float]:
        """Return the median over repeats of every method's time relative to the target alone."""
        shares = {method: self.over(method, *_RIVALS[:2]) for method in (*_RIVALS, "atts")}
        return {method: statistics.median(found) for method, found in shares.items() if found}

    def best_rival(self) -> str:
        """Return the fastest of the methods that have the target's accuracy."""
        medians = {method: value for method, value in self.medians().items() if method in _RIVALS}
        best = min(medians, key=medians.__getitem__)
        return _SHORT.get(best, best)


def tables(found: Sequence[Measured], agreement: Mapping[str, float]) -> list[Table]:
    """Return all tables, by the wall clock if any cell was measured by it."""
    clock: Clock = "wall" if any(one.clock == "wall" for one in found) else "processor"
    found = [one for one in found if one.clock == clock]
    groups = list(_groups(found, list(agreement)))
    drafts = "; ".join(
        f"the draft {name} agrees on {share:.2f} of tokens" for name, share in agreement.items()
    )
    loads = [one.load for one in found]
    load = f"Load of the machine when cells began: {min(loads):.1f} to {max(loads):.1f}. {_CLOCKS[clock]}"
    return [_map(groups, drafts, load), _advice(groups), _bounds(groups), _arms(groups)]


def _groups(found: Sequence[Measured], drafts: Sequence[str]) -> Iterator[Group]:
    """Group cells in the order of the map: setting, draft, the target's cost, rollouts."""
    for how, draft, target, samples in product(get_args(How), drafts, SIZES, SAMPLES):
        cell = Cell(target, samples, how)
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
        "Where it pays: time of the best alternative over that of atts",
        "setting | target | rollouts | atts is faster by | best alternative | median and range",
        rows,
        "Above 1 atts is faster. Alternatives, those with the target's own accuracy: target-only "
        "with and without "
        f"speculation, and `exact`. All on the same problems with the same vote and early stop, in "
        f"turn; {drafts}. "
        "*Padded* targets write the words of the embedded one at the cost of a larger model. "
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
    return Table.of("What to take", "setting | target | take", rows)


def sentence(cells: Sequence[tuple[int, Mapping[str, float]]]) -> str:
    """Say which method is fastest at which numbers of rollouts, and whether atts ever is.

    >>> sentence([(1, {"exact": 0.5, "atts": 0.9}), (2, {"exact": 0.6, "atts": 0.8}), (4, {"exact": 1.0, "atts": 0.4})])
    'exact up to 2 rollouts (2.0 to 1.7 times the target alone), atts at 4 (2.5 times)'
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
        # only one number if the largest and the smallest gain print alike
        words = f"{' to '.join(dict.fromkeys((gains[0], gains[-1])))} times"
        unit = "rollout" if first == last == 1 else "rollouts"
        parts.append(
            f"{name} {where} ({words})"
            if parts
            else f"{name} {where} {unit} ({words} the target alone)"
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
        "The bound is the time of the method's own tokens, written by the draft (d), scored (s) "
        "and written by the "
        "target (g), each at the rate that the model has alone in this cell, one after the other. "
        "Below 1 the engines "
        "overlap.",
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
        "Every arm: time in units of the target alone",
        "setting | target | rollouts | method | time, median and range | right | draft tokens | "
        "scored | target tokens",
        rows,
    )


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
    """The engines that are open while the cells of one target are measured, and the clock."""

    clock: Clock
    drafts: Mapping[str, Draft]
    targets: Mapping[str, Engine]  # keyed by number of threads, and by the draft that speculates

    def run(self, method: str, draft: str) -> tuple[str, Engine, Engine]:
        """Run the method under its usual name with its engines."""
        target = self.targets[ALONE]
        own = self.drafts[draft or DRAFTS[0]].engine
        if method == "target-only, speculating":
            return "target-only", own, self.targets[draft]
        return ("target-only", own, self.targets[method]) if not draft else (method, own, target)


def study(options: Options) -> list[Table]:
    """Make the map, cell by cell.

    What earlier sessions measured is not measured again.
    """
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
    """Return all cells of one target."""
    for samples in options.pick((1, 4), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
        yield Cell(target, samples, "latency")
        yield Cell(target, samples, "throughput")


@asynccontextmanager
async def _drafts(
    options: Options, place: Path, kept: Parts
) -> AsyncGenerator[Mapping[str, Draft]]:
    """Open both drafts, with stored scores."""
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
    """Open the target plain, speculating with either draft, and with all cores if one thread is the
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
    return accelerated(folder, name=folder.name, **options_of(device="cpu", **changes)._asdict())


def setup(method: str, samples: int, **changes: Any) -> Setup:
    """Return the method at its defaults, with the lengths that the embedded pair has."""
    return Setup(method=method, policy=replace(Setup().run_policy, samples=samples), **changes)


async def _measure(cell: Cell, repeat: int, bench: Bench, options: Options) -> Measured:
    """Run every arm once on the same problems, in an order that turns from repeat to repeat."""
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
    """Return one or a few problems for latency; for throughput enough to fill the rollouts in
    flight, at least two.
    """
    count = options.pick(1, 1, 4)
    if cell.how == "throughput":
        count = max(2, options.pick(8, 16, 64) // cell.samples)
    return arithmetic("test", count * (repeat + 1))[count * repeat :]
