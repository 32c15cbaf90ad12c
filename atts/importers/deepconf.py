"""Read traces of DeepConf in JSON, which have a confidence per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import cast

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
    text_of,
)

_WINDOW = 2048  # tokens in the windows and in the tail of the paper
_BOTTOM = 0.1  # share of the windows whose mean is the bottom confidence
_ENDS: dict[str, Ended] = {"length": "length", "gconf_threshold": "stopped"}


def read(row: Row, path: Path, options: ReadOptions) -> Iterator[ForeignSample]:
    """Yield every trace of one question."""
    question = text_of(row, "question", "prompt")
    reference = optional_text(row, "ground_truth", "answer")
    name = optional_text(row, "qid")
    traces = list_of(row, "all_traces", "traces")
    for each in traces:
        if not isinstance(each, dict):
            raise RecordError("one of its traces is not an object")
        trace = cast(Row, each)
        ids = trace.get("token_ids")
        scores = confidences(_confidences(trace))
        least = number_of(trace, "min_conf")
        if least is not None:
            scores["least confidence"] = least
        yield ForeignSample(
            question=question,
            text=text_of(trace, "text"),
            problem=name,
            reference=reference,
            answer=optional_text(trace, "extracted_answer"),
            ended=_ENDS.get(str(trace.get("stop_reason")), "end"),
            tokens=count_of(trace, "num_tokens"),
            ids=tuple(map(int, ids)) if isinstance(ids, list) else (),
            scores=scores,
        )


def _confidences(trace: Row) -> Sequence[float]:
    if trace.get("confs") is None:
        return ()
    values = list_of(trace, "confs")
    numbers = [float(each) for each in values if isinstance(each, int | float)]
    if len(numbers) != len(values) or not all(map(isfinite, numbers)):
        raise RecordError("its 'confs' contain something other than numbers")
    return numbers


def confidences(values: Sequence[float], window: int = _WINDOW) -> dict[str, float]:
    """Return the paper's four confidences of a trace: the mean, the tail, and the bottom tenth and
    the least of the windows.

    >>> confidences([1.0, 2.0, 6.0], window=2)
    {'mean confidence': 3.0, 'tail confidence': 4.0, 'bottom confidence': 1.5, 'least confidence': 1.5}
    """
    if not values:
        return {}
    width = min(window, len(values))
    sums = [0.0, *accumulate(values)]
    means = sorted((sums[end] - sums[end - width]) / width for end in range(width, len(values) + 1))
    lowest = means[: max(1, int(len(means) * _BOTTOM))]
    return {
        "mean confidence": sums[-1] / len(values),
        "tail confidence": (sums[-1] - sums[-1 - width]) / width,
        "bottom confidence": sum(lowest) / len(lowest),
        "least confidence": means[0],
    }


FORMAT = Format(
    "deepconf", "traces of DeepConf in JSON, one file per question", ("*.json", "*.jsonl"), read
)
