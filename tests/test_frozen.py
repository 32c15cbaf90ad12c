"""Tests that transcripts, decisions, report numbers, verdicts and texts equal the recorded ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from atts.calibration import Calibrator
from atts.local.cpu.model import NativeModel
from atts.local.logit_sampling import SampledTokens, SamplingBatch
from tests.frozen import PARTS, changed, differences, recording


@pytest.mark.parametrize("part", PARTS)
def test_every_frozen_part_equals_its_recording(part: str) -> None:
    """Every part equals its recording; if a change is intended, `python -m tests.frozen record`
    records the part again.
    """
    places = changed(part)
    assert not places, "\n".join([f"changed: {part}", *places])


def test_every_part_is_recorded() -> None:
    """The recording and the code have the same parts."""
    assert list(recording()) == list(PARTS)


def test_a_changed_decision_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one decision in 500 differs, the comparison with the recording fails and names the
    decision.
    """
    decide = Calibrator.decide
    count = 0

    def decide_otherwise(self: Calibrator, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        decision = decide(self, *args, **kwargs)
        if count != 300:
            return decision
        return replace(decision, action="accept" if decision.escalate else "escalate")

    monkeypatch.setattr(Calibrator, "decide", decide_otherwise)
    assert any(place.startswith("/escalated") for place in changed("decisions marginal"))


@pytest.mark.parametrize("place", ["attention", "products", "draws"])
def test_a_changed_kernel_is_found(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The comparison reports a state that differs in its fifth digit, a wrong logit, and a
    different sampled token.
    """
    plain_forward = NativeModel.forward
    plain_logits = NativeModel.compute_logits
    plain_sample = NativeModel.sample

    def forward(self: NativeModel, *args: Any) -> torch.Tensor:
        return plain_forward(self, *args) * 1.0001

    def compute_logits(self: NativeModel, hidden: torch.Tensor) -> torch.Tensor:
        logits = plain_logits(self, hidden)
        logits[30, 200] += 1
        return logits

    def sample(
        self: NativeModel, logits: torch.Tensor, sampling: SamplingBatch, uniforms: list[float]
    ) -> SampledTokens:
        uniforms[3] = 1 - uniforms[3]
        return plain_sample(self, logits, sampling, uniforms)

    name, planted = {
        "attention": ("forward", forward),
        "products": ("compute_logits", compute_logits),
        "draws": ("sample", sample),
    }[place]
    monkeypatch.setattr(NativeModel, name, planted)
    assert any(line.startswith(f"/{place}") for line in changed("local kernels"))


def test_differences_are_named_by_their_position() -> None:
    """The comparison reports changed values, changed lengths and missing keys; it ignores added
    keys and changed last digits.
    """
    recorded = {"a": [1, 2.0], "b": "x", "c": 0.1}
    assert not list(differences(recorded, {**recorded, "c": 0.1 + 1e-12, "d": 5}, 1e-6))
    now = {"a": [1, 2.1, 3], "b": "y"}
    assert list(differences(recorded, now, 1e-6)) == [
        "/a/1: 2.1, was 2.0",
        "/a: 3 entries, were 2",
        '/b: "y", was "x"',
        "/c: gone, was 0.1",
    ]
