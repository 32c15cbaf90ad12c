"""Examine stored scores: the thresholds that they give at a rate, and warnings about them."""

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
from atts.calibration.scores import Measure, StoredScores
from atts.errors import CalibrationInputError

_HALVES = 400  # random splits of the questions in two


@dataclass(frozen=True, slots=True)
class TurnHealth:
    """A summary of one turn's stored scores; thresholds are on the scale of the scores."""

    turn: int
    scores: int
    median: float
    threshold: float


@dataclass(frozen=True, slots=True)
class Health:
    """The size, clustering, repeats and thresholds of stored scores at one rate."""

    rate: float
    scores: int
    clusters: ClusterSummary
    infinite: int
    repeats: DuplicateScores
    threshold: float  # the split-conformal threshold, above which a score escalates
    # 90 % interval of the threshold's long-run rate, if the scores were independent
    long_run: tuple[float, float]
    long_run_clustered: tuple[float, float]  # the same interval, for the effective number of scores
    # Standard deviation of the rate when one half of the questions sets the threshold for the other
    # half.
    half_split: float
    turns: tuple[TurnHealth, ...]
    measure: Measure  # whether differences are taken between the logarithms of these scores
    score_kind: str | None  # the rule that made the scores, if the fingerprint names it

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings about the scores; a fault comes first."""
        warnings = list[str]()
        if self.repeats.fault:
            warnings.append(self.repeats.fault)
        if self.repeats.doubt:
            warnings.append(
                f"{self.repeats.doubt}; compare them with a run's scores by `atts calibration "
                "check --live RUN`"
            )
        if not self.repeats.clustered:
            warnings.append(
                "the questions of the scores are not known, so the scores count as independent, "
                "which they rarely are"
            )
        if self.infinite:
            warnings.append(f"infinite scores: {self.infinite}")
        if math.isinf(self.threshold) and self.rate:
            warnings.append(
                f"too few scores ({self.scores}) for rate {self.rate:g}: nothing would escalate"
            )
        if self.clusters.effective < 0.5 * self.scores:
            warnings.append(
                f"{self.clusters}: the threshold is far less certain than {self.scores} scores "
                "suggest"
            )
        if len(self.turns) == 1 and self.scores:
            warnings.append(
                f"all scores are of turn {self.turns[0].turn}, but other turns score differently; "
                "use mode question-turn"
            )
        return tuple(warnings)


def examine(stored: StoredScores, rate: Rate, seed: int = 0) -> Health:
    """Return the health of stored scores at a rate; `seed` draws the halves of the questions.

    :raises CalibrationInputError: if there are none.
    """
    if not len(stored):
        raise CalibrationInputError("stored scores", 0, "at least one")
    nonconformity = np.asarray(stored.nonconformity, float)
    labels = [question or f"chunk {place}" for place, question in enumerate(stored.questions)]
    clusters = by_cluster(stored.nonconformity, labels)
    summary = summarise(clusters)
    return Health(
        rate=float(exact_rate(rate)),
        scores=len(stored),
        clusters=summary,
        infinite=int(np.isinf(nonconformity).sum()),
        repeats=DuplicateScores.of(stored),
        threshold=_as_score(stored, split_threshold(nonconformity, rate)),
        long_run=long_run(len(stored), rate),
        long_run_clustered=long_run(max(1, int(summary.effective)), rate),
        half_split=_half_split_spread(list(clusters.values()), rate, seed),
        turns=_turn_health(stored, nonconformity, rate),
        measure=stored.scale.measure,
        score_kind=_kind_of(stored),
    )


def first_alarm(stored: StoredScores, live: StoredScores | None = None) -> DriftMonitor:
    """Return a drift monitor of the stored scores that has observed the live scores in order.

    Without live scores, repeats that live scores could explain raise an alarm.
    """
    monitor = DriftMonitor(stored, policy="report")
    if live is None:
        monitor.judge_alone()
        return monitor
    rows = zip(live.nonconformity, live.questions, live.turns, strict=True)
    for nonconformity, question, turn in rows:
        if not monitor.watching:
            break
        monitor.observe(nonconformity, question, turn)
    return monitor


def _half_split_spread(clusters: list[NDArray[np.float64]], rate: Rate, seed: int) -> float:
    """Return the standard deviation of one half's rate at the other half's threshold.

    This estimates the uncertainty of the threshold without a model of how scores cluster. It is
    slightly too large, because each half has only half of the questions.
    """
    if len(clusters) < 4:
        return math.nan
    draw = np.random.default_rng(seed)
    half = len(clusters) // 2
    rates = list[float]()
    for _ in range(_HALVES):
        order = draw.permutation(len(clusters))
        first = np.concatenate([clusters[place] for place in order[:half]])
        second = np.concatenate([clusters[place] for place in order[half:]])
        rates.append(float(np.mean(second > split_threshold(first, rate))))
    return float(np.std(rates))


def _turn_health(
    stored: StoredScores, nonconformity: NDArray[np.float64], rate: Rate
) -> tuple[TurnHealth, ...]:
    turns = np.asarray(stored.turns)
    rows = list[TurnHealth]()
    for turn in sorted(set(stored.turns)):
        scores = nonconformity[turns == turn]
        median = _as_score(stored, float(np.median(scores)))
        threshold = _as_score(stored, split_threshold(scores, rate))
        rows.append(TurnHealth(turn, len(scores), median, threshold))
    return tuple(rows)


def _kind_of(stored: StoredScores) -> str | None:
    kind = stored.fingerprint.get("score.kind")
    return kind if isinstance(kind, str) else None


def _as_score(stored: StoredScores, nonconformity: float) -> float:
    """Return the score of a nonconformity; this inverts `Scale.nonconformity`."""
    value = nonconformity if stored.scale.worse == "higher" else -nonconformity
    if stored.scale.measure != "log":
        return value
    # exp(710) overflows; thresholds are infinite where there are too few scores
    return math.exp(value) if value < 700 else math.inf
