"""Gates, which decide from numbers alone, and without waiting, whether to escalate a chunk."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, SupportsFloat, cast, get_args, runtime_checkable

from atts.core import Action, Decision, Features, Origin
from atts.errors import CalibrationInputError, OptionError

GateReads = Literal["score", "nothing"]
"""The numbers that a gate reads of a chunk: the score alone, or nothing."""


class Gate(Protocol):
    """A rule that decides on a chunk from numbers alone.

    `preview` is called before the target scores, `decide` after it, and `observe` last. A preview
    of "verify" requests the score; "accept" and "escalate" skip the score. `observe` receives the
    action that was carried out.

    A gate may set these attributes on its class. `needs_draft_logprobs = True`: a draft that sends no
    log-probabilities is refused before the run. Single chunks may still lack them, so the gate must
    never accept NaN. `reads = "score"` or `reads = "nothing"`: engines need not send what the gate
    does not read. Without `reads`, the draft's log-probabilities are requested as well.
    """

    def preview(self, features: Features) -> Decision:
        """Return the action for a chunk without a score, or "verify" to request the score."""
        ...

    def decide(self, features: Features, score: float) -> Decision:
        """Return the action for a chunk with this score.

        :raises CalibrationInputError: if `score` is not a valid score; the pipeline then escalates
            the chunk.
        """
        ...

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Learn from a decision that was carried out, or was overridden."""
        ...


@runtime_checkable
class RoundGate(Protocol):
    """A synchronous gate, which ranks a whole round of siblings and so must wait for all of them."""

    def decide_round(self, round_: Sequence[tuple[Features, float]]) -> list[Decision]:
        """Return one decision per member, in the order given."""
        ...


@runtime_checkable
class Forgetting(Protocol):
    """A gate or a calibrator that stores something for each problem and can drop it."""

    def forget(self, question: str) -> None:
        """Drop what only the decisions of this problem need, because the problem is finished."""
        ...


def let_go(kept: object, question: str) -> None:
    """Let a gate forget a question, and every gate inside it."""
    # `isinstance` of a protocol is ten times as slow
    if hasattr(kept, "forget"):
        cast(Forgetting, kept).forget(question)
    inner = getattr(kept, "inner", None)
    if inner is not None:
        let_go(inner, question)


class CalibratorProtocol(Protocol):
    """The calibrator that a conformal gate needs, such as `atts.calibration.Calibrator`."""

    @property
    def rate(self) -> SupportsFloat:
        """Return the nominal rate."""
        ...

    def decide(
        self, score: float, question: str = "", turn: int = 0, sample: int | None = None, issue: int | None = None,
        left: float | None = None, length: float | None = None,
    ) -> Decision:  # fmt: skip
        """Return a decision that depends only on stored scores and observed decisions."""
        ...

    def observe(self, decision: Decision, escalated: bool | None = None) -> None:
        """Learn from the action that was carried out."""
        ...


class ConformalGate:
    """A gate that decides by the rank of a chunk's score among stored scores.

    Scores reach the calibrator in the order of request, not of arrival, because short chunks arrive
    first. The preview numbers the requests.
    """

    reads: ClassVar[GateReads] = "score"

    def __init__(self, calibrator: CalibratorProtocol) -> None:
        self.calibrator = calibrator
        self._issued = 0

    def continue_with(self, calibrator: CalibratorProtocol, issued: int) -> None:
        """Continue with the calibrator of an earlier session, after this many requests for scores."""
        self.calibrator = calibrator
        self._issued = issued

    def preview(self, features: Features) -> Decision:
        """Request a score for every chunk; the decision has the number of the request."""
        decision = Decision(
            "verify",
            float(self.calibrator.rate),
            features.question,
            features.turn,
            features.sample,
            self._issued,
            why="every chunk is scored",
        )
        self._issued += 1
        return decision

    def decide(self, features: Features, score: float) -> Decision:
        """Return the calibrator's decision."""
        chunk = (features.question, features.turn, features.sample, features.issue)
        return self.calibrator.decide(
            score, *chunk, left=features.left, length=features.tokens or None
        )

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Report the decision to the calibrator; a forced escalation without a score counts for the
        rate only.
        """
        # decisions that an earlier session recorded already have a number
        if decision.issue is not None:
            self._issued = max(self._issued, decision.issue + 1)
        self.calibrator.observe(decision, escalated)

    def forget(self, question: str) -> None:
        """Let the calibrator drop what it stores for the question."""
        let_go(self.calibrator, question)


class NonLearningGate(ABC):
    """A gate that learns nothing and requests a score for every chunk, unless a subclass previews
    differently.
    """

    __slots__ = ()

    def preview(self, features: Features) -> Decision:
        """Request a score for every chunk."""
        return features.decision("verify", why="every chunk is scored")

    # every gate must override this, because the preview's "verify" is not a final decision
    @abstractmethod
    def decide(self, features: Features, score: float) -> Decision:
        """Return "accept" or "escalate" for a chunk of this score."""

    def observe(self, decision: Decision, escalated: bool) -> None:  # noqa: B027  # a default
        """Learn nothing."""


@dataclass(frozen=True, slots=True)
class FixedGate(NonLearningGate):
    """A gate that always gives the same decision: accept every chunk, or escalate every chunk."""

    reads: ClassVar[GateReads] = "nothing"
    action: Literal["accept", "escalate"]

    def preview(self, features: Features) -> Decision:
        """Decide without a score."""
        return features.decision(self.action, float(self.action == "escalate"), "fixed")

    def decide(self, features: Features, score: float) -> Decision:
        """Return the same decision, with the score of the chunk."""
        return replace(self.preview(features), score=score)


@dataclass(frozen=True, slots=True)
class CoinGate(NonLearningGate):
    """A gate that tosses a seeded coin per chunk: the baseline that escalates as often but at
    random.
    """

    reads: ClassVar[GateReads] = "nothing"
    rate: float
    seed: int = 0

    def preview(self, features: Features) -> Decision:
        """Return the decision of this chunk's coin."""
        action: Action = "escalate" if features.uniform(self.seed, "coin") < self.rate else "accept"
        return features.decision(action, self.rate, "coin")

    def decide(self, features: Features, score: float) -> Decision:
        """Return the same decision, with the score of the chunk."""
        return replace(self.preview(features), score=score)


@dataclass(frozen=True, slots=True)
class TrialGate(NonLearningGate):
    """A gate that tosses a seeded coin for each chunk, after the chunk was scored.

    Chance alone decides, so escalated chunks differ from the others in the takeover only. The
    scores are recorded so that their relation to the effect of a takeover can be learned.
    """

    rate: float
    seed: int = 0

    def decide(self, features: Features, score: float) -> Decision:
        """Toss the coin of this chunk."""
        action: Action = "escalate" if features.uniform(self.seed, "coin") < self.rate else "accept"
        return features.decision(action, self.rate, "coin that ignores the score", score=score)


@dataclass(frozen=True, slots=True)
class ThresholdGate(NonLearningGate):
    """A gate that escalates above (or below) a fixed score, without any guarantee on the rate."""

    reads: ClassVar[GateReads] = "score"
    threshold: float
    worse: Literal["above", "below"] = "above"

    def decide(self, features: Features, score: float) -> Decision:
        """Compare the score with the threshold; escalate if the score is not a number."""
        fine = score <= self.threshold if self.worse == "above" else score >= self.threshold
        sign = "<=" if self.worse == "above" else ">="
        why = f"{score:.4g} {'is' if fine else 'is not'} {sign} {self.threshold:.4g}"
        return features.decision("accept" if fine else "escalate", math.nan, why, score=score)


@dataclass(frozen=True, slots=True)
class StaticRankGate(NonLearningGate):
    """The published rule, for comparison: escalate if c/N >= tau, at every turn.

    The rank c/N is taken among stored scores of turn 0: those of the chunk's question, or one pool
    of all questions with the name "".
    """

    reads: ClassVar[GateReads] = "score"
    pools: Mapping[str, tuple[float, ...]]  # scores in ascending order
    tau: float

    @classmethod
    def of(cls, scores: Sequence[float], rate: float) -> StaticRankGate:
        """Make the gate from calibration scores in any order, with tau = 1 - rate."""
        if not scores:
            raise OptionError(
                "calibration scores",
                "no scores are given, but the published rule needs calibration scores before the run",
            )
        return cls({"": tuple(sorted(scores))}, 1 - rate)

    @classmethod
    def by_question(
        cls, scores: Sequence[float], questions: Sequence[str], rate: float
    ) -> StaticRankGate:
        """Make the gate that ranks a chunk among the calibration scores of its question.

        :raises OptionError: if no score names a question.
        """
        pools: dict[str, list[float]] = {}
        for question, score in zip(questions, scores, strict=True):
            if question:
                pools.setdefault(question, []).append(score)
        if not pools:
            raise OptionError(
                "calibration scores",
                "no score names a question, but the published rule by question needs scores "
                "of the run's questions",
            )
        return cls({name: tuple(sorted(pool)) for name, pool in pools.items()}, 1 - rate)

    def decide(self, features: Features, score: float) -> Decision:
        """Decide by the rank as published: ties do not count as below, and nothing is added to c or
        N.

        As published, a chunk of a question without stored scores is accepted.
        """
        pool = self.pools.get("", ()) or self.pools.get(features.question, ())
        rate = 1 - self.tau
        if not pool:
            why = "no stored score for this question: accepted, as published"
            return features.decision("accept", rate, why, score=score)
        p = bisect_left(pool, score) / len(pool)
        action: Action = "escalate" if not math.isfinite(score) or p >= self.tau else "accept"
        why = f"rank {p:.4g} against {self.tau:.4g}, static"
        return features.decision(action, rate, why, score=score, p=p)


CUES = (
    "wait",
    "hmm",
    "alternatively",
    "hold on",
    "let me check",
    "let me verify",
    "another way",
    "is wrong",
)


@dataclass(frozen=True, slots=True)
class CueGate(NonLearningGate):
    """Speculative Thinking: escalate a chunk if its text hesitates or checks itself."""

    reads: ClassVar[GateReads] = "nothing"  # no number, but the text
    needs_text: ClassVar[bool] = True
    cues: tuple[str, ...] = CUES

    def preview(self, features: Features) -> Decision:
        """Escalate the chunk if its text contains a cue."""
        text = features.text.lower()
        cue = next((cue for cue in self.cues if cue in text), None)
        return features.decision(
            "escalate" if cue else "accept", math.nan, f"cue {cue!r}" if cue else "no cue"
        )

    def decide(self, features: Features, score: float) -> Decision:
        """Return the same decision, with the score of the chunk."""
        return replace(self.preview(features), score=score)


@dataclass(frozen=True, slots=True)
class TopGate:
    """The synchronous gate, which sorts each round and escalates the worst share `rate` of its
    members.

    Rounding errors carry over to the question's next round. Sorting needs the scores of the whole
    round, so it needs a barrier.
    """

    reads: ClassVar[GateReads] = "score"
    rate: float
    _carry: dict[str, float]

    @classmethod
    def of(cls, rate: float) -> TopGate:
        """Create a gate without carried rounding errors."""
        if not 0 <= rate <= 1:
            raise OptionError("rate", f"{rate} is outside [0, 1]")
        return cls(rate, {})

    def decide_round(self, round_: Sequence[tuple[Features, float]]) -> list[Decision]:
        """Escalate the worst chunks of the round; a score that is not a number is worse than any
        number.
        """
        question = round_[0][0].question
        want = self.rate * len(round_) + self._carry.get(question, 0.0)
        count = max(0, min(len(round_), math.floor(want + 0.5)))
        self._carry[question] = want - count
        badness = [math.inf if math.isnan(score) else score for _, score in round_]
        worst_first = sorted(range(len(round_)), key=lambda member: -badness[member])
        escalated = set(worst_first[:count])
        why = f"rank in a round of {len(round_)}"
        decisions: list[Decision] = []
        for member, (features, score) in enumerate(round_):
            action: Action = "escalate" if member in escalated else "accept"
            decisions.append(features.decision(action, self.rate, why, score=score))
        return decisions

    def forget(self, question: str) -> None:
        """Drop the rounding error of this question."""
        self._carry.pop(question, None)


Meanwhile = Literal["accept", "escalate"]


@dataclass(frozen=True, slots=True)
class CappedGate:
    """Another gate under a hard cap: each escalation needs a slot, so the cap holds in any order of
    completion.

    `take` reserves a slot, and returns False if no slot is left. The inner gate observes the action
    that was carried out.
    """

    inner: Gate
    take: Callable[[Features], bool]

    def preview(self, features: Features) -> Decision:
        """Return the inner gate's decision, but escalate only if a slot is left."""
        return self._capped(features, self.inner.preview(features))

    def decide(self, features: Features, score: float) -> Decision:
        """Return the inner gate's decision, but escalate only if a slot is left."""
        return self._capped(features, self.inner.decide(features, score))

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Let the inner gate observe what was done."""
        self.inner.observe(decision, escalated)

    def _capped(self, features: Features, decision: Decision) -> Decision:
        if decision.escalate and not self.take(features):
            return _overruled(
                decision,
                "accept",
                "budget",
                f"{decision.why}; accepted: the cap allows no further escalation",
            )
        return decision


_SIBLINGS = 3  # siblings that must have an answer before their agreement counts


@dataclass(frozen=True, slots=True)
class AgreementGate:
    """Another gate, except that a chunk is accepted if its siblings agree on an answer.

    The inner gate observes the action that was carried out, so a gate that controls a rate escalates
    other chunks instead.
    """

    inner: Gate
    # no chunk escalates once this share of the answered siblings has the same answer
    agreement: float

    def preview(self, features: Features) -> Decision:
        """Return the inner gate's decision, but accept if the siblings agree."""
        return self._spared(features, self.inner.preview(features))

    def decide(self, features: Features, score: float) -> Decision:
        """Return the inner gate's decision, but accept if the siblings agree."""
        return self._spared(features, self.inner.decide(features, score))

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Let the inner gate observe what was done."""
        self.inner.observe(decision, escalated)

    def _spared(self, features: Features, decision: Decision) -> Decision:
        if (
            decision.escalate
            and features.answered >= _SIBLINGS
            and features.agreement >= self.agreement
        ):
            return _overruled(
                decision, "accept", "budget", f"{decision.why}; accepted: siblings agree"
            )
        return decision


@dataclass(frozen=True, slots=True)
class WarmScore:
    """A score of the warm-up with its origin; `tokens` is the number of tokens scored for it."""

    score: float
    question: str
    turn: int
    tokens: int


class WarmingGate:
    """A gate that first stores the run's first scores, then lets `make` build a gate from them.

    During this warm-up every chunk is accepted, or every chunk is escalated. Its chunks belong to
    rollouts that vote, and its cost counts like any other; `spent` is the number of tokens that the
    target scored for it. Short chunks arrive first, so the warm-up's scores are biased towards
    short chunks, unlike scores of a calibration run.
    """

    def __init__(
        self,
        scores: int,
        make: Callable[[Sequence[WarmScore]], Gate],
        meanwhile: Meanwhile = "accept",
    ) -> None:
        """Create a gate with a warm-up of `scores` scores.

        :raises OptionError: for fewer than one score, or an unknown `meanwhile`.
        """
        if scores < 1:
            raise OptionError(
                "warmup",
                f"a warm-up of {scores} scores is too short; give at least 1, or no warm-up",
            )
        if meanwhile not in get_args(Meanwhile):
            raise OptionError(
                "meanwhile", f"unknown value {meanwhile!r}", get_args(Meanwhile), meanwhile
            )
        self._scores = scores
        self._make = make
        self._meanwhile: Meanwhile = meanwhile
        self._seen: list[WarmScore] = []
        self.gate: Gate | None = None  # the gate that was built, once the warm-up is over

    @property
    def spent(self) -> int:
        """Return the number of tokens that the target has scored for the warm-up."""
        return sum(one.tokens for one in self._seen)

    def preview(self, features: Features) -> Decision:
        """Request a score for every chunk of the warm-up; afterwards return the gate's preview."""
        if self.gate is not None:
            return self.gate.preview(features)
        return self._decision(
            features, "verify", None, "warm-up: the chunk is scored only to store the score"
        )

    def decide(self, features: Features, score: float) -> Decision:
        """Store the score during the warm-up; afterwards return the gate's decision.

        :raises CalibrationInputError: if `score` is not a valid score.
        """
        if self.gate is not None:
            return self.gate.decide(features, score)
        if math.isnan(score):
            raise CalibrationInputError("score", score, "a number")
        self._seen.append(WarmScore(score, features.question, features.turn, features.tokens))
        why = f"warm-up, {len(self._seen)} of {self._scores}: stored only"
        decision = self._decision(features, self._meanwhile, score, why)
        if len(self._seen) == self._scores:
            self.gate = self._make(self._seen)
        return decision

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Report a decision to the gate, unless it is a decision of the warm-up."""
        if self.gate is not None and decision.origin != "warm-up":
            self.gate.observe(decision, escalated)

    def forget(self, question: str) -> None:
        """Let the gate that was built drop what it stores for the question."""
        let_go(self.gate, question)

    def _decision(
        self, features: Features, action: Action, score: float | None, why: str
    ) -> Decision:
        return features.decision(
            action, float(self._meanwhile == "escalate"), why, score=score, origin="warm-up"
        )


@runtime_checkable
class GuaranteedGate(Protocol):
    """A gate with a guarantee, which is written into the manifest and the report."""

    @property
    def promise(self) -> tuple[str, str]:
        """Return the texts of the guarantee and of the conditions that void it."""
        ...


@dataclass(frozen=True, slots=True)
class CertifiedGate:
    """The unchanged gate that a labelled calibration run has certified.

    It learns nothing, and every decision mentions the certificate.
    """

    inner: Gate
    # the guarantee and the conditions that void it, for the manifest and the report of a run
    promise: tuple[str, str]

    def preview(self, features: Features) -> Decision:
        """Return the certified gate's preview."""
        return self.inner.preview(features)

    def decide(self, features: Features, score: float) -> Decision:
        """Return the certified gate's decision."""
        decision = self.inner.decide(features, score)
        return _overruled(
            decision, decision.action, "certificate", f"{decision.why}; certified policy"
        )

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Learn nothing, because a gate that changes would no longer be the certified one."""


def _overruled(decision: Decision, action: Action, origin: Origin, why: str) -> Decision:
    """Return the decision with another action and reason.

    A decision of the warm-up keeps its origin, because the gate must not learn from it.
    """
    return replace(
        decision,
        action=action,
        why=why,
        origin="warm-up" if decision.origin == "warm-up" else origin,
    )
