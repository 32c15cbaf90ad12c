"""A sink that keeps every event of a graph as it came."""

from __future__ import annotations

from typing import Any

from atts.core import CallSpan, ProblemSpan, RolloutSpan


class Recording(list[Any]):
    """A sink that keeps every event."""

    def __call__(self, event: object) -> None:
        """Keep it."""
        self.append(event)

    def nodes(self) -> list[CallSpan]:
        """The calls, in the order they ended."""
        return [event for event in self if isinstance(event, CallSpan)]

    @property
    def rollouts(self) -> list[RolloutSpan]:
        """The rollouts, in the order they ended."""
        return [event for event in self if isinstance(event, RolloutSpan)]

    @property
    def problems(self) -> list[ProblemSpan]:
        """The problems, in the order they ended."""
        return [event for event in self if isinstance(event, ProblemSpan)]
