"""Stopping of a run: the first request lets calls in flight finish, the second ends everything."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal

import anyio

Signals = Literal["handle", "ignore"]


class Stop:
    """The handle by which anyone ends a run: a signal, a button, a budget of the caller's.

    Once asked, no engine call begins; those in flight finish and are recorded. Asked again, they
    are cancelled.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.calls = 0  # in flight
        self._changed = anyio.Event()

    def request(self) -> None:
        """Ask the run to end; asking a second time ends it at once. Call it from the run's own
        thread.
        """
        self.asked += 1
        self.report()

    @contextmanager
    def counted(self) -> Generator[None, None, None]:
        """Something that is finished rather than cut when the run is asked to end."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            if self.asked:
                self.report()

    async def finished(self) -> None:
        """Wait until the run was asked to end, and until either nothing is in flight or it was
        asked twice.
        """
        while not self.asked or (self.calls and self.asked < 2):
            await self._changed.wait()

    def report(self) -> None:
        """Have `finished` look again."""
        self._changed.set()
        self._changed = anyio.Event()


async def watch_signals(stop: Stop, asked: Callable[[int], None]) -> None:
    """Turn Ctrl-C and a polite kill into requests, as long as this runs; outside the main thread,
    do nothing.

    Whatever handled them before does so again afterwards; asyncio by itself would put Python's own
    handler there.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    numbers = [signal.SIGINT] if sys.platform == "win32" else [signal.SIGINT, signal.SIGTERM]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        with anyio.open_signal_receiver(*numbers) as received:
            async for number in received:
                stop.request()
                asked(number)
    except (
        NotImplementedError
    ):  # an event loop without signals: Ctrl-C raises KeyboardInterrupt there, as ever
        return
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
