"""The reorder buffer: scores are released in the order in which they were asked for, not in which
they finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atts.errors import CalibrationInputError

Held = tuple[float, str, int, float | None]
"""A score on its way into a pool: nonconformity, question, turn, length of its chunk where that
counts.
"""


HOLD = 64  # scores that may wait for an earlier issue, unless told


class ReorderBuffer:
    """A reorder buffer with a watermark: an issue is released once every earlier one was pushed or
    skipped.

    What finishes first is short, so pools fed in completion order are biased towards short chunks
    at any moment. Issues count up from 0 without gaps; a chunk that never gets a score must be
    skipped. At most `limit` scores are held: beyond that the oldest missing issues are given up
    (counted in `given_up`), and released at once if they arrive after all.
    """

    __slots__ = ("_held", "_limit", "_next", "_skipped", "given_up")

    def __init__(self, limit: int = HOLD) -> None:
        """:raises CalibrationInputError: for a limit below 1."""
        if limit < 1:
            raise CalibrationInputError("limit of held scores", limit, "at least 1")
        self._limit = limit
        self._next = 0
        self._held = dict[int, Held]()
        self._skipped = set[int]()
        self.given_up = 0

    def push(self, issue: int, score: Held) -> list[Held]:
        """Take the score of an issue; all that may now be released, in order of issue.

        :raises CalibrationInputError: for a negative issue.
        """
        if issue < 0:
            raise CalibrationInputError("issue", issue, "a number from 0")
        if issue < self._next or issue in self._held:
            return [score]
        self._held[issue] = score
        return self._release()

    def skip(self, issue: int) -> list[Held]:
        """Do not wait for this issue; all that may now be released."""
        if issue >= self._next:
            self._skipped.add(issue)
        return self._release()

    def holds(self, question: str) -> bool:
        """Whether a score of this question waits."""
        return any(held[1] == question for held in self._held.values())

    def flush(self) -> list[Held]:
        """Everything held, in order, waiting for nothing."""
        released = [self._held[issue] for issue in sorted(self._held)]
        if self._held:
            self._next = max(self._held) + 1
        self._held = {}
        self._skipped = {issue for issue in self._skipped if issue >= self._next}
        return released

    def _release(self) -> list[Held]:
        released = list[Held]()
        while True:
            if self._next in self._held:
                released.append(self._held.pop(self._next))
            elif self._next in self._skipped:
                self._skipped.discard(self._next)
            elif len(self._held) > self._limit:
                self.given_up += 1
            else:
                return released
            self._next += 1

    def state(self) -> dict[str, Any]:
        """What is held and awaited, as JSON."""
        return {
            "next": self._next,
            "held": [[issue, *held] for issue, held in self._held.items()],
            "skipped": sorted(self._skipped),
            "given_up": self.given_up,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self._next = int(state["next"])
        self.given_up = int(state["given_up"])
        self._held = {
            int(issue): (float(b), str(q), int(t), length)
            for issue, b, q, t, length in state["held"]
        }
        self._skipped = set(map(int, state["skipped"]))


def with_lengths(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an order as it is written now: older ones hold scores without lengths."""
    return {**state, "held": [[*row, None] if len(row) == 4 else row for row in state["held"]]}
