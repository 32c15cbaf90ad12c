"""Read plain JSON Lines, with a rollout or all rollouts of a problem per line, in columns that the
user names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from atts.errors import OptionError
from atts.importers.samples import (
    ForeignSample,
    Format,
    ReadOptions,
    RecordError,
    Row,
    count_of,
    number_of,
    optional_text,
    truth_of,
)

FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "question": ("question", "problem", "prompt", "input"),
        "text": ("text", "output", "response", "completion", "generation"),
        "id": ("id", "problem_id", "unique_id", "question_id"),
        "reference": ("reference", "gold", "gt_answer", "expected_answer", "target"),
        "answer": ("predicted_answer", "extracted_answer", "prediction", "pred"),
        "correct": ("correct", "is_correct"),
        "sample": ("sample", "sample_id", "idx_answer"),
        "model": ("model", "model_name"),
        "tokens": ("tokens", "num_tokens", "output_tokens", "completion_tokens"),
        "prompt_tokens": ("prompt_tokens", "input_tokens"),
        "seconds": ("seconds", "duration_seconds", "latency"),
        "cost": ("cost", "dollars"),
    }
)
"""The columns that are tried for each field if the user names none."""
_SCORE = "score."


def check_columns(columns: Mapping[str, str]) -> None:
    """Check that the named fields exist.

    :raises OptionError: if one does not, naming it.
    """
    for field in columns:
        if field not in FIELDS and not field.startswith(_SCORE):
            raise OptionError(
                "--column", f"there is no field {field!r}", [*FIELDS, "score.NAME"], field
            )


def read(row: Row, path: Path, options: ReadOptions) -> Iterator[ForeignSample]:
    """Yield the rollout of a line, or one for each entry where columns hold lists."""
    names = {field: _column(row, field, options.columns) for field in FIELDS}
    several = [name for name in names.values() if name and isinstance(row[name], list)]
    lengths = {name: len(cast(list[Any], row[name])) for name in several}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise RecordError(f"its lists are of different lengths ({shown})")
    if not names["question"] and not names["id"]:
        raise RecordError(
            "it has no known column for the question; name one with --column question=NAME"
        )
    if not names["text"] and not names["answer"]:
        raise RecordError("it has no known column for the text; name one with --column text=NAME")
    for number in range(max(lengths.values(), default=1)):
        values = {
            field: (row[name][number] if name in lengths else row[name])
            for field, name in names.items()
            if name
        }
        scores = {
            field.removeprefix(_SCORE): _score(row, column, number)
            for field, column in options.columns.items()
            if field.startswith(_SCORE)
        }
        yield _sample(values, scores, number if several else None)


def _sample(values: Row, scores: Mapping[str, float], number: int | None) -> ForeignSample:
    sample = count_of(values, "sample")
    name = optional_text(values, "id")
    return ForeignSample(
        question=optional_text(values, "question") or name or "",
        text=optional_text(values, "text") or "",
        problem=name,
        reference=optional_text(values, "reference"),
        number=number if sample is None else sample,
        answer=optional_text(values, "answer"),
        is_correct=truth_of(values.get("correct")),
        model=optional_text(values, "model") or "",
        tokens=count_of(values, "tokens"),
        prompt_tokens=count_of(values, "prompt_tokens"),
        seconds=number_of(values, "seconds"),
        dollars=number_of(values, "cost"),
        scores=scores,
    )


def _column(row: Row, field: str, columns: Mapping[str, str]) -> str:
    """Return the column of a field; "" if the row has none.

    :raises RecordError: the user named a column that the row lacks.
    """
    named = columns.get(field)
    if named is not None:
        if named not in row:
            raise RecordError(f"it has no column {named!r}; it has {', '.join(row)}")
        return named
    return next((name for name in FIELDS[field] if row.get(name) is not None), "")


def _score(row: Row, column: str, number: int) -> float:
    value = row.get(column)
    if isinstance(value, list):
        value = value[number] if number < len(value) else None
    score = number_of({"score": value}, "score")
    if score is None:
        raise RecordError(f"its column {column!r} does not contain a number")
    return score


FORMAT = Format(
    "jsonl", "plain JSON Lines; --column names the columns", ("*.jsonl", "*.ndjson", "*.json"), read
)
