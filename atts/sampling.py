"""Seeded random streams, and quantiles and tails of classical distributions for intervals and
tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

# numpy is imported inside the functions that use it, so commands that draw no random numbers start
# faster. This module computes quantiles itself, because scipy would be more than a third of the
# installed size.

# Limit on the steps in which the continued fraction of the beta distribution is computed. Usually,
# the square root of the number of trials is enough.
_MOST_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class Seed:
    """The identity of one random stream.

    Every random number depends only on the fields below and on its position in the stream. So the
    numbers are the same in any schedule, in any batch and after a restart. `purpose` separates the
    streams of one request, such as sampling and tie-breaking.
    """

    run: int = 0
    problem: str = ""
    sample: int = 0
    turn: int = 0
    role: str = "draft"
    attempt: int = 0
    purpose: str = "sample"

    def key(self) -> int:
        """Return the stream's 128-bit key, which is the same on every machine and in every version
        of atts.
        """
        fields = (
            self.run,
            self.problem,
            self.sample,
            self.turn,
            self.role,
            self.attempt,
            self.purpose,
        )
        text = "\x1f".join(str(field) for field in fields)
        return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "big")


def generator(seed: Seed) -> np.random.Generator:
    """Return a new random number generator (NumPy's Philox) at the start of the stream."""
    import numpy as np

    return np.random.Generator(np.random.Philox(key=seed.key()))


def uniforms(seed: Seed, count: int) -> NDArray[np.float64]:
    """Return the first `count` uniform numbers of the stream, each in [0, 1).

    A call with a larger `count` returns the same numbers, followed by more.

    >>> bool((uniforms(Seed(run=7), 8)[:3] == uniforms(Seed(run=7), 3)).all())
    True
    """
    return generator(seed).random(count)


def normal_quantile(share: float) -> float:
    """Return the quantile of the standard normal distribution at the probability `share`."""
    return NormalDist().inv_cdf(share)


def student_quantile(share: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution at the probability `share`, for `freedom`
    degrees of freedom.

    >>> round(student_quantile(0.975, 29), 4)
    2.0452
    """
    # If t has Student's distribution, t^2 / (freedom + t^2) has the distribution Beta(1/2, freedom
    # / 2). The odds of this fraction are t^2 / freedom.
    tail = 2 * min(share, 1 - share)
    odds = math.exp(-_beta_log_odds(tail, freedom / 2, 0.5)) if tail < 1 else 0.0
    return math.copysign(math.sqrt(freedom * odds), share - 0.5)


def student_tail(value: float, freedom: float) -> float:
    """Return P(|T| > value) for a positive value, where T has Student's t distribution with
    `freedom` degrees of freedom.

    >>> round(student_tail(2.0452, 29), 4)
    0.05
    """
    square = value * value
    if square == 0:
        return 1.0
    # `part` and `rest` add up to 1. Computing 1 - `part` would lose digits, so each has a formula.
    rest = freedom / (freedom + square)
    part = square / (freedom + square)
    return math.exp(_beta_log_tails(rest, part, freedom / 2, 0.5)[0]) if rest else 0.0


def beta_quantile(share: ArrayLike, a: ArrayLike, b: ArrayLike) -> Floats:
    """Return the quantile of Beta(a, b) at the probability `share`.

    >>> round(float(beta_quantile(0.025, 1, 9)), 4)
    0.0028
    """
    import numpy as np

    return _floats(np.vectorize(_beta_quantile, otypes=[float])(share, a, b))


def beta_upper_quantile(share: float, a: float, b: float) -> float:
    """Return the value that a Beta(a, b) variable exceeds with probability `share`."""
    return 1 - _beta_quantile(share, b, a)


def beta_tails(value: float, a: float, b: float) -> tuple[float, float]:
    """Return P(Beta(a, b) <= value) and P(Beta(a, b) > value), both with full relative precision.

    >>> [round(tail, 9) for tail in beta_tails(0.5, 1, 3)]
    [0.875, 0.125]
    """
    if value <= 0:
        return 0.0, 1.0
    if value >= 1:
        return 1.0, 0.0
    below, above = _beta_log_tails(value, 1 - value, a, b)
    return math.exp(below), math.exp(above)


def binomial_cdf(count: ArrayLike, n: ArrayLike, chance: float) -> Floats:
    """Return P(Bin(n, chance) <= count) for an integer `count`.

    >>> round(float(binomial_cdf(1, 2, 0.5)), 9)
    0.75
    """
    import numpy as np

    def of_one(count: float, n: float) -> float:
        return _binomial_tails(count, n, chance)[0]

    return _floats(np.vectorize(of_one, otypes=[float])(count, n))


def binomial_tail(count: int, n: int, chance: float) -> float:
    """Return P(Bin(n, chance) > count)."""
    return _binomial_tails(count, n, chance)[1]


def binomial_pmf(count: int, n: ArrayLike, chance: float) -> Floats:
    """Return P(Bin(n, chance) = count), which is 0 for every `n` smaller than `count`."""
    import numpy as np

    sizes = _floats(n)
    enough = np.maximum(sizes, count)
    if chance in (0, 1):
        certain = 0 if chance == 0 else enough
        return _floats(np.where((sizes >= count) & (certain == count), 1.0, 0.0))
    powers = count * math.log(chance) + (enough - count) * math.log1p(-chance)
    return _floats(np.where(sizes < count, 0.0, np.exp(_log_choose(enough, count) + powers)))


def binomial_quantile(share: float, n: int, chance: float) -> int:
    """Return the smallest integer c for which P(Bin(n, chance) <= c) is at least `share`."""
    if float(binomial_cdf(0, n, chance)) >= share:
        return 0
    # In each step, P(Bin(n, chance) <= low) is below `share`, and P(Bin(n, chance) <= high) is not.
    low = 0
    high = n
    while high - low > 1:
        middle = (low + high) // 2
        if float(binomial_cdf(middle, n, chance)) >= share:
            high = middle
        else:
            low = middle
    return high


def hypergeometric_tail(least: int, n: ArrayLike, right: ArrayLike, drawn: int) -> Floats:
    """Return the probability that a random sample of `drawn` items, out of `n`, has at least
    `least` correct items.

    The items are drawn without replacement, and `right` of the `n` items are correct. The result is
    NaN if `n` is smaller than `drawn`.
    """
    import numpy as np

    def of_one(n: float, right: float) -> float:
        return _hypergeometric_tail(least, int(n), int(right), drawn)

    return _floats(np.vectorize(of_one, otypes=[float])(n, right))


# Many problems need this probability, but with few different arguments, so it is cached.
@lru_cache(maxsize=1 << 16)
def _hypergeometric_tail(least: int, n: int, right: int, drawn: int) -> float:
    if n < drawn:
        return math.nan
    wrong = n - right
    ways = sum(
        math.comb(right, count) * math.comb(wrong, drawn - count)
        for count in range(least, drawn + 1)
    )
    return ways / math.comb(n, drawn)


def _binomial_tails(count: float, n: float, chance: float) -> tuple[float, float]:
    """Return P(Bin(n, chance) <= count) and P(Bin(n, chance) > count)."""
    if count < 0:
        return 0.0, 1.0
    if count >= n:
        return 1.0, 0.0
    above, below = beta_tails(chance, count + 1, n - count)
    return below, above


def _beta_quantile(share: float, a: float, b: float) -> float:
    if share <= 0:
        return 0.0
    if share >= 1:
        return 1.0
    return 1 / (1 + math.exp(-_beta_log_odds(share, a, b)))


def _beta_log_odds(share: float, a: float, b: float) -> float:
    """Return the quantile x of Beta(a, b) at a `share` inside (0, 1), as log(x / (1 - x)).

    The logarithms of both tail probabilities are concave functions of log(x / (1 - x)). So Newton's
    steps approach the solution from one side and never pass it.
    """
    is_lower = share <= 0.5
    wanted = math.log(share) if is_lower else math.log1p(-share)
    odds = math.log(a / b)
    for _ in range(100):  # Newton's method; in practice, fewer than ten steps are needed
        value = 1 / (1 + math.exp(-odds))
        rest = 1 / (1 + math.exp(odds))
        below, above = _beta_log_tails(value, rest, a, b)
        density = a * math.log(value) + b * math.log(rest) - _log_beta(a, b)
        if is_lower:
            step = (wanted - below) * math.exp(below - density)
        else:
            step = (above - wanted) * math.exp(above - density)
        odds += step
        # The error is now about the square of this step, so another step would change nothing.
        if abs(step) <= 1e-9 * (1 + abs(odds)):
            break
    return odds


def _beta_log_tails(value: float, rest: float, a: float, b: float) -> tuple[float, float]:
    """Return the logarithms of P(Beta(a, b) <= value) and P(Beta(a, b) > value). `rest` is 1 -
    value. Compute it without a subtraction if possible: if `value` is close to 1, the subtraction
    loses digits.
    """
    # The continued fraction converges fast only below the mean. Above the mean, compute the other
    # tail, which is below its mean.
    if value * (a + b + 2) > a + 1:
        above, below = _beta_log_tails_below_mean(rest, value, b, a)
        return below, above
    return _beta_log_tails_below_mean(value, rest, a, b)


def _beta_log_tails_below_mean(
    value: float, rest: float, a: float, b: float
) -> tuple[float, float]:
    powers = a * math.log(value) + b * math.log(rest) - _log_beta(a, b)
    below = powers + math.log(_beta_fraction(value, a, b) / a)
    # After a rounding error, a probability could be larger than 1 and its logarithm positive.
    below = min(below, -1e-300)
    return below, math.log(-math.expm1(below))


def _beta_fraction(value: float, a: float, b: float) -> float:
    """Compute the continued fraction of the incomplete beta function by Lentz's method.

    DLMF 8.17.22, https://dlmf.nist.gov/8.17
    """
    upper = 1.0
    lower = 1 / (1 - (a + b) * value / (a + 1))
    result = lower
    for m in range(1, _MOST_STEPS):
        for numerator in (
            m * (b - m) * value / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * value / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            upper = 1 + numerator / upper
            lower = 1 / (1 + numerator * lower)
            result *= upper * lower
        if abs(upper * lower - 1) < 1e-15:
            break
    return result


def _log_beta(a: float, b: float) -> float:
    """Return log B(a, b). Use Stirling's formula, because a difference between large values of
    lgamma would lose digits.
    """
    total = a + b
    powers = (0.5 - a) * math.log1p(b / a) + (0.5 - b) * math.log1p(a / b)
    rests = _stirling_rest(a) + _stirling_rest(b) - _stirling_rest(total)
    return powers + 0.5 * math.log(2 * math.pi / total) + rests


def _stirling_rest(x: float) -> float:
    """Return the remainder of Stirling's approximation: log Gamma(x) - ((x - 1/2) log x - x + log(2
    pi) / 2).
    """
    if x < 16:
        return math.lgamma(x) - (x - 0.5) * math.log(x) + x - 0.5 * math.log(2 * math.pi)
    square = x * x
    series = 1 / 1260 - (1 / 1680 - 1 / (1188 * square)) / square
    return (1 / 12 - (1 / 360 - series / square) / square) / x


def _log_choose(n: ArrayLike, k: ArrayLike) -> Floats:
    """Return the logarithm of the binomial coefficient, for k <= n."""
    import numpy as np

    return _floats(np.vectorize(_log_choose_one, otypes=[float])(n, k))


@lru_cache(maxsize=1 << 16)
def _log_choose_one(n: float, k: float) -> float:
    return -_log_beta(k + 1, n - k + 1) - math.log1p(n)


def _floats(values: ArrayLike) -> Floats:
    import numpy as np

    return np.asarray(values, dtype=np.float64)
