"""Seeded random streams, and the classical distributions whose quantiles the intervals need."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

# numpy and scipy are imported where they are used: `atts.core` names seeds, and commands that draw
# nothing should not wait for them. Of scipy only `special` is used: scipy.stats takes a second.


@dataclass(frozen=True, slots=True)
class Seed:
    """The name of one random stream.

    Every uniform depends on (run seed, problem, sample, turn, role, attempt, purpose, position)
    alone, so any schedule, batch or restart draws the same numbers. `purpose` separates the streams
    of one request, such as sampling and tie-breaking.
    """

    run: int = 0
    problem: str = ""
    sample: int = 0
    turn: int = 0
    role: str = "draft"
    attempt: int = 0
    purpose: str = "sample"

    def key(self) -> int:
        """Return the stream's 128-bit key, which is equal on every machine and in every version."""
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
    """Return a new generator at position 0 of the stream; Philox is counter-based."""
    import numpy as np

    return np.random.Generator(np.random.Philox(key=seed.key()))


def uniforms(seed: Seed, count: int) -> NDArray[np.float64]:
    """Return the first `count` uniforms of the stream, each in [0, 1).

    A longer call begins with the numbers of a shorter call.

    >>> bool((uniforms(Seed(run=7), 8)[:3] == uniforms(Seed(run=7), 3)).all())
    True
    """
    return generator(seed).random(count)


def normal_quantile(share: float) -> float:
    """Return the standard normal quantile at `share`."""
    from scipy import special

    return float(special.ndtri(share))


def student_quantile(share: float, freedom: float) -> float:
    """Return the quantile at `share` of Student's t with `freedom` degrees of freedom."""
    from scipy import special

    return float(special.stdtrit(freedom, share))


def beta_quantile(share: ArrayLike, a: ArrayLike, b: ArrayLike) -> Floats:
    """Return the quantile at `share` of Beta(a, b)."""
    from scipy import special

    return _floats(special.betaincinv(_floats(a), _floats(b), _floats(share)))


def beta_upper_quantile(share: float, a: float, b: float) -> float:
    """Return the value that Beta(a, b) exceeds with probability `share`."""
    from scipy import special

    return float(special.betainccinv(a, b, share))


def binomial_cdf(count: ArrayLike, n: ArrayLike, chance: float) -> Floats:
    """Return P(Bin(n, chance) <= count) for an integer `count`.

    >>> float(binomial_cdf(1, 2, 0.5))
    0.75
    """
    import numpy as np
    from scipy import special

    counts, sizes = np.broadcast_arrays(_floats(count), _floats(n))
    inside = np.clip(counts, 0, np.maximum(sizes - 1, 0))
    below = special.betaincc(inside + 1, np.maximum(sizes - inside, 1), chance)
    return _floats(np.where(counts < 0, 0.0, np.where(counts >= sizes, 1.0, below)))


def binomial_tail(count: int, n: int, chance: float) -> float:
    """Return P(Bin(n, chance) > count)."""
    from scipy import special

    if count < 0:
        return 1.0
    if count >= n:
        return 0.0
    return float(special.betainc(count + 1, n - count, chance))


def binomial_pmf(count: int, n: ArrayLike, chance: float) -> Floats:
    """Return P(Bin(n, chance) = count), which is 0 for every `n` smaller than `count`."""
    import numpy as np
    from scipy import special

    sizes = np.maximum(_floats(n), count)
    logs = special.xlogy(count, chance) + special.xlog1py(sizes - count, -chance)
    return _floats(np.where(sizes > n, 0.0, np.exp(_log_choose(sizes, count) + logs)))


def binomial_quantile(share: float, n: int, chance: float) -> int:
    """Return the smallest count c with P(Bin(n, chance) <= c) >= `share`."""
    if float(binomial_cdf(0, n, chance)) >= share:
        return 0
    # invariant: the distribution function is below `share` at `low`, and not below at `high`
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
    """Return the chance of at least `least` correct items among `drawn` of `n`.

    The items are drawn without replacement, and `right` of the `n` are correct. The result is NaN
    where `n` is smaller than `drawn`.
    """
    import numpy as np

    counts = np.arange(least, drawn + 1)
    total, good = np.broadcast_arrays(_floats(n), _floats(right))
    bad = (total - good)[..., None]
    others = drawn - counts
    is_possible = (counts <= good[..., None]) & (others <= bad)
    logs = _log_choose(np.maximum(good[..., None], counts), counts) + _log_choose(
        np.maximum(bad, others), others
    )
    enough = np.maximum(total, drawn)
    chances = np.where(is_possible, np.exp(logs - _log_choose(enough, drawn)[..., None]), 0.0).sum(
        axis=-1
    )
    return _floats(np.where(total < drawn, np.nan, np.minimum(chances, 1.0)))


def _log_choose(n: ArrayLike, k: ArrayLike) -> Floats:
    """Return the logarithm of the binomial coefficient, for k <= n."""
    import numpy as np
    from scipy import special

    return _floats(-special.betaln(np.add(k, 1.0), np.subtract(n, k) + 1.0) - np.log1p(n))


def _floats(values: ArrayLike) -> Floats:
    import numpy as np

    return np.asarray(values, dtype=np.float64)
