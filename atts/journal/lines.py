"""One line of the journal: numbered, dated, checksummed JSON.

    {"n":17,"at":3.25,"wall":1790000003.25,"kind":"decided","decision":{...},"crc":"5f0c9a1b"}

A line is whole when it ends in a newline. A long text stands on a line of its own (`kind` "text") before its first use.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from atts.errors import JournalCorrupt, JournalVersion
from atts.files import storage
from atts.journal.codec import Encoder, Texts, encoder
from atts.journal.decoding import Read, decoder, fields_decoder
from atts.journal.events import KINDS, SCHEMA, Entry, Event, SessionOpened
from atts.journal.migration import ORIGINS, decision_with_origin, with_origin

_ESCAPED = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_WORDS: Mapping[type[Event], str] = MappingProxyType({kind: word for word, kind in KINDS.items()})

Plain = Mapping[type[Event], Callable[[float, dict[str, Any]], None]]
"""What takes the lines of some kinds as they stand: the run's clock, and their fields but those left at defaults."""


@dataclass(frozen=True, slots=True)
class JournalEnd:
    """Where reading ended: the next line's number, the session, and how many bytes are whole lines."""

    number: int = 0
    session: int = 0
    length: int = 0


class LineWriter:
    """Turns events into lines; knows the number of the next one."""

    def __init__(self, number: int, texts: Texts) -> None:
        self.number = number
        self._texts = texts
        self._encoders: dict[type[Event], tuple[str, Encoder]] = {
            kind: (word, encoder(kind)) for kind, word in _WORDS.items()
        }

    def lines(self, event: Event, at: float, wall: float) -> bytes:
        """The event's line, long texts it brings along before it."""
        word, encode = self._encoders[type(event)]
        body = encode(event, self._texts)
        before = b""
        if self._texts.fresh:
            texts = [{"kind": "text", "id": name, "text": text} for name, text in self._texts.fresh]
            before = b"".join(map(self._line, texts))
            self._texts.fresh.clear()
        return before + self._line({"at": round(at, 6), "wall": round(wall, 3), "kind": word, **body})

    def _line(self, fields: dict[str, Any]) -> bytes:
        body = _ESCAPED({"n": self.number, **fields}).encode()[:-1]
        self.number += 1
        return b'%b,"crc":"%08x"}\n' % (body, zlib.crc32(body))


def read_entries(
    path: Path,
    on_end: Callable[[JournalEnd], None] | None = None,
    kinds: Collection[type[Event]] | None = None,
    plain: Plain = MappingProxyType({}),
) -> Iterator[Entry]:
    """Every event of a journal in order, without holding more than a line and the latest texts.

    The last line may be torn (its process was killed while writing): it does not count. `on_end` learns where the
    whole lines end. With `kinds` only such events are given out: other lines are checked, not decoded. A set of them
    may change while reading. Lines of a kind in `plain` are checked and handed to its function, in their turn, instead
    of being given out: making no value of each is worth it where there is one for every engine call.

    :raises JournalCorrupt: a line before the last is damaged, missing or out of order.
    :raises JournalVersion: a newer version wrote it.
    :raises StorageError: the file cannot be read.
    """
    with storage(path), path.open("rb") as file:
        reader = _Reader(path, kinds, plain)
        yield from reader.entries(file)
    if on_end is not None:
        on_end(reader.tail)


_END = len(b',"crc":"00000000"}\n')
_PASSED = MappingProxyType({word.encode(): kind for word, kind in KINDS.items() if kind is not SessionOpened})
_HEAD = re.compile(rb'\{"n":(\d+),"at":[^,]+,"wall":[^,]+,"kind":"([a-z-]+)"')
_REFERENCE = re.compile(rb'[:,[]"@([\w-]{20})"')  # within a text every quote has a backslash before it
_json = json.JSONDecoder().raw_decode
_number = decoder(float)


class _Reader:
    def __init__(self, path: Path, kinds: Collection[type[Event]] | None, plain: Plain) -> None:
        self._path = path
        self._texts = Texts()
        self._decoders: dict[str, Read] = {word: decoder(kind) for word, kind in KINDS.items() if kind not in plain}
        self._plain = {_WORDS[kind]: (fields_decoder(kind), take) for kind, take in plain.items()}
        self._kinds = kinds
        self._line = self._session = self._length = 0
        self._schema = SCHEMA  # of the present session

    @property
    def tail(self) -> JournalEnd:
        """Where reading is."""
        return JournalEnd(self._line, self._session, self._length)

    def entries(self, file: BinaryIO) -> Iterator[Entry]:
        """Read to the end, or to a torn last line."""
        for line in file:
            try:
                check(line)
                entry = None if self._kinds is not None and self._is_passed_over(line) else self._entry(line)
            except ValueError as error:
                if file.read(1):
                    raise self._corrupt(str(error)) from error
                return
            self._line += 1
            self._length += len(line)
            if entry is not None:
                yield entry

    def _is_passed_over(self, line: bytes) -> bool:
        """Whether nobody asked for this event; texts it refers to count as used, as they did when it was written."""
        found = _HEAD.match(line) if self._line else None
        kind = None if found is None else _PASSED.get(found[2])
        if found is None or kind is None or self._kinds is None or kind in self._kinds:
            return False
        self._count(int(found[1]))
        if b'"@' in line:
            for name in _REFERENCE.findall(line):
                self._texts.find(name.decode())
        return True

    def _entry(self, line: bytes) -> Entry | None:
        fields = parse(line)
        word, number = fields.pop("kind", None), fields.pop("n", None)
        if word == "session-opened" and isinstance(fields.get("schema"), int) and fields["schema"] > SCHEMA:
            raise newer(self._path, fields["schema"])
        self._count(number)
        if word == "text":
            self._texts.learn(str(fields.get("id")), str(fields.get("text")))
            return None
        at, wall = fields.pop("at", None), fields.pop("wall", None)
        if type(at) is not float or type(wall) is not float:
            at, wall = _number(at, self._texts), _number(wall, self._texts)
        if word in self._plain:
            read, take = self._plain[word]
            found = read(fields, self._texts)
            if self._schema < ORIGINS and "decision" in found:
                found["decision"] = decision_with_origin(found["decision"])
            take(at, found)
            return None
        if word not in self._decoders:
            raise ValueError(f"it is of an unknown kind {word!r}")
        event = self._decoders[word](fields, self._texts)
        if word == "session-opened":
            self._session, self._schema = event.session, event.schema
        elif self._line == 0:
            raise ValueError("the first line opens no session")
        if self._schema < ORIGINS:
            event = with_origin(event)
        return Entry(self._line, self._session, at, wall, event)

    def _count(self, number: object) -> None:
        if number != self._line:
            raise ValueError(f"it is numbered {number}, expected {self._line}: lines are missing or doubled")

    def _corrupt(self, problem: str) -> JournalCorrupt:
        return JournalCorrupt(
            self._path,
            f"line {self._line + 1} is damaged: {problem}",
            "Nothing was overwritten. Restore the file from a copy, or cut it before that line to repeat what followed",
        )


def newer(path: Path, schema: object) -> JournalVersion:
    """The refusal to touch what a newer version wrote."""
    return JournalVersion(
        path, f"it was written under schema {schema}, this version knows {SCHEMA}", "Use the newer atts to go on"
    )


def check(line: bytes) -> None:
    """Make sure that the line is whole and undamaged.

    :raises ValueError: it is torn or damaged.
    """
    if line[-_END:] == b',"crc":"%08x"}\n' % zlib.crc32(line[:-_END]):
        return
    if not line.endswith(b"\n"):
        raise ValueError("it does not end")
    if line[-_END:-11] != b',"crc":"':
        raise ValueError("it has no checksum")
    raise ValueError("its checksum does not match")


def parse(line: bytes) -> dict[str, Any]:
    """The fields of a line that was checked, its checksum left out.

    :raises ValueError: it is no JSON object.
    """
    text = line[:-_END].decode() + "}"
    fields, end = _json(text)
    if end != len(text) or type(fields) is not dict:
        raise ValueError("it is not one JSON object")
    return fields
