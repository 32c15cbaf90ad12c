"""Tests of the task graph: order, limits, times and edges, and failures that stay local."""

from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atts import concurrency
from atts.core import CallSpan
from atts.errors import EngineTimeout, OptionError, OutOfMemory, UsageError
from atts.graph import (
    Graph,
    Limit,
    ProblemScope,
    RetryPolicy,
    RolloutResult,
    RolloutScope,
    measure,
    sibling_edges,
)
from atts.journal import JOURNAL, JournalOptions, Manifest, open_journal, read_entries
from atts.testing.clock import Backend, run_virtual
from tests.graph.recording import Recording

T = TypeVar("T")
Virtually = Callable[[Callable[[], Awaitable[T]]], T]
IsEmpty = Callable[[Graph], bool]


class Engine(Protocol):
    """The interface of the fixture `engine`, which counts its calls."""

    in_flight: dict[str, int]
    peak: dict[str, int]
    calls: int

    async def work(self, name: str, seconds: float) -> float: ...


@dataclass(frozen=True)
class Named:
    """A problem that has only the id that the graph needs."""

    id: str


def problems(count: int) -> list[Named]:
    """Make numbered problems."""
    return [Named(f"p{number}") for number in range(count)]


# tests of order and limits


def test_results_are_in_order_although_events_are_not(
    virtually: Virtually[list[list[int | None]]],
) -> None:
    """Later samples end and are reported first, but the result lists are in the order of the
    problems and samples.
    """
    told: list[object] = []

    async def main() -> list[list[int | None]]:
        async def solve(problem: Named, scope: ProblemScope) -> list[int | None]:
            async def rollout(line: RolloutScope[int]) -> int:
                await line.call("draft", anyio.sleep, 10.0 - line.sample - int(problem.id[1:]))
                return line.sample

            return [result.value for result in await scope.rollouts(rollout, 3)]

        results = await Graph(sink=told.append).run(problems(3), solve)
        assert [result.problem for result in results] == ["p0", "p1", "p2"]
        return [result.value or [] for result in results]

    assert virtually(main) == [[0, 1, 2]] * 3
    ended = [event.ended for event in told if isinstance(event, CallSpan)]
    assert ended == sorted(ended)
    assert next(event for event in told if isinstance(event, CallSpan)).sample == 2


def test_times_and_edges_equal_hand_computation(virtually: Virtually[None]) -> None:
    """The queue times, compute times and edges of two rollouts on one slot equal values computed by
    hand.
    """
    recording = Recording()

    async def main() -> None:
        async def rollout(line: RolloutScope[None]) -> None:
            await anyio.sleep(0.5 * line.sample)  # trio starts tasks in random order
            await line.call("draft", anyio.sleep, 2.0, turn=0)
            await line.call("score", anyio.sleep, 3.0, engine="target", turn=0, tokens=7)

        async def solve(problem: Named, scope: ProblemScope) -> None:
            await scope.rollouts(rollout, 2)

        graph = Graph(
            limits={"draft": Limit(1), "target": Limit(1, 10)}, sink=recording, first_node=100
        )
        await graph.run(problems(1), solve)
        stats = graph.stats()
        assert (stats.seconds, stats.nodes, stats.engines["target"].busy_seconds) == (8.0, 4, 6.0)
        assert stats.busy_share("target") == 6 / 8

    virtually(main)
    nodes = sorted(recording.nodes(), key=lambda n: n.node)
    assert [(n.stage, n.sample, n.queue, n.compute, n.tokens) for n in nodes] == [
        ("draft", 0, 0.0, 2.0, 0),
        ("draft", 1, 1.5, 2.0, 0),
        ("score", 0, 0.0, 3.0, 7),
        ("score", 1, 1.0, 3.0, 7),
    ]
    assert [n.node for n in nodes] == [100, 101, 102, 103]
    assert [n.after for n in nodes] == [(), (), (100,), (101,)]
    assert [(span.sample, span.status, span.waited) for span in recording.rollouts] == [
        (0, "done", 0),
        (1, "done", 0),
    ]


plans = st.lists(  # a list of problems, each a list of rollouts, each a list of calls (engine, tokens, seconds)
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(["draft", "target"]), st.integers(0, 8), st.integers(0, 5)),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=4,
    ),
    max_size=4,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=plans, places=st.integers(1, 4), slots=st.integers(1, 3), tokens=st.integers(8, 12))
def test_limits_hold_and_a_call_waits_only_if_one_is_reached(
    anyio_backend: Backend,
    is_empty: IsEmpty,
    plan: list[list[list[tuple[str, int, int]]]],
    places: int,
    slots: int,
    tokens: int,
) -> None:
    """Rollouts, call slots and tokens stay within their limits at every step."""
    graph = Graph(rollouts=places, limits={"draft": Limit(slots), "target": Limit(slots, tokens)})
    waiting_for_tokens = 0

    def check() -> None:
        nonlocal waiting_for_tokens
        stats = graph.stats()
        assert stats.rollouts_in_flight <= places
        assert not stats.rollouts_waiting or stats.rollouts_in_flight == places
        for name, use in stats.engines.items():
            assert use.in_use <= slots
            assert use.tokens_in_use <= tokens
            if use.waiting and use.in_use < slots:
                assert name == "target", "a call waits although a slot is free"
                assert use.tokens_in_use + 8 > tokens, (
                    "a call waits although the largest request would fit"
                )

    async def work(seconds: int) -> None:
        check()
        await anyio.sleep(seconds)
        check()

    async def solve(problem: Named, scope: ProblemScope) -> int:
        async def rollout(line: RolloutScope[int]) -> int:
            for engine, needs, seconds in plan[int(problem.id[1:])][line.sample]:
                await line.call(
                    "step", work, seconds, engine=engine, tokens=needs if engine == "target" else 0
                )
            return line.sample

        return len(await scope.rollouts(rollout, len(plan[int(problem.id[1:])])))

    results = run_virtual(graph.run, problems(len(plan)), solve, backend=anyio_backend)
    assert [result.value for result in results] == [len(rollouts) for rollouts in plan]
    assert is_empty(graph)


def test_a_problem_is_opened_only_when_no_rollout_waits(virtually: Virtually[None]) -> None:
    """A new problem is read only when no rollout waits for a slot, so even a million problems need
    no memory in advance.
    """
    pulled = 0

    def endless() -> Iterator[Named]:
        nonlocal pulled
        while True:
            pulled += 1
            yield Named(f"p{pulled}")

    async def main() -> None:
        graph = Graph(rollouts=10)

        async def solve(problem: Named, scope: ProblemScope) -> None:
            async def rollout(line: RolloutScope[None]) -> None:
                await line.call("draft", anyio.sleep, 1.0)
                if problem.id == "p7":
                    graph.stop("enough")

            await scope.rollouts(rollout, 4)
            assert graph.stats().problems_open <= 6

        results = await graph.run(endless(), solve)
        assert len(results) < 14

    virtually(main)
    assert pulled < 16


def test_slow_conclusions_delay_the_next_problems(virtually: Virtually[int]) -> None:
    """If concluding a problem takes longer than its rollouts, new problems are delayed. The
    problems that wait for their conclusion then have at most four finished rollouts per slot.
    """

    async def main() -> int:
        waiting = most = 0

        async def solve(problem: Named, scope: ProblemScope) -> None:
            nonlocal waiting, most

            async def rollout(line: RolloutScope[None]) -> None:
                await line.call("draft", anyio.sleep, 1.0)

            await scope.rollouts(rollout, 4)
            with scope.concluding(4):
                waiting += 1
                most = max(most, waiting)
                await anyio.sleep(100.0)
                waiting -= 1

        results = await Graph(rollouts=4).run(problems(12), solve)
        assert [result.status for result in results] == ["done"] * 12
        return most

    # four problems wait for their conclusion, and a fifth was already running; a limit on open
    # problems alone would allow eight
    assert virtually(main) == 4 + 1


def test_rollout_slots_go_by_priority_then_by_age(
    virtually: Virtually[list[str]],
) -> None:
    """With one slot, rollouts run in order of problem and sample, except that a waiting rollout of
    a higher priority runs first.
    """

    async def main() -> list[str]:
        order: list[str] = []

        async def solve(problem: Named, scope: ProblemScope) -> None:
            async def rollout(line: RolloutScope[None]) -> None:
                order.append(f"{line.problem}/{line.sample}")
                await line.call("draft", anyio.sleep, 1.0)

            async def urgent(line: RolloutScope[None]) -> None:
                order.append(f"{line.problem}/urgent")

            await concurrency.collect([
                lambda: scope.rollouts(rollout, 2),
                lambda: _after(0.5, lambda: scope.rollouts(urgent, 1, priority=-1)),
            ])  # fmt: skip

        await Graph(rollouts=1).run(problems(2), solve)
        return order

    assert virtually(main) == ["p0/0", "p0/urgent", "p0/1", "p1/0", "p1/urgent", "p1/1"]


async def pass_by(line: RolloutScope[None]) -> None:
    """Return without a call, so that the rollout does nothing."""
    await anyio.lowlevel.checkpoint()


async def _after(seconds: float, function: Callable[[], Awaitable[T]]) -> T:
    await anyio.sleep(seconds)
    return await function()


def test_calls_are_served_by_priority_then_in_order(virtually: Virtually[list[int]]) -> None:
    """A full engine serves the lowest priority number first, and equal numbers in order of arrival."""

    async def main() -> list[int]:
        served: list[int] = []

        async def work(sample: int) -> None:
            served.append(sample)
            await anyio.sleep(1.0)

        async def solve(problem: Named, scope: ProblemScope) -> None:
            async def rollout(line: RolloutScope[None]) -> None:
                await line.call("draft", anyio.sleep, 0.1 * line.sample)
                await line.call(
                    "score", work, line.sample, engine="target", priority=line.sample % 2
                )

            await scope.rollouts(rollout, 6)

        await Graph(limits={"draft": Limit(), "target": Limit(1)}).run(problems(1), solve)
        return served

    assert virtually(main) == [0, 2, 4, 1, 3, 5]


def test_a_rollout_keeps_its_own_context_variables(
    virtually: Virtually[list[str]],
) -> None:
    """A rollout that frees a slot does not pass its context variables to the next rollout in the
    slot.
    """
    name: ContextVar[str] = ContextVar("name", default="")

    async def main() -> list[str]:
        async def solve(problem: Named, scope: ProblemScope) -> list[str]:
            name.set(problem.id)

            async def rollout(line: RolloutScope[str]) -> str:
                seen = name.get()
                name.set("leaked")
                await line.call("draft", anyio.sleep, 1.0)
                return seen

            return [result.value or "" for result in await scope.rollouts(rollout, 2)]

        return [
            seen
            for result in await Graph(rollouts=1).run(problems(2), solve)
            for seen in result.value or []
        ]

    assert virtually(main) == ["p0", "p0", "p1", "p1"]


def test_memory_does_not_grow_with_the_number_of_problems(
    anyio_backend: Backend, tmp_path: Path
) -> None:
    """If the sink writes to disk and results are not kept, memory is the same for more problems."""
    import tracemalloc

    def peak(count: int) -> int:
        async def solve(problem: Named, scope: ProblemScope) -> None:
            async def rollout(line: RolloutScope[None]) -> None:
                for turn in range(2):
                    await line.call("draft", anyio.sleep, 0.0, turn=turn)

            await scope.rollouts(rollout, 4)

        async def main() -> None:
            with (tmp_path / "log").open("w") as log:
                graph = Graph(
                    rollouts=16,
                    limits={"draft": Limit(8)},
                    sink=lambda event: log.write(f"{event}\n"),
                )
                await graph.drive(
                    (Named(f"p{n}") for n in range(count)), solve, lambda result: None
                )

        tracemalloc.start()
        try:
            anyio.run(main, backend=anyio_backend)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(10)
    # if any value of a problem were kept, a problem would take more than 260 bytes
    assert peak(300) - peak(40) < 260 * 300


# tests of failures


class Boom(RuntimeError):
    """An error whose class is unknown to atts."""


def test_a_failed_rollout_does_not_affect_its_siblings(virtually: Virtually[None]) -> None:
    """A failed rollout is recorded with its error and its saved value, and its siblings continue."""
    recording = Recording()

    async def main() -> None:
        async def solve(problem: Named, scope: ProblemScope) -> list[RolloutResult[str]]:
            async def rollout(line: RolloutScope[str]) -> str:
                await line.call("draft", anyio.sleep, 1.0)
                if line.sample == 1:
                    line.save("half")
                    raise Boom("bad luck")
                await line.call("draft", anyio.sleep, 1.0)
                return "whole"

            return await scope.rollouts(rollout, 3)

        (result,) = await Graph(sink=recording).run(problems(1), solve)
        assert result.status == "done"
        assert [(r.status, r.value) for r in result.value or []] == [
            ("done", "whole"),
            ("failed", "half"),
            ("done", "whole"),
        ]
        assert isinstance((result.value or [])[1].error, Boom)

    virtually(main)
    assert [span.error for span in recording.rollouts if span.status == "failed"] == [
        "Boom: bad luck"
    ]


def test_a_call_is_tried_again_as_the_policy_says(virtually: Virtually[None]) -> None:
    """A retryable error causes a wait and another attempt, other errors are final, and each attempt
    frees its slot.
    """
    recording = Recording()

    async def main() -> None:
        failures = {
            "flaky": [EngineTimeout("draft", "late")] * 2,
            "dead": [EngineTimeout("draft", "late")] * 9,
        }

        async def work(name: str) -> str:
            await anyio.sleep(1.0)
            if failures.get(name):
                raise failures[name].pop()
            return name

        async def solve(problem: Named, scope: ProblemScope) -> list[str]:
            async def rollout(line: RolloutScope[str]) -> str:
                return await line.call("draft", work, ["flaky", "dead", "fine"][line.sample])

            return [result.status for result in await scope.rollouts(rollout, 3)]

        policy = RetryPolicy(calls=3, delay_seconds=1.0)
        graph = Graph(limits={"draft": Limit(1)}, policy=policy, sink=recording)
        assert [r.value for r in await graph.run(problems(1), solve)] == [
            ["done", "failed", "done"]
        ]

    virtually(main)
    by_sample = {
        s: sorted((n for n in recording.nodes() if n.sample == s), key=lambda n: n.node)
        for s in range(3)
    }
    assert [n.status for n in by_sample[0]] == ["failed", "failed", "done"]
    assert [n.attempt for n in by_sample[1]] == [0, 1, 2]
    assert [n.status for n in by_sample[1]] == ["failed"] * 3
    waits = [later.queued - earlier.ended for earlier, later in pairwise(by_sample[0])]
    assert 0.7 <= waits[0] <= 1.3
    assert 1.4 <= waits[1] <= 2.6
    assert [n.after for n in by_sample[0]] == [(), (by_sample[0][0].node,), (by_sample[0][1].node,)]


def test_a_retried_rollout_continues_from_its_saved_value(virtually: Virtually[None]) -> None:
    """With attempts left, the second attempt continues from the value that the first attempt saved."""

    async def main() -> None:
        async def solve(problem: Named, scope: ProblemScope) -> list[int | None]:
            async def rollout(line: RolloutScope[int]) -> int:
                for turn in range(line.saved or 0, 4):
                    await line.call("draft", anyio.sleep, 1.0, turn=turn)
                    line.save(turn + 1)
                    if turn == 1 and line.attempt == 0:
                        raise EngineTimeout("draft", "late")
                return 10 * line.attempt + (line.saved or 0)

            return [result.value for result in await scope.rollouts(rollout, 2)]

        recording = Recording()
        graph = Graph(policy=RetryPolicy(rollouts=2), sink=recording)
        assert [r.value for r in await graph.run(problems(1), solve)] == [[14, 14]]
        assert len(recording.nodes()) == 8
        assert [span.attempts for span in recording.rollouts] == [2, 2]

    virtually(main)


def test_a_usage_error_ends_the_whole_run(virtually: Virtually[None], is_empty: IsEmpty) -> None:
    """A usage error is raised at once and unchanged, and nothing is left behind."""

    async def main() -> None:
        graph = Graph(rollouts=4)

        async def solve(problem: Named, scope: ProblemScope) -> None:
            async def rollout(line: RolloutScope[None]) -> None:
                await line.call("draft", anyio.sleep, 1.0 + line.sample)
                if line.sample == 2 and problem.id == "p1":
                    raise UsageError("no such thing")

            await scope.rollouts(rollout, 4)

        with pytest.raises(UsageError, match="no such thing"):
            await graph.run(problems(5), solve)
        assert is_empty(graph)
        assert graph.stats().problems_done < 5

    virtually(main)


def test_a_lost_server_ends_the_run(virtually: Virtually[None]) -> None:
    """A lost server ends the run with the server's error, because all other rollouts would fail one
    by one.
    """

    async def main() -> None:
        async def solve(problem: Named, scope: ProblemScope) -> None:
            async def rollout(line: RolloutScope[None]) -> None:
                await anyio.sleep(0.1)
                raise EngineTimeout("target", "gone")

            await scope.rollouts(rollout, 4)

        graph = Graph(rollouts=2, policy=RetryPolicy(failures_in_row=6))
        with pytest.raises(EngineTimeout, match="gone") as caught:
            await graph.run(problems(100), solve)
        assert "stopped after 6" in caught.value.__notes__[0]
        assert graph.stats().rollouts["failed"] < 10
        patient = Graph(policy=RetryPolicy(failures_in_row=None))
        assert len(await patient.run(problems(20), solve)) == 20

    virtually(main)


def test_a_failed_problem_does_not_affect_others(virtually: Virtually[None]) -> None:
    """An error in a problem's function or in `settle` becomes that problem's result, and other
    problems continue.
    """

    async def main() -> None:
        async def rollout(line: RolloutScope[int]) -> int:
            await line.call("draft", anyio.sleep, 1.0)
            return line.sample

        def settle(result: RolloutResult[int]) -> bool:
            raise Boom("vote")

        async def solve(problem: Named, scope: ProblemScope) -> str:
            if problem.id == "p0":
                raise Boom("early")
            await scope.rollouts(rollout, 4, settle=settle if problem.id == "p1" else None)
            return "fine"

        results = await Graph(rollouts=2).run(problems(3), solve)
        assert [(r.status, r.value, str(r.error)) for r in results] == [
            ("failed", None, "early"),
            ("failed", None, "vote"),
            ("done", "fine", "None"),
        ]

    virtually(main)


def test_unknown_engines_and_impossible_limits_are_refused(virtually: Virtually[None]) -> None:
    """A misspelt engine ends the run, and an impossible limit is refused when it is set."""

    async def main() -> None:
        async def solve(problem: Named, scope: ProblemScope) -> None:
            await scope.call("score", anyio.sleep, 0.0, engine="taget")

        with pytest.raises(OptionError, match="did you mean 'target'"):
            await Graph(limits={"draft": Limit(1), "target": Limit(1)}).run(problems(1), solve)

        async def nothing(problem: Named, scope: ProblemScope) -> None:
            await scope.rollouts(pass_by, 0)

        with pytest.raises(OptionError, match="at least 1 rollout is needed, but 0 was given"):
            await Graph().run(problems(1), nothing)

        async def gang(problem: Named, scope: ProblemScope) -> None:
            await scope.rollouts(pass_by, 5, admit="together")

        with pytest.raises(OptionError, match="5 rollouts must start together"):
            await Graph(rollouts=4).run(problems(1), gang)

    virtually(main)
    for make in (
        lambda: Limit(0),
        lambda: Limit(tokens=-1),
        lambda: Graph(rollouts=0),
        lambda: RetryPolicy(calls=0),
        lambda: RetryPolicy(delay_seconds=-1.0),
    ):
        with pytest.raises(OptionError):
            make()


def test_a_call_that_can_never_fit_fails_alone(
    virtually: Virtually[None], is_empty: IsEmpty
) -> None:
    """A call with more tokens than the engine's cache fails its rollout; siblings behind it in the
    queue continue.
    """

    async def main() -> None:
        async def solve(problem: Named, scope: ProblemScope) -> list[RolloutResult[None]]:
            async def rollout(line: RolloutScope[None]) -> None:
                await line.call(
                    "score", anyio.sleep, 1.0, engine="target", tokens=[6, 11, 6][line.sample]
                )

            return await scope.rollouts(rollout, 3)

        graph = Graph(limits={"target": Limit(tokens=10)})
        (result,) = await graph.run(problems(1), solve)
        found = result.value or []
        assert [r.status for r in found] == ["done", "failed", "done"]
        assert isinstance(found[1].error, OutOfMemory)
        assert anyio.current_time() == 2.0
        assert is_empty(graph)

    virtually(main)


# tests of rounds and edges


def test_rounds_wait_for_exactly_their_members(virtually: Virtually[float]) -> None:
    """Each round returns each member's value, and the next node has edges from all nodes of the
    round and no others.
    """
    recording = Recording()

    async def main() -> float:
        async def solve(problem: Named, scope: ProblemScope) -> list[list[dict[int, int]] | None]:
            async def rollout(line: RolloutScope[list[dict[int, int]]]) -> list[dict[int, int]]:
                seen: list[dict[int, int]] = []
                # sample 0 has the fewest turns, so it ends first and takes no part in later turns
                for turn in range(line.sample + 1):
                    await line.call("draft", anyio.sleep, 1.0 + line.sample, turn=turn)
                    seen.append(dict(await line.meet(10 * line.sample + turn)))
                return seen

            return [result.value for result in await scope.rollouts(rollout, 3, admit="together")]

        graph = Graph(rollouts=3, sink=recording)
        (result,) = await graph.run(problems(1), solve)
        first = {0: 0, 1: 10, 2: 20}
        second = {1: 11, 2: 21}
        third = {2: 22}
        assert result.value == [[first], [first, second], [first, second, third]]
        return graph.stats().sibling_seconds

    counted = virtually(main)
    drafts = {(n.sample, n.turn): n for n in recording.nodes() if n.stage == "draft"}
    assert {key: set(n.after) for key, n in drafts.items()} == {
        (0, 0): set(),
        (1, 0): set(),
        (2, 0): set(),
        **{(s, 1): {drafts[other, 0].node for other in range(3)} for s in (1, 2)},
        (2, 2): {drafts[other, 1].node for other in (1, 2)},
    }
    assert [drafts[s, 1].wait for s in (1, 2)] == [1.0, 0.0]
    waited = {span.sample: span.waited for span in recording.rollouts}
    # sample 0 waited 2 s in its round, then 6 s until the last sample ended; sample 1 had two
    # rounds
    assert waited == {0: 2.0 + 6.0, 1: 1.0 + 1.0 + 3.0, 2: 0.0}
    assert measure(recording.nodes()).sibling_seconds == counted == sum(waited.values())


def test_a_round_does_not_wait_for_a_member_that_ended(virtually: Virtually[None]) -> None:
    """A rollout that ended neither delays the round nor counts in its values."""

    async def main() -> None:
        async def solve(problem: Named, scope: ProblemScope) -> list[dict[int, int] | None]:
            async def rollout(line: RolloutScope[dict[int, int]]) -> dict[int, int]:
                await line.call("draft", anyio.sleep, 1.0 + 4.0 * line.sample)
                with anyio.move_on_after(1.0 if line.sample == 0 else 99.0):
                    return dict(await line.meet(line.sample))
                return {}

            return [result.value for result in await scope.rollouts(rollout, 3, admit="together")]

        (result,) = await Graph(rollouts=3).run(problems(1), solve)
        assert result.value == [{}, {1: 1, 2: 2}, {1: 1, 2: 2}]
        assert anyio.current_time() == 9.0

    virtually(main)


def test_without_rounds_no_edge_joins_siblings(virtually: Virtually[None]) -> None:
    """Asynchronous rollouts do not wait for siblings, and requesting a round is an error."""
    recording = Recording()

    async def main() -> None:
        async def solve(problem: Named, scope: ProblemScope) -> list[RolloutResult[None]]:
            await scope.call("score", anyio.sleep, 1.0)

            async def rollout(line: RolloutScope[None]) -> None:
                for turn in range(3):
                    await line.call("draft", anyio.sleep, 1.0 + line.sample, turn=turn)
                await line.meet(None)

            return await scope.rollouts(rollout, 3)

        with pytest.raises(OptionError, match="admitted together"):
            await Graph(sink=recording).run(problems(2), solve)

    virtually(main)
    nodes = recording.nodes()
    own = {n.node: n for n in nodes if n.sample == -1}
    assert sibling_edges(nodes) == set()
    assert any(node.after for node in nodes)
    assert all(len(n.after) == 1 for n in nodes if n.sample >= 0)
    assert {n.after[0] for n in nodes if n.turn == 0 and n.sample >= 0} == set(own)


def test_the_next_call_waits_for_all_parallel_calls(virtually: Virtually[None]) -> None:
    """Two parallel calls have edges from the same node, and the next call has edges from both;
    nothing waits for a cancelled call.
    """
    recording = Recording()

    async def main() -> None:
        async def solve(problem: Named, scope: ProblemScope) -> None:
            async def side(stage: str, seconds: float) -> str:
                await scope.call(stage, anyio.sleep, seconds)
                return stage

            await scope.call("a", anyio.sleep, 1.0)
            assert await concurrency.collect([lambda: side("b", 2.0), lambda: side("c", 1.0)]) == [
                "b",
                "c",
            ]
            with anyio.move_on_after(0.5):
                await scope.call("d", anyio.sleep, 9.0)
            await scope.call("e", anyio.sleep, 1.0)

        await Graph(sink=recording).run(problems(1), solve)

    virtually(main)
    name = {n.node: n.stage for n in recording.nodes()}
    assert {n.stage: {name[other] for other in n.after} for n in recording.nodes()} == {
        "a": set(),
        "b": {"a"},
        "c": {"a"},
        "d": {"b", "c"},
        "e": {"b", "c"},
    }
    assert [n.status for n in recording.nodes() if n.stage == "d"] == ["cancelled"]


@pytest.mark.parametrize("admit", ["each", "together"])
def test_edges_from_the_journal_are_the_live_ones(
    anyio_backend: Backend, tmp_path: Path, admit: str, virtually: Virtually[None]
) -> None:
    """Nodes and edges that are read from a journal equal those in the graph's memory."""
    live = Recording()

    async def main() -> None:
        async with open_journal(
            tmp_path / "run", Manifest(), JournalOptions(durability="close")
        ) as journal:

            def sink(event: object) -> None:
                live(event)
                if isinstance(event, CallSpan):
                    journal.record(event)

            async def solve(problem: Named, scope: ProblemScope) -> None:
                async def rollout(line: RolloutScope[None]) -> None:
                    for turn in range(3):
                        await line.call("draft", anyio.sleep, 1.0 + 0.3 * line.sample, turn=turn)
                        if admit == "together":
                            await line.meet(None)

                await scope.rollouts(
                    rollout, 3, admit="together" if admit == "together" else "each"
                )

            await Graph(rollouts=4, limits={"draft": Limit(2)}, sink=sink).run(problems(3), solve)

    virtually(main)
    entries = read_entries(tmp_path / "run" / JOURNAL)
    back = [entry.event for entry in entries if isinstance(entry.event, CallSpan)]
    assert back == live.nodes()
    assert (sibling_edges(back) == set()) == (admit == "each")


# tests of one graph for several runs


def test_a_graph_can_be_reused_and_shared(virtually: Virtually[None], is_empty: IsEmpty) -> None:
    """Call numbers continue in a second run, and two simultaneous runs stay within the limits of
    their common graph.
    """

    async def main() -> None:
        recording = Recording()
        most = 0

        async def solve(problem: Named, scope: ProblemScope) -> int:
            async def rollout(line: RolloutScope[int]) -> int:
                nonlocal most
                most = max(most, graph.stats().rollouts_in_flight)
                await line.call("draft", anyio.sleep, 1.0)
                return 1

            return sum(result.value or 0 for result in await scope.rollouts(rollout, 4))

        graph = Graph(rollouts=3, sink=recording)
        assert [r.value for r in await graph.run(problems(2), solve)] == [4, 4]
        both = await concurrency.collect(
            [lambda: graph.run(problems(3), solve), lambda: graph.run(problems(2), solve)]
        )
        assert [[r.value for r in results] for results in both] == [[4, 4, 4], [4, 4]]
        assert most == 3
        assert sorted(n.node for n in recording.nodes()) == list(range(28))
        assert is_empty(graph)

    virtually(main)
