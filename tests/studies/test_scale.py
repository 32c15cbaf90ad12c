"""Tests of modelled engines: their costs equal the formula, and pipelines behave on them as on
other engines.
"""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.concurrency import collect
from atts.core import SampleRequest, ScoreRequest
from atts.sampling import Seed
from atts.testing import run_virtual

costs = pytest.importorskip("scripts.studies.modelled", reason="needs a checkout")
scale = pytest.importorskip("scripts.studies.scale", reason="needs a checkout")

COST = costs.Cost(step=0.01, sequence=0.001, cached=1e-5, prefilled=1e-4)


def _pair(**changes: Any) -> Any:
    found = costs.Pair("test", COST, replace(COST, step=0.04), 10**9, 10**9)
    return replace(found, **changes)


async def _timed(
    law: Any, jobs: list[tuple[float, int, int]], room: float = math.inf, cost: Any = COST
) -> tuple[list[float], Any]:
    """Return the time at which each job ended, and the engine's load; a job is (start, prompt
    tokens, tokens to write).
    """
    async with costs.BatchedEngine("draft", law, cost, room) as engine:

        async def one(number: int, start: float, ids: int, tokens: int) -> float:
            await anyio.sleep(start)
            seed = Seed(problem=f"q{number}", sample=0)
            await engine.sample(
                SampleRequest((1,) * ids, tokens, seed=seed, rollout=f"q{number}/0")
            )
            return anyio.current_time()

        ends = await collect([partial(one, number, *job) for number, job in enumerate(jobs)])
        return ends, engine.load


def test_one_request_takes_what_the_formula_says(law: Any) -> None:
    """A request takes a prefill step, then one step per token, each of which reads one token more
    than the step before.
    """
    ids = 15
    tokens = 4
    (end,), load = run_virtual(_timed, law, [(0.0, ids, tokens)])
    fed = ids * law.grain
    written = tokens * law.grain
    steps = sum(COST.seconds(1, fed + done) for done in range(written))
    assert end == pytest.approx(COST.seconds(0, 0, fed) + steps)
    assert load.steps == written + 1


def test_a_request_costs_its_step_and_its_host_once_each(law: Any) -> None:
    """A new request makes one step longer. Before this step, the host hands requests to the engine
    one after the other.
    """
    (plain,), _ = run_virtual(_timed, law, [(0.0, 15, 4)])
    dear = replace(COST, request=0.5, call=3.0)
    ends, load = run_virtual(_timed, law, [(0.0, 15, 4), (0.0, 15, 4)], math.inf, dear)
    assert ends[0] == pytest.approx(plain + 0.5 + 3.0)
    assert ends[1] == pytest.approx(ends[0] + 3.0)
    assert load.busy == pytest.approx(2 * (plain + 0.5))


def test_a_step_serves_the_whole_batch(law: Any) -> None:
    """Eight requests in one step take eight times the time per sequence, and the step's fixed time
    once.
    """
    ends, load = run_virtual(_timed, law, [(0.0, 15, 4)] * 8)
    fed = 15 * law.grain
    written = 4 * law.grain
    steps = sum(COST.seconds(8, 8 * (fed + done)) for done in range(written))
    assert ends == pytest.approx([COST.seconds(0, 0, 8 * fed) + steps] * 8)
    assert load.steps == written + 1


def test_requests_queue_when_the_token_budget_is_full(law: Any) -> None:
    """If there is room for one request, the second starts when the first has ended."""
    room = (15 + 4) * law.grain
    ends, load = run_virtual(_timed, law, [(0.0, 15, 4), (0.0, 15, 4)], room)
    alone, _ = run_virtual(_timed, law, [(0.0, 15, 4)])
    assert max(ends) == pytest.approx(2 * alone[0])
    assert load.peak <= room


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(15, 40), st.integers(1, 12)), min_size=1, max_size=12
    ),
    st.sampled_from([math.inf, 700.0, 400.0]),
)
def test_everything_is_served_and_nothing_is_held_afterwards(
    law: Any, jobs: list[tuple[float, int, int]], room: float
) -> None:
    """Requests at random times all end, all tokens are counted, and no step is lost or done twice."""
    ends, load = run_virtual(_timed, law, jobs, room)
    assert len(ends) == len(jobs)
    assert load.prefilled == sum(ids for _, ids, _ in jobs) * law.grain
    assert load.decoded <= sum(tokens for _, _, tokens in jobs) * law.grain
    assert load.busy <= max(ends) + 1e-9


async def _cancelled(law: Any) -> float:
    async with costs.BatchedEngine("draft", law, COST) as engine:
        seed = Seed(problem="q1", sample=0)
        with anyio.move_on_after(0.05):
            await engine.sample(SampleRequest((1,) * 15, 40, seed=seed, rollout="q1/0"))
        began = anyio.current_time()
        await engine.score(ScoreRequest((1,) * 15, (1,) * 5, rollout="q2/0"))
        return anyio.current_time() - began


def test_a_cancelled_request_gives_its_place_up(law: Any) -> None:
    """When a request is cancelled, the next request waits for at most one more step."""
    step = COST.seconds(1, 500)
    assert run_virtual(_cancelled, law) <= COST.seconds(1, 500, 20 * law.grain) + 2 * step


def test_the_closed_form_of_many_steps_is_the_sum_of_single_ones() -> None:
    """The closed form of many steps equals the sum of single steps.

    Its inverse gives the number of steps that have ended by a given time.
    """
    for batch, cached in ((1, 0), (7, 300), (64, 9000)):
        total = 0.0
        for count in range(1, 40):
            total += COST.seconds(batch, cached + (count - 1) * batch)
            assert COST.steps(count, batch, cached) == pytest.approx(total)
            assert COST.steps_within(total * 1.0000001, batch, cached) == count


def test_a_fit_finds_the_coefficients_it_was_made_with() -> None:
    """A least-squares fit on exact observations returns the coefficients that made the
    observations.
    """
    made = replace(COST, request=3e-4)
    seen: list[Any] = []
    for steps, batch, context, fed in (
        (10, 1, 20, 50),
        (10, 8, 20, 0),
        (5, 32, 200, 900),
        (1, 0, 0, 640),
        (40, 4, 9, 10),
    ):
        done = steps * batch
        seconds = (
            made.step * steps
            + made.sequence * done
            + made.cached * done * context
            + made.prefilled * fed
        )
        seen += [
            scale.Observation(steps, done, done * context, fed, seconds + made.request * n, n)
            for n in (1, 9)
        ]
    found, error = scale.fit(seen)
    names = ("step", "sequence", "cached", "prefilled", "request")
    assert [getattr(found, name) for name in names] == pytest.approx(
        [getattr(made, name) for name in names]
    )
    assert error < 1e-6


def test_all_methods_write_equally_much_and_only_rounds_wait(law: Any) -> None:
    """All methods write about the same number of tokens, because the simulated rollouts have the
    same lengths under every method.

    Only top-b waits for siblings.
    """
    base = scale.Cell(_pair(), "atts", problems=6, samples=4, in_flight=24)
    found = {
        m: scale.run_cell(replace(base, method=m), law)
        for m in ("atts", "top-b", "target-only", "draft-only")
    }
    written = {m: f.draft_tokens + f.target_tokens for m, f in found.items()}
    assert max(written.values()) <= 1.1 * min(written.values())
    assert found["atts"].waiting == 0 < found["top-b"].waiting
    assert found["atts"].seconds < found["top-b"].seconds
    assert found["target-only"].draft_tokens == 0 == found["draft-only"].target_tokens


def test_replicas_share_the_work(law: Any) -> None:
    """Four replicas of each engine finish sooner than one and do the same work."""
    one = scale.Cell(_pair(), "atts", problems=6, samples=8, in_flight=48)
    few, many = (scale.run_cell(replace(one, replicas=n, in_flight=48 // n), law) for n in (1, 4))
    assert many.seconds < few.seconds
    assert many.draft_tokens + many.target_tokens == pytest.approx(
        few.draft_tokens + few.target_tokens, rel=0.1
    )


def test_the_budget_of_the_graph_bounds_the_memory_of_the_engine(law: Any) -> None:
    """The graph's token budget bounds the engine's memory: the number of KV tokens in use never
    exceeds it.
    """
    cell = scale.Cell(
        _pair(), "target-only", problems=4, samples=8, in_flight=32, room="without end"
    )
    free = scale.run_cell(cell, law)
    bound = int(free.target_peak / 2)
    held = scale.run_cell(replace(cell, budget=bound), law)
    assert held.target_peak <= bound < free.target_peak
    assert held.seconds > free.seconds


def test_finished_cells_are_not_run_again(law: Any, tmp_path: Path) -> None:
    """A second session reads the finished cells of the first, and runs only a cell with other
    settings.
    """
    cell = scale.Cell(_pair(), "draft-only", problems=2, samples=2)
    file = tmp_path / "scale.jsonl"
    first = scale.Results(law, file).get(cell)
    again = scale.Results(law, file)
    assert len(again) == 1
    assert again.get(cell) == first
    again.get(replace(cell, samples=3))
    again.get(replace(cell, pair=replace(cell.pair, draft=replace(COST, request=1e-3))))
    assert len(scale.Results(law, file)) == 3
