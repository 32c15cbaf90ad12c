"""Tests of GPU steps without a GPU: captured steps are replayed as recorded, and graphs of any size
write the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atts.core import SampleRequest, Sampling, ScoreRequest
from atts.local.batch import StepBatch
from atts.local.cuda.model import disagreement, paged_attention
from atts.local.device_steps import (
    RowBlocks,
    SlotTableCopy,
    StepGraphs,
    bucketed,
    layout_of,
    packed,
    unpacked,
)
from atts.local.loader import Weights, load_weights
from atts.local.logit_sampling import SampledTokens
from atts.local.messages import Command, SampleReply, Submit
from atts.local.model import GatheredAttention, MakeAttend, TorchModel
from atts.local.model_config import ModelConfig, read_model_config
from atts.models import path
from atts.sampling import Seed
from tests.local.speculating import ids_of

LAWS = (Sampling(0), Sampling(0.8), Sampling(1.0, top_p=0.9), Sampling(0.7, top_k=20, min_p=0.02))


def recorded(work: Callable[[], None]) -> Callable[[], None]:
    """Stand in for capturing a graph: do the work once, and return it as the graph to replay."""
    work()
    return work


def mixed() -> list[list[Command]]:
    """Make sampling and scoring requests with several settings. Their arrival times differ, so
    batches have many sizes.
    """
    steps: list[list[Command]] = [[] for _ in range(12)]
    for number in range(11):
        ids = ids_of(number // 3, 5 + 9 * (number % 4))
        law = LAWS[number % len(LAWS)]
        request = SampleRequest(ids, 20 + number, law, Seed(3, sample=number))
        steps[number].append(Submit(2 * number + 1, request))
        steps[number].append(
            Submit(2 * number + 2, ScoreRequest(ids, ids_of(90 + number, 3 + 2 * number)))
        )
    return steps


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[TorchModel]]:
    """Return a function that lists every model built from now on with the given settings."""

    def watch(**settings: Any) -> list[TorchModel]:
        made = list[TorchModel]()

        def make(
            config: ModelConfig, weights: Weights, cache: torch.Tensor, group: int
        ) -> TorchModel:
            assert group == 1, "a target must have no groups"
            made.append(TorchModel(config, weights, cache, **settings))
            return made[-1]

        monkeypatch.setattr("atts.local.builder.TorchModel", make)
        return made

    return watch


def compare(ours: Any, plain: Any) -> None:
    """Check that the ids of two runs are equal and that log-probabilities differ only by
    rounding.
    """
    assert ours.replies.keys() == plain.replies.keys()
    for request_id, reply in plain.replies.items():
        if isinstance(reply, SampleReply):
            assert ours.replies[request_id].ids == reply.ids
        assert ours.replies[request_id].logprobs == pytest.approx(reply.logprobs, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_captured_steps_write_the_same(
    family: str, make_model: Any, drive: Any, models: Any
) -> None:
    """Replayed steps give the same ids and scores as steps without graphs, for all sampling
    settings. Graphs of several sizes are replayed often.
    """
    folder = make_model(family)
    plain = drive(folder, mixed())
    made = models(capture=recorded)
    compare(drive(folder, mixed()), plain)
    graphs = made[0].graphs
    assert graphs.trouble == ""
    assert len(graphs.captured) >= 3
    assert graphs.num_replayed > 2 * len(graphs.captured)


def test_captured_speculation_changes_no_token(
    make_model: Any, near: Path, drive: Any, models: Any
) -> None:
    """With speculation, replaying captured steps of target and drafter changes no token."""
    folder = make_model("llama")
    orders = [
        [Submit(n, SampleRequest(ids_of(n, 12), 24, LAWS[n % 4], Seed(n))) for n in (1, 2, 3, 4)]
    ]
    plain = drive(folder, orders)
    made = models(capture=recorded)
    ours = drive(folder, orders, drafter=str(near), speculate="draft", k=3)
    compare(ours, plain)
    assert ours.stats.speculation.accepted > 0
    assert [model.graphs.num_replayed > 0 for model in made] == [True, True]


def test_chunks_cut_into_kernel_blocks_write_the_same(
    make_model: Any, drive: Any, models: Any
) -> None:
    """Texts do not change if long chunks are cut into blocks of at most as many rows as a kernel
    accepts.
    """
    folder = make_model("qwen3")
    plain = drive(folder, mixed())
    models(most_rows=16)
    compare(drive(folder, mixed()), plain)


def test_if_capturing_fails_steps_run_uncaptured(make_model: Any, drive: Any, models: Any) -> None:
    """If the driver refuses to capture a graph, atts does not try again, writes the same texts, and
    records the reason.
    """

    def refuse(work: Callable[[], None]) -> Callable[[], None]:
        asked.append(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    asked = list[object]()
    folder = make_model("llama")
    plain = drive(folder, mixed())
    made = models(capture=refuse)
    compare(drive(folder, mixed()), plain)
    assert len(asked) == 1
    assert "not permitted" in made[0].graphs.trouble


def batch_of(
    singles: list[tuple[int, int]], spans: list[tuple[int, int, int]] | None = None
) -> StepBatch:
    """Make a batch from single tokens and spans. A single token is given as (table row, length) and
    a span as (table row, length, number of tokens).
    """
    rows = [(row, length, 1) for row, length in singles] + (spans or [])
    counts = np.array([count for *_, count in rows], dtype=np.int64)
    count = int(counts.sum())
    return StepBatch(
        tokens=np.arange(count) + 3,
        positions=np.arange(count),
        slots=np.arange(count) + 1,
        table_rows=np.array([row for row, *_ in rows]),
        query_starts=np.append(0, counts.cumsum()),
        context_lens=np.array([length for _, length, _ in rows]),
        num_logits=counts,
        num_single=len(singles),
        logit_rows=np.arange(count),
    )


def test_consecutive_rows_of_a_sequence_form_one_block() -> None:
    """Consecutive rows of a sequence, such as a proposal or a chunk, form one block. Rows that are
    not consecutive form separate blocks.
    """
    batch = batch_of([(0, 5), (1, 7), (1, 8), (1, 9), (2, 3), (2, 9)], [(4, 20, 13), (5, 30, 2)])
    blocks = RowBlocks.of(batch)
    assert blocks.starts.tolist() == [0, 1, 4, 5, 6, 19]
    assert blocks.counts.tolist() == [1, 3, 1, 1, 13, 2]
    assert blocks.firsts.tolist() == [4, 6, 2, 8, 7, 28]
    cut = RowBlocks.of(batch, 5)
    assert cut.counts.tolist() == [1, 3, 1, 1, 5, 5, 3, 2]
    assert cut.firsts.tolist() == [4, 6, 2, 8, 7, 12, 17, 28]
    assert cut.table_rows.tolist() == [0, 1, 2, 2, 4, 4, 4, 5]
    assert RowBlocks.of(batch_of([], [(0, 4, 2), (1, 4, 4)])).counts.tolist() == [2, 4]
    assert [each.counts.tolist() for each in blocks.classes()] == [[1, 1, 1], [3, 2], [13]]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 33, 255, 256])
def test_padding_of_a_step_changes_nothing(count: int) -> None:
    """Steps are padded with rows to a power of two, which changes no result.

    The additional rows write to a slot that no sequence uses and that no block reads.
    """
    random = np.random.default_rng(count)
    table = random.permutation(count * 300).reshape(count, 300).astype(np.int32) + 1
    batch = batch_of([(row, int(random.integers(1, 290))) for row in range(count)])
    blocks = RowBlocks.of(batch)
    layout = bucketed(batch, blocks)
    spare = count * 300 + 1
    assert layout.rows == 1 << (count - 1).bit_length()
    kept = SlotTableCopy(torch.device("cpu")).update(
        table, blocks.table_rows, int(blocks.lengths.max())
    )
    step = unpacked(torch.from_numpy(packed(batch, [blocks], layout, spare)), layout, kept)
    assert step.slots[count:].tolist() == [spare] * (layout.rows - count)
    assert step.tokens[:count].tolist() == batch.tokens.tolist()
    assert spare not in step.classes[0].slots.flatten().tolist()
    config = replace(
        read_model_config(path("draft"), "draft"), num_heads=2, num_kv_heads=1, head_dim=8
    )
    keys = torch.randn(spare + 1, 1, 8)
    values = torch.randn(spare + 1, 1, 8)
    query = torch.randn(layout.rows, 2, 8)
    exact = unpacked(
        torch.from_numpy(packed(batch, [blocks], own := layout_of(batch, [blocks]), spare)),
        own,
        kept,
    )
    keys[spare] = values[spare] = torch.nan
    filled = GatheredAttention(step, config, 0)(query, keys, values)[:count]
    assert torch.allclose(
        filled, GatheredAttention(exact, config, 0)(query[:count], keys, values), atol=1e-6
    )
    for row in range(count):
        slots = table[row, : batch.context_lens[row]].astype(np.int64)
        looks = (query[row] @ keys[slots, 0].T * config.query_scale).softmax(-1)
        assert torch.allclose(filled[row], (looks @ values[slots, 0]).flatten(), atol=1e-5)


def test_draws_copied_at_once_or_separately_are_equal() -> None:
    """Ids and log-probabilities copied from the device in one transfer equal separate copies, and
    large ids stay exact.
    """
    drawn = SampledTokens(torch.tensor([5, (1 << 24) + 1]), torch.tensor([-0.1, torch.nan]))

    class Elsewhere(torch.Tensor):
        """A tensor that pretends to be on a device other than the CPU."""

        @property
        def is_cpu(self) -> bool:  # type: ignore[override]
            return False

    apart = SampledTokens(drawn.tokens.as_subclass(Elsewhere), drawn.logprobs)
    assert apart.lists()[0] == drawn.lists()[0] == [5, (1 << 24) + 1]
    assert np.array_equal(apart.lists()[1], drawn.lists()[1], equal_nan=True)


def test_a_kernel_that_disagrees_is_not_used() -> None:
    """The check before a kernel's first use detects a wrong scale, a missing row, and NaN
    values.
    """
    config = read_model_config(path("target"), "target")
    cache = torch.zeros(1, 2, 4, 2, 64)

    def wrong(change: Callable[[torch.Tensor], torch.Tensor]) -> float:
        def make(*parts: Any) -> Callable[..., torch.Tensor]:
            return lambda *inputs: change(GatheredAttention(*parts)(*inputs))

        return disagreement(config, make, cache, 0)

    assert wrong(lambda out: out) == 0
    assert wrong(lambda out: out * 1.01) > 1e-4
    assert wrong(lambda out: torch.cat([out[:-1], out[:1]])) > 1e-4
    assert not wrong(lambda out: out * torch.nan) <= 1e30


def test_a_kernel_that_misreads_grouped_caches_is_not_used() -> None:
    """The check before a kernel's first use detects a kernel that misreads grouped caches.

    Layers of a group share a cache, so one layer's keys are not adjacent in memory.
    """
    config = read_model_config(path("target"), "target")
    cache = torch.zeros(1, 2, 4, 2, 64)

    def packed_together(*parts: Any) -> Callable[..., torch.Tensor]:
        exact = GatheredAttention(*parts)

        def attend(query: torch.Tensor, *cached: torch.Tensor) -> torch.Tensor:
            tight = torch.zeros(cached[0].shape).stride()
            return exact(query, *[each.as_strided(each.shape, tight) for each in cached])

        return attend

    assert disagreement(config, packed_together, cache, 0, (3, 3)) == 0
    assert disagreement(config, packed_together, cache, 0, (1, 3)) > 1e-2
    assert disagreement(config, GatheredAttention, cache, 0, (1, 3)) == 0


@pytest.mark.slow
def test_the_paged_kernel_agrees_with_gathered_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, the paged kernel agrees with gathered attention.

    The cases are blocks of 1 to 16 rows, split contexts, windows, and unusual head sizes.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="Triton is not installed")
    base = read_model_config(path("target"), "target")
    for heads, shared, dim in ((4, 2, 64), (6, 2, 96), (5, 1, 16)):
        config = replace(
            base,
            num_layers=2,
            num_heads=heads,
            num_kv_heads=shared,
            head_dim=dim,
            windows=(0, 50),
        )
        paged_attention(config, torch.zeros(1, 2, 4, shared, dim))


@pytest.mark.slow
def test_the_paged_kernel_handles_grouped_layers(
    monkeypatch: pytest.MonkeyPatch, make_model: Any
) -> None:
    """In Triton's interpreter, the paged kernel and gathered attention give the same hidden states,
    for grouped and separate attentions.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="Triton is not installed")
    folder = make_model("qwen3", num_hidden_layers=6, initializer_range=0.12)
    config = read_model_config(folder, "tiny")
    attention, most_rows = paged_attention(config, torch.zeros(1, 2, 4, 1, 1), group=4)
    weights = load_weights(folder, config, torch.float32, torch.device("cpu"), "tiny")
    states = list[torch.Tensor]()
    kernels: tuple[tuple[MakeAttend, int | None], ...] = (
        (GatheredAttention, None),
        (attention, most_rows),
    )
    for attend, rows in kernels:
        cache = torch.zeros(6, 2, 300, config.num_kv_heads, config.head_dim)
        model = TorchModel(config, weights, cache, attention=attend, most_rows=rows, group=4)
        table = torch.arange(1, 299, dtype=torch.int32).view(1, -1).numpy()
        for is_grouped, (begin, count) in ((False, (0, 20)), (True, (20, 1)), (False, (21, 3))):
            model.is_grouped = is_grouped
            batch = batch_of([], [(0, begin + count, count)])
            positions = np.arange(begin, begin + count)
            batch = replace(batch, positions=positions, slots=table[0, positions].astype(np.int64))
            states.append(model.forward(batch, table))
    for gathered, paged in zip(states[:3], states[3:], strict=True):
        assert torch.allclose(gathered, paged, atol=1e-4)
    assert not torch.allclose(states[0][-1], states[1][-1], atol=1e-2)


def test_a_device_is_sent_only_what_changed_in_the_slot_table() -> None:
    """The device's copy of the slot table is updated with the changed entries only, and is correct
    wherever a step reads it.

    A decoding step sends one entry per row. If the table grows, the copy is made again.
    """
    random = np.random.default_rng(3)
    copy = SlotTableCopy(torch.device("cpu"))
    table = np.zeros((8, 300), dtype=np.int32)
    lengths = np.zeros(8, dtype=np.int64)
    before = copy.update(table, np.arange(8), 1)
    for _ in range(200):
        row = int(random.integers(8))
        # In a tenth of the steps, another sequence gets this row of the table.
        if random.random() < 0.1:
            lengths[row] = int(random.integers(1, 300))
            table[row, : lengths[row]] = random.integers(1, 10_000, lengths[row])
        elif lengths[row] < 300:
            table[row, lengths[row]] = random.integers(1, 10_000)
            lengths[row] += 1
        rows = random.permutation(8)[: int(random.integers(1, 9))]
        longest = int(lengths[rows].max())
        kept = copy.update(table, rows, longest)
        assert kept is before
        assert np.array_equal(kept.numpy()[rows, :longest], table[rows, :longest])
    copy.update(table, np.arange(8), 300)
    sent = copy.num_sent
    table[np.arange(8), 17] += 1
    copy.update(table, np.arange(8), 300)
    assert copy.num_sent - sent == 8
    assert copy.update(np.zeros((9, 300), dtype=np.int32), np.arange(9), 5) is not before


def test_grouped_and_exact_steps_of_one_layout_have_their_own_graphs() -> None:
    """A grouped step never replays the graph of an exact step with the same layout."""
    computed = list[bool]()

    def compute(step: Any, is_grouped: bool) -> torch.Tensor:
        computed.append(is_grouped)
        return torch.full((len(step.tokens), 1), float(is_grouped))

    graphs = StepGraphs(compute, recorded, torch.zeros(1, 2, 4, 1, 1))
    table = torch.zeros(1, 64, dtype=torch.int32)
    batch = batch_of([(0, 50)])

    def step(is_grouped: bool) -> float | None:
        hidden = graphs.run(batch, table, RowBlocks.of(batch), is_grouped)
        return None if hidden is None else float(hidden)

    assert [step(False), step(False), step(True)] == [None, 0.0, None]
    assert [step(True), step(False), step(True)] == [1.0, 0.0, 1.0]
    assert len(graphs.captured) == 2


def test_graphs_are_captured_again_after_the_table_moved() -> None:
    """After the slot table moved, atts captures graphs again, because a graph reads the table at
    the address of its capture.
    """
    captures = list[int]()
    graphs = graphs_of(captures)
    batch = batch_of([(0, 50)])
    for table in (torch.zeros(1, 64, dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int32)):
        for _ in range(3):
            graphs.run(batch, table, RowBlocks.of(batch))
    assert len(captures) == 2


def speculative_load(steps: int, seed: int) -> list[StepBatch]:
    """Make steps of up to 48 sequences that grow and restart, with one to eight rows each."""
    random = np.random.default_rng(seed)
    lengths = random.integers(100, 2000, 48)
    batches = list[StepBatch]()
    for at in range(steps):
        active = 48 - (at * 40) // steps
        singles = list[tuple[int, int]]()
        for row in range(active):
            count = int(random.integers(1, 9))
            singles += [(row, int(lengths[row]) + place) for place in range(count)]
            lengths[row] += random.integers(1, count + 1)
            if lengths[row] > 3000:
                lengths[row] = random.integers(60, 300)
        if len(singles) <= 256:
            batches.append(batch_of(singles))
    return batches


def graphs_of(captures: list[int]) -> StepGraphs:
    """Make graphs of steps that compute nothing, and count how often graphs are captured."""

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        captures.append(1)
        return lambda: None

    def compute(step: Any, is_grouped: bool) -> torch.Tensor:
        return torch.zeros(len(step.tokens), 1)

    return StepGraphs(compute, capture, torch.zeros(1, 2, 4, 1, 1))


def test_nearly_all_steps_of_a_speculative_load_are_replayed() -> None:
    """With speculation, over 90 % of the steps replay a captured graph, because few layouts of
    steps occur.

    If the load changes, graphs of its layouts replace the earlier graphs.
    """
    captures = list[int]()
    graphs = graphs_of(captures)
    table = torch.zeros(48, 4096, dtype=torch.int32)
    batches = speculative_load(600, 1)
    for batch in batches:
        graphs.run(batch, table, RowBlocks.of(batch))
    assert len(batches) > 400
    assert graphs.num_replayed > 0.9 * len(batches)
    assert len(captures) < 0.1 * len(batches)


def test_the_least_recently_used_graph_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the limit of graphs, atts captures a new layout, drops the least recently used graph, and
    keeps a layout that is in use.
    """
    captures = list[int]()
    monkeypatch.setattr("atts.local.device_steps._MOST_GRAPHS", 2)
    graphs = graphs_of(captures)
    table = torch.zeros(1, 4096, dtype=torch.int32)

    def step(length: int) -> bool:
        batch = batch_of([(0, length)])
        return graphs.run(batch, table, RowBlocks.of(batch)) is not None

    assert [step(50), step(50), step(100), step(100)] == [False, True, False, True]
    assert step(50)  # this use makes the first layout more recent than the second
    assert [step(200), step(200)] == [False, True]
    assert len(captures) == 3
    assert step(50)
    assert len(captures) == 3, "the layout in use was dropped"
    assert step(100)
    assert len(captures) == 4, "the unused layout was not dropped"
    assert len(graphs.captured) == 2
