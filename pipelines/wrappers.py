"""Gate wrappers: a hard cap, a warm-up from the run's own first scores, a certificate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args, runtime_checkable

from atts.core import Action, Decision, Features, Origin
from atts.errors import CalibrationInputError, OptionError
from atts.pipelines.gates import Gate, let_go

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
        """As the inner gate, if a slot is left for it."""
        return self._capped(features, self.inner.preview(features))

    def decide(self, features: Features, score: float) -> Decision:
        """As the inner gate, if a slot is left for it."""
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
class SparingGate:
    """Another gate, but chunks whose siblings agree on an answer are kept: the target is spent
    where they do not.

    The inner gate hears what was really done, so that one which holds a rate spends elsewhere what
    is spared here.
    """

    inner: Gate
    # the share of answered siblings behind one answer from which nothing goes over
    agreement: float

    def preview(self, features: Features) -> Decision:
        """As the inner gate, but for what is spared."""
        return self._spared(features, self.inner.preview(features))

    def decide(self, features: Features, score: float) -> Decision:
        """As the inner gate, but for what is spared."""
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
                decision, "accept", "budget", f"{decision.why}; spared: siblings agree"
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
        """:raises OptionError: fewer than one score, or an unknown `meanwhile`."""
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
        """Tokens the target scored for the warm-up so far."""
        return sum(one.tokens for one in self._seen)

    def preview(self, features: Features) -> Decision:
        """Every chunk of the warm-up is scored."""
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
        """As the gate that was built."""
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
        """The guarantee in words, and what voids it."""
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
        """As the certified gate."""
        return self.inner.preview(features)

    def decide(self, features: Features, score: float) -> Decision:
        """As the certified gate."""
        decision = self.inner.decide(features, score)
        return _overruled(
            decision, decision.action, "certificate", f"{decision.why}; certified policy"
        )

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Nothing is learnt: another gate than the one that was tested would not be certified."""


def _overruled(decision: Decision, action: Action, origin: Origin, why: str) -> Decision:
    """Another action for another reason; what a warm-up decided stays the warm-up's, for its gate
    must not learn it.
    """
    return replace(
        decision,
        action=action,
        why=why,
        origin="warm-up" if decision.origin == "warm-up" else origin,
    )
