"""Tests of proposal lengths chosen by goodput, on a simulated machine with a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from atts.accel.speculate.goodput import (
    GoodputControl,
    Outcome,
    StepCosts,
    StepShape,
    Survival,
    condition,
)

Table = Callable[[int], float]
MOST = 16


class Machine:
    """A simulated machine: proposed tokens are accepted independently, and step times are noisy."""

    ends = 0.01
    # `ends` is the share of sequences that are replaced per step; `catching_up` is the time in
    # seconds for a sequence's first proposal
    catching_up = 0.0

    def __init__(
        self, table: Table, per_token: float, seed: int = 0, noise: float = 0.03, once: float = 0.0
    ) -> None:
        """Simulate a machine on which each proposed token takes `per_token` seconds, and each step
        with proposals takes `once` seconds more.
        """
        self.control = GoodputControl(MOST)
        self._known = set[int]()
        self.begun = 0  # sequences that got their first proposal in the last step
        self._table = table
        self._noise = noise
        self._proposing: Table = lambda tokens: per_token * tokens + once * (tokens > 0)
        self._random = np.random.default_rng(seed)
        self._new = count(1)
        self._keys: list[int] = []
        # predicted and simulated seconds of the steps that have a prediction
        self.expected = self.came = 0.0
        # seconds that the same tokens would take without proposals, and the reported seconds that
        # proposals save
        self.plain = self.saved = 0.0
        self.looked: list[int] = []  # number of steps that each measured step represents

    def steps(
        self, number: int, sequences: int, acceptance: float, others: int = 0
    ) -> Iterator[list[int]]:
        """Yield the proposal lengths of each step; sometimes a sequence ends and another replaces
        it.
        """
        for _ in range(number):
            self._keys = [key for key in self._keys if self._random.random() > self.ends][
                :sequences
            ]
            self._keys += [next(self._new) for _ in range(sequences - len(self._keys))]
            shape = StepShape(self._keys, others, 200.0)
            if self.control.rests(sequences):
                self.begun = 0
                yield [0] * sequences
                continue
            lengths = self.control.choose(shape)
            assert len(lengths) == sequences
            assert all(0 <= length <= MOST for length in lengths)
            self._learn(shape, lengths, acceptance)
            yield lengths

    def _learn(self, shape: StepShape, lengths: list[int], acceptance: float) -> None:
        falls = self._random.geometric(1 - acceptance, len(lengths)) - 1
        rounds = [
            (key, length, min(length, int(fall)))
            for key, length, fall in zip(shape.keys, lengths, falls, strict=True)
            if length
        ]
        rows = shape.rows + sum(lengths)
        slow = 1 + self._noise * self._random.exponential(size=2)
        self.begun = self._begin(rounds)
        proposing = self._proposing(sum(lengths)) + self.catching_up * self.begun
        seconds = proposing * slow[0], self._table(rows) * slow[1]
        forecast = self.control.observed(
            shape, rounds, rows, (float(seconds[0]), float(seconds[1]))
        )
        if forecast is not None:
            self.looked.append(forecast.steps)
            self.expected = self.expected + forecast.seconds
            self.came = self.came + float(sum(seconds))
            steps = (len(lengths) + sum(accepted for *_, accepted in rounds)) / len(lengths)
            self.plain += steps * self._table(len(lengths)) * (1 + self._noise)
            self.saved += steps * forecast.plain - float(sum(seconds))

    def _begin(self, rounds: Sequence[Outcome]) -> int:
        """Count the sequences that are new to the drafter, and mark them as seen."""
        keys = {key for key, _, _ in rounds}
        new = len(keys - self._known)
        self._known = self._known | keys
        return new

    def goodput(self, lengths: list[int], acceptance: float) -> tuple[float, float]:
        """Return the expected tokens and seconds of a step, without noise."""
        tokens = sum((1 - acceptance ** (length + 1)) / (1 - acceptance) for length in lengths)
        return tokens, self._table(len(lengths) + sum(lengths)) + self._proposing(sum(lengths))

    def rate(self, number: int, sequences: int, acceptance: float) -> float:
        """Return the expected tokens per second over this many steps."""
        each = [
            self.goodput(lengths, acceptance)
            for lengths in self.steps(number, sequences, acceptance)
        ]
        return sum(tokens for tokens, _ in each) / sum(seconds for _, seconds in each)

    def fixed(self, length: int, sequences: int, acceptance: float) -> float:
        """Return the expected tokens per second if every sequence gets proposals of one fixed
        length.
        """
        tokens, seconds = self.goodput([length] * sequences, acceptance)
        return tokens / seconds


def straight(start: float, slope: float) -> Table:
    """Return step times, in seconds, that rise linearly with the number of tokens in the step."""
    return lambda rows: start + slope * rows


def random_table(seed: int, most: int) -> Table:
    """Make random step times that rise, with jumps, with the number of tokens in a step; the slope
    changes at each doubling of this number.
    """
    random = np.random.default_rng(seed)
    slopes = random.exponential(0.4, 16) ** 2
    rises: NDArray[np.float64] = slopes[np.log2(np.arange(1, most + 1)).astype(int)]
    rises = rises + (random.random(most) < 0.03) * random.exponential(2.0, most)
    rises[0] += random.exponential(4.0) + 1
    times = np.cumsum(rises)
    return lambda rows: float(times[rows - 1]) / 1000


@pytest.mark.parametrize("sequences", [1, 4, 16])
def test_chosen_lengths_are_near_the_best_on_random_step_times(
    sequences: int,
) -> None:
    """On random step times, chosen lengths reach at least 0.97 of the goodput of plain decoding.

    They also reach 0.97 of the goodput of the best fixed length, unless this length gains less than
    6 % over plain decoding.
    """
    best_lengths = set[int]()
    for seed in range(6):
        random = np.random.default_rng((sequences, seed))
        acceptance = float(random.choice([0.1, 0.4, 0.6, 0.8, 0.95]))
        machine = Machine(
            random_table(seed, sequences * (MOST + 1)), float(random.exponential(5e-5)), seed
        )
        machine.rate(2000, sequences, acceptance)
        reached = machine.rate(400, sequences, acceptance)
        fixed = [machine.fixed(length, sequences, acceptance) for length in range(MOST + 1)]
        best_lengths.add(int(np.argmax(fixed)))
        assert reached >= 0.97 * max(fixed) or max(fixed) < 1.06 * fixed[0], (
            seed,
            acceptance,
            int(np.argmax(fixed)),
            reached / max(fixed),
        )
        assert reached >= 0.97 * fixed[0]
    assert len(best_lengths) > 1


def test_a_drafter_with_a_high_fixed_cost_gets_long_requests() -> None:
    """The engine asks a drafter with a high fixed cost for long proposals.

    The cost of proposing one token does not predict the cost of eight, so both are learned.
    """
    machine = Machine(straight(1e-3, 2e-5), 2e-5, once=1e-3)
    machine.rate(400, 2, 0.9)
    fixed = [machine.fixed(length, 2, 0.9) for length in range(MOST + 1)]
    assert fixed[1] < fixed[0] < max(fixed)
    assert machine.rate(400, 2, 0.9) >= 0.97 * max(fixed)


@pytest.mark.parametrize(
    ("sequences", "start", "ends", "catching_up", "least"),
    [
        (16, 4e-3, 0.03, 1e-3, 1.6),
        (16, 2e-3, 0.08, 5e-4, 1.15),
        (64, 2e-3, 0.03, 1e-3, 0.96),
        (64, 1e-3, 0.03, 5e-4, 0.96),
    ],
)
def test_the_cost_of_new_texts_is_included(
    sequences: int, start: float, ends: float, catching_up: float, least: float
) -> None:
    """A drafter must read each new text before it proposes. The engine counts this time, and
    proposes little unless long proposals save more time.
    """
    machine = Machine(straight(start, 1.4e-4), 2e-5)
    machine.ends = ends
    machine.catching_up = catching_up
    machine.rate(300, sequences, 0.95)
    tokens = 0.0
    seconds = 0.0
    for lengths in machine.steps(400, sequences, 0.95):
        each = machine.goodput(lengths, 0.95)
        tokens = tokens + each[0]
        seconds = seconds + each[1] + catching_up * machine.begun
    assert tokens / seconds >= least * machine.fixed(0, sequences, 0.95)


@pytest.mark.parametrize("acceptance", [0.1, 0.9])
def test_repeated_decisions_are_made_less_often(
    acceptance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After many steps, fewer than 30 of 640 steps choose new proposal lengths, and a proposer that
    does not pay is hardly ever tried.
    """
    decide = GoodputControl._decide  # pyright: ignore[reportPrivateUsage]
    made = list[int]()

    def counted(control: GoodputControl, *seen: Any) -> None:
        made.append(1)
        decide(control, *seen)

    monkeypatch.setattr(GoodputControl, "_decide", counted)
    machine = Machine(straight(1e-3, 4e-4), 1e-4)
    list(machine.steps(600, 1, acceptance))
    made.clear()
    asked = [sum(lengths) > 0 for lengths in machine.steps(640, 1, acceptance)]
    assert len(made) < 30
    assert sum(asked) < 30 or acceptance > 0.5


def mean(lengths: list[list[int]]) -> float:
    """Return the mean proposal length over all steps and sequences."""
    return float(np.mean(lengths))


@pytest.mark.parametrize("sequences", [1, 8])
def test_speculation_turns_off_and_on_with_acceptance(sequences: int) -> None:
    """If acceptance falls to 0.2, speculation is off within 200 steps; if it rises again to 0.9,
    speculation is on within 1,500 steps.

    A proposed token costs a third of a step.
    """
    machine = Machine(straight(1e-3, 3e-4 / sequences), 3e-4 / sequences)
    assert mean(list(machine.steps(400, sequences, 0.9))[-100:]) > 0.8
    # the mean length is not 0, because proposals of four tokens are tried twice more
    assert mean(list(machine.steps(300, sequences, 0.2))[200:]) < 0.33
    assert mean(list(machine.steps(1600, sequences, 0.9))[-100:]) > 0.8


def test_less_is_proposed_with_more_sequences() -> None:
    """With few sequences, proposed tokens add hardly any time to a step. With many sequences they
    add much time, so less is proposed.
    """
    machine = Machine(lambda rows: 1e-3 * max(1.0, rows / 12), 2e-5)
    found = [
        mean(list(machine.steps(500, sequences, 0.8))[-200:]) for sequences in (1, 2, 4, 8, 32)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > 3
    assert found[-1] < 0.25


def test_waiting_prompts_leave_no_room_for_unlikely_proposals() -> None:
    """In a step that also feeds a prompt, unlikely tokens are not proposed.

    Proposed tokens add no time to a step of few sequences, but they add time to a step with a
    prompt.
    """
    machine = Machine(lambda rows: 1e-3 * max(1.0, rows / 16), 1e-5)
    alone = mean(list(machine.steps(400, 2, 0.6))[-100:])
    beside = mean(list(machine.steps(400, 2, 0.6, others=64))[-100:])
    assert alone > 1.5
    assert beside < 0.3


def test_one_step_in_eight_is_measured_between_decisions() -> None:
    """Between decisions, only one step in eight is measured, and it represents all eight.

    Measuring takes a considerable part of a small model's step.
    """
    machine = Machine(lambda rows: 1e-3 + 1e-5 * rows, 1e-5)
    assert np.mean([any(lengths) for lengths in [*machine.steps(600, 4, 0.95)][-200:]]) > 0.9
    machine.looked.clear()
    steps = len([*machine.steps(400, 4, 0.95)])
    assert len(machine.looked) <= 0.25 * steps
    assert 0.95 * steps <= sum(machine.looked) <= steps + 8


def test_prompts_between_other_steps_change_no_lengths() -> None:
    """Feeding a prompt takes the same time with and without proposals, so only steps without
    prompts decide which length pays.
    """
    machine = Machine(lambda rows: 1e-3 + 1e-5 * rows, 1e-5)
    machine.ends = 0.0
    before = [*machine.steps(600, 4, 0.95)][-1]
    assert sum(before) >= 16
    mixed = list[int]()
    for _ in range(40):
        mixed += [sum(lengths) for lengths in machine.steps(1, 4, 0.95, others=60)]
        before = [*machine.steps(3, 4, 0.95)][-1]
    assert np.mean(mixed) >= 0.8 * sum(before)


def test_predicted_step_times_are_accurate() -> None:
    """The sum of the predicted step times is within 5 % of the sum of the simulated ones."""
    machine = Machine(straight(1e-3, 5e-5), 2e-5)
    list(machine.steps(600, 4, 0.8))
    assert machine.expected / machine.came == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("acceptance", [0.8, 0.3])
def test_the_reported_gain_is_the_real_one(acceptance: float) -> None:
    """The reported gain over decoding without proposals is near the real gain, although only a few
    steps without proposals are measured.
    """
    machine = Machine(straight(1e-3, 5e-5), 2e-5)
    list(machine.steps(2000, 2, acceptance))
    assert machine.saved == pytest.approx(machine.plain - machine.came, abs=0.05 * machine.plain)
    assert machine.saved > 0.3 * machine.plain or acceptance < 0.8


def test_acceptance_is_not_biased_by_untested_positions() -> None:
    """Positions after a rejection are not tested, and the estimated acceptance leaves them out.

    For proposals of five tokens, accepted tokens divided by proposed tokens would be 0.54 instead
    of 0.8.
    """
    survival = Survival(8)
    random = np.random.default_rng(1)
    for _ in range(400):
        survival.add([(1, 5, min(5, int(random.geometric(0.2)) - 1))])
    acceptance = survival.acceptance([1, 2])
    assert acceptance[:, :5] == pytest.approx(np.array([0.8 ** np.arange(1, 6)] * 2), abs=0.12)
    assert (np.diff(acceptance, axis=1) <= 0).all()
    for _ in range(60):
        survival.add([(1, 5, 0), (3, 5, 5)])
    one, other = survival.acceptance([1, 3])[:, 0]
    assert one < 0.3
    assert other > 0.8


def test_estimated_step_times_rise_with_the_number_of_rows() -> None:
    """Estimated step times never fall as the number of tokens in a step rises, between and beyond
    the measured numbers.

    One outlier changes little. Estimates for a new load start from those of the most similar load.
    """
    costs = StepCosts(wanders=False)
    where = condition(is_mixed=False, context=100, sequences=1)
    assert costs.curve(where) is None
    for rows, seconds in ((1, 1.0), (4, 2.0), (8, 1.8), (16, 4.0)):
        for each in (seconds, seconds, 50.0, *[seconds] * 20):
            costs.add(where, rows, each)
    curve = costs.curve(where)
    assert curve is not None
    found = curve.at(np.arange(1.0, 40.0))
    assert (np.diff(found) >= 0).all()
    assert found[[0, 7, 15]] == pytest.approx([1.0, 1.9, 4.0], rel=0.1)
    assert found[31] >= 6.5, "more rows must not be cheaper than the most that were measured"
    assert curve.least(np.array([3.0, 15.0])).tolist() == [found[0], found[7]]
    longer = condition(is_mixed=False, context=5000, sequences=1)
    costs.add(longer, 1, 3.0)
    near = costs.curve(longer)
    assert near is not None
    assert near.at(np.array([16.0]))[0] == found[15]


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_period_does_not_distort_the_costs_of_sizes(seed: int) -> None:
    """The estimated cost ratio of large and small steps is near the true one, although the machine
    is slow during large steps.

    The ratio of the median times would be nearly twice the true ratio.
    """
    random = np.random.default_rng(seed)
    costs = StepCosts()
    where = condition(is_mixed=False, context=100, sequences=1)
    times = {1: list[float](), 9: list[float]()}
    for _ in range(8):
        for slowness, sizes in ((1.0, [1] * 60), (2.0, [1] * 5 + [9] * 60 + [1] * 5)):
            for rows in sizes:
                times[rows].append(
                    {1: 1.0, 9: 3.0}[rows] * slowness * (1 + 0.2 * random.exponential())
                )
                costs.add(where, rows, times[rows][-1])
    curve = costs.curve(where)
    assert curve is not None
    assert 2.8 < curve.one(9) / curve.one(1) < 4.2
    assert np.median(times[9]) / np.median(times[1]) > 5.0
