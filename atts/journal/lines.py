"""One line of the journal: numbered, dated, checksummed JSON.

    {"n":17,"at":3.25,"wall":1790000003.25,"kind":"decided","decision":{...},"crc":"5f0c9a1b"}

A line is whole when it ends in a newline. A long text stands on a line of its own (`kind` "text") before its first use.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from atts.errors import JournalCorrupt, JournalVersion
from atts.journal.codec import Decoder, Encoder, Texts, decoder, encoder
from atts.journal.events import KINDS, SCHEMA, Entry, Event, SessionOpened
from atts.journal.files import storage

_ESCAPED = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_WORDS: Mapping[type[Event], str] = MappingProxyType({kind: word for word, kind in KINDS.items()})


@dataclass(frozen=True, slots=True)
class Tail:
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


def read_entries(path: Path, on_end: Callable[[Tail], None] | None = None) -> Iterator[Entry]:
    """Every event of a journal in order, without holding more than a line and the latest texts.

    The last line may be torn (its process was killed while writing): it does not count. `on_end` learns where the
    whole lines end.

    :raises JournalCorrupt: a line before the last is damaged, missing or out of order.
    :raises JournalVersion: a newer version wrote it.
    :raises StorageError: the file cannot be read.
    """
    with storage(path), path.open("rb") as file:
        reader = _Reader(path)
        yield from reader.entries(file)
    if on_end is not None:
        on_end(reader.tail)


class _Reader:
    def __init__(self, path: Path) -> None:
        self.tail = Tail()
        self._path = path
        self._texts = Texts()
        self._decoders: dict[str, Decoder] = {word: decoder(kind) for word, kind in KINDS.items()}
        self._number = decoder(float)

    def entries(self, file: BinaryIO) -> Iterator[Entry]:
        """Read to the end, or to a torn last line."""
        for line in file:
            try:
                entry = self._entry(line)
            except ValueError as error:
                if file.read(1):
                    raise self._corrupt(str(error)) from error
                return
            self.tail = Tail(self.tail.number + 1, self.tail.session, self.tail.length + len(line))
            if entry is not None:
                yield entry

    def _entry(self, line: bytes) -> Entry | None:
        fields = parse(line)
        word, number = fields.pop("kind", None), fields.pop("n", None)
        if word == "session-opened" and isinstance(fields.get("schema"), int) and fields["schema"] > SCHEMA:
            raise newer(self._path, fields["schema"])
        if number != self.tail.number:
            raise ValueError(f"it is numbered {number}, expected {self.tail.number}: lines are missing or doubled")
        if word == "text":
            self._texts.learn(str(fields.get("id")), str(fields.get("text")))
            return None
        if word not in self._decoders:
            raise ValueError(f"it is of an unknown kind {word!r}")
        at, wall = (self._number(fields.pop(clock, None), self._texts) for clock in ("at", "wall"))
        event = self._decoders[word](fields, self._texts)
        if isinstance(event, SessionOpened):
            self.tail = Tail(self.tail.number, event.session, self.tail.length)
        elif self.tail.number == 0:
            raise ValueError("the first line opens no session")
        return Entry(number, self.tail.session, at, wall, event)

    def _corrupt(self, problem: str) -> JournalCorrupt:
        return JournalCorrupt(
            self._path,
            f"line {self.tail.number + 1} is damaged: {problem}",
            "Nothing was overwritten. Restore the file from a copy, or cut it before that line to repeat what followed",
        )


def newer(path: Path, schema: object) -> JournalVersion:
    """The refusal to touch what a newer version wrote."""
    return JournalVersion(
        path, f"it was written under schema {schema}, this version knows {SCHEMA}", "Use the newer atts to go on"
    )


def parse(line: bytes) -> dict[str, Any]:
    """The fields of a whole, undamaged line, its checksum verified and left out.

    :raises ValueError: it is torn or damaged.
    """
    if not line.endswith(b"\n"):
        raise ValueError("it does not end")
    body, mark, checksum = line.rpartition(b',"crc":"')
    if not mark or len(checksum) != 11:
        raise ValueError("it has no checksum")
    if checksum != b'%08x"}\n' % zlib.crc32(body):
        raise ValueError("its checksum does not match")
    fields = json.loads(body + b"}")
    assert isinstance(fields, dict)
    return fields
