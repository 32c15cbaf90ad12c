"""A stand-in for a journal that records the events of a graph in order."""

from __future__ import annotations

from typing import Any

from atts.core import CallSpan, ProblemSpan, RolloutSpan


class Recording(list[Any]):
    """A sink that records every event."""

    def __call__(self, event: object) -> None:
        """Record the event."""
        self.append(event)

    def nodes(self) -> list[CallSpan]:
        """Return the calls in the order in which they ended."""
        return [event for event in self if isinstance(event, CallSpan)]

    @property
    def rollouts(self) -> list[RolloutSpan]:
        """Return the rollouts in the order in which they ended."""
        return [event for event in self if isinstance(event, RolloutSpan)]

    @property
    def problems(self) -> list[ProblemSpan]:
        """Return the problems in the order in which they ended."""
        return [event for event in self if isinstance(event, ProblemSpan)]
