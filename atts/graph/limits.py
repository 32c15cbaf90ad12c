"""How much of an engine may be in use at once: slots, KV tokens, and the queue before them."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from atts.errors import OptionError, OutOfMemory


@dataclass(frozen=True, slots=True)
class Limit:
    """What one engine takes at once; None means no bound of ours.

    :raises OptionError: a bound below 1.
    """

    slots: int | None = None
    tokens: int | None = None  # KV tokens: prompt plus `max_tokens`, summed over the calls in flight

    def __post_init__(self) -> None:
        for name, value in (("slots", self.slots), ("tokens", self.tokens)):
            if value is not None and value < 1:
                raise OptionError(name, f"{value} would admit nothing; give at least 1, or None for no bound")


class _Waiter:
    __slots__ = ("event", "state", "tokens")

    def __init__(self, event: anyio.Event, tokens: int) -> None:
        self.event = event
        self.tokens = tokens
        self.state = "waiting"  # then "granted", by the one who gave, or "gone", by its own cancellation


class Pool:
    """A limit at work: first come first served within a priority, granted by whoever gives back.

    The head of the queue is never overtaken within its priority: a large request waits for room, it does not starve.
    """

    __slots__ = (
        "_event",
        "_lanes",
        "_priorities",
        "busy_seconds",
        "free_slots",
        "free_tokens",
        "limit",
        "name",
        "queue_seconds",
    )

    def __init__(self, name: str, limit: Limit) -> None:
        self.name = name
        self.limit = limit
        self.free_slots: float = math.inf if limit.slots is None else limit.slots
        self.free_tokens: float = math.inf if limit.tokens is None else limit.tokens
        self.busy_seconds = 0.0  # summed over slots
        self.queue_seconds = 0.0
        self._event: Callable[[], anyio.Event] = anyio.Event
        self._lanes: dict[int, deque[_Waiter]] = {}  # by priority; an empty lane is removed
        self._priorities: list[int] = []  # of the lanes, sorted

    def enter_loop(self) -> None:
        """Prepare for the loop that is running: its own class of events is a third of the price of finding it."""
        self._event = type(anyio.Event())

    @property
    def in_use(self) -> int:
        """Slots taken; 0 where slots are not bounded."""
        return 0 if self.limit.slots is None else self.limit.slots - int(self.free_slots)

    @property
    def tokens_in_use(self) -> int:
        """KV tokens taken; 0 where tokens are not bounded."""
        return 0 if self.limit.tokens is None else self.limit.tokens - int(self.free_tokens)

    @property
    def waiting(self) -> int:
        """Calls in the queue."""
        return sum(waiter.state == "waiting" for lane in self._lanes.values() for waiter in lane)

    def take_nowait(self, tokens: int) -> bool:
        """Take a slot and the tokens if they are free and nobody was first."""
        if self._lanes or self.free_slots < 1 or self.free_tokens < tokens:
            return False
        self.free_slots -= 1
        self.free_tokens -= tokens
        return True

    async def take(self, tokens: int, priority: int) -> None:
        """Wait for a slot and the tokens; lower priority numbers first.

        :raises OutOfMemory: more tokens than the limit will ever hold.
        """
        if self.limit.tokens is not None and tokens > self.limit.tokens:
            raise OutOfMemory(
                self.name,
                f"a call needs {tokens} KV tokens, the limit is {self.limit.tokens}",
                "Raise the engine's token limit, or lower the chunk or context length",
            )
        waiter = _Waiter(self._event(), tokens)
        if priority not in self._lanes:
            self._lanes[priority] = deque()
            insort(self._priorities, priority)
        self._lanes[priority].append(waiter)
        self._grant()
        try:
            await waiter.event.wait()
        except BaseException:
            if waiter.state == "granted":  # granted and cancelled in the same step: pass it on
                self.give(tokens)
            else:
                waiter.state = "gone"
                self._grant()  # it may have stood in the way of smaller ones
            raise

    def give(self, tokens: int) -> None:
        """Give a slot and its tokens back; the head of the queue has them before this returns."""
        self.free_slots += 1
        self.free_tokens += tokens
        if self._lanes:
            self._grant()

    def _grant(self) -> None:
        while self._priorities:
            lane = self._lanes[self._priorities[0]]
            while lane:
                waiter = lane[0]
                if waiter.state == "waiting":
                    if self.free_slots < 1 or self.free_tokens < waiter.tokens:
                        return
                    self.free_slots -= 1
                    self.free_tokens -= waiter.tokens
                    waiter.state = "granted"
                    waiter.event.set()
                lane.popleft()
            del self._lanes[self._priorities.pop(0)]
