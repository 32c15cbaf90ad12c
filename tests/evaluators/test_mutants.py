"""Answers changed in one place so that they mean something else are not equal to what they were."""

import pytest

from atts.evaluators import equivalent

pytestmark = pytest.mark.checkout


def test_mutants_are_not_equal() -> None:
    """Signs, numbers, bounds, ends, order, units, qualifiers and more, of built-in answers."""
    from scripts.studies.mutants import BUILT_IN, mutants

    made = mutants(BUILT_IN, 1_500, seed=3)
    assert len(made) > 400
    assert len({mutant.kind for mutant in made}) > 10
    assert [mutant for mutant in made if equivalent(mutant.gold, mutant.answer).is_equal] == []


def test_the_generator_knows_equal_values() -> None:
    """A change that keeps the value is no mutant; what was made is told from what it was made of."""
    from scripts.studies.mutants import mutants

    assert mutants(["0"], 50) != []
    assert all(mutant.answer != "-0" for mutant in mutants(["0"], 50))
