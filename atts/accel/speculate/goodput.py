"""A rule that chooses how many tokens to propose by goodput, the expected tokens per second.

The first part of the module estimates two things that goodput depends on: how many proposed tokens
will be accepted, and how long steps take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, log, log2, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atts.local.batch import StepPlan
from atts.local.seams import Forecast, Lengths, SpeculationRound

# The speed of a shared machine changes within seconds. So the logarithm of a step's time is
# modelled as a sum of two parts: the machine's slowness at that moment, and the cost of the step's
# number of tokens. Only the slowness changes with time. Consecutive steps have different numbers of
# tokens, so a Kalman filter can separate the two parts. The filter also estimates the variance of
# each part, and gives outliers little weight.


Floats = NDArray[np.float64]
# The condition under which a step's time is stored. Its first part is whether the step also
# computes other tokens, such as prompts. The other parts are the size class of the number of
# sequences and the class of their mean length.
Condition = tuple[int, ...]

_UNSEEN_VARIANCE = 1.0
# A step time that is copied from another condition is less certain than a measured one. So this
# number is added to the variance of its logarithm.
_COPIED = 0.04
# An estimated step time counts as measured if the variance of its logarithm is below this.
_ENOUGH = 0.12
# For each step since a step time was last measured, this number is added to the variance of its
# logarithm.
_AGEING = 0.00002
_STEP = 0.04
# learning rate for the variance of the logarithm of one step's time; the estimate of this variance
# begins at `_STEP`
_LEARNING = 1 / 32
# In each step, the variance of the machine's slowness grows by this share of the variance of the
# logarithm of one step's time.
_WANDERING = 0.05
# If a step's log time is further from its expected value than this number of standard deviations,
# it is treated as if at this distance.
_OUTLYING = 2.5
# A step time was measured only a few times if its variance is above this share of the variance of
# one step (both of logarithms).
_YOUNG = 0.25
_STALE = 8  # number of new measurements after which a curve of step times is fitted again
# Up to this number of rows (tokens per step), step times are stored separately for each number.
# Above it, similar numbers share a cell of the table: there are four cells between a number and its
# double.
_EXACT = 16


def size_class(sequences: int) -> int:
    """Return the size class of a number of sequences.

    Each class contains a power of two and the numbers around it.
    """
    return (3 * sequences // 2).bit_length()


def condition(*, is_mixed: bool, context: float, sequences: int) -> Condition:
    """Return the condition of a step: the key under which its step time is stored.

    Steps with similar context lengths (a factor of less than four) may have the same condition.
    """
    return is_mixed, size_class(sequences), int(context).bit_length() // 2


@dataclass(frozen=True, slots=True)
class Curve:
    """Estimated step times, sorted by number of rows (tokens in a step)."""

    rows: Floats
    seconds: Floats
    _known: dict[int, float] = field(default_factory=dict[int, float])

    def one(self, rows: int) -> float:
        """Return the time in seconds of a step with this number of rows."""
        if rows not in self._known:
            self._known[rows] = float(self.at(np.array([float(rows)]))[0])
        return self._known[rows]

    def at(self, rows: Floats) -> Floats:
        """Return the times in seconds of steps with these numbers of rows.

        Times are interpolated between the measured numbers of rows, and extrapolated beyond them.
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
        """Return a lower bound on the time in seconds of each step with these numbers of rows.

        The bound is the time of the largest measured step with at most as many rows, or 0 if there
        is none.
        """
        places = np.searchsorted(self.rows, rows, side="right") - 1
        return np.where(places < 0, 0.0, self.seconds[places]).astype(np.float64)


@dataclass(slots=True)
class _Cell:
    rows: float
    log: float  # logarithm of the estimated step time in seconds
    variance: float  # variance of the estimate `log`
    seen: int  # number of steps added to the whole table when this cell was last measured


class StepCosts:
    """A table of measured step times, by condition and number of rows."""

    def __init__(self, *, wanders: bool = True) -> None:
        """Create an empty table of step times.

        If `wanders` is false, the machine's speed is assumed to be constant. Otherwise the table
        also tracks how the speed changes.
        """
        self._cells: dict[Condition, dict[int, _Cell]] = {}
        self._curves: dict[Condition, Curve] = {}
        self._since: dict[Condition, int] = {}
        self._added = 0
        self._wandering = _WANDERING if wanders else 0.0
        self._of_machine = 0.0  # variance of the estimated log of the machine's slowness
        self._of_step = _STEP  # variance of the logarithm of one step's time
        # logarithm of the machine's slowness, relative to the step times in the table
        self._machine = 0.0

    @property
    def slowness(self) -> float:
        """Return how much slower the machine is now than the times in the table say. The result is
        a ratio of times: 2 means that steps take twice as long.
        """
        return exp(self._machine)

    def add(self, where: Condition, rows: int, seconds: float) -> None:
        """Update the table with the measured time of one step."""
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
        """Count steps that were not timed, because the weight of a measured time falls with each
        later step.
        """
        self._added += steps
        self._of_machine = min(1.0, self._of_machine + self._wandering * self._of_step * steps)

    def _begun(self, where: Condition, rows: int, seconds: float) -> _Cell:
        curve = self.curve(where) if self._cells[where] else None
        expected = log(seconds) - self._machine if curve is None else log(curve.one(rows))
        return _Cell(rows, expected, _UNSEEN_VARIANCE, self._added)

    def _update(self, cell: _Cell, rows: int, observed: float) -> None:
        self._of_machine += self._wandering * self._of_step
        cell.variance = min(_UNSEEN_VARIANCE, cell.variance + _AGEING * (self._added - cell.seen))
        variance = self._of_machine + cell.variance + self._of_step
        most = _OUTLYING * sqrt(variance)
        off = observed - self._machine - cell.log
        # This step was much faster than expected, and only a few steps were measured before. So the
        # earlier steps were probably interrupted, and the estimate is lowered.
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
        """Return whether steps with this number of rows were timed often and recently enough for a
        reliable estimate.
        """
        return self._variance(where, rows) < _ENOUGH

    def doubt(self, where: Condition, rows: int) -> float:
        """Return the standard deviation of the logarithm of a step's estimated time."""
        return sqrt(self._variance(where, rows))

    def _variance(self, where: Condition, rows: int) -> float:
        cell = self._cells.get(where, {}).get(_place(rows))
        return (
            _UNSEEN_VARIANCE
            if cell is None
            else min(_UNSEEN_VARIANCE, cell.variance + _AGEING * (self._added - cell.seen))
        )

    def curve(self, where: Condition) -> Curve | None:
        """Return the curve of step times under this condition.

        If no step was timed under this condition, return the curve of the most similar condition.
        If no step was timed at all, return None.
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
        """Return first estimates of the step times under a new condition. They are copied from the
        most similar condition, with a larger variance.
        """
        near = self._nearest(where)
        known = self._cells[near] if near is not None else {}
        return {
            place: replace(cell, variance=cell.variance + _COPIED) for place, cell in known.items()
        }


def _place(rows: int) -> int:
    return rows if rows <= _EXACT else int(4 * log2(rows / _EXACT)) + _EXACT + 1


def _rising(cells: Sequence[_Cell]) -> Curve:
    """Fit a curve of step times that never falls when the number of rows grows.

    Where a step with more rows was measured as faster, neighbouring measurements are replaced by
    their mean, weighted by 1 / variance.
    """
    # one entry for each group of neighbouring cells that share a mean: the mean of their log times,
    # the sum of their weights, and the number of these cells
    blocks: list[tuple[float, float, int]] = []
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


# result of one proposal: sequence key, number of proposed tokens, number of accepted tokens
Outcome = tuple[int, int, int]

# assumed probability that the first proposed token is accepted, before any proposal was verified
_PRIOR = 0.7
_POOL_DECAY = 0.99
# After each proposal for a sequence, the sequence's older counts are multiplied by this factor,
# because the acceptance changes within a text.
_OWN_DECAY = 0.97
_POOL_WEIGHT = 2.0
# For each sequence, the acceptance over all sequences is the prior. It weighs as much as this
# number of tested tokens.
_OWN_WEIGHT = 8.0
# largest number of results of proposals that are stored before they are counted
_MOST_WAITING = 1024


class Survival:
    """Estimates the probability that a proposed token is accepted, for each position in a proposal.

    For each position, the class counts how often a token was tested there, and how often the token
    was accepted. Tokens after a rejected token are not tested, so they are not counted. If they
    were counted as rejected, the estimate would be too low.
    """

    def __init__(self, most: int) -> None:
        self._places = np.arange(most)
        self._none = np.zeros((2, most))
        self._pool = self._none
        self._own: dict[int, NDArray[np.float64]] = {}
        # Results of proposals that are not counted yet. Counting many results at once takes hardly
        # longer than counting one.
        self._new: list[Outcome] = []

    def add(self, rounds: Sequence[Outcome]) -> None:
        """Add the results of the proposals of one step."""
        self._new += rounds
        if len(self._new) > _MOST_WAITING:
            self._count()

    def acceptance(self, keys: Sequence[int]) -> NDArray[np.float64]:
        """Estimate the probability that a token and all earlier tokens of the proposal are
        accepted.

        The result has one row for each sequence in `keys`, and one column for each position.
        """
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
        """Add counts of tested and accepted tokens for each position of a proposal, for example
        counts from a server.

        Only the total counts over all sequences change, not the counts of single sequences.
        """
        added = np.array([tested, accepted], dtype=np.float64)
        self._pool = self._pool + np.pad(added, ((0, 0), (0, len(self._places) - len(tested))))

    def keep(self, keys: Sequence[int]) -> None:
        """Delete the counts of single sequences except those of `keys`, if there are too many of
        these counts. The total counts over all sequences stay the same.
        """
        if len(self._own) > 64 + 2 * len(keys):
            self._own = {key: self._own[key] for key in keys if key in self._own}

    def fade(self, most: float) -> None:
        """Give earlier observations less weight: scale the counts of each position down to at most
        `most` tested tokens, and delete the counts of single sequences.
        """
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
        # for each result, the number of later results of the same sequence
        later = [0] * len(rounds)
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


# The chosen proposal lengths change only if the expected goodput (tokens per second) rises by more
# than this share.
_MARGIN = 0.01
# The estimated time of a step with proposals is raised by this share, so that tiny expected gains
# do not count. It is `_DOUBT`, or `_DOUBT_OF_ONE` times the number of sequences if that is more.
_DOUBT = 0.02
_DOUBT_OF_ONE = 0.001
_SURPRISE_WEIGHT = 1 / 32
# For one step, log(measured / expected time) is limited to this absolute value, so that a single
# step has little weight.
_MOST_SURPRISE = 0.5
# Proposals stop only if the expected gain from stopping exceeds this number of standard deviations
# of the estimated step time.
_CAUTION = 0.3
# At the end of a rest, the mean of log(measured / expected time) is multiplied by this factor. A
# rest is a series of steps in which nothing is proposed or timed.
_FORGETTING = 0.8
# If no proposal was verified during a rest, earlier observations are no longer reliable. At each
# position, they then weigh at most as much as this number of tested tokens.
_FADED = 1.0
# Numbers of steps after which proposal lengths are chosen again. The first applies just after a
# change of the lengths. It doubles while they stay the same, up to the second.
_PERIODS = 16, 256
_LOOKS = 8  # number of steps that are all timed at the start of a run and after a rest
_EVERY = 8  # Outside trials, only one in this number of steps is timed.
# Some steps also compute other requests' tokens, such as prompts. Of consecutive steps of this
# kind, only one in this number is used to choose proposal lengths.
_MIXED = 32
# Proposals make a step longer. For a length that was never timed, an optimistic estimate assumes
# only this share of the extra time in the normal estimate.
_HOPE = 0.5
_PLAIN = 4  # number of timed steps of a trial in which nothing is proposed
# A trial in which nothing is proposed begins with this number of untimed steps. In them, the CPU
# caches fill with the target's weights.
_SETTLING = 8
_SHARE = 0.01  # Trials with proposals may cost this share of the run's time.
# The balance is the number of seconds that trials may still cost. A length in `_LENGTHS` may be
# tried while the balance is negative, down to the time of this number of steps without proposals.
_ADVANCE = 16
# The balance (seconds that trials may still cost) is saved up to the time of this number of steps
# without proposals.
_SAVED = 12
# A step that takes more than this number of times its expected time was probably interrupted. Only
# this number of times the expected time is counted.
_HICCUP = 2
_TRIED = 2  # number of timed steps of a trial that times one proposal length
_RESTS = 64, 4096  # number of steps of the first rest, and largest number of steps of any rest
# Proposal lengths that may be tried while the balance is slightly below 0 (see `_ADVANCE`). Other
# lengths are tried only while the balance is at least 0, and only near the mean of the chosen
# lengths.
_LENGTHS = 8, 4, 2, 1, 16
# While the acceptance is unknown, the first trial proposes this number of tokens, and only for a
# few sequences.
_FEW = 4
# Proposals stop when the time that they have cost exceeds the first share of the run's time. They
# may be tried again when it is below the second share.
_MOST_LOST = 0.02, 0.012
# Proposals do not stop while they have cost less than the time of this number of steps without
# proposals.
_GRACE = 64
_NEW = -1  # key that no sequence has; it stands for a new sequence, which has no observations


class StepShape(NamedTuple):
    """The size of a step before tokens are proposed."""

    keys: Sequence[int]  # keys of the sequences for which tokens may be proposed
    # number of tokens that the step computes for other requests: prompt tokens, and tokens of texts
    # to score
    others: int
    context: float  # mean length of the sequences in `keys`, in tokens

    @property
    def rows(self) -> int:
        """Return the number of tokens that the step computes if no tokens are proposed."""
        return len(self.keys) + self.others

    @property
    def condition(self) -> Condition:
        """Return the condition of this step, which selects a curve of step times."""
        return condition(is_mixed=self.others > 0, context=self.context, sequences=len(self.keys))

    @property
    def decoding_alone(self) -> Condition:
        """Return the condition of a step that computes the same sequences, but no prompt tokens and
        no texts to score.
        """
        return condition(is_mixed=False, context=self.context, sequences=len(self.keys))


@dataclass(slots=True)
class _Verdict:
    """The proposal lengths that are used in steps of one size class until lengths are chosen
    again.
    """

    until: int = 0  # number of the step at which lengths are chosen again
    period: int = _PERIODS[0]
    mean: float = 0.0  # mean of the chosen proposal lengths, in tokens per sequence
    rate: float = 0.0  # expected tokens per second with the chosen lengths
    keys: Sequence[int] = ()
    lengths: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class _Trial:
    """A trial: a few steps with another proposal length than the chosen one, whose times are
    measured.
    """

    length: int
    left: int  # number of timed steps that this trial still needs
    settling: int = 0  # number of untimed steps left, which come before the timed steps
    # keys of the sequences that get proposals; None means all sequences
    keys: frozenset[int] | None = None
    # seconds that the trial has cost so far, compared with steps without proposals
    lost: float = 0.0

    def lengths(self, keys: Sequence[int]) -> list[int]:
        return [self.length if self.keys is None or key in self.keys else 0 for key in keys]


@dataclass(slots=True)
class _Load:
    """The control's state for one size class: for all steps with a similar number of decoding
    sequences.
    """

    verdict: _Verdict = field(default_factory=_Verdict)
    steps: int = 0
    looks: int = _LOOKS  # number of coming steps that are all timed
    mixed: int = 0  # number of consecutive steps that also computed other requests' tokens
    trial: _Trial | None = None
    next_plain: int = 0  # number of the step at which the next trial without proposals may begin
    gap: int = _PERIODS[0]  # number of steps from one trial without proposals to the next
    # running mean of log(measured / expected seconds) of steps with proposals
    surprise: float = 0.0
    resting: int = 0  # number of steps until the current rest ends
    rested: int = 0
    rounds: int = 0  # total number of proposals verified when the last rest began
    rest: int = _RESTS[0]  # smallest number of steps of the next rest


class GoodputControl:
    """Chooses how many tokens (0 or more) to propose for each sequence, from measured times and
    acceptance.

    The tokens most likely to be accepted are proposed first. The control computes the goodput of
    every total number of proposed tokens, because goodput may have several maxima where step times
    jump. A choice takes long compared with a step of a small model. Therefore, it is used for
    several steps. While proposals slow the run down, the control rests: it proposes nothing and
    measures nothing.

    In a trial, the control times proposals of another length for a few steps. Trials may take only
    a small share of the run's time. A balance says how many seconds trials may still take.
    """

    def __init__(self, most: int, costs: StepCosts | None = None) -> None:
        """Create a control that proposes at most `most` tokens per sequence.

        `costs` may already contain measured step times.
        """
        self._most = most
        self._survival = Survival(most)
        self._costs = costs or StepCosts()
        self._proposing = StepCosts(wanders=False)
        self._loads: dict[int, _Load] = {}
        # for each sequence and each proposal length: the expected number of accepted tokens
        self._standing: dict[int, list[float]] = {}
        # `_wanted` has the keys of the sequences that get a proposal in this step, and `_asked`
        # those of the step before.
        self._wanted = self._asked = set[int]()
        self._total = 0  # number of tokens to propose in this step, summed over all sequences
        # number of tokens that the drafters really propose, divided by the requested number
        self._coverage = 1.0
        self._asks = 0
        self._rounds = 0  # number of proposals that were verified so far
        # True if the acceptance is unknown or out of date. The next trial then has proposals for
        # only a few sequences.
        self._is_stale = True
        self._balance = 0.0  # seconds that trials may still cost
        self._elapsed = 0.0  # total seconds of all steps of the run
        # Seconds and accepted tokens, summed over the steps since the last timed step;
        # `_has_proposed` is True if one of these steps had proposals.
        self._seconds = 0.0
        self._accepted = 0
        self._has_proposed = False
        self._longest = inf  # a step that takes more seconds than this was probably interrupted
        # Seconds that proposals cost in this run: the time of steps with proposals, less the time
        # that the same tokens would take without proposals.
        self._lost = 0.0
        self._is_stopped = False  # True while proposals are stopped because they cost too much time
        self._is_looking = False  # whether this step is timed
        self._unseen = 1  # number of steps since the last timed step, including the current step

    def rests(self, sequences: int) -> bool:
        """Return whether the control rests in this step: it neither proposes tokens nor measures
        times.

        If so, count the step as part of the rest.
        """
        load = self._loads.get(size_class(sequences))
        if load is None or load.resting == 0:
            return False
        load.resting -= 1
        return True

    def choose(self, step: StepShape) -> list[int]:
        """Return the number of tokens to propose, for each sequence."""
        count = len(step.keys)
        load = self._loads.setdefault(size_class(count), _Load())
        verdict = load.verdict
        load.steps += 1
        load.mixed = load.mixed + 1 if step.others else 0
        if load.trial is None:
            # Usually choose lengths in steps without other requests' tokens, because most steps are
            # of this kind.
            is_fit = load.mixed % _MIXED == 0 or not verdict.keys
            if load.rested:
                self._wake(load, step)
            elif is_fit and (load.steps >= verdict.until or self._is_stopped):
                self._decide(load, verdict, step)
            elif verdict.keys != step.keys:
                _hand_on(verdict, step.keys)
        self._is_looking = load.trial is not None or load.looks > 0 or load.steps % _EVERY == 0
        load.looks -= load.looks > 0
        if load.trial and load.trial.settling:
            load.trial.settling -= 1
            self._is_looking = False
        lengths = load.trial.lengths(step.keys) if load.trial else verdict.lengths
        self._total = sum(lengths)
        self._asked = self._wanted
        self._wanted = {key for key, length in zip(step.keys, lengths, strict=True) if length}
        return lengths

    def observed(
        self, step: StepShape, rounds: Sequence[Outcome], rows: int, seconds: tuple[float, float]
    ) -> Forecast | None:
        """Learn from a step that computed `rows` rows, and return what was forecast for the step.

        `seconds` has two times: that of proposing tokens and that of the step. Return None if the
        step was not timed, or if too little was known for a forecast.
        """
        self._survival.add(rounds)
        self._rounds += len(rounds)
        self._seconds += seconds[0] + min(seconds[1], self._longest)
        self._accepted += sum([accepted for _, _, accepted in rounds])
        self._has_proposed = self._has_proposed or self._total > 0
        if not self._is_looking:
            self._unseen += 1
            return None
        load = self._loads[size_class(len(step.keys))]
        forecast = self._forecast(step, rounds, rows)
        if forecast is not None:
            forecast = forecast._replace(is_trial=load.trial is not None, steps=self._unseen)
        # A step is steady if most of its sequences with a proposal also had one in the previous
        # step. In other steps, the drafter takes longer, because it must first read the tokens that
        # the target wrote alone.
        is_steady = 4 * len(self._wanted & self._asked) >= 3 * len(self._wanted)
        self._costs.rest(self._unseen - 1)
        self._costs.add(step.condition, rows, seconds[1])
        spent = sum(seconds) / self._costs.slowness
        plain = self._plain(step)
        self._learn(rounds, seconds[0] / self._costs.slowness, is_steady)
        self._account(step, plain * self._costs.slowness)
        curve = self._costs.curve(step.condition)
        if curve is not None:
            self._longest = _HICCUP * curve.one(rows) * self._costs.slowness
        earned = _SHARE * spent * self._unseen
        self._balance = max(self._balance, min(self._balance + earned, _SAVED * plain))
        self._unseen = 1
        if load.trial is not None:
            written = step.rows + sum([accepted for _, _, accepted in rounds])
            self._charge(
                load, load.trial, min(spent - plain * written / step.rows, _HICCUP * plain)
            )
        elif self._total and forecast is not None:
            surprise = max(
                -_MOST_SURPRISE, min(_MOST_SURPRISE, log(sum(seconds) / forecast.seconds))
            )
            load.surprise += _SURPRISE_WEIGHT * (surprise - load.surprise)
        return forecast

    def _account(self, step: StepShape, plain: float) -> None:
        """Update two times with the steps since the last timed step: the run's total time, and the
        time that proposals have cost, less the time that they saved.

        Both are computed from measured times, not from forecasts. So proposals that cost too much
        time are stopped even if the forecasts are wrong, for example because a drafter reads long
        prompts.
        """
        spent = self._seconds
        accepted = self._accepted
        self._seconds = 0.0
        self._accepted = 0
        self._elapsed += spent
        if not self._has_proposed:
            return
        self._has_proposed = False
        per_token = plain / max(1, len(step.keys))
        if step.others:
            curve = self._costs.curve(step.decoding_alone)
            per_token = curve.one(len(step.keys)) / len(step.keys) if curve else per_token
        self._lost += spent - plain * self._unseen - accepted * per_token
        self._is_stopped = self._lost > max(_MOST_LOST[0] * self._elapsed, _GRACE * plain)

    def _learn(self, rounds: Sequence[Outcome], seconds: float, is_steady: bool) -> None:
        if self._total:
            self._asks = min(16, self._asks + 1)
            self._coverage += (
                sum([proposed for _, proposed, _ in rounds]) / self._total - self._coverage
            ) / self._asks
            if is_steady:
                self._proposing.add(_among(len(self._wanted)), self._total, seconds)

    def _charge(self, load: _Load, trial: _Trial, lost: float) -> None:
        """Add the seconds that one step of a trial cost, and end the trial after its last step.

        When a trial with proposals ends, its cost is subtracted from the balance. A trial without
        proposals is free. After every trial, lengths are chosen again in the next step.
        """
        trial.lost = trial.lost + lost
        trial.left = trial.left - 1
        if not trial.left:
            self._balance -= max(0.0, trial.lost) if trial.length else 0.0
            load.trial = None
            load.verdict.until = load.steps

    def _rest(self, load: _Load, step: StepShape) -> None:
        """Start a rest: steps without proposals and without timing. The rest lasts until the
        balance of seconds for trials is at least 0 again.

        If proposals have cost too much time, it also lasts until this cost is only a small share of
        the run's time. The rest has at least `load.rest` and at most `_RESTS[1]` steps. For the
        next rest, `load.rest` is doubled, unless the acceptance is unknown.
        """
        due = -self._balance / _SHARE / self._plain(step)
        if self._is_stopped:
            # Rest until the time that proposals have cost is only the share `_MOST_LOST[1]` of the
            # run's time.
            missing = self._lost / _MOST_LOST[1] - self._elapsed
            due = max(due, missing / self._plain(step))
        load.resting = load.rested = int(max(load.rest, min(_RESTS[1], due)))
        load.rest = min(_RESTS[1], load.rest * (1 if self._is_stale else 2))
        load.rounds = self._rounds

    def _wake(self, load: _Load, step: StepShape) -> None:
        """End a rest (steps without proposals and timing), and time some steps without proposals
        before the next trial.
        """
        seconds = (load.rested - load.resting) * self._plain(step)
        self._elapsed += seconds * self._costs.slowness
        self._is_stopped = self._is_stopped and self._lost > _MOST_LOST[1] * self._elapsed
        self._balance += _SHARE * seconds
        self._costs.rest(load.rested - load.resting)
        self._proposing.rest(load.rested - load.resting)
        if load.rounds == self._rounds:
            self._survival.fade(_FADED)
            self._is_stale = True
        load.resting = 0
        load.rested = 0
        load.next_plain = 0
        load.gap = _PERIODS[0]
        load.surprise *= _FORGETTING
        load.looks = _LOOKS
        verdict = load.verdict
        verdict.keys = step.keys
        verdict.lengths = [0] * len(step.keys)
        verdict.until = load.steps + _LOOKS

    def _plain(self, step: StepShape) -> float:
        """Return the estimated time of this step in seconds if no tokens are proposed."""
        curve = self._costs.curve(step.condition)
        assert curve is not None, "at least one step must have been timed"
        return curve.one(step.rows)

    def _decide(self, load: _Load, verdict: _Verdict, step: StepShape) -> None:
        count = len(step.keys)
        self._survival.keep(step.keys)
        acceptance = self._survival.acceptance([*step.keys, _NEW])
        self._standing = dict(
            zip([*step.keys, _NEW], acceptance.cumsum(axis=1).tolist(), strict=True)
        )
        chances = acceptance[:-1].ravel()
        # A stable sort keeps each sequence's positions in order, because no position has a higher
        # probability than the one before it.
        order = np.argsort(-chances, kind="stable")
        tokens = step.rows + self._coverage * np.concatenate([[0.0], np.cumsum(chances[order])])
        before = round(verdict.mean * count)
        chosen, wanted = self._best_total(load, verdict, step, tokens)
        chosen = 0 if self._is_stale or self._is_stopped else chosen
        verdict.period = min(2 * verdict.period, _PERIODS[1]) if chosen == before else _PERIODS[0]
        verdict.until = load.steps + verdict.period
        verdict.mean = chosen / count
        verdict.keys = step.keys
        verdict.lengths = np.bincount(order[:chosen] // self._most, minlength=count).tolist()
        self._next(load, verdict, step, wanted)

    def _next(self, load: _Load, verdict: _Verdict, step: StepShape, wanted: int | None) -> None:
        """Begin a trial or a rest if one is due. This function is called each time after lengths
        were chosen.
        """
        if not verdict.rate:
            verdict.until = load.steps + _LOOKS
        elif self._is_stopped:
            self._rest(load, step)
        elif self._is_stale and self._balance >= 0:
            # Try the newest sequences, because their texts are the shortest, so the drafter reads
            # them fastest.
            newest = sorted(step.keys)[-(len(step.keys) // 8 + 1) :]
            load.trial = _Trial(min(_FEW, self._most), 4, keys=frozenset(newest))
            self._is_stale = False
        # Only a trial without proposals can show that proposals no longer save time.
        elif verdict.mean and load.steps >= load.next_plain:
            forgone = 1 - step.rows / (verdict.rate * self._plain(step))
            load.trial = _Trial(0, _PLAIN, _SETTLING)
            load.next_plain = load.steps + load.gap
            load.gap = min(2 * load.gap, max(64, int(150 * (_PLAIN + _SETTLING) * forgone)))
        elif (
            wanted is not None
            and not self._is_stale
            and self._balance > -_ADVANCE * self._plain(step)
        ):
            load.trial = _Trial(wanted, _TRIED)
        elif not verdict.mean:
            self._rest(load, step)

    def _best_total(
        self, load: _Load, verdict: _Verdict, step: StepShape, tokens: NDArray[np.float64]
    ) -> tuple[int, int | None]:
        """Choose the total number of tokens to propose in a step, and a proposal length to try.

        `tokens` has, for each possible total, the expected number of tokens that the step writes
        for all sequences together. The length to try was never timed, but may be faster according
        to an optimistic estimate. It is None if there is no such length.
        """
        curve = self._costs.curve(step.condition)
        proposing = self._proposing.curve(_among(len(step.keys)))
        if curve is None:
            return 0, None
        totals = np.arange(len(tokens), dtype=np.float64)
        fed = step.rows + self._coverage * totals
        seconds = curve.at(fed)
        lower = np.maximum(curve.least(fed), seconds[0] + _HOPE * (seconds - seconds[0]))
        # While no proposal was ever timed, the infinite time prevents proposals outside trials.
        if proposing is None:
            seconds[1:] = np.inf
        else:
            spent = proposing.at(totals[1:])
            seconds[1:] += spent
            lower[1:] += np.maximum(proposing.least(totals[1:]), _HOPE * spent)
        # Steps with proposals may take longer than estimated, for example because drafters must
        # read tokens that the target wrote alone. `load.surprise` is the mean of log(measured /
        # estimated time).
        seconds[1:] *= (1 + max(_DOUBT, _DOUBT_OF_ONE * len(step.keys))) * exp(
            max(0.0, load.surprise)
        )
        goodput = tokens / seconds
        best = int(goodput.argmax())
        current = min(round(verdict.mean * len(step.keys)), len(tokens) - 1)
        caution = (
            _CAUTION * self._costs.doubt(step.condition, step.rows) if current and not best else 0.0
        )
        if goodput[best] < (1 + _MARGIN) * exp(caution) * goodput[current]:
            best = current
        verdict.rate = float(goodput[best])
        near = (
            range(int(verdict.mean / 2) + 1, int(2 * verdict.mean) + 1)
            if self._balance >= 0
            else ()
        )
        lengths = [k for k in (*_LENGTHS, *near) if k <= self._most]
        return best, None if proposing is None else self._promising(
            step, lengths, tokens / lower / verdict.rate
        )

    def _promising(
        self, step: StepShape, lengths: Sequence[int], gains: NDArray[np.float64]
    ) -> int | None:
        """Return the untimed proposal length with the largest gain in speed according to an
        optimistic estimate.

        Only `lengths` are considered. Return None if none of them promises a gain.
        """
        count = len(step.keys)
        among = _among(len(step.keys))

        def is_measured(total: int) -> bool:
            rows = step.rows + round(self._coverage * total)
            return self._costs.is_measured(step.condition, rows) and self._proposing.is_measured(
                among, total
            )

        open_ones = [
            k for k in lengths if gains[k * count] > 1 + _MARGIN and not is_measured(k * count)
        ]
        return max(open_ones, key=lambda k: float(gains[k * count]), default=None)

    def _forecast(self, step: StepShape, rounds: Sequence[Outcome], rows: int) -> Forecast | None:
        """Estimate how many tokens a step writes and how long the step takes.

        Return None if similar steps were never timed.
        """
        curve = self._costs.curve(step.condition)
        tokens = float(step.rows)
        if curve is None:
            return None
        seconds = curve.one(rows)
        plain = 0.0 if step.others else curve.one(step.rows) * self._costs.slowness
        if self._total:
            proposing = self._proposing.curve(_among(len(self._wanted)))
            if proposing is None:
                return None
            seconds += proposing.one(self._total)
            unknown = self._standing.get(_NEW, [])
            tokens += sum(
                [self._standing.get(key, unknown)[proposed - 1] for key, proposed, _ in rounds]
            )
        return Forecast(tokens, seconds * self._costs.slowness, plain=plain)


def _among(sequences: int) -> Condition:
    """Return the key of the measured times that drafters need to propose tokens for this number of
    sequences.
    """
    return condition(is_mixed=False, context=0, sequences=sequences)


def _hand_on(verdict: _Verdict, keys: Sequence[int]) -> None:
    """Give the proposal lengths of ended sequences to new sequences.

    As a result, the total number of proposed tokens stays about the same.
    """
    lengths = dict(zip(verdict.keys, verdict.lengths, strict=True))
    kept = {key: lengths.pop(key) for key in keys if key in lengths}
    spare = sorted(lengths.values())
    usual = round(verdict.mean)
    verdict.keys = keys
    verdict.lengths = []
    for key in keys:
        if key in kept:
            length = kept[key]
        elif spare:
            length = spare.pop()
        else:
            length = usual
        verdict.lengths.append(length)


class GoodputLengths(Lengths):
    """A rule that chooses the proposal lengths of each step by goodput, with a `GoodputControl`."""

    def __init__(self, most: int) -> None:
        self._control = GoodputControl(most)
        self._shape = StepShape((), 0, 0.0)  # size of the last step for which lengths were chosen

    def rests(self, plan: StepPlan) -> bool:
        """Return whether nothing is proposed in this step, because proposals slow the run down."""
        return self._control.rests(len(plan.decoding))

    def choose(self, plan: StepPlan) -> Sequence[int]:
        """Choose how many tokens to propose for each sequence, so that the expected tokens per
        second are highest.
        """
        keys = [sequence.request_id for sequence in plan.decoding]
        others = sum([chunk.stop - chunk.start for chunk in plan.prefills])
        context = sum([sequence.num_computed for sequence in plan.decoding]) / len(plan.decoding)
        self._shape = StepShape(keys, others, context)
        return self._control.choose(self._shape)

    def observed(
        self, plan: StepPlan, rounds: Sequence[SpeculationRound], seconds: tuple[float, float]
    ) -> Forecast | None:
        """Update the estimates of acceptance and step time from a step. Return the step's forecast,
        if there is one.
        """
        outcomes = [(each.request_id, each.guessed, each.accepted) for each in rounds]
        rows = plan.num_rows + sum([chunk.stop - chunk.start for chunk in plan.prefills])
        forecast = self._control.observed(self._shape, outcomes, rows, seconds)
        return forecast._replace(tokens=forecast.tokens - self._shape.others) if forecast else None
