"""Tests that the displayed progress equals the journal at every moment and across sessions."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from atts.cli.progress import line
from atts.core import Chunk, Completion, Decision, Problem, Scores, Turn
from atts.journal import (
    CallFailed,
    Decided,
    Drifted,
    Event,
    Graded,
    Observed,
    OutcomeReached,
    ProblemStarted,
    RolloutSpan,
    Sampled,
    Scored,
    TurnFinished,
    Warned,
)
from atts.pipelines import TopGate
from atts.run import CallBegun, Notice, Progress, ProgressSnapshot, RunBegun, Stop


class Clock:
    """A clock whose seconds pass on command."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def after(events: Sequence[Notice], clock: Clock | None = None) -> ProgressSnapshot:
    """Return the progress snapshot after these events."""
    progress = Progress(clock or Clock())
    for event in events:
        progress.notify(event)
    return progress.snapshot()


BEGUN = RunBegun(4, 0, 2, 0.0, draft="small", target="large", directory=None)
DECISION = Decision("accept", 0.25, "p", score=1.5)


def test_progress_at_the_start_is_empty_and_strict_json() -> None:
    """At the start the progress has no problem, rate or remaining time, and its JSON is strict."""
    found = after([])
    assert (found.problems, found.done, found.left, found.nominal) == (None, 0, None, None)
    assert math.isnan(found.rate.value)
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["rate"]["value"] is None


def test_every_rollout_is_at_exactly_one_stage() -> None:
    """At any time a rollout is at exactly one stage: after a request, a reply, another request, and
    its end.
    """
    first = CallBegun("p", "p/0", "draft")
    second = CallBegun("p", "p/1", "draft")
    scored = Scored("p", "k", Scores((-1.0,)), rollout="p/0")
    sampled = Sampled("p", "k", Completion((1, 2), "x", "end", (-1.0, -1.0)), "draft", "p/0")
    failed = CallFailed("p", "k", "draft", "EngineTimeout", "draft", "late", "p/1")
    timed = RolloutSpan("p", 0, "done", 0.0, 0.0, 1.0, 1.0)
    steps: list[tuple[Notice, tuple[int, int, int, int]]] = [
        (first, (1, 0, 0, 0)),
        (second, (2, 0, 0, 0)),
        (sampled, (1, 0, 0, 1)),
        (replace(first, stage="score"), (1, 1, 0, 0)),
        (failed, (0, 1, 0, 1)),
        (scored, (0, 0, 0, 2)),
        (replace(first, stage="target"), (0, 0, 1, 1)),
        (timed, (0, 0, 0, 1)),
    ]
    heard: list[Notice] = [BEGUN, ProblemStarted(Problem("p", "?"))]
    for event, expected in steps:
        heard.append(event)
        assert tuple(after(heard).stages.values()) == expected
    assert after(heard).rollouts_done == 1


def test_forced_escalations_and_discarded_chunks_are_counted_separately() -> None:
    """The progress counts escalated chunks, chunks escalated without a score, and discarded chunks
    separately.
    """
    forced = replace(DECISION, action="escalate", why="not scored", origin="forced")
    chunk = Chunk("draft", "x", (1,), (1,), "delimiter")
    found = after(
        [
            Observed(DECISION, False),
            Observed(replace(DECISION, action="escalate"), True),
            Observed(forced, True),
            TurnFinished("p", 0, Turn(0, (chunk,), (chunk, chunk))),
        ]
    )
    assert (found.accepted, found.escalated, found.forced, found.rejected) == (1, 2, 1, 2)


def test_a_gate_without_a_rate_shows_no_nominal_rate() -> None:
    """A gate without a rate reports NaN as its nominal rate."""
    assert after([Decided(replace(DECISION, rate=math.nan))]).nominal is None
    assert after([Decided(DECISION), Decided(replace(DECISION, rate=math.nan))]).nominal == 0.25


def test_the_rate_of_a_run_is_shown_without_an_interval() -> None:
    """The progress shows the run's rate without an interval.

    The rate counts what the run did, so it has no sampling error.
    """
    escalated = replace(DECISION, action="escalate")
    other = replace(DECISION, question="q")
    seen = after([Decided(DECISION), Observed(escalated, True), Observed(other, False)])
    assert "; rate 0.500, nominal 0.25;" in f"{line(seen)};"


def test_speed_counts_only_the_last_minute_of_this_session() -> None:
    """The displayed speed uses only tokens of the last minute of this session; older tokens count
    only in the total.
    """
    clock = Clock()
    progress = Progress(clock)
    sampled = Sampled("p", "k", Completion((1,) * 300, "x", "end", ()), "draft")
    progress.recalled(sampled)
    progress.notify(BEGUN)
    clock.now += 3
    assert (progress.snapshot().speeds["draft"], progress.snapshot().tokens["draft"]) == (0.0, 300)
    progress.notify(sampled)
    assert progress.snapshot().speeds["draft"] == pytest.approx(100)
    clock.now += 60
    assert progress.snapshot().speeds["draft"] == 0
    assert progress.snapshot().tokens["draft"] == 600


def test_the_speed_of_long_calls_is_measured_over_their_length() -> None:
    """The speed of long calls is averaged over their duration.

    If a call of 300 tokens takes 300 s and one ends every 30 s, the speed is always 10 tokens a
    second.
    """
    clock = Clock()
    progress = Progress(clock)
    progress.notify(BEGUN)
    sampled = Sampled("p", "k", Completion((1,) * 300, "x", "end", ()), "draft", seconds=300.0)
    clock.now += 270
    for _ in range(10):
        clock.now += 30
        progress.notify(sampled)
    clock.now += 20
    assert progress.snapshot().speeds["draft"] == pytest.approx(10.0)
    clock.now += 1000
    assert progress.snapshot().speeds["draft"] == 0


def test_the_time_left_counts_rollouts_in_flight_as_partly_done() -> None:
    """The remaining time counts rollouts in flight as partly done.

    Of 96 rollouts 48 run at a time, each for 80 to 120 s. When the first few have ended, the others
    in flight are nearly done.
    """
    clock = Clock()
    progress = Progress(clock)
    progress.notify(RunBegun(24, 0, 4, 0.0, draft="small", target="large", directory=None))
    assert progress.snapshot().left is None
    began = clock.now
    for number in range(48):
        if number % 4 == 0:
            progress.notify(ProblemStarted(Problem(str(number // 4), "?")))
        progress.notify(CallBegun(str(number // 4), f"{number // 4}/{number % 4}", "draft"))
    shown = dict[int, float]()
    for number in range(48):
        clock.now = began + 80 + 40 * number / 48
        progress.notify(RolloutSpan(str(number // 4), number % 4, "done", 0.0, 0.0, 1.0, 1.0))
        shown[number] = progress.snapshot().left or math.nan
    truth = {number: 220 - (80 + 40 * number / 48) for number in shown}
    assert all(0.6 < shown[number] / truth[number] < 2.0 for number in shown), shown
    assert shown[47] == pytest.approx(100, rel=0.1)


def test_the_remaining_time_ignores_earlier_sessions() -> None:
    """The remaining time ignores work of earlier sessions, which would make this session look too
    fast.
    """
    clock = Clock()
    progress = Progress(clock)
    for event in (ProblemStarted(Problem("a", "?")), OutcomeReached("a", "answered", "1", (0, 1))):
        progress.recalled(event)
    progress.notify(replace(BEGUN, done=1, seconds=50.0))
    assert (progress.snapshot().left, progress.snapshot().done) == (None, 1)
    progress.notify(ProblemStarted(Problem("b", "?")))
    progress.notify(CallBegun("b", "b/0", "draft"))
    clock.now += 10
    progress.notify(RolloutSpan("b", 0, "done", 0.0, 0.0, 1.0, 1.0))
    # one rollout at a time takes 10 s, and five rollouts are left
    assert progress.snapshot().left == pytest.approx(50)
    assert progress.snapshot().seconds == pytest.approx(60)
    progress.over()
    assert progress.snapshot().left is None


def test_trouble_is_shown() -> None:
    """The progress shows alarms, failed calls, failed problems and a request to end."""
    found = after(
        [
            Drifted("exchangeability", 0.001, 80),
            CallFailed("p", "k", "draft", "EngineTimeout", "draft", "late"),
            OutcomeReached("p", "failed", None, ()),
            Warned("interrupted", "ending: 3 calls in flight"),
            Warned("other", "not about ending"),
        ]
    )
    assert (found.alarms, found.failed_calls, found.failed, found.state) == (1, 1, 1, "draining")
    assert found.note == "ending: 3 calls in flight"


class Watched:
    """A listener that records events and passes them on, and may ask the run to end."""

    def __init__(self, stop: Stop, at: int | None = None) -> None:
        self.progress = Progress()
        self.events: list[Notice] = []
        self._stop = stop
        self._at = at

    def recalled(self, event: Event) -> None:
        """Record an earlier session's event, and pass it on."""
        self.events.append(event)
        self.progress.recalled(event)

    def notify(self, event: Notice) -> None:
        """Record an event, pass it on, and stop the run after enough of them."""
        self.events.append(event)
        self.progress.notify(event)
        if len(self.events) == self._at:
            self._stop.request()


def expected(events: Sequence[Event]) -> dict[str, Any]:
    """Compute the displayed numbers from the journal in a simple, slow way."""
    sampled: Counter[str] = Counter()
    for event in events:
        if isinstance(event, Sampled):
            sampled[event.role] += len(event.completion.ids)
    observed = [event for event in events if isinstance(event, Observed)]
    rounds = [
        event.decision.escalate
        for event in events
        if isinstance(event, Decided) and event.asked == "round"
    ]
    judged = [event.escalated for event in observed] + rounds
    verdicts = {e.problem: e.status for e in events if isinstance(e, Graded) and e.sample is None}
    return {
        "escalated": sum(judged),
        "accepted": len(judged) - sum(judged),
        "draft": sampled["draft"],
        "target": sampled["target"],
        "right": sum(status == "correct" for status in verdicts.values()),
        "rejected": sum(
            len(event.turn.discarded) for event in events if isinstance(event, TurnFinished)
        ),
        "done": len({event.problem for event in events if isinstance(event, OutcomeReached)}),
    }


def shown(found: ProgressSnapshot) -> dict[str, Any]:
    """Return the numbers that the snapshot shows."""
    right = 0 if math.isnan(found.accuracy.value) else round(found.accuracy.value * found.graded)
    tokens = {role: found.tokens[role] for role in ("draft", "target")}
    counts = {name: getattr(found, name) for name in ("escalated", "accepted", "rejected", "done")}
    return {**counts, **tokens, "right": right}


@pytest.mark.parametrize("gate", ["online", "round"])
def test_progress_sums_equal_the_journal(world: Any, gate: str) -> None:
    """The sums of the progress equal those of the journal, for a whole run and for a run that was
    stopped and resumed.
    """

    def plan() -> Any:
        if gate == "round":
            return world.plan(
                gate=TopGate.of(0.4), policy=replace(world.plan().policy, barrier=True)
            )
        return world.plan(gate=world.online())

    stop = Stop()
    first = Watched(stop, at=400)
    result = world.run(plan(), world.session(listeners=(first,), stop=stop))
    assert result.status == "interrupted"
    assert first.progress.snapshot().problems == 5
    second = Watched(Stop())
    assert world.run(plan(), world.session(listeners=(second,))).status == "finished"
    found = second.progress.snapshot()
    assert shown(found) == expected(world.events())
    assert (found.done, found.open, sum(found.stages.values()), found.rollouts_done) == (
        5,
        0,
        0,
        20,
    )
