"""Gates: whether the target takes over a chunk, decided from numbers alone and without waiting."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, SupportsFloat, cast, get_args, runtime_checkable

from atts.core import Action, Decision, Features, Origin
from atts.errors import CalibrationInputError, OptionError


class Gate(Protocol):
    """Decides from numbers alone. `preview` comes before the target has scored, `decide` after,
    `observe` last.

    A preview of "verify" asks for the score; "accept" and "escalate" save it. `observe` hears what
    was really done. A gate that decides from the draft's log-probabilities sets
    `needs_draft_logprobs = True` on its class: a draft that gives none is then refused before the
    run. It still compares so that NaN is never accepted, for single chunks may have none.
    """

    def preview(self, features: Features) -> Decision:
        """Return whether the chunk needs a score at all."""
        ...

    def decide(self, features: Features, score: float) -> Decision:
        """Return the action for a chunk of this score.

        :raises CalibrationInputError: if `score` is not a score; the pipeline turns that into an
            escalation.
        """
        ...

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Learn from a decision that was carried out, or was overridden."""
        ...


@runtime_checkable
class RoundGate(Protocol):
    """A synchronous gate: it ranks a whole round of siblings, so all of them must be there."""

    def decide_round(self, round_: Sequence[tuple[Features, float]]) -> list[Decision]:
        """Return one decision per member, in the order given."""
        ...


@runtime_checkable
class Forgetting(Protocol):
    """A gate or a calibrator that keeps something of each problem, and lets go of it."""

    def forget(self, question: str) -> None:
        """Drop what only the decisions of this problem need: it is over."""
        ...


def let_go(kept: object, question: str) -> None:
    """Let a gate forget a question, and every gate inside it."""
    # `isinstance` of a protocol takes ten times as long
    if hasattr(kept, "forget"):
        cast(Forgetting, kept).forget(question)
    inner = getattr(kept, "inner", None)
    if inner is not None:
        let_go(inner, question)


class CalibratorProtocol(Protocol):
    """A calibrator as a conformal gate needs it; `atts.calibration.Calibrator` is one."""

    @property
    def rate(self) -> SupportsFloat:
        """Return the nominal rate."""
        ...

    def decide(
        self, score: float, question: str = "", turn: int = 0, sample: int | None = None, issue: int | None = None,
        left: float | None = None, length: float | None = None,
    ) -> Decision:  # fmt: skip
        """Return a decision made from stored scores and decisions only."""
        ...

    def observe(self, decision: Decision, escalated: bool | None = None) -> None:
        """Learn what was really done."""
        ...


class ConformalGate:
    """The rank of a chunk's score among stored ones decides.

    Scores reach the calibrator in the order in which they were asked for, not in which they came
    back: what comes back first is short. The order is counted here, at the preview.
    """

    def __init__(self, calibrator: CalibratorProtocol) -> None:
        self.calibrator = calibrator
        self._issued = 0

    def continue_with(self, calibrator: CalibratorProtocol, issued: int) -> None:
        """Decide by a calibrator of an earlier session, for which so many scores were asked."""
        self.calibrator = calibrator
        self._issued = issued

    def preview(self, features: Features) -> Decision:
        """Ask for a score, and number the request."""
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
        """Decide as the calibrator does."""
        chunk = (features.question, features.turn, features.sample, features.issue)
        return self.calibrator.decide(
            score, *chunk, left=features.left, length=features.tokens or None
        )

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Feed the calibrator; an escalation that was forced without a score counts for the rate
        alone.
        """
        if decision.issue is not None:  # decisions of an earlier session come with their numbers
            self._issued = max(self._issued, decision.issue + 1)
        self.calibrator.observe(decision, escalated)

    def forget(self, question: str) -> None:
        """Let the calibrator forget the question."""
        let_go(self.calibrator, question)


class NonLearningGate(ABC):
    """A gate that learns nothing and has every chunk scored, unless a subclass previews otherwise."""

    __slots__ = ()

    def preview(self, features: Features) -> Decision:
        """Ask for a score of every chunk."""
        return features.decision("verify", why="every chunk is scored")

    # abstract: a preview of "verify" cannot be the final decision
    @abstractmethod
    def decide(self, features: Features, score: float) -> Decision:
        """Return "accept" or "escalate" for a chunk of this score."""

    def observe(self, decision: Decision, escalated: bool) -> None:  # noqa: B027  # a default
        """Learn nothing."""


@dataclass(frozen=True, slots=True)
class FixedGate(NonLearningGate):
    """Always the same answer: rate 0 is the draft alone, rate 1 hands every chunk to the target."""

    action: Literal["accept", "escalate"]

    def preview(self, features: Features) -> Decision:
        """Decide without a score."""
        return features.decision(self.action, float(self.action == "escalate"), "fixed")

    def decide(self, features: Features, score: float) -> Decision:
        """Decide the same, with the score of the chunk."""
        return replace(self.preview(features), score=score)


@dataclass(frozen=True, slots=True)
class CoinGate(NonLearningGate):
    """A seeded coin per chunk: the baseline that spends the same budget without looking."""

    rate: float
    seed: int = 0

    def preview(self, features: Features) -> Decision:
        """Toss the coin of this chunk."""
        action: Action = "escalate" if features.uniform(self.seed, "coin") < self.rate else "accept"
        return features.decision(action, self.rate, "coin")

    def decide(self, features: Features, score: float) -> Decision:
        """Decide the same, with the score of the chunk."""
        return replace(self.preview(features), score=score)


@dataclass(frozen=True, slots=True)
class TrialGate(NonLearningGate):
    """A seeded coin per chunk, tossed after the chunk was scored.

    Chance alone decides, so what escalations change can be told apart from which chunks they were;
    the scores are there to learn from.
    """

    rate: float
    seed: int = 0

    def decide(self, features: Features, score: float) -> Decision:
        """Toss the coin of this chunk."""
        action: Action = "escalate" if features.uniform(self.seed, "coin") < self.rate else "accept"
        return features.decision(action, self.rate, "coin, whatever the score", score=score)


@dataclass(frozen=True, slots=True)
class ThresholdGate(NonLearningGate):
    """Escalate above (or below) a fixed number: ratings, or a static perplexity cut. No rate is
    promised.
    """

    threshold: float
    worse: Literal["above", "below"] = "above"

    def decide(self, features: Features, score: float) -> Decision:
        """Compare the score with the threshold; a score that is not a number is on the wrong side."""
        fine = score <= self.threshold if self.worse == "above" else score >= self.threshold
        sign = "<=" if self.worse == "above" else ">="
        why = f"{score:.4g} {'is' if fine else 'is not'} {sign} {self.threshold:.4g}"
        return features.decision("accept" if fine else "escalate", math.nan, why, score=score)


@dataclass(frozen=True, slots=True)
class StaticRankGate(NonLearningGate):
    """The published rule, for comparison: c/N >= tau against turn-0 scores fixed in advance, at
    every turn.

    A chunk is ranked in the pool of its question, or in the one pool of all questions, which has
    the name "".
    """

    pools: Mapping[str, tuple[float, ...]]  # ascending
    tau: float

    @classmethod
    def of(cls, scores: Sequence[float], rate: float) -> StaticRankGate:
        """Make the gate from calibration scores in any order; tau is 1 - rate."""
        if not scores:
            raise OptionError(
                "calibration scores", "none given; the published rule needs them before the run"
            )
        return cls({"": tuple(sorted(scores))}, 1 - rate)

    @classmethod
    def by_question(
        cls, scores: Sequence[float], questions: Sequence[str], rate: float
    ) -> StaticRankGate:
        """Make the gate that ranks a chunk among the calibration scores of its own question.

        :raises OptionError: no score names a question.
        """
        pools: dict[str, list[float]] = {}
        for question, score in zip(questions, scores, strict=True):
            if question:
                pools.setdefault(question, []).append(score)
        if not pools:
            raise OptionError(
                "calibration scores",
                "none names its question; the published rule by question needs scores of the same "
                "questions before the run",
            )
        return cls({name: tuple(sorted(pool)) for name, pool in pools.items()}, 1 - rate)

    def decide(self, features: Features, score: float) -> Decision:
        """Rank the score as published: ties count as not below, and nothing is added to either
        count.

        A question without stored scores is accepted, as published.
        """
        pool = self.pools.get("", ()) or self.pools.get(features.question, ())
        rate = 1 - self.tau
        if not pool:
            why = "no stored score of this question: accepted, as published"
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
    """Speculative Thinking: the target takes over where the draft's text hesitates or checks
    itself.
    """

    needs_text: ClassVar[bool] = True
    cues: tuple[str, ...] = CUES

    def preview(self, features: Features) -> Decision:
        """Look for a cue in the text."""
        text = features.text.lower()
        cue = next((cue for cue in self.cues if cue in text), None)
        return features.decision(
            "escalate" if cue else "accept", math.nan, f"cue {cue!r}" if cue else "no cue"
        )

    def decide(self, features: Features, score: float) -> Decision:
        """Decide the same, with the score of the chunk."""
        return replace(self.preview(features), score=score)


@dataclass(frozen=True, slots=True)
class TopGate:
    """The synchronous sort: of each round the worst `rate` of the members go over, rounding carried
    per question.

    It is the best one can do with a barrier, and the reason for the barrier.
    """

    rate: float
    _carry: dict[str, float]

    @classmethod
    def of(cls, rate: float) -> TopGate:
        """Make a gate with nothing carried."""
        if not 0 <= rate <= 1:
            raise OptionError("rate", f"{rate} is outside [0, 1]")
        return cls(rate, {})

    def decide_round(self, round_: Sequence[tuple[Features, float]]) -> list[Decision]:
        """Escalate the worst of the round; scores that are not numbers are the worst of all."""
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
        """Carry nothing of this question any further."""
        self._carry.pop(question, None)


Meanwhile = Literal["accept", "escalate"]


@dataclass(frozen=True, slots=True)
class CappedGate:
    """Another gate under a hard cap: an escalation needs a slot, and no order of completions
    exceeds the cap.

    `take` reserves one slot and says whether there was one; the inner gate hears what was really
    done.
    """

    inner: Gate
    take: Callable[[Features], bool]

    def preview(self, features: Features) -> Decision:
        """Decide as the inner gate, if a slot is left for it."""
        return self._capped(features, self.inner.preview(features))

    def decide(self, features: Features, score: float) -> Decision:
        """Decide as the inner gate, if a slot is left for it."""
        return self._capped(features, self.inner.decide(features, score))

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Pass it on."""
        self.inner.observe(decision, escalated)

    def _capped(self, features: Features, decision: Decision) -> Decision:
        if decision.escalate and not self.take(features):
            return _overruled(
                decision, "accept", "budget", f"{decision.why}; capped: no target slot left"
            )
        return decision


_SIBLINGS = 3  # with an answer, before their agreement counts


@dataclass(frozen=True, slots=True)
class AgreementGate:
    """Another gate, but chunks whose siblings agree on an answer are kept: the target is spent
    where they do not.

    The inner gate hears what was really done, so that one which holds a rate spends elsewhere what
    is saved here.
    """

    inner: Gate
    # the share of answered siblings behind one answer from which nothing goes over
    agreement: float

    def preview(self, features: Features) -> Decision:
        """Decide as the inner gate, unless the siblings agree."""
        return self._spared(features, self.inner.preview(features))

    def decide(self, features: Features, score: float) -> Decision:
        """Decide as the inner gate, unless the siblings agree."""
        return self._spared(features, self.inner.decide(features, score))

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Pass it on."""
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
    """A score of the warm-up and where it is from; `tokens` is what scoring it cost."""

    score: float
    question: str
    turn: int
    tokens: int


class WarmingGate:
    """Calibration from the run's own first scores: they are stored and not acted upon, then `make`
    builds the gate.

    The warm-up costs what it costs and is counted as everything else: its chunks belong to rollouts
    that vote, and `spent` says how many tokens the target scored for it. Meanwhile every chunk is
    kept, or every chunk goes over. What comes back first is short, so a warm-up leans that way;
    scores of a calibration run do not.
    """

    def __init__(
        self,
        scores: int,
        make: Callable[[Sequence[WarmScore]], Gate],
        meanwhile: Meanwhile = "accept",
    ) -> None:
        """Check the number of scores and what happens meanwhile.

        :raises OptionError: fewer than one score, or an unknown `meanwhile`.
        """
        if scores < 1:
            raise OptionError(
                "warmup", f"{scores} scores calibrate nothing; give at least 1, or no warm-up"
            )
        if meanwhile not in get_args(Meanwhile):
            raise OptionError(
                "meanwhile", f"unknown value {meanwhile!r}", get_args(Meanwhile), meanwhile
            )
        self._scores = scores
        self._make = make
        self._meanwhile: Meanwhile = meanwhile
        self._seen: list[WarmScore] = []
        self.gate: Gate | None = None  # the one that was built, once the warm-up is over

    @property
    def spent(self) -> int:
        """Return the number of tokens that the target has scored for the warm-up."""
        return sum(one.tokens for one in self._seen)

    def preview(self, features: Features) -> Decision:
        """Ask for a score of every chunk of the warm-up; afterwards, decide as the gate."""
        if self.gate is not None:
            return self.gate.preview(features)
        return self._decision(features, "verify", None, "warm-up: scored to be stored")

    def decide(self, features: Features, score: float) -> Decision:
        """Store the score of a warm-up; afterwards, as the gate says.

        :raises CalibrationInputError: it is not a score.
        """
        if self.gate is not None:
            return self.gate.decide(features, score)
        if math.isnan(score):
            raise CalibrationInputError("score", score, "a number")
        self._seen.append(WarmScore(score, features.question, features.turn, features.tokens))
        why = f"warm-up, {len(self._seen)} of {self._scores}: stored, not acted on"
        decision = self._decision(features, self._meanwhile, score, why)
        if len(self._seen) == self._scores:
            self.gate = self._make(self._seen)
        return decision

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Pass on what the gate decided; decisions of the warm-up were none of its own."""
        if self.gate is not None and decision.origin != "warm-up":
            self.gate.observe(decision, escalated)

    def forget(self, question: str) -> None:
        """Let the gate that was built forget the question."""
        let_go(self.gate, question)

    def _decision(
        self, features: Features, action: Action, score: float | None, why: str
    ) -> Decision:
        return features.decision(
            action, float(self._meanwhile == "escalate"), why, score=score, origin="warm-up"
        )


@runtime_checkable
class GuaranteedGate(Protocol):
    """A gate that carries a promise of its own: it goes into the manifest, and from there into the
    report.
    """

    @property
    def promise(self) -> tuple[str, str]:
        """Return the guarantee in words, and what voids it."""
        ...


@dataclass(frozen=True, slots=True)
class CertifiedGate:
    """The gate a labelled calibration run has certified, unchanged: it stores nothing, and every
    decision says so.
    """

    inner: Gate
    # the guarantee in words, and what voids it: for the manifest and the report of a run
    promise: tuple[str, str]

    def preview(self, features: Features) -> Decision:
        """Decide as the certified gate."""
        return self.inner.preview(features)

    def decide(self, features: Features, score: float) -> Decision:
        """Decide as the certified gate."""
        decision = self.inner.decide(features, score)
        return _overruled(
            decision, decision.action, "certificate", f"{decision.why}; certified policy"
        )

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Learn nothing: another gate than the one that was tested would not be certified."""


def _overruled(decision: Decision, action: Action, origin: Origin, why: str) -> Decision:
    """Return the decision with another action for another reason.

    A warm-up's decision keeps its origin, for the gate that is built must not learn from it.
    """
    return replace(
        decision,
        action=action,
        why=why,
        origin="warm-up" if decision.origin == "warm-up" else origin,
    )
