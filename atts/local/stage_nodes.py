"""Workers and layer ranges as the step loop sees them: what is asked of a worker, and which workers hold a range."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from atts.errors import EngineError, EngineUnavailable
from atts.local.allocator import SlotIds
from atts.local.batch import Ints, StepBatch
from atts.local.cache import SPARE_SLOTS
from atts.local.messages import FailureReply
from atts.local.stage_rows import KeptRows, StageCosts
from atts.local.stages import BuildStage, StageServer, StageSetup
from atts.placement import Demand


class Worker(Protocol):
    """A process, an actor, or what is beside the loop: it answers each message before it is sent the next."""

    def send(self, message: object) -> None:
        """Pass a message on.

        :raises EngineUnavailable: the worker is gone.
        """
        ...

    def take(self) -> Any:
        """Wait for the answer.

        :raises EngineUnavailable: the worker is gone.
        """
        ...

    def close(self) -> None:
        """End it; twice is fine."""
        ...


Receive = Callable[[Any], object]
"""Is told the answer to a message, or why there will be none."""


class WorkerHere:
    """Ranges in this process."""

    def __init__(self, build: BuildStage) -> None:
        self._server, self._answers = StageServer(build), list[object]()

    def send(self, message: object) -> None:
        """Answer at once."""
        self._answers.append(self._server.answer(message))

    def take(self) -> Any:
        """The answer."""
        return self._answers.pop()

    def close(self) -> None:
        """Nothing is left behind."""


class HeldNode:
    """A worker, and what it is asked: one message after the other."""

    def __init__(self, number: int, label: str, worker: Worker) -> None:
        self.number, self.label, self.worker = number, label, worker
        self.due = self.sent = 0.0  # when it will have done what it is asked, and when it was last asked
        self._queue = deque[tuple[object, Receive]]()
        self._heard: Receive | None = None  # by the answer that is waited for
        self.error: EngineUnavailable | None = None

    @property
    def is_asked(self) -> bool:
        """Whether it owes an answer."""
        return self._heard is not None

    @property
    def wait(self) -> float:
        """Seconds until it is free."""
        return max(0.0, self.due - perf_counter()) if self.is_asked else 0.0

    def ask(self, message: object, receive: Receive, seconds: float = 0.0) -> None:
        """Send a message when those before are answered, which is thought to take so long."""
        if self.error is not None:
            receive(self.error)
            return
        self.due = perf_counter() + self.wait + seconds
        self._queue.append((message, receive))
        self.go()

    def go(self) -> None:
        """Send the next message where none is on its way."""
        while self._queue and self._heard is None:
            message, self._heard = self._queue.popleft()
            self.sent = perf_counter()
            try:
                self.worker.send(message)
            except EngineUnavailable as error:
                self._lose(error)
            else:
                if isinstance(self.worker, WorkerHere):
                    self.receive()

    def receive(self) -> None:
        """Take the answer to what it was asked; one that was asked nothing and can be read is gone."""
        try:
            answer = self.worker.take()
        except EngineUnavailable as error:
            self._lose(error)
        else:
            heard, self._heard = self._heard, None
            assert heard is not None, "it was asked"
            heard(answer)

    def at_once(self, message: object) -> Any:
        """The answer to a message, before what else it is asked.

        :raises EngineUnavailable: it is gone.
        """
        if self._heard is not None:
            self.receive()
        try:
            if self.error is None:
                self.worker.send(message)
                return self.worker.take()
        except EngineUnavailable as error:
            self._lose(error)
        assert self.error is not None, "else it answers"
        raise self.error

    def _lose(self, error: EngineUnavailable) -> None:
        self.error = error.with_traceback(None)  # its frames would keep who asked
        self.worker.close()
        waiting = [self._heard, *(receive for _, receive in self._queue)]
        self._heard = None
        self._queue.clear()
        for receive in waiting:
            if receive is not None:
                receive(error)


class SentTable:
    """What a worker was told of a range's slot table."""

    def __init__(self) -> None:
        self._table: SlotIds = np.zeros((0, 0), dtype=np.int32)

    def news(self, batch: StepBatch, table: SlotIds) -> tuple[Ints, Ints, SlotIds]:
        """What it was not told yet of the sequences in a step."""
        if self._table.shape != table.shape:
            self._table = np.zeros_like(table)
        used, longest = np.unique(batch.table_rows), int(batch.context_lens.max())
        rows, columns = (table[used, :longest] != self._table[used, :longest]).nonzero()
        found = used[rows], columns, table[used[rows], columns]
        self._table[found[:2]] = found[2]
        return found


class HeldRange:
    """A range of layers: the models that have it, the workers that hold it, and what went into it."""

    def __init__(self, setup: StageSetup, nodes: int) -> None:
        self.setup, self.members = setup, dict[int, StageSetup]()
        self.homes = list[int]()  # the workers that are to hold it
        self.holders = dict[int, SentTable]()
        self.loading = Counter[int]()
        self.failure: EngineError | None = None
        self.costs, self.seconds, options = StageCosts(setup), 0.0, setup.config.options
        self.kept: KeptRows | None = None
        if setup.replicas > 1 or setup.config.shares:
            assert options.kv_tokens is not None, "who begins knows how many there are"
            self.kept = KeptRows(nodes, options.kv_tokens + SPARE_SLOTS, setup.config.model.hidden_size)

    def join(self, node: HeldNode, setups: Sequence[StageSetup]) -> None:
        """Have a worker load it, or what some models add to it; it holds it from then on."""
        self.loading[node.number] += len(setups)
        for setup in setups:
            node.ask(setup, partial(self._joined, node.number))

    def _joined(self, number: int, answer: FailureReply | EngineUnavailable | None) -> None:
        self.loading[number] -= 1
        if isinstance(answer, FailureReply):
            self.failure = answer.error(self.setup.config.name)
        elif answer is None and not self.loading[number]:
            self.holders.setdefault(number, SentTable())
        self.loading += Counter()

    def leave(self, number: int) -> None:
        """A worker that does not hold it any more."""
        self.holders.pop(number, None)
        if self.kept is not None:
            self.kept.held[number] = False

    def forget(self, number: int, slots: SlotIds) -> None:
        """What a worker has there, and was told, is not known any more."""
        self.holders[number] = SentTable()
        if self.kept is not None:
            self.kept.held[number, slots] = False

    def demand(self, seconds: float) -> Demand:
        """Its size in layers, and the workers that it takes, by what it took of so many seconds."""
        size, busy = len(self.setup.layers), self.seconds / seconds / max(1, len(self.holders))
        return Demand(size, self.setup.replicas - 1 + min(1.0, max(0.01 * size, busy)))
