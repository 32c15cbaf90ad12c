"""Tests of a report's first screen: one sentence, one chart and three numbers from the run's
counts.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atts.analysis import build_report, render
from atts.analysis.reports.charts import frontier_chart, runs_chart
from atts.analysis.reports.headline import headline, percent
from atts.analysis.reports.numbers import FrontierPoint, RunReport
from atts.evaluators import holm, mean_estimate


def _again(report: RunReport, **other: Any) -> str:
    """Return the report's sentence after some of its numbers were changed."""
    known: dict[str, Any] = {
        "accuracy": report.accuracy,
        "cost": report.spend,
        "calibration": report.calibration,
    }
    known |= {"baselines": report.baselines, **other}
    return headline(count=len(report.problems), **known).sentence


def test_the_sentence_gives_counts_share_and_comparison(run: Path, other_run: Path) -> None:
    """The report's first sentence gives the number of correct answers, the target's share of the
    tokens written, and a comparison with another run.
    """
    report = build_report(run, [other_run]).report
    right = sum(row.verdict == "correct" for row in report.problems)
    there = round(report.baselines[0].other.value * 12)
    times = f"{1 / report.baselines[0].target_token_ratio:.2g}"
    assert report.headline.sentence == (
        f"the vote is correct on {right} of 12 problems, and the target wrote "
        f"{percent(report.spend.target_share)} "
        f"of the tokens; the vote of target alone is correct on {there} of 12 problems, "
        f"and the target of target alone wrote "
        f"{times} times as many tokens as this run's target"
    )
    assert _again(report, accuracy=()).startswith(
        "12 problems finished, but no answer is graded, and the target"
    )
    assert "wrote all of the tokens" in _again(report, cost=replace(report.spend, target_share=1.0))
    for ratio, said in (
        (math.inf, "wrote no tokens"),
        (0.0, "tokens per problem"),
        (1.02, "as many tokens as this run's target"),
        (math.nan, "of 12 problems"),
    ):
        other = replace(report.baselines[0], target_token_ratio=ratio)
        assert _again(report, baselines=(other,)).endswith(said)


def test_a_comparison_with_a_coin_gives_the_first_number(
    run: Path, other_run: Path, evaluate_into: Any, tmp_path: Path
) -> None:
    """On the first screen, the gain over a coin comes first; p-values of several comparisons are
    corrected.
    """
    coin = evaluate_into(tmp_path / "coin", 12, method="coin")
    report = build_report(run, [coin, other_run]).report
    gain = report.headline.numbers[0]
    assert gain.what.startswith("gain over a coin")
    assert gain.value == report.baselines[0].difference.signed()
    assert len(report.headline.numbers) == 4
    alone = [build_report(run, [other]).report.baselines[0].p_value for other in (coin, other_run)]
    assert [one.p_value for one in report.baselines] == holm(alone)


def test_the_three_numbers_are_in_every_format(run: Path, other_run: Path) -> None:
    """Every format gives the numbers of correct answers, of target tokens and of escalated chunks,
    and says whether the rate is on target.
    """
    built = build_report(run, [other_run])
    held = built.report.calibration
    assert held is not None
    answers, text, steps = built.report.headline.numbers
    assert "95 % interval" in answers.note
    assert f"target alone {built.report.baselines[0].target_tokens_per_problem:,.0f}" in text.note
    assert (
        steps.note == f"{held.escalated} of {held.decisions} chunks; nominal rate 30 %: on target"
    )
    page, words, data = (render(built, format) for format in ("html", "markdown", "json"))
    assert json.loads(data)["headline"]["numbers"][2]["note"] == steps.note
    for number in (answers, text, steps):
        assert number.note in words
        assert (
            f"<b>{number.value.replace('<', '&lt;').replace('>', '&gt;')}</b> {number.what}"
            in page.replace("&#39;", "'")
        )


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.0004, "< 0.1 %"), (0.9996, "> 99.9 %"), (1.0, "100 %"), (0.0, "0 %"), (0.9994, "> 99.9 %")],
)
def test_only_a_whole_is_called_100_percent(share: float, said: str) -> None:
    """Only a share of exactly 0 or 1 is printed as 0 % or 100 %; close shares are not rounded to
    them.
    """
    assert percent(share) == said


def _points(*accuracies: float, kind: Any = "run") -> list[FrontierPoint]:
    found = [
        mean_estimate([1.0] * round(500 * value) + [0.0] * round(500 * (1 - value)), 500)
        for value in accuracies
    ]
    return [
        FrontierPoint(f"{kind} {n}", kind, 10.0 * n, 20.0 * n, one) for n, one in enumerate(found)
    ]


def _heights(picture: str) -> list[float]:
    """Return the distances in pixels between the chart's dots and its top."""
    return [float(found) for found in re.findall(r'<circle[^>]* cy="([\d.]+)"', picture)]


def test_the_chart_spreads_high_accuracies() -> None:
    """Accuracies from 0.94 to 1.0 fill a third of the chart's height, even if another run has
    accuracy 0.
    """
    turns = _points(0.0, 0.3, kind="turns")
    low, high = _heights(frontier_chart([*_points(0.94, 1.0), *turns]).picture)[:2]
    assert low - high > 0.3 * (320 - 14 - 44)
    first = runs_chart([*_points(0.94, 1.0), *turns])
    assert first is not None
    low, high = _heights(first.picture)
    assert low - high > 0.5 * (260 - 14 - 44)
    assert len(_heights(first.picture)) == 2
    assert runs_chart(turns) is None


def test_the_stretched_axis_keeps_the_order() -> None:
    """A higher accuracy is always drawn higher on the stretched axis, whose tick labels are
    accuracies.
    """
    picture = frontier_chart(_points(*(n / 20 for n in range(21)))).picture
    heights = _heights(picture)
    assert heights == sorted(heights, reverse=True)
    ticks = [float(text) for text in re.findall(r'text-anchor="end">([\d.]+)<', picture)]
    assert {0.0, 0.9, 1.0} <= set(ticks)
    assert ticks == sorted(ticks)
    assert set(ticks) <= {n / 100 for n in range(101)}
