"""Score rules, which turn a chunk's log-probabilities into a number in [1, inf]; higher is worse."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Annotated, Literal, get_args

from atts.core import Chunk
from atts.errors import OptionError
from atts.pipelines.votes import Tally

ScoreKind = Literal[
    "mean",
    "worst",
    "byte",
    "speculative",
    "draft",
    "entropy",
    "entropy-worst",
    "prm",
    "learned",
    "rating",
    "verdict",
    "continuation",
    "disagreement",
]
SCORE_KINDS: tuple[ScoreKind, ...] = get_args(ScoreKind)
ScoreSource = Literal[
    "log-probabilities",
    "draft",
    "entropy",
    "reward",
    "judge",
    "question",
    "continuation",
    "votes",
]
"""What a score is computed from.

"log-probabilities": the target's log-probabilities of the chunk. "draft": the draft's
log-probabilities. "entropy": the entropy of the draft's distributions. "reward": the probability
from a reward model. "judge": the prediction of a learned judge. "question": the target's answer to
a question about the chunk. "continuation": the text that the target writes in place of the chunk.
"votes": the votes of a problem's rollouts.
"""
_SOURCES: Mapping[ScoreKind, ScoreSource] = {
    "draft": "draft",
    "entropy": "entropy",
    "entropy-worst": "entropy",
    "prm": "reward",
    "learned": "judge",
    "rating": "question",
    "verdict": "question",
    "continuation": "continuation",
    "disagreement": "votes",
}

_UNITS: Mapping[ScoreKind, str] = {
    "mean": "nats per token",
    "worst": "nats at the least likely token",
    "byte": "nats per byte",
    "speculative": "nats per chunk",
    "draft": "nats at the least likely token",
    "entropy": "nats per token",
    "entropy-worst": "nats at the least certain token",
    "prm": "nats",
    "verdict": "nats",
}
"""For each kind of score that is shown as a logarithm: the unit of the logarithm."""


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """A rule that turns log-probabilities into a number in [1, inf], like a perplexity; higher is
    worse.

    mean: the chunk's perplexity. worst: one over the probability of the chunk's least likely token.
    byte: the perplexity per byte of text, which is comparable across tokenizers. speculative: one
    over the probability that speculative sampling accepts the whole chunk, the product over its
    tokens of min(1, target's probability / author's probability), where the author is the model
    that wrote the chunk. A token has an effect only if its author gave it a higher probability than
    the target. The models are compared at temperature 1, so this is the exact probability only if
    both are sampled at temperature 1. The score needs models with one tokenizer, and the author's
    log-probabilities; without these the chunk has no score. The score's logarithm is a sum over
    tokens, so it grows with the length of the chunk. draft: one over the probability that the
    author of the chunk gave to the least likely token. The target reads nothing, so the score is
    free. entropy: the exponential of the mean entropy of the draft's distributions over the chunk,
    which is the effective number of next tokens. The draft reads its chunk again; the target reads
    nothing. entropy-worst uses the largest entropy instead of the mean. If a server lists only its
    most likely tokens, the entropy is a lower bound. prm: one over the probability that a process
    reward model gives to the chunk. The model is on a separate server with the address `reward`. If
    the model rewards each step, atts writes `separator` after each step. learned: 2 plus the gain
    of a takeover that a fitted judge predicts from the log-probabilities of both models, the
    chunk's length and turn, and the agreement of its siblings. `judge` names the judge's file.
    rating: 10 minus the target's rating of the chunk from 0 to 9; the request for it takes a few
    tokens. verdict: one over the probability that the target calls the chunk correct, averaged over
    both orders of the question. continuation: 2 minus the share of words that the chunk's beginning
    and the target's continuation have in common. The target writes a continuation for every chunk.
    disagreement: the number of a problem's rollouts divided by the votes for the leading answer. It
    is a score of whole problems, not of chunks.
    """

    kind: Annotated[
        ScoreKind,
        "rule that computes a chunk's score. From the target's log-probabilities: mean "
        "(perplexity), worst (least likely token), byte (perplexity per byte), speculative (chance "
        "of acceptance by speculative sampling). From the draft's log-probabilities: draft (least "
        "likely token), entropy (mean), entropy-worst (largest). From elsewhere: prm (reward "
        "model), learned (fitted judge), rating and verdict (the target's answer to a question), "
        "continuation (similarity to the target's own text), disagreement (split votes, cascade "
        "only)",
    ] = "mean"
    reward: Annotated[
        str,
        "reward model for kind prm: vllm:http://HOST:PORT/MODEL or sglang:http://HOST:PORT/MODEL",
    ] = ""
    separator: Annotated[
        str, "text after each step of a solution, for a reward model on vLLM that rewards each step"
    ] = "<extra_0>"
    judge: Annotated[str, "judge for kind learned: a file that `atts calibration judge` wrote"] = ""

    def __post_init__(self) -> None:
        if self.kind not in SCORE_KINDS:
            raise OptionError("score", f"unknown kind {self.kind!r}", SCORE_KINDS, self.kind)

    @property
    def source(self) -> ScoreSource:
        """Return what this rule computes scores from, such as "log-probabilities" or "question"."""
        return _SOURCES.get(self.kind, "log-probabilities")

    def __call__(self, logprobs: Sequence[float], text: str) -> float:
        """Return the score; it is NaN if a log-probability is NaN, so that no gate uses it as a
        score.

        The values depend on the kind, see `score_of`: for "speculative" they are the differences
        target - author, for "draft" the author's log-probabilities, for the entropies the negative
        entropy at each token, and for "prm" the logarithm of the reward.
        """
        assert logprobs, "a scored text must have at least one token"
        if self.kind == "byte":
            nll = -math.fsum(logprobs) / max(1, len(text.encode()))
        elif self.kind in ("worst", "draft", "entropy-worst"):
            nll = math.nan if any(map(math.isnan, logprobs)) else -min(logprobs)
        elif self.kind == "speculative":
            nll = math.fsum(
                math.nan if math.isnan(value) else max(0.0, -value) for value in logprobs
            )
        else:
            nll = -math.fsum(logprobs) / len(logprobs)
        return _perplexity(nll)


def _perplexity(nll: float) -> float:
    if math.isnan(nll):
        return math.nan
    return math.exp(nll) if nll < 700 else math.inf


def score_words(score: float, kind: str | None) -> str:
    """Return a score as readable text: its logarithm with a unit.

    A score that is a product over the tokens of a long chunk may be e^190, which is hard to read as
    a number. A score of unknown kind is treated like such a product.

    >>> score_words(1.5, "mean"), score_words(3.7e11, "speculative"), score_words(4.0, "rating")
    ('0.405 nats per token', '26.6 nats per chunk', '4')
    """
    if math.isnan(score) or math.isinf(score):
        return "none" if math.isinf(score) else "not a number"
    if kind in SCORE_KINDS and kind not in _UNITS:
        return f"{score:.4g}"
    unit = next((words for name, words in _UNITS.items() if name == kind), "nats")
    return f"{math.log(score):.3g} {unit}" if score > 0 else f"{score:.4g}"


Rule = Callable[[Sequence[float], str], float]


def kind_of(rule: Rule) -> ScoreKind | None:
    """Return the kind of a built-in score rule; None for a function that the user wrote."""
    return rule.kind if isinstance(rule, ScoreRule) else None


def source_of(rule: Rule) -> ScoreSource:
    """Return what a rule computes scores from; for a user's own function, "log-probabilities"."""
    return rule.source if isinstance(rule, ScoreRule) else "log-probabilities"


def score_of(rule: Rule, logprobs: Sequence[float], chunk: Chunk) -> float:
    """Return a chunk's score from the target's log-probabilities, and from those of the chunk's
    author if the rule needs them.

    The score is NaN if log-probabilities are missing. The score is rounded to five digits before
    any gate ranks it, because sums of floats depend on the batch and on the cache. After a resume
    these sums differ by up to 2e-5, but equal scores must stay equal.
    """
    if isinstance(rule, ScoreRule) and rule.kind == "draft":
        logprobs = chunk.logprobs
        if not logprobs:
            return math.nan
    if isinstance(rule, ScoreRule) and rule.kind == "speculative":
        # The model that wrote the chunk may have one more log-probability, for its end token. If it
        # has fewer than the target, there is no score.
        if len(chunk.logprobs) < len(logprobs):
            return math.nan
        pairs = zip(logprobs, chunk.logprobs, strict=False)
        logprobs = [target - author for target, author in pairs]
    return float(f"{rule(logprobs, chunk.text):.5g}")


def first_rejected_token(
    target: Sequence[float], author: Sequence[float], nats: float = 1.0
) -> int:
    """Return the index of the first token whose log-probability is at least `nats` lower for the
    target than for the token's author.

    If there is no such token, return the index of the token with the largest difference.

    Without the author's log-probabilities return 0, so that no token counts as accepted.

    >>> first_rejected_token([-0.1, -0.2, -9.0, -12.0], [-0.1, -0.1, -0.3, -0.1])
    2
    """
    if not target or len(author) < len(target):
        return 0
    drops = [before - now for now, before in zip(target, author, strict=False)]
    for position, drop in enumerate(drops):
        if not drop < nats:  # `not <` is also true if the drop is NaN, so NaN rejects the token.
            return position
    return drops.index(max(drops))


def disagreement(count: Tally, rollouts: int) -> float:
    """Return the number of a problem's rollouts divided by the number that give the leading answer.

    The score is 1 if all rollouts agree. A rollout without an answer agrees with no other rollout.
    If no rollout has an answer, the score is twice the number of rollouts, which is the worst
    possible score.

    >>> disagreement(Tally(("7", "8"), (3.0, 1.0), (3, 1)), rollouts=4)
    1.3333
    """
    leading = count.counts[0] if count.counts else 0.5
    return float(f"{max(rollouts, 1) / leading:.5g}")


JUDGE_FEATURES = (
    "target nats per token",
    "target nats at the least likely token",
    "shortfall per token",
    "draft nats per token",
    "draft nats at the least likely token",
    "log tokens",
    "turn",
    "agreement of answered siblings",
    "unknown agreement",
)
"""The names of a learned judge's input features. A shortfall is the amount by which the target's
log-probability of a token is below the draft's.
"""


def judge_features(
    target: Sequence[float], draft: Sequence[float], turn: int, agreement: float | None
) -> tuple[float, ...]:
    """Return the features of a chunk for a learned judge; they are NaN if a model sent no
    log-probabilities. `agreement` is None if no sibling has an answer yet.
    """
    if not target or len(draft) < len(target):
        return (math.nan,) * len(JUDGE_FEATURES)
    pairs = list(zip(target, draft, strict=False))
    # Lower log-probabilities are raised to this value. Otherwise one token with probability 0 would
    # dominate the sum.
    least = -30.0
    given = [max(least, value) for value in target]
    own = [max(least, value) for _, value in pairs]
    count = len(pairs)
    shortfall = math.fsum(max(0.0, before - now) for now, before in zip(given, own, strict=True))
    return (
        -math.fsum(given) / count,
        -min(given),
        shortfall / count,
        -math.fsum(own) / count,
        -min(own),
        math.log(count),
        float(turn),
        0.0 if agreement is None else agreement,
        float(agreement is None),
    )


_WORD = re.compile(r"\d+(?:\.\d+)?|\w+|[^\w\s]")


def continuation_score(chunk: str, own: str) -> float:
    """Return 2 minus the share of words that a chunk and the target's continuation have in common.

    Words are compared in order, up to the length of the shorter text. A number has the weight of
    three words, because two steps may have the same words but different values.

    >>> continuation_score("So 4 + 3 = 7.", "So 4 + 3 = 7. Then"), continuation_score("a 7", "a 8")
    (1.0, 1.75)
    """
    ours = _WORD.findall(chunk)
    theirs = _WORD.findall(own)
    length = min(len(ours), len(theirs))
    if not length:
        return 1.0 if not ours and not theirs else 2.0
    blocks = SequenceMatcher(
        None, ours[:length], theirs[:length], autojunk=False
    ).get_matching_blocks()
    shared = sum(sum(map(_weight, ours[block.a : block.a + block.size])) for block in blocks)
    total = max(sum(map(_weight, ours[:length])), sum(map(_weight, theirs[:length])))
    return float(f"{2 - shared / total:.5g}")


def _weight(word: str) -> int:
    return 3 if word[0].isdigit() else 1


def mean_logprob(chunk: Chunk) -> float:
    """Return the mean log-probability of the chunk's tokens under the model that wrote them, or NaN."""
    if not chunk.logprobs:
        return math.nan
    return math.fsum(chunk.logprobs) / len(chunk.logprobs)


def evidence(rule: Rule, chunk: Chunk) -> float:
    """Return how certain the author of a chunk is: 0 is certain, and lower values are less certain.

    For `mean`, `byte` and a user's own rule, the value is -log of the score that the rule gives to
    the author's log-probabilities. For every other kind it is the lowest log-probability of the
    chunk. Without log-probabilities the value is NaN, which a gate must not treat as certainty.
    """
    if not chunk.logprobs:
        return math.nan
    if isinstance(rule, ScoreRule) and rule.kind not in ("mean", "byte"):
        score = _perplexity(-min(chunk.logprobs))
    else:
        score = rule(chunk.logprobs, chunk.text)
    return -math.log(score) if score < math.inf else -math.inf
