"""Tests of a series of studies: it runs in order, shows its progress, and repeats no finished study
after an interruption.
"""

from pathlib import Path
from typing import Any

import pytest

bench = pytest.importorskip("scripts.studies.bench", reason="needs a checkout")
parts = pytest.importorskip("scripts.studies.harness", reason="needs a checkout")

STEPS = [bench.Step(name, "quick", 60.0) for name in ("a", "b", "c")]


def _run(
    folder: Path | None, fails: str = "", steps: Any = STEPS, seed: int = 0
) -> tuple[list[str], list[str]]:
    """Run the series; return the steps that ran and the steps that failed.

    Steps named in `fails` fail; a step named in capitals raises an interrupt, as Ctrl-C does.
    """
    worked: list[str] = []

    def work(step: Any) -> bool:
        if step.name.upper() in fails:
            raise KeyboardInterrupt
        worked.append(step.name)
        return step.name not in fails

    try:
        done = parts.Parts(None if folder is None else folder / "progress.jsonl")
        failed = bench.run_all(steps, seed, done, work)
    except KeyboardInterrupt:
        failed = ["interrupted"]
    return worked, failed


def test_what_an_interrupted_series_has_done_is_kept(tmp_path: Path) -> None:
    """The same command continues the series; once all steps are done, the next call begins a new
    series.
    """
    assert _run(tmp_path, "B") == (["a"], ["interrupted"])
    assert _run(tmp_path, "C") == (["b"], ["interrupted"])
    assert _run(tmp_path) == (["c"], [])
    assert _run(tmp_path) == (["a", "b", "c"], [])


def test_what_failed_is_tried_again_and_the_rest_goes_on(tmp_path: Path) -> None:
    """A study that fails does not stop the others, and the next call repeats only this study."""
    assert _run(tmp_path, "b") == (["a", "b", "c"], ["b"])
    assert _run(tmp_path) == (["b"], [])


def test_another_series_takes_nothing_over(tmp_path: Path) -> None:
    """A series with other steps, another effort or another seed does not continue this series.
    Without a folder, no progress is remembered.
    """
    _run(tmp_path, "B")
    assert _run(tmp_path, "b", seed=1) == (["a", "b", "c"], ["b"])
    other = [bench.Step(step.name, "default", step.seconds) for step in STEPS]
    assert _run(tmp_path, steps=other)[0] == ["a", "b", "c"]
    assert [_run(None, "B"), _run(None)] == [(["a"], ["interrupted"]), (["a", "b", "c"], [])]


def test_all_and_quick_run_known_studies_each_once() -> None:
    """The series `all` and `quick` run each study at most once; `all` leaves out only the listed
    studies, and its plan fits into an hour.
    """
    everything = bench.planned(["all"], "default")
    quick = bench.planned(["quick"], "quick")
    names = [step.name for step in everything]
    assert len(names) == len(set(names))
    assert set(names) == set(bench.STUDIES) - {
        "pipelines",
        "gpu",
        "blocks",
        "blocks-real",
        "distil",
        "field",
        "hosted",
        "judges",
        "real-pair",
        "real-pair-losses",
        "real-speed",
        "serve-soak",
    }
    assert sum(step.seconds for step in everything) < 60 * 60
    assert sum(step.seconds for step in quick) < 5 * 60
    assert {step.effort for step in bench.planned(["all"], "full")} == {"full"}
