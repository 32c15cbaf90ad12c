"""Tests of the possible outcomes of a step, ranked by their value, and of the cache of their
continuations.
"""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atts.accel.overlap.drafter import OutcomeCache, PlaceLaw, most_worthwhile, ranked_outcomes

chance = st.floats(0.0, 1.0)


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], list[PlaceLaw]]:
    """Draw a proposal, and a distribution for each of its positions and for the next one."""
    proposal = draw(st.lists(st.integers(0, 5), max_size=5))
    places: list[PlaceLaw] = []
    for at in range(len(proposal) + 1):
        weights = draw(st.lists(st.integers(0, 20), min_size=6, max_size=6).filter(any))
        law = [weight / sum(weights) for weight in weights]
        places.append(PlaceLaw(draw(chance) if at < len(proposal) else 1.0, range(6), law))
    return proposal, places


@given(windows())
def test_outcomes_are_ranked_by_probability(
    window: tuple[list[int], list[PlaceLaw]],
) -> None:
    """Each outcome occurs once, a proposed token is never listed as its own correction, and
    probabilities sum to at most 1.
    """
    proposal, places = window
    found = ranked_outcomes(proposal, places)
    chances = [guess.probability for guess in found]
    assert chances == sorted(chances, reverse=True)
    assert len({guess[:2] for guess in found}) == len(found)
    assert all(
        guess.accepted == len(proposal) or guess.token != proposal[guess.accepted]
        for guess in found
    )
    lost = [
        place.probabilities[token] == 1.0
        and place.acceptance < 1  # no other token is considered at that position
        for place, token in zip(places, proposal, strict=False)
    ]
    if not any(lost):
        assert sum(chances) == pytest.approx(1.0)


@given(
    st.lists(chance, min_size=1, max_size=8),
    st.lists(chance, min_size=1, max_size=6),
    st.integers(1, 12),
)
def test_the_continued_branches_have_the_highest_expected_value(
    chances: list[float], acceptance: list[float], budget: int
) -> None:
    """No other number and length of branches that fits into the time has a higher expected value
    than the chosen branches.
    """
    chances = sorted(chances, reverse=True)

    def length(count: int) -> int:
        return budget // count

    def worth(count: int, tokens: int) -> float:
        return sum(chances[:count]) * sum(
            prod(acceptance[:place]) for place in range(1, tokens + 1)
        )

    count, tokens = most_worthwhile(chances, length, acceptance)
    assert 1 <= count <= len(chances)
    assert tokens <= length(count)
    everything = [worth(n, min(length(n), len(acceptance))) for n in range(1, len(chances) + 1)]
    assert worth(count, tokens) == pytest.approx(max(everything))


@given(
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=12),
    st.integers(0, 3),
    st.integers(0, 4),
)
def test_a_cache_returns_every_branch_once(
    outcomes: set[tuple[int, int]], accepted: int, token: int
) -> None:
    """The cache returns the branch of the actual outcome once and frees all others; afterwards the
    cache is empty.
    """
    cache = OutcomeCache[tuple[int, int]]()
    for outcome in outcomes:
        cache.put(*outcome, outcome)
    assert len(cache) == len(outcomes)
    chosen, others = cache.select(accepted, token)
    assert chosen == ((accepted, token) if (accepted, token) in outcomes else None)
    assert sorted([*others, *([chosen] if chosen else [])]) == sorted(outcomes)
    assert len(cache) == 0
    assert cache.select(accepted, token) == (None, [])
