"""Tests of loading problems from files: a file gives problems, or a message that names the fault
and a remedy.
"""

import csv
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atts.core import Problem
from atts.errors import DatasetError, OptionError
from atts.evaluators.datasets.loading import Selection, digest, load_dataset, select, split_slice
from atts.evaluators.datasets.tables import Columns, LoadOptions, letter_order, read_table

ROWS: list[dict[str, Any]] = [
    {"id": "a", "problem": "1 + 1?", "answer": "2", "level": 1, "subject": "Addition"},
    {"id": "b", "problem": "2 * 3?", "answer": "6", "level": "Level 2", "subject": "Products"},
    {"id": "c", "problem": "9 - 4?", "answer": "5", "level": 1, "subject": "Subtraction"},
]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Write one object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as spreadsheets export them, with byte order mark and CRLF."""
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows with pyarrow, or skip the test without it."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pyarrow.Table.from_pylist([{**row, "level": str(row["level"])} for row in rows]), path
    )
    return path


def write_json(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows inside an object, as in many exported files."""
    path.write_text(json.dumps({"version": 1, "data": rows}))
    return path


def write_gzip(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write the lines of a file compressed with gzip."""
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    return path


Writer = Callable[[Path, list[dict[str, Any]]], Path]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("data.jsonl", write_jsonl),
        ("data.json", write_json),
        ("data.csv", write_csv),
        ("data.parquet", write_parquet),
        ("data.jsonl.gz", write_gzip),
    ],
)
def test_every_kind_of_file_gives_the_same_problems(
    tmp_path: Path, name: str, write: Writer
) -> None:
    """Problems and digest are the same for each file format; only ids have the file's name."""
    found = load_dataset(write(tmp_path / name, ROWS))
    assert [(it.text, it.answer, it.level, it.subject) for it in found] == [
        ("1 + 1?", "2", 1, "Addition"),
        ("2 * 3?", "6", 2, "Products"),
        ("9 - 4?", "5", 1, "Subtraction"),
    ]
    assert [it.id.split("/")[-1] for it in found] == ["a", "b", "c"]
    assert found.revision.startswith("sha256:")
    assert found.digest == digest(found.problems)
    assert found.source == str(tmp_path / name)


def test_the_digest_depends_on_content_and_order_only(tmp_path: Path) -> None:
    """A file's digest does not depend on the order of keys or on columns that atts does not read.
    It changes if an answer or the order of problems changes.
    """
    plain = load_dataset(write_jsonl(tmp_path / "x.jsonl", ROWS))
    (tmp_path / "sub").mkdir()
    reordered = [{"extra": 1, **dict(reversed(row.items()))} for row in ROWS]
    same = load_dataset(write_jsonl(tmp_path / "sub" / "x.jsonl", reordered))
    assert same.digest == plain.digest
    assert same.revision != plain.revision
    assert load_dataset(write_jsonl(tmp_path / "x.jsonl", ROWS[::-1])).digest != plain.digest
    changed = [{**ROWS[0], "answer": "3"}, *ROWS[1:]]
    assert load_dataset(write_jsonl(tmp_path / "x.jsonl", changed)).digest != plain.digest


def test_a_column_mapping_reads_any_naming(tmp_path: Path) -> None:
    """The user's column names take precedence over names that atts would guess, and the text of the
    `context` column is put before the question.
    """
    path = write_csv(
        tmp_path / "odd.csv", [{"Frage": "wie viel?", "Lösung": "7", "Vorspann": "Es war einmal."}]
    )
    columns = {"text": "Frage", "answer": "Lösung", "context": "Vorspann"}
    only = load_dataset(path, options=LoadOptions(columns=columns)).problems[0]
    assert (only.text, only.answer, only.id) == ("Es war einmal.\n\nwie viel?", "7", "odd/0")


@pytest.mark.parametrize(
    ("given_answer", "read"), [(27, "27"), (27.0, "27"), (0.5, "0.5"), (["1", "2"], "1, 2")]
)
def test_answers_of_any_type_become_text(tmp_path: Path, given_answer: object, read: str) -> None:
    """Answers become strings: 27.0 becomes "27", and the items of a list are joined by commas."""
    path = write_jsonl(tmp_path / "x.jsonl", [{"problem": "p", "answer": given_answer}])
    assert load_dataset(path).problems[0].answer == read


def message(action: Callable[[], object]) -> str:
    """Return the text of the DatasetError that the action raises."""
    with pytest.raises(DatasetError) as caught:
        action()
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.jsonl", b'{"problem": "p", "answer": "1"}\n{"problem": \n', ["line 2", "not JSON"]),
        (
            "x.jsonl",
            b'{"problem": "p", "answer": "1"}\n\n[1]\n',
            ["line 3", "list", "not an object"],
        ),
        (
            "x.jsonl",
            b'{"problem": "caf\xe9", "answer": "1"}\n',
            ["line 1", "not UTF-8", "0xe9", "iconv"],
        ),
        ("x.jsonl", b"", ["no rows"]),
        ("x.jsonl", b"\n \n", ["no rows"]),
        ("x.json", b'{"a": 1}', ["does not contain a list of rows"]),
        ("x.json", b"{", ["not JSON"]),
        ("x.csv", b"problem,answer\n", ["no rows"]),
        ("x.csv", b"problem,answer\np,1,2\n", ["line 2", "more fields"]),
        ("x.csv", b'problem,answer\n"p,1\n', ["line 1", "unexpected end"]),
        ("x.parquet", b"no parquet", ["not a Parquet file"]),
        ("x.jsonl.gz", b"no gzip", ["cannot be read"]),
        ("x.txt", b"p", ["has a type that atts cannot read", ".jsonl"]),
        (
            "x.jsonl",
            b'{"problme": "p", "answer": "1"}\n',
            ["problme", "did you mean 'problme'", "text"],
        ),
        (
            "x.jsonl",
            b'{"problem": "p", "anwser": "1"}\n',
            ["reference", "did you mean 'anwser'", "optional"],
        ),
        ("x.jsonl", b'{"problem": " ", "answer": "1"}\n', ["line 1", "no text"]),
        (
            "x.jsonl",
            b'{"problem": "p", "answer": "1"}\n{"problem": "q", "answer": null}\n',
            ["line 2", "no answer"],
        ),
        (
            "x.jsonl",
            b'{"id": 1, "problem": "p", "answer": "1"}\n{"id": 1, "problem": "q", "answer": "2"}\n',
            ["line 1 and line 2", "same id 'x/1'"],
        ),
    ],
)
def test_bad_files_say_what_is_wrong_and_where(
    tmp_path: Path, name: str, content: bytes, says: list[str]
) -> None:
    """The error about a bad file is one clear sentence with the file, the line and the remedy."""
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
    (tmp_path / name).write_bytes(content)
    words = message(lambda: load_dataset(tmp_path / name))
    assert all(part in words for part in [name, *says]), words


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    """The error lists existing files with similar names, so that a misspelt name is noticed."""
    write_jsonl(tmp_path / "maths.jsonl", ROWS)
    words = message(lambda: load_dataset(tmp_path / "math.jsonl"))
    assert "there is no file" in words
    assert "maths.jsonl" in words


def test_a_missing_column_lists_the_existing_ones(tmp_path: Path) -> None:
    """The error for a missing column lists the existing columns and suggests the most similar one."""
    path = write_jsonl(tmp_path / "x.jsonl", [{"Question": "p", "Answer": "1"}])
    words = message(lambda: load_dataset(path, options=LoadOptions(columns={"text": "Qestion"})))
    assert "Columns found: Question, Answer" in words
    assert "did you mean 'Question'" in words


def test_parquet_without_pyarrow_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pyarrow, the error about a Parquet file names the extra to install."""
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(cast(dict[str, object], __import__("sys").modules), "pyarrow", None)
    assert "pip install 'atts-llm[parquet]'" in message(
        lambda: load_dataset(tmp_path / "x.parquet")
    )


def test_problems_without_reference_are_kept_only_when_asked(tmp_path: Path) -> None:
    """Problems without a reference answer are kept only on request. A note then gives their number,
    because they cannot be graded.
    """
    path = write_jsonl(tmp_path / "x.jsonl", [{"problem": "p"}, {"problem": "q"}])
    found = load_dataset(path, options=LoadOptions(answers="optional"))
    assert [it.answer for it in found] == [None, None]
    assert "the reference answer is missing: 2 of 2 problems" in found.notes[0]


def test_repeated_texts_are_noted(tmp_path: Path) -> None:
    """Repeated problem texts give a note but no error, because their ids differ."""
    rows = [{"problem": "same  text", "answer": "1"}, {"problem": "Same text", "answer": "1"}]
    assert load_dataset(write_jsonl(tmp_path / "x.jsonl", rows)).notes == (
        "1 problem with the same text as another problem",
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [("answers", "maybe"), ("network", "sometimes"), ("kind", "maths"), ("columns", {"txt": "q"})],
)
def test_an_unknown_option_is_an_error(tmp_path: Path, option: str, value: object) -> None:
    """A misspelt option is refused instead of ignored."""
    path = write_jsonl(tmp_path / "x.jsonl", ROWS)
    with pytest.raises(OptionError):
        load_dataset(path, options=LoadOptions(**cast(Any, {option: value})))


def test_an_unknown_name_suggests_a_known_one() -> None:
    """The error about an unknown benchmark name suggests the most similar known name and has no
    traceback.
    """
    with pytest.raises(OptionError, match="did you mean 'math500'"):
        load_dataset("mathh500")


# Tests of multiple choice


def test_choices_are_read_from_positions_letters_and_words(tmp_path: Path) -> None:
    """The correct choice may be given by position, letter or text, and becomes a letter. The
    choices are added to the question.
    """
    options = ["red", "green", "blue"]
    rows = [
        {"question": "Which?", "choices": options, "answer": given}
        for given in (2, "C", "(c)", "blue")
    ]
    found = load_dataset(write_jsonl(tmp_path / "x.jsonl", rows))
    assert {(it.answer, it.kind, it.choices) for it in found} == {
        ("C", "choice", ("red", "green", "blue"))
    }
    assert found.problems[0].text == "Which?\n\n(A) red\n(B) green\n(C) blue"


def test_an_answer_outside_the_choices_is_an_error(tmp_path: Path) -> None:
    """An answer outside the choices is an error, because the question would have no correct answer."""
    path = write_jsonl(
        tmp_path / "x.jsonl", [{"question": "q", "choices": ["a1", "b1"], "answer": "c1"}]
    )
    assert "not the letter, the position or the text of one of its choices" in message(
        lambda: load_dataset(path)
    )


GPQA_ROWS: list[dict[str, Any]] = [
    {
        "Question": f"Which is right, {number}?\n",
        "Correct Answer": f"right {number}\n",
        "Incorrect Answer 1": "wrong one",
        "Incorrect Answer 2": "wrong two",
        "Incorrect Answer 3": "wrong three",
        "Record ID": f"rec{number:03d}",
        "High-level domain": ("Physics", "Chemistry", "Biology")[number % 3],
    }
    for number in range(198)
]


def test_gpqa_shuffles_the_choices_by_seed(tmp_path: Path) -> None:
    """The choices are shuffled so that each letter is correct for about a quarter of the questions.
    Another seed gives another shuffle.
    """
    path = write_csv(tmp_path / "gpqa_diamond.csv", GPQA_ROWS)
    found = load_dataset("gpqa", options=LoadOptions(file=path))
    for problem in found:
        assert problem.answer
        assert problem.choices["ABCD".index(problem.answer)].startswith("right")
        assert sorted(problem.choices)[1:] == ["wrong one", "wrong three", "wrong two"]
    letters = Counter(problem.answer for problem in found)
    # the count is binomial with n = 198 and p = 1/4; the limits are about 4 standard deviations
    # from its mean
    assert all(25 < letters[letter] < 75 for letter in "ABCD"), letters
    # an empty column mapping, which commands pass if the user gives none, has the same effect as no
    # mapping
    again = load_dataset("gpqa", options=LoadOptions(columns={}, file=path))
    other = load_dataset("gpqa", options=LoadOptions(file=path, seed=1))
    assert again.digest == found.digest != other.digest
    assert "seed 0" in found.notes[0]


def test_the_order_of_choices_belongs_to_the_question(tmp_path: Path) -> None:
    """If questions are left out or loaded in another order, the choices of each question keep their
    order.
    """
    whole = load_dataset(
        "gpqa", options=LoadOptions(file=write_csv(tmp_path / "all.csv", GPQA_ROWS))
    )
    some = load_dataset(
        "gpqa", options=LoadOptions(file=write_csv(tmp_path / "some.csv", GPQA_ROWS[50:40:-1]))
    )
    known = {problem.id: problem.choices for problem in whole}
    assert all(known[problem.id] == problem.choices for problem in some)


def test_choice_orders_are_fixed_for_all_time() -> None:
    """The orders of choices are the same as in earlier versions, because published results must
    stay reproducible.
    """
    assert [letter_order(0, f"gpqa/{number}", 4) for number in range(3)] == [
        (0, 3, 2, 1),
        (3, 0, 1, 2),
        (1, 0, 3, 2),
    ]


# Tests of selections


def problems(count: int) -> list[Problem]:
    """Make problems without special columns."""
    return [
        Problem(f"set/{at}", f"text {at}", str(at), level=at % 5 + 1, subject="AB"[at % 2])
        for at in range(count)
    ]


def test_a_seeded_draw_is_pythons_own_sample() -> None:
    """A sample with a seed has the problems that Python's `random.sample` selects, so a user can
    reproduce it with two lines of Python.
    """
    expected = random.Random(42).sample(range(500), 100)
    drawn = select(problems(500), Selection(sample=100, seed=42))
    assert [it.id for it in drawn] == [f"set/{at}" for at in expected]


def test_filters_then_draw_then_slice() -> None:
    """A selection first filters, then draws a sample, then takes the slice. If the user lists ids,
    the problems keep the order of this list.
    """
    chosen = select(
        problems(100), Selection(levels=(2, 3), subjects=("a",), sample=10, seed=1, stop=4)
    )
    assert len(chosen) == 4
    assert all(it.level in (2, 3) and it.subject == "A" for it in chosen)
    assert [it.id for it in select(problems(9), Selection(ids=("set/7", "2", "set/7")))] == [
        "set/7",
        "set/2",
    ]


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        (Selection(ids=("set/77",)), "no problem has the id 'set/77'"),
        (Selection(levels=(9,)), "Known values: 1, 2, 3, 4, 5"),
        (Selection(subjects=("Geometry",)), "Known values: A, B"),
        (Selection(sample=11), "cannot sample 11 of 10"),
        (Selection(sample=0), "cannot sample 0 of 10"),
        (Selection(start=10), "none of 10 problems matches the selection (slice [10:])"),
    ],
)
def test_a_selection_that_selects_nothing_says_why(selection: Selection, says: str) -> None:
    """The error for an empty selection lists the values that the user can select."""
    assert says in message(lambda: select(problems(10), selection))


@given(
    st.integers(-12, 12) | st.none(),
    st.integers(-12, 12) | st.none(),
    st.integers(1, 4) | st.none(),
)
def test_a_slice_in_a_name_is_pythons_slice(
    start: int | None, stop: int | None, step: int | None
) -> None:
    """A slice in brackets after a dataset's name follows Python's rules, including negative
    ends.
    """
    words = ":".join(
        "" if end is None else str(end) for end in (start, stop, *([step] if step else []))
    )
    name, selection = split_slice(f"some/file[1].jsonl[{words}]")
    assert name == "some/file[1].jsonl"
    expected = problems(10)[start:stop:step]
    assert not expected or select(problems(10), selection) == expected


def test_a_selection_changes_notes_and_digest(tmp_path: Path) -> None:
    """A selection is described in the dataset's notes and changes its digest. The revision stays
    that of the whole file.
    """
    path = write_jsonl(tmp_path / "x.jsonl", ROWS)
    whole = load_dataset(path)
    part = load_dataset(f"{path}[1:]", Selection(levels=(1,)))
    assert [it.id for it in part] == ["x/c"]
    assert part.notes == ("selected: levels 1 (2 of 3)", "selected: slice [1:] (1 of 3)")
    assert (part.revision, part.digest != whole.digest) == (whole.revision, True)


def test_a_line_separator_inside_a_string_does_not_split_the_row(tmp_path: Path) -> None:
    """JSON allows U+2028 in strings, so a reader that splits lines there would break the row."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"problem": "a\u2028b", "answer": "1"}\n', encoding="utf-8")
    assert load_dataset(path).problems[0].text == "a\u2028b"


@given(
    st.lists(
        st.fixed_dictionaries({"problem": st.text(min_size=1), "answer": st.text(min_size=1)}),
        min_size=1,
    )
)
def test_any_text_survives_the_way_through_a_file(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any]
) -> None:
    """Any unicode text is unchanged after being written and read."""
    path = write_jsonl(tmp_path_factory.mktemp("rows") / "x.jsonl", rows)
    assert [dict(row) for row in read_table([path], "x").rows] == rows


def test_the_generated_benchmark_loads_by_name() -> None:
    """The generated benchmark takes count, seed and levels from the selection, and its digest is
    reproducible.
    """
    one = load_dataset("arithmetic", Selection(sample=6, seed=3, levels=(2, 4)))
    again = load_dataset("arithmetic", Selection(sample=6, seed=3, levels=(2, 4)))
    assert len(one) == 6
    assert one.digest == again.digest
    assert {it.level for it in one} == {2, 4}
    assert "seed 3" in one.revision
    with pytest.raises(OptionError, match="split"):
        load_dataset("arithmetic", options=LoadOptions(split="validation"))


def test_columns_may_be_an_object() -> None:
    """In Python, `columns` can be an object with functions, which can do more than a mapping of
    names.
    """
    assert Columns.of({"text": "q"}) == Columns(text="q")
