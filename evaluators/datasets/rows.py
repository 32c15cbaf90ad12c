"""Row readers for JSONL, JSON, CSV and Parquet files that name the line which is wrong."""

import csv
import gzip
import importlib
import io
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import cast

from atts.errors import DatasetError
from atts.files import from_json, open_ordinary

Row = Mapping[str, object]
_MOST_BYTES = 1 << 30  # inflated: the largest benchmark has a hundredth of that
_ROW_BYTES = 256  # of a row beside its values
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True, slots=True)
class RowTable:
    """Rows of one or more files; `places` says where each stands, such as "data.jsonl: line 7"."""

    source: str
    rows: tuple[Row, ...]
    places: tuple[str, ...]
    digest: str  # sha256 of the files' bytes, in order

    def place(self, index: int) -> str:
        """Where a row stands, for a message that names the source already."""
        return self.places[index].removeprefix(f"{self.source}: ")

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column of any row, in order of first appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row))


def read_table(paths: Sequence[Path], source: str) -> RowTable:
    """The rows of these files, one after the other.

    Raises DatasetError: a file that is missing, empty, of an unknown kind, not UTF-8, or with a
    line that is no row.
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
            places.append(
                f"{source}: {'' if path.name in source else f'{path.name} '}{word} {number}"
            )
    if not rows:
        raise DatasetError(source, "it holds no rows", "Check that this is the file you meant")
    return RowTable(source, tuple(rows), tuple(places), digest.hexdigest())


def kind_of(path: Path) -> str:
    """The suffix that says how to read the file, `.gz` looked through; "" when it is not one of
    SUFFIXES.
    """
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return suffix.lower() if suffix.lower() in SUFFIXES else ""


def json_lines(lines: Iterable[str], source: str, place: str = "") -> Iterator[tuple[int, Row]]:
    """The object on each line, with the line's number, as they are asked for; blank lines are
    skipped.

    `place` stands before the number in messages, for a source of several files.

    Raises DatasetError: a line that is no JSON object.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = from_json(line)
        except ValueError as error:
            problem = f"{place}line {number} is not JSON ({error})"
            raise DatasetError(source, problem, "Each line must be one JSON object") from None
        yield number, _row(value, f"{place}line {number}", source)


def _bytes(path: Path, source: str) -> bytes:
    try:
        with open_ordinary(path) as file:
            data = (gzip.open(file) if path.suffix == ".gz" else file).read(_MOST_BYTES + 1)
    except FileNotFoundError:
        near = sorted(other.name for other in path.parent.glob("*") if kind_of(other))
        hint = f"Its folder holds {', '.join(near[:8])}" if near else "Check the path"
        raise DatasetError(source, f"there is no file {path}", hint) from None
    except (OSError, EOFError, zlib.error) as error:
        problem = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise DatasetError(source, problem, "Check the path and its permissions") from error
    if len(data) > _MOST_BYTES:
        raise _too_large(path, source)
    return data


def _too_large(path: Path, source: str) -> DatasetError:
    problem = f"{path} holds more than {_MOST_BYTES >> 20:,} MiB"
    return DatasetError(source, problem, "Split it, or filter it before")


def _parse(path: Path, data: bytes, source: str) -> Iterable[tuple[int, object]]:
    """What is in each place that should hold a row, by the number of that place."""
    match kind_of(path):
        case ".parquet":
            return enumerate(_parquet(path, data, source), 1)
        case ".jsonl" | ".ndjson":
            # not splitlines: U+2028 may stand inside a string
            lines = _text(path, data, source).split("\n")
            return json_lines(lines, source, f"{path.name} ")
        case ".json":
            return enumerate(_json_list(_text(path, data, source), path, source), 1)
        case ".csv" | ".tsv" as kind:
            return _csv(_text(path, data, source), path, "\t" if kind == ".tsv" else ",", source)
        case _:
            problem = f"{path.name} is not a kind of file that is read"
            raise DatasetError(source, problem, f"Known: {', '.join(SUFFIXES)}, each also .gz")


def _text(path: Path, data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")  # a byte order mark is common in exported CSV
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = f"{path.name} line {line} is not UTF-8 (byte {data[error.start]:#04x} at offset {error.start})"
        raise DatasetError(
            source, problem, "Convert it, for example: iconv -f latin1 -t utf-8"
        ) from None


def _json_list(text: str, path: Path, source: str) -> list[object]:
    try:
        value = from_json(text)
    except ValueError as error:
        raise DatasetError(
            source, f"{path.name} is not JSON ({error})", "Or name it .jsonl if it is one"
        ) from None
    if isinstance(value, dict):  # {"data": [...]} is a common wrapping
        lists = [part for part in cast(dict[str, object], value).values() if isinstance(part, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        raise DatasetError(
            source, f"{path.name} holds no list of rows", "Use a list of objects, or JSON Lines"
        )
    return cast(list[object], value)


def _row(value: object, place: str, source: str) -> Row:
    if not isinstance(value, dict):
        raise DatasetError(
            source, f"{place} is a {type(value).__name__}, not an object", "Name its columns: {...}"
        )
    return cast(dict[str, object], value)


def _csv(text: str, path: Path, delimiter: str, source: str) -> Iterator[tuple[int, Row]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if None in row:  # where DictReader puts what no header names
                problem = f"{path.name} line {reader.line_num} has more fields than the header's {len(row) - 1}"
                raise DatasetError(source, problem, "Quote fields that contain the delimiter")
            yield reader.line_num, dict(row)
    except csv.Error as error:
        raise DatasetError(
            source, f"{path.name} line {reader.line_num}: {error}", "Check its quoting"
        ) from None


def _parquet(path: Path, data: bytes, source: str) -> list[Row]:
    try:  # by name: pyarrow is optional and ships no types
        pyarrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    except ImportError:
        advice = "Install it: pip install 'atts[parquet]'"
        raise DatasetError(
            source, f"{path.name} needs pyarrow to be read, which is not installed", advice
        ) from None
    rows = list[Row]()
    held = 0
    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(data))
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        # a value can be as large as its chunk, and a few bytes can repeat it in every row
        rows_at_once = _MOST_BYTES // max((group.total_byte_size for group in groups), default=1)
        for batch in file.iter_batches(batch_size=max(1, min(1024, rows_at_once))):
            held += batch.nbytes + _ROW_BYTES * len(batch)
            if held > _MOST_BYTES:
                raise _too_large(path, source)
            rows += batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DatasetError(
            source, f"{path.name} is not a Parquet file ({error})", "Fetch it again"
        ) from None
    return rows
