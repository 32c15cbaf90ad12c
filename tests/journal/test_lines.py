"""Tests of the journal's lines: all whole lines are read, and damage is never skipped."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atts.core import Completion, Problem, Prompt
from atts.errors import JournalCorrupt, JournalVersion, StorageError
from atts.journal import (
    FACTS,
    SCHEMA,
    Event,
    OutcomeReached,
    ProblemStarted,
    RolloutStarted,
    Sampled,
    SessionOpened,
    TurnFinished,
    Warned,
    read_entries,
)
from atts.journal.lines import LineReader, LineWriter

OPENED = SessionOpened(SCHEMA, 1, "0.1.0", 42)
SCORED: dict[str, Any] = {"problem": "p", "key": "k", "scores": {"logprobs": []}}
TURN: dict[str, Any] = {"problem": "p", "sample": 0, "turn": {"index": 0, "chunks": []}}
ROLLOUT: dict[str, Any] = {
    "problem": "p",
    "sample": 0,
    "prompt": {"draft_ids": [], "target_ids": []},
}


def write(path: Path, events: list[Event]) -> list[bytes]:
    """Write a journal of one session, and return its lines."""
    writer = LineWriter()
    data = b"".join(
        writer.line(event, 0.5 * place, 1e9) for place, event in enumerate([OPENED, *events])
    )
    path.write_bytes(data)
    return data.splitlines(keepends=True)


def chunk_of(event: Event) -> Completion:
    """Return the chunk that the model wrote in this turn."""
    assert isinstance(event, TurnFinished)
    chunk = event.turn.chunks[0]
    return Completion(chunk.draft_ids, chunk.text, chunk.ended, chunk.logprobs)


def end_of(reader: LineReader) -> tuple[int, int, int]:
    """Return the next line's number, the session, and the size of the whole lines in bytes."""
    return reader.number, reader.session, reader.length


def read(path: Path) -> tuple[list[Event], tuple[int, int, int]]:
    """Return the events after the session's opening, and the position where reading ended."""
    reader = LineReader(path)
    events = [entry.event for entry in reader.entries()]
    return events[1:], end_of(reader)


def test_reading_gives_what_was_written(tmp_path: Path, story: list[Event]) -> None:
    """Events, their order, line numbers, session and clocks are read from a journal as they were
    written.
    """
    lines = write(tmp_path / "j", story)
    entries = list(read_entries(tmp_path / "j"))
    assert [entry.event for entry in entries] == [OPENED, *story]
    assert [entry.at for entry in entries] == [0.5 * place for place in range(len(entries))]
    assert {entry.session for entry in entries} == {1}
    assert read(tmp_path / "j")[1] == (len(lines), 1, sum(map(len, lines)))


def test_every_line_is_strict_json(tmp_path: Path, story: list[Event]) -> None:
    """Any JSON tool can read the file, and each line's checksum continues the previous one."""
    crc = 0
    for line in write(tmp_path / "j", story):
        crc = zlib.crc32(line[:-19], crc)
        assert json.loads(line, parse_constant=pytest.fail)["crc"] == f"{crc:08x}"


@pytest.mark.parametrize("text", ["\ud800 alone", "😀", "\ud800 long " * 20, "\\ud800", "é" * 200])
def test_any_text_is_read_unchanged(tmp_path: Path, text: str) -> None:
    """Any text is read unchanged from a journal, even half of a surrogate pair, whether it is short
    or long.
    """
    write(tmp_path / "j", [Warned("w", text)])
    assert read(tmp_path / "j")[0] == [Warned("w", text)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": 3}, r"line 2 is damaged: Expected `str`, got `int` - at `\$.event.text`"),
        ({"more": 1}, r"line 2 is damaged: Object contains unknown field `more` - at `\$.event`"),
        ({"code": None}, r"line 2 is damaged: Expected `str`, got `null` - at `\$.event.code`"),
        ({"kind": "rumour"}, r"line 2 is damaged: Invalid value 'rumour' - at `\$.event.kind`"),
        ({"n": 7}, r"line 2 is damaged: the line is number 7 instead of 1"),
        ({"kind": "scored", **SCORED, "key": 3}, r"Expected `str`, got `int` - at `\$.event.key`"),
        (
            {"kind": "scored", **SCORED, "logprobs": ["f4", "AAA="]},
            "2 bytes do not contain a whole number",
        ),
        ({"kind": "scored", **SCORED, "logprobs": ["f2", ""]}, r"Invalid enum value 'f2'"),
        ({"kind": "scored", **SCORED, "role": "judge"}, r"Invalid enum value 'judge'"),
        (
            {"kind": "turn-finished", **TURN, "chunks": [{"author": "draft", "call": 0}]},
            "call 0, which does not exist",
        ),
        ({"kind": "turn-finished", **TURN, "is_decided": True}, "a decision that does not exist"),
        (
            {"kind": "rollout-started", **ROLLOUT, "is_repeated": True},
            "a prompt that does not exist",
        ),
    ],
)
def test_a_line_with_wrong_fields_is_damage(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """A line with a wrong field is reported as damage, and the error names the line and the
    field.
    """
    opened, line = write(tmp_path / "j", [Warned("w", "text")])
    row = json.loads(line)
    del row["crc"]
    event = row["event"]
    if changes.get("kind", "rumour") != "rumour":
        event = {}
    row["event"] = {**event, **changes}
    if "n" in changes:
        row = {**row, "n": row["event"].pop("n")}
    body = json.dumps(row).encode()[:-1]
    harmed = body + b',"crc":"%08x"}\n' % zlib.crc32(body, zlib.crc32(opened[:-19]))
    (tmp_path / "j").write_bytes(opened + harmed + b"more\n")
    with pytest.raises(JournalCorrupt, match=words):
        list(read_entries(tmp_path / "j"))


def test_a_reader_may_select_kinds_of_events(tmp_path: Path, story: list[Event]) -> None:
    """Selected events keep their numbers and are complete even if they refer to other lines."""
    lines = write(tmp_path / "j", [Sampled("p0", "k", chunk_of(story[2]), "draft"), *story])
    everything = list(read_entries(tmp_path / "j"))
    for kinds in ((TurnFinished,), (OutcomeReached, SessionOpened), (Sampled,), FACTS):
        reader = LineReader(tmp_path / "j", kinds)
        found = list(reader.entries())
        # a reader reports the opening of sessions even if this kind was not selected
        wanted = (*kinds, SessionOpened)
        assert found == [entry for entry in everything if isinstance(entry.event, wanted)]
        assert end_of(reader) == (len(lines), 1, sum(map(len, lines)))


def test_kinds_may_change_while_reading(tmp_path: Path, story: list[Event]) -> None:
    """While a reader runs, a kind of event may be removed from the set of requested kinds; later
    events of this kind are not returned.
    """
    write(tmp_path / "j", story)
    kinds: set[type[Event]] = {TurnFinished}
    found = list[Event]()
    for entry in read_entries(tmp_path / "j", kinds=kinds):
        found.append(entry.event)
        kinds -= {type(entry.event)}
    assert found == [OPENED, next(event for event in story if isinstance(event, TurnFinished))]


def test_damage_is_found_on_unwanted_lines(tmp_path: Path, story: list[Event]) -> None:
    """Lines of kinds that the reader did not select are checked for damage too."""
    lines = write(tmp_path / "j", story)
    for harm in (lines[4].replace(b"e", b"f", 1), b"", lines[4] * 2):
        (tmp_path / "j").write_bytes(b"".join([*lines[:4], harm, *lines[5:]]))
        with pytest.raises(JournalCorrupt, match="is damaged"):
            list(read_entries(tmp_path / "j", kinds=(OutcomeReached,)))


def test_a_torn_last_line_does_not_count(tmp_path: Path, story: list[Event]) -> None:
    """If the last line is cut anywhere, the journal reads as if that line had not been begun."""
    *whole, last = write(tmp_path / "j", story)
    before = b"".join(whole)
    for cut in range(len(last)):
        (tmp_path / "j").write_bytes(before + last[:cut])
        events, (_, _, length) = read(tmp_path / "j")
        assert events == story[:-1]
        assert length == len(before)


def test_a_last_line_of_rubbish_does_not_count(tmp_path: Path, story: list[Event]) -> None:
    """If a power failure leaves zeros or rubbish at the end of a journal, the last line counts as
    torn.
    """
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
    """Damage in the middle of a journal is refused with an error that names the line, after all
    earlier events were returned.
    """
    lines = write(tmp_path / "j", story)
    (tmp_path / "j").write_bytes(b"".join([*lines[:3], harm(lines[3]), *lines[4:]]))
    place = 5 if harm(lines[3]) == lines[3] * 2 else 4
    with pytest.raises(JournalCorrupt, match=f"line {place} is damaged") as caught:
        list(read_entries(tmp_path / "j"))
    assert caught.value.exit_code == 4


def test_a_changed_digit_is_noticed(tmp_path: Path, story: list[Event]) -> None:
    """A changed digit in a line is noticed by its checksum, although the line is still a valid
    event.
    """
    data = b"".join(write(tmp_path / "j", story))
    (tmp_path / "j").write_bytes(data.replace(b'"score":1.5', b'"score":2.5', 1))
    with pytest.raises(JournalCorrupt, match="checksum"):
        list(read_entries(tmp_path / "j"))


def unchained(line: bytes) -> bytes:
    """Return the line with a checksum that does not continue the previous line's checksum."""
    return line[:-19] + b',"crc":"%08x"}\n' % zlib.crc32(line[:-19])


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_line_of_another_journal_is_damage(
    tmp_path: Path, story: list[Event], number: int
) -> None:
    """A line of another journal has the expected number and a valid checksum, but its checksum does
    not continue the previous line's.
    """
    lines = write(tmp_path / "j", story)
    other = write(tmp_path / "other", [Warned("w", str(n)) for n in range(9)])
    for stranger in (other[number], unchained(other[number])):
        (tmp_path / "j").write_bytes(b"".join([*lines[:number], stranger, *lines[number + 1 :]]))
        with pytest.raises(JournalCorrupt, match="checksum"):
            list(read_entries(tmp_path / "j"))


@pytest.mark.parametrize("schema", [1, SCHEMA - 1, SCHEMA + 1])
def test_another_schema_is_refused(tmp_path: Path, schema: int) -> None:
    """A session with another schema is refused at the beginning of a journal or after a session of
    this schema, whatever its line contains.
    """
    writer = LineWriter()
    ours = writer.line(OPENED, 0, 0) + writer.line(Warned("a", "b"), 0, 0)
    opening = {"kind": "session-opened", "schema": schema, "extra": 1}
    for before, number, crc in ((ours, 2, int(ours[-11:-3], 16)), (b"", 0, 0)):
        row = {"n": number, "at": 0, "wall": 0, "event": opening}
        body = json.dumps(row).encode()[:-1]
        line = body + b',"crc":"%08x"}\n' % zlib.crc32(body, crc)
        (tmp_path / "j").write_bytes(before + line)
        with pytest.raises(JournalVersion, match=f"schema {schema}"):
            list(read_entries(tmp_path / "j"))


def test_a_file_that_is_not_a_journal_is_refused(tmp_path: Path, story: list[Event]) -> None:
    """A file with lines before the first session, or with unknown kinds of events, is refused as
    damaged.
    """
    lines = write(tmp_path / "j", story)
    (tmp_path / "j").write_bytes(b"hello\n" + lines[0])
    with pytest.raises(JournalCorrupt, match="line 1"):
        list(read_entries(tmp_path / "j"))


def test_a_missing_file_is_a_storage_error(tmp_path: Path) -> None:
    """A missing journal is a storage error in one sentence, with the documented exit code."""
    with pytest.raises(StorageError, match="No such file"):
        list(read_entries(tmp_path / "nothing"))


def test_a_writer_keeps_only_calls_of_open_turns(tmp_path: Path) -> None:
    """A writer remembers only the calls since the last turn of each open rollout, so its memory
    does not grow with the run.
    """
    path = tmp_path / "j"
    writer = LineWriter()
    tracemalloc.start()
    with path.open("wb") as file:
        file.write(writer.line(OPENED, 0.0, 1e9))
        for number in range(200):
            name = f"p{number}"
            ids = tuple(range(2_000))
            done = Completion(ids, name.ljust(20_000, "x"), "end", (-0.5,) * len(ids))
            events: list[Event] = [
                ProblemStarted(Problem(name, "What is 2+2?")),
                RolloutStarted(name, 0, Prompt(ids, ids)),
                Sampled(name, "a", done, "draft"),
                OutcomeReached(name, "answered", "4", (0,)),
                # a cancelled call may end after its problem
                Sampled(name, "b", done, "draft"),
            ]
            file.writelines(writer.line(event, 0.0, 1e9) for event in events)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1 << 20
