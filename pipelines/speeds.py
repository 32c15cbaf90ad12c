"""A run's measured speeds under method exact: how much to draft before a score, and who writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from atts.core import Role

_PIECES = 8  # that are counted of a stretch at least, or half as many as are in flight
_GAIN = 1.1  # in tokens a second, for which the target writes itself
_SLOWER = 1.5  # a token of one piece took this many times as long: no stretch is tried
_AFTER_LOSS = 16  # stretches without a look after a stretch that lost
_LONGEST = 64  # stretches between two looks


@dataclass(slots=True)
class DraftLength:
    """Statistics of a run's drafts: the accepted share of their tokens, and the time to write and
    score them.

    It decides how much is drafted before a score, and so changes when calls are made, never what is
    written.
    """

    tested: int = 0  # drafted tokens before which every token was accepted
    accepted: int = 0
    drafted: int = 0
    draft_seconds: float = 0.0
    scores: int = 0
    score_seconds: float = 0.0

    def length(self, most: int) -> int:
        """Return how many tokens to draft: those that bring most target tokens a second.

        All of them while little is known.

        >>> DraftLength(1000, 980, 1000, 1.0, 30, 0.6).length(64)
        36
        >>> DraftLength(1000, 700, 1000, 2.0, 300, 3.0).length(64)
        3
        """
        if self.tested < 50 or not self.draft_seconds or not self.score_seconds:
            return most
        share = (self.accepted + 1) / (self.tested + 2)
        per_token = self.draft_seconds / self.drafted
        per_score = self.score_seconds / self.scores

        def goodput(count: int) -> float:
            return (1 - share ** (count + 1)) / (1 - share) / (per_score + count * per_token)

        return max(range(1, most + 1), key=goodput)


@dataclass(slots=True)
class WriterChoice:
    """Choice of the writer of a run's next chunks under method exact: the draft, with the target's
    draws, or the target itself.

    The text is the same; what counts is the tokens that all rollouts together write a second.
    Stretches of the better writer continue; after some of them the other writes one piece, and a
    stretch unless that was far slower.
    """

    writer: Role = "draft"  # of the present stretch
    best: Role = "draft"
    # tokens a second, of all rollouts
    rates: dict[Role, float] = field(default_factory=dict[Role, float])
    # for a token of the last piece
    seconds: dict[Role, float] = field(default_factory=dict[Role, float])
    in_flight: int = 0
    before: int = 0  # pieces still to end that began before this stretch
    ended: int = 0  # pieces since then
    tokens: int = 0  # of these
    busy: float = 0.0  # seconds of these, while something was in flight
    now: float = 0.0
    stay: int = 1  # stretches of the better one between two looks at the other
    left: int = 1  # of these
    look: Literal["no", "due", "begun"] = "no"

    def begin(self, now: float) -> Role:
        """Return who writes the next piece."""
        self._pass(now)
        self.in_flight += 1
        if self.look != "due":
            return self.writer
        self.look = "begun"
        return self._other

    def end(self, writer: Role, tokens: int, seconds: float, now: float) -> None:
        """Count a piece that was written in so many seconds."""
        self._pass(now)
        self.in_flight -= 1
        self.seconds[writer] = seconds / max(1, tokens)
        if self.look == "begun" and writer == self._other:
            self._looked()
            return
        if self.before:
            self.before = self.before - 1
            self.busy = 0.0
            return
        self.ended = self.ended + 1
        self.tokens = self.tokens + tokens
        if self.ended >= max(_PIECES, self.in_flight // 2):
            self._stretched(self.tokens / self.busy if self.busy else 0.0)

    def fail(self, now: float) -> None:
        """Count a piece that was not written."""
        self._pass(now)
        self.in_flight -= 1
        self.look = "due" if self.look == "begun" else self.look

    def _pass(self, now: float) -> None:
        self.busy += now - self.now if self.in_flight else 0.0
        self.now = now

    @property
    def _other(self) -> Role:
        return "draft" if self.best == "target" else "target"

    def _looked(self) -> None:
        """Compare after the other writer wrote one piece."""
        self.look = "no"
        if self.seconds[self._other] < _SLOWER * self.seconds[self.best]:
            self._go_on(self._other)
        else:
            self._stay(2 * self.stay)

    def _stretched(self, rate: float) -> None:
        """Compare after a stretch."""
        was = self.rates.get(self.writer, rate)
        self.rates[self.writer] = (was + rate) / 2
        is_try = self.writer != self.best
        self.left = self.left - 1
        best: Role = (
            "target" if self.rates.get("target", 0.0) > _GAIN * self.rates["draft"] else "draft"
        )
        if best != self.best:
            self._stay(1)
        elif is_try:
            self._stay(max(_AFTER_LOSS, 2 * self.stay))
        self.look = "due" if self.left <= 0 else "no"
        self.best = best
        self._go_on(best)

    def _go_on(self, writer: Role) -> None:
        """Begin a stretch."""
        self.before = self.in_flight if writer != self.writer else 0
        self.writer = writer
        self.ended = 0
        self.tokens = 0
        self.busy = 0.0

    def _stay(self, stretches: int) -> None:
        self.stay = self.left = min(stretches, _LONGEST)
