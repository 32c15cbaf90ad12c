"""The main program of a stage's process: it takes steps from the stage before it, and passes them to the next."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from contextlib import suppress
from typing import IO

from atts.errors import EngineError
from atts.local.messages import GONE, FailureReply, write
from atts.local.stages import HeldLayers, StageSetup
from atts.processes import end_with


def main() -> None:
    """Load what the first message names, then pass steps on until there are no more."""
    end_with(int(sys.argv[1]))
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not end up among the steps
    with suppress(*GONE):  # cut off: a neighbour is gone
        mine, *others = pickle.load(orders)
        write(answers, others)
        _serve(mine, orders, answers)


def _serve(setup: StageSetup, orders: IO[bytes], answers: IO[bytes]) -> None:
    from atts.local.build import build_stage  # imports torch

    try:
        stage, failure = HeldLayers(setup, build_stage(setup)), None
    except EngineError as error:
        stage, failure = None, FailureReply.of(error)
    write(answers, pickle.load(orders) or failure)  # what hinders a stage before this one comes first
    gc.freeze()  # what is loaded stays, and need not be looked through for garbage
    while stage is not None:
        write(answers, stage.step(pickle.load(orders)))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
