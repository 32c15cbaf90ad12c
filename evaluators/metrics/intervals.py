"""Interval estimates clustered by problem, because samples of one problem are not independent."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atts.errors import OptionError, counted
from atts.evaluators.metrics.wilson import wilson_interval
from atts.sampling import normal_quantile, student_quantile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Rounding errors in sums of floats may put a share outside [0, 1], by at most this much.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate with its interval and sample size.

    If the value is not defined, it is NaN and `note` says why.
    """

    value: float
    low: float
    high: float
    n_problems: int
    n_samples: int
    method: str
    level: float = 0.95
    note: str = ""
    unscored: int = 0  # number of problems whose answers could not be scored; they count as wrong
    # (value, low, high) as they would be if all unscored problems were correct
    if_right: tuple[float, float, float] | None = None

    def __str__(self) -> str:
        each, rest = divmod(self.n_samples, self.n_problems or 1)
        many = ""
        if rest:
            many = f", {counted(self.n_samples, 'sample')}"
        elif each > 1:
            many = f" × {each}"
        basis = counted(self.n_problems, "problem") + many
        note = "".join(f"; {part}" for part in (self.note, self.doubt) if part)
        if math.isnan(self.value):
            return f"undefined ({basis}{note})"
        ends = f"[{_digits(self.low)}, {_digits(self.high)}]"
        return f"{_digits(self.value)} {ends} ({self.level * 100:g} % {self.method}, {basis}{note})"

    @property
    def doubt(self) -> str:
        """Return a note on unscored problems: how many there are, and the estimate if all were
        correct.
        """
        if self.if_right is None:
            return ""
        value, low, high = self.if_right
        return (
            f"{self.unscored:,} unscored: {value:.3f} [{low:.3f}, {high:.3f}] if these were correct"
        )

    def brief(self, missing: str = "undefined") -> str:
        """Return the estimate with its interval as a string, with a note on unscored problems.

        `missing` is returned instead if the estimate is undefined.
        """
        if math.isnan(self.value):
            return missing
        note = f" ({self.doubt})" if self.unscored else ""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]{note}"

    def counted(self) -> str:
        """Return a share with its numerator and denominator, such as "0.250 (5 of 20)".

        A realised rate is exact, so it needs no interval.
        """
        if math.isnan(self.value):
            return "nothing to count"
        return f"{self.value:.3f} ({self.value * self.n_samples:,.0f} of {self.n_samples:,})"

    def signed(self) -> str:
        """Return a difference and its interval as a string, each number with a plus or minus
        sign.
        """
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    def with_best_case(self, best: "Estimate", unscored: int) -> "Estimate":
        """Return a copy of this estimate that also records `best`, the estimate if all unscored
        problems were correct.
        """
        if not unscored:
            return self
        return replace(self, unscored=unscored, if_right=(best.value, best.low, best.high))

    def as_json(self) -> dict[str, object]:
        """Return the fields as a dictionary for JSON. NaN becomes None, because JSON has no NaN."""
        fields: dict[str, object] = asdict(self)
        return {name: None if value != value else value for name, value in fields.items()}


def mean_estimate(values: ArrayLike, n_samples: int, *, level: float = 0.95) -> Estimate:
    """Return the mean of one value per problem, each between 0 and 1, with Wilson's interval.

    The interval is for the mean over the population of problems. The estimate is undefined if any
    value is NaN.

    :raises OptionError: if a value is outside [0, 1], or the level outside (0, 1).
    """
    array = np.asarray(values, dtype=np.float64)
    check_level(level)
    outside = array[(array < -_ROUNDING) | (array > 1 + _ROUNDING)]
    if outside.size:
        raise OptionError(
            "values", f"{float(outside[0])!r} is outside [0, 1], so it is not a share"
        )
    array = np.clip(array, 0.0, 1.0)
    if array.size == 0:
        return undefined_estimate(0, n_samples, level, "no problems")
    undefined = int(np.isnan(array).sum())
    if undefined:
        note = f"the value is undefined for {undefined} of {counted(array.size, 'problem')}"
        return undefined_estimate(array.size, n_samples, level, note)
    return _clustered(array, np.ones(array.size), (array.size, n_samples), level)


def accuracy_estimate(right: Iterable[bool | float | None]) -> Estimate:
    """Return the share of correct problems. None stands for an unscored problem, which counts as
    wrong.

    The estimate also has the share that would result if the unscored problems were correct.
    """
    verdicts = list(right)
    n = len(verdicts)
    worst = mean_estimate([float(one or 0) for one in verdicts], n)
    best = mean_estimate([1.0 if one is None else float(one) for one in verdicts], n)
    return worst.with_best_case(best, verdicts.count(None))


def share_estimate(counts: Iterable[tuple[int, int]], *, level: float = 0.95) -> Estimate:
    """Return the fraction of items with a property, such as escalated chunks among all chunks, with
    Wilson's interval clustered by problem.

    `counts` has a pair for each problem: the number of items with the property, and the number of
    all items. Problems with more items have more weight, unlike in `mean_estimate`.

    :raises OptionError: if a count is negative or above its total, or the level is outside (0, 1).
    """
    check_level(level)
    pairs = list(counts)
    impossible = next((pair for pair in pairs if not 0 <= pair[0] <= pair[1]), None)
    if impossible is not None:
        raise OptionError(
            "counts",
            f"{impossible[0]} of {impossible[1]} is not a share; give a count from 0 to its total",
        )
    table = np.asarray([pair for pair in pairs if pair[1]], dtype=np.float64).reshape(-1, 2)
    if not len(table):
        return undefined_estimate(0, 0, level, "nothing to count")
    return _clustered(table[:, 0], table[:, 1], (1, int(table[:, 1].sum())), level)


def _clustered(right: Floats, of: Floats, range_of_n: tuple[int, int], level: float) -> Estimate:
    """Return a ratio of sums over problems, with Wilson's interval at its effective sample size.

    The effective sample size is the number of independent draws whose mean would vary as much as
    this ratio.

    To estimate it, half a problem with only correct samples and half a problem with only wrong
    samples are added. Otherwise, intervals near 0 and 1 would be too short, as are those of
    Student's t and the bootstrap. `scripts/bench statistics` measures this, and
    tests/evaluators/test_intervals.py checks intervals near 0 and 1.
    """
    problems = len(of)
    total = float(of.sum())
    usual = float(of.mean())
    samples = range_of_n[1]
    value = float(right.sum()) / total
    moderate = (float(right.sum()) + usual / 2) / (total + usual)
    squares = (
        float(((right - moderate * of) ** 2).sum())
        + usual**2 * ((1 - moderate) ** 2 + moderate**2) / 2
    )
    n: float = problems
    if 0 < value < 1 and problems > 1:
        n = effective_n(moderate, squares / total**2, *range_of_n)
    # The effective sample size is only an estimate. So the interval uses Student's t distribution
    # instead of the normal distribution.
    freedom = problems - 1 if samples > problems > 1 else math.inf
    low, high = wilson_interval(value, n, reach(freedom, level))
    return Estimate(value, low, high, problems, samples, "wilson", level=level)


def effective_n(mean: float, variance: float, units: int, samples: int) -> float:
    """Return the number of independent draws whose mean would have this variance.

    The result is between `units` and `samples`. If all samples are correct, or all are wrong, the
    variance is unknown, and the result is `units`.
    """
    if samples <= units or mean in (0.0, 1.0) or math.isnan(variance):
        return float(units)
    draws = mean * (1 - mean) / variance if variance > 0 else math.inf
    return min(max(draws, units), samples)


def undefined_estimate(n_problems: int, n_samples: int, level: float, note: str) -> Estimate:
    """Return an undefined estimate, with the reason as its note."""
    return Estimate(
        math.nan, math.nan, math.nan, n_problems, n_samples, "none", level=level, note=note
    )


def check_level(level: float) -> None:
    """Raise OptionError unless the level is strictly between 0 and 1."""
    if not 0 < level < 1:
        raise OptionError("level", f"{level!r} is not between 0 and 1")


def reach(freedom: float, level: float) -> float:
    """Return the half-width of an interval with confidence `level`, in standard errors.

    Student's t distribution is used, or the normal distribution if the degrees of freedom are
    infinite.
    """
    tail = (1 + level) / 2
    return normal_quantile(tail) if math.isinf(freedom) else student_quantile(tail, freedom)


def _digits(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.4g}"
