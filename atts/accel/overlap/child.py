"""The main program of the drafter's process, which keeps its own cache for the target's
sequences.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from contextlib import suppress
from typing import IO, NamedTuple

import numpy as np

from atts.accel.overlap.drafter import Guessing, InlineTransport, OverlappedDrafter
from atts.accel.overlap.mirror import ExitListener
from atts.accel.overlap.process import Drafted, DraftedLine, DraftSetup, DraftStep, Order
from atts.accel.speculate.drafter import DraftedRows, DraftedSlots
from atts.concurrency import end_with
from atts.errors import EngineError
from atts.local.batch import Sequence, new_sequence
from atts.local.messages import GONE, FailureReply, write
from atts.local.proposals import ask_of
from atts.local.seams import Ask, OverlapStats, TokenProposal

_SLOT_RUN = 64  # smallest number of cache slots that a sequence gets at a time


class ToldTarget(InlineTransport):
    """A stand-in for the target in the drafter's process. It stores what the target's process
    sends: step times and the guesses of the early exit.

    Drafting work runs immediately, in the caller's thread.
    """

    is_beside = True

    def __init__(self) -> None:
        self.seconds = 0.0
        self.listener: ExitListener | None = None

    def elapsed(self, began: float) -> float:
        """Return the duration of the target's last step in seconds, as the target's process
        reported it.
        """
        return self.seconds

    def listen(self, listener: ExitListener | None) -> None:
        """Store the listener that will receive the tokens guessed by the target's early exit."""
        self.listener = listener


class RemoteRows(DraftedRows):
    """Assigns slot-table rows and cache slots to the sequences of a target in another process.

    If no row is free for a sequence, or if too few slots are free, nothing is drafted for it.
    """

    def __init__(self, slots: int, rows: int, width: int) -> None:
        self._sequences: dict[int, Sequence] = {}
        self._free = list(range(rows))
        table = np.zeros((rows, width), dtype=np.int32)
        super().__init__(table, DraftedSlots(slots), self._sequences.__getitem__)

    def follow(self, step: DraftStep) -> list[Ask]:
        """Record which sequences are new, ended or continued in a step.

        Return the requests for drafts, except those whose sequences do not fit into the free rows
        and slots.
        """
        for key in step.ended:
            self._drop(self._sequences.pop(key))
            self.forget(key)
        self._sequences.update(
            {key: new_sequence(key, request, 0.0) for key, request in step.fresh}
        )
        asks = list[Ask]()
        for key, ids, room in step.asks:
            sequence = self._sequences[key]
            sequence.ids += ids
            # Only the length of `logprobs` is used in this process, to count the written tokens. So
            # zeros are enough.
            sequence.logprobs += [0.0] * len(ids)
            if self._has_slots(sequence, len(sequence.ids) + room + 1):
                asks.append(ask_of(sequence, room))
        return asks

    def _has_slots(self, sequence: Sequence, stop: int) -> bool:
        if sequence.row < 0 and self._free:
            sequence.row = self._free.pop()
        stop = min(stop, self.table.shape[1])
        count = max(0, stop - sequence.capacity)
        run = min(max(count, _SLOT_RUN), self.table.shape[1] - sequence.capacity)
        if sequence.row < 0 or (count and run > self.slots.num_free):
            return False
        if count:
            self.table[sequence.row, sequence.capacity : sequence.capacity + run] = (
                self.slots.allocate(run)
            )
            sequence.capacity += run
        return True

    def _drop(self, sequence: Sequence) -> None:
        if sequence.row >= 0:
            self.slots.free([self.table[sequence.row, : sequence.capacity].copy()])
            self._free.append(sequence.row)


def main() -> int:
    """Load the draft model, then answer the messages of the target's process until that process has
    ended.
    """
    end_with(int(sys.argv[1]))
    from atts.accel.build import overlapped_drafter
    from atts.local.builder import set_threads

    orders = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # stdout carries the answers, so all other output of this process goes to stderr
    setup = pickle.load(orders)
    assert isinstance(setup, DraftSetup), "the first message must name the model to load"
    rows = RemoteRows(setup.slots, setup.rows, setup.width)
    target = ToldTarget()
    try:
        exits = target if setup.hears else None
        drafter = overlapped_drafter(
            setup.plan, setup.config, rows, target, exits, slots=setup.slots
        )
    except EngineError as error:
        write(answers, FailureReply.of(error))
        return 0
    set_threads(setup.config)
    write(answers, "ready")
    # The loaded models stay in memory until the process ends, so exclude them from garbage
    # collection.
    gc.freeze()
    # A broken pipe means that the target's process has ended, so this process ends too.
    with suppress(*GONE):
        _serve(orders, answers, Drafting(drafter, rows, target))
    return 0


class Drafting(NamedTuple):
    """The drafter of this process, its record of the target's sequences, and its stand-in for the
    target.
    """

    drafter: OverlappedDrafter
    rows: RemoteRows
    target: ToldTarget

    def take(self, message: Order) -> bool:
        """Handle a message from the target's process. Return whether it was the last message of the
        step. If so, the target's process now expects an answer.
        """
        listener = self.target.listener
        if isinstance(message, Guessing):
            self.drafter.restart_drafting(message)
            return False
        if not isinstance(message, DraftStep):
            self.target.listen(None)
            if listener is not None:
                listener.receive(message)
            return listener is not None
        self.target.seconds = message.seconds
        for proposed, accepted in message.verified:
            self.drafter.verified(0, TokenProposal((0,) * proposed), accepted)
        self.drafter.propose(self.rows.follow(message))
        return self.target.listener is None

    def answer(self) -> Drafted:
        """Return all branches that were drafted in this step, as token ids."""
        lines = {
            line.ask.key: DraftedLine(
                line.base,
                line.proposal,
                {outcome: tuple(branch.tokens) for outcome, branch in line.cache.items()},
            )
            for line in self.drafter.drafted()
        }
        return Drafted(lines, self.drafter.stats)


def _serve(orders: IO[bytes], answers: IO[bytes], drafting: Drafting) -> None:
    while True:
        message = pickle.load(orders)
        try:
            if not drafting.take(message):
                continue
            answer = drafting.answer()
        except Exception as error:  # noqa: BLE001  reported to the target's side, which continues without
            answer = Drafted({}, OverlapStats(), f"{type(error).__name__}: {error}")
        write(answers, answer)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
