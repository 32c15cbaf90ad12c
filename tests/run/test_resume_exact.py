"""Tests that a run of method exact resumes, although timing decides which model writes how much."""

from __future__ import annotations

from typing import Any

import pytest

from atts.core import Role
from atts.journal import CallSpan, open_run
from atts.methods import preset
from atts.pipelines import Chunking, FixedGate, Policy
from atts.run import RunResult
from atts.testing import Latency, ScriptedEngine
from tests.run.test_resume import cuts, torn_copy

POLICY = Policy(samples=4, turns=6, chunking=Chunking(12, 12, ()), early_stop="none")


def texts(result: RunResult) -> list[Any]:
    """Return the text and the ending of every rollout."""
    return sorted(
        (one.problem, one.sample, one.text, one.finish)
        for done in result.outcomes()
        for one in done.rollouts
    )


@pytest.mark.parametrize("drafts", ["draft", "target"])
def test_method_exact_asks_for_no_recorded_call_again(world: Any, drafts: Role) -> None:
    """After a resume, method exact repeats no recorded call.

    Unfinished rollouts continue with the writing model and the proposal lengths of the earlier
    session.
    """

    def plan() -> Any:
        draft = ScriptedEngine(drafts, latency=Latency(sampled_token=0.002))
        target = ScriptedEngine("target", latency=Latency(per_score=0.02, sampled_token=0.02))
        return world.plan(
            policy=preset("exact").policy(POLICY),
            gate=FixedGate("accept"),
            draft=draft,
            target=target,
        )

    first = texts(world.run(plan(), world.session(), problems=30))
    for place in cuts(world.tmp_path / "run", 5, seed=4)[1:-1]:
        torn_copy(world, place)
        begun = open_run(world.tmp_path / "copy").state().open.values()
        recorded = sum(len(calls) for problem in begun for calls in problem.calls.values())
        assert texts(world.run(plan(), world.session("copy"), problems=30)) == first
        spans = [event for event in world.events("copy") if isinstance(event, CallSpan)]
        assert sum(span.source == "recalled" for span in spans) == recorded > 0
