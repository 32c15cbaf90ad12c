"""Gates: rules that decide whether to escalate a chunk."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, SupportsFloat, cast, get_args, runtime_checkable

from atts.core import Action, Decision, Features, Origin
from atts.errors import CalibrationInputError, OptionError, counted

GateReads = Literal["score", "nothing"]
"""The input that a gate's decision uses: the score of the chunk, or no number at all."""


class Gate(Protocol):
    """A rule that decides whether to accept or to escalate a chunk.

    `preview` is called before the target scores, `decide` after it, and `observe` last. A preview
    of "verify" requests the score; "accept" and "escalate" skip the score. `observe` receives the
    action that was carried out.

    A gate may set these attributes on its class. `needs_draft_logprobs = True`: a draft that sends
    no log-probabilities is refused before the run. Single chunks may still lack log-probabilities,
    so the gate must never accept a chunk with NaN. `reads = "score"` or `reads = "nothing"`:
    engines need not send other numbers. If `reads` is missing, the draft's log-probabilities are
    requested as well.
    """

    def preview(self, features: Features) -> Decision:
        """Return the decision on a chunk without a score; "verify" requests the score."""
        ...

    def decide(self, features: Features, score: float) -> Decision:
        """Return the decision on a chunk with this score.

        :raises CalibrationInputError: if `score` is not a valid score; the pipeline then escalates
            the chunk.
        """
        ...

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Learn from a decision; `escalated` says whether the chunk was really escalated."""
        ...


@runtime_checkable
class RoundGate(Protocol):
    """A gate that ranks the chunks that the rollouts of a problem wrote in one round. It can decide
    only after every running rollout has written its chunk.
    """

    def decide_round(self, round_: Sequence[tuple[Features, float]]) -> list[Decision]:
        """Return one decision for each chunk of the round, in the same order."""
        ...


@runtime_checkable
class Forgetting(Protocol):
    """A gate or calibrator that stores data for each problem, and can drop this data."""

    def forget(self, question: str) -> None:
        """Drop the data on this problem, because the problem is finished."""
        ...


def let_go(kept: object, question: str) -> None:
    """Let a gate, and every gate that it wraps, drop the data that it stores for a question."""
    # `isinstance` with the protocol would take ten times as long as `hasattr`.
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
        """Return the decision on a score. It depends only on stored scores and on decisions
        observed before.
        """
        ...

    def observe(self, decision: Decision, escalated: bool | None = None) -> None:
        """Learn from the action that was carried out."""
        ...


class ConformalGate:
    """A gate that decides by the rank of a chunk's score among stored scores.

    Scores of short chunks arrive first, which would bias the ranks. So `preview` numbers the score
    requests, and the calibrator processes the scores in the order of these numbers.
    """

    reads: ClassVar[GateReads] = "score"

    def __init__(self, calibrator: CalibratorProtocol) -> None:
        self.calibrator = calibrator
        self._issued = 0

    def continue_with(self, calibrator: CalibratorProtocol, issued: int) -> None:
        """Use the calibrator of an earlier session that requested `issued` scores."""
        self.calibrator = calibrator
        self._issued = issued

    def preview(self, features: Features) -> Decision:
        """Request a score for every chunk; the returned decision contains the sequence number of
        the request.
        """
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
        """Return the calibrator's decision on the score."""
        chunk = (features.question, features.turn, features.sample, features.issue)
        return self.calibrator.decide(
            score, *chunk, left=features.left, length=features.tokens or None
        )

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Report the decision to the calibrator. An escalation without a score changes only the
        realised rate, not the stored scores.
        """
        # If the decision was read from an earlier session, continue counting after its number.
        if decision.issue is not None:
            self._issued = max(self._issued, decision.issue + 1)
        self.calibrator.observe(decision, escalated)

    def forget(self, question: str) -> None:
        """Let the calibrator drop the data that it stores for the question."""
        let_go(self.calibrator, question)


class NonLearningGate(ABC):
    """A gate that learns nothing; it requests a score for every chunk, unless a subclass changes
    `preview`.
    """

    __slots__ = ()

    def preview(self, features: Features) -> Decision:
        """Request a score for every chunk."""
        return features.decision("verify", why="every chunk is scored")

    @abstractmethod
    def decide(self, features: Features, score: float) -> Decision:
        """Return "accept" or "escalate" for a chunk with this score."""

    def observe(self, decision: Decision, escalated: bool) -> None:  # noqa: B027  # a default
        """Learn nothing."""


@dataclass(frozen=True, slots=True)
class FixedGate(NonLearningGate):
    """A gate that always gives the same decision: accept every chunk, or escalate every chunk."""

    reads: ClassVar[GateReads] = "nothing"
    action: Literal["accept", "escalate"]

    def preview(self, features: Features) -> Decision:
        """Return the gate's constant decision, without requesting a score."""
        return features.decision(self.action, float(self.action == "escalate"), "fixed")

    def decide(self, features: Features, score: float) -> Decision:
        """Return the gate's constant decision, with the chunk's score."""
        return replace(self.preview(features), score=score)


@dataclass(frozen=True, slots=True)
class CoinGate(NonLearningGate):
    """A gate that tosses a seeded coin per chunk: a baseline that escalates at the nominal rate,
    but at random.
    """

    reads: ClassVar[GateReads] = "nothing"
    rate: float
    seed: int = 0

    def preview(self, features: Features) -> Decision:
        """Return the decision of this chunk's coin toss, without requesting a score."""
        action: Action = "escalate" if features.uniform(self.seed, "coin") < self.rate else "accept"
        return features.decision(action, self.rate, "coin")

    def decide(self, features: Features, score: float) -> Decision:
        """Return the decision of this chunk's coin toss, with the chunk's score."""
        return replace(self.preview(features), score=score)


@dataclass(frozen=True, slots=True)
class TrialGate(NonLearningGate):
    """A gate that tosses a seeded coin for each chunk, after the chunk was scored.

    The decision is random, so a difference between escalated and accepted chunks is caused by the
    escalation. The scores are recorded, so that a judge can learn which scores predict a gain.
    """

    rate: float
    seed: int = 0

    def decide(self, features: Features, score: float) -> Decision:
        """Return the decision of this chunk's coin toss, with the chunk's score."""
        action: Action = "escalate" if features.uniform(self.seed, "coin") < self.rate else "accept"
        return features.decision(
            action, self.rate, "decided by a coin that ignores the score", score=score
        )


@dataclass(frozen=True, slots=True)
class ThresholdGate(NonLearningGate):
    """A gate that escalates chunks above (or below) a fixed score, without a guarantee on the rate."""

    reads: ClassVar[GateReads] = "score"
    threshold: float
    worse: Literal["above", "below"] = "above"

    def decide(self, features: Features, score: float) -> Decision:
        """Escalate the chunk if its score is beyond the threshold, or NaN."""
        fine = score <= self.threshold if self.worse == "above" else score >= self.threshold
        sign = "<=" if self.worse == "above" else ">="
        why = f"{score:.4g} {'is' if fine else 'is not'} {sign} {self.threshold:.4g}"
        return features.decision("accept" if fine else "escalate", math.nan, why, score=score)


@dataclass(frozen=True, slots=True)
class StaticRankGate(NonLearningGate):
    """The rule of the original paper, as a baseline: escalate if c/N >= tau, at every turn.

    The rank c/N is the fraction of stored scores of turn 0 that are below the chunk's score. The
    stored scores are those of all questions, or only those of the chunk's question. See `of` and
    `by_question`.
    """

    reads: ClassVar[GateReads] = "score"
    # for each question: calibration scores in ascending order; the key "" has the scores of all
    # questions
    pools: Mapping[str, tuple[float, ...]]
    tau: float

    @classmethod
    def of(cls, scores: Sequence[float], rate: float) -> StaticRankGate:
        """Make the gate that ranks a chunk among the calibration scores of all questions, given in
        any order. The threshold tau is 1 - rate.
        """
        if not scores:
            raise OptionError(
                "calibration scores",
                "the published rule needs calibration scores before the run; give them with "
                "--scores",
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
                "the published rule with ranks per question needs scores of the run's questions, "
                "but the stored scores do not record their questions",
            )
        return cls({name: tuple(sorted(pool)) for name, pool in pools.items()}, 1 - rate)

    def decide(self, features: Features, score: float) -> Decision:
        """Accept or escalate a chunk by the paper's rank c/N, without smoothing: c of the N stored
        scores are strictly below the chunk's score.

        As in the paper's code, the chunk is accepted if its question has no stored scores.
        """
        pool = self.pools.get("", ()) or self.pools.get(features.question, ())
        rate = 1 - self.tau
        if not pool:
            why = "accepted, as in the published code, because this question has no stored score"
            return features.decision("accept", rate, why, score=score)
        p = bisect_left(pool, score) / len(pool)
        action: Action = "escalate" if not math.isfinite(score) or p >= self.tau else "accept"
        why = f"rank {p:.4g}, published threshold {self.tau:.4g}"
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
    """The gate of Speculative Thinking: escalate a chunk if its text contains a cue such as "wait"."""

    reads: ClassVar[GateReads] = "nothing"  # This gate reads the chunk's text, but no score.
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
        """Return the decision of `preview`, with the chunk's score."""
        return replace(self.preview(features), score=score)


@dataclass(frozen=True, slots=True)
class TopGate:
    """A gate that escalates the fraction `rate` of the chunks in a round: those with the worst
    scores.

    The rounding error of a round is carried over to the question's next round. All rollouts wait
    until every chunk of the round has its score.
    """

    reads: ClassVar[GateReads] = "score"
    rate: float
    _carry: dict[str, float]

    @classmethod
    def of(cls, rate: float) -> TopGate:
        """Create a gate that has no rounding errors to carry over yet."""
        if not 0 <= rate <= 1:
            raise OptionError("rate", f"{rate} is outside [0, 1]")
        return cls(rate, {})

    def decide_round(self, round_: Sequence[tuple[Features, float]]) -> list[Decision]:
        """Escalate the worst chunks of the round. A NaN score counts as infinity, the worst score."""
        question = round_[0][0].question
        want = self.rate * len(round_) + self._carry.get(question, 0.0)
        count = max(0, min(len(round_), math.floor(want + 0.5)))
        self._carry[question] = want - count
        badness = [math.inf if math.isnan(score) else score for _, score in round_]
        worst_first = sorted(range(len(round_)), key=lambda member: -badness[member])
        escalated = set(worst_first[:count])
        why = f"rank among the {counted(len(round_), 'chunk')} of a round"
        decisions: list[Decision] = []
        for member, (features, score) in enumerate(round_):
            action: Action = "escalate" if member in escalated else "accept"
            decisions.append(features.decision(action, self.rate, why, score=score))
        return decisions

    def forget(self, question: str) -> None:
        """Drop the rounding error that was carried over for this question."""
        self._carry.pop(question, None)


Meanwhile = Literal["accept", "escalate"]


@dataclass(frozen=True, slots=True)
class CappedGate:
    """A wrapper that limits how often a gate escalates. Above the limit, chunks are accepted
    instead.

    `take` reserves one escalation, and returns False if the limit is reached. The inner gate
    observes the action that was carried out.
    """

    inner: Gate
    take: Callable[[Features], bool]

    def preview(self, features: Features) -> Decision:
        """Return the inner gate's decision, but accept if the limit on escalations is reached."""
        return self._capped(features, self.inner.preview(features))

    def decide(self, features: Features, score: float) -> Decision:
        """Return the inner gate's decision, but accept if the limit on escalations is reached."""
        return self._capped(features, self.inner.decide(features, score))

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Report to the inner gate the action that was carried out."""
        self.inner.observe(decision, escalated)

    def _capped(self, features: Features, decision: Decision) -> Decision:
        if decision.escalate and not self.take(features):
            return _overruled(
                decision,
                "accept",
                "budget",
                f"{decision.why}; accepted, because the cap allows no further escalation",
            )
        return decision


# The agreement of siblings is used only if at least this many siblings have an answer.
_SIBLINGS = 3


@dataclass(frozen=True, slots=True)
class AgreementGate:
    """A wrapper that lets a gate decide, but accepts the chunk if the sibling rollouts already
    agree on an answer.

    The inner gate observes the actions that were carried out, so an inner gate that controls a rate
    escalates other chunks instead.
    """

    inner: Gate
    # A chunk is accepted if at least this share (0 to 1) of the answered siblings have the same
    # answer.
    agreement: float

    def preview(self, features: Features) -> Decision:
        """Return the inner gate's decision, but accept if the siblings agree."""
        return self._spared(features, self.inner.preview(features))

    def decide(self, features: Features, score: float) -> Decision:
        """Return the inner gate's decision, but accept if the siblings agree."""
        return self._spared(features, self.inner.decide(features, score))

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Report to the inner gate the action that was carried out."""
        self.inner.observe(decision, escalated)

    def _spared(self, features: Features, decision: Decision) -> Decision:
        if (
            decision.escalate
            and features.answered >= _SIBLINGS
            and features.agreement >= self.agreement
        ):
            return _overruled(
                decision,
                "accept",
                "budget",
                f"{decision.why}; accepted, because the sibling rollouts agree",
            )
        return decision


@dataclass(frozen=True, slots=True)
class WarmScore:
    """A score from the warm-up with its question, its turn and the number of scored tokens."""

    score: float
    question: str
    turn: int
    tokens: int


class WarmingGate:
    """A gate that stores the first scores of the run, then lets `make` build a gate from them.

    During this warm-up every chunk is accepted, or every chunk is escalated. The chunks of the
    warm-up belong to rollouts that vote, and their cost counts like any other cost; `spent` is the
    number of tokens that the target scored for the warm-up. Short chunks arrive first, so the
    warm-up's scores are biased towards short chunks, unlike the scores of a calibration run.
    """

    def __init__(
        self,
        scores: int,
        make: Callable[[Sequence[WarmScore]], Gate],
        meanwhile: Meanwhile = "accept",
    ) -> None:
        """Create a gate with a warm-up that ends after `scores` scores.

        :raises OptionError: for fewer than one score, or an unknown `meanwhile`.
        """
        if scores < 1:
            raise OptionError(
                "warmup",
                f"a warm-up of {scores} scores is too short; give at least 1 score, or no warm-up",
            )
        if meanwhile not in get_args(Meanwhile):
            raise OptionError(
                "meanwhile", f"unknown value {meanwhile!r}", get_args(Meanwhile), meanwhile
            )
        self._scores = scores
        self._make = make
        self._meanwhile: Meanwhile = meanwhile
        self._seen: list[WarmScore] = []
        # the gate that `make` returned; None as long as the warm-up lasts
        self.gate: Gate | None = None

    @property
    def spent(self) -> int:
        """Return the number of tokens that the target has scored for the warm-up."""
        return sum(one.tokens for one in self._seen)

    def preview(self, features: Features) -> Decision:
        """Request a score during the warm-up; afterwards return the preview of the gate that `make`
        built.
        """
        if self.gate is not None:
            return self.gate.preview(features)
        return self._decision(
            features,
            "verify",
            None,
            "during the warm-up, scores are only stored for the calibration",
        )

    def decide(self, features: Features, score: float) -> Decision:
        """Store the score during the warm-up; afterwards return the decision of the gate that
        `make` built.

        :raises CalibrationInputError: if `score` is not a valid score.
        """
        if self.gate is not None:
            return self.gate.decide(features, score)
        if math.isnan(score):
            raise CalibrationInputError("score", score, "a number")
        self._seen.append(WarmScore(score, features.question, features.turn, features.tokens))
        why = f"stored for the calibration as warm-up score {len(self._seen)} of {self._scores}"
        decision = self._decision(features, self._meanwhile, score, why)
        if len(self._seen) == self._scores:
            self.gate = self._make(self._seen)
        return decision

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Report a decision to the gate that `make` built, unless the decision was taken in the
        warm-up.
        """
        if self.gate is not None and decision.origin != "warm-up":
            self.gate.observe(decision, escalated)

    def forget(self, question: str) -> None:
        """Let the gate that `make` built drop the data that it stores for the question."""
        let_go(self.gate, question)

    def _decision(
        self, features: Features, action: Action, score: float | None, why: str
    ) -> Decision:
        return features.decision(
            action, float(self._meanwhile == "escalate"), why, score=score, origin="warm-up"
        )


@runtime_checkable
class GuaranteedGate(Protocol):
    """A gate that gives a guarantee. The text of the guarantee is stored in the manifest and
    printed in the report.
    """

    @property
    def promise(self) -> tuple[str, str]:
        """Return the texts of the guarantee and of the conditions that void it."""
        ...


@dataclass(frozen=True, slots=True)
class CertifiedGate:
    """A wrapper around a gate that a labelled calibration run has certified. The gate stays
    unchanged.

    The wrapper learns nothing, and the reason of every decision mentions the certificate.
    """

    inner: Gate
    # Two texts for the manifest and the report: the guarantee, and the conditions under which it
    # does not hold.
    promise: tuple[str, str]

    def preview(self, features: Features) -> Decision:
        """Return the certified gate's preview."""
        return self.inner.preview(features)

    def decide(self, features: Features, score: float) -> Decision:
        """Return the certified gate's decision."""
        decision = self.inner.decide(features, score)
        return _overruled(
            decision,
            decision.action,
            "certificate",
            f"{decision.why}; decided by the certified policy",
        )

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Learn nothing, because a gate that learns would differ from the certified one."""


def _overruled(decision: Decision, action: Action, origin: Origin, why: str) -> Decision:
    """Return the decision with another action, reason and origin.

    A decision of the warm-up keeps its origin "warm-up", because the gate must not learn from it.
    """
    return replace(
        decision,
        action=action,
        why=why,
        origin="warm-up" if decision.origin == "warm-up" else origin,
    )
