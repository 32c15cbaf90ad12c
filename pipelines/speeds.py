"""A run's measured speeds under method exact: how much to draft before a score, and who writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from atts.core import Role

_UNKNOWN = 8  # tokens that are drafted before a score while little is known
_CHUNKS = 8  # that are counted of a stretch at least, or half as many as are in flight
_GAIN = 1.05  # in tokens a second, for which the draft writes
_SLOWER = 1.5  # a token of one chunk took this many times as long: no stretch is tried
# a token of the draft's chunk took so small a part of the target's time: a stretch is tried at once,
# among many chunks in flight; others wait until the run may lose so many chunks' time
_SURE = 0.4
_UNSURE = 1.5
_AFTER_LOSS = 16  # stretches without a look after a chunk or a stretch that lost
_LONGEST = 64  # stretches between two looks
# share of the run's time that drafting may have lost when it stops, and when it may try again
_MOST_LOST = 0.02, 0.012
_GRACE = 0.25  # share of the time of one of the target's chunks that the first try may lose
_FORGETTING = 0.8  # weight that a new chunk leaves to the mean of the target's earlier chunks


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
        """Return the number of tokens to draft that brings the most target tokens per second.

        Only a few while little is known: a draft that the target rejects at once has cost its time.

        >>> DraftLength(1000, 980, 1000, 1.0, 30, 0.6).length(64)
        36
        >>> DraftLength(1000, 700, 1000, 2.0, 300, 3.0).length(64)
        3
        """
        if self.tested < 50 or not self.draft_seconds or not self.score_seconds:
            return min(most, _UNKNOWN)
        share = (self.accepted + 1) / (self.tested + 2)
        per_token = self.draft_seconds / self.drafted
        per_score = self.score_seconds / self.scores

        def goodput(count: int) -> float:
            return (1 - share ** (count + 1)) / (1 - share) / (per_score + count * per_token)

        return max(range(1, most + 1), key=goodput)


@dataclass(slots=True, eq=False)
class BegunChunk:
    """A chunk that is being written: who began it, when, and what of it is counted."""

    writer: Role
    since: float
    is_look: bool
    tokens: int = 0  # accepted so far
    drafted_until: float = 0.0  # time at which `tokens` was last counted


@dataclass(slots=True)
class WriterChoice:
    """Choice of the writer of a run's next chunks under method exact: the target itself, or the
    draft with the target's draws.

    The text is the same; what counts is the tokens that all rollouts together write a second. The
    target begins, so that its own speed is known. Then the draft writes one chunk, and a stretch if
    that chunk was much faster, or once the run is long enough to lose a stretch; where it wrote
    more tokens a second, it continues. Stretches of the better writer are followed by such tries of the other one
    now and then.

    What a try loses, compared with the target's speed, is known after each score. Once tries have
    lost 2 % of the run's time, or early in a run a quarter of a chunk's time, the target finishes
    the chunks that the draft has begun.
    """

    writer: Role = "target"  # writer of the present stretch
    best: Role = "target"
    # tokens a second, of all rollouts
    rates: dict[Role, float] = field(default_factory=dict[Role, float])
    # for a token of the last chunk
    seconds: dict[Role, float] = field(default_factory=dict[Role, float])
    in_flight: list[BegunChunk] = field(default_factory=list[BegunChunk])  # in flight
    chunk_seconds: float = 0.0  # mean of the target's chunks
    before: int = 0  # chunks still to end that began before this stretch
    ended: int = 0  # chunks since then
    tokens: int = 0  # tokens of these chunks
    busy: float = 0.0  # seconds of these, while something was in flight
    now: float = 0.0
    elapsed: float = 0.0  # seconds of the run while something was in flight
    lost: float = 0.0  # seconds of these that were lost by tries that are over
    tried_since: float | None = None  # when the draft's present try began
    tried_busy: float = 0.0
    tried_tokens: float = 0.0
    stay: int = 1  # stretches of the better one between two looks at the other
    left: int = 1  # stretches until the next look
    is_look_due: bool = False
    is_looking: bool = False

    def begin(self, now: float) -> BegunChunk:
        """Return who writes the next chunk."""
        self._pass(now)
        begun = BegunChunk(self.writer, now, is_look=False)
        if self.is_look_due and self._may_try():
            self.is_look_due = False
            self.is_looking = True
            begun = BegunChunk(self._other, now, is_look=True)
        self.in_flight.append(begun)
        return begun

    def wrote(self, begun: BegunChunk, tokens: int, now: float) -> None:
        """Count tokens of a chunk that is not finished."""
        self._pass(now)
        begun.tokens += tokens
        begun.drafted_until = now
        if self.tried_since is not None:
            self.tried_tokens += tokens
            if self._try_loss() > self._allowance():
                self._give_up()

    def is_given_up(self, begun: BegunChunk, now: float) -> bool:
        """Return whether the target should finish a chunk that the draft has begun."""
        if not begun.is_look:
            return self.writer == "target"
        if "target" not in self.seconds:
            return False
        excess = now - begun.since - begun.tokens * self.seconds["target"]
        return excess > self._allowance()

    def end(self, begun: BegunChunk, tokens: int, now: float) -> None:
        """Count a chunk of so many tokens in all, who ever wrote its rest."""
        self._pass(now)
        self.in_flight.remove(begun)
        seconds = now - begun.since
        if begun.writer == "target":
            known = self.chunk_seconds or seconds
            self.chunk_seconds = _FORGETTING * known + (1 - _FORGETTING) * seconds
            self.seconds["target"] = seconds / max(1, tokens)
        else:
            until = max(begun.drafted_until, begun.since)
            self.seconds["draft"] = (until - begun.since) / max(1, begun.tokens)
        if self.tried_since is not None:
            # share of a chunk begun before the try that was written since
            share = min(1.0, (now - self.tried_since) / seconds) if seconds else 1.0
            self.tried_tokens += share * (tokens - begun.tokens)
        if begun.is_look:
            self._looked(begun, tokens, seconds)
        elif self.before:
            self.before -= 1
            self.busy = 0.0
        else:
            self.ended += 1
            self.tokens += tokens
            if self.ended >= max(_CHUNKS, len(self.in_flight) // 2):
                self._stretched(self.tokens / self.busy if self.busy else 0.0)

    def fail(self, begun: BegunChunk, now: float) -> None:
        """Count a chunk that was not written."""
        self._pass(now)
        self.in_flight.remove(begun)
        if begun.is_look:
            self.is_looking = False
            self.is_look_due = True

    def _pass(self, now: float) -> None:
        if self.in_flight:
            passed = now - self.now
            self.busy += passed
            self.elapsed += passed
            self.tried_busy += passed
        self.now = now

    @property
    def _other(self) -> Role:
        return "draft" if self.best == "target" else "target"

    def _may_try(self) -> bool:
        """Return whether the draft may lose something again; the target is always tried."""
        return self.best == "draft" or self.lost <= _MOST_LOST[1] * self.elapsed

    def _allowance(self) -> float:
        """Return the seconds that the present try may lose."""
        return max(_MOST_LOST[0] * self.elapsed - self.lost, _GRACE * self.chunk_seconds)

    def _try_loss(self) -> float:
        """Return the seconds that the try took beyond what its tokens take at the target's speed.

        The target's chunks in flight count as written so far at the speed of its last chunk.
        """
        assert self.tried_since is not None, "nothing is tried"
        pending = 0.0
        for begun in self.in_flight:
            if begun.writer == "target":
                pending += self.now - max(begun.since, self.tried_since)
        written = self.tried_tokens + pending / self.seconds["target"]
        return self.tried_busy - written / self.rates["target"]

    def _give_up(self) -> None:
        """Let the target finish what the draft began, and all that follows."""
        self.best = "target"
        self._stay(max(_AFTER_LOSS, 2 * self.stay))
        self._go_on("target")

    def _looked(self, begun: BegunChunk, tokens: int, seconds: float) -> None:
        """Compare after the other writer wrote one chunk."""
        self.is_looking = False
        if begun.writer == "draft" and "target" in self.seconds:
            excess = seconds - tokens * self.seconds["target"]
            self.lost += max(0.0, excess) / (len(self.in_flight) + 1)
        if begun.writer == self.best:  # this writer has become the best one meanwhile
            return
        if self._is_promising():
            self._go_on(self._other)
        else:
            self._stay(max(_AFTER_LOSS, 2 * self.stay))

    def _is_promising(self) -> bool:
        """Return whether the other writer's chunk justifies a stretch.

        One chunk among many says little of the tokens that all together would write: where both
        engines share processors, drafts for all of them slow down the target.
        """
        target = self.seconds.get("target", 0.0)
        draft = self.seconds["draft"]
        if self.best == "draft":
            return target < _SLOWER * draft
        if not (target and self.rates["target"]):  # no time has passed: nothing is to be gained
            return False
        count = len(self.in_flight) + 1
        if draft < (_SURE + (1 / _GAIN - _SURE) / count) * target:
            return self._may_try()
        return _MOST_LOST[0] * self.elapsed - self.lost > _UNSURE * self.chunk_seconds

    def _stretched(self, rate: float) -> None:
        """Compare after a stretch."""
        was = self.rates.get(self.writer, rate)
        self.rates[self.writer] = (was + rate) / 2
        is_try = self.writer != self.best
        self.left -= 1
        drafted = self.rates.get("draft", 0.0)
        best: Role = "draft" if drafted > _GAIN * self.rates.get("target", 0.0) else "target"
        if best != self.best:
            self._stay(1)
        elif is_try:
            self._stay(max(_AFTER_LOSS, 2 * self.stay))
        self.is_look_due = self.left <= 0 and not self.is_looking
        self.best = best
        self._go_on(best)

    def _go_on(self, writer: Role) -> None:
        """Begin a stretch."""
        if self.tried_since is not None:
            self.lost += max(0.0, self._try_loss())
        self.tried_since = self.now if writer == "draft" != self.best else None
        self.tried_busy = 0.0
        self.tried_tokens = 0.0
        self.before = len(self.in_flight) if writer != self.writer else 0
        self.writer = writer
        self.ended = 0
        self.tokens = 0
        self.busy = 0.0

    def _stay(self, stretches: int) -> None:
        self.stay = self.left = min(stretches, _LONGEST)
