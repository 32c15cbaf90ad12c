"""One call of `Graph.run`: what ends it before its time."""

from __future__ import annotations

from typing import Protocol

import anyio

from atts.graph.admission import Admission
from atts.graph.ledger import Ledger


class Closable(Protocol):
    """Rollouts that can be told to end."""

    def close(self, why: str) -> None:
        """Start nothing more and cancel what runs."""
        ...


class Run:
    """The state of one run; its `cancel_scope` holds everything that the run started."""

    __slots__ = ("admission", "cancel_scope", "error", "groups", "intake", "ledger", "stopped", "why")

    def __init__(self, ledger: Ledger, admission: Admission) -> None:
        self.ledger = ledger
        self.admission = admission
        self.cancel_scope = anyio.CancelScope()
        self.intake = anyio.CancelScope()  # holds the opening of problems alone
        self.groups: dict[Closable, None] = {}  # open ones, in the order of opening
        self.error: Exception | None = None  # the first that was fatal
        self.stopped = ""
        self.why = ""

    def fail(self, error: Exception) -> None:
        """End everything; the run raises this error, unless another came first."""
        if self.error is None:
            self.error = error
            self.cancel("failed")

    def cancel(self, why: str) -> None:
        """End everything."""
        self.why = self.why or why
        self.stopped = self.stopped or why
        self.cancel_scope.cancel()

    def stop(self, why: str) -> None:
        """Open no more problems, end all rollouts, let the problems conclude from what they have."""
        self.stopped = self.stopped or why
        self.intake.cancel()
        for group in list(self.groups):
            group.close(why)
