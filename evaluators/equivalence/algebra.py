"""Ask sympy about expressions, through one worker process that starts with the first question."""

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

SECONDS = 5.0  # time limit of one question
_TIMEOUTS = 2  # number of timeouts after which atts asks sympy nothing more about an expression
_START = 60.0  # seconds for the worker to import sympy, on a busy machine
_KEPT = 4096  # number of answers of sympy that are remembered
_NODES = 400  # largest number of nodes of both trees together that sympy is asked about
_FAILURES = 5  # number of failed starts after which atts starts no worker


_trial = threading.local()


@contextmanager
def without_asking() -> Generator[list[str]]:
    """Answer only from memory in this thread, and list the questions that would have been asked."""
    questions: list[str] = []
    _trial.questions = questions
    try:
        yield questions
    finally:
        _trial.questions = None


def are_equal(one: Node, two: Node, positive: frozenset[str] = frozenset()) -> bool:
    """Return sympy's verdict on two expressions; this may be called from any thread.

    The variables in `positive` are positive; the others are real.

    Raises Undecided if sympy proves nothing, and OutOfTime if the time is up. Only trees of our
    parser reach the worker, never text.
    """
    if len(one.walk()) + len(two.walk()) > _NODES:
        raise Undecided("too large for algebra")
    # the trees are sorted, so that the verdict is symmetric
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
    """One child process, its pipes, and the answers it has given."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0  # the process that started the worker; a fork has to start another one
        self.failures = 0
        self.buffer = b""
        self.answers: dict[tuple[str, str, str], Any] = {}
        self.timeouts = Counter[str]()

    def ask(self, one: str, two: str, positive: str = "[]") -> Any:
        """Return the reply about two trees, from memory if the question was asked before."""
        # look before taking the lock, because a waiting thread keeps the lock until the worker
        # replies
        with suppress(KeyError):
            return self.answers[one, two, positive]
        questions = getattr(_trial, "questions", None)
        if questions is not None:
            questions.append(one)
            return None
        with self.lock:
            if (one, two, positive) in self.answers:
                return self.answers[one, two, positive]
            larger = max(one, two, key=len)  # the larger expression determines the time
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
        """Send a question and wait for the reply; kill the worker if it does not reply."""
        if not self.start():
            return None
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(question.encode() + b"\n")
            self.process.stdin.flush()
            line = self.line(SECONDS + 3)
        except OSError:  # the worker has ended: out of memory, or killed
            line = None
        if line is None:
            has_ended = self.process.poll() is not None
            self.stop()
            return None if has_ended else "time"
        return json.loads(line)

    def start(self) -> bool:
        """Start the worker if there is none; return whether it is ready."""
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
                start_new_session=True,  # only the parent handles an interrupt from the terminal
            )
        except OSError:  # no process can be started here, so pairs stay undecided
            self.failures += 1
            return False
        if self.line(_START) == b"ready":
            return True
        self.failures += 1
        self.stop()
        return False

    def line(self, seconds: float) -> bytes | None:
        """Return the next line from the worker; None if the worker ends or the time is up."""
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
        """End the worker and close its pipes; in a forked process close only the pipes."""
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
            # after a fork, the worker belongs to the parent, which waits for it
            process.returncode = 0


WORKER = Worker()
atexit.register(WORKER.stop)
