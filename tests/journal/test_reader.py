"""Tests of the reader of run directories: the facts it returns about runs, and its refusal of other
folders.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from atts.core import Outcome, Problem, Prompt, Rollout
from atts.errors import JournalCorrupt, JournalError, JournalVersion
from atts.journal import (
    MANIFEST,
    SCHEMA,
    CallSpan,
    Entry,
    FinishedProblem,
    Graded,
    RunState,
    SessionOpened,
    open_run,
)

KINDS = ("finished", "rounds", "coin", "shard1", "merged", "killed")


@pytest.mark.parametrize("kind", KINDS)
def test_brief_problems_agree_with_whole_outcomes(kind: str, runs: Path) -> None:
    """The short record of each finished problem agrees with its full outcome, including verdicts,
    costs and times.
    """
    run = open_run(runs / kind)
    problems = run.state().finished
    outcomes = {outcome.problem.id: outcome for outcome in run.outcomes()}
    assert problems.keys() == outcomes.keys()
    for name, problem in problems.items():
        plain = replace(problem, verdict=None, rule="", judged=0, escalated=0, seconds=None)
        bare = replace(plain, samples=tuple(replace(one, rule="") for one in plain.samples))
        raw = FinishedProblem.of(outcomes[name])
        said = [one.verdict for one in bare.samples if not one.is_censored]
        assert replace(bare, samples=()) == replace(raw, samples=())
        assert [replace(one, verdict=None) for one in bare.samples] == [
            replace(one, verdict=None) for one in raw.samples
        ]
        assert problem.status == "failed" or problem.seconds is not None
        assert None not in (problem.verdict if problem.is_complete else "open", *said)


def test_judged_chunks_are_counted(runs: Path) -> None:
    """The counts of judged and escalated chunks in finished problems equal those of the decisions
    in the journal.
    """
    for kind in ("finished", "rounds"):
        run = open_run(runs / kind)
        decisions = [event.decision for event in run.decisions()]
        problems = run.state().finished.values()
        assert sum(problem.judged for problem in problems) == len(decisions)
        assert sum(problem.escalated for problem in problems) == sum(
            decision.escalate for decision in decisions
        )


def test_calls_of_all_sessions_share_one_clock(runs: Path) -> None:
    """The times of all calls of a run are on one clock, on which a later session follows the
    earlier one. Calls recalled from the journal are left out.
    """
    run = open_run(runs / "merged")
    nodes = list(run.nodes())
    assert {node.source for node in nodes} == {"live"}
    assert max(node.ended for node in nodes) == pytest.approx(
        run.state((CallSpan,)).seconds, abs=0.01
    )
    (second,) = run.part_starts
    assert second == 1 + open_run(runs / "shard1").state().sessions
    assert not open_run(runs / "shard1").part_starts


def test_settings_are_found_by_name(runs: Path) -> None:
    """A setting of a run can be read by its name. If the run lacks it, the result is None."""
    run = open_run(runs / "finished")
    assert run.setting("method") == "atts"
    assert run.setting("nothing of the kind") is None
    assert run.policy["samples"] >= 2


def test_sessions_without_an_end_are_counted() -> None:
    """Sessions without an end are counted except the last one, because it may still run."""
    state = RunState()
    opened = SessionOpened(SCHEMA, 1, "", 1)
    for session in (1, 2, 3):
        state.apply(Entry(0, session, 0.0, 0.0, structs.replace(opened, session=session)))
    assert (state.killed, state.ended) == (2, None)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path, runs: Path) -> None:
    """A missing or empty folder, and one without journal or manifest, is refused with one sentence
    and one exit code.
    """
    for name, files in (
        ("none", ()),
        ("empty", ()),
        ("bare", (MANIFEST,)),
        ("headless", ("journal.jsonl",)),
    ):
        if name != "none":
            (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_bytes((runs / "finished" / file).read_bytes())
        with pytest.raises(JournalError, match="there is no run here. Look elsewhere") as caught:
            open_run(tmp_path / name, "Look elsewhere")
        assert caught.value.exit_code == 4


def test_damaged_and_other_versions_runs_are_refused(tmp_path: Path) -> None:
    """A damaged manifest, or one of another version, is refused before any line of the journal is
    read.
    """
    for text, error in (
        ("{", JournalCorrupt),
        (json.dumps({"schema": SCHEMA + 1}), JournalVersion),
        (json.dumps({"schema": SCHEMA - 1}), JournalVersion),
    ):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(error):
            open_run(tmp_path)


def test_the_last_verdict_counts() -> None:
    """If an answer was judged several times, the last verdict counts. The agreement of a problem is
    the share of votes for the winning answer.
    """
    rollouts = (
        Rollout("p", 0, Prompt((), ()), finish="answer", answer="4"),
        Rollout("p", 1, Prompt((), ()), finish="settled"),
    )
    outcome = Outcome(Problem("p", "2+2?"), rollouts, "4", votes={"4": 3.0, "5": 1.0})
    found = FinishedProblem.of(
        outcome, [Graded("p", "wrong"), Graded("p", "correct"), Graded("p", "correct", 0)]
    )
    assert (found.is_correct, found.agreement) == (True, 0.75)
    assert [one.sample for one in found.complete_samples] == [0]
    assert found.as_json()["samples"][0]["verdict"] == "correct"
    assert "seconds" not in found.as_json()
