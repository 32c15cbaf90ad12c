"""Tests of the grader's small parts: spelt numbers and dates, units, intervals, policies."""

from fractions import Fraction

import pytest

from atts.evaluators import (
    accuracy_estimate,
    answer_classes,
    count,
    find_benchmark,
    problems_needed,
    reference,
    votes,
)
from atts.evaluators.datasets.arithmetic import Operation
from atts.evaluators.datasets.loading import split_slice
from atts.evaluators.datasets.tables import letter_order
from atts.evaluators.metrics.intervals import Estimate, share_estimate
from atts.evaluators.metrics.rates import Votes, status_of
from atts.evaluators.metrics.wilson import wilson_interval
from atts.evaluators.syntax.vocabulary import (
    date_in_words,
    measure,
    number_in_words,
    spelled,
    squashed,
)
from atts.evaluators.verdict import STRICT, changed


def test_words_are_read_by_their_meaning() -> None:
    """Numbers, dates and phrases written in words are read as values, such as "two thousand and
    twenty-five" as 2025.
    """
    assert spelled({"<=": "le leq"}) == {"le": "<=", "leq": "<="}
    assert number_in_words("two thousand and twenty-five") == 2025
    assert number_in_words("a dozen") == 12
    assert number_in_words("minus two thirds") == Fraction(-2, 3)
    assert number_in_words("a") is None
    assert (
        date_in_words("March 5, 2024")
        == date_in_words("5th of march 2024")
        == date_in_words("2024-03-05")
        != ""
    )
    assert squashed("An  Ellipse.") == "ellipse"


def test_units_are_read_by_dimension_and_scale() -> None:
    """Two names of a unit, such as "km / h" and "kilometers per hour", give the same dimension and
    scale. Other words give None.
    """
    assert measure("km / h") == measure("kilometers per hour")
    assert measure("glorp and") is None


def test_small_parts_of_datasets() -> None:
    """Small helpers of datasets give correct results: the order of choices, the status of a sample,
    a changed policy, and a worked solution's answer.
    """
    names = [found.name for text in ("MATH-500", "aime_2025") if (found := find_benchmark(text))]
    assert names == ["math500", "aime25"]
    assert split_slice("aime24[10:20]")[1].words() == "slice [10:20]"
    assert sorted(letter_order(0, "gpqa/1", 4)) == [0, 1, 2, 3]
    assert status_of(None, "tokens", "wrong", "") == "cut"
    assert status_of("7", "answer", "unscored", "time") == "timeout"
    assert status_of("7", "answer", "unscored", "undecided") == "unscored"
    assert changed(STRICT, {"relative": 0.01, "units": None}).relative == 0.01
    assert reference(r"Adding both gives $2x = 6$, so $x = \boxed{3}$.") == "3"
    assert Operation(87, "+", 46).worked() == "87 + 46 = 127 + 6 = 133"


def test_small_parts_of_metrics() -> None:
    """Small helpers of metrics give correct counts, classes and intervals for a few samples."""
    counts = count([[True, False, None], [True]])
    assert (counts.n.tolist(), counts.c.tolist()) == ([3, 1], [1, 1])
    assert answer_classes(["7", None, "8", "7"], lambda texts: range(len(texts))) == (0, None, 1, 0)
    assert Estimate(0.5, 0.25, 0.75, 8, 8, "wilson").brief() == "0.500 [0.250, 0.750]"
    told = accuracy_estimate([True, False, True, None]).brief()
    assert told == "0.500 [0.150, 0.850] (1 unscored: 0.750 [0.301, 0.954] if these were correct)"
    shares = share_estimate([(3, 10), (1, 5), (0, 0)])
    assert str(shares) == "0.267 [0.001, 0.990] (95 % wilson, 2 problems, 15 samples)"
    assert votes(["a", "b", "a", None], [True, False, True, False]) == Votes((2, 1), (1.0, 0.0), 1)
    assert problems_needed(0.5, 0.1) == 199
    assert wilson_interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
