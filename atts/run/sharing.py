"""An engine whose replies are shared: what another run of the set asked before is not asked again.

Seeds belong to the run's seed, the problem, the sample and the turn, so that two runs which ask the
same of the same model would be answered the same; and where they were answered otherwise (a server
that is not deterministic), the reply is still a draw from the model's law. What each run may take
is therefore decided by the request alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, TypeVar, cast

import anyio
import anyio.lowlevel
import msgspec

from atts.core import Completion, Role, SampleRequest, ScoreRequest, Scores, request_key
from atts.engine import Engine, EngineAround
from atts.errors import EngineError
from atts.journal import SharedReplies, reply_key, run_number
from atts.pipelines import check_completion, check_scores
from atts.run.plan import engine_identity

_Request = TypeVar("_Request", SampleRequest, ScoreRequest)
_Answer = TypeVar("_Answer")


class SharingEngine(EngineAround):
    """An open engine in one role of one run, which takes replies from other runs and leaves its own
    to them.
    """

    def __init__(self, engine: Engine, role: Role, replies: SharedReplies, run: str) -> None:
        super().__init__(engine, "lent")
        self._role: Role = role
        self._replies = replies
        self._run = run_number(run)
        self._identity = engine_identity(engine.spec)

    async def around(
        self, request: _Request, call: Callable[[_Request], Awaitable[_Answer]]
    ) -> _Answer:
        """Take the reply that is there, or ask and leave it there."""
        kind = Completion if isinstance(request, SampleRequest) else Scores
        key = request_key(self._role, request)
        needed = request.logprobs if isinstance(request, SampleRequest) else "raw"
        identity = self._identity
        for logprobs in dict.fromkeys(("raw", needed)):
            held = self._replies.find(reply_key(identity, key, logprobs))
            if held is not None:
                await anyio.lowlevel.checkpoint()
                return cast(_Answer, _decoder(kind)(self._replies.read(held)))
        since = anyio.current_time()
        answer = await call(request)
        if self._is_sound(request, answer):
            seconds = anyio.current_time() - since
            self._replies.add(
                reply_key(identity, key, needed), self._run, seconds, msgspec.msgpack.encode(answer)
            )
        return answer

    def _is_sound(self, request: SampleRequest | ScoreRequest, answer: object) -> bool:
        """Whether the run will take the reply: what it refuses is asked again, by every run anew."""
        try:
            if isinstance(request, SampleRequest):
                check_completion(cast(Completion, answer), request, self.spec)
            else:
                check_scores(cast(Scores, answer), request, self.spec)
        except EngineError:
            return False
        return True


@cache
def _decoder(kind: type) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(kind).decode
