"""Drift monitor: sequential two-sample tests and a martingale of a run's scores against the stored
ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from atts.calibration.duplicate_scores import DuplicateScores, copied_p_value
from atts.calibration.exact_rate import check_fraction
from atts.calibration.score_history import Ranks
from atts.calibration.state import Part, StateTable
from atts.calibration.stored import StoredScores
from atts.calibration.two_sample import QuestionSample, two_sample_test
from atts.errors import CalibrationInputError, OptionError

DriftPolicy = Literal["recalibrate", "widen", "escalate", "report"]
DRIFT_POLICIES: tuple[DriftPolicy, ...] = get_args(DriftPolicy)
Kind = Literal["duplicates", "shift", "martingale"]

_MAIN = 300
# after so many scores of the stored turn, with this share of the false-alarm probability
_LOOKS = (
    *((64, 0.03), (100, 0.03), (160, 0.03), (_MAIN, 0.767)),
    *((600, 0.03), (1500, 0.03), (4800, 0.03)),
)
# of the share of the main look, spent on the 300th score of all where other turns are among them
_EARLY = 0.2
# the share of each look for repeats in the stored questions that live ones do not show
_COPIED = 0.003
_MARTINGALE = 0.029  # its share
# an alarm also needs p below so many times its share were the stored questions a sample themselves
_SLACK = 3.5
_FEWEST = 4  # live questions at a look, stored ones at all
_KEPT = 512  # live questions remembered
_BETS = (-1.0, -0.5, 0.0, 0.5, 1.0)
_JUMP = 0.01  # the share of the capital that moves between the bets at each step


class SimpleJumper(Part):
    """The simple jumper martingale: five bets, between which a little capital moves at each step.

    On p-values that are independent and uniform, as smoothed online conformal p-values of
    exchangeable values are, its value ever reaches 1 / a with probability at most a (Ville). Kept
    in logarithms, so it cannot overflow.

    >>> martingale = SimpleJumper()
    >>> for _ in range(20): martingale.update(0.99)
    >>> martingale.log_value > 4
    True
    """

    __slots__ = ("_log_total", "_shares", "log_peak")
    saved = ("_shares", "_log_total", "log_peak")

    def __init__(self) -> None:
        self._shares = [1 / len(_BETS)] * len(_BETS)
        self._log_total = 0.0
        self.log_peak = 0.0

    def update(self, p: float) -> None:
        """Bet on one p-value.

        :raises CalibrationInputError: if it is outside [0, 1].
        """
        if not 0 <= p <= 1:
            raise CalibrationInputError("p-value", p, "a number in [0, 1]")
        common = _JUMP / len(_BETS)
        grown = [
            ((1 - _JUMP) * share + common) * (1 + bet * (p - 0.5))
            for share, bet in zip(self._shares, _BETS, strict=True)
        ]
        total = math.fsum(grown)
        self._shares = [share / total for share in grown]
        self._log_total += math.log(total)
        self.log_peak = max(self.log_peak, self._log_total)

    @property
    def log_value(self) -> float:
        """The logarithm of the capital."""
        return self._log_total

    def alarm(self, significance: float) -> bool:
        """Whether the capital has ever reached 1 / significance."""
        return self.log_peak >= -math.log(significance)


@dataclass(frozen=True, slots=True)
class DriftEvent:
    """An alarm: what was seen after how many live scores, how surprising it is, what the policy
    did.
    """

    kind: Kind
    scores: int
    questions: int
    p: float
    action: DriftPolicy
    message: str


class DriftMonitor(Part):
    """Compares the questions of a run with the stored ones, as it goes.

    The unit is the question, because scores of one question move together. After 64, 100, 160 and,
    with three quarters of the significance, 300 scores of the stored turn, then 600, 1,500 and
    4,800, and after 300 scores of all turns, the means and spreads of the latest questions are
    compared with the stored ones as distributions; between the looks a martingale bets on the
    smoothed rank of each question among all before it. The shares of all looks and of the
    martingale add up to `significance`: that bounds the false alarms of a whole run whose questions
    are draws of the stored ones. Where the stored ones are themselves a sample of the distribution
    that the run draws from, it is at most 3.5 times as much.

    Repeated scores that no sampling explains are an alarm at once. Those that siblings may have
    written alike are one if the siblings of the run do not.
    """

    saved = ("_live", "_scores", "_seen", "_looks", "_ranked", "_martingale")

    def __init__(
        self, stored: StoredScores, significance: float = 0.007, policy: DriftPolicy = "recalibrate"
    ) -> None:
        """:raises OptionError: for an unknown policy.

        :raises CalibrationInputError: for a significance outside (0, 1).
        """
        if policy not in DRIFT_POLICIES:
            raise OptionError(str(policy), "is not a drift policy", DRIFT_POLICIES)
        check_fraction("significance", significance)
        self.policy: DriftPolicy = policy
        self.significance = significance
        self.events: list[DriftEvent] = []
        self._turn = min(stored.turns, default=0)
        self._reference = QuestionSample.of(stored, self._turn)
        self._live = StateTable(str, list[float])
        self._scores = self._seen = self._looks = 0
        self._ranked = Ranks(self._reference.early)
        self._martingale = SimpleJumper()
        self._repeats = DuplicateScores.of(stored)
        if self._repeats.fault:
            self._alarm("duplicates", 0.0, self._repeats.fault)

    @property
    def watching(self) -> bool:
        """Whether there is anything to compare with, and nothing was noticed yet."""
        return not self.events and len(self._reference.questions) >= _FEWEST

    def observe(
        self, nonconformity: float, question: str, turn: int, theta: float = 0.5
    ) -> DriftEvent | None:
        """Look at one more score of the run; the alarm, if this score raises it.

        `theta` is a uniform of this chunk, for ties among questions.
        """
        self._scores += 1
        if not self.watching:
            return None
        if turn == self._turn and math.isfinite(nonconformity):
            self._take(nonconformity, question, theta)
        if not self.events and len(self._live) >= _FEWEST:
            self._look_if_due()
        return self.events[-1] if self.events else None

    def _take(self, nonconformity: float, question: str, theta: float) -> None:
        self._seen += 1
        key = question or f"chunk {self._scores}"  # a chunk of no question is a question of its own
        scores = self._live[key]
        if len(scores) < self._reference.size:
            scores.append(nonconformity)
            if len(scores) == self._reference.half:
                self._bet(math.fsum(scores) / len(scores), theta)
        if len(self._live) > _KEPT:
            del self._live[next(iter(self._live))]

    def _look_if_due(self) -> None:
        scores, share = _LOOKS[self._looks] if self._looks < len(_LOOKS) else (math.inf, 0.0)
        is_due = self._seen >= scores
        share = (share - (_EARLY if scores == _MAIN < self._scores else 0.0)) if is_due else 0.0
        if self._scores == _MAIN:
            share = max(share, _EARLY)
        if share:
            self._look(self.significance * share)
        self._looks += is_due

    def judge_alone(self) -> None:
        """Alarm on repeats that only the scores of a run could explain, where there will be no run."""
        if self.watching and self._repeats.doubt:
            self._alarm(
                "duplicates", 1.0, f"{self._repeats.doubt}; the scores of a run would tell (--live)"
            )

    def _bet(self, mean: float, theta: float) -> None:
        below, equal = self._ranked.counts(mean)
        self._martingale.update((below + theta * (1 + equal)) / (len(self._ranked) + 1))
        self._ranked.add(mean)
        if self._martingale.alarm(self.significance * _MARTINGALE):
            p = math.exp(-self._martingale.log_peak)
            self._alarm(
                "martingale", p, "the questions' scores have moved away from those before them"
            )

    def _look(self, significance: float) -> None:
        live = list(self._live.values())
        p = copied_p_value(self._reference, live) if self._repeats.doubt else 1.0
        if p <= self.significance * _COPIED:
            share = f"{self._repeats.within:.0%} of the stored scores repeat another one of their question"
            return self._alarm(
                "duplicates", p, f"{share}, those of the run do not: draws that were copied"
            )
        found = two_sample_test(self._reference, live, significance, self._looks)
        if found.drawn <= significance and found.exchangeable <= _SLACK * significance:
            message = f"the scores of {found.questions} questions are not distributed like the stored ones"
            self._alarm("shift", found.drawn, message)

    def _alarm(self, kind: Kind, p: float, message: str) -> None:
        self.events.append(DriftEvent(kind, self._scores, len(self._live), p, self.policy, message))

    def state(self) -> Any:
        """What was seen so far, as JSON; the stored scores are not part of it."""
        return {**super().state(), "events": [asdict(event) for event in self.events]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`, on a fresh monitor of the same stored scores."""
        self._ranked = Ranks()
        self.merge(state)
        self.events = [DriftEvent(**event) for event in state["events"]]
