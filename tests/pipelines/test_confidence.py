"""Tests of the rule that stops rollouts with low confidence (DeepConf)."""

from __future__ import annotations

from typing import Any

from atts.core import RolloutSpan
from atts.pipelines import ConfidenceStop, FixedGate, Policy
from atts.testing import Latency, ScriptedEngine
from tests.pipelines.conftest import Solve


def test_no_rollout_is_stopped_before_all_warm_up_rollouts_have_ended(attempt: Solve) -> None:
    """If all rollouts start at once, the threshold still comes from all warm-up rollouts, and not
    from those alone that ended first.
    """
    events: list[Any] = []
    policy = Policy(
        samples=8, early_stop="none", confidence_stop=ConfidenceStop(warmup=4, keep=0.05, window=2)
    )
    draft = ScriptedEngine("draft", latency=Latency(sampled_token=0.01, jitter=0.5))
    outcomes = attempt(policy, FixedGate("accept"), problems=20, draft=draft, events=events)
    ended: dict[str, dict[int, float]] = {}
    for event in events:
        if isinstance(event, RolloutSpan):
            ended.setdefault(event.problem, {})[event.sample] = event.ended
    stopped = 0
    for outcome in outcomes:
        times = ended[outcome.problem.id]
        warm = max(times[sample] for sample in range(4))
        for rollout in outcome.rollouts:
            if rollout.finish == "end" and rollout.answer is None:
                stopped += 1
                assert rollout.sample >= 4
                assert times[rollout.sample] >= warm
    assert stopped
