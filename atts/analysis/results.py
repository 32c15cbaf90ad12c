"""Reads one side of a comparison: a run directory, or a file of results, one JSON object per line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atts.core import Finish, is_censored
from atts.errors import DatasetError, JournalError
from atts.evaluators import json_lines
from atts.journal import (
    JOURNAL,
    MANIFEST,
    Graded,
    OutcomeReached,
    ProblemSpan,
    RolloutFinished,
    RunClock,
    load_manifest,
    read_entries,
)

_NAMES = ("problem", "id", "problem_id")
_WORDS = {"correct": 1.0, "wrong": 0.0, "unscored": 0.0, "equal": 1.0, "different": 0.0}
COSTS = ("draft_tokens", "scored_tokens", "target_tokens", "seconds")


@dataclass(frozen=True, slots=True)
class Solved:
    """One problem: whether its vote was right, the share of right rollouts, and what it took."""

    vote: float
    share: float
    samples: int
    costs: Mapping[str, float]  # by the names in COSTS, where known


@dataclass(frozen=True, slots=True)
class Side:
    """The graded problems of one run; `seconds` is of the whole run."""

    name: str
    method: str
    problems: Mapping[str, Solved]
    seconds: float = math.nan


def read_side(path: Path) -> Side:
    """A run directory, finished or not, or a JSONL file such as `atts eval --json` prints.

    A line of a file is a problem: {"problem": "7", "verdict": "correct", "samples": [...], "usage": {...}}, or simply
    {"id": "7", "correct": true, "target_tokens": 310}; several lines with one id are several rollouts of it.

    :raises JournalError: the directory holds no run, or one that cannot be read.
    :raises DatasetError: the file cannot be read as results, or nothing in it was graded.
    """
    side = _run(path) if path.is_dir() else _file(path)
    if not side.problems:
        raise DatasetError(str(path), "no problem was graded", "Problems need reference answers to be compared")
    return side


@dataclass(slots=True)
class _Tale:
    """What a journal says of one problem, until it is told."""

    outcome: OutcomeReached | None = None
    graded: dict[int | None, Graded] = field(default_factory=dict[int | None, Graded])
    finishes: dict[int, Finish] = field(default_factory=dict[int, Finish])
    seconds: float = math.nan

    def solved(self) -> Solved | None:
        """The problem, when it is over and was graded."""
        whole = self.graded.get(None)
        if self.outcome is None or whole is None:
            return None
        single = [_WORDS[one.status] for sample, one in self.graded.items() if self._speaks(sample, one)]
        usage = self.outcome.usage
        costs = {name: float(getattr(usage, name)) for name in COSTS[:3]}
        if not math.isnan(self.seconds):
            costs["seconds"] = self.seconds
        share = math.fsum(single) / len(single) if single else math.nan
        return Solved(_WORDS[whole.status], share, len(single), costs)

    def _speaks(self, sample: int | None, graded: Graded) -> bool:
        return sample is not None and not is_censored(graded.answer, self.finishes.get(sample))


def _run(directory: Path) -> Side:
    manifest = load_manifest(directory / MANIFEST)
    if manifest is None or not (directory / JOURNAL).exists():
        raise JournalError(directory, "there is no run here", "Give the directory of `atts eval --out DIRECTORY`")
    tales: dict[str, _Tale] = {}
    clock = RunClock()
    for entry in read_entries(directory / JOURNAL):
        event = entry.event
        clock.hear(entry)
        match event:
            case OutcomeReached():
                tales.setdefault(event.problem, _Tale()).outcome = event
            case Graded():
                tales.setdefault(event.problem, _Tale()).graded[event.sample] = event
            case RolloutFinished():
                tales.setdefault(event.problem, _Tale()).finishes[event.sample] = event.finish
            case ProblemSpan():
                tales.setdefault(event.problem, _Tale()).seconds = event.ended - event.started
            case _:
                pass
    found = {name: tale.solved() for name, tale in tales.items()}
    named = manifest.configuration.get("method")
    problems = {name: one for name, one in found.items() if one is not None}
    return Side(str(directory), str(named.value) if named else "", problems, clock.seconds)


def _file(path: Path) -> Side:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DatasetError(str(path), f"is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise DatasetError(
            str(path), f"cannot be read: {error.strerror}", "Give a run directory or a JSONL file"
        ) from error
    rows: dict[str, list[Mapping[str, Any]]] = {}
    method, seconds = "", math.nan
    record: Mapping[str, Any]
    for _, record in json_lines(lines, str(path)):
        if record.get("type") == "summary":
            method, seconds = str(record.get("method", "")), _number(record.get("seconds"))
        else:
            rows.setdefault(_name(record, path), []).append(record)
    problems = {name: _solved(held, path) for name, held in rows.items()}
    return Side(str(path), method, {name: one for name, one in problems.items() if one is not None}, seconds)


def _name(record: Mapping[str, Any], path: Path) -> str:
    named = next((record[name] for name in _NAMES if name in record), None)
    if named is None:
        raise DatasetError(str(path), f"a line has none of the fields {', '.join(_NAMES)}: {json.dumps(record)[:80]}")
    return str(named)


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _solved(rows: Sequence[Mapping[str, Any]], path: Path) -> Solved | None:
    """One line per problem as we print it, or one per rollout as others do: then the mean stands for the vote too."""
    votes = [value for row in rows if (value := _right(row, path)) is not None]
    if not votes:
        return None
    samples = _list(rows[0].get("samples")) if len(rows) == 1 else []
    known = [
        value
        for one in samples
        if (value := _right(one, path)) is not None and not is_censored(one.get("answer"), one.get("finish"))
    ]
    mean = math.fsum(votes) / len(votes)
    share = math.fsum(known) / len(known) if known else math.nan if samples else mean
    costs: dict[str, float] = {}
    for row in rows:
        usage = row.get("usage")
        held = {**(usage if isinstance(usage, Mapping) else {}), **row}
        for name in COSTS:
            if isinstance(held.get(name), int | float):
                costs[name] = costs.get(name, 0.0) + float(held[name])
    return Solved(mean, share, len(known) or len(votes), costs)


def _right(row: Mapping[str, Any], path: Path) -> float | None:
    value = row.get("correct", row.get("verdict"))
    if value is None:
        return None
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if isinstance(value, bool | int | float) and 0 <= value <= 1:
        return float(value)
    raise DatasetError(str(path), f"{value!r} is no verdict", 'Write "correct": true or false, or a share from 0 to 1')
