"""The values that engines, pipelines, gates and journals exchange: frozen, slotted, plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from msgspec import Struct

from atts.sampling import Seed, uniforms

TokenIds = tuple[int, ...]
Role = Literal["draft", "target"]
Ending = Literal["delimiter", "length", "end"]
"""The reason why a chunk ended: a delimiter, its token limit, or the model's end of text."""
TurnKey = tuple[str, int, int]
"""The key of a turn in a run: problem, sample and turn."""
Action = Literal["accept", "verify", "escalate"]
Origin = Literal["gate", "forced", "warm-up", "budget", "certificate", "recalled"]
"""The origin of a decision.

"gate": the gate's rule. "forced": the score is missing. "warm-up": scores are stored, but nothing is
escalated yet. "budget": the cap on escalations is used up. "certificate": the gate of a certified
policy. "recalled": a decision of an earlier session of the same run.
"""
AnswerKind = Literal["math", "choice", "text", "code"]
Finish = Literal["answer", "end", "turns", "tokens", "settled", "cancelled", "failed"]
"""The reason why a rollout stopped.

"settled": the vote no longer needed it. "end": its model ended the text without a marked answer.
"""


@dataclass(frozen=True, slots=True)
class Grading:
    """Rules for comparing an answer with its reference.

    By default numbers must be equal, and a unit may be left out. `relative` is a tolerance as a
    share of the larger number and applies to references that are decimals; `absolute` applies to
    every number.
    """

    relative: float = 0.0
    absolute: float = 0.0
    units: Literal["optional", "required"] = "optional"
    # "decimals": a decimal of five digits may stand for a value such as 1/3, whose decimals never
    # end
    rounding: Literal["decimals", "none"] = "decimals"
    # "formula": letters that name sizes in formulas of physics are positive; "positive": every
    # letter is
    variables: Literal["formula", "real", "positive"] = "formula"
    # "text": the text of the correct choice counts as well as its letter
    choices: Literal["letter", "text"] = "letter"


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with its reference answer, if it has one, and its source."""

    id: str
    text: str
    answer: str | None = None
    kind: AnswerKind = "math"
    level: int | None = None
    subject: str = ""
    choices: tuple[str, ...] = ()
    source: str = ""
    grading: Grading | None = None  # None: the default rules of comparison
    # worked examples (problem, solution), shown to the model before this problem
    examples: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Rules for drawing a token from the model's distribution; by default the distribution is
    unchanged.
    """

    temperature: float = 1.0
    top_k: Annotated[int, "draw only from the k most likely tokens; 0: from all"] = 0
    top_p: Annotated[
        float, "draw only from the most likely tokens that have this total probability"
    ] = 1.0
    min_p: Annotated[
        float,
        "draw only tokens with at least this share of the probability of the most likely token",
    ] = 0.0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request to continue `ids` by at most `max_tokens`, stopping after a stop string or a stop
    id.

    The token that completes the stop stays in the completion. `rollout` is only a hint at which
    cache may hold the beginning. If log-probabilities are "unneeded", an engine may leave them out.
    The last `num_begun` ids already belong to the completion: they were drawn before, perhaps by
    another engine, with the first uniform numbers of this seed. The engine continues with the
    uniform numbers after those, and so writes the rest of what it would have written without
    `num_begun`.
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
    # number of ids at the end of `ids` that belong to the completion; `max_tokens` excludes them
    num_begun: int = 0
    # a guess at the completion, which may make the engine faster but never changes its text
    hint: TokenIds = ()
    # tokens of a think block, those among `ids` included, after which an engine with the capability
    # "thinking" closes the block; 0: no limit
    thinking_budget: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's text: `ids` exactly as generated, end token included; `text` without end tokens.

    `logprobs` has one raw log-probability (temperature 1, no filter) per id. It is empty if the
    engine gives none, or if the request said that it needs none.
    """

    ids: TokenIds
    text: str
    ended: Ending
    logprobs: tuple[float, ...]
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A request for the log-probability of every token of `suffix` after `prefix`; both are
    non-empty.

    `draw` is the sampling request for the text that the target would write after `prefix` instead
    of the suffix. An engine with the capability "draw" samples its first tokens from the
    distributions that it computes for the scores, and returns them in `Scores.beginning`.

    With `entropies`, each number is minus the entropy of the distribution at that token instead of
    the token's own log-probability. It is the mean log-probability of a token drawn there.

    With `texts`, which are a problem and the steps of its solution so far, a reward model that is
    joined with the target replies. It gives one number: the logarithm of the probability that the
    last step is correct. The suffix is then the last token of that step.
    """

    prefix: TokenIds
    suffix: TokenIds
    rollout: str = ""
    priority: int = 0
    turn: int = 0  # turn of the rollout; recorded for timing only
    draw: SampleRequest | None = None  # never changes the scores
    entropies: bool = False  # for engines with the capability "entropy"
    texts: tuple[str, ...] = ()  # for engines with the capability "reward"


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first tokens of a completion, and why it ended if they are all of it."""

    ids: TokenIds = ()
    logprobs: tuple[float, ...] = ()
    ended: Ending | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Raw log-probabilities, exactly one per suffix token.

    `beginning` is the start of the completion that the request's `draw` asks for: the model's own
    tokens up to and including the first one that differs from the suffix.
    """

    logprobs: tuple[float, ...]
    cached_tokens: int = 0
    beginning: Beginning | None = None

    @property
    def perplexity(self) -> float:
        """Return exp(-mean log-probability), in [1, inf]; higher is worse."""
        assert self.logprobs, "an engine must refuse an empty text to score"
        mean = -math.fsum(self.logprobs) / len(self.logprobs)
        return math.exp(mean) if mean < 700 else math.inf


@dataclass(frozen=True, slots=True)
class Decision:
    """A gate's decision about one chunk, with everything needed to audit it and to feed it back.

    A `p` near 1 means that the chunk scores worse than the calibration chunks; None if the gate
    uses no p-value.
    """

    action: Action
    rate: float
    question: str
    turn: int = 0
    sample: int = 0
    issue: int | None = None
    score: float | None = None
    p: float | None = None
    why: str = ""  # the reason for the decision, for people only
    origin: Origin = "gate"
    length: float | None = None  # length of the chunk, if the gate ranks by length

    @property
    def escalate(self) -> bool:
        """Return True if the chunk is escalated."""
        return self.action == "escalate"

    @property
    def turn_key(self) -> TurnKey:
        """Return the turn that the decision is about."""
        return self.question, self.sample, self.turn


@dataclass(frozen=True, slots=True)
class Features:
    """Evidence that a gate may use in addition to the score: the draft's log-probabilities, and the
    answers of siblings.
    """

    question: str
    turn: int = 0
    sample: int = 0
    # the chunk's position in the order in which scores were requested
    issue: int | None = None
    # the estimated share of the run's decisions that are still to be made; None if unknown
    left: float | None = None
    tokens: int = 0
    # the mean of the draft's log-probabilities; NaN if it gave none, which no comparison may accept
    draft_logprob: float = math.nan
    # the draft's certainty of the chunk (0 is certain, lower is less sure), as
    # `atts.pipelines.scores` computes it from the score rule; NaN if the draft gave no
    # log-probabilities
    draft_evidence: float = math.nan
    has_answer: bool = False
    answered: int = 0  # siblings with an answer
    agreement: float = 0.0  # the leading answer's share of the siblings' answers
    agrees: bool = False  # whether this chunk's answer is the leading answer
    text: str = ""

    def decision(
        self, action: Action, rate: float = math.nan, why: str = "", *, score: float | None = None,
        p: float | None = None, origin: Origin = "gate",
    ) -> Decision:  # fmt: skip
        """Make a decision about this chunk; a gate without a nominal rate leaves `rate` at NaN."""
        return Decision(
            action, rate, self.question, self.turn, self.sample, issue=self.issue, score=score, p=p, why=why,
            origin=origin,
        )  # fmt: skip

    def uniform(self, seed: int, purpose: str) -> float:
        """Return a uniform number that depends on the chunk's identity, never on the schedule."""
        name = Seed(seed, self.question, self.sample, self.turn, "gate", purpose=purpose)
        return float(uniforms(name, 1)[0])


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of reasoning in both tokenizers' ids, without end tokens; it is never re-tokenised.

    With a shared tokenizer the two id tuples are the same object.
    """

    author: Role
    text: str
    draft_ids: TokenIds
    target_ids: TokenIds
    ended: Ending
    # log-probabilities by the author, one per generated id (a generated end token included), or none
    logprobs: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        """Return how many tokens the author generated."""
        return len(self.logprobs) or len(self.ids(self.author))

    def ids(self, role: Role) -> TokenIds:
        """Return the chunk's ids for that model."""
        return self.draft_ids if role == "draft" else self.target_ids


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem rendered with each model's chat template."""

    draft_ids: TokenIds
    target_ids: TokenIds

    def ids(self, role: Role) -> TokenIds:
        """Return the prompt's ids for that model."""
        return self.draft_ids if role == "draft" else self.target_ids


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a rollout: the drafted chunk, its score, and the chunks that it led to.

    `chunks` entered the rollout in this order; `discarded` did not enter it.
    """

    index: int
    chunks: tuple[Chunk, ...]
    discarded: tuple[Chunk, ...] = ()
    score: float | None = None
    decision: Decision | None = None
    # the reason why a score is missing, or a description of a failure; for people only
    note: str = ""
    # number of tokens scored by the target; 0 if an equal chunk of a sibling gave the score
    scored_tokens: int = 0
    is_forced: bool = False  # whether budget forcing inserted the chunk's text
    # whether the text of the rollout begins again with this turn; the chunks before are discarded
    restarts: bool = False

    @property
    def drafted(self) -> Chunk | None:
        """Return the draft's chunk, kept or discarded, or None if the draft wrote none."""
        for chunk in (*self.discarded, *self.chunks):
            if chunk.author == "draft":
                return chunk
        return None

    @property
    def score_reused(self) -> bool:
        """Return whether the score is that of an equal chunk of a sibling, so that no score was
        requested.
        """
        return self.score is not None and not self.scored_tokens

    @property
    def was_cut_short(self) -> bool:
        """Return whether the turn was judged and not carried out, because its rollout was stopped."""
        return bool(self.discarded) and not self.chunks

    def tokens_written(self, author: Role) -> int:
        """Count the tokens that this model wrote in the turn, discarded tokens included."""
        chunks = [chunk for chunk in (*self.discarded, *self.chunks) if chunk.author == author]
        return sum(chunk.tokens for chunk in chunks if self.is_written(chunk))

    def is_written(self, chunk: Chunk) -> bool:
        """Return whether a model wrote the chunk in this turn.

        Budget forcing inserts text that no model wrote. A kept part of a discarded chunk counts as
        written with the whole chunk.
        """
        if chunk.logprobs:
            return True
        if self.is_forced:
            return False
        return not any(
            whole.target_ids[: len(chunk.target_ids)] == chunk.target_ids
            for whole in self.discarded
            if whole is not chunk and whole.author == chunk.author
        )

    @property
    def remark(self) -> str:
        """Describe what was unusual in the turn: its note, whether words were inserted, and why no
        score was requested.
        """
        recalled = (
            "scored like an equal chunk after an equal beginning" if self.score_reused else ""
        )
        return "; ".join(
            filter(
                None,
                (
                    self.note,
                    "budget forcing" if self.is_forced else "",
                    "the target wrote the rollout again from the prompt" if self.restarts else "",
                    recalled,
                ),
            )
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens and calls; usages add up with +."""

    draft_tokens: int = 0  # tokens sampled by the draft
    target_tokens: int = 0  # tokens sampled by the target
    scored_tokens: int = 0  # tokens scored by the target
    draft_prefill_tokens: int = 0
    target_prefill_tokens: int = 0
    wasted_tokens: int = 0  # tokens that were sampled, then discarded or cancelled
    calls: int = 0
    # the part of target_tokens that was drawn while scoring, without a decoding step
    drawn_tokens: int = 0

    @property
    def target_share(self) -> float:
        """Return the target's share of the tokens that both models wrote."""
        written = self.draft_tokens + self.target_tokens
        return self.target_tokens / written if written else 0.0

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
    """One line of reasoning about a problem; every turn makes a new value."""

    problem: str
    sample: int
    prompt: Prompt
    turns: tuple[Turn, ...] = ()
    finish: Finish | None = None  # None while the rollout runs
    answer: str | None = None
    usage: Usage = Usage()
    error: str = ""
    # no answer was marked as final: the fallback extracted one after the model had ended
    is_fallback_answer: bool = False

    def ids(self, role: Role) -> TokenIds:
        """Return the ids of prompt and chunks as that model reads them."""
        ids = list(self.prompt.ids(role))
        for chunk in self.chunks:
            ids.extend(chunk.ids(role))
        return tuple(ids)

    @property
    def chunks(self) -> list[Chunk]:
        """Return the chunks of the text: those since the rollout last started again, if it did."""
        chunks: list[Chunk] = []
        for turn in self.turns:
            if turn.restarts:
                chunks.clear()
            chunks.extend(turn.chunks)
        return chunks

    def turn_limit(self, limit: int) -> int:
        """Return how many turns the rollout may have if the policy allows so many.

        A rollout that starts again within the limit gets as many turns again.
        """
        for position, turn in enumerate(self.turns[:limit]):
            if turn.restarts:
                return position + limit
        return limit

    @property
    def text(self) -> str:
        """Return the reasoning so far: the chunks' texts, concatenated."""
        return "".join(chunk.text for chunk in self.chunks)


Combine = Literal["vote", "select", "synthesize", "auto"]
"""The ways to make a problem's answer from the answers of its rollouts."""


@dataclass(frozen=True, slots=True)
class CombinePlan:
    """A decision on one problem after its vote: keep the vote, or ask the target."""

    action: Literal["vote", "select", "synthesize"]
    is_trial: bool = False  # whether the vote stays the answer although the target is asked
    below: float = 1.0  # the largest share of the leading answer at which a vote counts as split
    why: str = ""


@dataclass(frozen=True, slots=True)
class Combination:
    """A record of how a problem's answer was made from its rollouts' answers, with the cost."""

    plan: CombinePlan
    voted: str  # the leading answer of the vote
    share: float  # share of the votes that `voted` has
    # the vote of each half of the rollouts: its leader's share, and whether its leader is `voted`
    halves: tuple[tuple[float, bool], ...] = ()
    finalists: tuple[str, ...] = ()  # answers whose texts the target read
    chosen: str | None = None  # the answer that the target prefers or wrote; None: undecided
    pairs: int = 0  # number of questions that were asked in both orders
    consistent: int = 0  # number of these with the same answer in both orders
    usage: Usage = Usage()
    error: str = ""  # the reason why the target could not be asked

    @property
    def answer(self) -> str:
        """Return the problem's answer, which is the vote unless the target chose another one."""
        if self.chosen is None or self.plan.is_trial:
            return self.voted
        return self.chosen


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one problem: all rollouts, and the answer that was made from their answers."""

    problem: Problem
    rollouts: tuple[Rollout, ...]
    answer: str | None
    votes: Mapping[str, float] = field(default_factory=dict[str, float])
    status: Literal["answered", "unanswered", "cancelled", "failed"] = "answered"
    why: str = ""
    usage: Usage = Usage()
    # a warning about the answer, such as a problem unlike those of the calibration scores
    doubt: str = ""
    combination: Combination | None = None  # None if the vote alone decides the answer

    @property
    def is_complete(self) -> bool:
        """Return True if neither the problem nor any of its rollouts failed."""
        if self.status == "failed":
            return False
        return all(rollout.finish != "failed" for rollout in self.rollouts)

    @property
    def agreement(self) -> float:
        """Return the winner's share of all votes, or 0 without votes."""
        total = math.fsum(self.votes.values())
        return max(self.votes.values()) / total if total else 0.0


CallStatus = Literal["done", "failed", "cancelled"]
RolloutStatus = Literal["done", "failed", "settled", "cancelled"]
ProblemStatus = Literal["done", "failed", "cancelled"]

RELEASE = "release"
"""The stage of the span in which rollouts that started together wait for their last sibling."""
HOLD = "hold"
"""The stage of the span in which a rollout waits for the score of a sibling's equal chunk."""

# Spans are structs because every engine call makes one, in a fifth of the time that a frozen
# dataclass takes. Their tags are those of their lines in a journal.


class CallSpan(
    Struct, tag="node", tag_field="kind", omit_defaults=True, forbid_unknown_fields=True
):
    """One engine call, a node of the task graph; times are in seconds on the loop's clock.

    The times satisfy ready <= queued <= started <= ended. A call that was cancelled in the queue has
    started == ended. A "recalled" call took its result from an earlier session and did no work.
    Spans are never changed after they are made.
    """

    node: int  # a number higher than those of the calls it waited for
    stage: str
    engine: str
    problem: str
    sample: int  # -1: the call belongs to the problem, not to a rollout
    turn: int
    # when the rollout could have made the call; `queued` is later only by its wait for siblings
    ready: float
    queued: float
    started: float  # time at which a slot and its tokens were granted
    ended: float
    after: tuple[int, ...] = ()  # numbers of the calls it waited for
    attempt: int = 0
    status: CallStatus = "done"
    tokens: int = 0
    source: Literal["live", "recalled"] = "live"

    @property
    def wait(self) -> float:
        """Return the seconds spent waiting for siblings."""
        return self.queued - self.ready

    @property
    def queue(self) -> float:
        """Return the seconds spent waiting for a slot."""
        return self.started - self.queued

    @property
    def compute(self) -> float:
        """Return the seconds spent in the call."""
        return self.ended - self.started


class RolloutSpan(
    Struct,
    tag="rollout-timed",
    tag_field="kind",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """The times of one rollout; `released` is later than `ended` if it kept its slot for siblings."""

    problem: str
    sample: int
    status: RolloutStatus
    queued: float  # time at which the rollout was submitted
    started: float  # time at which the rollout was admitted
    ended: float
    released: float
    attempts: int = 1
    waited: float = 0.0  # seconds spent waiting for siblings, in rounds and for release
    error: str = ""


class ProblemSpan(
    Struct,
    tag="problem-timed",
    tag_field="kind",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """The times of one problem."""

    problem: str
    number: int  # the problem's position in the run
    status: ProblemStatus
    started: float
    ended: float
    error: str = ""


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(dict[_Key, _Value]):
    """A bounded dictionary that drops the entry stored longest ago.

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
