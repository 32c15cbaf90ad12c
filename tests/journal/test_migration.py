"""Lines of earlier schemas are completed where they are read."""

from pathlib import Path

import pytest

from atts.core import Decision, Turn
from atts.journal import SCHEMA, Decided, Event, LineWriter, Observed, SessionOpened, TurnFinished, read_entries

WORDS = {
    "p 0.9000 > 0.8000": "gate",
    "levels {accept} by the draft's evidence, not scored": "evidence",
    "forced: not scored: engine target: it is gone, and so are all the others that might have answered": "forced",
    "warm-up, 3 of 9: stored, not acted on": "warm-up",
    "p 0.9000 > 0.8000; capped: no target slot left": "budget",
    "exploration, not acted on; would escalate: p 0.9000 > 0.8000": "exploration",
    "p 0.9000 > 0.8000; certified policy": "certificate",
}


def journal(path: Path, schema: int, events: list[Event]) -> Path:
    """A journal as a version of that schema wrote it."""
    writer = LineWriter()
    lines = [writer.lines(event, 1.0, 2.0) for event in (SessionOpened(schema, 1, "0.1.0", 1), *events)]
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
