"""The calibrator of a recorded run, made anew as it stood before the first decision, at any rate
and in any mode.
"""

from __future__ import annotations

from atts.calibration import DEFAULTS, HOLD, Calibrator, Mode, StoredScores, Tuning
from atts.journal import RecordedRun


def fresh_calibrator(run: RecordedRun, rate: float, mode: Mode) -> Calibrator:
    """With the run's stored scores, cap, seed and step.

    :raises CalibrationInputError: the mode needs stored scores, and the run names none.
    """
    step = run.setting("aci_step")
    rollouts = run.manifest.settings.get("rollouts")
    scores = [
        float(score) for score in run.setting("stored") or () if isinstance(score, int | float)
    ]
    return Calibrator(
        rate,
        mode,
        seed=run.manifest.seed,
        stored=StoredScores.of(scores, lengths=run.setting("stored_lengths") or ()),
        hold=max(HOLD, rollouts.value) if rollouts and isinstance(rollouts.value, int) else HOLD,
        tuning=Tuning(aci_step=step) if isinstance(step, float) else DEFAULTS,
        by_length=bool(run.setting("by_length")),
        cap=run.setting("cap"),
    )
