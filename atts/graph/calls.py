"""Engine calls as nodes of the task graph: queued, started, timed, tried again, and reported to the sink."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple, Unpack

import anyio

from atts.graph.ledger import Ledger
from atts.spans import CallSpan, CallStatus

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Caller:
    """A rollout or a problem, as what calls engines. Calls may run side by side within one caller."""

    __slots__ = ("_declared", "_ledger", "_ready", "frontier", "problem", "sample")

    def __init__(self, ledger: Ledger, problem: str, sample: int, frontier: tuple[int, ...]) -> None:
        self.problem = problem
        self.sample = sample
        self._ledger = ledger
        self.frontier = frontier  # numbers of the finished calls that the next one will have waited for
        self._declared: anyio.Event | None = None  # set by a problem's first call: the next problem may be opened
        self._ready: float | None = None  # when it began to wait for siblings, if that is what came last

    def emit(self, event: object) -> None:
        """Put an event of one's own into the graph's stream."""
        self._ledger.emit(event)

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
        """Call `function(*args)` as a node of the graph, when the engine has a slot and `tokens` of KV room.

        `engine` names the limit, by default the stage's own name. The function must not call into the graph again.
        With `keep`, a call that succeeded is handed to it, with its result, instead of to the sink; the slot is given
        back when `keep` returns.

        :raises Exception: what the function raised last, after the attempts the policy allows; what `keep` raised.
        :raises OptionError: the graph has no such engine.
        :raises OutOfMemory: more tokens than the engine's limit will ever hold.
        """
        if self._declared is not None:
            self._declared.set()
        engine = engine or stage
        ledger = self._ledger
        now, policy = ledger.now, ledger.policy
        pool = ledger.pools.get(engine) or ledger.pool(engine)
        attempt = 0
        while True:
            ledger.last_id = node = ledger.last_id + 1
            who, after = (node, stage, engine, self.problem, self.sample, turn), self.frontier
            started = queued = now()
            ended = -1.0  # unknown
            ready, self._ready = self._ready, None
            ready = queued if ready is None else ready
            status: CallStatus = "done"
            is_kept = False
            is_held = pool.take_nowait(tokens)
            try:
                if not is_held:
                    started = -1.0
                    await pool.take(tokens, priority)
                    is_held = True
                    started = now()
                result = await function(*args)
                if keep is not None:
                    ended = now()
                    is_kept = True
                    times = (ready, queued, started, ended)
                    await keep(CallSpan(*who, *times, after, attempt, status, tokens), result)
                return result
            except Exception as error:
                status = "failed"
                if is_kept or not policy.retries(error, attempt, policy.calls):
                    raise
            except BaseException:
                status = "cancelled"
                raise
            finally:
                ended = now() if ended < 0 else ended
                if is_held:
                    pool.give(tokens)
                    pool.busy_seconds += ended - started
                else:
                    started = ended
                pool.queue_seconds += started - queued
                ledger.nodes += 1
                if status != "cancelled":
                    # in straight-line code nothing else finished meanwhile, and this call is all the next one waits for
                    is_straight = self.frontier is after
                    self.frontier = (node,) if is_straight else (*[n for n in self.frontier if n not in after], node)
                if ledger.sink is not None and not is_kept:
                    times = (ready, queued, started, ended)
                    ledger.sink(CallSpan(*who, *times, after, attempt, status, tokens))
            await anyio.sleep(policy.delay(attempt, node))
            attempt += 1
