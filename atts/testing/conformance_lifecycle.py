"""Conformance checks of how an engine works: counters, queues, closing, isolation, cancellation."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial

import anyio
import anyio.lowlevel

from atts.concurrency import collect, task_group
from atts.core import SampleRequest, Sampling, ScoreRequest
from atts.engine import Engine, EngineStats
from atts.errors import EngineUnavailable
from atts.testing.conformance_probe import GREEDY, LOOSE, Probe, check, refused, require


@check("sample")
async def check_order(probe: Probe) -> None:
    """Many more requests than any engine serves at once are all answered, each with its own answer."""
    requests = [replace(r, max_tokens=4) for r in probe.requests(24, LOOSE)]
    answers = await probe.sample_all(requests)
    for number in range(0, len(requests), 11):
        again = await probe.engine.sample(requests[number])
        said = f"request {number} of {len(requests)} was given an answer that is not its own"
        await probe.require_same(said, requests[number], answers[number].ids, again.ids)


@check()
async def check_stats(probe: Probe) -> None:
    """Counters only grow, count what was answered, and return to nothing in flight."""
    engine = probe.engine
    before = engine.stats()
    require(before.in_flight == 0, f"{before.in_flight} in flight before anything was asked")
    sampled = scored = requests = 0
    if probe.can("sample"):
        written = await probe.sample_all(probe.requests(2))
        sampled = sum(len(completion.ids) for completion in written)
        requests = len(written)
    middle = engine.stats()
    if probe.can("score"):
        await collect([partial(probe.score, prompt, prompt[:5]) for prompt in probe.prompts])
        scored = sum(len(prompt[:5]) for prompt in probe.prompts)
        requests = requests + len(probe.prompts)
    after = engine.stats()
    _require_growth(before, middle)
    _require_growth(middle, after)
    require(after.in_flight == 0, f"{after.in_flight} in flight after everything was answered")
    for name, grown in (
        ("requests", requests),
        ("sampled_tokens", sampled),
        ("scored_tokens", scored),
    ):
        counted = getattr(after, name) - getattr(before, name)
        require(counted == grown, f"{name} grew by {counted}, expected {grown}")


def _require_growth(before: EngineStats, after: EngineStats) -> None:
    for field in fields(EngineStats):
        old = getattr(before, field.name)
        new = getattr(after, field.name)
        require(new >= 0, f"{field.name} is {new}")
        require(new >= old or field.name == "in_flight", f"{field.name} fell from {old} to {new}")


@check("factory")
async def check_closing(probe: Probe) -> None:
    """Closing twice is fine, and a closed engine says that it is unavailable."""
    engine = probe.new_engine()
    async with engine:
        await _use(engine, probe)
    await engine.__aexit__(None, None, None)
    if probe.can("sample"):
        await refused(
            "sampling when closed", EngineUnavailable, partial(engine.sample, probe.request())
        )
    if probe.can("score"):
        request = ScoreRequest(probe.prompt, probe.prompt)
        await refused("scoring when closed", EngineUnavailable, partial(engine.score, request))


async def _use(engine: Engine, probe: Probe) -> None:
    if probe.can("sample"):
        await engine.sample(replace(probe.request(), max_tokens=2))
    else:
        await engine.score(ScoreRequest(probe.prompt, probe.prompt[:2]))


@check("sample", "factory")
async def check_isolation(probe: Probe) -> None:
    """A second engine, its settings and its closing change nothing about the first; nor do other
    requests' settings.
    """
    settings = (LOOSE, GREEDY, Sampling(temperature=0.3, top_k=2))
    requests = [request for sampling in settings for request in probe.requests(2, sampling)]
    requests = [replace(r, stop=("e",) * (number % 2)) for number, r in enumerate(requests)]
    alone = [(await probe.engine.sample(request)).ids for request in requests]
    other = probe.new_engine()
    async with other:
        calls = [
            partial(engine.sample, request)
            for request in requests
            for engine in (probe.engine, other)
        ]
        beside = [completion.ids for completion in await collect(calls)]
    after = [completion.ids for completion in await probe.sample_all(requests)]
    for number, request in enumerate(requests):
        for what, answers in (
            ("the answer changed among other settings", beside[::2]),
            ("a second engine answers otherwise", beside[1::2]),
            ("the answer changed after a second engine was closed", after),
        ):
            await probe.require_same(what, request, answers[number], alone[number])


@dataclass(slots=True)
class _Cancelled:
    """What became of the calls that were cancelled, summed over rounds."""

    calls: int = 0  # begun
    returned: int = 0  # of these, answered
    running: int = 0  # in flight, by the engine's own count, when they were cancelled
    late: int = 0  # answered after they were cancelled


@check("sample")
async def check_cancellation(probe: Probe) -> None:
    """Cancelled work stops at once, wherever it was, and leaves room for the next request."""
    expected = await probe.engine.sample(probe.request())
    seen = _Cancelled()
    before = probe.engine.stats().cancelled
    for number, delay in enumerate((0.0, 0.002, 0.02, 0.1)):
        await _cancel_some(probe, delay, seen)
        await _settle(probe)
        again = await probe.engine.sample(probe.request())
        said = f"the answer changed after {number + 1} rounds of cancellation"
        await probe.require_same(said, probe.request(), again.ids, expected.ids)
    # some answers may have been on their way, however long that takes; never all of them in every
    # round
    ignored = seen.running and seen.late >= seen.running
    require(
        not ignored,
        f"all {seen.running} requests that were cancelled in flight were answered all the same",
    )
    cancelled = probe.engine.stats().cancelled - before
    said = f"of {seen.calls} calls {seen.returned} were answered and {cancelled} counted as cancelled: some are both"
    require(seen.returned + cancelled <= seen.calls, said)


async def _cancel_some(probe: Probe, delay: float, seen: _Cancelled) -> None:
    """Cancel many long requests after a delay: some are queued, some at work, some done."""
    requests = [
        replace(probe.long(request), rollout=str(request.seed)) for request in probe.requests(8)
    ]

    async def one(request: SampleRequest) -> None:
        seen.calls += 1
        written = await probe.engine.sample(request)
        seen.returned += 1
        seen.late += scope.cancel_called
        if probe.can("score"):
            seen.calls += 1
            await probe.engine.score(ScoreRequest(request.ids, written.ids, request.rollout))
            seen.returned += 1

    cancelled_at = 0.0
    with anyio.CancelScope() as scope:
        async with task_group() as group:
            for request in requests:
                group.start_soon(one, request)
            await anyio.sleep(delay)
            # answers that came in the same pass of the loop are not late
            await anyio.lowlevel.checkpoint()
            cancelled_at = anyio.current_time()
            seen.running += probe.engine.stats().in_flight
            scope.cancel()
    took = anyio.current_time() - cancelled_at
    limit = probe.options.settle_seconds
    require(
        took <= limit, f"cancelled requests returned only after {took:.2f} s (limit {limit:g} s)"
    )


async def _settle(probe: Probe) -> None:
    """Nothing stays in flight."""
    with anyio.move_on_after(probe.options.settle_seconds):
        while probe.engine.stats().in_flight:  # noqa: ASYNC110  # an engine has no event to wait for
            await anyio.sleep(0.005)
    left = probe.engine.stats().in_flight
    require(
        not left,
        f"{left} requests still in flight {probe.options.settle_seconds:g} s after they were "
        f"cancelled",
    )
