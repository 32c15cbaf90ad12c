"""An engine that looks its answers up, for measuring everything but the engine."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import anyio.lowlevel

from atts.core import Completion, Message, Role, SampleRequest, Sampling, ScoreRequest, Scores, TokenIds
from atts.engine import EngineSpec, EngineStats, check_sample, check_score
from atts.errors import EngineUnavailable
from atts.seeds import Seed
from atts.testing.language import DRAFT, TARGET, ToyModel
from atts.testing.questions import toy_problems
from atts.testing.scripted import engine_spec
from atts.testing.tokenizer import ToyTokenizer
from atts.testing.writing import Writer

_UNKNOWN = -1.0  # the log-prob of every token of a suffix that was never written here


class CannedEngine:
    """Answers written beforehand by the toy model and picked by the request's seed; next to no work per call.

    The texts and their log-probabilities are the toy language's, but no answer looks at the prompt: steps before turn
    `turns - 1`, a last step with an answer and the model's end from there on. A score is what the toy target gave the
    chunk where it was written. Token limits are kept, stop strings are those of steps. It therefore keeps few of the
    promises `check_engine` checks, and its answers mean nothing; use `ScriptedEngine` wherever they should.

    >>> from atts.testing import run_virtual
    >>> async def main() -> tuple[str, str]:
    ...     async with CannedEngine(turns=2) as engine:
    ...         first = await engine.sample(SampleRequest((3,), 99, seed=Seed(turn=0)))
    ...         return first.ended, (await engine.sample(SampleRequest((3,), 99, seed=Seed(turn=1)))).ended
    >>> run_virtual(main)
    ('delimiter', 'end')
    """

    def __init__(self, role: Role = "draft", *, turns: int = 6, context_length: int = 1 << 20) -> None:
        self._model = ToyModel(DRAFT if role == "draft" else TARGET, ToyTokenizer())
        self._spec = engine_spec(role, self._model, context_length, frozenset({"sample", "score"}), kind="canned")
        self._turns = turns
        self._steps, self._ends, self._scores = _write(self._model)
        self._state = "new"
        self._requests = self._in_flight = self._sampled = self._scored = 0

    @property
    def spec(self) -> EngineSpec:
        """Known from the start."""
        return self._spec

    @property
    def tokenizer(self) -> ToyTokenizer:
        """The toy language's."""
        return self._model.tokenizer

    def stats(self) -> EngineStats:
        """Calls and tokens; no time passes here."""
        return EngineStats(self._requests, self._in_flight, sampled_tokens=self._sampled, scored_tokens=self._scored)

    async def sample(self, request: SampleRequest) -> Completion:
        """One of the answers written beforehand; see `atts.engine.Engine` for what is raised."""
        check_sample(request, self._spec)
        await self._pass()
        pool = self._ends if request.seed.turn >= self._turns - 1 else self._steps
        picked = pool[request.seed.key() % len(pool)]
        if len(picked.ids) > request.max_tokens:
            ids = picked.ids[: request.max_tokens]
            picked = Completion(ids, self.tokenizer.decode(ids), "length", picked.logprobs[: len(ids)])
        self._sampled += len(picked.ids)
        return picked

    async def score(self, request: ScoreRequest) -> Scores:
        """What the target gave this suffix when it was written; see `atts.engine.Engine` for what is raised."""
        check_score(request, self._spec)
        await self._pass()
        self._scored += len(request.suffix)
        return self._scores.get(request.suffix) or Scores((_UNKNOWN,) * len(request.suffix))

    async def _pass(self) -> None:
        if self._state != "open":
            raise EngineUnavailable(self._spec.name, "it is not open", "Call it inside `async with engine:`")
        self._requests += 1
        self._in_flight += 1
        try:
            await anyio.lowlevel.checkpoint()
        finally:
            self._in_flight -= 1

    async def __aenter__(self) -> Self:
        self._state = "open"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        self._state = "closed"
        return None


def _write(model: ToyModel) -> tuple[list[Completion], list[Completion], dict[TokenIds, Scores]]:
    """Steps, last steps, and what the target thinks of each (with and without an end token)."""
    author, scorer = Writer(model), Writer(ToyModel(TARGET, model.tokenizer))
    steps: list[Completion] = []
    ends: list[Completion] = []
    scores: dict[TokenIds, Scores] = {}
    for problem in toy_problems(16):
        ids = model.tokenizer.render([Message("user", problem.text)])
        for turn in range(40):
            seed = Seed(problem=problem.id, turn=turn)
            step = author.write(SampleRequest(ids, 200, Sampling(), seed, ("\n\n",)))
            logprobs = scorer.score(ScoreRequest(ids, step.ids))
            scores[step.ids] = Scores(logprobs)
            if ("boxed" in step.text) == (step.ended == "end"):
                (ends if step.ended == "end" else steps).append(step)
            if step.ended == "end":
                scores[step.ids[:-1]] = Scores(logprobs[:-1])
                break
            ids += step.ids
    return steps, ends, scores
