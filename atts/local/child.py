"""The main program of a worker process, which reads commands from its standard input and writes
replies to its standard output.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
from contextlib import suppress
from typing import IO

from atts.concurrency import end_with
from atts.errors import EngineError
from atts.local.messages import GONE, FailureReply, WorkerConfig, write
from atts.local.worker import Mailbox, broken


def main() -> int:
    """Read the configuration from standard input, build the step loop, and run it until a command
    closes it. The process also ends when its parent ends.
    """
    end_with(int(sys.argv[1]))
    # imported here and not at the top, because this imports torch
    from atts.local.builder import build_loop, set_threads

    commands = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    # Replies to the parent process use standard output. So text that libraries print there is sent
    # to standard error instead.
    os.dup2(2, 1)

    config = pickle.load(commands)
    assert isinstance(config, WorkerConfig), "the first message must be the configuration"
    build = build_loop if config.builder is None else config.builder.build
    try:
        loop, ready = build(config, lambda report: write(replies, report))
    except EngineError as error:
        write(replies, FailureReply.of(error))
        return 0
    write(replies, ready)
    # The model and all other loaded objects live until the process ends. `gc.freeze` makes the
    # garbage collector skip them, which saves 0.1 s per collection.
    gc.freeze()
    mailbox = Mailbox()
    threading.Thread(target=_read_commands, args=(commands, mailbox), daemon=True).start()
    try:
        set_threads(config)
        loop.run(mailbox)
    except BrokenPipeError:
        return 0  # the parent process has ended
    except Exception as error:  # noqa: BLE001  reported to the callers
        loop.fail_all(broken(error))
        return 1
    return 0


def _read_commands(stream: IO[bytes], mailbox: Mailbox) -> None:
    """Pass commands from the stream to the loop's mailbox until the stream ends."""
    # A read error or an incomplete message means that the parent process has ended. Then `end_with`
    # ends this process too.
    with suppress(*GONE):
        while True:
            for command in pickle.load(stream):
                mailbox.put(command)


if __name__ == "__main__":
    # A normal exit could hang, because the daemon thread may hold the lock of standard input.
    code = main()
    sys.stdout.flush()
    os._exit(code)
