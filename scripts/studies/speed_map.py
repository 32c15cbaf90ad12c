"""The tables of the speed study: the map, what to take where, and every arm with what bounds it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from scripts.studies.arms import Solved
from scripts.studies.harness import Chart, Row, Spread, Table, figure

ALONE = "target-only"
METHODS = ("target-only, speculating", "exact", "atts", "ordinal", "draft-only")
_RIVALS = ("target-only", "target-only, all cores", "target-only, speculating", "exact")
"""What has the target's own accuracy; the draft alone has not."""
_SHORT = {"target-only, speculating": "speculating", "target-only, all cores": "target-only"}
_CLOSE = 0.05
"""Methods whose median times are nearer to each other than this are called alike."""
SIZES, SAMPLES = ("4M", "20M", "200M"), (1, 2, 4, 8, 16)
NOT_YET = "not yet measured"
_CLOCKS: dict[Clock, str] = {
    "wall": "Times are wall times, all cores for everybody.",
    "processor": "**Times are processor time** of all processes with one thread each, for the machine was busy with "
    "other work: what one core would take. Engines that overlap on two cores are not seen, nor targets that use both.",
}


Clock = Literal["wall", "processor"]
"""What is measured: time as it passes, all cores at work; or processor time with one thread, on a busy machine."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the map."""

    target: str
    samples: int
    how: Literal["latency", "throughput"]

    def __str__(self) -> str:
        return f"cell {self.target} {self.samples} {self.how}"


@dataclass(frozen=True, slots=True)
class Figures:
    """What one arm came to on one block of problems."""

    seconds: float
    right: int
    problems: int
    draft: int
    scored: int
    target: int

    @classmethod
    def of(cls, solved: Sequence[Solved], seconds: float) -> Figures:
        """The sums of its problems."""
        sums = {kind: sum(getattr(one, kind) for one in solved) for kind in ("draft", "scored", "target")}
        return cls(seconds, sum(one.right > 0 for one in solved), len(solved), **sums)


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell in one repeat: every arm, by method and draft, on the same problems."""

    cell: Cell
    figures: Mapping[str, Figures]
    scoring: Mapping[str, tuple[float, int]]  # seconds and tokens of scoring each draft's chunks, nothing else running
    load: float
    clock: Clock

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Measured:
        """From plain JSON."""
        figures = {name: Figures(**own) for name, own in fields["figures"].items()}
        scoring = {name: (float(own[0]), int(own[1])) for name, own in fields["scoring"].items()}
        return cls(Cell(**fields["cell"]), figures, scoring, fields["load"], fields["clock"])

    def of(self, method: str, draft: str) -> Figures | None:
        """An arm; those without a draft stand beside every draft."""
        return self.figures.get(f"{method}|{draft}") or self.figures.get(f"{method}|")

    def rivals(self, draft: str) -> dict[str, float]:
        """Seconds of everything else that is as right as the target."""
        found = {method: self.of(method, draft) for method in _RIVALS}
        return {method: one.seconds for method, one in found.items() if one is not None}

    def bound(self, method: str, draft: str) -> float:
        """Seconds of the arm's tokens, each model's at the rate it has alone: d + s + g."""
        drafting, alone, own = self.of("draft-only", draft), self.of(ALONE, draft), self.of(method, draft)
        assert drafting is not None, "all arms of a cell are measured"
        assert alone is not None, "all arms of a cell are measured"
        assert own is not None, "all arms of a cell are measured"
        seconds, tokens = self.scoring[draft]
        base = min(one.seconds for one in (alone, self.of("target-only, all cores", draft)) if one)
        d, s, g = drafting.seconds / max(1, drafting.draft), seconds / max(1, tokens), base / max(1, alone.target)
        return own.draft * d + own.scored * s + own.target * g


Group = tuple[Cell, str, list[Measured]]
"""A cell beside one draft, in all repeats."""


def tables(found: Sequence[Measured], agreement: Mapping[str, float]) -> list[Table]:
    """Everything the study has to say; by the wall clock where any cell was measured by it."""
    clock: Clock = "wall" if any(one.clock == "wall" for one in found) else "processor"
    found = [one for one in found if one.clock == clock]
    groups = list(_groups(found, list(agreement)))
    drafts = "; ".join(f"the draft {name} agrees on {share:.2f} of tokens" for name, share in agreement.items())
    loads = [one.load for one in found]
    load = f"Load of the machine when cells began: {min(loads):.1f} to {max(loads):.1f}. {_CLOCKS[clock]}"
    return [_map(groups, drafts, load), _advice(groups), _bounds(groups), _arms(groups)]


def _groups(found: Sequence[Measured], drafts: Sequence[str]) -> Iterator[Group]:
    """In the order of the map: setting, draft, the target's cost, rollouts."""
    cells = sorted({one.cell for one in found}, key=lambda cell: (cell.how, SIZES.index(cell.target), cell.samples))
    for how in ("latency", "throughput"):
        for draft in drafts:
            for cell in cells:
                if cell.how == how:
                    yield cell, draft, [one for one in found if one.cell == cell]


def _panel(cell: Cell, draft: str) -> str:
    setting = "one problem at a time" if cell.how == "latency" else "many problems at once"
    return f"{setting}, draft {draft}"


def _target(cell: Cell) -> str:
    return f"{cell.target} target" + ("" if cell.target == "4M" else ", padded")


def _gain(group: Group, method: str = "atts") -> Spread:
    """Time of the best alternative over the method's, repeat by repeat."""
    _, draft, repeats = group
    ratios = [min(one.rivals(draft).values()) / own.seconds for one in repeats if (own := one.of(method, draft))]
    return Spread.of(ratios)


def _medians(group: Group) -> dict[str, float]:
    """Median over repeats of every method's time in units of the target alone."""
    _, draft, repeats = group
    found = dict[str, float]()
    for method in (*_RIVALS, "atts", "ordinal"):
        ratios = [
            own.seconds / min(s for name, s in one.rivals(draft).items() if name in _RIVALS[:2])
            for one in repeats
            if (own := one.of(method, draft))
        ]
        if ratios:
            found[method] = statistics.median(ratios)
    return found


def _best_rival(group: Group) -> str:
    medians = {method: value for method, value in _medians(group).items() if method in _RIVALS}
    best = min(medians, key=medians.__getitem__)
    return _SHORT.get(best, best)


def _map(groups: Sequence[Group], drafts: str, load: str) -> Table:
    rows: list[Row] = []
    for panel, own in groupby(groups, lambda group: _panel(group[0], group[1])):
        held = {group[0]: group for group in own}
        how = next(iter(held)).how
        for cell in [Cell(size, samples, how) for size in SIZES for samples in SAMPLES]:
            if cell in held:
                gain = _gain(held[cell])
                rows.append((panel, _target(cell), cell.samples, gain.median, _best_rival(held[cell]), str(gain)))
            else:
                rows.append((panel, _target(cell), cell.samples, None, NOT_YET, "-"))
        rows += [(panel, _target(Cell(size, 0, how)), "GPU", None, NOT_YET, "-") for size in SIZES]
    return Table.of(
        "Where it pays: time of the best alternative over that of atts",
        "setting | target | rollouts | atts is faster by | best alternative | median and range",
        rows,
        "Above 1 atts is faster. Alternatives, those with the target's own accuracy: target-only with and without "
        f"speculation, and `exact`. All on the same problems with the same vote and early stop, in turn; {drafts}. "
        "*Padded* targets write the words of the embedded one at the cost of a larger model. " + load,
        chart=Chart("rollouts", "target", "setting", value="atts is faster by", note="best alternative"),
    )


def _advice(groups: Sequence[Group]) -> Table:
    rows: list[Row] = []
    for (panel, target), own in groupby(groups, lambda group: (_panel(group[0], group[1]), _target(group[0]))):
        rows.append((panel, target, sentence([(group[0].samples, _medians(group)) for group in own])))
    return Table.of("What to take", "setting | target | take", rows)


def sentence(cells: Sequence[tuple[int, Mapping[str, float]]]) -> str:
    """What is fastest at which numbers of rollouts, those nearly as fast beside it; and whether atts ever is.

    >>> sentence([(1, {"exact": 0.5, "atts": 0.9}), (2, {"exact": 0.6, "atts": 0.8}), (4, {"exact": 1.0, "atts": 0.4})])
    'exact up to 2 rollouts (2.0 to 1.7 times the target alone), atts at 4 (2.5 times)'
    """
    chosen = list[tuple[str, int, float]]()
    for samples, medians in cells:
        least = min(medians.values())
        names = [_SHORT.get(name, name) for name, value in medians.items() if value <= least * (1 + _CLOSE)]
        chosen.append((" or ".join(dict.fromkeys(names)), samples, 1 / least))
    parts = list[str]()
    for name, own in groupby(chosen, lambda one: one[0]):
        held = list(own)
        first, last, gains = held[0][1], held[-1][1], sorted({f"{gain:.1f}" for _, _, gain in held}, reverse=True)
        where = (
            f"up to {last}"
            if not parts and len(held) > 1
            else f"at {first}"
            if first == last
            else f"at {first} to {last}"
        )
        words = f"{gains[0]} to {gains[-1]} times" if len(gains) > 1 else f"{gains[0]} times"
        unit = "rollout" if first == last == 1 else "rollouts"
        parts.append(f"{name} {where}{f' ({words})'}" if parts else f"{name} {where} {unit} ({words} the target alone)")
    never = "" if any("atts" in name for name, _, _ in chosen) else "; atts nowhere"
    return ", ".join(parts) + never


def _bounds(groups: Sequence[Group]) -> Table:
    rows: list[Row] = []
    for group in groups:
        cell, draft, repeats = group
        for method in ("atts", "ordinal"):
            values = [(one.bound(method, draft), own.seconds) for one in repeats if (own := one.of(method, draft))]
            parts = Spread.of([seconds / bound for bound, seconds in values if bound > 0])
            rows.append((_panel(cell, draft), _target(cell), cell.samples, method, str(parts)))
    return Table.of(
        "Time over the bound d + s + g",
        "setting | target | rollouts | method | time over the bound, median and range",
        rows,
        "The bound is the time of the method's own tokens, written by the draft (d), scored (s) and written by the "
        "target (g), each at the rate that the model has alone in this cell, one after the other. Below 1 the engines "
        "overlap.",
    )


def _arms(groups: Sequence[Group]) -> Table:
    rows: list[Row] = []
    for cell, draft, repeats in groups:
        for method in ("target-only", "target-only, all cores", *METHODS):
            own = [found for one in repeats if (found := one.of(method, draft))]
            if own:
                bases = [base for one in repeats if (base := one.of(ALONE, draft))]
                ratios = [one.seconds / base.seconds for one, base in zip(own, bases, strict=True)]
                right = f"{sum(one.right for one in own)} of {sum(one.problems for one in own)}"
                tokens = [figure(sum(getattr(one, kind) for one in own)) for kind in ("draft", "scored", "target")]
                rows.append(
                    (_panel(cell, draft), _target(cell), cell.samples, method, str(Spread.of(ratios)), right, *tokens)
                )
    return Table.of(
        "Every arm: time in units of the target alone",
        "setting | target | rollouts | method | time, median and range | right | draft tokens | scored | target tokens",
        rows,
    )
