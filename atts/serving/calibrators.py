"""Save a server's calibrators, so that a restarted server continues with what it has learnt."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from atts.calibration import Calibrator, read_state, write_state
from atts.core import Role
from atts.errors import ATTSError
from atts.pipelines import ConformalGate, let_go
from atts.run import RunSpec

_log = logging.getLogger("atts.serving")


def conformal_gate(plan: RunSpec) -> ConformalGate | None:
    """Return the plan's gate that learns from a calibrator, or None if it has none."""
    gate: Any = plan.gate
    while gate is not None and not isinstance(gate, ConformalGate):
        gate = getattr(gate, "inner", None)
    if gate is None or not isinstance(gate.calibrator, Calibrator):
        return None
    return gate


class CalibratorFolder:
    """Files of calibrators, one per method and rate, each with the models whose scores it learnt
    from.
    """

    def __init__(self, folder: Path, models: Mapping[Role, str]) -> None:
        self._folder = folder
        self._models = dict(models)
        self._saved = dict[str, int]()  # number of decisions of each calibrator when it was saved

    def continued(self, method: str, rate: float, plan: RunSpec) -> RunSpec:
        """Return the plan with the calibrator that an earlier session saved, if it suits the plan.

        A file that is damaged, or has other models or settings, is logged and ignored: it is better
        to learn from the beginning than not to start.
        """
        gate = conformal_gate(plan)
        path = self._path(method, rate)
        if gate is None or not path.exists():
            return plan
        fresh = gate.calibrator
        assert isinstance(fresh, Calibrator), "`conformal_gate` returns only such gates"
        try:
            saved = read_state(path)
            calibrator = Calibrator.restored(saved["calibrator"])
        except (ATTSError, KeyError) as error:
            _log.warning("%s is left out: %s", path, error)
            return plan
        is_same = calibrator.settings == fresh.settings and saved.get("models") == self._models
        if not is_same:
            _log.warning("%s is left out: it belongs to other models or settings", path)
            return plan
        calibrator.settle()  # scores that were in flight will never arrive
        gate.continue_with(calibrator, calibrator.next_issue)
        self._saved[path.name] = calibrator.decided
        return replace(
            plan,
            alarms=partial(getattr, calibrator, "events"),
            on_problem_done=partial(let_go, plan.gate),
        )

    def changed(self, method: str, rate: float, plan: RunSpec) -> tuple[Path, Any] | None:
        """Return the file and its new state, or None if nothing was learnt since the last save."""
        gate = conformal_gate(plan)
        if gate is None:
            return None
        path = self._path(method, rate)
        calibrator = gate.calibrator
        assert isinstance(calibrator, Calibrator), "`conformal_gate` returns only such gates"
        if self._saved.get(path.name, 0) == calibrator.decided:
            return None
        self._saved[path.name] = calibrator.decided
        return path, {"models": self._models, "calibrator": calibrator.state()}

    def write(self, path: Path, state: Any) -> None:
        """Write one state atomically.

        :raises StorageError: the disk refuses.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        write_state(path, state)

    def _path(self, method: str, rate: float) -> Path:
        return self._folder / f"{method}-{rate:g}.json"
