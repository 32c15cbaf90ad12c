"""Ask sympy whether two expressions are equal, in one worker process that starts when needed."""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from atts.evaluators.syntax.tree import Node
from atts.evaluators.verdict import OutOfTime, Undecided

SECONDS = 5.0  # time limit of the worker for one pair of expressions, in seconds
_TIMEOUTS = 2  # after this number of timeouts, an expression is not sent to the worker any more
_START = 60.0  # time limit for the start of the worker, in seconds; the worker must import sympy
_KEPT = 4096  # largest number of replies of the worker in the cache
_NODES = 400  # pairs of expression trees with more nodes than this are not sent to the worker
_FAILURES = 5  # after this number of failed starts, the worker is not started any more


_trial = threading.local()


@contextmanager
def without_asking() -> Generator[list[str]]:
    """Use only cached replies of sympy in this thread while the `with` block runs.

    The block gets a list that collects every question without a cached reply.
    """
    questions: list[str] = []
    _trial.questions = questions
    try:
        yield questions
    finally:
        _trial.questions = None


def are_equal(one: Node, two: Node, positive: frozenset[str] = frozenset()) -> bool:
    """Return True or False as sympy decides whether two expressions are equal. Any thread may call
    this.

    Variables in `positive` are assumed to be positive, and all others to be real.

    Raises Undecided if sympy cannot decide, and OutOfTime at the time limit. The worker process
    receives only trees from our parser, never text.
    """
    if len(one.walk()) + len(two.walk()) > _NODES:
        raise Undecided("too large for algebra")
    # The comparison is symmetric. Sort the two trees, so that both orders use the same cache entry.
    trees = sorted(json.dumps(_tree(node)) for node in (one, two))
    reply = WORKER.ask(trees[0], trees[1], json.dumps(sorted(positive)))
    if reply == "time":
        raise OutOfTime
    if not isinstance(reply, bool):
        raise Undecided("not settled by algebra")
    return reply


def _tree(node: Node) -> list[Any]:
    value = "" if node.value is None else str(node.value)
    return [node.kind, node.text, value, [_tree(arg) for arg in node.args]]


class Worker:
    """A child process that runs sympy, with a cache of its replies."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        # Process id of the process that started the worker. After a fork, the child process must
        # start a worker for itself.
        self.owner = 0
        self.failures = 0
        self.buffer = b""
        self.answers: dict[tuple[str, str, str], Any] = {}
        self.timeouts = Counter[str]()

    def ask(self, one: str, two: str, positive: str = "[]") -> Any:
        """Return the worker's reply to the question whether two trees are equal, from the cache if
        possible.

        If an expression has timed out several times, the reply is "time" without a new attempt.
        """
        # Look into the cache before taking the lock. Another thread may hold the lock for seconds,
        # while the worker computes.
        with suppress(KeyError):
            return self.answers[one, two, positive]
        questions = getattr(_trial, "questions", None)
        if questions is not None:
            questions.append(one)
            return None
        with self.lock:
            if (one, two, positive) in self.answers:
                return self.answers[one, two, positive]
            # If a comparison times out, the larger of its two expressions is regarded as the cause.
            larger = max(one, two, key=len)
            if self.timeouts[larger] >= _TIMEOUTS:
                return "time"
            if len(self.answers) >= _KEPT:
                self.answers.clear()
                self.timeouts.clear()
            question = f'"one": {one}, "two": {two}, "positive": {positive}, "seconds": {SECONDS}'
            reply = self.reply(f"{{{question}}}")
            if reply == "time":
                self.timeouts[larger] += 1
            self.answers[one, two, positive] = reply
            return reply

    def reply(self, question: str) -> Any:
        """Send a question to the worker and return its reply. If the worker exceeds the time limit,
        kill it and return "time".
        """
        if not self.start():
            return None
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(question.encode() + b"\n")
            self.process.stdin.flush()
            line = self.line(SECONDS + 3)
        except OSError:  # the pipe is closed, because the worker ran out of memory or was killed
            line = None
        if line is None:
            has_ended = self.process.poll() is not None
            self.stop()
            return None if has_ended else "time"
        return json.loads(line)

    def start(self) -> bool:
        """Start the worker unless it is running already. Return True if it is ready for
        questions.
        """
        is_ours = self.owner == os.getpid()
        if self.process is not None and is_ours and self.process.poll() is None:
            return True
        self.stop()
        if self.failures >= _FAILURES or os.name != "posix":
            return False
        script = str(Path(__file__).with_name("worker.py"))
        self.buffer = b""
        self.owner = os.getpid()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # in a new session, the worker does not receive Ctrl-C from the terminal
                start_new_session=True,
            )
        except OSError:  # without a worker, expressions stay undecided
            self.failures += 1
            return False
        if self.line(_START) == b"ready":
            return True
        self.failures += 1
        self.stop()
        return False

    def line(self, seconds: float) -> bytes | None:
        """Return the next line from the worker; None if the worker ends or `seconds` have passed."""
        assert self.process is not None
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        end = time.monotonic() + seconds
        while b"\n" not in self.buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                return None
            piece = os.read(pipe, 1 << 16)
            if not piece:
                return None
            self.buffer += piece
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def stop(self) -> None:
        """Kill the worker and close its pipes. A forked process only closes its copies of the
        pipes.
        """
        process = self.process
        self.process = None
        if process is None:
            return
        is_ours = self.owner == os.getpid()
        if is_ours:
            process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        if is_ours:
            process.wait()
        else:
            # After a fork, the worker is not a child of this process, so this process cannot wait
            # for it.
            process.returncode = 0


WORKER = Worker()
atexit.register(WORKER.stop)
