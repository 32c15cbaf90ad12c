"""What the cache promises, seen through the engine: siblings stored once, nothing leaked, nobody left waiting."""

from __future__ import annotations

import os
import random
from pathlib import Path

import anyio
from anyio.from_thread import BlockingPortal

from atts.core import SampleRequest, Sampling
from atts.local import LocalEngine, LoopStats
from atts.seeds import Seed
from scripts.studies.harness import Options, Table, say, wall_seconds
from scripts.studies.local_subjects import Subject, engine_on, send_all, unending

_LEFT = 0.3  # share of rollouts whose caller goes away


def siblings(subject: Subject, portal: BlockingPortal) -> Table:
    """16 samples of one long prompt: computed once, stored once."""
    rows: list[tuple[int | float, ...]] = []
    with unending(subject) as folder:
        for length, tail in ((1024, 64), (1024, 256), (1700, 128)):
            say(f"siblings of a prompt of {length} tokens")
            (prompt,) = subject.prompts(1, length)
            with engine_on(portal, folder, kv_tokens=60_000) as engine:
                requests = [SampleRequest(prompt, tail, Sampling(0.7), Seed(sample=n)) for n in range(16)]
                portal.call(send_all, engine, requests)
                seen = portal.call(_settled, engine)
            least = length + 16 * tail
            rows.append((length, tail, seen.prefilled_tokens, seen.kv_peak, least, seen.kv_peak / least))
    columns = ("prompt", "tail", "prompt tokens computed", "peak slots", "prompt + 16 tails", "ratio")
    return Table(f"16 siblings of one prompt ({subject.name})", columns, tuple(rows))


async def _settled(engine: LocalEngine) -> LoopStats:
    """The loop's counters once nothing runs; they come a fifth of a second late."""
    with anyio.fail_after(20):
        while engine.loop_stats().in_flight or engine.loop_stats().kv_locked:  # noqa: ASYNC110  told by no event
            await anyio.sleep(0.05)
    await anyio.sleep(0.3)
    return engine.loop_stats()


def queue(subject: Subject, options: Options, portal: BlockingPortal) -> Table:
    """1,000 rollouts at once, a third of them left by their callers at random times, several times over."""
    rows: list[tuple[int | float, ...]] = []
    with unending(subject) as folder, engine_on(portal, folder, kv_tokens=8_000, max_batch=64, threads=1) as engine:
        for number in range(options.pick(2, 3, 4)):
            say(f"1,000 queued rollouts, wave {number + 1}")
            order: list[int] = []
            before = portal.call(_settled, engine)
            seconds = _wave(portal, engine, subject, order, number)
            after = portal.call(_settled, engine)
            overtaken = max(place - sum(other < ticket for other in order) for place, ticket in enumerate(order))
            rows.append(
                (
                    number + 1,
                    len(order),
                    after.cancelled - before.cancelled,
                    after.kv_locked,
                    after.kv_used,
                    overtaken,
                    after.longest_queue_seconds / seconds,
                    seconds,
                    _memory_mib(),
                )
            )
    columns = (
        "wave",
        "answered",
        "left",
        "slots still locked",
        "slots used",
        "most later ones before one",
        "longest wait over the wave",
        "seconds",
        "memory, MiB",
    )
    notes = ("8,000 slots and 64 places for 1,000 requests: most wait, some give way; used slots are cache.",)
    return Table(f"1,000 queued rollouts with random cancels ({subject.name})", columns, tuple(rows), notes)


def _wave(portal: BlockingPortal, engine: LocalEngine, subject: Subject, order: list[int], wave: int) -> float:
    return wall_seconds(lambda: portal.call(_crowd, engine, subject, order, wave))


async def _crowd(engine: LocalEngine, subject: Subject, order: list[int], wave: int) -> None:
    choice = random.Random(wave)
    prompts = subject.prompts(100, 40, 50 + wave)

    async def one(number: int, tokens: int, leave: float) -> None:
        request = SampleRequest(prompts[number % 100], tokens, Sampling(0.7), Seed(sample=number, turn=wave))
        with anyio.move_on_after(leave):
            await engine.sample(request)
            order.append(number)

    async with anyio.create_task_group() as group:
        for number in range(1000):
            leave = choice.expovariate(0.5) if choice.random() < _LEFT else 1e9
            group.start_soon(one, number, choice.randrange(1, 64), leave)


def _memory_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
