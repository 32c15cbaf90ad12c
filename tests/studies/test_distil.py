"""Tests of the study of training a draft by distillation: it makes one table, and repeats no
finished training trip.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.studies import models
from scripts.studies.harness import Options

pytestmark = pytest.mark.checkout


def trip(kl: float, escalated: list[float], correct: list[float]) -> dict[str, Any]:
    """Return the measurements of a finished training trip, with the same values for two problems."""
    return {
        name: {"KL": [kl, kl], "escalated": escalated, "correct": correct} for name in ("a", "b")
    }


def test_the_table_has_both_drafts_and_finished_trips_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has both drafts, and finished trips are kept.

    A difference is the value after training minus the value before, in points if the value is a
    share.
    """
    import examples.distil

    asked: list[tuple[float, int]] = []

    def made(problems: Any, noise: float, epochs: int, seed: int) -> Any:
        asked.append((noise, seed))
        return trip(0.3, [1, 0, 0, 0], [1, 0]), trip(0.2, [0, 0, 0, 0], [1, 1])

    monkeypatch.setattr(examples.distil, "round_trip", made)
    options = Options("default", seed=3, out=tmp_path)
    (table,) = models.study_distillation(options)
    assert asked == [(0.08, 3), (0.08, 4), (0.0, 3), (0.0, 4)]
    shipped = table.rows[1]
    assert shipped == (
        *("as shipped", 2, "0.300 to 0.200", "-0.100 [-0.100, -0.100]"),
        *("25.0 to 0.0", "-25.0 [-25.0, -25.0]", "50.0 to 100.0", "+50.0 [+50.0, +50.0]"),
    )
    assert "-25.0 [-25.0, -25.0]" in table.headline
    assert models.study_distillation(options) == [table]
    assert len(asked) == 4
