"""Tests of commands over run directories: list, report, replay, trace, check, calibrate and merge."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atts.analysis import build_report, list_runs
from atts.api import Setup, calibrate_sync, calibrator_of, evaluate_sync, merge, replay, scores_of
from atts.calibration import Calibrator
from atts.cli.comparisons import _replay_lines  # pyright: ignore[reportPrivateUsage]
from atts.cli.recorded_runs import follow
from atts.errors import (
    CalibrationInputError,
    FingerprintError,
    JournalError,
    OptionError,
    UsageError,
)
from atts.evaluators import share_estimate
from atts.files import jsonable
from atts.journal import (
    JOURNAL,
    LOCK,
    MANIFEST,
    CallSpan,
    Decided,
    Observed,
    Sampled,
    Scored,
    locked,
    open_run,
    read_entries,
)
from atts.models import path as model_path
from atts.pipelines import Policy
from atts.testing import toy_problems

Atts = Callable[..., Any]
FROZEN = Setup(
    draft="scripted",
    target="scripted",
    method="coin",
    rate=0.3,
    seed=5,
    policy=Policy(samples=4, early_stop="none"),
)
"""Settings under which the gate learns nothing and no vote cancels a rollout."""


def lines(said: Any) -> list[dict[str, Any]]:
    """Parse standard output as one JSON object per line."""
    return [json.loads(line) for line in said.out.splitlines()]


@pytest.mark.both
def test_a_replay_without_changes_repeats_every_decision(atts: Atts, runs: Path) -> None:
    """With the recorded settings the replay gives each recorded decision on the same scores."""
    *found, summary = lines(atts("replay", str(runs / "atts"), "--json"))
    decisions = [line for line in found if line["type"] == "decision"]
    assert decisions
    assert all(line["action"] == line["recorded"] and not line["off_policy"] for line in decisions)
    assert (summary["changed"], summary["off_policy"]) == (0, 0.0)
    assert summary["recorded"] == summary["replayed"]


def test_a_replay_at_another_rate_flags_unrecorded_turns(atts: Atts, runs: Path) -> None:
    """After a replay at another rate, the output lists the turns that follow a changed decision as
    unrecorded, because the run never made them.
    """
    *found, summary = lines(atts("replay", str(runs / "atts"), "--rate", "0.7", "--json"))
    decisions = [line for line in found if line["type"] == "decision"]
    assert summary["nominal"] == 0.7
    assert summary["replayed"]["rate"]["value"] > summary["recorded"]["rate"]["value"]
    changed = {
        (line["problem"], line["sample"]): line["turn"]
        for line in reversed(decisions)
        if _differs(line)
    }
    for line in decisions:
        first = changed.get((line["problem"], line["sample"]))
        assert line["off_policy"] == (first is not None and line["turn"] > first)
    assert summary["off_policy"] > 0


def test_columns_stay_separate_for_large_counts(runs: Path) -> None:
    """The columns of the table stay separate although numbers of a large run are wider than the
    column headings.
    """
    found = replay(runs / "atts")
    wide = replace(found.recorded, rate=share_estimate([(148_597, 742_662)] * 2))
    rows = list(_replay_lines(replace(found, recorded=wide)))
    [row] = [row for row in rows if row.startswith("escalated chunks")]
    assert "(297,194 of 1,485,324)  " in row


def _differs(line: dict[str, Any]) -> bool:
    return bool(line["action"] != line["recorded"])


def test_a_replay_never_exceeds_the_budget_per_problem(runs: Path) -> None:
    """At rate 1 a replay escalates at most as many chunks of each problem as its budget allows."""
    for budget in (0, 1, 3):
        found = replay(runs / "atts", rate=1.0, budget=budget)
        spent: dict[str, int] = {}
        for pair in found.decisions:
            spent[pair.decision.question] = (
                spent.get(pair.decision.question, 0) + pair.decision.escalate
            )
        assert max(spent.values()) == budget


def test_a_replay_with_fewer_samples_costs_less(runs: Path) -> None:
    """A replay with fewer samples uses the rollouts that ended first; more samples than the run
    recorded are refused.
    """
    whole = replay(runs / "atts")
    less = replay(runs / "atts", samples=2)
    assert (less.replayed.draft_tokens or 0) < (whole.replayed.draft_tokens or 0)
    taken = defaultdict[str, set[int]](set)
    for pair in less.decisions:
        taken[pair.decision.question].add(pair.decision.sample)
    assert taken
    assert all(len(samples) <= 2 for samples in taken.values())
    assert max(map(len, taken.values())) == 2
    with pytest.raises(OptionError, match="9 is too many: the run recorded only 3"):
        replay(runs / "atts", samples=9)
    with pytest.raises(OptionError, match="budget"):
        replay(runs / "atts", budget=-1)


def test_a_replay_prints_a_table_of_both_runs(atts: Atts, runs: Path) -> None:
    """`atts replay` prints a table of both runs, and says how reliable the replay is."""
    said = atts("replay", str(runs / "atts"), "--rate", "0.7")
    assert said.code == 0
    for words in ("recorded", "replayed", "nominal rate 0.7", "would have a different decision"):
        assert words in said.out
    tokens = [line for line in said.out.splitlines() if line.startswith("tokens")]
    assert len(tokens) == 3
    assert all(line.endswith("unknown") for line in tokens)


def test_a_list_of_runs_reports_unscored_problems(
    atts: Atts, tmp_path: Path, scripted: tuple[str, ...]
) -> None:
    """The list of runs also prints the accuracy that would result if all unscored answers were
    correct.
    """
    rows = [{"problem": "Start at 4. +3. What is the result?", "answer": "7 of whatever it may be"}]
    (tmp_path / "odd.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert atts("eval", "odd.jsonl", "--samples", "2", *scripted, "--out", "odd/run").code == 0
    said = atts("runs", "odd").out
    assert "0.000 [" in said
    assert "1 unscored: 1.000 [" in said


def test_a_trace_holds_every_call(atts: Atts, runs: Path) -> None:
    """A trace has one slice per engine call, and is written to a file or to stdout."""
    said = atts("trace", str(runs / "atts"), "--json")
    (made,) = lines(said)
    events = json.loads(Path(made["trace"]).read_text())["traceEvents"]
    engines = {
        event["pid"]
        for event in events
        if event.get("args", {}).get("name", "").startswith("engine")
    }
    calls = [event for event in events if event["ph"] == "X" and event["pid"] in engines]
    nodes = [
        e.event for e in read_entries(runs / "atts" / JOURNAL) if isinstance(e.event, CallSpan)
    ]
    assert len(calls) == sum(node.ended > node.started for node in nodes)
    assert atts("trace", str(runs / "atts"), "--out", "-").out == Path(made["trace"]).read_text()


def test_a_run_directory_is_read_like_a_file_of_scores(atts: Atts, runs: Path) -> None:
    """Report, fit and replay read scores from a run directory, together with their conditions."""
    run = str(runs / "atts")
    assert "warning" in atts("calibration", "report", run).out
    fitted = atts("calibration", "fit", run, "--rate", "0.3", "--out", "fitted.json")
    assert fitted.code == 0
    stored = Calibrator.load(Path("fitted.json")).stored
    assert stored == scores_of(run)
    assert (
        stored.fingerprint["draft.model"]
        == json.loads((runs / "atts" / MANIFEST).read_text())["engines"]["draft"]["model"]
    )
    assert atts("calibration", "replay", run, "--json").code == 0


def test_check_exits_with_5_if_the_rate_was_missed(atts: Atts, runs: Path) -> None:
    """`atts calibration check` exits with 0 if the rate is on target.

    If the rate was missed, drift raised an alarm, or there is no rate to check, it exits with 5 and
    prints the reason.
    """
    run = runs / "atts"
    assert "on target; no alarm" in atts("calibration", "check", str(run)).out
    journal = (run / JOURNAL).read_bytes()
    (shutil.copytree(run, run.parent / "bent") / JOURNAL).write_bytes(_bent(journal))
    said = atts("calibration", "check", str(run.parent / "bent"))
    assert said.code == 5
    assert "off target" in said.err
    alone = atts("calibration", "check", str(runs / "alone"))
    assert (alone.code, "no rate to check" in alone.err) == (5, True)


def test_a_replay_with_few_scores_that_misses_its_rate_has_a_note(
    atts: Atts, runs: Path, scripted: tuple[str, ...]
) -> None:
    """Both replay commands print the number of scores if there are few and the rate is missed."""
    words = ("--samples", "1", "--out", "runs/short")
    assert atts("eval", "arithmetic[:2]", *scripted, *words).code == 0
    few = r"the replay has only 1\d scores; .* scope aci escalates below .* until it has 40 scores"
    said = atts("replay", "runs/short", "--rate", "0.6").out
    assert re.search(f"\nNote: {few}\\.\n", said)
    said = atts("replay", "runs/short", "--rate", "0.6", "--json").out
    assert re.match(few, json.loads(said.splitlines()[-1])["note"])
    said = atts("calibration", "replay", "runs/short", "--rate", "0.6").out
    assert re.search(f"\nnote       {few}\n", said)
    assert "note" not in atts("calibration", "replay", "runs/short", "--rate", "0.4").out
    assert "Note" not in atts("replay", "runs/short", "--rate", "0").out


def test_a_rate_of_very_few_decisions_gets_no_verdict(
    atts: Atts, runs: Path, scripted: tuple[str, ...]
) -> None:
    """After about ten decisions, the check passes, but it and the reports say that the decisions
    are too few for a verdict, and mark the rate and the accuracy as notes.
    """
    words = ("--samples", "1", "--out", "runs/short")
    assert atts("eval", "arithmetic[:2]", *scripted, *words).code == 0
    few = "too few decisions to tell whether the rate is on target"
    said = atts("calibration", "check", "runs/short")
    assert said.code == 0
    assert few in said.out
    page = atts("report", "runs/short", "--format", "md", "--out", "-").out
    assert "- note: accuracy of the vote" in page
    assert re.search(f"- note: .* chunks escalated .*: {few}", page)
    assert "good:" not in page
    assert atts("calibration", "report", "runs/short", "--out", "short.html").code == 0
    report = Path("short.html").read_text()
    assert '<span class="badge note"' in report
    assert f": {few}." in report
    assert "on target" not in report.replace(few, "")


def _bent(journal: bytes) -> bytes:
    """Return the journal with every decision changed to an escalation, and with valid checksums."""
    import zlib

    found: list[bytes] = []
    crc = 0
    for line in journal.splitlines(keepends=True):
        body = line[:-19].replace(b'"escalated":false', b'"escalated":true')
        crc = zlib.crc32(body, crc)
        found.append(b'%b,"crc":"%08x"}\n' % (body, crc))
    return b"".join(found)


def test_a_run_whose_problems_all_failed_says_why(atts: Atts) -> None:
    """If all problems of a run fail, the command prints "failed", the first reason and how to
    continue. Its exit code is that of an engine error.
    """
    engine = f"hf:{model_path('draft')}?kv_tokens=40&worker=thread"
    run = (
        "eval",
        "arithmetic[:2]",
        "--draft",
        engine,
        "--target",
        engine,
        "--report",
        "none",
        "--out",
        "run",
    )
    said = atts(*run)
    assert said.code == 3
    assert "failed: could not complete 2 of 2 problems: " in said.err
    assert "first error: ContextOverflow: engine draft" in said.err
    assert "the same command continues the run" in said.err
    assert "accuracy" in said.out


def test_scores_of_another_model_are_refused(atts: Atts, runs: Path) -> None:
    """Scores of another model are refused with an error that names the differing field of the
    fingerprint.
    """
    atts(
        "calibration",
        "import",
        str(runs / "atts"),
        "--out",
        "s.json",
        "--condition",
        "target.model=another",
    )
    said = atts("calibration", "check", "s.json", "--live", str(runs / "atts"))
    assert said.code == 2
    assert "target.model" in said.err
    atts("calibration", "import", str(runs / "atts"), "--out", "same.json")
    assert atts("calibration", "check", "same.json", "--live", str(runs / "atts")).code in (0, 5)


def test_scores_of_other_conditions_need_consent(
    atts: Atts, runs: Path, scripted: tuple[str, ...]
) -> None:
    """Stored scores of other conditions end the run before a model is used. If the user accepts
    these scores, the run continues and its report has a warning.
    """
    words = ("eval", "arithmetic[:2]", "--samples", "2", *scripted, "--out", "own", "--scores")
    assert atts(*words, str(runs / "atts")).code == 0
    assert "conditions" not in {caveat.code for caveat in build_report(Path("own")).report.caveats}
    atts(
        "calibration",
        "import",
        str(runs / "atts"),
        "--out",
        "s.json",
        "--condition",
        "target.model=another",
    )
    refused = atts(*words, "s.json", "--out", "other")
    assert (refused.code, "target.model: stored 'another'" in refused.err) == (2, True)
    assert "--set conditions=ignore" in refused.err
    assert not list(Path("other").glob("*.json*"))
    assert atts(*words, "s.json", "--out", "other", "--set", "conditions=ignore").code == 0
    warned = {caveat.code: caveat.text for caveat in build_report(Path("other")).report.caveats}
    assert "target.model" in warned["conditions"]


def test_fit_warns_of_few_scores_and_few_questions(atts: Atts, tmp_path: Path) -> None:
    """`fit` warns if it has fewer than 40 scores, or scores of fewer than 10 questions."""
    rows = [{"score": 1 + n / 7, "question": n % 10, "turn": 0} for n in range(40)]
    fit = ("calibration", "fit", "scores.jsonl", "--out", "fitted.json")
    scores = tmp_path / "scores.jsonl"
    for count, questions, is_rough in ((40, 10, False), (39, 10, True), (40, 9, True)):
        few = [{**row, "question": n % questions} for n, row in enumerate(rows[:count])]
        scores.write_text("".join(json.dumps(row) + "\n" for row in few))
        warning = f"a calibrator from {count} scores of {questions} questions is rough; use at "
        said = atts(*fit)
        assert said.code == 0
        assert (f"\nwarning: {warning}" in said.out) is is_rough
        warnings = json.loads(atts(*fit, "--json").out)["warnings"]
        assert [text.startswith(warning) for text in warnings] == [True] * is_rough


def test_a_fitted_calibrator_starts_a_run(
    atts: Atts, runs: Path, scripted: tuple[str, ...]
) -> None:
    """`fit` gives the calibrator the rate of the recorded run. A new run with `--scores` starts
    from the calibrator's stored scores.
    """
    assert atts("calibration", "fit", str(runs / "atts"), "--out", "fitted.json").code == 0
    made = Calibrator.load(Path("fitted.json"))
    assert (
        float(made.rate)
        == json.loads(atts("calibration", "report", str(runs / "atts"), "--json").out)["rate"]
        != 0.4
    )
    words = (
        "eval",
        "arithmetic[:2]",
        "--samples",
        "2",
        *scripted,
        "--out",
        "own",
        "--scores",
        "fitted.json",
    )
    assert atts(*words).code == 0
    assert open_run(Path("own")).manifest.configuration["stored"].value == list(made.stored.scores)


def test_scores_made_with_another_prompt_are_refused(
    atts: Atts, runs: Path, scripted: tuple[str, ...]
) -> None:
    """A system prompt is a condition of scores, so a run with another system prompt refuses them."""
    assert atts("calibration", "fit", str(runs / "atts"), "--out", "fitted.json").code == 0
    words = ("eval", "arithmetic[:2]", "--samples", "2", *scripted, "--scores", "fitted.json")
    said = atts(*words, "--set", "system=Be brief.", "--out", "brief")
    assert said.code == 2
    assert "system" in said.err
    assert "Be brief." in said.err
    brief = ("eval", "arithmetic[:2]", "--samples", "2", *scripted, "--set", "system=Be brief.")
    assert atts(*brief, "--out", "brief").code == 0
    assert scores_of(Path("brief")).fingerprint["system"] == "Be brief."
    assert atts(*brief, "--scores", "brief", "--out", "again").code == 0


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("model", "draft.model"),
        ("target.modle", "target.model"),
        ("temperature", "sampling.temperature"),
        ("chunking", "chunking.stop"),
    ],
)
def test_an_unknown_condition_is_refused_before_models_load(
    atts: Atts, runs: Path, name: str, near: str
) -> None:
    """The error for an unknown condition suggests the most similar known condition, before a model
    is loaded.
    """
    said = atts(
        "calibration", "import", str(runs / "atts"), "--out", "s.json", "--condition", f"{name}=x"
    )
    assert said.code == 2
    assert f"did you mean '{near}'" in said.err
    assert not Path("s.json").exists()


def test_scores_without_conditions_are_accepted_with_a_warning(
    atts: Atts, runs: Path, scripted: tuple[str, ...]
) -> None:
    """Scores without recorded conditions cannot be checked, so atts accepts them and the report has
    a warning.
    """
    Path("s.jsonl").write_text("".join(f'{{"score": {1 + n / 40}}}\n' for n in range(30)))
    assert (
        atts(
            "eval",
            "arithmetic[:2]",
            "--samples",
            "2",
            *scripted,
            "--scores",
            "s.jsonl",
            "--out",
            "own",
        ).code
        == 0
    )
    warned = {caveat.code: caveat.text for caveat in build_report(Path("own")).report.caveats}
    assert "do not record their conditions" in warned["conditions"]


def test_calibrate_scores_chunks_and_escalates_none(tmp_path: Path) -> None:
    """Method `calibrate` scores and keeps each chunk, so a later run can start from the scores."""
    setup = Setup(draft="scripted", target="scripted")
    scores = calibrate_sync(toy_problems(3), setup, directory=tmp_path / "fit")
    events = [entry.event for entry in read_entries(tmp_path / "fit" / JOURNAL)]
    assert {event.escalated for event in events if isinstance(event, Observed)} == {False}
    assert len(scores) == sum(
        isinstance(e, Decided) and e.decision.score is not None for e in events
    )
    in_memory = calibrate_sync(toy_problems(3), replace(setup, rate_scope="split"))
    assert sorted(in_memory.scores) == sorted(scores.scores)
    result = evaluate_sync(
        toy_problems(2),
        Setup(draft="scripted", target="scripted", stored=scores, rate_scope="split"),
    )
    assert result.status == "finished"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluate the same problems in one process and in three shards; the folders are named whole,
    1, 2 and 3.
    """
    folder = tmp_path_factory.mktemp("shards")
    evaluate_sync(toy_problems(7), FROZEN, directory=folder / "whole")
    for number in (1, 2, 3):
        evaluate_sync(toy_problems(7), FROZEN, directory=folder / str(number), shard=f"{number}/3")
    return folder


def numbers(run: Path) -> dict[str, Any]:
    """Return those numbers of a run's report that do not depend on time, directory or the order of
    events.
    """
    report = jsonable(asdict(build_report(run).report))
    held = report["calibration"]
    kept = {name: report[name] for name in ("verdict", "accuracy", "coverage", "spend")}
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in report["problems"]]
    rates = {
        name: held[name]
        for name in ("decisions", "escalated", "by_turn", "question", "questions")
        if name in held
    }
    return {**kept, "rows": rows, "rates": rates}


def test_merged_shards_equal_one_run(shards: Path, tmp_path: Path) -> None:
    """With a gate that learns nothing, the report of the merged shards has the accuracy, token
    counts, rates and rows of a single run.
    """
    made = merge([shards / "2", shards / "3", shards / "1"], tmp_path / "all")
    assert made.problems == 7
    union = numbers(made.directory)
    whole = numbers(shards / "whole")
    for spend in (union["spend"], whole["spend"]):
        for name in [
            name for name in spend if "seconds" in name or "time" in name or "per" in name
        ]:
            spend.pop(name)
    assert union == whole
    assert {p.problem.id: p.answer for p in _outcomes(made.directory)} == {
        p.problem.id: p.answer for p in _outcomes(shards / "whole")
    }


def _outcomes(run: Path) -> list[Any]:
    from atts.journal import read_outcomes

    return list(read_outcomes(read_entries(run / JOURNAL)))


def test_a_merged_run_can_be_read_but_not_resumed(atts: Atts, shards: Path) -> None:
    """Reports, replays, traces and comparisons can read a merged run; resuming it is refused."""
    parts = [str(shards / str(number)) for number in (1, 2, 3)]
    assert atts("merge", *parts, "--out", "all").code == 0
    assert atts("report", "all", "--json").code == 0
    assert lines(atts("replay", "all", "--json"))[-1]["changed"] == 0
    assert atts("trace", "all", "--json").code == 0
    assert atts("compare", str(shards / "whole"), "all").code == 0
    nodes = [
        e.event.node for e in read_entries(Path("all") / JOURNAL) if isinstance(e.event, CallSpan)
    ]
    assert len(nodes) == len(set(nodes))
    with pytest.raises(FingerprintError, match="merged"):
        evaluate_sync(toy_problems(7), FROZEN, directory="all")


def test_merging_shards_merges_their_calibrators(atts: Atts, tmp_path: Path) -> None:
    """The merged calibrator counts the decisions of all shards, the report audits each shard's
    calibrator, and a run can start from the merged one.
    """
    setup = Setup(draft="scripted", target="scripted", rate=0.3)
    for number in (1, 2):
        evaluate_sync(toy_problems(6), setup, directory=tmp_path / str(number), shard=f"{number}/2")
    (made,) = lines(
        atts("merge", str(tmp_path / "1"), str(tmp_path / "2"), "--out", "all", "--json")
    )
    apart = [calibrator_of(tmp_path / str(number)) for number in (1, 2)]
    union = Calibrator.load(Path(made["calibrator"]))
    assert union.decided == made["decisions"] == sum(one.decided for one in apart)
    assert union.escalated == sum(one.escalated for one in apart)
    held = build_report(Path("all")).report.calibration
    assert held is not None
    assert "had the recorded result" in held.promise.audit


def test_runs_are_certified_against_the_target_alone(atts: Atts, tmp_path: Path) -> None:
    """A policy is certified against the target alone with exit code 0, or refused with 5 and the
    number of problems needed.

    Runs of other problems are refused.
    """
    for method, rate, problems in (
        ("target-only", 0.2, 12),
        ("atts", 0.4, 12),
        ("draft-only", 0.2, 11),
    ):
        setup = Setup(
            draft="scripted", target="scripted", method=method, rate=rate, policy=Policy(samples=3)
        )
        evaluate_sync(toy_problems(problems), setup, directory=tmp_path / method)
    alone, policy, other = (
        str(tmp_path / method) for method in ("target-only", "atts", "draft-only")
    )
    said = atts("certify", alone, policy, "--epsilon", "0.6")
    assert said.code == 0
    assert "atts/aci" in said.out
    assert "at most 60.0 % less often than the target alone" in said.out
    (found,) = lines(atts("certify", alone, policy, "--epsilon", "0.6", "--lost", "--json"))
    assert (found["kind"], found["problems"], found["chosen"]["rate"]) == ("certificate", 12, 0.4)
    said = atts("certify", alone, policy)
    assert said.code == 5
    assert "no policy can be certified with 12 problems" in said.err
    assert atts("certify", alone, other).code != 0
    assert "1 other problem" in atts("certify", alone, other).err


@pytest.mark.parametrize("mode", ["marginal", "question-turn"])
def test_a_run_that_ranks_by_length_can_be_resumed_and_audited(mode: Any, tmp_path: Path) -> None:
    """A run that ranks by length records the lengths of chunks, so a resume, an audit and a later
    run can repeat the ranks.
    """
    setup = Setup(
        draft="scripted",
        target="scripted",
        rate=0.3,
        rate_scope=mode,
        by_length=mode != "marginal" or None,
    )
    evaluate_sync(toy_problems(4), setup, directory=tmp_path / "run")
    held = build_report(tmp_path / "run").report.calibration
    assert held is not None
    assert "recorded decisions from the journal" in held.promise.audit
    assert "about the same length" in held.promise.guarantee
    found = scores_of(tmp_path / "run")
    assert len(found.lengths) == len(found) > 0
    later = Setup(
        draft="scripted",
        target="scripted",
        rate_scope="marginal",
        stored=found,
        conditions="ignore",
    )
    assert later.ranks_by_length
    evaluate_sync(toy_problems(2), later, directory=tmp_path / "later")
    held = build_report(tmp_path / "later").report.calibration
    assert held is not None
    assert "had the recorded result" in held.promise.audit
    assert calibrator_of(tmp_path / "later").stored.lengths == found.lengths
    assert not Setup(rate_scope="marginal", stored=[1.5]).ranks_by_length


def test_shards_that_do_not_fit_together_are_refused(shards: Path, tmp_path: Path) -> None:
    """A missing, repeated or unfinished shard, different settings, and an existing target folder
    are each refused with a message.
    """
    one, two, three = (shards / str(number) for number in (1, 2, 3))
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="at least two runs"):
        merge([one], out)
    with pytest.raises(UsageError, match="shard 2/3 is missing"):
        merge([one, three], out)
    with pytest.raises(UsageError, match="shard 3/3 is missing"):
        merge([one, two], out)
    with pytest.raises(UsageError, match="given twice"):
        merge([one, two, two], out)
    with pytest.raises(UsageError, match="not shards of one evaluation"):
        merge([one, shards / "whole"], out)
    with pytest.raises(UsageError, match="already has a run"):
        merge([one, two, three], shards / "whole")
    with pytest.raises(OptionError, match="2/3"):
        evaluate_sync(toy_problems(7), FROZEN, shard="4/3")
    with pytest.raises(OptionError, match="empty"):
        evaluate_sync(toy_problems(2), FROZEN, shard="3/3")
    cut = shutil.copytree(three, tmp_path / "cut")
    whole = (cut / JOURNAL).read_bytes().splitlines(keepends=True)
    (cut / JOURNAL).write_bytes(b"".join(whole[: len(whole) // 2]))
    with pytest.raises(UsageError, match="unfinished problem"):
        merge([one, two, cut], out)
    assert not out.exists()
    with pytest.raises(CalibrationInputError, match="coin"):
        calibrator_of(shards / "whole")


@pytest.mark.parametrize("given", ["argument", "file", "stdin"])
def test_solve_shows_the_reasoning_as_it_is_written(
    atts: Atts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """`atts solve` prints each line of reasoning with its model and the decision, as it is written;
    the answer, votes and cost come last.
    """
    import io

    text = toy_problems(1)[0].text
    (tmp_path / "problem.txt").write_text(text)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    word = {"argument": text, "file": "problem.txt", "stdin": "-"}[given]
    words = (
        "--draft",
        "scripted",
        "--target",
        "scripted",
        "--method",
        "coin",
        "--rate",
        "0.5",
        "--samples",
        "3",
    )
    said = atts("solve", word, *words, "--follow", "all")
    assert said.code == 0
    labels = {line.split("│")[0].split()[-1] for line in said.out.splitlines() if "│" in line}
    assert labels == {"draft", "accepted", "escalated", "target", "answer"}
    assert "\x1b" not in said.out
    assert "votes" in said.out


def test_solve_labels_the_rollout_that_it_shows(atts: Atts) -> None:
    """`atts solve` shows one rollout, names it with its answer, and says why the vote ended."""
    words = ("--draft", "scripted", "--target", "scripted", "--samples", "3", "--follow", "1")
    said = atts("solve", toy_problems(1)[0].text, *words)
    assert said.code == 0
    assert re.search(r"^shown +rollout 1 \((answer .+|no answer)\); --follow all", said.out, re.M)
    assert "scored, in all rollouts together" in said.out
    alone = atts("solve", toy_problems(1)[0].text, *words[:4], "--samples", "1")
    assert "shown" not in alone.out


def test_solve_json_holds_every_chunk_and_decision(atts: Atts) -> None:
    """`atts solve --json` prints the chunks, decisions and end of each rollout first and the
    outcome last; the tokens add up.
    """
    said = atts(
        "solve", toy_problems(1)[0].text, "--draft", "scripted", "--target", "scripted", "--samples", "3", "--json",
        "--set", "early_stop=none",
    )  # fmt: skip
    found = lines(said)
    assert {line["sample"] for line in found if "sample" in line} == {0, 1, 2}
    assert found[-1]["type"] == "outcome"
    for line in found:
        if line["type"] == "turn":
            here = [
                one
                for one in found
                if (one.get("sample"), one.get("turn")) == (line["sample"], line["turn"])
            ]
            written = "".join(one["text"] for one in here if one["type"] in ("draft", "target"))
            assert written.endswith(
                line["text"]
            )  # discarded chunks come before those that replaced them


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("solve", "  "), "empty"),
        (("solve", "2+2", "--kind", "mathe"), "math"),
        (("solve", "2+2", "--follow", "99"), "rollout"),
        (("replay", "nowhere"), "no run"),
        (("trace", "nowhere"), "no run"),
        (("merge", "nowhere", "--out", "all"), "two runs"),
        (("eval", "--shard", "0/2"), "2/3"),
    ],
)
def test_bad_arguments_give_one_line_and_an_exit_code(
    atts: Atts, words: tuple[str, ...], why: str
) -> None:
    """The error for a bad argument names the argument or the run directory in one line, without a
    traceback.
    """
    said = atts(*words)
    assert said.code in (2, 4)
    assert why in said.err
    assert len(said.err.splitlines()) <= 3


def test_terminal_codes_are_shown_not_obeyed(atts: Atts) -> None:
    """Control codes in a text are shown as characters, so the text cannot clear the screen or ring
    the bell.
    """
    Path("mine.jsonl").write_text(
        json.dumps({"question": "2 + 2?\x1b[2J\x07\u202e", "answer": "4"}) + "\n"
    )
    said = atts("datasets", "show", "mine.jsonl")
    assert "2 + 2?␛[2J␇\\u202e" in said.out


def test_cancelled_turns_count_as_spent(tmp_path: Path) -> None:
    """If a settled vote cancels a rollout, the tokens of its unfinished turn count as spent, in the
    progress and in the result.
    """
    setup = Setup(draft="scripted", target="scripted", seed=3, policy=Policy(samples=6))
    result = evaluate_sync(toy_problems(6), setup, directory=tmp_path / "run")
    written = dict.fromkeys(("draft", "target", "scored"), 0)
    for entry in read_entries(tmp_path / "run" / JOURNAL, kinds=(Sampled, Scored)):
        if isinstance(entry.event, Sampled):
            written[entry.event.role] += len(entry.event.completion.ids)
        elif isinstance(entry.event, Scored):
            written["scored"] += len(entry.event.scores.logprobs)
    usage = result.usage
    assert usage.drawn_tokens > 0
    assert any(sample.finish == "settled" for line in result.problems for sample in line.samples)
    # a takeover keeps tokens that the target sampled while it scored, so these tokens are not
    # written again
    decoded = usage.target_tokens - usage.drawn_tokens
    assert written == {
        "draft": usage.draft_tokens,
        "target": decoded,
        "scored": usage.scored_tokens,
    }


def test_listed_runs_show_the_numbers_of_their_summaries(atts: Any, runs: Path) -> None:
    """The list of runs has the same numbers that each run printed at its end."""
    lines = [json.loads(line) for line in atts("runs", str(runs), "--json").out.splitlines()]
    assert [(Path(line["directory"]).name, line["method"]) for line in lines] == [
        ("atts", "atts"),
        ("alone", "target-only"),
    ]
    for line in lines:
        assert (line["standing"], line["done"], line["problems"], line["models"]) == (
            "finished",
            3,
            3,
            "scripted",
        )
        summary = json.loads(atts("eval", "arithmetic[:3]", "--method", line["method"], "--samples", "3", "--draft",
            "scripted", "--target", "scripted", "--report", "none", "--out", line["directory"], "--json",
        ).out.splitlines()[-1])  # fmt: skip
        assert line["accuracy"] == summary["answers"]
        assert line["rate"] == summary["rate"]
        assert {name: line[name] for name in ("target_tokens", "draft_tokens")} == {
            name: summary["usage"][name] for name in ("target_tokens", "draft_tokens")
        }


def test_the_list_tells_killed_runs_from_running_ones(atts: Any, runs: Path) -> None:
    """The list shows a run without an end as running if a process has its lock, and as killed if
    not. It says that the tokens of such a run are those of finished problems.
    """
    note = "Tokens are those of finished problems."
    assert note not in atts("runs", str(runs / "atts")).out
    cut = runs / "cut"
    shutil.copytree(runs / "atts", cut)
    lines = (cut / JOURNAL).read_bytes().splitlines(keepends=True)
    (cut / JOURNAL).write_bytes(b"".join(lines[: len(lines) // 2]))
    assert [one.standing for one in list_runs([cut])] == ["killed"]
    with locked(cut / LOCK, cut):
        assert [one.standing for one in list_runs([cut])] == ["running"]
    assert [one.standing for one in list_runs([cut])] == ["killed"]
    assert note in atts("runs", str(cut)).out


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(atts: Any, runs: Path) -> None:
    """A run that cannot be read is listed with the reason, and the other runs are listed as
    usual.
    """
    (runs / "atts" / "manifest.json").write_text("{")
    said = atts("runs", str(runs))
    assert said.code == 0
    assert "unreadable" in said.out
    assert "the file is not a manifest" in said.out
    assert "target-only" in said.out


def test_a_folder_without_runs_says_so(atts: Any, tmp_path: Path) -> None:
    """If a folder contains no runs, a message on stderr says so, and the exit code is 0."""
    (tmp_path / "empty").mkdir()
    said = atts("runs", "empty", "--json")
    assert (said.code, said.out) == (0, "")
    assert "no run in empty" in said.err


class GrowingRun:
    """A simulated run in progress: each wait appends journal lines, some of them incomplete, until
    the run ends and releases its lock.
    """

    def __init__(self, recorded: Path, folder: Path, steps: int) -> None:
        shutil.copytree(recorded, folder)
        self.folder = folder
        self.waits = 0
        self._steps = steps
        self._data = (folder / JOURNAL).read_bytes()
        self._lock = ExitStack()
        self._lock.enter_context(locked(folder / LOCK, folder))
        self._write(len(self._data) // 4)

    def _write(self, length: int) -> None:
        (self.folder / JOURNAL).write_bytes(self._data[:length])

    def wait(self, seconds: float) -> None:
        """Write the next part of the run's journal."""
        self.waits += 1
        self._write(
            len(self._data) * min(self.waits + self._steps // 4, self._steps) // self._steps
        )
        if self.waits == self._steps:
            self._lock.close()


def test_report_follow_rewrites_the_report_while_a_run_grows(runs: Path, tmp_path: Path) -> None:
    """`atts report --follow` writes the report at each interval if something happened, and once
    more at the end of the run.
    """
    from atts.analysis import build_report

    run = GrowingRun(runs / "atts", tmp_path / "growing", 16)
    done = list[int]()

    def write() -> int:
        done.append(len(build_report(run.folder).report.problems))
        return len(done)

    assert follow(run.folder, write, every=1.0, wait=run.wait) == len(done)
    assert run.waits == 16
    assert 4 <= len(done) <= 9
    assert done == sorted(done)
    assert (done[0] < 3, done[-1]) == (True, 3)


def test_report_follow_writes_nothing_for_an_idle_run(runs: Path, tmp_path: Path) -> None:
    """`atts report --follow` does not rewrite the report of an idle run, however long the run is
    idle.
    """
    run = GrowingRun(runs / "atts", tmp_path / "idle", 40)
    times = list[int]()
    run._write = lambda length: None  # type: ignore[method-assign]
    follow(run.folder, lambda: times.append(run.waits), every=1.0, wait=run.wait)
    assert times == [0, 40]


def test_report_follow_of_a_finished_run_writes_once(atts: Any, runs: Path) -> None:
    """For a finished run, `atts report --follow` writes the report once and prints its path, as
    without `--follow`.
    """
    said = atts("report", str(runs / "atts"), "--follow", "--out", "page.html")
    assert (said.code, said.out) == (0, "page.html\n")
    assert Path("page.html").read_text().startswith("<!doctype html>")


def test_report_follow_of_a_deleted_run_is_an_error(runs: Path, tmp_path: Path) -> None:
    """If the run's directory is deleted, `atts report --follow` ends with an error that names the
    directory.
    """
    run = GrowingRun(runs / "atts", tmp_path / "gone", 9)
    with pytest.raises(JournalError, match="there is no run here"):
        follow(run.folder, lambda: shutil.rmtree(run.folder), wait=lambda seconds: None)


@pytest.mark.parametrize("name", ["scores.jsonl", "scores.json", "scores"])
def test_imported_scores_are_read_everywhere(atts: Any, name: str) -> None:
    """`atts import` writes scores in one format; `report`, `replay`, `check` and `fit` recognise
    the format by its content.
    """
    np.save("ppls.npy", np.linspace(1.1, 9.0, 64))
    assert (
        atts("calibration", "import", "ppls.npy", "--per-question", "16", "--out", name).code == 0
    )
    for words in (
        ("report", name),
        ("replay", name),
        ("check", name),
        ("fit", name, "--out", "calibrator.json"),
    ):
        said = atts("calibration", *words)
        assert (said.code, said.err) == (0, ""), words
    whole = json.loads(atts("calibration", "replay", name, "--json").out.splitlines()[-1])
    assert whole["decisions"] == 64


def test_a_record_without_a_score_is_quoted_briefly(atts: Any) -> None:
    """The error about a record without a score lists the record's fields and shortens long
    values.
    """
    with open("wrong.jsonl", "w") as file:
        file.write(json.dumps({"scores": list(range(5000)), "text": "x" * 5000}) + "\n")
    with open("long.jsonl", "w") as file:
        file.write(json.dumps({"score": "9" * 5000}) + "\n")
    for name, told in (
        ("wrong.jsonl", "without a score (fields: scores, text)"),
        ("long.jsonl", "…"),
    ):
        said = atts("calibration", "report", name)
        assert said.code == 2
        assert told in said.err
        assert len(said.err) < 400


def test_benchmark_names_of_metrics_are_printed(atts: Any, scripted: tuple[str, ...]) -> None:
    """The metrics have their benchmark names: avg@16 is pass@1, and cons@16 is the accuracy of the
    vote.

    A run that cancelled rollouts has no avg.
    """
    words = ("eval", "arithmetic[:2]", "--samples", "16", *scripted, "--method", "draft-only")
    said = atts(*words, "--early-stop", "none", "--out", "all")
    rows = {line[:20].strip(): line[20:].split("   ")[0] for line in said.out.splitlines()}
    assert rows["avg@16"] == rows["pass@1"]
    assert rows["cons@16"] == rows["accuracy"]
    said = atts("eval", "arithmetic[:2]", "--samples", "4", *scripted, "--out", "few")
    assert "cons@" not in said.out


GRADER = """
def strict(answer, problem):
    return answer == problem.answer

def odd(answer, problem):
    return "yes"
"""


def test_a_users_grader_decides(atts: Any, scripted: tuple[str, ...], tmp_path: Path) -> None:
    """A user's grader is imported from the working directory. Its name is recorded in the verdicts
    and in the run's settings.
    """
    (tmp_path / "graders_of_mine.py").write_text(GRADER)
    words = ("eval", "arithmetic[:2]", "--samples", "2", *scripted, "--json")
    said = atts(*words, "--grader", "graders_of_mine:strict", "--out", "strict")
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in said.out.splitlines()]
    rules = {one["rule"] for line in lines[:-1] for one in line["samples"] if one["answer"]}
    assert rules <= {"strict"}
    # the directory belongs to a run with another grader, so the command is refused
    assert atts(*words, "--out", "strict").code == 2
    said = atts(*words, "--grader", "graders_of_mine:odd", "--out", "odd")
    statuses = {
        one["verdict"]
        for line in map(json.loads, said.out.splitlines()[:-1])
        for one in line["samples"]
        if one["answer"]
    }
    assert statuses <= {"unscored"}
    for wrong, words_of_error in (
        ("graders_of_mine", "package.module:function"),
        ("graders_of_mine:none", "cannot be imported"),
        ("no_such_module:f", "cannot be imported"),
        ("graders_of_mine:GRADER", "cannot be imported"),
    ):
        said = atts("eval", "arithmetic[:1]", *scripted, "--grader", wrong)
        assert (said.code, words_of_error in said.err) == (2, True), said.err


def test_fit_and_replay_use_the_rate_and_scope_of_the_run(
    atts: Any, scripted: tuple[str, ...]
) -> None:
    """A calibrator that is fitted to a run, and a replay of the run's scores, get the run's rate and
    rate scope; flags change them. For a file of scores, they are 0.4 and aci.
    """
    run = ("eval", "arithmetic[:2]", "--samples", "2", *scripted)
    own = ("--rate", "0.3", "--rate-scope", "question", "--out", "runs/own")
    assert atts(*run, *own).code == 0
    fit = ("calibration", "fit", "runs/own", "--out", "fitted.json")
    assert "rate scope question, rate 0.3" in atts(*fit).out
    assert "rate scope aci, rate 0.1" in atts(*fit, "--rate-scope", "aci", "--rate", "0.1").out
    replay = ("calibration", "replay", "runs/own")
    assert "(nominal rate 0.3, rate scope question)" in atts(*replay).out
    changed = atts(*replay, "--rate-scope", "marginal", "--rate", "0.1")
    assert "(nominal rate 0.1, rate scope marginal)" in changed.out
    assert atts("calibration", "import", "runs/own", "--out", "own.json").code == 0
    of_file = atts("calibration", "replay", "own.json")
    assert "(nominal rate 0.4, rate scope aci)" in of_file.out
