"""Base of the engines here: open or closed, requests checked against the spec and counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal, TypeVar

import anyio

from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import Capability, EngineCounters, EngineSpec, EngineStats, Tokenizer, check_sample, check_score
from atts.errors import EngineError, EngineUnavailable, FingerprintError, UnsupportedByEngine

T = TypeVar("T")
State = Literal["new", "open", "closed"]


class BaseEngine(ABC):
    """An engine that is asked over a wire; a subclass opens it, sets `_spec` and `_tokenizer`, and answers requests."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._state: State = "new"
        self._spec: EngineSpec | None = None
        self._tokenizer: Tokenizer | None = None
        self._counts = EngineCounters()
        self._clock: Callable[[], float] = lambda: 0.0  # the loop's, once there is one
        self._busy_since = 0.0
        self._idle_since = 0.0

    @property
    def spec(self) -> EngineSpec:
        """Known once the engine is open."""
        return opened(self._spec, self._name)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's, in this process; known once the engine is open."""
        return opened(self._tokenizer, self._name)

    def stats(self) -> EngineStats:
        """Counters so far, as seen from here; busy is the time in which at least one request was under way."""
        counts = self._counts
        return counts.snapshot(busy_for=self._clock() - self._busy_since if counts.in_flight else 0.0)

    async def sample(self, request: SampleRequest) -> Completion:
        """Continue the ids; see `atts.engine.Engine`."""
        self._admit("sample")
        check_sample(request, self.spec)
        with self._counted():
            done = await self._sample(request)
        self._counts.sampled(request, done)
        return done

    async def score(self, request: ScoreRequest) -> Scores:
        """Score the suffix; see `atts.engine.Engine`."""
        self._admit("rate" if len(request.suffix) == 1 and "rate" in self.spec.capabilities else "score")
        check_score(request, self.spec)
        with self._counted():
            done = await self._score(request)
        self._counts.scored(request, done)
        return done

    @abstractmethod
    async def _sample(self, request: SampleRequest) -> Completion: ...

    @abstractmethod
    async def _score(self, request: ScoreRequest) -> Scores: ...

    def _admit(self, verb: Capability) -> None:
        if self._state != "open":
            raise not_open(self._name, self._state)
        if verb not in self.spec.capabilities:
            raise UnsupportedByEngine(self._name, f"{self.spec.engine} cannot {verb}")

    @contextmanager
    def _counted(self) -> Generator[None]:
        """Count a request while it is under way, and how it ended."""
        counts = self._counts
        counts.requests += 1
        if not counts.in_flight:
            self._busy_since = self._clock()
        counts.in_flight += 1
        try:
            yield
        except anyio.get_cancelled_exc_class():
            counts.cancelled += 1
            raise
        except EngineError:
            counts.failed += 1
            raise
        finally:
            counts.in_flight -= 1
            if not counts.in_flight:
                self._idle_since = self._clock()
                counts.busy_seconds += self._idle_since - self._busy_since


def not_open(name: str, state: State) -> EngineUnavailable:
    """The error of an engine that is asked before it is open, or after it closed."""
    if state == "closed":
        return EngineUnavailable(name, "it is closed", "Make a new one")
    return EngineUnavailable(name, "it is not open yet", "Call it inside `async with engine:`")


def opened(value: T | None, name: str) -> T:
    """What an engine has once it is open.

    :raises EngineUnavailable: it is not.
    """
    if value is None:
        raise not_open(name, "new")
    return value


def require_alike(name: str, ours: EngineSpec, theirs: EngineSpec, advice: str) -> None:
    """Results of several engines are mixed: they must be comparable.

    :raises FingerprintError: they are not.
    """
    one, other = ours.fingerprint(), theirs.fingerprint()
    differences = [(field, one[field], other.get(field)) for field in one if one[field] != other.get(field)]
    if differences:
        raise FingerprintError(name, differences, advice)
