"""An engine without a model: a law says what is written, a cost how long it takes, batched as a
server would.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, Self

import anyio

from atts.concurrency import background, clock
from atts.core import Completion, Role, SampleRequest, ScoreRequest, Scores
from atts.engine import EngineSpec, EngineStats, Tokenizer, check_sample, check_score
from scripts.studies.modelled import Cost


class Law(Protocol):
    """What would be written and scored, from the request alone."""

    @property
    def grain(self) -> int: ...  # real tokens per id: long texts are simulated with fewer ids

    @property
    def tokenizer(self) -> Tokenizer: ...  # of both models

    def spec(self, role: Role) -> EngineSpec:
        """Who the engine says it is."""
        ...

    def write(self, role: Role, request: SampleRequest) -> Completion:
        """A chunk."""
        ...

    def score(self, request: ScoreRequest) -> tuple[float, ...]:
        """Log-probabilities of a chunk."""
        ...


@dataclass(slots=True)
class Load:
    """What an engine did, and the most KV tokens at work at once."""

    peak: float = 0.0
    busy: float = 0.0
    steps: int = 0
    prefilled: float = 0.0
    decoded: float = 0.0


@dataclass(slots=True)
class _Work:
    """One request on its way: `feed` tokens to prefill, then `write` to decode, on top of `kept`
    that were warm.
    """

    rollout: str
    kept: float
    feed: float
    write: float
    done: anyio.Event = field(default_factory=anyio.Event)
    ends_at: float = math.inf  # the count of steps at which it has written all
    state: str = "waiting"

    @property
    def tokens(self) -> float:
        """KV tokens it holds once it is fed."""
        return self.kept + self.feed


class Host:
    """What the engines of one machine share: processors, and the one event loop that hands requests
    over.
    """

    def __init__(self) -> None:
        self.at_work = 0
        self._free_at = 0.0

    async def hand_over(self, seconds: float, now: float) -> None:
        """Wait for the event loop's own work on one request, after that on earlier ones."""
        self._free_at = max(now, self._free_at) + seconds
        await anyio.sleep(self._free_at - now)


class BatchedEngine:
    """Continuous batching under a virtual clock.

    Every step serves all decoding sequences and feeds up to `chunk` tokens of those that wait for
    their prefill. A request is admitted when its tokens fit beside what is at work; warm prefixes
    of other rollouts give way, least recently used first. Scoring is a prefill that writes nothing.
    On a real clock a step begins when the one before it was due to end: that this process woke up
    late is not the server's time.
    """

    def __init__(
        self,
        role: Role,
        law: Law,
        cost: Cost,
        kv_tokens: float = math.inf,
        *,
        chunk: int = 2048,
        batch: int = 512,
        host: Host | None = None,
    ) -> None:
        self.role: Role = role
        self.law = law
        self.cost = cost
        self.load = Load()
        self._room = kv_tokens
        self._chunk = chunk
        self._batch = batch
        self._host = host or Host()
        self._waiting: deque[_Work] = deque()
        self._feeding: deque[_Work] = deque()
        self._decoding: list[tuple[float, int, _Work]] = []
        self._held = 0.0  # KV tokens of requests at work
        self._cached = 0.0  # of them, those that decoding reads
        self._warm: OrderedDict[str, float] = OrderedDict()
        self._prompts: dict[str, int] = {}  # ids of each problem's prompt: siblings share it
        self._warm_tokens = 0.0
        self._count = 0.0  # decoding steps so far
        self._due = 0.0  # when the last step ends
        self._requests = 0
        self._numbers = itertools.count()
        self._wake = anyio.Event()
        self._now: Callable[[], float] = lambda: 0.0
        self._stack = AsyncExitStack()
        self.spec = law.spec(role)
        self.tokenizer = law.tokenizer

    def stats(self) -> EngineStats:
        """Counters so far."""
        return EngineStats(self._requests, steps=self.load.steps, busy_seconds=self.load.busy)

    async def sample(self, request: SampleRequest) -> Completion:
        """What the law writes, after as long as it takes."""
        check_sample(request, self.spec)
        completion = self.law.write(self.role, request)
        cached = await self._serve(request.rollout, len(request.ids), 0, len(completion.ids))
        return replace(completion, cached_tokens=cached)

    async def score(self, request: ScoreRequest) -> Scores:
        """What the law scores, after one prefill."""
        check_score(request, self.spec)
        cached = await self._serve(request.rollout, len(request.prefix), len(request.suffix), 0)
        return Scores(self.law.score(request), cached)

    async def recheck(self) -> None:
        """Open it if it never was: a replica of a pool."""
        await self.__aenter__()

    async def __aenter__(self) -> Self:
        self._now = clock()
        self._due = self._now()
        self._wake = anyio.Event()
        await self._stack.enter_async_context(background(self._run))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None:
        await self._stack.aclose()
        return None

    async def _serve(self, rollout: str, prefix: int, suffix: int, write: int) -> int:
        """Queue, prefill what is not warm, decode; how many leading ids were warm."""
        if self.cost.call:
            await self._host.hand_over(self.cost.call, self._now())
        grain = self.law.grain
        kept = self._warm.pop(rollout, 0.0)
        self._warm_tokens -= kept
        problem = rollout.rpartition("/")[0]
        prompt = self._prompts.get(problem, 0)
        # the first request of a problem is its prompt, and little else
        self._prompts.setdefault(problem, prefix)
        warm = min(max(kept, float(grain * prompt)), grain * (prefix if suffix else prefix - 1))
        feed = grain * (prefix + suffix) - warm
        work = _Work(rollout, warm, feed, grain * write)
        self._requests += 1
        self._waiting.append(work)
        self._wake.set()
        try:
            await work.done.wait()
        except BaseException:
            self._forget(work)
            raise
        return int(warm) // grain

    def _forget(self, work: _Work) -> None:
        """A cancelled request frees its place at once."""
        if work.state == "waiting":
            self._waiting.remove(work)
        elif work.state == "feeding":
            self._feeding.remove(work)
            self._held -= work.tokens
        elif work.state == "decoding":
            self._decoding = [entry for entry in self._decoding if entry[2] is not work]
            heapq.heapify(self._decoding)
            written = work.write - (work.ends_at - self._count)
            self._held -= work.tokens + written
            self._cached -= work.tokens + written
        work.state = "gone"
        self._wake.set()

    async def _run(self) -> None:
        """Steps for as long as there is work."""
        while True:
            self._admit()
            if not self._feeding and not self._decoding:
                self._wake = anyio.Event()
                if not self._waiting:
                    await self._wake.wait()
                    self._due = self._now()
                    continue
            began = self._due
            self._host.at_work += 1
            try:
                await (self._mixed_step() if self._feeding else self._decode())
            finally:
                self._host.at_work -= 1
                self.load.busy += self._due - began

    async def _pass(self, seconds: float) -> None:
        """A step of that length: it is over when it is due, however late this process wakes up."""
        self._due += seconds
        await anyio.sleep(max(0.0, self._due - self._now()))

    def _admit(self) -> None:
        while self._waiting and len(self._decoding) + len(self._feeding) < self._batch:
            work = self._waiting[0]
            needed = work.tokens + work.write
            if self._held + needed > self._room and (self._feeding or self._decoding):
                return
            self._evict(needed)
            self._waiting.popleft()
            work.state = "feeding"
            self._held += work.tokens
            self._feeding.append(work)

    async def _mixed_step(self) -> None:
        """One step: every decoding sequence gets a token, those that wait are fed within the step's
        budget.
        """
        fed = 0.0
        budget = float(self._chunk)
        parts: list[tuple[_Work, float]] = []
        for work in self._feeding:
            part = min(work.feed, budget)
            budget -= part
            fed += part
            parts.append((work, part))
            if budget <= 0:
                break
        batch = len(self._decoding)
        begun = sum(work.feed <= part for work, part in parts)
        seconds = self.cost.seconds(batch, self._cached, fed) + self.cost.request * begun
        await self._pass(self._stretch() * seconds)
        self._advance(1, batch)
        self.load.prefilled += fed
        for work, part in parts:
            if work.state != "feeding":
                continue  # cancelled meanwhile
            work.feed -= part
            work.kept += part
            if work.feed <= 0:
                self._feeding.remove(work)
                self._start(work)
        self._note()

    def _start(self, work: _Work) -> None:
        if work.write <= 0:
            self._finish(work)
            return
        work.state = "decoding"
        work.ends_at = self._count + work.write
        heapq.heappush(self._decoding, (work.ends_at, next(self._numbers), work))
        self._cached += work.tokens

    async def _decode(self) -> None:
        """Steps until the next sequence is done or a request comes, whichever is first."""
        batch = len(self._decoding)
        cached = self._cached
        steps = max(1, round(self._decoding[0][0] - self._count))
        stretch = self._stretch()
        whole = stretch * self.cost.steps(steps, batch, cached)
        self._wake = wake = anyio.Event()
        with anyio.move_on_after(max(0.0, self._due + whole - self._now())):
            await wake.wait()
            # a request came: the step under way is finished, then there is another plan
            passed = (self._now() - self._due) / stretch
            steps = min(steps, self.cost.steps_within(passed, batch, cached) + 1)
        await self._pass(stretch * self.cost.steps(steps, batch, cached))
        self._advance(steps, batch)
        self._note()

    def _stretch(self) -> float:
        return self.cost.share if self._host.at_work > 1 else 1.0

    def _advance(self, steps: int, batch: int) -> None:
        self._count += steps
        self.load.steps += steps
        grown = steps * len(self._decoding)
        self.load.decoded += steps * batch
        self._cached += grown
        self._held += grown
        while self._decoding and self._decoding[0][0] <= self._count:
            work = heapq.heappop(self._decoding)[2]
            self._cached -= work.tokens + work.write
            self._finish(work)

    def _finish(self, work: _Work) -> None:
        held = work.tokens + work.write
        self._held -= held
        work.state = "done"
        if work.rollout:
            self._warm_tokens += held - self._warm.pop(work.rollout, 0.0)
            self._warm[work.rollout] = held
        work.done.set()

    def _note(self) -> None:
        self.load.peak = max(self.load.peak, self._held)
        self._evict()

    def _evict(self, needed: float = 0.0) -> None:
        """Make room, least recently used prefixes first."""
        while self._held + needed + self._warm_tokens > self._room and self._warm:
            _, gone = self._warm.popitem(last=False)
            self._warm_tokens -= gone
