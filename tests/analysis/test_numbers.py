"""Tests that the numbers of a report are those of the journal, and the same in every format."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

import atts
from atts.analysis import Standing, build_report, render, save_report
from atts.analysis.reports.build import timing
from atts.analysis.reports.charts import calibration_charts
from atts.analysis.reports.headline import calibration_caveats, run_caveats
from atts.analysis.reports.numbers import (
    WORDS,
    Caveat,
    CaveatWords,
    GroupRate,
    StatedGuarantee,
)
from atts.analysis.reports.rate_control import rate_control
from atts.analysis.reports.run_data import Pages, pack, read_run_data, shorten
from atts.analysis.reports.tables import shown_problems
from atts.analysis.steps import GateStep, StepLog
from atts.api import Setup
from atts.calibration import Calibrator, coin_band
from atts.cli.app import run as run_command
from atts.core import HOLD, Chunk, Decision, Features, Outcome, Problem, Prompt, Rollout, Turn
from atts.errors import JournalError, OptionError, UsageError, counted
from atts.files import jsonable
from atts.graph import CallSpan
from atts.journal import (
    JOURNAL,
    Decided,
    FinishedProblem,
    JournalOptions,
    Observed,
    Warned,
    load_manifest,
    open_journal,
    open_run,
    read_entries,
)
from atts.pipelines.gates import NonLearningGate
from atts.testing import toy_problems


def _rewrite(source: Path, target: Path, change: Any, keep: int | None = None) -> Path:
    """Copy a run, change its events, and drop the events after the first `keep`."""
    manifest = load_manifest(source / "manifest.json")
    assert manifest is not None
    events = [entry.event for entry in read_entries(source / JOURNAL)][:keep]

    async def write() -> None:
        async with open_journal(target, manifest, JournalOptions(), lambda entry: None) as journal:
            for event in events:
                if type(event).__name__ not in ("SessionOpened", "SessionClosed"):
                    journal.record(change(event))
            await journal.saved()

    anyio.run(write)
    return target


def test_every_number_equals_a_count_over_the_journal(run: Path) -> None:
    """Each reported number of decisions, escalations, tokens and verdicts equals the test's own
    count over the journal.
    """
    report = build_report(run).report
    events = [entry.event for entry in read_entries(run / JOURNAL)]
    observed = [event for event in events if isinstance(event, Observed)]
    held = report.calibration
    assert held is not None
    assert (held.decisions, held.escalated) == (
        len(observed),
        sum(event.escalated for event in observed),
    )
    assert sum(group.decisions for group in held.turns) == sum(
        group.decisions for group in held.by_question
    )
    assert sum(group.escalated for group in held.turns) == held.escalated
    assert held.moments[-1].share == held.escalated / held.decisions
    outcomes = list(_outcomes(run))
    assert report.spend.usage.target_tokens == sum(
        outcome.usage.target_tokens for outcome in outcomes
    )
    assert [row.id for row in report.problems] == [problem.id for problem in toy_problems(12)]
    right = sum(row.verdict == "correct" for row in report.problems)
    assert report.accuracy[0].estimate.value == right / len(report.problems)
    assert report.timing is not None
    held_up = sum(
        event.wait for event in events if isinstance(event, CallSpan) and event.stage == HOLD
    )
    assert report.timing.sibling_seconds == pytest.approx(held_up)
    holds = sum(isinstance(event, CallSpan) and event.stage == HOLD for event in events)
    # a rollout whose chunk equals a sibling's waits for the sibling's score, so the graph has an
    # edge from the sibling's scoring call
    assert report.timing.sibling_edges == holds > 0
    assert "over 12 problems" in report.verdict.line


def _outcomes(run: Path) -> Any:
    from atts.journal import read_outcomes

    return read_outcomes(read_entries(run / JOURNAL))


@pytest.mark.both
def test_all_formats_say_the_same(run: Path, other_run: Path) -> None:
    """HTML, Markdown and JSON have the same verdict, rate and guarantee, and the JSON is strict."""
    built = build_report(run, [other_run])
    page, words, data = (render(built, format) for format in ("html", "markdown", "json"))
    parsed = json.loads(data, parse_constant=_refuse)
    held = built.report.calibration
    assert held is not None
    assert parsed["calibration"]["escalated"] == held.escalated
    share = f"{held.escalated:,} of {held.decisions:,} chunks escalated"
    assert share in page
    assert share in words
    assert parsed["verdict"]["line"] == built.report.verdict.line
    assert f"Guarantee (question-turn): {share}" in words
    for text in (words, page):
        assert "For ANY sequence of scores" in text
    assert len(parsed["problems"]) == 12
    assert parsed["baselines"][0]["method"] == "target-only"


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_the_audit_notices_changed_decisions(run: Path, tmp_path: Path) -> None:
    """The report's audit recognises the gate's mode by repeating each decision, and notices changed
    decisions.
    """
    held = build_report(run).report.calibration
    assert held is not None
    asked = sum(
        isinstance(entry.event, Decided) and entry.event.decision.p is not None
        for entry in read_entries(run / JOURNAL)
    )
    assert held.promise.mode == "question-turn"
    assert f"recomputed {asked:,} recorded decisions" in held.promise.audit
    assert f"{asked:,} of them had the recorded result" in held.promise.audit
    seen = 0

    def tamper(event: Any) -> Any:
        nonlocal seen
        seen += isinstance(event, Decided) and event.decision.p is not None
        if isinstance(event, Decided) and event.decision.p is not None and seen % 20 == 0:
            return structs.replace(event, decision=replace(event.decision, p=event.decision.p / 2))
        return event

    forged = build_report(_rewrite(run, tmp_path / "forged", tamper)).report.calibration
    assert forged is not None
    assert f"{seen // 20} of them had a different result" in forged.promise.audit


@pytest.mark.parametrize("mode", ["split", "marginal", "question-turn", "aci"])
def test_the_audit_uses_the_runs_stored_scores(
    evaluate_into: Any, tmp_path: Path, mode: str
) -> None:
    """If a run started from the scores of another run, the audit of its decisions starts from the
    same scores.
    """
    stored = tuple(1 + n / 40 for n in range(1, 60))
    held = build_report(
        evaluate_into(tmp_path / "run", 3, rate_scope=mode, stored=stored)
    ).report.calibration
    assert held is not None
    assert held.promise.mode == mode
    assert "had the recorded result" in held.promise.audit
    assert "did not" not in held.promise.audit


def test_a_run_of_known_size_states_a_narrow_guarantee(evaluate_into: Any, tmp_path: Path) -> None:
    """If the number of problems is known, the guaranteed distance between realised and nominal rate
    is below 0.1, and the audit confirms the guarantee.
    """
    policy = replace(Setup().policy, samples=8)
    held = build_report(
        evaluate_into(tmp_path, 6, rate_scope="aci", policy=policy)
    ).report.calibration
    assert held is not None
    assert (
        "If scores are exchangeable, with probability 0.95 the realised rate is within 0.0"
        in held.promise.guarantee
    )
    assert (
        "(0.006 W + 1 + 0.7 E) / T of the nominal rate when the run ends" in held.promise.guarantee
    )
    assert "did not" not in held.promise.audit
    assert abs(held.rate.value - 0.3) <= 0.006 + 4 / held.rate.n_samples


def test_the_guarantee_is_worded_by_the_calibrator(run: Path) -> None:
    """If a calibrator made the recorded decisions, the report prints this calibrator's guarantee."""
    held = build_report(run).report.calibration
    assert held is not None
    assert held.nominal is not None
    calibrator = Calibrator(held.nominal, "question-turn")
    for step in read_run_data(run, 0).done:
        calibrator.observe(step.decision, step.escalated)
    assert (held.promise.guarantee, held.promise.voided_by) == (
        calibrator.guarantee,
        calibrator.voided_by,
    )


def test_twice_the_nominal_rate_is_reported_first(run: Path, tmp_path: Path) -> None:
    """The verdict on a run that escalated at twice the nominal rate begins with this fault."""

    def escalate(event: Any) -> Any:
        return structs.replace(event, escalated=True) if isinstance(event, Observed) else event

    report = build_report(_rewrite(run, tmp_path / "run", escalate)).report
    assert report.verdict.standing == "bad"
    assert "off target" in report.verdict.line


@pytest.mark.parametrize("keep", [1, 3, 40, 200])
def test_an_unfinished_run_has_a_report(run: Path, tmp_path: Path, keep: int) -> None:
    """A run can be reported before its end; the report says that the run is not finished."""
    report = build_report(_rewrite(run, tmp_path / "run", lambda event: event, keep)).report
    standing: Standing = report.verdict.standing
    assert standing == "bad"
    assert "unfinished" in [caveat.code for caveat in report.caveats]
    for format in ("html", "markdown", "json"):
        assert atts.report(tmp_path / "run", format=format).stat().st_size > 300


@pytest.mark.parametrize(
    "method", ["draft-only", "coin", "top-b", "target-only", "speculative-thinking"]
)
def test_every_method_reports_its_guarantee_or_that_it_has_none(
    evaluate_into: Any, tmp_path: Path, method: str
) -> None:
    """Methods without a calibrator state their own guarantee, or that they have none."""
    report = build_report(evaluate_into(tmp_path / "run", 3, method=method)).report
    assert "html" in render(build_report(tmp_path / "run"), "html")
    if report.calibration is not None:
        assert "not known" not in report.calibration.promise.guarantee


@dataclass(frozen=True, slots=True)
class LuckyGate(NonLearningGate):
    """A gate written by a user; atts has no description of this gate."""

    def decide(self, features: Features, score: float) -> Decision:
        """Accept everything."""
        return features.decision("accept", score=score)


@dataclass(frozen=True, slots=True)
class ProudGate(LuckyGate):
    """A user's gate that states a guarantee."""

    promise: tuple[str, str] = ("nothing escalates", "a second rollout")


def test_a_user_gate_states_its_own_guarantee(evaluate_into: Any, tmp_path: Path) -> None:
    """A user's gate is reported by its name, and the audit does not try to explain the gate's
    decisions by a calibrator's mode.
    """
    silent = build_report(evaluate_into(tmp_path / "silent", 2, gate=LuckyGate())).report
    proud = build_report(evaluate_into(tmp_path / "proud", 2, gate=ProudGate())).report
    assert silent.calibration is not None
    assert proud.calibration is not None
    assert silent.calibration.promise.mode == "LuckyGate"
    assert "LuckyGate is not one of the gates of atts" in silent.calibration.promise.guarantee
    assert proud.calibration.promise.guarantee == "nothing escalates"
    assert proud.calibration.promise.voided_by == "a second rollout"


def test_rates_per_turn_are_no_caveat_if_the_gate_controls_the_whole_run(
    evaluate_into: Any, tmp_path: Path
) -> None:
    """By default the gate keeps the rate of the whole run. Turns with another rate are then no
    reason to distrust the numbers.
    """
    for scope in ("aci", "question-turn"):
        report = build_report(evaluate_into(tmp_path / scope, 2, rate_scope=scope)).report
        control = report.calibration
        assert control is not None
        every = replace(control.turns[0], escalated=control.turns[0].decisions)
        assert not every.inside
        codes = [caveat.code for caveat in calibration_caveats(replace(control, turns=(every,)))]
        assert ("turns" in codes) == (scope == "question-turn")


def test_a_report_compares_with_other_runs(run: Path, other_run: Path) -> None:
    """A run compared with itself shows no difference, and a gated run writes fewer target tokens
    than the target alone.
    """
    same, cheaper = build_report(run, [run, other_run]).report.baselines
    assert (same.difference.value, same.token_ratio, same.target_token_ratio) == (0.0, 1.0, 1.0)
    assert cheaper.target_token_ratio < 1
    assert {point.kind for point in build_report(run, [other_run]).report.frontier} == {
        "samples",
        "turns",
        "run",
    }


def test_cancelled_rollouts_count_in_no_accuracy(run: Path) -> None:
    """A rollout that was cancelled because the vote was settled counts neither as correct nor as
    wrong.
    """
    report = build_report(run).report
    spared = sum(
        line.finish == "settled" and line.answer is None
        for o in _outcomes(run)
        for line in o.rollouts
    )
    alone = next(rate for rate in report.accuracy if rate.name == "pass@1")
    assert spared > 0
    assert alone.estimate.n_samples == 12 * 8 - spared
    told = f"without {counted(spared, 'rollout')} cancelled because the vote was settled"
    assert told in report.coverage


def _outcome(text: str, problem: str = "p") -> Outcome:
    chunk = Chunk("draft", text, (1,), (1,), "end", (-0.5,))
    decision = Decision("accept", 0.2, problem, score=1.5, p=0.25)
    turn = Turn(0, (chunk,), score=1.5, decision=decision)
    return Outcome(
        Problem(problem, "q"), (Rollout(problem, 0, Prompt((1,), (1,)), (turn,), "end"),), None
    )


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300), st.integers(0, 120))
def test_long_texts_are_shortened_in_the_middle(text: str, limit: int) -> None:
    """A shortened text keeps its beginning and end and counts the characters left out; a short text
    is unchanged.
    """
    cut = shorten(text, limit)
    if len(text) <= limit:
        assert cut == text
    else:
        assert f"[{len(text) - 2 * (limit // 2)} characters]" in cut
        assert cut.startswith(text[: limit // 2])


def unpack(packed: str) -> Any:
    """Undo `pack`."""
    return json.loads(zlib.decompress(base64.b64decode(packed), -15))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200))
def test_packed_pages_unpack_and_hold_no_markup(text: str) -> None:
    """A packed page consists of letters, digits, +, / and =, whatever a model wrote, and unpacks to
    the same page.
    """
    pages = Pages(1 << 20, 1)
    outcome = _outcome(text)
    pages.add(outcome, {}, FinishedProblem.of(outcome))
    packed = pages["p"]
    assert not set(packed) - set(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
    )
    written = unpack(packed)["rollouts"][0]["turns"][0]["chunks"][0][2]
    assert written == text.encode("utf-8", "replace").decode()


def test_pages_keep_to_their_budget() -> None:
    """Long texts are shortened until all problems fit into the size limit of the pages; scores and
    decisions are kept.
    """
    noise = "".join(map(chr, Random(0).choices(range(33, 123), k=60_000)))
    pages = Pages(100 * 2000, 100)
    for number in range(100):
        outcome = _outcome(noise, str(number))
        pages.add(outcome, {}, FinishedProblem.of(outcome))
    assert sum(len(pages[str(number)]) for number in range(100)) <= 200_000
    assert (pages.shortened, pages.limit < 4000) == (100, True)
    assert unpack(pages["7"])["rollouts"][0]["turns"][0]["p"] == 0.25


def test_pages_of_an_unknown_number_of_problems_keep_to_their_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the manifest lacks the number of problems, as in a run that reads problems from an iterator
    and has not ended, the pages are shortened as if the number were known.
    """
    setup = Setup(draft="scripted", target="scripted")
    atts.evaluate_sync(toy_problems(60), setup, directory=tmp_path / "run")
    budget = 60 * 2_800
    known = read_run_data(tmp_path / "run", budget).pages
    assert known.shortened > 0
    run = open_run(tmp_path / "run")
    unknown = replace(run, manifest=replace(run.manifest, problems=None))
    monkeypatch.setattr("atts.analysis.reports.run_data.open_run", lambda _: unknown)
    counted = read_run_data(tmp_path / "run", budget).pages
    names = [problem.id for problem in toy_problems(60)]
    assert [counted[name] for name in names] == [known[name] for name in names]


def test_json_writes_nan_as_null() -> None:
    """The JSON report writes NaN and infinity as null, so the JSON is strict."""
    assert jsonable({"a": math.nan, "b": math.inf}) == {"a": None, "b": "inf"}
    assert unpack(pack({"p": math.nan})) == {"p": None}


def _node(
    number: int, engine: str, start: float, end: float, queued: float | None = None
) -> CallSpan:
    at = start if queued is None else queued
    return CallSpan(number, "draft", engine, "p", 0, number, at, at, start, end)


def test_idle_time_of_an_engine_is_measured() -> None:
    """The engine has no call in flight from second 2 to second 5 of 8, so its busy share is 5/8. A
    call is counted as waiting while it waits for a slot.
    """
    found = timing(
        [_node(0, "draft", 0, 2), _node(1, "draft", 0.5, 1.5), _node(2, "draft", 5, 8, queued=4)]
    )
    assert found is not None
    lane = found.engines[0]
    assert (lane.busy_share, lane.longest_bubble, lane.peak) == (5 / 8, 3.0, 2)
    assert lane.mean_in_flight == pytest.approx((2 + 1 + 3) / 8)
    assert sum(lane.in_flight) / len(lane.in_flight) == pytest.approx(lane.mean_in_flight)
    assert sum(lane.waiting) / len(lane.waiting) * 8 == pytest.approx(1.0)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 400), st.floats(0.01, 0.99))
def test_the_band_of_a_coin_keeps_its_level(n: int, rate: float) -> None:
    """The rate that a coin realises lies within the coin's confidence band with at least the stated
    probability, computed by an exact sum.
    """
    from scipy import stats

    low, high = coin_band(n, rate)
    inside = stats.binom.cdf(round(high * n), n, rate) - stats.binom.cdf(
        round(low * n) - 1, n, rate
    )
    assert inside >= 0.95 - 1e-9


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    """A report of a folder without a journal, in an unknown format, or of a run without a folder is
    an error.
    """
    with pytest.raises(JournalError, match="no run here"):
        build_report(tmp_path)
    with pytest.raises(OptionError, match="markdown"):
        atts.report(tmp_path, format="markdwon")  # type: ignore[arg-type]
    result = atts.evaluate_sync(toy_problems(1), atts.Setup(draft="scripted", target="scripted"))
    with pytest.raises(UsageError, match="directory"):
        atts.report(result)


def test_the_command_prints_the_path_and_the_verdict(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`atts report` prints the path on stdout and the verdict on stderr. With `--json` the command
    prints one object, and with `-` it writes the report to stdout.
    """

    def command(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run_command(["report", str(run), *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    code, out, told = command("--out", str(tmp_path / "r.html"))
    assert (code, out.strip()) == (0, str(tmp_path / "r.html"))
    assert "chunks escalated" in told
    assert json.loads(command("--json", "--out", str(tmp_path / "r.html"))[1])["standing"] in (
        "good",
        "care",
    )
    assert command("--format", "md", "--out", "-")[1].startswith("# atts report")
    assert command("--format", "pdf")[0] == 2


def test_a_large_run_shows_some_problems_and_links_to_all(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of a large run lists problems without a correct answer first. Each problem has a
    row, and the totals cover all problems.
    """
    monkeypatch.setattr("atts.analysis.reports.run_data.MOST", 5)
    built = build_report(run)
    rows = built.report.problems
    shown = shown_problems(built.report)
    assert len(shown) == 5
    assert [place for place, _ in shown] == sorted(place for place, _ in shown)
    wanted = {row.id for row in rows if row.verdict != "correct" or row.flags}
    hidden = {row.id for row in rows} - {row.id for _, row in shown}
    assert not (hidden & wanted) or len(wanted) >= 5
    page = save_report(built, "html", tmp_path / "page.html").read_text()
    for place, row in enumerate(rows):
        is_shown = (place, row) in shown
        assert (f'id="packed-{place}"' in page) == is_shown
        assert bool(built.pages[row.id]) or not is_shown
    assert "5 of 12 problems are on this page" in page
    assert '<a href="page.problems.jsonl">' in page
    lines = (tmp_path / "page.problems.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [row.id for row in rows]
    assert "12 problems" in built.report.verdict.line
    # the report's file name may contain characters that have a meaning in URLs
    page = save_report(built, "html", tmp_path / "100%#1 <b>?.html").read_text()
    assert '<a href="100%25%231%20%3Cb%3E%3F.problems.jsonl">' in page
    assert (tmp_path / "100%#1 <b>?.problems.jsonl").is_file()
    # a page on stdout has no file of problems next to it
    assert "problems.jsonl" not in render(built, "html")


def test_tokens_that_repair_keeps_are_counted_once() -> None:
    """`repair` keeps the first tokens of a chunk, so they are not counted again as written."""
    whole = Chunk("draft", "a b c", (1, 2, 3), (1, 2, 3), "length", (-1.0, -1.0, -1.0))
    part = Chunk("draft", "a b", (1, 2), (1, 2), "length")
    other = Chunk("draft", "x", (9,), (9,), "length")
    rest = Chunk("target", " d", (4,), (4,), "length", (-0.5,))
    turn = Turn(0, (part, rest), (whole,))
    assert (turn.tokens_written("draft"), turn.tokens_written("target")) == (3, 1)
    # the tokens after the kept beginning of the chunk count as written
    assert Turn(0, (other, rest), (whole,)).tokens_written("draft") == 4


def test_a_small_run_is_reported_in_one_file(run: Path, tmp_path: Path) -> None:
    """If all problems fit into the page, no file is written next to it."""
    page = save_report(build_report(run), "html", tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == [page]
    assert "are on this page" not in page.read_text()


def test_the_table_of_times_says_how_many_calls_it_covers(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a run has many calls, the table of times covers only the first ones, and the report states
    the total number of calls.
    """
    whole = build_report(run).report.timing
    assert whole is not None
    assert whole.calls == whole.nodes
    monkeypatch.setattr("atts.analysis.reports.run_data.TIMED", 20)
    built = build_report(run)
    assert built.report.timing is not None
    assert (built.report.timing.nodes, built.report.timing.calls) == (20, whole.calls)
    assert f"only the first 20 of {whole.calls:,} calls" in render(built, "html")


_TEXTS = st.sampled_from(["", "a", "question 7", "π"])
_VALUES = st.none() | st.floats(allow_nan=False)
_STEPS = st.builds(
    GateStep,
    st.sampled_from(["decided", "observed"]),
    st.builds(
        Decision,
        st.sampled_from(["accept", "verify", "escalate"]),
        st.floats(allow_nan=False),
        _TEXTS,
        turn=st.integers(0, 1 << 40),
        sample=st.integers(0, 1 << 40),
        issue=st.none() | st.integers(0, 1 << 40),
        score=_VALUES,
        p=_VALUES,
        origin=st.sampled_from(["gate", "forced", "budget"]),
        length=_VALUES,
    ),
    st.booleans(),
    _VALUES,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(_STEPS, max_size=12))
def test_steps_come_back_from_their_columns(steps: list[GateStep]) -> None:
    """`StepLog` stores gate steps in columns. Reading them back returns equal steps, also in slices
    and by kind, and with None, infinities and zeros.
    """
    log = StepLog()
    for step in steps:
        log.append(step)
    assert len(log) == len(steps)
    assert list(log.between(0, len(log))) == steps
    assert list(log.between(2, len(log))[1:3]) == steps[2:][1:3]
    assert list(log.of_kind("observed")) == [step for step in steps if step.kind == "observed"]


def test_a_chart_of_many_questions_draws_some() -> None:
    """With many questions, the chart draws every n-th question by rank, over the whole axis."""
    groups = tuple(GroupRate(f"q{n}", 10, n % 11, 0.0, 1.0) for n in range(4000))
    steps = [GateStep("observed", Decision("accept", 0.2, "q"), False)]
    few = rate_control(steps, StatedGuarantee("aci", "", "", ""), ())
    control = replace(few, by_question=groups, questions=4000, decisions=40_000)
    chart = next(one for one in calibration_charts(control) if one.title == "Rate by question")
    assert 500 <= chart.picture.count("<circle") <= 1001
    assert "one of every 4 questions" in chart.caption


@pytest.mark.parametrize(("warned", "standing"), [(2, "good"), (5, "care")])
def test_few_problems_out_of_domain_are_no_reason_to_distrust_a_run(
    warned: int, standing: Standing, run: Path
) -> None:
    """Some warnings about problems out of domain are normal. Only more warnings than chance
    explains lower the report's verdict.
    """
    data = read_run_data(run, 1_000_000)
    names = list(data.problems)[:warned]
    data.warned.extend(Warned("domain", "out of domain: worse scores", name) for name in names)
    (caveat,) = [one for one in run_caveats(data) if one.code == "domain"]
    assert caveat.standing == standing
    assert "by chance, up to" in caveat.text


@pytest.mark.parametrize("words", [*WORDS.flags.values(), *WORDS.problems.values()])
def test_a_caveat_about_one_thing_is_a_correct_sentence(words: CaveatWords) -> None:
    """The verb after the number fits one thing and several things, and no pronoun in the sentence
    stands for several things.
    """
    sentence = Caveat("any", words.standing, 1, words.text).sentence
    assert re.match(r"1 [a-z]*[^s] (ended|failed|had|could|did)\b", sentence)
    assert not re.search(r"\b(their|they|them)\b", sentence)
