"""The immutable data classes that engines, pipelines, gates and journals exchange."""

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
"""The reason why a chunk ended: at a delimiter, at the chunk's token limit, or at the end of the
model's text.
"""
TurnKey = tuple[str, int, int]
"""The key of a turn in a run: the problem's id, the index of the rollout (sample) and the index of
the turn.
"""
Action = Literal["accept", "verify", "escalate"]
Origin = Literal["gate", "forced", "warm-up", "budget", "certificate", "recalled"]
"""The rule that made a gate's decision.

"gate": the gate's own rule decided. "forced": the score is missing. "warm-up": the gate still
collects scores, and takes the same action for every chunk. "budget": the cap on escalations is
reached. "certificate": the gate of a certified policy decided. "recalled": the decision was read
from an earlier session of the same run.
"""
AnswerKind = Literal["math", "choice", "text", "code"]
Finish = Literal["answer", "end", "turns", "tokens", "settled", "cancelled", "failed"]
"""The reason why a rollout stopped.

"answer": the model marked a final answer. "end": the text ended or repeated itself without a marked
answer. "turns", "tokens": the limit on turns or tokens was reached. "settled": the rollout could no
longer change the vote.
"""


@dataclass(frozen=True, slots=True)
class Grading:
    """Rules for comparing an answer with its reference. By default, numbers must be equal, and an
    answer may omit the unit.

    `relative` is the allowed difference as a fraction of the larger number; it applies only if the
    reference is a decimal. `absolute` is the allowed difference between any two numbers.
    """

    relative: float = 0.0
    absolute: float = 0.0
    units: Literal["optional", "required"] = "optional"
    # "decimals": a decimal with at least five significant digits equals a value without a finite
    # decimal, such as 1/3
    rounding: Literal["decimals", "none"] = "decimals"
    # "formula": letters that usually mean positive quantities in physics count as positive;
    # "positive": all letters count as positive
    variables: Literal["formula", "real", "positive"] = "formula"
    # "text": an answer may be the letter of the correct choice or the text of this choice
    choices: Literal["letter", "text"] = "letter"


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its source, and its reference answer if it has one."""

    id: str
    text: str
    answer: str | None = None
    kind: AnswerKind = "math"
    level: int | None = None
    subject: str = ""
    choices: tuple[str, ...] = ()
    source: str = ""
    # rules for comparing answers with the reference; None: the default rules
    grading: Grading | None = None
    # pairs (problem, solution) that are shown to the model as examples before this problem
    examples: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of a request: temperature and filters; the defaults leave the model's
    distribution unchanged.
    """

    temperature: float = 1.0
    top_k: Annotated[int, "sample only from the k most likely tokens; 0: from all"] = 0
    top_p: Annotated[
        float, "sample only from the most likely tokens that together have this probability"
    ] = 1.0
    min_p: Annotated[
        float,
        "sample only tokens whose probability is at least this share of the probability of the "
        "most likely token",
    ] = 0.0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request to continue `ids` by at most `max_tokens`, up to a stop string or a stop id. The
    completion includes the token that completes the stop string.

    `rollout` names the rollout that `ids` belongs to. Engines may use the name to find cached text,
    but results do not depend on it. If `logprobs` is "unneeded", an engine may return no
    log-probabilities.

    If `num_begun` is above 0, the completion was begun earlier, perhaps by another engine. The last
    `num_begun` ids are then the first tokens of the completion. Each of these tokens used up one
    uniform random number of the seed's stream. The engine continues with the next random number, so
    the result is the same as if it had sampled the whole completion.
    """

    ids: TokenIds
    max_tokens: int
    sampling: Sampling = Sampling()
    seed: Seed = Seed()
    stop: tuple[str, ...] = ()
    stop_ids: TokenIds = ()
    rollout: str = ""
    priority: int = 0  # the engine serves requests with lower numbers first
    logprobs: Literal["raw", "unneeded"] = "raw"
    # The last `num_begun` of `ids` already belong to the completion. `max_tokens` does not count
    # them.
    num_begun: int = 0
    # A guess at the completion. If the guess is good, the engine may be faster; the text never
    # changes.
    hint: TokenIds = ()
    # The think block may have this many tokens, including those in `ids`; 0 means no limit. At the
    # limit, an engine with the capability "thinking" closes the block.
    thinking_budget: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The text that a model generated.

    `ids` has every generated id, including the end token; `text` has no end tokens. `logprobs` has
    one raw log-probability (temperature 1, no filter) per id. It is empty if the engine returns no
    log-probabilities, or if the request does not need them.
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

    `draw` is a request to sample the target's own continuation of `prefix`. An engine with the
    capability "draw" samples the first tokens of this continuation from the distributions that it
    computes for the scores. It returns these tokens in `Scores.beginning`.

    If `entropies` is true, the result has the negative entropy of the distribution at each token,
    instead of the token's log-probability. The negative entropy is the expected log-probability of
    a token sampled from that distribution.

    `texts`, if given, contains a problem and the steps of its solution so far. The target's reward
    model then returns one number: the log-probability that the last step is correct. In such a
    request, the suffix is the last token of the last step.
    """

    prefix: TokenIds
    suffix: TokenIds
    rollout: str = ""
    priority: int = 0
    # index of the rollout's turn; only recorded with the times of calls, so it does not change the
    # scores
    turn: int = 0
    # The engine may sample this completion while it scores. The scores do not change.
    draw: SampleRequest | None = None
    # True: return negative entropies instead of log-probabilities; needs an engine with the
    # capability "entropy"
    entropies: bool = False
    # the texts that a reward model reads; needs an engine with the capability "reward"
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first tokens of a completion. If the completion has no further tokens, `ended` is the
    reason why it ended.
    """

    ids: TokenIds = ()
    logprobs: tuple[float, ...] = ()
    ended: Ending | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Raw log-probabilities, exactly one per suffix token. `beginning` is the start of the
    completion that `ScoreRequest.draw` requested. It ends, at the latest, with the first sampled
    token that differs from the suffix's token at the same position.
    """

    logprobs: tuple[float, ...]
    cached_tokens: int = 0
    beginning: Beginning | None = None

    @property
    def perplexity(self) -> float:
        """Return the perplexity of a text, exp(-mean log-probability), in [1, inf]; a higher value
        is worse.
        """
        assert self.logprobs, "a scored text must have at least one token"
        mean = -math.fsum(self.logprobs) / len(self.logprobs)
        return math.exp(mean) if mean < 700 else math.inf


@dataclass(frozen=True, slots=True)
class Decision:
    """A gate's decision about one chunk, with all values needed to check it later.

    `p` is the gate's p-value, or None if the gate uses none. A value near 1 means that the chunk's
    score is worse than the scores of most calibration chunks.
    """

    action: Action
    rate: float
    question: str
    turn: int = 0
    sample: int = 0
    issue: int | None = None
    score: float | None = None
    p: float | None = None
    # the reason for the decision; only shown to people, and never read by the program
    why: str = ""
    origin: Origin = "gate"
    # number of tokens of the chunk, if the gate compares the score with scores of chunks of similar
    # length
    length: float | None = None

    @property
    def escalate(self) -> bool:
        """Return whether the decision is to escalate the chunk."""
        return self.action == "escalate"

    @property
    def turn_key(self) -> TurnKey:
        """Return the key of the turn that the decision is about."""
        return self.question, self.sample, self.turn


@dataclass(frozen=True, slots=True)
class Features:
    """Values that a gate may use in addition to the score, such as the draft's log-probabilities
    and the answers of the problem's other rollouts.
    """

    question: str
    turn: int = 0
    sample: int = 0
    # The run numbers its score requests from 0. This is the number of the request for this chunk.
    issue: int | None = None
    # estimate of the share of the run's decisions that come after this one, 0 to 1; None if unknown
    left: float | None = None
    tokens: int = 0
    # Mean log-probability that the draft gave to the chunk's tokens. NaN if unknown; then every
    # comparison with a threshold is false.
    draft_logprob: float = math.nan
    # Certainty of the draft about the chunk: 0 is certain, lower is less certain. It follows the
    # rule in `atts.pipelines.scores`, and is NaN without log-probabilities.
    draft_evidence: float = math.nan
    has_answer: bool = False
    answered: int = 0  # how many sibling rollouts already have an answer
    # share of the answered siblings that have the most frequent answer, 0 to 1
    agreement: float = 0.0
    # True if this chunk's answer equals the most frequent answer of the siblings
    agrees: bool = False
    text: str = ""

    def decision(
        self, action: Action, rate: float = math.nan, why: str = "", *, score: float | None = None,
        p: float | None = None, origin: Origin = "gate",
    ) -> Decision:  # fmt: skip
        """Return a `Decision` about this chunk, with the given action and score. A gate without a
        nominal rate leaves `rate` at NaN.
        """
        return Decision(
            action, rate, self.question, self.turn, self.sample, issue=self.issue, score=score, p=p, why=why,
            origin=origin,
        )  # fmt: skip

    def uniform(self, seed: int, purpose: str) -> float:
        """Return a uniform random number that depends only on the seed, the purpose and the chunk's
        turn. The order in which calls run does not change it.
        """
        name = Seed(seed, self.question, self.sample, self.turn, "gate", purpose=purpose)
        return float(uniforms(name, 1)[0])


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a reasoning text, with its ids in the draft's and in the target's tokenizer.

    The ids contain no end tokens, and a chunk is never tokenised again. If both models share a
    tokenizer, the two tuples of ids are the same object.
    """

    author: Role
    text: str
    draft_ids: TokenIds
    target_ids: TokenIds
    ended: Ending
    # One log-probability for each generated id, including an end token, from the model that wrote
    # the chunk. May be empty.
    logprobs: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the model generated to write the chunk."""
        return len(self.logprobs) or len(self.ids(self.author))

    def ids(self, role: Role) -> TokenIds:
        """Return the chunk's ids in the tokenizer of the given model."""
        return self.draft_ids if role == "draft" else self.target_ids


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem rendered with each model's chat template."""

    draft_ids: TokenIds
    target_ids: TokenIds

    def ids(self, role: Role) -> TokenIds:
        """Return the prompt's ids in the tokenizer of the given model."""
        return self.draft_ids if role == "draft" else self.target_ids


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a rollout: the drafted chunk, its score, and the chunks that were added to the
    rollout's text.

    The text contains `chunks`, in this order, but not `discarded`.
    """

    index: int
    chunks: tuple[Chunk, ...]
    discarded: tuple[Chunk, ...] = ()
    score: float | None = None
    decision: Decision | None = None
    # The reason why the score is missing, or the description of a failure. Only shown to people.
    note: str = ""
    # Number of tokens that the target scored for this turn. It is 0 if the score was copied from an
    # equal chunk of a sibling rollout.
    scored_tokens: int = 0
    # True if atts inserted the text, such as "Wait" or the end of the think block
    is_forced: bool = False
    # True if the rollout's text starts again with this turn. The chunks of all earlier turns are
    # then discarded.
    restarts: bool = False

    @property
    def drafted(self) -> Chunk | None:
        """Return the chunk that the draft wrote in this turn, even if it was discarded; None if the
        draft wrote nothing.
        """
        for chunk in (*self.discarded, *self.chunks):
            if chunk.author == "draft":
                return chunk
        return None

    @property
    def score_reused(self) -> bool:
        """Return True if the score was copied from a sibling rollout that had the same chunk."""
        return self.score is not None and not self.scored_tokens

    @property
    def was_cut_short(self) -> bool:
        """Return True if the rollout was stopped after the gate's decision on this turn, but before
        the decision was carried out.
        """
        return bool(self.discarded) and not self.chunks

    def tokens_written(self, author: Role) -> int:
        """Return how many tokens the given model wrote in the turn, including discarded tokens."""
        chunks = [chunk for chunk in (*self.discarded, *self.chunks) if chunk.author == author]
        return sum(chunk.tokens for chunk in chunks if self.is_written(chunk))

    def is_written(self, chunk: Chunk) -> bool:
        """Return True if a model generated the chunk in this turn.

        The result is False for text that budget forcing inserted. It is also False if the chunk is
        only the kept beginning of a discarded chunk. The tokens of such a chunk are already counted
        with the discarded chunk.
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
        """Describe what was unusual in the turn: its note, budget forcing, a restart of the
        rollout's text, and a score copied from a sibling.
        """
        recalled = (
            "the score was copied from a sibling rollout with the same text"
            if self.score_reused
            else ""
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
    """Counts of tokens and calls. Two usages can be added with `+`."""

    draft_tokens: int = 0  # tokens sampled by the draft
    target_tokens: int = 0  # tokens sampled by the target
    scored_tokens: int = 0  # tokens scored by the target
    draft_prefill_tokens: int = 0
    target_prefill_tokens: int = 0
    # Tokens that were sampled but not used: their chunk was discarded, or their call was cancelled.
    wasted_tokens: int = 0
    calls: int = 0
    # Target tokens that were sampled during a scoring call, so they needed no decoding step.
    drawn_tokens: int = 0

    @property
    def target_share(self) -> float:
        """Return the fraction of all generated tokens that the target wrote, 0 to 1."""
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
    """One attempt to solve a problem by reasoning. The object is immutable, so each turn creates a
    new object.
    """

    problem: str
    sample: int
    prompt: Prompt
    turns: tuple[Turn, ...] = ()
    finish: Finish | None = None  # None as long as the rollout runs
    answer: str | None = None
    usage: Usage = Usage()
    error: str = ""
    # True if the model marked no final answer. The answer was then found in the finished text by
    # weaker rules.
    is_fallback_answer: bool = False

    def __str__(self) -> str:
        """Summarise the rollout in one line, without its text."""
        turns = f"{len(self.turns)} turn" + "s" * (len(self.turns) != 1)
        ended = self.finish or "running"
        return f"{self.problem}, rollout {self.sample}: answer {self.answer}; {turns}; {ended}"

    def ids(self, role: Role) -> TokenIds:
        """Return the ids of the prompt and the chunks in the tokenizer of the given model."""
        ids = list(self.prompt.ids(role))
        for chunk in self.chunks:
            ids.extend(chunk.ids(role))
        return tuple(ids)

    @property
    def chunks(self) -> list[Chunk]:
        """Return the chunks of the rollout's current text: all chunks since the rollout last
        restarted its text.
        """
        chunks: list[Chunk] = []
        for turn in self.turns:
            if turn.restarts:
                chunks.clear()
            chunks.extend(turn.chunks)
        return chunks

    def turn_limit(self, limit: int) -> int:
        """Return the largest number of turns that the rollout may have. If the rollout restarted
        its text, the limit applies to the turns since the restart.
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
"""The ways to choose a problem's answer from the answers of its rollouts."""


@dataclass(frozen=True, slots=True)
class CombinePlan:
    """A decision after a problem's rollouts have voted: keep the voted answer, or ask the
    target.
    """

    action: Literal["vote", "select", "synthesize"]
    # True: the target's choice is recorded to test the selector, but the answer of the vote is kept
    is_trial: bool = False
    # The vote counts as split if its most frequent answer has at most this share of the votes, 0 to
    # 1.
    below: float = 1.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Combination:
    """A record of how a problem's answer was chosen from the answers of its rollouts, and at what
    cost.
    """

    plan: CombinePlan
    voted: str  # the most frequent answer among the rollouts
    share: float  # share of the votes for `voted`, 0 to 1
    # One pair for each half of the rollouts, if only this half votes: the vote share of the winner,
    # and whether the winner is `voted`.
    halves: tuple[tuple[float, bool], ...] = ()
    # The answers among which the target chose. It compared the solutions of these answers.
    finalists: tuple[str, ...] = ()
    # the answer that the target chose or wrote; None if the target made no decision
    chosen: str | None = None
    # how many pairs of solutions the target compared, each pair in both presentation orders
    pairs: int = 0
    # for how many of these pairs the target preferred the same solution in both orders
    consistent: int = 0
    usage: Usage = Usage()
    error: str = ""  # why the request to the target failed; empty if it did not fail

    @property
    def answer(self) -> str:
        """Return the problem's answer: the one that the target chose or, if it made no choice, the
        one that won the vote.
        """
        if self.chosen is None or self.plan.is_trial:
            return self.voted
        return self.chosen


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one problem: its rollouts, and the final answer chosen from the rollouts'
    answers.
    """

    problem: Problem
    rollouts: tuple[Rollout, ...]
    answer: str | None
    votes: Mapping[str, float] = field(default_factory=dict[str, float])
    status: Literal["answered", "unanswered", "cancelled", "failed"] = "answered"
    why: str = ""
    usage: Usage = Usage()
    # A warning to the user, for example that the problem differs from the calibration problems.
    doubt: str = ""
    combination: Combination | None = None  # None if the vote alone decided the answer

    def __str__(self) -> str:
        """Summarise the outcome in one line, without the texts of its rollouts."""
        votes = ", ".join(f"{answer} ({count:g})" for answer, count in self.votes.items())
        rollouts = f"{len(self.rollouts)} rollout" + "s" * (len(self.rollouts) != 1)
        answer = self.status if self.answer is None else f"answer {self.answer}"
        return f"{self.problem.id}: {answer}; votes {votes or 'none'}; {rollouts}"

    @property
    def is_complete(self) -> bool:
        """Return True if the problem and all its rollouts ended without a failure."""
        if self.status == "failed":
            return False
        return all(rollout.finish != "failed" for rollout in self.rollouts)

    @property
    def agreement(self) -> float:
        """Return the fraction of votes for the most frequent answer, 0 to 1; 0 if there are no
        votes.
        """
        total = math.fsum(self.votes.values())
        return max(self.votes.values()) / total if total else 0.0


CallStatus = Literal["done", "failed", "cancelled"]
RolloutStatus = Literal["done", "failed", "settled", "cancelled"]
ProblemStatus = Literal["done", "failed", "cancelled"]

RELEASE = "release"
"""Name of the stage in which a finished rollout waits for the siblings that started with it. The
rollout keeps its slot during this wait.
"""
HOLD = "hold"
"""Name of the stage in which a rollout waits for a score that a sibling has already requested for
the same chunk.
"""

# Spans are msgspec structs, because each engine call makes one. Making a frozen dataclass would
# take five times as long. In the journal, the field `kind` of a line is the tag of its span.


class CallSpan(
    Struct, tag="node", tag_field="kind", omit_defaults=True, forbid_unknown_fields=True
):
    """One engine call, which is a node of the task graph. Times are in seconds on the clock of the
    event loop.

    The times satisfy ready <= queued <= started <= ended. If a call was cancelled in the queue,
    `started` and `ended` are the same. The result of a "recalled" call was read from an earlier
    session's journal, so no engine was called. Spans are never changed after they are made.
    """

    node: int  # index of the call; all calls that it waited for have lower indices
    stage: str
    engine: str
    problem: str
    sample: int  # index of the rollout; -1 for a call that belongs to the whole problem
    turn: int
    # Time at which the rollout could have made the call, if it had not waited for siblings.
    # `queued` is the time after this wait.
    ready: float
    queued: float
    started: float  # time at which the engine's queue gave the call a slot and room for its tokens
    ended: float
    after: tuple[int, ...] = ()  # `node` of each call that this call waited for
    attempt: int = 0
    status: CallStatus = "done"
    tokens: int = 0
    source: Literal["live", "recalled"] = "live"

    @property
    def wait(self) -> float:
        """Return the seconds that the call waited for sibling rollouts."""
        return self.queued - self.ready

    @property
    def queue(self) -> float:
        """Return the seconds that the call waited for a slot of the engine."""
        return self.started - self.queued

    @property
    def compute(self) -> float:
        """Return the seconds that the engine worked on the call."""
        return self.ended - self.started


class RolloutSpan(
    Struct,
    tag="rollout-timed",
    tag_field="kind",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """The times of one rollout. `released` is later than `ended` if the rollout kept its slot until
    its siblings had ended.
    """

    problem: str
    sample: int
    status: RolloutStatus
    queued: float  # time at which the rollout began to wait for a slot
    started: float  # time at which the rollout got its slot and began
    ended: float
    released: float
    attempts: int = 1
    # Seconds that the rollout waited for its siblings: in rounds, for their scores, and at its end
    # before it gave back its slot.
    waited: float = 0.0
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
    number: int  # index of the problem in the run
    status: ProblemStatus
    started: float
    ended: float
    error: str = ""


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(dict[_Key, _Value]):
    """A dictionary of limited size. When a new key does not fit, the oldest entry is dropped.

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
