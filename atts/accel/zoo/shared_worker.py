"""The worker that engines on models of one zoo share: one step loop for all of them."""

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
    """One more model for a loop that runs several: its number follows the last one's."""

    config: WorkerConfig


class SharedWorker:
    """One engine's part in a loop; the first to open starts it, the last to close ends it.

    Engines share a loop where they have the same zoo, options, tokenizer, replica and shape but for
    the number of layers, and native kernels compute them; else each has one of its own. Steps, busy
    time and cache are counted for all of them.
    """

    def __init__(self, zoo: Path, replica: int, stages: StageOptions, share: Share) -> None:
        """Create a worker. `share` names the function that builds a loop for models of at most so
        many layers.
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
        """Join the loop of these models, or start one.

        :raises EngineError: it could not be started.
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
                    config.name, f"its process cannot be started ({error})", advice
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
        # models that cannot join have a loop of their own, as if there were no others
        self._own = new_worker(config.options.worker)
        return self._own.open(config, deliver)

    def _depth(self, config: WorkerConfig) -> int:
        """Return the layers of the zoo's deepest model that can join; the loop's cache is for all
        of them.
        """
        depth = config.model.num_layers
        for folder in (self._zoo / MODELS).glob("[!.]*"):
            try:
                model = read_model_config(folder, config.name)
            except EngineError:
                continue  # a model that cannot be read joins no loop
            if self._shape(replace(config, model=model)) == self._shape(config):
                depth = max(depth, model.num_layers)
        return depth

    def _shape(self, config: WorkerConfig) -> object:
        """Return the properties that models must share to be run in one step."""
        # with stages, ranges of layers are shared: then models must be as deep
        depth = config.model.num_layers if self._stages.stages > 1 else 0
        shape = replace(config.model, num_layers=depth, ropes=(), windows=(), ties_embeddings=False)
        return shape, config.pieces, config.options, self._stages

    def send(self, command: Command) -> None:
        """Pass a command on, a request under the loop's own number."""
        if self._own is not None:
            self._own.send(command)
            return
        assert self._host is not None, "opened before it is asked"
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
                raise AssertionError("an engine samples, scores and cancels")

    @property
    def in_loop(self) -> int | None:
        """Return the number of requests in the loop, whichever engine sent them."""
        return None if self._host is None else len(self._host.asked)

    def close(self) -> None:
        """Leave the loop; closing twice is fine."""
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
        """Take replies that are this engine's, each with how many ids were given, and the loop's
        counters.
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
"""Counters that each engine keeps for itself."""


class _Asked(NamedTuple):
    """A request in the loop: whose it is, its number there, and how many ids were given."""

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
        """Start the loop once; those that come meanwhile wait.

        :raises EngineError: it could not be started.
        """
        with self._lock:
            if self._ready is None:
                self._ready = self._worker.open(self._config, self._hear)
            return self._ready

    def chain_of(self, config: WorkerConfig) -> int:
        """Return the number of a model in the loop, and announce a new model to it."""
        with self._lock:
            if config.folder not in self._chains:
                self._chains[config.folder] = len(self._chains)
                self._worker.send(AddModel(config))
            return self._chains[config.folder]

    def submit(self, asked: _Asked, request: SampleRequest | ScoreRequest, chain: int) -> None:
        """Pass a request on; numbers rise from one to the next."""
        with self._lock:
            self._last += 1
            self.asked[self._last] = asked
            self._worker.send(Submit(self._last, request, chain))

    def cancel(self, member: SharedWorker, request_id: int | None = None) -> int:
        """Cancel an engine's request, or all of them; how many were not answered."""
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
        """Take one engine out; the last one ends the loop."""
        with _HOSTS_LOCK:
            if member in self.members:
                self.members.remove(member)
            is_last = not self.members
        if is_last:
            self._retire()
            self._worker.close()

    def _retire(self) -> None:
        """Have engines that open from now on start another loop."""
        with _HOSTS_LOCK:
            for key in [key for key, known in _HOSTS.items() if known is self]:
                del _HOSTS[key]


_HOSTS: dict[tuple[Path, int, int, object], _Host] = {}
_HOSTS_LOCK = threading.Lock()
