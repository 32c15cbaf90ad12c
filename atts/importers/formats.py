"""File formats of other tools that atts can import, with one reader function per format."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

from atts.core import AnswerKind, TokenIds
from atts.errors import OptionError, counted

Row = Mapping[str, Any]
Ended = Literal["end", "length", "stopped", "failed"]
"""The reason why generation ended in the other tool. "end": the model stopped by itself. "length":
a token limit was reached. "stopped": the tool stopped the model early. "failed": an error occurred.
"""


class RecordError(ValueError):
    """Error for a record that lacks a required field or has a field of the wrong type. The importer
    adds the file name and the record's position to the message.
    """


@dataclass(frozen=True, slots=True)
class ForeignSample:
    """One rollout recorded by another tool. Optional fields are None or empty if the tool did not
    record them.

    `problem` is the problem's name in the other tool. Rollouts without a problem name belong to the
    same problem if their questions are the same.
    """

    question: str
    text: str
    problem: str | None = None
    reference: str | None = None
    kind: AnswerKind | None = None
    choices: tuple[str, ...] = ()
    number: int | None = None  # index of this rollout among the rollouts of its problem
    # the answer that the other tool recorded; if None, atts extracts the answer from the text
    answer: str | None = None
    is_correct: bool | None = None
    ended: Ended = "end"
    error: str = ""
    model: str = ""
    # name of the filter that extracted the answer; a tool may extract with several filters
    filter: str = ""
    tokens: int | None = None  # number of tokens that the model wrote in this rollout
    prompt_tokens: int | None = None
    seconds: float | None = None
    dollars: float | None = None
    # price of input tokens and price of output tokens, in dollars per million tokens
    prices: tuple[float, float] | None = None
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    ids: TokenIds = ()
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options for reading a format. Only the plain format (`read_columns`) uses `columns`."""

    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    # Name of the recorded score that says whether an answer is correct. With "", the first score of
    # the record is used.
    metric: str = ""


SampleReader = Callable[[Row, Path, ReadOptions], Iterator[ForeignSample]]
"""Function that yields the rollouts of one record, all of the same problem. Its `Path` argument is
the file that contains the record.

:raises RecordError: the record lacks a required field.
"""


@dataclass(frozen=True, slots=True)
class Format:
    """A file format: its name, the glob patterns of its files, and the function that reads a
    record.
    """

    name: str
    about: str
    patterns: tuple[str, ...]
    read: SampleReader
    # In a JSON file, the name of the field that contains the list of records. With "", the file
    # itself is a list of records, or a single record.
    list_field: str = ""


def text_of(row: Row, *names: str) -> str:
    """Return the first of the named fields that holds a string or a number, as a string.

    :raises RecordError: if no field holds a string or a number.
    """
    found = optional_text(row, *names)
    if found is None:
        raise RecordError(f"the record has no field {' or '.join(map(repr, names))}")
    return found


def optional_text(row: Row, *names: str) -> str | None:
    """Return the first of the named fields that holds a string or a number, as a string, or else
    None.
    """
    for name in names:
        value = row.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    return None


def number_of(row: Row, *names: str) -> float | None:
    """Return the first of the named fields that holds a finite number, or else None."""
    for name in names:
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def count_of(row: Row, *names: str) -> int | None:
    """Return the first of the named fields that holds a finite number, as an integer. Return None
    if that number is negative or not whole, or if no field holds a number.
    """
    value = number_of(row, *names)
    return int(value) if value is not None and value >= 0 and value == int(value) else None


def table_of(row: Row, name: str) -> Row:
    """Return the JSON object in a field, or an empty object if the field is missing or null.

    :raises RecordError: if the field contains another type of value.
    """
    value = row.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RecordError(f"the field {name!r} is a {type(value).__name__}, not an object")
    return cast(Row, value)


def list_of(row: Row, *names: str) -> Sequence[Any]:
    """Return the value of the first of the named fields that contains a list.

    :raises RecordError: if no field is a list.
    """
    for name in names:
        value: Any = row.get(name)
        if isinstance(value, list):
            found: list[Any] = value
            return found
    raise RecordError(f"the record has no list {' or '.join(map(repr, names))}")


def truth_of(value: object) -> bool | None:
    """Convert a grade to a verdict: true and 1 become True, false and 0 become False, and anything
    else becomes None.

    >>> [truth_of(value) for value in (True, 0.0, 1, 0.5, "yes", None)]
    [True, False, True, None, None, None]
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return None


# the grades that inspect_ai writes for a correct answer, an incorrect answer and no answer
_GRADES = {"C": True, "I": False, "N": False}
_ENDS: dict[str, Ended] = {"max_tokens": "length", "model_length": "length"}


def read_inspect_ai(row: Row, path: Path, options: ReadOptions) -> Iterator[ForeignSample]:
    """Yield the rollout of one record of an inspect_ai log.

    A record is one epoch of one sample. The log is an .eval archive or a JSON file.
    """
    output = table_of(row, "output")
    choices = output.get("choices") or [{}]
    if not isinstance(choices, list) or not isinstance(choices[0], dict):
        raise RecordError("the output of the record has no choices")
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
    """One scorer's verdict on a rollout, and the numeric scores of all scorers."""

    def __init__(self) -> None:
        self.answer: str | None = None
        self.is_correct: bool | None = None
        self.numbers: dict[str, float] = {}

    @classmethod
    def of(cls, scores: Row, metric: str) -> _Grade:
        if metric and scores and metric not in scores:
            raise RecordError(
                f"the record has no score {metric!r}; its scores are {', '.join(scores)}"
            )
        grade = cls()
        for name, score in scores.items():
            if not isinstance(score, dict):
                raise RecordError(f"the score {name!r} is not an object")
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
    """Return the text of a message. A message is a string, a list of content parts, or a list of
    chat messages. Of the chat messages, only the user's are used.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RecordError("a message is neither a string nor a list of parts")
    texts: list[str] = []
    parts: list[Any] = value
    for part in parts:
        if not isinstance(part, dict):
            raise RecordError("a part of a message is not an object")
        if part.get("role") in (None, "user"):
            texts.append(_part(cast(Row, part)))
    return "\n\n".join(filter(None, texts))


def _part(part: Row) -> str:
    """Return the text of one part of a message; reasoning is put between <think> and </think>."""
    if "content" in part:
        return _content(part["content"])
    if part.get("type") == "reasoning":
        return f"<think>\n{part.get('reasoning') or part.get('summary') or ''}\n</think>"
    return str(part.get("text") or "")


def _reference(target: Any) -> str | None:
    """Return the reference answer, or the first one of a list. Return None if it is missing or
    empty.
    """
    if isinstance(target, list):
        target = cast(Sequence[Any], target)[0] if target else None
    return str(target).strip() or None if target is not None else None


def _usage(row: Row, output: Row) -> Row:
    """Return the token usage of the model that answered.

    If the sample used only this model, this is the usage of all its calls. If the sample also used
    another model, such as a judge, only the usage of the last call is known.
    """
    by_model = table_of(row, "model_usage")
    if len(by_model) == 1:
        (name,) = by_model
        return table_of(by_model, name)
    return table_of(output, "usage")


def _prompt_tokens(usage: Row) -> int | None:
    """Return the number of prompt tokens, including tokens read from or written to the cache."""
    read_inspect_ai = count_of(usage, "input_tokens")
    if read_inspect_ai is None:
        return None
    cached = ("input_tokens_cache_read", "input_tokens_cache_write")
    return read_inspect_ai + sum(count_of(usage, name) or 0 for name in cached)


_ATTACHMENT = "attachment://"


def _resolved(text: str, row: Row) -> str:
    """Return a string of the log. If it is only a reference to an attachment, return the attachment
    instead.
    """
    if not text.startswith(_ATTACHMENT):
        return text
    return text_of(table_of(row, "attachments"), text.removeprefix(_ATTACHMENT).strip())


INSPECT_AI = Format(
    "inspect", "inspect_ai logs: .eval archives, or the same logs in JSON", ("*.eval", "*.json"), read_inspect_ai,
    list_field="samples",
)  # fmt: skip


_QUESTIONS = ("problem", "question", "Question", "Problem", "query", "prompt", "input", "text")
_STAMP = re.compile(r"_\d{4}-\d\d-\d\dT[\d.:-]+$")


def read_lm_eval(row: Row, path: Path, options: ReadOptions) -> Iterator[ForeignSample]:
    """Yield the rollouts of one record of lm-evaluation-harness, as `--log_samples` writes it.

    A record contains all replies to one document and the answers that one filter extracted. Each
    reply becomes a rollout.
    """
    replies = _only(row, "resps")
    filtered = _only(row, "filtered_resps")
    is_each = isinstance(filtered, list) and len(filtered) == len(replies)
    task = _STAMP.sub("", path.stem.removeprefix("samples_"))
    numbers = _numbers(row)
    if options.metric and options.metric not in row:
        raise RecordError(
            f"the record has no metric {options.metric!r}; its metrics are {', '.join(numbers)}"
        )
    metric = options.metric or next(
        (name for name in numbers if truth_of(numbers[name]) is not None), ""
    )
    question = optional_text(table_of(row, "doc"), *_QUESTIONS) or _prompt(row)
    for number, reply in enumerate(replies):
        if not isinstance(reply, str):
            raise RecordError(
                "a reply is not a string; atts imports only generation tasks, not tasks that "
                "compare likelihoods"
            )
        answer = filtered[number] if is_each else filtered
        is_only = len(replies) == 1
        yield ForeignSample(
            question=question,
            text=reply,
            problem=f"{task}/{text_of(row, 'doc_id')}",
            reference=optional_text(row, "target"),
            number=number,
            # A filter may reduce several replies to one answer, for example by a vote. This answer
            # does not belong to any single reply, so it is not used.
            answer=_answer(answer) if is_each or is_only else None,
            is_correct=truth_of(row.get(metric)) if is_only and metric else None,
            filter=optional_text(row, "filter") or "",
            scores=numbers if is_only else {},
        )


def _only(row: Row, name: str) -> Any:
    """Return the only element of a list field that has one element per request to the model.

    :raises RecordError: if there are several requests, as in tasks that compare likelihoods.
    """
    requests: Sequence[Any] = list_of(row, name)
    if len(requests) != 1:
        raise RecordError(
            f"the record has {len(requests)} requests; atts imports only generation tasks, not "
            "tasks that compare likelihoods"
        )
    found = requests[0]
    if name == "resps" and not isinstance(found, list):
        raise RecordError("the field 'resps' does not contain a list of replies")
    return found


def _answer(value: object) -> str | None:
    """Return the answer that a filter extracted. Return None for "[invalid]", which the harness
    writes if it finds no answer, and for an empty answer.
    """
    if not isinstance(value, str):
        return None
    return None if value.strip() in ("", "[invalid]") else value


def _numbers(row: Row) -> dict[str, float]:
    """Return the record's numeric metrics by name."""
    names = list(map(str, list_of(row, "metrics"))) if "metrics" in row else []
    if not names:  # before version 0.4.4, lm-evaluation-harness did not write `metrics`
        names = [name for name in row if name in ("exact_match", "acc", "math_verify")]
    values = {name: number_of(row, name) for name in names}
    return {
        name: value for name, value in values.items() if value is not None and math.isfinite(value)
    }


def _prompt(row: Row) -> str:
    """Return the prompt that the harness sent to the model. It is used as the question if the
    document has no question field.
    """
    sent: Any = row.get("arguments")
    if isinstance(sent, list) and sent and isinstance(sent[0], list) and sent[0]:
        return str(sent[0][0])
    if isinstance(sent, dict):
        first = table_of(table_of(row, "arguments"), "gen_args_0")
        if "arg_0" in first:
            return text_of(first, "arg_0")
    raise RecordError("the record contains no question, neither in its document nor in its request")


LM_EVAL = Format(
    "lm-eval",
    "lm-evaluation-harness samples, written with --log_samples",
    ("samples_*.jsonl",),
    read_lm_eval,
)


_SEED = re.compile(r"-rs(\d+)")
_VERDICT = re.compile(r"judge?ment:\s*\W*(yes|no)\b", re.IGNORECASE)


def read_nemo_skills(row: Row, path: Path, options: ReadOptions) -> Iterator[ForeignSample]:
    """Yield the rollout of one line of NeMo-Skills output (output-rs0.jsonl, output-rs1.jsonl and
    so on).

    The random seed in the file's name becomes the rollout's index within its problem.
    """
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
    """Return the verdict in the field `metric`. Without `metric`, return the verdict of the
    symbolic check, or of the judge if there was no symbolic check.
    """
    if metric:
        if metric not in row:
            raise RecordError(f"the record has no field {metric!r}")
        value = row[metric]
        return _judgement(value) if isinstance(value, str) else truth_of(value)
    for name in ("symbolic_correct", "is_correct"):
        grade = truth_of(row.get(name))
        if grade is not None:
            return grade
    return _judgement(row.get("judgement"))


def _judgement(value: object) -> bool | None:
    """Return the last verdict that a judge model's reply contains, such as "Judgement: Yes". Return
    None if there is none.
    """
    said = _VERDICT.findall(value) if isinstance(value, str) else []
    return said[-1].lower() == "yes" if said else None


NEMO_SKILLS = Format(
    "nemo-skills",
    "NeMo-Skills generations: a directory with output-rs*.jsonl",
    ("output-rs*.jsonl", "output.jsonl"),
    read_nemo_skills,
)


def read_matharena(row: Row, path: Path, options: ReadOptions) -> Iterator[ForeignSample]:
    """Yield the rollout of one row of MathArena output, including its cost."""
    answer = optional_text(row, "parsed_answer")
    competition = optional_text(row, "source")
    problem = text_of(row, "problem_idx")
    yield ForeignSample(
        question=text_of(row, "problem", "user_message"),
        text=_text(row),
        problem=f"{competition}/{problem}" if competition else problem,
        reference=optional_text(row, "gold_answer"),
        number=count_of(row, "idx_answer"),
        # A missing answer was written as the Python text "None" or "nan".
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
    """Return the prices of input and output tokens, in dollars per million tokens.

    The column names end with "per_tokens", but the values are prices per million tokens.
    """
    read_price = number_of(row, "input_cost_per_tokens")
    written = number_of(row, "output_cost_per_tokens")
    if read_price is None or written is None or min(read_price, written) < 0:
        return None
    return read_price, written


def _text(row: Row) -> str:
    """Return the model's final message. Older files store it only as the last entry of a JSON list
    of messages.
    """
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
    """Return each judge's points for a proof as a fraction of the maximum, keyed by "judge 1",
    "judge 2" and so on. If no maximum is recorded, return the points themselves.
    """
    points: dict[str, float] = {}
    for judge in range(1, 10):
        given = number_of(row, f"points_judge_{judge}")
        most = number_of(row, f"max_points_judge_{judge}")
        if given is None:
            break
        points[f"judge {judge}"] = given / most if most else given
    return points


MATHARENA = Format(
    "matharena", "MathArena outputs: one row per answer", ("*.jsonl", "*.json"), read_matharena
)


def read_monkey_business(row: Row, path: Path, options: ReadOptions) -> Iterator[ForeignSample]:
    """Yield the rollouts of one record of the dataset Monkey Business (from the paper "Large
    Language Monkeys").

    A record contains one problem with all its samples, often thousands. Each sample becomes a
    rollout.
    """
    samples = list_of(row, "samples")
    has_grades = any(name in row for name in ("is_corrects", "is_correct"))
    grades = list_of(row, "is_corrects", "is_correct") if has_grades else [None] * len(samples)
    if len(grades) != len(samples):
        raise RecordError(
            f"the record has {counted(len(samples), 'sample')} but {counted(len(grades), 'grade')}"
        )
    worked = optional_text(row, "gt_answer")
    split = optional_text(row, "orig_dset_split")
    name = optional_text(row, "orig_dset_idx", "theorem_name", "name")
    for number, (text, grade) in enumerate(zip(samples, grades, strict=True)):
        if not isinstance(text, str):
            raise RecordError(f"sample {number + 1} of the record is not a string")
        yield ForeignSample(
            question=text_of(row, "question", "prompt", "description"),
            text=text,
            problem=f"{split}/{name}" if split and name else name,
            reference=worked,
            number=number,
            is_correct=truth_of(grade),
        )


MONKEY_BUSINESS = Format(
    "monkey-business",
    "Monkey Business: a list of problems, each with all its samples",
    ("*.json", "*.jsonl"),
    read_monkey_business,
)


# number of tokens in a window, and also in the tail of a trace; the value is from the DeepConf
# paper
_WINDOW = 2048
# The "bottom confidence" is the average over this share of the windows, namely the windows with the
# lowest mean confidence.
_BOTTOM = 0.1
_ENDS_DEEPCONF: dict[str, Ended] = {"length": "length", "gconf_threshold": "stopped"}


def read_deepconf(row: Row, path: Path, options: ReadOptions) -> Iterator[ForeignSample]:
    """Yield the rollouts of one record of DeepConf output in JSON.

    A record contains all traces of one question. Each trace becomes a rollout, with confidences
    computed from the trace's confidence per token.
    """
    question = text_of(row, "question", "prompt")
    reference = optional_text(row, "ground_truth", "answer")
    name = optional_text(row, "qid")
    traces = list_of(row, "all_traces", "traces")
    for each in traces:
        if not isinstance(each, dict):
            raise RecordError("a trace of the record is not an object")
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
            ended=_ENDS_DEEPCONF.get(str(trace.get("stop_reason")), "end"),
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
        raise RecordError("the field 'confs' contains a value that is not a finite number")
    return numbers


def confidences(values: Sequence[float], window: int = _WINDOW) -> dict[str, float]:
    """Return the four confidences that the DeepConf paper defines for a trace, computed from its
    confidence per token.

    They are the means over all tokens, over the last `window` tokens, over the lowest tenth of the
    sliding windows, and over the lowest window.

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


DEEPCONF = Format(
    "deepconf",
    "DeepConf traces in JSON, one file per question",
    ("*.json", "*.jsonl"),
    read_deepconf,
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
"""For each field of the plain format, the column names to try if the user does not name a column.
"""
_SCORE = "score."


def check_columns(columns: Mapping[str, str]) -> None:
    """Check that the user named columns only for fields of the plain format.

    :raises OptionError: if a field is unknown; the message names it.
    """
    for name in columns:
        if name not in FIELDS and not name.startswith(_SCORE):
            raise OptionError(
                "--column", f"there is no field {name!r}", [*FIELDS, "score.NAME"], name
            )


def read_columns(row: Row, path: Path, options: ReadOptions) -> Iterator[ForeignSample]:
    """Yield the rollouts of one line of plain JSON Lines, whose columns the user can name.

    A line holds one rollout. If some columns contain lists, the line holds all rollouts of a
    problem, one per list entry.
    """
    names = {field: _column(row, field, options.columns) for field in FIELDS}
    several = [name for name in names.values() if name and isinstance(row[name], list)]
    lengths = {name: len(cast(list[Any], row[name])) for name in several}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise RecordError(f"the lists of the record have different lengths ({shown})")
    if not names["question"] and not names["id"]:
        raise RecordError(
            "the record has no known column for the question; name one with --column question=NAME"
        )
    if not names["text"] and not names["answer"]:
        raise RecordError(
            "the record has no known column for the text; name one with --column text=NAME"
        )
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
    """Return the name of the column that holds a field, or "" if the row has no such column.

    :raises RecordError: the user named a column that the row lacks.
    """
    named = columns.get(field)
    if named is not None:
        if named not in row:
            raise RecordError(
                f"the record has no column {named!r}; its columns are {', '.join(row)}"
            )
        return named
    return next((name for name in FIELDS[field] if row.get(name) is not None), "")


def _score(row: Row, column: str, number: int) -> float:
    value = row.get(column)
    if isinstance(value, list):
        value = value[number] if number < len(value) else None
    score = number_of({"score": value}, "score")
    if score is None:
        raise RecordError(f"the column {column!r} does not contain a number")
    return score


COLUMNS = Format(
    "jsonl",
    "plain JSON Lines; name the columns with --column",
    ("*.jsonl", "*.ndjson", "*.json"),
    read_columns,
)
