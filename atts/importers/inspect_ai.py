"""Read logs of inspect_ai: .eval archives, or their JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from atts.importers.samples import (
    Ended,
    ForeignSample,
    Format,
    ReadOptions,
    RecordError,
    Row,
    count_of,
    list_of,
    number_of,
    optional_text,
    table_of,
    text_of,
    truth_of,
)

_GRADES = {"C": True, "I": False, "N": False}  # the grades for correct, incorrect and no answer
_ENDS: dict[str, Ended] = {"max_tokens": "length", "model_length": "length"}


def read(row: Row, path: Path, options: ReadOptions) -> Iterator[ForeignSample]:
    """Yield the rollout of one epoch of one sample."""
    output = table_of(row, "output")
    choices = output.get("choices") or [{}]
    if not isinstance(choices, list) or not isinstance(choices[0], dict):
        raise RecordError("its output has no choices")
    choice = cast(Row, choices[0])
    grade = _Grade.of(table_of(row, "scores"), options.metric)
    error = optional_text(table_of(row, "error"), "message") or ""
    ended = _ENDS.get(str(choice.get("stop_reason")), "end")
    if table_of(row, "limit"):
        ended = "length"
    usage = _usage(row, output)
    epoch = count_of(row, "epoch")
    offered = row.get("choices")
    yield ForeignSample(
        question=_resolved(_content(row.get("input")), row),
        text=_resolved(_content(table_of(choice, "message").get("content", "")), row),
        problem=text_of(row, "id"),
        reference=_reference(row.get("target")),
        kind="choice" if offered else None,
        choices=tuple(map(str, list_of(row, "choices"))) if offered else (),
        number=None if epoch is None else epoch - 1,
        answer=grade.answer,
        is_correct=grade.is_correct,
        ended="failed" if error else ended,
        error=error,
        model=optional_text(output, "model") or "",
        tokens=count_of(usage, "output_tokens"),
        prompt_tokens=_prompt_tokens(usage),
        seconds=number_of(row, "total_time", "working_time") or number_of(output, "time"),
        dollars=number_of(usage, "total_cost"),
        scores=grade.numbers,
    )


class _Grade:
    """Return the verdict from the grade of one scorer, and every score that is a number."""

    def __init__(self) -> None:
        self.answer: str | None = None
        self.is_correct: bool | None = None
        self.numbers: dict[str, float] = {}

    @classmethod
    def of(cls, scores: Row, metric: str) -> _Grade:
        if metric and scores and metric not in scores:
            raise RecordError(f"it has no score {metric!r}; it has {', '.join(scores)}")
        grade = cls()
        for name, score in scores.items():
            if not isinstance(score, dict):
                raise RecordError(f"its score {name!r} is not an object")
            value = cast(Row, score).get("value")
            if isinstance(value, int | float) and not isinstance(value, bool):
                grade.numbers[name] = float(value)
        chosen = metric or next(iter(scores), "")
        if chosen:
            score = cast(Row, scores.get(chosen, {}))
            value = score.get("value")
            grade.answer = optional_text(score, "answer")
            grade.is_correct = _GRADES.get(value) if isinstance(value, str) else truth_of(value)
        return grade


def _content(value: Any) -> str:
    """Return the text of a message, or of several, whose content may be in parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RecordError("a message is neither a text nor a list of parts")
    texts: list[str] = []
    parts: list[Any] = value
    for part in parts:
        if not isinstance(part, dict):
            raise RecordError("a part of a message is not an object")
        if part.get("role") in (None, "user"):
            texts.append(_part(cast(Row, part)))
    return "\n\n".join(filter(None, texts))


def _part(part: Row) -> str:
    """Return the text of one part of a message, which is text or reasoning."""
    if "content" in part:
        return _content(part["content"])
    if part.get("type") == "reasoning":
        return f"<think>\n{part.get('reasoning') or part.get('summary') or ''}\n</think>"
    return str(part.get("text") or "")


def _reference(target: Any) -> str | None:
    """Return the reference, or the first one if there are several."""
    if isinstance(target, list):
        target = cast(Sequence[Any], target)[0] if target else None
    return str(target).strip() or None if target is not None else None


def _usage(row: Row, output: Row) -> Row:
    """Return the usage of the model that answered.

    The usage of the whole sample counts all its calls. If the sample also used another model, such
    as a judge, the usage of the last call is returned instead.
    """
    by_model = table_of(row, "model_usage")
    if len(by_model) == 1:
        (name,) = by_model
        return table_of(by_model, name)
    return table_of(output, "usage")


def _prompt_tokens(usage: Row) -> int | None:
    """Return the number of all prompt tokens, including those from the cache."""
    read = count_of(usage, "input_tokens")
    if read is None:
        return None
    cached = ("input_tokens_cache_read", "input_tokens_cache_write")
    return read + sum(count_of(usage, name) or 0 for name in cached)


_ATTACHMENT = "attachment://"


def _resolved(text: str, row: Row) -> str:
    """Return a long text that the log stores separately from its message."""
    if not text.startswith(_ATTACHMENT):
        return text
    return text_of(table_of(row, "attachments"), text.removeprefix(_ATTACHMENT).strip())


FORMAT = Format(
    "inspect", "logs of inspect_ai: .eval archives, or their JSON", ("*.eval", "*.json"), read,
    list_field="samples",
)  # fmt: skip
