"""The run that plants faults: each still has its place, and what is seen is told from what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.studies.mutants import ROOT, copy_tree, plant, try_mutant
from tests.mutants import MUTANTS, Mutant

pytestmark = pytest.mark.checkout
VOTES = next(mutant for mutant in MUTANTS if mutant.name == "weighted votes decided by counts")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_has_its_place_and_its_tests(mutant: Mutant) -> None:
    """The line stands once in its file, the other line parses there, and the tests exist."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    files = [name.partition("::")[0] for name in mutant.tests.split()]
    assert all((ROOT / name).exists() for name in files)


def test_faults_are_told_from_changes_that_nobody_sees(tmp_path: Path) -> None:
    """A planted fault is caught, a harmless change survives, and the source is whole afterwards."""
    tree = copy_tree(tmp_path)
    file = tree / VOTES.file
    before = file.read_text(encoding="utf-8")
    caught = try_mutant(tree, VOTES)
    assert caught.verdict == "caught", caught.words
    assert "test_votes.py" in caught.words
    assert file.read_text(encoding="utf-8") == before
    harmless = VOTES._replace(new=f"{VOTES.old}  # the heaviest first")
    assert try_mutant(tree, harmless).verdict == "survived"
    hanging = VOTES._replace(new=f"while True: pass\n    {VOTES.old}")
    assert try_mutant(tree, hanging, seconds=15.0).verdict == "hung"
    assert try_mutant(tree, VOTES._replace(tests="tests/no_such_file.py")).verdict == "broken"
    with pytest.raises(ValueError, match="exactly once"):
        plant(tree, VOTES._replace(old="a line that is not there"))
