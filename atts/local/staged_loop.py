"""The step loop of a model in stages: several steps are under way at once, each of other sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter

from torch import Tensor

from atts.local.batch import StepPlan, step_batch
from atts.local.loop import StepLoop
from atts.local.messages import Cancel, Command, Inbox, LoopReport
from atts.local.scheduler import Scheduler
from atts.local.sequence import TokenTable
from atts.local.stage_line import Flight
from atts.local.staged_models import StagedChains, StagedModel


class StagedLoop(StepLoop):
    """Begins steps before earlier ones have ended; what changes a sequence that is under way waits for its step."""

    def __init__(
        self,
        model: StagedModel | StagedChains,
        scheduler: Scheduler,
        token_table: TokenTable,
        send: Callable[[LoopReport], None],
    ) -> None:
        super().__init__(model, scheduler, token_table, send)
        self._staged = model
        self._under_way = deque[tuple[StepPlan, Flight | None]]()  # the oldest first
        self._ending: Flight | None = None

    def run(self, inbox: Inbox) -> None:
        """As any loop; its model's workers end with it."""
        try:
            super().run(inbox)
        finally:
            self._staged.close()

    def step(self) -> None:
        """Begin a step; end the one that has been longest under way, where there are as many as can be."""
        began, most = perf_counter(), self._staged.most_steps
        plan = self._scheduler.plan(most)
        self._count(plan, began)
        if plan.size:
            for sequence in plan.sequences():
                sequence.is_under_way = True
            is_fed, table = plan.decoding or plan.prefills, self._scheduler.table
            self._under_way.append((plan, self._staged.begin(step_batch(plan, table), table) if is_fed else None))
        if len(self._under_way) == most or not plan.size:
            self._end_one()
        self._stats.busy_seconds += perf_counter() - began

    def _end_one(self) -> None:
        if self._under_way:
            plan, self._ending = self._under_way.popleft()
            for sequence in plan.sequences():
                sequence.is_under_way = False
            self._attempt(plan)

    def _hidden(self, plan: StepPlan) -> Tensor:
        flight, self._ending = self._ending, None
        return super()._hidden(plan) if flight is None else self._staged.end(flight)

    def _handle(self, commands: Iterable[Command]) -> None:
        for command in commands:
            while isinstance(command, Cancel) and self._scheduler.is_under_way(command.request_id):
                self._end_one()
            super()._handle([command])

    def _shrink(self) -> None:
        while self._under_way:
            self._end_one()
        super()._shrink()
