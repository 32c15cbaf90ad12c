"""Tests of the verdict on a realised rate (on target, unclear or off target), given how much
questions differ.
"""

import numpy as np
import pytest

from atts.calibration.conformal import check_rate
from atts.errors import CalibrationInputError


def runs(
    draw: np.random.Generator, questions: int, rate: float, alike: float
) -> list[tuple[int, int]]:
    """Sample twenty decisions per question at a rate specific to the question. The larger `alike`
    is, the closer these rates are to `rate`.
    """
    own = draw.beta(rate * alike, (1 - rate) * alike, size=questions)
    return [(20, int(escalated)) for escalated in draw.binomial(20, own)]


@pytest.mark.parametrize(("questions", "alike"), [(6, 3.0), (30, 3.0), (30, 1000.0), (200, 1.0)])
def test_a_correct_rate_is_rarely_called_off_target(questions: int, alike: float) -> None:
    """The verdict wrongly says "off target" in about one run of a hundred, however strongly the
    decisions of a question depend on each other.
    """
    draw = np.random.default_rng(0)
    found = [check_rate(0.3, runs(draw, questions, 0.3, alike)).standing for _ in range(150)]
    assert found.count("left") <= 5
    if alike < 10:
        # a test that assumes independent decisions would call these runs off target
        assert found.count("unclear") > 30


@pytest.mark.parametrize(("questions", "alike"), [(30, 1000.0), (200, 3.0)])
def test_a_wrong_rate_is_called_off_target_given_enough_questions(
    questions: int, alike: float
) -> None:
    """A rate that is 50 % too high is detected over independent decisions and over many questions."""
    draw = np.random.default_rng(1)
    found = [check_rate(0.3, runs(draw, questions, 0.45, alike)).standing for _ in range(50)]
    assert found.count("left") >= 48


@pytest.mark.parametrize(("nominal", "decisions"), [(0.2, 8), (0.2, 17), (0.05, 60), (0.9, 20)])
def test_very_few_decisions_allow_no_verdict(nominal: float, decisions: int) -> None:
    """If a rate of 0 or of twice the nominal rate would also count as on target, the verdict says
    that there are too few decisions.
    """
    escalated = round(nominal * decisions)
    check = check_rate(nominal, [(decisions, escalated)])
    assert (check.standing, check.has_few_decisions) == ("unclear", True)
    assert ": too few decisions to tell whether the rate is on target; chance alone" in str(check)
    many = check_rate(nominal, [(10 * decisions, 10 * escalated)])
    assert (many.standing, many.has_few_decisions) == ("held", False)


def test_few_decisions_report_the_range_that_they_allow() -> None:
    """For about thirty chunks the verdict adds the range of rates that fit the decisions; for about
    a thousand chunks it does not.
    """
    assert "chance alone would give a rate in [0.067, 0.367] (95 %): on target" in str(
        check_rate(0.2, [(15, 3), (15, 3)])
    )
    assert str(check_rate(0.2, [(50, 10)] * 20)).endswith("nominal rate 20 %: on target")
    # one question gives no information about other questions
    assert check_rate(0.2, [(10, 10)]).standing == "unclear"
    assert check_rate(0.2, [(10, 10)] * 6).standing == "left"
    assert check_rate(0, [(10, 0)]).standing == "held"


@pytest.mark.parametrize("questions", [[], [(0, 0)], [(3, 4)], [(3, -1)]])
def test_impossible_counts_are_refused(questions: list[tuple[int, int]]) -> None:
    """The verdict refuses zero decisions, more escalations than decisions, and negative numbers."""
    with pytest.raises(CalibrationInputError):
        check_rate(0.2, questions)
