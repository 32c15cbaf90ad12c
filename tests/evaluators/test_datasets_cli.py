"""Tests of `atts datasets`, which lists benchmarks and shows problems."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atts.evaluators.datasets.tables import BENCHMARKS


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Write three problems to a file."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"Q": f"question {at}", "answer": at, "level": at}) + "\n" for at in range(3)
        )
    )
    return path


def atts(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would, without a network and with an empty cache."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "atts", "datasets", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_list_names_every_benchmark(tmp_path: Path) -> None:
    """The list is plain text or one JSON object per line, and loads no benchmark."""
    plain = atts(tmp_path)
    machine = atts(tmp_path, "list", "--json")
    assert (plain.returncode, machine.returncode) == (0, 0), plain.stderr + machine.stderr
    assert all(name in plain.stdout for name in BENCHMARKS)
    records = [json.loads(line) for line in machine.stdout.splitlines()]
    assert [record["name"] for record in records] == list(BENCHMARKS)
    assert all(record["cached"] == [] for record in records)


def test_show_prints_the_record_and_the_problems(tmp_path: Path, rows: Path) -> None:
    """The record comes first, then each problem, with the requested selection and column mapping."""
    done = atts(
        tmp_path,
        "show",
        f"{rows}[1:]",
        "--column",
        "text=Q",
        "--level",
        "1",
        "--level",
        "2",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    record, *problems = [json.loads(line) for line in done.stdout.splitlines()]
    assert (record["type"], record["problems"], len(record["digest"])) == ("dataset", 1, 64)
    assert [(it["type"], it["text"], it["answer"]) for it in problems] == [
        ("problem", "question 2", "2")
    ]
    plain = atts(tmp_path, "show", str(rows), "--column", "text=Q", "--limit", "1")
    assert "rows/0" not in plain.stdout.splitlines()[0]
    assert "question 0" in plain.stdout
    assert "question 1" not in plain.stdout
    assert "2 more" in plain.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["math500"], "hf download --repo-type dataset HuggingFaceH4/MATH-500"),
        (["mathh500"], "did you mean 'math500'"),
        (["{rows}"], "Columns found: Q, answer, level. "),
        (["{rows}", "--column", "Q"], "FIELD=COLUMN"),
        (["{rows}", "--network", "sometimes"], "sometimes"),
    ],
)
def test_errors_are_one_message_and_code_two(
    tmp_path: Path, rows: Path, words: list[str], says: str
) -> None:
    """An error of `atts datasets` is one message on stderr with exit code 2, without a traceback,
    and stdout is empty.
    """
    done = atts(tmp_path, "show", *(word.format(rows=rows) for word in words))
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
