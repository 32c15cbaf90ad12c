"""Engine calls as nodes of the task graph: queued, started, timed, tried again, and reported to the
sink.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple, Unpack

import anyio

from atts.core import CallSpan, CallStatus
from atts.graph.graph_state import GraphState
from atts.graph.limits import Pool

T = TypeVar("T")
Args = TypeVarTuple("Args")
_UNKNOWN = -1.0  # of times: it has not come yet
_DONE: CallStatus = "done"


class Caller:
    """A rollout or a problem, as what calls engines. Calls may run side by side within one caller."""

    __slots__ = ("_declared", "_state", "_ready", "frontier", "problem", "sample")

    def __init__(
        self, state: GraphState, problem: str, sample: int, frontier: tuple[int, ...]
    ) -> None:
        self.problem = problem
        self.sample = sample
        self._state = state
        # numbers of the finished calls that the next one will have waited for
        self.frontier = frontier
        # set by a problem's first call: the next problem may be opened
        self._declared: anyio.Event | None = None
        # when it began to wait for siblings, if that is what came last
        self._ready: float | None = None

    def emit(self, event: object) -> None:
        """Put an event of one's own into the graph's stream."""
        self._state.emit(event)

    async def call(
        self,
        stage: str,
        function: Callable[[Unpack[Args]], Awaitable[T]],
        *args: *Args,
        engine: str = "",
        turn: int = 0,
        tokens: int = 0,
        priority: int = 0,
        keep: Callable[[CallSpan, T], Awaitable[object]] | None = None,
    ) -> T:
        """Call `function(*args)` as a node of the graph, when the engine has a slot and `tokens` of
        KV room.

        `engine` names the limit, by default the stage's own name. The function must not call into
        the graph again. With `keep`, a call that succeeded is handed to it, with its result,
        instead of to the sink; the slot is given back when `keep` returns.

        :raises Exception: what the function raised last, after the attempts the policy allows; what
            `keep` raised.
        :raises OptionError: the graph has no such engine.
        :raises OutOfMemory: more tokens than the engine's limit will ever hold.
        """
        if self._declared is not None:
            self._declared.set()
        state = self._state
        engine = engine or stage
        now = state.now
        pool = state.pools.get(engine) or state.pool(engine)
        attempt = 0
        while True:
            state.last_id = node = state.last_id + 1
            queued = now()
            ready = self._ready
            if ready is None:
                ready = queued
            else:
                self._ready = None
            values = (
                node, stage, engine, self.problem, self.sample, turn, ready, queued, queued, _UNKNOWN, self.frontier,
                attempt, _DONE, tokens,
            )  # fmt: skip
            span = CallSpan(*values)
            is_held = pool.take_nowait(tokens)
            is_kept = False
            try:
                if not is_held:
                    await pool.take(tokens, priority)
                    is_held = True
                    span.started = now()
                result = await function(*args)
                if keep is not None:
                    is_kept = True
                    span.ended = now()
                    await keep(span, result)
                return result
            except Exception as error:
                span.status = "failed"
                if is_kept or not state.policy.retries(error, attempt, state.policy.calls):
                    raise
            except BaseException:
                span.status = "cancelled"
                raise
            finally:
                self._close(span, pool, is_held, is_kept)
            await anyio.sleep(state.policy.delay(attempt, node))
            attempt += 1

    def _close(self, span: CallSpan, pool: Pool, is_held: bool, is_kept: bool) -> None:
        """Give the slot of a call back, count what it took, and tell of it unless it was kept."""
        state = self._state
        ended = span.ended
        if ended == _UNKNOWN:
            ended = span.ended = state.now()
        if is_held:
            pool.give(span.tokens)
            pool.busy_seconds += ended - span.started
        else:
            span.started = ended
        pool.queue_seconds += span.started - span.queued
        state.nodes += 1
        if span.status != "cancelled":
            # in straight-line code nothing else finished meanwhile, and this call is all the next
            # one waits for
            before = self.frontier
            after = span.after
            self.frontier = (
                (span.node,)
                if before is after
                else (*[n for n in before if n not in after], span.node)
            )
        if state.sink is not None and not is_kept:
            state.sink(span)
