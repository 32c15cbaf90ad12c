"""Models whose layers are computed by workers, and a step loop that has several steps in progress
at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from atts.accel.options import StageOptions
from atts.accel.zoo.many_models import (
    Chain,
    ManyModels,
    ManyModelsLoop,
    OnSplit,
    RangedModel,
    half_names,
)
from atts.accel.zoo.stage_line import InFlightStep, StageExecutor
from atts.accel.zoo.stages import StageModel, StageSetup
from atts.errors import EngineError
from atts.local.batch import Sequence, StepBatch, StepPlan, TokenTable, step_batch
from atts.local.cache import PrefixTree, SlotIds
from atts.local.loader import load_ropes
from atts.local.messages import Cancel, Command, Inbox, LoopReport, WorkerConfig
from atts.local.model_config import read_model_config
from atts.local.scheduler import Scheduler, SchedulerConfig


class StagedModel(ManyModels[RangedModel]):
    """A model whose layers are divided into stages, or several models of a zoo that share ranges of
    layers.

    A single model's first stage is in this process. If there are several models, only their
    embeddings and heads are in this process. Models do not share cached prompts.
    """

    def __init__(
        self,
        load: Callable[[WorkerConfig], Chain[RangedModel]],
        line: StageExecutor,
        config: WorkerConfig,
        cache: Tensor,
        first: StageModel | None = None,
        *,
        options: StageOptions,
        is_shared: bool = False,
    ) -> None:
        """Create a model whose ranges of layers are in the workers of `line`.

        `cache` is the KV cache of the `first` stage. If there is no such stage, it is a cache
        without layers. Returned hidden states have the cache's data type and device.
        """
        self._line = line
        self.cache = cache
        self._first = first
        self.close = line.close
        self._stages = options
        self._is_shared = is_shared
        self.most_steps = options.stage_steps or options.stages
        self._ends = _ends(config, options.stages) if is_shared else []
        super().__init__(load, config)

    def _relate(self, number: int, chain: Chain[RangedModel], divide: OnSplit) -> None:
        """Add the layer ranges of a model that shares them, and wait until workers have loaded all
        of them.
        """
        config = self._configs[number]
        options = self._configs[0].options
        if self._is_shared:
            part_config = replace(config, options=options, pieces=(), builder=None)
            copies = min(self._stages.replicas)
            setups = list[StageSetup]()
            for start, stop in pairwise(self._ends):
                name = f"{start} {' '.join(chain.units[1 + 2 * start : 1 + 2 * stop])}"
                setups.append(
                    StageSetup(
                        part_config, range(start, stop), copies, name, number, is_shared=True
                    )
                )
            self._line.add(setups, number)
            self._line.load(number)

    @property
    def device_name(self) -> str:
        """Return a description of the device, with the number of stages or worker processes."""
        name = self._model.device_name
        if self._is_shared:
            return f"{name}, shared blocks in {len(self._line.nodes)} processes"
        options = self._stages
        replicas = f" with {options.stage_replicas} replicas" * (options.stage_replicas != "1")
        return f"{name}, {options.stages} stages{replicas}"

    def begin(self, batch: StepBatch, table: SlotIds) -> InFlightStep:
        """Begin a step without waiting for its results.

        An error in this process is raised when the step ends.

        :raises EngineUnavailable: no worker is left for a range.
        """
        flight = InFlightStep.of(batch, table, self._configs[0].model.hidden_size)
        try:
            if self._first is not None:
                flight.rows = self._first.run(batch, table, flight.rows)
            else:
                self._embed(flight)
        except Exception as error:  # noqa: BLE001  raised where the step ends
            flight.error = error
        else:
            self._line.begin(flight)
        return flight

    def _embed(self, flight: InFlightStep) -> None:
        """Write the embedding of each token of a step into the token's row. Each model has its own
        embedding.
        """
        batch = flight.batch
        owners = self._alike(0)[flight.chains].repeat(np.diff(batch.query_starts))
        for chain in np.unique(owners):
            own = np.empty_like(flight.rows)
            self._chains[chain].model.through(batch, flight.table, (own, own), (0, 1))
            np.copyto(flight.rows, own, where=(owners == chain)[:, None])

    def end(self, flight: InFlightStep) -> Tensor:
        """Wait for a step that `begin` began, and return the final hidden states of its
        `logit_rows`.
        """
        hidden = self._line.end(flight)
        batch = flight.batch
        if self._first is not None:
            return torch.from_numpy(hidden).to(self.cache)
        owners = flight.chains.repeat(np.diff(batch.query_starts))[batch.logit_rows]
        heads = self._heads[owners]
        for chain in np.unique(heads):
            own = hidden[heads == chain]
            self._chains[chain].model.through(batch, flight.table, (own, own), (1, 2))
            hidden[heads == chain] = own
        return self._owned(hidden, owners)

    def forward(self, batch: StepBatch, table: SlotIds) -> Tensor:
        """Return the final, normed hidden states of the batch's `logit_rows`."""
        return self.end(self.begin(batch, table))


def _ends(config: WorkerConfig, stages: int) -> list[int]:
    """Return the indices of the layers at which ranges of layers begin or end.

    The ranges have about the same size. A range also ends at each layer where models of the zoo
    begin or stop sharing blocks.
    """
    layers = config.model.num_layers
    stages = min(stages, config.model.num_layers)
    names = list[list[str]]()
    for folder in sorted(config.folder.parent.glob("[!.]*")):
        try:
            model = read_model_config(folder, config.name)
            halves = half_names(folder, model, load_ropes(folder, model, config.name))
        except EngineError:
            # Skip a model that cannot be read. It cannot share layers with the models of this loop.
            continue
        names += [halves] * (model.num_layers == layers)
    # for each half of a layer (attention or feed-forward) and each model: the index of the first
    # model with an equal half
    alike = [[[*own].index(name) for name in own] for own in zip(*names, strict=True)]
    partings = {
        at for at in range(1, layers) if alike[2 * at : 2 * at + 2] != alike[2 * at - 2 : 2 * at]
    }
    return sorted({0, layers, *(round(layers * at / stages) for at in range(1, stages)), *partings})


class StagedScheduler(Scheduler):
    """A scheduler that leaves a sequence unchanged while a step with it is in progress."""

    def __init__(self, config: SchedulerConfig, tree: PrefixTree, most_steps: int) -> None:
        """Create a scheduler for a loop with at most `most_steps` steps in progress at the same
        time.

        Each step gets about the same number of the running sequences.
        """
        super().__init__(config, tree)
        self._most_steps = most_steps
        self.under_way = set[Sequence]()

    def is_under_way(self, request_id: int) -> bool:
        """Return whether a step with this request is in progress."""
        return self.is_unfinished(request_id) and self.sequence(request_id) in self.under_way

    def _candidates(self) -> list[Sequence]:
        running = super()._candidates()
        if self._most_steps == 1:
            return running
        share = -(-len(running) // self._most_steps)
        return [each for each in running if each not in self.under_way][:share]

    def _may_give_way(self, sequence: Sequence) -> bool:
        return sequence not in self.under_way


class StagedLoop(ManyModelsLoop):
    """A step loop that begins a step before earlier steps have ended. While a step is in progress,
    its sequences do not change.
    """

    def __init__(
        self,
        model: StagedModel,
        scheduler: StagedScheduler,
        token_table: TokenTable,
        send: Callable[[LoopReport], None],
    ) -> None:
        super().__init__(model, scheduler, token_table, send)
        self._staged = model
        self._steps = scheduler
        # plans and states of the steps in progress, the oldest first
        self._under_way = deque[tuple[StepPlan, InFlightStep | None]]()
        self._ending: InFlightStep | None = None

    def run(self, inbox: Inbox) -> None:
        """Run the loop until it ends, then end the model's workers."""
        try:
            super().run(inbox)
        finally:
            self._staged.close()

    def step(self) -> None:
        """Begin a step without waiting for its results.

        If no further step may be in progress, or if there was nothing to begin, end the oldest
        step.
        """
        began = perf_counter()
        most = self._staged.most_steps
        plan = self._scheduler.schedule()
        self._count(plan, began)
        if plan.size:
            self._steps.under_way.update(plan.sequences())
            is_fed = plan.decoding or plan.prefills
            table = self._scheduler.table
            self._under_way.append(
                (plan, self._staged.begin(step_batch(plan, table), table) if is_fed else None)
            )
        if len(self._under_way) == most or not plan.size:
            self._end_one()
        self._stats.busy_seconds += perf_counter() - began

    def _end_one(self) -> None:
        if self._under_way:
            plan, self._ending = self._under_way.popleft()
            self._steps.under_way.difference_update(plan.sequences())
            self._attempt(plan)

    def _forward(self, plan: StepPlan) -> Tensor:
        flight = self._ending
        self._ending = None
        return super()._forward(plan) if flight is None else self._staged.end(flight)

    def _handle(self, commands: Iterable[Command]) -> None:
        for command in commands:
            while isinstance(command, Cancel) and self._steps.is_under_way(command.request_id):
                self._end_one()
            super()._handle([command])

    def _shrink(self) -> None:
        while self._under_way:
            self._end_one()
        super()._shrink()
