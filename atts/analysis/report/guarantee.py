"""The guarantee of a run's gate in words, and its audit: recorded decisions taken again by a fresh
calibrator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from atts.analysis.recorded_gate import fresh_calibrator
from atts.analysis.report.numbers import StatedGuarantee
from atts.analysis.report.run_data import AUDIT, GateStep, RunData
from atts.analysis.report.words import WORDS
from atts.calibration import MODES, Calibrator, Mode
from atts.errors import CalibrationInputError

_TRIAL = 300  # steps by which the mode is recognised


@dataclass(frozen=True, slots=True)
class _Match:
    mode: Mode
    calibrator: Calibrator
    checked: int
    same: int


def stated_guarantee(data: RunData, nominal: float | None) -> StatedGuarantee:
    """The guarantee in words with the numbers of the end of the run, and what voided it."""
    gate = str(data.run.setting("gate") or "unknown")
    own = data.run.setting("promise")
    if isinstance(own, list) and len(own) == 2:
        return StatedGuarantee(gate, str(own[0]), str(own[1]), "")
    if told := WORDS.gates.get(gate):
        return StatedGuarantee(gate, told.guarantee, told.voided_by, "")
    named = next(
        filter(None, map(data.run.setting, ("mode", "calibration.mode", "calibration"))), None
    )
    modes: list[Mode] = [mode for mode in reversed(MODES) if named not in MODES or mode == named]
    match = _recognise(data, nominal, modes) if nominal is not None else None
    if match is None:
        return StatedGuarantee(
            str(named or "unknown"),
            "not known: the run directory does not say in which mode its gate ran, and no mode "
            "without stored scores "
            "takes these decisions",
            "not known either",
            "no mode reproduces the recorded p-values; a calibrator that started from scores which "
            "the manifest does "
            "not name cannot be rebuilt",
        )
    missing = match.checked - match.same
    audit = (
        f"{match.same:,} of {match.checked:,} recorded decisions were taken again from the journal "
        f"alone and came out "
        + ("the same" if not missing else f"the same; {missing:,} did not")
        + ("" if named else "; the mode was recognised by this")
    )
    return StatedGuarantee(
        match.mode, match.calibrator.guarantee, match.calibrator.voided_by, audit
    )


def _recognise(data: RunData, nominal: float, modes: Sequence[Mode]) -> _Match | None:
    """The mode whose calibrator, fed the journal's steps in order, takes the journal's decisions."""
    best: _Match | None = None
    first = data.steps[: data.parts[1]] if len(data.parts) > 1 else data.steps
    for mode in modes:
        trial = _replayed(data, first[:_TRIAL], mode, nominal, _TRIAL)
        if trial is not None and trial.checked and trial.same > 0.9 * trial.checked:
            best = trial if best is None or trial.same > best.same else best
            if best.same == best.checked:
                break
    return None if best is None else _audited(data, best.mode, nominal)


def _audited(data: RunData, mode: Mode, nominal: float) -> _Match | None:
    """All steps; of a union of runs each by its own calibrator, and what these saw put together."""
    ends = [*data.parts[1:], len(data.steps)]
    whole: _Match | None = None
    for begin, end in zip(data.parts, ends, strict=True):
        found = _replayed(data, data.steps[begin:end], mode, nominal, AUDIT - begin)
        if found is None:
            return None
        found.calibrator.settle()
        if whole is None:
            whole = found
            continue
        whole.calibrator.merge(found.calibrator.state())
        whole = replace(whole, checked=whole.checked + found.checked, same=whole.same + found.same)
    return whole


def _replayed(
    data: RunData, steps: Sequence[GateStep], mode: Mode, rate: float, audit: int
) -> _Match | None:
    try:
        calibrator = fresh_calibrator(data.run, rate, mode)
    except CalibrationInputError:  # a mode that needs stored scores
        return None
    checked = same = 0
    for place, step in enumerate(steps):
        decision = step.decision
        overruled = step.decision.origin == "budget"
        try:
            if step.kind == "observed":
                calibrator.observe(decision, step.escalated)
            elif (
                place < audit
                and not overruled
                and decision.score is not None
                and decision.p is not None
            ):
                again = calibrator.decide(
                    decision.score, decision.question, decision.turn, decision.sample, decision.issue,
                    left=step.left, length=decision.length,
                )  # fmt: skip
                checked += 1
                same += again.action == decision.action and math.isclose(
                    again.p or 0.0, decision.p, abs_tol=1e-9
                )
        except CalibrationInputError:  # scores of another scale than a perplexity's
            return None
    return _Match(mode, calibrator, checked, same)
