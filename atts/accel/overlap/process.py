"""A drafter in its own process: the process receives token ids and returns drafted tokens."""

from __future__ import annotations

import os
import pickle
import subprocess
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import IO, NamedTuple

from atts.accel.options import LoopPlan
from atts.accel.overlap.drafter import PATIENCE, Guessing
from atts.accel.overlap.mirror import ExitGuesses, ExitListener, Exits
from atts.concurrency import python_command
from atts.core import SampleRequest, TokenIds
from atts.errors import EngineError
from atts.local.batch import Sequence
from atts.local.messages import GONE, WorkerConfig, first_answer, write
from atts.local.proposals import accepted_length
from atts.local.seams import NOTHING, Ask, OverlapStats, Proposer, TokenProposal
from atts.local.worker import worker_environment


class DraftSetup(NamedTuple):
    """The first message to the drafter's process.

    It has the target's configuration, the plan that names the draft model, and the sizes of the
    drafter's cache and slot table.
    """

    plan: LoopPlan
    config: WorkerConfig
    slots: int
    rows: int
    width: int  # largest number of tokens that a sequence may have
    hears: bool  # True if further messages will bring the guesses of the target's early exit


class DraftStep(NamedTuple):
    """Message to the drafter's process when the target begins a step. It reports what has changed
    since the last message.
    """

    fresh: list[tuple[int, SampleRequest]]
    ended: list[int]
    # for each sequence that may get a proposal: its key, its new token ids, and the largest number
    # of tokens to propose
    asks: list[tuple[int, TokenIds, int]]
    # for each proposal that the target verified since the last message: the numbers of its tokens
    # and of its accepted tokens
    verified: list[tuple[int, int]]
    seconds: float  # duration of the target's last step, in seconds


class DraftedLine(NamedTuple):
    """The drafts for one sequence.

    `follows` maps each guessed outcome of verifying `proposal` to the tokens drafted for this case.
    An outcome is a pair: how many tokens of `proposal` are accepted, and the next token.
    """

    base: int
    proposal: TokenIds
    follows: dict[tuple[int, int], TokenIds]


Order = DraftStep | Guessing | ExitGuesses


class Drafted(NamedTuple):
    """The drafter's answer to a `DraftStep`."""

    lines: dict[int, DraftedLine]
    stats: OverlapStats
    error: str = ""


class DrafterProcess(Proposer):
    """Proposes tokens that a drafter in another process drafted.

    In steps for which that process is late, nothing is proposed.
    """

    def __init__(
        self, setup: DraftSetup, sequence: Callable[[int], Sequence], exits: Exits | None
    ) -> None:
        """Start the drafter's process, and wait until it has loaded the draft model.

        :raises EngineError: the draft model cannot be loaded.
        """
        self._sequence = sequence  # function that returns the unfinished sequence with a given key
        self._exits = exits
        self._hears = False
        self._all_exits = exits
        command = python_command("atts.accel.overlap.child", str(os.getpid()))
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, process_group=0, env=worker_environment()
        )
        self.pid = process.pid
        # A thread takes messages from this queue and writes them, because the target must not wait
        # while the pipe is full.
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._answers: SimpleQueue[Drafted] = SimpleQueue()
        try:
            first_answer(process, setup, setup.config.name)
        except BaseException as error:
            _end(process, self._orders)
            process.communicate()
            if not isinstance(error, GONE):
                raise
            name = setup.config.name
            problem = "the drafter's process died while it loaded the model"
            raise EngineError(name, problem, "Use speculate=draft instead") from error
        weakref.finalize(self, _end, process, self._orders)
        Thread(target=_pass_on, args=(self._orders, process.stdin), daemon=True).start()
        Thread(target=_read, args=(process.stdout, self._answers), daemon=True).start()
        self._lines: dict[int, DraftedLine] = {}
        # for each sequence, the number of its token ids that the drafter's process has received
        self._known: dict[int, int] = {}
        self._ended = list[int]()
        self._verified = list[tuple[int, int]]()
        self._is_open = self._is_late = False
        self._began = self._seconds = 0.0
        self.stats = OverlapStats()

    def propose(self, asks: Many[Ask]) -> list[TokenProposal]:
        """Propose the branch of each correctly guessed outcome, then send the newly written tokens
        to the drafter's process.

        If that process has not answered the last message in time, propose nothing and send nothing.
        """
        if self._exits is not None:
            self._exits.listen(None)
        if self._is_open and not self._is_answered():
            self.stats.late += len(asks)
            return [NOTHING] * len(asks)
        proposals = [self._served(ask) for ask in asks]
        if asks:
            self._tell(list(asks))
        return proposals

    def verified(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Store the number of accepted tokens for the next message to the drafter's process."""
        self._verified.append((len(proposal.tokens), accepted))

    def ended(self, key: int) -> None:
        """Store the end of a sequence for the next message to the drafter's process."""
        if self._known.pop(key, None) is not None:
            self._ended.append(key)
            self._lines.pop(key, None)

    def overlap(self) -> OverlapStats:
        """Return how many guesses were right or wrong, how many drafts were late, and how many
        branches were unused.
        """
        return self.stats

    def silence(self) -> str:
        """Return the reason why no branch was proposed so far."""
        return self.stats.silence or super().silence()

    def restart_drafting(self, guessing: Guessing) -> None:
        """Wait for the current drafting work, discard its drafts, and change the rule that guesses
        outcomes.

        :raises RuntimeError: the drafter's process does not answer in time, or has ended.
        """
        if self._is_open and not self._is_answered(PATIENCE):
            raise RuntimeError("the drafter's process did not finish its current job in time")
        if self._exits is not None:
            self._exits.listen(None)
        self._lines = {}
        self._exits = self._all_exits if guessing.is_told else None
        self._orders.put(guessing)

    def _is_answered(self, patience: float | None = None) -> bool:
        """Return whether the drafter's process has answered the last message.

        Wait for the answer at most `patience` seconds. By default, the first call waits at most as
        long as the target's step took. Later calls do not wait.
        """
        if self._hears:
            # In this step, no guesses of the target's early exit arrived. The drafter's process
            # still waits for them, so send an empty message.
            self._heard({})
        if not self._is_late:
            self._seconds = perf_counter() - self._began
        try:
            answer = self._answers.get(
                timeout=patience or (1e-6 if self._is_late else self._seconds)
            )
        except Empty:
            self._is_late = True
            return False
        if answer.error:
            raise RuntimeError(answer.error)
        self._is_open = self._is_late = False
        self._lines = answer.lines
        # The drafter's process does not know which of its answers were late. So keep the count of
        # late answers from this process.
        self.stats = replace(answer.stats, late=self.stats.late)
        return True

    def _served(self, ask: Ask) -> TokenProposal:
        """Return the proposal for a sequence: the matching branch's tokens beyond the end of the
        text.
        """
        line = self._lines.get(ask.key)
        if line is None:
            return NOTHING
        written = tuple(ask.ids[line.base :])
        accepted = accepted_length(line.proposal, (*written, -1))
        rest = written[accepted:]
        branch = line.follows.get((accepted, rest[0]), ()) if rest else ()
        tokens = branch[len(rest) :][: ask.room] if branch[: len(rest)] == rest else ()
        return TokenProposal(tokens, 1.0) if tokens else NOTHING

    def _tell(self, asks: list[Ask]) -> None:
        fresh = list[tuple[int, SampleRequest]]()
        news = list[tuple[int, TokenIds, int]]()
        for ask in asks:
            sequence = self._sequence(ask.key)
            if ask.key not in self._known:
                assert isinstance(sequence.request, SampleRequest), (
                    "only sampling requests have tokens to decode"
                )
                fresh.append((ask.key, sequence.request))
                self._known[ask.key] = len(sequence.request.ids)
            news.append((ask.key, tuple(ask.ids[self._known[ask.key] :]), ask.room))
            self._known[ask.key] = len(ask.ids)
        self._orders.put(DraftStep(fresh, self._ended, news, self._verified, self._seconds))
        self._ended = []
        self._verified = []
        self._lines = {}
        self._is_open = True
        self._began = perf_counter()
        if self._exits is not None:
            rows = {self._sequence(ask.key).row: (ask.key, ask.sampling) for ask in asks}
            self._hears = True
            self._exits.listen(ExitListener(rows, self._heard))

    def _heard(self, told: ExitGuesses | Exception) -> None:
        """Send the guesses of the target's early exit to the drafter's process, while the target
        continues its step.

        If the exit failed, send an empty message.
        """
        self._hears = False
        self._began = perf_counter()
        self._orders.put({} if isinstance(told, Exception) else told)


def _pass_on(orders: SimpleQueue[Order | None], stream: IO[bytes]) -> None:
    # A broken pipe means that the drafter's process has ended. Ignore it here, because the thread
    # that reads the answers reports it.
    with suppress(OSError), stream:
        while (order := orders.get()) is not None:
            write(stream, order)


def _read(stream: IO[bytes], answers: SimpleQueue[Drafted]) -> None:
    with stream:
        try:
            while True:
                answers.put(pickle.load(stream))
        except GONE:
            answers.put(Drafted({}, OverlapStats(), "the drafter's process has ended"))


def _end(process: subprocess.Popen[bytes], orders: SimpleQueue[Order | None]) -> None:
    """End the drafter's process. Python calls this function when the owner is deleted or Python
    exits.
    """
    orders.put(None)
    process.kill()
    process.wait()
