"""Tests of the table of rates, each with the number of samples that it leaves out."""

import math
from typing import Any, cast

import pytest

from atts.errors import OptionError
from atts.evaluators.metrics.rates import Samples, coverage, score

RUN = [
    Samples(
        "p1",
        (True, True, False, None),
        ("a", "a", "b", "c"),
        ("graded", "graded", "graded", "timeout"),
    ),
    Samples(
        "p2",
        (False, False, True, False),
        ("x", "x", "y", None),
        ("graded", "graded", "graded", "cut"),
    ),
    Samples(
        "p3",
        (True, True, True, None),
        ("q", "q", "q", "r"),
        ("graded", "graded", "graded", "unscored"),
    ),
    Samples(
        "p4", (False,) * 4, (None, None, "z", None), ("no answer", "cut", "graded", "no answer")
    ),
]


def test_a_scorecard_holds_every_rate_with_its_basis() -> None:
    """A scorecard has pass@1 and the rates for powers of two up to n, with values computed by hand."""
    found = score(RUN)
    assert list(found.estimates)[0] == "pass@1"
    assert {"pass@2", "maj@2", "pass^2", "G-pass@2(1/2)", "pass@4", "maj@4"} <= set(found.estimates)
    assert found.estimates["pass@1"].value == pytest.approx((2 + 1 + 3 + 0) / 16)
    assert found.estimates["pass@4"].value == pytest.approx(3 / 4)
    assert found.estimates["pass^4"].value == 0
    assert found.estimates["maj@4"].value == pytest.approx((1 + 0 + 1 + 0) / 4)
    assert all((e.n_problems, e.n_samples) == (4, 16) for e in found.estimates.values())
    assert all(e.low <= e.value <= e.high for e in found.estimates.values())


def test_unusable_samples_are_counted_by_kind() -> None:
    """Cut, unanswered, unscored and timed-out samples are counted separately and printed last."""
    found = coverage(RUN)
    counts = (
        found.problems,
        found.samples,
        found.cut,
        found.no_answer,
        found.unscored,
        found.timed_out,
    )
    assert counts == (4, 16, 2, 2, 1, 1)
    card = score(RUN)
    assert (
        str(card.coverage)
        == "16 samples of 4 problems: 2 cut, 2 without answer, 1 unscored, 1 timed out"
    )
    assert "2 unscored: 0.500 [0.085, 0.915] if these were correct" in str(card.estimates["pass@1"])


def test_samples_without_an_answer_do_not_vote() -> None:
    """One sample with a correct answer wins the vote against three samples without an answer."""
    run = [Samples("p", (True, False, False, False), ("a", None, None, None))]
    assert score(run, ks=(4,)).estimates["maj@4"].value == 1


def test_without_labels_there_is_no_vote() -> None:
    """Without labels of answers no maj@k is computed, and a sample with an unknown verdict counts
    as unscored. Without problems every rate is undefined.
    """
    found = score([Samples("p", (True, None))])
    assert not [name for name in found.estimates if name.startswith("maj")]
    assert (found.coverage.samples, found.coverage.unscored) == (2, 1)
    empty = score([])
    assert math.isnan(empty.estimates["pass@1"].value)
    assert empty.estimates["pass@1"].note == "no problems"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Samples("p", (True,), ("a", "b")),
        lambda: Samples("p", (True,), statuses=(cast(Any, "lost"),)),
    ],
)
def test_samples_that_do_not_fit_together_are_errors(wrong: Any) -> None:
    """If problems or statuses do not fit the samples, the error names the one that does not fit."""
    with pytest.raises(OptionError):
        wrong()
