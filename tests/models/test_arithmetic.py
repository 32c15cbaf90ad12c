"""Tests of the generated arithmetic benchmark: correct, reproducible, graded by level, and split
without overlap.
"""

import re
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.errors import OptionError
from atts.evaluators.datasets.arithmetic import (
    LEVELS,
    LIMIT,
    Exercise,
    Operation,
    problems,
    split_of,
    stream,
)

SPLITS = ("train", "calibration", "test")


@pytest.fixture(scope="module")
def many() -> list[Exercise]:
    return list(islice(stream("train", seed=11), 3000))


@pytest.mark.parametrize("split", SPLITS)
def test_every_exercise_lies_in_the_split_its_operations_name(split: str) -> None:
    drawn = islice(stream(split, seed=3), 300)  # type: ignore[arg-type]
    assert {split_of(exercise.canonical) for exercise in drawn} == {split}


def test_wording_does_not_move_a_computation_to_another_split() -> None:
    """Exercises that differ only in wording have the same canonical form. The form decides the
    split, so they are in the same split.
    """
    by_form: dict[str, set[str]] = {}
    for exercise in islice(stream("train", seed=5, levels=(1,)), 6000):
        by_form.setdefault(exercise.canonical, set()).add(exercise.text)
    assert any(len(texts) > 1 for texts in by_form.values())
    assert {split_of(form) for form in by_form} == {"train"}


def test_a_longer_call_starts_with_the_shorter_one() -> None:
    assert problems("test", 40, seed=9)[:15] == problems("test", 15, seed=9)


def test_seeds_differ_and_repeat() -> None:
    assert problems("test", 10, seed=1) == problems("test", 10, seed=1)
    assert problems("test", 10, seed=1) != problems("test", 10, seed=2)


def test_problems_are_distinct_and_their_levels_take_turns() -> None:
    found = problems("calibration", 200, seed=4, levels=(2, 5))
    assert len({problem.text for problem in found}) == 200
    assert len({problem.id for problem in found}) == 200
    assert [problem.level for problem in found] == [2, 5] * 100


def test_the_level_is_the_number_of_steps(many: list[Exercise]) -> None:
    for exercise in many:
        assert len(exercise.steps) in LEVELS[exercise.level]


def test_every_number_stays_within_the_limit(many: list[Exercise]) -> None:
    for exercise in many:
        numbers = [int(found) for found in re.findall(r"\d+", exercise.text + exercise.solution)]
        assert max(numbers) <= LIMIT


def test_every_equation_of_every_solution_holds(many: list[Exercise]) -> None:
    """In every solution, both sides of each `=` are equal, and each result is used later or is the
    answer.
    """
    for exercise in many:
        for chunk in exercise.chunks[:-1]:
            line = re.search(r"\d+ [-+*/] \d+( = [\d +*/-]*\d)+", chunk)
            assert line is not None
            sides = line.group().split(" = ")
            # safe to evaluate, because the pattern allows only digits and signs
            assert len({eval(side) for side in sides}) == 1, chunk


def test_expressions_have_the_value_in_their_solutions_box(many: list[Exercise]) -> None:
    """If an exercise asks for the value of an expression, Python's value of the expression is in
    the box of the solution.
    """
    found = [exercise for exercise in many if exercise.kind == "expression"]
    assert len(found) > 100
    for exercise in found:
        asked = re.sub(r"^(Compute|What is) |[.?]$", "", exercise.text)
        assert eval(asked) == exercise.answer
        assert exercise.chunks[-1] == f"The answer is \\boxed{{{exercise.answer}}}."


def test_variables_have_the_value_in_their_solutions_box(many: list[Exercise]) -> None:
    for exercise in many:
        if exercise.kind != "variables":
            continue
        known: dict[str, float] = {}
        for name, formula in re.findall(r"Let (\w) = ([^.]+)\.", exercise.text):
            known[name] = eval(formula, {}, known)
        assert known[exercise.text[-2]] == exercise.answer


def test_every_number_used_first_is_in_the_question(many: list[Exercise]) -> None:
    """A solution computes only with numbers of the question and results of its earlier steps."""
    for exercise in many:
        known = {int(found) for found in re.findall(r"\d+", exercise.text)}
        for step in exercise.steps:
            assert {step.operation.left, step.operation.right} <= known, exercise.text
            known.add(step.operation.value)


def test_all_kinds_occur_at_all_levels(many: list[Exercise]) -> None:
    kinds = {exercise.kind for exercise in many}
    assert len(kinds) == 6
    assert {(exercise.kind, exercise.level) for exercise in many} == {
        (k, level) for k in kinds for level in LEVELS
    }


@given(
    left=st.integers(2, LIMIT), right=st.integers(2, 99), sign=st.sampled_from(["+", "-", "*", "/"])
)
@settings(max_examples=200, deadline=None)
def test_worked_forms_are_chains_of_equals(left: int, right: int, sign: str) -> None:
    if (sign == "/" and left % right) or (sign == "*" and min(left, right) >= 10):
        return
    operation = Operation(left, sign, right)  # type: ignore[arg-type]
    sides = operation.worked().split(" = ")
    assert {eval(side) for side in sides} == {operation.value}


@pytest.mark.parametrize(
    ("split", "levels"), [("tset", (1,)), ("test", (0,)), ("test", (6, 1)), ("test", ())]
)
def test_unknown_splits_and_levels_are_refused(split: str, levels: tuple[int, ...]) -> None:
    with pytest.raises(OptionError):
        problems(split, 1, levels=levels)  # type: ignore[arg-type]


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(OptionError, match="count"):
        problems("test", -1)
