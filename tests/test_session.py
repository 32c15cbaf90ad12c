"""Tests of sessions: engines stay open, and all questions share one gate and one set of limits."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

import atts
from atts.api import Session, Setup, SyncSession
from atts.concurrency import collect, task_group
from atts.core import Completion, Outcome, SampleRequest
from atts.errors import ATTSError, EngineUnavailable, UsageError
from atts.graph import Limit
from atts.journal import JOURNAL, Decided, read_entries
from atts.pipelines import Policy
from atts.testing import Faults, ScriptedEngine, run_virtual, toy_problems

SMALL = Policy(samples=3, turns=10, early_stop="none")
SCRIPTED = Setup(draft="scripted", target="scripted", policy=SMALL)


class Watched(ScriptedEngine):
    """A scripted engine that records its largest number of calls in flight."""

    most = 0

    async def sample(self, request: SampleRequest) -> Completion:
        """Sample, and record the largest number of requests in flight."""
        self.most = max(self.most, self.stats().in_flight + 1)
        return await super().sample(request)


@pytest.mark.anyio
async def test_questions_asked_at_once_share_engines_and_gate() -> None:
    """Many tasks ask one open pair, most answers are correct, and the cost is reported."""
    draft = ScriptedEngine("draft")
    target = ScriptedEngine("target")
    problems = toy_problems(12)
    async with Session(Setup(draft=draft, target=target, policy=SMALL, rate=0.4)) as session:
        found = await collect([lambda text=it.text: session.solve(text) for it in problems])  # type: ignore[misc]
        assert draft.stats().in_flight == target.stats().in_flight == 0
    right = sum(outcome.answer == it.answer for outcome, it in zip(found, problems, strict=True))
    assert right > len(problems) / 2
    judged = [
        turn.decision
        for outcome in found
        for one in outcome.rollouts
        for turn in one.turns
        if turn.decision
    ]
    # one gate that learns from all questions
    assert 0 < sum(decision.escalate for decision in judged) < len(judged)
    assert sum(outcome.usage.draft_tokens for outcome in found) == draft.stats().sampled_tokens


def test_hundreds_of_questions_at_once_stay_within_the_limits_and_leave_nothing() -> None:
    """The session's limits apply to all questions together, and memory depends only on open
    questions.
    """
    draft = Watched("draft")
    target = Watched("target")
    limits = {"draft": Limit(slots=2), "target": Limit(slots=1)}
    policy = Policy(samples=1, turns=2, early_stop="none")
    setup = Setup(
        draft=draft, target=target, policy=policy, limits=limits, concurrency=16, rate=0.4
    )
    problem = toy_problems(1)[0]
    blocks: list[int] = []

    async def main() -> None:
        async with Session(setup) as session:

            async def ask() -> None:
                assert (await session.solve(problem.text)).status != "failed"

            for _ in range(2):
                await collect([ask for _ in range(150)])
                gc.collect()
                blocks.append(sys.getallocatedblocks())

    run_virtual(main)
    assert (draft.most, target.most) == (2, 1)
    assert draft.stats().in_flight == target.stats().in_flight == 0
    assert blocks[1] - blocks[0] < 150 * 40, (
        "only the scores and decisions of a finished question may stay in memory"
    )


def test_cancelled_questions_end_alone() -> None:
    """Half of many questions are cancelled while they run; the others finish, and every slot is
    freed.
    """
    draft = ScriptedEngine("draft")
    target = ScriptedEngine("target")
    setup = Setup(draft=draft, target=target, policy=SMALL, concurrency=24)
    ended: list[Outcome] = []

    async def main() -> None:
        async with Session(setup) as session:

            async def ask(number: int) -> None:
                with anyio.move_on_after(0.5 * (number // 2) if number % 2 else 1e9):
                    ended.append(await session.solve(toy_problems(40)[number].text))

            async with task_group() as tasks:
                for number in range(40):
                    tasks.start_soon(ask, number)
            assert (await session.solve("and 1 + 1?")).status != "failed"

    run_virtual(main)
    assert 20 <= len(ended) < 40
    assert draft.stats().in_flight == target.stats().in_flight == 0


@pytest.mark.anyio
async def test_a_repeated_question_is_answered_again() -> None:
    """A question that is asked twice gets new samples the second time, not copies of the first."""
    async with Session(SCRIPTED) as session:
        found = [await session.solve(toy_problems(1)[0].text) for _ in range(4)]
    assert len({outcome.rollouts[0].text for outcome in found}) > 1


@pytest.mark.anyio
async def test_a_long_session_counts_few_questions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session remembers only its latest questions, and numbers their repetitions from 1. A
    forgotten question that is asked again still gets a new id.
    """
    monkeypatch.setattr("atts.api.evaluation._REMEMBERED", 2)
    async with Session(replace(SCRIPTED, method="draft-only")) as session:
        asked = [
            (await session.solve(f"What is {number} + 1?")).problem.id
            for number in (1, 1, 1, 2, 3, 1, 4, 2)
        ]
        assert len(vars(session)["_asked"]) == 2
    assert len(set(asked)) == len(asked)
    assert [name.partition("-")[2] for name in asked[:5]] == ["1", "2", "3", "1", "1"]


@pytest.mark.anyio
async def test_a_changed_policy_applies_to_one_question() -> None:
    """A token limit of one question cuts its rollouts, and the next question has the session's own
    policy.
    """
    question = toy_problems(1)[0]
    async with Session(SCRIPTED) as session:
        cut = await session.solve(question, policy={"max_tokens": 3})
        assert (await session.solve(question)).answer == question.answer
    assert cut.answer is None
    assert cut.usage.draft_tokens <= 3 * SMALL.samples


@pytest.mark.anyio
async def test_a_session_opens_on_first_use_and_cannot_reopen() -> None:
    """A session opens at its first question, may be closed twice, and raises an error if asked
    after closing.
    """
    session = Session(SCRIPTED)
    assert (await session.solve(toy_problems(1)[0].text)).answer
    await session.aclose()
    await session.aclose()
    with pytest.raises(EngineUnavailable, match="closed"):
        await session.solve("again")


@pytest.mark.anyio
async def test_engines_are_closed_when_the_second_cannot_open() -> None:
    """If the second engine cannot open, the session closes the first engine again."""
    draft = ScriptedEngine("draft")
    target = ScriptedEngine("target")
    async with target:
        pass  # a closed engine refuses to open again
    with pytest.raises(EngineUnavailable):
        async with Session(Setup(draft=draft, target=target)):
            pass
    with pytest.raises(EngineUnavailable, match="closed"):
        await draft.__aenter__()


def test_a_lost_engine_fails_the_question_alone() -> None:
    """If an engine is lost, the question's outcome reports the failure after the usual retries, and
    the session answers the next question.
    """
    broken = ScriptedEngine("draft", faults=Faults({"refused": 1.0}))

    async def main() -> None:
        async with Session(Setup(draft=broken, target="scripted", policy=SMALL)) as session:
            for problem in toy_problems(2):
                outcome = await session.solve(problem)
                assert (outcome.status, outcome.answer) == ("failed", None)
                assert "refused" in outcome.why

    run_virtual(main)


@pytest.mark.anyio
async def test_a_session_can_evaluate_next_to_questions(tmp_path: Path) -> None:
    """Evaluations use the same engines; an evaluation with a directory has its own gate and can
    resume.
    """
    problems = toy_problems(6)
    async with Session(SCRIPTED) as session:
        await session.solve(problems[0])
        async with session.evaluate(problems[:3]) as run:
            events = [event async for event in run]
            assert (await run.result()).status == "finished"
        kept = await session.evaluate(problems, directory=tmp_path / "run", limit=2)
        again = await session.evaluate(problems, directory=tmp_path / "run", limit=2)
    told = [event.features for event in events if isinstance(event, Decided)]
    assert told
    # the number of later decisions of the shared gate is unknown
    assert not any("left" in features for features in told)
    entries = [entry.event for entry in read_entries(tmp_path / "run" / JOURNAL)]
    assert all("left" in event.features for event in entries if isinstance(event, Decided))
    assert (len(kept.problems), again.sessions) == (2, 2)
    alone = await atts.evaluate(problems, SCRIPTED, limit=2)
    assert [one.answer for one in alone.problems] == [one.answer for one in kept.problems]


def test_a_synchronous_session_answers_any_thread() -> None:
    """Any thread may ask inside the session's `with` block; after the block its engines are closed
    and asking raises an error.
    """
    draft = ScriptedEngine("draft")
    question = toy_problems(1)[0]
    with SyncSession(Setup(draft=draft, target="scripted", policy=SMALL)) as session:
        assert session.solve(question).answer == question.answer
        result = session.evaluate([question])
    assert result.accuracy.value == 1
    with pytest.raises(EngineUnavailable, match="inside its `with` block"):
        session.solve(question)
    with pytest.raises(ATTSError), SyncSession(Setup(draft=draft, target="scripted")):
        pass  # a closed scripted engine refuses to open again


def test_a_result_has_data_table_and_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result's numbers with intervals are available as plain data, a table and an HTML page;
    pandas may be missing.
    """
    result = atts.evaluate_sync(toy_problems(5), SCRIPTED)
    plain = result.to_dict()
    assert plain["answers"]["value"] == result.accuracy.value
    assert plain["rate"]["n_samples"] == result.rate.n_samples > 0
    assert [row["problem"] for row in plain["by_problem"]] == [
        one.problem for one in result.problems
    ]
    page = result._repr_html_()  # pyright: ignore[reportPrivateUsage]  # the name that notebooks ask for
    assert str(result.accuracy) in page
    assert "<script" not in page
    pandas = pytest.importorskip("pandas")
    table = result.to_pandas()
    assert list(table["verdict"]) == [one.verdict for one in result.problems]
    assert table["draft_tokens"].sum() == result.usage.draft_tokens
    monkeypatch.setitem(__import__("sys").modules, pandas.__name__, None)
    with pytest.raises(UsageError, match="pip install pandas"):
        result.to_pandas()


FORKED = """
import os, sys
import atts
import atts.errors
setup = atts.Setup(draft="scripted", target="scripted", method="draft-only")
with atts.SyncSession(setup) as session:
    session.solve("What is 1 + 1?")
    child = os.fork()
    if child == 0:
        try:
            session.solve("What is 1 + 2?")
        except atts.errors.EngineUnavailable as error:
            print(error, flush=True)
    else:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, session.solve("What is 1 + 3?").status, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_session_in_a_forked_child_refuses() -> None:
    """In a forked child process a session raises an error at once, because the child has no thread
    that could answer; the parent's session continues.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    child, parent = done.stdout.splitlines()
    assert "was forked from it" in child
    assert "Open another session in the child" in child
    assert parent == "0 answered"


def test_a_synchronous_session_is_open_once_at_a_time() -> None:
    """A second `with` around an open session is refused because it would lose the first one's
    thread; a later `with` is allowed.
    """
    session = SyncSession(Setup(draft="scripted", target="scripted", method="draft-only"))
    for _ in range(2):
        with session:
            with pytest.raises(UsageError, match="already open"), session:
                pass
            assert session.solve("What is 1 + 1?").status == "answered"
    with pytest.raises(EngineUnavailable, match="not open"):
        session.solve("What is 1 + 1?")
    assert not [thread for thread in threading.enumerate() if thread.name == "atts-session"]


class Missing(ScriptedEngine):
    """An engine that cannot be opened."""

    async def open(self) -> None:
        """Raise the error of an engine that cannot open."""
        raise EngineUnavailable("draft", "it is not there")


def test_a_synchronous_session_that_cannot_open_leaves_no_thread() -> None:
    """The engine's own error is raised at the `with` statement, and no thread is left."""
    session = SyncSession(Setup(draft=Missing("draft"), method="draft-only"))
    with pytest.raises(EngineUnavailable, match="it is not there"), session:
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "atts-session"]


INTERRUPTED = """
import os, signal, threading, time
import anyio
import atts
from atts.testing import ScriptedEngine

over = threading.Event()

def press():
    for _ in range({presses}):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
    over.set()

class Slow(ScriptedEngine):
    async def sample(self, request):
        await anyio.to_thread.run_sync(int)  # a worker thread, which waits for more
        threading.Thread(target=press, daemon=True).start()
        await anyio.sleep_forever()
    async def _close(self):
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(over.wait)
            await anyio.to_thread.run_sync(over.wait)
        await super()._close()
        print("closed", flush=True)

policy = atts.Policy(samples=1)
setup = atts.Setup(draft=Slow("draft"), method="draft-only", policy=policy)
try:
    {call}
except KeyboardInterrupt:
    pass
left = [one for one in threading.enumerate() if one is not threading.main_thread()]
for one in left:
    one.join(5)
print("over", [one.name for one in left if one.is_alive()], flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("presses", "call"),
    [
        (3, 'atts.solve_sync("What is 1 + 1?", setup)'),
        (3, "atts.evaluate_sync('arithmetic[:1]', setup)"),
        (1, "with atts.SyncSession(setup) as session: session.solve('What is 1 + 1?')"),
    ],
)
def test_ctrl_c_while_engines_close_leaves_no_thread(presses: int, call: str) -> None:
    """In a program without the command line, repeated Ctrl-C does not keep engines from closing."""
    code = INTERRUPTED.replace("{call}", call).replace("{presses}", str(presses))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["closed", "over []"]


def test_printed_comparisons_and_plans_are_one_short_line(tmp_path: Path) -> None:
    """Problems, comparisons, replays and plans of a run print as one line, without their lists."""
    run = atts.evaluate_sync(toy_problems(3), SCRIPTED, directory=tmp_path / "run")
    results = {
        "problem": run.problems[0],
        "comparison": atts.compare(run, run),
        "replay": atts.replay(tmp_path / "run", rate=0.4),
        "advice": atts.plan(tmp_path / "run", target_tokens=10_000),
    }
    lines = {name: str(result) for name, result in results.items()}
    limit = 200 + 2 * len(str(tmp_path))
    assert [name for name, line in lines.items() if "\n" in line or len(line) > limit] == []
    assert f"answer {run.problems[0].answer}" in lines["problem"]
    assert "difference +0.000" in lines["comparison"]
