"""Tests of drafting while the target computes: guesses that are wrong, late or lost change no
token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch

from atts.accel import SpeculationOptions
from atts.accel.overlap.drafter import (
    BranchWriter,
    InlineTransport,
    OverlappedDrafter,
    PlaceLaw,
    Work,
)
from atts.accel.overlap.mirror import ExitModel
from atts.core import SampleRequest, Sampling
from atts.errors import OptionError
from atts.local.cpu.model import NativeModel
from atts.local.loop import StepLoop
from atts.local.messages import Cancel, Command
from atts.local.seams import OverlapStats
from atts.sampling import Seed
from tests.local.speculating import (
    Driven,
    Make,
    counts,
    engine_of,
    ids_of,
    requests,
    run,
    same,
    texts,
)

WAYS = ["pearl", "ssd", "mirror"]
HOT = (Sampling(0.0), Sampling(0.8), Sampling(1.0, top_p=0.9))


class Slow(InlineTransport):
    """A transport that randomly reports finished work as unfinished, so that results arrive some
    steps late.
    """

    def __init__(self) -> None:
        self._random = random.Random(2)
        self._is_over = True

    def post(self, work: Work) -> None:
        """Do the work at once, but report it as unfinished."""
        work()
        self._is_over = False

    def wait(self, seconds: float) -> bool:
        """Report the work as finished in half of the calls."""
        self._is_over = self._random.random() < 0.5
        return self._is_over


class Made:
    """A patch that makes loops use the transport under test, and records the drafters that they
    create.
    """

    def __init__(self, patch: pytest.MonkeyPatch, transport: Callable[[], Any]) -> None:
        self.drafters: list[OverlappedDrafter] = []
        patch.setattr("atts.accel.build.InlineTransport", transport)
        patch.setattr("atts.accel.build.OverlappedDrafter", self._make)

    def _make(self, *args: Any, **changes: Any) -> OverlappedDrafter:
        self.drafters.append(OverlappedDrafter(*args, **changes))
        return self.drafters[-1]

    def spare(self) -> tuple[int, int]:
        """Return the number of additional slots in use, and the number that the current job's
        branches and loans account for.
        """
        drafter: Any = self.drafters[-1]
        job = drafter._job
        held = [] if job is None else [*job.lent]
        for line in [] if job is None else job.lines:
            held += [branch.slots for branch in line.cache.select(0, -1)[1]]
        return drafter._spare.num_used, sum(map(len, held))


def overlap(done: Driven) -> OverlapStats:
    """Return the counters of drafts made while the target computes. Such a draft guesses the result
    of the target's step, and the guess is correct or wrong.
    """
    found = counts(done).overlap
    assert found is not None, "no draft was made during the target's steps"
    return found


@pytest.mark.parametrize("transport", [InlineTransport, Slow])
@pytest.mark.parametrize("way", WAYS)
def test_drafting_during_the_targets_step_changes_no_token(
    way: str, transport: Any, make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting during the target's step gives bit-identical ids, ends and log-probabilities, even
    if drafts are randomly late.

    Afterwards all slots are free.
    """
    folder = make_model("llama")
    orders = requests(7, 24)
    plain = run(folder, [orders])
    made = Made(monkeypatch, transport)
    done = run(folder, [orders], None, 5, near, speculate=way)
    assert same(plain, done)
    found = overlap(done)
    assert min(found.hits, found.misses, counts(done).accepted) > 0
    assert (found.late > 0) == (transport is Slow)
    used, held = made.spare()
    assert used == held


@pytest.mark.parametrize("way", WAYS)
def test_a_perfect_drafter_always_hits_and_a_wrong_one_never(
    way: str, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that equals the target never guesses a step wrongly, and a drafter that is always
    wrong guesses none correctly.

    There are two sequences, so that keys or positions of the wrong sequence would be noticed.
    """
    folder = make_model("llama")
    orders = requests(2, 40, HOT)
    plain = run(folder, [orders])
    _ = Made(monkeypatch, InlineTransport)
    right = run(folder, [orders], None, 4, folder, speculate=way)
    assert same(plain, right)
    assert overlap(right).misses == 0
    assert counts(right).accepted == counts(right).proposed
    assert right.stats.steps <= plain.stats.steps / 4 + 3
    drawn = BranchWriter._sampled  # pyright: ignore[reportPrivateUsage]

    def wrong(self: BranchWriter, *args: Any) -> Any:
        tokens, *rest = drawn(self, *args)
        return [(token + 1) % 300 for token in tokens], *rest

    def unknown(logits: torch.Tensor, *rest: Any) -> list[PlaceLaw]:
        return [PlaceLaw(0.5, (), ())] * len(logits)

    monkeypatch.setattr(BranchWriter, "_sampled", wrong)
    monkeypatch.setattr("atts.accel.overlap.drafter.place_laws", unknown)
    monkeypatch.setattr(ExitModel, "_heard", lambda *args: {})
    ahead = NativeModel.draw_ahead
    monkeypatch.setattr(NativeModel, "draw_ahead", lambda *args: (ahead(*args) + 1) % 300)
    never = run(folder, [orders], None, 4, folder, speculate=way)
    assert same(plain, never)
    assert (overlap(never).hits, counts(never).proposed, never.stats.steps) == (
        0,
        0,
        plain.stats.steps,
    )


def test_an_exit_that_knows_the_text_hits_always(
    make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the early exit predicts the target's next token, the drafter continues from this token, so
    every guess is correct.
    """
    folder = make_model("llama")
    orders = requests(3, 32, HOT)
    plain = run(folder, [orders])
    _ = Made(monkeypatch, InlineTransport)
    known = texts(plain)

    heard = OverlappedDrafter._heard  # pyright: ignore[reportPrivateUsage]

    def knows(self: Any, told: Any) -> None:
        for line in self._job.lines:
            assert len(told[line.ask.key]) <= len(line.proposal) + 1, (
                "the exit must read the rows that decode"
            )
            coming = known[line.ask.key][line.ask.written :][: len(line.proposal) + 1]
            told[line.ask.key] = [((token,), (1.0,)) for token in coming]
        heard(self, told)

    found = run(folder, [orders], None, 4, near, speculate="mirror")
    assert overlap(found).misses > 0
    monkeypatch.setattr(OverlappedDrafter, "_heard", knows)
    oracle = run(folder, [orders], None, 4, near, speculate="mirror")
    assert same(plain, oracle)
    assert overlap(oracle).misses == 0
    assert oracle.stats.steps < found.stats.steps


def test_more_guesses_hit_more_often(
    make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scheme ssd makes more guesses of the result of the target's step than scheme pearl. Its share
    of steps with a correct guess is over 5 points higher.
    """
    Made(monkeypatch, InlineTransport)
    ways = ("pearl", "ssd")
    pearl, ssd = (
        run(make_model("llama"), [requests(3, 32, HOT)], None, 4, near, speculate=way).stats
        for way in ways
    )
    assert pearl.speculation is not None
    assert ssd.speculation is not None
    first = pearl.speculation.overlap
    second = ssd.speculation.overlap
    assert first is not None
    assert second is not None
    assert (
        second.hits / (second.hits + second.misses)
        > first.hits / (first.hits + first.misses) + 0.05
    )
    assert ssd.steps < pearl.steps


@pytest.mark.parametrize("way", WAYS)
def test_a_drafter_slower_than_its_target_still_proposes(
    way: str, make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a target's step is shorter than a draft step, the drafter still extends its guess by a few
    tokens.
    """
    folder = make_model("llama")
    orders = requests(2, 24, HOT)
    plain = run(folder, [orders])
    _ = Made(monkeypatch, InlineTransport)
    monkeypatch.setattr(OverlappedDrafter, "_length", lambda self, count, lines: 0)
    done = run(folder, [orders], None, 4, near, speculate=way)
    assert same(plain, done)
    assert counts(done).accepted > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("room", [100, pytest.param(4096, marks=pytest.mark.slow)])
def test_texts_are_unchanged_while_sequences_come_and_go(
    way: str, room: int, make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts stay the same if sequences are cancelled, pre-empted and started while drafts are
    late.
    """
    folder = make_model("llama")
    orders = requests(6, 30, HOT)
    late = [replace(order, request_id=order.request_id + 20) for order in orders]
    script: list[list[Command]] = [[*orders], *[[]] * 5, [*late, Cancel(3)], [Cancel(24)]]
    ways: dict[str, Any] = {"max_batch": 4, "kv_tokens": room}
    plain = run(folder, script, **ways)
    Made(monkeypatch, Slow)
    done = run(folder, script, None, 4, near, speculate=way, **ways)
    shared = texts(plain).keys() & texts(done).keys()
    assert len(shared) >= 10
    assert all(texts(plain)[key] == texts(done)[key] for key in shared)
    assert done.stats.preempted > 0 or room > 100
    assert done.stats.kv_locked == 0
    assert counts(done).trouble == ""


def test_a_drafter_thread_that_dies_changes_no_text(
    make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the drafter's thread dies during its work, even by `exit`, the texts stay the same and the
    counters report its death.
    """
    folder = make_model("llama")
    orders = requests(3, 20)
    calls = [0]
    plain = run(folder, [orders])
    _ = Made(monkeypatch, InlineTransport)
    branch = OverlappedDrafter._branch  # pyright: ignore[reportPrivateUsage]

    def dying(self: OverlappedDrafter, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] > 5:
            raise SystemExit("killed")
        return branch(self, *args)

    monkeypatch.setattr(OverlappedDrafter, "_branch", dying)
    done = run(folder, [orders], None, 4, near, speculate="pearl")
    assert same(plain, done)
    assert calls[0] > 5
    assert (
        counts(done).trouble
        == "speculation is off: OverlappedDrafter failed (RuntimeError: SystemExit: killed)"
    )


def test_a_drafter_that_never_answers_changes_no_text(
    make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the drafter never answers, the target takes every step without a proposal and writes the
    same text.
    """

    class Gone(InlineTransport):
        def post(self, work: Work) -> None:
            pass

        def wait(self, seconds: float) -> bool:
            return False

    folder = make_model("llama")
    orders = requests(3, 20)
    plain = run(folder, [orders])
    _ = Made(monkeypatch, Gone)
    done = run(folder, [orders], None, 4, near, speculate="ssd")
    assert same(plain, done)
    assert counts(done).proposed == 0
    assert overlap(done).late > 0


def seeded_by_place(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault of PEARL's published code: after a block of accepted tokens, the acceptance
    test reuses the random number of the block's first token.
    """

    def found(loop: StepLoop, sequences: list[Any], widths: list[int], logits: Any) -> Any:
        kept = [s.uniforms for s in sequences]
        for s, width in zip(sequences, widths, strict=True):
            at = len(s.logprobs)
            if width > 1 and at:
                s.uniforms = np.concatenate(
                    [s.uniforms[:at], s.uniforms[at - 1 : at], s.uniforms[at + 1 :]]
                )
        drawn = sample(loop, sequences, widths, logits)
        for s, own in zip(sequences, kept, strict=True):
            s.uniforms = own
        return drawn

    return found


def next_uniforms(begin: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: branches draw with the random numbers of the next positions."""

    def found(self: Any, job: Any, ask: Any, branch: Any) -> Any:
        proposal = begin(self, job, ask, branch)
        if job.lines and job.lines[-1].ask is ask:
            job.lines[-1].uniforms = np.roll(job.lines[-1].uniforms, -1)
        return proposal

    return found


def kept_where_it_was(moved: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: if a branch guessed correctly, its keys and values are not moved into the
    drafter's cache.
    """

    def found(self: Any, job: Any, line: Any, branch: Any) -> int:
        start: int = moved(self, job, line, branch)
        if start:
            job.moves.pop()
        return start

    return found


def served_another(select: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: if no branch guessed the result of the target's step, another branch is used
    as if it had.
    """

    def found(self: Any, accepted: int, token: int) -> Any:
        chosen, others = select(self, accepted, token)
        return (chosen, others) if chosen or not others else (others[0], others[1:])

    return found


def tail_returned(verify: Callable[..., int]) -> Callable[..., int]:
    """Plant a fault of PEARL's published code: at the end of a request, pending tokens are returned
    unchecked.
    """

    def found(self: Any, sequence: Any, drawn: list[int]) -> int:
        accepted = verify(self, sequence, drawn)
        left = sequence.request.max_tokens - len(sequence.logprobs)
        return accepted if left > len(drawn) else len(drawn) - 1

    return found


BUGS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "the pending tail is returned": ("atts.local.proposals.Proposals.verify", tail_returned, "text"),
    "PEARL's numbers by place": ("atts.local.loop.StepLoop._sample", seeded_by_place, "text"),
    "a branch of another outcome is served": (
        "atts.accel.overlap.drafter.OutcomeCache.select",
        served_another,
        "branches",
    ),
    "branches draw with other numbers": ("atts.accel.overlap.drafter.OverlappedDrafter._begin", next_uniforms, "hits"),
    "a branch's keys are left behind": ("atts.accel.overlap.drafter.OverlappedDrafter._moved", kept_where_it_was, "hits"),
    "slots are kept": (
        "atts.accel.overlap.drafter.OverlappedDrafter._give_back", lambda give: lambda self, runs: None, "slots",
    ),
}  # fmt: skip


def is_green(check: str, folder: Path, near: Path, plain: Driven, made: Made) -> bool:
    """Return whether a small version of one of the checks above passes.

    The check "branches" passes if some guesses were counted as wrong.
    """
    drafter = near if check in ("branches", "text") else folder
    done = run(folder, [requests(2, 40, HOT)], None, 4, drafter, speculate="pearl")
    if check == "branches":
        return overlap(done).misses > 0
    if check == "text":
        return same(plain, done)
    if check == "hits":
        return overlap(done).misses == 0 and counts(done).accepted == counts(done).proposed
    used, held = made.spare()
    return used == held


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(
    bug: str, make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each planted bug makes a check fail that passes without the bug."""
    folder = make_model("llama")
    plain = run(folder, [requests(2, 40, HOT)])
    made = Made(monkeypatch, InlineTransport)
    place, change, check = BUGS[bug]
    assert is_green(check, folder, near, plain, made)
    owner, _, name = place.rpartition(".")
    monkeypatch.setattr(resolve_name(owner), name, change(getattr(resolve_name(owner), name)))
    assert not is_green(check, folder, near, plain, made)


@pytest.mark.anyio
@pytest.mark.parametrize("worker", ["thread", pytest.param("process", marks=pytest.mark.slow)])
async def test_an_option_turns_on_overlapped_drafting(
    worker: Any, make_model: Make, near: Path
) -> None:
    """With the option for overlapped drafting, the engine's counters include guesses of
    outcomes.
    """
    request = SampleRequest(ids_of(1, 12), 24, Sampling(0.8), Seed(3))
    answers = list[Any]()
    here: dict[str, Any] = {"device": "cpu", "kv_tokens": 2048, "max_batch": 32, "threads": 1}
    for way in ("off", "ssd"):
        ways = {"worker": worker, "drafter": str(near), "speculate": way, "k": 4}
        async with engine_of(make_model("llama"), **here, **ways) as engine:
            answers.append(await engine.sample(request))
            speculation = engine.loop_stats().speculation
            assert (speculation is None) == (way == "off")
            if speculation is not None:
                assert speculation.overlap is not None
    assert answers[0] == answers[1]
    with pytest.raises(OptionError, match="pearl needs a draft model"):
        SpeculationOptions(speculate="pearl").check()
