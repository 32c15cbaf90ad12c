"""Measure speeds under method exact, to choose how many tokens to draft and which model writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from atts.core import Role

# The draft writes this many tokens before each scoring call, until enough of its tokens have been
# tested.
_UNKNOWN = 8
# A stretch is a series of chunks that one model writes. It ends after this many chunks, or half the
# number of chunks in flight if this is more.
_CHUNKS = 8
# The draft writes only if this gives at least this many times the tokens per second that the target
# gives.
_GAIN = 1.05
# If the draft is faster, the target sometimes writes one chunk as a test. A stretch of the target
# follows only if the target needed less than this many times the draft's time per token.
_SLOWER = 1.5
# If the target is faster, the draft sometimes writes one chunk as a test. If it needed at most this
# share of the target's time per token, a stretch of the draft follows at once. With few chunks in
# flight, a larger share is enough. If the draft needed more time, the stretch waits until the run
# may lose the time of `_UNSURE` chunks.
_SURE = 0.4
_UNSURE = 1.5
# After the first test that the slower model failed, the faster model writes this many stretches.
# After each further failure it writes twice as many.
_AFTER_LOSS = 16
# The faster model writes at most this many stretches before the slower model is tested again.
_LONGEST = 64
# Limits on the time that slow drafting has cost, as shares of the run's time. Above the first
# share, drafting stops; below the second share, it may be tried again.
_MOST_LOST = 0.02, 0.012
# Each try of the draft may lose at least this share of the mean time in which the target writes a
# chunk.
_GRACE = 0.25
# In the moving average of the target's time per chunk, the old average has this weight.
_FORGETTING = 0.8


@dataclass(slots=True)
class DraftLength:
    """Statistics on drafted tokens, which decide how many tokens the draft writes before the target
    scores them.

    The statistics are the share of accepted tokens, and the times of drafting and scoring. The
    draft length affects the number of calls, but not the text.
    """

    # drafted tokens that the target accepted or rejected; tokens after a rejected token do not
    # count
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
    """An unfinished chunk: the model that began it, its start time, and its tokens so far."""

    writer: Role
    since: float
    is_look: bool
    tokens: int = 0  # accepted tokens of the chunk so far
    drafted_until: float = 0.0  # time at which the last of these tokens were added


@dataclass(slots=True)
class WriterChoice:
    """The choice of the model that writes under method exact: the target alone, or the draft with
    checks by the target.

    The text is the same for both writers, so the choice depends only on the tokens per second of
    all rollouts together. The target writes first, so that its speed is known. Then the draft
    writes one chunk. If this chunk was much faster than the target's chunks, the draft writes a
    stretch (several consecutive chunks). If not, the draft writes a stretch once the run is so long
    that a slow stretch matters little. If the stretch gave more tokens per second than the target,
    the draft continues. From time to time the slower writer gets another try.

    After each score, the time lost by the current try of the draft is estimated from the target's
    speed. Tries may lose 2 % of the run's time, or early in a run a quarter of a chunk's time. If
    more time is lost, the target finishes the chunks that the draft has begun.
    """

    writer: Role = "target"  # the model that writes this stretch of chunks
    best: Role = "target"
    # for each writer: running average of the tokens per second of all rollouts together
    rates: dict[Role, float] = field(default_factory=dict[Role, float])
    # for each writer: seconds per token of its last chunk
    seconds: dict[Role, float] = field(default_factory=dict[Role, float])
    in_flight: list[BegunChunk] = field(default_factory=list[BegunChunk])
    chunk_seconds: float = 0.0  # moving average of the seconds in which the target writes a chunk
    before: int = 0  # unfinished chunks that began before this stretch, which are not counted in it
    ended: int = 0  # chunks of this stretch that have ended
    tokens: int = 0  # tokens of the ended chunks of this stretch
    busy: float = 0.0  # seconds of this stretch in which at least one chunk was in flight
    now: float = 0.0
    elapsed: float = 0.0  # seconds of the whole run in which at least one chunk was in flight
    # seconds that all earlier tests of the draft have cost, compared with the target alone
    lost: float = 0.0
    # time at which the draft's current test stretch began; None if there is none
    tried_since: float | None = None
    tried_busy: float = 0.0
    tried_tokens: float = 0.0
    # The faster model writes this many stretches before the slower model is tested again.
    stay: int = 1
    # number of stretches that are still to be written before this test
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
        """Return whether drafting this chunk is so slow that the target should finish it."""
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
            # If the chunk began before the try, only a share of its tokens belongs to the try: the
            # share of its time that lies in the try.
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
        """Return how many seconds the draft's current try has lost: its duration minus the time in
        which the target would write the same tokens.

        For unfinished chunks that the target writes, the tokens so far are estimated from the speed
        of its last chunk.
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
        """Decide whether the slower writer gets a stretch of several chunks, now that it has
        written a single one.
        """
        self.is_looking = False
        if begun.writer == "draft" and "target" in self.seconds:
            excess = seconds - tokens * self.seconds["target"]
            self.lost += max(0.0, excess) / (len(self.in_flight) + 1)
        # While this chunk was being written, its model has become the faster one, so there is
        # nothing to decide.
        if begun.writer == self.best:
            return
        if self._is_promising():
            self._go_on(self._other)
        else:
            self._stay(max(_AFTER_LOSS, 2 * self.stay))

    def _is_promising(self) -> bool:
        """Return whether the chunk of the slower writer was fast enough to try a stretch of several
        chunks.

        One fast chunk says little about the speed of all chunks together: if both engines share
        processors, drafting for all rollouts slows down the target.
        """
        target = self.seconds.get("target", 0.0)
        draft = self.seconds["draft"]
        if self.best == "draft":
            return target < _SLOWER * draft
        # A speed of 0 means that the clock has not advanced, so the speeds are unknown.
        if not (target and self.rates["target"]):
            return False
        count = len(self.in_flight) + 1
        if draft < (_SURE + (1 / _GAIN - _SURE) / count) * target:
            return self._may_try()
        return _MOST_LOST[0] * self.elapsed - self.lost > _UNSURE * self.chunk_seconds

    def _stretched(self, rate: float) -> None:
        """Update the writer's speed after a stretch, choose the faster writer, and begin the next
        stretch.
        """
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
        """Begin a stretch of chunks by this writer, and reset the counters of the stretch."""
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
