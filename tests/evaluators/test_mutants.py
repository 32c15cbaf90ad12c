"""Tests that an answer changed in one meaningful place no longer equals the original."""

import json
from collections import Counter
from pathlib import Path

import pytest

from atts.evaluators import equivalent
from tests.evaluators.mutants import BUILT_IN, mutants


def test_mutants_are_not_equal() -> None:
    """If a sign, bound, branch, condition, unit, qualifier or order in a built-in answer is
    changed, the grader calls no changed answer equal.
    """
    made = mutants(BUILT_IN, 1_500, seed=3)
    kinds = Counter(mutant.kind for mutant in made)
    assert len(made) == 1_500
    assert len(kinds) == 18
    assert min(kinds.values()) > 0.05 * len(made)
    assert [mutant for mutant in made if equivalent(mutant.gold, mutant.answer).is_equal] == []


def test_mutants_of_references_are_not_equal(shared_data: Path) -> None:
    """Mutants made from two benchmarks' answers are not equal to the originals."""
    files = [shared_data / "benchmarks" / f"{name}.jsonl" for name in ("math500", "minerva_math")]
    rows = [
        json.loads(line)
        for file in files
        for line in file.read_text(encoding="utf-8").split("\n")
        if line
    ]
    answers = [text for row in rows if 0 < len(text := str(row["answer"]).strip().strip("$")) < 200]
    made = mutants(answers, 400)
    assert len(made) == 400
    assert [mutant for mutant in made if equivalent(mutant.gold, mutant.answer).is_equal] == []


@pytest.mark.slow
def test_many_mutants_are_hardly_ever_equal(shared_data: Path) -> None:
    """Among a hundred thousand mutants of every benchmark's answers, fewer than one in a thousand
    is called equal.
    """
    files = sorted((shared_data / "benchmarks").glob("*.jsonl"))
    rows = [
        json.loads(line)
        for file in files
        for line in file.read_text(encoding="utf-8").split("\n")
        if line
    ]
    answers = sorted(
        {text for row in rows if 0 < len(text := str(row["answer"]).strip().strip("$")) < 200}
    )
    made = mutants([*BUILT_IN, *answers], 100_000, seed=11)
    wrong = [mutant for mutant in made if equivalent(mutant.gold, mutant.answer).is_equal]
    assert len(made) == 100_000
    assert len(wrong) < 100, wrong


def test_the_generator_knows_equal_values() -> None:
    """The generator of mutants makes no mutant with the same value, such as -0 for 0."""
    assert mutants(["0"], 50) != []
    assert all(mutant.answer != "-0" for mutant in mutants(["0"], 50))
