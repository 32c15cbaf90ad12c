"""Split-conformal thresholds of stored scores, and rates as exact fractions.

Realised rates are compared with the nominal rate.
"""

from __future__ import annotations

# In this package, a larger score is worse and `rate` is the fraction to escalate. The paper's alpha
# is 1 - rate; only formulas use alpha.
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from atts.errors import CalibrationInputError, counted
from atts.sampling import beta_quantile, binomial_quantile, student_quantile

Rate = float | Fraction

Standing = Literal["held", "unclear", "left"]
"""The verdict on a realised rate: "held" means on target, "left" means off target, and "unclear"
means that there is too little data to decide.
"""

# A realised rate is on target if it is inside the central interval of the binomial distribution. If
# every decision is a coin toss, the rate is inside with this probability.
COIN = 0.95
# A realised rate is off target if it is outside a second, wider interval. The wider interval allows
# for questions that differ from each other as much as in this run. It contains the rate of a
# working gate with this probability, so about 1 run in 100 gets a false "off target". A rate that
# is only inside the wider interval is called unclear.
_CLUSTERED = 0.99


def exact_rate(rate: object, what: str = "rate") -> Fraction:
    """Return the rate as the exact fraction of its decimal form: 0.4 becomes 2/5.

    With floats, rounding can make a rank such as ceil((n + 1)(1 - rate)) wrong by one. For rates
    such as 0.01, 0.02 and so on, this happens for 231 values of n below 400.

    :raises CalibrationInputError: naming the rate as `what`, if it is not a number in [0, 1].

    >>> exact_rate(0.4)
    Fraction(2, 5)
    """
    # Python accepts True and False as integers, but they are not rates.
    if isinstance(rate, bool) or not isinstance(rate, int | float | Fraction):
        raise CalibrationInputError(what, rate, "a number in [0, 1]")
    if not 0 <= rate <= 1:
        raise CalibrationInputError(what, rate, "a number in [0, 1]")
    if isinstance(rate, Fraction):
        return rate
    return Fraction(repr(float(rate)))


def check_fraction(name: str, value: float) -> None:
    """Raise an error unless the number is strictly between 0 and 1.

    :raises CalibrationInputError: for a value outside (0, 1), or NaN.
    """
    if not 0 < value < 1:
        raise CalibrationInputError(name, value, "a number strictly between 0 and 1")


@dataclass(frozen=True, slots=True)
class RateCheck:
    """A realised rate compared with the nominal rate.

    `standing` is "held" if the rate is inside `coin`, the interval that contains 95 % of the rates
    of independent coins. It is "left" if the rate is outside `band`, and otherwise "unclear".
    `band` contains 99 % of the rates of on-target runs, if the rate varies between their questions
    as much as here. A gate that works is therefore called off target once in 100 runs. After very
    few decisions, a rate inside `coin` is "unclear" too: see `has_few_decisions`.
    """

    standing: Standing
    nominal: float
    share: float
    decisions: int
    questions: int
    coin: tuple[float, float]
    band: tuple[float, float]

    @property
    def has_few_decisions(self) -> bool:
        """Return True if the rate is inside `coin`, but a rate of 0 or of twice the nominal rate
        would be inside too, so that the decisions show nothing.
        """
        low, high = self.coin
        return low <= self.share <= high and _shows_nothing(self.coin, self.nominal)

    def __str__(self) -> str:
        share = (
            f"{self.share * self.decisions:,.0f} of {counted(self.decisions, 'chunk')} escalated "
            f"({100 * self.share:.1f} %), nominal rate {100 * self.nominal:g} %"
        )
        if self.standing == "left":
            return (
                f"{share}: off target, because 99 % of on-target runs have a rate in "
                f"{_interval_text(self.band)}"
            )
        if self.has_few_decisions:
            return (
                f"{share}: too few decisions to tell whether the rate is on target; chance alone "
                f"would give a rate in {_interval_text(self.coin)} (95 %)"
            )
        if self.standing == "unclear":
            return (
                f"{share}: too few questions to tell whether the rate is on target. With "
                f"independent decisions, an on-target rate would be in {_interval_text(self.coin)} "
                f"(95 %); given how much the rates of these {counted(self.questions, 'question')} "
                f"differ, in {_interval_text(self.band)} (99 %)"
            )
        low, high = self.coin
        # After few decisions the interval is wide, so "inside the interval" proves little. The text
        # then shows the interval, so that readers see how wide it is.
        is_wide = (high - low) / 2 > min(self.nominal, 1 - self.nominal) / 2
        width = (
            "; with so few decisions, chance alone would give a rate in "
            f"{_interval_text(self.coin)} (95 %)"
            if is_wide
            else ""
        )
        return f"{share}{width}: on target"


def check_rate(rate: Rate, questions: Sequence[tuple[int, int]]) -> RateCheck:
    """Compare the realised rate with `rate`, given a pair (decisions, escalated) for each question.

    :raises CalibrationInputError: if there is no decision, or if a question has more escalations
    than decisions.

    >>> check_rate(0.2, [(20, 4)] * 10).standing, check_rate(0.2, [(20, 9)] * 10).standing
    ('held', 'left')
    >>> check_rate(0.2, [(20, 1), (20, 18), (20, 0), (20, 9), (20, 3)]).standing
    'unclear'
    """
    nominal = float(exact_rate(rate))
    # Array of shape [questions, 2]: the number of decisions and the number of escalations of each
    # question.
    rows = np.array([row for row in questions if row[0]], float).reshape(-1, 2)
    if not len(rows) or (rows[:, 1] > rows[:, 0]).any() or (rows < 0).any():
        raise CalibrationInputError(
            "questions",
            list(questions)[:5],
            "a pair (decisions, escalated) for each question, and at least one decision in total",
        )
    decisions = int(rows[:, 0].sum())
    share = float(rows[:, 1].sum() / rows[:, 0].sum())
    coin = coin_band(decisions, nominal)
    reach = _clustered_reach(rows, share, nominal)
    band = (min(coin[0], max(0.0, nominal - reach)), max(coin[1], min(1.0, nominal + reach)))
    standing: Standing = "left"
    if coin[0] <= share <= coin[1]:
        standing = "unclear" if _shows_nothing(coin, nominal) else "held"
    elif band[0] <= share <= band[1]:
        standing = "unclear"
    return RateCheck(
        standing, nominal, share, decisions=decisions, questions=len(rows), coin=coin, band=band
    )


def _shows_nothing(coin: tuple[float, float], nominal: float) -> bool:
    """Return True if the interval contains a rate of 0, or a rate of 1 or of twice the nominal
    rate. At the nominal rates 0 and 1, any other rate is off target, so the result is False.
    """
    low, high = coin
    return 0 < nominal < 1 and (low <= 0 or high >= min(1, 2 * nominal))


def coin_band(n: int, rate: float | None, confidence: float = COIN) -> tuple[float, float]:
    """Return an interval that contains the share of heads of `n` coins with a probability of at
    least `confidence`.

    The ends are quantiles of the binomial distribution, so that no normal approximation is needed
    for few decisions or rates near 0. If `rate` is None, the interval is [0, 1].

    >>> coin_band(100, 0.2)
    (0.12, 0.28)
    """
    if rate is None:
        return 0.0, 1.0
    tail = (1 - confidence) / 2
    low = binomial_quantile(tail, n, rate) / n
    high = binomial_quantile(1 - tail, n, rate) / n
    return low, high


def _clustered_reach(rows: NDArray[np.float64], share: float, nominal: float) -> float:
    """Return how far an on-target run's rate may be from the nominal rate, given how much the rate
    varies between questions.

    Decisions on one question are correlated, so each question counts as one observation. The
    standard error is that of a ratio of two sums over questions (Cochran, "Sampling Techniques",
    chapter 6). The quantile is that of Student's t for the number of questions, which are assumed
    to be independent. The result is never below the half-width for independent decisions.
    """
    count = len(rows)
    decisions = float(rows[:, 0].sum())
    if count < 2:
        return 1.0
    residuals = rows[:, 1] - share * rows[:, 0]
    error = math.sqrt(count / (count - 1) * float((residuals**2).sum())) / decisions
    coin_error = math.sqrt(nominal * (1 - nominal) / decisions)
    return student_quantile((1 + _CLUSTERED) / 2, count - 1) * max(error, coin_error)


def _interval_text(ends: tuple[float, float]) -> str:
    return f"[{ends[0]:.3f}, {ends[1]:.3f}]"


Scores = Sequence[float] | NDArray[np.float64]
Clusters = Mapping[Any, Scores]


def split_rank(n: int, rate: Rate) -> int:
    """Return k = ceil((n + 1)(1 - rate)) in exact arithmetic.

    A new exchangeable score is above the k-th smallest of n stored scores with probability at most
    `rate`. (Vovk et al., "Algorithmic Learning in a Random World", 2005; Lei et al., 2018.) If k >
    n, there are too few scores to guarantee this rate.

    >>> split_rank(9, 0.3), split_rank(8, 0.1)
    (7, 9)
    """
    return math.ceil((n + 1) * (1 - exact_rate(rate)))


def split_threshold(stored: Scores, rate: Rate) -> float:
    """Return the k-th smallest stored score; scores above it are escalated.

    A new exchangeable score is escalated with a probability in (rate - 1/(n+1), rate], over draws
    of stored and new scores. The lower end of this range holds only without ties. The threshold is
    +inf (never escalate) if n is too small, and -inf at rate 1.

    :raises CalibrationInputError: if a score is NaN, or the scores are not one list of numbers.
    """
    k = split_rank(len(stored), rate)
    ordered = np.sort(np.asarray(stored, float))
    if ordered.ndim != 1:
        raise CalibrationInputError("stored scores", ordered.shape, "one list of numbers")
    # `np.sort` puts NaN last, so checking the last score is enough.
    if len(ordered) and np.isnan(ordered[-1]):
        raise CalibrationInputError("stored score", math.nan, "a number")
    if k > len(ordered):
        return math.inf
    if k < 1:
        return -math.inf
    return float(ordered[k - 1])


def coverage_interval(n: int, k: int, confidence: float = 0.9) -> tuple[float, float]:
    """Return an interval for the fraction of chunks that are accepted if the threshold is the k-th
    smallest of n scores.

    For independent continuous scores, this fraction has the distribution Beta(k, n + 1 - k) over
    draws of the stored scores. The result is the central interval of this distribution (Vovk,
    "Conditional validity of inductive conformal predictors", 2012). With ties the accepted fraction
    can only be larger.
    """
    check_fraction("confidence", confidence)
    if not 1 <= k <= n:
        raise CalibrationInputError("rank", k, f"between 1 and {n}")
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    low, high = beta_quantile(tails, k, n + 1 - k)
    return float(low), float(high)


def long_run(n: int, rate: Rate) -> tuple[float, float]:
    """Return the 90 % interval of the long-run escalation rate at the split threshold of n
    independent scores.
    """
    rank = min(n, max(1, split_rank(n, rate)))
    low, high = coverage_interval(n, rank)
    return 1 - high, 1 - low


@dataclass(frozen=True, slots=True)
class ClusterSummary:
    """The number of scores, the number of their questions, and the effective sample size."""

    scores: int
    clusters: int
    icc: float  # intraclass correlation of the scores of a question; NaN if it cannot be estimated
    effective: float

    def __str__(self) -> str:
        scores, questions = counted(self.scores, "score"), counted(self.clusters, "question")
        icc = "unknown" if math.isnan(self.icc) else f"{self.icc:.2f}"
        effective = f"effective sample size {self.effective:,.0f}"
        return f"{scores} in {questions}, intraclass correlation {icc}, {effective}"


def by_cluster(scores: Scores, labels: Sequence[Hashable]) -> dict[Hashable, NDArray[np.float64]]:
    """Group the scores by their labels; return the clusters in order of first appearance.

    :raises CalibrationInputError: if scores and labels differ in number.
    """
    if len(scores) != len(labels):
        raise CalibrationInputError(
            "labels", len(labels), f"one label for each of {counted(len(scores), 'score')}"
        )
    clusters = dict[Hashable, list[float]]()
    for score, label in zip(scores, labels, strict=True):
        clusters.setdefault(label, []).append(float(score))
    return {label: np.array(values) for label, values in clusters.items()}


def summarise(clusters: Clusters) -> ClusterSummary:
    """Return the size, one-way intraclass correlation and effective sample size of the clustered
    scores.

    The effective size is N / (1 + (k - 1) ICC), by Kish's design effect, where k is the
    size-weighted mean cluster size. A mean or a threshold of these scores is as uncertain as if it
    came from this number of independent scores. The formula assumes that clusters are independent,
    and that the correlation between two members is the same in all clusters.

    The correlation is computed without infinite scores. It is NaN if it cannot be estimated, such
    as for a single cluster or for one score per cluster. The effective size is then the number of
    clusters.
    """
    values = [np.asarray(scores, float) for scores in clusters.values() if len(scores)]
    sizes = np.array([len(scores) for scores in values], float)
    total = int(sizes.sum())
    finite = [scores[np.isfinite(scores)] for scores in values]
    icc = _intraclass_correlation([scores for scores in finite if len(scores)])
    if math.isnan(icc):
        return ClusterSummary(total, len(values), icc, float(len(values)))
    typical_size = float((sizes**2).sum() / sizes.sum())
    # Treat a negative estimate of the correlation as 0. Otherwise the effective sample size would
    # exceed the number of scores.
    effective = total / (1 + (typical_size - 1) * max(0.0, icc))
    return ClusterSummary(total, len(values), icc, effective)


def _intraclass_correlation(clusters: list[NDArray[np.float64]]) -> float:
    """Estimate the intraclass correlation by one-way ANOVA for clusters of unequal size (Donner,
    1986). Return NaN if it cannot be estimated.
    """
    sizes = np.array([len(scores) for scores in clusters], float)
    groups = len(clusters)
    total = sizes.sum()
    if groups < 2 or total == groups:
        return math.nan
    means = np.array([scores.mean() for scores in clusters])
    grand = float((sizes * means).sum() / total)
    between = float((sizes * (means - grand) ** 2).sum()) / (groups - 1)
    squares = sum(float(((scores - scores.mean()) ** 2).sum()) for scores in clusters)
    within = squares / (total - groups)
    k = (total - (sizes**2).sum() / total) / (groups - 1)
    spread = between + (k - 1) * within
    if spread <= 0:
        return math.nan
    return float((between - within) / spread)
