"""The tables of the speed study: the map, what to take where, and every arm with what bounds it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, Literal, NamedTuple, get_args

from scripts.studies.arms import Solved
from scripts.studies.harness import Chart, Row, Spread, Table, figure

ALONE = "target-only"
METHODS = ("target-only, speculating", "exact", "atts", "ordinal", "draft-only")
_RIVALS = ("target-only", "target-only, all cores", "target-only, speculating", "exact")
"""What has the target's own accuracy; the draft alone has not."""
_SHORT = {"target-only, speculating": "speculating", "target-only, all cores": "target-only"}
_CLOSE = 0.05
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
    """One place of the map."""

    target: str
    samples: int
    how: How

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
        sums = {
            kind: sum(getattr(one, kind) for one in solved)
            for kind in ("draft", "scored", "target")
        }
        return cls(seconds, sum(one.right > 0 for one in solved), len(solved), **sums)


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell in one repeat: every arm, by method and draft, on the same problems."""

    cell: Cell
    figures: Mapping[str, Figures]
    # seconds and tokens of scoring each draft's chunks, nothing else running
    scoring: Mapping[str, tuple[float, int]]
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

    def best(self, draft: str, *methods: str) -> float:
        """Seconds of the fastest of these, of which one at least was measured."""
        return min(one.seconds for method in methods if (one := self.of(method, draft)))

    def bound(self, method: str, draft: str) -> float:
        """Seconds of the arm's tokens, each model's at the rate it has alone: d + s + g."""
        drafting, alone, own = (
            self.figures[name] for name in (f"draft-only|{draft}", f"{ALONE}|", f"{method}|{draft}")
        )
        seconds, tokens = self.scoring[draft]
        base = self.best(draft, *_RIVALS[:2])
        d = drafting.seconds / max(1, drafting.draft)
        s = seconds / max(1, tokens)
        g = base / max(1, alone.target)
        return own.draft * d + own.scored * s + own.target * g


class Group(NamedTuple):
    """A cell beside one draft, in all repeats."""

    cell: Cell
    draft: str
    repeats: Sequence[Measured]

    @property
    def lead(self) -> tuple[str, str]:
        """Setting and target, in words."""
        return _panel(self.cell.how, self.draft), _target(self.cell.target)

    def over(self, method: str, *rivals: str) -> list[float]:
        """The method's time in units of the fastest of these, in every repeat that has it."""
        held = [(one, own) for one in self.repeats if (own := one.of(method, self.draft))]
        return [own.seconds / one.best(self.draft, *rivals) for one, own in held]

    def gain(self) -> Spread:
        """Time of the best alternative over that of atts, repeat by repeat."""
        return Spread.of([1 / share for share in self.over("atts", *_RIVALS)])

    def medians(self) -> dict[str, float]:
        """Median over repeats of every method's time in units of the target alone."""
        shares = {
            method: self.over(method, *_RIVALS[:2]) for method in (*_RIVALS, "atts", "ordinal")
        }
        return {method: statistics.median(found) for method, found in shares.items() if found}

    def best_rival(self) -> str:
        """The fastest of those that have the target's accuracy."""
        medians = {method: value for method, value in self.medians().items() if method in _RIVALS}
        best = min(medians, key=medians.__getitem__)
        return _SHORT.get(best, best)


def tables(found: Sequence[Measured], agreement: Mapping[str, float]) -> list[Table]:
    """Everything the study has to say; by the wall clock where any cell was measured by it."""
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
    """In the order of the map: setting, draft, the target's cost, rollouts."""
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
    held = {(*one.lead, one.cell.samples): one for one in groups}
    for panel in dict.fromkeys(one.lead[0] for one in groups):
        for place in product([panel], map(_target, SIZES), SAMPLES):
            cells: Row = (None, NOT_YET, "-")
            if own := held.get(place):
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
    """What is fastest at which numbers of rollouts, those nearly as fast beside it; and whether
    atts ever is.

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
            if value <= least * (1 + _CLOSE)
        ]
        chosen.append((" or ".join(dict.fromkeys(names)), samples, 1 / least))
    for name, own in groupby(chosen, lambda one: one[0]):
        held = list(own)
        first = held[0][1]
        last = held[-1][1]
        told = sorted({f"{gain:.1f}" for _, _, gain in held}, reverse=True)
        where = (
            f"at {first}"
            if first == last
            else f"at {first} to {last}"
            if parts
            else f"up to {last}"
        )
        words = f"{' to '.join(dict.fromkeys((told[0], told[-1])))} times"
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
        for method in ("atts", "ordinal"):
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
            own = [found for one in group.repeats if (found := one.of(method, group.draft))]
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
