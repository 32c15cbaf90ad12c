"""Tests of rollouts that were cancelled before they answered: no reader counts them as correct or
wrong.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atts.api import Setup, compare, evaluate_sync, replay
from atts.core import Outcome, Prompt, Rollout
from atts.journal import FinishedProblem, Graded, open_run
from atts.pipelines import Policy
from atts.run import RunResult
from atts.testing import ScriptedEngine, Skill, ToyModel, ToyTokenizer, toy_problems

SETUP = Setup(draft="scripted", target="scripted", policy=Policy(samples=6))
"""Settings under which a problem's rollouts are cancelled as soon as they cannot change the vote.
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Make a run whose votes are settled early."""
    return evaluate_sync(toy_problems(12), SETUP, directory=tmp_path_factory.mktemp("censored"))


def spared(problem: FinishedProblem) -> list[int]:
    """Return the sample indices of the problem's rollouts cancelled before they answered."""
    return [
        one.sample
        for one in problem.samples
        if one.answer is None and one.finish in ("settled", "cancelled")
    ]


def test_a_cancelled_rollout_is_never_wrong(run: RunResult) -> None:
    """A cancelled rollout is not graded, and its verdict says so in the result, in the journal and
    in JSON.
    """
    assert any(map(spared, run.problems))
    back = open_run(run.directory).state().finished if run.directory else {}
    for problem in run.problems:
        verdicts = {one.sample: one.verdict for one in problem.samples}
        assert [sample for sample, verdict in verdicts.items() if verdict == "spared"] == spared(
            problem
        )
        assert back[problem.problem].samples == problem.samples
        assert {one["sample"]: one["verdict"] for one in problem.as_json()["samples"]} == verdicts
    graded = [entry.event for entry in open_run(run.directory or Path()).entries((Graded,))]
    named = {(event.problem, event.sample) for event in graded if isinstance(event, Graded)}
    assert not named & {
        (problem.problem, sample) for problem in run.problems for sample in spared(problem)
    }


def test_old_verdicts_on_cancelled_rollouts_are_ignored() -> None:
    """Verdicts on cancelled rollouts, which older journals contain, are ignored."""
    prompt = Prompt((1,), (1,))
    cut = tuple(Rollout("p", sample, prompt, finish="cancelled") for sample in range(2))
    outcome = Outcome(toy_problems(1)[0], cut, None, status="unanswered")
    said = [
        Graded(outcome.problem.id, "wrong", sample, None, "no answer") for sample in (0, 1, None)
    ]
    found = FinishedProblem.of(outcome, said)
    assert ([one.verdict for one in found.samples], found.verdict) == (["spared", "spared"], None)


def test_a_replay_with_fewer_samples_treats_cancelled_ones_as_unknown(run: RunResult) -> None:
    """A replay with fewer samples uses the first samples and treats cancelled rollouts as unknown.

    No decision changes, and the bounds contain the values of all samples.
    """
    one = replay(run, samples=1)
    firsts = {problem.problem: problem.samples[0] for problem in run.problems}
    unknown = [name for name, first in firsts.items() if first.is_censored]
    assert unknown
    assert {name: new for name, (_, new) in one.answers.items()} == {
        name: None if name in unknown else first.answer for name, first in firsts.items()
    }
    assert one.undecided == len(unknown)
    right = sum(first.verdict == "correct" for first in firsts.values()) / len(firsts)
    assert one.replayed.accuracy.low <= right <= one.replayed.accuracy.high
    for samples in (1, 2, 5):
        found = replay(run, samples=samples)
        assert (found.changed, found.off_policy) == (0, 0)
        assert found.replayed.tokens == "at least"


def test_a_comparison_leaves_cancelled_rollouts_out(run: RunResult, tmp_path: Path) -> None:
    """A comparison counts only rollouts that ended.

    This holds for `atts eval --json` and for files of other tools that mark cancelled rollouts.
    """
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(problem.as_json()) + "\n" for problem in run.problems))
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text(
        "".join(
            json.dumps({"id": problem.problem, "verdict": one.verdict}) + "\n"
            for problem in run.problems
            for one in problem.samples
        )
    )
    found = compare(lines, rollouts)
    assert found.problems == len(run.problems)
    assert compare(lines, run.directory or Path()).problems == len(run.problems)


@pytest.mark.parametrize("name", ["run", None])
def test_a_cancelled_problem_without_an_answer_is_not_graded(world: Any, name: str | None) -> None:
    """A problem that was cancelled before any answer, because the run was out of time, is left out
    of every accuracy.
    """
    result = world.run(world.plan(timeout_seconds=2.5), world.session(name), problems=8)
    assert result.status == "stopped"
    cut = [one for one in result.problems if one.answer is None]
    assert 0 < len(cut) < len(result.problems)
    assert {(one.status, one.verdict) for one in cut} == {("cancelled", None)}
    assert result.summary.answers.n_problems == len(result.problems) - len(cut)
    if result.directory is not None:
        found = replay(result)
        judged = len(result.problems) - len(cut)
        assert found.censored == len(cut)
        assert found.recorded.accuracy.n_problems == found.replayed.accuracy.n_problems == judged


def test_tokens_at_another_rate_are_unknown(tmp_path: Path) -> None:
    """In a replay at another rate, token counts are unknown, because some of the texts were never
    written.

    A replay of the recorded settings counts the recorded tokens.
    """
    setup = Setup(
        draft="scripted", target="scripted", policy=Policy(samples=4, early_stop="none"), seed=3
    )
    result = evaluate_sync(toy_problems(8), setup, directory=tmp_path)
    same = replay(result)
    more = replay(result, rate=0.4)
    assert (same.replayed.tokens, more.recorded.tokens) == ("counted", "counted")
    assert same.replayed == same.recorded
    assert more.replayed.tokens == "unknown"
    assert more.replayed.target_tokens is None
    assert more.replayed.draft_tokens is None


def test_live_runs_end_within_the_bounds_of_a_replay(tmp_path: Path) -> None:
    """The accuracy of live runs is within a replay's bounds as often as the replay states, up to
    sampling error.
    """
    model = ToyModel(Skill(right=0.7, repair=0.0), ToyTokenizer())
    policy = Policy(samples=5, early_stop="none")
    setup = Setup(draft="scripted", target="scripted", policy=policy)
    inside = 0
    cases = 0
    for seed in range(10):
        problems = toy_problems(12, seed=seed)
        base = replace(setup, draft=ScriptedEngine("draft", model=model), seed=seed)
        recorded = evaluate_sync(problems, base, directory=tmp_path / str(seed))
        for rate in (0.1, 0.4):
            other = replace(setup, draft=ScriptedEngine("draft", model=model), rate=rate)
            live = evaluate_sync(problems, replace(other, seed=seed + 100)).summary.answers
            accuracy = replay(recorded, rate=rate).replayed.accuracy
            inside += accuracy.low <= live.value <= accuracy.high
            cases += 1
    # if 95 % of live runs are inside the bounds, at most 16 of 20 are inside with a probability of
    # 0.3 %
    assert inside > 16
