"""Tests of the ledger of shared keys and values: each (layer, position) has one owner, and all
models' outputs are unchanged.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from atts.accel import Zoo
from atts.accel.zoo.many_models import ChainModel, Lineage, SlotLedger, divergence_point
from atts.accel.zoo.shared_worker import AddModel
from atts.core import SampleRequest, Sampling, ScoreRequest
from atts.local.cache import PrefixNode
from atts.local.loop import StepLoop
from atts.local.messages import Cancel, LoopReport, Reply, SampleReply, ScoreReply, Submit
from atts.sampling import Seed

from .conftest import MakeZoo, Tune
from .test_chains import OPTIONS, build, config_of

NAMES = ("base", "end", "late", "head", "shallow", "outputs")
Ask = SampleRequest | ScoreRequest


def shallow(folder: Path, layers: int) -> Path:
    """Copy a model with only its first layers."""
    cut = [f"layers.{at}." for at in range(layers, 9)]
    tensors = {
        key: part
        for key, part in load_file(folder / "model.safetensors").items()
        if not any(c in key for c in cut)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text()) | {
        "num_hidden_layers": layers,
        "layer_types": None,
    }
    (folder / "config.json").write_text(json.dumps(said))
    return folder


@pytest.fixture
def relatives(make_zoo: MakeZoo, tune: Tune) -> Zoo:
    """Make models that differ from their base only in late parts. These are the last layer, its
    adapter, the head, the number of layers, or an attention output.
    """
    tuned = {
        "end": ("layers.2.mlp",),
        "head": ("lm_head", "model.norm"),
        "outputs": ("layers.1.self_attn.o_proj",),
    }
    zoo = make_zoo(tuned, {"late": ("layers.2.self_attn.q_proj", "layers.2.mlp")})
    zoo.add("shallow", shallow(tune("shallow", "lm_head"), 2))
    return zoo


def common_requests(rng: random.Random, count: int, longest: int = 25) -> list[Ask]:
    """Make requests whose texts combine three beginnings with six endings, so that many requests
    have a common prefix. Requests to score replace one token near the end.
    """
    begins = [tuple(rng.randrange(3, 300) for _ in range(rng.randrange(12, 40))) for _ in range(3)]
    ends = [
        (number + 3, *(rng.randrange(3, 300) for _ in range(rng.randrange(8, 20))))
        for number in range(6)
    ]
    made = list[Ask]()
    for number in range(count):
        ids = rng.choice(begins) + rng.choice(ends)
        seed = Seed(number, "p", 0, 0, "target", 0)
        if rng.random() < 0.4:
            made.append(ScoreRequest((*ids[:-8], number + 20), ids[-8:]))
        else:
            made.append(
                SampleRequest(
                    ids, rng.randrange(3, longest), Sampling(rng.choice((0.0, 0.9))), seed=seed
                )
            )
    return made


def open_loop(
    zoo: Zoo, replies: dict[int, Reply], kv_tokens: int = 4096, names: Sequence[str] = NAMES
) -> StepLoop:
    """Open one loop for all relatives, which the test drives by hand."""

    def tell(report: LoopReport) -> None:
        replies.update({reply.request_id: reply for reply in report.replies})

    configs = [config_of(zoo, name) for name in names]
    configs = [replace(config, options=replace(OPTIONS, kv_tokens=kv_tokens)) for config in configs]
    loop, _ = build(configs[0], tell)
    loop._handle([AddModel(config) for config in configs[1:]])
    return loop


def drive(
    loop: StepLoop,
    waiting: list[Submit],
    rng: random.Random,
    each: Callable[[], None] = lambda: None,
) -> None:
    """Submit the waiting requests at random steps, and call `each` after each step until all
    requests have ended.
    """
    while waiting or loop._scheduler.num_unfinished:
        while waiting and rng.random() < 0.4:
            loop._handle([waiting.pop()])
        if loop._scheduler.num_unfinished:
            loop.step()
        each()
    loop._report()


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_common_prompts_change_no_bit(seed: int, relatives: Zoo) -> None:
    """Replies on common prompts are bit-identical for a model alone in a loop, for models one after
    the other, and for five relatives together.
    """
    rng = random.Random(seed)
    asks = [
        Submit(n, ask, rng.randrange(len(NAMES)))
        for n, ask in enumerate(common_requests(rng, 40), 1)
    ]
    alone = dict[int, Reply]()
    for at, name in enumerate(NAMES):
        loop = open_loop(relatives, alone, names=[name])
        for ask in asks:
            if ask.model == at:
                drive(loop, [replace(ask, model=0)], rng)
    beside = dict[int, Reply]()
    loop = open_loop(relatives, beside)
    drive(loop, asks[::-1], rng)
    assert {n: said(reply) for n, reply in beside.items()} == {
        n: said(reply) for n, reply in alone.items()
    }


def said(reply: Reply) -> tuple[object, ...]:
    """Return the parts of a reply that do not depend on the cache."""
    assert isinstance(reply, SampleReply | ScoreReply)
    return (reply.logprobs, *((reply.ids, reply.ended) if isinstance(reply, SampleReply) else ()))


def path_ids(node: PrefixNode | None) -> tuple[int, ...]:
    """Return the tokens on the path from the root of the prefix tree to a node. A negative first
    number encodes the kind of text and the model.
    """
    found: tuple[int, ...] = ()
    while node is not None:
        found = node.ids + found
        node = node.parent
    return found


def check_ledger(loop: StepLoop) -> int:
    """Check that the ledger counts every use of a slot, and that identical keys and values share a
    slot. Return the number of slots with several uses.
    """
    scheduler = loop._scheduler
    model = loop._model
    assert isinstance(model, ChainModel)
    ledger = model._ledger
    holders = [Counter[int]() for _ in ledger.starts]
    owned = dict[tuple[int, object, tuple[int, ...]], int]()
    for node in scheduler.tree.nodes():
        ids = path_ids(node)
        for place, slots in enumerate(node.slots if len(node.slots) else ()):
            text = ids[: len(ids) - len(node.ids) + place + 1]
            chain = -text[0] // 2 if text[0] < 0 else 0
            text = text[1:] if text[0] < 0 else text
            for column, slot in enumerate(slots.tolist()):
                holders[column][slot] += 1
                for kin in ledger.kin.get(chain, ()):
                    kept = ledger.kept[kin.unit]
                    if (
                        ledger.column_of(kin.layers - 1) >= column
                        and kept.is_known[slots[kept.column]]
                    ):
                        key = column, frozenset({chain, kin.chain}), text
                        assert owned.setdefault(key, slot) == slot, (
                            "equal keys and values have two owners"
                        )
    for sequence in scheduler.running():
        for slots in scheduler.table[sequence.row, sequence.num_shared : sequence.capacity]:
            for column, slot in enumerate(slots.tolist()):
                holders[column][slot] += 1
    for column, counted in enumerate(holders):
        assert {slot: int(n) for slot, n in enumerate(ledger.holders[column]) if n} == dict(counted)
        assert ledger._columns[column].num_used == len(counted)
    return sum(count > 1 for counted in holders for count in counted.values())


@pytest.mark.parametrize("seed", range(3))
def test_every_layer_and_position_is_owned_once(seed: int, relatives: Zoo) -> None:
    """At every step of a random schedule with cancellations and a small cache, each slot in the
    ledger has one owner.
    """
    rng = random.Random(seed)
    replies = dict[int, Reply]()
    loop = open_loop(relatives, replies, kv_tokens=130)
    asks = [
        Submit(n, ask, rng.randrange(len(NAMES)))
        for n, ask in enumerate(common_requests(rng, 120, 70), 1)
    ]
    shared = list[int]()

    def each() -> None:
        shared.append(check_ledger(loop))
        if rng.random() < 0.1:
            loop._handle([Cancel(rng.randrange(120))])

    drive(loop, asks, rng, each)
    assert max(shared) > 50
    assert loop._scheduler.num_preempted > 0
    assert loop._scheduler.num_evicted > 0
    loop._scheduler.store.free([])
    for run in loop._scheduler.tree.evict(10**6):
        loop._scheduler.store.free([run])
    assert loop._scheduler.store.num_free == 130


def test_a_common_prompt_is_prefilled_once_in_shared_layers(relatives: Zoo) -> None:
    """For a prompt that another model has computed, a second model computes only the last layers,
    which are its own.
    """
    ids = tuple(range(5, 45))
    for name, unit in (("end", 5), ("late", 5), ("head", 5), ("shallow", 3), ("outputs", 3)):
        loop = open_loop(relatives, {}, names=["base", name])
        model = loop._model
        counts = list[int]()
        assert isinstance(model, ChainModel)
        for chain in (1, 0):
            request = SampleRequest(ids, 1, Sampling(0.0), seed=Seed(1, "p", 0, 0, "target", 0))
            drive(loop, [Submit(2 - chain, request, chain)], random.Random(0))
            counts.append(model.unit_rows)
        units = 8
        assert counts[1] - counts[0] == (units - unit) * len(ids), name


def test_keys_and_values_are_shared_up_to_the_first_difference() -> None:
    """A layer's keys and values are shared although its queries differ; a model with another head
    computes only its last layer again.
    """
    base = Lineage(("e", "a0", "m0", "a1", "m1", "h"), ("k0", "k1"), 3)
    cases = {
        ("x", "a0", "m0", "a1", "m1", "h"): (0, 0),
        ("e", "q", "m0", "a1", "m1", "h"): (1, 1),
        ("e", "a0", "x", "a1", "m1", "h"): (1, 2),
        ("e", "a0", "m0", "q", "m1", "h"): (2, 3),
        ("e", "a0", "m0", "a1", "m1", "x"): (2, 3),
    }
    for units, expected in cases.items():
        assert divergence_point(base, Lineage(units, ("k0", "k1"), 3)) == expected
    assert divergence_point(base, Lineage(("e", "x", "m0", "a1", "m1", "h"), ("y", "k1"), 3)) == (
        0,
        1,
    )


def test_slots_are_freed_with_their_last_holder() -> None:
    """A shared slot outlives the sequence that computed it, and is freed when no other model holds
    it.
    """
    ledger = SlotLedger(10, 4)
    one, other = (
        Lineage(("e", "a0", "m0", tail, "m1", "h"), ("k0", tail), 3) for tail in ("a1", "b1")
    )
    parents = list[list[int]]()
    ledger.relate({0: one, 1: other}, parents.append)
    assert parents == [[0, 0]]
    assert ledger.starts == (0, 1)
    first = ledger.allocate(3)
    (kin,) = ledger.kin[1]
    second = ledger.borrow(kin, first[:2])
    assert (second[:, 0] == first[:2, 0]).all()
    ledger.free([first])
    assert [column.num_used for column in ledger._columns] == [2, 2]
    assert ledger.num_free == 8
    ledger.free([second])
    assert ledger.num_free == 10
