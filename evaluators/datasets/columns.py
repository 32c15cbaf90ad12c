"""Column mapping: rows of any naming become problems, or an error names the missing column."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from hashlib import blake2b
from typing import cast

from atts.core import Grading, Problem
from atts.errors import DatasetError
from atts.evaluators.datasets.catalogue import (
    ALIASES,
    LETTERS,
    AnswerForm,
    Answers,
    Benchmark,
    Columns,
    LoadOptions,
)
from atts.evaluators.datasets.rows import RowTable
from atts.evaluators.verdict import STRICT, changed


@dataclass(frozen=True, slots=True)
class Reader:
    """How the rows of a table become problems: one row at a time."""

    table: RowTable
    columns: Columns
    benchmark: Benchmark
    options: LoadOptions

    def problem(self, index: int) -> Problem:
        """The problem in that row; raises DatasetError when its text or reference is missing."""
        names = self.columns
        text = self.text(index, names.text)
        if not text:
            raise self.error(index, f"has no text in column {names.text!r}")
        name = self.text(index, names.id).removeprefix("test/").removesuffix(".json") or str(index)
        prefix = f"{self.benchmark.prefix or self.benchmark.name}/"
        name = prefix + name.removeprefix(prefix)
        answer = FORMS[self.benchmark.form](self.text(index, names.answer))
        if not answer and self.options.answers == "required":
            raise self.error(index, f"has no answer in column {names.answer!r}")
        choices, answer = self.choices(index, name, answer)
        answer += _unit(self.text(index, names.unit)) if "," not in answer else ""
        listed = "\n".join(
            f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False)
        )
        return Problem(
            id=name,
            text="\n\n".join(
                part for part in (self.text(index, names.context), text, listed) if part
            ),
            answer=answer or None,
            kind=self.options.kind or self.benchmark.kind or ("choice" if choices else "math"),
            level=_level(self.text(index, names.level)),
            subject=self.text(index, names.subject),
            choices=choices,
            source=self.table.places[index],
            grading=self.grading(index),
        )

    def text(self, index: int, column: str) -> str:
        """What a row has in a column; nothing where no column is named."""
        return cell(self.table.rows[index].get(column)).strip() if column else ""

    def grading(self, index: int) -> Grading | None:
        """The policy for that row, with its own tolerance; None for the default."""
        stated = self.text(index, self.columns.tolerance)
        try:  # a tuple's entries have one each: the largest holds for all
            own = (
                max(map(float, stated.strip("()").split(",")))
                if stated
                else self.options.grading.get("absolute")
            )
        except ValueError:
            raise self.error(index, f"has the tolerance {stated!r}, which is no number") from None
        found = changed(self.benchmark.grading, {**self.options.grading, "absolute": own})
        return found if found != STRICT else None

    def choices(self, index: int, name: str, answer: str) -> tuple[tuple[str, ...], str]:
        """The choices in their final order, and the letter of the right one."""
        listed = self.columns.choices and self.table.rows[index].get(self.columns.choices)
        if self.columns.distractors:
            there = (answer, *(self.text(index, column) for column in self.columns.distractors))
            found = [choice for choice in there if choice]
            right = 0
        elif listed:
            found = _choice_texts(listed)
            right = self.position(index, answer, found)
        else:
            return (), answer
        if not 2 <= len(found) <= len(LETTERS):
            raise self.error(index, f"has {len(found)} choices")
        order = (
            letter_order(self.options.seed, name, len(found))
            if self.columns.distractors
            else range(len(found))
        )
        return tuple(found[at] for at in order), LETTERS[order.index(right)] if answer else ""

    def position(self, index: int, answer: str, choices: Sequence[str]) -> int:
        """Where the right choice stands: from its position (counted from 0), its letter, or its
        words.
        """
        raw = self.table.rows[index].get(self.columns.answer)
        if isinstance(raw, int) and 0 <= raw < len(choices):
            return raw
        letter = answer.strip("(). ").upper()
        if len(letter) == 1 and letter in LETTERS[: len(choices)]:
            return LETTERS.index(letter)
        if choices.count(answer) == 1:
            return choices.index(answer)
        if not answer:
            return 0
        raise self.error(
            index, f"has the answer {answer!r}, which is no letter, position or text of its choices"
        )

    def error(self, index: int, problem: str) -> DatasetError:
        """Names the row; says what the row does hold."""
        held = ", ".join(
            name for name, value in self.table.rows[index].items() if cell(value).strip()
        )
        advice = f"That row fills {held or 'no column'}; map columns with --column text=NAME --column answer=NAME"
        return DatasetError(self.table.source, f"{self.table.place(index)} {problem}", advice)


def problems_of(reader: Reader) -> tuple[list[Problem], list[str]]:
    """Every row as a problem, and notes on what a reader of numbers should know.

    Raises DatasetError: a column that is not there (with those that are), a row without text or
    reference, an id twice.
    """
    table = reader.table
    reader = replace(reader, columns=find_columns(table, reader.columns, reader.options.answers))
    problems = [reader.problem(index) for index in range(len(table.rows))]
    if repeated := [
        name for name, count in Counter(problem.id for problem in problems).items() if count > 1
    ]:
        places = [
            table.place(index)
            for index, problem in enumerate(problems)
            if problem.id == repeated[0]
        ]
        detail = f"{' and '.join(places[:2])} have the same id {repeated[0]!r} ({len(repeated)} ids are not unique)"
        raise DatasetError(
            table.source, detail, "Map another column to 'id', or drop the repeated rows"
        )
    return problems, _notes(reader, problems)


def find_columns(table: RowTable, asked: Columns, answers: Answers) -> Columns:
    """The columns to read: those asked for, checked, and for the rest the usual names that are
    there.
    """
    named = {field: cast(str, getattr(asked, field)) for field in ALIASES}
    for name in filter(None, (*named.values(), *asked.distractors)):
        if name not in table.columns:
            raise _missing(table, f"column {name!r} is not there", name)
    lower = {name.lower().replace(" ", "_"): name for name in reversed(table.columns)}
    for field, aliases in ALIASES.items():
        named[field] = named[field] or next(
            (lower[alias] for alias in aliases.split() if alias in lower), ""
        )
    if not named["text"]:
        raise _missing(
            table,
            "no column holds the problem's text",
            "problem",
            "Say which one with --column text=NAME",
        )
    if not named["answer"] and answers == "required":
        advice = "Say which one with --column answer=NAME, or take problems without one with --answers optional"
        raise _missing(table, "no column holds the reference answer", "answer", advice)
    return Columns(**named, distractors=asked.distractors)


def cell(value: object) -> str:
    """A cell as text: nothing is "", a whole float loses its ".0", a list is joined by commas."""
    if value is None or value != value:  # NaN stands for nothing in Parquet made from data frames
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list | tuple):
        return ", ".join(cell(part).strip() for part in cast(Sequence[object], value))
    return str(value)


def letter_order(seed: int, name: str, count: int) -> tuple[int, ...]:
    """The seeded order of a question's choices: equal on every machine, another for every question."""
    keys = [
        blake2b(f"{seed}\x1f{name}\x1f{at}".encode(), digest_size=8).digest() for at in range(count)
    ]
    return tuple(sorted(range(count), key=keys.__getitem__))


def _missing(table: RowTable, problem: str, wanted: str, advice: str = "") -> DatasetError:
    there = {name.lower(): name for name in reversed(table.columns)}
    near = get_close_matches(wanted.lower(), there, n=1, cutoff=0.6)
    hint = f"; did you mean {there[near[0]]!r}?" if near else ""
    return DatasetError(
        table.source, problem, f"Columns found: {', '.join(table.columns)}{hint} {advice}".rstrip()
    )


def _level(text: str) -> int | None:
    number = re.fullmatch(r"(?:level\s*)?(\d{1,3})", text, re.IGNORECASE)
    return int(number[1]) if number else None


def _choice_texts(value: object) -> list[str]:
    if isinstance(value, Mapping):  # {"text": [...], "label": [...]}, or {"A": ..., "B": ...}
        held = cast(Mapping[str, object], value)
        value = (
            held["text"]
            if isinstance(held.get("text"), list)
            else [held[key] for key in sorted(held)]
        )
    if not isinstance(value, list | tuple):
        return [part for part in re.split(r"\s*\n\s*", cell(value).strip()) if part]
    return [cell(part).strip() for part in cast(Sequence[object], value)]


def _plain(answer: str) -> str:
    """Dollar signs around the whole answer, or around each part of a list, are typesetting."""
    if re.fullmatch(r"\$[^$]+\$(\s*,\s*\$[^$]+\$)*", answer):
        return ", ".join(part.strip() for part in re.findall(r"\$([^$]+)\$", answer))
    return answer


def _integer(answer: str) -> str:
    bare = re.sub(r"\^\{?\\circ\}?|°|(?<=\d),(?=\d{3})|\$", "", answer).strip()
    whole = re.fullmatch(r"([+-]?\d+)(?:\.0+)?", bare)
    return str(int(whole[1])) if whole else _plain(answer)


FORMS: Mapping[AnswerForm, Callable[[str], str]] = {
    "plain": _plain,
    "integer": _integer,
    "final": lambda answer: _integer(answer.rsplit("####", 1)[-1].strip()),
}


def _unit(text: str) -> str:
    r"""A unit as it stands behind a number."""
    name, power, size = text.strip("$ ").partition("^")
    return {"": "", "%": "\\%"}.get(
        text, (f"\\text{{ {name.lstrip(chr(92))}}}" if name else "") + power + size
    )


def _notes(reader: Reader, problems: Sequence[Problem]) -> list[str]:
    notes = list[str]()
    texts = Counter(" ".join(problem.text.split()).casefold() for problem in problems)
    if repeated := sum(count - 1 for count in texts.values()):
        notes.append(f"{repeated} problems repeat another's text")
    if unanswered := sum(problem.answer is None for problem in problems):
        notes.append(
            f"{unanswered} of {len(problems)} problems have no reference answer and cannot be "
            f"graded"
        )
    level = reader.columns.level
    stated = [reader.text(index, level) for index in range(len(problems))]
    if unread := sum(bool(text) and _level(text) is None for text in stated):
        notes.append(f"column {level!r} is no level number in {unread} rows")
    if reader.columns.distractors:
        notes.append(f"choices shuffled per question with seed {reader.options.seed}")
    return notes
