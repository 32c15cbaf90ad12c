"""Tests that metrics equal those of other evaluation tools, each skipped if its tool is not
installed.
"""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from atts.evaluators.metrics.intervals import effective_n, mean_estimate
from atts.evaluators.metrics.rates import count, pass_at_k, pass_hat_k

RNG_SEED = 12


def graded(problems: int, samples: int) -> NDArray[np.int64]:
    """Draw verdicts of [problem, sample] for problems of very different difficulty."""
    rng = np.random.default_rng(RNG_SEED)
    return rng.binomial(1, rng.beta(0.6, 0.6, (problems, 1)), (problems, samples))


def inspect_scorer() -> Any:
    """Import inspect_ai's module of scorers, reducers and metrics."""
    return pytest.importorskip(
        "inspect_ai.scorer", reason="inspect_ai is an oracle, not a dependency"
    )


def sample_scores(scorer: Any, rows: NDArray[np.int64]) -> list[Any]:
    """Make one score per sample, with its problem in the metadata."""
    return [
        scorer.SampleScore(
            score=scorer.Score(value=float(one)),
            sample_id=f"{at}-{i}",
            sample_metadata={"problem": f"p{at}"},
        )
        for at, row in enumerate(rows)
        for i, one in enumerate(row)
    ]


@pytest.mark.parametrize("k", [1, 2, 5, 8, 9])
def test_pass_metrics_equal_inspect_ai(k: int) -> None:
    """atts and inspect_ai agree for every number of correct samples of 8, and are undefined in the
    same cases.
    """
    scorer = inspect_scorer()
    for right in range(9):
        values = [scorer.Score(value=float(at < right)) for at in range(8)]
        for reducer, metric in ((scorer.pass_at(k), pass_at_k), (scorer.pass_k(k), pass_hat_k)):
            theirs = float(reducer(values).value)
            ours = float(metric([8], [right], k)[0])
            assert (math.isnan(theirs) and math.isnan(ours)) or ours == pytest.approx(
                theirs, abs=1e-12
            )


def test_the_wilson_interval_equals_inspect_ai() -> None:
    """The interval equals inspect_ai's, both for eight samples per problem and for a single sample
    per problem.
    """
    scorer = inspect_scorer()
    rows = graded(40, 8)
    if not hasattr(scorer, "ci_wilson"):
        pytest.skip("this version of inspect_ai has no ci_wilson")
    means = rows.mean(axis=1)
    assert (
        40
        < effective_n(float(means.mean()), float(means.var(ddof=1) / 40), 40, rows.size)
        < rows.size
    )
    bounds = scorer.ci_wilson(cluster="problem")(sample_scores(scorer, rows))
    ours = mean_estimate(means, rows.size)
    assert (ours.low, ours.high) == pytest.approx((bounds["lower"], bounds["upper"]), abs=1e-6)
    single = rows[:, :1]
    bounds = scorer.ci_wilson()(sample_scores(scorer, single))
    ours = mean_estimate(single.mean(axis=1), single.size)
    assert (ours.low, ours.high) == pytest.approx((bounds["lower"], bounds["upper"]), abs=1e-6)


def test_the_standard_error_equals_lm_eval() -> None:
    """Mean and standard error equal lm_eval's for one answer per problem."""
    metrics = pytest.importorskip(
        "lm_eval.api.metrics", reason="lm_eval is an oracle, not a dependency"
    )
    rows = graded(200, 1)
    values = [float(one) for one in rows[:, 0]]
    assert mean_estimate(values, 200).value == pytest.approx(metrics.mean(values))
    assert float(np.std(values, ddof=1)) / math.sqrt(200) == pytest.approx(
        metrics.mean_stderr(values)
    )


def test_accuracy_of_samples_equals_inspect_ai() -> None:
    """If all problems have equally many samples, the mean over problems is the mean over samples."""
    scorer = inspect_scorer()
    rows = graded(30, 4)
    counts = count([[bool(one) for one in row] for row in rows])
    ours = mean_estimate(counts.c / counts.n, int(counts.n.sum())).value
    assert ours == pytest.approx(scorer.accuracy()(sample_scores(scorer, rows)))
