"""The steps of a run's gate, stored in arrays, so that a million steps fit into memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast, overload

from atts.core import Action, Decision, Origin

StepKind = Literal["decided", "observed"]


@dataclass(frozen=True, slots=True)
class GateStep:
    """A step of a gate: a decision that the gate took, or an outcome that it observed after a
    decision.
    """

    kind: StepKind
    decision: Decision
    escalated: bool
    # estimated share of the run's decisions that were still to be made, 0 to 1; None if unknown
    left: float | None = None


class Steps(Sequence[GateStep]):
    """A selection of the steps in a log; a step object is built only when it is accessed."""

    def __init__(self, log: StepLog, places: Sequence[int]) -> None:
        self._log = log
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> GateStep: ...
    @overload
    def __getitem__(self, index: slice) -> Steps: ...
    def __getitem__(self, index: int | slice) -> GateStep | Steps:
        if isinstance(index, slice):
            return Steps(self._log, self._places[index])
        return self._log.read(self._places[index])

    def by_question(self) -> dict[str, tuple[int, int]]:
        """Return for each question the number of escalated steps and the number of all steps."""
        return self._log.count_by_question(self._places)


class StepLog:
    """The steps of a run's gate in order, with about 90 bytes of memory per step.

    The reasons of decisions are stored only if `keeps_reasons` is True.
    """

    def __init__(self, *, keeps_reasons: bool = False) -> None:
        self._texts: dict[str, int] = {}  # for each different text: its index in `_spellings`
        self._spellings: list[str] = []
        # four numbers for each step: the indices of the texts kind, question, action and origin
        self._codes = array("I")
        # Four integers for each step: turn, sample, the index of the score request, and a bit mask.
        # The mask says whether the chunk was escalated, and which optional values are not None.
        self._numbers = array("q")
        self._values = array("d")  # five floats for each step: rate, score, p-value, length, left
        self._keeps_reasons = keeps_reasons
        self._reasons = bytearray()
        self._reason_ends = array("Q")

    def __len__(self) -> int:
        return len(self._codes) // 4

    def append(self, step: GateStep) -> None:
        """Append a step to the log."""
        decision = step.decision
        for text in (step.kind, decision.question, decision.action, decision.origin):
            self._codes.append(self._number(text))
        known = int(step.escalated)
        if decision.issue is not None:
            known |= 2
        optional = (decision.score, decision.p, decision.length, step.left)
        self._values.append(decision.rate)
        for place, value in enumerate(optional):
            if value is not None:
                known |= 4 << place
            self._values.append(0.0 if value is None else value)
        self._numbers.extend((decision.turn, decision.sample, decision.issue or 0, known))
        if self._keeps_reasons:
            self._reasons += bytes(decision.why, "utf-8", "surrogatepass")
            self._reason_ends.append(len(self._reasons))

    def read(self, place: int) -> GateStep:
        """Return the step at an index.

        Its decision has no reason if the log does not store reasons.
        """
        texts = [self._spellings[code] for code in self._codes[4 * place : 4 * place + 4]]
        kind, question, action, origin = texts
        turn, sample, issue, known = self._numbers[4 * place : 4 * place + 4]
        rate, *values = self._values[5 * place : 5 * place + 5]
        score, p, length, left = (
            value if known & (4 << number) else None for number, value in enumerate(values)
        )
        decision = Decision(
            cast("Action", action),
            rate,
            question,
            turn=turn,
            sample=sample,
            issue=issue if known & 2 else None,
            score=score,
            p=p,
            why=self._reason(place),
            origin=cast("Origin", origin),
            length=length,
        )
        return GateStep(cast("StepKind", kind), decision, bool(known & 1), left)

    def between(self, begin: int, end: int) -> Steps:
        """Return the steps with indices from `begin` to `end - 1`."""
        return Steps(self, range(begin, end))

    def count_by_question(self, places: Iterable[int]) -> dict[str, tuple[int, int]]:
        """Return for each question how many of the steps at `places` escalated, and how many steps
        there are.
        """
        escalated: dict[int, int] = {}
        asked: dict[int, int] = {}
        for place in places:
            question = self._codes[4 * place + 1]
            asked[question] = asked.get(question, 0) + 1
            escalated[question] = escalated.get(question, 0) + (self._numbers[4 * place + 3] & 1)
        return {
            self._spellings[question]: (escalated[question], count)
            for question, count in asked.items()
        }

    def of_kind(self, kind: StepKind) -> Steps:
        """Return the steps of one kind, which is either decisions or observations."""
        code = self._texts.get(kind)
        places = array("I")
        if code is not None:
            places.extend(place for place, found in enumerate(self._codes[::4]) if found == code)
        return Steps(self, places)

    def _reason(self, place: int) -> str:
        if not self._keeps_reasons:
            return ""
        begin = self._reason_ends[place - 1] if place else 0
        return self._reasons[begin : self._reason_ends[place]].decode("utf-8", "surrogatepass")

    def _number(self, text: str) -> int:
        number = self._texts.get(text)
        if number is None:
            number = self._texts[text] = len(self._spellings)
            self._spellings.append(text)
        return number
