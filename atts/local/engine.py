"""The engine on in-process models: what callers open, await and close."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

import anyio

from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import EngineSpec, EngineStats, check_sample, check_score
from atts.errors import ContextOverflow, EngineError, EngineUnavailable, ModelLoadError, OptionError, OutOfMemory
from atts.local.messages import (
    Blueprint,
    Cancel,
    Device,
    Dtype,
    Failed,
    Kernel,
    LoopStats,
    Opened,
    Reply,
    Report,
    Sampled,
    Scored,
    Submit,
)
from atts.local.shape import Shape, read_shape
from atts.local.worker import ProcessWorker, ThreadWorker, Worker
from atts.tasks import soon
from atts.tokenizing import TEXT_FILES, ModelTokenizer, find_folder

Place = Literal["thread", "process"]
_KIND = "local 0.1"


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How a local engine runs; the defaults suit small models on a CPU."""

    device: Device = "auto"  # CUDA where there is one
    dtype: Dtype = "float32"
    worker: Place = "process"  # overlaps with other engines and a busy caller; a thread opens at once
    kernel: Kernel = "auto"  # native where it can be built and fits the model, else torch
    kv_tokens: int | None = None  # the cache's size; None: what 2 GiB hold on a CPU, most of what is free on a GPU
    max_batch: int = 256  # sequences in one step
    chunk_tokens: int = 512  # tokens in one step, decoding apart
    threads: int | None = None  # of one step; None leaves torch's setting


class LocalEngine:
    """A model of a supported family in this process or a child of it; an `atts.engine.Engine`.

    Samples and scores of any number of callers share steps, cache and prompt prefixes; who else is in flight changes
    speed, never the law. Cancelling a call frees its place within one step.
    """

    def __init__(self, model: str | Path, *, name: str = "", options: LocalOptions | None = None) -> None:
        """`model` is a folder or a hub id; nothing is loaded before the engine is entered.

        :raises OptionError: an option is unknown or impossible.
        """
        self._model = str(model)
        self._name = name or Path(self._model).name
        self._options = options or LocalOptions()
        _check_options(self._options)
        self._opened: _Open | None = None

    @property
    def spec(self) -> EngineSpec:
        """Who the engine is.

        :raises EngineUnavailable: it is not open.
        """
        return self._require().spec

    @property
    def tokenizer(self) -> ModelTokenizer:
        """The model's own tokenizer.

        :raises EngineUnavailable: the engine is not open.
        """
        return self._require().tokenizer

    async def sample(self, request: SampleRequest) -> Completion:
        """Continue the ids; see `atts.engine.Engine.sample`."""
        opened = self._require()
        try:
            check_sample(request, opened.spec)
        except ContextOverflow as error:
            raise opened.explained(error) from None
        reply = await opened.ask(request)
        assert isinstance(reply, Sampled), "a sampling request is answered by a sample"
        is_closed = reply.ended == "end" and reply.ids[-1] in opened.spec.end_ids
        text = opened.tokenizer.decode(reply.ids[:-1] if is_closed else reply.ids)
        return Completion(reply.ids, text, reply.ended, reply.logprobs, reply.cached_tokens)

    async def score(self, request: ScoreRequest) -> Scores:
        """Log-probabilities of the suffix; see `atts.engine.Engine.score`."""
        opened = self._require()
        try:
            check_score(request, opened.spec)
        except ContextOverflow as error:
            raise opened.explained(error) from None
        reply = await opened.ask(request)
        assert isinstance(reply, Scored), "a scoring request is answered by scores"
        return Scores(reply.logprobs, reply.cached_tokens)

    def stats(self) -> EngineStats:
        """Counters so far."""
        return self._require().stats()

    def loop_stats(self) -> LoopStats:
        """The step loop's own counters: cache, batches, preemptions, waiting times; at most a fifth of a second old."""
        return self._require().loop_stats

    @property
    def kv_tokens(self) -> int:
        """How many tokens the cache holds."""
        return self._require().kv_tokens

    @property
    def kernel(self) -> str:
        """What computes the steps."""
        return self._require().kernel

    async def __aenter__(self) -> Self:
        """Load the model.

        :raises ModelLoadError: it cannot be loaded; the message says why and what to do.
        :raises OutOfMemory: it does not fit.
        :raises EngineUnavailable: the system starts no process for it.
        """
        assert self._opened is None, "an engine is entered once at a time"
        try:
            worker: Worker = ThreadWorker() if self._options.worker == "thread" else ProcessWorker()
        except OSError as error:
            advice = "End other processes, or take worker='thread'"
            raise EngineUnavailable(self._name, f"its process cannot be started ({error})", advice) from error
        opened = _Open(self._name, worker)
        with anyio.CancelScope(shield=True):  # a half-loaded model cannot be abandoned
            await opened.load(self._model, self._options)
        self._opened = opened
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Drop what is unfinished and free the model; leaving twice is fine."""
        opened, self._opened = self._opened, None
        if opened is not None:
            with anyio.CancelScope(shield=True):
                await opened.close()

    def _require(self) -> _Open:
        if self._opened is None:
            raise EngineUnavailable(self._name, "it is not open", "Use it inside `async with`")
        return self._opened


@dataclass(slots=True, eq=False)
class _Waiter:
    event: anyio.Event
    reply: Reply | None = None


class _Open:
    """An engine between its opening and its closing: the worker, and who waits for what."""

    spec: EngineSpec
    tokenizer: ModelTokenizer
    _context: int  # the model's own; the cache may hold less
    kv_tokens: int
    kernel: str

    def __init__(self, name: str, worker: Worker) -> None:
        self._name, self._worker = name, worker
        self._tickets = count(1)
        self._waiters: dict[int, _Waiter] = {}
        self._end: Failed | None = None  # why nothing more will come
        self._requests = 0
        self._soon = soon()
        self.loop_stats = LoopStats()

    async def load(self, model: str, options: LocalOptions) -> None:
        """Find, check and load the model, away from the event loop."""
        try:
            plan, tokenizer, label = await anyio.to_thread.run_sync(_prepare, model, self._name, options)
            opened = await anyio.to_thread.run_sync(self._worker.open, plan, self._tell)
        except BaseException:
            self._worker.close()
            raise
        self.tokenizer, self.kv_tokens, self.kernel = tokenizer, opened.kv_tokens, opened.kernel
        self.spec = _spec(self._name, label, plan, opened, tokenizer.digest)
        self._context = plan.shape.context_length

    async def ask(self, request: SampleRequest | ScoreRequest) -> Reply:
        """Send a request and wait for its reply; leaving early cancels it."""
        if self._end is not None:
            raise self._error(self._end)
        ticket = next(self._tickets)
        waiter = self._waiters[ticket] = _Waiter(anyio.Event())
        self._requests += 1
        self._worker.send(Submit(ticket, request))
        try:
            await waiter.event.wait()
        finally:
            del self._waiters[ticket]
            if waiter.reply is None:
                self._worker.send(Cancel(ticket))
        assert waiter.reply is not None, "woken without a reply"
        if isinstance(waiter.reply, Failed):
            raise self._error(waiter.reply)
        return waiter.reply

    def explained(self, error: ContextOverflow) -> ContextOverflow:
        """The same error, saying so where the model could take the request and only the cache is too small."""
        if error.needed > self._context:
            return error
        advice = f"The model itself could take {self._context}: raise kv_tokens, which is {self.kv_tokens}"
        return ContextOverflow(self._name, error.needed, error.context_length, advice)

    def stats(self) -> EngineStats:
        """Counters so far, in the terms every engine shares."""
        return replace(self.loop_stats.snapshot(), requests=self._requests, in_flight=len(self._waiters))

    async def close(self) -> None:
        """End the worker; whoever still waits is told."""
        await anyio.to_thread.run_sync(self._worker.close)
        self._deliver(Report((Failed(0, "closed", "it was closed"),), None))

    def _tell(self, report: Report) -> None:
        """Called in the worker's thread; hands over to the event loop without waiting for it."""
        self._soon(lambda: self._deliver(report))

    def _deliver(self, report: Report) -> None:
        if report.stats is not None:
            self.loop_stats = report.stats
        for reply in report.replies:
            if reply.ticket == 0:
                assert isinstance(reply, Failed), "only an end concerns everybody"
                self._end = self._end or reply
                waiters = list(self._waiters.values())
            else:
                waiters = [self._waiters[reply.ticket]] if reply.ticket in self._waiters else []
            for waiter in waiters:
                waiter.reply = waiter.reply or reply
                waiter.event.set()

    def _error(self, failure: Failed) -> EngineError:
        kinds = {"memory": OutOfMemory, "closed": EngineUnavailable}
        return kinds.get(failure.kind, EngineError)(self._name, failure.problem, failure.advice)


def _prepare(model: str, name: str, options: LocalOptions) -> tuple[Blueprint, ModelTokenizer, str]:
    folder = find_folder(model, name, (*TEXT_FILES, "*.safetensors"))
    shape = read_shape(folder, name)
    tokenizer = ModelTokenizer(folder, name)
    if tokenizer.vocabulary > shape.vocabulary:
        problem = f"its tokenizer has ids up to {tokenizer.vocabulary - 1}, the model knows {shape.vocabulary}"
        raise ModelLoadError(name, problem, "Put the model's own tokenizer into its folder")
    plan = Blueprint(
        name=name,
        folder=folder,
        shape=shape,
        pieces=tokenizer.pieces,
        device=options.device,
        dtype=options.dtype,
        kernel=options.kernel,
        kv_tokens=options.kv_tokens,
        max_batch=options.max_batch,
        chunk_tokens=options.chunk_tokens,
        threads=options.threads,
    )
    label = f"{Path(model).name if folder == Path(model).expanduser() else model}@{_weights_mark(folder)}"
    return plan, tokenizer, label


def _weights_mark(folder: Path) -> str:
    """Eight characters that tell weights apart without reading gigabytes: sizes and sixteen pieces of each file."""
    mark = blake2b(digest_size=4)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        mark.update(str(size).encode())
        with path.open("rb") as file:
            for piece in range(16):
                file.seek(size * piece // 16)
                mark.update(file.read(65536))
    return mark.hexdigest()


def _spec(name: str, label: str, plan: Blueprint, opened: Opened, digest: str) -> EngineSpec:
    shape: Shape = plan.shape
    return EngineSpec(
        name=name,
        model=label,
        tokenizer=digest,
        context_length=min(shape.context_length, opened.kv_tokens),
        end_ids=shape.end_ids,
        vocabulary=shape.vocabulary,
        engine=_KIND,
        dtype=plan.dtype,
        flops_per_token=2.0 * shape.matrix_weights,
    )


def _check_options(options: LocalOptions) -> None:
    allowed = {"device": Device, "dtype": Dtype, "worker": Place, "kernel": Kernel}
    for option, known in allowed.items():
        value = getattr(options, option)
        if value not in get_args(known):
            raise OptionError(str(value), f"no such {option}", get_args(known))
    for option in ("kv_tokens", "max_batch", "chunk_tokens", "threads"):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise OptionError(option, f"is {value}, expected at least 1")
