"""Tests of sharing slots among users: no user starves, shares are respected, and a user who floods
the queue loses places in it.
"""

from __future__ import annotations

import random
from collections import Counter

import anyio
import pytest

from atts.concurrency import task_group
from atts.errors import OptionError
from atts.ledger import Amount
from atts.serving import ServeOptions
from atts.serving.service import Displaced, FairSlots
from atts.testing import Latency
from tests.serving.conftest import body, serving, toy_setup


async def served(
    slots: FairSlots, user: str, cost: float, order: list[str], release: anyio.Semaphore
) -> None:
    """Take a slot until the test frees one, and record the order in which slots are granted."""
    async with slots.slot(user) as spent:
        order.append(user)
        await release.acquire()
        spent.value = cost


async def queued(
    slots: FairSlots, requests: list[tuple[str, float]], taken: int | None = None
) -> list[str]:
    """Queue requests one after the other, then let them run; return the order in which they get
    slots.
    """
    order: list[str] = []
    release = anyio.Semaphore(0)
    async with task_group() as group:
        for user, cost in requests:
            group.start_soon(served, slots, user, cost, order, release)
            await anyio.wait_all_tasks_blocked()
        for _ in range(len(requests) if taken is None else taken):
            release.release()
            await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    return order


def test_a_late_user_does_not_wait_behind_a_flood() -> None:
    """A newly arrived user's request is among the next to be served, however many requests of
    another user wait.
    """

    async def main() -> None:
        slots = FairSlots(1, 100)
        order = await queued(slots, [*[("flood", 1.0)] * 50, ("late", 1.0)])
        assert order.index("late") <= 2
        assert Counter(order) == {"flood": 50, "late": 1}
        assert slots.waiting == 0

    anyio.run(main)


@pytest.mark.parametrize(("cost", "expected"), [(1.0, 30), (2.0, 22.5)])
def test_shares_hold_by_what_requests_cost(cost: float, expected: float) -> None:
    """A user with twice the share gets twice as much service, measured by the cost of requests
    instead of their number.
    """

    async def main() -> None:
        slots = FairSlots(1, 200, {"large": 2.0})
        requests = [*[("small", 1.0)] * 100, *[("large", cost)] * 100]
        random.Random(3).shuffle(requests)
        order = await queued(slots, requests, taken=44)
        assert abs(Counter(order[:45])["large"] - expected) <= 2

    anyio.run(main)


def test_time_without_requests_earns_no_credit() -> None:
    """A user who returns after a pause gets slots in turn with other users, not several at once."""

    async def main() -> None:
        slots = FairSlots(1, 100)
        await queued(slots, [("busy", 1.0)] * 30)
        order = await queued(slots, [*[("busy", 1.0)] * 10, *[("back", 1.0)] * 10])
        assert order[1:7].count("back") in (2, 3, 4)

    anyio.run(main)


def test_a_full_queue_displaces_the_newest_request_of_the_largest_user() -> None:
    """If the queue is full, a newcomer's request replaces the newest request of the user with most
    requests.

    The removed request does not get its place back. Two users who flood the queue share it evenly.
    """

    async def main() -> None:
        slots = FairSlots(1, 4)
        lost: list[str] = []
        held: list[str] = []

        async def ask(user: str) -> None:
            try:
                async with slots.slot(user):
                    held.append(user)
                    await anyio.sleep_forever()
            except Displaced:
                lost.append(user)

        async with task_group() as group:
            for user in ("flood",) * 5:
                group.start_soon(ask, user)
                await anyio.wait_all_tasks_blocked()
            assert not slots.has_room("flood")
            assert slots.has_room("new")
            for user in ("flood", "new", "new", "new", "flood"):
                group.start_soon(ask, user)
                await anyio.wait_all_tasks_blocked()
            assert held == ["flood"]
            assert lost == ["flood", "flood", "flood", "new", "flood"]
            assert slots.waiting_of("flood") == slots.waiting_of("new") == 2
            group.cancel_scope.cancel()
        assert slots.waiting == 0
        async with slots.slot("any"):
            pass

    anyio.run(main)


def test_cancelled_and_displaced_requests_lose_no_slot() -> None:
    """After any mixture of cancelled and removed requests, all slots are free again."""

    async def main() -> None:
        draw = random.Random(5)
        slots = FairSlots(3, 10, {"a": 3.0})

        async def ask(user: str, scope: anyio.CancelScope) -> None:
            with scope:
                try:
                    async with slots.slot(user) as cost:
                        await anyio.lowlevel.checkpoint()
                        cost.value = draw.random()
                except Displaced:
                    pass

        for _ in range(50):
            scopes = [anyio.CancelScope() for _ in range(30)]
            async with task_group() as group:
                for scope in scopes:
                    group.start_soon(ask, draw.choice("abc"), scope)
                for scope in draw.sample(scopes, 10):
                    await anyio.lowlevel.checkpoint()
                    scope.cancel()
            assert slots.waiting == 0
        async with slots.slot("x"), slots.slot("y"), slots.slot("z"):
            assert slots.has_room("w")

    anyio.run(main)


def test_users_that_come_and_go_are_forgotten() -> None:
    """Users without requests are forgotten.

    Clients choose the names of users, so remembering all names would take ever more memory.
    """

    async def main() -> None:
        slots = FairSlots(1, 10)
        for number in range(10_000):
            async with slots.slot(f"user {number}") as cost:
                cost.value = 1.0
        assert slots.num_users <= 4096

    anyio.run(main)


def test_a_share_of_nothing_is_refused() -> None:
    """A share of 0 is refused, because its user would never be served."""
    with pytest.raises(OptionError, match="give a share above 0"):
        ServeOptions(shares={"a": 0.0}, keys={"k": "a"})


@pytest.mark.parametrize("keys", [{}, {"k": ""}, {"k": "b"}])
def test_a_share_needs_a_key(keys: dict[str, str]) -> None:
    """A user's share is refused on a server without keys, because any client could give that user's
    name.
    """
    with pytest.raises(OptionError, match="'a' has no key"):
        ServeOptions(shares={"a": 2.0}, keys=keys)


@pytest.mark.parametrize(("key", "owner"), [("k-ann", "ann"), ("k-all", "")])
def test_a_client_cannot_name_itself_where_keys_have_names(key: str, owner: str) -> None:
    """With named keys, a client can neither use another user's share nor see that user's runs by
    setting the field `user`.
    """
    pytest.importorskip(
        "starlette", reason="starlette is not installed: pip install 'atts-llm[serve]'"
    )

    async def main() -> None:
        keys = {"k-ann": "ann", "k-bob": "bob", "k-all": ""}
        async with serving(keys=keys, shares={"bob": 5.0}) as client:
            headers = {"Authorization": f"Bearer {key}"}
            asked = body(user="bob", safety_identifier="bob")
            response = await client.http.post("/chat/completions", json=asked, headers=headers)
            assert client.service.runs[response.json()["atts"]["run"]].user == owner

    anyio.run(main)


def test_a_user_who_floods_the_server_does_not_starve_another() -> None:
    """If one user floods the queue, another user's request is still answered before most of the
    flood.
    """
    pytest.importorskip(
        "starlette", reason="starlette is not installed: pip install 'atts-llm[serve]'"
    )

    async def main() -> None:
        setup = toy_setup(Latency(per_sample=0.01, per_score=0.01))
        async with serving(setup, requests=1, queue=20) as client:
            ended: list[str] = []
            statuses = Counter[int]()

            async def ask(user: str) -> None:
                response = await client.http.post("/chat/completions", json=body(user=user))
                statuses[response.status_code] += 1
                ended.append(user)

            async with task_group() as group:
                for _ in range(21):
                    group.start_soon(ask, "flood")
                with anyio.fail_after(30):
                    while client.service.in_flight < 21:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                group.start_soon(ask, "other")
            # the queue was full, so one request of the flood got status 429 to make room
            assert statuses == {200: 21, 429: 1}
            assert ended.index("other") <= 6
            assert client.service.account.reserved == Amount()

    anyio.run(main)


def test_a_key_is_a_user() -> None:
    """The user of a named key sees only that user's runs and counters; the operator's key shows
    those of all users.
    """
    pytest.importorskip(
        "starlette", reason="starlette is not installed: pip install 'atts-llm[serve]'"
    )

    async def main() -> None:
        keys = {"k-ann": "ann", "k-bob": "bob", "k-all": ""}
        async with serving(keys=keys) as client:
            root = str(client.http.base_url).removesuffix("v1/")
            headers = {
                user: {"Authorization": f"Bearer k-{user}"} for user in ("ann", "bob", "all")
            }
            response = await client.http.post(
                "/chat/completions", json=body(user="bob"), headers=headers["ann"]
            )
            run = response.json()["atts"]["run"]
            assert client.service.runs[run].user == "ann"
            for user, count in (("ann", 1), ("bob", 0), ("all", 1)):
                listed = await client.http.get(f"{root}atts/runs", headers=headers[user])
                assert len(listed.json()["data"]) == count
                shown = await client.http.get(f"{root}atts/runs/{run}", headers=headers[user])
                assert shown.status_code == (200 if count else 404)
            cancelled = await client.http.post(
                f"{root}atts/runs/{run}/cancel", headers=headers["bob"]
            )
            assert cancelled.status_code == 404

    anyio.run(main)
