"""Ctrl-C around an event loop: the first press cancels, later ones leave the clean-up alone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_PATIENCE = 4  # presses until Ctrl-C kills, as it does without a handler


def run_async(function: Callable[[], Awaitable[_Result]]) -> _Result:
    """Run `anyio.run(function)` so that a person may press Ctrl-C.

    A KeyboardInterrupt raised while the loop cleans up would leave worker threads waiting, and the
    process with them.

    :raises KeyboardInterrupt: Ctrl-C was pressed; everything opened in the loop is closed.
    """
    import anyio

    if threading.current_thread() is not threading.main_thread():
        return anyio.run(function)
    before = signal.getsignal(signal.SIGINT)

    async def guarded() -> _Result:
        with _first_press_only():
            return await function()

    try:
        return anyio.run(guarded)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _first_press_only() -> Generator[None]:
    """Pass the first SIGINT to the loop's handler, and ignore later ones until it is closed."""
    of_loop = signal.getsignal(signal.SIGINT)
    presses = 0
    over = False

    def pressed(number: int, frame: FrameType | None) -> Any:
        nonlocal presses
        presses += 1
        if presses >= _PATIENCE:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        elif presses == 1 and not over and callable(of_loop):
            return of_loop(number, frame)
        return None

    signal.signal(signal.SIGINT, pressed)
    try:
        yield
    finally:
        over = True


@contextmanager
def interrupts_ignored() -> Generator[None]:
    """Ignore Ctrl-C within the block, for the last output of a command that ends anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
