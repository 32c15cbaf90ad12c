"""Tests of disturbed runs: no task or slot is left behind, and no other work is affected."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import anyio
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atts.core import CallSpan
from atts.errors import EngineError, EngineTimeout, UsageError
from atts.graph import Graph, Limit, ProblemScope, RetryPolicy, RolloutResult, RolloutScope
from atts.testing.clock import Backend, run_virtual
from tests.graph.recording import Recording

T = TypeVar("T")
Virtually = Callable[[Callable[[], Awaitable[T]]], T]
IsEmpty = Callable[[Graph], bool]


class Engine(Protocol):
    """The interface of the fixture `engine`, which counts its steps and its calls in flight."""

    tick: Callable[[int], None] | None
    in_flight: dict[str, int]
    steps: int
    calls: int

    async def work(self, name: str, seconds: float) -> float: ...


@dataclass(frozen=True)
class Named:
    """A problem that has only the id that the graph needs."""

    id: str


Disturbance = Literal[
    "cancel run",
    "stop run",
    "cancel problem",
    "cancel from outside",
    "retryable error",
    "final error",
    "fatal error",
    "foreign error",
    "settle",
]
DISTURBANCES: tuple[Disturbance, ...] = Disturbance.__args__  # type: ignore[attr-defined]
ERRORS: dict[str, Exception] = {
    "retryable error": EngineTimeout("draft", "late"),
    "final error": EngineError("draft", "broken"),
    "fatal error": UsageError("wrong"),
    "foreign error": RuntimeError("bug"),
}


@dataclass
class Disturbed:
    """A small run (3 problems of 3 rollouts of 2 turns) that is disturbed at chosen steps of the
    engine.
    """

    engine: Engine
    at: dict[int, Disturbance]
    admit: Literal["each", "together"] = "each"
    timeout_seconds: float | None = None
    rollout_timeout_seconds: float | None = None
    is_settled: bool = False
    raised: Exception | None = None

    def __post_init__(self) -> None:
        self.recording = Recording()
        self.outer: anyio.CancelScope | None = None
        self.scopes: list[ProblemScope] = []
        self.results: list[Any] = []
        self.engine.tick = self.tick
        self.graph = Graph(
            rollouts=4,
            limits={"draft": Limit(2), "target": Limit(1, tokens=10)},
            policy=RetryPolicy(delay_seconds=0.5, failures_in_row=None),
            sink=self.recording,
        )

    def tick(self, step: int) -> None:
        """Do what the test planned for this step of the engine."""
        what = self.at.get(step)
        if what in ERRORS:
            raise ERRORS[what]
        match what:
            case "cancel run":
                self.graph.cancel("test")
            case "stop run":
                self.graph.stop("test")
            case "cancel problem":
                self.scopes[-1].cancel("test")
            case "cancel from outside":
                assert self.outer is not None
                self.outer.cancel()
            case "settle":
                self.is_settled = True
            case _:
                pass

    async def solve(self, problem: Named, scope: ProblemScope) -> list[RolloutResult[int]]:
        """Solve a problem whose rollouts wait for slots, for calls and for each other."""
        self.scopes.append(scope)

        async def rollout(line: RolloutScope[int]) -> int:
            for turn in range(2):
                await line.call("draft", self.engine.work, "draft", 1.0 + line.sample, turn=turn)
                await line.call(
                    "score", self.engine.work, "target", 0.5, engine="target", turn=turn, tokens=6
                )
                line.save(turn)
                if self.admit == "together":
                    await line.meet(turn)
            return line.sample

        return await scope.rollouts(
            rollout,
            3,
            settle=lambda result: self.is_settled,
            timeout_seconds=self.rollout_timeout_seconds,
            admit=self.admit,
        )

    async def main(self) -> None:
        """Run the problems and check that the event loop has no task left."""
        problems = [Named(f"p{number}") for number in range(3)]
        before = {task.id for task in anyio.get_running_tasks()}
        with anyio.CancelScope() as self.outer:
            try:
                await self.graph.drive(
                    problems, self.solve, self.results.append, timeout_seconds=self.timeout_seconds
                )
            except Exception as error:
                if not any(error is known for known in ERRORS.values()):
                    raise
                self.raised = error
        assert {task.id for task in anyio.get_running_tasks()} <= before

    def check(self, is_empty: IsEmpty) -> None:
        """Check that no call or slot is left in use, that each call belongs to a recorded rollout,
        and that the results are possible ones.
        """
        assert not any(self.engine.in_flight.values())
        assert is_empty(self.graph)
        assert len(self.recording.problems) == len(self.scopes) == len(self.results)
        started = {(span.problem, span.sample) for span in self.recording.rollouts}
        assert len(started) == len(self.recording.rollouts)
        nodes = self.recording.nodes()
        assert {(node.problem, node.sample) for node in nodes} <= started
        assert all(n.ready <= n.queued <= n.started <= n.ended for n in nodes)
        assert (self.raised is None) == (
            "fatal error" not in self.at.values() or self.engine.steps < min(self.at)
        )
        for result in self.results:
            assert result.status != "done" or [r.sample for r in result.value] == [0, 1, 2]


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("admit", ["each", "together"])
def test_a_run_survives_a_disturbance_at_any_step(
    anyio_backend: Backend,
    engine: Engine,
    is_empty: IsEmpty,
    disturbance: Disturbance,
    admit: Literal["each", "together"],
) -> None:
    """Each kind of disturbance is tried at each step of a run, and no run leaves a task or slot
    behind.
    """
    quiet = Disturbed(engine, {}, admit)
    run_virtual(quiet.main, backend=anyio_backend)
    quiet.check(is_empty)
    steps = engine.steps
    assert steps == 3 * 3 * 2 * 2 * 2
    for step in range(1, steps + 1):
        engine.steps = 0
        run = Disturbed(engine, {step: disturbance}, admit)
        run_virtual(run.main, backend=anyio_backend)
        run.check(is_empty)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    at=st.dictionaries(
        st.integers(1, 80),
        st.sampled_from(DISTURBANCES).filter(lambda d: d != "fatal error"),
        max_size=8,
    ),
    admit=st.sampled_from(["each", "together"]),
    timeouts=st.tuples(*[st.none() | st.floats(0.1, 20.0)] * 2),
)
def test_a_run_survives_several_disturbances(
    anyio_backend: Backend,
    engine: Engine,
    is_empty: IsEmpty,
    at: dict[int, Disturbance],
    admit: Literal["each", "together"],
    timeouts: tuple[float | None, float | None],
) -> None:
    """Random combinations of cancellations, failures, votes and deadlines leave no task or slot
    behind.
    """
    engine.steps = 0
    run = Disturbed(engine, at, admit, *timeouts)
    run_virtual(run.main, backend=anyio_backend)
    run.check(is_empty)


def test_a_settled_vote_cancels_exactly_its_own_rollouts(
    virtually: Virtually[None], engine: Engine
) -> None:
    """After a settled vote, the problem's other rollouts end at once and keep their saved values;
    other problems continue.
    """
    recording = Recording()

    async def main() -> None:
        async def solve(problem: Named, scope: ProblemScope) -> list[RolloutResult[str]]:
            async def rollout(line: RolloutScope[str]) -> str:
                line.save("part")
                await line.call("draft", engine.work, "draft", 1.0 + line.sample)
                return "whole"

            settle = (lambda result: result.sample == 1) if problem.id == "p0" else None
            return await scope.rollouts(rollout, 5, settle=settle)

        graph = Graph(rollouts=8, limits={"draft": Limit(7)}, sink=recording)
        first, second = await graph.run([Named("p0"), Named("p1")], solve)
        assert [(r.status, r.value, r.why) for r in first.value or []] == [
            ("done", "whole", ""),
            ("done", "whole", ""),
            ("settled", "part", "settled"),
            ("settled", "part", "settled"),
            ("settled", "part", "settled"),
        ]
        assert [r.status for r in second.value or []] == ["done"] * 5
        assert graph.stats().rollouts == {"done": 7, "failed": 0, "settled": 3, "cancelled": 0}

    virtually(main)
    assert {
        (n.problem, n.sample, n.ended) for n in recording.nodes() if n.status == "cancelled"
    } == {("p0", sample, 2.0) for sample in (2, 3, 4)}


def test_a_rollout_that_never_started_has_a_result(virtually: Virtually[None]) -> None:
    """A rollout that waited for a slot when its problem ended has a result with a reason, but
    without value or span.
    """
    recording = Recording()

    async def main() -> None:
        async def solve(problem: Named, scope: ProblemScope) -> list[tuple[str, str]]:
            async def rollout(line: RolloutScope[None]) -> None:
                await line.call("draft", anyio.sleep, 2.0 + 0.1 * (line.sample % 10))

            late = await scope.rollouts(rollout, range(10, 14), timeout_seconds=3.0)
            settled = await scope.rollouts(rollout, 3, settle=lambda result: True)
            return [(result.status, result.why) for result in (*late, *settled)]

        (result,) = await Graph(rollouts=2, sink=recording).run([Named("p")], solve)
        assert result.value == [
            *[("done", "")] * 2,
            *[("cancelled", "deadline")] * 2,
            ("done", ""),
            *[("settled", "settled")] * 2,
        ]
        # five rollouts end early: three at the deadline, two at the vote
        assert anyio.current_time() == 5.0

    virtually(main)
    assert len(recording.rollouts) == 6


def test_at_the_deadline_open_problems_return_what_they_have(
    virtually: Virtually[None], is_empty: IsEmpty
) -> None:
    """At the deadline no more problems are opened, rollouts end, and each open problem still
    returns a result.
    """

    async def main() -> None:
        async def solve(problem: Named, scope: ProblemScope) -> int:
            async def rollout(line: RolloutScope[int]) -> int:
                for turn in range(10):
                    await line.call("draft", anyio.sleep, 1.0)
                    line.save(turn + 1)
                return 10

            results = await scope.rollouts(rollout, 2)
            assert all(r.status == "done" or r.why == "deadline" for r in results)
            return sum(result.value or 0 for result in results)

        graph = Graph(rollouts=2)
        results = await graph.run([Named(f"p{n}") for n in range(9)], solve, timeout_seconds=23.5)
        assert [(r.status, r.value) for r in results] == [("done", 20), ("done", 20), ("done", 6)]
        assert anyio.current_time() == 23.5
        assert is_empty(graph)

    virtually(main)


def test_a_cancelled_problem_is_cancelled_alone(virtually: Virtually[None]) -> None:
    """A cancelled problem ends with its own reason, and all other problems end as usual."""

    async def main() -> None:
        async def solve(problem: Named, scope: ProblemScope) -> str:
            async def rollout(line: RolloutScope[None]) -> None:
                await line.call("draft", anyio.sleep, 1.0)
                if problem.id == "p1" and line.sample == 0:
                    scope.cancel("budget")
                await line.call("draft", anyio.sleep, 1.0)

            await scope.rollouts(rollout, 2)
            return "fine"

        results = await Graph().run([Named(f"p{n}") for n in range(3)], solve)
        assert [(r.status, r.value, r.why) for r in results] == [
            ("done", "fine", ""),
            ("cancelled", None, "budget"),
            ("done", "fine", ""),
        ]

    virtually(main)


def test_a_sink_that_fails_ends_the_run_with_its_error(
    virtually: Virtually[None], is_empty: IsEmpty
) -> None:
    """If the sink cannot write events, the run ends with the sink's error, and no slot stays taken."""

    async def main() -> None:
        count = 0

        def sink(event: object) -> None:
            nonlocal count
            count += isinstance(event, CallSpan)
            if count == 5:
                raise UsageError("full")

        async def solve(problem: Named, scope: ProblemScope) -> None:
            async def rollout(line: RolloutScope[None]) -> None:
                for _ in range(3):
                    await line.call("draft", anyio.sleep, 1.0)

            await scope.rollouts(rollout, 3)

        graph = Graph(rollouts=4, limits={"draft": Limit(2)}, sink=sink)
        with pytest.raises(UsageError, match="full"):
            await graph.run([Named(f"p{n}") for n in range(3)], solve)
        assert is_empty(graph)

    virtually(main)


def test_ctrl_c_frees_everything_in_the_engine(anyio_backend: Backend) -> None:
    """In a run of many rollouts, all calls end before the process does."""
    program = textwrap.dedent(f"""
        import anyio, signal, sys
        from dataclasses import dataclass
        from atts.graph import Graph, Limit

        @dataclass(frozen=True)
        class Named:
            id: str

        inside = 0
        signal.signal(signal.SIGINT, signal.default_int_handler)  # where this was started in the background, too

        async def work():
            global inside
            inside += 1
            try:
                await anyio.sleep(0.2 if inside < 3 else 0.1)
                print("busy", flush=True)
                await anyio.sleep(60)
            finally:
                inside -= 1

        async def solve(problem, scope):
            async def rollout(line):
                await line.call("draft", work)
            await scope.rollouts(rollout, 8)

        graph = Graph(rollouts=6, limits={{"draft": Limit(3)}})
        try:
            anyio.run(graph.run, [Named(str(n)) for n in range(4)], solve, backend={anyio_backend!r})
        except BaseException as error:
            stats = graph.stats()
            print(type(error).__name__, inside, stats.rollouts_in_flight, stats.engines["draft"].in_use)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["busy\n"] * 3
        while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING:
            # trio raises the interrupt inside running code, so wait until all tasks sleep
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    assert said.split()[1:] == ["0", "0", "0"]
    assert "KeyboardInterrupt" in said or "ExceptionGroup" in said
