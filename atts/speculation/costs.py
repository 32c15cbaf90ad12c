"""What steps and proposals take, as measured: seconds by the number of tokens, never falling as there are more."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import log2

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Condition = tuple[int, ...]  # whether given text is fed in the same step, how many sequences, how long they are

_KEPT = 9  # newest times of a cell, of which the median counts: load and hiccups of the machine pass
_ENOUGH = 2  # times that make a cell measured
_STALE = 8  # times added before a curve is drawn anew
_EXACT = 16  # rows up to which each number has a cell of its own; beyond, four cells an octave


def condition(*, is_mixed: bool, context: float, sequences: int) -> Condition:
    """Under which one curve holds: contexts are told apart by factors of four, numbers of sequences by two."""
    return is_mixed, sequences.bit_length(), int(context).bit_length() // 2


@dataclass(frozen=True, slots=True)
class Curve:
    """Times at rising numbers of rows."""

    rows: Floats
    seconds: Floats
    _known: dict[int, float] = field(default_factory=dict[int, float])

    def one(self, rows: int) -> float:
        """At one number of rows; asked again it is looked up."""
        if rows not in self._known:
            self._known[rows] = float(self.at(np.array([float(rows)]))[0])
        return self._known[rows]

    def at(self, rows: Floats) -> Floats:
        """Between measured cells a line; beyond, more than the least there can be."""
        first, last = self.rows[0], self.rows[-1]
        found = np.interp(rows, self.rows, self.seconds)
        below = self.seconds[0] * (0.5 + 0.5 * rows / first)
        slope = self.seconds[-1] / last
        if len(self.rows) > 1:
            rise = (self.seconds[-1] - self.seconds[-2]) / (last - self.rows[-2])
            slope = max(rise, slope / 2)
        above: Floats = found + slope * np.maximum(rows - last, 0.0)
        return np.where(rows < first, below, above).astype(np.float64)

    def least(self, rows: Floats) -> Floats:
        """What so many rows take at the least, for fewer took as long; nothing where fewer were never measured."""
        places = np.searchsorted(self.rows, rows, side="right") - 1
        return np.where(places < 0, 0.0, self.seconds[places]).astype(np.float64)


@dataclass(slots=True)
class _Cell:
    rows: float
    times: deque[float] = field(default_factory=lambda: deque[float](maxlen=_KEPT))

    def add(self, rows: int, seconds: float) -> None:
        self.rows += (rows - self.rows) / 4
        self.times.append(seconds)

    def median(self) -> float:
        return sorted(self.times)[(len(self.times) - 1) // 2]


class StepCosts:
    """A table of times by condition and rows, filled as steps are taken."""

    def __init__(self) -> None:
        self._cells: dict[Condition, dict[int, _Cell]] = {}
        self._curves: dict[Condition, Curve] = {}
        self._since: dict[Condition, int] = {}

    def add(self, where: Condition, rows: int, seconds: float) -> None:
        """One step took so long."""
        cells = self._cells.get(where)
        if cells is None:
            cells = self._cells[where] = self._like(where)
        place = _place(rows)
        if place not in cells:
            cells[place] = _Cell(rows)
        cells[place].add(rows, seconds)
        self._since[where] = self._since.get(where, 0) + 1
        if self._since[where] >= _STALE or len(cells[place].times) <= _ENOUGH:
            self._curves.pop(where, None)

    def is_measured(self, where: Condition, rows: int) -> bool:
        """Whether the cell of so many rows has been seen more than once."""
        cell = self._cells.get(where, {}).get(_place(rows))
        return cell is not None and len(cell.times) >= _ENOUGH

    def curve(self, where: Condition) -> Curve | None:
        """Step times there, or under the nearest condition that was seen; None: no step was ever timed."""
        if where in self._curves:
            return self._curves[where]
        if where not in self._cells:
            near = self._nearest(where)
            return None if near is None else self.curve(near)
        self._since[where] = 0
        self._curves[where] = _rising(sorted((c.rows, c.median()) for c in self._cells[where].values()))
        return self._curves[where]

    def _nearest(self, where: Condition) -> Condition | None:
        def distance(other: Condition) -> tuple[bool, int]:
            return other[0] != where[0], sum([abs(one - two) for one, two in zip(other[1:], where[1:], strict=True)])

        return min(self._cells, key=distance, default=None)

    def _like(self, where: Condition) -> dict[int, _Cell]:
        """Cells of a condition that is new: those of the nearest one, soon outvoted by times of its own."""
        near = self._nearest(where)
        known = self._cells[near] if near is not None else {}
        return {
            place: _Cell(cell.rows, deque([cell.median()] * min(_ENOUGH, len(cell.times)), _KEPT))
            for place, cell in known.items()
        }


def _place(rows: int) -> int:
    return rows if rows <= _EXACT else int(4 * log2(rows / _EXACT)) + _EXACT + 1


def _rising(points: list[tuple[float, float]]) -> Curve:
    """The nearest times that never fall as rows rise: neighbours that do are averaged."""
    blocks: list[tuple[float, int]] = []  # mean seconds, points
    for _, seconds in points:
        mean, count = seconds, 1
        while blocks and blocks[-1][0] > mean:
            before, more = blocks.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        blocks.append((mean, count))
    means = [mean for mean, count in blocks for _ in range(count)]
    return Curve(np.array([rows for rows, _ in points]), np.array(means))
