"""The pages of single problems in a report, which are shortened to fit."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from atts.core import Outcome, Rollout, Turn
from atts.files import jsonable
from atts.journal import FinishedProblem, FinishedSample

# possible limits for the characters of a chunk; the largest that fits is used
_LIMITS = (4000, 1500, 600, 240, 80, 0)
_FEWEST = 40  # assumed number of problems that share a budget if their number is not known
MOST = 5000
"""The most problems that a page shows; a browser sorts and filters this many rows without a delay.
"""


class Pages:
    """One packed page per problem: JSON, raw deflate, base64, so that no model output can be read
    as markup.
    """

    def __init__(self, budget: int, problems: int) -> None:
        """Create pages of at most `budget` bytes in total for `problems` problems; 0 if the number
        is not known.
        """
        self._each = budget // max(min(problems, MOST), _FEWEST)
        self._packed: dict[str, str] = {}
        # number of pages so far, for problems that a reader looks for first and for others
        self._counts = {True: 0, False: 0}
        self.shortened = 0  # number of pages whose texts were cut to fit
        # the smallest limit so far, in characters per chunk, if a text was cut
        self.limit = _LIMITS[0]

    def add(
        self, outcome: Outcome, flags: Mapping[int, tuple[str, ...]], brief: FinishedProblem
    ) -> None:
        """Store this problem's page, with texts as long as its share of the budget allows.

        Nothing is stored if no share is left, or if enough problems of this kind are stored.
        """
        is_wanted = looked_for(brief.verdict, flags.values())
        if not self._each or self._counts[is_wanted] >= MOST:
            return
        self._counts[is_wanted] += 1
        turns = (turn for rollout in outcome.rollouts for turn in rollout.turns)
        longest = max(
            (len(chunk.text) for turn in turns for chunk in (*turn.chunks, *turn.discarded)),
            default=0,
        )
        packed = ""
        limit = longest
        for limit in (longest, *(limit for limit in _LIMITS if limit < longest)):
            packed = pack(_story(outcome, flags, brief, limit))
            if len(packed) <= self._each:
                break
        if limit < longest:
            self.shortened += 1
            self.limit = min(self.limit, limit)
        self._packed[outcome.problem.id] = packed

    def shown(self, problems: Sequence[tuple[str, bool]]) -> Collection[str]:
        """Choose the problems to show, each with whether a reader looks for it first.

        If there are too many, problems that have a page are chosen.
        """
        names = [name for name, _ in problems]
        if len(problems) <= MOST:
            return names
        wanted = [name for name, is_wanted in problems if is_wanted and name in self._packed]
        others = [name for name, is_wanted in problems if not is_wanted and name in self._packed]
        return [*wanted, *others][:MOST]

    def __getitem__(self, problem: str) -> str:
        """Return the packed page of a problem; "" if it has none."""
        return self._packed.get(problem, "")


def looked_for(verdict: str | None, flags: Iterable[tuple[str, ...]]) -> bool:
    """Return True for a problem that a reader looks for first: not correct, or with a flag."""
    return verdict != "correct" or any(flags)


def pack(story: Mapping[str, Any]) -> str:
    """Return the data as base64 of raw deflate, which a browser can unpack."""
    try:
        text = _plain(story)
    # a number that JSON cannot write, such as NaN; it is rare, and searching for it first would be
    # slow
    except ValueError:
        text = _plain(jsonable(story))
    squeezer = zlib.compressobj(6, zlib.DEFLATED, -15)
    body = squeezer.compress(text.encode("utf-8", "replace")) + squeezer.flush()
    return base64.b64encode(body).decode("ascii")


def _plain(story: Mapping[str, Any]) -> str:
    return json.dumps(story, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _story(
    outcome: Outcome, flags: Mapping[int, tuple[str, ...]], brief: FinishedProblem, limit: int
) -> dict[str, Any]:
    problem = outcome.problem
    return {
        "id": problem.id,
        "text": shorten(problem.text, max(limit, 600)),
        "reference": problem.answer,
        "answer": outcome.answer,
        "status": outcome.status,
        "why": outcome.why,
        "verdict": brief.verdict,
        "rule": brief.rule,
        "votes": [[shorten(answer, 200), weight] for answer, weight in outcome.votes.items()],
        "rollouts": [_rollout(rollout, flags.get(rollout.sample, ()), one, limit)
                     for rollout, one in zip(outcome.rollouts, brief.samples, strict=True)],
    }  # fmt: skip


def _rollout(
    rollout: Rollout, flags: tuple[str, ...], brief: FinishedSample, limit: int
) -> dict[str, Any]:
    return {
        "n": rollout.sample,
        "finish": rollout.finish or "cancelled",
        "answer": rollout.answer,
        "verdict": brief.verdict,
        "rule": brief.rule,
        "error": rollout.error,
        "flags": flags,
        "draft": rollout.usage.draft_tokens,
        "target": rollout.usage.target_tokens,
        "turns": [_turn(turn, limit) for turn in rollout.turns],
    }


def _turn(turn: Turn, limit: int) -> dict[str, Any]:
    decision = turn.decision
    return {
        "i": turn.index,
        "score": turn.score,
        "p": decision.p if decision else None,
        "action": decision.action if decision else None,
        "why": decision.why if decision else "",
        "note": turn.remark,
        "chunks": list(_chunks(turn, limit)),
    }


def _chunks(turn: Turn, limit: int) -> Iterator[list[Any]]:
    """Yield [author, fate, text, tokens, how it ended] of each chunk, discarded chunks first."""
    escalated = turn.decision is not None and turn.decision.escalate
    for fate, chunks in (("discarded", turn.discarded), ("kept", turn.chunks)):
        for chunk in chunks:
            what = (
                fate
                if fate == "discarded" or not (escalated and chunk.author == "draft")
                else "escalated"
            )
            yield [chunk.author, what, shorten(chunk.text, limit), chunk.tokens, chunk.ended]


def shorten(text: str, limit: int) -> str:
    """Return the text, without its middle if it has more than `limit` characters.

    >>> shorten("one two three four", 12)
    'one tw … [6 characters] … e four'
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    tail = text[-half:] if half else ""
    return f"{text[:half]} … [{len(text) - 2 * half} characters] … {tail}"
