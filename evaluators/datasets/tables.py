"""Read tables from JSONL, JSON, CSV and Parquet files, and convert their rows to problems.

The first part is the catalogue of known benchmarks.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Literal, cast, get_args

from atts.core import AnswerKind, Grading, Problem
from atts.errors import DatasetError, OptionError, counted
from atts.evaluators.programs import tests_of_row
from atts.evaluators.syntax.vocabulary import Tables
from atts.evaluators.verdict import STRICT, changed
from atts.files import from_json, open_ordinary

AnswerForm = Literal["plain", "integer", "final"]
"""How reference answers are written in the dataset. "plain": only the answer. "integer": a whole
number, such as 025, 27.0 or 336°. "final": a solution that ends with "####" and the answer.
"""
Answers = Literal["required", "optional"]
Network = Literal["auto", "never"]
""""auto" downloads files that are not in the cache, unless HF_HUB_OFFLINE forbids it; "never" uses
only the cache.
"""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

LISTED = Tables(Path(__file__).with_name("benchmarks.toml"))
# for each field, the column names that are usual in datasets
ALIASES = LISTED.table("columns", dict[str, str])


@dataclass(frozen=True, slots=True)
class Columns:
    """The name of the column that holds each field of a problem. Fields without a name are looked
    up under their usual names, ignoring case.

    If `answer` is the column of the correct choice, `distractors` are the columns of the wrong
    choices. The text in column `context` is put before the problem. The columns `unit` and
    `tolerance` describe the answer; their names are never guessed.
    """

    text: str = ""
    answer: str = ""
    id: str = ""
    level: str = ""
    subject: str = ""
    choices: str = ""
    context: str = ""
    unit: str = ""
    tolerance: str = ""
    distractors: tuple[str, ...] = ()

    @classmethod
    def of(cls, mapping: Mapping[str, str]) -> Columns:
        """Make `Columns` from a mapping such as {"text": "Question"}.

        Raises OptionError if the mapping has an unknown field.
        """
        unknown = [name for name in mapping if name not in ALIASES]
        if unknown:
            raise OptionError("columns", f"there is no field {unknown[0]!r}", [*ALIASES])
        return cls(**mapping, distractors=())


@dataclass(frozen=True, slots=True)
class HubSource:
    """One copy of a benchmark on the hub, with its columns and its files in reading order."""

    repo: str
    files: tuple[str, ...]
    columns: Columns
    # (column, text): only rows that have this text in this column are read
    keep: tuple[str, str] | None = None
    quirk: str = ""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark with its copies on the hub.

    The first copy that is in the local cache is read. If none is cached, the first copy of the list
    is downloaded.
    """

    name: str
    title: str
    size: int
    # None: "choice" for problems with choices, "math" for all others
    kind: AnswerKind | None = "math"
    form: AnswerForm = "plain"
    grading: Grading = Grading()
    aliases: tuple[str, ...] = ()
    # (number of problems, seed), if this benchmark is a random sample of another benchmark
    sample: tuple[int, int] | None = None
    hubs: tuple[HubSource, ...] = ()
    prefix: str = ""  # first part of the problem ids; "" stands for the name of the benchmark
    note: str = ""

    @classmethod
    def unknown(cls, source: str) -> Benchmark:
        """Return a `Benchmark` without hub copies, for a source that is not a known benchmark."""
        return cls(Path(source).stem, "", 0, kind=None)


BENCHMARKS: Mapping[str, Benchmark] = {
    it.name: it for it in LISTED.table("benchmark", tuple[Benchmark, ...])
}


def find_benchmark(name: str) -> Benchmark | None:
    """Return the benchmark with this name or alias, ignoring case and punctuation; None if it is
    unknown.
    """
    for benchmark in BENCHMARKS.values():
        if _bare(name) in (_bare(benchmark.name), *benchmark.aliases):
            return benchmark
    return None


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for loading a dataset. The defaults suit every known benchmark.

    If `file` is given, a known benchmark is read from it instead of the hub. `seed` determines the
    order of each problem's choices. `grading` overrides fields of the benchmark's grading policy.
    """

    columns: Columns | Mapping[str, str] = Columns()
    file: Path | None = None
    revision: str = "main"
    split: str = "test"
    config: str = ""
    kind: AnswerKind | None = None
    answers: Answers = "required"
    seed: int = 0
    grading: Mapping[str, float | str | None] = field(default_factory=dict[str, float | str | None])
    # file with worked examples, which are put into the prompt before every problem
    shots: Path | None = None
    network: Network = "auto"
    cache: Path | None = None  # cache folder; None for the default folder of huggingface_hub

    def __post_init__(self) -> None:
        for option, known in (("answers", Answers), ("network", Network), ("kind", AnswerKind)):
            value = getattr(self, option)
            if value not in get_args(known) and (option, value) != ("kind", None):
                raise OptionError(option, f"{value!r} is not an option", get_args(known))
        changed(STRICT, self.grading)

    @property
    def asked(self) -> Columns | None:
        """Return the columns that the user named; None if the user named none."""
        asked = self.columns if isinstance(self.columns, Columns) else Columns.of(self.columns)
        return None if asked == Columns() else asked


# ---- reading the rows of files

Row = Mapping[str, object]
# Limit on the size of a file after decompression, in bytes. The largest benchmark has about 1 % of
# it.
_MOST_BYTES = 1 << 30
_ROW_BYTES = 256  # memory of a row without its values, in bytes
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True, slots=True)
class RowTable:
    """The rows of one or more files. `places` has the origin of each row, such as "data.jsonl: line
    7".
    """

    source: str
    rows: tuple[Row, ...]
    places: tuple[str, ...]
    digest: str  # SHA-256 of the contents of all files, one after the other

    def place(self, index: int) -> str:
        """Return the origin of a row, such as "line 7", without the source, which error messages
        already name.
        """
        return self.places[index].removeprefix(f"{self.source}: ")

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns of all rows, in order of first appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row))


def read_table(paths: Sequence[Path], source: str) -> RowTable:
    """Return the rows of these files as one table.

    Raises DatasetError if a file is missing, not UTF-8 or of an unknown type, or has a line that is
    not a row. An empty table is also an error.
    """
    digest = sha256()
    rows = list[Row]()
    places = list[str]()
    for path in paths:
        data = _bytes(path, source)
        digest.update(data)
        word = "row" if kind_of(path) in (".json", ".parquet") else "line"
        for number, row in _parse(path, data, source):
            rows.append(_row(row, f"{path.name} {word} {number}", source))
            file = "" if path.name in source else f"{path.name} "
            places.append(f"{source}: {file}{word} {number}")
    if not rows:
        raise DatasetError(source, "the file has no rows", "Check the file name")
    return RowTable(source, tuple(rows), tuple(places), digest.hexdigest())


def kind_of(path: Path) -> str:
    """Return the suffix that determines how a file is parsed, such as ".csv" for data.csv.gz; "" if
    it is unknown.
    """
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return suffix.lower() if suffix.lower() in SUFFIXES else ""


def json_lines(lines: Iterable[str], source: str, place: str = "") -> Iterator[tuple[int, Row]]:
    """Yield the JSON object on each line, with the line's number. Blank lines are skipped.

    `place` names the file in messages, if the source has several files. Raises DatasetError for a
    line that is not a JSON object.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, json_line(line, number, source, place)


def json_line(line: str, number: int, source: str, place: str = "") -> Row:
    """Return the JSON object on a line; raise DatasetError if the line is not a JSON object."""
    try:
        value = from_json(line)
    except ValueError as error:
        problem = f"{place}line {number} is not JSON ({error})"
        raise DatasetError(source, problem, "Write one JSON object per line") from None
    return _row(value, f"{place}line {number}", source)


def _bytes(path: Path, source: str) -> bytes:
    try:
        with open_ordinary(path) as file:
            data = (gzip.open(file) if path.suffix == ".gz" else file).read(_MOST_BYTES + 1)
    except FileNotFoundError:
        near = sorted(other.name for other in path.parent.glob("*") if kind_of(other))
        hint = f"The folder contains {', '.join(near[:8])}" if near else "Check the path"
        raise DatasetError(source, f"there is no file {path}", hint) from None
    except (OSError, EOFError, zlib.error) as error:
        problem = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise DatasetError(source, problem, "Check the path and the permissions") from error
    if len(data) > _MOST_BYTES:
        raise _too_large(path, source)
    return data


def _too_large(path: Path, source: str) -> DatasetError:
    problem = f"{path} has more than {_MOST_BYTES >> 20:,} MiB"
    return DatasetError(source, problem, "Split or filter the file first")


def _parse(path: Path, data: bytes, source: str) -> Iterable[tuple[int, object]]:
    """Parse a file into values that should be rows, each with its line or row number."""
    match kind_of(path):
        case ".parquet":
            return enumerate(_parquet(path, data, source), 1)
        case ".jsonl" | ".ndjson":
            # `splitlines` would also split at the character U+2028, which may be inside a JSON
            # string.
            lines = _text(path, data, source).split("\n")
            return json_lines(lines, source, f"{path.name} ")
        case ".json":
            return enumerate(_json_list(_text(path, data, source), path, source), 1)
        case ".csv" | ".tsv" as kind:
            return _csv(_text(path, data, source), path, "\t" if kind == ".tsv" else ",", source)
        case _:
            problem = f"{path.name} has a type that atts cannot read"
            raise DatasetError(
                source, problem, f"Known types: {', '.join(SUFFIXES)}, each also with .gz appended"
            )


def _text(path: Path, data: bytes, source: str) -> str:
    try:
        # "-sig" skips a byte order mark, with which exported CSV files often begin
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = f"{path.name} line {line} is not UTF-8 (byte {data[error.start]:#04x} at offset {error.start})"
        raise DatasetError(
            source, problem, "Convert the file, for example with: iconv -f latin1 -t utf-8"
        ) from None


def _json_list(text: str, path: Path, source: str) -> list[object]:
    try:
        value = from_json(text)
    except ValueError as error:
        raise DatasetError(
            source,
            f"{path.name} is not JSON ({error})",
            "If the file has one JSON object per line, rename it to .jsonl",
        ) from None
    # Some JSON files have an object around the list, such as {"data": [...]}.
    if isinstance(value, dict):
        lists = [part for part in cast(dict[str, object], value).values() if isinstance(part, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        raise DatasetError(
            source,
            f"{path.name} does not contain a list of rows",
            "Use a list of objects, or JSON Lines",
        )
    return cast(list[object], value)


def _row(value: object, place: str, source: str) -> Row:
    if not isinstance(value, dict):
        raise DatasetError(
            source,
            f"{place} is a {type(value).__name__}, not an object",
            "Write each row as an object with named columns: {...}",
        )
    return cast(dict[str, object], value)


def _csv(text: str, path: Path, delimiter: str, source: str) -> Iterator[tuple[int, Row]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            # if a row has too many cells, DictReader stores the additional cells under the key None
            if None in row:
                problem = (
                    f"{path.name} line {reader.line_num} has more fields than the header, which "
                    f"has {len(row) - 1}"
                )
                raise DatasetError(source, problem, "Quote fields that contain the delimiter")
            yield reader.line_num, dict(row)
    except csv.Error as error:
        raise DatasetError(
            source,
            f"{path.name} line {reader.line_num}: {error}",
            "Check the quotation marks in the line",
        ) from None


def _parquet(path: Path, data: bytes, source: str) -> list[Row]:
    # import_module hides the import from type checkers; pyarrow is optional and has no type
    # annotations
    try:
        pyarrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    except ImportError:
        advice = "Install pyarrow: pip install 'atts-llm[parquet]'"
        raise DatasetError(
            source, f"{path.name} can be read only with pyarrow, which is not installed", advice
        ) from None
    rows = list[Row]()
    bytes_read = 0
    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(data))
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        # Parquet can store a large value once and repeat it in every row. So a small file can need
        # much memory, and only a limited number of rows is read at once.
        rows_at_once = _MOST_BYTES // max((group.total_byte_size for group in groups), default=1)
        for batch in file.iter_batches(batch_size=max(1, min(1024, rows_at_once))):
            bytes_read += batch.nbytes + _ROW_BYTES * len(batch)
            if bytes_read > _MOST_BYTES:
                raise _too_large(path, source)
            rows += batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DatasetError(
            source, f"{path.name} is not a Parquet file ({error})", "Fetch the file again"
        ) from None
    return rows


# ---- turning rows into problems


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader that turns the rows of a table into problems, one row at a time."""

    table: RowTable
    columns: Columns
    benchmark: Benchmark
    options: LoadOptions

    def problem(self, index: int) -> Problem:
        """Return the problem in a row; raise DatasetError if its text or reference is missing."""
        names = self.columns
        text = self.text(index, names.text)
        if not text:
            raise self.error(index, f"has no text in column {names.text!r}")
        name = self.text(index, names.id).removeprefix("test/").removesuffix(".json") or str(index)
        prefix = f"{self.benchmark.prefix or self.benchmark.name}/"
        name = prefix + name.removeprefix(prefix)
        if has_tests(self.table):
            return self.task(index, name, text)
        answer = FORMS[self.benchmark.form](self.text(index, names.answer))
        if not answer and self.options.answers == "required":
            raise self.error(index, f"has no answer in column {names.answer!r}")
        choices, answer = self.choices(index, name, answer)
        answer += _unit(self.text(index, names.unit)) if "," not in answer else ""
        lettered = zip(LETTERS, choices, strict=False)
        listed = "\n".join(f"({letter}) {choice}" for letter, choice in lettered)
        parts = (self.text(index, names.context), text, listed)
        return Problem(
            id=name,
            text="\n\n".join(part for part in parts if part),
            answer=answer or None,
            kind=self.options.kind or self.benchmark.kind or ("choice" if choices else "math"),
            level=_level(self.text(index, names.level)),
            subject=self.text(index, names.subject),
            choices=choices,
            source=self.table.places[index],
            grading=self.grading(index),
        )

    def task(self, index: int, name: str, text: str) -> Problem:
        """Return the code task in a row. The tests take the place of a reference answer."""
        try:
            tests, starter = tests_of_row(self.table.rows[index])
        except (ValueError, TypeError, AttributeError) as error:
            raise self.error(index, str(error)) from None
        asked = _FUNCTION.format(starter=starter.rstrip()) if tests.function else _STDIN
        return Problem(
            id=name,
            text=f"{text}\n\n{asked}",
            answer=tests.text(),
            kind="code",
            subject=self.text(index, "difficulty"),
            source=self.table.places[index],
        )

    def text(self, index: int, column: str) -> str:
        """Return the text of a row in this column; "" if `column` is empty."""
        return cell(self.table.rows[index].get(column)).strip() if column else ""

    def grading(self, index: int) -> Grading | None:
        """Return the grading policy for a row, including the tolerance that the row gives; None for
        the default policy.
        """
        stated = self.text(index, self.columns.tolerance)
        absolute = self.options.grading.get("absolute")
        if stated:
            # If the answer is a tuple, the column may have a tolerance for each entry. The largest
            # of them is used for all entries.
            try:
                absolute = max(map(float, stated.strip("()").split(",")))
            except ValueError:
                problem = f"has the tolerance {stated!r}, which is not a number"
                raise self.error(index, problem) from None
        policy = changed(self.benchmark.grading, {**self.options.grading, "absolute": absolute})
        return policy if policy != STRICT else None

    def choices(self, index: int, name: str, answer: str) -> tuple[tuple[str, ...], str]:
        """Return a problem's choices in the order that the model sees, and the letter of the
        correct choice.

        For a problem without choices, return the answer unchanged.
        """
        listed = self.columns.choices and self.table.rows[index].get(self.columns.choices)
        if self.columns.distractors:
            texts = (answer, *(self.text(index, column) for column in self.columns.distractors))
            choices = [choice for choice in texts if choice]
            correct = 0
        elif listed:
            choices = _choice_texts(listed)
            correct = self.position(index, answer, choices)
        else:
            return (), answer
        if not 2 <= len(choices) <= len(LETTERS):
            raise self.error(index, f"has {len(choices)} choices")
        order: Sequence[int] = range(len(choices))
        # In such datasets, the correct choice comes first in every row. So put the choices in
        # random order.
        if self.columns.distractors:
            order = letter_order(self.options.seed, name, len(choices))
        letter = LETTERS[order.index(correct)] if answer else ""
        return tuple(choices[at] for at in order), letter

    def position(self, index: int, answer: str, choices: Sequence[str]) -> int:
        """Return the index of the correct choice, which the row gives as an index, a letter or the
        choice's text.
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
            index,
            f"has the answer {answer!r}, which is not the letter, the position or the text of "
            "one of its choices",
        )

    def error(self, index: int, problem: str) -> DatasetError:
        """Return an error about one row. Its advice lists the columns in which this row has a
        value.
        """
        filled = [name for name, value in self.table.rows[index].items() if cell(value).strip()]
        advice = (
            f"That row has values in {', '.join(filled) or 'no column'}; map columns with "
            "--column text=NAME --column answer=NAME"
        )
        return DatasetError(self.table.source, f"{self.table.place(index)} {problem}", advice)


_STDIN = (
    "Write a Python program that reads standard input and prints to standard output. "
    "Put the whole program in one ```python block."
)
_FUNCTION = (
    "Complete this Python code, and put the whole program in one ```python block:\n\n"
    "```python\n{starter}\n```"
)


def has_tests(table: RowTable) -> bool:
    """Return True if the rows are code tasks, which have the columns of LiveCodeBench."""
    return "public_test_cases" in table.columns or "private_test_cases" in table.columns


def problems_of(reader: Reader) -> tuple[list[Problem], list[str]]:
    """Convert every row to a problem; also return remarks on the problems for reports.

    Raises DatasetError for a missing column, a row without text or reference, and a repeated id.
    """
    table = reader.table
    answers = "optional" if has_tests(table) else reader.options.answers
    columns = find_columns(table, reader.columns, answers)
    if has_tests(table):
        # In datasets of code tasks, the column "level" contains words, but a level must be a
        # number.
        columns = replace(columns, level="")
    reader = replace(reader, columns=columns)
    problems = [reader.problem(index) for index in range(len(table.rows))]
    uses = Counter(problem.id for problem in problems)
    repeated = [name for name, count in uses.items() if count > 1]
    if repeated:
        places = [
            table.place(index)
            for index, problem in enumerate(problems)
            if problem.id == repeated[0]
        ]
        detail = f"{' and '.join(places[:2])} have the same id {repeated[0]!r} ({len(repeated)} ids are not unique)"
        raise DatasetError(
            table.source, detail, "Map another column to 'id', or delete rows with repeated ids"
        )
    return problems, _notes(reader, problems)


def find_columns(table: RowTable, asked: Columns, answers: Answers) -> Columns:
    """Return the columns to read: those that the user named, and for each other field the first
    usual name that the table has.

    Raises DatasetError if a column is missing.
    """
    named = {field: cast(str, getattr(asked, field)) for field in ALIASES}
    for name in filter(None, (*named.values(), *asked.distractors)):
        if name not in table.columns:
            raise _missing(table, f"there is no column {name!r}", name)
    lower = {name.lower().replace(" ", "_"): name for name in reversed(table.columns)}
    for role, aliases in ALIASES.items():
        named[role] = named[role] or next(
            (lower[alias] for alias in aliases.split() if alias in lower), ""
        )
    if not named["text"]:
        raise _missing(
            table,
            "no column contains the text of the problem",
            "problem",
            "Name the column with --column text=NAME",
        )
    if not named["answer"] and answers == "required":
        advice = (
            "Name the column with --column answer=NAME, or accept problems without an answer with "
            "--answers optional"
        )
        raise _missing(table, "no column contains the reference answer", "answer", advice)
    return Columns(**named, distractors=asked.distractors)


def cell(value: object) -> str:
    """Return the value of a table cell as a string: 5.0 becomes "5", and list items are joined by
    commas.
    """
    # In Parquet files that pandas wrote, a missing value may be NaN. NaN is not equal to itself.
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list | tuple):
        return ", ".join(cell(part).strip() for part in cast(Sequence[object], value))
    return str(value)


def letter_order(seed: int, name: str, count: int) -> tuple[int, ...]:
    """Return a pseudo-random order of a question's choices. It is the same on every machine."""

    def key(at: int) -> bytes:
        return blake2b(f"{seed}\x1f{name}\x1f{at}".encode(), digest_size=8).digest()

    return tuple(sorted(range(count), key=key))


def _missing(table: RowTable, problem: str, wanted: str, advice: str = "") -> DatasetError:
    columns = {name.lower(): name for name in reversed(table.columns)}
    near = get_close_matches(wanted.lower(), columns, n=1, cutoff=0.6)
    hint = f"; did you mean {columns[near[0]]!r}?" if near else ""
    return DatasetError(
        table.source,
        problem,
        f"Columns found: {', '.join(table.columns)}{hint}" + (f". {advice}" if advice else ""),
    )


def _level(text: str) -> int | None:
    number = re.fullmatch(r"(?:level\s*)?(\d{1,3})", text, re.IGNORECASE)
    return int(number[1]) if number else None


def _choice_texts(value: object) -> list[str]:
    # A cell with choices may also be {"text": [...], "label": [...]} or {"A": ..., "B": ...}.
    if isinstance(value, Mapping):
        choices = cast(Mapping[str, object], value)
        if isinstance(choices.get("text"), list):
            value = choices["text"]
        else:
            value = [choices[key] for key in sorted(choices)]
    if not isinstance(value, list | tuple):
        return [part for part in re.split(r"\s*\n\s*", cell(value).strip()) if part]
    return [cell(part).strip() for part in cast(Sequence[object], value)]


def _plain(answer: str) -> str:
    """Return the answer without the dollar signs around it or around each part of a list."""
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
    r"""Return a unit as LaTeX that can be appended to a number."""
    if not text:
        return ""
    if text == "%":
        return "\\%"
    name, power, size = text.strip("$ ").partition("^")
    label = f"\\text{{ {name.lstrip(chr(92))}}}" if name else ""
    return label + power + size


def _notes(reader: Reader, problems: Sequence[Problem]) -> list[str]:
    notes = list[str]()
    texts = Counter(" ".join(problem.text.split()).casefold() for problem in problems)
    repeated = sum(count - 1 for count in texts.values())
    if repeated:
        notes.append(f"{counted(repeated, 'problem')} with the same text as another problem")
    unanswered = sum(problem.answer is None for problem in problems)
    if unanswered:
        of = f"{unanswered} of {counted(len(problems), 'problem')}"
        notes.append(
            "problems whose answers cannot be graded, because the reference answer is "
            f"missing: {of}"
        )
    level = reader.columns.level
    stated = [reader.text(index, level) for index in range(len(problems))]
    unread = sum(bool(text) and _level(text) is None for text in stated)
    if unread:
        notes.append(f"{counted(unread, 'row')} without a level number in column {level!r}")
    if reader.columns.distractors:
        notes.append(f"choices shuffled per question with seed {reader.options.seed}")
    return notes
