"""Sequential comparison with an earlier run, which ends a run once the paired difference is
settled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from atts.evaluators import ConfidenceSequence, Sequential
from atts.journal import COMPARED, FinishedProblem, RunState, Warned


@dataclass(frozen=True, slots=True)
class StopWhen:
    """What a run is compared with as it goes: the votes of an earlier one, and when enough is
    known.

    Problems must come in an order that does not depend on them, such as one drawn by seed.
    """

    against: str
    votes: Mapping[str, float] = field(repr=False)  # by problem, in [0, 1]
    points: float = 0.0  # differences within so many points count as alike


class SequentialComparison:
    """Takes problems in as they end, looks at them in the order of the dataset, and knows when it
    is settled.

    What ends first is short: a problem counts once all before it are over, so that one which failed
    holds up those after it until a session has done it.
    """

    def __init__(
        self, rule: StopWhen | None, state: RunState, record: Callable[[Warned], object]
    ) -> None:
        self._rule = rule
        self._state = state
        self._record = record
        self.answer = None if rule is None else Sequential("undecided", 0, -1.0, 1.0, rule.points)
        self.spared = 0  # problems that were not needed
        self._sequence = ConfidenceSequence()
        self._order = list[str]()
        self._next = 0
        self._over: dict[str, float | None] = {}  # None: it was not graded

    def needs(self, problem: str) -> bool:
        """See the next problem of the dataset: whether it is to be worked on, as all that were
        begun are.
        """
        if self._rule is not None:
            self._order.append(problem)
            self._look(self._rule)
        if (
            self._is_settled
            and problem not in self._state.open
            and problem not in self._state.finished
        ):
            self.spared += 1
            return False
        return True

    def end(self, line: FinishedProblem) -> None:
        """A problem is over for good."""
        if self._rule is not None:
            self._over[line.problem] = None if line.verdict is None else float(line.is_correct)
            self._look(self._rule)

    def tell(self) -> str:
        """What came of it, in words and once in the journal; "" where nothing is compared."""
        if self._rule is None:
            return ""
        words = (
            f"against {self._rule.against}: {self.answer}; problems came in an order drawn by "
            f"seed. This interval "
            "allows for a look after every problem, those of other numbers do not"
        )
        if COMPARED not in self._state.said:
            self._state.said.add(COMPARED)
            self._record(Warned(COMPARED, words))
        return words

    @property
    def _is_settled(self) -> bool:
        return self.answer is not None and self.answer.settled != "undecided"

    def _look(self, rule: StopWhen) -> None:
        while (
            self._next < len(self._order)
            and self._order[self._next] in self._over
            and not self._is_settled
        ):
            name = self._order[self._next]
            self._next += 1
            right = self._over[name]
            if right is not None and name in rule.votes:
                self._sequence.add(right - rule.votes[name])
                self.answer = self._sequence.answer(rule.points)
                if self._is_settled:
                    self.tell()
