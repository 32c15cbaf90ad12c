"""Pool of sympy worker processes, killed when they take too long or too much memory."""

from __future__ import annotations

import importlib.util
import queue
import threading
from functools import partial
from typing import Any

from atts.core import AnswerKind
from atts.errors import OptionError
from atts.evaluators.equivalence.fast import SecondOpinion, equivalent
from atts.evaluators.symbolic.process import Backend, SlowLimits, SymbolicWorker
from atts.evaluators.syntax.reading import Reading
from atts.evaluators.syntax.tree import Node
from atts.evaluators.verdict import Limits, Verdict

_BACKENDS = ("sympy", "math-verify")
_DEFAULT = Limits()


class SlowPath:
    """A pool of workers, for use from any thread; loaded libraries stay resident between questions.

    A child that is late, dies or runs out of memory is replaced by a fork of a process that has all loaded, and only
    its own question is lost: the verdict is "unscored" with the rule "timeout", "crash" or "memory".
    Raises OptionError for an unknown backend, or when math-verify is asked for and not installed.

    >>> with SlowPath() as slow:
    ...     equivalent(r"\\lim_{n \\to \\infty} \\frac{1}{n}", "0", slow=slow).status
    'equal'
    """

    def __init__(self, workers: int = 1, *, backend: Backend = "sympy", limits: SlowLimits | None = None) -> None:
        if backend not in _BACKENDS:
            raise OptionError(f"backend {backend}", "is not one", _BACKENDS)
        if workers < 1:
            raise OptionError("workers", f"{workers} is not a number of processes")
        if backend == "math-verify" and importlib.util.find_spec("math_verify") is None:
            raise OptionError("backend math-verify", "is not installed: pip install 'atts[math-verify]'")
        self._backend: Backend = backend
        self._limits = limits or SlowLimits()
        # None is a seat whose worker is to be started
        self._seats: queue.LifoQueue[SymbolicWorker | None] = queue.LifoQueue()
        self._workers: set[SymbolicWorker] = set()
        self._lock = threading.Lock()
        self._closed = False
        for _ in range(workers):
            self._seats.put(None)
        self.size = workers

    def __enter__(self) -> SlowPath:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers there are now."""
        with self._lock:
            return [pid for worker in self._workers for pid in worker.pids]

    def warm(self) -> None:
        """Start every worker and wait until each has loaded."""
        seats = [self._seats.get() or self._start() for _ in range(self.size)]
        for worker in seats:
            self._seats.put(worker if worker is not None and worker.load() else None)

    def judge(self, gold: Reading, answer: Reading) -> Verdict:
        """A verdict on what the fast path left undecided; waits for a free worker first."""
        if max(len(gold.text), len(answer.text)) > self._limits.characters:
            return Verdict("unscored", "limits", f"more than {self._limits.characters} characters")
        question = {
            "gold": gold.text,
            "answer": answer.text,
            "gold_tree": plain(gold.trees[0]) if gold.trees else None,
            "answer_tree": plain(answer.trees[0]) if answer.trees else None,
            "math_verify": self._backend == "math-verify",
        }
        if not question["math_verify"] and not (gold.trees and answer.trees):
            return Verdict("unscored", "undecided", "no tree for sympy")
        worker = self._seats.get()
        try:
            worker = worker if worker is not None and worker.is_alive else self._replace(worker)
            if worker is None:
                return Verdict("unscored", "closed", "the slow path was closed")
            if not worker.load():
                return Verdict("unscored", "crash", "the worker did not start")
            return worker.ask(question)
        finally:
            self._seats.put(worker)

    def close(self) -> None:
        """End every worker, those at work too; twice is fine."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, set()
        for worker in workers:
            worker.kill()

    def _start(self) -> SymbolicWorker | None:
        with self._lock:
            if self._closed:
                return None
            worker = SymbolicWorker(self._backend, self._limits)
            self._workers.add(worker)
            return worker

    def _replace(self, worker: SymbolicWorker | None) -> SymbolicWorker | None:
        if worker is not None:
            with self._lock:
                self._workers.discard(worker)
            worker.kill()
        return self._start()


def plain(node: Node) -> list[Any]:
    """A tree as JSON can carry it."""
    value = None if node.value is None else f"{node.value.numerator}/{node.value.denominator}"
    return [node.kind, node.text, value, [plain(arg) for arg in node.args]]


async def aequivalent(
    gold: str,
    answer: str,
    kind: AnswerKind = "math",
    *,
    limits: Limits = _DEFAULT,
    slow: SecondOpinion | None = None,
) -> Verdict:
    """As equivalent, in a thread of its own, so that neither path holds up the event loop."""
    from anyio import to_thread

    call = partial(equivalent, gold, answer, kind, limits=limits, slow=slow)
    return await to_thread.run_sync(call, abandon_on_cancel=True)
