"""Tests of the key-value cache: it shares and keeps prefixes, evicts the oldest first, and never
loses a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.core import SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.errors import EngineError
from atts.local.batch import Sequence, ending, new_sequence
from atts.local.builder import MakeModel
from atts.local.cache import PrefixNode, PrefixTree, SlotAllocator
from atts.local.cpu.compiling import native_library
from atts.local.cpu.model import NativeModel
from atts.local.devices import is_out_of_memory
from atts.local.loader import Weights
from atts.local.messages import Cancel, Command, FailureReply, Submit, WorkerConfig
from atts.local.model import TorchModel
from atts.local.scheduler import Scheduler, SchedulerConfig
from atts.sampling import Seed, uniforms


def ids_of(seed: int, count: int) -> TokenIds:
    """Draw random token ids, none of which is a special token."""
    return tuple(
        torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    )


def test_siblings_share_one_prompt_in_time_and_memory(
    make_model: Callable[..., Path], drive: Any
) -> None:
    """Sixteen rollouts share a prompt of 1,024 tokens, which is computed and stored once.

    The cache uses at most 15 % more slots than the prompt and the rollouts' own tokens need.
    """
    folder = make_model("llama", max_position_embeddings=2048, eos_token_id=None)
    prompt = ids_of(1, 1024)
    tail = 96
    orders: list[Command] = [
        Submit(n, SampleRequest(prompt, tail, Sampling(), Seed(sample=n))) for n in range(1, 17)
    ]
    done = drive(folder, [orders], kernel="native", kv_tokens=20_000, chunk_tokens=256)
    assert len(done.replies) == 16
    assert done.stats.prefilled_tokens == 1024
    assert done.stats.kv_peak <= 1.15 * (1024 + 16 * tail)


def test_a_rollouts_next_turn_feeds_only_new_tokens(
    make_model: Callable[..., Path], drive: Any
) -> None:
    """In a rollout's next turn, all earlier tokens come from the cache except the last one, which
    was sampled but not yet computed.
    """
    folder = make_model("llama", eos_token_id=None)
    prompt = ids_of(2, 50)
    first = drive(folder, [[Submit(1, SampleRequest(prompt, 20, Sampling(0)))]]).replies[1].ids
    quiet: list[Command] = []
    later: list[list[Command]] = [
        [Submit(1, SampleRequest(prompt, 20, Sampling(0)))],
        *[quiet] * 25,
    ]
    again = [*later, [Submit(2, SampleRequest(prompt + first + (7, 8), 5, Sampling(0)))]]
    done = drive(folder, again)
    assert done.replies[2].cached_tokens == 50 + 20 - 1
    assert done.stats.prefilled_tokens == 50 + 3


def test_sampling_after_a_scored_chunk_needs_no_first_forward(
    make_model: Callable[..., Path], drive: Any
) -> None:
    """If a chunk was scored, a request that continues after it needs no forward pass over the
    prompt and the chunk.

    Scoring leaves their keys and values and the last logits in the cache.
    """
    folder = make_model("llama", eos_token_id=None)
    prompt = ids_of(3, 40)
    chunk = ids_of(4, 10)
    more = ids_of(5, 6)
    script: list[list[Command]] = [
        [Submit(1, ScoreRequest(prompt, chunk))],
        [Submit(2, SampleRequest(prompt + chunk, 1, Sampling(0)))],
        [Submit(3, ScoreRequest(prompt + chunk, more))],
    ]
    done = drive(folder, script)
    assert done.replies[2].cached_tokens == done.replies[3].cached_tokens == 50
    assert done.stats.prefilled_tokens == 40
    assert done.stats.free_tokens == 2
    assert done.stats.scored_tokens == 16


def test_slots_of_running_requests_are_counted_as_locked() -> None:
    """While a request runs, the slots that it reads or writes are locked, so that no other request
    gets them.
    """
    tree = PrefixTree(0)
    scheduler = Scheduler(SchedulerConfig(512, 4, 64, 256), tree)
    request = SampleRequest(ids_of(6, 40), 4, Sampling(0))
    for number in (1, 2):
        scheduler.add(new_sequence(number, request, 0.0))
    (chunk,) = scheduler.schedule().prefills
    assert (chunk.start, chunk.stop) == (0, 40)
    first = scheduler.sequence(1)
    assert scheduler.num_locked == first.capacity >= 40
    first.num_computed = 40
    scheduler.cache_prefix(first)
    scheduler.schedule()
    second = scheduler.sequence(2)
    written = second.capacity - second.num_shared
    assert scheduler.num_locked == first.capacity + written, "a shared prompt must count once"
    scheduler.cancel(1)
    assert scheduler.num_locked == 40 + written, "the prompt must stay locked for the other request"
    scheduler.cancel(2)
    assert scheduler.num_locked == 0
    assert tree.num_evictable >= 39


def test_a_prefill_that_has_its_slots_takes_no_more() -> None:
    """A prompt of 32 tokens gets its slots with the first half. The second half takes no more
    slots.
    """
    scheduler = Scheduler(SchedulerConfig(512, 4, 16, 256), PrefixTree(0))
    scheduler.add(new_sequence(1, SampleRequest(ids_of(6, 32), 40, Sampling(0)), 0.0))
    (first,) = scheduler.schedule().prefills
    assert first.stop == 16
    sequence = scheduler.sequence(1)
    taken = sequence.capacity
    assert taken == 32
    sequence.num_computed = first.stop
    (second,) = scheduler.schedule().prefills
    assert second.stop == taken
    assert sequence.capacity == taken


def _flip(ids: tuple[int, ...], others: tuple[int, ...]) -> int | None:
    """Return the difference of the ids at the first position where the two texts differ, or None if
    they are the same.
    """
    return next((one - other for one, other in zip(ids, others, strict=True) if one != other), None)


def test_a_short_cache_evicts_and_still_answers_everything(
    make_model: Callable[..., Path], drive: Any
) -> None:
    """With far more work than slots, the cache evicts and pre-empts, answers every request, and
    never uses more slots than exist.
    """
    folder = make_model("llama", eos_token_id=None)
    orders: list[Command] = [
        Submit(n, SampleRequest(ids_of(n, 30), 30, Sampling(), Seed(sample=n)))
        for n in range(1, 21)
    ]
    done = drive(folder, [orders], kv_tokens=150)
    plenty = drive(folder, [orders], kv_tokens=4096)
    assert done.replies.keys() == plenty.replies.keys()
    flips = [_flip(done.replies[n].ids, plenty.replies[n].ids) for n in done.replies]
    # The last bits of a sum depend on the batch, so a random number near the border between two ids
    # may select the other id.
    assert sum(flip is not None for flip in flips) <= 2
    assert all(abs(flip) <= 2 for flip in flips if flip is not None)
    assert done.stats.evicted_tokens > 0
    assert done.stats.kv_peak <= 150


def test_a_thousand_rollouts_with_random_cancels_leak_nothing(
    make_model: Callable[..., Path], drive: Any
) -> None:
    """A thousand rollouts are requested, and some are cancelled at random. All others are answered,
    no slot stays locked, and no request waits too long.
    """
    folder = make_model("llama", eos_token_id=None, num_hidden_layers=1)
    choice = np.random.default_rng(0)
    steps: list[list[Command]] = [[] for _ in range(120)]
    cancelled: set[int] = set()
    for request_id in range(1, 1001):
        # the step at which this request arrives, ten requests per step
        at = (request_id - 1) // 10
        request = SampleRequest(
            ids_of(request_id % 7, 20),
            int(choice.integers(1, 9)),
            Sampling(),
            Seed(sample=request_id),
        )
        steps[at].append(Submit(request_id, request))
        if choice.random() < 0.3:
            steps[min(119, at + int(choice.integers(0, 20)))].append(Cancel(request_id))
            cancelled.add(request_id)
    done = drive(folder, steps, kernel="native", kv_tokens=600, max_batch=32)
    assert set(range(1, 1001)) - cancelled <= set(done.replies)
    assert done.stats.kv_locked == 0
    assert done.stats.kv_used <= 600
    answered = list(done.replies)
    overtaken = max(
        place - sum(other < request_id for other in answered)
        for place, request_id in enumerate(answered)
    )
    assert overtaken <= 8 * 32, "a request waited while too many later ones were served"


def memory_for(tokens: int) -> MakeModel:
    """Return a function that makes native models. Each model raises a memory error if a step has
    more tokens than given here.
    """

    def allocate(rows: int, columns: int) -> Any:
        if rows > tokens:
            raise MemoryError(f"no room for {rows} rows")
        return np.empty((rows, columns), dtype=np.float32)

    def make(config: WorkerConfig, weights: Weights, cache: torch.Tensor) -> NativeModel:
        library, _ = native_library(config.name, config.model)
        return NativeModel(library, config.model, weights, cache, threads=1, allocate=allocate)

    return make


def test_steps_shrink_until_they_fit_into_memory(
    make_model: Callable[..., Path], drive: Any
) -> None:
    """If memory is short, the engine halves chunks and batches until a step fits, and its answers
    do not change.
    """
    folder = make_model("llama", eos_token_id=None)
    orders: list[Command] = [
        Submit(n, SampleRequest(ids_of(n, 30), 12, Sampling(0))) for n in range(1, 11)
    ]
    orders += [Submit(n, ScoreRequest(ids_of(n, 20), ids_of(n + 50, 25))) for n in range(11, 15)]
    done = drive(folder, [orders], memory_for(6), kernel="native")
    plenty = drive(folder, [orders], kernel="native")
    assert done.stats.shrunk >= 3
    assert done.stats.kv_locked == done.stats.failed == 0
    for request_id, reply in plenty.replies.items():
        if request_id <= 10:
            assert done.replies[request_id].ids == reply.ids
        assert done.replies[request_id].logprobs == pytest.approx(reply.logprobs, abs=1e-4)


def test_the_loop_survives_having_no_memory_at_all(
    make_model: Callable[..., Path], drive: Any
) -> None:
    """If memory is too small for a single token, running requests fail with advice, and no slot
    stays locked.
    """
    folder = make_model("llama", eos_token_id=None)
    orders: list[Command] = [
        Submit(n, SampleRequest(ids_of(n, 30), 12, Sampling(0))) for n in range(1, 4)
    ]
    done = drive(
        folder,
        [orders, *[list[Command]()] * 30, [Submit(4, ScoreRequest((5, 6), (7,)))]],
        memory_for(0),
    )
    assert done.replies.keys() == {1, 2, 3, 4}
    for reply in done.replies.values():
        assert (reply.kind, reply.problem) == ("memory", "a step does not fit into memory")
        assert "kv_tokens" in reply.advice
    assert done.stats.kv_locked == done.stats.kv_used == 0


def test_every_way_of_running_out_of_memory_is_recognised() -> None:
    """The memory errors of numpy, of torch on a CPU, and of torch on a GPU are recognised as such.
    Other errors are not.
    """
    for ask in (lambda: np.empty(1 << 50), lambda: torch.empty(1 << 50)):
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            ask()
        assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))


def refusing(call: str, wrong: Callable[..., bool], error: Exception) -> MakeModel:
    """Return a function that makes models in which one method raises an error if `wrong` is true of
    its arguments.
    """

    def make(config: WorkerConfig, weights: Weights, cache: torch.Tensor) -> Any:
        model = TorchModel(config.model, weights, cache)
        proper = getattr(model, call)

        def refuse(*arguments: Any) -> Any:
            if wrong(*arguments):
                raise error
            return proper(*arguments)

        setattr(model, call, refuse)
        return model

    return make


BAD = 299
BAD_DRAW = float(uniforms(Seed(sample=3), 6)[4])
REFUSALS: dict[str, tuple[str, Callable[..., bool]]] = {
    "in the forward": ("forward", lambda batch, table: BAD in batch.tokens),
    "when scoring": ("score", lambda hidden, tokens, kept: BAD in tokens),
    "when scoring from the cache": ("logprobs", lambda logits, tokens: BAD in tokens),
    "when drawing": ("sample", lambda logits, sampling, draws: BAD_DRAW in draws),
}
ERRORS = (
    ValueError("no such row"),
    RuntimeError("CUDA error: unspecified"),
    AssertionError(),
    MemoryError("no room"),
)


@pytest.mark.parametrize(
    ("refusal", "error"),
    [*zip(REFUSALS, ERRORS, strict=True), *zip(REFUSALS, ERRORS[::-1], strict=True)],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_a_request_that_breaks_a_step_fails_alone(
    refusal: str, error: Exception, make_model: Callable[..., Path], drive: Any
) -> None:
    """If the prompt, scoring or sampling of a request raises an error, only this request fails. The
    batch's other requests continue.
    """
    folder = make_model("llama", eos_token_id=None)
    call, wrong = REFUSALS[refusal]
    bad = {"forward": {7, 9}, "score": {7, 9}, "logprobs": {10}, "sample": {3}}[call]
    first: list[Command] = [
        Submit(n, SampleRequest(ids_of(n, 20), 6, Sampling(1.0), Seed(sample=n)))
        for n in range(1, 7)
    ]
    first += [
        Submit(7, ScoreRequest(ids_of(7, 20), (5, BAD, 6))),
        Submit(8, ScoreRequest(ids_of(8, 20), (5, 6))),
    ]
    first += [Submit(9, ScoreRequest(ids_of(9, 20), (BAD, 5)))]
    later: list[Command] = [
        Submit(10, ScoreRequest(ids_of(1, 20), (BAD,))),
        Submit(11, ScoreRequest(ids_of(1, 20), (8,))),
    ]
    script = [first, *[list[Command]()] * 60, later]
    plain = drive(folder, script)
    done = drive(folder, script, refusing(call, wrong, error))
    failed = {number for number, reply in done.replies.items() if isinstance(reply, FailureReply)}
    assert bad <= failed <= bad | {10}
    for number in failed:
        assert done.replies[number].kind == (
            "memory" if isinstance(error, MemoryError) else "broken"
        )
        assert isinstance(done.replies[number].error("the model"), EngineError)
    assert done.replies.keys() == plain.replies.keys()
    for number in plain.replies.keys() - failed:
        assert done.replies[number].logprobs == pytest.approx(
            plain.replies[number].logprobs, abs=1e-4
        )
    assert done.stats.kv_locked == 0
    assert done.stats.failed == len(failed)


def test_an_error_in_one_sequences_bookkeeping_fails_it_alone(
    make_model: Callable[..., Path], drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If adding a token to a sequence raises an error, only this sequence fails. The step's other
    sequences continue.
    """

    def ended(sequence: Sequence, *rest: Any) -> Any:
        if sequence.request_id == 2 and len(sequence.logprobs) == 3:
            raise KeyError("no such piece")
        return ending(sequence, *rest)

    monkeypatch.setattr("atts.local.loop.ending", ended)
    orders: list[Command] = [
        Submit(n, SampleRequest(ids_of(n, 20), 6, Sampling(0))) for n in range(1, 4)
    ]
    done = drive(make_model("llama", eos_token_id=None), [orders])
    assert [type(done.replies[n]).__name__ for n in (1, 2, 3)] == [
        "SampleReply",
        "FailureReply",
        "SampleReply",
    ]
    assert "KeyError" in done.replies[2].problem
    assert [len(done.replies[n].ids) for n in (1, 3)] == [6, 6]
    assert done.stats.kv_locked == 0


def test_priority_overtakes_but_does_not_starve(
    make_model: Callable[..., Path], drive: Any
) -> None:
    """An urgent request is served before others that wait, even if it arrives later. A request of
    low priority is nevertheless served while urgent requests keep arriving.
    """
    folder = make_model("llama", eos_token_id=None, num_hidden_layers=1)

    def request(seed: int, priority: int) -> SampleRequest:
        return SampleRequest(ids_of(seed, 10), 4, Sampling(0), priority=priority)

    crowd: list[Command] = [
        Submit(1, request(1, 1)),
        *[Submit(n, request(n, 0)) for n in range(2, 12)],
    ]
    steps: list[list[Command]] = [crowd]
    steps.extend([Submit(n, request(n, 0))] for n in range(12, 500))
    answered = list(drive(folder, steps, kernel="native", max_batch=1).replies)
    assert 1 in answered[:300], (
        "the low-priority request must finish while urgent ones still arrive"
    )
    early: list[Command] = [Submit(n, request(n, 0)) for n in range(1, 9)]
    urgent: list[list[Command]] = [early, [], [Submit(9, request(9, -1))]]
    assert list(drive(folder, urgent, kernel="native", max_batch=1).replies).index(9) == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("iilue"), st.lists(st.integers(0, 2), min_size=1, max_size=7)),
        max_size=40,
    )
)
def test_the_prefix_tree_agrees_with_a_dictionary(actions: list[tuple[str, list[int]]]) -> None:
    """After inserts, locks, unlocks and evictions, the prefix tree maps the same prefixes to the
    same slots as a dictionary.
    """
    allocator = SlotAllocator(500)
    tree = PrefixTree(4)
    truth: dict[TokenIds, int] = {}
    locked: list[tuple[Any, TokenIds]] = []
    for action, values in actions:
        ids = tuple(values)
        if action == "i":
            slots = allocator.allocate(len(ids))
            found = tree.insert(ids, slots)
            allocator.free([slots[: found.length]])
            for end in range(found.length + 1, len(ids) + 1):
                truth[ids[:end]] = int(slots[end - 1])
        elif action == "l":
            match = tree.match(ids, len(ids))
            tree.lock(match.node)
            locked.append((match.node, ids[: match.length]))
        elif action == "u" and locked:
            tree.unlock(locked.pop()[0])
        elif action == "e":
            freed = [int(slot) for run in tree.evict(len(ids)) for slot in run]
            allocator.free([np.array(freed, dtype=np.int32)])
            truth = {key: slot for key, slot in truth.items() if slot not in freed}
        match = tree.match(ids, len(ids))
        known = next((end for end in range(len(ids), 0, -1) if ids[:end] in truth), 0)
        assert match.slots.tolist() == [truth[ids[: end + 1]] for end in range(known)]
        assert tree.num_cached == allocator.num_used == len(truth)
        kept = {kept_ids[:end] for _, kept_ids in locked for end in range(1, len(kept_ids) + 1)}
        assert kept <= set(truth), "a locked sequence was evicted"
        assert tree.num_evictable == len(truth) - len(kept)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["use", "lock", "unlock", "evict"]), st.integers(1, 8)),
        max_size=60,
    )
)
def test_the_least_recently_used_entry_is_evicted_first(actions: list[tuple[str, int]]) -> None:
    """The cache evicts the least recently used entry first and never a locked entry.

    Using, locking or unlocking an entry makes it recent.
    """
    tree = PrefixTree(max_logits=0)
    used = list[int]()
    locked = dict[int, PrefixNode]()
    for action, first in actions:
        if action == "use":
            tree.insert((first, 0), np.array([first, first + 10], dtype=np.int32))
            used = [other for other in used if other != first] + [first]
        elif action == "lock" and first in used and first not in locked:
            locked[first] = tree.match((first, 0), 2).node
            tree.lock(locked[first])
            used = [other for other in used if other != first] + [first]
        elif action == "unlock" and first in locked:
            tree.unlock(locked.pop(first))
        elif action == "evict":
            oldest = [other for other in used if other not in locked][:1]
            assert [int(run[0]) for run in tree.evict(1)] == oldest
            used = [other for other in used if other not in oldest]


def test_a_slot_that_is_freed_twice_is_noticed() -> None:
    """Freeing a slot twice raises an error, because the allocator would give the slot to two
    sequences.
    """
    allocator = SlotAllocator(3)
    taken = allocator.allocate(2)
    allocator.free([taken])
    assert allocator.peak_used == 2
    with pytest.raises(AssertionError, match="twice"):
        allocator.free([taken])


def test_scoring_continues_after_a_known_beginning(
    make_model: Callable[..., Path], drive: Any
) -> None:
    """If the first tokens of a chunk are already scored, the engine computes only the others. The
    scores are the same as if the whole chunk were computed.
    """
    folder = make_model("llama", eos_token_id=None)
    prompt = ids_of(3, 40)
    shared = ids_of(4, 30)
    one = shared + ids_of(5, 6)
    other = shared + ids_of(6, 9)
    orders: list[Command] = [
        Submit(n, ScoreRequest(prompt, chunk)) for n, chunk in ((1, one), (2, other), (3, one))
    ]
    done = drive(folder, [[order] for order in orders])
    first, second, third = (done.replies[n] for n in (1, 2, 3))
    assert second.logprobs[:30] == first.logprobs[:30]
    assert second.logprobs == pytest.approx(
        drive(folder, [orders[1:2]]).replies[2].logprobs, abs=1e-5
    )
    assert third.logprobs[:-1] == first.logprobs[:-1]
    assert third.logprobs[-1] == pytest.approx(first.logprobs[-1], abs=1e-5)
    assert (second.cached_tokens, third.cached_tokens) == (69, 74)
    assert done.stats.scored_tokens == 36 + 39 + 36
    assert done.stats.free_tokens == 30 + 35


def test_draws_for_a_known_text_are_computed_again(
    make_model: Callable[..., Path], drive: Any
) -> None:
    """If a request samples while it scores a chunk, the engine computes the chunk even if its
    scores are cached. Sampling needs whole distributions, but the cache has only log-probabilities.
    """
    folder = make_model("llama", eos_token_id=None)
    prompt = ids_of(3, 40)
    chunk = ids_of(4, 30)
    drawn = ScoreRequest(prompt, chunk, draw=SampleRequest(prompt, 40, Sampling(0.7), Seed(1)))
    done = drive(folder, [[Submit(1, ScoreRequest(prompt, chunk))], [Submit(2, drawn)]])
    fresh = drive(folder, [[Submit(2, drawn)]]).replies[2]
    assert done.replies[2].beginning.ids == fresh.beginning.ids
    assert done.replies[2].logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


@pytest.mark.parametrize("room", [4000, 150])
def test_scores_do_not_depend_on_what_was_scored_before(
    room: int, make_model: Callable[..., Path], drive: Any
) -> None:
    """Chunks that share their first tokens get the same scores in whatever order they are scored,
    with and without evictions.
    """
    folder = make_model("llama", eos_token_id=None)
    numbers = np.random.default_rng(1)
    texts = [ids_of(1, 60)]
    for seed in range(14):
        known = texts[int(numbers.integers(len(texts)))]
        new = ids_of(10 + seed, int(numbers.integers(1, 12)))
        texts.append(known[: int(numbers.integers(20, len(known) + 1))] + new)
    requests = [
        ScoreRequest(text[:cut], text[cut:])
        for text in texts
        for cut in [int(numbers.integers(10, 20))]
    ]
    orders: list[Command] = [Submit(n, request) for n, request in enumerate(requests, 1)]
    done = drive(folder, [orders[n : n + 3] for n in range(0, len(orders), 3)], kv_tokens=room)
    for number, order in enumerate(orders, 1):
        fresh = drive(folder, [[order]]).replies[number].logprobs
        assert done.replies[number].logprobs == pytest.approx(fresh, abs=1e-4)
    assert done.stats.free_tokens > 0


_BEGINNINGS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(0, 8)), max_size=25
)


@given(_BEGINNINGS, st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_the_tree_returns_the_scores_that_were_stored(
    texts: list[tuple[list[int], int]], forget: int
) -> None:
    """The prefix tree returns stored scores even after splits and evictions, and never returns more
    scores than tokens.
    """
    tree = PrefixTree(4)
    allocator = SlotAllocator(400)

    def score(ids: TokenIds) -> list[float]:
        return [float(hash(ids[: at + 1]) % 1009) for at in range(len(ids))]

    for number, (text, first) in enumerate(texts):
        ids = tuple(text)
        found = tree.match(ids, len(ids))
        known = tree.scores(found.node, first)
        assert known == score(ids)[first : first + len(known)]
        assert first + len(known) <= max(first, found.length)
        slots = allocator.allocate(len(ids))
        inserted = tree.insert(ids, slots)
        allocator.free([slots[: inserted.length]])
        tree.keep_scores(inserted.node, score(ids)[first:])
        assert tree.scores(inserted.node, first) == score(ids)[first:]
        if number % 5 == 4:
            allocator.free(tree.evict(forget))
        pending = [tree.root(0)]
        held = 0
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            held += 0 if node.scores is None else len(node.scores)
        assert held <= tree.num_cached
