"""Functions that handle Ctrl-C around an event loop: the first press cancels the work, and later
presses do not stop the clean-up.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from anyio import CancelScope

_Result = TypeVar("_Result")
# The first press of Ctrl-C cancels the function. The press with this number kills the process at
# once.
_PATIENCE = 4


def run_async(function: Callable[[], Awaitable[_Result]]) -> _Result:
    """Run `anyio.run(function)`, and handle Ctrl-C.

    The first press cancels the function, but its shielded clean-up still runs to the end. The
    second and third press do nothing: a KeyboardInterrupt during the clean-up would leave worker
    threads waiting, and the process would never end. The fourth press kills the process. A handler
    that the program or its host has installed is not replaced.

    :raises KeyboardInterrupt: Ctrl-C was pressed; everything opened in the loop is closed.
    """
    import anyio

    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before is not signal.default_int_handler:
        return anyio.run(function)
    results = list[_Result]()

    async def guarded() -> None:
        with anyio.CancelScope() as scope:
            _cancel_at_first_press(scope)
            results.append(await function())

    try:
        anyio.run(guarded)
    finally:
        signal.signal(signal.SIGINT, before)
    if not results:
        raise KeyboardInterrupt
    return results[0]


def _cancel_at_first_press(scope: CancelScope) -> None:
    """Make Ctrl-C cancel the scope. By default Ctrl-C cancels the main task directly, and a
    shielded scope does not protect against that.
    """
    from atts.concurrency import loop_caller

    schedule = loop_caller()
    presses = 0

    def pressed(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses >= _PATIENCE:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        elif presses == 1:
            schedule(scope.cancel)

    signal.signal(signal.SIGINT, pressed)


@contextmanager
def interrupts_ignored() -> Generator[None]:
    """Ignore Ctrl-C within the block, so that a command can finish its last output."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
