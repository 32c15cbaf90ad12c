"""Presets: every method of the comparison table as one row of changes to a policy, and its gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from atts.calibration import Calibrator
from atts.core import Role
from atts.errors import OptionError
from atts.methods.calibrated import warming_gate
from atts.pipelines import (
    CoinGate,
    ConfidenceStop,
    ConformalGate,
    CueGate,
    FixedGate,
    Gate,
    Policy,
    RoundGate,
    ScoreRule,
    StaticRankGate,
    ThresholdGate,
    TopGate,
)


@dataclass(frozen=True, slots=True)
class GateInputs:
    """What the gate of a method is made from: a calibrator, which has the rate, the seed and the
    stored scores.

    With a `warmup` the conformal gate stores the run's own first so many scores instead.
    """

    calibrator: Calibrator
    warmup: int = 0

    @property
    def rate(self) -> float:
        """Return the nominal rate of escalations."""
        return float(self.calibrator.rate)


@dataclass(frozen=True, slots=True)
class Preset:
    """A named method: what it changes in a policy, and its gate."""

    name: str
    what: str
    changes: dict[str, Any]
    gate: Callable[[GateInputs], Gate | RoundGate]
    is_judged: bool = True  # False: every chunk stays as its writer left it
    departures: tuple[str, ...] = ()  # from the published implementation of the method

    def policy(self, base: Policy) -> Policy:
        """Return the base policy as this method changes it: samples, limits and sampling stay."""
        return replace(base, **self.changes)

    def roles(self, policy: Policy) -> tuple[Role, ...]:
        """Return the roles whose models this method asks under its policy, draft first."""
        return asked_roles(policy, is_judged=self.is_judged)

    def reads_chunks(self, policy: Policy) -> bool:
        """Return whether anything looks at a rollout between its chunks, under its policy."""
        return reads_chunks(policy, is_judged=self.is_judged)


def asked_roles(policy: Policy, *, is_judged: bool) -> tuple[Role, ...]:
    """Return the roles whose models are asked, draft first; a judged chunk may ask the target.

    >>> asked_roles(Policy(), is_judged=False), asked_roles(Policy(drafter="target"), is_judged=True)
    (('draft',), ('target',))
    """
    if policy.exact:
        return ("draft", "target")
    if policy.drafter == "target":  # it writes every chunk, and judges none of its own
        return ("target",)
    return ("draft", "target") if is_judged else ("draft",)


def reads_chunks(policy: Policy, *, is_judged: bool) -> bool:
    """Return whether anything looks at a rollout between its chunks: a gate, a stop, a second
    writer. Where nothing does, a rollout needs no more than one request.
    """
    if policy.exact or policy.confidence_stop is not None:
        return True
    return is_judged and policy.drafter == "draft" and policy.escalates != "problem"


def preset(name: str) -> Preset:
    """Return the preset of that name.

    :raises OptionError: there is none.
    """
    for row in PRESETS:
        if row.name == name:
            return row
    raise OptionError("method", f"unknown method {name!r}", [row.name for row in PRESETS], name)


def _conformal(inputs: GateInputs) -> Gate:
    known = inputs.calibrator
    if inputs.warmup:
        return warming_gate(inputs.warmup, inputs.rate, known.mode, known.seed, tuning=known.tuning)
    return ConformalGate(known)


def _marginal(inputs: GateInputs) -> Gate:
    first_turns = _first_turns(inputs)
    return StaticRankGate.of([score for _, score in first_turns], inputs.rate)


def _conditional(inputs: GateInputs) -> Gate:
    first_turns = _first_turns(inputs)
    questions = [question for question, _ in first_turns]
    return StaticRankGate.by_question([score for _, score in first_turns], questions, inputs.rate)


def _first_turns(inputs: GateInputs) -> list[tuple[str, float]]:
    """Return the stored scores of first turns with their questions: the published rule has no others."""
    stored = inputs.calibrator.stored
    rows = zip(stored.questions, stored.turns, stored.scores, strict=True)
    return [(question, score) for question, turn, score in rows if turn == 0]


# The published loop scores every chunk before it looks for an answer in it, lets the target continue
# after an escalated chunk, runs every rollout to its end, and has no guard against repetition.
_AS_PUBLISHED: dict[str, Any] = {
    "takeover": "continue",
    "score": ScoreRule("mean"),
    "answers": "verify",
    "first_wave": 0,
    "early_stop": "none",
    "repeats": 1_000_000,
}

PAPER_DEPARTURES = (
    "chunks are joined token by token under one prompt; the release puts a blank line between them, "
    "and the system prompt on the first turn only",
    "the first token of a chunk is scored as well; the release drops it",
    "only a closed box with content ends a rollout; the release also stops at an empty or cut box",
    "a model that has ended its text is not asked again",
    "a score that is not finite escalates; in the release a failed request is accepted",
    "all problems share the engines; the release runs one question after the other",
    "accuracy is the vote and single rollouts, graded by equivalence; the release counts any of 16, "
    "judged by a model",
)
"""How the presets of the paper differ from its published code; decisions on equal scores do not."""

PRESETS: tuple[Preset, ...] = (
    Preset(
        "atts",
        "draft, score, escalate by conformal rank; nothing waits for a sibling",
        {},
        _conformal,
    ),
    Preset(
        "cascade",
        "the draft's rollouts vote; the target adds its own where they agree least",
        {"escalates": "problem", "score": ScoreRule("disagreement"), "early_stop": "none"},
        _conformal,
    ),
    Preset(
        "paper-marginal",
        "the paper's released rule: ranks in one pool of stored first-turn scores, the chunk stays",
        _AS_PUBLISHED,
        _marginal,
        departures=PAPER_DEPARTURES,
    ),
    Preset(
        "paper-conditional",
        "the same, ranks among the stored first-turn scores of the chunk's own question",
        _AS_PUBLISHED,
        _conditional,
        departures=PAPER_DEPARTURES,
    ),
    Preset("draft-only", "the draft alone", {}, lambda g: FixedGate("accept"), is_judged=False),
    Preset(
        "target-only",
        "the target alone",
        {"drafter": "target"},
        lambda g: FixedGate("accept"),
        is_judged=False,
    ),
    Preset(
        "exact",
        "the target's own text, token for token, proposed by the draft",
        {"drafter": "target", "exact": True},
        lambda g: FixedGate("accept"),
        is_judged=False,
    ),
    Preset(
        "coin",
        "the same policy and rate, but seeded coins choose the chunks, whatever their scores",
        {},
        lambda g: CoinGate(g.rate, g.calibrator.seed),
    ),
    Preset(
        "top-b",
        "synchronous: each round the worst chunks go over",
        {"barrier": True},
        lambda g: TopGate.of(g.rate),
    ),
    Preset(
        "spec-reason",
        "the target rates each step 0-9 and rewrites those below 7",
        {"score": ScoreRule("rating"), "takeover": "replace", "answers": "verify"},
        lambda g: ThresholdGate(3.0),  # a score is 10 less the rating
    ),
    Preset(
        "speculative-thinking",
        "chunks escalate where the draft hesitates",
        {"takeover": "continue", "answers": "stop"},
        lambda g: CueGate(),
    ),
    Preset(
        "deep-conf",
        "draft rollouts end when they are less sure than a warm-up's",
        {
            "first_wave": 4,
            "agreement": 0.95,
            "confidence_stop": ConfidenceStop(warmup=4, window=16),
        },
        lambda g: FixedGate("accept"),
        is_judged=False,
    ),
)
