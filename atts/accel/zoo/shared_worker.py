"""A worker that several engines on models of one zoo share: one step loop computes all their
models.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from atts.accel.options import StageOptions
from atts.core import SampleRequest, ScoreRequest
from atts.errors import EngineError, EngineUnavailable
from atts.local.messages import (
    Cancel,
    Command,
    FailureReply,
    LoopReport,
    LoopStats,
    Reply,
    SampleReply,
    Submit,
    WorkerConfig,
    WorkerReady,
)
from atts.local.model_config import read_model_config
from atts.local.worker import Deliver, LoopWorker, new_worker
from atts.models.stored_blocks import MODELS

Share = Callable[[WorkerConfig, int], WorkerConfig]


@dataclass(frozen=True, slots=True)
class AddModel(Command):
    """A command that adds a model to a loop with several models. The model gets the next free
    number.
    """

    config: WorkerConfig


class SharedWorker:
    """One engine's connection to a shared loop. The first engine that opens starts the loop, and
    the last one that closes ends it.

    Engines share a loop if they use native kernels and have the same zoo, options, tokenizer,
    replica number and model shape. Their numbers of layers may differ, unless the layers are
    divided into stages. All other engines have a loop of their own. Statistics of steps, busy time
    and cache are those of the whole loop.
    """

    def __init__(self, zoo: Path, replica: int, stages: StageOptions, share: Share) -> None:
        """Create a worker that is not connected to a loop yet.

        `share` returns the settings of a loop for models that have at most a given number of
        layers.
        """
        self._zoo = zoo
        self._replica = replica
        self._stages = stages
        self._share = share
        self._host: _Host | None = None
        # the loop of this engine alone; None if the engine uses a shared loop
        self._own: LoopWorker | None = None
        self._chain = 0
        self._deliver: Deliver = lambda report: None
        self._stats = LoopStats()

    def open(self, config: WorkerConfig, deliver: Deliver) -> WorkerReady:
        """Join the shared loop, or start it if this engine is the first one.

        If the shared loop cannot compute this model, start a loop for this engine alone.

        :raises EngineError: the loop could not be started.
        """
        self._deliver = deliver
        depth = self._depth(config)
        key = self._zoo, self._replica, depth, self._shape(config)
        shared = self._share(config, depth)
        with _HOSTS_LOCK:
            try:
                host = _HOSTS[key] = _HOSTS.get(key) or _Host(shared)
            except OSError as error:
                advice = (
                    "End other processes to free resources, or add ?worker=thread to the "
                    "engine's address"
                )
                raise EngineUnavailable(
                    config.name, f"the engine's process cannot be started ({error})", advice
                ) from error
            host.members.append(self)
        try:
            ready = host.start()
            if ready.takes_models or host.members[0] is self:
                self._host = host
                self._chain = host.chain_of(shared)
                return ready
        finally:
            if self._host is None:
                host.leave(self)
        # The shared loop cannot compute this model, so this engine starts another loop for itself.
        self._own = new_worker(config.options.worker)
        return self._own.open(config, deliver)

    def _depth(self, config: WorkerConfig) -> int:
        """Return the number of layers that the shared cache needs: the largest number of layers
        among the zoo's models that can join this loop.
        """
        depth = config.model.num_layers
        for folder in (self._zoo / MODELS).glob("[!.]*"):
            try:
                model = read_model_config(folder, config.name)
            except EngineError:
                continue  # A damaged model cannot join a loop, so it is skipped.
            if self._shape(replace(config, model=model)) == self._shape(config):
                depth = max(depth, model.num_layers)
        return depth

    def _shape(self, config: WorkerConfig) -> object:
        """Return the properties that must be the same in all models of a loop."""
        # With stages, models share ranges of layers. So all models of a loop need the same number
        # of layers.
        depth = config.model.num_layers if self._stages.stages > 1 else 0
        shape = replace(config.model, num_layers=depth, ropes=(), windows=(), ties_embeddings=False)
        return shape, config.pieces, config.options, self._stages

    def send(self, command: Command) -> None:
        """Send a command of this engine to the loop.

        A request gets another number there, which is unique in the loop.
        """
        if self._own is not None:
            self._own.send(command)
            return
        assert self._host is not None, "the engine must be open before it gets commands"
        match command:
            case Submit(request_id, request):
                self._stats.requests += 1
                given = (
                    request.ids
                    if isinstance(request, SampleRequest)
                    else (*request.prefix, *request.suffix)
                )
                self._host.submit(_Asked(self, request_id, len(given)), request, self._chain)
            case Cancel(request_id):
                self._stats.cancelled += self._host.cancel(self, request_id)
            case _:
                # An engine sends only these two commands. To end its work, it calls `close` instead
                # of sending a command.
                raise AssertionError(
                    "unknown command; the only commands are sample, score and cancel"
                )

    @property
    def in_loop(self) -> int | None:
        """Return the number of unanswered requests of all engines in the shared loop.

        Return None if this engine has a loop of its own.
        """
        return None if self._host is None else len(self._host.asked)

    def close(self) -> None:
        """Leave the shared loop, or close the engine's own loop. A second call does nothing."""
        host = self._host
        own = self._own
        self._host = None
        self._own = None
        if own is not None:
            own.close()
        if host is not None:
            host.cancel(self)
            host.leave(self)

    def receive(
        self, replies: list[tuple[Reply, int]], stats: LoopStats | None, in_flight: int
    ) -> None:
        """Pass the engine the replies to its own requests, with the statistics of the loop.

        Each reply comes with the number of prompt tokens of its request.
        """
        for reply, given in replies:
            self._count(reply, given)
        counters = {name: getattr(self._stats, name) for name in _OWN}
        told = stats and replace(stats, **counters, in_flight=in_flight)
        self._deliver(LoopReport(tuple([reply for reply, _ in replies]), told))

    def _count(self, reply: Reply, given: int) -> None:
        if isinstance(reply, FailureReply):
            self._stats.failed += bool(reply.request_id)
            return
        self._stats.cached_tokens += reply.cached_tokens
        self._stats.prefilled_tokens += max(0, given - reply.cached_tokens)
        if isinstance(reply, SampleReply):
            self._stats.sampled_tokens += len(reply.ids)
        else:
            self._stats.scored_tokens += len(reply.logprobs)


_OWN = (
    *("requests", "cancelled", "failed"),
    *("sampled_tokens", "scored_tokens", "prefilled_tokens", "cached_tokens"),
)
"""Names of the fields of `LoopStats` that are counted for each engine separately. All other fields
describe the whole loop.
"""


class _Asked(NamedTuple):
    """A request in the shared loop: the engine that sent it, its number in that engine, and its
    number of prompt tokens.
    """

    member: SharedWorker
    request_id: int
    given: int


class _Host:
    """A shared loop, and the engines that use it."""

    def __init__(self, config: WorkerConfig) -> None:
        self.members: list[SharedWorker] = []
        # unanswered requests of all engines, by the number that each request has in the loop
        self.asked: dict[int, _Asked] = {}
        self._worker: LoopWorker = new_worker(config.options.worker)
        self._config = config
        self._ready: WorkerReady | None = None
        self._chains: dict[Path, int] = {config.folder: 0}
        self._last = 0
        self._lock = threading.Lock()

    def start(self) -> WorkerReady:
        """Start the loop if it does not run yet. Engines that open meanwhile wait.

        :raises EngineError: the loop could not be started.
        """
        with self._lock:
            if self._ready is None:
                self._ready = self._worker.open(self._config, self._hear)
            return self._ready

    def chain_of(self, config: WorkerConfig) -> int:
        """Return a model's number in the loop. A new model is added to the loop."""
        with self._lock:
            if config.folder not in self._chains:
                self._chains[config.folder] = len(self._chains)
                self._worker.send(AddModel(config))
            return self._chains[config.folder]

    def submit(self, asked: _Asked, request: SampleRequest | ScoreRequest, chain: int) -> None:
        """Send a request to the loop under the loop's next request number."""
        with self._lock:
            self._last += 1
            self.asked[self._last] = asked
            self._worker.send(Submit(self._last, request, chain))

    def cancel(self, member: SharedWorker, request_id: int | None = None) -> int:
        """Cancel one request or all requests of an engine, and return how many were cancelled."""
        with self._lock:
            mine = [number for number, asked in self.asked.items() if asked.member is member]
            gone = [
                number for number in mine if request_id in (None, self.asked[number].request_id)
            ]
            for number in gone:
                del self.asked[number]
                self._worker.send(Cancel(number))
            return len(gone)

    def _hear(self, report: LoopReport) -> None:
        replies: dict[SharedWorker, list[tuple[Reply, int]]] = {
            member: [] for member in list(self.members)
        }
        with self._lock:
            for reply in report.replies:
                # A reply without a request number means that the loop has ended, so all engines
                # receive it.
                if not reply.request_id:
                    for heard in replies.values():
                        heard.append((reply, 0))
                elif (asked := self.asked.pop(reply.request_id, None)) and asked.member in replies:
                    replies[asked.member].append(
                        (replace(reply, request_id=asked.request_id), asked.given)
                    )
            in_flight = Counter(asked.member for asked in self.asked.values())
        if any(not reply.request_id for reply in report.replies):
            self._retire()
        for member, heard in replies.items():
            member.receive(heard, report.stats, in_flight[member])

    def leave(self, member: SharedWorker) -> None:
        """Remove an engine, and close the loop if no other engine uses it."""
        with _HOSTS_LOCK:
            if member in self.members:
                self.members.remove(member)
            is_last = not self.members
        if is_last:
            self._retire()
            self._worker.close()

    def _retire(self) -> None:
        """Remove this loop from `_HOSTS`, so that engines that open later start a new one."""
        with _HOSTS_LOCK:
            for key in [key for key, known in _HOSTS.items() if known is self]:
                del _HOSTS[key]


_HOSTS: dict[tuple[Path, int, int, object], _Host] = {}
_HOSTS_LOCK = threading.Lock()
