"""Read generations of NeMo-Skills: output-rs0.jsonl, output-rs1.jsonl and so on, one rollout per
line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from atts.importers.samples import (
    ForeignSample,
    Format,
    ReadOptions,
    RecordError,
    Row,
    count_of,
    number_of,
    optional_text,
    text_of,
    truth_of,
)

_SEED = re.compile(r"-rs(\d+)")
_VERDICT = re.compile(r"judge?ment:\s*\W*(yes|no)\b", re.IGNORECASE)


def read(row: Row, path: Path, options: ReadOptions) -> Iterator[ForeignSample]:
    """Yield the rollout of one line; its number is the random seed in the file's name."""
    seed = _SEED.search(path.name)
    start = number_of(row, "generation_start_time")
    end = number_of(row, "generation_end_time")
    seconds = number_of(row, "generation_time")
    if seconds is None and start is not None and end is not None:
        seconds = end - start
    reward = number_of(row, "reward_model_score")
    yield ForeignSample(
        question=text_of(row, "problem", "question"),
        text=text_of(row, "generation"),
        problem=optional_text(row, "id", "unique_id", "problem_id"),
        reference=optional_text(row, "expected_answer"),
        number=int(seed[1]) if seed else None,
        answer=optional_text(row, "predicted_answer"),
        is_correct=_grade(row, options.metric),
        ended="length" if row.get("finish_reason") == "length" else "end",
        tokens=count_of(row, "num_generated_tokens"),
        prompt_tokens=count_of(row, "num_input_tokens"),
        seconds=seconds,
        scores={} if reward is None else {"reward": reward},
    )


def _grade(row: Row, metric: str) -> bool | None:
    """Return the symbolic check's verdict, else the judge's; `metric` names another field."""
    if metric:
        if metric not in row:
            raise RecordError(f"it has no field {metric!r}")
        value = row[metric]
        return _judgement(value) if isinstance(value, str) else truth_of(value)
    for name in ("symbolic_correct", "is_correct"):
        grade = truth_of(row.get(name))
        if grade is not None:
            return grade
    return _judgement(row.get("judgement"))


def _judgement(value: object) -> bool | None:
    """Return the judgement at the end of a judge's text."""
    said = _VERDICT.findall(value) if isinstance(value, str) else []
    return said[-1].lower() == "yes" if said else None


FORMAT = Format(
    "nemo-skills",
    "generations of NeMo-Skills: a directory with output-rs*.jsonl",
    ("output-rs*.jsonl", "output.jsonl"),
    read,
)
