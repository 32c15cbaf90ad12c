"""The slow path decides what it can, and what it cannot costs only its own question."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from atts.errors import OptionError
from atts.evaluators import SlowLimits, SlowPath, aequivalent, equivalent
from atts.evaluators.syntax.reading import Reading
from atts.evaluators.syntax.tree import ONE, TWO, Node, number

pytestmark = pytest.mark.once

GAUSS = (r"\frac{\sqrt{\pi}}{2}", r"\int_0^{\infty} e^{-x^2} dx")
HANGS = ("1", r"\int_0^{\infty} \frac{\sin(x^x)}{x^x} dx")
LIMIT = ("3", r"\lim_{x\to 0}\frac{\sin 3x}{x}")


@pytest.fixture(scope="module")
def patient() -> Iterator[SlowPath]:
    """A pool that gives answers time even on a busy machine."""
    with SlowPath(2, limits=SlowLimits(seconds=60)) as pool:
        pool.warm()
        yield pool


@pytest.mark.parametrize(
    ("gold", "answer", "status"),
    [
        (*GAUSS, "equal"),
        (*LIMIT, "equal"),
        ("e", r"\sum_{n=0}^{\infty}\frac{1}{n!}", "equal"),
        ("333333333833333333500000000", r"\sum_{k=1}^{10^9} k^2", "equal"),
        ("2", r"\int_0^1 2 x^3 dx", "different"),
        ("2", LIMIT[1], "different"),
    ],
)
def test_decides_what_the_fast_path_leaves(patient: SlowPath, gold: str, answer: str, status: str) -> None:
    """Integrals, limits and infinite sums, from either side."""
    assert equivalent(gold, answer).status == "unscored"
    assert equivalent(gold, answer, slow=patient).status == status
    assert equivalent(answer, gold, slow=patient).status == status


def test_is_not_asked_what_is_decided_already(patient: SlowPath) -> None:
    """A verdict of the fast path stands."""
    assert equivalent("1/2", "0.5", slow=patient).rule == "value"


def test_a_late_worker_is_killed_and_replaced() -> None:
    """Its question is unscored by timeout, and the next one is answered by a fresh child of the same process.

    Loading takes longer than the limit here and does not count: the clock starts with the work.
    """
    with SlowPath(limits=SlowLimits(seconds=1)) as pool:
        pool.warm()
        nurse, first = pool.pids
        assert equivalent(*HANGS, slow=pool).rule == "timeout"
        assert any(equivalent(*LIMIT, slow=pool).is_equal for _ in range(60))  # a busy machine may be late itself
        assert pool.pids[0] == nurse
        assert first not in pool.pids


def test_siblings_are_not_blocked() -> None:
    """While one worker hangs until its limit, others answer: all at once from threads."""
    with SlowPath(2, limits=SlowLimits(seconds=600)) as pool, ThreadPoolExecutor(2) as threads:
        hanging = threads.submit(equivalent, *HANGS, slow=pool)
        assert threads.submit(equivalent, *LIMIT, slow=pool).result().status == "equal"
        assert not hanging.done()
        pool.close()
        assert hanging.result().status == "unscored"


def test_a_worker_that_dies_is_a_crash_and_is_replaced(patient: SlowPath) -> None:
    """Killed from outside, its question is unscored; the pool goes on, also when the whole process is gone."""
    psutil = pytest.importorskip("psutil")
    with SlowPath(limits=SlowLimits(seconds=600)) as pool, ThreadPoolExecutor(1) as threads:
        pool.warm()
        for victim in (1, 0):
            busy = psutil.Process(pool.pids[1])
            before = sum(busy.cpu_times()[:2])
            asked = threads.submit(equivalent, *HANGS, slow=pool)
            while sum(busy.cpu_times()[:2]) < before + 0.1:  # it is at work on the question
                time.sleep(0.01)
            os.kill(pool.pids[victim], signal.SIGKILL)
            assert asked.result().rule == "crash"
        assert equivalent(*LIMIT, slow=pool).is_equal


def test_memory_is_limited(patient: SlowPath) -> None:
    """A question that wants half a terabyte is unscored, and the next is answered."""
    psutil = pytest.importorskip("psutil")
    monster = Reading("2^{2^{42}}", (Node("pow", (TWO, number(2**42))),))
    verdict = patient.judge(Reading("1", (ONE,)), monster)
    assert (verdict.status, verdict.rule) == ("unscored", "memory")
    assert equivalent(*LIMIT, slow=patient).is_equal
    assert max(psutil.Process(pid).memory_info().rss for pid in patient.pids) < 300 << 20


def test_closing_ends_every_process() -> None:
    """Nothing outlives the pool; closing twice is fine; a question afterwards is unscored."""
    psutil = pytest.importorskip("psutil")
    pool = SlowPath()
    pool.warm()
    pids = pool.pids
    pool.close()
    pool.close()
    deadline = time.monotonic() + 120
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))
    assert equivalent(*LIMIT, slow=pool).rule == "closed"


@pytest.mark.anyio
async def test_the_async_twin(patient: SlowPath) -> None:
    """The same verdicts from a coroutine, fast path and slow."""
    assert (await aequivalent("1/2", "0.5")).is_equal
    assert (await aequivalent(*LIMIT, slow=patient)).is_equal
    assert (await aequivalent(*LIMIT)).status == "unscored"


def test_options_are_checked() -> None:
    """No workers, or an unknown backend, is an error at once."""
    with pytest.raises(OptionError, match="workers"):
        SlowPath(0)
    with pytest.raises(OptionError, match="sympy"):
        SlowPath(backend="simpy")  # type: ignore[arg-type]


def test_math_verify_as_a_second_opinion() -> None:
    """What our grammar does not read goes to math-verify when that is asked for."""
    pytest.importorskip("math_verify")
    with SlowPath(backend="math-verify", limits=SlowLimits(seconds=60)) as pool:
        gold, answer = r"\oint x \perp 2", r"\oint x \perp 2 "
        assert equivalent(gold, answer).status == "unscored"
        assert equivalent(gold, answer, slow=pool).rule in ("math-verify", "undecided")
