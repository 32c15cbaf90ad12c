"""Ratings asked for once: a pipeline weighs ten digits one by one, and one reply holds them all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable

import anyio

from atts.core import TokenIds

_KEPT = 256


class Ratings:
    """The likeliest next words of a text, remembered for a while; who asks meanwhile waits for the first to ask."""

    def __init__(self, ask: Callable[[TokenIds], Awaitable[dict[str, float]]]) -> None:
        self._ask = ask
        self._kept: OrderedDict[TokenIds, dict[str, float]] = OrderedDict()
        self._asking: dict[TokenIds, anyio.Event] = {}

    async def of(self, ids: TokenIds) -> dict[str, float]:
        """The words; an asker who fails or is cancelled leaves the question to the next."""
        while ids not in self._kept:
            if (asked := self._asking.get(ids)) is not None:
                await asked.wait()
                continue
            self._asking[ids] = anyio.Event()
            try:
                self._kept[ids] = await self._ask(ids)
            finally:
                self._asking.pop(ids).set()
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return self._kept[ids]
