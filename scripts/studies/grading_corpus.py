"""Pairs of answers to measure checkers on, where the shared data are at hand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Pair:
    """A reference, an answer, and whether a careful reader calls them equal."""

    gold: str
    answer: str
    expected: bool


def shared() -> Path | None:
    """The folder of shared data, None where there is none."""
    named = os.environ.get("ATTS_SHARED_DATA")
    path = Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"
    return path if path.is_dir() else None


def cases() -> list[Pair]:
    """Pairs of checkers' own tests, the undisputed ones."""
    rows = _rows("equivalence/cases.jsonl")
    return [Pair(r["gold"], r["pred"], r["expected"]) for r in rows if r["tag"] == "core" and r["kind"] == "answer"]


def answers() -> list[Pair]:
    """Distinct answers of real models, judged by a reader."""
    return [Pair(r["gold"], r["pred"], r["judged_equal"]) for r in _rows("traces/answer_pairs.jsonl")]


def hostile() -> list[Pair]:
    """Answers made to hang, crash or fool a checker; `expected` is False where none is known."""
    rows = _rows("equivalence/adversarial.jsonl")
    return [Pair(r["gold"], r["pred"], r["expected"] is not False) for r in rows]


def _rows(name: str) -> Iterator[dict[str, Any]]:
    base = shared()
    if base is None or not (base / name).is_file():
        return
    for line in (base / name).read_text(encoding="utf-8").splitlines():
        yield json.loads(line)
