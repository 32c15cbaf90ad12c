"""Simulated engines, from fitted costs of their steps and recorded lengths of reasoning texts."""

from __future__ import annotations

import gzip
import heapq
import itertools
import json
import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from statistics import median, stdev
from struct import Struct
from types import TracebackType
from typing import Any, Protocol, Self

import anyio
import numpy as np

from atts.concurrency import background, clock
from atts.core import (
    CallSpan,
    CallStatus,
    Completion,
    Message,
    Problem,
    ProblemSpan,
    Role,
    RolloutSpan,
    SampleRequest,
    ScoreRequest,
    Scores,
    TokenIds,
)
from atts.engine import EngineSpec, EngineStats, Tokenizer, check_sample, check_score
from atts.pipelines import Answers
from atts.sampling import Seed, generator
from scripts.studies.harness import traces


@dataclass(frozen=True, slots=True)
class Cost:
    """Coefficients of the seconds of a step, with the costs of a request.

    A step takes `step` + `sequence` x batch + `cached` x KV tokens read + `prefilled` x tokens fed.
    `request` is the additional time of a step that admits a request. `call` is the host's time for
    a request outside of steps: hand-over, event loop, pipeline. `share` is the factor by which a
    step takes longer while the other engine works on the same processors; 1 if the engines have
    separate processors.
    """

    step: float
    sequence: float
    cached: float
    prefilled: float
    request: float = 0.0
    call: float = 0.0
    share: float = 1.0
    origin: str = ""

    def seconds(self, batch: int, cached: float, fed: float = 0.0) -> float:
        """Return the seconds of a step that decodes `batch` sequences, reads `cached` KV tokens and
        feeds `fed` tokens.
        """
        return self.step + self.sequence * batch + self.cached * cached + self.prefilled * fed

    def steps(self, count: int, batch: int, cached: float) -> float:
        """Return the duration of `count` decoding steps in seconds; each step adds one token to
        every sequence.
        """
        grown = cached * count + batch * count * (count - 1) / 2
        return count * (self.step + self.sequence * batch) + self.cached * grown

    def steps_within(self, seconds: float, batch: int, cached: float) -> int:
        """Return the number of consecutive decoding steps that end within this many seconds."""
        linear = self.step + self.sequence * batch + self.cached * cached - self.cached * batch / 2
        square = self.cached * batch / 2
        if square <= 0:
            return int(seconds / linear + 1e-9)
        return int(
            (-linear + math.sqrt(linear * linear + 4 * square * seconds)) / (2 * square) + 1e-9
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """Draft and target of one installation, with the costs of both and the KV tokens that each can
    hold.
    """

    name: str
    draft: Cost
    target: Cost
    draft_kv: int
    target_kv: int


_MS = 1e-3
_OVERHEAD = 1.207 * _MS
"""Seconds of overhead per step, from the simulator that also gave the costs of the 8B model."""

TARGET_70B = Cost(
    18.35 * _MS,
    0.0243 * _MS,
    6.24e-5 * _MS,
    0.0640 * _MS,
    origin="Llama 70B, 4 x H100, fitted in the TurboSpec fork",
)
DRAFT_8B = Cost(
    5.886 * _MS + _OVERHEAD,
    0.02101 * _MS,
    3.93e-5 * _MS,
    0.02101 * _MS,
    origin="Llama 8B, H100, SpecDecode-Bench",
)
DRAFT_1B = Cost(
    5.886 * _MS * 1.54 / 8.03 + _OVERHEAD,
    0.02101 * _MS * 1.54 / 8.03,
    3.93e-5 * _MS * 14336 / 65536,
    0.02101 * _MS * 1.54 / 8.03,
    origin="own estimate: the 8B row scaled by weights (1.54/8.03) and by KV bytes a token, with the "
    "same step overhead",
)
# memory left after the weights, divided by the bytes of a token (80 layers, 8 KV heads)
_ROOM_70B = int((4 * 80e9 * 0.9 - 141e9) / 327_680)
_ROOM_8B = int((80e9 * 0.9 - 16.1e9) / 131_072)
_ROOM_1B = int((80e9 * 0.9 - 3.1e9) / 28_672)

PAIRS: Mapping[str, Pair] = {
    "1.5B/70B": Pair("1.5B/70B", DRAFT_1B, TARGET_70B, _ROOM_1B, _ROOM_70B),
    "8B/70B": Pair("8B/70B", DRAFT_8B, TARGET_70B, _ROOM_8B, _ROOM_70B),
}
"""Pairs with one H100 for the draft and four H100 for the target."""


CHUNK = 500  # tokens of a full chunk in the recorded runs
# number of tokens of a problem with instructions; an assumption, because the traces do not have it
PROMPT = 150
_WORD = 1
_END = 2


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded rollout: tokens before its answer (inf without an answer), and the scores of its
    chunks.
    """

    tokens: float
    starts: tuple[float, ...]  # number of tokens before each scored chunk
    scores: tuple[float, ...]
    answer: str | None


@dataclass(frozen=True, slots=True)
class Library:
    """Recorded rollouts, grouped by question, and a description of their origin."""

    questions: tuple[tuple[Recorded, ...], ...]
    origin: str

    @property
    def spread(self) -> float:
        """Return the standard deviation of a rollout's log length within its question."""
        each = [
            [math.log(r.tokens) for r in lines if math.isfinite(r.tokens)]
            for lines in self.questions
        ]
        return float(np.sqrt(np.mean([stdev(logs) ** 2 for logs in each if len(logs) > 1])))


def find_library() -> Library:
    """Return the recorded run; if its data are missing, return a synthetic library, marked as such."""
    found = recorded_rollouts()
    return synthetic_library() if found is None else read_library(found)


def recorded_rollouts(folder: Path | None = None, run: str = "ct0") -> list[dict[str, Any]] | None:
    """Return the rollouts of one recorded run, turn by turn, or None if the data are missing."""
    folder = folder or traces()
    if folder is None:
        return None
    with gzip.open(folder / "draft_target.jsonl.gz", "rt") as lines:
        records = [json.loads(line) for line in lines]
    return [record for record in records if record["run"] == run]


def read_library(found: Sequence[Mapping[str, Any]]) -> Library:
    """Return the rollouts of a run.

    Characters are converted to tokens at a rate measured on chunks that the limit cut, because
    their number of tokens is known.
    """
    full = [
        t["draft_chars"]
        for r in found
        for t in r["turns"][:-1]
        if t["draft_chars"] and not t["draft_boxed"]
    ]
    characters = median(full) / CHUNK
    questions: dict[int, list[Recorded]] = {}
    for record in found:
        questions.setdefault(record["question_id"], []).append(_rollout(record, characters))
    words = f"{len(found)} rollouts of {len(questions)} MATH-500 questions, R1-Distill-Llama-8B with QwQ-32B"
    return Library(
        tuple(tuple(questions[q]) for q in sorted(questions)), f"run {found[0]['run']}: {words}"
    )


def _rollout(record: Mapping[str, Any], characters: float) -> Recorded:
    starts = list[float]()
    scores = list[float]()
    tokens = 0.0
    for turn in record["turns"]:
        if turn["ppl"] is not None:
            starts.append(tokens)
            scores.append(float(turn["ppl"]))
        tokens += ((turn["draft_chars"] or 0) + (turn["target_chars"] or 0)) / characters
    answer = record["answer_direct"].strip()
    found = answer if answer and answer != "invalid" else None
    return Recorded(max(tokens, 1.0) if found else math.inf, tuple(starts), tuple(scores), found)


def synthetic_library(questions: int = 100, samples: int = 16, seed: int = 0) -> Library:
    """Make rollouts with synthetic lengths and scores, for machines without the recorded traces.

    Lengths and scores are log-normal with about the recorded deviations. Between questions the
    standard deviations are 0.75 (log tokens) and 0.55 (log of mean negative log-probability, median
    0.47 nats), and within questions 0.45 and 0.47. One rollout in twenty never ends, and wrong
    answers have a few kinds.
    """
    draw = np.random.default_rng(seed)
    table = list[tuple[Recorded, ...]]()
    for question in range(questions):
        length = draw.normal(7.0, 0.75)
        level = draw.normal(math.log(0.47), 0.55)
        skill = draw.beta(2.4, 0.6)
        lines: list[Recorded] = []
        for _ in range(samples):
            tokens = math.exp(draw.normal(length, 0.45))
            starts = tuple(float(start) for start in range(0, int(tokens) + 1, CHUNK))
            scores = tuple(math.exp(math.exp(draw.normal(level, 0.47))) for _ in starts)
            kind = "right" if draw.random() < skill else f"wrong {draw.integers(3)}"
            ends = draw.random() > 0.05
            lines.append(
                Recorded(
                    tokens if ends else math.inf,
                    starts,
                    scores,
                    f"{question} {kind}" if ends else None,
                )
            )
        table.append(tuple(lines))
    return Library(
        tuple(table),
        "synthetic: log-normal lengths and scores (the recorded traces are missing)",
    )


class NoText:
    """A tokenizer for texts that no one reads."""

    def __init__(self, grain: int) -> None:
        self._prompt: TokenIds = (_WORD,) * max(1, PROMPT // grain)
        self.digest = "no text"

    def encode(self, text: str) -> TokenIds:
        """Return one id for any text."""
        return (_WORD,)

    def decode(self, ids: Sequence[int]) -> str:
        """Return an empty text for any ids."""
        return ""

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """Return as many ids as a prompt has, for any messages."""
        return self._prompt


class TraceLaw:
    """Simulated rollouts whose number of tokens before the answer does not depend on the model that
    writes.

    The number of tokens is sampled for each (problem, sample) from the question's recorded
    rollouts. A log-normal kernel of Silverman's width smooths the numbers, so that 256 samples do
    not repeat 16 recorded rollouts. Scores and answers are the recorded ones at the same position.

    Methods therefore differ in waiting and in the model that writes, but not in the amount of text,
    and simulated accuracy has no meaning.
    """

    def __init__(self, library: Library, seed: int = 0, grain: int = 10) -> None:
        self.library = library
        self.grain = grain  # number of real tokens that one id stands for
        self.tokenizer = NoText(grain)
        self._seed = seed
        self._kernel = 1.06 * library.spread * 16 ** (-1 / 5)
        self.rollout = lru_cache(maxsize=1 << 16)(self._rollout)

    def spec(self, role: Role) -> EngineSpec:
        """Return the spec of an engine that accepts any text."""
        return EngineSpec(role, f"law of {role}", self.tokenizer.digest, 1 << 24, (_END,), 8)

    def problems(self, count: int) -> list[Problem]:
        """Return problems modelled on the recorded questions, with about equally many for each
        question.
        """
        return [Problem(f"q{number}", f"q{number}", None, "text") for number in range(count)]

    def write(self, role: Role, request: SampleRequest) -> Completion:
        """Write the requested number of tokens, or fewer if the rollout reaches its answer earlier."""
        needed, recorded = self.rollout(request.seed.problem, request.seed.sample)
        left = needed - self._written(len(request.ids))
        count = min(
            request.max_tokens,
            max(1, math.ceil(left / self.grain) if math.isfinite(left) else 1 << 30),
        )
        is_done = count * self.grain >= left
        text = (recorded.answer or "") if is_done else ""
        return Completion((_WORD,) * count, text, "end" if is_done else "length", (-0.5,) * count)

    def score(self, request: ScoreRequest) -> tuple[float, ...]:
        """Return the recorded score at this position of the rollout."""
        problem, _, sample = request.rollout.rpartition("/")
        needed, recorded = self.rollout(problem, int(sample))
        if not recorded.scores:
            return (-0.5,) * len(request.suffix)
        stretch = needed / recorded.tokens if math.isfinite(needed) else 1.0
        place = bisect_right(recorded.starts, self._written(len(request.prefix)) / stretch) - 1
        return (-math.log(recorded.scores[max(0, place)]),) * len(request.suffix)

    def _written(self, ids: int) -> float:
        return (ids - len(self.tokenizer.render(()))) * self.grain

    def _rollout(self, problem: str, sample: int) -> tuple[float, Recorded]:
        draw = generator(Seed(self._seed, problem, sample, purpose="length"))
        lines = self.library.questions[int(problem[1:]) % len(self.library.questions)]
        recorded = lines[int(draw.integers(len(lines)))]
        return recorded.tokens * math.exp(self._kernel * float(draw.standard_normal())), recorded


def _classes(answers: Sequence[str]) -> Sequence[int]:
    """Group equal strings."""
    places = {answer: place for place, answer in enumerate(dict.fromkeys(answers))}
    return [places[answer] for answer in answers]


ANSWERS = Answers(lambda text: text or None, _classes)
"""Reader of answers in simulated rollouts: the text of a rollout is its answer."""


class Law(Protocol):
    """A source of texts and scores that depend only on the request."""

    @property
    # Number of real tokens that one id stands for. With fewer ids, simulating long texts is faster.
    def grain(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer: ...  # the tokenizer that draft and target share

    def spec(self, role: Role) -> EngineSpec:
        """Return the spec of the engine."""
        ...

    def write(self, role: Role, request: SampleRequest) -> Completion:
        """Return a chunk for the request."""
        ...

    def score(self, request: ScoreRequest) -> tuple[float, ...]:
        """Return the log-probabilities of the request's chunk."""
        ...


@dataclass(slots=True)
class Load:
    """The work that an engine has done, and the largest number of KV tokens in use at one time."""

    peak: float = 0.0
    busy: float = 0.0
    steps: int = 0
    prefilled: float = 0.0
    decoded: float = 0.0


@dataclass(slots=True)
class _Work:
    """A request in progress: `kept` cached tokens, `feed` tokens to prefill, then `write` tokens to
    decode.
    """

    rollout: str
    kept: float
    feed: float
    write: float
    done: anyio.Event = field(default_factory=anyio.Event)
    ends_at: float = math.inf  # number of the decoding step that completes the request
    state: str = "waiting"

    @property
    def tokens(self) -> float:
        """Return the number of KV tokens that the request holds after its prefill."""
        return self.kept + self.feed


class Host:
    """A machine whose single event loop passes requests to its engines."""

    def __init__(self) -> None:
        self.at_work = 0
        self._free_at = 0.0

    async def hand_over(self, seconds: float, now: float) -> None:
        """Wait until the event loop has handled all earlier requests and this one."""
        self._free_at = max(now, self._free_at) + seconds
        await anyio.sleep(self._free_at - now)


class BatchedEngine:
    """An engine with continuous batching under a virtual clock.

    Every step decodes one token of each decoding sequence, and feeds up to `chunk` tokens of
    sequences in prefill. A request is admitted once its tokens fit next to the requests in
    progress; warm prefixes of other rollouts are evicted, the least recently used first. Scoring is
    a prefill that writes nothing.

    On a real clock, each step begins when the previous step was due to end. So a late wake-up of
    this process does not count as time of the server.
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
        self._held = 0.0  # KV tokens of requests in progress
        self._cached = 0.0  # KV tokens that the decoding sequences read in a step
        self._warm: OrderedDict[str, float] = OrderedDict()
        # number of ids of the prompt of each problem; all rollouts of a problem share the prompt
        self._prompts: dict[str, int] = {}
        self._warm_tokens = 0.0
        self._count = 0.0  # number of decoding steps so far
        self._due = 0.0  # time at which the last step is due to end
        self._requests = 0
        self._numbers = itertools.count()
        self._wake = anyio.Event()
        self._now: Callable[[], float] = lambda: 0.0
        self._stack = AsyncExitStack()
        self.spec = law.spec(role)
        self.tokenizer = law.tokenizer

    def stats(self) -> EngineStats:
        """Return the current counters."""
        return EngineStats(self._requests, steps=self.load.steps, busy_seconds=self.load.busy)

    async def sample(self, request: SampleRequest) -> Completion:
        """Sample a chunk, and return it after the simulated time of the request."""
        check_sample(request, self.spec)
        completion = self.law.write(self.role, request)
        cached = await self._serve(request.rollout, len(request.ids), 0, len(completion.ids))
        return replace(completion, cached_tokens=cached)

    async def score(self, request: ScoreRequest) -> Scores:
        """Return the scores after the simulated time of one prefill."""
        check_score(request, self.spec)
        cached = await self._serve(request.rollout, len(request.prefix), len(request.suffix), 0)
        return Scores(self.law.score(request), cached)

    async def recheck(self) -> None:
        """Open the engine if it is closed, because a pool calls this for its replicas."""
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
        """Serve a request to its end, and return the number of its leading ids that were cached.

        The request is queued, its uncached ids are prefilled, and then its tokens are decoded.
        """
        if self.cost.call:
            await self._host.hand_over(self.cost.call, self._now())
        grain = self.law.grain
        kept = self._warm.pop(rollout, 0.0)
        self._warm_tokens -= kept
        problem = rollout.rpartition("/")[0]
        prompt = self._prompts.get(problem, 0)
        # the first request of a problem contains little more than the prompt
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
        """Remove a request that was cancelled, and free its KV tokens at once."""
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
        """Take steps as long as there is work."""
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
        """Sleep until the step is due to end; a late wake-up does not delay the next step."""
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
        """Take one step, in which every decoding sequence gets a token and waiting sequences are
        fed.

        The step's budget limits the fed tokens.
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
                continue  # this request was cancelled during the step
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
        """Take decoding steps until the next sequence is complete or a request arrives."""
        batch = len(self._decoding)
        cached = self._cached
        steps = max(1, round(self._decoding[0][0] - self._count))
        stretch = self._stretch()
        whole = stretch * self.cost.steps(steps, batch, cached)
        wake = anyio.Event()
        self._wake = wake
        with anyio.move_on_after(max(0.0, self._due + whole - self._now())):
            await wake.wait()
            # a request arrived, so the engine plans again after the current step
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
        tokens = work.tokens + work.write
        self._held -= tokens
        work.state = "done"
        if work.rollout:
            self._warm_tokens += tokens - self._warm.pop(work.rollout, 0.0)
            self._warm[work.rollout] = tokens
        work.done.set()

    def _note(self) -> None:
        self.load.peak = max(self.load.peak, self._held)
        self._evict()

    def _evict(self, needed: float = 0.0) -> None:
        """Evict the least recently used prefixes until the tokens fit."""
        while self._held + needed + self._warm_tokens > self._room and self._warm:
            _, gone = self._warm.popitem(last=False)
            self._warm_tokens -= gone


_ROW = Struct("<qiiiiiddddqibqb")
_STATUS: tuple[CallStatus, ...] = ("done", "failed", "cancelled")
_CODE = {status: code for code, status in enumerate(_STATUS)}
_NO_NODE = -1
_rollout_fields = attrgetter(*RolloutSpan.__struct_fields__)
_problem_fields = attrgetter(*ProblemSpan.__struct_fields__)


class Recording:
    """An event sink that keeps its events in little memory, and returns them in order.

    A call takes about a hundred bytes. A million calls as objects would slow every further step,
    because the garbage collector would visit each of them again and again.
    """

    __slots__ = ("_codes", "_edges", "_names", "_problems", "_rollouts", "_rows", "others")

    def __init__(self) -> None:
        self.others: list[object] = []  # events emitted by pipelines
        # the events are tuples of numbers and strings, because the garbage collector stops tracking
        # such tuples
        self._rollouts: list[tuple[Any, ...]] = []
        self._problems: list[tuple[Any, ...]] = []
        self._rows = bytearray()
        self._codes: dict[str, int] = {}
        self._names: list[str] = []
        # for each call that waited for no other call or for several: the calls that it waited for
        self._edges: dict[int, tuple[int, ...]] = {}

    def __call__(self, event: object) -> None:
        """Record an event."""
        if isinstance(event, CallSpan):
            self._keep(event)
        elif isinstance(event, RolloutSpan):
            self._rollouts.append(_rollout_fields(event))
        elif isinstance(event, ProblemSpan):
            self._problems.append(_problem_fields(event))
        else:
            self.others.append(event)

    def __len__(self) -> int:
        """Return the number of recorded calls."""
        return len(self._rows) // _ROW.size

    @property
    def rollouts(self) -> list[RolloutSpan]:
        """Return the rollouts in the order in which they ended."""
        return [RolloutSpan(*values) for values in self._rollouts]

    @property
    def problems(self) -> list[ProblemSpan]:
        """Return the problems in the order in which they ended."""
        return [ProblemSpan(*values) for values in self._problems]

    def nodes(self) -> Iterator[CallSpan]:
        """Return the calls in the order in which they ended."""
        names = self._names
        for row in _ROW.iter_unpack(self._rows):
            node, stage, engine, problem, sample, turn, *_ = row
            ready, queued, started, ended, first, attempt, status, tokens, live = row[6:]
            yield CallSpan(
                node=node,
                stage=names[stage],
                engine=names[engine],
                problem=names[problem],
                sample=sample,
                turn=turn,
                ready=ready,
                queued=queued,
                started=started,
                ended=ended,
                after=self._edges[node] if first == _NO_NODE else (first,),
                attempt=attempt,
                status=_STATUS[status],
                tokens=tokens,
                source="live" if live else "recalled",
            )

    def _keep(self, span: CallSpan) -> None:
        if len(span.after) == 1:
            first = span.after[0]
        else:
            first = _NO_NODE
            self._edges[span.node] = span.after
        codes = self._codes
        try:
            names = (codes[span.stage], codes[span.engine], codes[span.problem])
        except KeyError:
            names = (self._code(span.stage), self._code(span.engine), self._code(span.problem))
        who = (span.node, *names, span.sample, span.turn)
        times = (span.ready, span.queued, span.started, span.ended)
        done = (first, span.attempt, _CODE[span.status], span.tokens, span.source == "live")
        self._rows += _ROW.pack(*who, *times, *done)

    def _code(self, name: str) -> int:
        if name not in self._codes:
            self._codes[name] = len(self._names)
            self._names.append(name)
        return self._codes[name]
