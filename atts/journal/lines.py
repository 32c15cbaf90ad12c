"""The format of a journal's lines: numbered, dated, checksummed JSON.

    {"n":17,"at":3.25,"wall":1790000003.25,"kind":"decided","decision":{...},"crc":"5f0c9a1b"}

A line is whole when it ends in a newline. Its checksum goes on from that of the line before, so
that no line can be left out, put in or exchanged, not even with its number put right. A long text
stands on a line of its own (`kind` "text") before its first use.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from atts.core import CallSpan
from atts.errors import JournalCorrupt, JournalVersion
from atts.files import open_ordinary, storage
from atts.journal.codec import TAG_FIELD, dataclass_form, form
from atts.journal.events import (
    KINDS,
    SCHEMA,
    Decided,
    Entry,
    Event,
    Observed,
    Sampled,
    Scored,
    SessionOpened,
)
from atts.journal.migration import TURN_FACTS, completed
from atts.journal.texts import Texts

CHAINED = 3  # the first schema whose checksums go on from each other
_escaped = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """What every line has; the checksum is looked at before the rest is."""

    n: int
    crc: str


class _TextLine(_Line, tag_field=TAG_FIELD, tag="text"):
    """A long text, before the first line that refers to it."""

    id: str
    text: str


class _EventLine(_Line):
    """What every event's line has besides the event."""

    at: float
    wall: float


class _Opening(msgspec.Struct):
    """What a session's opening says in every schema."""

    kind: str
    schema: int


_FORMS = {kind: (word, dataclass_form(kind, _EventLine, word)) for word, kind in KINDS.items()}
_READS = {form.stored: form.read for _, form in _FORMS.values()}
_WRITES = {kind: (word, form.write) for kind, (word, form) in _FORMS.items()}
_write_span = form(CallSpan).write
_LINES: Any = reduce(or_, _READS, _TextLine)
_decode = msgspec.json.Decoder(_LINES).decode


class LineWriter:
    """Turns events into lines; knows the number of the next one, and the checksum that it goes on
    from.
    """

    def __init__(self, number: int = 0, crc: int = 0) -> None:
        self.number = number
        self._crc = crc
        self._texts = Texts.of_writer()

    def lines(
        self, event: Event, at: float, wall: float, second: CallSpan | Observed | None = None
    ) -> bytes:
        """The event's line, with a second one that it may hold; long texts that it brings along
        stand before it.
        """
        word, write = _WRITES[type(event)]
        fields = write(event, self._texts)
        lines = b""
        if isinstance(second, CallSpan):
            fields["span"] = _write_span(second, self._texts)
        elif second is not None:
            fields["escalated"] = second.escalated
        rows: list[dict[str, Any]] = [
            {"kind": "text", "id": name, "text": text} for name, text in self._texts.fresh
        ]
        self._texts.fresh.clear()
        for row in (*rows, {"at": round(at, 6), "wall": round(wall, 3), "kind": word, **fields}):
            body = _escaped({"n": self.number, **row}).encode()[:-1]
            self._crc = zlib.crc32(body, self._crc)
            lines += b'%b,"crc":"%08x"}\n' % (body, self._crc)
            self.number += 1
        return lines


_END = len(b',"crc":"00000000"}\n')
_PASSED = MappingProxyType(
    {word.encode(): kind for word, kind in KINDS.items() if kind is not SessionOpened}
)
_HEAD = re.compile(rb'\{"n":(\d+),"at":[^,]+,"wall":[^,]+,"kind":"([a-z-]+)"')
# within a text every quote has a backslash before it
_REFERENCE = re.compile(rb'[:,[]"@([\w-]{20})"')


_SECOND: Mapping[type[Event], type[Event]] = {
    Sampled: CallSpan,
    Scored: CallSpan,
    Decided: Observed,
}
"""What lines of some kinds may hold besides."""


class LineReader:
    """Reads a journal in order, without holding more than a line and the latest texts; knows where
    it is.
    """

    def __init__(self, path: Path, kinds: Collection[type[Event]] | None = None) -> None:
        self.path = path
        self.number = 0  # of the next line
        self.session = 0
        self.length = 0  # of the whole lines so far, in bytes
        self.crc = 0  # of the last whole line
        self._kinds = kinds
        self._texts = Texts()
        self._schema = 1  # of the present session

    def entries(self) -> Iterator[Entry]:
        """Every event to the end; a last line that is torn (its process was killed while writing)
        does not count.

        With `kinds` only such events are given out, and the openings of sessions: other lines are
        checked, not decoded. A set of them may change while reading.

        :raises JournalCorrupt: a line before the last is damaged, missing or out of order.
        :raises JournalVersion: a newer version wrote it.
        :raises StorageError: the file cannot be read.
        """
        with storage(self.path), open_ordinary(self.path) as file:
            for line in file:
                try:
                    crc = check(line, self.crc, "chained" if self._schema >= CHAINED else "either")
                    entry = (
                        None
                        if self._kinds is not None and self._is_passed_over(line)
                        else self._entry(line)
                    )
                except ValueError as error:
                    if file.read(1):
                        raise self._corrupt(str(error)) from error
                    return
                self.number += 1
                self.length += len(line)
                self.crc = crc
                if entry is not None:
                    yield from self._parts(entry)

    def _parts(self, entry: Entry) -> Iterator[Entry]:
        """The one or two events of a line, those that are wanted."""
        event = entry.event
        if isinstance(event, Sampled | Scored) and event.span is not None:
            parts: tuple[Event, Event] = (replace(event, span=None), event.span)
        elif isinstance(event, Decided) and event.escalated is not None:
            parts = (replace(event, escalated=None), Observed(event.decision, event.escalated))
        else:
            yield entry
            return
        kinds = self._kinds
        yield from (
            replace(entry, event=part) for part in parts if kinds is None or type(part) in kinds
        )

    def _is_passed_over(self, line: bytes) -> bool:
        """Whether the event is not wanted; texts it refers to count as used, as they did when it
        was written.
        """
        found = _HEAD.match(line) if self.number else None
        kind = None if found is None else _PASSED.get(found[2])
        if found is None or kind is None or self._kinds is None:
            return False
        if kind in self._kinds or _SECOND.get(kind) in self._kinds:
            return False
        self._count(int(found[1]))
        if b'"@' in line:
            for name in _REFERENCE.findall(line):
                self._texts.find(name.decode())
        return True

    def _entry(self, line: bytes) -> Entry | None:
        found = self._parse(line)
        self._count(found.n)
        if isinstance(found, _TextLine):
            self._texts.learn(found.id, found.text)
            return None
        event = _READS[type(found)](found, self._texts)
        if isinstance(event, SessionOpened):
            if event.schema > SCHEMA:
                raise newer(self.path, event.schema)
            self.session = event.session
            self._schema = event.schema
        elif self.number == 0:
            raise ValueError("the first line opens no session")
        if self._schema < TURN_FACTS:
            event = completed(event, self._schema)
        return Entry(self.number, self.session, found.at, found.wall, event)

    def _parse(self, line: bytes) -> Any:
        try:
            if b"\\ud" in line:  # half a surrogate pair, perhaps, which is text in Python alone
                return msgspec.convert(json.loads(line), _LINES)
            return _decode(line)
        except msgspec.ValidationError:
            with suppress(msgspec.ValidationError):
                opening = msgspec.json.decode(line, type=_Opening)
                if opening.kind == "session-opened" and opening.schema > SCHEMA:
                    raise newer(self.path, opening.schema) from None
            raise

    def _count(self, number: object) -> None:
        if number != self.number:
            raise ValueError(
                f"it is numbered {number}, expected {self.number}: lines are missing or doubled"
            )

    def _corrupt(self, problem: str) -> JournalCorrupt:
        return JournalCorrupt(
            self.path,
            f"line {self.number + 1} is damaged: {problem}",
            "Nothing was overwritten. Restore the file from a copy, or let "
            f"`atts journal salvage {self.path.parent} --out NEW` save what is before that line, "
            f"and go on there",
        )


def read_entries(path: Path, kinds: Collection[type[Event]] | None = None) -> Iterator[Entry]:
    """Every event of a journal, or those of some kinds; see `LineReader.entries`."""
    return LineReader(path, kinds).entries()


def newer(path: Path, schema: object) -> JournalVersion:
    """The refusal to touch what a newer version wrote."""
    return JournalVersion(
        path,
        f"it was written under schema {schema}, this version knows {SCHEMA}",
        "Use the newer atts to go on",
    )


def check(line: bytes, before: int, kind: Literal["chained", "either"]) -> int:
    """Make sure that the line is whole, undamaged and after the right one; its checksum.

    Lines of older schemas ("either") have a checksum of their own alone.

    :raises ValueError: it is torn or damaged.
    """
    body = line[:-_END]
    end = line[-_END:]
    for start in (before,) if kind == "chained" else (before, 0):
        crc = zlib.crc32(body, start)
        if end == b',"crc":"%08x"}\n' % crc:
            return crc
    if not line.endswith(b"\n"):
        raise ValueError("it does not end")
    if line[-_END:-11] != b',"crc":"':
        raise ValueError("it has no checksum")
    raise ValueError("its checksum does not match")
