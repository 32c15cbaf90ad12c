"""Tests of the choice among drafting schemes: the fastest is used, and changes are noticed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from atts.accel.overlap.schemes import SchemeControl

Rates = Callable[[int], Sequence[float]]


def expected_tokens(accepted: float, proposed: int) -> float:
    """Return the expected tokens of one step: the accepted ones, and the one after them."""
    return sum(accepted**place for place in range(proposed + 1))


def used(
    control: SchemeControl, rates: Rates, steps: int, sequences: int = 1, seed: int = 1
) -> Counter[int]:
    """Return how often each scheme is used if step times vary by up to a fifth."""
    draw = random.Random(seed)
    found = Counter[int]()
    for step in range(steps):
        found[control.current] += 1
        rate = rates(step)[control.current]
        control.observed((sequences, sequences), 3, 3 / rate * draw.uniform(0.8, 1.2))
    return found


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_fastest_scheme_gets_nearly_all_steps(best: int) -> None:
    """If one scheme is 10 % faster than the others, it gets nearly all steps, whichever it is."""
    control = SchemeControl(3)
    found = used(
        control, lambda step: [1.1 if scheme == best else 1.0 for scheme in range(3)], 6000
    )
    assert found[best] >= 0.9 * 6000
    assert min(found[scheme] for scheme in range(3)) >= 16, "each scheme must be tried"


@pytest.mark.parametrize("slow", [0.2, 0.6, 0.9])
def test_trials_of_schemes_lose_little(slow: float) -> None:
    """Trials lose at most 3 % of the tokens that the fastest scheme would have written."""
    control = SchemeControl(3)
    draw = random.Random(1)
    tokens = 0.0
    seconds = 0.0
    for _ in range(6000):
        step = 1 / (1.0 if control.current == 0 else slow) * draw.uniform(0.9, 1.1)
        control.observed((4, 4), 3, step)
        tokens = tokens + 1
        seconds = seconds + step
    assert tokens / seconds >= 0.97


def test_a_change_of_the_fastest_scheme_is_noticed() -> None:
    """If another scheme becomes the fastest, it is used for most of the later steps."""
    control = SchemeControl(2)
    used(control, lambda step: (2.0, 1.0), 3000)
    assert used(control, lambda step: (1.0, 2.0), 6000, seed=2)[1] >= 4000


def test_each_load_has_its_own_best_scheme() -> None:
    """The best scheme is learned separately for one sequence and for sixteen sequences."""
    control = SchemeControl(2)
    used(control, lambda step: (1.0, 2.0), 1000, sequences=1)
    assert used(control, lambda step: (2.0, 1.0), 2000, sequences=16)[0] >= 1700
    assert used(control, lambda step: (1.0, 2.0), 2000, sequences=1)[1] >= 1800


def test_nearly_equal_loads_are_one_load() -> None:
    """Seven and eight sequences count as one load: every scheme is tried, and the fastest is used."""
    control = SchemeControl(2)
    found = Counter[int]()
    for step in range(2000):
        found[control.current] += 1
        control.observed((7 + step % 2, 7), 3, 3 / (1.0, 2.0)[control.current])
    assert found[1] >= 1600


def test_a_single_scheme_is_always_used() -> None:
    """A single scheme is used without trials, because there is nothing to choose."""
    assert used(SchemeControl(1), lambda step: (1.0,), 200) == Counter({0: 200})


@dataclass(frozen=True)
class Machine:
    """A simulated sequence whose tokens are accepted independently.

    For each scheme, `guessed` has the probability that its proposal is ready, `lengths` the
    proposal's length, and `seconds` the time of a step. The first scheme always has a proposal, and
    the others only after a correct guess. The last scheme uses the target's early exit.
    """

    accepted: float
    guessed: Sequence[float]
    lengths: Sequence[int]
    seconds: Sequence[float]

    def best(self) -> int:
        """Return the scheme with the most expected tokens per second."""
        own = [expected_tokens(self.accepted, length) for length in self.lengths]
        rates = [
            (1 + hit * (each - 1)) / time
            for hit, each, time in zip(self.guessed, own, self.seconds, strict=True)
        ]
        return rates.index(max(rates))

    def run(self, steps: int, seed: int = 1) -> tuple[Counter[int], float]:
        """Count the steps of each scheme, and return the tokens per second relative to the best
        scheme.
        """
        draw = random.Random(seed)
        control = SchemeControl(4, has_oracle=True)
        found = Counter[int]()
        tokens = 0
        seconds = 0.0
        best = self.best()
        for _ in range(steps):
            scheme = control.current
            found[scheme] += 1
            is_served = draw.random() < self.guessed[scheme]
            written = 1
            while is_served and written <= self.lengths[scheme] and draw.random() < self.accepted:
                written += 1
            spent = self.seconds[scheme] * draw.uniform(0.9, 1.1)
            control.observed((1, int(is_served)), written, spent)
            tokens = tokens + written
            seconds = seconds + spent
        whole = 1 + self.guessed[best] * (expected_tokens(self.accepted, self.lengths[best]) - 1)
        return found, tokens / seconds / (whole / self.seconds[best])


def test_a_useful_early_exit_is_found() -> None:
    """With a draft that is often wrong and runs on its own device, the scheme Mirror is the fastest
    and gets nearly all steps.
    """
    machine = Machine(0.8, (1.0, 0.33, 0.67, 0.95), (4, 5, 5, 5), (1.8, 1.0, 1.1, 1.15))
    assert machine.best() == 3
    found, regret = machine.run(8000)
    assert found[3] >= 0.9 * 8000
    assert regret >= 0.96


def test_an_early_exit_that_cannot_pay_is_not_tried() -> None:
    """With a cheap and accurate draft, drafting before each step is the fastest scheme, and the
    scheme with the early exit is not tried.
    """
    machine = Machine(0.98, (1.0, 0.9, 0.95, 0.99), (8, 8, 8, 8), (1.3, 1.8, 2.5, 1.6))
    assert machine.best() == 0
    found, regret = machine.run(8000)
    assert found[3] == 0
    assert regret >= 0.97


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("slow", [1.8, 4.0])
def test_a_slow_early_exit_is_dropped(slow: float, seed: int) -> None:
    """The early exit would pay at the usual step time of its scheme, but its steps are slower, so
    it is used in few steps.
    """
    machine = Machine(0.8, (1.0, 0.33, 0.67, 0.95), (4, 5, 5, 5), (1.8, 1.0, 1.1, 1.15 * slow))
    assert machine.best() == 2
    found, regret = machine.run(8000, seed)
    assert 8 <= found[3] <= 0.04 * 8000
    assert found[2] >= 0.9 * 8000
    assert regret >= 0.96
