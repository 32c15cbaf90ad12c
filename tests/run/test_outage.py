"""Tests of engines that are lost during a run: nothing is decided without them, and the next
session does the missing work.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atts.analysis import build_report
from atts.core import Completion, Role, SampleRequest, ScoreRequest, Scores
from atts.errors import EngineError, EngineTimeout, EngineUnavailable, UsageError
from atts.graph import RetryPolicy
from atts.journal import (
    JOURNAL,
    CallFailed,
    Decided,
    Observed,
    Sampled,
    Scored,
    open_run,
    read_entries,
)
from atts.pipelines import Chunking, Policy
from atts.run import Progress, merge, request_key
from atts.testing import Latency, ScriptedEngine

QUICK = Latency(per_sample=0.05, per_score=0.01, sampled_token=0.01, jitter=0.5)
ONCE = RetryPolicy(calls=2, delay_seconds=0.01, failures_in_row=None)
Outcomes = Callable[[Any], dict[str, str]]


class Mortal(ScriptedEngine):
    """An engine that becomes unavailable after a number of calls."""

    def __init__(
        self, name: Role, calls: float, error: type[EngineError] = EngineUnavailable
    ) -> None:
        super().__init__(name, latency=QUICK)
        self.left = calls
        self.error = error

    def _spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error(self.spec.name, "it is gone")

    async def sample(self, request: SampleRequest) -> Completion:
        """Sample while the engine is alive."""
        self._spend()
        return await super().sample(request)

    async def score(self, request: ScoreRequest) -> Scores:
        """Score while the engine is alive."""
        self._spend()
        return await super().score(request)


def decided(world: Any, name: str = "run") -> list[str]:
    """Return every decision and observation of the gate, in order."""
    return [repr(event) for event in world.events(name) if isinstance(event, Decided | Observed)]


def outage(world: Any, role: Role, calls: int, name: str, **changes: Any) -> Any:
    """Make a run with an engine that fails after this many calls."""
    return world.run(
        world.plan(**{role: Mortal(role, calls), "retries": ONCE, **changes}), world.session(name)
    )


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("points", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_an_outage_at_any_point_changes_no_outcome(
    world: Any, outcomes: Outcomes, points: int, role: Role
) -> None:
    """An outage at any point changes no outcome of a run with a frozen gate.

    The first session reports the missing problems, and the next session finishes exactly these.
    """
    whole = world.run(world.plan(), world.session("whole"))
    calls = sum(isinstance(e, Sampled | Scored) and e.role == role for e in world.events("whole"))
    draws = random.Random(11)
    for number in range(points):
        name = f"{role} {number}"
        cut = outage(world, role, draws.randrange(calls), name)
        assert cut.status in ("incomplete", "failed")
        assert cut.exit_code == EngineError.exit_code
        assert f"engine {role}: it is gone" in cut.why
        before = decided(world, name)
        assert not [said for said in before if "forced" in said]
        again = world.run(world.plan(), world.session(name))
        assert (again.status, again.exit_code, again.why) == ("finished", 0, "")
        assert outcomes(again) == outcomes(whole)
        assert [line.verdict for line in again.problems] == [
            line.verdict for line in whole.problems
        ]
        after = decided(world, name)
        assert after[: len(before)] == before
        assert sorted(after) == sorted(set(after))
        keys = [e.key for e in world.events(name) if isinstance(e, Sampled)]
        assert len(set(keys)) == len(keys)


def test_finished_rollouts_of_an_open_problem_are_not_repeated(world: Any) -> None:
    """The next session repeats no finished rollout of an open problem; it makes only calls that
    have never succeeded.
    """
    outage(world, "target", 25, "run")
    made = {e.key for e in world.events() if isinstance(e, Sampled | Scored)}
    asked: list[str] = []

    class Noting(ScriptedEngine):
        """An engine that records its requests."""

        async def sample(self, request: SampleRequest) -> Completion:
            asked.append(request_key("draft" if self.spec.name == "draft" else "target", request))
            return await super().sample(request)

        async def score(self, request: ScoreRequest) -> Scores:
            asked.append(request_key("target", request))
            return await super().score(request)

    engines = {"draft": Noting("draft", latency=QUICK), "target": Noting("target", latency=QUICK)}
    assert world.run(world.plan(**engines), world.session()).status == "finished"
    assert asked
    assert not made & set(asked)


def test_an_outage_over_several_sessions_changes_no_outcome(world: Any, outcomes: Outcomes) -> None:
    """After an outage over several sessions the results are those without an outage.

    Each session repeats failed calls, however often they failed.
    """
    whole = world.run(world.plan(), world.session("whole"))
    for calls in (9, 0, 17, 0):
        assert outage(world, "target", calls, "run").exit_code == EngineError.exit_code
    again = world.run(world.plan(), world.session())
    assert outcomes(again) == outcomes(whole)
    assert outcomes(world.run(world.plan(), world.session())) == outcomes(whole)


@pytest.mark.parametrize("error", [EngineUnavailable, EngineTimeout])
@pytest.mark.parametrize("optimistic", [False, True])
def test_a_lost_engine_decides_nothing(
    world: Any, error: type[EngineError], optimistic: bool
) -> None:
    """If the target is lost, a chunk without a score is neither accepted nor escalated."""
    policy = Policy(
        samples=4, turns=6, chunking=Chunking(12, 12, ()), early_stop="none", optimistic=optimistic
    )
    plan = world.plan(
        target=Mortal("target", 60, error), retries=ONCE, policy=policy, gate=world.online()
    )
    cut = world.run(plan, world.session())
    assert cut.status == "incomplete"
    assert any(isinstance(event, CallFailed) for event in world.events())
    assert not [
        event
        for event in world.events()
        if isinstance(event, Observed) and event.decision.origin == "forced"
    ]
    again = world.run(world.plan(policy=policy, gate=world.online()), world.session())
    assert again.status == "finished"
    assert not [said for said in decided(world) if "forced" in said]


def test_a_run_without_any_rollout_has_failed(world: Any) -> None:
    """If no rollout ended, each problem is "failed", the exit code is 3, and the first error is
    printed.

    No problem counts as wrong.
    """

    class Headless(ScriptedEngine):
        """An engine whose tokenizer lacks a method."""

        @property
        def tokenizer(self) -> Any:
            return object()

    makers: dict[str, Callable[[], ScriptedEngine]] = {
        "it is gone": lambda: Mortal("draft", 0),
        "AttributeError": lambda: Headless("draft"),
    }
    for why, make in makers.items():
        for name in (why, None):
            found = world.run(
                world.plan(draft=make(), retries=ONCE), world.session(name), problems=2
            )
            assert (found.status, found.exit_code) == ("failed", EngineError.exit_code)
            assert why in found.why
            assert {problem.status for problem in found.problems} == {"failed"}
            assert {problem.verdict for problem in found.problems} == {None}


def test_every_reader_treats_lost_rollouts_as_open(world: Any, tmp_path: Path) -> None:
    """The report, results, progress, merge and replay count lost rollouts neither as correct nor as
    wrong.
    """
    cut = outage(world, "target", 25, "run")
    lost = {(p.problem, s.sample) for p in cut.problems for s in p.samples if s.finish == "failed"}
    assert lost
    assert {
        s.verdict for p in cut.problems for s in p.samples if (p.problem, s.sample) in lost
    } == {"lost"}
    state = open_run(tmp_path / "run").state()
    assert {name for name in state.finished if not state.is_over(name)} == {
        name for name, _ in lost
    }
    report = build_report(tmp_path / "run").report
    assert report.run.ended.startswith("failed (")
    (caveat,) = [caveat for caveat in report.caveats if caveat.code == "incomplete"]
    assert caveat.standing == "bad"
    assert caveat.count == len({name for name, _ in lost})
    with pytest.raises(UsageError, match="unfinished problem"):
        merge([tmp_path / "run", tmp_path / "run"], tmp_path / "union")
    progress = Progress()
    for entry in read_entries(tmp_path / "run" / JOURNAL):
        progress.recalled(entry.event)
    assert progress.snapshot().failed == len({name for name, _ in lost})
    world.run(world.plan(), world.session(listeners=[progress]))
    assert (progress.snapshot().failed, progress.snapshot().done) == (0, 5)
