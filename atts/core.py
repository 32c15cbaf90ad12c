"""The values that engines, pipelines, gates and journals exchange: frozen, slotted, plain data."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Literal, TypeVar

from atts.sampling import Seed, uniforms

TokenIds = tuple[int, ...]
Role = Literal["draft", "target"]
Ending = Literal["delimiter", "length", "end"]
"""Why a chunk ended: at a step delimiter, at its token limit, or because the model ended its text.
"""
TurnKey = tuple[str, int, int]
"""Names a turn of a run: problem, sample, turn."""
Action = Literal["accept", "verify", "escalate"]
Origin = Literal["gate", "evidence", "forced", "warm-up", "budget", "certificate", "recalled"]
"""What a decision rests on: the gate's rule; the draft's evidence alone, unscored; a score that is
missing; a warm-up that stores and does not act; a cap without a slot left; a
certified policy's gate; or a decision of an earlier session that stands.
"""
AnswerKind = Literal["math", "choice", "text"]
Finish = Literal["answer", "end", "turns", "tokens", "settled", "cancelled", "failed"]
"""Why a rollout stopped. "settled": the vote no longer needed it; "end": its model ended without a
marked answer.
"""


@dataclass(frozen=True, slots=True)
class Grading:
    """How an answer is held to its reference; the default tolerates no number that is off, and lets
    a unit be left out.

    `relative`, a share of the larger number, is for references that are decimals; `absolute` is for
    any number.
    """

    relative: float = 0.0
    absolute: float = 0.0
    units: Literal["optional", "required"] = "optional"
    # text: of the right choice, its words count as well as its letter
    choices: Literal["letter", "text"] = "letter"


@dataclass(frozen=True, slots=True)
class Problem:
    """One question, its reference answer when there is one, and where it came from."""

    id: str
    text: str
    answer: str | None = None
    kind: AnswerKind = "math"
    level: int | None = None
    subject: str = ""
    choices: tuple[str, ...] = ()
    source: str = ""
    grading: Grading | None = None  # None: the default
    # problems with their solutions, said before this one
    examples: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from the model's law; the default draws from it unchanged."""

    temperature: float = 1.0
    top_k: Annotated[int, "only the k likeliest tokens; 0: all"] = 0
    top_p: Annotated[float, "only the likeliest tokens of this mass"] = 1.0
    min_p: Annotated[float, "only tokens at least this likely, as a share of the likeliest"] = 0.0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Continue `ids` by at most `max_tokens`, stopping after a token that completes a stop string
    or is a stop id.

    The token that completes the stop stays in the completion; `rollout` only hints where a cache
    may be warm. An engine that has no raw log-probabilities at hand need not fetch them where they
    are "unneeded". With `begun`, the last ids are the completion's own beginning, made elsewhere
    with the first uniforms of the same seed: what is written, and where it stops, is the rest of
    what the request without them is answered with.
    """

    ids: TokenIds
    max_tokens: int
    sampling: Sampling = Sampling()
    seed: Seed = Seed()
    stop: tuple[str, ...] = ()
    stop_ids: TokenIds = ()
    rollout: str = ""
    priority: int = 0  # lower is sooner
    logprobs: Literal["raw", "unneeded"] = "raw"
    begun: int = 0  # of the last ids; `max_tokens` counts those to come
    # text that may be like the answer: an engine may be faster for it, and answers the same
    draft: TokenIds = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model wrote: `ids` exactly as generated (an end token included), `text` without end
    tokens.

    `logprobs` are under the raw law (temperature 1, nothing dropped), one per id; none at all from
    an engine whose spec says that it gives none, and where the request does not need them.
    """

    ids: TokenIds
    text: str
    ended: Ending
    logprobs: tuple[float, ...]
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Ask for the log-probability of every token of `suffix` after `prefix`; both are non-empty.

    With `draw`, what would be asked of the model in the suffix's place (its ids are the prefix), an
    engine that can draw from the laws it scores by tells how that answer begins.
    """

    prefix: TokenIds
    suffix: TokenIds
    rollout: str = ""
    priority: int = 0
    turn: int = 0  # of the rollout: for timing, never for the result
    draw: SampleRequest | None = None  # never changes the scores


def request_key(role: Role, request: SampleRequest | ScoreRequest) -> str:
    """A name for what is asked of whom and for which rollout, from all that decides the answer; not
    its priority.
    """
    if isinstance(request, SampleRequest):
        said = (
            request.rollout,
            request.max_tokens,
            request.sampling,
            request.seed,
            request.stop,
            request.stop_ids,
        )
        text = f"{role} {said!r}{request.begun or ''}"
        ids = request.ids
    else:
        draw = request.draw
        drawn = (
            f" {(draw.begun, draw.max_tokens, draw.sampling, draw.seed, draw.stop, draw.stop_ids)!r}"
            if draw
            else ""
        )
        text = f"{role} scores {request.rollout!r} after {len(request.prefix)}{drawn}"
        ids = request.prefix + request.suffix
    hasher = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12)
    try:
        hasher.update(array("q", ids).tobytes())
    except OverflowError:  # ids of engines that speak text are as long as the text they stand for
        hasher.update(repr(ids).encode())
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first tokens of a completion, and why it ended if they are all of it."""

    ids: TokenIds = ()
    logprobs: tuple[float, ...] = ()
    ended: Ending | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Raw log-probabilities, one per suffix token: none dropped, none invented.

    `begun` answers the request's `draw`: the model's own tokens up to and with the first that is
    not the suffix's.
    """

    logprobs: tuple[float, ...]
    cached_tokens: int = 0
    begun: Beginning | None = None

    @property
    def perplexity(self) -> float:
        """exp(-mean log-prob), in [1, inf]; higher is worse."""
        assert self.logprobs, "an engine must refuse to score nothing"
        mean = -math.fsum(self.logprobs) / len(self.logprobs)
        return math.exp(mean) if mean < 700 else math.inf


@dataclass(frozen=True, slots=True)
class Decision:
    """What a gate said about one chunk, with all that is needed to audit it and to feed it back.

    `p` near 1 means worse than the calibration chunks; None when the gate used no p-value.
    """

    action: Action
    rate: float
    question: str
    turn: int = 0
    sample: int = 0
    issue: int | None = None
    score: float | None = None
    p: float | None = None
    level: str | None = None
    # the conformal set of levels, contiguous; empty when the gate has none
    levels: tuple[str, ...] = ()
    why: str = ""  # for people; nothing reads it
    origin: Origin = "gate"
    length: float | None = None  # of the chunk, where the gate ranks by length

    @property
    def escalate(self) -> bool:
        """Whether the target takes over."""
        return self.action == "escalate"

    @property
    def turn_key(self) -> TurnKey:
        """The turn it is about."""
        return self.question, self.sample, self.turn


@dataclass(frozen=True, slots=True)
class Features:
    """All a gate may know about a chunk besides its score: the draft's own evidence, and siblings'
    answers so far.
    """

    question: str
    turn: int = 0
    sample: int = 0
    # the place in the run's order of asking for scores, as the gate's preview numbered it
    issue: int | None = None
    # the share of the run's decisions expected to be left; None where that is not known
    left: float | None = None
    attempt: int = 0
    tokens: int = 0
    draft_logprob: float = 0.0  # the draft's own, made one number by the policy's score rule
    has_answer: bool = False
    answered: int = 0  # siblings with an answer
    agreement: float = 0.0  # share of them behind the leading answer
    agrees: bool = False  # this chunk's answer is the leading one
    is_scored: bool = False  # an equal chunk after an equal beginning was: its score is this one's
    text: str = ""

    def decision(
        self, action: Action, rate: float = math.nan, why: str = "", *, score: float | None = None,
        p: float | None = None, origin: Origin = "gate",
    ) -> Decision:  # fmt: skip
        """A decision about this chunk; a gate that aims at no rate leaves it nan."""
        return Decision(
            action, rate, self.question, self.turn, self.sample, issue=self.issue, score=score, p=p, why=why,
            origin=origin,
        )  # fmt: skip

    def uniform(self, seed: int, purpose: str) -> float:
        """A uniform number that belongs to this chunk: a function of who is asked, never of when."""
        name = Seed(
            seed,
            self.question,
            self.sample,
            self.turn,
            "gate",
            attempt=self.attempt,
            purpose=purpose,
        )
        return float(uniforms(name, 1)[0])


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of reasoning in both tokenizers' ids, never re-tokenised; an end token is not part of
    the ids.

    With a shared tokenizer the two id tuples are the same object.
    """

    author: Role
    text: str
    draft_ids: TokenIds
    target_ids: TokenIds
    ended: Ending
    # the author's own, one per generated id (an end token's included), or none
    logprobs: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        """How many tokens its author generated."""
        return len(self.logprobs) or len(self.ids(self.author))

    def ids(self, role: Role) -> TokenIds:
        """The ids this chunk has for that model."""
        return self.draft_ids if role == "draft" else self.target_ids


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem rendered once per tokenizer, chat template applied."""

    draft_ids: TokenIds
    target_ids: TokenIds

    def ids(self, role: Role) -> TokenIds:
        """The prompt's ids for that model."""
        return self.draft_ids if role == "draft" else self.target_ids


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of a rollout: what was drafted, what the target thought of it, what was done.

    `chunks` are those that entered the rollout this turn, in order; `discarded` those that did not.
    """

    index: int
    chunks: tuple[Chunk, ...]
    discarded: tuple[Chunk, ...] = ()
    score: float | None = None
    decision: Decision | None = None
    note: str = ""  # why a score is missing, what failed, what stays; for people, nothing reads it
    # the target was asked about; none where the score is that of an equal sibling's chunk
    scored_tokens: int = 0
    is_forced: bool = False  # the chunk's words were put in: no model wrote them

    @property
    def drafted(self) -> Chunk | None:
        """The draft's chunk that was judged, kept or discarded; None where the draft wrote none."""
        return next(
            (chunk for chunk in (*self.discarded, *self.chunks) if chunk.author == "draft"), None
        )

    @property
    def is_recalled(self) -> bool:
        """Whether its score is that of an equal sibling's chunk, and nothing was asked."""
        return self.score is not None and not self.scored_tokens

    @property
    def remark(self) -> str:
        """What people are told of it: its note, whether its words were put in, and why no score was
        asked for.
        """
        recalled = (
            "scored as an equal chunk after an equal beginning was" if self.is_recalled else ""
        )
        return "; ".join(
            filter(None, (self.note, "budget forcing" if self.is_forced else "", recalled))
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens by model and kind, and calls; sums with +."""

    draft_tokens: int = 0  # sampled by the draft
    target_tokens: int = 0  # sampled by the target
    scored_tokens: int = 0  # scored by the target
    draft_prefill_tokens: int = 0
    target_prefill_tokens: int = 0
    wasted_tokens: int = 0  # sampled, then discarded or cancelled
    calls: int = 0
    # of the target's, those drawn while it scored: no step of decoding was made for them
    drawn_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            draft_tokens=self.draft_tokens + other.draft_tokens,
            target_tokens=self.target_tokens + other.target_tokens,
            scored_tokens=self.scored_tokens + other.scored_tokens,
            draft_prefill_tokens=self.draft_prefill_tokens + other.draft_prefill_tokens,
            target_prefill_tokens=self.target_prefill_tokens + other.target_prefill_tokens,
            wasted_tokens=self.wasted_tokens + other.wasted_tokens,
            calls=self.calls + other.calls,
            drawn_tokens=self.drawn_tokens + other.drawn_tokens,
        )


@dataclass(frozen=True, slots=True)
class Rollout:
    """One line of reasoning on one problem, grown turn by turn; a new value per turn."""

    problem: str
    sample: int
    prompt: Prompt
    turns: tuple[Turn, ...] = ()
    finish: Finish | None = None  # None while it runs
    answer: str | None = None
    usage: Usage = Usage()
    error: str = ""
    # the answer is not marked as one: the fallback found it once the model had ended its text
    is_fallback_answer: bool = False

    def ids(self, role: Role) -> TokenIds:
        """Prompt plus every chunk as that model reads them."""
        ids = list(self.prompt.ids(role))
        for turn in self.turns:
            for chunk in turn.chunks:
                ids.extend(chunk.ids(role))
        return tuple(ids)

    @property
    def text(self) -> str:
        """The reasoning so far: the chunks' texts, joined by nothing."""
        return "".join(chunk.text for turn in self.turns for chunk in turn.chunks)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one problem: every rollout, and the answer they settled on."""

    problem: Problem
    rollouts: tuple[Rollout, ...]
    answer: str | None
    votes: Mapping[str, float] = field(default_factory=dict[str, float])
    status: Literal["answered", "unanswered", "cancelled", "failed"] = "answered"
    why: str = ""
    usage: Usage = Usage()
    # what a reader should know of the answer: that the problem is unlike those of the stored scores
    doubt: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do: neither the problem nor one of its rollouts failed."""
        return self.status != "failed" and not any(
            rollout.finish == "failed" for rollout in self.rollouts
        )

    @property
    def agreement(self) -> float:
        """The winner's share of all votes; 0 without any."""
        total = math.fsum(self.votes.values())
        return max(self.votes.values()) / total if total else 0.0


CallStatus = Literal["done", "failed", "cancelled"]
RolloutStatus = Literal["done", "failed", "settled", "cancelled"]
ProblemStatus = Literal["done", "failed", "cancelled"]

RELEASE = "release"
"""The stage of the span that ends each rollout admitted together: it waited for all siblings' last
calls.
"""
HOLD = "hold"
"""The stage of the span of a wait for what a sibling holds: it had asked about an equal chunk."""

# Not frozen: a frozen dataclass of this width takes five times as long to make, and one is made for
# every engine call.


@dataclass(slots=True)
class CallSpan:
    """One engine call, a node of the task graph: who called, what it waited for, and when (the
    loop's clock, seconds).

    `ready <= queued <= started <= ended`. A call cancelled in the queue has `started == ended`. A
    "recalled" call took its result from an earlier session: it did no work, and stands for the call
    that did. Spans are never changed.
    """

    node: int  # its number; higher than those of the calls it waited for
    stage: str
    engine: str
    problem: str
    sample: int  # -1: asked by the problem itself, not by a rollout
    turn: int
    ready: float  # its rollout was ready; before `queued` only where it then waited for siblings
    queued: float
    started: float  # a slot (and its tokens) were granted
    ended: float
    after: tuple[int, ...] = ()  # the calls it waited for
    attempt: int = 0
    status: CallStatus = "done"
    tokens: int = 0
    source: Literal["live", "recalled"] = "live"

    @property
    def wait(self) -> float:
        """Seconds spent waiting for siblings."""
        return self.queued - self.ready

    @property
    def queue(self) -> float:
        """Seconds spent waiting for a slot."""
        return self.started - self.queued

    @property
    def compute(self) -> float:
        """Seconds spent in the call."""
        return self.ended - self.started


@dataclass(slots=True)
class RolloutSpan:
    """One rollout's life; `released` is after `ended` only where it kept its place for its
    siblings.
    """

    problem: str
    sample: int
    status: RolloutStatus
    queued: float  # submitted
    started: float  # admitted
    ended: float
    released: float
    attempts: int = 1
    waited: float = 0.0  # seconds spent waiting for siblings, in rounds and for release
    error: str = ""


@dataclass(slots=True)
class ProblemSpan:
    """One problem's life."""

    problem: str
    number: int  # its place among the problems of the run
    status: ProblemStatus
    started: float
    ended: float
    error: str = ""


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(dict[_Key, _Value]):
    """A dictionary that forgets what was stored longest ago.

    >>> recent = Recent[str, int](2)
    >>> recent["a"], recent["b"], recent["a"], recent["c"] = 1, 2, 3, 4
    >>> recent
    {'a': 3, 'c': 4}
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, key: _Key, value: _Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._size:
            del self[next(iter(self))]
