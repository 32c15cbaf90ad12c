"""Fixtures for tests of the task graph: a watched engine, numbered problems, and virtual time."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import anyio
import pytest

from atts.graph import Graph
from atts.testing.clock import Backend, run_virtual

T = TypeVar("T")


@dataclass(frozen=True)
class Named:
    """A problem that has only the id that the graph needs."""

    id: str


class Tick(Protocol):
    """A function that an engine calls at each step of each call, with the number of the step."""

    def __call__(self, step: int) -> None: ...


@dataclass
class Watched:
    """An engine that sleeps for the requested time, counts the calls in flight, and can be
    disturbed at any step.
    """

    tick: Tick | None = None
    in_flight: dict[str, int] = field(default_factory=dict[str, int])
    peak: dict[str, int] = field(default_factory=dict[str, int])
    calls: int = 0
    steps: int = 0

    def step(self) -> None:
        """Count one more step, and call the test's function with the number of the step."""
        self.steps += 1
        if self.tick is not None:
            self.tick(self.steps)

    async def work(self, name: str, seconds: float) -> float:
        """Sleep for the requested time, and count the call as ended however it ends."""
        self.calls += 1
        now = self.in_flight[name] = self.in_flight.get(name, 0) + 1
        self.peak[name] = max(self.peak.get(name, 0), now)
        try:
            self.step()
            await anyio.sleep(seconds)
            self.step()
        finally:
            self.in_flight[name] -= 1
        return seconds


@pytest.fixture
def engine() -> Watched:
    """Make a watched engine."""
    return Watched()


@pytest.fixture
def named() -> Callable[[int], list[Named]]:
    """Return a function that makes numbered problems."""
    return lambda count: [Named(f"p{number}") for number in range(count)]


@pytest.fixture
def virtually(anyio_backend: Backend) -> Callable[[Callable[[], Awaitable[T]]], T]:
    """Return a function that runs an async function under virtual time on this test's back end."""
    return lambda function: run_virtual(function, backend=anyio_backend)


@pytest.fixture
def is_empty() -> Callable[[Graph], bool]:
    """Return a function that checks that a graph has no rollout slot, call slot or token in use, no
    waiter and no open problem.
    """

    def check(graph: Graph) -> bool:
        stats = graph.stats()
        held = [stats.problems_open, stats.rollouts_in_flight, stats.rollouts_waiting]
        held += [
            n
            for use in stats.engines.values()
            for n in (use.in_use, use.tokens_in_use, use.waiting)
        ]
        return not any(held)

    return check
