"""The choice among schemes: the fastest gets nearly all steps, a change is noticed, and loads are told apart."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from atts.speculation import SchemeControl

Rates = Callable[[int], Sequence[float]]


def used(control: SchemeControl, rates: Rates, steps: int, sequences: int = 1, seed: int = 1) -> Counter[int]:
    """How many steps each scheme gets, where step times scatter by a fifth."""
    draw, found = random.Random(seed), Counter[int]()
    for step in range(steps):
        found[control.current] += 1
        rate = rates(step)[control.current]
        control.observed(sequences, 3, 3 / rate * draw.uniform(0.8, 1.2))
    return found


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_fastest_scheme_gets_nearly_all_steps(best: int) -> None:
    """Whichever it is, of rates a tenth apart."""
    control = SchemeControl(3)
    found = used(control, lambda step: [1.1 if scheme == best else 1.0 for scheme in range(3)], 6000)
    assert found[best] >= 0.9 * 6000
    assert min(found[scheme] for scheme in range(3)) >= 16, "each is tried"


@pytest.mark.parametrize("slow", [0.2, 0.6, 0.9])
def test_tries_lose_little(slow: float) -> None:
    """Of what the fastest would have written in the same time, 3 % at most; where others are far behind too."""
    control, draw, tokens, seconds = SchemeControl(3), random.Random(1), 0.0, 0.0
    for _ in range(6000):
        step = 1 / (1.0 if control.current == 0 else slow) * draw.uniform(0.9, 1.1)
        control.observed(4, 3, step)
        tokens, seconds = tokens + 1, seconds + step
    assert tokens / seconds >= 0.97


def test_a_change_is_noticed() -> None:
    """The text becomes another one: within some turns the other scheme is used."""
    control = SchemeControl(2)
    used(control, lambda step: (2.0, 1.0), 3000)
    assert used(control, lambda step: (1.0, 2.0), 6000, seed=2)[1] >= 4000


def test_loads_are_told_apart() -> None:
    """What is best for one sequence need not be for sixteen."""
    control = SchemeControl(2)
    used(control, lambda step: (1.0, 2.0), 1000, sequences=1)
    assert used(control, lambda step: (2.0, 1.0), 2000, sequences=16)[0] >= 1700
    assert used(control, lambda step: (1.0, 2.0), 2000, sequences=1)[1] >= 1800


def test_a_load_that_goes_to_and_fro_is_one_load() -> None:
    """Seven sequences, then eight, then seven: every scheme is tried, and the fastest one used."""
    control, found = SchemeControl(2), Counter[int]()
    for step in range(2000):
        found[control.current] += 1
        control.observed(7 + step % 2, 3, 3 / (1.0, 2.0)[control.current])
    assert found[1] >= 1600


def test_one_scheme_is_always_used() -> None:
    """There is nothing to try."""
    assert used(SchemeControl(1), lambda step: (1.0,), 200) == Counter({0: 200})
