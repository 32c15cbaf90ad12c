"""Tests of stop strings: a client sees only the text before the first stop string, in whole and
streamed replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atts.ledger import Amount
from atts.pipelines import Chunking, Policy
from atts.serving.replies import StoppedText, stopped_text
from tests.serving.conftest import MODEL, QUESTION, Client, serving, stream_events, toy_setup

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'atts-llm[serve]'")
LETTERS = "ab\n"
"""A few letters, chosen so that random stop strings begin, overlap and end in random texts."""


def shown_by_definition(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first complete stop string, which is by definition what a client
    sees.
    """
    for end in range(1, len(text) + 1):
        ending = [one for one in stop if text[:end].endswith(one)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(
    pieces=st.lists(st.text(LETTERS, max_size=8), max_size=12),
    stop=st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4),
)
def test_a_stream_shows_the_text_of_a_whole_reply(pieces: list[str], stop: list[str]) -> None:
    """A stream shows the same text as a whole reply.

    It holds back a stop string, and any beginning of one that later text may complete.
    """
    text = "".join(pieces)
    expected = shown_by_definition(text, stop)
    growing = StoppedText(stop)
    shown = ""
    read = ""
    for piece in pieces:
        shown += growing.add(piece)
        read += piece
        # the text shown so far is correct, whatever follows
        for one in stop:
            assert shown_by_definition(read + one, stop).startswith(shown)
            assert shown_by_definition(read + one[-1], stop).startswith(shown)
    shown += growing.end()
    assert shown == expected
    assert growing.is_stopped == (shown_by_definition(text + "x", stop) != text + "x")
    assert stopped_text(text, stop) == (expected, growing.is_stopped)
    assert not any(one in shown for one in stop)


@given(text=st.text(LETTERS, max_size=20), stop=st.text(LETTERS, min_size=1, max_size=5))
def test_a_stream_lags_by_less_than_the_stop_string(text: str, stop: str) -> None:
    """A stream delays only text that may be the beginning of a stop string."""
    growing = StoppedText([stop])
    shown = growing.add(text)
    if not growing.is_stopped:
        held = text.removeprefix(shown)
        assert stop.startswith(held)
        assert len(held) < len(stop)


async def both(client: Client, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Request a whole and a streamed reply; return the whole reply and the deltas of the stream."""
    whole = (await client.chat(**fields)).json()
    got = await stream_events(client, **fields)
    choices = [event["choices"][0] for event in got]
    (finish,) = [one["finish_reason"] for one in choices if one["finish_reason"]]
    assert finish == whole["choices"][0]["finish_reason"]
    deltas = [one["delta"] for one in choices]
    content = "".join(delta.get("content", "") for delta in deltas)
    assert content == whole["choices"][0]["message"]["content"]
    return whole, deltas


@pytest.mark.parametrize("model", ["draft", "target"])
@pytest.mark.parametrize("stop", ["So", "\n\n", "\n\nSo", "s 7", "}", ["zzz", "nswer", "."]])
def test_a_single_model_stops_at_the_stop_string(model: str, stop: str | list[str]) -> None:
    """A single model's content ends before the stop string, and later tokens are neither shown nor
    charged.
    """

    async def main() -> None:
        async with serving() as client:
            asked = {"model": model, "seed": 3}
            unstopped = (await client.chat(**asked)).json()
            text = unstopped["choices"][0]["message"]["content"]
            whole, _ = await both(client, stop=stop, **asked)
            stops = [stop] if isinstance(stop, str) else stop
            shown = whole["choices"][0]["message"]["content"]
            assert shown == shown_by_definition(text, stops) != text
            assert whole["choices"][0]["finish_reason"] == "stop"
            # "}" is the last character of the text, so stopping there saves no tokens
            if stop != "}":
                assert whole["usage"]["total_tokens"] < unstopped["usage"]["total_tokens"]
            assert whole["atts"]["answer"] is None
            assert whole["atts"]["votes"] == {}
            root = str(client.http.base_url).removesuffix("v1/")
            run = (await client.http.get(root + whole["atts"]["report"][1:])).json()
            assert run["votes"] == {}

    anyio.run(main)


def test_a_stop_string_across_calls_is_found() -> None:
    """With chunks of two tokens, a stop string is found even if it begins in one chunk and ends in
    another.
    """

    async def main() -> None:
        setup = toy_setup(policy=Policy(chunking=Chunking(draft_tokens=2)))
        async with serving(setup) as client:
            asked = {"model": "draft", "seed": 3}
            unstopped = (await client.chat(**asked)).json()
            text = unstopped["choices"][0]["message"]["content"]
            stop = text[3:-15]
            whole, _ = await both(client, stop=[stop], **asked)
            assert whole["choices"][0]["message"]["content"] == text[:3]
            spent = [one["atts"]["spent"]["calls"] for one in (whole, unstopped)]
            assert 2 < spent[0] < spent[1]

    anyio.run(main)


def test_reasoning_that_votes_is_not_cut() -> None:
    """A stop string that every rollout writes cuts neither the votes nor the reasoning."""

    async def main() -> None:
        async with serving() as client:
            unstopped, _ = await both(client, seed=5)
            whole, deltas = await both(client, seed=5, stop=["\n\n", "So", "\\boxed"])
            assert whole["choices"] == unstopped["choices"]
            assert whole["atts"]["votes"] == unstopped["atts"]["votes"]
            written = [one["usage"]["completion_tokens"] for one in (whole, unstopped)]
            assert written[0] == written[1]
            assert "So" in "".join(delta.get("reasoning", "") for delta in deltas)

    anyio.run(main)


def test_content_is_cut_but_the_answer_is_not() -> None:
    """The content ends before the stop string, and `atts.answer` is still the answer."""

    async def main() -> None:
        async with serving() as client:
            whole, _ = await both(client, seed=5, stop="5")
            assert whole["choices"][0]["message"]["content"] == ""
            assert whole["choices"][0]["finish_reason"] == "stop"
            assert whole["atts"]["answer"] == "5"

    anyio.run(main)


def test_the_text_of_a_rollout_without_an_answer_is_cut() -> None:
    """If a limit ended a reply, its text is cut at a stop string as well, and its finish reason
    becomes "stop".
    """

    async def main() -> None:
        async with serving() as client:
            asked = {"seed": 2, "max_tokens": 4}
            unstopped, _ = await both(client, **asked)
            text = unstopped["choices"][0]["message"]["content"]
            assert unstopped["choices"][0]["finish_reason"] == "length"
            whole, _ = await both(client, stop=[text[2:4]], **asked)
            assert whole["choices"][0]["message"]["content"] == text[:2]
            assert whole["choices"][0]["finish_reason"] == "stop"

    anyio.run(main)


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ("", "empty string"),
        (["a", ""], "empty string"),
        ([str(number) for number in range(17)], "stop has 17 strings, expected at most 16"),
        ("x" * 257, "more than 256 characters"),
        ([1], "stop is not a string or a list of strings"),
        ({"a": 1}, "stop is not a string or a list of strings"),
    ],
)
def test_impossible_stop_strings_are_refused(stop: Any, words: str) -> None:
    """An impossible stop string is refused before any work is done, with an error that names the
    field.
    """

    async def main() -> None:
        async with serving() as client:
            response = await client.chat(stop=stop)
            assert response.status_code == 400
            error = response.json()["error"]
            assert words in error["message"]
            assert error["param"] == "stop"
            assert client.service.account.spent == Amount()

    anyio.run(main)


def test_null_and_no_stop_strings_change_nothing() -> None:
    """A value of null or an empty list means no stop strings; some clients send these values."""

    async def main() -> None:
        async with serving() as client:
            choices = (await client.chat(seed=1)).json()["choices"]
            assert (await client.chat(seed=1, stop=None)).json()["choices"] == choices
            assert (await client.chat(seed=1, stop=list[str]())).json()["choices"] == choices

    anyio.run(main)


def test_responses_refuse_stop_strings() -> None:
    """The Responses API refuses stop strings, because ignoring the field would mislead the
    client.
    """

    async def main() -> None:
        async with serving() as client:
            given = {"model": MODEL, "input": QUESTION, "stop": ["x"]}
            response = await client.http.post("/responses", json=given)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "stop"

    anyio.run(main)
