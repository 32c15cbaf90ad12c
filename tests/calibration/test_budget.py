"""A hard cap is never exceeded, under any order of completions."""

import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atts.calibration import Calibrator
from atts.calibration.budget import GroupBudget, TokenBucket, capped
from atts.core import Decision
from atts.errors import CalibrationInputError

ACTIONS = st.lists(st.sampled_from(["want", "pass"]), max_size=200)


@given(
    ACTIONS,
    st.sampled_from([0, Fraction(1, 10), 0.25, 0.4, 1]),
    st.integers(1, 4),
    st.sampled_from([None, 0, 7]),
)
def test_no_stretch_of_decisions_exceeds_the_bucket(
    actions: list[str], rate: Any, burst: int, total: int | None
) -> None:
    """Of any n consecutive decisions at most burst + rate n escalate, and never more than `total`
    in all.
    """
    bucket = TokenBucket(rate, burst, total)
    net = [0]
    decisions = [0]
    for action in actions:
        granted = bucket.admit(action == "want")
        assert not (granted and action == "pass")
        net.append(net[-1] + granted)
        decisions.append(decisions[-1] + 1)
        assert 0 <= bucket.tokens <= burst
    exact = Fraction(str(rate)) if isinstance(rate, float) else Fraction(rate)
    for end in range(len(net)):
        for start in range(0, end, 7):
            spent = net[end] - net[start]
            assert spent <= burst + exact * (decisions[end] - decisions[start])
        assert total is None or net[end] <= total


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_completions_meets_the_same_cap(seed: int) -> None:
    """160 chunks that all want to escalate, in shuffled orders, with B of m = 4 of 16: 4 + 40 at
    the very most.
    """
    chunks = list(range(160))
    random.Random(seed).shuffle(chunks)
    bucket = TokenBucket(4 / 16, burst=4)
    granted = [chunk for chunk in chunks if bucket.admit(True)]
    assert len(granted) == 4 + 39  # the slot earned by the last decision comes too late for it


def test_a_bucket_can_start_empty() -> None:
    """With start=0 no prefix ever exceeds rate n."""
    bucket = TokenBucket(0.4, burst=3, start=0)
    spent = 0
    for count in range(1, 200):
        spent += bucket.admit(True)
        assert spent <= Fraction(2, 5) * count


def test_groups_get_exactly_their_budget() -> None:
    """B per group; closing one forgets it."""
    group = GroupBudget(2)
    assert [group.admit("a", True) for _ in range(4)] == [True, True, False, False]
    assert group.admit("b", True)
    assert not group.admit("c", False)
    assert (group.spent["a"], group.spent.pop("a"), group.spent["a"]) == (2, 2, 0)


def test_a_capped_decision_says_so() -> None:
    """Unchanged while a slot is left; then accepted, with the cap as the reason, and the calibrator
    told.
    """
    bucket = TokenBucket(0.0, burst=1)
    wish = Decision("escalate", 0.4, "q", score=2.0, why="p 0.9 > 0.6")
    assert capped(wish, bucket) == wish
    refused = capped(wish, bucket)
    assert refused.action == "accept"
    assert refused.origin == "budget"
    calibrator = Calibrator(0.4)
    calibrator.observe(refused)
    assert (calibrator.decided, calibrator.escalated) == (1, 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: TokenBucket(1.2), "rate"),
        (lambda: TokenBucket(0.5, burst=0), "burst"),
        (lambda: TokenBucket(0.5, total=-1), "total"),
        (lambda: TokenBucket(0.5, burst=2, start=3), "start"),
        (lambda: GroupBudget(-1), "B"),
    ],
)
def test_impossible_budgets_are_refused(call: Any, words: str) -> None:
    """B > m and its like are errors that name what is wrong."""
    with pytest.raises(CalibrationInputError, match=words):
        call()
