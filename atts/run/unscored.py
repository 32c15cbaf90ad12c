"""What happens when a target stops giving usable scores: one diagnosis, then the run ends or goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import anyio

from atts.core import ScoreRequest, Scores
from atts.engine import Engine, EngineSpec
from atts.errors import BadReply, EngineError, UnusableScores

OnUnscored = Literal["stop", "escalate"]
"""When chunk after chunk comes back without a usable score: the run stops with all it has, or goes on
and the target rewrites what nobody could score.
"""

CheckScores = Callable[[Scores, ScoreRequest, EngineSpec], None]
"""Refuses scores that cannot be true with a BadReply."""

IN_A_ROW = 12  # calls without a usable score, each tried again as often as any other call
_PROBE_TEXT = "2 + 2 = 4, so the answer is 4."
_ADVICE = (
    "Look at the target's log: overflow in float16 gives such numbers. Everything so far is kept; "
    "the same command goes on from there. --on-unscored escalate would let the target rewrite "
    "every chunk that has no score"
)


class UnscoredWatch:
    """Counts scoring calls that ended without a usable score, over all rollouts of a run.

    One usable score ends the count. When it is full, the target is asked once more, about a fixed
    text, so that the error can say whether it scores anything at all.
    """

    def __init__(self, reaction: OnUnscored, check: CheckScores) -> None:
        self._reaction = reaction
        self._check = check
        self._in_a_row = 0
        self._asking = anyio.Lock()
        self._diagnosis: str | None = None

    def usable(self) -> None:
        """Note a usable score."""
        self._in_a_row = 0

    async def unusable(self, engine: Engine, error: BadReply) -> None:
        """Note a call that ended without one.

        :raises UnusableScores: it was one too many.
        """
        self._in_a_row += 1
        if self._reaction == "escalate" or self._in_a_row < IN_A_ROW:
            return
        async with self._asking:
            if self._diagnosis is None:
                self._diagnosis = await _diagnosed(engine, self._check)
        problem = (
            f"{self._in_a_row} chunks in a row came back without a usable score "
            f"({error.problem}); {self._diagnosis}"
        )
        raise UnusableScores(engine.spec.name, problem, _ADVICE) from error


async def _diagnosed(engine: Engine, check: CheckScores) -> str:
    """Say whether the engine scores a fixed text."""
    first, *rest = engine.tokenizer.encode(_PROBE_TEXT)
    request = ScoreRequest((first,), tuple(rest))
    try:
        with anyio.fail_after(60):
            check(await engine.score(request), request, engine.spec)
    except (EngineError, TimeoutError) as error:
        reason = error.problem if isinstance(error, EngineError) else "no answer within 60 s"
        return f"a fixed sentence is not scored either ({reason})"
    return "a fixed sentence is scored, so the trouble is with these chunks or with the load"
