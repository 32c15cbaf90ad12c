"""Interval estimates clustered by problem: samples of one problem are not independent."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atts.errors import OptionError
from atts.evaluators.metrics.wilson import wilson_interval
from atts.sampling import normal_quantile, student_quantile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its interval and what it rests on; NaN where it is undefined, `note` saying
    why.
    """

    value: float
    low: float
    high: float
    n_problems: int
    n_samples: int
    method: str
    level: float = 0.95
    note: str = ""
    unscored: int = 0  # counted wrong
    if_right: tuple[float, float, float] | None = None  # value and interval, were they right

    def __str__(self) -> str:
        each, rest = divmod(self.n_samples, self.n_problems or 1)
        many = (
            f" × {each}"
            if not rest and each > 1
            else f", {self.n_samples:,} samples"
            if rest
            else ""
        )
        basis = f"{self.n_problems:,} problem{'s' * (self.n_problems != 1)}{many}"
        note = "".join(f"; {part}" for part in (self.note, self.doubt) if part)
        if math.isnan(self.value):
            return f"undefined ({basis}{note})"
        ends = f"[{_digits(self.low)}, {_digits(self.high)}]"
        return f"{_digits(self.value)} {ends} ({self.level * 100:g} % {self.method}, {basis}{note})"

    @property
    def doubt(self) -> str:
        """What could not be scored, and what it could change."""
        if self.if_right is None:
            return ""
        value, low, high = self.if_right
        return f"{self.unscored:,} unscored: {value:.3f} [{low:.3f}, {high:.3f}] were they right"

    def brief(self, missing: str = "undefined") -> str:
        """The number with its interval and what is unscored; `missing` where there was nothing to
        count.
        """
        if math.isnan(self.value):
            return missing
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]" + (
            f" ({self.doubt})" if self.unscored else ""
        )

    def signed(self) -> str:
        """A difference with its interval, each end with its sign."""
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    def beside(self, best: "Estimate", unscored: int) -> "Estimate":
        """This estimate, which counts so many unscored as wrong, with the one that counts them
        right.
        """
        return (
            replace(self, unscored=unscored, if_right=(best.value, best.low, best.high))
            if unscored
            else self
        )

    def as_json(self) -> dict[str, object]:
        """The fields; NaN becomes None, for strict JSON."""
        return {name: None if value != value else value for name, value in asdict(self).items()}


def mean_estimate(values: ArrayLike, n_samples: int, *, level: float = 0.95) -> Estimate:
    """The mean of one value per problem, each in [0, 1], with Wilson's interval over problems like
    these.

    A NaN among the values makes the estimate undefined.
    """
    array = np.asarray(values, dtype=np.float64)
    check_level(level)
    if undefined := int(np.isnan(array).sum()) or array.size == 0:
        note = (
            f"undefined for {undefined} of {array.size} problems" if array.size else "no problems"
        )
        return undefined_estimate(array.size, n_samples, level, note)
    return _clustered(array, np.ones(array.size), (array.size, n_samples), level)


def accuracy_estimate(right: Iterable[bool | float | None]) -> Estimate:
    """The share of problems that are right; None, for what could not be scored, counts as wrong;
    its reach is told.
    """
    known = list(right)
    worst, best = (
        [float(instead if one is None else one) for one in known] for instead in (0.0, 1.0)
    )
    return mean_estimate(worst, len(known)).beside(
        mean_estimate(best, len(known)), known.count(None)
    )


def share_estimate(counts: Iterable[tuple[int, int]], *, level: float = 0.95) -> Estimate:
    """The share counted of all there were, a pair (counted, of) being a problem's; Wilson,
    clustered by problem.

    A problem with more of them weighs more, unlike in `mean_estimate`.
    """
    check_level(level)
    table = np.asarray([pair for pair in counts if pair[1]], dtype=np.float64).reshape(-1, 2)
    if not len(table):
        return undefined_estimate(0, 0, level, "nothing to count")
    return _clustered(table[:, 0], table[:, 1], (1, int(table[:, 1].sum())), level)


def _clustered(right: Floats, of: Floats, range_of_n: tuple[int, int], level: float) -> Estimate:
    """A ratio of totals over problems, with Wilson's interval at its effective n.

    That is how many independent draws would vary as much as the problems' residuals do with half a
    problem all right and half a one all wrong added: near 0 and 1 the problems seen spread too
    little, and Student's t and the bootstrap end too early (`scripts/bench statistics`;
    tests/evaluators/test_intervals.py repeats the edges).
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
    n = (
        effective_n(moderate, squares / total**2, *range_of_n)
        if 0 < value < 1 and problems > 1
        else problems
    )
    # n is a guess from the spread: t, not the normal
    freedom = problems - 1 if samples > problems > 1 else math.inf
    low, high = wilson_interval(value, n, reach(freedom, level))
    return Estimate(value, low, high, problems, samples, "wilson", level=level)


def effective_n(mean: float, variance: float, units: int, samples: int) -> float:
    """How many independent draws would give this variance of the mean: between the units and the
    samples.

    All right, or all wrong, says nothing of the spread: then the units count, not the samples.
    """
    if samples <= units or mean in (0.0, 1.0) or math.isnan(variance):
        return float(units)
    return min(max(mean * (1 - mean) / variance if variance > 0 else math.inf, units), samples)


def undefined_estimate(n_problems: int, n_samples: int, level: float, note: str) -> Estimate:
    """No number, and why."""
    return Estimate(
        math.nan, math.nan, math.nan, n_problems, n_samples, "none", level=level, note=note
    )


def check_level(level: float) -> None:
    """Raises OptionError unless it is a probability strictly between 0 and 1."""
    if not 0 < level < 1:
        raise OptionError("level", f"{level!r} is not between 0 and 1")


def reach(freedom: float, level: float) -> float:
    """How many standard deviations hold `level`: Student's t, the normal for infinite freedom."""
    tail = (1 + level) / 2
    return normal_quantile(tail) if math.isinf(freedom) else student_quantile(tail, freedom)


def _digits(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.4g}"
