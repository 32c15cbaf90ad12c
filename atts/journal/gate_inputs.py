"""What a gate was told of a chunk besides its score, as numbers that a journal holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atts.core import Features

_KINDS: Mapping[str, type[int | float | bool]] = {
    "attempt": int,
    "tokens": int,
    "draft_logprob": float,
    "has_answer": bool,
    "answered": int,
    "agreement": float,
    "agrees": bool,
    "is_scored": bool,
}
_RARE = ("attempt", "has_answer", "answered", "agreement", "agrees", "is_scored")
"""Features that are 0 for most chunks; what a journal lacks is 0."""


def feature_numbers(features: Features) -> dict[str, float]:
    """Return all features but the text and the turn they belong to, and no rare one that is 0."""
    numbers = {"tokens": float(features.tokens), "draft_logprob": features.draft_logprob}
    for name in _RARE:
        value = getattr(features, name)
        if value:
            numbers[name] = float(value)
    if features.left is not None:
        numbers["left"] = features.left
    return numbers


def recorded_features(
    question: str, turn: int, sample: int, numbers: Mapping[str, float]
) -> Features:
    """The way back; what a journal lacks is as by default."""
    held: dict[str, Any] = {
        name: kind(numbers[name]) for name, kind in _KINDS.items() if name in numbers
    }
    return Features(question, turn, sample, left=numbers.get("left"), **held)
