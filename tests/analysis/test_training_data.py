"""Tests of exports of training data: exports contain the recorded tokens exactly, and a small
trainer learns from them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.from_thread import start_blocking_portal

from atts.analysis.training_data import (
    COLUMNS,
    KINDS,
    VERSIONS,
    DataKind,
    ExportOptions,
    Teacher,
    TopTokens,
    export_run,
)
from atts.api import Setup, evaluate_sync, open_teacher
from atts.api.teachers import ServedTeacher
from atts.cli.app import run as command
from atts.core import Outcome, ScoreRequest
from atts.errors import JournalError, OptionError, UsageError
from atts.evaluators import load_dataset
from atts.journal import CallSpan, Scored, open_run, save_manifest
from atts.pipelines import Policy
from atts.servers import RemoteEngine
from atts.testing import DialectServer, ScriptedEngine, ToyTokenizer, toy_problems
from tests.importers.conftest import Import, run_import, write_lines

__all__ = ["run_import"]  # a fixture; the import makes it known to pytest


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run in which the target writes each escalated rollout from the beginning."""
    folder = tmp_path_factory.mktemp("restarted") / "run"
    policy = Policy(samples=4, early_stop="none", escalates="rollout")
    setup = Setup(draft="scripted", target="scripted", rate=0.1, policy=policy)
    evaluate_sync(toy_problems(6, 2), setup, directory=folder)
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small run of the embedded pair with accepted, replaced and repeated chunks."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    setup = Setup(
        draft="embedded", target="embedded", rate=0.05, policy=Policy(samples=3, early_stop="none")
    )
    evaluate_sync(load_dataset("arithmetic[:8]").problems, setup, directory=folder)
    return folder


def read(run: Path, out: Path, kind: DataKind, **options: Any) -> list[dict[str, Any]]:
    """Return the records of an export."""
    export_run(open_run(run), out / "data.jsonl", ExportOptions(kind, **options))
    return [json.loads(line) for line in (out / "data.jsonl").read_text().splitlines()]


def outcomes(run: Path) -> dict[str, Outcome]:
    """Return the complete problems of a run."""
    return {one.problem.id: one for one in open_run(run).outcomes()}


@pytest.mark.parametrize("kind", KINDS)
def test_records_have_the_documented_columns(
    recorded: Path, tmp_path: Path, kind: DataKind
) -> None:
    """Every record has exactly the documented columns and names its schema."""
    records = read(recorded, tmp_path, kind)
    assert records
    for record in records:
        assert set(record) == set(COLUMNS[kind])
        assert record["schema"] == f"atts.{kind}/{VERSIONS[kind]}"
        assert record["draft"].startswith("draft@")
        assert len(record["target_weights"]) == 32


def test_opd_holds_the_recorded_tokens_and_log_probabilities(
    recorded: Path, tmp_path: Path
) -> None:
    """The `opd` export has the token ids of the rollout, and its log-probabilities of both models
    equal the recorded ones.
    """
    whole = outcomes(recorded)
    scored: dict[tuple[str, int, int], tuple[float, ...]] = {}
    last: Scored | None = None
    for entry in open_run(recorded).entries():
        if isinstance(entry.event, Scored):
            last = entry.event
        elif isinstance(entry.event, CallSpan) and last is not None:
            span = entry.event
            scored[span.problem, span.sample, span.turn] = last.scores.logprobs
            last = None
    records = [one for one in read(recorded, tmp_path, "opd") if one["part"] == "rollout"]
    checked = 0
    for record in records:
        by_sample = {one.sample: one for one in whole[record["problem"]].rollouts}
        rollout = by_sample[record["sample"]]
        assert record["prompt_ids"] + record["ids"] == list(rollout.ids("draft"))
        for turn, decision in zip(rollout.turns, record["decisions"], strict=True):
            assert turn.decision is not None
            assert decision["action"] == turn.decision.action
            place = slice(decision["start"], decision["end"])
            if turn.chunks[0] is turn.drafted and len(turn.chunks) == 1:
                count = len(turn.chunks[0].draft_ids)
                assert record["student_logprobs"][place] == list(turn.chunks[0].logprobs[:count])
                known = scored.get((record["problem"], record["sample"], turn.index))
                if known is not None:
                    assert record["teacher_logprobs"][place] == list(known)
                    checked += count
                # an equal chunk is scored once, so sibling rollouts share its log-probabilities
                assert record["mask"][place] == [1] * count
            elif turn.chunks[0].author == "target":
                assert set(record["mask"][place]) == {0}
                assert set(record["student_logprobs"][place]) == {None}
    assert checked > 50


def test_opd_has_both_texts_of_a_rollout_that_was_written_again(
    restarted: Path, tmp_path: Path
) -> None:
    """If the target rewrote a rollout, the rollout's record has the target's tokens. The draft's
    earlier tokens are in a record of rejected tokens, with the scores that the target gave them.
    """
    late = {
        (problem, rollout.sample): rollout
        for problem, outcome in outcomes(restarted).items()
        for rollout in outcome.rollouts
        if any(turn.restarts and turn.index for turn in rollout.turns)
    }
    assert len(late) > 2
    records = read(restarted, tmp_path, "opd")
    for record in records:
        rollout = late.get((record["problem"], record["sample"]))
        if rollout is not None and record["part"] == "rollout":
            assert record["prompt_ids"] + record["ids"] == list(rollout.ids("draft"))
            (decision,) = record["decisions"]
            assert decision["action"] == "escalate"
            assert decision["start"] == 0
    for (problem, sample), rollout in late.items():
        place = next(turn.index for turn in rollout.turns if turn.restarts)
        before = [one for turn in rollout.turns[:place] for c in turn.chunks for one in c.draft_ids]
        (record,) = [
            one
            for one in records
            if (one["problem"], one["sample"], one["part"]) == (problem, sample, "rejected")
            and one["prompt_ids"] == list(rollout.prompt.draft_ids)
        ]
        assert record["ids"] == before
        assert set(record["mask"]) == {1}


def test_opd_includes_replaced_chunks(recorded: Path, tmp_path: Path) -> None:
    """The export also contains replaced chunks: the draft sampled them and the target scored them,
    so a student model can learn from them.
    """
    replaced = {
        (problem, rollout.sample, turn.index): turn
        for problem, outcome in outcomes(recorded).items()
        for rollout in outcome.rollouts
        for turn in rollout.turns
        if turn.decision is not None and turn.decision.escalate and turn.discarded
    }
    records = [one for one in read(recorded, tmp_path, "opd") if one["part"] == "rejected"]
    assert len(records) == len(replaced) > 0
    assert {tuple(one["ids"]) for one in records} == {
        turn.drafted.draft_ids for turn in replaced.values() if turn.drafted is not None
    }
    assert all(set(one["mask"]) == {1} for one in records)


def taught(run: Path, out: Path, teacher: str, top: int) -> list[dict[str, Any]]:
    """Return the records of the `opd` export, in which a teacher model lists the `top` likeliest
    tokens at each position.
    """
    with open_teacher(teacher, top) as opened:
        export_run(open_run(run), out, ExportOptions("opd"), opened)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_teacher_lists_its_likeliest_tokens(recorded: Path, tmp_path: Path) -> None:
    """At every position the teacher lists its likeliest tokens in descending order; if the sampled
    token is among them, it has its recorded log-probability.
    """
    records = taught(recorded, tmp_path / "opd.jsonl", "embedded:target", 30)
    listed = 0
    for record in records:
        assert len(record["top_ids"]) == len(record["top_logprobs"]) == len(record["ids"])
        for place, token in enumerate(record["ids"]):
            ids, logprobs = record["top_ids"][place], record["top_logprobs"][place]
            assert len(set(ids)) == len(ids) == len(logprobs) == 30
            assert logprobs == sorted(logprobs, reverse=True)
            assert sum(map(math.exp, logprobs)) <= 1 + 1e-5
            known = record["teacher_logprobs"][place]
            if token in ids and known is not None:
                assert logprobs[ids.index(token)] == pytest.approx(known, abs=2e-3)
                listed += 1
    assert listed > 300


def test_a_vllm_teacher_lists_the_same_tokens(tmp_path: Path) -> None:
    """vLLM returns the likeliest tokens with a prompt's scores, and these tokens equal the local
    target's.
    """
    run = tmp_path / "run"
    policy = Policy(samples=1, max_tokens=12)
    setup = Setup(draft="scripted", target="scripted", rate=0.5, policy=policy)
    evaluate_sync(toy_problems(1), setup, directory=run)
    target = ScriptedEngine("target")
    with DialectServer(lambda: ScriptedEngine("target"), "vllm") as server:
        engine = RemoteEngine(server.url, tokenizer=ToyTokenizer())
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(engine) as opened:
            teacher = ServedTeacher(opened, portal, 3)
            export_run(open_run(run), tmp_path / "opd.jsonl", ExportOptions("opd"), teacher)
    records = [json.loads(line) for line in (tmp_path / "opd.jsonl").read_text().splitlines()]
    assert records

    async def scores(prefix: list[int]) -> list[float]:
        async with target as engine:
            found = [
                (await engine.score(ScoreRequest(tuple(prefix), (token,)))).logprobs[0]
                for token in range(engine.spec.vocabulary)
            ]
        return sorted(found, reverse=True)[:3]

    record = records[0]
    place = 2
    best = anyio.run(scores, record["prompt_ids"] + record["ids"][:place])
    assert record["top_logprobs"][place] == pytest.approx(best, abs=1e-6)
    assert all(len(ids) == 3 for ids in record["top_ids"])


class Stranger:
    """A teacher whose tokenizer differs from that of the recorded models."""

    tokenizer = "another"

    def top_tokens(self, prompt: Sequence[int], ids: Sequence[int]) -> TopTokens:
        """Raise an error, because this teacher cannot read the token ids."""
        raise AssertionError("a teacher that cannot read the ids is not asked")


def test_an_impossible_teacher_is_refused(recorded: Path, tmp_path: Path) -> None:
    """A teacher that cannot be used is refused with an error that states the reason, before a file
    is written.
    """
    stranger: Teacher = Stranger()
    out = tmp_path / "data.jsonl"
    with pytest.raises(
        OptionError, match="the teacher's tokenizer is not the one that the run's models use"
    ):
        export_run(open_run(recorded), out, ExportOptions("opd"), stranger)
    with pytest.raises(OptionError, match="--as opd"):
        export_run(open_run(recorded), out, ExportOptions("sft"), stranger)
    for words, problem in (
        ("llamacpp:http://localhost:1/m", "cannot list the most likely tokens"),
        ("vllm:http://localhost:1/m,http://localhost:2/m", "name one server"),
        ("nothing:x", "is not the address of an engine"),
    ):
        with pytest.raises(OptionError, match=problem), open_teacher(words, 20):
            pass
    with pytest.raises(OptionError, match="0 is too few tokens"), open_teacher("embedded", 0):
        pass
    assert not out.exists()


def test_sft_keeps_what_is_correct(recorded: Path, tmp_path: Path) -> None:
    """By default the `sft` export has only rollouts with a correct answer; on request the export
    has all rollouts.
    """
    whole = outcomes(recorded)
    records = read(recorded, tmp_path, "sft")
    assert all(record["correct"] for record in records)
    everything = read(recorded, tmp_path, "sft", keep="all")
    assert len(everything) == 24 > len(records) > 0
    for record in everything:
        rollout = next(
            one for one in whole[record["problem"]].rollouts if one.sample == record["sample"]
        )
        assert record["messages"][1] == {"role": "assistant", "content": rollout.text}


def planted(run_import: Import, tmp_path: Path) -> Path:
    """Import two problems: one with two correct and two wrong rollouts, one all correct."""
    rows = [
        {"question": f"What is {n}?", "text": f"try {s}: \\boxed{{{n if s < 2 or n else 9}}}",
         "gold": str(n), "reward": s / 4}
        for n in range(2)
        for s in range(4)
    ]  # fmt: skip
    path = write_lines(tmp_path / "mine.jsonl", rows)
    return run_import("jsonl", path, columns={"score.reward": "reward"}).directory


def test_preferences_are_pairs_within_a_problem(run_import: Import, tmp_path: Path) -> None:
    """The export of preferences pairs a correct rollout with a wrong one of the same problem.

    A problem with only correct or only wrong rollouts has no pair.
    """
    run = planted(run_import, tmp_path)
    records = read(run, tmp_path, "preference", pairs=10)
    assert {(one["chosen_sample"], one["rejected_sample"]) for one in records} == {
        (0, 2), (0, 3), (1, 2), (1, 3),
    }  # fmt: skip
    assert {one["problem"] for one in records} == {"problem-1"}
    assert records[0]["chosen"][0]["content"].endswith("\\boxed{0}")
    some = read(run, tmp_path, "preference", pairs=2)
    assert len(some) == 2
    assert some == read(run, tmp_path, "preference", pairs=2)
    assert all(one in records for one in some)


def test_reward_records_have_the_columns_of_verifiers(run_import: Import, tmp_path: Path) -> None:
    """In the export of rewards, the reward is the verdict, the answer is the reference, and
    recorded scores are metrics.
    """
    records = read(planted(run_import, tmp_path), tmp_path, "verifiers")
    assert [one["reward"] for one in records] == [1, 1, 0, 0, 1, 1, 1, 1]
    assert records[2]["answer"] == "0"
    assert records[2]["metrics"] == {"reward": 0.5}


@pytest.mark.parametrize("kind", KINDS)
def test_parquet_equals_json_lines(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: DataKind
) -> None:
    """The Parquet export has the same records as the JSON Lines export, also with several row
    groups.
    """
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("atts.analysis.training_data._ROW_GROUP", 2)
    export_run(open_run(recorded), tmp_path / "data.parquet", ExportOptions(kind))
    rows = parquet.read_table(tmp_path / "data.parquet").to_pylist()
    expected = read(recorded, tmp_path, kind)
    for row in rows:
        if "metrics" in row:
            row["metrics"] = dict(row["metrics"])
    assert rows == expected


def test_impossible_exports_are_refused(
    run_import: Import, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export that cannot be made raises an error that names a solution, and leaves no file."""
    run = planted(run_import, tmp_path)
    with pytest.raises(
        UsageError, match="opd needs a draft and a target, but this run used only t"
    ):
        read(run, tmp_path, "opd")
    with pytest.raises(OptionError, match=r"--out: .*data.csv does not end in .jsonl or .parquet"):
        export_run(open_run(run), tmp_path / "data.csv", ExportOptions("sft"))
    ungraded = write_lines(tmp_path / "b.jsonl", [{"question": "1?", "text": "\\boxed{1}"}])
    other = run_import("jsonl", ungraded, tmp_path / "other").directory
    with pytest.raises(
        UsageError, match=r"this run yields no records of kind sft \(not graded as cor"
    ):
        read(other, tmp_path, "sft")
    with pytest.raises(
        UsageError,
        match=r"of kind preference \(the problem's rollouts are all correct or all not correct, so "
        r"they give no pair: 1\)",
    ):
        read(other, tmp_path, "preference")
    assert command(["export", str(run), "--as", "dpo", "--out", "x.jsonl"]) == 2
    assert "--as: 'dpo' is unknown" in capsys.readouterr().err
    assert not list(tmp_path.glob("*data*"))


def test_models_with_different_tokenizers_are_refused(tmp_path: Path, recorded: Path) -> None:
    """An export of models with different tokenizers is refused, because the target has no
    log-probabilities of the draft's tokens.
    """
    run = open_run(recorded)
    other = tmp_path / "other"
    other.mkdir()
    (other / "journal.jsonl").write_bytes((recorded / "journal.jsonl").read_bytes())
    target = {**run.manifest.engines["target"], "tokenizer": "another"}
    engines = {**run.manifest.engines, "target": target}
    save_manifest(other / "manifest.json", replace(run.manifest, engines=engines))
    with pytest.raises(UsageError, match="draft and target have different tokenizers"):
        read(other, tmp_path, "opd")


def test_a_run_without_a_finished_problem_exports_nothing(tmp_path: Path, recorded: Path) -> None:
    """Exporting a run without a finished problem raises an error that says so."""
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "manifest.json").write_bytes((recorded / "manifest.json").read_bytes())
    lines = (recorded / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (cut / "journal.jsonl").write_bytes(b"".join(lines[:20]))
    with pytest.raises(JournalError, match="no problem is finished, so there is nothing to export"):
        read(cut, tmp_path, "opd")


def test_the_command_prints_the_file_and_its_contents(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`atts export` prints the path of the exported file and its number of records."""
    out = tmp_path / "opd.jsonl"
    assert command(["export", str(recorded), "--as", "opd", "--out", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["file"] == str(out)
    assert facts["records"] == len(out.read_text().splitlines())
    assert facts["trained_tokens"] > 100
    words = ["export", str(recorded), "--as", "opd", "--out", str(out), "--top", "5"]
    assert command([*words, "--teacher", "embedded:target"]) == 0
    first = json.loads(out.read_text().splitlines()[0])
    assert {len(ids) for ids in first["top_ids"]} == {5}
