"""Graded results to compare: those of a run directory, or of a file with one JSON object per line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atts.errors import DatasetError
from atts.evaluators import json_lines
from atts.files import read_ordinary
from atts.journal import FinishedProblem, check_exists, is_censored, open_run

_NAMES = ("problem", "id", "problem_id")
_WORDS = {"correct": 1.0, "wrong": 0.0, "unscored": 0.0, "equal": 1.0, "different": 0.0}
COSTS = ("draft_tokens", "scored_tokens", "target_tokens", "seconds")


@dataclass(frozen=True, slots=True)
class GradedProblem:
    """One problem: whether its vote was right, the share of right rollouts, and what it took."""

    vote: float
    share: float
    samples: int
    costs: Mapping[str, float]  # by the names in COSTS, where known
    unscored: float = 0.0  # how much more of the vote were right, were what could not be scored


@dataclass(frozen=True, slots=True)
class GradedRun:
    """The graded problems of one run."""

    name: str
    method: str
    problems: Mapping[str, GradedProblem]


def read_results(path: Path) -> GradedRun:
    """A run directory, finished or not, or a JSONL file such as `atts eval --json` prints.

    A line of a file is a problem: {"problem": "7", "verdict": "correct", "samples": [...], "usage":
    {...}}, or simply {"id": "7", "correct": true, "target_tokens": 310}; several lines with one id
    are several rollouts of it.

    :raises JournalError: the directory holds no run, or one that cannot be read.
    :raises DatasetError: the file cannot be read as results, or nothing in it was graded.
    """
    check_exists(path)
    run = _run(path) if path.is_dir() else _file(path)
    if not run.problems:
        raise DatasetError(
            str(path), "no problem was graded", "Problems need reference answers to be compared"
        )
    return run


def _run(directory: Path) -> GradedRun:
    run = open_run(directory)
    problems = {name: _brief(one) for name, one in run.state().graded.items()}
    return GradedRun(str(directory), str(run.setting("method") or ""), problems)


def _brief(one: FinishedProblem) -> GradedProblem:
    known = [
        _WORDS[sample.verdict] for sample in one.complete_samples if sample.verdict is not None
    ]
    costs = {name: float(getattr(one.usage, name)) for name in COSTS[:3]}
    if one.seconds is not None:
        costs["seconds"] = one.seconds
    return GradedProblem(
        float(one.is_correct), _mean(known), len(known), costs, float(one.is_right is None)
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _file(path: Path) -> GradedRun:
    try:
        lines = read_ordinary(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DatasetError(str(path), f"is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise DatasetError(
            str(path), f"cannot be read: {error.strerror}", "Give a run directory or a JSONL file"
        ) from error
    rows: dict[str, list[Mapping[str, Any]]] = {}
    method = ""
    record: Mapping[str, Any]
    for _, record in json_lines(lines, str(path)):
        if record.get("type") == "summary":
            method = str(record.get("method", ""))
        else:
            rows.setdefault(_name(record, path), []).append(record)
    problems = {name: one for name, held in rows.items() if (one := _row(held, path)) is not None}
    return GradedRun(str(path), method, problems)


def _name(record: Mapping[str, Any], path: Path) -> str:
    named = next((record[name] for name in _NAMES if name in record), None)
    if named is None:
        raise DatasetError(
            str(path),
            f"a line has none of the fields {', '.join(_NAMES)}: {json.dumps(record)[:80]}",
        )
    return str(named)


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _row(rows: Sequence[Mapping[str, Any]], path: Path) -> GradedProblem | None:
    """One line per problem as we print it, or one per rollout as others do: then the mean stands
    for the vote too.
    """
    votes = [value for row in rows if (value := _right(row, path)) is not None]
    if not votes:
        return None
    samples = _list(rows[0].get("samples")) if len(rows) == 1 else []
    known = [
        value
        for one in samples
        if not is_censored(one.get("answer"), one.get("finish"))
        and (value := _right(one, path)) is not None
    ]
    mean = _mean(votes)
    share = _mean(known) if samples else mean
    costs: dict[str, float] = {}
    for row in rows:
        usage = row.get("usage")
        held = {**(usage if isinstance(usage, Mapping) else {}), **row}
        for name in COSTS:
            value = held.get(name)
            if (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and 0 <= value < math.inf
            ):
                costs[name] = costs.get(name, 0.0) + value
    unscored = sum(row.get("correct", row.get("verdict")) == "unscored" for row in rows) / len(
        votes
    )
    return GradedProblem(mean, share, len(known) or len(votes), costs, unscored)


def _right(row: Mapping[str, Any], path: Path) -> float | None:
    value = row.get("correct", row.get("verdict"))
    if value in (None, "spared", "lost"):
        return None
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if isinstance(value, bool | int | float) and 0 <= value <= 1:
        return float(value)
    raise DatasetError(
        str(path),
        f"{value!r} is no verdict",
        'Write "correct": true or false, or a share from 0 to 1',
    )
