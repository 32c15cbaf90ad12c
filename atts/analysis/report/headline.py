"""The first screen of a report: one sentence, and the three numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from atts.analysis.report.accuracy import written
from atts.analysis.report.numbers import (
    Baseline,
    Headline,
    NamedRate,
    RateControl,
    ShownNumber,
    Spend,
)
from atts.evaluators import Estimate

_STANDINGS = {"held": "held", "unclear": "too few questions to tell", "left": "NOT held"}


def headline(
    accuracy: Sequence[NamedRate],
    cost: Spend,
    calibration: RateControl | None,
    baselines: Sequence[Baseline],
    count: int,
) -> Headline:
    """What a person would say of the run, and the numbers that say it."""
    vote = accuracy[0].estimate if accuracy else None
    said = " and ".join(filter(None, (_answers(vote, count), _text(cost))))
    sentence = "; ".join((said, *map(_beside, baselines[:1])))
    return Headline(
        sentence, (_right(vote, count), _target(cost, baselines), _handed(cost, calibration))
    )


def right_of(estimate: Estimate) -> str:
    """A share of problems as people count it.

    >>> right_of(Estimate(0.95, 0.835, 0.986, 40, 40, "wilson"))
    '38 of 40'
    """
    return f"{estimate.value * estimate.n_problems:,.0f} of {estimate.n_problems:,}"


def percent(share: float) -> str:
    """A share in per cent, without a decimal where it would say nothing.

    >>> percent(0.163), percent(1.0), percent(0.0), percent(0.0004), percent(0.9996)
    ('16.3 %', '100 %', '0 %', '< 0.1 %', '> 99.9 %')
    """
    if 0 < share < 0.001 or 0.999 < share < 1:
        return "< 0.1 %" if share < 0.5 else "> 99.9 %"
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def span(estimate: Estimate) -> str:
    """The interval of a share in words."""
    return f"95 % interval {percent(estimate.low)} to {percent(estimate.high)}"


def _answers(vote: Estimate | None, count: int) -> str:
    problems = f"{count:,} problem{'s' * (count != 1)}"
    if vote is None:
        return f"{problems} went through, none of them graded"
    return f"the vote is right on {right_of(vote)} problem{'s' * (vote.n_problems != 1)}"


def _text(cost: Spend) -> str:
    if math.isnan(cost.target_share):
        return ""
    share = {0.0: "none", 1.0: "all"}.get(cost.target_share, percent(cost.target_share))
    return f"the large model wrote {share} of the text"


def _beside(other: Baseline) -> str:
    """The first run it is compared with, in the same words."""
    ratio = other.target_token_ratio
    said = f"{other.name} is right on {right_of(other.other)}"
    if math.isnan(ratio):
        return said
    much = f"{1 / ratio:.2g} times as much" if 0 < ratio < math.inf else "nothing"
    if not ratio:
        much = f"{other.target_tokens_per_problem:,.0f} tokens a problem"
    return f"{said} and had it write {'as much' if 0.95 < ratio < 1.05 else much}"


def _right(vote: Estimate | None, count: int) -> ShownNumber:
    if vote is None:
        return ShownNumber(f"{count:,}", "problems", "none graded: there is no reference answer")
    note = f"{right_of(vote)} problems, each by the vote of its rollouts; {span(vote)}"
    return ShownNumber(percent(vote.value), "of the answers are right", note)


def _target(cost: Spend, baselines: Sequence[Baseline]) -> ShownNumber:
    if math.isnan(cost.target_share):
        return ShownNumber("0", "tokens written", "by either model")
    others = "".join(
        f", {other.name} {other.target_tokens_per_problem:,.0f}" for other in baselines[:2]
    )
    note = (
        f"{cost.usage.target_tokens:,} of {written(cost.usage):,} tokens; "
        f"{cost.target_tokens_per_problem:,.0f} a problem{others}"
    )
    return ShownNumber(percent(cost.target_share), "of the text is the large model's", note)


def _handed(cost: Spend, calibration: RateControl | None) -> ShownNumber:
    if calibration is None:
        per_second = (
            ""
            if math.isnan(cost.tokens_per_second)
            else f"{cost.tokens_per_second:,.0f} tokens a second"
        )
        return ShownNumber(f"{cost.seconds:,.3g} s", "in all sessions", per_second)
    share = calibration.escalated / calibration.decisions
    found = calibration.check()
    asked = "no share was asked for"
    if found is not None:
        asked = f"{percent(found.nominal)} asked for: {_STANDINGS[found.standing]}"
    note = f"{calibration.escalated:,} of {calibration.decisions:,}; {asked}"
    return ShownNumber(percent(share), "of the steps were handed to the large model", note)
