"""The state that all scopes of one graph share: its clock, its pools, its sink, its totals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from atts.concurrency import clock
from atts.core import RolloutSpan, RolloutStatus
from atts.errors import OptionError
from atts.graph.limits import Limit, Pool
from atts.graph.retries import RetryPolicy

Sink = Callable[[object], object]
"""Receives every event the moment it happens; it must not block, and what it returns is left alone.
"""


@dataclass(frozen=True, slots=True)
class EngineUse:
    """One engine's pool: now (`in_use`, `tokens_in_use`, `waiting`) and so far (the seconds, summed
    over slots).
    """

    slots: int | None
    tokens: int | None
    in_use: int
    tokens_in_use: int
    waiting: int
    busy_seconds: float
    queue_seconds: float


@dataclass(frozen=True, slots=True)
class GraphStats:
    """A snapshot of a graph; counts since it was made."""

    seconds: float  # with a run in progress
    problems_open: int
    problems_done: int
    rollouts_waiting: int
    rollouts_in_flight: int
    rollouts: Mapping[str, int]  # ended, by status
    nodes: int
    sibling_seconds: float  # Ts, summed over rollouts
    engines: Mapping[str, EngineUse]

    def busy_share(self, engine: str) -> float:
        """Part of the engine's slot-seconds that was used; nan where slots are not bounded or no
        time passed.
        """
        use = self.engines[engine]
        return (
            use.busy_seconds / (use.slots * self.seconds)
            if use.slots and self.seconds
            else float("nan")
        )


def _no_clock() -> float:
    raise AssertionError("a graph has a clock only while it runs")


@dataclass(slots=True, eq=False)
class GraphState:
    """The mutable heart of a graph; only its scopes touch it."""

    pools: dict[str, Pool]
    strict: bool  # engines without a pool are refused
    policy: RetryPolicy
    sink: Sink | None
    last_id: int
    now: Callable[[], float] = _no_clock
    nodes: int = 0
    problems_done: int = 0
    rollouts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(RolloutStatus), 0)
    )
    failures_in_row: int = 0
    sibling_seconds: float = 0.0

    def pool(self, engine: str) -> Pool:
        """The engine's pool; without any limits given, every engine has an unbounded one.

        :raises OptionError: limits were given, and none for this engine.
        """
        if engine not in self.pools:
            if self.strict:
                raise OptionError(
                    engine, "the graph has no limit for this engine", list(self.pools)
                )
            self.pools[engine] = Pool(engine, Limit())  # never queues, so it need not know the loop
        return self.pools[engine]

    def enter_loop(self) -> None:
        """Prepare for the loop that is running."""
        self.now = clock()
        for pool in self.pools.values():
            pool.enter_loop()

    def emit(self, event: object) -> None:
        """Pass an event on."""
        if self.sink is not None:
            self.sink(event)

    def close_rollout(self, span: RolloutSpan) -> None:
        """Count a rollout that ended, and pass it on."""
        self.rollouts[span.status] += 1
        self.sibling_seconds += span.waited
        self.emit(span)

    def has_given_up(self, status: RolloutStatus) -> bool:
        """Count how a rollout ended; whether too many in a row have failed to go on."""
        if status == "failed":
            self.failures_in_row += 1
        elif status == "done":
            self.failures_in_row = 0
        limit = self.policy.give_up_after
        return limit is not None and self.failures_in_row >= limit
