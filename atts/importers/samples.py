"""The types for one rollout of another tool, and for the reader of one format."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from atts.core import AnswerKind, TokenIds

Row = Mapping[str, Any]
Ended = Literal["end", "length", "stopped", "failed"]
"""The reason why the other tool's text ended: by itself, at a token limit, by a stopping rule, or
by an error.
"""


class RecordError(ValueError):
    """A record lacks a required field; the importer adds the record's file and line."""


@dataclass(frozen=True, slots=True)
class ForeignSample:
    """One rollout that another tool recorded; fields that the tool did not record are None.

    `problem` is the tool's name of the problem. Without one, problems with the same question are
    the same problem.
    """

    question: str
    text: str
    problem: str | None = None
    reference: str | None = None
    kind: AnswerKind | None = None
    choices: tuple[str, ...] = ()
    number: int | None = None  # number among the rollouts of its problem
    answer: str | None = None  # None: atts extracts the answer from the text
    is_correct: bool | None = None
    ended: Ended = "end"
    error: str = ""
    model: str = ""
    filter: str = ""  # the tool's filter that extracted the answer, if it used several
    tokens: int | None = None  # written
    prompt_tokens: int | None = None
    seconds: float | None = None
    dollars: float | None = None
    # dollars per million tokens, for tokens read and written
    prices: tuple[float, float] | None = None
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    ids: TokenIds = ()
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a format's reader; only the plain format uses `columns`."""

    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    metric: str = ""  # the score that decides whether an answer is correct; "": the first score


SampleReader = Callable[[Row, Path, ReadOptions], Iterator[ForeignSample]]
"""Yields the rollouts of one record, all of one problem. The path is of the record's file.

:raises RecordError: the record lacks something.
"""


@dataclass(frozen=True, slots=True)
class Format:
    """One format: the name patterns of its files in a directory, and the reader of their records."""

    name: str
    about: str
    patterns: tuple[str, ...]
    read: SampleReader
    # field of a JSON file with the list of records; "": the file is a list, or one record
    list_field: str = ""


def text_of(row: Row, *names: str) -> str:
    """Return the first of these fields that is a text or a number.

    :raises RecordError: if there is none.
    """
    found = optional_text(row, *names)
    if found is None:
        raise RecordError(f"it has no field {' or '.join(map(repr, names))}")
    return found


def optional_text(row: Row, *names: str) -> str | None:
    """Return the first of these fields that is a text or a number, None if there is none."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    return None


def number_of(row: Row, *names: str) -> float | None:
    """Return the first of these fields that is a finite number, None if there is none."""
    for name in names:
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def count_of(row: Row, *names: str) -> int | None:
    """Return the first of these fields that is a whole number of at least 0, None if there is none."""
    value = number_of(row, *names)
    return int(value) if value is not None and value >= 0 and value == int(value) else None


def table_of(row: Row, name: str) -> Row:
    """Return a field that is an object; an empty object if the field is missing or null.

    :raises RecordError: if the field is something else.
    """
    value = row.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RecordError(f"its field {name!r} is a {type(value).__name__}, not an object")
    return cast(Row, value)


def list_of(row: Row, *names: str) -> Sequence[Any]:
    """Return the first of these fields that is a list.

    :raises RecordError: if there is none.
    """
    for name in names:
        value: Any = row.get(name)
        if isinstance(value, list):
            found: list[Any] = value
            return found
    raise RecordError(f"it has no list {' or '.join(map(repr, names))}")


def truth_of(value: object) -> bool | None:
    """Return the verdict of a grade: True or False for true, false, 0 and 1, None for anything
    else.

    >>> [truth_of(value) for value in (True, 0.0, 1, 0.5, "yes", None)]
    [True, False, True, None, None, None]
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return None
