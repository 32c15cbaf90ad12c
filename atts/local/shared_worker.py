"""The worker that engines on models of one zoo share: one step loop, in this process or a child, for all of them."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from atts.core import SampleRequest
from atts.errors import EngineError, EngineUnavailable
from atts.local.messages import (
    AddChain,
    Cancel,
    Command,
    FailureReply,
    LoopReport,
    LoopStats,
    SampleReply,
    ScoreReply,
    Submit,
    WorkerConfig,
    WorkerReady,
)
from atts.local.model_config import read_model_config
from atts.local.worker import Deliver, LoopWorker, new_worker
from atts.stored_blocks import MODELS


class SharedWorker:
    """One engine's part in a loop; the first to open starts it, the last to close ends it.

    Engines share a loop where they have the same zoo, options, tokenizer, replica and shape but for the number of
    layers, and native kernels compute them; else each has one of its own. Steps, busy time and cache are counted for
    all of them.
    """

    def __init__(self, zoo: Path, replica: int = 0) -> None:
        self._zoo, self._replica = zoo, replica
        self._host: _Host | None = None
        self._own: LoopWorker | None = None  # where no loop can be shared
        self._chain = 0
        self._deliver: Deliver = _unheard
        self._sent: dict[int, tuple[int, int]] = {}  # the loop's numbers of requests: ours, and how many ids were given
        self._numbers: dict[int, int] = {}
        self._stats = LoopStats()
        self._lock = threading.Lock()

    def open(self, config: WorkerConfig, deliver: Deliver) -> WorkerReady:
        """Join the loop of these models, or start one.

        :raises EngineError: it could not be started.
        """
        self._deliver, config = deliver, replace(config, depth=self._depth(config))
        with _HOSTS_LOCK:
            key = self._zoo, self._replica, config.depth, _shape(config)
            host = _HOSTS.get(key)
            if host is None:
                try:
                    host = _HOSTS[key] = _Host(config)
                except OSError as error:
                    advice = "End other processes, or write ?worker=thread behind the engine's name"
                    raise EngineUnavailable(config.name, f"its process cannot be started ({error})", advice) from error
            host.members.append(self)
        try:
            ready = host.start()
            if ready.shares or host.members[0] is self:
                self._host, self._chain = host, host.chain_of(config)
                return ready
        except EngineError:
            _leave(host, self)
            raise
        _leave(host, self)
        self._own = new_worker(config.options.worker)
        return self._own.open(config, deliver)

    def _depth(self, config: WorkerConfig) -> int:
        """Layers of the deepest of the zoo's models that can join this one: the loop's cache is for all of them."""
        depth = config.model.num_layers
        for folder in (self._zoo / MODELS).glob("[!.]*"):
            try:
                model = read_model_config(folder, config.name)
            except EngineError:
                continue  # it joins no loop
            if _shape(replace(config, model=model)) == _shape(config):
                depth = max(depth, model.num_layers)
        return depth

    def send(self, command: Command) -> None:
        """Pass a command on, a request under the loop's own number."""
        if self._own is not None:
            self._own.send(command)
            return
        host = self._host
        assert host is not None, "opened before it is asked"
        match command:
            case Submit(request_id, request):
                given = request.ids if isinstance(request, SampleRequest) else (*request.prefix, *request.suffix)
                with self._lock:
                    self._stats.requests += 1
                    with host.lock:  # numbers rise from one request to the next
                        number = host.next_number(self)
                        self._sent[number], self._numbers[request_id] = (request_id, len(given)), number
                        host.worker.send(Submit(number, request, self._chain))
            case Cancel(request_id):
                with self._lock:
                    number = self._numbers.pop(request_id, 0)
                    is_unanswered = self._sent.pop(number, None) is not None
                    self._stats.cancelled += is_unanswered
                if is_unanswered:
                    host.forget(number)
                    host.worker.send(Cancel(number))
            case _:
                raise AssertionError("an engine samples, scores and cancels")  # and leaves by `close`

    @property
    def in_loop(self) -> int:
        """Requests in the loop, of whichever engine."""
        members = [self] if self._host is None else list(self._host.members)
        return sum(len(member._sent) for member in members)

    def close(self) -> None:
        """Leave the loop; closing twice is fine."""
        host, own, self._host, self._own = self._host, self._own, None, None
        if own is not None:
            own.close()
        if host is not None:
            for number in list(self._sent):
                host.worker.send(Cancel(number))
            _leave(host, self)

    def hear(self, report: LoopReport, mine: set[int]) -> None:
        """Pass on what is this engine's of a report, with its own numbers and counters."""
        replies = list[SampleReply | ScoreReply | FailureReply]()
        with self._lock:
            for reply in report.replies:
                if reply.request_id in mine and (sent := self._sent.pop(reply.request_id, None)):
                    self._numbers.pop(sent[0], None)
                    self._count(reply, sent[1])
                    replies.append(replace(reply, request_id=sent[0]))
                elif not reply.request_id:
                    replies.append(reply)
            stats = report.stats and replace(
                report.stats,
                **{name: getattr(self._stats, name) for name in _OWN},
                in_flight=len(self._sent),
            )
        self._deliver(LoopReport(tuple(replies), stats))

    def _count(self, reply: SampleReply | ScoreReply | FailureReply, given: int) -> None:
        if isinstance(reply, FailureReply):
            self._stats.failed += 1
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


class _Host:
    """A loop and the engines that share it."""

    def __init__(self, config: WorkerConfig) -> None:
        self.members: list[SharedWorker] = []
        self.lock = threading.Lock()
        self.worker: LoopWorker = new_worker(config.options.worker)
        self._config = config
        self._ready: WorkerReady | None = None
        self._owners: dict[int, SharedWorker] = {}
        self._chains: dict[Path, int] = {}
        self._last = 0

    def start(self) -> WorkerReady:
        """Start the loop once; those that come meanwhile wait.

        :raises EngineError: it could not be started.
        """
        with self.lock:
            if self._ready is None:
                self._ready = self.worker.open(replace(self._config, shares=True), self._hear)
                self._chains[self._config.folder] = 0
            return self._ready

    def chain_of(self, config: WorkerConfig) -> int:
        """The number of a model in the loop; it is told of one that is new."""
        with self.lock:
            if config.folder not in self._chains:
                self._chains[config.folder] = len(self._chains)
                self.worker.send(AddChain(config))
            return self._chains[config.folder]

    def next_number(self, owner: SharedWorker) -> int:
        """A number for a request of this engine; the lock is held."""
        self._last += 1
        self._owners[self._last] = owner
        return self._last

    def forget(self, number: int) -> None:
        """A request is not waited for any more."""
        self._owners.pop(number, None)

    def _hear(self, report: LoopReport) -> None:
        if any(not reply.request_id for reply in report.replies):
            _retire(self)
        mine = dict[SharedWorker, set[int]]()
        for reply in report.replies:
            owner = self._owners.pop(reply.request_id, None)
            if owner is not None:
                mine.setdefault(owner, set()).add(reply.request_id)
        for member in list(self.members):
            member.hear(report, mine.get(member, set()))


_HOSTS: dict[tuple[Path, int, int, object], _Host] = {}
_HOSTS_LOCK = threading.Lock()


def _leave(host: _Host, member: SharedWorker) -> None:
    """One engine less; the last one ends the loop."""
    with _HOSTS_LOCK:
        if member in host.members:
            host.members.remove(member)
        is_last = not host.members
    if is_last:
        _retire(host)
        host.worker.close()


def _retire(host: _Host) -> None:
    """A loop that has ended, or will: those that open from now on start another."""
    with _HOSTS_LOCK:
        for key in [key for key, known in _HOSTS.items() if known is host]:
            del _HOSTS[key]


def _shape(config: WorkerConfig) -> object:
    """What models must have alike to be run in one step, beside their options."""
    shape = replace(config.model, num_layers=0, ropes=(), windows=(), ties_embeddings=False)
    return shape, config.pieces, config.options


def _unheard(report: LoopReport) -> None:
    """What is said to an engine that is not open."""
