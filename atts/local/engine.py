"""`LocalEngine`, an implementation of the engine protocol that samples and scores with models on
this machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import anyio

from atts.concurrency import loop_caller
from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import EngineSpec, EngineStats, Speculated, check_sample, check_score, counters_of
from atts.errors import ContextOverflow, EngineUnavailable, MissingExtra
from atts.local.messages import (
    Cancel,
    FailureReply,
    LoopReport,
    LoopStats,
    Reply,
    SampleReply,
    ScoreReply,
    Submit,
    WorkerConfig,
    WorkerReady,
)
from atts.local.model_config import ModelConfig, check_model, read_model_config
from atts.local.options import EngineSize, LocalOptions, Room
from atts.local.worker import LoopWorker, new_worker
from atts.models.folders import (
    TEXT_FILES,
    WEIGHT_FILES,
    checkpoint_dtype,
    find_folder,
    require_template,
    weight_files,
    weights_marks,
)
from atts.models.stored_blocks import check_stored
from atts.models.tokenizers import ModelTokenizer

_KIND = "local 0.1"
_log = logging.getLogger("atts.local")
_log.addHandler(logging.NullHandler())


class Accelerator(Protocol):
    """An extension that makes an engine faster. Other packages, such as `atts.accel`, define
    accelerators.
    """

    def check(self, options: LocalOptions) -> None:
        """Check that the accelerator can be added to an engine with these options.

        :raises OptionError: the accelerator cannot be added.
        """
        ...

    def prepare(self, config: WorkerConfig, tokenizer: ModelTokenizer) -> WorkerConfig:
        """Return the configuration with a builder of the accelerated step loop, and with all data
        that the builder needs.

        :raises OptionError: an option does not fit the model.
        :raises EngineError: a file or model that an option names cannot be used.
        """
        ...

    def worker(self, model: str, options: LocalOptions) -> LoopWorker:
        """Return a worker to run a model's step loop; `model` is a folder or a hub id.

        :raises OSError: the system cannot start a process.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunDemand:
    """The resources that a run needs: cache for its rollouts in flight, and memory for the other
    engine of the draft-target pair.
    """

    rollouts: int
    tokens: int  # largest number of tokens of one rollout, including its prompt
    # index of the GPU to use if there are several GPUs and the options do not name one
    card: int = 0
    other_card: int = 0
    # model of the pair's other engine, if that engine is loaded after this one; else empty
    other: str = ""
    other_options: LocalOptions = field(default_factory=LocalOptions)

    def room(self, model: ModelConfig) -> Room:
        """Return what the run needs if it uses this model: cache for its rollouts in flight, and
        memory for the other engine.

        :raises EngineError: the other model's configuration cannot be read.
        """
        tokens = min(self.tokens, model.context_length)
        other_card = self.other_card
        size: EngineSize | None = None
        device = self.other_options.device
        if device.startswith("cuda"):
            other_card = int(device[5:] or 0)
        if self.other and device != "cpu":
            folder = find_folder(self.other, "the other model", TEXT_FILES)
            other = read_model_config(folder, self.other)
            dtype = self.other_options.dtype
            if dtype == "auto":
                dtype = checkpoint_dtype(folder, self.other)
            size = EngineSize.of(other, dtype, min(tokens, other.context_length))
        return Room(self.rollouts, tokens, self.card, other_card, size)


class PlainDecoding(Accelerator):
    """An accelerator that changes nothing: plain decoding."""

    def check(self, options: LocalOptions) -> None:
        """Accept any options."""

    def prepare(self, config: WorkerConfig, tokenizer: ModelTokenizer) -> WorkerConfig:
        """Return the configuration unchanged."""
        return config

    def worker(self, model: str, options: LocalOptions) -> LoopWorker:
        """Return a worker of the kind that the options name: a thread or a process."""
        return new_worker(options.worker)


class LocalEngine:
    """An `atts.engine.Engine` that runs a model on this machine, in this process or in a child
    process.

    All calls share the same steps and KV cache, including cached prefixes of prompts. Other calls
    in flight change the speed of a call, but never the distribution of its tokens. A cancelled call
    ends within one step.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        name: str = "",
        options: LocalOptions | None = None,
        chat: bool = False,
        accelerator: Accelerator | None = None,
        demand: RunDemand | None = None,
    ) -> None:
        """Create an engine for a model folder or hub id. Nothing is loaded until `async with`
        enters the engine.

        If `chat` is true, a model without a chat template is refused. The constructor refuses it if
        the model's folder is on disk; otherwise it is refused after the download. An `accelerator`
        changes how fast texts are sampled, but never changes the texts. A `demand` limits the cache
        on a GPU to the size that the run can fill. It also leaves memory for the other engine of
        the pair.

        :raises OptionError: an option is unknown or impossible.
        :raises UnsupportedByEngine: the model's folder has no chat template.
        """
        self.model = str(model)
        self._name = name or Path(self.model).name
        self._options = options or LocalOptions()
        self._options.check()
        self._is_chat = chat
        self._demand = demand
        self._accelerator = accelerator or PlainDecoding()
        self._accelerator.check(self._options)
        if chat and (folder := Path(self.model).expanduser()).is_dir():
            require_template(folder, self._name)
        self._opened: _OpenEngine | None = None

    @property
    def spec(self) -> EngineSpec:
        return self._require().spec

    @property
    def tokenizer(self) -> ModelTokenizer:
        return self._require().tokenizer

    async def sample(self, request: SampleRequest) -> Completion:
        """Sample a continuation of the request's ids; see `atts.engine.Engine.sample`."""
        opened = self._opened or self._require()
        reply = await opened.ask(request)
        assert isinstance(reply, SampleReply), "the reply to a sampling request must be a sample"
        is_closed = reply.ended == "end" and reply.ids[-1] in opened.spec.end_ids
        text = opened.tokenizer.decode(reply.ids[:-1] if is_closed else reply.ids)
        return Completion(reply.ids, text, reply.ended, reply.logprobs, reply.cached_tokens)

    async def score(self, request: ScoreRequest) -> Scores:
        """Score the request's suffix; see `atts.engine.Engine.score`."""
        reply = await (self._opened or self._require()).ask(request)
        assert isinstance(reply, ScoreReply), "the reply to a scoring request must be scores"
        return Scores(reply.logprobs, reply.cached_tokens, reply.beginning)

    def stats(self) -> EngineStats:
        """Return the engine's counters so far."""
        return self._require().stats()

    def steps_taken(self) -> int:
        """Return the number of steps that the loop had run at its last report."""
        return self._require().loop_stats.steps

    def speculated(self) -> Speculated | None:
        """Return the counters of speculative decoding so far; None if the engine does not
        speculate.
        """
        stats = self._require().loop_stats.speculation
        return None if stats is None else counters_of(stats)

    def loop_stats(self) -> LoopStats:
        """Return the step loop's counters at its last report, which is at most about 0.2 s old."""
        return self._require().loop_stats

    @property
    def kv_tokens(self) -> int:
        """Return the size of the KV cache in tokens."""
        return self._require().kv_tokens

    @property
    def in_loop(self) -> int:
        """Return the number of requests in the step loop, including those of other engines that
        share it.
        """
        return self._require().in_loop

    async def recheck(self) -> None:
        """Open the engine again if it is closed or its step loop has ended; see
        `atts.servers.pool.Replica`.

        :raises EngineError: the engine cannot be opened.
        """
        if self._opened is not None and self._opened.end is not None:
            await self.__aexit__(None, None, None)
        if self._opened is None:
            await self.__aenter__()

    @property
    def kernel(self) -> str:
        """Describe the kernel that computes the steps."""
        return self._require().kernel

    async def __aenter__(self) -> Self:
        """Load the model.

        :raises ModelLoadError: the model cannot be loaded; the message gives reason and remedy.
        :raises OutOfMemory: the model does not fit into memory.
        :raises EngineUnavailable: the system cannot start the model's process.
        """
        assert self._opened is None, "an engine cannot be opened again before it is closed"
        try:
            worker = self._accelerator.worker(self.model, self._options)
        except OSError as error:
            advice = (
                "End other processes to free resources, or add ?worker=thread to the "
                "engine's address"
            )
            raise EngineUnavailable(
                self._name, f"the engine's process cannot be started ({error})", advice
            ) from error
        opened = _OpenEngine(self._name, worker)
        # Loading cannot be interrupted, so a cancellation takes effect only after the model is
        # loaded.
        with anyio.CancelScope(shield=True):
            prepare = partial(
                _prepare,
                self.model,
                self._name,
                self._options,
                self._accelerator,
                is_chat=self._is_chat,
                demand=self._demand,
            )
            await opened.load(prepare)
        self._opened = opened
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        """Drop unfinished requests and unload the model; do nothing if the engine is closed
        already.
        """
        opened = self._opened
        self._opened = None
        if opened is not None:
            with anyio.CancelScope(shield=True):
                await opened.close()

    def _require(self) -> _OpenEngine:
        if self._opened is None:
            raise EngineUnavailable(
                self._name, "the engine is not open", "Use the engine inside `async with`"
            )
        return self._opened


@dataclass(slots=True, eq=False)
class _Waiter:
    event: anyio.Event
    reply: Reply | None = None


class _OpenEngine:
    """The state of an engine while it is open: its worker, and the calls that wait for a reply."""

    spec: EngineSpec
    tokenizer: ModelTokenizer
    # context length of the model, in tokens; the cache may have room for fewer tokens
    _context: int
    kv_tokens: int
    kernel: str

    def __init__(self, name: str, worker: LoopWorker) -> None:
        self._name = name
        self._worker = worker
        self._request_ids = count(1)
        self._waiters: dict[int, _Waiter] = {}
        # failure that ended the step loop; None while the loop runs
        self.end: FailureReply | None = None
        self._requests = 0
        self._soon = loop_caller()
        self.loop_stats = LoopStats()

    async def load(self, prepare: Callable[[], _Prepared]) -> None:
        """Find, check and load the model in other threads, to keep the event loop free."""
        try:
            config, tokenizer, marks = await anyio.to_thread.run_sync(prepare)
            ready = await anyio.to_thread.run_sync(self._worker.open, config, self._hand_over)
        except BaseException:
            self._worker.close()
            raise
        warn_once(ready.trouble)
        self.tokenizer = tokenizer
        self.kv_tokens = ready.kv_tokens
        self.kernel = ready.kernel
        self.spec = _spec(marks, config, ready, tokenizer)
        self._context = config.model.context_length

    async def ask(self, request: SampleRequest | ScoreRequest) -> Reply:
        """Check a request, send it to the worker, and return its reply. If the caller is cancelled,
        cancel the request too.
        """
        try:
            check_sample(request, self.spec) if isinstance(request, SampleRequest) else check_score(
                request, self.spec
            )
        except ContextOverflow as error:
            raise self._explained(error) from None
        if self.end is not None:
            raise self.end.error(self._name)
        request_id = next(self._request_ids)
        waiter = self._waiters[request_id] = _Waiter(anyio.Event())
        self._requests += 1
        self._worker.send(Submit(request_id, request))
        try:
            await waiter.event.wait()
        finally:
            del self._waiters[request_id]
            if waiter.reply is None:
                self._worker.send(Cancel(request_id))
        assert waiter.reply is not None, "a finished request must have a reply"
        if isinstance(waiter.reply, FailureReply):
            raise waiter.reply.error(self._name)
        return waiter.reply

    def _explained(self, error: ContextOverflow) -> ContextOverflow:
        """Return the error. If only the cache is too small for the request, add advice to enlarge
        the cache.
        """
        if error.needed > self._context:
            return error
        advice = (
            f"The model supports {self._context} tokens, so raise ?kv_tokens= in its address (now "
            f"{self.kv_tokens})"
        )
        return ContextOverflow(self._name, error.needed, error.context_length, advice)

    def stats(self) -> EngineStats:
        """Return the engine's counters so far."""
        return replace(
            self.loop_stats.snapshot(), requests=self._requests, in_flight=len(self._waiters)
        )

    @property
    def in_loop(self) -> int:
        """Return the number of requests in the step loop, including those of other engines that
        share it.
        """
        of_all = self._worker.in_loop
        return len(self._waiters) if of_all is None else of_all

    async def close(self) -> None:
        """Close the worker; calls that still wait for a reply raise an error."""
        await anyio.to_thread.run_sync(self._worker.close)
        self._deliver(LoopReport((FailureReply(0, "closed", "the engine was closed"),), None))

    def _hand_over(self, report: LoopReport) -> None:
        """Pass a report from the worker's thread to the event loop, without waiting for its
        delivery.
        """
        self._soon(partial(self._deliver, report))

    def _deliver(self, report: LoopReport) -> None:
        if report.stats is not None:
            self.loop_stats = report.stats
            if report.stats.speculation is not None:
                warn_once(report.stats.speculation.trouble)
        for reply in report.replies:
            if reply.request_id == 0:
                assert isinstance(reply, FailureReply), (
                    "only a failure of the step loop may be sent as a reply to all requests"
                )
                self.end = self.end or reply
                waiters = list(self._waiters.values())
            else:
                waiters = (
                    [self._waiters[reply.request_id]] if reply.request_id in self._waiters else []
                )
            for waiter in waiters:
                waiter.reply = waiter.reply or reply
                waiter.event.set()


_Prepared = tuple[WorkerConfig, ModelTokenizer, tuple[str, str]]


def _prepare(
    model: str,
    name: str,
    options: LocalOptions,
    accelerator: Accelerator,
    *,
    is_chat: bool,
    demand: RunDemand | None = None,
) -> _Prepared:
    """Find or download the model's files and check them, without loading the weights. Return the
    worker's configuration, the tokenizer, and a name and a digest of the weights.
    """
    # Only the worker imports torch. Without this check, a missing torch package would look like a
    # crash of the worker.
    for package in ("torch", "transformers"):
        if not _is_installed(package):
            raise MissingExtra(f"{name}, a model in this process,", package, "local")
    folder = find_folder(model, name, (*TEXT_FILES, *WEIGHT_FILES))
    if is_chat:
        require_template(folder, name)
    stored = check_stored(folder)
    config, tokenizer = check_model(folder, name)
    marks = stored.marks if stored else weights_marks(weight_files(folder, name))
    label = f"{Path(model).name if folder == Path(model).expanduser() else model}@{marks[0]}"
    room = None if demand is None else demand.room(config)
    plain = WorkerConfig(name, folder, config, tokenizer.pieces, options, room=room, source=model)
    worker = accelerator.prepare(plain, tokenizer)
    return worker, tokenizer, (label, marks[1])


@cache
def warn_once(trouble: str) -> None:
    """Log a problem as a warning, unless the same problem was logged before. Ignore an empty
    string.
    """
    if trouble:
        _log.warning("%s", trouble)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _spec(
    marks: tuple[str, str], config: WorkerConfig, ready: WorkerReady, tokenizer: ModelTokenizer
) -> EngineSpec:
    model = config.model
    rounds_scores = config.options.scores == "bfloat16"
    return EngineSpec(
        name=config.name,
        model=marks[0],
        weights=marks[1],
        tokenizer=tokenizer.digest,
        chat_template=tokenizer.template_digest,
        context_length=min(model.context_length, ready.kv_tokens),
        end_ids=model.end_ids,
        vocabulary=model.vocabulary,
        engine=_KIND,
        dtype=ready.dtype + ", scores in bfloat16" * rounds_scores,
        rounds_scores=rounds_scores,
        capabilities=frozenset({"sample", "score", "draw", "entropy"}),
        flops_per_token=2.0 * model.matrix_weights,
    )
