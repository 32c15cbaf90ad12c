"""Ctrl-C at any moment of a command: everything opened is closed, and the exit code says that it
was interrupted.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import anyio.lowlevel
import anyio.to_thread
import pytest

from atts.cli.interrupts import run_async
from atts.run import Stop, watch_signals


def press(times: int = 1) -> None:
    """Ctrl-C, as the kernel delivers it to this thread."""
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def workers() -> list[threading.Thread]:
    """The threads that keep a process from ending."""
    return [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]


@pytest.mark.parametrize("presses", [1, 2, 3])
def test_presses_while_the_loop_cleans_up_leave_no_thread_behind(presses: int) -> None:
    """The first press cancels; the others come in the middle of the clean-up, which goes on to its
    end.
    """
    before = workers()
    cleaned = False

    async def work() -> None:
        nonlocal cleaned
        # a worker thread, which waits for more until the loop is closed
        await anyio.to_thread.run_sync(int)
        try:
            press()
            await anyio.sleep_forever()
        finally:
            press(presses - 1)
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            cleaned = True

    with pytest.raises(KeyboardInterrupt):
        run_async(work)
    for worker in set(workers()) - set(before):
        worker.join(20)
    assert cleaned
    assert workers() == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_press_after_the_work_is_done_changes_nothing() -> None:
    """The loop is closing, and the result is there already."""

    async def late() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            press()

    async def work() -> int:
        tasks.append(asyncio.create_task(late()))
        await anyio.lowlevel.checkpoint()
        return 7

    tasks: list[asyncio.Task[None]] = []
    assert run_async(work) == 7


def test_after_signals_were_watched_the_handlers_from_before_are_back() -> None:
    """Not Python's own, which raises wherever the loop happens to be."""

    async def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        stop = Stop()
        async with anyio.create_task_group() as group:
            group.start_soon(watch_signals, stop, lambda _: group.cancel_scope.cancel())
            await anyio.wait_all_tasks_blocked()
            press()
        assert stop.asked == 1
        assert signal.getsignal(signal.SIGINT) is before

    run_async(work)


def test_many_presses_kill() -> None:
    """Whatever hangs in the clean-up, the keyboard ends it."""
    code = (
        "import signal, anyio\n"
        "from atts.cli.interrupts import run_async\n"
        "async def work():\n"
        "    for _ in range(4): signal.raise_signal(signal.SIGINT)\n"
        "run_async(work)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGINT


def test_a_press_while_the_interpreter_ends_keeps_the_exit_code() -> None:
    """It is ignored once the command has its code: the interpreter would die of the signal
    otherwise.
    """
    code = (
        "import atexit, signal, sys\n"
        "from atts.__main__ import main\n"
        "atexit.register(lambda: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN))\n"
        "sys.argv = ['atts', '--version']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[-1]) == (0, "True")
