"""Lines of earlier schemas are completed where they are read."""

from dataclasses import replace
from pathlib import Path

import pytest

from atts.core import Chunk, Decision, Turn
from atts.journal import (
    SCHEMA,
    Decided,
    Event,
    LineWriter,
    Observed,
    SessionOpened,
    TurnFinished,
    read_entries,
)

WORDS = {
    "p 0.9000 > 0.8000": "gate",
    "levels {accept} by the draft's evidence, not scored": "evidence",
    "forced: not scored: engine target: it is gone, and so are all the others that might have "
    "answered": "forced",
    "warm-up, 3 of 9: stored, not acted on": "warm-up",
    "p 0.9000 > 0.8000; capped: no target slot left": "budget",
    "p 0.9000 > 0.8000; certified policy": "certificate",
}


def journal(path: Path, schema: int, events: list[Event]) -> Path:
    """A journal as a version of that schema wrote it."""
    writer = LineWriter()
    lines = [
        writer.lines(event, 1.0, 2.0) for event in (SessionOpened(schema, 1, "0.1.0", 1), *events)
    ]
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize(("why", "origin"), WORDS.items())
def test_decisions_of_the_first_schema_get_the_origin_their_words_tell_of(
    why: str, origin: str, tmp_path: Path
) -> None:
    """Wherever a decision is recorded."""
    decision = Decision("escalate", 0.2, "p", why=why)
    events: list[Event] = [
        Decided(decision),
        Observed(decision, True),
        TurnFinished("p", 0, Turn(0, (), decision=decision)),
    ]
    path = journal(tmp_path / "journal", 1, events)
    decided, observed, turned = (entry.event for entry in [*read_entries(path)][1:])
    assert isinstance(decided, Decided)
    assert isinstance(observed, Observed)
    assert isinstance(turned, TurnFinished)
    assert turned.turn.decision is not None
    found = [decided.decision, observed.decision, turned.turn.decision]
    assert [one.origin for one in found] == [origin] * 3
    assert all(one.why == why for one in found)


def test_decisions_of_this_schema_are_taken_at_their_word(tmp_path: Path) -> None:
    """A gate of one's own may say anything: its words are for people."""
    decision = Decision("accept", 0.2, "p", why="forced by a rule of mine")
    [_, entry] = read_entries(journal(tmp_path / "journal", SCHEMA, [Decided(decision)]))
    assert entry.event == Decided(decision)


@pytest.mark.parametrize(
    ("note", "asked", "is_forced", "left"),
    [
        ("", 3, False, ""),
        ("2 of 3 tokens stay", 3, False, "2 of 3 tokens stay"),
        ("scored as an equal chunk after an equal beginning was", 0, False, ""),
        ("budget forcing", 0, True, ""),
    ],
)
def test_turns_of_earlier_schemas_get_the_facts_their_notes_tell_of(
    note: str, asked: int, is_forced: bool, left: str, tmp_path: Path
) -> None:
    """How many tokens were scored, and whether the words were put in; what is said of the turn
    stays the same.
    """
    chunks = Chunk("target", "b", (4,), (4,), "end"), Chunk("draft", "a", (1, 2), (1, 2, 3), "end")
    turn = Turn(0, chunks, score=None if is_forced else 1.5, note=note)
    for schema in (1, 2, 3):
        [_, entry] = read_entries(
            journal(tmp_path / "journal", schema, [TurnFinished("p", 0, turn)])
        )
        assert isinstance(entry.event, TurnFinished)
        found = entry.event.turn
        assert (found.scored_tokens, found.is_forced, found.note, found.remark) == (
            asked,
            is_forced,
            left,
            note,
        )
    new = replace(turn, scored_tokens=1, is_forced=not is_forced)
    [_, entry] = read_entries(journal(tmp_path / "journal", SCHEMA, [TurnFinished("p", 0, new)]))
    assert entry.event == TurnFinished("p", 0, new)
