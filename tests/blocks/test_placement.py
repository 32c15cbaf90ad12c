"""Tests of placing blocks on servers by cost, memory and neighbouring blocks, and of a simulated
cluster that uses these placements.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atts.accel.zoo.placement import Demand, Instance, dispatched, placed
from scripts.studies.blocks import (
    VIRTUAL_PROMPT,
    Arrivals,
    Cluster,
    Request,
    Serving,
    capacity,
    compared,
    virtual_requests,
)
from scripts.studies.modelled import DRAFT_8B as COST

SECONDS = st.floats(0, 10)


@given(
    st.lists(
        st.builds(Instance, SECONDS, SECONDS, st.booleans(), SECONDS, SECONDS, SECONDS),
        min_size=1,
        max_size=6,
    )
)
def test_a_request_goes_where_it_finishes_first(instances: list[Instance]) -> None:
    """A request goes to the server that finishes it first. The time includes waiting, computing,
    moving keys and values, and sending the result to the next server.

    In a tie, the request goes to the server that owns the block.
    """
    chosen = instances[dispatched(instances)]

    def cost(one: Instance) -> float:
        return one.wait + one.run + one.hop + (0 if one.owns else min(one.move, one.recompute))

    assert all(cost(chosen) <= cost(one) for one in instances)
    assert chosen.owns or not any(one.owns and cost(one) == cost(chosen) for one in instances)


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 8))
def test_blocks_are_placed_within_each_servers_memory(seed: int, count: int, servers: int) -> None:
    """Every block has a server; no server has more blocks than its memory holds, and none has a
    block twice.
    """
    rng = random.Random(seed)
    blocks = {str(at): Demand(rng.uniform(1, 3), rng.uniform(0, 3)) for at in range(count)}
    transitions = {
        (str(a), str(b)): rng.randrange(9) for a in range(count) for b in range(count) if a != b
    }
    rooms = [3.0 * count] * servers
    found = placed(blocks, transitions, rooms)
    assert found.keys() == blocks.keys()
    for places in found.values():
        assert len(set(places)) == len(places) > 0
    for at, room in enumerate(rooms):
        assert sum(blocks[name].bytes for name, places in found.items() if at in places) <= room


def test_a_busy_block_is_replicated_near_its_neighbours() -> None:
    """A busy block is placed on three servers, and the block that runs after it is placed on the
    same servers. An unrelated block is placed on a less busy server.
    """
    blocks = {"trunk": Demand(4, 2.5), "own": Demand(1, 0.2), "else": Demand(4, 0.4)}
    found = placed(blocks, {("trunk", "own"): 9}, [6.0] * 4)
    assert found["trunk"] == [0, 1, 2]
    assert set(found["own"]) == {0, 1, 2}
    assert found["else"] == [3]
    with pytest.raises(ValueError, match="no server has that much free memory"):
        placed({"large": Demand(7, 1)}, {}, [6.0])


def test_one_request_takes_the_time_of_its_steps() -> None:
    """A lone request takes the time of its prompt and of one step per further token, however its
    model is divided into blocks.
    """
    expected = COST.seconds(0, 0, VIRTUAL_PROMPT) + sum(
        COST.seconds(1, VIRTUAL_PROMPT + written) for written in range(4)
    )
    serving: tuple[Serving, ...] = ("blocks", "models")
    for way in serving:
        outcome = Cluster([Request(0, 0.0, VIRTUAL_PROMPT, 5)], 12, way, 0.8).run()
        assert outcome.p95 == pytest.approx(expected)
        assert outcome.busy == pytest.approx(1 / 12)
        assert outcome.tokens_per_busy_second == pytest.approx(5 / expected)


def test_shared_blocks_take_less_memory_and_time() -> None:
    """Twenty tenants that share four fifths of their blocks need a third of the memory and less
    time, compared with one model per server.
    """
    found = dict(compared(12, 0.5, "even", (0.8, 0.0, 120, 0)))
    assert found["blocks"].once < found["models"].once / 3
    assert found["blocks"].p95 < found["models"].p95
    assert all(0 < one.busy <= 1 for one in found.values())


def test_simulated_arrivals_keep_their_rate() -> None:
    """Evenly spaced and bursty arrivals both have the requested rate, and a popular tenant sends
    more requests than others.
    """
    kinds: tuple[Arrivals, ...] = ("even", "bursts")
    for kind in kinds:
        requests = virtual_requests(4000, 10.0, kind, 1.0, 0)
        assert 4000 / requests[-1].arrived == pytest.approx(10, rel=0.15)
        counts = sorted(sum(r.tenant == at for r in requests) for at in range(20))
        assert counts[-1] > 10 * counts[0]
    assert capacity(24) == pytest.approx(2 * capacity(12))
