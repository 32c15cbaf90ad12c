"""Plant faults in a copy of the source, one at a time, and report which faults the tests notice."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.mutants import BLIND_SPOTS, MUTANTS, SURVIVORS, Mutant

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300.0
_COPIED = (
    *("atts", "calibration", "evaluators", "pipelines", "tests", "examples", "docs", "scripts"),
    *("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "constraints.txt"),
)
Verdict = Literal["caught", "survived", "hung", "broken"]
"""Results of the tests on a fault.

caught: a test failed. survived: all tests passed. hung: the tests did not end in time. broken: the
tests could not run, or fail without the fault too.
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """One planted fault, its verdict, and the last output of its tests."""

    mutant: Mutant
    verdict: Verdict
    seconds: float
    words: str


def copy_tree(folder: Path) -> Path:
    """Copy everything that the tests need, so that the checkout itself is never changed."""
    tree = folder / "atts"
    tree.mkdir()
    for name in _COPIED:
        here = ROOT / name
        if here.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
            shutil.copytree(here, tree / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(here, tree / name)
    return tree


def run_tests(tree: Path, tests: str, seconds: float = SECONDS) -> tuple[Verdict, str]:
    """Run test files in the tree until the first test fails."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow"),
        *("-p", "no:cacheprovider"),
        *tests.split(),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "ATTS_SHARED_DATA": os.environ.get(
            "ATTS_SHARED_DATA", str(ROOT.parent / "shared" / "data")
        ),
    }
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hung", f"no end after {seconds:g} s"
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    words = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    last = words or (lines[-1] if lines else done.stderr[-200:])
    if "Timeout (>" in done.stdout:
        return "hung", last
    verdicts: dict[int, Verdict] = {0: "survived", 1: "caught"}
    return verdicts.get(done.returncode, "broken"), last


def plant(tree: Path, mutant: Mutant) -> str:
    """Put the fault into its file, and return the original text.

    :raises ValueError: the file does not contain the fault's line exactly once.
    """
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} does not have this line exactly once: {mutant.old}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    return text


def try_mutant(tree: Path, mutant: Mutant, seconds: float = SECONDS) -> Trial:
    """Plant a fault, run its tests, and remove the fault."""
    start = time.monotonic()
    before = plant(tree, mutant)
    try:
        verdict, words = run_tests(tree, mutant.tests, seconds)
    finally:
        (tree / mutant.file).write_text(before, encoding="utf-8")
    return Trial(mutant, verdict, time.monotonic() - start, words)


def wrongly_failing(tree: Path, mutants: Sequence[Mutant]) -> list[str]:
    """Return the tests that fail without any fault, because such tests would catch every fault."""
    files = sorted({name for mutant in mutants for name in mutant.tests.split()})
    verdict, words = run_tests(tree, " ".join(files), 3600.0)
    return [] if verdict == "survived" else [words]


def main() -> None:
    """Try the faults, print a line for each, and then the number of caught faults.

    :raises SystemExit: with 1 if a fault hung, broke, or survived without an accepted reason.
    """
    parser = argparse.ArgumentParser(prog="scripts/test mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults whose name contains one of these words")
    parser.add_argument("--sound", action="store_true", help="run the tests without a fault first")
    given = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not given.names or any(word in mutant.name for word in given.names)
    ]
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        if given.sound:
            for words in wrongly_failing(tree, chosen):
                sys.stdout.write(f"fails without a fault: {words}\n")
                raise SystemExit(1)
        for mutant in chosen:
            trial = try_mutant(tree, mutant)
            trials.append(trial)
            words = trial.words
            if trial.verdict == "survived":
                words = SURVIVORS.get(mutant.name, words)
            line = f"{trial.verdict:9}{trial.seconds:5.0f} s  {mutant.name}  {words}"
            sys.stdout.write(line.rstrip()[:240] + "\n")
            sys.stdout.flush()
    caught = sum(trial.verdict == "caught" for trial in trials)
    old = sum(trial.mutant in BLIND_SPOTS for trial in trials)
    sys.stdout.write(
        f"{caught} of {len(trials)} faults were caught, {old} of them old blind spots\n"
    )
    unexpected = [
        trial
        for trial in trials
        if trial.verdict != "caught"
        and not (trial.verdict == "survived" and trial.mutant.name in SURVIVORS)
    ]
    raise SystemExit(bool(unexpected))


if __name__ == "__main__":
    main()
