"""Every method of the comparison table as one row: a policy and a gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atts.calibration import DEFAULTS, Calibrator, Mode, Tuning
from atts.errors import OptionError
from atts.pipelines.calibrated import warming_gate
from atts.pipelines.gates import (
    Calibrating,
    ConformalGate,
    CueGate,
    FixedGate,
    Gate,
    RandomGate,
    RoundGate,
    StaticRankGate,
    ThresholdGate,
    TopGate,
)
from atts.pipelines.policy import Chunking, ConfidenceStop, Policy
from atts.pipelines.scores import ScoreRule
from atts.pipelines.skipping import SkippingGate


@dataclass(frozen=True, slots=True)
class Material:
    """What a preset may need besides its policy: a rate, a seed, a calibrator, scores stored before the run.

    With a `warmup` the run's own first so many scores are stored instead; `mode` and `tuning` say how the gate goes on.
    """

    rate: float = 0.2
    seed: int = 0
    calibrator: Calibrating | None = None
    stored: Sequence[float] = ()
    warmup: int = 0
    mode: Mode = "question-turn"
    tuning: Tuning = DEFAULTS


@dataclass(frozen=True, slots=True)
class Preset:
    """A named method: what it changes in a policy, and its gate."""

    name: str
    what: str
    changes: dict[str, Any]
    gate: Callable[[Material], Gate | RoundGate]

    def policy(self, base: Policy) -> Policy:
        """The base policy as this method would have it: samples, limits and sampling stay."""
        return replace(base, **self.changes)


def preset(name: str) -> Preset:
    """The preset of that name.

    :raises OptionError: there is none.
    """
    found = next((row for row in PRESETS if row.name == name), None)
    if found is None:
        raise OptionError("method", f"unknown method {name!r}", [row.name for row in PRESETS], name)
    return found


def _conformal(material: Material) -> Gate:
    if material.warmup:
        return warming_gate(material.warmup, material.rate, material.mode, material.seed, tuning=material.tuning)
    if material.calibrator is None:
        raise OptionError("calibrator", "the conformal gate needs one, such as atts.calibration.Calibrator(rate)")
    return ConformalGate(material.calibrator)


def _ordinal(material: Material) -> Gate:
    if not isinstance(material.calibrator, Calibrator):
        raise OptionError("calibrator", "the ordinal gate needs one, such as atts.calibration.Calibrator(rate)")
    return SkippingGate(material.calibrator)


_AS_PUBLISHED: dict[str, Any] = {
    "takeover": "continue",
    "score": ScoreRule("mean"),
    "answers": "stop",
    "first_wave": 0,
}

PRESETS: tuple[Preset, ...] = (
    Preset("atts", "draft, score, escalate by conformal rank; nothing waits for a sibling", {}, _conformal),
    Preset("ordinal", "the same, the target's score asked for only where evidence does not suffice", {}, _ordinal),
    Preset(
        "paper",
        "the same as published: mean perplexity, the chunk stays, an answer ends the rollout unseen",
        _AS_PUBLISHED,
        _conformal,
    ),
    Preset("draft-only", "the small model alone", {}, lambda m: FixedGate("accept")),
    Preset("target-only", "the large model alone", {"drafter": "target"}, lambda m: FixedGate("accept")),
    Preset(
        "random",
        "the same rate, spent by seeded coins",
        {"takeover": "replace"},
        lambda m: RandomGate(m.rate, m.seed),
    ),
    Preset(
        "top-b", "synchronous: each round the worst chunks go over", {"barrier": True}, lambda m: TopGate.of(m.rate)
    ),
    Preset(
        "published",
        "the released rule: static turn-0 scores",
        _AS_PUBLISHED,
        lambda m: StaticRankGate.of(m.stored, m.rate),
    ),
    Preset(
        "spec-reason",
        "the target rates each step 0-9 and rewrites those below 7",
        {"verification": "rating", "takeover": "replace", "answers": "verify"},
        lambda m: ThresholdGate(7.0, worse="below"),
    ),
    Preset(
        "speculative-thinking",
        "the target takes over where the draft hesitates",
        {"takeover": "continue", "answers": "stop"},
        lambda m: CueGate(),
    ),
    Preset(
        "deep-conf",
        "draft rollouts end when they are less sure than a warm-up's",
        {"first_wave": 4, "agreement": 0.95, "confidence_stop": ConfidenceStop(warmup=4, window=16)},
        lambda m: FixedGate("accept"),
    ),
)

__all__ = ["PRESETS", "Chunking", "Material", "Preset", "preset"]
