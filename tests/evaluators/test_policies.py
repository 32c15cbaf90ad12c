"""Tests of grading policies and of the prompts of benchmarks and pairs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from atts.api import configure
from atts.core import Grading, Message, Problem
from atts.errors import DatasetError, OptionError
from atts.evaluators import Columns, LoadOptions, equivalent, grade, judge, load_dataset
from atts.journal import dataset_digest
from atts.pipelines import Policy, prompt_of

HUNDREDTH = Grading(relative=0.01)
TENTH = Grading(absolute=0.1)
UNITS = Grading(units="required")


@pytest.mark.parametrize(
    ("grading", "gold", "answer", "is_equal"),
    [
        (HUNDREDTH, "4.5e33", r"4.48\times10^{33}", True),
        (HUNDREDTH, "4.5e33", r"4.4\times10^{33}", False),
        (HUNDREDTH, "200", "201", False),
        (HUNDREDTH, "0.32", r"\frac{1}{3}", False),
        (HUNDREDTH, "0.333", r"\frac{1}{3}", True),
        (HUNDREDTH, "-2.5", "2.5", False),
        (HUNDREDTH, "1.6 x", "1.6 y", False),
        (TENTH, "29", "28.95", True),
        (TENTH, "29", "28.85", False),
        (TENTH, "(3,4)", "(3.05,3.92)", True),
        (TENTH, "x^2+3", "x^2+3.05", False),
        (UNITS, r"5\text{ km}", "5", False),
        (UNITS, "5", r"5\text{ km}", False),
        (UNITS, r"5\text{ km}", r"5000\text{ m}", True),
        (UNITS, "12 ways", "12", True),
        (Grading(), r"5\text{ km}", "5", True),
    ],
)
def test_a_policy_tolerates_only_what_it_names(
    grading: Grading, gold: str, answer: str, is_equal: bool
) -> None:
    """Each grading policy accepts its own examples and nothing else."""
    assert equivalent(gold, answer, grading=grading).is_equal == is_equal
    assert not grading.relative or not equivalent(gold, answer).is_equal


def test_the_text_of_a_choice_counts_only_by_policy() -> None:
    """The text of the correct choice is accepted only under the policy that allows it, and the text
    of a wrong choice never.
    """
    asked = Problem("1", "?", "B", "choice", choices=("nucleus", "mitochondria"))
    assert not judge(asked, "mitochondria").is_equal
    lenient = Problem(
        "1", "?", "B", "choice", choices=asked.choices, grading=Grading(choices="text")
    )
    assert [judge(lenient, said).is_equal for said in ("mitochondria", "nucleus", "B", "A")] == [
        True,
        False,
        True,
        False,
    ]


def test_a_records_policy_wins() -> None:
    """A policy in a record has priority over the policy given for all records. If it is impossible,
    the error names the record.
    """
    rows: list[dict[str, object]] = [
        {"gold": "2.5", "answer": "2.51"},
        {"gold": "2.5", "answer": "2.51", "relative": 0.001},
    ]
    found = [each.verdict.is_equal for each in grade(rows, grading=HUNDREDTH)]
    assert found == [True, False]
    with pytest.raises(DatasetError, match="record 1"):
        list(grade([{"gold": "1", "answer": "1", "units": "maybe"}]))
    with pytest.raises(OptionError, match=r"relative: -1\.0 is out of range"):
        load_dataset("arithmetic", options=LoadOptions(grading={"relative": -1}))


def test_columns_set_tolerance_and_unit_of_one_row(tmp_path: Path) -> None:
    """OlympiadBench has columns for the tolerance and the unit of an answer. A row's values apply
    to this row only.
    """
    rows = [
        {"problem": "a", "answer": "29", "error": "1e-1", "unit": ""},
        {"problem": "b", "answer": "7", "error": None, "unit": "km/h"},
        {"problem": "c", "answer": "45", "error": None, "unit": r"^{\circ}"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    first, second, third = load_dataset(
        file, options=LoadOptions(Columns(tolerance="error", unit="unit"))
    ).problems
    assert (first.grading, second.grading) == (TENTH, None)
    assert judge(first, "28.93").is_equal
    assert [judge(second, said).is_equal for said in ("7", r"7\text{ km/h}", "7 mph")] == [
        True,
        True,
        False,
    ]
    assert judge(third, r"45^\circ").is_equal
    options = LoadOptions(Columns(tolerance="error"), grading={"relative": 0.5})
    assert load_dataset(file, options=options).problems[0].grading == Grading(0.5, 0.1)
    file.write_text(json.dumps({"problem": "a", "answer": "29", "error": "little"}))
    with pytest.raises(DatasetError, match="tolerance 'little'"):
        load_dataset(file, options=LoadOptions(Columns(tolerance="error")))


def test_benchmarks_have_their_own_policy(tmp_path: Path) -> None:
    """By default, answers to Minerva may differ from the reference by 1 %. The user can set another
    policy, and the dataset's digest depends on the policy.
    """
    file = tmp_path / "minerva.jsonl"
    file.write_text(json.dumps({"question": "How heavy?", "answer": "1.75"}))
    minerva, strict = (
        load_dataset("minerva_math", options=LoadOptions(file=file, grading=grading))
        for grading in ({}, {"relative": 0.0})
    )
    sizes = Grading(variables="positive")
    assert minerva.problems[0].grading == replace(sizes, relative=0.01)
    assert strict.problems[0].grading == sizes
    assert dataset_digest(minerva.problems) != dataset_digest(strict.problems)
    said = configure(
        {"dataset": str(file), "relative": 0.02, "units": "required"}, environment={}
    ).job.load()
    assert said.problems[0].grading == Grading(relative=0.02, units="required")


def test_a_multiple_choice_prompt_requests_the_letter() -> None:
    """The prompt of a multiple-choice problem asks for the letter, before the instruction of the
    policy. Prompts of other problems do not.
    """
    choice = Problem("1", "Which?\n\n(A) x\n(B) y", "B", "choice", choices=("x", "y"))
    asked = prompt_of(choice, Policy(system="", instruction="Think."))
    assert asked == [
        Message("user", f"{choice.text}\n\nAnswer with the letter of the right choice.\n\nThink.")
    ]
    assert prompt_of(Problem("2", "1+1?"), Policy(system="")) == [Message("user", "1+1?")]


def test_a_prompt_belongs_to_a_pair_and_a_benchmark() -> None:
    """The instruction depends on the pair of models and the benchmark. For this pair, GPQA has the
    instruction that the authors of the models publish.
    """
    usual, special = (
        configure({"pair": "qwen3-0.6b/qwen3-8b", "dataset": name}, environment={})
        .settings["instruction"]
        .value
        for name in ("math500", "gpqa_diamond[:3]")
    )
    assert "boxed" in str(usual)
    assert '"answer": "C"' in str(special)


def test_worked_examples_come_first(tmp_path: Path) -> None:
    """Worked examples come before the problem as user and assistant messages, formatted like the
    problem itself.
    """
    file = tmp_path / "shots.jsonl"
    file.write_text(
        '{"problem": "1+1?", "solution": "It is \\\\boxed{2}."}\n{"problem": "1+2?", "solution": '
        '"3"}'
    )
    found = configure({"shots": str(file), "dataset": "arithmetic[:1]"}, environment={}).job.load()
    told = prompt_of(found.problems[0], Policy(instruction="Go."))
    assert [message.role for message in told] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert told[1:3] == [Message("user", "1+1?\n\nGo."), Message("assistant", r"It is \boxed{2}.")]
    assert "2 worked examples" in found.notes[-1]
