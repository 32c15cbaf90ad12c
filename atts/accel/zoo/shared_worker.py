"""A worker that the engines on models of one zoo share: one step loop computes all of them."""

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
    """Command that adds a model to a loop with several models; its number is one more than the last
    one's.
    """

    config: WorkerConfig


class SharedWorker:
    """One engine's connection to a shared loop; the first one starts the loop, and the last one to
    close ends it.

    Engines share a loop if native kernels compute them and they agree in zoo, options, tokenizer,
    replica and shape, except for the number of layers. Other engines have their own loops. Steps,
    busy time and cache are counted for all of them.
    """

    def __init__(self, zoo: Path, replica: int, stages: StageOptions, share: Share) -> None:
        """Create a worker. `share` returns the settings of a loop for models of at most the given
        number of layers.
        """
        self._zoo = zoo
        self._replica = replica
        self._stages = stages
        self._share = share
        self._host: _Host | None = None
        self._own: LoopWorker | None = None  # used if no loop can be shared
        self._chain = 0
        self._deliver: Deliver = lambda report: None
        self._stats = LoopStats()

    def open(self, config: WorkerConfig, deliver: Deliver) -> WorkerReady:
        """Join the loop of these models; start the loop if this engine is the first.

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
                advice = "End other processes, or write ?worker=thread behind the engine's name"
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
        # models that cannot join have their own loop
        self._own = new_worker(config.options.worker)
        return self._own.open(config, deliver)

    def _depth(self, config: WorkerConfig) -> int:
        """Return the number of layers of the zoo's deepest model that can join, because the cache
        serves all models.
        """
        depth = config.model.num_layers
        for folder in (self._zoo / MODELS).glob("[!.]*"):
            try:
                model = read_model_config(folder, config.name)
            except EngineError:
                continue  # a damaged model joins no loop
            if self._shape(replace(config, model=model)) == self._shape(config):
                depth = max(depth, model.num_layers)
        return depth

    def _shape(self, config: WorkerConfig) -> object:
        """Return the properties that models must share to be run in one step."""
        # stages share ranges of layers, which needs models with the same number of layers
        depth = config.model.num_layers if self._stages.stages > 1 else 0
        shape = replace(config.model, num_layers=depth, ropes=(), windows=(), ties_embeddings=False)
        return shape, config.pieces, config.options, self._stages

    def send(self, command: Command) -> None:
        """Send a command to the loop; a request gets the loop's own number."""
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
                # the only other message is `close`
                raise AssertionError("unknown command: an engine can only sample, score and cancel")

    @property
    def in_loop(self) -> int | None:
        """Return the number of requests in the loop, from all engines."""
        return None if self._host is None else len(self._host.asked)

    def close(self) -> None:
        """Leave the loop; a second call does nothing."""
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
        """Receive replies for this engine, each with the number of tokens already delivered, and
        the loop's counters.
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
"""Counters that each engine has for itself."""


class _Asked(NamedTuple):
    """A request in the loop: its engine, its number in that engine, and the number of tokens
    delivered.
    """

    member: SharedWorker
    request_id: int
    given: int


class _Host:
    """A loop and the engines that share it."""

    def __init__(self, config: WorkerConfig) -> None:
        self.members: list[SharedWorker] = []
        self.asked: dict[int, _Asked] = {}  # keyed by the loop's request number
        self._worker: LoopWorker = new_worker(config.options.worker)
        self._config = config
        self._ready: WorkerReady | None = None
        self._chains: dict[Path, int] = {config.folder: 0}
        self._last = 0
        self._lock = threading.Lock()

    def start(self) -> WorkerReady:
        """Start the loop once; engines that arrive meanwhile wait.

        :raises EngineError: the loop could not be started.
        """
        with self._lock:
            if self._ready is None:
                self._ready = self._worker.open(self._config, self._hear)
            return self._ready

    def chain_of(self, config: WorkerConfig) -> int:
        """Return the number of a model in the loop; a new model is announced to the loop first."""
        with self._lock:
            if config.folder not in self._chains:
                self._chains[config.folder] = len(self._chains)
                self._worker.send(AddModel(config))
            return self._chains[config.folder]

    def submit(self, asked: _Asked, request: SampleRequest | ScoreRequest, chain: int) -> None:
        """Send a request to the loop under the next number."""
        with self._lock:
            self._last += 1
            self.asked[self._last] = asked
            self._worker.send(Submit(self._last, request, chain))

    def cancel(self, member: SharedWorker, request_id: int | None = None) -> int:
        """Cancel one request of an engine, or all; return the number of unanswered ones."""
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
                if not reply.request_id:  # the reply reports the loop's end to all requests
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
        """Remove an engine; the loop ends with its last engine."""
        with _HOSTS_LOCK:
            if member in self.members:
                self.members.remove(member)
            is_last = not self.members
        if is_last:
            self._retire()
            self._worker.close()

    def _retire(self) -> None:
        """Make engines that open from now on start a new loop."""
        with _HOSTS_LOCK:
            for key in [key for key, known in _HOSTS.items() if known is self]:
                del _HOSTS[key]


_HOSTS: dict[tuple[Path, int, int, object], _Host] = {}
_HOSTS_LOCK = threading.Lock()
