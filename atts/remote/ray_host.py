"""Ray actor: holds one open engine and returns its errors as picklable values."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import Engine, EngineSpec, EngineStats, Tokenizer
from atts.errors import ATTSError, ContextOverflow, EngineError, EngineUnavailable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """An error on its way between processes: errors with arguments of their own do not survive pickling."""

    kind: type[ATTSError]
    words: str

    def error(self, engine: str) -> ATTSError:
        """The error again, with the words it had."""
        made = self.kind.__new__(self.kind, self.words)
        if isinstance(made, EngineError):
            made.engine = engine
        if isinstance(made, ContextOverflow):
            made.needed = made.context_length = 0
        return made


class Host:
    """What runs in the actor. One task opens and closes the engine: it may hold a task group open in between."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._engine: Engine | None = None
        self._open = asyncio.Event()
        self._closing = asyncio.Event()
        self._failure: Failure | None = None
        self._life: asyncio.Task[None] | None = None

    async def open(self) -> tuple[EngineSpec, Tokenizer] | Failure:
        """Open the engine, unless it is; what it is, or why it could not be opened."""
        if self._life is None:
            self._life = asyncio.create_task(self._live())
        await self._open.wait()
        if self._failure is not None or self._engine is None:
            return self._failure or Failure(EngineUnavailable, "it is closed")
        return self._engine.spec, self._engine.tokenizer

    async def sample(self, request: SampleRequest) -> Completion | Failure:
        """A completion, or why there is none."""
        return await self._ask(lambda engine: engine.sample(request))

    async def score(self, request: ScoreRequest) -> Scores | Failure:
        """Scores, or why there are none."""
        return await self._ask(lambda engine: engine.score(request))

    async def stats(self) -> EngineStats | Failure:
        """The engine's counters."""
        return EngineStats() if self._engine is None else self._engine.stats()

    async def close(self) -> None:
        """Close the engine, and wait until it is closed."""
        self._closing.set()
        if self._life is not None:
            await self._life

    async def _live(self) -> None:
        try:
            async with self._make() as engine:
                self._engine = engine
                self._open.set()
                await self._closing.wait()
        except ATTSError as error:
            self._failure = Failure(type(error), str(error))
        finally:
            self._engine = None
            self._open.set()

    async def _ask(self, call: Callable[[Engine], Awaitable[T]]) -> T | Failure:
        if self._engine is None:
            return self._failure or Failure(EngineUnavailable, "it is closed")
        try:
            return await call(self._engine)
        except ATTSError as error:
            return Failure(type(error), str(error))
