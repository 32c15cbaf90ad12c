"""Tests of the share of escalated chunks: it includes every judged chunk, also in cancelled
rollouts.
"""

from typing import Any

import pytest

from atts.core import Outcome, Problem
from atts.evaluators import share_estimate
from atts.graph import ProblemScope
from atts.journal import Observed
from atts.pipelines import Context, Policy, solve
from atts.run import Stop


class Counts:
    """A listener that stops a run after a number of judged chunks."""

    def __init__(self, stop: Stop, after: int) -> None:
        self._stop = stop
        self._left = after

    def recalled(self, event: Any) -> None:
        """Ignore events of earlier sessions."""

    def notify(self, event: Any) -> None:
        """Count the judged chunks, and stop the run when their number is reached."""
        self._left -= isinstance(event, Observed)
        if not self._left:
            self._stop.request()


POLICY = Policy(samples=8, max_tokens=200, early_stop="certain", takeover="replace")


def _plan(world: Any) -> Any:
    return world.plan(gate=world.online(), policy=POLICY)


async def _failing_late(
    problem: Problem, policy: Policy, context: Context, scope: ProblemScope
) -> Outcome:
    """Solve the problem, then fail, so that the result is lost."""
    await solve(problem, policy, context, scope)
    raise ValueError("lost at the last moment")


def test_the_summary_counts_every_observed_decision(world: Any) -> None:
    """The summary counts escalated chunks of all rollouts, even of those cancelled while the target
    writes.
    """
    result = world.run(_plan(world), world.session(), problems=12)
    told = [event for event in world.events() if isinstance(event, Observed)]
    turns = [
        turn
        for outcome in result.outcomes()
        for rollout in outcome.rollouts
        for turn in rollout.turns
    ]
    assert len(told) > sum(turn.decision is not None for turn in turns), (
        "some judged chunk must lack a turn"
    )
    rate = result.summary.rate
    assert rate.n_samples == len(told)
    assert rate.value == pytest.approx(sum(event.escalated for event in told) / len(told))


def test_the_share_is_the_same_after_an_interruption(world: Any) -> None:
    """Decisions of earlier sessions count once after an interruption, both in a run with a
    directory and in a run without.
    """
    whole = world.run(_plan(world), world.session(None), problems=12).summary.rate
    stop = Stop()
    world.run(
        _plan(world), world.session("cut", stop=stop, listeners=[Counts(stop, 60)]), problems=12
    )
    resumed = world.run(_plan(world), world.session("cut"), problems=12)
    told = [event for event in world.events("cut") if isinstance(event, Observed)]
    assert resumed.sessions == 2
    assert resumed.summary.rate.n_samples == len(told)
    assert whole.n_samples > 60


def test_a_resumed_problem_keeps_its_count(world: Any) -> None:
    """If a problem fails and succeeds in a later session, its count includes chunks judged before
    the failure.
    """
    broken = world.plan(gate=world.online(), policy=POLICY, pipeline=_failing_late)
    world.run(broken, world.session(), problems=3)
    resumed = world.run(_plan(world), world.session(), problems=3)
    told = [event for event in world.events() if isinstance(event, Observed)]
    assert [line.status for line in resumed.problems] == ["answered"] * 3
    assert resumed.summary.rate.n_samples == len(told) > 0


def test_problems_without_a_judged_chunk_do_not_count() -> None:
    """Problems without a judged chunk are left out of the share.

    If problems differ in their share, the interval is over twice as wide as if all have the same
    share.
    """
    assert share_estimate([(0, 0)]).note
    assert share_estimate([(1, 4), (0, 0), (3, 4)]).n_problems == 2
    even = share_estimate([(2, 10)] * 50)
    uneven = share_estimate([(10, 10)] * 10 + [(0, 10)] * 40)
    assert even.value == uneven.value == 0.2
    assert uneven.high - uneven.low > 2 * (even.high - even.low)
