"""Functions that build an accelerated decoding loop from a plan: target, drafter and cache
slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atts.accel.options import MOST_PROPOSED, OVERLAPPED, LoopPlan
from atts.accel.overlap.drafter import BRANCH_SLOTS, InlineTransport, OverlappedDrafter
from atts.accel.overlap.mirror import EXIT_FILE, ExitAdapter, ExitModel, Exits, StreamHeads
from atts.accel.overlap.process import DrafterProcess, DraftSetup
from atts.accel.overlap.schemes import GUESSING, AdaptiveDrafting
from atts.accel.speculate.drafter import DraftedRows, DraftedSlots, GroupedDrafter, ModelDrafter
from atts.accel.speculate.goodput import GoodputLengths
from atts.accel.speculate.proposers import BestProposer, HintProposer, SuffixProposer
from atts.accel.zoo.many_models import (
    Chain,
    ChainModel,
    SharedLoop,
    SharingScheduler,
    SlotLedger,
    ZooLoader,
    shared_kernels,
)
from atts.accel.zoo.stage_line import StageExecutor
from atts.accel.zoo.staged_loop import StagedLoop, StagedModel, StagedScheduler
from atts.accel.zoo.stages import SharedLayers, StageModel, StageSetup, stage_setups
from atts.concurrency import usable_cores
from atts.errors import ModelLoadError, OutOfMemory, UnsupportedByEngine
from atts.local.builder import (
    MakeModel,
    Send,
    choose_model,
    packs_weights,
    prefix_tree,
    scheduler_config,
    set_threads,
    share_cores,
    threads_of,
    token_table,
    whole_model,
    whole_weights,
)
from atts.local.cpu.model import NativeModel
from atts.local.devices import (
    SPARE_SLOTS,
    allocate_cache,
    check_room,
    default_tokens,
    device_of,
    dtype_of,
    on_device,
)
from atts.local.loader import Weights, load_weights, with_groups
from atts.local.loop import StepLoop
from atts.local.messages import WorkerConfig, WorkerReady
from atts.local.model import TorchModel
from atts.local.proposals import Proposals
from atts.local.scheduler import Scheduler
from atts.local.seams import FixedLength, HookedModel, Lengths, Model, Proposer

_K_AHEAD = 16
"""Largest number of tokens that an overlapped drafter drafts for each guessed outcome of a
verification, if the option `k` is not set.
"""


def build_accelerated(
    plan: LoopPlan, config: WorkerConfig, send: Send, make_model: MakeModel | None = None
) -> tuple[StepLoop, WorkerReady]:
    """Build the step loop of a plan: load the models that it names, and connect them.

    If `make_model` is given, it makes the target, and atts chooses no kernel for it. If the draft
    model is lent (the run has it, but the engine's options do not name it), it may be dropped. It
    is dropped if it cannot be loaded. On a GPU it is always dropped, because it would take memory
    from the target's KV cache.

    :raises ModelLoadError: the weights cannot be used.
    :raises OutOfMemory: weights or cache do not fit, even after shrinking the cache.
    """
    config = on_device(config)
    if not plan.may_lack_drafter:
        return _build(plan, config, send, make_model)
    alone = plan.without_drafter(), replace(config, more_kv_floats=0)
    if device_of(config).type != "cpu":
        return _build(*alone, send, make_model)
    try:
        return _build(plan, config, send, make_model)
    except (ModelLoadError, OutOfMemory, UnsupportedByEngine) as error:
        loop, ready = _build(*alone, send, make_model)
        trouble = f"{config.name}: the draft cannot propose tokens for this model ({error})"
        return loop, replace(ready, trouble=" ".join(filter(None, (ready.trouble, trouble))))


class _Target(NamedTuple):
    """A loaded target with its KV cache, its early exit if it has one, and the weights of the draft
    model.
    """

    model: Model
    cache: Tensor
    drafter: Weights | None = None
    exits: ExitModel | None = None
    # warning for the user, for example that slow kernels are used; empty if there is none
    trouble: str = ""

    @property
    def slots(self) -> int:
        """Return how many tokens fit into the target's KV cache."""
        return self.cache.shape[2] - SPARE_SLOTS


def _build(
    plan: LoopPlan, config: WorkerConfig, send: Send, make_model: MakeModel | None
) -> tuple[StepLoop, WorkerReady]:
    device = device_of(config)
    check_room(config, device)
    if plan.drafter is not None:
        # Call this only for its error: if the drafter's device is missing, fail before any model is
        # loaded.
        _drafter_device(plan, config)
    kernels: Any = None
    trouble = ""
    if plan.is_shared:
        kernels, trouble = shared_kernels(config, device)
    if kernels is not None and plan.stages.stages == 1:
        loop, target = _shared_loop(plan, config, kernels, send)
    elif plan.stages.stages > 1:
        loop, target = _staged_loop(plan, config, kernels, send)
    else:
        target = _alone(plan, config, device, make_model)
        loop = _speculating_loop(plan, config, target, send)
    loop.share_cores = partial(share_cores, config, target.model)
    takes_models = kernels is not None
    trouble = target.trouble or trouble
    name = target.model.device_name
    dtype = config.options.dtype
    return loop, WorkerReady(target.slots, name, trouble, takes_models, dtype)


def _speculating_loop(
    plan: LoopPlan, config: WorkerConfig, target: _Target, send: Send
) -> StepLoop:
    """Build the step loop of a target, with the token proposer that the plan names, such as a draft
    model.
    """
    slots = DraftedSlots(target.slots)
    scheduler = Scheduler(scheduler_config(config, target.slots), prefix_tree(config), slots)
    table = token_table(config)
    if not plan.speculates:
        return StepLoop(target.model, scheduler, table, send)
    rows = DraftedRows(scheduler.table, slots, scheduler.sequence)
    proposer, lengths = _proposer_and_lengths(plan, config, target, rows)
    is_here = target.cache.device.type == "cpu" and plan.stages.stages == 1
    is_here &= plan.speculation.drafter_device in ("", "cpu")
    proposals = Proposals(
        scheduler,
        proposer,
        lengths,
        vocabulary=config.model.vocabulary,
        table=table,
        # If target and drafter both use the CPU, measure this thread's CPU time. It excludes the
        # time in which other processes use the core.
        clock=thread_time if is_here else perf_counter,
    )
    return StepLoop(target.model, scheduler, table, send, proposals)


def _shared_loop(
    plan: LoopPlan, config: WorkerConfig, kernels: Any, send: Send
) -> tuple[StepLoop, _Target]:
    """Build a step loop for a model of a zoo. Other models of the zoo may join the loop later."""
    dtype = dtype_of(config)
    # Every model that joins the loop stores its keys and values in this cache. So the cache has as
    # many layers as the deepest model.
    depth = max(plan.depth, config.model.num_layers)
    deepest = replace(config, model=replace(config.model, num_layers=depth))
    cache = allocate_cache(deepest, dtype, device_of(config))
    slots = cache.shape[2] - SPARE_SLOTS
    ledger = SlotLedger(slots, config.model.hidden_size)
    load = ZooLoader(kernels, cache, threads_of(config))
    model = ChainModel(load, ledger, config, plan.stages.block_rows)
    scheduler = SharingScheduler(scheduler_config(config, slots), prefix_tree(config), ledger)
    loop = SharedLoop(model, scheduler, token_table(config), send)
    return loop, _Target(model, cache)


def _staged_loop(
    plan: LoopPlan, config: WorkerConfig, kernels: Any, send: Send
) -> tuple[StepLoop, _Target]:
    """Build the step loop of a model whose layers are computed by workers."""
    target, model = _staged(plan, config, kernels)
    if plan.speculates:
        return _speculating_loop(plan, config, target, send), target
    limits = scheduler_config(config, target.slots)
    scheduler = StagedScheduler(limits, prefix_tree(config), model.most_steps)
    return StagedLoop(model, scheduler, token_table(config), send), target


def _alone(
    plan: LoopPlan, config: WorkerConfig, device: torch.device, make_model: MakeModel | None
) -> _Target:
    """Load a target whose layers are all in this process, and the weights of its draft model.

    Add an early exit to the target if a drafter uses one.
    """
    weights = whole_weights(config, make_model)
    drafter = _drafter_here(plan, config)
    cache = allocate_cache(config, dtype_of(config), device)
    model, trouble = whole_model(config, weights, cache, make_model)
    may_hear = _may_learn(plan, device) and (config.folder / EXIT_FILE).is_file()
    if plan.speculation.speculate == "mirror" or may_hear:
        exits = _with_exit(config, model, weights)
        return _Target(exits, cache, drafter, exits, trouble)
    return _Target(model, cache, drafter, None, trouble)


def _drafter_here(plan: LoopPlan, config: WorkerConfig) -> Weights | None:
    """Load the draft model's weights.

    Return None if the plan names no draft model, or if another process runs it.
    """
    is_elsewhere = plan.speculation.is_overlapped and plan.speculation.beside == "process"
    return None if is_elsewhere else _drafter_weights(plan, config)


def _with_exit(config: WorkerConfig, model: HookedModel, weights: Weights) -> ExitModel:
    """Add an early exit to the target: the trained one in its folder, or an untrained one after
    half of the layers.

    :raises UnsupportedByEngine: the target has only one layer.
    """
    if config.model.num_layers < 2:
        problem = (
            "speculate=mirror needs an early exit between two layers, but the target has only "
            "one layer"
        )
        raise UnsupportedByEngine(config.name, problem, "Use speculate=ssd instead")
    adapter = ExitAdapter.read(config.folder, config.model, weights, config.name)
    return ExitModel(model, adapter, config.model.norm_eps)


def _staged(plan: LoopPlan, config: WorkerConfig, kernels: Any) -> tuple[_Target, StagedModel]:
    """Start workers that load ranges of the model's layers, all at the same time.

    If models of a zoo share the workers, the workers load all ranges. Otherwise, this process loads
    the first range.
    """
    is_shared = kernels is not None
    device = device_of(config)
    stages = plan.stages
    dtype = dtype_of(config)
    kernel = "native" if is_shared else config.options.kernel
    tokens = config.options.kv_tokens or default_tokens(config, dtype, device)
    options = replace(config.options, kv_tokens=tokens, threads=threads_of(config), kernel=kernel)
    plain = replace(config, options=options, pieces=(), builder=None)
    line = StageExecutor(
        plain,
        build_stage,
        1 + sum(stages.replicas),
        worker=stages.stage_worker,
        is_shared=is_shared,
    )
    try:
        if is_shared:
            line.start_here()
            for _ in range(sum(stages.replicas)):
                line.start("a worker for shared layers")
            no_layers = replace(plain, model=plain.model.part(range(0)))
            cache = allocate_cache(no_layers, dtype, device)
            load = ZooLoader(kernels, cache, threads_of(config))
            shared = StagedModel(load, line, plain, cache, options=stages, is_shared=True)
            return _Target(shared, cache), shared
        first, *others = stage_setups(plain, stages)
        homes = [[line.start(str(setup)) for _ in range(setup.replicas)] for setup in others]
        line.add(others, homes=homes)
        cache, model, trouble = _stage(first)
        drafter = _drafter_here(plan, config)
        line.load()
        here = StageModel(first, model, cache)
        target = StagedModel(
            lambda _: Chain(model, ("", "")), line, plain, cache, here, options=stages
        )
        return _Target(target, cache, drafter, trouble=trouble), target
    except BaseException:
        line.close()
        raise


def build_stage(setup: StageSetup) -> StageModel:
    """Load the layers of one stage and allocate their cache, in the thread that will compute them.

    :raises EngineError: the layers cannot be loaded.
    """
    set_threads(setup.config)
    cache, model, _ = _stage(setup)
    if setup.is_shared and isinstance(model, NativeModel):
        return SharedLayers(setup, model, cache)
    return StageModel(setup, model, cache)


def _stage(setup: StageSetup) -> tuple[Tensor, NativeModel | TorchModel, str]:
    """Load the layers of one stage, and allocate their KV cache.

    If the stage is not shared by models of a zoo, the first stage also loads the embedding and the
    head.
    """
    config = setup.config
    part = setup.config.model.part(setup.layers)
    alone = not setup.is_shared
    dtype = dtype_of(config)
    device = device_of(config)
    read = config.folder, config.model, dtype, device, config.name
    weights = load_weights(*read, merges=alone, layers=setup.layers, words=alone)
    part_config = replace(config, model=part if alone else replace(part, vocabulary=0))
    cache = allocate_cache(part_config, dtype, device, config.options.kv_tokens)
    return cache, *choose_model(part_config, weights, cache)


def _proposer_and_lengths(
    plan: LoopPlan, config: WorkerConfig, target: _Target, rows: DraftedRows
) -> tuple[Proposer, Lengths]:
    """Make the proposer of tokens, and the rule that chooses how many tokens to propose."""
    speculation = plan.speculation
    lengths: Lengths = (
        GoodputLengths(MOST_PROPOSED) if speculation.k is None else FixedLength(speculation.k)
    )
    if plan.proposer is not None:
        return plan.proposer(), lengths
    if plan.drafter is not None and _may_learn(plan, target.cache.device):
        ahead = _overlapped(plan, config, target, rows)
        if isinstance(ahead, OverlappedDrafter):
            serial: ModelDrafter | None = ahead.serial()
        else:
            serial = _drafter(plan, config, target, rows)
        has_exit = target.exits is not None
        adaptive = AdaptiveDrafting(
            _proposer("auto", serial), ahead, lengths, _K_AHEAD, has_exit=has_exit
        )
        return adaptive, adaptive
    make: Callable[..., Proposer | None] = _overlapped if speculation.is_overlapped else _drafter
    return _proposer(speculation.way, make(plan, config, target, rows)), lengths


def _may_learn(plan: LoopPlan, device: torch.device) -> bool:
    """Return whether the engine may choose from measurements how it uses the drafter.

    The options must name a drafter, but not how to use it. The target must run on a CPU, and atts
    must be able to use at least two cores.
    """
    is_open = plan.drafter is not None and not plan.may_lack_drafter
    return is_open and plan.speculation.is_open and device.type == "cpu" and usable_cores() > 1


def _drafter_device(plan: LoopPlan, config: WorkerConfig) -> torch.device:
    """Return the device that computes the draft model.

    :raises ModelLoadError: this machine does not have the device.
    """
    return device_of(config, plan.speculation.drafter_device, "drafter_device")


def _drafter_weights(plan: LoopPlan, config: WorkerConfig) -> Weights | None:
    """Load the draft model's weights. Call this before a KV cache takes the remaining memory.

    Return None if the plan names no draft model.
    """
    drafter = plan.drafter
    if drafter is None:
        return None
    dtype = dtype_of(config)
    device = _drafter_device(plan, config)
    weights = load_weights(
        drafter.folder,
        drafter.model,
        dtype,
        device,
        drafter.name,
        on_demand=device.type == "cpu" and packs_weights(config),
    )
    group = plan.speculation.fuzzy
    if group > 1 and weights.is_paired:
        # The joined attention weights of layer groups are copies, which need memory. So make them
        # before the size of the KV cache is computed.
        return with_groups(drafter.model, weights, group)
    return weights


def _drafter_config(plan: LoopPlan, config: WorkerConfig, slots: int) -> WorkerConfig:
    """Return the draft model's configuration. It has a KV cache of `slots` slots, and most options
    have the same values as for the target.
    """
    assert plan.drafter is not None, "the plan must name a draft model"
    is_apart = _drafter_device(plan, config).type != device_of(config).type
    kernel = "auto" if is_apart else config.options.kernel
    options = replace(config.options, kv_tokens=slots, scores="float32", kernel=kernel)
    return replace(plan.drafter, options=options, sharers=config.sharers, parts=config.parts)


def _drafter(
    plan: LoopPlan, config: WorkerConfig, target: _Target, rows: DraftedRows
) -> ModelDrafter | None:
    """Build a drafter that drafts before each step, with as many cache slots as the target has.

    Return None if the plan names no draft model.
    """
    if plan.drafter is None:
        return None
    assert target.drafter is not None, "the drafter's weights must be loaded"
    drafter_config = _drafter_config(plan, config, target.slots)
    if plan.speculation.drafter_device:
        # If `drafter_device` is set, turn CUDA graphs off. Steps that are captured in graphs
        # use one CUDA stream that all devices of a process share.
        drafter_config = replace(
            drafter_config, options=replace(drafter_config.options, graphs="off")
        )
    device = _drafter_device(plan, config)
    cache = allocate_cache(drafter_config, target.cache.dtype, device, least=target.slots)
    group = plan.speculation.fuzzy
    model = choose_model(drafter_config, target.drafter, cache, group)[0]
    vocabulary = config.model.vocabulary
    if group > 1:
        return GroupedDrafter(model, drafter_config.model, rows, vocabulary)
    return ModelDrafter(model, drafter_config.model, rows, vocabulary)


def _overlapped(
    plan: LoopPlan, config: WorkerConfig, target: _Target, rows: DraftedRows
) -> OverlappedDrafter | DrafterProcess:
    """Build the drafter that drafts while the target verifies.

    It works in another process or, if the options say so, in this one.
    """
    exits = target.exits
    if plan.speculation.beside == "process":
        height, width = rows.table.shape
        setup = DraftSetup(plan, config, target.slots, height, width, exits is not None)
        return DrafterProcess(setup, rows.sequence, exits)
    return overlapped_drafter(
        plan, config, rows, InlineTransport(), exits, slots=target.slots, weights=target.drafter
    )


def overlapped_drafter(
    plan: LoopPlan,
    config: WorkerConfig,
    rows: DraftedRows,
    transport: InlineTransport,
    exits: Exits | None,
    *,
    slots: int,
    weights: Weights | None = None,
) -> OverlappedDrafter:
    """Build a drafter that drafts while its target computes.

    The first `slots` slots of its KV cache are for sequences, and the slots after them are for
    branches.

    :raises ModelLoadError: the drafter's weights or its trained heads cannot be used.
    :raises OutOfMemory: weights or cache do not fit.
    """
    speculation = plan.speculation
    own = _drafter_config(plan, config, slots + BRANCH_SLOTS)
    if speculation.beside == "inline":
        own = replace(own, options=replace(own.options, graphs="off"))
    weights = weights or _drafter_weights(plan, config)
    assert weights is not None, "the plan must name a draft model"
    dtype = dtype_of(config)
    device = _drafter_device(plan, config)
    cache = allocate_cache(own, dtype, device, least=slots + BRANCH_SLOTS)
    heads = None
    if exits is not None:
        heads = StreamHeads.read(own.folder, own.model, weights, own.name)
    return OverlappedDrafter(
        choose_model(own, weights, cache)[0],
        own.model,
        rows,
        config.model.vocabulary,
        cache=cache,
        transport=transport,
        guessing=GUESSING.get(speculation.speculate or "", GUESSING["pearl"]),
        most=_K_AHEAD if speculation.k is None else speculation.k,
        exits=exits,
        heads=heads,
    )


def _proposer(way: str, drafter: Proposer | None) -> Proposer:
    """Return the proposer for `way`, a value of the option `speculate`.

    For `auto`, the proposer first looks tokens up in known texts, and then asks the draft model if
    there is one.
    """
    if way in ("draft", *OVERLAPPED) and drafter is not None:
        return drafter
    if way == "suffix":
        return SuffixProposer()
    return BestProposer([HintProposer(), SuffixProposer(), *([drafter] if drafter else [])])
