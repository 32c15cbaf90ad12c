"""Health check of stored scores: size, clustering, duplicates, thresholds, and what they can
promise at a rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atts.calibration.conformal import (
    ClusterSummary,
    by_cluster,
    long_run,
    split_threshold,
    summarise,
)
from atts.calibration.drift import DriftMonitor, DuplicateScores
from atts.calibration.rates import Rate, exact_rate
from atts.calibration.scores import StoredScores
from atts.errors import CalibrationInputError

_HALVES = 400


@dataclass(frozen=True, slots=True)
class TurnHealth:
    """The stored scores of one turn; thresholds are on the scale of the scores."""

    turn: int
    scores: int
    median: float
    threshold: float


@dataclass(frozen=True, slots=True)
class Health:
    """Size, clustering, repeats and thresholds of stored scores at one rate."""

    rate: float
    scores: int
    clusters: ClusterSummary
    infinite: int
    repeats: DuplicateScores
    threshold: float  # split conformal: escalate above it
    # where the long-run rate of the threshold is, were the scores independent (90 %)
    long_run: tuple[float, float]
    long_run_clustered: tuple[float, float]  # the same for the effective number of scores
    # SD of the rate when half of the questions set the threshold for the other half
    half_split: float
    turns: tuple[TurnHealth, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What should stop or worry the reader."""
        found = list[str]()
        if self.repeats.fault:
            found.append(self.repeats.fault)
        if self.repeats.doubt:
            found.append(f"{self.repeats.doubt}; `atts calibration check --live RUN` tells which")
        if not self.repeats.clustered:
            found.append(
                "the questions of the scores are not known: counted as independent, which they "
                "rarely are"
            )
        if self.infinite:
            found.append(f"infinite scores: {self.infinite}")
        if math.isinf(self.threshold) and self.rate:
            found.append(
                f"too few scores ({self.scores}) for rate {self.rate:g}: nothing would escalate"
            )
        if self.clusters.effective < 0.5 * self.scores:
            found.append(
                f"{self.clusters}: the threshold is far less certain than {self.scores} scores "
                f"suggest"
            )
        if len(self.turns) == 1 and self.scores:
            found.append(
                f"only turn {self.turns[0].turn} is here: later turns have other scores, use "
                f"mode question-turn"
            )
        return tuple(found)


def examine(stored: StoredScores, rate: Rate, seed: int = 0) -> Health:
    """Look at stored scores.

    :raises CalibrationInputError: if there are none.
    """
    if not len(stored):
        raise CalibrationInputError("stored scores", 0, "at least one")
    nonconformity = np.asarray(stored.nonconformity, float)
    labels = [q or f"chunk {place}" for place, q in enumerate(stored.questions)]
    clusters = by_cluster(stored.nonconformity, labels)
    summary = summarise(clusters)
    return Health(
        rate=float(exact_rate(rate)),
        scores=len(stored),
        clusters=summary,
        infinite=int(np.isinf(nonconformity).sum()),
        repeats=DuplicateScores.of(stored),
        threshold=_score_at(stored, split_threshold(nonconformity, rate)),
        long_run=long_run(len(stored), rate),
        long_run_clustered=long_run(max(1, int(summary.effective)), rate),
        half_split=_half_split(list(clusters.values()), rate, seed),
        turns=_by_turn(stored, nonconformity, rate),
    )


def first_alarm(stored: StoredScores, live: StoredScores | None = None) -> DriftMonitor:
    """A drift monitor of the stored scores that has watched the live ones in order.

    Without live ones, repeats that those could explain count as a fault: no run will tell.
    """
    monitor = DriftMonitor(stored, policy="report")
    if live is None:
        monitor.judge_alone()
        return monitor
    for nonconformity, question, turn in zip(
        live.nonconformity, live.questions, live.turns, strict=True
    ):
        if not monitor.watching:
            break
        monitor.observe(nonconformity, question, turn)
    return monitor


def _half_split(clusters: list[NDArray[np.float64]], rate: Rate, seed: int) -> float:
    if len(clusters) < 4:
        return math.nan
    draw = np.random.default_rng(seed)
    rates = list[float]()
    for _ in range(_HALVES):
        order = draw.permutation(len(clusters))
        first = np.concatenate([clusters[at] for at in order[: len(clusters) // 2]])
        second = np.concatenate([clusters[at] for at in order[len(clusters) // 2 :]])
        rates.append(float(np.mean(second > split_threshold(first, rate))))
    return float(np.std(rates))


def _by_turn(
    stored: StoredScores, nonconformity: NDArray[np.float64], rate: Rate
) -> tuple[TurnHealth, ...]:
    turns = np.asarray(stored.turns)
    rows = list[TurnHealth]()
    for turn in sorted(set(stored.turns)):
        scores = nonconformity[turns == turn]
        median = float(np.median(scores))
        threshold = split_threshold(scores, rate)
        rows.append(
            TurnHealth(turn, len(scores), _score_at(stored, median), _score_at(stored, threshold))
        )
    return tuple(rows)


def _score_at(stored: StoredScores, nonconformity: float) -> float:
    """Nonconformity back on the scale of the scores."""
    value = nonconformity if stored.scale.worse == "higher" else -nonconformity
    if stored.scale.measure != "log":
        return value
    return math.exp(value) if value < 700 else math.inf
