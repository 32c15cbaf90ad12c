"""Speculation changes how many steps are taken, and not one token or bit of what is written."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest

from atts.core import SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.local.batch import StepPlan
from atts.local.drafting import ModelDrafter
from atts.local.loop import StepLoop
from atts.local.messages import (
    Cancel,
    Command,
    SampleReply,
    ScoreReply,
    Submit,
)
from atts.local.speculating import Speculation
from atts.speculation import Ask, TokenProposal
from atts.tokenizing import StopMatcher
from tests.local.speculating import (
    AnyLength,
    Driven,
    Knowing,
    Make,
    config_of,
    counts,
    ids_of,
    requests,
    run,
    same,
    texts,
)

MIXED = (Sampling(0.0), Sampling(0.8))


@pytest.mark.parametrize("count", [1, 14])
def test_whatever_is_proposed_the_text_is_that_of_plain_decoding(count: int, make_model: Make) -> None:
    """Ids, ends and log-probabilities to the bit, under every law, side by side, with any number of tokens proposed."""
    folder, orders = make_model("llama"), requests(count)
    plain = run(folder, [orders])
    for kind, k in (("right", 1), ("right", 8), ("wrong", 3), ("random", 4), ("partly", 6), ("partly", 2)):
        done = run(folder, [orders], Knowing(texts(plain), kind), k)
        assert same(plain, done), (kind, k)
        assert counts(done).proposed > 0
        if kind == "right":
            assert done.stats.steps <= plain.stats.steps / (1 + k / 2)
        if kind == "wrong":
            assert (counts(done).accepted, done.stats.steps) == (0, plain.stats.steps)
    assert same(plain, run(folder, [orders], Knowing(texts(plain), "partly"), AnyLength(8)))
    off = run(folder, [orders], Knowing(texts(plain), "right"), 0)
    assert off.stats.speculation is None, "no tokens at a time is plain decoding"
    assert (off.stats.steps, off.replies) == (plain.stats.steps, plain.replies)


@pytest.mark.parametrize("count", [1, 9])
def test_lengths_chosen_by_goodput_change_no_token(count: int, make_model: Make, near: Path) -> None:
    """With `k=auto`, whatever this machine takes for its steps; what was chosen and expected is in the counters."""
    folder, orders = make_model("llama"), requests(count, 60)
    plain = run(folder, [orders])
    for done in (run(folder, [orders], Knowing(texts(plain), "partly"), None), run(folder, [orders], None, None, near)):
        assert same(plain, done)
        found = counts(done)
        assert found.proposed <= found.chosen
        assert found.choices > 0
        assert 0 < found.came_tokens <= done.stats.sampled_tokens + found.accepted
        assert found.expected_tokens > 0
        assert found.expected_seconds > 0


def test_lengths_of_requests_tested_by_ratio_do_not_depend_on_timings(make_model: Make, near: Path) -> None:
    """What they write depends on what is proposed, so `k=auto` is a fixed number for them, whatever runs beside."""
    orders = [
        replace(each, request=replace(each.request, acceptance="ratio"))
        for each in requests(4, 40)
        if isinstance(each.request, SampleRequest)
    ]
    fixed, chosen = (run(make_model("llama"), [[*orders]], None, k, near) for k in (8, None))
    assert same(fixed, chosen)
    assert counts(chosen).chosen == counts(fixed).chosen > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("count", [1, 2, 5, 16, 32])
def test_the_long_sweep(family: str, count: int, make_model: Make, near: Path) -> None:
    """Every family, number of sequences, number of tokens and proposer."""
    folder, orders = make_model(family), requests(count, 60)
    plain = run(folder, [orders])
    for k in (*range(9), AnyLength(3), AnyLength(8), AnyLength(32)):
        for kind in ("right", "wrong", "random", "partly"):
            assert same(plain, run(folder, [orders], Knowing(texts(plain), kind), k)), (kind, k)
        assert same(plain, run(folder, [orders], None, k, near)), k
        for way in ("suffix", "auto"):
            assert same(plain, run(folder, [orders], None, k, near, speculate=way)), (way, k)


@pytest.mark.parametrize("way", ["draft", "suffix", "auto"])
def test_every_proposer_leaves_the_text_as_it_is(way: str, make_model: Make, near: Path) -> None:
    """A draft model, what was written before, and the better of them; with hints from another run beside."""
    folder, orders = make_model("llama"), requests(9, 40)
    plain = run(folder, [orders])
    hinted = [replace(order, request=hint(order.request, texts(plain)[1 + order.request_id // 2])) for order in orders]
    for k in (3, AnyLength(6)):
        done = run(folder, [[*hinted]], None, k, near if way != "suffix" else None, speculate=way)
        assert same(plain, done)
        assert counts(done).accepted > 0 or way == "suffix"


def hint(request: object, text: TokenIds) -> SampleRequest:
    """The request with a text that somebody has."""
    assert isinstance(request, SampleRequest)
    return replace(request, draft=text)


def storm(
    folder: Path, drafter: Path | None = None, room: int = 4096, laws: Sequence[Sampling] = MIXED, **ways: Any
) -> Driven:
    """Two waves of requests, some of them cancelled, in a cache of so many slots."""
    orders = requests(8, 40, laws)
    late = [replace(order, request_id=order.request_id + 20) for order in orders]
    script: list[list[Command]] = [[*orders], *[[]] * 9, [*late, Cancel(3)], [Cancel(24)]]
    return run(
        folder,
        script,
        lengths=AnyLength(7, -4),
        drafter=drafter,
        kv_tokens=room,
        max_batch=12 if room > 300 else 4,
        **ways,
    )


@pytest.mark.parametrize("room", [4096, 220])
def test_a_drafter_that_is_the_target_is_always_right(room: int, make_model: Make) -> None:
    """Its cache follows every rollback, shared prompt and pre-emption: one stale key or wrong position would show."""
    assert is_always_right(make_model("llama"), room)


def is_always_right(folder: Path, room: int) -> bool:
    """Whether all stands that the target drafts for itself, up to a place whose number is another than the target's."""
    numbers, wrong, missing = random.Random(1), dict[int, int](), list[int]()
    settled, propose = ModelDrafter.settled, ModelDrafter.propose

    def exchanged(ask: Ask) -> Ask:
        wrong[ask.key] = next((place for place in range(ask.room) if numbers.random() < 0.1), ask.room)
        uniforms = ask.uniforms.copy()
        uniforms[wrong[ask.key] : wrong[ask.key] + 1] = (uniforms[wrong[ask.key] : wrong[ask.key] + 1] + 0.5) % 1
        return replace(ask, uniforms=uniforms)

    def watched(drafter: ModelDrafter, key: int, proposal: TokenProposal, stood: int) -> None:
        missing.append(max(0, min(wrong[key], len(proposal.tokens)) - stood))
        settled(drafter, key, proposal, stood)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelDrafter, "propose", lambda drafter, asks: propose(drafter, [exchanged(ask) for ask in asks]))
        patch.setattr(ModelDrafter, "settled", watched)
        patch.setattr(Speculation, "_checked", lambda self, ask, proposal: proposal)
        storm(folder, folder, room, (Sampling(3.0),))
    assert len(missing) > 15
    return sum(missing) <= 2  # but for a near tie of two ways to compute


def test_tokens_drafted_in_one_call_are_those_of_one_step_each(make_model: Make, near: Path) -> None:
    """Rooms that differ, texts that come and go, slots that run short: the same proposals, so the same counters."""
    folder, drafts = make_model("llama"), list[list[TokenIds]]()
    propose, filters = ModelDrafter.propose, ModelDrafter._filters  # pyright: ignore[reportPrivateUsage]

    def kept(drafter: ModelDrafter, asks: Sequence[Ask]) -> list[TokenProposal]:
        found = propose(drafter, asks)
        drafts[-1] += [proposal.tokens for proposal in found]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelDrafter, "propose", kept)
        for room in (4096, 220):
            for in_turns in (False, True):
                if in_turns:
                    patch.setattr(ModelDrafter, "_filters", lambda drafter, asks: True)
                drafts.append([])
                storm(folder, near, room)
            assert drafts[-1] == drafts[-2]
            assert len({len(tokens) for tokens in drafts[-1]}) > 4
            patch.setattr(ModelDrafter, "_filters", filters)


@pytest.mark.parametrize("room", [70, 140, 300])
def test_nothing_is_lost_when_slots_run_short(room: int, make_model: Make, near: Path) -> None:
    """Pre-emption, eviction and cancelled calls; a text that is computed again in larger pieces may move by 1e-5."""
    folder = make_model("llama")
    plain, done = storm(folder, None, 4096), storm(folder, near, room)
    assert done.stats.preempted > 0 or room > 140
    assert {3, 24}.isdisjoint(done.replies.keys() ^ plain.replies.keys()) or len(done.replies) >= 14
    for key in done.replies.keys() & plain.replies.keys():
        mine, theirs = done.replies[key], plain.replies[key]
        assert isinstance(mine, SampleReply)
        assert isinstance(theirs, SampleReply)
        assert mine.ids == theirs.ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert done.stats.kv_locked == 0
    assert done.stats.kv_used <= room


def test_proposals_preempt_nobody(make_model: Make, near: Path) -> None:
    """As the cache fills, less is proposed: there are as many pre-emptions as without proposals, or fewer."""
    orders: list[list[Command]] = [[*requests(6, 40, (Sampling(1.0),))]]
    for room in (150, 250):
        plain = run(make_model("llama"), orders, kv_tokens=room)
        done = run(make_model("llama"), orders, None, 8, near, kv_tokens=room)
        assert texts(plain) == texts(done)
        assert done.stats.preempted <= plain.stats.preempted


def test_what_is_cached_afterwards_is_right(make_model: Make, near: Path) -> None:
    """Texts that go on where speculation ended are those of an engine that never saw it, and so are their scores."""
    folder = make_model("llama")
    first = run(folder, [[*requests(4, 30)]], None, 6, near)
    again: list[Command] = [
        Submit(100 + key, SampleRequest((*ids_of((key - 1) // 3, 12), *ids), 8, Sampling(0.0)))
        for key, ids in texts(first).items()
    ]
    scores: list[Command] = [
        Submit(200 + key, ScoreRequest((*ids_of((key - 1) // 3, 12), *ids), (9, 10)))
        for key, ids in texts(first).items()
    ]
    gap: list[list[Command]] = [[] for _ in range(60)]
    both = run(folder, [[*requests(4, 30)], *gap, [*again, *scores]], Knowing(texts(first), "partly"), AnyLength(8))
    fresh = run(folder, [[*again, *scores]])
    assert fresh.replies.keys() < both.replies.keys()
    for key, reply in fresh.replies.items():
        other = both.replies[key]
        assert isinstance(reply, SampleReply | ScoreReply)
        assert isinstance(other, SampleReply | ScoreReply)
        assert other.cached_tokens > reply.cached_tokens or key > 200
        assert other.logprobs == pytest.approx(reply.logprobs, abs=1e-4)


def ended_within(folder: Path, k: int | None) -> tuple[Driven, Driven]:
    """Texts that end at a string, an id, a limit or an end token, plainly and with the right tokens proposed beyond."""
    pieces = config_of(folder).pieces
    whole = requests(8, 30, (Sampling(0.9), Sampling(0.0)))
    long = texts(run(folder, [whole]))
    orders = list[Command]()
    for each in whole:
        key, request, ids = each.request_id, each.request, long[each.request_id]
        assert isinstance(request, SampleRequest)
        cut = len(ids) // 2
        across = text_of(pieces, ids[cut - 1 : cut + 1])
        orders += [
            Submit(key, replace(request, max_tokens=cut)),
            Submit(30 + key, request),
            Submit(10 + key, replace(request, stop_ids=(ids[cut],))),
            Submit(20 + key, replace(request, stop=(across,) if across else ())),
        ]
    known = Knowing({key + shift: ids for key, ids in long.items() for shift in (0, 10, 20, 30)}, "right")
    return run(folder, [orders]), run(folder, [orders], known, k)


@pytest.mark.parametrize("k", [2, 7])
def test_texts_end_inside_a_proposal_where_they_end_without(k: int, make_model: Make) -> None:
    """At the token limit, a stop id, a stop string across tokens, an end token: nothing after it is kept."""
    plain, done = ended_within(make_model("llama"), k)
    ends = {reply.ended for reply in plain.replies.values() if isinstance(reply, SampleReply)}
    assert ends == {"length", "delimiter", "end"}
    assert counts(done).accepted > 20
    assert same(plain, done)


def text_of(pieces: tuple[bytes, ...], ids: TokenIds) -> str:
    """What two tokens write; nothing where one of them cuts a character, or writes nothing."""
    parts = [pieces[token] if token < len(pieces) else b"" for token in ids]
    try:
        return "".join(part.decode() for part in parts) if all(parts) else ""
    except UnicodeDecodeError:
        return ""


def begun(folder: Path) -> bool:
    """Whether requests that say how they begin are answered with the rest, stop strings across the seam included."""
    pieces, orders = config_of(folder).pieces, requests(6, 20, (Sampling(0.9), Sampling(0.7, top_p=0.9)))
    plain = run(folder, [orders])
    whole, parts, stops = texts(plain), list[Command](), dict[int, int]()
    for order in orders:
        assert isinstance(order.request, SampleRequest)
        ids, request = whole[order.request_id], order.request
        for cut in range(1, len(ids), 5):
            key = 100 * order.request_id + cut
            rest = replace(request, ids=request.ids + ids[:cut], begun=cut, max_tokens=20 - cut)
            parts.append(Submit(key, rest))
            across = text_of(pieces, ids[cut - 1 : cut + 1])
            if across:
                parts.append(Submit(-key, replace(rest, stop=(across,))))
                stops[-key] = cut
    answers = texts(run(folder, [parts]))
    keys = [key for key in answers if key > 0]
    assert len(keys) > 8
    assert stops
    goes_on = all(answers[key] == whole[key // 100][key % 100 :] for key in keys)
    return goes_on and all(len(answers[key]) == 1 for key in stops)


def test_a_text_that_was_begun_elsewhere_is_gone_on_with(make_model: Make) -> None:
    """The same uniforms for the same places, and stop strings that began before."""
    assert begun(make_model("llama"))


def wrong_rows(spread: Callable[..., Any]) -> Callable[..., Any]:
    """The settings of the row before."""
    return lambda sampling, rows: spread(sampling, rows.roll(1))


def shifted(spans: Callable[..., Any]) -> Callable[..., Any]:
    """Proposed tokens one place too far."""

    def found(plan: StepPlan) -> Iterator[tuple[Any, int, int]]:
        for sequence, position, token in spans(plan):
            yield sequence, position + (position > sequence.num_computed), token

    return found


def later_uniforms(ask: Callable[..., Any]) -> Callable[..., Any]:
    """The drafter draws with the numbers of the place after."""
    return lambda *args: replace(found := ask(*args), uniforms=np.roll(found.uniforms, 1))


def shifted_logprobs(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Log-probabilities of the row after."""
    return lambda *args: [(s, tokens, [*values[1:], values[0]]) for s, tokens, values in draw(*args)]


def repeated_uniforms(draw: Callable[..., Any]) -> Callable[..., Any]:
    """The newest token's number for its whole span."""

    def found(loop: StepLoop, sequences: list[Any], widths: list[int], logits: Any) -> Any:
        kept = [s.uniforms for s in sequences]
        for s in sequences:
            s.uniforms = np.full_like(s.uniforms, s.uniforms[len(s.logprobs)])
        drawn = draw(loop, sequences, widths, logits)
        for s, own in zip(sequences, kept, strict=True):
            s.uniforms = own
        return drawn

    return found


def forgetful(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Slots keep the mark of what they held before."""

    def found(allocator: Any, count: int) -> Any:
        kept = allocator.drafted.copy()
        slots = allocate(allocator, count)
        allocator.drafted[:] = kept
        return slots

    return found


def kept_whole(settled: Callable[..., Any]) -> Callable[..., Any]:
    """The drafter's cache is not rolled back."""
    return lambda self, key, proposal, stood: settled(self, key, proposal, len(proposal.tokens))


def all_at_once(commit: Callable[..., Any]) -> Callable[..., Any]:
    """What stands is written whole, and only its last token is looked at."""

    def found(loop: StepLoop, sequence: Any, tokens: list[int], logprobs: list[float], started: Any) -> None:
        own = loop._speculation  # pyright: ignore[reportPrivateUsage]
        stood = own.settle(sequence, tokens) if own and len(tokens) > 1 else 0
        sequence.ids += tokens[:stood]
        sequence.logprobs += logprobs[:stood]
        sequence.num_computed += stood
        commit(loop, sequence, tokens[stood : stood + 1], logprobs[stood : stood + 1], started)

    return found


def later_draws(draw: Callable[..., Any]) -> Callable[..., Any]:
    """At the places of a proposal, each with the number of the place after."""

    def found(loop: StepLoop, sequences: list[Any], widths: list[int], logits: Any) -> Any:
        kept = [s.uniforms for s in sequences]
        for s, width in zip(sequences, widths, strict=True):
            if width > 1:
                s.uniforms = np.roll(s.uniforms, -1)
        drawn = draw(loop, sequences, widths, logits)
        for s, own in zip(sequences, kept, strict=True):
            s.uniforms = own
        return drawn

    return found


def cut_short(commit: Callable[..., Any]) -> Callable[..., Any]:
    """Where a whole proposal stands, the token after it is dropped."""

    def found(loop: StepLoop, sequence: Any, tokens: list[int], logprobs: list[float], started: Any) -> None:
        cut = len(tokens) - (len(tokens) > 1)
        commit(loop, sequence, tokens[:cut], logprobs[:cut], started)

    return found


def doubled(commit: Callable[..., Any]) -> Callable[..., Any]:
    """The token after a proposal is written twice."""

    def found(loop: StepLoop, sequence: Any, tokens: list[int], logprobs: list[float], started: Any) -> None:
        commit(loop, sequence, tokens, logprobs, started)
        if len(tokens) > 1 and not sequence.is_finished:
            loop._append(sequence, sequence.ids[-1], 0.0)  # pyright: ignore[reportPrivateUsage]

    return found


MUTANTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "tokens after a wrong one stand": (
        "atts.local.speculating.standing", lambda f: lambda p, d: min(len(p), f(p, d) + 1), "text",
    ),
    "all stand": ("atts.local.speculating.standing", lambda f: lambda p, d: len(p), "text"),
    "settings of another row": ("atts.local.loop.spread_rows", wrong_rows, "text"),
    "position off by one": ("atts.local.batch.StepPlan.spans", shifted, "text"),
    "slots not reserved": (
        "atts.local.scheduler.Scheduler.widen", lambda f: lambda self, sequence, count: count, "text",
    ),
    "one uniform for a span": ("atts.local.loop.StepLoop._sample", repeated_uniforms, "text"),
    "uniforms off by one": ("atts.local.loop.StepLoop._sample", later_draws, "text"),
    "token after a proposal omitted": ("atts.local.loop.StepLoop._commit_sampled", cut_short, "steps"),
    "token after a proposal written twice": ("atts.local.loop.StepLoop._commit_sampled", doubled, "text"),
    "proposed tokens not stored": (
        "atts.local.batch.StepPlan.spans",
        lambda f: lambda plan: [(s, at, token + (at > s.num_computed)) for s, at, token in f(plan)], "text",
    ),
    "drafter at another temperature": (
        "atts.local.drafting.batch_sampling",
        lambda f: lambda rows, *args: f([replace(row, temperature=1.0) for row in rows], *args), "drafter",
    ),
    "log-probabilities shifted": ("atts.local.loop.StepLoop._sample", shifted_logprobs, "text"),
    "ends looked for once a step": ("atts.local.loop.StepLoop._commit_sampled", all_at_once, "ends"),
    "stop strings not watched": (
        "atts.local.sequence._stop_matcher", lambda f: lambda r, p: StopMatcher(r.stop), "begun",
    ),
    "begun uniforms used again": ("atts.local.sequence._uniforms", lambda f: lambda r: f(replace(r, begun=0)), "begun"),
    "drafter not rolled back": ("atts.local.drafting.ModelDrafter.settled", kept_whole, "drafter"),
    "drafter's numbers off by one": ("atts.local.speculating._ask", later_uniforms, "drafter"),
    "drafter's slots not forgotten": ("atts.local.allocator.SlotAllocator.allocate", forgetful, "drafter"),
}  # fmt: skip


def is_green(check: str, folder: Path, plain: Driven) -> bool:
    """Whether a small form of one of the checks above passes."""
    match check:
        case "text":
            return same(plain, run(folder, [[*requests(8)]], Knowing(texts(plain), "partly"), 5))
        case "steps":
            done = run(folder, [[*requests(8)]], Knowing(texts(plain), "right"), 1)
            return same(plain, done) and done.stats.steps <= plain.stats.steps / 1.5
        case "ends":
            return same(*ended_within(folder, 7))
        case "begun":
            return begun(folder)
        case _:
            return is_always_right(folder, 220)


@pytest.mark.parametrize("bug", MUTANTS)
def test_every_planted_bug_is_found(bug: str, make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that cannot fail is none: each of these turns one red that is green without it."""
    place, change, check = MUTANTS[bug]
    folder = make_model("llama")
    plain = run(folder, [[*requests(8)]])
    owner, _, name = place.rpartition(".")
    original = getattr(resolve_name(owner), name)
    monkeypatch.setattr(place, change(original))
    try:
        found = is_green(check, folder, plain)
    except Exception:  # noqa: BLE001  a loop that breaks is red as well
        found = False
    assert not found
