"""What two engines really said in a run, so that the same run can be lived again on engines with
known costs.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from anyio.lowlevel import checkpoint

from atts.core import Completion, Role, SampleRequest, ScoreRequest, Scores
from atts.engine import Engine, EngineAround, EngineSpec, EngineStats
from atts.sampling import Seed


class Tape:
    """Completions by where they were asked for, log-probabilities by rollout and length of the
    prefix: a law.
    """

    grain = 1

    def __init__(self, draft: Engine, target: Engine) -> None:
        self.tokenizer = draft.tokenizer
        self.written: dict[tuple[Role, str, int, int, int], Completion] = {}
        self.scored: dict[tuple[str, int], tuple[float, ...]] = {}
        self._specs: dict[Role, EngineSpec] = {"draft": draft.spec, "target": target.spec}

    @property
    def calls(self) -> int:
        """How many there were."""
        return len(self.written) + len(self.scored)

    def spec(self, role: Role) -> EngineSpec:
        """The real engine's."""
        return self._specs[role]

    def write(self, role: Role, request: SampleRequest) -> Completion:
        """What was written there.

        :raises KeyError: nothing was: the run is another one.
        """
        return self.written[_place(role, request.seed)]

    def score(self, request: ScoreRequest) -> tuple[float, ...]:
        """What was scored there; raises as `write` does."""
        return self.scored[request.rollout, len(request.prefix)]


def _place(role: Role, seed: Seed) -> tuple[Role, str, int, int, int]:
    return role, seed.problem, seed.turn, seed.sample, seed.attempt


class TapedEngine(EngineAround):
    """An engine whose answers are kept; it is opened and closed by the owner of the real one."""

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
    """A tape as an engine that takes no time: what is left of a run is the pipelines' own work."""

    def __init__(self, role: Role, tape: Tape) -> None:
        self._role: Role = role
        self._tape = tape
        self.spec = tape.spec(role)
        self.tokenizer = tape.tokenizer

    def stats(self) -> EngineStats:
        """Nothing is counted."""
        return EngineStats()

    async def sample(self, request: SampleRequest) -> Completion:
        """At once."""
        await checkpoint()
        return self._tape.write(self._role, request)

    async def score(self, request: ScoreRequest) -> Scores:
        """At once."""
        await checkpoint()
        return Scores(self._tape.score(request))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None:
        return None
