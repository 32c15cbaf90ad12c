"""Recorded gates: decisions of a resumed run stay as recorded, and the gate's state is rebuilt by
replaying them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from atts.calibration import DriftEvent
from atts.core import Decision
from atts.journal import Decided, Drifted, Observed, feature_numbers, recorded_features
from atts.pipelines import Features, Gate, RoundGate
from atts.run.calls import ProblemLog
from atts.run.recorder import Recorder


class AlarmWatch:
    """Records alarms as they are raised; those of earlier sessions are in the journal already."""

    def __init__(self, alarms: Callable[[], Sequence[DriftEvent]], recorder: Recorder) -> None:
        self._alarms = alarms
        self._recorder = recorder
        self._seen = len(alarms())

    def look(self) -> None:
        """Record what is new."""
        alarms = self._alarms()
        for alarm in alarms[self._seen :]:
            self._recorder.record(
                Drifted(alarm.kind, alarm.p, alarm.scores, alarm.action, alarm.message)
            )
        self._seen = len(alarms)


class RecordedGate:
    """A gate whose decisions stand once they are recorded. The real one must have lived through
    them before.
    """

    def __init__(self, gate: Gate, steps: ProblemLog, alarms: AlarmWatch) -> None:
        self._gate = gate
        self._steps = steps
        self._recorded = steps.recorded.gate
        self._alarms = alarms

    def preview(self, features: Features) -> Decision:
        """As the gate, or as recorded; see `atts.pipelines.Gate`."""
        calls = self._recorded.get((features.sample, features.turn))
        if calls and isinstance(calls[0], Decided) and calls[0].asked == "preview":
            return calls.popleft().decision
        if calls:  # what was recorded came after a score had been asked for
            return replace(
                calls[0].decision,
                action="verify",
                score=None,
                p=None,
                why="recalled",
                origin="recalled",
            )
        decision = self._gate.preview(features)
        if decision.action != "verify" or decision.issue is not None:
            self._steps.recorder.decided(Decided(decision, feature_numbers(features), "preview"))
        return decision

    def decide(self, features: Features, score: float) -> Decision:
        """As the gate, or as recorded; see `atts.pipelines.Gate`."""
        calls = self._recorded.get((features.sample, features.turn))
        if calls and isinstance(calls[0], Decided):
            return calls.popleft().decision
        decision = self._gate.decide(features, score)
        self._steps.recorder.decided(Decided(decision, feature_numbers(features)))
        return decision

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Teach the gate, unless it was taught before; see `atts.pipelines.Gate`."""
        calls = self._recorded.get((decision.sample, decision.turn))
        if calls and isinstance(calls[0], Observed):
            calls.popleft()
            return
        self._gate.observe(decision, escalated)
        self._steps.recorder.observed(decision, escalated)
        self._alarms.look()


class RecordedRoundGate:
    """The same for rounds: the real gate ranks every round anew, for what it carries over; recorded
    decisions stand.
    """

    def __init__(self, gate: RoundGate, steps: ProblemLog) -> None:
        self._gate = gate
        self._recorded = steps.recorded.gate
        self._recorder = steps.recorder

    def decide_round(self, round_: Sequence[tuple[Features, float]]) -> list[Decision]:
        """As the gate, or as recorded, member by member."""
        decisions: list[Decision] = []
        for (features, _), decision in zip(round_, self._gate.decide_round(round_), strict=True):
            calls = self._recorded.get((features.sample, features.turn))
            if calls and isinstance(calls[0], Decided):
                decisions.append(calls.popleft().decision)
            else:
                self._recorder.decided(Decided(decision, feature_numbers(features), "round"))
                decisions.append(decision)
        return decisions


def replay_event(gate: Gate, event: Decided | Observed) -> None:
    """Let a gate live through a recorded call again: called in the recorded order, it is then what
    it was.
    """
    decision = event.decision
    if isinstance(event, Observed):
        gate.observe(decision, event.escalated)
        return
    features = recorded_features(decision.question, decision.turn, decision.sample, event.features)
    if event.asked == "preview":
        gate.preview(features)
    elif decision.score is not None:
        gate.decide(replace(features, issue=decision.issue), decision.score)
