"""Noticing that the stored scores are not those of this run, with false alarms bounded although questions cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from atts.calibration.martingale import SimpleJumper
from atts.calibration.samples import QuestionSample
from atts.calibration.stored import StoredScores
from atts.errors import CalibrationInputError, OptionError

Policy = Literal["recalibrate", "widen", "escalate", "report"]
POLICIES: tuple[Policy, ...] = ("recalibrate", "widen", "escalate", "report")
Kind = Literal["duplicates", "shift", "martingale"]

_FIRST_LOOK, _GROWTH = 5, 1.3  # live questions at the first two-sample look, and from one look to the next
_MARTINGALE_SHARE = 0.2  # of the false-alarm level; the rest is for the looks


@dataclass(frozen=True, slots=True)
class DriftEvent:
    """An alarm: what was seen after how many live scores, how surprising it is, what the policy did."""

    kind: Kind
    scores: int
    questions: int
    p: float
    action: Policy
    message: str

    def state(self) -> dict[str, Any]:
        """The event as JSON."""
        return asdict(self)


def duplicate_share(stored: StoredScores) -> float:
    """The share of stored scores that repeat another one of the same question exactly; 0 for scores on a coarse grid.

    Perplexities of sampled text are practically never equal, so a few per cent mean draws that were copied or
    re-used. A score that is a mark out of ten ties by nature: where most values survive rounding to three decimals
    nothing is said.
    """
    values = np.asarray(stored.badness, float)
    finite = values[np.isfinite(values)]
    raw = np.asarray(stored.scores, float)
    raw = raw[np.isfinite(raw)]
    if not len(finite) or float(np.mean(raw == np.round(raw, 3))) > 0.5:
        return 0.0
    pairs = set(zip(stored.questions, stored.badness, strict=True)) if stored.clustered else set(stored.badness)
    return 1 - len(pairs) / len(stored.badness)


class DriftMonitor:
    """Compares the questions of a run with the stored ones, as it goes.

    The unit is the question, because scores of one question move together. At 5, 7, 10, ... live questions their
    levels and spreads are compared with the stored questions' (a two-sample test in normal scores); between the looks
    a martingale bets on the smoothed rank of each question among all before it. The levels of all looks and of the
    martingale add up to `level`, which bounds the false alarms of a whole run whose questions are exchangeable with
    the stored ones (for the looks to the accuracy of a t-test).
    """

    def __init__(self, stored: StoredScores, level: float = 0.008, policy: Policy = "recalibrate") -> None:
        """:raises OptionError: for an unknown policy.

        :raises CalibrationInputError: for a level outside (0, 1).
        """
        if policy not in POLICIES:
            raise OptionError(str(policy), "is not a drift policy", POLICIES)
        if not 0 < level < 1:
            raise CalibrationInputError("level", level, "a number strictly between 0 and 1")
        self.policy: Policy = policy
        self.level = level
        self.events: list[DriftEvent] = []
        self._turn = min(stored.turns, default=0)
        self._reference = QuestionSample.of(stored, self._turn)
        self._live = dict[str, list[float]]()
        self._scores = self._looks = 0
        self._next_look = _FIRST_LOOK
        self._ranked = list(self._reference.early)
        self._martingale = SimpleJumper()
        share = duplicate_share(stored)
        if share > 0.02:
            self._alarm("duplicates", 0.0, f"{share:.0%} of the stored scores repeat another one of their question")

    @property
    def watching(self) -> bool:
        """Whether there is anything to compare with, and nothing was noticed yet."""
        return not self.events and bool(self._reference.levels)

    @property
    def alarmed(self) -> bool:
        """Whether anything was noticed so far; a monitor looks on only until then."""
        return bool(self.events)

    def observe(self, badness: float, question: str, turn: int, theta: float = 0.5) -> DriftEvent | None:
        """Look at one more score of the run; the alarm, if this score raises it.

        `theta` is a uniform of this chunk, for ties among questions.
        """
        self._scores += 1
        if self.alarmed or turn != self._turn or not math.isfinite(badness) or not self._reference.levels:
            return None
        key = question or f"chunk {self._scores}"  # a chunk of no question is a question of its own
        scores = self._live.setdefault(key, [])
        scores.append(badness)
        if len(scores) == self._reference.half:
            self._bet(math.fsum(scores) / len(scores), theta)
        if not self.alarmed and len(self._live) >= self._next_look:
            self._look()
        return self.events[-1] if self.events else None

    def _bet(self, mean: float, theta: float) -> None:
        below = sum(other < mean for other in self._ranked)
        equal = sum(other == mean for other in self._ranked)
        self._martingale.update((below + theta * (1 + equal)) / (len(self._ranked) + 1))
        self._ranked.append(mean)
        if self._martingale.alarm(self.level * _MARTINGALE_SHARE):
            p = math.exp(-self._martingale.log_peak)
            self._alarm("martingale", p, "the questions' scores have moved away from those before them")

    def _look(self) -> None:
        self._looks += 1
        self._next_look = max(self._next_look + 1, math.ceil(self._next_look * _GROWTH))
        # 1/(j + 4)^2 over its sum from j = 1: looks at few questions can tell little, so they get little.
        share = (1 - _MARTINGALE_SHARE) * (self._looks + 4) ** -2 / 0.22132
        p, questions = self._reference.compare(self._live.values())
        if p < self.level * share:
            self._alarm("shift", p, f"the scores of {questions} questions are not distributed like the stored ones")

    def _alarm(self, kind: Kind, p: float, message: str) -> None:
        self.events.append(DriftEvent(kind, self._scores, len(self._live), p, self.policy, message))

    def state(self) -> dict[str, Any]:
        """What was seen so far, as JSON; the stored scores are not part of it."""
        return {
            "live": self._live,
            "scores": self._scores,
            "looks": self._looks,
            "next_look": self._next_look,
            "ranked": self._ranked,
            "martingale": self._martingale.state(),
            "events": [event.state() for event in self.events],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`, on a monitor of the same stored scores."""
        self._live = {question: list(scores) for question, scores in state["live"].items()}
        self._scores, self._looks = int(state["scores"]), int(state["looks"])
        self._next_look = int(state["next_look"])
        self._ranked = list(state["ranked"])
        self._martingale.restore(state["martingale"])
        self.events = [DriftEvent(**event) for event in state["events"]]
