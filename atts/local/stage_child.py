"""The main program of a stage's process: it answers messages until there are no more."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from contextlib import suppress

from atts.local.messages import GONE, write
from atts.local.stages import StageServer, StageSetup
from atts.processes import end_with


def main() -> None:
    """See `StageServer`."""
    end_with(int(sys.argv[1]))
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not end up among the answers
    from atts.local.build import build_stage  # imports torch

    server = StageServer(build_stage)
    with suppress(*GONE):  # cut off: who asks is gone
        while True:
            message = pickle.load(orders)
            write(answers, server.answer(message))
            if isinstance(message, StageSetup):
                gc.freeze()  # what is loaded stays, and need not be looked through for garbage


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
