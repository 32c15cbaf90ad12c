"""Tests of a run: what it reports, records, grades and refuses, and how it ends."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import anyio
import psutil
import pytest

from atts.api import Setup, answers_for, evaluate_sync, solve_sync
from atts.calibration import Calibrator
from atts.core import (
    HOLD,
    Chunk,
    Completion,
    Outcome,
    Problem,
    Prompt,
    Role,
    Rollout,
    SampleRequest,
    Turn,
    Usage,
)
from atts.engine import EngineAround, EngineSpec
from atts.errors import BadReply, DatasetError, EngineUnavailable, OptionError
from atts.evaluators import samples_of
from atts.graph import Limit, ProblemScope, RetryPolicy, RolloutScope
from atts.journal import (
    CallFailed,
    CallSpan,
    Drifted,
    Event,
    FinishedProblem,
    FinishedSample,
    Graded,
    OutcomeReached,
    ProblemSpan,
    ProblemStarted,
    RolloutSpan,
    Sampled,
    Scored,
    SessionClosed,
    SessionOpened,
    Warned,
    load_manifest,
)
from atts.methods import PRESETS
from atts.pipelines import Answers, ConformalGate, Context, FixedGate, Policy
from atts.run import (
    CallBegun,
    ChunkWritten,
    EngineAwaited,
    Notice,
    RunBegun,
    RunEnded,
    RunResult,
    Stop,
    check_completion,
    evaluate,
)
from atts.sampling import Seed
from atts.testing import (
    Backend,
    Faults,
    ScriptedEngine,
    run_virtual,
    toy_answer,
    toy_groups,
    toy_problems,
)
from tests.run.conftest import POLICY

Outcomes = Callable[[RunResult], dict[str, str]]


class Diary:
    """A listener that records all events, and may react to one."""

    def __init__(self, act: Callable[[int], None] = lambda count: None) -> None:
        self.before: list[Event] = []
        self.live: list[Notice] = []
        self._act = act

    def recalled(self, event: Event) -> None:
        """Record the event."""
        self.before.append(event)

    def notify(self, event: Notice) -> None:
        """Record the event, then react to it."""
        self.live.append(event)
        self._act(len(self.live))

    @property
    def events(self) -> list[Event]:
        """Return the live events, without those that the journal does not contain."""
        told_live = (ChunkWritten, CallBegun, EngineAwaited, RunBegun, RunEnded)
        return [event for event in self.live if not isinstance(event, told_live)]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_listeners_get_the_events_of_the_journal(world: Any, backend: Backend) -> None:
    """Listeners get the journal's events in order, and chunks while they are written.

    After a resume they first get all earlier events.
    """
    diary = Diary()
    later = Diary()
    world.run(world.plan(gate=FixedGate("escalate")), world.session(listeners=[diary]), 3, backend)
    journal = world.events()
    assert diary.events == journal[1:-1]
    assert (type(journal[0]), journal[-1]) == (SessionOpened, SessionClosed("finished"))
    chunks = [event for event in diary.live if isinstance(event, ChunkWritten)]
    assert len(chunks) == sum(isinstance(event, Sampled) for event in journal)
    world.run(world.plan(gate=FixedGate("escalate")), world.session(listeners=[later]), 3, backend)
    assert later.before == journal
    assert [type(event) for event in later.live] == [
        RunBegun,
        RunEnded,
    ]  # the resumed run has no work left


def test_every_call_is_recorded_with_its_result_and_times(world: Any) -> None:
    """Each live call is recorded once with its result and once with its times; waits are recorded
    with times only.
    """
    world.run(world.plan(), world.session())
    count = Counter(type(event) for event in world.events())
    calls = [
        event for event in world.events() if isinstance(event, CallSpan) and event.stage != HOLD
    ]
    assert count[Sampled] + count[Scored] == len(calls)
    assert all(event.engine for event in calls)
    assert (count[RolloutSpan], count[ProblemSpan], count[OutcomeReached]) == (20, 5, 5)
    assert {event.source for event in world.events() if isinstance(event, CallSpan)} == {"live"}


def test_fallback_answers_are_marked_in_the_journal(world: Any) -> None:
    """An answer that its text does not mark as the answer counts only after the text has ended. It
    is recorded everywhere as a fallback answer.
    """
    answers = Answers(lambda text: None, toy_groups, extract_finished=toy_answer)
    plan = world.plan(answers=answers, policy=replace(POLICY, turns=60))
    result = world.run(plan, world.session())
    rollouts = [rollout for outcome in result.outcomes() for rollout in outcome.rollouts]
    kept = [sample for problem in result.problems for sample in problem.samples]
    assert [r.is_fallback_answer for r in rollouts] == [s.is_fallback_answer for s in kept]
    assert all(r.is_fallback_answer == (r.answer is not None) for r in rollouts)
    assert any(sample.is_fallback_answer and sample.verdict == "correct" for sample in kept)


def test_only_a_finished_text_may_state_its_answer() -> None:
    """In an unfinished text only a marked answer counts; a finished text may also end with a
    sentence that states the answer.
    """
    answers = answers_for("math")
    text = "She sells 9 eggs for 2 dollars each. The total is 18."
    assert (answers.extract(text), answers.extract_finished(text)) == (None, "18")


def test_without_a_directory_the_result_keeps_the_outcomes(world: Any, outcomes: Outcomes) -> None:
    """Without a directory, the outcomes equal those of a run with a directory, and nothing is
    written.
    """
    kept = world.run(world.plan(), world.session(None))
    written = world.run(world.plan(), world.session())
    assert outcomes(kept) == outcomes(written)
    assert [path.name for path in world.tmp_path.iterdir()] == ["run"]


def test_the_result_is_in_the_order_of_the_dataset(world: Any) -> None:
    """The result is in the order of the dataset, whichever problem ended first.

    Its usage adds up, and the exit code is 0.
    """
    result = world.run(world.plan(), world.session())
    assert [line.problem for line in result.problems] == [
        problem.id for problem in toy_problems(5, 5)
    ]
    assert result.usage.draft_tokens == sum(
        outcome.usage.draft_tokens for outcome in result.outcomes()
    )
    assert result.exit_code == 0


def test_the_manifest_says_what_was_run(world: Any) -> None:
    """The manifest contains seed, dataset, policy, engines, versions and date."""
    world.run(world.plan(seed=9), world.session())
    manifest = load_manifest(world.tmp_path / "run" / "manifest.json")
    assert manifest is not None
    assert (manifest.seed, manifest.problems) == (9, 5)
    assert manifest.engines["draft"]["engine"] == "scripted 0.1"
    policy = manifest.configuration["policy"].value
    assert isinstance(policy, dict)
    assert policy["samples"] == 4
    assert manifest.versions["python"]
    assert manifest.created > 1e9


def test_each_kind_of_verdict_is_reported(world: Any) -> None:
    """Verdicts distinguish correct answers, wrong answers, missing answers, undecided answers, and
    failures of the grader.
    """
    words = {"1": "equal", "2": "different", "3": "unscored"}

    async def pipeline(
        problem: Problem, policy: Policy, context: Context, scope: ProblemScope
    ) -> Outcome:
        rollouts = tuple(
            Rollout(problem.id, sample, Prompt((1,), (1,)), finish="answer", answer=answer)
            for sample, answer in enumerate(("1", "2", "3", "4", None, "1"))
        )
        return Outcome(problem, rollouts, "2")

    class Said:
        def __init__(self, status: str) -> None:
            self.status = status
            self.rule = f"by {status}"

    asked: list[str] = []

    def grade(answer: str, problem: Problem) -> Any:
        asked.append(answer)
        return Said(words[answer])

    result = world.run(world.plan(pipeline=pipeline, grade=grade), world.session(), problems=1)
    line = result.problems[0]
    assert [sample.verdict for sample in line.samples] == [
        "correct",
        "wrong",
        "unscored",
        "unscored",
        "wrong",
        "correct",
    ]
    assert (line.verdict, line.rule) == ("wrong", "by different")
    rules = [event.rule for event in world.events() if isinstance(event, Graded)]
    assert rules[3:5] == ["the grader failed: KeyError: '4'", "no answer"]
    assert sorted(asked) == ["1", "2", "3", "4"]
    ungraded = world.run(world.plan(grade=None), world.session(None), problems=1)
    assert ungraded.problems[0].verdict is None


def test_a_pipeline_that_breaks_fails_its_problem_alone(world: Any) -> None:
    """If a pipeline fails on one problem, that problem's outcome has the reason and the other
    problems are solved.
    """

    async def pipeline(
        problem: Problem, policy: Policy, context: Context, scope: ProblemScope
    ) -> Outcome:
        if problem.id.endswith("1"):
            raise KeyError("oh")
        return Outcome(problem, (), "1")

    result = world.run(world.plan(pipeline=pipeline), world.session(), problems=3)
    assert [(line.status, line.why) for line in result.problems] == [
        ("answered", ""),
        ("failed", "KeyError: 'oh'"),
        ("answered", ""),
    ]


def test_two_problems_of_one_name_are_refused(world: Any) -> None:
    """Two problems with the same name are refused, because the journal could not distinguish them."""
    with pytest.raises(DatasetError, match="two problems have the id 'a'"):
        world.run(world.plan(), world.session(), [Problem("a", "1"), Problem("a", "2")])


@pytest.mark.parametrize(
    ("option", "value"), [("engines", "open"), ("signals", "hear"), ("keep", "everything")]
)
def test_unknown_choices_are_refused(world: Any, option: str, value: str) -> None:
    """An unknown choice raises an error that lists the known choices; atts does not use a default
    instead.
    """
    with pytest.raises(OptionError, match=f"{option}: unknown value '{value}'"):
        world.session(**{option: value})


def test_impossible_plans_are_refused(world: Any) -> None:
    """An impossible option raises an error when the plan is made."""
    with pytest.raises(OptionError, match="recall: unknown value 'fast'"):
        world.plan(recall="fast")
    with pytest.raises(OptionError, match="concurrency"):
        world.plan(concurrency=0)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_stop_request_lets_calls_finish_and_a_second_cancels_them(
    world: Any, outcomes: Outcomes, backend: Backend, times: int
) -> None:
    """The first stop request lets calls finish and the second cancels them; after either, the run
    resumes to the same results.
    """
    whole = world.run(world.plan(), world.session("whole"), backend=backend)
    stop = Stop()

    def ask(count: int) -> None:
        for _ in range(times if count == 150 else 0):
            stop.request()

    diary = Diary(ask)
    engines = {role: ScriptedEngine(role, latency=world.quick) for role in ("draft", "target")}
    session = world.session(listeners=[diary], stop=stop)
    result = world.run(world.plan(**engines), session, backend=backend)
    assert (result.status, result.exit_code) == ("interrupted", 130)
    assert world.events()[-1] == SessionClosed("interrupted", "stopped on request")
    cancelled = sum(engine.stats().cancelled for engine in engines.values())
    assert (cancelled > 0) == (times == 2)
    again = world.run(world.plan(), world.session(), backend=backend)
    assert (again.status, again.exit_code) == ("finished", 0)
    assert outcomes(again) == outcomes(whole)
    keys = [event.key for event in world.events() if isinstance(event, Sampled)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_no_file_and_no_work_outlive_a_run(world: Any, backend: Backend) -> None:
    """However a run ends, its files are closed and its slots are free."""
    before = open_files()
    for end in range(12):
        draft = ScriptedEngine("draft", latency=world.quick)
        faults = Faults({"refused": 0.3, "nan": 0.2}, seed=end) if end % 3 == 0 else Faults()
        target = ScriptedEngine("target", latency=world.quick, faults=faults)
        plan = world.plan(
            draft=draft,
            target=target,
            retries=RetryPolicy(calls=2, delay_seconds=0.05, failures_in_row=None),
        )

        async def cut(plan: Any = plan, end: int = end) -> None:
            with anyio.move_on_after(0.37 * end + 0.01):
                await evaluate(toy_problems(4, 5), plan, world.session(f"run{end}"))

        run_virtual(cut, backend=backend)
        assert open_files() == before
        assert draft.stats().in_flight == target.stats().in_flight == 0


def open_files() -> list[str]:
    """List the files that this process has open."""
    return sorted(file.path for file in psutil.Process().open_files())


def test_a_stop_request_after_the_last_problem_changes_nothing(world: Any) -> None:
    """A stop request after all work is done changes nothing: the run counts as finished."""
    stop = Stop()

    class Late(Diary):
        def notify(self, event: Notice) -> None:
            if isinstance(event, ProblemSpan):
                stop.request()

    assert (
        world.run(world.plan(), world.session(listeners=[Late()], stop=stop), problems=1).status
        == "finished"
    )


def test_a_run_out_of_time_concludes_open_problems(world: Any) -> None:
    """If a run is out of time, open problems are concluded from their finished rollouts and no
    further problem begins.

    The status reports this.
    """
    result = world.run(world.plan(timeout_seconds=1.0, concurrency=4), world.session())
    assert result.status == "stopped"
    assert 0 < len(result.problems) < 5
    assert {rollout.finish for outcome in result.outcomes() for rollout in outcome.rollouts} & {
        "cancelled"
    }
    assert world.run(world.plan(), world.session()).status == "finished"


class Queue(ScriptedEngine):
    """An engine that replies after 30 seconds, and takes one step a second for its first `works`
    seconds.
    """

    def __init__(self, role: Role, works: float) -> None:
        super().__init__(role)
        self.works = works
        self.began = math.nan

    def steps_taken(self) -> int:
        """Count the seconds since the first call."""
        if math.isnan(self.began):
            return 0
        return int(min(anyio.current_time() - self.began, self.works))

    async def sample(self, request: SampleRequest) -> Completion:
        """Wait for a turn, then reply."""
        if math.isnan(self.began):
            self.began = anyio.current_time()
        await anyio.sleep(30.0)
        return await super().sample(request)


@pytest.mark.parametrize(("works", "failed"), [(1e9, False), (4.0, True)])
def test_a_call_that_waits_for_its_turn_is_late_only_if_no_step_is_taken(
    world: Any, works: float, failed: bool
) -> None:
    """A waiting call is late only if the engine takes no step for 6 s.

    The deadline restarts with each step of an engine that reports its steps.
    """
    plan = world.plan(
        draft=Queue("draft", works),
        policy=replace(POLICY, timeout_seconds=6.0),
        retries=RetryPolicy(calls=1, rollouts=1),
    )
    world.run(plan, world.session(), problems=1)
    failures = [event for event in world.events() if isinstance(event, CallFailed)]
    assert bool(failures) is failed
    assert all("no step arrived within 6 s" in event.text for event in failures)


def test_a_wrapped_engine_is_late_as_it_is_alone(world: Any) -> None:
    """For a wrapped engine, as for the engine alone, the deadline of 6 s restarts with each of the
    engine's steps. No call is late.
    """
    wrapped = EngineAround(EngineAround(Queue("draft", 1e9), "own"), "own")
    plan = world.plan(
        draft=wrapped,
        policy=replace(POLICY, timeout_seconds=6.0),
        retries=RetryPolicy(calls=1, rollouts=1),
    )
    world.run(plan, world.session(), problems=1)
    assert not [event for event in world.events() if isinstance(event, CallFailed)]


class Closed(ScriptedEngine):
    """An engine that counts steps only while it is open, and is never opened."""

    def steps_taken(self) -> int:
        """Raise an error, because the engine is not open."""
        raise EngineUnavailable("target", "it is not open", "Open it")


class Lost(Queue):
    """An engine whose step counter fails while calls wait for it."""

    def steps_taken(self) -> int:
        """Raise an error once the first call has waited for 3 seconds."""
        if super().steps_taken() > 3:
            raise EngineUnavailable("draft", "its loop has ended", "Open it again")
        return super().steps_taken()


def test_a_failing_step_counter_does_not_end_the_run(world: Any) -> None:
    """A failing step counter does not end the run.

    The counter of an unused engine may fail because the engine is closed. Calls of a lost engine
    end at their own deadline.
    """
    plan = world.plan(target=Closed("target"), gate=FixedGate("accept"))
    assert world.run(plan, world.session("closed"), problems=1).status == "finished"
    plan = world.plan(
        draft=Lost("draft", 1e9),
        policy=replace(POLICY, timeout_seconds=6.0),
        retries=RetryPolicy(calls=1, rollouts=1),
    )
    world.run(plan, world.session("lost"), problems=1)
    failures = [event for event in world.events("lost") if isinstance(event, CallFailed)]
    assert failures
    assert all("no step arrived within 6 s" in event.text for event in failures)


def test_recalled_turns_that_differ_are_reported(world: Any) -> None:
    """If recalled turns differ from the recorded ones, the journal has a warning.

    The cause is a pipeline that depends on more than its arguments.
    """
    chunk = Chunk("draft", "x", (1,), (1,), "end")
    notes = iter("abcdef")

    async def pipeline(
        problem: Problem, policy: Policy, context: Context, scope: ProblemScope
    ) -> Outcome:
        rollout = Rollout(problem.id, 0, Prompt((1,), (1,)))
        context.listener.turned(rollout, Turn(0, (chunk,), note=next(notes)))
        if next(notes) == "b":
            raise OptionError("x", "ends the run")
        return Outcome(problem, (rollout,), None)

    with pytest.raises(OptionError, match="ends the run"):
        world.run(world.plan(pipeline=pipeline), world.session(), problems=1)
    world.run(world.plan(pipeline=pipeline), world.session(), problems=1)
    assert [event.code for event in world.events() if isinstance(event, Warned)] == [
        "recall-differs"
    ]


@pytest.mark.parametrize("again", ["0a", "0a 0b", "0a 1x", "0a 0x", "0a 1c", "0a 0b 1d 1x", ""])
def test_a_turn_that_was_tried_again_is_recorded_without_mixing_attempts(
    world: Any, again: str
) -> None:
    """If a problem is tried again, all turns recorded for it come from a single attempt."""
    chunk = Chunk("draft", "x", (1,), (1,), "end")
    sessions = iter(["0a 0b 1d", again])
    seen: list[Outcome] = []

    async def pipeline(
        problem: Problem, policy: Policy, context: Context, scope: ProblemScope
    ) -> Outcome:
        said = next(sessions)
        rollout = Rollout(problem.id, 0, Prompt((1,), (1,)))
        for report in said.split():
            turn = Turn(int(report[0]), (chunk,), note=report[1:])
            rollout = replace(rollout, turns=(*rollout.turns[: turn.index], turn))
            context.listener.turned(rollout, turn)
        if not seen and said != again:
            raise OptionError("x", "ends the run")
        seen.append(Outcome(problem, (replace(rollout, finish="settled"),), None))
        return seen[0]

    with pytest.raises(OptionError, match="ends the run"):
        world.run(world.plan(pipeline=pipeline), world.session(), problems=1)
    result = world.run(world.plan(pipeline=pipeline), world.session(), problems=1)
    assert list(result.outcomes()) == seen


async def one_call(
    problem: Problem, policy: Policy, context: Context, scope: ProblemScope
) -> Outcome:
    """Make one call per rollout, which is the smallest possible pipeline."""
    ids = context.draft.tokenizer.encode(problem.text)
    prompt = Prompt(ids, ids)

    async def rollout(place: RolloutScope[Rollout]) -> Rollout:
        request = SampleRequest(ids, 4, seed=Seed(0, problem.id, place.sample))
        done = await place.call("draft", context.draft.sample, request)
        chunk = Chunk("draft", done.text, done.ids, done.ids, done.ended, done.logprobs)
        grown = Rollout(problem.id, place.sample, prompt, (Turn(0, (chunk,)),), "turns")
        context.listener.turned(grown, grown.turns[0])
        return grown

    results = await scope.rollouts(rollout, policy.samples)
    return Outcome(
        problem,
        tuple(result.value for result in results if result.value),
        None,
        status="unanswered",
    )


def test_a_result_is_in_the_file_before_anyone_acts_on_it(world: Any) -> None:
    """A result is in the journal before the pipeline gets it, so a crash cannot lose a result that
    was used.
    """
    missing: list[str] = []

    async def pipeline(
        problem: Problem, policy: Policy, context: Context, scope: ProblemScope
    ) -> Outcome:
        for turn in range(20):
            await context.draft.sample(SampleRequest((1, 2), 4, seed=Seed(0, problem.id, 0, turn)))
            if [
                e.turn for e in world.events() if isinstance(e, Sampled) and e.problem == problem.id
            ][-1:] != [turn]:
                missing.append(f"{problem.id} {turn}")
        return Outcome(problem, (), None, status="unanswered")

    world.run(world.plan(pipeline=pipeline), world.session(), problems=4)
    assert not missing


def test_accuracy_of_samples_leaves_cancelled_ones_out() -> None:
    """The accuracy of samples leaves out cancelled and ungraded rollouts, instead of counting them
    as wrong.
    """
    samples = (
        FinishedSample(0, "answer", "1", "correct"),
        FinishedSample(1, "settled", None, "wrong"),
        FinishedSample(2, "turns", None, "wrong"),
        FinishedSample(3, "end", None, "wrong"),
        FinishedSample(4, "answer", "x", "unscored", "time"),
    )
    settled = FinishedProblem("p", "answered", "1", "correct", "", samples, {}, Usage())
    held = samples_of(settled.problem, settled.complete_samples, toy_groups)
    assert held is not None
    assert held.correct == (True, False, False, None)
    assert held.statuses == ("graded", "cut", "no answer", "timeout")


def test_alarms_are_recorded_once(world: Any) -> None:
    """If live scores drift away from the stored scores, the journal records each alarm once, with
    its time and reaction, also after a resume.
    """

    def plan() -> Any:
        stored = [1.0 + number / 1000 for number in range(400)]
        calibrator = Calibrator(0.4, "marginal", stored=stored, drift="report")
        return world.plan(gate=ConformalGate(calibrator), alarms=lambda: calibrator.events)

    world.run(plan(), world.session(), problems=40)
    drifted = [event for event in world.events() if isinstance(event, Drifted)]
    assert drifted
    assert drifted[0].acted == "report"
    world.run(plan(), world.session(), problems=40)
    assert [event for event in world.events() if isinstance(event, Drifted)] == drifted


class Census(Diary):
    """A listener that counts all living objects of atts whenever a given problem ends."""

    def __init__(self, *problems: str) -> None:
        super().__init__()
        self.counts: list[Counter[str]] = []
        self._problems = problems

    def notify(self, event: Notice) -> None:
        """Count the objects, and keep no reference to the event."""
        if isinstance(event, OutcomeReached) and event.problem in self._problems:
            gc.collect()
            kinds = (type(thing) for thing in gc.get_objects())
            self.counts.append(
                Counter(f"{kind.__module__}.{kind.__name__}" for kind in kinds if _is_ours(kind))
            )


def _is_ours(kind: type) -> bool:
    return str(kind.__module__).startswith(("atts.core", "atts.journal", "atts.run", "atts.graph"))


def test_memory_does_not_grow_with_the_number_of_problems(world: Any) -> None:
    """With the journal on and no results kept, as many objects live after 200 problems as after 20.

    Up to sixteen problems may wait for a thread or the disk during the count. If even one object
    per two problems were kept, 90 more would be counted.
    """
    problems = (
        Problem(f"p{number}", f"Start at {number % 90}. +1. What is the result?")
        for number in range(220)
    )
    census = Census("p20", "p200")
    gc.collect()
    # objects of other tests are not counted
    before = sum(type(thing) is Problem for thing in gc.get_objects())
    plan = world.plan(
        pipeline=one_call, concurrency=8, draft=ScriptedEngine("draft"), limits={"draft": Limit(4)}
    )
    plan = replace(plan, policy=replace(plan.policy, samples=2))
    world.run(plan, world.session(keep="nothing", dataset="stream", listeners=[census]), problems)
    early, late = census.counts
    assert not {name: late[name] - early[name] for name in late if late[name] >= early[name] + 90}
    assert late["atts.core.Problem"] - before < 90


class Crowd(Diary):
    """A listener that counts the problems that have begun and not ended."""

    def __init__(self) -> None:
        super().__init__()
        self.open = self.most = 0

    def notify(self, event: Notice) -> None:
        """Count the problem, and keep no reference to the event."""
        self.open += isinstance(event, ProblemStarted) - isinstance(event, OutcomeReached)
        self.most = max(self.most, self.open)


def test_a_grader_slower_than_the_engines_holds_them_back(world: Any) -> None:
    """If the grader is slower than the engines, the number of results that wait for a grade is
    limited.
    """
    one_at_a_time = threading.Lock()
    usual = world.plan(concurrency=4, draft=ScriptedEngine("draft"))

    def slow(answer: str, problem: Problem) -> Any:
        with one_at_a_time:
            time.sleep(0.02)
        return usual.grade(answer, problem)

    async def answering(
        problem: Problem, policy: Policy, context: Context, scope: ProblemScope
    ) -> Outcome:
        outcome = await one_call(problem, policy, context, scope)
        return replace(outcome, answer="0", status="answered")

    crowd = Crowd()
    plan = replace(usual, pipeline=answering, grade=slow, policy=replace(usual.policy, samples=8))
    result = world.run(plan, world.session(listeners=[crowd]), problems=24)
    assert len(result.problems) == 24
    assert crowd.most <= 4  # a limit on the number of open problems alone would allow eight


def test_a_calibrator_forgets_finished_problems(world: Any) -> None:
    """After a problem has ended, a calibrator keeps its scores but not its name, live and after a
    resume.
    """
    for _ in range(2):
        calibrator = Calibrator(0.4, "question-turn", seed=3)
        world.run(
            world.plan(gate=ConformalGate(calibrator), on_problem_done=calibrator.forget),
            world.session(),
        )
        state = calibrator.state()
        assert calibrator.decided > 0
        assert "toy-" not in repr([state["pool"], state["controller"]])


def test_a_calibrator_forgets_failed_problems(world: Any) -> None:
    """A calibrator forgets the names of failed problems too, so a long outage takes no memory."""
    ill = Faults({"dropped": 0.2}, delay_seconds=0.01, only="sample")
    draft = ScriptedEngine("draft", latency=world.quick, faults=ill)
    retries = RetryPolicy(calls=1, rollouts=1)
    calibrator = Calibrator(0.4, "question-turn", seed=3)
    changes: dict[str, Any] = {"draft": draft, "retries": retries}
    plan = world.plan(gate=ConformalGate(calibrator), on_problem_done=calibrator.forget, **changes)
    result = world.run(plan, world.session())
    state = calibrator.state()
    assert result.status in ("incomplete", "failed")
    assert calibrator.decided > 0
    assert "toy-" not in repr([state["pool"], state["controller"]])


@pytest.mark.parametrize(
    "wants",
    [
        {"accept_when_agreeing": 0.5},
        *({"method": one.name} for one in PRESETS if not one.departures),
    ],
)
def test_every_gate_forgets_finished_problems(world: Any, wants: dict[str, Any]) -> None:
    """No attribute of a gate names a finished problem, even if a requested score never arrived.

    Only a gate that warms up keeps its first scores.
    """
    setup = Setup(rate_scope="question-turn", rate=0.4, policy=world.plan().policy, **wants)
    ill = Faults({"dropped": 0.2}, delay_seconds=0.01, only="score")
    target = ScriptedEngine("target", latency=world.quick, faults=ill)
    plan = setup.plan(ScriptedEngine("draft", latency=world.quick), target)
    world.run(replace(plan, retries=RetryPolicy(calls=1, rollouts=1)), world.session())
    waiting: list[Any] = [plan.gate]
    while waiting:
        gate = waiting.pop()
        if isinstance(gate, Calibrator):
            gate.settle()  # add the scores that waited for the score of a lost chunk
            state = gate.state()
            assert "toy-" not in repr([state["pool"], state["controller"]])
            continue
        kept = {name: getattr(gate, name) for name in dir(gate) if not name.startswith("__")}
        data = {name: value for name, value in kept.items() if not callable(value)}
        inner = [value for value in data.values() if hasattr(value, "decide")]
        waiting += inner
        assert "toy-" not in repr([value for value in data.values() if value not in inner])


_SPEC = EngineSpec("e", "m", "t", 100, (0,), 50)
_ASKED = SampleRequest((1, 2), 3)


def _completion(ids: tuple[int, ...], logprobs: tuple[float, ...]) -> Completion:
    return Completion(ids, "x" * len(ids), "length", logprobs)


@pytest.mark.parametrize(
    ("reply", "request_", "spec", "problem"),
    [
        (_completion((1, 2, 3), (-1.0, -1.0, -1.0)), _ASKED, _SPEC, ""),
        (_completion((1, 2, 3, 4), (-1.0,) * 4), _ASKED, _SPEC, "3 were requested"),
        (_completion((1, 2), (-1.0,)), _ASKED, _SPEC, "1 log-probability for 2 token ids"),
        (_completion((1, 2), ()), _ASKED, _SPEC, "0 log-probabilities for 2 token ids"),
        (_completion((1, 2), ()), replace(_ASKED, logprobs="unneeded"), _SPEC, ""),
        (_completion((1, 2), ()), _ASKED, replace(_SPEC, logprobs="none"), ""),
        (_completion((1, 50), (-1.0, -1.0)), _ASKED, _SPEC, "outside the model's vocabulary"),
        (_completion((1, -1), (-1.0, -1.0)), _ASKED, _SPEC, "outside the model's vocabulary"),
        (_completion((1,), (math.nan,)), _ASKED, _SPEC, "not a number"),
        (_completion((), ()), _ASKED, _SPEC, ""),
    ],
)
def test_an_inconsistent_completion_is_refused(
    reply: Completion, request_: SampleRequest, spec: EngineSpec, problem: str
) -> None:
    """A completion is refused if its parts disagree with each other or with the request, even by
    one token.
    """
    if not problem:
        check_completion(reply, request_, spec)
        return
    with pytest.raises(BadReply, match=problem):
        check_completion(reply, request_, spec)


def test_every_part_of_two_usages_adds_up() -> None:
    """The sum of two usages adds up every field, and the target's share is the fraction of all
    written tokens that the target wrote.
    """
    parts = [field.name for field in fields(Usage)]
    one = Usage(**{name: place + 1 for place, name in enumerate(parts)})
    other = Usage(**{name: 10 * (place + 1) for place, name in enumerate(parts)})
    total = one + other
    assert [getattr(total, name) for name in parts] == [
        11 * (place + 1) for place in range(len(parts))
    ]
    assert total.target_share == pytest.approx(22 / 33)
    assert Usage().target_share == 0.0


def test_results_print_as_one_short_line(tmp_path: Any) -> None:
    """An outcome, a rollout and a run's result print as one line each, without texts and ids."""
    setup = Setup("scripted", "scripted", policy=Policy(samples=4))
    problems = toy_problems(3)
    outcome = solve_sync(problems[0], setup)
    result = evaluate_sync(problems, setup, directory=tmp_path / "run")
    printed = [str(outcome), str(outcome.rollouts[0]), str(result)]
    assert all(len(line) < 300 and "\n" not in line for line in printed)
    assert f"answer {outcome.answer}" in printed[0]
    assert "4 rollouts" in printed[0]
    assert "rollout 0" in printed[1]
    assert "finished: 3 problems, accuracy" in printed[2]
    assert str(tmp_path / "run") in printed[2]
