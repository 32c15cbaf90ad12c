"""Simulated live scores, sampled by whole questions from stored scores, and the number of scores
after which a drift monitor raises an alarm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from atts.calibration import StoredScores
from atts.calibration.drift import DriftMonitor


def whole_questions(
    stored: StoredScores, seed: int, count: int = 300
) -> Iterator[tuple[float, str]]:
    """Sample whole questions with replacement and yield their scores, so that the stream has no
    drift.
    """
    questions = np.array(stored.nonconformity).reshape(len(set(stored.questions)), -1)
    size = questions.shape[1]
    draw = np.random.default_rng(seed)
    for live in range(math.ceil(count / size)):
        for nonconformity in questions[draw.integers(len(questions))][
            : max(0, count - size * live)
        ]:
            yield float(nonconformity), f"live {live}"


def noticed_after(stored: StoredScores, source: StoredScores, seed: int) -> int | None:
    """Return the number of scores of `source` after which a drift monitor with the stored scores
    raises an alarm. Return None if no alarm is raised.
    """
    monitor = DriftMonitor(stored)
    for nonconformity, question in whole_questions(source, seed):
        if monitor.events:
            break
        monitor.observe(nonconformity, question, 0)
    return monitor.events[0].scores if monitor.events else None
