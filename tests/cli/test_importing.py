"""Tests of the commands `import` and `export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Atts


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Write rollouts of another tool: three for each of two problems of the dataset below."""
    rows = [
        {"prompt": f"What is {n} + 1?", "out": f"\\boxed{{{n + 1 if s else 0}}}", "price": 0.5}
        for n in range(1, 3)
        for s in range(3)
    ]
    path = tmp_path / "theirs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = [{"id": "a", "problem": "What is 1 + 1?", "answer": "2"}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    return path


WORDS = ("--column", "text=out", "--column", "cost=price", "--out", "run")


def test_an_import_prints_what_it_read(atts: Atts, theirs: Path) -> None:
    """`atts import` prints the number of records, the recorded columns, the cost, and what is
    missing for grading.
    """
    said = atts("import", "jsonl", str(theirs), *WORDS)
    assert said.code == 0
    assert said.out.splitlines() == [
        "run",
        "6 rollouts of 2 problems, up to 3 per problem, from 1 file in the format jsonl",
        "the tool recorded: costs of 6 rollouts",
        "cost: $3.0000",
        "no answer could be graded, because the files have no reference answers; name a dataset with --dataset",
    ]
    assert "Next: atts report run" in said.err
    again = atts("import", "jsonl", str(theirs), *WORDS)
    assert "skipped, because already imported: 2 problems" in again.out


def test_an_import_takes_ids_and_references_from_a_dataset(atts: Atts, theirs: Path) -> None:
    """Problems that the dataset lacks keep the ids and references of the imported files."""
    words = (*WORDS, "--dataset", "mine.jsonl", "--json")
    said = atts("import", "jsonl", str(theirs), *words)
    facts = json.loads(said.out)
    assert (facts["problems"], facts["rollouts"], facts["unknown"]) == (2, 6, 1)
    (line,) = (json.loads(line) for line in atts("runs", "run", "--json").out.splitlines())
    assert line["accuracy"]["value"] == 1.0
    assert line["accuracy"]["n_problems"] == 1
    text = atts("import", "jsonl", str(theirs), *words[:-1], "--out", "other").out
    assert "not in the dataset, so the ids of the files are kept: 1 problem\n" in text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("json",), "format: 'json' is unknown; did you mean 'jsonl'?"),
        (("jsonl", "--kind", "maths"), "--kind: 'maths' is unknown"),
        (("jsonl", "--grades", "mine"), "--grades: 'mine' is unknown"),
        (("jsonl", "--column", "text"), "--column: 'text' is not FIELD=COLUMN"),
        (("jsonl", "--out", "-"), "--out: '-' is not a directory"),
        (("jsonl", "--column", "text=no"), "line 1: the record has no column 'no'; its columns are prompt, out, price"),
    ],
)  # fmt: skip
def test_impossible_imports_are_refused(
    atts: Atts, theirs: Path, words: tuple[str, ...], problem: str
) -> None:
    """An impossible import ends with exit code 2, and the error names what the user typed."""
    format, *rest = words
    said = atts("import", format, str(theirs), "--out", "run", *rest)
    assert said.code == 2
    assert problem in said.err


def test_an_import_into_another_import_is_refused(atts: Atts, theirs: Path) -> None:
    """If a directory already has an import with other columns, a new import into it is refused, and
    the message names the difference.
    """
    assert atts("import", "jsonl", str(theirs), *WORDS).code == 0
    said = atts("import", "jsonl", str(theirs), "--column", "text=out", "--out", "run")
    assert said.code == 2
    assert "configuration.imported.columns" in said.err


def test_an_export_prints_file_and_counts(atts: Atts, theirs: Path) -> None:
    """`atts export` prints the file, the number of records, and the number of rollouts left out."""
    atts("import", "jsonl", str(theirs), *WORDS, "--dataset", "mine.jsonl")
    said = atts("export", "run", "--as", "sft", "--out", "sft.jsonl")
    assert said.out.splitlines() == [
        "sft.jsonl",
        "2 records of kind sft from 1 problem",
        "left out: 4 rollouts (not graded as correct)",
    ]
