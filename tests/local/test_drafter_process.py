"""Tests of a drafter in its own process: the texts are the same whether the drafter answers, lags,
fails or is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from atts.accel.overlap.child import RemoteRows
from atts.accel.overlap.process import DrafterProcess, DraftStep
from atts.core import SampleRequest, Sampling, TokenIds
from atts.errors import ModelLoadError
from atts.local.seams import Ask, OverlapStats
from atts.sampling import Seed
from tests.local.speculating import Driven, Make, counts, ids_of, requests, run, same

HOT = (Sampling(0.0), Sampling(0.8), Sampling(1.0, top_p=0.9))
WAYS = ["pearl", "ssd", "mirror"]


def overlap(done: Driven) -> OverlapStats:
    """Return the counters of drafts made while the target computes. Such a draft guesses the result
    of the target's step, and the guess is correct or wrong.
    """
    found = counts(done).overlap
    assert found is not None, "no draft was made during the target's steps"
    return found


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each step seem to last a minute, so that the loop waits for every answer of the
    drafter.
    """
    times = count(0, 60)
    monkeypatch.setattr("atts.accel.overlap.process.perf_counter", lambda: float(next(times)))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("way", WAYS)
def test_a_drafter_in_another_process_changes_no_token(
    way: str, make_model: Make, near: Path
) -> None:
    """With a drafter in another process, ids, ends and log-probabilities are bit-identical to those
    with a drafter in this process.
    """
    folder = make_model("llama")
    orders = requests(4, 24)
    plain = run(folder, [orders])
    done = run(folder, [orders], None, 4, near, speculate=way, beside="process")
    assert same(plain, done)
    assert min(overlap(done).hits, overlap(done).misses, counts(done).accepted) > 0
    assert overlap(done).late == 0


@pytest.mark.usefixtures("patient")
def test_a_drafter_equal_to_the_target_is_never_wrong(make_model: Make) -> None:
    """If the drafter is the same model as the target, the target accepts all of its proposals."""
    folder = make_model("llama")
    orders = requests(2, 40, HOT)
    plain = run(folder, [orders])
    right = run(folder, [orders], None, 4, folder, speculate="mirror", beside="process")
    assert same(plain, right)
    assert overlap(right).misses == 0
    assert counts(right).accepted == counts(right).proposed
    assert right.stats.steps <= plain.stats.steps / 4 + 3


class Hurt:
    """A patch that sends a signal, such as SIGKILL, to the drafter's process at the fourth step."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: signal.Signals) -> None:
        self._propose = DrafterProcess.propose
        self._kind = kind
        self._calls = 0
        patch.setattr(DrafterProcess, "propose", lambda drafter, asks: self._hurt(drafter, asks))

    def _hurt(self, drafter: DrafterProcess, asks: Sequence[Ask]) -> Any:
        self._calls += 1
        if self._calls == 4:
            os.kill(drafter.pid, self._kind)
        return self._propose(drafter, asks)


@pytest.mark.parametrize(("way", "kind"), [("ssd", signal.SIGKILL), ("mirror", signal.SIGSTOP)])
def test_a_drafter_that_dies_or_stops_changes_no_text(
    way: str, kind: signal.Signals, make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the drafter's process is killed or stopped, the texts do not change, and each later step
    counts as a wrong guess.

    The counters also report the death of the process.
    """
    folder = make_model("llama")
    orders = requests(3, 40)
    plain = run(folder, [orders])
    _ = Hurt(monkeypatch, kind)
    done = run(folder, [orders], None, 4, near, speculate=way, beside="process")
    assert same(plain, done)
    assert "failed" in counts(done).trouble or overlap(done).late > 0
    assert kind == signal.SIGKILL or overlap(done).late > 0


@pytest.mark.usefixtures("patient")
def test_a_dead_drafter_is_named_in_the_counters(
    make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a drafter has died, the counters say so, so that a user can see why nothing is
    proposed.
    """
    Hurt(monkeypatch, signal.SIGKILL)
    done = run(
        make_model("llama"), [requests(3, 40)], None, 4, near, speculate="pearl", beside="process"
    )
    said = (
        "speculation is off: DrafterProcess failed (RuntimeError: the drafter's process has ended)"
    )
    assert counts(done).trouble == said


def test_a_drafter_that_cannot_be_loaded_is_an_error(
    make_model: Make, near: Path, tmp_path: Path
) -> None:
    """A drafter that cannot be loaded gives the same error as any other model that cannot be
    loaded.
    """
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in near.iterdir():
        (broken / file.name).write_bytes(
            b"" if file.suffix == ".safetensors" else file.read_bytes()
        )
    with pytest.raises(ModelLoadError):
        run(
            make_model("llama"), [requests(1)], None, 4, broken, speculate="pearl", beside="process"
        )


def test_a_failed_start_leaves_no_process(
    make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a drafter's process fails to start, no process is left.

    The causes are a message that cannot be written, a lack of memory, and an interrupt.
    """
    started = list[subprocess.Popen[bytes]]()
    start = subprocess.Popen[bytes]

    def kept(*args: Any, **changes: Any) -> subprocess.Popen[bytes]:
        started.append(start(*args, **changes))
        return started[-1]

    def broken(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("atts.accel.overlap.process.subprocess.Popen", kept)
    monkeypatch.setattr("atts.local.messages.write", broken)
    with pytest.raises(KeyboardInterrupt):
        run(make_model("llama"), [requests(1)], None, 4, near, speculate="pearl", beside="process")
    assert [process.poll() is not None for process in started] == [True]


@pytest.fixture
def rows() -> RemoteRows:
    """Make a slot table of two rows of 200 tokens, with 256 slots."""
    return RemoteRows(256, 2, 200)


def step(fresh: dict[int, int], ended: Sequence[int] = (), more: Sequence[int] = ()) -> DraftStep:
    """Make a drafter's step: it starts sequences of the given lengths, ends others, and adds a
    token to each sequence in `more`.
    """
    told = [
        (key, SampleRequest(ids_of(key, size), 50, Sampling(0.5), Seed(key)))
        for key, size in fresh.items()
    ]
    asks: list[tuple[int, TokenIds, int]] = [(key, (), 4) for key in fresh]
    asks += [(key, (7,), 4) for key in more]
    return DraftStep(told, list(ended), asks, [], 0.0)


def test_sequences_without_room_are_not_drafted_for(rows: RemoteRows) -> None:
    """A sequence that finds no free row or slot gets no drafts until another sequence ends and
    frees its own.
    """
    assert [ask.key for ask in rows.follow(step({1: 20, 2: 180}))] == [1, 2]
    assert rows.follow(step({3: 20})) == [], "all rows must be in use"
    found = rows.follow(step({}, ended=[2], more=[1, 3]))
    assert [(ask.key, ask.written, len(ask.ids)) for ask in found] == [(1, 1, 21), (3, 1, 21)]
    rows.follow(step({}, ended=[1, 3]))
    assert rows.slots.num_used == 0
