"""Tests of the HTTP client with servers that refuse requests, fail, or lose a reply."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import anyio
import pytest

from atts.concurrency import collect, task_group
from atts.core import Message, SampleRequest
from atts.errors import EngineTimeout, EngineUnavailable
from atts.servers import RemoteEngine, RemoteOptions
from atts.servers.client import AdaptiveLimit, Call, Client, decode, is_score, logprob_of
from atts.testing import ServerFaults, ToyTokenizer, run_virtual
from atts.testing.servers import DialectServer

REQUEST = SampleRequest(
    ToyTokenizer().render([Message("user", "Start at 4. +3. What is the result?")]), 24
)


class Hands:
    """A clock whose time the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def filled(most: int, clock: Hands) -> AdaptiveLimit:
    """Make a limit of requests in flight, and take all of its slots."""
    limit = AdaptiveLimit(most, clock)
    while limit.take_nowait():
        pass
    assert limit.in_use == most
    return limit


def slots(limit: AdaptiveLimit) -> int:
    """Return the current limit of requests in flight."""
    assert limit.slots is not None
    return limit.slots


def test_a_burst_of_refusals_shrinks_the_limit_once() -> None:
    """A burst of refusals shrinks the limit once.

    Refusals of requests that were sent before the limit shrank are ignored; refusals of later
    requests shrink it again.
    """
    clock = Hands()
    limit = filled(100, clock)
    sent_at = clock.now
    clock.now += 0.1
    for _ in range(30):
        limit.refused(sent_at)
        clock.now += 0.1
    assert slots(limit) == 80
    limit.refused(clock.now)
    assert slots(limit) == 64


def test_a_stray_refusal_is_forgotten_within_seconds() -> None:
    """After a single refusal with few requests in flight, the limit doubles each second."""
    clock = Hands()
    limit = AdaptiveLimit(4096, clock)
    for _ in range(74):
        limit.take_nowait()
    limit.refused(clock.now)
    seen = [slots(limit)]
    for _ in range(8):
        clock.now += AdaptiveLimit.STEP_SECONDS
        limit.answered()
        limit.answered()
        seen.append(slots(limit))
    assert seen[:4] == [59, 118, 236, 473]
    assert seen[-1] == 4096


def test_refusals_that_keep_coming_slow_the_growth() -> None:
    """Each further refusal makes the limit wait longer before it grows, and then grow in smaller
    steps, up to bounds.
    """
    clock = Hands()
    limit = filled(1000, clock)
    for _ in range(6):
        limit.refused(clock.now)
        clock.now += 0.5
    low = slots(limit)
    clock.now += AdaptiveLimit.LONGEST_PAUSE - 1.0
    limit.answered()
    assert slots(limit) == low
    clock.now += 1.0
    limit.answered()
    assert low < slots(limit) <= low * 1.06 + 1
    clock.now += AdaptiveLimit.MEMORY_SECONDS
    limit.refused(clock.now)
    low = slots(limit)
    clock.now += AdaptiveLimit.STEP_SECONDS
    limit.answered()
    assert slots(limit) >= 2 * low - 1


def test_growth_waits_for_retry_after() -> None:
    """If a server asks for a pause of ten seconds, the limit of requests in flight does not grow
    earlier.
    """
    clock = Hands()
    limit = filled(100, clock)
    limit.refused(clock.now, 10.0)
    clock.now += 9.0
    limit.answered()
    assert slots(limit) == 80
    clock.now += 1.0
    limit.answered()
    assert slots(limit) == 100


def test_a_server_error_stops_growth_for_a_moment_and_shrinks_nothing() -> None:
    """A server error stops growth of the limit for a moment but does not lower the limit, because
    the server need not be overloaded.
    """
    clock = Hands()
    limit = filled(100, clock)
    limit.refused(clock.now)
    clock.now += 0.9
    limit.erred()
    clock.now += 0.9
    limit.answered()
    assert slots(limit) == 80
    clock.now += 0.2
    limit.answered()
    assert slots(limit) == 100


class Hotel:
    """A simulated server that accepts at most `rooms` requests at once and refuses the others."""

    def __init__(self, rooms: int, *, strays: int = 0) -> None:
        self.limit = AdaptiveLimit(4096, anyio.current_time)
        self.rooms = rooms
        self.strays = strays
        self.guests = 0
        self.served = 0
        self.refused = 0

    async def call(self) -> bool:
        """Take a slot, send the request and report its result to the limit; return whether the
        server accepted it.
        """
        if not self.limit.take_nowait():
            await self.limit.take()
        sent_at = anyio.current_time()
        try:
            is_stray = self.strays > 0 and self.guests == 74
            if is_stray or self.guests >= self.rooms:
                self.strays -= is_stray
                await anyio.sleep(0.01)
                self.refused += 1
                self.limit.refused(sent_at)
                return False
            self.guests += 1
            await anyio.sleep(0.5)
            self.guests -= 1
            self.served += 1
            self.limit.answered()
            return True
        finally:
            self.limit.give()

    async def busy(self, callers: int, seconds: float) -> None:
        """Send requests from callers that start one after the other and never stop sending."""

        async def ask(number: int) -> None:
            await anyio.sleep(0.01 * number)
            while anyio.current_time() < seconds:
                if not await self.call():
                    await anyio.sleep(0.25)

        await collect([partial(ask, number) for number in range(callers)])


def test_one_refusal_does_not_delay_a_growing_load() -> None:
    """If 400 callers arrive within four seconds, all of them soon have a request in flight despite
    one refusal.
    """
    hotel = Hotel(10_000, strays=1)

    async def ramp() -> int:
        async with task_group() as group:
            group.start_soon(hotel.busy, 400, 12.0)
            await anyio.sleep(9.0)
            return hotel.guests

    assert run_virtual(ramp) == 400
    assert hotel.refused == 1


def test_a_full_server_stays_busy_with_few_refusals() -> None:
    """With room for a hundred requests and 400 callers, the server stays nearly full and refuses
    few requests.
    """
    hotel = Hotel(100)
    run_virtual(hotel.busy, 400, 240.0)
    assert hotel.served > 0.75 * 100 * 2 * 240
    assert hotel.refused < 0.05 * hotel.served


@pytest.mark.anyio
async def test_waiting_calls_are_served_in_order() -> None:
    """Waiting calls get slots in order of arrival, and the slot of a cancelled waiter goes to the
    next one.
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
        limit.give()  # this slot would have been for the cancelled rollout
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
    """For each attempt whose reply was lost, the server gets an abort before the next attempt.

    A refused connection needs no abort.
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


def test_infinity_and_nan_of_python_servers_are_read() -> None:
    """-Infinity and NaN, which some servers send although they are not JSON, are read as numbers;
    the same words in texts stay unchanged.
    """
    found = decode(b'{"a": [-Infinity, -0.5], "b": null}', dict[str, list[float] | None])
    assert [logprob_of(value) for value in found["a"]] == [-math.inf, -0.5]
    text, number = decode(b'["NaN \\" -Infinity", NaN]', tuple[str, float])
    assert text == 'NaN " -Infinity'
    assert not is_score(number)
    for broken in (b"[1,", b"", b"<html>", b"[" * 100_000, b'["1"]', b"[true]", b"[1e999]"):
        with pytest.raises(ValueError, match=r".+"):
            decode(broken, list[float])


@pytest.mark.anyio
async def test_a_missed_deadline_reports_the_last_refusal(
    serve: Callable[..., DialectServer],
) -> None:
    """A caller that is refused until its deadline gets the last refusal as its error, not a
    time-out.
    """
    server = serve("sglang", faults=ServerFaults({"429": 1.0}))
    options = RemoteOptions(
        timeout_seconds=5.0, attempts=1000, delay_seconds=0.01, connect_seconds=20.0
    )
    one = Client("remote", server.url, options)
    with pytest.raises(
        EngineTimeout, match="no answer within 5 s; the previous attempt failed: status 429"
    ):
        await one.ask(lambda rid: Call("/generate", {"rid": rid}), bytes, lambda rid: None, 1)
    await one.aclose()
