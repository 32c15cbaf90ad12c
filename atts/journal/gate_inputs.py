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


def feature_numbers(features: Features) -> dict[str, float]:
    """All but the text and the place; `left` where it is known."""
    told = {name: float(getattr(features, name)) for name in _KINDS}
    return told if features.left is None else {**told, "left": features.left}


def recorded_features(
    question: str, turn: int, sample: int, numbers: Mapping[str, float]
) -> Features:
    """The way back; what a journal lacks is as by default."""
    held: dict[str, Any] = {
        name: kind(numbers[name]) for name, kind in _KINDS.items() if name in numbers
    }
    return Features(question, turn, sample, left=numbers.get("left"), **held)
