"""The slow path: sympy in worker processes that are killed when they take too long or too much."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from atts.core import AnswerKind
from atts.errors import OptionError
from atts.evaluators.equivalence import SecondOpinion, equivalent
from atts.evaluators.reading import Reading
from atts.evaluators.tree import Node
from atts.evaluators.verdict import Limits, Status, Verdict

Backend = Literal["sympy", "math-verify"]
_BACKENDS = ("sympy", "math-verify")
_STATUSES: dict[str, Status] = {"equal": "equal", "different": "different", "unscored": "unscored"}
_LOADING_SECONDS = 120.0
_DEFAULT = Limits()


@dataclass(frozen=True, slots=True)
class SlowLimits:
    """What one question may cost; the clock starts when the work does, not while it waits or libraries load."""

    seconds: float = 0.75
    megabytes: int = 280  # resident memory of a worker
    characters: int = 1_000  # of either answer; longer ones are not asked about


class Worker:
    """A process that keeps the libraries loaded, and its child that does the work.

    One thread at a time asks; any other may kill it meanwhile.
    """

    def __init__(self, backend: Backend, limits: SlowLimits) -> None:
        self._limits = limits
        script = str(Path(__file__).with_name("worker.py"))
        command = [sys.executable, "-P", script, str(limits.megabytes), backend]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8"
        )
        self._pipes = threading.Lock()  # held while they are used: a pipe closed under a reader is an error of its own
        self._child = 0  # the process at work; 0 while none has said that it is ready

    @property
    def pids(self) -> list[int]:
        """The process that holds the libraries and the one at work."""
        return [self._process.pid, *([self._child] if self._child not in (0, self._process.pid) else [])]

    @property
    def is_alive(self) -> bool:
        """Whether the process that holds the libraries runs."""
        return self._process.poll() is None

    def load(self) -> bool:
        """Wait until a child is ready; False when there will be none."""
        with self._pipes:
            while not self._child:
                line, _ = self._line(_LOADING_SECONDS, self._process.pid)
                if not line:
                    return False
                word, _, pid = line.partition(" ")
                self._child = int(pid) if word == "ready" else 0
            return True

    def ask(self, question: dict[str, Any]) -> Verdict:
        """The verdict; "unscored" with the rule "timeout", "memory" or "crash" when the child had to go."""
        with self._pipes:
            return self._asked(json.dumps(question))

    def _asked(self, question: str) -> Verdict:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # a broken pipe, or one closed before the turn came
            return Verdict("unscored", "crash", "the worker had ended")
        line, is_late = self._line(self._limits.seconds, self._child)
        if line.startswith("{"):
            reply = json.loads(line)
            self._child = 0 if reply["rule"] == "memory" else self._child
            return Verdict(_STATUSES[reply["status"]], reply["rule"], reply.get("detail", ""))
        self._child = int(line.partition(" ")[2]) if line.startswith("ready") else 0
        if is_late:
            return Verdict("unscored", "timeout", f"more than {self._limits.seconds:g} s")
        return Verdict("unscored", "crash", "the worker ended")

    def _line(self, seconds: float, victim: int) -> tuple[str, bool]:
        """The next line from the process, and whether `victim` was killed for being late with it."""
        assert self._process.stdout is not None
        late = threading.Event()

        def expire() -> None:
            late.set()
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(victim, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        try:
            line = "" if self._process.stdout.closed else self._process.stdout.readline()
        finally:
            timer.cancel()
        return line, late.is_set()

    def kill(self) -> None:
        """End both processes and take the pipes back; twice is fine."""
        self._process.kill()
        self._process.wait()
        for pid in [self._child] if self._child else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        with self._pipes:  # whoever was reading has met the end by now
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what was still to be written has no reader any more
                        pipe.close()


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
        self._seats: queue.LifoQueue[Worker | None] = queue.LifoQueue()  # None: a seat whose worker is to be started
        self._workers: set[Worker] = set()
        self._lock = threading.Lock()
        self._closed = False
        for _ in range(workers):
            self._seats.put(None)
        self.size = workers

    def __enter__(self) -> SlowPath:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def _start(self) -> Worker | None:
        with self._lock:
            if self._closed:
                return None
            worker = Worker(self._backend, self._limits)
            self._workers.add(worker)
            return worker

    def _replace(self, worker: Worker | None) -> Worker | None:
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
