"""Cancellation at seeded places, by time or by engine call, for tests of what a pipeline leaves behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar, TypeVarTuple, Unpack

import anyio

from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import Engine, EngineAround
from atts.errors import OptionError
from atts.seeds import Seed, generator

_Result = TypeVar("_Result")
_Args = TypeVarTuple("_Args")
_Request = TypeVar("_Request", SampleRequest, ScoreRequest)
_Answer = TypeVar("_Answer", Completion, Scores)


@dataclass(frozen=True, slots=True)
class Interruption:
    """When work is cut short: at a time, or around the engine call with this number; whichever comes first.

    `phase` "before" cancels as the call begins, "after" when its answer is there and not yet delivered.
    """

    after_seconds: float = float("inf")
    at_call: int = -1
    phase: Literal["before", "after"] = "before"

    def __post_init__(self) -> None:
        if self.phase not in ("before", "after"):
            raise OptionError("phase", f"{self.phase!r} is unknown", ("before", "after"))


def interruptions(count: int, *, seed: int, seconds: float, calls: int) -> tuple[Interruption, ...]:
    """Seeded places to cut work that takes about so many seconds and engine calls: half by time, half by call.

    >>> interruptions(2, seed=1, seconds=10.0, calls=5) == interruptions(2, seed=1, seconds=10.0, calls=5)
    True
    """
    draws = generator(Seed(run=seed, purpose="interruptions"))
    found: list[Interruption] = []
    for number in range(count):
        if number % 2:
            found.append(Interruption(after_seconds=float(draws.random()) * seconds))
        else:
            phase: Literal["before", "after"] = "before" if draws.random() < 0.5 else "after"
            found.append(Interruption(at_call=int(draws.integers(0, max(1, calls))), phase=phase))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Interrupted(Generic[_Result]):
    """What came of work that may have been cut: its value, unless it was, and whether the cut was made."""

    value: _Result | None
    fired: bool


@dataclass
class Interrupter:
    """Runs work and cuts it at one place; engines the work uses are wrapped so that calls can be counted.

    >>> from atts.testing import ScriptedEngine, run_virtual
    >>> async def main() -> bool:
    ...     interrupter = Interrupter(Interruption(at_call=0))
    ...     async with interrupter.wrap(ScriptedEngine()) as engine:
    ...         return (await interrupter.run(engine.sample, SampleRequest((3,), 5))).fired
    >>> run_virtual(main)
    True
    """

    interruption: Interruption
    calls: int = 0
    _scope: anyio.CancelScope | None = field(default=None, repr=False)

    def wrap(self, engine: Engine) -> Engine:
        """The engine, with its calls counted; several engines share one count."""
        return _CountedEngine(engine, self)

    async def run(self, function: Callable[[Unpack[_Args]], Awaitable[_Result]], *args: *_Args) -> Interrupted[_Result]:
        """Run the function to its end or to the interruption.

        :raises BaseException: whatever the function raises, cancellation by this interruption excepted.
        """
        value: _Result | None = None
        with anyio.CancelScope(deadline=anyio.current_time() + self.interruption.after_seconds) as self._scope:
            value = await function(*args)
        return Interrupted(value, self._scope.cancelled_caught)

    def pass_by(self, number: int, phase: Literal["before", "after"]) -> None:
        """Called around each engine call; cancels when this is the place."""
        place = self.interruption
        if self._scope is not None and (number, phase) == (place.at_call, place.phase):
            self._scope.cancel()


class _CountedEngine(EngineAround):
    """An engine that tells an interrupter of its calls."""

    def __init__(self, engine: Engine, interrupter: Interrupter) -> None:
        super().__init__(engine, "own")
        self._interrupter = interrupter

    async def around(self, request: _Request, call: Callable[[_Request], Awaitable[_Answer]]) -> _Answer:
        number = self._interrupter.calls
        self._interrupter.calls += 1
        self._interrupter.pass_by(number, "before")
        answer = await call(request)
        self._interrupter.pass_by(number, "after")
        return answer
