"""Tests that sharing keys and values among models leaves outputs bit-identical, with new models,
little memory or a full cache.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from atts.accel import Zoo
from atts.accel.zoo.many_models import ChainModel, Lineage, SharingScheduler, SlotLedger
from atts.accel.zoo.shared_worker import AddModel
from atts.core import SampleRequest, Sampling, ScoreRequest
from atts.local.messages import FailureReply, LoopReport, Reply, SampleReply, Submit
from atts.sampling import Seed

from .conftest import MakeZoo
from .test_chains import OPTIONS, build, config_of
from .test_slot_ledger import said

Ask = SampleRequest | ScoreRequest
IDS = tuple(random.Random(1).choices(range(3, 300), k=60))
OTHERS = tuple(random.Random(2).choices(range(3, 300), k=60))


@pytest.fixture
def relatives(make_zoo: MakeZoo) -> Zoo:
    """Make models that differ from their base in each way that changes which keys and values are
    shared.
    """
    tuned = {"end": ("layers.2.",), "forward": ("layers.1.mlp",), "head": ("lm_head", "model.norm")}
    return make_zoo(tuned, {"asks": ("layers.1.self_attn.q_proj",)})


class Loop:
    """A step loop of several models that the test drives step by step."""

    def __init__(
        self, zoo: Zoo, *names: str, kv_tokens: int = 4096, chunk_tokens: int = 2048
    ) -> None:
        self.replies = dict[int, Reply]()
        configs = [config_of(zoo, name) for name in names]
        options = replace(OPTIONS, kv_tokens=kv_tokens, chunk_tokens=chunk_tokens)
        first, *others = [replace(config, options=options) for config in configs]
        self.loop, _ = build(first, self._tell)
        self.loop._handle([AddModel(config) for config in others])
        assert isinstance(self.loop._scheduler, SharingScheduler)
        self.scheduler = self.loop._scheduler

    def _tell(self, report: LoopReport) -> None:
        self.replies.update({reply.request_id: reply for reply in report.replies})

    def submit(self, number: int, ask: Ask, chain: int = 0) -> None:
        """Submit a request without waiting for its reply."""
        self.loop._handle([Submit(number, ask, chain)])

    def finish(self) -> None:
        """Step the loop until every request is answered."""
        while self.scheduler.num_unfinished:
            self.loop.step()
        self.loop._report()

    def answer(self, number: int, ask: Ask, chain: int = 0) -> Reply:
        """Submit a request once all earlier ones are answered, and return its reply."""
        self.submit(number, ask, chain)
        self.finish()
        return self.replies[number]

    @property
    def ledger(self) -> SlotLedger:
        """Return the loop's ledger of slots."""
        assert isinstance(self.loop._model, ChainModel)
        return self.loop._model._ledger


def sample(ids: Iterable[int], count: int = 1) -> SampleRequest:
    """Make a request for the most likely continuation."""
    return SampleRequest(tuple(ids), count, Sampling(0.0), seed=Seed(1, "p", 0, 0, "target", 0))


def test_a_slot_without_kept_states_is_not_shared(relatives: Zoo) -> None:
    """If a prompt is already cached, its last token is computed again for the logits. This token
    gets a new slot, which is not shared.
    """
    loop = Loop(relatives, "base", "end")
    loop.answer(0, sample(OTHERS[:9]), 1)
    drawn = loop.answer(1, sample(IDS[:20], 11))
    assert isinstance(drawn, SampleReply)
    prompt = IDS[:20] + drawn.ids[:10]
    ask = ScoreRequest(prompt, IDS[30:])
    loop.answer(2, ask)
    loop.answer(3, sample(prompt + OTHERS[:9]), 1)
    assert said(loop.answer(4, ask, 1)) == said(Loop(relatives, "end").answer(1, ask))


def test_a_new_model_shares_no_slot_that_is_itself_borrowed(relatives: Zoo) -> None:
    """If a running sequence borrows a slot from another model, that slot is not shared with a third
    model.

    The third model is added while the sequence's prompt is computed, and both borrowing models
    differ from the base in the same layer.
    """
    loop = Loop(relatives, "base", "forward", "asks", chunk_tokens=16)
    loop.answer(0, sample(OTHERS[:9]), 1)
    loop.answer(1, sample(IDS, 8))
    loop.submit(2, sample(IDS, 8), 1)
    loop.loop.step()
    (borrower,) = loop.scheduler.running()
    assert 0 < borrower.num_computed < loop.ledger.borrowed[borrower.row]
    loop.submit(3, sample(OTHERS, 8), 2)
    loop.finish()
    for number, name, ids in ((2, "forward", IDS), (3, "asks", OTHERS)):
        assert said(loop.replies[number]) == said(Loop(relatives, name).answer(1, sample(ids, 8)))


def test_a_new_model_that_moves_the_kept_layer_drops_old_states(relatives: Zoo) -> None:
    """Hidden states are kept at one layer. If a new model changes which layer this is, the loop
    drops the states of the old layer.
    """
    loop = Loop(relatives, "base", "end", "head", "forward")
    for number, (ids, chain) in enumerate(
        [(OTHERS[::-1], 2), (IDS, 1), (IDS, 0), (OTHERS, 0), (IDS[::-1], 3)]
    ):
        loop.answer(number, sample(ids), chain)
    asks = {5: ScoreRequest(IDS[:40], IDS[40:]), 6: ScoreRequest(OTHERS[:40], OTHERS[40:])}
    for number, ask in asks.items():
        assert said(loop.answer(number, ask, 2)) == said(Loop(relatives, "head").answer(1, ask))


def test_a_ledger_out_of_memory_stays_as_it_was() -> None:
    """Hidden states as wide as in this test fit into no memory. Adding a second model to the ledger
    therefore fails and leaves the ledger unchanged.
    """
    ledger = SlotLedger(10, 2**50)
    one, other = (
        Lineage(("e", "a0", "m0", tail, "m1", "h"), ("k0", tail), 3) for tail in ("a1", "b1")
    )
    ledger.relate({0: one})
    held = ledger.allocate(3)
    with pytest.raises(MemoryError):
        ledger.relate({0: one, 1: other})
    ledger.free([held])
    assert (ledger.num_free, ledger.starts, ledger.kept) == (10, (0,), {})


def test_a_model_that_finds_no_memory_fails_alone(
    relatives: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a new model finds no memory, its request fails and other models continue; the model is
    added once memory is free.
    """
    loop = Loop(relatives, "base", "end")
    loop.submit(1, sample(IDS, 8))
    loop.loop.step()
    for owner, name in ((SlotLedger, "_kept"), (type(loop.scheduler.tree), "nodes")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, _refuse)
            loop.submit(2, sample(OTHERS, 8), 1)
        assert loop.scheduler.tables.shape[0] == len(loop.ledger.starts) == 1
    loop.finish()
    assert isinstance(loop.replies[2], FailureReply)
    assert said(loop.replies[1]) == said(Loop(relatives, "base").answer(1, sample(IDS, 8)))
    assert said(loop.answer(3, sample(IDS, 8), 1)) == said(
        Loop(relatives, "end").answer(1, sample(IDS, 8))
    )
    assert loop.scheduler.tables.shape[0] == 2


def _refuse(*_: object) -> None:
    raise MemoryError


def test_slots_shared_with_a_running_sequence_do_not_count_as_free(relatives: Zoo) -> None:
    """Evicting a cached prompt frees no slot while a running sequence uses the prompt. A new
    request that does not fit therefore waits.
    """
    loop = Loop(relatives, "base", "head", kv_tokens=120)
    loop.answer(0, sample(OTHERS[:9]), 1)
    loop.answer(1, sample(IDS[:50]), 1)
    loop.submit(2, sample(IDS[:50], 20))
    loop.loop.step()
    assert 50 <= loop.loop.stats().kv_locked <= 70
    loop.submit(3, sample(OTHERS, 2))
    loop.finish()
    assert loop.scheduler.num_preempted == 0
