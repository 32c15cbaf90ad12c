"""Seeded random streams, and the classical distributions whose quantiles the intervals need."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import scipy  # scipy.special only: scipy.stats takes a second to import
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Seed:
    """The name of one random stream; `purpose` separates streams of one request (sampling,
    tie-breaking, latency).
    """

    run: int = 0
    problem: str = ""
    sample: int = 0
    turn: int = 0
    role: str = "draft"
    attempt: int = 0
    purpose: str = "sample"

    def key(self) -> int:
        """128 bits that name the stream; equal on every machine and in every version."""
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
    """A fresh generator at position 0 of the stream."""
    return np.random.Generator(np.random.Philox(key=seed.key()))


def uniforms(seed: Seed, count: int) -> NDArray[np.float64]:
    """The first `count` uniforms in [0, 1) of the stream; a longer call starts with the shorter
    one's numbers.

    >>> bool((uniforms(Seed(run=7), 8)[:3] == uniforms(Seed(run=7), 3)).all())
    True
    """
    return generator(seed).random(count)


def normal_quantile(share: float) -> float:
    """The value that a standard normal stays below with probability `share`."""
    return float(scipy.special.ndtri(share))


def student_quantile(share: float, freedom: float) -> float:
    """The value that Student's t with so many degrees of freedom stays below with probability
    `share`.
    """
    return float(scipy.special.stdtrit(freedom, share))


def beta_quantile(share: ArrayLike, a: ArrayLike, b: ArrayLike) -> Floats:
    """The value that Beta(a, b) stays below with probability `share`."""
    return _floats(scipy.special.betaincinv(_floats(a), _floats(b), _floats(share)))


def beta_upper_quantile(share: float, a: float, b: float) -> float:
    """The value that Beta(a, b) exceeds with probability `share`."""
    return float(scipy.special.betainccinv(a, b, share))


def binomial_cdf(count: ArrayLike, n: ArrayLike, chance: float) -> Floats:
    """P(Bin(n, chance) <= count), `count` a whole number.

    >>> float(binomial_cdf(1, 2, 0.5))
    0.75
    """
    counts, sizes = np.broadcast_arrays(_floats(count), _floats(n))
    inside = np.clip(counts, 0, np.maximum(sizes - 1, 0))
    below = scipy.special.betaincc(inside + 1, np.maximum(sizes - inside, 1), chance)
    return _floats(np.where(counts < 0, 0.0, np.where(counts >= sizes, 1.0, below)))


def binomial_tail(count: int, n: int, chance: float) -> float:
    """P(Bin(n, chance) > count)."""
    return (
        1.0
        if count < 0
        else 0.0
        if count >= n
        else float(scipy.special.betainc(count + 1, n - count, chance))
    )


def binomial_pmf(count: int, n: ArrayLike, chance: float) -> Floats:
    """P(Bin(n, chance) = count), 0 for any of `n` smaller than `count`."""
    sizes = np.maximum(_floats(n), count)
    logs = scipy.special.xlogy(count, chance) + scipy.special.xlog1py(sizes - count, -chance)
    return _floats(np.where(sizes > n, 0.0, np.exp(_log_choose(sizes, count) + logs)))


def binomial_quantile(share: float, n: int, chance: float) -> int:
    """The smallest count that Bin(n, chance) does not exceed with at least the probability `share`."""
    return int(np.searchsorted(binomial_cdf(np.arange(n + 1), n, chance), share))


def hypergeometric_tail(least: int, n: ArrayLike, right: ArrayLike, drawn: int) -> Floats:
    """P(at least so many of `drawn` are right), drawn without replacement from `n` of which some
    are right.

    NaN where there are fewer than are drawn.
    """
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
    """The logarithm of the binomial coefficient, for k <= n."""
    return _floats(-scipy.special.betaln(np.add(k, 1.0), np.subtract(n, k) + 1.0) - np.log1p(n))


def _floats(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)
