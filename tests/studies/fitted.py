"""Fits the cost formula of a step to measured pieces of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scripts.studies.modelled import Cost


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured piece of work: how many steps, what they held in all, and how long it took."""

    steps: float
    sequences: float
    cached: float
    fed: float
    seconds: float
    calls: float = 0.0


def fit(seen: Sequence[Observation]) -> tuple[Cost, float]:
    """Coefficients >= 0 by least squares on relative errors, and the root mean square of what is
    left.
    """
    from scipy.optimize import nnls

    rows = np.array([[o.steps, o.sequences, o.cached, o.fed, o.calls] for o in seen])
    seconds = np.array([o.seconds for o in seen])
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(rows / scale / seconds[:, None], np.ones(len(seen)))
    step, sequence, cached, prefilled, request = (float(value) for value in found / scale)
    error = (rows @ (found / scale)) / seconds - 1
    return Cost(step, sequence, cached, prefilled, request), float(np.sqrt(np.mean(error**2)))
