"""Two-sample test of live against stored questions: two statistics, their joint null distribution
simulated.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from atts.calibration.clusters import summarise
from atts.calibration.stored import StoredScores

Floats = NDArray[np.float64]
_SPREAD_FROM = 3  # scores of a question from which its spread says anything


@dataclass(frozen=True, slots=True)
class QuestionSample:
    """The stored questions of one turn, each by its scores in their order."""

    questions: tuple[tuple[float, ...], ...]
    size: int  # scores of a typical question
    icc: float

    @classmethod
    def of(cls, stored: StoredScores, turn: int) -> QuestionSample:
        """The questions of one turn; scores of no question are questions of their own, infinite
        ones are left out.
        """
        parts = dict[str, list[float]]()
        rows = zip(stored.questions, stored.turns, stored.nonconformity, strict=True)
        for place, (question, at, nonconformity) in enumerate(rows):
            if at == turn and math.isfinite(nonconformity):
                parts.setdefault(question or f"chunk {place}", []).append(nonconformity)
        if not parts:
            return cls((), 1, 0.0)
        icc = summarise({name: np.array(scores) for name, scores in parts.items()}).icc
        size = int(np.median([len(scores) for scores in parts.values()]))
        return cls(
            tuple(map(tuple, parts.values())), size, 1.0 if math.isnan(icc) else max(0.0, icc)
        )

    @property
    def half(self) -> int:
        """The number of scores after which a live question is compared with `early`."""
        return max(1, math.ceil(self.size / 2))

    @property
    def early(self) -> list[float]:
        """The mean of the first half of each question's scores."""
        return [
            math.fsum(q[: self.half]) / self.half for q in self.questions if len(q) >= self.half
        ]

    def depth(self, live: Sequence[Sequence[float]]) -> int:
        """How many scores of each question to compare, the rest left out, so that the means are
        told best.

        Few scores of many questions or many of few: the variance of the difference of the means
        decides.
        """
        counts = np.array([len(scores) for scores in live])
        stored = np.array([len(scores) for scores in self.questions])
        best = 1
        least = math.inf
        for depth in sorted({int(count) for count in counts if count <= stored.max()}):
            ours = int((counts >= depth).sum())
            theirs = int((stored >= depth).sum())
            variance = (1 / ours + 1 / theirs) * (self.icc + (1 - self.icc) / depth)
            if variance <= least:
                best = depth
                least = variance
        return best


def features(questions: Sequence[Sequence[float]], depth: int) -> Floats:
    """Level, and spread where `depth` allows one, of the first scores of each question that has so
    many.
    """
    rows = np.array(
        [scores[:depth] for scores in questions if len(scores) >= depth], float
    ).reshape(-1, depth)
    columns = [rows.mean(axis=1)]
    if depth >= _SPREAD_FROM:
        columns.append(np.log(rows.std(axis=1, ddof=1) + 1e-6))
    return np.column_stack(columns)


def normal_scores(values: Floats, reference: Floats) -> Floats:
    """Each column by its place among the reference's, as a normal quantile: no outlier decides."""
    ordered = np.sort(reference, axis=0)
    places = [
        np.searchsorted(ordered[:, at], values[:, at], "left")
        + np.searchsorted(ordered[:, at], values[:, at], "right")
        for at in range(values.shape[1])
    ]
    share = (np.column_stack(places) + 1) / (2 * (len(reference) + 1))
    return np.asarray(
        scipy.special.ndtri(
            np.clip(share, 0.5 / (len(reference) + 1), 1 - 0.5 / (len(reference) + 1))
        ),
        float,
    )


_MOST = 256  # questions of either side that are compared
_DRAWS = 4_999  # of simulated clean runs
_GLANCE = 499  # of those, where they leave no doubt
_DOUBT = 0.1  # the p-value of a glance above which it decides
# weight of squared normal scores beside the scores: wider or narrower distributions are told sooner
_BEND = 0.5
_DIGITS = 9  # of a statistic that count: equal ones may differ by rounding

# of the mixture: normal ones with other means, widths and correlations than the stored one
_COMPONENTS = 128
# correlation of the shifts: scores of another model are higher and spread wider at once
_TOGETHER = 0.9
_STRETCH = 0.3  # SD of the logarithm of the change of width
# SD of the transformed correlation, in the half of the components that have another one
_TIES = 0.5
_AT_ONCE = 1024  # weightings whose ratios are in memory together
_FLAT = 0.1  # a column that hardly varies counts as if it varied this much


@dataclass(frozen=True, slots=True)
class TwoSampleTest:
    """What one look found.

    `drawn` is the p-value of "the live questions are draws of the stored ones", `exchangeable` that
    of "both are draws of one distribution", which is larger as the stored ones are then only a
    sample. Both are valid for any scores, as they are ranks among statistics of simulated clean
    runs; the second is only computed where the first is at most `significance`.
    """

    drawn: float
    exchangeable: float
    questions: int


def two_sample_test(
    stored: QuestionSample, live: Sequence[Sequence[float]], significance: float, seed: int
) -> TwoSampleTest:
    """Compare means and spreads of the latest live questions with those of the stored ones, as
    whole distributions.

    By an energy distance, which sees any difference, and a likelihood ratio against a mixture of
    shifted and stretched distributions, which sees those that another model makes sooner.
    """
    latest = live[-_MOST:]
    depth = stored.depth(latest)
    theirs = features(stored.questions[:: -(-len(stored.questions) // _MOST)], depth)
    ours = features(latest, depth)
    # draws of its own for each run, the same in a replay: common ones would make all runs err to
    # the same side
    draw = np.random.default_rng([seed, zlib.crc32(np.sort(ours, axis=None).tobytes())])
    drawn = _drawn(ours, theirs, _GLANCE, draw)
    if drawn <= max(_DOUBT, significance):
        drawn = _drawn(ours, theirs, _DRAWS, draw)
    return TwoSampleTest(
        drawn, _exchangeable(ours, theirs, draw) if drawn <= significance else 1.0, len(ours)
    )


def _drawn(ours: Floats, theirs: Floats, draws: int, draw: np.random.Generator) -> float:
    """The p-value of ours among so many runs of as many of theirs, drawn with replacement."""
    n = len(ours)
    k = len(theirs)
    at = draw.integers(k, size=(draws, n)) + k * np.arange(draws)[:, None]
    weights = np.zeros((draws + 1, n + k))
    weights[0, :n] = 1 / n  # as it is
    weights[1:, n:] = np.bincount(at.ravel(), minlength=draws * k).reshape(draws, k) / n
    live, stored = (normal_scores(each, theirs) for each in (ours, theirs))
    both = np.concatenate([live, stored])
    apart = _distances(both)
    energy = 2 * weights @ apart[:, n:].mean(axis=1) - np.einsum(
        "ij,ij->i", weights @ apart, weights
    )
    return _rank(energy, mixture_ratios(both, stored, weights, n))


def _exchangeable(ours: Floats, theirs: Floats, draw: np.random.Generator) -> float:
    """The same among all ways to call as many of the questions live: exact when both are draws of
    one distribution.
    """
    n = len(ours)
    k = len(theirs)
    both = np.concatenate([ours, theirs])
    both = normal_scores(both, both)
    apart = _distances(both)
    chosen = np.zeros((_DRAWS + 1, n + k))
    chosen[0, :n] = 1  # as it is
    places = np.argpartition(draw.random((_DRAWS, n + k)), n - 1, axis=1)[:, :n]
    np.put_along_axis(chosen[1:], places, 1.0, axis=1)
    inside = np.einsum("ij,ij->i", chosen @ apart, chosen)
    reach = chosen @ apart.sum(axis=1)
    whole = float(apart.sum())
    energy = 2 * (reach - inside) / (n * k) - inside / n**2 - (whole - 2 * reach + inside) / k**2
    return _rank(energy, mixture_ratios(both, both, chosen / n, n))


def _rank(*statistics: Floats) -> float:
    """The share of runs, the first among them, with as small a product of their p-values as the
    first has.
    """
    surprise = np.zeros(len(statistics[0]))
    for each in statistics:
        values = np.round(each, _DIGITS)
        surprise -= np.log(1 - np.searchsorted(np.sort(values), values, "left") / len(values))
    return float(np.mean(surprise >= surprise[0] - 1e-9))


def _distances(scores: Floats) -> Floats:
    """Between normal scores with their squares beside them: an energy distance then sees location
    and scale.
    """
    points = np.concatenate([scores, _BEND * (scores**2 - 1) / np.sqrt(2)], axis=1)
    return np.asarray(np.sqrt(((points[:, None] - points[None]) ** 2).sum(axis=2)), float)


def mixture_ratios(scores: Floats, reference: Floats, weights: Floats, questions: int) -> Floats:
    """The log likelihood ratio of `questions` questions, for each row of weights over the rows of
    `scores`.

    The distribution of the rows of `reference`, read as a normal one, against a fixed mixture of
    normal ones with other means, widths and correlations. Normality decides how much is seen, not
    how often a clean run is accused: the ratios are only compared with one another.
    """
    centre = reference.mean(axis=0)
    width = np.maximum(reference.std(axis=0), _FLAT)
    size = reference.shape[1]
    known = (reference - centre) / width
    tie = float(np.clip(np.mean(known[:, 0] * known[:, -1]), -0.95, 0.95))
    means, spreads = _components(size, tie)
    same = _terms(np.zeros((1, size)), _spread(np.ones((1, size)), np.array(tie)))
    gain = questions * (_terms(means, spreads) - same)
    moments = weights @ _moments((scores - centre) / width)
    parts = [
        _log_mean_exp(moments[at : at + _AT_ONCE] @ gain.T)
        for at in range(0, len(moments), _AT_ONCE)
    ]
    return np.concatenate(parts)


def _components(size: int, tie: float) -> tuple[Floats, Floats]:
    """Means and covariances of the mixture, around a standard normal with correlation `tie`; always
    the same.
    """
    draw = np.random.default_rng(0)
    common, own, widths = (
        draw.standard_normal((_COMPONENTS, columns)) for columns in (1, size, size)
    )
    means = np.sqrt(_TOGETHER) * common + np.sqrt(1 - _TOGETHER) * own
    ties = np.where(
        np.arange(_COMPONENTS) % 2, np.tanh(_TIES * draw.standard_normal(_COMPONENTS)), tie
    )
    return means, _spread(np.exp(_STRETCH * widths), ties)


def _spread(widths: Floats, ties: Floats) -> Floats:
    """Covariances [components, size, size] of these widths and, between two columns, these
    correlations.
    """
    spread = widths[:, :, None] * widths[:, None, :]
    off = ~np.eye(widths.shape[1], dtype=bool)
    spread[:, off] *= np.reshape(ties, (-1, 1))
    return spread


def _terms(means: Floats, spreads: Floats) -> Floats:
    """The log density of each normal as weights of `_moments`, but for a constant all share."""
    precise = np.linalg.inv(spreads)
    pull = np.einsum("lij,lj->li", precise, means)
    constant = -0.5 * (np.linalg.slogdet(spreads)[1] + np.einsum("li,li->l", means, pull))
    terms = [constant[:, None], pull, -0.5 * precise.reshape(len(means), -1)]
    return np.asarray(np.concatenate(terms, axis=1), float)


def _moments(plain: Floats) -> Floats:
    """One, each column, and all products of two."""
    products = plain[:, :, None] * plain[:, None, :]
    return np.concatenate(
        [np.ones((len(plain), 1)), plain, products.reshape(len(plain), -1)], axis=1
    )


def _log_mean_exp(logs: Floats) -> Floats:
    most = logs.max(axis=1)
    return np.asarray(most + np.log(np.exp(logs - most[:, None]).mean(axis=1)), float)
