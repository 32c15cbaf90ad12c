"""Slots that users share fairly: the waiting user with the least service for their share is next."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import anyio

_MOST_USERS = 4096  # most users whose service is stored, because clients choose the names
_FIRST_COST = 1.0


@dataclass(slots=True, eq=False)
class _Ticket:
    event: anyio.Event = field(default_factory=anyio.Event)
    state: Literal["waiting", "granted", "refused"] = "waiting"
    charged: float = 0.0  # set by the grant


@dataclass(slots=True, eq=False)
class _User:
    share: float
    served: float = 0.0  # cost of granted requests, divided by the share
    running: int = 0
    waiting: deque[_Ticket] = field(default_factory=deque[_Ticket])

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting


class Displaced(Exception):
    """A waiting request lost its place to a user who had received less than their share."""


class FairSlots:
    """Slots for requests, granted by start-time fair queueing over users.

    Each grant charges its user the mean cost of a request, divided by the user's share; the charge
    is corrected once the real cost is known. The waiting user with the smallest sum is next. A user
    who comes back after a pause starts at the sum of the user granted last, so that idle time earns
    no credit. Every waiting user becomes the smallest at some time, so no user starves.
    """

    def __init__(self, slots: int, queue: int, shares: Mapping[str, float] | None = None) -> None:
        self._free = slots
        self._queue = queue
        self._shares = dict(shares or {})
        self._users = dict[str, _User]()
        self._reached = 0.0  # service of the user who was admitted last
        self._mean = _FIRST_COST
        self._ended = 0  # number of requests in the mean cost

    @property
    def waiting(self) -> int:
        """Return how many requests wait."""
        return sum(len(user.waiting) for user in self._users.values())

    @property
    def num_users(self) -> int:
        """Return how many users are remembered."""
        return len(self._users)

    def waiting_of(self, name: str) -> int:
        """Return the number of waiting requests of a user."""
        user = self._users.get(name)
        return 0 if user is None else len(user.waiting)

    def has_room(self, name: str) -> bool:
        """Return whether one more request of a user may start or wait."""
        return self._free > 0 or self.waiting < self._queue or self._heaviest(name) is not None

    @asynccontextmanager
    async def slot(self, name: str) -> AsyncGenerator[_Cost]:
        """Hold a slot for the duration of the block, which sets the cost of the request.

        :raises Displaced: if the queue is full, and no other user waits with more than their share.
        """
        user = self._user(name)
        ticket = _Ticket()
        if self._free <= 0 and self.waiting >= self._queue:
            loser = self._heaviest(name)
            if loser is None:
                raise Displaced
            dropped = loser.waiting.pop()
            dropped.state = "refused"
            dropped.event.set()
        if user.is_idle:
            user.served = max(user.served, self._reached)
        user.waiting.append(ticket)
        self._grant()
        try:
            await ticket.event.wait()
        except BaseException:
            if ticket.state == "waiting":
                user.waiting.remove(ticket)
            elif ticket.state == "granted":
                self._give(user, ticket, None)
            raise
        if ticket.state == "refused":
            raise Displaced
        cost = _Cost()
        try:
            yield cost
        finally:
            self._give(user, ticket, cost.value)

    def _heaviest(self, name: str) -> _User | None:
        """Return the user whose waiting request should be displaced by a request of this user, if
        any.
        """
        mine = self._users.get(name)
        share = self._share(name)
        after = (0 if mine is None else len(mine.waiting)) + 1
        others = [user for user in self._users.values() if user is not mine and user.waiting]
        heaviest = max(others, key=lambda user: len(user.waiting) / user.share, default=None)
        if heaviest is None or (len(heaviest.waiting) - 1) / heaviest.share < after / share:
            return None
        return heaviest

    def _share(self, name: str) -> float:
        return self._shares.get(name, 1.0)

    def _user(self, name: str) -> _User:
        if name not in self._users:
            if len(self._users) >= _MOST_USERS:
                self._users = {name: user for name, user in self._users.items() if not user.is_idle}
            self._users[name] = _User(self._share(name), self._reached)
        return self._users[name]

    def _grant(self) -> None:
        while self._free > 0:
            waiting = [user for user in self._users.values() if user.waiting]
            if not waiting:
                return
            user = min(waiting, key=lambda one: one.served)
            ticket = user.waiting.popleft()
            ticket.state = "granted"
            ticket.event.set()
            self._reached = max(self._reached, user.served)
            ticket.charged = self._mean / user.share
            user.served += ticket.charged
            user.running += 1
            self._free -= 1

    def _give(self, user: _User, ticket: _Ticket, cost: float | None) -> None:
        self._free += 1
        user.running -= 1
        user.served -= ticket.charged
        if cost is not None:
            self._ended = min(self._ended + 1, 100)
            self._mean += (cost - self._mean) / self._ended
            user.served += cost / user.share
        self._grant()


@dataclass(slots=True)
class _Cost:
    """The cost of a request, which the block that holds the slot sets."""

    value: float | None = None
