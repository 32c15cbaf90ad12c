"""The main program of a stage's process: it loads the layers that it is told, then answers steps."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from contextlib import suppress

from atts.errors import EngineError
from atts.local.messages import GONE, FailureReply, write
from atts.local.stages import HeldLayers
from atts.processes import end_with


def main() -> None:
    """Load what the first message names, then answer steps until there are no more."""
    end_with(int(sys.argv[1]))
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not end up among the answers
    with suppress(*GONE):  # cut off: who asks is gone
        from atts.local.build import build_stage  # imports torch

        setup = pickle.load(orders)
        try:
            stage = HeldLayers(setup, *build_stage(setup))
        except EngineError as error:
            write(answers, FailureReply.of(error))
            return
        write(answers, None)
        gc.freeze()  # what is loaded stays, and need not be looked through for garbage
        while True:
            write(answers, stage.answer(pickle.load(orders)))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
