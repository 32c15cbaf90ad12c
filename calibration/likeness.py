"""Whether live questions are like stored ones: energy distances, their law found by drawing clean runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atts.calibration.samples import Floats, QuestionSample, features, normal_scores

_MOST = 256  # questions of either side that are compared
_DRAWS = 4_999  # of simulated clean runs
_BEND = 0.5  # weight of squared normal scores beside the scores: wider or narrower laws are told sooner
_TINY = 1e-12  # equal statistics may differ by rounding


@dataclass(frozen=True, slots=True)
class Likeness:
    """What one look found.

    `drawn` is the p-value of "the live questions are draws of the stored ones", `exchangeable` that of "both are draws
    of one law", which is larger as the stored ones are then only a sample. Both are valid for any scores, as they are
    ranks among statistics of simulated clean runs; the second is only computed where the first is at most `level`.
    """

    drawn: float
    exchangeable: float
    questions: int


def compare(stored: QuestionSample, live: Sequence[Sequence[float]], level: float, seed: int) -> Likeness:
    """Compare levels and spreads of the latest live questions with those of the stored ones, as whole distributions."""
    draw = np.random.default_rng([seed, 0x6C696B65])
    latest = live[-_MOST:]
    depth = stored.depth(latest)
    theirs = features(stored.questions[:: -(-len(stored.questions) // _MOST)], depth)
    ours = features(latest, depth)
    drawn = _drawn(ours, theirs, draw)
    return Likeness(drawn, _exchangeable(ours, theirs, draw) if drawn <= level else 1.0, len(ours))


def _drawn(ours: Floats, theirs: Floats, draw: np.random.Generator) -> float:
    """The share of runs of stored questions, drawn with replacement, that are as far from all of them as ours."""
    n, k = len(ours), len(theirs)
    live, stored = (_bent(normal_scores(each, theirs)) for each in (ours, theirs))
    apart = _distances(stored, stored)
    found = 2 * _distances(live, stored).mean() - _distances(live, live).mean()
    at = draw.integers(k, size=(_DRAWS, n)) + k * np.arange(_DRAWS)[:, None]
    counts = np.bincount(at.ravel(), minlength=_DRAWS * k).reshape(_DRAWS, k) / n  # [draws, k]
    clean = 2 * counts @ apart.mean(axis=1) - np.einsum("ij,ij->i", counts @ apart, counts)
    return float((1 + np.sum(clean >= found - _TINY)) / (_DRAWS + 1))


def _exchangeable(ours: Floats, theirs: Floats, draw: np.random.Generator) -> float:
    """The same among all ways to call as many of the questions live: exact when both are draws of one law."""
    n, k = len(ours), len(theirs)
    both = np.concatenate([ours, theirs])
    apart = _distances(*2 * (_bent(normal_scores(both, both)),))
    chosen = np.zeros((_DRAWS + 1, n + k))
    chosen[0, :n] = 1  # as it is
    places = np.argpartition(draw.random((_DRAWS, n + k)), n - 1, axis=1)[:, :n]
    np.put_along_axis(chosen[1:], places, 1.0, axis=1)
    inside = np.einsum("ij,ij->i", chosen @ apart, chosen)
    reach, whole = chosen @ apart.sum(axis=1), float(apart.sum())
    far = 2 * (reach - inside) / (n * k) - inside / n**2 - (whole - 2 * reach + inside) / k**2
    return float(np.mean(far >= far[0] - _TINY))


def _bent(scores: Floats) -> Floats:
    """Normal scores and their squares, the energy distance of which sees location and scale."""
    return np.concatenate([scores, _BEND * (scores**2 - 1) / np.sqrt(2)], axis=1)


def _distances(one: Floats, two: Floats) -> Floats:
    return np.asarray(np.sqrt(((one[:, None] - two[None]) ** 2).sum(axis=2)), float)
