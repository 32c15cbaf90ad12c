"""Whatever happened comes back from the file as the value it was."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.core import Completion, Prompt, Scores
from atts.journal import Event, Sampled, Scored
from atts.journal.codec import form
from atts.journal.events import KINDS
from atts.journal.texts import Texts


def same(one: Any, other: Any) -> bool:
    """Equal, with NaN equal to itself."""
    if is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
        )
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return bool(one == other)


def through_json(value: Any) -> Any:
    """Written, read as strict JSON, rebuilt."""
    kind: Any = type(value)
    written = Texts()
    read = Texts()
    text = json.dumps(form(kind).write(value, written), allow_nan=False)
    for name, long in written.fresh:
        read.learn(name, long)
    return from_json(kind, json.loads(text), read)


def from_json(kind: Any, data: Any, texts: Texts) -> Any:
    """The value of plain JSON data."""
    return form(kind).read(msgspec.convert(data, form(kind).stored), texts)


@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@given(data=st.data())
def test_every_event_survives(kind: type[Event], data: st.DataObject) -> None:
    """Any value of any kind of event is the same after a round trip through strict JSON."""
    event = data.draw(st.from_type(kind))
    assert same(event, through_json(event))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=64) | st.floats(width=32), max_size=40).map(tuple))
def test_log_probabilities_are_exact(numbers: tuple[float, ...]) -> None:
    """Packing loses no bit, infinities and NaN included: a resumed run computes the same
    perplexity.
    """
    back = through_json(Scored("p", "k", Scores(numbers)))
    assert [value.hex() for value in back.scores.logprobs] == [value.hex() for value in numbers]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-5, 1 << 40), max_size=30).map(tuple))
def test_ids_are_exact(ids: tuple[int, ...]) -> None:
    """Token ids come back whole, whatever their size."""
    assert through_json(Prompt(ids, ids)).draft_ids == ids


def test_one_tokenizer_stays_one_tuple() -> None:
    """Ids shared by draft and target are one object again after reading."""
    back = through_json(Prompt(tuple(range(50)), tuple(range(50))))
    assert back.draft_ids is back.target_ids


@pytest.mark.parametrize(
    "text", ["@", "@@", "@x", "", "\ud800 lone", "é" * 200, "@" * 200, '</script>"\\\n\x00']
)
def test_awkward_texts_survive(text: str) -> None:
    """Marks, lone surrogates, control characters: text is text."""
    assert through_json(Completion((1,), text, "end", (0.0,))).text == text


def test_a_packed_tuple_is_small() -> None:
    """500 ids and log-probabilities of 32-bit origin take under 6 KB, 64-bit ones under 9 KB."""
    ids = tuple(range(500))
    for step, limit in ((0.5, 6_000), (0.1, 9_000)):
        texts = Texts()
        event = Sampled(
            "p", "k", Completion(ids, "x", "length", tuple(-step * i for i in ids)), "draft"
        )
        text = json.dumps(form(Sampled).write(event, texts)) + "".join(
            long for _, long in texts.fresh
        )
        assert len(text) < limit


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 30), max_size=200),
    st.integers(100, 2_000),
    st.lists(st.integers(0, 199), max_size=3),
)
def test_references_never_dangle(order: list[int], limit: int, restarts: list[int]) -> None:
    """A reader finds every text a writer refers to, however little both remember and whenever the
    writer restarts.
    """
    writer = Texts(limit)
    reader = Texts(limit)
    for place, index in enumerate(order):
        if place in restarts:
            writer = Texts(limit)
        text = f"{index} " * (index + 1) * 5
        name = writer.refer(text)
        for fresh in writer.fresh:
            reader.learn(*fresh)
        writer.fresh.clear()
        assert reader.find(name) == text


@pytest.mark.parametrize(
    "data",
    [
        {"problem": "p", "key": "k"},
        {"problem": 3, "key": "k", "scores": {"logprobs": []}},
        {"problem": "p", "key": "k", "scores": {"logprobs": [True]}},
        {"problem": "p", "key": "k", "scores": {"logprobs": "u4:AAAA"}},
        {"problem": "p", "key": "k", "scores": {"logprobs": "f8:AAAA"}},
        {"problem": "@nowhere", "key": "k", "scores": {"logprobs": []}},
        {"problem": "p", "key": "k", "scores": {"logprobs": []}, "role": "judge"},
        {"problem": "p", "key": "k", "scores": {"logprobs": []}, "more": 1},
        [],
    ],
)
def test_other_data_is_refused(data: Any) -> None:
    """What is not such an event raises ValueError instead of becoming one."""
    with pytest.raises(ValueError, match=r"\S"):
        from_json(Scored, data, Texts())
