"""The builder of a step loop, run inside the thread or process that will run the loop."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter, thread_time
from typing import NamedTuple

import torch
from torch import Tensor

from atts.concurrency import usable_cores
from atts.errors import ModelLoadError, OutOfMemory, UnsupportedByEngine
from atts.local.ahead import BRANCH_SLOTS, AheadDrafter
from atts.local.batch import Model, TappedModel
from atts.local.cache import SPARE_SLOTS, allocate_cache, default_tokens
from atts.local.chains import ChainModel, shared_kernels
from atts.local.compiling import native_library
from atts.local.cuda_model import cuda_model
from atts.local.devices import device_of, drafter_device
from atts.local.drafter_process import DrafterProcess, DraftSetup
from atts.local.drafting import DraftedRows, FuzzyDrafter, ModelDrafter
from atts.local.exits import EXIT_FILE, ExitAdapter, ExitModel, Exits
from atts.local.loader import Weights, load_weights
from atts.local.loop import StepLoop
from atts.local.many_models import Chain, ZooLoader
from atts.local.messages import LoopReport, WorkerConfig, WorkerReady
from atts.local.model_config import rope_rows
from atts.local.native_model import NativeModel, unknown_parts
from atts.local.options import MOST_PROPOSED, OVERLAPPED
from atts.local.prefix import PrefixTree
from atts.local.scheduler import Scheduler, SchedulerConfig
from atts.local.scheme_drafting import GUESSING, SchemeDrafting
from atts.local.sequence import TokenTable
from atts.local.slot_ledger import SlotLedger
from atts.local.speculating import FixedLength, GoodputLengths, Lengths, Speculation
from atts.local.stage_line import HeldLine
from atts.local.staged_loop import StagedLoop, StagedModel
from atts.local.stages import HeldLayers, SharedLayers, StageSetup, stage_setups
from atts.local.streams import StreamHeads
from atts.local.torch_model import TorchModel
from atts.local.transport import InlineTransport
from atts.speculation import BestProposer, HintProposer, Proposer, SuffixProposer

# before a small model sets its own: what is set counts for new threads too
_MOST_THREADS = torch.get_num_threads()
_LOGITS_BYTES = 64 << 20  # most kept in remembered logits
_MOST_LOGITS = 4096
_K_AHEAD = 16
"""Most tokens drafted beside a step, where no number is given: drafting ends with the step."""

MakeModel = Callable[[WorkerConfig, Weights, Tensor], TappedModel]


def build_loop(
    config: WorkerConfig, send: Callable[[LoopReport], None], make_model: MakeModel | None = None
) -> tuple[StepLoop, WorkerReady]:
    """Load the weights, allocate the cache, connect the parts; `make_model` stands in for the
    choice of a kernel.

    A lent drafter that cannot be loaded is left out, as on a GPU, where it would take cache from
    the target.

    :raises ModelLoadError: the weights cannot be used.
    :raises OutOfMemory: weights or cache do not fit, even after shrinking the cache.
    """
    if not config.may_lack_drafter:
        return _build(config, send, make_model)
    if device_of(config).type != "cpu":
        return _build(config.without_drafter(), send, make_model)
    try:
        return _build(config, send, make_model)
    except (ModelLoadError, OutOfMemory, UnsupportedByEngine) as error:
        loop, ready = _build(config.without_drafter(), send, make_model)
        trouble = f"{config.name}: the draft proposes nothing to it ({error})"
        return loop, replace(ready, trouble=" ".join(filter(None, (ready.trouble, trouble))))


class _Models(NamedTuple):
    """The target's model and cache, and what there is of a drafter's."""

    target: Model
    cache: Tensor
    ledger: SlotLedger | None = None  # where other models come into the loop
    drafter: Weights | None = None
    exits: ExitModel | None = None
    trouble: str = ""  # what a user should know of the choice of kernels

    @property
    def slots(self) -> int:
        """Tokens that may be cached."""
        return self.cache.shape[2] - SPARE_SLOTS


def _build(
    config: WorkerConfig, send: Callable[[LoopReport], None], make_model: MakeModel | None
) -> tuple[StepLoop, WorkerReady]:
    device = device_of(config)
    drafter_device(config)  # one that is missing is an error before anything is loaded
    kernels, trouble = shared_kernels(config, device)
    if kernels is None:
        config = replace(config, depth=0)
        models = (
            _staged(config, device, None)
            if config.options.stages > 1
            else _models(config, device, make_model)
        )
    else:
        models = (_staged if config.options.stages > 1 else _shared_models)(config, device, kernels)
    options = config.options
    model = config.model
    limits = SchedulerConfig(
        models.slots,
        options.max_batch,
        options.chunk_tokens,
        model.context_length,
        model.long_after,
        rope_rows(model, models.cache.shape[2]),
    )
    tree = PrefixTree(max(1, min(_MOST_LOGITS, _LOGITS_BYTES // (4 * model.vocabulary))))
    scheduler = Scheduler(limits, tree, models.ledger)
    table = TokenTable(config.pieces, frozenset(model.end_ids))
    is_speculating = options.speculates or (config.proposer is not None and options.k != 0)
    speculation = _speculation(config, models, scheduler, table) if is_speculating else None
    if isinstance(models.target, StagedModel) and speculation is None:
        loop: StepLoop = StagedLoop(models.target, scheduler, table, send)
    else:
        loop = StepLoop(models.target, scheduler, table, send, speculation)
    loop.share_cores = partial(_share_cores, config, models.target)
    return loop, WorkerReady(
        models.slots, models.target.device_name, models.trouble or trouble, kernels is not None
    )


def _shared_models(config: WorkerConfig, device: torch.device, kernels: ctypes.CDLL) -> _Models:
    """A model of a zoo, which others may join."""
    cache = allocate_cache(config, getattr(torch, config.options.dtype), device)
    ledger = SlotLedger(cache.shape[2] - SPARE_SLOTS, config.model.hidden_size)
    return _Models(
        ChainModel(ZooLoader(kernels, cache, _threads(config)), ledger, config), cache, ledger
    )


def _models(config: WorkerConfig, device: torch.device, make_model: MakeModel | None) -> _Models:
    """A model on its own."""
    dtype = getattr(torch, config.options.dtype)
    weights = load_weights(config.folder, config.model, dtype, device, config.name)
    is_here = config.options.beside == "inline" or config.options.speculate not in OVERLAPPED
    drafter = _drafter_weights(config) if is_here else None
    cache = allocate_cache(config, dtype, device)
    inner, trouble = (
        (make_model(config, weights, cache), "") if make_model else _model(config, weights, cache)
    )
    may_hear = _may_learn(config, device) and (config.folder / EXIT_FILE).is_file()
    hears = config.options.speculate == "mirror" or may_hear
    exits = _with_exit(config, inner, weights) if hears else None
    return _Models(exits or inner, cache, None, drafter, exits, trouble)


def _staged(config: WorkerConfig, device: torch.device, kernels: ctypes.CDLL | None) -> _Models:
    """Models of a zoo whose layers are in workers, or one whose layers behind the first are;
    workers load meanwhile.
    """
    options = config.options
    shares = kernels is not None
    dtype = getattr(torch, options.dtype)
    kernel = "native" if shares else options.kernel
    tokens = options.kv_tokens or default_tokens(config, dtype, device)
    options = replace(options, kv_tokens=tokens, threads=_threads(config), kernel=kernel)
    plain = replace(
        config, options=options, pieces=(), drafter=None, proposer=None, shares=shares, depth=0
    )
    line = HeldLine(plain, build_stage, 1 + sum(options.replicas_of_stages))
    try:
        if kernels is not None:
            line.start_here()
            for _ in range(sum(options.replicas_of_stages)):
                line.start("a worker with layers of it")
            cache = allocate_cache(replace(plain, model=plain.model.part(range(0))), dtype, device)
            return _Models(
                StagedModel(ZooLoader(kernels, cache, _threads(config)), line, plain, cache), cache
            )
        first, *others = stage_setups(plain)
        line.add(
            others,
            homes=[[line.start(str(setup)) for _ in range(setup.replicas)] for setup in others],
        )
        cache, model, trouble = _stage(first)
        is_here = options.beside == "inline" or options.speculate not in OVERLAPPED
        drafter = _drafter_weights(config) if is_here else None
        line.load()
        target = StagedModel(
            lambda _: Chain(model, ("", "")), line, plain, cache, HeldLayers(first, model, cache)
        )
        return _Models(target, cache, drafter=drafter, trouble=trouble)
    except BaseException:
        line.close()
        raise


def build_stage(setup: StageSetup) -> HeldLayers:
    """The layers of one stage and their cache, for the thread that runs them.

    :raises EngineError: they cannot be loaded.
    """
    set_threads(setup.config)
    cache, model, _ = _stage(setup)
    if setup.config.shares and isinstance(model, NativeModel):
        return SharedLayers(setup, model, cache)
    return HeldLayers(setup, model, cache)


def _stage(setup: StageSetup) -> tuple[Tensor, NativeModel | TorchModel, str]:
    """Some layers of a model, and its words where these are the first; those of a zoo's models are
    elsewhere.
    """
    config = setup.config
    part = setup.config.model.part(setup.layers)
    alone = not setup.config.shares
    dtype = getattr(torch, config.options.dtype)
    device = device_of(config)
    read = config.folder, config.model, dtype, device, config.name
    weights = load_weights(*read, merges=alone, layers=setup.layers, words=alone)
    own = replace(config, model=part if alone else replace(part, vocabulary=0))
    cache = allocate_cache(own, dtype, device, config.options.kv_tokens)
    return cache, *_model(own, weights, cache)


def _speculation(
    config: WorkerConfig, models: _Models, scheduler: Scheduler, table: TokenTable
) -> Speculation:
    """What proposes to the target, and how much."""
    options = config.options
    device = models.cache.device
    lengths: Lengths = (
        GoodputLengths(MOST_PROPOSED) if options.k is None else FixedLength(options.k)
    )
    if config.proposer:
        proposer = config.proposer()
    elif _may_learn(config, device):
        ahead = _drafter_beside(config, models, scheduler)
        serial = (
            ahead.serial()
            if isinstance(ahead, AheadDrafter)
            else _drafter(config, models, scheduler)
        )
        has_exit = models.exits is not None
        lengths = proposer = SchemeDrafting(
            _proposer("auto", serial), ahead, lengths, _K_AHEAD, has_exit=has_exit
        )
    else:
        make = _drafter_beside if options.speculate in OVERLAPPED else _drafter
        proposer = _proposer(options.speculate or "auto", make(config, models, scheduler))
    is_here = device.type == "cpu" and options.stages == 1 and options.drafter_device in ("", "cpu")
    clock = thread_time if is_here else perf_counter
    return Speculation(
        proposer, lengths, scheduler, clock, vocabulary=config.model.vocabulary, table=table
    )


def _may_learn(config: WorkerConfig, device: torch.device) -> bool:
    """Whether it is left open how a draft model that the target's own words name is used, and there
    are two cores.
    """
    options = config.options
    is_open = config.drafter is not None and not config.may_lack_drafter
    is_open &= options.speculate in (None, "auto") and options.k is None and options.fuzzy == 1
    return is_open and device.type == "cpu" and usable_cores() > 1


def _drafter_weights(config: WorkerConfig) -> Weights | None:
    """The draft model's, loaded before a cache takes what is left of the memory."""
    drafter = config.drafter
    dtype = getattr(torch, config.options.dtype)
    if drafter is None:
        return None
    return load_weights(drafter.folder, drafter.model, dtype, drafter_device(config), drafter.name)


def _drafter_config(config: WorkerConfig, slots: int, *, captures: bool) -> WorkerConfig:
    """The draft model, with a cache of so many slots; for the rest what is said of the target holds
    for it.

    Steps are captured in a stream that threads and devices of a process share: not those of one
    beside its target.
    """
    assert config.drafter is not None, "there is one"
    options = config.options
    is_apart = drafter_device(config).type != device_of(config).type
    own = replace(
        options, kv_tokens=slots, scores="float32", kernel="auto" if is_apart else options.kernel
    )
    drafter = replace(config.drafter, sharers=config.sharers)
    return replace(drafter, options=own if captures else replace(own, graphs="off"))


def _with_exit(config: WorkerConfig, model: TappedModel, weights: Weights) -> ExitModel:
    """The target, which can be heard half-way down its layers.

    :raises UnsupportedByEngine: it has but one.
    """
    if config.model.num_layers < 2:
        problem = "speculate=mirror hears the target between its layers, and it has one"
        raise UnsupportedByEngine(config.name, problem, "Write speculate=ssd")
    adapter = ExitAdapter.read(config.folder, config.model, weights, config.name)
    return ExitModel(model, adapter, config.model.norm_eps)


def _drafter(config: WorkerConfig, models: _Models, scheduler: Scheduler) -> ModelDrafter | None:
    """The draft model, with a cache of as many slots as the target's; None where none is named."""
    if config.drafter is None:
        return None
    options = config.options
    weights = models.drafter
    own = _drafter_config(config, models.slots, captures=not options.drafter_device)
    assert weights is not None, "they were loaded"
    own_cache = allocate_cache(own, models.cache.dtype, drafter_device(config), least=models.slots)
    model = _model(own, weights, own_cache, options.fuzzy)[0]
    if options.fuzzy > 1:
        return FuzzyDrafter(model, own.model, scheduler, config.model.vocabulary)
    return ModelDrafter(model, own.model, scheduler, config.model.vocabulary)


def _drafter_beside(
    config: WorkerConfig, models: _Models, scheduler: Scheduler
) -> AheadDrafter | DrafterProcess:
    """The draft model at work while the target verifies, in a process of its own."""
    exits = models.exits
    slots = models.slots
    (rows, width) = scheduler.table.shape
    if config.options.beside == "process":
        return DrafterProcess(
            DraftSetup(config, slots, rows, width, exits is not None), scheduler, exits
        )
    return ahead_drafter(
        config, scheduler, InlineTransport(), exits, slots=slots, weights=models.drafter
    )


def ahead_drafter(
    config: WorkerConfig,
    rows: DraftedRows,
    transport: InlineTransport,
    exits: Exits | None,
    *,
    slots: int,
    weights: Weights | None = None,
) -> AheadDrafter:
    """The draft model of an engine, to work beside it: with so many slots, and those of branches
    behind them.

    :raises ModelLoadError: the weights, or the heads trained for it, cannot be used.
    :raises OutOfMemory: weights or cache do not fit.
    """
    options = config.options
    is_alone = config.options.beside == "process"
    own = _drafter_config(config, slots + BRANCH_SLOTS, captures=is_alone)
    weights = weights or _drafter_weights(config)
    assert weights is not None, "there is a model to load"
    cache = allocate_cache(
        own, getattr(torch, options.dtype), drafter_device(config), least=slots + BRANCH_SLOTS
    )
    heads = (
        StreamHeads.read(own.folder, own.model, weights, own.name) if exits is not None else None
    )
    return AheadDrafter(
        _model(own, weights, cache)[0],
        own.model,
        rows,
        config.model.vocabulary,
        cache=cache,
        transport=transport,
        guessing=GUESSING.get(options.speculate or "", GUESSING["pearl"]),
        most=_K_AHEAD if options.k is None else options.k,
        exits=exits,
        heads=heads,
    )


def _proposer(way: str, drafter: Proposer | None) -> Proposer:
    """What proposes: looked up where that is cheap and likely, drafted by the model where there is
    one.
    """
    if way in ("draft", *OVERLAPPED) and drafter is not None:
        return drafter
    if way == "suffix":
        return SuffixProposer()
    return BestProposer([HintProposer(), SuffixProposer(), *([drafter] if drafter else [])])


def _model(
    config: WorkerConfig, weights: Weights, cache: Tensor, group: int = 1
) -> tuple[NativeModel | TorchModel, str]:
    """Native kernels where they can be had and are allowed, else torch; and what its user should
    know of that.

    With groups of several attentions it is plain torch on a GPU.
    """
    is_fit = cache.device.type == "cpu" and cache.dtype == torch.float32
    rounds = config.options.scores == "bfloat16"
    is_needed = rounds or config.options.kernel == "native"
    if is_needed and not is_fit:
        raise UnsupportedByEngine(
            config.name,
            "the native kernels compute float32 on a CPU",
            "Write ?kernel=torch behind the engine's name",
        )
    trouble = ""
    if config.options.kernel != "torch" and is_fit:
        try:
            if unknown := unknown_parts(config.model):
                raise UnsupportedByEngine(
                    config.name, f"the native kernels do not know {unknown}", "Use torch"
                )
            library, trouble = native_library(config.name, config.model)
            if rounds and not library.atts_has_pairs():
                problem = "this processor does not multiply bfloat16 numbers"
                raise UnsupportedByEngine(config.name, problem, "Leave scores=bfloat16 out")
        except UnsupportedByEngine as error:
            if is_needed:
                raise
            trouble = f"{error.problem}: torch operations are used, several times slower"
        else:
            threads = _threads(config)
            model = NativeModel(
                library, config.model, weights, cache, threads, group=group, rounds_scores=rounds
            )
            return model, trouble
    if cache.device.type == "cuda" and group == 1:
        with torch.cuda.device(cache.get_device()):
            return cuda_model(config.model, weights, cache, graphs=config.options.graphs)
    return TorchModel(config.model, weights, cache, group=group), trouble


def _threads(config: WorkerConfig) -> int:
    return config.threads(_MOST_THREADS)


def _share_cores(config: WorkerConfig, model: Model, loops: int) -> None:
    """Compute with as many threads as are left to one of so many loops."""
    shared = replace(config, sharers=loops)
    set_threads(shared)
    model.use_threads(_threads(shared))


def set_threads(config: WorkerConfig) -> None:
    """Fix how many threads a step uses; called in the loop's own thread, for OpenMP counts per
    calling thread.
    """
    torch.set_num_threads(_threads(config))
