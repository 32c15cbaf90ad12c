"""Tests of the scripted engine: latency, queue, counters, drift and cancellation."""

from dataclasses import replace
from functools import partial
from typing import Literal

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.concurrency import SlotQueue, collect, task_group
from atts.core import Message, SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.errors import EngineUnavailable, OptionError, UnsupportedByEngine
from atts.sampling import Seed
from atts.testing import Latency, ScoreDrift, ScriptedEngine, run_virtual, toy_problems
from atts.testing.toy_model import _nucleus  # pyright: ignore[reportPrivateUsage]

Backend = Literal["asyncio", "trio"]
# a problem with at least ten steps
PROBLEM = next(problem for problem in toy_problems(20) if problem.level == 5)
QUICK = settings(max_examples=60, deadline=None)


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Choose a back end."""
    return "trio" if request.param == "trio" else "asyncio"


def ids_of(engine: ScriptedEngine) -> TokenIds:
    """Render the problem's prompt as ids."""
    return engine.tokenizer.render([Message("user", PROBLEM.text)])


def request(engine: ScriptedEngine, sample: int = 0, tokens: int = 20) -> SampleRequest:
    """Make a request for at most this many tokens."""
    return SampleRequest(ids_of(engine), tokens, seed=Seed(sample=sample), rollout=str(sample))


# tests of time


def test_latency_is_a_sum_of_its_parts(backend: Backend) -> None:
    """The latency of a call is the sum of the configured times for overhead and for sampled, scored
    and prefilled tokens.

    Cached tokens cost nothing.
    """
    latency = Latency(
        per_sample=1.0, per_score=2.0, sampled_token=0.5, scored_token=0.25, prefilled_token=0.125
    )

    async def main() -> None:
        async with ScriptedEngine(latency=latency) as engine:
            ids = ids_of(engine)
            done = await engine.sample(request(engine, tokens=8))
            assert anyio.current_time() == 1 + 0.5 * 8 + 0.125 * len(ids)
            began = anyio.current_time()
            scored = await engine.score(ScoreRequest(ids + done.ids, done.ids[:4], rollout="0"))
            cached = len(ids) + 8 - 1  # the last token is always computed, never cached
            assert scored.cached_tokens == cached
            assert anyio.current_time() - began == 2 + 0.25 * 4 + 0.125 * (len(ids) + 8 - cached)

    run_virtual(main, backend=backend)


def test_jitter_spreads_times_the_same_way_every_time() -> None:
    """Jitter changes times between requests, but a request always takes the same time, whatever
    else is running.
    """

    async def times(order: list[int]) -> dict[int, float]:
        found: dict[int, float] = {}

        async def one(engine: ScriptedEngine, sample: int) -> None:
            await engine.sample(request(engine, sample, tokens=5))
            found[sample] = anyio.current_time()

        async with ScriptedEngine(latency=Latency(per_sample=10.0, jitter=0.5)) as engine:
            await collect([partial(one, engine, sample) for sample in order])
        return found

    first = run_virtual(times, list(range(30)))
    assert run_virtual(times, [*range(29, -1, -1), 99]) | first == run_virtual(
        times, [*range(29, -1, -1), 99]
    )
    assert len(set(first.values())) == 30
    assert 5 < sorted(first.values())[15] < 20


def test_real_latency_is_real() -> None:
    """Outside virtual time the engine really waits for its latency."""

    async def main() -> float:
        async with ScriptedEngine(latency=Latency(per_sample=0.05)) as engine:
            began = anyio.current_time()
            await engine.sample(request(engine))
            return anyio.current_time() - began

    assert anyio.run(main) >= 0.05


# tests of the queue


def test_slots_bound_what_runs_at_once_and_queue_in_order(backend: Backend) -> None:
    """Equal requests on two slots run two at a time in order of arrival, but a more urgent request
    runs earlier.
    """

    async def main() -> list[tuple[int, float]]:
        finished: list[tuple[int, float]] = []

        async def one(engine: ScriptedEngine, sample: int, priority: int) -> None:
            await engine.sample(replace(request(engine, sample), priority=priority))
            finished.append((sample, anyio.current_time()))

        async with ScriptedEngine(latency=Latency(per_sample=1.0), concurrency=2) as engine:
            async with task_group() as group:
                for sample, priority in ((0, 0), (1, 0), (2, 0), (3, 0), (4, -1)):
                    group.start_soon(one, engine, sample, priority)
                    await anyio.sleep(0.001)
            stats = engine.stats()
            assert stats.busy_seconds == pytest.approx(3.001, abs=0.01)
            assert stats.queue_seconds == pytest.approx(1 + 1 + 2, abs=0.02)
        return finished

    finished = run_virtual(main, backend=backend)
    assert [sample for sample, _ in finished] == [0, 1, 4, 2, 3]
    assert [round(time) for _, time in finished] == [1, 1, 2, 2, 3]


@QUICK
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(-1, 12)), max_size=12),
    st.integers(1, 3),
)
def test_slots_are_never_lost_or_doubled(visits: list[tuple[int, int, int]], number: int) -> None:
    """In whatever order callers come, work and are cancelled, the limit is kept, and in the end all
    slots are free.
    """

    async def main() -> None:
        slots = SlotQueue(number)
        holding = 0

        async def visit(arrive: int, hold: int, patience: int) -> None:
            nonlocal holding
            await anyio.sleep(arrive)
            with anyio.move_on_after(patience if patience >= 0 else 1e9):
                if not slots.take_nowait():
                    await slots.take(priority=hold % 2)
                holding += 1
                assert holding <= number
                try:
                    await anyio.sleep(hold)
                finally:
                    holding -= 1
                    slots.give()

        async with task_group() as group:
            for arrive, hold, patience in visits:
                group.start_soon(visit, arrive, hold, patience)
        assert (slots.in_use, slots.waiting, holding) == (0, 0, 0)

    run_virtual(main)


def test_cancelling_frees_the_slot_at_once(backend: Backend) -> None:
    """A cancelled request stops working or waiting at once, and the next request starts."""

    async def main() -> None:
        async with ScriptedEngine(latency=Latency(per_sample=100.0), concurrency=1) as engine:
            async with task_group() as group:

                async def cut(after: float) -> None:
                    with anyio.move_on_after(after):
                        await engine.sample(request(engine))

                group.start_soon(cut, 10.0)  # the request is cancelled while it works
                group.start_soon(cut, 5.0)  # the request is cancelled while it waits
                await anyio.sleep(7)
                assert engine.stats().cancelled == 1
                assert engine.stats().in_flight == 1
                await engine.sample(request(engine))
                assert anyio.current_time() == 110.0
            stats = engine.stats()
            assert (stats.requests, stats.cancelled, stats.failed, stats.in_flight) == (3, 2, 0, 0)
            assert stats.busy_seconds == 110.0

    run_virtual(main, backend=backend)


# tests of replies


@pytest.mark.anyio
async def test_schedule_and_hints_change_nothing_but_cached_tokens() -> None:
    """Requests get the same replies one by one on a new engine and all together on a busy one."""
    async with ScriptedEngine() as busy:
        together = await collect(
            [partial(busy.sample, request(busy, sample)) for sample in range(40)]
        )
    for sample in range(0, 40, 7):
        async with ScriptedEngine() as fresh:
            alone = await fresh.sample(replace(request(fresh, sample), rollout=""))
        assert replace(together[sample], cached_tokens=0) == alone


@pytest.mark.anyio
async def test_roles_share_tokens_and_differ_in_skill() -> None:
    """Draft and target share one tokenizer, and have different specs."""
    async with ScriptedEngine("draft") as draft, ScriptedEngine("target") as target:
        assert draft.spec.tokenizer == target.spec.tokenizer
        assert draft.spec.fingerprint() != target.spec.fingerprint()
        done = await draft.sample(request(draft, tokens=40))
        scores = await target.score(ScoreRequest(ids_of(draft), done.ids))
        assert scores.logprobs != done.logprobs
        assert scores.perplexity >= 1


def solve_with(draft: ScriptedEngine, target: ScriptedEngine) -> list[float]:
    """Return the perplexities of ten steps of one text."""

    async def main() -> list[float]:
        found: list[float] = []
        async with draft, target:
            ids = ids_of(draft)
            for turn in range(10):
                step = await draft.sample(
                    SampleRequest(ids, 50, Sampling(), Seed(turn=turn), ("\n\n",))
                )
                found.append((await target.score(ScoreRequest(ids, step.ids))).perplexity)
                ids += step.ids
        return found

    return run_virtual(main)


def test_drift_is_planted_where_it_was_asked_for() -> None:
    """From the given call or step on, log-probabilities are scaled; before, they are unchanged."""
    plain = solve_with(ScriptedEngine(), ScriptedEngine("target"))
    for drift in (ScoreDrift(4, 1.5), ScoreDrift(4, 1.5, when="steps")):
        drifted = solve_with(ScriptedEngine(), ScriptedEngine("target", drift=drift))
        assert drifted[:4] == plain[:4]
        assert drifted[4:] == pytest.approx([value**1.5 for value in plain[4:]])
    with pytest.raises(OptionError, match="known: calls, steps"):
        ScoreDrift(when="turns")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# tests of opening and closing


@pytest.mark.anyio
async def test_an_engine_serves_between_opening_and_closing_only() -> None:
    """Calls before opening and after closing are refused with advice, and a closed engine cannot be
    opened again.
    """
    engine = ScriptedEngine()
    with pytest.raises(EngineUnavailable, match="not open yet"):
        await engine.sample(request(engine))
    async with engine:
        await engine.sample(request(engine))
    with pytest.raises(EngineUnavailable, match="closed"):
        await engine.score(ScoreRequest((3,), (4,)))
    with pytest.raises(EngineUnavailable, match="Make a new engine"):
        await engine.__aenter__()


@pytest.mark.anyio
async def test_a_draft_need_not_score() -> None:
    """Scoring with an engine that does not list this capability is refused as unsupported."""
    async with ScriptedEngine(capabilities=frozenset({"sample"})) as engine:
        with pytest.raises(UnsupportedByEngine, match="cannot score"):
            await engine.score(ScoreRequest((3,), (4,)))


def test_impossible_options_are_errors() -> None:
    """A third role, fewer than one slot, and a misspelt option are refused."""
    with pytest.raises(OptionError, match="known: draft, target"):
        ScriptedEngine("drafter")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="at least 1"):
        ScriptedEngine(concurrency=0)
    with pytest.raises(TypeError, match="latancy"):
        ScriptedEngine(latancy=Latency())  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("top_p", "kept", "floors"), [(0.5, 1, 0), (0.7, 2, 0), (0.75, 2, 1), (0.85, 2, 2), (1.0, 2, 3)]
)
def test_a_nucleus_is_the_fewest_tokens_with_the_mass(top_p: float, kept: int, floors: int) -> None:
    """If two tokens are likely and three others share the rest, the nucleus has the two, and as
    many of the three as top_p needs.
    """
    weights, count = _nucleus([0.5, 0.2], 0.1, 3, top_p)
    assert (len(weights), count) == (kept, floors)
