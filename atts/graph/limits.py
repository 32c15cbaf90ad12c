"""Limits on the work in flight: slots and tokens of engines, places for rollouts, attempts at
calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Annotated, Protocol

import anyio

from atts.concurrency import SlotQueue, backoff
from atts.errors import (
    ATTSError,
    EngineError,
    ModelLoadError,
    OptionError,
    OutOfMemory,
    UnsupportedByEngine,
    UnusableScores,
)

# The number of ended rollouts, per rollout in flight, that may wait for work outside engines, such
# as grading.
CONCLUDING_PER_PLACE = 4


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit on the work of one engine at once; None means no limit.

    :raises OptionError: for a bound below 1.
    """

    slots: Annotated[int | None, "calls in flight"] = None
    # a call's tokens are its prompt's plus its `max_tokens`
    tokens: Annotated[int | None, "KV tokens in flight"] = None

    def __post_init__(self) -> None:
        for name, value in (("slots", self.slots), ("tokens", self.tokens)):
            if value is not None and value < 1:
                raise OptionError(
                    name, f"{value} would allow nothing; give at least 1, or None for no bound"
                )


class Pool(SlotQueue):
    """A limit in use: its slots and KV tokens, and the seconds of use and of waiting so far."""

    __slots__ = ("busy_seconds", "name", "queue_seconds")

    def __init__(self, name: str, limit: Limit) -> None:
        super().__init__(limit.slots, limit.tokens)
        self.name = name
        self.busy_seconds = 0.0  # summed over slots
        self.queue_seconds = 0.0

    def _refuse(self, tokens: int) -> None:
        """Raise the error for a call that needs more tokens than the limit allows.

        :raises OutOfMemory: always.
        """
        raise OutOfMemory(
            self.name,
            f"a call needs {tokens} KV tokens, but the limit is {self.tokens}",
            "Raise the engine's token limit, or lower the chunk or context length",
        )


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of attempts, the waits between them, and when to stop the whole run.

    After a retryable error (`ATTSError.retryable`) first the call is repeated, then the rollout. A
    remaining failure is recorded on its rollout and does not affect others. Two cases end the run:
    an error that would happen to every rollout (wrong options, a full disk, an engine that cannot
    score), and `failures_in_row` failed rollouts in a row, for example because of a lost server or
    a bug.

    :raises OptionError: for a count below 1 or a negative delay.
    """

    calls: int = 3
    rollouts: int = 1
    delay_seconds: float = 0.5  # seconds; they double with every attempt, with a random spread
    failures_in_row: int | None = 32

    def __post_init__(self) -> None:
        counts = {
            "calls": self.calls,
            "rollouts": self.rollouts,
            "failures_in_row": self.failures_in_row,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise OptionError(name, f"{value} is below 1")
        if self.delay_seconds < 0:
            raise OptionError("delay_seconds", f"{self.delay_seconds} is negative")

    def retries(self, error: Exception, attempt: int, attempts: int) -> bool:
        """Return whether attempt number `attempt` (from 0) of `attempts` is followed by another."""
        return attempt + 1 < attempts and isinstance(error, ATTSError) and error.retryable

    def delay(self, attempt: int, salt: int) -> float:
        """Return the seconds before the next attempt.

        `salt` spreads callers that failed together, in a reproducible way.
        """
        return backoff(attempt + 1, self.delay_seconds, salt=salt)

    def is_fatal(self, error: Exception) -> bool:
        """Return whether the error would happen to every other rollout too."""
        if isinstance(error, EngineError):
            return isinstance(error, UnsupportedByEngine | ModelLoadError | UnusableScores)
        return isinstance(error, ATTSError | AssertionError)


class AdmissionGroup(Protocol):
    """Rollouts that were submitted together and may be started."""

    @property
    def unit(self) -> int:
        """Return the number of places that one start takes: 1, or all if the rollouts start
        together.
        """
        ...

    @property
    def unstarted(self) -> int:
        """Return how many rollouts have not started; 0 once the group is closed."""
        ...

    def start(self) -> None:
        """Start one unit, for which places have been taken already."""
        ...

    def close(self, why: str) -> None:
        """Start no more rollouts, and cancel those that run."""
        ...


@dataclass(slots=True, eq=False)
class Admission:
    """Places for rollouts in flight.

    Waiting rollouts are started in the order of (priority, problem, submission). The next problem
    is opened only when no rollout waits and a place is free, and not while too many ended rollouts
    wait for grading. So the number of open problems stays in proportion to the rollouts in flight,
    and a slow grader slows the opening of problems.
    """

    places: int
    in_flight: int = 0
    # number of ended rollouts whose problem waits for work outside engines
    concluding: int = 0
    open: int = 0  # number of open problems
    # open problems that have not submitted a rollout yet: each counts as one rollout
    opening: int = 0
    _queue: list[tuple[int, int, int, AdmissionGroup]] = field(
        default_factory=list[tuple[int, int, int, AdmissionGroup]]
    )
    _submitted: int = 0
    _opened: int = 0
    _waiting_for_room: list[anyio.Event] = field(default_factory=list[anyio.Event])

    def __post_init__(self) -> None:
        if self.places < 1:
            raise OptionError(
                "rollouts", f"{self.places} rollouts in flight are too few; give at least 1"
            )

    @property
    def waiting(self) -> int:
        """Return how many submitted rollouts have not started."""
        return sum(group.unstarted for *_, group in self._queue)

    def opened(self) -> int:
        """Count one more open problem, and return its number in the order of opening."""
        self.open += 1
        self.opening += 1
        self._opened += 1
        return self._opened

    def submit(self, group: AdmissionGroup, priority: int, problem: int) -> None:
        """Queue a group, and start as many rollouts as places allow.

        :raises OptionError: if its rollouts start together but need more places than there are.
        """
        if group.unit > self.places:
            raise OptionError(
                "admit",
                f"{group.unit} rollouts that start together need as many places, but there "
                f"are {self.places}",
            )
        self._submitted += 1
        heappush(self._queue, (priority, problem, self._submitted, group))
        self.dispatch()

    def release(self, places: int) -> None:
        """Give places back, and start as many rollouts as places allow."""
        self.in_flight -= places
        self.dispatch()

    def dispatch(self) -> None:
        """Start waiting rollouts while there is room, then let a new problem in."""
        queue = self._queue
        while queue:
            group = queue[0][3]
            if not group.unstarted:
                heappop(queue)
                continue
            unit = group.unit
            if self.in_flight + unit > self.places:
                return
            self.in_flight += unit
            group.start()
        if self._waiting_for_room and self.has_room():
            self._waiting_for_room[0].set()

    def has_room(self) -> bool:
        """Return whether another problem should be opened now."""
        if self.in_flight + self.opening >= self.places or self.open >= 2 * self.places:
            return False
        if self.concluding >= CONCLUDING_PER_PLACE * self.places:
            return False
        return not any(group.unstarted for *_, group in self._queue)

    async def room(self) -> None:
        """Wait until another problem should be opened."""
        while not self.has_room():
            event = anyio.Event()
            self._waiting_for_room.append(event)
            try:
                await event.wait()
            finally:
                self._waiting_for_room.remove(event)
