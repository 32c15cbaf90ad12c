"""Read Monkey Business (Large Language Monkeys), with thousands of samples per problem in one
record.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from atts.importers.samples import (
    ForeignSample,
    Format,
    ReadOptions,
    RecordError,
    Row,
    list_of,
    optional_text,
    text_of,
    truth_of,
)


def read(row: Row, path: Path, options: ReadOptions) -> Iterator[ForeignSample]:
    """Yield all samples of one problem."""
    samples = list_of(row, "samples")
    has_grades = any(name in row for name in ("is_corrects", "is_correct"))
    grades = list_of(row, "is_corrects", "is_correct") if has_grades else [None] * len(samples)
    if len(grades) != len(samples):
        raise RecordError(f"it has {len(samples)} samples but {len(grades)} grades")
    worked = optional_text(row, "gt_answer")
    split = optional_text(row, "orig_dset_split")
    name = optional_text(row, "orig_dset_idx", "theorem_name", "name")
    for number, (text, grade) in enumerate(zip(samples, grades, strict=True)):
        if not isinstance(text, str):
            raise RecordError(f"its sample {number + 1} is not a text")
        yield ForeignSample(
            question=text_of(row, "question", "prompt", "description"),
            text=text,
            problem=f"{split}/{name}" if split and name else name,
            reference=worked,
            number=number,
            is_correct=truth_of(grade),
        )


FORMAT = Format(
    "monkey-business",
    "Monkey Business: a list of problems, each with all its samples",
    ("*.json", "*.jsonl"),
    read,
)
