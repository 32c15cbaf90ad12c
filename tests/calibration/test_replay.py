"""Tests of replaying scores in Python and by command, of the wording of guarantees, and of checks
of stored scores.
"""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from atts.api import Setup, evaluate_sync, scores_of
from atts.calibration import (
    MODES,
    Calibrator,
    Mode,
    StoredScores,
    replay_scores,
    short_replay_note,
)
from atts.calibration.controllers import DEFAULTS
from atts.calibration.drift import examine
from atts.calibration.online import METRICS
from atts.calibration.scores import read_scores
from atts.cli.app import run
from atts.errors import CalibrationInputError
from atts.testing import toy_problems

Records = list[dict[str, Any]]
FEW: Records = [
    {"question": k % 3, "turn": k % 2, "score": 1 + (k * 7 % 10) / 10, "sample": k}
    for k in range(40)
]


class Done(NamedTuple):
    """A command's exit code and output."""

    returncode: int
    stdout: str
    stderr: str


Atts = Callable[..., Done]


@pytest.fixture
def atts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Done]:
    """Return a function that runs the command line in this process."""

    def call(*words: str, text: str = "") -> Done:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        capsys.readouterr()
        code = run(["calibration", *words])
        printed = capsys.readouterr()
        return Done(code, str(printed.out), str(printed.err))

    return call


def lines_of(records: Records) -> str:
    """Write records as JSON Lines."""
    return "\n".join(json.dumps(record) for record in records)


def test_replay_equals_the_calibrator_in_a_loop() -> None:
    """Each replayed decision equals the decision of a calibrator that gets the scores one by one."""
    done = replay_scores(FEW, rate=0.4, mode="question-turn", seed=3)
    calibrator = Calibrator(0.4, "question-turn", seed=3)
    for record, decision in zip(FEW, done.decisions, strict=True):
        again = calibrator.decide(
            record["score"], str(record["question"]), record["turn"], record["sample"]
        )
        assert again == decision
        calibrator.observe(again)
    assert tuple(done.metrics) == METRICS
    assert done.escalated == calibrator.realised


def test_undefined_metrics_of_a_short_stream_are_nan() -> None:
    """A short stream of scores has no rolling rate, and an empty stream has no metric at all."""
    assert math.isnan(replay_scores(FEW, rate=0.4).metrics["worst_rolling_500"])
    empty = replay_scores([], rate=0.4)
    assert empty.decisions == ()
    assert all(map(math.isnan, empty.metrics.values()))


@pytest.mark.parametrize(
    "record",
    [
        {"turn": 0, "score": 1.5},
        {"question": 1, "score": 1.5},
        {"question": 1, "turn": 0},
        {"question": 1, "turn": -1, "score": 1.5},
        {"question": 1, "turn": "0", "score": 1.5},
        {"question": 1, "turn": 0, "score": 0.5},
        {"question": 1, "turn": 0, "score": math.nan},
        {"question": 1, "turn": 0, "score": None},
        {"question": 1, "turn": 0, "score": 1.5, "sample": -2},
    ],
)
def test_bad_records_are_refused(record: dict[str, Any]) -> None:
    """A missing field, an impossible turn and a value that is not a score are refused with errors."""
    with pytest.raises(CalibrationInputError):
        replay_scores([*FEW, record], rate=0.4)


def test_numpy_columns_are_accepted() -> None:
    """numpy's integers and floats count as integers and floats."""
    records = [{**r, "turn": np.int64(r["turn"]), "score": np.float64(r["score"])} for r in FEW]
    assert replay_scores(records, rate=0.4).decisions == replay_scores(FEW, rate=0.4).decisions


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_states_its_guarantee_with_numbers(mode: Mode) -> None:
    """In every mode the guarantee states the rate, the number of decisions so far and what voids
    it, and no placeholder is left.
    """
    stored = StoredScores.of([1.1 + 0.01 * k for k in range(64)], 16)
    done = replay_scores(FEW, rate=0.35, mode=mode, stored=stored, drift="report")
    count = sum(decision.escalate for decision in done.decisions)
    assert "nominal rate of 35 %" in done.guarantee
    assert f"{count} of 40 chunks escalated" in done.guarantee
    assert len(done.voided_by) > 40
    assert "{" not in done.guarantee + done.voided_by
    if mode == "split":
        assert "64 stored" in done.guarantee
        assert "4 questions" in done.voided_by
    if mode == "aci":
        # for 40 decisions the bound exceeds 1, so it is not printed
        assert " / T" not in done.guarantee
        many = replay_scores([*FEW] * 20, rate=0.35, mode=mode, stored=stored, drift="report")
        bound = (0.65 + DEFAULTS.aci_step) / DEFAULTS.aci_step
        assert (
            f"/ T of the nominal rate; now, after T = 800 decisions, this is {bound / 800:.4f}"
            in many.guarantee
        )
    if mode in ("question", "question-turn"):
        assert f"{DEFAULTS.limit_at(0.35) + 1:g} / n" in done.guarantee


def test_bounds_that_exclude_no_rate_are_not_printed() -> None:
    """After two decisions neither bound of `aci` excludes a rate; the bound of a question is
    printed once it excludes a rate.
    """
    calibrator = Calibrator(0.2, "aci")
    assert "there are too few decisions for a bound" in calibrator.guarantee
    assert "within" not in calibrator.guarantee
    facts = Calibrator(0.2, "question").guarantee
    bound = DEFAULTS.limit_at(0.2) + 1
    least = math.floor(bound / 0.8) + 1
    assert f"informative for questions of {least} decisions or more" in facts
    assert bound / least < 0.8 <= bound / (least - 1)


def test_replay_command_prints_one_object_per_decision_then_a_summary(
    tmp_path: Path, atts: Atts
) -> None:
    """Decisions and metrics equal those of the Python function, as strict JSON, from a file or from
    stdin.
    """
    path = tmp_path / "scores.jsonl"
    path.write_text(
        lines_of([*FEW, {"question": 9, "turn": 0, "score": math.inf}]).replace("Infinity", "1e999")
    )
    records = [*FEW, {"question": 9, "turn": 0, "score": math.inf}]
    expected = replay_scores(records, rate=0.4, mode="aci", seed=2)
    options = ("--rate", "0.4", "--rate-scope", "aci", "--seed", "2", "--json")
    outputs = [
        atts("replay", str(path), *options),
        atts("replay", "-", *options, text=path.read_text()),
    ]
    for done in outputs:
        assert done.returncode == 0, done.stderr
        *decisions, summary = [
            json.loads(line, parse_constant=pytest.fail) for line in done.stdout.splitlines()
        ]
        assert [row["escalate"] for row in decisions] == [d.escalate for d in expected.decisions]
        assert {row["type"] for row in decisions} == {"decision"}
        assert summary["type"] == "summary"
        assert summary["question_rms"] == pytest.approx(expected.metrics["question_rms"])
        assert summary["worst_rolling_500"] is None
        assert summary["guarantee"] == expected.guarantee
    words = atts("replay", str(path), "--rate", "0.4", "--rate-scope", "aci")
    assert "chunks escalated: realised rate" in words.stdout
    assert "guarantee" in words.stdout


@pytest.mark.parametrize(
    ("words", "text", "said"),
    [
        (("--rate-scope", "questions"), lines_of(FEW), "did you mean 'question'"),
        (("--rate", "1.4"), lines_of(FEW), "rate"),
        (("--drift", "panic"), lines_of(FEW), "drift"),
        (("--scale", "perplexit"), lines_of(FEW), "perplexity"),
        ((), '{"question": 1, "turn": 0, "score": NaN}', "score"),
        ((), '{"question": 1, "turn": 0, "sco', "line 1"),
        ((), '{"question": 1, "turn": 0}', "score"),
        (("--rate-scope", "split"), lines_of(FEW), "stored"),
    ],
)
def test_replay_command_refuses_bad_input_in_one_line(
    words: tuple[str, ...], text: str, said: str, atts: Atts
) -> None:
    """The exit code is 2, and one line names the problem, without a traceback."""
    done = atts("replay", "-", *words, text=text)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"score": 1.2, "turn": "a"}', "turn of record 3"),
        ('{"score": 1.2, "turn": 1.7}', "turn of record 3"),
        ('{"score": 1.2, "turn": -1}', "turn of record 3"),
        ('{"score": NaN}', "line 3 is .* contains NaN"),
        ('{"ppl": 1.2}', "record 3"),
    ],
)
def test_a_bad_stored_record_is_named(line: str, said: str, tmp_path: Path) -> None:
    """The error for a bad stored record names the record, and no value is rounded or converted
    silently.
    """
    file = tmp_path / "scores.jsonl"
    file.write_text('{"score": 1.5}\n{"score": 1.6}\n' + line)
    with pytest.raises(CalibrationInputError, match=said):
        read_scores(file)


def test_a_bad_score_in_a_stream_is_named_by_its_record() -> None:
    """The error for a bad score in a stream gives the record's number, so that the user finds it
    among many lines.
    """
    with pytest.raises(CalibrationInputError, match="score of record 41 is nan"):
        replay_scores([*FEW, {"question": 1, "turn": 0, "score": float("nan")}], rate=0.4)


def test_files_without_scores_are_refused(tmp_path: Path, atts: Atts) -> None:
    """Empty files, binary files, files without numbers, empty calibrators and missing folders each
    give their own error message.
    """
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.npy").write_text("hello")
    (tmp_path / "calibrator.json").write_text('{"kind": "atts calibrator"}')
    (tmp_path / "good.jsonl").write_text('{"score": 1.5, "question": 1, "turn": 0}')
    for words, said in {
        "replay empty.jsonl": "number of records",
        "report empty.jsonl": "number of scores",
        "report binary.jsonl": "not text",
        "report broken.npy": "an .npy file with a one-dimensional array of numbers",
        "report calibrator.json": "a saved calibration with a digest",
        "import good.jsonl --out absent/scores.json": "Create the folder",
    }.items():
        command, name, *more = words.split()
        more = [str(tmp_path / word) if "/" in word else word for word in more]
        done = atts(command, str(tmp_path / name), *more)
        assert said in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
        assert done.returncode in (2, 4)


def test_import_fit_report_and_check_work_together(tmp_path: Path, atts: Atts) -> None:
    """`atts import` makes a file of scores, `fit` a calibrator that resumes, `report` a report, and
    `check` a verdict with an exit code.
    """
    draw = np.random.default_rng(0)
    levels = np.repeat(draw.normal(0.5, 0.15, size=40), 16)
    scores = np.exp(np.abs(levels + draw.normal(0, 0.1, size=640)))
    np.save(tmp_path / "good.npy", scores)
    np.save(tmp_path / "bad.npy", np.repeat(scores[::2], 2))
    saved = str(tmp_path / "scores.json")
    imported = atts(
        "import",
        str(tmp_path / "good.npy"),
        "--per-question",
        "16",
        "--condition",
        "target.model=m",
        "--out",
        saved,
    )
    assert imported.returncode == 0, imported.stderr
    fitted = atts(
        "fit",
        saved,
        "--rate",
        "0.3",
        "--rate-scope",
        "aci",
        "--out",
        str(tmp_path / "c.json"),
        "--json",
    )
    assert fitted.returncode == 0, fitted.stderr
    assert "0.3" in json.loads(fitted.stdout)["guarantee"]
    assert (
        Calibrator.load(tmp_path / "c.json", fingerprint={"target.model": "m"}).p_value(99.0) > 0.99
    )
    report = json.loads(atts("report", saved, "--json").stdout)
    assert report["clusters"]["clusters"] == 40
    assert report["repeats"]["within"] == 0
    assert any("effective sample size" in warning for warning in report["warnings"])
    assert "escalate if worse than" in atts("report", saved).stdout
    long_chunks = tmp_path / "products.jsonl"
    rows = [{"question": k // 16, "turn": k // 639, "score": math.exp(k % 190)} for k in range(640)]
    long_chunks.write_text(lines_of(rows))
    products = str(tmp_path / "products.json")
    words = "--condition", "score.kind=speculative", "--out", products
    assert atts("import", str(long_chunks), *words).returncode == 0
    shown = atts("report", products, "--rate", "0.3").stdout
    assert "e+" not in shown
    assert "nats per chunk" in shown
    assert "  turn 0      639 scores, median" in shown
    assert "  turn 1         1 score, median" in shown
    assert atts("check", saved).returncode == 0
    broken = atts("check", str(tmp_path / "bad.npy"), "--per-question", "16", "--json")
    assert broken.returncode == 5
    assert json.loads(broken.stdout)["events"][0]["kind"] == "duplicates"
    live = tmp_path / "live.jsonl"
    rows = [
        {"question": k // 16, "turn": 0, "score": float(score) * 1.7}
        for k, score in enumerate(scores)
    ]
    live.write_text(lines_of(rows))
    assert atts("check", saved, "--live", str(live)).returncode == 5
    Path(saved).write_text(Path(saved).read_text()[:200])
    assert atts("report", saved).returncode == 2
    assert atts("report", str(tmp_path / "absent.npy")).returncode == 4


@pytest.mark.parametrize("bad", ["abc", [3], True, 10**400])
def test_impossible_lengths_and_shares_are_refused(bad: Any) -> None:
    """The error about an impossible length or share names its record."""
    rows = [{"question": 1, "turn": 0, "score": 1.5, "length": length} for length in (3, bad)]
    with pytest.raises(CalibrationInputError, match="length of record 2"):
        StoredScores.from_records(rows)
    with pytest.raises(CalibrationInputError, match="length of record 2"):
        replay_scores(rows, 0.5)
    with pytest.raises(CalibrationInputError, match="left of record 1"):
        replay_scores([{"question": 1, "turn": 0, "score": 1.5, "left": bad}], 0.5)


def test_check_of_a_published_array(array_of: Callable[..., StoredScores]) -> None:
    """The effective sample size of 1,600 scores is about 160. A threshold from half of the questions
    gives the other half a rate with an SD of 0.06 to 0.07.
    """
    health = examine(array_of(), 0.4)
    assert health.threshold == pytest.approx(1.64, abs=0.01)
    assert 0.055 <= health.half_split <= 0.075
    assert (
        health.long_run[1] - health.long_run[0]
        < 0.05
        < health.long_run_clustered[1] - health.long_run_clustered[0]
    )
    with pytest.raises(CalibrationInputError):
        examine(StoredScores.of([]), 0.4)
    tiny = examine(StoredScores.of([1.5, 1.6]), 0.1)
    assert any("needs more than 2 scores" in warning for warning in tiny.warnings)


def test_a_run_without_scores_says_that_there_is_nothing_to_calibrate() -> None:
    """The scores of a run whose gate requests none are an error that names the reason and another
    command.
    """
    result = evaluate_sync(
        toy_problems(2), Setup(draft="scripted", target="scripted", method="coin")
    )
    with pytest.raises(CalibrationInputError, match=r"requests no target scores.*`atts report`"):
        scores_of(result)


def test_the_note_on_few_scores_names_aci_only_if_aci_decided() -> None:
    """Only mode "aci" escalates less while it has few scores, so other gates' notes leave it out."""
    modes: tuple[Mode | None, ...] = ("aci", "marginal", None)
    notes = {mode: short_replay_note(0.1, 0.6, 16, 16, mode) for mode in modes}
    assert all(note.startswith("the replay has only 16 scores") for note in notes.values())
    assert [mode for mode, note in notes.items() if "aci" in note] == ["aci"]
