"""Metrics of rate control: how well decisions on a stream of scores hold a nominal rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TURN_BINS = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 5), (6, 9), (10, 14))
"""Turns grouped so that each bin holds enough decisions; later turns than the last bin count in no
bin.
"""

METRICS = (
    "overall_error",
    "turn_rms",
    "question_rms",
    "worst_rolling_500",
    "auroc_within_question_turn",
    "agreement_with_sorted",
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def rate_metrics(
    questions: Sequence[object],
    turns: Sequence[int],
    nonconformity: Sequence[float],
    escalated: Sequence[bool],
    rate: float,
) -> dict[str, float]:
    """The six numbers of rate control, on equal-length sequences in arrival order (nonconformity:
    larger is worse).

    A number that does not exist for the stream (no pair to rank, fewer than 500 decisions) is NaN;
    an empty stream has only NaNs.
    """
    if not len(questions):
        return dict.fromkeys(METRICS, math.nan)
    q: Ints = np.unique(np.array([str(question) for question in questions]), return_inverse=True)[
        1
    ].astype(np.int64)
    t: Ints = np.asarray(turns, np.int64)
    x: Floats = np.asarray(nonconformity, float)
    e: Floats = np.asarray(escalated, float)
    per_question: Floats = np.bincount(q, e) / np.bincount(q)
    return {
        "overall_error": float(abs(e.mean() - rate)),
        "turn_rms": turn_rms(t, e, rate),
        "question_rms": float(np.sqrt(np.mean((per_question - rate) ** 2))),
        "worst_rolling_500": worst_rolling(e, rate),
        "auroc_within_question_turn": pooled_auroc(x, e, q * (int(t.max()) + 1) + t),
        "agreement_with_sorted": float((e == sorted_decisions(q, t, x, rate)).mean()),
    }


def turn_rms(turns: Ints, escalated: Floats, rate: float) -> float:
    """Root mean square over the turn bins of (realised - nominal), weighted by decisions."""
    total = 0.0
    for low, high in TURN_BINS:
        inside = (turns >= low) & (turns <= high)
        if inside.any():
            total += float(inside.mean()) * (float(escalated[inside].mean()) - rate) ** 2
    return math.sqrt(total)


def worst_rolling(escalated: Floats, rate: float, width: int = 500) -> float:
    """The largest |realised - nominal| over any `width` consecutive decisions; NaN for a shorter
    stream.
    """
    sums = np.concatenate([[0.0], np.cumsum(escalated)])
    if len(sums) <= width:
        return math.nan
    return float(np.abs((sums[width:] - sums[:-width]) / width - rate).max())


def pooled_auroc(nonconformity: Floats, escalated: Floats, group: Ints) -> float:
    """P(an escalated chunk is worse than a kept one) over all pairs inside a group, ties half; NaN
    without a pair.
    """
    order = np.argsort(group, kind="stable")
    bounds = np.flatnonzero(np.diff(group[order])) + 1
    wins = pairs = 0.0
    for members in np.split(order, bounds):
        bad = nonconformity[members][escalated[members] == 1]
        kept = np.sort(nonconformity[members][escalated[members] == 0])
        below = np.searchsorted(kept, bad, "left")
        up_to = np.searchsorted(kept, bad, "right")
        wins += float((below + up_to).sum()) / 2
        pairs += len(bad) * len(kept)
    return wins / pairs if pairs else math.nan


def sorted_decisions(questions: Any, turns: Any, nonconformity: Any, rate: float) -> Floats:
    """The synchronous rule: each (question, turn) group whole, the worst escalate, rounding carried
    per question.
    """
    q = np.asarray(questions)
    t = np.asarray(turns)
    x = np.asarray(nonconformity, float)
    order = np.lexsort((np.arange(len(q)), -x, t, q))
    starts = np.flatnonzero(np.diff(q[order]) | np.diff(t[order])) + 1
    decisions = np.zeros(len(q))
    carry = dict[int, float]()
    for members in np.split(order, starts):
        key = int(q[members[0]])
        want = rate * len(members) + carry.get(key, 0.0)
        count = max(0, min(len(members), math.floor(want + 0.5)))
        carry[key] = want - count
        decisions[members[:count]] = 1
    return decisions
