"""The two-sample comparison of questions keeps its level and sees more than a change of level."""

import numpy as np
import pytest

from atts.calibration import StoredScores
from atts.calibration.drift import (
    Floats,
    QuestionSample,
    TwoSampleTest,
    mixture_ratios,
    two_sample_test,
)

SIZE = 6


def law(
    draw: np.random.Generator,
    count: int,
    shift: float = 0.0,
    scale: float = 1.0,
    noise: float = 0.5,
) -> Floats:
    """Questions of six scores around levels of their own; spreads and levels go together, as in
    perplexities.
    """
    level = scale * draw.gamma(2.0, size=count) + shift
    return level[:, None] + noise * np.sqrt(level - shift + 0.1)[:, None] * draw.standard_normal(
        (count, SIZE)
    )


def sample(rows: Floats) -> QuestionSample:
    """Stored questions."""
    names = tuple(f"q{at // SIZE}" for at in range(rows.size))
    scores = tuple(float(score) for score in np.exp(rows.clip(0)).ravel())
    return QuestionSample.of(StoredScores(scores, names, (0,) * rows.size), 0)


def looked(stored: Floats, live: Floats, level: float = 1.0, seed: int = 0) -> TwoSampleTest:
    """One look at live questions."""
    return two_sample_test(sample(stored), [list(row) for row in live.clip(0)], level, seed)


def test_draws_of_the_stored_questions_are_rarely_called_different() -> None:
    """p <= .1 in a tenth of clean runs, to within four binomial deviations."""
    draw = np.random.default_rng(0)
    stored = law(draw, 30)
    found = [
        looked(stored, stored[draw.integers(30, size=9)], level=1e-9).drawn <= 0.1
        for _ in range(150)
    ]
    assert 0.02 <= np.mean(found) <= 0.2


def test_draws_of_one_law_are_rarely_called_different() -> None:
    """The stored questions are then a sample as well: the permutation test holds its level, the
    other may not.
    """
    draw = np.random.default_rng(1)
    found = [looked(law(draw, 12), law(draw, 8)).exchangeable <= 0.1 for _ in range(150)]
    assert np.mean(found) <= 0.2


@pytest.mark.parametrize(
    "change", [{"shift": 3.5}, {"scale": 4.0}, {"scale": 0.15}, {"noise": 2.5}, {"noise": 0.1}]
)
def test_level_width_and_spread_are_all_seen(change: dict[str, float]) -> None:
    """Each alone makes another law, told from twenty questions."""
    draw = np.random.default_rng(2)
    found = looked(law(draw, 60, shift=1.0), law(draw, 20, **{"shift": 1.0, **change}))
    assert found.drawn <= 0.002
    assert found.exchangeable <= 0.01
    assert found.questions == 20


def test_the_order_of_live_questions_says_nothing() -> None:
    """The same p-value forwards and backwards, and again for the same seed."""
    draw = np.random.default_rng(3)
    stored = law(draw, 20)
    live = law(draw, 7, shift=0.4)
    assert looked(stored, live[::-1]).drawn == looked(stored, live).drawn
    assert looked(stored, live) == looked(stored, live)


def test_the_second_test_is_left_out_where_the_first_finds_nothing() -> None:
    """It would not be asked."""
    draw = np.random.default_rng(4)
    stored = law(draw, 20)
    assert looked(stored, stored[:10], level=1e-4).exchangeable == 1.0


def test_depth_weighs_many_shallow_questions_against_few_deep_ones() -> None:
    """Forty single scores beat three full questions; twelve full ones beat thirteen single ones."""
    stored = sample(law(np.random.default_rng(5), 50, noise=1.0))
    assert stored.depth([[1.0] * SIZE] * 3 + [[1.0]] * 40) == 1
    assert stored.depth([[1.0] * SIZE] * 12 + [[1.0]]) == SIZE


def ratios(moved: Floats, runs: int = 400, count: int = 18) -> tuple[float, float]:
    """The mean ratio of runs of two correlated standard columns, and of the same once `moved` was
    added.
    """
    draw = np.random.default_rng(6)
    stored = draw.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], size=100)
    weights = draw.multinomial(count, np.full(100, 0.01), size=runs) / count
    clean, other = (
        mixture_ratios(rows, stored, weights, count) for rows in (stored, stored + moved)
    )
    return float(clean.mean()), float(other.mean())


def test_a_mixture_is_unlikely_where_nothing_changed_and_likely_where_something_did() -> None:
    """Capital that is lost under the stored law, and won under others; soonest where level and
    spread move together.
    """
    clean, together = ratios(np.array([0.8, 0.8]))
    _, apart = ratios(np.array([0.8, -0.8]))
    assert clean < 0
    assert together > 1.5
    # against the correlation of the two: farther away, in spite of the prior
    assert apart > together
    assert ratios(np.array([0.0, 0.0]))[1] == clean


def test_a_mixture_reads_one_column_and_constant_ones() -> None:
    """Single scores have no spread, and equal scores no width: neither is an error, a move is still
    seen.
    """
    one = np.arange(20.0)[:, None] / 6
    same = np.zeros((20, 2))
    weights = np.full((1, 20), 0.05)
    assert (
        mixture_ratios(one + 3, one, weights, 20)[0] > 5 > mixture_ratios(one, one, weights, 20)[0]
    )
    assert (
        mixture_ratios(same + 1, same, weights, 20)[0] > mixture_ratios(same, same, weights, 20)[0]
    )


@pytest.mark.parametrize("direction", [1, -1])
def test_a_near_law_is_seen_in_most_runs_of_eighteen_questions(direction: int) -> None:
    """Level and spread both half a deviation off, as of another model: neither alone would be seen."""
    draw = np.random.default_rng(7)
    stored = law(draw, 80, shift=1.0)
    level = stored.mean(axis=1).std()
    found = list[bool]()
    for _ in range(30):
        near = law(draw, 18, shift=1.0 + 0.75 * direction * level, noise=0.5 * 1.6**direction)
        found.append(looked(stored, near, level=0.005).drawn <= 0.005)
    assert sum(found) >= 24
