"""A drafter in its own process, which receives token ids and returns continuations."""

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
    """The first message: the target's configuration, the plan that names the drafter, and the
    drafter's limits.
    """

    plan: LoopPlan
    config: WorkerConfig
    slots: int
    rows: int
    width: int  # tokens of the longest sequence
    hears: bool  # whether the target's exit is reported


class DraftStep(NamedTuple):
    """Message at the beginning of a target's step: the tokens written since the previous step."""

    fresh: list[tuple[int, SampleRequest]]
    ended: list[int]
    # for each sequence: its key, its new ids, and the most tokens to propose
    asks: list[tuple[int, TokenIds, int]]
    # each proposal with a known outcome: its number of tokens, and how many of them were accepted
    verified: list[tuple[int, int]]
    seconds: float  # seconds that the target's last step took


class DraftedLine(NamedTuple):
    """Drafts that continue a sequence and its proposal, keyed by guessed outcome: the number of
    accepted tokens and the next token.
    """

    base: int
    proposal: TokenIds
    follows: dict[tuple[int, int], TokenIds]


Order = DraftStep | Guessing | ExitGuesses


class Drafted(NamedTuple):
    """The answer to a step."""

    lines: dict[int, DraftedLine]
    stats: OverlapStats
    error: str = ""


class DrafterProcess(Proposer):
    """Proposes tokens that the other process drafted. If that process fails or is late, the step
    has no proposal.
    """

    def __init__(
        self, setup: DraftSetup, sequence: Callable[[int], Sequence], exits: Exits | None
    ) -> None:
        """Load the model in the other process.

        :raises EngineError: the model cannot be loaded.
        """
        self._sequence = sequence  # the request is not finished yet
        self._exits = exits
        self._hears = False
        self._all_exits = exits
        command = python_command("atts.accel.overlap.child", str(os.getpid()))
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, process_group=0, env=worker_environment()
        )
        self.pid = process.pid
        # the target must not wait for a full pipe
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
            problem = "the drafter's process died while loading"
            raise EngineError(name, problem, "Write speculate=draft") from error
        weakref.finalize(self, _end, process, self._orders)
        Thread(target=_pass_on, args=(self._orders, process.stdin), daemon=True).start()
        Thread(target=_read, args=(process.stdout, self._answers), daemon=True).start()
        self._lines: dict[int, DraftedLine] = {}
        # number of ids of each sequence that the other process has
        self._known: dict[int, int] = {}
        self._ended = list[int]()
        self._verified = list[tuple[int, int]]()
        self._is_open = self._is_late = False
        self._began = self._seconds = 0.0
        self.stats = OverlapStats()

    def propose(self, asks: Many[Ask]) -> list[TokenProposal]:
        """Propose the branches whose guesses came true, then send the newly written tokens."""
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
        """Note an outcome to send with the next step."""
        self._verified.append((len(proposal.tokens), accepted))

    def ended(self, key: int) -> None:
        """Note an ended sequence to send with the next step."""
        if self._known.pop(key, None) is not None:
            self._ended.append(key)
            self._lines.pop(key, None)

    def overlap(self) -> OverlapStats:
        """Return the statistics of guesses."""
        return self.stats

    def silence(self) -> str:
        """Return why no branch was proposed."""
        return self.stats.silence or super().silence()

    def restart_drafting(self, guessing: Guessing) -> None:
        """Cancel the current drafting work, and set the way to guess outcomes from now on.

        :raises RuntimeError: the other process does not answer, or is gone.
        """
        if self._is_open and not self._is_answered(PATIENCE):
            raise RuntimeError("the drafter's process does not finish its current job")
        if self._exits is not None:
            self._exits.listen(None)
        self._lines = {}
        self._exits = self._all_exits if guessing.is_told else None
        self._orders.put(guessing)

    def _is_answered(self, patience: float | None = None) -> bool:
        """Return whether the last step is answered. Wait for a late answer once, for at most the
        length of the target's step.
        """
        if self._hears:
            # the target never reached its exit, so the other process waits for no guesses
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
        # only this process knows which answers came too late
        self.stats = replace(answer.stats, late=self.stats.late)
        return True

    def _served(self, ask: Ask) -> TokenProposal:
        """Return the rest of the branch that the text took."""
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
                assert isinstance(sequence.request, SampleRequest), "only sampling requests decode"
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
        """Send the target's exit guesses while the target continues; send empty guesses if the exit
        failed.
        """
        self._hears = False
        self._began = perf_counter()
        self._orders.put({} if isinstance(told, Exception) else told)


def _pass_on(orders: SimpleQueue[Order | None], stream: IO[bytes]) -> None:
    # the other process has ended; the missing answers will show this
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
    """End the process when its owner is garbage-collected, or when Python exits."""
    orders.put(None)
    process.kill()
    process.wait()
