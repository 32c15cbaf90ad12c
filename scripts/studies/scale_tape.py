"""What two engines really said in a run, so that the same run can be lived again on engines with known costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from anyio.lowlevel import checkpoint

from atts.core import Completion, Role, SampleRequest, ScoreRequest, Scores
from atts.engine import Engine, EngineAround, EngineSpec, EngineStats, Tokenizer
from atts.seeds import Seed

T = TypeVar("T")
Place = tuple[Role, str, int, int, int]
"""Role, problem, turn, sample, attempt."""


@dataclass(slots=True)
class Tape:
    """Completions by where they were asked for, log-probabilities by rollout and length of the prefix."""

    written: dict[Place, Completion] = field(default_factory=dict[Place, Completion])
    scored: dict[tuple[str, int], tuple[float, ...]] = field(default_factory=dict[tuple[str, int], tuple[float, ...]])

    @property
    def calls(self) -> int:
        """How many there were."""
        return len(self.written) + len(self.scored)


def _place(role: Role, seed: Seed) -> Place:
    return role, seed.problem, seed.turn, seed.sample, seed.attempt


class TapedEngine(EngineAround):
    """An engine whose answers are kept; it is opened and closed by whoever owns the real one."""

    def __init__(self, engine: Engine, role: Role, tape: Tape) -> None:
        super().__init__(engine, "lent")
        self._role: Role = role
        self._tape = tape

    async def sample(self, request: SampleRequest) -> Completion:
        """As the real engine."""
        completion = await self._engine.sample(request)
        self._tape.written[_place(self._role, request.seed)] = completion
        return completion

    async def score(self, request: ScoreRequest) -> Scores:
        """As the real engine."""
        scores = await self._engine.score(request)
        self._tape.scored[request.rollout, len(request.prefix)] = scores.logprobs
        return scores


class InstantEngine:
    """A law as an engine that takes no time: what is left of a run is the pipelines' own work."""

    def __init__(self, role: Role, law: TapedLaw) -> None:
        self._role: Role = role
        self._law = law

    @property
    def spec(self) -> EngineSpec:
        """The law's."""
        return self._law.spec(self._role)

    @property
    def tokenizer(self) -> Tokenizer:
        """The law's."""
        return self._law.tokenizer

    def stats(self) -> EngineStats:
        """Nothing is counted."""
        return EngineStats()

    async def sample(self, request: SampleRequest) -> Completion:
        """At once."""
        await checkpoint()
        return self._law.write(self._role, request)

    async def score(self, request: ScoreRequest) -> Scores:
        """At once."""
        await checkpoint()
        return Scores(self._law.score(request))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        return None


class TapedLaw:
    """A tape as a law: what was said at a place is said again; where a decision came out otherwise, something like it.

    Like it: what the same model wrote on the same problem at the same turn, or at any turn, or anywhere.
    """

    grain = 1

    def __init__(self, tape: Tape, draft: Engine, target: Engine) -> None:
        self.tape = tape
        self._specs: dict[Role, EngineSpec] = {"draft": draft.spec, "target": target.spec}
        self._tokenizer = draft.tokenizer
        self._near: dict[tuple[object, ...], list[Completion]] = {}
        for (role, problem, turn, _, _), completion in sorted(tape.written.items(), key=lambda item: item[0]):
            for key in ((role, problem, turn), (role, problem), (role,)):
                self._near.setdefault(key, []).append(completion)
        self.missed = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The models' own."""
        return self._tokenizer

    def spec(self, role: Role) -> EngineSpec:
        """The real engine's."""
        return self._specs[role]

    def write(self, role: Role, request: SampleRequest) -> Completion:
        """What was written there, or near there."""
        found = self.tape.written.get(_place(role, request.seed))
        if found is None:
            self.missed += 1
            keys = ((role, request.seed.problem, request.seed.turn), (role, request.seed.problem), (role,))
            pool = next((self._near[key] for key in keys if key in self._near), None)
            if pool is None:  # this model never wrote: as much as was asked for
                return Completion((1,) * request.max_tokens, "", "length", (-0.5,) * request.max_tokens)
            found = pool[request.seed.key() % len(pool)]
        if len(found.ids) <= request.max_tokens:
            return found
        ids = found.ids[: request.max_tokens]
        return Completion(ids, self._tokenizer.decode(ids), "length", found.logprobs[: len(ids)])

    def score(self, request: ScoreRequest) -> tuple[float, ...]:
        """What was scored there; for another chunk, the mean of what was scored in this rollout's place."""
        found = self.tape.scored.get((request.rollout, len(request.prefix)))
        if found is not None and len(found) == len(request.suffix):
            return found
        self.missed += 1
        problem = request.rollout.rpartition("/")[0]
        mean = self._mean(lambda rollout: rollout == request.rollout) or self._mean(
            lambda rollout: rollout.rpartition("/")[0] == problem
        )
        return (mean or -0.5,) * len(request.suffix)

    def _mean(self, wanted: Callable[[str], bool]) -> float:
        values = [v for (rollout, _), logprobs in self.tape.scored.items() if wanted(rollout) for v in logprobs]
        finite = [value for value in values if math.isfinite(value)]
        return math.fsum(finite) / len(finite) if finite else 0.0
