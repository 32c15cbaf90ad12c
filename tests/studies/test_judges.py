"""Tests of a bank of scripted rollouts: it is recorded, read and judged like the bank of a real
pair.
"""

from __future__ import annotations

import json
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atts.api import Setup, evaluate_sync
from atts.core import Role
from atts.journal import open_run
from atts.pipelines import Policy
from atts.testing import ScriptedEngine, Skill, ToyModel, ToyTokenizer, run_virtual, toy_problems

judges = pytest.importorskip("scripts.studies.judges", reason="needs a checkout")
harness = pytest.importorskip("scripts.studies.harness", reason="needs a checkout")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a bank of rollouts of six toy problems."""
    path: Path = tmp_path_factory.mktemp("bank") / "bank.jsonl"
    problems = toy_problems(6, 5)

    async def record() -> None:
        async with ScriptedEngine("draft") as draft, ScriptedEngine("target") as target:
            recorder = judges.Recorder(draft, target)
            for problem in problems:
                records = await recorder.records(problem)
                judges.append(path, [*records, {"kind": "complete", "problem": problem.id}])

    run_virtual(partial(record))
    names = [problem.id for problem in problems]
    split = {"development": names[:4], "confirmation": names[4:]}
    path.with_name("split.json").write_text(json.dumps(split), encoding="utf-8")
    return path


def test_every_problem_has_its_rollouts_and_one_experiment(recorded: Path) -> None:
    """The chunks of each rollout are contiguous, and every token has a log-probability from both
    models.
    """
    problems = judges.load(recorded)
    assert len(problems) == 6
    for problem in problems:
        assert len(problem.drafts) == judges.SAMPLES
        assert len(problem.targets) == judges.TARGET_SAMPLES
        for rollout in problem.drafts:
            count = len(rollout["ids"])
            assert rollout["chunks"][-1] == count
            assert rollout["chunks"] == sorted(set(rollout["chunks"]))
            assert len(rollout["draft_logprobs"]) == len(rollout["target_logprobs"]) == count
            assert len(rollout["draft_entropies"]) == count
            assert min(rollout["draft_entropies"]) >= 0
            assert "".join(rollout["chunk_texts"]) == rollout["text"]
            assert sum(len(chunk.target) for chunk in judges.chunks_of(rollout)) == count
        for takeover in problem.takeovers:
            assert len(takeover["kept"]) == len(takeover["replaced"]) == judges.CONTINUATIONS
            assert len(takeover["finished_by_target"]) == judges.FINISHED_BY_TARGET
            assert -1 <= judges.advantage(takeover) <= 1


def test_a_problem_that_a_kill_cut_is_recorded_again(recorded: Path, tmp_path: Path) -> None:
    """A problem without a record of its completion is not read, and neither is an incomplete line."""
    text = recorded.read_text(encoding="utf-8")
    whole = [json.loads(line) for line in text.splitlines()]
    complete = [entry["problem"] for entry in whole if entry["kind"] == "complete"]
    torn = tmp_path / "bank.jsonl"
    torn.write_text(text[:-200], encoding="utf-8")
    kept = {entry["problem"] for entry in judges.read(torn)}
    assert kept == set(complete[:-1])


def test_what_a_kill_left_of_a_problem_is_cut_off(recorded: Path, tmp_path: Path) -> None:
    """After a kill, records that follow an incomplete line can be read, and no record of the
    interrupted problem is left.
    """
    text = recorded.read_text(encoding="utf-8")
    torn = tmp_path / "bank.jsonl"
    torn.write_text(text[:-200], encoding="utf-8")
    judges.trim(torn)
    last = judges.load(recorded)[-1].name
    again = [json.loads(line) for line in text.splitlines() if json.loads(line)["problem"] == last]
    judges.append(torn, again)
    assert torn.read_text(encoding="utf-8") == text
    judges.trim(torn)
    assert torn.read_text(encoding="utf-8") == text
    judges.trim(tmp_path / "missing.jsonl")


def test_a_problem_is_saved_as_soon_as_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a recording ends with an error or a kill, only the problems in flight are lost."""
    monkeypatch.setattr(judges, "PROBLEMS_AT_ONCE", 1)
    path = tmp_path / "bank.jsonl"
    problems = toy_problems(4, 5)

    class Failing:
        async def records(self, problem: Any) -> list[dict[str, Any]]:
            if problem is problems[2]:
                raise RuntimeError("lost")
            return [{"kind": "draft", "problem": problem.id, "sample": 0}]

    with pytest.raises(RuntimeError, match="lost"):
        run_virtual(partial(judges.record_all, Failing(), path, problems, {}))
    saved = [problem.name for problem in judges.load(path)]
    assert saved[:2] == [one.id for one in problems[:2]]
    assert problems[2].id not in saved


def test_a_bank_is_read_in_the_order_of_its_list(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables do not depend on the order in which the problems were recorded, because the bank
    lists the order of problems.
    """
    names = [problem.name for problem in judges.load(recorded)]
    folder = tmp_path / "bank"
    folder.mkdir()
    lines = recorded.read_text(encoding="utf-8").splitlines(keepends=True)
    by_name = {
        name: [line for line in lines if json.loads(line)["problem"] == name] for name in names
    }
    shuffled = "".join(line for name in reversed(names) for line in by_name[name])
    (folder / "bank.jsonl").write_text(shuffled, encoding="utf-8")
    split = json.loads(recorded.with_name("split.json").read_text(encoding="utf-8"))
    text = json.dumps({**split, "order": names})
    (folder / "split.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr(judges, "LOOKED_AT", 0)
    monkeypatch.setattr(judges, "RESAMPLES", 50)
    tables = []
    for bank in (recorded.parent, folder):
        monkeypatch.setenv("ATTS_BANK", str(bank))
        tables.append([table.rows for table in judges.study(harness.Options())])
    assert tables[0] == tables[1]


@pytest.mark.parametrize("lacks", ["entropies", "everything but the rollouts", "experiments"])
def test_a_bank_of_an_earlier_version_gets_what_it_lacks(
    recorded: Path, tmp_path: Path, lacks: str
) -> None:
    """Records of an earlier version stay unchanged. The numbers that they lack are added, and equal
    those of a new bank.
    """
    path = tmp_path / "bank.jsonl"
    problems = toy_problems(6, 5)
    older: list[dict[str, Any]] = []
    for line in recorded.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if lacks == "everything but the rollouts":
            for name in ("target_logprobs", "said_correct"):
                if entry["kind"] == "draft":
                    del entry[name]
        if lacks != "experiments":
            entry.pop("draft_entropies", None)
            entry.pop("chunk_texts", None)
        if lacks != "everything but the rollouts" or entry["kind"] != "takeover":
            older.append(entry)
    judges.append(path, older)
    wanted = 2 if lacks == "experiments" else 1

    async def fill() -> None:
        async with ScriptedEngine("draft") as draft, ScriptedEngine("target") as target:
            recorder = judges.Recorder(draft, target, experiments=wanted)
            for problem in problems:
                before = [one for one in judges.read(path) if one["problem"] == problem.id]
                assert not judges.has_everything(judges.merged(before), wanted)
                records = await recorder.missing(problem, judges.merged(before))
                judges.append(path, [*records, {"kind": "complete", "problem": problem.id}])
                again = [one for one in judges.read(path) if one["problem"] == problem.id]
                assert judges.has_everything(judges.merged(again), wanted)
                assert await recorder.missing(problem, judges.merged(again)) == []

    run_virtual(partial(fill))
    for filled, whole in zip(judges.load(path), judges.load(recorded), strict=True):
        assert filled.drafts == whole.drafts
        assert filled.targets == whole.targets
        assert filled.takeovers[:1] == whole.takeovers
        assert len(filled.takeovers) == wanted


def test_the_split_shares_both_halves_among_both_sources() -> None:
    """Both halves of the split have problems of both sources: the sources alternate, and two of
    every four problems are for development.
    """
    names = [f"{source}/{index}" for index in range(8) for source in ("gsm8k", "math500")]
    parts = judges.split(names)
    assert not set(parts.development) & set(parts.confirmation)
    for half in (parts.development, parts.confirmation):
        assert sum(name.startswith("gsm8k") for name in half) == 4
        assert len(half) == 8


def test_scores_are_chosen_on_development_problems_alone(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables that compare scores use the four development problems; tables of the confirmation half
    use its two problems.
    """
    monkeypatch.setenv("ATTS_BANK", str(recorded.parent))
    monkeypatch.setattr(judges, "LOOKED_AT", 0)
    monkeypatch.setattr(judges, "RESAMPLES", 50)
    tables = judges.study(harness.Options())
    assert tables[0].rows[0][2] == 6
    assert tables[2].notes[0].startswith("4 problems")
    assert [table.notes[0][:10] for table in tables[4:8]] == ["4 problems"] * 2 + ["2 problems"] * 2
    names = {row[0] for row in tables[2].rows}
    assert "draft entropy, change; worst chunk" in names
    assert "agreement with siblings at the step; worst chunk" in names
    assert "agreement with siblings at the step" in {row[0] for row in tables[3].rows}
    assert {row[0] for row in tables[2].rows} >= {"target, worst token; worst chunk"}
    assert [table.title for table in tables[7:]] == [
        f"{table.title}, on the confirmation half" for table in tables[2:4]
    ]
    assert tables[8].notes[0].startswith("The table uses 2 chunks.")


def judged(count: int, gain: int, seed: int) -> list[Any]:
    """Make problems with one takeover each, whose gain depends on the target's log-probabilities.

    On a chunk that the target finds unlikely, the takeover gains if `gain` is 1, and loses if it is
    -1.
    """
    random = np.random.default_rng(seed)
    made: list[Any] = []
    for index in range(count):
        problem = judges.BankProblem(f"{seed}-{index}")
        unlikely = bool(random.random() < 0.5)
        right = unlikely == (gain > 0)
        draft = {
            **rollout("1", True, 4),
            "sample": 0,
            "text": "1 + 1",
            "ids": [1, 2, 3, 4],
            "chunks": [4],
            "target_logprobs": [-3.0 if unlikely else -0.1] * 4,
            "draft_logprobs": [-0.5] * 4,
        }
        problem.drafts.append(draft)
        problem.takeovers.append(
            {
                "sample": 0,
                "chunk": 0,
                "said_correct": [0.5, 0.5],
                "rating": [0.0] * 10,
                "rewritten_logprobs": [-0.2] * 4,
                "replaced": [{"correct": right}],
                "kept": [{"correct": not right}],
                "finished_by_target": [{"correct": right, "tokens": 4}],
            }
        )
        made.append(problem)
    return made


def test_the_judge_that_is_confirmed_is_fitted_on_the_other_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A judge fitted on the other half is wrong on problems whose gains follow the opposite rule.

    A judge that is cross-validated on these problems is right.
    """
    monkeypatch.setattr(judges, "RESAMPLES", 50)
    others = judged(40, 1, 1)
    mine = judged(40, -1, 2)
    measured = [(problem, problem.takeovers[0]) for problem in mine]
    gains = [judges.advantage(one) for _, one in measured]
    fitted = judges.learned(measured, judges.advantage, others, 0.25)
    own = judges.learned(measured, judges.advantage, (), 0.25)
    assert np.corrcoef(fitted, gains)[0, 1] < -0.9
    assert np.corrcoef(own, gains)[0, 1] > 0.9
    table = judges.takeovers_table(mine, fitted_on=others)
    assert table.rows[-1][0] == "learned judge, fitted on the development half"
    assert str(table.rows[-1][1]).startswith("-1.00")


def rollout(answer: str | None, correct: bool, length: int = 1) -> dict[str, Any]:
    """Make a rollout with only the fields that a vote needs."""
    return {"answer": answer, "correct": correct, "tokens": length}


def test_a_tied_vote_is_right_by_the_chance_of_a_lot() -> None:
    """A tied vote is correct with the probability that a random choice among the tied answers is
    correct.

    Weights break ties, and rollouts without an answer do not vote.
    """
    problem = judges.BankProblem("p")
    split = [rollout("1", True), rollout("2", False), rollout(None, False)]
    assert judges.vote(problem, split) == 0.5
    assert judges.vote(problem, split, [1.0, 2.0, 1.0]) == 0.0
    assert judges.vote(problem, [rollout(None, False)]) == 0.0


def planted(costly: int) -> list[Any]:
    """Make problems on half of which the draft's rollouts all give different answers.

    On this half only the target is correct, and its rollouts have `costly` tokens instead of 10.
    """
    problems = []
    for index in range(40):
        scattered = index % 2 == 0
        drafts = [
            rollout(str(sample) if scattered else "1", correct=not scattered, length=10)
            for sample in range(8)
        ]
        length = costly if scattered else 10
        targets = [
            rollout("77" if scattered else "1", correct=True, length=length) for _ in range(4)
        ]
        problems.append(judges.BankProblem(f"p{index}", "toy", drafts, targets))
    return problems


def test_a_cascade_by_planted_disagreement_beats_its_coin() -> None:
    """The cascade escalates the problems with scattered votes, and only the target is correct on
    them. Random escalation at the same rate wastes half of its escalations.
    """
    rows = {(row[0], row[2]): row for row in judges.cascade_table(planted(10)).rows}
    assert rows["cascade 8 + 4", 0.5][3] == 1.0
    assert rows["cascade 8 + 4, by a coin", 0.5][3] == 0.75
    assert rows["cascade 8 + 4", 0.5][5].startswith("0.250")
    # all problems cost the same number of tokens, so the gain at equal tokens equals the gain at an
    # equal rate
    assert rows["cascade 8 + 4", 0.5][6].startswith("0.250")


def test_classes_of_problems_are_compared_at_equal_target_rollouts() -> None:
    """On forty planted problems, half of them with scattered votes, the rows of the table equal
    values computed by hand.

    Escalated problems all have scattered votes, so at rate 0.3 the cascade has 0.5 + 0.3 correct. A
    single rollout of the target ties with the draft's four different answers, so it wins 1/5 of the
    remaining 0.5.
    """
    rows = {row[0]: row for row in judges.classes_table(planted(10)).rows}
    assert rows["cascade 4 + 4"][3].startswith("0.800")
    assert rows["one target rollout each"][3].startswith("0.600")
    assert rows["target alone where escalated"][4].startswith("0.000")
    assert rows["stop, one, four"][3].startswith(f"{0.5 + 0.2 + 0.3 / 5:.3f}")
    assert rows["more drafts, then four"][3].startswith("0.800")
    # one rollout for every problem is less than four rollouts for 0.3 of the problems, so this row
    # has fewer target tokens
    assert [row[5] for row in rows.values()] == [12, 10, 12, 12, 12]


def test_simulated_problems_have_the_accuracies_that_were_asked_for() -> None:
    """Single rollouts are correct as often as requested, and the accuracies of both models on a
    problem rise and fall together.
    """
    problems = judges.simulated(0.2, 0.45, count=1500, seed=4)
    drafts = [judges._mean([float(one["correct"]) for one in each.drafts]) for each in problems]
    targets = [judges._mean([float(one["correct"]) for one in each.targets]) for each in problems]
    assert np.mean(drafts) == pytest.approx(0.2, abs=0.03)
    assert np.mean(targets) == pytest.approx(0.45, abs=0.03)
    assert np.corrcoef(drafts, targets)[0, 1] > 0.4


def test_a_judge_finds_planted_advantages_on_problems_that_it_never_saw() -> None:
    """The judge finds all gains if the target's log-probabilities mark the chunks where a takeover
    gains, and few if these are random.
    """
    found = []
    for skill in (1.0, 0.0):
        random = np.random.default_rng(3)
        measured = []
        gains = []
        for index in range(60):
            gain = float(random.random() < 0.4)
            doubt = -4.0 if (gain if skill else random.random() < 0.4) else -0.2
            draft = {
                "sample": 0, "ids": [1, 2], "text": "ab", "chunks": [1, 2], "answer": "1",
                "draft_logprobs": [-0.3, -0.1], "target_logprobs": [doubt, -0.1],
            }  # fmt: skip
            takeover = {
                "sample": 0, "chunk": 0, "said_correct": [0.0, 0.0], "rating": [0.0] * 10,
                "rewritten_logprobs": [-0.1], "gain": gain,
            }  # fmt: skip
            measured.append((judges.BankProblem(f"p{index}", "toy", [draft]), takeover))
            gains.append(gain)
        values = np.array(gains)
        predicted = judges.learned(measured, itemgetter("gain"), (), 0.25)
        rows = np.arange(60)
        above = judges._above_coin(predicted, values, 0.25, rows)
        # the gain as a share of the gain of a perfect score
        found.append(above / (1 - values.mean()))
    assert found[0] == pytest.approx(1.0)
    assert abs(found[1]) < 0.5


def test_agreement_at_a_step_is_the_share_of_siblings_with_its_last_number() -> None:
    """A chunk agrees with a sibling that contains the chunk's last number as a whole number. A
    chunk without a number agrees with every sibling.
    """
    texts = [["so 3 + 4 = 7.", "\n\nThus 1,250."], ["3 + 4 = 7"], ["it is 71"], ["7 and 1,250"]]
    drafts = [{"chunk_texts": one, "text": "".join(one), "chunks": one} for one in texts]
    drafts.append({"chunk_texts": ["none"], "text": "none", "chunks": ["none"]})
    problem = judges.BankProblem("p", drafts=drafts)
    assert judges.agreement_at_step(problem, drafts[0], 0) == pytest.approx(2 / 4)
    assert judges.agreement_at_step(problem, drafts[0], 1) == pytest.approx(1 / 4)
    assert judges.agreement_at_step(problem, drafts[2], 0) == 0
    assert judges.agreement_at_step(problem, drafts[4], 0) == 1


def test_one_half_of_a_bank_can_be_recorded_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either half of a bank can be recorded alone, and the split remains that of the whole bank."""
    wanted = toy_problems(8, 5)
    monkeypatch.setattr(judges, "problems", lambda: wanted)
    _, both = judges.begin_bank(tmp_path, 8)
    split = json.loads((tmp_path / "split.json").read_text(encoding="utf-8"))
    for half in ("development", "confirmation"):
        _, lacking = judges.begin_bank(tmp_path, 8, half=half)
        assert [one.id for one in lacking] == split[half]
        assert len(lacking) == 4
    assert [one.id for one in both] == [one.id for one in wanted]
    assert json.loads((tmp_path / "split.json").read_text(encoding="utf-8")) == split


def test_a_coin_is_given_the_tokens_that_the_cascade_spends() -> None:
    """Scattered problems cost three times as much, so random escalation with as many tokens
    escalates 3/4 of the problems instead of 1/2.
    """
    rows = {(row[0], row[2]): row for row in judges.cascade_table(planted(30)).rows}
    # the cascade gains 0.5, and random escalation gains 0.75 of this
    assert rows["cascade 8 + 4", 0.5][6].startswith("0.125")


def test_a_bank_of_rollouts_alone_has_what_cascades_need(tmp_path: Path) -> None:
    """A bank without scores and takeovers still gives the table of the cascade."""
    path = tmp_path / "bank.jsonl"

    async def record() -> None:
        async with ScriptedEngine("draft") as draft, ScriptedEngine("target") as target:
            recorder = judges.Recorder(draft, target, is_whole=False)
            for problem in toy_problems(3, 5):
                records = await recorder.records(problem)
                judges.append(path, [*records, {"kind": "complete", "problem": problem.id}])

    run_virtual(partial(record))
    problems = judges.load(path)
    assert len(problems) == 3
    for problem in problems:
        assert len(problem.drafts) == judges.SAMPLES
        assert not problem.takeovers
        assert all("target_logprobs" not in one for one in problem.drafts)
    assert len(judges.cascade_table(problems).rows) == 22


def test_auroc_counts_ties_half() -> None:
    """The AUROC counts a tie as one half, as in a value computed by hand."""
    assert judges.auroc([3.0, 1.0], [1.0, 0.0]) == pytest.approx(3.5 / 4)


def test_a_live_cascade_is_compared_with_its_coin(tmp_path: Path) -> None:
    """With a target that never errs, each number of the comparison can be computed by hand from the
    two runs.
    """

    def engine(role: Role, right: float) -> ScriptedEngine:
        return ScriptedEngine(role, model=ToyModel(Skill(right, typical=0.9), ToyTokenizer()))

    problems = toy_problems(20, 5)
    weak = engine("draft", 0.45)
    setup = Setup(weak, engine("target", 1.0), method="cascade", rate=0.4, policy=Policy(samples=8))
    result = evaluate_sync(problems, setup, directory=tmp_path / "cascade")
    escalated = {problem.problem for problem in result.problems if problem.escalated}
    others = [problem for problem in problems if problem.id not in escalated]
    cascade = open_run(tmp_path / "cascade")
    policies = {"stopped": Policy(samples=4), "whole": Policy(samples=4, early_stop="none")}
    for name, policy in policies.items():
        alone = Setup(target=engine("target", 1.0), method="target-only", policy=policy)
        evaluate_sync(others, alone, directory=tmp_path / name)
    # the fourth rollout of a target that never errs is cancelled, so its cost is unknown
    with pytest.raises(SystemExit, match="a rollout was cancelled or failed"):
        judges.live_arms(cascade, [open_run(tmp_path / "stopped")])
    runs = [open_run(tmp_path / name) for name in policies]
    kept, live, coin, by_lot, _, target = judges.live_arms(cascade, runs)
    assert live.rate == len(escalated) / 20
    assert target.right.mean() == 1.0
    # four correct target rollouts vote with the draft's four, so at worst they tie
    assert (live.right >= kept.right).all()
    names = list(judges.of_run(cascade))
    kept_rows = np.array([name not in escalated for name in names])
    assert (live.right[kept_rows] == kept.right[kept_rows]).all()
    assert live.target_tokens[kept_rows].sum() == 0
    assert coin.target_tokens.mean() == pytest.approx(live.rate * target.target_tokens.mean())
    assert by_lot.right.mean() >= coin.right.mean()
    graded = {problem.problem: problem.verdict == "correct" for problem in result.problems}
    without_ties = {
        name: bool(right)
        for name, right in zip(names, live.right, strict=True)
        if right in (0.0, 1.0)
    }
    assert len(without_ties) > 10
    assert all(graded[name] == right for name, right in without_ties.items())
    row = next(row for row in judges.live_table(cascade, runs).rows if row[0] == "cascade, live")
    assert row[4].startswith(f"{(live.right - coin.right).mean():.3f}")
    with pytest.raises(SystemExit, match="has rollouts of"):
        judges.live_arms(cascade, [])
