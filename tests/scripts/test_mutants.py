"""Tests of the script that plants faults and reports which of them the tests find."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.studies.mutants import ROOT, copy_tree, plant, try_mutant
from tests.mutants import MUTANTS, Mutant

pytestmark = pytest.mark.checkout


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_fault_fits_its_file_and_names_existing_tests(mutant: Mutant) -> None:
    """The old line of each planted fault occurs once in its file, the new line parses there, and
    the listed tests exist.
    """
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    files = [name.partition("::")[0] for name in mutant.tests.split()]
    assert all((ROOT / name).exists() for name in files)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a small project with one module and its test."""
    (tmp_path / "module.py").write_text("def double(number):\n    return 2 * number\n")
    words = "from module import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
    (tmp_path / "test_module.py").write_text(words)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "tests", "seconds", "verdict"),
    [
        ("return 3 * number", "test_module.py", 60.0, "caught"),
        ("return number * 2", "test_module.py", 60.0, "survived"),
        ("while True: number += 1", "test_module.py", 5.0, "hung"),
        ("return 3 * number", "test_nothing.py", 60.0, "broken"),
    ],
)
def test_faults_are_reported_as_caught_survived_or_hung(
    tree: Path, line: str, tests: str, seconds: float, verdict: str
) -> None:
    """The script reports each fault as caught, survived or hung, and the source is unchanged
    afterwards.
    """
    before = (tree / "module.py").read_text()
    mutant = Mutant("one", "module.py", "return 2 * number", line, tests)
    trial = try_mutant(tree, mutant, seconds)
    assert trial.verdict == verdict, trial.words
    assert (tree / "module.py").read_text() == before


def test_a_fault_without_its_place_is_not_tried(tree: Path) -> None:
    """A fault whose old line is no longer in its file is reported as out of date."""
    with pytest.raises(ValueError, match="exactly once"):
        plant(tree, Mutant("one", "module.py", "return 5", "return 6", "test_module.py"))


def test_the_copy_is_what_the_tests_need(tmp_path: Path) -> None:
    """The copy has the four source folders, the tests and the settings, and the links in atts/
    point into the copy.
    """
    tree = copy_tree(tmp_path)
    assert (tree / "atts" / "pipelines" / "votes.py").resolve() == tree / "pipelines" / "votes.py"
    assert (tree / "pyproject.toml").is_file()
