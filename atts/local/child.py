"""The process that runs one engine's step loop, spoken to through its standard input and output."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from typing import IO

from atts.errors import EngineError, ModelLoadError, OutOfMemory
from atts.local.build import build_loop, set_threads
from atts.local.messages import Blueprint, Close, Failed, FailureKind, Report
from atts.local.worker import Mailbox, broken, write


def main() -> int:
    """Read a blueprint, build the loop, run it until told to close or until the parent is gone."""
    orders = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not end up among the replies

    def tell(report: Report) -> None:
        write(replies, report)

    plan = pickle.load(orders)
    assert isinstance(plan, Blueprint), "the first message is the blueprint"
    try:
        loop, opened = build_loop(plan, tell)
    except EngineError as error:
        write(replies, refusal(error))
        return 0
    write(replies, opened)
    mailbox = Mailbox()
    threading.Thread(target=_read_orders, args=(orders, mailbox), daemon=True).start()
    try:
        set_threads(plan)
        loop.run(mailbox)
    except BrokenPipeError:
        return 0  # the parent is gone
    except Exception as error:  # noqa: BLE001  the callers must hear of it
        loop.fail_all(broken(error))
        return 1
    return 0


def refusal(error: EngineError) -> Failed:
    """An error as a message; the parent raises it again under its own name."""
    kind: FailureKind = (
        "load" if isinstance(error, ModelLoadError) else "memory" if isinstance(error, OutOfMemory) else "broken"
    )
    return Failed(0, kind, str(error).removeprefix(f"engine {error.engine}: "))


def _read_orders(stream: IO[bytes], mailbox: Mailbox) -> None:
    """Pass orders on; a parent that is gone is an order to close."""
    try:
        while True:
            for order in pickle.load(stream):
                mailbox.put(order)
    except (EOFError, OSError, pickle.UnpicklingError):
        mailbox.put(Close())


if __name__ == "__main__":
    # leave without waiting for the daemon thread that may hold standard input
    code = main()
    sys.stdout.flush()
    os._exit(code)
