"""Tests of several steps in one kernel call: they write what single steps write, and stop where a
text may end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atts.core import SampleRequest, Sampling
from atts.local.cpu.bursts import MultiStep
from atts.local.cpu.model import NativeModel
from atts.local.messages import Cancel, Command, SampleReply, Submit
from atts.models.tokenizers import ModelTokenizer
from tests.local.speculating import LAWS, Driven, Make, ids_of, requests, run, same, texts

PLAIN = (Sampling(0.0), Sampling(0.7), Sampling(1.0))


class Watched:
    """A patch that records each kernel call that samples several tokens, and the number of tokens
    per sequence.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count all draws from now on."""
        self.turns = list[int]()
        drawn = NativeModel.draw_ahead

        def draw(model: NativeModel, *args: Any) -> Any:
            tokens = drawn(model, *args)
            self.turns.append(len(tokens))
            return tokens

        monkeypatch.setattr(NativeModel, "draw_ahead", draw)


def one_by_one(monkeypatch: pytest.MonkeyPatch, *args: Any) -> Driven:
    """Run a script with one kernel call for every step."""
    with monkeypatch.context() as patch:
        patch.setattr(MultiStep, "turns", lambda *args: 1)
        return run(*args)


@pytest.mark.parametrize("laws", [PLAIN, LAWS])
@pytest.mark.parametrize("count", [1, 5, 14])
def test_several_steps_per_call_change_no_token(
    count: int, laws: Any, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several steps in one kernel call give bit-identical replies to single steps.

    Nearly all steps are computed in such calls.
    """
    folder = make_model("llama")
    watched = Watched(monkeypatch)
    first, *others = requests(count, 40, laws)
    orders: list[list[Command]] = [
        [first],
        [],
        [*others],
        [Cancel(3)],
        [],
        [Submit(99, first.request)],
    ]
    plain = one_by_one(monkeypatch, folder, orders)
    assert not watched.turns
    done = run(folder, orders)
    assert same(plain, done)
    assert max(watched.turns, default=0) == 8, "a burst took too many turns"
    if laws is PLAIN:
        assert len(watched.turns) < done.stats.steps / 3
    assert done.stats.step_sequences >= done.stats.sampled_tokens - done.stats.free_tokens


def test_a_burst_stops_where_a_text_may_end(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel call of several steps ends early at a stop string or stop id, so it delays no reply
    and wastes no step.
    """
    folder = make_model("llama")
    watched = Watched(monkeypatch)
    request = SampleRequest(ids_of(1, 12), 16, Sampling(1.0))
    text = texts(run(folder, [[Submit(1, request)]]))[1]
    assert watched.turns == [8, 7], (
        "the first token must be drawn in the step that reads the prompt"
    )
    pieces = ModelTokenizer(folder, "tiny").pieces
    place = next(n for n in range(2, 14) if text[n] not in text[:n] and pieces[text[n]].isascii())
    for ending in (
        replace(request, stop_ids=(text[place],)),
        replace(request, stop=(pieces[text[place]].decode(),)),
    ):
        watched.turns.clear()
        done = run(folder, [[Submit(1, ending)]])
        reply = done.replies[1]
        assert isinstance(reply, SampleReply)
        assert (reply.ids, reply.ended) == (text[: place + 1], "delimiter")
        assert (1 + sum(watched.turns), done.stats.steps) == (place + 1, place + 1)
