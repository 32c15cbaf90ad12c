"""Tests of servers killed during a run: calls wait until the server returns, or the next session
repeats them.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.concurrency import collect
from atts.core import Outcome, Role
from atts.errors import EngineUnavailable
from atts.graph import RetryPolicy
from atts.journal import JOURNAL, Observed, read_entries
from atts.pipelines import Answers, Chunking, Policy, ThresholdGate
from atts.run import EngineAwaited, Notice, RunOptions, RunResult, RunSpec, evaluate
from atts.servers import RemoteEngine, RemoteOptions, ReplicaPool
from atts.servers.client import HttpReply
from atts.servers.engine import Watch
from atts.testing import (
    Latency,
    ScriptedEngine,
    ToyTokenizer,
    run_virtual,
    toy_answer,
    toy_groups,
    toy_problems,
)
from atts.testing.servers import DialectServer

Serve = Callable[..., DialectServer]
POLICY = Policy(samples=3, turns=5, chunking=Chunking(12, 12, ()), early_stop="none")
PROBLEMS = toy_problems(4, 5)
AWAY = RemoteOptions(
    timeout_seconds=60.0,
    delay_seconds=0.01,
    give_up_after=0.0,
    idle_seconds=1e9,
    recheck_seconds=1e9,
    recheck_requests=10**9,
)
PATIENT = replace(AWAY, give_up_after=120.0)


class Diary:
    """A listener that records which servers calls waited for."""

    def __init__(self) -> None:
        self.awaited: list[EngineAwaited] = []
        self.heard = threading.Event()

    def recalled(self, event: object) -> None: ...

    def notify(self, event: Notice) -> None:
        """Record the event."""
        if isinstance(event, EngineAwaited):
            self.awaited.append(event)
            self.heard.set()


def essence(outcome: Outcome) -> str:
    """Return an outcome without the parts that depend on timing and caches."""
    rollouts = [
        (
            rollout.sample,
            rollout.finish,
            rollout.answer,
            rollout.text,
            [turn.score for turn in rollout.turns],
        )
        for rollout in outcome.rollouts
    ]
    return repr((outcome.problem.id, outcome.answer, outcome.status, dict(outcome.votes), rollouts))


def outcomes(result: RunResult) -> dict[str, str]:
    """Return the outcomes of a result by problem, without timing."""
    return {outcome.problem.id: essence(outcome) for outcome in result.outcomes()}


class Pair:
    """A draft and a target behind servers, either of which may be killed."""

    def __init__(self, serve: Serve) -> None:
        self.servers: dict[Role, DialectServer] = {
            "draft": serve(
                "llamacpp", lambda: ScriptedEngine("draft", latency=Latency(per_sample=0.002))
            ),
            "target": serve(
                "vllm", lambda: ScriptedEngine("target", latency=Latency(per_score=0.002))
            ),
        }

    def engine(self, role: Role, options: RemoteOptions) -> RemoteEngine:
        """Make an engine on that server."""
        return RemoteEngine(
            self.servers[role].url, name=role, tokenizer=ToyTokenizer(), options=options
        )

    def run(
        self, directory: Path, options: RemoteOptions, *listeners: Any, pool: bool = False
    ) -> RunResult:
        """Evaluate the problems with a frozen gate."""
        target: Any = self.engine("target", options)
        plan = RunSpec(
            self.engine("draft", options),
            ReplicaPool([("only", target)], name="target") if pool else target,
            POLICY,
            ThresholdGate(1.3),
            Answers(toy_answer, toy_groups),
            concurrency=6,
            retries=RetryPolicy(calls=3, delay_seconds=0.02, failures_in_row=None),
        )
        return anyio.run(
            evaluate, PROBLEMS, plan, RunOptions(directory, signals="ignore", listeners=listeners)
        )


class Outage(Diary):
    """A listener that kills a server once a run's journal has reached a given size."""

    def __init__(self, server: DialectServer, directory: Path, size: float) -> None:
        super().__init__()
        self._server = server
        self._directory = directory
        self._size = size
        self.is_over = False

    def notify(self, event: Notice) -> None:
        """Kill the server when the journal has reached the given size."""
        super().notify(event)
        if not self.is_over and journal_size(self._directory) >= self._size:
            self.is_over = True
            self._server.kill()

    @contextmanager
    def ended_when_heard(self) -> Generator[None]:
        """Start the server again, within the block, once a call waits for it."""

        def start() -> None:
            if self.heard.wait(120):
                self._server.start()

        thread = threading.Thread(target=start)
        thread.start()
        try:
            yield
        finally:
            self.heard.set()
            thread.join()


def journal_size(directory: Path) -> int:
    """Return the size of the journal in bytes, or 0 if there is none."""
    path = directory / JOURNAL
    return path.stat().st_size if path.exists() else 0


def forced(directory: Path) -> list[Any]:
    """Return the decisions that the pipeline forced because no score was available."""
    events = (entry.event for entry in read_entries(directory / JOURNAL))
    return [
        event
        for event in events
        if isinstance(event, Observed) and event.decision.origin == "forced"
    ]


@pytest.mark.parametrize("pool", [False, True])
def test_a_server_that_comes_back_is_waited_for(serve: Serve, tmp_path: Path, pool: bool) -> None:
    """If a server is killed and restarted during a run, the run ends as usual and reports which
    server it waited for.
    """
    pair = Pair(serve)
    whole = outcomes(pair.run(tmp_path / "whole", PATIENT, pool=pool))
    outage = Outage(
        pair.servers["target"], tmp_path / "run", 0.3 * journal_size(tmp_path / "whole")
    )
    with outage.ended_when_heard():
        found = pair.run(tmp_path / "run", PATIENT, outage, pool=pool)
    assert (found.status, found.exit_code) == ("finished", 0)
    assert outcomes(found) == whole
    assert not forced(tmp_path / "run")
    assert sum(event.more for event in outage.awaited) == 0 < len(outage.awaited)


@pytest.mark.parametrize("points", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_server_that_stays_away_loses_no_outcome(
    serve: Serve, tmp_path: Path, role: Role, points: int
) -> None:
    """If a killed server stays away, the run exits with code 3 and forces no decision.

    After the server's restart, the resumed run has the usual outcomes.
    """
    pair = Pair(serve)
    draws = random.Random(21)
    whole = outcomes(pair.run(tmp_path / "whole", AWAY))
    size = journal_size(tmp_path / "whole")
    for number in range(points):
        directory = tmp_path / str(number)
        outage = Outage(pair.servers[role], directory, draws.uniform(0.02, 0.5) * size)
        cut = pair.run(directory, AWAY, outage)
        pair.servers[role].start()
        assert cut.status in ("incomplete", "failed")
        assert "did not come back within 0 s" in cut.why + repr(cut.outcomes())
        assert cut.exit_code == 3
        assert not forced(directory)
        again = pair.run(directory, AWAY)
        assert (again.status, again.exit_code) == ("finished", 0)
        assert outcomes(again) == whole


class Silent:
    """A client whose server cannot be reached until a given time, and answers afterwards."""

    name = "remote"
    url = "http://h"

    def __init__(self, back_at: float = math.inf, give_up_after: float = 3600.0) -> None:
        self.options = RemoteOptions(give_up_after=give_up_after)
        self.back_at = back_at
        self.looks = 0

    async def look(self, path: str) -> HttpReply:
        """Raise an error before the server's return, and succeed afterwards."""
        self.looks += 1
        if anyio.current_time() < self.back_at:
            raise EngineUnavailable(self.name, "cannot reach http://h")
        return HttpReply(200, b"")


def test_a_server_that_never_returns_is_given_up_after_an_hour() -> None:
    """After an hour without a server, calls fail at once, with an error that names the waiting time
    and the remedy.
    """
    client: Any = Silent()

    async def main() -> float:
        watch = Watch(client)
        results = await collect([watch.comes_back] * 5)
        assert results == [False] * 5
        assert watch.has_given_up
        waited = anyio.current_time()
        looks = client.looks
        assert not await watch.comes_back()
        assert client.looks == looks
        error = watch.given_up(EngineUnavailable("remote", "cannot reach http://h"))
        assert "did not come back within 3600 s" in str(error)
        assert "to continue the run" in str(error)
        return waited

    assert run_virtual(main) == pytest.approx(3600.0, abs=2.0)


def test_a_loss_lasts_until_a_call_is_answered() -> None:
    """A server that passes health checks but answers no call is given up after one hour in total,
    not one hour per check.
    """
    client: Any = Silent(back_at=1800.0)

    async def main() -> None:
        watch = Watch(client)
        assert await watch.comes_back()
        assert anyio.current_time() == pytest.approx(1800.0, abs=2.0)
        client.back_at = math.inf
        await anyio.sleep(1.0)
        assert not await watch.comes_back()
        assert anyio.current_time() == pytest.approx(3600.0, abs=2.0)
        client.back_at = 4000.0
        await anyio.sleep_until(4001.0)
        assert await watch.comes_back()
        assert not watch.has_given_up

    run_virtual(main)
