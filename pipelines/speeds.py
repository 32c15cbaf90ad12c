"""Measure speeds under method exact, to choose how many tokens to draft and which model writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from atts.core import Role

_UNKNOWN = 8  # number of tokens to draft before a scoring call, until enough drafts were tested
# A stretch is a series of chunks written by one model. It has at least this number of chunks, or
# half the number of chunks in flight if that is more.
_CHUNKS = 8
# the draft writes if it gives at least this number of times the target's tokens per second
_GAIN = 1.05
# While the draft is the faster writer, the target is not tried for a stretch if it is much slower.
# "Much slower" means at least this many times the draft's time per token.
_SLOWER = 1.5
# If the draft's chunk took at most this share of the target's time per token, a stretch of the
# draft is tried at once, even with many chunks in flight. If it took more, the stretch waits until
# the run may lose the time of `_UNSURE` chunks.
_SURE = 0.4
_UNSURE = 1.5
# number of stretches by the faster writer after the first unsuccessful try of the slower writer
_AFTER_LOSS = 16
# largest number of stretches by the faster writer between two tries of the slower writer
_LONGEST = 64
# Shares of the run's time that drafting has lost. Drafting stops above the first share, and may
# start again below the second share.
_MOST_LOST = 0.02, 0.012
# a try of the draft is always allowed if it loses at most this share of the target's mean time per
# chunk
_GRACE = 0.25
_FORGETTING = 0.8  # weight of the old value when the mean time of the target's chunks is updated


@dataclass(slots=True)
class DraftLength:
    """Statistics of a run's drafts: the accepted share of tokens, and the times of writing and
    scoring.

    They decide how many tokens are drafted before a score. This affects the number of calls, but
    not the text.
    """

    # number of drafted tokens that were tested; tokens after a rejected token are not tested
    tested: int = 0
    accepted: int = 0
    drafted: int = 0
    draft_seconds: float = 0.0
    scores: int = 0
    score_seconds: float = 0.0

    def length(self, most: int) -> int:
        """Return the number of tokens to draft that gives the most target tokens per second.

        The number is small in the beginning, because drafts that the target rejects cost time.

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
    """An unfinished chunk, with the model that began it, its start time and its number of tokens so
    far.
    """

    writer: Role
    since: float
    is_look: bool
    tokens: int = 0  # number of tokens accepted so far
    drafted_until: float = 0.0  # time at which `tokens` was last updated


@dataclass(slots=True)
class WriterChoice:
    """The choice of the writer under method exact: the target alone, or the draft with checks by
    the target.

    The text is the same for both writers, so the choice depends only on the tokens per second of
    all rollouts together. The target writes first, so that its speed is known. Then the draft
    writes one chunk. The draft writes a stretch (several consecutive chunks) if its first chunk was
    much faster. If not, it writes a stretch once the run is so long that a slow stretch matters
    little. If the stretch gave more tokens per second, the draft continues. From time to time the
    slower writer gets another try.

    After each score, the time lost by the current try of the draft is estimated from the target's
    speed. If tries have lost 2 % of the run's time (early in a run: a quarter of a chunk's time),
    the target finishes the chunks that the draft has begun.
    """

    writer: Role = "target"  # model that writes the current stretch
    best: Role = "target"
    # tokens per second of all rollouts together, by writer
    rates: dict[Role, float] = field(default_factory=dict[Role, float])
    # seconds per token of the last chunk, by writer
    seconds: dict[Role, float] = field(default_factory=dict[Role, float])
    in_flight: list[BegunChunk] = field(default_factory=list[BegunChunk])  # chunks in flight
    chunk_seconds: float = 0.0  # mean seconds of a chunk that the target writes
    before: int = 0  # number of unfinished chunks that began before this stretch of chunks
    ended: int = 0  # number of chunks that ended in this stretch
    tokens: int = 0  # number of tokens of the chunks that ended in this stretch
    busy: float = 0.0  # seconds of the stretch in which a chunk was in flight
    now: float = 0.0
    elapsed: float = 0.0  # seconds of the run in which a chunk was in flight
    lost: float = 0.0  # seconds lost by finished tries of the draft
    tried_since: float | None = None  # start time of the draft's current try
    tried_busy: float = 0.0
    tried_tokens: float = 0.0
    stay: int = 1  # number of stretches by the faster writer between two tries of the slower writer
    # number of stretches by the faster writer until the next try of the slower writer
    left: int = 1
    is_look_due: bool = False
    is_looking: bool = False

    def begin(self, now: float) -> BegunChunk:
        """Begin a chunk: choose the model that writes it, and return the chunk."""
        self._pass(now)
        begun = BegunChunk(self.writer, now, is_look=False)
        if self.is_look_due and self._may_try():
            self.is_look_due = False
            self.is_looking = True
            begun = BegunChunk(self._other, now, is_look=True)
        self.in_flight.append(begun)
        return begun

    def wrote(self, begun: BegunChunk, tokens: int, now: float) -> None:
        """Count tokens that were added to an unfinished chunk."""
        self._pass(now)
        begun.tokens += tokens
        begun.drafted_until = now
        if self.tried_since is not None:
            self.tried_tokens += tokens
            if self._try_loss() > self._allowance():
                self._give_up()

    def is_given_up(self, begun: BegunChunk, now: float) -> bool:
        """Return whether the draft is too slow, so that the target should finish the chunk it has
        begun.
        """
        if not begun.is_look:
            return self.writer == "target"
        if "target" not in self.seconds:
            return False
        excess = now - begun.since - begun.tokens * self.seconds["target"]
        return excess > self._allowance()

    def end(self, begun: BegunChunk, tokens: int, now: float) -> None:
        """Count a finished chunk of `tokens` tokens, whichever model wrote its rest."""
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
            # if the chunk began before the try, count only the share of its tokens that was written
            # during the try
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
        """Remove a chunk that failed before it was finished."""
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
        """Return True if the slower writer may be tried now. The target may always be tried. The
        draft may be tried while drafting has lost little time.
        """
        return self.best == "draft" or self.lost <= _MOST_LOST[1] * self.elapsed

    def _allowance(self) -> float:
        """Return how many seconds the current try of the draft may lose."""
        return max(_MOST_LOST[0] * self.elapsed - self.lost, _GRACE * self.chunk_seconds)

    def _try_loss(self) -> float:
        """Return the seconds lost by the current try: its time minus the time that the target needs
        for the same tokens.

        For unfinished chunks of the target, the tokens so far are estimated from the speed of its
        last chunk.
        """
        assert self.tried_since is not None, "a trial of the draft must be in progress"
        pending = 0.0
        for begun in self.in_flight:
            if begun.writer == "target":
                pending += self.now - max(begun.since, self.tried_since)
        written = self.tried_tokens + pending / self.seconds["target"]
        return self.tried_busy - written / self.rates["target"]

    def _give_up(self) -> None:
        """Let the target finish the chunks that the draft began, and write the following chunks."""
        self.best = "target"
        self._stay(max(_AFTER_LOSS, 2 * self.stay))
        self._go_on("target")

    def _looked(self, begun: BegunChunk, tokens: int, seconds: float) -> None:
        """Decide, after a single chunk of the slower writer, whether to try this writer for a
        stretch.
        """
        self.is_looking = False
        if begun.writer == "draft" and "target" in self.seconds:
            excess = seconds - tokens * self.seconds["target"]
            self.lost += max(0.0, excess) / (len(self.in_flight) + 1)
        # in the meantime, this writer was found to be the faster writer
        if begun.writer == self.best:
            return
        if self._is_promising():
            self._go_on(self._other)
        else:
            self._stay(max(_AFTER_LOSS, 2 * self.stay))

    def _is_promising(self) -> bool:
        """Return whether the chunk of the slower writer was fast enough to justify a stretch.

        One fast chunk says little about the speed of all chunks together: if both engines share
        processors, drafting for all rollouts slows down the target.
        """
        target = self.seconds.get("target", 0.0)
        draft = self.seconds["draft"]
        if self.best == "draft":
            return target < _SLOWER * draft
        if not (target and self.rates["target"]):  # speeds are unknown, because no time has passed
            return False
        count = len(self.in_flight) + 1
        if draft < (_SURE + (1 / _GAIN - _SURE) / count) * target:
            return self._may_try()
        return _MOST_LOST[0] * self.elapsed - self.lost > _UNSURE * self.chunk_seconds

    def _stretched(self, rate: float) -> None:
        """Compare the writers' speeds after a stretch, and begin the next stretch."""
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
        """Begin a stretch of this writer, and reset the counts of the stretch."""
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
