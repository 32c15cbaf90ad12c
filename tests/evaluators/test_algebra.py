"""Tests of sympy as a second opinion, in a process that atts can kill."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from atts.core import Grading
from atts.evaluators import equivalent, group
from atts.evaluators.equivalence import algebra
from atts.evaluators.metrics.rates import status_of

EQUAL = {
    "integral": (r"\int_0^1 x^2 dx", r"\frac{1}{3}"),
    "integral of a function": (r"\int_0^{\pi} \sin x \, dx", "2"),
    "integral over all reals": (r"\sqrt{\pi}", r"\int_{-\infty}^{\infty} e^{-x^2} dx"),
    "integral up to a constant": (r"\int 3x^2 dx", "x^3+C"),
    "limit": (r"\lim_{x\to 0} \frac{\sin x}{x}", "1"),
    "limit at infinity": (r"\lim_{n\to\infty} (1+\frac1n)^n", "e"),
    "limit from above": (r"\lim_{x\to 0^+} \frac{|x|}{x}", "1"),
    "determinant": (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "-2"),
    "determinant in letters": (r"\det\begin{pmatrix}a&b\\c&d\end{pmatrix}", "ad-bc"),
    "infinite sum": (r"\sum_{n=1}^{\infty} \frac{1}{n^2}", r"\frac{\pi^2}{6}"),
    "geometric series": (r"\sum_{k=0}^{\infty} \frac{1}{2^k}", "2"),
    "sum in letters": (r"\sum_{k=1}^{n} k^2", r"\frac{n(n+1)(2n+1)}{6}"),
    "long sum": (r"\sum_{k=1}^{2024} k", "2049300"),
    "power of a matrix": (
        r"\begin{pmatrix}1&1\\0&1\end{pmatrix}^2",
        r"\begin{pmatrix}1&2\\0&1\end{pmatrix}",
    ),
    "product of matrices": (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}\begin{pmatrix}1\\x\end{pmatrix}",
        r"\begin{pmatrix}2x+1\\4x+3\end{pmatrix}",
    ),
    "sum of matrices": (
        r"2\begin{pmatrix}1&2\\3&4\end{pmatrix}-\begin{pmatrix}1&0\\0&1\end{pmatrix}",
        r"\begin{pmatrix}1&4\\6&7\end{pmatrix}",
    ),
    "zeta": (r"\zeta(2)", r"\frac{\pi^2}{6}"),
    "gamma": (r"\Gamma(n+1)", "n!"),
    "inverse of a matrix": (
        r"\begin{pmatrix}1&1\\0&1\end{pmatrix}^{-1}",
        r"\begin{pmatrix}1&-1\\0&1\end{pmatrix}",
    ),
    "derivative": (r"\frac{d}{dx} x^3", "3x^2"),
    "second derivative": (r"\frac{d^2}{dx^2} x^4", "12x^2"),
    "integrals in a tuple": (r"(\int_0^1 x dx, 3)", r"(\frac12, 3)"),
}
DIFFERENT = {
    "integral": (r"\int_0^1 x^2 dx", r"\frac{1}{2}"),
    "integral up to more than a constant": (r"\int x^2 dx", r"\frac{x^3}{3}+x"),
    "limit": (r"\lim_{x\to 0} \frac{\sin x}{x}", "0"),
    "limit from below": (r"\lim_{x\to 0^-} \frac{|x|}{x}", "1"),
    "determinant": (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "2"),
    "infinite sum": (r"\sum_{n=1}^{\infty} \frac{1}{n^2}", r"\frac{\pi^2}{8}"),
    "sum in letters": (r"\sum_{k=1}^{n} k", r"\frac{n(n-1)}{2}"),
    "power of a matrix": (
        r"\begin{pmatrix}1&1\\0&1\end{pmatrix}^2",
        r"\begin{pmatrix}1&1\\0&1\end{pmatrix}",
    ),
    "derivative": (r"\frac{d}{dx} x^3", "3x"),
}
SLOW = (r"\int_0^{\infty} \frac{\sin(x^x)}{x^x} dx", "1")


@pytest.fixture
def worker() -> Iterator[algebra.Worker]:
    """Give each test its own worker process."""
    before = algebra.WORKER
    algebra.WORKER = algebra.Worker()
    yield algebra.WORKER
    algebra.WORKER.stop()
    algebra.WORKER = before


@pytest.mark.parametrize(("gold", "answer"), EQUAL.values(), ids=EQUAL)
def test_sympy_proves_answers_equal(gold: str, answer: str) -> None:
    """sympy proves the listed answers equal whichever side is the reference, and a vote puts them
    into one class.
    """
    verdicts = [equivalent(gold, answer), equivalent(answer, gold)]
    assert [verdict.status for verdict in verdicts] == ["equal", "equal"]
    assert group([gold, answer]) == [0, 0]


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT.values(), ids=DIFFERENT)
def test_sympy_proves_answers_different(gold: str, answer: str) -> None:
    """sympy proves that the listed answers are different, whichever of the two is the reference,
    and a vote puts them into two classes.
    """
    verdicts = [equivalent(gold, answer), equivalent(answer, gold)]
    assert [verdict.status for verdict in verdicts] == ["different", "different"]
    assert group([gold, answer]) == [0, 1]


def test_a_verdict_of_sympy_names_its_rule() -> None:
    """A verdict that sympy decided has the rule "algebra", whether the answers are equal or
    different.
    """
    assert equivalent(*EQUAL["integral"]).rule == "algebra"
    assert equivalent(*DIFFERENT["integral"]).rule == "algebra"


def test_a_timeout_is_unscored(worker: algebra.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """If sympy exceeds its time limit, the pair is unscored and the sample has the status
    "timeout". The worker still answers the next question.
    """
    monkeypatch.setattr(algebra, "SECONDS", 1.0)
    verdict = equivalent(*SLOW)
    assert verdict.rule == "time"
    assert status_of(SLOW[0], "answer", verdict.status, verdict.rule) == "timeout"
    assert equivalent(*EQUAL["integral"]).is_equal


def test_a_killed_worker_is_replaced(worker: algebra.Worker) -> None:
    """After sympy's worker was killed, the next question starts another worker."""
    assert equivalent(*EQUAL["integral"]).is_equal
    assert worker.process is not None
    worker.process.kill()
    worker.process.wait()
    assert equivalent(*EQUAL["limit"]).is_equal


@pytest.mark.parametrize("program", ["/bin/false", "/no/such/program"])
def test_a_worker_that_cannot_start_leaves_pairs_unscored(
    program: str, worker: algebra.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If sympy is missing or no process may be started, no error is raised and the pair is
    unscored.
    """
    monkeypatch.setattr(sys, "executable", program)
    assert equivalent(*EQUAL["integral"]).status == "unscored"


def test_any_thread_may_ask() -> None:
    """Eight threads that ask the worker concurrently get the same verdicts as one thread."""
    pairs = [*EQUAL.values(), *EQUAL.values()]
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda pair: equivalent(*pair).status, pairs))
    assert set(statuses) == {"equal"}


def test_the_worker_runs_inside_event_loops() -> None:
    """The worker also works inside event loops of asyncio and trio."""
    trio = pytest.importorskip("trio")

    async def graded() -> str:
        return equivalent(*EQUAL["integral"]).status

    assert asyncio.run(graded()) == "equal"
    assert trio.run(graded) == "equal"


def test_a_fork_starts_its_own_worker(worker: algebra.Worker) -> None:
    """A forked child process starts its own worker and does not use its parent's pipes."""
    assert equivalent(*EQUAL["integral"]).is_equal
    worker.owner = os.getpid() - 1  # simulates the state of a forked child
    assert equivalent(*EQUAL["limit"]).is_equal
    assert worker.owner == os.getpid()


def test_sympy_stays_in_its_process() -> None:
    """Grading in this process imports neither sympy nor torch nor anyio."""
    code = (
        "import sys; from atts.evaluators import equivalent;"
        rf"assert equivalent({EQUAL['integral'][0]!r}, {EQUAL['integral'][1]!r}).is_equal;"
        "print([name for name in ('sympy', 'torch', 'anyio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_simple_answers_start_no_worker(worker: algebra.Worker) -> None:
    """Only pairs that evaluation cannot decide are sent to the worker."""
    for gold, answer in (("1/2", "0.5"), ("x^2-1", "(x-1)(x+1)"), ("12", "21"), ("(1,2)", "(2,1)")):
        equivalent(gold, answer)
    assert worker.process is None


def test_sympy_knows_which_letters_are_positive() -> None:
    """The listed integral contains a square root, so it equals the answer only if its variables are
    positive. By default atts assumes this for such a variable; with `variables="real"` it does not.
    """
    gold = r"\int_0^1 2x\sqrt{\rho^2 L}\,dx"
    assert equivalent(gold, r"\rho\sqrt{L}").rule == "sizes"
    assert not equivalent(gold, r"\rho\sqrt{L}", grading=Grading(variables="real")).is_equal
    assert not equivalent(gold, r"2\rho\sqrt{L}").is_equal
