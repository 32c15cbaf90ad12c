"""The gate that learns which chunks need no score: what it skips, what it misses, what it does to
the rate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from atts.calibration import Calibrator
from atts.core import Decision
from atts.errors import CalibrationInputError
from atts.methods import SkippingGate
from atts.pipelines import Features

RATE = 0.2


def stream(count: int, seed: int, telling: float = 1.0) -> Iterator[tuple[Features, float]]:
    """Chunks of which a share of 0.4 is unclear; the draft shows it in a share `telling` of them,
    else at random.
    """
    rng = random.Random(seed)
    for place in range(count):
        unclear = rng.random() < 0.4
        shown = unclear if rng.random() < telling else rng.random() < 0.4
        evidence = -rng.uniform(0.5, 2.0) if shown else -rng.uniform(0.0, 0.1)
        score = math.exp(rng.uniform(0.0, 4.0)) if unclear else 1 + rng.uniform(0.0, 0.1)
        yield (
            Features(f"q{place // 6}", place % 5, place % 8, tokens=12, draft_logprob=evidence),
            score,
        )


def decide(
    gate: SkippingGate, chunks: Iterator[tuple[Features, float]]
) -> list[tuple[Decision, float]]:
    """As the pipeline asks: a preview, the score where it is wanted, then what was done."""
    found: list[tuple[Decision, float]] = []
    for features, score in chunks:
        decision = gate.preview(features)
        if decision.action == "verify":
            decision = gate.decide(replace(features, issue=decision.issue), score)
        gate.observe(decision, decision.escalate)
        found.append((decision, score))
    return found


def gate(seed: int = 0) -> SkippingGate:
    return SkippingGate(Calibrator(RATE, "marginal", seed=seed))


@pytest.mark.parametrize("seed", range(3))
def test_clear_chunks_are_kept_unscored_and_the_rate_stays(seed: int) -> None:
    """Where the draft's evidence tells, a third and more needs no score, few rejections are missed,
    0.2 stays 0.2.
    """
    late = decide(gate(seed), stream(6000, seed))[3000:]
    skipped = [score for decision, score in late if decision.score is None]
    assert len(skipped) > 0.3 * len(late)
    cut = sorted(score for _, score in late)[int((1 - RATE) * len(late))]
    assert sum(score > cut for score in skipped) < 0.02 * len(late)
    assert sum(decision.escalate for decision, _ in late) / len(late) == pytest.approx(
        RATE, abs=0.03
    )
    assert all(decision.origin == "evidence" for decision, _ in late if decision.score is None)


def test_without_evidence_nearly_nothing_is_skipped_at_random() -> None:
    """Evidence that tells nothing: what is missed stays below alpha, and the rate holds."""
    late = decide(gate(), stream(6000, 5, telling=0.0))[3000:]
    skipped = [
        score for decision, score in late if decision.action == "accept" and decision.score is None
    ]
    cut = sorted(score for _, score in late)[int((1 - RATE) * len(late))]
    assert sum(score > cut for score in skipped) < 0.04 * len(late)
    assert sum(decision.escalate for decision, _ in late) / len(late) == pytest.approx(
        RATE, abs=0.03
    )


def test_nothing_is_skipped_before_the_levels_can_promise_something() -> None:
    """The first hundred scores only teach."""
    assert all(decision.score is not None for decision, _ in decide(gate(), stream(100, 1)))


def test_a_level_must_be_taught() -> None:
    """Without an audit nothing would be learnt once chunks are skipped."""
    with pytest.raises(CalibrationInputError, match="audit"):
        SkippingGate(Calibrator(RATE), audit=0.0)
