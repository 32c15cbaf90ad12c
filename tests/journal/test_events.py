"""Tests that each event, written as a line, is read as the same value."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.core import (
    Beginning,
    CallSpan,
    Chunk,
    Completion,
    Decision,
    Problem,
    ProblemSpan,
    Prompt,
    RolloutSpan,
    Scores,
    Turn,
)
from atts.journal import (
    SCHEMA,
    Decided,
    Event,
    LineWriter,
    Observed,
    OutcomeReached,
    ProblemStarted,
    RolloutFinished,
    RolloutStarted,
    Sampled,
    Scored,
    SessionOpened,
    TurnFinished,
    read_entries,
)
from atts.journal.events import KINDS
from atts.journal.lines import LineReader, pack_floats, unpack_floats

OPENED = SessionOpened(SCHEMA, 1, "0.1.0", 42)
STARTED = ProblemStarted(Problem("p", "What is 2+2?"))
IN_LINES_ONLY: dict[type[Any], set[str]] = {
    Sampled: {"logprobs", "span"},
    Scored: {"logprobs", "beginning_logprobs", "span"},
    Decided: {"escalated"},
    RolloutStarted: {"is_repeated"},
    TurnFinished: {"chunks", "discarded", "is_decided"},
}


def same(one: Any, other: Any) -> bool:
    """Compare two values, with NaN equal to itself."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        return all(
            same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
        )
    if isinstance(one, msgspec.Struct):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def lines_of(events: list[Event]) -> list[bytes]:
    """Return the lines of a new journal: its opening, and one for each event."""
    writer = LineWriter()
    return [writer.line(event, 0.5, 1e9) for event in (OPENED, *events)]


def through_file(path: Path, *events: Event) -> list[Event]:
    """Write events to a file as lines of strict JSON, and return the events read from it."""
    lines = lines_of(list(events))
    for line in lines:
        json.loads(line, parse_constant=pytest.fail)
    path.write_bytes(b"".join(lines))
    return [entry.event for entry in read_entries(path)][1:]


def any_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    """Return a hypothesis strategy for events of one kind, without the fields that exist only in a
    journal's lines.
    """
    hints = get_type_hints(kind)
    left_out = IN_LINES_ONLY.get(kind, set[str]())
    drawn = {
        name: st.from_type(hints[name]) for name in kind.__struct_fields__ if name not in left_out
    }
    return st.builds(kind, **drawn)


@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@given(data=st.data())
def test_every_event_survives_a_round_trip(
    kind: type[Event], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every event, of any kind and with any values, is the same after being written as strict JSON
    and read.
    """
    event = data.draw(any_of(kind))
    if isinstance(event, SessionOpened):
        event = msgspec.structs.replace(event, schema=SCHEMA)
    [back] = through_file(tmp_path_factory.getbasetemp() / "one-event", event)
    assert same(event, back)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=64) | st.floats(width=32), max_size=40).map(tuple))
def test_log_probabilities_are_exact(numbers: tuple[float, ...]) -> None:
    """Packing log-probabilities loses no bit, so a resumed run computes the same perplexity."""
    [_, line] = lines_of([Scored("p", "k", Scores(numbers, 0, Beginning((1,), numbers)))])
    event = json.loads(line)["event"]
    for packed in (event.get("logprobs"), event.get("beginning_logprobs")):
        assert (packed is None) == (numbers == ())
    back = unpack_floats(pack_floats(numbers))
    assert [value.hex() for value in back] == [value.hex() for value in numbers]


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(-5, 1 << 80), max_size=30).map(tuple))
def test_token_ids_are_exact(
    ids: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Token ids of any size are read unchanged."""
    path = tmp_path_factory.getbasetemp() / "ids"
    [back] = through_file(path, RolloutStarted("p", 0, Prompt(ids, ids)))
    assert isinstance(back, RolloutStarted)
    assert back.prompt.draft_ids == ids


def test_ids_shared_by_both_models_stay_one_object(tmp_path: Path) -> None:
    """If draft and target have the same token ids, both fields are the same tuple after reading,
    which saves memory.
    """
    ids = tuple(range(50))
    [back] = through_file(tmp_path / "j", RolloutStarted("p", 0, Prompt(ids, ids)))
    assert isinstance(back, RolloutStarted)
    assert back.prompt.draft_ids is back.prompt.target_ids


@pytest.mark.parametrize(
    "text",
    ["@", "null", "nan", "", "\ud800 lone", "é" * 200, '</script>"\\\n\x00', "\\ud800", "😀"],
)
def test_special_characters_survive(text: str, tmp_path: Path) -> None:
    """JSON syntax, lone surrogates and control characters in a text are read unchanged."""
    event = Sampled("p", text, Completion((1,), text, "end", (0.0,)), "draft")
    assert through_file(tmp_path / "j", event) == [event]


def test_a_packed_tuple_is_small() -> None:
    """A line with 500 ids and log-probabilities takes under 6 KB if 32-bit numbers represent them
    exactly, and under 9 KB with 64-bit numbers.
    """
    ids = tuple(range(500))
    for step, limit in ((0.5, 6_000), (0.1, 9_000)):
        logprobs = tuple(-step * number for number in ids)
        [_, line] = lines_of([Sampled("p", "k", Completion(ids, "x", "length", logprobs), "draft")])
        assert len(line) < limit


def call(number: int, author: Any = "draft", ended: Any = "delimiter") -> Sampled:
    """Make a recorded sampling call whose key, ids and text depend on `number`."""
    ids = tuple(range(number, number + 100))
    logprobs = struct.unpack("<100f", struct.pack("<100f", *(-0.01 * one for one in ids)))
    completion = Completion(ids, f"text {number} " * 30, ended, logprobs)
    return Sampled("p", f"key {number}", completion, author, "p/0", 0)


def chunk_of(event: Sampled, cut: int = 0, **changes: Any) -> Chunk:
    """Return a chunk with the call's text and ids, without the last `cut` ids. Draft and target
    have the same ids, as with a shared tokenizer.
    """
    done = event.completion
    ids = done.ids[: len(done.ids) - cut]
    return replace(Chunk(event.role, done.text, ids, ids, done.ended, done.logprobs), **changes)


DECISION = Decision("accept", math.nan, "p", score=math.inf, p=0.25)
PLAIN = replace(DECISION, rate=0.25)
OTHER_IDS = tuple(range(1_000, 1_090))
DRAFTED = call(1)
ENDED = call(2, "target", "end")
TURNS = {
    "written by a call": (Turn(0, (chunk_of(DRAFTED),)), 320),
    "ended by an end token": (Turn(0, (chunk_of(ENDED, cut=1),)), 320),
    "discarded, and written by the target": (
        Turn(0, (chunk_of(ENDED),), (chunk_of(DRAFTED),), score=2.0),
        350,
    ),
    "read otherwise by the other model": (
        Turn(0, (chunk_of(DRAFTED, target_ids=OTHER_IDS),)),
        900,
    ),
    "with another text": (Turn(0, (chunk_of(DRAFTED, text="cut"),)), 1_500),
    "without log-probabilities": (Turn(0, (chunk_of(DRAFTED, logprobs=()),)), 1_000),
    "of another author": (Turn(0, (chunk_of(DRAFTED, author="target"),)), 2_000),
    "put in": (Turn(0, (Chunk("draft", "Wait", (7,), (8, 9), "delimiter"),), is_forced=True), 400),
    "decided": (Turn(0, (chunk_of(DRAFTED),), score=math.inf, decision=DECISION), 350),
    "decided otherwise": (
        Turn(0, (chunk_of(DRAFTED),), decision=replace(DECISION, p=0.5)),
        500,
    ),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_turn_is_stored_by_reference_to_its_calls(name: str, tmp_path: Path) -> None:
    """If a turn's chunks are results of calls in the journal, the turn's line only refers to these
    calls. The reader restores the complete turn.
    """
    turn, limit = TURNS[name]
    events: list[Event] = [
        STARTED,
        DRAFTED,
        ENDED,
        Decided(DECISION),
        Observed(DECISION, False),
        RolloutStarted("p", 0, Prompt((1,), (1,))),
        TurnFinished("p", 0, turn),
    ]
    back = through_file(tmp_path / "j", *events)
    assert all(map(same, back, events))
    assert len(lines_of(events)[-1]) < limit
    wanted = [entry.event for entry in read_entries(tmp_path / "j", kinds=(TurnFinished,))]
    assert same(wanted[-1], events[-1])


def test_references_end_with_a_turn_or_a_problem(tmp_path: Path) -> None:
    """The writer and the reader both forget calls of earlier turns and of finished problems, so no
    line can refer to such calls.
    """
    turn = TurnFinished("p", 0, Turn(0, (chunk_of(DRAFTED),)))
    prompt = RolloutStarted("p", 0, Prompt(tuple(range(200)), tuple(range(200))))
    over = OutcomeReached("p", "answered", "4", (0,))
    ended = RolloutFinished("p", 0, "answer", 1)
    events: list[Event] = [
        STARTED, prompt, DRAFTED, turn, turn, DRAFTED, ended, turn, prompt, over, DRAFTED, prompt, turn,
    ]  # fmt: skip
    assert through_file(tmp_path / "j", *events) == events
    lengths = [len(line) for line in lines_of(events)[1:]]
    prompts = [lengths[number] for number in (1, 8, 11)]
    turns = [lengths[number] for number in (3, 4, 7, 12)]
    assert [length > 500 for length in prompts] == [True, False, True]
    assert [length > 500 for length in turns] == [False, True, True, True]


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_resumed_writer_refers_to_what_the_reader_read(cut: int, tmp_path: Path) -> None:
    """If a session ends in the middle of a turn, the resumed session's lines may refer to calls of
    the earlier session.
    """
    prompt = RolloutStarted("p", 0, Prompt((1,), (1,)))
    turn = TurnFinished("p", 0, Turn(0, (chunk_of(DRAFTED),), decision=PLAIN))
    events: list[Event] = [
        OPENED,
        STARTED,
        DRAFTED,
        Decided(PLAIN),
        prompt,
        turn,
        RolloutStarted("p", 1, Prompt((1,), (1,))),
    ]
    first = LineWriter()
    path = tmp_path / "j"
    path.write_bytes(b"".join(first.line(event, 0.0, 1e9) for event in events[:cut]))
    reader = LineReader(path)
    list(reader.entries())
    second = LineWriter(reader.number, reader.crc, reader.records)
    with path.open("ab") as file:
        file.writelines(second.line(event, 0.0, 1e9) for event in events[cut:])
    assert same(tuple(entry.event for entry in read_entries(path)), tuple(events))
    whole = LineWriter()
    assert path.read_bytes() == b"".join(whole.line(event, 0.0, 1e9) for event in events)


SPANS = (
    CallSpan(7, "draft", "draft", "p", 0, 0, 0.0, 0.5, 1.0, 2.0, (3, 4)),
    RolloutSpan("p", 0, "done", 0.0, 0.0, 1.0, 1.0),
    ProblemSpan("p", 0, "done", 0.0, 1.0),
)


@pytest.mark.parametrize("span", SPANS, ids=lambda span: type(span).__name__)
def test_spans_are_tagged_like_events(span: Event) -> None:
    """A line of the task graph names its kind, as every other line does."""
    [_, line] = lines_of([span])
    assert KINDS[json.loads(line)["event"]["kind"]] is type(span)
