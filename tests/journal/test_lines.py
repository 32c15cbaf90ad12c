"""A journal is read exactly up to where it is whole, and damage is never read over."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from atts.core import Completion
from atts.errors import JournalCorrupt, JournalVersion, StorageError
from atts.journal import (
    FACTS,
    SCHEMA,
    Event,
    OutcomeReached,
    Sampled,
    SessionOpened,
    TurnFinished,
    Warned,
    read_entries,
)
from atts.journal.lines import LineReader, LineWriter
from atts.journal.texts import Texts

OPENED = SessionOpened(SCHEMA, 1, "0.1.0", 42)


def write(path: Path, events: list[Event]) -> list[bytes]:
    """A journal of one session; its lines."""
    writer = LineWriter()
    data = b"".join(
        writer.lines(event, 0.5 * place, 1e9) for place, event in enumerate([OPENED, *events])
    )
    path.write_bytes(data)
    return data.splitlines(keepends=True)


def chunk_of(event: Event) -> Completion:
    """What the model wrote in this turn."""
    assert isinstance(event, TurnFinished)
    chunk = event.turn.chunks[0]
    return Completion(chunk.draft_ids, chunk.text, chunk.ended, chunk.logprobs)


def end_of(reader: LineReader) -> tuple[int, int, int]:
    """The next line's number, the session, the bytes of whole lines."""
    return reader.number, reader.session, reader.length


def read(path: Path) -> tuple[list[Event], tuple[int, int, int]]:
    """Events after the session's opening, and where reading ended."""
    reader = LineReader(path)
    events = [entry.event for entry in reader.entries()]
    return events[1:], end_of(reader)


def test_reading_gives_what_was_written(tmp_path: Path, story: list[Event]) -> None:
    """Events, order, numbers, session and clocks come back."""
    lines = write(tmp_path / "j", story)
    entries = list(read_entries(tmp_path / "j"))
    assert [entry.event for entry in entries] == [OPENED, *story]
    assert [entry.at for entry in entries] == [0.5 * place for place in range(len(entries))]
    assert {entry.session for entry in entries} == {1}
    assert read(tmp_path / "j")[1] == (len(lines), 1, sum(map(len, lines)))


def test_long_texts_are_stored_once(tmp_path: Path, story: list[Event]) -> None:
    """The two rollouts' equal chunks share their texts."""
    data = b"".join(write(tmp_path / "j", story))
    assert data.count(b"step 1 " * 20) == 1


def test_every_line_is_strict_json(tmp_path: Path, story: list[Event]) -> None:
    """Any JSON tool can read the file; each checksum goes on from the one before."""
    crc = 0
    for line in write(tmp_path / "j", story):
        crc = zlib.crc32(line[:-19], crc)
        assert json.loads(line, parse_constant=pytest.fail)["crc"] == f"{crc:08x}"


@pytest.mark.parametrize("text", ["\ud800 alone", "😀", "\ud800 long " * 20, "\\ud800", "é" * 200])
def test_any_text_comes_back(tmp_path: Path, text: str) -> None:
    """Half a surrogate pair is text too, short or long."""
    write(tmp_path / "j", [Warned("w", text)])
    assert read(tmp_path / "j")[0] == [Warned("w", text)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": 3}, r"line 2 is damaged: Expected `str`, got `int` - at `\$.text`"),
        ({"more": 1}, r"line 2 is damaged: Object contains unknown field `more`"),
        ({"code": None}, r"line 2 is damaged: Expected `str`, got `null` - at `\$.code`"),
        ({"kind": "rumour"}, r"line 2 is damaged: Invalid value 'rumour' - at `\$.kind`"),
        ({"n": 7}, r"line 2 is damaged: it is numbered 7, expected 1"),
        ({"text": "@nowhere"}, r"line 2 is damaged: it refers to a text @nowhere"),
    ],
)
def test_other_shapes_are_damage(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    """A whole line that does not say what an event says: the error names line and field."""
    opened, line = write(tmp_path / "j", [Warned("w", "text")])
    told = {name: part for name, part in json.loads(line).items() if name != "crc"}
    body = json.dumps({**told, **changes}).encode()[:-1]
    harmed = body + b',"crc":"%08x"}\n' % zlib.crc32(body, zlib.crc32(opened[:-19]))
    (tmp_path / "j").write_bytes(opened + harmed + b"more\n")
    with pytest.raises(JournalCorrupt, match=words):
        list(read_entries(tmp_path / "j"))


def test_only_the_wanted_kinds_are_given_out(tmp_path: Path, story: list[Event]) -> None:
    """In their places, with their texts, even where what is not wanted brought those; the tail is
    the same.
    """
    lines = write(tmp_path / "j", [Sampled("p0", "k", chunk_of(story[2]), "draft"), *story])
    everything = list(read_entries(tmp_path / "j"))
    for kinds in ((TurnFinished,), (OutcomeReached, SessionOpened), (Sampled,), FACTS):
        reader = LineReader(tmp_path / "j", kinds)
        found = list(reader.entries())
        wanted = (*kinds, SessionOpened)  # sessions are always told of
        assert found == [entry for entry in everything if isinstance(entry.event, wanted)]
        assert end_of(reader) == (len(lines), 1, sum(map(len, lines)))


def test_what_is_not_wanted_keeps_texts_alive(tmp_path: Path) -> None:
    """A text counts as used where it was used, on a line not decoded too: a later reference does
    not dangle.
    """
    # four of them fill the memory
    texts = [f"{0 if n % 2 == 0 else n} " * 2_000_000 for n in range(10)]
    written = [
        Sampled("p0", str(n), Completion((1,), text, "end", (0.0,)), "draft")
        for n, text in enumerate(texts)
    ]
    write(tmp_path / "j", [*written, Warned("w", texts[0])])
    (_, warned) = read_entries(tmp_path / "j", kinds=(Warned,))
    assert warned.event == Warned("w", texts[0])


def test_kinds_may_change_while_reading(tmp_path: Path, story: list[Event]) -> None:
    """A reader that has seen enough of a kind is spared the rest."""
    write(tmp_path / "j", story)
    kinds: set[type[Event]] = {TurnFinished}
    found = list[Event]()
    for entry in read_entries(tmp_path / "j", kinds=kinds):
        found.append(entry.event)
        kinds -= {type(entry.event)}
    assert found == [OPENED, next(event for event in story if isinstance(event, TurnFinished))]


def test_damage_is_found_on_unwanted_lines(tmp_path: Path, story: list[Event]) -> None:
    """Passing over a line is no excuse for not checking it."""
    lines = write(tmp_path / "j", story)
    for harm in (lines[4].replace(b"e", b"f", 1), b"", lines[4] * 2):
        (tmp_path / "j").write_bytes(b"".join([*lines[:4], harm, *lines[5:]]))
        with pytest.raises(JournalCorrupt, match="is damaged"):
            list(read_entries(tmp_path / "j", kinds=(OutcomeReached,)))


def test_a_torn_last_line_does_not_count(tmp_path: Path, story: list[Event]) -> None:
    """Cut anywhere inside the last line, the journal reads as if that line had not been begun."""
    *whole, last = write(tmp_path / "j", story)
    before = b"".join(whole)
    for cut in range(len(last)):
        (tmp_path / "j").write_bytes(before + last[:cut])
        events, (_, _, length) = read(tmp_path / "j")
        assert events == story[:-1]
        assert length == len(before)


def test_a_last_line_of_rubbish_does_not_count(tmp_path: Path, story: list[Event]) -> None:
    """After a power failure the tail may be zeros: torn, too."""
    before = b"".join(write(tmp_path / "j", story))
    for rubbish in (b"\x00" * 500, b"\x00" * 500 + b"\n", b"{}\n", b"\n"):
        (tmp_path / "j").write_bytes(before + rubbish)
        assert read(tmp_path / "j") == (story, (len(before.splitlines()), 1, len(before)))


@pytest.mark.parametrize(
    "harm",
    [
        lambda line: line[: len(line) // 2] + b"\n",
        lambda line: b"",
        lambda line: line + line,
        lambda line: b"\n",
    ],
    ids=["cut", "missing", "doubled", "blank"],
)
def test_damage_in_the_middle_is_refused(
    tmp_path: Path, story: list[Event], harm: Callable[[bytes], bytes]
) -> None:
    """The error names the line; what came before it is still given out."""
    lines = write(tmp_path / "j", story)
    (tmp_path / "j").write_bytes(b"".join([*lines[:3], harm(lines[3]), *lines[4:]]))
    place = 5 if harm(lines[3]) == lines[3] * 2 else 4
    with pytest.raises(JournalCorrupt, match=f"line {place} is damaged") as caught:
        list(read_entries(tmp_path / "j"))
    assert caught.value.exit_code == 4


def test_a_changed_digit_is_noticed(tmp_path: Path, story: list[Event]) -> None:
    """Also where the line is still good JSON and a good event."""
    data = b"".join(write(tmp_path / "j", story))
    (tmp_path / "j").write_bytes(data.replace(b'"score":1.5', b'"score":2.5', 1))
    with pytest.raises(JournalCorrupt, match="checksum"):
        list(read_entries(tmp_path / "j"))


def unchained(line: bytes) -> bytes:
    """A line as older versions wrote it: with a checksum of its own alone."""
    return line[:-19] + b',"crc":"%08x"}\n' % zlib.crc32(line[:-19])


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_line_of_another_journal_is_no_line_of_this_one(
    tmp_path: Path, story: list[Event], number: int
) -> None:
    """Whole, with the right number and a checksum that is its own: it does not follow the line
    before.
    """
    lines = write(tmp_path / "j", story)
    other = write(tmp_path / "other", [Warned("w", str(n)) for n in range(9)])
    for stranger in (other[number], unchained(other[number])):
        (tmp_path / "j").write_bytes(b"".join([*lines[:number], stranger, *lines[number + 1 :]]))
        with pytest.raises(JournalCorrupt, match="checksum"):
            list(read_entries(tmp_path / "j"))


def test_a_journal_of_an_older_version_goes_on_with_chained_lines(
    tmp_path: Path, story: list[Event]
) -> None:
    """Its own lines stay as they are; from the new session on every line must follow the one
    before.
    """
    old = LineWriter()
    new = LineWriter()
    lines = [
        unchained(line)
        for line in old.lines(replace(OPENED, schema=2), 0, 0).splitlines(keepends=True)
    ]
    lines += [
        unchained(line) for line in old.lines(Warned("w", "old"), 0, 0).splitlines(keepends=True)
    ]
    (tmp_path / "j").write_bytes(b"".join(lines))
    reader = LineReader(tmp_path / "j")
    assert len(list(reader.entries())) == 2
    new = LineWriter(reader.number, reader.crc)
    added = [
        new.lines(event, 0, 0)
        for event in (replace(OPENED, session=2), Warned("w", "a"), Warned("w", "b"))
    ]
    (tmp_path / "j").write_bytes(b"".join([*lines, *added]))
    assert len(list(read_entries(tmp_path / "j"))) == 5
    (tmp_path / "j").write_bytes(b"".join([*lines, added[0], unchained(added[1]), added[2]]))
    with pytest.raises(JournalCorrupt, match="line 4"):
        list(read_entries(tmp_path / "j"))


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    """Also when a newer version resumed a journal of ours, and whatever else the newer line holds."""
    writer = LineWriter()
    ours = writer.lines(OPENED, 0, 0) + writer.lines(Warned("a", "b"), 0, 0)
    newer = json.dumps(
        {"n": 2, "kind": "session-opened", "schema": SCHEMA + 1, "extra": 1}
    ).encode()[:-1]
    (tmp_path / "j").write_bytes(
        ours + newer + b',"crc":"%08x"}\n' % zlib.crc32(newer, int(ours[-11:-3], 16))
    )
    with pytest.raises(JournalVersion, match=f"schema {SCHEMA + 1}"):
        list(read_entries(tmp_path / "j"))


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, story: list[Event]) -> None:
    """Lines before any session, and unknown kinds, are damage."""
    lines = write(tmp_path / "j", story)
    (tmp_path / "j").write_bytes(b"hello\n" + lines[0])
    with pytest.raises(JournalCorrupt, match="line 1"):
        list(read_entries(tmp_path / "j"))


def test_a_missing_file_is_a_storage_error(tmp_path: Path) -> None:
    """In one sentence, with the documented exit code."""
    with pytest.raises(StorageError, match="No such file"):
        list(read_entries(tmp_path / "nothing"))


def test_a_writer_does_not_hold_what_it_wrote(tmp_path: Path) -> None:
    """However much is written it holds two megabytes, short texts and long ones, and a reader finds
    every text.
    """
    path = tmp_path / "j"
    writer = LineWriter()
    events: list[Event] = [Warned("code", f"{place} ".ljust(20_000, "x")) for place in range(200)]
    tracemalloc.start()
    with path.open("wb") as file:
        for event in (OPENED, *events):
            file.write(writer.lines(event, 0.0, 1e9))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 3 << 20
    assert [entry.event for entry in read_entries(path)][1:] == events
    texts = Texts.of_writer()
    for place in range(8_000):
        texts.learn(f"name {place}", "x" * 100)
    assert len(texts) < 6_000


def test_what_older_writers_referred_to_is_found(tmp_path: Path) -> None:
    """They held sixteen million characters, however many texts those were."""
    path = tmp_path / "j"
    writer = LineWriter()
    writer._texts = Texts()  # pyright: ignore[reportPrivateUsage]
    texts = [f"{place} ".ljust(100, "x") for place in range(7_000)]
    events: list[Event] = [Warned("code", text) for text in (*texts, texts[0])]
    path.write_bytes(b"".join(writer.lines(event, 0.0, 1e9) for event in (OPENED, *events)))
    assert path.read_bytes().count(texts[0].encode()) == 1
    assert [entry.event for entry in read_entries(path)][1:] == events
