"""Files of records, which can be read in order or by position, without loading a whole file into
memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from atts.errors import DatasetError
from atts.files import open_ordinary

PICKLES = (".pkl", ".pickle", ".p", ".pt", ".pth", ".joblib")
PACKED = (".gz", ".zst", ".xz", ".bz2")
_BLOCK = 1 << 20
_ZSTANDARD = 93  # number that stands for Zstandard compression in zip archives


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a record in its file. `RecordFile.read` needs it to read the record again."""

    start: int
    size: int
    # position of the record among the file's records, counted from 1, for error messages
    number: int


class RecordFile(Protocol):
    """A file of records that can be read in order, or one at a time by position."""

    word: str  # what error messages call a record of this file: "line", "item" or "entry"

    def places(self) -> Iterator[tuple[Place, bytes]]:
        """Yield the position and the bytes of each record, in file order."""
        ...

    def read(self, start: int, size: int) -> bytes:
        """Return the bytes of the record at a position that `places` yielded."""
        ...


@contextmanager
def open_records(path: Path, list_field: str = "") -> Generator[RecordFile]:
    """Open a file of records. The suffix of its name determines the format.

    :raises DatasetError: if the file is missing, compressed, a pickle, or of an unknown kind.
    """
    suffix = path.suffix.lower()
    if suffix in PICKLES:
        raise DatasetError(
            str(path),
            "the file is a pickle, and reading a pickle runs the code inside it",
            "Convert the file on a machine where running this code does no harm: python -c "
            "'import json, pickle, sys; "
            'json.dump(pickle.load(open(sys.argv[1], "rb")), sys.stdout, default=str)\' FILE > FILE.json',
        )
    if suffix in PACKED:
        raise DatasetError(
            str(path),
            "the file is compressed, but atts can import only uncompressed files",
            "Decompress the file first",
        )
    if suffix == ".parquet":
        raise DatasetError(
            str(path),
            "the file is in Parquet format, but atts can import only JSON",
            "Convert the file: python -c 'import pandas, sys; "
            "pandas.read_parquet(sys.argv[1]).to_json"
            '(sys.argv[2], orient="records", lines=True)\' FILE FILE.jsonl',
        )
    try:
        if suffix == ".eval":
            with zipfile.ZipFile(path) as archive:
                yield _EvalArchive(path, archive)
            return
        with open_ordinary(path) as file:
            if suffix in (".jsonl", ".ndjson"):
                yield _Lines(file)
            elif suffix == ".json":
                yield _Items(path, file, list_field)
            else:
                raise DatasetError(
                    str(path),
                    "atts cannot read this type of file",
                    "Supported types: .jsonl, .ndjson, .json, .eval",
                )
    except FileNotFoundError:
        raise DatasetError(str(path), "the file does not exist", "Check the path") from None
    except OSError as error:
        raise DatasetError(
            str(path),
            f"the file cannot be read: {error.strerror or error}",
            "Check the permissions of the file",
        ) from error
    except zipfile.BadZipFile as error:
        raise DatasetError(
            str(path),
            f"the file is not a complete .eval archive ({error})",
            "Check whether the evaluation was interrupted",
        ) from None


def parse(data: bytes) -> dict[str, Any]:
    """Parse the bytes of a record as a JSON object.

    :raises ValueError: if the record is not a JSON object.
    """
    try:
        value: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        value = _as_python_writes(data, error)
    if not isinstance(value, dict):
        raise ValueError(f"the record is a {type(value).__name__}, not an object")
    return value


def _as_python_writes(data: bytes, error: Exception) -> Any:
    """Parse JSON with Python's own parser, which accepts NaN and Infinity.

    The JSON standard forbids these values, but tools written in Python produce them.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"the record is not JSON ({error})") from None


def digest_of(path: Path) -> str:
    """Return a hash of a file's content. It shows whether the file changed before an interrupted
    import was resumed.
    """
    hasher = blake2b(digest_size=16)
    with open_ordinary(path) as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


class _Lines:
    """A JSON Lines file, with one record per line."""

    word = "line"

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def places(self) -> Iterator[tuple[Place, bytes]]:
        """Yield the position and the bytes of each line that is not blank."""
        self._file.seek(0)
        start = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                yield Place(start, len(line), number), line
            start += len(line)

    def read(self, start: int, size: int) -> bytes:
        """Return the line that starts at byte `start` and has `size` bytes."""
        self._file.seek(start)
        return self._file.read(size)


# This pattern matches a whole JSON string, a string that is cut off at the end of the buffer, or a
# bracket.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+(?:(")|\\?\Z)|[{}\[\]]', re.DOTALL)


class _Items:
    """A JSON file that contains a list of records, an object with such a list, or a single record.

    The file may also contain several values in sequence, as some tools write. In this case, each
    value is a record.
    """

    word = "item"

    def __init__(self, path: Path, file: IO[bytes], list_field: str) -> None:
        self._path = path
        self._file = file
        self._field = f'"{list_field}"'.encode() if list_field else b""

    def read(self, start: int, size: int) -> bytes:
        """Return the record that starts at byte `start` and has `size` bytes."""
        self._file.seek(start)
        return self._file.read(size)

    def places(self) -> Iterator[tuple[Place, bytes]]:
        """Yield the position and the bytes of each record.

        To find the records, only brackets and strings are scanned, so that the whole file need not
        be parsed at once.
        """
        self._file.seek(0)
        buffer = b""
        base = 0  # position of the buffer's first byte in the file
        scanned = 0  # how many bytes of the buffer have been scanned
        start = -1  # position in the file where the current item begins; -1 between items
        depth = 0
        # number of open brackets around each item, which is 0 for items without a list; -1 outside
        # the list of items
        level = -1
        # the latest string directly inside the outermost object: possibly the key of the list of
        # items
        key = b""
        number = 0
        while True:
            block = self._file.read(max(_BLOCK, len(buffer) - scanned))
            buffer += block
            for token in _TOKEN.finditer(buffer, scanned):
                word = token[0]
                if word[0] == _QUOTE:
                    if token[1] is None and block:
                        break  # the string is cut off, so read the next block first
                    if depth == 1:
                        key = word
                elif word in b"{[":
                    if depth == 0 and not (self._field and word == b"{"):
                        level = 1 if word == b"[" else 0
                    elif depth == 1 and word == b"[" and self._field and key == self._field:
                        level = 2
                    if depth == level and word == b"{":
                        start = base + token.start()
                    depth += 1
                else:
                    depth -= 1
                    if depth == level and start >= 0:
                        number += 1
                        size = base + token.end() - start
                        yield Place(start, size, number), buffer[start - base :][:size]
                        start = -1
                    elif depth < level:
                        level = -1
                scanned = token.end()
            if not block:
                break
            used = scanned if start < 0 else start - base
            buffer = buffer[used:]
            base += used
            scanned -= used
        if depth:
            raise DatasetError(
                str(self._path),
                f"the file ends in the middle of item {number + 1}, so it is incomplete or not "
                "JSON",
                "Download or copy the file again",
            )


_QUOTE = ord('"')


class _EvalArchive:
    """An .eval log of inspect_ai: a zip archive with one entry per sample."""

    word = "entry"

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path = path
        self._archive = archive
        # If the archive has several entries with the same name, only the last one is valid.
        named = {entry.filename: entry for entry in archive.infolist()}
        self._entries = [
            entry for name, entry in named.items() if re.fullmatch(r"samples/[^/]*\.json", name)
        ]

    def places(self) -> Iterator[tuple[Place, bytes]]:
        """Yield the position and the bytes of each sample."""
        for index in range(len(self._entries)):
            yield Place(index, 0, index + 1), self.read(index, 0)

    def read(self, start: int, size: int) -> bytes:
        """Return the sample with index `start`. The argument `size` is ignored, because the archive
        knows the size of each entry.
        """
        entry = self._entries[start]
        try:
            return self._archive.read(entry)
        except NotImplementedError:
            if entry.compress_type != _ZSTANDARD:
                raise self._unreadable(
                    entry, "uses a compression method that this Python cannot read"
                ) from None
        packed = self._packed(entry)
        try:
            data = _unpacked(packed)
        except ImportError:
            raise self._unreadable(
                entry,
                "is compressed with Zstandard, which only Python 3.14 or newer can read",
                "Install pyarrow (pip install pyarrow), or convert the log",
            ) from None
        except (OSError, ValueError) as error:
            raise self._unreadable(
                entry, f"is compressed with Zstandard but is damaged ({error})"
            ) from None
        if len(data) != entry.file_size or zlib.crc32(data) != entry.CRC:
            raise self._unreadable(
                entry, "is compressed with Zstandard, but its checksum does not match"
            )
        return data

    def _packed(self, entry: zipfile.ZipInfo) -> bytes:
        """Return the compressed bytes of one entry of the archive."""
        file = self._archive.fp
        assert file is not None, "the archive must be open"
        file.seek(entry.header_offset)
        # The entry's header ends with the lengths of the file name and of the extra field. Both
        # come between the header and the compressed data, so skip them.
        name, extra = struct.unpack("<HH", file.read(30)[26:])
        file.seek(name + extra, 1)
        return file.read(entry.compress_size)

    def _unreadable(
        self, entry: zipfile.ZipInfo, why: str, fix: str = "Convert the log"
    ) -> DatasetError:
        command = "inspect log convert --to json FILE --output-dir DIRECTORY"
        return DatasetError(str(self._path), f"{entry.filename} {why}", f"{fix}: {command}")


def _unpacked(data: bytes) -> bytes:
    """Return the decompressed content of Zstandard data, which may consist of several frames.

    :raises ImportError: no installed package can read Zstandard.
    """
    if importlib.util.find_spec("pyarrow") is not None:
        arrow = importlib.import_module("pyarrow")
        with arrow.CompressedInputStream(arrow.BufferReader(data), "zstd") as frames:
            unpacked: bytes = frames.read()
        return unpacked
    # The user has the package zstandard, because inspect_ai installs it.
    reader = importlib.import_module("zstandard").ZstdDecompressor()
    with reader.stream_reader(data, read_across_frames=True) as frames:
        unpacked = frames.read()
    return unpacked
