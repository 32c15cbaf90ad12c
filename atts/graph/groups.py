"""The rollouts of one problem that were asked for together: started, settled, cancelled and
gathered as one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

import anyio

from atts.concurrency import TaskGroup
from atts.core import HOLD, RELEASE, CallSpan, RolloutSpan, RolloutStatus
from atts.errors import OptionError
from atts.graph.admission import Run
from atts.graph.calls import Caller

T = TypeVar("T")
V = TypeVar("V")
Admit = Literal["each", "together"]


@dataclass(frozen=True, slots=True)
class RolloutResult(Generic[T]):
    """What came of one rollout.

    `value` is what its function returned, or what it had saved last when it failed or was
    cancelled.
    """

    sample: int
    status: RolloutStatus
    value: T | None = None
    error: Exception | None = None
    why: str = ""


class RolloutScope(Caller, Generic[T]):
    """What a rollout's function is given: its name in the run, and the way to the engines."""

    __slots__ = ("_group", "attempt", "saved", "waited")

    def __init__(self, group: Group[T], sample: int) -> None:
        super().__init__(group.run.state, group.problem, sample, group.frontier)
        self._group = group
        self.attempt = 0
        # survives an attempt that failed: the next one may go on from it
        self.saved: T | None = None
        self.waited = 0.0  # seconds

    def save(self, value: T) -> None:
        """Leave what there is so far, for the result of a rollout that will not come to its end."""
        self.saved = value

    async def meet(self, value: V) -> Mapping[int, V]:
        """Wait until every sibling still running has met too; the values of this round, by sample.

        This is a barrier, for rollouts admitted "together" only. The next node waits for all nodes
        of the round.

        :raises OptionError: the rollouts are not admitted together.
        """
        if self._group.admit != "together":
            raise OptionError(
                "admit",
                "rollouts admitted one by one must not wait for each other; admit them together",
            )
        since = self._state.now()
        current = self._group.round
        current.values[self.sample] = value
        current.nodes.extend(self.frontier)
        try:
            if not self._group.close_round():
                await current.closed.wait()
        finally:
            self.waited += self._state.now() - since
        self.frontier = current.frontier
        self._ready = since
        return current.values

    async def wait(self, event: anyio.Event, turn: int) -> None:
        """Wait for what a sibling is about to know; a node of its own."""
        since = self._state.now()
        try:
            await event.wait()
        finally:
            until = self._state.now()
            self.waited += until - since
            self._note_wait(HOLD, turn, since, until, self.frontier)

    def note_release(self, ended: float, released: float, after: tuple[int, ...]) -> None:
        """Tell how long this finished rollout kept its place for its siblings."""
        self._note_wait(RELEASE, -1, ended if self._ready is None else self._ready, released, after)

    def _note_wait(
        self, stage: str, turn: int, since: float, until: float, after: tuple[int, ...]
    ) -> None:
        """Tell, as a node without compute, of a wait for siblings."""
        state = self._state
        state.last_id = node = state.last_id + 1
        who = (node, stage, "", self.problem, self.sample, turn)
        times = (since, until, until, until)
        state.emit(CallSpan(*who, *times, after, self.attempt))


@dataclass(slots=True)
class Round:
    """One meeting; once it is closed `values` are complete and `frontier` holds every node it
    waited for.
    """

    opened_with: tuple[int, ...]
    values: dict[int, Any] = field(default_factory=dict[int, Any])
    nodes: list[int] = field(default_factory=list[int])
    frontier: tuple[int, ...] = ()
    closed: anyio.Event = field(default_factory=anyio.Event)


@dataclass(slots=True, eq=False)
class Group(Generic[T]):
    """A gang of rollouts; their starter waits for `done` inside `tasks`."""

    run: Run
    problem: str
    frontier: tuple[int, ...]  # of the problem, when it asked for them
    function: Callable[[RolloutScope[T]], Awaitable[T]]
    samples: range
    admit: Admit
    settle: Callable[[RolloutResult[T]], bool] | None
    why: str = field(init=False)  # not empty: nothing more is started
    queued: float = field(init=False)
    tasks: TaskGroup | None = None
    results: dict[int, RolloutResult[T]] = field(default_factory=dict[int, RolloutResult[Any]])
    last_nodes: list[int] = field(default_factory=list[int])
    done: anyio.Event = field(default_factory=anyio.Event)
    round: Round = field(init=False)
    _context: Context = field(default_factory=copy_context)
    _next: int = 0
    _ended: list[tuple[RolloutScope[T], RolloutSpan]] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        self.why, self.queued = self.run.stopped, self.run.state.now()
        self.round = Round(self.frontier)

    @property
    def unit(self) -> int:
        """All places at once when admitted together, else one."""
        return len(self.samples) if self.admit == "together" else 1

    @property
    def unstarted(self) -> int:
        """Rollouts not yet started; none once closed."""
        return 0 if self.why else len(self.samples) - self._next

    def start(self) -> None:
        """Start one rollout, or all when admitted together."""
        assert self.tasks is not None, "submitted outside its task group"
        for _ in range(self.unit):
            sample = self.samples[self._next]
            self._next += 1
            # the place may have been given back by another problem, whose context variables are not
            # ours
            self._context.run(self.tasks.start_soon, self._rollout, sample)

    def close(self, why: str) -> None:
        """Start nothing more and cancel what runs; the first reason stays."""
        if not self.why:
            self.why = why
            if self.tasks is not None:
                self.tasks.cancel_scope.cancel()

    def is_cut_short(self) -> bool:
        """Whether a rollout has not ended, or was cancelled."""
        ended = self.results.values()
        return len(ended) < len(self.samples) or any(
            result.status == "cancelled" for result in ended
        )

    def gathered(self) -> list[RolloutResult[T]]:
        """Every result in the order of the samples, those that never started included."""
        status = self._interruption()
        found = [
            self.results.get(sample) or RolloutResult(sample, status) for sample in self.samples
        ]
        return [
            replace(r, why=self.why) if r.status in ("settled", "cancelled") else r for r in found
        ]

    def _interruption(self) -> RolloutStatus:
        return "settled" if self.why == "settled" else "cancelled"

    async def _rollout(self, sample: int) -> None:
        started = self.run.state.now()
        scope = RolloutScope(self, sample)
        status: RolloutStatus = "cancelled"
        value: T | None = None
        error: Exception | None = None
        try:
            value = await self._attempts(scope)
            status = "done"
        except Exception as failure:  # noqa: BLE001 - whatever it is, it is this rollout's and not its siblings'
            status = "failed"
            error = failure
        except BaseException:
            status = self._interruption()
            raise
        finally:
            value = scope.saved if value is None else value
            self._end(scope, RolloutResult(sample, status, value, error), started)

    async def _attempts(self, scope: RolloutScope[T]) -> T:
        policy = self.run.state.policy
        while True:
            try:
                return await self.function(scope)
            except Exception as error:
                if policy.is_fatal(error) or not policy.retries(
                    error, scope.attempt, policy.rollouts
                ):
                    raise
            await anyio.sleep(policy.delay(scope.attempt, scope.sample))
            scope.attempt += 1

    def _end(self, scope: RolloutScope[T], result: RolloutResult[T], started: float) -> None:
        now = self.run.state.now()
        span = RolloutSpan(
            scope.problem,
            scope.sample,
            result.status,
            queued=self.queued,
            started=started,
            ended=now,
            released=now,
            attempts=scope.attempt + 1,
            waited=scope.waited,
            error="" if result.error is None else f"{type(result.error).__name__}: {result.error}",
        )
        self.results[result.sample] = result
        self.last_nodes.extend(scope.frontier)
        try:
            self._judge(result)
        finally:
            if self.admit == "together":
                self._ended.append((scope, span))
                self._leave(scope)
            else:
                self.run.admission.release(1)
                self.run.state.close_rollout(span)
            if len(self.results) == len(self.samples):
                self.done.set()

    def _judge(self, result: RolloutResult[T]) -> None:
        error = result.error
        state = self.run.state
        has_given_up = state.has_given_up(result.status)
        if error is not None and (has_given_up or state.policy.is_fatal(error)):
            if has_given_up:
                error.add_note(
                    f"the run was given up after {state.failures_in_row} failed rollouts in a row"
                )
            self.run.fail(error)
        elif (
            self.settle is not None
            and not self.why
            and result.status in ("done", "failed")
            and self.settle(result)
        ):
            self.close("settled")

    # admitted together: rounds, and places that are given back together

    def close_round(self) -> bool:
        """Close the round if no member is missing; those that wait in it go on."""
        current = self.round
        if not current.values or len(current.values) < len(self.samples) - len(self.results):
            return False
        current.values = dict(sorted(current.values.items()))
        current.frontier = tuple(dict.fromkeys(current.nodes))
        current.closed.set()
        self.round = Round(current.frontier)
        return True

    def _leave(self, scope: RolloutScope[T]) -> None:
        current = self.round
        current.values.pop(scope.sample, None)
        # it did something in this round: the round waited for it
        if scope.frontier is not current.opened_with:
            current.nodes.extend(scope.frontier)
        self.close_round()

    def release(self) -> None:
        """Give the places back that were taken together; until now every finished rollout waited
        for its siblings.
        """
        if self.admit == "together" and self._next:
            released = self.run.state.now()
            self.run.admission.release(len(self.samples))
            after = tuple(dict.fromkeys(self.last_nodes))
            for scope, span in self._ended:
                if span.status in ("done", "failed"):
                    span.waited += released - span.ended
                    scope.note_release(span.ended, released, after)
                span.released = released
                self.run.state.close_rollout(span)
