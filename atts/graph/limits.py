"""Limits on what is in flight: slots and tokens of engines, places for rollouts, attempts at calls."""

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

# How much may wait, per rollout in flight, for what is not an engine's work, such as grading.
CONCLUDING_PER_PLACE = 4


@dataclass(frozen=True, slots=True)
class Limit:
    """Work that one engine takes at once; None means no limit of ours.

    :raises OptionError: a bound below 1.
    """

    slots: Annotated[int | None, "calls in flight"] = None
    # a call's tokens are its prompt's plus its `max_tokens`
    tokens: Annotated[int | None, "KV tokens in flight"] = None

    def __post_init__(self) -> None:
        for name, value in (("slots", self.slots), ("tokens", self.tokens)):
            if value is not None and value < 1:
                raise OptionError(
                    name, f"{value} would admit nothing; give at least 1, or None for no bound"
                )


class Pool(SlotQueue):
    """A limit at work: its slots and KV tokens, and the seconds of use and of waiting so far."""

    __slots__ = ("busy_seconds", "name", "queue_seconds")

    def __init__(self, name: str, limit: Limit) -> None:
        super().__init__(limit.slots, limit.tokens)
        self.name = name
        self.busy_seconds = 0.0  # summed over slots
        self.queue_seconds = 0.0

    def _refuse(self, tokens: int) -> None:
        """Refuse a call that needs more tokens than the limit will ever hold.

        :raises OutOfMemory: always.
        """
        raise OutOfMemory(
            self.name,
            f"a call needs {tokens} KV tokens, the limit is {self.tokens}",
            "Raise the engine's token limit, or lower the chunk or context length",
        )


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of tries, waits between them, and when to stop the whole run.

    A retryable error (`ATTSError.retryable`) is tried again: first the call, then the rollout. What
    still fails is recorded on its rollout and touches no other, with two exceptions that end the
    run: an error that would meet every rollout alike (wrong options, a full disk, an engine that
    cannot score), and `failures_in_row` failed rollouts one after another, as a lost server or a bug
    makes them.

    :raises OptionError: a count below 1 or a negative delay.
    """

    calls: int = 3
    rollouts: int = 1
    delay_seconds: float = 0.5  # doubles with every attempt, spread by half
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

        `salt` spreads callers that failed together, the same way every time.
        """
        return backoff(attempt + 1, self.delay_seconds, salt=salt)

    def is_fatal(self, error: Exception) -> bool:
        """Return whether the error would meet every other rollout too."""
        if isinstance(error, EngineError):
            return isinstance(error, UnsupportedByEngine | ModelLoadError | UnusableScores)
        return isinstance(error, ATTSError | AssertionError)


class AdmissionGroup(Protocol):
    """Rollouts that were submitted together and may be started."""

    @property
    def unit(self) -> int:
        """Return the number of places that one start takes: 1, or all if they are admitted
        together.
        """
        ...

    @property
    def unstarted(self) -> int:
        """Return how many rollouts have not started; 0 once the group is closed."""
        ...

    def start(self) -> None:
        """Start one unit, whose places are taken already."""
        ...

    def close(self, why: str) -> None:
        """Start nothing more and cancel what runs."""
        ...


@dataclass(slots=True, eq=False)
class Admission:
    """Places for rollouts in flight.

    Waiting rollouts are started in the order of (priority, problem, submission). The next problem
    is opened only when no rollout waits and a place is free, and not while too many that ended wait
    for what comes after them. So what is open stays in proportion to what is in flight, and a
    grader slower than the engines slows the opening of problems.
    """

    places: int
    in_flight: int = 0
    # rollouts that ended, of problems that wait for something else than engines
    concluding: int = 0
    open: int = 0  # problems
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
                "rollouts", f"{self.places} in flight would admit nothing; give at least 1"
            )

    @property
    def waiting(self) -> int:
        """Return how many rollouts were submitted and have not started."""
        return sum(group.unstarted for *_, group in self._queue)

    def opened(self) -> int:
        """Count one more open problem, and return its number in the order of opening."""
        self.open += 1
        self.opening += 1
        self._opened += 1
        return self._opened

    def submit(self, group: AdmissionGroup, priority: int, problem: int) -> None:
        """Queue a group and start what fits.

        :raises OptionError: it wants to be admitted together and is larger than all places.
        """
        if group.unit > self.places:
            raise OptionError(
                "admit",
                f"{group.unit} rollouts together need as many places, there are {self.places}",
            )
        self._submitted += 1
        heappush(self._queue, (priority, problem, self._submitted, group))
        self.dispatch()

    def release(self, places: int) -> None:
        """Give places back and start what fits."""
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
