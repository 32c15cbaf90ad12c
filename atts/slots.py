"""Slots: a counting semaphore over holders and tokens, with a queue ordered by priority and
arrival.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable

import anyio


class _Waiter:
    __slots__ = ("event", "state", "tokens")

    def __init__(self, event: anyio.Event, tokens: int) -> None:
        self.event = event
        self.tokens = tokens
        self.state = (
            "waiting"  # then "granted", by the one who gave, or "gone", by its own cancellation
        )


class SlotQueue:
    """At most `slots` holders and `tokens` tokens at once; None means no bound.

    First come first served within a priority, lower numbers first. The head of the queue is never
    overtaken within its priority: a large request waits for room, it does not starve. A waiter that
    is cancelled leaves the queue, and what it had been granted goes to the next.
    """

    __slots__ = ("_event", "_lanes", "_priorities", "free_slots", "free_tokens", "slots", "tokens")

    def __init__(self, slots: int | None, tokens: int | None = None) -> None:
        self.slots = slots
        self.tokens = tokens
        self.free_slots: float = (
            math.inf if slots is None else slots
        )  # below 0 after a resize below what is in use
        self.free_tokens: float = math.inf if tokens is None else tokens
        self._event: Callable[[], anyio.Event] = anyio.Event
        self._lanes: dict[int, deque[_Waiter]] = {}  # by priority; an empty lane is removed
        self._priorities: list[int] = []  # of the lanes, sorted

    def enter_loop(self) -> None:
        """Prepare for the loop that is running: its own class of events is a third of the price of
        finding it.
        """
        self._event = type(anyio.Event())

    @property
    def in_use(self) -> int:
        """Slots taken; 0 where slots are not bounded."""
        return 0 if self.slots is None else self.slots - int(self.free_slots)

    @property
    def tokens_in_use(self) -> int:
        """Tokens taken; 0 where tokens are not bounded."""
        return 0 if self.tokens is None else self.tokens - int(self.free_tokens)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(waiter.state == "waiting" for lane in self._lanes.values() for waiter in lane)

    def resize(self, slots: int) -> None:
        """Bound the slots anew: those above the bound end as they are given back, those gained are
        granted now.
        """
        assert self.slots is not None, "only a bound can be moved"
        self.free_slots += slots - self.slots
        self.slots = slots
        self._grant()

    def take_nowait(self, tokens: int = 0) -> bool:
        """Take a slot and the tokens if they are free and no one was first."""
        if self._lanes or self.free_slots < 1 or self.free_tokens < tokens:
            return False
        self.free_slots -= 1
        self.free_tokens -= tokens
        return True

    async def take(self, tokens: int = 0, priority: int = 0) -> None:
        """Wait for a slot and the tokens; what more tokens than the bound mean, a subclass says in
        `_refuse`.
        """
        if self.tokens is not None and tokens > self.tokens:
            self._refuse(tokens)
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

    def _refuse(self, tokens: int) -> None:
        raise ValueError(f"{tokens} tokens of {self.tokens} are never free")

    def give(self, tokens: int = 0) -> None:
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
