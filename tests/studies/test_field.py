"""Tests of methods at equal cost: prices computed by hand, Pareto-optimal points, and bands in the
picture.
"""

from __future__ import annotations

from typing import Any

import pytest

arms = pytest.importorskip("scripts.studies.arms", reason="needs a checkout")
harness = pytest.importorskip("scripts.studies.harness", reason="needs a checkout")
result_pages = pytest.importorskip("scripts.studies.result_pages", reason="needs a checkout")
modelled = pytest.importorskip("scripts.studies.modelled", reason="needs a checkout")


def planted(right: int, draft: int, scored: int, target: int, drawn: int = 0) -> Any:
    """Make a run of ten problems of which `right` are solved, with the given token counts for every
    problem.
    """
    solved = [
        arms.Solved(
            problem=f"p{index}",
            level=0,
            right=float(index < right),
            share=0.0,
            draft=draft,
            scored=scored,
            target=target,
            decisions=(),
            drawn=drawn,
        )
        for index in range(10)
    ]
    return arms.Sum([arms.Piece("planted", 0, 0, 0, solved, [0.0])])


def test_prices_were_computed_by_hand() -> None:
    """Prices equal those computed by hand.

    Tokens that the target samples while it scores take no step of their own, and scored tokens cost
    as much as prefilled ones. Four GPUs cost four times as much as one.
    """
    step = modelled.Cost(step=0.064, sequence=0.0, cached=0.0, prefilled=0.0001)
    prices = arms.Prices("toy", 1e9, 10e9, step, step, draft_gpus=1, target_gpus=4)
    one = planted(5, draft=1000, scored=500, target=300, drawn=100)
    assert arms.decoded_by_target(one) == 200
    assert prices.tflops(one) == pytest.approx(2 * (1000 * 1e9 + 800 * 10e9) / 1e12)
    # a full step of 64 sequences takes 64 ms, so a token takes 1 ms
    assert prices.gpu_seconds(one) == pytest.approx(1.0 + 4 * (0.2 + 0.05))


def test_the_cheapest_run_of_each_accuracy_is_on_the_frontier() -> None:
    """A run that costs more than another of the same accuracy is not on the frontier, and the table
    is sorted by cost.
    """
    found = [
        ("dear", planted(5, 4000, 0, 0)),
        ("cheap", planted(5, 1000, 0, 0)),
        ("right", planted(9, 1000, 0, 4000)),
    ]
    table = arms.field_table(arms.PRICES[0], found)
    assert [(row[0], row[-1]) for row in table.rows] == [
        ("cheap", "yes"),
        ("dear", ""),
        ("right", "yes"),
    ]
    low, accuracy, high = table.rows[0][3], table.rows[0][1], table.rows[0][4]
    assert low < accuracy < high


def test_a_chart_with_bands_draws_one_around_each_line() -> None:
    """A band with two points is drawn as an area, and a band with a single point as a stroke."""
    found = [
        ("line", planted(5, 1000, 0, 0)),
        ("line", planted(6, 2000, 0, 0)),
        ("point", planted(9, 1000, 0, 400)),
    ]
    picture = result_pages.draw(arms.field_table(arms.PRICES[0], found))
    assert picture.count('class="area s0"') == 1
    assert 'class="area s1"' not in picture
    plain = result_pages.draw(
        harness.Table.of(
            "t", "x | y | by", [(1, 2, "a"), (2, 3, "a")], chart=harness.Chart("x", "y", "by")
        )
    )
    assert 'class="area' not in plain


def test_every_method_of_the_field_is_a_run() -> None:
    """The default study of the field has eight methods, and every point of the quick study has the
    settings of a run.
    """
    names = {method for method, _ in arms.field_arms(harness.Options())}
    assert len(names) == 8
    assert all(one.setup.run_policy for _, one in arms.field_arms(harness.Options(effort="quick")))
