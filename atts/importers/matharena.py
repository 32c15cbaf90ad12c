"""Read outputs of MathArena, which have one rollout per row with its cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atts.importers.samples import (
    ForeignSample,
    Format,
    ReadOptions,
    Row,
    count_of,
    number_of,
    optional_text,
    text_of,
    truth_of,
)


def read(row: Row, path: Path, options: ReadOptions) -> Iterator[ForeignSample]:
    """Yield the rollout of one row."""
    answer = optional_text(row, "parsed_answer")
    competition = optional_text(row, "source")
    problem = text_of(row, "problem_idx")
    yield ForeignSample(
        question=text_of(row, "problem", "user_message"),
        text=_text(row),
        problem=f"{competition}/{problem}" if competition else problem,
        reference=optional_text(row, "gold_answer"),
        number=count_of(row, "idx_answer"),
        # the column contains Python's text for a missing value
        answer=None if answer in ("None", "nan", "") else answer,
        is_correct=truth_of(row.get(options.metric or "correct")),
        model=optional_text(row, "model_name", "model_config") or "",
        tokens=count_of(row, "output_tokens"),
        prompt_tokens=count_of(row, "input_tokens"),
        dollars=number_of(row, "cost"),
        prices=_prices(row),
        seconds=number_of(row, "time"),
        scores=_points(row),
    )


def _prices(row: Row) -> tuple[float, float] | None:
    """Return the prices per million tokens, although the names of the columns say per token."""
    read_price = number_of(row, "input_cost_per_tokens")
    written = number_of(row, "output_cost_per_tokens")
    if read_price is None or written is None or min(read_price, written) < 0:
        return None
    return read_price, written


def _text(row: Row) -> str:
    """Return the last message; older outputs have no separate text but all messages in JSON."""
    text = optional_text(row, "answer")
    if text is not None:
        return text
    messages: Any = row.get("all_messages")
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except ValueError:
            messages = None
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        return text_of(messages[-1], "content")
    return text_of(row, "answer")


def _points(row: Row) -> dict[str, float]:
    """Return, for each judge of a proof, the share of points that it gave."""
    points: dict[str, float] = {}
    for judge in range(1, 10):
        given = number_of(row, f"points_judge_{judge}")
        most = number_of(row, f"max_points_judge_{judge}")
        if given is None:
            break
        points[f"judge {judge}"] = given / most if most else given
    return points


FORMAT = Format(
    "matharena", "outputs of MathArena: one row per answer", ("*.jsonl", "*.json"), read
)
