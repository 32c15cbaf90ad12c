"""An engine call as a node: queued, started, timed, tried again, and told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple, Unpack

import anyio

from atts.graph.ledger import Ledger
from atts.graph.nodes import Node, NodeStatus

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Caller:
    """Whoever may call engines: a rollout or a problem. Calls may run side by side within one caller."""

    __slots__ = ("_declared", "_ledger", "_ready", "frontier", "problem", "sample")

    def __init__(self, ledger: Ledger, problem: str, sample: int, frontier: tuple[int, ...]) -> None:
        self.problem = problem
        self.sample = sample
        self._ledger = ledger
        self.frontier = frontier  # ids of the finished nodes that the next one will have waited for
        self._declared: anyio.Event | None = None  # set by a problem's first call: the next problem may be opened
        self._ready: float | None = None  # when it began to wait for siblings, if that is what came last

    def emit(self, event: object) -> None:
        """Put an event of one's own into the graph's stream."""
        self._ledger.emit(event)

    def call(
        self,
        stage: str,
        function: Callable[[Unpack[Args]], Awaitable[T]],
        *args: *Args,
        engine: str = "",
        turn: int = 0,
        tokens: int = 0,
        priority: int = 0,
    ) -> Coroutine[Any, Any, T]:
        """Call `function(*args)` as a node of the graph, when the engine has a slot and `tokens` of KV room.

        `engine` names the limit, by default the stage's own name. The function must not call into the graph again.

        :raises Exception: what the function raised last, after the attempts the policy allows.
        :raises OptionError: the graph has no such engine.
        :raises OutOfMemory: more tokens than the engine's limit will ever hold.
        """
        if self._declared is not None:
            self._declared.set()
        return self._call(stage, function, args, engine or stage, turn, tokens, priority, 0)

    async def _call(
        self,
        stage: str,
        function: Callable[[Unpack[Args]], Awaitable[T]],
        args: tuple[*Args],
        engine: str,
        turn: int,
        tokens: int,
        priority: int,
        attempt: int,
    ) -> T:
        ledger = self._ledger
        now = ledger.now
        pool = ledger.pools.get(engine) or ledger.pool(engine)
        ledger.last_id = node = ledger.last_id + 1
        after = self.frontier
        started = queued = now()
        ready, self._ready = self._ready, None
        is_held = pool.take_nowait(tokens)
        status: NodeStatus = "done"
        try:
            if not is_held:
                started = -1.0
                await pool.take(tokens, priority)
                is_held = True
                started = now()
            return await function(*args)
        except Exception as error:
            status = "failed"
            if not ledger.policy.retries(error, attempt, ledger.policy.calls):
                raise
        except BaseException:
            status = "cancelled"
            raise
        finally:
            ended = now()
            if is_held:
                pool.give(tokens)
                pool.busy_seconds += ended - started
            else:
                started = ended
            pool.queue_seconds += started - queued
            ledger.nodes += 1
            if status != "cancelled":
                # in straight-line code nothing else finished meanwhile, and this node is all the next one waits for
                rest = () if self.frontier is after else tuple(n for n in self.frontier if n not in after)
                self.frontier = (*rest, node)
            if ledger.sink is not None:
                ready = queued if ready is None else ready
                times = (ready, queued, started, ended)
                ledger.sink(
                    Node._make(
                        (node, stage, engine, self.problem, self.sample, turn, attempt, status, *times, after, tokens)
                    )
                )
        await anyio.sleep(ledger.policy.delay(attempt, node))
        return await self._call(stage, function, args, engine, turn, tokens, priority, attempt + 1)
