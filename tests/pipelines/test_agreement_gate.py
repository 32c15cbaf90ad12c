"""Budgets by problem: spent where siblings disagree, the run's total held."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from atts.api import Setup
from atts.calibration import Calibrator
from atts.core import Features
from atts.errors import OptionError
from atts.pipelines import AgreementGate, ConformalGate


def run(
    gate: ConformalGate | AgreementGate, seed: int, problems: int = 60
) -> dict[bool, tuple[int, int]]:
    """Sixteen rollouts of eight chunks; in half of the problems siblings agree. By that: handed
    over, of how many.
    """
    draw = random.Random(seed)
    handed = Counter[bool]()
    of = Counter[bool]()
    for problem in range(problems):
        agree = problem % 2 == 0
        for place in range(128):
            left = 1 - (128 * problem + place) / (128 * problems)
            chunk = Features(
                f"q{problem}",
                place // 16,
                place % 16,
                answered=place // 16,
                agreement=1.0 if agree else 0.4,
                left=left,
            )
            decision = gate.preview(chunk)
            decision = gate.decide(replace(chunk, issue=decision.issue), 1 + draw.expovariate(1.0))
            gate.observe(decision, decision.escalate)
            handed[agree] += decision.escalate
            of[agree] += 1
    return {agree: (handed[agree], of[agree]) for agree in (True, False)}


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_what_is_spared_where_siblings_agree_is_spent_where_they_do_not(rate: float) -> None:
    """The total stays within a hundredth; from the third answer on nothing goes over where they
    agree.
    """
    conformal = ConformalGate(Calibrator(rate, "aci", seed=1))
    found = run(AgreementGate(conformal, 0.9), seed=2)
    total = sum(handed for handed, _ in found.values()) / sum(of for _, of in found.values())
    assert total == pytest.approx(rate, abs=0.01)
    (agreed, of) = found[True]
    (split, others) = found[False]
    assert agreed / of < 0.6 * rate < rate * 1.3 < split / others


def test_nothing_is_spared_before_three_siblings_have_answered() -> None:
    """Two may agree by chance; and what was spared says so."""
    gate = AgreementGate(ConformalGate(Calibrator(1.0, "aci")), 0.9)
    for answered, action in ((2, "escalate"), (3, "accept")):
        said = gate.decide(Features("q", answered=answered, agreement=1.0, issue=answered), 2.0)
        assert said.action == action
    assert "siblings agree" in said.why
    assert said.origin == "budget"


def test_impossible_budgets_are_refused() -> None:
    """An agreement is a share; rounds have no siblings that answered; a setup says so before a
    model is loaded.
    """
    for setup in (Setup(spare=1.5), Setup(spare=0.0), Setup(spare=0.9, method="top-b")):
        with pytest.raises(OptionError, match="spare"):
            setup.decider()
    assert isinstance(Setup(spare=0.9).decider()[0], AgreementGate)
