"""Hard caps on escalations: a token bucket and a budget per group, exact under any order of
completions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from fractions import Fraction

from atts.calibration.exact_rate import Rate, exact_rate
from atts.core import Decision
from atts.errors import CalibrationInputError


class TokenBucket:
    """Target slots earned by deciding and spent by escalating.

    Every decision earns `rate` of a slot, up to `burst` slots in hand; an escalation spends one and
    is refused without one. So of any n consecutive decisions at most burst + rate * n escalate, and
    never more than `total` in all, exactly (slots are counted in fractions) and in whatever order
    chunks complete.

    >>> bucket = TokenBucket(rate=0.5, burst=1)
    >>> [bucket.admit(True) for _ in range(4)]
    [True, False, True, False]
    """

    __slots__ = ("_burst", "_rate", "_total", "spent", "tokens")

    def __init__(
        self, rate: Rate, burst: int = 1, total: int | None = None, start: int | None = None
    ) -> None:
        """`start` slots are in hand at first, `burst` if not said; with 0 no prefix exceeds rate *
        n.

        :raises CalibrationInputError: for a rate outside [0, 1], a burst below 1, a negative total,
            or a start outside [0, burst].
        """
        self._rate = exact_rate(rate)
        if burst < 1:
            raise CalibrationInputError("burst", burst, "at least one slot")
        if total is not None and total < 0:
            raise CalibrationInputError("total", total, "a number of slots from 0, or None")
        if start is not None and not 0 <= start <= burst:
            raise CalibrationInputError(
                "start", start, f"a number of slots from 0 to burst = {burst}"
            )
        self._burst = burst
        self._total = total
        self.tokens = Fraction(burst if start is None else start)  # slots in hand
        self.spent = 0

    def admit(self, wanted: bool) -> bool:
        """Count one decision; True iff it wanted to escalate and a slot was there, which is then
        spent.
        """
        granted = wanted and self.tokens >= 1 and (self._total is None or self.spent < self._total)
        self.spent += granted
        self.tokens = min(Fraction(self._burst), self.tokens - granted + self._rate)
        return granted


class GroupBudget:
    """At most `budget` escalations in each group, such as B of the m samples of a question's turn.

    >>> group = GroupBudget(budget=1)
    >>> group.admit(("q1", 0), True), group.admit(("q1", 0), True), group.admit(("q2", 0), True)
    (True, False, True)
    """

    __slots__ = ("_budget", "spent")

    def __init__(self, budget: int) -> None:
        """:raises CalibrationInputError: for a negative budget."""
        if budget < 0:
            raise CalibrationInputError("B", budget, "a number from 0")
        self._budget = budget
        self.spent = Counter[
            Hashable
        ]()  # escalations of each group so far; a finished group may be popped

    def admit(self, group: Hashable, wanted: bool) -> bool:
        """True iff an escalation was wanted and the group has one left, which is then spent."""
        granted = wanted and self.spent[group] < self._budget
        if granted:
            self.spent[group] += 1
        return granted


def capped(decision: Decision, bucket: TokenBucket) -> Decision:
    """The decision after a hard cap: unchanged, or accepted with the cap as its reason because no
    slot was left.
    """
    if bucket.admit(decision.escalate) or not decision.escalate:
        return decision
    return replace(
        decision,
        action="accept",
        why=f"{decision.why}; hard cap: no target slot left",
        origin="budget",
    )
