"""Tests that a run continues from any prefix of its journal as if it had never stopped."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest

from atts.calibration import Calibrator
from atts.core import Features
from atts.engine import Capability
from atts.errors import EngineUnavailable, FingerprintError, JournalCorrupt, StorageError
from atts.journal import (
    JOURNAL,
    CallFailed,
    CallSpan,
    Decided,
    Event,
    JournalOptions,
    Observed,
    OutcomeReached,
    ProblemSpan,
    Sampled,
    Scored,
    Setting,
    TurnFinished,
    Warned,
    open_run,
)
from atts.pipelines import (
    CappedGate,
    Chunking,
    ConformalGate,
    Policy,
    ScoreRule,
    ThresholdGate,
    TopGate,
)
from atts.run import Listener, Notice, RunResult, Stop, evaluate
from atts.testing import Faults, Latency, ScriptedEngine, toy_problems

QUICK = Latency(per_sample=0.05, per_score=0.01, sampled_token=0.01, jitter=0.5)
Outcomes = Callable[[RunResult], dict[str, str]]


def cuts(directory: Path, count: int, seed: int) -> list[int]:
    """Draw positions at which to cut a journal, from inside its first line to just before its
    end.
    """
    size = (directory / JOURNAL).stat().st_size
    draws = random.Random(seed)
    return [10, *(draws.randrange(size) for _ in range(count - 2)), size - 1]


def torn_copy(world: Any, place: int, name: str = "copy") -> None:
    """Copy the run as a crash at this byte would have left it."""
    shutil.rmtree(world.tmp_path / name, ignore_errors=True)
    shutil.copytree(world.tmp_path / "run", world.tmp_path / name)
    with (world.tmp_path / name / JOURNAL).open("r+b") as file:
        file.truncate(place)


def decided(world: Any, name: str) -> list[str]:
    """Return all recorded decisions in order, as text, because NaN does not equal itself."""
    return [repr(event) for event in world.events(name) if isinstance(event, Decided)]


def places(world: Any) -> list[tuple[str, int, int, str]]:
    """Return question, sample and turn of each decision in the resumed copy, and whether its score
    was requested or had arrived.
    """
    found = [event for event in world.events("copy") if isinstance(event, Decided)]
    return [
        (event.decision.question, event.decision.sample, event.decision.turn, event.asked)
        for event in found
    ]


def test_a_frozen_gate_ends_the_same_from_anywhere(world: Any, outcomes: Outcomes) -> None:
    """With a frozen gate, a run cut anywhere ends with the same outcomes and verdicts.

    Recorded bytes stay unchanged, and no call is repeated.
    """
    first = world.run(world.plan(), world.session())
    calls = sum(isinstance(event, Sampled) for event in world.events())
    for place in cuts(world.tmp_path / "run", 8, seed=1):
        torn_copy(world, place)
        before = (world.tmp_path / "copy" / JOURNAL).read_bytes()
        again = world.run(world.plan(), world.session("copy"))
        assert (again.status, outcomes(again)) == ("finished", outcomes(first))
        assert [line.verdict for line in again.problems] == [
            line.verdict for line in first.problems
        ]
        assert (
            (world.tmp_path / "copy" / JOURNAL)
            .read_bytes()
            .startswith(before[: before.rfind(b"\n") + 1])
        )
        events = world.events("copy")
        assert sum(isinstance(event, Sampled) for event in events) == calls
        assert not [event for event in events if isinstance(event, Warned)]


@pytest.mark.parametrize("kind", ["verdict", "continuation"])
def test_scores_asked_for_in_text_are_recalled(
    world: Any, outcomes: Outcomes, kind: Literal["verdict", "continuation"]
) -> None:
    """If a target without log-probabilities rates chunks in text, no rating is requested again
    after a resume.
    """
    writes: frozenset[Capability] = frozenset({"sample"})

    def plan() -> Any:
        policy = Policy(samples=3, early_stop="none", score=ScoreRule(kind))
        target = ScriptedEngine("target", latency=QUICK, capabilities=writes)
        return world.plan(policy=policy, target=target, gate=ThresholdGate(1.3))

    first = world.run(plan(), world.session(), problems=3)
    calls = sum(isinstance(event, Sampled) for event in world.events())
    for place in cuts(world.tmp_path / "run", 5, seed=2):
        torn_copy(world, place)
        again = world.run(plan(), world.session("copy"), problems=3)
        assert (again.status, outcomes(again)) == ("finished", outcomes(first))
        events = world.events("copy")
        assert sum(isinstance(event, Sampled) for event in events) == calls
        assert not [event for event in events if isinstance(event, Warned)]


@pytest.mark.parametrize("draws", [False, True])
def test_a_resume_requests_no_score_of_equal_chunks_twice(
    world: Any, outcomes: Outcomes, draws: bool
) -> None:
    """Chunks with equal text share one score request, also after a resume; each recorded turn is
    repeated unchanged.
    """
    policy = Policy(samples=6, turns=8, chunking=Chunking(4, 4, ()), early_stop="none")

    def plan() -> Any:
        drawing: frozenset[Capability] = frozenset({"sample", "score", "draw"})
        target = ScriptedEngine("target", capabilities=drawing if draws else drawing - {"draw"})
        return world.plan(policy=policy, target=target)

    first = world.run(plan(), world.session(), problems=3)
    scores = sum(isinstance(event, Scored) for event in world.events())
    for place in cuts(world.tmp_path / "run", 5, seed=3):
        torn_copy(world, place)
        again = world.run(plan(), world.session("copy"), problems=3)
        assert outcomes(again) == outcomes(first)
        events = world.events("copy")
        assert not [event for event in events if isinstance(event, Warned)]
        assert sum(isinstance(event, Scored) for event in events) == scores


POLICIES = {
    "early stop": Policy(samples=6, turns=6, chunking=Chunking(12, 12, ()), early_stop="likely"),
    "two waves": Policy(samples=4, turns=6, chunking=Chunking(12, 12, ()), first_wave=2),
    "replace": Policy(
        samples=3, turns=5, chunking=Chunking(12, 12, ()), takeover="replace", early_stop="none"
    ),
    "problems": Policy(
        samples=4,
        turns=6,
        chunking=Chunking(12, 12, ()),
        escalates="problem",
        score=ScoreRule("disagreement"),
        early_stop="none",
    ),
    "rest": Policy(
        samples=3, turns=5, chunking=Chunking(12, 12, ()), escalates="rest", early_stop="none"
    ),
    "rollouts": Policy(
        samples=3, turns=5, chunking=Chunking(12, 12, ()), escalates="rollout", early_stop="none"
    ),
    "optimistic": Policy(
        samples=3, turns=5, chunking=Chunking(12, 12, ()), optimistic=True, early_stop="none"
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_virtual_schedule_ends_the_same_with_an_online_gate(
    world: Any, outcomes: Outcomes, name: str
) -> None:
    """In virtual time, an online gate makes the same decisions after a resume, because recalled
    calls take their recorded time.
    """

    def plan() -> Any:
        return world.plan(policy=POLICIES[name], gate=world.online(), recall="recorded")

    first = world.run(plan(), world.session(), problems=3)
    for place in cuts(world.tmp_path / "run", 4, seed=2):
        torn_copy(world, place)
        again = world.run(plan(), world.session("copy"), problems=3)
        assert outcomes(again) == outcomes(first)
        assert decided(world, "copy") == decided(world, "run")


def test_a_crash_between_any_two_lines_changes_nothing(world: Any, outcomes: Outcomes) -> None:
    """If the journal is cut after any of its lines, the resumed run has the same outcomes and
    decisions and records nothing twice.
    """

    def plan() -> Any:
        policy = Policy(samples=2, turns=3, chunking=Chunking(12, 12, ()), early_stop="none")
        return world.plan(policy=policy, gate=world.online(), recall="recorded")

    first = world.run(plan(), world.session(), problems=1)
    whole = (world.tmp_path / "run" / JOURNAL).read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    observed = sum(isinstance(event, Observed) for event in world.events())
    for place in ends[:-1]:
        torn_copy(world, place)
        again = world.run(plan(), world.session("copy"), problems=1)
        assert outcomes(again) == outcomes(first)
        assert decided(world, "copy") == decided(world, "run")
        assert sum(isinstance(event, Observed) for event in world.events("copy")) == observed


def test_an_online_gate_keeps_every_recorded_decision(world: Any) -> None:
    """After a resume, an online gate keeps every recorded decision and gets all earlier
    observations; only later decisions may differ.
    """
    plan = world.plan(gate=world.online())
    world.run(plan, world.session())
    for place in cuts(world.tmp_path / "run", 5, seed=3):
        torn_copy(world, place)
        before = decided(world, "copy")
        plan = world.plan(gate=world.online())
        assert world.run(plan, world.session("copy")).status == "finished"
        after = decided(world, "copy")
        assert after[: len(before)] == before
        assert len(set(places(world))) == len(after)
        asked = [
            event.decision.issue
            for event in world.events("copy")
            if getattr(event, "asked", "") == "preview"
        ]
        assert sorted(asked) == list(range(len(asked)))
        told = sum(isinstance(event, Observed) for event in world.events("copy"))
        assert plan.gate.calibrator.decided == told


@pytest.mark.parametrize("seed", range(10, 16))
def test_a_hard_cap_is_carried_over(world: Any, seed: int) -> None:
    """Escalations before a crash count against the hard cap: the resumed run makes the same
    decisions as the run without a crash.
    """

    def plan() -> Any:
        wishes = count()

        def take(features: Features) -> bool:
            """Grant every tenth requested escalation."""
            number = next(wishes)
            return number > 0 and number % 10 == 0

        gate = CappedGate(world.online(), take)
        return world.plan(gate=gate, recall="recorded")

    world.run(plan(), world.session())
    for place in cuts(world.tmp_path / "run", 5, seed):
        torn_copy(world, place)
        world.run(plan(), world.session("copy"))
        assert decided(world, "copy") == decided(world, "run")


def test_one_rollout_at_a_time_decides_alike_in_every_run(world: Any) -> None:
    """With one rollout at a time, decisions are the same in every run, even in real time with a
    slow grader.

    No decision waits for a grade.
    """
    quick = world.plan().grade

    def run(name: str, seconds: list[float]) -> list[str]:
        pauses = cycle(seconds)

        def grade(answer: str, problem: Any) -> Any:
            time.sleep(next(pauses))
            return quick(answer, problem)

        plan = world.plan(
            draft=ScriptedEngine("draft"),
            target=ScriptedEngine("target"),
            policy=replace(POLICIES["early stop"], early_stop="certain"),
            gate=ConformalGate(Calibrator(0.4, "aci", seed=3)),
            grade=grade,
            concurrency=1,
        )
        anyio.run(partial(evaluate, toy_problems(8, 5), plan, world.session(name)))
        return decided(world, name)

    first = run("run", [0.0])
    assert run("again", [0.0]) == first
    assert run("slow", [0.0, 0.004, 0.0, 0.02]) == first


def test_decisions_are_read_in_order_for_replay(world: Any) -> None:
    """A replay gets each decision of a run once and in order, with the features of the chunk.

    Requests for scores are left out.
    """
    world.run(world.plan(gate=world.online()), world.session())
    found = list(open_run(world.tmp_path / "run").decisions())
    told = sum(isinstance(event, Observed) for event in world.events())
    assert len({event.decision.turn_key for event in found}) == len(found) == told
    assert all(event.features["tokens"] > 0 for event in found)


def test_a_synchronous_run_resumes_to_the_same_result(world: Any, outcomes: Outcomes) -> None:
    """A synchronous baseline resumes to the same result, although it carries rounding errors from
    one round to the next.
    """
    policy = Policy(
        samples=4, turns=4, chunking=Chunking(12, 12, ()), barrier=True, early_stop="none"
    )
    first = world.run(world.plan(policy=policy, gate=TopGate.of(0.4)), world.session(), problems=3)
    for place in cuts(world.tmp_path / "run", 4, seed=4):
        torn_copy(world, place)
        again = world.run(
            world.plan(policy=policy, gate=TopGate.of(0.4)), world.session("copy"), problems=3
        )
        assert outcomes(again) == outcomes(first)


def facts(world: Any) -> list[str]:
    """Return every decision, the action that followed it, and every turn."""
    return [
        repr(event)
        for event in world.events("copy")
        if isinstance(event, Decided | Observed | TurnFinished)
    ]


def test_failed_calls_are_remembered(world: Any) -> None:
    """Invalid scores that forced decisions are recalled as invalid after a crash, although the
    engine works again.
    """
    ill = ScriptedEngine(
        "target", latency=QUICK, faults=Faults({"refused": 0.3, "nan": 0.2}, seed=4, only="score")
    )
    world.run(world.plan(target=ill), world.session(), problems=3)
    assert any(isinstance(event, CallFailed) for event in world.events())
    for place in cuts(world.tmp_path / "run", 5, seed=5):
        torn_copy(world, place)
        before = facts(world)
        again = world.run(world.plan(), world.session("copy"), problems=3)
        assert again.status == "finished"
        after = facts(world)
        assert after[: len(before)] == before
        assert len(set(after)) == len(after)
        assert not [event for event in world.events("copy") if isinstance(event, Warned)]


def test_a_full_disk_is_survived(
    world: Any, outcomes: Outcomes, small_disk: Callable[..., Any]
) -> None:
    """On a full disk the run ends with a clear error and keeps earlier records; once there is
    space, the run finishes as usual.
    """
    whole = world.run(world.plan(), world.session("whole"))
    for room in (100, 40_000, 90_000):
        name = f"full {room}"
        with pytest.raises(StorageError, match="nothing written so far is lost"):
            world.run(
                world.plan(),
                world.session(name, journal=JournalOptions("close", opener=small_disk(room))),
            )
        before = (world.tmp_path / name / JOURNAL).read_bytes()
        assert len(before) == room
        again = world.run(world.plan(), world.session(name))
        assert outcomes(again) == outcomes(whole)
        assert (
            (world.tmp_path / name / JOURNAL)
            .read_bytes()
            .startswith(before[: before.rfind(b"\n") + 1])
        )


def test_a_finished_run_is_only_read(world: Any, outcomes: Outcomes) -> None:
    """Reopening a finished run calls no engine and gives the same result; the journal gets one more
    session.
    """
    first = world.run(world.plan(), world.session())
    draft = ScriptedEngine("draft")
    again = world.run(world.plan(draft=draft), world.session())
    assert (again.status, again.problems, again.sessions) == ("finished", first.problems, 2)
    assert again.seconds == pytest.approx(first.seconds)
    # the recorded seconds do not grow, however often the run is opened
    assert world.run(world.plan(), world.session()).seconds == again.seconds
    assert draft.stats().requests == 0
    assert outcomes(again) == outcomes(first)


class StopsAfterSamples(Listener):
    """A listener that asks the run to stop when a number of chunks has been written."""

    def __init__(self, stop: Stop, samples: int) -> None:
        self._stop = stop
        self._left = samples

    def recalled(self, event: Event) -> None:
        """Ignore an event of an earlier session."""

    def notify(self, event: Notice) -> None:
        """Count a chunk, and stop the run after the last one."""
        self._left -= isinstance(event, Sampled)
        if self._left == 0:
            self._stop.request()


def test_seconds_of_a_problem_count_all_sessions(world: Any) -> None:
    """If a run is interrupted in the middle of problems and resumed, the seconds of a problem
    include the session in which it was interrupted.
    """
    stop = Stop()
    early = world.session(stop=stop, listeners=[StopsAfterSamples(stop, 25)])
    assert world.run(world.plan(), early).status == "interrupted"
    world.run(world.plan(), world.session())
    spans = [event for event in world.events() if isinstance(event, ProblemSpan)]
    of_problem: dict[str, list[float]] = {}
    for span in spans:
        of_problem.setdefault(span.problem, []).append(span.ended - span.started)
    assert [len(times) for times in of_problem.values()].count(2) > 1
    finished = open_run(world.tmp_path / "run").state().finished
    assert {name: one.seconds for name, one in finished.items()} == pytest.approx(
        {name: sum(times) for name, times in of_problem.items()}
    )


def test_an_interrupted_run_counts_its_saved_tokens(world: Any) -> None:
    """The result of an interrupted run counts the recorded tokens of unfinished problems, including
    those of earlier sessions. A finished run has no such tokens.
    """
    for samples in (25, 10):
        stop = Stop()
        early = world.session(stop=stop, listeners=[StopsAfterSamples(stop, samples)])
        result = world.run(world.plan(), early)
        assert result.status == "interrupted"
        over = {line.problem for line in result.problems}
        calls = [event for event in world.events() if isinstance(event, Sampled)]
        tokens: dict[str, int] = {}
        for call in calls:
            if call.problem not in over:
                known = tokens.get(call.problem, 0)
                tokens[call.problem] = known + len(call.completion.ids)
        assert sorted(result.saved_tokens) == sorted(tokens.values())
        said = f"{sum(tokens.values()):,} tokens of {len(tokens)} unfinished problems, not counted"
        assert result.saved_words.startswith(said)
    assert not world.run(world.plan(), world.session()).saved_words


def test_seconds_of_a_problem_are_unknown_after_a_kill(world: Any) -> None:
    """The journal of a killed session does not say how long the session worked on its unfinished
    problems, so their seconds are unknown. Seconds of the other problems stay known.
    """
    world.run(world.plan(concurrency=4), world.session())
    lines = (world.tmp_path / "run" / JOURNAL).read_bytes().splitlines(keepends=True)
    torn_copy(world, sum(map(len, lines[: len(lines) // 2])))
    begun = {event.problem for event in world.events("copy") if isinstance(event, CallSpan)}
    over = {event.problem for event in world.events("copy") if isinstance(event, OutcomeReached)}
    assert over
    assert begun - over
    world.run(world.plan(concurrency=4), world.session("copy"))
    finished = open_run(world.tmp_path / "copy").state().finished
    unknown = {name for name, one in finished.items() if one.seconds is None}
    assert unknown == begun - over


def test_seconds_stay_when_a_session_repeats_recorded_calls(world: Any) -> None:
    """A session that only repeats the recorded calls of a problem does not change its seconds."""
    world.run(world.plan(recall="recorded"), world.session())
    before = open_run(world.tmp_path / "run").state().finished
    world.run(world.plan(recall="recorded"), world.session())
    after = open_run(world.tmp_path / "run").state().finished
    assert [one.seconds for one in after.values()] == [one.seconds for one in before.values()]


def test_node_numbers_continue_after_a_resume(world: Any) -> None:
    """After a resume, no two nodes of the recorded graph have the same number, so edges stay valid.
    Recalled nodes are marked and cost nothing.
    """
    world.run(world.plan(), world.session())
    torn_copy(world, cuts(world.tmp_path / "run", 3, seed=6)[1])
    world.run(world.plan(), world.session("copy"))
    nodes = [event for event in world.events("copy") if isinstance(event, CallSpan)]
    numbers = [node.node for node in nodes]
    assert len(set(numbers)) == len(numbers)
    recalled = [node for node in nodes if node.source == "recalled"]
    assert recalled
    assert all(node.ended == node.started for node in recalled)
    assert all(set(node.after) <= set(numbers) for node in nodes if node.node > recalled[0].node)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, "seed"),
        (
            {"policy": Policy(samples=5, turns=6, chunking=Chunking(12, 12, ()))},
            "configuration.policy.samples",
        ),
        ({"gate": TopGate.of(0.4)}, "configuration.gate"),
        ({"configuration": {"rate": Setting(0.5, "flag")}}, "configuration.rate"),
        (
            {"target": ScriptedEngine("target", context_length=4096)},
            "engines.target.context_length",
        ),
    ],
)
def test_another_run_is_refused(world: Any, changes: dict[str, Any], field: str) -> None:
    """A directory of another run is refused with an error that names the differing field, and
    nothing in the directory changes.
    """
    world.run(world.plan(), world.session(), problems=1)
    before = (world.tmp_path / "run" / JOURNAL).read_bytes()
    with pytest.raises(FingerprintError, match=field):
        world.run(world.plan(**changes), world.session(), problems=1)
    with pytest.raises(FingerprintError, match="dataset"):
        world.run(world.plan(), world.session(), problems=2)
    assert (world.tmp_path / "run" / JOURNAL).read_bytes() == before


def test_a_bad_directory_is_found_before_engines_open(world: Any) -> None:
    """A damaged manifest, or a file in place of the directory, is refused before any model is
    loaded.
    """
    (world.tmp_path / "run").mkdir()
    (world.tmp_path / "run" / "manifest.json").write_text("{")
    draft = ScriptedEngine("draft")
    with pytest.raises(JournalCorrupt):
        world.run(world.plan(draft=draft), world.session())
    (world.tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        world.run(world.plan(draft=draft), world.session("file"))
    # the engine was never opened, so it can still be opened
    world.run(world.plan(draft=draft), world.session(None), problems=1)


def test_a_damaged_middle_is_refused(world: Any) -> None:
    """A damaged line in the middle of a journal is an error that names the line's number, and the
    file is not changed.
    """
    world.run(world.plan(), world.session(), problems=1)
    path = world.tmp_path / "run" / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:9], lines[9][:-9] + b"\n", *lines[10:]]))
    before = path.read_bytes()
    with pytest.raises(JournalCorrupt, match="line 10"):
        world.run(world.plan(), world.session(), problems=1)
    assert path.read_bytes() == before


def test_a_lost_engine_ends_the_run_and_loses_nothing(world: Any, outcomes: Outcomes) -> None:
    """A lost engine ends the run with the engine's error; the next session, with a working engine,
    repeats the calls in flight.
    """
    whole = world.run(world.plan(), world.session("whole"))
    retries = replace(world.plan().retries, calls=1, failures_in_row=2)

    class Dying(ScriptedEngine):
        async def sample(self, request: Any) -> Any:
            if self.stats().requests >= 30:
                raise EngineUnavailable("draft", "it is gone")
            return await super().sample(request)

    with pytest.raises(EngineUnavailable, match="gone"):
        world.run(world.plan(draft=Dying("draft"), retries=retries), world.session())
    again = world.run(world.plan(retries=retries), world.session())
    assert again.status == "finished"
    assert outcomes(again) == outcomes(whole)


def test_failed_problems_are_tried_again(world: Any, outcomes: Outcomes) -> None:
    """The next session repeats the failed problems, and keeps the finished ones."""
    whole = world.run(world.plan(), world.session("whole"), problems=3)
    name = toy_problems(3, 5)[1].id

    class Away(ScriptedEngine):
        async def sample(self, request: Any) -> Any:
            if request.seed.problem == name and request.seed.turn:
                raise EngineUnavailable("draft", "it is away")
            return await super().sample(request)

    retries = replace(world.plan().retries, calls=1)
    first = world.run(world.plan(draft=Away("draft"), retries=retries), world.session(), problems=3)
    statuses = [line.status for line in whole.problems]
    assert [line.status for line in first.problems] == [statuses[0], "failed", statuses[2]]
    assert {outcome.problem.id: outcome.status for outcome in first.outcomes()}[name] == "failed"
    again = world.run(world.plan(retries=retries), world.session(), problems=3)
    assert [line.status for line in again.problems] == statuses
    assert outcomes(again) == outcomes(whole)
    assert len(list(again.outcomes())) == 3
    keys = [event.key for event in world.events() if isinstance(event, Sampled)]
    assert len(set(keys)) == len(keys)
