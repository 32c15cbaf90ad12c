"""Which rollout runs next: one queue over all problems, bounded in flight; and what ends a run
before its time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

import anyio

from atts.errors import OptionError
from atts.graph.graph_state import GraphState

# How much may wait, per rollout in flight, for what is no engine's work, such as grading.
CONCLUDING_PER_PLACE = 4


class Gang(Protocol):
    """Rollouts that were submitted together and may be started."""

    @property
    def unit(self) -> int:
        """How many places one start takes: 1, or all of them when they are admitted together."""
        ...

    @property
    def unstarted(self) -> int:
        """Rollouts not yet started; 0 once the gang is closed."""
        ...

    def start(self) -> None:
        """Start one unit; its places are taken already."""
        ...

    def close(self, why: str) -> None:
        """Start nothing more and cancel what runs."""
        ...


@dataclass(slots=True, eq=False)
class Admission:
    """Places for rollouts in flight.

    Waiting rollouts are started in the order of (priority, problem, submission). The next problem
    is opened only when no rollout waits and a place is free, and not while too many that ended wait
    for what comes after them: so what is open stays in proportion to what is in flight, and a
    grader slower than the engines holds them back.
    """

    places: int
    in_flight: int = 0
    # rollouts that ended, of problems that wait for something else than engines
    concluding: int = 0
    open: int = 0  # problems
    # of these, how many have not submitted a rollout yet: each counts as one rollout
    opening: int = 0
    _queue: list[tuple[int, int, int, Gang]] = field(
        default_factory=list[tuple[int, int, int, Gang]]
    )
    _submitted: int = 0
    _opened: int = 0
    _rooms: list[anyio.Event] = field(default_factory=list[anyio.Event])

    def __post_init__(self) -> None:
        if self.places < 1:
            raise OptionError(
                "rollouts", f"{self.places} in flight would admit nothing; give at least 1"
            )

    @property
    def waiting(self) -> int:
        """Rollouts submitted and not started."""
        return sum(gang.unstarted for *_, gang in self._queue)

    def opened(self) -> int:
        """Count one more open problem, which has submitted nothing yet; its place in the order of
        opening.
        """
        self.open += 1
        self.opening += 1
        self._opened += 1
        return self._opened

    def submit(self, gang: Gang, priority: int, problem: int) -> None:
        """Queue a gang and start what fits.

        :raises OptionError: it wants to be admitted together and is larger than all places.
        """
        if gang.unit > self.places:
            raise OptionError(
                "admit",
                f"{gang.unit} rollouts together need as many places, there are {self.places}",
            )
        self._submitted += 1
        heappush(self._queue, (priority, problem, self._submitted, gang))
        self.dispatch()

    def release(self, places: int) -> None:
        """Give places back and start what fits."""
        self.in_flight -= places
        self.dispatch()

    def dispatch(self) -> None:
        """Start waiting rollouts while there is room, then let a new problem in."""
        queue = self._queue
        while queue:
            gang = queue[0][3]
            if not gang.unstarted:
                heappop(queue)
                continue
            unit = gang.unit
            if self.in_flight + unit > self.places:
                return
            self.in_flight += unit
            gang.start()
        if self._rooms and self.has_room():
            self._rooms[0].set()

    def has_room(self) -> bool:
        """Whether another problem should be opened now."""
        if self.in_flight + self.opening >= self.places or self.open >= 2 * self.places:
            return False
        if self.concluding >= CONCLUDING_PER_PLACE * self.places:
            return False
        return not any(gang.unstarted for *_, gang in self._queue)

    async def room(self) -> None:
        """Wait until another problem should be opened."""
        while not self.has_room():
            event = anyio.Event()
            self._rooms.append(event)
            try:
                await event.wait()
            finally:
                self._rooms.remove(event)


@dataclass(slots=True, eq=False)
class Run:
    """The state of one call of `Graph.run`; its `cancel_scope` holds everything that the run
    started.
    """

    state: GraphState
    admission: Admission
    cancel_scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    # holds the opening of problems alone
    intake: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    # open ones, in the order of opening
    groups: dict[Gang, None] = field(default_factory=dict[Gang, None])
    error: Exception | None = None  # the first that was fatal
    stopped: str = ""
    why: str = ""

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
