"""Replies to finished requests, and the state of runs that `/atts/runs` shows.

A reply's text ends before the first of the request's stop strings. An engine's busy share is the
fraction of the last minute in which it had a call in flight.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from anyio import CancelScope

from atts.core import CallSpan, Decision, Outcome, Rollout, Turn
from atts.journal import Event, RolloutFinished, TurnFinished
from atts.ledger import Account
from atts.run import Notice
from atts.serving.requests import SolveRequest


class StoppedText:
    """Text that arrives in parts and is passed on up to its first stop string.

    If several stop strings occur, the text ends before the one that is complete first, because a
    model would stop there. If several are complete at the same character, it ends before the
    longest. Text at the end that may be the beginning of a stop string is kept back until more
    arrives.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        # text that is not sent yet, because it may be the beginning of a stop string
        self._held = ""
        self.is_stopped = False  # whether a complete stop string has arrived

    def add(self, text: str) -> str:
        """Add a part of the text, and return the text that can be sent now."""
        if self.is_stopped:
            return ""
        text = self._held + text
        # No stop string begins in the text that was sent, so search only the text after it.
        found = [(text.find(stop), len(stop)) for stop in self._stop if stop in text]
        if found:
            self.is_stopped = True
            self._held = ""
            begin, _ = min(found, key=lambda one: (sum(one), one[0]))
            return text[:begin]
        shown = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[shown:]
        return text[:shown]

    def end(self) -> str:
        """Return the text that was kept back. Call this after the last part."""
        held = self._held
        self._held = ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are also the beginning of a stop string.

    >>> _overlap("so far\\nQues", "\\nQuestion:")
    5
    """
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def stopped_text(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return a text cut before its first stop string, and whether it contained one.

    >>> stopped_text("7\\n\\nQuestion: what", ["Question:", "\\n\\n"])
    ('7', True)
    """
    growing = StoppedText(stop)
    shown = growing.add(text) + growing.end()
    return shown, growing.is_stopped


WINDOW_SECONDS = 60.0


class BusyShare:
    """Time intervals of the last minute in which each engine had a call in flight.

    Overlapping intervals are merged.
    """

    def __init__(self) -> None:
        self._work = dict[str, deque[tuple[float, float]]]()
        self._began: float | None = None

    def add(self, engine: str, started: float, ended: float) -> None:
        """Add the time interval of one call. Calls must be added in the order in which they
        ended.
        """
        if self._began is None or started < self._began:
            self._began = started
        intervals = self._work.setdefault(engine, deque())
        while intervals and intervals[-1][1] >= started:
            before = intervals.pop()
            started = min(started, before[0])
            ended = max(ended, before[1])
        intervals.append((started, ended))
        while intervals[0][1] < ended - WINDOW_SECONDS:
            intervals.popleft()

    @property
    def num_intervals(self) -> int:
        """Return how many intervals are stored for all engines together."""
        return sum(map(len, self._work.values()))

    def shares(self, now: float) -> dict[str, float]:
        """Return the fraction of the last minute in which each engine had a call in flight.

        If the first call started less than a minute ago, it is the fraction of the time since then.

        >>> busy = BusyShare()
        >>> busy.add("draft", 0.0, 10.0)
        >>> busy.add("draft", 5.0, 15.0)
        >>> busy.add("target", 18.0, 20.0)
        >>> busy.shares(20.0)
        {'draft': 0.75, 'target': 0.1}
        """
        if self._began is None:
            return {}
        since = max(self._began, now - WINDOW_SECONDS)
        length = now - since
        if length <= 0:
            return dict.fromkeys(self._work, 0.0)
        shares = dict[str, float]()
        for engine, intervals in self._work.items():
            worked = sum(max(0.0, min(end, now) - max(start, since)) for start, end in intervals)
            shares[engine] = worked / length
        return shares


RunWord = Literal["waiting", "running", "answered", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a request, with its spending and the gate's guarantee."""

    run: str
    request: SolveRequest
    outcome: Outcome
    account: Account
    rate: float
    promise: tuple[str, str]  # the gate's guarantee, and what voids it
    created: int

    @property
    def speaker(self) -> Rollout | None:
        """Return the rollout whose text the reply shows.

        This is the first rollout with the voted answer. If no rollout has that answer, it is the
        first rollout with any text.
        """
        rollouts = self.outcome.rollouts
        agreeing = [one for one in rollouts if one.answer and one.answer == self.outcome.answer]
        return next(iter([*agreeing, *(one for one in rollouts if one.turns)]), None)

    @property
    def text(self) -> str:
        """Return the text of the rollout that the reply shows."""
        return "" if self.speaker is None else self.speaker.text

    @property
    def reasoning(self) -> str:
        """Return the reasoning part of the reply.

        It is empty if a single model answers without a vote, because then the whole text is the
        content.
        """
        return "" if self.request.policy.is_plain else self.text

    @property
    def answer(self) -> str | None:
        """Return the voted answer.

        It is None if a single model answers without a vote.
        """
        return None if self.request.policy.is_plain else self.outcome.answer

    @property
    def content(self) -> str:
        """Return the content of the reply: the voted answer, or the whole text of the shown rollout
        if there is no voted answer. The content is cut before its first stop string.
        """
        return self._content[0]

    @property
    def _content(self) -> tuple[str, bool]:
        whole = self.text if self.answer is None else self.answer
        return stopped_text(whole, self.request.stop)

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """Return "length" if a limit cut the reply, or else "stop". A reply with a voted answer is
        always complete.
        """
        if self.answer is not None or self._content[1]:
            return "stop"
        is_cut = self.speaker is None or self.speaker.finish != "end"
        return "length" if self.account.limit or is_cut else "stop"

    def usage(self) -> dict[str, Any]:
        """Return the token usage of all answered engine calls, with the field names of a chat
        completion.
        """
        answered = self.account.spent - self.account.unanswered
        written = self.account.written
        plain: dict[str, Any] = {
            "prompt_tokens": answered.total_tokens - written,
            "completion_tokens": written,
            "total_tokens": answered.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.account.cached},
            "completion_tokens_details": {
                "reasoning_tokens": 0 if self.request.policy.is_plain else written
            },
        }
        if self.account.prices:
            plain["cost"] = self.account.spent.dollars
        return plain

    def facts(self) -> dict[str, Any]:
        """Return the reply's field `atts`: votes, token counts, rate, guarantee and spending."""
        outcome = self.outcome
        ends = Counter(rollout.finish for rollout in outcome.rollouts)
        cancelled = ends["cancelled"] + ends["settled"]
        decisions = [
            turn.decision
            for rollout in outcome.rollouts
            for turn in rollout.turns
            if turn.decision is not None
        ]
        usage = outcome.usage
        policy = self.request.policy
        votes = () if policy.is_plain else outcome.votes.items()
        facts: dict[str, Any] = {
            "run": self.run,
            "answer": self.answer,
            "votes": {one: vote for one, vote in votes if math.isfinite(vote)},
            "settled": outcome.why,
            "samples": {
                "started": sum(bool(rollout.turns) for rollout in outcome.rollouts),
                "finished": len(outcome.rollouts) - cancelled - ends["failed"],
                "cancelled": cancelled,
                "failed": ends["failed"],
            },
            "by_model": {
                "draft": {"completion": usage.draft_tokens, "prompt": usage.draft_prefill_tokens},
                "target": {
                    "completion": usage.target_tokens,
                    "prompt": usage.target_prefill_tokens,
                    "scored": usage.scored_tokens,
                },
            },
            "rate": {
                "nominal": self.rate,
                "realised": _escalated(decisions) / len(decisions) if decisions else None,
                "chunks": len(decisions),
            },
            "guarantee": self.promise[0],
            "voided_by": self.promise[1],
            "spent": self.account.as_json(),
            "limit": self.account.limit or None,
            "policy": policy.name,
            "method": policy.method,
            "combine": "none" if policy.is_plain else self.request.atts.combine,
            "report": f"/atts/runs/{self.run}",
            "ignored": list(self.request.ignored),
        }
        if self.request.atts.trace != "none":
            facts["trace"] = [self._trace(rollout) for rollout in outcome.rollouts]
        return facts

    def _trace(self, rollout: Rollout) -> dict[str, Any]:
        """Return a summary of one rollout. It includes the text of every turn only if the request
        asks for the full trace.
        """
        decisions = [turn.decision for turn in rollout.turns if turn.decision is not None]
        plain: dict[str, Any] = {
            "sample": rollout.sample,
            "finish": rollout.finish,
            "answer": None if self.request.policy.is_plain else rollout.answer,
            "turns": len(rollout.turns),
            "judged": len(decisions),
            "escalated": _escalated(decisions),
            "draft_tokens": rollout.usage.draft_tokens,
            "target_tokens": rollout.usage.target_tokens,
        }
        if self.request.atts.trace == "full":
            plain["chunks"] = [_turn(turn) for turn in rollout.turns]
        return plain


def _escalated(decisions: list[Decision]) -> int:
    return sum(decision.escalate for decision in decisions)


def _turn(turn: Turn) -> dict[str, Any]:
    decision = turn.decision
    score = turn.score
    return {
        "authors": [chunk.author for chunk in turn.chunks],
        "text": "".join(chunk.text for chunk in turn.chunks),
        "restarts": turn.restarts,
        "discarded": "".join(chunk.text for chunk in turn.discarded),
        "score": score if score is not None and math.isfinite(score) else None,
        "action": None if decision is None else decision.action,
        "p": None if decision is None else decision.p,
    }


@dataclass(slots=True)
class LiveRun:
    """Listener that follows a run's rollouts while they are written (`atts.run.Listener`)."""

    # This function is called for each new turn. Its arguments are the index of the rollout, the text
    # of the turn, and True if this text replaces all earlier text of the rollout.
    written: Callable[[int, str, bool], None] | None = None
    # index of the rollout whose first turn finished before those of all others
    leader: int | None = None
    text: str = ""  # text so far of the rollout with the index `leader`
    # number of finished turns of each rollout, keyed by the rollout's index
    turns: Counter[int] = field(default_factory=Counter[int])
    # answer of each rollout that has ended, keyed by the rollout's index
    ended: dict[int, str | None] = field(default_factory=dict[int, str | None])
    judged: int = 0
    escalated: int = 0
    # whether one model answers alone, so that its text is the reply without a vote
    is_plain: bool = False
    busy: BusyShare | None = None  # collects the start and end of each engine call of this run

    def recalled(self, event: Event) -> None:
        """Handle an event of an earlier session of the run.

        Engine calls of earlier sessions do not count as busy time.
        """
        if not isinstance(event, CallSpan):
            self.notify(event)

    def notify(self, event: Notice) -> None:
        """Handle an engine call, a finished turn or the end of a rollout. Other events are
        ignored.
        """
        if isinstance(event, CallSpan):
            if self.busy is not None and event.source == "live":
                self.busy.add(event.engine, event.started, event.ended)
        elif isinstance(event, TurnFinished):
            self._turned(event.sample, event.turn)
        elif isinstance(event, RolloutFinished):
            self.ended[event.sample] = None if self.is_plain else event.answer

    def _turned(self, sample: int, turn: Turn) -> None:
        text = "".join(chunk.text for chunk in turn.chunks)
        if turn.index < self.turns[sample]:
            return  # A resumed run reports again the turns that an earlier session has counted.
        self.turns[sample] = turn.index + 1
        if turn.decision is not None:
            self.judged += 1
            self.escalated += turn.decision.escalate
        if self.leader is None:
            self.leader = sample
        if sample == self.leader:
            self.text = text if turn.restarts else self.text + text
        if self.written is not None:
            self.written(sample, text, turn.restarts)

    def as_json(self) -> dict[str, Any]:
        """Return the run's progress so far as JSON data: rollouts, turns, votes and judged
        chunks.
        """
        return {
            "rollouts": {"running": len(self.turns.keys() - self.ended), "ended": len(self.ended)},
            "turns": self.turns.total(),
            "votes": dict(Counter(answer for answer in self.ended.values() if answer is not None)),
            "rate": {
                "realised": self.escalated / self.judged if self.judged else None,
                "chunks": self.judged,
            },
        }


@dataclass(slots=True, eq=False)
class ServedRun:
    """A request that is waiting, running or finished, as `/atts/runs` shows it."""

    run: str
    model: str
    policy: str
    user: str
    samples: int
    rate: float
    account: Account
    began: float = field(default_factory=time.time)
    ended: float | None = None
    status: RunWord = "waiting"
    live: LiveRun = field(default_factory=LiveRun, repr=False)
    # the field `atts` of the reply, without the texts of the conversation; None until the run ends
    facts: dict[str, Any] | None = None
    scope: CancelScope = field(default_factory=CancelScope, repr=False)

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended."""
        return self.status in ("answered", "cancelled", "failed")

    def end(self, status: RunWord, facts: dict[str, Any] | None = None) -> None:
        """Record how and when the run ended, and delete its text, which is only shown while the run
        is in progress.
        """
        self.status = status
        self.ended = time.time()
        if facts is not None:
            self.facts = {name: value for name, value in facts.items() if name != "trace"}
        self.live.written = None
        self.live.busy = None
        self.live.text = ""

    def as_json(self, *, with_text: bool = False) -> dict[str, Any]:
        """Return the run as JSON data, without NaN and infinities.

        `with_text` adds the text so far of the leading rollout, the first one to finish a turn.
        """
        until = time.time() if self.ended is None else self.ended
        plain: dict[str, Any] = {
            "run": self.run,
            "status": self.status,
            "created": int(self.began),
            "seconds": round(until - self.began, 3),
            "model": self.model,
            "policy": self.policy,
            "user": self.user,
            "samples_asked": self.samples,
            "rate_asked": self.rate,
            "spent": self.account.as_json(),
            "caps": self.account.caps.as_json(),
            "reserved_calls": self.account.reserved.calls,
        }
        if self.facts is not None:
            return {**plain, **self.facts}
        plain["live"] = self.live.as_json()
        if with_text and self.live.leader is not None:
            plain["leader"] = {"sample": self.live.leader, "text": self.live.text}
        return plain
