"""Tests of `atts grade` and of `atts.grade` in Python: a verdict per record, then a summary."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import atts.evaluators as atts_evaluators
from atts.cli.app import run
from atts.errors import DatasetError
from atts.evaluators import RULES, GradeTally, grade, reference

RECORDS: list[dict[str, Any]] = [
    {"id": "a", "gold": r"\frac{1}{2}", "answer": "0.5"},
    {"id": "b", "gold": "4", "text": r"First \boxed{3}, but actually \boxed{4}."},
    {"id": "c", "gold": "12", "answer": "21"},
    {"id": "d", "gold": "5", "text": r"so it must be \boxed{5"},
    {"id": "e", "gold": "5", "answer": None},
    {"id": "f", "gold": "B", "text": "I choose (B).", "kind": "choice"},
    {"id": "g", "gold": "5", "answer": r"\sum_{p \text{ prime}} \frac{1}{p^2}"},
    {"id": "h", "gold": 7, "answer": 7.0},
]
STATUS = ["equal", "equal", "different", "different", "different", "equal", "unscored", "equal"]


@dataclass
class Done:
    """A command's exit code and output."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def atts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Return a function that runs the command line in this process, with its own stdin."""

    def call(*words: str, stdin: str = "") -> Done:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = run(["grade", *words])
        printed = capsys.readouterr()
        return Done(code, printed.out, printed.err)

    return call


def lines(records: list[dict[str, Any]]) -> str:
    """Write records as JSONL."""
    return "".join(json.dumps(record) + "\n" for record in records)


def test_json_is_one_verdict_per_line_then_a_summary(
    tmp_path: Path, atts: Callable[..., Done]
) -> None:
    """Each record has its line, in order, and the summary counts all records."""
    file = tmp_path / "answers.jsonl"
    file.write_text(lines(RECORDS))
    done = atts(str(file), "--json")
    assert done.returncode == 0, done.stderr
    *verdicts, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert [verdict["status"] for verdict in verdicts] == STATUS
    assert [verdict["id"] for verdict in verdicts] == list("abcdefgh")
    assert verdicts[1]["answer"] == "4"
    assert {name: summary[name] for name in ("n", "equal", "different", "unscored", "no_answer", "cut")} == {
        "n": 8, "equal": 4, "different": 3, "unscored": 1, "no_answer": 1, "cut": 1,
    }  # fmt: skip
    assert summary["accuracy"] == 0.5
    assert summary["interval"][0] < 0.5 < summary["interval"][1]


def test_a_dash_reads_stdin(atts: Callable[..., Done]) -> None:
    """For records from stdin, `atts grade -` prints a line per record and a summary with its
    interval.
    """
    done = atts("-", stdin=lines(RECORDS[:1]))
    assert done.returncode == 0, done.stderr
    assert "equal" in done.stdout.splitlines()[0]
    assert "1 record: 1 equal" in done.stdout


@pytest.mark.parametrize(
    ("stdin", "word"),
    [
        ('{"answer": "5"}\n', "gold"),
        ('{"gold": "5"}\n', "answer"),
        ("not json\n", "line 1"),
        ('{"gold": "5", "answer": "5"}\n[]\n', "line 2"),
        ('{"gold": "5", "answer": "5", "kind": "number"}\n', "kind"),
        ('{"gold": "5", "answer": ["5"]}\n', "list"),
    ],
)
def test_a_bad_record_is_a_usage_error_under_strict(
    stdin: str, word: str, atts: Callable[..., Done]
) -> None:
    """With `--strict` a bad record ends the command with exit code 2, and the message names the
    record and its fault.
    """
    done = atts("-", "--json", "--strict", stdin=stdin)
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_record_is_reported_and_the_rest_is_graded(atts: Callable[..., Done]) -> None:
    """Bad records are reported with their index and not counted in the accuracy; the other records
    are graded as usual.
    """
    stdin = 'not json\n{"gold": "5"}\n{"gold": "5", "answer": "5"}\n'
    done = atts("-", "--json", stdin=stdin)
    assert done.returncode == 0
    first, second, verdict, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert [first["type"], first["index"]] == ["bad_record", 0]
    assert [second["type"], second["index"]] == ["bad_record", 1]
    assert "answer" in second["problem"]
    assert [verdict["status"], verdict["index"]] == ["equal", 2]
    assert [summary["n"], summary["bad_records"], summary["accuracy"]] == [1, 2, 1.0]
    assert done.stderr.count("not graded:") == 2
    words = atts("-", stdin=stdin)
    assert words.stdout.endswith("(95 % Wilson interval); 2 records not graded\n")


def test_nothing_but_bad_records_is_a_usage_error(atts: Callable[..., Done]) -> None:
    """If every record of a file is bad, the file probably has another format, so atts refuses the
    file.
    """
    done = atts("-", stdin='{"gold": "5"}\n')
    assert done.returncode == 2
    assert "no record could be graded" in done.stderr


def test_explain_shows_what_was_compared(atts: Callable[..., Done]) -> None:
    """`--explain` shows references, the extracted answer, the rule in words, and both answers as
    the grader read them.
    """
    record = {"gold": ["3", r"\dfrac{1}{2}"], "text": "The answer is 0.5."}
    plain = atts("-", stdin=lines([record]))
    assert "reference" not in plain.stdout
    done = atts("-", "--explain", stdin=lines([record]))
    shown = done.stdout.splitlines()
    assert shown[1:4] == [
        "    reference  3", r"    reference  \dfrac{1}{2}", "    answer     0.5 (marker)",
    ]  # fmt: skip
    assert shown[4].startswith("    rule       value: the values of both answers were computed")
    assert shown[5] == r"    detail     read as \dfrac{1}{2} and 0.5"


def test_every_rule_is_explained() -> None:
    """Each rule in the grader's source has an explanation for `--explain`."""
    written = set[str]()
    for path in Path(atts_evaluators.__file__).parent.rglob("*.py"):
        pattern = r'(?:ruled|Verdict|_verdict)\((?:[^"()]|\([^()]*\))*(?:"(?:equal|different|unscored)", )?"([a-z ]+)"'
        written |= set(re.findall(pattern, path.read_text(encoding="utf-8")))
    written -= {"equal", "different", "unscored"}
    assert len(written) > 20
    assert written - set(RULES) == set()


def test_a_missing_file_and_a_misspelt_option_are_usage_errors(atts: Callable[..., Done]) -> None:
    """For a missing file or a misspelt option, `atts grade` exits with code 2, and the message
    names the file or the option.
    """
    assert atts("nowhere.jsonl").returncode == 2
    assert atts("-", "--fallback", "last", stdin="").returncode == 2


def test_the_python_function_equals_the_command() -> None:
    """`atts.grade` returns the same verdicts and counts as the command."""
    tally = GradeTally()
    found = list(grade(RECORDS))
    for each in found:
        tally.add(each)
    assert [each.verdict.status for each in found] == STATUS
    assert tally.as_json()["n"] == 8
    with pytest.raises(DatasetError, match="record 1"):
        next(grade([{"gold": "1"}]))


def test_expected_verdicts_are_compared() -> None:
    """If records have an expected verdict, the summary counts the verdicts that agree, and also the
    pairs that were wrongly called equal.
    """
    tally = GradeTally()
    for each in grade(
        [
            {"gold": "1", "answer": "1.0", "expected": False},
            {"gold": "1", "answer": "2", "expected": False},
        ]
    ):
        tally.add(each)
    assert tally.as_json()["expected"] == {"of": 2, "right": 1, "false_equal": 1}


def test_a_worked_solution_serves_as_reference() -> None:
    """If the reference is a worked solution, the answer in its box is compared. A short reference
    is compared as it is.
    """
    assert reference(r"Adding gives $2x=6$, so $x=\boxed{3}$.") == "3"
    assert reference("The Answer Is Blue") == "The Answer Is Blue"


def test_undisputed_texts_are_graded_correctly(shared_data: Path) -> None:
    """Undisputed texts that need extraction are graded correctly."""
    text = (shared_data / "equivalence/cases.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.split("\n") if line]
    rows = [row for row in rows if row["tag"] == "core" and row["kind"] == "text"]
    records = [{"id": row["id"], "gold": row["gold"], "text": row["pred"]} for row in rows]
    wrong = [
        each.id
        for each, row in zip(grade(records), rows, strict=True)
        if each.verdict.is_equal != row["expected"]
    ]
    assert len(rows) > 80
    assert wrong == []


def test_any_of_several_references_is_correct() -> None:
    """If a record has several references, an answer is correct if it equals one of them, even if
    another one cannot be read.
    """
    records: list[dict[str, object]] = [
        {"gold": ["1/2", "2"], "answer": "0.5"},
        {"gold": ["1/2", 2], "text": "The answer is 2."},
        {"gold": ["3", "4"], "answer": "5"},
        {"gold": [], "answer": "5"},
    ]
    found = [each.verdict.status for each in grade(records)]
    assert found == ["equal", "equal", "different", "unscored"]


def test_a_verdict_shows_what_was_read() -> None:
    """The verdict quotes both answers as the grader read them, after the verdict's reason if it has
    one.
    """
    (graded,) = grade([{"gold": r"\dfrac{1}{2}", "answer": "$0.25$"}])
    assert graded.verdict.detail == r"read as \dfrac{1}{2} and 0.25"
