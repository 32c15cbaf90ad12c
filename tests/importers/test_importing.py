"""Tests of all imports: errors with lines, constant memory, resuming, datasets, and commands that
read the run.
"""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.analysis import advise, build_report, compare, read_results, render
from atts.analysis.planning import Cap
from atts.api import Setup, evaluate_sync, replay
from atts.core import Problem
from atts.errors import DatasetError, FingerprintError
from atts.importers import FORMATS, ForeignSample, ImportOptions, import_rollouts
from atts.importers.records import open_records, parse
from atts.journal import JOURNAL, check_journal, open_run
from atts.testing import toy_problems
from tests.importers.conftest import Import, write_lines


def rows(problems: int, samples: int, text: str = "so") -> Iterator[dict[str, Any]]:
    """Yield the first rollout of every problem, then the second of every problem, and so on."""
    for sample in range(samples):
        for number in range(problems):
            answer = number if (number + sample) % 3 else number + 1
            yield {
                "question": f"What is {number}?", "text": f"{text} \\boxed{{{answer}}}",
                "gold": str(number), "tokens": 10 + sample, "seconds": 1.0 + sample, "cost": 0.001,
            }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"question": "1?", "text": "a"', "the record is not JSON"),
        ("[1, 2]", "the record is a list, not an object"),
        ('{"question": "1?"}', "the record has no known column for the text"),
        ('{"question": "1?", "text": "\\ud8"}', "the record is not JSON"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, run_import: Import, line: str, problem: str) -> None:
    """The error for a wrong line names the file and the line, and no run is created."""
    path = write_lines(tmp_path / "mine.jsonl", rows(3, 1))
    with path.open("a") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(DatasetError, match=rf"mine.jsonl: line 5: {problem}"):
        run_import("jsonl", path)
    assert not (tmp_path / "run" / JOURNAL).exists()


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path, run_import: Import) -> None:
    """The error about a line that is not UTF-8 names the file and the line."""
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"question": "\xff\xfe"}\n')
    with pytest.raises(DatasetError, match="mine.jsonl: line 1: the record is not JSON"):
        run_import("jsonl", path)


def test_a_cut_json_file_is_refused(tmp_path: Path, run_import: Import) -> None:
    """If a JSON file is cut off, the error gives the number of the list item in which the file
    ends.
    """
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(list(rows(3, 1)))[:-30])
    with pytest.raises(
        DatasetError, match="mine.json: the file ends in the middle of item 3, so it is incomplete"
    ):
        run_import("jsonl", path)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("x.jsonl.gz", "the file is compressed"),
        ("x.parquet", "the file is in Parquet format"),
        ("x.txt", "cannot read this type of file"),
        ("x.eval", "not a complete .eval archive"),
        ("missing.jsonl", "does not exist"),
    ],
)
def test_unreadable_kinds_of_files_are_refused(
    tmp_path: Path, run_import: Import, name: str, problem: str
) -> None:
    """For each kind of file that atts cannot read, the message says how to make a readable file."""
    if name != "missing.jsonl":
        (tmp_path / name).write_bytes(b"abc")
    with pytest.raises(DatasetError, match=problem):
        run_import("jsonl", tmp_path / name)


def test_a_folder_without_matching_files_is_refused(tmp_path: Path, run_import: Import) -> None:
    """The error about a folder without matching files lists the file names that the import looks
    for.
    """
    with pytest.raises(
        DatasetError, match=r"the directory has no file that matches output-rs\*.jsonl or output"
    ):
        run_import("nemo-skills", tmp_path)


def test_an_empty_file_is_refused(tmp_path: Path, run_import: Import) -> None:
    """A file without a rollout is an error instead of an empty run."""
    path = tmp_path / "mine.jsonl"
    path.touch()
    with pytest.raises(DatasetError, match="the file does not contain rollouts"):
        run_import("jsonl", path)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_json_items_may_cross_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """JSON strings, escapes and brackets may be split anywhere between the blocks that are read."""
    monkeypatch.setattr("atts.importers.records._BLOCK", block)
    values = [
        {"a": 'quote " brace } bracket ] back \\'},
        {"a": "\\", "b": {"c": [{"d": "]}"}, []]}},
        {"a": "ü\n", "e": []},
    ]
    log = {"x": [{"samples": [1]}], "y": "samples", "samples": values, "z": {"samples": [{"q": 1}]}}
    path = tmp_path / "a.json"
    for text, field in (
        (json.dumps(values), ""),
        (json.dumps(values, ensure_ascii=False, indent=1), "samples"),
        (json.dumps(log), "samples"),
        ("\n".join(map(json.dumps, values)), ""),
    ):
        path.write_text(text)
        with open_records(path, field) as file:
            places = list(file.places())
            assert [parse(data) for _, data in places] == values
            again = [file.read(place.start, place.size) for place, _ in places]
        assert [parse(data) for data in again] == values


def peak_of_import(path: Path, out: Path) -> int:
    """Return the peak memory in bytes that Python used during an import."""

    async def main() -> None:
        await import_rollouts(FORMATS["jsonl"], path, out)

    tracemalloc.start()
    anyio.run(main)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import of a file that is thirty times larger needs little more memory: less than a quarter
    of the additional bytes. The file has longer texts or more rollouts.
    """
    # read small blocks, because a usual block is larger than the smallest of these test files
    monkeypatch.setattr("atts.importers.records._BLOCK", 1 << 14)
    sizes: list[int] = []
    peaks: list[int] = []
    for number, (problems, samples, text) in enumerate(
        [(10, 4, "x" * 2_000), (10, 4, "x" * 60_000), (10, 24, "x" * 10_000)]
    ):
        path = write_lines(tmp_path / f"{number}.jsonl", rows(problems, samples, text))
        if not number:
            peak_of_import(path, tmp_path / "warm")
        peaks.append(peak_of_import(path, tmp_path / f"run-{number}"))
        sizes.append(path.stat().st_size)
    for size, peak in zip(sizes[1:], peaks[1:], strict=True):
        assert peak - peaks[0] < (size - sizes[0]) / 4


def facts(directory: Path) -> list[Any]:
    """Return everything in a journal, except dates and sessions."""
    run = open_run(directory)
    kinds = ("SessionOpened", "SessionClosed")
    return [entry.event for entry in run.entries() if type(entry.event).__name__ not in kinds]


def test_an_interrupted_import_continues(tmp_path: Path, run_import: Import) -> None:
    """If an import is interrupted at any line, the same command imports the rest and gives the same
    run.
    """
    path = write_lines(tmp_path / "mine.jsonl", rows(4, 3))
    whole = run_import("jsonl", path, tmp_path / "whole").directory
    expected = open_run(whole).state().finished
    lines = (whole / JOURNAL).read_bytes().splitlines(keepends=True)
    for kept in range(1, len(lines), 5):
        cut = tmp_path / f"cut-{kept}"
        cut.mkdir()
        (cut / "manifest.json").write_bytes((whole / "manifest.json").read_bytes())
        # the last line is incomplete
        (cut / JOURNAL).write_bytes(b"".join(lines[:kept]) + lines[kept][:20])
        made = run_import("jsonl", path, cut)
        assert made.problems == 4
        assert open_run(cut).state().finished == expected
        assert [one.seconds for one in open_run(cut).state().finished.values()] == [3.0] * 4
        assert not check_journal(cut).damage


def test_an_import_that_ended_writes_nothing_again(tmp_path: Path, run_import: Import) -> None:
    """A second import finds every problem in the run, so it writes nothing."""
    path = write_lines(tmp_path / "mine.jsonl", rows(4, 3))
    before = facts(run_import("jsonl", path).directory)
    made = run_import("jsonl", path)
    assert made.already == 4
    assert facts(made.directory) == before


def test_changed_files_are_another_run(tmp_path: Path, run_import: Import) -> None:
    """If the files or options have changed, the first import is not continued."""
    path = write_lines(tmp_path / "mine.jsonl", rows(4, 3))
    run_import("jsonl", path)
    with pytest.raises(FingerprintError, match=r"configuration.imported.grades"):
        run_import("jsonl", path, grades="again")
    write_lines(path, rows(4, 3, "other"))
    with pytest.raises(FingerprintError, match=r"configuration.imported.files"):
        run_import("jsonl", path)


def test_an_import_can_be_graded_by_atts(tmp_path: Path, run_import: Import) -> None:
    """The user can choose whether an imported run keeps the other tool's verdicts, which are marked
    as such, or is graded by atts.
    """
    row = {"question": "1?", "text": "\\boxed{0.5}", "gold": "1/2", "correct": False}
    path = write_lines(tmp_path / "mine.jsonl", [row])
    for grades, verdict in (("recorded", "wrong"), ("again", "correct")):
        out = run_import("jsonl", path, tmp_path / grades, grades=grades).directory
        (problem,) = open_run(out).state().finished.values()
        assert problem.samples[0].verdict == verdict
        assert problem.verdict == verdict


def test_a_data_set_names_the_problems(tmp_path: Path, run_import: Import) -> None:
    """If a question of the import is also in the dataset, the problem gets the dataset's id and
    reference. Other problems keep their own.
    """
    path = write_lines(tmp_path / "mine.jsonl", rows(3, 2))
    known = [Problem("d/1", "What  is 1?\n", "1"), Problem("d/2", "What is 2?", "3", level=4)]
    made = run_import("jsonl", path, known=known, known_as="d")
    assert made.unknown == 1
    outcomes = {one.problem.id: one.problem for one in open_run(made.directory).outcomes()}
    assert set(outcomes) == {"problem-1", "d/1", "d/2"}
    assert outcomes["d/2"] == known[1]
    with pytest.raises(DatasetError, match="none of the dataset's questions occurs"):
        run_import("jsonl", path, tmp_path / "b", known=[Problem("d/9", "Else?")], known_as="d")


def test_many_files_are_imported(
    tmp_path: Path, run_import: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import can read more files than a process may open at the same time."""
    monkeypatch.setattr("atts.importers.writing._MOST_OPEN", 2)
    for number, row in enumerate(rows(3, 4)):
        write_lines(tmp_path / "parts" / f"{number}.jsonl", [row])
    made = run_import("jsonl", tmp_path / "parts")
    assert (made.files, made.problems, made.rollouts) == (12, 3, 12)


def test_an_imported_run_works_with_every_reader(tmp_path: Path, run_import: Import) -> None:
    """An imported run can be reported, replayed and used to plan other runs. It can be compared
    with a run of atts on the same dataset.
    """
    problems = toy_problems(6)
    setup = Setup(draft="scripted", target="scripted", method="target-only")
    ours = evaluate_sync(problems, setup, directory=tmp_path / "ours")
    path = write_lines(
        tmp_path / "theirs.jsonl",
        [
            {"question": problem.text, "text": f"\\boxed{{{problem.answer}}}" if n else "?",
             "tokens": 30, "seconds": 2.0}
            for problem in problems
            for n in range(3)
        ],
    )  # fmt: skip
    theirs = run_import("jsonl", path, known=problems, known_as="toy").directory
    both = compare(read_results(theirs), read_results(tmp_path / "ours"))
    assert ours.directory is not None
    assert both.problems == 6
    assert both.first == str(theirs)
    assert both.vote.first == 1.0
    assert both.single is not None
    assert both.single.first == pytest.approx(2 / 3)
    built = build_report(theirs, [tmp_path / "ours"])
    page = render(built, "markdown")
    assert "atts did not generate the texts of this run: it imported 18 rollouts" in page
    assert "| seconds over all sessions | unknown |" in page
    assert replay(theirs, samples=2).replayed.target_tokens == 6 * 2 * 30
    best = advise([theirs], Cap()).options[0]
    assert (best.target_tokens, best.seconds) == (30, 2.0)


def test_unrecorded_facts_stay_unknown() -> None:
    """If the other tool did not record the model, the imported run names none."""
    sample = ForeignSample("q", "t")
    assert replace(sample, number=1).tokens is None
    assert ImportOptions().grades == "recorded"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes need POSIX")
def test_a_pipe_is_refused(tmp_path: Path, run_import: Import) -> None:
    """A pipe is refused as an input file, because an import reads its files twice and a pipe can be
    read only once.
    """
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(
        DatasetError, match="the file cannot be read: the path is a device, a pipe or a socket"
    ):
        run_import("jsonl", tmp_path / "pipe.jsonl")
