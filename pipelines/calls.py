"""Engine calls of one rollout: admitted by the task graph, timed, given a deadline, validated,
tried again.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Literal, Self, TypeVar

import anyio

from atts.core import Completion, Role, SampleRequest, ScoreRequest, Scores
from atts.engine import Engine, EngineSpec, EngineStats, Tokenizer
from atts.errors import BadReply, EngineTimeout
from atts.graph import Caller

Request = TypeVar("Request", SampleRequest, ScoreRequest)
Result = TypeVar("Result", Completion, Scores)
Stage = Literal["draft", "target", "score"]
"""Who writes, or that the target judges."""


class AdmittedEngine:
    """An engine as one rollout calls it: every call is a node of the task graph, every reply is
    validated.

    The stage, the turn and the KV tokens of a call are its request's own. Without a scope, calls
    are validated only. The engine inside is opened and closed by its owner, and its spec must not
    change meanwhile.

    :raises BadReply: by `sample` and `score`: the reply contradicts itself or the request.
    :raises EngineTimeout: likewise: it did not come in time.
    """

    recalls = False  # whether an earlier session recorded calls of this problem

    def __init__(
        self, engine: Engine, role: Role, scope: Caller | None, timeout_seconds: float
    ) -> None:
        self.spec: EngineSpec = engine.spec
        self.tokenizer: Tokenizer = engine.tokenizer
        self._engine = engine
        self._role: Role = role
        self._scope = scope
        self._timeout_seconds = timeout_seconds

    async def sample(self, request: SampleRequest) -> Completion:
        """Continue the ids, once the engine has room for them."""
        tokens = len(request.ids) + request.max_tokens
        ask = partial(self._ask, self._engine.sample, check_completion)
        return await self._call(self._role, ask, request, request.seed.turn, tokens)

    async def score(self, request: ScoreRequest) -> Scores:
        """Score the suffix, once the engine has room for it."""
        tokens = len(request.prefix) + len(request.suffix)
        ask = partial(self._ask, self._engine.score, check_scores)
        return await self._call("score", ask, request, request.turn, tokens)

    def recorded(self, request: ScoreRequest) -> Scores | None:
        """What an earlier session recorded of this call, which is not used up by that."""
        return None

    def recorded_length(self, request: SampleRequest) -> int:
        """How many tokens an earlier session asked for here, at most so many, if that answers at
        once; 0 if it did not.

        The request may differ in nothing else.
        """
        return 0

    def stats(self) -> EngineStats:
        """The inner engine's: what it never saw is not counted."""
        return self._engine.stats()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

    def _call(
        self,
        stage: Stage,
        ask: Callable[[Request], Awaitable[Result]],
        request: Request,
        turn: int,
        tokens: int,
    ) -> Awaitable[Result]:
        if self._scope is None:
            return ask(request)
        return self._scope.call(
            stage,
            ask,
            request,
            engine=self._role,
            turn=turn,
            tokens=tokens,
            priority=request.priority,
        )

    async def _ask(
        self,
        ask: Callable[[Request], Awaitable[Result]],
        check: Callable[[Result, Request, EngineSpec], None],
        request: Request,
    ) -> Result:
        late: TimeoutError | None = None
        try:
            with anyio.move_on_after(self._timeout_seconds):
                reply = await ask(request)
                check(reply, request, self.spec)
                return reply
        except TimeoutError as error:
            late = error
        raise EngineTimeout(
            self.spec.name, f"no answer within {self._timeout_seconds:g} s"
        ) from late


def check_completion(completion: Completion, request: SampleRequest, spec: EngineSpec) -> None:
    """See that the parts of a completion agree with each other and with the request.

    :raises BadReply: they do not.
    """
    ids = completion.ids
    logprobs = completion.logprobs
    may_lack = spec.logprobs == "none" or request.logprobs == "unneeded"
    if len(logprobs) != len(ids) and (logprobs or not may_lack):
        raise BadReply(spec.name, f"{len(logprobs)} log-probabilities came with {len(ids)} ids")
    if len(ids) > request.max_tokens:
        raise BadReply(spec.name, f"{len(ids)} tokens came back, {request.max_tokens} were allowed")
    if ids and not 0 <= min(ids) <= max(ids) < spec.vocabulary:
        raise BadReply(spec.name, "an id outside the vocabulary came back")
    if any(map(math.isnan, logprobs)):
        raise BadReply(spec.name, "a log-probability is not a number")


def check_scores(scores: Scores, request: ScoreRequest, spec: EngineSpec) -> None:
    """See that there is one log-probability per suffix token, none above 0; -inf is a
    log-probability.

    :raises BadReply: anything else came back.
    """
    logprobs = scores.logprobs
    if len(logprobs) != len(request.suffix):
        raise BadReply(
            spec.name,
            f"{len(logprobs)} log-probabilities came back for {len(request.suffix)} tokens",
        )
    if max(logprobs) > 1e-4 or any(map(math.isnan, logprobs)):  # rounding may exceed 0 a little
        raise BadReply(spec.name, "a log-probability is above 0 or not a number")
    begun = scores.begun
    draw = request.draw
    if begun is None:
        return
    ids = begun.ids
    if (
        draw is None
        or ids[:-1] != request.suffix[: len(ids) - 1]
        or not 0 < len(ids) == len(begun.logprobs)
    ):
        raise BadReply(
            spec.name, "what it drew while it scored does not begin as the scored text does"
        )
    if len(ids) > draw.max_tokens - (begun.ended is None) or not 0 <= ids[-1] < spec.vocabulary:
        raise BadReply(
            spec.name, "what it drew while it scored is no beginning of what was asked for"
        )
