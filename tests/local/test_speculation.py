"""Speculation changes how many steps are taken, and not one token or bit of what is written."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atts.core import SampleRequest, Sampling, TokenIds
from atts.local.batch import StepPlan
from atts.local.messages import Cancel, Command, SampleReply, Submit
from atts.seeds import Seed
from atts.speculation import Ask, Proposer, TokenProposal

Make = Callable[..., Path]
Drive = Callable[..., Any]
LAWS = (
    Sampling(0.0), Sampling(0.7), Sampling(1.0), Sampling(0.7, top_k=5), Sampling(1.0, top_p=0.8),
    Sampling(0.9, min_p=0.1), Sampling(0.8, top_k=20, top_p=0.9, min_p=0.02),
)  # fmt: skip


def ids_of(seed: int, count: int) -> TokenIds:
    """Some ids, never a special one."""
    return tuple(random.Random(seed).choices(range(3, 300), k=count))


def requests(count: int, tokens: int = 24, laws: Sequence[Sampling] = LAWS, **changes: Any) -> list[Command]:
    """Orders for texts under several laws; some share a prompt, as the samples of one problem do."""
    return [
        Submit(
            n + 1,
            SampleRequest(
                ids_of(n // 3, 12), tokens, laws[n % len(laws)], Seed(5, sample=n), rollout=f"p{n // 3}/{n}", **changes
            ),
        )
        for n in range(count)
    ]


@pytest.fixture(scope="session")
def near(make_model: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model: the tiny target with noise on its weights, so that about half of what it draws stands."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, folder = make_model("llama"), tmp_path_factory.mktemp("near")
    model = AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.04 * weight.std() * torch.randn_like(weight) if weight.ndim > 1 else 0.0
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


class Knowing(Proposer):
    """Proposes what a plain run wrote, wrong from a random place on; or nothing but wrong tokens."""

    def __init__(self, texts: dict[int, TokenIds], kind: str) -> None:
        self._texts, self._kind, self._random = texts, kind, random.Random(3)

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """Of each text what comes next."""
        return [TokenProposal(self._next(ask)) for ask in asks]

    def _next(self, ask: Ask) -> TokenIds:
        right = self._texts[ask.key][ask.written : ask.written + ask.room]
        if self._kind == "right":
            return (*right, *[7] * (ask.room - len(right)))
        if self._kind == "wrong":
            return tuple((token + 1) % 300 for token in right)
        if self._kind == "random":
            return tuple(self._random.choices(range(320), k=ask.room))
        good = self._random.randrange(ask.room + 1)
        return (*right[:good], *self._random.choices(range(3, 300), k=self._random.randrange(ask.room + 1)))[: ask.room]


class AnyLength:
    """Another number of tokens for every sequence and step, 0 included."""

    def __init__(self, most: int) -> None:
        self._most, self._random = most, random.Random(most)

    def choose(self, plan: StepPlan) -> list[int]:
        """From 0 to the most there may be."""
        return [self._random.randint(0, self._most) for _ in plan.decoding]

    def observed(self, plan: StepPlan, *rest: object) -> None:
        """Whatever comes."""


@pytest.fixture
def speculate(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run with a proposer and a choice of lengths of one's own."""

    def run(
        folder: Path,
        steps: list[list[Command]],
        proposer: Proposer | None = None,
        lengths: object = None,
        **changes: Any,
    ) -> Any:
        if proposer is not None:
            monkeypatch.setattr("atts.local.build.own_proposer", lambda words: proposer)
            changes["speculate"] = "mine:Own"
        if lengths is not None:
            monkeypatch.setattr("atts.local.build.FixedLength", lambda tokens: lengths)
        return drive(folder, steps, **changes)

    return run


def texts(done: Any) -> dict[int, TokenIds]:
    """What was written, by request."""
    return {key: reply.ids for key, reply in done.replies.items() if isinstance(reply, SampleReply)}


def same(plain: Any, other: Any) -> bool:
    """Whether every reply is the same: ids, ends, and log-probabilities to the bit."""
    assert plain.replies, "nothing was written"
    return bool(plain.replies == other.replies)


@pytest.mark.parametrize("kind", ["right", "wrong", "random", "partly"])
@pytest.mark.parametrize("count", [1, 14])
def test_whatever_is_proposed_the_text_is_that_of_plain_decoding(
    kind: str, count: int, make_model: Make, drive: Drive, speculate: Any
) -> None:
    """Ids, ends and log-probabilities to the bit, under every law, side by side, with any number of tokens proposed."""
    folder, orders = make_model("llama"), requests(count)
    plain = drive(folder, [orders], kernel="native")
    for k in (1, 3, 8):
        done = speculate(folder, [orders], Knowing(texts(plain), kind), kernel="native", k=k)
        assert same(plain, done)
        counts = done.stats.speculation
        assert counts.proposed > 0
        if kind == "right":
            assert done.stats.steps <= plain.stats.steps / (1 + k / 2)
        if kind == "wrong":
            assert (counts.accepted, done.stats.steps) == (0, plain.stats.steps)
    assert same(plain, speculate(folder, [orders], Knowing(texts(plain), kind), AnyLength(8), kernel="native"))


@pytest.mark.parametrize("way", ["draft", "suffix", "auto"])
def test_every_proposer_leaves_the_text_as_it_is(
    way: str, make_model: Make, near: Path, drive: Drive, speculate: Any
) -> None:
    """A draft model, what was written before, and the better of them; with hints from another run beside."""
    folder, orders = make_model("llama"), requests(9, 40)
    plain = drive(folder, [orders], kernel="native")
    hinted: list[Command] = [
        replace(order, request=replace(order.request, draft=texts(plain)[1 + order.request_id // 2]))
        for order in orders
        if isinstance(order, Submit) and isinstance(order.request, SampleRequest)
    ]
    for k in (None, 2, AnyLength(6)):
        lengths = k if isinstance(k, AnyLength) else None
        fixed = k if isinstance(k, int) else None
        drafter = "" if way == "suffix" else str(near)
        options = {"kernel": "native", "drafter": drafter, "speculate": way, "k": fixed}
        done = speculate(folder, [hinted], None, lengths, **options)
        assert same(plain, done)
        assert done.stats.speculation.accepted > 0 or way == "suffix"


def test_a_drafter_that_is_the_target_is_always_right(make_model: Make, drive: Drive, speculate: Any) -> None:
    """Its cache follows every rollback, shared prompt and pre-emption: one stale key or wrong position would show."""
    folder = make_model("llama")
    laws = (Sampling(0.0), Sampling(0.8))
    orders = requests(8, 40, laws)
    late = [replace(order, request_id=order.request_id + 20) for order in orders if isinstance(order, Submit)]
    script = [orders, *[[]] * 9, [*late, Cancel(3)]]
    options = {"kernel": "native", "drafter": str(folder), "speculate": "draft"}
    for room, least in ((4096, 100), (400, 20)):
        done = speculate(folder, script, None, AnyLength(7), kv_tokens=room, max_batch=12, **options)
        counts = done.stats.speculation
        assert counts.proposed > least
        assert counts.accepted >= counts.proposed - 2  # but for a near tie of two ways to compute
