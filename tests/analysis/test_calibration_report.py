"""Tests of the calibration report of a run and of replayed scores."""

from __future__ import annotations

import json
import random
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atts.analysis import (
    CalibrationReport,
    build_report,
    calibration_format,
    calibration_of_scores,
    render_calibration,
    save_calibration,
)
from atts.analysis.reports.calibration import calibration_headline, calibration_points
from atts.analysis.reports.charts import calibration_charts
from atts.analysis.reports.render import save_figures, standalone
from atts.api import Setup, calibration_report, evaluate_sync, scores_of
from atts.calibration import Calibrator, StoredScores, examine, scale_named
from atts.errors import CalibrationInputError, JournalError, OptionError, UsageError
from atts.journal import MANIFEST, load_manifest, save_manifest
from atts.testing import ScriptedEngine, Skill, ToyModel, ToyTokenizer, toy_problems


def _scores(questions: int = 12, each: int = 20, seed: int = 0) -> StoredScores:
    """Sample perplexities, over two turns, for questions with different mean perplexities."""
    draw = random.Random(seed)
    hard = [draw.uniform(0.2, 1.5) for _ in range(questions)]
    rows = [
        {"question": f"q{n}", "turn": place % 2, "score": 1 + draw.expovariate(1 / hard[n])}
        for n in range(questions)
        for place in range(each)
    ]
    return StoredScores.from_records(rows)


@pytest.fixture(scope="module")
def of_run(run: Path) -> CalibrationReport:
    """Make the calibration report of a finished run."""
    return calibration_report(run)


def test_a_run_is_reported_at_its_own_rate(run: Path, of_run: CalibrationReport) -> None:
    """The calibration report shows the decisions that the run made, at the rate of the run."""
    held = build_report(run).report.calibration
    assert held is not None
    assert of_run.control == held
    assert (of_run.kind, of_run.rate, of_run.mode) == ("run", 0.3, "question-turn")
    assert of_run.health == examine(scores_of(run), 0.3)
    counts = f"{held.escalated} of {held.decisions} chunks escalated"
    assert of_run.headline.sentence.startswith(counts)
    assert of_run.headline.sentence.endswith("at a nominal rate of 30 %: on target")
    assert of_run.standing == "good"


def test_a_run_at_another_rate_is_decided_again(run: Path, of_run: CalibrationReport) -> None:
    """If another rate is given, the report counts the decisions of a replay at that rate, and names
    its source as "decided again".
    """
    other = calibration_report(run, rate=0.6)
    assert (other.kind, other.rate, other.control.decisions) == ("scores", 0.6, len(scores_of(run)))
    assert other.control.escalated > of_run.control.escalated
    assert other.source.endswith("decided again")


def test_scores_get_the_decisions_of_a_live_calibrator() -> None:
    """For given scores, the reported realised rate, effective sample size and guarantee equal those
    of a calibrator that sees the scores one by one.
    """
    scores = _scores()
    found = calibration_of_scores("mine", scores, 0.4, "aci")
    assert (found.kind, found.control.decisions, found.control.questions) == ("scores", 240, 12)
    assert abs(found.control.escalated / 240 - 0.4) < 0.06
    assert found.headline.numbers[3].value == f"{found.health.clusters.effective:,.0f}"
    assert f"{found.control.escalated} of 240 chunks escalated" in found.promise.guarantee
    low, high = found.health.long_run_clustered
    assert f"{100 * low:.1f} to {100 * high:.1f} %" in found.headline.sentence
    assert [chart.title for chart in calibration_charts(found.control)] == [
        "Rate by turn", "Rate by question", "Rate over time", "Reliability", "Histogram of p-values", "Drift",
    ]  # fmt: skip


def test_drift_and_a_missed_rate_are_reported() -> None:
    """If questions become harder, the report has a drift alarm; a rate outside its confidence band
    is reported as doubtful.
    """
    rows = [{"question": f"q{n // 20}", "score": 1.1 + n / 100 + n % 20 / 50} for n in range(600)]
    found = calibration_of_scores("mine", StoredScores.from_records(rows), 0.3, "marginal")
    drift = found.control.drift
    assert drift is not None
    assert drift.peak >= drift.alarm
    assert found.headline.numbers[4].value == "1"
    doubts = " ".join(text for _, text in found.points)
    assert "the drift statistic passed the alarm level" in doubts
    assert "if a calibrator decided on the stored scores in the order of the file: 5" in doubts
    assert "off target" in doubts
    assert found.standing == "care"


def test_a_calibrator_brings_its_rate_and_its_mode(tmp_path: Path) -> None:
    """The report of a fitted calibrator uses the calibrator's rate; if another rate is given, the
    scores are decided again.
    """
    made = Calibrator(0.15, "question", stored=_scores())
    made.save(tmp_path / "calibrator.json")
    found = calibration_report(tmp_path / "calibrator.json")
    assert (found.kind, found.rate, found.mode) == ("calibrator", 0.15, "question")
    assert found.promise.guarantee == made.guarantee
    assert calibration_report(tmp_path / "calibrator.json", rate=0.5).kind == "scores"


def _labelled(path: Path, labels: Sequence[Any]) -> Path:
    rows = [
        {
            "question": f"q{n % 9}",
            "score": 1 + (n * 37 % 100) / 50,
            **({} if label is None else {"correct": label}),
        }
        for n, label in enumerate(labels)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_labels_show_whether_scores_predict_wrong_answers(tmp_path: Path) -> None:
    """If worse scores belong to wrong answers, the p-values of wrong and of correct answers differ;
    with random labels they do not differ.
    """
    telling = [n * 37 % 100 < 60 for n in range(300)]
    found = calibration_report(_labelled(tmp_path / "a.jsonl", telling)).labelled
    assert found is not None
    assert found.auroc.value > 0.9 > found.auroc.low > 0.8
    assert found.gain.low > 0.1
    assert found.bins[0].right.value > 0.9 > 0.2 > found.bins[-1].right.value
    assert sum(one.right.n_samples for one in found.bins) == found.labelled == 300
    draw = random.Random(1)
    chance = calibration_report(
        _labelled(tmp_path / "b.jsonl", [draw.random() < 0.5 for _ in range(300)])
    ).labelled
    assert chance is not None
    assert chance.auroc.low < 0.5 < chance.auroc.high
    assert chance.gain.low < 0 < chance.gain.high
    some = calibration_report(_labelled(tmp_path / "c.jsonl", [1, 0, None] * 40)).labelled
    assert some is not None
    assert some.labelled == 80
    assert calibration_report(_labelled(tmp_path / "d.jsonl", [None] * 30)).labelled is None
    alike = calibration_report(_labelled(tmp_path / "e.jsonl", [True] * 30))
    assert "cannot show whether the score finds" in render_calibration(alike, "html")


def test_the_labels_of_a_run_are_its_verdicts(run: Path, of_run: CalibrationReport) -> None:
    """Each kept chunk of a graded rollout gets the verdict of its rollout as its label."""
    assert of_run.labelled is not None
    assert 0 < of_run.labelled.labelled <= of_run.control.decisions - of_run.control.escalated
    assert all(one.low <= one.high for one in of_run.labelled.bins)


def test_gain_over_a_coin_is_the_first_number(tmp_path: Path) -> None:
    """The report's first number is the gain over a coin with its interval; the second is the AUROC
    within questions.
    """
    telling = [n * 37 % 100 < 60 for n in range(300)]
    report = calibration_report(_labelled(tmp_path / "a.jsonl", telling))
    assert report.labelled is not None
    gain, auroc = report.headline.numbers[:2]
    assert gain.value == report.labelled.gain.signed()
    assert gain.what.startswith("gain over a coin")
    assert gain.note.endswith("by verdicts on the rollouts that contain the chunks")
    assert auroc.value == report.labelled.auroc.brief()
    alike = calibration_report(_labelled(tmp_path / "b.jsonl", [True] * 30))
    assert alike.headline.numbers[0].value == "cannot tell"


def test_without_verdicts_the_votes_are_the_labels(tmp_path: Path) -> None:
    """Without references, a rollout that disagrees with its problem's vote is labelled wrong, and a
    note says so.
    """
    problems = [replace(problem, answer=None) for problem in toy_problems(40)]
    slips = ToyModel(Skill(right=0.6, repair=0.0), ToyTokenizer())
    draft = ScriptedEngine("draft", model=slips)
    setup = Setup(draft=draft, target="scripted", rate=0.1)
    setup = replace(setup, policy=replace(setup.policy, early_stop="none"))
    evaluate_sync(problems, setup, directory=tmp_path / "run")
    report = calibration_report(tmp_path / "run")
    assert report.labelled is not None
    assert report.labelled.labels == "votes"
    assert "whether the chunks' rollouts agree with the vote" in report.headline.numbers[0].note


def test_a_run_of_a_coin_reports_no_score(tmp_path: Path) -> None:
    """A coin does not score chunks, so its report says that the score is unknown."""
    setup = Setup(draft="scripted", target="scripted", method="coin", rate=0.3)
    evaluate_sync(toy_problems(4), setup, directory=tmp_path / "run")
    with pytest.raises(CalibrationInputError):
        calibration_report(tmp_path / "run")


def test_a_missed_rate_is_reported_first(of_run: CalibrationReport) -> None:
    """If a run escalated everything, the report's sentence, verdict and first caveat name the
    missed rate.
    """
    found = of_run
    groups = tuple(replace(group, escalated=group.decisions) for group in found.control.by_question)
    left = replace(found.control, escalated=found.control.decisions, by_question=groups)
    sentence = calibration_headline("run", found.health, left, None).sentence
    assert sentence.endswith("nominal rate of 30 %: off target")
    assert calibration_points("run", found.health, left)[0][0] == "bad"


def test_scores_of_two_questions_are_reported_as_copies() -> None:
    """If one score occurs in two questions, the report says not to rely on the scores."""
    once = _scores(6).scores
    copied = StoredScores((*once, *once), tuple(f"q{n // 20}" for n in range(240)), (0,) * 240)
    found = calibration_of_scores("mine", copied, 0.4, "aci")
    assert found.standing == "bad"
    assert "occur in another question" in found.points[0][1]


def test_scores_without_questions_give_a_bound_only(tmp_path: Path) -> None:
    """If the scores do not name their questions, the report has no modes or charts per question.
    The effective sample size is then an upper bound.
    """
    np.save(tmp_path / "s.npy", np.array([1 + n * 37 % 101 / 50 for n in range(200)]))
    with pytest.raises(CalibrationInputError, match="do not name their questions"):
        calibration_report(tmp_path / "s.npy", rate_scope="question")
    found = calibration_report(tmp_path / "s.npy")
    assert "Rate by question" not in [chart.title for chart in calibration_charts(found.control)]
    assert found.headline.numbers[3].note.startswith("an upper bound")
    assert "not known" in render_calibration(found, "markdown")


@pytest.mark.parametrize("mode", ["split", "marginal", "aci", "question", "question-turn"])
def test_every_mode_reports_its_guarantee(mode: Any) -> None:
    """In every mode, the calibration report states the guarantee of the mode."""
    found = calibration_of_scores("mine", _scores(5, 8), 0.3, mode)
    assert found.promise.mode == mode
    assert found.promise.guarantee
    assert render_calibration(found, "html").count("<svg") >= 6


@pytest.mark.parametrize("scale", ["logprob", "real"])
def test_log_probabilities_rank_lower_as_worse(scale: str) -> None:
    """The report ranks log-probabilities from high to low, because a lower one is worse."""
    draw = random.Random(2)
    raw = [draw.uniform(-3, -0.1) for _ in range(90)]
    scores = StoredScores(
        tuple(raw), tuple(f"q{n % 9}" for n in range(90)), (0,) * 90, scale_named(scale)
    )
    found = calibration_of_scores("mine", scores, 0.3, "aci")
    assert found.control.metrics["auroc_within_question_turn"] > 0.9
    assert abs(found.control.escalated - 27) < 8


def test_a_report_of_one_score_says_how_little_it_shows() -> None:
    """The report of a single score says that one score shows very little."""
    found = calibration_of_scores("mine", StoredScores((1.5,), ("q",), (0,)), 0.4, "aci")
    for format in ("html", "markdown", "json"):
        assert render_calibration(found, calibration_format(format, None))
    assert found.standing == "care"


def test_all_formats_say_the_same(of_run: CalibrationReport) -> None:
    """HTML, Markdown and JSON have the same sentence, numbers, guarantee and assumptions, and the
    JSON is strict.
    """
    page, words, data = (
        render_calibration(of_run, format) for format in ("html", "markdown", "json")
    )
    parsed = json.loads(data, parse_constant=pytest.fail)
    assert parsed["headline"]["sentence"] == of_run.headline.sentence
    assert parsed["promise"]["guarantee"] == of_run.promise.guarantee
    assert parsed["control"]["escalated"] == of_run.control.escalated
    for number in of_run.headline.numbers:
        assert number.note in words
        assert f"<b>{number.value}</b>" in page
    assert "Voided by:" in words
    assert "<dt>Voided by</dt>" in page
    assert "://" not in page


def test_the_histogram_band_covers_uniform_p_values() -> None:
    """Bars of uniform p-values stay within the band; if p-values gather in one bin, its bar leaves
    the band.
    """
    scores = StoredScores.of([1 + random.Random(n).random() for n in range(1200)])
    chart = calibration_charts(calibration_of_scores("mine", scores, 0.3, "marginal").control)[-2]
    assert chart.title == "Histogram of p-values"
    assert 'class="band"' in chart.picture
    assert 'class="bar off"' not in chart.picture
    rising = StoredScores.of([1 + n / 1000 for n in range(400)])
    worse = calibration_charts(calibration_of_scores("mine", rising, 0.3, "marginal").control)[-2]
    assert 'class="bar off"' in worse.picture


def test_figures_are_complete_svg_files(of_run: CalibrationReport, tmp_path: Path) -> None:
    """Each figure is written as an SVG with its own namespace and colours and without a script."""
    paths = save_calibration(of_run, "svg", tmp_path / "figures")
    assert len(paths) == len({path.name for path in paths}) == 7
    for path in paths:
        root = ET.fromstring(path.read_text())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.get("aria-label")
        assert "var(" not in path.read_text()


def test_png_needs_a_converter(
    of_run: CalibrationReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing a PNG without a converter raises an error that names a converter and says that SVG
    needs none. With a converter the PNG has twice the figure's size.
    """
    chart = calibration_charts(of_run.control)[0]
    if shutil.which("chromium") or shutil.which("rsvg-convert"):
        (path,) = save_figures([chart], tmp_path, "png")
        head = path.read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        assert int.from_bytes(head[16:20], "big") == 2 * int(
            ET.fromstring(standalone(chart)).get("width", "0")
        )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"rsvg-convert.*--format svg"):
        save_figures([chart], tmp_path, "png")


@pytest.mark.parametrize(
    ("format", "out", "found"),
    [(None, None, "html"), (None, "a.md", "markdown"), (None, "a.JSON", "json"), ("md", None, "markdown"),
     ("svg", "a", "svg"), ("html", "a.md", "html"), (None, "folder", "html")],
)  # fmt: skip
def test_an_explicit_format_wins_over_the_file_ending(
    format: str | None, out: str | None, found: str
) -> None:
    """The report has the requested format, or by default the format of the file's ending."""
    assert calibration_format(format, out and Path(out)) == found  # type: ignore[arg-type]  # "" is not a name here


def test_impossible_reports_are_refused(other_run: Path, tmp_path: Path) -> None:
    """An error is raised for a run without scores, a missing path, an unknown format, a PNG without
    a folder, and an invalid label.
    """
    with pytest.raises(CalibrationInputError, match="target scores in the run"):
        calibration_report(other_run)
    with pytest.raises(JournalError):
        calibration_report(tmp_path / "none")
    with pytest.raises(OptionError, match="'pdf'"):
        calibration_format("pdf", None)
    with pytest.raises(OptionError, match="folder"):
        render_calibration(calibration_of_scores("mine", _scores(), 0.4, "aci"), "png")
    with pytest.raises(CalibrationInputError, match="correct of record 2"):
        calibration_report(_labelled(tmp_path / "bad.jsonl", [True, "maybe"]))


@pytest.mark.parametrize(
    ("dtypes", "named"),
    [
        ({"draft": "float32", "target": "float32"}, ""),
        ({"draft": "float32", "target": "bfloat16"}, "target computed in bfloat16"),
        ({"draft": "bfloat16", "target": "bfloat16"}, "draft and target computed in bfloat16"),
        ({"draft": "of the server", "target": "of the server"}, ""),
    ],
)
def test_a_bfloat16_run_names_the_option_that_makes_it_repeatable(
    run: Path, tmp_path: Path, dtypes: dict[str, str], named: str
) -> None:
    """The report of a bfloat16 run says that the seed may not repeat the run, and names the option
    that makes runs repeatable; the report of a float32 run has no such note.
    """
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    manifest = load_manifest(copy / MANIFEST)
    assert manifest is not None
    engines = {role: {**engine, "dtype": dtypes[role]} for role, engine in manifest.engines.items()}
    (copy / MANIFEST).unlink()
    save_manifest(copy / MANIFEST, replace(manifest, engines=engines))
    control = build_report(copy).report.calibration
    assert control is not None
    voided = control.promise.voided_by
    assert ("bfloat16" in voided) == bool(named)
    assert named in voided
    assert ("?dtype=float32" in voided) == bool(named)
