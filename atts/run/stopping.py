"""End a run early: on request, or when a comparison with an earlier run is decided."""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal

import anyio

from atts import concurrency
from atts.evaluators import ConfidenceSequence, Sequential
from atts.journal import COMPARED, FinishedProblem, RunState, Warned

Signals = Literal["handle", "ignore"]


class Stop:
    """A handle that ends a run, for a signal, a button or a caller's budget.

    After the first request no engine call begins, and those in flight finish and are recorded. A
    second request cancels them.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.calls = 0  # calls in flight
        self._changed = anyio.Event()

    def request(self) -> None:
        """Request the end of the run; a second request ends it at once.

        This must be called from the run's thread.
        """
        self.asked += 1
        self.report()

    @contextmanager
    def counted(self) -> Generator[None, None, None]:
        """Count work that is finished instead of cut when the run is asked to end."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            if self.asked:
                self.report()

    async def finished(self) -> None:
        """Wait until the run was asked to end, and until nothing is in flight or it was asked twice."""
        while not self.asked or (self.calls and self.asked < 2):
            await self._changed.wait()

    def report(self) -> None:
        """Wake up `finished` to check again."""
        self._changed.set()
        self._changed = anyio.Event()


async def watch_signals(stop: Stop, asked: Callable[[int], None]) -> None:
    """Turn Ctrl-C and SIGTERM into requests to end while this runs; outside the main thread, do
    nothing.

    The earlier handlers are restored afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    schedule = concurrency.loop_caller()
    received = deque[int]()
    arrived = anyio.Event()

    def deliver(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # This runs between any two instructions, so it must not use objects of the event loop.
        schedule(lambda: arrived.set())

    # Handlers are set directly: when asyncio's or anyio's receivers end, they put Python's own
    # handler in place for a moment. A press in that moment raised KeyboardInterrupt inside the
    # event loop, whose worker threads were then never stopped, and the process never ended.
    numbers = [signal.SIGINT] if sys.platform == "win32" else [signal.SIGINT, signal.SIGTERM]
    before = {number: signal.signal(number, deliver) for number in numbers}
    try:
        while True:
            while received:
                number = received.popleft()
                stop.request()
                asked(number)
            arrived = anyio.Event()
            # A signal that came before this line has scheduled a call, which sets the new event.
            await arrived.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@dataclass(frozen=True, slots=True)
class StopWhen:
    """Earlier votes to compare a running run with, and the condition to stop.

    Problems must come in an order that does not depend on them, such as one drawn by seed.
    """

    against: str
    votes: Mapping[str, float] = field(repr=False)  # keyed by problem; each in [0, 1]
    points: float = 0.0  # differences of at most this many points count as alike


class SequentialComparison:
    """A comparison that gets problems as they end, and tests them in the order of the dataset.

    Short problems end first, which would bias the test. So a problem counts only once all problems
    before it have ended; a failed problem delays those after it until a session has solved it.
    """

    def __init__(
        self, rule: StopWhen | None, state: RunState, record: Callable[[Warned], object]
    ) -> None:
        self._rule = rule
        self._state = state
        self._record = record
        self.answer = None if rule is None else Sequential("undecided", 0, -1.0, 1.0, rule.points)
        self.spared = 0  # number of problems that were not needed
        # created only if needed, because it holds a capital for each of thousands of candidates
        self._sequence = None if rule is None else ConfidenceSequence()
        self._order = list[str]()
        self._next = 0
        self._over: dict[str, float | None] = {}  # None: it was not graded

    def needs(self, problem: str) -> bool:
        """Register the next problem of the dataset; return whether to solve it, which is True for
        all that were started.
        """
        if self._rule is not None:
            self._order.append(problem)
            self._look(self._rule)
        if (
            self._is_settled
            and problem not in self._state.open
            and problem not in self._state.finished
        ):
            self.spared += 1
            return False
        return True

    def end(self, line: FinishedProblem) -> None:
        """Record that a problem has ended for good."""
        if self._rule is not None:
            self._over[line.problem] = None if line.verdict is None else float(line.is_correct)
            self._look(self._rule)

    def tell(self) -> str:
        """Return the text of the comparison, and record it once; "" if nothing is compared."""
        if self._rule is None:
            return ""
        words = (
            f"against {self._rule.against}: {self.answer}; problems came in an order drawn by "
            "seed. This interval is valid after every problem, unlike those of other numbers"
        )
        if COMPARED not in self._state.said:
            self._state.said.add(COMPARED)
            self._record(Warned(COMPARED, words))
        return words

    @property
    def _is_settled(self) -> bool:
        return self.answer is not None and self.answer.settled != "undecided"

    def _look(self, rule: StopWhen) -> None:
        while (
            self._next < len(self._order)
            and self._order[self._next] in self._over
            and not self._is_settled
        ):
            name = self._order[self._next]
            self._next += 1
            right = self._over[name]
            if right is not None and name in rule.votes:
                assert self._sequence is not None, "there is a rule"
                self._sequence.add(right - rule.votes[name])
                self.answer = self._sequence.answer(rule.points)
                if self._is_settled:
                    self.tell()
