"""Replay recorded scores through a calibrator, and measure how well it controls the rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atts.calibration.controllers import DEFAULTS, Mode, Tuning
from atts.calibration.drift import DriftEvent, DriftPolicy
from atts.calibration.online import Calibrator
from atts.calibration.scores import PERPLEXITY, Scale, StoredScores, plain_number, whole_number
from atts.core import Decision
from atts.errors import CalibrationInputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

METRICS = (
    "overall_error",
    "turn_rms",
    "question_rms",
    "worst_rolling_500",
    "auroc_within_question_turn",
    "agreement_with_sorted",
)

# Groups of turns, so that each bin has enough decisions. Later turns are in none of the bins.
TURN_BINS = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 5), (6, 9), (10, 14))


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Every decision in arrival order, with metrics of how well the rate was controlled."""

    rate: float
    mode: Mode
    decisions: tuple[Decision, ...]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    guarantee: str = ""
    voided_by: str = ""
    events: tuple[DriftEvent, ...] = ()

    @property
    def escalated(self) -> float:
        """Return the realised rate; NaN without decisions."""
        if not self.decisions:
            return float("nan")
        return sum(decision.escalate for decision in self.decisions) / len(self.decisions)


def replay_scores(
    records: Iterable[Mapping[str, Any]],
    rate: float | Fraction,
    mode: Mode = "question-turn",
    seed: int = 0,
    *,
    scale: Scale = PERPLEXITY,
    stored: StoredScores | Sequence[float] = (),
    drift: DriftPolicy = "recalibrate",
    window: int | None = None,
    decay: float | None = None,
    tuning: Tuning = DEFAULTS,
    by_length: bool = False,
    cap: float | Fraction | None = None,
) -> ReplayResult:
    """Decide on each record {"question", "turn", "score"} from the records before it.

    The records are in arrival order. Three fields are optional: "sample"; "left", the share of
    decisions expected to be left; and "issue", a number from 0 without gaps. Scores with an issue
    join the pools in the order of issue instead of arrival. The field "length" is needed if ranks
    are by length. The options are those of `Calibrator`.

    :raises CalibrationInputError: if a record lacks a field, or its score is not a valid score.
    :raises OptionError: for an unknown mode or drift policy.

    >>> records = [{"question": 1, "turn": 0, "score": score} for score in (1.2, 1.4, 9.0)]
    >>> [decision.escalate for decision in replay_scores(records, rate=0.5, mode="marginal", seed=1).decisions]
    [True, True, True]
    """
    calibrator = Calibrator(
        rate,
        mode,
        seed=seed,
        scale=scale,
        stored=stored,
        drift=drift,
        window=window,
        decay=decay,
        tuning=tuning,
        by_length=by_length,
        cap=cap,
    )
    decisions: list[Decision] = []
    for number, record in enumerate(records, 1):
        decision = _decide(calibrator, record, number)
        calibrator.observe(decision)
        decisions.append(decision)
    metrics = rate_metrics(
        questions=[decision.question for decision in decisions],
        turns=[decision.turn for decision in decisions],
        nonconformity=[calibrator.scale.nonconformity(decision.score) for decision in decisions],
        escalated=[decision.escalate for decision in decisions],
        rate=float(calibrator.rate),
    )
    return ReplayResult(
        rate=float(calibrator.rate),
        mode=mode,
        decisions=tuple(decisions),
        metrics=metrics,
        guarantee=calibrator.guarantee,
        voided_by=calibrator.voided_by,
        events=calibrator.events,
    )


def _decide(calibrator: Calibrator, record: Mapping[str, Any], number: int) -> Decision:
    """Decide on a record; errors name its number in the file."""
    for name in ("question", "turn", "score"):
        if name not in record:
            raise CalibrationInputError(f"record {number}", dict(record), f"a field '{name}'")
    options: dict[str, Any] = {}
    whole_number(f"turn of record {number}", record["turn"])
    for name in ("sample", "issue"):
        if record.get(name) is not None:
            whole_number(f"{name} of record {number}", record[name])
            options[name] = record[name]
    for name in ("left", "length"):
        if record.get(name) is not None:
            options[name] = plain_number(f"{name} of record {number}", record[name])
    score = record["score"]
    try:
        return calibrator.decide(score, str(record["question"]), int(record["turn"]), **options)
    except CalibrationInputError as problem:
        if problem.what != "score":
            raise
        raise CalibrationInputError(
            f"score of record {number}", score, calibrator.scale.domain
        ) from None


def rate_metrics(
    questions: Sequence[object],
    turns: Sequence[int],
    nonconformity: Sequence[float],
    escalated: Sequence[bool],
    rate: float,
) -> dict[str, float]:
    """Return six metrics of rate control from sequences of equal length in arrival order.

    Larger nonconformity is worse. A metric is NaN if the stream cannot give it (no pair to rank,
    fewer than 500 decisions); an empty stream gives only NaN.
    """
    if not len(questions):
        return dict.fromkeys(METRICS, math.nan)
    names = np.array([str(question) for question in questions])
    q: Ints = np.unique(names, return_inverse=True)[1].astype(np.int64)
    t: Ints = np.asarray(turns, np.int64)
    x: Floats = np.asarray(nonconformity, float)
    e: Floats = np.asarray(escalated, float)
    question_rates: Floats = np.bincount(q, e) / np.bincount(q)
    question_turn = q * (int(t.max()) + 1) + t  # one number for each pair of a question and a turn
    return {
        "overall_error": float(abs(e.mean() - rate)),
        "turn_rms": turn_rms(t, e, rate),
        "question_rms": float(np.sqrt(np.mean((question_rates - rate) ** 2))),
        "worst_rolling_500": worst_rolling(e, rate),
        "auroc_within_question_turn": pooled_auroc(x, e, question_turn),
        "agreement_with_sorted": float((e == sorted_decisions(q, t, x, rate)).mean()),
    }


def turn_rms(turns: Ints, escalated: Floats, rate: float) -> float:
    """Return the root mean square over turn bins of (realised - nominal), weighted by decisions."""
    total = 0.0
    for low, high in TURN_BINS:
        inside = (turns >= low) & (turns <= high)
        if inside.any():
            total += float(inside.mean()) * (float(escalated[inside].mean()) - rate) ** 2
    return math.sqrt(total)


def worst_rolling(escalated: Floats, rate: float, width: int = 500) -> float:
    """Return the largest |realised - nominal| over any `width` consecutive decisions.

    NaN for a shorter stream.
    """
    sums = np.concatenate([[0.0], np.cumsum(escalated)])
    if len(sums) <= width:
        return math.nan
    return float(np.abs((sums[width:] - sums[:-width]) / width - rate).max())


def pooled_auroc(nonconformity: Floats, escalated: Floats, group: Ints) -> float:
    """Return P(an escalated chunk is worse than an accepted one) over all pairs inside a group.

    Ties count as half a pair. The result is NaN if there is no pair.
    """
    order = np.argsort(group, kind="stable")
    bounds = np.flatnonzero(np.diff(group[order])) + 1
    wins = 0.0
    pairs = 0.0
    for members in np.split(order, bounds):
        over = nonconformity[members][escalated[members] == 1]
        kept = np.sort(nonconformity[members][escalated[members] == 0])
        # Counting from both sides counts each tie once, which is twice its half.
        below = np.searchsorted(kept, over, "left")
        up_to = np.searchsorted(kept, over, "right")
        wins += float((below + up_to).sum()) / 2
        pairs += len(over) * len(kept)
    return wins / pairs if pairs else math.nan


def sorted_decisions(questions: Any, turns: Any, nonconformity: Any, rate: float) -> Floats:
    """Return the decisions of the synchronous rule, which decides on a whole (question, turn)
    group.

    The rule escalates the worst chunks of each group; rounding errors carry over to the question's
    next turn.
    """
    q = np.asarray(questions)
    t = np.asarray(turns)
    x = np.asarray(nonconformity, float)
    # sorted by question, then turn, then worst first; ties stay in arrival order
    order = np.lexsort((np.arange(len(q)), -x, t, q))
    starts = np.flatnonzero(np.diff(q[order]) | np.diff(t[order])) + 1
    decisions = np.zeros(len(q))
    carry = dict[int, float]()
    for members in np.split(order, starts):
        question = int(q[members[0]])
        want = rate * len(members) + carry.get(question, 0.0)
        count = max(0, min(len(members), math.floor(want + 0.5)))
        carry[question] = want - count
        decisions[members[:count]] = 1
    return decisions
