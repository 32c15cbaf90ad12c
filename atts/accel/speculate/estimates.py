"""Estimates that speculation lengths come from: what steps cost, and how likely proposals survive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, log2, sqrt

import numpy as np
from numpy.typing import NDArray

# A shared machine is slower now than it was a second ago. So the logs of times are the sum of what
# the machine adds now, which wanders, and of what so many tokens take, which stays: a Kalman filter
# tells them apart, for steps of different sizes follow each other. How well each is known is known,
# and times that are far off count as little as they should.


Floats = NDArray[np.float64]
# whether given text is fed in the same step, how many sequences, how long they are
Condition = tuple[int, ...]

_NEW = 1.0
_COPIED = 0.04  # variance of the log of a time that neighbours or another condition promise
_ENOUGH = 0.12  # variance below which a cell is measured
_AGEING = 0.00002  # variance that a step adds to a cell that was not seen in it
_STEP = 0.04
_LEARNING = 1 / 32  # variance of one step's time at first, and how fast it is learnt
_WANDERING = 0.05  # variance that a step adds to the machine's slowness, as a share of it
_OUTLYING = 2.5  # standard deviations beyond which a time tells no more
# least variance of a cell with few times, as a share of one step's variance
_YOUNG = 0.25
_STALE = 8  # times added before a curve is drawn again
_EXACT = 16  # rows up to which each number has a cell of its own; beyond, four cells an octave


def size_class(sequences: int) -> int:
    """Return the class of a number of sequences: factors of two, each around a power of two."""
    return (3 * sequences // 2).bit_length()


def condition(*, is_mixed: bool, context: float, sequences: int) -> Condition:
    """Return the condition under which one curve holds; contexts differ by factors of four."""
    return is_mixed, size_class(sequences), int(context).bit_length() // 2


@dataclass(frozen=True, slots=True)
class Curve:
    """Times at rising numbers of rows."""

    rows: Floats
    seconds: Floats
    _known: dict[int, float] = field(default_factory=dict[int, float])

    def one(self, rows: int) -> float:
        """Return the seconds at one number of rows, remembered for the next time."""
        if rows not in self._known:
            self._known[rows] = float(self.at(np.array([float(rows)]))[0])
        return self._known[rows]

    def at(self, rows: Floats) -> Floats:
        """Return the seconds: a line between measured cells; beyond them, more than the least
        possible.
        """
        first = self.rows[0]
        last = self.rows[-1]
        inside = np.interp(rows, self.rows, self.seconds)
        below = self.seconds[0] * (0.5 + 0.5 * rows / first)
        slope = self.seconds[-1] / last
        if len(self.rows) > 1:
            rise = (self.seconds[-1] - self.seconds[-2]) / (last - self.rows[-2])
            slope = max(rise, slope / 2)
        above: Floats = inside + slope * np.maximum(rows - last, 0.0)
        return np.where(rows < first, below, above).astype(np.float64)

    def least(self, rows: Floats) -> Floats:
        """Return the least time that so many rows take; 0 if fewer were never measured."""
        places = np.searchsorted(self.rows, rows, side="right") - 1
        return np.where(places < 0, 0.0, self.seconds[places]).astype(np.float64)


@dataclass(slots=True)
class _Cell:
    rows: float
    log: float  # logarithm of the seconds
    variance: float  # variance of that logarithm
    seen: int  # the number of the time that was added last


class StepCosts:
    """A table of times by condition and rows, filled as steps are taken."""

    def __init__(self, *, wanders: bool = True) -> None:
        """Create an empty table of step times. If the machine's speed `wanders`, only times that
        were measured close together are compared.
        """
        self._cells: dict[Condition, dict[int, _Cell]] = {}
        self._curves: dict[Condition, Curve] = {}
        self._since: dict[Condition, int] = {}
        self._added = 0
        self._wandering = _WANDERING if wanders else 0.0
        self._of_machine = 0.0
        self._of_step = _STEP  # variances
        self._machine = 0.0  # log of the slowness

    @property
    def slowness(self) -> float:
        """Return the ratio of the present step times to the times of the table."""
        return exp(self._machine)

    def add(self, where: Condition, rows: int, seconds: float) -> None:
        """Learn that one step took so long."""
        self._added += 1
        if where not in self._cells:
            self._cells[where] = self._like(where)
        cell = self._cells[where].get(_place(rows))
        if cell is None:
            cell = self._cells[where][_place(rows)] = self._begun(where, rows, seconds)
        was_known = cell.variance < _ENOUGH
        self._update(cell, rows, log(seconds))
        self._since[where] = self._since.get(where, 0) + 1
        if self._since[where] >= _STALE or not was_known:
            self._curves.pop(where, None)

    def rest(self, steps: int) -> None:
        """Note that so many steps were not timed."""
        self._added += steps
        self._of_machine = min(1.0, self._of_machine + self._wandering * self._of_step * steps)

    def _begun(self, where: Condition, rows: int, seconds: float) -> _Cell:
        curve = self.curve(where) if self._cells[where] else None
        expected = log(seconds) - self._machine if curve is None else log(curve.one(rows))
        return _Cell(rows, expected, _NEW, self._added)

    def _update(self, cell: _Cell, rows: int, observed: float) -> None:
        self._of_machine += self._wandering * self._of_step
        cell.variance = min(_NEW, cell.variance + _AGEING * (self._added - cell.seen))
        variance = self._of_machine + cell.variance + self._of_step
        most = _OUTLYING * sqrt(variance)
        off = observed - self._machine - cell.log
        # the few before it were interrupted
        if off < -most and cell.variance > _YOUNG * self._of_step:
            cell.log += off + most
        surprise = max(-most, min(most, observed - self._machine - cell.log))
        self._of_step += _LEARNING * self._of_step * (surprise**2 / variance - 1)
        self._machine += self._of_machine / variance * surprise
        self._of_machine -= self._of_machine**2 / variance
        cell.log += cell.variance / variance * surprise
        cell.variance -= cell.variance**2 / variance
        cell.rows = cell.rows + (rows - cell.rows) / 4
        cell.seen = self._added

    def is_measured(self, where: Condition, rows: int) -> bool:
        """Return whether it is known what so many rows take."""
        return self._variance(where, rows) < _ENOUGH

    def doubt(self, where: Condition, rows: int) -> float:
        """Return the standard deviation of the log of what so many rows are thought to take."""
        return sqrt(self._variance(where, rows))

    def _variance(self, where: Condition, rows: int) -> float:
        cell = self._cells.get(where, {}).get(_place(rows))
        return (
            _NEW if cell is None else min(_NEW, cell.variance + _AGEING * (self._added - cell.seen))
        )

    def curve(self, where: Condition) -> Curve | None:
        """Step times there, or under the nearest condition that was seen; None: no step was ever
        timed.
        """
        if where in self._curves:
            return self._curves[where]
        if where not in self._cells:
            near = self._nearest(where)
            return None if near is None else self.curve(near)
        self._since[where] = 0
        self._curves[where] = _rising(
            sorted(self._cells[where].values(), key=lambda cell: cell.rows)
        )
        return self._curves[where]

    def _nearest(self, where: Condition) -> Condition | None:
        def distance(other: Condition) -> tuple[bool, int]:
            return other[0] != where[0], sum(
                [abs(one - two) for one, two in zip(other[1:], where[1:], strict=True)]
            )

        return min(self._cells, key=distance, default=None)

    def _like(self, where: Condition) -> dict[int, _Cell]:
        """Return the cells of a new condition: those of the nearest one, soon outvoted by its own
        times.
        """
        near = self._nearest(where)
        known = self._cells[near] if near is not None else {}
        return {
            place: replace(cell, variance=cell.variance + _COPIED) for place, cell in known.items()
        }


def _place(rows: int) -> int:
    return rows if rows <= _EXACT else int(4 * log2(rows / _EXACT)) + _EXACT + 1


def _rising(cells: Sequence[_Cell]) -> Curve:
    """Fit times that never fall as rows rise: neighbours that do are averaged by how well they are
    known.
    """
    blocks: list[tuple[float, float, int]] = []  # mean of logs, weight, cells
    for cell in cells:
        mean = cell.log
        weight = 1 / cell.variance
        count = 1
        while blocks and blocks[-1][0] > mean:
            before, heavy, more = blocks.pop()
            mean = (mean * weight + before * heavy) / (weight + heavy)
            weight = weight + heavy
            count = count + more
        blocks.append((mean, weight, count))
    means = [exp(mean) for mean, _, count in blocks for _ in range(count)]
    return Curve(np.array([cell.rows for cell in cells]), np.array(means))


Outcome = tuple[int, int, int]  # sequence, tokens proposed, tokens that were accepted

_PRIOR = 0.7  # a place of which nothing is known yet
_POOL_DECAY = 0.99
_OWN_DECAY = 0.97  # a round; the accepted share changes within a text
_POOL_WEIGHT = 2.0
_OWN_WEIGHT = 8.0  # weight, in tests, of the value that a place's share is shrunk to
_MOST_WAITING = 1024  # rounds


class Survival:
    """Count by position the rounds that tested it and those in which its token was accepted.

    A position behind a rejected token was never tested, so it counts neither way: accepted over proposed
    would be biased.
    """

    def __init__(self, most: int) -> None:
        self._places = np.arange(most)
        self._none = np.zeros((2, most))
        self._pool = self._none
        self._own: dict[int, NDArray[np.float64]] = {}
        # rounds that wait to be counted: together they cost hardly more than one
        self._new: list[Outcome] = []

    def add(self, rounds: Sequence[Outcome]) -> None:
        """Learn from one round each of some sequences."""
        self._new += rounds
        if len(self._new) > _MOST_WAITING:
            self._count()

    def acceptance(self, keys: Sequence[int]) -> NDArray[np.float64]:
        """Estimate how likely each place is accepted with all before it: [sequences, places]."""
        self._count()
        rates = list[float]()
        rate = _PRIOR
        for tested, accepted in self._pool.T.tolist():
            rate = (accepted + _POOL_WEIGHT * rate) / (tested + _POOL_WEIGHT)
            rates.append(rate)
        own = np.array([self._own.get(key, self._none) for key in keys])
        acceptance: NDArray[np.float64] = (own[:, 1] + _OWN_WEIGHT * np.array(rates)) / (
            own[:, 0] + _OWN_WEIGHT
        )
        return acceptance.cumprod(axis=1)

    def count(self, tested: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from counts by place that somebody else kept."""
        added = np.array([tested, accepted], dtype=np.float64)
        self._pool = self._pool + np.pad(added, ((0, 0), (0, len(self._places) - len(tested))))

    def keep(self, keys: Sequence[int]) -> None:
        """Forget the other sequences, once they are many; the pool has learnt from them."""
        if len(self._own) > 64 + 2 * len(keys):
            self._own = {key: self._own[key] for key in keys if key in self._own}

    def fade(self, most: float) -> None:
        """Let old observations of a place weigh no more than so many tests."""
        self._count()
        self._pool = self._pool * most / np.maximum(self._pool[0], most)
        self._own = {}

    def _count(self) -> None:
        if not self._new:
            return
        rounds = self._new
        self._new = []
        keys, proposed, accepted = np.array(rounds, dtype=np.int64).T
        reached = np.minimum(accepted + 1, proposed)
        seen = np.stack([self._places < count[:, None] for count in (reached, accepted)], 1).astype(
            np.float64
        )
        counts = dict[int, int]()
        later = [0] * len(rounds)  # rounds of the same sequence
        for at in range(len(rounds) - 1, -1, -1):
            later[at] = counts.get(rounds[at][0], 0)
            counts[rounds[at][0]] = later[at] + 1
        own = np.where(keys == np.array([*counts])[:, None], _OWN_DECAY ** np.array(later), 0.0)
        pool = _POOL_DECAY ** np.arange(len(rounds) - 1, -1, -1)
        added = (np.vstack([pool, own]) @ seen.reshape(len(rounds), -1)).reshape(
            -1, *self._none.shape
        )
        self._pool = self._pool * _POOL_DECAY ** len(rounds) + added[0]
        for new, (key, count) in zip(added[1:], counts.items(), strict=True):
            self._own[key] = self._own.get(key, self._none) * _OWN_DECAY**count + new
