"""Two-sample test of live against stored questions: two statistics, their joint null distribution simulated."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atts.calibration.mixture import mixture_ratios
from atts.calibration.samples import Floats, QuestionSample, features, normal_scores

_MOST = 256  # questions of either side that are compared
_DRAWS = 4_999  # of simulated clean runs
_GLANCE = 499  # of those, where they leave no doubt
_DOUBT = 0.1  # the p-value of a glance above which it decides
_BEND = 0.5  # weight of squared normal scores beside the scores: wider or narrower distributions are told sooner
_DIGITS = 9  # of a statistic that count: equal ones may differ by rounding


@dataclass(frozen=True, slots=True)
class TwoSampleTest:
    """What one look found.

    `drawn` is the p-value of "the live questions are draws of the stored ones", `exchangeable` that of "both are draws
    of one distribution", which is larger as the stored ones are then only a sample. Both are valid for any scores, as
    they are ranks among statistics of simulated clean runs; the second is only computed where the first is at most
    `significance`.
    """

    drawn: float
    exchangeable: float
    questions: int


def two_sample_test(
    stored: QuestionSample, live: Sequence[Sequence[float]], significance: float, seed: int
) -> TwoSampleTest:
    """Compare means and spreads of the latest live questions with those of the stored ones, as whole distributions.

    By an energy distance, which sees any difference, and a likelihood ratio against a mixture of shifted and stretched
    distributions, which sees those that another model makes sooner.
    """
    latest = live[-_MOST:]
    depth = stored.depth(latest)
    theirs = features(stored.questions[:: -(-len(stored.questions) // _MOST)], depth)
    ours = features(latest, depth)
    # draws of its own for each run, the same in a replay: common ones would make all runs err to the same side
    draw = np.random.default_rng([seed, zlib.crc32(np.sort(ours, axis=None).tobytes())])
    drawn = _drawn(ours, theirs, _GLANCE, draw)
    if drawn <= max(_DOUBT, significance):
        drawn = _drawn(ours, theirs, _DRAWS, draw)
    return TwoSampleTest(drawn, _exchangeable(ours, theirs, draw) if drawn <= significance else 1.0, len(ours))


def _drawn(ours: Floats, theirs: Floats, draws: int, draw: np.random.Generator) -> float:
    """The p-value of ours among so many runs of as many of theirs, drawn with replacement."""
    n, k = len(ours), len(theirs)
    at = draw.integers(k, size=(draws, n)) + k * np.arange(draws)[:, None]
    weights = np.zeros((draws + 1, n + k))
    weights[0, :n] = 1 / n  # as it is
    weights[1:, n:] = np.bincount(at.ravel(), minlength=draws * k).reshape(draws, k) / n
    live, stored = (normal_scores(each, theirs) for each in (ours, theirs))
    both = np.concatenate([live, stored])
    apart = _distances(both)
    energy = 2 * weights @ apart[:, n:].mean(axis=1) - np.einsum("ij,ij->i", weights @ apart, weights)
    return _rank(energy, mixture_ratios(both, stored, weights, n))


def _exchangeable(ours: Floats, theirs: Floats, draw: np.random.Generator) -> float:
    """The same among all ways to call as many of the questions live: exact when both are draws of one distribution."""
    n, k = len(ours), len(theirs)
    both = np.concatenate([ours, theirs])
    both = normal_scores(both, both)
    apart = _distances(both)
    chosen = np.zeros((_DRAWS + 1, n + k))
    chosen[0, :n] = 1  # as it is
    places = np.argpartition(draw.random((_DRAWS, n + k)), n - 1, axis=1)[:, :n]
    np.put_along_axis(chosen[1:], places, 1.0, axis=1)
    inside = np.einsum("ij,ij->i", chosen @ apart, chosen)
    reach, whole = chosen @ apart.sum(axis=1), float(apart.sum())
    energy = 2 * (reach - inside) / (n * k) - inside / n**2 - (whole - 2 * reach + inside) / k**2
    return _rank(energy, mixture_ratios(both, both, chosen / n, n))


def _rank(*statistics: Floats) -> float:
    """The share of runs, the first among them, with as small a product of their p-values as the first has."""
    surprise = np.zeros(len(statistics[0]))
    for each in statistics:
        values = np.round(each, _DIGITS)
        surprise -= np.log(1 - np.searchsorted(np.sort(values), values, "left") / len(values))
    return float(np.mean(surprise >= surprise[0] - 1e-9))


def _distances(scores: Floats) -> Floats:
    """Between normal scores with their squares beside them: an energy distance then sees location and scale."""
    points = np.concatenate([scores, _BEND * (scores**2 - 1) / np.sqrt(2)], axis=1)
    return np.asarray(np.sqrt(((points[:, None] - points[None]) ** 2).sum(axis=2)), float)
