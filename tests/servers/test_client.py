"""The layer that calls: what it does to a server that says too much, that fails, that loses a reply
on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio
import pytest

from atts.concurrency import task_group
from atts.core import Message, SampleRequest
from atts.errors import EngineTimeout, EngineUnavailable
from atts.servers import RemoteEngine, RemoteOptions
from atts.servers.client import CLEAN_SECONDS, COOL_SECONDS, AdaptiveLimit, Call, Client
from atts.servers.replies import decode, is_score, logprob_of
from atts.testing import ServerFaults, ToyTokenizer
from atts.testing.servers import DialectServer

REQUEST = SampleRequest(
    ToyTokenizer().render([Message("user", "Start at 4. +3. What is the result?")]), 24
)


class Hands:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def filled(most: int, clock: Hands) -> AdaptiveLimit:
    """A limit with every turn taken."""
    limit = AdaptiveLimit(most, clock)
    while limit.take_nowait():
        pass
    assert limit.in_use == most
    return limit


def test_a_burst_of_refusals_shrinks_the_limit_once_and_quiet_lets_it_grow() -> None:
    """Each further burst shrinks it more; it grows in little steps, after a quiet time, up to what
    was set.
    """
    clock = Hands()
    limit = filled(100, clock)
    for _ in range(30):
        limit.refused()
    assert limit.slots == 80
    clock.now += COOL_SECONDS
    limit.refused()
    assert limit.slots == 64
    limit.answered()
    assert limit.slots == 64
    seen = [limit.slots]
    for _ in range(40):
        clock.now += COOL_SECONDS if len(seen) == 1 else CLEAN_SECONDS
        limit.answered()
        limit.answered()
        seen.append(limit.slots)
    assert seen[1] in (67, 68)
    assert seen[-1] == 100
    assert all(
        before <= after <= before * 1.05 + 1 for before, after in zip(seen, seen[1:], strict=False)
    )


def test_a_server_error_stops_growth_and_shrinks_nothing() -> None:
    """Failing is no sign of too much."""
    clock = Hands()
    limit = filled(100, clock)
    limit.refused()
    clock.now += COOL_SECONDS
    limit.erred()
    clock.now += COOL_SECONDS - 1
    limit.answered()
    assert limit.slots == 80
    clock.now += 1
    limit.answered()
    assert limit.slots == 84


@pytest.mark.anyio
async def test_turns_go_in_order_and_a_cancelled_waiter_leaves_none_behind() -> None:
    """No caller overtakes those that wait, and what a waiter that gave up would have had goes to
    the next.
    """
    limit = filled(2, Hands())
    order = list[int]()
    gives_up = anyio.CancelScope()

    async def wait(number: int, within: anyio.CancelScope) -> None:
        with within:
            await limit.take()
            order.append(number)

    async with task_group() as group:
        for number, within in enumerate((gives_up, anyio.CancelScope(), anyio.CancelScope())):
            group.start_soon(wait, number, within)
            await anyio.wait_all_tasks_blocked()
        gives_up.cancel()
        limit.give()  # the turn that it would have had
        assert not limit.take_nowait()
        await anyio.wait_all_tasks_blocked()
        assert order == [1]
        limit.give()
    assert order == [1, 2]
    assert limit.in_use == 2


@pytest.mark.anyio
async def test_an_attempt_whose_reply_was_lost_is_aborted_before_the_next(
    serve: Callable[..., DialectServer], client: Callable[..., RemoteEngine]
) -> None:
    """Every one of the attempts has an abort of its own, which the server took; refused connections
    need none.
    """
    server = serve("sglang")
    async with client(server.url) as remote:
        for fault, aborts in (("reset", 3), ("500", 0)):
            before = remote.traffic.aborts, remote.traffic.retries
            server.faults = ServerFaults({fault: 1.0})  # type: ignore[dict-item]
            with pytest.raises(EngineUnavailable):
                await remote.sample(REQUEST)
            server.faults = ServerFaults()
            assert remote.traffic.aborts - before[0] == aborts
            assert remote.traffic.retries - before[1] == 2
        assert remote.traffic.aborts_failed == 0


def test_what_python_servers_send_for_infinity_is_read() -> None:
    """-Infinity and NaN are no JSON, and some servers send them; words in texts stay as they are."""
    found = decode(b'{"a": [-Infinity, -0.5], "b": null}', dict[str, list[float] | None])
    assert [logprob_of(value) for value in found["a"]] == [-math.inf, -0.5]
    text, number = decode(b'["NaN \\" -Infinity", NaN]', tuple[str, float])
    assert text == 'NaN " -Infinity'
    assert not is_score(number)
    for broken in (b"[1,", b"", b"<html>", b"[" * 100_000, b'["1"]', b"[true]", b"[1e999]"):
        with pytest.raises(ValueError, match=r".+"):
            decode(broken, list[float])


@pytest.mark.anyio
async def test_a_missed_deadline_says_what_the_attempt_before_met(
    serve: Callable[..., DialectServer],
) -> None:
    """Who is refused until the deadline hears of the refusal, not of silence."""
    server = serve("sglang", faults=ServerFaults({"429": 1.0}))
    options = RemoteOptions(
        timeout_seconds=5.0, attempts=1000, delay_seconds=0.01, connect_seconds=20.0
    )
    one = Client("remote", server.url, options)
    with pytest.raises(
        EngineTimeout, match="no answer within 5 s; the attempt before failed: status 429"
    ):
        await one.ask(lambda rid: Call("/generate", {"rid": rid}), bytes, lambda rid: None, 1)
    await one.aclose()
