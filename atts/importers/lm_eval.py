"""Read samples of lm-evaluation-harness that `--log_samples` wrote."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atts.importers.samples import (
    ForeignSample,
    Format,
    ReadOptions,
    RecordError,
    Row,
    list_of,
    number_of,
    optional_text,
    table_of,
    text_of,
    truth_of,
)

_QUESTIONS = ("problem", "question", "Question", "Problem", "query", "prompt", "input", "text")
_STAMP = re.compile(r"_\d{4}-\d\d-\d\dT[\d.:-]+$")


def read(row: Row, path: Path, options: ReadOptions) -> Iterator[ForeignSample]:
    """Yield every reply to one document, under one answer filter."""
    replies = _only(row, "resps")
    filtered = _only(row, "filtered_resps")
    is_each = isinstance(filtered, list) and len(filtered) == len(replies)
    task = _STAMP.sub("", path.stem.removeprefix("samples_"))
    numbers = _numbers(row)
    if options.metric and options.metric not in row:
        raise RecordError(f"it has no metric {options.metric!r}; it has {', '.join(numbers)}")
    metric = options.metric or next(
        (name for name in numbers if truth_of(numbers[name]) is not None), ""
    )
    question = optional_text(table_of(row, "doc"), *_QUESTIONS) or _prompt(row)
    for number, reply in enumerate(replies):
        if not isinstance(reply, str):
            raise RecordError(
                "a reply is not a text; only generation tasks can be read, not those that compare "
                "likelihoods"
            )
        answer = filtered[number] if is_each else filtered
        is_only = len(replies) == 1
        yield ForeignSample(
            question=question,
            text=reply,
            problem=f"{task}/{text_of(row, 'doc_id')}",
            reference=optional_text(row, "target"),
            number=number,
            # the harness graded the single answer that its filter made from all replies
            answer=_answer(answer) if is_each or is_only else None,
            is_correct=truth_of(row.get(metric)) if is_only and metric else None,
            filter=optional_text(row, "filter") or "",
            scores=numbers if is_only else {},
        )


def _only(row: Row, name: str) -> Any:
    """Return the harness's record of the document's request.

    :raises RecordError: if there are several requests, as in tasks that compare likelihoods.
    """
    requests: Sequence[Any] = list_of(row, name)
    if len(requests) != 1:
        raise RecordError(
            f"{len(requests)} requests were made for it; only generation tasks can be read, not "
            "those that compare likelihoods"
        )
    found = requests[0]
    if name == "resps" and not isinstance(found, list):
        raise RecordError("its 'resps' do not contain a list of replies")
    return found


def _answer(value: object) -> str | None:
    """Return an answer that a filter extracted; the harness writes [invalid] if it found none."""
    if not isinstance(value, str):
        return None
    return None if value.strip() in ("", "[invalid]") else value


def _numbers(row: Row) -> dict[str, float]:
    """Return the document's metrics that are numbers."""
    names = list(map(str, list_of(row, "metrics"))) if "metrics" in row else []
    if not names:  # versions before 0.4.4 do not name their metrics
        names = [name for name in row if name in ("exact_match", "acc", "math_verify")]
    values = {name: number_of(row, name) for name in names}
    return {
        name: value for name, value in values.items() if value is not None and math.isfinite(value)
    }


def _prompt(row: Row) -> str:
    """Return the prompt that was sent, which contains the question."""
    sent: Any = row.get("arguments")
    if isinstance(sent, list) and sent and isinstance(sent[0], list) and sent[0]:
        return str(sent[0][0])
    if isinstance(sent, dict):
        first = table_of(table_of(row, "arguments"), "gen_args_0")
        if "arg_0" in first:
            return text_of(first, "arg_0")
    raise RecordError("neither its document nor its request has a question")


FORMAT = Format(
    "lm-eval", "samples of lm-evaluation-harness (--log_samples)", ("samples_*.jsonl",), read
)
